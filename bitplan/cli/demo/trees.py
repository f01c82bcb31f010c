"""The demo's fifth part: boosted trees on a synthetic table, with gradients in float32 and in 16-bit integers.

Fits of the two are timed in turns; compiling, which only the first run of an install needs, is timed apart on a few
rows.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from bitplan.cli.demo.training import Advance
from bitplan.trees import BoostedTreesClassifier, GradientPrecision
from bitplan.trees.gradients import Array, prepare

PRECISIONS = ("f32", "i16")
FEATURES = 16
WARM_ROWS, WARM_TREES = 2000, 2


def made_table(rows: int, seed: int) -> tuple[Array, Array]:
    """Numbers of several distributions, and a class that depends on products and bands of them; a tenth is noise."""
    rng = np.random.default_rng([seed, FEATURES])
    x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
    x[:, 4:8] = np.exp(0.5 * x[:, 4:8])
    x[:, 8:10] = np.round(2 * x[:, 8:10])
    product: Array = x[:, 0] * x[:, 1]
    wave: Array = np.cos(2 * x[:, 3])
    band: Array = 0.5 * (x[:, 8] > 1)
    score: Array = product + np.abs(x[:, 2])
    score = score - x[:, 4] + band
    score = score - wave * x[:, 5]
    y = score + 0.5 * rng.standard_normal(rows) > np.median(score)
    return x, np.where(rng.random(rows) < 0.1, ~y, y).astype(np.float64)


def boost_twice(rows: int, trees: int, repeats: int, seed: int, advance: Advance) -> list[dict[str, Any]]:
    """One row of figures for each precision; a quarter as many rows again are held out for the AUC."""
    from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

    x, y = made_table(rows + rows // 4, seed)
    compile_s = {}
    for precision in PRECISIONS:
        advance(0, f"compiling {precision}, the first time only")
        started = time.perf_counter()
        _fit(x[:WARM_ROWS], y[:WARM_ROWS], precision, WARM_TREES, seed).decision_function(x[:100])
        compile_s[precision] = time.perf_counter() - started
        advance(1, f"compiled {precision}")
    times: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    models = {}
    for _ in range(repeats):
        for precision in PRECISIONS:
            started = time.perf_counter()
            models[precision] = _fit(x[:rows], y[:rows], precision, trees, seed)
            times[precision].append(time.perf_counter() - started)
            advance(1, f"{trees} trees in {precision}")
    return [
        {
            "contender": f"bitplan_{precision}",
            "rows": rows,
            "features": FEATURES,
            "trees": trees,
            "seed": seed,
            "train_s": statistics.median(times[precision]),
            "train_s_samples": times[precision],
            "compile_s": compile_s[precision],
            "auc": float(roc_auc_score(y[rows:], models[precision].decision_function(x[rows:]))),
            "gradient_bytes_a_row": _gradient_bytes(precision),
        }
        for precision in PRECISIONS
    ]


def count_fits(repeats: int) -> int:
    """How often `boost_twice` advances."""
    return len(PRECISIONS) * (1 + repeats)


def _fit(x: Array, y: Array, precision: str, trees: int, seed: int) -> BoostedTreesClassifier:
    return BoostedTreesClassifier(n_estimators=trees, gradient_precision=precision, random_state=seed).fit(x, y)


def _gradient_bytes(precision: str) -> float:
    """Bytes of a row's gradients, counted on the arrays of a round."""
    held = prepare(np.ones(1000, np.float32), np.ones(1000, np.float32), GradientPrecision(precision), 1)
    return (held.grads.nbytes + held.hessians.nbytes) / 1000
