"""A policy confirmed at several token counts by a told clock: plan, all FP8 or BF16, and when that is a refusal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bitplan.fp8 import layer_settings
from bitplan.fp8.bench import confirm_policy as fp8_confirm_policy
from bitplan.fp8.bench.confirm_policy import SmallModel, confirm_policy, plan_small_model, require_device
from bitplan.fp8.decide import Fp8Options
from bitplan.fp8.layer_settings import Fp8LayerError, Fp8UnavailableError
from bitplan.fp8.policy.rules import Policy
from bitplan.fp8.policy.vocabulary import FingerprintError, Fp8Error
from tests.fp8.bench.test_confirm_model import FAMILIES, LLAMA, save
from tests.fp8.policy.fp8_samples import H200
from tests.fp8.test_apply import ALL, LAYERS, WINS, SetClock, policy_of

CPU = torch.device("cpu")
LOSES = {64: 0.5, 128: 0.6}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return plan_small_model(save(tmp_path_factory.mktemp("llama"), LLAMA))


@pytest.mark.parametrize(
    ("wins", "times", "taken", "planned", "stored", "turned_down"),
    [
        (LAYERS, {4: 8.0}, "plan", 4, 4, False),
        (LAYERS, {4: 12.0}, "bf16", 4, 0, True),
        (("fc1", "fc2"), {2: 9.0, 4: 7.0}, "all", 2, 4, False),
        (("fc1", "fc2"), {2: 12.0, 4: 8.0}, "all", 2, 4, False),
        (("fc1", "fc2"), {2: 12.0, 4: 12.0}, "bf16", 2, 0, True),
        ((), {4: 8.0}, "all", 0, 4, False),
        ((), {4: 12.0}, "bf16", 0, 0, False),  # BF16 was the plan
    ],
)
def test_what_is_taken(wins, times, taken, planned, stored, turned_down, small, monkeypatch):
    policy = policy_of(**{name: WINS if name in wins else LOSES for name in LAYERS})
    clock = SetClock(times).watch(monkeypatch)
    (result,) = confirm_policy(policy, small, [100], CPU, Fp8Options(stopwatch=clock))
    (block,) = result.blocks
    assert (block.block, block.taken, block.planned, block.fp8_layers, block.layers) == (
        "model.layers.0",
        taken,
        planned,
        stored,
        4,
    )
    assert (block.turned_down, result.turned_down) == (turned_down, turned_down)
    assert block.low <= block.speedup <= block.high
    document = json.loads(json.dumps(result.to_dict()))
    assert document["turned_down"] is turned_down
    assert sum(row["precision"] != "bf16" for row in document["planned"]) == planned
    assert sum(row["precision"] != "bf16" for row in document["layers"]) == stored
    if turned_down:
        assert any(row["reason"].startswith("turned down by confirming") for row in document["layers"])


def test_each_count_by_itself(small, monkeypatch):
    """At 64 tokens all layers win; at 128 the policy has them lose, and so has the clock."""
    falling = {64: 1.3, 128: 0.7}
    policy = policy_of(**dict.fromkeys(LAYERS, falling))
    seen = []
    clock = SetClock(12.0).watch(monkeypatch)
    results = confirm_policy(policy, small, [64, 128], CPU, Fp8Options(stopwatch=clock), on_count=seen.append)
    assert [(result.tokens, result.turned_down) for result in results] == [(64, True), (128, False)]
    assert [result.blocks[0].planned for result in results] == [4, 0]
    assert seen == [64, 128]


def test_every_make_of_block_has_a_result(tmp_path, monkeypatch):
    small = plan_small_model(save(tmp_path, FAMILIES["dense first"][0]))
    clock = SetClock(8.0).watch(monkeypatch)
    (result,) = confirm_policy(policy_of(fc1=WINS, fc2=WINS), small, [128], CPU, Fp8Options(stopwatch=clock))
    assert [block.block for block in result.blocks] == ["model.layers.0", "model.layers.3"]
    assert [block.taken for block in result.blocks] == ["plan", "plan"]  # all FP8 takes as long
    assert all(0 < block.planned == block.fp8_layers < block.layers for block in result.blocks)


def test_a_block_that_cannot_be_fp8_is_said_too(tmp_path):
    document = LLAMA | {"hidden_size": 72, "intermediate_size": 200, "head_dim": 36}
    small = plan_small_model(save(tmp_path, document | {"num_attention_heads": 2}))
    (result,) = confirm_policy(policy_of(**ALL), small, [128], CPU)
    (block,) = result.blocks
    assert (block.answer, block.taken, block.planned, result.turned_down) == ("unmeasured", "bf16", 0, False)
    assert block.reason.startswith("not timed, no layer can be FP8: ")
    assert "is not a multiple of" in block.reason


def test_version_1_with_a_recipe_and_a_size(small, tmp_path, monkeypatch):
    policy = policy_of(**ALL).to_thresholds()
    clock = SetClock(8.0).watch(monkeypatch)
    (result,) = confirm_policy(policy, small, [128], CPU, Fp8Options(stopwatch=clock), recipe="tensorwise")
    assert {row.recipe for row in result.applied.rows} == {"tensorwise"}
    assert any("version 1 does not say on which GPU" in note for note in result.applied.notes)
    shard = plan_small_model(save(tmp_path, LLAMA), tp=2)
    (result,) = confirm_policy(policy, shard, [128], CPU, Fp8Options(tp=2, stopwatch=clock), recipe="tensorwise")
    assert result.blocks[0].planned == 0
    assert "no rule for layernorm_column, qkv, tp 2" in result.planned.rows[0].reason


@pytest.mark.parametrize(("timing", "captured"), [("eager", 0), ("graph", 2)])
def test_timed_as_it_will_run(timing, captured, small, monkeypatch):
    clock = SetClock(8.0).watch(monkeypatch)
    graphs, resets = [], []
    monkeypatch.setattr(clock, "capture", lambda call: graphs.append(call) or call, raising=False)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda call, mode: compiled.append(mode) or call)
    options = Fp8Options(confirm_timing=timing, confirm_compiled=True, stopwatch=clock)
    confirm_policy(policy_of(**ALL), small, [64, 128], CPU, options)
    assert len(graphs) == 2 * captured
    assert compiled == [None] * 4
    assert len(resets) == 2  # a graph of another count would make shapes dynamic


def test_memory_that_runs_out_ends_one_count(small, monkeypatch):
    clock = SetClock(8.0).watch(monkeypatch)
    real = SmallModel.example

    def example(self, tokens, device):
        if tokens == 128:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")
        return real(self, tokens, device)

    monkeypatch.setattr(SmallModel, "example", example)
    results = confirm_policy(policy_of(**ALL), small, [64, 128, 100], CPU, Fp8Options(stopwatch=clock))
    assert [result.turned_down for result in results] == [False, True, False]
    assert results[1].failure == "1 blocks did not fit into memory: CUDA out of memory. Tried to allocate 9 GiB"
    assert json.loads(json.dumps(results[1].to_dict()))["layers"] == []


def test_other_errors_are_raised(small, monkeypatch):
    def example(*_):
        raise RuntimeError("another thing")

    monkeypatch.setattr(SmallModel, "example", example)
    with pytest.raises(RuntimeError, match="another thing"):
        confirm_policy(policy_of(**ALL), small, [64], CPU)


def test_bad_arguments(small):
    for counts in ([], [0], [64, 1.5], [True], [999_999_999_999]):
        with pytest.raises(Fp8Error, match="token counts must be integers from 1"):
            confirm_policy(policy_of(**ALL), small, counts, CPU)
    with pytest.raises(Fp8LayerError, match="recipe must be one of tensorwise"):
        confirm_policy(policy_of(**ALL), small, [64], CPU, recipe="int8")
    with pytest.raises(Fp8Error, match="confirm_timing must be one of eager, graph, got 'cuda'"):
        confirm_policy(policy_of(**ALL), small, [64], CPU, Fp8Options(confirm_timing="cuda"))


def test_the_device(monkeypatch):
    policy = policy_of(**ALL)
    assert require_device("cpu", policy) == CPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Fp8UnavailableError, match="torch sees no CUDA GPU, so there is nothing to confirm"):
        require_device("cuda", policy)
    asked = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(layer_settings, "require_fp8", lambda *given: asked.append(given))
    monkeypatch.setattr(fp8_confirm_policy, "fingerprint_of", lambda _: replace(H200, gpu="NVIDIA B200"))
    with pytest.raises(FingerprintError, match="measured on 'NVIDIA H200', this is 'NVIDIA B200'"):
        require_device("cuda", policy, "mxfp8")
    assert asked == [(torch.device("cuda", 0), ("mxfp8",))]
    assert require_device("cuda", policy.to_thresholds()) == torch.device("cuda", 0)  # version 1 does not say


@pytest.mark.filterwarnings("default")  # an arm whose compiler only warns would count as one that cannot run
@pytest.mark.gpu
def test_gpu_confirm_gives_intervals_and_leaves_no_memory(tmp_path):
    from bitplan.fp8.layer_settings import fp8_obstacle
    from bitplan.fp8.policy.report import fingerprint_of

    device = torch.device("cuda", torch.cuda.current_device())
    if fp8_obstacle(device) is not None:
        pytest.skip("this GPU has no FP8")
    results = policy_of(**ALL)
    policy = Policy(results.rules, fingerprint_of(device), results.speedup_threshold, results.confidence)
    small = plan_small_model(save(tmp_path, LLAMA))
    before = torch.cuda.memory_allocated(device)
    for trial in ({}, {"confirm_timing": "graph"}, {"confirm_timing": "graph", "confirm_compiled": True}):
        for result in confirm_policy(policy, small, [64, 128], require_device("cuda", policy), Fp8Options(**trial)):
            (block,) = result.blocks
            assert block.planned == 4
            assert block.speedup is not None, (trial, block.reason)
            assert block.low <= block.speedup <= block.high
            assert block.fp8_layers == (0 if block.taken == "bf16" else 4)
    assert torch.cuda.memory_allocated(device) - before < 2**20
