"""A tree grown by a team of threads that never ask for the interpreter: each calls `grow_tree` once for a tree. A
thread that comes late is not waited for: the tree is the same without it.

A leaf is expanded by one thread, ahead of the queue, or by all of them (`nodes.take` says which). Of a leaf of many
rows each thread sums a histogram of its own part of the rows, then each adds up and judges features of its own; of a
leaf of few rows each sums them, too. What is one thread's work the first does, while the others copy or wait. Integers
may be added in any order, and of equal gains the lowest feature wins, so the tree is the same for any number of
threads.

Histograms lie in one pool, a slot for each leaf that could be split; slots are used again from tree to tree.
"""

from __future__ import annotations

import numpy as np

from bitplan.base.loops.atomics import (
    LINE,
    cycles,
    fetch_add,
    gather,
    join,
    lock,
    meet,
    read,
    release,
    unlock,
    wait_for_change,
)
from bitplan.base.loops.jit import call_at, run_at
from bitplan.trees.loops.compiling import called, compiled, inlined, prefetch
from bitplan.trees.loops.histogram import BINS, PANEL, ROW, unpack_cell
from bitplan.trees.loops.nodes import (
    COMPLETE,
    DROPPED,
    HELP,
    HOPELESS,
    LARGE_ROWS,
    LEAVES,
    MEETING_ROWS,
    QUEUED,
    READY,
    SHARED,
    SIZE,
    WAIT,
)
from bitplan.trees.loops.rows import AHEAD, bins_of, part_by_panel
from bitplan.trees.loops.split import (
    CHILD,
    FEATURE,
    GAIN,
    GRAD,
    HIGH,
    LEFT_GRAD,
    LOW,
    ROWS,
    SLOT,
    START,
    STOP,
)

# Places in `sync`, a LINE apart; the last is the first of a line for each thread.
LOCK, CAME, TEAM, MEETING, _TURN, CHANGES, CHOSEN, IS_DIVIDED, SMALL, SMALL_SLOT, LARGE_SLOT, NEXT, LOOKS, LEFTS = (
    LINE * place for place in range(14)
)  # LOOKS: how often a waiting thread looks before it yields its core
# Places in `sizes`, behind those of `nodes.take`: what a tree's loops are told.
NARROW, CELLS, WIDE_FROM, MOST_THREADS, PATIENCE = range(HELP + 1, HELP + 6)
# Places in `kernels`, addresses of what is compiled apart; from the last on, the loop that adds rows to each panel.
TAKE, DIVIDE, JUDGE_PACKED, JUDGE, ADD_FEW, ADDERS = range(6)
# Places in `counts`, behind those of `nodes`: free slots for narrow cells; the next, for wide ones.
FREE = 9
WIDE = 3  # words
COPY_SHARE = 64  # of nodes with fewer rows than one in so many, a column has a cache line for each, as its panel has
BLOCK = 2048  # rows of a histogram that a thread takes at once
ALONE_ROWS = 1024  # that one thread divides before others would have met
TWO = 2  # features are dealt out by twos
U = np.uint64
# Places in a thread's row of `ticks`: cycles of the processor's clock spent in each phase, and its last reading.
PARTITION, SUM, JUDGING, WAITING, QUEUE, LAST = range(6)


@inlined
def _spend(ticks, me, phase):  # type: ignore[no-untyped-def]
    """What has passed since the last reading was this phase."""
    now = cycles()
    ticks[me, phase] += now - ticks[me, LAST]
    ticks[me, LAST] = now


@inlined
def _meet(me, team, sync, ticks, phase):  # type: ignore[no-untyped-def]
    """Wait for the others, at the end of a phase."""
    _spend(ticks, me, phase)
    meet(sync, MEETING, team, sync[LOOKS])
    _spend(ticks, me, WAITING)


@inlined
def _gather(me, team, sync, ticks, phase):  # type: ignore[no-untyped-def]
    """Wait, at the end of a phase: the first thread for the others, these until it calls `_release`."""
    _spend(ticks, me, phase)
    gather(me, sync, MEETING, team, sync[LOOKS])
    _spend(ticks, me, WAITING)


@inlined
def _release(sync, ticks):  # type: ignore[no-untyped-def]
    _spend(ticks, 0, QUEUE)
    release(sync, MEETING)


@inlined
def _add_part(entries, first, last, data, kernels, scales, pairs, cells, words):  # type: ignore[no-untyped-def]
    """Add entries first..last to narrow cells."""
    panels, firsts, used, hess = data
    rows = entries[first:last]
    for at in range(used.size):
        panel = used[at]
        here = cells[panel * PANEL * BINS * words :]
        run_at(kernels[ADDERS + panel], (panels[firsts[panel] :], rows, hess, scales[0], scales[1], pairs, here))


# ---- one node, all threads -------------------------------------------------------------------------------------------


@called
def _part_apart(entries, start, stop, bins, row_bytes, goes_left, node, spare):  # type: ignore[no-untyped-def]
    """Copy entries to the same part of `spare`: those that go left from its start on, the others from its end back."""
    left, right, last = U(start), U(stop - 1), stop - 1
    for i in range(start, stop):
        prefetch(bins, np.int64(entries[U(i + AHEAD if i + AHEAD < last else last)] & ROW) * row_bytes)
        entry = entries[U(i)]
        is_left = U(goes_left[U(node), U(bins[(entry & ROW) * U(row_bytes)])])
        spare[left] = entry
        spare[right] = entry  # of the last one both places are the same
        left += is_left
        right -= U(1) - is_left
    return np.int64(left) - start


@called
def _copy_column(me, team, sync, ticks, work, data, feature):  # type: ignore[no-untyped-def]
    """All threads copy a column out of its panel."""
    columns, is_there = work[2], work[3]
    bins, row_bytes = bins_of(work, data, feature)
    count = columns.shape[1]
    for row in range(count * me // team, count * (me + 1) // team):
        columns[U(feature), U(row)] = bins[U(row) * U(row_bytes)]
    _meet(me, team, sync, ticks, PARTITION)
    if me == 0:
        is_there[feature] = 1
    _meet(me, team, sync, ticks, PARTITION)


@inlined
def _part_of(nodes, node, me, team):  # type: ignore[no-untyped-def]
    """This thread's part of a node's rows."""
    start, stop = nodes[node, START], nodes[node, STOP]
    share = (stop - start + team - 1) // team
    first = min(start + me * share, stop)
    return first, min(first + share, stop)


@called
def _part_own(me, team, sync, ticks, work, data, goes_left, nodes, node):  # type: ignore[no-untyped-def]
    """Part this thread's rows in `spare`; returns how many of the node's go left, when all threads are here."""
    entries, spare, columns, is_there = work[0], work[1], work[2], work[3]
    feature = nodes[node, FEATURE]
    if not is_there[feature] and (nodes[node, STOP] - nodes[node, START]) * COPY_SHARE > columns.shape[1]:
        _copy_column(me, team, sync, ticks, work, data, feature)
    first, last = _part_of(nodes, node, me, team)
    bins, row_bytes = bins_of(work, data, feature)
    sync[LEFTS + me * LINE] = _part_apart(entries, first, last, bins, row_bytes, goes_left, node, spare)
    _meet(me, team, sync, ticks, PARTITION)
    total = np.int64(0)
    for other in range(team):
        total += sync[LEFTS + other * LINE]
    return total


@called
def _bring_back(me, team, sync, work, nodes, node, total):  # type: ignore[no-untyped-def]
    """Copy what this thread parted to its place: rows that go left first, all in their order."""
    entries, spare = work[0], work[1]
    start, before, here = nodes[node, START], np.int64(0), sync[LEFTS + me * LINE]
    first, last = _part_of(nodes, node, me, team)
    for other in range(me):
        before += sync[LEFTS + other * LINE]
    to = start + before
    for i in range(here):
        entries[U(to + i)] = spare[U(first + i)]
    to = start + total + (first - start - before)
    for i in range(last - first - here):
        entries[U(to + i)] = spare[U(last - 1 - i)]


@called
def _sum_part(me, team, sync, start, count, sizes, entries, data, kernels, scales, spaces):  # type: ignore[no-untyped-def]
    """What this thread takes of a histogram, block by block, into its own cells; returns how many threads have some,
    and their words. Some cores are slower than others, so blocks are not dealt out before.

    Of more rows than the narrow cells of all hold, each thread sums into wide ones of its own.
    """
    pairs, own, own_wide = spaces
    narrow, most, filled = sizes[NARROW], sizes[LARGE_ROWS] - 1, np.int64(0)
    block_rows = min(BLOCK, most)
    blocks = (count + block_rows - 1) // block_rows
    workers = min(max(blocks, 1), team)
    is_wide = blocks > workers * (most // block_rows)
    words = WIDE if is_wide else narrow
    if me >= workers:
        return workers, words
    own[:] = 0
    if is_wide:
        own_wide[:] = 0
    while True:
        is_full = filled + block_rows > most
        block = count
        if is_wide or not is_full:
            block = fetch_add(sync, NEXT, block_rows)
        if is_wide and (is_full or block >= count):
            for at in range(sizes[CELLS]):
                grad, weight, rows = unpack_cell(own, narrow, at)
                own_wide[U(3 * at)] += grad
                own_wide[U(3 * at + 1)] += weight
                own_wide[U(3 * at + 2)] += rows
            own[:] = 0
            filled = np.int64(0)
        if block >= count:
            return workers, words
        end = min(block + block_rows, count)
        _add_part(entries, start + block, start + end, data, kernels, scales, pairs, own, narrow)
        filled += end - block


@inlined
def _pack_cell(cells, words, at, grad, hess, rows):  # type: ignore[no-untyped-def]
    if words == 1:
        cells[U(at)] = (grad << 40) + (hess << 16) + rows
    elif words == 2:
        cells[U(2 * at)] = grad
        cells[U(2 * at + 1)] = (hess << 16) + rows
    else:
        cells[U(3 * at)] = grad
        cells[U(3 * at + 1)] = hess
        cells[U(3 * at + 2)] = rows


@called
def _add_up(me, team, parts, part_words, workers, out, out_words, parent, parent_words, rest, rest_words):  # type: ignore[no-untyped-def]
    """The cells of this thread's features: out = the sum of all parts, rest = parent - out (unless rest is empty)."""
    begin, end = _own_features(me, team, out.size // out_words)
    first, last = begin * BINS, end * BINS
    if out_words == part_words and (rest.size == 0 or parent_words == rest_words == out_words):
        for at in range(first * out_words, last * out_words):
            total = parts[0, U(at)]
            for worker in range(1, workers):
                total += parts[U(worker), U(at)]
            out[U(at)] = total
        if rest.size:
            for at in range(first * out_words, last * out_words):
                rest[U(at)] = parent[U(at)] - out[U(at)]
        return
    for at in range(first, last):
        grad, hess, rows = np.int64(0), np.int64(0), np.int64(0)
        for worker in range(workers):
            more_grad, more_hess, more_rows = unpack_cell(parts[worker], part_words, at)
            grad, hess, rows = grad + more_grad, hess + more_hess, rows + more_rows
        _pack_cell(out, out_words, at, grad, hess, rows)
        if rest.size:
            all_grad, all_hess, all_rows = unpack_cell(parent, parent_words, at)
            _pack_cell(rest, rest_words, at, all_grad - grad, all_hess - hess, all_rows - rows)


@inlined
def _cells(pool, slot, sizes):  # type: ignore[no-untyped-def]
    """The cells of a slot, and their words."""
    words = WIDE if slot >= sizes[WIDE_FROM] else sizes[NARROW]
    return pool[slot : slot + sizes[CELLS] * words], words


@inlined
def _free(counts, free, slot, sizes):  # type: ignore[no-untyped-def]
    kind = np.int64(slot >= sizes[WIDE_FROM])
    free[kind, counts[FREE + kind]] = slot
    counts[FREE + kind] += 1


@inlined
def _slot_for(counts, free, rows, sizes):  # type: ignore[no-untyped-def]
    kind = np.int64(rows >= sizes[LARGE_ROWS])
    counts[FREE + kind] -= 1
    return free[kind, counts[FREE + kind]]


@inlined
def _free_hopeless(nodes, ready, counts, free, sizes):  # type: ignore[no-untyped-def]
    """Leaves that the tree has no room for are never split: their histograms are free."""
    for place in range(counts[DROPPED]):
        _free(counts, free, nodes[ready[place, HOPELESS], SLOT], sizes)


@inlined
def _own_features(me, team, cells):  # type: ignore[no-untyped-def]
    """The first and the end of the features whose cells this thread alone writes, and judges."""
    twos = cells // (TWO * BINS)
    return TWO * (twos * me // team), TWO * (twos * (me + 1) // team)


@inlined
def _within(columns, first, last):  # type: ignore[no-untyped-def]
    """Those of sorted columns that are in first..last."""
    start = np.int64(0)
    while start < columns.size and columns[start] < first:
        start += 1
    stop = start
    while stop < columns.size and columns[stop] < last:
        stop += 1
    return columns[start:stop]


@called
def _judge_part(me, cells, words, rest, rest_words, small, large, tables, own, features, options, kernels):  # type: ignore[no-untyped-def]
    """The best splits of two nodes by this thread's features, into its own rows of the tables."""
    nodes, reals = tables[0], tables[1]
    own_nodes, own_reals, own_left, space, by_bin, _ = own
    numeric, categories, every = features
    bins, scales, rules, is_category, monotone, judging, packs = options
    for side in range(2):
        node = large if side else small
        if node >= 0:
            at = 2 * me + side
            for column in range(nodes.shape[1]):
                own_nodes[at, column] = nodes[node, column]
            own_reals[at, GAIN], own_reals[at, LOW], own_reals[at, HIGH] = 0.0, reals[node, LOW], reals[node, HIGH]
    second, part = 2 * me + 1 if large >= 0 else -1, every
    if packs and words == 1 and rest_words == 1:
        packed = numeric, bins, scales, rules, space[me]
        call_at(kernels[JUDGE_PACKED], (cells, rest, False, 2 * me, second, own_nodes, own_reals, own_left, *packed))
        part = categories
    if part.size:
        where = 2 * me, second, own_nodes, own_reals, own_left
        more = part, bins, scales, rules, is_category, monotone, judging, space[me], by_bin[me]
        call_at(kernels[JUDGE], (cells, words, rest, rest_words, False, *where, *more))


@called
def _sum_few(me, team, start, stop, data, kernels, entries, row_bytes, scales, pairs, cells, words, rest, features):  # type: ignore[no-untyped-def]
    """Add entries to the cells of this thread's features, and take these from those of the parent, in `rest`."""
    panels, firsts, used, hess = data
    begin, end = _own_features(me, team, cells.size // words)
    rows = entries[start:stop]
    if _within(features[2], begin, end).size:
        begin_cell, end_cell = begin * BINS * words, end * BINS * words
        cells[begin_cell:end_cell] = 0
        for at in range(used.size):
            first, base = PANEL * used[at], used[at] * PANEL * BINS * words
            low, high = max(begin - first, 0), min(end - first, PANEL)
            if low < high:
                where = panels[firsts[used[at]] :], row_bytes[used[at]] // 8, low, high
                run_at(kernels[ADD_FEW], (*where, rows, hess, scales[0], scales[1], pairs, cells[base:]))
        for cell in range(begin_cell, end_cell):
            rest[U(cell)] -= cells[U(cell)]


@called
def _merge_parts(team, node, side, tables, own):  # type: ignore[no-untyped-def]
    """The best of what the threads found for a node; of equal gains the lowest feature. Returns whether it has one."""
    nodes, reals, goes_left = tables
    own_nodes, own_reals, own_left = own[0], own[1], own[2]
    best, gain = np.int64(-1), 0.0
    for thread in range(team):
        at = 2 * thread + side
        here = own_reals[at, GAIN]
        if here > gain or (here > 0.0 and here == gain and own_nodes[at, FEATURE] < own_nodes[best, FEATURE]):
            best, gain = at, here
    reals[node, GAIN] = gain
    if best < 0:
        return False
    for column in range(LEFT_GRAD, CHILD):
        nodes[node, column] = own_nodes[best, column]
    for bin_ in range(BINS):
        goes_left[node, bin_] = own_left[best, bin_]
    return True


# ---- the tree --------------------------------------------------------------------------------------------------------


@called
def _divide_alone(node, work, data, kernels, tables, options):  # type: ignore[no-untyped-def]
    """Divide the rows of a node by one thread; the child of fewer rows, or -1 (`nodes.divide`)."""
    entries, spare, columns, is_there = work[0], work[1], work[2], work[3]
    nodes, reals, goes_left = tables
    left_size, feature = np.int64(-1), nodes[node, FEATURE]
    if not is_there[feature]:
        source, row_bytes = bins_of(work, data, feature)
        where = nodes[node, START], nodes[node, STOP]
        left_size = part_by_panel(entries, where[0], where[1], source, row_bytes, goes_left, node, spare)
    more = nodes, reals, node, left_size, options[4], options[1], options[2]
    return call_at(kernels[DIVIDE], (entries, columns, spare, goes_left, *more))


@called
def _expand(  # type: ignore[no-untyped-def]
    node, slot, work, data, kernels, tables, sizes, pool, features, options, space, by_bin, pairs, ticks, me, is_last
):
    """Expand a node whose cells are narrow; returns which of its two slots are free now: 1 the new one, 2 its own.

    Children of the last split (`_is_last`) are never split: nobody asks for their sums.
    """
    entries = work[0]
    nodes, reals, goes_left = tables
    numeric, categories, every = features
    bins, scales, rules, is_category, monotone, judging, packs = options
    small = _divide_alone(node, work, data, kernels, tables, options)
    _spend(ticks, me, PARTITION)
    if small < 0 or is_last:
        return 3
    words, parent, large = sizes[NARROW], nodes[node, SLOT], 2 * nodes[node, CHILD] + 1 - small
    size = sizes[CELLS] * words
    cells, rest = pool[slot : slot + size], pool[parent : parent + size]
    cells[:] = 0
    first, last = nodes[small, START], nodes[small, STOP]
    _add_part(entries, first, last, data, kernels, scales, pairs, cells, words)
    _spend(ticks, me, SUM)
    subtract, splits, left_over = True, np.int64(0), every
    if packs:
        packed = numeric, bins, scales, rules, space
        splits = call_at(kernels[JUDGE_PACKED], (cells, rest, subtract, small, large, nodes, reals, goes_left, *packed))
        subtract, left_over = False, categories
    if left_over.size:
        at = small, large, nodes, reals, goes_left
        general = left_over, bins, scales, rules, is_category, monotone, judging, space, by_bin
        splits = call_at(kernels[JUDGE], (cells, words, rest, words, subtract, *at, *general))
    nodes[small, SLOT], nodes[large, SLOT] = slot, parent
    _spend(ticks, me, JUDGING)
    return 3 ^ splits


@inlined
def _is_last(order):  # type: ignore[no-untyped-def]
    """Whether the tree has room for one more split. Another thread may write the number meanwhile: it only grows."""
    return order[2][LEAVES] + 1 == order[0].shape[0]


@called
def _give_slots(node, small, is_last, nodes, counts, free, sizes, sync):  # type: ignore[no-untyped-def]
    """Places for the histograms of a divided node's children: a new one, and that of the node."""
    sync[SMALL] = -1 if is_last else small
    if sync[SMALL] >= 0:
        large = 2 * nodes[node, CHILD] + 1 - small
        sync[SMALL_SLOT], sync[LARGE_SLOT] = _slot_for(counts, free, nodes[small, ROWS], sizes), nodes[node, SLOT]
        if nodes[node, SLOT] >= sizes[WIDE_FROM] and nodes[large, ROWS] < sizes[LARGE_ROWS]:
            sync[LARGE_SLOT] = _slot_for(counts, free, nodes[large, ROWS], sizes)


@called
def _choose(done, team, sync, sizes, kernels, tables, order, best_first, work, data, free, options, ticks):  # type: ignore[no-untyped-def]
    """What follows when all have met, by the first of them: the next node for all, which is divided if it is small;
    COMPLETE; or WAIT: a node for each. With `done`, which all have just expanded.
    """
    nodes, reals = tables[0], tables[1]
    leaves, splits, counts, ready, top = order
    queue = nodes, reals, leaves, splits, counts, ready, top, best_first
    sharing = sizes[LARGE_ROWS], sizes[MEETING_ROWS], sizes[HELP]
    node = np.int64(SHARED)
    if done >= 0:
        node = call_at(kernels[TAKE], (*queue, sharing, False, team, done))
        _free_hopeless(nodes, ready, counts, free, sizes)
    if node == SHARED:
        node = call_at(kernels[TAKE], (*queue, sharing, True, team, np.int64(-1)))
        _free_hopeless(nodes, ready, counts, free, sizes)
        sync[NEXT], sync[IS_DIVIDED], sync[CHOSEN] = 0, 0, node
        if node >= 0 and nodes[node, STOP] - nodes[node, START] <= ALONE_ROWS:
            _spend(ticks, 0, QUEUE)
            sync[IS_DIVIDED] = 1
            small = _divide_alone(node, work, data, kernels, tables, options)
            _give_slots(node, small, _is_last(order), nodes, counts, free, sizes, sync)
            _spend(ticks, 0, PARTITION)
        return np.int64(-1)
    sync[CHOSEN] = COMPLETE if node == COMPLETE else WAIT
    return node


@compiled
def grow_tree(  # type: ignore[no-untyped-def]
    sync,
    sizes,
    kernels,
    tables,
    order,
    best_first,
    work,
    data,
    pool,
    free,
    parts,
    features,
    options,
    own,
):
    """What each thread calls; those that come in time are a team. The tree is in `tables` and `order` when all are
    back."""
    me, team = join(sync, CAME, TEAM, sizes[MOST_THREADS], sizes[PATIENCE], sync[LOOKS])
    if me < 0:
        return
    ticks = own[5]
    ticks[me, LAST] = cycles()
    nodes, reals, goes_left = tables
    leaves, splits, counts, ready, top = order
    entries, spare, columns = work[0], work[1], work[2]
    narrow_parts, wide_parts, pairs = parts
    numeric, categories, every = features
    scales, rules, monotone = options[1], options[2], options[4]
    queue = nodes, reals, leaves, splits, counts, ready, top, best_first
    sharing = sizes[LARGE_ROWS], sizes[MEETING_ROWS], sizes[HELP]
    more = sizes, kernels, tables, order, best_first, work, data, free, options, ticks
    chosen, is_root = np.int64(0), True
    while True:
        small, large = np.int64(0), np.int64(-1)
        if is_root:
            if me == 0:
                sync[SMALL_SLOT] = _slot_for(counts, free, nodes[0, STOP], sizes)
            _meet(me, team, sync, ticks, QUEUE)
        else:
            if not sync[IS_DIVIDED]:
                left_size = _part_own(me, team, sync, ticks, work, data, goes_left, nodes, chosen)
                if me == 0:  # the tables, while others copy
                    dividing = nodes, reals, chosen, left_size, monotone, scales, rules
                    small = call_at(kernels[DIVIDE], (entries, columns, spare, goes_left, *dividing))
                    _give_slots(chosen, small, _is_last(order), nodes, counts, free, sizes, sync)
                _bring_back(me, team, sync, work, nodes, chosen, left_size)
                _meet(me, team, sync, ticks, PARTITION)
            small = sync[SMALL]
            large = 2 * nodes[chosen, CHILD] + 1 - small
        if small >= 0:
            first, last = nodes[small, START], nodes[small, STOP]
            count = last - first
            cells, words = _cells(pool, sync[SMALL_SLOT], sizes)
            rest, rest_words, parent, parent_words = pool[0:0], words, cells, words
            if large >= 0:
                rest, rest_words = _cells(pool, sync[LARGE_SLOT], sizes)
                parent, parent_words = _cells(pool, nodes[chosen, SLOT], sizes)
            if large >= 0 and parent_words == sizes[NARROW] and count <= sizes[CELLS]:
                given = entries, work[5], scales, pairs[me], cells, words, rest, features
                _sum_few(me, team, first, last, data, kernels, *given)
                _spend(ticks, me, SUM)
            else:
                spaces = pairs[me], narrow_parts[me], wide_parts[me]
                summing = sizes, entries, data, kernels, scales, spaces
                workers, part_words = _sum_part(me, team, sync, first, count, *summing)
                _meet(me, team, sync, ticks, SUM)
                all_parts = wide_parts if part_words == WIDE else narrow_parts
                _add_up(me, team, all_parts, part_words, workers, cells, words, parent, parent_words, rest, rest_words)
                if is_root:  # its sums are those of any feature
                    _gather(me, team, sync, ticks, SUM)
                    if me == 0:
                        column = every[0] * BINS
                        for bin_ in range(BINS):
                            grad, weight, rows = unpack_cell(cells, words, column + bin_)
                            nodes[0, GRAD] += grad
                            nodes[0, GRAD + 1] += weight
                            nodes[0, ROWS] += rows
                        _release(sync, ticks)
                _spend(ticks, me, SUM)
            begin, end = _own_features(me, team, sizes[CELLS])
            mine = _within(numeric, begin, end), _within(categories, begin, end), _within(every, begin, end)
            _judge_part(me, cells, words, rest, rest_words, small, large, tables, own, mine, options, kernels)
        _gather(me, team, sync, ticks, JUDGING)
        node, slot, unused = np.int64(-1), np.int64(-1), np.int64(0)
        if me == 0:
            if not is_root and (small < 0 or sync[LARGE_SLOT] != nodes[chosen, SLOT]):
                _free(counts, free, nodes[chosen, SLOT], sizes)
            for side in range(2):
                child = large if side else small
                if small >= 0 and child >= 0:
                    nodes[child, SLOT] = sync[LARGE_SLOT if side else SMALL_SLOT]
                    if not _merge_parts(team, child, side, tables, own):
                        _free(counts, free, nodes[child, SLOT], sizes)
            if is_root:
                counts[QUEUED] = counts[READY] = np.int64(reals[0, GAIN] > 0.0)
                ready[0, SIZE] = nodes[0, STOP]
            node = _choose(np.int64(-1) if is_root else chosen, team, sync, *more)
            if node >= 0:
                slot = _slot_for(counts, free, np.int64(0), sizes)
            _release(sync, ticks)
        is_root, chosen = False, sync[CHOSEN]
        if chosen == WAIT:  # a leaf for each thread, until the next one is for all
            while True:
                if node >= 0:
                    _spend(ticks, me, QUEUE)
                    unused = _expand(
                        node, slot, work, data, kernels, tables, sizes, pool, features, options, own[3][me],
                        own[4][me], pairs[me], ticks, me, _is_last(order),
                    )  # fmt: skip
                lock(sync, LOCK, sync[LOOKS])
                if node >= 0:
                    if unused & 1:
                        _free(counts, free, slot, sizes)
                    if unused & 2:
                        _free(counts, free, nodes[node, SLOT], sizes)
                    fetch_add(sync, CHANGES, 1)
                node = call_at(kernels[TAKE], (*queue, sharing, False, team, node))
                _free_hopeless(nodes, ready, counts, free, sizes)
                if node >= 0:
                    slot = _slot_for(counts, free, np.int64(0), sizes)
                seen = read(sync, CHANGES)
                unlock(sync, LOCK)
                if node == WAIT:
                    _spend(ticks, me, QUEUE)
                    wait_for_change(sync, CHANGES, seen, sync[LOOKS])
                    _spend(ticks, me, WAITING)
                elif node < 0:
                    break
            _gather(me, team, sync, ticks, QUEUE)
            if me == 0:
                _choose(np.int64(-1), team, sync, *more)
                _release(sync, ticks)
            chosen = sync[CHOSEN]
        if chosen < 0:
            return
