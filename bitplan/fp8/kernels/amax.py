"""The largest magnitudes from which FP8 scales are computed: of pieces of a matrix, of its rows and of its columns.

A cast whose scales cover more than a tile needs them before it writes its first code, so they are found in a separate
read, 2 bytes a number of bfloat16 with only a maximum to compute:

    of a tensor      of a few hundred pieces; the cast reduces those numbers itself. No memset, no atomics
    of rows, columns of strips: a strip's part of each row, and of each column over some rows. Words of two numbers: by
                     atomic maxima, of which the cast makes scales itself; others: a small launch makes scales of parts

Maxima are bits of float32: as integers they have the order of magnitudes, with NaN above infinity, so no NaN is lost.

bfloat16 without a norm is read as words of two numbers (`fast_tile` says where that fits), a maximum of both in
one instruction. On an H200, 16384x28672: pieces 210 us (8192 words at once; 215 with 4096), strips 232 us (strips of
1024 columns and 8 rows at once; 239 with 4 rows, 270 with 512 columns and 16 rows), the small launch 6 us. A copy of
the matrix by itself would read and write it in 440.
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

from bitplan.base.loops.launch import PreparedLaunch, can_overlap
from bitplan.formats.triton_numbers import float_name, float_of_bits, magnitude_bits
from bitplan.fp8.kernels.fast_tile import is_aligned, words_of
from bitplan.fp8.kernels.triton_fp8_rounding import largest_bits, pair_max, reduce_pairs, scale_of_bits
from bitplan.fp8.kernels.triton_norm import NormKey, norm_constants, normalise

PIECES = 512
PAIRED_NUMBERS, NUMBERS = 16384, 8192  # read at once: as words of two, one at a time
STRIP_COLS, STRIP_ROWS, STRIP_LENGTH = 1024, 8, 256  # of a program: columns, rows at once, rows in all
FULL_GRID = 512  # programs that keep a GPU busy; strips are shortened until there are as many
FINISH_WIDTH, FINISH_PARTS = 64, 32  # scales per program, parts read at once


def partial_amax(x_RC: Tensor, pieces: int = PIECES, numbers: int | None = None, warps: int = 8) -> Tensor:
    """Bits of the largest magnitude of each piece of a contiguous x, as float32; at most `pieces` of them."""
    count, find = plan_amax(x_RC.numel(), x_RC.dtype, is_aligned(x_RC), pieces, numbers, warps)
    partial = torch.empty(count, dtype=torch.int32, device=x_RC.device)
    if find is None:
        return partial.zero_()
    find(x_RC, partial)
    return partial


@functools.lru_cache(maxsize=4096)
def plan_amax(
    size: int, dtype: torch.dtype, aligned: bool, pieces: int, numbers: int | None, warps: int
) -> tuple[int, PreparedLaunch | None]:
    """Return the number of pieces, and the launch that finds their maxima."""
    paired = dtype == torch.bfloat16 and aligned and not size % 16
    numbers = min(numbers or (PAIRED_NUMBERS if paired else NUMBERS), triton.next_power_of_2(max(size, 16)))
    pieces = min(pieces, triton.cdiv(size, numbers))
    if not pieces:
        return 1, None
    if paired:
        return pieces, PreparedLaunch(
            _amax_of_pairs, (pieces,), (size // 16,), {"WORDS": numbers // 2}, num_warps=warps
        )
    constants = {"SOURCE": float_name(dtype), "NUMBERS": numbers}
    return pieces, PreparedLaunch(_amax_of_pieces, (pieces,), (size,), constants, num_warps=warps)


class PairMaxima:
    """Largest magnitudes of every row and of every column of a matrix that is read as words of two numbers."""

    def __init__(self, shape: tuple[int, int], padded: int) -> None:
        across, length = triton.cdiv(shape[1], STRIP_COLS), STRIP_LENGTH
        while length > STRIP_ROWS and across * triton.cdiv(shape[0], length) < FULL_GRID:
            length //= 2
        self.size = padded + shape[1]
        grid, numbers = (across, triton.cdiv(shape[0], length)), (shape[0], shape[1] // 16, padded, length)
        constants = {"BR": STRIP_ROWS, "OVERLAP": can_overlap()}
        self.launch = PreparedLaunch(_maxima_of_pairs, grid, numbers, constants, num_warps=4)

    def find(self, x: Tensor) -> Tensor:
        """Bits of the maxima of the padded rows, then of the columns."""
        bits = torch.zeros(self.size, dtype=torch.int32, device=x.device)
        self.launch(x, bits)
        return bits


class RowScales:
    """Scales of every row and of every column, as far as a layout asks for them."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        fp8: str,
        eps: float,
        padded: int,
        rows: bool,
        cols: bool,
        norm: NormKey | None,
    ) -> None:
        width, at_once, length = 128, 128, 1024
        across = triton.cdiv(shape[1], width)
        while length > at_once and across * triton.cdiv(shape[0], length) < FULL_GRID:
            length //= 2
        down = triton.cdiv(shape[0], length)
        self.row_parts, self.col_parts = (across, shape[0]), (down, shape[1])
        constants = {"SOURCE": float_name(dtype), **norm_constants(norm), "BR": at_once, "BC": width}
        options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
        self.strips = PreparedLaunch(_strips, (across, down), (*shape, length), constants, **options)
        row_programs = triton.cdiv(padded, FINISH_WIDTH) if rows else 0
        col_programs = triton.cdiv(shape[1], FINISH_WIDTH) if cols else 0
        self.finish = PreparedLaunch(
            _finish_scales,
            (row_programs + col_programs,),
            (*shape, padded, across, down, row_programs, eps),
            {"FP8": fp8, "WIDTH": FINISH_WIDTH, "PARTS": FINISH_PARTS},
            num_warps=4,
            enable_fp_fusion=False,
        )

    def find(self, x: Tensor, scale: Tensor | None, scale_t: Tensor | None, norm: tuple[Tensor | None, ...]) -> None:
        row_parts = torch.empty(self.row_parts, dtype=torch.int32, device=x.device)
        col_parts = torch.empty(self.col_parts, dtype=torch.int32, device=x.device)
        self.strips(x, row_parts, col_parts, *norm)
        # Both halves of that kernel are compiled, whichever runs: an unwanted layout gets the other's memory as
        # argument.
        wanted = scale if scale is not None else scale_t
        self.finish(row_parts, col_parts, wanted, scale_t if scale_t is not None else wanted)


# ---- of pieces -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["size16"])
def _amax_of_pairs(x_ptr, partial_ptr, size16, WORDS: tl.constexpr):
    """Each program writes the bits of the largest magnitude of its words of two numbers; size16: numbers / 16."""
    x_ptr = words_of(x_ptr)
    words = size16.to(tl.int64) * 8
    at = tl.arange(0, WORDS)
    step = tl.num_programs(0).to(tl.int64) * WORDS
    largest = tl.zeros([WORDS], tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * WORDS, words, step):
        largest = pair_max(largest, tl.load(x_ptr + start + at, mask=start + at < words, other=0))
    tl.store(partial_ptr + tl.program_id(0), largest_bits(reduce_pairs(largest, 0)))


@triton.jit
def _amax_of_pieces(x_ptr, partial_ptr, size, SOURCE: tl.constexpr, NUMBERS: tl.constexpr):
    piece = tl.program_id(0)
    at = tl.arange(0, NUMBERS)
    step = tl.num_programs(0).to(tl.int64) * NUMBERS
    largest = tl.zeros([NUMBERS], tl.int32)
    for start in range(piece.to(tl.int64) * NUMBERS, size, step):
        bits = tl.load(x_ptr + start + at, mask=start + at < size, other=0)
        largest = tl.maximum(largest, magnitude_bits(float_of_bits(bits, SOURCE)))
    tl.store(partial_ptr + piece, tl.max(largest, axis=0))


# ---- of rows and columns ---------------------------------------------------------------------------------------------


@triton.jit
def _load_words(x_ptr, r_T, rows, words, word):
    """Load 128 words of two numbers from each row, 16 bytes by each thread of a warp."""
    w_W = word + tl.arange(0, 128)
    at_TW = r_T[:, None].to(tl.int64) * words + w_W[None, :]
    return tl.load(x_ptr + at_TW, mask=(r_T < rows)[:, None] & (w_W < words)[None, :], other=0)


@triton.jit
def _add_columns(bits_ptr, words, word, largest_TW):
    largest_W = reduce_pairs(largest_TW, 0)
    bits_C = tl.reshape(tl.join((largest_W << 16) & 0x7FFF0000, largest_W & 0x7FFF0000), [256])
    c_C = word * 2 + tl.arange(0, 256)
    tl.atomic_max(bits_ptr + c_C, bits_C, mask=c_C < words * 2, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "cols16", "padded", "length"])
def _maxima_of_pairs(x_ptr, bits_ptr, rows, cols16, padded, length, BR: tl.constexpr, OVERLAP: tl.constexpr):
    """Largest magnitudes of a strip of 1024 columns: of each row in it, and of each column over `length` rows.

    A warp reads a whole row of the strip, so a row takes five shuffles, and columns need none before the end.
    """
    if OVERLAP:  # the cast is launched before this has ended
        cuda.gdc_launch_dependents()
    x_ptr = words_of(x_ptr)
    strip, part = tl.program_id(0), tl.program_id(1)
    words = cols16 * 8
    word = strip * 512
    a_TW = tl.zeros([BR, 128], tl.int32)
    b_TW = tl.zeros([BR, 128], tl.int32)
    c_TW = tl.zeros([BR, 128], tl.int32)
    d_TW = tl.zeros([BR, 128], tl.int32)
    for first in range(0, length, BR):
        r_T = part * length + first + tl.arange(0, BR)
        x0_TW = _load_words(x_ptr, r_T, rows, words, word)
        x1_TW = _load_words(x_ptr, r_T, rows, words, word + 128)
        x2_TW = _load_words(x_ptr, r_T, rows, words, word + 256)
        x3_TW = _load_words(x_ptr, r_T, rows, words, word + 384)
        a_TW, b_TW = pair_max(a_TW, x0_TW), pair_max(b_TW, x1_TW)
        c_TW, d_TW = pair_max(c_TW, x2_TW), pair_max(d_TW, x3_TW)
        of_rows_TW = pair_max(pair_max(x0_TW, x1_TW), pair_max(x2_TW, x3_TW))
        largest_T = largest_bits(reduce_pairs(of_rows_TW, 1))
        tl.atomic_max(bits_ptr + r_T, largest_T, mask=r_T < rows, sem="relaxed")
    _add_columns(bits_ptr + padded, words, word, a_TW)
    _add_columns(bits_ptr + padded, words, word + 128, b_TW)
    _add_columns(bits_ptr + padded, words, word + 256, c_TW)
    _add_columns(bits_ptr + padded, words, word + 384, d_TW)


@triton.jit(do_not_specialize=["rows", "length"])
def _strips(
    x_ptr,
    row_ptr,
    col_ptr,
    rstd_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    cols,
    length,
    SOURCE: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Find the largest magnitudes of rows and columns in a strip of BC columns, for any type, also after a norm."""
    strip, part = tl.program_id(0), tl.program_id(1)
    c_C = strip * BC + tl.arange(0, BC)
    ok_C = c_C < cols
    largest_C = tl.zeros([BC], tl.int32)
    for first in range(0, length, BR):
        r_T = part * length + first + tl.arange(0, BR)
        ok_T = r_T < rows
        at_TC = r_T[:, None].to(tl.int64) * cols + c_C[None, :]
        x_TC = float_of_bits(tl.load(x_ptr + at_TC, mask=ok_T[:, None] & ok_C[None, :], other=0), SOURCE)
        x_TC = normalise(
            x_TC, r_T, c_C, ok_T, ok_C, rstd_ptr, mean_ptr, weight_ptr, bias_ptr, NORM, WEIGHT, SOURCE, HAS_BIAS
        )
        magnitude_TC = magnitude_bits(x_TC)
        tl.store(row_ptr + strip.to(tl.int64) * rows + r_T, tl.max(magnitude_TC, axis=1), mask=ok_T)
        largest_C = tl.maximum(largest_C, tl.max(magnitude_TC, axis=0))
    tl.store(col_ptr + part.to(tl.int64) * cols + c_C, largest_C, mask=ok_C)


@triton.jit
def _largest_part(parts_ptr, size, count, at_W, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Return the maxima [WIDTH] over the first axis of parts [count, size], PARTS of them read at once."""
    largest_PW = tl.zeros([PARTS, WIDTH], tl.int32)
    for first in range(0, count, PARTS):
        part_P = first + tl.arange(0, PARTS)
        at_PW = part_P[:, None].to(tl.int64) * size + at_W[None, :]
        here_PW = (part_P < count)[:, None] & (at_W < size)[None, :]
        largest_PW = tl.maximum(largest_PW, tl.load(parts_ptr + at_PW, mask=here_PW, other=0))
    return tl.max(largest_PW, axis=0)


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
    PARTS: tl.constexpr,
):
    """Make scales of the parts' maxima: the first programs those of rows, the others those of columns."""
    program = tl.program_id(0)
    if program < row_programs:
        r_W = program * WIDTH + tl.arange(0, WIDTH)
        largest_W = _largest_part(row_parts_ptr, rows, across, r_W, WIDTH, PARTS)
        tl.store(scale_ptr + r_W, scale_of_bits(largest_W, eps, FP8), mask=r_W < padded)
    else:
        c_W = (program - row_programs) * WIDTH + tl.arange(0, WIDTH)
        largest_W = _largest_part(col_parts_ptr, cols, down, c_W, WIDTH, PARTS)
        tl.store(scale_t_ptr + c_W, scale_of_bits(largest_W, eps, FP8), mask=c_W < cols)
