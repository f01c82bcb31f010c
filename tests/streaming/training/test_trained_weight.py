"""A weight's steps have the bits of torch's AdamW, and make nothing anew where the memory is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bitplan.streaming.find_blocks import StreamedParameter
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.training.trained_weight import TrainedWeight, loop_choice

COUNT, SETTINGS, SCRATCH = 2**16, AdamWSettings(lr=0.1), torch.empty(2**16)


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    calls: list[str] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    with Counting():
        yield calls


def opened(dtype: torch.dtype) -> TrainedWeight:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(COUNT).to(dtype))
    return TrainedWeight("w", StreamedParameter("w", parameter, ()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_like_the_one_before_makes_no_tensors(dtype):
    if loop_choice().implementation != "numba":
        pytest.skip(loop_choice().reason)
    weight, gradient, sent = opened(dtype), torch.ones(COUNT, dtype=dtype), torch.empty(COUNT, dtype=dtype)
    weight.step(gradient, SETTINGS, SCRATCH, sent)
    with counted_calls() as calls:
        weight.step(gradient, SETTINGS, SCRATCH, sent)
    assert [call for call in calls if not call.startswith("aten.view")] == []


def test_other_memory_of_gradients_states_or_what_is_sent_is_noticed():
    weight, fresh = opened(torch.bfloat16), opened(torch.bfloat16)
    for step in range(4):
        gradient = torch.full((COUNT,), step + 1.0, dtype=torch.float32 if step == 1 else torch.bfloat16)
        sent, expected = (torch.zeros(COUNT, dtype=torch.bfloat16) for _ in range(2))
        weight.step(gradient, SETTINGS, SCRATCH, sent)
        fresh.forget_prepared()
        fresh.step(gradient.clone(), SETTINGS, SCRATCH, expected)
        if step == 2:  # as when a state is loaded
            weight.write_states({key: one.clone() for key, one in weight.read_states().items()}, SETTINGS)
        assert torch.equal(sent, expected)
        assert torch.equal(weight.master, fresh.master)
    assert weight.steps == 4
