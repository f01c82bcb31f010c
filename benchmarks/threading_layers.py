"""Our starts of threads beside numba's own threading layers: the same compiled loops, whole fits and packed products.

    python benchmarks/threading_layers.py [--threads 2] [--rounds 15]

A loop is a C function that each thread calls; pieces are taken until none is left. Here `helper_threads.run` (trees)
and `openmp_threads.run` (products) are exchanged for a `prange` of numba's that makes the same calls, in turns.
Prints the median of the ratios (numba's time / ours) with the lowest and highest, and the least time of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
import torch

import bitplan
from bitplan.base.loops import helper_threads, openmp_threads
from bitplan.base.loops.helper_threads import call
from bitplan.trees import BoostedTreesRegressor, tree


@numba.njit(parallel=True)  # type: ignore[untyped-decorator]
def on_numba_threads(address: int, job: int, threads: int) -> None:
    for _ in numba.prange(threads):
        call(address, job)


def run_by_numba(function: Any, job: int, threads: int, **_sets: int) -> None:
    on_numba_threads(function.address, job, threads)


OURS = {module: module.run for module in (helper_threads, openmp_threads, tree)}


def exchange(is_numba: bool) -> None:
    for module, ours in OURS.items():
        module.run = run_by_numba if is_numba else ours  # type: ignore[attr-defined]


def time_in_turns(work: Callable[[], object], rounds: int) -> dict[str, float]:
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(-2, rounds):
        for is_numba in (turn % 2 == 0, turn % 2 == 1):
            exchange(is_numba)
            started = time.perf_counter()
            work()
            if turn >= 0:
                times[is_numba].append(time.perf_counter() - started)
    exchange(False)
    ratios = sorted(theirs / ours for ours, theirs in zip(times[False], times[True], strict=True))
    least = {"ours_ms": 1e3 * min(times[False]), "numba_ms": 1e3 * min(times[True])}
    return {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1], **least}


def repeat(layer: torch.nn.Module, inputs: torch.Tensor, calls: int) -> None:
    for _ in range(calls):
        layer(inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    numba.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    work: dict[str, tuple[Callable[[], object], int]] = {}
    rng = np.random.default_rng(0)
    for rows, trees in ((2_000, 20), (100_000, 10)):
        x = rng.standard_normal((rows, 28)).astype(np.float32)
        model = BoostedTreesRegressor(n_estimators=trees, gradient_precision="i16", n_jobs=options.threads)
        work[f"fit of {rows:,} x 28, {trees} trees"] = (partial(model.fit, x, x[:, 0]), 1)
    for size in (576, 4096):
        layer = torch.nn.Sequential(torch.nn.Linear(size, size, bias=False))
        bitplan.apply_plan(layer, bitplan.choose_formats({"0.weight": (size, size)}, "mxfp4"))
        for rows in (1, 16):
            y = torch.randn(rows, size)
            calls = 200 if size == 576 else 10
            work[f"{rows} x {size} x {size} in mxfp4"] = (partial(repeat, layer, y, calls), calls)
    with torch.no_grad():
        for name, (function, calls) in work.items():
            result = time_in_turns(function, options.rounds)
            print(json.dumps({"work": name, "calls": calls, **{key: round(value, 4) for key, value in result.items()}}))
    print(json.dumps({"layer": numba.threading_layer(), "threads": options.threads, "numba": numba.__version__}))


if __name__ == "__main__":
    main()
