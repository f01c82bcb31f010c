"""GGUF's blocks of vectors (IQ2 and IQ3): 4 or 8 numbers share an index into a fixed list of vectors.

A block is 256 numbers. A number is d x multiple of its group x the vector's number x its sign; multiples are unit x
(1, 3, ... 31). Signs of eight numbers are a byte, or seven bits where the number of minus signs is even. The lists of
vectors are gguf-py's. Decoding is checked to the bit against gguf-py. Source: ggml's ggml-common.h.

The search takes for each group the best of some scales, each fitted to the vectors that are nearest with it; then d
and the groups' multiples, each tried one up and one down, and d is fitted again. The nearest vector is exact: all are
tried, with all places of the one wrong sign where signs must be even.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bitplan.formats.gguf.layouts import Plane, RowOfParts, float_bytes, floats
from bitplan.formats.gguf.search import FIT_STEPS, FLOAT16_MAX, by_halves
from bitplan.formats.scale_rules import reciprocal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NUMBERS = 256  # in a block
SIGNED = 8  # numbers whose signs are stored together
MOST = 15  # the last of the stored multiples, 0 to 15
AT_ONCE = 2**22  # numbers of a temporary
STARTS = (
    0.65,
    0.8,
    0.95,
    1.1,
)  # times the group's largest number over the vectors' largest number: scales to start from
REFINEMENTS = 1  # of d
MULTIPLES = (0.96, 1.04, 0.92, 1.08, 0.85)  # of the d that the largest scale asks for


class VectorParts(NamedTuple):
    """What blocks hold: vectors [B, 256 / width] int32, signs [B, 32] uint8 (a bit is a minus), d [B] float16,
    multiples of groups [B, 256 / group] uint8.
    """

    vectors: Tensor
    signs: Tensor
    d: Tensor
    scales: Tensor


class Codebook(NamedTuple):
    """A list of vectors: numbers [K, width], the levels that occur in them [L], and of each vector its two halves as
    numbers in base L, [K] each.
    """

    numbers: Tensor
    levels: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class VectorLayout(RowOfParts):
    """One block type; `parts` are in file order.

    group   numbers that share a multiple of d
    width   numbers of a vector
    unit    the smallest multiple
    even    whether the minus signs of eight numbers are even in number, and stored in seven bits
    """

    ggml_type: str
    group: int
    width: int
    unit: float
    parts: tuple[tuple[str, int], ...]

    @property
    def numbers(self) -> int:
        return NUMBERS

    @property
    def even(self) -> bool:
        return "signs" not in dict(self.parts)

    # ---- bytes ---------------------------------------------------------------------------------------------------

    def pack(self, blocks: VectorParts) -> Tensor:
        """Pack the parts of blocks into [B, block_bytes] uint8."""
        import torch

        count, byte = len(blocks.d), torch.uint8
        parts = {"d": float_bytes(blocks.d), "signs": blocks.signs, "vectors": (blocks.vectors & 255).to(byte)}
        names = [name for name, _ in self.parts]
        if "high" in names:
            parts["high"] = self._high.pack((blocks.vectors >> 8).to(byte))
        if "scales" in names:
            parts["scales"] = Plane(4, 1).pack(blocks.scales)
        seven = (blocks.signs & 127).long()
        if "pairs" in names:
            parts["pairs"] = _bytes(blocks.vectors | seven.int() << 9, 2)
        if "words" in names or "mixed" in names:
            shifts = torch.arange(4, device=seven.device) * 7
            words = (seven.reshape(count, -1, 4) << shifts).sum(-1) | blocks.scales.long() << 28
            parts["words"] = _bytes(words, 4)
            both = parts["vectors"].reshape(count, 8, -1), parts["words"].reshape(count, 8, 4)
            parts["mixed"] = torch.cat(both, dim=2).flatten(1)
        return torch.cat([parts[name] for name in names], dim=1)

    def unpack(self, raw: Tensor) -> VectorParts:
        """Take [B, block_bytes] uint8 apart into what the blocks hold."""
        parts, count = self._split(raw), len(raw)
        if "mixed" in parts:
            both = parts["mixed"].reshape(count, 8, 8)
            parts |= {"vectors": both[:, :, :4].flatten(1), "words": both[:, :, 4:].flatten(1)}
        if "pairs" in parts:
            pairs = _from_bytes(parts["pairs"], 2)
            vectors, signs = (pairs & 511).int(), ninth_sign(pairs >> 9)
        else:
            vectors = parts["vectors"].int()
            if "high" in parts:
                vectors |= self._high.unpack(parts["high"]).int() << 8
            signs = parts["signs"] if "signs" in parts else raw[:, :0]
        if "words" in parts:
            words = _from_bytes(parts["words"], 4)
            fields = [words >> 7 * index & 127 for index in range(4)]
            signs, scales = ninth_sign(_stacked(fields)), (words >> 28).to(raw.dtype)
        else:
            scales = Plane(4, 1).unpack(parts["scales"])
        return VectorParts(vectors, signs, floats(parts["d"]), scales)

    def halves(self, raw: Tensor) -> Tensor:
        """The float16 number of each block, [B, 1]."""
        return floats(self._split(raw)["d"]).unsqueeze(1)

    def decode(self, raw: Tensor) -> Tensor:
        """Decode [B, block_bytes] uint8 to [B, 256] float32."""
        parts = self.unpack(raw)
        steps = (parts.d.float().unsqueeze(-1) * self.multiples(parts.scales)).repeat_interleave(self.group, 1)
        numbers = codebook(self.ggml_type, raw.device).numbers[parts.vectors].flatten(1)
        return steps * numbers * signs_of(parts.signs)

    def multiples(self, scales: Tensor) -> Tensor:
        """Decode the stored integers of groups' scales to float32 factors of the block's scale d."""
        return (scales.float() * 2 + 1) * self.unit

    @property
    def _high(self) -> Plane:
        return Plane(2 if self.width == 8 else 1, 1)


def _bytes(words: Tensor, size: int) -> Tensor:
    """Integers [B, n] as bytes [B, n x size], the lowest first."""
    import torch

    return _stacked([words >> 8 * index & 255 for index in range(size)]).to(torch.uint8)


def _from_bytes(raw: Tensor, size: int) -> Tensor:
    """Integers, int64, of the bytes that `_bytes` makes."""
    lanes = raw.reshape(len(raw), -1, size).long()
    return sum((lanes[:, :, index] << 8 * index for index in range(1, size)), lanes[:, :, 0])


def _stacked(fields: list[Tensor]) -> Tensor:
    import torch

    return torch.stack(fields, dim=2).flatten(1)


def ninth_sign(seven: Tensor) -> Tensor:
    """Seven bits and the eighth that makes their number even, as a byte."""
    import torch

    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    return (seven | ((odd ^ odd >> 1) & 1) << 7).to(torch.uint8)


def signs_of(signs: Tensor) -> Tensor:
    """The signs that bytes [B, n] hold, [B, 8 n] of 1 and -1 in float32."""
    return 1 - 2 * Plane(1, 1).unpack(signs).float()


@functools.cache
def codebook(ggml_type: str, device: torch.device | str = "cpu") -> Codebook:
    """The list of vectors that gguf-py has for a block type."""
    import torch
    from gguf import quants

    kind = getattr(quants, ggml_type)
    kind.init_grid()
    numbers = torch.from_numpy(kind.grid.reshape(kind.grid_shape).copy())
    levels = numbers.unique()
    count, half = len(levels), numbers.shape[1] // 2
    level_of = torch.searchsorted(levels, numbers)
    powers = count ** torch.arange(half - 1, -1, -1)
    first, second = (level_of[:, :half] * powers).sum(1), (level_of[:, half:] * powers).sum(1)
    return Codebook(*(table.to(device) for table in (numbers, levels, first, second)))


_D = ("d", 2)
VECTOR_LAYOUTS = {
    "iq3_s_gguf": VectorLayout("IQ3_S", 32, 4, 1.0, (_D, ("vectors", 64), ("high", 8), ("signs", 32), ("scales", 4))),
    "iq3_xxs_gguf": VectorLayout("IQ3_XXS", 32, 4, 0.25, (_D, ("vectors", 64), ("words", 32))),
    "iq2_s_gguf": VectorLayout("IQ2_S", 16, 8, 0.125, (_D, ("vectors", 32), ("signs", 32), ("high", 8), ("scales", 8))),
    "iq2_xs_gguf": VectorLayout("IQ2_XS", 16, 8, 0.125, (_D, ("pairs", 64), ("scales", 8))),
    "iq2_xxs_gguf": VectorLayout("IQ2_XXS", 32, 8, 0.125, (_D, ("mixed", 64))),
}

# ---- the search ----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """For N groups of g numbers the nearest vectors [N, g / width] int32, signs [N, g / 8] uint8, and the sums of
    w v v and w x v over each group, v the vectors' numbers with signs.
    """

    vectors: Tensor
    signs: Tensor
    vv: Tensor
    xv: Tensor


class VectorSearch(Protocol):
    """The slow part: the definition below, or a compiled version."""

    def nearest(self, x: Tensor, w: Tensor, scale: Tensor, layout: VectorLayout) -> Found:
        """Find the nearest vectors of x [N, g] with w [P, g], of groups 0 to P - 1 in turn, and scale [N] from 0 up."""


class TorchVectors:
    """The definition in plain torch, which tries all vectors."""

    def nearest(self, x: Tensor, w: Tensor, scale: Tensor, layout: VectorLayout) -> Found:
        import torch

        book = codebook(layout.ggml_type, x.device)
        weights = w.repeat(len(x) // len(w), 1)
        step = max(1, AT_ONCE // (len(book.numbers) * x.shape[1] // layout.width))
        pieces = [
            _nearest(x[at : at + step], weights[at : at + step], scale[at : at + step], layout, book)
            for at in range(0, max(1, len(x)), step)
        ]
        return Found(*(torch.cat(part) for part in zip(*pieces, strict=True)))


def _nearest(x: Tensor, w: Tensor, scale: Tensor, layout: VectorLayout, book: Codebook) -> Found:
    """With v a vector: the least sum of v (v p - q), p = w scale^2 and q = 2 scale w |x|; a wrong sign adds 2 v q."""
    import torch

    groups, width = len(x), layout.width
    step = scale.unsqueeze(-1)
    p = (w * (step * step)).reshape(-1, width, 1)
    q = ((step + step) * (w * x.abs())).reshape(-1, width, 1)
    terms, wrong = book.levels * (book.levels * p - q), book.levels * (q + q)
    half = width // 2
    ways = torch.tensor(list(itertools.product(range(len(book.levels)), repeat=half)), device=x.device)
    sums, least_wrong = [], []
    for first in (0, half):
        parts = [terms[:, first + j, ways[:, j]] for j in range(half)]
        sums.append(parts[0] + parts[1] if half == 2 else (parts[0] + parts[1]) + (parts[2] + parts[3]))
        flips = [wrong[:, first + j, ways[:, j]] for j in range(half)]
        least_wrong.append(functools.reduce(torch.minimum, flips))
    cost = sums[0][:, book.first] + sums[1][:, book.second]
    least, best = cost.min(dim=1)
    bits = (x < 0).reshape(-1, SIGNED)
    if layout.even:
        flipped = cost + torch.minimum(least_wrong[0][:, book.first], least_wrong[1][:, book.second])
        least_flipped, best_flipped = flipped.min(dim=1)
        odd = (bits.sum(1) & 1).bool()
        if width == SIGNED:
            takes = odd
        else:  # of two vectors, the one that loses less has a wrong sign
            one = least_flipped.reshape(-1, 2) + least.reshape(-1, 2).flip(1)
            takes = (torch.stack([one[:, 0] <= one[:, 1], one[:, 0] > one[:, 1]], 1) & odd.unsqueeze(1)).reshape(-1)
        best = torch.where(takes, best_flipped, best)
        numbers = book.numbers[best]
        j = (numbers * (q + q).squeeze(-1)).min(dim=1).indices
        is_weakest = torch.arange(width, device=x.device) == j.unsqueeze(1)
        bits = bits ^ (is_weakest & takes.unsqueeze(1)).reshape(-1, SIGNED)
    signs = Plane(1, 1).pack(bits.reshape(groups, -1).to(torch.uint8))
    v = book.numbers[best].reshape(groups, -1) * signs_of(signs)
    vectors = best.reshape(groups, -1).int()
    return Found(vectors, signs, by_halves(w * (v * v)), by_halves(w * (x * v)))


def search_vectors(matrix: Tensor, weights: Tensor, layout: VectorLayout, search: VectorSearch) -> VectorParts:
    """Find the blocks, row by row, for [R, C] float32 numbers of whole blocks and [P, g] weights of their columns."""
    import torch

    x, per_block = matrix.reshape(-1, layout.group), NUMBERS // layout.group
    exact_scales, vv = (part.reshape(-1, per_block) for part in _best_scales(x, weights, layout, search))
    d, scales = _first_steps(exact_scales, vv, layout)
    nearest, scales = _neighbours(x, weights, d, scales, layout, search)
    for _ in range(REFINEMENTS):
        d = _fitted(d, layout.multiples(scales), nearest.vv.reshape(d.shape[0], -1), nearest.xv.reshape(d.shape[0], -1))
        nearest, scales = _neighbours(x, weights, d, scales, layout, search)
    vectors, signs = (part.reshape(len(d), -1) for part in (nearest.vectors, nearest.signs))
    return VectorParts(vectors, signs, d.half(), scales.to(torch.uint8))


def _best_scales(x: Tensor, w: Tensor, layout: VectorLayout, search: VectorSearch) -> tuple[Tensor, Tensor]:
    """The best scale of each group, [N], and the sum of w v v for its vectors."""
    extreme = x.abs().amax(dim=1) / codebook(layout.ggml_type, x.device).levels[-1]
    best = _fit(x, w, extreme * STARTS[0], layout, search)
    for attempt in range(1, len(STARTS) + FIT_STEPS):
        tried = extreme * STARTS[attempt] if attempt < len(STARTS) else best[0]
        fit = _fit(x, w, tried, layout, search)
        best = _chosen(fit[2] > best[2], fit, best)
    return best[0], best[1]


def _fit(x: Tensor, w: Tensor, scale: Tensor, layout: VectorLayout, search: VectorSearch) -> tuple[Tensor, ...]:
    """The scale that fits the nearest vectors best, their sum of w v v, and by how much it makes the error less."""
    nearest = search.nearest(x, w, scale, layout)
    fitted = (nearest.xv / nearest.vv).clamp(min=0.0)
    return fitted, nearest.vv, fitted * nearest.xv


def _first_steps(exact_scales: Tensor, curve: Tensor, layout: VectorLayout) -> tuple[Tensor, Tensor]:
    """Find [B] d and [B, G] multiples as stored, such that d x multiple is near the exact scales."""
    top = exact_scales.amax(dim=1) / (layout.unit * (2 * MOST + 1))
    best = _steps(exact_scales, curve, top, layout)
    for multiple in MULTIPLES:
        steps = _steps(exact_scales, curve, top * multiple, layout)
        best = _chosen(steps[2] < best[2], steps, best)
    return best[0], best[1]


def _steps(exact_scales: Tensor, curve: Tensor, step: Tensor, layout: VectorLayout) -> tuple[Tensor, ...]:
    """A step as float16, the nearest multiples as they are stored, and what is lost."""
    d = as_half(step)
    multiples = exact_scales * reciprocal(d * layout.unit).unsqueeze(-1)
    stored = ((multiples - 1) * 0.5).round().clamp(0, MOST)
    difference = exact_scales - d.unsqueeze(-1) * layout.multiples(stored)
    return d, stored, by_halves(curve * (difference * difference))


def as_half(numbers: Tensor) -> Tensor:
    """Numbers rounded to float16, in float32."""
    return numbers.clamp(max=FLOAT16_MAX).half().float()


def _neighbours(
    x: Tensor, w: Tensor, d: Tensor, scales: Tensor, layout: VectorLayout, search: VectorSearch
) -> tuple[Found, Tensor]:
    """Each group's multiple or a neighbour, whichever loses least, with the nearest vectors."""

    def tried(move: float) -> tuple[Tensor, ...]:
        stored = (scales + move).clamp(0, MOST)
        step = (d.unsqueeze(-1) * layout.multiples(stored)).reshape(-1)
        nearest = search.nearest(x, w, step, layout)
        return (*nearest, stored.reshape(-1), step * (step * nearest.vv - (nearest.xv + nearest.xv)))

    best = tried(0.0)
    for move in (-1.0, 1.0):
        one = tried(move)
        best = _chosen(one[-1] < best[-1], one, best)
    return Found(*best[:4]), best[4].reshape(scales.shape)


def _fitted(d: Tensor, multiples: Tensor, vv: Tensor, xv: Tensor) -> Tensor:
    """Fit d by least squares to the present vectors, where that loses less once it is rounded."""
    import torch

    curve, slope = by_halves(vv * (multiples * multiples)), by_halves(xv * multiples)
    new = as_half((slope / curve).clamp(min=0.0))
    return torch.where(new * (new * curve - (slope + slope)) < d * (d * curve - (slope + slope)), new, d)


def _chosen(better: Tensor, ones: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Select rows of two tuples of tensors: from `ones` where `better` [rows] is true, else from `others`."""
    import torch

    pairs = zip(ones, others, strict=True)
    return tuple(torch.where(better.reshape(-1, *[1] * (one.dim() - 1)), one, other) for one, other in pairs)
