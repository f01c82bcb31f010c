"""Real processes for tests of distributed fits: started once, then given one job after the other.

A job is a function of this module by name, with arguments; the first `count` processes make a gloo group, run it, and
send back what it returned or the error it raised. Importing torch and numba takes seconds, so that is done once.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import numpy as np

from tests.processes import SERVER


class Pool:
    """Processes that wait for jobs; those that a job killed are started again by the next one."""

    def __init__(self, folder):
        self._folder, self._jobs, self._workers = folder, 0, {}

    def run(self, count, job, *arguments, store="file", timeout_s=300):
        """What each of `count` processes returned, by rank; None for one that died."""
        self._jobs += 1
        where = f"file://{self._folder}/store-{self._jobs}"
        if store == "tcp":
            where = f"tcp://127.0.0.1:{free_port()}"
        for rank in range(count):
            self._worker(rank)[1].send((where, rank, count, job, arguments))
        until, result = time.monotonic() + timeout_s, []
        for rank in range(count):
            process, pipe = self._workers[rank]
            try:
                assert pipe.poll(max(0.0, until - time.monotonic())), f"rank {rank} took longer than {timeout_s} s"
                result.append(pipe.recv())
            except EOFError:
                process.join()
                result.append(None)
                del self._workers[rank]
            except AssertionError:
                self.close()
                raise
        return result

    def close(self):
        for process, _ in self._workers.values():
            process.kill()
            process.join()
        self._workers = {}

    def _worker(self, rank):
        if rank not in self._workers:
            ours, theirs = SERVER.Pipe()
            process = SERVER.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers[rank] = process, ours
        return self._workers[rank]


def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_together(count, command, folder):
    """Run a script, with arguments, in as many processes as one group has; all must succeed. What each printed."""
    port, outputs = free_port(), [folder / f"{rank}.txt" for rank in range(count)]
    started = [
        SERVER.Process(target=run_script, args=(command, rank, count, port, output))
        for rank, output in enumerate(outputs)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert codes == [0] * count
    return [output.read_text() for output in outputs]


def run_script(command, rank, count, port, output):
    """A script as torchrun starts it."""
    import contextlib
    import runpy
    import sys

    import torch

    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv = command
    with output.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(command[0], run_name="__main__")


def serve(pipe):
    import torch
    import torch.distributed as dist

    from bitplan.base import process_status

    torch.set_num_threads(1)
    process_status.ANSWER_WAIT_S = 2.0  # these tests wait for it
    while True:
        where, rank, count, job, arguments = pipe.recv()
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=count, timeout=timedelta(seconds=60))
        started = time.monotonic()
        try:
            answer = globals()[job](rank, *arguments)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        answer["seconds"] = time.monotonic() - started
        dist.destroy_process_group()
        pipe.send(answer)


# ---- jobs ------------------------------------------------------------------------------------------------------------


def fit(rank, kind, settings, data, cuts, eval_cuts=None):
    """Fit on rows cuts[rank] .. cuts[rank + 1] of the arrays in `data` (x, y, and weights or an evaluation set)."""
    from bitplan import trees
    from bitplan.trees.distributed.fit import fit_distributed

    here = slice(cuts[rank], cuts[rank + 1])
    model = getattr(trees, kind)(**settings)
    eval_set = None
    if "eval_x" in data:
        there = slice(eval_cuts[rank], eval_cuts[rank + 1])
        eval_set = data["eval_x"][there], data["eval_y"][there]
    weights = data["weights"][here] if "weights" in data else None
    done = fit_distributed(model, data["x"][here], data["y"][here], weights, eval_set, timeout_s=20)
    classes = model.classes_.tolist() if hasattr(model, "classes_") else None
    return {"text": model.to_lightgbm(), "losses": model.booster_.losses, "classes": classes, "fit": done}


def half_squared_error(y, scores):
    """A custom objective, by a name that every process knows."""
    return scores - y, np.ones(len(y))


def fit_each(rank, fits):
    """Several fits in one group, because meeting takes longer than they do."""
    return {"fits": [fit(rank, *arguments) for arguments in fits]}


def fit_with_small_sample(rank, settings, x, y, cuts, sample_rows):
    """Fit with bins from `sample_rows` rows."""
    from bitplan.trees import binning

    usual, binning.SAMPLE_ROWS = binning.SAMPLE_ROWS, sample_rows
    try:
        return fit(rank, "BoostedTreesRegressor", settings, {"x": x, "y": y}, cuts)
    finally:
        binning.SAMPLE_ROWS = usual


def fit_after_error(rank, x, y):
    """A fit that one process refuses, and then one that all can do."""
    from bitplan.base.errors import BitplanError
    from bitplan.trees import BoostedTreesRegressor
    from bitplan.trees.distributed.fit import fit_distributed

    model = BoostedTreesRegressor(n_estimators=2)
    try:
        fit_distributed(model, x, y if rank else y[:-1])
    except (BitplanError, ValueError) as error:
        seen = str(error)
    fit_distributed(model, x, y)
    return {"text": model.to_lightgbm(), "seen": seen}


def fit_apart(rank, kind, per_rank):
    """Fit what per_rank[rank] says: settings, x, y."""
    from bitplan import trees
    from bitplan.trees.distributed.fit import fit_distributed

    settings, *arguments = per_rank[rank]
    fit_distributed(getattr(trees, kind)(**settings), *arguments, timeout_s=20)
    return {}


def fit_and_lie(rank, lie, step):
    """Rank 1 sends, in one step, what does not fit."""
    from bitplan.trees import BoostedTreesRegressor
    from bitplan.trees.distributed.fit import fit_distributed
    from bitplan.trees.distributed.ranks import Ranks

    add, gather, announce = Ranks.add, Ranks.gather, Ranks._announce

    def lying_add(self, integers, what):
        return add(self, integers[:-1] if what == step and lie == "another size" else integers, what)

    def lying_announce(self, size, what):
        if what == step:
            size, what = {"length of its array": (2**60, what), "another step": (size, "lunch")}.get(lie, (size, what))
        return announce(self, size, what)

    def lying_gather(self, part, what):
        if what == step:
            part = {
                "two numbers": lambda: np.repeat(part, 2),
                "fewer than no rows": lambda: part * 0 - 5,
                "a document": lambda: np.frombuffer(b'["surprise"]', np.uint8),
            }.get(lie, lambda: part)()
        return gather(self, part, what)

    if rank == 1:
        Ranks.add, Ranks.gather, Ranks._announce = lying_add, lying_gather, lying_announce
    x = np.random.default_rng(rank).standard_normal((200, 3))
    try:
        fit_distributed(BoostedTreesRegressor(n_estimators=2), x, x[:, 0], timeout_s=5)
    finally:
        Ranks.add, Ranks.gather, Ranks._announce = add, gather, announce
    return {}


def fit_and_stop(rank, how, bad_rank, timeout_s):
    """A custom objective that, in its third round on one rank, is killed, hangs or raises; or a rank never comes."""
    from bitplan.trees import BoostedTreesRegressor
    from bitplan.trees.distributed.fit import fit_distributed

    if how == "never comes" and rank == bad_rank:
        time.sleep(timeout_s + 4)
        return {}
    rounds = []

    def objective(y, scores):
        rounds.append(len(y))
        if len(rounds) == 3 and rank == bad_rank:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(timeout_s + 4)
            if how == "raises":
                raise ValueError("broken on purpose")
        return scores - y, np.ones(len(y))

    x = np.random.default_rng(rank).standard_normal((200, 3))
    model = BoostedTreesRegressor(objective=objective, n_estimators=50)
    fit_distributed(model, x, x[:, 0], timeout_s=timeout_s)
    return {}
