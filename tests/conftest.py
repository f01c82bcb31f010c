"""Settings for every test."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator

import pytest
import torch
import typer.main
from crosses import pytest_generate_tests  # noqa: F401  # tests/ is where pytest begins

os.environ.pop("COLUMNS", None)  # tables are as wide as a pipe has them, whoever runs this
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in a shell's background; tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the suite itself runs in several workers
typer.main.get_command = functools.cache(typer.main.get_command)  # a tenth of a second, for each command a test runs
if not torch.cuda.is_available():  # Triton reads this when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


# Triton 3.6 makes the bound of a loop an integer in a way that NumPy refuses since 2.5: such kernels run on a GPU only.
BROKEN_LOOP = "TypeError('only 0-dimensional arrays can be converted to Python scalar"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A kernel that this machine's interpreter cannot run is skipped, with the reason."""
    try:
        return (yield)
    except Exception as error:
        if type(error).__name__ == "InterpreterError" and str(error).startswith(BROKEN_LOOP):
            pytest.skip("Triton's interpreter of this version runs no loop under this NumPy")
        raise
