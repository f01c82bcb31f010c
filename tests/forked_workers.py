"""Workers of pytest-xdist that are forked: imports, and reading the test files, are done once for all of them.

The server of tests/processes.py has torch and the package. One process forked from it imports the test files, as pytest
does, and forks again for each worker. To xdist a worker is a Python of its own, `--tx popen//python=PROGRAM`, and the
program is this file: it hands its input and output to a forked one, and ends when that ends. Coverage counts what
imports run: under `--cov` every worker imports by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
import warnings
from pathlib import Path

RUNS, ENDED = b"r", b"e"  # what a forked worker says to the program in whose place it runs


def run_forked(address: str) -> int:
    """Be the program that xdist starts, with nothing but the standard library: the exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        last = time.monotonic() + 60
        while True:  # until the server listens, before it imports
            try:
                server.connect(address)
                break
            except OSError:
                if time.monotonic() > last:
                    raise
                time.sleep(0.01)
        socket.send_fds(server, [RUNS], [0, 1])
        if server.recv(1) != RUNS:
            sys.exit("the process that imports the test files ended: pytest -n 0 shows why")
        os.close(1)
        return 0 if server.recv(1) == ENDED else 1


if __name__ == "__main__":
    sys.exit(run_forked(sys.argv[1]))

from multiprocessing import connection, forkserver, parent_process  # noqa: E402
from multiprocessing.process import BaseProcess  # noqa: E402

import pytest  # noqa: E402

from bitplan.packed.machine import has_gpu_driver  # noqa: E402
from tests.processes import SERVER  # noqa: E402


def fork_workers(config: pytest.Config) -> bool:
    """Have pytest-xdist fork its workers, if there are to be any and this is not one of them; whether it will."""
    workers = getattr(config.option, "tx", None) or []
    if not workers or hasattr(config, "workerinput") or getattr(config.option, "cov_source", None):
        return False
    if has_gpu_driver() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return False  # CUDA does not survive a fork
    os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton reads when it is first imported
    folder = tempfile.mkdtemp(prefix="workers-")
    address = str(Path(folder, "server"))
    program = shlex.join([sys.executable, "-I", "-S", __file__, address])
    config.option.tx = [f"popen//python={program}" for _ in workers]
    process = SERVER.Process(target=_read_and_fork, args=(config.args, address))
    process.start()
    config.add_cleanup(lambda: _end(process, address))
    return True


def _end(process: BaseProcess, address: str) -> None:
    """Wait for the workers and then for their server: what was started has ended, and its time counts as this one's."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:  # it may have ended by an error
        server.connect(address)
    process.join()
    shutil.rmtree(Path(address).parent)
    forkserver._forkserver._stop()


def _read_and_fork(files: list[str], address: str) -> None:
    """Import the test files once, become the parent of the workers, and wait for them."""
    if not hasattr(forkserver._forkserver, "_forkserver_authkey"):  # which Python 3.14 keeps from the server's children
        forkserver._forkserver.ensure_running = lambda: None  # workers use the server that this process comes from
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    gc.disable()  # imports leave little behind that a collection would find
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main(["--collect-only", "-p", "no:randomly", "--capture=no", *files], plugins=[_ImportsAlone()])
    gc.freeze()  # what is in memory by now is shared by the workers, unless their collectors write to it
    gc.enable()
    tests = parent_process()
    assert tests is not None
    while listener in connection.wait([listener, tests.sentinel]):
        program, _ = listener.accept()
        _, descriptors, _, _ = socket.recv_fds(program, 1, 2)
        if not descriptors:
            break
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # NumPy's threads do no work now
            child = os.fork()
        if not child:
            listener.close()
            _serve(program, descriptors)
        for descriptor in (*descriptors, program.detach()):
            os.close(descriptor)
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


def _serve(program: socket.socket, descriptors: list[int]) -> None:
    """Do as the program does with which execnet starts a worker, and end the process."""
    import torch

    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    program.send(RUNS)
    torch.set_num_threads(torch.get_num_threads())  # makes the pool anew that a fork leaves without threads
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    try:
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
        program.send(ENDED)
    finally:
        atexit._run_exitfuncs()
        os._exit(0)
