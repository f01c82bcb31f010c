"""Headers of gpt-oss, llama and mixtral checkpoints of any size, as their files have them."""

from __future__ import annotations

from bitplan.files.tensor_file import TensorSpec


def header(shape: tuple[int, ...], dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec.of("", shape, dtype=dtype)


def shapes(headers: dict[str, TensorSpec]) -> dict[str, tuple[int, ...]]:
    return {name: item.shape for name, item in headers.items()}


def gpt_oss_openai(
    layers: int = 24, experts: int = 32, hidden: int = 2880, middle: int = 2880
) -> dict[str, TensorSpec]:
    result = {"embedding.weight": header((201088, hidden))}
    for layer in range(layers):
        own = {
            "attn.norm.scale": header((hidden,)),
            "attn.qkv.weight": header((5120, hidden)),
            "attn.qkv.bias": header((5120,)),
            "attn.sinks": header((64,)),
            "attn.out.weight": header((hidden, 4096)),
            "attn.out.bias": header((hidden,)),
            "mlp.norm.scale": header((hidden,)),
            "mlp.gate.weight": header((experts, hidden)),
            "mlp.gate.bias": header((experts,)),
            "mlp.mlp1_weight.blocks": header((experts, 2 * middle, hidden // 32, 16), "uint8"),
            "mlp.mlp1_weight.scales": header((experts, 2 * middle, hidden // 32), "uint8"),
            "mlp.mlp1_bias": header((experts, 2 * middle)),
            "mlp.mlp2_weight.blocks": header((experts, hidden, middle // 32, 16), "uint8"),
            "mlp.mlp2_weight.scales": header((experts, hidden, middle // 32), "uint8"),
            "mlp.mlp2_bias": header((experts, hidden)),
        }
        result |= {f"block.{layer}.{name}": item for name, item in own.items()}
    return result | {"norm.scale": header((hidden,)), "unembedding.weight": header((201088, hidden))}


def gpt_oss_hugging_face(layers: int = 24, experts: int = 32, hidden: int = 2880) -> dict[str, TensorSpec]:
    result = {"model.embed_tokens.weight": header((201088, hidden))}
    for layer in range(layers):
        own = {
            "input_layernorm.weight": header((hidden,)),
            "post_attention_layernorm.weight": header((hidden,)),
            "self_attn.sinks": header((64,)),
            "mlp.router.weight": header((experts, hidden)),
            "mlp.router.bias": header((experts,)),
            "mlp.experts.gate_up_proj_blocks": header((experts, 2 * hidden, hidden // 32, 16), "uint8"),
            "mlp.experts.gate_up_proj_scales": header((experts, 2 * hidden, hidden // 32), "uint8"),
            "mlp.experts.gate_up_proj_bias": header((experts, 2 * hidden)),
            "mlp.experts.down_proj_blocks": header((experts, hidden, hidden // 32, 16), "uint8"),
            "mlp.experts.down_proj_scales": header((experts, hidden, hidden // 32), "uint8"),
            "mlp.experts.down_proj_bias": header((experts, hidden)),
        }
        for part, (rows, cols) in {
            "q": (4096, hidden),
            "k": (512, hidden),
            "v": (512, hidden),
            "o": (hidden, 4096),
        }.items():
            own[f"self_attn.{part}_proj.weight"] = header((rows, cols))
            own[f"self_attn.{part}_proj.bias"] = header((rows,))
        result |= {f"model.layers.{layer}.{name}": item for name, item in own.items()}
    return result | {"model.norm.weight": header((hidden,)), "lm_head.weight": header((201088, hidden))}


def llama(layers: int = 2, hidden: int = 576, middle: int = 1536) -> dict[str, TensorSpec]:
    result = {"model.embed_tokens.weight": header((512, hidden)), "model.norm.weight": header((hidden,))}
    for layer in range(layers):
        own = {f"self_attn.{part}_proj.weight": header((hidden, hidden)) for part in "qkvo"}
        own |= {f"{norm}_layernorm.weight": header((hidden,)) for norm in ("input", "post_attention")}
        own |= {f"mlp.{part}_proj.weight": header((middle, hidden)) for part in ("gate", "up")}
        own["mlp.down_proj.weight"] = header((hidden, middle))
        result |= {f"model.layers.{layer}.{name}": item for name, item in own.items()}
    return result


def mixtral(layers: int = 2, experts: int = 8, hidden: int = 64, middle: int = 96) -> dict[str, TensorSpec]:
    result = {name: item for name, item in llama(layers, hidden, middle).items() if ".mlp." not in name}
    for layer in range(layers):
        moe = f"model.layers.{layer}.block_sparse_moe"
        result[f"{moe}.gate.weight"] = header((experts, hidden))
        for expert in range(experts):
            result |= {f"{moe}.experts.{expert}.{name}.weight": header((middle, hidden)) for name in ("w1", "w3")}
            result[f"{moe}.experts.{expert}.w2.weight"] = header((hidden, middle))
    return result | {"lm_head.weight": header((512, hidden))}
