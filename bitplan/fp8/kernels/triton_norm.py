"""The norm in front of an FP8 cast: statistics of each row, and the norm's gradient, on the GPU.

Forward is two reads of x and no write of the normalised matrix: `row_stats` finds each row's mean and inverse
deviation, and for a tensorwise cast the largest normalised magnitudes while the row is in registers; the cast
(`triton_cast`) normalises as it reads (`normalise`). A separate norm reads and writes 4 bytes a number, and a
tensorwise cast then reads 4 more; here it is 4 in all. Rows of up to `LONGEST_ROW` numbers are held in registers.

`norm_gradient` reads x and the gradient once, writes dx, and adds up the weight's gradient over the rows of a program.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from bitplan.base.errors import FormatError
from bitplan.base.loops.launch import PreparedLaunch, can_overlap, dependent_options
from bitplan.formats.triton_numbers import float_name, float_of_bits, magnitude_bits, narrow
from bitplan.fp8.kernels.triton_fp8_rounding import high_float, low_float, pair_of_floats

LONGEST_ROW = 32768
MOST_PIECES = 1024
GRADIENT_PROGRAMS = 528
STATS_AT_ONCE = 4
NormKey = tuple[str, torch.dtype, bool]  # kind, type of the weights, is there a bias
NO_NORM = (None, None, None, None)


class Norm(NamedTuple):
    """A norm in front of the cast: statistics of each row from `row_stats`, and the norm's own weights."""

    kind: str  # "rms" or "layer"
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor
    bias: Tensor | None
    partial: Tensor | None = None  # maxima of pieces of the normalised matrix, int32 bits of float32

    @property
    def key(self) -> NormKey:
        return self.kind, self.weight.dtype, self.bias is not None

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        return self.rstd, self.mean, self.weight, self.bias


def norm_constants(norm: NormKey | None) -> dict[str, str | bool]:
    """The compile-time constants of a kernel that normalises as it reads."""
    if norm is None:
        return {"NORM": "none", "WEIGHT": "none", "HAS_BIAS": False}
    return {"NORM": norm[0], "WEIGHT": float_name(norm[1]), "HAS_BIAS": norm[2]}


def row_stats(
    x_RC: Tensor, kind: str, weight_C: Tensor, bias_C: Tensor | None, norm_eps: float, *, with_amax: bool
) -> Norm:
    """The statistics of each row, and with `with_amax` the largest normalised magnitudes by strips of rows."""
    types = (("SOURCE", x_RC.dtype), ("WEIGHT", weight_C.dtype))
    flags = (("HAS_BIAS", bias_C is not None), ("AMAX", with_amax))
    programs, find = plan_norm(x_RC.shape, kind, types, flags, float(norm_eps))
    rows, device = x_RC.shape[0], x_RC.device
    rstd = torch.empty(rows, dtype=torch.float32, device=device)
    mean = torch.empty(rows, dtype=torch.float32, device=device) if kind == "layer" else None
    partial = torch.empty(max(programs, 1), dtype=torch.int32, device=device) if with_amax else None
    if find is not None:
        find(x_RC, weight_C, bias_C, rstd, mean, partial)
    elif partial is not None:
        partial.zero_()
    return Norm(kind, mean, rstd, weight_C, bias_C, partial)


def norm_gradient(dy_RC: Tensor, x_RC: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return gradients of input, weight and bias, the last two in the weight's type."""
    has_bias = norm.bias is not None
    types = (("SOURCE", x_RC.dtype), ("GRAD", dy_RC.dtype), ("WEIGHT", norm.weight.dtype))
    programs, find = plan_norm(x_RC.shape, norm.kind, types, (("HAS_BIAS", has_bias),))
    dx = torch.empty_like(x_RC)
    shape = (2, programs, x_RC.shape[1]) if has_bias else (programs, x_RC.shape[1])
    sums = torch.empty(*shape, dtype=torch.float32, device=x_RC.device)
    if find is not None:
        dy_RC = dy_RC if dy_RC.is_contiguous() else dy_RC.contiguous()
        find(dy_RC, x_RC, norm.weight, norm.rstd, norm.mean, dx, sums)
    total = sum_of_parts(sums, norm.weight.dtype)
    return (dx, total[0], total[1]) if has_bias else (dx, total, None)


def sum_of_parts(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the parts of [parts, C] or [2, parts, C]; torch's own takes 11 us for 512 parts."""
    *first, parts, cols = sums.shape
    if not parts:
        return sums.sum(-2).to(dtype)
    total = torch.empty((*first, cols), dtype=dtype, device=sums.device)
    plan_sum(parts, cols, first[0] if first else 1, float_name(dtype))(sums, total)
    return total


@functools.lru_cache(maxsize=1024)
def plan_sum(parts: int, cols: int, matrices: int, out: str) -> PreparedLaunch:
    constants, options = {"OUT": out, "PARTS": 64, "WIDTH": 32, "OVERLAP": can_overlap()}, dependent_options()
    grid = (triton.cdiv(cols, 32), matrices)
    return PreparedLaunch(_add_parts, grid, (parts, cols), constants, num_warps=8, **options)


@triton.jit(do_not_specialize=["parts"])
def _add_parts(
    sums_ptr,
    total_ptr,
    parts,
    cols,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        cuda.gdc_wait()
    c_W = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    sums_ptr += tl.program_id(1).to(tl.int64) * parts * cols
    sum_PW = tl.zeros([PARTS, WIDTH], tl.float32)
    for start in range(0, parts, PARTS):
        part_P = start + tl.arange(0, PARTS)
        here_PW = (part_P < parts)[:, None] & (c_W < cols)[None, :]
        sum_PW += tl.load(sums_ptr + part_P[:, None] * cols + c_W[None, :], mask=here_PW, other=0.0)
    tl.store(total_ptr + tl.program_id(1) * cols + c_W, narrow(tl.sum(sum_PW, axis=0), OUT), mask=c_W < cols)


@functools.lru_cache(maxsize=1024)
def plan_norm(
    shape: tuple[int, int],
    kind: str,
    types: tuple[tuple[str, torch.dtype], ...],
    flags: tuple[tuple[str, bool], ...],
    norm_eps: float | None = None,
) -> tuple[int, PreparedLaunch | None]:
    """Return how many programs, and how to launch them: of `_row_stats` with an epsilon, else of `_norm_gradient`."""
    rows, cols = shape
    if cols > LONGEST_ROW:
        raise FormatError(f"the fused norm holds rows of up to {LONGEST_ROW} numbers, got {cols}")
    rows_each = max(1, triton.cdiv(rows, GRADIENT_PROGRAMS if norm_eps is None else MOST_PIECES))
    programs, block = triton.cdiv(rows, rows_each), triton.next_power_of_2(cols)
    if not rows:
        return 0, None
    # H200, 16384x4096, us: statistics of four rows at once 41, of two 50, of one 48; gradients of one 123, of two 138.
    at_once = STATS_AT_ONCE if norm_eps is not None and rows_each >= STATS_AT_ONCE and block <= 4096 else 1
    constants = {"EACH": rows_each, "T": at_once, **{name: float_name(dtype) for name, dtype in types}}
    constants |= {"NORM": kind, **dict(flags)}
    constants |= {"BC": block, "OVERLAP": can_overlap()}
    warps = 4 if block <= 2048 else 8 if block <= 8192 else 16
    if norm_eps is None:
        numbers = (rows, cols, programs)
        return programs, PreparedLaunch(_norm_gradient, (programs,), numbers, constants, num_warps=warps)
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    return programs, PreparedLaunch(_row_stats, (programs,), (rows, cols, norm_eps), constants, **options)


@triton.jit(do_not_specialize=["rows"])
def _row_stats(
    x_ptr,
    weight_ptr,
    bias_ptr,
    rstd_ptr,
    mean_ptr,
    partial_ptr,
    rows,
    cols,
    norm_eps,
    EACH: tl.constexpr,  # rows of a program
    T: tl.constexpr,  # rows at once
    SOURCE: tl.constexpr,
    WEIGHT: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    BC: tl.constexpr,
    OVERLAP: tl.constexpr,  # whether the next kernel is launched before this has ended
):
    if OVERLAP:
        cuda.gdc_launch_dependents()
    c_C = tl.arange(0, BC)
    ok_C = c_C < cols
    largest_C = tl.zeros([BC], tl.int32)
    if AMAX:
        weight_C = float_of_bits(tl.load(weight_ptr + c_C, mask=ok_C, other=0), WEIGHT)
        if HAS_BIAS:
            bias_C = float_of_bits(tl.load(bias_ptr + c_C, mask=ok_C, other=0), WEIGHT)
    for step in range(0, EACH, T):
        r_T = tl.program_id(0) * EACH + step + tl.arange(0, T)
        ok_T = (r_T < rows) & (step + tl.arange(0, T) < EACH)
        here_TC = ok_T[:, None] & ok_C[None, :]
        at_TC = r_T.to(tl.int64)[:, None] * cols + c_C[None, :]
        x_TC = float_of_bits(tl.load(x_ptr + at_TC, mask=here_TC, other=0), SOURCE)
        if NORM == "layer":
            mean_T = tl.sum(x_TC, axis=1) / cols
            x_TC = tl.where(ok_C[None, :], x_TC - mean_T[:, None], 0.0)
            tl.store(mean_ptr + r_T, mean_T, mask=ok_T)
        rstd_T = 1.0 / tl.sqrt(tl.sum(x_TC * x_TC, axis=1) / cols + norm_eps)
        tl.store(rstd_ptr + r_T, rstd_T, mask=ok_T)
        if AMAX:
            rstd_T = tl.where(ok_T, rstd_T, 0.0)  # it is infinite without an epsilon, and zeros are wanted here
            y_TC = x_TC * rstd_T[:, None] * weight_C[None, :]
            if HAS_BIAS:
                y_TC = tl.where(here_TC, y_TC + bias_C[None, :], 0.0)
            largest_C = tl.maximum(largest_C, tl.max(magnitude_bits(y_TC), axis=0))
    if AMAX:  # rounding keeps the order of numbers, so the largest one is rounded alone
        largest = tl.max(largest_C, axis=0).to(tl.float32, bitcast=True)
        largest = float_of_bits(narrow(largest, SOURCE), SOURCE)
        tl.store(partial_ptr + tl.program_id(0), magnitude_bits(largest))


@triton.jit(do_not_specialize=["rows", "programs"])
def _norm_gradient(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    mean_ptr,
    dx_ptr,
    sums_ptr,
    rows,
    cols,
    programs,
    EACH: tl.constexpr,
    T: tl.constexpr,
    SOURCE: tl.constexpr,
    GRAD: tl.constexpr,
    WEIGHT: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BC: tl.constexpr,
    OVERLAP: tl.constexpr,  # whether the next kernel is launched before this has ended
):
    if OVERLAP:
        cuda.gdc_launch_dependents()
    c_C = tl.arange(0, BC)
    ok_C = c_C < cols
    weight_C = float_of_bits(tl.load(weight_ptr + c_C, mask=ok_C, other=0), WEIGHT)
    weight_sum_C = tl.zeros([BC], tl.float32)
    bias_sum_C = tl.zeros([BC], tl.float32)
    for step in range(0, EACH, T):
        r_T = tl.program_id(0) * EACH + step + tl.arange(0, T)
        ok_T = (r_T < rows) & (step + tl.arange(0, T) < EACH)
        here_TC = ok_T[:, None] & ok_C[None, :]
        at_TC = r_T.to(tl.int64)[:, None] * cols + c_C[None, :]
        x_TC = float_of_bits(tl.load(x_ptr + at_TC, mask=here_TC, other=0), SOURCE)
        dy_TC = float_of_bits(tl.load(dy_ptr + at_TC, mask=here_TC, other=0), GRAD)
        rstd_T = tl.load(rstd_ptr + r_T, mask=ok_T, other=0.0)
        if NORM == "layer":
            x_TC = tl.where(ok_C[None, :], x_TC - tl.load(mean_ptr + r_T, mask=ok_T, other=0.0)[:, None], 0.0)
        unit_TC = x_TC * rstd_T[:, None]
        g_TC = dy_TC * weight_C[None, :]
        dx_TC = g_TC - unit_TC * (tl.sum(g_TC * unit_TC, axis=1) / cols)[:, None]
        if NORM == "layer":
            dx_TC = dx_TC - (tl.sum(g_TC, axis=1) / cols)[:, None]
        tl.store(dx_ptr + at_TC, narrow(dx_TC * rstd_T[:, None], SOURCE), mask=here_TC)
        weight_sum_C += tl.sum(dy_TC * unit_TC, axis=0)
        if HAS_BIAS:
            bias_sum_C += tl.sum(dy_TC, axis=0)
    at_C = tl.program_id(0).to(tl.int64) * cols + c_C
    tl.store(sums_ptr + at_C, weight_sum_C, mask=ok_C)
    if HAS_BIAS:
        tl.store(sums_ptr + programs.to(tl.int64) * cols + at_C, bias_sum_C, mask=ok_C)


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


@triton.jit
def _normal(x_QW, mean_Q, rstd_Q, weight_W, bias_W, NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    if NORM == "layer":
        x_QW = x_QW - mean_Q[:, None]
    y_QW = x_QW * rstd_Q[:, None] * weight_W[None, :]
    if HAS_BIAS:
        y_QW = y_QW + bias_W[None, :]
    return y_QW


@triton.jit
def _normal_words(
    x_QW,
    r_Q,
    rows,
    rstd_ptr,
    mean_ptr,
    weight_2W,
    bias_2W,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    ok_Q = r_Q < rows
    rstd_Q = tl.load(rstd_ptr + r_Q, mask=ok_Q, other=0.0)
    mean_Q = rstd_Q
    if NORM == "layer":
        mean_Q = tl.load(mean_ptr + r_Q, mask=ok_Q, other=0.0)
    low_QW = _normal(low_float(x_QW), mean_Q, rstd_Q, weight_2W[0], bias_2W[0], NORM, HAS_BIAS)
    high_QW = _normal(high_float(x_QW), mean_Q, rstd_Q, weight_2W[1], bias_2W[1], NORM, HAS_BIAS)
    y_QW = pair_of_floats(low_QW, high_QW)
    if RAGGED:
        y_QW = tl.where(ok_Q[:, None], y_QW, 0)
    return y_QW


@triton.jit
def normalise_words(
    x_4QW,
    r_Q,
    c_W,
    rows,
    cols,
    rstd_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """`normalise` of words of two bfloat16 numbers of rows r_Q, r_Q + 1, r_Q + 2, r_Q + 3 and columns c_W, c_W + 1.

    RAGGED: some rows may be beyond the last.
    """
    ok_W = c_W < cols
    even_W = float_of_bits(tl.load(weight_ptr + c_W, mask=ok_W, other=0), WEIGHT)
    weight_2W = even_W, float_of_bits(tl.load(weight_ptr + c_W + 1, mask=ok_W, other=0), WEIGHT)
    bias_2W = weight_2W
    if HAS_BIAS:
        even_W = float_of_bits(tl.load(bias_ptr + c_W, mask=ok_W, other=0), WEIGHT)
        bias_2W = even_W, float_of_bits(tl.load(bias_ptr + c_W + 1, mask=ok_W, other=0), WEIGHT)
    return (
        _normal_words(x_4QW[0], r_Q, rows, rstd_ptr, mean_ptr, weight_2W, bias_2W, NORM, HAS_BIAS, RAGGED),
        _normal_words(x_4QW[1], r_Q + 1, rows, rstd_ptr, mean_ptr, weight_2W, bias_2W, NORM, HAS_BIAS, RAGGED),
        _normal_words(x_4QW[2], r_Q + 2, rows, rstd_ptr, mean_ptr, weight_2W, bias_2W, NORM, HAS_BIAS, RAGGED),
        _normal_words(x_4QW[3], r_Q + 3, rows, rstd_ptr, mean_ptr, weight_2W, bias_2W, NORM, HAS_BIAS, RAGGED),
    )
