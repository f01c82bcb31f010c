"""What every fitted estimator offers: importances, rounds, stages of its predictions, files.

Contributions of features to raw scores: exact Shapley values, by the rows that training sent through each node.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from bitplan.base.loops.jit import on_threads, use_threads
from bitplan.base.optional import require
from bitplan.trees.checks import one_of, whole_number
from bitplan.trees.gradients import Array
from bitplan.trees.lightgbm_text import to_lightgbm_text
from bitplan.trees.loops.predict import add_contributions
from bitplan.trees.objectives import Objective
from bitplan.trees.save import save_trees
from bitplan.trees.scikit import BaseEstimator, check_is_fitted
from bitplan.trees.tables import on_device
from bitplan.trees.threads import threads_for, threads_of
from bitplan.trees.tree import Booster, Forest, Tree

# ---- contributions ---------------------------------------------------------------------------------------------------


ROWS_AT_ONCE = 256


def contributions(booster: Booster, x: Array) -> Array:
    """Contributions, (rows, (features + 1) * outputs), as LightGBM's `pred_contrib`: for each output what each feature
    adds to its raw score, then the mean raw score of the training rows. A row's numbers sum to its raw score."""
    width = booster.features + 1
    out = np.zeros((len(x), booster.outputs, width))
    out[:, :, -1] = booster.start
    paths = [_Paths.of(tree) for tree in booster.trees]
    forest = booster.forest()
    nodes = forest.feature, forest.threshold, forest.missing_left, forest.category, forest.bits
    for number, tree in enumerate(booster.trees):
        out[:, number % booster.outputs, -1] += np.average(tree.leaf_value, weights=_rows_of(tree))

    def work(start: int) -> None:
        rows = x[start : start + ROWS_AT_ONCE]
        for number, (tree, path) in enumerate(zip(booster.trees, paths, strict=True)):
            if tree.leaves > 1:
                into = out[start : start + ROWS_AT_ONCE, number % booster.outputs]
                add_contributions(rows, forest.roots[number], *nodes, tree.leaf_value, *path.arrays, into)

    on_threads(work, range(0, len(x), ROWS_AT_ONCE))
    return out.reshape(len(x), booster.outputs * width)


@dataclass(frozen=True)
class _Paths:
    """All trees' leaves as arrays for `add_contributions`: each leaf's features on its path, and their conditions."""

    arrays: tuple[Array, Array, Array, Array, Array, Array]

    @classmethod
    def of(cls, tree: Tree) -> _Paths:
        leaf_rows = _rows_of(tree)
        node_rows = np.zeros(len(tree.feature))
        for node in range(len(tree.feature) - 1, -1, -1):  # children come after their parents
            for child in (tree.left[node], tree.right[node]):
                node_rows[node] += node_rows[child] if child >= 0 else leaf_rows[~child]
        above: dict[int, list[tuple[int, bool]]] = {0: []}
        leaves: dict[int, list[tuple[int, bool]]] = {0: []} if tree.leaves == 1 else {}
        for node in range(len(tree.feature)):
            for child, is_left in ((int(tree.left[node]), True), (int(tree.right[node]), False)):
                (above if child >= 0 else leaves)[child if child >= 0 else ~child] = [*above[node], (node, is_left)]
        part_starts, part_feature, part_share, step_starts, steps = [0], [], [], [0], []
        for leaf in range(tree.leaves):
            parts: dict[int, list[tuple[int, bool]]] = {}
            for node, is_left in leaves[leaf]:
                parts.setdefault(int(tree.feature[node]), []).append((node, is_left))
            for feature, on_path in parts.items():
                shares = []
                for node, is_left in on_path:
                    child = tree.left[node] if is_left else tree.right[node]
                    shares.append((node_rows[child] if child >= 0 else leaf_rows[~child]) / node_rows[node])
                part_feature.append(feature)
                part_share.append(float(np.prod(shares)))
                steps += on_path
                step_starts.append(len(steps))
            part_starts.append(len(part_feature))
        return cls(
            (
                np.array(part_starts, np.int64),
                np.array(part_feature, np.int64),
                np.array(part_share, np.float64),
                np.array(step_starts, np.int64),
                np.array([node for node, _ in steps], np.int64),
                np.array([is_left for _, is_left in steps], np.bool_),
            )
        )


def _rows_of(tree: Tree) -> Array:
    """Rows of each leaf; as if each had one where a model says that none had any."""
    return tree.leaf_rows if tree.leaf_rows.any() else np.ones(tree.leaves, np.int64)


# ---- fitted ----------------------------------------------------------------------------------------------------------


IMPORTANCES = ("gain", "split")
TREES_AT_ONCE = 64  # whose leaves are looked up together
SPLIT_COLUMNS = ("threshold", "missing_left", "left", "right", "gain")  # of a table of trees


class FittedTrees(BaseEstimator):  # type: ignore[misc]
    """The part of all estimators that works on a fitted model: it predicts, explains, saves and exports."""

    file_kind: str  # what a file calls the estimator
    booster_: Booster
    n_features_in_: int
    classes_: Array  # a classifier's
    categories_: dict[int, list[Any]]  # by the place of a feature: what its numbers stand for
    importance_type: str
    n_jobs: int | None
    n_outputs_ = 1  # targets of a row

    def _read(self, x: Any) -> Array:
        raise NotImplementedError

    def _is_plain(self, x: Any) -> bool:
        raise NotImplementedError

    def _objective(self) -> Objective:
        raise NotImplementedError

    def _refuse_changed(self) -> None:
        """Refuse to write a model whose settings say another objective than the one it was fitted with."""

    @property
    def feature_importances_(self) -> Array:
        """Each feature's share of the gain of all splits, or of their number (`importance_type`)."""
        check_is_fitted(self)
        total = self.booster_.importances(one_of("importance_type", self.importance_type, IMPORTANCES))
        return total / total.sum() if total.any() else total

    @property
    def n_iter_(self) -> int:
        """Rounds in the model, after early stopping."""
        check_is_fitted(self)
        return self.booster_.rounds

    @property
    def best_iteration_(self) -> int | None:
        """Rounds that the model had when what is watched was best; None if nothing was watched."""
        check_is_fitted(self)
        return self.booster_.best_rounds

    @property
    def evals_result_(self) -> dict[str, dict[str, list[float]]]:
        """Each watched set's metrics by round: {"valid_0": {"binary": [...]}}. Files do not hold them."""
        check_is_fitted(self)
        return self.booster_.evals

    def save(self, path: str | Path) -> None:
        """Write the model as JSON, atomically."""
        check_is_fitted(self)
        self._refuse_changed()
        save_trees(self, path)

    def to_lightgbm(self) -> str:
        """The model in LightGBM's text format: `lightgbm.Booster(model_str=...)` predicts the same."""
        check_is_fitted(self)
        self._refuse_changed()
        return to_lightgbm_text(self)

    def first_rounds(self, rounds: int) -> Self:
        """A copy of the model with its first rounds alone, which predicts, explains, is saved and exported as it is."""
        check_is_fitted(self)
        booster = self.booster_
        count = whole_number("rounds", rounds, 0, booster.rounds)
        model = copy.copy(self)
        model.booster_ = booster.first_rounds(count)
        return model

    def apply(self, X: Any) -> Array:
        """The leaf of each row in each tree, (rows, trees), as LightGBM's `pred_leaf`; classes take turns."""
        check_is_fitted(self)
        table, trees = np.asarray(self._read(X)), self.booster_.trees
        leaves = np.zeros((len(table), len(trees)))
        numbered = [replace(tree, leaf_value=np.arange(tree.leaves, dtype=np.float64)) for tree in trees]
        with use_threads(threads_of(self.n_jobs)):
            for first in range(0, len(trees), TREES_AT_ONCE):
                part = numbered[first : first + TREES_AT_ONCE]
                into = np.zeros((len(table), len(part)))
                Forest.of(part, len(part)).add_to(into, table)
                leaves[:, first : first + len(part)] = into
        return leaves.astype(np.int32)

    def trees_to_dataframe(self) -> Any:
        """All trees as a pandas frame, a row for each split and each leaf; `node` and `leaf` number those of a tree
        apart, and `left` and `right` below zero are the leaf ~left."""
        check_is_fitted(self)
        pandas = require("pandas", purpose="trees_to_dataframe")
        names = list(getattr(self, "feature_names_in_", range(self.n_features_in_)))
        rows = []
        for number, tree in enumerate(self.booster_.trees):
            at = {"tree": number, "output": number % self.booster_.outputs}
            both = ("node", "value", "weight", "rows"), ("leaf", "value", "weight", "rows")
            splits = np.arange(len(tree.feature)), tree.node_value, tree.node_weight, tree.node_rows
            leaves = np.arange(tree.leaves), tree.leaf_value, tree.leaf_weight, tree.leaf_rows
            for node, numbers in enumerate(zip(*splits, strict=True)):
                categories = tree.categories[node]
                split = {name: getattr(tree, name)[node] for name in SPLIT_COLUMNS}
                split |= {
                    "feature": names[tree.feature[node]],
                    "categories": None if categories is None else categories.tolist(),
                }
                rows.append({**at, **dict(zip(both[0], numbers, strict=True)), **split})
            rows += [{**at, **dict(zip(both[1], numbers, strict=True))} for numbers in zip(*leaves, strict=True)]
        return pandas.DataFrame(rows)

    def _scores(self, x: Any) -> Array:
        """Raw scores (rows, outputs)."""
        if "booster_" not in vars(self):  # scikit-learn's own look takes as long as the trees of one row
            check_is_fitted(self)
        booster = self.booster_
        scores_on_gpu = self._scores_there(x)
        if scores_on_gpu is not None:
            return scores_on_gpu
        # The loops look at the numbers of a plain array, too: another look takes longer than many threads do.
        is_plain = bool(booster.trees) and self._is_plain(x)
        table = x if is_plain else self._read(x)
        parts = booster.forest().parts(len(table))
        scores, has_infinity = booster.scores_checked(table, min(parts, threads_for(self.n_jobs, parts)))
        if is_plain and has_infinity:
            self._read(x)  # refuses it
        return scores

    def _scores_there(self, x: Any) -> Array | None:
        """Raw scores of a table on a GPU, computed there; None: the host reads it, and says what is wrong with it."""
        table = None if type(x) is np.ndarray else on_device(x)
        if table is None or not self.booster_.trees or self.categories_ or hasattr(self, "feature_names_in_"):
            return None
        if importlib.util.find_spec("triton") is None:
            return None
        from bitplan.trees.cuda.predict import can_predict, scores_there

        if not can_predict(table) or table.shape[1] != self.n_features_in_ or table.isinf().any():
            return None
        return scores_there(self.booster_, table)

    def _contributions(self, x: Any) -> Array:
        check_is_fitted(self)
        with use_threads(threads_of(self.n_jobs)):
            return contributions(self.booster_, np.asarray(self._read(x)))

    def _staged_scores(self, x: Any) -> Iterator[Array]:
        """Raw scores after each round; the last are those of the whole model, to the bit."""
        check_is_fitted(self)
        booster, table = self.booster_, np.asarray(self._read(x))
        scores = np.tile(booster.start, (len(table), 1))
        for first in range(0, len(booster.trees), booster.outputs):
            with use_threads(threads_of(self.n_jobs)):
                Forest.of(booster.trees[first : first + booster.outputs], booster.outputs).add_to(scores, table)
            yield scores.copy()
