"""The kernels of a fit, compiled side by side before its first row is binned; Triton keeps them on disk.

A kernel is compiled once for all tables: its numbers are no constants, and what its pointers point to goes by their
names. Only what a fit needs is compiled: `needed`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

from bitplan.base.loops.launch import INTERPRETED
from bitplan.trees.cuda import binning, kernels, score_kernels
from bitplan.trees.cuda.limits import find_device
from bitplan.trees.objectives import Binary, Multiclass, Objective, SquaredError

# Of pointers, by name; the others point to int64, and `numbers_ptr` of a table to its own type.
KINDS = dict.fromkeys(("bins_ptr", "bytes_ptr", "left_bins_ptr", "missing_ptr"), torch.uint8)
KINDS |= dict.fromkeys(
    ("rows_ptr", "sources_ptr", "left_ptr", "right_ptr", "feature_ptr", "category_ptr", "sets_ptr"), torch.int32
)
KINDS |= dict.fromkeys(("weights_ptr", "grads_ptr", "hess_ptr"), torch.float32)
KINDS |= dict.fromkeys(("gains_ptr", "per_unit_ptr", "numbers_ptr", "limits_ptr", "values_ptr"), torch.float64)
KINDS |= dict.fromkeys(("y_ptr", "scores_ptr", "sample_weights_ptr", "factor_ptr"), torch.float64)
TABLE_KINDS = {"float32": torch.float32, "float64": torch.float64}
GRADIENTS: dict[type[Objective], Any] = {
    SquaredError: score_kernels.squared_error,
    Binary: score_kernels.binary,
    Multiclass: score_kernels.softmax,
}
Needed = tuple[Any, dict[str, Any]]  # a kernel, and its constants and options


def needed(
    objective: Objective, *, precise: bool, kind: int, categories: bool, weighted: bool, stochastic: bool, renews: bool
) -> Iterator[Needed]:
    """The kernels that every round of a fit launches."""
    of_rows = {"PRECISE": precise}
    shared = {"SHARED": kernels.HAS_SHARED_ATOMICS, "TILE": kernels.TILE, "TILES": kernels.TILES}
    yield kernels.judge_features, {**of_rows, "KIND": kind, "HAS_CATEGORIES": categories, **kernels.JUDGE_OPTIONS}
    yield kernels.add_rows, {**of_rows, **shared, **kernels.ADD_OPTIONS}
    yield kernels.part_rows, {**of_rows, "BLOCK": kernels.BLOCK, **kernels.PART_OPTIONS}
    yield kernels.pick_features, {"PICKED": kernels.PICKED, **kernels.PICK_OPTIONS}
    on_leaves = {"BLOCK": kernels.BLOCK, **score_kernels.LEAF_OPTIONS}
    if type(objective) not in GRADIENTS:  # the host has the scores
        yield kernels.lay_out, {"BLOCK": binning.BLOCK, **binning.OPTIONS}
        yield score_kernels.collect_rows, on_leaves
        return
    by_row = {"BLOCK": score_kernels.BLOCK, **score_kernels.OPTIONS}
    yield GRADIENTS[type(objective)], {"WEIGHTED": weighted, **by_row}
    yield score_kernels.find_largest, by_row
    yield score_kernels.enter_floats, {**of_rows, "STOCHASTIC": stochastic, "ALL": True, **by_row}
    yield score_kernels.add_values, on_leaves
    if renews:
        yield score_kernels.sum_leaves, on_leaves
    yield binning.bin_numbers, {"BLOCK": binning.BLOCK, **binning.OPTIONS}


def arguments_of(kernel: Any, constants: dict[str, Any], table: Any) -> list[Any]:
    """What stands for a kernel's pointers and numbers, in their order; `table` is the type of a table's numbers."""
    names = [name for name in kernel.arg_names if name not in constants]
    of_table = {binning.bin_numbers: "numbers_ptr", score_kernels.add_trees: "table_ptr"}
    kinds = KINDS | ({of_table[kernel]: table} if kernel in of_table else {})
    return [kinds.get(name, torch.int64) if name.endswith("_ptr") else 2 for name in names]


def compile_ahead(wanted: list[Needed], table: Any) -> Callable[[], None]:
    """Begin to compile kernels, on threads; what it returns waits until they are there."""
    if INTERPRETED.value:
        return lambda: None
    device = find_device()

    def compile_all() -> None:
        with (
            torch.cuda.device(device),
            ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1)) as pool,
            triton.AsyncCompileMode(pool),
        ):
            for kernel, constants in wanted:
                kernel.warmup(*arguments_of(kernel, constants, table), grid=(1,), **constants)

    beside = ThreadPoolExecutor(1)
    compiled = beside.submit(compile_all)
    beside.shutdown(wait=False)
    return compiled.result
