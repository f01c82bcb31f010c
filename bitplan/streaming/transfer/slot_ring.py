"""SlotRing: the device memory that blocks pass through, allocated once and filled again and again; SlotDecoder: the
weights in it.

A slot is a flat byte buffer that holds one block in whatever formats it has. Ring slots are all of the same size and
change their block; a resident block has a slot of its own for good. Beside them lies one scratch buffer for decoded
weights: all computation is on one stream, so the kernels that read the last block's weights were queued before the next
block's decoding. Where memory is plentiful, resident blocks have scratch of their own, and are decoded once.

A slot may be overwritten after its `free_after` mark, which is taken when the computation moves on to another block.
The copy stream waits for that mark; the host never does.

Views of weights are made once, and decoding is recorded once. A block of seven matrices takes seven decoders, and each
launch costs the host 50 to 100 us: at 1,000 tokens a step that is more than the GPU needs to compute the block. But the
addresses repeat: there are a few slots, one scratch, and few distinct layouts. So for each pair of slot and layout the
tensors are kept, and on CUDA the launches are recorded in a graph, which one call replays. The first decoding of a
layout, in whatever slot, compiles kernels and is not recorded.

No buffer requires gradients, so nothing needs torch.no_grad(), which Ctrl-C could leave on for the rest of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.base.records import on_failure
from bitplan.streaming.find_blocks import BlockLayout
from bitplan.streaming.saved_tensors import Spans, ViewLayout
from bitplan.streaming.transfer.copies import Transfer, Worker
from bitplan.streaming.transfer.devices import Copied, Mark, StreamDevice
from bitplan.streaming.transfer.host_memory import HostBlocks, exact_buffer


class SlotDecoder:
    """The weights of blocks in slots. Everything kept here is for one set of buffers: `forget` it when they change."""

    def __init__(self) -> None:
        self._layouts: list[BlockLayout] = []
        self._alike: list[int] = []  # the first block with the same layout
        self._weights: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._views: dict[tuple[int, ViewLayout], Tensor] = {}
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

    def view(self, buffer: Tensor, layout: ViewLayout) -> Tensor:
        """A view of a buffer with the layout that autograd saved for a tensor."""
        key = (buffer.data_ptr(), layout)
        view = self._views.get(key)
        if view is None:
            with torch.inference_mode(False):
                view = buffer.view(layout.dtype).as_strided(layout.size, layout.stride, layout.offset)
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
        """Decode a block into memory that holds it alone: nothing is recorded."""
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


Waiting = Callable[[], None]


@dataclass(eq=False)
class RingSlot:
    """A buffer, the block it holds or is being filled with, and when it may be overwritten."""

    buffer: Tensor
    free_after: Mark
    block: int | None = None
    transfer: Transfer | None = None
    scratch: Tensor | None = None  # its own, of a resident block
    is_decoded: bool = False  # there

    def hold(self, block: int | None, transfer: Transfer | None) -> None:
        """Record that this slot holds another block from now on, or the same one anew."""
        self.block, self.transfer, self.is_decoded = block, transfer, False


class SlotRing:
    """The device's memory for blocks: slots that hold a block each, and a scratch for decoded weights."""

    def __init__(
        self,
        device: StreamDevice,
        ring: int,
        slot_bytes: int,
        resident: Mapping[int, int],
        scratch_bytes: int,
        decoded: Mapping[int, int] | None = None,
    ) -> None:
        """Allocate slots; `resident`: bytes of blocks with slots of their own, `decoded`: of their scratch."""
        self.device, self.slot_bytes = device, slot_bytes
        self.scratch_bytes, self.resident_bytes = scratch_bytes, dict(resident)
        self._buffers: list[Tensor] = []
        self._spans: Spans | None = None  # of these buffers
        with on_failure(self.close):
            self.scratch = self._buffer(scratch_bytes, "the scratch for decoded weights")
            self.slots = [
                RingSlot(self._buffer(slot_bytes, f"slot {index} of {ring}"), device.mark()) for index in range(ring)
            ]
            self.resident = {
                block: RingSlot(self._buffer(nbytes, f"resident block {block}"), device.mark())
                for block, nbytes in resident.items()
            }
            for block, nbytes in (decoded or {}).items():
                self.resident[block].scratch = self._buffer(nbytes, f"decoded weights of resident block {block}")
        self._by_storage = {
            slot.buffer.untyped_storage().data_ptr(): slot for slot in [*self.slots, *self.resident.values()]
        }
        self._scratch_storage = self.scratch.untyped_storage().data_ptr()
        self._by_scratch = {
            slot.scratch.untyped_storage().data_ptr(): block
            for block, slot in self.resident.items()
            if slot.scratch is not None
        }

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def sizes(self) -> dict[str, int]:
        """The counts and bytes of the slots, by the names of fields of StreamStats."""
        return {
            "vram_bytes": self.nbytes,
            "ring_slots": len(self.slots),
            "slot_bytes": self.slot_bytes,
            "resident_blocks": len(self.resident),
            "decoded_blocks": len(self._by_scratch),
        }

    @property
    def spans(self) -> Spans:
        if self._spans is None:
            self._spans = Spans(self._buffers)
        return self._spans

    @property
    def slot_blocks(self) -> list[int | None]:
        """The block that each ring slot holds or is being filled with; None where it is empty."""
        return [slot.block for slot in self.slots]

    def find(self, block: int) -> RingSlot | None:
        """The slot that holds a block, or is being filled with it."""
        if block in self.resident:
            slot = self.resident[block]
            return slot if slot.block == block else None
        return next((slot for slot in self.slots if slot.block == block), None)

    def owner(self, storage: int) -> tuple[int, bool] | None:
        """Which block's weights lie in a storage (by address; -1: the common scratch), and whether they are decoded."""
        if not storage:  # empty tensors have no address
            return None
        if storage == self._scratch_storage:
            return -1, True
        if storage in self._by_scratch:
            return self._by_scratch[storage], True
        slot = self._by_storage.get(storage)
        return None if slot is None or slot.block is None else (slot.block, False)

    def forget(self, blocks: Collection[int] | None = None) -> None:
        """Have blocks (None: all) loaded again: the host's bytes changed, or a step was interrupted."""
        for slot in [*self.slots, *self.resident.values()]:
            if blocks is None or slot.block in blocks:
                slot.hold(None, None)

    def scratch_of(self, block: int | None) -> Tensor:
        """The buffer for a block's decoded weights: its own if it is resident and has one, else the ring's."""
        slot = None if block is None else self.resident.get(block)
        return self.scratch if slot is None or slot.scratch is None else slot.scratch

    def drop_scratch(self, block: int) -> None:
        """Decode a resident block into the common scratch from now on."""
        slot = self.resident[block]
        if slot.scratch is not None:
            self._drop(slot.scratch)
            del self._by_scratch[slot.scratch.untyped_storage().data_ptr()]
            slot.scratch, slot.is_decoded = None, False

    def resize_resident(self, block: int, nbytes: int) -> None:
        """Give a resident block a new, empty buffer; copies into the old one must be done or waited for."""
        old = self.resident.pop(block)
        scratch = old.scratch
        self._release(old)
        self._drop(old.buffer)
        del self._by_storage[old.buffer.untyped_storage().data_ptr()]
        del old  # freed before the new one: both may not fit together
        slot = RingSlot(self._buffer(nbytes, f"resident block {block}"), self.device.mark(), scratch=scratch)
        self.resident[block], self.resident_bytes[block] = slot, nbytes
        self._by_storage[slot.buffer.untyped_storage().data_ptr()] = slot

    def close(self) -> None:
        """Free the memory; its next user runs after the copies that are still under way."""
        for slot in [*getattr(self, "slots", []), *getattr(self, "resident", {}).values()]:
            self._release(slot)
        for buffer in self._buffers:
            self.device.give_back(buffer)
        self._buffers = []
        self.slots, self.resident = [], {}

    def _release(self, slot: RingSlot) -> None:
        if slot.transfer is not None and slot.transfer.copied is not None:
            self.device.wait(slot.transfer.copied)

    def _buffer(self, nbytes: int, what: str) -> Tensor:
        buffer = self.device.allocate(nbytes, what)
        self._buffers.append(buffer)
        self._spans = None
        return buffer

    def _drop(self, dropped: Tensor) -> None:
        self._buffers = [buffer for buffer in self._buffers if buffer is not dropped]
        self._spans = None
        self.device.give_back(dropped)


class Uploader:
    """Starts transfers: at once where memory is pinned, else through staging buffers on the transfer thread."""

    STAGING_BUFFERS = 2  # one is read from the host while the other crosses the bus

    def __init__(self, device: StreamDevice, host: HostBlocks, worker: Worker) -> None:
        self.device, self.host, self.worker = device, host, worker
        self._staging: list[Tensor] = []
        self._crossing: list[Mark | None] = []
        self._turn = 0

    def resize(self, slot_bytes: int) -> None:
        """Make staging buffers for blocks of up to this size."""
        if self.host.needs_staging and (not self._staging or self._staging[0].nbytes < slot_bytes):
            self.close()
            self._staging = [exact_buffer(slot_bytes) for _ in range(self.STAGING_BUFFERS)]
            self._crossing = [None] * self.STAGING_BUFFERS
            for buffer in self._staging:
                self.device.pin(buffer)

    def start(
        self, slot: RingSlot, block: int, name: str, nbytes: int, what: str, *, is_fresh: Waiting | None
    ) -> Transfer:
        """Fill a slot with a block. `is_fresh` waits, on the transfer thread, until the host's bytes are up to date."""
        after = slot.free_after
        transfer = Transfer(what, after)
        slot.hold(block, transfer)
        self.device.claim(slot.buffer)

        def copy() -> None:
            if slot.transfer is not transfer:  # the walk turned, and the slot was given to another block
                transfer.launched.set()
                return
            transfer.launch(lambda: self._copy(slot, name, nbytes, after, is_fresh))

        if self.device.copies_in_background and not self.host.needs_staging and is_fresh is None:
            copy()
        else:
            self.worker.submit(copy, what)
        return transfer

    def close(self) -> None:
        for buffer, crossing in zip(self._staging, self._crossing, strict=True):
            if crossing is not None:
                self.device.finish(crossing)
            self.device.unpin(buffer)
        self._staging, self._crossing = [], []

    def _copy(self, slot: RingSlot, name: str, nbytes: int, after: Mark, is_fresh: Waiting | None) -> Copied:
        if is_fresh is not None:
            is_fresh()
        if not self.host.needs_staging:
            return self.device.copy_in(slot.buffer[:nbytes], self.host.source(name, None), after)
        turn = self._turn
        self._turn = (turn + 1) % self.STAGING_BUFFERS
        crossing = self._crossing[turn]
        if crossing is not None:
            self.device.finish(crossing)
        source = self.host.source(name, self._staging[turn])
        copied = self.device.copy_in(slot.buffer[:nbytes], source, after)
        self._crossing[turn] = copied.end
        return copied
