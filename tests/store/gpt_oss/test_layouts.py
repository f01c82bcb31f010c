"""Names and shapes of the three layouts, against what others say of them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from gguf import MODEL_ARCH, get_tensor_name_map

from bitplan.errors import StoreError
from bitplan.plan import Header, check_headers, shipped_manifest
from bitplan.store.gpt_oss import PRESETS, GptOssShape, checkpoint_bytes, make_shape
from bitplan.store.gpt_oss.config import Settings, gguf_metadata, hf_config, openai_config, read_config, read_metadata
from bitplan.store.gpt_oss.layouts import LAYOUTS, list_slots

SHAPE = PRESETS["20b"]


@pytest.mark.parametrize(("layout", "count"), [("openai", 363), ("hf", 459), ("gguf", 459)])
def test_gpt_oss_20b_has_the_published_number_of_tensors(layout, count):
    names = [slot.name for slot in list_slots(layout, SHAPE)]
    assert len(names) == len(set(names)) == count


def test_20b_takes_the_published_bytes():
    packed = sum(math.prod(slot.shape) for slot in list_slots("openai", SHAPE) if slot.kind in ("blocks", "scales"))
    assert round(packed / 2**30, 2) == 9.46
    assert checkpoint_bytes("openai", SHAPE) == checkpoint_bytes("hf", SHAPE) == 13_761_264_768


@pytest.mark.parametrize("layout", ["openai", "hf"])
def test_every_tensor_is_what_the_shipped_manifest_expects(layout):
    headers = {}
    for slot in list_slots(layout, SHAPE):
        dtype = "uint8" if slot.kind in ("blocks", "scales") else "bfloat16"
        headers[slot.name] = Header(dtype, slot.shape, math.prod(slot.shape) * (1 if dtype == "uint8" else 2))
    assert check_headers(shipped_manifest("gpt-oss"), headers) == []


def test_openai_and_hugging_face_names_are_the_manifests_aliases():
    aliases = shipped_manifest("gpt-oss").aliases
    theirs = {other for slot in list_slots("openai", SHAPE) for other in aliases.to_others(slot.name)}
    assert theirs == {slot.name for slot in list_slots("hf", SHAPE)}


def test_gguf_names_are_those_of_gguf_py():
    names = get_tensor_name_map(MODEL_ARCH.GPT_OSS, SHAPE.layers)
    ours = {slot.name for slot in list_slots("gguf", SHAPE)}
    for slot in list_slots("hf", SHAPE):
        if slot.is_expert or "experts" in slot.name:
            continue
        name = slot.name if slot.name.endswith((".weight", ".bias")) else f"{slot.name}.weight"
        assert names.get_name(name, try_suffixes=(".weight", ".bias")) in ours
    for layer in (0, SHAPE.layers - 1):
        for part in ("gate", "up", "down"):
            name = names.get_name(f"model.layers.{layer}.mlp.experts.{part}_proj")
            assert {f"{name}.weight", f"{name}.bias"} <= ours


def test_float_experts_lie_transposed_in_hugging_faces_layout_and_upright_in_ggufs():
    shape = PRESETS["tiny"]
    hf = {slot.name: slot.shape for slot in list_slots("hf", shape, packed=False)}
    assert hf["model.layers.1.mlp.experts.gate_up_proj"] == (shape.experts, shape.hidden, 2 * shape.intermediate)
    assert hf["model.layers.1.mlp.experts.down_proj"] == (shape.experts, shape.intermediate, shape.hidden)
    gguf = {slot.name: slot.shape for slot in list_slots("gguf", shape, packed=False)}
    assert gguf["blk.1.ffn_up_exps.weight"] == (shape.experts, shape.intermediate, shape.hidden)
    with pytest.raises(StoreError, match="MXFP4 and in nothing else"):
        list_slots("openai", shape, packed=False)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 48}, "`hidden` must be a multiple of 32"),
        ({"intermediate": 8}, "`intermediate` must be a multiple of 32"),
        ({"layers": 0}, "`layers` must be an integer above 0 and below 2147483648, got 0"),
        ({"vocab": 2**31}, "`vocab` must be an integer above 0 and below 2147483648, got 2147483648"),
        ({"vocab": 2.5}, "`vocab` must be an integer"),
        ({"heads": 5, "kv_heads": 2}, "multiple of `kv_heads`"),
        ({"head_dim": 3}, "`head_dim` even"),
    ],
)
def test_sizes_that_make_no_model(sizes, message):
    with pytest.raises(StoreError, match=message):
        make_shape("tiny", **sizes)


def test_an_unknown_preset_is_named():
    with pytest.raises(StoreError, match="no size '20B'; there are 20b, 120b, tiny; did you mean '20b'"):
        make_shape("20B")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_survive_every_spelling(layout, tmp_path):
    shape = make_shape("tiny", experts=8)
    settings = Settings(2, 64, 1024, 8192, 10000.0, 8.0, 2.0, 16.0, 5.0, 3e-6)
    if layout == "gguf":
        result = read_metadata(tmp_path, gguf_metadata(shape, settings, packed=True), shape)
        # What llama.cpp has no key for comes back as published.
        lost = {"rope_beta_slow": 1.0, "rope_beta_fast": 32.0, "swiglu_limit": 7.0}
    else:
        document = openai_config(shape, settings) if layout == "openai" else hf_config(shape, settings, packed=True)
        (tmp_path / "config.json").write_text(json.dumps(document))
        result, _ = read_config(tmp_path / "config.json", shape)
        lost = {"norm_epsilon": 1e-5} if layout == "openai" else {}
    assert result == Settings(**{**vars(settings), **lost})


def test_the_rope_parameters_of_transformers_5_are_read(tmp_path):
    document = {"rope_parameters": {"rope_theta": 5.0, "factor": 4.0, "rope_type": "yarn"}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    result, _ = read_config(tmp_path / "config.json", GptOssShape())
    assert (result.rope_theta, result.rope_factor) == (5.0, 4.0)


def test_a_small_vocabulary_gets_no_token_beyond_it():
    assert "pad_token_id" not in hf_config(PRESETS["tiny"], Settings(), packed=True)
    full = hf_config(SHAPE, Settings(), packed=True)
    torch.nn.Embedding(full["vocab_size"], 1, padding_idx=full["pad_token_id"])
