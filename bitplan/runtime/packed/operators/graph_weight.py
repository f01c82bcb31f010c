"""Tensors made from a packed weight that a compiled graph reads, as buffers: a CUDA graph then need not copy them.

They are made outside of the graph: when the graph is traced, or by an earlier call. They are not saved, copied or
moved: a change of the weight drops them, and a graph that finds none is traced again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bitplan.kernels.matmul.fused import Prepared
from bitplan.runtime.packed_weight import PackedWeight

PREPARED = ("arranged", "factor", "counters")


class GraphWeight(nn.Module):
    """Buffers `arranged`, `factor` and `counters` of the fused kernel, and `expanded`, the numbers; or None."""

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
