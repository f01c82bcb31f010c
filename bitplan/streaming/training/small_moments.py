"""AdamW's moments in 8 bits: 2.03 bytes a weight instead of 8. The definition, in plain torch.

A moment is cut into blocks of 256 numbers, and each has a scale, the largest magnitude in it, in float32:

    first moment     code = sign(m) * round(127 * sqrt(|m| / scale))    m = sign(code) * (code / 127)^2 * scale
    second moment    code = round(255 * sqrt(v / scale)), at least 1    v = (code / 255)^2 * scale

The square root gives small numbers of a block more codes. (bitsandbytes' 8-bit AdamW has blocks of 256 too, with a
table of "dynamic" codes of growing exponents in the place of the root, and rounds to nearest.) A second moment above 0
never becomes 0, which would make its step endless.

Codes are rounded up or down at random, so that their mean is the number: a second moment moves by a thousandth a step,
far less than half a code, and would stand still if it were rounded to nearest. The random numbers depend on the weight
and the step alone. The largest number of a block has the largest code, so numbers that are read and written again, to
nearest, as a saved state is, have the same codes.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
FIRST_CODES, SECOND_CODES = 127, 255


class SmallMoments(NamedTuple):
    """The two moments of one weight, flat: codes (int8, uint8) and the scales of their blocks."""

    first: Tensor
    second: Tensor
    first_scales: Tensor
    second_scales: Tensor

    @classmethod
    def zeros(cls, count: int) -> SmallMoments:
        blocks = -(-count // BLOCK)
        codes = torch.zeros(count, dtype=torch.int8), torch.zeros(count, dtype=torch.uint8)
        return cls(*codes, torch.zeros(blocks), torch.zeros(blocks))

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self)

    def part(self, start: int, end: int) -> SmallMoments:
        """Views of the numbers from `start`, a multiple of a block, to `end`."""
        blocks = slice(start // BLOCK, -(-end // BLOCK))
        return SmallMoments(
            self.first[start:end], self.second[start:end], self.first_scales[blocks], self.second_scales[blocks]
        )

    def read(self) -> tuple[Tensor, Tensor]:
        """The numbers, in float32."""
        first, second = self.first.float().div_(FIRST_CODES), self.second.float().div_(SECOND_CODES)
        return _times(first.mul_(first.abs()), self.first_scales), _times(second.square_(), self.second_scales)

    def write(self, first: Tensor, second: Tensor, key: str | None = None) -> None:
        """Encode numbers; they are overwritten. key: what random rounding depends on; None: round to nearest."""
        random = None if key is None else torch.Generator().manual_seed(zlib.crc32(key.encode()))
        signs = first.sign()
        roots = _roots(first.abs_(), self.first_scales).mul_(FIRST_CODES)
        self.first.copy_(_rounded(roots, random).mul_(signs))
        is_zero = second == 0
        roots = _roots(second, self.second_scales).mul_(SECOND_CODES)
        self.second.copy_(_rounded(roots, random).clamp_(min=1).masked_fill_(is_zero, 0))


def _times(numbers: Tensor, scales: Tensor) -> Tensor:
    whole = len(numbers) // BLOCK * BLOCK
    numbers[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
    numbers[whole:].mul_(scales[whole // BLOCK :])
    return numbers


def _roots(numbers: Tensor, scales: Tensor) -> Tensor:
    """sqrt(number / scale), in place; writes the scales. A block of zeros stays so."""
    whole = len(numbers) // BLOCK * BLOCK
    if whole:
        torch.amax(numbers[:whole].view(-1, BLOCK), 1, out=scales[: whole // BLOCK])
    if whole < len(numbers):
        scales[-1] = numbers[whole:].max()
    smallest = torch.finfo(torch.float32).tiny
    return _times(numbers, 1 / scales.clamp(min=smallest)).clamp_(max=1).sqrt_()


def _rounded(numbers: Tensor, random: torch.Generator | None) -> Tensor:
    return numbers.round_() if random is None else numbers.add_(torch.rand(len(numbers), generator=random)).floor_()
