"""Medians and quantiles of groups of rows, the same however the rows are divided among processes.

One process sorts. Several look for a quantile byte by byte: each counts how many of its numbers begin with which byte,
counts are added, and the byte in which it lies is known to all; eight rounds give all 64 bits. Nobody sends
numbers, only 256 counts a group, and the result is a number that some row has (or between two).

Weights become integers first (`whole_weights`), so that a share of the weight is reached at the same row everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bitplan.trees.distributed.shards import Array, Shards, fixed_point

SIGN = np.uint64(1 << 63)
STEP = "median, byte by byte"


def find_medians(numbers: Array, weights: Array, groups: Sequence[Array], shards: Shards) -> Array:
    """The median of each group of rows; with weights, the first number at which half the weight is reached."""
    return find_quantiles(numbers, weights, groups, 0.5, shards)


def find_quantiles(numbers: Array, weights: Array, groups: Sequence[Array], share: float, shards: Shards) -> Array:
    """The same for any share: between two numbers as numpy's quantile has it; with weights, a number that is there."""
    whole = whole_weights(weights, shards)
    if shards.count == 1:
        return np.array(
            [sorted_quantile(numbers[rows], whole[rows] if len(whole) else whole, share) for rows in groups]
        )
    rows = np.concatenate([np.empty(0, np.int64), *groups]).astype(np.int64)
    group = np.repeat(np.arange(len(groups)), [len(part) for part in groups])
    keys = _ordered(numbers[rows])
    is_weighted = bool(shards.top(np.array([float(len(whole) > 0)]), "use of weights")[0])  # an empty shard has none
    each = whole[rows] if len(whole) else np.ones(len(rows), np.int64)
    totals = np.zeros(len(groups), np.int64)
    np.add.at(totals, group, each)
    totals = shards.add(totals, "weight of each group")
    if is_weighted:
        return _select(keys, group, each, _weight_below(totals, share), shards)
    place = (totals - 1) * share
    below = np.floor(place).astype(np.int64)
    lower = _select(keys, group, each, below + 1, shards)
    upper = _select(keys, group, each, np.minimum(below + 2, totals), shards)
    return _between(lower, upper, place - below)


def sorted_quantile(numbers: Array, weights: Array, share: float = 0.5) -> float:
    """The quantile of one process's numbers; weights are integers, or none."""
    if not len(weights):
        place = (len(numbers) - 1) * share
        below = math.floor(place)
        above = min(below + 1, len(numbers) - 1)
        ordered = np.partition(numbers, [below, above])
        return float(_between(ordered[below], ordered[above], np.array(place - below)))
    order = np.argsort(numbers, kind="stable")
    reached = np.cumsum(weights[order])
    return float(numbers[order][np.searchsorted(reached, _weight_below(reached[-1], share))])


def _weight_below(totals: Array, share: float) -> Array:
    """Of integer weights the sum at which a share is reached."""
    if share == 0.5:
        return (totals + 1) // 2
    return np.clip(np.ceil(totals * share).astype(np.int64), 1, totals)


def _between(lower: Array, upper: Array, part: Array) -> Array:
    """The mean for a half: what a median is."""
    inside = np.where(part == 0.5, (lower + upper) / 2, lower + (upper - lower) * part)
    return np.where((lower == upper) | (part == 0.0), lower, inside)


def whole_weights(weights: Array, shards: Shards) -> Array:
    """Weights as multiples of a unit so small that the sum of all of them just fits an int64."""
    top = float(shards.top(np.array([weights.max(initial=0.0)]), "largest weight")[0])
    count = int(shards.add(np.array([len(weights)], np.int64), "number of weights")[0])
    if not len(weights) or not top:
        return weights.astype(np.int64)
    return fixed_point(weights, top, 61 - count.bit_length())


def _ordered(numbers: Array) -> Array:
    """uint64 in the order of the floats: of those below zero all bits are turned, of the others the sign."""
    bits = (numbers + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    return np.where(bits & SIGN, ~bits, bits | SIGN)


def _number(keys: Array) -> Array:
    return np.where(keys & SIGN, keys ^ SIGN, ~keys).view(np.float64)


def _select(keys: Array, group: Array, weights: Array, wanted: Array, shards: Shards) -> Array:
    """For each group the smallest number at which `wanted` of its weight is reached."""
    groups, begin = len(wanted), np.zeros(len(wanted), np.uint64)
    for shift in range(56, -1, -8):
        table = np.zeros(groups * 256, np.int64)
        byte = (keys >> np.uint64(shift) & np.uint64(255)).astype(np.int64)
        np.add.at(table, group * 256 + byte, weights)
        reached = np.cumsum(shards.add(table, STEP).reshape(groups, 256), axis=1)
        chosen = np.argmax(reached >= wanted[:, None], axis=1)
        below = np.where(chosen > 0, reached[np.arange(groups), chosen - 1], 0)
        wanted, begin = wanted - below, begin << np.uint64(8) | chosen.astype(np.uint64)
        within = byte == chosen[group]
        keys, group, weights = keys[within], group[within], weights[within]
    return _number(begin)
