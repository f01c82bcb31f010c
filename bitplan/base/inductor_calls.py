"""Has torch's compiler (Inductor) call Python functions directly, instead of operators through torch's dispatcher.

Generated code gets a name by `imports`, a line of Python, and calls `function`, an expression with that name:

    call_into      it writes a matrix into memory that the compiler has planned, given as `out`
    call_returned  it returns a matrix
    call_operator  registers the function of an operator (`base.compiled_code`), which takes and returns what that does

Code for C++ (`torch.export` and AOTInductor) goes on calling operators (`for_cpp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V


class _Into(ir.ExternKernelOut):  # type: ignore[misc]
    imports: str

    def codegen(self, wrapper: Any) -> None:
        wrapper.add_import_once(self.imports)
        super().codegen(wrapper)


class _Returned(ir.ExternKernelAlloc):  # type: ignore[misc]
    imports: str

    def codegen(self, wrapper: Any) -> None:
        wrapper.add_import_once(self.imports)
        super().codegen(wrapper)


class _Operator(ir.FallbackKernel):  # type: ignore[misc]
    imports: str
    function: str

    def codegen(self, wrapper: Any) -> None:
        wrapper.add_import_once(self.imports)
        self.python_kernel_name = self.function
        super().codegen(wrapper)


def for_cpp() -> bool:
    return bool(V.graph.cpp_wrapper or V.graph.fx_wrapper)


def call_into(imports: str, function: str, inputs: Sequence[Any], size: Sequence[Any], dtype: torch.dtype) -> Any:
    return _matrix(_Into, imports, function, inputs, size, dtype)


def call_returned(imports: str, function: str, inputs: Sequence[Any], size: Sequence[Any], dtype: torch.dtype) -> Any:
    return _matrix(_Returned, imports, function, inputs, size, dtype)


def _matrix(
    kind: Any, imports: str, function: str, inputs: Sequence[Any], size: Sequence[Any], dtype: torch.dtype
) -> Any:
    ready = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(argument)) for argument in inputs]
    layout = ir.FixedLayout(ready[0].get_device(), dtype, list(size), [size[1], 1])
    node = kind(layout, ready, python_kernel_name=function)
    node.imports = imports
    return ir.TensorBox.create(node)


def call_operator(name: str) -> None:
    """Have generated code call the function of an operator of `base.compiled_code`, which returns several tensors."""
    operator = getattr(torch.ops.bitplan, name).default
    imports = "from bitplan.base.compiled_code import FUNCTIONS as bitplan_functions"
    node = type("_Operator", (_Operator,), {"imports": imports, "function": f"bitplan_functions[{name!r}]"})

    def lower(*arguments: Any) -> Any:
        if for_cpp():
            return fallback_handler(operator, add_to_fallback_set=False)(*arguments)
        buffers = node.create(operator, *arguments)  # type: ignore[attr-defined]
        for buffer in buffers:
            buffer.skip_size_stride_alignment_checks = True  # each takes the host a microsecond, in every call
        return [ir.TensorBox.create(buffer) for buffer in buffers]

    register_lowering(operator, type_promotion_kind=None)(lower)
