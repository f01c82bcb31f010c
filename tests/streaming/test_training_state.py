"""Weights trained on the host are saved and come back: the run goes on to the bit, and what does not fit is refused."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bitplan.base.errors import StreamError, StreamStateError
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy
from bitplan.streaming.training.adamw import AdamWSettings
from tests.streaming.stream_samples import assert_equal, batch, make_stack, streaming

SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.05)
QUICK = {"telemetry_enabled": False, "warmup_steps": 2, "update_interval_steps": 2, "history_window": 3}
# Thresholds and a budget that these gradients lie around, so that blocks move before and after the cut.
GRADIENT = SelectivePrecisionConfig(
    **QUICK, min_steps_between_switches=0, grad_weight=0.55, bf16_threshold=0.3, int8_threshold=0.27,
    hysteresis_margin=0.02,
)  # fmt: skip
IMPACT = SelectivePrecisionConfig(
    **QUICK, min_steps_between_switches=0, scoring="impact", damage_budget=1e-3, impact_tokens=3, impact_turns=1
)


# ---- a run, whole or in two ------------------------------------------------------------------------------------------


class Run:
    """One process's objects: a model, its stream, a policy, and an optimizer for what is outside of blocks."""

    def __init__(self, stack, config, *, seed=0, dtype=torch.float32, **options):
        self.model, self.dtype = make_stack(adapters=False, dtype=dtype, seed=seed), dtype
        given = {"train": "weights", "optimizer": SETTINGS, "clip_grad_norm": 0.5} | options
        self.stream = stack.enter_context(streaming(self.model, **given))
        self.policy = stack.enter_context(SelectivePrecisionPolicy(self.stream, config)) if config else None
        outside = [one for name, one in self.model.named_parameters() if not name.startswith("layers.")]
        self.outside = torch.optim.AdamW(outside, lr=1e-2)

    def steps(self, numbers):
        """What could differ: losses, decisions, formats; and after the last step the masters."""
        result, runner = [], self.policy or self.stream
        for step in numbers:
            self.stream.training.lr = 1e-2 / (1 + step)
            runner.begin_step(step)
            loss = self.model(batch(step, self.dtype)).square().mean()
            loss.backward()
            hints = None
            if self.policy is not None:
                self.policy.collect_block_grad_stats()
                hints = self.policy.compute_hints(step)
            self.outside.step()
            self.outside.zero_grad()
            runner.end_step()
            result.append((step, loss.item(), hints, self.stream.formats))
        return result

    def outside_state(self):
        """What a training script keeps anyway."""
        weights = {name: one for name, one in self.model.state_dict().items() if not name.startswith("layers.")}
        return copy.deepcopy({"model": weights, "optimizer": self.outside.state_dict()})

    def load_outside(self, state):
        self.model.load_state_dict(state["model"], strict=False)
        self.outside.load_state_dict(state["optimizer"])


def through_a_file(stream, folder):
    stream.save(folder / "streamed.safetensors")
    return lambda other: other.load(folder / "streamed.safetensors")


def through_torch(stream, folder):
    torch.save(stream.state_dict(), folder / "streamed.pt")
    return lambda other: other.load_state_dict(torch.load(folder / "streamed.pt", weights_only=True))


def through_safetensors(stream, folder):
    state = stream.state_dict()
    save_file(state.pop("tensors"), folder / "tensors.safetensors")
    (folder / "rest.json").write_text(json.dumps(state))

    def load(other):
        rest = json.loads((folder / "rest.json").read_text())
        other.load_state_dict(rest | {"tensors": load_file(folder / "tensors.safetensors")})

    return load


@pytest.mark.parametrize(
    ("dtype", "config", "carry", "cut", "last"),
    [
        pytest.param(torch.float32, GRADIENT, through_a_file, 4, 8, marks=pytest.mark.long),
        (torch.bfloat16, IMPACT, through_torch, 5, 10),
        (torch.float32, None, through_safetensors, 1, 2),
        pytest.param(torch.bfloat16, None, through_a_file, 2, 4, marks=pytest.mark.long),
    ],
    ids=["gradient", "impact, bfloat16", "no policy", "no policy, bfloat16"],
)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(dtype, config, carry, cut, last, tmp_path):
    """The second process has other random weights: whatever it computes with comes from what was saved."""
    with ExitStack() as stack:
        whole = Run(stack, config, dtype=dtype, formats="int8_row")
        expected = whole.steps(range(last))
        end = copy.deepcopy(whole.stream.state_dict())
        decided = whole.policy and whole.policy.state_dict()
    with ExitStack() as stack:
        first = Run(stack, config, dtype=dtype, formats="int8_row")
        results = first.steps(range(cut))
        load, outside = carry(first.stream, tmp_path), first.outside_state()
        policy_state = first.policy and json.loads(json.dumps(first.policy.state_dict()))
    with ExitStack() as stack:
        second = Run(stack, config, dtype=dtype, seed=7)
        second.load_outside(outside)
        load(second.stream)
        if second.policy is not None:
            second.policy.load_state_dict(policy_state)
        results += second.steps(range(cut, last))
        result = second.stream.state_dict()
        assert (second.policy and second.policy.state_dict()) == decided
        assert_equal(result["tensors"], end["tensors"])
        assert {**result, "tensors": 0} == {**end, "tensors": 0}
    assert results == expected
    assert_equal(dict(second.model.named_parameters()), dict(whole.model.named_parameters()))
    if config is not None:
        assert len({json.dumps(one[3]) for one in expected[cut:]}) > 1, "nothing moved after the cut"


def test_formats_that_wait_for_the_next_step_are_saved_too(tmp_path):
    with ExitStack() as stack:
        first, second = Run(stack, None), Run(stack, None, seed=7)
        first.steps(range(2))
        first.stream.set_formats({"layers.1": "int8_row"})
        first.stream.save(tmp_path / "one.safetensors")
        second.load_outside(first.outside_state())
        second.stream.load(tmp_path / "one.safetensors")
        assert second.stream.formats["layers.1.down.weight"] == "int8_row"
        with torch.no_grad():  # at once, for there may be no next step: evaluation
            second_out = second.model(batch(9))
        first.stream.begin_step(2)
        assert torch.equal(first.model(batch(9)), second_out)


def test_before_the_first_step_there_are_masters_and_no_moments():
    with ExitStack() as stack:
        first, second = Run(stack, None), Run(stack, None, seed=7)
        state = first.stream.state_dict()
        assert {key.rpartition(".")[2] for key in state["tensors"]} == {"master"}
        assert set(state["steps"].values()) == {0}
        second.steps(range(2))
        second.stream.load_state_dict(state)
        assert_equal(second.stream.state_dict()["tensors"], state["tensors"])


def test_frozen_parameters_of_trained_blocks_are_the_models_own():
    with ExitStack() as stack:
        model = make_stack(adapters=False)
        for layer in model.layers:
            layer.up.requires_grad_(False)
        stream = stack.enter_context(streaming(model, train="weights", formats="int8_row"))
        state = stream.state_dict()
    assert not any(".up." in name for name in state["steps"])
    assert any(".up." in name for name in state["formats"])


def test_a_loaded_state_is_a_copy_and_the_state_itself_is_live():
    with ExitStack() as stack:
        first, second = Run(stack, None), Run(stack, None, seed=7)
        first.steps(range(2))
        state = first.stream.state_dict()
        stored = copy.deepcopy(state)
        second.load_outside(first.outside_state())
        second.stream.load_state_dict(state)
        second.steps(range(2, 4))
        second.stream.synchronize()
        assert_equal(state["tensors"], stored["tensors"])
        first.steps(range(2, 3))
        first.stream.synchronize()
        assert any(not torch.equal(state["tensors"][name], one) for name, one in stored["tensors"].items())


def test_an_earlier_state_is_loaded_in_the_middle_of_a_step():
    with ExitStack() as stack:
        run = Run(stack, None, formats="int8_row")
        run.steps(range(2))
        outside, state = run.outside_state(), copy.deepcopy(run.stream.state_dict())
        expected = run.steps(range(2, 4))
        run.stream.begin_step(4)
        run.model(batch(4)).square().mean().backward()  # its gradients must not count
        run.load_outside(outside)
        run.outside.zero_grad()
        run.stream.load_state_dict(state)
        assert run.steps(range(2, 4)) == expected


def test_the_models_parameters_are_current_after_synchronize():
    with ExitStack() as stack:
        run = Run(stack, None, dtype=torch.bfloat16, formats="int8_row")
        run.steps(range(2))
        run.stream.synchronize()
        for name, one in run.model.layers.named_parameters():
            master = run.stream.state_dict()["tensors"][f"layers.{name}.master"]
            assert torch.equal(one, master.bfloat16()), name


# ---- refusals --------------------------------------------------------------------------------------------------------

NAME = "layers.2.down.weight"


def without(document, section, key):
    return {**document, section: {name: one for name, one in document[section].items() if name != key}}


def with_entry(document, section, key, value):
    return {**document, section: {**document[section], key: value}}


MISFITS = [
    (lambda one: {**one, "version": 2}, "version must be 1"),
    (lambda one: {**one, "document": "bitplan-plan"}, "document must be one of 'bitplan-streamed-training'"),
    (lambda one: {key: value for key, value in one.items() if key != "lr"}, "lr is missing"),
    (lambda one: {**one, "extra": 1}, "unknown key 'extra'"),
    (lambda one: without(one, "steps", NAME), rf"trained parameters the model now has '{NAME}'"),
    (lambda one: with_entry(one, "steps", "layers.9.w", 1), r"the model no longer has 'layers\.9\.w'"),
    (lambda one: without(one, "formats", NAME), rf"streamed parameters the model now has '{NAME}'"),
    (lambda one: with_entry(one, "steps", NAME, -1), rf"steps: {NAME} must be an integer from 0"),
    (lambda one: with_entry(one, "steps", NAME, 0), rf"tensors: unknown key '{NAME}\.exp_avg"),
    (lambda one: with_entry(one, "formats", NAME, "int3_row"), "the saved one: .*int3_row"),
    (lambda one: without(one, "tensors", f"{NAME}.master"), rf"tensors: {NAME}\.master is missing"),
    (lambda one: without(one, "tensors", f"{NAME}.exp_avg_sq"), rf"tensors: {NAME}\.exp_avg_sq is missing"),
    (lambda one: with_entry(one, "tensors", "layers.2.up.exp_avg", torch.zeros(1)), "tensors: unknown key"),
    (lambda one: with_entry(one, "tensors", f"{NAME}.master", [1.0]), r"master must be a tensor, got \[1\.0\]"),
    (
        lambda one: with_entry(one, "tensors", f"{NAME}.exp_avg", torch.zeros(128, 128)),
        rf"{NAME}\.exp_avg has shape \(128, 128\), and in this model it has \(128, 256\): another model",
    ),
    (
        lambda one: with_entry(one, "tensors", f"{NAME}.master", torch.zeros(128, 256).bfloat16()),
        rf"{NAME}\.master must be dense float32 numbers, got bfloat16",
    ),
    (
        lambda one: with_entry(one, "tensors", f"{NAME}.master", torch.full((128, 256), float("nan"))),
        rf"{NAME}\.master holds NaN or infinity",
    ),
    (
        lambda one: with_entry(with_entry(one, "optimizer", "eps", 1e-6), "optimizer", "clip_grad_norm", None),
        r"another optimizer: eps was 1e-06, is 1e-08; clip_grad_norm was null, is 0\.5; .*accept_optimizer_change",
    ),
]


def test_states_that_do_not_fit_are_refused_and_nothing_changes():
    with ExitStack() as stack:
        run, twin = Run(stack, None, formats="int8_row"), Run(stack, None, formats="int8_row")
        for one in (run, twin):
            one.steps(range(2))
        saved = copy.deepcopy(run.stream.state_dict())
        for change, message in MISFITS:
            with pytest.raises(StreamStateError, match=message) as caught:
                run.stream.load_state_dict(change(saved), where="the saved one")
            assert str(caught.value).startswith("the saved one: ")
            assert_equal(run.stream.state_dict()["tensors"], saved["tensors"])
        assert run.steps(range(2, 4)) == twin.steps(range(2, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_stack(adapters=False, count=4), r"no longer has 'layers\.4\.norm\.weight'.* and 5 more"),
        (lambda: make_stack(adapters=False, count=7), r"now has 'layers\.6\.norm\.weight'"),
    ],
)
def test_a_changed_model_is_named(make, message, tmp_path):
    with ExitStack() as stack:
        Run(stack, None).stream.save(tmp_path / "one.safetensors")
        other = stack.enter_context(streaming(make(), train="weights", optimizer=SETTINGS, clip_grad_norm=0.5))
        with pytest.raises(StreamStateError, match=rf"one\.safetensors: this state is of another model: .*{message}"):
            other.load(tmp_path / "one.safetensors")


def test_another_optimizer_is_named_and_may_be_accepted():
    with ExitStack() as stack:
        first = Run(stack, None)
        first.steps(range(2))
        state = first.stream.state_dict()
        other = Run(stack, None, seed=7, optimizer=AdamWSettings(lr=3e-3, betas=(0.8, 0.99), weight_decay=0.05)).stream
        message = r"lr was 0\.01, is 0\.003; betas was \[0\.9, 0\.999\], is \[0\.8, 0\.99\]"
        with pytest.raises(StreamStateError, match=message):
            other.load_state_dict(state)
        other.load_state_dict(state, accept_optimizer_change=True)
        assert other.training.lr == 3e-3
        assert_equal(other.state_dict()["tensors"], state["tensors"])


def test_files_that_are_no_state(tmp_path):
    with ExitStack() as stack:
        stream = Run(stack, None).stream
        with pytest.raises(StreamStateError, match=r"none\.safetensors: no such file"):
            stream.load(tmp_path / "none.safetensors")
        save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
        with pytest.raises(StreamStateError, match=r"other\.safetensors: no state of streamed weights"):
            stream.load(tmp_path / "other.safetensors")
        save_file({"x": torch.zeros(2)}, tmp_path / "torn.safetensors", {"bitplan_streamed_training": "[1"})
        with pytest.raises(StreamStateError, match=r"torn\.safetensors: bitplan_streamed_training: not valid JSON"):
            stream.load(tmp_path / "torn.safetensors")
        stream.save(tmp_path / "cut.safetensors")
        whole = (tmp_path / "cut.safetensors").read_bytes()
        (tmp_path / "cut.safetensors").write_bytes(whole[:-7])
        with pytest.raises(StreamStateError, match=r"within the [0-9]+ payload bytes"):
            stream.load(tmp_path / "cut.safetensors")


def test_calls_that_make_no_sense(tmp_path):
    with ExitStack() as stack:
        stream = Run(stack, None).stream
        stream.begin_step(3)
        with pytest.raises(StreamError, match="step 3 is open; save between end_step and begin_step"):
            stream.save(tmp_path / "one.safetensors")
        adapters = stack.enter_context(streaming(make_stack(adapters=True)))
        for call in (adapters.state_dict, lambda: adapters.load_state_dict({}), lambda: adapters.load("x")):
            with pytest.raises(StreamError, match="train='adapters' trains nothing on the host"):
                call()
    with pytest.raises(StreamError, match="closed"):
        stream.state_dict()
    assert not (tmp_path / "one.safetensors").exists()


def test_a_layout_unlike_the_masters_is_taken_over():
    """A transposed master: moments of a file are contiguous, and the fused AdamW wants them to lie as it does."""
    with ExitStack() as stack:
        runs = []
        for _ in range(2):
            model = make_stack(adapters=False)
            for layer in model.layers:
                layer.down.weight = nn.Parameter(layer.down.weight.detach().t().contiguous().t())
            stream = stack.enter_context(streaming(model, train="weights", optimizer=SETTINGS, formats="bfloat16"))
            runs.append((model, stream))

        def step(model, stream, number):
            stream.begin_step(number)
            model(batch(number)).square().mean().backward()
            stream.end_step()
            return copy.deepcopy(stream.state_dict())

        state = step(*runs[0], 0)
        state["tensors"] = {name: one.contiguous() for name, one in state["tensors"].items()}
        runs[1][1].load_state_dict(state)
        assert_equal(step(*runs[1], 1)["tensors"], step(*runs[0], 1)["tensors"])
