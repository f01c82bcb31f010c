"""Selective precision on a GPU: no host synchronisation in a step, and the same decisions from the same numbers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from bitplan.streaming.selective.calibration import run_calibration
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy
from bitplan.streaming.training.adamw import AdamWSettings
from tests.streaming.stream_samples import COUNT, batch, make_stack, streaming

pytestmark = pytest.mark.gpu


def config_of(**options):
    base = {"telemetry_enabled": False, "warmup_steps": 2, "update_interval_steps": 2, "min_steps_between_switches": 2}
    return SelectivePrecisionConfig(**{**base, **options})


def adapted():
    model = make_stack(adapters=True, dtype=torch.bfloat16)
    for layer in model.layers:
        nn.init.normal_(layer.up.up.weight, std=0.02)
    return model


def run_step(policy, model, step):
    policy.begin_step(step)
    model(batch(step, torch.bfloat16, "cuda")).float().square().mean().backward()
    policy.collect_block_grad_stats()
    hints = policy.compute_hints(step)
    model.zero_grad()
    policy.end_step()
    return hints


@pytest.mark.parametrize("train", ["adapters", "weights"])
@pytest.mark.parametrize("scoring", ["gradient", "impact"])
def test_no_host_synchronisation_in_a_step(scoring, train):
    model = adapted() if train == "adapters" else make_stack(adapters=False, dtype=torch.bfloat16)
    options = {"train": train, **({"optimizer": AdamWSettings(lr=1e-5)} if train == "weights" else {})}
    config = config_of(scoring=scoring, granularity="layer", damage_budget=10.0)
    with streaming(model, "cuda", **options) as stream, SelectivePrecisionPolicy(stream, config) as policy:
        for step in range(10):  # compiles kernels, and everything is low at the end
            run_step(policy, model, step)
        for step in range(10, 14):  # measured and not, update and not
            policy.begin_step(step)
            x = batch(step, torch.bfloat16, "cuda")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
            try:
                model(x).float().square().mean().backward()
                policy.collect_block_grad_stats()
                policy.compute_hints(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            model.zero_grad()
            policy.end_step()
        if scoring == "impact":
            assert "bf16" not in policy.precisions.values()


def test_impacts_are_those_of_the_simulated_device():
    result = []
    for device in ("cuda", "cpu"):
        model = adapted().float()  # in bfloat16 rounding is as large as the smaller impacts
        config = config_of(scoring="impact", granularity="layer", impact_tokens=0, damage_budget=1e-30)
        where = device if device == "cuda" else None
        with streaming(model, where) as stream, SelectivePrecisionPolicy(stream, config) as policy:
            for step in range(2):
                policy.begin_step(step)
                model(batch(step, torch.float32, device)).float().square().mean().backward()
                policy.collect_block_grad_stats()
                policy.compute_hints(step)
                policy.end_step()
                model.zero_grad()
            policy.state_dict()
            result.append({name: row["int8"] for name, row in policy.state.history[-1].impacts.items()})
    assert len(result[0]) == 2 * COUNT
    largest = max(map(abs, result[1].values()))
    for name, impact in result[1].items():
        assert result[0][name] == pytest.approx(impact, rel=0.02, abs=0.02 * largest)


def test_calibration_on_the_gpu():
    model = adapted()
    with streaming(model, "cuda") as stream:
        result = run_calibration(stream, [batch(0, torch.bfloat16)], progress=False)
    for row in result.blocks.values():
        assert 0 < row["int8_row"] < 0.05
        assert 0 < row["fp8_e4m3_row"] < 0.1
