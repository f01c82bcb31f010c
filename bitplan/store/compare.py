"""Comparing weights by the numbers they stand for: two models, or two files one tensor at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from bitplan.errors import StoreError
from bitplan.formats import Encoded
from bitplan.formats.report import Similarity, similarity
from bitplan.kernels import decode
from bitplan.store.eval_weights import slots_of
from bitplan.store.models import places_of
from bitplan.store.tensor_files import TensorFile, open_tensors

Weights = nn.Module | Mapping[str, Tensor | Encoded]


@dataclass(frozen=True)
class Agreement:
    """How close two tensors, or all tensors of two models, are; `a` is the reference."""

    count: int
    cosine: float
    sqnr_db: float
    relative_error: float
    max_error: float
    format_a: str | None = None
    format_b: str | None = None

    @classmethod
    def of(cls, sums: Similarity, count: int, *formats: str | None) -> Self:
        return cls(count, sums.cosine, sums.sqnr_db, sums.relative_error, sums.max_error, *formats)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: the SQNR of equal tensors is null."""
        values = asdict(self)
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


@dataclass(frozen=True)
class Comparison:
    """Every tensor that both sides have, all of them together, and what could not be compared."""

    layers: Mapping[str, Agreement]
    overall: Agreement
    findings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        layers = {name: layer.to_dict() for name, layer in self.layers.items()}
        return {"overall": self.overall.to_dict(), "layers": layers, "findings": list(self.findings)}


def compare_models(a: Weights, b: Weights) -> Comparison:
    """Compare the weights that inference sees: the decoded version where there is one, else the parameter.

    Models, or mappings of names to tensors and encodings such as a state_dict. Tied parameters count once.
    """
    ours, theirs = _effective(a), _effective(b)
    missing = [f"{name!r} only in a" for name in ours.counted if name not in theirs.known]
    missing += [f"{name!r} only in b" for name in theirs.counted if name not in ours.known]
    counted = _counted(ours, theirs)
    missing += [
        f"{name!r} is {ours.weights[name].shape} in a, {theirs.weights[name].shape} in b"
        for name in counted
        if ours.weights[name].shape != theirs.weights[name].shape
    ]
    if missing:
        raise StoreError(f"the two cannot be compared: {', '.join(missing)}")
    layers, total = {}, Similarity()
    for name in counted:
        one, two = ours.weights[name], theirs.weights[name]
        first = one.numbers()
        sums = similarity(first, two.numbers().to(first.device))
        layers[name] = Agreement.of(sums, first.numel(), one.fmt, two.fmt)
        total += sums
    return Comparison(layers, Agreement.of(total, sum(layer.count for layer in layers.values())))


@dataclass(frozen=True)
class _Weight:
    shape: tuple[int, ...]
    fmt: str | None
    numbers: Callable[[], Tensor]


@dataclass(frozen=True)
class _Effective:
    """The weights of one side by all their names; `counted` leaves out second names of the same numbers."""

    weights: Mapping[str, _Weight]
    counted: frozenset[str]
    buffers: frozenset[str]
    is_model: bool

    @property
    def known(self) -> frozenset[str]:
        return self.buffers | self.weights.keys()


def _counted(ours: _Effective, theirs: _Effective) -> list[str]:
    """What both have, each parameter once; only a model can tell which names are the same parameter."""
    sides = [side.counted for side in (ours, theirs) if side.is_model] or [ours.counted]
    return [name for name in ours.weights if name in theirs.weights and any(name in side for side in sides)]


def _effective(model: Weights) -> _Effective:
    if not isinstance(model, nn.Module):
        given = {name: _weight(value) for name, value in model.items()}
        return _Effective(given, frozenset(given), frozenset(), is_model=False)
    weights: dict[str, _Weight] = {}
    first_names: dict[tuple[int, str | None], str] = {}
    for place in places_of(model):
        slot, weight = slots_of(place.module).get(place.local), _weight(place.parameter)
        if slot is not None:
            weight = _Weight(weight.shape, slot.fmt.name, functools.partial(slot.store.simulate, slot.fmt))
        weights[place.name] = weight
        first_names.setdefault((id(place.parameter), weight.fmt), place.name)
    buffers = frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))
    return _Effective(weights, frozenset(first_names.values()), buffers, is_model=True)


def _weight(value: Tensor | Encoded) -> _Weight:
    if isinstance(value, Encoded):
        return _Weight(value.shape, value.fmt.name, functools.partial(decode, value))
    return _Weight(tuple(value.shape), None, value.detach)


def compare_files(
    first: str | Path, second: str | Path, *, on_bytes: Callable[[int, str], None] = lambda _count, _name: None
) -> Comparison:
    """Compare all tensors that both files have, worst first; names and shapes that differ are findings."""
    with open_tensors(first) as one, open_tensors(second) as two:
        layers, total = {}, Similarity()
        findings = _missing(one, two) + _missing(two, one)
        for name, spec in one.specs.items():
            other = two.specs.get(name)
            if other is None:
                continue
            if spec.shape != other.shape:
                findings.append(f"{name}: shape {spec.shape} in {first}, {other.shape} in {second}")
                continue
            on_bytes(0, name)
            numbers = one.read_float(name)
            sums = similarity(numbers, two.read_float(name))
            total += sums
            layers[name] = Agreement.of(sums, numbers.numel(), spec.format, other.format)
            on_bytes(spec.nbytes, name)
            if not math.isfinite(sums.square_difference):
                findings.append(f"{name}: NaN or infinity on one side, so its figures say nothing")
    if not layers:
        nothing = Agreement(0, math.nan, math.nan, math.nan, math.nan)
        return Comparison({}, nothing, (*findings, f"{first} and {second} have no tensor in common"))
    worst_first = dict(sorted(layers.items(), key=lambda item: (item[1].sqnr_db, item[0])))
    return Comparison(worst_first, Agreement.of(total, sum(one.count for one in layers.values())), tuple(findings))


def _missing(one: TensorFile, two: TensorFile) -> list[str]:
    return [f"{name}: in {one.path}, not in {two.path}" for name in one.specs if name not in two.specs]
