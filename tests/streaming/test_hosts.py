"""Hosts, memory and telemetry: where blocks wait, what that costs, and what is written down."""

from __future__ import annotations

import copy
import json
import mmap
import threading

import pytest
import torch

from bitplan.base.errors import StoreError
from bitplan.files.safetensors import SafetensorsFile
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.transfer.devices import SimulatedDevice
from bitplan.streaming.transfer.host_memory import exact_buffer
from tests.streaming.stream_samples import (
    COUNT,
    TIMEOUT_S,
    ClockedDevice,
    assert_equal,
    batch,
    make_stack,
    streaming,
    train_steps,
)

KEYS = {
    "step", "step_ms", "compute_ms", "stall_ms", "copy_ms", "overlap", "bytes_h2d", "bytes_h2d_by_format", "bytes_d2h",
    "bytes_d2h_by_format", "h2d_gb_per_s", "loads", "prefetch_hits", "prefetch_misses", "prefetches_held_back",
    "limits", "vram_peak_bytes", "pinned_peak_bytes", "timeline",
}  # fmt: skip


@pytest.mark.parametrize("host", ["pinned", "pageable", "file"])
def test_every_host_trains_alike(host):
    model, device = make_stack(adapters=True), SimulatedDevice()
    expected = train_steps(copy.deepcopy(model), 2)
    with streaming(model, device, host=host, slots=2, formats=None) as stream:
        for got, wanted in zip(train_steps(model, 2, stream=stream), expected, strict=True):
            assert_equal(got, wanted)
        stream.set_formats("int8_row")
        train_steps(model, 1, stream=stream)
        stream.synchronize()
        assert stream.stats.last.bytes_h2d_by_format["int8_row"] > 0
    assert (device.allocated_bytes, device.pinned_bytes) == (0, 0)


def test_synchronize_waits_for_the_copies_that_a_step_has_made_ahead():
    free, held_up = threading.Event(), threading.Event()
    device = SimulatedDevice()
    model = make_stack(adapters=True)
    with streaming(model, device, slots=2) as stream:
        stream.begin_step(0)
        model(batch(0)).square().mean().backward()
        stream.synchronize()  # of the open step: nothing to raise, all its copies are over

        def hold_up() -> None:
            held_up.set()
            assert free.wait(TIMEOUT_S)

        device.before_copy = hold_up
        stream._loader.forget({0})
        stream._loader._prefetch()  # for the next step, as the end of a backward does
        assert held_up.wait(TIMEOUT_S)
        stream.end_step()
        assert stream.stats.last is None  # the last copy of the step is not over, and nobody waited for it
        threading.Timer(0.05, free.set).start()
        stream.synchronize()
        assert stream.stats.last.step == 0


def test_pinned_memory_is_the_bytes_of_the_blocks_and_holds_the_parameters():
    model, device = make_stack(adapters=True), SimulatedDevice()
    with streaming(model, device) as stream:
        streamed = {name: one for name, one in model.named_parameters() if name in stream.formats}
        held = sum(one.nbytes for one in streamed.values())
        assert held <= device.pinned_bytes <= held + COUNT * 8 * 256
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in streamed.values()}
        assert sum(storages.values()) == device.pinned_bytes  # no second copy in RAM
    assert all(one.isfinite().all() for one in model.parameters())


def test_file_host_writes_self_describing_files_and_removes_its_own_folder(tmp_path):
    with streaming(make_stack(adapters=True), host="file", host_folder=tmp_path, formats="mxfp4"):
        with SafetensorsFile(tmp_path / "layers.2.safetensors") as file:
            layout = json.loads(file.metadata["bitplan_block_layout"])
        assert layout["down.weight"] == {
            "format": "mxfp4",
            "shape": [128, 256],
            "offset": layout["down.weight"]["offset"],
        }
    assert len(list(tmp_path.iterdir())) == COUNT
    with streaming(make_stack(adapters=True), host="file") as stream:
        folder = stream._host.folder
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE + 1, 3 * 2**20 + 256])
def test_buffers_are_not_rounded_up(nbytes):
    buffer = exact_buffer(nbytes)
    assert buffer.nbytes == nbytes
    assert buffer.untyped_storage().nbytes() == nbytes
    assert buffer.data_ptr() % mmap.PAGESIZE == 0


def test_telemetry_is_not_appended_to_another_file(tmp_path):
    path = tmp_path / "model.safetensors"
    for other in (b"weights", b'{"step": 1, "name": "drift"}\n'):
        path.write_bytes(other)
        refused = pytest.raises(StoreError, match="exists and is not a streaming telemetry file; nothing was appended")
        with refused, streaming(make_stack(adapters=False), telemetry=path, slots=2, train="nothing"):
            pass
        assert path.read_bytes() == other


def test_telemetry_counts_what_was_copied(tmp_path):
    path, device = tmp_path / "steps.jsonl", ClockedDevice(bytes_per_s=100e6)
    model = make_stack(adapters=False)
    options = {
        "train": "weights",
        "optimizer": AdamWSettings(),
        "formats": {"layers.1": "int8_row", "layers.2": "mxfp4"},
    }
    with streaming(model, device, telemetry=path, slots=2, **options) as stream:
        for step in range(3):
            stream.begin_step(step)
            model(torch.randn(2, 8)).sum().backward()
            stream.end_step()
        stream.synchronize()
        vram = stream.stats.vram_bytes
    assert (stream.stats.vram_bytes, stream.stats.ring_slots) == (0, 0)  # all was given back
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(set(line) == KEYS for line in lines)
    assert sum(line["bytes_h2d"] for line in lines) == device.bytes_in
    assert sum(line["bytes_d2h"] for line in lines) == device.bytes_out
    for line in lines:
        assert sum(line["bytes_h2d_by_format"].values()) == line["bytes_h2d"]
        assert {"int8_row", "mxfp4", "float32"} <= set(line["bytes_h2d_by_format"])
        assert line["bytes_d2h_by_format"] == {"float32": sum(one.nbytes for one in model.layers.parameters())}
        assert line["h2d_gb_per_s"] == pytest.approx(0.1)
        assert line["step_ms"] == pytest.approx(line["compute_ms"] + line["stall_ms"])
        assert 0 <= line["overlap"] <= 1
        assert line["vram_peak_bytes"] == vram
        assert line["pinned_peak_bytes"] >= sum(one.nbytes for one in model.layers.parameters()) / 2
        assert line["prefetch_hits"] + line["prefetch_misses"] >= 2 * COUNT - 1


def test_slow_copies_are_stalls_and_slow_computation_hides_them():
    for compute_s in (1e-3, 10.0):
        model, device = make_stack(adapters=True), ClockedDevice(bytes_per_s=4e6)
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_, device=device, seconds=compute_s: device.compute(seconds))
        with streaming(model, device, slots=2) as stream:
            train_steps(model, 2, stream=stream)
            stream.synchronize()
            last = stream.stats.last
        assert last.copy_ms == pytest.approx(last.bytes_h2d / 4e6 * 1e3)
        assert last.compute_ms == pytest.approx(COUNT * compute_s * 1e3)
        assert last.step_ms == pytest.approx(last.compute_ms + last.stall_ms)
        # Backward takes no time here: it hides none of its copies, which are half of all.
        assert last.overlap < 0.05 if compute_s < 1 else last.overlap == pytest.approx(0.5)
