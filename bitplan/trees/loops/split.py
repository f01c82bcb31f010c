"""The best split of a node, from its histogram: every feature, every bin, missing values left and right.

Sums stay integers until here; a prefix sum times the scale of the round is the first float. Where nothing is bounded,
four or eight bins at a time are first held against the best gain so far, without a division, and only those that could
be better are judged in full: a test that errs by less than it lets through, so that it changes no split.

`tests/trees/naive.py` is the same in plain numpy, and must find the same splits to the bit.
"""

from __future__ import annotations

import math

import numpy as np

from bitplan.kernels.base.jit import called, compiled, inlined
from bitplan.kernels.base.vectors import largest, load, multiply_add, narrow, to_float, view
from bitplan.trees.loops.histogram import BINS, subtract_cells, unpack_cell

MISSING = 255
# Places in `rules`
L1, L2, MIN_WEIGHT, MIN_ROWS, MIN_GAIN, CATEGORY_SMOOTHING, CATEGORY_L2, MAX_DEPTH = range(8)
# Columns of `nodes` (integers): rows of this process, depth, sums, sums of the left child, the split, the left child
# (the right one is next), how far it has come. ROWS are those of all processes: what decisions depend on.
START, STOP, DEPTH, GRAD, HESS, ROWS, LEFT_GRAD, LEFT_HESS, LEFT_ROWS = range(9)
FEATURE, BIN, MISSING_LEFT, CHILD, STATE = range(9, 14)
NODE_COLUMNS = 14
# Columns of `reals`: a gain of zero says that the node stays a leaf.
GAIN, LOW, HIGH = range(3)
NOISE = 1e-12  # of the parent's own gain: what is below is rounding
LANES = 4  # divides BINS
# The quick test lets through what is less than 1e-6 below the bar. It errs by less: hessians are exact, a gradient's
# error of 2^-52 of the total moves the gain by 2^-52 sqrt(larger / smaller hessian), and that ratio is below 2^53.
CAUTION = 1.0 - 1e-6
EXACT = 2**53
# Sums of one-word cells are exact even as float32, which is half the work; a product of them errs by up to 12 * 2^-24.
QUICK_LANES = 8  # divides BINS
QUICK_CAUTION = 1.0 - 2.0**-19
QUICK_L2 = 2.0**40  # in units of the integers; beyond it, or below its inverse, float32 would overflow or vanish
U = np.uint64


@inlined
def leaf_value(grad, hess, l1, l2, low, high):  # type: ignore[no-untyped-def]
    """The step that minimises the loss of a leaf, kept within its bounds."""
    shrunk = abs(grad) - l1 if abs(grad) > l1 else 0.0
    value = 0.0 if hess + l2 <= 0.0 else -math.copysign(shrunk, grad) / (hess + l2)
    value = low if low > value else value
    return high if high < value else value


@inlined
def _gain(grad, hess, l1, l2):  # type: ignore[no-untyped-def]
    shrunk = abs(grad) - l1 if abs(grad) > l1 else 0.0
    return shrunk * shrunk / (hess + l2)


@inlined
def _gain_of_value(grad, hess, l1, l2, value):  # type: ignore[no-untyped-def]
    return -(2.0 * grad * value + (hess + l2) * value * value + 2.0 * l1 * abs(value))


@inlined
def _first_from(rows, count, least):  # type: ignore[no-untyped-def]
    """The first of `count` prefixes that has `least` rows or more; `count` if none has."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        low, high = (middle + 1, high) if rows[U(middle)] < least else (low, middle)
    return low


@called
def _scan_plain(grads, hess, rows, count, total, scales, rules, l2, bar):  # type: ignore[no-untyped-def]
    """(place, gain) of the best of `count` prefixes whose gain is above `bar`; no L1, nothing is bounded."""
    total_grad, total_hess, total_rows = total
    grad_scale, hess_scale = scales[0], scales[1]
    least_rows, least_hess = np.int64(rules[MIN_ROWS]), rules[MIN_WEIGHT]
    place, best = -1, -np.inf
    # The test is done in units of the integers: gradients by their scale, hessians by theirs.
    extra, unit = l2 / hess_scale, hess_scale / (grad_scale * grad_scale)
    quick = total_hess < EXACT and extra < np.inf and unit > 0.0 and unit < np.inf
    all_grad, all_hess, least = np.float64(total_grad), np.float64(total_hess), -bar * CAUTION * unit
    # Prefixes only grow: where a side has too few rows is known, and in small nodes it is much of a feature.
    stop = _first_from(rows, count, total_rows - least_rows + 1)
    for start in range(_first_from(rows, count, least_rows) // LANES * LANES, stop, LANES):
        if quick:
            left, left_hess = (
                to_float(load(grads, start, LANES), np.float64),
                to_float(load(hess, start, LANES), np.float64),
            )
            right, right_hess = all_grad - left, all_hess - left_hess + extra
            left_hess = left_hess + extra
            both = multiply_add(left * left, right_hess, right * right * left_hess)
            above = multiply_add(left_hess * right_hess, least, both)
            if largest(narrow(view(above, np.int64) >> 32, np.int32)) < 0:  # the sign is in the upper half
                continue
        for i in range(start, start + LANES if start + LANES < stop else stop):
            left, right = np.float64(grads[i]) * grad_scale, np.float64(total_grad - grads[i]) * grad_scale
            left_hess, right_hess = np.float64(hess[i]) * hess_scale, np.float64(total_hess - hess[i]) * hess_scale
            left_all, right_all = left_hess + l2, right_hess + l2  # over one denominator: divisions are the cost
            gain = (left * left * right_all + right * right * left_all) / (left_all * right_all)
            if gain > best and rows[i] >= least_rows and total_rows - rows[i] >= least_rows:
                heavy = left_hess >= least_hess and right_hess >= least_hess
                if heavy and left_all > 0.0 and right_all > 0.0:
                    place, best = i, gain
                    lower = -gain * CAUTION * unit
                    least = lower if lower < least else least
    return place, best


@inlined
def _first_packed_from(prefixes, more, count, least):  # type: ignore[no-untyped-def]
    """`_first_from` for the row counts of packed prefixes."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        low, high = (middle + 1, high) if (prefixes[U(middle)] + more) & 0xFFFF < least else (low, middle)
    return low


@called
def _scan_packed(prefixes, more, count, total, scales, rules, bar):  # type: ignore[no-untyped-def]
    """`_scan_plain` for prefix sums of one-word cells, `more` added to each: they are unpacked on the way."""
    total_grad, total_hess, total_rows = total
    grad_scale, hess_scale, l2 = scales[0], scales[1], rules[L2]
    least_rows, least_hess = np.int64(rules[MIN_ROWS]), rules[MIN_WEIGHT]
    place, best = -1, -np.inf
    unit = hess_scale / (grad_scale * grad_scale)
    extra = np.float32(l2 / hess_scale)
    all_grad, all_hess, least = np.float32(total_grad), np.float32(total_hess), np.float32(-bar * QUICK_CAUTION * unit)
    stop = _first_packed_from(prefixes, more, count, total_rows - least_rows + 1)
    first = _first_packed_from(prefixes, more, count, least_rows) // QUICK_LANES * QUICK_LANES
    for start in range(first, stop, QUICK_LANES):
        packed = load(prefixes, start, QUICK_LANES) + more
        left = to_float(narrow(packed >> 32, np.int32) >> 8, np.float32)
        left_hess = to_float(narrow(packed >> 16, np.int32) & 0xFFFFFF, np.float32)
        right, right_hess = all_grad - left, all_hess - left_hess + extra
        left_hess = left_hess + extra
        both = multiply_add(left * left, right_hess, right * right * left_hess)
        above = multiply_add(left_hess * right_hess, least, both)
        if largest(view(above, np.int32)) < 0:
            continue
        for i in range(start, start + QUICK_LANES if start + QUICK_LANES < stop else stop):
            cell = prefixes[U(i)] + more
            grad, weight, rows = cell >> 40, (cell >> 16) & 0xFFFFFF, cell & 0xFFFF
            left_grad, right_grad = np.float64(grad) * grad_scale, np.float64(total_grad - grad) * grad_scale
            left_weight, right_weight = np.float64(weight) * hess_scale, np.float64(total_hess - weight) * hess_scale
            left_all, right_all = left_weight + l2, right_weight + l2
            gain = (left_grad * left_grad * right_all + right_grad * right_grad * left_all) / (left_all * right_all)
            if gain > best and rows >= least_rows and total_rows - rows >= least_rows:
                heavy = left_weight >= least_hess and right_weight >= least_hess
                if heavy and left_all > 0.0 and right_all > 0.0:
                    place, best = i, gain
                    lower = np.float32(-gain * QUICK_CAUTION * unit)
                    least = lower if lower < least else least
    return place, best


@called
def _scan(  # type: ignore[no-untyped-def]
    grads, hess, rows, count, total, scales, rules, l2, bar, gains, l1, monotone, feature, bounds
):
    """(place, gain) of the best of `count` prefixes; place -1: none is allowed. None: no L1, nothing is bounded.

    Gains up to `bar` are of no use to the caller, and need not be looked for.
    """
    if l1 is None and monotone is None:
        return _scan_plain(grads, hess, rows, count, total, scales, rules, l2, bar)
    total_grad, total_hess, total_rows = total
    grad_scale, hess_scale = scales[0], scales[1]
    for i in range(count):
        left, right = np.float64(grads[i]) * grad_scale, np.float64(total_grad - grads[i]) * grad_scale
        left_hess, right_hess = np.float64(hess[i]) * hess_scale, np.float64(total_hess - hess[i]) * hess_scale
        if monotone is None:
            gains[i] = _gain(left, left_hess, rules[L1], l2) + _gain(right, right_hess, rules[L1], l2)
        else:
            left_value = leaf_value(left, left_hess, rules[L1], l2, bounds[0], bounds[1])
            right_value = leaf_value(right, right_hess, rules[L1], l2, bounds[0], bounds[1])
            gains[i] = _gain_of_value(left, left_hess, rules[L1], l2, left_value)
            gains[i] += _gain_of_value(right, right_hess, rules[L1], l2, right_value)
            if (right_value - left_value) * monotone[feature] < 0.0:  # 0 for categories
                gains[i] = -np.inf
    least_rows, least_hess = np.int64(rules[MIN_ROWS]), rules[MIN_WEIGHT]
    place, best = -1, -np.inf
    for i in range(count):
        if gains[i] > best and rows[i] >= least_rows and total_rows - rows[i] >= least_rows:
            left_hess, right_hess = np.float64(hess[i]) * hess_scale, np.float64(total_hess - hess[i]) * hess_scale
            heavy = left_hess >= least_hess and right_hess >= least_hess
            if heavy and left_hess + l2 > 0.0 and right_hess + l2 > 0.0:
                place, best = i, gains[i]
    return place, best


@inlined
def _order_categories(cells, words, base, bins, scales, rules, ratio, order):  # type: ignore[no-untyped-def]
    """Categories that have rows, by the ratio of their gradients to their hessians; returns how many there are."""
    used = np.int64(0)
    for b in range(bins):
        grad, weight, count = unpack_cell(cells, words, base + b)
        if count > 0:
            smooth = np.float64(weight) * scales[1] + rules[CATEGORY_SMOOTHING]
            ratio[b] = np.float64(grad) * scales[0] / smooth if smooth > 0.0 else 0.0
            at = used
            while at > 0 and ratio[order[at - 1]] > ratio[b]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = b
            used += 1
    return used


@inlined
def can_split(nodes, node, rules):  # type: ignore[no-untyped-def]
    return nodes[node, ROWS] >= 2 and nodes[node, ROWS] >= 2 * rules[MIN_ROWS]


@compiled
def judge(  # type: ignore[no-untyped-def]
    parent,
    words,
    cells,
    child_words,
    rest,
    rest_words,
    small,
    large,
    goes_left,
    nodes,
    reals,
    features,
    bins,
    is_category,
    monotone,
    l1,
    scales,
    rules,
):
    """The best splits of two children, into their rows, from the cells of the smaller one and of their parent.

    Returns whether they have one. `large` below zero: only `small` is judged, which is how a tree begins. The bin of a
    set of categories is -1. `is_category` and `monotone` are None or by feature, `l1` is None or a number: what None
    excludes is not compiled. One function, because numba compiles a function again into each that calls it.
    """
    if large >= 0:
        subtract_cells(parent, words, cells, child_words, rest, rest_words)
    sums_by_bin, reals_by_bin = np.empty((4, BINS), np.int64), np.empty((2, BINS), np.float64)
    grads, hess, rows, gains = sums_by_bin[0], sums_by_bin[1], sums_by_bin[2], reals_by_bin[0]
    small_splits, large_splits = False, False
    for side in range(2 if large >= 0 else 1):
        node, held, form = (small, cells, child_words) if side == 0 else (large, rest, rest_words)
        if not can_split(nodes, node, rules):
            continue
        bounds, total, left_sums = reals[node, LOW:], nodes[node, GRAD:], nodes[node, LEFT_GRAD:]
        sums = (total[0], total[1], total[2])
        node_grad, node_hess = np.float64(total[0]) * scales[0], np.float64(total[1]) * scales[1]
        quick = form == 1 and rules[L1] == 0.0 and scales[0] > 0.0 and scales[1] > 0.0
        if monotone is None:
            before = _gain(node_grad, node_hess, rules[L1], rules[L2]) if node_hess + rules[L2] > 0.0 else 0.0
        else:
            value = leaf_value(node_grad, node_hess, rules[L1], rules[L2], bounds[0], bounds[1])
            before = _gain_of_value(node_grad, node_hess, rules[L1], rules[L2], value)
            quick = False
        extra, unit = rules[L2] / scales[1], scales[1] / (scales[0] * scales[0])
        quick = quick and (extra == 0.0 or 1.0 / QUICK_L2 < extra < QUICK_L2) and 0.0 < unit < np.inf
        best_gain, best_feature, best_bin, best_left = 0.0, np.int64(0), np.int64(0), np.int64(0)
        least = rules[MIN_GAIN] if rules[MIN_GAIN] > NOISE * abs(before) else NOISE * abs(before)
        for feature in features:
            base = feature * BINS
            if is_category is not None and is_category[feature]:
                order = sums_by_bin[3]
                used = _order_categories(held, form, base, bins[feature], scales, rules, reals_by_bin[1], order)
                l2 = rules[L2] + rules[CATEGORY_L2]
                for turn in range(2):  # from either end: missing and new categories go right
                    grad, weight, count = np.int64(0), np.int64(0), np.int64(0)
                    for i in range(used):
                        b = order[i] if turn == 0 else order[used - 1 - i]
                        more_grad, more_weight, more_count = unpack_cell(held, form, base + b)
                        grad, weight, count = grad + more_grad, weight + more_weight, count + more_count
                        grads[i], hess[i], rows[i] = grad, weight, count
                    bar = before + (best_gain if best_gain > least else least)
                    place, gain = _scan(
                        grads, hess, rows, used, sums, scales, rules, l2, bar, gains, l1, monotone, feature, bounds
                    )
                    gain -= before
                    if place >= 0 and gain > least and gain > best_gain:
                        best_gain, best_feature, best_bin, best_left = gain, feature, np.int64(-1), np.int64(0)
                        left_sums[0], left_sums[1], left_sums[2] = grads[place], hess[place], rows[place]
                        goes_left[node] = 0
                        for i in range(place + 1):
                            goes_left[node, order[i] if turn == 0 else order[used - 1 - i]] = 1
                continue
            missing_grad, missing_hess, missing_rows = unpack_cell(held, form, base + MISSING)
            grad, weight, count = np.int64(0), np.int64(0), np.int64(0)
            if quick:  # no field overflows: the sum is within that of a node
                for b in range(bins[feature]):
                    grad += held[U(base + b)]
                    grads[U(b)] = grad
            else:
                for b in range(bins[feature]):
                    more_grad, more_weight, more_count = unpack_cell(held, form, base + b)
                    grad, weight, count = grad + more_grad, weight + more_weight, count + more_count
                    grads[U(b)], hess[U(b)], rows[U(b)] = grad, weight, count
            for missing_left in range(2 if missing_rows > 0 else 1):
                limits = bins[feature] - missing_left if missing_rows > 0 else bins[feature] - 1
                bar = before + (best_gain if best_gain > least else least)
                if quick:
                    more = held[U(base + MISSING)] if missing_left else np.int64(0)
                    place, gain = _scan_packed(grads, more, limits, sums, scales, rules, bar)
                else:
                    if missing_left:
                        for b in range(limits):
                            grads[b] += missing_grad
                            hess[b] += missing_hess
                            rows[b] += missing_rows
                    l2 = rules[L2]
                    place, gain = _scan(
                        grads, hess, rows, limits, sums, scales, rules, l2, bar, gains, l1, monotone, feature, bounds
                    )
                gain -= before
                if place >= 0 and gain > least and gain > best_gain:
                    if quick:
                        cell = grads[U(place)] + (held[U(base + MISSING)] if missing_left else np.int64(0))
                        left_sums[0], left_sums[1], left_sums[2] = cell >> 40, (cell >> 16) & 0xFFFFFF, cell & 0xFFFF
                    else:
                        left_sums[0], left_sums[1], left_sums[2] = grads[place], hess[place], rows[place]
                    to_left = missing_left if missing_rows > 0 else 2 * left_sums[2] >= total[2]
                    best_gain, best_feature, best_bin, best_left = gain, feature, np.int64(place), np.int64(to_left)
        if best_gain > 0.0 and best_bin >= 0:
            for b in range(MISSING):
                goes_left[node, b] = b <= best_bin
            goes_left[node, MISSING] = best_left
        reals[node, GAIN] = best_gain
        nodes[node, FEATURE], nodes[node, BIN], nodes[node, MISSING_LEFT] = best_feature, best_bin, best_left
        if side == 0:
            small_splits = best_gain > 0.0
        else:
            large_splits = best_gain > 0.0
    return small_splits, large_splits
