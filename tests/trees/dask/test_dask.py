"""Fits on a Dask cluster: the trees of the plain estimator, to the bit, and one error where a worker is lost."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time

import numpy as np
import pytest

pytest.importorskip("distributed")

import dask
import dask.array
from distributed import Client, LocalCluster
from sklearn.base import clone

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError
from bitplan.trees.dask import DaskBoostedTreesClassifier, DaskBoostedTreesRegressor
from bitplan.trees.distributed.shards import ProcessLostError
from tests.trees.samples import table

SETTINGS = {"n_estimators": 3, "max_leaves": 8, "subsample": 0.7, "gradient_precision": "i16"}


@pytest.fixture(scope="module")
def client():
    """Two workers, threads of this process: importing torch in others takes seconds."""
    options = {"processes": False, "dashboard_address": ":0", "n_workers": 2, "threads_per_worker": 1}
    with LocalCluster(**options) as cluster, Client(cluster) as here:
        yield here


def rows_with_categories():
    x, y = table(600, missing=0.1)
    x[:, 1] = np.random.default_rng(4).integers(0, 9, 600)
    weights = np.random.default_rng(5).random(600)
    weights[::7] = 0
    return x, np.where(y + x[:, 1] % 3 > 1, "yes", "no"), weights


def array(numbers, *cuts):
    rows = tuple(np.diff([0, *cuts, len(numbers)]).tolist())
    return dask.array.from_array(numbers, chunks=(rows, *(2 for _ in numbers.shape[1:])))


@pytest.mark.parametrize("cuts", [(), (70, 70, 500)], ids=["one partition", "unequal, one empty"])
def test_trees_are_those_of_the_plain_estimator(client, cuts):
    x, y, weights = rows_with_categories()
    settings = SETTINGS | {"categorical_features": [1]}
    plain = BoostedTreesClassifier(**settings).fit(x, y, weights)
    on_dask = DaskBoostedTreesClassifier(client=client, **settings)
    assert on_dask.fit(array(x, *cuts), array(y, 100), array(weights, 300)) is on_dask
    assert on_dask.to_lightgbm() == plain.to_lightgbm()
    assert on_dask.get_params() == plain.get_params()
    for method in ("predict", "predict_proba", "decision_function"):
        lazy = getattr(on_dask, method)(array(x, *cuts))
        np.testing.assert_array_equal(lazy.compute(scheduler="sync"), getattr(plain, method)(x))
        np.testing.assert_array_equal(getattr(on_dask.to_local(), method)(x), getattr(plain, method)(x))


def test_dataframes_with_names_and_an_eval_set(client):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frames = pytest.importorskip("dask.dataframe")
    x, y = table(600)
    frame = pandas.DataFrame(x, columns=list("abcde")).assign(y=y)
    frame["e"] = pandas.Categorical(np.array(["low", "mid", "high"])[np.digitize(x[:, 4], [-0.5, 0.5])])
    watched = frame.iloc[:100]
    settings = SETTINGS | {"n_estimators": 6, "early_stopping_rounds": 2, "learning_rate": 1.0}
    names = list("abcde")
    plain = BoostedTreesRegressor(**settings).fit(frame[names], y, eval_set=(watched[names], watched["y"] + 0.5))
    parts, watched_parts = frames.from_pandas(frame, npartitions=3), frames.from_pandas(watched, npartitions=1)
    eval_set = [(watched_parts[names], watched_parts["y"] + 0.5)]
    on_dask = DaskBoostedTreesRegressor(client=client, **settings).fit(parts[names], parts["y"], eval_set=eval_set)
    assert on_dask.to_lightgbm() == plain.to_lightgbm()
    assert on_dask.feature_names_in_.tolist() == names
    assert on_dask.categories_ == {4: ["high", "low", "mid"]}
    for more in ({}, {"contributions": True}):
        lazy = on_dask.predict(parts[names], **more)
        np.testing.assert_array_equal(lazy.compute(), plain.predict(frame[names], **more))


def impatient(state):
    return state.round >= 9


def test_metrics_callbacks_and_a_model_to_train_further(client):
    x, y = table(600)
    y = y > 0
    first = BoostedTreesClassifier(**SETTINGS).fit(x, y)
    settings = SETTINGS | {"n_estimators": 20, "early_stopping_rounds": 10}
    more = {"eval_metric": ["auc", "logloss"], "callbacks": [impatient], "init_model": first}
    plain = BoostedTreesClassifier(**settings).fit(x, y, eval_set=(x[:200], y[:200]), **more)
    watched = array(x[:200], 150), array(y[:200], 150)
    on_dask = DaskBoostedTreesClassifier(client=client, **settings)
    on_dask.fit(array(x, 300), array(y, 300), eval_set=watched, **more)
    assert on_dask.n_iter_ == plain.n_iter_ == 9
    assert on_dask.to_lightgbm() == plain.to_lightgbm()
    assert on_dask.evals_result_ == plain.evals_result_
    dart = SETTINGS | {"n_estimators": 6, "boosting": "dart", "skip_drop": 0.0, "drop_rate": 0.6}
    on_dask = DaskBoostedTreesClassifier(client=client, **dart).fit(array(x, 300), array(y, 300))
    assert on_dask.to_lightgbm() == BoostedTreesClassifier(**dart).fit(x, y).to_lightgbm()


def test_what_a_fit_refuses(client):
    x, y = table(60)
    parts, targets = array(x, 30), array(y, 30)
    model = DaskBoostedTreesRegressor(client=client, n_estimators=2)
    with pytest.raises(TreesError, match="X: expected a dask array or dataframe, got ndarray"):
        model.fit(x, targets)
    with pytest.raises(TreesError, match="y: expected 2 partitions, as X has, got 1"):
        model.fit(parts, targets[:30])
    with pytest.raises(TreesError, match="max_leaves: expected a whole number"):
        clone(model).set_params(max_leaves=0).fit(parts, targets)
    bad = np.where(np.arange(60) == 40, np.inf, y)
    with pytest.raises(ValueError, match="y contains infinity"):
        model.fit(parts, array(bad, 30))
    assert not hasattr(model, "booster_")


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_processes_and_a_killed_one(count):
    x, y, weights = rows_with_categories()
    settings = SETTINGS | {"categorical_features": [1]}
    plain = BoostedTreesClassifier(**settings).fit(x, y, weights)
    options = {"processes": True, "dashboard_address": ":0", "n_workers": count, "threads_per_worker": 1}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        parts, targets = array(x, 70, 70, 300, 500), array(y, 300)
        on_dask = DaskBoostedTreesClassifier(**settings).fit(parts, targets, array(weights, 100))
        assert on_dask.to_lightgbm() == plain.to_lightgbm()

        endless = DaskBoostedTreesClassifier(n_estimators=10**6)
        victim, process = sorted(client.run(os.getpid).items())[count // 2 - 1]  # the one that hosts the store, too
        threading.Timer(2.0, os.kill, (process, signal.SIGKILL)).start()
        with pytest.raises(ProcessLostError, match=f"lost worker . at {victim} while") as lost:
            endless.fit(parts, targets)
        assert "\n" not in str(lost.value)

        client.wait_for_workers(count, timeout=120)
        assert clone(on_dask).fit(parts, targets, array(weights, 100)).to_lightgbm() == plain.to_lightgbm()

        def has_rounds():  # runs in each worker
            import gc

            known = [each for each in gc.get_objects() if type(each).__name__ == "Booster"]
            return any(len(each.trees) > SETTINGS["n_estimators"] for each in known)

        def interrupt():
            until = time.monotonic() + 120
            while not all(client.run(has_rounds).values()) and time.monotonic() < until:
                time.sleep(0.5)
            _thread.interrupt_main()

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            endless.fit(parts, targets)
        assert endless.n_iter_ >= 1
        assert len(endless.predict(parts).compute()) == 600
