"""ExpertMemory: where the experts of mixtures lie on the device, in slots of a whole stack and in a cache.

A slot holds the stacks of one mixture whole, every expert at its own place, and only those that were asked for are
copied there. So routes, shapes and the order of all sums are those of a model that lies on the device: results are
equal to the bit, whichever implementation computes them. Places of other experts hold old bytes, which none reads.

    host    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     all experts, pinned
    chosen        1   2           5     7         [1, 2] cross in one copy, 7 crosses, 5 is in the cache
    slot    | . | 1 | 2 | . | . | 5 | . | 7 |

The cache holds the experts that were used most, of all mixtures. An expert that was used more than the least used one
there takes its place; it is copied from slot to cache and back on the device. Counts fade from step to step.

Copies to slots have a queue of their own. A slot is written again after its `free_after` mark, and before its numbers
are read the computation waits for every copy into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bitplan.base.errors import TransferError
from bitplan.base.records import on_failure
from bitplan.streaming.find_blocks import BlockLayout, aligned
from bitplan.streaming.saved_tensors import Spans
from bitplan.streaming.transfer.copies import Transfer
from bitplan.streaming.transfer.devices import Mark, StreamDevice

FADING = 0.95  # of counts, a step


@dataclass(eq=False)
class ExpertSlot:
    """A buffer for one mixture's experts, and which of them are there or on their way."""

    buffer: Tensor
    free_after: Mark
    stack: int | None = None
    present: set[int] = field(default_factory=set)
    pending: list[Transfer] = field(default_factory=list)  # copies that the computation has not waited for
    last_use: int = 0


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """One mixture: its name, how many experts it has, and their bytes on the host."""

    name: str
    count: int
    layout: BlockLayout
    source: Tensor

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert in the cache."""
        return sum(aligned(piece.nbytes // self.count) for piece in self.layout.pieces.values())


class ExpertMemory:
    """Slots and cache of one device. Stacks are named by their index."""

    def __init__(self, device: StreamDevice, stacks: Sequence[ExpertStack], slots: int, cache_bytes: int) -> None:
        self.device, self.stacks = device, list(stacks)
        self.counts = np.zeros((len(self.stacks), max(one.count for one in self.stacks)))
        self.cached: dict[tuple[int, int], int] = {}  # stack and expert -> entry
        self.copied_experts = self.cached_experts = 0  # over the bus, and from the cache
        self.slots: list[ExpertSlot] = []
        self._cache: Tensor | None = None
        self._free: list[int] = []
        self._entry_bytes = max(one.expert_bytes for one in self.stacks)
        self._rows: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}  # slot's address and stack -> experts' parts
        self._sources = [_stacked(one.layout, one.source) for one in self.stacks]
        self._uses = 0
        self._current: ExpertSlot | None = None
        size = max(one.layout.nbytes for one in self.stacks)
        with on_failure(self.close):
            for index in range(min(slots, len(self.stacks))):
                buffer = device.allocate(size, f"slot {index} of {slots} for experts")
                self.slots.append(ExpertSlot(buffer, device.mark()))
            self.resize_cache(cache_bytes)
        self._by_storage = {slot.buffer.untyped_storage().data_ptr(): slot for slot in self.slots}
        self.spans = Spans(slot.buffer for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return sum(slot.buffer.nbytes for slot in self.slots) + (0 if self._cache is None else self._cache.nbytes)

    def resize_cache(self, nbytes: int) -> None:
        """Give the cache other memory; it is empty then."""
        self.cached.clear()
        if self._cache is not None:
            self.device.give_back(self._cache)
            self._cache = None  # freed before the new one: both may not fit together
        entries = min(nbytes // self._entry_bytes, sum(one.count for one in self.stacks))
        if entries:
            self._cache = self.device.allocate(entries * self._entry_bytes, "the cache of experts")
        self._free = list(range(entries))

    def close(self) -> None:
        """Free the memory; its next user runs after the copies that are still under way."""
        for slot in self.slots:
            self._wait(slot)
            self.device.give_back(slot.buffer)
        self.slots, self._current = [], None
        self._rows.clear()
        self.resize_cache(0)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def fade(self) -> None:
        """Begin a step: lower the counts of use so far, so that recent steps weigh more."""
        self.counts *= FADING

    def count(self, stack: int, experts: Sequence[int]) -> None:
        self.counts[stack, experts] += 1.0

    def leave(self) -> None:
        """Note that the computation reads no slot from now on."""
        if self._current is not None:
            self._current.free_after = self.device.mark()
            self._current = None

    def forget(self, stack: int | None = None) -> None:
        """Have experts of this stack (None: of all) copied again: bytes changed, or a step broke off."""
        self.leave()
        for slot in self.slots:
            if stack is None or slot.stack == stack:
                self._empty(slot, None)
        for key in [key for key in self.cached if stack is None or key[0] == stack]:
            self._free.append(self.cached.pop(key))

    def finish_copies(self) -> None:
        """Wait on the host until no copy reads the host's bytes."""
        for slot in self.slots:
            for transfer in slot.pending:
                if transfer.copied is not None:
                    self.device.finish(transfer.copied.end)
        self.device.finish(self.device.mark())

    def transfers(self) -> list[Transfer]:
        return [transfer for slot in self.slots for transfer in slot.pending]

    # ---- experts -----------------------------------------------------------------------------------------------------

    def is_owner(self, storage: int) -> bool:
        return storage in self._by_storage

    def has(self, stack: int, experts: Iterable[int]) -> Tensor | None:
        """The buffer that the computation reads already, if it holds all of these experts; else None."""
        slot = self._current
        return slot.buffer if slot is not None and slot.stack == stack and slot.present.issuperset(experts) else None

    def load(self, stack: int, experts: Sequence[int], what: str) -> tuple[Tensor, Transfer | None, list[Transfer]]:
        """Load these experts into a slot, which holds them for all work that is queued until another stack is loaded.

        Return the slot's memory, the copy that was started for it, and all copies that the computation waits for.
        """
        if self._current is not None and self._current.stack != stack:
            self.leave()
        slot = self._slot_for(stack)
        self._current = slot
        missing = [expert for expert in experts if expert not in slot.present]
        from_cache = [expert for expert in missing if (stack, expert) in self.cached]
        from_host = [expert for expert in missing if (stack, expert) not in self.cached]
        transfer = self._send(slot, stack, from_host, what) if from_host else None
        waited = self._wait(slot)
        if from_cache:
            self._copy_between(stack, slot, from_cache, to_cache=False)
            slot.present.update(from_cache)
            self.cached_experts += len(from_cache)
        return slot.buffer, transfer, waited

    def send_ahead(self, stack: int, experts: Iterable[int], what: str) -> Transfer | None:
        """Start to copy experts into a slot that the computation does not read."""
        if self._current is not None and (self._current.stack == stack or len(self.slots) == 1):
            return None
        slot = self._slot_for(stack)
        sent = [one for one in experts if one not in slot.present and (stack, one) not in self.cached]
        return self._send(slot, stack, sent, what) if sent else None

    def keep(self, stack: int, experts: Sequence[int]) -> None:
        """Put experts that lie in the present slot into the cache, in the place of those that are used less."""
        if self._cache is None or self._current is None:
            return
        new = [expert for expert in experts if (stack, expert) not in self.cached]
        if not new:
            return
        counts = self.counts
        new.sort(key=lambda expert: -counts[stack, expert])
        least: list[tuple[int, int]] = []
        if len(new) > len(self._free):
            least = sorted(self.cached, key=lambda key: counts[key])
        admitted, at = [], 0
        for expert in new:
            if not self._free:
                if at == len(least) or counts[least[at]] >= counts[stack, expert]:
                    break
                self._free.append(self.cached.pop(least[at]))
                at += 1
            self.cached[stack, expert] = self._free.pop()
            admitted.append(expert)
        if admitted:
            self._copy_between(stack, self._current, admitted, to_cache=True)

    def _slot_for(self, stack: int) -> ExpertSlot:
        self._uses += 1
        slot = next((one for one in self.slots if one.stack == stack), None)
        if slot is None:
            slot = min((one for one in self.slots if one is not self._current), key=lambda one: one.last_use)
            self._empty(slot, stack)
        slot.last_use = self._uses
        return slot

    def _empty(self, slot: ExpertSlot, stack: int | None) -> None:
        self._wait(slot)  # a copy between cache and slot must not meet an older one from the host
        slot.stack = stack
        slot.present.clear()
        self.device.claim(slot.buffer)

    def _wait(self, slot: ExpertSlot) -> list[Transfer]:
        waited, slot.pending = slot.pending, []
        for transfer in waited:
            if transfer.copied is not None:
                self.device.wait(transfer.copied)
        return waited

    def _send(self, slot: ExpertSlot, stack: int, experts: Sequence[int], what: str) -> Transfer:
        """Copy experts from the host; those beside each other cross in one copy."""
        targets = _stacked(self.stacks[stack].layout, slot.buffer)
        pairs = [
            (target[first:last], source[first:last])
            for target, source in zip(targets, self._sources[stack], strict=True)
            for first, last in runs(experts)
        ]
        transfer = Transfer(what)
        try:
            transfer.launch(lambda: self.device.copy_all_in(pairs, slot.free_after, queue="experts"))
        except Exception as error:
            raise TransferError(f"{what}: {type(error).__name__}: {error}") from error
        slot.pending.append(transfer)
        slot.present.update(experts)
        self.copied_experts += len(experts)
        return transfer

    def _copy_between(self, stack: int, slot: ExpertSlot, experts: Sequence[int], *, to_cache: bool) -> None:
        rows = self._rows_of(stack, slot.buffer)
        in_slot = [part for expert in experts for part in rows[expert]]
        in_cache = [part for expert in experts for part in self._entry(stack, self.cached[stack, expert])]
        targets, sources = (in_cache, in_slot) if to_cache else (in_slot, in_cache)
        torch._foreach_copy_(targets, sources)

    def _rows_of(self, stack: int, buffer: Tensor) -> list[tuple[Tensor, ...]]:
        key = buffer.data_ptr(), stack
        if key not in self._rows:
            with torch.inference_mode(False):
                parts = [one.unbind() for one in _stacked(self.stacks[stack].layout, buffer)]
            self._rows[key] = list(zip(*parts, strict=True))
        return self._rows[key]

    def _entry(self, stack: int, entry: int) -> list[Tensor]:
        """Views of an expert's parameters in an entry of the cache."""
        assert self._cache is not None
        parts, start = [], entry * self._entry_bytes
        for piece in self.stacks[stack].layout.pieces.values():
            nbytes = piece.nbytes // self.stacks[stack].count
            parts.append(self._cache[start : start + nbytes].view(piece.spec.dtype).view(piece.spec.shape[1:]))
            start += aligned(nbytes)
        return parts


def _stacked(layout: BlockLayout, buffer: Tensor) -> list[Tensor]:
    """Views of each parameter's experts in a buffer, [experts, ...]."""
    return [piece.parts["data"].view(buffer) for piece in layout.pieces.values()]


def runs(experts: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges (first, behind the last) of numbers that follow each other: [1, 2, 5] is [(1, 3), (5, 6)]."""
    result: list[tuple[int, int]] = []
    for expert in sorted(experts):
        if result and result[-1][1] == expert:
            result[-1] = result[-1][0], expert + 1
        else:
            result.append((expert, expert + 1))
    return result
