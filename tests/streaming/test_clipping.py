"""Clipping by the norm of all gradients: masters as those of a resident model with torch's own clipping."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from bitplan.base.errors import BlockNonFiniteError, StreamError
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.training import trained_weight
from tests.crosses import few
from tests.streaming.stream_samples import CHECKPOINTING, assert_equal, batch, make_stack, streaming
from tests.streaming.test_weights import SETTINGS, adamw, masters_of, run_streamed

TIGHT, LOOSE = 0.05, 1e6


def run_clipped(model, max_norm: float, steps: int, *, everything: bool) -> tuple[dict, list[float]]:
    """torch alone: AdamW and clip_grad_norm_, over the blocks or over all parameters."""
    inside, outside = adamw(model.layers.parameters()), adamw([*model.first.parameters(), *model.head.parameters()])
    norms = []
    for step in range(steps):
        for micro in range(2):
            model(batch(10 * step + micro)).square().mean().backward()
        clipped = model.parameters() if everything else model.layers.parameters()
        norms.append(float(clip_grad_norm_(clipped, max_norm)))
        for optimizer in (inside, outside):
            optimizer.step()
            optimizer.zero_grad()
    return {name: one.detach() for name, one in model.named_parameters()}, norms


@pytest.mark.cross("max_norm", [TIGHT, LOOSE])
@pytest.mark.cross("checkpointing", few(CHECKPOINTING, 2))
def test_the_option_equals_torch_to_the_bit(checkpointing, max_norm):
    model = make_stack(adapters=False)
    model.checkpointing = checkpointing
    expected, norms = run_clipped(copy.deepcopy(model), max_norm, 3, everything=False)
    assert (min(norms) > max_norm) == (max_norm == TIGHT)  # the case is what it says
    with streaming(model, train="weights", optimizer=SETTINGS, clip_grad_norm=max_norm) as stream:
        run_streamed(model, stream, 3, 2)
        assert stream.training.gradient_norm == norms[-1]
        assert_equal(masters_of(stream), {name: one for name, one in expected.items() if name.startswith("layers.")})
    assert_equal(dict(model.named_parameters()), expected)


@pytest.mark.parametrize("share", [1.0, 1 + 5e-7, 2.0])
@pytest.mark.parametrize("size", [1.0, 1e-7])
def test_norms_up_to_the_limit_are_scaled_as_torch_scales_them(share, size):
    """It adds 1e-6 to the norm, so norms that are a little smaller than the limit are scaled as well."""
    model = make_stack(adapters=False, count=3)
    resident = copy.deepcopy(model)
    (resident(batch(0)).square().mean() * size).backward()
    inside = list(resident.layers.parameters())
    max_norm = share * float(clip_grad_norm_(inside, 1e6))
    clip_grad_norm_(inside, max_norm)
    settings = dataclasses.replace(SETTINGS, eps=1.0)  # or the first step is the same for gradients of all sizes
    how = {"lr": settings.lr, "betas": settings.betas, "eps": 1.0, "weight_decay": settings.weight_decay}
    torch.optim.AdamW(inside, fused=True, **how).step()
    with streaming(model, train="weights", optimizer=settings, clip_grad_norm=max_norm) as stream:
        stream.begin_step(0)
        (model(batch(0)).square().mean() * size).backward()
        stream.end_step()
        stream.synchronize()
        expected = {f"layers.{name}": one.detach() for name, one in resident.layers.named_parameters()}
        assert_equal(masters_of(stream), expected)


@pytest.mark.parametrize("numbers", [1, 2**40], ids=["one pass", "torch"])
def test_bfloat16_gradients_are_clipped_as_float32_ones_and_stay_as_they_came(monkeypatch, numbers):
    monkeypatch.setattr(trained_weight, "SMALLEST_FOR_CPU", numbers)
    model = make_stack(adapters=False, dtype=torch.bfloat16, count=3)
    resident, names = copy.deepcopy(model), [name for name, _ in model.named_parameters() if name.startswith("layers.")]
    own = dict(resident.named_parameters())
    masters = {name: own[name].detach().float().clone() for name in names}
    optimizer, outside = adamw(list(masters.values())), [one for name, one in own.items() if name not in names]
    outer, norms = adamw(outside), []
    for step in range(3):
        resident(batch(10 * step, torch.bfloat16)).square().mean().backward()
        for name, master in masters.items():
            master.grad, own[name].grad = own[name].grad.float(), None
        norms.append(float(clip_grad_norm_(masters.values(), TIGHT)))
        for each in (optimizer, outer):
            each.step()
            each.zero_grad()
        with torch.no_grad():
            for name, master in masters.items():
                own[name].copy_(master)
    assert min(norms) > TIGHT
    with streaming(model, train="weights", optimizer=SETTINGS, clip_grad_norm=TIGHT) as stream:
        run_streamed(model, stream, 3, 1, torch.bfloat16)
        assert stream.training.gradient_norm == norms[-1]
        assert_equal(masters_of(stream), masters)
        assert not stream.training._gradient_memory._wide


@pytest.mark.parametrize("then", ["clip", "backward"])
def test_what_comes_after_clipping_finds_clipped_gradients(then):
    model = make_stack(adapters=False, count=3)
    resident = copy.deepcopy(model)
    optimizer = adamw(resident.layers.parameters())
    resident(batch(0)).square().mean().backward()
    first = float(clip_grad_norm_(resident.layers.parameters(), TIGHT))
    if then == "backward":
        resident(batch(1)).square().mean().backward()
    second = float(clip_grad_norm_(resident.layers.parameters(), TIGHT / 3))
    optimizer.step()
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        stream.begin_step(0)
        model(batch(0)).square().mean().backward()
        assert stream.clip_gradients(TIGHT) == first
        if then == "backward":
            model(batch(1)).square().mean().backward()
        assert stream.clip_gradients(TIGHT / 3) == second
        stream.end_step()
        stream.synchronize()
        expected = {f"layers.{name}": one.detach() for name, one in resident.layers.named_parameters()}
        assert_equal(masters_of(stream), expected)


def test_one_norm_for_blocks_and_what_is_outside_of_them():
    model = make_stack(adapters=False)
    expected, norms = run_clipped(copy.deepcopy(model), TIGHT, 3, everything=True)
    outside = [*model.first.parameters(), *model.head.parameters()]
    optimizer, result = adamw(outside), []
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        for step in range(3):
            stream.begin_step(step)
            for micro in range(2):
                model(batch(10 * step + micro)).square().mean().backward()
            result.append(stream.clip_gradients(TIGHT, outside))
            optimizer.step()
            optimizer.zero_grad()
            stream.end_step()
    assert result == pytest.approx(norms, rel=1e-6)
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.detach(), expected[name], rtol=1e-4, atol=1e-6)


def test_a_norm_that_is_not_finite_changes_no_master():
    model = make_stack(adapters=False)
    with streaming(model, train="weights", optimizer=SETTINGS, clip_grad_norm=1.0) as stream:
        before = {name: one.clone() for name, one in masters_of(stream).items()}
        with pytest.raises(BlockNonFiniteError, match="step 4: the norm of all gradients is inf"):
            huge_step(model, stream)
        assert_equal(masters_of(stream), before)
        run_streamed(model, stream, 1, 1)
        assert not torch.equal(masters_of(stream)["layers.0.up.weight"], before["layers.0.up.weight"])


def huge_step(model, stream) -> None:
    """Every gradient is finite, and so is its sum; its square is not."""
    stream.begin_step(4)
    (model(batch(0)).sum() * 1e25).backward()
    stream.end_step()
    stream.synchronize()


def test_a_gradient_that_did_not_arrive_is_named():
    model = make_stack(adapters=False)
    with streaming(model, train="weights", optimizer=SETTINGS, slots=6) as stream:
        stream.begin_step(2)
        loss = model(batch(0)).sum()
        stream.device.before_copy = lambda: 1 / 0
        loss.backward()
        with pytest.raises(StreamError, match=r"layers\.\d[\w.]*, step 2: gradient: ZeroDivisionError"):
            stream.clip_gradients(1.0)
        stream.device.before_copy = None
        model.zero_grad()
        run_streamed(model, stream, 1, 1)


def test_refusals():
    model = make_stack(adapters=True)
    with pytest.raises(StreamError, match=r"torch\.nn\.utils\.clip_grad_norm_ clips them"):
        stream_blocks(model, "layers.*", device="cpu", clip_grad_norm=1.0)
    with pytest.raises(StreamError, match="a norm above 0, got 0"):
        stream_blocks(make_stack(adapters=False), "layers.*", device="cpu", train="weights", clip_grad_norm=0)
    with streaming(model) as stream, pytest.raises(StreamError, match="train='adapters' streams no gradients"):
        stream.clip_gradients(1.0)
    with streaming(make_stack(adapters=False), train="weights") as stream:
        with pytest.raises(StreamError, match="no step is open"):
            stream.clip_gradients(1.0)
        stream.begin_step(0)
        with pytest.raises(StreamError, match="a norm above 0, got nan"):
            stream.clip_gradients(float("nan"))
