"""Settings for every test."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.main

from tests.crosses import pytest_generate_tests  # noqa: F401
from tests.forked_workers import pytest_configure  # noqa: F401

os.environ.pop("COLUMNS", None)  # tables are as wide as a pipe has them, whoever runs this
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in a shell's background; tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the suite itself runs in several workers
typer.main.get_command = functools.cache(typer.main.get_command)  # a tenth of a second, for each command a test runs
if not torch.cuda.is_available():  # Triton reads this when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Where a test takes seconds, or many together more than five. They begin first: a worker has no work left while the
# other one is at its last file.
LONGEST = (
    *("test_fuzz.py", "test_fp8_bench_ranks.py", "test_grow.py", "test_fp8_grouped_pairs.py", "test_demo.py"),
    *("test_trainer_callbacks.py", "test_selective_precision.py", "test_training_state.py", "test_estimators.py"),
    *("test_distributed.py", "test_docs.py", "test_cpu_codec.py", "test_perplexity_verb.py", "test_bench_verbs.py"),
    *("test_fp8_grouped.py", "test_fp8_apply.py", "test_fp8_cast.py", "test_fp8_grouped_gluon.py"),
    *("test_lean_import.py", "test_fp8_parallel.py", "test_fp8_compiles.py", "test_triton_compiles.py"),
    *("test_browser.py", "test_stream_offload.py", "test_fp8_confirm_policy.py", "test_models.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """What is imported by now stays: `gc.collect()`, which some tests call, need not look through it each time."""
    gc.collect()
    gc.freeze()
    for logger in logging.Logger.manager.loggerDict.values():  # else pytest visits each of torch's, six times a test
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_unconfigure() -> None:
    gc.unfreeze()


# Triton 3.6 makes the bound of a loop an integer in a way that NumPy refuses since 2.5: such kernels run on a GPU only.
BROKEN_LOOP = "TypeError('only 0-dimensional arrays can be converted to Python scalar"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A kernel that this machine's interpreter cannot run is skipped, with the reason."""
    hasten_the_interpreter()
    try:
        return (yield)
    except Exception as error:
        if type(error).__name__ == "InterpreterError" and str(error).startswith(BROKEN_LOOP):
            pytest.skip("Triton's interpreter of this version runs no loop under this NumPy")
        raise


def hasten_the_interpreter() -> None:
    """Leave out two thirds of the time of Triton's interpreter, in which it does nothing that anyone sees.

    At every call of a function inside a kernel it replaces the functions of the language, as it did for the launch. And
    of every sum of integers it finds out whether it overflows, and throws the answer away unless `debug` is set.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter._patch_lang, "__wrapped__"):
        return
    real, launches = interpreter._patch_lang, []
    whole_language = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})

    @functools.wraps(real)
    def patch_lang(_: Any) -> Any:
        if launches:
            return SimpleNamespace(restore=lambda: None)
        scope = real(whole_language)
        launches.append(scope)
        if scope is not None:  # older versions replace them for good
            restore = scope.restore
            scope.restore = lambda: (launches.clear(), restore())
        return scope

    interpreter._patch_lang = patch_lang
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
