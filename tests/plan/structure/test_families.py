"""Models of transformers, built tiny on the meta device: every projection of a block has its role.

The block shown is the last one: q k v o is attention (qkv: one projection), g u d a gated MLP, u d a plain one, gu one
projection for gate and up, r a router, l a projection that is none of these (of state spaces, latent attention, gates
of attention). Capital letters are experts, all in one tensor.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from bitplan import describe
from bitplan.base.errors import PlanError
from bitplan.plan.structure.families import has_no_packed_layer, is_packed_transposed
from bitplan.plan.structure.model_view import LinearUse, ModelView

SIZES: dict[str, object] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 16),
    **dict.fromkeys(("v_head_dim", "rotary_dim"), 16),
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "max_source_positions": 16,
    "max_target_positions": 32,
}
LETTERS = {
    "query": "q",
    "key": "k",
    "value": "v",
    "qkv": "qkv",
    "key_value": "kv",
    "attention_output": "o",
    "gate": "g",
    "up": "u",
    "gate_up": "gu",
    "down": "d",
    "router": "r",
    "linear": "l",
}
LLAMA = "q k v o g u d silu"
# model type -> the projections of its last block, and what joins gate and up
CAUSAL = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "granite", "cohere", "smollm3"), LLAMA),
    **dict.fromkeys(("stablelm", "helium", "seed_oss", "exaone4", "ernie4_5", "hunyuan_v1_dense"), LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "q k v o g u d gelu_tanh"),
    **dict.fromkeys(("phi3",), "qkv o gu d silu"),
    **dict.fromkeys(("glm", "glm4"), "q k v o gu d silu"),
    **dict.fromkeys(("gpt2", "openai-gpt", "bloom"), "qkv o u d gelu_tanh"),
    **dict.fromkeys(("gpt_neox", "falcon", "mpt"), "qkv o u d gelu"),
    **dict.fromkeys(("gptj", "phi", "starcoder2"), "q k v o u d gelu_tanh"),
    **dict.fromkeys(("biogpt", "xglm"), "q k v o u d gelu"),
    **dict.fromkeys(("opt", "ctrl"), "q k v o u d relu"),
    **dict.fromkeys(("nemotron", "arcee", "nanochat"), "q k v o u d relu_squared"),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "phimoe", "granitemoe"), "q k v o r GU D silu"),
    "gpt_oss": "q k v o r GU D gpt_oss",
    "deepseek_v3": "l q k kv o r GU D g u d silu",
    "mamba": "l l l",
    "falcon_mamba": "l l l",
}
OTHERS = {
    **dict.fromkeys(("bert", "roberta", "electra", "distilbert", "vit", "dinov2"), "q k v o u d gelu"),
    **dict.fromkeys(("clip_vision_model", "clip_text_model"), "q k v o u d quick_gelu"),
    **dict.fromkeys(("modernbert",), "qkv o gu d gelu"),
    "albert": "q k v o u d gelu_tanh",
    "t5": "q k v o q k v o u d relu",
    "bart": "q k v o q k v o u d gelu",
    "whisper": "q k v o q k v o u d gelu",
}


def build(kind: str, auto: type) -> torch.nn.Module:
    config = type(transformers.AutoConfig.for_model(kind))
    known = config.__dataclass_fields__
    with torch.device("meta"):
        return auto.from_config(config(**{key: value for key, value in SIZES.items() if key in known}))


def spelled(view: ModelView) -> str:
    block = view.blocks()[-1].blocks[-1]

    def letters(linear: LinearUse) -> str:
        return LETTERS[linear.role].upper() if linear.experts else LETTERS[linear.role]

    inside = list(dict.fromkeys(linear for linear in view.linears if view.block_of(linear.path) == block))
    weights = {linear.weight: letters(linear) for linear in inside}
    mlps = (*view.gated_mlps(), *view.plain_mlps())
    names = {mlp.activation: None for mlp in mlps if view.block_of(mlp.down.path) == block}
    return " ".join([*weights.values(), *names])


@pytest.mark.parametrize("kind", CAUSAL)
def test_decoder(kind: str) -> None:
    view = describe(build(kind, transformers.AutoModelForCausalLM))
    assert spelled(view) == CAUSAL[kind]
    assert not view.unknown
    assert [linear.role for linear in view.linears if not view.block_of(linear.path)] == ["head"]
    assert len(view.blocks()) == 1
    assert len(view.blocks()[0].blocks) == 2


@pytest.mark.parametrize("kind", OTHERS)
def test_encoder_and_others(kind: str) -> None:
    view = describe(build(kind, transformers.AutoModel))
    expected = OTHERS[kind]
    assert spelled(view) in (expected, expected.replace("q k v", "k v q"))  # by transformers' version
    assert not view.unknown


@pytest.mark.parametrize("kind", ["gpt2", "openai-gpt", "aria_text", "llama4_text", "gpt_oss", "llama", "mixtral"])
def test_the_table_has_the_matrices_that_lie_turned(kind: str) -> None:
    view = describe(build(kind, transformers.AutoModelForCausalLM))
    names = [linear.weight for linear in view.linears]
    in_table = {name for name in names if has_no_packed_layer(name, [kind]) or is_packed_transposed(name, [kind])}
    assert in_table == {linear.weight for linear in view.linears if linear.is_columns}


# Forwards with sizes in tensors, matrices of rank 3, bfloat16 alone; (linears, blocks)
ODD = {
    "longformer": ({"attention_window": 4}, 14, 2),
    "led": (
        {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
        33,
        4,
    ),
    "ibert": ({}, 14, 2),
    "perceiver": (
        {"d_latents": 64, "num_latents": 8, "qk_channels": 32, "v_channels": 64, "num_self_attends_per_block": 2},
        25,
        2,
    ),
    "xlnet": ({"d_inner": 128}, 5, 2),
}


def odd(kind: str, **more: object) -> torch.nn.Module:
    config = type(transformers.AutoConfig.for_model(kind))
    sizes = {key: value for key, value in SIZES.items() if key in config.__dataclass_fields__} | more
    auto = transformers.AutoModelForSeq2SeqLM if kind == "led" else transformers.AutoModelForMaskedLM
    auto = transformers.AutoModelForCausalLM if kind == "xlnet" else auto
    model: torch.nn.Module = auto.from_config(config(**sizes)).eval()
    return model


@pytest.mark.parametrize("kind", ODD)
def test_models_that_are_seldom_are_seen(kind: str) -> None:
    more, linears, blocks = ODD[kind]
    model = odd(kind, **more)
    view = describe(model.bfloat16() if kind == "xlnet" else model)
    assert len(view.linears) == linears
    assert sum(len(stack.blocks) for stack in view.blocks()) == blocks
    assert not view.unknown
    assert not any(linear.experts for linear in view.linears)


def test_a_forward_that_needs_numbers_is_refused_with_what_can_be_done() -> None:
    with pytest.raises(PlanError, match=r"asks for numbers.*; its linear layers can be packed and put"):
        describe(odd("ibert", quant_mode=True))
