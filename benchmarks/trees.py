"""Boosted trees against LightGBM and scikit-learn: training time, AUC, peak memory, prediction, one process a run.

    python benchmarks/trees.py --rows 100000 1000000 --trees 100 --seeds 0 1 2

The table is made here: 28 features as HIGGS has them (21 that a detector would see, 7 computed from them), two
classes that overlap. Every contender runs in a process of its own, in turns, on the same number of threads, binning
included; loading or compiling code is timed apart (`warm_up_s`), on 2000 other rows. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FEATURES = 28
CONTENDERS = ("bitplan_f32", "bitplan_i16", "bitplan_i8", "lightgbm_f32", "lightgbm_quantized", "sklearn_hgb")
TEST_ROWS = 100_000
Array = np.ndarray[Any, Any]


def higgs_like(rows: int, seed: int) -> tuple[Array, Array]:
    """float32 features and labels; the same numbers for the same seed."""
    rng = np.random.default_rng([seed, 28])
    y = rng.random(rows) < 0.53
    x = np.empty((rows, FEATURES), np.float32)
    for particle in range(7):  # momentum, direction, angle of each
        x[:, 3 * particle] = rng.lognormal(0.0, 0.45, rows) * (1 + 0.05 * particle * y)
        x[:, 3 * particle + 1] = rng.standard_normal(rows)
        x[:, 3 * particle + 2] = rng.uniform(-np.pi, np.pi, rows)
    x[:, 8] = rng.choice(np.array([0.0, 1.09, 2.17], np.float32), rows, p=[0.5, 0.1, 0.4])  # a tag, as HIGGS has
    for place in range(7):  # masses of pairs, which is where the classes differ
        a, b = 3 * place, 3 * ((place + 2) % 7)
        mass = np.sqrt(2 * x[:, a] * x[:, b] * (np.cosh(x[:, a + 1] - x[:, b + 1]) - np.cos(x[:, a + 2] - x[:, b + 2])))
        peak = np.where(y, 0.9 + 0.03 * place, 1.1)
        x[:, 21 + place] = np.sqrt(mass + 0.1) * rng.normal(peak, 0.42, rows)
    return x, y.astype(np.float64)


# ---- one contender, in a process of its own --------------------------------------------------------------------------


def run_one(name: str, rows: int, trees: int, leaves: int, seed: int, threads: int) -> dict[str, Any]:
    from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

    fit = _contender(name, trees, leaves, seed, threads)
    warm = time.perf_counter()
    small = higgs_like(2000, seed + 1000)
    fit(*small)[1](small[0])
    warm = time.perf_counter() - warm
    x, y = higgs_like(rows + TEST_ROWS, seed)
    train_x, train_y, test_x, test_y = x[:rows].copy(), y[:rows], x[rows:].copy(), y[rows:]
    del x
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, used = time.perf_counter(), time.process_time()
    binning, predict = fit(train_x, train_y)
    trained, used = time.perf_counter() - started, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    scores = predict(test_x)
    predicted = time.perf_counter() - started
    if name.startswith("bitplan"):
        binning = _bitplan_binning_s(train_x, seed)
    return {
        "contender": name,
        "rows": rows,
        "seed": seed,
        "train_s": trained,
        "train_cpu_s": used,
        "binning_s": binning,
        "warm_up_s": warm,
        "auc": float(roc_auc_score(test_y, scores)),
        "predict_us_per_row": predicted / TEST_ROWS * 1e6,
        "peak_mib": peak / 1024,
        "peak_over_data_mib": (peak - before) / 1024,
    }


Fit = Callable[[Array, Array], tuple[float | None, Callable[[Array], Array]]]


def _contender(name: str, trees: int, leaves: int, seed: int, threads: int) -> Fit:
    kind, _, variant = name.partition("_")
    if kind == "bitplan":
        return _bitplan(variant, trees, leaves, seed, threads)
    return _lightgbm(variant, trees, leaves, seed, threads) if kind == "lightgbm" else _sklearn(trees, leaves, seed)


def _bitplan(precision: str, trees: int, leaves: int, seed: int, threads: int) -> Fit:
    import torch

    from bitplan.trees import BoostedTreesClassifier

    torch.set_num_threads(threads)

    def fit(x: Array, y: Array) -> tuple[float | None, Callable[[Array], Array]]:
        model = BoostedTreesClassifier(
            n_estimators=trees, max_leaves=leaves, gradient_precision=precision, random_state=seed
        ).fit(x, y)
        return None, lambda rows: model.decision_function(rows)

    return fit


def _bitplan_binning_s(x: Array, seed: int) -> float:
    """What `fit` spends on bins, done once more, because the estimator does not tell it apart."""
    from bitplan.trees.binning import bin_rows, find_bins

    started = time.perf_counter()
    bin_rows(x, find_bins(x, np.zeros(x.shape[1], np.bool_), 255, seed))
    return time.perf_counter() - started


def _lightgbm(variant: str, trees: int, leaves: int, seed: int, threads: int) -> Fit:
    import lightgbm

    settings = {
        "objective": "binary",
        "num_leaves": leaves,
        "max_bin": 255,
        "learning_rate": 0.1,
        "num_threads": threads,
        "force_row_wise": True,  # its faster way here
        "seed": seed,
        "verbose": -1,
    }
    if variant == "quantized":
        settings |= {"use_quantized_grad": True, "stochastic_rounding": True, "quant_train_renew_leaf": False}

    def fit(x: Array, y: Array) -> tuple[float | None, Callable[[Array], Array]]:
        started = time.perf_counter()
        data = lightgbm.Dataset(x, y, params=settings).construct()
        binning = time.perf_counter() - started
        booster = lightgbm.train(settings, data, trees)
        return binning, lambda rows: np.asarray(booster.predict(rows, raw_score=True, num_threads=threads))

    return fit


def _sklearn(trees: int, leaves: int, seed: int) -> Fit:
    from sklearn.ensemble import HistGradientBoostingClassifier  # type: ignore[import-untyped]

    def fit(x: Array, y: Array) -> tuple[float | None, Callable[[Array], Array]]:
        model = HistGradientBoostingClassifier(
            max_iter=trees, max_leaf_nodes=leaves, early_stopping=False, random_state=seed
        ).fit(x, y)
        return None, lambda rows: model.decision_function(rows)

    return fit


# ---- all of them -----------------------------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    if arguments.run:
        found = run_one(
            arguments.run, arguments.rows[0], arguments.trees, arguments.leaves, arguments.seeds[0], arguments.threads
        )
        print(json.dumps(found))
        return
    import harness  # beside this file

    runs = []
    for rows in arguments.rows:
        for seed in arguments.seeds:
            for name in arguments.contenders:  # in turns, so that a disturbance hits them all
                found = _in_process(name, rows, seed, arguments)
                runs.append(found)
                print(
                    f"{name:20} {rows:9} rows, seed {seed} {found['train_s']:6.2f} s (cpu {found['train_cpu_s']:.2f}), "
                    f"AUC {found['auc']:.4f}, {found['peak_mib']:.0f} MiB, {found['predict_us_per_row']:.2f} us a row",
                    flush=True,
                )
    document = {
        "machine": harness.machine("cpu"),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "settings": {"trees": arguments.trees, "leaves": arguments.leaves, "bins": 255, "threads": arguments.threads},
        "runs": runs,
    }
    print(harness.save("trees", document, arguments.output))


def _in_process(name: str, rows: int, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--run", name, "--rows", str(rows), "--seeds", str(seed)]
    command += ["--trees", str(arguments.trees), "--leaves", str(arguments.leaves), "--threads", str(arguments.threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--leaves", type=int, default=255)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", choices=CONTENDERS, help="one contender in this process; prints JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
