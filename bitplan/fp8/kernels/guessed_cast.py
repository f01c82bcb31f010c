"""Tensorwise FP8 casts that read a matrix once: cast by a guessed scale, then check the guess.

A scale of a whole tensor needs the largest number before the first code can be written, so a cast reads twice: 6 bytes
a number of bfloat16 in all, where 4 would do. But such a scale is a power of two (`bitplan.fp8.casts`), and the last
scale of the same weight, or of the same layer's activations, is nearly always still right:

    cast     codes by the guess, in every layout asked for; the largest magnitude on the side, by an atomic maximum
    check    compares the guess with the scale of the largest magnitude. If it will do, nothing is left to do: a few
             microseconds. If not, the same launch casts again by a scale that will

A state has room: how many octaves a scale may be larger than the definition's. Without room the result never depends on
the guess: codes and scale equal the definition bit for bit. With room a guess in [definition, 2^room x definition] is
kept, and a wrong one is replaced by the middle of that, so that the next may be larger or smaller:

    scale = guess, or 2^(room // 2) * definition where the guess is not in the room

so a matrix whose largest number jumps about, such as a gradient, is seldom cast again. Nothing saturates; codes lose
`room` of the octaves that they reach down to, and nothing above those. Either way the scale returned is the one that
the codes were written by, and nothing waits for the host. A wrong guess, too small or too large, costs 4 bytes a number
more. The state counts casts and both kinds (`counts_of`).

Gradients of a model jump together, and those of the upper layers are cast first. So a cast that follows others leaves
behind how far its definition moved since its last cast, and the next such cast moves its guess as far. Only if that is
the cast before it in the same backward, which shows in the counts: the other state has been used once more than its
own. There is one such record on each device (`_drifts`).

The state lives on the device and is used by one cast at a time: casts that share one must be ordered by a stream.
Casts with room on two streams at once may read the drift of each other's layers, which makes their guesses worse.

Legend: R rows, C columns of the matrix cast, T rows of a tile; "cols" is the layout of the transpose, [C, R].
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from bitplan.base.loops.launch import (
    PreparedLaunch,
    can_overlap,
    dependent_options,
    empty_on_gpu,
    index_of,
    launch_in_turn,
)
from bitplan.formats.triton_numbers import float_name, magnitude_bits
from bitplan.fp8.casts import FP8_DTYPES, CastPair, ScaledFp8
from bitplan.fp8.kernels.fast_tile import amax_of_tile, fits_pairs, load_tile, place_of, store_by_one_scale
from bitplan.fp8.kernels.triton_cast import TILE_LAUNCH, CastLaunch, read_numbers, write_codes
from bitplan.fp8.kernels.triton_fp8_rounding import (
    INFINITY_BITS,
    fp8_code,
    inverse_of,
    power_of_two_of_bits,
    quick_inverse,
)

# Positions in a state of int32: the bits of the guessed scale and of the scale of the running cast, the largest
# magnitude so far, programs that have read it, the room in steps of a scale's exponent (odd if the state follows
# others), bits of the last definition, guesses that were too small, casts, wrong guesses.
GUESS, USED, LARGEST, SEEN, ROOM, LAST, SMALL, CASTS, WRONG = (tl.constexpr(index) for index in range(9))
STATE_SIZE = 9
DRIFT, DRIFT_CASTS = (tl.constexpr(index) for index in range(2))  # of the last cast with room, and its state's casts
EXPONENT_STEP = 1 << 23  # between the bits of a power of two and the next
SMALLEST_GUESS = tl.constexpr(EXPONENT_STEP)  # 2^-126, the smallest scale
LARGEST_GUESS = tl.constexpr(252 << 23)  # 2^125: it and its inverse are normal numbers
CHECKING_PROGRAMS = 264  # of the check: enough to cast at nearly full speed, few enough to end at once


# H200, us with the check: 16384x4096 75.5, 16384x6144 109.6, 28672x4096 127.4; tiles of 256x64 in 8 warps 78.2, 113.4,
# 132.3; of 128x64 in 8 warps 76.1, 110.3, 127.6; of 64x64 80.1, 118.7, 138.0.
GUESS_LAUNCH = CastLaunch(128, 64, 4, vector=4)

# The stream and the addresses of the state and of what is read -> codes, those of the transpose, their scale.
BoundCast = Callable[..., tuple[Tensor | None, Tensor | None, Tensor]]
_drifts: dict[torch.device, Tensor] = {}


class GuessCounts(NamedTuple):
    """`wrong` guesses were too small or too large for the room; either is cast again."""

    casts: int
    wrong: int
    too_small: int


def new_state(device: torch.device, experts: int = 1, room: int = 0, *, follows: bool = True) -> Tensor:
    state = empty_state(device, experts)
    clear_state(state, room, follows=follows)
    return state


def empty_state(device: torch.device, experts: int) -> Tensor:
    """Memory for a state of guesses, [places, experts], still to be filled (`clear_state`)."""
    drift_on(device)  # here, so that no CUDA graph allocates it
    return torch.empty((STATE_SIZE, experts), dtype=torch.int32, device=device)


def clear_state(state: Tensor, room: int, *, follows: bool) -> None:
    """Reset to the smallest scale, which is wrong for all but zeros. `follows`: with room, move as others moved."""
    state.zero_()
    state[GUESS.value].fill_(EXPONENT_STEP)
    state[ROOM.value].fill_(room * EXPONENT_STEP + (room > 0 and follows))


def counts_of(state: Tensor) -> GuessCounts:
    """Counts so far; waits for the device."""
    counts = state.sum(1).tolist()
    return GuessCounts(counts[CASTS.value], counts[WRONG.value], counts[SMALL.value])


def drift_on(device: torch.device) -> Tensor:
    drift = _drifts.get(device)
    if drift is None:
        drift = _drifts.setdefault(device, torch.zeros(2, dtype=torch.int32, device=device))
    return drift


class CheckedCast:
    """A cast by a guess and its check: two launches, and the shapes of the layouts, None for one that is not wanted."""

    launches: tuple[PreparedLaunch, PreparedLaunch]
    rows: tuple[int, int] | None
    cols: tuple[int, int] | None
    dtype: torch.dtype

    def cast(self, sources: tuple[Tensor | None, ...], state: Tensor) -> CastPair:
        """The cast of what these hold, contiguous, into new memory."""
        device = state.device
        # Sizes are passed as numbers: torch takes longer for a tuple.
        codes = torch.empty(*self.rows, dtype=self.dtype, device=device) if self.rows is not None else None
        codes_t = torch.empty(*self.cols, dtype=self.dtype, device=device) if self.cols is not None else None
        scale = torch.empty_strided((), (), dtype=torch.float32, device=device)
        launch_in_turn(self.launches, (*sources, codes, codes_t, state, drift_on(device), scale))
        return CastPair(
            None if codes is None else ScaledFp8(codes, scale, "tensor"),
            None if codes_t is None else ScaledFp8(codes_t, scale, "tensor"),
        )

    def bind(self, device: torch.device) -> BoundCast | None:
        """The cast with little work for the host, on the current device; None before the first launch.

        The caller ensures that addresses are multiples of 16; a source that is not there has the address 0.
        """
        cast, check = (launch.bind(index_of(device)) for launch in self.launches)
        if cast is None or check is None:
            return None
        drift, rows, cols, dtype = drift_on(device).data_ptr(), self.rows, self.cols, self.dtype

        def run(stream: int, state: int, *sources: int) -> tuple[Tensor | None, Tensor | None, Tensor]:
            codes = None if rows is None else empty_on_gpu(rows, (rows[1], 1), dtype)
            codes_t = None if cols is None else empty_on_gpu(cols, (cols[1], 1), dtype)
            scale = empty_on_gpu((), (), torch.float32)
            first = 0 if codes is None else codes.data_ptr()
            second = 0 if codes_t is None else codes_t.data_ptr()
            cast(stream, *sources, first, second, state, drift)
            check(stream, *sources, first, second, state, drift, scale.data_ptr())
            return codes, codes_t, scale

        return run


class GuessPlan(CheckedCast):
    """The casts of one shape: x and its transpose, each if asked for, by one scale.

    The result has `padded` rows; those beyond x's are zeros. `aligned`: x begins at a multiple of 16 bytes.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        aligned: bool,
        fp8: str,
        eps: float,
        padded: int,
        rows: bool,
        cols: bool,
        launch: CastLaunch | None = None,
    ) -> None:
        self.rows = (padded, shape[1]) if rows else None
        self.cols = (shape[1], padded) if cols else None
        self.dtype = FP8_DTYPES[fp8]
        paired = fits_pairs(shape, dtype, padded, aligned=aligned)
        launch = launch or (GUESS_LAUNCH if paired else TILE_LAUNCH)
        tiles = triton.cdiv(padded, launch.rows) * triton.cdiv(shape[1], launch.cols)
        constants = {"FP8": fp8, "TO_ROWS": rows, "TO_COLS": cols, "BR": launch.rows, "BC": launch.cols}
        constants |= {"SOURCE": float_name(dtype), "V": launch.vector if paired else 0, "OVERLAP": can_overlap()}
        numbers = (*shape, padded)
        options: dict[str, Any] = {"num_warps": launch.warps, "enable_fp_fusion": False}
        checkers = min(tiles, CHECKING_PROGRAMS)
        self.launches = (
            PreparedLaunch(_cast, (tiles,), numbers, constants, **options),
            PreparedLaunch(_check, (checkers,), (*numbers, float(eps)), constants, **options, **dependent_options()),
        )

    def run(self, x: Tensor, state: Tensor, into: CastPair | None = None) -> CastPair:
        """The cast of a contiguous x; `into`: memory to write it to, of both layouts."""
        if into is not None and into.rows is not None and into.cols is not None:
            pointers = (x, into.rows.codes, into.cols.codes, state, drift_on(x.device), into.rows.scale)
            launch_in_turn(self.launches, pointers)
            return into
        return self.cast((x,), state)


plan_guess = functools.lru_cache(maxsize=4096)(GuessPlan)


# ---- the state -------------------------------------------------------------------------------------------------------


@triton.jit
def scale_near(guess, right, room):
    """Bits of the scale to cast by: the guess, or the middle of the room above the right one."""
    room = tl.where(right < INFINITY_BITS, room, 0)  # a scale that is NaN has no room
    middle = right + ((room >> 24) << 23)  # whole octaves
    return tl.where((guess >= right) & (guess <= right + room), guess, middle)


@triton.jit
def guess_of(state_ptr, drift_ptr):
    """Bits of the guessed scale: the last one, moved as the layer above has just moved."""
    guess = tl.load(state_ptr + GUESS)
    is_next = tl.load(drift_ptr + DRIFT_CASTS) == tl.load(state_ptr + CASTS) + 1
    follows = (tl.load(state_ptr + ROOM) & 1) == 1
    moved = tl.maximum(guess + tl.load(drift_ptr + DRIFT), SMALLEST_GUESS)
    return tl.where(is_next & follows & (guess < INFINITY_BITS), tl.minimum(moved, LARGEST_GUESS), guess)


@triton.jit
def settle(state_ptr, drift_ptr, scale_ptr, eps, FP8: tl.constexpr):
    """Return (scale, whether the guess was wrong); write the scale, and prepare the state for the next cast."""
    used = tl.load(state_ptr + USED)
    right = power_of_two_of_bits(tl.load(state_ptr + LARGEST), eps, FP8).to(tl.int32, bitcast=True)
    room = tl.load(state_ptr + ROOM)
    bits = scale_near(used, right, room)
    scale = bits.to(tl.float32, bitcast=True)
    # A program counts itself after all its threads have read; the last one clears the state for the next cast.
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + SEEN, 1) == tl.num_programs(0) - 1:
        tl.store(scale_ptr, scale)
        tl.store(state_ptr + GUESS, bits)
        tl.store(state_ptr + LARGEST, 0)
        tl.store(state_ptr + SEEN, 0)
        last = tl.load(state_ptr + LAST)
        casts = tl.load(state_ptr + CASTS) + 1
        tl.store(state_ptr + LAST, right)
        tl.store(state_ptr + CASTS, casts)
        tl.store(state_ptr + WRONG, tl.load(state_ptr + WRONG) + (bits != used).to(tl.int32))
        tl.store(state_ptr + SMALL, tl.load(state_ptr + SMALL) + (used < right).to(tl.int32))
        if (room & 1) == 1:
            is_known = (last > 0) & (last < INFINITY_BITS) & (right < INFINITY_BITS)
            tl.store(drift_ptr + DRIFT, right - last)
            tl.store(drift_ptr + DRIFT_CASTS, tl.where(is_known, casts, 0))
    return scale, bits != used


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _cast_tile(
    x_ptr,
    out_ptr,
    out_t_ptr,
    tile,
    rows,
    cols,
    padded,
    scale,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    SOURCE: tl.constexpr,
    V: tl.constexpr,
):
    """Write a tile by this scale -> bits of its largest magnitude. V of 0: one number at a time."""
    if V > 0:
        cols16, rows16 = cols // 16, padded // 16
        down, across = place_of(tile, cols16, BC)
        x_4QW = load_tile(x_ptr, down, across, rows, cols16, BR, BC)
        store_by_one_scale(
            out_ptr, out_t_ptr, down, across, rows16 * 16, rows16, rows16, cols16, x_4QW, quick_inverse(scale),
            FP8, TO_ROWS, TO_COLS, BR, BC, V, POWER=True,
        )  # fmt: skip
        amax = amax_of_tile(x_4QW)
    else:
        across = (cols + BC - 1) // BC
        r_T = tile // across * BR + tl.arange(0, BR)
        c_C = tile % across * BC + tl.arange(0, BC)
        x_TC = read_numbers(x_ptr, r_T, c_C, rows, cols, SOURCE)
        amax = tl.max(tl.max(magnitude_bits(x_TC), axis=1), axis=0)
        byte_TC = fp8_code(x_TC * inverse_of(scale), FP8)
        write_codes(out_ptr, out_t_ptr, r_T, c_C, byte_TC, cols, padded, TO_ROWS, TO_COLS)
    return amax


@triton.jit(do_not_specialize=["rows"])
def _cast(
    x_ptr,
    out_ptr,
    out_t_ptr,
    state_ptr,
    drift_ptr,
    rows,
    cols,
    padded,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    SOURCE: tl.constexpr,
    V: tl.constexpr,
    OVERLAP: tl.constexpr,  # whether the check is launched before this has ended
):
    if OVERLAP:
        cuda.gdc_launch_dependents()
    guess = guess_of(state_ptr, drift_ptr)
    scale = guess.to(tl.float32, bitcast=True)
    amax = _cast_tile(
        x_ptr, out_ptr, out_t_ptr, tl.program_id(0), rows, cols, padded, scale, FP8, TO_ROWS, TO_COLS, BR, BC, SOURCE, V
    )
    tl.atomic_max(state_ptr + LARGEST, amax)
    if tl.program_id(0) == 0:
        tl.store(state_ptr + USED, guess)


@triton.jit(do_not_specialize=["rows"])
def _check(
    x_ptr,
    out_ptr,
    out_t_ptr,
    state_ptr,
    drift_ptr,
    scale_ptr,
    rows,
    cols,
    padded,
    eps,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    SOURCE: tl.constexpr,
    V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        cuda.gdc_wait()
    scale, is_wrong = settle(state_ptr, drift_ptr, scale_ptr, eps, FP8)
    if is_wrong:
        tiles = ((padded + BR - 1) // BR) * ((cols + BC - 1) // BC)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _cast_tile(
                x_ptr, out_ptr, out_t_ptr, tile, rows, cols, padded, scale, FP8, TO_ROWS, TO_COLS, BR, BC, SOURCE, V
            )
