"""Corrections: what measured plans say of formats, and which plan comes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from bitplan.searching import Goal, run
from bitplan.searching.damage import damage_of_rows
from bitplan.searching.evidence import FormatCost, SearchEvidence, TensorGroup
from bitplan.searching.goal import GoalError
from bitplan.searching.run import solve_and_correct
from bitplan.searching.searched_model import WeightSite
from bitplan.searching.solver import Corrections, nearest_uniform, solve
from bitplan.searching.statistics import GRADIENT, INPUTS, WEIGHED, InputStatistics, SumFiles, draw_tokens

BITS = {"mxfp4": 4.25, "int4_g32": 4.5, "iq4_nl_gguf": 4.5, "int8_row": 8.06}
PREDICTED = {"mxfp4": 0.004, "int4_g32": 0.0026, "iq4_nl_gguf": 0.0025, "int8_row": 0.0001}


def made_evidence(layers: int = 12) -> SearchEvidence:
    """Two projections in some layers; of a little more than 4.5 bits are the uniform plans of 4.5: something stays."""
    groups = {}
    for layer in range(layers):
        for part, damage in (("down_proj", 1.0), ("o_proj", 0.5 + 0.1 * layer)):
            name, rows = f"layers.{layer}.{part}", 192
            formats = {
                fmt: FormatCost(int(rows * 256 * bits / 8), damage * PREDICTED[fmt]) for fmt, bits in BITS.items()
            }
            tensors = {f"{name}.weight": ((rows, 256), "mlp_weight")}
            groups[name] = TensorGroup(tensors, formats, checked="iq4_nl_gguf")
    numbers = sum(group.numbers for group in groups.values())
    return SearchEvidence("made", numbers, {}, {}, {}, groups, 2 * numbers)


class TrueMeter:
    """Measures what groups really cost: the first predictions, by a factor for each projection and format."""

    def __init__(self, evidence: SearchEvidence, off: Mapping[tuple[str, str], float]) -> None:
        self.true = {
            (name, fmt): cost.predicted * off.get((name.rpartition(".")[2], fmt), 1.0)
            for name, group in evidence.groups.items()
            for fmt, cost in group.formats.items()
        }
        self.labels: list[str] = []

    def prepare(self, _evidence: SearchEvidence, _choices: Sequence[Mapping[str, str]], _stage: object) -> None:
        pass

    def kl(self, _evidence: SearchEvidence, choice: Mapping[str, str], label: str) -> float:
        self.labels.append(label)
        return sum(self.true[pair] for pair in choice.items())


def test_a_format_that_is_off_in_one_projection_is_found_by_whole_plans():
    evidence = made_evidence()
    meter = TrueMeter(evidence, {("down_proj", "mxfp4"): 8.0})
    corrections = Corrections(evidence)
    mixed = {name: "mxfp4" if "down" in name else "iq4_nl_gguf" for name in evidence.groups}
    for choice in (dict.fromkeys(evidence.groups, "iq4_nl_gguf"), mixed):
        corrections.add(choice, meter.kl(evidence, choice, ""))
    corrections.apply()
    assert evidence.predict(mixed) == pytest.approx(meter.kl(evidence, mixed, ""), rel=0.1)
    assert evidence.nats("layers.3.down_proj", "iq4_nl_gguf") == pytest.approx(0.0025, rel=0.15)
    assert 4 < evidence.groups["layers.3.down_proj"].formats["mxfp4"].factor < 12
    factor = evidence.groups["layers.3.o_proj"].formats["mxfp4"].factor
    assert 1 < factor < 8  # the format is suspected elsewhere, too


def test_plans_are_corrected_by_uniform_plans_and_come_near_the_best_there_is():
    """A format that is promised to be cheap is not, and one that is promised to be harmful is not."""
    off = {("down_proj", "mxfp4"): 10.0, ("o_proj", "int4_g32"): 0.3, ("down_proj", "int4_g32"): 0.3}
    evidence, goal = made_evidence(), Goal(bits=4.497)
    meter = TrueMeter(evidence, off)
    solution, corrections, _ = solve_and_correct(evidence, goal, meter)  # type: ignore[arg-type]
    assert meter.labels[0] in BITS  # a uniform plan is measured before one is solved
    assert corrections <= 4
    assert solution.nbytes <= 4.497 * evidence.numbers / 8
    uniform = meter.kl(evidence, dict.fromkeys(evidence.groups, "int4_g32"), "")
    assert meter.kl(evidence, solution.choice, "") < 1.1 * uniform


def test_what_an_unmeasured_plan_promises_is_said_apart_from_what_the_solver_left(monkeypatch):
    evidence, goal = made_evidence(), Goal(bits=4.4)
    monkeypatch.setattr(run, "MOST_CORRECTIONS", 0)  # so that what is measured last corrects no plan
    solution, _, _ = solve_and_correct(evidence, goal, TrueMeter(evidence, {("down_proj", "mxfp4"): 10.0}))  # type: ignore[arg-type]
    best = solve(evidence, goal)
    assert best.choice != solution.choice
    assert solution.promised == pytest.approx(1 - evidence.harm(best.choice) / evidence.harm(solution.choice))
    assert solution.promised > 0.01
    assert solution.gap < 1e-5


def test_a_uniform_plan_just_above_the_goal_is_cut_to_it_where_no_solved_plan_is_better(monkeypatch):
    """A layer is said to need many bits, and does not; as if no correction had found that out."""
    evidence, goal = made_evidence(), Goal(bits=4.497)
    meter = TrueMeter(evidence, {})
    needy = evidence.groups["layers.11.o_proj"]
    needy.formats = {fmt: replace(cost, predicted=60 * cost.predicted) for fmt, cost in needy.formats.items()}
    monkeypatch.setattr(Corrections, "apply", lambda _self: None)
    solution, _, _ = solve_and_correct(evidence, goal, meter)  # type: ignore[arg-type]
    assert "cut to the goal" in meter.labels[-1]
    assert solution.promised == 0.0  # the plan that is predicted to cost less was measured, and is worse
    assert solution.nbytes <= 4.497 * evidence.numbers / 8
    assert "int8_row" not in solution.choice.values()
    uniform = meter.kl(evidence, dict.fromkeys(evidence.groups, "iq4_nl_gguf"), "")
    assert meter.kl(evidence, solution.choice, "") < 1.05 * uniform


@pytest.mark.parametrize(("off", "bits"), [({("o_proj", "int4_g32"): 0.3}, 4.4), ({("o_proj", "int8_row"): 5.0}, 6.0)])
def test_a_plan_that_is_measured_within_two_limits_is_not_refused_by_predictions(off, bits):
    evidence = made_evidence()
    meter = TrueMeter(evidence, off)
    least = meter.kl(evidence, solve_and_correct(evidence, Goal(bits=bits), meter)[0].choice, "")  # type: ignore[arg-type]
    evidence, goal = made_evidence(), Goal(bits=bits, max_kl=1.01 * least)
    solution, _, _ = solve_and_correct(evidence, goal, TrueMeter(evidence, off))  # type: ignore[arg-type]
    assert meter.kl(evidence, solution.choice, "") <= 1.01 * least
    evidence, goal = made_evidence(), Goal(bits=bits, max_kl=0.9 * least)
    with pytest.raises(GoalError, match=f"the least KL is {least:.4g} nats"):
        solve_and_correct(evidence, goal, TrueMeter(evidence, off))  # type: ignore[arg-type]


def test_a_plan_measured_within_its_distance_is_kept_where_corrections_leave_no_other(monkeypatch):
    """Measured within the goal but a tenth beside the prediction; by what that corrects no plan is within it."""
    evidence, goal = made_evidence(), Goal(max_kl=0.01)
    meter = TrueMeter(evidence, {})
    monkeypatch.setattr(meter, "kl", lambda *_given: 0.005)

    def corrected(_self: Corrections) -> None:
        evidence.together = 100.0

    applied = iter([lambda _self: None])
    monkeypatch.setattr(Corrections, "apply", lambda self: next(applied, corrected)(self))
    solution, _, _ = solve_and_correct(evidence, goal, meter)  # type: ignore[arg-type]
    assert solution.choice


def test_projections_are_checked_in_the_uniform_plan_that_is_measured_later():
    evidence = made_evidence()
    assert nearest_uniform(evidence, 4.4).label == "iq4_nl_gguf"
    assert nearest_uniform(evidence, 9.0).label == "int8_row"
    only = {name: replace(group, formats={"mxfp4": group.formats["mxfp4"]}) for name, group in evidence.groups.items()}
    assert nearest_uniform(replace(evidence, groups=only), 9.0).label == "mxfp4"


def test_tokens_that_the_loss_does_not_mind_do_not_count_however_large():
    """Where attention rests, inputs are a hundred times as large, and gradients are zero."""
    torch.manual_seed(0)
    inputs, gradients, change = torch.randn(400, 8), torch.randn(400, 6), torch.randn(6, 8)
    inputs[::50, :3] *= 100
    gradients[::50] = 0
    sums = SumFiles(
        {
            f"w.{INPUTS}": inputs.T @ inputs,
            f"w.{GRADIENT}": gradients.square().sum(0),
            f"w.{WEIGHED}": gradients.square().sum(1) @ inputs.square(),
        }
    )
    statistics = InputStatistics(sums, tokens=400, gradient_tokens=400)
    site = WeightSite("w", (6, 8), (nn.Linear(8, 6),), (), "mlp_weight")
    exact = float((gradients.square() * (inputs @ change.T).square()).sum() / 400 / 2)
    assert float(damage_of_rows(site, change, statistics).sum()) == pytest.approx(exact, rel=0.3)


def test_tokens_are_drawn_as_often_as_their_probability_says():
    probabilities = torch.zeros(1000, 700)
    probabilities[:, [3, 299, 699]] = torch.tensor([0.2, 0.5, 0.3])
    drawn = draw_tokens(probabilities, torch.Generator().manual_seed(0))
    assert drawn.shape == (1000, 1)
    counts = torch.bincount(drawn[:, 0], minlength=700) / 1000
    assert math.isclose(float(counts[[3, 299, 699]].sum()), 1.0)
    torch.testing.assert_close(counts[[3, 299, 699]], torch.tensor([0.2, 0.5, 0.3]), atol=0.06, rtol=0)
