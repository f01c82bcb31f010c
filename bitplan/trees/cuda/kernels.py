"""Triton kernels that expand a wave of leaves: partition their rows, sum histograms; `judge` then finds their splits.

Everything here is an integer: the sums are those of the CPU.

`table` says what a wave does: a row for each of up to K nodes, then a row for all of them. Grids are fixed; programs
take blocks of rows, or segments of a histogram, in turn.

Bins of a row lie in groups of up to 16 features, 16 bytes a row. Row r begins with feature r % WIDTH of the group: the
32 threads of a warp, a row each, then add to the cells of different features, even where a feature has few bins.

A cell of a histogram is two int64: gradient << 28 plus rows, and hessian. A program adds its rows to cells in shared
memory, two 32-bit atomics for each bin, gradient << 12 plus rows and hessian, and adds those to the cells of the
node. Triton has no atomics in shared memory: these are PTX. Its interpreter adds to the node's cells at once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from bitplan.base.loops.launch import INTERPRETED
from bitplan.trees.cuda.waves import (
    BIN,
    BLOCKS,
    COLUMNS,
    FEATURE,
    FIRST_BLOCK,
    FIRST_SEGMENT,
    LEFTS,
    MISSING_LEFT,
    NODES,
    RIGHTS,
    SEGMENT_ROWS,
    SEGMENTS,
    SIDE,
    SMALL_SIDE,
    SMALL_SLOT,
    SMALL_START,
    SMALL_STOP,
    START,
    STOP,
)

# ---- kernels ---------------------------------------------------------------------------------------------------------


BINS = 256
GROUP_BYTES = 16
CELL_SHIFT = 28  # rows of a tree are fewer than 2^28, and 2^35 / 127 is more than that
MOST_ROWS = 2**CELL_SHIFT - 1
TILE, TILES = 512, 7  # rows of a tile; tiles until the 12 bits of a row count are full

_BINS, _BYTES, _SHIFT, _COLUMNS = (tl.constexpr(each) for each in (BINS, GROUP_BYTES, CELL_SHIFT, COLUMNS))
_MISSING, _ROW = tl.constexpr(255), tl.constexpr(0xFFFFFFFF)
_START, _STOP, _SIDE = (tl.constexpr(each) for each in (START, STOP, SIDE))
_FEATURE, _BIN, _MISSING_LEFT = (tl.constexpr(each) for each in (FEATURE, BIN, MISSING_LEFT))
_FIRST_BLOCK, _FIRST_SEGMENT = tl.constexpr(FIRST_BLOCK), tl.constexpr(FIRST_SEGMENT)
_SMALL_START, _SMALL_STOP, _SMALL_SIDE = (tl.constexpr(each) for each in (SMALL_START, SMALL_STOP, SMALL_SIDE))
_SMALL_SLOT = tl.constexpr(SMALL_SLOT)
_LEFTS, _RIGHTS, _NODES, _BLOCKS = (tl.constexpr(each) for each in (LEFTS, RIGHTS, NODES, BLOCKS))
_SEGMENTS, _SEGMENT_ROWS = tl.constexpr(SEGMENTS), tl.constexpr(SEGMENT_ROWS)
SHARED_CELLS = tl.constexpr(4096)  # of 4 bytes: 16 features


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "width"])
def lay_out(columns_ptr, bins_ptr, rows, width, BLOCK: tl.constexpr):
    """Bins of one group of features, given by column, into 16 bytes a row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    for place in range(width):
        bin_ = tl.load(columns_ptr + row + tl.full((), place, tl.int64) * rows, mask=inside, other=0)
        tl.store(bins_ptr + row * _BYTES + byte_of(place, row, width), bin_, mask=inside)


@triton.jit
def byte_of(place, row, width):
    """The offset of a row's bin of a feature, among the bytes of the feature's group."""
    byte = place - row.to(tl.int32) % width
    return tl.where(byte < 0, byte + width, byte)


@triton.jit
def _node_of(table_ptr, item, column: tl.constexpr, K: tl.constexpr):
    """The node that a block or segment belongs to, its row of the table, and its first block or segment."""
    firsts = tl.load(table_ptr + tl.arange(0, K) * _COLUMNS + column)
    node = tl.sum((firsts <= item).to(tl.int32), 0) - 1
    of = table_ptr + node * _COLUMNS
    return node, of, tl.load(of + column)


@triton.jit(do_not_specialize=["rows", "features", "width"])
def part_rows(
    table_ptr,
    entries_ptr,
    bins_ptr,
    pool_ptr,
    sets_ptr,
    rows,
    features,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    SETS: tl.constexpr,
):
    """Rows of each node to the other side of `entries`, those that go left first. Clears the new histograms, too.

    With SETS a row of `sets` says of each bin whether it goes left; without, all up to the node's do.

    Blocks reserve their places with atomics: in which order rows lie in a child is left to chance, and changes no sum.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    nodes = tl.load(table_ptr + K * _COLUMNS + _NODES).to(tl.int32)
    cells = tl.arange(0, 2 * _BINS)
    for item in range(program, nodes * features, programs):
        slot = tl.load(table_ptr + item // features * _COLUMNS + _SMALL_SLOT)
        if slot >= 0:
            nothing = tl.zeros([2 * _BINS], tl.int64)
            tl.store(pool_ptr + (slot * features + item % features) * (2 * _BINS) + cells, nothing)
    blocks = tl.load(table_ptr + K * _COLUMNS + _BLOCKS).to(tl.int32)
    for block in range(program, blocks, programs):
        node, of, first = _node_of(table_ptr, block, _FIRST_BLOCK, K)
        start, stop, side = tl.load(of + _START), tl.load(of + _STOP), tl.load(of + _SIDE)
        feature, last_left = tl.load(of + _FEATURE), tl.load(of + _BIN).to(tl.int32)
        missing_left = tl.load(of + _MISSING_LEFT).to(tl.int32)
        within = tl.arange(0, BLOCK)
        at = start + (block - first) * BLOCK + within
        inside = at < stop
        entry = tl.load(entries_ptr + side * rows + at, mask=inside, other=0)
        row = entry & _ROW
        place = (feature // width * rows + row) * _BYTES + byte_of((feature % width).to(tl.int32), row, width)
        bin_ = tl.load(bins_ptr + place, mask=inside, other=0).to(tl.int32)
        if SETS:
            goes_left = tl.load(sets_ptr + node * _BINS + bin_).to(tl.int32)
        else:
            goes_left = tl.where(bin_ == _MISSING, missing_left, (bin_ <= last_left).to(tl.int32))
        goes_left = tl.where(inside, goes_left, 0)
        lefts = tl.sum(goes_left, 0)
        rights = tl.sum(inside.to(tl.int32), 0) - lefts
        before = tl.cumsum(goes_left, 0) - goes_left
        first_left = start + tl.atomic_add(of + _LEFTS, lefts.to(tl.int64), sem="relaxed")
        first_right = stop - rights - tl.atomic_add(of + _RIGHTS, rights.to(tl.int64), sem="relaxed")
        to = tl.where(goes_left > 0, first_left + before, first_right + within - before)
        tl.store(entries_ptr + (1 - side) * rows + to, entry, mask=inside)


# ---- histograms ------------------------------------------------------------------------------------------------------


@triton.jit
def _shared_cells():
    """The address of 32 KiB of shared memory: 4096 sums of gradients and rows, then 4096 of hessians."""
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
def _take_shared(address):
    """Read what lies at an address of shared memory, and set it to zero."""
    return tl.inline_asm_elementwise(
        "{ ld.shared.u32 $0, [$1]; st.shared.u32 [$1], 0; }", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load_bins(panels_ptr, entry, first_row, WIDTH: tl.constexpr):
    """Return (eight bins, eight more, the first one's feature) of each row; bins as words of 64 bits."""
    row = entry & _ROW
    word = panels_ptr + (first_row + row) * 2
    early = tl.load(word)
    late = tl.load(word + 1) if WIDTH > 8 else early
    return early, late, (row.to(tl.int32) % WIDTH)


@triton.jit(do_not_specialize=["rows", "features", "groups"])
def add_rows(
    table_ptr,
    entries_ptr,
    panels_ptr,
    pool_ptr,
    rows,
    features,
    groups,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Histograms of the smaller child of each node, segment by segment and group by group of features."""
    segments = tl.load(table_ptr + K * _COLUMNS + _SEGMENTS).to(tl.int32)
    length = tl.load(table_ptr + K * _COLUMNS + _SEGMENT_ROWS)
    within = tl.arange(0, TILE)
    if SHARED:
        base = _shared_cells()
        place = tl.arange(0, SHARED_CELLS)
        address = base + place * 4
        _take_shared(address)
        _take_shared(address + 4 * SHARED_CELLS)
        tl.debug_barrier()
    for item in range(tl.program_id(0), segments * groups, tl.num_programs(0)):
        segment, group = item // groups, item % groups
        _node, of, first = _node_of(table_ptr, segment, _FIRST_SEGMENT, K)
        start = tl.load(of + _SMALL_START) + (segment - first) * length
        stop = tl.minimum(start + length, tl.load(of + _SMALL_STOP))
        source = entries_ptr + tl.load(of + _SMALL_SIDE) * rows
        cells = pool_ptr + (tl.load(of + _SMALL_SLOT) * features + group * WIDTH) * (2 * _BINS)
        first_row = tl.full((), group, tl.int64) * rows
        width = features - group * WIDTH
        if SHARED:
            grads = tl.zeros([SHARED_CELLS], tl.int32)
            counts = tl.zeros([SHARED_CELLS], tl.int32)
            since = 0
            at = start + within
            entry = tl.load(source + at, mask=at < stop, other=0)
            following = tl.load(source + at + TILE, mask=at + TILE < stop, other=0)
            early, late, feature = _load_bins(panels_ptr, entry, first_row, WIDTH)
            for tile in range(start, stop, TILE):
                both = tl.where(tile + within < stop, ((entry >> 48) << 12).to(tl.int32) + 1, 0)
                hess = (entry >> 32).to(tl.int32) & 0xFFFF  # 0 outside
                now_early, now_late, now_feature = early, late, feature
                # While these rows are added, the bins of the next are on their way, and the entries after those.
                entry, ahead = following, tile + 2 * TILE + within
                early, late, feature = _load_bins(panels_ptr, entry, first_row, WIDTH)
                following = tl.load(source + ahead, mask=ahead < stop, other=0)
                for byte in tl.static_range(WIDTH):
                    bin_ = ((now_early if byte < 8 else now_late) >> (byte % 8 * 8)).to(tl.int32) & 255
                    _add_shared(base + (now_feature * _BINS + bin_) * 4, both, hess)
                    now_feature = tl.where(now_feature == WIDTH - 1, 0, now_feature + 1)
                since += 1
                if since == TILES:
                    since = 0
                    tl.debug_barrier()
                    packed = _take_shared(address)
                    grads += packed >> 12
                    counts += packed & 4095
                    tl.debug_barrier()
            tl.debug_barrier()
            packed = _take_shared(address)
            grads += packed >> 12
            counts += packed & 4095
            hess = _take_shared(address + 4 * SHARED_CELLS)
            tl.debug_barrier()
            used = (counts > 0) & (place // _BINS < width)
            both = (grads.to(tl.int64) << _SHIFT) + counts
            tl.atomic_add(cells + place * 2, both, mask=used, sem="relaxed")
            tl.atomic_add(cells + place * 2 + 1, hess.to(tl.uint32).to(tl.int64), mask=used, sem="relaxed")
        else:
            for tile in range(start, stop, TILE):
                inside = tile + within < stop
                entry = tl.load(source + tile + within, mask=inside, other=0)
                early, late, feature = _load_bins(panels_ptr, entry, first_row, WIDTH)
                both = ((entry >> 48) << _SHIFT) + 1
                hess = (entry >> 32) & 0xFFFF
                for byte in tl.static_range(WIDTH):
                    bin_ = ((early if byte < 8 else late) >> (byte % 8 * 8)).to(tl.int32) & 255
                    to = cells + (feature * _BINS + bin_) * 2
                    used = inside & (feature < width)
                    tl.atomic_add(to, both, mask=used, sem="relaxed")
                    tl.atomic_add(to + 1, hess, mask=used, sem="relaxed")
                    feature = tl.where(feature == WIDTH - 1, 0, feature + 1)


HAS_SHARED_ATOMICS = not INTERPRETED.value
