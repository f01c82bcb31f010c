"""Drift telemetry: the figures of a line, whole lines whatever happens, and models."""

from __future__ import annotations

import json
import math
import signal

import pytest
import torch
from torch import nn

from bitplan.base.errors import FileFormatError, StoreError
from bitplan.files.drift import DriftLog, drift_of, measure_drift
from bitplan.files.models.morph import morph_model
from bitplan.formats import error_report
from bitplan.formats.codec import encode
from bitplan.formats.reencode import DriftCounts, requantize
from bitplan.formats.scale_checks import scale_health
from tests.crosses import few
from tests.formats.samples import SMALL_BLOCKS
from tests.processes import Program

KEYS = [
    "step",
    "name",
    "format",
    "count",
    "max_abs_error",
    "relative_error",
    "blocks",
    "nan_scales",
    "saturated_scales",
    "clipped_scales",
    "underflowed_scales",
    "saturated_codes",
    "flushed_codes",
    "undefined_codes",
    "bytes",
    "tiles_saturated",
    "tiles_underflowed",
    "tiles_rebased",
    "base_rebased",
]


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fmt", few([pytest.param(fmt, id=fmt.name) for fmt in SMALL_BLOCKS], 12))
def test_a_line_has_the_figures_of_the_report(fmt, tmp_path):
    x = gaussian(128, 128)
    encoded = encode(x, fmt)
    with DriftLog(tmp_path / "drift.jsonl") as log:
        log.add(7, [("up.weight", x, encoded)])
    (line,) = DriftLog.read(tmp_path / "drift.jsonl")
    report, health = error_report(x, encoded), scale_health(encoded)
    assert list(line) == KEYS
    assert (line["step"], line["name"], line["format"], line["count"]) == (7, "up.weight", fmt.name, x.numel())
    assert line["max_abs_error"] == report.max_error
    assert line["relative_error"] == report.relative_error
    assert (line["blocks"], line["saturated_codes"]) == (health.blocks, health.saturated_codes)
    assert line["flushed_codes"] == health.flushed_codes
    assert line["bytes"] == encoded.nbytes
    assert [line[key] for key in KEYS[-4:]] == [None] * 4


def test_a_step_of_fine_tuning(tmp_path):
    """The loop that the log is for: keep scales, count what moved, append a line per layer."""
    weights = {"up": gaussian(8, 64), "down": gaussian(8, 64, seed=1)}
    packed = {name: encode(weight, "mxfp4") for name, weight in weights.items()}
    with DriftLog(tmp_path / "drift.jsonl") as log:
        for step in range(3):
            layers = []
            for name, weight in weights.items():
                weight *= 3 if name == "up" else 1
                packed[name], counts = requantize(packed[name], weight)
                layers.append((name, weight, packed[name], counts))
            log.add(step, layers)
    lines = DriftLog.read(tmp_path / "drift.jsonl")
    assert [(line["step"], line["name"]) for line in lines] == [(s, n) for s in range(3) for n in ("up", "down")]
    assert all(line["tiles_rebased"] == line["tiles_saturated"] == 16 for line in lines if line["name"] == "up")
    assert all(line["tiles_rebased"] == 0 for line in lines if line["name"] == "down")
    assert {line["base_rebased"] for line in lines} == {False}


def test_what_is_not_finite_is_null(tmp_path):
    x = torch.tensor([1.0, 1e30])
    row = measure_drift(0, "w", x, encode(x, "float16"))
    assert math.isinf(row.max_abs_error)
    with DriftLog(tmp_path / "d") as log:
        log.write(row)
    (line,) = DriftLog.read(tmp_path / "d")
    assert line["max_abs_error"] is None
    assert line["saturated_codes"] == 1


def test_a_morphed_model_and_its_ties():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64), nn.LayerNorm(64))
    model.append(nn.Linear(64, 32))
    model[3].weight = model[0].weight
    morph_model(model, {"0": "mxfp4", "1": "int8_row", "3": "mxfp4"})
    rows = drift_of(1, model)
    assert {row.name: row.format for row in rows} == {"0.weight": "mxfp4", "1.weight": "int8_row"}
    assert rows[0].relative_error > rows[1].relative_error > 0
    with torch.no_grad():
        model[1].weight.mul_(2)
    assert drift_of(2, model)[1].max_abs_error == 2 * rows[1].max_abs_error  # a fresh version of the new weight


def test_a_master_of_another_shape_is_refused():
    with pytest.raises(StoreError, match=r"w: the master is \(2,\), its encoding \(3,\)"):
        measure_drift(0, "w", torch.ones(2), encode(torch.ones(3), "int8"))


# ---- the file --------------------------------------------------------------------------------------------------------


def row(step=0, name="w", counts=None):
    x = torch.ones(4)
    return measure_drift(step, name, x, encode(x, "int8"), counts)


def test_a_line_is_in_the_file_when_it_was_written(tmp_path):
    path = tmp_path / "d.jsonl"
    with DriftLog(path) as log:
        log.write(row())
        assert len(DriftLog.read(path)) == 1
        log.write(row(counts=DriftCounts(5, 1, 2, 3, True)))
    line = DriftLog.read(path)[1]
    assert [line[key] for key in KEYS[-4:]] == [1, 2, 3, True]


def test_a_log_is_continued_and_a_torn_line_cut_off(tmp_path):
    path = tmp_path / "d"
    with DriftLog(path) as log:
        log.write(row(1))
    whole = path.read_bytes()
    for torn in (b"", b"{", whole[:40], whole[:-1]):
        path.write_bytes(whole + torn)
        assert [line["step"] for line in DriftLog.read(path)] == [1]
        with DriftLog(path) as log:
            log.write(row(2))
        assert [line["step"] for line in DriftLog.read(path)] == [1, 2]
    path.write_bytes(whole[:5])  # the very first line was torn
    with DriftLog(path) as log:
        log.write(row(3))
    assert [line["step"] for line in DriftLog.read(path)] == [3]


def test_another_file_is_not_appended_to(tmp_path):
    for content in (b"weights", b'{"stop": 1}\n', b"\n"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(StoreError, match=r"model\.safetensors: exists and is not a drift log"):
            DriftLog(tmp_path / "model.safetensors")
        assert (tmp_path / "model.safetensors").read_bytes() == content


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"no/such/drift\.jsonl: the drift log cannot be written: no such folder"):
        DriftLog(tmp_path / "no" / "such" / "drift.jsonl")
    with pytest.raises(StoreError, match="is a folder"):
        DriftLog(tmp_path)


def test_a_killed_process_leaves_whole_lines(tmp_path):
    code = f"""
import torch
from bitplan.formats.codec import encode
from bitplan.files.drift import DriftLog, drift_of
log, x = DriftLog({str(tmp_path / "d")!r}), torch.ones(4)
layers = [(f"layer.{{i}}", x, encode(x, "int8")) for i in range(50)]
for step in range(10**6):
    log.add(step, layers)
    if step == 2:
        print("going", flush=True)
"""
    program = Program(code, folder=tmp_path)
    program.wait_until(lambda: program.output == "going\n")
    assert program.signal(signal.SIGKILL) == -signal.SIGKILL
    lines = DriftLog.read(tmp_path / "d")
    assert len(lines) >= 150
    assert [line["name"] for line in lines[:50]] == [f"layer.{i}" for i in range(50)]
    with DriftLog(tmp_path / "d"):
        text = (tmp_path / "d").read_bytes()
    assert text.count(b"\n") == len(lines)
    assert text.endswith(b"\n")


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "d").write_text('{"step": 1, "name": "w"}\n{"step": 2\n')
    with pytest.raises(FileFormatError, match="line 2: not valid JSON"):
        DriftLog.read(tmp_path / "d")
    (tmp_path / "d").write_text(json.dumps([1]) + "\n")
    with pytest.raises(FileFormatError, match="line 1: the document must be an object"):
        DriftLog.read(tmp_path / "d")
