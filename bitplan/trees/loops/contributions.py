"""Exact Shapley values of trees, leaf by leaf (TreeSHAP, in the form that GPUTreeSHAP gave it).

A leaf is reached by the splits above it. Of each distinct feature among them two numbers matter: the share of training
rows that pass its splits when its value is not known, and whether the row at hand passes them. The value of the leaf is
divided among these features by a polynomial of degree d, extended feature by feature and divided by one of them at a
time: d^2 steps for a leaf below d features.
"""

from __future__ import annotations

import numpy as np

from bitplan.trees.loops.compiling import compiled, inlined

U = np.uint64


@inlined
def _goes_left(number, at, threshold, missing_left, category, bits):  # type: ignore[no-untyped-def]
    if np.isnan(number):
        return missing_left[at]
    if category[at] < 0:
        return number <= threshold[at]
    if number <= -1 or number >= 32 * bits.shape[1]:
        return False
    code = np.int64(number)
    return (bits[category[at], code >> 5] >> np.uint32(code & 31)) & np.uint32(1) != 0


@compiled
def add_contributions(  # type: ignore[no-untyped-def]
    numbers, root, feature, threshold, missing_left, category, bits,
    values, part_starts, part_feature, part_share, step_starts, step_node, step_left, out,
):  # fmt: skip
    """Add one tree's contributions to out[row, feature].

    Leaf l has parts part_starts[l] .. part_starts[l + 1], one for each distinct feature above it; part p has steps
    step_starts[p] .. step_starts[p + 1], the splits of that feature above the leaf.
    """
    most = 0
    for leaf in range(values.size):
        most = max(most, part_starts[leaf + 1] - part_starts[leaf])
    weights, passes, per = np.empty(most + 1), np.empty(most), np.zeros(most + 2)
    for i in range(1, most + 2):
        per[i] = 1.0 / i
    nodes = 0
    for step in range(step_node.size):
        nodes = max(nodes, step_node[step] + 1)
    is_left = np.empty(nodes, np.bool_)
    for row in range(numbers.shape[0]):
        for node in range(nodes):
            at = root + node
            number = np.float64(numbers[row, feature[at]])
            is_left[node] = _goes_left(number, at, threshold, missing_left, category, bits)
        for leaf in range(values.size):
            first = part_starts[leaf]
            depth = part_starts[leaf + 1] - first
            weights[0] = 1.0
            for part in range(depth):
                one = 1.0
                for step in range(step_starts[first + part], step_starts[first + part + 1]):
                    if is_left[step_node[step]] != step_left[step]:
                        one = 0.0
                        break
                passes[part] = one
                zero = part_share[first + part]
                weights[part + 1] = 0.0
                for i in range(part, -1, -1):
                    if one != 0.0:
                        weights[i + 1] += weights[i] * ((i + 1.0) * per[part + 2])
                    weights[i] *= zero * ((part + 1.0 - i) * per[part + 2])
            without = 0.0  # of every feature whose splits the row does not pass
            for i in range(depth):
                without += weights[i] * per[depth - i]
            for part in range(depth):
                one, zero = passes[part], part_share[first + part]
                total = 0.0
                if one != 0.0:
                    following, factor = weights[depth], zero * per[depth + 1]
                    for i in range(depth - 1, -1, -1):
                        here = following * ((depth + 1.0) * per[i + 1])
                        total += here
                        following = weights[i] - here * (factor * (depth - i))
                elif zero != 0.0:
                    total = without * (depth + 1.0) / zero
                out[row, part_feature[first + part]] += total * (one - zero) * values[leaf]
