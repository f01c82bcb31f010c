"""Policies: LoongForge's version 1 to the letter, version 2 and its refusals, every threshold of the lookup."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.fp8.policy.policy import Question, alike_rules, matching_rules, should_use_fp8
from bitplan.fp8.policy.rules import LayerRule, Point, Policy, bands_of, load_policy, read_policy
from bitplan.fp8.policy.vocabulary import (
    ANSWERS,
    KINDS,
    FingerprintError,
    Fp8Error,
    PolicyError,
    PolicyKindError,
    PolicyVersionError,
    count_tokens,
    promote,
    shape_obstacle,
)
from tests.fp8.policy.fp8_samples import H200, VERSION_1

THRESHOLDS = read_policy(json.loads(VERSION_1))


def point(tokens, answer, speedup=None):
    figures = {"win": (1.2, 1.1, 1.3), "lose": (0.8, 0.7, 0.9), "undecided": (1.0, 0.9, 1.1)}
    if answer not in figures:
        return Point(tokens, answer, note="ran out of memory")
    middle, low, high = figures[answer]
    shift = (speedup or middle) - middle
    return Point(tokens, answer, middle + shift, low + shift, high + shift, 10)


def rule(answers, **change):
    points = tuple(point(tokens, answer) for tokens, answer in answers.items())
    given = {"part": "llm", "kind": "row", "shape": (4096, 14336), "recipe": "blockwise", "gemm": "module"}
    dense = {"name": "fc2", "tp": 1} if change.get("kind", "row") not in KINDS[4:] else {}
    return LayerRule(points=points, **(given | dense | change))


def policy(*rules):
    return Policy(rules, H200, 1.0, 0.95)


NON_MONOTONE = {
    512: "lose",
    1024: "win",
    2048: "lose",
    4096: "win",
    8192: "win",
    16384: "undecided",
    32768: "unmeasured",
}


# ---- version 1 -------------------------------------------------------------------------------------------------------


def test_version_1_is_read_and_written_in_its_own_order():
    """Only the example's aligning spaces go."""
    assert THRESHOLDS.to_json() == VERSION_1.replace(",  ", ", ").replace(":  ", ": ")
    assert read_policy(json.loads(THRESHOLDS.to_json())) == THRESHOLDS


def test_version_1_file_round_trip(tmp_path):
    THRESHOLDS.save(tmp_path / "p.json")
    again = load_policy(tmp_path / "p.json")
    assert again == THRESHOLDS
    again.save(tmp_path / "q.json")
    assert (tmp_path / "p.json").read_bytes() == (tmp_path / "q.json").read_bytes() == THRESHOLDS.to_json().encode()


def test_an_empty_policy():
    text = Policy([], None, 1).to_json()
    assert json.loads(text) == {"version": 1, "speedup_threshold": 1, "rules": {}}


@pytest.mark.parametrize(
    ("kind", "name", "tokens", "use"),
    [  # 2.2: "Lookup by (module_kind, ub_name, tp) -> enable FP8 when seq_length x micro_batch_size >= min_tokens"
        ("layernorm_column", "qkv", 16383, False),
        ("layernorm_column", "qkv", 16384, True),
        ("layernorm_column", "fc1", 4095, False),
        ("layernorm_column", "fc1", 4096, True),
        ("layernorm_column", "fc1", 10**9, True),
        ("row", "proj", 16383, False),
        ("row", "proj", 16384, True),
        ("row", "fc2", 8191, False),
        ("row", "fc2", 8192, True),
        # "Missing rules: ... conservatively fall back to BF16"
        ("column", "fc1", 10**6, False),
        ("duplicated", "q_down_proj", 10**6, False),
        ("row", "qkv", 10**6, False),
    ],
)
def test_dense_lookup_of_version_1(kind, name, tokens, use):
    decision = should_use_fp8(THRESHOLDS, kind, tokens, name=name, tp=1)
    assert (decision.use_fp8, bool(decision)) == (use, use)
    assert decision.reason


@pytest.mark.parametrize(
    ("kind", "expert", "num_tokens", "topk", "etp", "gemms", "use"),
    [  # 2.2: "Lookup by (module_kind, etp, num_gemms) -> token count is seq_length x micro_batch_size x
        # moe_router_topk"
        ("column_grouped", False, 53, 8, 1, 64, True),  # 53 x 8 = 424, on the threshold
        ("column_grouped", False, 52, 8, 1, 64, False),
        ("row_grouped", False, 424, 1, 1, 64, True),
        ("row_grouped", False, 423, 1, 1, 64, False),
        # 3.3: "column / layernorm_column is automatically promoted to column_grouped; row is promoted to row_grouped"
        ("column", True, 53, 8, 1, 64, True),
        ("layernorm_column", True, 53, 8, 1, 64, True),
        ("row", True, 53, 8, 1, 64, True),
        ("row", True, 52, 8, 1, 64, False),
        ("row_grouped", True, 53, 8, 1, 64, True),
        # "Policy lookup uses (etp, num_gemms) as the key instead of tp"
        ("column_grouped", False, 10**6, 8, 2, 64, False),
        ("column_grouped", False, 10**6, 8, 1, 32, False),
        # what is missing means BF16, never a guess
        ("column_grouped", False, 10**6, 8, 1, None, False),
        ("column_grouped", False, 10**6, None, 1, 64, False),
        ("duplicated", True, 10**6, 8, 1, 64, False),
    ],
)
def test_expert_lookup_of_version_1(kind, expert, num_tokens, topk, etp, gemms, use):
    decision = should_use_fp8(
        THRESHOLDS, kind, num_tokens, is_expert=expert, moe_router_topk=topk, etp=etp, num_gemms=gemms, tp=7
    )
    assert decision.use_fp8 is use
    if use:
        assert (decision.kind.endswith("_grouped"), decision.tokens) == (True, num_tokens * topk)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"name": "fc2"}, "8192 tokens are at or above min_tokens 8192 of row, fc2, tp 1 (1.23x there)"),
        ({"name": "fc2", "num_tokens": 9000}, "version 1 does not tell how far above was measured"),
        ({"name": "fc2", "num_tokens": 1}, "1 tokens are below min_tokens 8192 of row, fc2, tp 1"),
        ({"name": "fc2", "tp": 2}, "no rule for row, fc2, tp 2: measured and lost, or never measured"),
        ({"name": None}, "row is looked up by name"),
        ({"name": "fc2", "num_tokens": None}, "the token count is not known"),
        ({"name": "fc2", "gemm": "wgrad"}, "a version 1 policy knows whole modules, not wgrad"),
        ({"is_expert": True, "num_gemms": 64}, "multiplied by moe_router_topk, and it was not given"),
        ({"is_expert": True, "moe_router_topk": 8}, "looked up by num_gemms, the experts on one GPU"),
        ({"kind": "duplicated", "is_expert": True}, "no grouped kind for duplicated inside an expert"),
        (
            {"name": "fc2", "recipe": "blockwise", "shape": (1152, 4304)},
            "in_features 4304 is not a multiple of 128, which blockwise needs",
        ),
    ],
)
def test_each_answer_has_its_reason(question, reason):
    given = {"kind": "row", "num_tokens": 8192} | question
    assert reason in should_use_fp8(THRESHOLDS, given.pop("kind"), given.pop("num_tokens"), **given).reason


def test_kinds_of_experts():
    assert [promote(kind, True) for kind in KINDS] == [
        "column_grouped", "column_grouped", "row_grouped", "duplicated", "column_grouped", "row_grouped",
    ]  # fmt: skip
    assert [promote(kind, False) for kind in KINDS] == list(KINDS)


def test_tokens_are_counted():
    assert count_tokens(4096, 2) == 8192
    assert count_tokens(4096, 2, moe_router_topk=8) == 65536
    with pytest.raises(Fp8Error, match="micro_batch_size must be an integer from 1, got 0"):
        count_tokens(4096, 0)


def test_shapes_that_a_recipe_cannot_cast():
    assert shape_obstacle("rowwise", (1152, 4304)) is None
    assert (
        shape_obstacle("tensorwise", (3420, 1280))
        == "out_features 3420 is not a multiple of 16, which tensorwise needs"
    )
    assert shape_obstacle("mxfp8", (64, 48)) == "in_features 48 is not a multiple of 32, which mxfp8 needs"


# ---- scenarios and troubleshooting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "answers", "tokens", "use"),
    [  # 4. Expected Behaviour by Scenario
        ("Dense model with large hidden size (>=8192): all layers enabled", {1024: "win", 32768: "win"}, 8192, True),
        ("Dense model with short sequences (<=2048): adaptively skipped", {2048: "lose", 4096: "win"}, 2048, False),
        ("MoE with small experts: expert layers kept in BF16", {1024: "lose", 32768: "lose"}, 32768, False),
        ("MoE with high TP", {1024: "lose", 32768: "undecided"}, 32768, False),
        # 5. Troubleshooting: "Missing rules in policy for current TP/EP", "performance identical to full FP8"
        ("Missing rules", {}, 32768, False),
        ("all layers benefit", {512: "win", 1024: "win", 2048: "win"}, 512, True),
    ],
)
def test_scenarios(scenario, answers, tokens, use):
    result = policy(rule(answers)) if answers else policy()
    assert should_use_fp8(result, "row", tokens, name="fc2").use_fp8 is use, scenario


def test_vit_and_llm_decide_apart():
    """4: "VLM (mixed ViT + LLM): each component optimised independently"."""
    both = policy(rule({1024: "win"}), rule({1024: "lose"}, part="vit"))
    assert should_use_fp8(both, "row", 1024, name="fc2")
    assert should_use_fp8(both, "row", 1024, name="fc2", part="vit").answer == "lose"
    only = should_use_fp8(policy(rule({1024: "win"})), "row", 1024, name="fc2", part="vit")
    assert (only.use_fp8, only.answer) == (False, "unmeasured")


# ---- version 2: bands ------------------------------------------------------------------------------------------------


def test_a_series_that_is_not_monotone_gives_bands():
    """facts, 2: "One noisy win at 1024 tokens followed by losses gives min_tokens 1024"."""
    assert rule(NON_MONOTONE).bands == ((1024, 1024), (4096, 8192))


@pytest.mark.parametrize(
    ("tokens", "use", "answer"),
    [
        (1, False, "unmeasured"),
        (511, False, "unmeasured"),
        (512, False, "lose"),
        (513, False, "unmeasured"),
        (1023, False, "unmeasured"),
        (1024, True, "win"),
        (1025, False, "unmeasured"),
        (2048, False, "lose"),
        (4095, False, "unmeasured"),
        (4096, True, "win"),
        (4097, True, "win"),
        (8191, True, "win"),
        (8192, True, "win"),
        (8193, False, "unmeasured"),
        (16384, False, "undecided"),
        (32768, False, "unmeasured"),
        (32769, False, "unmeasured"),
    ],
)
def test_every_edge_of_the_bands(tokens, use, answer):
    decision = should_use_fp8(policy(rule(NON_MONOTONE)), "row", tokens, name="fc2")
    assert (decision.use_fp8, decision.answer) == (use, answer)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (512, "measured: lose at 512 tokens (0.800x, between 0.700x and 0.900x)"),
        (16384, "measured: undecided at 16384 tokens (1.000x"),
        (6000, "between two measured wins: win at 4096 tokens"),
        (3000, "3000 tokens were never measured, and lie between lose at 2048 tokens (0.800x"),
        (100, "below the smallest measured count, lose at 512 tokens"),
        (65536, "above the largest measured count, unmeasured at 32768 tokens (ran out of memory); not extrapolated"),
    ],
)
def test_reasons_of_version_2(tokens, reason):
    assert reason in should_use_fp8(policy(rule(NON_MONOTONE)), "row", tokens, name="fc2").reason


def test_extrapolation_is_asked_for_and_said():
    result = policy(rule({1024: "win", 2048: "win"}))
    assert not should_use_fp8(result, "row", 4096, name="fc2")
    far = should_use_fp8(result, "row", 4096, name="fc2", extrapolate=True)
    assert (far.use_fp8, far.answer) == (True, "unmeasured")
    assert far.reason.endswith("extrapolated, as was asked")
    assert not should_use_fp8(result, "row", 512, name="fc2", extrapolate=True)  # never downwards
    lost = policy(rule({1024: "win", 2048: "lose"}))
    assert not should_use_fp8(lost, "row", 4096, name="fc2", extrapolate=True)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"kind": "column"}, "never measured: no rule with kind column; measured: row"),
        ({"name": "proj"}, "no rule with name proj; measured: fc2"),
        ({"tp": 4}, "no rule with tp 4; measured: 1, 2"),
        ({"shape": (1, 2)}, r"no rule with shape (1, 2); measured: (4096, 14336)"),
        ({"recipe": "rowwise"}, "no rule with recipe rowwise; measured: blockwise"),
        ({"gemm": "wgrad"}, "no rule with gemm wgrad; measured: module"),
        ({"part": "vit"}, "no rule with part vit; measured: llm"),
    ],
)
def test_never_measured_names_the_nearest_thing_that_was(question, reason):
    result = policy(rule({1024: "win"}), rule({1024: "win"}, tp=2))
    decision = should_use_fp8(result, **({"kind": "row", "num_tokens": 1024, "name": "fc2"} | question))
    assert (decision.use_fp8, decision.answer) == (False, "unmeasured")
    assert reason in decision.reason


def test_shapes_under_one_key():
    """DeepSeek: the dense blocks' fc2 and the shared expert's share kind, name and tp, and nothing else."""
    result = policy(rule({1024: "win"}), rule({1024: "lose"}, shape=(4096, 2048)))
    assert should_use_fp8(result, "row", 1024, name="fc2", shape=(4096, 14336))
    assert should_use_fp8(result, "row", 1024, name="fc2", shape=(4096, 2048)).answer == "lose"
    open_shape = should_use_fp8(result, "row", 1024, name="fc2")
    assert not open_shape
    assert "2 were measured and one of them is against FP8" in open_shape.reason
    agreed = policy(rule({1024: "win"}), rule({1024: "win"}, shape=(4096, 2048)))
    assert "all are for FP8" in should_use_fp8(agreed, "row", 1024, name="fc2").reason


def test_recipes_compete():
    fast = rule({1024: "win", 2048: "lose"}, recipe="tensorwise")
    fast = replace(fast, points=(point(1024, "win", 1.5), fast.points[1]))
    result = policy(rule({1024: "win", 2048: "win"}), fast)
    best = should_use_fp8(result, "row", 1024, name="fc2")
    assert (best.recipe, best.speedup) == ("tensorwise", 1.5)
    assert best.reason.endswith("the best of 2 recipes")
    assert should_use_fp8(result, "row", 2048, name="fc2").recipe == "blockwise"
    assert should_use_fp8(result, "row", 2048, name="fc2", recipe="tensorwise").answer == "lose"
    lost = policy(rule({1024: "lose"}), rule({1024: "undecided"}, recipe="rowwise"))
    both = should_use_fp8(lost, "row", 1024, name="fc2")
    assert both.answer == "undecided"
    assert "rowwise: measured" in both.reason
    assert "blockwise: measured" in both.reason


def test_matching_rules():
    result = policy(rule({1024: "win"}), rule({1024: "win"}, tp=2))
    assert matching_rules(result, Question("row", 5, "fc2", tp=2)) == [rule({1024: "win"}, tp=2)]
    assert (
        matching_rules(THRESHOLDS, Question("row", 5, "fc2"))
        == alike_rules(THRESHOLDS, Question("row", 5, "fc2"))
        == []
    )


def test_alike_rules():
    """Of any name and shape; of one kind, size, part, recipe and product."""
    alike = [rule({1024: "win"}), rule({1024: "win"}, name="proj", shape=(4096, 4096))]
    others = [rule({1024: "win"}, **change) for change in ({"tp": 2}, {"kind": "column"}, {"part": "vit"})]
    others += [rule({1024: "win"}, gemm="wgrad"), rule({1024: "win"}, recipe="rowwise")]
    result = alike_rules(policy(*alike, *others), Question("row", 5, "fc9", shape=(64, 64), recipe="blockwise"))
    assert {each.key for each in result} == {each.key for each in alike}


# ---- version 2: the document -----------------------------------------------------------------------------------------

EXPERTS = {"kind": "row_grouped", "etp": 1, "num_gemms": 64}


def test_version_2_round_trip_is_byte_stable(tmp_path):
    result = policy(rule(NON_MONOTONE), rule({424: "win"}, **EXPERTS), rule({1: "lose"}, gemm="wgrad", part="vit"))
    result.save(tmp_path / "p.json")
    again = load_policy(tmp_path / "p.json")
    assert again == result
    assert again.to_json() == result.to_json() == policy(*reversed(result.rules)).to_json()
    assert json.loads(result.to_json()) == result.to_document()
    assert json.loads(policy().to_json())["rules"] == []


def document(**change):
    return policy(rule(NON_MONOTONE), rule({424: "win"}, **EXPERTS)).to_document() | change


def with_rule(**change):
    changed = document()["rules"]
    changed[0] = {key: value for key, value in (changed[0] | change).items() if value is not ...}
    return document(rules=changed)


def with_point(**change):
    first = document()["rules"][0]["points"]
    first[0] = {key: value for key, value in (first[0] | change).items() if value is not ...}
    return with_rule(points=first)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([], PolicyError, "a policy must be an object"),
        (document(document="plan"), PolicyError, "document must be one of 'bitplan-fp8-policy'"),
        (document(confidence=1), PolicyError, "confidence must be a number from 0.5"),
        (document(speedup_threshold=0), PolicyError, "speedup_threshold must be a number above 0"),
        (document(fingerprint=None), PolicyError, "fingerprint must be an object"),
        (document(rules={}), PolicyError, "rules must be a list"),
        (document(rules=document()["rules"] * 2), PolicyError, "two rules for llm row fc2 4096x14336"),
        (with_rule(kind="rwo"), PolicyKindError, r"rules\[0\]: unknown module kind 'rwo'.*did you mean 'row'"),
        (with_rule(name=...), PolicyError, r"rules\[0\]: name is missing; row is looked up by it"),
        (with_rule(etp=1), PolicyError, "etp does not belong to row"),
        (with_rule(shape=[1]), PolicyError, "shape must be two sizes"),
        (with_rule(recipe="fp8"), PolicyError, "recipe must be one of"),
        (with_rule(points=[]), PolicyError, "points must have at least one"),
        (with_rule(bands=[[512, 32768]]), PolicyError, r"bands must be \[\[1024, 1024\], \[4096, 8192\]\].*got"),
        (with_rule(extra=1), PolicyError, "unknown key 'extra'"),
        (with_point(tokens=1024), PolicyError, "points must rise in tokens, got 1024 before 1024"),
        (with_point(answer="win"), PolicyError, "answer must be 'lose' for"),
        (with_point(answer="maybe"), PolicyError, "answer must be one of 'win'"),
        (with_point(low=2.0), PolicyError, "low, speedup and high must rise"),
        (with_point(low=...), PolicyError, "come together or not at all"),
        (with_point(low=..., high=..., speedup=..., samples=...), PolicyError, "must say why in a note"),
        (with_point(low="1"), PolicyError, 'low must be a number above 0, got "1"'),
    ],
)  # fmt: skip
def test_wrong_policies(bad, error, message):
    """Wrong version, unknown kinds, wrong types."""
    with pytest.raises(error, match=message) as caught:
        read_policy(bad, where="p.json")
    assert str(caught.value).startswith("p.json: ")
    assert "\n" not in str(caught.value)


def with_value(path, value):
    changed = json.loads(VERSION_1)
    *keys, last = path
    target = changed
    for key in keys:
        target = target[key]
    target[last] = value
    return changed


RULE = {"tp": 1, "min_tokens": 1, "measured_speedup": 1.1}


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (with_value(["rules", "rows"], {}), PolicyKindError, "rules: unknown module kind 'rows'.*did you mean 'row'"),
        (with_value(["rules", "row"], []), PolicyError, r"rules.row must be an object of names .* got \[\]"),
        (with_value(["rules", "row_grouped"], {}), PolicyError, "rules.row_grouped must be a flat list"),
        (with_value(["rules", "row", "fc2"], {}), PolicyError, "rules.row.fc2 must be a list of rules"),
        (with_value(["rules", "row", "fc2"], [1]), PolicyError, r"rules.row.fc2\[0\] must be an object"),
        (with_value(["rules", "row", "fc2"], [RULE, RULE]), PolicyError, "two rules for row, fc2, tp 1"),
        (with_value(["rules", "row", "fc2"], [RULE | {"tp": "1"}]), PolicyError, 'tp must be an integer .*got "1"'),
        (with_value(["rules", "row", "fc2"], [RULE | {"etp": 1}]), PolicyError, "unknown key 'etp'; did you mean 'tp'"),
        (with_value(["rules", "row", "fc2"], [{"tp": 1}]), PolicyError, "min_tokens is missing"),
        (with_value(["rules", "row", "fc2", 0, "min_tokens"], -1), PolicyError, "min_tokens must be an integer"),
        (with_value(["rules", "row_grouped", 0, "num_gemms"], 0), PolicyError, "num_gemms must be an integer from 1"),
        (with_value(["rules", "row", ""], []), PolicyError, "a name must not be empty"),
        (with_value(["speedup_threshold"], "1"), PolicyError, "speedup_threshold must be a number above 0"),
        (with_value(["rules"], []), PolicyError, "rules must be an object"),
        (with_value(["more"], 1), PolicyError, "unknown key 'more'"),
    ],
)  # fmt: skip
def test_wrong_version_1_policies(bad, error, message):
    with pytest.raises(error, match=message):
        read_policy(bad)


def test_duplicate_keys_and_bad_files(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(VERSION_1.replace('"fc2":', '"proj":'))
    with pytest.raises(PolicyError, match="key 'proj' appears twice"):
        load_policy(path)
    path.write_text(VERSION_1[:100])
    with pytest.raises(PolicyError, match="not valid JSON"):
        load_policy(path)
    with pytest.raises(PolicyError, match="cannot be read"):
        load_policy(tmp_path / "none.json")


def test_a_policy_of_another_gpu():
    result = policy(rule({1024: "win"}))
    assert result.require_same_gpu(H200) == []
    assert result.require_same_gpu(replace(H200, torch="2.12")) == ["torch: measured with '2.11.0', now '2.12'"]
    with pytest.raises(FingerprintError, match=r"measured on 'NVIDIA H200', this is 'NVIDIA B200'; run the benchmark"):
        result.require_same_gpu(replace(H200, gpu="NVIDIA B200"))


@pytest.mark.parametrize(
    ("question", "error", "message"),
    [
        ({"kind": "rows"}, Fp8Error, "unknown module kind 'rows'"),
        ({"num_tokens": 0}, Fp8Error, "num_tokens must be an integer from 1, got 0"),
        ({"num_tokens": 1.5}, Fp8Error, "num_tokens"),
        ({"tp": None}, Fp8Error, "tp must be"),
        ({"gemm": "bgrad"}, Fp8Error, "gemm must be one of module, fprop"),
        ({"part": "audio"}, Fp8Error, "part must be one of llm, vit"),
        ({"recipe": "int8"}, Fp8Error, "recipe must be one of"),
        ({"shape": (1,)}, Fp8Error, "shape must be two sizes"),
    ],
)
def test_questions_that_make_no_sense(question, error, message):
    with pytest.raises(error, match=message):
        should_use_fp8(THRESHOLDS, **({"kind": "row", "num_tokens": 1, "name": "fc2"} | question))


SERIES = st.dictionaries(st.integers(1, 50), st.sampled_from(ANSWERS), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(SERIES)
def test_bands_never_overlap_and_hold_every_win_and_nothing_else(answers):
    ordered = dict(sorted(answers.items()))
    bands = bands_of(rule(ordered).points)
    assert all(low <= high for low, high in bands)
    assert all(before[1] < after[0] for before, after in pairwise(bands))
    for tokens in range(1, 52):
        inside = any(low <= tokens <= high for low, high in bands)
        assert should_use_fp8(policy(rule(ordered)), "row", tokens, name="fc2").use_fp8 is inside
        if tokens in ordered:
            assert inside is (ordered[tokens] == "win")
    text = policy(rule(ordered)).to_json()
    assert read_policy(json.loads(text)).to_json() == text


def test_other_versions_are_refused():
    for document, got in [({}, "none"), *(({"version": got}, json.dumps(got)) for got in (3, "1", True, 1.0))]:
        with pytest.raises(PolicyVersionError, match=rf"version must be 1 \(LoongForge's\) or 2 .*, got {got}$"):
            read_policy(document)
