"""Checkpoints that are not whole: one line that names file and tensor, and nothing written."""

from __future__ import annotations

import contextlib
import json
import re

import gguf
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitplan.base.errors import BitplanError
from bitplan.files.gguf import GGUFFile, GGUFValue, write_gguf
from bitplan.files.gpt_oss import GptOssFile, convert_gpt_oss, make_checkpoint

MLP1, MLP2 = "block.1.mlp.mlp1_weight.", "block.1.mlp.mlp2_weight."


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tensors of every layout, by name."""
    folder = tmp_path_factory.mktemp("made")
    result = {}
    for name, options in {
        "openai": {"naming": "openai"},
        "hf": {"naming": "hf"},
        "tuned": {"naming": "hf", "expert_format": "bfloat16"},
    }.items():
        make_checkpoint(folder / name, **options)
        result[name] = safetensors.torch.load_file(folder / name / "model.safetensors")
    make_checkpoint(folder / "model.gguf", naming="gguf")
    return result | {"gguf": folder / "model.gguf"}


def swap(tensors, one, two):
    tensors[one], tensors[two] = tensors[two], tensors[one]


def rename(tensors, one, two):
    tensors[two] = tensors.pop(one)


def drop_layer(tensors, layer):
    for name in [name for name in tensors if f".{layer}." in name]:
        del tensors[name]


OPENAI_FAULTS = {
    "no scales": (
        lambda t: t.pop(f"{MLP1}scales"),
        "OpenAI's layout of gpt-oss with 2 layers has 33 tensors, missing: 'block.1.mlp.mlp1_weight.scales'",
    ),
    "no blocks": (lambda t: t.pop(f"{MLP2}blocks"), "missing: 'block.1.mlp.mlp2_weight.blocks'"),
    "no embedding": (lambda t: t.pop("embedding.weight"), "missing: 'embedding.weight'"),
    "a name misspelt": (
        lambda t: rename(t, "block.0.attn.sinks", "block.0.attn.sink"),
        "missing: 'block.0.attn.sinks'; unknown to it: 'block.0.attn.sink'",
    ),
    "blocks and scales swapped": (
        lambda t: swap(t, f"{MLP1}blocks", f"{MLP1}scales"),
        r"gpt-oss does not fit .*: swapped: block.1.mlp.mlp1_weight.blocks",
    ),
    "scales of another size": (
        lambda t: t.update({f"{MLP2}scales": t[f"{MLP2}scales"][:, :, :2].contiguous()}),
        "block-count: block.1.mlp.mlp2_weight.blocks",
    ),
    "blocks of floats": (
        lambda t: t.update({f"{MLP1}blocks": t[f"{MLP1}blocks"].to(torch.int8)}),
        "dtype: block.1.mlp.mlp1_weight.blocks .* must be uint8, the file has int8",
    ),
    "a norm of integers": (
        lambda t: t.update({"norm.scale": torch.ones(64, dtype=torch.int32)}),
        "dtype: norm.scale .* must be bfloat16, the file has int32",
    ),
    "a norm of doubles": (
        lambda t: t.update({"norm.scale": torch.ones(64, dtype=torch.float64)}),
        "cast: norm.scale .* must be bfloat16, the file has float64",
    ),
    "an odd number of rows": (
        lambda t: t.update({f"{MLP1}{part}": t[f"{MLP1}{part}"][:, :-1].contiguous() for part in ("blocks", "scales")}),
        r"model.safetensors: tensor 'block.1.mlp.mlp1_weight.blocks' is uint8 \(4, 191, 2, 16\): gate and up alternate",
    ),
    "an odd number of biases": (
        lambda t: t.update({"block.0.mlp.mlp1_bias": t["block.0.mlp.mlp1_bias"][:, 1:].contiguous()}),
        "'block.0.mlp.mlp1_bias' is .* an even number, got 191",
    ),
    "an expert too few": (
        lambda t: t.update({f"{MLP2}{part}": t[f"{MLP2}{part}"][1:].contiguous() for part in ("blocks", "scales")}),
        r"'block.1.mlp.mlp2_weight.blocks' is uint8 \(3, 64, 3, 16\): expected shape \(4, 64, 3, 16\)",
    ),
    "a shape that lies": (
        lambda t: t.update({"block.1.attn.qkv.weight": t["block.1.attn.qkv.weight"].T.contiguous()}),
        r"'block.1.attn.qkv.weight' is bfloat16 \(64, 128\): expected shape \(128, 64\)",
    ),
    "a norm of another rank": (
        lambda t: t.update({"block.0.attn.sinks": t["block.0.attn.sinks"][None]}),
        r"'block.0.attn.sinks' is bfloat16 \(1, 4\): expected 1 axes",
    ),
    "no heads": (
        lambda t: t.update({"block.0.attn.sinks": t["block.0.attn.sinks"][:0]}),
        "make no model: gpt-oss: `heads` must be an integer above 0 and below 2147483648, got 0",
    ),
    "a hole": (lambda t: drop_layer(t, 0), "has a layer 1, so layers 0 to 1 must be there; missing: 0; a shard may"),
    "no layer at all": (
        lambda t: (drop_layer(t, 0), drop_layer(t, 1)),
        r"expected gpt-oss's tensors under OpenAI's names .* got 'embedding.weight', 'norm.scale'",
    ),
    "a layer beyond reason": (
        lambda t: t.update({"block.99999999999.attn.sinks": torch.ones(4)}),
        "has a layer 999999999, so .* missing: 2, 3, 4, 5, 6, ...; a shard may be absent",
    ),
    "a tensor too many": (
        lambda t: t.update({"block.1.attn.rope": torch.ones(4)}),
        "has 33 tensors, unknown to it: 'block.1.attn.rope'",
    ),
}


def to_llama(tensors):
    """Leave what a llama has, too."""
    for name in [name for name in tensors if "experts" in name or "router" in name or "sinks" in name]:
        del tensors[name]


HF_FAULTS = {
    "a llama": (to_llama, "is no gpt-oss: it has neither its experts nor its sinks .*begins with 'lm_head.weight'"),
    "no scales": (
        lambda t: t.pop("model.layers.0.mlp.experts.down_proj_scales"),
        "Hugging Face's layout of gpt-oss with 2 layers has 41 tensors, missing: "
        "'model.layers.0.mlp.experts.down_proj_scales'",
    ),
    "names of both": (
        lambda t: t.update({"block.0.attn.sinks": torch.ones(4)}),
        "OpenAI's layout of gpt-oss with 1 layer has 18 tensors, missing: 'embedding.weight'",
    ),
    "keys that are no heads": (
        lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(40, 64, dtype=torch.bfloat16)}),
        r"'model.layers.0.self_attn.k_proj.weight' is bfloat16 \(40, 64\): expected shape \(32, 64\)",
    ),
}
TUNED_FAULTS = {
    "no down projection": (
        lambda t: t.pop("model.layers.1.mlp.experts.down_proj"),
        "missing: 'model.layers.1.mlp.experts.down_proj'",
    ),
    "upright": (
        lambda t: t.update(
            {"model.layers.1.mlp.experts.gate_up_proj": t["model.layers.1.mlp.experts.gate_up_proj"].mT.contiguous()}
        ),
        r"gate_up_proj' is bfloat16 \(4, 192, 64\): expected shape \(4, 64, 192\)",
    ),
    "experts of two types": (
        lambda t: t.update({"model.layers.1.mlp.experts.down_proj": t["model.layers.1.mlp.experts.down_proj"].float()}),
        "down_proj' is float32 .*: all experts must have one format, and 'model.layers.0.* is bfloat16",
    ),
    "experts of integers": (
        lambda t: t.update({"model.layers.1.mlp.experts.down_proj": torch.ones(4, 96, 64, dtype=torch.int16)}),
        r"down_proj' is int16 \(4, 96, 64\): expected bfloat16 or float16 or float32$",
    ),
    "infinity": (
        lambda t: t["model.layers.1.mlp.experts.down_proj"][2, 0, 0].fill_(torch.inf),
        "model.safetensors: model.layers.1.mlp.experts.down_proj, expert 2: 1 of 6144 numbers are NaN or infinite",
    ),
}
CASES = [
    pytest.param(kind, change, message, id=f"{kind}: {name}")
    for kind, faults in (("openai", OPENAI_FAULTS), ("hf", HF_FAULTS), ("tuned", TUNED_FAULTS))
    for name, (change, message) in faults.items()
]


@pytest.mark.parametrize(("kind", "change", "message"), CASES)
def test_a_fault_is_one_line_and_nothing_is_written(made, tmp_path, kind, change, message):
    tensors = {name: tensor.clone() for name, tensor in made[kind].items()}
    change(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BitplanError) as caught:
        convert_gpt_oss(tmp_path / "model.safetensors", tmp_path / "out", to="hf")
    text = str(caught.value)
    assert re.search(message, text), text
    assert "\n" not in text
    assert str(tmp_path / "model.safetensors") in text
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def rewrite(source, path, *, metadata=None, types=None, drop=()):
    with GGUFFile(source) as file:
        entries = [
            (name, (types or {}).get(name, tensor.type), tensor.shape)
            for name, tensor in file.tensors.items()
            if name not in drop
        ]
        with write_gguf(path, entries, {**file.metadata, **(metadata or {})}) as writer:
            for name, kind, _ in entries:
                raw = file.read_raw(name)
                if kind != file.tensors[name].type:
                    raw = torch.zeros(len(raw.flatten()) // 64 * 34, dtype=torch.uint8).reshape(raw.shape[0], -1)
                writer.write(name, raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"metadata": {"general.architecture": GGUFValue(gguf.GGUFValueType.STRING, "llama")}},
            "expected a GGUF file of architecture 'gpt-oss', got 'llama'",
        ),
        (
            {"metadata": {"gpt-oss.block_count": GGUFValue(gguf.GGUFValueType.UINT32, 24)}},
            "block_count is 24, and the tensors give 2; the checkpoint is incomplete",
        ),
        ({"drop": ["blk.1.ffn_up_exps.weight"]}, "GGUF's layout .* missing: 'blk.1.ffn_up_exps.weight'"),
        (
            {"types": {"blk.1.attn_k.weight": gguf.GGMLQuantizationType.Q8_0}},
            r"'blk.1.attn_k.weight' is Q8_0 \(32, 64\): expected bfloat16 or float16 or float32; decode it first: "
            r"`bitplan quantize IN OUT.gguf` \(fmt='bfloat16', only='blk.1.attn_k.weight'\)",
        ),
    ],
)
def test_a_fault_in_a_gguf_file(made, tmp_path, change, message):
    rewrite(made["gguf"], tmp_path / "bad.gguf", **change)
    with pytest.raises(BitplanError, match=message) as caught:
        convert_gpt_oss(tmp_path / "bad.gguf", tmp_path / "out", to="hf")
    assert str(caught.value).startswith(str(tmp_path / "bad.gguf"))
    assert not (tmp_path / "out").exists()


def test_the_step_the_error_names_works(made, tmp_path):
    from bitplan.files.quantize_files import quantize_file

    name = "blk.1.attn_k.weight"
    rewrite(made["gguf"], tmp_path / "bad.gguf", types={name: gguf.GGMLQuantizationType.Q8_0})
    quantize_file(tmp_path / "bad.gguf", tmp_path / "good.gguf", "bfloat16", only=[name])
    report = convert_gpt_oss(tmp_path / "good.gguf", tmp_path / "out", to="hf")
    assert "encoded" not in {row["action"] for row in report.counts()}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 24}, "num_hidden_layers is 24, and the tensors give 2; the checkpoint is incomplete"),
        ({"model_type": "llama"}, "is for model_type 'llama', and the tensors are gpt-oss's"),
        ({"sliding_window": "wide"}, "sliding_window must be an integer above 0 and below 2.62, got .wide"),
        ({"sliding_window": 4.5}, "sliding_window must be an integer above 0"),
        ({"rope_theta": 10**400}, "rope_theta must be a number above 0 and below 2.62, got 1000"),
        ('{"rope_theta": 1e999}', "a number is larger than any float64"),
        ('{"title": "\\ud800"}', "a string with half of a surrogate pair"),
        ({"rope_scaling": {"factor": -1}}, "factor must be a number above 0 and below 2.62, got -1"),
        ([], "must be an object, got"),
    ],
)
def test_a_config_that_does_not_fit(made, tmp_path, config, message):
    safetensors.torch.save_file(made["hf"], tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(BitplanError, match=message) as caught:
        convert_gpt_oss(tmp_path, tmp_path / "out.gguf", to="gguf")
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(("byte", "what"), [(255, "NaN or infinite|scale byte 255"), (254, "NaN or infinite")])
@pytest.mark.parametrize("experts", ["bfloat16", "mxfp4"])
def test_scales_without_a_value_elsewhere_are_named(made, tmp_path, byte, what, experts):
    tensors = {name: tensor.clone() for name, tensor in made["openai"].items()}
    tensors[f"{MLP1}scales"][3, 5, 1] = byte
    tensors[f"{MLP1}blocks"][3, 5, 1] = 0x77
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    convert_gpt_oss(tmp_path / "model.safetensors", tmp_path / "hf", to="hf")  # bytes are bytes
    if (byte, experts) == (254, "mxfp4"):
        return
    with pytest.raises(BitplanError, match=f"model.safetensors: {MLP1}blocks, expert 3: .*({what})"):
        convert_gpt_oss(tmp_path / "model.safetensors", tmp_path / "out.gguf", to="gguf", experts=experts)
    assert not (tmp_path / "out.gguf").exists()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_a_header_is_an_error_of_ours_or_no_fault(made, tmp_path, data):
    kind = data.draw(st.sampled_from(["openai", "hf", "tuned"]))
    tensors = dict(made[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        tensor = tensors[name]
        match data.draw(st.sampled_from(["drop", "rename", "reshape", "cut", "cast"])):
            case "drop":
                del tensors[name]
            case "rename":
                tensors[data.draw(st.text("abk.01_", min_size=1, max_size=30))] = tensors.pop(name)
            case "reshape":
                tensors[name] = tensor.reshape(data.draw(st.sampled_from([(-1,), (1, -1), (-1, 1, 1), (2, -1)])))
            case "cut":
                tensors[name] = tensor[: data.draw(st.integers(0, max(0, len(tensor) - 1)))]
            case "cast":
                tensors[name] = tensor.to(data.draw(st.sampled_from([torch.float64, torch.int8, torch.bool])))
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "x.safetensors")
    with contextlib.suppress(BitplanError), GptOssFile(tmp_path / "x.safetensors") as file:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert shapes == {slot.name: slot.shape for slot in file.slots}


def test_packed_experts_and_floats_at_once(made, tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    safetensors.torch.save_file(made["hf"] | {name: torch.ones(4, 96, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(BitplanError, match=rf"has 41 tensors, unknown to it: '{name}'"):
        GptOssFile(tmp_path)
