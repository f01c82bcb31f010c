"""Policy version 1, exactly LoongForge's: FP8 from a number of tokens on.

    {"version": 1, "speedup_threshold": 1.0, "rules": {
       "layernorm_column": {"qkv": [{"tp": 1, "min_tokens": 16384, "measured_speedup": 1.03}]},
       "column_grouped": [{"etp": 1, "num_gemms": 64, "min_tokens": 424, "measured_speedup": 1.02}]}}

Dense kinds are nested by name, grouped ones are flat. This version does not say, and a reader must not guess, on which
GPU, by which recipe and at what shape it was measured, whether a missing rule was measured and lost or never measured,
and which count was the largest: a rule holds for every count above `min_tokens`. Version 2 (`token_ranges`) says all of
this.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitplan.base.documents import OBJECT, SIZE, Kind, Reader, is_number
from bitplan.base.errors import did_you_mean
from bitplan.base.records import atomic_file
from bitplan.fp8.policy.vocabulary import (
    COUNT,
    DENSE_KINDS,
    GROUPED_KINDS,
    KINDS,
    Fp8Error,
    PolicyError,
    PolicyKindError,
    name_rank,
)

VERSION = 1
SPEEDUP = Kind("a number above 0", lambda value: is_number(value) and value > 0)
_DENSE_KEYS = {"tp": COUNT, "min_tokens": SIZE, "measured_speedup": SPEEDUP}
_GROUPED_KEYS = {"etp": COUNT, "num_gemms": COUNT, "min_tokens": SIZE, "measured_speedup": SPEEDUP}


@dataclass(frozen=True)
class Threshold:
    """FP8 from `min_tokens` on; `name` and `tp` for dense kinds, `etp` and `num_gemms` for grouped ones."""

    kind: str
    min_tokens: int
    measured_speedup: float
    name: str | None = None
    tp: int | None = None
    etp: int | None = None
    num_gemms: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.kind, self.name, self.tp, self.etp, self.num_gemms)

    @property
    def where(self) -> str:
        """The keys of the rule in the lookup, in words."""
        if self.kind in GROUPED_KINDS:
            return f"{self.kind}, etp {self.etp}, num_gemms {self.num_gemms}"
        return f"{self.kind}, {self.name}, tp {self.tp}"

    @property
    def _order(self) -> tuple[Any, ...]:
        return (KINDS.index(self.kind), name_rank(self.name or ""), self.tp or self.etp, self.num_gemms or 0)

    def to_document(self) -> dict[str, Any]:
        keys = _GROUPED_KEYS if self.kind in GROUPED_KINDS else _DENSE_KEYS
        return {key: getattr(self, key) for key in keys}


class ThresholdPolicy:
    """A version 1 policy. The rules are kept in one order, so equal policies have equal bytes."""

    version = VERSION

    def __init__(self, rules: Iterable[Threshold], speedup_threshold: float, *, where: str = "policy") -> None:
        self.rules = tuple(sorted(rules, key=lambda rule: rule._order))
        self.speedup_threshold = speedup_threshold
        self.where = where
        self._by_key: dict[tuple[Any, ...], Threshold] = {}
        for rule in self.rules:
            if rule.key in self._by_key:
                raise PolicyError(f"{where}: two rules for {rule.where}; keep one")
            self._by_key[rule.key] = rule

    def __eq__(self, other: object) -> bool:
        mine = (self.rules, self.speedup_threshold)
        return isinstance(other, ThresholdPolicy) and mine == (other.rules, other.speedup_threshold)

    __hash__ = None  # type: ignore[assignment]

    def find(self, kind: str, *, name: str | None, tp: int, etp: int, num_gemms: int | None) -> Threshold | None:
        """Look up by (kind, ub_name, tp) for dense kinds, (kind, etp, num_gemms) for experts."""
        key = (kind, None, None, etp, num_gemms) if kind in GROUPED_KINDS else (kind, name, tp, None, None)
        return self._by_key.get(key)

    def to_document(self) -> dict[str, Any]:
        rules: dict[str, Any] = {}
        for rule in self.rules:
            if rule.kind in GROUPED_KINDS:
                rules.setdefault(rule.kind, []).append(rule.to_document())
            else:
                rules.setdefault(rule.kind, {}).setdefault(rule.name, []).append(rule.to_document())
        return {"version": VERSION, "speedup_threshold": self.speedup_threshold, "rules": rules}

    def to_json(self) -> str:
        """The text as LoongForge prints it: a line for each rule of a grouped kind, and for the rules of each name."""
        kinds = []
        for kind, rules in self.to_document()["rules"].items():
            if kind in GROUPED_KINDS:
                inner = ",\n".join(f"      {json.dumps(rule)}" for rule in rules)
                kinds.append(f'    "{kind}": [\n{inner}\n    ]')
            else:
                inner = ",\n".join(
                    f"      {json.dumps(name, ensure_ascii=False)}: {json.dumps(of)}" for name, of in rules.items()
                )
                kinds.append(f'    "{kind}": {{\n{inner}\n    }}')
        body = "{\n" + ",\n".join(kinds) + "\n  }" if kinds else "{}"
        threshold = json.dumps(self.speedup_threshold)
        return f'{{\n  "version": {VERSION},\n  "speedup_threshold": {threshold},\n  "rules": {body}\n}}\n'

    def save(self, path: str | Path) -> None:
        """Write the document, whole or not at all."""
        with atomic_file(path) as file:
            file.write(self.to_json().encode())

    @classmethod
    def from_document(cls, document: Any, *, where: str = "policy") -> ThresholdPolicy:
        reader = Reader(where, PolicyError)
        known = {"version": SIZE, "speedup_threshold": SPEEDUP, "rules": OBJECT}
        values = reader.keys("", document, known, tuple(known))
        rules: list[Threshold] = []
        for kind, value in values["rules"].items():
            check_kind(kind, f"{where}: rules")
            rules += _dense_rules(reader, kind, value) if kind in DENSE_KINDS else _grouped_rules(reader, kind, value)
        return cls(rules, values["speedup_threshold"], where=where)


def check_kind(kind: Any, where: str, error: type[Fp8Error] = PolicyKindError) -> None:
    if kind not in KINDS:
        hint = did_you_mean(kind[:80], KINDS) if isinstance(kind, str) else ""
        shown = repr(kind)[:80]
        raise error(f"{where}: unknown module kind {shown}; the kinds are {', '.join(KINDS)}{hint}")


def _dense_rules(reader: Reader, kind: str, value: Any) -> list[Threshold]:
    if type(value) is not dict:
        reader.fail(f"rules.{kind}", "an object of names (qkv, proj, fc1, ...) to lists of rules", value)
    rules = []
    for name, items in value.items():
        at = f"rules.{kind}.{name[:80]}"
        if not name:
            reader.stop(f"rules.{kind}: a name must not be empty")
        if type(items) is not list:
            reader.fail(at, "a list of rules", items)
        for index, item in enumerate(items):
            reader.keys(f"{at}[{index}]", item, _DENSE_KEYS, tuple(_DENSE_KEYS))
            rules.append(Threshold(kind, name=name, **item))
    return rules


def _grouped_rules(reader: Reader, kind: str, value: Any) -> list[Threshold]:
    if type(value) is not list:
        reader.fail(f"rules.{kind}", "a flat list of rules: a grouped kind has no names", value)
    for index, item in enumerate(value):
        reader.keys(f"rules.{kind}[{index}]", item, _GROUPED_KEYS, tuple(_GROUPED_KEYS))
    return [Threshold(kind, **item) for item in value]
