"""Evidence of training for the solver: gradients that selective precision saw, and times of an FP8 policy.

Gradients. A search's own sensitivities are of the model as it is, on a text. A run of selective precision saw
how large the gradient of each block (or layer) really was, relative to the others. The square of that over the square
of the same by the search's statistics is the `weight` of a group: so many times its nats count when formats are
chosen. Where both see the same, weights are one.

Times. A policy says how many times as fast as BF16 a layer's products are in FP8. Of a streamed weight only the formats
fp8_* can be multiplied so; all others are decoded, and take BF16's time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base.documents import OBJECT, Reader, load_document
from bitplan.fp8.policy.policy import Question, decide
from bitplan.fp8.policy.rules import Policy, load_policy
from bitplan.fp8.policy.vocabulary import MODULE
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.goal import EvidenceFileError
from bitplan.searching.statistics import GRADIENT, INPUTS, InputStatistics
from bitplan.streaming.selective.score import average_stats
from bitplan.streaming.selective.state import DOCUMENT as STATE
from bitplan.streaming.selective.state import read_history

if TYPE_CHECKING:
    from bitplan.searching.searched_model import SearchSubject

_SIZES = re.compile(r"(?P<count>\d+) parameters, (?P<numbers>\d+) numbers")
FP8 = "fp8_"


# ---- gradients -------------------------------------------------------------------------------------------------------


def weigh_by_gradients(
    evidence: SearchEvidence, subject: SearchSubject, statistics: InputStatistics, norms: Mapping[str, float]
) -> None:
    """Give every group the weight that the norms of its block's gradient give it."""
    squared_gradients: dict[str, float] = dict.fromkeys(norms, 0.0)
    units = {name: _unit_of(subject.names[name], norms) for name in subject.sites}
    for name, unit in units.items():
        if unit is not None:
            squared_gradients[unit] += _squared_gradient(statistics, name)
    both_squares = {unit: (norms[unit] ** 2, squared_gradients[unit]) for unit in norms if squared_gradients[unit] > 0}
    if not both_squares:
        raise EvidenceFileError("the gradients are of no layer that is searched", settings={"keep": None, "only": None})
    theirs, ours = (math.fsum(pair[at] for pair in both_squares.values()) for at in (0, 1))
    weights = {unit: (in_training / theirs) / (mine / ours) for unit, (in_training, mine) in both_squares.items()}
    for name, group in evidence.groups.items():
        of_group = [weights[unit] for tensor in group.tensors if (unit := units[tensor]) in weights]
        evidence.groups[name] = replace(group, weight=math.fsum(of_group) / len(of_group) if of_group else 1.0)


def read_gradients(path: str | Path, subject: SearchSubject) -> dict[str, float]:
    """The mean norm of each unit's gradient; a state of another model is refused by the unit that differs."""
    document = load_document(path, EvidenceFileError)
    reader = Reader(str(path), EvidenceFileError)
    inner = document.get("policy", document) if type(document) is dict else document
    if type(inner) is not dict or inner.get("document") != STATE:
        reader.stop("no state of selective precision; SelectivePrecisionPolicy.save writes one")
    if not OBJECT.holds(inner.get("layout")):
        reader.fail("layout", OBJECT.text, inner.get("layout"))
    layout: dict[str, Any] = inner["layout"]
    shapes = {ours: tuple(subject.model.get_parameter(ours).shape) for ours in subject.names.values()}
    for unit, unit_layout in layout.items():
        _require_unit(reader, unit, str(unit_layout), shapes)
    stats = average_stats(read_history(reader, inner.get("state"), layout))
    if not stats:
        reader.stop("it has no gradients yet; save it after some steps of training")
    return {name: row.l2_norm for name, row in stats.items()}


def _require_unit(reader: Reader, unit: str, saved: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    unit_shapes = [shape for name, shape in shapes.items() if len(shape) > 1 and name.startswith(f"{unit}.")]
    searched = f"{len(unit_shapes)} parameters, {sum(map(math.prod, unit_shapes))} numbers"
    match = _SIZES.match(saved)
    if match is None or match[0] != searched:
        reader.stop(
            f"gradients of another model: {unit[:80]!r} has {saved[:60]} there, and {searched} in the model that is "
            "searched"
        )


def _unit_of(name: str, units: Mapping[str, Any]) -> str | None:
    """The unit that a parameter is of: a block, or the longest name of a layer."""
    return max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default=None)


def _squared_gradient(statistics: InputStatistics, name: str) -> float:
    """The expected square of the gradient by a weight: E[g^2] times E[x^2], summed over its numbers."""
    inputs, gradient = statistics.mean(name, INPUTS), statistics.mean(name, GRADIENT)
    return 0.0 if inputs is None or gradient is None else float(gradient.sum()) * float(inputs.diagonal().sum())


# ---- times -----------------------------------------------------------------------------------------------------------


def read_speeds(path: str | Path, subject: SearchSubject, rows: int) -> dict[str, float]:
    """Each group's speed in FP8 over BF16, by a policy file; 1 where BF16 wins. Another model's policy is refused."""
    policy = load_policy(path)
    if policy.version == 1:
        raise EvidenceFileError(f"{path}: a policy of version 1 knows no shapes; make one of version 2 of the report")
    shapes = _product_shapes(subject)
    asked = {shape for group in shapes.values() for shape in group}
    in_policy = {rule.shape for rule in policy.rules if rule.gemm == MODULE}
    if not asked & in_policy:
        theirs, ours = (
            ", ".join(f"{shape[0]}x{shape[1]}" for shape in sorted(group)[:4]) for group in (in_policy, asked)
        )
        raise EvidenceFileError(
            f"{path}: a policy of another model: it has {theirs or 'nothing'}, and the model {ours}; "
            "measure this one (`bitplan fp8 bench`)"
        )
    return {
        name: max((_speedup(policy, shape, rows) for shape in group), default=1.0) for name, group in shapes.items()
    }


def time_by_policy(evidence: SearchEvidence, subject: SearchSubject, speeds: Mapping[str, float], rows: int) -> None:
    """Put times into the evidence: by the policy's speeds for formats fp8_*, BF16's for all others."""
    for name, group in evidence.groups.items():
        reference = group.reference_us[rows]
        for fmt, cost in group.formats.items():
            if fmt.startswith(FP8) or subject.target.streamed:
                speed = speeds[name] if fmt.startswith(FP8) else 1.0
                group.formats[fmt] = replace(cost, us={**cost.us, rows: reference / speed})


def _speedup(policy: Policy, shape: tuple[int, int], rows: int) -> float:
    """The speedup of a whole layer in FP8 where it was measured to win, else 1: it runs in BF16."""
    speedups = [1.0]
    for rule in policy.rules:
        if rule.gemm == MODULE and rule.shape == shape and rule.name is not None:
            size = rule.tp or 1
            question = Question(
                rule.kind, rows, rule.name, size, shape=shape, recipe=rule.recipe, gemm=MODULE, part=rule.part
            )
            decision = decide(policy, question)
            speedups += [decision.speedup or 1.0] if decision else []
    return max(speedups)


def _product_shapes(subject: SearchSubject) -> dict[str, list[tuple[int, int]]]:
    """The shapes under which a policy may know a group: its own, and with the layers that FP8 computes with it."""
    groups = subject.groups(subject.sites)
    matrices = {
        name: [subject.sites[tensor].shape for tensor in tensors if len(subject.sites[tensor].shape) == 2]
        for name, tensors in groups.items()
    }
    joined: dict[tuple[str, int], int] = {}  # rows of all layers of a module that have so many columns
    for name, shapes in matrices.items():
        for rows, columns in shapes:
            joined_key = name.rpartition(".")[0], columns
            joined[joined_key] = joined.get(joined_key, 0) + rows
    shapes_of: dict[str, list[tuple[int, int]]] = {}
    for name, shapes in matrices.items():
        first = [(sum(rows for rows, _ in shapes), shapes[0][1])] if shapes else []
        shapes_of[name] = first + [(joined[name.rpartition(".")[0], columns], columns) for _, columns in first]
    return shapes_of
