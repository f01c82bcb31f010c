"""What a layer benchmark is asked to do: LoongForge's TE_LAYER_PERF_* variables with its defaults, and options of ours.

The environment is passed as a mapping, so that tests need not set variables. An unknown variable with our prefix is
refused: with a misspelt name, the default would be measured and nobody would notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bitplan.base.errors import did_you_mean
from bitplan.fp8.policy.report import ROUTINGS, TIMINGS
from bitplan.fp8.policy.vocabulary import DEFAULT_RECIPE, DEFAULT_THRESHOLD, PRECISIONS, Fp8Error
from bitplan.fp8.recipes import recipe_fault

PREFIX = "TE_LAYER_PERF_"
# LoongForge does not define its automatic sweep. Ours doubles from where FP8 rarely pays to where it nearly always
# does.
AUTO_SWEEP = tuple((length, 1) for length in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768))


class BenchOptionsError(Fp8Error):
    """A TE_LAYER_PERF_* variable that is unknown, or has a wrong value."""


@dataclass(frozen=True)
class BenchOptions:
    """The variables, in LoongForge's order, then what no variable sets. Sizes of None: the model's own."""

    omni_config_path: str | None = None
    tp_size: int | None = None
    ep_size: int | None = None
    etp_size: int | None = None
    precisions: tuple[str, ...] = PRECISIONS
    fp8_recipe: str = DEFAULT_RECIPE
    warmup: int = 10
    iters: int = 10
    report_path: str | None = None
    fp8_policy_path: str | None = None
    speedup_threshold: float = DEFAULT_THRESHOLD
    shape_sweep: tuple[tuple[int, int], ...] = AUTO_SWEEP
    fp8: str = "e4m3"
    timings: tuple[str, ...] = TIMINGS
    routings: tuple[str, ...] = ROUTINGS
    products_apart: bool = True
    part: str | None = None
    device: str = "cuda"
    shapes: str | None = None

    def report_file(self) -> Path:
        """Where the report goes: beside the policy, if only that has a path."""
        if not self.report_path and not self.fp8_policy_path:
            raise BenchOptionsError("no report path (nor TE_LAYER_PERF_REPORT_PATH)", settings={"report_path": "FILE"})
        return Path(self.report_path or f"{self.fp8_policy_path}.report.jsonl")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> BenchOptions:
        """The options that the variables set; an empty variable counts as not set."""
        given = {}
        for name in sorted(environment):
            if not name.startswith(PREFIX):
                continue
            key = name.removeprefix(PREFIX).lower()
            if key not in _READERS:
                hint = did_you_mean(name, [PREFIX + known.upper() for known in _READERS])
                raise BenchOptionsError(f"{name} is not a variable of the benchmark{hint}; unset it, or see the docs")
            if environment[name].strip():
                given[key] = read_option(key, environment[name].strip(), name)
        return cls(**given)


def read_option(key: str, text: str, name: str) -> Any:
    """The value of an option that a variable can set, from its text; an error calls the option `name`."""
    return _READERS[key](text, name)


def parse_sweep(text: str, name: str = "the sweep") -> tuple[tuple[int, int], ...]:
    """`1024x1,4096x2`: sequence length x micro batch size, as many as wanted."""
    shapes = []
    for item in text.split(","):
        length, _, batch = item.strip().lower().partition("x")
        if not (_is_count(length) and _is_count(batch)):
            raise BenchOptionsError(
                f"{name} must be LENGTHxBATCH pairs such as '1024x1,4096x2', each from 1, got {item.strip()!r}"
            )
        shapes.append((int(length), int(batch)))
    return tuple(shapes)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12 and int(text) >= 1


def _size(text: str, name: str) -> int | None:
    """A parallel size; 0 is the model's own, as in LoongForge."""
    return _whole(text, name, 0) or None


def _whole(text: str, name: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= least):
        raise BenchOptionsError(f"{name} must be a whole number from {least}, got {text!r}")
    return int(text)


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise BenchOptionsError(f"{name} must be a number above 0, got {text!r}")
    return value


def _precisions(text: str, name: str) -> tuple[str, ...]:
    named = tuple(item.strip().lower() for item in text.split(","))
    if not set(named) <= set(PRECISIONS) or len(set(named)) != len(named):
        raise BenchOptionsError(f"{name} must be 'bf16,fp8' or one of the two, got {text!r}")
    return tuple(precision for precision in PRECISIONS if precision in named)


def _recipe(text: str, name: str) -> str:
    if fault := recipe_fault(text, name):
        raise BenchOptionsError(fault)
    return text


_READERS: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("omni_config_path", "report_path", "fp8_policy_path"), lambda text, _: text),
    **dict.fromkeys(("tp_size", "ep_size", "etp_size"), _size),
    "precisions": _precisions,
    "fp8_recipe": _recipe,
    "warmup": partial(_whole, least=0),
    "iters": partial(_whole, least=1),
    "speedup_threshold": _number,
    "shape_sweep": parse_sweep,
}
