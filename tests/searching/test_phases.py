"""One total of a search's time from its first steps on: by phases as they were measured, within a factor of two."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from bitplan.searching import phases
from bitplan.searching.gather.passes import steps_of
from bitplan.searching.prepare import SearchText
from bitplan.searching.run import Searcher

# Seconds and steps of phases in the order in which they came, on two cores: an instruct model of 134.5 million weights
# beside other work, and a llama of 26 million.
SMOLLM2 = (
    ("statistics", 64, None),
    ("rounding", 88, 1000),
    ("rounding plans", 340, 134331),
    ("checking", 61, 5),
    ("rounding plans", 265, 134331),
    ("correcting", 20, 1),
    ("rounding plans", 130, 29281),
    ("correcting", 20, 1),
    ("rounding plans", 30, 8287),
    ("correcting", 11, 1),
    ("measuring the model", 45, 24),
    ("proving", 64, 24),
)
LLAMA = (
    ("statistics", 108, None),
    ("rounding", 33, 1000),
    ("rounding plans", 90, 26000),
    ("checking", 28, 7),
    ("rounding plans", 90, 26000),
    ("correcting", 4, 1),
    ("rounding plans", 40, 10000),
    ("correcting", 4, 1),
    ("measuring the model", 11, 24),
    ("proving", 41, 48),
)


@pytest.mark.parametrize(
    ("numbers", "blocks", "windows", "context", "measured"),
    [(134_515_008, 30, 8, 128, SMOLLM2), (26_000_000, 12, 32, 512, LLAMA)],
    ids=["a model of 135M, short windows", "a llama of 26M"],
)
def test_the_whole_time_is_told_from_the_first_steps_on(numbers, blocks, windows, context, measured, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(phases.time, "perf_counter", lambda: clock.now)
    labels = []

    @contextmanager
    def stage(_what, _total):
        yield lambda _count, label: labels.append((clock.now, label))

    def text(count):
        return [torch.zeros(context, dtype=torch.int64)] * count

    sites = {"weight": SimpleNamespace(shape=(numbers,))}
    subject = SimpleNamespace(numbers=numbers, sites=sites, runner=SimpleNamespace(blocks=[None] * blocks))
    cut = SearchText(text(windows), text(4), text(12), 1)
    searcher = Searcher(subject, cut, ["a format"] * 12, None, stage)
    estimates = []
    for what, seconds, steps in measured:
        count = steps or steps_of(subject, cut.statistics, 0)
        with searcher.stage(what, count) as advance:
            for step in range(10):
                clock.now += seconds / 10
                advance(count * (step + 1) // 10 - count * step // 10, "a weight")
                estimates.append(searcher.clock.seconds_in_all(what))
    whole = sum(seconds for _, seconds, _ in measured)
    assert all(whole / 2 < each < 2 * whole for each in estimates)
    assert estimates[-1] == pytest.approx(whole, rel=0.15)
    assert labels[0][1] == f"a weight; the search takes about {estimates[0] / 60:.0f} min"
