"""LoongForge's YAML and its TE_LAYER_PERF_* variables."""

from __future__ import annotations

import pytest

from bitplan.fp8.bench.layer_bench import AUTO_SWEEP, BenchOptions, BenchOptionsError, parse_sweep
from bitplan.fp8.loongforge import Fp8Keys, read_yaml_model
from bitplan.fp8.policy.layers import Parallel, local_layers, model_parts
from bitplan.fp8.policy.vocabulary import ModelConfigError
from tests.fp8.policy.test_layers import DEEPSEEK_V3, QWEN3_VL_235B, QWEN25_72B

QWEN = """
num_layers: 80
hidden_size: 8192
ffn_hidden_size: 29568
num_attention_heads: 64
group_query_attention: true
num_query_groups: 8
normalization: "RMSNorm"
swiglu: true
kv_channels: null
num_experts: null
"""
DEEPSEEK = """
num_layers: 61
hidden_size: 7168
ffn_hidden_size: 18432
num_attention_heads: 128
num_experts: 256
moe_ffn_hidden_size: 2048
moe_shared_expert_intermediate_size: 2048
moe_router_topk: 8
multi_latent_attention: true
qk_layernorm: true
q_lora_rank: 1536
kv_lora_rank: 512
qk_head_dim: 128
qk_pos_emb_head_dim: 64
v_head_dim: 128
moe_layer_freq: ${moe_freq:"[0]*3+[1]*58"}
swiglu: true
"""
# Seed 2.3.1, the example with its comment and class.
SELECTIVE = """
# Example: configs/models/deepseek3/deepseek_v3_fp8_sel.yaml
_target_: loongforge.models.foundation.DeepseekConfig
defaults:
  - deepseek_v3
  - _self_

fp8: "e4m3"
fp8_recipe: "blockwise"
fp8_param: True
selective_fp8: true
fp8_dynamic_policy_path: "configs/models/deepseek3/fp8_policy_deepseek_v3.json"
"""
VIT = """
num_layers: 27
hidden_size: 1152
kv_channels: 72
ffn_hidden_size: 4304
num_attention_heads: 16
group_query_attention: false
swiglu: false
model_type: "qwen3_vit"
"""
LLM_235B = """
num_layers: 94
hidden_size: 4096
ffn_hidden_size: 12288
num_attention_heads: 64
num_query_groups: 4
kv_channels: 128
num_experts: 128
moe_ffn_hidden_size: 1536
moe_router_topk: 8
swiglu: true
"""
# Seed 2.3.2, under the defaults that bring the sizes in.
VLM = """
defaults:
  - ../image_encoder@model.image_encoder: qwen3_vit
  - ../qwen3@model.foundation: qwen3_235b_a22b
  - _self_
model:
  foundation:
    fp8: "e4m3"
    fp8_recipe: "blockwise"
    fp8_param: True
    selective_fp8: true
    fp8_dynamic_policy_path: "configs/models/qwen3_vl/fp8_policy_235b.json"
  image_encoder:
    fp8: "e4m3"
    fp8_recipe: "blockwise"
    fp8_param: True
    selective_fp8: true
    fp8_dynamic_policy_path: "configs/models/qwen3_vl/fp8_policy_qwen3_vit.json"
    fp8_dynamic_num_tokens: 5184
"""
FILES = {"deepseek_v3": DEEPSEEK, "../image_encoder/qwen3_vit": VIT, "../qwen3/qwen3_235b_a22b": LLM_235B}


def layers(parts, **parallel):
    result = local_layers(parts, Parallel(**parallel))
    return [(each.part, each.kind, each.name, each.shape, each.blocks, each.num_gemms) for each in result]


def test_yaml_and_config_json_give_the_same_layers():
    assert layers(read_yaml_model(QWEN).parts, tp=2) == layers(model_parts(QWEN25_72B), tp=2)
    assert layers(read_yaml_model(DEEPSEEK).parts, ep=4) == layers(model_parts(DEEPSEEK_V3), ep=4)
    vlm = read_yaml_model(VLM, open_base=FILES.__getitem__)
    assert layers(vlm.parts, ep=8) == layers(model_parts(QWEN3_VL_235B), ep=8)


def test_a_standalone_model():
    result = read_yaml_model(SELECTIVE, open_base=FILES.__getitem__)
    path = "configs/models/deepseek3/fp8_policy_deepseek_v3.json"
    assert result.options == {"llm": Fp8Keys("e4m3", "blockwise", True, True, path)}
    assert result.parts == read_yaml_model(DEEPSEEK).parts


def test_a_vision_language_model():
    result = read_yaml_model(VLM, open_base=FILES.__getitem__)
    assert result.options["llm"].fp8_dynamic_num_tokens is None
    assert result.options["vit"].fp8_dynamic_num_tokens == 5184
    assert result.options["vit"].fp8_dynamic_policy_path.endswith("fp8_policy_qwen3_vit.json")


def test_an_image_encoder_alone():
    assert [part.part for part in read_yaml_model(VIT).parts] == ["vit"]
    assert read_yaml_model(VIT).options == {"vit": Fp8Keys()}


def test_a_size_that_is_missing_is_named():
    with pytest.raises(ModelConfigError, match="moe_router_topk is missing; it must be an integer from 1"):
        read_yaml_model(DEEPSEEK.replace("moe_router_topk: 8\n", ""))


def test_parallel_sizes():
    """2.1.4: TP, EP and ETP default to the model's; world_size = tp * ep in 2.1.2, so etp follows tp."""
    plain = read_yaml_model(DEEPSEEK)
    assert plain.parallel() == Parallel(1, 1, 1)
    assert plain.parallel(tp=2, ep=4) == Parallel(2, 4, 2)
    sizes = "tensor_model_parallel_size: 4\nexpert_model_parallel_size: 8\nexpert_tensor_parallel_size: 1\n"
    assert read_yaml_model(DEEPSEEK + sizes).parallel() == Parallel(4, 8, 1)
    assert read_yaml_model(DEEPSEEK + sizes).parallel(tp=2, etp=2) == Parallel(2, 8, 2)
    assert read_yaml_model(QWEN).parallel(tp=8) == Parallel(8, 1, 1)


@pytest.mark.parametrize(
    ("freq", "dense"), [("1", 0), ("2", 30), ("'[0]*3+[1]*58'", 3), (f"{[0] * 61}", 61), ('"([0]*1+[1]*60)"', 1)]
)
def test_which_blocks_have_experts(freq, dense):
    text = DEEPSEEK.replace('${moe_freq:"[0]*3+[1]*58"}', freq)
    assert read_yaml_model(text).parts[0].dense_blocks == dense


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("- a\n", "must be a mapping of keys"),
        ("a: [1\n", "not valid YAML"),
        ("a: 1\nb: {c: 1, c: 2}\n", "line 2: key 'c' appears twice"),
        (QWEN + "fp8_recipie: blockwise\n", "unknown key fp8_recipie; did you mean 'fp8_recipe'"),
        (QWEN + "fp8: e4m4\n", "fp8 must be one of 'e4m3', 'hybrid', got \"e4m4\""),
        (QWEN + "fp8_param: 1\n", "fp8_param must be true or false, got 1"),
        (QWEN + "fp8_dynamic_num_tokens: many\n", "fp8_dynamic_num_tokens must be an integer from 1"),
        (QWEN + "selective_fp8: true\n", "fp8 is not set"),
        (QWEN + "selective_fp8: true\nfp8: e4m3\n", "add fp8_dynamic_policy_path"),
        (QWEN.replace("8192", "${size}"), "hidden_size must be an integer from 1, got"),
        (DEEPSEEK.replace("*58", "*57"), r"moe_layer_freq must be a count, or 61 times 0 or 1"),
        (DEEPSEEK.replace("[0]*3", "exit()"), "moe_layer_freq must be a count"),
        (SELECTIVE, "defaults name 'deepseek_v3'; give open_base"),
        ("defaults: 3\n", "defaults must be a list"),
        ("defaults:\n  - {a: b, c: d}\n", "an item of defaults must be NAME"),
        ("model: {foundation: 3}\n", "model.foundation must be an object"),
        ("!!python/object/apply:os.system ['true']\n", "line 1: the tag !!python/object/apply:os.system is not"),
        (QWEN.replace("80", "1:30"), 'num_layers must be an integer from 1, got "1:30"'),
        (DEEPSEEK.replace('${moe_freq:"[0]*3+[1]*58"}', "'${a:" + 9999 * " " + "x'"), "moe_layer_freq must be"),
    ],
)  # fmt: skip
def test_wrong_yaml(text, message):
    with pytest.raises(ModelConfigError, match=message):
        read_yaml_model(text, where="m.yaml")


def test_a_file_that_takes_itself_in():
    with pytest.raises(ModelConfigError, match="more than 8 files deep"):
        read_yaml_model("defaults: [me]\n", open_base=lambda _: "defaults: [me]\n")


def test_files_that_take_in_many():
    fan = "defaults: [" + ", ".join(["me"] * 20) + "]\n"
    with pytest.raises(ModelConfigError, match=r"more than 32 files|more than 8 files deep"):
        read_yaml_model(fan, open_base=lambda _: fan)
    with pytest.raises(ModelConfigError, match="more than 32 files"):
        read_yaml_model("defaults: [" + ", ".join(["leaf"] * 33) + "]\n", open_base=lambda _: "a: 1\n")


# ---- 2.1.4 Benchmark Environment Variable Reference ------------------------------------------------------------------


def test_defaults_of_the_variables():
    result = BenchOptions.from_environment({"PATH": "/bin"})
    assert result == BenchOptions()
    assert (result.precisions, result.fp8_recipe, result.warmup, result.iters) == (("bf16", "fp8"), "blockwise", 10, 10)
    assert (result.speedup_threshold, result.shape_sweep) == (1.0, AUTO_SWEEP)
    assert (result.omni_config_path, result.tp_size, result.ep_size, result.etp_size) == (None, None, None, None)
    assert (result.report_path, result.fp8_policy_path) == (None, None)


def test_the_variables_of_a_dense_run():
    """2.1.1."""
    result = BenchOptions.from_environment(
        {
            "TE_LAYER_PERF_OMNI_CONFIG_PATH": "configs/models/qwen2.5/qwen2_5_72b.yaml",
            "TE_LAYER_PERF_TP_SIZE": "4",
            "TE_LAYER_PERF_PRECISIONS": "bf16,fp8",
            "TE_LAYER_PERF_FP8_RECIPE": "blockwise",
            "TE_LAYER_PERF_REPORT_PATH": "outputs/report_tp4.json",
            "TE_LAYER_PERF_WARMUP": "5",
            "TE_LAYER_PERF_ITERS": "5",
        }
    )
    assert (result.tp_size, result.warmup, result.iters, result.report_path) == (4, 5, 5, "outputs/report_tp4.json")


def test_the_other_variables():
    result = BenchOptions.from_environment(
        {
            "TE_LAYER_PERF_TP_SIZE": "0",
            "TE_LAYER_PERF_EP_SIZE": "4",
            "TE_LAYER_PERF_ETP_SIZE": " ",
            "TE_LAYER_PERF_FP8_POLICY_PATH": "p.json",
            "TE_LAYER_PERF_SPEEDUP_THRESHOLD": "1.05",
            "TE_LAYER_PERF_SHAPE_SWEEP": "1024x1,4096x2",
            "TE_LAYER_PERF_PRECISIONS": "fp8",
        }
    )
    assert (result.tp_size, result.ep_size, result.etp_size) == (None, 4, None)
    assert (result.fp8_policy_path, result.speedup_threshold) == ("p.json", 1.05)
    assert (result.shape_sweep, result.precisions) == (((1024, 1), (4096, 2)), ("fp8",))
    assert parse_sweep(" 8X2 ") == ((8, 2),)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TP", "2", "TE_LAYER_PERF_TP is not a variable of the benchmark; did you mean 'TE_LAYER_PERF_TP_SIZE'"),
        ("TP_SIZE", "two", "TE_LAYER_PERF_TP_SIZE must be a whole number from 0, got 'two'"),
        ("ITERS", "0", "must be a whole number from 1"),
        ("WARMUP", "-1", "must be a whole number from 0"),
        ("FP8_RECIPE", "blokwise", "must be one of tensorwise, .*did you mean 'blockwise'"),
        ("PRECISIONS", "bf16,int8", "must be 'bf16,fp8' or one of the two"),
        ("PRECISIONS", "fp8,fp8", "must be 'bf16,fp8' or one of the two"),
        ("SPEEDUP_THRESHOLD", "nan", "must be a number above 0"),
        ("SPEEDUP_THRESHOLD", "fast", "must be a number above 0"),
        ("SHAPE_SWEEP", "1024", "must be LENGTHxBATCH pairs such as '1024x1,4096x2'.*got '1024'"),
        ("SHAPE_SWEEP", "1024x0", "got '1024x0'"),
        ("SHAPE_SWEEP", "1024x1,", "got ''"),
    ],
)
def test_wrong_variables(name, value, message):
    with pytest.raises(BenchOptionsError, match=message):
        BenchOptions.from_environment({f"TE_LAYER_PERF_{name}": value})


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (QWEN + "seq_length: 4096\nmicro_batch_size: 2\n", 8192),
        (QWEN + "seq_length: 4096\n", None),
        (
            "seq_length: 512\nmicro_batch_size: 1\nmodel:\n  foundation: {fp8: e4m3}\n  image_encoder: {fp8: e4m3}\n",
            512,
        ),
    ],
)
def test_tokens_of_sequence_length_and_micro_batch(text, tokens):
    assert read_yaml_model(text).tokens == tokens
