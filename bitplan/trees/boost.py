"""Boosting: round after round, gradients at the scores so far, a tree for each output, new scores.

Nothing here knows about estimators, classes or files; a `Booster` is what they save, export and predict with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from bitplan.kernels import trees_gradients, trees_rows
from bitplan.kernels.jit import on_threads
from bitplan.trees.binning import bin_rows, find_bins
from bitplan.trees.gradients import Array, GradientPrecision, GradientsF32, prepare
from bitplan.trees.grow import Grown, GrowthRules, TreeGrower, newton_step
from bitplan.trees.objectives import Objective
from bitplan.trees.tree import Forest, Tree

NO_WEIGHTS = np.empty(0)


@dataclass(frozen=True)
class BoostSettings:
    """How to boost; `rules` says what each tree may look like."""

    rules: GrowthRules
    rounds: int
    learning_rate: float
    max_bins: int
    precision: GradientPrecision
    stochastic: bool
    renew_leaves: bool
    row_share: float
    column_share: float
    seed: int
    patience: int | None  # rounds without a better validation loss; None: all rounds are grown


@dataclass(frozen=True)
class Rows:
    """Features, targets and weights (none: empty)."""

    x: Array
    y: Array
    weights: Array = field(default_factory=lambda: NO_WEIGHTS)


@dataclass
class Booster:
    """Starting scores and trees, `outputs` of them a round."""

    start: Array
    features: int
    trees: list[Tree] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # on the validation rows, a number a round
    _forest: tuple[int, Forest] | None = field(default=None, repr=False, compare=False)

    @property
    def outputs(self) -> int:
        return len(self.start)

    @property
    def rounds(self) -> int:
        return len(self.trees) // self.outputs

    def scores(self, x: Array) -> Array:
        """Raw scores (rows, outputs)."""
        scores = np.tile(self.start, (len(x), 1))
        self.forest().add_to(scores, x)
        return scores

    def forest(self) -> Forest:
        """The trees laid out for prediction, kept until their number changes."""
        if self._forest is None or self._forest[0] != len(self.trees):
            self._forest = len(self.trees), Forest.of(self.trees, self.outputs)
        return self._forest[1]

    def importances(self) -> Array:
        """The gain of every feature's splits, as shares."""
        total = np.zeros(self.features)
        for tree in self.trees:
            np.add.at(total, tree.feature, tree.gain)
        return total / total.sum() if total.any() else total


def boost(
    rows: Rows,
    categorical: Array,
    objective: Objective,
    settings: BoostSettings,
    validation: Rows | None = None,
    after_round: Callable[[int], None] = lambda _: None,
    booster_made: Callable[[Booster], None] = lambda _: None,
) -> Booster:
    """Fit; `booster_made` gets the booster before its first tree, so that Ctrl-C leaves the caller the whole rounds."""
    bins = find_bins(rows.x, categorical, settings.max_bins, settings.seed)
    grower = TreeGrower(bin_rows(rows.x, bins), bins, settings.rules)
    booster = Booster(objective.start(rows.y, rows.weights), rows.x.shape[1])
    booster_made(booster)
    trainer = _Trainer(rows, objective, settings, grower, booster.start)
    watched = None if validation is None else np.tile(booster.start, (len(validation.x), 1))
    for number in range(settings.rounds):
        new = trainer.round(number)
        if validation is not None and watched is not None:
            Forest.of(new, booster.outputs).add_to(watched, validation.x)
            booster.losses.append(objective.loss(validation.y, watched, validation.weights))
        booster.trees += new
        after_round(number)
        best = int(np.argmin(booster.losses)) if booster.losses else number
        if settings.patience is not None and number - best >= settings.patience:
            break
    if settings.patience is not None and booster.losses:
        del booster.trees[(int(np.argmin(booster.losses)) + 1) * booster.outputs :]
    return booster


class _Trainer:
    def __init__(
        self, rows: Rows, objective: Objective, settings: BoostSettings, grower: TreeGrower, start: Array
    ) -> None:
        self._rows, self._objective, self._settings, self._grower = rows, objective, settings, grower
        count = len(rows.x)
        self._scores = np.tile(start, (count, 1))
        self._grads = np.empty((len(start), count), np.float32)
        self._hess = np.empty_like(self._grads)
        self._order = np.empty(count, np.uint32)  # the rows of a tree, leaf after leaf

    def round(self, number: int) -> list[Tree]:
        """The trees of one round; scores are updated once all are grown."""
        with np.errstate(over="ignore"):
            self._objective.gradients(self._rows.y, self._scores, self._rows.weights, self._grads, self._hess)
        used, unused = self._sample_rows(number)
        trees = []
        for output in range(len(self._grads)):
            words = np.random.SeedSequence([self._settings.seed, number, output]).generate_state(2, np.uint64)
            gradients = prepare(
                self._grads[output],
                self._hess[output],
                self._settings.precision,
                int(words[0]) if self._settings.stochastic else None,
            )
            order = self._order[: len(used)]
            order[:] = used
            grown = self._grower.grow(gradients, order, self._sample_columns(int(words[1])))
            tree = self._with_final_values(grown, output)
            self._add_scores(tree, grown, unused, output)
            trees.append(tree)
        return trees

    def _sample_rows(self, number: int) -> tuple[Array, Array]:
        count = len(self._rows.x)
        everyone = np.arange(count, dtype=np.uint32)
        if self._settings.row_share >= 1:
            return everyone, everyone[:0]
        draws = np.random.default_rng([self._settings.seed, number]).random(count)
        is_used = draws < self._settings.row_share
        if not is_used.any():
            is_used[np.argmin(draws)] = True
        return everyone[is_used], everyone[~is_used]

    def _sample_columns(self, seed: int) -> Array:
        count = self._rows.x.shape[1]
        wanted = max(1, math.ceil(count * self._settings.column_share - 1e-9))
        if wanted == count:
            return np.arange(count)
        return np.sort(np.random.default_rng(seed).choice(count, wanted, replace=False))

    def _with_final_values(self, grown: Grown, output: int) -> Tree:
        values = self._renewed(grown, output)
        rate = self._settings.learning_rate
        return replace(grown.tree, leaf_value=values * rate, node_value=grown.tree.node_value * rate)

    def _renewed(self, grown: Grown, output: int) -> Array:
        """Leaf values from full-precision gradients, or by the objective's own rule."""
        weights, leaves = self._rows.weights, list(zip(grown.leaf_rows, grown.leaf_bounds, strict=True))
        if self._objective.renew(np.zeros(1), np.ones(1)) is not None:
            residuals = self._rows.y - self._scores[:, output]

            def by_rule(leaf: tuple[Array, tuple[float, float]]) -> float:
                rows, (low, high) = leaf
                value = self._objective.renew(residuals[rows], weights[rows] if len(weights) else weights)
                assert value is not None
                return min(max(value, low), high)

            return np.array([by_rule(leaf) for leaf in leaves])
        if not self._settings.renew_leaves:
            return grown.tree.leaf_value
        full = GradientsF32.from_floats(self._grads[output], self._hess[output])

        def by_step(leaf: tuple[Array, tuple[float, float]]) -> float:
            rows, bounds = leaf
            grad, hess = trees_gradients.sum_rows(rows, full.grads, full.hessians, full.grad_scale, full.hess_scale)
            return newton_step(grad, hess, self._settings.rules, bounds)

        return np.array(on_threads(by_step, leaves))

    def _add_scores(self, tree: Tree, grown: Grown, unused: Array, output: int) -> None:
        scores = self._scores[:, output]
        on_threads(
            lambda leaf: trees_rows.add_to_rows(scores, *leaf), list(zip(grown.leaf_rows, tree.leaf_value, strict=True))
        )
        if not len(unused):
            return
        if tree.leaves == 1:
            scores[unused] += tree.leaf_value[0]
            return
        columns = self._grower.columns
        trees_rows.add_binned_tree(
            columns, unused, tree.feature, grown.left_bins, tree.left, tree.right, tree.leaf_value, scores
        )
