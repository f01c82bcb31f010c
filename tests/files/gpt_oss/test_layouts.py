"""Names and shapes of the three layouts, against what others say of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from gguf import MODEL_ARCH, GGUFValueType, get_tensor_name_map

from bitplan.base.errors import BitplanError, FileFormatError, StoreError
from bitplan.files.gguf import GGUFValue
from bitplan.files.gpt_oss import PRESETS, GptOssShape, checkpoint_bytes, make_shape
from bitplan.files.gpt_oss.config import (
    Settings,
    check_settings_held,
    gguf_metadata,
    hf_config,
    openai_config,
    read_config,
    read_metadata,
)
from bitplan.files.gpt_oss.layouts import LAYOUTS, list_slots
from bitplan.plan import check_headers
from bitplan.plan.manifest import shipped_manifest

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
        headers[slot.name] = (dtype, slot.shape, math.prod(slot.shape) * (1 if dtype == "uint8" else 2))
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


SETTINGS = Settings(2, 64, 1024, 8192, "yarn", 10000.0, 8.0, 2.0, 16.0)
KINDS = {
    "yarn": SETTINGS,
    "linear": replace(SETTINGS, rope_type="linear", rope_beta_slow=1.0, rope_beta_fast=32.0, initial_context=4096),
    "default": replace(SETTINGS, rope_type="default", rope_factor=32.0, rope_beta_slow=1.0, rope_beta_fast=32.0),
}


def read_back(layout, settings, folder):
    shape = make_shape("tiny", experts=8)
    if layout == "gguf":
        return read_metadata(folder, gguf_metadata(shape, settings, packed=True), shape)
    document = openai_config(shape, settings) if layout == "openai" else hf_config(shape, settings, packed=True)
    (folder / "config.json").write_text(json.dumps(document))
    return read_config(folder / "config.json", shape)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_survive_every_spelling(layout, kind, tmp_path):
    settings = KINDS[kind]
    settings = replace(settings, **({"swiglu_limit": 5.0} if layout != "gguf" else {}))
    settings = replace(settings, **({"norm_epsilon": 3e-6} if layout != "openai" else {}))
    if (layout, kind) == ("openai", "linear"):
        with pytest.raises(StoreError, match='OpenAI\'s layout cannot say rotary positions of type "linear"'):
            check_settings_held("here", settings, layout)
        return
    check_settings_held("here", settings, layout)
    result = read_back(layout, settings, tmp_path)
    if kind == "default":  # nothing scales a context
        result = replace(result, initial_context=settings.initial_context)
    assert result == settings


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("openai", {"norm_epsilon": 3e-6}, r"OpenAI's layout cannot say rms_norm_eps 3e-06 \(always 1e-05 there\)"),
        ("gguf", {"swiglu_limit": 5.0}, r"GGUF's layout cannot say swiglu_limit 5.0 \(always 7.0 there\)"),
        ("gguf", {"only_here": ("layer_types []",)}, r"GGUF's layout cannot say layer_types \[\]; keep the checkpoint"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(layout, change, message):
    with pytest.raises(StoreError, match=message):
        check_settings_held("here", replace(Settings(), **change), layout)


YARN = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, Settings()),
        ({"rope_scaling": {}}, Settings()),
        ({"rope_scaling": YARN}, Settings(rope_factor=4.0, initial_context=512)),
        ({"rope_parameters": {**YARN, "rope_theta": 5}}, Settings(rope_factor=4.0, initial_context=512, rope_theta=5)),
        ({"rope_scaling": {**YARN, "beta_fast": 8, "beta_slow": 2}},
         Settings(rope_factor=4.0, initial_context=512, rope_beta_fast=8.0, rope_beta_slow=2.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, Settings(rope_type="linear", rope_factor=4.0)),
        ({"rope_parameters": {}}, Settings(rope_type="default")),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9}}, Settings(rope_type="default", rope_theta=9)),
        ({"rope_scaling": {**YARN, "attention_factor": 0.1 * math.log(4.0) + 1}},
         Settings(rope_factor=4.0, initial_context=512)),
    ],
)  # fmt: skip
def test_rotary_positions_are_read_as_transformers_reads_them(tmp_path, document, expected):
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert read_config(tmp_path / "config.json", GptOssShape())[0] == expected


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"rope_scaling": {key: value for key, value in YARN.items() if key != "truncate"}}, "truncate true"),
        ({"rope_scaling": {**YARN, "truncate": True}}, "truncate true"),
        ({"rope_scaling": {**YARN, "attention_factor": 2.0}}, r"attention_factor 2.0 \(YaRN's own is 1.138"),
        ({"rope_scaling": {**YARN, "mscale": 2.0}}, "mscale 2.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 'rotary positions of type "llama3"; factor 8.0'),
        ({"rope_scaling": {"factor": 8.0}}, "factor 8.0"),
        ({"rope_parameters": {"full_attention": YARN}}, "full_attention"),
        ({"layer_types": ["full_attention"] * 24}, r'layer_types \["full_attention"'),
        ({"sliding_window": None}, "sliding_window null"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings true"),
    ],
)
def test_what_only_hugging_faces_spelling_can_say_stays_there(tmp_path, document, fault):
    (tmp_path / "config.json").write_text(json.dumps(document))
    settings, kept = read_config(tmp_path / "config.json", GptOssShape())
    assert kept == document
    for layout in ("openai", "gguf"):
        with pytest.raises(StoreError, match=f"layout cannot say .*{fault}"):
            check_settings_held("here", settings, layout)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rope.scaling.type", "longrope", "rope.scaling.type.* must be one of 'none', 'linear', 'yarn', got"),
        ("rope.scaling.attn_factor", 0.5, r"Hugging Face's layout cannot say rope.scaling.attn_factor 0.5"),
        ("expert_used_count", 9, "expert_used_count is 9 .*, and a layer has 4 experts"),
    ],
)
def test_metadata_that_no_other_spelling_has(tmp_path, key, value, message):
    shape = make_shape("tiny")
    kind = {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32, int: GGUFValueType.UINT32}[type(value)]
    metadata = gguf_metadata(shape, Settings(), packed=True) | {f"gpt-oss.{key}": GGUFValue(kind, value)}
    with pytest.raises(BitplanError, match=message):
        check_settings_held("here", read_metadata(tmp_path, metadata, shape), "hf")


@pytest.mark.parametrize("document", [{"num_experts_per_tok": 9}, {"experts_per_token": 9, "num_experts": 4}, {}])
def test_more_experts_a_token_than_there_are_is_refused(tmp_path, document):
    shape = make_shape("tiny", experts=4 if document else 2)
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=r"per_tok.* is . \(4 where it is missing\), and a layer has . experts"):
        read_config(tmp_path / "config.json", shape)


def test_a_small_vocabulary_gets_no_token_beyond_it():
    assert "pad_token_id" not in hf_config(PRESETS["tiny"], Settings(), packed=True)
    full = hf_config(SHAPE, Settings(), packed=True)
    torch.nn.Embedding(full["vocab_size"], 1, padding_idx=full["pad_token_id"])
