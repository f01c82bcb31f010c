"""Merging: pairs by logical tokens, noise stays undecided, losses stay losses, the order of reports does not matter."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.fp8.policy.merge import extend_policy, merge_reports, summary
from bitplan.fp8.policy.policy import should_use_fp8
from bitplan.fp8.policy.report import Row, speedup_interval
from bitplan.fp8.policy.rules import read_policy
from bitplan.fp8.policy.vocabulary import FingerprintError, Fp8Error, MergeError
from tests.fp8.policy.fp8_samples import H200, experts, pair, report, series


def merged(*reports, **options):
    return merge_reports(list(reports), **options)


def answers(result, index=0):
    return {point.tokens: point.answer for point in result.policy.rules[index].points}


def failed(tokens, precision, status, **change):
    given = {"name": "fc2", "tp": 1, "message": "torch.OutOfMemoryError"} | change
    return Row("llm", "row", (4096, 14336), tokens, "module", "graph", precision, status, **given)


def test_wins_losses_and_open_points_with_their_intervals():
    result = merged(report(series({512: 0.8, 1024: 1.0, 4096: 1.2, 16384: 1.5})))
    assert answers(result) == {512: "lose", 1024: "undecided", 4096: "win", 16384: "win"}
    assert result.findings == ()
    rule = result.policy.rules[0]
    assert rule.bands == ((4096, 16384),)
    assert rule.points[2].low <= 1.2 <= rule.points[2].high
    assert rule.points[2].samples == 10
    assert (result.policy.fingerprint, result.policy.confidence, result.policy.speedup_threshold) == (H200, 0.95, 1.0)
    assert read_policy(json.loads(result.policy.to_json())) == result.policy


def test_a_noisy_win_among_losses_gives_a_band_and_no_threshold():
    """facts, 2: "One noisy win at 1024 tokens followed by losses gives min_tokens 1024"."""
    result = merged(report(series({512: 0.8, 1024: 1.1, 2048: 0.9, 4096: 0.9, 8192: 1.3})))
    assert result.policy.rules[0].bands == ((1024, 1024), (8192, 8192))
    (rule,) = result.policy.to_thresholds().rules
    assert (rule.min_tokens, rule.measured_speedup) == (8192, pytest.approx(1.3, abs=0.02))


@pytest.mark.parametrize(("threshold", "answer"), [(1.0, "win"), (1.17, "win"), (1.2, "undecided"), (1.25, "lose")])
def test_the_threshold_is_the_least_speedup_that_counts(threshold, answer):
    """2.1.1: --speedup-threshold 1.0."""
    assert answers(merged(report(series({4096: 1.2})), speedup_threshold=threshold)) == {4096: answer}


def test_on_the_threshold_exactly():
    calm = pair(4096, 1.25, noise=(1.0,))
    assert answers(merged(report(calm), speedup_threshold=1.25)) == {4096: "win"}
    assert answers(merged(report(calm), speedup_threshold=1.2500001)) == {4096: "lose"}


def test_pairs_are_made_by_logical_tokens():
    """facts, 2: "BF16 and FP8 runs are paired by padded token count: 0 of 32 combinations pair"."""
    bf16, fp8 = pair(424, 1.3, **experts("column_grouped"))
    result = merged(report([replace(bf16, padded_tokens=1024), replace(fp8, padded_tokens=8192)]))
    assert result.findings == ()
    rule = result.policy.rules[0]
    assert (rule.etp, rule.num_gemms, rule.name, rule.tp) == (1, 64, None, None)
    decision = should_use_fp8(result.policy, "column", 53, is_expert=True, moe_router_topk=8, num_gemms=64)
    assert (decision.use_fp8, decision.tokens, decision.kind) == (True, 424, "column_grouped")


def test_equal_padded_tokens_do_not_pair():
    bf16, fp8 = pair(424, 1.3, **experts("column_grouped"))
    result = merged(report([replace(bf16, padded_tokens=1024), replace(fp8, tokens=512, padded_tokens=1024)]))
    assert answers(result) == {424: "unmeasured", 512: "unmeasured"}
    assert len(result.findings) == 2
    assert "has no fp8 row to be compared with" in result.findings[0]


def test_skewed_routing_counts_as_much_as_uniform():
    rows = pair(4096, 1.3, **experts("row_grouped")) + pair(4096, 0.9, **experts("row_grouped", routing="zipf"))
    result = merged(report(rows))
    assert answers(result) == {4096: "lose"}
    assert result.policy.rules[0].points[0].note == "the worst of 2 ways of timing"


def test_timings_both_win_or_one_is_chosen():
    rows = pair(4096, 1.3) + pair(4096, 0.8, timing="eager")
    assert answers(merged(report(rows))) == {4096: "lose"}
    assert answers(merged(report(rows), timing="graph")) == {4096: "win"}
    assert answers(merged(report(rows), timing="eager")) == {4096: "lose"}
    with pytest.raises(MergeError, match="no rows to merge with eager timing"):
        merged(report(pair(4096, 1.3)), timing="eager")


def test_out_of_memory_and_failures():
    """5: "Benchmark tool OOM". FP8 alone: lost. BF16: nothing to compare with. Neither is bridged by a band."""
    wins = series({1024: 1.3, 16384: 1.3})
    bf16 = pair(4096, 1.3)[0]
    lost = merged(report([*wins, bf16, failed(4096, "fp8", "oom")]))
    assert answers(lost) == {1024: "win", 4096: "lose", 16384: "win"}
    assert lost.policy.rules[0].bands == ((1024, 1024), (16384, 16384))
    assert lost.policy.rules[0].points[1].note == "fp8 ran out of memory: torch.OutOfMemoryError"
    assert lost.findings == ()
    both = merged(report([*wins, failed(4096, "bf16", "oom"), failed(4096, "fp8", "oom")]))
    assert answers(both)[4096] == "unmeasured"
    broken = merged(report([*wins, bf16, failed(4096, "fp8", "error", message="4304 % 128")]))
    assert answers(broken)[4096] == "unmeasured"
    assert broken.findings[0].endswith("failed: 4304 % 128")
    assert read_policy(json.loads(broken.policy.to_json())) == broken.policy


def test_too_few_samples_are_undecided():
    result = merged(report(pair(4096, 2.0, turns=3)))
    assert answers(result) == {4096: "undecided"}
    assert "3 samples are too few for a confidence of 0.95" in result.findings[0]
    assert answers(merged(report(pair(4096, 2.0, turns=5)))) == {4096: "win"}  # 2.1.1: TE_LAYER_PERF_ITERS=5


def test_reports_of_several_sizes_make_one_policy():
    """2.1.1: report_tp1.json report_tp2.json report_tp4.json."""
    reports = [
        report(series({4096: speedup}, tp=tp, shape=(8192, 29568 // tp)), where=f"report_tp{tp}.json")
        for tp, speedup in ((1, 1.4), (2, 1.2), (4, 0.9))
    ]
    result = merged(*reports)
    uses = [should_use_fp8(result.policy, "row", 4096, name="fc2", tp=tp).answer for tp in (1, 2, 4, 8)]
    assert uses == ["win", "win", "lose", "unmeasured"]
    thresholds = result.policy.to_thresholds()
    assert [rule.tp for rule in thresholds.rules] == [1, 2]
    assert json.loads(thresholds.to_json())["rules"]["row"]["fc2"][0]["min_tokens"] == 4096


def test_parts_are_kept_apart():
    """facts, 2: "ViT and LLM results merge into one rule"."""
    result = merged(
        report(series({1024: 1.3}) + series({1024: 0.8}, part="vit", kind="row", name="fc2", shape=(4096, 14336), tp=1))
    )
    assert [(rule.part, rule.points[0].answer) for rule in result.policy.rules] == [("llm", "win"), ("vit", "lose")]
    with pytest.raises(MergeError, match="version 1 has no parts and the policy has llm and vit"):
        result.policy.to_thresholds()
    assert len(result.policy.to_thresholds(part="llm").rules) == 1
    assert result.policy.to_thresholds(part="vit").rules == ()


def test_version_1_takes_the_most_careful_of_several_shapes():
    shapes = series({1024: 1.3, 4096: 1.3}) + series(
        {1024: 0.8, 4096: 1.2}, kind="row", name="fc2", shape=(7168, 2048), tp=1
    )
    (rule,) = merged(report(shapes)).policy.to_thresholds().rules
    assert rule.min_tokens == 4096
    lost = series({1024: 1.3}) + series({1024: 0.8}, kind="row", name="fc2", shape=(7168, 2048), tp=1)
    assert merged(report(lost)).policy.to_thresholds().rules == ()


def test_other_machines_and_versions_are_refused_naming_both():
    one = report(series({512: 1.2}), where="a.json")
    for key, value in (("gpu", "NVIDIA H100"), ("torch", "2.12"), ("commit", "def"), ("driver", "1"), ("triton", "2")):
        other = report(series({1024: 1.2}), fingerprint=replace(H200, **{key: value}), where="b.json")
        with pytest.raises(FingerprintError, match=f"a.json was measured with {key} '.*', b.json with '{value}'"):
            merged(one, other)


def test_recipes_merge_only_when_asked():
    one = report(series({4096: 1.2}), where="a.json")
    two = report(series({4096: 1.4}), recipe="tensorwise", where="b.json")
    with pytest.raises(MergeError, match=r"a\.json is of the recipe 'blockwise', b\.json of 'tensorwise'"):
        merged(one, two)
    result = merged(one, two, across_recipes=True)
    assert [rule.recipe for rule in result.policy.rules] == ["tensorwise", "blockwise"]
    assert should_use_fp8(result.policy, "row", 4096, name="fc2").recipe == "tensorwise"
    with pytest.raises(MergeError, match="version 1 has no recipes and the policy has blockwise and tensorwise"):
        result.policy.to_thresholds()


def test_what_two_reports_measured_is_pooled_and_the_rest_stays():
    """Experts of another EP size bring their dense layers along."""
    one = report([*pair(4096, 1.2), *pair(4096, 1.3, **experts("row_grouped"))], where="a.json")
    two = report([*pair(4096, 1.3), *pair(4096, 1.1, **experts("row_grouped", num_gemms=32))], where="b.json")
    result = merged(one, two)
    assert result.policy.to_json() == merged(two, one).policy.to_json()
    dense, *rest = sorted(result.policy.rules, key=lambda rule: rule.kind != "row")
    assert dense.points[0].samples == 20
    point = dense.points[0]  # still in turns: apart, the GPU's drift would make the interval wide
    assert 1.19 < point.low < point.speedup < point.high < 1.31
    assert sorted(rule.num_gemms for rule in rest) == [32, 64]
    assert result.findings == ()


def test_a_report_that_is_given_twice_counts_once():
    one = report(pair(4096, 1.2), where="a.json")
    assert merged(one, one).policy.to_json() == merged(one).policy.to_json()


def test_a_failure_in_one_of_two_reports_stands():
    bf16, _ = pair(4096, 1.2)
    result = merged(report(pair(4096, 1.3)), report([bf16, failed(4096, "fp8", "oom")]))
    assert answers(result) == {4096: "lose"}
    assert "failed in one of 2 reports: torch.OutOfMemoryError" in result.findings[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speedup_threshold": 0}, "speedup threshold must be a number above 0"),
        ({"speedup_threshold": float("nan")}, "speedup threshold must be a number above 0"),
        ({"confidence": 1.0}, "confidence must be"),
        ({"timing": "cuda"}, "timing must be one of eager, graph"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(Fp8Error, match=message):
        merged(report(pair(4096, 1.2)), **options)


def test_nothing_to_merge():
    with pytest.raises(MergeError, match="no reports to merge"):
        merge_reports([])
    with pytest.raises(MergeError, match=r"empty\.json: no rows to merge"):
        merged(report([], where="empty.json"))


def test_products_make_rules_of_their_own():
    rows = [
        row
        for gemm, speedup in (("module", 1.2), ("fprop", 1.5), ("wgrad", 0.7))
        for row in pair(4096, speedup, gemm=gemm)
    ]
    result = merged(report(rows))
    assert [(rule.gemm, rule.points[0].answer) for rule in result.policy.rules] == [
        ("module", "win"), ("fprop", "win"), ("wgrad", "lose"),
    ]  # fmt: skip
    assert len(result.policy.to_thresholds().rules) == 1


def test_summary_counts_answers():
    row = summary(merged(report(series({512: 0.8, 1024: 1.0, 4096: 1.2, 16384: 1.5}))).policy)[0]
    assert row["fp8 at tokens"] == "4096..16384"
    assert (row["win"], row["lose"], row["undecided"], row["unmeasured"]) == (2, 1, 1, 0)


def test_a_missing_size_is_merged_into_a_policy():
    """5, missing rules: "Re-run benchmark at the needed TP/EP and merge into the policy"."""
    one, two = report(series({1024: 1.2, 4096: 1.3})), report(series({1024: 0.8}, tp=2) + series({2048: 0.9}))
    base, more = merged(one).policy, merged(two).policy
    both = extend_policy(base, more)
    assert both.to_json() == merged(one, two).policy.to_json() == extend_policy(more, base).to_json()
    assert both.rules[0].bands == ((1024, 1024), (4096, 4096))
    assert extend_policy(base, base).to_json() == base.to_json()
    slower = merged(report(series({1024: 1.05}))).policy
    worse = extend_policy(base, slower)
    assert worse.to_json() == extend_policy(slower, base).to_json()
    assert worse.rules[0].points[0] == slower.rules[0].points[0]
    with pytest.raises(MergeError, match=r"has the speedup_threshold 1\.0, .* 1\.1"):
        extend_policy(base, merged(two, speedup_threshold=1.1).policy)
    with pytest.raises(FingerprintError, match=r"gpu 'NVIDIA H200', .* with 'B200'"):
        extend_policy(base, merged(replace(two, fingerprint=replace(H200, gpu="B200"))).policy)


# ---- properties ------------------------------------------------------------------------------------------------------

TIMES = st.lists(st.floats(0.5, 2.0), min_size=4, max_size=8)
ROW = st.tuples(
    st.sampled_from([256, 1024, 4096]),
    st.sampled_from(["qkv", "fc2"]),
    st.sampled_from([1, 2]),
    st.sampled_from(["eager", "graph"]),
    st.sampled_from(["bf16", "fp8"]),
)
ROWS = st.dictionaries(
    ROW, st.tuples(TIMES, st.sampled_from(["ok", "ok", "ok", "oom", "error"])), min_size=1, max_size=30
)


def rows_of(drawn):
    rows = []
    for (tokens, name, tp, timing, precision), (times, status) in drawn.items():
        more = {"samples_ms": tuple(times)} if status == "ok" else {"message": "no"}
        rows.append(
            Row("llm", "row", (64, 64), tokens, "module", timing, precision, status, name, tp, in_turns=True, **more)
        )
    return rows


@settings(max_examples=25, deadline=None)
@given(ROWS, st.randoms(use_true_random=False), st.integers(1, 4))
def test_same_evidence_same_bytes_in_any_order(drawn, draw, pieces):
    rows = rows_of(drawn)
    whole = merged(report(rows))
    draw.shuffle(rows)
    parts = [report(rows[start::pieces], where=f"{start}.json") for start in range(pieces)]
    draw.shuffle(parts)
    split = merge_reports(parts)
    assert split.policy.to_json() == whole.policy.to_json()
    assert split.findings == whole.findings
    assert read_policy(json.loads(whole.policy.to_json())).to_json() == whole.policy.to_json()
    assert whole.policy.to_thresholds().to_json() == split.policy.to_thresholds().to_json()


@settings(max_examples=25, deadline=None)
@given(ROWS, st.floats(0.8, 1.3))
def test_a_win_has_won_in_every_way_it_was_timed(drawn, threshold):
    rows = rows_of(drawn)
    policy = merge_reports([report(rows)], speedup_threshold=threshold).policy
    result = {row.key: row for row in rows}
    for rule in policy.rules:
        for point in rule.points:
            here = [row for row in rows if row.layer_key == rows_key(rule) and row.tokens == point.tokens]
            verdicts = []
            for row in here:
                bf16, fp8 = (result.get((*row.key[:-1], precision)) for precision in ("bf16", "fp8"))
                if not (bf16 and fp8 and bf16.status == fp8.status == "ok"):
                    verdicts.append("none")
                    continue
                interval = speedup_interval(bf16.samples_ms, fp8.samples_ms, in_turns=True)
                verdicts.append(interval.answer(threshold))
            assert (point.answer == "win") is all(verdict == "win" for verdict in verdicts)
            if "lose" in verdicts and "none" not in verdicts:
                assert point.answer == "lose"
            decision = should_use_fp8(policy, "row", point.tokens, name=rule.name, tp=rule.tp)
            assert decision.use_fp8 is (point.answer == "win")
        assert all(before[1] < after[0] for before, after in pairwise(rule.bands))


def rows_key(rule):
    return (rule.part, rule.kind, rule.name, rule.shape, rule.tp, None, None, rule.gemm)


@settings(max_examples=30, deadline=None)
@given(ROWS)
def test_version_1_is_never_bolder_than_version_2(drawn):
    policy = merged(report(rows_of(drawn))).policy
    thresholds = policy.to_thresholds()
    largest = max(point.tokens for rule in policy.rules for point in rule.points)
    for rule in policy.rules:
        last = rule.points[-1].tokens
        for tokens in {point.tokens for point in rule.points} | {300, 2000, largest}:
            if tokens <= last and should_use_fp8(thresholds, "row", tokens, name=rule.name, tp=rule.tp):
                assert should_use_fp8(policy, "row", tokens, name=rule.name, tp=rule.tp)
