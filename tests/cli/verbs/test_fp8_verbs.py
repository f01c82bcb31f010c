"""`fp8 merge` and `fp8 explain` from the shell: tables, JSON, exit codes, one-line errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bitplan.cli import run
from bitplan.fp8.policy.report import Row
from bitplan.fp8.policy.rules import load_policy
from tests.fp8.policy.fp8_samples import H200, VERSION_1, experts, pair, report, series


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save(name, rows, **more):
    report(rows, **more).save(name)
    return name


def merge(*arguments):
    return run(["fp8", "merge", "--reports", *arguments])


def explain(*arguments, policy="p.json", kind="row", name="fc2", tokens="4096"):
    named = ["--name", name] if name else []
    return run(["fp8", "explain", policy, "--kind", kind, *named, "--tokens", tokens, *arguments])


def version_1():
    Path("thresholds.json").write_text(VERSION_1)
    return "thresholds.json"


def test_merge_policy(capsys):
    """2.1.1, step 2: three reports after one --reports."""
    names = [save(f"report_tp{tp}.json", series({1024: 0.8, 4096: 1.4, 16384: 1.5}, tp=tp)) for tp in (1, 2, 4)]
    assert merge(*names, "--output", "p.json", "--speedup-threshold", "1.0") == 0
    out = capsys.readouterr().out
    assert "3 reports of NVIDIA H200" in out
    assert "4096..16384" in out
    assert out.endswith("policy: p.json\n")
    assert [rule.tp for rule in load_policy("p.json").rules] == [1, 2, 4]
    first = Path("p.json").read_bytes()
    assert merge(*reversed(names), "-o", "q.json") == 0
    assert Path("q.json").read_bytes() == first


def test_merge_json_and_threshold(capsys):
    name = save("r.json", series({4096: 1.2}))
    assert merge(name, "--json", "--speedup-threshold", "1.3") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["policy"]["speedup_threshold"] == 1.3
    assert document["policy"]["rules"][0]["points"][0]["answer"] == "lose"
    assert document["findings"] == []
    assert captured.err == ""


def test_rows_that_could_not_be_used_are_findings(capsys):
    broken = Row("llm", "row", (64, 64), 8, "module", "graph", "bf16", "error", name="fc2", tp=1, message="no\x1b[2J")
    name = save("r.json", [*series({4096: 1.2}), broken, replace(broken, precision="fp8")])
    assert merge(name, "-o", "p.json") == 1
    out = capsys.readouterr().out
    assert "failed: no\\x1b[2J" in out
    assert load_policy("p.json").rules


def test_version_1_and_parts(capsys):
    vit = {"part": "vit", "kind": "row", "name": "fc2", "shape": (1152, 4352), "tp": 1}
    name = save("r.json", series({4096: 1.2}) + series({1024: 1.3}, **vit))
    assert merge(name, "-o", "p.json", "--policy-version", "1") == 2
    assert "version 1 has no parts" in capsys.readouterr().err
    assert merge(name, "-o", "p.json", "--policy-version", "1", "--part", "vit") == 0
    document = json.loads(Path("p.json").read_text())
    assert document["version"] == 1
    assert document["rules"]["row"]["fc2"][0]["min_tokens"] == 1024
    assert "1 of 2 rules" in capsys.readouterr().out
    assert merge(name, "--part", "vit") == 2
    assert "--part goes with --policy-version 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.json", "h100.json"], "a.json was measured with gpu 'NVIDIA H200', h100.json with 'NVIDIA H100'"),
        (["a.json", "row.json"], "a.json is of the recipe 'blockwise', row.json of 'rowwise'"),
        (["cut.json"], "cut.json: cut off in line 3, which has no end; run the benchmark again"),
        (["none.json"], "none.json: cannot be read: No such file"),
        (["a.json", "--speedup-threshold", "-1"], "speedup threshold must be a number above 0"),
        (["a.json", "--confidence", "2"], "confidence must be from 0.5"),
        (["a.json", "--timing", "fast"], "--timing"),
        (["a.json", "-o", "no/p.json"], "no such folder"),
    ],
)
def test_one_line_errors(arguments, message, capsys):
    save("a.json", series({4096: 1.2}))
    save("h100.json", series({512: 1.2}), fingerprint=replace(H200, gpu="NVIDIA H100"))
    save("row.json", series({4096: 1.2}), recipe="rowwise")
    Path("cut.json").write_bytes(report(series({4096: 1.2})).to_lines().encode()[:-40])
    assert merge(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_into_a_policy(capsys):
    save("a.json", series({4096: 1.2}))
    save("b.json", series({4096: 1.2}, tp=2))
    assert merge("a.json", "b.json", "-o", "both.json") == 0
    assert merge("a.json", "-o", "p.json") == 0
    assert merge("b.json", "--into", "p.json", "-o", "p.json") == 2
    assert merge("b.json", "--into", "p.json", "-o", "p.json", "--force") == 0
    assert Path("p.json").read_bytes() == Path("both.json").read_bytes()
    capsys.readouterr()
    assert merge("a.json", "--into", "p.json") == 0  # the worse of two measurements of a point stays
    assert merge("a.json", "--into", version_1()) == 2
    assert "a policy of version 1 keeps no points to add to" in capsys.readouterr().err


def test_no_reports(capsys):
    assert run(["fp8", "merge", "-o", "p.json"]) == 2
    assert "--reports needs at least one report" in capsys.readouterr().err


def test_across_recipes(capsys):
    save("a.json", series({4096: 1.2}))
    save("b.json", series({4096: 1.5}), recipe="tensorwise")
    assert merge("a.json", "b.json", "--across-recipes", "-o", "p.json") == 0
    capsys.readouterr()
    assert explain("--json") == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "tensorwise"
    assert explain("--json", "--recipe", "blockwise") == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "blockwise"


@pytest.mark.parametrize(
    ("tokens", "code", "text"),
    [
        ("4096", 0, "row fc2 at 4096 tokens: FP8 (win): measured: win at 4096 tokens"),
        ("8000", 0, "FP8 (win): between two measured wins"),
        ("1024", 0, "BF16 (lose): measured: lose at 1024 tokens"),
        ("2048", 0, "BF16 (undecided): measured: undecided"),
        ("99999", 1, "BF16 (unmeasured): 99999 tokens were never measured: above the largest"),
    ],
)
def test_explain(tokens, code, text, capsys):
    save("r.json", series({1024: 0.8, 2048: 1.0, 4096: 1.4, 16384: 1.5}))
    assert merge("r.json", "-o", "p.json") == 0
    capsys.readouterr()
    assert explain(tokens=tokens) == code
    out = capsys.readouterr().out
    assert text in out
    assert "llm row fc2 4096x14336, tp 1, blockwise, module" in out


def test_explain_narrows(capsys):
    rows = series({4096: 1.4}) + series({4096: 1.3}, gemm="fprop") + series({4096: 0.7}, gemm="wgrad")
    save("r.json", rows)
    assert merge("r.json", "-o", "p.json") == 0
    capsys.readouterr()
    assert explain("--shape", "4096x14336") == 0
    assert (
        "fprop FP8; dgrad FP8; wgrad FP8" in capsys.readouterr().out
    )  # the whole module wins by more than fprop alone
    assert explain("--gemm", "wgrad") == 0
    out = capsys.readouterr().out
    assert "row fc2 wgrad at 4096 tokens: FP8 (win): measured: win at 4096 tokens (1.400x" in out
    assert "wgrad by itself: BF16 (lose): measured: lose at 4096 tokens (0.700x" in out
    assert explain("--shape", "64x64") == 1
    assert "BF16 (unmeasured): estimated 0.000x: never measured itself" in capsys.readouterr().out
    assert explain("--shape", "64x64", "--no-estimate") == 1
    assert "no rule with shape (64, 64)" in capsys.readouterr().out
    assert explain("--tp", "2") == 1
    assert explain(name="") == 1
    assert explain("--extrapolate", tokens="5000") == 0


def test_explain_products_apart(capsys):
    rows = series({4096: 0.9}) + series({4096: 1.3}, gemm="fprop") + series({4096: 1.05}, gemm="wgrad")
    save("r.json", rows)
    save("s.json", series({4096: 0.9}) + series({4096: 1.05}, gemm="wgrad"))
    assert merge("r.json", "-o", "p.json") == 0
    assert merge("s.json", "-o", "q.json") == 0
    capsys.readouterr()
    assert explain() == 0
    out = capsys.readouterr().out
    assert "row fc2 at 4096 tokens: FP8 fprop, wgrad (win): fprop measured: win at 4096 tokens (1.300x" in out
    assert "fprop FP8; dgrad BF16; wgrad FP8\nthe same from 4096 tokens to 4096\n" in out
    assert explain("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["precision"], document["products"]) == ("fp8 fprop, wgrad", ["fprop", "wgrad"])
    assert document["gemms"]["dgrad"]["precision"] == "bf16"
    assert document["gemms"]["wgrad"]["alone"]["speedup"] == pytest.approx(1.05, rel=0.01)
    assert explain(policy="q.json") == 0
    assert "BF16 (lose): products apart (wgrad) promise 1.05" in capsys.readouterr().out


def test_explain_estimates_as_apply_does(capsys):
    save("r.json", series({1024: 0.8, 4096: 1.4}))
    assert merge("r.json", "-o", "p.json") == 0
    capsys.readouterr()
    assert explain(tokens="3000") == 0
    out = capsys.readouterr().out
    assert "row fc2 at 3000 tokens: FP8 (unmeasured): estimated 1.2" in out
    assert "\nthe same from 1" in out
    assert explain("--no-estimate", tokens="3000") == 1
    assert "BF16 (unmeasured): 3000 tokens were never measured, and lie between" in capsys.readouterr().out


def test_explain_version_1(capsys):
    """2.2: fc2 from 8192 tokens on; experts 53 x 8 = 424 tokens."""
    assert explain(policy=version_1(), tokens="8192") == 0
    assert "FP8 (win): 8192 tokens are at or above min_tokens 8192" in capsys.readouterr().out
    assert explain(policy="thresholds.json", tokens="8191") == 1
    expert = ["--expert", "--topk", "8", "--num-gemms", "64"]
    assert explain(*expert, policy="thresholds.json", tokens="53", name="", kind="column") == 0
    assert "column_grouped at 424 tokens: FP8" in capsys.readouterr().out


def test_explain_experts(capsys):
    save("r.json", pair(424, 1.3, **experts("column_grouped")))
    assert merge("r.json", "-o", "p.json") == 0
    capsys.readouterr()
    assert explain("--num-gemms", "64", "--topk", "8", "--json", kind="column_grouped", name="", tokens="53") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["precision"], document["tokens"], document["answer"]) == ("fp8", 424, "win")
    assert set(document["gemms"]) == {"fprop", "dgrad", "wgrad"}
    assert document["rules"][0]["bands"] == [[424, 424]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "rows"}, "unknown module kind 'rows'; the kinds are layernorm_column"),
        ({"tokens": "0"}, "num_tokens must be an integer from 1, got 0"),
        ({"policy": "none.json"}, "none.json: cannot be read"),
        ({"policy": "bad.json"}, "bad.json: version must be 1 (LoongForge's) or 2"),
    ],
)
def test_explain_errors(arguments, message, capsys):
    version_1()
    Path("bad.json").write_text('{"version": 9}')
    assert explain(**({"policy": "thresholds.json"} | arguments)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_explain_bad_options(capsys):
    for arguments, message in (
        (["--shape", "4096"], "--shape must be OUTxIN"),
        (["--recipe", "int8"], "recipe must be one of"),
        (["--gemm", "all"], "gemm must be one of"),
    ):
        assert explain(*arguments, policy=version_1()) == 2
        assert message in capsys.readouterr().err
