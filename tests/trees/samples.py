"""Data and settings that several tests of trees use."""

from __future__ import annotations

import numpy as np

from bitplan.trees.binning import bin_rows, find_bins
from bitplan.trees.grow import GrowthRules


def table(rows=400, features=5, seed=0, missing=0.0, dtype=np.float64):
    """Features with a few repeated numbers, and a target that depends on them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, features)).round(1).astype(dtype)
    y = x[:, 0] - 0.5 * x[:, 1 % features] * (x[:, 2 % features] > 0) + 0.3 * rng.standard_normal(rows)
    x[rng.random(x.shape) < missing] = np.nan
    return x, y


def rules(features=5, **changes):
    settings = {
        "max_leaves": 15,
        "max_depth": 0,
        "best_first": True,
        "l1": 0.0,
        "l2": 0.0,
        "min_child_weight": 1e-3,
        "min_child_rows": 5,
        "min_gain": 0.0,
        "monotone": np.zeros(features, np.int64),
    }
    return GrowthRules(**(settings | changes))


def binned(x, categorical=()):
    is_category = np.isin(np.arange(x.shape[1]), categorical)
    bins = find_bins(x, is_category, 255, 0)
    return bin_rows(x, bins), bins
