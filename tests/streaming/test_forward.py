"""Forward only: streamed blocks give what the resident model gives, in every format, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitplan.base.errors import PlanError, StreamError
from bitplan.plan.plan import Choice, Plan, Planned
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.find_blocks import move_resident
from bitplan.streaming.transfer.devices import SimulatedDevice
from tests.crosses import few
from tests.streaming.stream_samples import COUNT, OPTIONS, batch, decoded_twin, make_stack, streaming

FORMATS = ["float32", "bfloat16", "int8_row", "int8_g128", "fp8_e4m3_row", "mxfp4"]
MIXED = {
    "layers.*.up.weight": "int8_row",
    "layers.0.down.weight": "mxfp4",
    "layers.1.down.weight": "int8_g128",
    "layers.2": "fp8_e4m3_row",
    "layers.3.up.bias": "bfloat16",
}


@pytest.mark.parametrize("formats", few([None, *FORMATS, MIXED], 4), ids=str)
def test_forward_equals_the_resident_model(formats):
    model = make_stack(adapters=False).eval()
    source = copy.deepcopy(model)
    with streaming(model, formats=formats, train="nothing") as stream, torch.no_grad():
        expected = decoded_twin(source, stream.formats)(batch(1))
        for step in range(3):
            stream.begin_step(step)
            assert torch.equal(model(batch(1)), expected)
            stream.end_step()
    assert torch.equal(model(batch(1)), source(batch(1)))  # closed: the model is what it was


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_are_read_in_their_own_type(dtype):
    model = make_stack(adapters=False, dtype=dtype)
    source = copy.deepcopy(model)
    with streaming(model, formats={"layers.1": "int8_row"}, train="nothing") as stream, torch.no_grad():
        assert torch.equal(model(batch(1, dtype)), decoded_twin(source, stream.formats)(batch(1, dtype)))


def test_a_plan_gives_formats_by_name():
    model = make_stack(adapters=False)
    names = [name for name, _ in model.named_parameters()]
    plan = Plan({name: Planned(Choice("int8_row" if "up.w" in name else "float32", "a test")) for name in names})
    with streaming(model, formats=plan, train="nothing") as stream:
        assert stream.formats["layers.3.up.weight"] == "int8_row"
        assert stream.formats["layers.3.up.bias"] == "float32"
    lacking = Plan({name: plan.entries[name] for name in names if name != "layers.2.norm.bias"})
    with pytest.raises(PlanError, match=r"stream_blocks: the plan .* lacks 1: 'layers\.2\.norm\.bias'"):
        stream_blocks(make_stack(adapters=False), "layers.*", device="cpu", formats=lacking, train="nothing")


def test_buffers_that_are_not_streamed_move_to_the_device():
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    move_resident(model, [], torch.device("meta"))
    assert model[0].running_mean.is_meta
    assert model[1].running_mean is None


def test_a_sequential_is_a_stack_of_blocks():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)])
    x = torch.randn(3, 16)
    expected = model(x).detach()
    with streaming(model, blocks="*", train="nothing"), torch.no_grad():
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("slots", few([2, 3, 4, COUNT, 99], 3))
def test_bytes_are_the_packed_ones_and_slots_save_transfers(slots):
    model, device = make_stack(adapters=False).eval(), SimulatedDevice()
    with streaming(model, device, formats="int8_row", slots=slots, train="nothing") as stream, torch.no_grad():
        size = stream.stats.slot_bytes
        assert size < 0.3 * sum(p.nbytes for p in model.layers[0].parameters())
        for step in range(3):
            stream.begin_step(step)
            model(batch(step))
            stream.end_step()
        stream.synchronize()
        stats = stream.stats.last
        assert stream.stats.bytes_h2d == device.bytes_in
        assert device.bytes_in % size == 0
        assert stats.bytes_h2d == size * stats.loads
        assert sum(stats.bytes_h2d_by_format.values()) == stats.bytes_h2d
        assert {"int8_row", "float32"} <= set(stats.bytes_h2d_by_format) or slots >= COUNT
        assert stats.prefetch_misses == 0
        assert stats.loads == (0 if slots >= COUNT else COUNT)


def test_auto_spends_spare_memory_on_resident_blocks():
    model, full = make_stack(adapters=False).eval(), SimulatedDevice()
    with streaming(model, full, slots="auto", train="nothing") as stream:
        assert stream.stats.resident_blocks == COUNT
        size = stream.stats.slot_bytes
    model, small = make_stack(adapters=False).eval(), SimulatedDevice(capacity_bytes=5 * size + 100)
    expected = model(batch(0)).detach()
    with streaming(model, small, slots="auto", train="nothing") as stream, torch.no_grad():
        assert (stream.stats.ring_slots, stream.stats.resident_blocks) == (3, 2)
        for step in range(3):
            stream.begin_step(step)
            assert torch.equal(model(batch(0)), expected)
            stream.end_step()
        stream.synchronize()
        assert stream.stats.last.loads == COUNT - 2
    with pytest.raises(StreamError, match="fits no slot"):
        stream_blocks(
            make_stack(adapters=False), "layers.*", device=SimulatedDevice(size), train="nothing", options=OPTIONS
        )


class BusyDevice(SimulatedDevice):
    """Its steps take memory beside the slots."""

    guessed, taken = 0, 0

    def guessed_step_bytes(self):
        return self.guessed

    def peak_bytes(self):
        return super().peak_bytes() + self.taken


def test_auto_gives_slots_the_memory_that_steps_leave():
    model, size = make_stack(adapters=True), 264192
    device = BusyDevice(capacity_bytes=5 * size + 100)
    device.guessed, device.taken = 2 * size, 10
    with streaming(model, device, slots="auto", formats="float32") as stream:
        assert stream.stats.slot_bytes == size

        def shares_of_step(step):
            stream.begin_step(step)
            model(batch(0)).sum().backward()
            stream.end_step()
            return stream.stats.ring_slots, stream.stats.resident_blocks

        assert [shares_of_step(step) for step in range(3)] == [(3, 0), (3, 2), (3, 2)]  # less than was guessed
        device.taken = 2 * size
        assert [shares_of_step(step) for step in range(3, 6)] == [(3, 2), (3, 0), (3, 0)]  # a longer sequence

        def fail(*_):
            raise torch.OutOfMemoryError("no memory")

        stream.begin_step(6)
        handle = model.layers[2].up.register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            model(batch(0))
        handle.remove()
        assert shares_of_step(7) == (2, 0)


def test_inference_mode_and_training_share_a_stream():
    model = make_stack(adapters=True)
    with streaming(model, formats="int8_row") as stream:
        with torch.inference_mode():
            first = model(batch(0)).clone()
        stream.begin_step(0)
        loss = model(batch(0))
        loss.sum().backward()
        stream.end_step()
        assert torch.equal(first, loss.detach())


def test_a_budget_of_memory_is_kept():
    model, device = make_stack(adapters=False).eval(), SimulatedDevice()
    with streaming(model, device, slots="auto", vram_bytes=600_000, formats="int8_row", train="nothing") as stream:
        assert (stream.stats.ring_slots, stream.stats.resident_blocks) == (3, 1)
        assert device.allocated_bytes <= 600_000 < device.allocated_bytes + stream.stats.slot_bytes
        stream.set_formats("bfloat16")
        stream.begin_step(0)
        stream.end_step()
        assert device.allocated_bytes <= 600_000


def test_a_block_that_runs_twice():
    model = make_stack(adapters=True)
    model.layers = nn.ModuleList([model.layers[0], model.layers[1], model.layers[0], model.layers[2]])
    resident = copy.deepcopy(model)
    resident(batch(0)).sum().backward()
    with streaming(model, slots=2) as stream:
        stream.begin_step(0)
        model(batch(0)).sum().backward()
        stream.end_step()
    for name, one in resident.named_parameters():
        result = dict(model.named_parameters())[name]
        assert (one.grad is None) == (result.grad is None)
        assert one.grad is None or torch.equal(one.grad, result.grad), name
