"""Limits of a conductor: what they hold back, when they count, that results do not change, and what is told of them."""

from __future__ import annotations

import copy
import json
import threading
import time

import pytest
import torch

from bitplan.base.errors import StreamError
from bitplan.streaming.transfer.devices import SimulatedDevice
from bitplan.streaming.transfer.schedule import Load, Walk, allowed_loads
from bitplan.streaming.transfer.transfer_limits import HeuristicPolicyBridge, Phase, RuntimeLimitHints
from tests.streaming.stream_samples import (
    CHECKPOINTING,
    TIMEOUT_S,
    assert_equal,
    batch,
    gradients,
    make_stack,
    streaming,
)
from tests.streaming.test_weights import SETTINGS, masters_of, run_streamed

WIDE = RuntimeLimitHints(max_inflight_h2d=8, max_inflight_d2h=8, prefetch_window_cap=8)


def limits(h2d: int = 8, window: int = 8, *, quiet: bool = False, d2h: int = 8) -> RuntimeLimitHints:
    return RuntimeLimitHints(h2d, d2h, window, quiet, reasons=("a test",))


def at(position: int | None, direction: int = 1, *, wraps: bool = False) -> Walk:
    return Walk(8, frozenset(), position, direction, wraps)


@pytest.mark.parametrize(
    ("walk", "wanted", "hints", "in_flight", "allowed"),
    [
        (at(3), [4, 5, 6], limits(), 0, [4, 5, 6]),
        (at(3), [4, 5, 6], limits(window=2), 0, [4, 5]),
        (at(3), [5, 6], limits(window=2), 0, [5]),  # 4 is there already, and takes its place in the window
        (at(3), [5, 6], limits(window=1), 0, []),
        (at(3), [4, 5, 6], limits(quiet=True), 0, [4]),
        (at(6, -1), [5, 4], limits(quiet=True), 0, [5]),
        (at(7, wraps=True), [0, 1], limits(), 0, [0, 1]),
        (at(7, wraps=True), [0, 1], limits(quiet=True), 0, []),  # another round is not certain
        (at(None), [0, 1, 2], limits(quiet=True), 0, [0]),
        (at(3), [4, 5, 6], limits(h2d=2), 0, [4, 5]),
        (at(3), [4, 5, 6], limits(h2d=2), 1, [4]),
        (at(3), [4, 5, 6], limits(h2d=2), 2, []),
        (at(3), [4, 5, 6], limits(h2d=1), 3, []),  # more were on their way when the limit came
        (at(3), [4, 5, 6], limits(h2d=2, window=1), 0, [4]),
    ],
)
def test_allowed_loads(walk, wanted, hints, in_flight, allowed):
    loads = [Load(slot, block) for slot, block in enumerate(wanted)]
    assert [load.block for load in allowed_loads(walk, loads, hints, in_flight)] == allowed


def step_of(model, stream, step: int, hints: RuntimeLimitHints | None, *, before: str = "forward") -> dict:
    model.zero_grad()
    stream.begin_step(step)
    if hints is not None and before == "forward":
        stream.set_limits(hints)
    loss = model(batch(step)).square().mean()
    if hints is not None and before == "backward":
        stream.set_limits(hints)
    loss.backward()
    stream.end_step()
    return gradients(model)


@pytest.mark.cross("checkpointing", CHECKPOINTING)
@pytest.mark.cross("hints", [limits(h2d=1), limits(window=1), limits(quiet=True), limits(1, 1, quiet=True, d2h=1)])
def test_gradients_do_not_change(hints, checkpointing):
    model = make_stack(adapters=True)
    model.checkpointing = checkpointing
    resident = copy.deepcopy(model)
    with streaming(model, slots=4) as stream:
        for step in range(3):
            resident.zero_grad()
            resident(batch(step)).square().mean().backward()
            result = step_of(model, stream, step, hints, before=["forward", "backward", "forward"][step])
            assert_equal(result, gradients(resident))


@pytest.mark.parametrize(
    ("hints", "held_back"), [(None, 0), (WIDE, 0), (limits(window=1), True), (limits(quiet=True), True)]
)
def test_telemetry_says_what_held_and_how_often(hints, held_back, tmp_path):
    model, path = make_stack(adapters=True), tmp_path / "steps.jsonl"
    with streaming(model, slots=4, telemetry=path) as stream:
        step_of(model, stream, 0, None)
        step_of(model, stream, 1, hints)
        stream.synchronize()
        last = stream.stats.last
        assert bool(last.prefetches_held_back) == bool(held_back)
        assert last.prefetch_misses == 0  # the certain next block was always on its way
        step_of(model, stream, 2, None)
        stream.synchronize()
        assert (stream.stats.last.limits, stream.stats.last.prefetches_held_back) == (None, 0)  # a step starts anew
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["limits"] is None for line in lines] == [True, hints is None, True]
    if hints is not None:
        assert lines[1]["limits"]["prefetch_window_cap"] == hints.prefetch_window_cap
        assert lines[1]["limits"]["reasons"] == list(hints.reasons)


def test_a_window_of_one_loads_one_block_ahead():
    model, started = make_stack(adapters=True), []
    with streaming(model, slots=4) as stream:
        stream.begin_step(0)
        stream.set_limits(limits(window=1))
        model.layers[2].register_forward_pre_hook(lambda *_: started.append(set(stream._loader.ring.slot_blocks)))
        model(batch(0)).square().mean().backward()
        stream.end_step()
    assert started == [{0, 1, 2, 3}]  # from begin_step; block 4 waits until block 3 computes


class Gate:
    """Lets copies through one by one."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)

    def __call__(self) -> None:
        assert self.permits.acquire(timeout=TIMEOUT_S)


def test_copies_in_flight_are_capped_and_seen_as_pressure():
    model, gate = make_stack(adapters=True), Gate()
    device = SimulatedDevice(capacity_bytes=2_000_000, before_copy=gate)
    with streaming(model, device, slots=4) as stream:
        loader = stream._loader
        stream.begin_step(0)
        assert loader.in_flight() == 4
        assert stream.pressure().slots_full
        stream.set_limits(limits(h2d=1))
        gate.permits.release(2)
        loader.wait_for_copies(loader.transfers()[:2])
        half = loader.in_flight(), stream.pressure().slots_full
        gate.permits.release(2)
        assert half == (2, False)
        loader.wait_for_copies(loader.transfers())
        assert (loader.in_flight(), stream.pressure().slots_full) == (0, False)
        with torch.no_grad():
            loader.weights(1, wraps=False)  # blocks 2 and 3 are there; 4 may be loaded, into 0's place
            assert (loader.in_flight(), stream.pressure().slots_full) == (1, False)
            loader.weights(2, wraps=False)  # 4 is still on its way: 5 is held back
            assert (loader.in_flight(), 5 in loader.ring.slot_blocks) == (1, False)
            gate.permits.release(1)
            loader.wait_for_copies(loader.transfers())
            loader.weights(3, wraps=False)
            assert 5 in loader.ring.slot_blocks
        assert loader.recorder.held_back == 1
        pressure = stream.pressure()
        assert (pressure.vram_used_bytes, pressure.vram_total_bytes) == (device.allocated_bytes, 2_000_000)
        gate.permits.release(100)


class Behind(SimulatedDevice):
    """A device that has not come to the marks of its computation yet, as a GPU when the host is ahead."""

    def has_passed(self, mark) -> bool:
        return False


def test_a_host_that_is_ahead_is_no_pressure():
    model, gate = make_stack(adapters=True), Gate()
    with streaming(model, Behind(before_copy=gate), slots=4, check_finite=False) as stream:
        stream.begin_step(0)
        assert stream._loader.in_flight() == 4
        assert not stream.pressure().slots_full  # no slot is free yet: nothing waits for the bus
        gate.permits.release(100)


def test_limits_only_tighten_within_a_step():
    model = make_stack(adapters=True)
    with streaming(model, slots=4) as stream:
        stream.begin_step(0)
        stream.set_limits(limits(h2d=1))
        stream.set_limits(limits(window=2))
        stream.set_limits(WIDE)
        model(batch(0)).sum().backward()
        stream.end_step()
        stream.synchronize()
        last = stream.stats.last.limits
        assert (last["max_inflight_h2d"], last["prefetch_window_cap"], last["suppress_speculative"]) == (1, 2, False)


def test_gradients_on_their_way_are_capped():
    """The device holds one gradient at a time for the host, and the masters are those of a run without limits."""
    model, waiting = make_stack(adapters=False), []
    twin = copy.deepcopy(model)
    with streaming(twin, train="weights", optimizer=SETTINGS) as stream:
        run_streamed(twin, stream, 1, 1)
        expected = {name: one.clone() for name, one in masters_of(stream).items()}
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        gradients_thread = stream.training._gradients
        stream.begin_step(0)
        stream.set_limits(limits(d2h=1))
        stream.device.before_copy = lambda: waiting.append(gradients_thread.unfinished)
        model(batch(0)).square().mean().backward()
        while gradients_thread.unfinished:  # not drain, which queues a job of its own
            time.sleep(1e-3)
        stream.device.before_copy = None
        stream.end_step()
        stream.synchronize()
        assert max(waiting) == 1
        assert_equal(masters_of(stream), expected)
        stream.begin_step(1)
        assert gradients_thread.max_unfinished > 1


def test_the_conductor_drives_a_stream():
    """Memory above 80% in backward: the bridge asks for a window of one, and the stream obeys."""
    model = make_stack(adapters=True)
    device = SimulatedDevice()
    with streaming(model, device, slots=4) as stream:
        device.capacity_bytes = int(device.allocated_bytes / 0.9)
        bridge = HeuristicPolicyBridge(WIDE)
        stream.begin_step(0)
        state = bridge.begin_step(bridge.start(), 0)
        state = bridge.enter(state, Phase.FORWARD, stream.pressure())
        stream.set_limits(state.hints)
        loss = model(batch(0)).sum()
        state = bridge.enter(state, Phase.BACKWARD, stream.pressure())
        stream.set_limits(state.hints)
        loss.backward()
        stream.end_step()
        stream.synchronize()
        last = stream.stats.last
    assert last.limits["prefetch_window_cap"] == 1
    assert last.limits["reasons"] == ["backward: memory 90.0% full, above 80%"]
    assert last.prefetches_held_back > 0


def test_refusals():
    model = make_stack(adapters=True)
    with streaming(model) as stream, pytest.raises(StreamError, match="expected RuntimeLimitHints"):
        stream.set_limits({"max_inflight_h2d": 1})
    with pytest.raises(StreamError, match="closed"):
        stream.set_limits(WIDE)
    with pytest.raises(StreamError, match="closed"):
        stream.pressure()
