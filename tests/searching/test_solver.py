"""The solver against every choice there is, and what it says where no plan will do."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from bitplan.searching import Goal
from bitplan.searching.evidence import FormatCost, SearchEvidence, TensorGroup
from bitplan.searching.explain import compare_plans, explain_plan
from bitplan.searching.goal import GoalError, aims_of, parse_bytes, parse_kinds
from bitplan.searching.solver import front, may_win, plan_for, rivals_of, solve

FORMATS = {"mxfp4": 4.25, "q4_0_gguf": 4.5, "int8_row": 8.06, "bfloat16": 16.0}


def made_evidence(groups: int = 5, *, seed: int = 0) -> SearchEvidence:
    """Groups of random size and sensitivity; every format was timed at one row."""
    generator = random.Random(seed)
    made = {}
    for index in range(groups):
        rows, damage = generator.choice([64, 128, 384]), generator.uniform(0.1, 3)
        formats = {
            fmt: FormatCost(
                int(rows * 256 * bits / 8), damage * 4.0 ** (4 - bits), us={1: bits * generator.uniform(1, 2)}
            )
            for fmt, bits in FORMATS.items()
        }
        name = f"layers.{index}.mlp.down_proj"
        made[name] = TensorGroup({f"{name}.weight": ((rows, 256), "mlp_weight")}, formats, reference_us={1: 20.0})
    numbers = sum(group.numbers for group in made.values())
    return SearchEvidence("made", numbers, {}, {}, {}, made, 2 * numbers)


def every_choice(evidence: SearchEvidence) -> list[dict[str, str]]:
    names = list(evidence.groups)
    return [dict(zip(names, formats, strict=True)) for formats in itertools.product(FORMATS, repeat=len(names))]


@pytest.mark.parametrize("bits", [4.3, 5.0, 7.7, 12.0])
def test_no_choice_within_the_size_is_better(bits):
    evidence = made_evidence()
    solution = solve(evidence, Goal(bits=bits))
    within = [each for each in every_choice(evidence) if evidence.bits(evidence.nbytes(each)) <= bits]
    assert solution.nats == pytest.approx(min(map(evidence.predict, within)))
    assert solution.nbytes == evidence.nbytes(solution.choice) <= bits * evidence.numbers / 8
    assert solution.bound <= solution.nats * (1 + 1e-6)
    assert solve(made_evidence(), Goal(bits=bits)) == solution


def of_two_kinds() -> SearchEvidence:
    """Groups that hurt one kind of text or the other."""
    evidence = made_evidence()
    for index, group in enumerate(evidence.groups.values()):
        group.kinds = {"prose": 1.8, "code": 0.2} if index % 2 else {"prose": 0.1, "code": 1.9}
    return evidence


@pytest.mark.parametrize("kinds", ["worst", (0.9, 0.1), (1.0, 3.0)])
@pytest.mark.parametrize("bits", [4.6, 6.0])
def test_no_choice_is_better_for_the_worst_kind_of_text_or_by_shares(bits, kinds):
    evidence = of_two_kinds()
    plain = solve(evidence, Goal(bits=bits))
    goal = Goal(bits=bits, kinds=kinds)
    evidence.aims = aims_of(goal.kinds, evidence.kinds)
    solution = solve(evidence, goal)

    def harm(choice):
        groups = evidence.groups
        kl = [sum(evidence.nats(g, f) * groups[g].kinds[kind] for g, f in choice.items()) for kind in evidence.kinds]
        return max(kl) if kinds == "worst" else sum(map(math.prod, zip(kl, kinds, strict=True))) / sum(kinds)

    within = [each for each in every_choice(evidence) if evidence.bits(evidence.nbytes(each)) <= bits]
    assert harm(solution.choice) == pytest.approx(min(map(harm, within)))
    assert evidence.harm(solution.choice) == pytest.approx(harm(solution.choice))
    assert solution.bound == pytest.approx(harm(solution.choice), rel=1e-5)
    assert harm(solution.choice) <= harm(plain.choice)
    again = SearchEvidence.from_document(evidence.to_document())
    assert plan_for(again, goal) == solution.choice
    assert plan_for(again, Goal(bits=bits)) == plain.choice


def test_kinds_of_text_that_a_goal_counts_are_those_that_there_are():
    assert parse_kinds("0.7:0.3") == (0.7, 0.3)
    assert aims_of(parse_kinds("3:1"), ["a", "a", "b"]) == [{"a": 0.75, "b": 0.25}]
    assert aims_of("worst", ["a", "b"]) == [{"a": 1.0}, {"b": 1.0}]
    assert aims_of("mean", []) == []
    assert Goal(bits=4.0, kinds=(3.0, 1.0)).to_dict() == {"bits": 4.0, "kinds": [3.0, 1.0]}
    assert str(Goal(bits=4.0, kinds="worst")) == "4 bits a weight, the worst kind of text counts"
    for kinds, names, said in (
        ("worst", ["a"], "the text has 1 of them"),
        ("worst", [], "the text has 1 of them"),
        ((1.0, 1.0), ["a", "b", "c"], "the text has 3 of them"),
    ):
        with pytest.raises(GoalError, match=said):
            aims_of(kinds, names)
    for text in ("best", "0:0", "1:1.2.3", "-1:2"):
        with pytest.raises(GoalError):
            Goal(bits=4.0, kinds=parse_kinds(text))
    with pytest.raises(GoalError, match="a limit of KL holds for all text together"):
        Goal(max_kl=0.1, kinds="worst")


def test_a_distance_alone_asks_for_the_fewest_bytes():
    evidence = made_evidence()
    solution = solve(evidence, Goal(max_kl=0.5))
    within = [evidence.nbytes(each) for each in every_choice(evidence) if evidence.predict(each) <= 0.5]
    assert solution.nbytes == min(within)


def test_several_limits_hold_together():
    evidence = made_evidence()
    solution = solve(evidence, Goal(bits=9.0, faster=2.0))
    assert solution.us is not None
    assert solution.us <= 20.0 * len(evidence.groups) / 2
    allowed = [
        each
        for each in every_choice(evidence)
        if evidence.bits(evidence.nbytes(each)) <= 9 and (evidence.microseconds(each, 1) or 0) <= 50
    ]
    assert solution.nats == pytest.approx(min(map(evidence.predict, allowed)))


def test_forced_groups_stay_and_the_rest_is_solved():
    evidence = made_evidence()
    name = next(iter(evidence.groups))
    assert solve(evidence, Goal(bits=8.0), force={name: "bfloat16"}).choice[name] == "bfloat16"
    with pytest.raises(GoalError, match="no group"):
        solve(evidence, Goal(bits=8.0), force={"nothing": "mxfp4"})


def test_every_point_of_the_front_is_the_best_of_its_size():
    evidence = made_evidence(4)
    first = evidence.groups["layers.0.mlp.down_proj"]
    larger_and_worse = replace(first.formats["int8_row"], predicted=2 * first.formats["q4_0_gguf"].predicted)
    first = replace(first, formats={**first.formats, "int8_row": larger_and_worse})
    evidence = replace(evidence, groups={**evidence.groups, "layers.0.mlp.down_proj": first})
    choices = every_choice(evidence)
    points = front(evidence)
    assert points[0].nbytes == min(map(evidence.nbytes, choices))
    for point in points:
        within = [each for each in choices if evidence.nbytes(each) <= point.nbytes]
        assert point.nats == pytest.approx(min(map(evidence.predict, within)))


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (Goal(bits=3.0), r"the smallest has .*\(4.250 bits"),
        (Goal(max_kl=1e-12), "the least is"),
        (Goal(bits=4.3, max_kl=0.001), "the fewest bytes for that: "),
        (Goal(faster=50.0), "the fastest is"),
        (Goal(faster=2.0, rows=7), "times at 1 rows, and the goal is at 7"),
    ],
)
def test_a_goal_out_of_reach_names_the_nearest(goal, message):
    with pytest.raises(GoalError, match=message):
        solve(made_evidence(), goal)


@pytest.mark.parametrize("goal", [Goal(bits=3.0), Goal(nbytes=100), Goal(max_kl=1e-12), Goal(faster=50.0)])
def test_the_nearest_goal_that_an_error_names_can_be_reached(goal):
    evidence = made_evidence()
    with pytest.raises(GoalError) as caught:
        solve(evidence, goal)
    assert caught.value.settings
    assert solve(evidence, replace(goal, **caught.value.settings)).choice


def test_reasons_say_what_the_neighbours_would_cost():
    evidence = made_evidence()
    plan = explain_plan(evidence, dict.fromkeys(evidence.groups, "q4_0_gguf"))
    reason = plan["layers.0.mlp.down_proj.weight"].reason
    assert "int8_row would take +" in reason
    assert "mxfp4 would save" in reason
    other = explain_plan(evidence, dict.fromkeys(evidence.groups, "mxfp4"))
    change = compare_plans(plan, other).to_dict()
    assert change["bytes"] == other.nbytes - plan.nbytes
    assert change["nats"] == pytest.approx(
        evidence.predict(dict.fromkeys(evidence.groups, "mxfp4"))
        - evidence.predict(dict.fromkeys(evidence.groups, "q4_0_gguf"))
    )


def test_rivals_have_no_fewer_bytes():
    evidence = made_evidence()
    solution = solve(evidence, Goal(bits=4.4))
    rivals = rivals_of(evidence, solution.nbytes)
    assert {rival.kind for rival in rivals} == {"uniform", "heuristic"}
    assert all(evidence.nbytes(rival.choice) >= solution.nbytes for rival in rivals)


def test_heuristics_are_measured_where_predictions_leave_them_a_chance():
    evidence = made_evidence()
    plan = solve(evidence, Goal(bits=4.4))
    rivals = rivals_of(evidence, plan.nbytes)
    harm = {rival.label: evidence.predict(rival.choice) / plan.nats for rival in rivals if rival.kind == "heuristic"}
    assert harm
    for error in (1.0, 2.0, 1.01 * max(harm.values())):
        measured = {rival.label for rival in rivals if may_win(evidence, rival, plan.choice, error)}
        assert {rival.label for rival in rivals if rival.kind == "uniform"} <= measured
        assert measured & harm.keys() == {label for label, times in harm.items() if times <= max(1.2, error)}


def test_sizes_are_read_with_their_units():
    assert [parse_bytes(text) for text in ("6GB", "1.5 GiB", "900")] == [6 * 10**9, 3 * 2**29, 900]
    for wrong in ("six", "4 parsecs", "-1GB"):
        with pytest.raises(GoalError, match="such as 6GB"):
            parse_bytes(wrong)
    for wrong in (math.inf, math.nan, 1e308, 0):
        with pytest.raises(GoalError, match=r"must be above 0 and below 1e\+100, got .* \(bits\)"):
            Goal(bits=wrong)
