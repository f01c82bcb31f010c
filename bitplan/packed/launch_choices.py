"""How a product is run, as text: a constant of a compiled graph, read once.

    1:fused outputs=32 rows=8;64:fused;*:decode

1 row: the fused kernel with this launch. Up to 64 rows: the fused kernel with its default launch. More: decoded.
"*:fused input=q8_0_gguf": inputs are rounded to this format.

Tensors made from a packed weight that a compiled graph reads, as buffers: a CUDA graph then need not copy them.

They are made outside of the graph: when the graph is traced, or by an earlier call. They are not saved, copied or
moved: a change of the weight drops them, and a graph that finds none is traced again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from bitplan.base.errors import ArgumentError
from bitplan.packed.crossover import Pick
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.products.fused import Launch, Prepared

# ---- graph weight ----------------------------------------------------------------------------------------------------


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


# ---- launch choices --------------------------------------------------------------------------------------------------


class ProductWay(NamedTuple):
    """A strategy, the launch of its kernel where one was chosen, and the format of inputs, if they are rounded."""

    strategy: str
    launch: Launch | None = None
    input: str | None = None


def text_of(picks: Iterable[tuple[int | None, Pick]], input: str | None = None) -> str:
    """Text of picks, each with the most rows it is for, in rising order; the last pick is for any more (None)."""
    parts = []
    for rows, pick in picks:
        launch = f" input={input}" if input else ""
        launch += "".join(f" {name}={value}" for name, value in (pick.launch or {}).items())
        parts.append(f"{'*' if rows is None else rows}:{pick.strategy}{launch}")
    return ";".join(parts)


def way_at(text: str, rows: int) -> ProductWay:
    """The way for this many rows."""
    for most, way in _read(text):
        if most is None or rows <= most:
            return way
    raise ArgumentError(f"ways {text!r} say nothing of {rows} rows; the last one must be for any number, '*'")


@functools.lru_cache(4096)
def _read(text: str) -> tuple[tuple[int | None, ProductWay], ...]:
    return tuple(_read_one(part, text) for part in text.split(";"))


def _read_one(part: str, text: str) -> tuple[int | None, ProductWay]:
    try:
        rows, _, rest = part.partition(":")
        strategy, *pairs = rest.split()
        values = dict(pair.split("=") for pair in pairs)
        input = values.pop("input", None)
        launch = {name: int(value) for name, value in values.items()}
        return (None if rows == "*" else int(rows)), ProductWay(strategy, launch or None, input)
    except ValueError:
        raise ArgumentError(f"expected ROWS:STRATEGY NAME=NUMBER..., got {part!r} in the ways {text!r}") from None
