"""AdamW in one pass of the host's memory equals torch's fused AdamW, to the bit."""

from __future__ import annotations

import logging

import pytest
import torch

from bitplan.streaming.training import adamw_loop, trained_weight
from bitplan.streaming.training.adamw import (
    AdamWRates,
    AdamWTensors,
    SmallMoments,
    SmallTensors,
    split_master,
    step_by_torch,
    step_small_by_torch,
    step_together,
)
from bitplan.streaming.training.trained_weight import explain_adamw, step_adamw


@pytest.fixture
def needs_bits():
    if trained_weight.loop_choice().implementation != "numba":
        pytest.skip(trained_weight.loop_choice().reason)


def tensors_of(count: int, gradient: torch.dtype, sent: torch.dtype | None, seed: int = 0) -> AdamWTensors:
    random = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-12, 3, (count,), generator=random)
    return AdamWTensors(
        torch.randn(count, generator=random),
        (torch.randn(count, generator=random) * sizes).to(gradient),
        torch.zeros(count),
        torch.zeros(count),
        None if sent is None else torch.full((count,), 7.0, dtype=sent),
    )


def copied(tensors: AdamWTensors) -> AdamWTensors:
    return AdamWTensors(*(None if one is None else one.clone() for one in tensors))


def assert_same_bits(mine: AdamWTensors, torchs: AdamWTensors) -> None:
    for name, one, other in zip(AdamWTensors._fields, mine, torchs, strict=True):
        if one is not None:
            word = torch.int16 if one.dtype == torch.bfloat16 else torch.int32
            assert torch.equal(one.view(word), other.view(word)), name


@pytest.mark.usefixtures("needs_bits")
@pytest.mark.parametrize("count", [1, 15, 16, 17, 1040, 100_003])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16, None], ids=str)
def test_the_loop_equals_torchs_fused_adamw(count, gradient, sent):
    mine = tensors_of(count, gradient, sent)
    torchs = copied(mine)
    for step in range(1, 5):
        rates = AdamWRates(1e-2 / step, (0.9, 0.999), 1e-8, 0.1, step, 1.0 if step < 3 else 0.3)
        adamw_loop.step_by_loop(mine, rates)
        step_by_torch(torchs, rates, torch.empty(1000))
    assert_same_bits(mine, torchs)


@pytest.mark.usefixtures("needs_bits")
@pytest.mark.cross("count", [100, 256, 70_003])
@pytest.mark.cross("gradient", [torch.float32, torch.bfloat16])
@pytest.mark.cross("is_split", [False, True])
def test_the_loop_of_small_states_equals_its_definition(count, gradient, is_split):
    results = []
    for step_small in (adamw_loop.step_small_by_loop, step_small_by_torch):
        master, gradients, *_ = tensors_of(count, gradient, None)
        remainder = None
        if is_split:
            whole, remainder = master, torch.empty(count, dtype=torch.int16)
            master = torch.empty(count, dtype=torch.bfloat16)
            split_master(whole, master, remainder)
        tensors = SmallTensors(master, remainder, gradients, SmallMoments.zeros(count))
        for step in range(1, 5):
            rates = AdamWRates(1e-2 / step, (0.9, 0.999), 1e-8, 0.1, step, 1.0 if step < 3 else 0.3)
            step_small(tensors, rates, f"weight {step}", 512)
        results.append([one for one in (*tensors[:3], *tensors.moments) if one is not None])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.usefixtures("needs_bits")
@pytest.mark.parametrize(
    ("betas", "eps", "decay", "step"),
    [
        ((0.5, 0.5), 1e-8, 0.0, 1),  # a share of the gradient that is not below a half
        ((0.1, 0.99), 1e-3, 0.3, 2),
        ((0.0, 0.0), 1e-8, 0.0, 1),
        ((0.95, 0.9999), 0.0, 1e-4, 10_000),
        ((0.9, 0.95), 1e-8, 0.1, 10_000_000),
    ],
)
def test_the_loop_equals_torch_for_any_settings(betas, eps, decay, step):
    mine = tensors_of(4096, torch.bfloat16, torch.bfloat16)
    mine.first.normal_(0, 1e-3)
    mine.second.uniform_(1e-6, 1e-3)
    torchs = copied(mine)
    rates = AdamWRates(3e-4, betas, eps, decay, step)
    adamw_loop.step_by_loop(mine, rates)
    step_by_torch(torchs, rates, torch.empty(4096))
    assert_same_bits(mine, torchs)


@pytest.mark.usefixtures("needs_bits")
def test_numbers_that_are_not_finite_stay_so():
    mine = tensors_of(64, torch.float32, torch.bfloat16)
    mine.master[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    mine.master.view(torch.int32)[3] = 0x7FFFFFFF  # a NaN that rounding alone would carry into the sign
    torchs = copied(mine)
    rates = AdamWRates(1e-3, (0.9, 0.999), 1e-8, 0.0, 1)
    adamw_loop.step_by_loop(mine, rates)
    step_by_torch(torchs, rates, torch.empty(64))
    torch.testing.assert_close(mine, torchs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_weights_that_are_stepped_together_have_the_bits_of_each(factor):
    counts, types = (1, 17, 1040, 4099, 65_535), (torch.float32, torch.bfloat16, torch.float16)
    mine = [
        tensors_of(count, types[at % 3], (torch.bfloat16, None)[at % 2], seed=at) for at, count in enumerate(counts)
    ]
    torchs = [copied(one) for one in mine]
    for number in range(1, 4):
        rates = [AdamWRates(1e-2, (0.9, 0.999), 1e-8, 0.1, number + at, factor) for at in range(len(mine))]
        step_together(mine, rates, torch.empty(sum(counts)))
        for one, of_one in zip(torchs, rates, strict=True):
            step_by_torch(one, of_one, torch.empty(65_535))
    for one, other in zip(mine, torchs, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("count", "gradient", "sent", "reason"),
    [
        (2**16, torch.float16, None, "a gradient of float16"),
        (2**16, torch.bfloat16, torch.float64, "sent weights of float64"),
        (2**16 - 1, torch.bfloat16, torch.bfloat16, "small: 65535 numbers"),
    ],
)
def test_what_torch_does_and_why(count, gradient, sent, reason):
    picked = explain_adamw(tensors_of(count, gradient, sent))
    assert (picked.implementation, picked.reason) == ("torch", reason)


@pytest.mark.usefixtures("needs_bits")
def test_large_weights_take_the_loop(monkeypatch):
    taken = []
    monkeypatch.setattr(adamw_loop, "loop_of", lambda tensors: lambda *given: taken.append((tensors, given)))
    step_adamw(tensors_of(2**16, torch.bfloat16, None), AdamWRates(1e-3, (0.9, 0.99), 1e-8, 0.0, 1), torch.empty(1))
    assert len(taken) == 1


def test_other_bits_than_torchs_are_said_and_not_used(monkeypatch, caplog):
    monkeypatch.setattr(adamw_loop, "differs_from_torch", lambda: "bits of master differ")
    monkeypatch.setattr(trained_weight, "loop_choice", trained_weight.loop_choice.__wrapped__)
    with caplog.at_level(logging.WARNING, logger="bitplan"):
        picked = explain_adamw(tensors_of(2**16, torch.bfloat16, None))
    assert (picked.implementation, picked.reason) == ("torch", "bits of master differ")
    assert "torch's own is used" in caplog.text


def test_the_look_at_torchs_bits_sees_a_difference(monkeypatch):
    step = adamw_loop.step_by_loop
    monkeypatch.setattr(adamw_loop, "step_by_loop", lambda tensors, rates: step(tensors, rates._replace(eps=1e-7)))
    assert "bits of master are not those of torch" in adamw_loop.differs_from_torch()
