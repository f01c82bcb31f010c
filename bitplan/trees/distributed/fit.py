"""`fit_distributed`: one model from rows that lie in several processes, on one machine or many.

Every process has some of the rows and ends with the whole model. What is sent is small: a sample of rows for the bins,
once; then maxima of gradients for each tree, and one integer histogram for each node (`histogram_exchange`). All sums
are integers and a row is known by its number among all rows, so one process and many grow the same trees, to the bit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bitplan.trees.checks import number
from bitplan.trees.distributed.shards import gather_json
from bitplan.trees.estimator_base import FitOptions
from bitplan.trees.gradients import TreesError

if TYPE_CHECKING:
    from bitplan.trees.distributed.ranks import Ranks
    from bitplan.trees.estimators import BoostedTreesClassifier, BoostedTreesRegressor


@dataclass(frozen=True)
class DistributedFit:
    """The bytes that this process put into sums, and the steps, of a fit; a ring sends 2 (n - 1) / n of them."""

    rank: int
    processes: int
    bytes_by_tree: tuple[int, ...]
    bytes_before_trees: int
    bytes_after_trees: int  # losses of early stopping, and the comparison of models
    steps: int  # times that all processes waited for each other

    def __str__(self) -> str:
        mean = sum(self.bytes_by_tree) / max(len(self.bytes_by_tree), 1)
        return (
            f"rank {self.rank} of {self.processes}: {len(self.bytes_by_tree)} trees, {mean:,.0f} bytes sent for each, "
            f"{self.bytes_before_trees:,} before the first, {self.steps} steps"
        )


def fit_distributed(
    model: BoostedTreesClassifier | BoostedTreesRegressor,
    X: Any,
    y: Any,
    sample_weight: Any = None,
    eval_set: Any = None,
    *,
    eval_metric: Any = None,
    callbacks: Any = None,
    init_model: Any = None,
    timeout_s: float = 300.0,
) -> DistributedFit:
    """Fit `model`, in place, to the rows of all processes of torch.distributed's default group.

    Every process calls this with its own rows (some may have none) and the same settings; `eval_set` is divided too.
    All rows means those of rank 0, then those of rank 1, and so on: the model is that of `model.fit` on them.
    `eval_metric` gets the watched rows of all, `callbacks` run in each process: True from one ends the fit. If a
    process fails, dies, or makes the others wait longer than `timeout_s`, all stop with a `ProcessLostError`.
    """
    from bitplan.trees.estimators import BoostedTreesClassifier, BoostedTreesRegressor

    if not isinstance(model, (BoostedTreesClassifier, BoostedTreesRegressor)):
        raise TreesError(
            f"model: expected a BoostedTreesClassifier or BoostedTreesRegressor, got {type(model).__name__}"
        )
    from bitplan.trees.distributed.ranks import Ranks  # loads torch

    options = FitOptions(eval_metric=eval_metric, callbacks=callbacks, init_model=init_model)
    ranks = Ranks(number("timeout_s", timeout_s, 0, above=True))
    return fit_by_ranks(model, ranks, X, y, sample_weight, eval_set, options)


def fit_by_ranks(
    model: BoostedTreesClassifier | BoostedTreesRegressor,
    ranks: Ranks,
    X: Any,
    y: Any,
    sample_weight: Any = None,
    eval_set: Any = None,
    options: FitOptions | None = None,
) -> DistributedFit:
    """Fit `model` to the rows of any processes; they part in the end, or when one of them fails."""
    try:
        model._fit(X, y, sample_weight, eval_set, ranks, options)
        _check_same_model(model, ranks)
    except BaseException as error:
        ranks.fail(error)  # Ctrl-C too: the others would wait
        raise
    ranks.close()
    trees, before = ranks.bytes_sent["tree"], ranks.bytes_sent["bins and start"]
    rest = sum(sum(sent) for sent in ranks.bytes_sent.values()) - sum(trees) - sum(before)
    return DistributedFit(ranks.rank, ranks.count, tuple(trees), sum(before), rest, ranks.steps)


def _check_same_model(model: BoostedTreesClassifier | BoostedTreesRegressor, ranks: Ranks) -> None:
    """Raise if processes grew different trees, as processors do that compute exp differently."""
    prints = gather_json(_fingerprint(model), "comparison of models", ranks)
    ranks.sent_for("comparison")
    others = [rank for rank, one in enumerate(prints) if one != prints[0]]
    if others:
        raise TreesError(
            f"distributed fit: rank {others[0]} has other trees than rank 0; run the same versions of bitplan, numba "
            "and numpy on the same kind of processor everywhere"
        )


def _fingerprint(model: BoostedTreesClassifier | BoostedTreesRegressor) -> str:
    booster = model.booster_
    digest = hashlib.sha256(booster.start.tobytes() + np.array(booster.losses).tobytes())
    for tree in booster.trees:
        for name in ("feature", "threshold", "missing_left", "left", "right", "gain", "leaf_value", "leaf_rows"):
            digest.update(getattr(tree, name).tobytes())
    return digest.hexdigest()
