"""What selective precision and an FP8 policy measured, in the solver's numbers."""

from __future__ import annotations

import json
import math

import pytest

import bitplan
from bitplan.fp8.policy.report import Fingerprint
from bitplan.fp8.policy.rules import LayerRule, Point, Policy
from bitplan.searching import Goal, SearchOptions
from bitplan.searching.goal import EvidenceFileError, GoalError, SearchError
from bitplan.searching.solver import solve
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.score import RawGradStats, compare_blocks
from bitplan.streaming.selective.state import PolicyState, layout_of, observe, save_state
from tests.searching.test_run import tiny_llama, tokens

FORMATS = ("mxfp4", "fp8_e4m3_row", "bfloat16")
BLOCKS = ("model.layers.0", "model.layers.1")


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def save_gradients(path, model, norms, *, extra=()):
    """A state as a run of selective precision saves it, with these norms of gradients."""
    config = SelectivePrecisionConfig()
    state = PolicyState.start(norms)
    stats = compare_blocks(1, {name: RawGradStats(norm, norm, norm) for name, norm in norms.items()})
    rows = {
        block: [
            (name, tuple(parameter.shape), "bfloat16")
            for name, parameter in model.get_submodule(block).named_parameters()
            if parameter.dim() > 1
        ]
        + list(extra)
        for block in norms
    }
    save_state(path, observe(state, stats, config), layout_of(rows), config)
    return path


def searched(model, goal, out=None, **more):
    options = SearchOptions(**more)
    return bitplan.search(model, tokens(8), goal=goal, formats=FORMATS, target="training", out=out, options=options)


def test_gradients_of_training_weigh_the_groups_of_their_blocks(model, tmp_path):
    path = save_gradients(tmp_path / "policy.json", model, dict(zip(BLOCKS, (1.0, 30.0), strict=True)))
    result = searched(model, Goal(bits=7), gradients=path, out=tmp_path / "out")
    groups = result.evidence.groups
    first, second = ([each for name, each in groups.items() if name.startswith(f"{block}.")] for block in BLOCKS)
    assert len({group.weight for group in first}) == len({group.weight for group in second}) == 1
    assert second[0].weight > 10 * first[0].weight
    alone = solve(result.evidence, Goal(bits=7))
    in_second = [fmt for name, fmt in alone.choice.items() if name.startswith(f"{BLOCKS[1]}.")]
    assert "mxfp4" not in in_second
    assert "mxfp4" in alone.choice.values()
    saved = json.loads((tmp_path / "out/evidence.json").read_text())["groups"]
    assert {name: each["weight"] for name, each in saved.items()} == {
        name: each.weight for name, each in groups.items()
    }
    for group in groups.values():
        group.weight = 1.0
    assert math.isclose(result.evidence.harm(alone.choice), result.evidence.predict(alone.choice))


def test_gradients_of_another_model_are_refused_by_name(model, tmp_path):
    norms = dict.fromkeys(BLOCKS, 1.0)
    other = save_gradients(tmp_path / "other.json", model, norms, extra=[("more", (4, 4), "bfloat16")])
    with pytest.raises(EvidenceFileError, match=r"gradients of another model: 'model.layers.0' has 8 parameters"):
        searched(model, Goal(bits=7), gradients=other)
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(EvidenceFileError, match="no state of selective precision"):
        searched(model, Goal(bits=7), gradients=tmp_path / "no.json")
    with pytest.raises(SearchError, match="gradients are of training"):
        bitplan.search(model, tokens(8), goal=Goal(bits=7), formats=FORMATS, options=SearchOptions(gradients=other))


def save_policy(path, shape):
    """FP8 wins twice the speed in down_proj, at 64 tokens."""
    point = Point(64, "win", 2.0, 1.9, 2.1, 20)
    rule = LayerRule(
        part="llm", kind="row", shape=shape, recipe="rowwise", gemm="module", points=(point,), name="fc2", tp=1
    )
    nothing = dict.fromkeys(("gpu", "driver", "torch", "triton", "bitplan", "commit"), "x")
    Policy([rule], Fingerprint(**nothing), 1.0, 0.95).save(path)
    return path


def test_times_of_an_fp8_policy_count_for_fp8_formats(model, tmp_path):
    path = save_policy(tmp_path / "fp8.json", (64, 96))
    result = searched(model, Goal(faster=1.0001, rows=64), fp8_policy=path)
    for name, group in result.evidence.groups.items():
        times = {fmt: cost.us[64] for fmt, cost in group.formats.items()}
        assert times["mxfp4"] == times["bfloat16"] == group.reference_us[64]
        assert times["fp8_e4m3_row"] == group.reference_us[64] / (2 if name.endswith("down_proj") else 1)
    assert "fp8_e4m3_row" in {choice.format for name, choice in result.plan.items() if "down_proj" in name}


def test_speeds_of_training_need_a_policy_of_this_model(model, tmp_path):
    with pytest.raises(GoalError, match=r"needs a policy.*fp8_policy="):
        searched(model, Goal(faster=1.05, rows=64))
    path = save_policy(tmp_path / "fp8.json", (4096, 14336))
    with pytest.raises(EvidenceFileError, match="a policy of another model: it has 4096x14336"):
        searched(model, Goal(faster=1.0001, rows=64), fp8_policy=path)
