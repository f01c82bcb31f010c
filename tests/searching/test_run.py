"""A whole search of a tiny llama: what it writes, that it goes on, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import threading
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace

import pytest
import torch
import transformers

import bitplan
from bitplan import open_tensors, quantize_file
from bitplan.base.errors import MeasureError, StoreError
from bitplan.cli.verbs.search import show_result
from bitplan.files.engines.compressed_tensors import SCHEMES
from bitplan.files.engines.mlx import QUANTIZATIONS
from bitplan.files.engines.targets import FORMATS as EXPORTED
from bitplan.files.engines.targets import ExportRequest, prepare_export
from bitplan.files.gguf_tensors import GGUF_TYPES
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats.dispatch import decode, encode
from bitplan.packed.checkpoints.load import empty_model
from bitplan.plan import Plan
from bitplan.plan.format_choices import choose_formats
from bitplan.report.page import write_report
from bitplan.report.read_records import read_records
from bitplan.rounding.weights import round_weight
from bitplan.searching import Goal, blocks, collect, damage, searched_model
from bitplan.searching import run as runner
from bitplan.searching import statistics as gathered
from bitplan.searching.collect import EVIDENCE
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.explain import explain_plan
from bitplan.searching.goal import EvidenceFileError, GoalError, SearchError
from bitplan.searching.run import SearchOptions
from bitplan.searching.runtime_formats import TARGETS, candidates
from bitplan.searching.searched_model import subject_of
from bitplan.searching.solver import plan_for, solve
from bitplan.searching.statistics import STATISTICS, InputStatistics, add_upper_products, mirror
from tests.searching.tiny_mixtral import rounding_to_nearest

GGUF_CASTS = ("float32", "float16", "bfloat16")
FORMATS = ("mxfp4", "nvfp4", "int8_row", "bfloat16")


def tiny_llama(seed: int = 0, vocab_size: int = 96, layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


def tokens(windows: int = 24) -> list[torch.Tensor]:
    return list(torch.randint(96, (windows, 24), generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module", autouse=True)
def plain_rounding():
    with rounding_to_nearest():
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    model = tiny_llama()
    shown = []

    @contextmanager
    def stage(what, _total):
        shown.append((what, [step.content for step in read_records([folder / "progress.jsonl"])]))
        yield lambda _count, _label: None

    options = SearchOptions(stage=stage)
    result = bitplan.search(model, tokens(), goal={"bits": 7.0}, formats=FORMATS, out=folder, options=options)
    result.shown = shown
    return model, folder, result


def test_steps_are_in_the_folder_while_the_search_goes_on(found):
    _, folder, result = found
    what, ((start, *steps),) = result.shown[-1]
    assert what == "proving"
    assert (start["model"], start["goal"]) == ("a model", "7 bits a weight")
    assert {"statistics", "rounding"} <= {step["phase"] for step in steps}
    assert not (folder / "progress.jsonl").exists()


def test_a_second_search_beside_it_in_the_folder_is_refused_before_it_reads_there(found, tmp_path):
    refused = []

    @contextmanager
    def stage(_what, _total):
        if not refused:  # while the first one works
            with pytest.raises(StoreError, match="another search or fit works there now") as error:
                bitplan.search(tiny_llama(seed=1), tokens(), goal={"bits": 7.0}, formats=FORMATS, out=tmp_path)
            refused.append(error)
        yield lambda _count, _label: None

    _, _, alone = found
    options = SearchOptions(stage=stage)
    result = bitplan.search(tiny_llama(), tokens(), goal={"bits": 7.0}, formats=FORMATS, out=tmp_path, options=options)
    assert refused
    assert result.plan == alone.plan


def test_a_search_writes_a_plan_within_its_goal(found):
    model, folder, result = found
    plan = Plan.load(folder / "plan.json")
    assert plan == result.plan
    assert set(plan) == {name for name, _ in model.named_parameters()}
    assert 8 * plan.nbytes <= 7.0 * sum(parameter.numel() for parameter in model.parameters())
    q, k, v = (plan[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    assert q.format == k.format == v.format
    assert "nats" in q.reason
    assert q.evidence["next better"]["bytes"] > 0
    document = json.loads((folder / "front.json").read_text())
    assert document["goal"] == {"bits": 7.0}
    sizes = [point["bytes"] for point in document["front"]]
    assert sizes == sorted(sizes)
    nats = [point["nats"] for point in document["front"]]
    assert nats == sorted(nats, reverse=True)


def test_the_plan_is_no_worse_than_uniform_plans_of_its_size_or_more_within_the_goal(found):
    _, _, result = found
    limit = result.goal.most_bytes(result.evidence.numbers)
    assert any(rival.kind == "heuristic" for rival in [*result.rivals, *result.unmeasured])
    assert any(rival.kind == "uniform" for rival in result.rivals)
    assert all(result.winner.kl.mean <= rival.kl.mean for rival in result.rivals if rival.nbytes <= limit)


def test_a_plan_above_the_goal_loses_to_a_measured_one_within_it_or_is_called_so(found, tmp_path, capsys):
    _, _, result = found
    near, far = map(on_more_text, sorted(result.rivals, key=lambda each: each.kl.mean)[:: len(result.rivals) - 1])
    far = replace(far, kind="plan", nbytes=near.nbytes - 1)  # fewer bytes must not save it
    goal = Goal(max_kl=(near.kl.mean + far.kl.mean) / 2)
    for by_gradients in (False, True):
        assert runner.best_of(result.evidence, goal, far, [near], by_gradients=by_gradients) is near
    lost = replace(result, goal=goal, winner=replace(near, kind="uniform", label="int8_row"), rivals=[far, near])
    why = (
        f"the searched plan has KL {far.kl.mean:.4g} on text that was held out, above the goal of {goal.max_kl:g}; "
        f"int8_row, which needs no search, has {near.kl.mean:.4g}, and is the plan"
    )
    show_result(lost)
    assert f"the search lost: {why}" in " ".join(capsys.readouterr().out.split())
    assert (lost.to_document()["why_lost"], result.to_document()["why_lost"]) == (why, None)
    missed = replace(result, goal=Goal(max_kl=near.kl.mean / 2), winner=near, rivals=[far, near])
    assert runner.best_of(result.evidence, missed.goal, far, [near], by_gradients=False) is far
    line = f"KL {near.kl.mean:.6g}, above the goal of {near.kl.mean / 2:g}: give more bits or a higher limit"
    assert missed.to_document()["missed_goal"] == line
    assert result.to_document()["missed_goal"] is None
    missed.save(tmp_path)
    show_result(missed)
    assert line in " ".join(capsys.readouterr().out.split())
    write_report([tmp_path / "front.json"], tmp_path / "page.html")
    assert f"The goal is missed: {line}." in (tmp_path / "page.html").read_text()


def test_page_and_console_say_what_the_solver_left_and_what_an_unmeasured_plan_promises(found, tmp_path, capsys):
    _, _, result = found
    words = {
        (0.0, 0.0, 0): "No choice of these formats is predicted to cost less.",
        (0.0, 0.0, 2): "It is the best of 3 solved plans by measurement.",
        (0.0, 0.12, 1): "corrected by that, predictions promise 12\N{NO-BREAK SPACE}% less for a plan not measured.",
        (0.02, 0.0, 0): "The solver stopped within 2.0\N{NO-BREAK SPACE}% of the best possible.",
    }
    for (gap, promised, corrections), line in words.items():
        solution = replace(result.solution, gap=gap, promised=promised)
        changed = replace(result, solution=solution, corrections=corrections)
        changed.save(tmp_path)
        write_report([tmp_path / "front.json"], tmp_path / "page.html")
        assert line in (tmp_path / "page.html").read_text()
        show_result(changed)
        said = " ".join(capsys.readouterr().out.split())
        assert ("one that was not measured promises 12.0% less damage" in said) is (promised > 0)


def on_more_text(plan):
    """The same plan as if measured on text of two hundred times the length: of a little there is no interval."""
    samples = {key: 2 * [100 * value for value in values] for key, values in plan.quality.samples.items()}
    return replace(plan, quality=replace(plan.quality, samples=samples))


def test_a_larger_plan_that_needs_no_search_and_is_better_is_named(found, capsys):
    _, _, result = found
    near, far = map(on_more_text, sorted(result.rivals, key=lambda each: each.kl.mean)[:: len(result.rivals) - 1])
    near = replace(near, kind="uniform", label="iq4_nl_gguf", nbytes=1010, predicted=0.2)
    far = replace(far, kind="plan", nbytes=1000, predicted=0.1)
    beaten = replace(result, winner=far, rivals=[far, near])
    line = beaten.to_document()["better_beyond_goal"]
    assert line.startswith(f"iq4_nl_gguf, which needs no search, has KL {near.kl.mean:.4g} where the plan has ")
    assert "with 1% more bytes" in line
    show_result(beaten)
    assert f"a larger plan is better: {line}" in " ".join(capsys.readouterr().out.split())
    same = replace(far, kind="uniform", nbytes=2000, predicted=0.2)
    for rival in (replace(near, nbytes=1000), replace(near, predicted=0.05), same):
        assert replace(beaten, rivals=[far, rival]).better_beyond_goal is None


def test_damage_is_predicted_in_the_order_in_which_it_is_measured(found):
    _, _, result = found
    for group in result.evidence.groups.values():
        assert group.formats["bfloat16"].predicted < group.formats["int8_row"].predicted < group.nats("mxfp4")
        assert group.factor > 0
    plan = result.rivals[0]
    assert math.isclose(plan.predicted, plan.kl.mean, rel_tol=0.6)


def test_weights_are_rounded_on_several_threads_as_on_one(monkeypatch):
    subject = subject_of(tiny_llama())
    pairs = [(name, fmt) for name in subject.sites for fmt in ("mxfp4", "int8_row")]
    done: list[tuple[str, str]] = []
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        rounded = damage.RoundedWeights(subject, InputStatistics())
        rounded.round_all(pairs, lambda name, fmt: done.append((name, fmt)))
        assert not rounded.missing(pairs)
        found.append([rounded.decoded(*pair) for pair in pairs])
    monkeypatch.undo()
    torch.set_num_threads(before)
    assert sorted(done) == sorted(2 * pairs)
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


def test_formats_are_predicted_on_several_threads_as_on_one(monkeypatch):
    """Each thread has its own weights and matrices: they are not those that another asked for last."""
    before, found, seen = torch.get_num_threads(), [], set()
    subject, windows = subject_of(tiny_llama()), tokens(6)
    predicted = damage.RoundedWeights.predicted
    monkeypatch.setattr(
        damage.RoundedWeights,
        "predicted",
        lambda *given: (seen.add(threading.current_thread().name), predicted(*given))[1],
    )
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        evidence, _ = collect.collect_evidence(subject, windows[:4], windows[4:], FORMATS)
        found.append(evidence.groups)
        assert (threading.main_thread().name in seen) == (threads == 1)
        seen.clear()
    monkeypatch.undo()
    torch.set_num_threads(before)
    assert list(found[0]) == list(found[1])
    for one, two in zip(found[0].values(), found[1].values(), strict=True):
        assert list(one.formats) == list(two.formats)
        for fmt, cost in one.formats.items():
            assert cost.predicted == pytest.approx(two.formats[fmt].predicted, rel=1e-5)


def test_a_stopped_search_goes_on_where_it_was(tmp_path, monkeypatch):
    """Stopped in the statistics, then in the checks: nothing that was done is done again."""
    model, windows = tiny_llama(layers=1), tokens()
    calls = {"windows": 0, "checks": 0}
    stop_at = {"windows": 2, "checks": 3}
    real_add, real_measure = collect.add_windows, runner.PlanMeter.measure
    real_nearest = collect.nearest_uniform

    def nearest_uniform(evidence, bits):
        assert {group.factor for group in evidence.groups.values()} == {1.0}  # as in a search that nobody stopped
        return real_nearest(evidence, bits)

    def add_windows(*given):
        calls["windows"] += 1
        if calls["windows"] == stop_at["windows"]:
            raise KeyboardInterrupt
        real_add(*given)

    def measure(self, evidence, choice, label, *given, **more):
        if "of all layers" in label:
            calls["checks"] += 1
            if calls["checks"] == stop_at["checks"]:
                raise KeyboardInterrupt
        return real_measure(self, evidence, choice, label, *given, **more)

    monkeypatch.setattr(collect, "nearest_uniform", nearest_uniform)
    monkeypatch.setattr(collect, "add_windows", add_windows)
    monkeypatch.setattr(gathered, "AT_ONCE", 8 * 24)
    monkeypatch.setattr(runner.PlanMeter, "measure", measure)
    options = {"goal": Goal(bits=7.0), "formats": ("mxfp4", "int8_row"), "out": tmp_path}
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            bitplan.search(model, windows, **options)
    with pytest.raises(EvidenceFileError, match="was stopped"):
        SearchEvidence.load(tmp_path / EVIDENCE)
    result = bitplan.search(model, windows, **options)
    whole = bitplan.search(model, windows, goal=Goal(bits=7.0), formats=("mxfp4", "int8_row"))
    assert calls["windows"] == 2 * math.ceil(whole.evidence.text["windows"] / 8) + 1  # the stopped one
    assert result.plan.to_json() == whole.plan.to_json()
    known = SearchEvidence.load(tmp_path / EVIDENCE)
    assert explain_plan(known, plan_for(known, Goal(bits=7.0))) == result.plan
    assert plan_for(known, Goal(bits=6.5)) == solve(known, Goal(bits=6.5)).choice
    first = next(iter(known.groups))
    for bad in ({}, {**known.proven[0].choice, first: "int4_g32"}):
        document = known.to_document() | {"proven": [{"goal": {"bits": 7.0}, "kl": 0.1, "choice": bad}]}
        with pytest.raises(EvidenceFileError, match=r"proven\[0\]: a choice has one of its formats"):
            SearchEvidence.from_document(document)
    files = {name: (tmp_path / name).read_bytes() for name in (EVIDENCE, "plan.json")}
    bitplan.search(model, windows, **options)  # of a search that is done already
    assert files == {name: (tmp_path / name).read_bytes() for name in files}


def test_a_model_that_fits_as_it_is_is_not_searched(tmp_path):
    with pytest.raises(GoalError, match=r"fits as it is: [\d,]+ bytes, 32\.000 bits"):
        bitplan.search(tiny_llama(), tokens(), goal=Goal(bits=40.0), out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_block_by_block_a_model_gives_the_logits_and_gradients_that_it_gives_as_a_whole(tmp_path, monkeypatch):
    """Through one block at a time, by a plan or not; the same model without a list of blocks runs as a whole."""
    model, ids = tiny_llama(), torch.stack(tokens(3))
    subject = subject_of(model)
    assert len(subject.runner.blocks) == 2
    with torch.no_grad():
        torch.testing.assert_close(subject.logits(ids), model(ids).logits)
        name = "model.layers.1.mlp.up_proj.weight"
        double = {name: 2 * model.get_parameter(name)}
        changed = torch.func.functional_call(model, double, (ids,)).logits
    torch.testing.assert_close(subject.logits(ids, double), changed)
    sums = []
    for find in (blocks._block_list, lambda _model: None):
        monkeypatch.setattr(blocks, "_block_list", find)
        statistics, scratch = InputStatistics(), tmp_path / str(len(sums))
        scratch.mkdir()
        gathered.add_windows(subject_of(model), list(ids), statistics, scratch)
        sums.append({key: statistics.sums.get(key) for key in statistics.sums.names()})
    assert sums[0].keys() == sums[1].keys()
    for key, part in sums[0].items():
        torch.testing.assert_close(part, sums[1][key], rtol=1e-3, atol=1e-5)


class SeveralHeads(torch.nn.Module):
    """A list of modules that all get the same state: no blocks, though they are most of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 16)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state = self.embed(ids)
        return sum(head(state) for head in self.heads)


def test_blocks_are_modules_that_follow_one_another_however_small():
    heads = SeveralHeads()
    runner = blocks.BlockRunner(heads, heads.get_parameter, torch.device("cpu"))
    runner.check_order(torch.zeros(1, 4, dtype=torch.int64))
    assert not runner.blocks
    few = tiny_llama(vocab_size=4096)
    assert len(subject_of(few).runner.blocks) == 2
    in_blocks = sum(parameter.numel() for parameter in few.model.layers.parameters())
    assert in_blocks < 0.2 * sum(parameter.numel() for parameter in few.parameters())


def test_a_folder_is_searched_with_its_weights_on_disk(tmp_path):
    """What no block needs is not in memory: parameters lie on meta before and after."""
    model = tiny_llama()
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(tmp_path)
    on_disk = empty_model(tmp_path, {}, torch.float32, torch.device("cpu"))
    on_disk.tie_weights()
    with open_tensors(tmp_path) as file:
        subject = subject_of(on_disk, path=tmp_path, read=file.read_float)
        torch.testing.assert_close(subject.logits(torch.stack(tokens(2))), model(torch.stack(tokens(2))).logits)
    assert all(parameter.is_meta for parameter in on_disk.parameters())


def test_evidence_of_another_model_is_refused_by_name(found):
    _, folder, _ = found
    with pytest.raises(EvidenceFileError, match="weights"):
        bitplan.search(tiny_llama(seed=1), tokens(), goal=Goal(bits=7.0), formats=FORMATS, out=folder)
    with pytest.raises(EvidenceFileError, match="text"):
        bitplan.search(tiny_llama(), tokens(20), goal=Goal(bits=7.0), formats=FORMATS, out=folder)
    assert (folder / STATISTICS).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": tokens(2)}, "needs 4 or more"),
        ({"formats": ("int8_g128",)}, "rows of 64 are not whole blocks"),
        ({"formats": ("int8_row",), "target": "llama.cpp"}, "llama.cpp does not load int8_row"),
        ({"keep": ("*",)}, "no linear layer"),
        ({"goal": {"bits": 2.0}, "formats": ("mxfp4", "int8_row")}, "the smallest has"),
    ],
)
def test_bad_input_is_one_line(change, message):
    options = {"batches": tokens(4), "goal": {"bits": 7.0}, "formats": ("int8_g128",)} | change
    with pytest.raises(SearchError, match=message) as caught:
        bitplan.search(tiny_llama(), options.pop("batches"), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", [{"keep": ["model.layers.0.self_attn.v_proj.weight"]}, {"only": ["*mlp*"]}])
def test_evidence_of_other_tensors_of_the_model_is_refused_by_name(found, option):
    """What was left out has no statistics: it would cost nothing; and groups have other members."""
    model, folder, _ = found
    before = (folder / EVIDENCE).read_bytes()
    with pytest.raises(EvidenceFileError, match=r"searched was '.* tensors, .*', is '.* tensors, .*'"):
        bitplan.search(model, tokens(), goal={"bits": 30.0}, formats=FORMATS, out=folder, **option)
    assert (folder / EVIDENCE).read_bytes() == before


def test_a_model_that_gives_nan_is_refused():
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    model.model.norm.train()
    with pytest.raises(MeasureError, match="logits that are not finite in window 0"):
        bitplan.search(model, tokens(4), goal={"bits": 9.0}, formats=("int8_row",))
    assert [name for name, module in model.named_modules() if module.training] == ["model.norm"]  # as it was


def test_a_speed_goal_is_met_by_measured_times():
    """A tiny layer is not faster packed: what no plan reaches is refused with the fastest one."""
    options = {"formats": ("int8_row", "bfloat16")}
    with pytest.raises(GoalError, match="no plan is 1000 times as fast as BF16 at 2 rows; the fastest is"):
        bitplan.search(tiny_llama(), tokens(4), goal=Goal(faster=1000.0, rows=2), **options)
    result = bitplan.search(tiny_llama(), tokens(4), goal=Goal(faster=0.001, rows=2), **options)
    assert result.solution.us is not None
    assert "us at 2 rows" in result.plan["model.layers.0.mlp.down_proj.weight"].reason


def test_quantize_with_the_evidence_writes_the_numbers_that_are_proven(found, tmp_path, monkeypatch):
    monkeypatch.setattr(damage, "round_weight", round_weight)
    model, folder, result = found
    with redirect_stderr(io.StringIO()):  # its progress bar
        model.save_pretrained(tmp_path)
    formats = {"model.layers.0.mlp.down_proj.weight": "mxfp4", "model.embed_tokens.weight": "int8_row"}
    output = tmp_path / "small.safetensors"
    report = quantize_file(tmp_path / "model.safetensors", output, formats, evidence=folder / "evidence.safetensors")
    assert not report.warnings
    statistics = InputStatistics.load(folder, result.evidence.fingerprint)
    rounded = damage.RoundedWeights(subject_of(model), statistics)
    with open_tensors(output) as file:
        for name, fmt in formats.items():
            torch.testing.assert_close(file.read_float(name), rounded.decoded(name, fmt))
            assert not torch.equal(rounded.decoded(name, fmt), decode(encode(model.get_parameter(name), fmt)))


def test_a_plan_for_training_streams_as_it_is():
    """Bytes on the wire: blocks alone count, rounded to nearest as a stream does, and stream_blocks takes the plan."""
    model = tiny_llama().train()
    formats = ("mxfp4", "int8_row", "bfloat16")
    result = bitplan.search(model, tokens(8), goal={"bits": 6.0}, formats=formats, target="training")
    blocks_numbers = sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert result.evidence.numbers == blocks_numbers
    assert 8 * result.plan.nbytes <= 6.0 * blocks_numbers
    assert all(name.startswith("model.layers.") for name in result.plan)
    assert all(module.training for module in model.modules())
    ids = torch.stack(tokens(2))
    with bitplan.stream_blocks(model, formats=result.plan, device="cpu", train="nothing") as stream, torch.no_grad():
        stream.begin_step(0)
        streamed = model(ids).logits
        stream.end_step()
    weights = {name: decode(encode(tiny_llama().get_parameter(name), result.plan[name].format)) for name in result.plan}
    with torch.no_grad():
        expected = torch.func.functional_call(tiny_llama(), weights, (ids,)).logits
    torch.testing.assert_close(streamed, expected, rtol=1e-4, atol=1e-4)
    trained = tiny_llama()  # its parameters require gradients
    with bitplan.stream_blocks(trained, formats=result.plan, device="cpu", train="weights") as stream:
        stream.begin_step(0)
        trained(ids, labels=ids).loss.backward()
        stream.end_step()
    name = next(iter(result.plan))
    assert not torch.equal(trained.get_parameter(name), tiny_llama().get_parameter(name))


def test_sizes_are_those_of_the_files_that_a_target_reads(tmp_path):
    """MLX holds a bias beside every scale; exports promise what is counted."""
    model = tiny_llama()
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama/tokenizer.json").write_text("{}")
    for target, fmt in (("mlx", "int4_g32"), ("vllm", "int4_g32")):
        subject = subject_of(tiny_llama())
        subject.aim_at(TARGETS[target])
        request = ExportRequest(tmp_path / "llama", tmp_path / "out", fmt)
        prepared = prepare_export(request, TARGETS[target].export)
        prepared.close()
        rows = {row.name.removesuffix("_packed"): row.nbytes for row in prepared.report.rows if row.format == fmt}
        assert len(rows) == 14  # embeddings get another format
        assert rows == {name: TARGETS[target].nbytes(fmt, subject.sites[name].shape) for name in rows}
    assert 8 * TARGETS["mlx"].nbytes("int4_g32", (64, 64)) == 5 * 64 * 64


@pytest.mark.parametrize(("target", "held"), [("vllm", SCHEMES), ("mlx", QUANTIZATIONS), ("llama.cpp", GGUF_TYPES)])
def test_a_target_loads_what_its_files_hold(target, held):
    assert set(EXPORTED[TARGETS[target].export]) <= set(held)
    assert set(held) <= {*EXPORTED[TARGETS[target].export], *GGUF_CASTS}
    assert all(TARGETS[target].loads(fmt) for fmt in TARGETS[target].formats)


def test_goals_of_few_bits_try_vectors_that_run_where_the_plan_does():
    for target, wanted in (
        ("llama.cpp", (4, 3, 1, 0)),
        ("bitplan", (4, 3, 1, 0)),
        ("vllm", (0,) * 4),
        ("mlx", (0,) * 4),
    ):
        usual = candidates(TARGETS[target], None)
        assert usual == TARGETS[target].formats
        for bits, more in zip((2.9, 3.0, 4.0, 4.5), wanted, strict=True):
            few_bits = candidates(TARGETS[target], None, bits)
            assert few_bits[more:] == usual
            assert all(fmt.startswith(("iq2", "iq3")) for fmt in few_bits[:more])
            assert all(TARGETS[target].loads(fmt) for fmt in few_bits)
    assert candidates(TARGETS["llama.cpp"], ["q8_0_gguf"], 2.5) == ("q8_0_gguf",)


def test_what_is_packed_already_stays_where_it_is_kept():
    packed = TensorSpec.of("", (64, 64), "q4_0_gguf")
    tensors = {"kept": packed, "free": packed, "same": TensorSpec.of("same", (64, 64), searched_model.ANY_ROWS)}
    plan = choose_formats(tensors, searched_model.ANY_ROWS, keep=["kept", "same"], pad=True)
    assert {name for name, entry in plan.entries.items() if searched_model._may_change(entry)} == {"free"}


@pytest.mark.parametrize("columns", [5, 191, 400, 1200])
def test_products_of_all_pairs_of_columns_are_computed_once(columns):
    rows = torch.randn(3, 16, columns, generator=torch.Generator().manual_seed(0))
    found = torch.zeros(columns, columns)
    for part in rows:
        add_upper_products(found, part)
    every = rows.reshape(-1, columns).double()
    torch.testing.assert_close(mirror(found).double(), every.T @ every, rtol=1e-5, atol=1e-4)
