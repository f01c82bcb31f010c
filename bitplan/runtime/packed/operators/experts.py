"""bitplan::packed_experts and its gradient: rows times the packed matrices of their experts, as graphs see them.

    pairs = torch.ops.bitplan.packed_experts(x, bias, expert_ids, data, scales, base, arranged, factor, counters, ...)

x [tokens, inputs], or [pairs, inputs] with `per_pair`; the result [pairs, outputs] is in the order of pairs, token by
token. `linear` describes the weight's tensors and `ways`; the counts in `ways` are pairs here. The gradient is with
respect to x and bias; there is no second derivative, and asking for one is an error.

All ways but the fused one read the ids on the host: on a GPU they wait, and cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.formats import Encoded, get_format
from bitplan.runtime.packed.expert_products import ExpertMatrices, Routes, gradient_of_rows, looped_rows
from bitplan.runtime.packed.operators.launch_choices import ProductWay, way_at
from bitplan.runtime.packed.operators.linear import CHANGED, find_cache, find_weight, versions_of
from bitplan.runtime.packed.product_strategy import LayerError

_WEIGHT = (
    "Tensor data, Tensor scales, Tensor? base, Tensor? arranged, Tensor? factor, Tensor? counters, Tensor? expanded, "
    "str format, int {width}, bool per_pair, str ways, int weight, int cache"
)


def _numbers(arguments: tuple[Any, ...], shape: tuple[int, ...], way: ProductWay) -> tuple[Encoded, Any]:
    """The packed stack, and a function that gives an expert's numbers."""
    data, scales, base, _, _, _, expanded, name, _, _, _, weight, cache = arguments
    encoded = Encoded(get_format(name), shape, data, scales, base)
    if way.strategy == "eager" and expanded is not None:
        return encoded, lambda index, _dtype: expanded[index]
    if way.strategy == "tile_cache":
        matrices, tiles = ExpertMatrices(find_weight(weight)), find_cache(cache)
        return encoded, lambda index, dtype: matrices.cached(tiles, index, dtype)
    return encoded, lambda index, dtype: ExpertMatrices.decoded_of(encoded, index, dtype)


def _packed_experts(x: Tensor, bias: Tensor | None, expert_ids: Tensor, *weight: Any) -> Tensor:
    outputs, per_pair, ways = weight[8:11]
    way = way_at(ways, expert_ids.numel())
    shape = (weight[0].shape[0], outputs, x.shape[1])
    routes = Routes(expert_ids, shape[0], "packed_experts")
    if way.strategy == "fused":
        from bitplan.kernels.matmul.fused_few_rows import ArrangedScales, fused_experts

        if bias is not None and bias.dtype != torch.float32:
            bias = bias.to(x.dtype)
        encoded = Encoded(get_format(weight[7]), shape, *weight[:3])
        arranged = ArrangedScales(*weight[3:6])
        return fused_experts(x.contiguous(), encoded, arranged, routes.fused, bias, per_pair=per_pair)
    _, numbers = _numbers(weight, shape, way)
    groups = routes.groups
    rows = x[groups.order if per_pair else groups.order // routes.top_k]
    bias = None if bias is None else bias.to(x.dtype)
    return looped_rows(rows, bias, routes, numbers, outputs)[groups.place]


def _packed_experts_gradient(grad: Tensor, expert_ids: Tensor, *weight: Any) -> Tensor:
    """[pairs, inputs]: the gradient of each pair's row."""
    inputs, _, ways = weight[8:11]
    way = way_at(ways, expert_ids.numel())
    shape = (weight[0].shape[0], grad.shape[1], inputs)
    routes = Routes(expert_ids, shape[0], "packed_experts")
    _, numbers = _numbers(weight, shape, way)
    return gradient_of_rows(grad[routes.groups.order], routes, numbers, inputs)[routes.groups.place]


def _fake_experts(x: Tensor, _bias: Tensor | None, expert_ids: Tensor, *weight: Any) -> Tensor:
    return x.new_empty((expert_ids.numel(), weight[8]))


def _fake_gradient(grad: Tensor, _expert_ids: Tensor, *weight: Any) -> Tensor:
    return grad.new_empty((grad.shape[0], weight[8]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, bias, expert_ids, *weight = inputs
    ctx.save_for_backward(expert_ids)
    ctx.weight, ctx.inputs = tuple(weight), x.shape[1]
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.versions = versions_of(ctx.weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (expert_ids,) = ctx.saved_tensors
    if versions_of(ctx.weight) != ctx.versions:
        raise LayerError(CHANGED)
    for_x = for_bias = None
    if ctx.needs_input_grad[0]:
        weight = (*ctx.weight[:8], ctx.inputs, *ctx.weight[9:])
        for_x = torch.ops.bitplan.packed_experts_gradient(grad, expert_ids, *weight)
        if not ctx.weight[9]:
            for_x = for_x.unflatten(0, (-1, expert_ids.shape[1])).sum(1)
    if ctx.needs_input_grad[1]:
        shape, dtype = ctx.bias
        wide = torch.promote_types(grad.dtype, torch.float32)
        for_bias = grad.new_zeros(shape, dtype=wide).index_add(0, expert_ids.reshape(-1), grad.to(wide)).to(dtype)
    return for_x, for_bias, *(None,) * 14


def _refuse(*_: Any) -> Any:
    raise LayerError("packed experts have no second derivative; take gradients of a gradient through other layers only")


_library = torch.library.Library("bitplan", "FRAGMENT")
_OUTPUTS, _INPUTS = (_WEIGHT.format(width=width) for width in ("outputs", "inputs"))
_library.define(f"packed_experts(Tensor x, Tensor? bias, Tensor expert_ids, {_OUTPUTS}) -> Tensor")
_library.define(f"packed_experts_gradient(Tensor grad, Tensor expert_ids, {_INPUTS}) -> Tensor")
_library.impl("packed_experts", _packed_experts, "CompositeExplicitAutograd")
_library.impl("packed_experts_gradient", _packed_experts_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("bitplan::packed_experts", _fake_experts, lib=_library)
torch.library.register_fake("bitplan::packed_experts_gradient", _fake_gradient, lib=_library)
torch.library.register_autograd("bitplan::packed_experts", _backward, setup_context=_save, lib=_library)
torch.library.register_autograd("bitplan::packed_experts_gradient", _refuse, lib=_library)
