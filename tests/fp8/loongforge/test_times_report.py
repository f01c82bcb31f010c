"""LoongForge's list reports: paired by case, thresholds only from an unbroken run of wins."""

from __future__ import annotations

import json

import pytest

from bitplan.cli import run
from bitplan.fp8.loongforge import load_list_report, thresholds_of
from bitplan.fp8.policy.rules import load_policy
from bitplan.fp8.policy.vocabulary import BenchReportError


def result(case, precision, tokens, time_ms, kind="row", **more):
    sizes = {"tp_size": 1, "etp_size": 1, "num_gemms": None, "ub_name": "fc2"} | more
    named = {"case_name": case, "model_name": "llm", "module_name": "x", "module_kind": kind, "forward_ms": 0.1}
    return named | sizes | {"precision": precision, "num_tokens": tokens, "total_ms": time_ms, "input_shape": [1, 2]}


def case(tokens, speedup, *, padded=0, **more):
    name = f"{tokens} tokens"
    return [result(name, "bf16", tokens, 2.0, **more), result(name, "fp8", tokens + padded, 2.0 / speedup, **more)]


def write(path, *cases):
    path.write_text(json.dumps([row for rows in cases for row in rows]))
    return path


def rules(path, threshold=1.0):
    merged = thresholds_of(load_list_report(path), threshold)
    policy, findings = merged.policy, list(merged.findings)
    return {rule.where: (rule.min_tokens, rule.measured_speedup) for rule in policy.rules}, findings


def test_a_noisy_win_before_losses_is_no_rule(tmp_path):
    path = write(tmp_path / "a.json", case(512, 1.3), case(1024, 0.9), case(4096, 1.2), case(8192, 1.25))
    assert rules(path) == ({"row, fc2, tp 1": (4096, 1.2)}, [])
    assert rules(path, threshold=1.25) == ({}, [])  # on the threshold is no win, as there


def test_experts_are_paired_though_fp8_pads(tmp_path):
    expert = {"kind": "row_grouped", "num_gemms": 64, "ub_name": None}
    path = write(tmp_path / "a.json", case(424, 1.1, padded=88, **expert))
    assert rules(path)[0] == {"row_grouped, etp 1, num_gemms 64": (424, 1.1)}


def test_of_two_runs_the_worse_counts_and_a_single_is_said(tmp_path):
    path = write(tmp_path / "a.json", case(4096, 1.2), case(4096, 1.1), [result("alone", "fp8", 64, 1.0)])
    assert rules(path) == ({"row, fc2, tp 1": (4096, 1.1)}, ["alone of llm was measured in fp8 only"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_ms": 0}, "total_ms must be a time"),
        ({"num_tokens": 1e999}, "not valid JSON"),
        ({"module_kind": "conv"}, "module_kind must be"),
        ({"ub_name": None}, "ub_name must be"),
    ],
)
def test_bad_rows(change, message, tmp_path):
    path = write(tmp_path / "a.json", [result("a", "fp8", 64, 1.0) | change])
    if "JSON" in message:
        assert load_list_report(path) is None
    else:
        with pytest.raises(BenchReportError, match=message):
            load_list_report(path)


def test_from_the_shell(tmp_path, capsys):
    path = write(tmp_path / "a.json", case(4096, 1.2))
    out = tmp_path / "policy.json"
    assert run(["fp8", "merge", "--reports", str(path), "-o", str(out)]) == 2
    assert "gives a policy of version 1 only; add --policy-version 1" in capsys.readouterr().err
    assert run(["fp8", "merge", "--reports", str(path), "-o", str(out), "--policy-version", "1"]) == 0
    assert "row, fc2, tp 1" in capsys.readouterr().out
    assert load_policy(out).rules[0].min_tokens == 4096
