"""The vector scaled products of experts on Hopper, in Gluon: one warp loads, two groups of four warps multiply.

    rows_product    a_TK  rows sorted by expert          b_ENK  a matrix of each expert     -> out [T, N]
    sums_product    a_NP  columns padded per expert      b_KP   likewise                    -> out [E, N, K]

The same products as in `triton_products`, faster. There a program makes one tile, and loads wait while results are
written. Here a program stays on its multiprocessor and takes tile after tile; its loading warp runs ahead of the others
by a ring of stages, also into the next tile. Only the device knows the number of tiles: it is in the layout's tables.

A tile is 128 rows by 256 columns, 64 rows for each group of warps. `fast_accum`: the running sum stays in the tensor
cores, which keep about 14 bits, over the whole contraction. Without it they add STEP products from zero, and the result
is added to a sum in float32, one half of the columns after the other: both halves at once would not fit in registers,
and while one group of warps adds, the other multiplies. The Triton product adds at the same steps.

Beyond the end, in a last step or tile, loads give zeros and stores write nothing; only the width of the result must be
whole tiles. `bitplan.kernels.fp8.experts.products.gluon_obstacle` says where all this can run.

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
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bitplan.kernels.base.launch import is_watched
from bitplan.kernels.fp8.experts.hopper_kernels import STEP, tile_product
from bitplan.kernels.fp8.experts.layout import GLUON_COLS, TILE_ROWS, GroupedFp8, GroupLayout

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
    """The parts of a launch that do not change with its tensors, as in `bitplan.kernels.base.launch`, which has no TMA.

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
        addresses = [each.data_ptr() for each in pointers]
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
        made = [TensorDescriptor.from_tensor(each, *block) for each, block in zip(matrices, self._blocks, strict=True)]
        grid = (self._constants["PROGRAMS"],)
        return tile_product[grid](*made, *pointers, *self._tail, num_warps=WARPS, enable_fp_fusion=False)


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
