"""Launches of Triton kernels with little work for the host: all but the tensors is settled beforehand.

    launch = PreparedLaunch(kernel, grid, numbers, constants, num_warps=4)
    launch(x, out, None)                # pointers only: tensors, or None for one that the kernel does not read

An ordinary launch, `kernel[grid](...)`, binds and classifies each argument anew and asks the driver about each pointer:
more time of the host than a small kernel takes on the GPU. A prepared launch does it once for each class of pointers,
keeps the compiled kernel that came of it, and from then on hands addresses to that one.

The class is what Triton compiles for: the device, and for each pointer whether it is a multiple of 16 bytes. Numbers
and constants belong to the object, and types of tensors must too: one object always gets tensors of the same types.
Pointers come first in a kernel's signature, then numbers, then constants.

The first launch of a class is an ordinary one. All are under Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from bitplan.kernels.triton_numbers import INTERPRETED

# Types that Triton's interpreter has not, or not right, go in as integers; kernels read bits.
_AS_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class PreparedLaunch:
    """One kernel, its grid, numbers and constants; called with its tensors, the first of which is never None."""

    __slots__ = ("_grid", "_kept", "_kernel", "_named", "_tail")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._named = {**constants, **options}
        names = kernel.arg_names
        self._tail = (*numbers, *(constants[name] for name in names[len(names) - len(constants) :]))
        self._kept: dict[object, tuple[Any, Any, Any, Any]] = {}

    def __call__(self, *pointers: Tensor | None) -> None:
        addresses = [0 if each is None else each.data_ptr() for each in pointers]
        bits = 0
        for address in addresses:
            bits |= address
        assert pointers[0] is not None
        device = pointers[0].get_device()
        place: object = (device, *[address & 15 for address in addresses]) if bits & 15 else device
        active = triton.runtime.driver.active if not INTERPRETED.value else None
        if active is None or active.get_current_device() != device:
            with torch.cuda.device(device):  # nothing happens for a CPU, whose index is -1
                self._launch(place, device, pointers, addresses)
        else:
            self._launch(place, device, pointers, addresses)

    def _launch(self, place: object, device: int, pointers: tuple[Tensor | None, ...], addresses: list[int]) -> None:
        kept = self._kept.get(place)
        if kept is None:
            self._launch_ordinarily(place, pointers)
            return
        run, function, metadata, compiled = kept
        stream = triton.runtime.driver.active.get_current_stream(device)
        hooks = triton.knobs.runtime
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if enter is not None and not getattr(enter, "calls", True):  # a chain of none
            enter = leave = described = None
        else:
            described = compiled.launch_metadata(self._grid, stream, *addresses, *self._tail)
        run(*self._grid, stream, function, metadata, described, enter, leave, *addresses, *self._tail)

    def _launch_ordinarily(self, place: object, pointers: tuple[Tensor | None, ...]) -> None:
        given = [None if each is None else each.view(_AS_INTEGERS.get(each.dtype, each.dtype)) for each in pointers]
        numbers = self._tail[: len(self._kernel.arg_names) - len(pointers) - self._constant_count()]
        compiled = self._kernel[self._grid](*given, *numbers, **self._named)
        if not INTERPRETED.value and compiled is not None:
            self._kept[place] = (compiled.run, compiled.function, compiled.packed_metadata, compiled)
