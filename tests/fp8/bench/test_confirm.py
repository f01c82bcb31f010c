"""The verdict on a confirmed block, and how its inputs are seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.base.paired_timing import Timed
from bitplan.fp8.bench.confirm import inputs_without_example, recorded_inputs, verdict_of
from bitplan.fp8.policy.vocabulary import Fp8Error


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
def test_verdicts(plan, threshold, answer):
    result = verdict_of("layers.0", EIGHT if len(plan.samples_ms) != 1 else ok(10.0), plan, threshold)
    assert result.answer == answer
    assert ("BF16 is kept" in result.reason) == (answer != "win")


def test_bf16_that_cannot_run_confirms_nothing():
    result = verdict_of("layers.0", Timed("oom", message="memory"), ok(*[8.0] * 8), 1.0)
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
    (args, kwargs) = recorded_inputs(model, "block", x)
    assert torch.equal(args[0], model.first(x))
    assert kwargs == {}
    assert not model.ran
    assert not model.block._forward_pre_hooks
    with pytest.raises(Fp8Error, match="the model never ran block on the example"):
        recorded_inputs(model, "block", {"x": x, "skip": True})


class Config:
    vocab_size = 50
    max_position_embeddings = 64


def test_a_language_model_is_run_on_tokens_of_its_own():
    model = Model()
    model.config = Config()
    model.forward = lambda input_ids, **_: model.block(input_ids)
    ((ids,), _) = inputs_without_example(model, "block", 4, 200)
    assert ids.shape == (4, 50)  # all of them, in as few sequences as fit
    assert int(ids.max()) < 50


def test_embeddings_tell_the_tokens_of_a_plain_model():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    ((hidden,), _) = inputs_without_example(model, "1", 4, 30)
    assert hidden.shape == (1, 30, 4)
    model.places = nn.Embedding(6, 4)  # as many positions
    assert inputs_without_example(model, "1", 4, 30)[0][0].shape == (5, 6, 4)


def test_a_block_of_one_argument_needs_no_model():
    ((x,), kwargs) = inputs_without_example(Model(), "block", 4, 100)
    assert (x.shape, x.dtype, kwargs) == ((1, 100, 4), torch.float32, {})
    with pytest.raises(Fp8Error, match=r"it fails on numbers of shape \(1, 100, 5\): .*; give example="):
        inputs_without_example(Model(), "block", 5, 100)
    model = Model()
    model.block = nn.Bilinear(4, 4, 4)
    with pytest.raises(Fp8Error, match="the block takes input1, input2; give example="):
        inputs_without_example(model, "block", 4, 100)
