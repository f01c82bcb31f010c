"""One total of a search's time from its first steps on: by phases as they were measured, within a factor of two."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from bitplan.base.logs import JsonLog
from bitplan.searching import forecast
from bitplan.searching.goal import no_stage
from bitplan.searching.statistics import steps_of

# Seconds and steps of phases in the order in which they came, on two cores: an instruct model of 134.5 million weights
# beside other work, a llama of 26 million, and Gemma 3 270M, whose vocabulary has 262,144 tokens. The machines were not
# equally fast, or busy with other work: `slow` is what timed steps would have said, the same for steps of all kinds.
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


GEMMA = (
    ("statistics", 183, None),
    ("rounding", 41, 1000),
    ("rounding plans", 137, 267960),
    ("checking", 90, 5),
    ("rounding plans", 100, 267960),
    ("correcting", 29, 1),
    ("rounding plans", 37, 24890),
    ("correcting", 29, 1),
    ("measuring the model", 93, 24),
    ("proving", 197, 36),
)
PRODUCT = 4e-11  # seconds on these cores


def of_llama(width: int, queries: int, keys: int, inner: int, vocabulary: int, blocks: int, slow: float):
    """Shapes of the weights, and seconds of steps for such a model."""
    block = [
        (queries, width),
        (keys, width),
        (keys, width),
        (width, queries),
        (inner, width),
        (inner, width),
        (width, inner),
    ]
    numbers = sum(rows * columns for rows, columns in block)
    seconds = (2 * PRODUCT * numbers, 2 * PRODUCT * vocabulary * width, 2.5e-8 * vocabulary, PRODUCT, 2.5e-4, 8e-10)
    steps = forecast.MeasuredSteps(*(slow * each for each in seconds))
    return [(vocabulary, width), *block * blocks], blocks, steps


@pytest.mark.parametrize(
    ("model", "windows", "context", "measured"),
    [
        (of_llama(576, 576, 192, 1536, 49152, 30, 2.5), 8, 128, SMOLLM2),
        (of_llama(384, 384, 384, 1024, 8192, 12, 1.0), 32, 512, LLAMA),
        (of_llama(640, 1024, 256, 2048, 262144, 18, 0.4), 32, 512, GEMMA),
    ],
    ids=["a model of 135M, short windows", "a llama of 26M", "a vocabulary of 262,144"],
)
def test_the_whole_time_is_told_from_the_first_steps_on(model, windows, context, measured, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: clock.now)
    labels = []

    @contextmanager
    def stage(_what, _total):
        yield lambda _count, label: labels.append((clock.now, label))

    shapes, blocks, steps = model
    runner = SimpleNamespace(runner=SimpleNamespace(blocks=[None] * blocks))
    count_of_steps = steps_of(runner, [torch.zeros(context)] * windows, 0)
    text = {"statistics": windows * context, "watched": min(16384, windows * context), "checks": 4 * context}
    text |= {"proof": 12 * context, "windows": 12, "steps": count_of_steps}
    expected = forecast.expected_phases(shapes, blocks, text, 12, steps)
    searched = forecast.PhaseClock(stage)
    clock.now += 7.0  # of opening the model and cutting the text
    estimates = [searched.expect(expected)]
    for what, seconds, number in measured:
        count = number or count_of_steps
        with searched(what, count) as advance:
            for step in range(10):
                clock.now += seconds / 10
                advance(count * (step + 1) // 10 - count * step // 10, "a weight")
                estimates.append(searched.seconds_in_all(what))
    whole = 7.0 + sum(seconds for _, seconds, _ in measured)
    assert all(whole / 2 < each < 2 * whole for each in estimates), expected
    assert estimates[-1] == pytest.approx(whole, rel=0.15)
    assert labels[0][1] == f"a weight; the search takes about {estimates[1] / 60:.0f} min"


def test_steps_are_logged_once_a_second_and_the_last_of_a_phase_always(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: clock.now)
    searched = forecast.PhaseClock(no_stage)
    with JsonLog(tmp_path / "log", b'{"phase"', noun="log") as searched.log, searched("proving", 6) as advance:
        for seconds in (0.0, 0.5, 0.6, 0.1, 0.1, 0.1):
            clock.now += seconds
            advance(1, "a plan")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["done"], line["seconds"]) for line in lines] == [(1, 0.0), (3, 1.1), (6, 1.4)]
    assert lines[0] == {
        "phase": "proving", "done": 1, "of": 6, "at": "a plan", "seconds": 0.0, "expected_seconds": None,
    }  # fmt: skip


def test_rounding_is_timed_in_a_format_that_holds_the_weight():
    weights = {"narrow": torch.randn(96, 64), "wide": torch.randn(64, 256)}
    subject = SimpleNamespace(
        sites={name: SimpleNamespace(name=name, shape=tuple(weight.shape)) for name, weight in weights.items()},
        weight=weights.__getitem__,
        numbers_with=lambda name: weights[name].numel(),
    )
    column, cell = forecast.rounding_steps(subject, ["q2_k_gguf", "mxfp4"])  # blocks of 256 do not divide 64
    assert column + cell > 0
    del subject.sites["wide"]
    assert forecast.rounding_steps(subject, ["q2_k_gguf"]) == (0.0, 0.0)
