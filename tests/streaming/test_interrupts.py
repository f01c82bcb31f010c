"""Ctrl-C, or the end of a thread, at any line: a step counts whole or not at all, and the next one works at once.

After an interrupt in step 1 the weights must be those of steps 0, 1, 2 or of steps 0, 2. The quick tests take some of
the lines, those marked `long` take all of them.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings

import pytest
import torch

import bitplan.streaming.block_stream as stream_module
from bitplan.base.errors import StreamError
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.transfer.devices import SimulatedDevice
from tests.streaming.interrupts import Interrupter
from tests.streaming.stream_samples import OPTIONS, TIMEOUT_S, WIDTH, Stack, batch

SOME = 4  # lines of each quick test
AT_ONCE_S = TIMEOUT_S / 2  # minutes, on the slowest machine: a jam takes the stream's timeout
SETTINGS = AdamWSettings(lr=1e-2)


def switch_formats(stream) -> None:
    stream.set_formats({"layers.0": "int8_row", "layers.1": "bfloat16"})


def load_weights(stream) -> None:
    stream.synchronize()
    stream.model.load_state_dict({name: one * 1.25 for name, one in stream.model.state_dict().items()})


SCENES = {
    "weights": {"train": "weights", "optimizer": SETTINGS},
    "weights, other formats": {"train": "weights", "optimizer": SETTINGS, "before": switch_formats},
    "weights, loaded": {"train": "weights", "optimizer": SETTINGS, "formats": "int8_row", "before": load_weights},
    "weights, offloaded": {"train": "weights", "optimizer": SETTINGS, "offload_activations": True},
    "pageable": {"train": "weights", "optimizer": SETTINGS, "host": "pageable", "clip_grad_norm": 0.1},
}
THREADS = ["bitplan-transfer", "bitplan-gradient", "bitplan-optimizer"]


def make_model() -> Stack:
    torch.manual_seed(0)
    return Stack(adapters=False, count=3)


def run(scene: str, interrupter: Interrupter | None, steps=(0, 1, 2)) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The trained weights at the end, and the errors on the way; step 1 is interrupted."""
    options = dict(SCENES[scene])
    before = options.pop("before", None)
    interrupter = interrupter or Interrupter(None)
    model, device, errors = make_model(), SimulatedDevice(), []
    with interrupter.in_threads():
        stream = stream_blocks(model, "layers.*", device=device, slots=2, options=OPTIONS, **options)
    with stream, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step 1 was not ended")  # interrupted in the first lines of end_step
        for step in steps:
            if step == 1 and before is not None:
                before(stream)
            if step == 2 and 1 not in steps and before is not None:
                before(stream)
            try:
                run_step(model, stream, step, interrupter if step == 1 else None)
            except KeyboardInterrupt as error:
                errors.append(str(error))
            except StreamError as error:
                errors.append(str(error))
                if step == 2:  # said at the first call after the interrupt; the next one goes on
                    run_step(model, stream, step, None)
        stream.synchronize()
        weights = {name: one.detach().clone() for name, one in model.layers.named_parameters()}
    assert (device.allocated_bytes, device.pinned_bytes) == (0, 0), errors
    return weights, errors


def run_step(model, stream, step: int, interrupter: Interrupter | None) -> None:
    model.zero_grad()
    if interrupter is not None and interrupter.thread == "MainThread":
        with interrupter.on():
            stream.begin_step(step)
        model(batch(step)).square().mean().backward()
        with interrupter.on():
            stream.end_step()
        return
    with interrupter.on() if interrupter is not None else Interrupter(None).on():
        stream.begin_step(step)
        model(batch(step)).square().mean().backward()
        stream.end_step()
        stream.training.finish()


def same(one, two) -> bool:
    return all(torch.equal(one[name], two[name]) for name in two)


class Trial:
    """A scene and a thread: how many lines there are, and what may come out."""

    def __init__(self, scene: str, thread: str = "MainThread") -> None:
        self.scene, self.thread = scene, thread
        counter = Interrupter(None, thread)
        self.whole, errors = run(scene, counter)
        assert not errors
        self.dropped, _ = run(scene, None, steps=(0, 2))
        assert not same(self.whole, self.dropped)
        self.lines = counter.lines

    def interrupt(self, at: int) -> str | None:
        """What is wrong after an interrupt at a line, if anything."""
        interrupter, start = Interrupter(at, self.thread), time.monotonic()
        try:
            weights, errors = run(self.scene, interrupter)
        except StreamError as error:
            return None if self._is_clear(error) else f"{interrupter.where}: {error}"
        except Exception as error:
            return f"{interrupter.where}: {type(error).__name__}: {error}"
        if time.monotonic() - start > AT_ONCE_S:
            return f"{interrupter.where}: took {time.monotonic() - start:.0f} s, {errors}"
        if not (same(weights, self.whole) or same(weights, self.dropped)):
            return f"{interrupter.where}: neither the step before nor the one after, {errors}"
        return None

    def _is_clear(self, error: StreamError) -> bool:
        """The one case that cannot be mended: the optimizer itself was broken off between two blocks."""
        return self.thread == "bitplan-optimizer" and "the weights are of two steps; load a state" in str(error)

    def check(self, lines) -> None:
        wrong = [result for at in lines if (result := self.interrupt(at)) is not None]
        assert not wrong, "\n".join([f"{len(wrong)} of {len(list(lines))} lines:", *wrong])


def some_of(lines: int) -> list[int]:
    """Always the same ones: a failure is there again when it is looked for."""
    return sorted(random.Random(lines).sample(range(lines), min(SOME, lines)))


@pytest.mark.parametrize("scene", [pytest.param("weights", marks=pytest.mark.long), "weights, other formats"])
def test_an_interrupt_at_some_lines(scene):
    trial = Trial(scene)
    assert trial.lines > 100
    trial.check(some_of(trial.lines))


@pytest.mark.parametrize("thread", THREADS)
def test_a_thread_that_ends_at_some_lines(thread):
    trial = Trial("weights", thread)
    trial.check(some_of(trial.lines))


@pytest.mark.long
@pytest.mark.parametrize("scene", SCENES)
def test_an_interrupt_at_every_line(scene):
    trial = Trial(scene)
    trial.check(range(trial.lines))


@pytest.mark.long
@pytest.mark.parametrize("thread", THREADS)
def test_a_thread_that_ends_at_every_line(thread):
    trial = Trial("pageable", thread)
    trial.check(range(trial.lines))


@pytest.mark.parametrize("then", ["begin_step", "edit", "state_dict", "load_state_dict", "close"])
@pytest.mark.parametrize("train", ["weights", "nothing"])
def test_an_interrupt_while_parameters_are_put_back_leaves_no_streamed_tensor(monkeypatch, train, then):
    model = make_model()
    expected = {name: one.clone() for name, one in model.state_dict().items()}
    put = stream_module._put_into_modules

    def interrupted(block, weights) -> None:
        if weights is None:
            raise KeyboardInterrupt
        put(block, weights)

    stream = stream_blocks(model, "layers.*", device="cpu", slots=2, formats="int8_row", train=train)
    with stream:
        if train == "weights":  # an update that nobody has waited for
            run_step(model, stream, 0, None)
            stream.synchronize()
            expected = {name: one.clone() for name, one in model.state_dict().items()}
            stream.training.is_settled = False
        stream.begin_step(1)
        with monkeypatch.context() as patch, torch.set_grad_enabled(train == "weights"):
            patch.setattr(stream_module, "_put_into_modules", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(batch(0))
        if then == "begin_step":
            stream.begin_step(2)
        elif then == "edit":
            stream.synchronize()
            with torch.no_grad():
                model.layers[0].down.weight.mul_(2)
            expected["layers.0.down.weight"] = 2 * expected["layers.0.down.weight"]
            stream.begin_step(2)
        elif then == "state_dict":
            assert same(model.state_dict(), expected)
        elif then == "load_state_dict":
            expected = {name: 2 * one for name, one in expected.items()}
            model.load_state_dict(expected)
    assert {type(one) for one in model.parameters()} == {torch.nn.Parameter}
    assert same(model.state_dict(), expected)


@pytest.mark.parametrize("formats", [None, "int8_row"])
def test_an_interrupt_in_a_block_leaves_gradients_on_and_harms_no_other_stream(formats):
    model, hooks = make_model(), torch._C._autograd
    try:
        with stream_blocks(model, "layers.*", device="cpu", slots=2, formats=formats, train="weights") as stream:
            counter = Interrupter(None)
            stream.begin_step(0)
            with counter.on():
                model.layers[0](torch.ones(2, WIDTH))
            for at in range(counter.lines):
                stream.begin_step(0)
                interrupter = Interrupter(at)
                with contextlib.suppress(KeyboardInterrupt), interrupter.on():
                    model.layers[0](torch.ones(2, WIDTH))
                assert torch.is_grad_enabled(), interrupter.where
        torch.nn.Linear(4, 4)(torch.ones(1, 4)).tanh().sum().backward()
    finally:
        while hooks._top_saved_tensors_default_hooks(True) is not None:  # left by interrupts at the end of a `with`
            hooks._pop_saved_tensors_default_hooks()
