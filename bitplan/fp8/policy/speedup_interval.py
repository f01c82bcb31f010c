"""Decides whether FP8 is faster: win, lose or undecided, by an interval for the speedup, from raw times.

A time on a GPU is the work plus noise that only ever adds, so means mislead and single samples mislead more. There are
two ways to an interval; neither assumes a distribution of the noise, draws random numbers, or reads a clock:

    pairs      BF16 and FP8 were timed in turns, so that a GPU that gets warmer slows both. Each turn gives one ratio
               BF16 / FP8. Sorted, the true median ratio lies between the k-th from below and the k-th from above unless
               chance put fewer than k ratios on one side of it, and coin flips say how likely that is (the sign test).
    crossed    too few turns for that (five, LoongForge's default), or not taken in turns: every BF16 time is
               divided by every FP8 time, and of the sorted ratios as many are cut off at both ends as a rank test (Mann
               and Whitney's) at the same confidence allows. Drift of the GPU stays in, and widens the interval.

The reported speedup is the median of the same ratios. At 95% "pairs" needs 6 turns, "crossed" 4 times of each.
The whole interval at or above the threshold: win. All of it below: lose. Otherwise: undecided, which means BF16.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bitplan.fp8.policy.vocabulary import LOSE, UNDECIDED, WIN, Fp8Error

DEFAULT_CONFIDENCE = 0.95
_EXACT_UP_TO = 40  # samples of both together: above this the normal approximation of the rank test is exact enough


@dataclass(frozen=True)
class Interval:
    """How many times faster FP8 is: the median, and the interval for the given confidence."""

    speedup: float
    low: float
    high: float
    method: str

    def answer(self, threshold: float) -> str:
        return answer_of(self.low, self.high, threshold)


def answer_of(low: float, high: float, threshold: float) -> str:
    """Win, lose or undecided. The threshold is the least speedup that counts, so an interval that begins on it wins."""
    if low >= threshold:
        return WIN
    return LOSE if high < threshold else UNDECIDED


def speedup_interval(
    bf16_ms: Sequence[float], fp8_ms: Sequence[float], *, in_turns: bool, confidence: float = DEFAULT_CONFIDENCE
) -> Interval | None:
    """The interval of BF16 time over FP8 time; None where there are too few samples for this confidence."""
    for times in (bf16_ms, fp8_ms):
        if not times or not all(0 < time < math.inf for time in times):
            raise Fp8Error(f"times must be numbers above 0, got {list(times)[:5]}")
    check_confidence(confidence)
    if in_turns and len(bf16_ms) == len(fp8_ms):
        cut = sign_test_cut(len(bf16_ms), confidence)
        if cut is not None:
            ratios = sorted(slow / fast for slow, fast in zip(bf16_ms, fp8_ms, strict=True))
            return Interval(statistics.median(ratios), ratios[cut], ratios[-1 - cut], "pairs")
    cut = rank_test_cut(len(bf16_ms), len(fp8_ms), confidence)
    if cut is None:
        return None
    ratios = sorted(slow / fast for slow in bf16_ms for fast in fp8_ms)
    return Interval(statistics.median(ratios), ratios[cut], ratios[-1 - cut], "crossed")


def check_confidence(confidence: float) -> None:
    if not 0.5 <= confidence < 1:
        raise Fp8Error(f"the confidence must be from 0.5 up to, and not with, 1, got {confidence!r}")


def sign_test_cut(pairs: int, confidence: float) -> int | None:
    """How many ratios are cut off at each end so that 1 - 2 P(Binomial(pairs, 1/2) <= cut) is still the coverage."""
    below, cut = 0, None
    for index in range(pairs // 2):
        below += math.comb(pairs, index)
        if 2 * below > (1 - confidence) * 2**pairs:
            break
        cut = index
    return cut


def rank_test_cut(first: int, second: int, confidence: float) -> int | None:
    """How many of the first x second ratios are cut off at each end: P(U <= cut) is at most (1 - confidence) / 2."""
    tail = (1 - confidence) / 2
    if first + second > _EXACT_UP_TO:
        spread = math.sqrt(first * second * (first + second + 1) / 12)
        cut = math.floor(first * second / 2 - 0.5 - statistics.NormalDist().inv_cdf(1 - tail) * spread)
        return cut if cut >= 0 else None
    counts = _rank_counts(first, second)
    below, largest = 0, None
    for index in range(first * second // 2):
        below += counts[index]
        if below > tail * math.comb(first + second, first):
            break
        largest = index
    return largest


@lru_cache(maxsize=256)
def _rank_counts(first: int, second: int) -> tuple[int, ...]:
    """How many orders of first + second samples give the rank statistic U = 0, 1, 2, ...: a Gaussian binomial."""
    counts = [1] + [0] * (first * second)
    for size in range(1, first + 1):
        for index in range(first * second, second + size - 1, -1):  # times 1 - q^(second + size)
            counts[index] -= counts[index - second - size]
        for index in range(size, first * second + 1):  # divided by 1 - q^size
            counts[index] += counts[index - size]
    return tuple(counts)
