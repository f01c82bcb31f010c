"""PackedRows: keys or values of one layer in a format, which a cache and its attention read as a tensor of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bitplan.formats.format import Format

TILE_NUMBERS, GPU_TILE_NUMBERS = 2**20, 2**25  # decoded at once
TOKENS = 64  # of a tile of attention on a GPU
LEAST_ROOM = 256  # tokens by which memory grows: a graph of a token is recorded again then


def room_for(tokens: int) -> int:
    """Room on a GPU for these tokens and a sixteenth more, 256 at least, in whole tiles."""
    return -(-(tokens + max(LEAST_ROOM, tokens // 16)) // TOKENS) * TOKENS


def room_at(tokens: int, piece: int) -> int:
    """The room that there is when so many tokens were read, a piece at a time."""
    room = 0
    for read in (*range(piece, tokens, piece), tokens):
        room = room if read <= room else room_for(read)
    return room


def pack_rows(rows: Tensor, fmt: Format) -> dict[str, Tensor]:
    """The parts of rows [..., width] in a format: those of `encode(rows, fmt, pad="zero")`, without its checks."""
    assert fmt.scales is not None
    lead, width = rows.shape[:-1], rows.shape[-1]
    filled = functional.pad(rows.float(), (0, fmt.padded_cols(width) - width))
    blocks = filled.reshape(-1, fmt.block.cols or width)
    codes, scales = fmt.quantize(blocks, fmt.scale_for(fmt.limits(blocks, "absmax", 100.0)), None, None)
    data = codes if fmt.packing is None else fmt.packing.pack(codes)
    return {"data": data.reshape(*lead, fmt.data_cols(width)), "scales": scales.reshape(*lead, -1)}


@dataclass
class PackedRows:
    """Keys or values of one layer. It is indexed, moved and counted as the tensor [batch, heads, tokens, width]."""

    fmt: Format | None
    width: int
    dtype: torch.dtype
    parts: dict[str, Tensor] = field(default_factory=dict)

    def packed(self, rows: Tensor) -> PackedRows:
        """Encode other rows in the same format as these."""
        parts = {"data": rows} if self.fmt is None else pack_rows(rows, self.fmt)
        return replace(self, parts=parts, width=rows.shape[-1])

    def followed_by(self, later: PackedRows) -> PackedRows:
        """A new object with these tokens' rows, then those of `later`."""
        if not self.parts:
            return later
        return replace(
            self, parts={name: torch.cat([part, later.parts[name]], dim=2) for name, part in self.parts.items()}
        )

    def numbers(self) -> Tensor:
        """The numbers that the codes stand for, decoded tile by tile."""
        if self.fmt is None:
            return self.parts["data"]
        batch, heads, tokens, width = self.shape
        decoded = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        most = GPU_TILE_NUMBERS if self.device.type == "cuda" else TILE_NUMBERS
        step = max(1, most // max(1, batch * heads * width))
        for first in range(0, tokens, step):
            decoded[:, :, first : first + step] = self._tile(slice(first, first + step))
        return decoded

    def _tile(self, tokens: slice) -> Tensor:
        fmt = self.fmt
        assert fmt is not None
        assert fmt.scales is not None
        data, scales = (self.parts[name][:, :, tokens] for name in ("data", "scales"))
        size = fmt.block.cols or self.width
        width = size if fmt.packing is None else fmt.packing.packed_length(size)
        codes = data.reshape(-1, width)
        codes = codes if fmt.packing is None else fmt.packing.unpack(codes, size)
        numbers = fmt.dequantize(codes, fmt.scales.load(scales.reshape(-1), None), None)
        return numbers.reshape(*data.shape[:-1], -1)[..., : self.width]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    # ---- what transformers asks of a tensor in its place -------------------------------------------------------------

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> PackedRows:
        return replace(self, parts={name: change(part) for name, part in self.parts.items()})

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.parts["data"].shape[:-1], self.width]) if self.parts else torch.Size([0])

    @property
    def device(self) -> torch.device:
        return self.parts["data"].device

    def numel(self) -> int:
        return self.shape.numel()

    def __getitem__(self, index: Any) -> PackedRows:
        return self._mapped(lambda part: part[index])

    def index_select(self, axis: int, indices: Tensor) -> PackedRows:
        return self._mapped(lambda part: part.view(torch.uint8).index_select(axis, indices).view(part.dtype))

    def repeat_interleave(self, repeats: int, dim: int) -> PackedRows:
        return self._mapped(lambda part: part.view(torch.uint8).repeat_interleave(repeats, dim=dim).view(part.dtype))

    def contiguous(self) -> PackedRows:
        return self._mapped(Tensor.contiguous)

    def to(self, *args: Any, **options: Any) -> PackedRows:
        return self._mapped(lambda part: part.to(*args, **options))
