"""A policy: rules of measured token counts, and its document, of version 2 or of LoongForge's version 1.

    {"document": "bitplan-fp8-policy", "version": 2, "speedup_threshold": 1.0, "confidence": 0.95,
     "fingerprint": {"gpu": "...", "driver": "...", "torch": "...", "triton": "...", "bitplan": "...", "commit": "..."},
     "rules": [
       {"part": "llm", "kind": "row", "name": "fc2", "shape": [4096, 14336], "tp": 1, "recipe": "blockwise",
        "gemm": "module",
        "points": [
          {"tokens": 512, "answer": "lose", "speedup": 0.79, "low": 0.78, "high": 0.80, "samples": 20},
          {"tokens": 4096, "answer": "win", "speedup": 1.18, "low": 1.17, "high": 1.20, "samples": 20}, ...],
        "bands": [[4096, 16384]]}]}

A point is one measured token count and its answer: win, lose, undecided, or unmeasured with a note (the benchmark tried
and failed). A band runs from a measured win to a measured win with nothing but wins in between; only inside a band is
FP8 used. Bands follow from the points and are written for people; a file in which the two disagree is refused, and so
is a file whose answers do not follow from its intervals. An expert's rule has `etp` and `num_gemms` instead of `tp`,
and no name.

Version 1 is exactly LoongForge's: FP8 from a number of tokens on, dense kinds nested by name, grouped ones flat.

    {"version": 1, "speedup_threshold": 1.0, "rules": {
       "layernorm_column": {"qkv": [{"tp": 1, "min_tokens": 16384, "measured_speedup": 1.03}]},
       "column_grouped": [{"etp": 1, "num_gemms": 64, "min_tokens": 424, "measured_speedup": 1.02}]}}

It does not say, and a reader must not guess, on which GPU, by which recipe and at what shape it was measured, whether a
missing rule was measured and lost or never measured, and which count was the largest: a rule holds for every count
above `min_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from bitplan.base.documents import (
    LIST,
    NAME,
    OBJECT,
    SIZE,
    TEXT,
    Kind,
    Reader,
    document_key,
    document_of,
    is_number,
    keys_of,
    load_document,
    one_of,
    show,
)
from bitplan.base.records import atomic_file
from bitplan.fp8.policy.report import Fingerprint, answer_of, check_size_keys
from bitplan.fp8.policy.vocabulary import (
    ANSWERS,
    COUNT,
    GEMMS,
    GROUPED_KINDS,
    KINDS,
    LOCAL_SHAPE,
    MODULE,
    PARTS,
    SPEEDUP,
    WIN,
    FingerprintError,
    MergeError,
    PolicyError,
    PolicyVersionError,
    check_kind,
    name_rank,
)
from bitplan.fp8.recipes import RECIPES

DOCUMENT = "bitplan-fp8-policy"
VERSIONS = (1, 2)

_CONFIDENCE = Kind("a number from 0.5 up to, and not with, 1", lambda value: is_number(value) and 0.5 <= value < 1)
_DENSE_KEYS = {"tp": COUNT, "min_tokens": SIZE, "measured_speedup": SPEEDUP}  # of version 1
_GROUPED_KEYS = {"etp": COUNT, "num_gemms": COUNT, "min_tokens": SIZE, "measured_speedup": SPEEDUP}


@dataclass(frozen=True)
class Point:
    """One measured token count: the answer, the interval behind it, or the note that says why there is none."""

    tokens: int = document_key(COUNT)
    answer: str = document_key(one_of(*ANSWERS))
    speedup: float | None = document_key(SPEEDUP, None, unwritten=None)
    low: float | None = document_key(SPEEDUP, None, unwritten=None)
    high: float | None = document_key(SPEEDUP, None, unwritten=None)
    samples: int | None = document_key(COUNT, None, unwritten=None)  # of the precision that has fewer
    note: str = document_key(NAME, "", unwritten="")

    def describe(self) -> str:
        """The measured point in words, for messages."""
        if self.speedup is None:
            return f"{self.answer} at {self.tokens} tokens ({self.note})"
        between = f", between {self.low:.3f}x and {self.high:.3f}x" if self.low is not None else ""
        note = f"; {self.note}" if self.note else ""
        return f"{self.answer} at {self.tokens} tokens ({self.speedup:.3f}x{between}{note})"


@dataclass(frozen=True, kw_only=True)
class LayerRule:
    """All measurements of one layer shape and product by one recipe.

    A rule of version 1 has no shape, recipe and part, and one point: FP8 from its tokens on.
    """

    part: str = document_key(one_of(*PARTS))
    kind: str = document_key(TEXT)
    name: str | None = document_key(NAME, None)
    shape: tuple[int, int] = document_key(LOCAL_SHAPE)
    tp: int | None = document_key(COUNT, None)
    etp: int | None = document_key(COUNT, None)
    num_gemms: int | None = document_key(COUNT, None)
    recipe: str = document_key(one_of(*RECIPES))
    gemm: str = document_key(one_of(*GEMMS))
    points: tuple[Point, ...] = document_key(LIST)

    @classmethod
    def without_shape(cls, points: Iterable[Point], **size: Any) -> Self:
        """A rule as version 1 has it; `size`: kind, name and tp, or kind, etp and num_gemms of grouped ones."""
        return cls(part="", shape=(0, 0), recipe="", gemm=MODULE, points=tuple(points), **size)

    @property
    def min_tokens(self) -> int:
        return self.points[0].tokens

    @property
    def measured_speedup(self) -> float:
        return self.points[0].speedup or 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        size = (self.tp, self.etp, self.num_gemms)
        return (self.part, self.kind, self.name, self.shape, *size, self.recipe, self.gemm)

    @cached_property
    def bands(self) -> tuple[tuple[int, int], ...]:
        return bands_of(self.points)

    @property
    def where(self) -> str:
        size = f"etp {self.etp}, num_gemms {self.num_gemms}" if self.kind in GROUPED_KINDS else f"tp {self.tp}"
        if not self.recipe:
            return ", ".join(filter(None, (self.kind, self.name, size)))
        named = f"{self.kind} {self.name or ''}".strip()
        return f"{self.part} {named} {self.shape[0]}x{self.shape[1]}, {size}, {self.recipe}, {self.gemm}"

    @property
    def _order(self) -> tuple[Any, ...]:
        size = (self.tp or 0, self.etp or 0, self.num_gemms or 0)
        layer = (("", *PARTS).index(self.part), KINDS.index(self.kind), name_rank(self.name or ""), *size, self.shape)
        return (*layer, ["", *RECIPES].index(self.recipe), GEMMS.index(self.gemm))

    def to_document(self) -> dict[str, Any]:
        if not self.recipe:
            keys = _GROUPED_KEYS if self.kind in GROUPED_KINDS else _DENSE_KEYS
            return {key: getattr(self, key) for key in keys}
        document = {name: value for name in keys_of(LayerRule) if (value := getattr(self, name)) is not None}
        document["shape"] = list(self.shape)
        document["points"] = list(map(document_of, self.points))
        document["bands"] = [list(band) for band in self.bands]
        return document


class Policy:
    """Rules and points are kept in one order, so equal policies have equal bytes.

    Version 1 has no fingerprint and no confidence.
    """

    def __init__(
        self,
        rules: Iterable[LayerRule],
        fingerprint: Fingerprint | None,
        speedup_threshold: float,
        confidence: float | None = None,
        *,
        where: str = "policy",
    ) -> None:
        self.rules = tuple(sorted(rules, key=lambda rule: rule._order))
        self.fingerprint = fingerprint
        self.speedup_threshold = speedup_threshold
        self.confidence = confidence
        self.where = where
        keys = set()
        for rule in self.rules:
            if rule.key in keys:
                raise PolicyError(f"{where}: two rules for {rule.where}; keep one")
            keys.add(rule.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.to_document() == other.to_document()

    __hash__ = None  # type: ignore[assignment]

    @property
    def version(self) -> int:
        return 1 if self.fingerprint is None else 2

    @property
    def gpu(self) -> str:
        """The GPU that it was measured on; "unknown" by version 1, which does not say."""
        return "unknown" if self.fingerprint is None else self.fingerprint.gpu

    def require_same_gpu(self, current: Fingerprint) -> list[str]:
        """Differences from the machine here, in words; a policy of another GPU is refused."""
        if self.fingerprint is None:
            return ["version 1 does not say on which GPU it was measured"]
        differences = self.fingerprint.differences(current)
        if "gpu" in differences:
            theirs, mine = differences["gpu"]
            raise FingerprintError(
                f"{self.where}: measured on {theirs!r}, this is {mine!r}; "
                "run the benchmark on this GPU and merge its report into a policy of its own"
            )
        return [f"{name}: measured with {theirs!r}, now {mine!r}" for name, (theirs, mine) in differences.items()]

    def to_thresholds(self, *, part: str | None = None) -> Policy:
        """Convert to a version 1 policy that never says FP8 where version 2 does not, up to the largest measured count.

        A rule needs an unbroken run of wins up to the largest measured count, because version 1 has no upper end. It
        has no shapes either: all shapes under a key must win, and the largest `min_tokens` counts. It has no parts
        (LoongForge keeps a file per component) and no recipes: a policy of several parts or recipes is refused.
        """
        parts = sorted({rule.part for rule in self.rules})
        if part is None and len(parts) > 1:
            raise MergeError(
                f"version 1 has no parts and the policy has {' and '.join(parts)}; choose one, a file for each"
            )
        rules = [rule for rule in self.rules if rule.gemm == MODULE and part in (None, rule.part)]
        recipes = sorted({rule.recipe for rule in rules})
        if len(recipes) > 1:
            raise MergeError(
                f"version 1 has no recipes and the policy has {' and '.join(recipes)}; merge one recipe only"
            )
        by_key: dict[tuple[Any, ...], list[LayerRule | None]] = {}
        for rule in rules:
            by_key.setdefault((rule.kind, rule.name, rule.tp, rule.etp, rule.num_gemms), []).append(_threshold(rule))
        chosen = []
        for group in by_key.values():
            known = [threshold for threshold in group if threshold is not None]
            if len(known) == len(group):
                chosen.append(max(known, key=lambda rule: (rule.min_tokens, -rule.measured_speedup)))
        return Policy(chosen, None, self.speedup_threshold)

    def to_document(self) -> dict[str, Any]:
        if self.fingerprint is not None:
            return {
                "document": DOCUMENT,
                "version": 2,
                "speedup_threshold": self.speedup_threshold,
                "confidence": self.confidence,
                "fingerprint": asdict(self.fingerprint),
                "rules": [rule.to_document() for rule in self.rules],
            }
        rules: dict[str, Any] = {}
        for rule in self.rules:
            if rule.kind in GROUPED_KINDS:
                rules.setdefault(rule.kind, []).append(rule.to_document())
            else:
                rules.setdefault(rule.kind, {}).setdefault(rule.name, []).append(rule.to_document())
        return {"version": 1, "speedup_threshold": self.speedup_threshold, "rules": rules}

    def to_json(self) -> str:
        """The document, indented; version 2 with one point a line, version 1 as LoongForge prints it."""
        head = self.to_document()
        rules = head.pop("rules")
        text = json.dumps(head, indent=2, ensure_ascii=False, allow_nan=False)[:-2]
        return f'{text},\n  "rules": {_kinds_text(rules) if self.version == 1 else _rules_text(rules)}\n}}\n'

    def save(self, path: str | Path) -> None:
        """Write the document, whole or not at all."""
        with atomic_file(path) as file:
            file.write(self.to_json().encode())


def _threshold(rule: LayerRule) -> LayerRule | None:
    if rule.points[-1].answer != WIN:
        return None
    first = next(point for point in rule.points if point.tokens == rule.bands[-1][0])
    point = Point(first.tokens, WIN, round(first.speedup or 0.0, 4))
    return replace(rule, part="", shape=(0, 0), recipe="", points=(point,))


def load_policy(path: str | Path) -> Policy:
    """A policy of version 1 or 2 from its file."""
    return read_policy(load_document(path, PolicyError), where=str(path))


def read_policy(document: Any, *, where: str = "policy") -> Policy:
    """A policy of version 1 or 2; the version is checked first: the keys of another version cannot be checked."""
    if type(document) is not dict:
        raise PolicyError(f"{where}: a policy must be an object, got {show(document)}")
    version = document.get("version")
    if type(version) is not int or version not in VERSIONS:
        got = show(version) if "version" in document else "none"
        raise PolicyVersionError(f"{where}: version must be 1 (LoongForge's) or 2 ({DOCUMENT!r}), got {got}")
    reader = Reader(where, PolicyError)
    known = {"version": SIZE, "speedup_threshold": SPEEDUP, "rules": OBJECT if version == 1 else LIST}
    if version == 2:
        known |= {"document": one_of(DOCUMENT), "confidence": _CONFIDENCE, "fingerprint": OBJECT}
    values = reader.keys("", document, known, tuple(known))
    threshold = values["speedup_threshold"]
    if version == 1:
        return Policy(_read_thresholds(reader, values["rules"]), None, threshold, where=where)
    rules = [_read_rule(reader, f"rules[{index}]", rule, threshold) for index, rule in enumerate(values["rules"])]
    return Policy(
        rules,
        reader.record(Fingerprint, "fingerprint", values["fingerprint"]),
        threshold,
        values["confidence"],
        where=where,
    )


def bands_of(points: Sequence[Point]) -> tuple[tuple[int, int], ...]:
    """Runs of measured wins, from the first to the last of each. Whatever is not a win ends a run."""
    bands: list[tuple[int, int]] = []
    running = False
    for point in points:
        if point.answer == WIN:
            first = bands.pop()[0] if running else point.tokens
            bands.append((first, point.tokens))
        running = point.answer == WIN
    return tuple(bands)


def _rules_text(rules: Sequence[Mapping[str, Any]]) -> str:
    return f"[{','.join(map(_rule_text, rules))}" + ("\n  ]" if rules else "]")


def _rule_text(rule: Mapping[str, Any]) -> str:
    points = ",".join(f"\n        {json.dumps(point, ensure_ascii=False, allow_nan=False)}" for point in rule["points"])
    keys = [f'"{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in rule.items() if name != "points"]
    lines = [*keys[:-1], f'"points": [{points}\n      ]', keys[-1]]
    return "\n    {\n" + ",\n".join(f"      {line}" for line in lines) + "\n    }"


def _kinds_text(kinds: Mapping[str, Any]) -> str:
    """A line for each rule of a grouped kind, and for the rules of each name."""
    texts = []
    for kind, rules in kinds.items():
        if kind in GROUPED_KINDS:
            inner = ",\n".join(f"      {json.dumps(rule)}" for rule in rules)
            texts.append(f'    "{kind}": [\n{inner}\n    ]')
        else:
            named = (
                f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(of_name)}" for name, of_name in rules.items()
            )
            texts.append(f'    "{kind}": {{\n' + ",\n".join(f"      {line}" for line in named) + "\n    }")
    return "{\n" + ",\n".join(texts) + "\n  }" if texts else "{}"


def _read_thresholds(reader: Reader, kinds: Mapping[str, Any]) -> list[LayerRule]:
    """The rules of version 1: of dense kinds by name, of grouped ones a flat list."""
    rules = []
    for kind, value in kinds.items():
        check_kind(kind, f"{reader.where}: rules")
        path, keys = f"rules.{kind}", _GROUPED_KEYS if kind in GROUPED_KINDS else _DENSE_KEYS
        if kind in GROUPED_KINDS:
            if type(value) is not list:
                reader.fail(path, "a flat list of rules: a grouped kind has no names", value)
            lists: dict[str, tuple[dict[str, Any], Any]] = {path: ({}, value)}
        else:
            if type(value) is not dict:
                reader.fail(path, "an object of names (qkv, proj, fc1, ...) to lists of rules", value)
            if "" in value:
                reader.stop(f"{path}: a name must not be empty")
            lists = {f"{path}.{name[:80]}": ({"name": name}, items) for name, items in value.items()}
        for at, (named, items) in lists.items():
            if type(items) is not list:
                reader.fail(at, "a list of rules", items)
            for index, item in enumerate(items):
                size = dict(reader.keys(f"{at}[{index}]", item, keys, tuple(keys)))
                point = Point(size.pop("min_tokens"), WIN, size.pop("measured_speedup"))
                rules.append(LayerRule.without_shape([point], kind=kind, **named, **size))
    return rules


def _read_rule(reader: Reader, path: str, value: Any, threshold: float) -> LayerRule:
    required = ("part", "kind", "shape", "recipe", "gemm", "points", "bands")
    values = dict(reader.keys(path, value, keys_of(LayerRule) | {"bands": LIST}, required))
    check_kind(values["kind"], f"{reader.where}: {path}")
    grouped = values["kind"] in GROUPED_KINDS
    needed, others = (("etp", "num_gemms"), ("tp", "name")) if grouped else (("tp", "name"), ("etp", "num_gemms"))
    check_size_keys(reader, f"{path}: ", values, needed, others)
    bands, items = values.pop("bands"), values.pop("points")
    if not items:
        reader.stop(f"{path}: points must have at least one point")
    points = tuple(_read_point(reader, f"{path}.points[{at}]", item, threshold) for at, item in enumerate(items))
    for before, after in pairwise(points):
        if before.tokens >= after.tokens:
            reader.stop(f"{path}: points must rise in tokens, got {before.tokens} before {after.tokens}")
    expected = [list(band) for band in bands_of(points)]
    if bands != expected:
        reader.stop(f"{path}: bands must be {show(expected)}, which follows from the points, got {show(bands)}")
    return LayerRule(points=points, **(values | {"shape": tuple(values["shape"])}))


def _read_point(reader: Reader, path: str, value: Any, threshold: float) -> Point:
    point = reader.record(Point, path, value)
    figures = (point.speedup, point.low, point.high, point.samples)
    if point.low is None or point.high is None or None in figures:
        if figures != (None,) * 4:
            reader.stop(f"{path}: speedup, low, high and samples come together or not at all")
        if point.answer == WIN or not point.note:
            reader.stop(f"{path}: a point without an interval must say why in a note, and cannot be a win")
        return point
    if not point.low <= (point.speedup or 0) <= point.high:
        reader.stop(f"{path}: low, speedup and high must rise, got {point.low}, {point.speedup}, {point.high}")
    expected = answer_of(point.low, point.high, threshold)
    if point.answer != expected:
        reader.stop(f"{path}: answer must be {expected!r} for {point.low} to {point.high}, got {point.answer!r}")
    return point
