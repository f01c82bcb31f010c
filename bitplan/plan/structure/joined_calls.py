"""Layers that read one tensor and run as one product, in a model whose code still calls them one by one.

Queries, keys and values of an attention, gate and up of an MLP: one product of all their weights reads the input once.
Which layers read one tensor is seen in what the model computes (`readers_of_one_tensor`). Packed layers
(`bitplan.packed.fused_projections`) and FP8 layers (`bitplan.fp8.fused_projections`) give out the parts of such a
product in the same way (`SharedProduct`):

    the first layer that is called computes the product of all, takes its part, and leaves the others waiting
    a part is given once, since whoever has it may write into it
    a part is given for the very tensor that the product was computed from, in the same state: nothing was written
    since to the input, or to whatever else its owner names as part of the state

Otherwise the layer is told that there is no part and computes anew, which costs time and never gives a wrong number.
Nothing waits longer than from the first call of a forward to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bitplan.plan.structure.model_view import LinearUse, ModelView


def plain_use(view: ModelView, path: str) -> LinearUse | None:
    """The one product of a module with its own, whole weight; None where the module or its weight is used otherwise."""
    use = view.linear(path)
    if use is None or use.module != path or not use.is_whole or use.experts or use.computed:
        return None
    return use


def readers_of_one_tensor(view: ModelView) -> list[tuple[LinearUse, ...]]:
    """Products of modules of their own that read the very same tensor, in the order of their calls: what can be one."""
    readers: dict[int, list[LinearUse]] = {}
    for linear in view.linears:
        if plain_use(view, linear.path) is linear:
            readers.setdefault(linear.input, []).append(linear)
    return [tuple(group) for group in readers.values() if len(group) > 1]


class SharedProduct:
    """The parts of one product that wait for the layers that they belong to."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)  # outputs of each layer
        # The input, its state, and parts by the number of their layer: one tuple, so that threads do not mix two.
        self._waiting: tuple[Tensor, Any, dict[int, Tensor]] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._waiting is not None

    def clear(self) -> None:
        self._waiting = None

    def part(self, layer: int, x: Tensor, state: Any) -> Tensor | None:
        """Hand out the part of a joined product that was computed for this layer; None if none waits for `x`."""
        waiting = self._waiting
        if waiting is None or waiting[0] is not x or waiting[1] != state:
            return None
        part = waiting[2].pop(layer, None)
        if not waiting[2]:
            self._waiting = None
        return part

    def hand_out(self, layer: int, product: Tensor, x: Tensor, state: Any, *, is_traced: bool) -> Tensor:
        """The part of one layer of a product just computed from x; the others wait.

        Outside of graphs (`is_traced` False) each part is a tensor of its own to autograd and may be written in place.
        """
        split = product.split_with_sizes if is_traced else product.unsafe_split_with_sizes
        parts = dict(enumerate(split(self.sizes, -1)))
        part = parts.pop(layer)
        self._waiting = x, state, parts
        return part

    def __getstate__(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "_waiting": None}  # a copied model does not copy activations
