"""How much memory a search takes, and what it keeps there so that this stays under a limit.

Three phases come one after the other, each beside what is in memory already and the weights outside of blocks:

    statistics   a block with its graph, the states of some tokens, sums of its inputs; then logits of some tokens
    rounding     on each thread the copies of some rows of a weight, the factor of its inputs, weights read last
    measuring    a block by a plan, states, logits of the model itself that are kept, and of some tokens of both

Fewer threads, fewer rows at a time and fewer logits that are kept change how long a search takes, and no plan beyond
what the order of sums does. What is left is counted here, tensor by tensor; the factors are how many copies torch has
at a time, counted in the code that makes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bitplan.packed.language.perplexity import MADE_AT_ONCE
from bitplan.packed.machine import free_memory
from bitplan.searching.gather.blocks import BATCH, LOGITS_AT_ONCE
from bitplan.searching.gather.damage import MOST_NUMBERS, MOST_WEIGHTS, ROUNDED_AT_ONCE
from bitplan.searching.gather.passes import AT_ONCE, MOST_OUTPUTS
from bitplan.searching.gather.plan_meter import KEPT_LOGITS_BYTES
from bitplan.searching.gather.searched_model import SearchSubject
from bitplan.searching.goal import SearchError

LOADED_LATER = 350 * 10**6  # compiled loops, the solver, allocators
LEFT_FREE = 0.1  # of free memory, where nobody gives a limit
ROUNDING_COPIES, LOGITS_COPIES, GRAPH_COPIES, FACTOR_COPIES, STATES_COPIES, HEAD = 13, 7, 4, 10, 3, 64
LEAST_ROUNDED = 2**21


@dataclass(frozen=True)
class MemoryUse:
    """What a search keeps in memory: threads that round, numbers that each rounds at once, bytes of kept logits."""

    needed: int
    limit: int
    threads: int
    rounded_at_once: int
    kept_logits: int


def within_memory(
    subject: SearchSubject, statistics: Sequence[Tensor], measured: Sequence[Tensor], limit: int | None
) -> MemoryUse:
    """The fastest way that stays under a limit, which is of the whole process; what cannot is refused.

    statistics, measured   windows of the text that each phase has at once
    limit                  bytes; what is free now, less a tenth, unless given
    """
    resident = _resident()
    most = resident + int((1 - LEFT_FREE) * free_memory()) if limit is None else limit
    base = resident + LOADED_LATER + _outside(subject)
    gathering = base + _gathering(subject, statistics)
    threads, rounded = max(1, torch.get_num_threads()), ROUNDED_AT_ONCE
    while base + _rounding(subject, threads, rounded) > most and (threads > 1 or rounded > LEAST_ROUNDED):
        threads, rounded = (threads - 1, rounded) if threads > 1 else (1, rounded // 2)
    measuring = base + _measuring(subject, measured)
    on_cpu = subject.device.type == "cpu"  # a GPU computes logits in less time than it takes to store them
    asked = sum(map(len, measured)) * subject.runner.vocabulary * 4
    kept = max(0, min(KEPT_LOGITS_BYTES, asked, most - measuring)) if on_cpu else 0
    needed = max(gathering, base + _rounding(subject, threads, rounded), measuring + kept)
    if needed > most:
        said = "were given" if limit is not None else "are free"
        raise SearchError(
            f"{subject.where}: a search takes about {needed / 1e9:.1f} GB of memory, and {most / 1e9:.1f} GB {said}; "
            "end other programs, give shorter windows (`context`), more memory, or a machine that has it"
        )
    return MemoryUse(needed, most, threads, rounded, kept)


def _resident() -> int:
    """What this process has in memory now; where the system does not say, nothing."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * 4096 if pages.is_file() else 0


def _copied(parameter: Tensor) -> int:
    """Bytes that a parameter in float32 takes beside the model."""
    return 0 if parameter.dtype == torch.float32 and not parameter.is_meta else 4 * parameter.numel()


def _outside(subject: SearchSubject) -> int:
    return sum(map(_copied, subject.runner.parameters_outside()))


def _in_largest_block(subject: SearchSubject) -> int:
    """Numbers of the parameters of a block."""
    return max((sum(map(Tensor.numel, each.parameters())) for each in subject.runner.blocks), default=0)


def _width(subject: SearchSubject) -> int:
    return next((each.embedding_dim for each in subject.model.modules() if isinstance(each, nn.Embedding)), 1)


def _gathering(subject: SearchSubject, windows: Sequence[Tensor]) -> int:
    runner, width, length = subject.runner, _width(subject), max(map(len, windows))
    states = 4 * STATES_COPIES * min(AT_ONCE, sum(map(len, windows))) * width
    layers = [[each for each in block.modules() if isinstance(each, nn.Linear)] for block in runner.blocks]
    sums = max((sum(_sums(each) for each in block) for block in layers), default=0) + 4 * width**2
    through = max((sum(each.in_features + each.out_features for each in block) for block in layers), default=0)
    graph = 4 * BATCH * (GRAPH_COPIES * through + 3 * length * max(1, width // HEAD))
    tokens = length * len(windows) if not runner.blocks else min(length, max(1, LOGITS_AT_ONCE // runner.vocabulary))
    logits = 4 * LOGITS_COPIES * tokens * runner.vocabulary
    largest = max(math.prod(site.shape) for site in subject.sites.values())
    hashed = 2 * 4 * largest  # while it is looked at whether the file's order of rows is the model's
    return max(states + sums + max(4 * _in_largest_block(subject) + graph, logits), hashed)


def _sums(layer: nn.Linear) -> int:
    outputs = layer.out_features if layer.out_features <= MOST_OUTPUTS else 0
    return 4 * (layer.in_features**2 + outputs**2)


def _rounding(subject: SearchSubject, threads: int, at_once: int) -> int:
    shapes = [site.shape for site in subject.sites.values()]
    largest = max(map(math.prod, shapes))
    widest = max(shape[-1] for shape in shapes)
    copied = any(_copied(each) for each in subject.model.parameters())
    weights = min(MOST_WEIGHTS * largest, MOST_NUMBERS) if copied else 0
    encoded = 2 * largest  # the parts of one, and all of them together
    return threads * 4 * (ROUNDING_COPIES * min(largest, at_once) + weights + FACTOR_COPIES * widest**2) + encoded


def _measuring(subject: SearchSubject, windows: Sequence[Tensor]) -> int:
    runner, tokens = subject.runner, sum(map(len, windows))
    outside = sum(map(Tensor.numel, runner.parameters_outside()))
    through = 4 * BATCH * GRAPH_COPIES * _width(subject) * 8
    pieces = 6 * 4 * min(MADE_AT_ONCE, max(map(len, windows)) * runner.vocabulary)
    return 4 * (outside + 2 * _in_largest_block(subject) + STATES_COPIES * tokens * _width(subject)) + through + pieces
