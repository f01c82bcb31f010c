"""The benchmark and the example of selective precision run, on the simulated device, with every figure in place."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "selective_precision.py"))


@pytest.mark.long
def test_the_experiment_runs_in_small(program, monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    from bitplan.packed.checkpoints import causal_lm

    sizes = replace(program["SMALL"], lora_steps=3, full_steps=3, pretrain_steps=2)
    text = "to be or not to be, that is the question. " * 30

    def load(_):
        model = program["byte_llama"](sizes, torch.float32)
        return SimpleNamespace(model=model, encode=lambda text: torch.tensor(list(text.encode())))

    monkeypatch.setattr(causal_lm, "load_causal_lm", load)
    (tmp_path / "text.txt").write_text(text)
    options = SimpleNamespace(
        part="experiment", model=tmp_path, text=tmp_path / "text.txt", seeds=1, arms=list(program["ARMS"]),
        together=False, keep=tmp_path / "kept", into=tmp_path / "result.json", tiny=True, timed_steps=1,
    )  # fmt: skip
    document = program["measure"](options, sizes, program["SimulatedDevice"]())
    program["show"](document)
    arms = {(row["task"], row["arm"]): row for row in document["arms"]}
    assert set(arms) == {(task, arm) for task in ("lora", "full") for arm in program["ARMS"]}
    for task in ("lora", "full"):
        bf16, int8 = (arms[task, arm]["bytes_h2d_per_step"] for arm in ("bf16", "int8_row"))
        assert int8 < 0.56 * bf16
        assert int8 < arms[task, "static"]["bytes_h2d_per_step"] < bf16
        assert arms[task, "bf16"]["above_bf16_mean"] == 0
        assert arms[task, "int8_row"]["loss_mean"] != arms[task, "bf16"]["loss_mean"]
    shares = {row["arm"]: row["share_by_format"] for row in document["rows"] if row["task"] == "full"}
    assert shares["fp8_row"]["fp8_e4m3_row"] == 1.0
    assert shares["static"] == pytest.approx({"bfloat16": 1 / 3, "int8_row": 2 / 3})
    assert "int8_row" in shares["dynamic_impact"]
    assert capsys.readouterr().out.count("dynamic_impact") == 4
    assert program["harness"].save("selective_precision", document, options.into).exists()

    # Times again, alone: of two arms, into the result that is there, whose losses and bytes stay.
    options.part, options.arms = "times", ["bf16", "dynamic_impact"]
    timed = program["measure"](options, program["SMALL"], program["SimulatedDevice"]())
    assert timed["times"]["arms"] == options.arms
    assert timed["times"]["interval"] == {"lora": 1, "full": 1}
    assert timed["times"]["steps"] == {"lora": 2, "full": 2}
    apart = ("step_ms", "wall_ms_per_step")
    for before, after in zip(document["rows"], timed["rows"], strict=True):
        assert {**before, **dict.fromkeys(apart)} == {**after, **dict.fromkeys(apart)}
        assert (before["wall_ms_per_step"] != after["wall_ms_per_step"]) == (before["arm"] in options.arms)
    assert {row["arm"]: row["wall_ms_per_step"] for row in timed["arms"] if row["task"] == "full"} == {
        row["arm"]: row["wall_ms_per_step"] for row in timed["rows"] if row["task"] == "full"
    }
    options.model = None
    with pytest.raises(SystemExit, match=r"has the tasks full, lora: --model names that of lora"):
        program["measure"](options, program["SMALL"], program["SimulatedDevice"]())


@pytest.mark.parametrize(
    ("steps", "timed", "interval", "whole"),
    [(40, 6, 3, 3 + 6), (80, 6, 6, 6 + 12), (80, 13, 6, 6 + 18), (3, 1, 1, 1 + 2)],
)
def test_timed_steps_are_whole_intervals_of_the_real_run(program, steps, timed, interval, whole):
    every = program["update_interval"](steps)
    task = program["Task"]("x", None, None, steps, 0.1, "weights", program["SMALL"], None, every)
    short = task.shortened(timed)
    assert (short.interval, short.untimed_steps, short.steps) == (interval, interval, whole)
    for arm in ("dynamic_gradient", "dynamic_impact"):
        config = program["policy_config"](arm, short, None)
        assert config == program["policy_config"](arm, replace(task, sizes=short.sizes), None)
        assert config.update_interval_steps == interval


@pytest.mark.long
def test_the_cost_is_measured_in_small(program):
    cost = program["run_cost"](program["SMALL"], program["SimulatedDevice"]())
    assert set(cost["step_ms"]) == {"off", "gradient", "impact"}
    assert set(cost["share"]) == {"gradient", "impact"}
    assert cost["statistics_ms"] > 0  # how it compares with a step is no test: other processes may run
    assert cost["statistics_share"] == cost["statistics_ms"] / cost["step_ms"]["off"]["median"]


def test_the_benchmark_refuses_to_time_the_simulation_in_full(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["selective_precision.py", "--device", "cpu"])
    with pytest.raises(SystemExit):
        program["main"]()
    assert "--device cpu goes with --tiny" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["selective_precision.py", "--device", "cpu", "--tiny", "--part", "times"])
    with pytest.raises(SystemExit):
        program["main"]()
    assert "--part times and --into go together" in capsys.readouterr().err


def test_the_example_moves_blocks(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "selective_precision.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "'0': 'int8'" in out
    assert "'5': 'bf16'" in out
    lines = [json.loads(line) for line in Path("selective_precision_telemetry.jsonl").read_text().splitlines()]
    assert [line["step_id"] for line in lines] == [4, 8, 12, 16, 20]
    assert lines[-1]["bytes_not_sent"] > 0
    assert Path("calibration.json").exists()
