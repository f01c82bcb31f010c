"""Policy version 2: the measured token counts, their answers, and the bands in which FP8 is used.

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

Judges whether FP8 is faster: win, lose or undecided, by an interval for the speedup, from raw times.

A time on a GPU is the work plus noise that only ever adds, so means mislead and single samples mislead more. There are
two ways to an interval; neither assumes a distribution of the noise, draws random numbers, or reads a clock:

    pairs      BF16 and FP8 were timed in turns, so that a GPU that gets warmer slows both. Each turn gives one ratio
               BF16 / FP8. Sorted, the true median ratio lies between the k-th from below and the k-th from above unless
               chance put fewer than k ratios on one side of it, and coin flips say how likely that is (the sign test).
    crossed    too few turns for that (five, LoongForge's default), or not taken in turns: every BF16 time is
               divided by every FP8 time, and of the sorted ratios as many are cut off at both ends as a rank test (Mann
               and Whitney's) at the same confidence allows. Drift of the GPU stays in, and widens the interval.

The reported speedup is the median of the same ratios. At 95% "pairs" needs 6 turns, "crossed" 4 times of each.
The whole interval at or above the threshold: win. All of it below: lose. Otherwise: undecided, which means BF16.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from bitplan.base.documents import LIST, NAME, OBJECT, SIZE, TEXT, Kind, Reader, document_key, is_number, one_of, show
from bitplan.base.records import atomic_file
from bitplan.fp8.policy.report import Fingerprint, check_size_keys, read_fingerprint
from bitplan.fp8.policy.thresholds import SPEEDUP, check_kind
from bitplan.fp8.policy.vocabulary import (
    ANSWERS,
    COUNT,
    GEMMS,
    GROUPED_KINDS,
    KINDS,
    LOCAL_SHAPE,
    LOSE,
    PARTS,
    UNDECIDED,
    WIN,
    FingerprintError,
    Fp8Error,
    PolicyError,
    name_rank,
)
from bitplan.fp8.recipes import RECIPES

# ---- speedup interval ------------------------------------------------------------------------------------------------


DEFAULT_CONFIDENCE = 0.95
_EXACT_UP_TO = 40  # samples of both together: above this the normal approximation of the rank test is exact enough


@dataclass(frozen=True)
class Interval:
    """How many times faster FP8 is: the median, and the interval for the given confidence."""

    speedup: float
    low: float
    high: float
    method: str

    def answer(self, threshold: float) -> str:
        return answer_of(self.low, self.high, threshold)


def answer_of(low: float, high: float, threshold: float) -> str:
    """Win, lose or undecided. The threshold is the least speedup that counts, so an interval that begins on it wins."""
    if low >= threshold:
        return WIN
    return LOSE if high < threshold else UNDECIDED


def speedup_interval(
    bf16_ms: Sequence[float], fp8_ms: Sequence[float], *, in_turns: bool, confidence: float = DEFAULT_CONFIDENCE
) -> Interval | None:
    """The interval of BF16 time over FP8 time; None where there are too few samples for this confidence."""
    for times in (bf16_ms, fp8_ms):
        if not times or not all(0 < time < math.inf for time in times):
            raise Fp8Error(f"times must be numbers above 0, got {list(times)[:5]}")
    check_confidence(confidence)
    if in_turns and len(bf16_ms) == len(fp8_ms):
        cut = sign_test_cut(len(bf16_ms), confidence)
        if cut is not None:
            ratios = sorted(slow / fast for slow, fast in zip(bf16_ms, fp8_ms, strict=True))
            return Interval(statistics.median(ratios), ratios[cut], ratios[-1 - cut], "pairs")
    cut = rank_test_cut(len(bf16_ms), len(fp8_ms), confidence)
    if cut is None:
        return None
    ratios = sorted(slow / fast for slow in bf16_ms for fast in fp8_ms)
    return Interval(statistics.median(ratios), ratios[cut], ratios[-1 - cut], "crossed")


def check_confidence(confidence: float) -> None:
    if not 0.5 <= confidence < 1:
        raise Fp8Error(f"the confidence must be from 0.5 up to, and not with, 1, got {confidence!r}")


def sign_test_cut(pairs: int, confidence: float) -> int | None:
    """How many ratios are cut off at each end so that 1 - 2 P(Binomial(pairs, 1/2) <= cut) is still the coverage."""
    below, cut = 0, None
    for index in range(pairs // 2):
        below += math.comb(pairs, index)
        if 2 * below > (1 - confidence) * 2**pairs:
            break
        cut = index
    return cut


def rank_test_cut(first: int, second: int, confidence: float) -> int | None:
    """How many of the first x second ratios are cut off at each end: P(U <= cut) is at most (1 - confidence) / 2."""
    tail = (1 - confidence) / 2
    if first + second > _EXACT_UP_TO:
        spread = math.sqrt(first * second * (first + second + 1) / 12)
        cut = math.floor(first * second / 2 - 0.5 - statistics.NormalDist().inv_cdf(1 - tail) * spread)
        return cut if cut >= 0 else None
    counts = _rank_counts(first, second)
    below, largest = 0, None
    for index in range(first * second // 2):
        below += counts[index]
        if below > tail * math.comb(first + second, first):
            break
        largest = index
    return largest


@lru_cache(maxsize=256)
def _rank_counts(first: int, second: int) -> tuple[int, ...]:
    """How many orders of first + second samples give the rank statistic U = 0, 1, 2, ...: a Gaussian binomial."""
    counts = [1] + [0] * (first * second)
    for size in range(1, first + 1):
        for index in range(first * second, second + size - 1, -1):  # times 1 - q^(second + size)
            counts[index] -= counts[index - second - size]
        for index in range(size, first * second + 1):  # divided by 1 - q^size
            counts[index] += counts[index - size]
    return tuple(counts)


# ---- token ranges ----------------------------------------------------------------------------------------------------


DOCUMENT = "bitplan-fp8-policy"
VERSION = 2

_CONFIDENCE = Kind("a number from 0.5 up to, and not with, 1", lambda value: is_number(value) and 0.5 <= value < 1)
_RULE_KEYS = {
    "part": one_of(*PARTS),
    "kind": TEXT,
    "name": NAME,
    "shape": LOCAL_SHAPE,
    "tp": COUNT,
    "etp": COUNT,
    "num_gemms": COUNT,
    "recipe": one_of(*RECIPES),
    "gemm": one_of(*GEMMS),
    "points": LIST,
    "bands": LIST,
}
_RULE_ALWAYS = ("part", "kind", "shape", "recipe", "gemm", "points", "bands")


@dataclass(frozen=True)
class Point:
    """One measured token count: the answer, the interval behind it, or the note that says why there is none."""

    tokens: int = document_key(COUNT)
    answer: str = document_key(one_of(*ANSWERS))
    speedup: float | None = document_key(SPEEDUP, None)
    low: float | None = document_key(SPEEDUP, None)
    high: float | None = document_key(SPEEDUP, None)
    samples: int | None = document_key(COUNT, None)  # of the precision that has fewer
    note: str = document_key(NAME, "")

    def to_document(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    def describe(self) -> str:
        """The point in words."""
        if self.speedup is None:
            return f"{self.answer} at {self.tokens} tokens ({self.note})"
        between = f", between {self.low:.3f}x and {self.high:.3f}x" if self.low is not None else ""
        note = f"; {self.note}" if self.note else ""
        return f"{self.answer} at {self.tokens} tokens ({self.speedup:.3f}x{between}{note})"


@dataclass(frozen=True)
class BandRule:
    """All measurements of one layer shape and product by one recipe."""

    part: str
    kind: str
    shape: tuple[int, int]
    recipe: str
    gemm: str
    points: tuple[Point, ...]
    name: str | None = None
    tp: int | None = None
    etp: int | None = None
    num_gemms: int | None = None

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
        named = f"{self.kind} {self.name or ''}".strip()
        return f"{self.part} {named} {self.shape[0]}x{self.shape[1]}, {size}, {self.recipe}, {self.gemm}"

    @property
    def _order(self) -> tuple[Any, ...]:
        size = (self.tp or 0, self.etp or 0, self.num_gemms or 0)
        layer = (PARTS.index(self.part), KINDS.index(self.kind), name_rank(self.name or ""), *size, self.shape)
        return (*layer, list(RECIPES).index(self.recipe), GEMMS.index(self.gemm))

    def to_document(self) -> dict[str, Any]:
        document = {name: getattr(self, name) for name in _RULE_KEYS if getattr(self, name) is not None}
        document["shape"] = list(self.shape)
        document["points"] = [point.to_document() for point in self.points]
        document["bands"] = [list(band) for band in self.bands]
        return document


class BandPolicy:
    """A version 2 policy. Rules and points are kept in one order, so equal policies have equal bytes."""

    version = VERSION

    def __init__(
        self,
        rules: Iterable[BandRule],
        fingerprint: Fingerprint,
        speedup_threshold: float,
        confidence: float,
        *,
        where: str = "policy",
    ) -> None:
        self.rules = tuple(sorted(rules, key=lambda rule: rule._order))
        self.fingerprint = fingerprint
        self.speedup_threshold = speedup_threshold
        self.confidence = confidence
        self.where = where
        seen = set()
        for rule in self.rules:
            if rule.key in seen:
                raise PolicyError(f"{where}: two rules for {rule.where}; keep one")
            seen.add(rule.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BandPolicy) and self.to_document() == other.to_document()

    __hash__ = None  # type: ignore[assignment]

    def require_same_gpu(self, current: Fingerprint) -> list[str]:
        """Refuse a policy of another GPU; returns other differences in words, for a warning."""
        differences = self.fingerprint.differences(current)
        if "gpu" in differences:
            theirs, mine = differences["gpu"]
            raise FingerprintError(
                f"{self.where}: measured on {theirs!r}, this is {mine!r}; "
                "run the benchmark on this GPU and merge its report into a policy of its own"
            )
        return [f"{name}: measured with {theirs!r}, now {mine!r}" for name, (theirs, mine) in differences.items()]

    def to_document(self) -> dict[str, Any]:
        return {
            "document": DOCUMENT,
            "version": VERSION,
            "speedup_threshold": self.speedup_threshold,
            "confidence": self.confidence,
            "fingerprint": asdict(self.fingerprint),
            "rules": [rule.to_document() for rule in self.rules],
        }

    def to_json(self) -> str:
        """The document, indented, with one point per line. Equal policies give equal text."""
        head = self.to_document()
        rules = head.pop("rules")
        text = json.dumps(head, indent=2, ensure_ascii=False, allow_nan=False)[:-2]
        inner = ",".join(map(_rule_text, rules)) + ("\n  " if rules else "")
        return f'{text},\n  "rules": [{inner}]\n}}\n'

    def save(self, path: str | Path) -> None:
        """Write the document, whole or not at all."""
        with atomic_file(path) as file:
            file.write(self.to_json().encode())

    @classmethod
    def from_document(cls, document: Any, *, where: str = "policy") -> BandPolicy:
        reader = Reader(where, PolicyError)
        known = {
            "document": one_of(DOCUMENT),
            "version": SIZE,
            "speedup_threshold": SPEEDUP,
            "confidence": _CONFIDENCE,
            "fingerprint": OBJECT,
            "rules": LIST,
        }
        values = reader.keys("", document, known, tuple(known))
        threshold = values["speedup_threshold"]
        rules = [_read_rule(reader, f"rules[{index}]", rule, threshold) for index, rule in enumerate(values["rules"])]
        fingerprint = read_fingerprint(reader, values["fingerprint"])
        return cls(rules, fingerprint, threshold, values["confidence"], where=where)


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


def _rule_text(rule: dict[str, Any]) -> str:
    points = ",".join(f"\n        {json.dumps(point, ensure_ascii=False, allow_nan=False)}" for point in rule["points"])
    keys = [f'"{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in rule.items() if name != "points"]
    lines = [*keys[:-1], f'"points": [{points}\n      ]', keys[-1]]
    return "\n    {\n" + ",\n".join(f"      {line}" for line in lines) + "\n    }"


def _read_rule(reader: Reader, path: str, value: Any, threshold: float) -> BandRule:
    values = dict(reader.keys(path, value, _RULE_KEYS, _RULE_ALWAYS))
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
    return BandRule(points=points, **(values | {"shape": tuple(values["shape"])}))


def _read_point(reader: Reader, path: str, value: Any, threshold: float) -> Point:
    point = Point(**reader.fields_of(Point, path, value))
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
