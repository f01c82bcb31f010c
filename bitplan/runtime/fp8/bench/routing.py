"""How many tokens each expert of a GPU gets, for a benchmark: evenly, or as a router that has favourites sends them.

    uniform    every expert the same, but for the remainder: what the balancing losses of training aim at
    zipf       the r-th busiest expert gets a share in proportion to 1 / r: a few experts do most of the work and many
               get less than a kernel's block. It is the normal case, and where padding costs most

Both give every token away and no random number is drawn, so that a report can be repeated. The busiest experts are not
neighbours: the order of experts in a checkpoint says nothing about how busy they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bitplan.plan.fp8.report import ROUTINGS
from bitplan.plan.fp8.kinds import Fp8Error, is_count


def route_tokens(tokens: int, experts: int, routing: str) -> tuple[int, ...]:
    """Tokens of each expert; they add up to `tokens`."""
    if not (is_count(tokens) and is_count(experts)):
        raise Fp8Error(f"tokens and experts must be integers from 1, got {tokens!r} and {experts!r}")
    if routing not in ROUTINGS:
        raise Fp8Error(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    shares = [1.0] * experts if routing == "uniform" else [1 / (rank + 1) for rank in _ranks(experts)]
    return _whole(tokens, shares)


def _ranks(experts: int) -> list[int]:
    """A fixed shuffle: steps of about 0.618 of the count, the nearest that shares no factor with it."""
    step = next(each for each in range(max(1, round(experts * 0.618)), 2 * experts + 1) if math.gcd(each, experts) == 1)
    return [index * step % experts for index in range(experts)]


def _whole(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to the shares that add up to the total: the largest remainders are rounded up."""
    exact = [total * share / math.fsum(shares) for share in shares]
    counts = [math.floor(each) for each in exact]
    order = sorted(range(len(shares)), key=lambda index: (counts[index] - exact[index], index))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return tuple(counts)
