"""GgufBlocks: a format whose blocks are bytes that GGUF fixes, with their scales among the codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitplan.errors import FormatError
from bitplan.formats.elements import signed_integer, unsigned_integer
from bitplan.formats.format import Block, Format
from bitplan.formats.gguf.layouts import LAYOUTS, Layout
from bitplan.formats.gguf.search import FLOAT16_MAX, BlockSearch, SearchBySums, TorchSums, search_blocks
from bitplan.formats.scales.rules import ScaleRule

if TYPE_CHECKING:
    from torch import Tensor


class GgufBlocks(Format):
    """`data` holds whole blocks, [..., bytes per row], and is the only part; scales are always searched (mse)."""

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.name]

    @property
    def is_opaque(self) -> bool:
        return True

    @property
    def rules(self) -> tuple[ScaleRule, ...]:
        return ("mse",)

    def data_cols(self, cols: int) -> int:
        return self.padded_cols(cols) // self.layout.numbers * self.layout.block_bytes

    def encode_rows(self, rows: Tensor, importance: Tensor | None, search: BlockSearch | None = None) -> Tensor:
        """[R, C] float32 numbers, whole blocks -> [R, bytes per row]; `search` may be a compiled version."""
        blocks = search_blocks(rows, importance, self.layout, search or SearchBySums(TorchSums()))
        return self.layout.pack(blocks).reshape(rows.shape[0], -1)

    def decode_rows(self, raw: Tensor) -> Tensor:
        """[R, bytes per row] -> [R, C] float32."""
        numbers: Tensor = self.layout.decode(raw.reshape(-1, self.layout.block_bytes)).reshape(raw.shape[0], -1)
        return numbers

    def stored_scales(self, data: Tensor) -> Tensor:
        """The float16 numbers (d, dmin) that all scales and minima are computed from, [blocks, 1 or 2]."""
        return self.layout.halves(data.reshape(-1, self.layout.block_bytes))

    def check_range(self, matrix: Tensor, name: str) -> None:
        """Refuse numbers that are too large for scales stored in float16."""
        largest = float(matrix.abs().amax()) if matrix.numel() else 0.0
        if largest > FLOAT16_MAX:
            raise FormatError(
                f"{name}: the largest number is {largest:.3g}, and {self.name} stores its scales in float16 "
                f"(up to {FLOAT16_MAX:.0f}); scale the numbers down, or choose a format with wider scales"
            )


def gguf_blocks(name: str, text: str) -> GgufBlocks:
    """The format of a layout."""
    layout = LAYOUTS[name]
    bits = sum(plane.bits for plane in layout.planes)
    signed = layout.low < 0 or layout.table is not None
    element = signed_integer(bits, "int8") if signed else unsigned_integer(bits, "uint8")
    described = f"GGUF {layout.ggml_type}: {layout.block_bytes} bytes per {layout.numbers}, {text}; scales by search"
    return GgufBlocks(name, described, "uint8", element, Block(1, layout.numbers), default_rule="mse")
