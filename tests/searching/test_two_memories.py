"""Formats and places in one problem: both memories hold, no choice is better, and the time is what was measured."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

import bitplan
from bitplan.searching import memory_probe
from bitplan.searching.evidence import FormatCost, SearchEvidence, TensorGroup, in_host, is_in_host, weight_format
from bitplan.searching.fit import FitGoal, joint_evidence, plan_fit
from bitplan.searching.goal import EvidenceFileError, Goal, GoalError
from bitplan.searching.memory_probe import (
    MemoryProbe,
    Reserve,
    TokenTimes,
    _filled,
    _launched_in_turns,
    _measure_times,
    _small_model,
)
from bitplan.searching.solver import solve
from bitplan.searching.two_memories import (
    best_split,
    crossing_first,
    place_goal,
    scale_bytes,
    with_places,
    with_workspace,
)
from tests.searching.test_fit import CONTEXT, FORMATS, MEMORY, RESERVED, tiny_llama, tokens
from tests.searching.tiny_mixtral import rounding_to_nearest

TIMES = TokenTimes(gpu_rate=4000.0, bus_rate=50.0, crossing=2.0, rest=100.0, launch=500.0)
COSTS = {"bfloat16": (2.0, 0.0), "int8_row": (1.0, 0.01), "mxfp4": (0.5, 0.1)}
NUMBERS = 64 * 64


def drawn(layers=4):
    """Groups of one shape with damages of their own, an embedding and a head."""
    draw = torch.Generator().manual_seed(0)
    names = ["model.embed_tokens", *(f"model.layers.{n}.mlp.down_proj" for n in range(layers)), "lm_head"]
    groups = {}
    for name in names:
        role = "mlp_weight" if "mlp" in name else "embed"
        worse = 0.5 + float(torch.rand((), generator=draw))
        formats = {f: FormatCost(int(size * NUMBERS), worse * nats) for f, (size, nats) in COSTS.items()}
        groups[name] = TensorGroup({f"{name}.weight": ((64, 64), role)}, formats)
    return SearchEvidence("drawn", NUMBERS * len(names), {}, {}, {}, groups, 2 * NUMBERS * len(names))


def test_the_solution_is_the_best_of_all_choices_within_both_memories_and_the_time():
    goal = FitGoal(3 * NUMBERS // 2, 64, ram=2 * NUMBERS, ms=1.0)
    placed = with_places(drawn(2), TIMES, goal)
    limit = Goal(nbytes=goal.memory, host=goal.ram, us=60.0)
    found = solve(placed, limit)
    names, best = list(placed.groups), float("inf")
    for formats in itertools.product(*(placed.groups[name].formats for name in names)):
        choice = dict(zip(names, formats, strict=True))
        if (
            placed.nbytes(choice) <= goal.memory
            and placed.host_bytes(choice) <= goal.ram
            and placed.microseconds(choice, 1) <= limit.us
        ):
            best = min(best, placed.predict(choice))
    assert found.nats == pytest.approx(best)
    assert found.us <= limit.us
    assert any(map(is_in_host, found.choice.values()))


def test_an_embedding_waits_in_the_host_for_nothing_and_a_head_does_not():
    placed = with_places(drawn(), TIMES, FitGoal(NUMBERS, 64, ram=10 * NUMBERS))
    times = {name: placed.groups[name].formats["mxfp4@host"].us[1] for name in ("model.embed_tokens", "lm_head")}
    assert times == {"model.embed_tokens": 0.0, "lm_head": pytest.approx(2.0 + NUMBERS / 2 / 50)}
    assert "bfloat16@host" not in placed.groups["lm_head"].formats
    assert placed.groups["lm_head"].formats["int8_row"].us[1] == pytest.approx(NUMBERS / 4000)


def test_of_scales_in_a_kernels_order_an_embedding_has_none():
    evidence, goal = drawn(1), FitGoal(NUMBERS, 64, device="cuda", ram=NUMBERS)
    kv = SearchEvidence("drawn", 0, {}, {"windows": {}}, {}, {}, 0)
    joint = joint_evidence(evidence, kv, goal, 0, MemoryProbe(64, 1, "cuda", 0, TIMES))
    scales = scale_bytes("mxfp4", [(64, 64)], on_gpu=True)
    assert scales > 0
    for name, of_it in (("model.embed_tokens", 0), ("lm_head", scales), ("model.layers.0.mlp.down_proj", scales)):
        costs = joint.groups[name].formats
        assert (costs["mxfp4"].nbytes, costs["mxfp4@host"].nbytes) == (NUMBERS // 2 + of_it, of_it)
        assert costs["mxfp4@host"].host == NUMBERS // 2


def test_less_damage_in_the_same_time_or_less_time_with_the_same_damage_than_one_format_for_all():
    goal = FitGoal(2 * NUMBERS, 64, ram=10 * NUMBERS)
    placed = with_places(drawn(), TIMES, goal)
    limit = place_goal(placed, TIMES, goal, Goal(nbytes=goal.memory))
    split = best_split(placed, "int8_row", limit)
    assert {weight_format(fmt) for fmt in split.choice.values()} == {"int8_row"}
    assert placed.nbytes(split.choice) <= goal.memory < placed.nbytes(split.choice) + placed.host_bytes(split.choice)
    fastest = solve(placed, Goal(nbytes=goal.memory, host=goal.ram, max_kl=split.nats))
    assert fastest.nats <= split.nats
    assert fastest.us <= split.us
    least = solve(placed, Goal(nbytes=goal.memory, host=goal.ram, us=split.us))
    assert least.nats <= split.nats


def test_where_the_usual_format_lies_on_the_gpu_larger_ones_may_use_the_room_that_it_leaves():
    goal = FitGoal(6 * NUMBERS + 100, 64, ram=10 * NUMBERS)
    times = replace(TIMES, launch=0.0)
    placed = with_places(drawn(), times, goal)
    limit = place_goal(placed, times, goal, Goal(nbytes=goal.memory))
    found = solve(placed, limit)
    assert {*best_split(placed, "mxfp4", limit).choice.values()} == {"mxfp4"}
    assert found.nats <= best_split(placed, "int8_row", limit).nats
    assert found.nbytes > 5 * NUMBERS


def test_a_format_that_is_decoded_takes_its_decoding_and_the_numbers_once_more():
    evidence = drawn(1)
    for group in evidence.groups.values():
        group.formats["q8_0_gguf"] = FormatCost(NUMBERS, 0.005)
    decoded = {"q8_0_gguf": [0.0, 2.0, 30.0, 0.5], "mxfp4": [0.0, 2.0, 30.0, 0.5], "int8_row": [0.0, 2.0]}
    goal = FitGoal(NUMBERS, 64, ram=NUMBERS)
    plain, placed = with_places(evidence, TIMES, goal), with_places(evidence, TIMES, goal, decoded)
    for name, group in placed.groups.items():
        more = {fmt: cost.us[1] - plain.groups[name].formats[fmt].us[1] for fmt, cost in group.formats.items()}
        takes = 0.0 if "embed" in name else 30 + NUMBERS * (0.5 + 2 / TIMES.gpu_rate)
        expected = {"q8_0_gguf": takes, "q8_0_gguf@host": takes}  # kernels multiply with the codes of the others
        assert more == pytest.approx(dict.fromkeys(more, 0.0) | expected)


def test_what_crosses_comes_first_among_equal_layers():
    placed = with_places(drawn(), TIMES, FitGoal(NUMBERS, 64, ram=10 * NUMBERS))
    choice = dict.fromkeys(placed.groups, "mxfp4") | {"model.layers.3.mlp.down_proj": in_host("mxfp4")}
    moved = crossing_first(placed, choice)
    assert [name for name in moved if is_in_host(moved[name])] == ["model.layers.0.mlp.down_proj"]
    assert placed.nbytes(moved) == placed.nbytes(choice)
    assert placed.predict(moved) == placed.predict(choice)


def test_of_experts_the_share_is_read_that_tokens_choose():
    name = "model.layers.0.mlp.experts.down_proj"
    group = TensorGroup({name: ((8, 64, 64), "expert")}, {"mxfp4": FormatCost(8 * NUMBERS, 0.1)})
    evidence = replace(drawn(), groups={name: group})
    times = replace(TIMES, chosen=0.25)
    for batch, share in ((1, 0.25), (2, 0.4375)):
        placed = with_places(evidence, times, FitGoal(10, 64, batch, ram=10**6))
        us = placed.groups[name].formats["mxfp4@host"].us[batch]
        assert us == pytest.approx(2.0 + share * 8 * NUMBERS / 50)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (Goal(nbytes=NUMBERS, host=NUMBERS), r"no plan lies in 4,096 bytes on the GPU and 4,096 on the host; .* takes"),
        (Goal(nbytes=NUMBERS, host=10**6, us=1.0), r"the fastest in these memories takes 0\.\d+"),
        (Goal(nbytes=NUMBERS, host=10**6, max_kl=1e-9), "in these memories has a KL of 1e-09"),
    ],
)
def test_what_no_plan_reaches_says_what_one_does(limit, said):
    placed = with_places(drawn(), TIMES, FitGoal(NUMBERS, 64, ram=NUMBERS))
    with pytest.raises(GoalError, match=said):
        solve(placed, limit)


DECODED = {"int8_row": [0.0, 2.0], "mxfp4": [0.0, 2.0], "q8_0_gguf": [1.0 * NUMBERS, 5.0]}


def test_the_largest_workspace_of_a_choice_counts_once():
    """A head that is decoded as a whole takes more while it runs than layers of a few formats do."""
    probe = MemoryProbe(64, 1, "cuda", 3 * NUMBERS, None, NUMBERS, DECODED)
    evidence = drawn(2)
    for group in evidence.groups.values():
        group.formats["q8_0_gguf"] = FormatCost(NUMBERS, 0.005)
    joint = with_workspace(evidence, probe)
    own = {name: {fmt: cost.workspace for fmt, cost in group.formats.items()} for name, group in joint.groups.items()}
    assert own["model.layers.0.mlp.down_proj"] == {"bfloat16": 0, "int8_row": 0, "mxfp4": 0, "q8_0_gguf": 4 * NUMBERS}
    assert own["lm_head"] == {"bfloat16": 0, "int8_row": 0, "mxfp4": 0, "q8_0_gguf": 4 * NUMBERS}
    assert set(own["model.embed_tokens"].values()) == {0}
    names = list(joint.groups)
    for limit in (4 * NUMBERS, 6 * NUMBERS, 7 * NUMBERS):
        found = solve(joint, Goal(nbytes=limit))
        best = float("inf")
        for formats in itertools.product(*(joint.groups[name].formats for name in names)):
            choice = dict(zip(names, formats, strict=True))
            held = sum(joint.groups[name].formats[fmt].nbytes for name, fmt in choice.items())
            if held + max(own[name][fmt] for name, fmt in choice.items()) <= limit:
                best = min(best, joint.predict(choice))
        assert found.nats == pytest.approx(best)
        assert found.nbytes <= limit
        smallest = solve(joint, Goal(max_kl=found.nats * 1.0001))
        assert smallest.nbytes <= found.nbytes


def test_goals_that_contradict_each_other_are_refused():
    with pytest.raises(GoalError, match="run in bitplan, and this is for vllm"):
        FitGoal(10**9, 64, target="vllm", ram=10**9)
    with pytest.raises(GoalError, match="a goal beside the host's memory"):
        FitGoal(10**9, 64, ms=5.0)
    placed = with_places(drawn(), TIMES, FitGoal(NUMBERS, 64, ram=NUMBERS))
    with pytest.raises(GoalError, match=r"takes 0\.50 ms beside products"):
        place_goal(placed, TIMES, FitGoal(NUMBERS, 64, ram=NUMBERS, ms=0.2), Goal(nbytes=NUMBERS))


def fake_probe(_model, context, batch, device="cpu", *, timed=False, **_options):
    return MemoryProbe(context, batch, device, RESERVED + context * batch, TIMES if timed else None)


def test_a_fit_for_two_memories_is_proven_kept_and_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_probe, "probe_memory", fake_probe)
    goal = FitGoal(MEMORY - 150_000, CONTEXT, ram=400_000)
    with rounding_to_nearest():
        result = bitplan.fit(tiny_llama(), tokens(), goal=goal, formats=FORMATS, out=tmp_path)
    assert result.needed <= goal.memory
    assert 0 < result.row.host <= goal.ram
    uniform = [row for row in result.rows if row.label.endswith("for all")]
    assert uniform
    assert result.row.kl <= min(row.kl for row in result.rows if row.ms <= result.row.ms * 1.001)
    plan = bitplan.Plan.load(tmp_path / "plan.json")
    waiting = {name for name, choice in plan.items() if choice.place == "host"}
    assert sum(plan.entries[name].nbytes for name in waiting) == result.row.host
    assert plan == result.plan
    monkeypatch.setattr(memory_probe, "probe_memory", None)  # what was measured is known
    assert plan_fit(tmp_path, goal).plan == plan
    slower = plan_fit(tmp_path, replace(goal, ms=100.0))
    assert slower.row.predicted <= result.row.predicted
    assert json.loads((tmp_path / "memory.json").read_text())["probes"][0]["times"] == TIMES.to_dict()


def test_times_are_measured_with_weights_in_either_memory():
    times = _measure_times(tiny_llama().config.to_dict(), "llama", 64, 1, "cpu")
    assert min(times.gpu_rate, times.bus_rate, times.rest) > 0
    assert times.launch == 0.0
    assert times.chosen == 1.0


def test_launches_are_timed_in_turns():
    """More layers take longer, and each turn is of both models: one that is slow as a whole does not count."""
    config, cpu = tiny_llama().config.to_dict(), torch.device("cpu")
    with torch.inference_mode():
        models = [_small_model(config, "llama", cpu, layers, "int8_row") for layers in (2, 6)]
        few, more = _launched_in_turns(*((model, _filled(model, 1, 8, cpu)) for model in models), 1, cpu)
    assert 0 < more < 20 * few
    assert few > 0


@pytest.mark.parametrize(
    "probe",
    [
        3,
        {},
        {"context": 1},
        {**fake_probe("", 64, 1).to_dict(), "times": {}},
        {**fake_probe("", 64, 1).to_dict(), "decoded": {"mxfp4": [2]}},
        {**fake_probe("", 64, 1).to_dict(), "decoded": {"mxfp4": [2, 2, 2]}},
    ],
)
def test_a_damaged_probe_is_refused_by_its_name(probe, tmp_path):
    document = {"document": "bitplan-memory", "version": 1, "probes": [probe]}
    (tmp_path / "memory.json").write_text(json.dumps(document))
    with pytest.raises(EvidenceFileError, match=r"memory\.json: probes\[0\]"):
        Reserve("unused", FitGoal(10**9, 64, ram=10**9), tmp_path).at(64)
