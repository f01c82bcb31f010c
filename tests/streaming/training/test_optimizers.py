"""Other optimizers than AdamW on the host: torch's own numbers to the bit, through states, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from bitplan.streaming import AdamWSettings, HostOptimizer, Lion, StreamError
from tests.streaming.stream_samples import assert_equal, batch, make_stack, streaming

KINDS = {
    "sgd": HostOptimizer(torch.optim.SGD, 0.05, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "lion": HostOptimizer(Lion, 1e-3, {"weight_decay": 0.1}),
    "adafactor": HostOptimizer(torch.optim.Adafactor, 1e-2),
    "muon": HostOptimizer(torch.optim.Muon, 1e-2, vectors=AdamWSettings(lr=1e-3)),
}


def run(model, stream, steps, first=0, dtype=torch.float32):
    for step in range(first, steps):
        stream.begin_step(step)
        stream.training.lr = stream.training.settings.lr / (1 + step)
        model(batch(step, dtype)).square().mean().backward()
        stream.end_step()
    stream.synchronize()


def run_resident(model, settings, steps, dtype):
    """The same written plainly: masters in float32, one optimizer for those it takes, AdamW for the rest."""
    named = dict(model.layers.named_parameters())
    masters = {name: one.detach().float().clone() for name, one in named.items()}
    taken = [one for one in masters.values() if settings.takes_vectors or one.dim() == 2]
    others = [one for one in masters.values() if not (settings.takes_vectors or one.dim() == 2)]
    optimizers = [settings.kind(taken, lr=settings.lr, **settings.settings)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=settings.vectors.lr, fused=True))
    for step in range(steps):
        model(batch(step, dtype)).square().mean().backward()
        for name, master in masters.items():
            master.grad, named[name].grad = named[name].grad.float(), None
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] / (1 + step)
            optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                named[name].copy_(master)
    return {f"layers.{name}": one for name, one in masters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_those_of_torchs_optimizer(kind, dtype):
    model = make_stack(adapters=False, count=1, dtype=dtype)
    resident = copy.deepcopy(model)
    with streaming(model, train="weights", optimizer=KINDS[kind]) as stream:
        run(model, stream, 3, dtype=dtype)
        masters = {name: one.master.clone() for name, one in stream.training.trained().items()}
    expected = run_resident(resident, KINDS[kind], 3, dtype)
    assert masters.keys() == expected.keys()
    for name, master in expected.items():  # torch may add several weights' numbers in one call, in another order
        torch.testing.assert_close(masters[name], master, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_to_the_bit_from_its_state(kind, tmp_path):
    options = {"train": "weights", "optimizer": KINDS[kind]}
    model = make_stack(adapters=False, count=1)
    with streaming(model, **options) as stream:
        run(model, stream, 2)
        stream.save(tmp_path / "state.safetensors")
        run(model, stream, 4, first=2)
        expected = copy.deepcopy(stream.state_dict()["tensors"])
    other = make_stack(adapters=False, count=1, seed=1)
    with streaming(other, **options) as stream:
        stream.load(tmp_path / "state.safetensors")
        other.load_state_dict({**other.state_dict(), **outside(model)})
        run(other, stream, 4, first=2)
        assert_equal(stream.state_dict()["tensors"], expected)
    with streaming(other, train="weights", optimizer=AdamWSettings()) as stream, pytest.raises(StreamError) as refused:
        stream.load(tmp_path / "state.safetensors")
    assert "state.safetensors" in str(refused.value)


def outside(model):
    return {name: one for name, one in model.state_dict().items() if not name.startswith("layers.")}


def test_what_an_optimizer_can_do_is_tried():
    assert {name: (one.takes_vectors, one.steps_parts) for name, one in KINDS.items()} == {
        "sgd": (True, True),
        "lion": (True, True),
        "adafactor": (True, False),
        "muon": (False, False),
    }


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: HostOptimizer("sgd", 0.1), "expected a class of torch.optim, got .sgd."),
        (lambda: HostOptimizer(torch.optim.SGD, -0.1), "lr: expected a finite number of at least 0, got -0.1"),
        (lambda: HostOptimizer(torch.optim.SGD, 0.1, {"momentun": 0.9}), "SGD cannot step .*unexpected keyword"),
        (lambda: HostOptimizer(torch.optim.LBFGS, 0.1), "LBFGS cannot step a matrix on the host: .*closure"),
        (lambda: Lion([torch.zeros(1)], betas=(0.9, 1.0)), r"betas\[1\]: expected a number of at least 0 and below 1"),
    ],
)
def test_optimizers_that_cannot_serve_are_refused(make, says):
    with pytest.raises(StreamError, match=says):
        make()


def test_moments_in_8_bits_are_adamws():
    model = make_stack(adapters=False, count=1)
    says = r"layers\.0\.\S+: moments='int8' are AdamW's, and the optimizer is torch\.optim\.sgd\.SGD"
    with (
        pytest.raises(StreamError, match=says),
        streaming(model, train="weights", moments="int8", optimizer=KINDS["sgd"]),
    ):
        pass


class InBytes(torch.optim.SGD):
    """An optimizer that keeps states of large weights in bytes, as bitsandbytes does."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel() >= 4096:
                self.state[parameter]["codes"] = torch.zeros(1, dtype=torch.uint8)


def test_states_in_bytes_are_refused():
    model = make_stack(adapters=False, count=1)
    with (
        pytest.raises(StreamError, match=r"InBytes keeps its states as bytes .*moments='int8'"),
        streaming(model, train="weights", optimizer=HostOptimizer(InBytes, 0.1)),
    ):
        pass
