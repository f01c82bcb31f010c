"""Compares weights by their decoded numbers: two models, or two files one tensor at a time, in any layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from bitplan.base.errors import StoreError
from bitplan.files.models.decoded_in_eval import slots_of
from bitplan.files.models.morph import encoded_modules_of
from bitplan.files.tensor_file import ReadableTensor
from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode
from bitplan.formats.quantization_error import Similarity, similarity
from bitplan.plan.structure.model_view import transposed_shape
from bitplan.plan.structure.parameters import named_parameters_of

if TYPE_CHECKING:
    from bitplan.files.models.comparable_tensors import ModelValues

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

    @property
    def differs(self) -> bool:
        """Whether a number differs; NaN differs from everything."""
        return self.sqnr_db != math.inf

    @property
    def badness(self) -> tuple[bool, float]:
        """A sort key: the worst agreement has the smallest."""
        return (False, 0.0) if math.isnan(self.sqnr_db) else (True, self.sqnr_db)

    def to_dict(self) -> dict[str, Any]:
        """Give the values for JSON, which has no infinity: the SQNR of equal tensors is null."""
        values = asdict(self)
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


NOTHING = Agreement(0, math.nan, math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Comparison:
    """Every tensor that both sides have, and findings about tensors that could not be compared.

    overall     all of them as one vector: large tensors that are equal make it look better than the quantized ones
    differing   the same over tensors whose numbers differ; count 0 if none does
    worst       the tensor of the least SQNR, or one with NaN; None if none differs
    """

    layers: Mapping[str, Agreement]
    overall: Agreement
    differing: Agreement
    findings: tuple[str, ...] = ()

    @property
    def differing_names(self) -> list[str]:
        return [name for name, layer in self.layers.items() if layer.differs]

    @property
    def worst(self) -> str | None:
        return min(self.differing_names, key=lambda name: self.layers[name].badness, default=None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "overall": self.overall.to_dict(),
            "differing": {"tensors": len(self.differing_names), **self.differing.to_dict()},
            "worst": self.worst,
            "layers": {name: layer.to_dict() for name, layer in self.layers.items()},
            "findings": list(self.findings),
        }


def _comparison(compared: Mapping[str, tuple[Similarity, Agreement]], findings: Sequence[str] = ()) -> Comparison:
    layers = {name: layer for name, (_, layer) in compared.items()}
    parts = []
    for only_differing in (False, True):
        some = [(sums, layer) for sums, layer in compared.values() if layer.differs or not only_differing]
        total = sum((sums for sums, _ in some), Similarity())
        parts.append(Agreement.of(total, sum(layer.count for _, layer in some)) if some else NOTHING)
    return Comparison(layers, parts[0], parts[1], tuple(findings))


def compare_models(a: Weights, b: Weights) -> Comparison:
    """Compare the weights that inference uses: the decoded version if there is one, else the parameter.

    a and b are models, or mappings of names to tensors and encodings such as a state_dict. Tied parameters count once.
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
        raise StoreError(f"the two cannot be compared: {', '.join(missing)}; give models of one architecture")
    return _comparison({name: _agreement(ours.weights[name], theirs.weights[name]) for name in counted})


@dataclass(frozen=True)
class _Effective:
    """One of two compared models: its weights under all their names; `counted` has one name of each tensor."""

    weights: Mapping[str, ReadableTensor]
    counted: frozenset[str]
    buffers: frozenset[str]
    is_model: bool

    @property
    def known(self) -> frozenset[str]:
        return self.buffers | self.weights.keys()


def _counted(ours: _Effective, theirs: _Effective) -> list[str]:
    """Names that both sides have, each parameter once; only a model shows which names are the same parameter."""
    sides = [side.counted for side in (ours, theirs) if side.is_model] or [ours.counted]
    return [name for name in ours.weights if name in theirs.weights and any(name in side for side in sides)]


def _effective(model: Weights) -> _Effective:
    if not isinstance(model, nn.Module):
        stored = {
            name: _weight(name, value)
            for name, value in model.items()
            if (isinstance(value, Encoded) or value.is_floating_point() or value.is_complex())
        }
        return _Effective(stored, frozenset(stored), frozenset(model.keys() - stored.keys()), is_model=False)
    weights: dict[str, ReadableTensor] = {}
    first_names: dict[tuple[int, str | None], str] = {}
    for named in named_parameters_of(model):
        slot, weight = slots_of(named.module).get(named.local), _weight(named.name, named.parameter)
        if slot is not None:
            decoded = functools.partial(slot.store.simulate, slot.fmt)
            weight = replace(weight, format=slot.fmt.name, pieces=functools.partial(_once, decoded))
        weights[named.name] = weight
        first_names.setdefault((id(named.parameter), weight.format), named.name)
    for name, module in encoded_modules_of(model).items():  # weights that a plan packed
        weights[name] = _weight(name, module.encoded, transposed=module.transposed)
        first_names.setdefault((id(module), weights[name].format), name)
    buffers = frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))
    return _Effective(weights, frozenset(first_names.values()), buffers, is_model=True)


def _weight(name: str, value: Tensor | Encoded, *, transposed: bool = False) -> ReadableTensor:
    fmt = value.fmt.name if isinstance(value, Encoded) else None
    shape = transposed_shape(tuple(value.shape)) if transposed else tuple(value.shape)

    def read() -> Tensor:
        numbers = decode(value) if isinstance(value, Encoded) else value.detach()
        return numbers.mT if transposed else numbers

    return ReadableTensor(name, shape, "float32", format=fmt, pieces=functools.partial(_once, read))


def _once(read: Callable[[], Tensor]) -> Iterator[Tensor]:
    yield read()


def compare_files(
    first: str | Path, second: str | Path, *, on_numbers: Callable[[int, str], None] = lambda _count, _name: None
) -> Comparison:
    """Compare the numbers of all tensors that both files have, worst first, across layouts of one model.

    Names and shapes that differ are findings. Integers (buffers, codes) must be equal, and count in no figure.
    """
    from bitplan.files.models.comparable_tensors import open_values  # here, because it imports gguf

    with ExitStack() as opened:
        one, two = open_values(first, second, opened)
        compared: dict[str, tuple[Similarity, Agreement]] = {}
        findings = _missing(one, two) + _missing(two, one)
        for name, ours in one.values.items():
            theirs = two.values.get(name)
            if theirs is None:
                continue
            on_numbers(0, name)
            if ours.shape != theirs.shape:
                findings.append(f"{name}: shape {ours.shape} in {first}, {theirs.shape} in {second}")
            elif ours.is_integer or theirs.is_integer:
                findings += _compare_integers(name, ours, theirs)
            else:
                compared[name] = _agreement(ours, theirs)
                if not math.isfinite(compared[name][0].square_difference):
                    findings.append(f"{name}: NaN or infinity on one side, so its figures say nothing")
            on_numbers(math.prod(ours.shape), name)
    if not compared:
        findings += [side.note for side in (one, two) if side.note]
        findings.append(f"{first} and {second} have no tensor in common")
    worst_first = sorted(compared.items(), key=lambda item: (item[1][1].badness, item[0]))
    return _comparison(dict(worst_first), findings)


def _missing(one: ModelValues, two: ModelValues) -> list[str]:
    return [f"{name}: in {one.path}, not in {two.path}" for name in one.values if name not in two.values]


def _agreement(ours: ReadableTensor, theirs: ReadableTensor) -> tuple[Similarity, Agreement]:
    sums = _compare_numbers(ours, theirs)
    return sums, Agreement.of(sums, math.prod(ours.shape), ours.format, theirs.format)


def _compare_numbers(ours: ReadableTensor, theirs: ReadableTensor) -> Similarity:
    """Sums over two tensors whose numbers may come in pieces of different sizes."""
    total = Similarity()
    left, right = torch.empty(0), torch.empty(0)
    mine, others = ours.pieces(), theirs.pieces()
    while True:
        left = left if left.numel() else next(mine, left).reshape(-1)
        right = right if right.numel() else next(others, right).reshape(-1)
        count = min(left.numel(), right.numel())
        if not count:
            return total
        total += similarity(left[:count], right[:count].to(left.device))
        left, right = left[count:], right[count:]


def _compare_integers(name: str, ours: ReadableTensor, theirs: ReadableTensor) -> list[str]:
    if ours.is_integer != theirs.is_integer:
        return [f"{name}: {ours.format} on one side, {theirs.format} on the other: integers are not weights"]
    one, two = (torch.cat([piece.reshape(-1) for piece in side.pieces()]) for side in (ours, theirs))
    differing = int((one.to(torch.int64) != two.to(torch.int64)).sum())
    return [f"{name}: {differing} of {one.numel()} integers differ"] if differing else []
