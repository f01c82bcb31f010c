"""Which block to load next, and into which slot: pure decisions over small integers.

A training step walks the blocks up and then down again; a forward alone walks up and starts over. So position and
direction of the walk tell which blocks come next, and the blocks behind are used last:

    forward, at 3   [ 2 | 3 | 4 | 5 ]   2 is behind: 6 takes its slot
    turn, at 7      [ 4 | 5 | 6 | 7 ]   the tail stays, and backward starts on it
    backward, at 6  [ 4 | 5 | 6 | 7 ]   7 is behind: 3 takes its slot
    end, at 0       [ 0 | 1 | 2 | 3 ]   the head stays for the next step

Each turn saves as many transfers as there are slots. A forward alone has no turn: it `wraps`, and the head is loaded
while the tail computes. Resident blocks keep slots of their own and need no decision.

A block whose weights all lie in the scratch (`decoded`) computes without its slot, which takes another block meanwhile:

    forward, at 3   [ 4 | 5 | 6 | 3 ]   3 is decoded: 7 takes its slot
    turn, at 7      [ 4 | 5 | 6 | 7 ]   7 is decoded, and computes its backward from the scratch too: 3 takes its slot
    end, at 0       [ 0 | 1 | 2 | 3 ]   0 is decoded, and the next step begins with it: 4 takes its slot
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bitplan.base.errors import StreamError
from bitplan.streaming.transfer.transfer_limits import RuntimeLimitHints

Slots = int | str
FEWEST_SLOTS = 2  # one computes while the other is filled
RING_SLOTS = 3  # for slots="auto": one computes, one is filled, one is ready; more memory serves better as residents


class Load(NamedTuple):
    """An instruction: copy this block into this slot; whatever the slot holds is dropped."""

    slot: int
    block: int


@dataclass(frozen=True)
class Walk:
    """Where the computation is (None: nowhere yet), which way it goes, and over which blocks.

    goes_on: after the backward the next step begins with the same weights, so that its blocks may be loaded.
    """

    count: int
    resident: frozenset[int] = frozenset()
    position: int | None = None
    direction: int = 1
    wraps: bool = False
    goes_on: bool = True

    def moved_to(self, block: int, *, wraps: bool) -> Walk:
        """The walk after `block` was asked for. A jump from one end to the other is a new round, not a turn."""
        direction = self.direction
        if self.position is not None and block != self.position:
            direction = 1 if block > self.position else -1
        if block == 0 and self.position is not None and self.position > 1:
            direction = 1
        return replace(self, position=block, direction=direction, wraps=wraps)

    def upcoming(self, depth: int, decoded: int | None = None) -> list[int]:
        """The next `depth` streamed blocks that need a slot, nearest first, without the slot that computes now.

        decoded: the block whose weights all lie in the scratch. It needs no slot where it is the next to compute.
        """
        at_work = None if self.position == decoded else self.position
        coming: dict[int, None] = {}  # in the order of their next use
        for block in (*self._pass(), *self._next_pass()):
            if len(coming) >= depth:
                break
            if block in self.resident or block == at_work or (block == decoded and not coming):
                continue
            coming[block] = None
        return list(coming)

    def in_this_pass(self, depth: int) -> list[int]:
        """The next `depth` streamed blocks of the present forward or backward alone."""
        return [block for block in self._pass() if block not in self.resident][:depth]

    def _pass(self) -> range:
        """The blocks still to come in this forward or backward, after the one that computes now, in their order."""
        if self.position is None:
            return range(self.count)
        return range(self.position - 1, -1, -1) if self.direction < 0 else range(self.position + 1, self.count)

    def _next_pass(self) -> range:
        """The blocks of the pass after this one, in their order; empty if none is expected."""
        if self.direction > 0 and not self.wraps:
            return range(self.count - 1, -1, -1)
        return range(self.count if self.goes_on or self.wraps else 0)


def loads_ahead(walk: Walk, slot_blocks: Sequence[int | None], decoded: int | None = None) -> list[Load]:
    """The loads to start now, nearest block first.

    slot_blocks: the block that each ring slot holds or is filled with; decoded: the block that lies in the scratch as
    a whole.
    """
    computes = walk.position in slot_blocks and walk.position != decoded
    wanted = walk.upcoming(len(slot_blocks) - computes, decoded)
    free = _free_slots(slot_blocks, {*wanted, walk.position} if computes else wanted, walk.position)
    missing = [block for block in wanted if block not in slot_blocks]
    return [Load(slot, block) for slot, block in zip(free, missing, strict=False)]


def allowed_loads(walk: Walk, loads: Sequence[Load], limits: RuntimeLimitHints, in_flight: int) -> list[Load]:
    """The `loads` that limits allow; `in_flight`: started copies for which the computation has not waited yet.

    Without speculation only the certain next block is loaded, and no block of another pass: whether there is another
    one is known when it begins. Slots keep what they hold.
    """
    near = walk.in_this_pass(1) if limits.suppress_speculative else walk.upcoming(limits.prefetch_window_cap)
    within = [load for load in loads if load.block in near]
    return within[: max(0, limits.max_inflight_h2d - in_flight)]


def load_now(walk: Walk, slot_blocks: Sequence[int | None], block: int) -> Load:
    """The slot for a block that is needed at once and is not loaded; `walk` is already at this block."""
    free = _free_slots(slot_blocks, {*walk.upcoming(len(slot_blocks) - 1), block}, block)
    return Load(free[0] if free else 0, block)


def check_slots(slots: Slots, vram_bytes: int | None = None) -> None:
    if slots != "auto" and (not isinstance(slots, int) or slots < FEWEST_SLOTS):
        raise StreamError(f"slots={slots!r}: expected 'auto' or a number from {FEWEST_SLOTS} on")
    if not isinstance(vram_bytes, int | None) or (vram_bytes is not None and vram_bytes < 1):
        raise StreamError(f"vram_bytes={vram_bytes!r}: expected a whole number of bytes, as int(8e9)")
    if vram_bytes is not None and slots != "auto":
        raise StreamError(f"vram_bytes= is what slots='auto' may take, and slots={slots!r}: give one of the two")


def spread_residents(count: int, resident: int) -> frozenset[int]:
    """Which blocks stay on the device: evenly spread, so that streamed blocks arrive while resident ones compute."""
    if resident >= count:
        return frozenset(range(count))
    return frozenset((2 * index + 1) * count // (2 * resident) for index in range(resident))


def share_slots(count: int, fitting: int) -> tuple[int, frozenset[int]]:
    """How many ring slots there are, and which blocks stay resident, where `fitting` slots fit the device."""
    if fitting >= count:
        return 0, frozenset(range(count))
    ring = min(RING_SLOTS, fitting)
    return ring, spread_residents(count, fitting - ring)


def share_decoded(sizes: Mapping[int, int], spare: int) -> dict[int, int]:
    """slots="auto", where every block is resident: which ones also stay decoded, with half of the memory that is spare.

    sizes: bytes of each block's decoded weights. The other half is left for steps that are larger than those seen.
    """
    decoded, remaining = {}, spare // 2
    for block, nbytes in sizes.items():
        if 0 < nbytes <= remaining:
            decoded[block] = nbytes
            remaining -= nbytes
    return decoded


def _free_slots(slot_blocks: Sequence[int | None], needed: Collection[int | None], position: int | None) -> list[int]:
    """Slots that may be overwritten: empty ones first, then those whose block is used last."""
    empty = [slot for slot, block in enumerate(slot_blocks) if block is None]
    passed = [slot for slot, block in enumerate(slot_blocks) if block is not None and block not in needed]
    passed.sort(key=lambda slot: -abs((slot_blocks[slot] or 0) - (position or 0)))
    return empty + passed
