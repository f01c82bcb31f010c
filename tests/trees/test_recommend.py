"""The advice: decided by a table of figures, and measured without switching anything on."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from bitplan.trees import TreesError, recommend_gradient_precision
from bitplan.trees.gradients import GradientPrecision
from bitplan.trees.recommend import PrecisionSeen, TableSeen, advise
from tests.trees.samples import table

F32, I16, I8 = GradientPrecision


@pytest.mark.parametrize(
    ("f32", "i16", "i8", "expected"),
    [
        (((2.0, 2.1), 1.0), ((1.0, 1.1), 1.0), ((1.5, 1.5), 1.0), I16),
        (((2.0, 2.1), 1.0), ((1.5, 1.5), 1.0), ((1.0, 1.1), 1.0), I8),
        (((2.0, 2.1), 1.0), ((1.5, 1.5), 1.0), ((1.0, 1.1), 1.0101), I16),  # i8 is worse by more than 1%
        (((2.0, 2.1), 1.0), ((1.0, 1.1), 1.01), ((3.0, 3.0), 1.0), I16),  # exactly 1%
        (((2.0, 2.1), 1.0), ((1.0, 2.0), 1.0), ((1.0, 2.0), 1.0), F32),  # one turn was no faster
        (((2.0, 2.1), 0.0), ((1.0, 1.0), 0.0), ((1.5, 1.5), 0.0), I16),
    ],
)
def test_decision(f32, i16, i8, expected):
    rows = zip((F32, I16, I8), (f32, i16, i8), strict=True)
    seen = [PrecisionSeen(precision, *figures, setup_s=3.0) for precision, figures in rows]
    advice = advise(seen, TableSeen(rows=1000, features=5, threads=2, rounds=100))
    assert advice.precision is expected
    assert advice.reason in str(advice)
    assert len(advice.seen) == 3
    assert advice.fit_seconds[F32] == 3.0 + 100 * 2.05
    assert "1,000 rows, 5 features, 2 threads" in str(advice)


@pytest.mark.parametrize("is_class", [False, True])
def test_it_measures_every_precision(is_class):
    x, y = table(600)
    if is_class:  # a frame keeps its categories
        x = pd.DataFrame(x, columns=list("abcde")).assign(e=pd.Categorical(np.where(x[:, 4] > 0, "high", "low")))
    advice = recommend_gradient_precision(
        x, np.where(y > 0, "a", "b") if is_class else y, sample_rows=400, trees=2, n_jobs=1
    )
    assert [one.precision for one in advice.seen] == [F32, I16, I8]
    assert all(len(one.seconds) == 3 and one.loss > 0 and one.setup_s > 0 for one in advice.seen)
    assert (advice.table.rows, advice.table.features, advice.table.threads, advice.table.rounds) == (600, 5, 1, 100)


def test_too_few_rows_are_refused():
    x, y = table(50)
    with pytest.raises(TreesError, match="at least 100 rows"):
        recommend_gradient_precision(x, y)
