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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bitplan.runtime.streaming.errors import StreamError


class StreamedWeights(Protocol):
    """An object that knows where streamed weights lie, and loads them again."""

    @property
    def serial(self) -> int:
        """A number that changes whenever weights or formats may change: at each step."""

    def owner_of(self, storage: int) -> tuple[int, bool] | None:
        """The block whose weights lie in this storage, and whether the storage is the scratch."""

    def buffer_with(self, block: int, *, in_scratch: bool, serial: int) -> Tensor:
        """The buffer that holds the block now, loaded if need be."""


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """A saved tensor that lies in a block's bytes."""

    block: int
    in_scratch: bool
    serial: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def restore(self, source: StreamedWeights) -> Tensor:
        buffer = source.buffer_with(self.block, in_scratch=self.in_scratch, serial=self.serial)
        return buffer.view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class _Passed:
    """What the outer hook made of a tensor, and the function that undoes it."""

    value: Any
    unpack: Callable[[Any], Tensor]


def save_weights_by_place(source: StreamedWeights) -> torch.autograd.graph.saved_tensors_hooks:
    """The context in which a streamed block computes."""
    outer = outer_hooks()

    def pack(tensor: Tensor) -> Any:
        if tensor.layout == torch.strided and (owner := source.owner_of(tensor.untyped_storage().data_ptr())):
            block, in_scratch = owner
            return SavedWeight(
                block,
                in_scratch,
                source.serial,
                int(tensor.storage_offset()),
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
            )
        return tensor if outer is None else _Passed(outer[0](tensor), outer[1])

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, SavedWeight):
            return saved.restore(source)
        tensor: Tensor = saved.unpack(saved.value) if isinstance(saved, _Passed) else saved
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def check_torch() -> None:
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        raise StreamError(
            f"torch {torch.__version__} does not tell which saved-tensor hooks are active, without which checkpointing "
            "of streamed blocks cannot be right; use torch 2.11 or newer"
        )


def outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The innermost saved-tensor hooks that are active now."""
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = (
        torch._C._autograd._top_saved_tensors_default_hooks(True)
    )
    return hooks
