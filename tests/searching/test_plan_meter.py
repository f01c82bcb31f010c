"""Damage of rounded inputs: predicted for each layer, measured for each projection, and chosen by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bitplan
from bitplan.formats.input_formats import round_input
from bitplan.plan import Plan
from bitplan.searching import Goal
from bitplan.searching.evidence import FormatCost, SearchEvidence, TensorGroup, input_of, weight_format
from bitplan.searching.explain import compare_plans
from bitplan.searching.goal import SearchError
from bitplan.searching.plan_meter import SHARE, round_cheap_inputs
from bitplan.searching.run import SearchOptions
from bitplan.searching.runtime_formats import TARGETS
from bitplan.searching.solver import Corrections, solve
from tests.searching.test_run import tiny_llama, tokens
from tests.searching.tiny_mixtral import rounding_to_nearest

FORMATS = ("mxfp4", "int8_row")
ROUNDED = "q8_0_gguf"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path, Any]:
    folder, model = tmp_path_factory.mktemp("inputs"), tiny_llama()
    with rounding_to_nearest():
        options = SearchOptions(inputs="8")
        result = bitplan.search(model, tokens(), goal={"bits": 7.0}, formats=FORMATS, out=folder, options=options)
    return model, folder, result


def test_every_product_rounds_its_inputs_and_the_proof_says_what_that_costs(searched) -> None:
    model, folder, result = searched
    plan, document = Plan.load(folder / "plan.json"), json.loads((folder / "front.json").read_text())
    products = {name for name, parameter in model.named_parameters() if name.endswith("_proj.weight")}
    assert {name for name, rounded in plan.inputs.items() if rounded == ROUNDED} == {
        *products,
        "model.embed_tokens.weight",  # whose head is tied
    }
    inputs = document["inputs"]
    assert inputs["groups"] == inputs["of"] == len(result.winner.choice)
    assert 0 < inputs["kl_kept"] < document["plan"]["kl"]
    assert inputs["share"] == pytest.approx(1 - inputs["kl_kept"] / document["plan"]["kl"])
    assert 0 < inputs["predicted"] < document["plan"]["predicted"]
    evidence = SearchEvidence.load(folder / "evidence.json")
    assert evidence.input_nats(result.winner.choice) == pytest.approx(inputs["predicted"])
    down = evidence.groups["model.layers.0.mlp.down_proj"].formats
    assert set(down) == {*FORMATS, *(f"{fmt}+{ROUNDED}" for fmt in FORMATS)}
    assert down[f"mxfp4+{ROUNDED}"].inputs == down[f"int8_row+{ROUNDED}"].inputs > 0 == down["mxfp4"].inputs


def test_predicted_damage_is_what_rounding_one_layer_does(searched) -> None:
    """Of each layer alone, measured on the whole text: within a factor of 2.5, and the layers in the same order."""
    model, folder, _ = searched
    evidence, ids = SearchEvidence.load(folder / "evidence.json"), torch.stack(tokens())
    with torch.no_grad():
        wanted = torch.log_softmax(model(ids).logits, -1)
    predicted, measured = [], []
    for name, group in evidence.groups.items():
        owner = name.replace("embed_tokens", "lm_head").replace("model.lm_head", "lm_head")
        names = [weight.removesuffix(".weight") for weight in group.tensors] if owner != "lm_head" else ["lm_head"]
        handles = [
            model.get_submodule(one).register_forward_pre_hook(lambda _m, args: (round_input(args[0], ROUNDED),))
            for one in names
        ]
        with torch.no_grad():
            logs = torch.log_softmax(model(ids).logits, -1)
        for handle in handles:
            handle.remove()
        predicted.append(group.formats[f"mxfp4+{ROUNDED}"].inputs)
        measured.append(float((wanted.exp() * (wanted - logs)).sum(-1).mean()))
    assert all(1 / 2.5 < one / other < 2.5 for one, other in zip(predicted, measured, strict=True))


def test_the_plan_is_applied_and_told_apart(searched) -> None:
    _, folder, result = searched
    packed = tiny_llama()
    bitplan.apply_plan(packed, Plan.load(folder / "plan.json"))
    assert packed.lm_head.inputs == ROUNDED == packed.model.layers[0].mlp.down_proj.inputs
    kept = result.plan.with_inputs(dict.fromkeys(result.plan.inputs))
    compared = compare_plans(result.plan, kept, SearchEvidence.load(folder / "evidence.json")).to_dict()
    assert compared["bytes"] == 0
    assert compared["nats"] == pytest.approx(-result.evidence.input_nats(result.winner.choice), rel=1e-6)


def evidence_of(costs: dict[str, dict[str, FormatCost]]) -> SearchEvidence:
    groups = {name: TensorGroup({f"{name}.weight": ((8, 32), "mlp")}, formats) for name, formats in costs.items()}
    return SearchEvidence("m", 256 * len(costs), {}, {}, {}, groups, 1000)


def costs(nats: float, inputs: float, us: float = 2.0) -> dict[str, FormatCost]:
    return {
        "int8_row": FormatCost(256, nats, us={1: us}),
        f"int8_row+{ROUNDED}": FormatCost(256, nats, us={1: us / 4}, inputs=inputs),
    }


def test_without_a_speed_goal_inputs_are_rounded_where_that_is_nearly_free() -> None:
    """0.1 nats in all, so 0.005 for inputs: the least first, as long as there is room; a limit of KL is kept."""
    evidence = evidence_of({"a": costs(0.05, 0.004), "b": costs(0.03, 0.0009), "c": costs(0.02, 0.0002)})
    choice = dict.fromkeys(evidence.groups, "int8_row")
    rounded = round_cheap_inputs(evidence, choice, Goal(bits=8))
    assert {name for name, fmt in rounded.items() if input_of(fmt)} == {"b", "c"}
    assert evidence.input_nats(rounded) <= SHARE * evidence.predict(choice)
    assert {weight_format(fmt) for fmt in rounded.values()} == {"int8_row"}
    tight = round_cheap_inputs(evidence, choice, Goal(max_kl=0.1005))
    assert {name for name, fmt in tight.items() if input_of(fmt)} == {"c"}
    assert round_cheap_inputs(evidence, choice, Goal(faster=2)) == choice


def test_with_a_speed_goal_the_solver_says_which_layers_round() -> None:
    evidence = evidence_of({"a": costs(0.05, 0.004), "b": costs(0.05, 0.0009), "c": costs(0.05, 0.02)})
    for group in evidence.groups.values():
        group.reference_us = {1: 2.0}
    solution = solve(evidence, Goal(faster=2.0))  # two of three layers must be fast
    assert {name for name, fmt in solution.choice.items() if input_of(fmt)} == {"a", "b"}
    assert solve(evidence, Goal(bits=8)).choice == dict.fromkeys(evidence.groups, "int8_row")


def test_measured_plans_correct_weights_and_leave_what_inputs_cost() -> None:
    evidence = evidence_of({"a": costs(0.05, 0.1), "b": costs(0.05, 0.1)})
    corrections = Corrections(evidence)
    corrections.add(dict.fromkeys(evidence.groups, f"int8_row+{ROUNDED}"), 0.3)  # as predicted
    corrections.apply()
    assert evidence.predict(dict.fromkeys(evidence.groups, f"int8_row+{ROUNDED}")) == pytest.approx(0.3, rel=1e-3)
    assert evidence.groups["a"].formats[f"int8_row+{ROUNDED}"].factor == pytest.approx(1.0, abs=1e-3)


def test_targets_round_as_their_engines_do() -> None:
    assert TARGETS["llama.cpp"].input_for("q4_k_gguf") == "q8_k"
    assert TARGETS["llama.cpp"].input_for("q4_0_gguf") == "q8_0_gguf" == TARGETS["bitplan"].input_for("mxfp4")
    assert TARGETS["vllm"].input_for("int8_row") == "int8_row"
    assert TARGETS["vllm"].input_for("int4_g32") is None is TARGETS["mlx"].input_for("int8_g64")
    with pytest.raises(SearchError, match=r"mlx rounds no inputs of products with weights in mxfp4; leave them"):
        bitplan.search(
            tiny_llama(),
            tokens(),
            goal={"bits": 7.0},
            formats=["mxfp4"],
            target="mlx",
            options=SearchOptions(inputs="8"),
        )
    wrong: Any = "int8"
    with pytest.raises(SearchError, match=r"must be one of keep, 8, auto, got 'int8'"):
        bitplan.search(tiny_llama(), [], goal={"bits": 7.0}, formats=["mxfp4"], options=SearchOptions(inputs=wrong))
