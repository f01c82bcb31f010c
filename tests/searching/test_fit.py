"""Weights, keys and values in one solution: bytes that add up, damage that was measured, and a plan that runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import bitplan
from bitplan.files.engines.targets import Engine
from bitplan.packed.kv_rows import room_at
from bitplan.packed.language.perplexity import Quality
from bitplan.packed.products.fused_weights import arrange_scales
from bitplan.packed.quant_experts import QuantExperts
from bitplan.packed.rounded_inputs import shown_inputs
from bitplan.plan.kv_formats import KVFormats
from bitplan.searching import fit, memory_probe
from bitplan.searching.engine_memory import ENGINES
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.fit import KV_EVIDENCE, FitGoal, joint_evidence, plan_fit
from bitplan.searching.goal import EvidenceFileError, Goal, GoalError, SearchError, parse_tokens
from bitplan.searching.memory_probe import MemoryProbe, Reserve, _measure, probe_memory
from bitplan.searching.plan_meter import hurt_kind, kl_by_kind
from bitplan.searching.runtime_formats import TARGETS
from bitplan.searching.solver import solve
from tests.searching.tiny_mixtral import rounding_to_nearest

FORMATS = ("mxfp4", "int8_row", "bfloat16")
RESERVED, MEMORY = 1_000_000, 1_300_000
CONTEXT = 1024


def tiny_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


def tokens(windows=20):
    return list(torch.randint(96, (windows, 32), generator=torch.Generator().manual_seed(1)))


def fake_probe(_model, context, batch, device="cpu", **_options):
    return MemoryProbe(context, batch, device, RESERVED + context * batch)


@pytest.fixture(scope="module", autouse=True)
def measured_elsewhere():
    with rounding_to_nearest(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_probe, "probe_memory", fake_probe)
        yield


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("fit"), tiny_llama()
    result = bitplan.fit(model, tokens(), goal=FitGoal(MEMORY, CONTEXT), formats=FORMATS, out=folder)
    return model, folder, result


def test_the_parts_of_the_memory_add_up_and_the_plan_names_every_part(fitted):
    _, folder, result = fitted
    assert result.needed <= result.goal.memory
    assert result.needed == result.row.weights + result.row.kv + RESERVED + CONTEXT
    assert result.row.kv == sum(result.kv.nbytes(layer, (CONTEXT, CONTEXT), (32, 32), 4) for layer in range(3))
    plan = bitplan.Plan.load(folder / "plan.json")
    kinds = {name: entry.kind for name, entry in plan.entries.items()}
    known = KVFormats.of_plan(plan)
    assert known is not None
    assert [known.of_layer(layer) for layer in range(3)] == [result.kv.of_layer(layer) for layer in range(3)]
    packed = [name for name, kind in kinds.items() if kind == "weight" and plan.entries[name].stored is None]
    assert packed
    assert json.loads((folder / "fit.json").read_text())["kv_cache"] == result.kv.to_document()


def test_no_fixed_format_of_keys_and_values_is_better_within_the_memory(fitted):
    _, _, result = fitted
    measured = {row.label: row.kl for row in result.rows}
    assert result.row.kl == min(measured.values())
    assert "K and V in 8 bits" in measured
    assert 0 <= result.solution.gap <= 1e-6


def test_the_measured_distance_is_that_of_the_model_run_so(fitted):
    model, _, result = fitted
    ids = torch.stack(tokens()[-5:])
    with torch.no_grad():
        before = model(ids, use_cache=False).logits.double().log_softmax(-1)
        twin = tiny_llama()
        bitplan.apply_plan(twin, result.plan, unsupported="skip")
        after = twin(ids, use_cache=False).logits.double().log_softmax(-1)
    kl = float((before.exp() * (before - after))[:, :-1].sum(-1).mean())
    assert kl == pytest.approx(result.row.kl, rel=0.05)


def test_damage_of_a_layers_keys_grows_as_formats_get_coarser(fitted):
    _, folder, _ = fitted
    kv = SearchEvidence.load(folder / KV_EVIDENCE)
    assert [*kv.groups] == [f"layers.{layer}.{part}" for layer in range(3) for part in ("keys", "values")]
    for group in kv.groups.values():
        nats = {fmt: group.nats(fmt) for fmt in ENGINES["bitplan"].formats}
        assert 0 < nats["int8_row"] < nats["fp8_e4m3_row"] < nats["int4_g32"]
        assert group.formats["int4_g32"].nbytes == 18
        assert group.formats["float32"].predicted == 0.0


def test_evidence_answers_for_other_memories_and_contexts_at_once(fitted):
    _, folder, result = fitted
    again = plan_fit(folder, result.goal)
    assert again.plan == result.plan
    longer = bitplan.fit("unused", goal=FitGoal(MEMORY, 2 * CONTEXT), out=folder, plan_only=True)
    assert longer.needed <= MEMORY
    assert longer.row.kv / (2 * CONTEXT) < result.row.kv / CONTEXT
    assert longer.row.predicted >= again.row.predicted
    (folder / "other").mkdir()
    (folder / "other" / "evidence.json").write_text((folder / "evidence.json").read_text())
    with pytest.raises(EvidenceFileError, match=r"no kv_evidence\.json"):
        plan_fit(folder / "other", result.goal)


def test_too_little_memory_says_the_smallest_and_too_much_that_nothing_is_needed(fitted):
    _, folder, result = fitted
    with pytest.raises(GoalError, match=r"1,050,000 bytes are too few .* the smallest plan takes ([0-9,]+),") as said:
        plan_fit(folder, replace(result.goal, memory=1_050_000))
    smallest = int(str(said.value).split("takes ")[1].split(", of")[0].replace(",", ""))
    assert plan_fit(folder, replace(result.goal, memory=smallest)).needed == smallest
    with pytest.raises(GoalError):
        plan_fit(folder, replace(result.goal, memory=smallest - 1))
    with pytest.raises(GoalError, match="the model fits as it is"):
        bitplan.fit(tiny_llama(), tokens(), goal=FitGoal(10**9, CONTEXT), formats=FORMATS, out=folder)


def test_a_model_without_keys_and_values_is_refused():
    sizes = {"vocab_size": 96, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 1}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    with pytest.raises(SearchError, match="MambaForCausalLM keeps states of one size and no keys and values"):
        bitplan.fit(model, tokens(), goal=FitGoal(MEMORY, CONTEXT))


def test_little_memory_lets_a_fit_try_vectors_unless_formats_were_given(monkeypatch):
    """What weights may take is what keys and values in 8 bits leave: 36 bytes a row, two of them in three layers."""
    model = tiny_llama()
    numbers, beside = sum(parameter.numel() for parameter in model.parameters()), RESERVED + 7 * CONTEXT
    in_kv, tried = 3 * 2 * 36 * CONTEXT, []

    def collect(searcher, _goal):
        tried.append(tuple(searcher.formats))
        raise GoalError("far enough")

    monkeypatch.setattr(memory_probe, "probe_memory", lambda *args: replace(fake_probe(*args), nbytes=beside))
    monkeypatch.setattr(fit.Searcher, "collect", collect)
    for bits, asked in ((4.6, None), (4.4, None), (4.4, FORMATS)):
        memory = beside + in_kv + int(bits * numbers / 8)
        with pytest.raises(GoalError, match="far enough"):
            bitplan.fit(model, tokens(), goal=FitGoal(memory, CONTEXT), formats=asked)
    usual = TARGETS["bitplan"].formats
    assert tried == [usual, ("iq3_s_gguf", *usual), FORMATS]


def test_a_stopped_fit_goes_on_with_what_was_measured(fitted, monkeypatch):
    model, folder, result = fitted
    monkeypatch.setattr(fit, "gather_kv", None)  # would be called where nothing is known
    again = bitplan.fit(model, tokens(), goal=FitGoal(MEMORY, CONTEXT), formats=FORMATS, out=folder)
    assert dict(again.row.choice) == dict(result.row.choice)
    assert again.plan == result.plan


def test_a_finished_fit_run_again_and_asked_again_gives_the_same_plan_and_what_was_measured(fitted, monkeypatch):
    """Though the memory beside weights differs between runs, and other goals were fitted in between."""
    model, folder, result = fitted
    files = {name: (folder / name).read_bytes() for name in ("plan.json", "fit.json", "memory.json")}
    larger = {"goal": FitGoal(MEMORY + 20_000, CONTEXT), "formats": FORMATS, "out": folder}
    other = bitplan.fit(model, tokens(), **larger)
    monkeypatch.setattr(memory_probe, "probe_memory", None)  # what was measured is known
    known = plan_fit(folder, result.goal)
    assert known.to_document() == {
        key: value for key, value in json.loads(files["fit.json"]).items() if key not in ("landscape", "earlier")
    }
    assert known.row.kl == result.row.kl
    again = bitplan.fit(model, tokens(), goal=FitGoal(MEMORY, CONTEXT), formats=FORMATS, out=folder)
    assert (folder / "plan.json").read_bytes() == files["plan.json"]
    assert (folder / "memory.json").read_bytes() == files["memory.json"]
    assert again.to_document() == result.to_document()
    assert plan_fit(folder, other.goal).row.kl == other.row.kl
    document = json.loads((folder / "fit.json").read_text())
    document["plan"]["choice"].popitem()
    (folder / "broken").mkdir()
    for name in ("evidence.json", KV_EVIDENCE):
        (folder / "broken" / name).write_bytes((folder / name).read_bytes())
    (folder / "broken" / "fit.json").write_text(json.dumps(document))
    with pytest.raises(EvidenceFileError, match="has not one format of every group"):
        plan_fit(folder / "broken", result.goal)


def test_the_picture_has_the_best_plans_for_memories_and_contexts_around_the_goal(fitted):
    _, _, result = fitted
    at_goal = [each for each in result.landscape if each["memory"] == MEMORY and each["context"] == CONTEXT]
    assert [each["predicted"] for each in at_goal] == [pytest.approx(result.solution.nats, rel=0.02)]
    for one in result.landscape:
        assert one["weights_bytes"] + one["kv_bytes"] + RESERVED + one["context"] <= one["memory"]
        more = [each["predicted"] for each in result.landscape if each["context"] == one["context"]]
        assert more == sorted(more, reverse=True)
    assert len({one["context"] for one in result.landscape}) >= 4


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Fits for the other engines, whose workspace is a formula."""
    found = {}
    for target, fmt in (
        ("llama.cpp", ("q4_0_gguf", "q8_0_gguf", "bfloat16")),
        ("vllm", ("int4_g32", "int8_row", "bfloat16")),
    ):
        goal = FitGoal(10**9, CONTEXT, 1, "cpu", target)
        beside = goal.engine.overhead(tiny_llama().config, goal)
        folder = tmp_path_factory.mktemp("engine")
        memory = beside + 340_000
        found[target] = bitplan.fit(
            tiny_llama(), tokens(), goal=FitGoal(memory, CONTEXT, target=target), formats=fmt, out=folder
        )
        with pytest.raises(EvidenceFileError, match=f"of a fit for {target}, and bitplan is asked for"):
            plan_fit(folder, FitGoal(memory, CONTEXT))
        assert plan_fit(folder, found[target].goal).row.kl == found[target].row.kl
    return found


def test_llama_cpp_has_one_type_for_all_keys_and_one_for_all_values(elsewhere):
    result = elsewhere["llama.cpp"]
    assert set(result.row.choice) >= {"layers.*.keys", "layers.*.values"}
    rows = [ENGINES["llama.cpp"].row_bytes(result.row.choice[f"layers.*.{part}"], 1, 32) for part in ("keys", "values")]
    assert result.row.kv == 3 * CONTEXT * sum(rows)
    types = {"q4_0_gguf": "q4_0", "q8_0_gguf": "q8_0", None: "f16"}
    command = result.goal.engine.command(result.kv, result.goal, result.row.kv, "a model.gguf")
    expected = f"-c 1024 -np 1 -ctk {types[result.kv.keys]} -ctv {types[result.kv.values]} -fa on"
    assert command == f"llama-server -m 'a model.gguf' {expected}"
    assert "q4_0" in command or "q8_0" in command
    assert result.needed <= result.goal.memory
    assert result.to_document()["unproven"].startswith("llama.cpp itself was not run")


def test_vllm_keeps_all_in_fp8_or_as_it_is(elsewhere, monkeypatch):
    result = elsewhere["vllm"]
    fmt = result.row.choice["layers.*.keys and values"]
    assert result.row.kv == 3 * 2 * CONTEXT * 32 * (1 if fmt == "fp8_e4m3_row" else 2)
    command = result.goal.engine.command(result.kv, result.goal, result.row.kv, "out")
    kept = "fp8" if fmt == "fp8_e4m3_row" else "auto"
    assert f"--max-model-len 1024 --max-num-seqs 1 --max-num-batched-tokens 2048 --kv-cache-dtype {kept}" in command
    assert command.endswith(f"--kv-cache-memory-bytes {result.row.kv}")
    with pytest.raises(SearchError, match="q4_k_gguf"):
        bitplan.fit(tiny_llama(), tokens(), goal=FitGoal(10**10, 64, target="vllm"), formats=("q4_k_gguf",))
    monkeypatch.setattr(fit, "get_engine", lambda _name: Engine("vLLM", ("int8_row",), ("int8_row",), {}))
    with pytest.raises(SearchError, match="has no kernel for int8_g64"):
        bitplan.fit(tiny_llama(), tokens(), goal=FitGoal(10**10, 64, target="vllm"), formats=("int8_g64",))
    with pytest.raises(SearchError, match=r"a fit is for one of bitplan, llama\.cpp, vllm, got 'mlx'"):
        FitGoal(10**9, 64, target="mlx")


def test_what_engines_take_beside_weights_is_by_their_formula():
    config = transformers.LlamaConfig(vocab_size=128_256, hidden_size=4096, intermediate_size=14336)
    goal = FitGoal(10**10, 2048, target="llama.cpp")
    # llama.cpp's logs of this shape say 258.5 MiB on a GPU, and 12 on the host.
    assert goal.engine.overhead(config, goal) - 300_000_000 == pytest.approx((258.5 + 12) * 2**20, rel=0.02)
    assert goal.engine.tokens(1024, goal) == 1536
    assert goal.engine.tokens(None, replace(goal, context=1000, batch=3)) == 3 * 1024
    vllm = FitGoal(10**10, 8192, 2, target="vllm")
    assert vllm.engine.overhead(config, vllm) == 2 * 2048 * (3 * 14336 + 6 * 4096) + 24 * 128_256 + 1_500_000_000


def test_a_window_counts_no_more_than_its_tokens_and_texts_at_once_count_each(fitted):
    _, folder, _ = fitted
    weights, kv = SearchEvidence.load(folder / "evidence.json"), SearchEvidence.load(folder / KV_EVIDENCE)
    kv = replace(kv, text={"windows": {"1": 100}})
    joint = joint_evidence(weights, kv, FitGoal(10**7, 1000, 3), 0)
    assert joint.groups["layers.0.keys"].formats["int4_g32"].nbytes == 3 * 1000 * 18
    assert joint.groups["layers.1.keys"].formats["int4_g32"].nbytes == 3 * 100 * 18
    assert joint.groups["layers.1.values"].formats["float32"].nbytes == 3 * 100 * 32 * 4
    # On a CPU what is not packed is float32, however it is stored.
    name = next(name for name in weights.groups if "embed" in name)
    assert joint.groups[name].formats["bfloat16"].nbytes == 4 * weights.groups[name].numbers
    assert solve(joint, Goal(nbytes=10**7)).nbytes <= 10**7


def test_on_a_gpu_rooms_of_caches_and_scales_in_a_kernels_order_count(fitted):
    _, folder, _ = fitted
    weights, kv = SearchEvidence.load(folder / "evidence.json"), SearchEvidence.load(folder / KV_EVIDENCE)
    goal = FitGoal(10**7, 4096, 2, "cuda")
    joint = joint_evidence(weights, kv, goal, 0)
    costs = joint.groups["layers.0.keys"].formats
    assert room_at(4096, 512) == 4096 + 256 == room_at(4300, 512)
    assert room_at(30, 512) == 320
    assert costs["int4_g32"].nbytes == 2 * (4096 + 256) * 18
    assert costs["float32"].nbytes == 2 * 4096 * 32 * 4
    windows = joint_evidence(weights, replace(kv, text={"windows": {"0": 100}}), goal, 0)
    assert windows.groups["layers.0.keys"].formats["int4_g32"].nbytes == 2 * 100 * 18
    name = next(name for name in weights.groups if "down" in name)
    (shape, _), *_ = weights.groups[name].tensors.values()
    before, after = weights.groups[name].formats, joint.groups[name].formats
    assert after["bfloat16"].nbytes == before["bfloat16"].nbytes
    arranged = arrange_scales(bitplan.encode(torch.randn(shape), "mxfp4"))
    held = arranged.scales.nbytes + arranged.counters.nbytes
    assert after["mxfp4"].nbytes - before["mxfp4"].nbytes == held


def test_the_probe_counts_what_is_neither_weights_nor_cache():
    config = tiny_llama().config.to_dict()
    small = _measure(config, "llama", 64, 1, "cpu")
    more_logits = _measure(config | {"vocab_size": 10**8}, "llama", 64, 1, "cpu")
    assert 10**7 < small["nbytes"] < 10**10
    assert more_logits["nbytes"] - small["nbytes"] > 10**9 - 10**8


def test_the_probe_is_told_where_the_model_came_from_for_its_tokenizer(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(
        memory_probe, "probe_memory", lambda *given, **more: told.append(more.get("source")) or fake_probe(*given)
    )
    goal = FitGoal(10**9, 64)
    for reserve in (Reserve("folder", goal), Reserve(tiny_llama(), goal, source=tmp_path), Reserve(tiny_llama(), goal)):
        assert reserve.at(64).nbytes == RESERVED + 64
    assert told == [Path("folder"), tmp_path, None]
    assert memory_probe._tokenizer(str(tmp_path)) is None


def test_the_probe_has_all_layers_of_a_small_model_and_few_of_a_large_one():
    config = tiny_llama().config
    assert memory_probe._probed_layers(config.to_dict(), "llama") == 3
    config.hidden_size, config.intermediate_size = 4096, 14336
    assert memory_probe._probed_layers(config.to_dict(), "llama") == memory_probe.LAYERS == 2


def test_a_context_beyond_the_models_positions_is_refused():
    model = tiny_llama()
    with pytest.raises(GoalError, match="texts of 4,096 tokens or fewer, got a context of 4,097") as refused:
        probe_memory(model, 4097, 1)  # the fixture's stands in memory_probe, not here
    assert refused.value.settings == {"context": 4096}
    engine = Reserve(model, FitGoal(10**9, 4097, target="llama.cpp"))
    with pytest.raises(GoalError, match="4,097"):
        engine.at(4097)
    assert Reserve(model, FitGoal(10**9, 4096, target="llama.cpp")).estimate(8192) > 0  # of the picture around a goal


def test_a_probe_that_takes_too_long_says_what_to_do(monkeypatch):
    monkeypatch.setattr(memory_probe, "PROBE_S", 0.01)
    with pytest.raises(SearchError, match=r"4,096 tokens of context and a batch of 3; ask for a shorter context"):
        probe_memory(tiny_llama(), 4096, 3)


@pytest.mark.parametrize(
    ("tokens", "most", "pieces"),
    [
        (2047, 4, [(0, 511), (511, 512), (1023, 512), (1535, 512)]),
        (2047, 1, [(1535, 512)]),
        (8191, 4, [(1535, 512), (3583, 512), (5631, 512), (7679, 512)]),
        (700, 4, [(0, 350), (350, 350)]),
        (1, 4, [(0, 1)]),
    ],
)
def test_the_probe_reads_pieces_of_a_growing_context(tokens, most, pieces):
    assert memory_probe._pieces_read(tokens, 512, most) == pieces


def test_the_probe_of_a_mixture_takes_inputs_as_packed_experts_do():
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_hidden_layers=2,
    )
    cpu = torch.device("cpu")
    model = memory_probe._small_model(config.to_dict(), "mixtral", cpu, 2, "int8_row")
    assert any(isinstance(layer, QuantExperts) for layer in model.modules())
    assert shown_inputs(model) is None
    dense = memory_probe._small_model(tiny_llama().config.to_dict(), "llama", cpu, 2, "int8_row")
    assert shown_inputs(dense) is not None


@pytest.mark.parametrize(("text", "count"), [("32k", 32768), ("1M", 2**20), ("8192", 8192), (" 2 k", 2048)])
def test_tokens_are_read_as_people_write_them(text, count):
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "32kb", "-1", "1", "1.5k", "many"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(GoalError, match="such as 8192 or 32k"):
        parse_tokens(text)


def test_what_cannot_be_fitted_is_refused_before_work():
    small = {"goal": {"memory": 10**7, "context": 64}, "formats": FORMATS}
    with pytest.raises(SearchError, match="give a model of transformers"):
        bitplan.fit(torch.nn.Sequential(torch.nn.Embedding(96, 64), torch.nn.Linear(64, 96)), tokens(), **small)
    with pytest.raises(GoalError, match="above 0"):
        bitplan.fit(tiny_llama(), tokens(), goal=FitGoal(0, 64))


def test_distances_by_kind_of_text_and_a_warning_where_one_is_hurt_twice_as_much():
    quality = Quality(40, 4, None, None, {"kl": [1.0, 1.0, 3.0, 6.0], "tokens": [10, 10, 10, 20]})
    kinds = ("wiki.txt", "wiki.txt", "code.txt", "code.txt")
    distances = kl_by_kind(quality, kinds)
    assert distances == {"wiki.txt": 0.1, "code.txt": 0.3}
    assert str(hurt_kind(distances)).startswith("code.txt is hurt 3.0 times as much as wiki.txt (KL 0.3 and 0.1)")
    assert hurt_kind({"wiki.txt": 0.1, "code.txt": 0.19}) is None
    assert kl_by_kind(quality, ()) == {}
    assert hurt_kind({}) is None
