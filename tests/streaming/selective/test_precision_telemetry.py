"""Telemetry: Stagehand's line, its worked numbers, and files that cannot be written."""

from __future__ import annotations

import json
import re

import pytest

from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.decide import BlockPrecisionHint
from bitplan.streaming.selective.training_policy import (
    PrecisionTelemetry,
    TelemetryError,
    estimate_saving_pct,
    step_metrics,
)

# A line as Stagehand documents it.
EXAMPLE_LINE = json.loads("""{
  "step_id": 50,
  "timestamp": 1234567.89,
  "blocks_bf16": 19,
  "blocks_int8": 29,
  "mean_sensitivity": 0.34,
  "max_sensitivity": 0.87,
  "min_sensitivity": 0.04,
  "precision_changes": 2,
  "estimated_bandwidth_saving_pct": 30.2,
  "block_details": {}
}""")


def hint(name, precision, score=None, changed=False):
    return BlockPrecisionHint(name, precision, "because", 50, score, changed)


def example_hints():
    """48 blocks, 29 of them int8, two just changed; scores with that line's extremes and mean."""
    scores = [0.04, 0.87, *[(0.34 * 48 - 0.91) / 46] * 46]
    return {
        f"b.{at}": hint(f"b.{at}", "int8" if at < 29 else "bf16", score, at in (3, 40))
        for at, score in enumerate(scores)
    }


def test_the_example_line():
    line = step_metrics(50, example_hints(), 1234567.89)
    for key, value in EXAMPLE_LINE.items():
        if key != "block_details":
            assert getattr(line, key) == pytest.approx(value), key


def test_fields_and_their_order(tmp_path):
    path = tmp_path / "t.jsonl"
    with PrecisionTelemetry(path, clock=lambda: 1234567.89) as telemetry:
        telemetry.record(50, example_hints())
    line = json.loads(path.read_text())
    assert list(line) == [*EXAMPLE_LINE, "bytes_sent", "bytes_not_sent"]
    assert line["timestamp"] == 1234567.89
    assert line["block_details"]["b.0"] == {
        "precision": "int8",
        "sensitivity": 0.04,
        "reason": "because",
        "excluded": {},
    }
    assert line["bytes_sent"] is line["bytes_not_sent"] is None


# low blocks of all blocks, percent: "60% INT8 blocks ~ 30% bandwidth saving"; 29 of 48 is that line's 30.2
SAVINGS = [(29, 48, 30.2), (60, 100, 30.0), (0, 48, 0.0), (48, 48, 50.0), (0, 0, 0.0)]


@pytest.mark.parametrize(("low", "blocks", "expected"), SAVINGS)
def test_the_estimate_counts_blocks(low, blocks, expected):
    assert estimate_saving_pct(low, blocks) == expected


def test_bytes_that_are_really_saved_stand_beside_it():
    """A large block at bf16 and a small one at int8: half the blocks, a fraction of the bytes."""
    sizes = {"big": {"bf16": 900, "int8": 460}, "small": {"bf16": 100, "int8": 60}}
    line = step_metrics(1, {"big": hint("big", "bf16"), "small": hint("small", "int8")}, 0.0, unit_bytes=sizes)
    assert (line.estimated_bandwidth_saving_pct, line.bytes_sent, line.bytes_not_sent) == (25.0, 960, 40)
    line = step_metrics(1, {"big": hint("big", "int8"), "small": hint("small", "int8")}, 0.0, unit_bytes=sizes)
    assert (line.blocks_bf16, line.blocks_int8, line.bytes_not_sent) == (0, 2, 480)


def test_no_score_is_null_and_exclusions_are_said():
    line = step_metrics(1, {"a": hint("a", "bf16")}, 0.0, excluded={"a": {"non_finite": 3}})
    assert line.mean_sensitivity is line.max_sensitivity is line.min_sensitivity is None
    assert line.block_details["a"]["excluded"] == {"non_finite": 3}


def test_lines_are_appended_and_a_torn_one_costs_only_itself(tmp_path):
    path = tmp_path / "t.jsonl"
    for step in (1, 2):
        with PrecisionTelemetry(path) as telemetry:
            telemetry.record(step, {"a": hint("a", "bf16")})
    path.write_bytes(path.read_bytes() + b'{"step_id": 3, "tim')
    with PrecisionTelemetry(path) as telemetry:
        telemetry.record(4, {"a": hint("a", "bf16")})
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step_id"] for line in lines] == [1, 2, 4]


@pytest.mark.parametrize("kind", ["folder", "no folder", "file as folder"])
def test_a_file_that_cannot_be_written_is_an_error_before_training(tmp_path, kind):
    (tmp_path / "file").write_text("kept")
    path = {"folder": tmp_path, "no folder": tmp_path / "no" / "t", "file as folder": tmp_path / "file" / "t"}[kind]
    message = re.escape(str(path)) + {
        "folder": ": is a folder, and only a regular file can be written; .*telemetry_file"
    }.get(kind, ": the selective precision telemetry file cannot be written: .*; set telemetry_file to it")
    with pytest.raises(TelemetryError, match=message):
        PrecisionTelemetry(path)
    assert (tmp_path / "file").read_text() == "kept"


def test_another_file_is_not_appended_to(tmp_path):
    (tmp_path / "t").write_bytes(b"weights")
    with pytest.raises(TelemetryError, match="is not a selective precision telemetry file; nothing was appended"):
        PrecisionTelemetry(tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == b"weights"


def test_from_the_config(tmp_path):
    config = SelectivePrecisionConfig()
    with PrecisionTelemetry.from_config(config, tmp_path) as telemetry:
        assert telemetry.path == tmp_path / "selective_precision_telemetry.jsonl"
    assert PrecisionTelemetry.from_config(SelectivePrecisionConfig(telemetry_enabled=False), tmp_path) is None
    assert PrecisionTelemetry.from_config(SelectivePrecisionConfig(enabled=False), tmp_path) is None
    absolute = SelectivePrecisionConfig(telemetry_file=str(tmp_path / "x.jsonl"))
    with PrecisionTelemetry.from_config(absolute, "elsewhere") as telemetry:
        assert telemetry.path == tmp_path / "x.jsonl"


def test_a_closed_file(tmp_path):
    telemetry = PrecisionTelemetry(tmp_path / "t.jsonl")
    telemetry.close()
    with pytest.raises(TelemetryError, match="is closed"):
        telemetry.record(1, {})
