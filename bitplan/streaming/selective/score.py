"""How sensitive a block is to low precision: a score from gradients, and one in units of loss.

`scoring="gradient"` weighs two shares, each cut off at 1:

    sensitivity = grad_weight * min(relative_magnitude / grad_sensitivity_threshold, 1)
                + error_weight * min(quant_error / quant_error_threshold, 1)            cut to [0, 1]

Without calibration no such score exceeds 0.7, and since it is relative it does not bound the total damage.
`scoring="impact"` does: the damage of a unit (a block or a layer) is the mean over the window of |<dL/dy, (W - W_hat)
x>|, the first-order change of the loss if W_hat stood in for W. Absolute values are summed, so the sum over all low
units bounds their common effect; rounding errors often cancel, so it is an upper bound and not an expectation.

A missing or non-finite gradient does not count as small. Its block has no score: `excluded` names it and says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bitplan.streaming.selective.config import SelectiveError, SelectivePrecisionConfig

Exclusion = Literal["missing", "non_finite", "all_zero"]
EXCLUSIONS: tuple[Exclusion, ...] = ("missing", "non_finite", "all_zero")


@dataclass(frozen=True)
class BlockGradStats:
    """One block's gradient in one step, or averaged over several. `variance` is the population's."""

    block_id: str
    l2_norm: float
    max_abs: float
    variance: float
    relative_magnitude: float

    def __post_init__(self) -> None:
        for key in ("l2_norm", "max_abs", "variance", "relative_magnitude"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise SelectiveError(
                    f"gradient statistics of {self.block_id!r}: {key} must be a finite number from 0, got {value!r}; "
                    "leave the block out of this step's statistics instead"
                )


class RawGradStats(NamedTuple):
    """The result of one pass over a block's gradients, before the blocks are compared."""

    l2_norm: float
    max_abs: float
    variance: float


@dataclass(frozen=True)
class StepStats:
    """All blocks in one step: those with statistics, and those without, with the reason.

    `impacts`, for `scoring="impact"`: unit -> precision -> <dL/dy, (W - W_hat) x>, signed, as measured, and finite: a
    unit with a non-finite impact is `excluded`.
    """

    step_id: int
    stats: Mapping[str, BlockGradStats]
    excluded: Mapping[str, Exclusion]
    impacts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, row in self.impacts.items():
            if not all(map(math.isfinite, row.values())):
                raise SelectiveError(
                    f"step {self.step_id}: the impacts of {name!r} must be finite, got {dict(row)}; "
                    "leave out what is not and name the unit in `excluded` (compare_blocks does)"
                )


def compare_blocks(
    step_id: int,
    raw: Mapping[str, RawGradStats | None],
    impacts: Mapping[str, Mapping[str, float]] | None = None,
) -> StepStats:
    """Relative magnitudes: each L2 norm over the mean of all blocks that have one; None is a missing gradient.

    If every gradient is exactly zero (a skipped step, a masked batch) blocks cannot be compared: all are excluded.
    """
    excluded: dict[str, Exclusion] = {}
    usable: dict[str, RawGradStats] = {}
    for name, row in raw.items():
        if row is None:
            excluded[name] = "missing"
        elif not all(map(math.isfinite, row)):
            excluded[name] = "non_finite"
        else:
            usable[name] = row
    mean = mean_of(row.l2_norm for row in usable.values()) if usable else 0.0
    if mean == 0:
        excluded |= dict.fromkeys(usable, "all_zero")
        usable = {}
    stats = {name: BlockGradStats(name, *row, row.l2_norm / mean) for name, row in usable.items()}
    finite: dict[str, dict[str, float]] = {}
    for name, impact in (impacts or {}).items():
        finite[name] = {key: value for key, value in impact.items() if math.isfinite(value)}
        if len(finite[name]) < len(impact):
            excluded.setdefault(name, "non_finite")
    return StepStats(step_id, stats, excluded, finite)


def average_stats(history: Sequence[StepStats]) -> dict[str, BlockGradStats]:
    """Each block's mean over the steps in which it has statistics; a block without any is not in the result."""
    rows: dict[str, list[BlockGradStats]] = {}
    for step in history:
        for name, stats in step.stats.items():
            rows.setdefault(name, []).append(stats)
    return {name: _mean(name, window) for name, window in rows.items()}


def _mean(name: str, rows: Sequence[BlockGradStats]) -> BlockGradStats:
    def of(key: str) -> float:
        return mean_of(getattr(row, key) for row in rows)

    return BlockGradStats(name, of("l2_norm"), of("max_abs"), of("variance"), of("relative_magnitude"))


def mean_of(values: Iterable[float]) -> float:
    """The mean, the same for any order of the values."""
    items = list(values)
    try:
        return math.fsum(items) / len(items)
    except OverflowError:  # the sum exceeds float64; the mean does not
        return math.fsum(value / len(items) for value in items)


def compute_sensitivity_score(
    stats: BlockGradStats, quant_error: float | None, config: SelectivePrecisionConfig
) -> float:
    """A score in [0, 1]: 0 is safe to quantize, 1 is keep bf16. Without a calibration error, that term is 0."""
    grad_score = min(stats.relative_magnitude / config.grad_sensitivity_threshold, 1.0)
    error_score = 0.0
    if quant_error is not None:
        if not (math.isfinite(quant_error) and quant_error >= 0):
            raise SelectiveError(
                f"calibration error of {stats.block_id!r} must be a finite number from 0, got {quant_error!r}; "
                "calibrate again, or leave it out"
            )
        error_score = min(quant_error / config.quant_error_threshold, 1.0)
    return max(0.0, min(config.grad_weight * grad_score + config.error_weight * error_score, 1.0))


def estimate_damage(impacts: Sequence[float]) -> float | None:
    """The mean of |<dL/dy, (W - W_hat) x>| over the window, in units of loss; non-finite values are left out.

    None if no value is left: unknown is not zero.
    """
    usable = [abs(impact) for impact in impacts if math.isfinite(impact)]
    return mean_of(usable) if usable else None
