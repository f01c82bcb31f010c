"""Predicted damage of all experts of a projection together: hundreds of small weights, for every format.

Each expert has its own inputs and gradients, and what a format does to one it does to all alike. So every expert is
rounded once, to a format that takes no time, with its inputs taken as independent of each other; a few that the damage
is largest of say, by some of their rows and their whole inputs, how many times that each format costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.formats import get_format
from bitplan.kernels import decode, encode
from bitplan.searching.gather.damage import (
    AT_ONCE,
    QUICK_FORMATS,
    SAMPLED_ROWS,
    SAMPLED_SHARE,
    RoundedWeights,
    formats_that_hold,
    projection_of,
)
from bitplan.searching.gather.searched_model import SearchSubject
from bitplan.searching.gather.statistics import GRADIENT, INPUTS
from bitplan.searching.groups import group_name

MOST_SAMPLED = 8  # experts whose rows are rounded to every format
SAMPLED_INPUTS = 2**28  # numbers of their second moments that are in memory


def experts_together(subject: SearchSubject, weights: Iterable[str]) -> list[tuple[str, ...]]:
    """Weights that are predicted together: the experts of one projection of a layer; every other weight alone."""
    found: dict[str, list[str]] = {}
    for name in weights:
        key = name if subject.sites[name].slice is None else group_name(name, fused=False)
        found.setdefault(key, []).append(name)
    return [tuple(names) for names in found.values()]


class ExpertDamage:
    """Nats a token of all experts of a projection, format by format; the last ones' statistics are remembered."""

    def __init__(self, rounded: RoundedWeights) -> None:
        self._rounded = rounded
        self._known: dict[tuple[str, ...], _Sample] = {}

    def predicted(self, names: tuple[str, ...], fmt: str) -> float:
        """What the format costs these experts, with the rounding that `quantize --evidence` applies."""
        if names not in self._known:
            kept = list(self._known.items())[-1:]  # gate and up of a group come in turns
            self._known = dict([*kept, (names, self._sample(names))])
        sample = self._known[names]
        nats = sample.damage(fmt)
        whole = sample.all_quick * nats / sample.quick if sample.quick > 0 else nats
        return whole if get_format(fmt).is_cast else whole * self._rounded.gain(projection_of(names[0]), fmt)

    def _sample(self, names: Sequence[str]) -> _Sample:
        subject, statistics = self._rounded.subject, self._rounded.statistics
        outputs, columns = subject.sites[names[0]].shape
        quick = formats_that_hold((outputs, columns), QUICK_FORMATS)[0]
        all_quick = torch.cat([self._quick(some, quick) for some in _chunks(names, outputs * columns)])
        count = max(1, min(len(names), MOST_SAMPLED, SAMPLED_INPUTS // columns**2))
        chosen = [names[index] for index in all_quick.argsort(descending=True, stable=True)[:count].tolist()]
        wanted = max(SAMPLED_ROWS // count, outputs // SAMPLED_SHARE)
        rows = torch.arange(0, outputs, max(1, outputs // wanted), device=subject.device)
        weights = torch.stack([subject.weight(name)[rows] for name in chosen])
        inputs, gradients = [], []
        for name in chosen:
            own, gradient = statistics.mean(name, INPUTS, subject.device), statistics.mean(name, GRADIENT)
            assert own is not None and gradient is not None  # every expert has some: see RoutedTokens
            inputs.append(own)
            gradients.append(gradient.to(subject.device)[rows])
        minded, diagonal = torch.stack(gradients), torch.stack([own.diagonal() for own in inputs])
        part = float(_independent(_change(weights, quick), diagonal, minded).sum())
        return _Sample(weights, torch.stack(inputs), minded, float(all_quick.sum()), part)

    def _quick(self, names: Sequence[str], fmt: str) -> Tensor:
        """Of each expert, with inputs taken as independent: the diagonal of their second moments alone."""
        subject, statistics = self._rounded.subject, self._rounded.statistics
        weights = torch.stack([subject.weight(name) for name in names])
        diagonals, gradients = [], []
        for name in names:
            inputs, gradient = statistics.mean(name, INPUTS), statistics.mean(name, GRADIENT)
            assert inputs is not None and gradient is not None
            diagonals.append(inputs.diagonal().clone())
            gradients.append(gradient)
        places = (torch.stack(each).to(subject.device) for each in (diagonals, gradients))
        return _independent(_change(weights, fmt), *places).sum(1).cpu()


@dataclass(frozen=True)
class _Sample:
    """Some rows [experts, rows, K] of some experts with their inputs [experts, K, K]; `quick` is their part of all."""

    weights: Tensor
    inputs: Tensor
    gradients: Tensor
    all_quick: float
    quick: float

    def damage(self, fmt: str) -> float:
        change = _change(self.weights, fmt)
        moved = (torch.bmm(change, self.inputs) * change).sum(-1).clamp_min(0)
        return float((self.gradients.double() * moved.double()).sum()) / 2


def _change(weights: Tensor, fmt: str) -> Tensor:
    """Weights [experts, rows, K] minus their numbers in a format, to nearest."""
    flat = weights.flatten(0, 1)
    return decode(encode(flat, fmt), torch.float32).neg_().add_(flat).view_as(weights)


def _independent(change: Tensor, diagonal: Tensor, gradients: Tensor) -> Tensor:
    """Nats a token of each expert's rows, inputs taken as independent."""
    moved = torch.bmm(change.square(), diagonal.float()[:, :, None])[:, :, 0]
    return gradients.double() * moved.double() / 2


def _chunks(names: Sequence[str], numbers: int) -> Iterator[Sequence[str]]:
    step = max(1, AT_ONCE // numbers)
    for start in range(0, len(names), step):
        yield names[start : start + step]
