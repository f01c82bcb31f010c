"""The section of a run's plan counts changes by their figures, not by their sentences."""

from __future__ import annotations

from bitplan.plan.from_records import run_log_of
from bitplan.report.section_of_precision import _run_sentence


def test_what_raised_rows_is_told_by_the_evidence() -> None:
    rows = {name: {"format": "bfloat16", "kind": "wire", "reason": "high"} for name in ("a.wire", "b.wire")}
    head = {"document": "bitplan-run-log", "version": 1, "settings": {}, "rows": rows}
    changes = [
        ("a.wire", "bfloat16", "int8_row", {"budget": 0.4}),
        ("b.wire", "bfloat16", "int8_row", {"budget": 0.4}),
        ("a.wire", "int8_row", "bfloat16", {"loss": 2.0, "loss_high": 1.0, "impact": 0.1}),
        ("b.wire", "int8_row", "bfloat16", {"impact": 0.1, "noise": 0.01}),
    ]
    lines = [
        {"number": at, "step": at, "name": name, "from": before, "to": after, "reason": "why", "evidence": evidence}
        for at, (name, before, after, evidence) in enumerate(changes)
    ]
    text = _run_sentence(run_log_of([head, *lines], "run.jsonl"))
    assert "2 rows of 2 low" in text
    assert "loss feedback raised 1, the final part of the schedule 1." in text
