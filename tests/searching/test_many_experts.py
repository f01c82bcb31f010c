"""Many experts, some of which no token is sent to: what is shared, said, rounded, read and timed."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest
import torch
import transformers

import bitplan
from bitplan import open_tensors, quantize_file
from bitplan.base.errors import PlanError
from bitplan.cli.verbs.search import show_result
from bitplan.files.round_with_evidence import evidence_for, open_evidence
from bitplan.formats import get_format
from bitplan.formats.dispatch import SMALLEST_FOR_CPU, encode, explain_encode, parts_of, size_with_others
from bitplan.report.page import write_report
from bitplan.rounding import round_columns_cpu
from bitplan.rounding import weights as round_weight
from bitplan.rounding.round_columns import loops_for
from bitplan.searching import damage, searched_model, timing
from bitplan.searching.damage import RoundedWeights
from bitplan.searching.goal import GoalError, SearchError
from bitplan.searching.searched_model import prepare
from bitplan.searching.statistics import INPUTS, InputStatistics, is_unseen
from tests.files.engines.tiny_models import save_tokenizer
from tests.searching.tiny_mixtral import HIDDEN, INNER, rounding_to_nearest, save_mixtral

EXPERTS = 6
UNSEEN = (4, 5)
FORMATS = ("int4_g32", "int8_row")
GATE = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
IDS = torch.randint(96, (12, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def plain_rounding():
    with rounding_to_nearest():
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A tiny Mixtral whose router sends nothing to its last two experts, and a search of it."""
    folder = tmp_path_factory.mktemp("moe")
    save_mixtral(folder / "model", EXPERTS, router=(1.0, 2.0, -1.0, -2.0, 0.0, 0.0))
    result = bitplan.search(folder / "model", [IDS], goal={"bits": 6.0}, formats=FORMATS, out=folder / "found")
    return folder, result


def test_experts_that_got_no_token_share_what_all_got_and_the_search_says_so(found, capsys):
    folder, result = found
    statistics = InputStatistics.load(folder / "found", {})
    assert {name for name in statistics.unseen if ".w1." in name} == {GATE.format(expert) for expert in UNSEEN}
    assert len({statistics.owner(name) for name in statistics.unseen}) == 2  # of gate and up, and of down
    assert all(is_unseen(statistics.owner(name)) for name in statistics.unseen)
    pooled, parts = statistics.mean(GATE.format(4), INPUTS), [statistics.mean(GATE.format(n), INPUTS) for n in range(4)]
    torch.testing.assert_close(pooled / pooled.trace(), sum(parts) / sum(parts).trace(), atol=0.02, rtol=0)
    with open_evidence(folder / "found" / "evidence.safetensors") as evidence:
        assert evidence.digest(GATE.format(4)) is not None
        torch.testing.assert_close(evidence.hessian(GATE.format(4)), evidence.hessian(GATE.format(5)))
    assert result.evidence.text["experts"] == EXPERTS
    assert result.evidence.text["unseen_experts"] == len(UNSEEN)
    said = "no token of the text was sent to 2 of 6 experts"
    assert result.to_document()["unseen_experts"].startswith(said)
    assert "No token of the text" in _report(folder)
    show_result(result)
    assert said in " ".join(capsys.readouterr().out.split())


def _report(folder):
    write_report([folder / "found" / "front.json"], folder / "page.html", title="page")
    return (folder / "page.html").read_text()


def test_the_plan_of_unseen_experts_is_packed_by_the_evidence_and_runs(found, tmp_path):
    folder, result = found
    path = folder / "found" / "evidence.safetensors"
    report = quantize_file(folder / "model", tmp_path / "packed", result.plan, evidence=path)
    roundings = {row["name"]: row.get("rounding") for row in report.rows}
    assert all(roundings[GATE.format(expert)]["measure"] == "hessian" for expert in range(EXPERTS))
    model = bitplan.load_packed(tmp_path / "packed").model
    assert model.generate(IDS[:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_an_expert_that_gets_tokens_later_has_inputs_of_its_own():
    statistics = InputStatistics(shared={"a": "stack[unseen]", "b": "stack[unseen]", "c": "x"})
    statistics.sums.small["a.inputs"] = torch.ones(1)
    statistics.share({"d": "a"})
    assert statistics.shared == {"b": "stack[unseen]", "c": "x", "d": "a"}
    assert statistics.unseen == ["b"]


def test_nan_in_one_expert_is_found_by_its_name(found, tmp_path):
    folder, _ = found
    name = GATE.format(1)
    model = transformers.MixtralForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[1, 0, 0] = torch.nan
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    with pytest.raises(SearchError, match=rf"NaN or infinity in window 0 .* some in '{name}'; "):
        bitplan.search(tmp_path / "model", [IDS], goal={"bits": 6.0}, formats=FORMATS)


def test_a_goal_that_kept_experts_make_unreachable_says_so(found):
    folder, _ = found
    with pytest.raises(GoalError, match=r"no plan has .*bytes stay as they are, .*: kept with model.*: a packed layer"):
        bitplan.search(folder / "model", [IDS], goal={"bits": 6.0}, formats=FORMATS, keep=["*.experts.3.*"])
    with pytest.raises(PlanError, match=r"the pattern '\*\.experts\.9\.\*' matches no tensor; `bitplan inspect`"):
        bitplan.search(folder / "model", [IDS], goal={"bits": 6.0}, formats=FORMATS, keep=["*.experts.9.*"])


# ---- what is compiled, read and timed once for all experts of a layer ------------------------------------------------


def test_parts_of_many_numbers_take_what_is_compiled_for_them(compiled_loops):
    compiled_loops.undo()
    small = torch.randn(8, 64)
    before = encode(small, "int4_g32")
    assert explain_encode(small, "int4_g32").implementation == "torch"
    with parts_of(SMALLEST_FOR_CPU), parts_of(1):
        assert explain_encode(small, "int4_g32").implementation == "numba"
        assert loops_for(small) is round_columns_cpu
        assert torch.equal(encode(small, "int4_g32").data, before.data)
    assert size_with_others(1) == 1


def test_experts_are_rounded_as_parts_of_their_layer(found, monkeypatch):
    folder, _ = found
    subject, _ = prepare(folder / "model", [IDS], None, None)
    sizes = []
    monkeypatch.setattr(
        damage, "round_weight", lambda weight, fmt, **_options: sizes.append(size_with_others(0)) or encode(weight, fmt)
    )
    rounded = RoundedWeights(subject, InputStatistics.load(folder / "found", {}))
    rounded.encoded(GATE.format(0), "int8_row")
    rounded.encoded("lm_head.weight", "int8_row")
    assert sizes == [EXPERTS * 2 * INNER * HIDDEN, 96 * HIDDEN]
    seen = []
    real = round_weight.round_with_report
    monkeypatch.setattr(
        round_weight, "round_with_report", lambda *args, **more: seen.append(size_with_others(0)) or real(*args, **more)
    )
    path = folder / "found" / "evidence.safetensors"
    with open_evidence(path) as evidence, open_tensors(folder / "model") as file:
        evidence_for(evidence, file).round(
            GATE.format(0), file.read_float(GATE.format(0)), get_format("int8_row"), where="here"
        )
    assert seen == [EXPERTS * INNER * HIDDEN]


def test_a_stack_is_read_once_for_all_of_its_experts(found, monkeypatch):
    folder, _ = found
    opened = []
    real = searched_model.open_tensors
    monkeypatch.setattr(searched_model, "open_tensors", lambda path: opened.append(path) or real(path))
    subject, _ = prepare(folder / "model", [IDS], None, None)
    count = len(opened)
    read, names = subject.runner.read, []
    subject.runner.read = lambda name: names.append(name) or read(name)
    rounded = RoundedWeights(subject, InputStatistics.load(folder / "found", {}))
    experts = [name for name, site in subject.sites.items() if site.slice is not None]
    with open_tensors(folder / "model") as file:
        for name, _ in rounded.missing((name, "int8_row") for name in experts):
            torch.testing.assert_close(subject.weight(name), file.read_float(name), atol=0, rtol=0)
    assert len(names) == 2
    assert len(opened) == count


def test_small_experts_run_on_one_torch_thread(found):
    folder, _ = found
    subject, _ = prepare(folder / "model", [IDS], None, None)
    before, threads = torch.get_num_threads(), []
    layer = subject.model.model.layers[0].mlp.experts
    layer.register_forward_pre_hook(lambda *_: threads.append(torch.get_num_threads()))
    try:
        torch.set_num_threads(2)
        subject.logits(IDS[:1])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [1]


def test_each_shape_is_timed_once_though_a_format_has_no_product(found, monkeypatch):
    folder, result = found
    subject, _ = prepare(folder / "model", [IDS], None, None)
    shapes = []

    def time_shape(_subject, weight, formats, _rows):
        shapes.append(tuple(weight.shape))
        return {timing.REFERENCE: 1.0, **{fmt: 2.0 for fmt in formats if fmt != "int4_g32"}}

    monkeypatch.setattr(timing, "_time_shape", time_shape)
    timing.time_groups(subject, result.evidence, 2, FORMATS, lambda _count, _name: None)
    assert len(shapes) == len(set(shapes))
    assert (EXPERTS, 2 * INNER, HIDDEN) in shapes


def test_kernels_of_all_shapes_and_formats_are_compiled_side_by_side(found, monkeypatch):
    folder, _ = found
    subject, _ = prepare(folder / "model", [IDS], None, None)
    layers, products = [], []
    monkeypatch.setattr(timing, "warm_up", lambda given, rows: layers.append((len(given), rows)))
    monkeypatch.setattr(timing, "compile_together", lambda _device, calls: products.append([call() for call in calls]))
    wanted = [((32, 64), FORMATS), ((64, 32), [*FORMATS, "bfloat16"]), ((32, 64), FORMATS), ((6, 64, 64), FORMATS)]
    timing.compile_first(subject, wanted, 3)
    assert layers == [(4, (3,))]
    assert [tuple(each.shape) for each in products[0]] == [(6, 64), (6, 64)]
    monkeypatch.setattr(timing, "COMPILED_AT_ONCE", 1)
    timing.compile_first(subject, wanted[:1], 3)
    assert layers[1:] == [(1, (3,)), (1, (3,))]
