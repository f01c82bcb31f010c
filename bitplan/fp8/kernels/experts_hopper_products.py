"""The vector scaled products of experts on Hopper, in Gluon: one warp loads, two groups of four warps multiply.

    rows_product    a_TK  rows sorted by expert          b_ENK  a matrix of each expert     -> out [T, N]
    sums_product    a_NP  columns padded per expert      b_KP   likewise                    -> out [E, N, K]

The same products as in `triton_product`, faster. There a program makes one tile, and loads wait while results
are written. Here a program stays on its multiprocessor and takes tile after tile; its loading warp runs ahead of the
others by a ring of stages, also into the next tile. Only the device knows the number of tiles: it is in the layout's
tables.

A tile is 128 rows by 256 columns, 64 rows for each group of warps. `fast_accum`: the running sum stays in the tensor
cores, which keep about 14 bits, over the whole contraction. Without it they add STEP products from zero, and the result
is added to a sum in float32, one half of the columns after the other: both halves at once would not fit in registers,
and while one group of warps adds, the other multiplies. The Triton product adds at the same steps.

Beyond the end, in a last step or tile, loads give zeros and stores write nothing; only the width of the result must be
whole tiles. `bitplan.fp8.kernels.experts_products.gluon_obstacle` says where all this can run.

Legend: T rows of tokens, E experts, N outputs, K inputs, P padded rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
import threading
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bitplan.base.loops.launch import is_watched
from bitplan.fp8.kernels.experts_layout import GLUON_COLS, TILE_ROWS, GroupedFp8, GroupLayout

# ---- kernel ----------------------------------------------------------------------------------------------------------


STEP = 128  # numbers of one step of the contraction

# The tile, its rows for each group of warps, a step, and registers of a thread in the second group and in the loading
# warp; the first group has the rest.
_TILE, _ROWS, _COLS = gl.constexpr(TILE_ROWS), gl.constexpr(TILE_ROWS // 2), gl.constexpr(GLUON_COLS)
_STEP, _MULTIPLYING, _LOADING = gl.constexpr(STEP), gl.constexpr(232), gl.constexpr(24)

# Later versions of Triton renamed these, and keep the old names only to warn.
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit(do_not_specialize=["experts", "together"])
def tile_product(
    a_desc,
    b_desc,
    out_desc,
    out_ptr,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    expert_ptr,
    row_ptr,
    end_ptr,
    used_ptr,
    height,
    width,
    length,
    experts,
    together,
    SUMS: gl.constexpr,
    UNIFORM: gl.constexpr,
    BIAS: gl.constexpr,
    FAST: gl.constexpr,
    PART: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """out [T, width] from rows of `length` numbers, or with SUMS [experts * height, width].

    The tables describe tiles (expert, first row, the expert's end), or with SUMS experts by size and their ends in the
    contraction. UNIFORM: an expert has one scale for a and one for b, though they are written for every row.
    """
    if SUMS:
        tiles = (height + _TILE - 1) // _TILE
        total = tiles * (width // _COLS) * experts
    else:
        tiles = gl.load(used_ptr)
        total = tiles * (width // _COLS)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, _ROWS, _STEP], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, _COLS, _STEP], b_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [4, _ROWS, PART], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both groups of warps have read it
    fence_async_shared()
    sizes = (total, tiles, height, width, length, together)
    tables = (expert_ptr, row_ptr, end_ptr)
    ring = (a_bufs, b_bufs, full, empty)
    scales = (a_scale_ptr, b_scale_ptr, bias_ptr)
    result = (out_desc, out_ptr, out_bufs)
    gl.warp_specialize(
        [
            (_multiply, (0, ring, scales, result, sizes, tables, SUMS, UNIFORM, BIAS, FAST, STAGES, PROGRAMS)),
            (_multiply, (1, ring, scales, result, sizes, tables, SUMS, UNIFORM, BIAS, FAST, STAGES, PROGRAMS)),
            (_load, (a_desc, b_desc, ring, sizes, tables, SUMS, STAGES, PROGRAMS)),
        ],
        [4, 1],
        [_MULTIPLYING, _LOADING],
    )


@gluon.jit
def _place(t, sizes, tables, SUMS: gl.constexpr):
    """Return of tile t (row of a, row of b, start of the contraction, steps, expert, row of out, its end, column)."""
    _total, tiles, height, width, length, together = sizes
    expert_ptr, row_ptr, end_ptr = tables
    cols = width // _COLS
    if SUMS:
        # The expert with the most rows takes longest: it comes first.
        expert = gl.load(expert_ptr + t // (tiles * cols))
        tile, block = _order(t % (tiles * cols), tiles, cols, together)
        first = gl.load(end_ptr + expert - 1, mask=expert > 0, other=0)
        steps = (gl.load(end_ptr + expert) - first + _STEP - 1) // _STEP
        a_row = tile * _TILE
        b_row = block * _COLS
        row = expert * height + a_row
        end = gl.minimum(row + _TILE, (expert + 1) * height)
    else:
        tile, block = _order(t, tiles, cols, together)
        expert = gl.load(expert_ptr + tile)
        a_row = gl.load(row_ptr + tile)
        end = gl.load(end_ptr + tile)
        first = tile * 0
        steps = (length + _STEP - 1) // _STEP
        b_row = expert * width + block * _COLS
        row = a_row
    return a_row, b_row, first, steps, expert, row, end, block * _COLS


@gluon.jit
def _order(t, rows, cols, together):
    """Return tile t's (row, column) of tiles; `together` rows of tiles go through the columns side by side."""
    first = t // (together * cols) * together
    side = gl.minimum(rows - first, together)
    inside = t % (together * cols)
    return first + inside % side, inside // side


@gluon.jit
def _load(a_desc, b_desc, ring, sizes, tables, SUMS: gl.constexpr, STAGES: gl.constexpr, PROGRAMS: gl.constexpr):
    """The loading warp: fills the ring, step by step and tile by tile."""
    a_bufs, b_bufs, full, empty = ring
    at = 0
    for t in range(gl.program_id(0), sizes[0], PROGRAMS):
        a_row, b_row, first, steps, _, _, _, _ = _place(t, sizes, tables, SUMS)
        for step in range(steps):
            stage = at % STAGES
            k = first + step * _STEP
            # A new barrier counts as if phase 1 had ended.
            mbarrier.wait(empty.index(stage), ((at // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (_TILE + _COLS) * _STEP)
            _tma_load(a_desc, [a_row, k], ready, a_bufs.index(stage * 2))
            _tma_load(b_desc, [b_row, k], ready, b_bufs.index(stage))
            _tma_load(a_desc, [a_row + _ROWS, k], ready, a_bufs.index(stage * 2 + 1))
            at += 1


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    ring,
    scales,
    result,
    sizes,
    tables,
    SUMS: gl.constexpr,
    UNIFORM: gl.constexpr,
    BIAS: gl.constexpr,
    FAST: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """A group of four warps: multiplies its 64 rows of tile after tile."""
    at = 0
    for t in range(gl.program_id(0), sizes[0], PROGRAMS):
        _, _, _, steps, expert, row, end, col = _place(t, sizes, tables, SUMS)
        a_scale = 1.0
        b_scale = 1.0
        if UNIFORM:
            a_scale = gl.load(scales[0] + row)
            b_scale = gl.load(scales[1] + expert * sizes[3])
        row += GROUP * _ROWS
        if FAST:
            left, right, at = _sum_in_tensor_cores(GROUP, ring, at, steps, STAGES)
        else:
            left, right, at = _sum_in_float32(GROUP, ring, at, steps, STAGES)
        # One half of the columns after the other: scales of all would not fit in registers beside the sums.
        _finish(left, GROUP, scales, a_scale, b_scale, result, expert, row, end, col, sizes[3], UNIFORM, BIAS)
        col += _COLS // 2
        _finish(right, GROUP, scales, a_scale, b_scale, result, expert, row, end, col, sizes[3], UNIFORM, BIAS)
    tma.store_wait(0)


@gluon.jit
def _sum_in_tensor_cores(GROUP: gl.constexpr, ring, at, steps, STAGES: gl.constexpr):
    """(left and right sums [64, 128], steps of the ring so far); a product starts while the last is under way."""
    a_bufs, b_bufs, full, empty = ring
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _COLS, 32])
    acc = gl.zeros([_ROWS, _COLS], gl.float32, MMA)
    for step in range(steps):
        stage = at % STAGES
        mbarrier.wait(full.index(stage), (at // STAGES) & 1)
        b = b_bufs.index(stage).permute((1, 0))
        flying = warpgroup_mma(a_bufs.index(stage * 2 + GROUP), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(flying,))
        # The product before this one is done: its stage is free.
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1, pred=step > 0)
        at += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    left, right = _halve(acc)
    return left, right, at


@gluon.jit
def _sum_in_float32(GROUP: gl.constexpr, ring, at, steps, STAGES: gl.constexpr):
    """Return what `_sum_in_tensor_cores` does, but add each step's products to the sums in float32."""
    a_bufs, b_bufs, full, empty = ring
    HALF: gl.constexpr = _COLS // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 32])
    left = gl.zeros([_ROWS, HALF], gl.float32, MMA)
    right = gl.zeros([_ROWS, HALF], gl.float32, MMA)
    part = gl.zeros([_ROWS, HALF], gl.float32, MMA)
    for _step in range(steps):
        stage = at % STAGES
        mbarrier.wait(full.index(stage), (at // STAGES) & 1)
        a = a_bufs.index(stage * 2 + GROUP)
        b = b_bufs.index(stage)
        flying = warpgroup_mma(a, b.slice(0, HALF).permute((1, 0)), part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(flying,))
        left += part
        flying = warpgroup_mma(a, b.slice(HALF, HALF).permute((1, 0)), part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(flying,))
        mbarrier.arrive(empty.index(stage), count=1)
        right += part
        at += 1
    return left, right, at


@gluon.jit
def _finish(
    acc,
    GROUP: gl.constexpr,
    scales,
    a_scale,
    b_scale,
    result,
    expert,
    row,
    end,
    col,
    width,
    UNIFORM: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Scale a sum, add the bias, write it: whole blocks by TMA, the last rows of an expert under a mask."""
    a_scale_ptr, b_scale_ptr, bias_ptr = scales
    out_desc, out_ptr, out_bufs = result
    LAYOUT: gl.constexpr = acc.type.layout
    m = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    n = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    if UNIFORM:
        acc = acc * a_scale * b_scale
    else:
        # Scales of a are laid out like the rows of out, those of b like its columns.
        a_scale_M = gl.load(a_scale_ptr + m, mask=m < end, other=0.0)
        b_scale_N = gl.load(b_scale_ptr + expert * width + n)
        acc = acc * a_scale_M[:, None] * b_scale_N[None, :]
    if BIAS:
        acc = acc + gl.load(bias_ptr + expert * width + n)[None, :]
    if end - row >= _ROWS:
        _store(acc, 0, GROUP, out_desc, out_bufs, row, col)
    elif end > row:
        at = m.to(gl.int64)[:, None] * width + n[None, :]
        gl.store(out_ptr + at, acc.to(out_desc.dtype), mask=(m < end)[:, None])


@gluon.jit
def _store(acc, PART: gl.constexpr, GROUP: gl.constexpr, out_desc, out_bufs, row, col):
    """Halve a tile until it fits a block of the descriptor, and store it; each group has two stores under way."""
    PARTS: gl.constexpr = acc.shape[1] // out_desc.block_shape[1]
    if PARTS > 1:
        left, right = _halve(acc)
        _store(left, PART, GROUP, out_desc, out_bufs, row, col)
        _store(right, PART + PARTS // 2, GROUP, out_desc, out_bufs, row, col + left.shape[1])
    else:
        buf = out_bufs.index(GROUP * 2 + PART % 2)
        tma.store_wait(1)
        buf.store(acc.to(out_desc.dtype))
        fence_async_shared()
        _tma_store(out_desc, [row, col], buf)


@gluon.jit
def _halve(x):
    """Divide a tile into its left and its right columns."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


# ---- products --------------------------------------------------------------------------------------------------------


WARPS = 4  # in the first group; Gluon adds the others

_TYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}


def rows_product(
    a_TK: GroupedFp8,
    b_ENK: GroupedFp8,
    layout: GroupLayout,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    fast_accum: bool = True,
) -> None:
    """Fill out [T, N]; N is a multiple of GLUON_COLS."""
    experts, outputs, inputs = b_ENK.codes.shape
    numbers = (0, outputs, inputs, experts)
    flags = (False, a_TK.uniform and b_ENK.uniform, bias is not None, fast_accum)
    launch = _launch_of(out.device, a_TK.codes.dtype, b_ENK.codes.dtype, out.dtype, numbers, flags, stages=4)
    launch(
        (a_TK.codes, b_ENK.codes.view(experts * outputs, inputs), out),
        (
            out,
            a_TK.scale,
            b_ENK.scale,
            a_TK.scale if bias is None else bias.float().contiguous(),
            layout.tile_expert,
            layout.tile_row,
            layout.tile_end,
            layout.tiles_used,
        ),
    )


def sums_product(
    a_NP: GroupedFp8, b_KP: GroupedFp8, layout: GroupLayout, out: Tensor, *, fast_accum: bool = True
) -> None:
    """Fill out [E, N, K]; K is a multiple of GLUON_COLS, and the layout is padded to STEP."""
    experts, outputs, inputs = out.shape
    numbers = (outputs, inputs, 0, experts)
    flags = (True, a_NP.uniform and b_KP.uniform, False, fast_accum)
    stages = sums_stages(layout.rows, experts)
    launch = _launch_of(out.device, a_NP.codes.dtype, b_KP.codes.dtype, out.dtype, numbers, flags, stages)
    launch(
        (a_NP.codes, b_KP.codes, out.view(experts * outputs, inputs)),
        (
            out,
            a_NP.scale,
            b_KP.scale,
            a_NP.scale,
            layout.by_size,
            layout.by_size,
            layout.padded_ends,
            layout.tiles_used,
        ),
    )


def sums_stages(rows: int, experts: int) -> int:
    """Stages of the ring of `sums_product`: 4, or 3 if an expert's rows are on average fewer than 4 steps.

    On an H200 4 are 1 to 3% faster with 4096 rows for each expert, and 3 are 8% faster with 256. `rows_product` has
    4 always: 3 were 1 to 5% slower.
    """
    return 3 if rows < 4 * STEP * experts else 4


# ---- launches --------------------------------------------------------------------------------------------------------


_thread = threading.local()


class _Launch:
    """The parts of a launch that do not change with its tensors, as in `bitplan.base.loops.launch`, which has no TMA.

    The first launch is an ordinary one. It takes Triton's own descriptors, which are costly to check and to classify;
    later launches pass only addresses and sizes, from which descriptors are made.
    """

    __slots__ = ("_blocks", "_compiled", "_constants", "_device", "_tail")

    def __init__(
        self,
        device: torch.device,
        blocks: list[tuple[list[int], Any]],
        numbers: tuple[int, ...],
        constants: dict[str, Any],
    ) -> None:
        self._device, self._blocks, self._constants = device.index, blocks, constants
        self._tail = (*numbers, *constants.values())
        self._compiled: Any = None

    def __call__(self, matrices: tuple[Tensor, ...], pointers: tuple[Tensor, ...]) -> None:
        if not hasattr(_thread, "has_context") and torch.cuda.is_initialized():
            torch.cuda.mem_get_info(self._device)  # descriptors need a CUDA context, which a new thread does not have
            _thread.has_context = True
        if triton.runtime.driver.active.get_current_device() == self._device:
            self._launch(matrices, pointers)
            return
        with torch.cuda.device(self._device):
            self._launch(matrices, pointers)

    def _launch(self, matrices: tuple[Tensor, ...], pointers: tuple[Tensor, ...]) -> None:
        addresses = [pointer.data_ptr() for pointer in pointers]
        odd = 0
        for address in addresses:
            odd |= address & 15
        # Triton compiles for pointers that are multiples of 16; others are rare, and get a kernel of their own.
        if self._compiled is None or odd or is_watched():
            compiled = self._launch_ordinarily(matrices, pointers)
            self._compiled = self._compiled if odd else compiled
            return
        compiled = self._compiled
        compiled.run(
            self._constants["PROGRAMS"],
            1,
            1,
            triton.runtime.driver.active.get_current_stream(self._device),
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *map(_Matrix, matrices),
            *addresses,
            *self._tail,
        )

    def _launch_ordinarily(self, matrices: tuple[Tensor, ...], pointers: tuple[Tensor, ...]) -> Any:
        descriptors = [
            TensorDescriptor.from_tensor(matrix, *block) for matrix, block in zip(matrices, self._blocks, strict=True)
        ]
        grid = (self._constants["PROGRAMS"],)
        return tile_product[grid](*descriptors, *pointers, *self._tail, num_warps=WARPS, enable_fp_fusion=False)


class _Matrix:
    """The fields of a TensorDescriptor that a compiled launch reads."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, tensor: Tensor) -> None:
        self.base, self.shape, self.strides = tensor, tensor.shape, tensor.stride()


@functools.lru_cache(maxsize=1024)
def _launch_of(
    device: torch.device,
    a: torch.dtype,
    b: torch.dtype,
    out: torch.dtype,
    numbers: tuple[int, int, int, int],
    flags: tuple[bool, bool, bool, bool],
    stages: int,
) -> _Launch:
    """`numbers`: height, width, length and experts; `flags`: SUMS, UNIFORM, BIAS and FAST; see `tile_product`.

    Rows of tiles that go through the columns together: of 4, 8 and 16, 4 and 8 were fastest on an H200, by 0 to 3%.
    """
    part = 128 // out.itemsize  # 128 bytes of a row of the result are written at once
    sides = ((a, [TILE_ROWS // 2, STEP]), (b, [GLUON_COLS, STEP]), (out, [TILE_ROWS // 2, part]))
    blocks = [(shape, gl.NVMMASharedLayout.get_default_for(shape, _TYPES[dtype])) for dtype, shape in sides]
    constants: dict[str, Any] = dict(zip(("SUMS", "UNIFORM", "BIAS", "FAST"), flags, strict=True))
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    constants |= {"PART": part, "STAGES": stages, "PROGRAMS": programs}
    return _Launch(device, blocks, (*numbers, 8 if flags[0] else 4), constants)
