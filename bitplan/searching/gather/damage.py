"""What a format takes from a model, in nats, predicted from the really quantized weight."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitplan.formats import Encoded, get_format
from bitplan.kernels import decode, encode
from bitplan.searching.gather.statistics import COUNTS, GRADIENT, INPUTS, LOOKUP, InputStatistics
from bitplan.searching.gather.subject import SearchSubject, WeightSite

CACHE_BYTES = 4 * 2**30
SAMPLED_ROWS = 64  # of a weight, for what compensated rounding gains
UNSEEN = 0.5  # how often a token that the text did not have counts as seen


@dataclass
class RoundedWeights:
    """Weights in formats, each rounded once; what does not fit into `budget` bytes is rounded again when asked for."""

    subject: SearchSubject
    statistics: InputStatistics
    budget: int = CACHE_BYTES
    _kept: OrderedDict[tuple[str, str], Encoded] = field(default_factory=OrderedDict, repr=False)
    _bytes: int = 0

    def encoded(self, name: str, fmt: str) -> Encoded:
        key = name, fmt
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        site = self.subject.sites[name]
        self._kept[key] = made = self._round(site, fmt)
        self._bytes += get_format(fmt).nbytes(site.shape)
        while self._bytes > self.budget and len(self._kept) > 1:
            (old, old_format), _ = self._kept.popitem(last=False)
            self._bytes -= get_format(old_format).nbytes(self.subject.sites[old].shape)
        return made

    def decoded(self, name: str, fmt: str) -> Tensor:
        return decode(self.encoded(name, fmt), torch.float32)

    def weights(self, tensors: Mapping[str, str]) -> dict[str, Tensor]:
        """Tensors with their formats -> the numbers a runtime would compute with."""
        return {name: self.decoded(name, fmt) for name, fmt in tensors.items()}

    def predicted(self, name: str, fmt: str) -> float:
        """Nats a token that the format costs this weight alone.

        Rounding that compensates errors takes time, and its rows are independent: some rows say how much better it is
        than plain rounding, which is done for all.
        """
        site = self.subject.sites[name]
        weight = site.parameter.detach().float()
        plain = damage_of_rows(site, weight - decode(encode(weight, fmt, name=name), torch.float32), self.statistics)
        total = float(plain.sum())
        if get_format(fmt).is_cast or total <= 0:
            return max(0.0, total)
        rows = torch.arange(0, len(weight), max(1, len(weight) // SAMPLED_ROWS), device=weight.device)
        rounded = decode(self._round(site, fmt, rows), torch.float32)
        sampled = damage_of_rows(site, weight[rows] - rounded, self.statistics, rows)
        before = float(plain[rows].sum())
        return total * float(sampled.sum()) / before if before > 0 else total

    def _round(self, site: WeightSite, fmt: str, rows: Tensor | None = None) -> Encoded:
        weight = site.parameter.detach().float()
        return encode(weight if rows is None else weight[rows], fmt, name=site.name)


def damage_of_rows(site: WeightSite, change: Tensor, statistics: InputStatistics, rows: Tensor | None = None) -> Tensor:
    """Nats a token for each row of a change dW, or of some rows of one: their sum is the damage.

    1/2 gradient_r dW_r A dW_r^T, and for an embedding the same of what it looks up.
    """

    def chosen(part: Tensor) -> Tensor:
        part = part.to(change.device)
        return part if rows is None else part[rows]

    nats = torch.zeros(len(change), dtype=torch.float64, device=change.device)
    inputs, gradient = statistics.mean(site.name, INPUTS), statistics.mean(site.name, GRADIENT)
    if inputs is not None and gradient is not None:
        moved = ((change @ inputs.to(change.device)) * change).sum(1).clamp_min(0)
        nats += chosen(gradient).double() * moved.double() / 2
    counts, lookup = statistics.sums.get(f"{site.name}.{COUNTS}"), statistics.mean(site.name, LOOKUP)
    if counts is not None and lookup is not None:
        share = (counts + UNSEEN) / (statistics.tokens + UNSEEN * len(counts))
        nats += chosen(share).double() * (change.square() @ lookup.to(change.device)).double() / 2
    return nats


def input_hessian(site: WeightSite, statistics: InputStatistics) -> Tensor | None:
    """[K, K]: what rounding a weight minimises, for all of its uses together; None where nothing was seen."""
    inputs, gradient = statistics.mean(site.name, INPUTS), statistics.mean(site.name, GRADIENT)
    counts, lookup = statistics.sums.get(f"{site.name}.{COUNTS}"), statistics.mean(site.name, LOOKUP)
    if lookup is None or counts is None:
        return inputs
    by_lookup = torch.diag(lookup) / len(counts)
    if inputs is None or gradient is None:
        return by_lookup
    return inputs * float(gradient.mean()) + by_lookup.to(inputs.device)


def formats_that_hold(shape: Sequence[int], formats: Sequence[str]) -> list[str]:
    """The formats whose blocks divide the rows of a tensor."""
    held = []
    for name in formats:
        fmt = get_format(name)
        cols = fmt.matrix_shape(tuple(shape))[1]
        if fmt.padded_cols(cols) == cols:
            held.append(name)
    return held
