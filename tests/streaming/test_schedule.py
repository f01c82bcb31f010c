"""Which block is loaded next, and where: tables of literal rows, and whole walks counted."""

from __future__ import annotations

import pytest

from bitplan.streaming.transfer.schedule import Load, Walk, load_now, loads_ahead, share_slots, spread_residents


def at(position: int | None, direction: int = 1, *, wraps: bool = False, count: int = 8, resident=()) -> Walk:
    return Walk(count, frozenset(resident), position, direction, wraps)


@pytest.mark.parametrize(
    ("walk", "held", "loads"),
    [
        (at(None), [None, None, None], [(0, 0), (1, 1), (2, 2)]),
        (at(None), [1, 0, 2], []),
        (at(3), [2, 3, 4, 5], [(0, 6)]),
        (at(3), [1, 3, 4, 2], [(0, 5), (3, 6)]),  # the farthest behind goes first
        (at(7), [4, 5, 6, 7], []),  # the tail stays
        (at(7, wraps=True), [4, 5, 6, 7], [(0, 0), (1, 1), (2, 2)]),
        (at(6, -1), [4, 5, 6, 7], [(3, 3)]),
        (at(0, -1), [0, 1, 2, 3], []),  # the head stays
        (at(1, -1), [0, 1, 2, 3], []),
        (at(3, resident=[4]), [2, 3, 5], [(0, 6)]),
        (at(4, resident=[4]), [3, 5, 6], [(0, 7)]),  # a resident block computes: every ring slot may be ahead
        (at(5, -1), [5, None], [(1, 4)]),
    ],
)
def test_loads_ahead(walk, held, loads):
    assert loads_ahead(walk, held) == [Load(*load) for load in loads]


@pytest.mark.parametrize(
    ("walk", "held", "decoded", "loads"),
    [
        (at(3), [4, 5, 6, 3], 3, [(3, 7)]),  # 3 computes from the scratch
        (at(6), [4, 5, 6, 7], 6, []),  # it is needed again before 3 is
        (at(7), [4, 5, 6, 7], 7, [(3, 3)]),  # its backward computes from the scratch too
        (at(7), [4, 5, 6, 7], 6, [(2, 3)]),  # 7 is in its slot; 6 is in the scratch still when backward comes to it
        (at(7, wraps=True), [4, 5, 6, 7], 7, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        (at(6, -1), [4, 5, 6, 3], 6, [(2, 2)]),
        (at(1, -1), [0, 1, 2, 3], 1, []),
        (at(0, -1), [0, 1, 2, 3], 0, [(0, 4)]),  # the next step begins with it
        (Walk(8, position=0, direction=-1, goes_on=False), [0, 1, 2, 3], 0, []),  # its weights will have changed
        (at(None), [4, 1, 2, 3], 0, []),
        (at(None), [4, 1, 2, 3], None, [(0, 0)]),
        (at(3, resident=[3]), [4, 5, 2], 3, [(2, 6)]),
    ],
)
def test_a_block_in_the_scratch_leaves_its_slot(walk, held, decoded, loads):
    assert loads_ahead(walk, held, decoded) == [Load(*load) for load in loads]


@pytest.mark.parametrize(
    ("walk", "held", "slot"),
    [
        (at(0), [None, None], 0),
        (at(5), [6, 1], 1),  # what comes next is kept
        (at(5), [2, 1], 1),
        (at(5, -1), [4, 6, 7], 2),
    ],
)
def test_load_now(walk, held, slot):
    assert load_now(walk, held, walk.position).slot == slot


@pytest.mark.parametrize(
    ("position", "direction", "block", "expected"),
    [
        (None, 1, 0, 1),
        (3, 1, 4, 1),
        (7, 1, 7, 1),
        (7, 1, 6, -1),
        (1, -1, 0, -1),
        (0, -1, 0, -1),
        (0, -1, 1, 1),
        (7, 1, 0, 1),
    ],
)
def test_direction(position, direction, block, expected):
    moved = at(position, direction).moved_to(block, wraps=False)
    assert (moved.position, moved.direction) == (block, expected)


def transfers(
    order: list[int], count: int, slots: int, *, wraps: bool, resident=frozenset(), packed=False
) -> tuple[int, int]:
    """Loads and misses of a walk, done as the loader does it."""
    walk, held, loads, misses, decoded = Walk(count, resident), [None] * slots, 0, 0, None
    for block in order:
        walk = walk.moved_to(block, wraps=wraps)
        if block not in held and block not in resident and block != decoded:
            held[load_now(walk, held, block).slot] = block
            loads, misses = loads + 1, misses + 1
        decoded = block if packed else None
        for load in loads_ahead(walk, held, decoded):
            assert packed or held[load.slot] != block
            held[load.slot] = load.block
            loads += 1
    return loads, misses


@pytest.mark.parametrize("count", [4, 9, 24])
@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_each_turn_saves_as_many_transfers_as_there_are_slots(count, slots, packed):
    step = [*range(count), *range(count - 1, -1, -1)]
    first, _ = transfers(step, count, slots, wraps=False, packed=packed)
    three, misses = transfers(step * 3, count, slots, wraps=False, packed=packed)
    assert three - first == 2 * (2 * (count - slots))
    assert misses == 1  # the very first block


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_a_forward_alone_never_misses_after_the_first(slots, packed):
    loads, misses = transfers([*range(8)] * 4, 8, slots, wraps=True, packed=packed)
    assert misses == 1
    assert 4 * 8 <= loads <= 4 * 8 + slots


def test_residents_are_spread_and_save_their_own_transfers():
    assert spread_residents(8, 2) == {2, 6}
    assert spread_residents(8, 9) == set(range(8))
    assert spread_residents(8, 0) == set()
    loads, misses = transfers([*range(8)] * 4, 8, 3, wraps=True, resident=spread_residents(8, 2))
    assert misses == 1
    assert 4 * 6 <= loads <= 4 * 6 + 3


@pytest.mark.parametrize(
    ("count", "fitting", "ring", "resident"), [(8, 8, 0, 8), (8, 7, 3, 4), (8, 3, 3, 0), (8, 2, 2, 0), (2, 2, 0, 2)]
)
def test_share_slots(count, fitting, ring, resident):
    slots, blocks = share_slots(count, fitting)
    assert (slots, len(blocks)) == (ring, resident)
