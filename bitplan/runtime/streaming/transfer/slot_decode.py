"""Decodes a slot's bytes to a block's weights: views are made once, and decoding is recorded once.

A block of seven matrices takes seven decoders, and each launch costs the host 50 to 100 us: at 1,000 tokens a step that
is more than the GPU needs to compute the block. But the addresses repeat: there are a few slots, one scratch, and few
distinct layouts. So for each pair of slot and layout the tensors are kept, and on CUDA the launches are recorded in a
graph, which one call replays. The first decoding of a layout, in whatever slot, compiles kernels and is not recorded.

No buffer requires gradients, so nothing needs torch.no_grad(), which Ctrl-C could leave on for the rest of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitplan.runtime.streaming.blocks.layout import BlockLayout
from bitplan.runtime.streaming.blocks.saved_tensors import Place


class SlotDecoder:
    """The weights of blocks in slots. Everything kept here is for one set of buffers: `forget` it when they change."""

    def __init__(self) -> None:
        self._layouts: list[BlockLayout] = []
        self._alike: list[int] = []  # the first block with the same layout
        self._weights: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._views: dict[tuple[int, Place], Tensor] = {}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        # Whether a layout (by its first block) that has been decoded can be recorded: formats without a kernel of their
        # own are decoded by torch, which may copy constants, and no graph records that.
        self._can_record: dict[int, bool] = {}
        self._stream: torch.cuda.Stream | None = None

    def forget(self, layouts: Sequence[BlockLayout] = ()) -> None:
        """Drop everything: the buffers or the layouts have changed."""
        self._layouts = list(layouts)
        self._alike = [self._layouts.index(layout) for layout in self._layouts]
        self._weights.clear()
        self._views.clear()
        self._graphs.clear()
        self._can_record.clear()

    def weights(self, block: int, slot: Tensor, scratch: Tensor) -> dict[str, Tensor]:
        """The block's parameters: views of the slot, or of the scratch, where `decode` writes them."""
        key = (slot.data_ptr(), self._alike[block])
        weights = self._weights.get(key)
        if weights is None:
            pieces = self._layouts[block].pieces
            with torch.inference_mode(False):  # the tensors are kept, and must work with gradients too
                weights = {name: piece.weight(slot, scratch) for name, piece in pieces.items()}
            self._weights[key] = weights
        return weights

    def view(self, buffer: Tensor, place: Place) -> Tensor:
        """A part of a buffer, as autograd saved it."""
        key = (buffer.data_ptr(), place)
        view = self._views.get(key)
        if view is None:
            with torch.inference_mode(False):
                view = buffer.view(place.dtype).as_strided(place.size, place.stride, place.offset)
            self._views[key] = view
        return view

    def decode(self, block: int, slot: Tensor, scratch: Tensor) -> None:
        """Decode parameters that are not sent in their own type into the scratch, on the current stream."""
        layout = self._layouts[block]
        if not layout.scratch_nbytes:
            return
        if not slot.is_cuda:
            layout.decode_into(slot, scratch)
            return
        alike = self._alike[block]
        if not self._can_record.get(alike):
            layout.decode_into(slot, scratch)
            if alike not in self._can_record:
                self._can_record[alike] = layout.has_kernels(slot)
            return
        key = (slot.data_ptr(), alike)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._recorded(layout, slot, scratch)
        graph.replay()

    def decode_once(self, block: int, slot: Tensor, scratch: Tensor) -> None:
        """The same for memory that holds this block alone: nothing is recorded."""
        self._layouts[block].decode_into(slot, scratch)

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
