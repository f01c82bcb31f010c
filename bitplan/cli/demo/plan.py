"""The demo's second and third part: what formats do to each layer's output, and a search for the best plan of a size.

The manifest is the plan as rules, for `bitplan plan` and `bitplan check`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bitplan.cli.demo.training import BLOCKS, Advance
from bitplan.cli.show import progress
from bitplan.measure.calibration import CalibrationResult
from bitplan.plan import Plan
from bitplan.runtime.selective.run_calibration import run_calibration
from bitplan.searching.goal import Goal
from bitplan.searching.result import SearchResult
from bitplan.searching.run import search

EIGHT_BITS = ("int8_row", "fp8_e4m3_row")
FOUR_BITS = ("q4_0_gguf", "nvfp4", "mxfp4")
CANDIDATES = ("mxfp4", "nvfp4", "q4_0_gguf", "int8_row", "bfloat16")
GOAL = Goal(bits=5.0)


def calibrate(
    model: nn.Module, batches: list[Tensor], output: Path, *, device: str, advance: Advance
) -> CalibrationResult:
    """Relative output errors of every layer and block in the candidates; calibration.json grows with every pass."""
    return run_calibration(
        model,
        batches,
        formats=(*EIGHT_BITS, *FOUR_BITS),
        samples=len(batches),
        cache=output / "calibration.json",
        blocks=BLOCKS,
        device=device,
        progress=lambda _done, _total, what: advance(1, what),
    )


def passes(batches: int) -> int:
    """How often `calibrate` advances."""
    return batches * (1 + len(EIGHT_BITS) + len(FOUR_BITS))


def find_plan(model: nn.Module, windows: Tensor, held_out: Tensor, output: Path, *, count: int) -> SearchResult:
    """The best plan within the goal: plan.json, evidence.json and front.json."""
    return search(
        model,
        list(windows),
        goal=GOAL,
        held_out=list(held_out),
        formats=CANDIDATES,
        windows=count,
        out=output,
        stage=lambda what, total: progress(f"3/6 {what}", total),
    )


def manifest_of(plan: Plan) -> dict[str, Any]:
    """The plan as rules: what `bitplan plan` resolves to the same formats."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, entry in plan.entries.items():
        groups.setdefault((entry.choice.format, entry.role), []).append(name)
    rules = [
        {"regex": "|".join(re.escape(name) for name in names), "format": fmt, "role": role}
        for (fmt, role), names in sorted(groups.items())
    ]
    return {"version": 1, "model": "bitplan demo", "patterns": rules}


def worst_and_best(errors: Mapping[str, Mapping[str, float]], fmt: str, count: int) -> list[tuple[str, float]]:
    """The layers with the largest errors in a format, then those with the smallest."""
    ordered = sorted(((name, row[fmt]) for name, row in errors.items()), key=lambda pair: -pair[1])
    return ordered if len(ordered) <= 2 * count else [*ordered[:count], *ordered[-count:]]
