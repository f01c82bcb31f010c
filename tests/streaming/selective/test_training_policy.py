"""The policy on a stream: lifecycle, modes, resume bit for bit, impact, bandwidth, loss feedback, bad input."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bitplan.streaming.selective.calibration import CalibrationResult
from bitplan.streaming.selective.config import SelectiveError, SelectivePrecisionConfig
from bitplan.streaming.selective.decide import TransferFacts
from bitplan.streaming.selective.layer_probes import LayerProbes
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy, TelemetryError
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.transfer.devices import SimulatedDevice
from bitplan.streaming.transfer.transfer_limits import HeuristicPolicyBridge, Phase, RuntimeLimitHints
from tests.crosses import few
from tests.streaming.stream_samples import CHECKPOINTING, COUNT, ClockedDevice, batch, make_stack, streaming

BLOCKS = [f"layers.{index}" for index in range(COUNT)]
QUICK = {"warmup_steps": 2, "update_interval_steps": 2, "history_window": 3, "min_steps_between_switches": 4}


def config_of(**options):
    return SelectivePrecisionConfig(**{"telemetry_enabled": False, **QUICK, **options})


@contextmanager
def policy_on(model, config, *, stream_options=None, **options):
    with (
        streaming(model, **(stream_options or {})) as stream,
        SelectivePrecisionPolicy(stream, config, **options) as one,
    ):
        yield one


def run_step(policy, model, optimizer, step, *, loss_of=None, data=None):
    policy.begin_step(step)
    loss = (loss_of or (lambda out: out.square().mean()))(model(batch(step) if data is None else data))
    loss.backward()
    policy.collect_block_grad_stats()
    hints = policy.compute_hints(step)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    policy.end_step()
    return hints, loss.detach()


def sgd(model):
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05)


def adapted(count=COUNT):
    """Adapters whose upper matrix is not zero, so that every adapter has a gradient."""
    model = make_stack(adapters=True, count=count)
    for index, layer in enumerate(model.layers):
        nn.init.normal_(layer.up.up.weight, std=0.02 * (1 + index))
    return model


# ---- what is forgotten -----------------------------------------------------------------------------------------------


def test_what_is_forgotten_is_said_once(caplog):
    model = adapted()
    with policy_on(model, config_of(warmup_steps=0)) as policy:
        for step in range(1, 12, 2):  # never a multiple of two
            policy.begin_step(step)
            model(batch(step)).square().mean().backward()
            policy.compute_hints(step)
            policy.end_step()
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    for text in (
        "run_calibration is true, but nothing was calibrated, so scores go by gradients alone",
        "step 1: collect_block_grad_stats() was not called between backward and end_step",
        "step 5: 3 steps without an update: compute_hints(step) decides in steps whose number is a multiple of "
        "update_interval_steps (2)",
        "closed before the first update, nothing was decided: warmup_steps is 0 and update_interval_steps 2",
    ):
        assert sum(text in one for one in said) == 1, text
    assert len(said) == 4


def test_nothing_is_said_where_nothing_is_forgotten(caplog):
    model = adapted()
    with policy_on(model, config_of()) as policy:
        policy.calibrate([batch(0)] * 4, progress=False)
        for step in range(5):
            run_step(policy, model, None, step)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# ---- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rest", "expected"),
    [
        ({"mode": "off"}, "float32", {}),
        ({"enabled": False, "force_int8_blocks": ("layers.1",)}, "float32", {}),
        ({"mode": "off", "force_int8_blocks": ("layers.1",)}, "float32", {"layers.1": "int8_row"}),
        (
            {"mode": "static", "force_int8_blocks": ("layers.1", "layers.4"), "int8_format": "fp8_e4m3_row"},
            "bfloat16",
            {"layers.1": "fp8_e4m3_row", "layers.4": "fp8_e4m3_row"},
        ),
    ],
)
def test_force_lists_hold_from_the_first_step_and_off_leaves_formats_alone(options, rest, expected):
    model = adapted()
    with policy_on(model, config_of(**options)) as policy:
        policy.begin_step(0)
        formats = policy.stream.formats
        for name in BLOCKS:
            assert formats[f"{name}.down.weight"] == expected.get(name, rest)
            assert formats[f"{name}.norm.weight"] == "float32"
        policy.end_step()


def test_dynamic_moves_blocks_after_warm_up_and_at_intervals():
    model = adapted()
    seen = []
    with policy_on(model, config_of(force_bf16_blocks=("layers.0",))) as policy:
        optimizer = sgd(model)
        for step in range(7):
            before = dict(policy.applied or {})
            hints, _ = run_step(policy, model, optimizer, step)
            assert all(policy.applied[name] == precision for name, precision in before.items()) or seen[-1]
            seen.append({name for name, hint in hints.items() if hint.changed})
            running = {name: fmt for name, fmt in policy.stream.formats.items() if name.endswith("down.weight")}
            assert set(running.values()) <= {"bfloat16", "int8_row"}
        # Warm-up is two collected steps, seen one step late: step 2 is the first update with two.
        assert seen[0] == seen[1] == set()
        assert seen[2]
        assert seen[3] == seen[5] == set()
        assert policy.precisions["layers.0"] == "bf16"
        assert "int8" in policy.precisions.values()
        policy.stream.synchronize()
        assert policy.stream.stats.last.bytes_h2d_by_format["int8_row"] > 0


def test_precisions_change_at_a_step_boundary_only():
    model = adapted()
    with policy_on(model, config_of()) as policy:
        for step in range(2):
            run_step(policy, model, None, step)
        policy.begin_step(2)
        model(batch(2)).square().mean().backward()
        policy.collect_block_grad_stats()
        hints = policy.compute_hints(2)
        assert any(hint.changed for hint in hints.values())
        assert set(policy.applied.values()) == {"bf16"}
        assert "int8_row" not in policy.stream.formats.values()
        policy.end_step()
        policy.begin_step(3)
        assert policy.applied == {name: hint.precision for name, hint in hints.items()}
        assert "int8_row" in policy.stream.formats.values()


def test_off_is_the_plain_stream_to_the_bit():
    """A policy that changes nothing is not seen in the gradients."""
    one, two = adapted(), adapted()
    with streaming(one, formats="bfloat16") as stream:
        stream.begin_step(0)
        one(batch(0)).square().mean().backward()
        stream.end_step()
    with policy_on(two, config_of(mode="off"), stream_options={"formats": "bfloat16"}) as policy:
        run_step(policy, two, None, 0)
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


def test_relative_magnitudes_are_those_of_the_adapters():
    model = adapted()
    with policy_on(model, config_of(update_interval_steps=1, warmup_steps=1)) as policy:
        run_step(policy, model, None, 0)
        norms = [
            torch.cat([one.grad.flatten() for one in layer.parameters() if one.grad is not None]).norm()
            for layer in model.layers
        ]
        policy.state_dict()
        (step,) = policy.state.history
        mean = sum(norms) / COUNT
        for name, norm in zip(BLOCKS, norms, strict=True):
            assert step.stats[name].relative_magnitude == pytest.approx(float(norm / mean), rel=1e-5)


def test_no_gradient_is_measured_while_probes_sleep():
    measured, layer = [], nn.Linear(2, 2)
    probes = LayerProbes(None, SimpleNamespace(add_gradient=lambda unit, _: measured.append(unit)), lambda: None)
    layer.register_forward_pre_hook(probes._gradient_hook("a", "weight"))
    layer(torch.ones(2)).sum().backward()
    assert measured == []
    probes._precisions = {}
    layer(torch.ones(2)).sum().backward()
    assert measured == ["a"]


@pytest.mark.parametrize("checkpointing", few(CHECKPOINTING, 2))
def test_gradients_of_trained_weights_are_measured_before_they_leave(checkpointing):
    model, twin = make_stack(adapters=False), make_stack(adapters=False)
    with torch.no_grad():
        for name, one in twin.named_parameters():  # what crosses as bf16; vectors cross as they are
            if one.ndim >= 2 and name.startswith("layers."):
                one.copy_(one.bfloat16().float())
    model.checkpointing = checkpointing
    options = {"train": "weights", "optimizer": AdamWSettings(lr=1e-3)}
    with policy_on(model, config_of(), stream_options=options) as policy:
        run_step(policy, model, None, 0)
        policy.state_dict()
        (step,) = policy.state.history
    twin(batch(0)).square().mean().backward()
    for name, layer in zip(BLOCKS, twin.layers, strict=True):
        norm = torch.cat([one.grad.flatten() for one in layer.parameters()]).norm()
        assert step.stats[name].l2_norm == pytest.approx(float(norm), rel=1e-4)


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"scoring": "impact", "damage_budget": 1e-4, "granularity": "layer"},
            marks=pytest.mark.long,
        ),
        {"scoring": "impact", "damage_budget": 1e-3, "impact_tokens": 2, "impact_steps": 2, "impact_turns": 2},
        {"loss_feedback": True, "loss_tolerance": 1e-4, "backoff_steps": 3},
    ],
    ids=["gradient", "impact", "impact of sampled rows", "feedback"],
)
def test_a_resumed_run_takes_the_same_decisions(options, tmp_path):
    config, cut, steps = config_of(**options), 5, 9
    probe_of = lambda model: lambda: model(batch(999)).square().mean()

    def decisions(policy, model, optimizer, numbers):
        result = []
        for step in numbers:
            hints, loss = run_step(policy, model, optimizer, step)
            result.append((step, hints, policy.applied, float(loss)))
        return result

    whole = adapted()
    with policy_on(whole, config, probe=probe_of(whole)) as policy:
        expected = decisions(policy, whole, sgd(whole), range(steps))
        end = policy.state_dict()
    first = adapted()
    with policy_on(first, config, probe=probe_of(first)) as policy:
        result = decisions(policy, first, sgd(first), range(cut))
        policy.save(tmp_path / "policy.json")
        policy.save(tmp_path / "again.json")
    weights = {name: one.clone() for name, one in first.state_dict().items()}
    second = adapted()
    second.load_state_dict(weights)
    with policy_on(second, config, probe=probe_of(second)) as policy:
        policy.load(tmp_path / "policy.json")
        result += decisions(policy, second, sgd(second), range(cut, steps))
        assert policy.state_dict() == end
    assert result == expected
    assert len({json.dumps(one[2]) for one in expected}) > 1, "nothing moved: the test would prove nothing"
    assert (tmp_path / "policy.json").read_text() == (tmp_path / "again.json").read_text()


def test_a_state_is_saved_between_steps_and_of_this_model_only(tmp_path):
    model = adapted()
    with policy_on(model, config_of()) as policy:
        run_step(policy, model, None, 0)
        saved = policy.state_dict()
        policy.begin_step(1)
        with pytest.raises(SelectiveError, match="step 1 is open; save between end_step and begin_step"):
            policy.state_dict()
    with policy_on(adapted(count=4), config_of()) as other:
        before = other.state
        with pytest.raises(SelectiveError, match=r"another model: the model no longer has 'layers\.4', 'layers\.5'"):
            other.load_state_dict(saved)
        assert other.state is before
    with policy_on(adapted(), config_of(bf16_threshold=0.7)) as other:
        with pytest.raises(SelectiveError, match=r"bf16_threshold was 0\.6, is 0\.7"):
            other.load_state_dict(saved)
        other.load_state_dict(saved, accept_config_change=True)
        with pytest.raises(SelectiveError, match=r"applied: layers\.5 is missing"):
            other.load_state_dict(
                {**saved, "applied": dict(list(saved["applied"].items())[:-1])}, accept_config_change=True
            )
        with pytest.raises(SelectiveError, match="unknown key 'aplied'; did you mean 'applied'"):
            other.load_state_dict({**saved, "aplied": None})
        torn = tmp_path / "torn.json"
        torn.write_text('{"document": ')
        with pytest.raises(SelectiveError, match=r"torn\.json: not valid JSON"):
            other.load(torn)


# ---- impact ----------------------------------------------------------------------------------------------------------


def measured_impacts(model, config, *, stream_options=None, steps=1):
    with policy_on(model, config, stream_options=stream_options) as policy:
        for step in range(steps):
            run_step(policy, model, None, step)
        policy.state_dict()
        return policy.state.history[-1].impacts


@pytest.mark.cross("checkpointing", few(CHECKPOINTING, 2))
@pytest.mark.cross("train", ["adapters", "weights"])
def test_impact_is_the_gradient_times_the_rounding_error(train, checkpointing):
    """Against a resident model whose weights have gradients: <dL/dW, W - W_hat>, layer by layer."""
    from bitplan import decode, encode

    make = adapted if train == "adapters" else lambda: make_stack(adapters=False)
    model, twin = make(), make()
    model.checkpointing = checkpointing
    config = config_of(scoring="impact", granularity="layer", update_interval_steps=1, impact_tokens=0)
    options = {"train": train, **({"optimizer": AdamWSettings()} if train == "weights" else {})}
    impacts = measured_impacts(model, config, stream_options=options)
    twin.requires_grad_(True)
    layers = {name: one for name, one in twin.named_parameters() if name.startswith("layers.") and one.ndim == 2}
    streamed = {
        name: one for name, one in layers.items() if train == "weights" or ".base." in name or ".down.w" in name
    }
    streamed = {name: one for name, one in streamed.items() if ".up.down." not in name}
    with torch.no_grad():
        for one in streamed.values():
            one.copy_(one.bfloat16().float())
    twin(batch(0)).square().mean().backward()
    assert set(impacts) == {name.removesuffix(".weight") for name in streamed}
    for name, one in streamed.items():
        error = one.detach() - decode(encode(one.detach(), "int8_row"), torch.float32)
        result = impacts[name.removesuffix(".weight")]["int8"]
        assert result == pytest.approx(float((one.grad * error).sum()), rel=1e-3, abs=1e-9)


def test_a_block_has_the_sum_of_its_layers():
    per_layer = measured_impacts(adapted(), config_of(scoring="impact", granularity="layer", update_interval_steps=1))
    per_block = measured_impacts(adapted(), config_of(scoring="impact", update_interval_steps=1))
    for name in BLOCKS:
        parts = [row["int8"] for layer, row in per_layer.items() if layer.startswith(f"{name}.")]
        assert per_block[name]["int8"] == pytest.approx(sum(parts), rel=1e-5)


def test_impacts_are_measured_before_an_update_only_and_a_low_unit_in_its_turn():
    model = adapted()
    config = config_of(scoring="impact", damage_budget=10.0, update_interval_steps=3, warmup_steps=1, history_window=9)
    with policy_on(model, config) as policy:
        for step in range(9):
            run_step(policy, model, None, step)
        policy.state_dict()
        measured = {stats.step_id: set(stats.impacts) for stats in policy.state.history}
    assert measured[2] == set(BLOCKS)
    assert {step for step, units in measured.items() if units} <= {2, 5, 8}
    assert set(policy.precisions.values()) == {"int8"}
    # All are low now: the truth of one unit in eight is sent along, here that of layers.1, then of layers.2.
    assert (measured[5], measured[8]) == ({"layers.1"}, {"layers.2"})


def test_all_units_are_measured_before_the_first_update_and_then_in_turns():
    model = adapted()
    config = config_of(
        scoring="impact",
        damage_budget=1e-30,
        update_interval_steps=2,
        warmup_steps=4,
        history_window=20,
        impact_turns=3,
    )
    with policy_on(model, config) as policy:
        for step in range(12):
            run_step(policy, model, None, step)
        policy.state_dict()
        measured = {stats.step_id: set(stats.impacts) for stats in policy.state.history if stats.impacts}
        assert policy.state.last_update_step == 10
    # Warm-up is over at step 4. From then on unit i in intervals i, i + 3, i + 6 of two steps.
    assert measured[1] == measured[3] == set(BLOCKS)
    assert measured[5] == {"layers.2", "layers.5"}
    assert measured[7] == {"layers.0", "layers.3"}
    assert measured[9] == {"layers.1", "layers.4"}
    assert measured[11] == {"layers.2", "layers.5"}


def test_a_unit_out_of_its_turn_keeps_its_precision_and_says_so():
    model = adapted()
    config = config_of(scoring="impact", damage_budget=1e-30, update_interval_steps=1, warmup_steps=1, history_window=1)
    with policy_on(model, config) as policy:
        run_step(policy, model, None, 0)
        first, _ = run_step(policy, model, None, 1)
        assert all(hint.reason.startswith("damage ") and "last measured" not in hint.reason for hint in first.values())
        run_step(policy, model, None, 2)
        hints, _ = run_step(policy, model, None, 3)  # sees step 2, in which it was the turn of layers.2
        reason = "in loss when last measured, and not measured before this update: no change"
        assert [name for name, hint in hints.items() if reason not in hint.reason] == ["layers.2"]
        assert {hint.precision for hint in hints.values()} == {"bf16"}
        assert all(hint.sensitivity is not None for hint in hints.values())


@pytest.mark.cross("checkpointing", few(CHECKPOINTING, 2))
@pytest.mark.cross("tokens", [0, 2])
def test_measuring_is_not_seen_in_the_gradients(checkpointing, tokens):
    result = []
    for options in ({"mode": "off"}, {"scoring": "impact", "impact_tokens": tokens, "update_interval_steps": 1}):
        model = adapted()
        model.checkpointing = checkpointing
        with policy_on(model, config_of(**options), stream_options={"formats": "bfloat16"}) as policy:
            run_step(policy, model, None, 0)
            policy.state_dict()
        result.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert policy.state.history[-1].impacts
    assert result[0].keys() == result[1].keys()
    assert all(torch.equal(result[0][name], result[1][name]) for name in result[0])


def many_rows():
    return torch.randn(48, 8, generator=torch.Generator().manual_seed(4))


def test_sampled_rows_estimate_the_impact_of_all_without_bias():
    """One model, one batch, many steps: only the rows that are drawn differ."""
    model, draws = adapted(count=1), 30
    still = {"scoring": "impact", "granularity": "layer", "update_interval_steps": 1, "damage_budget": 1e-30}
    exact = None
    for tokens in (0, 48, 12):
        config = config_of(**still, impact_tokens=tokens, impact_turns=1, history_window=draws)
        with policy_on(model, config) as policy:
            for step in range(draws if tokens == 12 else 1):
                run_step(policy, model, None, step, data=many_rows())
                model.zero_grad()
            policy.state_dict()
            result = [stats.impacts for stats in policy.state.history]
        if exact is None:
            exact = result[0]
        elif tokens == 48:
            assert result[0] == exact, "as many as there are: all of them, to the bit"
    assert len(result) == draws
    for name, row in exact.items():
        estimates = torch.tensor([one[name]["int8"] for one in result], dtype=torch.float64)
        assert estimates.std() > 0.1 * abs(row["int8"]), "the rows drawn differ"
        assert abs(float(estimates.mean()) - row["int8"]) < 4 * float(estimates.std()) / draws**0.5


def test_an_input_that_is_changed_in_place_later_is_measured_as_it_was():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)
            self.requires_grad_(False)

        def forward(self, x):
            x = x * 2
            y = self.inner(x)
            x.add_(5.0)
            return y + x

    class Model(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.first = nn.Linear(8, 64)
            self.layers = nn.ModuleList([block])

        def forward(self, x):
            return self.layers[0](self.first(x))

    torch.manual_seed(0)
    model = Model(Changing())
    impacts = measured_impacts(model, config_of(scoring="impact", update_interval_steps=1, impact_tokens=0))
    x, weight = model.first(batch(0)).detach() * 2, model.layers[0].inner.weight.detach().bfloat16().float()
    y = torch.nn.functional.linear(x, weight, model.layers[0].inner.bias) + x + 5.0
    gradient = 2 * y / y.numel()
    from bitplan import decode, encode

    moved = torch.nn.functional.linear(x, weight - decode(encode(weight, "int8_row"), torch.float32))
    assert impacts["layers.0"]["int8"] == pytest.approx(float((gradient * moved).sum()), rel=1e-3)


def test_a_low_units_impact_is_measured_against_the_truth():
    model = adapted()
    config = config_of(scoring="impact", damage_budget=10.0, update_interval_steps=1, warmup_steps=1, impact_tokens=0)
    model_bf16 = adapted()
    never = config_of(scoring="impact", update_interval_steps=1, damage_budget=1e-30, impact_turns=1)
    with policy_on(model_bf16, never) as policy:
        for step in range(9):
            run_step(policy, model_bf16, None, step, data=batch(0))
        high = policy.state.history[-1].impacts["layers.0"]["int8"]
    with policy_on(model, config) as policy:
        for step in range(10):
            run_step(policy, model, None, step, data=batch(0))
        low = {stats.step_id: stats.impacts for stats in policy.state.history}
    assert "layers.0" in low[8]  # its turn
    assert low[8]["layers.0"]["int8"] == pytest.approx(high, rel=0.3)  # upstream blocks are int8 now: nearly the same
    assert high != 0


class Odd(nn.Module):
    """A block with a matrix whose product cannot be seen."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Linear(64, 64)
        self.table = nn.Embedding(4, 64)

    def forward(self, x):
        return self.seen(x) + self.table.weight.sum(0)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.layers = nn.ModuleList([Odd(), nn.Sequential(nn.Linear(64, 64))]).requires_grad_(False)

    def forward(self, x):
        return self.layers[1](self.layers[0](self.first(x)))


def test_a_unit_with_an_unseen_weight_has_no_impact_and_says_so(caplog):
    model = Mixed()
    config = config_of(scoring="impact", update_interval_steps=1, damage_budget=10.0)
    with policy_on(model, config) as policy:
        for step in range(4):
            run_step(policy, model, None, step)
        assert set(policy.state.history[0].impacts) == {"layers.1"}
        assert policy.precisions == {"layers.0": "bf16", "layers.1": "int8"}
    assert "impact of layers.0.table.weight cannot be measured" in caplog.text
    assert "Embedding does not compute W x" in caplog.text
    assert "left out" not in caplog.text, "frozen blocks without adapters have no gradient, and need none here"


class Halved(nn.Module):
    """A block of two layers, of which one has no gradient path."""

    def __init__(self):
        super().__init__()
        self.seen, self.cut = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.seen(x) + self.cut(x.detach())


def test_a_unit_with_a_layer_that_no_gradient_reaches_has_no_impact(caplog):
    model = Mixed()
    model.layers[0] = Halved().requires_grad_(False)
    config = config_of(scoring="impact", update_interval_steps=1, damage_budget=10.0)
    with policy_on(model, config) as policy:
        for step in range(4):
            run_step(policy, model, None, step)
        assert all(set(step.impacts) == {"layers.1"} for step in policy.state.history if step.impacts)
        assert policy.precisions == {"layers.0": "bf16", "layers.1": "int8"}
    assert caplog.text.count("no impact of layers.0: no gradient reached layers.0.cut.weight") == 1


def test_the_damage_budget_bounds_all_low_units_together():
    low = {}
    for budget in (1e-12, 3e-5, 10.0):
        model = adapted()
        with policy_on(model, config_of(scoring="impact", granularity="layer", damage_budget=budget)) as policy:
            for step in range(4):
                run_step(policy, model, None, step)
            scores = [unit.score for unit in policy.state.units.values() if unit.running != "bf16"]
            assert sum(scores) <= budget
            low[budget] = len(scores)
    assert low[1e-12] == 0 < low[3e-5] < low[10.0] == 2 * COUNT


# ---- bandwidth -------------------------------------------------------------------------------------------------------


def test_nothing_goes_low_where_computing_hides_the_transfer_and_enough_where_not():
    counts = {}
    for name, compute_ms in (("hidden", 1e9), ("half", None), ("exposed", 1e-6)):
        model = adapted()
        config = config_of(bandwidth_aware=True, scoring="impact", damage_budget=10.0)
        with policy_on(model, config) as policy:
            total = sum(sizes["bf16"] for sizes in policy.unit_bytes.values())
            # A bus of one byte per ms, crossed once: `half` may send three quarters of the bytes.
            policy.meter.facts = TransferFacts(compute_ms or 0.75 * total, 1.0, 1.0)
            for step in range(4):
                run_step(policy, model, None, step)
            counts[name] = sum(precision != "bf16" for precision in policy.precisions.values())
            saved = sum(policy.unit_bytes[n]["bf16"] - policy.unit_bytes[n][p] for n, p in policy.precisions.items())
            if name == "half":
                assert saved >= 0.25 * total
    assert counts["hidden"] == 0 < counts["half"] < counts["exposed"] == COUNT


def test_the_bus_is_measured_by_the_stream_and_kept_in_the_state():
    model, device = adapted(), ClockedDevice(bytes_per_s=2e6)
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: device.compute(1e-3))
    config = config_of(bandwidth_aware=True, scoring="impact", damage_budget=10.0)
    with policy_on(model, config, stream_options={"device": device}) as policy:
        for step in range(4):
            run_step(policy, model, None, step)
        facts = policy.meter.facts
        assert facts.bytes_per_ms == pytest.approx(2e3)
        assert facts.compute_ms == pytest.approx(COUNT * 1.0)
        assert facts.crossings == pytest.approx(10 / COUNT)  # of step 0: 6 up, 3 down, and 1 ahead for step 1
        assert "int8" in policy.precisions.values()
        saved = policy.state_dict()
    with policy_on(adapted(), config) as policy:
        policy.load_state_dict(json.loads(json.dumps(saved)))
        assert policy.meter.facts == facts


# ---- loss feedback ---------------------------------------------------------------------------------------------------


def test_a_switch_that_raises_the_loss_is_rolled_back_and_backs_off(tmp_path, caplog):
    """layers.2 is made to suffer: the probe's loss jumps whenever it runs in int8."""
    model = adapted()
    losses = []

    def probe():
        assert not torch.is_grad_enabled()
        assert not model.training
        low = policy.stream.formats["layers.2.down.weight"] == "int8_row"
        losses.append(1.0 + 5.0 * low)
        torch.rand(1)  # leaves no trace
        return losses[-1]

    config = config_of(loss_feedback=True, backoff_steps=4, grad_weight=0.01, telemetry_enabled=True)
    with policy_on(model, config, probe=probe, folder=tmp_path) as policy, caplog.at_level(logging.INFO, "bitplan"):
        for step in range(4):
            torch.manual_seed(step)
            expected = torch.rand(1)
            torch.manual_seed(step)
            run_step(policy, model, None, step)
            assert torch.equal(torch.rand(1), expected)
        unit = policy.state.units["layers.2"]
        assert policy.applied == dict.fromkeys(BLOCKS, "int8") | {"layers.2": "bf16"}
        assert unit.rollbacks == 1
        assert unit.backoff_until == 3 + 4
        assert "rolled back: int8 raised the loss" in unit.reason
        assert model.training
        assert 3 <= len(losses) <= 8
        before = len(losses)
        run_step(policy, model, None, 4)
        run_step(policy, model, None, 5)
        assert len(losses) == before, "in its back-off it is not tried again"
    assert "trial" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / config.telemetry_file).read_text().splitlines()]
    assert [line["blocks_bf16"] for line in lines[:2]] == [0, 1]
    assert "rolled back" in lines[1]["block_details"]["layers.2"]["reason"]


def test_a_trial_that_breaks_off_goes_on():
    model = adapted()
    calls = []

    def probe():
        calls.append(policy.stream.formats["layers.0.down.weight"])
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return 1.0

    with policy_on(model, config_of(loss_feedback=True, grad_weight=0.01), probe=probe) as policy:
        for step in range(3):
            run_step(policy, model, None, step)
        with pytest.raises(RuntimeError, match="no memory"):
            policy.begin_step(3)
        run_step(policy, model, None, 3)
        assert calls == ["bfloat16", "int8_row", "int8_row"]
        assert set(policy.applied.values()) == {"int8"}
        assert policy.state.trial is None


def test_an_earlier_state_is_loaded_in_the_same_process():
    model = adapted()
    still = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.0)
    with policy_on(model, config_of()) as policy:
        run_step(policy, model, still, 0)
        saved = policy.state_dict()
        hints = [run_step(policy, model, still, step)[0] for step in (1, 2)]
        policy.load_state_dict(saved)
        assert [run_step(policy, model, still, step)[0] for step in (1, 2)] == hints


def test_a_probe_that_is_not_finite_calls_the_switch_off(caplog):
    model = adapted()
    config = config_of(loss_feedback=True, grad_weight=0.01)
    with policy_on(model, config, probe=lambda: float("nan")) as policy:
        for step in range(4):
            run_step(policy, model, None, step)
        assert set(policy.applied.values()) == {"bf16"}
        assert "the probe loss is nan" in policy.state.units["layers.0"].reason
    assert "the probe loss is nan" in caplog.text


# ---- conductor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_phases_reach_the_stream(checkpointing, monkeypatch):
    model = adapted()
    model.checkpointing = checkpointing
    pushed = []
    with policy_on(model, config_of(mode="off")) as policy:
        real = policy.stream.set_limits
        monkeypatch.setattr(
            policy.stream,
            "set_limits",
            lambda hints: (pushed.append((policy.conductor.state.phase, hints)), real(hints)),
        )
        for step in range(2):
            run_step(policy, model, None, step)
    phases = [phase for phase, _ in pushed]
    assert set(phases) == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP_END}
    assert phases.index(Phase.BACKWARD) < phases.index(Phase.OPTIMIZER)
    last = dict(pushed)
    assert not last[Phase.FORWARD].suppress_speculative
    assert last[Phase.OPTIMIZER].suppress_speculative
    assert last[Phase.OPTIMIZER].max_inflight_h2d == 1
    assert last[Phase.STEP_END].block_precision_map == dict.fromkeys(BLOCKS, "bf16")


def test_memory_pressure_in_backward_shows_in_the_streams_telemetry(tmp_path):
    model = adapted()
    base = RuntimeLimitHints(3, 4, 3)
    bridge = HeuristicPolicyBridge(base, vram_pressure_above=0.0001)
    device = SimulatedDevice(capacity_bytes=2_000_000)
    options = {"device": device, "telemetry": tmp_path / "steps.jsonl"}
    with policy_on(model, config_of(mode="off"), stream_options=options, bridge=bridge) as policy:
        run_step(policy, model, None, 0)
        run_step(policy, model, None, 1)
    line = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[0])
    assert line["limits"]["prefetch_window_cap"] == 1
    assert line["limits"]["suppress_speculative"] is True
    assert any("backward: memory" in reason for reason in line["limits"]["reasons"])


def test_a_step_that_breaks_off_is_begun_again():
    model = adapted()
    with policy_on(model, config_of()) as policy:
        run_step(policy, model, None, 0)
        policy.begin_step(1)
        model(batch(1))
        hints, _ = run_step(policy, model, None, 2)
        assert set(hints) == set(BLOCKS)
        policy.state_dict()
        assert [stats.step_id for stats in policy.state.history] == [0, 2]


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_calls_out_of_order():
    with policy_on(adapted(), config_of()) as policy:
        for call in (policy.collect_block_grad_stats, lambda: policy.compute_hints(0), policy.end_step):
            with pytest.raises(SelectiveError, match="no step is open; call begin_step"):
                call()
        policy.begin_step(0)
        with pytest.raises(SelectiveError, match="step 0 is open, got step 1"):
            policy.compute_hints(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"force_bf16_blocks": ("layer.2",)}, r"names 'layer\.2', no block of the model; did you mean 'layers\.2'"),
        ({"force_bf16_blocks": ("layers.2.up",)}, r"names 'layers\.2\.up', no block of the model"),
        ({"loss_feedback": True}, "loss_feedback needs a probe"),
        ({"int8_format": "int8_nothing"}, "int8_format"),
    ],
)
def test_refusals(options, message):
    model = adapted()
    with streaming(model) as stream, pytest.raises(SelectiveError, match=message):
        SelectivePrecisionPolicy(stream, config_of(**options))


def test_a_format_that_does_not_fit_is_refused_before_training():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)))
    model[1].requires_grad_(False)
    with (
        streaming(model, blocks="1") as stream,
        pytest.raises(SelectiveError, match=r"int8_g128 does not fit.*1\.0\.weight"),
    ):
        SelectivePrecisionPolicy(stream, config_of(int8_format="int8_g128"))


def test_a_stream_without_gradients_has_no_dynamic_mode():
    model = adapted()
    with streaming(model, train="nothing") as stream:
        with pytest.raises(SelectiveError, match="this stream trains nothing"):
            SelectivePrecisionPolicy(stream, config_of())
        SelectivePrecisionPolicy(stream, config_of(mode="static")).close()


def test_a_telemetry_file_that_cannot_be_written_is_an_error_before_training(tmp_path):
    config = config_of(telemetry_enabled=True, telemetry_file="no/such/folder.jsonl")
    with streaming(adapted()) as stream, pytest.raises(TelemetryError, match="cannot be written"):
        SelectivePrecisionPolicy(stream, config, folder=tmp_path)


def test_missing_and_broken_gradients_are_excluded_counted_and_said(caplog):
    model = adapted()
    for one in model.layers[1].parameters():
        one.requires_grad_(False)
    model.layers[1].up.down.weight.requires_grad_(True)
    config = config_of(update_interval_steps=1, warmup_steps=1, grad_weight=0.01)
    with policy_on(model, config) as policy, caplog.at_level(logging.WARNING, "bitplan"):
        for step in range(4):
            policy.begin_step(step)
            model(batch(step)).square().mean().backward()
            model.layers[1].up.down.weight.grad = None
            model.layers[3].up.down.weight.grad[0, 0] = float("nan")
            policy.collect_block_grad_stats()
            policy.compute_hints(step)
            policy.end_step()
        units = policy.state.units
        assert units["layers.1"].excluded == {"missing": 3}
        assert units["layers.3"].excluded == {"non_finite": 3}
        assert "no usable gradient in the last 3 steps (3 missing): no score, no change" in units["layers.1"].reason
        assert policy.precisions == dict.fromkeys(BLOCKS, "int8") | {"layers.1": "bf16", "layers.3": "bf16"}
        assert policy.metrics.block_details["layers.3"]["excluded"] == {"non_finite": 3}
    assert "gradients of layers.3 are left out, not taken for zero: 1 non_finite" in caplog.text


def test_a_calibration_of_other_formats_is_refused():
    model = adapted()
    with (
        streaming(model) as stream,
        pytest.raises(SelectiveError, match=r"no error of 'layers\.0' \(6 units\) in int8_row"),
    ):
        SelectivePrecisionPolicy(stream, config_of(), calibration=CalibrationResult({}, {}))


def test_layers_find_their_adapters():
    model = adapted()
    with policy_on(model, config_of(granularity="layer")) as policy:
        adapters = policy.units.adapters()
        assert len(adapters["layers.0.up.base"]) == 2
        assert adapters["layers.0.down"] == []
        assert policy.units.names[:2] == ["layers.0.up.base", "layers.0.down"]


def test_scalars():
    model = adapted()
    with policy_on(model, config_of(mode="static", force_int8_blocks=("layers.0", "layers.1"))) as policy:
        policy.begin_step(0)
        result = policy.scalars()
        policy.end_step()
        assert result["selective_precision/share_int8"] == pytest.approx(2 / 6)
        assert result["selective_precision/bytes_saved"] > 0
        policy.stream.synchronize()  # what was fetched ahead is on its way when a step without a forward ends
        sent = sum(policy.stream.stats.last.bytes_h2d_by_format.values())
        assert result["selective_precision/bytes_sent"] >= sent
