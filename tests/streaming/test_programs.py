"""The benchmark and the example run, on the simulated device, with every figure in place."""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_benchmark_runs_in_small(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program = runpy.run_path(str(ROOT / "benchmarks" / "streaming.py"))
    size = dataclasses.replace(program["TINY"], tokens=(8,))
    document = program["measure"](size, program["SimulatedDevice"](), program["Run"](repeats=1))
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
    table = program["table_of"](document["rows"]).splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == ["bf16", "int8", "mix60"]
    assert {line.count("|") for line in table} == {13}
    assert program["harness"].save("streaming", document, tmp_path / "result.json").exists()


def test_the_decode_part_runs_in_small(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    output = tmp_path / "decode.json"
    arguments = ["--part", "decode", "--tiny", "--device", "cpu", "--repeats", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["streaming.py", *arguments])
    runpy.run_path(str(ROOT / "benchmarks" / "streaming.py"), run_name="__main__")
    rows = {(row["format"], row["tokens"]): row for row in json.loads(output.read_text())["rows"]}
    assert {fmt for fmt, _ in rows} == {"bfloat16", "int8_row", "int8_g128", "fp8_e4m3_row", "mxfp4", "int4_g32"}
    int8, int4 = rows["int8_row", 8], rows["int4_g32", 8]
    assert int4["block_bytes"] < int8["block_bytes"]
    assert int8["scratch_ms"] == int8["decode_ms"] + int8["products_ms"]
    for row in (int8, int4):
        assert row["faster"] == ("fused" if row["arrange_ms"] + row["fused_ms"] < row["scratch_ms"] else "scratch")
    assert "transfer" in capsys.readouterr().out


@pytest.mark.long
def test_the_offload_part_runs_in_small(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    output = tmp_path / "offload.json"
    arguments = ["--part", "offload", "--tiny", "--device", "cpu", "--repeats", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["streaming.py", *arguments])
    runpy.run_path(str(ROOT / "benchmarks" / "streaming.py"), run_name="__main__")
    rows = {(row["variant"], row["tokens"]): row for row in json.loads(output.read_text())["rows"]}
    assert set(rows) == {(variant, tokens) for variant in ("kept", "offloaded") for tokens in (8, 16)}
    assert rows["kept", 8]["bytes_d2h"] == 0
    assert rows["offloaded", 8]["bytes_d2h"] == (5 - 1) * 8 * 128 * 4
    assert rows["kept", 16]["times_kept"] == 1


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_bytes_of_the_bound_beside_peers_are_those_that_three_slots_send(monkeypatch, mode):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program = runpy.run_path(str(ROOT / "benchmarks" / "stream_peers.py"))
    job = program["Job"](mode, "bitplan", "tiny", (16,), "cpu")
    row = next(row for row in program["measure"](job, 1) if row.get("slots") == 3)
    assert row["bytes_h2d"] == round(2 * 2 * row["weights"] * program["sent_share"](mode, row["blocks"]))


@pytest.mark.parametrize("name", ["stream_peers_nvidia_h200", "stream_peers_adapters_nvidia_h200"])
def test_bounds_beside_peers_are_derived_from_the_parts_that_were_measured(monkeypatch, name):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program = runpy.run_path(str(ROOT / "benchmarks" / "stream_peers.py"))
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    assert program["with_bounds"](rows) == rows
    streamed = [row for row in rows if row.get("slots") == 3]
    assert {row["mode"] for row in streamed} == {"full", "lora"}
    for row in streamed:
        assert row["bytes_h2d"] == round(2 * 2 * row["weights"] * program["sent_share"](row["mode"], row["blocks"]))
        assert row["times_bound"] >= 1
    alone = [row for row in rows if row["arm"] == "resident" or row.get("slots") == "auto"]
    assert {row["bound_by"] for row in alone} == {"gpu"}


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
