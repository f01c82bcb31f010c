"""The best split of a node, from its histogram: every feature, every bin, missing values left and right.

Sums stay integers until here; a prefix sum times the scale of the round is the first float. Where nothing is bounded,
four or eight bins at a time are first held against the best gain so far, without a division, and only those that could
be better are judged in full: a test that errs by less than it lets through, so that it changes no split.

`tests/trees/naive.py` is the same in plain numpy, and must find the same splits to the bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bitplan.base.loops.jit import address_of, call_at, run_at
from bitplan.base.loops.vectors import largest, load, multiply_add, narrow, to_float, view
from bitplan.trees.loops.compiling import compiled, inlined
from bitplan.trees.loops.histogram import BINS, unpack_cell

MISSING = 255
# Places in `rules`
L1, L2, MIN_WEIGHT, MIN_ROWS, MIN_GAIN, CATEGORY_SMOOTHING, CATEGORY_L2, MAX_DEPTH, IS_MONOTONE = range(9)
# Columns of `nodes` (integers): rows of this process, depth, sums, sums of the left child, the split, the groups of
# features that its children may use, the left child (the right one is next), how far it has come, where its histogram
# lies, its own groups. ROWS are those of all processes: decisions depend on them. Groups are bits: a feature may split
# a node if they have one in common.
START, STOP, DEPTH, GRAD, HESS, ROWS, LEFT_GRAD, LEFT_HESS, LEFT_ROWS = range(9)
FEATURE, BIN, MISSING_LEFT, GROUPS_BELOW, CHILD, STATE, SLOT, GROUPS = range(9, 17)
NODE_COLUMNS = 17
BIN_COUNT, FEATURE_GROUPS = range(2)  # columns of `bins`
# Columns of `reals`: a gain of zero says that the node stays a leaf; bounds of its value; see `nodes.take`.
GAIN, LOW, HIGH, WORTH = range(4)
# Places in `parts`, addresses of what `judge` calls; 0 for what this fit does not need: it is not compiled.
SUM_CATEGORIES, GAIN_BOUNDED, SCAN_BOUNDED = range(3)
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


@compiled
def leaf_values(sums, grad_unit, hess_unit, rules, bounds, values):  # type: ignore[no-untyped-def]
    """The same of many leaves: sums are gradients and hessians, as multiples of units."""
    for leaf in range(values.size):
        of, ends = sums[leaf], bounds[leaf]
        grad, hess = np.float64(of[0]) * grad_unit, np.float64(of[1]) * hess_unit
        values[leaf] = leaf_value(grad, hess, rules[L1], rules[L2], ends[0], ends[1])


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


@inlined
def _first_packed_from(prefixes, more, count, least):  # type: ignore[no-untyped-def]
    """`_first_from` for the row counts of packed prefixes."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        low, high = (middle + 1, high) if (prefixes[U(middle)] + more) & 0xFFFF < least else (low, middle)
    return low


@compiled
def gain_bounded(node, reals, scales, rules, gains):  # type: ignore[no-untyped-def]
    """The gain of a node that is not split, with L1 or bounds, into gains[0]."""
    grad, hess = np.float64(node[GRAD]) * scales[0], np.float64(node[HESS]) * scales[1]
    if rules[IS_MONOTONE] == 0.0:
        gains[0] = _gain(grad, hess, rules[L1], rules[L2]) if hess + rules[L2] > 0.0 else 0.0
    else:
        value = leaf_value(grad, hess, rules[L1], rules[L2], reals[LOW], reals[HIGH])
        gains[0] = _gain_of_value(grad, hess, rules[L1], rules[L2], value)


@compiled
def scan_bounded(  # type: ignore[no-untyped-def]
    grads, hess, rows, count, node, reals, scales, rules, l2, gains, direction
):
    """The place of the best of `count` prefixes, with L1 or bounds; -1: none is allowed. Gains are in `gains`."""
    total_grad, total_hess, total_rows = node[GRAD], node[HESS], node[ROWS]
    grad_scale, hess_scale = scales[0], scales[1]
    for i in range(count):
        left, right = np.float64(grads[i]) * grad_scale, np.float64(total_grad - grads[i]) * grad_scale
        left_hess, right_hess = np.float64(hess[i]) * hess_scale, np.float64(total_hess - hess[i]) * hess_scale
        if rules[IS_MONOTONE] == 0.0:
            gains[i] = _gain(left, left_hess, rules[L1], l2) + _gain(right, right_hess, rules[L1], l2)
        else:
            left_value = leaf_value(left, left_hess, rules[L1], l2, reals[LOW], reals[HIGH])
            right_value = leaf_value(right, right_hess, rules[L1], l2, reals[LOW], reals[HIGH])
            gains[i] = _gain_of_value(left, left_hess, rules[L1], l2, left_value)
            gains[i] += _gain_of_value(right, right_hess, rules[L1], l2, right_value)
            if (right_value - left_value) * direction < 0.0:  # 0 for categories
                gains[i] = -np.inf
    least_rows, least_hess = np.int64(rules[MIN_ROWS]), rules[MIN_WEIGHT]
    place, best = np.int64(-1), -np.inf
    for i in range(count):
        if gains[i] > best and rows[i] >= least_rows and total_rows - rows[i] >= least_rows:
            left_hess, right_hess = np.float64(hess[i]) * hess_scale, np.float64(total_hess - hess[i]) * hess_scale
            heavy = left_hess >= least_hess and right_hess >= least_hess
            if heavy and left_hess + l2 > 0.0 and right_hess + l2 > 0.0:
                place, best = np.int64(i), gains[i]
    return place


@compiled
def sum_categories(  # type: ignore[no-untyped-def]
    cells, words, base, bins, scales, rules, ratio, order, from_end, grads, hess, rows
):
    """Prefix sums over the categories that have rows, by the ratio of their gradients to their hessians, from the
    lowest or `from_end`; returns how many there are.
    """
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
    grad, weight, count = np.int64(0), np.int64(0), np.int64(0)
    for i in range(used):
        more_grad, more_weight, more_rows = unpack_cell(
            cells, words, base + order[used - 1 - i if from_end else np.int64(i)]
        )
        grad, weight, count = grad + more_grad, weight + more_weight, count + more_rows
        grads[U(i)], hess[U(i)], rows[U(i)] = grad, weight, count
    return used


def judging_parts(has_categories: bool, is_bounded: bool) -> Any:
    """`parts` of `judge`."""
    integers, reals = np.empty(0, np.int64), np.empty(0)
    parts = np.zeros(3, np.int64)
    if has_categories:
        sums = integers, integers, integers
        given = integers, 0, 0, 0, reals, reals, reals, integers, False
        parts[SUM_CATEGORIES] = address_of(sum_categories, *given, *sums)
    if is_bounded:
        node = integers, reals, reals, reals
        parts[GAIN_BOUNDED] = address_of(gain_bounded, *node, reals)
        parts[SCAN_BOUNDED] = address_of(scan_bounded, integers, integers, integers, 0, *node, 0.0, reals, 0)
    return parts


@compiled
def judge_packed(  # type: ignore[no-untyped-def]
    cells, rest, subtract, small, large, nodes, all_reals, all_left, features, bins, scales, rules, space
):
    """The best splits of two children of one-word cells, where no feature is a category and nothing is bounded, into
    their rows of the tables; returns whether they have one: 1 for the smaller, 2 for the larger. Prefix sums are
    unpacked on the way.

    `rest` are the cells of the larger child; with `subtract` those of the parent, from which the smaller child's are
    still to be taken. `large` below zero: there is no other child, which is how a tree begins.

    No field overflows: the sum is within that of the node. The caller has seen to it that `QUICK_L2` holds.
    """
    if subtract:
        for at in range(rest.size):
            rest[U(at)] -= cells[U(at)]
    grad_scale, hess_scale, l2 = scales[0], scales[1], rules[L2]
    least_rows, least_hess = np.int64(rules[MIN_ROWS]), rules[MIN_WEIGHT]
    prefixes, splits = space[0], np.int64(0)
    for side in range(2 if large >= 0 else 1):
        if side:
            small, cells = large, rest
        node, reals, goes_left = nodes[U(small)], all_reals[U(small)], all_left[U(small)]
        if node[ROWS] < 2 or node[ROWS] < 2 * least_rows:
            continue
        total_grad, total_hess, total_rows = node[GRAD], node[HESS], node[ROWS]
        node_grad, node_hess = np.float64(total_grad) * grad_scale, np.float64(total_hess) * hess_scale
        before = node_grad * node_grad / (node_hess + l2) if node_hess + l2 > 0.0 else 0.0
        least_gain = rules[MIN_GAIN] if rules[MIN_GAIN] > NOISE * abs(before) else NOISE * abs(before)
        unit, extra = hess_scale / (grad_scale * grad_scale), np.float32(l2 / hess_scale)
        all_grad, all_hess = np.float32(total_grad), np.float32(total_hess)
        best_gain, best_feature, best_bin, best_left, best_cell = (
            0.0,
            np.int64(0),
            np.int64(0),
            np.int64(0),
            np.int64(0),
        )
        for feature in features:
            base, count = feature * BINS, bins[feature, BIN_COUNT]
            if node[GROUPS] & bins[feature, FEATURE_GROUPS] == 0:
                continue
            missing, cell = cells[U(base + MISSING)], np.int64(0)
            for b in range(count):
                cell += cells[U(base + b)]
                prefixes[U(b)] = cell
            has_missing = missing & 0xFFFF > 0
            for missing_left in range(2 if has_missing else 1):
                more = missing if missing_left else np.int64(0)
                limits = count - missing_left if has_missing else count - 1
                bar = before + (best_gain if best_gain > least_gain else least_gain)
                least = np.float32(-bar * QUICK_CAUTION * unit)
                place, best = np.int64(-1), -np.inf
                stop = _first_packed_from(prefixes, more, limits, total_rows - least_rows + 1)
                first = _first_packed_from(prefixes, more, limits, least_rows) // QUICK_LANES * QUICK_LANES
                for start in range(first, stop, QUICK_LANES):
                    packed = load(prefixes, start, QUICK_LANES) + more
                    lefts = to_float(narrow(packed >> 32, np.int32) >> 8, np.float32)
                    left_weights = to_float(narrow(packed >> 16, np.int32) & 0xFFFFFF, np.float32)
                    rights, right_weights = all_grad - lefts, all_hess - left_weights + extra
                    left_weights = left_weights + extra
                    both = multiply_add(lefts * lefts, right_weights, rights * rights * left_weights)
                    above = multiply_add(left_weights * right_weights, least, both)
                    if largest(view(above, np.int32)) < 0:
                        continue
                    for i in range(start, start + QUICK_LANES if start + QUICK_LANES < stop else stop):
                        cell = prefixes[U(i)] + more
                        grad, weight, rows = cell >> 40, (cell >> 16) & 0xFFFFFF, cell & 0xFFFF
                        left, right = np.float64(grad) * grad_scale, np.float64(total_grad - grad) * grad_scale
                        left_hess, right_hess = (
                            np.float64(weight) * hess_scale,
                            np.float64(total_hess - weight) * hess_scale,
                        )
                        left_all, right_all = (
                            left_hess + l2,
                            right_hess + l2,
                        )  # over one denominator: divisions are the cost
                        gain = (left * left * right_all + right * right * left_all) / (left_all * right_all)
                        if gain > best and rows >= least_rows and total_rows - rows >= least_rows:
                            heavy = left_hess >= least_hess and right_hess >= least_hess
                            if heavy and left_all > 0.0 and right_all > 0.0:
                                place, best = np.int64(i), gain
                                lower = np.float32(-gain * QUICK_CAUTION * unit)
                                least = lower if lower < least else least
                gain = best - before
                if place >= 0 and gain > least_gain and gain > best_gain:
                    best_gain, best_feature, best_bin, best_cell = gain, feature, place, prefixes[U(place)] + more
                    best_left = np.int64(missing_left if has_missing else 2 * (best_cell & 0xFFFF) >= total_rows)
        node[LEFT_GRAD], node[LEFT_HESS] = best_cell >> 40, (best_cell >> 16) & 0xFFFFFF
        node[LEFT_ROWS], node[FEATURE] = best_cell & 0xFFFF, best_feature
        node[BIN], node[MISSING_LEFT], reals[GAIN] = best_bin, best_left, best_gain
        node[GROUPS_BELOW] = node[GROUPS] & bins[best_feature, FEATURE_GROUPS]
        for b in range(MISSING):
            goes_left[U(b)] = b <= best_bin
        goes_left[MISSING] = best_left
        splits += (best_gain > 0.0) << side
    return splits


@compiled
def judge(  # type: ignore[no-untyped-def]
    cells,
    words,
    rest,
    rest_words,
    subtract,
    small,
    large,
    nodes,
    all_reals,
    all_left,
    features,
    bins,
    scales,
    rules,
    is_category,
    monotone,
    parts,
    sums_by_bin,
    by_bin,
):
    """The same for cells of any form, if it is better than what the tables have.

    The bin of a set of categories is -1. `is_category` and `monotone` are by feature; see `judging_parts`.
    """
    if subtract:
        for at in range(rest.size):
            rest[U(at)] -= cells[U(at)]
    grads, hess, rows, order, gains = sums_by_bin[0], sums_by_bin[1], sums_by_bin[2], sums_by_bin[3], by_bin[0]
    grad_scale, hess_scale, splits = scales[0], scales[1], np.int64(0)
    least_rows, least_weight = np.int64(rules[MIN_ROWS]), rules[MIN_WEIGHT]
    is_bounded = parts[SCAN_BOUNDED] != 0
    for side in range(2 if large >= 0 else 1):
        if side:
            small, cells, words = large, rest, rest_words
        node, reals, goes_left = nodes[U(small)], all_reals[U(small)], all_left[U(small)]
        if node[ROWS] < 2 or node[ROWS] < 2 * least_rows:
            continue
        total_grad, total_hess, total_rows = node[GRAD], node[HESS], node[ROWS]
        all_grad, all_hess = np.float64(total_grad), np.float64(total_hess)
        node_grad, node_hess = all_grad * grad_scale, all_hess * hess_scale
        if is_bounded:
            run_at(parts[GAIN_BOUNDED], (node, reals, scales, rules, gains))
            before = gains[0]
        else:
            before = node_grad * node_grad / (node_hess + rules[L2]) if node_hess + rules[L2] > 0.0 else 0.0
        best_gain, best_feature, best_bin, best_left = reals[GAIN], node[FEATURE], node[BIN], node[MISSING_LEFT]
        least = rules[MIN_GAIN] if rules[MIN_GAIN] > NOISE * abs(before) else NOISE * abs(before)
        # The quick test is done in units of the integers: gradients by their scale, hessians by theirs.
        unit = hess_scale / (grad_scale * grad_scale)
        quick = (
            total_hess < EXACT
            and (rules[L2] + rules[CATEGORY_L2]) / hess_scale < np.inf
            and unit > 0.0
            and unit < np.inf
        )
        for feature in features:
            base, count = feature * BINS, bins[feature, BIN_COUNT]
            if node[GROUPS] & bins[feature, FEATURE_GROUPS] == 0:
                continue
            l2, categories = rules[L2], is_category[feature]
            missing_grad, missing_hess, missing_rows = unpack_cell(cells, words, base + MISSING)
            turns = 2 if missing_rows > 0 else 1
            if categories:  # from either end: missing and new ones go right
                l2, turns = l2 + rules[CATEGORY_L2], 2
            for turn in range(turns):
                if categories:
                    count = call_at(
                        parts[SUM_CATEGORIES],
                        (
                            cells, words, base, bins[feature, BIN_COUNT], scales, rules, by_bin[1], order, turn > 0,
                            grads, hess, rows,
                        ),
                    )  # fmt: skip
                elif turn == 0:
                    grad, weight, row_count = np.int64(0), np.int64(0), np.int64(0)
                    for i in range(count):
                        more_grad, more_weight, more_rows = unpack_cell(cells, words, base + i)
                        grad, weight, row_count = grad + more_grad, weight + more_weight, row_count + more_rows
                        grads[U(i)], hess[U(i)], rows[U(i)] = grad, weight, row_count
                limits = count if categories else count - turn if missing_rows > 0 else count - 1
                if turn == 1 and not categories:
                    for i in range(limits):
                        grads[U(i)] += missing_grad
                        hess[U(i)] += missing_hess
                        rows[U(i)] += missing_rows
                bar = before + (best_gain if best_gain > least else least)
                place, gain = np.int64(-1), -np.inf
                if is_bounded:
                    place = call_at(
                        parts[SCAN_BOUNDED],
                        (grads, hess, rows, limits, node, reals, scales, rules, l2, gains, monotone[feature]),
                    )
                    if place >= 0:
                        gain = gains[place]
                else:
                    least_bar, extra = -bar * CAUTION * unit, l2 / hess_scale
                    # Prefixes only grow: where a side has too few rows is known, in small nodes for much of a feature.
                    stop = _first_from(rows, limits, total_rows - least_rows + 1)
                    for start in range(_first_from(rows, limits, least_rows) // LANES * LANES, stop, LANES):
                        if quick:
                            lefts = to_float(load(grads, start, LANES), np.float64)
                            left_weights = to_float(load(hess, start, LANES), np.float64)
                            rights, right_weights = all_grad - lefts, all_hess - left_weights + extra
                            left_weights = left_weights + extra
                            both = multiply_add(lefts * lefts, right_weights, rights * rights * left_weights)
                            above = multiply_add(left_weights * right_weights, least_bar, both)
                            if (
                                largest(narrow(view(above, np.int64) >> 32, np.int32)) < 0
                            ):  # the sign is in the upper half
                                continue
                        for i in range(start, start + LANES if start + LANES < stop else stop):
                            grad, weight, count_left = grads[U(i)], hess[U(i)], rows[U(i)]
                            left, right = np.float64(grad) * grad_scale, np.float64(total_grad - grad) * grad_scale
                            left_hess, right_hess = (
                                np.float64(weight) * hess_scale,
                                np.float64(total_hess - weight) * hess_scale,
                            )
                            left_all, right_all = (
                                left_hess + l2,
                                right_hess + l2,
                            )  # over one denominator: divisions cost
                            candidate = (left * left * right_all + right * right * left_all) / (left_all * right_all)
                            if candidate > gain and count_left >= least_rows and total_rows - count_left >= least_rows:
                                heavy = left_hess >= least_weight and right_hess >= least_weight
                                if heavy and left_all > 0.0 and right_all > 0.0:
                                    place, gain = np.int64(i), candidate
                                    lower = -candidate * CAUTION * unit
                                    least_bar = lower if lower < least_bar else least_bar
                gain -= before
                if place >= 0 and gain > least and (gain > best_gain or (gain == best_gain and feature < best_feature)):
                    best_gain, best_feature = gain, feature
                    node[LEFT_GRAD], node[LEFT_HESS], node[LEFT_ROWS] = grads[place], hess[place], rows[place]
                    best_left = turn if missing_rows > 0 else np.int64(2 * rows[place] >= total_rows)
                    best_bin = np.int64(place)
                    if categories:
                        best_bin, best_left = np.int64(-1), np.int64(0)
                        for b in range(BINS):
                            goes_left[b] = 0
                        for i in range(place + 1):
                            goes_left[order[i] if turn == 0 else order[count - 1 - i]] = 1
        if best_bin >= 0:
            for b in range(MISSING):
                goes_left[U(b)] = b <= best_bin
            goes_left[MISSING] = best_left
        reals[GAIN], node[FEATURE], node[BIN], node[MISSING_LEFT] = best_gain, best_feature, best_bin, best_left
        node[GROUPS_BELOW] = node[GROUPS] & bins[best_feature, FEATURE_GROUPS]
        splits += (best_gain > 0.0) << side
    return splits
