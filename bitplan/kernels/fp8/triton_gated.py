"""silu(gate) * up and its gradient, cast to FP8 as they are computed: neither matrix is written in bfloat16.

    forward    y [R, 2 F], gate and up side by side        ->  h = silu(gate) * up, [R, F], in the layouts asked for
    gradient   y and dh [R, F]                             ->  the gradient of y, [R, 2 F], gate's and up's

A cast by a guessed scale (`guessed_cast`) needs no maximum beforehand, so the numbers can come from other numbers
instead of memory. A number of h costs 6 bytes instead of 10, one of its gradient 10 instead of 18. Numbers are computed
in float32 and rounded once to bfloat16, then cast: codes are those of that matrix by the scale that is returned.

Only bfloat16 and F a multiple of a tile's width (`fits_gated`); `gated` computes others first, and then casts.

Legend: R rows, F features of gate and of up; the rest is that of `fast_tile`.
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

from bitplan.formats.fp8 import FP8_DTYPES, CastPair, ScaledFp8, padded_tokens
from bitplan.kernels.base.launch import PreparedLaunch, can_overlap, dependent_options, launch_in_turn
from bitplan.kernels.base.numbers import INTERPRETED
from bitplan.kernels.fp8.fast_tile import amax_of_tile, load_tile, place_of, store_by_one_scale
from bitplan.kernels.fp8.guessed_cast import (
    CHECKING_PROGRAMS,
    LARGEST,
    USED,
    BoundCast,
    bind_cast,
    drift_on,
    guess_of,
    settle,
)
from bitplan.kernels.fp8.triton_cast import CastLaunch
from bitplan.kernels.fp8.triton_fp8_rounding import high_float, low_float, pair_of_floats, quick_inverse

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


def fits_gated(y_R2F: Tensor, dh_RF: Tensor | None = None) -> bool:
    """Whether `cast_by_guess` takes these tensors."""
    tensors = (y_R2F,) if dh_RF is None else (y_R2F, dh_RF)
    fits = all(each.dtype == torch.bfloat16 and each.is_contiguous() and not each.data_ptr() & 15 for each in tensors)
    return fits and 0 not in y_R2F.shape and not y_R2F.shape[1] % (2 * FORWARD_LAUNCH.cols)


def cast_by_guess(
    y_R2F: Tensor,
    dh_RF: Tensor | None,
    fp8: str,
    eps: float,
    state: Tensor,
    *,
    rows: bool,
    cols: bool,
    launch: CastLaunch | None = None,
) -> CastPair:
    """silu(gate) * up, or with `dh_RF` the gradient of y, cast by the guess of this state (`guessed_cast`)."""
    return plan_gated(y_R2F.shape, dh_RF is not None, fp8, eps, rows, cols, launch).run(y_R2F, dh_RF, state)


class _GatedPlan:
    """The two launches and the memory of casts of one shape."""

    def __init__(
        self,
        shape: tuple[int, int],
        gradient: bool,
        fp8: str,
        eps: float,
        rows: bool,
        cols: bool,
        launch: CastLaunch | None,
    ) -> None:
        features, padded = shape[1] // 2, padded_tokens("tensorwise", shape[0])
        width = shape[1] if gradient else features
        self.rows = (padded, width) if rows else None
        self.cols = (width, padded) if cols else None
        self.dtype = FP8_DTYPES[fp8]
        launch = launch or (GRADIENT_LAUNCH if gradient else FORWARD_LAUNCH)
        tiles = triton.cdiv(padded, launch.rows) * (features // launch.cols)
        constants = {"GRADIENT": gradient, "FP8": fp8, "TO_ROWS": rows, "TO_COLS": cols}
        constants |= {"BR": launch.rows, "BC": launch.cols, "V": launch.vector, "OVERLAP": can_overlap()}
        numbers = (shape[0], features // 16, padded // 16)
        options: dict[str, Any] = {"num_warps": launch.warps, "enable_fp_fusion": False}
        checkers = min(tiles, CHECKING_PROGRAMS)
        self.launches = (
            PreparedLaunch(_cast, (tiles,), numbers, constants, **options),
            PreparedLaunch(_check, (checkers,), (*numbers, float(eps)), constants, **options, **dependent_options()),
        )

    def run(self, y: Tensor, dh: Tensor | None, state: Tensor) -> CastPair:
        device = y.device
        codes = torch.empty(*self.rows, dtype=self.dtype, device=device) if self.rows is not None else None
        codes_t = torch.empty(*self.cols, dtype=self.dtype, device=device) if self.cols is not None else None
        scale = torch.empty_strided((), (), dtype=torch.float32, device=device)
        launch_in_turn(self.launches, (y, dh, codes, codes_t, state, drift_on(device), scale))
        return CastPair(
            None if codes is None else ScaledFp8(codes, scale, "tensor"),
            None if codes_t is None else ScaledFp8(codes_t, scale, "tensor"),
        )

    def bind(self, device: torch.device) -> BoundCast | None:
        """The cast of the address of y and of dh, 0 without one."""
        return bind_cast(self.launches, device, self.rows, self.cols, self.dtype)


plan_gated = functools.lru_cache(maxsize=1024)(_GatedPlan)


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
def _silu(x):
    return x * _sigmoid(x)


@triton.jit
def _gated(gate, up):
    return pair_of_floats(_silu(low_float(gate)) * low_float(up), _silu(high_float(gate)) * high_float(up))


@triton.jit
def _slope(gate, up, dh):
    """The gate's gradient."""
    part = _sigmoid(gate)
    return dh * up * (part * (1.0 + gate * (1.0 - part)))


@triton.jit
def _gate_gradient(gate, up, dh):
    low = _slope(low_float(gate), low_float(up), low_float(dh))
    return pair_of_floats(low, _slope(high_float(gate), high_float(up), high_float(dh)))


@triton.jit
def _cast_tile(
    y_ptr,
    dh_ptr,
    out_ptr,
    out_t_ptr,
    tile,
    rows,
    features16,
    rows16,
    scale,
    GRADIENT: tl.constexpr,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    V: tl.constexpr,
):
    """Write a tile, or gate's and up's, by this scale -> bits of the largest magnitude."""
    down, across = place_of(tile, features16, BC)
    further = across + features16 * 16 // BC  # the same features of up
    padded, inverse = rows16 * 16, quick_inverse(scale)
    g_4QW = load_tile(y_ptr, down, across, rows, features16 * 2, BR, BC)
    u_4QW = load_tile(y_ptr, down, further, rows, features16 * 2, BR, BC)
    if GRADIENT:
        d_4QW = load_tile(dh_ptr, down, across, rows, features16, BR, BC)
        of_up_4QW = (
            _gated(g_4QW[0], d_4QW[0]),
            _gated(g_4QW[1], d_4QW[1]),
            _gated(g_4QW[2], d_4QW[2]),
            _gated(g_4QW[3], d_4QW[3]),
        )
        of_gate_4QW = (
            _gate_gradient(g_4QW[0], u_4QW[0], d_4QW[0]),
            _gate_gradient(g_4QW[1], u_4QW[1], d_4QW[1]),
            _gate_gradient(g_4QW[2], u_4QW[2], d_4QW[2]),
            _gate_gradient(g_4QW[3], u_4QW[3], d_4QW[3]),
        )
        store_by_one_scale(
            out_ptr, out_t_ptr, down, further, padded, rows16, rows16, features16 * 2, of_up_4QW, inverse,
            FP8, TO_ROWS, TO_COLS, BR, BC, V, POWER=True,
        )  # fmt: skip
        store_by_one_scale(
            out_ptr, out_t_ptr, down, across, padded, rows16, rows16, features16 * 2, of_gate_4QW, inverse,
            FP8, TO_ROWS, TO_COLS, BR, BC, V, POWER=True,
        )  # fmt: skip
        amax = tl.maximum(amax_of_tile(of_up_4QW), amax_of_tile(of_gate_4QW))
    else:
        h_4QW = (
            _gated(g_4QW[0], u_4QW[0]),
            _gated(g_4QW[1], u_4QW[1]),
            _gated(g_4QW[2], u_4QW[2]),
            _gated(g_4QW[3], u_4QW[3]),
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
    out_ptr,
    out_t_ptr,
    state_ptr,
    drift_ptr,
    rows,
    features16,  # features / 16
    rows16,  # padded rows / 16
    GRADIENT: tl.constexpr,
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
        y_ptr, dh_ptr, out_ptr, out_t_ptr, tl.program_id(0), rows, features16, rows16, scale,
        GRADIENT, FP8, TO_ROWS, TO_COLS, BR, BC, V,
    )  # fmt: skip
    tl.atomic_max(state_ptr + LARGEST, amax)
    if tl.program_id(0) == 0:
        tl.store(state_ptr + USED, guess)


@triton.jit(do_not_specialize=["rows", "features16", "rows16"])
def _check(
    y_ptr,
    dh_ptr,
    out_ptr,
    out_t_ptr,
    state_ptr,
    drift_ptr,
    scale_ptr,
    rows,
    features16,
    rows16,
    eps,
    GRADIENT: tl.constexpr,
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
                y_ptr, dh_ptr, out_ptr, out_t_ptr, tile, rows, features16, rows16, scale,
                GRADIENT, FP8, TO_ROWS, TO_COLS, BR, BC, V,
            )  # fmt: skip
