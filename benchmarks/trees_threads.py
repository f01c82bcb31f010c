"""Boosted trees by threads, beside LightGBM, scikit-learn and XGBoost on the same machine.

    python benchmarks/trees_threads.py                # 2, 4, 8 and 16 threads: five minutes on 16 cores
    python benchmarks/trees_threads.py --seconds 270  # what has not begun by then is left out, and the result says so
    python benchmarks/trees_threads.py --only 1M200,regression,classes    # some of the tables, by name

A contender trains on one table in a process of its own, at all numbers of threads and leaves in turn; binning is
included, compiling is not. LightGBM's quantized training is tried by rows and by columns, its float32 by rows.
Prediction is that of each model by as many threads as trained it: one row, 1,000 rows, and 100,000; a million rows at
the most threads.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Predict = Callable[[Array], Array]
TEST_ROWS = 100_000
OURS, THEIRS = ("bitplan_i16", "bitplan_f32"), ("lightgbm_quantized_rows", "lightgbm_quantized_columns")


@dataclass(frozen=True)
class Run:
    """A table, what is learned from it, and who learns."""

    rows: int
    features: int
    trees: int  # for ten classes: of each
    leaves: tuple[int, ...]
    threads: tuple[int, ...]
    contenders: tuple[str, ...]
    missing: float = 0.0
    task: str = "binary"  # or "regression", "classes": ten

    def table(self) -> tuple[int, int, float, str]:
        return self.rows, self.features, self.missing, self.task


EVERYONE = (*OURS, *THEIRS, "lightgbm_f32_rows", "sklearn", "xgboost")
RUNS = {
    "1M": Run(1_000_000, 28, 20, (255,), (2, 4, 8, 16), EVERYONE),
    "1M40": Run(1_000_000, 40, 20, (255,), (4, 16), ("bitplan_i16", *THEIRS, "xgboost"), missing=0.1),
    "100k": Run(100_000, 28, 100, (31, 255), (2, 16), ("bitplan_i16", *THEIRS)),
    "100k16": Run(100_000, 28, 50, (31, 255), (1, 16), ("bitplan_i16", "lightgbm_quantized_rows", "xgboost")),
    "100k7": Run(100_000, 7, 100, (255,), (2, 16), ("bitplan_i16", *THEIRS)),
    "10M": Run(10_000_000, 28, 5, (255,), (8, 16), ("bitplan_i16", "lightgbm_quantized_rows")),
    "10M1": Run(10_000_000, 28, 2, (255,), (1,), ("bitplan_i16",)),
    "1M200": Run(1_000_000, 200, 10, (255,), (4, 16), ("bitplan_i16", *THEIRS)),
    "regression": Run(1_000_000, 28, 20, (255,), (2, 16), ("bitplan_i16", *THEIRS, "xgboost"), task="regression"),
    "classes": Run(100_000, 28, 10, (31,), (2, 16), ("bitplan_i16", *THEIRS, "xgboost"), task="classes"),
}


def made_table(rows: int, features: int, missing: float, task: str = "binary") -> tuple[Array, Array]:
    """float32 features and two classes, ten, or a number; cheap to make, for ten million rows too."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, features), dtype=np.float32)
    if missing:
        x[rng.random(x.shape, dtype=np.float32) < missing] = np.nan
    known = np.nan_to_num(x[:, :5])
    signal = known[:, 0] * known[:, 1] + known[:, 2] + np.sin(3 * known[:, 3])
    noisy = signal + rng.standard_normal(rows, dtype=np.float32)
    if task == "regression":
        return x, noisy.astype(np.float64)
    if task == "classes":  # tenths of the values, as many rows in each
        return x, np.searchsorted(np.quantile(noisy, np.arange(1, 10) / 10), noisy).astype(np.float64)
    return x, (noisy > 0).astype(np.float64)


# ---- contenders: (variant, task, trees, leaves, threads) -> a function that trains and returns what predicts --------


def _bitplan(precision: str, task: str, trees: int, leaves: int, threads: int) -> Callable[[Array, Array], Predict]:
    from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor

    settings: dict[str, Any] = {
        "n_estimators": trees,
        "max_leaves": leaves,
        "gradient_precision": precision,
        "n_jobs": threads,
    }
    if task == "regression":
        return lambda x, y: BoostedTreesRegressor(**settings).fit(x, y).predict
    return lambda x, y: BoostedTreesClassifier(**settings).fit(x, y).decision_function


def _lightgbm(variant: str, task: str, trees: int, leaves: int, threads: int) -> Callable[[Array, Array], Predict]:
    import lightgbm

    kind, _, by = variant.partition("_")
    settings: dict[str, Any] = {"num_leaves": leaves, "num_threads": threads, "verbose": -1}
    settings |= {"objective": "multiclass", "num_class": 10} if task == "classes" else {"objective": task}
    settings |= {"force_row_wise": by == "rows", "force_col_wise": by == "columns"}
    if kind == "quantized":
        settings |= {"use_quantized_grad": True, "quant_train_renew_leaf": False}

    def fit(x: Array, y: Array) -> Predict:
        booster = lightgbm.train(settings, lightgbm.Dataset(x, y, params=settings), trees)
        return lambda rows: np.asarray(booster.predict(rows, raw_score=True, num_threads=threads))

    return fit


def _sklearn(_variant: str, _task: str, trees: int, leaves: int, threads: int) -> Callable[[Array, Array], Predict]:
    from sklearn.ensemble import HistGradientBoostingClassifier  # type: ignore[import-untyped]
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped,import-not-found,unused-ignore]

    def fit(x: Array, y: Array) -> Predict:
        threadpool_limits(threads)
        model = HistGradientBoostingClassifier(max_iter=trees, max_leaf_nodes=leaves, early_stopping=False).fit(x, y)
        predict: Predict = model.decision_function
        return predict

    return fit


def _xgboost(_variant: str, task: str, trees: int, leaves: int, threads: int) -> Callable[[Array, Array], Predict]:
    import xgboost  # type: ignore[import-untyped,import-not-found,unused-ignore]

    objectives = {"binary": "binary:logistic", "regression": "reg:squarederror", "classes": "multi:softprob"}
    settings: dict[str, Any] = {"objective": objectives[task], "tree_method": "hist", "grow_policy": "lossguide"}
    settings |= {"max_bin": 255} | ({"num_class": 10} if task == "classes" else {})
    settings |= {"max_leaves": leaves, "max_depth": 0, "eta": 0.1, "nthread": threads, "verbosity": 0}

    def fit(x: Array, y: Array) -> Predict:
        booster = xgboost.train(settings, xgboost.QuantileDMatrix(x, y, nthread=threads, max_bin=255), trees)
        return lambda rows: np.asarray(booster.inplace_predict(rows, predict_type="margin"))

    return fit


KINDS = {"bitplan": _bitplan, "lightgbm": _lightgbm, "sklearn": _sklearn, "xgboost": _xgboost}


def loss(task: str, y: Array, raw: Array) -> float:
    """The mean logistic, squared or softmax loss of raw predictions."""
    if task == "regression":
        return float(np.mean((y - raw) ** 2))
    if task == "binary":
        return float(np.mean(np.logaddexp(0, np.where(y > 0, -raw, raw))))
    raw = raw - raw.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(raw).sum(axis=1)) - raw[np.arange(len(y)), y.astype(int)]))


def run_one(
    name: str, folder: Path, task: str, trees: int, leaves: list[int], threads: list[int]
) -> list[dict[str, Any]]:
    from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

    x, y = np.load(folder / "x.npy"), np.load(folder / "y.npy")
    test_x, test_y, x, y = x[:TEST_ROWS], y[:TEST_ROWS], x[TEST_ROWS:], y[TEST_ROWS:]
    kind, _, variant = name.partition("_")
    result = []
    for size in leaves:
        for count in threads:
            KINDS[kind](variant, task, 2, size, count)(x[:70_000], y[:70_000])(
                test_x[:2000]
            )  # compiled, and threads started
            started, used = time.perf_counter(), time.process_time()
            predict = KINDS[kind](variant, task, trees, size, count)(x, y)
            took, used = time.perf_counter() - started, time.process_time() - used
            row = {"contender": name, "rows": len(x), "features": x.shape[1], "missing": bool(np.isnan(x[:9]).any())}
            row |= {
                "task": task,
                "trees": trees,
                "leaves": size,
                "threads": count,
                "train_s": took,
                "train_cpu_s": used,
            }
            raw = predict(test_x)
            row |= {"loss": loss(task, test_y, raw)}
            if task == "binary":
                row |= {"auc": float(roc_auc_score(test_y, raw))}
            row |= {f"predict_{rows}_ms": _predict_ms(predict, test_x[:rows]) for rows in (1, 1000, TEST_ROWS)}
            if count == threads[-1]:
                row |= {f"predict_{10 * TEST_ROWS}_ms": _predict_ms(predict, np.concatenate([test_x] * 10))}
            result.append(row)
    return result


def _predict_ms(predict: Predict, x: Array) -> float:
    """The least of some calls: three, or as many as take a tenth of a second."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < 0.1:
        started = time.perf_counter()
        predict(x)
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


# ---- all of them -----------------------------------------------------------------------------------------------------


def run_all(seconds: float, only: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of all runs, and what there was no time for, or what failed."""
    until, result, missing = time.monotonic() + seconds, [], []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    made: tuple[int, int, float, str] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for run in (RUNS[each] for each in only):
            table = run.table()
            for name in run.contenders:
                what = f"{name}, {run.rows} x {run.features}, {run.task}, {run.leaves} leaves"
                installed = name != "xgboost" or importlib.util.find_spec("xgboost") is not None
                if not installed or time.monotonic() > until:
                    missing.append(f"{what}: {'no time was left' if installed else 'it is not installed'}")
                    continue
                if made != table:
                    x, y = made_table(run.rows + TEST_ROWS, *table[1:])
                    np.save(Path(folder) / "x.npy", x)
                    np.save(Path(folder) / "y.npy", y)
                    made, x, y = table, x[:0], y[:0]
                counts = [count for count in run.threads if count <= cores]
                options = json.dumps([name, folder, run.task, run.trees, run.leaves, counts])
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
                        f"{name:27} {row['rows']:9} x {row['features']:3} {row['task']:10} {row['leaves']:4} leaves "
                        f"{row['threads']:3} threads {row['train_s']:7.2f} s  loss {row['loss']:.4f}",
                        flush=True,
                    )
    return result, missing


KEY = ("rows", "features", "task", "leaves", "threads", "trees")


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours in i16 over the fastest other, for each table, number of leaves and of threads."""
    by: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = tuple(row[name] for name in KEY)
        by.setdefault(key, {})[row["contender"]] = row["train_s"]
    result = []
    for key, times in by.items():
        others = {name: took for name, took in times.items() if not name.startswith("bitplan")}
        if others and "bitplan_i16" in times:
            best = min(others, key=others.__getitem__)
            names = dict(zip(KEY, key, strict=True))
            result.append({**names, "best_other": best, "ratio": times["bitplan_i16"] / others[best]})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--only", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", help="one contender in this process; prints JSON")
    given = parser.parse_args()
    if given.run:
        name, folder, *rest = json.loads(given.run)
        print(json.dumps(run_one(name, Path(folder), *rest)))
        return
    import harness  # beside this file

    rows, missing = run_all(given.seconds, given.only.split(","))
    document: dict[str, Any] = {
        "benchmark": "trees_threads",
        "machine": harness.machine("cpu"),
        "versions": harness.versions(),
        "commit": harness.commit(),
    }
    document |= {"runs": rows, "ratios": ratios(rows), "left_out": missing}
    for ratio in document["ratios"]:
        print(
            f"{ratio['rows']:9} x {ratio['features']:3} {ratio['task']:10} {ratio['leaves']:4} leaves "
            f"{ratio['threads']:3} threads: {ratio['ratio']:.2f} of {ratio['best_other']}"
        )
    for line in missing:
        print("left out:", line)
    print(harness.save("trees_threads", document, given.output))


if __name__ == "__main__":
    main()
