"""The judgement on a confirmed block, and how its inputs are seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.measure.speed.paired_timing import Timed
from bitplan.plan.fp8.vocabulary import Fp8Error
from bitplan.runtime.fp8.bench.confirm import default_example, judge, seen_inputs


def ok(*samples):
    return Timed("ok", samples, in_turns=True)


EIGHT = ok(*[10.0] * 8)


@pytest.mark.parametrize(
    ("plan", "threshold", "answer"),
    [
        (ok(*[8.0] * 8), 1.0, "win"),
        (ok(*[10.0] * 8), 1.0, "win"),  # an interval that begins on the threshold wins
        (ok(*[10.0] * 8), 1.01, "lose"),
        (ok(*[10.1] * 8), 1.0, "lose"),
        (ok(*[9.0, 11.0] * 4), 1.0, "undecided"),
        (ok(8.0), 1.0, "undecided"),
        (Timed("oom", message="CUDA out of memory"), 1.0, "lose"),
        (Timed("error", message="no kernel"), 1.0, "unmeasured"),
    ],
)
def test_judge(plan, threshold, answer):
    result = judge("layers.0", EIGHT if len(plan.samples_ms) != 1 else ok(10.0), plan, threshold)
    assert result.answer == answer
    assert ("BF16 is kept" in result.reason) == (answer != "win")


def test_bf16_that_cannot_run_confirms_nothing():
    result = judge("layers.0", Timed("oom", message="memory"), ok(*[8.0] * 8), 1.0)
    assert (result.answer, result.speedup) == ("unmeasured", None)
    assert "BF16 could not be run (oom): memory" in result.reason


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.ran = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x, *, skip=False):
        x = self.first(x)
        x = x if skip else self.block(x)
        self.ran = True
        return x


def test_inputs_are_seen_and_the_rest_is_not_run():
    model = Model()
    x = torch.randn(3, 4)
    (args, kwargs) = seen_inputs(model, "block", x)
    assert torch.equal(args[0], model.first(x))
    assert kwargs == {}
    assert not model.ran
    assert not model.block._forward_pre_hooks
    with pytest.raises(Fp8Error, match="the model never ran block on the example"):
        seen_inputs(model, "block", {"x": x, "skip": True})


def test_an_example_for_a_language_model():
    class Config:
        vocab_size = 50
        max_position_embeddings = 64

    model = Model()
    with pytest.raises(Fp8Error, match="does not say its vocab_size; give example="):
        default_example(model, 100)
    model.config = Config()
    ids = default_example(model, 200)["input_ids"]
    assert ids.shape == (4, 50)  # all of them, in as few sequences as fit
    assert int(ids.max()) < 50
