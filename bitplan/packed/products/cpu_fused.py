"""The CPU's fused product: which kernel multiplies by a packed weight, and how it is called.

| kernel | formats | inputs | memory beside the weight |
|---|---|---|---|
| ours (`cpu`) | `FORMATS` | as they are: weights are decoded in registers, sums are float32 | none |
| torch's 4-bit one (`cpu_matmul`) | int4_g32, on CPUs that have it (Arm) | rounded to 8-bit integers | a packed copy |
| integers (`cpu_integers`) | `OF_INTEGERS`, where a plan gives inputs a format of 8-bit integers | rounded | none |

Ours is a float32 product of the decoded weights, up to the order of additions: with u = 2^-24 it lies within
(K + 4) u sum_k |x_k w_nk| of the exact one. 16-bit inputs are computed in float32, and the result rounded once.

Up to 12 rows of x (8 for 4-bit codes without AVX-512), codes become numbers in registers (`cpu_rows.products_of`). For
more, parts of the weight are decoded into a buffer that stays in the cache, and multiplied from there
(`cpu_rows.panel_products`), but for a few rows that would need a vector of inputs of their own. Two other ways were
slower: the whole matrix decoded for a BLAS, since its numbers go to memory and back; and parts decoded for a BLAS,
which copies each part and all inputs once more, and starts all threads for every part.

Products of integers equal `round_input(x) @ decode(weight).T`, the definition, within the same bound; where groups have
minima, |w - min| + |min| stands for |w| in it, since both parts are summed by themselves.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitplan.formats import Encoded
from bitplan.formats.dispatch import rounded
from bitplan.formats.elements import E2M1_MAGNITUDES
from bitplan.formats.gguf.grids import VECTOR_LAYOUTS, codebook
from bitplan.formats.gguf.layouts import LAYOUTS
from bitplan.packed.products import cpu_matmul

NIBBLES = ("int4_g32", "q4_0_poly", "q4_0_gguf", "mxfp4", "mxfp4_gguf", "nvfp4", "fp4_u8_g128")
HALVES = ("q4_0_gguf", "mxfp4_gguf")  # low nibbles are the first half of a block
BYTES = ("int8_row", "int8_g128", "q8_0_gguf", "fp8_e4m3_row")
BLOCKS = (*LAYOUTS, *VECTOR_LAYOUTS)  # of GGUF, read as they lie
FORMATS = NIBBLES + BYTES + BLOCKS
OF_INTEGERS = tuple(
    name for name in FORMATS if name not in ("q4_0_poly", "nvfp4", "fp8_e4m3_row") and name not in VECTOR_LAYOUTS
)
INTEGER_INPUTS = ("q8_0_gguf", "int8_row")
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
LEAST_FOR_THREADS = 2**18  # weights times inputs: below this a second thread costs more than it gains
PIECES_PER_THREAD = 8  # a thread that falls behind leaves rows to the others
MOST_INPUTS, MOST_WITHOUT_LOOKUP = 12, 8  # of products in registers; the second for 4-bit codes without AVX-512
MOST_IN_PANELS = 256  # inputs whose panels stay in the cache; more are done in turns
MOST_DIRECT = 4  # inputs of integer products that are multiplied by codes as they lie; more by codes in another order
MOST_OF_BLOCKS = 2  # the same of GGUF's blocks
MOST_IN_QUADS = 512  # inputs that are rounded at a time
MOST_KEPT = 2**21  # bytes of scratch memory that a thread's calls leave for the next
_E8_OF_E4M3 = 256.0  # E4M3's bits in a float16 stand for 2^-8 of the number

Call = Callable[[Tensor, Sequence[int]], Tensor]
Into = Callable[[int, int], None]  # addresses of x and of the result, float32 and contiguous
_Job = tuple["array[int]", int, int, int, Tensor]  # fields, their address; memory for threads: address, bytes, itself
_jobs: list[_Job] = []  # those of calls that are over, still in the CPU's cache: as many as calls ever ran at once


class FusedOnCpu:
    """Reads packed bytes with numba's or torch's kernel; see the table above."""

    name = "the CPU's fused kernel"

    def why_not(self, weight: Encoded, dtype: torch.dtype) -> str | None:
        if dtype not in INPUTS:
            return f"{self.name} computes in float32, the input is {dtype}"
        if _takes_torch(weight, dtype):
            return None
        return why_not_ours(weight)

    def prepare(self, weight: Encoded) -> tuple[Tensor, ...]:
        """torch's copy, or 17 numbers: those of the 16 codes, and a factor for all of them. For 16 codes a format may
        have a list of vectors, whose numbers are bytes there.
        """
        if _takes_torch(weight, torch.float32):
            return (cpu_matmul.pack_four_bit(weight),)
        return (_constants(weight),)

    def join(self, parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...] | None:
        """The numbers of all; None where they differ (nvfp4's factors of whole tensors), and for torch's copies."""
        first = parts[0][0]
        if first.dtype == torch.uint8 or any(not torch.equal(part[0], first) for part in parts):
            return None
        return (first,)

    def launches(self, weight: Encoded, rows: int) -> Sequence[Mapping[str, int]]:
        return ()

    def run(
        self,
        x_MK: Tensor,
        weight: Encoded,
        prepared: tuple[Tensor, ...],
        bias: Tensor | None,
        launch: Mapping[str, int] | None,
    ) -> Tensor:
        inputs = x_MK.shape[0]
        wide = None if bias is None else bias.detach().float().contiguous()
        if not inputs:
            return x_MK.new_empty((0, weight.shape[0]))
        if prepared[0].dtype == torch.uint8:
            return cpu_matmul.four_bit_linear(x_MK, weight, prepared[0], wide).to(x_MK.dtype)
        return _call_for(inputs, weight, prepared[0], wide)(x_MK, (inputs, weight.shape[0]))

    def bind(
        self,
        x_MK: Tensor,
        weight: Encoded,
        prepared: tuple[Tensor, ...],
        bias: Tensor | None,
        launch: Mapping[str, int] | None,
    ) -> Call | None:
        """The product for further inputs of this many rows; valid while weight and bias stay where they are."""
        if (
            prepared[0].dtype == torch.uint8
            or not x_MK.shape[0]
            or (bias is not None and not (bias.dtype == torch.float32 and bias.is_contiguous()))
        ):
            return None
        return _call_for(x_MK.shape[0], weight, prepared[0], None if bias is None else bias.detach())

    def note(self, weight: Encoded) -> str:
        if _takes_torch(weight, torch.float32):
            return (
                "is torch's 4-bit one, rounds each input row to 8-bit integers (error at most step * sum |w|, "
                "typically 0.5 to 0.9 %) and keeps a copy of the packed weight in its own order"
            )
        return "decodes weights in registers or in a buffer, sums in float32 and keeps no copy"


class RoundedFirst:
    """A fused kernel for inputs that have a format: they are rounded, then multiplied by the kernel for any input."""

    def __init__(self, plain: Any, fmt: str) -> None:
        self.plain, self.format, self.name = plain, fmt, f"{plain.name} after inputs are rounded to {fmt}"
        self.join, self.launches = plain.join, plain.launches

    def why_not(self, weight: Encoded, dtype: torch.dtype) -> str | None:
        reason: str | None = self.plain.why_not(weight, dtype)
        return reason

    def prepare(self, weight: Encoded) -> tuple[Tensor, ...]:
        prepared: tuple[Tensor, ...] = self.plain.prepare(weight)
        return prepared

    def run(self, x_MK: Tensor, *product: Any) -> Tensor:
        y: Tensor = self.plain.run(self._rounded(x_MK), *product)
        return y.to(x_MK.dtype)

    def bind(self, x_MK: Tensor, *product: Any) -> Callable[[Tensor, Sequence[int]], Tensor | None] | None:
        bound = self.plain.bind(x_MK, *product)

        def call(x: Tensor, shape: Sequence[int]) -> Tensor | None:
            y = bound(self._rounded(x), shape)
            return y if y is None else y.to(x.dtype)

        return None if bound is None else call

    def _rounded(self, x: Tensor) -> Tensor:
        return rounded(x, self.format, torch.float32 if x.device.type == "cpu" else x.dtype)

    def note(self, weight: Encoded) -> str:
        return f"{self.plain.note(weight)}, of inputs that are rounded to {self.format} before"


class IntegersOnCpu(RoundedFirst):
    """Products of whole numbers, where there are such; else inputs are rounded first."""

    def __init__(self, fmt: str) -> None:
        super().__init__(FusedOnCpu(), fmt)
        self.name = "the CPU's integer kernel"

    def why_not(self, weight: Encoded, dtype: torch.dtype) -> str | None:
        if dtype in INPUTS and self.why_no_integers(weight) is None:
            return None
        return super().why_not(weight, dtype)

    def why_no_integers(self, weight: Encoded) -> str | None:
        """Why the product is not one of whole numbers; None if it is."""
        if self.format not in INTEGER_INPUTS:
            return f"inputs in {self.format} are no whole numbers"
        if weight.fmt.name not in OF_INTEGERS:
            return f"{weight.fmt.name} has no integer kernel; {', '.join(OF_INTEGERS)} have"
        reason = _why_not_here()
        if reason is not None:
            return reason
        from bitplan.base.hardware import cpu_features
        from bitplan.packed.products.cpu_integers import BYTE_STEP
        from bitplan.packed.products.cpu_rows import STEP

        padded = weight.fmt.padded_cols(weight.shape[1])
        shortest = STEP if weight.fmt.name in NIBBLES else 32 if weight.fmt.name in BLOCKS else BYTE_STEP
        if not weight.shape[0] or padded < shortest or padded % 32:
            return f"integer products need rows of whole blocks of 32, and at least {shortest}, got {weight.shape}"
        if "avx512f" in cpu_features() and "avx512bw" not in cpu_features():
            return "integer products need AVX-512BW on CPUs that have AVX-512"
        return None

    def prepare(self, weight: Encoded) -> tuple[Tensor, ...]:
        if self.why_no_integers(weight) is not None or weight.fmt.name in BLOCKS:
            return super().prepare(weight)
        # Codes of E2M1 are doubled, to be whole numbers; mxfp4_gguf's scales are halved.
        factor = torch.tensor([0.5 if weight.fmt.name in ("mxfp4", "fp4_u8_g128") else 1.0])
        return (factor if weight.base is None else factor * weight.base.reshape(()),)

    def run(self, x_MK: Tensor, *product: Any) -> Tensor:
        weight, prepared, bias, _launch = product
        if not self._is_whole(weight, x_MK.shape[0]):
            return super().run(x_MK, *product)
        inputs, wide = x_MK.shape[0], None if bias is None else bias.detach().float().contiguous()
        if not inputs:
            return x_MK.new_empty((0, weight.shape[0]))
        return self._call(inputs, weight, prepared[0], wide)(x_MK, (inputs, weight.shape[0]))

    def bind(self, x_MK: Tensor, *product: Any) -> Callable[[Tensor, Sequence[int]], Tensor | None] | None:
        weight, prepared, bias, _launch = product
        is_odd = bias is not None and not (bias.dtype == torch.float32 and bias.is_contiguous())
        if not self._is_whole(weight, x_MK.shape[0]):
            return super().bind(x_MK, *product)
        if is_odd or not x_MK.shape[0]:
            return None
        return self._call(x_MK.shape[0], weight, prepared[0], None if bias is None else bias.detach())

    def _rounded(self, x: Tensor) -> Tensor:
        if self.format not in INTEGER_INPUTS or _why_not_here() is not None or not x.numel():
            return super()._rounded(x)
        wide = x.detach().to(torch.float32).contiguous()
        y = torch.empty_like(wide)
        _rounding(wide.numel() // wide.shape[-1], wide.shape[-1], self.format)(wide.data_ptr(), y.data_ptr())
        return y

    def _is_whole(self, weight: Encoded, inputs: int) -> bool:
        if self.why_no_integers(weight) is not None:
            return False
        return inputs <= MOST_OF_BLOCKS or weight.fmt.name not in BLOCKS or _has_panels(weight)

    def _call(self, inputs: int, weight: Encoded, factor: Tensor, bias: Tensor | None) -> Call:
        from bitplan.packed.products.cpu_rows import LANES

        most = MOST_OF_BLOCKS if weight.fmt.name in BLOCKS and _has_panels(weight) else MOST_DIRECT
        is_direct = inputs <= most or weight.shape[0] < LANES
        product = (_few_integers if is_direct else _many_integers)(inputs, weight, factor, bias, self.format)
        return _float32_call(product)

    def note(self, weight: Encoded) -> str:
        reason = self.why_no_integers(weight)
        if reason is not None:
            return f"{super().note(weight)}: {reason}"
        few = (
            f" for up to {MOST_OF_BLOCKS} rows (decodes weights in a buffer for more)"
            if weight.fmt.name in BLOCKS and not _has_panels(weight)
            else ""
        )
        return (
            f"rounds inputs to {self.format}, sums whole numbers in blocks of 32{few}, these in float32, and keeps no "
            "copy"
        )


def _has_panels(weight: Encoded) -> bool:
    from bitplan.packed.products.cpu_blocks import has_panels

    return has_panels(weight.shape[0], weight.fmt.padded_cols(weight.shape[1]))


def why_not_ours(weight: Encoded) -> str | None:
    """Why our kernel cannot run this product; None if it can."""
    if weight.fmt.name not in FORMATS:
        return f"the CPU's fused kernel has no {weight.fmt.name}, but {', '.join(FORMATS)}"
    reason = _why_not_here()
    if reason is not None:
        return reason
    from bitplan.packed.products.cpu_rows import LANES, STEP

    shortest = STEP if weight.fmt.name in NIBBLES else LANES
    if not weight.shape[0] or weight.fmt.padded_cols(weight.shape[1]) < shortest:
        return f"the CPU's fused kernel needs rows of at least {shortest} weights here, got shape {weight.shape}"
    return None


def _most_inputs(weight: Encoded) -> int:
    """The most inputs that registers take; for more the weight is decoded once for all, not once for four of them."""
    from bitplan.packed.products.cpu_rows import LOOKS_UP

    return MOST_WITHOUT_LOOKUP if weight.fmt.name in NIBBLES and not LOOKS_UP else MOST_INPUTS


def _call_for(inputs: int, weight: Encoded, constants: Tensor, bias: Tensor | None) -> Call:
    """A call for this many inputs: all is fixed but x and the result."""
    from bitplan.packed.products.cpu_rows import LANES

    most, rest = _most_inputs(weight), inputs % LANES
    if inputs <= most:
        product = _in_registers(inputs, weight, constants, bias)
    elif 0 < rest <= LANES // 4:  # a panel for them would be mostly empty
        product = _in_panels(inputs - rest, weight, constants, bias)
        product_of_rest = _in_registers(rest, weight, constants, bias)
    else:
        product, rest = _in_panels(inputs, weight, constants, bias), 0
    in_panels = 0 if inputs <= most else inputs - rest
    rest_of_x, rest_of_y = 4 * weight.shape[1] * in_panels, 4 * weight.shape[0] * in_panels
    if not 0 < in_panels < inputs:
        return _float32_call(product)

    def both(x: int, y: int) -> None:
        product(x, y)
        product_of_rest(x + rest_of_x, y + rest_of_y)

    return _float32_call(both)


def _float32_call(product: Into) -> Call:
    """The product of inputs of any type: computed in float32, the result in their type."""
    empty, float32 = torch.empty, torch.float32

    def compute(x: Tensor, shape: Sequence[int]) -> Tensor:
        dtype = x.dtype
        wide = x if dtype is float32 and x.is_contiguous() else x.detach().to(float32).contiguous()
        y = empty(shape, dtype=float32)
        product(wide.data_ptr(), y.data_ptr())
        return y if dtype is float32 else y.to(dtype)

    call: Any = compute
    call.into = product  # for callers that know their input to be float32 and contiguous
    return call  # type: ignore[no-any-return]


def _takes_torch(weight: Encoded, dtype: torch.dtype) -> bool:
    return weight.fmt.name == "int4_g32" and cpu_matmul.why_not_four_bit(weight, dtype) is None


@functools.cache
def _why_not_here() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "the CPU's fused kernel needs numba, which is not installed; pip install numba"
    from bitplan.base.hardware import cpu_features

    if _on_x86() and not {"avx2", "fma", "f16c"} <= cpu_features():
        return "the CPU's fused kernel needs AVX2, FMA and F16C on x86"
    if not _on_x86() and platform.machine().lower() not in ("aarch64", "arm64"):
        return f"the CPU's fused kernel is for x86 and 64-bit Arm, this is {platform.machine()}"
    return None


def _on_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


# ---- few inputs ------------------------------------------------------------------------------------------------------


def _constants(weight: Encoded) -> Tensor:
    from bitplan.packed.products.cpu_rows import LOOKS_UP

    vectors = VECTOR_LAYOUTS.get(weight.fmt.name)
    if vectors is not None:
        listed = codebook(vectors.ggml_type).numbers.to(torch.uint8).view(torch.float32)
        return torch.cat([listed.reshape(-1), torch.ones(1)])
    e2m1, is_doubled = weight.fmt.name in ("mxfp4", "nvfp4", "fp4_u8_g128"), weight.fmt.name == "mxfp4_gguf"
    magnitudes = [magnitude * (1 + is_doubled) for magnitude in E2M1_MAGNITUDES]
    numbers = [*magnitudes, *(-one for one in magnitudes)] if e2m1 or is_doubled else list(range(-8, 8))
    if weight.fmt.name == "q4_0_poly":  # two's complement
        numbers = numbers[8:] + numbers[:8]
    factor = 0.5 if e2m1 and not LOOKS_UP else 1.0
    if weight.fmt.name in ("nvfp4", "fp8_e4m3_row"):
        factor *= _E8_OF_E4M3
    constants = torch.tensor([*numbers, factor], dtype=torch.float32)
    if weight.base is not None:
        constants[16] *= weight.base.reshape(())
    return constants


def _in_registers(inputs: int, weight: Encoded, constants: Tensor, bias: Tensor | None) -> Into:
    """The job is complete except for the addresses of x, the result and the scratch memory."""
    from bitplan.packed.products import cpu_rows
    from bitplan.packed.products.cpu_rows import products_of

    rows, width = weight.shape
    if weight.fmt.name in BLOCKS:
        return _blocks_in_registers(inputs, weight, constants, bias)
    unit = cpu_rows.STEP if weight.fmt.name in NIBBLES else cpu_rows.LANES
    units = -(-weight.fmt.padded_cols(width) // unit)
    tiled = inputs if inputs == 1 else 4 * -(-inputs // 4)
    stride = 4 * unit * (1 + units * tiled) + 64  # threads share no cache line
    template, holds = _job(weight, constants, bias, inputs=inputs, scratch_stride=stride)
    return _on_threads(products_of(weight.fmt.name), template, stride, rows * width * inputs, (holds, bias))


def _blocks_in_registers(inputs: int, weight: Encoded, constants: Tensor, bias: Tensor | None) -> Into:
    from bitplan.packed.products import cpu_blocks

    (rows, width), padded = weight.shape, weight.fmt.padded_cols(weight.shape[1])
    stride = cpu_blocks.padded_bytes(inputs, width, padded)
    template, holds = _job(weight, constants, bias, inputs=inputs, scratch_stride=stride, count=padded)
    function = cpu_blocks.products_of(weight.fmt.name)
    return _on_threads(function, template, stride, rows * padded * inputs, (holds, bias))


def _on_threads(function: Any, template: array[int], stride: int, work: int, holds: Any) -> Into:
    """The job of this template on threads that take pieces of rows, each with `stride` bytes of scratch memory."""
    from bitplan.base.loops.jit import thread_count
    from bitplan.base.loops.openmp_threads import run
    from bitplan.packed.products import cpu_rows

    x_at, y_at, scratch_at, piece_at = cpu_rows.X, cpu_rows.Y, cpu_rows.SCRATCH, cpu_rows.PIECE
    rows, is_small = template[cpu_rows.ROWS], work < LEAST_FOR_THREADS
    pieces = [0, _piece(rows, 1)]  # by the number of threads

    def product(x: int, y: int, _holds: Any = holds) -> None:
        threads = 1 if is_small else thread_count()
        while threads >= len(pieces):
            pieces.append(_piece(rows, len(pieces)))
        job = _taken_job(threads * stride)
        fields, address, scratch, _, _ = job
        fields[:] = template
        fields[x_at], fields[y_at], fields[scratch_at], fields[piece_at] = x, y, scratch, pieces[threads]
        run(function, address, threads)
        _give_back(job)

    return product


def _taken_job(size: int) -> _Job:
    """A job with scratch memory of at least this size, for this thread alone."""
    try:
        job = _jobs.pop()
    except IndexError:
        return _new_job(size)
    return job if job[3] >= size else _new_job(size)


def _give_back(job: _Job) -> None:
    if job[3] <= MOST_KEPT:
        _jobs.append(job)


def _new_job(size: int) -> _Job:
    from bitplan.packed.products.cpu_rows import JOB

    fields, scratch = array("q", [0]) * len(JOB), torch.empty(size + 64, dtype=torch.uint8)
    address = scratch.data_ptr()
    return fields, fields.buffer_info()[0], address + -address % 64, size, scratch


def _job(weight: Encoded, constants: Tensor, bias: Tensor | None, **fields: int) -> tuple[array[int], Any]:
    """A job for all rows of the weight, and the objects that must live as long, since a job holds only addresses."""
    from bitplan.packed.products.cpu_rows import JOB

    rows, width = weight.shape
    data = weight.data.contiguous()
    scales = data if weight.scales is None else weight.scales.contiguous()
    fields |= {
        "width": width,
        "codes": data.data_ptr(),
        "codes_stride": data.nbytes // rows,
        "scales": scales.data_ptr(),
        "scales_stride": scales.nbytes // rows,
        "rows": rows,
        "table": constants.data_ptr(),
        "factor": constants[-1:].data_ptr(),
        "bias": 0 if bias is None else bias.data_ptr(),
    }
    return array("q", [fields.get(name, 0) for name in JOB]), (data, scales, constants)


def _piece(rows: int, threads: int) -> int:
    return max(4, rows // (threads * PIECES_PER_THREAD) // 4 * 4)


# ---- many inputs -----------------------------------------------------------------------------------------------------


def _in_panels(inputs: int, weight: Encoded, constants: Tensor, bias: Tensor | None) -> Into:
    """The call for more inputs than `_in_registers` takes: panels are made of x, then multiplied."""
    from bitplan.base.loops.jit import thread_count
    from bitplan.base.loops.openmp_threads import run
    from bitplan.packed.products import cpu_blocks
    from bitplan.packed.products import cpu_rows as fields
    from bitplan.packed.products import cpu_rows as panels

    (rows, width), name, most = weight.shape, weight.fmt.name, min(inputs, MOST_IN_PANELS)
    unit, order, decoder_of = fields.STEP, "halves" if name in HALVES else "pairs", fields.decoder_of
    count = weight.fmt.padded_cols(width)
    if name in BYTES:
        unit, order = fields.LANES, "bytes"
        count = -(-count // unit) * unit
    elif name in BLOCKS:
        unit, order, decoder_of = cpu_blocks.numbers_of(name), "blocks", cpu_blocks.decoder_of
    arrange, multiply, decoder = panels.panels_of(order), panels.panel_products(), decoder_of(name)
    template, holds = _job(weight, constants, bias, count=count, unit=unit, decoder=decoder.address)
    for_arranging, for_panels = panels.arranging_bytes(count), 4 * panels.numbers_in_panels(most, count)
    for_panels = -(-for_panels // 64) * 64

    sizes: dict[int, tuple[int, int, int]] = {}  # by threads: rows of a piece, bytes of a thread, of all

    def product(x: int, y: int, _holds: Any = (holds, bias)) -> None:
        threads = thread_count()
        plan = sizes.get(threads)
        if plan is None:
            piece = panels.piece_rows(rows, threads)
            stride = max(for_arranging, panels.product_bytes(piece, most))
            plan = sizes[threads] = piece, stride, for_panels + threads * stride
        piece, stride, size = plan
        job = _taken_job(size)
        values, address, arranged, _, _ = job
        for first in range(0, inputs, MOST_IN_PANELS):
            count = min(MOST_IN_PANELS, inputs - first)
            for function, source, result in ((arrange, x, arranged), (multiply, arranged, y)):
                values[:] = template
                values[fields.X], values[fields.Y], values[fields.INPUTS] = source, result, count
                values[fields.PIECE], values[fields.SCRATCH] = piece, arranged + for_panels
                values[fields.SCRATCH_STRIDE] = stride
                run(function, address, threads)
            x, y = x + 4 * width * count, y + 4 * rows * count
        _give_back(job)

    return product


# ---- integers --------------------------------------------------------------------------------------------------------


@functools.lru_cache(1024)
def _rounding(inputs: int, width: int, fmt: str) -> Into:
    """Inputs are rounded, and stay float32."""
    from bitplan.packed.products.cpu_integers import BLOCK, rounded_rows
    from bitplan.packed.products.cpu_rows import JOB

    stride = 4 * BLOCK + 64  # threads share no cache line
    fields = {"rows": inputs, "width": width, "by_token": int(fmt == "int8_row"), "scratch_stride": stride}
    template = array("q", [fields.get(name, 0) for name in JOB])
    return _on_threads(rounded_rows(), template, stride, inputs * width, None)


def _few_integers(inputs: int, weight: Encoded, factor: Tensor, bias: Tensor | None, fmt: str) -> Into:
    from bitplan.packed.products import cpu_integers

    padded, by_token = weight.fmt.padded_cols(weight.shape[1]), int(fmt == "int8_row")
    if weight.fmt.name in BLOCKS:
        from bitplan.packed.products import cpu_blocks

        function, bytes_of = cpu_blocks.integers_of(weight.fmt.name, padded)
        stride = bytes_of(inputs, padded)
    else:
        stride = cpu_integers.rows_bytes(padded, inputs, nibbles=weight.fmt.name in NIBBLES)
        function = cpu_integers.few_inputs(weight.fmt.name)
    template, holds = _job(weight, factor, bias, inputs=inputs, scratch_stride=stride, by_token=by_token, count=padded)
    return _on_threads(function, template, stride, weight.shape[0] * padded * inputs // 2, (holds, bias))


def _many_integers(inputs: int, weight: Encoded, factor: Tensor, bias: Tensor | None, fmt: str) -> Into:
    """Inputs are rounded into quads, then multiplied, both by all threads."""
    from bitplan.base.loops.jit import thread_count
    from bitplan.base.loops.openmp_threads import run
    from bitplan.packed.products import cpu_blocks, cpu_integers
    from bitplan.packed.products import cpu_rows as fields

    (rows, width), padded = weight.shape, weight.fmt.padded_cols(weight.shape[1])
    name, of_blocks, by_token = weight.fmt.name, weight.fmt.name in BLOCKS, int(fmt == "int8_row")
    rounding, multiplying = (cpu_blocks if of_blocks else cpu_integers).many_inputs(name)
    most = min(inputs, MOST_IN_QUADS)
    memory = (cpu_blocks if of_blocks else cpu_integers).many_bytes(name, most, padded)
    in_quads, stride = (-(-size // 64) * 64 for size in memory)
    template, holds = _job(weight, factor, bias, count=padded, scratch_stride=stride, by_token=by_token)

    def product(x: int, y: int, _holds: Any = (holds, bias)) -> None:
        threads = thread_count()
        job = _taken_job(in_quads + threads * stride)
        values, address, quads, _, _ = job
        for first in range(0, inputs, MOST_IN_QUADS):
            count = min(MOST_IN_QUADS, inputs - first)
            for function, source, result in ((rounding, x, quads), (multiplying, quads, y)):
                values[:] = template
                values[fields.X], values[fields.Y], values[fields.INPUTS] = source, result, count
                values[fields.SCRATCH] = quads + in_quads
                run(function, address, threads)
            x, y = x + 4 * width * count, y + 4 * rows * count
        _give_back(job)

    return product
