"""Packing: several codes in one byte, and the three orders that files in the wild use.

| order | 4-bit byte holds | used by |
|---|---|---|
| low_first | code 2j in bits 3..0, code 2j+1 in bits 7..4 | gpt-oss, NVFP4, q4_0_poly |
| high_first | first code in the highest bits | poly's JSON files (4-, 2- and 1-bit) |
| halves | code j low, code j + block/2 high | GGUF |

A field is the code's low bits: two's complement, or `offset` added first (offset binary).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """How codes of `bits` bits (1, 2 or 4) share bytes; `signed` fields are sign-extended by `unpack`."""

    bits: int
    order: Literal["low_first", "high_first", "halves"]
    signed: bool = False
    offset: int = 0

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    def packed_length(self, count: int) -> int:
        return -(-count // self.per_byte)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack [..., n] codes into [..., ceil(n / per_byte)] bytes; the last byte is filled up with zero bits."""
        import torch

        fields = (codes + self.offset).view(torch.uint8) & (2**self.bits - 1)
        missing = -fields.shape[-1] % self.per_byte
        fields = torch.nn.functional.pad(fields, (0, missing)) if missing else fields
        lanes = self._lanes(fields)
        packed = torch.zeros_like(lanes[0])
        for shift, lane in zip(self._shifts(), lanes, strict=True):
            packed |= lane << shift
        return packed

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """Unpack [..., bytes] to [..., count] codes, int8 for signed fields, else uint8."""
        import torch

        fields = [packed >> shift & (2**self.bits - 1) for shift in self._shifts()]
        flat = torch.cat(fields, dim=-1) if self.order == "halves" else torch.stack(fields, dim=-1).flatten(-2)
        codes = flat[..., :count]
        if self.signed:
            sign_bit = 0 if self.offset else 2 ** (self.bits - 1)
            return (codes ^ sign_bit).view(torch.int8) - (self.offset or sign_bit)
        return codes

    def _shifts(self) -> list[int]:
        shifts = [self.bits * lane for lane in range(self.per_byte)]
        return shifts[::-1] if self.order == "high_first" else shifts

    def _lanes(self, fields: Tensor) -> tuple[Tensor, ...]:
        if self.order == "halves":
            return fields.chunk(self.per_byte, dim=-1)
        grouped = fields.reshape(*fields.shape[:-1], fields.shape[-1] // self.per_byte, self.per_byte)
        return grouped.unbind(-1)
