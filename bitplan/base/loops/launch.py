"""Launches Triton kernels with little work for the host: everything but the tensors is fixed beforehand.

    launch = PreparedLaunch(kernel, grid, numbers, constants, num_warps=4)
    launch(x, out, None)                # pointers only: tensors, or None for one that the kernel does not read
    launch_in_turn((launch, next), (x, out, None, sum))     # two kernels over the same memory, classified once

An ordinary launch, `kernel[grid](...)`, binds and classifies each argument anew and asks the driver about each pointer:
more time of the host than a small kernel takes on the GPU. A prepared launch does this once for each class of pointers,
keeps the compiled kernel, and from then on only passes addresses to it.

The class is what Triton compiles for: the device, and for each pointer whether it is a multiple of 16 bytes. Numbers
and constants belong to the object, and so do the types of tensors: one object must always get tensors of the same
types. `types` gives, by position, the type as which a kernel reads a tensor, if it is not the tensor's own. Pointers
come first in a kernel's signature, then numbers, then constants.

The first launch of a class is an ordinary one. So are all launches under Triton's interpreter, which compiles nothing,
and while a launch hook is set, so that profilers see every launch.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._dynamo import guards

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

MOST_COMPILERS = 8  # threads
# Types that Triton's interpreter lacks or gets wrong are passed as integers; kernels read bits.
_AS_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


class PreparedLaunch:
    """One kernel, its grid, numbers and constants; called with its tensors, the first of which is never None."""

    __slots__ = ("_compiled", "_constants", "_count", "_grid", "_kernel", "_numbers", "_options", "_tail", "_types")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        *,
        types: dict[int, torch.dtype] | None = None,
        **options: Any,
    ) -> None:
        if tuple(constants) != tuple(kernel.arg_names[-len(constants) :]):
            raise ValueError(f"{kernel.__name__} ends in {kernel.arg_names[-len(constants) :]}, got {list(constants)}")
        self._kernel, self._grid = kernel, _three(grid)
        self._numbers, self._constants, self._options, self._types = numbers, constants, options, types or {}
        # The launcher of a compiled kernel counts constants among its arguments, and does not read them.
        self._tail = (*numbers, *constants.values())
        self._count = len(kernel.arg_names) - len(self._tail)
        self._compiled: dict[object, tuple[Any, tuple[Any, ...], Any]] = {}  # by class of pointers

    @property
    def grid(self) -> tuple[int, int, int]:
        return self._grid

    def __call__(self, *pointers: Tensor | None) -> None:
        launch_in_turn((self,), pointers)

    def bind(self, device: int, *pointers: Tensor) -> Callable[..., None] | None:
        """A function that launches with these last pointers; it takes the stream and the addresses of the first ones.

        The caller ensures that addresses are multiples of 16, and keeps the tensors alive. None if no such launch was
        compiled before. The function does not check for launch hooks.
        """
        parts = self.around_output(device)
        last = tuple(pointer.data_ptr() for pointer in pointers)
        if parts is None or any(address & 15 for address in last):
            return None
        run, (x, y, z), fixed, tail = parts
        tail = (*last, *tail)

        def launch(stream: int, *first: int) -> None:
            run(x, y, z, stream, *fixed, *first, *tail)

        return launch

    def around_output(
        self, device: int, *pointers: Tensor
    ) -> tuple[Callable[..., None], tuple[int, int, int], tuple[Any, ...], tuple[Any, ...]] | None:
        """What `bind` calls, for a caller that saves the call: run(*grid, stream, *before, address, *after).

        These are the first pointers; the address is that of the last, which is the output.
        """
        first = tuple(pointer.data_ptr() for pointer in pointers)
        compiled = self._compiled.get(device)
        if compiled is None or any(address & 15 for address in first):
            return None
        run, fixed, _ = compiled
        return run, self._grid, (*fixed, *first), self._tail

    def compile(self, *pointers: Tensor | None) -> None:
        """Compile for these pointers without a launch, which then finds the kernel; see `compiling_together`."""
        compile_ahead(self._kernel, *self._as_read(pointers), *self._numbers, **self._constants, **self._options)

    def _launch_ordinarily(self, pointers: tuple[Tensor | None, ...]) -> Any:
        return self._kernel[self._grid](*self._as_read(pointers), *self._numbers, **self._constants, **self._options)

    def _as_read(self, pointers: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        return [
            None
            if pointer is None
            else pointer.view(self._types.get(index) or _AS_INTEGERS.get(pointer.dtype, pointer.dtype))
            for index, pointer in enumerate(pointers)
        ]


def compile_ahead(kernel: Any, *arguments: Any, **more: Any) -> None:
    """Compile a kernel for the arguments of a launch; the interpreter compiles nothing."""
    if not INTERPRETED.value:
        kernel.warmup(*arguments, grid=(1,), **more)


@contextmanager
def compiling_together() -> Iterator[None]:
    """Within the block kernels compile side by side on other threads; a launch waits for its own, the end for all.

    Triton keeps what it compiled on disk, too (`TRITON_CACHE_DIR`). Versions that compile one after the other do so.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if INTERPRETED.value or mode is None:
        yield
        return
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_COMPILERS)) as pool, mode(pool):
        yield


@functools.cache
def can_overlap() -> bool:
    """Whether a kernel may be launched before the one in front of it has ended (`launch_pdl`): Hopper and later.

    The first then calls `gdc_launch_dependents`, and the second `gdc_wait` before it reads what the first has written.
    """
    if INTERPRETED.value or not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return all(torch.cuda.get_device_capability(index)[0] >= 9 for index in range(torch.cuda.device_count()))


def dependent_options() -> dict[str, Any]:
    """Launch options for a kernel that may start before the kernel in front of it has ended (see `can_overlap`)."""
    return {"launch_pdl": True} if can_overlap() else {}


# Memory on the current device, as generated code allocates it: torch.empty takes the host three times as long.
empty_on_gpu: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = guards._empty_strided_cuda  # type: ignore[attr-defined]
# As torch.cuda.current_stream(device).cuda_stream. There is one where torch was built for CUDA.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def index_of(device: torch.device) -> int:
    """The number of a device, as `Tensor.get_device` gives it."""
    return -1 if device.index is None else device.index


def _three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


def launch_in_turn(launches: tuple[PreparedLaunch, ...], pointers: tuple[Tensor | None, ...]) -> None:
    """Launch kernels one after the other; each gets as many of these pointers, from the first, as it takes."""
    assert pointers[0] is not None
    if INTERPRETED.value:
        for launch in launches:
            launch._launch_ordinarily(pointers[: launch._count])
        return
    device = pointers[0].get_device()
    if device < 0 or current_device() == device:
        _launch(device, launches, pointers)
        return
    with torch.cuda.device(device):
        _launch(device, launches, pointers)


# As torch.cuda.current_device, without its check that CUDA is initialised: there is a tensor on it.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def _launch(device: int, launches: tuple[PreparedLaunch, ...], pointers: tuple[Tensor | None, ...]) -> None:
    addresses = [0 if launch is None else launch.data_ptr() for launch in pointers]
    odd = functools.reduce(operator.or_, addresses) & 15
    kind: object = (device, *[address & 15 for address in addresses]) if odd else device
    stream, watched = triton.runtime.driver.active.get_current_stream(device), is_watched()
    for launch in launches:
        compiled = launch._compiled.get(kind)
        if compiled is None or watched:
            kernel = launch._launch_ordinarily(pointers[: launch._count])
            if kernel is not None:  # a hook of Triton's may have taken the compilation over
                launch._compiled[kind] = _entry_of(kernel)
            continue
        run, fixed, _ = compiled
        run(*launch._grid, stream, *fixed, *addresses[: launch._count], *launch._tail)


def _entry_of(kernel: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """Return a compiled kernel's launcher, its arguments between stream and pointers, and the kernel to keep alive."""
    run, no_hooks = kernel.run, (None, None, None)
    if _HAS_LAUNCH and getattr(run, "global_scratch_size", None) == 0 == run.profile_scratch_size:
        shape = run.launch_cooperative_grid, run.launch_pdl
        return run.launch, (kernel.function, *shape, None, None, kernel.packed_metadata, *no_hooks), kernel
    return run, (kernel.function, kernel.packed_metadata, *no_hooks), kernel


# In this version of Triton the launcher, in Python, only allocates scratch memory and calls `launch`, which is C. If no
# scratch memory is needed, `launch` is called directly.
_HAS_LAUNCH = triton.__version__.startswith("3.6.")


def is_watched() -> bool:
    """Whether somebody has registered a hook with Triton that is called at every launch."""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)
