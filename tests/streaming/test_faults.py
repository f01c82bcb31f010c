"""What breaks in mid-step: the error names block and step, nothing hangs, memory comes back, and training goes on."""

from __future__ import annotations

import copy
import os
import threading
from contextlib import suppress

import pytest
import torch

from bitplan.base.errors import BlockNonFiniteError, StreamError, TransferError
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.transfer import copies
from bitplan.streaming.transfer.copies import Latch, wait_for
from bitplan.streaming.transfer.devices import SimulatedDevice
from tests.streaming.interrupts import CAUGHT, break_bus, interrupt, stop_thread
from tests.streaming.stream_samples import TIMEOUT_S, assert_equal, batch, gradients, make_stack, streaming


class Trouble:
    """Called before every copy; does its worst once, at the copy it was armed for."""

    def __init__(self) -> None:
        self.copies, self.at, self.act = 0, -1, lambda: None

    def arm(self, act, *, after: int) -> None:
        self.at, self.act = self.copies + after, act

    def __call__(self) -> None:
        self.copies += 1
        if self.copies - 1 == self.at:
            self.act()


def one_step(model, stream, step: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    stream.begin_step(step)
    model(batch(step)).square().mean().backward()
    stream.end_step()
    return gradients(model)


def expected_step(model, step: int) -> dict[str, torch.Tensor]:
    resident = copy.deepcopy(model)
    resident.zero_grad()
    resident(batch(step)).square().mean().backward()
    return gradients(resident)


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (stop_thread, TransferError, r"layers\.\d, step 1: the transfer thread"),
        (break_bus, TransferError, r"layers\.\d, step 1: RuntimeError: the bus fell off"),
        (interrupt, KeyboardInterrupt, None),
    ],
)
def test_a_copy_that_fails(act, error, says, after):
    before = set(threading.enumerate())
    model, trouble = make_stack(adapters=True), Trouble()
    wanted = [expected_step(model, step) for step in range(3)]
    device = SimulatedDevice(before_copy=trouble)
    with streaming(model, device) as stream:
        assert_equal(one_step(model, stream, 0), wanted[0])
        trouble.arm(act, after=after)
        with pytest.raises(error, match=says):
            one_step(model, stream, 1)
        CAUGHT.set()
        assert_equal(one_step(model, stream, 1), wanted[1])
        assert_equal(one_step(model, stream, 2), wanted[2])
        stream.synchronize()
        assert stream.stats.last.step == 2
    assert (device.allocated_bytes, device.pinned_bytes) == (0, 0)
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("bitplan-")]


def test_out_of_memory_in_a_block_keeps_its_type():
    model = make_stack(adapters=True)
    wanted, armed = expected_step(model, 3), [True]

    def run_out(*_) -> None:
        if armed.pop() if armed else False:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.layers[4].down.register_forward_hook(run_out)
    with streaming(model) as stream:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            one_step(model, stream, 3)
        assert "layers.4, step 3" in caught.value.__notes__[0]
        assert model.layers[4].down.weight is dict(model.named_parameters())["layers.4.down.weight"]
        assert_equal(one_step(model, stream, 3), wanted)


def test_out_of_memory_for_larger_formats_keeps_the_old_ones():
    model = make_stack(adapters=True)
    device = SimulatedDevice(capacity_bytes=1_000_000)
    with streaming(model, device, formats="int8_row", slots=3) as stream:
        first = one_step(model, stream, 0)
        stream.set_formats("float32")
        device.capacity_bytes = device.allocated_bytes
        with pytest.raises(torch.OutOfMemoryError, match=r"slot \d of 3"):
            stream.begin_step(1)
        assert set(stream.formats.values()) == {"int8_row", "float32"}
        assert_equal(one_step(model, stream, 0), first)


@pytest.mark.parametrize("damage", ["cut", "emptied"])
def test_a_file_that_is_cut_short(damage, tmp_path):
    model = make_stack(adapters=True)
    wanted = expected_step(model, 1)
    with streaming(model, host="file", host_folder=tmp_path, slots=2) as stream:
        one_step(model, stream, 0)
        path = tmp_path / "layers.3.safetensors"
        os.truncate(path, path.stat().st_size // 2 if damage == "cut" else 0)
        with pytest.raises(TransferError, match=r"layers\.3, step 1: .*layers\.3\.safetensors: holds \d+ of the \d+"):
            one_step(model, stream, 1)
        assert_equal(one_step(model, stream, 1), wanted)


def test_a_file_that_is_deleted_is_still_read(tmp_path):
    model = make_stack(adapters=True)
    wanted = expected_step(model, 1)
    with streaming(model, host="file", host_folder=tmp_path, slots=2) as stream:
        for path in tmp_path.iterdir():
            path.unlink()
        assert_equal(one_step(model, stream, 1), wanted)


class HurriedClock:
    """Stands still, but for half a minute at every look while something hangs."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.now_s, self.hangs = 0.0, hangs

    def monotonic(self) -> float:
        self.now_s += 30.0 * self.hangs
        return self.now_s


def test_a_copy_that_never_ends_is_an_error(monkeypatch):
    model, release, clock = make_stack(adapters=True), threading.Event(), HurriedClock()
    monkeypatch.setattr(copies, "time", clock)
    trouble = Trouble()

    def hang() -> None:
        clock.hangs = True
        assert release.wait(TIMEOUT_S)

    trouble.arm(hang, after=1)
    with streaming(model, SimulatedDevice(before_copy=trouble), timeout_s=90.0) as stream:
        with pytest.raises(StreamError, match=r"layers\.1, step 0: nothing came within 90 s"):
            one_step(model, stream, 0)
        clock.hangs = False
        release.set()
        assert one_step(model, stream, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_names_the_first_block(bad):
    model = make_stack(adapters=True)
    good = expected_step(model, 8)
    with streaming(model) as stream:
        one_step(model, stream, 6)
        weight = model.layers[2].up.up.weight
        stored = weight.detach().clone()
        with torch.no_grad():
            weight[0, 0] = bad
        with pytest.raises(BlockNonFiniteError, match=r"layers\.2, step 7: its output holds NaN or infinity \(4 of 6"):
            one_step(model, stream, 7)
        with torch.no_grad():
            weight.copy_(stored)
        assert_equal(one_step(model, stream, 8), good)


def snapshot(stream) -> dict[str, torch.Tensor]:
    return {name: one.master.clone() for name, one in stream.training.trained().items()}


def finish_step(out: torch.Tensor, stream) -> None:
    out.square().mean().backward()
    stream.end_step()
    stream.synchronize()


@pytest.mark.parametrize("kind", ["nan in a block", "nan in a gradient", "gradient thread dies", "gradient copy fails"])
def test_masters_are_intact(kind):
    model, trouble = make_stack(adapters=False), Trouble()
    settings = AdamWSettings(lr=1e-2)
    with streaming(model, SimulatedDevice(before_copy=trouble), train="weights", optimizer=settings, slots=6) as stream:
        one_step(model, stream, 0)
        stream.synchronize()
        masters = snapshot(stream)
        model.zero_grad()
        stream.begin_step(1)
        out = model(batch(1))
        if kind == "nan in a gradient":
            out.register_hook(lambda gradient: gradient * float("nan"))
        elif kind == "nan in a block":
            with torch.no_grad():
                model(batch(1) * float("inf"))
        elif kind == "gradient thread dies":
            trouble.arm(stop_thread, after=3)
        else:
            trouble.arm(break_bus, after=3)
        with pytest.raises(StreamError, match=r"layers\.\d[\w.]*, step 1"):
            finish_step(out, stream)
        assert_equal(snapshot(stream), masters)
        one_step(model, stream, 2)
        stream.synchronize()
        assert not torch.equal(snapshot(stream)["layers.0.up.weight"], masters["layers.0.up.weight"])


def train_three(model, bad: int | None) -> tuple[dict[str, torch.Tensor], int]:
    """Masters, and the count of AdamW's steps, after steps 0 to 2; step `bad` has gradients that are not finite."""
    with streaming(model, train="weights", optimizer=AdamWSettings(lr=1e-2), slots=3) as stream:
        for step in range(3):
            if step == 1 and bad is None:
                continue
            stream.begin_step(step)
            out = model(batch(step)).square().mean()
            (out * float("inf") if step == bad else out).backward()
            gate = threading.Event()
            stream.training._updates.submit(gate.wait, "held back")
            stream.end_step()  # does not know yet
            threading.Timer(0.05, gate.set).start()
            if step == bad:
                with pytest.raises(BlockNonFiniteError, match=f"step {bad}: gradient holds NaN or infinity"):
                    stream.begin_step(step + 1)
        stream.synchronize()
        return snapshot(stream), stream.training.trained()["layers.0.up.weight"].steps


def test_the_step_after_a_bad_one_is_not_lost():
    after, count = train_three(make_stack(adapters=False, count=2), bad=1)
    wanted, _ = train_three(make_stack(adapters=False, count=2), bad=None)
    assert count == 2
    assert_equal(after, wanted)


def test_the_next_step_does_not_wait_for_adamw(monkeypatch):
    model = make_stack(adapters=False, count=2)
    with streaming(model, train="weights", slots=3) as stream:
        gate, training = threading.Event(), stream.training
        plain = training._step_block
        monkeypatch.setattr(training, "_step_block", lambda *args: (gate.wait(TIMEOUT_S), plain(*args)))
        one_step(model, stream, 0)
        stream.begin_step(1)
        is_stepped = training.trained()["layers.0.up.weight"].steps
        gate.set()
        assert is_stepped == 0


def test_an_error_names_the_step_that_was_lost_with_it():
    model = make_stack(adapters=False, count=2)
    with streaming(model, train="weights", slots=3) as stream:
        stream.begin_step(4)
        model(batch(4)).sum().backward()
        stream.training.failure = TransferError("layers.0, step 3: encoding: out of memory")  # after begin_step(4)
        with pytest.raises(
            TransferError, match=r"step 3: encoding.*; step 4 was computed meanwhile and is not applied"
        ):
            stream.end_step()


@pytest.mark.parametrize("train", ["adapters", "weights"])
def test_what_went_wrong_last_is_not_lost_at_the_end(train):
    model, device = make_stack(adapters=train == "adapters"), SimulatedDevice()
    with pytest.raises(BlockNonFiniteError, match=r"layers\.0, step 5"):
        last_step_is_nan(model, device, train)
    assert (device.allocated_bytes, device.pinned_bytes) == (0, 0)


def last_step_is_nan(model, device, train) -> None:
    with streaming(model, device, train=train) as stream:
        stream.begin_step(5)
        model(batch(0) * float("nan")).sum().backward()
        stream.end_step()


def test_an_error_of_the_caller_is_not_hidden_by_ours():
    model = make_stack(adapters=True)

    def stumble() -> None:
        with streaming(model) as stream:
            stream.begin_step(0)
            model(batch(0) * float("nan"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stumble()
    assert model(batch(0)).isfinite().all()


def test_a_wait_lasts_until_its_deadline():
    class Late:
        polls = 0

        def wait(self, timeout_s):
            self.polls += 1
            return self.polls == 3

    late = Late()
    wait_for(late, None, 60.0, "a block")
    assert late.polls == 3
    with pytest.raises(StreamError, match="a block: nothing came within 0 s"):
        wait_for(Latch(), None, 0.0, "a block")


def test_an_optimizer_thread_that_dies_before_its_update_is_said_at_once(monkeypatch):
    model = make_stack(adapters=False, count=2)
    with streaming(model, train="weights") as stream:
        stream.begin_step(0)
        model(batch(0)).square().mean().backward()

        def die(*_: object) -> None:
            raise SystemExit

        stream.training._apply = die
        with suppress(StreamError):  # it may have died by then
            stream.end_step()
        stream.training.finish()
        del stream.training._apply
        clock = HurriedClock(hangs=True)
        with monkeypatch.context() as patch, suppress(StreamError):
            patch.setattr(copies, "time", clock)
            stream.begin_step(1)
        assert clock.now_s < TIMEOUT_S  # no wait came to its end
        stream.begin_step(1)
        model(batch(1)).square().mean().backward()
        stream.end_step()
        stream.synchronize()
