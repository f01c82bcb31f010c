"""Parts of loops are compiled into the loops that call them, and make no machine code of their own."""

from __future__ import annotations

from numba.core import types

from bitplan.base.loops.jit import called, compiled, inlined


@inlined
def _twice(number):  # type: ignore[no-untyped-def]
    return 2 * number


@called
def _sum_to(last):  # type: ignore[no-untyped-def]
    total = 0
    for number in range(last + 1):
        total += _twice(number)
    return total


@compiled
def _kernel(last):  # type: ignore[no-untyped-def]
    return _sum_to(last) + _twice(last)


def test_a_kernel_holds_its_parts_and_the_parts_no_code() -> None:
    assert _kernel(4) == 28
    for part in (_twice, _sum_to):
        part.compile((types.int64,))  # which a kernel from numba's cache on disk does not need
        made = part.overloads[types.int64,]
        assert not made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
    (kernel,) = _kernel.overloads.values()
    assert kernel.library.get_pointer_to_function(kernel.fndesc.llvm_func_name)
