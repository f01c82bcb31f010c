"""Moments in 8 bits: codes and scales by their definition, steps that do not stand still, losses of float32 moments."""

from __future__ import annotations

import copy
import statistics

import pytest
import torch
from torch import nn

from bitplan.base.errors import StreamError
from bitplan.plan.plan import Plan
from bitplan.streaming import options
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.find_blocks import StreamedParameter
from bitplan.streaming.options import StreamOptions
from bitplan.streaming.training.adamw import BLOCK, AdamWSettings, SmallMoments, join_master, split_master
from bitplan.streaming.training.trained_weight import TrainedWeight
from tests.streaming.stream_samples import assert_equal, batch, bytes_of, make_stack, streaming


def encoded(first, second, key=None):
    moments = SmallMoments.zeros(len(first))
    moments.write(first.clone(), second.clone(), key)
    return moments


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1024])
def test_codes_are_roots_in_blocks_of_64(count):
    first, second = torch.randn(count), torch.randn(count).square()
    second[0] = 0
    moments = encoded(first, second)
    assert moments.nbytes == 2 * count + 8 * -(-count // BLOCK)
    for start in range(0, count, BLOCK):
        m, v = (one[start : start + BLOCK].double() for one in (first, second))
        signed = m.sign() * (127 * (m.abs() / m.abs().max()).sqrt()).round()
        assert (moments.first[start : start + BLOCK] - signed).abs().max() <= 1e-3 * 127
        roots = (255 * (v / max(v.max(), 1e-300)) ** 0.25).round().clamp(min=1) * (v > 0)
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
    assert second.tolist() == [pytest.approx(1 / 255**4), 1.0]  # above 0 stays above 0: no endless step


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
    rows = torch.stack([encoded(numbers, numbers, key=f"weight {step} 0").read()[1] ** 0.25 for step in range(400)])
    assert (rows.mean(0) - numbers**0.25).abs().max() < 5 * (1 / 255) / 2 / 400**0.5
    assert torch.equal(rows[7], encoded(numbers, numbers, key="weight 7 0").read()[1] ** 0.25)


def test_a_second_moment_grows_though_every_growth_is_less_than_a_code():
    moments, square = SmallMoments.zeros(BLOCK), torch.rand(BLOCK) + 0.5
    for step in range(1, 501):
        first, second = moments.read()
        moments.write(first, second.mul_(0.999).add_(square, alpha=0.001), f"weight {step} 0")
    expected = square * (1 - 0.999**500)
    assert (moments.read()[1] / expected - 1).abs().mean() < 0.05


@pytest.mark.parametrize(("moments", "at_most"), [("float32", 16.5), ("int8", 8.5)])
def test_bytes_on_the_host_are_those_stated(moments, at_most):
    """Full fine-tuning in BF16: every tensor that model, stream and its training hold, each memory counted once."""
    model = make_stack(adapters=False, count=40, dtype=torch.bfloat16)
    with streaming(model, train="weights", moments=moments) as stream:
        run(model, stream, 1, dtype=torch.bfloat16)
        stream.synchronize()
        count = sum(one.numel() for one in model.layers.parameters())
        assert at_most - 0.5 < bytes_of(model.layers, stream._host, stream.training) / count <= at_most
        stated = {key: nbytes / count for key, nbytes in stream.training.host_bytes.items()}
    expected = {"masters": 4, "states": 8} if moments == "float32" else {"masters": 2.02, "states": 2.17}
    assert stated == pytest.approx({**expected, "gradients": 2}, abs=0.02)


@pytest.mark.parametrize(("free", "fmt"), [(10**9, "float32"), (10**5, "int8_roots_b64")])
def test_auto_goes_by_the_memory_that_is_free(free, fmt, monkeypatch):
    monkeypatch.setattr(options, "free_memory", lambda: free)
    model = make_stack(adapters=False, count=1, dtype=torch.bfloat16)
    with streaming(model, train="weights", moments="auto") as stream:
        chosen = stream.plan["layers.0.up.weight.moments"]
    assert chosen.format == fmt
    assert "GB of the host are free" in chosen.reason


def test_moments_are_chosen_by_weight_and_are_in_the_plan():
    model = make_stack(adapters=False, count=1, dtype=torch.bfloat16)
    with streaming(model, train="weights", moments="int8") as stream:
        plan = stream.plan
        assert plan["layers.0.up.weight"].format == "bfloat16"
        assert plan.entries["layers.0.up.weight"].kind == "wire"
        assert plan["layers.0.up.weight.moments"].format == "int8_roots_b64"
        assert plan["layers.0.up.weight.master"].format == "int16_remainder"
        assert plan["layers.0.up.weight.gradient"].format == "bfloat16"
        vector = plan["layers.0.norm.bias.moments"]
        assert (vector.format, vector.reason) == ("float32", "fewer than 4096 numbers")
        assert Plan.from_document(plan.to_document()) == plan
    with streaming(model, train="weights", moments={"*.norm": "int8", "layers.0.up": "int8"}) as stream:
        formats = {name: choice.format for name, choice in stream.training.plan.items() if name.endswith("moments")}
        small = {name for name, fmt in formats.items() if fmt != "float32"}
        assert small == {f"layers.0.{one}.moments" for one in ("norm.weight", "norm.bias", "up.weight", "up.bias")}
    with pytest.raises(StreamError, match=r"moments: the pattern '\*\.upp' matches no trained weight"):
        stream_blocks(
            model, "layers.*", device="cpu", train="weights", options=StreamOptions(moments={"*.upp": "int8"})
        )


def test_a_weight_and_its_remainder_are_the_master():
    random = torch.Generator().manual_seed(0)
    master = torch.randn(4096, generator=random) * 10.0 ** torch.randint(-30, 30, (4096,), generator=random)
    half = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x7F7FFFFF, 0], dtype=torch.int32)
    master[:5] = half.view(torch.float32)
    weight, remainder = torch.empty(4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.int16)
    split_master(master, weight, remainder)
    assert torch.equal(join_master(weight, remainder).view(torch.int32), master.view(torch.int32))
    assert torch.equal(weight[5:], master[5:].bfloat16())
    assert weight[:3].view(torch.int16).tolist() == [0x3F81, 0x3F82, 0x3F81 - 0x8000]  # halves go away from 0


def test_a_master_in_16_bits_beside_its_weight_takes_the_steps_of_a_whole_one():
    """Two weights of one start and the same gradients: the BF16 one is at each step the other, rounded."""
    start = torch.randn(64, 128).bfloat16()
    whole, split = (nn.Parameter(start.to(dtype)) for dtype in (torch.float32, torch.bfloat16))
    weights = [TrainedWeight("w", StreamedParameter("w", one, ()), "int8") for one in (whole, split)]
    for _ in range(5):
        gradient = torch.randn(64, 128).bfloat16()
        for weight in weights:
            weight.step(gradient, AdamWSettings(lr=1e-3, weight_decay=0.1), torch.empty(8192))
        assert torch.equal(weights[0].master, weights[1].master)
        assert (split.float() - whole).abs().max() <= 2.0**-9 * whole.abs().max()
    assert weights[1].host_bytes["masters"] == 2 * 64 * 128


def test_a_weight_that_other_code_changed_is_its_new_master():
    model = make_stack(adapters=False, count=1, dtype=torch.bfloat16)
    with streaming(model, train="weights", moments="int8", optimizer=AdamWSettings(lr=1e-2)) as stream:
        run(model, stream, 1, dtype=torch.bfloat16)
        stream.synchronize()
        weight = model.layers[0].up.weight
        assert not torch.equal(stream.state_dict()["tensors"]["layers.0.up.weight.master"], weight.float())
        with torch.no_grad():
            weight.fill_(0.5)
        stream.begin_step(1)
        assert (stream.training.weight("layers.0", "up.weight").master == 0.5).all()


def run(model, stream, steps, first=0, dtype=torch.float32):
    for step in range(first, steps):
        stream.begin_step(step)
        model(batch(step, dtype)).square().mean().backward()
        stream.end_step()


@pytest.mark.parametrize("formats", [None, "int8_row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_goes_on_to_the_bit_from_its_state(tmp_path, dtype, formats):
    options = {"train": "weights", "moments": "int8", "optimizer": AdamWSettings(lr=1e-2), "formats": formats}
    model = make_stack(adapters=False, count=2, dtype=dtype)
    with streaming(model, **options) as stream:
        run(model, stream, 2, dtype=dtype)
        stream.save(tmp_path / "state.safetensors")
        run(model, stream, 4, first=2, dtype=dtype)
        expected = copy.deepcopy(stream.state_dict()["tensors"])
    for name, one in model.layers.named_parameters():  # closed: the Parameters are what was trained
        assert (one.detach().float() - expected[f"layers.{name}.master"]).abs().max() <= 2.0**-8
    other = make_stack(adapters=False, count=2, dtype=dtype)
    with streaming(other, **options) as stream:
        stream.load(tmp_path / "state.safetensors")
        run(other, stream, 4, first=2, dtype=dtype)
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
    weights = [TrainedWeight(name, StreamedParameter(name, one, ()), moments) for name, one in model.named_parameters()]
    parameters = dict(model.named_parameters())
    for _ in range(steps):
        rows = torch.randperm(256)[:64]
        (model(x[rows]) - y[rows]).square().mean().backward()
        for weight in weights:
            weight.step(parameters[weight.name].grad, AdamWSettings(lr=3e-3), torch.empty(2**14))
        model.zero_grad()
    with torch.no_grad():
        return float((model(x) - y).square().mean())


def test_other_moments_are_refused():
    with pytest.raises(StreamError, match=r"moments='int4': there are 'float32', 'int8', 'auto'"):
        stream_blocks(
            make_stack(adapters=False), "layers.*", device="cpu", train="weights", options=StreamOptions(moments="int4")
        )
