"""update_in_backward: the same numbers as without it, stepped before the step ends; what it cannot do is refused."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import pytest
import torch

from bitplan.base.errors import BlockNonFiniteError, StreamError
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.training import host_training
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.transfer.copies import Latch
from bitplan.streaming.transfer.devices import SimulatedDevice
from tests.streaming.stream_samples import CHECKPOINTING, COUNT, OPTIONS, WIDTH, Stack, batch, make_stack

EARLY = replace(OPTIONS, update_in_backward=True)
SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.05)


def opened(model, options=EARLY, **given):
    given = {"device": SimulatedDevice(), "slots": 2, "train": "weights", "optimizer": SETTINGS} | given
    return stream_blocks(model, "layers.*", options=options, **given)


def wait(stream):
    """Until what the backward has set off is over."""
    assert stream.training._gradients.drain(60)
    assert stream.training._updates.drain(60)


def run_step(model, stream, number, dtype=torch.float32, *, waits=False):
    """A step; how many blocks were stepped before its end."""
    model.zero_grad()
    stream.begin_step(number)
    model(batch(number, dtype)).float().square().mean().backward()
    training = stream.training
    if waits:
        wait(stream)
    update = training.gradients.update
    early = 0 if update is None else len(update.stepped)
    stream.end_step()
    return early


@pytest.mark.cross("checkpointing", CHECKPOINTING)
@pytest.mark.cross("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.cross("formats", [None, "int8_row"])
@pytest.mark.cross("moments", ["float32", "int8"])
@pytest.mark.cross("slots", [2, "auto"])
@pytest.mark.cross("alone", [1, 2**14, 2**20])
def test_masters_and_states_are_those_of_steps_as_a_whole(
    checkpointing, dtype, formats, moments, slots, alone, monkeypatch
):
    monkeypatch.setattr(host_training, "STEPPED_ALONE", alone)
    monkeypatch.setattr(host_training, "BUNDLE_BYTES", alone)
    model = make_stack(adapters=False, dtype=dtype)
    model.checkpointing = checkpointing
    other, states = copy.deepcopy(model), []
    for one, options in ((model, EARLY), (other, OPTIONS)):
        with opened(one, replace(options, moments=moments), formats=formats, slots=slots) as stream:
            early = [run_step(one, stream, number, dtype, waits=number == 1) for number in range(4)]
            assert (early[1] == COUNT) is (options is EARLY)
            states.append({key: value.clone() for key, value in stream.state_dict()["tensors"].items()})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])


@pytest.mark.parametrize(("alone", "early"), [(2**14, ["down.weight", "up.weight"]), (2**20, [])])
def test_behind_the_last_backward_only_its_last_weights_are_left_to_step(alone, early, monkeypatch):
    """The large weights of the first block are stepped before the gradients of its norm come."""
    monkeypatch.setattr(host_training, "STEPPED_ALONE", alone)
    monkeypatch.setattr(host_training, "BUNDLE_BYTES", 1)
    model, stepped = make_stack(adapters=False, dtype=torch.bfloat16), []
    with opened(model) as stream:

        def look(gradient):  # of what the first block's norm gave
            wait(stream)
            stepped.extend(name for block, name in stream.training.gradients.update.weights if block == "layers.0")
            return gradient

        model.layers[0].norm.register_forward_hook(lambda _module, _inputs, output: output.register_hook(look) and None)
        run_step(model, stream, 0, torch.bfloat16)
        stream.synchronize()
        assert sorted(set(stepped)) == early
        assert {one.steps for one in stream.training.trained().values()} == {1}


@pytest.mark.parametrize("options", [EARLY, OPTIONS])
def test_small_weights_of_a_block_are_stepped_in_one_call(options, monkeypatch):
    calls, step = [], torch._fused_adamw_
    monkeypatch.setattr(
        torch,
        "_fused_adamw_",
        lambda weights, *rest, **given: (calls.append(len(weights)), step(weights, *rest, **given)),
    )
    model = make_stack(adapters=False, dtype=torch.bfloat16)
    numbers = [one.numel() for one in model.layers[0].parameters()]
    with opened(model, options) as stream:
        stream.training._scratch = torch.empty(sum(numbers))
        run_step(model, stream, 0, torch.bfloat16)
        stream.synchronize()
        assert calls == [len(numbers)] * COUNT
        stream.training._scratch = torch.empty(max(numbers))  # too little for all of them
        run_step(model, stream, 1, torch.bfloat16)
        stream.synchronize()
    assert sum(calls) == 2 * COUNT * len(numbers)
    assert max(calls[COUNT:]) < len(numbers)


@pytest.mark.parametrize("options", [EARLY, OPTIONS])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize(("nbytes", "bundles"), [(1, 5), (2**15, 3), (2**22, 1)])
def test_small_gradients_of_a_block_go_to_their_thread_together(options, checkpointing, nbytes, bundles, monkeypatch):
    monkeypatch.setattr(host_training, "BUNDLE_BYTES", nbytes)
    model = make_stack(adapters=False, dtype=torch.bfloat16)
    model.checkpointing = checkpointing
    copies, device = [], SimulatedDevice()
    copy_out = device.copy_all_out
    monkeypatch.setattr(
        device,
        "copy_all_out",
        lambda pairs, *after, **how: (copies.append(len(pairs)), copy_out(pairs, *after, **how))[1],
    )
    with opened(model, options, device=device) as stream:
        check, looks = stream.training._finite, []
        look = check.look_at_gradients
        monkeypatch.setattr(
            check, "look_at_gradients", lambda numbers, tensors: (looks.append(len(tensors)), look(numbers, tensors))
        )
        run_step(model, stream, 0, torch.bfloat16)
        stream.synchronize()
        assert stream.stats.last.bytes_d2h == 2 * sum(one.numel() for one in model.layers.parameters())
    assert sum(copies) == sum(looks) == 5 * COUNT
    assert len(copies) == len(looks) == bundles * COUNT


def test_a_block_that_computes_twice_is_stepped_when_the_step_ends():
    class Twice(Stack):
        def forward(self, x):
            hidden = self.first(x)
            for layer in [*self.layers, self.layers[2]]:
                hidden = layer(hidden)
            return self.head(hidden)

    torch.manual_seed(0)
    model, states = Twice(adapters=False), []
    for one, options in ((copy.deepcopy(model), EARLY), (model, OPTIONS)):
        with opened(one, options, slots=3) as stream:
            early = [run_step(one, stream, number, waits=True) for number in range(3)]
            assert early == [COUNT - 1 if options is EARLY else 0] * 3
            states.append({key: value.clone() for key, value in stream.state_dict()["tensors"].items()})
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])


def test_another_forward_or_backward_in_a_step_is_refused():
    model = make_stack(adapters=False)
    with opened(model) as stream:
        saved = copy.deepcopy(stream.state_dict())
        stream.begin_step(0)
        loss = model(batch(0)).square().mean()
        loss.backward(retain_graph=True)
        with pytest.raises(StreamError, match=r"layers\.0, step 0: a forward after the step's backward"):
            model(batch(1))
        with pytest.raises(StreamError, match=r"layers\.5.*update_in_backward=True"):
            loss.backward()
        wait(stream)
        with pytest.raises(StreamError, match="the weights are of two steps; load a state"):
            stream.begin_step(1)
        stream.load_state_dict(saved)
        run_step(model, stream, 0)


def test_a_step_that_is_not_ended_leaves_weights_of_two_steps():
    model = make_stack(adapters=False)
    stream = opened(model)
    stream.begin_step(0)
    model(batch(0)).square().mean().backward()
    wait(stream)
    with pytest.raises(StreamError, match=r"step 0: update broke off .* \(end_step was not called\): the weights"):
        stream.close()


def end_and_begin(stream):
    """An error of a step is raised by its end, where the other thread was quick, or by the next one's beginning."""
    stream.end_step()
    stream.begin_step(1)


@pytest.mark.parametrize(("bad", "is_torn"), [(COUNT - 1, False), (1, True)])
def test_a_gradient_that_is_not_finite(bad, is_torn):
    """Of the block that backward begins with: nothing has changed. Of a later one: blocks before it were stepped."""
    model = make_stack(adapters=False)
    with opened(model) as stream:
        saved = {key: value.clone() for key, value in stream.state_dict()["tensors"].items()}
        document = copy.deepcopy(stream.state_dict())
        stream.begin_step(0)

        def spoil(gradient):
            wait(stream)
            return gradient * float("nan")

        hidden = model.first(batch(0))
        for at, layer in enumerate(model.layers):
            hidden = layer(hidden)
            if at == bad:
                hidden.register_hook(spoil)
        model.head(hidden).square().mean().backward()
        wait(stream)
        message = r"layers\.\d\.\S+, step 0: gradient holds NaN or infinity; the masters are as"
        if is_torn:
            message = "some masters have been stepped.*: the weights are of two steps; load a state"
        with pytest.raises(StreamError if is_torn else BlockNonFiniteError, match=message):
            end_and_begin(stream)
        if is_torn:
            stream.load_state_dict(document)
        now = stream.state_dict()["tensors"]
        assert all(torch.equal(now[key], saved[key]) for key in saved)


def test_settings_that_change_after_the_backward_are_refused():
    model = make_stack(adapters=False)
    with opened(model) as stream:
        saved = copy.deepcopy(stream.state_dict())
        stream.begin_step(0)
        model(batch(0)).square().mean().backward()
        wait(stream)
        stream.training.lr = 1e-3
        with pytest.raises(StreamError, match="was changed after the backward"):
            stream.end_step()
        with pytest.raises(StreamError, match=r"update_in_backward=True .* but clipping needs all of them first"):
            stream.clip_gradients(1.0)
        with pytest.raises(StreamError, match=r"update_in_backward=True .* but clipping needs all of them first"):
            stream.training.max_norm = 1.0
        stream.load_state_dict(saved)


def test_a_copy_waits_for_the_update_before_it_and_not_for_that_of_its_own_step():
    model, is_held = make_stack(adapters=False), Latch()
    with opened(model, OPTIONS) as stream:
        stream.begin_step(0)
        model(batch(0)).square().mean().backward()
        fresh = stream.training.fresh("layers.0")  # as of a copy that is not begun when the step ends
        stream._check_step = lambda *_: is_held.wait(240)
        stream.end_step()
        try:
            fresh()
            assert not stream.training._update.fresh["layers.0"].is_set()
        finally:
            is_held.set()


def test_a_forward_after_the_step_and_an_update_of_its_backward_do_not_wait_for_one_another():
    """An update that began before the step's end comes to a block whose next copy waits for it."""
    model, has_begun, begun = make_stack(adapters=False), Latch(), []
    with opened(model) as stream:
        training, loader = stream.training, stream._loader

        def wait_until_it_is_loaded(block, is_over):
            training.wait_for_readers = loader.wait_for_readers
            begun.append(loader.names.index(block))
            has_begun.set()
            while not (is_over() and begun[0] in [slot.block for slot in loader.ring.slots]):
                time.sleep(0.01)
            loader.wait_for_readers(block, is_over)

        training.wait_for_readers = wait_until_it_is_loaded
        stream.begin_step(0)
        model(batch(0)).square().mean().backward()
        assert has_begun.wait(240)
        stream.end_step()
        with torch.no_grad():
            model.layers[begun[0]](torch.zeros(1, WIDTH))
        stream.synchronize()
        assert {one.steps for one in training.trained().values()} == {1}


def test_what_it_cannot_go_with():
    with pytest.raises(StreamError, match=r"update_in_backward=True .* clip_grad_norm= needs all gradients first"):
        opened(make_stack(adapters=False), clip_grad_norm=1.0)
    with pytest.raises(StreamError, match=r"update_in_backward=True .* train='adapters' has none"):
        opened(make_stack(adapters=True), train="adapters", optimizer=None)
