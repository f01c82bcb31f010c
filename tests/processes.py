"""Processes of their own for tests, forked from one that has torch: importing it takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preloaded", "tests.trees.distributed.workers"])

BITPLAN = "from bitplan.cli import main; main()"  # the command line, whose words are the program's arguments


class Program:
    """A program that runs in a folder as `python -c CODE ARGUMENTS` does, from this process's sys.path."""

    def __init__(self, code: str, *arguments: str, folder: Path, strict: bool = False) -> None:
        written_in = tempfile.mkdtemp(prefix="program-")
        weakref.finalize(self, shutil.rmtree, written_in)
        self._output, self._errors = (Path(written_in, name) for name in ("output", "errors"))
        for path in (self._output, self._errors):
            path.touch()
        written = (str(self._output), str(self._errors))
        self._process = SERVER.Process(target=_run, args=(code, arguments, str(folder), written, strict), daemon=True)
        self._process.start()

    @property
    def output(self) -> str:
        """What it printed so far."""
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def wait(self) -> int:
        """The exit status; a signal is a negative one."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Return when the condition holds; a program that ends before, or five minutes, is a failure."""
        last = time.monotonic() + 300
        while not condition():
            assert self._process.exitcode is None, f"exit status {self._process.exitcode}: {self.errors}"
            assert time.monotonic() < last, f"nothing in five minutes: {self.errors}"
            time.sleep(0.002)

    def signal(self, number: int) -> int:
        """Send a signal, and return the exit status."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        return self.wait()


COMPILING = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = os.getcwd()
for name in [name for name in sys.modules if name.startswith("triton") and not name.startswith("triton._C")]:
    del sys.modules[name]
"""


def compile_with_triton(code: str, *arguments: str, folder: Path) -> str:
    """Run a program whose Triton compiles, where that of this process interprets; what it printed."""
    program = Program(COMPILING + code, *arguments, folder=folder)
    assert program.wait() == 0, program.output[-500:] + program.errors[-3000:]
    return program.output


def run_code(code: str, folder: Path) -> str:
    """Run a program in a folder, warnings as errors, and return what it wrote as errors; "" if it succeeded."""
    program = Program(code, folder=folder, strict=True)
    status = program.wait()
    return "" if status == 0 else program.errors or f"exit code {status}"


def _run(code: str, arguments: tuple[str, ...], folder: str, written: tuple[str, str], strict: bool) -> None:
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    for descriptor, path in enumerate(written, start=1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    if strict:
        warnings.simplefilter("error")
    exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})
