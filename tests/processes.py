"""Processes of their own for tests, forked from one that has torch: importing it takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import warnings
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "bitplan.trees.distributed.fit", "tests.trees.distributed.workers"])


def run_code(code: str, folder: Path) -> str:
    """Run a program in a folder, warnings as errors, and return what it wrote as errors; "" if it succeeded."""
    process = SERVER.Process(target=_run, args=(code, str(folder), str(folder / "errors.txt")))
    process.start()
    process.join()
    return "" if process.exitcode == 0 else (folder / "errors.txt").read_text() or f"exit code {process.exitcode}"


def _run(code: str, folder: str, errors: str) -> None:
    os.chdir(folder)
    sys.argv = ["-c"]
    with open(errors, "w") as file, open(os.devnull, "w") as nothing:
        os.dup2(file.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
        try:
            warnings.simplefilter("error")
            exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=file)
            file.flush()
            os._exit(1)
