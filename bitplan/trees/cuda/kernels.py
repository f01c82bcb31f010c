"""Triton kernels that expand a wave of leaves: partition their rows, sum histograms, find the best splits.

Everything that decides is an integer until a split is judged, and then the arithmetic is that of `trees.loops.split`,
operation by operation (launches pass `enable_fp_fusion=False`): the trees are those of the CPU, to the bit.

`table` says what a wave does: a row for each of up to K nodes, then a row for all of them. Grids are fixed; programs
take blocks of rows, or segments of a histogram, in turn.

Bins of a row lie in groups of up to 16 features, 16 bytes a row. Row r begins with feature r % width of the group: the
32 threads of a warp, a row each, then add to the cells of different features, even where a feature has few bins.

A cell of a histogram is two int64: gradient << 28 plus rows, and hessian. A program adds its rows to cells in shared
memory, two 32-bit atomics for each bin, gradient << 12 plus rows and hessian, and adds those to the cells of the
node. Triton has no atomics in shared memory: these are PTX. Its interpreter adds to the node's cells at once.

float32 gradients are whole numbers of units, the CPU's, of up to 46 and 31 bits: a cell is three int64, gradient,
hessian and rows, and shared memory has five 32-bit sums for it, of 20 bits of a row each, which 4095 rows do not fill.
Groups then have up to 8 features. The hessians of rows move along with their entries.

Numbers such as `width` are no constants, and Triton is told not to look at them: a kernel is compiled once for all
tables.

Columns of the tables that go to the GPU and come back.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102  (an `if` of a constant is decided when a kernel is compiled)
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from bitplan.base.loops.launch import INTERPRETED
from bitplan.trees.grow import GrowthRules

# ---- columns ---------------------------------------------------------------------------------------------------------


COLUMNS = 24
# Of a node's row of `table`; the bounds of its children's values are bits of float64
START, STOP, SIDE, FEATURE, BIN, MISSING_LEFT, FIRST_BLOCK = range(7)
SMALL_START, SMALL_STOP, SMALL_SIDE, SMALL_SLOT, LARGE_SLOT, GROUPS, FIRST_SEGMENT, LEFTS, RIGHTS = range(7, 16)
SMALL_LOW, SMALL_HIGH, LARGE_LOW, LARGE_HIGH = range(16, 20)
LEFT_SET, SET_WORDS = 20, 4  # bins that go left, as bits, where BIN is -1: a split by categories
# and of its last row
NODES, BLOCKS, SEGMENTS, SEGMENT_ROWS = range(4)
# Of a node's row of the result: the gain's bits, the split, three sums of its left side, three of the node, a set
RESULT_GAIN, RESULT_FEATURE, RESULT_BIN, RESULT_MISSING_LEFT, RESULT_LEFT = range(5)
RESULT_NODE, RESULT_SET, RESULT = 7, 10, 16
# Of a column of bins: how many there are, the groups of its feature, its place among those of categories from 1 on (0:
# numbers), and whether it rises or falls
BIN_COUNT, FEATURE_GROUPS, CATEGORY, DIRECTION, OF_COLUMN = range(5)


# ---- kernels ---------------------------------------------------------------------------------------------------------


BINS = 256
CELL_SHIFT = 28  # rows of a tree are fewer than 2^28, and 2^35 / 127 is more than that
MOST_ROWS = 2**CELL_SHIFT - 1
TILE, TILES = 512, 7  # rows of a tile; tiles until the 12 bits of a row count are full
MOST_NODES = 32  # of a wave
# Places in `numbers`
GRAD_SCALE, HESS_SCALE, L1, L2, MIN_WEIGHT, MIN_ROWS, MIN_GAIN, SMOOTHING, CATEGORY_L2 = range(9)
PLAIN, WITH_L1, MONOTONE = range(3)  # how gains are computed
SCRATCH = 4 * BINS  # numbers of a column of categories: ratios, and cells in another order


def kind_of_gains(rules: GrowthRules) -> int:
    return MONOTONE if rules.monotone.any() else WITH_L1 if rules.l1 else PLAIN


def group_bytes(precise: bool) -> int:
    """Bytes of a row in a group of features: one for each of them."""
    return 8 if precise else 16


def cell_words(precise: bool) -> int:
    """int64 of a cell."""
    return 3 if precise else 2


_BINS, _SHIFT, _COLUMNS, _RESULT, _K = (
    tl.constexpr(number) for number in (BINS, CELL_SHIFT, COLUMNS, RESULT, MOST_NODES)
)
_MISSING, _ROW, _COUNT = tl.constexpr(255), tl.constexpr(0xFFFFFFFF), tl.constexpr(MOST_ROWS)
_START, _STOP, _SIDE = (tl.constexpr(column) for column in (START, STOP, SIDE))
_FEATURE, _BIN, _MISSING_LEFT = (tl.constexpr(column) for column in (FEATURE, BIN, MISSING_LEFT))
_FIRST_BLOCK, _FIRST_SEGMENT = tl.constexpr(FIRST_BLOCK), tl.constexpr(FIRST_SEGMENT)
_SMALL_START, _SMALL_STOP, _SMALL_SIDE = (tl.constexpr(column) for column in (SMALL_START, SMALL_STOP, SMALL_SIDE))
_SMALL_SLOT, _LARGE_SLOT, _GROUPS = (tl.constexpr(column) for column in (SMALL_SLOT, LARGE_SLOT, GROUPS))
_SMALL_LOW, _LEFT_SET, _SET_WORDS = (tl.constexpr(column) for column in (SMALL_LOW, LEFT_SET, SET_WORDS))
_LEFTS, _RIGHTS, _NODES, _BLOCKS = (tl.constexpr(column) for column in (LEFTS, RIGHTS, NODES, BLOCKS))
_SEGMENTS, _SEGMENT_ROWS = tl.constexpr(SEGMENTS), tl.constexpr(SEGMENT_ROWS)
_RESULT_SET, _OF_COLUMN, _SCRATCH = tl.constexpr(RESULT_SET), tl.constexpr(OF_COLUMN), tl.constexpr(SCRATCH)
NOISE = tl.constexpr(1e-12)  # as `trees.loops.split` has it
SHARED_CELLS, PRECISE_CELLS = tl.constexpr(4096), tl.constexpr(2048)  # 16 features, and 8
ROUND = tl.constexpr(1.5 * 2.0**52)  # added and taken away it rounds numbers below 2^51 to whole ones, ties to even
PICKED = 128  # features that are compared at once
BLOCK = 1024  # rows that are partitioned together
# How kernels are compiled; no multiply-adds are fused where a split is judged
PART_OPTIONS: dict[str, Any] = {"num_warps": 8}
ADD_OPTIONS: dict[str, Any] = {"num_warps": 16}
JUDGE_OPTIONS: dict[str, Any] = {"num_warps": 2, "enable_fp_fusion": False}
PICK_OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "width", "row_bytes"])
def lay_out(bytes_ptr, bins_ptr, rows, width, row_bytes, BLOCK: tl.constexpr):
    """Bins of one group of features, given by column, into a group's bytes of a row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    for place in range(width):
        bin_ = tl.load(bytes_ptr + row + tl.full((), place, tl.int64) * rows, mask=inside, other=0)
        tl.store(bins_ptr + row * row_bytes + byte_of(place, row, width), bin_, mask=inside)


@triton.jit
def byte_of(place, row, width):
    """Where a row has the bin of a feature of its group."""
    byte = place - row.to(tl.int32) % width
    return tl.where(byte < 0, byte + width, byte)


@triton.jit
def _node_of(table_ptr, item, column: tl.constexpr):
    """The table's row of the node that a block or segment belongs to, and the node's first one."""
    firsts = tl.load(table_ptr + tl.arange(0, _K) * _COLUMNS + column)
    node = tl.sum((firsts <= item).to(tl.int32), 0) - 1
    of = table_ptr + node * _COLUMNS
    return of, tl.load(of + column)


@triton.jit(do_not_specialize=["rows", "features", "width"])
def part_rows(
    table_ptr,
    entries_ptr,
    weights_ptr,
    bins_ptr,
    pool_ptr,
    rows,
    features,
    width,
    PRECISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of each node to the other side of `entries`, those that go left first. Clears the new histograms, too.

    Blocks reserve their places with atomics: in which order rows lie in a child is left to chance, and changes no sum.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    nodes = tl.load(table_ptr + _K * _COLUMNS + _NODES).to(tl.int32)
    words: tl.constexpr = 3 if PRECISE else 2
    cells = tl.arange(0, _BINS)
    for item in range(program, nodes * features, programs):
        slot = tl.load(table_ptr + item // features * _COLUMNS + _SMALL_SLOT)
        if slot >= 0:
            to = pool_ptr + (slot * features + item % features) * (words * _BINS) + cells
            for word in tl.static_range(words):
                tl.store(to + word * _BINS, tl.zeros([_BINS], tl.int64))
    blocks = tl.load(table_ptr + _K * _COLUMNS + _BLOCKS).to(tl.int32)
    row_bytes: tl.constexpr = 8 if PRECISE else 16
    for block in range(program, blocks, programs):
        of, first = _node_of(table_ptr, block, _FIRST_BLOCK)
        start, stop, side = tl.load(of + _START), tl.load(of + _STOP), tl.load(of + _SIDE)
        feature, last_left = tl.load(of + _FEATURE).to(tl.int32), tl.load(of + _BIN).to(tl.int32)
        missing_left = tl.load(of + _MISSING_LEFT).to(tl.int32)
        within = tl.arange(0, BLOCK)
        at = start + (block - first) * BLOCK + within
        inside = at < stop
        entry = tl.load(entries_ptr + side * rows + at, mask=inside, other=0)
        row = entry & _ROW
        group = (feature // width).to(tl.int64)
        place = (group * rows + row) * row_bytes + byte_of(feature % width, row, width)
        bin_ = tl.load(bins_ptr + place, mask=inside, other=0).to(tl.int32)
        goes_left = tl.where(bin_ == _MISSING, missing_left, (bin_ <= last_left).to(tl.int32))
        if last_left < 0:
            goes_left = ((tl.load(of + _LEFT_SET + (bin_ >> 6)) >> (bin_ & 63).to(tl.int64)) & 1).to(tl.int32)
        goes_left = tl.where(inside, goes_left, 0)
        lefts = tl.sum(goes_left, 0)
        rights = tl.sum(inside.to(tl.int32), 0) - lefts
        before = tl.cumsum(goes_left, 0) - goes_left
        first_left = start + tl.atomic_add(of + _LEFTS, lefts.to(tl.int64), sem="relaxed")
        first_right = stop - rights - tl.atomic_add(of + _RIGHTS, rights.to(tl.int64), sem="relaxed")
        to = tl.where(goes_left > 0, first_left + before, first_right + within - before)
        tl.store(entries_ptr + (1 - side) * rows + to, entry, mask=inside)
        if PRECISE:
            weight = tl.load(weights_ptr + side * rows + at, mask=inside, other=0.0)
            tl.store(weights_ptr + (1 - side) * rows + to, weight, mask=inside)


# ---- histograms ------------------------------------------------------------------------------------------------------


@triton.jit
def _shared_cells(PRECISE: tl.constexpr):
    """The address of shared memory: 4096 sums of gradients and rows, then 4096 of hessians; or five times 2048."""
    if PRECISE:
        return tl.inline_asm_elementwise(
            "{ .shared .align 16 .b8 tree_cells[40960]; mov.u32 $0, tree_cells; }",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 tree_cells[32768]; mov.u32 $0, tree_cells; }",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add_shared(address, both, hess):
    tl.inline_asm_elementwise(
        "{ red.shared.add.u32 [$1], $2; red.shared.add.u32 [$1+16384], $3; mov.u32 $0, 0; }",
        "=r,r,r,r",
        [address, both, hess],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add_shared_precise(address, high, middle, low, upper_hess, lower_hess):
    tl.inline_asm_elementwise(
        "{ red.shared.add.u32 [$1], $2; red.shared.add.u32 [$1+8192], $3; red.shared.add.u32 [$1+16384], $4; "
        "red.shared.add.u32 [$1+24576], $5; red.shared.add.u32 [$1+32768], $6; mov.u32 $0, 0; }",
        "=r,r,r,r,r,r,r",
        [address, high, middle, low, upper_hess, lower_hess],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _take_shared(address):
    """What is there; zero from then on."""
    return tl.inline_asm_elementwise(
        "{ ld.shared.u32 $0, [$1]; st.shared.u32 [$1], 0; }", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _take_precise(address):
    """(sums of gradients, of hessians, rows) of what is there; zero from then on."""
    high = _take_shared(address)
    grad = ((high >> 12).to(tl.int64) << 40) + (_take_shared(address + 8192).to(tl.uint32).to(tl.int64) << 20)
    grad += _take_shared(address + 16384).to(tl.uint32).to(tl.int64)
    hess = _take_shared(address + 24576).to(tl.uint32).to(tl.int64) << 20
    hess += _take_shared(address + 32768).to(tl.uint32).to(tl.int64)
    return grad, hess, high & 4095


@triton.jit
def _load_bins(panels_ptr, entry, first_row, width, PRECISE: tl.constexpr):
    """(eight bins, eight more, the first one's feature) of each row; bins as words of 64 bits."""
    row = entry & _ROW
    if PRECISE:
        early = tl.load(panels_ptr + first_row + row)
        late = early
    else:
        early = tl.load(panels_ptr + (first_row + row) * 2)
        late = tl.load(panels_ptr + (first_row + row) * 2 + 1)
    return early, late, row.to(tl.int32) % width


@triton.jit
def _in_units(entry, weight, numbers_ptr):
    """Gradient and hessian of precise entries, in multiples of their units."""
    grad = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64) * tl.load(numbers_ptr)
    hess = weight.to(tl.float64) * tl.load(numbers_ptr + 1)
    return ((grad + ROUND) - ROUND).to(tl.int64), ((hess + ROUND) - ROUND).to(tl.int64)


@triton.jit(do_not_specialize=["rows", "features", "width", "groups"])
def add_rows(
    table_ptr,
    entries_ptr,
    weights_ptr,
    panels_ptr,
    pool_ptr,
    per_unit_ptr,
    rows,
    features,
    width,
    groups,
    PRECISE: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Histograms of the smaller child of each node, segment by segment and group by group of features."""
    segments = tl.load(table_ptr + _K * _COLUMNS + _SEGMENTS).to(tl.int32)
    length = tl.load(table_ptr + _K * _COLUMNS + _SEGMENT_ROWS)
    within = tl.arange(0, TILE)
    words: tl.constexpr = 3 if PRECISE else 2
    most: tl.constexpr = 8 if PRECISE else 16
    if SHARED:
        base = _shared_cells(PRECISE)
        place = tl.arange(0, PRECISE_CELLS if PRECISE else SHARED_CELLS)
        address = base + place * 4
        if PRECISE:
            _take_precise(address)
        else:
            _take_shared(address)
            _take_shared(address + 4 * SHARED_CELLS)
        tl.debug_barrier()
    for item in range(tl.program_id(0), segments * groups, tl.num_programs(0)):
        segment, group = item // groups, item % groups
        of, first = _node_of(table_ptr, segment, _FIRST_SEGMENT)
        start = tl.load(of + _SMALL_START) + (segment - first) * length
        stop = tl.minimum(start + length, tl.load(of + _SMALL_STOP))
        side = tl.load(of + _SMALL_SIDE)
        source, weights = entries_ptr + side * rows, weights_ptr + side * rows
        cells = pool_ptr + (tl.load(of + _SMALL_SLOT) * features + group * width) * (words * _BINS)
        first_row = tl.full((), group, tl.int64) * rows
        known = tl.minimum(features - group * width, width)
        if SHARED:
            counts = tl.zeros([PRECISE_CELLS if PRECISE else SHARED_CELLS], tl.int32)
            grads = counts.to(tl.int64) if PRECISE else counts
            hessians = counts.to(tl.int64)
            since = 0
            at = start + within
            entry = tl.load(source + at, mask=at < stop, other=0)
            following = tl.load(source + at + TILE, mask=at + TILE < stop, other=0)
            early, late, feature = _load_bins(panels_ptr, entry, first_row, width, PRECISE)
            for tile in range(start, stop, TILE):
                one = (tile + within < stop).to(tl.int32)
                if PRECISE:
                    weight = tl.load(weights + tile + within, mask=tile + within < stop, other=0.0)
                    grad, hess = _in_units(entry, weight, per_unit_ptr)  # 0 outside
                    high = ((grad >> 40) << 12).to(tl.int32) + one
                    middle, low = ((grad >> 20) & 0xFFFFF).to(tl.int32), (grad & 0xFFFFF).to(tl.int32)
                    upper_hess, lower_hess = (hess >> 20).to(tl.int32), (hess & 0xFFFFF).to(tl.int32)
                else:
                    high = ((entry >> 48) << 12).to(tl.int32) + one
                    lower_hess = (entry >> 32).to(tl.int32) & 0xFFFF  # 0 outside
                now_early, now_late, now_feature = early, late, feature
                # While these rows are added, the bins of the next are on their way, and the entries after those.
                entry, ahead = following, tile + 2 * TILE + within
                early, late, feature = _load_bins(panels_ptr, entry, first_row, width, PRECISE)
                following = tl.load(source + ahead, mask=ahead < stop, other=0)
                for byte in tl.static_range(most):
                    if byte < width:
                        bin_ = ((now_early if byte < 8 else now_late) >> (byte % 8 * 8)).to(tl.int32) & 255
                        cell = base + (now_feature * _BINS + bin_) * 4
                        if PRECISE:
                            _add_shared_precise(cell, high, middle, low, upper_hess, lower_hess)
                        else:
                            _add_shared(cell, high, lower_hess)
                        now_feature = tl.where(now_feature == width - 1, 0, now_feature + 1)
                since += 1
                if since == TILES:
                    since = 0
                    tl.debug_barrier()
                    if PRECISE:
                        more, more_hess, more_rows = _take_precise(address)
                        grads += more
                        hessians += more_hess
                        counts += more_rows
                    else:
                        packed = _take_shared(address)
                        grads += packed >> 12
                        counts += packed & 4095
                    tl.debug_barrier()
            tl.debug_barrier()
            if PRECISE:
                more, more_hess, more_rows = _take_precise(address)
                grads += more
                hessians += more_hess
                counts += more_rows
            else:
                packed = _take_shared(address)
                grads += packed >> 12
                counts += packed & 4095
                hessians = _take_shared(address + 4 * SHARED_CELLS).to(tl.uint32).to(tl.int64)
            tl.debug_barrier()
            used = (counts > 0) & (place // _BINS < known)
            to = cells + place // _BINS * (words * _BINS) + place % _BINS
            if PRECISE:
                tl.atomic_add(to, grads, mask=used, sem="relaxed")
                tl.atomic_add(to + 2 * _BINS, counts.to(tl.int64), mask=used, sem="relaxed")
            else:
                tl.atomic_add(to, (grads.to(tl.int64) << _SHIFT) + counts, mask=used, sem="relaxed")
            tl.atomic_add(to + _BINS, hessians, mask=used, sem="relaxed")
        else:
            for tile in range(start, stop, TILE):
                inside = tile + within < stop
                entry = tl.load(source + tile + within, mask=inside, other=0)
                early, late, feature = _load_bins(panels_ptr, entry, first_row, width, PRECISE)
                if PRECISE:
                    weight = tl.load(weights + tile + within, mask=inside, other=0.0)
                    grad, hess = _in_units(entry, weight, per_unit_ptr)
                else:
                    grad, hess = ((entry >> 48) << _SHIFT) + 1, (entry >> 32) & 0xFFFF
                for byte in tl.static_range(most):
                    if byte < width:
                        bin_ = ((early if byte < 8 else late) >> (byte % 8 * 8)).to(tl.int32) & 255
                        to, used = cells + feature * (words * _BINS) + bin_, inside & (feature < known)
                        tl.atomic_add(to, grad, mask=used, sem="relaxed")
                        tl.atomic_add(to + _BINS, hess, mask=used, sem="relaxed")
                        if PRECISE:
                            tl.atomic_add(to + 2 * _BINS, inside.to(tl.int64), mask=used, sem="relaxed")
                        feature = tl.where(feature == width - 1, 0, feature + 1)


# ---- splits ----------------------------------------------------------------------------------------------------------


@triton.jit
def _quotient(over, under):
    """over / under of numbers that are not below zero; by zero it is infinity, and 0 / 0 is below every gain."""
    whole = over / tl.where(under == 0.0, 1.0, under)
    return tl.where(under == 0.0, tl.where(over > 0.0, float("inf"), float("-inf")), whole)


@triton.jit
def _side_gain(grad, hess, l1, l2):
    shrunk = tl.abs(grad)
    shrunk = tl.where(shrunk > l1, shrunk - l1, 0.0)
    return _quotient(shrunk * shrunk, hess + l2)


@triton.jit
def _leaf_value(grad, hess, l1, l2, low, high):
    """`trees.loops.split.leaf_value`."""
    shrunk = tl.abs(grad)
    shrunk = tl.where(shrunk > l1, shrunk - l1, 0.0)
    step = shrunk / tl.where(hess + l2 <= 0.0, 1.0, hess + l2)
    value = tl.where(hess + l2 <= 0.0, 0.0, tl.where(grad > 0.0, 0.0 - step, step))
    value = tl.where(low > value, low, value)
    return tl.where(high < value, high, value)


@triton.jit
def _gain_of_value(grad, hess, l1, l2, value):
    return 0.0 - (2.0 * grad * value + (hess + l2) * value * value + 2.0 * l1 * tl.abs(value))


@triton.jit
def _fields(first, second, third, PRECISE: tl.constexpr):
    """(gradient, hessian, rows) of the words of cells."""
    if PRECISE:
        return first, second, third
    return first >> _SHIFT, second, first & _COUNT


@triton.jit(do_not_specialize=["features", "categories"])
def judge_features(
    table_ptr,
    pool_ptr,
    columns_ptr,
    numbers_ptr,
    scratch_ptr,
    gains_ptr,
    result_ptr,
    features,
    categories,
    PRECISE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_CATEGORIES: tl.constexpr,
):
    """One feature's best split of one child of a node, where `trees.loops.split.judge` finds it; the parent's cells
    become those of the larger child."""
    child, feature = tl.program_id(0) // features, tl.program_id(0) % features
    node, side = child // 2, child % 2
    of = table_ptr + node * _COLUMNS
    slot, rest = tl.load(of + _SMALL_SLOT), tl.load(of + _LARGE_SLOT)
    if (node < tl.load(table_ptr + _K * _COLUMNS + _NODES)) & (slot >= 0) & ((side == 0) | (rest >= 0)):
        bins = tl.arange(0, _BINS)
        words: tl.constexpr = 3 if PRECISE else 2
        cells = pool_ptr + (slot * features + feature) * (words * _BINS) + bins
        first, second = tl.load(cells), tl.load(cells + _BINS)
        third = tl.load(cells + 2 * _BINS) if PRECISE else first
        if side == 1:
            cells = pool_ptr + (rest * features + feature) * (words * _BINS) + bins
            first, second = tl.load(cells) - first, tl.load(cells + _BINS) - second
            tl.store(cells, first)
            tl.store(cells + _BINS, second)
            if PRECISE:
                third = tl.load(cells + 2 * _BINS) - third
                tl.store(cells + 2 * _BINS, third)
        column = columns_ptr + feature * _OF_COLUMN
        count, groups = tl.load(column).to(tl.int32), tl.load(column + 1)
        category = tl.load(column + 2).to(tl.int32)
        allowed = (groups & tl.load(of + _GROUPS)) != 0
        grad_scale, hess_scale = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
        l1, l2, least_weight = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3), tl.load(numbers_ptr + 4)
        least_rows, min_gain = tl.load(numbers_ptr + 5).to(tl.int64), tl.load(numbers_ptr + 6)
        low = tl.load(of + _SMALL_LOW + 2 * side).to(tl.float64, bitcast=True)
        high = tl.load(of + _SMALL_LOW + 2 * side + 1).to(tl.float64, bitcast=True)
        direction = tl.load(column + 3).to(tl.float64)
        grad, hess, rows = _fields(first, second, third, PRECISE)
        all_grad, all_hess, all_rows = tl.sum(grad, 0), tl.sum(hess, 0), tl.sum(rows, 0)
        node_grad, node_hess = all_grad.to(tl.float64) * grad_scale, all_hess.to(tl.float64) * hess_scale
        if KIND == 2:
            value = _leaf_value(node_grad, node_hess, l1, l2, low, high)
            before = _gain_of_value(node_grad, node_hess, l1, l2, value)
        else:
            before = tl.where(node_hess + l2 > 0.0, _side_gain(node_grad, node_hess, l1, l2), 0.0)
        noise = tl.abs(before) * NOISE
        least = tl.where(min_gain > noise, min_gain, noise)
        is_missing = bins == _MISSING
        missing_first = tl.sum(tl.where(is_missing, first, 0), 0)
        missing_second = tl.sum(tl.where(is_missing, second, 0), 0)
        missing_third = tl.sum(tl.where(is_missing, third, 0), 0)
        has_missing = tl.sum(tl.where(is_missing, rows, 0), 0) > 0
        first, second = tl.where(is_missing, 0, first), tl.where(is_missing, 0, second)
        third = tl.where(is_missing, 0, third)
        turns = tl.where(has_missing, 2, 1)
        used, rank, scratch = count, bins, scratch_ptr
        if HAS_CATEGORIES:
            if category > 0:  # by the ratio of gradients to hessians, from either end; missing and new ones go right
                l2 += tl.load(numbers_ptr + 8)
                turns = tl.full((), 2, tl.int32)
                scratch += (tl.full((), child, tl.int64) * categories + category - 1) * _SCRATCH
                is_used = (rows > 0) & (bins < count)
                used = tl.sum(is_used.to(tl.int32), 0)
                smooth = hess.to(tl.float64) * hess_scale + tl.load(numbers_ptr + 7)
                ratio = grad.to(tl.float64) * grad_scale / tl.where(smooth > 0.0, smooth, 1.0)
                ratio = tl.where(smooth > 0.0, ratio, 0.0)
                tl.store(scratch + bins, tl.where(is_used, ratio, float("nan")).to(tl.int64, bitcast=True))
                tl.debug_barrier()
                rank = bins * 0
                for other in range(count):
                    ratio_there = tl.load(scratch + other).to(tl.float64, bitcast=True)
                    rank += ((ratio_there < ratio) | ((ratio_there == ratio) & (other < bins))).to(tl.int32)
                rank = tl.where(is_used, rank, _BINS)
        result = result_ptr + tl.program_id(0).to(tl.int64) * _RESULT
        best, best_bin, to_left = least * 0.0, tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        best_grad, best_hess, best_rows = all_grad * 0, all_hess * 0, all_rows * 0
        for turn in range(turns):
            ordered_first, ordered_second, ordered_third, limit = first, second, third, count - 1
            if has_missing:
                limit = count - turn
            place_of = bins
            if HAS_CATEGORIES:
                if category > 0:
                    place_of = tl.where(rank < _BINS, tl.where(turn == 0, rank, used - 1 - rank), _BINS)
                    to = scratch + _BINS + place_of
                    tl.debug_barrier()
                    tl.store(to, first, mask=rank < _BINS)
                    tl.store(to + _BINS, second, mask=rank < _BINS)
                    tl.store(to + 2 * _BINS, third, mask=rank < _BINS)
                    tl.debug_barrier()
                    ordered_first = tl.load(scratch + _BINS + bins, mask=bins < used, other=0)
                    ordered_second = tl.load(scratch + 2 * _BINS + bins, mask=bins < used, other=0)
                    ordered_third = tl.load(scratch + 3 * _BINS + bins, mask=bins < used, other=0)
                    limit = used
            more = tl.where((turn == 1) & (category == 0), 1, 0).to(tl.int64)
            lefts = tl.cumsum(ordered_first, 0) + missing_first * more
            left_seconds = tl.cumsum(ordered_second, 0) + missing_second * more
            left_thirds = lefts
            if PRECISE:
                left_thirds = tl.cumsum(ordered_third, 0) + missing_third * more
            left_grads, left_weights, left_rows = _fields(lefts, left_seconds, left_thirds, PRECISE)
            left, right = left_grads.to(tl.float64) * grad_scale, (all_grad - left_grads).to(tl.float64) * grad_scale
            left_hess = left_weights.to(tl.float64) * hess_scale
            right_hess = (all_hess - left_weights).to(tl.float64) * hess_scale
            left_all, right_all = left_hess + l2, right_hess + l2
            if KIND == 0:
                gain = _quotient(left * left * right_all + right * right * left_all, left_all * right_all)
            elif KIND == 1:
                gain = _side_gain(left, left_hess, l1, l2) + _side_gain(right, right_hess, l1, l2)
            else:
                left_value = _leaf_value(left, left_hess, l1, l2, low, high)
                right_value = _leaf_value(right, right_hess, l1, l2, low, high)
                gain = _gain_of_value(left, left_hess, l1, l2, left_value)
                gain += _gain_of_value(right, right_hess, l1, l2, right_value)
                gain = tl.where((right_value - left_value) * direction < 0.0, float("-inf"), gain)
            valid = (bins < limit) & (left_rows >= least_rows) & (all_rows - left_rows >= least_rows) & (gain == gain)
            valid = valid & (left_hess >= least_weight) & (right_hess >= least_weight)
            valid = valid & (left_all > 0.0) & (right_all > 0.0) & allowed
            gain = tl.where(valid, gain, float("-inf"))
            at = tl.argmax(gain, 0)
            beyond = tl.max(gain, 0) - before
            if (beyond > least) & (beyond > best):
                best, is_there = beyond, bins == at
                best_grad = tl.sum(tl.where(is_there, left_grads, 0), 0)
                best_hess = tl.sum(tl.where(is_there, left_weights, 0), 0)
                best_rows = tl.sum(tl.where(is_there, left_rows, 0), 0)
                best_bin = at.to(tl.int32)
                to_left = tl.where(has_missing, turn, (2 * best_rows >= all_rows).to(tl.int32))
                if HAS_CATEGORIES:
                    if category > 0:
                        best_bin, to_left = best_bin * 0 - 1, to_left * 0
                        bits = tl.where(place_of <= at, tl.full([_BINS], 1, tl.int64) << (bins & 63).to(tl.int64), 0)
                        for word in tl.static_range(_SET_WORDS):
                            tl.store(result + _RESULT_SET + word, tl.sum(tl.where(bins // 64 == word, bits, 0), 0))
        tl.store(gains_ptr + tl.program_id(0), best)
        tl.store(result, best.to(tl.int64, bitcast=True))
        tl.store(result + 1, feature.to(tl.int64))
        tl.store(result + 2, best_bin.to(tl.int64))
        tl.store(result + 3, to_left.to(tl.int64))
        tl.store(result + 4, best_grad)
        tl.store(result + 5, best_hess)
        tl.store(result + 6, best_rows)
        tl.store(result + 7, all_grad)
        tl.store(result + 8, all_hess)
        tl.store(result + 9, all_rows)


@triton.jit(do_not_specialize=["features"])
def pick_features(table_ptr, gains_ptr, by_feature_ptr, result_ptr, features, PICKED: tl.constexpr):
    """Of each child the result of the best feature, of equal gains the lowest."""
    child = tl.program_id(0)
    if child < 2 * tl.load(table_ptr + _K * _COLUMNS + _NODES):
        best, chosen = tl.full((), -1.0, tl.float64), tl.full((), 0, tl.int32)
        for start in range(0, features, PICKED):
            feature = start + tl.arange(0, PICKED)
            gains = tl.load(gains_ptr + child * features + feature, mask=feature < features, other=-1.0)
            top, at = tl.max(gains, 0), tl.argmax(gains, 0)
            chosen = tl.where(top > best, start + at, chosen).to(tl.int32)
            best = tl.maximum(top, best)
        words = tl.arange(0, _RESULT)
        of = by_feature_ptr + (tl.full((), child, tl.int64) * features + chosen) * _RESULT
        tl.store(result_ptr + child * _RESULT + words, tl.load(of + words))


HAS_SHARED_ATOMICS = not INTERPRETED.value
