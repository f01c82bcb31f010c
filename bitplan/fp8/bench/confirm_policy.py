"""Confirm a policy on a small model, one token count after the other: what `bitplan fp8 confirm` does.

For each count the policy is applied to a fresh model without a trial, which gives the plan, and to another model with
`confirm`, which times whole blocks. A plan is turned down where it has FP8 in a block and the block stays BF16; a plan
of BF16 cannot be turned down. If memory runs out outside the trial, that count ends and the others go on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bitplan.base.documents import short
from bitplan.base.paired_timing import Stopwatch, is_out_of_memory
from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.bench.confirm import SmallModel
from bitplan.fp8.bench.report_log import fingerprint_of
from bitplan.fp8.find_linears import block_of
from bitplan.fp8.layer_settings import Fp8Recipe, Fp8UnavailableError, require_fp8
from bitplan.fp8.policy.policy import Policy
from bitplan.fp8.policy.token_ranges import BandPolicy
from bitplan.fp8.policy.vocabulary import UNMEASURED, Fp8Error, is_count
from bitplan.fp8.summary import AppliedFp8, Confirmed, LayerRow

MOST_TOKENS = 2**24  # in one step of one GPU; a larger number is a typing error


@dataclass(frozen=True)
class BlockTiming:
    """How blocks are timed: launched one by one or as CUDA graphs, compiled or not, and by which recipe, if any."""

    timing: str = "eager"
    compiled: bool = False
    recipe: str | None = None
    tp: int = 1

    def __post_init__(self) -> None:
        if self.recipe is not None:
            Fp8Recipe(self.recipe)  # raises for an unknown recipe


@dataclass(frozen=True)
class BlockResult:
    """One make of block at one count: of its `layers`, the plan put `planned` in FP8, and `fp8_layers` stay in FP8."""

    block: str
    answer: str
    taken: str
    planned: int
    fp8_layers: int
    layers: int
    reason: str
    speedup: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def turned_down(self) -> bool:
        return self.planned > 0 and self.taken == "bf16"


@dataclass(frozen=True)
class CountResult:
    """One token count, run as `sequences` of `length`. `failure` where memory ran out and nothing was confirmed."""

    tokens: int
    sequences: int
    length: int
    blocks: tuple[BlockResult, ...] = ()
    planned: AppliedFp8 | None = None
    applied: AppliedFp8 | None = None
    failure: str | None = None

    @property
    def turned_down(self) -> bool:
        return self.failure is not None or any(block.turned_down for block in self.blocks)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Why the policy knows no layer at this count; empty if it knows at least one."""
        rows = self.planned.rows if self.planned else ()
        if any(row.precision != "bf16" or row.answer != UNMEASURED for row in rows):
            return ()
        return tuple(dict.fromkeys(row.reason for row in rows))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `planned` has each layer with the policy's reason, `layers` what became of it."""
        rows = {
            "planned": [asdict(row) for row in self.planned.rows] if self.planned else [],
            "layers": [asdict(row) for row in self.applied.rows] if self.applied else [],
            "notes": list(self.applied.notes) if self.applied else [],
        }
        run_as = {"tokens": self.tokens, "sequences": self.sequences, "length": self.length}
        outcome = {"turned_down": self.turned_down, "unknown": list(self.unknown), "failure": self.failure}
        return run_as | outcome | {"blocks": [asdict(block) for block in self.blocks]} | rows


def require_device(name: str, policy: Policy, recipe: str | None = None) -> torch.device:
    """The device to confirm on, before anything is built: one with FP8, and the GPU that the policy is of."""
    if name == "cuda" and not torch.cuda.is_available():
        raise Fp8UnavailableError(
            "torch sees no CUDA GPU, so there is nothing to confirm; run on the GPU that will train "
            "(the CPU emulates FP8, to try the command)",
            settings={"device": "cpu"},
        )
    device = torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    require_fp8(device, () if recipe is None else (recipe,))
    if device.type == "cuda" and isinstance(policy, BandPolicy):
        policy.require_same_gpu(fingerprint_of(device))
    return device


def confirm_policy(
    policy: Policy,
    model: SmallModel,
    counts: Sequence[int],
    device: torch.device,
    trial: BlockTiming | None = None,
    *,
    stopwatch: Stopwatch | None = None,
    on_count: Callable[[int], None] = lambda _: None,
) -> list[CountResult]:
    """A result for every token count."""
    wrong = [count for count in counts if not is_count(count) or count > MOST_TOKENS]
    if wrong or not counts:
        got = repr(wrong[0]) if wrong else "none"
        raise Fp8Error(
            f"token counts must be integers from 1 to {MOST_TOKENS} (sequence length x micro batch size), got {got}"
        )
    results = []
    for count in counts:
        results.append(_confirm_count(policy, model, count, device, trial or BlockTiming(), stopwatch))
        on_count(count)
    return results


def _confirm_count(
    policy: Policy,
    model: SmallModel,
    tokens: int,
    device: torch.device,
    trial: BlockTiming,
    stopwatch: Stopwatch | None,
) -> CountResult:
    run_as = model.example_shape(tokens)
    asked: dict[str, Any] = {"tokens": tokens, "recipe": trial.recipe, "tp": trial.tp, "emulate": device.type == "cpu"}
    try:
        planned = apply_fp8(model.build(device), policy, **asked)
        if trial.compiled:
            torch.compiler.reset()  # after graphs of other counts torch would make shapes dynamic, or stop compiling
        applied = apply_fp8(
            model.build(device),
            policy,
            **asked,
            confirm=True,
            confirm_compiled=trial.compiled,
            confirm_timing=trial.timing,
            example=model.example(tokens, device),
            stopwatch=stopwatch,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failure = f"{model.blocks} blocks did not fit into memory: {short(' '.join(str(error).split()), 200)}"
        return CountResult(tokens, *run_as, failure=failure)
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return CountResult(tokens, *run_as, _block_results(planned, applied), planned, applied)


def _block_results(planned: AppliedFp8, applied: AppliedFp8) -> tuple[BlockResult, ...]:
    """A result for each make of block, also for blocks in which nothing could be timed."""
    before, after = _by_block(planned.rows), _by_block(applied.rows)
    confirmed = {each.block: each for each in applied.confirmed}
    first: dict[tuple[object, ...], str] = {}
    for block, rows in before.items():
        first.setdefault(tuple((row.path[len(block) :], row.shape, row.precision) for row in rows), block)
    return tuple(_block_result(block, before[block], after[block], confirmed.get(block)) for block in first.values())


def _block_result(
    block: str, before: list[LayerRow], after: list[LayerRow], confirmed: Confirmed | None
) -> BlockResult:
    counts = (_fp8_layers(before), _fp8_layers(after), len(after))
    if confirmed is None:
        reasons = "; ".join(dict.fromkeys(row.reason for row in after))
        return BlockResult(block, UNMEASURED, "bf16", *counts, f"not timed, no layer can be FP8: {reasons}")
    figures = (confirmed.speedup, confirmed.low, confirmed.high)
    return BlockResult(block, confirmed.answer, confirmed.taken, *counts, confirmed.reason, *figures)


def _by_block(rows: Sequence[LayerRow]) -> dict[str, list[LayerRow]]:
    """Layers by their block, as confirming names it."""
    blocks: dict[str, list[LayerRow]] = {}
    for row in rows:
        blocks.setdefault(block_of(row.path) or "the model", []).append(row)
    return blocks


def _fp8_layers(rows: Sequence[LayerRow]) -> int:
    return sum(row.precision != "bf16" for row in rows)
