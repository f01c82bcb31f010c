"""The layer benchmark: every layer of a model at every token count, BF16 and FP8 in turns, into a report.

A case (layer and logical tokens) is timed in one or more ways: eager and as a CUDA graph, and experts under uniform and
Zipf routing. One way is one set of arms that take turns (`paired_timing`), each a whole forward and backward of the
module with random inputs and random gradients:

    bf16                      plain norm and linear, or the grouped product in BF16
    fp8                       all three products in FP8
    fprop, dgrad, wgrad       one product in FP8, the other two in BF16: its own gain, with its casts

The BF16 row of a product is the same BF16 module, so a report's pair for `wgrad` says what switching wgrad alone does.
Weights are cast anew in every step, as where each step has one micro batch; with more of them FP8 gains more than here.

Rows go into a `ReportLog` as they come. A run that is started again skips the ways that the log has; if it was killed
between the rows of one way, the missing rows are timed anew and no longer count as taken in turns. A case that runs out
of memory is a row, and the run goes on. `modules` builds what is timed.

Under torchrun several processes share the layers (`join_ranks`). Ranks are numbered as in Megatron: neighbours share a
tensor-parallel group. For experts, neighbours share an expert-tensor-parallel group, and the experts are spread over
these groups. With more ranks than a group needs there are several groups, all busy with the same case, as in training.
Agreement goes over gloo on the CPU, so that it is not in the GPU's queue.

`BenchOptions` are LoongForge's TE_LAYER_PERF_* variables with its defaults, and options of ours.

The environment is passed as a mapping, so that tests need not set variables. An unknown variable with our prefix is
refused: with a misspelt name, the default would be measured and nobody would notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bitplan.base.errors import did_you_mean
from bitplan.base.paired_timing import ERROR, OK, OOM, Arm, Peers, Stopwatch, Timed, time_in_turns
from bitplan.fp8.layer_settings import Fp8Recipe, GemmChoice
from bitplan.fp8.policy.layers import Case, Parallel
from bitplan.fp8.policy.report import ROUTINGS, TIMINGS, ReportLog, Row
from bitplan.fp8.policy.vocabulary import (
    DEFAULT_RECIPE,
    DEFAULT_THRESHOLD,
    GROUPED_KINDS,
    MODULE,
    PRECISIONS,
    PRODUCTS,
    Fp8Error,
)
from bitplan.fp8.recipes import BF16, recipe_fault

PREFIX = "TE_LAYER_PERF_"
# LoongForge does not define its automatic sweep. Ours doubles from where FP8 rarely pays to where it nearly always
# does.
AUTO_SWEEP = tuple((length, 1) for length in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768))


class BenchOptionsError(Fp8Error):
    """A TE_LAYER_PERF_* variable that is unknown, or has a wrong value."""


@dataclass(frozen=True)
class BenchOptions:
    """The variables, in LoongForge's order, then what no variable sets. Sizes of None: the model's own."""

    omni_config_path: str | None = None
    tp_size: int | None = None
    ep_size: int | None = None
    etp_size: int | None = None
    precisions: tuple[str, ...] = PRECISIONS
    fp8_recipe: str = DEFAULT_RECIPE
    warmup: int = 10
    iters: int = 10
    report_path: str | None = None
    fp8_policy_path: str | None = None
    speedup_threshold: float = DEFAULT_THRESHOLD
    shape_sweep: tuple[tuple[int, int], ...] = AUTO_SWEEP
    fp8: str = "e4m3"
    timings: tuple[str, ...] = TIMINGS
    routings: tuple[str, ...] = ROUTINGS
    products_apart: bool = True
    part: str | None = None
    device: str = "cuda"
    shapes: str | None = None

    def report_file(self) -> Path:
        """Where the report goes: beside the policy, if only that has a path."""
        if not self.report_path and not self.fp8_policy_path:
            raise BenchOptionsError("no report path (nor TE_LAYER_PERF_REPORT_PATH)", settings={"report_path": "FILE"})
        return Path(self.report_path or f"{self.fp8_policy_path}.report.jsonl")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> BenchOptions:
        """The options that the variables set; an empty variable counts as not set."""
        values = {}
        for name in sorted(environment):
            if not name.startswith(PREFIX):
                continue
            key = name.removeprefix(PREFIX).lower()
            if key not in _READERS:
                hint = did_you_mean(name, [PREFIX + known.upper() for known in _READERS])
                raise BenchOptionsError(f"{name} is not a variable of the benchmark{hint}; unset {name}")
            if environment[name].strip():
                values[key] = read_option(key, environment[name].strip(), name)
        return cls(**values)


def read_option(key: str, text: str, name: str) -> Any:
    """The value of an option that a variable can set, from its text; an error calls the option `name`."""
    return _READERS[key](text, name)


def parse_sweep(text: str, name: str = "the sweep") -> tuple[tuple[int, int], ...]:
    """Read `1024x1,4096x2`: pairs of sequence length and micro batch size, as many as wanted."""
    shapes = []
    for item in text.split(","):
        length, _, batch = item.strip().lower().partition("x")
        if not (_is_count(length) and _is_count(batch)):
            raise BenchOptionsError(
                f"{name} must be LENGTHxBATCH pairs such as '1024x1,4096x2', each from 1, got {item.strip()!r}"
            )
        shapes.append((int(length), int(batch)))
    return tuple(shapes)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12 and int(text) >= 1


def _size(text: str, name: str) -> int | None:
    """Read a parallel size from text; 0 means that of the model, None, as in LoongForge."""
    return _whole_number(text, name, 0) or None


def _whole_number(text: str, name: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= least):
        raise BenchOptionsError(f"{name} must be a whole number from {least}, got {text!r}")
    return int(text)


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise BenchOptionsError(f"{name} must be a number above 0, got {text!r}")
    return value


def _precisions(text: str, name: str) -> tuple[str, ...]:
    named = tuple(item.strip().lower() for item in text.split(","))
    if not set(named) <= set(PRECISIONS) or len(set(named)) != len(named):
        raise BenchOptionsError(f"{name} must be 'bf16,fp8' or one of the two, got {text!r}")
    return tuple(precision for precision in PRECISIONS if precision in named)


def _recipe(text: str, name: str) -> str:
    if fault := recipe_fault(text, name):
        raise BenchOptionsError(fault)
    return text


_READERS: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("omni_config_path", "report_path", "fp8_policy_path"), lambda text, _: text),
    **dict.fromkeys(("tp_size", "ep_size", "etp_size"), _size),
    "precisions": _precisions,
    "fp8_recipe": _recipe,
    "warmup": partial(_whole_number, least=0),
    "iters": partial(_whole_number, least=1),
    "speedup_threshold": _number,
    "shape_sweep": parse_sweep,
}


# ---- ranks -----------------------------------------------------------------------------------------------------------


_SEVERITY = (OK, OOM, ERROR)


@dataclass(frozen=True)
class ParallelGroups:
    """The groups of this rank; None for a group of one."""

    tp: Any = None
    ep: Any = None
    etp: Any = None


@dataclass(frozen=True)
class BenchRanks:
    """This process among the others: its rank and its groups."""

    first: bool
    groups: ParallelGroups
    peers: Peers
    count: int = 1

    def share(self, value: Any) -> Any:
        """Give every rank the first rank's value."""
        if self.count == 1:
            return value
        shared = [value if self.first else None]
        dist.broadcast_object_list(shared, src=0, group=self.peers.group)  # type: ignore[attr-defined]
        return shared[0]


class RankPeers(Peers):
    """The other ranks, with which this one agrees on failures and times."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def worst(self, status: str) -> str:
        severity = torch.tensor([_SEVERITY.index(status)])
        dist.all_reduce(severity, op=dist.ReduceOp.MAX, group=self.group)
        return _SEVERITY[int(severity)]

    def slowest(self, samples_ms: Sequence[float]) -> list[float]:
        times_ms = torch.tensor(list(samples_ms), dtype=torch.float64)
        dist.all_reduce(times_ms, op=dist.ReduceOp.MAX, group=self.group)
        return [float(time_ms) for time_ms in times_ms]


@contextmanager
def join_ranks(count: int, parallel: Parallel, device: torch.device) -> Iterator[BenchRanks]:
    """A context that yields the groups of this process; a single process joins nothing."""
    if count == 1:
        yield BenchRanks(True, ParallelGroups(), Peers())
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    is_first_use = not dist.is_initialized()
    if is_first_use:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        peers = RankPeers(dist.new_group(backend="gloo"))
        expert = parallel.ep * parallel.etp
        tp = _own_group(count, [range(start, start + parallel.tp) for start in range(0, count, parallel.tp)])
        etp = _own_group(count, [range(start, start + parallel.etp) for start in range(0, count, parallel.etp)])
        across = [
            range(start + lane, start + expert, parallel.etp)
            for start in range(0, count, expert)
            for lane in range(parallel.etp)
        ]
        ep = _own_group(count, across)
        yield BenchRanks(dist.get_rank() == 0, ParallelGroups(tp, ep, etp), peers, count)
        dist.barrier(group=peers.group)
    finally:
        if is_first_use:
            dist.destroy_process_group()


def _own_group(count: int, groups: Sequence[range]) -> Any:
    """This rank's group among these; every rank creates all groups, in the same order. None for a group of one."""
    mine = None
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks)) if len(ranks) < count else dist.group.WORLD
        if dist.get_rank() in ranks:
            mine = group
    return mine


# ---- measuring -------------------------------------------------------------------------------------------------------


# Only for the estimate of a dry run: sustained rates of an H100 or H200, and the time to build and compile a case.
_FLOPS_PER_S = 4e14
_BYTES_PER_S = 2e12
_BUILD_S = 1.0
_EAGER_SAMPLE_S = 4.2e-3
_FLUSH_S = 0.3e-3

Builder = Callable[["Way", GemmChoice], Arm]  # what is timed for a way: BF16 where no product is in FP8


@dataclass(frozen=True)
class BenchPlan:
    """What is measured, how often, and how layers are divided; all of it goes into the report's settings."""

    cases: tuple[Case, ...]
    recipe: Fp8Recipe
    options: BenchOptions = field(default_factory=BenchOptions)
    model: str = ""
    parallel: Parallel = field(default_factory=Parallel)
    ranks: int = 1

    def ways(self) -> list[Way]:
        """Every way to time every case, in the order of the run; a layer that occurs twice is timed once."""
        ways: dict[tuple[Any, ...], Way] = {}
        for case in self.cases:
            routings = self.options.routings if case.layer.kind in GROUPED_KINDS else (None,)
            for routing in routings:
                for timing in self.options.timings:
                    way = Way(case, timing, routing)
                    ways.setdefault(way.key, way)
        return list(ways.values())

    def gemms(self) -> tuple[str, ...]:
        """What rows are written for: the whole module, and each product if that was asked for."""
        apart = self.options.products_apart and "fp8" in self.options.precisions
        return (MODULE, *(PRODUCTS if apart else ()))

    def choices(self) -> dict[str, GemmChoice]:
        """The recipes of products in every timed variant, by its name: "bf16", "fp8" or a product."""
        choices = {"bf16": GemmChoice.all(BF16)} if "bf16" in self.options.precisions else {}
        if "fp8" in self.options.precisions:
            choices["fp8"] = GemmChoice.all(self.recipe.name)
            for product in self.gemms()[1:]:
                choices[product] = GemmChoice(**(dict.fromkeys(PRODUCTS, BF16) | {product: self.recipe.name}))
        return choices

    def settings(self) -> dict[str, Any]:
        """The settings that a resumed run must have in common with the first."""
        options = self.options
        settings = {
            "fp8": self.recipe.fp8,
            "turns": options.iters,
            "warmup": options.warmup,
            "precisions": list(options.precisions),
            "timings": list(options.timings),
            "routings": list(options.routings),
            "products_apart": options.products_apart,
            "weight_casts": "every step",
            **asdict(self.parallel),
            "ranks": self.ranks,
            "sweep": [f"{length}x{batch}" for length, batch in options.shape_sweep],
            "part": options.part or "all",
        }
        return settings | ({"shapes": options.shapes} if options.shapes else {})

    def estimated_minutes(self) -> float:
        """Very roughly, how long a run takes on a GPU of the H100's class."""
        return sum(self._seconds(way) for way in self.ways()) / 60

    def _seconds(self, way: Way) -> float:
        if way.case.obstacle is not None:
            return 0.0
        out, width = way.case.layer.shape
        tokens, gemms = way.case.tokens, way.case.layer.num_gemms or 1
        flops, numbers = 6 * tokens * out * width, 12 * (tokens * (out + width) + gemms * out * width)
        call = flops / _FLOPS_PER_S + numbers / _BYTES_PER_S
        sample = max(call, _EAGER_SAMPLE_S) if way.timing == "eager" else call
        return _BUILD_S + len(self.choices()) * (self.options.warmup * call + self.options.iters * (sample + _FLUSH_S))


@dataclass(frozen=True)
class Way:
    """One case that is timed in one way: eager or as a graph, by one routing."""

    case: Case
    timing: str
    routing: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.row(MODULE, "bf16", Timed(ERROR, message="only for its key")).key[:-1]

    @property
    def label(self) -> str:
        how = f", {self.routing}" if self.routing else ""
        layer = self.case.layer
        return f"{layer.part} {layer.kind} {layer.name} at {self.case.tokens} ({self.timing}{how})"

    def row(self, gemm: str, precision: str, timed: Timed, *, padded: int | None = None, in_turns: bool = True) -> Row:
        layer = self.case.layer
        size: dict[str, Any] = dict(layer.question())
        if layer.kind in GROUPED_KINDS:
            size |= {
                "name": layer.name,
                "ep": layer.parallel.ep,
                "topk": layer.moe_router_topk,
                "routing": self.routing,
            }
        return Row(
            **size,
            tokens=self.case.tokens,
            padded_tokens=padded,
            gemm=gemm,
            timing=self.timing,
            precision=precision,
            status=timed.status,
            samples_ms=timed.samples_ms,
            in_turns=timed.in_turns and in_turns,
            peak_bytes=timed.peak_bytes,
            message=timed.message,
        )

    def rows(
        self, plan: BenchPlan, timed: Mapping[str, Timed], *, padded: int | None = None, in_turns: bool = True
    ) -> Iterator[Row]:
        """The report's rows for the timed variants; the BF16 measurement serves every product."""
        for gemm in plan.gemms():
            for precision in plan.options.precisions:
                arm = gemm if precision == "fp8" and gemm != MODULE else precision
                rows = padded if precision == "fp8" else None
                yield self.row(gemm, precision, timed[arm], padded=rows, in_turns=in_turns)


def run_bench(
    plan: BenchPlan,
    log: ReportLog | None,
    builder: Builder,
    stopwatch: Stopwatch,
    *,
    padded_tokens: Callable[[Way], int | None] = lambda _: None,
    peers: Peers | None = None,
    done: Sequence[Sequence[Any]] | None = None,
    on_way: Callable[[Way], None] = lambda _: None,
) -> int:
    """Measure what is not in the log yet, and finish the log; returns the number of ways timed in this run.

    `on_way` is called after each way. In a process that does not write (`log` is None, all but the first under
    torchrun), `done` has the keys that the first process read in its log: all processes must skip the same ways.
    """
    keys = {tuple(key) for key in done} if done is not None else (log.done if log is not None else set())
    timed_now = 0
    for way in plan.ways():
        expected = {row.key for row in way.rows(plan, _nothing(plan))}
        missing = expected - keys
        if missing:
            timed = _time(plan, way, builder, stopwatch, peers)
            timed_now += 1
            timed_at_once = missing == expected
            for row in way.rows(plan, timed, padded=padded_tokens(way), in_turns=timed_at_once):
                if log is not None and row.key in missing:
                    log.append(row)
        on_way(way)
    if log is not None:
        log.finish()
    return timed_now


def _nothing(plan: BenchPlan) -> dict[str, Timed]:
    return {arm: Timed(ERROR, message="only for its key") for arm in plan.choices()}


def _time(plan: BenchPlan, way: Way, builder: Builder, stopwatch: Stopwatch, peers: Peers | None) -> dict[str, Timed]:
    if way.case.obstacle is not None:
        return {arm: Timed(ERROR, message=way.case.obstacle) for arm in plan.choices()}
    arms = {arm: builder(way, gemms) for arm, gemms in plan.choices().items()}
    turns, warmup = plan.options.iters, plan.options.warmup
    return time_in_turns(arms, stopwatch, turns=turns, warmup=warmup, graph=way.timing == "graph", peers=peers)


def count_failures(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows ran out of memory or failed."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.status != OK:
            counts[row.status] = counts.get(row.status, 0) + 1
    return counts
