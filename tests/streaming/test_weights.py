"""Training the streamed weights: masters on the host follow the resident model's, to the bit."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from bitplan import decode, encode
from bitplan.base.errors import StreamError
from bitplan.streaming.block_stream import BlockStream, stream_blocks
from bitplan.streaming.options import StreamOptions
from bitplan.streaming.training import host_training, trained_weight
from bitplan.streaming.training.adamw import AdamWSettings
from tests.crosses import few
from tests.streaming.stream_samples import CHECKPOINTING, Stack, assert_equal, batch, make_stack, streaming

SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.05)


def adamw(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05, fused=True)


def run_streamed(model: Stack, stream: BlockStream, steps: int, micro_batches: int, dtype=torch.float32) -> None:
    outside = adamw([one for name, one in model.named_parameters() if not name.startswith("layers.")])
    for step in range(steps):
        stream.begin_step(step)
        for micro in range(micro_batches):
            device = str(model.head.weight.device)
            model(batch(10 * step + micro, dtype, device)).square().mean().backward()
        outside.step()
        outside.zero_grad()
        stream.end_step()
    stream.synchronize()


def run_resident(model: Stack, formats: dict[str, str], steps: int, micro_batches: int, dtype=torch.float32) -> dict:
    """The same training written plainly: float32 masters beside a model that computes with decoded weights."""
    named = dict(model.named_parameters())
    device = str(model.head.weight.device)
    masters = {name: one.detach().float().cpu().clone() for name, one in named.items() if name in formats}
    optimizer = adamw(list(masters.values()))
    outside = adamw([one for name, one in named.items() if name not in formats])
    for step in range(steps):
        with torch.no_grad():
            for name, master in masters.items():
                named[name].copy_(decode(encode(master, formats[name]), named[name].dtype))
        for micro in range(micro_batches):
            model(batch(10 * step + micro, dtype, device)).square().mean().backward()
            for name, master in masters.items():
                gradient = named[name].grad.float().cpu()
                master.grad = gradient if master.grad is None else master.grad + gradient
                named[name].grad = None
        optimizer.step()
        optimizer.zero_grad()
        outside.step()
        outside.zero_grad()
    return masters


def masters_of(stream: BlockStream) -> dict[str, Tensor]:
    assert stream.training is not None
    return {name: one.master for name, one in stream.training.trained().items()}


@pytest.mark.parametrize("checkpointing", few(CHECKPOINTING, 2))
def test_full_precision_equals_plain_adamw(checkpointing):
    model = make_stack(adapters=False)
    model.checkpointing = checkpointing
    resident = copy.deepcopy(model)
    optimizer = adamw(resident.parameters())
    for step in range(4):
        for micro in range(2):
            resident(batch(10 * step + micro)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        run_streamed(model, stream, 4, 2)
        sent = sum(one.nbytes for one in model.layers.parameters())
        assert stream.stats.last.bytes_d2h == 2 * sent
        assert stream.stats.last.bytes_d2h_by_format == {"float32": 2 * sent}
    assert_equal(dict(model.named_parameters()), dict(resident.named_parameters()))


@pytest.mark.parametrize(
    ("dtype", "formats"),
    [
        (torch.float32, "bfloat16"),
        (torch.bfloat16, None),
        (torch.bfloat16, "int8_row"),
        (torch.float32, {"layers.0": "mxfp4", "layers.*.up.weight": "int8_g128", "layers.2": "fp8_e4m3_row"}),
    ],
    ids=str,
)
def test_masters_equal_those_of_a_resident_model(dtype, formats):
    model = make_stack(adapters=False, dtype=dtype, count=4)
    resident = copy.deepcopy(model)
    with streaming(model, train="weights", optimizer=SETTINGS, formats=formats, slots=2) as stream:
        run_streamed(model, stream, 2, 2, dtype)
        masters = run_resident(resident, stream.formats, 2, 2, dtype)
        assert_equal(masters_of(stream), masters)
        assert all(master.dtype == torch.float32 for master in masters.values())
    for name, one in model.named_parameters():  # closed: the model's own parameters are the masters
        if name in masters:
            assert torch.equal(one, masters[name].to(dtype)), name


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_masters_equal_those_of_a_resident_model_with_adamw_in_one_pass(monkeypatch, micro_batches):
    monkeypatch.setattr(trained_weight, "SMALLEST_FOR_CPU", 1)
    model = make_stack(adapters=False, dtype=torch.bfloat16, count=4)
    resident = copy.deepcopy(model)
    with streaming(model, train="weights", optimizer=SETTINGS, slots=2) as stream:
        run_streamed(model, stream, 3, micro_batches, torch.bfloat16)
        assert_equal(masters_of(stream), run_resident(resident, stream.formats, 3, micro_batches, torch.bfloat16))


def test_formats_switch_between_steps_and_versions_are_not_stale():
    model = make_stack(adapters=False)
    resident = copy.deepcopy(model)
    with streaming(model, train="weights", optimizer=SETTINGS, formats="int8_row") as stream:
        run_streamed(model, stream, 2, 1)
        stream.set_formats("float32")
        stream.begin_step(2)
        out = model(batch(0)).detach()
        stream.end_step()
        stream.synchronize()
        masters = run_resident(resident, dict.fromkeys(stream.formats, "float32") | _int8_names(model), 2, 1)
        with torch.no_grad():
            for name, one in resident.named_parameters():
                one.copy_(masters.get(name, one))
        assert torch.equal(out, resident(batch(0)).detach())


def _int8_names(model: nn.Module) -> dict[str, str]:
    return {
        name: "int8_row" if one.ndim == 2 else "float32"
        for name, one in model.named_parameters()
        if name.startswith("layers.")
    }


def test_the_learning_rate_follows_a_schedule():
    model = make_stack(adapters=False)
    before = {name: one.detach().clone() for name, one in model.layers.named_parameters()}
    with streaming(model, train="weights", optimizer=AdamWSettings(lr=1e-2, weight_decay=0.0)) as stream:
        assert stream.training.lr == 1e-2
        stream.training.lr = 0.0
        run_streamed(model, stream, 1, 1)
    assert_equal({name: one.detach() for name, one in model.layers.named_parameters()}, before)


def test_a_setting_that_there_is_not_cannot_be_set():
    with (
        streaming(make_stack(adapters=False), train="weights", optimizer=SETTINGS) as stream,
        pytest.raises(AttributeError, match=r"has no 'betas'; lr and max_norm may be set .*AdamWSettings\(betas="),
    ):
        stream.training.betas = 0.9, 0.95


def test_a_rate_set_for_the_next_step_leaves_this_one_alone():
    model = make_stack(adapters=False)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        before = {name: master.clone() for name, master in masters_of(stream).items()}
        stream.begin_step(0)
        model(batch(0)).square().mean().backward()
        gate = threading.Event()
        stream.training._updates.submit(gate.wait, "held back")
        stream.end_step()
        stream.training.lr = 0.0
        gate.set()
        stream.synchronize()
        after = masters_of(stream)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_an_abandoned_step_leaves_no_gradient():
    model = make_stack(adapters=False)
    resident = copy.deepcopy(model)
    expected = run_resident(
        resident, {name: "float32" for name, _ in model.named_parameters() if "layers" in name}, 2, 1
    )
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        stream.begin_step(99)
        model(batch(77)).square().mean().backward()
        model.zero_grad()
        run_streamed(model, stream, 2, 1)
        assert_equal(masters_of(stream), expected)


def test_refusals():
    model = make_stack(adapters=False)
    with pytest.raises(StreamError, match="host='file' would save nothing"):
        stream_blocks(model, "layers.*", device="cpu", train="weights", host="file")
    with pytest.raises(StreamError, match="train='adapters'; pass train='weights'"):
        stream_blocks(make_stack(adapters=True), "layers.*", device="cpu", optimizer=SETTINGS)
    with pytest.raises(StreamError, match="no block's parameter is trained"):
        stream_blocks(model.requires_grad_(False), "layers.*", device="cpu", train="weights")


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "0.01", None, True, torch.ones(2, 2)])
def test_settings_that_adamw_refuses(bad):
    for name in ("lr", "eps", "weight_decay"):
        with pytest.raises(StreamError, match=f"^AdamW: {name}: expected a finite number of at least 0, got .*$"):
            AdamWSettings(**{name: bad})
    for betas, says in (
        ((0.9, bad), r"betas\[1\]: "),
        ((1.0, 0.9), r"betas\[0\]: .*below 1, got 1"),
        (bad, "two numbers"),
    ):
        with pytest.raises(StreamError, match=says):
            AdamWSettings(betas=betas)


def test_a_rate_that_is_no_rate_is_refused_where_it_is_set():
    assert AdamWSettings(lr=torch.tensor(0.5), betas=[0, 0.5]) == AdamWSettings(lr=0.5, betas=(0.0, 0.5))
    with streaming(make_stack(adapters=False, count=2), train="weights", optimizer=SETTINGS) as stream:
        for bad in (float("nan"), float("inf"), -1.0, None, "0.01"):
            with pytest.raises(StreamError, match="AdamW: lr: expected a finite number"):
                stream.training.lr = bad
        assert stream.training.lr == SETTINGS.lr
        state = stream.state_dict() | {"lr": -1.0}
        with pytest.raises(StreamError, match=r"lr: expected a number of at least 0, got -1\.0"):
            stream.load_state_dict(state)
        stream.begin_step(0)


@pytest.mark.parametrize("bad", ["yes", 1, None, ["a"]])
def test_what_compile_cannot_be(bad):
    options = StreamOptions(compile=bad)
    with pytest.raises(StreamError, match=r"compile=.*: expected True, False or a mapping"):
        stream_blocks(make_stack(adapters=False, count=1), "layers.*", device="cpu", train="nothing", options=options)


def test_an_expanded_weight_is_refused_by_name():
    model = make_stack(adapters=False, count=2)
    down = model.layers[1].down
    down.weight = nn.Parameter(torch.randn(1, down.in_features).expand(down.out_features, -1))
    with pytest.raises(StreamError, match=r"layers\.1\.down\.weight: its 32768 numbers share memory"):
        stream_blocks(model, "layers.*", device="cpu", train="weights")


def test_gradients_arrive_in_the_same_memory_in_every_step():
    """New memory a step made full fine-tuning five times slower than its AdamW."""
    model, seen = make_stack(adapters=False, dtype=torch.bfloat16, count=2), []
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        step_block = stream.training._step_block
        stream.training._step_block = lambda update, block: (
            seen.append({key: (one.data_ptr(), one.dtype) for key, one in update.gradients.sums.items()}),
            step_block(update, block),
        )
        run_streamed(model, stream, 2, 1, torch.bfloat16)
        assert seen[0] == seen[-1]
        assert {dtype for _, dtype in seen[0].values()} == {torch.bfloat16}  # as they came: nothing was converted
        run_streamed(model, stream, 2, 3, torch.bfloat16)
        assert seen[-1] == seen[-3]
        assert {dtype for _, dtype in seen[-1].values()} == {torch.float32}  # sums


def test_a_transposed_weight_is_trained_as_any_other(monkeypatch):
    monkeypatch.setattr(host_training, "NUMBERS_AT_A_TIME", 1000)  # several pieces a tensor
    results = []
    for transposed in (False, True):
        model = make_stack(adapters=False, count=2)
        for layer in model.layers if transposed else ():
            layer.down.weight = nn.Parameter(layer.down.weight.detach().t().contiguous().t())
        with streaming(model, train="weights", optimizer=SETTINGS) as stream:
            run_streamed(model, stream, 3, 1)
        results.append({name: one.detach().clone() for name, one in model.named_parameters()})
    for name, one in results[0].items():
        torch.testing.assert_close(results[1][name], one, rtol=1e-5, atol=1e-6)
