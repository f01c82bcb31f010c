"""`n_jobs`: what it means, what limits it, and that torch's threads are something else."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import joblib
import numpy as np
import pytest
import torch

from bitplan.base.loops import helper_threads, jit, row_pieces
from bitplan.base.loops.jit import on_threads, thread_count, use_threads
from bitplan.trees import BoostedTreesClassifier, TreesError, boost, grow, thread_workspace, threads
from bitplan.trees.threads import LIMITS, allowed_cores, threads_of
from tests.processes import Program
from tests.trees.samples import table


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(threads, "_joblib_cores", lambda *_: 4)
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("n_jobs", "threads"), [(None, 4), (-1, 4), (-2, 3), (-4, 1), (-9, 1), (1, 1), (7, 7), (np.int64(2), 2)]
)
def test_what_n_jobs_means(n_jobs, threads):
    assert threads_of(n_jobs) == threads


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("n_jobs", "looks"), [(4, helper_threads.OWN_LOOKS), (5, helper_threads.SHARED_LOOKS)])
def test_threads_of_a_fit_wait_longer_where_each_has_a_core(n_jobs, looks):
    x, y = table(60)
    seen = []
    ended = [lambda _state: seen.append(helper_threads.looks())]
    BoostedTreesClassifier(n_estimators=2, n_jobs=n_jobs).fit(x, y > 0, callbacks=ended)
    assert seen == [looks, looks]
    assert helper_threads.looks() == helper_threads.SHARED_LOOKS


@pytest.mark.parametrize("n_jobs", [0, 1.0, "2", True, [2]])
def test_other_values_are_refused(n_jobs):
    with pytest.raises(TreesError, match="n_jobs: expected None, a whole number"):
        threads_of(n_jobs)
    x, y = table(60)
    with pytest.raises(TreesError, match="n_jobs"):
        BoostedTreesClassifier(n_jobs=n_jobs).fit(x, y > 0)


@pytest.mark.usefixtures("four_cores")
def test_variables_limit_all_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert (threads_of(-1), threads_of(-2), threads_of(8)) == (3, 2, 8)
    monkeypatch.setenv("NUMBA_NUM_THREADS", "2")
    assert threads_of(None) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "many")  # OpenMP ignores it, too
    assert threads_of(None) == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_affinity_limits_all_cores(monkeypatch):
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert allowed_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_joblib_worker_has_the_variables_that_limit_it():
    names = list(LIMITS)  # by value: the worker need not import this module
    with joblib.parallel_config(backend="loky", n_jobs=2, inner_max_num_threads=1):
        result = joblib.Parallel()(joblib.delayed(lambda: [os.environ[name] for name in names])() for _ in range(2))
    assert result == [["1", "1"]] * 2


def test_fit_and_predict_use_n_jobs_and_not_torchs_threads(monkeypatch):
    used = []

    def watched(work, pieces):
        used.append(thread_count())
        return on_threads(work, pieces)

    for module in ("binning", "grow", "histogram"):
        monkeypatch.setattr(f"bitplan.trees.{module}.on_threads", watched)
    by_rows = row_pieces.threads_for
    monkeypatch.setattr(row_pieces, "threads_for", lambda *given: used.append(thread_count()) or by_rows(*given))
    monkeypatch.setattr("bitplan.trees.tree.run", lambda function, job, threads: used.append(threads) or function(job))
    x, y = table(200)
    model = BoostedTreesClassifier(n_estimators=1, n_jobs=3).fit(x, y > 0)
    assert set(used) == {3}
    used.clear()
    monkeypatch.setattr("bitplan.trees.tree.HELPER_NS", 1.0)  # else 200 rows are for one thread
    model.set_params(n_jobs=2).predict_proba(x)
    assert set(used) == {2}
    assert thread_count() == torch.get_num_threads()


def test_a_few_rows_are_not_handed_to_many_threads():
    with use_threads(16):
        assert row_pieces.threads_for(1000, 3.0) == 1
        assert 1 < row_pieces.threads_for(20_000, 3.0) < row_pieces.threads_for(100_000, 3.0) < 16
        assert row_pieces.threads_for(100_000_000, 3.0) == 16
        teams = [thread_workspace.team_size(rows, 7, 31) for rows in (1000, 65_536, 2_000_000)]
    assert teams == sorted(teams)
    assert teams[-1] == 16


def test_helpers_know_the_number_of_threads():
    with use_threads(3):
        assert on_threads(lambda _: thread_count(), range(8)) == [3] * 8


def test_two_fits_at_once_grow_the_trees_of_each(monkeypatch):
    monkeypatch.setattr(jit, "HAND_OUT_NS", 1)  # each has a team of its own
    x, y = table(400)
    targets = [y > 0, y > 0.5, y > -0.5]
    settings = {"n_estimators": 3, "max_leaves": 8, "gradient_precision": "i16", "n_jobs": 2}
    alone = [BoostedTreesClassifier(**settings).fit(x, target).to_lightgbm() for target in targets]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda target: BoostedTreesClassifier(**settings).fit(x, target), targets))
    assert [model.to_lightgbm() for model in together] == alone


@pytest.mark.parametrize("precision", ["i16", "f32"])
@pytest.mark.parametrize("more", [{}, {"subsample": 0.6, "colsample": 0.5}])
@pytest.mark.parametrize(("threads", "room", "expected"), [(2, 2**30, [2, 2, 1]), (12, 2**30, [5]), (12, 1, [])])
def test_trees_of_a_round_that_grow_side_by_side_are_those_that_grow_in_turn(
    monkeypatch, precision, more, threads, room, expected
):
    monkeypatch.setattr(jit, "HAND_OUT_NS", 1)  # 12 threads: each tree has a team of two
    x, y = table(400)
    labels = np.digitize(y, [-1.0, -0.3, 0.3, 1.0])
    settings = {"n_estimators": 3, "max_leaves": 8, "gradient_precision": precision} | more
    in_turn = BoostedTreesClassifier(**settings, n_jobs=1).fit(x, labels).to_lightgbm()
    together = []
    monkeypatch.setattr(grow, "ALONE_NS", 0.0)
    monkeypatch.setattr(grow, "MOST_SPACE", room)
    monkeypatch.setattr(
        boost, "on_threads", lambda work, pieces: together.append(len(pieces)) or on_threads(work, pieces)
    )
    side_by_side = BoostedTreesClassifier(**settings, n_jobs=threads).fit(x, labels)
    assert side_by_side.to_lightgbm() == in_turn
    assert together == 3 * expected


FORKING = """
import os
from bitplan.base.loops import jit
from bitplan.trees import BoostedTreesClassifier
from tests.trees.samples import table
jit.HAND_OUT_NS = 1
x, y = table(400)
fit = lambda: BoostedTreesClassifier(n_estimators=2, max_leaves=8, gradient_precision="i16", n_jobs=2).fit(x, y > 0)
before = fit().to_lightgbm()  # its threads are still there
child = os.fork()
if child == 0:
    os._exit(7 if fit().to_lightgbm() == before else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_fits_too(tmp_path):
    program = Program(FORKING, folder=tmp_path)
    assert program.wait() == 7, program.errors  # Python 3.12 warns there of a fork beside threads


FORKING_BESIDE = """
import os, signal, threading, time
from llvmlite.binding import ffi
from numba.core.compiler_lock import global_compiler_lock
from bitplan.trees import BoostedTreesClassifier
from tests.trees.samples import table
x, y = table(400)
fit = lambda: BoostedTreesClassifier(n_estimators=2, max_leaves=8, n_jobs=1).fit(x, y > 0)
before = fit().to_lightgbm()
stop = threading.Event()

def fit_again_and_again():  # each takes numba's lock, to look its loops up
    while not stop.is_set():
        fit()

def compile_again_and_again(lock):
    while not stop.is_set():
        with lock:
            time.sleep(0.01)
        time.sleep(0.001)

threads = [threading.Thread(target=fit_again_and_again)]
for lock in (global_compiler_lock, ffi.lib._lock):
    threads.append(threading.Thread(target=compile_again_and_again, args=[lock]))
for thread in threads:
    thread.start()
codes = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(WAIT)  # a child that hangs is killed
        from llvmlite import binding
        binding.create_context()  # takes LLVM's lock
        os._exit(7 if fit().to_lightgbm() == before else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
for thread in threads:
    thread.join()
raise SystemExit(0 if codes == [7] * 5 else f"{codes}")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_beside_fits_fits_too(tmp_path):
    program = Program(FORKING_BESIDE.replace("WAIT", "60"), folder=tmp_path)
    assert program.wait() == 0, program.errors
