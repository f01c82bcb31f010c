"""Plans from the records of other parts: what FP8's policy, selective precision and trees decided, as a `Plan`.

    record                                    kind       name                                    format
    plan.json                                 its own    its own                                 its own
    an FP8 policy                             product    llm.row.fc2.4096x14336.tp1.fprop@8192   fp8:RECIPE, bfloat16
    a state or log of selective precision     wire       the block or layer                      that it is sent in
    a log of a run's plan                     its own    BLOCK.PART: fprop, dgrad, wgrad, wire, moments
    a saved model of boosted trees            gradient   gradients                               float32, i16 or i8

A product has an entry for every token count that was measured (`@8192`, and `tokens` in its evidence), a block has the
step in its evidence. `PATH@N` reads one of them alone: a policy at N tokens, whose names then have no count, so that
two counts can be compared; a log at step N. A folder that a search wrote is its plan.json.

The records are read by their keys: the parts that write them need not be there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bitplan.base.documents import Fields, is_number, load_document, reading_error, show
from bitplan.base.errors import FileFormatError, PlanFileError
from bitplan.base.records import check_input, parse_json
from bitplan.plan.plan import DOCUMENT, Choice, Plan, Planned, plan_file

RUN_LOG = "bitplan-run-log"
BF16 = "bfloat16"
WIN = "win"
MAX_LINE_BYTES = 8 * 2**20
_AT = re.compile(r"(.+)@(\d{1,15})")
_WIRE = {"bf16": BF16, "int8": "int8_row", "fp8": "fp8_e4m3_row", "int4": "int4_g32"}
_GRADIENTS = {"f32": "float32", "i16": "i16", "i8": "i8"}


class _Fields(Fields):
    error = PlanFileError


def read_plan(path: str | Path) -> Plan:
    """The plan that a record holds: a plan, an FP8 policy, a state or log of selective precision, a model of trees.

    `PATH@N` is a policy at N tokens, or a log at step N.
    """
    path, at = Path(path), None
    if not path.exists() and (match := _AT.fullmatch(str(path))):
        path, at = Path(match[1]), int(match[2])
    path = plan_file(path)
    try:
        check_input(path)
        with path.open("rb") as file:
            first = file.readline(MAX_LINE_BYTES)
            is_run = RUN_LOG.encode() in first
            is_log = b'"step_id"' in first and first.rstrip().endswith(b"}")
            lines = [first, *file] if is_log else []
    except (OSError, FileFormatError) as fault:
        raise reading_error(fault, path, PlanFileError) from None
    if is_run:
        return read_run_log(path).plan(at)
    if is_log:
        return plan_of_log(_whole_lines(lines, str(path)), at, where=str(path))
    return plan_of_document(load_document(path, PlanFileError), at, where=str(path))


def plan_of_document(document: Any, at: int | None = None, *, where: str = "plan") -> Plan:
    """The plan in a document of any kind that decides formats; `at` is a token count of a policy."""
    fields = _Fields(document, where)
    named = document.get("document")
    if named == "bitplan-fp8-policy" or (named is None and "speedup_threshold" in document):
        return _plan_of_policy(fields, at)
    if at is not None:
        raise PlanFileError(f"{where}@{at}: only a policy has token counts and only a log has steps")
    if named == "bitplan-selective-state":
        config, state = fields.fields("config"), fields.fields("state")
        formats = {name: config.text(f"{name}_format", fmt) for name, fmt in _WIRE.items() if name != "bf16"}
        return _plan_of_units(state.items("units"), formats | {"bf16": BF16}, state.whole("last_step", None), "score")
    if document.get("format") == "bitplan.trees":
        return _plan_of_trees(fields)
    if named != DOCUMENT:
        raise PlanFileError(
            f"{where}: expected a plan, an FP8 policy, a state or log of selective precision, or a model of trees, got "
            f"{show(named or list(document)[:6])}"
        )
    return Plan.from_document(document, where=where)


# ---- products --------------------------------------------------------------------------------------------------------


def _plan_of_policy(policy: _Fields, tokens: int | None) -> Plan:
    entries: dict[str, Planned] = {}
    rules = policy.each("rules") if policy.value.get("version") != 1 else _rules_of_thresholds(policy)
    for rule in rules:
        layer = ".".join(filter(None, (rule.text("part", "llm"), rule.text("kind"), rule.text("name", ""))))
        sizes = "x".join(str(int(size)) for size in rule.numbers("shape", []))
        parallel = "".join(f".{key}{rule.whole(key)}" for key in ("tp", "etp", "num_gemms") if key in rule)
        name = f"{layer}{'.' if sizes else ''}{sizes}{parallel}.{rule.text('gemm', 'module')}"
        for point in rule.each("points"):
            if tokens in (None, point.whole("tokens")):
                key = name if tokens is not None else f"{name}@{point.whole('tokens')}"
                _add_product(entries, key, rule.text("recipe", "blockwise"), point)
    if tokens is not None and not entries:
        raise PlanFileError(
            f"{policy.where}: nothing was measured at {tokens} tokens; leave @{tokens} out to see what was"
        )
    return Plan(entries)


def _rules_of_thresholds(policy: _Fields) -> Iterable[_Fields]:
    """The rules of a policy of version 1, by kind and for dense kinds by name, with one point each."""
    for kind, group in policy.fields("rules").value.items():
        for name, rules in group.items() if isinstance(group, dict) else [("", group)]:
            for index, rule in enumerate(rules if isinstance(rules, list) else [rules]):
                fields = _Fields(rule, f"{policy.where}: rules[{kind!r}][{index}]")
                point = {
                    "tokens": fields.whole("min_tokens"),
                    "answer": WIN,
                    "speedup": fields.number("measured_speedup"),
                }
                yield _Fields(fields.value | {"kind": kind, "name": name, "points": [point]}, fields.where)


def _add_product(entries: dict[str, Planned], key: str, recipe: str, point: _Fields) -> None:
    """Add a product at one token count to the entries; where several recipes win, the fastest stays."""
    tokens, answer = point.whole("tokens"), point.text("answer")
    figures = {key: point.number(key) for key in ("speedup", "low", "high", "samples") if key in point}
    between = f", between {figures['low']:.3f} and {figures['high']:.3f}" if "low" in figures else ""
    measured = (
        f"{figures['speedup']:.3f} times BF16's speed{between}" if "speedup" in figures else point.text("note", "")
    )
    evidence = {"tokens": tokens, "answer": answer, "recipe": recipe, **figures}
    fmt = f"fp8:{recipe}" if answer == WIN else BF16
    choice = Choice(fmt, f"{answer} of {recipe} at {tokens} tokens: {measured}".rstrip(": "), evidence, "policy")
    before = entries.get(key)
    if before is None or _rank(choice) > _rank(before.choice):
        entries[key] = Planned(choice, kind="product")


def _rank(choice: Choice) -> tuple[bool, float]:
    evidence: Mapping[str, Any] = choice.evidence or {}
    return choice.format != BF16, float(evidence.get("speedup") or 0)


# ---- what crosses the bus --------------------------------------------------------------------------------------------


def plan_of_log(lines: Iterable[tuple[int, Any]], step: int | None = None, *, where: str = "log") -> Plan:
    """The plan at a step of selective precision's telemetry, (number, value) of its lines; at the last one if None."""
    latest: _Fields | None = None
    for number, line in lines:
        fields = _Fields(line, f"{where}: line {number}")
        if step is None or fields.whole("step_id") <= step:
            latest = fields
    if latest is None:
        raise PlanFileError(f"{where}: no line is of step {step} or before; leave @{step} out for the last one")
    return _plan_of_units(latest.items("block_details"), _WIRE, latest.whole("step_id"), "sensitivity")


def _plan_of_units(
    units: Iterable[tuple[str, _Fields]], formats: Mapping[str, str], step: int | None, score: str
) -> Plan:
    entries = {}
    for name, unit in units:
        precision = unit.text("precision", "bf16")
        if precision not in formats:
            unit.fail("precision", f"one of {', '.join(formats)}", precision)
        evidence = {"step": step, "score": unit.number(score, None)}
        figures = {key: value for key, value in evidence.items() if value is not None}
        choice = Choice(formats[precision], unit.text("reason", "") or f"{precision} by the policy", figures, "policy")
        entries[name] = Planned(choice, kind="wire")
    return Plan(entries)


def _whole_lines(lines: Iterable[bytes], where: str) -> Iterable[tuple[int, Any]]:
    """The lines of a log whose writer may have been killed: what is no JSON is left out."""
    for number, line in enumerate(lines, 1):
        try:
            yield number, parse_json(line, where=where)
        except FileFormatError:
            continue


# ---- a run's plan ----------------------------------------------------------------------------------------------------


class RunChange(NamedTuple):
    """A change in the log of a run's plan: from a step on, a row has another format."""

    step: int
    name: str
    before: str
    to: str
    reason: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True)
class RunLog:
    """The log of a run's plan: how it began, and its changes; those that a resumed run made again are there once.

    `times` are milliseconds a step, by what was low and the first step with it.
    """

    where: str
    settings: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, str]]
    changes: tuple[RunChange, ...]
    times: Mapping[tuple[str, int], float]

    def plan(self, step: int | None = None) -> Plan:
        """The plan at a step; at the end if None."""
        entries = {
            name: Planned(Choice(row["format"], row["reason"], cause="default"), kind=row["kind"])  # type: ignore[arg-type]
            for name, row in self.rows.items()
        }
        for one in self.changes:
            if step is None or one.step <= step:
                choice = Choice(one.to, one.reason, {"step": one.step, **one.evidence}, "policy")
                entries[one.name] = replace(entries[one.name], choice=choice)
        return Plan(entries)


def read_run_log(path: str | Path) -> RunLog:
    """The log that a `RunController` wrote; a line that its killed writer left torn at the end is left out."""
    path = Path(path)
    try:
        check_input(path)
        lines = path.read_bytes().split(b"\n")
        values = [parse_json(line, where=f"{path}: line {at}") for at, line in enumerate(lines[:-1], 1)]
    except (OSError, FileFormatError) as fault:
        raise reading_error(fault, path, PlanFileError) from None
    return run_log_of(values, str(path))


def run_log_of(values: Iterable[Any], where: str) -> RunLog:
    """Read a run's log from its lines' values."""
    fields = [_Fields(value, f"{where}: line {at}") for at, value in enumerate(values, 1)]
    if not fields or fields[0].text("document", "") != RUN_LOG or fields[0].whole("version") != 1:
        raise PlanFileError(f"{where}: expected a {RUN_LOG} of version 1")
    head, *lines = fields
    rows = {name: {key: row.text(key) for key in ("format", "kind", "reason")} for name, row in head.items("rows")}
    changes: list[RunChange] = []
    times: dict[tuple[str, int], float] = {}
    for line in lines:
        number = line.whole("number")
        if "resumed_after" in line:
            del changes[number:]
        if number != len(changes):
            raise PlanFileError(f"{line.where}: change {len(changes)} is missing, got {number}: the log has lost lines")
        if "timed" in line:
            times[line.text("timed"), line.whole("first")] = line.number("ms")
        if "timed" in line or "resumed_after" in line:
            continue
        name = line.text("name")
        if name not in rows:
            line.fail("name", f"one of the {len(rows)} rows that the log begins with", name)
        evidence = line.fields("evidence").value
        for key, value in evidence.items():
            figures = value.values() if type(value) is dict else [value]
            if not all(is_number(figure) for figure in figures):
                line.fail("evidence", "figures, and objects of figures", {key: value})
        changes.append(
            RunChange(line.whole("step"), name, line.text("from"), line.text("to"), line.text("reason"), evidence)
        )
    return RunLog(where, head.fields("settings").value, rows, tuple(changes), times)


# ---- gradients of trees ----------------------------------------------------------------------------------------------


def _plan_of_trees(model: _Fields) -> Plan:
    precision = model.fields("parameters").text("gradient_precision", "f32").lower()
    if precision not in _GRADIENTS:
        model.fail("gradient_precision", f"one of {', '.join(_GRADIENTS)}", precision)
    losses = [loss for loss in model.value.get("losses") or [] if isinstance(loss, int | float)]
    evidence = {"trees": len(model.value.get("trees") or []), **({"loss": float(losses[-1])} if losses else {})}
    reason = f"the {model.text('kind', 'model')} was fitted with gradients in {precision}"
    return Plan({"gradients": Planned(Choice(_GRADIENTS[precision], reason, evidence, "held"), kind="gradient")})
