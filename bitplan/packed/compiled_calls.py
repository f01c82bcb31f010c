"""What code that torch.compile generated calls for a packed product, past torch's dispatcher.

    CALLS[("fused", "mxfp4", 6144, 4096, 1, types, "", "*:fused outputs=32 ...")](x, data, scales, ..., out=y)

A key is all that is constant in a graph, and is looked up in every call; the function for it is made at first use, also
in a process that found the generated code in torch's cache. So keys and arguments may only be added to: code that an
earlier version generated may still be called.

| key | arguments | result |
|---|---|---|
| "fused", format, outputs, inputs, rows, types, optional, ways | x, data, scales, `prepared`, *optional | `out` |
| "decode", format, outputs, inputs, type, optional | data, scales, *optional | `out`, the numbers in that type |
| "linear" or "input_gradient", optional, and the operator's constants | those of the operator's tensors | returned |

`optional` names the optional tensors that a product has, in their order: "bias base". `types` are those of arranged
and bias, and the axes of factor: a launch depends on them.

A call of the operator costs the host two passes through torch's dispatcher and Python, 14 arguments each, although no
gradient is asked for. Here it costs a lookup, the addresses and the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitplan.formats import Encoded, get_format
from bitplan.formats.dispatch import decode
from bitplan.packed.linear_operator import Matrix, multiply, packed_input_gradient, packed_linear
from bitplan.packed.product_strategy import is_capturing, way_at
from bitplan.packed.products.fused import BoundInto, TritonOnCuda, fused_for

Key = tuple[Any, ...]
Call = Callable[..., Any]
TENSORS = ("bias", "data", "scales", "base", "arranged", "factor", "counters", "expanded")  # of an operator, beside x
_MOST_BOUND = 16384


class _Calls(dict[Key, Call]):
    def __missing__(self, key: Key) -> Call:
        kind, *constants = key
        call = self[key] = _MAKERS[kind](*constants)
        return call


def _fused(name: str, outputs: int, inputs: int, rows: int, types: Key, optional: str, ways: str) -> Call:  # noqa: ARG001
    names, way, shape = optional.split(), way_at(ways, rows), (outputs, inputs)
    bias_at = names.index("bias") if "bias" in names else None
    bound: dict[tuple[int, ...], BoundInto] = {}

    def run(
        x: Tensor,
        data: Tensor,
        scales: Tensor,
        arranged: Tensor,
        factor: Tensor,
        counters: Tensor,
        *more: Tensor,
        out: Tensor,
    ) -> None:
        addresses = (
            data.data_ptr(),
            arranged.data_ptr(),
            factor.data_ptr(),
            counters.data_ptr(),
            0 if bias_at is None else more[bias_at].data_ptr(),
        )
        into = bound.get(addresses)
        if into is not None and into(x, out):
            return
        by_name = dict(zip(names, more, strict=True))
        bias, prepared = by_name.get("bias"), (arranged, factor, counters)
        matrix = Matrix(data, scales, by_name.get("base"), prepared, None, name, shape)
        out.copy_(multiply(x, bias, matrix, way))
        kernel = fused_for(x.device.type)
        if isinstance(kernel, TritonOnCuda) and not is_capturing(x.device):
            into = kernel.bind_into(x, matrix.encoded, prepared, bias, way.launch)
            if into is not None:
                if len(bound) >= _MOST_BOUND:
                    bound.clear()
                bound[addresses] = into

    return run


def _decode(name: str, outputs: int, inputs: int, type_name: str, optional: str) -> Call:
    fmt, dtype, has_base = get_format(name), getattr(torch, type_name), optional == "base"
    takes_base = fmt.packing is not None
    bound: dict[int, Callable[..., None]] = {}

    def run(data: Tensor, scales: Tensor, *base: Tensor, out: Tensor) -> None:
        index = data.get_device()
        launch = bound.get(index)
        if launch is not None:
            first, second, target = data.data_ptr(), scales.data_ptr(), out.data_ptr()
            if takes_base:
                third = base[0].data_ptr() if has_base else second
                if not (first | second | third | target) & 15:
                    launch(_current_stream(index), first, second, third, target)
                    return
            elif not (first | second | target) & 15:
                launch(_current_stream(index), first, second, target)
                return
        encoded = Encoded(fmt, (outputs, inputs), data, scales, *base)
        if not data.is_cuda:
            out.copy_(decode(encoded, dtype))
            return
        from bitplan.formats.triton_codec import DECODERS, decode_launch

        DECODERS[name](encoded, dtype, out=out)
        launch = decode_launch(encoded, dtype).bind(index)
        if launch is not None:
            bound[index] = launch

    return run


# There is one where torch was built for CUDA.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _of_operator(operator: Callable[..., Tensor]) -> Callable[..., Call]:
    def make(optional: str, *constants: Any) -> Call:
        names = optional.split()
        indices = [names.index(name) if name in names else None for name in TENSORS]
        if operator is packed_input_gradient:
            indices = indices[1:]

        def run(x: Tensor, *tensors: Tensor) -> Tensor:
            return operator(x, *[None if index is None else tensors[index] for index in indices], *constants)

        return run

    return make


_MAKERS: dict[str, Callable[..., Call]] = {
    "fused": _fused,
    "decode": _decode,
    "linear": _of_operator(packed_linear),
    "input_gradient": _of_operator(packed_input_gradient),
}
CALLS = _Calls()
