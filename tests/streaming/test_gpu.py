"""The same on a real GPU: copy streams, events and Triton's decoders against the model that lies there whole."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from bitplan.base.errors import BlockNonFiniteError
from bitplan.streaming.transfer.copies import norms_of
from bitplan.streaming.transfer.devices import CudaDevice
from bitplan.streaming.transfer.transfer_limits import RuntimeLimitHints
from tests.streaming.stream_samples import (
    CHECKPOINTING,
    assert_equal,
    batch,
    decoded_twin,
    make_stack,
    streaming,
    train_steps,
)
from tests.streaming.test_weights import SETTINGS, masters_of, run_resident, run_streamed

pytestmark = pytest.mark.gpu
FORMATS = [None, "bfloat16", "int8_row", "int8_g128", "fp8_e4m3_row", "mxfp4", {"layers.1": "mxfp4", "*": "int8_row"}]


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_adapters_equal_the_resident_model(dtype, formats, checkpointing):
    model = make_stack(adapters=True, dtype=dtype)
    source = copy.deepcopy(model)
    model.checkpointing = source.checkpointing = checkpointing
    with streaming(model, "cuda", formats=formats, slots=2) as stream:
        twin = decoded_twin(source, stream.formats).cuda()
        expected = train_steps(twin, 5, micro_batches=2, dtype=dtype, device="cuda")
        result = train_steps(model, 5, stream=stream, micro_batches=2, dtype=dtype, device="cuda")
        for got, wanted in zip(result, expected, strict=True):
            assert_equal(got, wanted)
        torch.cuda.synchronize()
        last = stream.stats.last
        assert sum(last.bytes_h2d_by_format.values()) == last.bytes_h2d > 0


@pytest.mark.parametrize("host", ["pinned", "pageable", "file"])
def test_hosts_and_memory(host):
    before = torch.cuda.memory_allocated()
    model, device = make_stack(adapters=True, dtype=torch.bfloat16), CudaDevice("cuda")
    resident = copy.deepcopy(model).cuda()
    expected = train_steps(resident, 3, dtype=torch.bfloat16, device="cuda")
    with streaming(model, device, host=host, slots=3) as stream:
        result = train_steps(model, 3, stream=stream, dtype=torch.bfloat16, device="cuda")
        for got, wanted in zip(result, expected, strict=True):
            assert_equal(got, wanted)
    assert (device.allocated_bytes, device.pinned_bytes) == (0, 0)
    del model, resident, result, expected, got, wanted
    torch._C._cuda_clearCublasWorkspaces()  # 64 MiB that the first product on a stream takes for good
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
@pytest.mark.parametrize("formats", [None, "int8_row"])
def test_masters_equal_those_of_a_resident_model(formats, checkpointing):
    model = make_stack(adapters=False, dtype=torch.bfloat16)
    model.checkpointing = checkpointing
    resident = copy.deepcopy(model).cuda()
    with streaming(model, "cuda", train="weights", optimizer=SETTINGS, formats=formats, slots=2) as stream:
        run_streamed(model, stream, 4, 2, torch.bfloat16)
        assert_equal(masters_of(stream), run_resident(resident, stream.formats, 4, 2, torch.bfloat16))


@pytest.mark.parametrize("formats", [None, "int8_row"])
def test_activations_leave_and_come_back(formats):
    model = make_stack(adapters=True, dtype=torch.bfloat16)
    plain = copy.deepcopy(model)
    with streaming(plain, "cuda", formats=formats, slots=2) as stream:
        expected = train_steps(plain, 5, stream=stream, micro_batches=2, dtype=torch.bfloat16, device="cuda")
    device = CudaDevice("cuda")
    with streaming(model, device, formats=formats, slots=2, offload_activations=True) as stream:
        result = train_steps(model, 5, stream=stream, micro_batches=2, dtype=torch.bfloat16, device="cuda")
        for got, wanted in zip(result, expected, strict=True):
            assert_equal(got, wanted)
        torch.cuda.synchronize()
        last = stream.stats.last
        assert last.bytes_d2h_by_format["activations"] == last.bytes_h2d_by_format["activations"] > 0
    assert (device.allocated_bytes, device.pinned_bytes) == (0, 0)


def test_limits_and_clipping_change_nothing_but_time():
    model = make_stack(adapters=False, dtype=torch.bfloat16)
    plain, result = copy.deepcopy(model), []
    for one, hints in ((plain, None), (model, RuntimeLimitHints(1, 1, 1, suppress_speculative=True))):
        options = {"train": "weights", "optimizer": SETTINGS, "clip_grad_norm": 0.05, "slots": 4}
        with streaming(one, "cuda", offload_activations=hints is not None, **options) as stream:
            begin = stream.begin_step
            if hints is not None:
                stream.begin_step = lambda step, begin=begin, stream=stream, hints=hints: (
                    begin(step),
                    stream.set_limits(hints),
                    stream.pressure(),
                )
            run_streamed(one, stream, 3, 2, torch.bfloat16)
            assert stream.training.gradient_norm > 0.05
            assert 0 < stream.pressure().vram_share < 1
            result.append({name: master.clone() for name, master in masters_of(stream).items()})
    assert_equal(result[1], result[0])


@pytest.mark.parametrize("offload", [False, True])
def test_no_host_synchronisation_in_a_step(offload):
    model = make_stack(adapters=True, dtype=torch.bfloat16)
    with streaming(model, "cuda", formats="int8_row", offload_activations=offload) as stream:
        train_steps(model, 2, stream=stream, dtype=torch.bfloat16, device="cuda")  # compiles the decoders
        x = batch(0, torch.bfloat16, "cuda")
        stream.begin_step(9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            stream.pressure()
            model(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        stream.end_step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_figures_of_gradients_are_finite_where_all_numbers_are(bad):
    tensors = [torch.randn(count, device="cuda", dtype=torch.bfloat16) for count in (1, 7, 1000, 300_000)]
    assert all(figure.isfinite() for figure in norms_of(tensors))
    for tensor in tensors[1:]:
        tensor[len(tensor) // 2] = bad
    assert [bool(one.isfinite()) for one in norms_of(tensors)] == [True, False, False, False]


def test_nan_is_found_later():
    model = make_stack(adapters=True, dtype=torch.bfloat16)
    with streaming(model, "cuda") as stream:
        stream.begin_step(4)
        model(batch(0, torch.bfloat16, "cuda") * float("nan"))
        with pytest.raises(BlockNonFiniteError, match=r"layers\.0, step 4"):
            finish(stream)


def finish(stream) -> None:
    stream.end_step()
    stream.synchronize()


def test_telemetry_reads_the_clocks_of_the_device():
    model = make_stack(adapters=True, dtype=torch.bfloat16)
    with streaming(model, "cuda", slots=2) as stream:
        train_steps(model, 3, stream=stream, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        last = stream.stats.last
        assert last.step == 2
        assert last.copy_ms > 0
        assert 0 <= last.stall_ms <= last.step_ms
        assert last.bytes_h2d == last.loads * stream.stats.slot_bytes


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("formats", [None, "int8_row"])
def test_compiled_blocks_compute_nearly_the_same(formats):
    """Inductor fuses and keeps intermediate numbers wide, so the last bits differ."""
    model = make_stack(adapters=True)
    model.checkpointing = "reentrant"
    plain = copy.deepcopy(model)
    with streaming(plain, "cuda", formats=formats, slots=2) as stream:
        expected = train_steps(plain, 2, stream=stream, device="cuda")
    with streaming(model, "cuda", formats=formats, slots=2, compile=True) as stream:
        result = train_steps(model, 2, stream=stream, device="cuda")
    for got, wanted in zip(result, expected, strict=True):
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=1e-5)


def test_auto_slots_hold_all_blocks_that_fit_and_fewer_under_a_limit():
    model = make_stack(adapters=True, dtype=torch.bfloat16)
    resident = copy.deepcopy(model).cuda()
    expected = train_steps(resident, 4, dtype=torch.bfloat16, device="cuda")
    with streaming(model, "cuda", slots="auto") as stream:
        result = train_steps(model, 4, stream=stream, dtype=torch.bfloat16, device="cuda")
        for got, wanted in zip(result, expected, strict=True):
            assert_equal(got, wanted)
        torch.cuda.synchronize()
        assert stream.stats.resident_blocks + stream.stats.ring_slots >= len(stream.blocks)
        assert stream.stats.last.bytes_h2d == 0  # all blocks have stayed on the device
        stream.set_slots("auto", vram_bytes=stream.device.allocated_bytes // 2)
        train_steps(model, 2, stream=stream, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        assert stream.stats.last.bytes_h2d > 0
