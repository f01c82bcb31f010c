"""The demo's second and third part: the errors of formats in each layer, and a plan from them within a budget.

Every layer gets eight bits, or four if it can bear it: `choose_low_set` takes layers in the order of output error per
byte saved, until the sum of their errors reaches the budget. Norms and embeddings follow rules. The manifest states the
same decision as rules, for `bitplan plan` and `bitplan check`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bitplan.cli.demo.training import BLOCKS, Advance
from bitplan.formats import get_format
from bitplan.measure.calibration import CalibrationResult
from bitplan.plan import Manifest, Plan
from bitplan.plan.plan import Choice, Planned, combine
from bitplan.plan.selective.low_set import Candidate, choose_low_set
from bitplan.runtime.selective.run_calibration import run_calibration

EIGHT_BITS = ("int8_row", "fp8_e4m3_row")
FOUR_BITS = ("q4_0_gguf", "nvfp4", "mxfp4")
BUDGET_PER_LAYER = 0.02  # relative output error, on average over the layers; four bits for all would give twice as much
# Tensors that need no calibration: they are small, and the text goes in and out through them.
RULES = (
    {"regex": r"(.*\.)?norm(_in|_mid)?\.(weight|bias)", "format": "float32", "role": "norm"},
    {"regex": r"(tokens|places|head)\.weight", "format": "bfloat16", "role": "embed"},
)
LAYER_ROLES = {"qkv": "attn", "out": "attn", "up": "mlp_weight", "down": "mlp_weight"}


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


def choose_formats(errors: Mapping[str, Mapping[str, float]], shapes: Mapping[str, tuple[int, ...]]) -> Plan:
    """A plan for all tensors: rules for those around the layers, the budget for the layers."""
    weights = {f"{layer}.weight": dict(row) for layer, row in errors.items()}
    eight = {name: _best(row, EIGHT_BITS) for name, row in weights.items()}
    four = {name: _best(row, FOUR_BITS) for name, row in weights.items()}
    budget = BUDGET_PER_LAYER * len(weights)
    saved = {
        name: get_format(eight[name]).nbytes(shapes[name]) - get_format(four[name]).nbytes(shapes[name])
        for name in weights
    }
    candidates = [Candidate(name, row[four[name]], saved[name]) for name, row in weights.items()]
    low = choose_low_set(candidates, budget=budget)
    policy = {}
    for name, row in weights.items():
        fmt = four[name] if name in low.names else eight[name]
        reason = f"output error {row[four[name]]:.3g} in {four[name]}, {row[eight[name]]:.2g} in {eight[name]}; "
        evidence = {f"error in {fmt}": error for fmt, error in row.items()} | {"error budget": budget}
        policy[name] = Choice(fmt, reason + low.reasons[name].replace("cost", "error"), evidence)
    around = {name: shape for name, shape in shapes.items() if name not in weights}
    rules = Manifest.from_document({"version": 1, "patterns": list(RULES)}, where="the demo's rules").resolve(around)
    plan = combine(shapes, rules=rules, policy=policy)
    return Plan(
        {
            name: Planned(entry.choice, entry.shape, entry.role or _role(name), entry.part)
            for name, entry in plan.entries.items()
        }
    )


def manifest_of(plan: Plan) -> dict[str, Any]:
    """The plan as rules, which `bitplan plan` resolves to the same formats."""
    ruled = {name for name in plan if any(re.fullmatch(rule["regex"], name) for rule in RULES)}
    groups: dict[tuple[str, str], list[str]] = {}
    for name, entry in plan.entries.items():
        if name not in ruled:
            groups.setdefault((entry.choice.format, entry.role), []).append(name)
    decided = [
        {"regex": "|".join(re.escape(name) for name in names), "format": fmt, "role": role}
        for (fmt, role), names in sorted(groups.items())
    ]
    return {"version": 1, "model": "bitplan demo", "patterns": [*RULES, *decided]}


def worst_and_best(errors: Mapping[str, Mapping[str, float]], fmt: str, count: int) -> list[tuple[str, float]]:
    """The layers with the largest errors in a format, then those with the smallest."""
    ordered = sorted(((name, row[fmt]) for name, row in errors.items()), key=lambda pair: -pair[1])
    return ordered if len(ordered) <= 2 * count else [*ordered[:count], *ordered[-count:]]


def _best(row: Mapping[str, float], formats: tuple[str, ...]) -> str:
    return min(formats, key=lambda fmt: row[fmt])


def _role(name: str) -> str:
    return LAYER_ROLES.get(name.split(".")[-2], "other")
