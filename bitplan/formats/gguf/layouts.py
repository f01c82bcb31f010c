"""The bytes of GGUF's blocks: codes in planes of bits, scales of groups, and the float16 numbers they multiply.

A block is a row of parts, in the order of the file. A plane holds some bits of every code: `run` codes lie in
consecutive bytes, one in each, and the next runs go into the higher bits of the same bytes. Where a block has groups, a
group's scale is d x a small integer, and its minimum dmin x another; Q3_K, Q4_K and Q5_K pack those integers six bits
each. Checked to the bit against gguf-py. Source: ggml's ggml-common.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Plane(NamedTuple):
    """A plane: `bits` of every code, with `run` codes in consecutive bytes."""

    bits: int
    run: int

    def pack(self, fields: Tensor) -> Tensor:
        """Pack [B, n] fields of `bits` bits into [B, n x bits / 8] bytes."""
        lanes = fields.reshape(fields.shape[0], -1, 8 // self.bits, self.run)
        packed = lanes[:, :, 0].clone()
        for lane in range(1, 8 // self.bits):
            packed |= lanes[:, :, lane] << (self.bits * lane)
        return packed.flatten(1)

    def unpack(self, packed: Tensor) -> Tensor:
        import torch

        runs = packed.reshape(packed.shape[0], -1, self.run)
        fields = [runs >> (self.bits * lane) & (2**self.bits - 1) for lane in range(8 // self.bits)]
        return torch.stack(fields, dim=2).flatten(1)


class BlockParts(NamedTuple):
    """What blocks hold: codes [B, n] uint8; d and dmin [B] float16; scales and minima of groups [B, G] int8."""

    codes: Tensor
    d: Tensor
    dmin: Tensor | None = None
    scales: Tensor | None = None
    mins: Tensor | None = None


class RowOfParts:
    """A block as a row of parts, each a name and a number of bytes, in the order of the file."""

    parts: tuple[tuple[str, int], ...]

    @property
    def block_bytes(self) -> int:
        return sum(size for _, size in self.parts)

    def _split(self, raw: Tensor) -> dict[str, Tensor]:
        names, sizes = [name for name, _ in self.parts], [size for _, size in self.parts]
        return dict(zip(names, raw.split(sizes, dim=1), strict=True))


@dataclass(frozen=True)
class Layout(RowOfParts):
    """One block type. `parts` are in file order; planes count from the lowest bits of a code.

    numbers, group    numbers in a block, and in each of its groups
    low, high         the numbers of the first and the last code; with `table`, indices of the table
    scale_low, _high  the range of a group's integer scale; both None where d itself is the scale
    has_min           a group has a minimum: dmin x integer, subtracted, if groups have scales; else a float16, added
    """

    ggml_type: str
    numbers: int
    group: int
    low: int
    high: int
    parts: tuple[tuple[str, int], ...]
    planes: tuple[Plane, ...]
    scale_low: int | None = None
    scale_high: int | None = None
    has_min: bool = False
    table: tuple[int, ...] | None = None

    @property
    def has_groups(self) -> bool:
        return self.scale_high is not None

    @property
    def group_count(self) -> int:
        return self.numbers // self.group

    # ---- bytes ---------------------------------------------------------------------------------------------------

    def pack(self, blocks: BlockParts) -> Tensor:
        """Pack the parts of blocks into [B, block_bytes] uint8."""
        import torch

        parts = {"d": float_bytes(blocks.d)}
        if blocks.dmin is not None:
            parts["dmin"] = float_bytes(blocks.dmin)
        shift = 0
        for index, plane in enumerate(self.planes):
            parts[f"plane{index}"] = plane.pack(blocks.codes >> shift & (2**plane.bits - 1))
            shift += plane.bits
        if blocks.scales is not None:
            parts["scales"] = self._pack_scales(blocks.scales, blocks.mins)
        return torch.cat([parts[name] for name, _ in self.parts], dim=1)

    def unpack(self, raw: Tensor) -> BlockParts:
        """Take [B, block_bytes] uint8 apart into what the blocks hold."""
        import torch

        parts = self._split(raw)
        codes = torch.zeros((raw.shape[0], self.numbers), dtype=torch.uint8, device=raw.device)
        shift = 0
        for index, plane in enumerate(self.planes):
            codes |= plane.unpack(parts[f"plane{index}"]) << shift
            shift += plane.bits
        return self._with_scales(codes, parts)

    def _with_scales(self, codes: Tensor, parts: dict[str, Tensor]) -> BlockParts:
        dmin = floats(parts["dmin"]) if "dmin" in parts else None
        scales, mins = self._unpack_scales(parts["scales"]) if self.has_groups else (None, None)
        return BlockParts(codes, floats(parts["d"]), dmin, scales, mins)

    def scales_in(self, raw: Tensor) -> tuple[Tensor, Tensor | None]:
        """The `group_scales` of [B, block_bytes] uint8, whose codes are not read."""
        return self.group_scales(self._with_scales(raw, self._split(raw)))

    def halves(self, raw: Tensor) -> Tensor:
        """Read the float16 numbers of each block, [B, 1 or 2], from its [B, block_bytes] uint8."""
        import torch

        parts = self._split(raw)
        return torch.stack([floats(parts[name]) for name in ("d", "dmin") if name in parts], dim=1)

    def decode(self, raw: Tensor) -> Tensor:
        """Decode [B, block_bytes] uint8 to [B, numbers] float32, each product and sum rounded once, as in gguf-py."""
        parts = self.unpack(raw)
        scale, low = self.group_scales(parts)
        values = self.code_values(parts.codes).reshape(raw.shape[0], -1, self.group) * scale.unsqueeze(-1)
        if low is not None:
            values = values + low.unsqueeze(-1)
        return values.flatten(1)

    def code_values(self, codes: Tensor) -> Tensor:
        """The numbers of codes before scaling, in float32."""
        import torch

        if self.table is not None:
            return torch.tensor(self.table, dtype=torch.float32, device=codes.device)[codes.int()]
        return codes.float() + self.low

    def group_scales(self, parts: BlockParts) -> tuple[Tensor, Tensor | None]:
        """Return the scales of groups, [B, G], and the numbers added to them, in float32."""
        d = parts.d.float().unsqueeze(-1)
        dmin = None if parts.dmin is None else parts.dmin.float().unsqueeze(-1)
        if parts.scales is None:
            return d, dmin
        scale = d * parts.scales.float()
        return scale, None if dmin is None or parts.mins is None else -(dmin * parts.mins.float())

    def _pack_scales(self, scales: Tensor, mins: Tensor | None) -> Tensor:
        import torch

        if self.scale_low == -128:
            return scales.view(torch.uint8)
        if mins is None:  # Q3_K and IQ4_XS
            fields = (scales + 32).view(torch.uint8)
            if self.table is not None:
                return torch.cat([Plane(2, 1).pack(fields >> 4), Plane(4, 1).pack(fields & 15)], dim=1)
            return torch.cat([Plane(4, 8).pack(fields & 15), Plane(2, 4).pack(fields >> 4)], dim=1)
        scale, low = scales.view(torch.uint8), mins.view(torch.uint8)
        if self.scale_high == 15:  # Q2_K
            return scale | low << 4
        first = torch.cat([scale[:, :4] | scale[:, 4:] >> 4 << 6, low[:, :4] | low[:, 4:] >> 4 << 6], dim=1)
        return torch.cat([first, scale[:, 4:] & 15 | (low[:, 4:] & 15) << 4], dim=1)

    def _unpack_scales(self, raw: Tensor) -> tuple[Tensor, Tensor | None]:
        import torch

        if self.scale_low == -128:
            return raw.contiguous().view(torch.int8), None
        if not self.has_min:
            if self.table is not None:
                fields = Plane(2, 1).unpack(raw[:, :2]) << 4 | Plane(4, 1).unpack(raw[:, 2:])
            else:
                fields = Plane(4, 8).unpack(raw[:, :8]) | Plane(2, 4).unpack(raw[:, 8:]) << 4
            return fields.view(torch.int8) - 32, None
        if self.scale_high == 15:
            return (raw & 15).view(torch.int8), (raw >> 4).view(torch.int8)
        scale, low, both = raw.split(4, dim=1)
        scales = torch.cat([scale & 63, both & 15 | scale >> 6 << 4], dim=1)
        mins = torch.cat([low & 63, both >> 4 | low >> 6 << 4], dim=1)
        return scales.view(torch.int8), mins.view(torch.int8)


def floats(raw: Tensor) -> Tensor:
    """Read [B, 2] bytes as [B] float16."""
    import torch

    half: torch.dtype = torch.float16
    return raw.contiguous().view(half).reshape(-1)


def float_bytes(numbers: Tensor) -> Tensor:
    """Write [B] float16 as [B, 2] bytes."""
    import torch

    return numbers.to(torch.float16).reshape(-1, 1).view(torch.uint8)


_D, _DMIN = ("d", 2), ("dmin", 2)
_NIBBLES_16, _NIBBLES_32, _BITS_32, _PAIRS_32 = Plane(4, 16), Plane(4, 32), Plane(1, 32), Plane(2, 32)

LAYOUTS = {
    "q4_1_gguf": Layout("Q4_1", 32, 32, 0, 15, (_D, _DMIN, ("plane0", 16)), (_NIBBLES_16,), has_min=True),
    "q5_0_gguf": Layout("Q5_0", 32, 32, -16, 15, (_D, ("plane1", 4), ("plane0", 16)), (_NIBBLES_16, Plane(1, 1))),
    "q5_1_gguf": Layout(
        "Q5_1",
        32,
        32,
        0,
        31,
        (_D, _DMIN, ("plane1", 4), ("plane0", 16)),
        (_NIBBLES_16, Plane(1, 1)),
        has_min=True,
    ),
    "iq4_nl_gguf": Layout("IQ4_NL", 32, 32, 0, 15, (_D, ("plane0", 16)), (_NIBBLES_16,), table=IQ4_NL_VALUES),
    "q2_k_gguf": Layout(
        "Q2_K", 256, 16, 0, 3, (("scales", 16), ("plane0", 64), _D, _DMIN), (_PAIRS_32,), 0, 15, has_min=True
    ),
    "q3_k_gguf": Layout(
        "Q3_K",
        256,
        16,
        -4,
        3,
        (("plane1", 32), ("plane0", 64), ("scales", 12), _D),
        (_PAIRS_32, _BITS_32),
        -32,
        31,
    ),
    "q4_k_gguf": Layout(
        "Q4_K", 256, 32, 0, 15, (_D, _DMIN, ("scales", 12), ("plane0", 128)), (_NIBBLES_32,), 0, 63, has_min=True
    ),
    "q5_k_gguf": Layout(
        "Q5_K",
        256,
        32,
        0,
        31,
        (_D, _DMIN, ("scales", 12), ("plane1", 32), ("plane0", 128)),
        (_NIBBLES_32, _BITS_32),
        0,
        63,
        has_min=True,
    ),
    "q6_k_gguf": Layout(
        "Q6_K",
        256,
        16,
        -32,
        31,
        (("plane0", 128), ("plane1", 64), ("scales", 16), _D),
        (Plane(4, 64), _PAIRS_32),
        -128,
        127,
    ),
    "iq4_xs_gguf": Layout(
        "IQ4_XS", 256, 32, 0, 15, (_D, ("scales", 6), ("plane0", 128)), (_NIBBLES_16,), -32, 31, table=IQ4_NL_VALUES
    ),
}

# The formats for rows that are multiples of 32 but not of 256: as many bits or more, the same as llama.cpp takes.
SMALLER_BLOCKS = {
    "q2_k_gguf": "iq4_nl_gguf",
    "q3_k_gguf": "iq4_nl_gguf",
    "q4_k_gguf": "q5_0_gguf",
    "q5_k_gguf": "q5_1_gguf",
    "q6_k_gguf": "q8_0_gguf",
    "iq4_xs_gguf": "iq4_nl_gguf",
    **dict.fromkeys(("iq3_s_gguf", "iq3_xxs_gguf", "iq2_s_gguf", "iq2_xs_gguf", "iq2_xxs_gguf"), "iq4_nl_gguf"),
}
