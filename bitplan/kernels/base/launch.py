"""Launches Triton kernels with little work for the host: all but the tensors is settled beforehand.

    launch = PreparedLaunch(kernel, grid, numbers, constants, num_warps=4)
    launch(x, out, None)                # pointers only: tensors, or None for one that the kernel does not read
    launch_in_turn((launch, next), (x, out, None, sum))     # two kernels over the same memory: asked about it once

An ordinary launch, `kernel[grid](...)`, binds and classifies each argument anew and asks the driver about each pointer:
more time of the host than a small kernel takes on the GPU. A prepared launch does it once for each class of pointers,
keeps the compiled kernel that came of it, and from then on hands addresses to that one.

The class is what Triton compiles for: the device, and for each pointer whether it is a multiple of 16 bytes. Numbers
and constants belong to the object, and types of tensors must too: one object always gets tensors of the same types.
`types` says as what a kernel reads some of them, by place, where it is not their own type.
Pointers come first in a kernel's signature, then numbers, then constants.

The first launch of a class is an ordinary one. All are under Triton's interpreter, which compiles nothing, and while
a launch hook is set, so that profilers see what they always see.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from bitplan.kernels.base.numbers import INTERPRETED

# Types that Triton's interpreter has not, or not right, go in as integers; kernels read bits.
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
        """What launches it with these last pointers; it takes the stream and the addresses of those before.

        Only for addresses that are multiples of 16, which the caller sees to, and only after such a launch: None where
        nothing is compiled. It does not look for launch hooks, and the caller holds the tensors.
        """
        last = tuple(each.data_ptr() for each in pointers)
        compiled = self._compiled.get(device)
        if compiled is None or any(address & 15 for address in last):
            return None
        run, fixed, _ = compiled
        grid, tail = self._grid, (*last, *self._tail)

        def launch(stream: int, *first: int) -> None:
            run(*grid, stream, *fixed, *first, *tail)

        return launch

    def _launch_ordinarily(self, pointers: tuple[Tensor | None, ...]) -> Any:
        given = [
            None if each is None else each.view(self._types.get(index) or _AS_INTEGERS.get(each.dtype, each.dtype))
            for index, each in enumerate(pointers)
        ]
        return self._kernel[self._grid](*given, *self._numbers, **self._constants, **self._options)


def _three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


def launch_in_turn(launches: tuple[PreparedLaunch, ...], pointers: tuple[Tensor | None, ...]) -> None:
    """Kernels one after the other; each gets the first of these pointers, as many as it has."""
    assert pointers[0] is not None
    if INTERPRETED.value:
        for each in launches:
            each._launch_ordinarily(pointers[: each._count])
        return
    device = pointers[0].get_device()
    if device < 0 or _current_device() == device:
        _launch(device, launches, pointers)
        return
    with torch.cuda.device(device):
        _launch(device, launches, pointers)


# As torch.cuda.current_device, which asks each time whether CUDA is running: it is, for there is a tensor on it.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def _launch(device: int, launches: tuple[PreparedLaunch, ...], pointers: tuple[Tensor | None, ...]) -> None:
    addresses = [0 if each is None else each.data_ptr() for each in pointers]
    odd = functools.reduce(operator.or_, addresses) & 15
    kind: object = (device, *[address & 15 for address in addresses]) if odd else device
    stream, watched = triton.runtime.driver.active.get_current_stream(device), is_watched()
    for each in launches:
        compiled = each._compiled.get(kind)
        if compiled is None or watched:
            kernel = each._launch_ordinarily(pointers[: each._count])
            if kernel is not None:  # a hook of Triton's may have taken the compilation over
                each._compiled[kind] = _entry_of(kernel)
            continue
        run, fixed, _ = compiled
        run(*each._grid, stream, *fixed, *addresses[: each._count], *each._tail)


def _entry_of(kernel: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """(what launches a compiled kernel, what it takes between the stream and the arguments, the kernel to keep)."""
    run, no_hooks = kernel.run, (None, None, None)
    if _HAS_LAUNCH and getattr(run, "global_scratch_size", None) == 0 == run.profile_scratch_size:
        shape = run.launch_cooperative_grid, run.launch_pdl
        return run.launch, (kernel.function, *shape, None, None, kernel.packed_metadata, *no_hooks), kernel
    return run, (kernel.function, kernel.packed_metadata, *no_hooks), kernel


# Of this version it is known that its launcher, in Python, only sees to scratch memory and calls `launch`, which is C.
# Where no scratch memory is needed, that is called at once.
_HAS_LAUNCH = triton.__version__.startswith("3.6.")


def is_watched() -> bool:
    """Is a launch hook set?"""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)
