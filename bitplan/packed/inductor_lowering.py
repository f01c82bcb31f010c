"""Teaches torch's compiler (Inductor) to call packed products directly, instead of through torch's dispatcher.

Importing it registers the lowerings of bitplan::packed_linear and bitplan::packed_input_gradient. `linear` imports it
when a graph is traced and Inductor is loaded: loading that takes seconds.

| on CUDA, with a fixed number of rows | becomes |
|---|---|
| the fused kernel, up to its widest tile | one call that writes into memory which the compiler has planned |
| decode | a call that decodes into planned memory, and a matrix product of the compiler's |
| a weight that is kept expanded | a matrix product of the compiler's |

Inputs that are rounded become torch's own operations there, which the compiler joins with the norm or the activation
that made them; a product in FP8 becomes torch's own one. Rounding divides as generated code does, with an error of two
units in the last place of a float32, so that a number next to the middle between two codes may get the other one.

Everything else becomes a direct call of the operator's function. Code for C++ (`torch.export` and AOTInductor) calls
the operator as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor import decomposition
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering, to_dtype

from bitplan.base.inductor_calls import call_into, call_returned, for_cpp
from bitplan.formats import get_format
from bitplan.formats.dispatch import has_decoder
from bitplan.formats.input_formats import round_input, token_codes
from bitplan.packed.compiled_calls import TENSORS, Key
from bitplan.packed.crossover import Pick
from bitplan.packed.product_strategy import ProductWay, text_of, way_at
from bitplan.packed.products.expert_routing import WIDEST_TILE
from bitplan.packed.products.fp8_rows import FP8_INPUT, product_of_rows

_IMPORT = "from bitplan.packed.compiled_calls import CALLS as bitplan_calls"
_LINEAR = torch.ops.bitplan.packed_linear.default
_GRADIENT = torch.ops.bitplan.packed_input_gradient.default
_aten = torch.ops.aten


def _function(key: Key) -> str:
    return f"bitplan_calls[{key!r}]"


def _present(names: Sequence[str], tensors: Sequence[Any]) -> tuple[str, list[Any]]:
    """The names of the tensors that are not None, joined, and these tensors."""
    present = [(name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor is not None]
    return " ".join(name for name, _ in present), [tensor for _, tensor in present]


def _lower_linear(x: Any, bias: Any, *weight: Any) -> Any:
    if for_cpp():
        return fallback_handler(_LINEAR, add_to_fallback_set=False)(x, bias, *weight)
    data, scales, base, arranged, factor, counters, expanded, name, outputs, ways, _, _ = weight
    (rows, inputs), dtype = x.get_size(), x.get_dtype()
    way = _fixed_way(x, ways, rounds=True)
    if way is not None and _is_on_gpu(x.get_device()) and way.strategy == "fused":
        if _fits_into(way, rows, dtype, bias):
            optional, more = _present(("bias", "base"), (bias, base))
            types = (str(arranged.get_dtype()), len(factor.get_size()), None if bias is None else str(bias.get_dtype()))
            key = ("fused", name, outputs, int(inputs), int(rows), types, optional, ways)
            read = [x, data, scales, arranged, factor, counters, *more]
            return call_into(_IMPORT, _function(key), read, [rows, outputs], dtype)
    elif way is not None and _is_on_gpu(x.get_device()):
        numbers = _numbers(way, data, scales, base, expanded, name, (outputs, inputs), dtype)
        if numbers is not None:
            across = lowerings[_aten.permute.default](numbers, [1, 0])
            if bias is None:
                return lowerings[_aten.mm.default](x, across)
            return lowerings[_aten.addmm.default](to_dtype(bias, dtype), x, across)
    optional, present = _present(TENSORS, (bias, *weight[:7]))
    function = _function(("linear", optional, *weight[7:]))
    return call_returned(_IMPORT, function, [x, *present], [rows, outputs], dtype)


def _lower_gradient(grad: Any, *weight: Any) -> Any:
    if for_cpp():
        return fallback_handler(_GRADIENT, add_to_fallback_set=False)(grad, *weight)
    data, scales, base, _, _, _, expanded, name, inputs, ways, _, _ = weight
    (rows, outputs), dtype = grad.get_size(), grad.get_dtype()
    way = _fixed_way(grad, ways, rounds=False)
    if way is not None and _is_on_gpu(grad.get_device()):
        numbers = _numbers(way, data, scales, base, expanded, name, (outputs, inputs), dtype)
        if numbers is not None:
            return lowerings[_aten.mm.default](grad, numbers)
    optional, present = _present(TENSORS[1:], weight[:7])
    function = _function(("input_gradient", optional, *weight[7:]))
    return call_returned(_IMPORT, function, [grad, *present], [rows, inputs], dtype)


def _fixed_way(x: Any, ways: str, *, rounds: bool) -> ProductWay | None:
    """How the product of x runs (kernel or decoding); None where x has no fixed size, or is rounded first."""
    if any(getattr(size, "free_symbols", ()) for size in x.get_size()):
        return None
    way = way_at(ways, int(x.get_size()[0]))
    return way if way.input is None or not rounds else None


def _is_on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _fits_into(way: ProductWay, rows: Any, dtype: torch.dtype, bias: Any) -> bool:
    """Whether the kernel can be bound for this product, so that it writes into given memory."""
    is_narrow = rows <= WIDEST_TILE if way.launch is None else way.launch["rows"] <= WIDEST_TILE
    of_bias = None if bias is None else bias.get_dtype()
    return bool(rows > 0 and is_narrow) and dtype == torch.bfloat16 and of_bias in (None, dtype, torch.float32)


def _numbers(
    way: ProductWay,
    data: Any,
    scales: Any,
    base: Any,
    expanded: Any,
    name: str,
    shape: tuple[Any, Any],
    dtype: torch.dtype,
) -> Any:
    """The matrix in this type: as it is kept, or decoded; None where there is no kernel for it."""
    if way.strategy in ("eager", "tile_cache"):
        return expanded if expanded is not None and expanded.get_dtype() == dtype else None
    if not has_decoder(get_format(name), data.get_device(), (int(shape[0]), int(shape[1])), dtype):
        return None
    optional, more = _present(("base",), (base,))
    key = ("decode", name, int(shape[0]), int(shape[1]), str(dtype).removeprefix("torch."), optional)
    return call_into(_IMPORT, _function(key), [data, scales, *more], shape, dtype)


def _with_rounded_input(x: Tensor, bias: Tensor | None, *weight: Any) -> Any:
    """The product with its input rounded by plain operations that compile; NotImplemented without rounding."""
    data, scales, *_, name, outputs, ways, _, _ = weight
    way = way_at(ways, x.shape[0]) if isinstance(x.shape[0], int) and x.shape[0] else None
    if way is None or way.input is None or not _is_on_gpu(x.device):
        return NotImplemented
    if way.strategy == "fp8":
        if name != FP8_INPUT:
            data, scales = torch.ops.bitplan.e4m3_rows(data, scales, name, x.shape[1])
        return product_of_rows(*token_codes(x, FP8_INPUT), data, scales, bias)
    plain = text_of([(None, Pick(way.strategy, "", way.launch))])
    return _LINEAR(round_input(x, way.input), bias, *weight[:8], outputs, plain, *weight[10:])


for _table in (decomposition.decompositions, decomposition.select_decomp_table()):
    _table[_LINEAR] = _with_rounded_input
register_lowering(_LINEAR, type_promotion_kind=None)(_lower_linear)
register_lowering(_GRADIENT, type_promotion_kind=None)(_lower_gradient)
