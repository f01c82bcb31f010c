"""Scaled FP8 operands of a matrix product: the definition of scales, casts and their values, in plain torch.

An operand is a matrix [R, C] whose rows the product sums along: C is the contraction. `codes` are FP8, row-major, and
`scale` has one number for each group of codes (the table itself is in `fp8.recipes`):

    scaling     of the recipe                            shape of the scale              numbers that share one
    "tensor"    tensorwise                               ()                              all
    "row"       rowwise                                  [R, 1]                          a row
    "1x128"     blockwise, activations and gradients     [R, C / 128], R fastest         128 along the contraction
    "128x128"   blockwise, weights                       [R / 128, C / 128]              a square
    "1x32"      mxfp8                                    [R, C / 32], E8M0 bytes         32 along the contraction

The GPU's library asks for "R fastest", and for rows of "128x128" scales padded to a multiple of four. The other layout
of a matrix, for a product that sums along R, is the same cast of its transpose.

The rule, in float32: amax = the largest |x|, at least `eps`; scale = amax / limit, at least 2^-126;
code = nearest(x * (1 / scale)), ties to even, at most +-limit. So a group of zeros has codes 0 and the smallest scale.
A group that holds an infinity or a NaN has scale NaN: all of it reads as NaN, so that the error shows.

For "tensor" and "1x32" the scale is the smallest power of two at or above amax / limit (an E8M0 byte for "1x32", 255 is
NaN): rounded up, because rounded down as OCP Microscaling has it the largest numbers saturate, and a product of uniform
weights then errs by 5.7% instead of 3.5%. The codes are floats, so a power of two costs them no precision, only up to
one of the 18 octaves that E4M3 reaches over. In return, the scale of a whole tensor hardly ever changes from one step
to the next, so a cast can use the last scale and check it in the same read (`bitplan.fp8.kernels.guessed_cast`, where
gradients on a GPU may keep a scale that is up to 32 times larger). NaN codes are 0x7F.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats.scale_rules import E8M0_NAN, SMALLEST_SCALE, PowerOfTwoScales
from bitplan.fp8.recipes import SCALINGS, ScaleBlock, find_recipe

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_NAMES = {dtype: name for name, dtype in FP8_DTYPES.items()}
FP8_LIMITS = {"e4m3": 448.0, "e5m2": 57344.0}
NAN_CODE = 0x7F
_E8M0 = PowerOfTwoScales()


@dataclass(slots=True, eq=False)
class ScaledFp8:
    """An operand [R, C] of a product that sums along C. Do not change it.

    It is not a frozen dataclass, which would take three times as long to make: a layer makes five a step.
    """

    codes: Tensor
    scale: Tensor
    scaling: str
    _turned: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def turned(self) -> Tensor:
        """The codes as [C, R], a view; kept, because a weight's cast is multiplied many times."""
        if self._turned is None:
            self._turned = self.codes.t()
        return self._turned

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def fp8(self) -> str:
        return FP8_NAMES[self.codes.dtype]


class CastPair(NamedTuple):
    """A matrix cast to FP8 in two layouts, `rows` and `cols` (its transpose); None where one was not asked for."""

    rows: ScaledFp8 | None = None
    cols: ScaledFp8 | None = None


def scaling_of(recipe: str, *, is_weight: bool = False) -> str:
    """Return the scaling of an operand by a recipe, such as "1x128"."""
    row = find_recipe(recipe)
    return row.weights if is_weight else row.activations


def padded_tokens(recipe: str, tokens: int) -> int:
    """The rows of the cast of so many tokens: padded to the recipe's multiple."""
    multiple = find_recipe(recipe).multiple
    return -(-tokens // multiple) * multiple


def pad_rows(x_RC: Tensor, rows: int) -> Tensor:
    """Return x with rows of zeros below it, up to this many rows."""
    missing = rows - x_RC.shape[0]
    return torch.nn.functional.pad(x_RC, (0, 0, 0, missing)) if missing else x_RC


def cast_reference(x_RC: Tensor, scaling: str, fp8: str = "e4m3", eps: float = 0.0) -> ScaledFp8:
    """Cast a matrix as an operand of a product that sums along C."""
    check_castable(x_RC, scaling, fp8)
    block = SCALINGS[scaling]
    x = x_RC.float()
    blocks = _in_blocks(x, block)
    amax = _amax(blocks, block).clamp(min=eps)
    if block.as_byte:
        stored, scale = _power_of_two_scale_above(amax, fp8)
    else:
        stored = scale = scale_of_amax(amax, fp8, power_of_two=block.power_of_two)
    codes = round_to_fp8(blocks * (1.0 / scale), fp8)
    return ScaledFp8(codes.reshape(x.shape).contiguous(), _arrange_scale(stored, x.shape, scaling), scaling)


def scale_of_amax(amax: Tensor, fp8: str = "e4m3", *, power_of_two: bool = False) -> Tensor:
    """Return amax / limit, at least the smallest normal number; NaN where amax is not finite."""
    limit = torch.full((), FP8_LIMITS[fp8], dtype=torch.float32, device=amax.device)
    scale = amax.float() / limit
    if power_of_two:  # the next exponent unless the mantissa is zero
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(amax.isfinite(), scale.clamp(min=SMALLEST_SCALE), torch.nan)


def round_to_fp8(scaled: Tensor, fp8: str) -> Tensor:
    """Nearest code, ties to even, saturating; NaN is 0x7F whatever its sign."""
    limit = FP8_LIMITS[fp8]
    codes = scaled.clamp(-limit, limit).to(FP8_DTYPES[fp8]).view(torch.uint8)
    return torch.where(scaled.isnan(), NAN_CODE, codes).view(FP8_DTYPES[fp8])


def decode_scaled(operand: ScaledFp8, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of an operand, [R, C]; computed in float32, or in float64 if that is `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    block = SCALINGS[operand.scaling]
    blocks = _in_blocks(operand.codes.to(wide), block)
    scale = _E8M0.load(operand.scale, None) if block.as_byte else operand.scale
    if block.cols is not None:
        scale = scale[:, None, :, None]
    return (blocks * scale.to(wide)).reshape(operand.shape).contiguous().to(dtype)


def check_castable(x_RC: Tensor, scaling: str, fp8: str) -> None:
    """Raise where a matrix cannot be cast: not a matrix of floats, or blocks that do not fit."""
    if scaling not in SCALINGS or fp8 not in FP8_DTYPES:
        raise FormatError(f"scaling is one of {', '.join(SCALINGS)} and fp8 e4m3 or e5m2, got {scaling!r}, {fp8!r}")
    if x_RC.dim() != 2 or x_RC.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise FormatError(
            f"an FP8 cast takes a matrix of bfloat16, float16 or float32, got {x_RC.dtype} of shape {tuple(x_RC.shape)}"
        )
    height, width = SCALINGS[scaling].rows or 1, SCALINGS[scaling].cols or 1
    if x_RC.shape[0] % height or x_RC.shape[1] % width:
        raise FormatError(
            f"scaling {scaling} takes whole blocks of {height}x{width}, got {tuple(x_RC.shape)}; pad with zeros"
        )


def empty_scale(shape: tuple[int, int], scaling: str, device: torch.device) -> Tensor:
    """Room for the scale of an operand of this shape, in the layout that products take."""
    block = SCALINGS[scaling]
    dtype = torch.uint8 if block.as_byte else torch.float32
    if block.rows is None:
        return torch.empty((), dtype=dtype, device=device)
    down, across = shape[0] // block.rows, 1 if block.cols is None else shape[1] // block.cols
    if block.layout == "columns":
        return torch.empty((across, down), dtype=dtype, device=device).t()
    if block.layout == "fours":
        return torch.zeros((down, -(-across // 4) * 4), dtype=dtype, device=device)[:, :across]
    return torch.empty((down, across), dtype=dtype, device=device)


def _in_blocks(x_RC: Tensor, block: ScaleBlock) -> Tensor:
    """View x as [blocks down, rows of one, blocks across, columns of one]; blocks of whole rows are x itself."""
    if block.rows is None or block.cols is None:
        return x_RC
    rows, cols = x_RC.shape
    return x_RC.reshape(rows // block.rows, block.rows, cols // block.cols, block.cols)


def _amax(blocks: Tensor, block: ScaleBlock) -> Tensor:
    """The largest magnitude of each group, in the shape that multiplies the blocks; NaN counts as the largest."""
    magnitude = blocks.abs()
    if block.rows is None:
        return magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    over = (1,) if block.cols is None else (1, 3)
    if not magnitude.numel():
        return magnitude.sum(dim=over, keepdim=True)
    return magnitude.amax(dim=over, keepdim=True)


def _power_of_two_scale_above(amax: Tensor, fp8: str) -> tuple[Tensor, Tensor]:
    """Return E8M0 bytes and their scales, rounded up so that nothing saturates; the format mxfp8 rounds down."""
    limit = torch.full((), FP8_LIMITS[fp8], dtype=torch.float32, device=amax.device)
    byte = ((amax / limit).view(torch.int32) + 0x7FFFFF) >> 23  # the next exponent unless the mantissa is zero
    byte = torch.where(amax.isfinite(), byte, E8M0_NAN).to(torch.uint8)
    return byte, _E8M0.load(byte, None)


def _arrange_scale(stored: Tensor, shape: torch.Size, scaling: str) -> Tensor:
    if stored.dim() < 4:  # blocks of whole rows
        return stored
    flat = stored.reshape(stored.shape[0], stored.shape[2])
    if SCALINGS[scaling].layout == "rows":
        return flat
    return empty_scale((shape[0], shape[1]), scaling, flat.device).copy_(flat)
