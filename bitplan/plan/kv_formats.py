"""KVFormats: the formats in which a language model keeps keys and values of the tokens before, layer by layer.

A row, the numbers of one token and one head, is rounded when it comes into the cache, after rotary positions were
applied: that is what a cache sees. Every token attends to rounded rows, its own included, so a text that is scored in
one pass and one that is made token by token have the same numbers.

| format | scale | bytes of a row of 64 (bfloat16: 128) | also known as |
|---|---|---|---|
| fp8_e4m3_row | float32 of a row | 68 | `fp8` |
| int8_row | float32 of a row | 68 | `int8` |
| int4_g32 | bfloat16 of 32 numbers | 36 | `int4` |
| q8_0_gguf | float16 of 32 numbers | 68 | llama.cpp's q8_0 |
| q4_0_gguf | float16 of 32 numbers | 36 | llama.cpp's q4_0 |

In a plan each is a part of kind "kv", named `layers.3.keys`; a part that is not named stays as it is. In the config of
a packed folder they are {"kv_cache": {"keys": F, "values": F}}, F a format or null, or a list with one for every layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitplan.base.documents import show
from bitplan.base.errors import FormatError, did_you_mean
from bitplan.formats import get_format
from bitplan.formats.input_formats import KEEP
from bitplan.plan.plan import Choice, Plan, Planned

KV_FORMATS = ("fp8_e4m3_row", "int8_row", "int4_g32", "q8_0_gguf", "q4_0_gguf")
SHORT = {"fp8": "fp8_e4m3_row", "int8": "int8_row", "int4": "int4_g32", "q8_0": "q8_0_gguf", "q4_0": "q4_0_gguf"}
KEYS, VALUES = "keys", "values"
_PART = re.compile(rf"layers\.([0-9]{{1,6}})\.({KEYS}|{VALUES})")
ByLayer = str | None | tuple[str | None, ...]


def kv_format(name: str | None, where: str = "kv") -> str | None:
    """The format's name, for a name that a user gave; None for "keep"."""
    if name is None or name == KEEP:
        return None
    fmt = SHORT.get(name, name) if isinstance(name, str) else None
    if fmt not in KV_FORMATS:
        names = (KEEP, *SHORT, *KV_FORMATS)
        hint = did_you_mean(str(name)[:60], names)
        raise FormatError(f"{where}: no format of keys and values {name!r:.60}; there are {', '.join(names)}{hint}")
    return fmt


def part_name(layer: int, part: str) -> str:
    """The name of one layer's keys or values in a plan."""
    return f"layers.{layer}.{part}"


@dataclass(frozen=True)
class KVFormats:
    """A format for the keys and one for the values: of all layers, or a tuple with one for each; None: as they are."""

    keys: ByLayer = None
    values: ByLayer = None

    def __post_init__(self) -> None:
        for part in (KEYS, VALUES):
            formats = getattr(self, part)
            many = isinstance(formats, tuple)
            checked = tuple(kv_format(name, part) for name in formats) if many else kv_format(formats, part)
            object.__setattr__(self, part, checked)

    @classmethod
    def parse(cls, text: str, where: str = "kv") -> KVFormats:
        """Formats as they are typed: `int8` for both, or `int8:int4`, keys before values."""
        names = text.split(":")
        if len(names) > 2:
            raise FormatError(
                f"{where}: expected a format, or one for keys and one for values as int8:int4, got {text!r:.60}"
            )
        parts = [kv_format(name, where) for name in names]
        return cls(parts[0], parts[-1])

    @classmethod
    def of_plan(cls, plan: Plan) -> KVFormats | None:
        """What a plan says of keys and values; None where it says nothing."""
        parts: dict[str, dict[int, str]] = {KEYS: {}, VALUES: {}}
        for name, choice in plan.of_kind("kv").items():
            match = _PART.fullmatch(name)
            if match is None:
                raise FormatError(
                    f"the plan has a part of kind 'kv' named {name!r:.80}, expected layers.N.keys or .values"
                )
            parts[match[2]][int(match[1])] = choice.format
        if not any(parts.values()):
            return None
        layers = 1 + max(layer for formats in parts.values() for layer in formats)
        return cls(*(tuple(formats.get(layer) for layer in range(layers)) for formats in parts.values()))

    @classmethod
    def from_document(cls, document: Any, where: str) -> KVFormats:
        """Read the formats from the entry for keys and values in a packed folder's config.json."""
        if type(document) is not dict or document.keys() != {KEYS, VALUES}:
            raise FormatError(f'{where}: expected {{"keys": FORMAT, "values": FORMAT}}, got {show(document)}')
        lists = {part: tuple(item) if type(item) is list else item for part, item in document.items()}
        return cls(lists[KEYS], lists[VALUES])

    def to_document(self) -> dict[str, Any]:
        return {part: list(item) if isinstance(item := getattr(self, part), tuple) else item for part in (KEYS, VALUES)}

    def of_layer(self, layer: int) -> tuple[str | None, str | None]:
        """The formats of one layer's keys and values; a layer beyond those that are named keeps them as they are."""
        keys, values = (
            (formats[layer] if layer < len(formats) else None) if isinstance(formats, tuple) else formats
            for formats in (self.keys, self.values)
        )
        return keys, values

    def is_all(self, fmt: str) -> bool:
        """Whether keys and values of every layer have this format."""
        return all({*part} == {fmt} if isinstance(part, tuple) else part == fmt for part in (self.keys, self.values))

    def nbytes(self, layer: int, rows: tuple[int, int], widths: tuple[int, int], item_bytes: int) -> int:
        """Bytes of one layer: rows (tokens times heads) of keys and of values, `item_bytes` for a number as it is."""
        return sum(
            kv_nbytes(fmt, count, width, item_bytes)
            for fmt, count, width in zip(self.of_layer(layer), rows, widths, strict=True)
        )

    def entries(self, reasons: Mapping[str, str]) -> dict[str, Planned]:
        """Parts of a plan, one for each of these names that is not left as it is, with its reason."""
        formats = {name: self._named(name) for name in reasons}
        return {
            name: Planned(Choice(fmt, reasons[name], cause="solver"), role="kv", kind="kv")
            for name, fmt in formats.items()
            if fmt is not None
        }

    def _named(self, name: str) -> str | None:
        match = _PART.fullmatch(name)
        assert match is not None
        return self.of_layer(int(match[1]))[match[2] == VALUES]

    def __str__(self) -> str:
        """`keep`, `int8_row`, `int8_row:int4_g32`, or how many layers have which where they differ."""
        shown = [_shown(formats) for formats in (self.keys, self.values)]
        return shown[0] if shown[0] == shown[1] else ":".join(shown)


def _shown(formats: ByLayer) -> str:
    if not isinstance(formats, tuple):
        return formats or KEEP
    counts = {name: formats.count(name) for name in dict.fromkeys(formats)}
    return " ".join((name or KEEP) if len(counts) == 1 else f"{count}x{name or KEEP}" for name, count in counts.items())


def split_kv(plan: Plan) -> tuple[Plan, KVFormats | None]:
    """Divide a plan into what it says of keys and values, and its other parts (which come first)."""
    others = {name: entry for name, entry in plan.entries.items() if entry.kind != "kv"}
    return Plan(others, padding=plan.padding), KVFormats.of_plan(plan)


def kv_nbytes(fmt: str | None, rows: int, width: int, item_bytes: int) -> int:
    """Bytes of rows of keys or values in a format, scales included, each filled to whole blocks."""
    return rows * (item_bytes * width if fmt is None else get_format(fmt).nbytes((1, width)))


def layers_in(formats: Sequence[str | None]) -> ByLayer:
    """Give one format where all layers have the same, else one for each."""
    return formats[0] if len({*formats}) == 1 else tuple(formats)
