"""Workers of pytest-xdist that are forked: imports, and reading the test files, are done once for all of them.

The server of tests/processes.py has torch and the package. One process forked from it imports the test files, as pytest
does, and forks again for each worker. Coverage counts what imports run: under `--cov` every worker imports by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import warnings
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO

from bitplan.packed.machine import has_gpu_driver
from tests.processes import SERVER


def fork_workers(config: pytest.Config) -> bool:
    """Have pytest-xdist fork its workers, if there are to be any and this is not one of them; whether it will."""
    count = len(getattr(config.option, "tx", None) or [])
    if not count or hasattr(config, "workerinput") or getattr(config.option, "cov_source", None):
        return False
    if has_gpu_driver() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return False  # CUDA does not survive a fork
    os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton reads when it is first imported
    pipes = [(SERVER.Pipe(duplex=False), SERVER.Pipe(duplex=False)) for _ in range(count)]
    theirs = [(requests[0], answers[1]) for requests, answers in pipes]
    process = SERVER.Process(target=_read_and_fork, args=(config.args, theirs))
    process.start()
    for pipe in (pipe for pair in theirs for pipe in pair):
        pipe.close()  # so that a worker that ends is seen to end
    config.add_cleanup(lambda: _end(process))
    ours = [(requests[1], answers[0]) for requests, answers in pipes]
    real = gateway_io.Popen2IOMaster

    def next_worker(arguments: Any, model: ExecModel) -> Popen2IO:
        """A forked one; in place of one that crashed, one that imports all by itself."""
        return _ForkedWorker(process, *ours.pop(0), model) if ours else real(arguments, model)

    gateway_io.Popen2IOMaster = next_worker
    return True


class _ForkedWorker(Popen2IO):
    """The controller's side of a worker, as execnet wants it."""

    def __init__(self, process: BaseProcess, requests: Connection, answers: Connection, model: ExecModel) -> None:
        try:
            self._process, self._pid = process, answers.recv()
        except EOFError:
            raise pytest.UsageError("the process that imports the test files ended: pytest -n 0 shows why") from None
        super().__init__(os.fdopen(os.dup(requests.fileno()), "wb"), os.fdopen(os.dup(answers.fileno()), "rb"), model)
        requests.close()
        answers.close()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(self._pid, signal.SIGKILL)


def _end(process: BaseProcess) -> None:
    """Wait for the workers and then for their server: what was started has ended, and its time counts as this one's."""
    process.join()
    forkserver._forkserver._stop()


def _read_and_fork(files: list[str], pipes: list[tuple[Connection, Connection]]) -> None:
    """Import the test files once, become the parent of the workers, and wait for them."""
    if not hasattr(forkserver._forkserver, "_forkserver_authkey"):  # which Python 3.14 keeps from the server's children
        forkserver._forkserver.ensure_running = lambda: None  # workers use the server that this process comes from
    gc.disable()  # imports leave little behind that a collection would find
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main(["--collect-only", "-p", "no:randomly", "--capture=no", *files], plugins=[_ImportsAlone()])
    gc.freeze()  # what is in memory by now is shared by the workers, unless their collectors write to it
    gc.enable()
    while pipes:
        requests, answers = pipes.pop(0)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # NumPy's threads do no work now
            child = os.fork()
        if not child:
            for pipe in (pipe for pair in pipes for pipe in pair):
                pipe.close()
            _serve(requests, answers)
        requests.close()
        answers.close()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


class _ImportsAlone:
    """Test files are imported, and their tests left to the workers.

    Those of hypothesis are collected, for it then reads the constants of all modules.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, obj: object) -> list[pytest.Item] | None:
        return None if getattr(obj, "is_hypothesis_test", False) is True else []


def _serve(requests: Connection, answers: Connection) -> None:
    """Do as the program does with which execnet starts a worker, and end the process."""
    import torch

    answers.send(os.getpid())
    os.dup2(requests.fileno(), 0)
    os.dup2(answers.fileno(), 1)
    requests.close()
    answers.close()
    torch.set_num_threads(torch.get_num_threads())  # makes the pool anew that a fork leaves without threads
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    try:
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()
        os._exit(0)
