"""Pictures: what is drawn, on axes that write down what they are asked; and matplotlib that is not there."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from bitplan.base.errors import MissingLibraryError
from bitplan.trees import BoostedTreesRegressor, TreesError, plot_importance, plot_tree
from tests.trees.samples import table


class Axes:
    """matplotlib's, as far as they are used."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments, **_: self.calls.append((name, arguments))

    def texts(self):
        return [arguments[2] for name, arguments in self.calls if name == "text"]


@pytest.fixture
def model():
    x, y = table(300)
    frame = pd.DataFrame(x, columns=list("abcde"))
    frame["e"] = pd.Categorical(np.where(x[:, 4] > 0, "high", "low"))
    return BoostedTreesRegressor(n_estimators=3, max_leaves=4).fit(frame, y + 3 * (x[:, 4] > 0))


def test_bars_and_a_tree(model):
    axes = Axes()
    assert plot_importance(model, axes, kind="split", most=2) is axes
    ((_, (names, totals)),) = [call for call in axes.calls if call[0] == "barh"]
    assert len(names) == 2
    assert names[-1] == "abcde"[int(model.booster_.importances("split").argmax())]
    assert totals.tolist() == sorted(totals)
    axes = Axes()
    plot_tree(model, 0, axes)
    texts = axes.texts()
    assert any(text.startswith("e in ") and ("high" in text or "low" in text) for text in texts)
    values = [f"{value:.4g}\n{rows} rows" for value, rows in zip(*leaves(model), strict=True)]
    assert set(values) <= set(texts)
    with pytest.raises(TreesError, match="number: the model has trees 0 to 2, got 3"):
        plot_tree(model, 3)


def leaves(model):
    tree = model.booster_.trees[0]
    return tree.leaf_value, tree.leaf_rows


def test_a_picture_is_as_large_as_its_tree(model, monkeypatch):
    sizes = []
    pyplot = SimpleNamespace(subplots=lambda figsize: (sizes.append(figsize), Axes()))
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(pyplot=pyplot))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    plot_tree(model)
    plot_importance(model, most=2)
    (wide, high), (_, bars) = sizes
    assert wide == pytest.approx(1.6 * 4 + 1)
    assert high == pytest.approx(1.2 * depth(model.booster_.trees[0]) + 1.5)
    assert bars == pytest.approx(0.4 * 2 + 1)


def depth(tree, node=0):
    return 0 if node < 0 else 1 + max(depth(tree, int(child)) for child in (tree.left[node], tree.right[node]))


def test_matplotlib_is_asked_for_in_one_line(model, monkeypatch):
    for module in ("matplotlib", "matplotlib.pyplot"):  # the second may be imported already
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingLibraryError, match=r"plot_tree needs matplotlib.*pip install"):
        plot_tree(model)
