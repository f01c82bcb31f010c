"""Rows of tokens times the packed matrices of their experts, with gradients with respect to the rows.

A pair is a token and one of the experts it was sent to: pair p = token * top_k + slot. There are two ways:

| way | pairs are in | what runs | waits for the GPU |
|---|---|---|---|
| fused | order of tokens | all pairs in one launch over the packed bytes | forward never, backward once |
| loop | order of expert | a product for each expert that has rows, on its numbers | once per layer and step |

The loop needs that wait: the number of rows of each expert decides what the host launches.

Weights are constants here, so backward needs no saved input: it expands each expert again. The
kernels have no product with the untransposed weight, so the gradient of a fused product runs as the loop does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode
from bitplan.packed.packed_weight import PackedWeight, State
from bitplan.packed.product_strategy import LayerError, is_capturing
from bitplan.packed.tile_cache import TileCache

if TYPE_CHECKING:
    from bitplan.packed.products.expert_routing import Routing
    from bitplan.packed.products.fused_few_rows import ArrangedScales

Numbers = Callable[[int, torch.dtype], Tensor]  # an expert's index -> its matrix [outputs, inputs]


@dataclass(frozen=True)
class ExpertGroups:
    """Pairs sorted by expert: `order` gives the pair at each position, `inverse` the position of each pair.

    `spans` holds (expert, start, stop) of the experts that have rows.
    """

    order: Tensor
    inverse: Tensor
    spans: tuple[tuple[int, int, int], ...]


class Routes:
    """Which expert each pair (token, slot) goes to: ids for the fused kernel, sorted groups for the loop."""

    def __init__(self, expert_ids: Tensor, experts: int, where: str) -> None:
        self.expert_ids = expert_ids.long()
        self.experts = experts
        self.where = where

    @property
    def pairs(self) -> int:
        return self.expert_ids.numel()

    @property
    def top_k(self) -> int:
        return self.expert_ids.shape[1]

    @cached_property
    def fused(self) -> Routing:
        from bitplan.packed.products.expert_routing import route

        return route(self.expert_ids, self.experts)

    @cached_property
    def groups(self) -> ExpertGroups:
        flat = self.expert_ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0], device=order.device)
        slots = flat.clamp(-1, self.experts) + 1  # the first and the last are not experts
        counts = torch.zeros(self.experts + 2, dtype=torch.int64, device=flat.device)
        below, *of_expert, above = counts.scatter_add_(0, slots, torch.ones_like(slots)).tolist()  # waits for a GPU
        if below or above:
            raise LayerError(
                f"{self.where}: expert_ids must lie in 0..{self.experts - 1}, "
                f"got {below} below and {above} above of {flat.numel()}"
            )
        spans, start = [], 0
        for expert, count in enumerate(of_expert):
            if count:
                spans.append((expert, start, start + count))
            start += count
        return ExpertGroups(order, inverse, tuple(spans))


class ExpertMatrices:
    """A PackedWeight [experts, outputs, inputs] seen as its experts; the weight keeps all that is made from it."""

    def __init__(self, packed: PackedWeight) -> None:
        self.packed = packed
        self._state: object = None
        self._encoded: Encoded | None = None

    @property
    def encoded(self) -> Encoded:
        state = (self.packed.token, self.packed.state)
        if self._encoded is None or self._state != state:  # making one checks every part: microseconds
            self._state, self._encoded = state, self.packed.encoded
        return self._encoded

    @property
    def arranged(self) -> ArrangedScales:
        """The scales in the fused kernel's order: about as many bytes again as the scales take."""
        from bitplan.packed.products.fused_few_rows import arrange_scales

        # One for each stream: the kernel may keep counters in the arranged scales.
        device = self.packed.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        make: Any = functools.partial(arrange_scales, self.encoded)
        result: Any = self.packed.derived(("fused", stream), make, keep=not is_capturing(device))
        return cast("ArrangedScales", result)

    def decoded(self, index: int, dtype: torch.dtype) -> Tensor:
        """One expert's numbers, not kept: the allocator gives their memory to the next expert."""
        return self.decoded_of(self.encoded, index, dtype)

    @staticmethod
    def decoded_of(stack: Encoded, index: int, dtype: torch.dtype) -> Tensor:
        parts = {name: part[index] if part.dim() else part for name, part in stack.parts.items()}
        return decode(Encoded(stack.fmt, stack.shape[1:], **parts), dtype)

    def expanded(self, index: int, dtype: torch.dtype) -> Tensor:
        """One expert's matrix; the first call expands the matrices of all experts and keeps them."""
        return self.all_expanded(dtype)[index]

    def all_expanded(self, dtype: torch.dtype) -> Tensor:
        keep = not is_capturing(self.packed.device)
        make: Any = functools.partial(decode, self.encoded, dtype)
        expanded: Tensor = self.packed.derived(("expanded", dtype), make, keep=keep)
        return expanded

    def cached(self, cache: TileCache, index: int, dtype: torch.dtype) -> Tensor:
        """One expert's numbers, as a tile that the cache may keep."""
        self.packed.add_listener(cache)
        outputs = self.packed.shape[1]
        stack: Any = _Stack(self.packed.token, self.packed.state, self.encoded)
        return cache.tile(stack, dtype, slice(index * outputs, (index + 1) * outputs))


class _Stack(NamedTuple):
    """A stack of experts as a TileCache takes a weight: one matrix, the experts one below the other."""

    token: int
    state: State
    experts: Encoded

    @property
    def encoded(self) -> Encoded:
        count, outputs, inputs = self.experts.shape
        parts = {name: part.flatten(0, 1) if part.dim() else part for name, part in self.experts.parts.items()}
        return Encoded(self.experts.fmt, (count * outputs, inputs), **parts)


# ---- the loop --------------------------------------------------------------------------------------------------------


def looped_product(
    rows: Tensor, bias: Tensor | None, routes: Routes, matrices: ExpertMatrices, numbers: Numbers
) -> Tensor:
    """Rows [pairs, inputs], sorted by expert, times the matrices of their experts, plus bias [experts, outputs].

    `numbers` gives an expert's matrix, for the forward and again for the backward.
    """
    apply: Callable[..., Tensor] = _Looped.apply
    return apply(rows, bias, routes, matrices, numbers)


def looped_rows(rows: Tensor, bias: Tensor | None, routes: Routes, numbers: Numbers, outputs: int) -> Tensor:
    """`looped_product` without a gradient."""
    out = rows.new_empty((rows.shape[0], outputs))
    for expert, start, stop in routes.groups.spans:
        matrix = numbers(expert, rows.dtype)
        if bias is None:
            torch.mm(rows[start:stop], matrix.T, out=out[start:stop])
        else:
            torch.addmm(bias[expert], rows[start:stop], matrix.T, out=out[start:stop])
    return out


def gradient_of_rows(grad: Tensor, routes: Routes, numbers: Numbers, inputs: int) -> Tensor:
    """The gradient of the input rows, from the gradient of the output rows; both are sorted by expert."""
    gradient = grad.new_empty((grad.shape[0], inputs))
    for expert, start, stop in routes.groups.spans:
        torch.mm(grad[start:stop], numbers(expert, grad.dtype), out=gradient[start:stop])
    return gradient


class _Looped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bias: Tensor | None, routes: Routes, matrices: ExpertMatrices, numbers: Numbers
    ) -> Tensor:
        ctx.gradient = _Gradient(routes, matrices, matrices.packed.state, numbers)
        return looped_rows(rows, bias, routes, numbers, matrices.packed.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        for_rows = ctx.gradient.of_rows(grad) if ctx.needs_input_grad[0] else None
        for_bias = ctx.gradient.of_bias(grad) if ctx.needs_input_grad[1] else None
        return for_rows, for_bias, None, None, None


class _Gradient(NamedTuple):
    """What backward needs of a product; the rows of all gradients are sorted by expert."""

    routes: Routes
    matrices: ExpertMatrices
    state: State
    numbers: Numbers

    def of_rows(self, grad: Tensor) -> Tensor:
        if self.matrices.packed.state != self.state:
            raise LayerError(
                f"{self.routes.where}: a packed weight was moved, loaded or written between forward and backward; "
                "run backward first, or the forward again"
            )
        return gradient_of_rows(grad, self.routes, self.numbers, self.matrices.packed.shape[2])

    def of_bias(self, grad: Tensor) -> Tensor:
        gradient = grad.new_zeros((self.routes.experts, grad.shape[1]))
        for expert, start, stop in self.routes.groups.spans:
            gradient[expert] = grad[start:stop].sum(0)
        return gradient


# ---- the fused launch ------------------------------------------------------------------------------------------------


def fused_product(
    x: Tensor, bias: Tensor | None, routes: Routes, matrices: ExpertMatrices, *, per_pair: bool
) -> Tensor:
    """Multiply x [tokens, inputs], or [pairs, inputs] with `per_pair`, by each pair's own matrix: [pairs, outputs]."""
    apply: Callable[..., Tensor] = _Fused.apply
    return apply(x, bias, routes, matrices, per_pair)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, routes: Routes, matrices: ExpertMatrices, per_pair: bool
    ) -> Tensor:
        from bitplan.packed.products.fused_few_rows import fused_experts

        ctx.gradient = _Gradient(routes, matrices, matrices.packed.state, matrices.decoded)
        ctx.per_pair = per_pair
        if bias is not None and bias.dtype != torch.float32:
            bias = bias.to(x.dtype)
        weight, arranged = matrices.encoded, matrices.arranged
        return fused_experts(x.contiguous(), weight, arranged, routes.fused, bias, per_pair=per_pair)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        routes: Routes = ctx.gradient.routes
        by_expert, for_x = grad[routes.groups.order], None
        if ctx.needs_input_grad[0]:
            for_x = ctx.gradient.of_rows(by_expert)[routes.groups.inverse]
            if not ctx.per_pair:
                for_x = for_x.unflatten(0, (-1, routes.top_k)).sum(1)
        for_bias = ctx.gradient.of_bias(by_expert) if ctx.needs_input_grad[1] else None
        return for_x, for_bias, None, None, None
