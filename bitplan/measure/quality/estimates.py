"""A mean with an honest standard error, when samples come in clusters.

Tokens of one window of text share its subject, so their losses move together: a standard error that treats each token
as an independent sample is too small. Here a window is one sample, whatever its length (the ratio estimator of survey
sampling), and with few windows Student's distribution is used, not the normal one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_Z = 1.959963984540054  # 97.5% of the normal distribution
_T_975 = (12.706204736432095, 4.302652729696142)  # one and two degrees of freedom, where the series below is poor


@dataclass(frozen=True)
class Estimate:
    """A mean over all samples; `standard_error` is None for a single cluster, which does not show it."""

    mean: float
    standard_error: float | None
    clusters: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% confidence interval."""
        if self.standard_error is None:
            return None
        half = student_t_975(self.clusters - 1) * self.standard_error
        return self.mean - half, self.mean + half

    def to_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "standard_error": self.standard_error}


def clustered_mean(sums: Sequence[float], counts: Sequence[int]) -> Estimate:
    """The mean of samples, from the sum and the number of samples of each cluster."""
    clusters, total = len(sums), sum(counts)
    mean = math.fsum(sums) / total
    if clusters < 2:
        return Estimate(mean, None, clusters)
    squares = math.fsum((part - count * mean) ** 2 for part, count in zip(sums, counts, strict=True))
    return Estimate(mean, math.sqrt(squares * clusters / (clusters - 1)) / total, clusters)


def student_t_975(freedom: int) -> float:
    """How many standard errors a 95% interval reaches to each side, by the Cornish-Fisher series (within 0.2%)."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z, n = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )
