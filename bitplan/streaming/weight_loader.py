"""WeightLoader: loads the block that is asked for, and prefetches the blocks that come next.

One block is current: the computation uses its weights. Asking for another block ends the use of the current one
(a mark on the computing stream, after which its slot may be overwritten), makes the computation wait for the new
block's copy, decodes into the scratch, and starts the copies that the walk calls for. Forward asks when a block
runs; backward asks when autograd unpacks a saved weight; the two look the same here.

A block that lies in the scratch as a whole (`BlockLayout.leaves_slot`) gives its slot away as soon as it is decoded. It
stays in the scratch until another block is decoded: at the turn from forward to backward, and from one step to the
next, the same block computes twice and is neither sent nor decoded again.

Where every block has memory of its own and none is trained (slots="auto" on a large device), the loader has nothing to
do once all have arrived: from the next step on the weights are `settled`, and blocks take them without a question, a
mark or a hook of autograd's. When they change, graphs that saved them are made invalid as torch does it, by version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bitplan.base.errors import StreamError
from bitplan.base.records import on_failure
from bitplan.streaming.find_blocks import BlockLayout
from bitplan.streaming.saved_tensors import Spans, ViewLayout, refuse_second_derivatives
from bitplan.streaming.telemetry import StepRecorder
from bitplan.streaming.training.host_training import HostTraining
from bitplan.streaming.transfer.activation_offload import ActivationOffload
from bitplan.streaming.transfer.copies import Transfer, Turns, Worker, tensors_in, wait_for
from bitplan.streaming.transfer.devices import StreamDevice
from bitplan.streaming.transfer.host_memory import HostBlocks
from bitplan.streaming.transfer.schedule import (
    FEWEST_SLOTS,
    Load,
    Slots,
    Walk,
    allowed_loads,
    load_now,
    loads_ahead,
    share_decoded,
    share_slots,
)
from bitplan.streaming.transfer.slot_ring import RingSlot, SlotDecoder, SlotRing, Uploader
from bitplan.streaming.transfer.transfer_limits import RuntimeLimitHints


class WeightLoader:
    """Loads blocks into slots of the device as the computation asks; `streaming.transfer.schedule` decides which."""

    def __init__(
        self,
        device: StreamDevice,
        host: HostBlocks,
        names: Sequence[str],
        training: HostTraining | None,
        timeout_s: float,
    ) -> None:
        self.device, self.host, self.names = device, host, list(names)
        self.training, self.timeout_s = training, timeout_s
        self.turns = Turns(timeout_s)
        self.layouts: list[BlockLayout] = []
        self.recorder: StepRecorder | None = None
        self.step: int | None = None
        self.is_broken = False  # a wait was interrupted: the contents of slots are unknown
        self.is_allocated = False  # the last `allocate` was not interrupted
        self.step_bytes: int | None = None  # what a step takes beside its slots, at most, of those that were seen
        self._ring: SlotRing | None = None
        self._settled: list[dict[str, Tensor]] | None = None
        self._decoder = SlotDecoder()
        self._worker = Worker("transfer")
        self._uploader = Uploader(device, host, self._worker)
        self._walk = self._first_walk(frozenset())
        self._current: int | None = None  # the block that computes
        self._slot: RingSlot | None = None  # that it reads; None if it lies in the scratch as a whole
        self._decoded: int | None = None  # the last block that was decoded: the scratch holds it
        self._serial = 0
        self._limits: RuntimeLimitHints | None = None
        self.activations: ActivationOffload | None = None  # shares the bus and its limits

    # ---- memory ------------------------------------------------------------------------------------------------------

    @property
    def ring(self) -> SlotRing:
        assert self._ring is not None
        return self._ring

    def allocate(
        self,
        layouts: Sequence[BlockLayout],
        slots: Slots,
        slot_bytes: int | None,
        budget: int | None,
        changed: Collection[int] | None = None,
    ) -> None:
        """Allocate slots and scratch for these layouts; old ones are freed first, or kept if they fit.

        changed: blocks whose bytes on the host have changed (None: all). If slots are kept, the other blocks stay
        loaded.
        """
        largest = max(layout.nbytes for layout in layouts)
        size = largest if slot_bytes is None else slot_bytes
        scratch = max(layout.scratch_nbytes for layout in layouts)
        self._unsettle()
        self.is_allocated = False
        self.layouts = list(layouts)
        self._decoder.forget(layouts)
        if self._fits(largest, scratch, is_auto=slots == "auto"):
            self.forget(changed)
            self._resize_residents()
            self.is_allocated = True
            return
        self.free()
        count, resident = self._share(layouts, slots, size, scratch, budget)
        resident_bytes = {block: layouts[block].nbytes for block in resident}
        spare = 0 if count else self._spare(budget)[0] - scratch - size * len(resident_bytes)  # see `_resize_residents`
        decoded = share_decoded({block: layouts[block].scratch_nbytes for block in sorted(resident_bytes)}, spare)
        self._ring = SlotRing(self.device, count, size, resident_bytes, scratch, decoded)
        self._walk = self._first_walk(resident)
        self._uploader.resize(max(size, largest))
        self.is_allocated = True

    def _first_walk(self, resident: frozenset[int]) -> Walk:
        # Weights that are trained on the host change between steps: nothing of the next step can be loaded.
        return Walk(len(self.names), resident, goes_on=self.training is None)

    def free(self) -> None:
        """Give all device memory back."""
        self._unsettle()
        self._leave()
        self._decoded = None
        if self._ring is not None:
            self._worker.drain(self.timeout_s)
            self._decoder.forget(self.layouts)
            self._ring.close()
            self._ring = None

    def close(self) -> None:
        if self.activations is not None:
            self.activations.close()
        self.free()
        self._worker.stop(self.timeout_s)
        self._uploader.close()

    def _fits(self, largest: int, scratch: int, *, is_auto: bool) -> bool:
        """Whether the present slots can stay; under "auto" only if the largest block has the same size as before."""
        if self._ring is None or self._ring.scratch_bytes < scratch:
            return False
        return self._ring.slot_bytes == largest if is_auto else self._ring.slot_bytes >= largest

    def _resize_residents(self) -> None:
        """Give resident blocks whose size changed new memory; it fits, since each was counted as the largest block."""
        with on_failure(self.free):  # a buffer is missing: the next call allocates all
            for block, nbytes in list(self.ring.resident_bytes.items()):
                if self.layouts[block].scratch_nbytes > self.ring.scratch_of(block).nbytes:
                    self.ring.drop_scratch(block)
                if self.layouts[block].nbytes != nbytes:
                    self.ring.resize_resident(block, self.layouts[block].nbytes)

    def _share(
        self, layouts: Sequence[BlockLayout], slots: Slots, size: int, scratch: int, budget: int | None
    ) -> tuple[int, frozenset[int]]:
        for name, layout in zip(self.names, layouts, strict=True):
            if layout.nbytes > size:
                raise StreamError(
                    f"{name} takes {layout.nbytes} bytes and a slot has {size}: it fits no slot; raise slot_bytes, "
                    "or choose smaller formats"
                )
        if slots == "auto":
            free, spare = self._spare(budget)
            least, fitting = min(FEWEST_SLOTS, len(layouts)), max(0, spare - scratch) // max(1, size)
            fitting = min(fitting, max(least, (free - scratch) // max(1, size)))
            if fitting < least:
                raise StreamError(
                    f"the largest block takes {size} bytes, its decoded weights {scratch}, and {spare} bytes are spare "
                    f"on {self.device.torch_device}: it fits no slot; choose smaller formats or smaller blocks"
                )
            return share_slots(len(layouts), fitting)
        return min(int(slots), len(layouts)), frozenset()

    def _spare(self, budget: int | None) -> tuple[int, int]:
        """Memory that slots may take, without what steps are left, and with it."""
        if budget is not None:
            return budget - self.device.allocated_bytes, budget - self.device.allocated_bytes
        spare = self.device.spare_bytes()
        return spare - self._left_for_steps(), spare

    def _left_for_steps(self) -> int:
        return self.device.guessed_step_bytes() if self.step_bytes is None else self.step_bytes

    def saw_step(self, peak_bytes: int) -> bool:
        """Note the memory that a step took, after it; return whether another division of the memory (slots="auto") fits
        better.

        Looks only where a step took more than any before: asking the device takes long.
        """
        needed = max(0, peak_bytes - self.device.used_bytes())
        if self._ring is None or (self.step_bytes is not None and needed <= self.step_bytes):
            return False
        self.step_bytes = needed
        free = self.device.spare_bytes()
        spare = free + self._ring.nbytes - self._ring.scratch_bytes - needed
        count, present = len(self.names), len(self._ring.slots) + len(self._ring.resident)
        fitting = min(count, max(FEWEST_SLOTS, spare // max(1, self._ring.slot_bytes)))
        is_tight = free < needed and self._ring.sizes["decoded_blocks"] > 0
        return is_tight or fitting < present or fitting > present + 1 or present < fitting == count

    def ran_out(self) -> None:
        """Leave steps a quarter of the slots' memory more, since one ran out of memory."""
        if self._ring is not None:
            self.step_bytes = self._left_for_steps() + self._ring.nbytes // 4

    # ---- steps -------------------------------------------------------------------------------------------------------

    def start(self, step: int | None, recorder: StepRecorder | None) -> None:
        """Begin a step: weights and formats may have changed."""
        self._serial += 1
        self.mend()
        self.is_broken = True  # until the first copies are under way
        self.step, self.recorder = step, recorder
        self._limit(None)
        self._leave()
        self._walk = self._first_walk(self._walk.resident)
        if self.activations is not None:
            self.activations.start(recorder)
        self._prefetch()
        self._settle()
        self.is_broken = False

    def stop(self) -> None:
        """End the step: a later backward is refused."""
        self._serial += 1
        self._leave()
        if self.activations is not None:
            self.activations.stop()
        self.step = self.recorder = None

    def tighten(self, limits: RuntimeLimitHints) -> None:
        """Limit copies that are not started yet; limits are not loosened before the next step."""
        self._limit(limits if self._limits is None else self._limits.tightened(limits))

    def _limit(self, limits: RuntimeLimitHints | None) -> None:
        self._limits = limits
        if self.recorder is not None:
            self.recorder.limits = limits
        if self.training is not None:
            self.training.limit_gradients(None if limits is None else limits.max_inflight_d2h)
        if self.activations is not None:
            self.activations.max_out = None if limits is None else limits.max_inflight_d2h

    def in_flight(self) -> int:
        """Copies to the device that are under way and for which the computation has not waited yet."""
        blocks = sum(not (one.is_awaited or one.is_done(self.device)) for one in self.transfers())
        return blocks if self.activations is None else blocks + self.activations.in_flight()

    def room(self) -> int | None:
        """How many more copies to the device may be started now; None: as many as there are slots for."""
        return None if self._limits is None else self._limits.max_inflight_h2d - self.in_flight()

    def slots_full(self) -> bool:
        """Whether the bus is behind: all slots but one (which may be computing) wait for a copy that could run.

        Copies into slots that are not free yet do not count: there the host is ahead of the device, not the bus behind.
        """
        if self._ring is None or not self._ring.slots:
            return False
        started = self.transfers() if self.recorder is None else [transfer for transfer, _ in self.recorder.loads]
        behind = 0
        for transfer in reversed(started):
            if transfer.is_done(self.device):
                break
            behind += transfer.after is not None and self.device.has_passed(transfer.after)
        return behind >= max(1, len(self._ring.slots) - 1)

    def forget(self, blocks: Collection[int] | None = None) -> None:
        """Have these blocks (None: all) loaded again, because their bytes on the host change."""
        self._unsettle()
        self._leave()
        if blocks is None or self._decoded in blocks:
            self._decoded = None
        if self._ring is not None:
            self._ring.forget(blocks)

    def transfers(self) -> list[Transfer]:
        """The last transfer into each slot: when these are done, no copy reads the host's buffers."""
        slots = [] if self._ring is None else [*self._ring.slots, *self._ring.resident.values()]
        return [slot.transfer for slot in slots if slot.transfer is not None]

    def wait_for_copies(self, transfers: Sequence[Transfer]) -> None:
        """Wait on the host until these copies are done, before the host's buffers are written."""
        for transfer in transfers:
            wait_for(transfer.launched, self._worker, self.timeout_s, transfer.what)
            if transfer.copied is not None:
                self.device.finish(transfer.copied.end)

    def finish_copies(self) -> None:
        """Wait until every copy that was started is over; a dead thread is left to `mend`."""
        if self._worker.drain(self.timeout_s):
            self.wait_for_copies(self.transfers())
        self.device.finish(self.device.mark())

    def mend(self) -> None:
        """Recover after an interrupted wait or a dead thread: start new threads, and empty all slots."""
        if self.is_broken or not self._worker.is_alive:
            self._recover()

    def _recover(self) -> None:
        if not self._worker.drain(self.timeout_s):
            if self._worker.is_alive:  # it would still write into a slot later
                raise StreamError(
                    f"the transfer thread has been in one copy for over {self.timeout_s:g} s; begin_step goes on when "
                    "that copy ends: look at the disk or the device"
                )
            self._worker = Worker("transfer")
            self._uploader.worker = self._worker
        for transfer in self.transfers():
            transfer.launched.set()  # no thread will: telemetry must not wait for a copy that was never made
            if transfer.copied is not None:
                self.device.finish(transfer.copied.end)
        self.forget()
        self.is_broken = False

    # ---- weights -----------------------------------------------------------------------------------------------------

    def weights(self, block: int, *, wraps: bool) -> dict[str, Tensor]:
        """The parameters of a block, for all work that is queued from now until another block is asked for."""
        self._acquire(block, wraps=wraps)
        return self._decoder.weights(block, self._buffer, self.ring.scratch_of(block))

    def settled(self, block: int) -> dict[str, Tensor] | None:
        """A block's parameters while all blocks lie on the device unchanged; None where they do not."""
        if self._settled is None:
            return None
        if self.recorder is not None:
            self.recorder.hits += 1
        return self._settled[block]

    def _settle(self) -> None:
        """Note, at the start of a step, whether all blocks lie on the device and none need be loaded."""
        ring = self._ring
        if self._settled is not None or self.training is not None or ring is None or ring.slots:
            return
        if len(ring.resident) == len(self.names) and all(map(self._has_arrived, ring.resident)):
            self._settled = [
                self._decoder.weights(block, ring.resident[block].buffer, ring.scratch_of(block))
                for block in range(len(self.names))
            ]

    def _has_arrived(self, block: int) -> bool:
        slot = self.ring.resident[block]
        if slot.block != block or slot.transfer is None or slot.transfer.copied is None:
            return False
        return slot.transfer.is_done(self.device) and (slot.is_decoded or not self.layouts[block].scratch_nbytes)

    def _unsettle(self) -> None:
        """End the settled state before weights change: copies wait for queued work, saved graphs become invalid."""
        if self._settled is not None:
            mark = self.device.mark()
            for slot in self.ring.resident.values():
                slot.free_after = mark
                torch.autograd.graph.increment_version([slot.buffer, *([] if slot.scratch is None else [slot.scratch])])
            self._settled = None

    @property
    def serial(self) -> int:
        return self._serial

    @property
    def spans(self) -> Spans:
        return self.ring.spans

    def owner_of(self, storage: int) -> tuple[int, bool] | None:
        owner = None if self._ring is None else self._ring.owner(storage)  # Ctrl-C may leave hooks of a closed stream
        if owner is not None and owner[0] < 0:
            return None if self._decoded is None else (self._decoded, True)
        return owner

    def view(self, block: int, layout: ViewLayout, *, in_scratch: bool, serial: int) -> Tensor:
        self.refuse_stale(self.names[block], serial)
        if torch.is_grad_enabled():
            refuse_second_derivatives(self.where(block))
        if self.training is not None:
            self.training.gradients.note_backward()
        self._acquire(block, wraps=False)
        return self._decoder.view(self.ring.scratch_of(block) if in_scratch else self._buffer, layout)

    def span_of(self, tensor: Tensor) -> int | None:
        """The address of the buffer of streamed weights that a tensor lies in; None if it lies elsewhere."""
        return None if self._ring is None else self._ring.spans.start_of(tensor)

    def kept_beyond(self, output: Any) -> Any:
        """A block's output without views of its weights, whose memory soon holds another block's: these are copied."""
        if isinstance(output, Tensor):
            return output if self.span_of(output) is None else output.clone()
        if all(self.span_of(one) is None for one in tensors_in(output)):
            return output
        kept = tree_map_only(Tensor, self.kept_beyond, output)
        if any(self.span_of(one) is not None for one in tensors_in(kept)):
            raise StreamError(
                f"a block returns views of its weights in a {type(output).__name__}, and their memory soon holds "
                "another block's; return .clone() of them"
            )
        return kept

    def refuse_other_block(self, block: int) -> None:
        """Refuse a block whose forward has called another one, which may lie now where its own weights were."""
        if self._current != block and self._current is not None:
            raise StreamError(
                f"{self.where(block)}: its forward computed {self.names[self._current]}, too, which takes its place on "
                "the device; call blocks one after the other, or give `blocks` that hold both"
            )

    def drop(self, block: int) -> None:
        """Have a block loaded again, and its weights looked up anew: other code has written to them on the device."""
        self.forget([block])
        self._decoder.forget(self.layouts)

    def refuse_stale(self, name: str, serial: int) -> None:
        """Refuse a backward through weights that were saved in a step that has ended."""
        if serial != self._serial:
            raise StreamError(
                f"{name}: backward came after its step ended, and the weights may have changed since; "
                "call backward between begin_step and end_step"
            )

    def may_send_ahead(self) -> bool:
        """Whether limits allow a copy of which it is not certain that it will be needed."""
        if self._limits is None:
            return True
        is_allowed = self._limits.prefetch_window_cap > 0 and not self._limits.suppress_speculative
        return is_allowed and (self.room() or 0) > 0

    def where(self, block: int) -> str:
        """A block's name and the step, for messages."""
        return f"{self.names[block]}, {'outside a step' if self.step is None else f'step {self.step}'}"

    @property
    def _buffer(self) -> Tensor:
        """The buffer of the current block: that of its slot, or without a slot that of its decoded weights."""
        return self.ring.scratch_of(self._current) if self._slot is None else self._slot.buffer

    def _acquire(self, block: int, *, wraps: bool) -> None:
        if self._current == block:
            return
        try:
            self._move_to(block, wraps=wraps)
        except BaseException as error:
            self.is_broken = True
            if not isinstance(error, StreamError):  # Ctrl-C keeps its type and gets block and step as a note
                error.add_note(f"bitplan: while waiting for {self.where(block)}")
            raise

    def _move_to(self, block: int, *, wraps: bool) -> None:
        self._leave()
        self._walk = self._walk.moved_to(block, wraps=wraps)
        leaves_slot = self.layouts[block].leaves_slot
        if not (leaves_slot and self._decoded == block):
            slot = self._load_at_once(block)
            if not leaves_slot:
                self._prefetch()
            self._await(slot, block)
            self._decode(block, slot)
            if leaves_slot:
                slot.free_after = self.device.mark()
            else:
                self._slot = slot
        elif self.recorder is not None:
            self.recorder.hits += 1
        self._current = block
        if leaves_slot:
            self._prefetch()

    def _decode(self, block: int, slot: RingSlot) -> None:
        if slot.scratch is not None and not slot.is_decoded:
            self._decoder.decode_once(block, slot.buffer, slot.scratch)
            slot.is_decoded = True
        elif slot.scratch is None and self.layouts[block].scratch_nbytes:
            self._decoded = None  # until the scratch is whole again
            self._decoder.decode(block, slot.buffer, self.ring.scratch)
            self._decoded = block

    def _await(self, slot: RingSlot, block: int) -> None:
        transfer = slot.transfer
        if transfer is None or (transfer.copied is not None and transfer.is_done(self.device)):
            return
        before = self.device.mark()
        self.device.wait(transfer.wait_launched(self._worker, self.timeout_s))
        if self.recorder is not None:
            self.recorder.waits.append((before, self.device.mark()))

    def _leave(self) -> None:
        """Leave the current block: work queued later may overwrite the slot that it read."""
        if self._slot is not None:
            self._slot.free_after = self.device.mark()
        self._current = self._slot = None

    def _load_at_once(self, block: int) -> RingSlot:
        """The slot of a block that is needed now; it is loaded if it is not on its way."""
        slot = self.ring.find(block)
        if self.recorder is not None:
            self.recorder.hits += slot is not None
            self.recorder.misses += slot is None
        if slot is None:
            if self._is_changing(block):
                raise StreamError(
                    f"{self.where(block)}: needed again after gradients of it had come, with which "
                    "update_in_backward=True changes it; train this model without that option"
                )
            if block in self._walk.resident:
                slot = self.ring.resident[block]
            else:
                slot = self.ring.slots[load_now(self._walk, self.ring.slot_blocks, block).slot]
            self._load(slot, block)
        if slot.transfer is not None:
            slot.transfer.is_awaited = True
        return slot

    def _prefetch(self) -> None:
        for block, slot in self.ring.resident.items():
            if slot.block is None:
                self._load(slot, block)
        for load in self._loads_ahead():
            if not self._is_changing(load.block):
                self._load(self.ring.slots[load.slot], load.block)

    def _is_changing(self, block: int) -> bool:
        return self.training is not None and self.training.is_changing(self.names[block])

    def wait_for_readers(self, block: str, is_over: Callable[[], bool]) -> None:
        """Wait, on the optimizer's thread, until no copy of the step reads a block's bytes on the host.

        is_over: whether the step has ended. Later copies wait for the block's update; the step's own were dropped.
        """
        ring, index = self._ring, self.names.index(block)
        slots = [] if ring is None else [*ring.slots, *ring.resident.values()]
        reading = [slot.transfer for slot in slots if slot.block == index and slot.transfer is not None]
        if not is_over():
            self.wait_for_copies(reading)

    @property
    def _block_in_scratch(self) -> int | None:
        """The block that lies in the scratch as a whole, and needs no slot until another one is decoded."""
        decoded = self._decoded
        return decoded if decoded is not None and self.layouts[decoded].leaves_slot else None

    def _loads_ahead(self) -> list[Load]:
        loads = loads_ahead(self._walk, self.ring.slot_blocks, self._block_in_scratch)
        if self._limits is None or not loads:
            return loads
        allowed = allowed_loads(self._walk, loads, self._limits, self.in_flight())
        if self.recorder is not None:
            self.recorder.held_back += len(loads) - len(allowed)
        return allowed

    def _load(self, slot: RingSlot, block: int) -> None:
        name, layout, training = self.names[block], self.layouts[block], self.training
        transfer = self._uploader.start(
            slot,
            block,
            name,
            layout.nbytes,
            self.where(block),
            is_fresh=None if training is None else training.fresh(name),
        )
        if self.recorder is not None:
            self.recorder.loads.append((transfer, layout.bytes_by_format))
