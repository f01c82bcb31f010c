"""AdamW's moments in 8 bits: 2.03 bytes a weight instead of 8. The definition, in plain torch.

A moment is cut into blocks of 256 numbers, and each has a scale, the largest magnitude in it, in float32:

    first moment     code = sign(m) * round(127 * sqrt(|m| / scale))    m = sign(code) * (code / 127)^2 * scale
    second moment    code = round(255 * sqrt(v / scale)), at least 1    v = (code / 255)^2 * scale

The square root gives small numbers of a block more codes. A second moment above 0 never becomes 0, which would make its
step endless.

Codes are rounded up or down at random, so that their mean is the number: a second moment moves by a thousandth a step,
far less than half a code, and would stand still if it were rounded to nearest. The random numbers depend on the weight,
the step and the place in the weight alone, so any number of processes makes the same codes. The largest number of a
block has the largest code, so numbers that are read and written again, to nearest, as a saved state is, have the same
codes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
FIRST_CODES, SECOND_CODES = 127, 255
RANDOM_CHUNK = 2**18  # random numbers of one seed


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

    def write(self, first: Tensor, second: Tensor, key: str | None = None, start: int = 0) -> None:
        """Encode numbers; they are overwritten.

        key: of the random numbers, with `start`, where these numbers begin in their weight; None: round to nearest.
        """
        up, second_up = (None if key is None else _random(f"{key} {one}", start, len(first)) for one in (1, 2))
        signs = first.sign()
        self.first.copy_(_codes(_roots(first.abs_(), self.first_scales), FIRST_CODES, up).mul_(signs))
        is_zero = second == 0
        codes = _codes(_roots(second, self.second_scales), SECOND_CODES, second_up)
        self.second.copy_(codes.clamp_(min=1).masked_fill_(is_zero, 0))


def _times(numbers: Tensor, scales: Tensor) -> Tensor:
    for part, of_blocks in _blocks(numbers, scales):
        part.mul_(of_blocks)
    return numbers


def _blocks(numbers: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the whole blocks, one a row, and of the last one where it is shorter, each with its scales."""
    whole = len(numbers) // BLOCK
    if whole:
        yield numbers[: whole * BLOCK].view(-1, BLOCK), scales[:whole, None]
    if whole < len(scales):
        yield numbers[whole * BLOCK :].view(1, -1), scales[whole:, None]


def _roots(numbers: Tensor, scales: Tensor) -> Tensor:
    """sqrt(number / scale), in place; writes the scales. The largest number becomes 1; a block of zeros stays so."""
    for part, of_blocks in _blocks(numbers, scales):
        torch.amax(part, 1, keepdim=True, out=of_blocks)
        part.div_(of_blocks.masked_fill(of_blocks == 0, 1))
    return numbers.sqrt_()


def _codes(roots: Tensor, largest: int, up: Tensor | None) -> Tensor:
    codes = roots.mul_(largest)
    if up is None:
        return codes.round_()
    # `largest` and a random number just below 1 add up to `largest` + 1 in float32, which no code is
    return codes.add_(up).floor_().clamp_(max=largest)


def _random(key: str, start: int, count: int) -> Tensor:
    """Numbers `start` to `start + count` of a key, the same whichever of them are asked for together."""
    parts = []
    for chunk in range(start // RANDOM_CHUNK, -(-(start + count) // RANDOM_CHUNK)):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {chunk}".encode()))
        first = chunk * RANDOM_CHUNK
        numbers = torch.rand(min(RANDOM_CHUNK, start + count - first), generator=generator)
        parts.append(numbers[max(start - first, 0) :])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
