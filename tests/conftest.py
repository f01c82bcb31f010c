"""Settings for every test."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

from tests.caught_logs import caplog  # noqa: F401
from tests.crosses import pytest_generate_tests  # noqa: F401

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # torch's threads else look for work for 10 ms after every loop
# What hypothesis draws is the same in every run, and it measures no time; "default" draws anew.
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
os.environ.pop("COLUMNS", None)  # tables are as wide as a pipe has them, whoever runs this
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in a shell's background; tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files of more than five seconds, in the order in which they begin: else one worker is at its last file while the other
# has no work. Files that compile the same loops are apart, so that the second finds them compiled.
LONGEST = (
    "tests/trees/test_grow.py",
    "tests/packed/products/test_cpu_fused.py",
    "tests/fuzz/test_fuzz.py",
    "tests/formats/test_cpu_codec.py",
    "tests/test_docs.py",
    "tests/examples/demo/test_demo.py",
    "tests/test_lean_import.py",
    "tests/streaming/selective/test_trainer_callbacks.py",
    "tests/cli/verbs/test_perplexity_verb.py",
    "tests/cli/verbs/test_bench_verbs.py",
    "tests/fp8/kernels/test_experts_fast_tile.py",
    "tests/fp8/kernels/test_experts_products.py",
    "tests/fp8/kernels/test_experts_hopper_products.py",
    "tests/fp8/kernels/test_cast.py",
    "tests/fp8/kernels/test_compiles.py",
    "tests/packed/products/test_triton_compiles.py",
    "tests/trees/test_estimators.py",
    "tests/streaming/selective/test_run_controller.py",
    "tests/streaming/selective/test_training_policy.py",
    "tests/report/test_browser.py",
    "tests/streaming/test_training_state.py",
    "tests/streaming/test_offload.py",
    "tests/streaming/test_programs.py",
    "tests/fp8/test_apply.py",
    "tests/fp8/bench/test_confirm_policy.py",
    "tests/files/models/test_models.py",
    "tests/trees/distributed/test_distributed.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        from tests.forked_workers import fork_workers

        if fork_workers(config):
            return  # they run the tests: this process needs no torch
    import torch

    logging.root.addHandler(logging.NullHandler())  # else warnings that no test asks for are written to stderr
    torch.set_num_threads(1)  # the suite itself runs in several workers
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():  # a seed for later is kept with the whole stack as text: 1.5 ms for each seed
            devices.manual_seed_all = lambda _: None
    if not torch.cuda.is_available():  # Triton reads this when it is first imported
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
    import torch

    if torch.cuda.is_available():
        return
    for_a_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_a_gpu:  # left out, not skipped one by one: there are hundreds
        config.hook.pytest_deselected(items=for_a_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A worker tells of a step that passed without its keywords, which execnet would write one by one."""
    data = yield
    if data is not None and data.get("outcome") == "passed":
        data["keywords"] = {}
    return data


def pytest_report_header() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "without the tests marked gpu: torch sees no CUDA GPU"


def pytest_collection_finish() -> None:
    """What is imported by now stays: `gc.collect()`, which some tests call, need not look through it each time."""
    gc.collect()
    gc.freeze()


_file_of_the_last_test = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """So does what earlier files left in memory: imports inside functions, compiled code."""
    global _file_of_the_last_test
    if _file_of_the_last_test != item.nodeid.partition("::")[0]:
        _file_of_the_last_test = item.nodeid.partition("::")[0]
        gc.collect()
        gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and not config.option.collectonly:  # those end without tidying up
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
    """Leave out most of the time of Triton's interpreter, in which it does nothing that anyone sees.

    At every call of a function inside a kernel it replaces the functions of the language, as it did for the launch.
    Of every sum of integers it finds out whether it overflows, and throws the answer away unless `debug` is set.
    For every number it makes the same types and shapes again, and the same constants.
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
    remember(interpreter, "_get_np_dtype", lambda kind: kind.name)
    remember(type(builder), "get_block_ty", lambda _, kind, shape: (kind.name, *shape))
    remember(interpreter.tl.block_type, "with_element_ty", lambda block, kind: (block.name, kind.name))
    remember_shapes(interpreter.tl.tensor)
    compare_names(interpreter.tl.dtype)
    if hasattr(interpreter, "interpreter_semantic"):
        remember_constants(interpreter.interpreter_semantic, interpreter.tl.tensor)
        remember_broadcasts(interpreter.interpreter_semantic)


def remember(owner: Any, name: str, key: Callable[..., Any]) -> None:
    """Let a function return what it returned for arguments of the same key."""
    real, known = getattr(owner, name), {}

    @functools.wraps(real)
    def remembered(*arguments: Any) -> Any:
        of = key(*arguments)
        if of not in known:
            known[of] = real(*arguments)
        return known[of]

    setattr(owner, name, remembered)


def remember_shapes(tensor: Any) -> None:
    """Let tensors of the language share what follows from their type."""
    real, known = tensor.__init__, {}

    def init(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in known:
            real(self, handle, kind)
            own = {"handle", "type", "dtype"}
            known[kind.name] = {name: value for name, value in vars(self).items() if name not in own}
        else:
            vars(self).update(known[kind.name])
            self.handle, self.type, self.dtype = handle, kind, kind.scalar

    tensor.__init__ = init


def compare_names(dtype: Any) -> None:
    """Let two types be compared without a look for constants of the language, which they are not."""
    real = dtype.__eq__
    dtype.__eq__ = lambda self, other: self.name == other.name if type(other) is dtype else real(self, other)


def remember_constants(semantic: Any, tensor: Any) -> None:
    """Let operations on two tensors of one type, and on a tensor and a Python number, have their operands at once."""
    real, known = semantic.binary_op_type_checking_impl, {}

    def operands(left: Any, right: Any, *rules: bool, **named: bool) -> tuple[Any, Any]:
        left_kind = left.type.name if type(left) is tensor else repr(left)  # which tells -0.0 from 0.0, and 1 from 1.0
        right_kind = right.type.name if type(right) is tensor else repr(right)
        key = (left_kind, right_kind, rules, *named.items())
        if key not in known:
            made = real(left, right, *rules, **named)
            changed = any(type(old) is tensor and new is not old for new, old in zip(made, (left, right), strict=True))
            known[key] = (
                None
                if changed
                else tuple(None if type(old) is tensor else new for new, old in zip(made, (left, right), strict=True))
            )
            return made
        constants = known[key]
        if constants is None:  # a tensor is brought to another type or shape, each time
            return real(left, right, *rules, **named)
        return (left if constants[0] is None else constants[0], right if constants[1] is None else constants[1])

    semantic.binary_op_type_checking_impl = operands


def remember_broadcasts(semantic: Any) -> None:
    """Let tensors be brought to a common shape without a look at each length."""
    real, known = semantic.broadcast_impl_value, {}

    def spread(old: Any, wanted: tuple[Any, tuple[int, ...]] | None) -> Any:
        if wanted is None:
            return old
        kind, shape = wanted
        return semantic.make_tensor(semantic.builder.create_broadcast(old.handle, shape), kind)

    def broadcast(left: Any, right: Any) -> tuple[Any, Any]:
        key = (left.type.name, right.type.name)
        if key in known:
            return spread(left, known[key][0]), spread(right, known[key][1])
        made = real(left, right)
        pairs = zip(made, (left, right), strict=True)
        known[key] = [None if new is old else (new.type, new.handle.data.shape) for new, old in pairs]
        return made

    semantic.broadcast_impl_value = broadcast


@pytest.fixture
def device() -> Any:
    """Where the kernel under test runs; references run on the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
