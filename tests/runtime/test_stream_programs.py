"""The benchmark and the example run, on the simulated device, with every figure in place."""

from __future__ import annotations

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_the_benchmark_runs_in_small(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program = runpy.run_path(str(ROOT / "benchmarks" / "streaming.py"))
    size = dataclasses.replace(program["TINY"], tokens=(8,))
    document = program["measure"](size, program["SimulatedDevice"](), slots=3, repeats=1)
    rows = {(row["tokens"], row["variant"]): row for row in document["rows"]}
    variants = {"resident", "bf16", "int8", "mix60", "one-ahead", "pageable"}
    assert set(rows) == {(8, variant) for variant in variants}
    bf16, int8, mix = (rows[8, name]["bytes_h2d"] for name in ("bf16", "int8", "mix60"))
    assert int8 <= 0.52 * bf16
    assert int8 < mix < 0.8 * bf16
    assert all(row["loads"] == 2 * (5 - 3) for row in rows.values() if "loads" in row)
    demands = [one["demand"] for one in document["criteria"] if "demand" in one]
    assert {demand.split(",")[0] for demand in demands} >= {"step over bound", "INT8 bytes over BF16"}
    assert document["simulated"] is True
    assert program["harness"].save("streaming", document, tmp_path / "result.json").exists()


def test_the_example_runs_in_small(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["finetune_under_a_cap.py", "--tiny"])
    runpy.run_path(str(ROOT / "examples" / "finetune_under_a_cap.py"), run_name="__main__")
    out = capsys.readouterr().out
    first, last = (float(word) for word in out.split("loss ")[1].split(" in ")[0].split(" -> "))
    assert last < 0.9 * first
    weights, cap, peak = (float(part.split()[-2]) for part in out.splitlines()[0].split(","))
    assert peak <= cap < weights


def test_the_benchmark_refuses_to_time_the_simulation_in_full(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["streaming.py", "--device", "cpu"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "benchmarks" / "streaming.py"), run_name="__main__")
    assert "--device cpu goes with --tiny" in capsys.readouterr().err
