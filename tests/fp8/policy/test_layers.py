"""Layers of real models: shapes from public config.json values, divided over TP, EP and ETP, and what cannot be."""

from __future__ import annotations

import json

import pytest

from bitplan.fp8.policy.layers import Layer, Parallel, bench_cases, load_model_parts, local_layers, model_parts
from bitplan.fp8.policy.policy import should_use_fp8
from bitplan.fp8.policy.report import Row
from bitplan.fp8.policy.vocabulary import ModelConfigError
from tests.fp8.policy.test_policy import THRESHOLDS

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
}  # fmt: skip
QWEN25_72B = {
    "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
MIXTRAL_8X7B = LLAMA_8B | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
QWEN15_MOE = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
QWEN25_VL_7B = {  # the sizes of its text model stand at the top
    "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "out_hidden_size": 3584, "patch_size": 14, "model_type": "qwen2_5_vl",
    },
}  # fmt: skip
QWEN3_VL_235B = {
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "model_type": "qwen3_vl_moe_text", "hidden_size": 4096, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "vision_config": {
        "model_type": "qwen3_vl_moe", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
    },
}  # fmt: skip


def shapes(config, part=None, **parallel):
    """(kind, name) and role to local shape, in how many blocks, and the experts on one GPU."""
    layers = local_layers(model_parts(config), Parallel(**parallel))
    return [
        (each.kind, each.name, each.shape, each.blocks, each.num_gemms) for each in layers if part in (None, each.part)
    ]


def test_llama_8b():
    assert shapes(LLAMA_8B) == [
        ("layernorm_column", "qkv", (6144, 4096), 32, None),
        ("row", "proj", (4096, 4096), 32, None),
        ("layernorm_column", "fc1", (28672, 4096), 32, None),
        ("row", "fc2", (4096, 14336), 32, None),
    ]


@pytest.mark.parametrize(
    ("tp", "expected"),
    [  # 2.1.1: for tp in 1 2 4, qwen2_5_72b
        (1, [(10240, 8192), (8192, 8192), (59136, 8192), (8192, 29568)]),
        (2, [(5120, 8192), (8192, 4096), (29568, 8192), (8192, 14784)]),
        (4, [(2560, 8192), (8192, 2048), (14784, 8192), (8192, 7392)]),
    ],
)
def test_qwen25_72b_at_each_tensor_parallel_size(tp, expected):
    assert [shape for _, _, shape, _, _ in shapes(QWEN25_72B, tp=tp)] == expected


def test_mixtral():
    assert shapes(MIXTRAL_8X7B, ep=4, etp=2) == [
        ("layernorm_column", "qkv", (6144, 4096), 32, None),
        ("row", "proj", (4096, 4096), 32, None),
        ("column_grouped", "fc1", (14336, 4096), 32, 2),
        ("row_grouped", "fc2", (4096, 7168), 32, 2),
    ]


def test_qwen3_moe_has_a_head_size_of_its_own():
    assert shapes(QWEN3_30B, tp=2, ep=8, etp=2) == [
        ("layernorm_column", "qkv", (2560, 2048), 48, None),
        ("row", "proj", (2048, 2048), 48, None),
        ("column_grouped", "fc1", (768, 2048), 48, 16),
        ("row_grouped", "fc2", (2048, 384), 48, 16),
    ]


def test_qwen15_moe_shared_expert_and_sparse_steps():
    assert shapes(QWEN15_MOE)[2:] == [
        ("column", "fc1", (11264, 2048), 24, None),
        ("row", "fc2", (2048, 5632), 24, None),
        ("column_grouped", "fc1", (2816, 2048), 24, 60),
        ("row_grouped", "fc2", (2048, 1408), 24, 60),
    ]
    mixed = shapes(QWEN15_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]})
    assert [(name, kind, blocks) for kind, name, _, blocks, _ in mixed[2:]] == [
        ("fc1", "layernorm_column", 13), ("fc2", "row", 13), ("fc1", "column", 11), ("fc2", "row", 11),
        ("fc1", "column_grouped", 11), ("fc2", "row_grouped", 11),
    ]  # fmt: skip
    dense = QWEN15_MOE | {"mlp_only_layers": list(range(24))}
    assert [name for _, name, _, _, _ in shapes(dense)] == ["qkv", "proj", "fc1", "fc2"]


def test_deepseek_v3():
    """2.1.2: TP=1, EP=4; MLA (3.2: "TELinear: duplicated: MLA down-projection"), shared expert, dense first blocks."""
    assert shapes(DEEPSEEK_V3, ep=4) == [
        ("duplicated", "q_down_proj", (1536, 7168), 61, None),
        ("layernorm_column", "q_up_proj", (24576, 1536), 61, None),
        ("duplicated", "kv_down_proj", (576, 7168), 61, None),
        ("layernorm_column", "kv_up_proj", (32768, 512), 61, None),
        ("row", "proj", (7168, 16384), 61, None),
        ("layernorm_column", "fc1", (36864, 7168), 3, None),
        ("row", "fc2", (7168, 18432), 3, None),
        ("column", "fc1", (4096, 7168), 58, None),
        ("row", "fc2", (7168, 2048), 58, None),
        ("column_grouped", "fc1", (4096, 7168), 58, 64),
        ("row_grouped", "fc2", (7168, 2048), 58, 64),
    ]
    two = dict.fromkeys([name for _, name, _, _, _ in shapes(DEEPSEEK_V3, tp=2, ep=4)])
    assert shapes(DEEPSEEK_V3, tp=2, ep=4)[0][2] == (1536, 7168)  # duplicated: whole on every GPU
    assert shapes(DEEPSEEK_V3, tp=2, ep=4)[1][2] == (12288, 1536)
    assert list(two)[:2] == ["q_down_proj", "q_up_proj"]


def test_deepseek_v2_lite_has_no_query_rank():
    result = shapes(DEEPSEEK_V2_LITE)
    assert result[0] == ("column", "q_proj", (3072, 2048), 27, None)
    assert ("column", "fc1", (5632, 2048), 26, None) in result  # two shared experts of 1408, gate and up


def test_vlm_gives_two_parts():
    """2.1.3: "automatically extracts both ViT and LLM components from VLM configs"."""
    assert shapes(QWEN25_VL_7B, "vit") == [
        ("layernorm_column", "qkv", (3840, 1280), 32, None),
        ("row", "proj", (1280, 1280), 32, None),
        ("layernorm_column", "fc1", (6840, 1280), 32, None),  # gated
        ("row", "fc2", (1280, 3420), 32, None),
    ]
    assert shapes(QWEN25_VL_7B, "llm")[0] == ("layernorm_column", "qkv", (4608, 3584), 28, None)
    assert shapes(QWEN3_VL_235B, "vit", ep=8)[2] == ("layernorm_column", "fc1", (4304, 1152), 27, None)  # not gated
    assert shapes(QWEN3_VL_235B, "llm", ep=8)[-1] == ("row_grouped", "fc2", (4096, 1536), 94, 16)


def test_older_vision_towers():
    qwen2_vl = QWEN25_VL_7B | {
        "model_type": "qwen2_vl",
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 3584},
    }
    assert shapes(qwen2_vl, "vit")[2][2] == (5120, 1280)
    qwen2_vl["vision_config"]["mlp_ratio"] = 0.5
    assert shapes(qwen2_vl, "vit")[2][2] == (640, 1280)
    clip = {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
    }
    llava = {"model_type": "llava", "text_config": LLAMA_8B, "vision_config": clip | {"num_hidden_layers": 24}}
    assert shapes(llava, "vit")[0] == ("layernorm_column", "qkv", (3072, 1024), 24, None)
    assert shapes(llava, "llm") == shapes(LLAMA_8B)
    with pytest.raises(ModelConfigError, match=r"vision_config.num_hidden_layers is missing; it must be an integer"):
        model_parts(llava | {"vision_config": clip})


@pytest.mark.parametrize(
    ("config", "parallel", "message"),
    [
        (LLAMA_8B, {"tp": 3}, "num_attention_heads is 32, which tp 3 does not divide; choose tp from 1, 2, 4, 8"),
        (LLAMA_8B, {"tp": 16}, "num_key_value_heads is 8, which tp 16 does not divide; choose tp from 1, 2, 4, 8"),
        (LLAMA_8B, {"ep": 2}, "ep 2, etp 1 were asked for, and the model has no experts"),
        (LLAMA_8B | {"intermediate_size": 14338}, {"tp": 4}, "intermediate_size is 14338, which tp 4"),
        (MIXTRAL_8X7B, {"ep": 3}, "num_local_experts is 8, which ep 3"),
        (QWEN15_MOE, {"ep": 8}, "num_experts is 60, which ep 8 does not divide; choose ep from 1, 2, 4"),
        (QWEN3_30B, {"etp": 7}, "moe_intermediate_size is 768, which etp 7"),
        (DEEPSEEK_V3, {"tp": 3}, "num_attention_heads is 128"),
        (DEEPSEEK_V3, {"ep": 7}, "n_routed_experts is 256, which ep 7"),
        (QWEN25_VL_7B, {"tp": 8}, "num_attention_heads is 28, which tp 8"),
        (QWEN3_VL_235B, {"tp": 32}, "text_config.num_key_value_heads is 4, which tp 32"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_names_its_key(config, parallel, message):
    with pytest.raises(ModelConfigError, match=message) as caught:
        local_layers(model_parts(config, where="c.json"), Parallel(**parallel))
    assert str(caught.value).startswith("c.json: ")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "must be an object"),
        ({}, "model_type null is not known"),
        ({"model_type": "lama"}, "model_type \"lama\" is not known; known are .*did you mean 'llama'"),
        ({"model_type": "llama"}, "num_hidden_layers is missing; it must be an integer from 1"),
        (LLAMA_8B | {"hidden_size": "4096"}, 'hidden_size must be an integer from 1, got "4096"'),
        (LLAMA_8B | {"num_attention_heads": 0}, "num_attention_heads must be an integer from 1, got 0"),
        (LLAMA_8B | {"num_attention_heads": 30}, "hidden_size 4096 is not a multiple of the 30 heads"),
        (QWEN3_30B | {"mlp_only_layers": 3}, "mlp_only_layers must be a list of block numbers"),
        (QWEN25_VL_7B | {"vision_config": 3}, "vision_config must be an object"),
        (QWEN25_VL_7B | {"model_type": "new", "text_config": LLAMA_8B, "vision_config": {}}, "vision_config.model"),
    ],
)  # fmt: skip
def test_wrong_configs(config, message):
    with pytest.raises(ModelConfigError, match=message):
        model_parts(config)


def test_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert load_model_parts(tmp_path) == load_model_parts(tmp_path / "config.json")
    with pytest.raises(
        ModelConfigError, match=r"none: no such folder; give a model's config.json, the folder that has"
    ):
        load_model_parts(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(ModelConfigError, match=r"notes.txt: is neither; give a model's config.json"):
        load_model_parts(tmp_path / "notes.txt")
    with pytest.raises(ModelConfigError, match="tp must be an integer from 1, got 0"):
        Parallel(0)


def test_tokens_and_cases():
    """2.2: the token count of experts is seq_length x micro_batch_size x moe_router_topk."""
    layers = local_layers(model_parts(DEEPSEEK_V3), Parallel(ep=4))
    by_kind = {layer.kind: layer for layer in layers}
    assert by_kind["row"].tokens(4096, 2) == 8192
    assert by_kind["row_grouped"].tokens(4096, 2) == 65536
    cases = bench_cases(layers, ((1024, 2), (2048, 1), (512, 1)), "blockwise")
    assert len(cases) == len(layers) * 2  # 1024x2 and 2048x1 are one count
    kv_down = [case for case in cases if case.layer.name == "kv_down_proj"]
    assert [case.tokens for case in kv_down] == [512, 2048]
    assert kv_down[0].obstacle == "out_features 576 is not a multiple of 128, which blockwise needs"
    assert not any(case.obstacle for case in bench_cases(layers, ((512, 1),), "rowwise"))


def test_a_layer_is_a_question_and_a_row():
    for layer in local_layers(model_parts(DEEPSEEK_V3), Parallel(ep=4)):
        assert isinstance(layer, Layer)
        asked = layer.question()
        more = {"moe_router_topk": layer.moe_router_topk} if layer.num_gemms else {}
        winners = {("row", "proj"), ("row", "fc2"), ("layernorm_column", "fc1")}
        expected = layer.num_gemms == 64 or (layer.kind, layer.name) in winners
        assert should_use_fp8(THRESHOLDS, num_tokens=10**6, **asked, **more).use_fp8 is expected
        how = {"gemm": "module", "timing": "graph", "precision": "fp8", "status": "ok", "samples_ms": (1.0,)}
        assert Row(tokens=layer.tokens(512, 1), **how, **asked).shape == layer.shape
