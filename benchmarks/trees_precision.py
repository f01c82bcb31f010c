"""Held-out losses of quantized gradients beside float32, for targets that are hard to quantize.

    python benchmarks/trees_precision.py              # two minutes of one core

Six kinds of targets, five tables of each: a target of 10,000 among numbers of spread 2; lognormal ones of sigma 2;
gamma; Tweedie; a class of one row in 300; weights over 24 decades. Settings are the estimators' own. How much a loss
moves without cause is seen in `f32_other`: the same fit with 254 bins instead of 255.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor

Array = np.ndarray[Any, Any]
ROWS, TEST_ROWS, FEATURES = 8000, 8000, 8
SEEDS = range(5)
VARIANTS: dict[str, dict[str, Any]] = {
    "f32": {},
    "f32_other": {"max_bins": 254},
    "i16": {"gradient_precision": "i16"},
    "i8": {"gradient_precision": "i8"},
    "i16_nearest": {"gradient_precision": "i16", "stochastic_rounding": False},
    "i16_not_renewed": {"gradient_precision": "i16", "renew_leaves": False},
}


def table(seed: int) -> tuple[np.random.Generator, Array, Array]:
    """Features, and a signal of spread 1.2 or so that trees can learn."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS + TEST_ROWS, FEATURES))
    return rng, x, np.asarray(0.8 * x[:, 0] + 0.6 * x[:, 1] * x[:, 2] + 0.5 * np.sin(3 * x[:, 3]))


def outlier(seed: int, settings: dict[str, Any]) -> float:
    rng, x, signal = table(seed)
    y = 2 * signal + rng.standard_normal(len(x))
    y[seed] = 1e4
    model = BoostedTreesRegressor(**settings).fit(x[:ROWS], y[:ROWS])
    return float(np.median(np.abs(model.predict(x[ROWS:]) - 2 * signal[ROWS:])))  # some rows share the outlier's leaves


def heavy_tail(seed: int, settings: dict[str, Any]) -> float:
    rng, x, signal = table(seed)
    y = np.exp(signal + 2 * rng.standard_normal(len(x)))
    model = BoostedTreesRegressor(**settings).fit(x[:ROWS], y[:ROWS])
    return float(np.abs(model.predict(x[ROWS:]) - np.exp(signal[ROWS:] + 2)).mean())  # from the real mean


def gamma(seed: int, settings: dict[str, Any]) -> float:
    rng, x, signal = table(seed)
    y = rng.gamma(1.0, np.exp(signal))
    predicted = BoostedTreesRegressor(objective="gamma", **settings).fit(x[:ROWS], y[:ROWS]).predict(x[ROWS:])
    return float(2 * np.mean(np.log(predicted / y[ROWS:]) + y[ROWS:] / predicted - 1))


def tweedie(seed: int, settings: dict[str, Any]) -> float:
    rng, x, signal = table(seed)
    y = rng.gamma(0.7, np.exp(signal)) * (rng.random(len(x)) < 0.3)
    predicted = BoostedTreesRegressor(objective="tweedie", **settings).fit(x[:ROWS], y[:ROWS]).predict(x[ROWS:])
    return float(np.mean(predicted**0.5 / 0.5 + y[ROWS:] * predicted**-0.5 / 0.5))  # of power 1.5


def rare_class(seed: int, settings: dict[str, Any]) -> float:
    rng, x, signal = table(seed)
    y = rng.random(len(x)) < 1 / (1 + np.exp(7.0 - 1.5 * signal))
    proba = BoostedTreesClassifier(**settings).fit(x[:ROWS], y[:ROWS]).predict_proba(x[ROWS:])
    return float(-np.log(np.maximum(np.where(y[ROWS:], proba[:, 1], proba[:, 0]), 1e-15)).mean())


def wide_weights(seed: int, settings: dict[str, Any]) -> float:
    """Of all rows alike: what was learned from the heavy ones holds for all."""
    rng, x, signal = table(seed)
    y, weights = 2 * signal + rng.standard_normal(len(x)), 10.0 ** rng.uniform(-12, 12, len(x))
    model = BoostedTreesRegressor(**settings).fit(x[:ROWS], y[:ROWS], sample_weight=weights[:ROWS])
    return float(np.mean((y[ROWS:] - model.predict(x[ROWS:])) ** 2))


TARGETS: dict[str, Callable[[int, dict[str, Any]], float]] = {
    "outlier": outlier,
    "heavy tail": heavy_tail,
    "gamma": gamma,
    "tweedie": tweedie,
    "rare class": rare_class,
    "wide weights": wide_weights,
}


def measure(name: str, seeds: range = SEEDS, trees: int = 100) -> dict[str, Any]:
    """Losses of every variant by seed, and of each what it has more than f32, on average over the tables."""
    losses = {
        variant: [TARGETS[name](seed, {"n_estimators": trees, "n_jobs": 1, **settings}) for seed in seeds]
        for variant, settings in VARIANTS.items()
    }
    ratios = {variant: [a / b for a, b in zip(of, losses["f32"], strict=True)] for variant, of in losses.items()}
    more = {variant: statistics.fmean(of) - 1 for variant, of in ratios.items()}
    spread = statistics.stdev(ratios["f32_other"]) if len(seeds) > 1 else 0.0
    return {"target": name, "losses": losses, "more_than_f32": more, "spread_without_cause": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.targets.split(","):
        rows.append(measure(name))
        print(
            f"{name:13}", {variant: f"{more:+.1%}" for variant, more in rows[-1]["more_than_f32"].items()}, flush=True
        )
        for variant, losses in rows[-1]["losses"].items():
            print(f"  {variant:16}", " ".join(f"{loss:.4g}" for loss in losses))
    import harness  # beside this file

    document: dict[str, Any] = {"benchmark": "trees_precision", "machine": harness.machine("cpu")}
    document |= {"versions": harness.versions(), "commit": harness.commit(), "targets": rows}
    print(harness.save("trees_precision", document, given.output))


if __name__ == "__main__":
    main()
