"""Inputs of blocks in host memory between forward and backward: gradients to the bit, memory, order and failures."""

from __future__ import annotations

import copy
import random
import threading
import time

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from bitplan.base.errors import StreamError, TransferError
from bitplan.streaming.transfer.devices import SimulatedDevice
from bitplan.streaming.transfer.transfer_limits import RuntimeLimitHints
from tests.crosses import few
from tests.streaming.interrupts import CAUGHT, break_bus, interrupt, stop_thread
from tests.streaming.stream_samples import (
    COUNT,
    TIMEOUT_S,
    WIDTH,
    ClockedDevice,
    assert_equal,
    batch,
    decoded_twin,
    gradients,
    make_stack,
    streaming,
    train_steps,
)
from tests.streaming.test_weights import SETTINGS, masters_of, run_streamed

INPUT_BYTES = 5 * WIDTH * 4  # of a block, one micro-batch


def offloading(model, device=None, **options):
    return streaming(model, device, offload_activations=True, **options)


@pytest.mark.cross("slots", [2, 4])
@pytest.mark.cross("formats", [None, "int8_row"])
def test_gradients_equal_those_without_offloading(formats, slots):
    model = make_stack(adapters=True)
    plain = copy.deepcopy(model)
    with streaming(plain, formats=formats) as stream:
        expected = train_steps(plain, 3, stream=stream, micro_batches=2)
    with offloading(model, formats=formats, slots=slots) as stream:
        for got, wanted in zip(train_steps(model, 3, stream=stream, micro_batches=2), expected, strict=True):
            assert_equal(got, wanted)


def test_masters_equal_those_without_offloading():
    model = make_stack(adapters=False)
    plain = copy.deepcopy(model)
    with streaming(plain, train="weights", optimizer=SETTINGS) as stream:
        run_streamed(plain, stream, 3, 2)
        expected = {name: one.clone() for name, one in masters_of(stream).items()}
    with offloading(model, train="weights", optimizer=SETTINGS) as stream:
        run_streamed(model, stream, 3, 2)
        assert_equal(masters_of(stream), expected)


def test_telemetry_counts_what_left_and_came_back():
    model = make_stack(adapters=True)
    device = SimulatedDevice()
    with offloading(model, device) as stream:
        train_steps(model, 3, stream=stream, micro_batches=2)
        stream.synchronize()
        last = stream.stats.last
        moved = 2 * (COUNT - 1) * INPUT_BYTES  # the last block's input would come straight back
        assert last.bytes_d2h_by_format == {"activations": moved}
        assert last.bytes_h2d_by_format["activations"] == moved
        assert (sum(last.bytes_h2d_by_format.values()), last.bytes_d2h) == (last.bytes_h2d, moved)
        assert device.bytes_out == 3 * moved


@pytest.mark.parametrize("offload", [False, True])
def test_inputs_are_not_kept_on_the_device(offload):
    model, inputs = make_stack(adapters=True), []
    model.checkpointing = "none" if offload else "non-reentrant"
    for layer in model.layers:
        layer.norm.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    with streaming(model, offload_activations=offload) as stream:
        stream.begin_step(0)
        loss = model(batch(0)).sum()
        assert [storage.expired() for storage in inputs] == [offload] * (COUNT - 1) + [False]
        loss.backward()
        stream.end_step()


def test_the_arena_is_made_once_and_given_back():
    model, device = make_stack(adapters=True), SimulatedDevice()
    before = set(threading.enumerate())  # a test of a copy that hangs leaves its own
    with offloading(model, device) as stream:
        weights = device.pinned_bytes
        train_steps(model, 1, stream=stream, micro_batches=2)
        arena, allocated = device.pinned_bytes - weights, device.allocated_bytes
        assert arena == (COUNT - 1) * INPUT_BYTES
        train_steps(model, 3, stream=stream, micro_batches=3)
        assert (device.pinned_bytes - weights, device.allocated_bytes) == (arena, allocated)
    assert (device.pinned_bytes, device.allocated_bytes) == (0, 0)
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("bitplan-")]


def test_inputs_of_changing_length():
    model, device = make_stack(adapters=True), SimulatedDevice()
    resident = copy.deepcopy(model)
    with offloading(model, device) as stream:
        weights = device.pinned_bytes
        for step, rows in enumerate([3, 9, 1, 9, 4]):
            x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(step))
            for one in (model, resident):
                one.zero_grad()
            resident(x).square().mean().backward()
            stream.begin_step(step)
            model(x).square().mean().backward()
            stream.end_step()
            assert_equal(gradients(model), gradients(resident))
        assert device.pinned_bytes - weights == (COUNT - 1) * 9 * WIDTH * 4


def test_backwards_in_another_order_than_forwards():
    model = make_stack(adapters=True)
    resident = copy.deepcopy(model)
    for seed in (1, 0):
        resident(batch(seed)).square().mean().backward()
    with offloading(model) as stream:
        stream.begin_step(0)
        losses = [model(batch(seed)).square().mean() for seed in (0, 1)]
        losses[1].backward()
        losses[0].backward(retain_graph=True)
        stream.end_step()
        assert_equal(gradients(model), gradients(resident))
        model.zero_grad()
        stream.begin_step(1)
        loss = model(batch(0)).square().mean()
        loss.backward(retain_graph=True)
        first = gradients(model)
        model.zero_grad()
        loss.backward()  # everything comes back a second time
        stream.end_step()
        assert_equal(gradients(model), first)


def test_random_numbers_are_those_of_the_forward():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(4)])
    for block in model:
        block.append(nn.Linear(16, 16))
        block[0].requires_grad_(False)
    resident, x = copy.deepcopy(model), torch.randn(4, 16)
    torch.manual_seed(7)
    resident(x).square().mean().backward()
    with offloading(model, blocks="*", slots=2) as stream:
        stream.begin_step(0)
        torch.manual_seed(7)
        model(x).square().mean().backward()
        stream.end_step()
        assert_equal(gradients(model), gradients(resident))


def test_inputs_by_keyword_and_several_arguments():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.own = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16)

        def forward(self, index, hidden, gate):
            return self.base(hidden) * gate.sigmoid() + self.own(hidden) + index

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Mixed() for _ in range(4))
            self.gate = nn.Parameter(torch.randn(16))

        def forward(self, x):
            for index, layer in enumerate(self.layers):
                x = layer(torch.tensor(index), hidden=x, gate=self.gate)
            return x

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 16)
    resident = copy.deepcopy(model)
    resident(x).square().mean().backward()
    with offloading(model, slots=2) as stream:
        stream.begin_step(0)
        model(x).square().mean().backward()
        stream.end_step()
        assert_equal(gradients(model), gradients(resident))
        stream.synchronize()
        assert stream.stats.last.bytes_d2h == 3 * x.nbytes


class Notebook(SimulatedDevice):
    """Writes down every copy of an activation: where from, where to, after what, and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, int, int, tuple, object]] = []

    def copy_in(self, target, source, *after, queue="weights"):
        copied = super().copy_in(target, source, *after, queue=queue)
        if queue == "activations":
            self.copies.append(("in", source.data_ptr(), target.data_ptr(), after, copied))
        return copied

    def copy_out(self, target, source, *after, queue="weights"):
        copied = super().copy_out(target, source, *after, queue=queue)
        if queue == "activations":
            self.copies.append(("out", source.data_ptr(), target.data_ptr(), after, copied))
        return copied


def test_every_copy_comes_after_those_it_depends_on():
    """A GPU orders streams by these marks alone; the simulated device, which copies in order, would not miss one."""
    model, device = make_stack(adapters=True), Notebook()
    with offloading(model, device) as stream:
        train_steps(model, 3, stream=stream, micro_batches=2)
    assert len(device.copies) == 2 * 3 * 2 * (COUNT - 1)
    last: dict[int, tuple] = {}  # by host place: its last copy; by landing: likewise
    for kind, source, target, after, copied in device.copies:
        place, buffer = (target, source) if kind == "out" else (source, target)
        if place in last:  # into a place after it was read, out of it after it was written
            assert last[place].end in after
        if kind == "in" and buffer in last:
            assert after[0].time_s > last[buffer].end.time_s  # the mark behind the landing's last reader
        last[place] = last[buffer] = copied


@pytest.mark.parametrize("axes", [pytest.param((0, 1, 2), marks=pytest.mark.long), (1, 0, 2), (1, 2, 0)])
def test_the_order_of_axes_in_memory_comes_back(axes):
    seen: list[tuple[int, ...]] = []

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.own = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

        def forward(self, x):
            seen.append(x.stride())
            x = self.base(x) + self.own(x)
            return x.permute(axes).contiguous().permute([axes.index(axis) for axis in range(3)])

    torch.manual_seed(0)
    model = nn.Sequential(*[Keeps() for _ in range(4)])
    resident, x = copy.deepcopy(model), torch.randn(2, 3, 4)
    resident(x).square().mean().backward()
    seen.clear()
    with offloading(model, blocks="*", slots=2) as stream:
        stream.begin_step(0)
        model(x).square().mean().backward()
        stream.end_step()
        assert_equal(gradients(model), gradients(resident))
    assert seen[4:] == seen[3::-1]


def test_out_of_memory_for_the_buffers_keeps_its_type():
    model, device = make_stack(adapters=True), SimulatedDevice()
    expected = train_steps(copy.deepcopy(model), 1)
    with offloading(model, device) as stream:
        device.capacity_bytes = device.allocated_bytes + 3 * INPUT_BYTES
        stream.begin_step(0)
        with pytest.raises(torch.OutOfMemoryError, match="buffer 3 for activations") as caught:
            model(batch(0))
        assert "layers.0, step 0" in caught.value.__notes__[0]
        device.capacity_bytes = None
        assert_equal(train_steps(model, 1, stream=stream)[0], expected[0])
    assert (device.pinned_bytes, device.allocated_bytes) == (0, 0)


def test_slow_copies_are_waited_for():
    """A buffer that is read, or written again, before its copy has come would give other gradients."""
    model = make_stack(adapters=True)
    expected = train_steps(copy.deepcopy(model), 2)
    device = SimulatedDevice(before_copy=lambda: time.sleep(0.003))
    with offloading(model, device, slots=2) as stream:
        for got, wanted in zip(train_steps(model, 2, stream=stream), expected, strict=True):
            assert_equal(got, wanted)


def test_limits_hold_for_activations_too():
    model = make_stack(adapters=True)
    expected = train_steps(copy.deepcopy(model), 2)
    with offloading(model, ClockedDevice(bytes_per_s=1e6), slots=2) as stream:  # computing takes no time there
        start = stream.begin_step

        def begin(step: int) -> None:
            start(step)
            stream.set_limits(RuntimeLimitHints(1, 1, 1))

        stream.begin_step = begin
        for got, wanted in zip(train_steps(model, 2, stream=stream), expected, strict=True):
            assert_equal(got, wanted)
        stream.synchronize()
        assert stream.stats.last.prefetches_held_back > 0


class FailOnce:
    """Breaks the first copy after it was armed that carries this many bytes."""

    def __init__(self, device: SimulatedDevice, act) -> None:
        self.act, self.armed, self.copy = act, False, device._copy
        device._copy = self

    def __call__(self, direction, queue, target, source, after):
        if self.armed and target.nbytes == INPUT_BYTES:
            self.armed = False
            self.act()
        return self.copy(direction, queue, target, source, after)


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (stop_thread, TransferError, r"layers\.\d, step 1: its input: "),
        (break_bus, TransferError, r"layers\.\d, step 1: its input: "),
        (interrupt, KeyboardInterrupt, None),
    ],
)
def test_a_copy_that_fails(act, error, says, when):
    model, device = make_stack(adapters=True), SimulatedDevice()
    resident = copy.deepcopy(model)
    resident(batch(2)).square().mean().backward()
    trouble = FailOnce(device, act)
    with offloading(model, device) as stream:
        train_steps(model, 1, stream=stream)
        with torch.no_grad():
            for one, other in zip(model.parameters(), resident.parameters(), strict=True):
                one.copy_(other)
        with pytest.raises(error, match=says):
            broken_step(model, stream, trouble, when)
        CAUGHT.set()
        model.zero_grad()
        stream.begin_step(2)
        model(batch(2)).square().mean().backward()
        stream.end_step()
        assert_equal(gradients(model), gradients(resident))
    assert (device.pinned_bytes, device.allocated_bytes) == (0, 0)


def broken_step(model, stream, trouble, when) -> None:
    stream.begin_step(1)
    trouble.armed = when == "forward"
    loss = model(batch(1)).square().mean()
    if when == "backward":
        stream._loader.activations._worker.drain(TIMEOUT_S)
        trouble.armed = True
    loss.backward()


@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant", "pairs"])
def test_models_that_checkpoint_themselves_are_refused(checkpointing):
    model = make_stack(adapters=True)
    model.checkpointing = checkpointing
    with offloading(model) as stream:
        stream.begin_step(0)
        with pytest.raises(StreamError, match=r"layers\.\d, step 0: the model checkpoints this block itself.*turn the"):
            model(batch(0)).sum().backward()
        model.checkpointing = "none"
        train_steps(model, 1, stream=stream)


def test_other_refusals():
    model = make_stack(adapters=True)
    with pytest.raises(StreamError, match="train='nothing' has none"), offloading(model, train="nothing"):
        pass
    with offloading(model) as stream:
        stream.begin_step(0)
        loss = model(batch(0)).sum()
        stream.end_step()
        with pytest.raises(StreamError, match="its input is gone: backward came after its step ended"):
            loss.backward()


def test_without_gradients_nothing_moves():
    model = make_stack(adapters=True)
    resident = copy.deepcopy(model)
    with offloading(model) as stream, torch.no_grad():
        assert torch.equal(model(batch(0)), resident(batch(0)))
        assert stream.stats.bytes_d2h == 0


@pytest.mark.parametrize("seed", few(range(12), 3))
def test_any_mix_of_options_gives_the_resident_gradients(seed):
    """Slots, formats, slow copies, accumulation, offloading, and limits that come in the middle of a step."""
    choose = random.Random(seed)
    count = choose.choice([2, 3, 5, 8])
    model = make_stack(adapters=True, count=count)
    offload = choose.random() < 0.6
    model.checkpointing = "none" if offload else choose.choice(["none", "reentrant", "non-reentrant"])
    micro_batches, delay_s = choose.choice([1, 2]), choose.choice([0, 0, 0.001])
    options = {
        "slots": choose.choice([2, 3, 4]),
        "formats": choose.choice([None, "int8_row", {"layers.0": "mxfp4"}]),
        "host": choose.choice(["pinned", "pageable", "file"]),
        "offload_activations": offload,
    }
    source = copy.deepcopy(model)
    with streaming(model, SimulatedDevice(before_copy=lambda: time.sleep(delay_s)), **options) as stream:

        def limit(*_) -> None:
            if stream._step is not None and choose.random() < 0.1:
                h2d, d2h, window = (choose.randint(1, 3) for _ in range(3))
                stream.set_limits(RuntimeLimitHints(h2d, d2h, window, choose.random() < 0.5))
                stream.pressure()

        for layer in model.layers:
            layer.norm.register_forward_hook(limit)
        expected = train_steps(decoded_twin(source, stream.formats), 3, micro_batches=micro_batches)
        result = train_steps(model, 3, stream=stream, micro_batches=micro_batches)
        for got, wanted in zip(result, expected, strict=True):
            assert_equal(got, wanted)


def test_buffers_that_are_too_small_go_when_their_copies_are_done():
    class Recording(SimulatedDevice):
        def __init__(self):
            super().__init__()
            self.waited = []

        def wait(self, copied):
            self.waited.append(copied)

    model, device = make_stack(adapters=True), Recording()
    with offloading(model, device) as stream:
        train_steps(model, 1, stream=stream)
        activations, device.waited = stream._loader.activations, []
        copies = [one.transfer.copied for one in (*activations._outgoing, *activations._landings) if one.transfer]
        activations._resize(2 * INPUT_BYTES)
        assert copies
        assert device.waited == copies


class Counting(nn.Module):
    """A block whose forward reads and changes buffers: spectral and batch norm, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls = self.calls + 1
        return torch.tanh(self.norm(self.linear(x))) * (1 + self.calls)


def test_buffers_that_a_forward_changes_are_changed_once():
    torch.manual_seed(0)
    model = nn.Sequential(*[Counting() for _ in range(4)])
    twin = copy.deepcopy(model)
    with (
        streaming(twin, blocks="*", train="weights", optimizer=SETTINGS) as stream,
        offloading(model, blocks="*", train="weights", optimizer=SETTINGS) as offloaded,
    ):
        for step in range(3):
            for one, of in ((model, offloaded), (twin, stream)):
                of.begin_step(step)
                loss = one(batch(step)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
                of.end_step()
    assert model[0].calls == 3
    assert_equal(model.state_dict(), twin.state_dict())


def test_a_large_buffer_that_a_forward_changes_is_refused(monkeypatch):
    monkeypatch.setattr("bitplan.streaming.block_stream.MOST_KEPT_OF_A_BUFFER", 0)
    model = nn.Sequential(*[Counting() for _ in range(3)])
    with offloading(model, blocks="*", train="weights", optimizer=SETTINGS) as stream:
        stream.begin_step(0)
        with pytest.raises(StreamError, match="0, step 0: its forward changes the buffer calls, which is too large"):
            model(batch(0))
