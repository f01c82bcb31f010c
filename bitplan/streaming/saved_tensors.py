"""Saves for autograd where to find a streamed block's weights again, instead of the weights themselves.

Autograd saves the tensors that backward needs, weights among them. A streamed weight lies in a slot that soon holds
another block, so a plain saved tensor would be silently wrong. Under these hooks a saved tensor that lies in a slot
or in the scratch (the weight itself, its transpose, a slice) is kept as block and byte offset, and looked up again when
backward asks: the block is then loaded if need be, by the same path and schedule as in forward. Everything
else is saved as it would have been without us.

That needs care: torch applies only the innermost hooks, so ours would switch off those of non-reentrant checkpointing,
and every activation would stay. Our hooks therefore call the outer ones. So one mechanism is correct in all cases:
without checkpointing, under both kinds of it, with regions of several blocks, and with save_on_cpu. Nothing is computed
twice except what checkpointing itself recomputes.

Reaching the outer hooks takes a function of torch that is not public (`_top_saved_tensors_default_hooks`, since
2.8); a torch without it is refused when streaming starts, not in the middle of a backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bitplan.base.errors import StreamError


class Spans:
    """Buffers, by the addresses of their first bytes, in order, and of the bytes behind them."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in buffers if one.nbytes)
        self.starts, self.ends = [start for start, _ in spans], [end for _, end in spans]

    def start_of(self, tensor: Tensor) -> int | None:
        """The address of the buffer that a tensor lies in; None if it lies elsewhere."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a sparse tensor; asking for the layout of each would take longer than all else here
            return None
        at = bisect_right(self.starts, address) - 1
        return self.starts[at] if at >= 0 and address < self.ends[at] else None


class StreamedWeights(Protocol):
    """An object that knows where streamed weights lie, and loads them again."""

    @property
    def serial(self) -> int:
        """A number that changes whenever weights or formats may change: at each step."""

    @property
    def spans(self) -> Spans:
        """The memory in which streamed weights lie."""

    def owner_of(self, storage: int) -> tuple[int, bool] | None:
        """The block whose weights lie in this storage, and whether the storage is the scratch."""

    def view(self, block: int, layout: ViewLayout, *, in_scratch: bool, serial: int) -> Tensor:
        """A part of the buffer that holds the block now, loaded if need be."""


class ViewLayout(NamedTuple):
    """Where a tensor lies in its storage; the offset counts numbers."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SavedWeight(NamedTuple):
    """What autograd saves in place of a streamed weight: block, layout and step, by which it is found again."""

    block: int
    in_scratch: bool
    serial: int
    layout: ViewLayout


class _Passed(NamedTuple):
    """A tensor saved through another library's hooks: what their pack hook returned, and their unpack hook."""

    value: Any
    unpack: Callable[[Any], Tensor]


def save_where_weights_lie(source: StreamedWeights) -> torch.autograd.graph.saved_tensors_hooks:
    """Return the context in which a streamed block computes: autograd saves where weights lie, not the weights.

    A block saves some sixty tensors, and each passes here twice: most are told from weights by their address alone.
    """
    outer = outer_hooks()
    start_of = source.spans.start_of

    def pack(tensor: Tensor) -> Any:
        start = start_of(tensor)
        if start is not None and (owner := source.owner_of(start)):
            layout = ViewLayout(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            return SavedWeight(owner[0], owner[1], source.serial, layout)
        return (tensor, tensor._version) if outer is None else _Passed(outer[0](tensor), outer[1])

    def unpack(saved: Any) -> Tensor:
        if type(saved) is tuple:
            return _unwritten(*saved)
        if isinstance(saved, SavedWeight):
            block, in_scratch, serial, layout = saved
            return source.view(block, layout, in_scratch=in_scratch, serial=serial)
        passed: Tensor = saved.unpack(saved.value)
        return passed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _unwritten(tensor: Tensor, version: int) -> Tensor:
    """A saved tensor; one that was written to since is refused, as torch does where no hooks are."""
    if tensor._version != version:
        raise StreamError(
            "one of the variables needed for gradient computation in a streamed block has been modified by an inplace "
            f"operation: {tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')} is at version "
            f"{tensor._version}, expected {version}; write x = x + y in place of x += y where x is needed as it was"
        )
    return tensor


def in_backward() -> bool:
    """Whether autograd runs this call, as it does where checkpointing computes a block again."""
    return bool(torch._C._current_graph_task_id() != -1)


def refuse_second_derivatives(where: str) -> None:
    """Refuse a backward that keeps a graph of its own: it would save weights themselves, without the hooks here."""
    if torch.is_grad_enabled() and in_backward():
        raise StreamError(
            f"{where}: create_graph=True (a gradient penalty, a second derivative) keeps streamed weights beyond their "
            "time on the device; call backward or torch.autograd.grad without it, or train without streaming"
        )


def check_torch() -> None:
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        raise StreamError(
            f"torch {torch.__version__} does not tell which saved-tensor hooks are active, without which checkpointing "
            "of streamed blocks cannot be right; use torch 2.11 or newer"
        )


def outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The pack and unpack hooks for saved tensors that other code has set last; None if there are none."""
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = (
        torch._C._autograd._top_saved_tensors_default_hooks(True)
    )
    return hooks
