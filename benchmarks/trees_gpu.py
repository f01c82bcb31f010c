"""Boosted trees on a GPU beside LightGBM's quantized training on all cores of its host: time, phases, memory.

    python benchmarks/trees_gpu.py                              # two to three minutes on an H200 host with 16 cores
    python benchmarks/trees_gpu.py --rows 1000000 --trees 20 --no-peer

First of all the first fit of 70,000 rows with nothing compiled, a second one, and a first one of another width; then
fits with categories, with monotone constraints and with rows drawn, each beside the CPU's trees.

For every number of rows: a fit on the GPU (binning included), a tree's time in the middle of it, what its kernels take
by CUDA events, the time's floor (bytes of bins that the tree's histograms must read, over the bandwidth of a copy), and
LightGBM with fewer trees, whose time for all of them is binning plus trees at the mean of what was seen. Up to a
million rows the trees are compared with the CPU's. Where XGBoost is installed with CUDA, it fits on the same card.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # nothing is compiled

import harness
import numpy as np
import torch
import triton
from trees_tables import FEATURES, higgs_like

from bitplan.base.loops.launch import PreparedLaunch
from bitplan.trees import BoostedTreesClassifier
from bitplan.trees.threads import allowed_cores

Array = np.ndarray[Any, Any]
PIECE = 250_000  # rows that one thread makes
WARM_ROWS = 70_000
COMPARED_ROWS = 1_000_000
GIB = 2**30


def make_rows(rows: int) -> tuple[Array, Array]:
    """HIGGS-like rows, by all cores."""
    x, y = np.empty((rows, FEATURES), np.float32), np.empty(rows)

    def work(first: int) -> None:
        last = min(first + PIECE, rows)
        x[first:last], y[first:last] = higgs_like(last - first, first // PIECE)

    with ThreadPoolExecutor(allowed_cores()) as pool:
        list(pool.map(work, range(0, rows, PIECE)))
    return x, y


def model_of(trees: int, leaves: int, precision: str, device: str = "cuda") -> BoostedTreesClassifier:
    return BoostedTreesClassifier(
        n_estimators=trees, max_leaves=leaves, gradient_precision=precision, device=device, random_state=0
    )


def fit_timed(model: BoostedTreesClassifier, x: Array, y: Array) -> dict[str, float]:
    """Seconds of the fit and, of a tree, the median of milliseconds."""
    rounds: list[float] = []
    started = time.perf_counter()
    model.fit(x, y, callbacks=[lambda _: bool(rounds.append(time.perf_counter()))])  # type: ignore[func-returns-value]
    fit_s = time.perf_counter() - started
    each = np.diff(rounds) * 1e3
    return {
        "fit_s": fit_s,
        "before_first_tree_s": rounds[0] - started - statistics.median(each) / 1e3,
        "tree_ms": statistics.median(each),
        "tree_p90_ms": float(np.quantile(each, 0.9)),
    }


def replace_launches(of_prepared: Any, of_others: Any) -> None:
    setattr(PreparedLaunch, "__call__", of_prepared)  # noqa: B010
    setattr(triton.runtime.JITFunction, "run", of_others)  # noqa: B010


@contextmanager
def events_of_kernels() -> Iterator[dict[str, list[tuple[Any, Any]]]]:
    """Events around every launch, by the kernel's name."""
    seen: dict[str, list[tuple[Any, Any]]] = {}
    prepared, ordinary = PreparedLaunch.__call__, triton.runtime.JITFunction.run
    is_inside = False

    def record(name: str, launch: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return launch()
        is_inside = True
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = launch()
        end.record()
        seen.setdefault(name, []).append((begin, end))
        is_inside = False
        return result

    def run_prepared(self: Any, *pointers: Any) -> Any:
        return record(self._kernel.fn.__name__, lambda: prepared(self, *pointers))

    def run_ordinary(self: Any, *given: Any, **named: Any) -> Any:
        if named.get("warmup"):  # compiled, not launched
            return ordinary(self, *given, **named)
        return record(self.fn.__name__, lambda: ordinary(self, *given, **named))

    replace_launches(run_prepared, run_ordinary)
    try:
        yield seen
    finally:
        replace_launches(prepared, ordinary)


def phases(x: Array, y: Array, leaves: int, precision: str, trees: int = 5) -> dict[str, Any]:
    """Milliseconds and launches of each kernel for a tree; the events themselves take time of the host."""
    model = model_of(trees, leaves, precision)
    with events_of_kernels() as seen:
        model.fit(x, y)
    torch.cuda.synchronize()
    kernels = {
        name: {"ms": sum(begin.elapsed_time(end) for begin, end in pairs) / trees, "launches": len(pairs) / trees}
        for name, pairs in seen.items()
        if name != "lay_out"
    }
    bytes_read = statistics.mean(_bytes_of_bins(tree) for tree in model.booster_.trees)
    return {
        "kernels": kernels,
        "all_kernels_ms": sum(each["ms"] for each in kernels.values()),
        "bins_read_gb": bytes_read / 1e9,
    }


def _bytes_of_bins(tree: Any) -> int:
    """A byte for each feature of the root's rows and of the smaller child's of every split."""
    rows = np.concatenate([tree.node_rows, tree.leaf_rows])
    left, right = (np.where(child >= 0, child, len(tree.node_rows) + ~child) for child in (tree.left, tree.right))
    return int(FEATURES * (tree.node_rows[0] + np.minimum(rows[left], rows[right]).sum()))


def copy_gb_per_s() -> float:
    """Bytes read and written by a large copy."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    samples = harness.time_in_turns({"copy": lambda: target.copy_(source)}, 10, cuda=True)["copy"]
    return 2 * source.nbytes / statistics.median(samples) / 1e6


def lightgbm_timed(x: Array, y: Array, leaves: int, trees: int, **more: Any) -> dict[str, float]:
    import lightgbm

    settings = {"objective": "binary", "num_leaves": leaves, "max_bin": 255, "learning_rate": 0.1, "seed": 0} | more
    settings |= {"num_threads": allowed_cores(), "use_quantized_grad": True, "stochastic_rounding": True, "verbose": -1}
    started = time.perf_counter()
    data = lightgbm.Dataset(x, y, params=settings).construct()
    binning, rounds = time.perf_counter() - started, [time.perf_counter()]
    lightgbm.train(settings, data, trees, callbacks=[lambda _: rounds.append(time.perf_counter())])
    return {"binning_s": binning, "tree_ms": float(np.mean(np.diff(rounds)[1:]) * 1e3), "trees": trees}


def first_fits(leaves: int) -> dict[str, float]:
    """Seconds of fits of few rows, in this order, by what is new to the process."""
    torch.zeros(1, device="cuda").sum().item()
    x, y = make_rows(WARM_ROWS)
    seconds = {}
    tables = {"first": x, "second": x, "other_width": x[:, :20], "other_rows": x[:-5]}
    for name, table in tables.items():
        started = time.perf_counter()
        model_of(2, leaves, "i16").fit(table, y[: len(table)])
        seconds[f"{name}_s"] = time.perf_counter() - started
    return seconds


def kinds(leaves: int, trees: int, rows: int = 500_000) -> dict[str, dict[str, Any]]:
    """A tree's time, and whether trees are the CPU's, by what fits may ask for."""
    x, y = make_rows(rows)
    x[:, 3] = np.random.default_rng(0).integers(0, 60, rows)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "categories": {"categorical_features": [3]},
        "monotone": {"monotone_constraints": [1, -1, *[0] * (FEATURES - 2)]},
        "rows drawn": {"subsample": 0.5},
    }
    result = {}
    for name, settings in ways.items():
        models = [model_of(trees, leaves, "i16", device).set_params(**settings) for device in ("cuda", "cpu")]
        models[0].fit(x, y)  # compiled
        times = [fit_timed(model, x, y) for model in models]
        tree_ms, cpu_tree_ms = (each["tree_ms"] for each in times)
        result[name] = {"tree_ms": tree_ms, "cpu_tree_ms": cpu_tree_ms, "same_trees_as_cpu": _same(*models)}
        print(name, result[name], flush=True)
    return result


def predictions(model: BoostedTreesClassifier, x: Array) -> dict[str, Any]:
    """Milliseconds for all rows, on the card from a table that is there, and on the host; the least of three."""
    tables = {"card": torch.from_numpy(x).cuda(), "host": x}
    times: dict[str, list[float]] = {name: [] for name in tables}
    raw = {name: model.decision_function(table) for name, table in tables.items()}
    for _ in range(3):
        for name, table in tables.items():
            started = time.perf_counter()
            model.decision_function(table)
            times[name].append((time.perf_counter() - started) * 1e3)
    same = bool(np.array_equal(raw["card"], raw["host"]))
    return {f"predict_{name}_ms": min(each) for name, each in times.items()} | {"same_predictions": same}


def xgboost_timed(x: Array, y: Array, leaves: int, trees: int) -> dict[str, float]:
    import xgboost  # type: ignore[import-untyped,import-not-found,unused-ignore]

    settings = {"objective": "binary:logistic", "tree_method": "hist", "device": "cuda", "max_bin": 255}
    settings |= {"grow_policy": "lossguide", "max_leaves": leaves, "max_depth": 0, "learning_rate": 0.1}
    xgboost.train(settings, xgboost.QuantileDMatrix(x[:WARM_ROWS], y[:WARM_ROWS], max_bin=255), 2)
    started = time.perf_counter()
    data = xgboost.QuantileDMatrix(x, y, max_bin=255)
    binning = time.perf_counter() - started
    xgboost.train(settings, data, trees)
    return {"binning_s": binning, "fit_s": time.perf_counter() - started, "trees": trees}


def measure(rows: int, given: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    made = time.perf_counter()
    x, y = make_rows(rows)
    row: dict[str, Any] = {"rows": rows, "leaves": given.leaves, "trees": given.trees}
    print(f"{rows} rows made in {time.perf_counter() - made:.1f} s", flush=True)
    for precision in given.precisions:
        torch.cuda.reset_peak_memory_stats()
        model = model_of(given.trees, given.leaves, precision)
        row[precision] = fit_timed(model, x, y) | {"peak_gib": torch.cuda.max_memory_allocated() / GIB}
        row[precision] |= predictions(model, x)
        if rows <= COMPARED_ROWS:
            other = model_of(5, given.leaves, precision, "cpu")
            row[precision] |= {
                "cpu_tree_ms": fit_timed(other, x, y)["tree_ms"],
                "same_trees_as_cpu": _same(model, other),
            }
        print(rows, precision, row[precision], flush=True)
    row["phases"] = phases(x, y, given.leaves, given.precisions[0])
    row["phases"]["floor_ms"] = row["phases"]["bins_read_gb"] / bandwidth * 1e3
    print(rows, row["phases"], flush=True)
    if importlib.util.find_spec("xgboost"):
        row["xgboost"] = xgboost_timed(x, y, given.leaves, given.trees)
        print(rows, row["xgboost"], flush=True)
    if given.peer and rows <= given.peer_rows:
        ways = {"row_wise": {"force_row_wise": True}, "col_wise": {"force_col_wise": True}}
        row["lightgbm"] = {
            name: lightgbm_timed(x, y, given.leaves, given.peer_trees, **way) for name, way in ways.items()
        }
        best = min(each["binning_s"] + given.trees * each["tree_ms"] / 1e3 for each in row["lightgbm"].values())
        row["lightgbm_s"], row["times_as_fast"] = best, best / row[given.precisions[0]]["fit_s"]
        print(rows, row["lightgbm"], flush=True)
    return row


def _same(model: BoostedTreesClassifier, other: BoostedTreesClassifier) -> bool:
    pairs = zip(model.booster_.trees, other.booster_.trees, strict=False)
    names = ("feature", "threshold", "left", "right", "gain", "node_value", "leaf_value", "leaf_rows")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--leaves", type=int, default=255)
    parser.add_argument("--precisions", nargs="+", default=["i16", "i8"])
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peer-trees", type=int, default=8)
    parser.add_argument("--peer-rows", type=int, default=10_000_000, help="LightGBM runs up to this many rows")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    first = first_fits(given.leaves)
    print(first, flush=True)
    started = time.perf_counter()
    x, y = make_rows(WARM_ROWS)
    for precision in given.precisions:
        for device in ("cuda", "cpu"):
            model_of(2, given.leaves, precision, device).fit(x, y)
    warm_s = time.perf_counter() - started
    bandwidth = copy_gb_per_s()
    torch.cuda.empty_cache()
    print(f"warm after {warm_s:.1f} s; a copy moves {bandwidth:.0f} GB/s", flush=True)
    document: dict[str, Any] = {
        "benchmark": "trees_gpu",
        "machine": harness.machine("cuda"),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "first_fits": first,
        "kinds": kinds(given.leaves, min(given.trees, 10)),
        "warm_up_s": warm_s,
        "copy_gb_per_s": bandwidth,
        "rows": [],
    }
    for rows in given.rows:
        document["rows"].append(measure(rows, given, bandwidth))
        harness.save("trees_gpu_nvidia_h200", document, given.output)
    print(f"\n{'rows':>10} {'precision':>9} {'fit s':>7} {'before s':>8} {'tree ms':>8} {'GiB':>6} {'LightGBM s':>10}")
    for row in document["rows"]:
        for precision in given.precisions:
            here = row[precision]
            print(
                f"{row['rows']:>10} {precision:>9} {here['fit_s']:>7.2f} {here['before_first_tree_s']:>8.2f} "
                f"{here['tree_ms']:>8.2f} {here['peak_gib']:>6.2f} {row.get('lightgbm_s', float('nan')):>10.1f}"
            )


if __name__ == "__main__":
    main()
