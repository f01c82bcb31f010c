"""Merges reports into a policy: pairs BF16 with FP8, judges each token count, and keeps losses too.

Times are paired by layer and LOGICAL tokens. (LoongForge's program paired by padded counts: the two precisions pad
differently, so no expert was ever paired.) Each pair gives an interval and an answer (`speedup_interval`); where a
count was timed in several ways (eager and in a CUDA graph, uniform and skewed routing) the worst of them counts: FP8
must win in all. The points of a layer make its bands. No row is dropped silently: a row without a partner, or one that
failed, is a finding, and becomes a point that ends a band.

Only reports of one fingerprint and one recipe are merged; `across_recipes` puts several recipes side by side. The order
of reports and of their rows does not matter: the same evidence gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitplan.base.documents import show
from bitplan.fp8.policy.report import (
    DEFAULT_CONFIDENCE,
    MAX_SAMPLES,
    OK,
    OOM,
    TIMINGS,
    Report,
    Row,
    answer_of,
    check_confidence,
    describe_row,
    speedup_interval,
)
from bitplan.fp8.policy.rules import LayerRule, Point, Policy
from bitplan.fp8.policy.vocabulary import (
    DEFAULT_THRESHOLD,
    GROUPED_KINDS,
    LOSE,
    SPEEDUP,
    UNDECIDED,
    UNMEASURED,
    WIN,
    FingerprintError,
    MergeError,
)


@dataclass(frozen=True)
class Merged:
    """The policy, and a sentence for everything in the reports that could not be used."""

    policy: Policy
    findings: tuple[str, ...]


def merge_reports(
    given: Sequence[Report | str | Path],
    *,
    speedup_threshold: float = DEFAULT_THRESHOLD,
    confidence: float = DEFAULT_CONFIDENCE,
    timing: str | None = None,
    across_recipes: bool = False,
) -> Merged:
    """Merge reports of one machine, or their files, into a policy.

    `timing` ("eager" or "graph") uses only rows timed in this way.
    """
    reports = [report if isinstance(report, Report) else Report.load(report) for report in given]
    if not reports:
        raise MergeError("no reports to merge; give at least one")
    if not SPEEDUP.holds(speedup_threshold):
        raise MergeError(f"the speedup threshold must be {SPEEDUP.text}, got {show(speedup_threshold)}")
    if timing not in (None, *TIMINGS):
        raise MergeError(f"timing must be one of {', '.join(TIMINGS)}, got {timing!r}")
    check_confidence(confidence)
    first = reports[0]
    for other in reports[1:]:
        _check_one_machine(first, other, "merge them into two policies, or measure one again")
        if other.recipe != first.recipe and not across_recipes:
            raise MergeError(
                f"{first.where} is of the recipe {first.recipe!r}, {other.where} of {other.recipe!r}; "
                "a policy has one recipe unless several are asked for",
                settings={"across_recipes": True},
            )
    layers: dict[tuple[Any, ...], dict[int, list[Row]]] = {}
    findings: list[str] = []
    for recipe, row in _rows(reports, findings):
        if timing in (None, row.timing):
            layers.setdefault((recipe, *row.layer_key), {}).setdefault(row.tokens, []).append(row)
    if not layers:
        raise MergeError(f"{reports[0].where}: no rows to merge" + (f" with {timing} timing" if timing else ""))
    rules = [_rule(key, counts, speedup_threshold, confidence, findings) for key, counts in layers.items()]
    policy = Policy(rules, reports[0].fingerprint, speedup_threshold, confidence, where="the merged reports")
    return Merged(policy, tuple(sorted(findings)))


def extend_policy(base: Policy, more: Policy) -> Policy:
    """A policy with the points of another added, such as a size that was measured later.

    Both must have the same fingerprint, threshold and confidence. If both have a point, the worse one stays: a policy
    holds no samples that could be pooled. Merge all reports at once where that matters.
    """
    if base.fingerprint is None or more.fingerprint is None:
        old = base if base.fingerprint is None else more
        raise MergeError(f"{old.where}: a policy of version 1 keeps no points to add to; merge its reports again")
    _check_one_machine(base, more, "make a policy of each")
    for setting in ("speedup_threshold", "confidence"):
        ours, theirs = getattr(base, setting), getattr(more, setting)
        if ours != theirs:
            raise MergeError(
                f"{base.where} has the {setting} {ours}, {more.where} {theirs}; give the first to the second"
            )
    rules = {rule.key: rule for rule in base.rules}
    for rule in more.rules:
        known = rules[rule.key].points if rule.key in rules else ()
        points = {point.tokens: point for point in known}
        for point in rule.points:
            points[point.tokens] = _worse(points.get(point.tokens), point)
        rules[rule.key] = replace(rule, points=tuple(points[tokens] for tokens in sorted(points)))
    return Policy(rules.values(), base.fingerprint, base.speedup_threshold, base.confidence, where=base.where)


def _worse(one: Point | None, other: Point) -> Point:
    """The measurement of a point that is worse for FP8; running out of memory is a loss without times."""
    if one is None:
        return other
    without = [point for point in (one, other) if point.speedup is None]
    if without and (len(without) == 2 or without[0].answer == LOSE):
        return without[0]
    timed = [point for point in (one, other) if point.speedup is not None]
    return min(timed, key=lambda point: (point.low or 0.0, point.high or 0.0))


# ---- checks of reports, and their rows -------------------------------------------------------------------------------


def _check_one_machine(one: Report | Policy, other: Report | Policy, advice: str) -> None:
    assert one.fingerprint is not None
    assert other.fingerprint is not None
    for key, (ours, theirs) in one.fingerprint.differences(other.fingerprint).items():
        raise FingerprintError(
            f"{one.where} was measured with {key} {ours!r}, {other.where} with {theirs!r}; times of the two are not "
            f"comparable: {advice}"
        )


def _rows(reports: Sequence[Report], findings: list[str]) -> list[tuple[str, Row]]:
    """All rows with their recipe, in fixed order. Rows that measured the same are pooled; equal reports count once."""
    by_key: dict[tuple[Any, ...], list[Row]] = {}
    different = {(report.recipe, report.rows): report for report in reports}
    for report in sorted(different.values(), key=Report.to_lines):
        for row in report.rows:
            by_key.setdefault((report.recipe, *row.key), []).append(row)
    counts = {key: [len(row.samples_ms) for row in rows] for key, rows in by_key.items()}
    pooled = []
    for key in sorted(by_key, key=repr):
        *layer, precision = key
        partner = (*layer, "fp8" if precision == "bf16" else "bf16")
        row = _pooled(by_key[key], findings)
        # Sample i was taken next to sample i of the other precision only if both were pooled from the same reports.
        paired = row.in_turns and counts[key] == counts.get(partner)
        pooled.append((key[0], row if paired or len(by_key[key]) == 1 else replace(row, in_turns=False)))
    return pooled


def _pooled(rows: list[Row], findings: list[str]) -> Row:
    """One row from rows that measured the same. A failed one stands for all: FP8 must win wherever it was tried."""
    if len(rows) == 1:
        return rows[0]
    failed = [row for row in rows if row.status != OK]
    if failed:
        findings.append(f"{describe_row(failed[0])} failed in one of {len(rows)} reports: {failed[0].message}")
        return failed[0]
    samples = [sample for row in rows for sample in row.samples_ms][:MAX_SAMPLES]
    return replace(rows[0], samples_ms=tuple(samples), in_turns=all(row.in_turns for row in rows), padded_tokens=None)


# ---- from rows to points ---------------------------------------------------------------------------------------------


def _rule(
    key: tuple[Any, ...], counts: dict[int, list[Row]], threshold: float, confidence: float, findings: list[str]
) -> LayerRule:
    names = ("recipe", "part", "kind", "name", "shape", "tp", "etp", "num_gemms", "gemm")
    points = [_point(counts[tokens], threshold, confidence, key[0], findings) for tokens in sorted(counts)]
    return LayerRule(points=tuple(points), **dict(zip(names, key, strict=True)))


def _point(rows: list[Row], threshold: float, confidence: float, recipe: str, findings: list[str]) -> Point:
    """The measurement of one token count; where it was timed in several ways, the worst for FP8."""
    ways: dict[tuple[str | None, str], dict[str, Row]] = {}
    for row in rows:
        ways.setdefault((row.routing, row.timing), {})[row.precision] = row
    points = [_one_way(pair, threshold, confidence, recipe, findings) for pair in ways.values()]
    for answer in (LOSE, UNMEASURED, UNDECIDED):
        without = [point for point in points if point.speedup is None and point.answer == answer]
        if without:
            return without[0]
    lows, highs = [point.low or 0.0 for point in points], [point.high or 0.0 for point in points]
    worst = min(points, key=lambda point: (point.speedup or 0.0, point.low or 0.0))
    samples = min(point.samples or 0 for point in points)
    low, high = min(lows), min(highs)
    answer = answer_of(low, high, threshold)
    note = f"the worst of {len(points)} ways of timing" if len(points) > 1 else ""
    return Point(worst.tokens, answer, worst.speedup, low, high, samples, note)


def _one_way(pair: dict[str, Row], threshold: float, confidence: float, recipe: str, findings: list[str]) -> Point:
    some = next(iter(pair.values()))
    bf16, fp8 = pair.get("bf16"), pair.get("fp8")
    if bf16 is None or fp8 is None:
        lacking = "bf16" if bf16 is None else "fp8"
        findings.append(f"{recipe}: {describe_row(some)} has no {lacking} row to be compared with")
        return Point(some.tokens, UNMEASURED, note=f"{lacking} was not measured")
    if fp8.status == OOM and bf16.status == OK:
        return Point(some.tokens, LOSE, note=f"fp8 ran out of memory: {fp8.message}")
    for row in (fp8, bf16):
        if row.status == OOM:
            return Point(some.tokens, UNMEASURED, note=f"{row.precision} ran out of memory: {row.message}")
        if row.status != OK:
            findings.append(f"{recipe}: {describe_row(row)} failed: {row.message}")
            return Point(some.tokens, UNMEASURED, note=f"{row.precision} failed: {row.message}")
    in_turns = bf16.in_turns and fp8.in_turns
    interval = speedup_interval(bf16.samples_ms, fp8.samples_ms, in_turns=in_turns, confidence=confidence)
    samples = min(len(bf16.samples_ms), len(fp8.samples_ms))
    if interval is None:
        few = f"{samples} samples are too few for a confidence of {confidence}"
        findings.append(f"{recipe}: {describe_row(fp8)}: {few}")
        return Point(some.tokens, UNDECIDED, note=few)
    answer = interval.answer(threshold)
    return Point(some.tokens, answer, interval.speedup, interval.low, interval.high, samples)


def summary(policy: Policy) -> list[dict[str, Any]]:
    """A line per rule for a table: where FP8 is used and how many counts won, lost or stayed open."""
    rows = []
    for rule in policy.rules:
        answers = [point.answer for point in rule.points]
        size = f"etp {rule.etp}, {rule.num_gemms} gemms" if rule.kind in GROUPED_KINDS else f"tp {rule.tp}"
        rows.append(
            {
                "part": rule.part,
                "kind": rule.kind,
                "name": rule.name or "",
                "shape": f"{rule.shape[0]}x{rule.shape[1]}",
                "size": size,
                "recipe": rule.recipe,
                "gemm": rule.gemm,
                "fp8 at tokens": ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in rule.bands)
                or "nowhere",
                "win": answers.count(WIN),
                "lose": answers.count(LOSE),
                "undecided": answers.count(UNDECIDED),
                "unmeasured": answers.count(UNMEASURED),
            }
        )
    return rows
