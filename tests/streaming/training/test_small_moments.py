"""Moments in 8 bits: codes and scales by their definition, steps that do not stand still, losses of float32 moments."""

from __future__ import annotations

import copy
import statistics

import pytest
import torch
from torch import nn

from bitplan.streaming.errors import StreamError
from bitplan.streaming.options import StreamOptions
from bitplan.streaming.stream_blocks import stream_blocks
from bitplan.streaming.training.adamw_settings import AdamWSettings
from bitplan.streaming.training.host_training import BlockAdamW
from bitplan.streaming.training.small_moments import BLOCK, SmallMoments
from tests.streaming.stream_samples import assert_equal, batch, make_stack, streaming


def encoded(first, second, key=None):
    moments = SmallMoments.zeros(len(first))
    moments.write(first.clone(), second.clone(), key)
    return moments


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1024])
def test_codes_are_square_roots_in_blocks_of_256(count):
    first, second = torch.randn(count), torch.randn(count).square()
    second[0] = 0
    moments = encoded(first, second)
    assert moments.nbytes == 2 * count + 8 * -(-count // BLOCK)
    for start in range(0, count, BLOCK):
        m, v = (one[start : start + BLOCK].double() for one in (first, second))
        signed = m.sign() * (127 * (m.abs() / m.abs().max()).sqrt()).round()
        assert (moments.first[start : start + BLOCK] - signed).abs().max() <= 1e-3 * 127
        roots = (255 * (v / max(v.max(), 1e-300)).sqrt()).round().clamp(min=1) * (v > 0)
        assert (moments.second[start : start + BLOCK].double() - roots).abs().max() <= 1
    assert moments.second[0] == 0


def test_what_was_read_is_written_again_in_the_same_codes():
    moments = encoded(torch.randn(1000), torch.randn(1000).square(), key="weight 3 0")
    again = encoded(*moments.read())
    assert all(torch.equal(one, other) for one, other in zip(moments, again, strict=True))


def test_zeros_extremes_and_a_small_second_moment():
    zeros = encoded(torch.zeros(300), torch.zeros(300))
    assert all(not one.any() for one in zeros.read())
    first, second = encoded(torch.tensor([1e-38, -3e38]), torch.tensor([1e-30, 1.0])).read()
    assert first.tolist() == [0.0, pytest.approx(-3e38)]
    assert second.tolist() == [pytest.approx(1 / 255**2), 1.0]  # above 0 stays above 0: no endless step


def test_the_largest_number_of_a_block_always_has_the_largest_code():
    """Beside a random number that float32 rounds to 1 too, as one of some hundred thousand is."""
    numbers = torch.full((2**21,), 3.0)
    moments = encoded(numbers, numbers, key="weight 1")
    assert (moments.first == 127).all()
    assert (moments.second == 255).all()


def test_codes_of_a_part_are_those_of_the_whole():
    numbers, half = torch.rand(2**18 + 512), 2**17 + 256
    whole, second = encoded(numbers, numbers, key="weight 1"), SmallMoments.zeros(half)
    second.write(numbers[half:].clone(), numbers[half:].clone(), "weight 1", half)
    assert all(torch.equal(one, other) for one, other in zip(whole.part(half, 2 * half), second, strict=True))


def test_random_rounding_has_the_right_mean_and_is_the_same_again():
    numbers = torch.rand(BLOCK) + 1e-3
    rows = torch.stack([encoded(numbers, numbers, key=f"weight {step} 0").read()[1].sqrt() for step in range(400)])
    assert (rows.mean(0) - numbers.sqrt()).abs().max() < 5 * (1 / 255) / 2 / 400**0.5
    assert torch.equal(rows[7], encoded(numbers, numbers, key="weight 7 0").read()[1].sqrt())


def test_a_second_moment_grows_though_every_growth_is_less_than_a_code():
    moments, square = SmallMoments.zeros(BLOCK), torch.rand(BLOCK) + 0.5
    for step in range(1, 501):
        first, second = moments.read()
        moments.write(first, second.mul_(0.999).add_(square, alpha=0.001), f"weight {step} 0")
    expected = square * (1 - 0.999**500)
    assert (moments.read()[1] / expected - 1).abs().mean() < 0.05


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_bytes_on_the_host_are_those_stated(moments):
    model = make_stack(adapters=False, count=2)
    with streaming(model, train="weights", moments=moments) as stream:
        run(model, stream, 1)
        stream.synchronize()
        count = sum(one.numel() for one in model.layers.parameters())
        assert stream.training.moment_bytes / count == pytest.approx(8 if moments == "float32" else 2.03, abs=0.005)


def run(model, stream, steps, first=0):
    for step in range(first, steps):
        stream.begin_step(step)
        model(batch(step)).square().mean().backward()
        stream.end_step()


def test_a_run_goes_on_to_the_bit_from_its_state(tmp_path):
    options = {"train": "weights", "moments": "int8", "optimizer": AdamWSettings(lr=1e-2)}
    model = make_stack(adapters=False, count=2)
    with streaming(model, **options) as stream:
        run(model, stream, 2)
        stream.save(tmp_path / "state.safetensors")
        run(model, stream, 4, first=2)
        expected = copy.deepcopy(stream.state_dict()["tensors"])
    other = make_stack(adapters=False, count=2)
    with streaming(other, **options) as stream:
        stream.load(tmp_path / "state.safetensors")
        run(other, stream, 4, first=2)
        assert_equal(stream.state_dict()["tensors"], expected)


def test_the_loss_is_that_of_float32_moments():
    """Three seeds of a small model that learns a function: the means differ by less than the seeds do."""
    losses = {moments: [final_loss(seed, moments) for seed in range(3)] for moments in ("float32", "int8")}
    means = {moments: statistics.mean(of_seeds) for moments, of_seeds in losses.items()}
    assert abs(means["int8"] - means["float32"]) < max(statistics.stdev(losses["float32"]), 0.02 * means["float32"])


def final_loss(seed, moments, steps=60, width=16):
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)])
    target, x = torch.randn(width, width) / width**0.5, torch.randn(256, width)
    y = (x @ target).tanh() * 0.5
    weights = dict(model.named_parameters())
    adamw = BlockAdamW({name: one.data for name, one in weights.items()}, is_small=moments == "int8")
    settings = dict.fromkeys(weights, AdamWSettings(lr=3e-3))
    for _ in range(steps):
        rows = torch.randperm(256)[:64]
        (model(x[rows]) - y[rows]).square().mean().backward()
        adamw.step({name: one.grad for name, one in weights.items()}, settings, torch.empty(2**14))
        model.zero_grad()
    with torch.no_grad():
        return float((model(x) - y).square().mean())


def test_other_moments_are_refused():
    with pytest.raises(StreamError, match=r"moments='int4': there are 'float32', 'int8'"):
        stream_blocks(
            make_stack(adapters=False), "layers.*", device="cpu", train="weights", options=StreamOptions(moments="int4")
        )
