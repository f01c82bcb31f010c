"""`fp8 bench` from the shell: dry runs, variables and options, a run on the CPU, killed and resumed, errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bitplan.cli import run
from bitplan.fp8.bench import layer_bench
from bitplan.fp8.policy.report import Report
from bitplan.fp8.policy.rules import load_policy

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
ONCE = ["--device", "cpu", "--sweep", "32x1", "--iters", "4", "--warmup", "0", "--timing", "eager"]
QUICK = [*ONCE, "--sweep", "32x1,48x1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TE_LAYER_PERF_")]:
        monkeypatch.delenv(name)
    Path("config.json").write_text(json.dumps(LLAMA))
    Path("moe.json").write_text(json.dumps(MIXTRAL))


def bench(*arguments):
    return run(["fp8", "bench", *arguments])


def test_dry_run_lists_what_would_be_timed(capsys):
    assert bench("config.json", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "layernorm_column" in out
    assert "256, 512, 1024, 2048, 4096, 8192, 16384, 32768" in out
    assert "64 measurements of 5 arms, 10 samples each: very roughly" in out
    assert list(Path().glob("*.jsonl")) == []


def test_dry_run_as_json_with_variables_and_options_over_them(capsys, monkeypatch):
    monkeypatch.setenv("TE_LAYER_PERF_OMNI_CONFIG_PATH", "moe.json")
    monkeypatch.setenv("TE_LAYER_PERF_FP8_RECIPE", "rowwise")
    monkeypatch.setenv("TE_LAYER_PERF_ITERS", "5")
    monkeypatch.setenv("TE_LAYER_PERF_EP_SIZE", "2")
    monkeypatch.setenv("TE_LAYER_PERF_SHAPE_SWEEP", "1024x1,4096x2")
    assert bench("--dry-run", "--json", "--iters", "7") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["turns"] == 7
    assert (document["settings"]["ep"], document["settings"]["sweep"]) == (2, ["1024x1", "4096x2"])
    assert document["estimated_minutes"] > 0
    experts = [case for case in document["cases"] if case["kind"] == "column_grouped"]
    assert [case["tokens"] for case in experts] == [2048, 16384]
    assert experts[0]["size"] == "etp 1, 2 gemms"
    assert all(case["obstacle"] == "" for case in document["cases"])


def test_dry_run_says_that_one_process_is_a_shard(capsys):
    assert bench("moe.json", "--ep", "2", "--dry-run", "--sweep", "64x1") == 0
    assert "the shard of one GPU alone" in capsys.readouterr().out


def test_a_run_on_the_cpu_goes_to_report_and_policy(capsys):
    arguments = ["config.json", *ONCE, "--report", "outputs/r.jsonl", "--policy", "outputs/policies/p.json"]
    assert bench(*arguments) == 0
    out = capsys.readouterr().out
    assert "FP8 emulated on the CPU" in out
    assert "32 rows; 4 measurements in this run" in out
    report = Report.load("outputs/r.jsonl")
    assert {row.gemm for row in report.rows} == {"module", "fprop", "dgrad", "wgrad"}
    assert all(row.status == "ok" and row.in_turns for row in report.rows)
    assert report.settings["ranks"] == 1
    assert len(load_policy("outputs/policies/p.json").rules) == 16
    before = Path("outputs/r.jsonl").read_bytes()
    assert bench(*arguments) == 2
    assert "p.json: exists already; choose another name, or replace it (--force)" in capsys.readouterr().err
    assert bench(*arguments, "--force", "--json") == 0  # again: nothing to do
    document = json.loads(capsys.readouterr().out)
    assert (document["timed_now"], document["rows"]) == (0, 32)
    assert Path("outputs/r.jsonl").read_bytes() == before


def test_experts_on_the_cpu(capsys):
    arguments = ["moe.json", *ONCE, "--no-products", "--recipe", "rowwise", "--report", "r.jsonl"]
    assert bench(*arguments) == 0
    rows = [row for row in Report.load("r.jsonl").rows if row.kind.endswith("grouped")]
    assert {(row.routing, row.tokens) for row in rows} == {("uniform", 64), ("zipf", 64)}
    assert all(row.status == "ok" for row in rows)
    assert all(row.padded_tokens >= row.tokens for row in rows if row.precision == "fp8")
    capsys.readouterr()


def test_shapes_that_the_recipe_cannot_cast_are_findings(capsys):
    Path("odd.json").write_text(json.dumps(LLAMA | {"intermediate_size": 200}))
    assert bench("odd.json", *ONCE, "--no-products", "--report", "r.jsonl") == 1
    assert "is not a multiple of 128, which blockwise needs" in capsys.readouterr().out


def test_interrupted_and_resumed(capsys, monkeypatch):
    arguments = ["config.json", *QUICK, "--no-products", "--report", "r.jsonl", "--policy", "p.json"]
    time_in_turns, calls = layer_bench.time_in_turns, []

    def interrupted(*given, **more):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return time_in_turns(*given, **more)

    monkeypatch.setattr(layer_bench, "time_in_turns", interrupted)
    assert bench(*arguments) not in (0, 1)
    assert Path("r.jsonl").read_bytes().count(b"\n") == 1 + 4  # a head, and two rows of each way that was timed
    assert not Path("p.json").exists()
    capsys.readouterr()
    assert bench(*arguments, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["rows"], document["timed_now"]) == (16, 6)
    assert load_policy("p.json").rules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model: give MODEL (or TE_LAYER_PERF_OMNI_CONFIG_PATH)"),
        (["none.json", "--dry-run"], "none.json: cannot be read"),
        (["config.json", *QUICK], "no report path (nor TE_LAYER_PERF_REPORT_PATH) (--report FILE)"),
        (["config.json", "--recipe", "blokwise"], "--recipe must be one of tensorwise, rowwise, blockwise, mxfp8"),
        (["config.json", "--sweep", "1024"], "--sweep must be LENGTHxBATCH pairs"),
        (["config.json", "--precisions", "fp16"], "--precisions must be 'bf16,fp8'"),
        (["config.json", "--speedup-threshold", "0"], "--speedup-threshold must be a number above 0"),
        (["config.json", "--tp", "8", "--dry-run"], "which tp 8 does not divide"),
        (["config.json", "--ep", "2", "--dry-run"], "the model has no experts"),
        (["config.json", "--part", "vit", "--dry-run"], "has no part 'vit'; it has llm"),
        (
            ["config.json", *QUICK, "--report", "diary.txt/r.jsonl"],
            "diary.txt/r.jsonl: its folder cannot be made",
        ),
        (
            ["config.json", *QUICK, "--report", "diary.txt"],
            "diary.txt: exists and is not a report",
        ),
        (
            ["config.json", *QUICK, "--report", "r", "--policy", "p", "--precisions", "fp8"],
            "a policy compares BF16 with FP8",
        ),
        (["config.json", *QUICK, "--report", "new", "--policy", "new"], "new: is the report and the policy"),
        (["config.json", *QUICK, "--report", "r", "--policy", "config.json", "--force"], "is the input config.json"),
        (["config.json", "--iters", "0"], "--iters"),
    ],
)
def test_one_line_errors(arguments, message, capsys):
    Path("diary.txt").write_text("my diary")
    assert bench(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert Path("diary.txt").read_text() == "my diary"


def test_a_report_of_another_run_is_not_gone_on_with(capsys):
    arguments = [
        "config.json",
        "--device",
        "cpu",
        "--iters",
        "4",
        "--warmup",
        "0",
        "--timing",
        "eager",
        "--no-products",
    ]
    assert bench(*arguments, "--sweep", "16x1", "--report", "r.jsonl") == 0
    assert bench(*arguments, "--sweep", "32x1", "--report", "r.jsonl") == 2
    assert "begun with settings" in capsys.readouterr().err


def test_no_gpu_is_said(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench("config.json", "--report", "r.jsonl") == 2
    assert "torch sees no CUDA GPU, so there is nothing to measure" in capsys.readouterr().err
    assert not Path("r.jsonl").exists()


def test_a_misspelt_variable_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("TE_LAYER_PERF_RECIPE", "rowwise")
    assert bench("config.json", "--dry-run") == 2
    assert "TE_LAYER_PERF_RECIPE is not a variable of the benchmark" in capsys.readouterr().err


def test_world_size_must_fit(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert bench("config.json", "--tp", "2", "--dry-run") == 2
    assert "3 processes cannot be divided into groups of tp = 2" in capsys.readouterr().err
