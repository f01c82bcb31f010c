"""Uses that would give wrong numbers without a word: several threads, half a backward, copies."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import bitplan
from bitplan.base.errors import StreamError
from tests.crosses import few
from tests.streaming.stream_samples import CHECKPOINTING, assert_equal, batch, make_stack, streaming
from tests.streaming.test_weights import SETTINGS, adamw, masters_of


def test_forwards_of_several_threads_take_turns():
    model = make_stack(adapters=True)
    with torch.no_grad():
        inputs = [batch(seed) for seed in range(40)]
        expected = [model(x) for x in inputs]
        with streaming(model, slots=2), ThreadPoolExecutor(4) as threads:
            results = list(threads.map(torch.no_grad()(model), inputs))
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_a_step_is_computed_by_one_thread():
    model = make_stack(adapters=True)
    with streaming(model) as stream:
        stream.begin_step(0)
        model(batch(0)).mean().backward()
        with ThreadPoolExecutor(1, thread_name_prefix="other") as threads:
            for run in (model, torch.no_grad()(model)):
                with pytest.raises(StreamError, match=r"layers\.0, step 0: .*'MainThread', and 'other_0'"):
                    threads.submit(run, batch(0)).result()
            model(batch(0)).mean().backward()
            stream.end_step()
            stream.begin_step(1)  # the next step may be another thread's
            threads.submit(lambda: model(batch(0)).mean().backward()).result()
            stream.end_step()


def test_a_state_is_read_while_another_thread_computes():
    model = make_stack(adapters=True)
    before = copy.deepcopy(model.state_dict())
    x, stop, wrong = batch(0), threading.Event(), []
    with torch.no_grad():
        expected = model(x)

    def compute() -> None:
        with torch.no_grad():
            while not stop.is_set():
                wrong.append(not torch.equal(model(x), expected))

    with streaming(model, formats=None):
        thread = threading.Thread(target=compute)
        thread.start()
        for _ in range(20):
            assert_equal(dict(model.state_dict()), before)
        stop.set()
        thread.join()
    assert wrong
    assert not any(wrong)


class FailsOnce(nn.Module):
    """Passes its input on; its first backward raises."""

    def __init__(self) -> None:
        super().__init__()
        self.is_whole = False

    def forward(self, x):
        out = x * 1.0
        if out.requires_grad:
            out.register_hook(self._fail_once)
        return out

    def _fail_once(self, _gradient):
        if not self.is_whole:
            self.is_whole = True
            raise ValueError("a hook of the user's")


@pytest.mark.parametrize("checkpointing", few(CHECKPOINTING, 2))
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_whose_backward_failed_is_not_applied(checkpointing, micro_batches):
    model = make_stack(adapters=False)
    model.checkpointing = checkpointing
    model.layers[2].up = nn.Sequential(model.layers[2].up, FailsOnce())
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        before = {name: one.clone() for name, one in masters_of(stream).items()}
        stream.begin_step(0)
        with pytest.raises(ValueError, match="a hook of the user's"):
            model(batch(0)).square().mean().backward()
        for _ in range(micro_batches - 1):
            model(batch(1)).square().mean().backward()
        with pytest.raises(StreamError, match="step 0: a backward failed"):
            stream.end_step()
        with pytest.raises(StreamError, match="step 0: a backward failed"):
            stream.clip_gradients(1.0)
        stream.begin_step(0)
        stream.synchronize()
        assert_equal(masters_of(stream), before)
        model(batch(0)).square().mean().backward()
        stream.end_step()
        stream.synchronize()
        assert not any(torch.equal(before[name], one) for name, one in masters_of(stream).items())


@pytest.mark.parametrize("train", ["adapters", "weights", "nothing"])
def test_a_streaming_model_is_not_copied(train):
    model = make_stack(adapters=train == "adapters")
    with streaming(model, train=train):
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(StreamError, match=r"layers\.0 is streamed.*cannot be copied.*state_dict"):
                copied(model)
    assert_equal(dict(copy.deepcopy(model).named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("train", ["adapters", "weights"])
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_gradient_penalties_are_refused_by_name(train, checkpointing):
    model = make_stack(adapters=train == "adapters")
    model.checkpointing = checkpointing
    with streaming(model, train=train) as stream:
        stream.begin_step(0)
        x = batch(0).requires_grad_()
        with pytest.raises(StreamError, match=r"layers\.5, step 0: create_graph=True"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        stream.begin_step(0)
        (gradient,) = torch.autograd.grad(model(x).sum(), x)  # a first derivative is well
        stream.end_step()
    model.checkpointing = "none"
    assert torch.equal(gradient, torch.autograd.grad(model(x).sum(), x)[0])


# ---- torch's GradScaler ----------------------------------------------------------------------------------------------


def scaled_steps(model, outside, scaler, losses, stream=None):
    """Steps of a scaled loss; the scales after each."""
    scales = []
    for step, factor in enumerate(losses):
        if stream is not None:
            stream.begin_step(step)
        scaler.scale(model(batch(step)).square().mean() * factor).backward()
        if stream is not None:
            stream.unscale_gradients(scaler, outside)
        scaler.step(outside)
        scaler.update()
        outside.zero_grad()
        if stream is not None:
            stream.end_step()
        scales.append(scaler.get_scale())
    return scales


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)


@pytest.mark.parametrize("losses", [(1, 1e38, 1, 1), (1e38, 1e38, 1)])
def test_a_step_that_overflows_under_a_scaler_is_skipped_as_torch_does(losses):
    model = make_stack(adapters=False, count=3)
    resident = copy.deepcopy(model)
    expected = scaled_steps(resident, adamw(resident.parameters()), make_scaler(), losses)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        outside = adamw([one for name, one in model.named_parameters() if not name.startswith("layers.")])
        assert scaled_steps(model, outside, make_scaler(), losses, stream) == expected
    assert_equal(dict(model.named_parameters()), dict(resident.named_parameters()))
    assert expected[-1] < 2.0**17


def test_a_scaler_without_an_optimizer_and_one_that_is_off():
    model = make_stack(adapters=False, count=3)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        before, scaler = {name: one.clone() for name, one in masters_of(stream).items()}, make_scaler()
        stream.begin_step(0)
        scaler.scale(model(batch(0)).square().mean() * 1e38).backward()
        assert stream.unscale_gradients(scaler)
        scaler.update()
        assert scaler.get_scale() == 2.0**15
        with pytest.raises(StreamError, match="step 0 has been unscaled"):
            stream.unscale_gradients(scaler)
        stream.end_step()
        stream.synchronize()
        assert_equal(masters_of(stream), before)
        stream.begin_step(1)
        model(batch(0)).square().mean().backward()
        assert not stream.unscale_gradients(torch.amp.GradScaler("cpu", enabled=False))
        assert not stream.unscale_gradients(scaler)
        model(batch(0)).square().mean().backward()

        def end() -> None:  # one of the two raises
            stream.end_step()
            stream.synchronize()

        with pytest.raises(StreamError, match="came after unscale_gradients"):
            end()
        assert_equal(masters_of(stream), before)
    with (
        streaming(make_stack(adapters=True)) as stream,
        pytest.raises(StreamError, match="train='adapters' streams no"),
    ):
        stream.unscale_gradients(scaler)


def test_a_loop_without_end_step_is_told_that_nothing_is_trained():
    model = make_stack(adapters=False)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        stream.begin_step(0)
        model(batch(0)).square().mean().backward()
        stream.begin_step(0)  # the same step again, on purpose
        model(batch(0)).square().mean().backward()
        with pytest.warns(
            UserWarning, match=r"step 0 was not ended, so its gradients are dropped .* call end_step\(\)"
        ):
            stream.begin_step(1)
        stream.begin_step(2)  # had no gradients


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_streamed_weights_are_refused(register):
    model = make_stack(adapters=False)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        stream.begin_step(0)
        stream.end_step()
        hook = getattr(model.layers[1].up.weight, register)(lambda _: None)
        with pytest.raises(
            StreamError, match=r"layers\.1\.up\.weight has hooks, and its gradient goes to the host past"
        ):
            stream.begin_step(1)
        hook.remove()
        stream.begin_step(1)


def test_masters_of_float64_weights_are_refused():
    model = make_stack(adapters=False).double()
    refused = pytest.raises(StreamError, match=r"layers\.0\.\S+ is float64, and train='weights' learns in float32")
    with refused, streaming(model, train="weights"):
        pass


@pytest.mark.parametrize("step", ["0", None, True, 1.0])
def test_a_step_has_a_number(step):
    with streaming(make_stack(adapters=True)) as stream:
        with pytest.raises(StreamError, match=f"begin_step: expected the number of the step, got {step!r}"):
            stream.begin_step(step)
        stream.begin_step(torch.tensor(3))
        stream.end_step()
        stream.synchronize()
        assert stream.stats.last.step == 3


def run_with_optimizer_of_all(**options) -> list[str]:
    """What a loop is warned of, whose own optimizer holds the streamed weights too."""
    model = make_stack(adapters=False)
    model.layers[0].norm.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught, streaming(model, train="weights", **options) as stream:
        warnings.simplefilter("always")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            stream.begin_step(step)
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stream.end_step()
    return [str(one.message) for one in caught if one.category is UserWarning]


def test_an_optimizer_that_cannot_step_streamed_weights_is_told_so_once():
    (warned,) = run_with_optimizer_of_all()
    assert "AdamW holds 28 streamed weights (as layers.0.up.weight)" in warned
    assert "lr=1e-05" in warned
    assert run_with_optimizer_of_all(optimizer=SETTINGS) == []


def test_the_function_is_found_where_its_options_are():
    from bitplan import streaming as package

    assert package.stream_blocks is bitplan.stream_blocks
