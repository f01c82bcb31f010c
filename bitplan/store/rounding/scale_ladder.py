"""Scales that are tried for a block: multiples of the one its largest number asks for, as the format stores them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.formats import Format
from bitplan.formats.gguf.ggml_encoders import GgufQ40
from bitplan.formats.scales.rules import power_of_two_scale
from bitplan.store.rounding.code_grids import Grid

POWERS = (1.0, 2.0, 0.5)
FEW_BITS = tuple(1.0 / (0.84 + 0.04 * step) for step in range(24))  # 4 bits: up to 1.19, down to 0.57 of the largest
FEWEST_BITS = tuple(1.1 * 0.93**step for step in range(32))  # 2 bits: down to a tenth
WHOLE_BYTES = tuple(1.0 / (1.0 + 0.02 * step) for step in range(8))
BYTE_FLOATS = tuple(2.0 ** (-step / 8) for step in range(8))  # where in its binade the largest number lands


@dataclass(frozen=True)
class ScaleLadder:
    """What a format's scales can be. Numbers in and out are scales as they are loaded, float32."""

    fmt: Format
    grid: Grid
    base: Tensor | None = None

    @property
    def multiples(self) -> tuple[float, ...]:
        """Of the scale that puts the largest number on the largest code."""
        assert self.fmt.element is not None
        if self.fmt.power_of_two_scales:
            return POWERS
        bits = self.fmt.element.bits
        if bits == 8:
            return BYTE_FLOATS if self.grid.is_float else WHOLE_BYTES
        steps = FEW_BITS if bits > 2 else FEWEST_BITS
        return steps + tuple(-step for step in steps) if self.is_signed else steps

    @property
    def is_signed(self) -> bool:
        """Whether scales may be negative: GGUF's Q4_0 is defined so; readers of other formats may not expect it."""
        return isinstance(self.fmt, GgufQ40)

    def as_stored(self, wanted: Tensor) -> Tensor:
        """The scales that the format would load after storing these."""
        assert self.fmt.scales is not None
        return self.fmt.scales.load(self.store(wanted), self.base).float()

    def store(self, wanted: Tensor) -> Tensor:
        assert self.fmt.scales is not None
        if self.fmt.power_of_two_scales:  # which take powers of two alone: the nearest in ratio
            wanted = torch.where(wanted > 0, torch.exp2(torch.log2(wanted).round()), 0.0)
        return self.fmt.scales.store(wanted, self.base)

    def candidates(self, largest: Tensor) -> Tensor:
        """[...] largest magnitudes of blocks -> [..., C] scales; those that overflow their storage become zero."""
        start = (
            power_of_two_scale(largest, self.grid.high) if self.fmt.power_of_two_scales else largest / self.grid.high
        )
        scales = self.as_stored(start.unsqueeze(-1) * start.new_tensor(self.multiples))
        return torch.where(scales.isfinite(), scales, 0.0)
