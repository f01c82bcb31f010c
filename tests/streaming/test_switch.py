"""A switch of formats sends the blocks that switch, and no more; blocks stay where they are streamed from."""

from __future__ import annotations

import copy

import pytest
import torch

from bitplan.base.errors import StreamError
from bitplan.streaming.find_blocks import BlockLayout
from bitplan.streaming.transfer.devices import SimulatedDevice
from tests.crosses import few
from tests.streaming.stream_samples import (
    CHECKPOINTING,
    COUNT,
    assert_equal,
    batch,
    decoded_twin,
    gradients,
    make_stack,
    streaming,
)


def run_step(model, stream, step) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes to the device in a step, and its gradients."""
    before = stream.device.bytes_in
    stream.begin_step(step)
    model(batch(step)).square().mean().backward()
    result = gradients(model)
    model.zero_grad()
    stream.end_step()
    stream._loader.wait_for_copies(stream._loader.transfers())  # also those for the next step
    return stream.device.bytes_in - before, result


def block_bytes(stream, block: str) -> int:
    return stream._loader.layouts[stream._loader.names.index(block)].nbytes


@pytest.mark.parametrize("block", few(range(COUNT), 3))
def test_the_switch_of_one_block_sends_that_block_only(block):
    model = make_stack(adapters=True)
    source, name = copy.deepcopy(model), f"layers.{block}"
    with streaming(model, formats="bfloat16", slots=3) as stream:
        for step in range(2):
            usual, _ = run_step(model, stream, step)
        held = stream._loader.ring.slot_blocks
        high = block_bytes(stream, name)
        stream.set_formats({name: "int8_row"})
        sent, result = run_step(model, stream, 2)
        low = block_bytes(stream, name)
        assert low < high
        # In a step every block crosses once: the tail in forward, and in backward the head, which then stays. Blocks
        # of the head that keep their format are not sent again; one that switched is, before its forward. Block 0 is
        # in the scratch; if it has to be sent again, it takes the slot of block 3, which is then sent again too.
        assert sorted(held) == [1, 2, 3]
        assert sent == usual - (high - low) + (low if block in held else low + high if block == 0 else 0)
        assert run_step(model, stream, 3)[0] == usual - (high - low)
        twin = decoded_twin(source, stream.formats)
        twin(batch(2)).square().mean().backward()
        assert_equal(result, gradients(twin))


@pytest.mark.parametrize(("start", "then"), [("bfloat16", "int8_row"), ("int8_row", "bfloat16")])
def test_resident_blocks_that_keep_their_format_stay(start, then):
    model = make_stack(adapters=True)
    source = copy.deepcopy(model)
    # One block stays bf16 throughout, so that the largest block, and with it the share of memory, is the same.
    formats = dict.fromkeys((f"layers.{index}" for index in range(COUNT)), start) | {"layers.0": "bfloat16"}
    device = SimulatedDevice()
    with streaming(model, device, formats=formats, slots="auto", vram_bytes=2**30) as stream:
        assert stream.stats.resident_blocks == COUNT
        run_step(model, stream, 0)
        memory = device.allocated_bytes
        assert run_step(model, stream, 1)[0] == 0
        before = block_bytes(stream, "layers.4")
        stream.set_formats({"layers.4": then})
        sent, result = run_step(model, stream, 2)
        after = block_bytes(stream, "layers.4")
        assert sent == after != before
        assert run_step(model, stream, 3)[0] == 0
        assert device.allocated_bytes == memory + after - before
        twin = decoded_twin(source, stream.formats)
        twin(batch(2)).square().mean().backward()
        assert_equal(result, gradients(twin))
    assert device.allocated_bytes == 0


@pytest.fixture
def decodings(monkeypatch):
    """The layouts that were decoded."""
    made, decode_into = [], BlockLayout.decode_into
    monkeypatch.setattr(BlockLayout, "decode_into", lambda *given: (made.append(given[0]), decode_into(*given)))
    return made


@pytest.mark.parametrize("formats", ["int8_row", {"layers.*.up.base.weight": "mxfp4"}], ids=["whole", "part"])
@pytest.mark.parametrize("checkpointing", few(CHECKPOINTING, 2))
def test_resident_blocks_are_decoded_once_where_memory_is_plentiful(decodings, formats, checkpointing):
    model = make_stack(adapters=True)
    model.checkpointing = checkpointing
    source = copy.deepcopy(model)
    with streaming(model, formats=formats, slots="auto") as stream:
        assert (stream.stats.resident_blocks, stream.stats.decoded_blocks) == (COUNT, COUNT)
        for step in range(3):
            _, result = run_step(model, stream, step)
            assert len(decodings) == COUNT
            twin = decoded_twin(source, stream.formats)
            twin(batch(step)).square().mean().backward()
            assert_equal(result, gradients(twin))
        with torch.no_grad():
            for each in (model, source):
                each.layers[2].up.base.weight.mul_(2)
        _, result = run_step(model, stream, 3)
        assert len(decodings) == COUNT + 1
        twin = decoded_twin(source, stream.formats)
        twin(batch(3)).square().mean().backward()
        assert_equal(result, gradients(twin))


def test_resident_blocks_stay_decoded_in_half_of_the_memory_that_is_left(decodings):
    model = make_stack(adapters=True)
    source, device = copy.deepcopy(model), SimulatedDevice()
    with streaming(model, device, formats="int8_row", slots="auto", vram_bytes=2**30) as stream:
        whole = stream.stats.vram_bytes
        of_one = stream._loader.layouts[0].scratch_nbytes
    needed = whole - COUNT * of_one  # slots of all blocks, and the common scratch
    with streaming(model, device, formats="int8_row", slots="auto", vram_bytes=needed + 4 * of_one) as stream:
        assert stream.stats.decoded_blocks == 2
        assert stream.stats.vram_bytes == needed + 2 * of_one
        run_step(model, stream, 0)
        before = len(decodings)
        _, result = run_step(model, stream, 1)
        assert len(decodings) == before + 2 * (COUNT - 2) - 2  # at each turn a block computes twice from one decoding
        twin = decoded_twin(source, stream.formats)
        twin(batch(1)).square().mean().backward()
        assert_equal(result, gradients(twin))
    assert device.allocated_bytes == 0


def test_decoded_memory_that_another_format_outgrows_is_given_back():
    model = make_stack(adapters=True)
    source, device = copy.deepcopy(model), SimulatedDevice()
    formats = {
        "layers.0": "int8_row",
        "layers.*.up.base.weight": "mxfp4",
    }  # block 0 is decoded whole, the others in part
    with streaming(model, device, formats=formats, slots="auto", vram_bytes=2**30) as stream:
        run_step(model, stream, 0)
        assert stream.stats.decoded_blocks == COUNT
        size = stream.stats.slot_bytes
        stream.set_formats({"layers.3": "int8_row"})
        _, result = run_step(model, stream, 1)
        assert stream.stats.slot_bytes == size  # the same slots
        assert stream.stats.decoded_blocks == COUNT - 1
        twin = decoded_twin(source, stream.formats)
        twin(batch(1)).square().mean().backward()
        assert_equal(result, gradients(twin))
    assert device.allocated_bytes == 0


def test_blocks_that_grow_beside_decoded_ones_stay_within_the_limit():
    model = make_stack(adapters=True)
    with streaming(copy.deepcopy(model), slots=6) as stream:
        limit = int(stream.stats.slot_bytes * (COUNT + 3.5))
    formats = {f"layers.{index}": "mxfp4" for index in range(1, COUNT)}
    with streaming(model, formats=formats, slots="auto", vram_bytes=limit) as stream:
        assert stream.stats.resident_blocks == COUNT
        assert stream.stats.decoded_blocks > 0
        run_step(model, stream, 0)
        stream.set_formats("float32")
        run_step(model, stream, 1)
        assert stream.stats.resident_blocks == COUNT
        assert stream.stats.vram_bytes <= limit


def test_a_resident_block_that_finds_no_memory_leaves_everything_as_it_was():
    model = make_stack(adapters=True)
    formats = dict.fromkeys((f"layers.{index}" for index in range(1, COUNT)), "int8_row") | {"layers.0": "bfloat16"}
    device = SimulatedDevice()
    with streaming(model, device, formats=formats, slots="auto", vram_bytes=2**30) as stream:
        _, expected = run_step(model, stream, 0)
        device.capacity_bytes = device.allocated_bytes  # something else has taken the rest
        before = stream.formats
        stream.set_formats({"layers.4": "bfloat16"})
        with pytest.raises(torch.OutOfMemoryError, match="resident block 4"):
            stream.begin_step(1)
        assert stream.formats == before
        _, result = run_step(model, stream, 0)
        assert_equal(result, expected)


def test_where_all_blocks_switch_memory_is_shared_out_anew():
    model = make_stack(adapters=True)
    budget = 900_000
    with streaming(model, formats="float32", slots="auto", vram_bytes=budget) as stream:
        run_step(model, stream, 0)
        before = stream.stats
        stream.set_formats("int8_row")
        run_step(model, stream, 1)
        assert stream.stats.resident_blocks > before.resident_blocks
        assert stream.stats.vram_bytes <= budget


def test_streamed_blocks_stay_where_they_are():
    model = make_stack(adapters=True)
    with streaming(model) as stream:
        address = model.layers[0].down.weight.data_ptr()
        model.to(torch.float64)
        assert model.head.weight.dtype == torch.float64
        assert model.layers[0].down.weight.dtype == torch.float32
        assert model.layers[0].down.weight.data_ptr() == address
        model.to(torch.float32)
        run_step(model, stream, 0)
    assert "_apply" not in model.layers[0].__dict__
    model.to(torch.float64)
    assert model.layers[0].down.weight.dtype == torch.float64


def test_more_and_fewer_slots_take_effect_at_the_next_step_and_change_no_gradient():
    model = make_stack(adapters=True)
    with streaming(model, formats="int8_row", slots=2) as stream:
        _, expected = run_step(model, stream, 0)
        few_bytes, _ = run_step(model, stream, 0)
        for slots, ring in ((5, 5), ("auto", 0), (2, 2)):
            stream.set_slots(slots)
            assert_equal(run_step(model, stream, 0)[1], expected)
            sent, result = run_step(model, stream, 0)
            assert_equal(result, expected)
            assert stream.stats.ring_slots == ring
            block = block_bytes(stream, "layers.0")
            assert sent == (0 if slots == "auto" else 2 * (COUNT - slots) * block)
        assert sent == few_bytes
        with pytest.raises(StreamError, match="slots=1: expected 'auto' or a number from 2 on"):
            stream.set_slots(1)


def test_fewer_blocks_stay_decoded_where_a_step_needs_the_memory(monkeypatch):
    model, device = make_stack(adapters=True), SimulatedDevice(2**22)
    with streaming(model, device, formats="int8_row", slots="auto") as stream:
        run_step(model, stream, 0)
        before = stream.stats
        assert before.decoded_blocks == COUNT
        needed = device.spare_bytes() + 3 * stream._loader.layouts[0].scratch_nbytes
        monkeypatch.setattr(device, "peak_bytes", lambda: device.used_bytes() + needed)
        run_step(model, stream, 1)
        stream.begin_step(2)
        assert 0 < stream.stats.decoded_blocks < COUNT
        assert stream.stats.resident_blocks == COUNT
        assert device.spare_bytes() >= needed
        stream.end_step()
