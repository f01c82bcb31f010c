"""Statistics of a text without a search: what `quantize --text` rounds with, gathered block by block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bitplan.base.folders import scratch_folder
from bitplan.searching.gather.passes import add_windows, steps_of
from bitplan.searching.gather.statistics import EVIDENCE, InputStatistics
from bitplan.searching.prepare import prepare

WINDOWS = 96


def gather_evidence(
    model: str | Path,
    text: str,
    folder: str | Path,
    *,
    windows: int = WINDOWS,
    context: int | None = None,
    device: str | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Path:
    """Write evidence.safetensors of a Hugging Face folder or GGUF into a folder that exists; where it lies comes back.

    windows   how many windows of the text, spread over it; more are better, and cost one pass forward each
    on_step   called after each block with how many steps are done, and of how many
    """
    place = Path(folder)
    subject, cut = prepare(model, None, text, (), context=context, windows=windows, device=device)
    statistics, digests, done = InputStatistics(), subject.digests(), 0
    steps = steps_of(subject, cut.statistics, 0)

    def step(count: int) -> None:
        nonlocal done
        done += count
        if on_step:
            on_step(done, steps)

    while statistics.windows < len(cut.statistics):
        with scratch_folder(place, "sums") as scratch:
            add_windows(subject, cut.statistics, statistics, scratch, step)
            statistics.save(place, {}, digests)
        statistics = InputStatistics.load(place, {})
    return place / EVIDENCE
