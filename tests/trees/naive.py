"""The trainer again, in plain numpy and Python: no panels, no packed cells, no subtraction, no threads.

Slow and obvious. The fast one must grow the same trees, to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from bitplan.trees.gradients import GradientPrecision
from bitplan.trees.histogram import codes_of


def integer_gradients(gradients):
    """What each row adds to integer sums: (gradients, hessians)."""
    if gradients.precision is GradientPrecision.F32:
        grads = np.rint(gradients.grads.astype(np.float64) / gradients.grad_scale)
        hess = np.rint(gradients.hessians.astype(np.float64) / gradients.hess_scale)
        return grads.astype(np.int64), hess.astype(np.int64)
    return codes_of(gradients)


def decoded_gradients(gradients):
    """(gradients, hessians) of all rows, as numbers."""
    if gradients.precision is GradientPrecision.F32:
        return gradients.grads, gradients.hessians
    grads, hess = integer_gradients(gradients)
    return grads * gradients.grad_scale, hess * gradients.hess_scale


def naive_histogram(column, grads, hess, rows):
    """(256, 3): gradient, hessian, rows."""
    result = np.zeros((256, 3), np.int64)
    for place, addend in enumerate((grads[rows], hess[rows], 1)):
        np.add.at(result[:, place], column[rows], addend)
    return result


@dataclass(eq=False)
class Leaf:
    rows: np.ndarray
    depth: int
    bounds: tuple
    totals: tuple = ()
    best: dict = field(default_factory=dict)


class NaiveGrower:
    def __init__(self, columns, bins, rules):
        self.columns, self.bins, self.rules = columns, bins, rules

    def grow(self, gradients, rows, features):
        """Splits in the order they were made, and the leaves by number."""
        self.grads, self.hess = integer_gradients(gradients)
        self.scales, self.features = (gradients.grad_scale, gradients.hess_scale), features
        leaves, splits = [self.leaf(np.sort(rows), 0, (-math.inf, math.inf))], []
        made = {id(leaves[0]): 0}
        while len(leaves) < self.rules.max_leaves:
            open_ = [leaf for leaf in leaves if leaf.best]
            if not open_:
                break

            def rank(leaf):
                return (-leaf.best["gain"] if self.rules.best_first else leaf.depth, made[id(leaf)])

            leaf = min(open_, key=rank)
            at = leaves.index(leaf)
            left, right = self.children(leaf)
            splits.append({"leaf": at, **leaf.best})
            leaves[at] = left
            leaves.append(right)
            made[id(left)], made[id(right)] = 2 * len(splits), 2 * len(splits) + 1
        return splits, leaves

    def children(self, leaf):
        best = leaf.best
        is_left = np.array([best["goes_left"][b] for b in self.columns[best["feature"]][leaf.rows]], bool)
        bounds = [leaf.bounds, leaf.bounds]
        direction = self.rules.monotone[best["feature"]]
        if direction:
            low, high = leaf.bounds
            rest = [leaf.totals[i] - best["sums"][i] for i in range(2)]
            middle = (self.value(best["sums"], leaf.bounds) + self.value(rest, leaf.bounds)) / 2
            bounds = [(low, middle), (middle, high)] if direction > 0 else [(middle, high), (low, middle)]
        return (
            self.leaf(leaf.rows[is_left], leaf.depth + 1, bounds[0]),
            self.leaf(leaf.rows[~is_left], leaf.depth + 1, bounds[1]),
        )

    def leaf(self, rows, depth, bounds):
        leaf = Leaf(rows, depth, bounds, (int(self.grads[rows].sum()), int(self.hess[rows].sum()), len(rows)))
        if not (self.rules.max_depth and depth >= self.rules.max_depth):
            self.find_best(leaf)
        return leaf

    def value(self, sums, bounds, l2=None):
        grad, hess = sums[0] * self.scales[0], sums[1] * self.scales[1]
        l2 = self.rules.l2 if l2 is None else l2
        shrunk = max(abs(grad) - self.rules.l1, 0.0)
        value = 0.0 if hess + l2 <= 0 else -math.copysign(shrunk, grad) / (hess + l2)
        return min(max(value, bounds[0]), bounds[1])

    def gain_of_value(self, sums, bounds, l2):
        value = self.value(sums, bounds, l2)
        grad, hess = sums[0] * self.scales[0], sums[1] * self.scales[1]
        return -(2.0 * grad * value + (hess + l2) * value * value + 2.0 * self.rules.l1 * abs(value))

    def gain(self, left, right, bounds, l2):
        """Of two children; the order of operations is the fast one's."""
        if any(self.rules.monotone):
            return self.gain_of_value(left, bounds, l2) + self.gain_of_value(right, bounds, l2)
        grads = [side[0] * self.scales[0] for side in (left, right)]
        hess = [side[1] * self.scales[1] + l2 for side in (left, right)]
        if self.rules.l1 == 0:
            return (grads[0] * grads[0] * hess[1] + grads[1] * grads[1] * hess[0]) / (hess[0] * hess[1])
        shrunk = [max(abs(grad) - self.rules.l1, 0.0) for grad in grads]
        return shrunk[0] * shrunk[0] / hess[0] + shrunk[1] * shrunk[1] / hess[1]

    def gain_before(self, leaf):
        if any(self.rules.monotone):
            return self.gain_of_value(leaf.totals, leaf.bounds, self.rules.l2)
        grad, hess = leaf.totals[0] * self.scales[0], leaf.totals[1] * self.scales[1]
        shrunk = max(abs(grad) - self.rules.l1, 0.0)
        return shrunk * shrunk / (hess + self.rules.l2) if hess + self.rules.l2 > 0 else 0.0

    def candidates(self, feature, cells):
        """(bins that go left, bin or -1, where missing values go, l2), in the order the fast one looks at them."""
        if self.bins.is_category[feature]:
            ratio = {}
            for b in range(self.bins.counts[feature]):
                if cells[b, 2]:
                    smooth = cells[b, 1] * self.scales[1] + self.rules.category_smoothing
                    ratio[b] = cells[b, 0] * self.scales[0] / smooth
            order = sorted(ratio, key=ratio.__getitem__)
            for turn in (order, order[::-1]):
                for size in range(1, len(turn) + 1):
                    yield set(turn[:size]), -1, False, self.rules.l2 + self.rules.category_l2
            return
        count, missing = int(self.bins.counts[feature]), cells[255, 2] > 0
        for b in range(count if missing else count - 1):
            left = set(range(b + 1))
            more = cells[: b + 1, 2].sum() * 2 >= cells[:, 2].sum()
            yield left | ({255} if not missing and more else set()), b, bool(not missing and more), self.rules.l2
        for b in range(count - 1 if missing else 0):
            yield set(range(b + 1)) | {255}, b, True, self.rules.l2

    def find_best(self, leaf):
        before, rules = self.gain_before(leaf), self.rules
        if len(leaf.rows) < 2 * rules.min_child_rows:
            return
        for feature in self.features:
            cells = naive_histogram(self.columns[feature], self.grads, self.hess, leaf.rows)
            for chosen, place, missing_left, l2 in self.candidates(feature, cells):
                sums = [int(number) for number in cells[sorted(chosen)].sum(axis=0)]
                rest = [leaf.totals[i] - sums[i] for i in range(3)]
                if min(sums[2], rest[2]) < rules.min_child_rows:
                    continue
                hess = sums[1] * self.scales[1], rest[1] * self.scales[1]
                if min(hess) < rules.min_child_weight or min(hess) + l2 <= 0:
                    continue
                direction = rules.monotone[feature]
                step = self.value(rest, leaf.bounds, l2) - self.value(sums, leaf.bounds, l2)
                if direction and step * direction < 0:
                    continue
                gain = self.gain(sums, rest, leaf.bounds, l2) - before
                least = max(rules.min_gain, 1e-12 * abs(before))
                if gain > least and gain > leaf.best.get("gain", 0.0):
                    goes_left = [b in chosen for b in range(256)]
                    leaf.best = {
                        "gain": gain, "feature": feature, "bin": place, "missing_left": missing_left,
                        "goes_left": goes_left, "sums": sums,
                    }  # fmt: skip


def naive_scores(booster, x):
    """Raw scores by the definition of a tree, row by row."""
    scores = np.tile(booster.start, (len(x), 1))
    for number, tree in enumerate(booster.trees):
        for row, values in enumerate(x):
            node = 0 if tree.leaves > 1 else ~0
            while node >= 0:
                value, members = values[tree.feature[node]], tree.categories[node]
                goes_left = value <= tree.threshold[node] if members is None else value in members
                if np.isnan(value):
                    goes_left = tree.missing_left[node]
                node = (tree.left if goes_left else tree.right)[node]
            scores[row, number % booster.outputs] += tree.leaf_value[~node]
    return scores
