"""What stream_blocks refuses, by name, before it changes anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.base.errors import FormatError, PlanError, StreamError
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.transfer.devices import SimulatedDevice, open_device
from tests.streaming.stream_samples import arguments_of, batch, make_stack, streaming


def refuse(model: nn.Module, says: str, **options) -> None:
    before = [one.data_ptr() for one in model.parameters()]
    with pytest.raises((StreamError, FormatError, PlanError), match=says):
        stream_blocks(model, **{"blocks": "layers.*", "device": "cpu"} | arguments_of(options))
    assert [one.data_ptr() for one in model.parameters()] == before
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_an_unmatched_pattern():
    refuse(make_stack(adapters=True), r"'model\.layers\.\*' names no module.*'layers\.\*'", blocks="model.layers.*")
    refuse(nn.Linear(2, 2), "it has no list of blocks")


def test_a_block_without_parameters():
    refuse(nn.Sequential(nn.ReLU()), r"0 has no parameters", blocks="*")


def test_recurrent_layers():
    refuse(nn.Sequential(nn.LSTM(4, 4)), "0 holds a recurrent layer", blocks="*", train="nothing")


def test_a_block_that_fits_no_slot():
    refuse(
        make_stack(adapters=True),
        r"layers\.0 takes \d+ bytes and a slot has 1024: it fits no slot",
        slot_bytes=1024,
        slots=2,
    )
    model = make_stack(adapters=True)
    with streaming(model, formats="int8_row", slot_bytes=80_000) as stream:
        with pytest.raises(StreamError, match=r"layers\.0 would take \d+ bytes and a slot has 80000"):
            stream.set_formats("float32")
        stream.set_formats({"layers.1": "mxfp4"})


def test_shared_parameters():
    model = make_stack(adapters=True)
    model.layers[3].down.weight = model.layers[1].down.weight
    refuse(model, r"layers\.\d\.down\.weight is shared with layers\.\d")
    model = make_stack(adapters=True)
    model.layers[3].down = model.layers[1].down
    refuse(model, r"layers\.3 shares parameters with layers\.1")
    model = make_stack(adapters=True)
    model.tied = model.layers[2].down.weight
    refuse(model, r"tied is shared with layers\.2")


def test_a_model_that_was_moved():
    model = make_stack(adapters=True)
    model.layers[2].down.to("meta")
    refuse(model, r"layers\.2\.down\.weight is on meta.*load it with real weights")


def test_a_stream_within_a_stream_and_after_its_end():
    model = make_stack(adapters=True)
    with streaming(model) as stream:
        with pytest.raises(StreamError, match=r"layers\.0 is streamed already"):
            stream_blocks(model, "layers.*", device="cpu")
        with pytest.raises(StreamError, match="no step is open"):
            stream.end_step()
    with pytest.raises(StreamError, match="closed"):
        stream.begin_step(0)
    stream.close()
    assert model(batch(0)).isfinite().all()


def test_nothing_to_stream_says_what_to_do():
    refuse(make_stack(adapters=False), r"layers\.0 has nothing to stream.*train='weights'.*train='nothing'")
    refuse(make_stack(adapters=False), "train='all': there are", train="all")


def test_formats():
    model = make_stack(adapters=True)
    refuse(
        model, r"the pattern 'layers\.9' matches no tensor; did you mean 'layers\.5'", formats={"layers.9": "int8_row"}
    )
    refuse(model, "no format 'int9'", formats="int9")
    model.layers[0].odd = nn.Linear(48, 8).requires_grad_(False)
    refuse(model, r"layers\.0\.odd\.weight: int8_g128 has blocks of 128", formats="int8_g128")
    model = make_stack(adapters=True)
    model.layers[0].codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    refuse(model, r"layers\.0\.codes: int8 cannot be streamed")


def test_other_arguments():
    model = make_stack(adapters=True)
    refuse(model, "host='disk'", host="disk")
    refuse(model, "no such folder", host="file", host_folder="not/here")
    refuse(model, "goes with host='file'", host_folder=".")
    for slots in (1, 0, "many"):
        refuse(model, "expected 'auto' or a number from 2 on", slots=slots)
    refuse(model, r"blocks=\['layers.0'\]: expected one text", blocks=["layers.0"])
    refuse(model, "check_finite='no': expected True or False", check_finite="no")
    refuse(model, "offload_activations=1: expected True or False", offload_activations=1)
    for given in (8e9, "8GB", 0):
        refuse(model, "vram_bytes=.*: expected a whole number of bytes", vram_bytes=given)
        refuse(model, "slot_bytes=.*: expected a whole number of bytes", slot_bytes=given)
    refuse(model, "vram_bytes= is what slots='auto' may take, and slots=3", vram_bytes=2**30, slots=3)
    refuse(model, "timeout_s=-1: expected seconds above 0", timeout_s=-1)
    refuse(make_stack(adapters=False), "expected a norm above 0, got '1'", train="weights", clip_grad_norm="1")
    for optimizer, shown in (
        ("adam", "'adam'"),
        (torch.optim.SGD, "SGD"),
        (torch.optim.SGD([torch.ones(1)], 0.1), "SGD"),
    ):
        message = rf"of bitplan.streaming, got {shown}; .* give HostOptimizer\(torch.optim.SGD"
        refuse(make_stack(adapters=False), message, train="weights", optimizer=optimizer)
    for device in ("gpu", None):
        refuse(model, "expected 'cuda', 'cuda:1', or 'cpu' to try it out", device=device)
    with pytest.raises(StreamError, match=r"expected a model \(torch.nn.Module\), got str"):
        stream_blocks("a name", device="cpu")
    with pytest.raises(StreamError, match=r"options={}: expected StreamOptions\(\.\.\.\) of bitplan\.streaming"):
        stream_blocks(model, "layers.*", device="cpu", options={})
    with streaming(model) as stream, pytest.raises(StreamError, match="give one of the two"):
        stream.set_slots(3, vram_bytes=2**30)
    with pytest.raises(StreamError, match="streamed to CUDA devices"):
        open_device("meta")
    device = SimulatedDevice()
    assert open_device(device) is device


def test_gradients_with_nothing_to_train_are_refused():
    model = make_stack(adapters=False)
    with streaming(model, train="nothing") as stream:
        stream.begin_step(0)
        with pytest.raises(StreamError, match=r"layers\.0: train='nothing', but an input requires gradients"):
            model(batch(0))
        with torch.no_grad():
            model(batch(0))
        stream.end_step()
