"""Boosting: round after round, gradients at the scores so far, a tree for each output, new scores.

Nothing here knows about estimators, classes or files; a `Booster` is what they save, export and predict with.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from bitplan.base.loops import row_pieces
from bitplan.base.loops.jit import on_threads, thread_count, use_threads
from bitplan.base.optional import require
from bitplan.trees.binning import SAMPLE_ROWS, Bins, bin_rows, find_bins
from bitplan.trees.checks import number
from bitplan.trees.distributed.shards import ALONE, Shards, Span
from bitplan.trees.gradients import NO_WEIGHTS, Array, GradientPrecision, Gradients, TreesError, prepare, units
from bitplan.trees.grow import Grown, GrowthRules, TreeGrower, newton_steps
from bitplan.trees.loops import gradients as trees_gradients
from bitplan.trees.loops import rows as trees_rows
from bitplan.trees.objectives import Metric, Objective
from bitplan.trees.pieces import TablePieces
from bitplan.trees.tree import Booster, Forest, Tree

DEVICES = ("cpu", "cuda")
ADD_NS = 2.0  # of a row: to add its leaf's value
LARGE_SHARE = 2 / 3  # of rows drawn by gradient, as in LightGBM's GOSS: 0.2 of all rows, beside 0.1 of the others
FEW_CODES = 8  # a leaf whose hessian is less is wrong by a third or more
SUM_NS = 3.0  # of a row: to add its gradient and hessian to its leaf
DROP_KEY = 2**31  # beside seed and round: draws of rounds that are left out are no others'


@dataclass(frozen=True)
class Dropout:
    """DART: in a round that is not skipped, earlier ones are left out while its trees grow."""

    rate: float  # share of earlier rounds, on average
    most: int
    skip: float  # share of rounds that leave none out


@dataclass(frozen=True)
class BoostSettings:
    """The settings of boosting; `rules` limits what each tree may look like."""

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
    device: str = "cpu"
    by_gradient: bool = False  # rows of large gradients are drawn first
    dropout: Dropout | None = None  # None: plain gradient boosting


@dataclass(frozen=True)
class Rows:
    """Features, targets and weights (none: empty), and scores (rows, outputs) to begin with (None: the objective's)."""

    x: Array | TablePieces
    y: Array
    weights: Array = field(default_factory=lambda: NO_WEIGHTS)
    first_scores: Array | None = None

    def at(self, rows: Array) -> Rows:
        """Some of the rows, by their numbers or by a mask."""
        weights = self.weights[rows] if len(self.weights) else self.weights
        return Rows(self.x[rows], self.y[rows], weights, None if self.first_scores is None else self.first_scores[rows])


def with_weight(rows: Rows) -> Rows:
    """The rows but those of weight zero: these must not count in bins or leaves either."""
    if not len(rows.weights) or rows.weights.all():
        return rows
    return rows.at(rows.weights > 0)


def split_rows(rows: Rows, share: float, seed: int, shards: Shards = ALONE) -> tuple[Rows, Rows]:
    """Rows to fit and rows to watch: of all rows the same ones, however these are divided among processes."""
    span = Span.of(len(rows.x), shards)
    count = span.total
    watched = math.ceil(count * number("validation_fraction", share, 0, 1, above=True))
    if not 0 < watched < count:
        raise TreesError(
            f"validation_fraction: {share} of {count} rows leaves none to fit or none to watch; give eval_set, or set "
            "early_stopping_rounds=None"
        )
    order = np.random.default_rng([seed, 1]).permutation(count)
    is_held = np.zeros(count, np.bool_)
    is_held[order[:watched]] = True
    is_held = is_held[span.first : span.first + len(rows.x)]
    return rows.at(np.flatnonzero(~is_held)), rows.at(np.flatnonzero(is_held))


@dataclass(frozen=True)
class EvalSet:
    """Rows that are watched while training goes on, and the metrics to compute after each round."""

    name: str
    rows: Rows
    metrics: tuple[Metric, ...]


def boost(
    rows: Rows,
    categorical: Array,
    objective: Objective,
    settings: BoostSettings,
    watched: Sequence[EvalSet] = (),
    after_round: Callable[[int], bool] = lambda _: False,
    booster_made: Callable[[Booster], None] = lambda _: None,
    shards: Shards = ALONE,
    initial: Booster | None = None,
) -> Booster:
    """Fit; `booster_made` gets the booster before its first tree, so that Ctrl-C leaves the caller the whole rounds.

    watched      early stopping looks at the first metric of the last set
    after_round  gets the number of the round, and says whether to stop
    shards       the processes among which all rows are divided; `rows` and `watched` are this one's
    initial      a model to train further: what follows is what would have followed there
    """
    span = Span.of(len(rows.x), shards)
    if settings.by_gradient and (settings.device != "cpu" or shards.count > 1):
        raise TreesError("sampling: rows are drawn by gradient on the CPU, in one process; set sampling='uniform'")
    _refuse_dropout(rows, settings, initial)
    grow_on = _grower_of(settings, shards)
    bins = find_bins(rows.x, categorical, settings.max_bins, settings.seed, span)
    if len(rows.x) > SAMPLE_ROWS:
        from bitplan.base.hardware import give_back_memory

        give_back_memory()
    if rows.first_scores is not None:
        booster = Booster(np.zeros(objective.outputs), rows.x.shape[1])
    elif initial is None:
        booster = Booster(objective.start(rows.y, rows.weights, shards), rows.x.shape[1])
    else:
        booster = Booster(initial.start, initial.features, list(initial.trees), rounds_before=initial.rounds)
    with _compiling(settings.device):
        grower = grow_on(_binned(rows.x, bins, objective, settings), bins, settings.rules, shards)
        row_scores = _scores_of(rows, objective, settings, grower, _first_scores(rows, booster), span)
    booster_made(booster)
    trainer = _Trainer(rows, settings, grower, row_scores, span, booster.outputs)
    shards.sent_for("bins and start")
    watched = [replace(one_set, rows=replace(one_set.rows, x=np.asarray(one_set.rows.x))) for one_set in watched]
    scores = [_first_scores(one_set.rows, booster) for one_set in watched]
    shares = np.empty(0)  # of each round's step, what is left of it
    for round_number in range(settings.rounds):
        number = booster.rounds_before + round_number
        dropped = dropped_rounds(settings, number, shares)
        left_out, share = booster.of_rounds(dropped) if len(dropped) else None, 1 / (len(dropped) + 1)
        new = trainer.round(number, left_out, share)
        if left_out is not None:
            for one_set, sums in zip(watched, scores, strict=True):
                sums -= left_out.scores(one_set.rows.x) * share
        losses = [_watch(one_set, sums, new, booster, shards) for one_set, sums in zip(watched, scores, strict=True)]
        booster.losses += losses[-1:]
        if settings.dropout is not None:
            shares[dropped] *= 1 - share
            shares = np.append(shares, share)
        booster.add_round(new, dropped, 1 - share)
        is_last = after_round(round_number)
        since_best = len(booster.losses) - 1 - int(np.argmin(booster.losses)) if booster.losses else 0
        if is_last or (settings.patience is not None and since_best >= settings.patience):
            break
    if settings.patience is not None and booster.best_rounds is not None:
        del booster.trees[booster.best_rounds * booster.outputs :]
    return booster


def _refuse_dropout(rows: Rows, settings: BoostSettings, initial: Booster | None) -> None:
    if settings.dropout is None:
        return
    stops_early = settings.patience is not None
    reasons = {
        "begins a new model; leave init_model and warm_start out": initial is not None,
        "predicts its rows again; give a table in memory": not isinstance(rows.x, np.ndarray),
        "grows trees on the CPU; set device='cpu'": settings.device != "cpu",
        "changes earlier trees, so no best round can be kept; leave early_stopping_rounds and seconds out": stops_early,
    }
    for reason, holds in reasons.items():
        if holds:
            raise TreesError(f"boosting: 'dart' {reason}")


def dropped_rounds(settings: BoostSettings, number: int, shares: Array) -> Array:
    """The earlier rounds that this one leaves out, as LightGBM draws them: those of which more is left more often."""
    count, dropout = len(shares), settings.dropout
    none: Array = np.empty(0, np.int64)
    if dropout is None or not count:
        return none
    draws = np.random.default_rng([settings.seed, number, DROP_KEY]).random(count + 1)
    if draws[0] < dropout.skip:
        return none
    chances = shares / shares.mean() * min(dropout.rate, dropout.most / count)
    return np.flatnonzero(draws[1:] < chances)[: dropout.most]


def _first_scores(rows: Rows, booster: Booster) -> Array:
    return booster.scores(rows.x) if rows.first_scores is None else rows.first_scores.copy()


def _grower_of(settings: BoostSettings, shards: Shards) -> type[TreeGrower]:
    """The TreeGrower class for the device in the settings; an error if it cannot do what they ask."""
    if settings.device == "cpu":
        return TreeGrower
    require("triton", purpose="device='cuda'")
    from bitplan.trees.cuda import grower, limits  # needs Triton

    limits.find_device()
    limits.refuse_unsupported(settings.precision, shards.count)
    return grower.CudaTreeGrower


def _compiling(device: str) -> AbstractContextManager[None]:
    """A context in which a GPU's kernels are compiled in parallel; it does nothing for a CPU."""
    if device == "cpu":
        return nullcontext()
    from bitplan.base.loops.launch import compiling_together

    return compiling_together()


def _binned(x: Array | TablePieces, bins: Bins, objective: Objective, settings: BoostSettings) -> Any:
    """Bins of all rows, where trees grow; the host needs them too where it keeps the scores."""
    if settings.device == "cuda" and isinstance(x, np.ndarray) and not np.any(bins.is_category):
        from bitplan.trees.cuda.binning import bin_on_card
        from bitplan.trees.cuda.scores import has_gradients

        if has_gradients(objective):
            return bin_on_card(x, bins)
    return bin_rows(x, bins)


def _scores_of(
    rows: Rows, objective: Objective, settings: BoostSettings, grower: TreeGrower, scores: Array, span: Span
) -> RowScores:
    """The scores where they are kept: on the GPU if trees grow there, and it knows the objective's gradients."""
    if settings.device == "cuda":
        from bitplan.trees.cuda.grower import CudaTreeGrower
        from bitplan.trees.cuda.scores import CudaScores, has_gradients

        if has_gradients(objective):
            assert isinstance(grower, CudaTreeGrower)
            settled = settings.precision, settings.renew_leaves, settings.rules
            scores_there = CudaScores(objective, rows.y, rows.weights, scores, grower, *settled)
            scores_there.compile()
            return scores_there
    return HostScores(rows, objective, settings, grower, scores, span)


def _watch(watched: EvalSet, scores: Array, new: list[Tree], booster: Booster, shards: Shards) -> float:
    """Record every metric after a round; the first of them, as a number of which less is better."""
    rows, record = watched.rows, booster.evals.setdefault(watched.name, {})
    Forest.of(new, booster.outputs).add_to(scores, np.asarray(rows.x))
    values = [metric(rows.y, scores, rows.weights, shards) for metric in watched.metrics]
    shards.sent_for("losses")
    names = [name for name, _, _ in values]
    if len(set(names)) < len(names):
        raise TreesError(f"eval_metric: its metrics and the objective's loss are called {names}; rename those alike")
    for name, value, _ in values:
        record.setdefault(name, []).append(value)
    _, first, higher_is_better = values[0]
    return -first if higher_is_better else first


class RowScores(Protocol):
    """Keeps the raw scores of all rows, and computes gradients and leaf values from them."""

    def find_gradients(self) -> None: ...
    def prepare(self, output: int, key: int | None) -> Any: ...  # as the grower takes them
    def leaf_values(self, grown: Grown, output: int, gradients: Any) -> Array: ...
    def add(self, tree: Tree, grown: Grown, unused: Array, output: int) -> None: ...


class _Trainer:
    def __init__(
        self, rows: Rows, settings: BoostSettings, grower: TreeGrower, scores: RowScores, span: Span, outputs: int
    ) -> None:
        self._rows, self._settings, self._grower, self._scores = rows, settings, grower, scores
        self._span, self._shards = span, span.shards
        self._columns, self._outputs = np.arange(rows.x.shape[1]), outputs
        self._twins: dict[int, list[TreeGrower]] = {}  # by how many grow at once

    def round(self, number: int, left_out: Booster | None, share: float) -> list[Tree]:
        """The trees of one round; their gradients are those before the first of them, without the trees left out.

        share  of a step that is made; of the trees left out the rest is left
        """
        theirs = left_out.scores(self._rows.x) if left_out is not None else None
        if theirs is not None:
            assert isinstance(self._scores, HostScores)
            self._scores.add_scores(-theirs)
        self._scores.find_gradients()
        used, unused = self._sample_rows(number)
        trees = self._trees(number, used, unused, self._settings.learning_rate * share)
        if theirs is not None:
            assert isinstance(self._scores, HostScores)
            self._scores.add_scores(theirs * (1 - share))
        return trees

    def _trees(self, number: int, used: Array | range, unused: Array, rate: float) -> list[Tree]:
        """A tree for each output, several at the same time, each by some of the threads; they are the same trees."""
        at_once, arguments = self._grower.at_once(self._outputs), (number, used, unused, rate)
        if at_once == 1:
            return [self._tree((self._grower, output), *arguments) for output in range(self._outputs)]
        if len(unused):
            _ = self._grower.columns  # all of them are copied, before several threads ask for them
        trees: list[Tree] = []
        for first in range(0, self._outputs, at_once):
            outputs = range(first, min(first + at_once, self._outputs))
            growers = self._twins.setdefault(len(outputs), [])
            growers += [self._grower.twin() for _ in range(len(outputs) - len(growers))]
            grow = functools.partial(self._tree_beside, thread_count() // len(outputs), arguments)
            trees += on_threads(grow, list(zip(growers, outputs, strict=True)))
        return trees

    def _tree_beside(self, threads: int, arguments: tuple[Any, ...], of: tuple[TreeGrower, int]) -> Tree:
        with use_threads(threads):
            return self._tree(of, *arguments)

    def _tree(self, of: tuple[TreeGrower, int], number: int, used: Array | range, unused: Array, rate: float) -> Tree:
        """Grow the tree of one output with this grower, and add its values to the scores."""
        grower, output = of
        keys = np.empty(2, np.uint64)
        trees_gradients.draw_keys(self._settings.seed, number, output, keys)
        gradients = self._scores.prepare(output, int(keys[0]) if self._settings.stochastic else None)
        grown = grower.grow(gradients, used, self._sample_columns(int(keys[1])))
        values = self._scores.leaf_values(grown, output, gradients)
        tree = replace(grown.tree, leaf_value=values * rate, node_value=grown.tree.node_value * rate)
        self._scores.add(tree, grown, unused, output)
        self._shards.sent_for("tree")
        return tree

    def _sample_rows(self, number: int) -> tuple[Array | range, Array]:
        """Draw the rows to grow trees from; gives these and the others."""
        count = len(self._rows.x)
        if self._settings.row_share >= 1:
            return range(count), np.empty(0, np.uint32)
        generator = np.random.PCG64([self._settings.seed, number])
        generator.advance(self._span.first)  # a draw a row: those of other processes are skipped
        draws = np.random.Generator(generator).random(count)
        everyone = np.arange(count, dtype=np.uint32)
        if self._settings.by_gradient:
            if number < 1 / self._settings.learning_rate:  # as LightGBM has it: first gradients say little
                return range(count), np.empty(0, np.uint32)
            assert isinstance(self._scores, HostScores)
            is_used = self._scores.sample_by_gradient(self._settings.row_share, draws)
            return everyone[is_used], everyone[~is_used]
        is_used = draws < self._settings.row_share
        lowest = self._shards.top(-draws.min(initial=np.inf, keepdims=True), "smallest draw of a row")
        if -lowest[0] >= self._settings.row_share:  # nowhere is a row used
            is_used = draws == -lowest[0]
        return everyone[is_used], everyone[~is_used]

    def _sample_columns(self, seed: int) -> Array:
        count = len(self._columns)
        drawn = max(1, math.ceil(count * self._settings.column_share - 1e-9))
        if drawn == count:
            return self._columns
        return np.sort(np.random.default_rng(seed).choice(count, drawn, replace=False))


class HostScores:
    """Scores and gradients in the memory of the host."""

    def __init__(
        self, rows: Rows, objective: Objective, settings: BoostSettings, grower: TreeGrower, scores: Array, span: Span
    ) -> None:
        self._rows, self._objective, self._settings, self._grower = rows, objective, settings, grower
        self._span, self._shards = span, span.shards
        self._scores = np.asfortranarray(scores)  # of an output one after the other
        self._grads, self._hess = self._gradient_space(*scores.shape[::-1])
        self._by_output = list(zip(self._grads, self._hess, strict=True))
        self._has_warned = False

    def find_gradients(self) -> None:
        with np.errstate(over="ignore"):
            self._objective.gradients(self._rows.y, self._scores, self._rows.weights, self._grads, self._hess)

    def add_scores(self, more: Array) -> None:
        self._scores += more

    def sample_by_gradient(self, share: float, draws: Array) -> Array:
        """The rows to use (GOSS): those of largest gradients, and a sample of the others with larger weight."""
        with np.errstate(all="ignore"):  # what is not finite is refused later, by row
            sizes = np.abs(self._grads * self._hess).sum(axis=0)
        large = math.ceil(len(sizes) * share * LARGE_SHARE)
        least = np.partition(sizes, len(sizes) - large)[len(sizes) - large]
        is_used: Array = sizes > least
        is_used[np.flatnonzero(sizes == least)[: large - int(is_used.sum())]] = True
        of_others = share * (1 - LARGE_SHARE) / (1 - share * LARGE_SHARE)
        is_drawn = ~is_used & (draws < of_others)
        for numbers in (self._grads, self._hess):
            numbers[:, is_drawn] *= np.float32(1 / of_others)
        is_used |= is_drawn
        return is_used

    def prepare(self, output: int, key: int | None) -> Gradients:
        return prepare(*self._by_output[output], self._settings.precision, key, self._span)

    def _gradient_space(self, outputs: int, count: int) -> tuple[Array, Array]:
        """Space for gradients and hessians, float32 (outputs, rows); for one tree a round what that needs later.

        Growing reads gradients from entries alone, and hessians only where they are float32; renewed leaves read both.
        """
        if outputs > 1 or self._settings.renew_leaves:
            return np.empty((outputs, count), np.float32), np.empty((outputs, count), np.float32)
        grads, hess = self._grower.idle_space.view(np.float32).reshape(2, 1, count)
        return grads, np.empty_like(hess) if self._settings.precision is GradientPrecision.F32 else hess

    def leaf_values(self, grown: Grown, output: int, gradients: Gradients) -> Array:
        """Leaf values from full-precision gradients, or by the objective's own rule."""
        data = self._rows
        of_rows = data.y, self._scores, data.weights
        by_rule = self._objective.renew(*of_rows, lambda: grown.leaf_rows, self._shards, output)
        if by_rule is not None:
            low, high = grown.leaf_bounds.T
            return np.clip(by_rule, low, high)
        values = self._newton_steps(grown, output, gradients)
        return self._objective.limit(values, self._settings.learning_rate, output)

    def _newton_steps(self, grown: Grown, output: int, gradients: Gradients) -> Array:
        if not self._settings.renew_leaves:
            self._warn_of_coarse_leaves(grown.tree, gradients.hess_scale)
            return grown.tree.leaf_value
        unit = units(*gradients.tops, self._span.total)
        sums = np.zeros((grown.tree.leaves, 2), np.int64)
        where = grown.rows, row_pieces.First(), row_pieces.End(), grown.run_ends, grown.run_leaves
        arguments = *where, *self._by_output[output], 1.0 / unit[0], 1.0 / unit[1], sums.reshape(-1)
        row_pieces.run(trees_gradients.sum_leaves, len(self._scores), SUM_NS, *arguments, pieces=1)
        totals = self._shards.add(sums, "sums of leaves")
        return newton_steps(totals, unit, self._settings.rules, grown.leaf_bounds)

    def _warn_of_coarse_leaves(self, tree: Tree, hess_scale: float) -> None:
        """Say once that leaves are sums of so few codes that rounding shows."""
        if self._settings.precision is GradientPrecision.F32 or self._has_warned:
            return
        coarse = int(np.count_nonzero(tree.leaf_weight < FEW_CODES * hess_scale))
        if coarse:
            self._has_warned = True
            warnings.warn(
                f"renew_leaves=False: {coarse} of {tree.leaves} leaves of a tree have hessians of less than "
                f"{FEW_CODES} codes of gradient_precision={self._settings.precision.value!r}, so their values are far "
                "off; leave renew_leaves=None, or use gradient_precision='f32'",
                UserWarning,
                stacklevel=2,
            )

    def add(self, tree: Tree, grown: Grown, unused: Array, output: int) -> None:
        where = grown.rows, row_pieces.First(), row_pieces.End(), grown.run_ends
        arguments = self._scores[:, output], *where, tree.leaf_value[grown.run_leaves]
        row_pieces.run(trees_rows.add_leaves, len(self._scores), ADD_NS, *arguments, pieces=1)
        if not len(unused):
            return
        scores = self._scores[:, output]
        if tree.leaves == 1:
            scores[unused] += tree.leaf_value[0]
            return
        columns = self._grower.columns
        trees_rows.add_binned_tree(
            columns, unused, grown.columns, grown.left_bins, tree.left, tree.right, tree.leaf_value, scores
        )
