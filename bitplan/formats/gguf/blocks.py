"""GgufBlocks: a format whose blocks are bytes that GGUF fixes, with their scales among the codes.

GGUF's three formats whose encoders are fixed by ggml, down to the byte.

Q4_0 and Q8_0 compute codes from the float32 scale and round the scale to float16 afterwards, where our own formats use
the scale as it is stored. Q4_0 gives code -8 to the number of the largest magnitude. MXFP4 rounds ties towards zero,
writes no -0, and takes its exponent from a float32 logarithm. Checked byte for byte against gguf-py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitplan.base.errors import FormatError
from bitplan.formats.elements import signed_integer, unsigned_integer
from bitplan.formats.format import Block, Format
from bitplan.formats.gguf.grids import VECTOR_LAYOUTS, TorchVectors, VectorLayout, search_vectors
from bitplan.formats.gguf.layouts import LAYOUTS, Layout
from bitplan.formats.gguf.search import FLOAT16_MAX, SearchBySums, TorchSums, column_weights, search_blocks
from bitplan.formats.scale_rules import E8M0_BIAS, PowerOfTwoScales, ScaleRule, flush_small, reciprocal

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

# ---- ggml encoders ---------------------------------------------------------------------------------------------------


class GgufQ40(Format):
    """Q4_0: d = (the number of largest magnitude) / -8; code = trunc(x / d + 8.5), at most 15; value (code - 8) * d."""

    def limits(self, blocks: Tensor, rule: ScaleRule, percentile: float) -> Tensor:
        import torch

        limit = super().limits(blocks, rule, percentile)
        extreme = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
        return torch.where(torch.signbit(extreme), -limit, limit)

    def scale_for(self, limit: Tensor) -> Tensor:
        return -super().scale_for(limit)

    def quantize(
        self, blocks: Tensor, exact_scales: Tensor, base: Tensor | None, zero_point: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        import torch

        inverse = reciprocal(flush_small(exact_scales)).unsqueeze(-1)
        codes = (blocks * inverse + 8.5).trunc().clamp(0, 15).to(torch.int8) - 8
        return codes, exact_scales.to(torch.float16)


class GgufQ80(Format):
    """Q8_0: d = max |x| / 127; code = x / d rounded half away from zero."""

    def quantize(
        self, blocks: Tensor, exact_scales: Tensor, base: Tensor | None, zero_point: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        import torch

        assert self.element is not None
        codes = self.element.round(blocks * reciprocal(flush_small(exact_scales)).unsqueeze(-1))
        return codes, exact_scales.to(torch.float16)


class GgufMxfp4(Format):
    """Scale 2^(floor(log2 max|x|) - 2), the logarithm rounded to float32; nearest code, ties towards zero."""

    def scale_for(self, limit: Tensor) -> Tensor:
        import torch

        exponent = torch.log2(limit.double()).float().floor() - 2
        return torch.where(limit > 0, torch.ldexp(torch.ones_like(limit), exponent.int()), 0.0)

    def quantize(
        self, blocks: Tensor, exact_scales: Tensor, base: Tensor | None, zero_point: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        import torch

        assert self.scales is not None
        stored = self.scales.store(exact_scales, base)
        magnitude = blocks.abs() * reciprocal(self.scales.load(stored, base)).unsqueeze(-1)
        codes = torch.zeros_like(magnitude, dtype=torch.uint8)
        for midpoint in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
            codes += magnitude > midpoint
        negative = (blocks < 0) & (codes > 0)
        return codes | negative.to(torch.uint8) << 3, stored

    def dequantize(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        assert self.element is not None
        doubled = self.element.value(codes) * 2 + 0.0  # ggml's table has no -0.0: code 8 is +0.0
        return doubled * (scale / 2).float().unsqueeze(-1)


class GgufPowerOfTwoScales(PowerOfTwoScales):
    """E8M0, except that for ggml byte 255 is not NaN but 2^128, which only float64 holds."""

    def load(self, stored: Tensor, base: Tensor | None) -> Tensor:
        import torch

        exponent = stored.long() - E8M0_BIAS
        return (exponent + 1023 << 52).view(torch.float64)


# ---- blocks ----------------------------------------------------------------------------------------------------------


class GgufBlocks(Format):
    """A format whose only part, `data`, holds whole blocks, [..., bytes per row]; scales are always searched (mse)."""

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

    def encode_rows(self, rows: Tensor, importance: Tensor | None, search: Any = None) -> Tensor:
        """Encode [R, C] float32 numbers, whole blocks, to [R, bytes per row]; `search` may be a compiled version."""
        blocks = search_blocks(rows, importance, self.layout, search or SearchBySums(TorchSums()))
        return self.layout.pack(blocks).reshape(rows.shape[0], -1)

    def decode_rows(self, raw: Tensor) -> Tensor:
        """Decode [R, bytes per row] to [R, C] float32 numbers."""
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


class GgufVectors(GgufBlocks):
    """A GGUF format (IQ3, IQ2) whose blocks name vectors of a fixed list instead of single numbers."""

    @property
    def vectors(self) -> VectorLayout:
        return VECTOR_LAYOUTS[self.name]

    def data_cols(self, cols: int) -> int:
        return self.padded_cols(cols) // self.vectors.numbers * self.vectors.block_bytes

    def encode_rows(self, rows: Tensor, importance: Tensor | None, search: Any = None) -> Tensor:
        weights = column_weights(rows, importance, self.vectors.group)
        blocks = search_vectors(rows, weights, self.vectors, search or TorchVectors())
        return self.vectors.pack(blocks).reshape(rows.shape[0], -1)

    def decode_rows(self, raw: Tensor) -> Tensor:
        return self.vectors.decode(raw.reshape(-1, self.vectors.block_bytes)).reshape(raw.shape[0], -1)

    def stored_scales(self, data: Tensor) -> Tensor:
        return self.vectors.halves(data.reshape(-1, self.vectors.block_bytes))


def gguf_vectors(name: str, text: str) -> GgufVectors:
    """Make the Format for one of GGUF's layouts of vectors."""
    layout = VECTOR_LAYOUTS[name]
    described = f"GGUF {layout.ggml_type}: {layout.block_bytes} bytes per 256, {text}; scales by search"
    element = signed_integer(3 if layout.width == 4 else 2, "int8")
    return GgufVectors(name, described, "uint8", element, Block(1, layout.numbers), default_rule="mse")


def gguf_blocks(name: str, text: str) -> GgufBlocks:
    """Make the Format for one of GGUF's layouts of blocks."""
    layout = LAYOUTS[name]
    bits = sum(plane.bits for plane in layout.planes)
    signed = layout.low < 0 or layout.table is not None
    element = signed_integer(bits, "int8") if signed else unsigned_integer(bits, "uint8")
    described = f"GGUF {layout.ggml_type}: {layout.block_bytes} bytes per {layout.numbers}, {text}; scales by search"
    return GgufBlocks(name, described, "uint8", element, Block(1, layout.numbers), default_rule="mse")
