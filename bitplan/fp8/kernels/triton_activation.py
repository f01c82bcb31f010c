"""Activations and their gradients, cast to FP8 as they are computed: neither matrix is written in bfloat16.

    forward    y [R, F], or gate and up side by side [R, 2 F]   ->  h = act(y), or act(gate) * up, [R, F], as asked for
    gradient   y and dh [R, F]                                  ->  the gradient of y, and of a bias, its sum over rows

A cast by a guessed scale (`guessed_cast`) needs no maximum beforehand, so the numbers can come from other numbers
instead of memory. A number of a gated h costs 6 bytes instead of 10, one of its gradient 10 instead of 18; one of gelu
and its gradient 4 instead of 8, and 6 instead of 12. Numbers are computed in float32 and rounded once to bfloat16, then
cast: codes are those of that matrix by the scale that is returned.

Only bfloat16 and F a multiple of a tile's width (`fits_activated`); `activation` computes others first, and then casts.

Legend: R rows, F features of h; the rest is that of `fast_tile`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from bitplan.base.loops.launch import INTERPRETED, PreparedLaunch, can_overlap, dependent_options
from bitplan.fp8.casts import FP8_DTYPES, CastPair, padded_tokens
from bitplan.fp8.kernels.fast_tile import amax_of_tile, load_tile, place_of, store_by_one_scale
from bitplan.fp8.kernels.guessed_cast import (
    CHECKING_PROGRAMS,
    LARGEST,
    USED,
    CheckedCast,
    guess_of,
    settle,
)
from bitplan.fp8.kernels.triton_cast import CastLaunch
from bitplan.fp8.kernels.triton_fp8_rounding import high_float, low_float, pair_of_floats, quick_inverse
from bitplan.fp8.kernels.triton_norm import sum_of_parts

# H200, 16384 x 14336, us: forward 347 (4 warps 355, tiles of 64x64 357, of 128x128 370 to 424, of 256x64 425); gradient
# 622 (2 warps 632, 8 warps 676; tiles of 128x64 679 in 4 warps, of 128x128 768). A copy of as many bytes: 332 and 554.
FORWARD_LAUNCH = CastLaunch(128, 64, 8, vector=4)
GRADIENT_LAUNCH = CastLaunch(64, 64, 4, vector=4)


# Triton's own division and exponential test for subnormal numbers: 13 of 49 instructions a number of the gradient.
_SIGMOID = tl.constexpr("""{
    .reg .f32 t;
    mul.rn.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.rn.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}""")

_POWER = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
_INVERSE = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")


def fits_activated(y: Tensor, dh_RF: Tensor | None, gated: bool) -> bool:
    """Whether `cast_by_guess` takes these tensors."""
    tensors = (y,) if dh_RF is None else (y, dh_RF)
    fits = all(
        tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and not tensor.data_ptr() & 15 for tensor in tensors
    )
    return fits and 0 not in y.shape and fits_width(y.shape[1], gated)


def fits_width(width: int, gated: bool) -> bool:
    """Whether a y of so many columns is made of whole tiles."""
    return not width % (FORWARD_LAUNCH.cols * (2 if gated else 1))


def cast_by_guess(
    y: Tensor,
    dh_RF: Tensor | None,
    act: str,
    gated: bool,
    fp8: str,
    eps: float,
    state: Tensor,
    *,
    rows: bool,
    cols: bool,
    sums: torch.dtype | None = None,
    launch: CastLaunch | None = None,
) -> tuple[CastPair, Tensor | None]:
    """The activated numbers, or with `dh_RF` the gradient of y, cast by the guess of this state (`guessed_cast`)."""
    gradient = dh_RF is not None
    plan = plan_activated(y.shape, act, gated, gradient, fp8, eps, rows, cols, gradient and sums is not None, launch)
    return plan.run(y, dh_RF, state, sums)


class _ActivatedPlan(CheckedCast):
    """The casts of one shape; sources are y, dh and the sums of tiles."""

    def __init__(
        self,
        shape: tuple[int, int],
        act: str,
        gated: bool,
        gradient: bool,
        fp8: str,
        eps: float,
        rows: bool,
        cols: bool,
        sums: bool,
        launch: CastLaunch | None,
    ) -> None:
        features, padded = shape[1] // (2 if gated else 1), padded_tokens("tensorwise", shape[0])
        width = shape[1] if gradient else features
        self.rows = (padded, width) if rows else None
        self.cols = (width, padded) if cols else None
        self.dtype = FP8_DTYPES[fp8]
        launch = launch or (GRADIENT_LAUNCH if gradient else FORWARD_LAUNCH)
        tiles = triton.cdiv(padded, launch.rows) * (features // launch.cols)
        self.sums = (triton.cdiv(padded, launch.rows), width) if sums else None
        constants = {"ACT": act, "GATED": gated, "GRADIENT": gradient, "SUMS": sums}
        constants |= {"FP8": fp8, "TO_ROWS": rows, "TO_COLS": cols}
        constants |= {"BR": launch.rows, "BC": launch.cols, "V": launch.vector, "OVERLAP": can_overlap()}
        numbers = (shape[0], features // 16, padded // 16)
        options: dict[str, Any] = {"num_warps": launch.warps, "enable_fp_fusion": False}
        checkers = min(tiles, CHECKING_PROGRAMS)
        self.launches = (
            PreparedLaunch(_cast, (tiles,), numbers, constants, **options),
            PreparedLaunch(_check, (checkers,), (*numbers, float(eps)), constants, **options, **dependent_options()),
        )

    def run(
        self, y: Tensor, dh: Tensor | None, state: Tensor, sums: torch.dtype | None
    ) -> tuple[CastPair, Tensor | None]:
        parts = torch.empty(*self.sums, dtype=torch.float32, device=y.device) if self.sums is not None else None
        pair = self.cast((y, dh, parts), state)
        return pair, None if parts is None or sums is None else sum_of_parts(parts, sums)


plan_activated = functools.lru_cache(maxsize=1024)(_ActivatedPlan)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) to a few units in the last place, and 0 where it is below the smallest normal float32."""
    if INTERPRETED:
        y = 1.0 / (1.0 + tl.exp(-x))
    else:
        y = tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _normal_shares(x):
    """(the normal distribution up to x, its density at x): Abramowitz and Stegun 7.1.26, wrong by 1e-7 at most."""
    if INTERPRETED:
        bell = tl.exp(-0.5 * x * x)
        t = 1.0 / (1.0 + 0.23164190 * tl.abs(x))
    else:
        bell = tl.inline_asm_elementwise(_POWER, "=f,f", [-0.72134752 * x * x], dtype=tl.float32, is_pure=True, pack=1)
        under = 1.0 + 0.23164190 * tl.abs(x)
        t = tl.inline_asm_elementwise(_INVERSE, "=f,f", [under], dtype=tl.float32, is_pure=True, pack=1)
    sum = t * (0.127414796 + t * (-0.142248368 + t * (0.710706871 + t * (-0.726576014 + t * 0.530702715))))
    tail = sum * bell
    return tl.where(x < 0.0, tail, 1.0 - tail), 0.39894228 * bell


@triton.jit
def _act(x, ACT: tl.constexpr):
    if ACT == "silu":
        y = x * _sigmoid(x)
    elif ACT == "gelu":
        y = x * _normal_shares(x)[0]
    elif ACT == "gelu_tanh":
        y = x * _sigmoid(x * (1.59576912 + 0.0713548128 * x * x))
    else:
        y = tl.where(x < 0.0, 0.0, x)
    return y


@triton.jit
def _slope(x, ACT: tl.constexpr):
    """The derivative of the activation at x."""
    if ACT == "silu":
        part = _sigmoid(x)
        y = part * (1.0 + x * (1.0 - part))
    elif ACT == "gelu":
        part, density = _normal_shares(x)
        y = part + x * density
    elif ACT == "gelu_tanh":
        part = _sigmoid(x * (1.59576912 + 0.0713548128 * x * x))
        y = part + x * part * (1.0 - part) * (1.59576912 + 0.214064438 * x * x)
    else:
        y = tl.where(x > 0.0, 1.0, 0.0)
    return y


@triton.jit
def _activated(y, ACT: tl.constexpr):
    return pair_of_floats(_act(low_float(y), ACT), _act(high_float(y), ACT))


@triton.jit
def _gated(gate, up, ACT: tl.constexpr):
    return pair_of_floats(_act(low_float(gate), ACT) * low_float(up), _act(high_float(gate), ACT) * high_float(up))


@triton.jit
def _gradient(y, dh, ACT: tl.constexpr):
    return pair_of_floats(low_float(dh) * _slope(low_float(y), ACT), high_float(dh) * _slope(high_float(y), ACT))


@triton.jit
def _gate_gradient(gate, up, dh, ACT: tl.constexpr):
    low = low_float(dh) * low_float(up) * _slope(low_float(gate), ACT)
    return pair_of_floats(low, high_float(dh) * high_float(up) * _slope(high_float(gate), ACT))


@triton.jit
def _store_sums(sums_ptr, down, across, width, x_4QW, BC: tl.constexpr):
    """Store the sums over a tile's rows."""
    w_W = tl.arange(0, BC // 2) * 2
    low_QW = low_float(x_4QW[0]) + low_float(x_4QW[1]) + low_float(x_4QW[2]) + low_float(x_4QW[3])
    high_QW = high_float(x_4QW[0]) + high_float(x_4QW[1]) + high_float(x_4QW[2]) + high_float(x_4QW[3])
    at_ptr = sums_ptr + (down.to(tl.int64) * width + across * BC)
    tl.store(at_ptr + w_W, tl.sum(low_QW, axis=0))
    tl.store(at_ptr + w_W + 1, tl.sum(high_QW, axis=0))


@triton.jit
def _cast_tile(
    y_ptr,
    dh_ptr,
    sums_ptr,
    out_ptr,
    out_t_ptr,
    tile,
    rows,
    features16,
    rows16,
    scale,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    GRADIENT: tl.constexpr,
    SUMS: tl.constexpr,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    V: tl.constexpr,
):
    """Write a tile, or gate's and up's, by this scale -> bits of the largest magnitude."""
    down, across = place_of(tile, features16, BC)
    WIDER: tl.constexpr = 2 if GATED else 1
    further = across + features16 * 16 // BC  # the same features of up
    padded, inverse, width16 = rows16 * 16, quick_inverse(scale), features16 * WIDER
    g_4QW = load_tile(y_ptr, down, across, rows, width16, BR, BC)
    if GATED:
        u_4QW = load_tile(y_ptr, down, further, rows, width16, BR, BC)
    if GRADIENT:
        d_4QW = load_tile(dh_ptr, down, across, rows, features16, BR, BC)
        if GATED:
            of_up_4QW = (
                _gated(g_4QW[0], d_4QW[0], ACT),
                _gated(g_4QW[1], d_4QW[1], ACT),
                _gated(g_4QW[2], d_4QW[2], ACT),
                _gated(g_4QW[3], d_4QW[3], ACT),
            )
            x_4QW = (
                _gate_gradient(g_4QW[0], u_4QW[0], d_4QW[0], ACT),
                _gate_gradient(g_4QW[1], u_4QW[1], d_4QW[1], ACT),
                _gate_gradient(g_4QW[2], u_4QW[2], d_4QW[2], ACT),
                _gate_gradient(g_4QW[3], u_4QW[3], d_4QW[3], ACT),
            )
            store_by_one_scale(
                out_ptr, out_t_ptr, down, further, padded, rows16, rows16, width16, of_up_4QW, inverse,
                FP8, TO_ROWS, TO_COLS, BR, BC, V, POWER=True,
            )  # fmt: skip
            if SUMS:
                _store_sums(sums_ptr, down, further, width16 * 16, of_up_4QW, BC)
        else:
            x_4QW = (
                _gradient(g_4QW[0], d_4QW[0], ACT),
                _gradient(g_4QW[1], d_4QW[1], ACT),
                _gradient(g_4QW[2], d_4QW[2], ACT),
                _gradient(g_4QW[3], d_4QW[3], ACT),
            )
        store_by_one_scale(
            out_ptr, out_t_ptr, down, across, padded, rows16, rows16, width16, x_4QW, inverse,
            FP8, TO_ROWS, TO_COLS, BR, BC, V, POWER=True,
        )  # fmt: skip
        amax = amax_of_tile(x_4QW)
        if GATED:
            amax = tl.maximum(amax, amax_of_tile(of_up_4QW))
        if SUMS:
            _store_sums(sums_ptr, down, across, width16 * 16, x_4QW, BC)
    else:
        if GATED:
            h_4QW = (
                _gated(g_4QW[0], u_4QW[0], ACT),
                _gated(g_4QW[1], u_4QW[1], ACT),
                _gated(g_4QW[2], u_4QW[2], ACT),
                _gated(g_4QW[3], u_4QW[3], ACT),
            )
        else:
            h_4QW = (
                _activated(g_4QW[0], ACT),
                _activated(g_4QW[1], ACT),
                _activated(g_4QW[2], ACT),
                _activated(g_4QW[3], ACT),
            )
        store_by_one_scale(
            out_ptr, out_t_ptr, down, across, padded, rows16, rows16, features16, h_4QW, inverse,
            FP8, TO_ROWS, TO_COLS, BR, BC, V, POWER=True,
        )  # fmt: skip
        amax = amax_of_tile(h_4QW)
    return amax


@triton.jit(do_not_specialize=["rows", "features16", "rows16"])
def _cast(
    y_ptr,
    dh_ptr,
    sums_ptr,
    out_ptr,
    out_t_ptr,
    state_ptr,
    drift_ptr,
    rows,
    features16,  # features / 16
    rows16,  # padded rows / 16
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    GRADIENT: tl.constexpr,
    SUMS: tl.constexpr,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        cuda.gdc_launch_dependents()
    guess = guess_of(state_ptr, drift_ptr)
    scale = guess.to(tl.float32, bitcast=True)
    amax = _cast_tile(
        y_ptr, dh_ptr, sums_ptr, out_ptr, out_t_ptr, tl.program_id(0), rows, features16, rows16, scale,
        ACT, GATED, GRADIENT, SUMS, FP8, TO_ROWS, TO_COLS, BR, BC, V,
    )  # fmt: skip
    tl.atomic_max(state_ptr + LARGEST, amax)
    if tl.program_id(0) == 0:
        tl.store(state_ptr + USED, guess)


@triton.jit(do_not_specialize=["rows", "features16", "rows16"])
def _check(
    y_ptr,
    dh_ptr,
    sums_ptr,
    out_ptr,
    out_t_ptr,
    state_ptr,
    drift_ptr,
    scale_ptr,
    rows,
    features16,
    rows16,
    eps,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    GRADIENT: tl.constexpr,
    SUMS: tl.constexpr,  # noqa: ARG001  the sums are there already
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        cuda.gdc_wait()
    scale, is_wrong = settle(state_ptr, drift_ptr, scale_ptr, eps, FP8)
    if is_wrong:
        tiles = ((rows16 * 16 + BR - 1) // BR) * (features16 * 16 // BC)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _cast_tile(
                y_ptr, dh_ptr, sums_ptr, out_ptr, out_t_ptr, tile, rows, features16, rows16, scale,
                ACT, GATED, GRADIENT, False, FP8, TO_ROWS, TO_COLS, BR, BC, V,
            )  # fmt: skip
