"""`BoostedTreesRanker`: learns an order of the rows of each query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from bitplan.trees.boost import EvalSet, Rows
from bitplan.trees.checks import first_scores_of, naming_set, targets_of, weights_of, whole_number
from bitplan.trees.distributed.shards import ALONE
from bitplan.trees.estimator_base import (
    BoostedTreesBase,
    FitOptions,
    eval_pairs,
    hints_for_others,
    leaves_model_if_refused,
)
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.objectives import Objective, custom_metrics
from bitplan.trees.ranking_loss import LambdaRank, Queries, ndcg_metrics, places_of, relevance_of, sizes_of_queries
from bitplan.trees.tables import on_host


@dataclass(kw_only=True, eq=False, repr=False)
class BoostedTreesRanker(BoostedTreesBase):
    """Boosted trees by LambdaRank: rows of higher relevance get higher numbers within their query.

    truncation_level  pairs count whose better place is among so many
    eval_at           the place, or places, at which NDCG is cut
    """

    file_kind = "ranker"
    truncation_level: int = 30
    eval_at: Any = 5

    @hints_for_others
    @leaves_model_if_refused
    def fit(
        self,
        X: Any,
        y: Any,
        group: Any = None,
        sample_weight: Any = None,
        eval_set: Any = None,
        *,
        eval_group: Any = None,
        qid: Any = None,
        eval_qid: Any = None,
        eval_metric: Any = None,
        callbacks: Any = None,
        init_model: Any = None,
        init_score: Any = None,
        eval_init_score: Any = None,
    ) -> Self:
        """Fit to whole numbers of relevance; `group` has the number of rows of each query, in the order of the rows.

        `eval_set` is (X, y) with its groups in `eval_group`, or a list of pairs with a list of them. In the place of
        sizes, `qid` and `eval_qid` say for each row which query it is of, as XGBoost has it; rows of a query follow
        each other. `init_score` are raw scores of the rows that trees are added to; predictions are without them.
        """
        group = sizes_of_queries(group, qid, "qid")
        if eval_qid is not None:
            several = isinstance(eval_qid, (list, tuple)) and len(eval_qid) > 0 and np.ndim(eval_qid[0]) == 1
            by_set = [sizes_of_queries(eval_group, ids, "eval_qid") for ids in (eval_qid if several else [eval_qid])]
            eval_group = by_set if several else by_set[0]
        options = FitOptions(None, eval_metric, callbacks, init_model, init_score, eval_init_score)
        initial = self._initial(options)
        x, targets = self._read_both(X, y, initial, ALONE)
        first = first_scores_of(init_score, len(x), 1, "init_score")
        if first is not None and initial is not None:
            raise TreesError("init_score: a model that is trained further has scores of its own; give one of the two")
        rows = Rows(x, targets_of(targets), weights_of(sample_weight, x), first)
        queries = Queries("group", group, rows.y)
        if len(rows.weights) and not rows.weights.all():  # rows without weight are no part of their query
            has_weight = rows.weights > 0
            sizes = np.bincount(queries.query[has_weight])
            rows = rows.at(has_weight)
            queries = Queries("group", sizes[sizes > 0], rows.y)
        watched = self._watched(eval_set, eval_group, options)
        if self.early_stopping_rounds is not None and not watched:
            raise TreesError("early_stopping_rounds: a ranker watches whole queries; give eval_set and eval_group")
        truncation = whole_number("truncation_level", self.truncation_level, 1)
        self._boost(rows, LambdaRank(queries, truncation), watched, options, initial, ALONE)
        return self

    def _watched(self, eval_set: Any, eval_group: Any, options: FitOptions) -> list[EvalSet]:
        pairs = eval_pairs(eval_set, None, options.eval_init_score)
        several = isinstance(eval_group, (list, tuple)) and len(eval_group) > 0 and np.ndim(eval_group[0]) == 1
        groups = list(eval_group) if several else [eval_group] * len(pairs)
        if len(groups) != len(pairs):
            raise TreesError(f"eval_group: expected the rows of each query for {len(pairs)} sets, got {len(groups)}")
        sets, given_metrics = [], custom_metrics(self._objective(), options.eval_metric)
        for index, ((x, y, _, first), group) in enumerate(zip(pairs, groups, strict=True)):
            if (first is None) != (options.init_score is None):
                raise TreesError("eval_init_score: watched sets begin with scores where the rows do; give both or none")
            with naming_set(index):
                table = self._read(x)
                scores = first_scores_of(first, len(table), 1, "eval_init_score")
                rows = Rows(table, targets_of(np.asarray(on_host(y))), first_scores=scores)
                relevance_of(rows.y)
            ndcg = ndcg_metrics(Queries("eval_group", group, rows.y), self.eval_at)
            sets.append(EvalSet(f"valid_{index}", rows, (*given_metrics, *ndcg)))
        return sets

    @hints_for_others
    def predict(self, X: Any, *, contributions: bool = False) -> Array:
        """A number for each row: the higher, the further to the top. Or what each feature adds to it."""
        return self._contributions(X) if contributions else self._scores(X)[:, 0]

    def staged_predict(self, X: Any) -> Iterator[Array]:
        """`predict` after each round."""
        return (scores[:, 0] for scores in self._staged_scores(X))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def _objective(self) -> Objective:
        return LambdaRank(None, 1)

    def _check_parameters(self, features: int) -> None:
        super()._check_parameters(features)
        whole_number("truncation_level", self.truncation_level, 1)
        places_of(self.eval_at)
