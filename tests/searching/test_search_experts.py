"""Experts that the model keeps as one tensor and its file one by one: searched, and packed by the plan."""

from __future__ import annotations

import pytest
import torch

import bitplan
from bitplan import open_tensors, quantize_file
from bitplan.files.round_with_evidence import evidence_for, open_evidence
from bitplan.formats import get_format
from bitplan.searching import statistics as gathered
from bitplan.searching.runtime_formats import TARGETS
from bitplan.searching.searched_model import ExpertSlice, prepare
from bitplan.searching.statistics import GRADIENT, INPUTS, InputStatistics, RoutedTokens
from tests.searching.tiny_mixtral import HIDDEN, INNER, rounding_to_nearest, save_mixtral

EXPERTS = 4
FORMATS = ("int4_g32", "int8_row", "nvfp4")


@pytest.fixture(scope="module", autouse=True)
def plain_rounding():
    with rounding_to_nearest() as patch:
        patch.setattr(gathered, "FEWEST_TOKENS", 1)  # so that sums are of what each expert got, and no more
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A tiny Mixtral as a folder, and a search of it."""
    folder = tmp_path_factory.mktemp("moe")
    model = save_mixtral(folder / "model", EXPERTS)
    ids = torch.randint(96, (12, 16), generator=torch.Generator().manual_seed(1))
    result = bitplan.search(folder / "model", [ids], goal={"bits": 6.0}, formats=FORMATS, out=folder / "found")
    return model, folder, ids, result


def experts_of(names):
    return sorted(name for name in names if ".experts." in name)


def test_experts_of_a_layer_are_searched_and_go_together(found):
    _, folder, _, result = found
    with open_tensors(folder / "model") as file:
        names = experts_of(file.specs)
    assert len(names) == EXPERTS * 3
    assert names == experts_of(name for group in result.evidence.groups.values() for name in group.tensors)
    own = [result.plan[name].format for name in names]
    assert len(set(own)) <= 2  # gate and up are one group, down another
    assert all(get_format(fmt).scales is None or not get_format(fmt).scales.needs_base for fmt in own)
    group = next(group for name, group in result.evidence.groups.items() if "experts" in name)
    assert group.formats["int4_g32"].predicted > group.formats["int8_row"].predicted > 0


@pytest.mark.parametrize("keep", ["*.w2.weight", "*.experts.1.w3.weight"])
def test_a_kept_expert_keeps_its_layer(found, tmp_path, keep):
    _, folder, ids, _ = found
    subject, _ = prepare(folder / "model", [ids], None, None, keep=[keep])
    assert experts_of(subject.sites)
    subject.aim_at(TARGETS["bitplan"])
    assert not experts_of(subject.sites)
    assert len(experts_of(subject.stays)) == EXPERTS * 3
    reason = subject.stays["model.layers.0.block_sparse_moe.experts.0.w1.weight"].reason
    assert reason.startswith("kept with model.layers.0.block_sparse_moe.experts.")
    quantize_file(folder / "model", tmp_path / "packed", dict.fromkeys(subject.sites, "int8_row"))
    bitplan.load_packed(tmp_path / "packed")


def test_statistics_of_an_expert_are_of_the_tokens_that_it_gets(found):
    model, folder, ids, _ = found
    statistics, squares = InputStatistics.load(folder / "found", {}), []
    _, text = prepare(folder / "model", [ids], None, None)

    def hook(_module, args):
        x, chosen = args[:2]
        squares.append(torch.stack([x[(chosen == expert).any(1)].square().sum() for expert in range(EXPERTS)]))

    handle = model.model.layers[0].mlp.experts.register_forward_pre_hook(hook)
    with torch.no_grad():
        for window in text.statistics:
            model(window[None])
    handle.remove()
    name = "model.layers.0.block_sparse_moe.experts.{}.{}.weight"
    inputs = [statistics.sums.get(f"{name.format(expert, 'w1')}.{INPUTS}") for expert in range(EXPERTS)]
    traces, whole = torch.stack([each.diagonal().sum() for each in inputs]), torch.stack(squares).sum(0)
    torch.testing.assert_close(traces, whole)
    assert statistics.owner(name.format(0, "w3")) == name.format(0, "w1")
    for part, rows in (("w1", INNER), ("w3", INNER), ("w2", HIDDEN)):
        assert statistics.mean(name.format(1, part), GRADIENT).shape == (rows,)


def test_the_plan_packs_experts_and_the_evidence_is_of_them(found, tmp_path):
    _, folder, _, result = found
    quantize_file(folder / "model", tmp_path / "packed", result.plan)
    with open_tensors(tmp_path / "packed") as file:
        for name in experts_of(file.specs):
            assert file.specs[name].format == result.plan[name].format
    packed = bitplan.load_packed(tmp_path / "packed").model
    with torch.no_grad():
        assert torch.isfinite(packed(torch.arange(8)[None]).logits).all()
    name = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    with open_evidence(folder / "found" / "evidence.safetensors") as evidence, open_tensors(folder / "model") as file:
        known = evidence_for(evidence, file)
        assert known.has(name)
        encoded, rounding = known.round(name, file.read_float(name), get_format("int8_row"), where=name)
        assert rounding.measure == "hessian"
        assert encoded.shape == (INNER, HIDDEN)


def test_an_expert_that_few_tokens_came_to_gets_some_of_what_all_got(monkeypatch):
    monkeypatch.setattr(gathered, "FEWEST_TOKENS", 4)
    slices = [ExpertSlice(str(expert), "stack", expert, slice(0, 2)) for expert in range(3)]
    routed = RoutedTokens()
    routed.add("stack", 0, 6)
    routed.add("stack", 1, 2)
    sums = {"0.inputs": torch.tensor([6.0]), "1.inputs": torch.tensor([10.0])}
    routed.complete_inputs(slices, sums, "inputs")
    assert {name: each.tolist() for name, each in sums.items()} == {
        "0.inputs": [6.0],
        "1.inputs": [14.0],
        "stack[unseen].inputs": [8.0],  # of those that got none
    }
    gradients = {"0.g": torch.tensor([12.0]), "1.g": torch.tensor([12.0])}
    routed.complete_gradients(slices, gradients, "g", 10)
    assert [gradients[f"{expert}.g"].item() for expert in range(3)] == [20.0, 60.0, 30.0]
