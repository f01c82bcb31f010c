"""Compiled loops that compute gradients, look for the largest, and sum those of leaves.

LambdaRank's gradients, query by query, as LightGBM computes them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.core import types

from bitplan.base.loops.atomics import fetch_add
from bitplan.base.loops.vectors import define, same_bits
from bitplan.trees.loops.compiling import compiled, inlined, prefetch
from bitplan.trees.loops.rows import first_of

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


@inlined
def _hashed(value, constant):  # type: ignore[no-untyped-def]
    word = (value * constant) & U(0xFFFFFFFF)
    return word ^ (word >> U(16))


@compiled
def draw_keys(seed, number, output, keys):  # type: ignore[no-untyped-def]
    """What `numpy.random.SeedSequence([seed, number, output]).generate_state` gives, in a tenth of its time."""
    pool, mask = np.zeros(4, np.uint64), U(0xFFFFFFFF)
    pool[0], pool[1], pool[2] = U(seed), U(number), U(output)
    constant = U(0x43B0D7E5)
    for i in range(4):
        before, constant = constant, (constant * U(0x931E8875)) & mask
        pool[i] = _hashed(pool[i] ^ before, constant)
    for source in range(4):
        for to in range(4):
            if source != to:
                before, constant = constant, (constant * U(0x931E8875)) & mask
                word = (U(0xCA01F9DD) * pool[to] - U(0x4973F715) * _hashed(pool[source] ^ before, constant)) & mask
                pool[to] = word ^ (word >> U(16))
    constant = U(0x8B51F9DD)
    for i in range(2 * keys.size):
        before, constant = constant, (constant * U(0x58F38DED)) & mask
        half = _hashed(pool[i & 3] ^ before, constant)
        keys[i >> 1] = keys[i >> 1] | (half << U(32)) if i & 1 else half


AHEAD = 16  # rows


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
def count_beyond(grads, hess, first, piece, grad_limit, hess_limit, counts):  # type: ignore[no-untyped-def]
    """Into the piece's row of `counts` how many |gradients| and hessians are beyond limits; all are bits of float32."""
    many, heavy = np.int64(0), np.int64(0)
    for i in range(grads.size):
        many += np.int64((grads[i] & np.int32(0x7FFFFFFF)) > grad_limit)
        heavy += np.int64((hess[i] & np.int32(0x7FFFFFFF)) > hess_limit)
    at = first // piece
    counts[at, 0], counts[at, 1] = many, heavy


@inlined
def _count_above(numbers, bound):  # type: ignore[no-untyped-def]
    count, limit = np.int64(0), np.float32(bound)
    for i in range(numbers.size):
        count += np.int64(abs(numbers[U(i)]) > limit)
    return count


@compiled
def find_scale(numbers, top, end, most, fewest, far, few, ordered, scale):  # type: ignore[no-untyped-def]
    """`trees.gradients.far_scale` of float32 numbers that lie in one place; `ordered` has room for `few` of them."""
    scale[0], bound = top / end, top / 4.0
    if few == 0 or not top > fewest or _count_above(numbers, bound) > few:
        return
    while bound / end > top / most and _count_above(numbers, bound / 4.0) <= few:
        bound /= 4.0
    limit, held = np.float32(bound), np.int64(0)
    for i in range(numbers.size):
        size = abs(numbers[U(i)])
        if size > limit:
            place = held
            while place > 0 and ordered[U(place - 1)] < size:
                ordered[U(place)] = ordered[U(place - 1)]
                place -= 1
            ordered[U(place)] = size
            held += 1
    best = bound / end if bound / end > top / most else top / most
    total = 0.0
    for rank in range(held):
        total += np.float64(ordered[U(rank)])
        least = total / (far + (end - 1) * (rank + 1))
        best = least if least > best else best
    scale[0] = best


@compiled
def sum_leaves(rows, first, last, ends, leaves, grads, hess, per_grad, per_hess, sums):  # type: ignore[no-untyped-def]
    """Add float32 gradients and hessians of rows first..last to the sums (gradient, hessian) of their leaves, as
    multiples of units: no order of rows matters. See `rows.add_leaves`; `leaves` are the runs' leaves."""
    start = np.int64(0)
    for run in range(ends.size):
        begin, end = first_of(rows, start, ends[run], first), first_of(rows, start, ends[run], last)
        grad, weight, start = np.int64(0), np.int64(0), ends[run]
        for i in range(begin, end):
            ahead = rows[U(i + AHEAD if i + AHEAD < end else i)]
            prefetch(grads, np.int64(ahead))
            prefetch(hess, np.int64(ahead))
            row = U(rows[U(i)])
            grad += np.int64(np.rint(np.float64(grads[row]) * per_grad))
            weight += np.int64(np.rint(np.float64(hess[row]) * per_hess))
        if begin < end:
            fetch_add(sums, 2 * leaves[run], grad)
            fetch_add(sums, 2 * leaves[run] + 1, weight)


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


# ---- exponentials ----------------------------------------------------------------------------------------------------


def _powers_of_two() -> tuple[Any, Any]:
    """Bits of 2^(k / 128) as float64, less k in the exponent's place; what is left beside each, as a share of it."""
    one, bits, left = 1 << 192, np.empty(128, np.uint64), np.empty(128)
    root, power = 2 * one, one
    for _ in range(7):
        root = math.isqrt(root * one)
    for k in range(128):
        number = power / one  # Python divides integers exactly, then rounds
        exact = int(number * 2.0**52) << 140
        bits[k] = int(np.float64(number).view(np.uint64)) - (k << 45) & 2**64 - 1
        left[k] = (power - exact) / exact
        power = power * root // one
    return bits, left


POWERS, LEFT = _powers_of_two()
PER_LOG, LOG_HIGH, LOG_LOW = map(
    float.fromhex, ("0x1.71547652b82fep+7", "-0x1.62e42fefa0000p-8", "-0x1.cf79abc9e3b3ap-47")
)
EXP_2, EXP_3, EXP_4, EXP_5 = map(
    float.fromhex,
    ("0x1.ffffffffffdbdp-2", "0x1.555555555543cp-3", "0x1.55555cf172b91p-5", "0x1.1111167a4d017p-7"),
)
TO_WHOLE = 1.5 * 2.0**52  # added to a number it rounds to a whole one, which is then in the lower bits
NEAR = 500.0
_fused = define(
    3,
    lambda *_: types.float64,
    lambda writer, a, b, c: writer.call("llvm.fma.f64", writer.llvm(types.float64), [a, b, c]),
)


@inlined
def _exp(x, is_near):  # type: ignore[no-untyped-def]
    """exp(x), of numbers up to NEAR without a call, so that the compiler makes vectors of it, and on every system the
    same: to the bit what glibc's exp gives where it uses fused multiplications, for this is its algorithm."""
    if not is_near:
        return math.exp(x)
    shifted = _fused(PER_LOG, x, TO_WHOLE)
    whole, part = same_bits(shifted, np.uint64), shifted - TO_WHOLE
    rest = _fused(part, LOG_LOW, _fused(part, LOG_HIGH, x))
    square, at = rest * rest, whole & U(127)
    scale = same_bits(POWERS[at] + (whole << U(45)), np.float64)
    series = _fused(square, _fused(rest, EXP_3, EXP_2), LEFT[at] + rest)
    return _fused(scale, _fused(square * square, _fused(rest, EXP_5, EXP_4), series), scale)


@inlined
def _count_far(scores, limit):  # type: ignore[no-untyped-def]
    """How many are beyond the limit, or no numbers."""
    count = np.int64(0)
    for i in range(scores.size):
        count += np.int64(not abs(scores[U(i)]) <= limit)
    return count


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
    if _count_far(scores, NEAR) == 0:
        _binary(y, scores, weights, grads, hess, True)
    else:
        _binary(y, scores, weights, grads, hess, False)


@inlined
def _binary(y, scores, weights, grads, hess, is_near):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        weight = weights[U(i)] if weights.size else 1.0
        p = 1.0 / (1.0 + _exp(-scores[U(i)], is_near))
        grads[U(i)] = (p - y[U(i)]) * weight
        hess[U(i)] = p * (1.0 - p) * weight


@compiled
def softmax(y, scores, weights, grads, hess):  # type: ignore[no-untyped-def]
    """scores, grads and hess (classes, rows), so that the tree of a class reads one array."""
    classes = scores.shape[0]
    factor, far = classes / (classes - 1.0), np.int64(0)
    for k in range(classes):
        far += _count_far(scores[k], NEAR / 2)
    for i in range(y.size):
        weight = weights[i] if weights.size else 1.0
        top, total = -np.inf, 0.0
        for k in range(classes):
            top = scores[k, i] if scores[k, i] > top else top
        for k in range(classes):
            total += _exp(scores[k, i] - top, far == 0)
        for k in range(classes):
            p = _exp(scores[k, i] - top, far == 0) / total
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
