"""SelectivePrecisionConfig: every switch of selective precision, read from the training config people already have.

The first group of fields are Stagehand's parameters and defaults; with these alone the system behaves as Stagehand
does. Each field of the second group switches on something that Stagehand does not have.

A file may hold the parameters bare, under `selective_precision`, or under `memory.stagehand.selective_precision` of a
whole training config; keys beside it are not checked. Inside, an unknown key is a spelling mistake, and refused: a
misspelt threshold would otherwise train for days on the default.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from bitplan.base.documents import (
    FLAG,
    NAME,
    Kind,
    Reader,
    document_key,
    is_number,
    is_text,
    keys_of,
    load_document,
    one_of,
)
from bitplan.base.errors import BitplanError, FileFormatError, FormatError, did_you_mean
from bitplan.formats import get_format
from bitplan.plan.names import listed

Precision = Literal["bf16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "int8")
# Keys of FP8 and of a ladder down to four bits, which were measured and lost, with the values that did not use them.
TURNED_DOWN: dict[str, Any] = {
    "low_precisions": ["int8"],
    "fp8_format": "fp8_e4m3_row",
    "force_fp8_blocks": [],
    "int4_format": "int4_g32",
    "force_int4_blocks": [],
    "byte_share": 1.0,
}
NESTED_UNDER = ("memory", "stagehand", "selective_precision")


class SelectiveError(BitplanError, ValueError):
    """A selective-precision setting or call that contradicts itself or does not fit the model."""


class SelectiveFileError(SelectiveError, FileFormatError):
    """A selective-precision configuration or state that cannot be read, or is of another model; nothing was changed."""


def _names(value: Any) -> bool:
    return type(value) in (list, tuple) and all(is_text(item) and item != "" for item in value)


_COUNT = Kind("an integer from 1", lambda value: type(value) is int and 1 <= value < 2**31)
_STEPS = Kind("an integer from 0", lambda value: type(value) is int and 0 <= value < 2**31)
_SHARE = Kind("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
_WEIGHT = Kind("a number from 0", lambda value: is_number(value) and value >= 0)
_POSITIVE = Kind("a number above 0", lambda value: is_number(value) and value > 0)
_BLOCKS = Kind("a list of block names (strings)", _names)


@dataclass(frozen=True)
class SelectivePrecisionConfig:
    """Stagehand's parameters and defaults, then ours; see docs/selective-precision.md for each."""

    enabled: bool = document_key(FLAG, True)
    mode: str = document_key(one_of("off", "static", "dynamic"), "dynamic")
    bf16_threshold: float = document_key(_SHARE, 0.6)
    int8_threshold: float = document_key(_SHARE, 0.3)
    ambiguous_default: str = document_key(one_of("bf16", "int8"), "bf16")
    hysteresis_margin: float = document_key(_SHARE, 0.1)
    grad_weight: float = document_key(_WEIGHT, 0.7)
    error_weight: float = document_key(_WEIGHT, 0.3)
    grad_sensitivity_threshold: float = document_key(_POSITIVE, 2.0)
    run_calibration: bool = document_key(FLAG, True)
    calibration_samples: int = document_key(_COUNT, 4)
    quant_error_threshold: float = document_key(_POSITIVE, 0.05)
    warmup_steps: int = document_key(_STEPS, 10)
    history_window: int = document_key(_COUNT, 5)
    update_interval_steps: int = document_key(_COUNT, 10)
    min_steps_between_switches: int = document_key(_STEPS, 20)
    force_bf16_blocks: tuple[str, ...] = document_key(_BLOCKS, ())
    force_int8_blocks: tuple[str, ...] = document_key(_BLOCKS, ())
    log_decisions: bool = document_key(FLAG, True)
    telemetry_enabled: bool = document_key(FLAG, True)
    telemetry_file: str = document_key(NAME, "selective_precision_telemetry.jsonl")
    # Beyond Stagehand: with the defaults the behaviour is Stagehand's.
    scoring: str = document_key(
        Kind("one of 'gradient', 'impact'", lambda value: value in ("gradient", "impact", "seed")), "gradient"
    )
    granularity: str = document_key(one_of("block", "layer"), "block")
    damage_budget: float = document_key(_POSITIVE, 0.01)
    impact_steps: int = document_key(_COUNT, 1)
    impact_tokens: int = document_key(_STEPS, 1024)
    impact_turns: int = document_key(_COUNT, 4)
    int8_format: str = document_key(NAME, "int8_row")
    bandwidth_aware: bool = document_key(FLAG, False)
    loss_feedback: bool = document_key(FLAG, False)
    loss_tolerance: float = document_key(_WEIGHT, 0.01)
    backoff_steps: int = document_key(_COUNT, 100)

    def __post_init__(self) -> None:
        _check(self, "the selective precision config")

    # ---- derived values ----------------------------------------------------------------------------------------------

    @property
    def go_low_below(self) -> float:
        """A bf16 block goes low if its score is below this: `int8_threshold - hysteresis_margin`, subtracted as
        decimals.

        Who writes 0.3 and 0.1 means 0.2; in binary floats the difference is less.
        """
        return float(Decimal(repr(self.int8_threshold)) - Decimal(repr(self.hysteresis_margin)))

    def format_of(self, precision: str) -> str:
        """The bitplan format in which a block of this precision is sent."""
        return "bfloat16" if precision == "bf16" else self.int8_format

    def forced(self, name: str) -> tuple[Precision, str] | None:
        """The forced precision of a block or layer, and the forced name: its own or its block's (the longer wins)."""
        longest: tuple[Precision, str] | None = None
        for precision in PRECISIONS:
            for entry in _forced_names(self, precision):
                if name == entry or name.startswith(f"{entry}."):
                    longest = (precision, entry) if longest is None or len(entry) > len(longest[1]) else longest
        return longest

    def require_blocks(self, names: Iterable[str]) -> None:
        """Refuse a force list with names that the model does not have."""
        known = list(names)
        parents = {name[:at] for name in known for at, letter in enumerate(name) if letter == "."}
        for precision in PRECISIONS:
            for entry in _forced_names(self, precision):
                if entry not in parents and entry not in known:
                    hint = did_you_mean(entry, known) or f"; the model has {listed(known, 3)}"
                    raise SelectiveError(
                        f"the selective precision config: force_{precision}_blocks names {entry!r}, "
                        f"no block of the model{hint}"
                    )

    # ---- documents ---------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> SelectivePrecisionConfig:
        return cls.from_document(load_document(path, SelectiveFileError), where=str(path))

    @classmethod
    def from_document(cls, document: Any, *, where: str = "the selective precision config") -> SelectivePrecisionConfig:
        """A config from the parameters, bare or nested; missing ones have their default."""
        reader = Reader(where, SelectiveFileError)
        path, section = _section(reader, document)
        item = reader.fields_of(cls, path, _without_turned_down(reader, section))
        values: dict[str, Any] = {name: tuple(value) if type(value) is list else value for name, value in item.items()}
        try:
            return cls(**values)
        except SelectiveError as error:
            # Run the checks of a config built in Python, with the file's name in messages.
            text = str(error).partition(": ")[2]
            raise SelectiveFileError(f"{where}: {path + ': ' if path else ''}{text}") from None

    def to_document(self) -> dict[str, Any]:
        """All parameters as a JSON object, in the order of the fields."""
        return {name: list(value) if type(value) is tuple else value for name, value in asdict(self).items()}


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check(config: SelectivePrecisionConfig, where: str) -> None:
    reader = Reader(where, SelectiveError)
    if config.scoring == "seed":
        warnings.warn(
            "scoring='seed' is called scoring='gradient' now; the next version refuses it", FutureWarning, stacklevel=4
        )
        object.__setattr__(config, "scoring", "gradient")
    for name, kind in keys_of(SelectivePrecisionConfig).items():
        value = getattr(config, name)
        if not kind.holds(value):
            reader.fail(name, kind.text, value)
        if type(value) is list:
            object.__setattr__(config, name, tuple(value))
        elif type(value) is int and type(getattr(SelectivePrecisionConfig, name)) is float:
            object.__setattr__(config, name, float(value))  # `1` in a file means 1.0
    low, high, margin = config.int8_threshold, config.bf16_threshold, config.hysteresis_margin
    if not low < high:
        reader.stop(
            f"int8_threshold must be below bf16_threshold, got {low} and {high}: between them lie the scores "
            "that change nothing; lower int8_threshold or raise bf16_threshold"
        )
    if not margin < low:
        reader.stop(
            f"hysteresis_margin must be below int8_threshold, got {margin} and {low}: no score is below "
            f"{config.go_low_below:g}, so a bf16 block could never switch; lower the margin"
        )
    if config.grad_weight == config.error_weight == 0:
        reader.stop("grad_weight and error_weight are both 0: every score would be 0; raise one of them")
    _check_force_lists(reader, config)
    try:
        get_format(config.int8_format)
    except FormatError as error:
        reader.stop(f"int8_format: {error}")


def _without_turned_down(reader: Reader, section: Any) -> Any:
    """The parameters of a file that an earlier version wrote or read, without keys that are gone."""
    if type(section) is not dict:
        return section
    for name, unused in TURNED_DOWN.items():
        if section.get(name, unused) != unused:
            reader.stop(
                f"{name} is {section[name]!r}: FP8 and four bits beside INT8 were measured and lost, and are gone; "
                "leave it out, and set int8_format where another format shall be the low one"
            )
    return {name: value for name, value in section.items() if name not in TURNED_DOWN}


def _check_force_lists(reader: Reader, config: SelectivePrecisionConfig) -> None:
    key_of: dict[str, str] = {}
    for precision in PRECISIONS:
        key = f"force_{precision}_blocks"
        for name in _forced_names(config, precision):
            if key_of.get(name) == key:
                reader.stop(f"{key} names {name!r} twice; keep one")
            if name in key_of:
                reader.stop(
                    f"{name!r} is in {key_of[name]} and in {key}; a block has one precision: keep one of the two"
                )
            key_of[name] = key


def _forced_names(config: SelectivePrecisionConfig, precision: str) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(config, f"force_{precision}_blocks")
    return names


def _section(reader: Reader, document: Any) -> tuple[str, Any]:
    """The path to the parameters ('' if they are bare), and the parameters."""
    if type(document) is not dict:
        reader.fail("the document", "an object", document)
    if NESTED_UNDER[-1] in document:
        return NESTED_UNDER[-1], document[NESTED_UNDER[-1]]
    if NESTED_UNDER[0] not in document:
        return "", document
    value, path = document, ""
    for key in NESTED_UNDER:
        if type(value) is not dict:
            reader.fail(path, "an object", value)
        if key not in value:
            hint = did_you_mean(key, value)
            reader.stop(f"{path or 'the document'}: {key} is missing; expected {'.'.join(NESTED_UNDER)}{hint}")
        value, path = value[key], f"{path}.{key}" if path else key
    return path, value
