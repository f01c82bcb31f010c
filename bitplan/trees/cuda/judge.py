"""Triton kernels that find the best splits of a wave's nodes, from histograms, and what they are launched with.

The arithmetic is that of `trees.loops.split`, operation by operation, each rounded to float64 on its own as there
(launches pass `enable_fp_fusion=False`), and sums are integers until then: the splits are those of the CPU, to the bit.

Children are numbered 2 * node + side of the wave: side 0 is the smaller one. A program judges a column of bins of both
children of a node; where columns are categories, two more kernels follow, a program for each child and such column:
one puts categories in order, the other judges them in that order. The last picks each child's best column.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.loops.launch import PreparedLaunch
from bitplan.trees.binning import Bins
from bitplan.trees.cuda.kernels import BINS, CELL_SHIFT, MOST_ROWS
from bitplan.trees.cuda.limits import Sent
from bitplan.trees.cuda.waves import COLUMNS, GROUPS, LARGE_SLOT, NODES, RESULT, SMALL_SLOT
from bitplan.trees.gradients import Array
from bitplan.trees.grow import GrowthRules
from bitplan.trees.loops import split

Launches = list[tuple[PreparedLaunch, tuple[Tensor, ...]]]

# Columns of `found`, by child and column of bins
PLACE, TO_LEFT, LEFT_BOTH, LEFT_HESS, ALL_BOTH, ALL_HESS, FOUND = range(7)
# Places in `numbers`
GRAD_SCALE, HESS_SCALE, L1, L2, MIN_WEIGHT, MIN_ROWS, MIN_GAIN, CATEGORY_SMOOTHING, CATEGORY_L2, NUMBERS = range(10)
NUMBERS_SPACE = 10  # what follows begins at a multiple of 16 bytes
LEAST_WIDE = 256  # columns of bins that are compared at once, so that few widths have a kernel of their own
ORDER_WARPS = 4

_BINS, _SHIFT, _COLUMNS, _FOUND, _RESULT = (tl.constexpr(each) for each in (BINS, CELL_SHIFT, COLUMNS, FOUND, RESULT))
_MISSING, _COUNT, _NOISE = tl.constexpr(split.MISSING), tl.constexpr(MOST_ROWS), tl.constexpr(split.NOISE)
_SMALL_SLOT, _LARGE_SLOT, _GROUPS, _NODES = (tl.constexpr(each) for each in (SMALL_SLOT, LARGE_SLOT, GROUPS, NODES))
_GRAD_SCALE, _HESS_SCALE, _L1, _L2 = (tl.constexpr(each) for each in (GRAD_SCALE, HESS_SCALE, L1, L2))
_MIN_WEIGHT, _MIN_ROWS, _MIN_GAIN = (tl.constexpr(each) for each in (MIN_WEIGHT, MIN_ROWS, MIN_GAIN))
_SMOOTHING, _CATEGORY_L2 = tl.constexpr(CATEGORY_SMOOTHING), tl.constexpr(CATEGORY_L2)
AT_ONCE = tl.constexpr(16)  # categories that every other is compared with


# ---- gains -----------------------------------------------------------------------------------------------------------


@triton.jit
def _quotient(over, under):
    """over / under of numbers that are not below zero; by zero it is infinity, and 0 / 0 is below every gain."""
    whole = over / tl.where(under == 0.0, 1.0, under)
    return tl.where(under == 0.0, tl.where(over > 0.0, float("inf"), float("-inf")), whole)


@triton.jit
def _shrunk(grad, l1):
    size = tl.abs(grad)
    return tl.where(size > l1, size - l1, 0.0)


@triton.jit
def _side_gain(grad, hess, l1, l2, HAS_L1: tl.constexpr):
    shrunk = tl.abs(grad)
    if HAS_L1:
        shrunk = _shrunk(grad, l1)
    return _quotient(shrunk * shrunk, hess + l2)


@triton.jit
def _value(grad, hess, l1, l2, low, high):
    """The value of a leaf, as `trees.loops.split.leaf_value`."""
    step, whole = _shrunk(grad, l1), hess + l2
    # A card divides zero by another way, which takes long.
    has_step = (step > 0.0) & (whole > 0.0)
    step = tl.where(grad < 0.0, step, 0.0 - step)
    step = tl.where(has_step, tl.where(has_step, step, 1.0) / tl.where(has_step, whole, 1.0), 0.0)
    step = tl.where(low > step, low, step)
    return tl.where(high < step, high, step)


@triton.jit
def _gain_of_value(grad, hess, l1, l2, value):
    return 0.0 - (2.0 * grad * value + (hess + l2) * value * value + 2.0 * l1 * tl.abs(value))


@triton.jit
def _gain_before(all_both, all_hess, numbers_ptr, bounds_ptr, HAS_L1: tl.constexpr, MONOTONE: tl.constexpr):
    """The gain of a node that is not split, and the least that a split must gain beyond it."""
    l1, l2, min_gain = tl.load(numbers_ptr + _L1), tl.load(numbers_ptr + _L2), tl.load(numbers_ptr + _MIN_GAIN)
    grad = (all_both >> _SHIFT).to(tl.float64) * tl.load(numbers_ptr + _GRAD_SCALE)
    hess = all_hess.to(tl.float64) * tl.load(numbers_ptr + _HESS_SCALE)
    if MONOTONE:
        value = _value(grad, hess, l1, l2, tl.load(bounds_ptr), tl.load(bounds_ptr + 1))
        before = _gain_of_value(grad, hess, l1, l2, value)
    else:
        before = tl.where(hess + l2 > 0.0, _side_gain(grad, hess, l1, l2, HAS_L1), 0.0)
    noise = tl.abs(before) * _NOISE
    return before, tl.where(min_gain > noise, min_gain, noise)


@triton.jit
def _gains(
    lefts,
    left_weights,
    all_both,
    all_hess,
    l2,
    direction,
    numbers_ptr,
    bounds_ptr,
    HAS_L1: tl.constexpr,
    MONOTONE: tl.constexpr,
):
    """The gain of each prefix of a histogram, the left side of a split; -infinity where the rules allow none."""
    grad_scale, hess_scale = tl.load(numbers_ptr + _GRAD_SCALE), tl.load(numbers_ptr + _HESS_SCALE)
    l1, least_weight = tl.load(numbers_ptr + _L1), tl.load(numbers_ptr + _MIN_WEIGHT)
    least_rows = tl.load(numbers_ptr + _MIN_ROWS).to(tl.int64)
    all_grad, all_rows = all_both >> _SHIFT, all_both & _COUNT
    rows, grad = lefts & _COUNT, lefts >> _SHIFT
    left, right = grad.to(tl.float64) * grad_scale, (all_grad - grad).to(tl.float64) * grad_scale
    left_hess = left_weights.to(tl.float64) * hess_scale
    right_hess = (all_hess - left_weights).to(tl.float64) * hess_scale
    left_all, right_all = left_hess + l2, right_hess + l2
    valid = (rows >= least_rows) & (all_rows - rows >= least_rows)
    if MONOTONE:
        low, high = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
        left_value = _value(left, left_hess, l1, l2, low, high)
        right_value = _value(right, right_hess, l1, l2, low, high)
        gain = _gain_of_value(left, left_hess, l1, l2, left_value)
        gain = gain + _gain_of_value(right, right_hess, l1, l2, right_value)
        against = (right_value - left_value) * direction < 0.0
        valid = valid & (against == 0)
    elif HAS_L1:
        gain = _side_gain(left, left_hess, l1, l2, HAS_L1) + _side_gain(right, right_hess, l1, l2, HAS_L1)
    else:
        gain = _quotient(left * left * right_all + right * right * left_all, left_all * right_all)
    valid = valid & (gain == gain) & (left_hess >= least_weight) & (right_hess >= least_weight)
    return tl.where(valid & (left_all > 0.0) & (right_all > 0.0), gain, float("-inf"))


# ---- columns of numbers ----------------------------------------------------------------------------------------------


@triton.jit
def _best_place(
    both,
    hess,
    bins,
    count,
    allowed,
    direction,
    numbers_ptr,
    bounds_ptr,
    gain_ptr,
    found_ptr,
    HAS_L1: tl.constexpr,
    MONOTONE: tl.constexpr,
):
    """The best split of a node by one feature, where `trees.loops.split.judge` finds it."""
    all_both, all_hess = tl.sum(both, 0), tl.sum(hess, 0)
    before, least = _gain_before(all_both, all_hess, numbers_ptr, bounds_ptr, HAS_L1, MONOTONE)
    is_missing = bins == _MISSING
    missing_both = tl.sum(tl.where(is_missing, both, 0), 0)
    missing_hess = tl.sum(tl.where(is_missing, hess, 0), 0)
    has_missing = (missing_both & _COUNT) > 0
    lefts, left_weights = tl.cumsum(tl.where(is_missing, 0, both), 0), tl.cumsum(tl.where(is_missing, 0, hess), 0)
    l2 = tl.load(numbers_ptr + _L2)
    best, best_place, best_turn = least * 0.0, 0, 0
    for turn in range(2):  # not unrolled: half the time to compile
        lefts += tl.where(turn == 1, missing_both, 0)
        left_weights += tl.where(turn == 1, missing_hess, 0)
        limit = tl.where(has_missing, count - turn, count - 1)
        gain = _gains(lefts, left_weights, all_both, all_hess, l2, direction, numbers_ptr, bounds_ptr, HAS_L1, MONOTONE)
        gain = tl.where((bins < limit) & allowed & (has_missing | (turn == 0)), gain, float("-inf"))
        place = tl.argmax(gain, 0)
        beyond = tl.max(gain, 0) - before
        is_better = (beyond > least) & (beyond > best)
        best = tl.where(is_better, beyond, best)
        best_place = tl.where(is_better, place, best_place)
        best_turn = tl.where(is_better, turn, best_turn)
    # the prefix sums as they are now have the missing rows
    at_place = bins == best_place
    left_both, left_hess = tl.sum(tl.where(at_place, lefts, 0), 0), tl.sum(tl.where(at_place, left_weights, 0), 0)
    left_both = tl.where(best_turn == 1, left_both, left_both - missing_both)
    left_hess = tl.where(best_turn == 1, left_hess, left_hess - missing_hess)
    larger_left = (2 * (left_both & _COUNT) >= (all_both & _COUNT)).to(tl.int32)
    to_left = tl.where(has_missing, best_turn, larger_left).to(tl.int64)
    _write_found(gain_ptr, found_ptr, best, best_place, to_left, left_both, left_hess, all_both, all_hess)


@triton.jit
def _write_found(gain_ptr, found_ptr, gain, place, to_left, left_both, left_hess, all_both, all_hess):
    tl.store(gain_ptr, gain)
    tl.store(found_ptr, place)
    tl.store(found_ptr + 1, to_left)
    tl.store(found_ptr + 2, left_both)
    tl.store(found_ptr + 3, left_hess)
    tl.store(found_ptr + 4, all_both)
    tl.store(found_ptr + 5, all_hess)


@triton.jit(do_not_specialize=["features"])
def judge_features(
    table_ptr,
    pool_ptr,
    counts_ptr,
    groups_ptr,
    signs_ptr,
    set_of_ptr,
    numbers_ptr,
    bounds_ptr,
    gains_ptr,
    found_ptr,
    features,
    K: tl.constexpr,
    HAS_L1: tl.constexpr,
    MONOTONE: tl.constexpr,
    SETS: tl.constexpr,
):
    """One feature's best splits of both children of a node; the parent's cells become those of the larger child.

    With SETS features that are categories are left to `judge_sets`.
    """
    node, feature = tl.program_id(0) // features, tl.program_id(0) % features
    of = table_ptr + node * _COLUMNS
    slot, rest = tl.load(of + _SMALL_SLOT), tl.load(of + _LARGE_SLOT)
    if (node < tl.load(table_ptr + K * _COLUMNS + _NODES)) & (slot >= 0):
        bins = tl.arange(0, _BINS)
        count = tl.load(counts_ptr + feature).to(tl.int32)
        allowed = (tl.load(groups_ptr + feature) & tl.load(of + _GROUPS)) != 0
        sign = tl.load(signs_ptr + feature).to(tl.float64)
        is_number = True
        if SETS:
            is_number = tl.load(set_of_ptr + feature) < 0
        cells = pool_ptr + (slot * features + feature) * (2 * _BINS) + 2 * bins
        both, hess = tl.load(cells), tl.load(cells + 1)
        child = 2 * node
        for side in range(2):
            if (side == 0) | (rest >= 0):
                if side == 1:
                    cells = pool_ptr + (rest * features + feature) * (2 * _BINS) + 2 * bins
                    both, hess = tl.load(cells) - both, tl.load(cells + 1) - hess
                    tl.store(cells, both)
                    tl.store(cells + 1, hess)
                if is_number:
                    ends, to = bounds_ptr + 2 * (child + side), (child + side) * features + feature
                    best, at = gains_ptr + to, found_ptr + to * _FOUND
                    _best_place(both, hess, bins, count, allowed, sign, numbers_ptr, ends, best, at, HAS_L1, MONOTONE)


# ---- columns of categories -------------------------------------------------------------------------------------------


@triton.jit
def _cells_of(table_ptr, pool_ptr, features_ptr, child, place, features, K: tl.constexpr):
    """Return (the feature, the address of its cells, whether there is such a child) of a column of categories."""
    of = table_ptr + child // 2 * _COLUMNS
    small, large = tl.load(of + _SMALL_SLOT), tl.load(of + _LARGE_SLOT)
    slot = tl.where(child % 2 == 1, large, small)
    feature = tl.load(features_ptr + place)
    is_there = (child < 2 * tl.load(table_ptr + K * _COLUMNS + _NODES)) & (slot >= 0)
    return feature, pool_ptr + (slot * features + feature) * (2 * _BINS), is_there


@triton.jit
def _ratios(cells, bins, count, numbers_ptr):
    """Return (gradients with rows, hessians, whether a category has rows, gradient / hessian) of some categories."""
    both, hess = tl.load(cells + 2 * bins), tl.load(cells + 2 * bins + 1)
    smooth = hess.to(tl.float64) * tl.load(numbers_ptr + _HESS_SCALE) + tl.load(numbers_ptr + _SMOOTHING)
    grad = (both >> _SHIFT).to(tl.float64) * tl.load(numbers_ptr + _GRAD_SCALE)
    ratio = tl.where(smooth > 0.0, grad / tl.where(smooth > 0.0, smooth, 1.0), 0.0)
    return both, hess, ((both & _COUNT) > 0) & (bins < count), ratio


@triton.jit(do_not_specialize=["features", "sets"])
def order_sets(
    table_ptr,
    pool_ptr,
    counts_ptr,
    features_ptr,
    numbers_ptr,
    ordered_ptr,
    ranks_ptr,
    features,
    sets,
    K: tl.constexpr,
):
    """Put cells of categories that have rows in order of gradient / hessian, of equal ones the lower first.

    `ranks` is the place of each category; other bins come behind.
    """
    child, place = tl.program_id(0) // sets, tl.program_id(0) % sets
    feature, cells, is_there = _cells_of(table_ptr, pool_ptr, features_ptr, child, place, features, K)
    if is_there:
        bins = tl.arange(0, _BINS)
        count = tl.load(counts_ptr + feature).to(tl.int32)
        both, hess, is_used, ratio = _ratios(cells, bins, count, numbers_ptr)
        rank = tl.zeros([_BINS], tl.int32)
        for first in range(0, _BINS, AT_ONCE):
            others = first + tl.arange(0, AT_ONCE)
            _both, _hess, are_used, ratios = _ratios(cells, others, count, numbers_ptr)
            is_less = ratios[None, :] < ratio[:, None]
            is_first = (ratios[None, :] == ratio[:, None]) & (others[None, :] < bins[:, None])
            rank += tl.sum((are_used[None, :] & (is_less | is_first)).to(tl.int32), 1)
        used, unused = is_used.to(tl.int32), 1 - is_used.to(tl.int32)
        rank = tl.where(is_used, rank, tl.sum(used, 0) + tl.cumsum(unused, 0) - unused)
        of = tl.program_id(0).to(tl.int64) * _BINS
        tl.store(ordered_ptr + 2 * (of + rank), both)
        tl.store(ordered_ptr + 2 * (of + rank) + 1, hess)
        tl.store(ranks_ptr + of + bins, rank.to(tl.uint8))


@triton.jit(do_not_specialize=["features", "sets"])
def judge_sets(
    table_ptr,
    pool_ptr,
    counts_ptr,
    groups_ptr,
    features_ptr,
    numbers_ptr,
    bounds_ptr,
    ordered_ptr,
    ranks_ptr,
    lefts_ptr,
    gains_ptr,
    found_ptr,
    features,
    sets,
    K: tl.constexpr,
    HAS_L1: tl.constexpr,
    MONOTONE: tl.constexpr,
):
    """The first categories in that order to the left, from either end; missing and new ones go right.

    `lefts` says of each bin whether it goes left.
    """
    child, place = tl.program_id(0) // sets, tl.program_id(0) % sets
    feature, cells, is_there = _cells_of(table_ptr, pool_ptr, features_ptr, child, place, features, K)
    if is_there:
        bins = tl.arange(0, _BINS)
        count = tl.load(counts_ptr + feature).to(tl.int32)
        groups = tl.load(table_ptr + child // 2 * _COLUMNS + _GROUPS)
        allowed = (tl.load(groups_ptr + feature) & groups) != 0
        both, hess = tl.load(cells + 2 * bins), tl.load(cells + 2 * bins + 1)
        all_both, all_hess = tl.sum(both, 0), tl.sum(hess, 0)
        used = tl.sum((((both & _COUNT) > 0) & (bins < count)).to(tl.int32), 0)
        ends = bounds_ptr + 2 * child
        before, least = _gain_before(all_both, all_hess, numbers_ptr, ends, HAS_L1, MONOTONE)
        l2 = tl.load(numbers_ptr + _L2) + tl.load(numbers_ptr + _CATEGORY_L2)
        of = tl.program_id(0).to(tl.int64) * _BINS
        best, best_place, best_turn = least * 0.0, 0, 0
        left_both, left_hess = all_both * 0, all_hess * 0
        for turn in range(2):
            at = of + tl.where(turn == 1, used - 1 - bins, bins)
            lefts = tl.cumsum(tl.load(ordered_ptr + 2 * at, mask=bins < used, other=0), 0)
            left_weights = tl.cumsum(tl.load(ordered_ptr + 2 * at + 1, mask=bins < used, other=0), 0)
            gain = _gains(lefts, left_weights, all_both, all_hess, l2, 0.0, numbers_ptr, ends, HAS_L1, MONOTONE)
            gain = tl.where((bins < used) & allowed, gain, float("-inf"))
            best_here = tl.argmax(gain, 0)
            beyond = tl.max(gain, 0) - before
            is_better = (beyond > least) & (beyond > best)
            at_place = bins == best_here
            left_both = tl.where(is_better, tl.sum(tl.where(at_place, lefts, 0), 0), left_both)
            left_hess = tl.where(is_better, tl.sum(tl.where(at_place, left_weights, 0), 0), left_hess)
            best = tl.where(is_better, beyond, best)
            best_place = tl.where(is_better, best_here, best_place)
            best_turn = tl.where(is_better, turn, best_turn)
        rank = tl.load(ranks_ptr + of + bins).to(tl.int32)
        from_start = tl.where(best_turn == 1, used - 1 - rank, rank)
        tl.store(lefts_ptr + of + bins, ((rank < used) & (from_start <= best_place)).to(tl.uint8))
        to = child * features + feature
        found = found_ptr + to * _FOUND
        _write_found(gains_ptr + to, found, best, -1, 0, left_both, left_hess, all_both, all_hess)


# ---- the best column -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["features", "sets"])
def pick_features(
    table_ptr,
    gains_ptr,
    found_ptr,
    set_of_ptr,
    lefts_ptr,
    result_ptr,
    result_sets_ptr,
    features,
    sets,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    SETS: tl.constexpr,
):
    """Pick each child's feature of the largest gain, of equal gains the lowest, into the result."""
    child = tl.program_id(0)
    if child < 2 * tl.load(table_ptr + K * _COLUMNS + _NODES):
        feature = tl.arange(0, WIDE)
        gains = tl.load(gains_ptr + child * features + feature, mask=feature < features, other=0.0)
        best, chosen = tl.max(gains, 0), tl.argmax(gains, 0)
        found = found_ptr + (child * features + chosen) * _FOUND
        result = result_ptr + child * _RESULT
        left, whole = tl.load(found + 2), tl.load(found + 4)
        tl.store(result, best.to(tl.int64, bitcast=True))
        tl.store(result + 1, chosen.to(tl.int64))
        tl.store(result + 2, tl.load(found))
        tl.store(result + 3, tl.load(found + 1))
        tl.store(result + 4, left >> _SHIFT)
        tl.store(result + 5, tl.load(found + 3))
        tl.store(result + 6, left & _COUNT)
        tl.store(result + 7, whole >> _SHIFT)
        tl.store(result + 8, tl.load(found + 5))
        tl.store(result + 9, whole & _COUNT)
        if SETS:
            place, bins = tl.load(set_of_ptr + chosen), tl.arange(0, _BINS)
            if place >= 0:
                goes_left = tl.load(lefts_ptr + (child * sets + place) * _BINS + bins)
                tl.store(result_sets_ptr + child * _BINS + bins, goes_left)


# ---- launches --------------------------------------------------------------------------------------------------------


class Judge:
    """Judges the children of a wave's nodes, tree after tree."""

    def __init__(self, bins: Bins, rules: GrowthRules, monotone: Array, wave: int, device: torch.device) -> None:
        features, sets = len(bins.counts), np.flatnonzero(bins.is_category)
        self._rules, self._wave, self._features, self._sets = rules, wave, features, len(sets)
        # As on the CPU: bounds hold where a column of bins has a sign, or where there is L1.
        is_bounded = bool(np.any(monotone)) or rules.l1 > 0
        self._is_monotone = is_bounded and bool(rules.numbers[split.IS_MONOTONE])
        set_of = np.full(features, -1)
        set_of[sets] = np.arange(len(sets))
        self._counts, self._signs, self._set_of, self._set_features = (
            torch.from_numpy(table.astype(np.int64)).to(device) for table in (bins.counts, monotone, set_of, sets)
        )
        self._sent = Sent(NUMBERS_SPACE + features, device)
        self._numbers = self._sent.there[:NUMBERS_SPACE].view(torch.float64)
        self._groups = self._sent.there[NUMBERS_SPACE:]
        self._host_numbers = self._sent.host[:NUMBERS].view(torch.float64).numpy()
        self._host_numbers[2:] = rules.numbers[: NUMBERS - 2]
        # Zeros: what is no child is picked from, too.
        self._gains = torch.zeros(2 * wave * features, dtype=torch.float64, device=device)
        self._found = torch.zeros(2 * wave * features * FOUND, dtype=torch.int64, device=device)
        cells = 2 * wave * max(len(sets), 1) * BINS
        self._ordered = torch.empty(2 * cells if len(sets) else 2, dtype=torch.int64, device=device)
        self._ranks, self._lefts = torch.empty((2, cells), dtype=torch.uint8, device=device)
        self._steps = self._prepare()

    def begin(self, groups: Array, scales: Array) -> None:
        """Send to the GPU what judging needs to know of a tree: groups of its columns, 0 for none; the scales."""
        self._sent.host[NUMBERS_SPACE:].numpy()[:] = groups
        self._host_numbers[:2] = scales
        self._sent.send()

    def launches(self, table: Tensor, pool: Tensor, bounds: Tensor, result: Tensor, result_sets: Tensor) -> Launches:
        """The launches of a wave, with what each gets.

        bounds       of the value of each child, (2 * wave, 2)
        result       as `waves` reads it, (2 * wave, RESULT)
        result_sets  of children whose best column is of categories: whether each bin goes left
        """
        judged, numbers = (self._gains, self._found), self._numbers
        of_columns = self._counts, self._groups, self._signs, self._set_of
        order = self._ordered, self._ranks
        sets = self._counts, self._groups, self._set_features, numbers, bounds, *order, self._lefts
        pointers: dict[str, tuple[Tensor, ...]] = {
            "judge_features": (table, pool, *of_columns, numbers, bounds, *judged),
            "order_sets": (table, pool, self._counts, self._set_features, numbers, *order),
            "judge_sets": (table, pool, *sets, *judged),
            "pick_features": (table, *judged, self._set_of, self._lefts, result, result_sets),
        }
        return [(step, pointers[name]) for name, step in self._steps.items()]

    def _prepare(self) -> dict[str, PreparedLaunch]:
        """The launches by the name of the kernel, in their order."""
        features, wave = self._features, self._wave
        sizes, has_sets = (features, self._sets), {"SETS": self._sets > 0}
        kind = {"K": wave, "HAS_L1": self._rules.l1 > 0, "MONOTONE": self._is_monotone}
        wide = {"K": wave, "WIDE": max(triton.next_power_of_2(features), LEAST_WIDE)}

        def prepared(kernel: Any, grid: int, numbers: tuple[int, ...], constants: Any, warps: int) -> PreparedLaunch:
            return PreparedLaunch(kernel, (grid,), numbers, constants, num_warps=warps, enable_fp_fusion=False)

        steps = {"judge_features": prepared(judge_features, wave * features, sizes[:1], kind | has_sets, 2)}
        if self._sets:
            steps["order_sets"] = prepared(order_sets, 2 * wave * self._sets, sizes, {"K": wave}, ORDER_WARPS)
            steps["judge_sets"] = prepared(judge_sets, 2 * wave * self._sets, sizes, kind, 2)
        steps["pick_features"] = prepared(pick_features, 2 * wave, sizes, wide | has_sets, 1)
        return steps
