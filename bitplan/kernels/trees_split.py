"""The best split of a node, from its histogram: every feature, every bin, missing values left and right.

Sums stay integers until here; a prefix sum times the scale of the round is the first float. Where nothing is bounded,
four or eight bins at a time are first held against the best gain so far, without a division, and only those that could
be better are judged in full: a test that errs by less than it lets through, so that it changes no split.

`tests/trees/naive.py` is the same in plain numpy, and must find the same splits to the bit.
"""

from __future__ import annotations

import math

import numpy as np

from bitplan.kernels.jit import compiled, inlined
from bitplan.kernels.trees_histogram import BINS, unpack_cell
from bitplan.kernels.vectors import largest, load, multiply_add, narrow, store, to_float, view

MISSING = 255
# Places in `found`
GAIN, FEATURE, BIN, MISSING_LEFT = range(4)
# Places in `rules`
L1, L2, MIN_WEIGHT, MIN_ROWS, MIN_GAIN, CATEGORY_SMOOTHING, CATEGORY_L2, MAX_DEPTH = range(8)
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
    shrunk = max(abs(grad) - l1, 0.0)
    value = 0.0 if hess + l2 <= 0.0 else -math.copysign(shrunk, grad) / (hess + l2)
    return min(max(value, low), high)


@inlined
def _gain(grad, hess, l1, l2):  # type: ignore[no-untyped-def]
    shrunk = max(abs(grad) - l1, 0.0)
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


@compiled
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
        for i in range(start, min(start + LANES, stop)):
            left, right = np.float64(grads[i]) * grad_scale, np.float64(total_grad - grads[i]) * grad_scale
            left_hess, right_hess = np.float64(hess[i]) * hess_scale, np.float64(total_hess - hess[i]) * hess_scale
            left_all, right_all = left_hess + l2, right_hess + l2  # over one denominator: divisions are the cost
            gain = (left * left * right_all + right * right * left_all) / (left_all * right_all)
            if gain > best and rows[i] >= least_rows and total_rows - rows[i] >= least_rows:
                heavy = left_hess >= least_hess and right_hess >= least_hess
                if heavy and left_all > 0.0 and right_all > 0.0:
                    place, best = i, gain
                    least = min(least, -gain * CAUTION * unit)
    return place, best


@inlined
def _first_packed_from(prefixes, more, count, least):  # type: ignore[no-untyped-def]
    """`_first_from` for the row counts of packed prefixes."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        low, high = (middle + 1, high) if (prefixes[U(middle)] + more) & 0xFFFF < least else (low, middle)
    return low


@compiled
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
        for i in range(start, min(start + QUICK_LANES, stop)):
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
                    least = min(least, np.float32(-gain * QUICK_CAUTION * unit))
    return place, best


@compiled
def _scan(grads, hess, rows, count, total, scales, rules, l2, bar, gains, direction, low, high):  # type: ignore[no-untyped-def]
    """(place, gain) of the best of `count` prefixes; place -1: none is allowed. direction 2: nothing is bounded.

    Gains up to `bar` are of no use to the caller, and need not be looked for.
    """
    if direction == 2 and rules[L1] == 0.0:
        return _scan_plain(grads, hess, rows, count, total, scales, rules, l2, bar)
    total_grad, total_hess, total_rows = total
    grad_scale, hess_scale, l1 = scales[0], scales[1], rules[L1]
    if direction == 2:
        for i in range(count):
            left, right = np.float64(grads[i]) * grad_scale, np.float64(total_grad - grads[i]) * grad_scale
            left_hess, right_hess = np.float64(hess[i]) * hess_scale, np.float64(total_hess - hess[i]) * hess_scale
            gains[i] = _gain(left, left_hess, l1, l2) + _gain(right, right_hess, l1, l2)
    else:
        for i in range(count):
            left, right = np.float64(grads[i]) * grad_scale, np.float64(total_grad - grads[i]) * grad_scale
            left_hess, right_hess = np.float64(hess[i]) * hess_scale, np.float64(total_hess - hess[i]) * hess_scale
            left_value = leaf_value(left, left_hess, l1, l2, low, high)
            right_value = leaf_value(right, right_hess, l1, l2, low, high)
            gains[i] = _gain_of_value(left, left_hess, l1, l2, left_value)
            gains[i] += _gain_of_value(right, right_hess, l1, l2, right_value)
            if (right_value - left_value) * direction < 0.0:
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
def _sum_up(cells, words, base, count, grads, hess, rows):  # type: ignore[no-untyped-def]
    """Prefix sums of `count` cells; the form of the cells is asked once, not once a cell."""
    grad, weight, number = np.int64(0), np.int64(0), np.int64(0)
    if words == 1:
        for b in range(count):  # no field overflows: the sum is within that of a node
            grad += cells[U(base + b)]
            grads[U(b)] = grad
        for b in range(0, count, LANES):
            packed = load(grads, b, LANES)
            store(grads, b, packed >> 40)
            store(hess, b, (packed >> 16) & 0xFFFFFF)
            store(rows, b, packed & 0xFFFF)
    elif words == 2:
        for b in range(count):
            more_grad, more_weight, more = unpack_cell(cells, 2, base + b)
            grad, weight, number = grad + more_grad, weight + more_weight, number + more
            grads[b], hess[b], rows[b] = grad, weight, number
    else:
        for b in range(count):
            more_grad, more_weight, more = unpack_cell(cells, 3, base + b)
            grad, weight, number = grad + more_grad, weight + more_weight, number + more
            grads[b], hess[b], rows[b] = grad, weight, number


@compiled
def find_split(  # type: ignore[no-untyped-def]
    cells,
    words,
    features,
    bins,
    is_category,
    monotone,
    bounded,
    bounds,
    total,
    scales,
    rules,
    found,
    left_sums,
    goes_left,
):
    """The best split over `features` (found[GAIN] 0: none), the left child's sums, and which bins go left."""
    grads, hess, rows = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
    gains, order, ratio = np.empty(BINS, np.float64), np.empty(BINS, np.int64), np.empty(BINS, np.float64)
    sums = (total[0], total[1], total[2])
    node_grad, node_hess = np.float64(total[0]) * scales[0], np.float64(total[1]) * scales[1]
    if bounded:
        value = leaf_value(node_grad, node_hess, rules[L1], rules[L2], bounds[0], bounds[1])
        before = _gain_of_value(node_grad, node_hess, rules[L1], rules[L2], value)
    else:
        before = _gain(node_grad, node_hess, rules[L1], rules[L2]) if node_hess + rules[L2] > 0.0 else 0.0
    quick = words == 1 and not bounded and rules[L1] == 0.0 and scales[0] > 0.0 and scales[1] > 0.0
    extra, unit = rules[L2] / scales[1], scales[1] / (scales[0] * scales[0])
    quick = quick and (extra == 0.0 or 1.0 / QUICK_L2 < extra < QUICK_L2) and 0.0 < unit < np.inf
    found[GAIN] = 0.0
    least = max(rules[MIN_GAIN], NOISE * abs(before))
    for feature in features:
        base = feature * BINS
        missing_grad, missing_hess, missing_rows = unpack_cell(cells, words, base + MISSING)
        if is_category[feature]:
            used = 0
            for b in range(bins[feature]):
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
            l2 = rules[L2] + rules[CATEGORY_L2]
            for turn in range(2):  # from either end: missing and new categories go right
                grad, weight, count = np.int64(0), np.int64(0), np.int64(0)
                for i in range(used):
                    b = order[i] if turn == 0 else order[used - 1 - i]
                    more_grad, more_weight, more_count = unpack_cell(cells, words, base + b)
                    grad, weight, count = grad + more_grad, weight + more_weight, count + more_count
                    grads[i], hess[i], rows[i] = grad, weight, count
                direction, bar = 0 if bounded else 2, before + max(least, found[GAIN])
                place, gain = _scan(
                    grads, hess, rows, used, sums, scales, rules, l2, bar, gains, direction, bounds[0], bounds[1]
                )
                gain -= before
                if place >= 0 and gain > least and gain > found[GAIN]:
                    found[GAIN], found[FEATURE], found[BIN], found[MISSING_LEFT] = gain, feature, -1, 0
                    left_sums[0], left_sums[1], left_sums[2] = grads[place], hess[place], rows[place]
                    goes_left[:] = 0
                    for i in range(place + 1):
                        goes_left[order[i] if turn == 0 else order[used - 1 - i]] = 1
            continue
        if quick:
            packed = np.int64(0)
            for b in range(bins[feature]):  # no field overflows: the sum is within that of a node
                packed += cells[U(base + b)]
                grads[U(b)] = packed
            missing = cells[U(base + MISSING)]
            for missing_left in range(2 if missing_rows > 0 else 1):
                more = missing if missing_left else np.int64(0)
                limits = bins[feature] - missing_left if missing_rows > 0 else bins[feature] - 1
                place, gain = _scan_packed(grads, more, limits, sums, scales, rules, before + max(least, found[GAIN]))
                gain -= before
                if place >= 0 and gain > least and gain > found[GAIN]:
                    cell = grads[U(place)] + more
                    left_sums[0], left_sums[1], left_sums[2] = cell >> 40, (cell >> 16) & 0xFFFFFF, cell & 0xFFFF
                    to_left = missing_left if missing_rows > 0 else 2 * left_sums[2] >= total[2]
                    found[GAIN], found[FEATURE], found[BIN], found[MISSING_LEFT] = gain, feature, place, to_left
            continue
        _sum_up(cells, words, base, bins[feature], grads, hess, rows)
        direction = int(monotone[feature]) if bounded else 2
        for missing_left in range(2 if missing_rows > 0 else 1):
            limits = bins[feature] - missing_left if missing_rows > 0 else bins[feature] - 1
            if missing_left:
                for b in range(limits):
                    grads[b] += missing_grad
                    hess[b] += missing_hess
                    rows[b] += missing_rows
            bar = before + max(least, found[GAIN])
            place, gain = _scan(
                grads, hess, rows, limits, sums, scales, rules, rules[L2], bar, gains, direction, bounds[0], bounds[1]
            )
            gain -= before
            if place >= 0 and gain > least and gain > found[GAIN]:
                to_left = missing_left if missing_rows > 0 else 2 * rows[place] >= total[2]
                found[GAIN], found[FEATURE], found[BIN], found[MISSING_LEFT] = gain, feature, place, to_left
                left_sums[0], left_sums[1], left_sums[2] = grads[place], hess[place], rows[place]
    if found[GAIN] > 0.0 and found[BIN] >= 0:
        for b in range(MISSING):
            goes_left[b] = b <= found[BIN]
        goes_left[MISSING] = found[MISSING_LEFT] != 0.0
