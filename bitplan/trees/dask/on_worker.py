"""What a Dask worker does for a fit: lay its partitions one after the other, meet the others, fit.

Workers meet in a store that the first of them hosts, at the addresses by which Dask knows them, and that takes nobody
without the fit's secret (`secret_store`); there is no default
group of torch.distributed, so several workers may live in one process, and two fits do not disturb each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
from distributed import get_worker
from distributed.comm import get_address_host

from bitplan.base.errors import BitplanError
from bitplan.trees.dask.secret_store import SecretStore, StoreHost
from bitplan.trees.distributed.fit import fit_by_ranks
from bitplan.trees.distributed.ranks import Meeting, Ranks
from bitplan.trees.distributed.shards import ProcessLostError
from bitplan.trees.estimator_base import FitOptions
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.scikit import clone

_stores: dict[str, StoreHost] = {}  # by fit: those that this process hosts
_cancelled: set[str] = set()  # fits that the client has given up


@dataclass(frozen=True)
class WorkerRows:
    """The rows of one worker; `eval_x` and `eval_y` are None where the fit has no eval_set."""

    x: Any
    y: Array
    weights: Array | None
    eval_x: Any
    eval_y: Array | None


@dataclass(frozen=True)
class WorkerFit:
    """One fit, as each of its workers is told: where the store is, its secret, and the names of all workers by rank."""

    key: str
    host: str
    port: int
    secret: bytes = field(repr=False)
    names: tuple[str, ...]
    timeout_s: float


class FitCancelledError(BitplanError):
    """The client has given up the fit; the rounds so far are in the model."""


class _CancellableRanks(Ranks):
    def __init__(self, key: str, timeout_s: float, meeting: Meeting) -> None:
        self._fit = key
        super().__init__(timeout_s, meeting)

    def sent_for(self, label: str) -> None:
        super().sent_for(label)
        if label == "tree" and self._fit in _cancelled:
            raise FitCancelledError("the client cancelled the fit")


def lay_rows(
    first: int, has_eval: bool, x: list[Any], y: list[Any], weights: list[Any], eval_x: list[Any], eval_y: list[Any]
) -> WorkerRows:
    """Lay this worker's partitions one after the other; `first` is the number of the first among all, for errors."""
    for name, others, of in (("y", y, x), ("sample_weight", weights, x), ("eval_set's y", eval_y, eval_x)):
        for index, (part, rows) in enumerate(zip(others, of, strict=False)):
            if len(part) != len(rows):
                raise TreesError(
                    f"{name}: partition {first + index} has {len(part)} rows, expected {len(rows)}, as X has; make "
                    "both from one collection, or rechunk them alike"
                )
    if has_eval and not eval_x:  # fewer partitions than workers
        eval_x, eval_y = [x[0][:0]], [y[0][:0]]
    return WorkerRows(
        _joined(x),
        np.concatenate([np.asarray(part) for part in y]),
        np.concatenate([np.asarray(part) for part in weights]) if weights else None,
        _joined(eval_x) if eval_x else None,
        np.concatenate([np.asarray(part) for part in eval_y]) if eval_y else None,
    )


def open_store(key: str, secret: bytes) -> tuple[str, int]:
    """Host a store for a fit on this worker, at the address by which Dask knows it; where it is."""
    _stores[key] = store = StoreHost(get_address_host(get_worker().address), secret)
    return store.host, store.port


def end_fit(key: str) -> None:
    """Close the store, and forget the fit."""
    if key in _stores:
        _stores.pop(key).close()
    _cancelled.discard(key)


def cancel_fit(key: str) -> None:
    _cancelled.add(key)


def fit_part(
    model: Any, part: WorkerRows, rank: int, fit: WorkerFit, options: FitOptions
) -> tuple[Any, ProcessLostError | None]:
    """The fitted model, the same in each worker (cancelled: the complete rounds), or that another worker was lost.

    That one is an answer and not an error: Dask would log it in every worker, and only the lost one has the cause.
    """
    worker, model = get_worker(), clone(model)  # of workers in one process, each has its own
    if model.n_jobs is None:
        model.n_jobs = worker.state.nthreads
    eval_set = None if part.eval_x is None else (part.eval_x, part.eval_y)
    store = SecretStore(fit.host, fit.port, fit.secret, timedelta(seconds=fit.timeout_s))
    meeting = Meeting(store, rank, fit.names, get_address_host(worker.address))
    ranks = _CancellableRanks(fit.key, fit.timeout_s, meeting)
    try:
        fit_by_ranks(model, ranks, part.x, part.y, part.weights, eval_set, options)
    except FitCancelledError:
        return model, None
    except ProcessLostError as lost:
        return model, lost.with_traceback(None)
    return model, None


def predict_part(model: Any, method: str, x: Any, dtype: Any, columns: int) -> Array:
    """Predictions for one partition; an empty one gives an empty array."""
    if not len(x):
        return np.empty((0, columns) if columns else 0, dtype)
    answer: Array = getattr(model, method)(x)
    return answer


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if hasattr(parts[0], "columns"):
        import pandas  # type: ignore[import-untyped]

        return pandas.concat(parts, ignore_index=True)
    return np.concatenate(parts)
