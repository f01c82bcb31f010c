"""Boosted trees by threads, beside LightGBM, scikit-learn and XGBoost on the same machine.

    python benchmarks/trees_threads.py                # 2, 4, 8 and 16 threads: five minutes on 16 cores
    python benchmarks/trees_threads.py --seconds 270  # what has not begun by then is left out, and the result says so

A contender trains on one table in a process of its own, at all numbers of threads and leaves in turn; binning is
included, compiling is not. LightGBM's quantized training is tried by rows and by columns, its float32 by rows.
Prediction is that of the last model at the most threads: one row, 1,000 rows, and 100,000.
XGBoost is left out where it is not installed (the wheel `xgboost-cpu` is small).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Predict = Callable[[Array], Array]
TEST_ROWS = 100_000
# Table: rows, features, share of missing values. Then trees, leaves, threads, contenders.
OURS, THEIRS = ("bitplan_i16", "bitplan_f32"), ("lightgbm_quantized_rows", "lightgbm_quantized_columns")
RUNS: tuple[tuple[tuple[int, int, float], int, tuple[int, ...], tuple[int, ...], tuple[str, ...]], ...] = (
    ((1_000_000, 28, 0.0), 20, (255,), (2, 4, 8, 16), (*OURS, *THEIRS, "lightgbm_f32_rows", "sklearn", "xgboost")),
    ((1_000_000, 40, 0.1), 20, (255,), (4, 16), ("bitplan_i16", *THEIRS, "xgboost")),
    ((100_000, 28, 0.0), 100, (31, 255), (2, 16), ("bitplan_i16", *THEIRS)),
    ((100_000, 7, 0.0), 100, (255,), (2, 16), ("bitplan_i16", *THEIRS)),
    ((10_000_000, 28, 0.0), 5, (255,), (8, 16), ("bitplan_i16", "lightgbm_quantized_rows")),
    ((10_000_000, 28, 0.0), 2, (255,), (1,), ("bitplan_i16",)),
)


def made_table(rows: int, features: int, missing: float) -> tuple[Array, Array]:
    """float32 features and two classes; cheap to make, for ten million rows too."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, features), dtype=np.float32)
    if missing:
        x[rng.random(x.shape, dtype=np.float32) < missing] = np.nan
    known = np.nan_to_num(x[:, :5])
    signal = known[:, 0] * known[:, 1] + known[:, 2] + np.sin(3 * known[:, 3])
    return x, (signal + rng.standard_normal(rows, dtype=np.float32) > 0).astype(np.float64)


# ---- contenders: (trees, leaves, threads) -> a function that trains and returns what predicts ------------------------


def _bitplan(precision: str, trees: int, leaves: int, threads: int) -> Callable[[Array, Array], Predict]:
    from bitplan.trees import BoostedTreesClassifier

    settings: dict[str, Any] = {
        "n_estimators": trees,
        "max_leaves": leaves,
        "gradient_precision": precision,
        "n_jobs": threads,
    }
    return lambda x, y: BoostedTreesClassifier(**settings).fit(x, y).decision_function


def _lightgbm(variant: str, trees: int, leaves: int, threads: int) -> Callable[[Array, Array], Predict]:
    import lightgbm

    kind, _, by = variant.partition("_")
    settings: dict[str, Any] = {"objective": "binary", "num_leaves": leaves, "num_threads": threads, "verbose": -1}
    settings |= {"force_row_wise": by == "rows", "force_col_wise": by == "columns"}
    if kind == "quantized":
        settings |= {"use_quantized_grad": True, "quant_train_renew_leaf": False}

    def fit(x: Array, y: Array) -> Predict:
        booster = lightgbm.train(settings, lightgbm.Dataset(x, y, params=settings), trees)
        return lambda rows: np.asarray(booster.predict(rows, raw_score=True, num_threads=threads))

    return fit


def _sklearn(_variant: str, trees: int, leaves: int, threads: int) -> Callable[[Array, Array], Predict]:
    from sklearn.ensemble import HistGradientBoostingClassifier  # type: ignore[import-untyped]
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped,import-not-found,unused-ignore]

    def fit(x: Array, y: Array) -> Predict:
        threadpool_limits(threads)
        model = HistGradientBoostingClassifier(max_iter=trees, max_leaf_nodes=leaves, early_stopping=False).fit(x, y)
        predict: Predict = model.decision_function
        return predict

    return fit


def _xgboost(_variant: str, trees: int, leaves: int, threads: int) -> Callable[[Array, Array], Predict]:
    import xgboost  # type: ignore[import-untyped,import-not-found,unused-ignore]

    settings = {"objective": "binary:logistic", "tree_method": "hist", "grow_policy": "lossguide", "max_bin": 255}
    settings |= {"max_leaves": leaves, "max_depth": 0, "eta": 0.1, "nthread": threads, "verbosity": 0}

    def fit(x: Array, y: Array) -> Predict:
        booster = xgboost.train(settings, xgboost.QuantileDMatrix(x, y, nthread=threads, max_bin=255), trees)
        return lambda rows: np.asarray(booster.inplace_predict(rows, predict_type="margin"))

    return fit


KINDS = {"bitplan": _bitplan, "lightgbm": _lightgbm, "sklearn": _sklearn, "xgboost": _xgboost}


def run_one(name: str, folder: Path, trees: int, leaves: list[int], threads: list[int]) -> list[dict[str, Any]]:
    from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

    x, y = np.load(folder / "x.npy"), np.load(folder / "y.npy")
    test_x, test_y, x, y = x[:TEST_ROWS], y[:TEST_ROWS], x[TEST_ROWS:], y[TEST_ROWS:]
    kind, _, variant = name.partition("_")
    result = []
    for size in leaves:
        for count in threads:
            KINDS[kind](variant, 2, size, count)(x[:70_000], y[:70_000])(test_x[:2000])  # compiled, and threads started
            started, used = time.perf_counter(), time.process_time()
            predict = KINDS[kind](variant, trees, size, count)(x, y)
            took, used = time.perf_counter() - started, time.process_time() - used
            row = {"contender": name, "rows": len(x), "features": x.shape[1], "missing": bool(np.isnan(x[:9]).any())}
            row |= {"trees": trees, "leaves": size, "threads": count, "train_s": took, "train_cpu_s": used}
            row |= {"auc": float(roc_auc_score(test_y, predict(test_x)))}
            if count == threads[-1]:
                row |= {f"predict_{rows}_ms": _predict_ms(predict, test_x[:rows]) for rows in (1, 1000, TEST_ROWS)}
            result.append(row)
    return result


def _predict_ms(predict: Predict, x: Array) -> float:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        predict(x)
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


# ---- all of them -----------------------------------------------------------------------------------------------------


def run_all(seconds: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of all runs, and what there was no time for, or what failed."""
    until, result, missing = time.monotonic() + seconds, [], []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    made: tuple[int, int, float] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for table, trees, leaves, threads, names in RUNS:
            for name in names:
                what = f"{name}, {table[0]} x {table[1]}, {leaves} leaves"
                installed = name != "xgboost" or importlib.util.find_spec("xgboost") is not None
                if not installed or time.monotonic() > until:
                    missing.append(f"{what}: {'no time was left' if installed else 'it is not installed'}")
                    continue
                if made != table:
                    x, y = made_table(table[0] + TEST_ROWS, *table[1:])
                    np.save(Path(folder) / "x.npy", x)
                    np.save(Path(folder) / "y.npy", y)
                    made, x, y = table, x[:0], y[:0]
                counts = [count for count in threads if count <= cores]
                options = json.dumps([name, folder, trees, leaves, counts])
                left = max(until - time.monotonic(), 0) + 20
                try:
                    done = subprocess.run(
                        [sys.executable, __file__, "--run", options], capture_output=True, text=True, timeout=left
                    )
                except subprocess.TimeoutExpired:
                    missing.append(f"{what}: it did not end in time")
                    continue
                if done.returncode:
                    missing.append(f"{what}: {done.stderr.strip().splitlines()[-1:]}")
                    continue
                rows = json.loads(done.stdout.splitlines()[-1])
                result += rows
                for row in rows:
                    print(
                        f"{name:27} {row['rows']:9} x {row['features']:2} {row['leaves']:4} leaves "
                        f"{row['threads']:3} threads {row['train_s']:7.2f} s  AUC {row['auc']:.4f}",
                        flush=True,
                    )
    return result, missing


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours in i16 over the fastest other, for each table, number of leaves and of threads."""
    by: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("rows", "features", "leaves", "threads", "trees"))
        by.setdefault(key, {})[row["contender"]] = row["train_s"]
    result = []
    for key, times in by.items():
        others = {name: took for name, took in times.items() if not name.startswith("bitplan")}
        if others and "bitplan_i16" in times:
            best = min(others, key=others.__getitem__)
            names = dict(zip(("rows", "features", "leaves", "threads", "trees"), key, strict=True))
            result.append({**names, "best_other": best, "ratio": times["bitplan_i16"] / others[best]})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", help="one contender in this process; prints JSON")
    given = parser.parse_args()
    if given.run:
        name, folder, *rest = json.loads(given.run)
        print(json.dumps(run_one(name, Path(folder), *rest)))
        return
    import harness  # beside this file

    rows, missing = run_all(given.seconds)
    document: dict[str, Any] = {
        "benchmark": "trees_threads",
        "machine": harness.machine("cpu"),
        "versions": harness.versions(),
        "commit": harness.commit(),
    }
    document |= {"runs": rows, "ratios": ratios(rows), "left_out": missing}
    for ratio in document["ratios"]:
        print(
            f"{ratio['rows']:9} x {ratio['features']:2} {ratio['leaves']:4} leaves {ratio['threads']:3} threads: "
            f"{ratio['ratio']:.2f} of {ratio['best_other']}"
        )
    for line in missing:
        print("left out:", line)
    print(harness.save("trees_threads", document, given.output))


if __name__ == "__main__":
    main()
