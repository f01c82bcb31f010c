"""Uses that would give wrong numbers without a word: several threads, half a backward, copies."""

from __future__ import annotations

import contextlib
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


def edit_in_forward(how):
    """A forward that changes a weight of its block before it computes."""

    def change(block):
        if how == "write":
            with torch.no_grad():
                block.up.weight.clamp_(-0.01, 0.01)
        elif how == "data":
            block.up.weight.data = block.up.weight.data.clamp(-0.01, 0.01)
        else:
            block.up.weight = nn.Parameter(block.up.weight.detach() * 2)

    return change


@pytest.mark.parametrize("how", ["write", "data", "replace"])
@pytest.mark.parametrize("train", ["weights", "nothing"])
def test_a_forward_that_changes_its_weights_is_refused_and_leaves_nothing_behind(how, train):
    model, x = make_stack(adapters=False), batch(0)
    with torch.no_grad():
        expected = model(x)
    block, forward, change = model.layers[1], model.layers[1].forward, edit_in_forward(how)
    block.forward = lambda hidden: [change(block), forward(hidden)][1]
    with streaming(model, train=train, slots=6) as stream:
        for step in range(2):
            stream.begin_step(step)
            says = rf"layers\.1, step {step}: {'one of its weights' if how == 'write' else r'up.weight'} is changed by"
            with torch.set_grad_enabled(train == "weights"), pytest.raises(StreamError, match=says):
                model(x)
        change = id
        stream.begin_step(2)
        with torch.set_grad_enabled(train == "weights"):
            assert torch.equal(model(x), expected)


def reach_weights(way, model):
    """A loss that reads a trained weight of a block, but not within the block's forward."""
    if way == "penalty":
        return model(batch(0)).square().mean() + sum(one.square().sum() for one in model.parameters())
    if way == "hook":
        hook = model.layers[1].register_forward_hook(lambda block, _inputs, out: out * block.down.weight.mean())
        loss = model(batch(0)).square().mean()
        hook.remove()
        return loss
    return model.layers[1].down(torch.ones(2, 256)).sum()


@pytest.mark.parametrize("way", ["penalty", "hook", "a module within"])
def test_gradients_that_come_past_the_stream_are_refused(way):
    model = make_stack(adapters=False)
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        stream.begin_step(0)
        loss = reach_weights(way, model)
        with pytest.raises(StreamError, match=r"layers\.\d\.\S+ has got a gradient from outside its block's forward"):
            loss.backward()
        model.layers[1].down.weight = nn.Parameter(model.layers[1].down.weight.detach() * 2)
        stream.begin_step(1)  # the Parameter that came in its place is looked at, too
        with pytest.raises(StreamError, match="has got a gradient from outside"):
            reach_weights(way, model).backward()
    reach_weights(way, model).backward()
    assert model.layers[1].down.weight.grad is not None


def test_other_tensors_in_the_place_of_parameters_are_refused():
    model, x = make_stack(adapters=False), batch(0)
    doubled = {name: one.detach() * 2 for name, one in model.named_parameters()}
    with streaming(model, train="weights", optimizer=SETTINGS) as stream:
        stream.begin_step(0)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), pytest.raises(StreamError, match=r"layers\.0\.norm\.weight: .* another tensor .*functional_"):
                torch.func.functional_call(model, doubled, (x,))
        stream.begin_step(1)
        model(x).mean().backward()
        stream.end_step()
        with torch.no_grad(), pytest.raises(StreamError, match="functional_call"):
            torch.func.functional_call(model, doubled, (x,))


class Learned(nn.Module):
    """A block that hands on a weight of its own, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.query = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 8))

    def forward(self, x):
        return {"x": torch.tanh(self.linear(x)), "queries": [self.query.expand(len(x), -1), None]}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Learned() for _ in range(6)])

    def forward(self, x):
        queries = []
        for layer in self.layers:
            out = layer(x)
            x, queries = out["x"], [*queries, out["queries"][0]]
        for query in queries:
            x = x * query
        return x


@pytest.mark.parametrize("offload", [False, True])
def test_weights_that_a_block_returns_outlive_their_slot(offload):
    torch.manual_seed(0)
    model = Chain()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.05, fused=True)
    with streaming(model, train="weights", optimizer=SETTINGS, slots=2, offload_activations=offload) as stream:
        for step in range(2):
            stream.begin_step(step)
            loss, expected = (one(batch(step)).square().mean() for one in (model, twin))
            assert loss.item() == expected.item()
            loss.backward(), expected.backward()
            stream.end_step(), optimizer.step(), optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(model(batch(9)), twin(batch(9)))
    assert_equal(dict(model.named_parameters()), dict(twin.named_parameters()))


def test_a_block_within_a_block_is_refused():
    model = make_stack(adapters=False)
    first, forward = model.layers[0], model.layers[0].forward
    first.forward = lambda hidden: forward(hidden) + model.layers[2](hidden)
    with (
        streaming(model, train="nothing"),
        torch.no_grad(),
        pytest.raises(StreamError, match=r"layers\.0, outside a step: its forward computed layers\.2, too"),
    ):
        model(batch(0))


def test_a_saved_tensor_that_is_written_to_is_refused_as_torch_does():
    model = make_stack(adapters=True)
    block = model.layers[1]
    block.forward = lambda hidden: (out := torch.sigmoid(block.up(hidden)))[:, :128] * 2 + out.add_(1)[:, 128:]
    for refused, within in ((RuntimeError, False), (StreamError, True)):
        with streaming(model) if within else contextlib.nullcontext() as stream:
            if within:
                stream.begin_step(0)
            with pytest.raises(refused, match="modified by an inplace operation"):
                model(batch(0)).mean().backward()


def test_sparse_gradients_are_refused_by_name():
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(8, 8, sparse=True)

        def forward(self, x):
            return x + self.words(torch.arange(5))

    model = nn.Sequential(Words(), Words())
    with streaming(model, blocks="*", train="weights", optimizer=SETTINGS, slots=2) as stream:
        stream.begin_step(0)
        with pytest.raises(StreamError, match=r"^1\.words\.weight, step 0: its gradient is sparse, .* sparse=True"):
            model(batch(0)).mean().backward()


def test_what_is_not_finite_is_seen_in_dicts_too():
    model = Chain()
    with streaming(model, train="nothing") as stream:
        stream.begin_step(0)
        with torch.no_grad():
            model(batch(0) * float("nan"))
        with pytest.raises(StreamError, match=r"layers\.0, step 0: its output holds NaN"):
            stream.end_step(), stream.synchronize()
