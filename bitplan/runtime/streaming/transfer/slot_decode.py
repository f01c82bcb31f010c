"""Decodes a slot's bytes to a block's weights: views are made once, decoding is recorded once, and runs ahead.

A block of seven matrices takes seven decoders, and each launch costs the host 50 to 100 us: at 1,000 tokens a step that
is more than the GPU needs to compute the block. But the addresses repeat: there are a few slots, two scratch buffers,
and few distinct layouts. So for each slot, scratch and layout the tensors are kept, and on CUDA the launches are
recorded in a graph when they come up for the second time (the first time compiles them), and from then on replayed by
one call.

While a block computes with one scratch, the next block is decoded into the other, on a stream of its own. It may be
overwritten after `free_after`, which is marked when the computation moves on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.runtime.streaming.blocks.layout import BlockLayout
from bitplan.runtime.streaming.blocks.saved_tensors import Place
from bitplan.runtime.streaming.transfer.devices import Mark, StreamDevice

Key = tuple[int, int, int]  # addresses of slot and scratch, and the first block with the same layout


@dataclass(eq=False)
class Scratch:
    """A buffer for decoded weights: whose they are, and when they are there, if they were decoded ahead."""

    buffer: Tensor
    free_after: Mark
    block: int | None = None
    ready: Mark | None = None


class SlotDecoder:
    """The weights of blocks in slots. Everything kept here is for one set of buffers: `forget` it when they change."""

    def __init__(self, device: StreamDevice) -> None:
        self.device = device
        self._layouts: list[BlockLayout] = []
        self._alike: list[int] = []  # the first block with the same layout
        self._scratches: list[Scratch] = []
        self._at = 0  # the scratch that the computation uses
        self._weights: dict[Key, dict[str, Tensor]] = {}
        self._views: dict[tuple[int, Place], Tensor] = {}
        self._graphs: dict[Key, torch.cuda.CUDAGraph | None] = {}
        # Formats without a kernel of their own are decoded by torch, which may copy constants: no graph records that,
        # and the memory it takes belongs to the computing stream.
        self._has_kernels: dict[int, bool] = {}
        self._stream: torch.cuda.Stream | None = None

    def forget(self, layouts: Sequence[BlockLayout] = (), scratches: Sequence[Tensor] = ()) -> None:
        """Drop everything: the buffers or the layouts have changed; their next user runs after what is under way."""
        for scratch in self._scratches:
            if scratch.ready is not None:
                self.device.wait_for(scratch.ready)
        self._layouts = list(layouts)
        self._alike = [self._layouts.index(layout) for layout in self._layouts]
        self._scratches = [Scratch(buffer, self.device.mark()) for buffer in scratches]
        self._at = 0
        self._weights.clear()
        self._views.clear()
        self._graphs.clear()
        self._has_kernels.clear()

    def drop(self) -> None:
        """Weights may have changed: what was decoded is worthless."""
        for scratch in self._scratches:
            scratch.block = None

    @property
    def scratch(self) -> Tensor:
        """The buffer with the decoded weights of the current block."""
        return self._scratches[self._at].buffer

    def block_in(self, storage: int) -> int | None:
        """The block whose decoded weights lie in this storage."""
        for scratch in self._scratches:
            if scratch.buffer.untyped_storage().data_ptr() == storage:
                return scratch.block
        return None

    def weights(self, block: int, slot: Tensor) -> dict[str, Tensor]:
        """The block's parameters: views of the slot, or of the scratch, where `decode` writes them."""
        key = self._key(block, slot, self.scratch)
        weights = self._weights.get(key)
        if weights is None:
            pieces = self._layouts[block].pieces
            with torch.inference_mode(False), torch.no_grad():  # the tensors are kept, and must work with gradients too
                weights = {name: piece.weight(slot, self.scratch) for name, piece in pieces.items()}
            self._weights[key] = weights
        return weights

    def view(self, buffer: Tensor, place: Place) -> Tensor:
        """A part of a buffer, as autograd saved it."""
        key = (buffer.data_ptr(), place)
        view = self._views.get(key)
        if view is None:
            with torch.inference_mode(False), torch.no_grad():
                view = buffer.view(place.dtype).as_strided(place.size, place.stride, place.offset)
            self._views[key] = view
        return view

    def decode(self, block: int, slot: Tensor) -> None:
        """Decode parameters that are not sent in their own type, unless that was done ahead; on the current stream."""
        if not self._layouts[block].scratch_nbytes:
            return
        for at, scratch in enumerate(self._scratches):
            if scratch.block == block:
                self._at = at
                if scratch.ready is not None:
                    self.device.wait_for(scratch.ready)
                    scratch.ready = None
                return
        scratch = self._scratches[self._at]  # its last readers are queued on this stream
        scratch.block = scratch.ready = None
        self._run(block, slot, scratch.buffer)
        scratch.block = block

    def decode_ahead(self, block: int, slot: Tensor, copied: Mark | None) -> Mark | None:
        """Decode a block beside the computation, after its copy; returns when the slot was read, if this began."""
        if len(self._scratches) < 2 or not self._layouts[block].scratch_nbytes:
            return None
        scratch = self._scratches[1 - self._at]
        if scratch.block == block or not self._has_kernels.get(self._alike[block], not slot.is_cuda):
            return None
        scratch.block = None
        after = [scratch.free_after] if copied is None else [scratch.free_after, copied]
        scratch.ready = self.device.run_aside(lambda: self._run(block, slot, scratch.buffer), *after)
        scratch.block = block
        return scratch.ready

    def leave(self, mark: Mark) -> None:
        """The computation is done with the current scratch after this mark."""
        if self._scratches:
            self._scratches[self._at].free_after = mark

    def _key(self, block: int, slot: Tensor, scratch: Tensor) -> Key:
        return slot.data_ptr(), scratch.data_ptr(), self._alike[block]

    def _run(self, block: int, slot: Tensor, scratch: Tensor) -> None:
        layout, alike = self._layouts[block], self._alike[block]
        with torch.no_grad():
            if not slot.is_cuda:
                layout.decode_into(slot, scratch)
                return
            key = self._key(block, slot, scratch)
            if not self._has_kernels.get(alike, True) or key not in self._graphs:
                layout.decode_into(slot, scratch)
                self._graphs[key] = None
                if alike not in self._has_kernels:
                    self._has_kernels[alike] = layout.has_kernels(slot)
                return
            graph = self._graphs[key]
            if graph is None:
                graph = self._graphs[key] = self._recorded(layout, slot, scratch)
            graph.replay()

    def _recorded(self, layout: BlockLayout, slot: Tensor, scratch: Tensor) -> torch.cuda.CUDAGraph:
        """Records without `torch.cuda.graph`, which waits for the GPU and empties its cache; nothing is allocated."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(slot.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may copy meanwhile
            try:
                layout.decode_into(slot, scratch)
            finally:
                graph.capture_end()
        return graph
