"""LambdaRank's gradients, query by query, as LightGBM computes them."""

from __future__ import annotations

import math

import numpy as np

from bitplan.trees.loops.compiling import compiled


@compiled
def lambdarank(scores, gains, weights, starts, first, last, order, discounts, per_best, truncation, grads, hess):  # type: ignore[no-untyped-def]
    """Gradients of the rows of queries first .. last.

    starts     where each query's rows begin, and where the last one's end
    order      rows, query by query, those of higher scores first
    per_best   1 / the best sum of discounted gains of each query; 0 where nothing is relevant
    """
    for query in range(first, last):
        start, stop = starts[query], starts[query + 1]
        slopes, curves = np.zeros(stop - start), np.zeros(stop - start)
        spread = scores[order[start]] != scores[order[stop - 1]]
        total = 0.0
        for i in range(min(stop - start - 1, truncation)):
            for j in range(i + 1, stop - start):
                high, low = order[start + i], order[start + j]
                if gains[high] == gains[low]:
                    continue
                if gains[high] < gains[low]:
                    high, low = low, high
                lead = scores[high] - scores[low]
                worth = (gains[high] - gains[low]) * abs(discounts[i] - discounts[j]) * per_best[query]
                if spread:
                    worth /= 0.01 + abs(lead)
                doubt = 1.0 / (1.0 + math.exp(lead))
                slope, curve = doubt * worth, doubt * (1.0 - doubt) * worth
                slopes[high - start] -= slope
                slopes[low - start] += slope
                curves[high - start] += curve
                curves[low - start] += curve
                total += 2.0 * slope
        factor = math.log2(1.0 + total) / total if total > 0.0 else 1.0
        for row in range(start, stop):
            weight = weights[row] if weights.size else 1.0
            grads[row] = slopes[row - start] * factor * weight
            hess[row] = curves[row - start] * factor * weight
