"""Compiled loops that compute gradients, and that quantize them.

Stochastic rounding draws from a counter-based generator: the number for a row is a hash of random_state, the round and
the row, so that equal settings give equal codes in whatever order and on however many threads rows are rounded.

LambdaRank's gradients, query by query, as LightGBM computes them.
"""

from __future__ import annotations

import math

import numpy as np

from bitplan.trees.loops.compiling import compiled, inlined

# ---- ranking ---------------------------------------------------------------------------------------------------------


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


# ---- gradients -------------------------------------------------------------------------------------------------------


U = np.uint64
I = np.int64  # noqa: E741  numba compiles a part once more for every literal it is given


@inlined
def _offsets(key, row, stochastic):  # type: ignore[no-untyped-def]
    """What to add before rounding down: two numbers in [0, 1), or two halves.

    The numbers are splitmix64's: every bit of the counter changes half the bits of the word.
    """
    if not stochastic:
        return 0.5, 0.5
    word = key + U(row) * U(0x9E3779B97F4A7C15)
    word = (word ^ (word >> U(30))) * U(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> U(27))) * U(0x94D049BB133111EB)
    word = word ^ (word >> U(31))
    return np.float64(word >> U(32)) * 2.0**-32, np.float64(word & U(0xFFFFFFFF)) * 2.0**-32


@inlined
def _within(code, least, most):  # type: ignore[no-untyped-def]
    """For integers: numba's min and max of floats look for NaN."""
    return np.int64(least if code < least else most if code > most else code)


@compiled
def find_largest(grads, hess, first, piece, found):  # type: ignore[no-untyped-def]
    """Into the piece's row of `found` the largest |gradient| and hessian, as bits of float32, and whether there is a
    number below zero, not finite or no number. float32 are read as int32: the larger has the larger bits."""
    top, weight, is_bad = np.int32(0), np.int32(0), False
    for i in range(grads.size):
        grad, held = grads[i] & np.int32(0x7FFFFFFF), hess[i] & np.int32(0x7FFFFFFF)
        top = grad if grad > top else top
        weight = held if held > weight else weight
        is_bad |= (hess[i] < 0) & (held != 0)
    at = first // piece
    found[at, 0], found[at, 1], found[at, 2] = top, weight, np.int32(is_bad)


@compiled
def quantize_i16(grads, hess, first, per_grad, per_hess, key, stochastic, grad_codes, hess_codes):  # type: ignore[no-untyped-def]
    """int8 gradients within -127..127, uint8 hessians within 0..255; `first` is the number of the first row."""
    for i in range(grads.size):
        for_grad, for_hess = _offsets(key, first + i, stochastic)
        grad = np.int64(math.floor(np.float64(grads[i]) * per_grad + for_grad))
        weight = np.int64(math.floor(np.float64(hess[i]) * per_hess + for_hess))
        grad_codes[i] = _within(grad, I(-127), I(127))
        hess_codes[i] = _within(weight, I(0), I(255))


@compiled
def quantize_i8(grads, hess, first, per_grad, per_hess, key, stochastic, grad_codes, hess_codes):  # type: ignore[no-untyped-def]
    """Gradients within -7..7, hessians within 0..15; two rows share a byte, the even one has its low half."""
    for i in range(grads.size):
        for_grad, for_hess = _offsets(key, first + i, stochastic)
        grad = np.int64(math.floor(np.float64(grads[i]) * per_grad + for_grad))
        weight = np.int64(math.floor(np.float64(hess[i]) * per_hess + for_hess))
        grad, weight = _within(grad, I(-7), I(7)) & 15, _within(weight, I(0), I(15))
        if i & 1:
            grad_codes[i >> 1] |= grad << 4
            hess_codes[i >> 1] |= weight << 4
        else:
            grad_codes[i >> 1] = grad
            hess_codes[i >> 1] = weight


@compiled
def sum_rows(rows, grads, hess, grad_unit, hess_unit):  # type: ignore[no-untyped-def]
    """Sums of float32 gradients and hessians over rows, as multiples of the units: no order of rows matters."""
    per_grad, per_hess = 1.0 / grad_unit, 1.0 / hess_unit
    grad, weight = np.int64(0), np.int64(0)
    for i in range(rows.size):
        row = U(rows[U(i)])
        grad += np.int64(np.rint(np.float64(grads[row]) * per_grad))
        weight += np.int64(np.rint(np.float64(hess[row]) * per_hess))
    return grad, weight


@compiled
def sum_limbs(numbers, power, finer, is_extreme):  # type: ignore[no-untyped-def]
    """Sums of numbers * 2^power, rounded, and of what is left * 2^(power + finer), rounded."""
    coarse_sum, fine_sum = np.int64(0), np.int64(0)
    up, down, further = 1.0, 1.0, 1.0
    if not is_extreme:  # else these are not all normal numbers
        up, down, further = math.ldexp(1.0, power), math.ldexp(1.0, -power), math.ldexp(1.0, power + finer)
    for i in range(numbers.size):
        number = numbers[U(i)]
        if is_extreme:
            coarse = np.rint(math.ldexp(number, power))
            fine = np.rint(math.ldexp(number - math.ldexp(coarse, -power), power + finer))
        else:
            coarse = np.rint(number * up)
            fine = np.rint((number - coarse * down) * further)
        coarse_sum += np.int64(coarse)
        fine_sum += np.int64(fine)
    return coarse_sum, fine_sum


# ---- objectives: y, raw scores, weights (or an empty array) -> grads, hess -------------------------------------------


@compiled
def squared_error(y, scores, weights, grads, hess):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        weight = weights[i] if weights.size else 1.0
        grads[i] = (scores[i] - y[i]) * weight
        hess[i] = weight


@compiled
def absolute_error(y, scores, weights, grads, hess):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        weight = weights[i] if weights.size else 1.0
        grads[i] = np.sign(scores[i] - y[i]) * weight
        hess[i] = weight


@compiled
def poisson(y, scores, weights, grads, hess, caution):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        weight = weights[i] if weights.size else 1.0
        mean = math.exp(scores[i])
        grads[i] = (mean - y[i]) * weight
        hess[i] = mean * caution * weight


@compiled
def binary(y, scores, weights, grads, hess):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        weight = weights[i] if weights.size else 1.0
        p = 1.0 / (1.0 + math.exp(-scores[i]))
        grads[i] = (p - y[i]) * weight
        hess[i] = p * (1.0 - p) * weight


@compiled
def softmax(y, scores, weights, grads, hess):  # type: ignore[no-untyped-def]
    """scores (rows, classes); grads and hess (classes, rows), so that the tree of a class reads one array."""
    classes = scores.shape[1]
    factor = classes / (classes - 1.0)
    for i in range(y.size):
        weight = weights[i] if weights.size else 1.0
        top = scores[i].max()
        total = 0.0
        for k in range(classes):
            total += math.exp(scores[i, k] - top)
        for k in range(classes):
            p = math.exp(scores[i, k] - top) / total
            grads[k, i] = (p - (1.0 if y[i] == k else 0.0)) * weight
            hess[k, i] = factor * p * (1.0 - p) * weight


@compiled
def quantile(y, scores, weights, grads, hess, share):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        weight = weights[i] if weights.size else 1.0
        grads[i] = (1.0 - share if scores[i] >= y[i] else -share) * weight
        hess[i] = weight


@compiled
def huber(y, scores, weights, grads, hess, limit):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        weight = weights[i] if weights.size else 1.0
        error = scores[i] - y[i]
        grads[i] = (error if abs(error) <= limit else math.copysign(limit, error)) * weight
        hess[i] = weight


@compiled
def gamma(y, scores, weights, grads, hess):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        weight = weights[i] if weights.size else 1.0
        ratio = y[i] * math.exp(-scores[i])
        grads[i] = (1.0 - ratio) * weight
        hess[i] = ratio * weight


@compiled
def tweedie(y, scores, weights, grads, hess, power):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        weight = weights[i] if weights.size else 1.0
        first, second = y[i] * math.exp((1.0 - power) * scores[i]), math.exp((2.0 - power) * scores[i])
        grads[i] = (second - first) * weight
        hess[i] = ((2.0 - power) * second - (1.0 - power) * first) * weight
