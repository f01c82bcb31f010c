"""bitplan::packed_linear and its gradient: products with a packed matrix, as torch.compile and torch.export see them.

    y = torch.ops.bitplan.packed_linear(x, bias, data, scales, base, arranged, factor, counters, expanded, ...)

The weight comes as plain tensors: its parts; the tensors that `FusedMatmul.prepare` makes for the fused kernel
(`arranged`, `factor`, `counters`); and, if the weight is kept expanded, its numbers (`expanded`). Format, outputs and
`ways` (`product_strategy`) are constants. `weight` and `cache` name a PackedWeight and a TileCache of this process, for
tiles; both are 0 in a graph, whose tiles are pinned and come as `expanded`.

torch's compiler calls both past the dispatcher (`inductor_lowering`).

The gradient of the input is a second operator, whose own gradient is the first operator again, so second derivatives
exist. It expands the weight again, or reads `expanded`, and refuses a weight that was written since the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from bitplan.base.compiled_code import register_lowerings
from bitplan.base.weight_changes import writes_of
from bitplan.formats import Encoded, get_format
from bitplan.formats.dispatch import rounded
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.product_strategy import LayerError, ProductWay, compute_dtype, is_capturing, way_at
from bitplan.packed.products.cpu_matmul import piece_rows
from bitplan.packed.products.decode_row_slices import (
    Piece,
    decoded_pieces,
    gradient_over_pieces,
    linear_over_pieces,
)
from bitplan.packed.products.fp8_rows import fp8_linear
from bitplan.packed.products.fused import Bound, Prepared, fused_for
from bitplan.packed.tile_cache import TileCache

_WEIGHT = (
    "Tensor data, Tensor? scales, Tensor? base, Tensor? arranged, Tensor? factor, Tensor? counters, Tensor? expanded, "
    "str format, int {width}, str ways, int weight, int cache"
)
CHANGED = "a packed weight was written between forward and backward; run backward first, or the forward again"
_GONE = "strategy 'tile_cache': the layer that this product belongs to is gone; run it again"
_LOWERINGS = "bitplan.packed.inductor_lowering"
_MOST_BOUND = 16384
_bound: dict[tuple[Any, ...], Bound] = {}
_weights: WeakValueDictionary[int, PackedWeight] = WeakValueDictionary()
_caches: WeakValueDictionary[int, TileCache] = WeakValueDictionary()


PREPARED = ("arranged", "factor", "counters")


class GraphWeight(nn.Module):
    """Tensors made from a packed weight that a compiled graph reads, as buffers: a CUDA graph then need not copy them.

    `arranged`, `factor` and `counters` of the fused kernel, and `expanded`, the numbers; or None. They are made outside
    of the graph: when it is traced, or by an earlier call. They are not saved, copied or moved: a change of the weight
    drops them, and a graph that finds none is traced again.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in (*PREPARED, "expanded"):
            self.register_buffer(name, None, persistent=False)

    @property
    def is_prepared(self) -> bool:
        return self._buffers["arranged"] is not None

    def hold_prepared(self, weight: PackedWeight, prepared: Prepared) -> None:
        weight.add_listener(self)
        self._buffers.update(zip(PREPARED, (*prepared, None, None)[:3], strict=True))

    def hold_expanded(self, weight: PackedWeight, expanded: Tensor) -> None:
        weight.add_listener(self)
        self._buffers["expanded"] = expanded

    def drop(self, token: int) -> None:
        self._buffers.update(dict.fromkeys((*PREPARED, "expanded")))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GraphWeight:
        self.drop(0)  # a cast of the model must not touch the type of scales
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphWeight, ()


def remember(weight: PackedWeight, cache: TileCache) -> None:
    """Register a weight and a cache under their tokens (numbers), by which operators in graphs find them."""
    _weights[weight.token] = weight
    _caches[cache.token] = cache


def find_weight(token: int) -> PackedWeight:
    weight = _weights.get(token)
    if weight is None:
        raise LayerError(_GONE)
    return weight


def find_cache(token: int) -> TileCache:
    cache = _caches.get(token)
    if cache is None:
        raise LayerError(_GONE)
    return cache


class Matrix(NamedTuple):
    """A packed matrix as an operator gets it; the order of its fields is that of the operator's arguments."""

    data: Tensor
    scales: Tensor | None
    base: Tensor | None
    prepared: Prepared
    expanded: Tensor | None
    format: str
    shape: tuple[int, int]
    weight: int = 0
    cache: int = 0

    @property
    def encoded(self) -> Encoded:
        return Encoded(get_format(self.format), self.shape, self.data, self.scales, self.base)

    def pieces(self, way: ProductWay, dtype: torch.dtype) -> Iterator[Piece]:
        """Yield the decoded matrix in pieces of rows."""
        if way.strategy in ("eager", "tile_cache") and self.expanded is not None:
            return iter([(slice(0, self.shape[0]), self.expanded)])
        if way.strategy == "tile_cache":
            return find_cache(self.cache).pieces(find_weight(self.weight), dtype)
        encoded, on_cpu = self.encoded, self.data.device.type == "cpu"
        return decoded_pieces(encoded, dtype, piece_rows(self.shape[1], dtype) if on_cpu else self.shape[0])


def multiply(x: Tensor, bias: Tensor | None, matrix: Matrix, way: ProductWay) -> Tensor:
    """Compute x [rows, inputs] @ W.T + bias in this way, without a gradient."""
    with _no_autocast(x.device):
        if not x.shape[0]:
            return x.new_empty((0, matrix.shape[0]))
        if way.strategy == "fused":
            fused = fused_for(x.device.type, way.input)
            if fused is None:
                raise LayerError(f"strategy 'fused': there is no fused kernel for {x.device.type}")
            return fused.run(x, matrix.encoded, matrix.prepared, bias, way.launch)
        if way.strategy == "fp8":
            return fp8_linear(x, matrix.encoded, bias)
        wide = compute_dtype(x.device, x.dtype)
        bias = None if bias is None else bias.to(wide)
        numbers = x.to(wide) if way.input is None else rounded(x, way.input, wide)
        return linear_over_pieces(numbers, matrix.pieces(way, wide), matrix.shape[0], bias).to(x.dtype)


def input_gradient(grad: Tensor, matrix: Matrix, way: ProductWay) -> Tensor:
    """Compute grad [rows, outputs] @ W, without a gradient of its own."""
    with _no_autocast(grad.device):
        wide = compute_dtype(grad.device, grad.dtype)
        return gradient_over_pieces(grad.to(wide), matrix.pieces(way, wide), matrix.shape[1]).to(grad.dtype)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switches autocast off: it would compute in another type than the inputs', on a CPU in a slow one."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


# ---- the operators ---------------------------------------------------------------------------------------------------


def packed_linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    matrix, ways = _matrix(weight, width="outputs", other=x.shape[1])
    if len(matrix.prepared) < 3 or not x.is_cuda:
        return multiply(x, bias, matrix, way_at(ways, x.shape[0]))
    # A graph calls this often: a bound call is kept for these addresses, and found by all that it depends on.
    addresses = [part.data_ptr() for part in (matrix.data, *matrix.prepared)]
    of_bias = (0, None) if bias is None else (bias.data_ptr(), bias.dtype)
    kind = (matrix.prepared[0].dtype, matrix.prepared[1].dim(), x.dtype, matrix.format, matrix.shape, ways)
    key = (*addresses, *of_bias, x.shape, *kind)
    bound = _bound.get(key)
    if bound is not None:
        y = bound(x, (x.shape[0], matrix.shape[0]))
        if y is not None:
            return y
    way = way_at(ways, x.shape[0])
    y = multiply(x, bias, matrix, way)
    fused = fused_for(x.device.type, way.input) if way.strategy == "fused" and bound is not _never else None
    if fused is not None and x.shape[0] and not is_capturing(x.device):
        if len(_bound) >= _MOST_BOUND:
            _bound.clear()
        _bound[key] = fused.bind(x, matrix.encoded, matrix.prepared, bias, way.launch) or _never
    return y


def _never(_x: Tensor, _shape: Sequence[int]) -> None:
    """Called in place of a bound product where there is none, as for many rows; gives None."""


def packed_input_gradient(grad: Tensor, *weight: Any) -> Tensor:
    matrix, ways = _matrix(weight, width="inputs", other=grad.shape[1])
    return input_gradient(grad, matrix, way_at(ways, grad.shape[0]))


def _matrix(arguments: tuple[Any, ...], *, width: str, other: int) -> tuple[Matrix, str]:
    data, scales, base, arranged, factor, counters, expanded, name, size, ways, weight, cache = arguments
    prepared = tuple(part for part in (arranged, factor, counters) if part is not None)
    shape = (size, other) if width == "outputs" else (other, size)
    return Matrix(data, scales, base, prepared, expanded, name, shape, weight, cache), ways


def _fake_linear(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:  # noqa: ARG001
    register_lowerings(_LOWERINGS)
    return x.new_empty((x.shape[0], weight[8]))


def _fake_gradient(grad: Tensor, *weight: Any) -> Tensor:
    register_lowerings(_LOWERINGS)
    return grad.new_empty((grad.shape[0], weight[8]))


def _save(ctx: Any, weight: tuple[Any, ...], width: int) -> None:
    """Keep the weight for backward in `ctx` itself: torch refuses to save tensors that were made in inference mode."""
    ctx.tensors, ctx.constants, ctx.width = weight[:7], (weight[7], weight[9:]), width
    ctx.versions = versions_of(ctx.tensors)


def _saved(ctx: Any) -> tuple[Any, ...]:
    """The arguments that stand for the weight, as `_save` left them in `ctx`, for another operator."""
    if versions_of(ctx.tensors) != ctx.versions:
        raise LayerError(CHANGED)
    name, rest = ctx.constants
    return (*ctx.tensors, name, ctx.width, *rest)


def versions_of(tensors: Sequence[Any]) -> list[int]:
    """How often each of the weight's own parts was written; tensors that are being traced are left out."""
    return [writes_of(part) for part in tensors[:3] if type(part) is Tensor]


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, bias, *weight = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    _save(ctx, tuple(weight), x.shape[1])


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_bias = ctx.needs_input_grad[:2]
    for_x = torch.ops.bitplan.packed_input_gradient(grad, *_saved(ctx)) if needs_x else None
    for_bias = None
    if needs_bias:
        for_bias = grad.sum(dim=0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(ctx.bias_dtype)
    return for_x, for_bias, *(None,) * 12


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    grad, *weight = inputs
    _save(ctx, tuple(weight), grad.shape[1])


def _gradient_backward(ctx: Any, grad_of_grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.bitplan.packed_linear(grad_of_grad, None, *_saved(ctx)), *(None,) * 12


# ---- torch.func ------------------------------------------------------------------------------------------------------


def _batched(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """The rule for vmap: rows of all samples at once. The weight and the bias are the same for all."""

    def rule(info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        if any(axis is not None for axis in in_dims[1:]):
            raise LayerError(
                "torch.func.vmap over a packed layer: its input may be mapped, its weight and bias may not; "
                "call the layers one after the other"
            )
        samples = x.movedim(in_dims[0], 0)
        return operator(samples.flatten(0, 1), *rest).unflatten(0, (info.batch_size, samples.shape[1])), 0

    return rule


_library = torch.library.Library("bitplan", "FRAGMENT")
_library.define(f"packed_linear(Tensor x, Tensor? bias, {_WEIGHT.format(width='outputs')}) -> Tensor")
_library.define(f"packed_input_gradient(Tensor grad, {_WEIGHT.format(width='inputs')}) -> Tensor")
_library.impl("packed_linear", packed_linear, "CompositeExplicitAutograd")
_library.impl("packed_input_gradient", packed_input_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("bitplan::packed_linear", _fake_linear, lib=_library)
torch.library.register_fake("bitplan::packed_input_gradient", _fake_gradient, lib=_library)
torch.library.register_autograd("bitplan::packed_linear", _linear_backward, setup_context=_save_linear, lib=_library)
torch.library.register_autograd(
    "bitplan::packed_input_gradient", _gradient_backward, setup_context=_save_gradient, lib=_library
)
for _name in ("packed_linear", "packed_input_gradient"):
    torch.library.register_vmap(f"bitplan::{_name}", _batched(getattr(torch.ops.bitplan, _name)), lib=_library)
