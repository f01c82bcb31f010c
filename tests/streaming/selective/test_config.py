"""The parameters, read from Stagehand's own JSON, and every way to get them wrong."""

from __future__ import annotations

import json
import re

import pytest

from bitplan.base.errors import BitplanError
from bitplan.streaming.selective.config import SelectiveError, SelectivePrecisionConfig

# Stagehand's JSON, with its defaults.
STAGEHAND_JSON = """{
  "selective_precision": {
    "enabled": true,
    "mode": "dynamic",
    "bf16_threshold": 0.6,
    "int8_threshold": 0.3,
    "ambiguous_default": "bf16",
    "hysteresis_margin": 0.1,
    "grad_weight": 0.7,
    "error_weight": 0.3,
    "grad_sensitivity_threshold": 2.0,
    "run_calibration": true,
    "calibration_samples": 4,
    "quant_error_threshold": 0.05,
    "warmup_steps": 10,
    "history_window": 5,
    "update_interval_steps": 10,
    "min_steps_between_switches": 20,
    "force_bf16_blocks": [],
    "force_int8_blocks": [],
    "log_decisions": true,
    "telemetry_enabled": true,
    "telemetry_file": "selective_precision_telemetry.jsonl"
  }
}"""
# Seed 000, "Integration Point".
TRAINING_JSON = """{
  "memory": {
    "stagehand": {
      "selective_precision": {
        "enabled": true,
        "mode": "dynamic",
        "warmup_steps": 10,
        "update_interval_steps": 10,
        "bf16_threshold": 0.6,
        "int8_threshold": 0.3
      }
    }
  }
}"""
BLOCKS = [f"blocks.{index}" for index in range(12)]


def config(**change):
    return SelectivePrecisionConfig(**change)


def from_json(value):
    return SelectivePrecisionConfig.from_document(value, where="train.json")


def test_the_defaults_are_stagehands():
    theirs = json.loads(STAGEHAND_JSON)["selective_precision"]
    ours = config().to_document()
    assert {key: ours[key] for key in theirs} == theirs
    assert list(ours)[: len(theirs)] == list(theirs)


@pytest.mark.parametrize(
    "document",
    [
        json.loads(STAGEHAND_JSON),
        json.loads(STAGEHAND_JSON)["selective_precision"],
        json.loads(TRAINING_JSON),
        {},
        {"memory": {"gpu": 1, "stagehand": {"x": 2, "selective_precision": {}}}, "optimizer": "adamw"},
    ],
    ids=["configuration", "bare", "training config", "nothing set", "neighbours are not judged"],
)
def test_bare_and_nested_documents(document):
    assert from_json(document) == config()


def test_a_file(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(TRAINING_JSON.replace('"mode": "dynamic"', '"mode": "static", "force_int8_blocks": ["blocks.1"]'))
    result = SelectivePrecisionConfig.load(path)
    assert (result.mode, result.force_int8_blocks) == ("static", ("blocks.1",))
    with pytest.raises(SelectiveError, match=r"none\.json: cannot be read"):
        SelectivePrecisionConfig.load(tmp_path / "none.json")


def test_the_document_round_trips():
    changed = config(force_int8_blocks=("a",), scoring="impact", bf16_threshold=1)
    assert from_json(json.loads(json.dumps(changed.to_document()))) == changed
    assert type(changed.bf16_threshold) is float


def test_the_margin_is_subtracted_in_decimals():
    """Seed 000, "Hysteresis Decision": 0.2 is "threshold 0.3 - margin 0.1"; binary floats say 0.19999999999999998."""
    assert 0.3 - 0.1 != 0.2
    assert config().go_low_below == 0.2


WRONG = [
    ({"bf16_treshold": 0.5}, "unknown key 'bf16_treshold'; did you mean 'bf16_threshold'"),
    ({"bf16_threshold": "0.6"}, 'bf16_threshold must be a number from 0 to 1, got "0.6"'),
    ({"bf16_threshold": True}, "bf16_threshold must be a number from 0 to 1, got true"),
    ({"bf16_threshold": 1.01}, "bf16_threshold must be a number from 0 to 1, got 1.01"),
    ({"int8_threshold": -0.1}, "int8_threshold must be a number from 0 to 1, got -0.1"),
    ({"int8_threshold": 0.6}, "int8_threshold must be below bf16_threshold, got 0.6 and 0.6"),
    ({"int8_threshold": 0.7}, "int8_threshold must be below bf16_threshold, got 0.7 and 0.6"),
    ({"hysteresis_margin": 0.3}, "hysteresis_margin must be below int8_threshold, got 0.3 and 0.3"),
    ({"grad_weight": 0, "error_weight": 0}, "both 0: every score would be 0"),
    ({"grad_weight": -1}, "grad_weight must be a number from 0, got -1"),
    ({"grad_sensitivity_threshold": 0}, "grad_sensitivity_threshold must be a number above 0, got 0"),
    ({"quant_error_threshold": 0.0}, "quant_error_threshold must be a number above 0"),
    ({"mode": "Dynamic"}, "mode must be one of 'off', 'static', 'dynamic', got \"Dynamic\""),
    ({"ambiguous_default": "fp8"}, "ambiguous_default must be one of 'bf16', 'int8'"),
    ({"warmup_steps": 1.5}, "warmup_steps must be an integer from 0, got 1.5"),
    ({"warmup_steps": -1}, "warmup_steps must be an integer from 0, got -1"),
    ({"history_window": 0}, "history_window must be an integer from 1, got 0"),
    ({"update_interval_steps": 0}, "update_interval_steps must be an integer from 1"),
    ({"update_interval_steps": True}, "update_interval_steps must be an integer from 1, got true"),
    ({"calibration_samples": 0}, "calibration_samples must be an integer from 1"),
    ({"enabled": 1}, "enabled must be true or false, got 1"),
    ({"enabled": None}, "enabled must be true or false, got null"),
    ({"telemetry_file": ""}, "telemetry_file must be a string that is not empty"),
    ({"force_bf16_blocks": "blocks.1"}, "force_bf16_blocks must be a list of block names"),
    ({"force_bf16_blocks": [3]}, "force_bf16_blocks must be a list of block names (strings), got [3]"),
    ({"force_bf16_blocks": ["a", "a"]}, "force_bf16_blocks names 'a' twice"),
    (
        {"force_bf16_blocks": ["a", "b"], "force_int8_blocks": ["b"]},
        "'b' is in force_bf16_blocks and in force_int8_blocks",
    ),
    ({"scoring": "ours"}, "scoring must be one of 'gradient', 'impact'"),
    ({"int8_format": "int8_rwo"}, "int8_format: no format 'int8_rwo'"),
    ({"damage_budget": 0}, "damage_budget must be a number above 0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:50] for _, message in WRONG])
@pytest.mark.parametrize("nested", [False, True], ids=["bare", "nested"])
def test_refusals_name_file_key_expected_and_found(change, message, nested):
    document = {"memory": {"stagehand": {"selective_precision": change}}} if nested else change
    with pytest.raises(SelectiveError, match=re.escape(message)) as caught:
        from_json(document)
    text = str(caught.value)
    assert text.startswith("train.json: memory.stagehand.selective_precision: " if nested else "train.json: ")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the document must be an object, got []"),
        ({"memory": 3}, "memory must be an object, got 3"),
        ({"memory": {"stagehnd": {}}}, "memory: stagehand is missing"),
        ({"memory": {"stagehand": {"selective_precison": {}}}}, "did you mean 'selective_precison'"),
        ({"selective_precision": []}, "selective_precision must be an object, got []"),
        ({"selective_precison": {}}, "unknown key 'selective_precison'"),
    ],
)
def test_documents_of_another_shape(document, message):
    with pytest.raises(BitplanError, match=re.escape(message)):
        from_json(document)


def test_a_config_built_in_python_is_checked_too():
    with pytest.raises(SelectiveError, match="int8_threshold must be below"):
        config(int8_threshold=0.9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"force_int8_blocks": ["blocks.11", "block.3"]},
            "force_int8_blocks names 'block.3'.* did you mean 'blocks.3'",
        ),
        ({"force_bf16_blocks": ["zzz"]}, "force_bf16_blocks names 'zzz'.*the model has 'blocks.0'"),
    ],
)
def test_unknown_blocks_in_force_lists(change, message):
    with pytest.raises(SelectiveError, match=message):
        config(**change).require_blocks(BLOCKS)


def test_known_blocks_and_blocks_of_layers_pass():
    config(force_int8_blocks=["blocks.3"]).require_blocks(BLOCKS)
    config(force_int8_blocks=["blocks.3"]).require_blocks(["blocks.3.attn", "blocks.3.mlp"])
    with pytest.raises(SelectiveError):
        config(force_int8_blocks=["blocks.3"]).require_blocks(["blocks.31.attn"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.1", ("bf16", "blocks.1")),
        ("blocks.1.attn", ("bf16", "blocks.1")),
        ("blocks.1.mlp", ("int8", "blocks.1.mlp")),
        ("blocks.10", None),
    ],
)
def test_a_forced_block_forces_its_layers_and_the_longer_name_wins(name, expected):
    result = config(force_bf16_blocks=["blocks.1"], force_int8_blocks=["blocks.1.mlp"]).forced(name)
    assert result == expected


def test_formats_of_precisions():
    result = config(int8_format="int8_g128")
    assert [result.format_of(name) for name in ("bf16", "int8")] == ["bfloat16", "int8_g128"]


def test_the_old_name_of_gradient_scoring_is_read_with_a_warning():
    with pytest.warns(FutureWarning, match="'seed' is called scoring='gradient' now"):
        assert config(scoring="seed") == config(scoring="gradient")
    with pytest.warns(FutureWarning, match="the next version refuses it"):
        assert from_json({"scoring": "seed"}).to_document()["scoring"] == "gradient"


def test_precisions_that_lost_are_read_where_they_were_not_used_and_refused_where_they_were():
    unused = {"low_precisions": ["int8"], "fp8_format": "fp8_e4m3_row", "byte_share": 1.0, "force_int4_blocks": []}
    assert from_json({**unused, "bf16_threshold": 0.7}) == config(bf16_threshold=0.7)
    for change in ({"low_precisions": ["int8", "fp8"]}, {"byte_share": 0.4}, {"force_fp8_blocks": ["b.1"]}):
        with pytest.raises(
            SelectiveError, match=f"{next(iter(change))} is .*: FP8 and four bits .* lost, .*int8_format"
        ):
            from_json(change)
