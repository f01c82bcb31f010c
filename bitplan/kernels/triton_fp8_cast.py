"""FP8 casts on the GPU: a matrix is read in tiles, and a tile is written in both layouts from registers.

    tensorwise   maxima of pieces (one read, no writes but a few numbers), then the cast, each program of which reduces
                 those few numbers itself: two launches, no memset, no atomics, nothing waits for the host
    rowwise      maxima of rows and columns by strips, a small launch that finishes them, then the cast
    blockwise    the tile is the block: one launch, one read (mxfp8 too)

The bytes decide. Per number of bfloat16: 2 read and 1 + 1 written for blockwise, 2 more read for the maximum of the
others. With a norm in front (`Norm`), the cast reads what the norm would read, and what it would write is never
written.

Codes and scales equal `bitplan.formats.fp8_scaling` bit for bit. The GPU's conversion rounds to nearest even and
saturates; the interpreter's does not, so it gets the same in integers.

Legend: R rows, C columns of the matrix cast, T rows of a tile; "cols" is the layout of the transpose, [C, R].
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.formats.fp8_scaling import (
    FP8_DTYPES,
    ScaledFp8,
    Scaling,
    check_castable,
    empty_scale,
    scale_of_amax,
)
from bitplan.kernels.triton_launch import PreparedLaunch
from bitplan.kernels.triton_numbers import (
    INTERPRETED,
    MAGNITUDE,
    TINY,
    float_name,
    float_of_bits,
    magnitude_bits,
    narrow,
)

INFINITY_BITS = tl.constexpr(0x7F800000)


@dataclass(frozen=True)
class CastLaunch:
    """Rows and columns of a tile and its warps; pieces of the maximum, numbers read at once for it, and its warps.

    Block scaled casts have tiles of 128x128. The defaults are what an H200 was fastest with: a gradient of 16384x28672
    in 740 us, 90% of a copy; tiles of 128x128 took 930 us. Blocks took 818 us, with 8 warps 1187, and 926 where the
    tile was read again for its second layout, to spill no registers.
    """

    rows: int = 128
    cols: int = 64
    warps: int = 4
    pieces: int = 512
    numbers: int = 8192
    amax_warps: int = 8


@dataclass(frozen=True)
class Norm:
    """A norm in front of the cast: what `triton_fp8_norm` found of each row, and the norm's own weights."""

    kind: str  # "rms" or "layer"
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor
    bias: Tensor | None
    partial: Tensor | None = None  # maxima of pieces of the normalised matrix, int32 bits of float32

    @property
    def key(self) -> _NormKey:
        return self.kind, self.weight.dtype, self.bias is not None

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        return self.rstd, self.mean, self.weight, self.bias


_NormKey = tuple[str, torch.dtype, bool]
DEFAULT_LAUNCH = CastLaunch()
_NO_NORM = (None, None, None, None)
Made = tuple[ScaledFp8 | None, ScaledFp8 | None, Tensor | None]


def cast_tiles(
    x_RC: Tensor,
    scaling: Scaling,
    fp8: str,
    eps: float,
    padded: int,
    *,
    rows: bool,
    cols: bool,
    launch: CastLaunch | None = None,
    norm: Norm | None = None,
    plain: bool = False,
) -> Made:
    """(x, its transpose, x after the norm in its own type if `plain`), each where asked for.

    `padded` rows come out, those beyond x's are zeros.
    """
    kind = norm.key if norm is not None else None
    pieces = norm.partial.shape[0] if norm is not None and norm.partial is not None else None
    plan = _plan_cast(x_RC.shape, x_RC.dtype, scaling, fp8, eps, padded, rows, cols, plain, launch, kind, pieces)
    return plan.run(x_RC if x_RC.is_contiguous() else x_RC.contiguous(), norm)


def partial_amax(x_RC: Tensor, launch: CastLaunch | None = None) -> Tensor:
    """Bits of the largest magnitude of each piece of x, as float32; how many pieces depends on its size alone."""
    pieces, find = _plan_amax(x_RC.numel(), x_RC.dtype, launch)
    partial = torch.empty(pieces, dtype=torch.int32, device=x_RC.device)
    if find is None:
        return partial.zero_()
    find(x_RC, partial)
    return partial


# ---- what is settled once for all casts of a shape -------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _plan_amax(size: int, dtype: torch.dtype, launch: CastLaunch | None) -> tuple[int, PreparedLaunch | None]:
    """(pieces, how to find their maxima)."""
    launch = launch or DEFAULT_LAUNCH
    numbers = min(launch.numbers, triton.next_power_of_2(max(size, 16)))
    pieces = min(launch.pieces, triton.cdiv(size, numbers))
    if not pieces:
        return 1, None
    constants = {"SOURCE": float_name(dtype), "NUMBERS": numbers}
    return pieces, PreparedLaunch(_partial_amax, (pieces,), (size,), constants, num_warps=launch.amax_warps)


@functools.lru_cache(maxsize=4096)
def _plan_cast(
    shape: tuple[int, int],
    dtype: torch.dtype,
    scaling: Scaling,
    fp8: str,
    eps: float,
    padded: int,
    rows: bool,
    cols: bool,
    plain: bool,
    launch: CastLaunch | None,
    norm: _NormKey | None,
    pieces: int | None,
) -> _CastPlan:
    return _CastPlan(shape, dtype, scaling, fp8, float(eps), padded, rows, cols, plain, launch, norm, pieces)


class Room:
    """Memory for a cast in one layout."""

    def __init__(self, shape: tuple[int, int], scaling: Scaling, fp8: str) -> None:
        self.shape, self.scaling, self.dtype = shape, scaling, FP8_DTYPES[fp8]
        scale = empty_scale(shape, scaling, torch.device("meta"))
        self.scale_shape, self.scale_stride, self.scale_dtype = scale.shape, scale.stride(), scale.dtype
        # Rows of these are padded, and what pads them is read.
        self.is_ragged = scaling == "128x128" and scale.stride(0) != scale.shape[1]

    def codes(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def scale(self, device: torch.device) -> Tensor:
        if self.is_ragged:
            return empty_scale(self.shape, self.scaling, device)
        return torch.empty_strided(self.scale_shape, self.scale_stride, dtype=self.scale_dtype, device=device)


class _CastPlan:
    """The launches and the memory of casts of one shape in one way."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        scaling: Scaling,
        fp8: str,
        eps: float,
        padded: int,
        rows: bool,
        cols: bool,
        plain: bool,
        launch: CastLaunch | None,
        norm: _NormKey | None,
        pieces: int | None,
    ) -> None:
        check_castable(
            torch.empty(shape, dtype=dtype, device="meta"), scaling if scaling != "128x128" else "1x128", fp8
        )
        self.scaling, self.fp8, self.eps, self.plain, self.launch = scaling, fp8, eps, plain, launch
        self.rows = Room((padded, shape[1]), scaling, fp8) if rows else None
        self.cols = Room((shape[1], padded), scaling, fp8) if cols else None
        self.is_empty = not padded * shape[1]
        self.is_idle = not (rows or cols or plain)
        if self.is_empty or self.is_idle:
            return
        if scaling in ("tensor", "row"):
            launch = launch or DEFAULT_LAUNCH
        else:
            launch = replace(launch or DEFAULT_LAUNCH, rows=128, cols=128)
        if scaling == "tensor" and pieces is None:
            pieces = _plan_amax(shape[0] * shape[1], dtype, self.launch)[0]
        self.strips = _RowScales(shape, dtype, fp8, eps, padded, rows, cols, norm) if scaling == "row" else None
        self.cast = PreparedLaunch(
            _cast_tiles,
            (triton.cdiv(padded, launch.rows) * triton.cdiv(shape[1], launch.cols),),
            (
                *shape,
                padded,
                self.rows.scale_stride[0] if scaling == "128x128" and self.rows is not None else 0,
                self.cols.scale_stride[0] if scaling == "128x128" and self.cols is not None else 0,
                eps,
                pieces or 0,
            ),
            {
                "SOURCE": float_name(dtype),
                "FP8": fp8,
                "SCALING": scaling,
                **_norm_constants(norm),
                "TO_ROWS": rows,
                "TO_COLS": cols,
                "TO_PLAIN": plain,
                "PIECES": triton.next_power_of_2(pieces or 1),
                "BR": launch.rows,
                "BC": launch.cols,
            },
            num_warps=launch.warps,
            enable_fp_fusion=False,
        )

    def run(self, x: Tensor, norm: Norm | None = None, pieces: Tensor | None = None) -> Made:
        """Cast x. `pieces`: maxima that are known already, of all that shall share the scale."""
        device = x.device
        codes = codes_t = scale = scale_t = normed = None
        if self.rows is not None:
            codes, scale = self.rows.codes(device), self.rows.scale(device)
        if self.cols is not None:
            codes_t = self.cols.codes(device)
            scale_t = scale if self.scaling == "tensor" and scale is not None else self.cols.scale(device)
        if self.plain:
            normed = torch.empty_like(x)
        if self.is_empty:
            for each in (scale, scale_t):
                if each is not None and each.numel():  # of a matrix without numbers, as one of zeros
                    each.copy_(scale_of_amax(torch.tensor(self.eps), self.fp8, power_of_two=self.scaling == "tensor"))
        elif not self.is_idle:
            self.launch_all(x, codes, codes_t, normed, scale, scale_t, norm, pieces)
        return (
            None if codes is None or scale is None else ScaledFp8(codes, scale, self.scaling),
            None if codes_t is None or scale_t is None else ScaledFp8(codes_t, scale_t, self.scaling),
            normed,
        )

    def launch_all(
        self,
        x: Tensor,
        codes: Tensor | None,
        codes_t: Tensor | None,
        normed: Tensor | None,
        scale: Tensor | None,
        scale_t: Tensor | None,
        norm: Norm | None,
        pieces: Tensor | None,
    ) -> None:
        of_norm = norm.pointers if norm is not None else _NO_NORM
        if self.scaling == "tensor":
            if pieces is None:
                pieces = norm.partial if norm is not None else partial_amax(x, self.launch)
            scale = scale if scale is not None else scale_t  # there is one
        elif self.strips is not None:
            self.strips.find(x, scale, scale_t, of_norm)
        self.cast(x, codes, codes_t, normed, scale, scale_t, pieces, *of_norm)


class _RowScales:
    """Scales of every row and of every column, as far as a layout asks for them: maxima of strips, then of those."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        fp8: str,
        eps: float,
        padded: int,
        rows: bool,
        cols: bool,
        norm: _NormKey | None,
    ) -> None:
        across = triton.cdiv(shape[1], 128)
        tiles = 8
        while tiles > 1 and across * triton.cdiv(shape[0], 128 * tiles) < 512:
            tiles //= 2
        down = triton.cdiv(shape[0], 128 * tiles)
        self.row_parts, self.col_parts = (across, shape[0]), (down, shape[1])
        constants = {"SOURCE": float_name(dtype), **_norm_constants(norm), "TILES": tiles, "BR": 128, "BC": 128}
        self.strips = PreparedLaunch(_strip_amax, (across, down), shape, constants, num_warps=8, enable_fp_fusion=False)
        width = 128
        row_programs = triton.cdiv(padded, width) if rows else 0
        col_programs = triton.cdiv(shape[1], width) if cols else 0
        self.finish = PreparedLaunch(
            _finish_scales,
            (row_programs + col_programs,),
            (*shape, padded, across, down, row_programs, eps),
            {"FP8": fp8, "WIDTH": width},
            num_warps=4,
            enable_fp_fusion=False,
        )

    def find(self, x: Tensor, scale: Tensor | None, scale_t: Tensor | None, norm: tuple[Tensor | None, ...]) -> None:
        row_parts = torch.empty(self.row_parts, dtype=torch.int32, device=x.device)
        col_parts = torch.empty(self.col_parts, dtype=torch.int32, device=x.device)
        self.strips(x, row_parts, col_parts, *norm)
        # Both halves of that kernel are compiled, whichever runs: a layout that is not wanted lends its place.
        wanted = scale if scale is not None else scale_t
        self.finish(row_parts, col_parts, wanted, scale_t if scale_t is not None else wanted)


def _norm_constants(norm: _NormKey | None) -> dict[str, str | bool]:
    if norm is None:
        return {"NORM": "none", "WEIGHT": "none", "HAS_BIAS": False}
    return {"NORM": norm[0], "WEIGHT": float_name(norm[1]), "HAS_BIAS": norm[2]}


def _room(shape: tuple[int, int], scaling: Scaling, fp8: str, device: torch.device) -> ScaledFp8:
    room = Room(shape, scaling, fp8)
    return ScaledFp8(room.codes(device), room.scale(device), scaling)


def _launch_cast(x, scaling, fp8, eps, padded, out, out_t, normed, pieces, launch, norm) -> None:
    """Into memory that is there, by maxima that are known."""
    given = (out is not None, out_t is not None, normed is not None, launch, norm.key if norm is not None else None)
    plan = _plan_cast(x.shape, x.dtype, scaling, fp8, eps, padded, *given, pieces.shape[0])
    plan.launch_all(
        x,
        out.codes if out is not None else None,
        out_t.codes if out_t is not None else None,
        normed,
        out.scale if out is not None else None,
        out_t.scale if out_t is not None else None,
        norm,
        pieces,
    )


# ---- numbers ---------------------------------------------------------------------------------------------------------


@triton.jit
def fp8_code(y, FP8: tl.constexpr):
    """Scaled numbers -> FP8 bits (uint8): nearest even, saturating, NaN 0x7F."""
    if INTERPRETED:
        BITS: tl.constexpr = 3 if FP8 == "e4m3" else 2
        LIMIT: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
        LEAST: tl.constexpr = 121 if FP8 == "e4m3" else 113  # exponent field of the smallest normal number
        magnitude = tl.minimum(tl.where(y != y, 0.0, tl.abs(y)), LIMIT)
        exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True), LEAST << 23) & INFINITY_BITS
        rounded = magnitude + (exponent + ((23 - BITS) << 23)).to(tl.float32, bitcast=True)
        code = rounded.to(tl.int32, bitcast=True) + (exponent >> (23 - BITS)) - (LEAST << BITS)
        code = (code & 0x7F) | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)
        byte = tl.where(y != y, 0x7F, code).to(tl.uint8)
    elif FP8 == "e4m3":
        byte = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        byte = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return byte


@triton.jit
def scale_of_bits(amax_bits, eps, FP8: tl.constexpr):
    """Bits of a largest magnitude -> its scale: at least eps / limit and 2^-126, NaN where it is not finite."""
    LIMIT: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
    is_finite = amax_bits < INFINITY_BITS
    amax = tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(tl.maximum(amax, eps), LIMIT), TINY)
    return tl.where(is_finite, scale, float("nan"))


@triton.jit
def power_of_two_of_bits(amax_bits, eps, FP8: tl.constexpr):
    """The same rounded up to a power of two: the scale of a whole tensor."""
    scale = scale_of_bits(amax_bits, eps, FP8)
    bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & INFINITY_BITS
    return tl.where(scale == scale, bits.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def inverse_of(scale):
    return tl.div_rn(1.0, scale)


@triton.jit
def e8m0_of_bits(amax_bits, eps, FP8: tl.constexpr):
    """Bits of a largest magnitude -> (E8M0 byte, 1 / its scale): exact powers of two, NaN where it is not finite."""
    LIMIT: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
    is_finite = amax_bits < INFINITY_BITS
    amax = tl.maximum(tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True), eps)
    byte = (tl.div_rn(amax, LIMIT).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, byte, 255), tl.where(is_finite, inverse, float("nan"))


@triton.jit
def normalise(
    x_TC,
    r_T,
    c_C,
    ok_T,
    ok_C,
    rstd_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    SOURCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """The norm of these numbers, rounded to the type of x as the norm by itself would give it."""
    if NORM != "none":
        rstd_T = tl.load(rstd_ptr + r_T, mask=ok_T, other=0.0)
        if NORM == "layer":
            x_TC = x_TC - tl.load(mean_ptr + r_T, mask=ok_T, other=0.0)[:, None]
        weight_C = float_of_bits(tl.load(weight_ptr + c_C, mask=ok_C, other=0), WEIGHT)
        x_TC = x_TC * rstd_T[:, None] * weight_C[None, :]
        if HAS_BIAS:
            x_TC = x_TC + float_of_bits(tl.load(bias_ptr + c_C, mask=ok_C, other=0), WEIGHT)[None, :]
        x_TC = tl.where(ok_T[:, None] & ok_C[None, :], x_TC, 0.0)
        x_TC = float_of_bits(narrow(x_TC, SOURCE), SOURCE)
    return x_TC


# ---- maxima ----------------------------------------------------------------------------------------------------------


@triton.jit
def _partial_amax(x_ptr, partial_ptr, size, SOURCE: tl.constexpr, NUMBERS: tl.constexpr):
    piece = tl.program_id(0)
    at = tl.arange(0, NUMBERS)
    step = tl.num_programs(0).to(tl.int64) * NUMBERS
    largest = tl.zeros([NUMBERS], tl.int32)
    for start in range(piece.to(tl.int64) * NUMBERS, size, step):
        bits = tl.load(x_ptr + start + at, mask=start + at < size, other=0)
        largest = tl.maximum(largest, _magnitude_of(bits, SOURCE))
    tl.store(partial_ptr + piece, _float_bits(tl.max(largest, axis=0), SOURCE))


@triton.jit
def _magnitude_of(bits, SOURCE: tl.constexpr):
    """|x| as an integer that orders as |x| does, in its own width: one operation a number, and NaN is the largest."""
    if SOURCE == "f32":
        magnitude = bits.to(tl.int32, bitcast=True) & MAGNITUDE
    else:
        magnitude = bits.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return magnitude


@triton.jit
def _float_bits(magnitude, SOURCE: tl.constexpr):
    """Such an integer -> the bits of the float32 that it stands for."""
    if SOURCE == "bf16":
        bits = magnitude << 16
    elif SOURCE == "f16":
        bits = magnitude.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    else:
        bits = magnitude
    return bits & MAGNITUDE


@triton.jit(do_not_specialize=["rows"])
def _strip_amax(
    x_ptr,
    row_ptr,
    col_ptr,
    rstd_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    cols,
    SOURCE: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Largest magnitudes of a strip of BC columns: of each row in it, and of each column over TILES * BR rows."""
    strip, part = tl.program_id(0), tl.program_id(1)
    c_C = strip * BC + tl.arange(0, BC)
    ok_C = c_C < cols
    largest_C = tl.zeros([BC], tl.int32)
    for tile in range(TILES):
        r_T = (part * TILES + tile) * BR + tl.arange(0, BR)
        ok_T = r_T < rows
        at_TC = r_T[:, None].to(tl.int64) * cols + c_C[None, :]
        bits_TC = tl.load(x_ptr + at_TC, mask=ok_T[:, None] & ok_C[None, :], other=0)
        x_TC = float_of_bits(bits_TC, SOURCE)
        x_TC = normalise(
            x_TC, r_T, c_C, ok_T, ok_C, rstd_ptr, mean_ptr, weight_ptr, bias_ptr, NORM, WEIGHT, SOURCE, HAS_BIAS
        )
        magnitude_TC = magnitude_bits(x_TC)
        tl.store(row_ptr + strip.to(tl.int64) * rows + r_T, tl.max(magnitude_TC, axis=1), mask=ok_T)
        largest_C = tl.maximum(largest_C, tl.max(magnitude_TC, axis=0))
    tl.store(col_ptr + part.to(tl.int64) * cols + c_C, largest_C, mask=ok_C)


@triton.jit(do_not_specialize=["rows", "padded", "across", "down", "row_programs"])
def _finish_scales(
    row_parts_ptr,
    col_parts_ptr,
    scale_ptr,
    scale_t_ptr,
    rows,
    cols,
    padded,
    across,
    down,
    row_programs,
    eps,
    FP8: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The first programs finish rows, the others columns."""
    program = tl.program_id(0)
    largest = tl.zeros([WIDTH], tl.int32)
    if program < row_programs:
        r = program * WIDTH + tl.arange(0, WIDTH)
        for part in range(across):
            at = part * rows + r
            largest = tl.maximum(largest, tl.load(row_parts_ptr + at, mask=r < rows, other=0))
        tl.store(scale_ptr + r, scale_of_bits(largest, eps, FP8), mask=r < padded)
    else:
        c = (program - row_programs) * WIDTH + tl.arange(0, WIDTH)
        for part in range(down):
            at = part * cols + c
            largest = tl.maximum(largest, tl.load(col_parts_ptr + at, mask=c < cols, other=0))
        tl.store(scale_t_ptr + c, scale_of_bits(largest, eps, FP8), mask=c < cols)


# ---- the cast --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "pieces"])
def _cast_tiles(
    x_ptr,
    out_ptr,
    out_t_ptr,
    plain_ptr,
    scale_ptr,
    scale_t_ptr,
    pieces_ptr,
    rstd_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    cols,
    padded,
    scale_stride,
    scale_t_stride,
    eps,
    pieces,
    SOURCE: tl.constexpr,
    FP8: tl.constexpr,
    SCALING: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    TO_PLAIN: tl.constexpr,
    PIECES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    across = (cols + BC - 1) // BC
    tile = tl.program_id(0)
    if SCALING == "tensor" or SCALING == "row":
        tile = tl.num_programs(0) - 1 - tile  # from the end: what the maximum read last is still in L2
    down_block, across_block = tile // across, tile % across
    r_T = down_block * BR + tl.arange(0, BR)
    c_C = across_block * BC + tl.arange(0, BC)
    ok_T, ok_C = r_T < rows, c_C < cols
    room_T = r_T < padded
    at_TC = r_T[:, None].to(tl.int64) * cols + c_C[None, :]
    x_TC = float_of_bits(tl.load(x_ptr + at_TC, mask=ok_T[:, None] & ok_C[None, :], other=0), SOURCE)
    x_TC = normalise(
        x_TC, r_T, c_C, ok_T, ok_C, rstd_ptr, mean_ptr, weight_ptr, bias_ptr, NORM, WEIGHT, SOURCE, HAS_BIAS
    )
    if TO_PLAIN:
        tl.store(plain_ptr + at_TC, narrow(x_TC, SOURCE), mask=ok_T[:, None] & ok_C[None, :])
    room_TC = room_T[:, None] & ok_C[None, :]
    at_CT = c_C[:, None].to(tl.int64) * padded + r_T[None, :]
    room_CT = ok_C[:, None] & room_T[None, :]

    if SCALING == "tensor" or SCALING == "128x128":
        if SCALING == "tensor":
            piece = tl.arange(0, PIECES)
            amax = tl.max(tl.load(pieces_ptr + piece, mask=piece < pieces, other=0), axis=0)
            scale = power_of_two_of_bits(amax, eps, FP8)
        else:
            scale = scale_of_bits(tl.max(tl.max(magnitude_bits(x_TC), axis=1), axis=0), eps, FP8)
        byte_TC = fp8_code(x_TC * inverse_of(scale), FP8)
        if TO_ROWS:
            tl.store(out_ptr + at_TC, byte_TC, mask=room_TC)
        if TO_COLS:
            tl.store(out_t_ptr + at_CT, tl.trans(byte_TC), mask=room_CT)
        if SCALING == "tensor":
            if tl.program_id(0) == 0:
                tl.store(scale_ptr, scale)
        else:
            if TO_ROWS:
                tl.store(scale_ptr + down_block * scale_stride + across_block, scale)
            if TO_COLS:
                tl.store(scale_t_ptr + across_block * scale_t_stride + down_block, scale)
    elif SCALING == "1x32":
        magnitude_TC = magnitude_bits(x_TC)
        if TO_ROWS:
            amax_TG = tl.max(tl.reshape(magnitude_TC, [BR, BC // 32, 32]), axis=2)
            byte_TG, inverse_TG = e8m0_of_bits(amax_TG, eps, FP8)
            wide = tl.reshape(tl.broadcast_to(inverse_TG[:, :, None], [BR, BC // 32, 32]), [BR, BC])
            tl.store(out_ptr + at_TC, fp8_code(x_TC * wide, FP8), mask=room_TC)
            g_G = across_block * (BC // 32) + tl.arange(0, BC // 32)
            at_TG = r_T[:, None].to(tl.int64) * (cols // 32) + g_G[None, :]
            tl.store(scale_ptr + at_TG, byte_TG.to(tl.uint8), mask=room_T[:, None] & (g_G < cols // 32)[None, :])
        if TO_COLS:
            amax_GC = tl.max(tl.reshape(magnitude_TC, [BR // 32, 32, BC]), axis=1)
            byte_GC, inverse_GC = e8m0_of_bits(amax_GC, eps, FP8)
            wide = tl.reshape(tl.broadcast_to(inverse_GC[:, None, :], [BR // 32, 32, BC]), [BR, BC])
            tl.store(out_t_ptr + at_CT, tl.trans(fp8_code(x_TC * wide, FP8)), mask=room_CT)
            h_G = down_block * (BR // 32) + tl.arange(0, BR // 32)
            at_GC = c_C[None, :].to(tl.int64) * (padded // 32) + h_G[:, None]
            tl.store(scale_t_ptr + at_GC, byte_GC.to(tl.uint8), mask=ok_C[None, :] & (h_G < padded // 32)[:, None])
    else:
        if TO_ROWS:
            if SCALING == "row":
                scale_T = tl.load(scale_ptr + r_T, mask=room_T, other=1.0)
            else:
                scale_T = scale_of_bits(tl.max(magnitude_bits(x_TC), axis=1), eps, FP8)
                tl.store(scale_ptr + across_block.to(tl.int64) * padded + r_T, scale_T, mask=room_T)
            tl.store(out_ptr + at_TC, fp8_code(x_TC * inverse_of(scale_T)[:, None], FP8), mask=room_TC)
        if TO_COLS:
            if SCALING == "row":
                scale_C = tl.load(scale_t_ptr + c_C, mask=ok_C, other=1.0)
            else:
                scale_C = scale_of_bits(tl.max(magnitude_bits(x_TC), axis=0), eps, FP8)
                tl.store(scale_t_ptr + down_block.to(tl.int64) * cols + c_C, scale_C, mask=ok_C)
            tl.store(out_t_ptr + at_CT, tl.trans(fp8_code(x_TC * inverse_of(scale_C)[None, :], FP8)), mask=room_CT)
