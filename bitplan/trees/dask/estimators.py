"""`DaskBoostedTreesClassifier` and `DaskBoostedTreesRegressor`: scikit-learn's conventions on dask collections.

A fit is that of the plain estimator on all rows, in the collection's order, to the bit, for any number of workers and
partitions. Predictions of a collection are lazy dask arrays; those of anything else are the plain estimator's.

A fit as the client of a Dask cluster leads it: partitions to workers, one task on each, one model back.

Worker k gets the k-th run of partitions, so that all rows are in the collection's order whatever the number of workers.
Partitions that are computed for the fit are computed there; those that lie elsewhere are moved. A fit needs all of its
workers at once, so a lock on each of them keeps two fits from waiting for each other for ever.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any, Self

import dask
import dask.array
import distributed
import numpy as np

from bitplan.base.errors import visible
from bitplan.trees.checks import number
from bitplan.trees.dask import on_worker
from bitplan.trees.dask.on_worker import predict_part
from bitplan.trees.distributed.shards import ProcessLostError
from bitplan.trees.estimator_base import FitOptions
from bitplan.trees.estimators import BoostedTreesClassifier, BoostedTreesRegressor
from bitplan.trees.gradients import TreesError
from bitplan.trees.scikit import check_is_fitted

# ---- cluster ---------------------------------------------------------------------------------------------------------


LOOK_S = 0.5  # how often the client looks whether all workers are still there
POLL_S = 0.02
GRACE_S = 12.0  # for the others to end after one has stopped: longer than their roll call takes


def fit_on_cluster(
    model: Any,
    x: Any,
    y: Any,
    weights: Any,
    eval_set: Any,
    client: Any,
    timeout_s: float,
    keep_model: Callable[[Any], None],
    options: FitOptions,
) -> None:
    """Fit on a cluster; `keep_model` gets the fitted model, or what is there of it when the fit is interrupted."""
    pieces = _collections(x, y, weights, eval_set)
    client = client or _current_client()
    present = sorted(client.nthreads())
    if not present:
        raise TreesError("dask: the cluster has no workers; start some, or wait for them (client.wait_for_workers)")
    addresses = present[: len(pieces["X"])]
    key = f"bitplan-{uuid.uuid4().hex}"
    with distributed.MultiLock(names=[f"bitplan.trees {address}" for address in addresses], client=client):
        _Fit(client, addresses, key, timeout_s).run(model, pieces, keep_model, options)


class _Fit:
    def __init__(self, client: Any, addresses: list[str], key: str, timeout_s: float) -> None:
        self._client, self._addresses, self._key, self._timeout_s = client, addresses, key, timeout_s
        workers = client.scheduler_info(n_workers=-1)["workers"]
        names = {address: visible(repr(workers.get(address, {}).get("name")), 100) for address in addresses}
        self._names = [f"{name} at {address}" for address, name in names.items()]

    def run(
        self, model: Any, pieces: dict[str, list[Any]], keep_model: Callable[[Any], None], options: FitOptions
    ) -> None:
        tasks: list[Any] = []
        try:
            parts = self._lay(pieces)
            tasks = parts
            self._answers(self._send([(_count_rows, part) for part in parts]), "reading the rows")
            secret = secrets.token_bytes(32)
            opening = self._send_to(0, on_worker.open_store, self._key, secret)
            ((host, port),) = self._answers([opening], "opening a store")
            fit = on_worker.WorkerFit(self._key, host, port, secret, tuple(self._names), self._timeout_s)
            tasks = self._send(
                [(on_worker.fit_part, model, part, rank, fit, options) for rank, part in enumerate(parts)]
            )
            try:
                answers = self._answers(tasks, "fitting")
            except KeyboardInterrupt:
                self._take_rounds(tasks, keep_model)
                raise
            for _, lost in answers:
                if lost is not None:
                    raise lost
            keep_model(answers[0][0])
        finally:
            self._client.cancel(tasks)
            self._client.run(on_worker.end_fit, self._key, workers=self._present(), on_error="ignore")

    def _lay(self, pieces: dict[str, list[Any]]) -> list[Any]:
        """A task for each worker that lays its partitions one after the other."""
        count, parts = len(self._addresses), []
        for rank, address in enumerate(self._addresses):
            runs = {}
            for name, partitions in pieces.items():
                run = partitions[len(partitions) * rank // count : len(partitions) * (rank + 1) // count]
                runs[name] = self._client.compute(run, workers=[address], allow_other_workers=True)
            position = len(pieces["X"]) * rank // count, bool(pieces["eval_set's X"])
            parts.append(self._send_to(rank, on_worker.lay_rows, *position, *runs.values()))
        return parts

    def _send(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        return [self._send_to(rank, *call) for rank, call in enumerate(calls)]

    def _send_to(self, rank: int, function: Any, *arguments: Any) -> Any:
        return self._client.submit(function, *arguments, workers=[self._addresses[rank]], pure=False)

    def _answers(self, tasks: list[Any], doing: str) -> list[Any]:
        """Wait for the tasks and return their results; if one failed or a worker is lost, raise one error."""
        next_look = time.monotonic()
        while not all(task.done() for task in tasks):
            if any(task.status == "error" for task in tasks):
                break
            if time.monotonic() >= next_look:
                self._check_workers(tasks, doing)
                next_look = time.monotonic() + LOOK_S
            time.sleep(POLL_S)
        if all(task.status == "finished" for task in tasks):
            answers: list[Any] = self._client.gather(tasks)
            return answers
        self._let_end(tasks)
        self._check_workers(tasks, doing)
        for task in tasks:
            if task.status == "error":
                raise task.exception()
        raise ProcessLostError(f"dask: the tasks of a fit were cancelled while {doing}; start the fit again")

    def _check_workers(self, tasks: list[Any], doing: str) -> None:
        lost = [rank for rank, address in enumerate(self._addresses) if address not in self._present()]
        if lost:
            self._let_end(tasks)
            names = ", ".join(f"worker {self._names[rank]}" for rank in lost)
            raise ProcessLostError(
                f"dask: lost {names} while {doing}: it died or left the cluster; look at its log, then start the fit "
                "again, on the workers that are there"
            )

    def _let_end(self, tasks: list[Any]) -> None:
        """Wait until the workers that are there have noticed: then they are free for the next fit."""
        until = time.monotonic() + GRACE_S
        present = set(self._present())
        waiting = [task for task, address in zip(tasks, self._addresses, strict=False) if address in present]
        while not all(task.done() for task in waiting) and time.monotonic() < until:
            time.sleep(POLL_S)

    def _present(self) -> list[str]:
        workers = self._client.nthreads()
        return [address for address in self._addresses if address in workers]

    def _take_rounds(self, tasks: list[Any], keep_model: Callable[[Any], None]) -> None:
        """End the fit in all workers; of the first that has complete rounds, take them."""
        self._client.run(on_worker.cancel_fit, self._key, workers=self._present(), on_error="ignore")
        self._let_end(tasks)
        for task in tasks:
            if task.status == "finished":
                fitted, _ = task.result()
                if hasattr(fitted, "booster_"):
                    keep_model(fitted)
                    return


def _count_rows(part: on_worker.WorkerRows) -> int:
    return len(part.y)


def _current_client() -> Any:
    try:
        return distributed.get_client()
    except ValueError:
        raise TreesError(
            "dask: there is no client; make one (client = distributed.Client(address)), or give client=... to the "
            "estimator"
        ) from None


def _collections(x: Any, y: Any, weights: Any, eval_set: Any) -> dict[str, list[Any]]:
    """The delayed partitions of X, y, weights and watched rows; all must have equally many."""
    if isinstance(eval_set, list) and len(eval_set) == 1:
        (eval_set,) = eval_set
    if eval_set is not None and (not isinstance(eval_set, tuple) or len(eval_set) != 2):
        raise TreesError(f"eval_set: expected (X, y), two dask collections, got {type(eval_set).__name__}")
    pieces = {"X": _partitions("X", x)}
    pieces["y"] = _partitions("y", y, x)
    pieces["sample_weight"] = [] if weights is None else _partitions("sample_weight", weights, x)
    eval_x, eval_y = eval_set or (None, None)
    pieces["eval_set's X"] = [] if eval_x is None else _partitions("eval_set's X", eval_x)
    pieces["eval_set's y"] = [] if eval_y is None else _partitions("eval_set's y", eval_y, eval_x)
    for name, of in (("y", "X"), ("sample_weight", "X"), ("eval_set's y", "eval_set's X")):
        if pieces[name] and len(pieces[name]) != len(pieces[of]):
            raise TreesError(
                f"{name}: expected {len(pieces[of])} partitions, as {of} has, got {len(pieces[name])}; repartition one "
                "of them"
            )
    return pieces


def _partitions(name: str, collection: Any, like: Any = None) -> list[Any]:
    """A collection's delayed partitions by rows; an array is first cut into the same rows as `like`."""
    if not dask.is_dask_collection(collection) or not hasattr(collection, "to_delayed"):
        raise TreesError(
            f"{name}: expected a dask array or dataframe, got {type(collection).__name__}; dask.array.from_array makes "
            "one, and the plain estimator fits what lies in memory"
        )
    if not isinstance(collection, dask.array.Array):
        return list(collection.to_delayed())
    if collection.ndim == 2:
        collection = collection.rechunk({1: -1})
    if isinstance(like, dask.array.Array) and collection.shape[:1] == like.shape[:1]:
        collection = collection.rechunk({0: like.chunks[0]})
    return list(collection.to_delayed().reshape(-1))


# ---- estimators ------------------------------------------------------------------------------------------------------


class _OnDask:
    """The base of both estimators; `client` None is the current one, `timeout_s` as of `fit_distributed`."""

    _plain: type[BoostedTreesClassifier | BoostedTreesRegressor]

    def __init__(self, *, client: Any = None, timeout_s: float = 300.0, **settings: Any) -> None:
        super().__init__(**settings)  # the plain estimator's own
        self.client, self.timeout_s = client, timeout_s

    @classmethod
    def _get_param_names(cls) -> list[str]:
        """The plain estimator's settings, for scikit-learn. A client cannot be copied, nor written to a file."""
        names: list[str] = cls._plain._get_param_names()
        return names

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {**state, "client": None}

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        eval_set: Any = None,
        *,
        eval_metric: Any = None,
        callbacks: Any = None,
        init_model: Any = None,
    ) -> Self:
        """Fit to dask collections, as many partitions of each; Ctrl-C leaves the rounds that were complete.

        `callbacks` run on every worker, `init_model` is sent to all of them.
        """
        options = FitOptions(eval_metric=eval_metric, callbacks=callbacks, init_model=init_model)
        limit = number("timeout_s", self.timeout_s, 0, above=True)
        fit_on_cluster(self._unfitted(), X, y, sample_weight, eval_set, self.client, limit, self._copy_state, options)
        return self

    def _unfitted(self) -> Any:
        estimator: Any = self
        return self._plain(**estimator.get_params())

    def _copy_state(self, fitted: Any) -> None:
        """Copy all that `fit` sets from the fitted model into this estimator."""
        for name, value in vars(fitted).items():
            if name.endswith("_"):
                setattr(self, name, value)

    def to_local(self) -> BoostedTreesClassifier | BoostedTreesRegressor:
        """A plain estimator with the same settings and trees, which needs no Dask."""
        model: BoostedTreesClassifier | BoostedTreesRegressor = self._unfitted()
        for name, value in vars(self).items():
            if name.endswith("_"):
                setattr(model, name, value)
        return model

    def _predict_contributions(self, x: Any) -> Any:
        booster = self.to_local().booster_
        return self._predict("_contributions", x, np.dtype(np.float64), (booster.features + 1) * booster.outputs)

    def _predict(self, method: str, x: Any, dtype: Any, columns: int = 0) -> Any:
        """Predict by partition, when it is computed; `columns` 0: a number for each row."""
        model = self.to_local()
        if not dask.is_dask_collection(x):
            return getattr(model, method)(x)
        shipped = dask.delayed(model, traverse=False)
        sizes: tuple[Any, ...]
        if isinstance(x, dask.array.Array):
            x = x.rechunk({1: -1})
            parts, sizes = x.to_delayed()[:, 0], x.chunks[0]
        else:
            parts = x.to_delayed()
            sizes = (np.nan,) * len(parts)
        run = dask.delayed(predict_part)
        pieces = [
            dask.array.from_delayed(
                run(shipped, method, part, dtype, columns), (rows, columns) if columns else (rows,), dtype
            )
            for part, rows in zip(parts, sizes, strict=True)
        ]
        return dask.array.concatenate(pieces, allow_unknown_chunksizes=True)


class DaskBoostedTreesClassifier(_OnDask, BoostedTreesClassifier):  # type: ignore[misc]
    """Boosted trees for two or more classes, on a Dask cluster."""

    _plain = BoostedTreesClassifier

    def predict(self, X: Any, *, contributions: bool = False) -> Any:
        """The likeliest class of each row; or what each feature adds to the raw scores (`contributions`)."""
        if contributions:
            return self._predict_contributions(X)
        check_is_fitted(self)
        return self._predict("predict", X, self.classes_.dtype)

    def predict_proba(self, X: Any) -> Any:
        """The probability of each class, (rows, classes); rows sum to 1."""
        check_is_fitted(self)
        return self._predict("predict_proba", X, np.dtype(np.float64), len(self.classes_))

    def decision_function(self, X: Any) -> Any:
        """Raw scores: (rows,) for two classes, else (rows, classes)."""
        check_is_fitted(self)
        classes = len(self.classes_)
        return self._predict("decision_function", X, np.dtype(np.float64), 0 if classes == 2 else classes)


class DaskBoostedTreesRegressor(_OnDask, BoostedTreesRegressor):  # type: ignore[misc]
    """Boosted trees for numbers, on a Dask cluster."""

    _plain = BoostedTreesRegressor

    def predict(self, X: Any, *, contributions: bool = False) -> Any:
        """A number for each row, raw scores for a custom objective; or what each feature adds (`contributions`)."""
        if contributions:
            return self._predict_contributions(X)
        return self._predict("predict", X, np.dtype(np.float64))
