"""LambdaRank: pairs of a query's rows, weighed by what their order is worth in NDCG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitplan.base.loops.jit import on_threads
from bitplan.trees.checks import whole_number
from bitplan.trees.distributed.shards import ALONE, Array, Shards, average
from bitplan.trees.gradients import PIECE, TreesError
from bitplan.trees.loops import gradients as ranking
from bitplan.trees.objectives import Metric, OneScore
from bitplan.trees.tables import is_missing

MAX_RELEVANCE = 31  # 2^31 times as good as nothing


def relevance_of(y: Array) -> Array:
    """The targets, if every one is a relevance; others are refused."""
    is_bad = ~((y >= 0) & (y <= MAX_RELEVANCE) & (y == np.floor(y)))
    if is_bad.any():
        row = int(np.argmax(is_bad))
        raise TreesError(f"y: a relevance is a whole number from 0 to {MAX_RELEVANCE}, got {y[row]:g} in row {row}")
    return y


def sizes_of_queries(group: Any, ids: Any, name: str) -> Any:
    """The number of rows of each query: as given, or by the query of each row."""
    if ids is None:
        return group
    if group is not None:
        raise TreesError(f"{name}: the sizes of queries are given, too; give one of the two")
    labels = np.asarray(ids)
    if labels.ndim != 1 or not len(labels):
        raise TreesError(f"{name}: expected the query of each row, got shape {labels.shape}")
    missing = np.flatnonzero([is_missing(label) for label in labels] if labels.dtype.kind == "O" else labels != labels)
    if len(missing):
        raise TreesError(f"{name}: row {missing[0]} has no query, {labels[missing[0]]}; leave it out, or give it one")
    starts = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1]]))
    again = len(np.unique(labels[starts])) < len(starts)
    if again:
        raise TreesError(f"{name}: rows of one query lie apart; sort X, y and {name} by query")
    return np.diff(np.append(starts, len(labels)))


class Queries:
    """Which rows belong to one query, and each row's gain, 2^relevance - 1."""

    def __init__(self, where: str, group: Any, y: Array) -> None:
        if group is None:
            raise TreesError(f"{where}: expected the number of rows of each query, in the order of the rows")
        sizes = np.asarray(group)
        is_whole = sizes.ndim == 1 and sizes.dtype.kind in "iu" and bool(np.all(sizes > 0))
        if not is_whole or sizes.sum() != len(y):
            raise TreesError(
                f"{where}: expected whole numbers above 0, the rows of each query, {len(y)} together, got {group!r:.60}"
            )
        self.starts: Array = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.query: Array = np.repeat(np.arange(len(sizes)), sizes)
        self.gains: Array = np.exp2(relevance_of(y)) - 1.0
        self.position: Array = np.arange(len(y)) - self.starts[self.query]
        self.discounts: Array = 1.0 / np.log2(2.0 + np.arange(sizes.max(initial=1)))

    def ordered(self, numbers: Array) -> Array:
        """Rows query by query, higher numbers first; equal ones stay in their order."""
        return np.lexsort((-numbers, self.query))

    def gained(self, order: Array, most: int) -> Array:
        """The discounted gain (DCG) of each query's first `most` rows in this order."""
        terms = np.where(self.position < most, self.gains[order] * self.discounts[self.position], 0.0)
        sums: Array = np.add.reduceat(terms, self.starts[:-1])
        return sums

    def ndcg(self, scores: Array, most: int, shards: Shards = ALONE) -> float:
        """The mean over queries; one in which nothing is relevant counts as 1, as LightGBM has it."""
        best = self.gained(self.ordered(self.gains), most)
        got = self.gained(self.ordered(scores), most)
        return average(np.where(best > 0, got / np.where(best > 0, best, 1.0), 1.0), np.empty(0), shards)


class LambdaRank(OneScore):
    """LambdaRank's loss over the queries of the training rows; a model that only predicts has None."""

    name = "lambdarank"

    def __init__(self, queries: Queries | None, truncation: int) -> None:
        self._queries, self._truncation = queries, truncation
        if queries is not None:
            best = queries.gained(queries.ordered(queries.gains), truncation)
            self._per_best: Array = np.where(best > 0, 1.0 / np.where(best > 0, best, 1.0), 0.0)
            firsts = np.searchsorted(queries.starts[:-1], np.arange(0, len(queries.query), PIECE))
            self._pieces = list(zip(firsts, [*firsts[1:], len(queries.starts) - 1], strict=True))

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        return np.zeros(1)

    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        queries = self._queries
        assert queries is not None  # those of fit
        flat = np.ascontiguousarray(scores[:, 0])
        order = queries.ordered(flat)
        more = order, queries.discounts, self._per_best, self._truncation, grads[0], hess[0]
        on_threads(
            lambda piece: ranking.lambdarank(flat, queries.gains, weights, queries.starts, *piece, *more), self._pieces
        )

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        raise TreesError("ranking: NDCG needs the queries of the watched rows; give eval_set with eval_group")


def places_of(eval_at: Any) -> list[int]:
    """The ranks at which NDCG is cut, from one number or a list."""
    positions = eval_at if isinstance(eval_at, (Sequence, np.ndarray)) and not isinstance(eval_at, str) else [eval_at]
    if not len(positions):
        raise TreesError("eval_at: expected a whole number or some, got none")
    return [whole_number("eval_at", position, 1) for position in positions]


def ndcg_metrics(queries: Queries, eval_at: Any) -> tuple[Metric, ...]:
    """NDCG at each place; early stopping watches the first."""

    def at(most: int) -> Metric:
        def of(_y: Array, scores: Array, _weights: Array, shards: Shards) -> tuple[str, float, bool]:
            return f"ndcg@{most}", queries.ndcg(scores[:, 0], most, shards), True

        return of

    return tuple(at(most) for most in places_of(eval_at))
