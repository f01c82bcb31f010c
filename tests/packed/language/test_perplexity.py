"""The measuring code against a model whose probabilities are known: a table of which token follows which."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from bitplan.packed.checkpoints.causal_lm import windows_of
from bitplan.packed.language.perplexity import (
    CachedLogits,
    MeasureError,
    clustered_mean,
    measure_perplexity,
    round_activations,
    shared_twin,
    spread_windows,
    student_t_975,
)
from tests.processes import Program

VOCABULARY = 7


def table(seed: int) -> torch.Tensor:
    """P(next | token), float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64), dim=-1)


def bigram(probabilities: torch.Tensor):
    return lambda ids: probabilities.log()[ids]


def some_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def pairs_of(windows) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for window in windows for a, b in pairwise(window)]


# ---- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "context"), [(40, 8), (41, 8), (42, 8), (8, 8), (9, 2)])
def test_windows_hold_each_token_once_in_order(count, context):
    ids = torch.arange(count)
    windows = windows_of(ids, context)
    joined = torch.cat(windows)
    assert torch.equal(joined, ids[: len(joined)])
    assert count - len(joined) == (1 if count % context == 1 else 0)  # nothing to predict in a window of one token
    assert {len(window) for window in windows[:-1]} <= {context}


def test_a_limit_takes_whole_windows_spread_over_the_text():
    windows = windows_of(torch.arange(103), 10)
    taken = spread_windows(windows, 45)
    assert [int(window[0]) for window in taken] == [0, 20, 50, 70]
    assert len(spread_windows(windows, 10**9)) == 11


@pytest.mark.parametrize(
    ("ids", "context", "message"),
    [
        (torch.arange(10), 512, "the text has 10 tokens, and one window of context needs 512"),
        (torch.arange(0), 8, "the text has 0 tokens"),
        (torch.arange(10), 1, "context must be 2 tokens or more"),
        (torch.zeros(10), 4, "one row of integers, got torch.float32"),
        (torch.zeros(2, 10, dtype=torch.int64), 4, r"of shape \(2, 10\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(ids, context, message):
    with pytest.raises(MeasureError, match=message):
        windows_of(ids, context)


def test_a_limit_below_one_window_is_refused():
    with pytest.raises(MeasureError, match="a limit of 5 tokens is less than one window of context, 10"):
        spread_windows(windows_of(torch.arange(100), 10), 5)


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_perplexity_is_that_of_the_table(batch):
    probabilities, windows = table(1), windows_of(some_ids(8003), 20)
    result = measure_perplexity(bigram(probabilities), windows, batch=batch)
    expected = [-math.log(probabilities[a, b]) for a, b in pairs_of(windows)]
    assert result.tokens == len(expected) == 400 * 19 + 2
    assert result.windows == 401
    assert result.nll.mean == pytest.approx(sum(expected) / len(expected), rel=1e-13)
    assert result.perplexity == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-13)
    low, high = result.interval
    assert low < result.perplexity < high


def test_progress_is_told_window_by_window():
    counts = []
    measure_perplexity(bigram(table(1)), windows_of(some_ids(100), 20), batch=4, on_windows=counts.append)
    assert counts == [1] * 5


def test_distance_is_that_of_the_tables():
    ours, theirs, windows = table(1), table(2), windows_of(some_ids(600), 30)
    result = measure_perplexity(bigram(ours), windows, reference=bigram(theirs)).against
    pairs = pairs_of(windows)
    kl = [sum(float(p * (p / q).log()) for p, q in zip(theirs[a], ours[a], strict=True)) for a, _ in pairs]
    difference = [math.log(theirs[a, b] / ours[a, b]) for a, b in pairs]
    agreed = [bool(ours[a].argmax() == theirs[a].argmax()) for a, _ in pairs]
    assert result.kl.mean == pytest.approx(sum(kl) / len(kl), rel=1e-12)
    assert result.nll_difference.mean == pytest.approx(sum(difference) / len(difference), rel=1e-11)
    assert result.top1_agreement.mean == sum(agreed) / len(agreed)


def test_a_reference_is_at_no_distance_from_itself():
    windows = windows_of(some_ids(300), 30)
    result = measure_perplexity(bigram(table(1).float()), windows, reference=bigram(table(1).float())).against
    assert (result.kl.mean, result.kl.standard_error) == (0.0, 0.0)
    assert (result.nll_difference.mean, result.top1_agreement.mean) == (0.0, 1.0)


def test_pairing_is_far_tighter_than_two_perplexities():
    near = torch.softmax(table(1).log() + 0.01 * table(3), dim=-1)
    windows = windows_of(some_ids(900), 30)
    alone = measure_perplexity(bigram(near), windows)
    paired = measure_perplexity(bigram(near), windows, reference=bigram(table(1))).against
    assert paired.nll_difference.standard_error < alone.nll.standard_error / 50


def test_a_long_window_is_scored_in_pieces():
    probabilities, ids = table(4), some_ids(1000)
    whole = measure_perplexity(bigram(probabilities), [ids], reference=bigram(table(5)))
    expected = [-math.log(probabilities[a, b]) for a, b in pairs_of([ids])]
    assert whole.nll.mean == pytest.approx(sum(expected) / 999, rel=1e-13)
    assert whole.nll.standard_error is None  # one window: nothing to tell it by
    assert whole.interval is None
    assert whole.to_dict()["perplexity_interval"] is None


def test_kept_logits_are_computed_once_while_they_fit():
    asked = []

    def model(ids):
        asked.append(len(ids))
        return bigram(table(1))(ids)

    windows = windows_of(some_ids(60), 10)
    one = 10 * VOCABULARY * 8
    stored = CachedLogits(model, budget_bytes=4 * one)
    first = measure_perplexity(bigram(table(2)), windows, reference=stored, batch=2)
    assert sum(asked) == 6
    again = measure_perplexity(bigram(table(2)), windows, reference=stored, batch=3)
    assert sum(asked) == 8  # the two that did not fit
    assert first.to_dict() == again.to_dict()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_nan_is_named_by_window_and_token():
    def model(ids):
        logits = bigram(table(1))(ids)
        logits[(ids == 3) & (ids.roll(1, -1) == 5)] = float("nan")
        return logits

    ids = torch.zeros(50, dtype=torch.int64)
    ids[34:36] = torch.tensor([5, 3])
    with pytest.raises(MeasureError, match=r"int2: logits that are not finite in window 3, from its token 5 on"):
        measure_perplexity(model, windows_of(ids, 10), batch=2, name="int2")


def test_another_vocabulary_is_refused():
    wider = lambda ids: torch.zeros(*ids.shape, 9)
    with pytest.raises(MeasureError, match="a vocabulary of 7, the reference one of 9"):
        measure_perplexity(bigram(table(1)), windows_of(some_ids(20), 10), reference=wider)


def test_logits_of_another_shape_are_refused():
    with pytest.raises(MeasureError, match=r"expected logits of shape \(2, 10, 'vocabulary'\), got \(2, 7\)"):
        measure_perplexity(lambda ids: torch.zeros(len(ids), 7), windows_of(some_ids(20), 10))


def test_nothing_to_score_is_refused():
    with pytest.raises(MeasureError, match="no window of text"):
        measure_perplexity(bigram(table(1)), [])
    with pytest.raises(MeasureError, match="1 window or more, got 0"):
        measure_perplexity(bigram(table(1)), windows_of(some_ids(20), 10), batch=0)


# ---- standard errors -------------------------------------------------------------------------------------------------


def test_the_standard_error_is_that_of_a_population_of_windows():
    """Windows differ in subject (a shift shared by all their tokens) and in length; 2000 texts are drawn."""
    generator = torch.Generator().manual_seed(0)
    texts, windows, tokens = 2000, 24, 30
    counts = torch.randint(tokens // 2, tokens + 1, (texts, windows), generator=generator)
    shift = torch.randn(texts, windows, generator=generator)
    noise = torch.randn(texts, windows, tokens, generator=generator)
    inside = torch.arange(tokens) < counts.unsqueeze(-1)
    sums = ((3 + shift.unsqueeze(-1) + 2 * noise) * inside).sum(-1).double()
    result = [clustered_mean(row.tolist(), count.tolist()) for row, count in zip(sums, counts, strict=True)]
    means = torch.tensor([estimate.mean for estimate in result])
    errors = torch.tensor([estimate.standard_error for estimate in result])
    assert float(errors.mean()) == pytest.approx(float(means.std()), rel=0.05)
    assert all(estimate.interval is None for estimate in result)  # 540 tokens
    as_if_independent = math.sqrt(5 / (windows * 0.75 * tokens))
    assert as_if_independent < 0.6 * float(errors.mean())


def test_intervals_hold_what_a_fresh_text_gives_though_neighbouring_windows_are_alike():
    """Windows of 128 tokens that correlate by 0.47, as those of prose: 600 texts of 64, each against another."""
    generator, texts, windows = torch.Generator().manual_seed(1), 600, 64
    steps = torch.randn(2 * texts, windows + 50, generator=generator, dtype=torch.float64)
    for at in range(1, steps.shape[1]):
        steps[:, at] += 0.47 * steps[:, at - 1]
    sums = 128 * (5 + steps[:, 50:])
    result = [clustered_mean(row.tolist(), [128] * windows) for row in sums]
    pairs = list(zip(result[::2], result[1::2], strict=True))
    covered = sum(abs(fresh.mean - one.mean) <= math.sqrt(2) * one.half_width for one, fresh in pairs) / texts
    assert 0.93 < covered < 0.999
    by_window = [abs(fresh.mean - one.mean) <= math.sqrt(2) * 2 * one.standard_error for one, fresh in pairs]
    assert sum(by_window) / texts < 0.8


def test_a_short_text_has_no_interval():
    """Two windows had one of 13 standard errors to each side."""
    assert clustered_mean([1.0, 2.0], [511, 511]).interval is None
    assert clustered_mean([1.0, 2.0], [511, 511]).standard_error is not None
    assert clustered_mean([1.0, 2.0, 1.5, 1.2, 1.1, 1.4, 1.3, 1.0], [511] * 8).interval is not None
    assert clustered_mean([0.1] * 100, [15] * 100).interval is None  # 1,500 tokens in many windows


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (23, 2.069), (999, 1.962)]
)
def test_student_t(freedom, value):
    assert student_t_975(freedom) == pytest.approx(value, rel=2e-3)


# ---- the noise floor -------------------------------------------------------------------------------------------------


def test_a_twin_shares_numbers_and_nothing_else():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    twin = shared_twin(model)
    assert twin[0].weight is model[0].weight
    assert twin[1].running_mean is model[1].running_mean
    round_activations(twin)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(twin(x), model(x))


def test_activations_are_rounded_but_for_what_is_kept():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    expected = model[1](model[0](x).bfloat16().float())
    round_activations(model, keep=[model[1]])
    assert torch.equal(model(x), expected)


def test_measuring_does_not_load_transformers(tmp_path):
    code = (
        "import sys\n"
        "ours = 'bitplan.packed.language'\n"
        "for name in [name for name in sys.modules if name.startswith((ours, 'transformers'))]:\n"
        "    del sys.modules[name]\n"
        "import bitplan.packed.checkpoints.causal_lm, bitplan.packed.language.compare_on_text\n"
        "assert 'transformers' not in sys.modules"
    )
    program = Program(code, folder=tmp_path)
    assert program.wait() == 0, program.errors
