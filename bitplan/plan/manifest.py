"""Manifest: rules in a file that say which tensor gets which format.

The document is the gpt-oss manifest, JSON version 1, plus keys that decoding needs: `scale_base`, `axis`,
`nibble_order`, `padding`, `aliases`; docs/manifest.md describes all of it, `manifest_schema` gives its JSON Schema to
editors (the reader is stricter and says more). A rule's regex must match the whole name, the first rule that matches
wins, and a tensor without a rule is an error. Manifests that come with bitplan (`SHIPPED`) are files in `manifests/`.

A tag of the manifest (`BF16`, `FP4`, ...) stands for a format of bitplan's, or for a part of one: gpt-oss keeps the
codes of an mxfp4 weight under one name (`FP4`) and its scales under another (`UE8`). `block_size` and `scale_encoding`
decide which format `FP4` and `UE8` are together; a tag may also name it (`format`, `part`).

Patterns (`NamePatterns`) come from files that others wrote, and Python's `re` backtracks: `(a+)+$` takes for ever on 40
letters, and no timer stops `re` inside its own process. So patterns are parsed by `re`'s own parser and run as one
finite automaton, every alternative of every pattern at once, and a table keeps the sets of states it has met: a name is
read once, however many patterns there are. Constructs without an automaton (back references, look-around, word
boundaries, atomic and possessive parts, flags) are refused by name, and so is a pattern that counts too far, such as
`a{100000}`. Patterns for the names of a model meet few sets of states; patterns that are made to meet new ones at every
letter exceed `MAX_WORK` and are refused. A match agrees with `re.fullmatch`, except that `$` means the end only, not
also before a last newline.

Aliases are one map between two namings of the same tensors, read both ways. A name with its layer number left open is a
template: `block.[i].attn.norm.scale`. A tensor of one naming may be several of the other (gpt-oss's `qkv` is Hugging
Face's q, k and v), so a template maps to a list. Only parts of a name between dots are numbers; each placeholder of one
side is used on the other.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from bitplan.base.documents import (
    FLAG,
    NAME,
    OBJECT,
    TEXT,
    Kind,
    Reader,
    document_key,
    is_number,
    is_text,
    load_document,
    one_of,
    short,
)
from bitplan.base.errors import BitplanError, FormatError, ManifestError, did_you_mean
from bitplan.base.records import parse_json
from bitplan.formats import get_format
from bitplan.formats.elements import ITEM_BYTES
from bitplan.formats.format import Format
from bitplan.formats.registry import list_formats
from bitplan.plan.plan import PADDINGS, PARTS, Choice, Part, Plan, Planned, part_dtype
from bitplan.plan.structure.families import GGUF_MANIFESTS, guess_role

# ---- name patterns ---------------------------------------------------------------------------------------------------


MAX_PATTERN_LETTERS = 500
MAX_GROUPS = 50
MAX_STATES = 1000  # of one pattern
MAX_STATES_IN_ALL = 30_000
MAX_WORK = 200_000  # states visited to find new sets: gpt-oss takes 3,000, a rule for each tensor 50,000

_parser: Any = importlib.import_module("re._parser")  # it has no type stubs
_REFUSED = {
    "ASSERT": "look-ahead and look-behind are",
    "ASSERT_NOT": "look-ahead and look-behind are",
    "GROUPREF": "a back reference is",
    "GROUPREF_EXISTS": "a conditional group is",
    "ATOMIC_GROUP": "an atomic group is",
    "POSSESSIVE_REPEAT": "a possessive repeat is",
}
_CATEGORIES = {
    f"CATEGORY_{prefix}{name}": re.compile(f"\\{letter.upper() if prefix else letter}")
    for name, letter in (("DIGIT", "d"), ("SPACE", "s"), ("WORD", "w"))
    for prefix in ("", "NOT_")
}

Test = Callable[[str], bool]
States = frozenset[int]


class PatternError(BitplanError, ValueError):
    """Why pattern number `index` cannot be used, as the end of a sentence that begins with the pattern."""

    index: int | None = None


class NamePatterns:
    """Compiled patterns; `matching(name)` has the indices of those for which `re.fullmatch` would succeed."""

    def __init__(self, regexes: Sequence[str]) -> None:
        self._free: list[list[int]] = []  # state -> states reached without a letter
        self._letters: list[tuple[Test, int] | None] = []  # state -> (which letters, state after)
        self._starts: set[int] = set()  # states passed only at the start of a name
        self._ends: set[int] = set()  # states passed only at the end of a name
        self._accepts: dict[int, int] = {}  # last state of a pattern -> its index
        self._sets: dict[States, States] = {}
        self._work = 0
        firsts = set()
        for index, regex in enumerate(regexes):
            self._limit = min(len(self._free) + MAX_STATES, MAX_STATES_IN_ALL)
            try:
                first = self._state()
                self._accepts[self._build(_parse(regex), first)] = index
            except PatternError as error:
                error.index = index
                raise
            firsts.add(first)
        self._first = self._closure(firsts, at_start=True)
        self._steps: dict[tuple[States, str], States] = {}
        self._matches: dict[States, tuple[int, ...]] = {}

    def matching(self, name: str) -> tuple[int, ...]:
        """The indices of the patterns that match a name, in order."""
        states = self._first
        for letter in name:
            key = (states, letter)
            after = self._steps.get(key)
            if after is None:
                after = self._steps[key] = self._step(states, letter)
            if not after:
                return ()
            states = after
        if not name:  # the start of an empty name is also its end
            return self._accepted(self._closure(set(states), at_start=True, at_end=True))
        if states not in self._matches:
            self._matches[states] = self._accepted(self._closure(set(states), at_end=True))
        return self._matches[states]

    # ---- running --------------------------------------------------------------------------------------------------

    def _step(self, states: States, letter: str) -> States:
        reached = set()
        for state in states:
            way = self._letters[state]
            if way is not None and way[0](letter):
                reached.add(way[1])
        self._count(len(states))
        return self._closure(reached)

    def _closure(self, states: set[int], *, at_start: bool = False, at_end: bool = False) -> States:
        """All states of the automaton that are reached from these without reading a letter."""
        reached, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            if (state in self._starts and not at_start) or (state in self._ends and not at_end):
                continue
            for after in self._free[state]:
                if after not in reached:
                    reached.add(after)
                    waiting.append(after)
        self._count(len(reached))
        closed = frozenset(reached)
        return self._sets.setdefault(closed, closed)  # one object for equal sets, compared by identity

    def _count(self, states: int) -> None:
        self._work += states
        if self._work > MAX_WORK:
            raise PatternError(
                f"need more than {MAX_WORK} steps for these names; use fewer rules, or simpler ones (no nested '*' or "
                "counts)"
            )

    def _accepted(self, states: States) -> tuple[int, ...]:
        return tuple(sorted(self._accepts[state] for state in states if state in self._accepts))

    # ---- building: each part goes from a state to a new one ---------------------------------------------------------

    def _state(self) -> int:
        if len(self._free) >= self._limit:
            if self._limit == MAX_STATES_IN_ALL:
                raise PatternError(f"is too much: the rules together have more than {MAX_STATES_IN_ALL} states")
            raise PatternError(
                f"is too large: it counts beyond {MAX_STATES} states; use '+' or '*' in place of a high count"
            )
        self._free.append([])
        self._letters.append(None)
        return len(self._free) - 1

    def _build(self, parts: Any, state: int) -> int:
        for op, argument in parts:
            state = self._part(str(op), argument, state)
        return state

    def _part(self, op: str, argument: Any, state: int) -> int:
        if op in ("MAX_REPEAT", "MIN_REPEAT"):  # greedy or lazy changes which match is found, not whether there is one
            least, most, body = argument
            return self._repeat(least, most, body, state)
        if op == "SUBPATTERN":
            if argument[1] or argument[2]:
                _refuse("a flag is")
            return self._build(argument[3], state)
        if op == "BRANCH":
            return self._branch(argument[1], state)
        if op == "AT":
            kind = str(argument)
            if kind not in ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING"):
                _refuse("a word boundary is")
            anchor = self._next(state)
            (self._starts if "BEGINNING" in kind else self._ends).add(anchor)
            return self._next(anchor)
        if op in _REFUSED:
            _refuse(_REFUSED[op])
        before = state if self._letters[state] is None else self._next(state)
        after = self._state()
        self._letters[before] = (_letter_test(op, argument), after)
        return after

    def _branch(self, branches: Any, state: int) -> int:
        after = self._state()
        for branch in branches:
            inner = self._state()
            self._free[state].append(inner)
            self._free[self._build(branch, inner)].append(after)
        return after

    def _repeat(self, least: int, most: Any, body: Any, state: int) -> int:
        for _ in range(least):
            state = self._next(self._build(body, state))
        after = self._state()
        if most is _parser.MAXREPEAT or int(most) >= _parser.MAXREPEAT:
            loop = self._next(state)
            self._free[self._build(body, loop)].append(loop)
            self._free[loop].append(after)
            return after
        for _ in range(int(most) - least):
            self._free[state].append(after)
            state = self._next(self._build(body, state))
        self._free[state].append(after)
        return after

    def _next(self, state: int) -> int:
        """A new state after this one, so that even an empty body counts towards the limit."""
        after = self._state()
        self._free[state].append(after)
        return after


def _parse(regex: str) -> Any:
    if len(regex) > MAX_PATTERN_LETTERS:
        raise PatternError(f"is too long: {len(regex)} letters, at most {MAX_PATTERN_LETTERS}; split it into two rules")
    if regex.count("(") > MAX_GROUPS:  # so that no nesting reaches the interpreter's own limit
        raise PatternError(f"has more than {MAX_GROUPS} groups; split it into several rules")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of sets that a later Python will read differently
            parsed = _parser.parse(regex)
    except (re.error, OverflowError, Warning) as error:
        shell = ".*".join(map(re.escape, regex.split("*"))) if regex[:1] == "*" else ""
        hint = f"; the shell pattern would be {shell!r} here" if shell else ""
        raise PatternError(f"is not a valid regular expression: {error}{hint}") from None
    if parsed.state.flags & ~re.UNICODE:
        _refuse("a flag is")
    return parsed


def _refuse(why: str) -> NoReturn:
    raise PatternError(f"cannot be matched in bounded time: {why} not allowed; use several simpler rules in its place")


def _letter_test(op: str, argument: Any) -> Test:
    """A test for the letters that a part of exactly one letter matches."""
    if op == "LITERAL":
        return chr(argument).__eq__
    if op == "NOT_LITERAL":
        return chr(argument).__ne__
    if op == "ANY":
        return "\n".__ne__
    if op == "IN":
        negated = bool(argument) and str(argument[0][0]) == "NEGATE"
        tests = [_set_test(str(kind), value) for kind, value in argument[negated:]]
        return lambda letter: any(test(letter) for test in tests) != negated
    return _refuse(f"{op.lower()} is")


def _set_test(kind: str, value: Any) -> Test:
    if kind == "RANGE":
        low, high = value
        return lambda letter: low <= ord(letter) <= high
    if kind == "CATEGORY":
        category = _CATEGORIES[str(value)]
        return lambda letter: category.match(letter) is not None
    return _letter_test(kind, value)


# ---- aliases ---------------------------------------------------------------------------------------------------------


_PLACEHOLDER = re.compile(r"\[([a-z])\]")
_OPEN = "[]"


class AliasError(BitplanError, ValueError):
    """A map of aliases that cannot be read both ways."""


@dataclass(frozen=True)
class Aliases:
    """`templates` maps a template of our naming to templates of the other naming."""

    templates: Mapping[str, tuple[str, ...]]
    _ours: dict[tuple[str, ...], str] = field(default_factory=dict, repr=False, compare=False)
    _others: dict[tuple[str, ...], tuple[str, str]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for ours, others in self.templates.items():
            if not others:
                raise AliasError(f"{ours!r} has no other name")
            for template in (ours, *others):
                if sorted(_letters(template)) != sorted(set(_letters(ours))):
                    raise AliasError(f"{template!r} must have the placeholders of {ours!r}, each once")
            if _key(ours) in self._ours:
                raise AliasError(f"{ours!r} has the same form as {self._ours[_key(ours)]!r}")
            self._ours[_key(ours)] = ours
            for other in others:
                if _key(other) in self._others:
                    raise AliasError(f"{other!r} stands for two names, {self._others[_key(other)][1]!r} and {ours!r}")
                self._others[_key(other)] = (other, ours)
        both = self._ours.keys() & self._others.keys()
        if both:
            raise AliasError(f"{self._ours[min(both)]!r} is a name of both namings")

    def to_ours(self, name: str) -> str:
        """The name in our naming; a name that is not an alias is returned unchanged."""
        key, numbers = _open(name)
        if key not in self._others:
            return name
        other, ours = self._others[key]
        return _fill(ours, dict(zip(_letters(other), numbers, strict=True)))

    def to_others(self, name: str) -> tuple[str, ...]:
        """The names in the other naming; a name without aliases is returned unchanged."""
        key, numbers = _open(name)
        if key not in self._ours:
            return (name,)
        ours = self._ours[key]
        values = dict(zip(_letters(ours), numbers, strict=True))
        return tuple(_fill(other, values) for other in self.templates[ours])

    def template_of(self, name: str) -> str | None:
        """Our template for a name of the other naming; None where it is not an alias."""
        entry = self._others.get(_open(name)[0])
        return entry[1] if entry else None


def _letters(template: str) -> Sequence[str]:
    return _PLACEHOLDER.findall(template)


def _key(template: str) -> tuple[str, ...]:
    """The parts of a template, with placeholders left open; a placeholder is a whole part."""
    parts = template.split(".")
    if any("[" in part and not _PLACEHOLDER.fullmatch(part) for part in parts):
        raise AliasError(f"{template!r}: a placeholder is a letter in brackets between dots, such as 'block.[i].bias'")
    return tuple(_OPEN if "[" in part else part for part in parts)


def _open(name: str) -> tuple[tuple[str, ...], list[str]]:
    parts = name.split(".")
    numbers = [part for part in parts if part.isdecimal() and part.isascii()]
    return tuple(_OPEN if part.isdecimal() and part.isascii() else part for part in parts), numbers


def _fill(template: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


# ---- manifest --------------------------------------------------------------------------------------------------------


VERSION: Final = 1
MAX_RULES = 1000
MAX_UNMATCHED_SHOWN = 20
BASED_ENCODINGS = ("linear_uint8", "e4m3")  # a code is a multiple of a base that must be known
SCALE_ENCODINGS = ("e8m0", "linear_uint8", "e4m3")
NIBBLE_ORDERS = ("low_first", "high_first", "halves")

_CASTS = {"BF16": "bfloat16", "FP16": "float16", "F16": "float16", "FP32": "float32", "F32": "float32"}
_SPLIT_TAGS: dict[str, Part] = {"FP4": "data", "UE8": "scales"}
# The format of FP4 codes with these scales.
_SPLIT_FORMATS = {("e8m0", 32): "mxfp4", ("linear_uint8", 128): "fp4_u8_g128", ("e4m3", 16): "nvfp4"}
_INDEX = re.compile(r"\[[a-z]\]")

_BITS = Kind("an integer from 1 to 64", lambda value: type(value) is int and 1 <= value <= 64)
_ROLE = Kind(
    "a string or a list of strings",
    lambda value: is_text(value) or (type(value) is list and all(map(is_text, value))),
)
_RULES = Kind(f"a list of 1 to {MAX_RULES} rules", lambda value: type(value) is list and 1 <= len(value) <= MAX_RULES)
_BLOCK = Kind("an even integer from 2 to 2^20", lambda v: type(v) is int and 2 <= v <= 2**20 and v % 2 == 0)
_BASE = Kind(
    'a number above 0, or "tensor" where it is stored as NAME.base',
    lambda value: value == "tensor" or (is_number(value) and value > 0),
)
_AXIS = Kind("-1, for formats of bitplan have their blocks along the last axis", lambda v: type(v) is int and v == -1)
_FUSED = Kind(
    "true, for kernels always may decode on the fly; how layers run is chosen by the strategy= of apply_plan",
    lambda value: value is True,
)
_KEYS = {
    "version": Kind(str(VERSION), lambda value: type(value) is int),
    "model": TEXT,
    "formats": OBJECT,
    "patterns": _RULES,
    "fused_dequant": _FUSED,
    "block_size": _BLOCK,
    "scale_encoding": one_of(*SCALE_ENCODINGS),
    "scale_base": _BASE,
    "axis": _AXIS,
    "nibble_order": one_of(*NIBBLE_ORDERS),
    "padding": one_of(*PADDINGS),
    "aliases": OBJECT,
}
_OPTIONS = [key for key in _KEYS if key not in ("version", "formats", "patterns", "aliases", "fused_dequant")]
_TAG_KEYS = {"bits": _BITS, "role": _ROLE, "format": NAME, "part": one_of(*PARTS)}


@dataclass(frozen=True)
class Rule:
    """Tensors whose whole name matches `pattern` get the format of this tag, and inputs of their products `input`.

    `optional` rules may match nothing: a bias that some models of a family lack.
    """

    pattern: str = document_key(NAME, key="regex")
    format: str = document_key(NAME)
    role: str = document_key(NAME, "", unwritten="")
    optional: bool = document_key(FLAG, False, unwritten=False)
    input: str | None = document_key(NAME, None, unwritten=None)


@dataclass(frozen=True)
class Tag:
    """The meaning of a manifest's name for a format: a format of bitplan's, or one part of it."""

    format: str
    part: Part | None = None
    roles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """The rule that decides a name, and the name that it matched, which may be an alias."""

    index: int
    rule: Rule
    name: str


@dataclass(frozen=True)
class Manifest:
    """Rules from names to formats, tried in order; `where` names the document in messages."""

    rules: tuple[Rule, ...]
    tags: Mapping[str, Tag] = field(default_factory=dict)
    where: str = "manifest"
    model: str = ""
    block_size: int | None = None
    scale_encoding: str | None = None
    scale_base: float | str | None = None
    nibble_order: str | None = None
    padding: str = "none"
    aliases: Aliases = field(default_factory=lambda: Aliases({}))
    axis: int = -1

    def __post_init__(self) -> None:
        for index, rule in enumerate(self.rules):
            where = f"{self.where}: {rule_text(index, rule)}"
            if rule.format not in self.tags:
                try:
                    get_format(self.tag(rule.format).format)
                except FormatError:
                    choices = [*self.tags, *_CASTS, *(fmt.name for fmt in list_formats())]
                    raise ManifestError(
                        f"{where}: format {rule.format[:80]!r} is neither in `formats` nor one of bitplan's"
                        f"{did_you_mean(rule.format[:80], choices)}"
                    ) from None
            self._check_nibbles(where, get_format(self.tag(rule.format).format))
            try:
                Choice(self.tag(rule.format).format, where, input=rule.input)
            except BitplanError as error:
                raise ManifestError(f"{where}: {error}") from None
        _ = self.patterns

    def _check_nibbles(self, where: str, fmt: Format) -> None:
        if self.nibble_order and fmt.packing and fmt.packing.order != self.nibble_order:
            raise ManifestError(
                f"{where}: nibble_order must be {fmt.packing.order!r}, which is how {fmt.name} packs, "
                f"got {self.nibble_order!r}"
            )

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """Read a manifest, a raw map of names with `[i]`, or by its name a manifest that comes with bitplan."""
        if str(path) in SHIPPED and not Path(path).is_file():
            return shipped_manifest(str(path))
        return cls.from_document(load_document(path, ManifestError), where=str(path))

    @classmethod
    def from_document(cls, document: Any, *, where: str = "manifest") -> Manifest:
        return _read(Reader(where, ManifestError), expand_raw_map(document) if is_raw_map(document) else document)

    # ---- matching ----------------------------------------------------------------------------------------------------

    @cached_property
    def patterns(self) -> NamePatterns:
        """The rules' patterns, compiled."""
        try:
            return NamePatterns([rule.pattern for rule in self.rules])
        except PatternError as error:
            which = "its rules" if error.index is None else rule_text(error.index, self.rules[error.index])
            raise ManifestError(f"{self.where}: {which} {error}") from None

    def tag(self, name: str) -> Tag:
        """The tag of this name: one of the manifest's, else a format of bitplan's."""
        return self.tags.get(name) or Tag(_CASTS.get(name, name))

    def match(self, name: str) -> Match | None:
        """The first rule whose pattern matches a name or its alias, which decides its format; None if none does."""
        indices = self.matches(name)
        return Match(indices[0], self.rules[indices[0]], self.aliases.to_ours(name)) if indices else None

    def matches(self, name: str) -> tuple[int, ...]:
        """All rules that match a name; the first of them wins."""
        try:
            return self.patterns.matching(self.aliases.to_ours(name))
        except PatternError as error:
            raise ManifestError(f"{self.where}: its {len(self.rules)} rules {error}") from None

    def resolve(self, tensors: Mapping[str, tuple[int, ...]]) -> Plan:
        """A format for every tensor; one error lists all tensors without a rule."""
        planned, missing = {}, []
        for name, shape in tensors.items():
            match = self.match(name)
            if match is None:
                missing.append(f"{name[:120]!r} (shape {tuple(shape)})")
            else:
                planned[name] = self._planned(name, tuple(shape), match)
        if missing:
            shown = ", ".join(missing[:MAX_UNMATCHED_SHOWN])
            more = f" and {len(missing) - MAX_UNMATCHED_SHOWN} more" if len(missing) > MAX_UNMATCHED_SHOWN else ""
            raise ManifestError(
                f"{self.where}: no rule matches {len(missing)} of {len(tensors)} tensors: {shown}{more}; "
                "add a rule, or a final '.*' rule to set a default"
            )
        return Plan(planned, padding=self.padding)

    def _planned(self, name: str, shape: tuple[int, ...], match: Match) -> Planned:
        tag = self.tag(match.rule.format)
        alias = self.aliases.template_of(name)
        reason = f"{rule_text(match.index, match.rule)}{f', as {alias}' if alias else ''}"
        role = match.rule.role or (tag.roles[0] if len(tag.roles) == 1 else guess_role(match.name))
        choice = Choice(tag.format, reason, cause="rule", input=match.rule.input)
        return Planned(choice, shape, role, tag.part)


def rule_text(index: int, rule: Rule) -> str:
    """How messages and reasons name a rule."""
    return f"patterns[{index}] {short(rule.pattern)}"


# ---- raw maps: names to tags -----------------------------------------------------------------------------------------


def is_raw_map(document: Any) -> bool:
    """Whether a document only maps names to tags, without the version that a manifest has."""
    return (
        type(document) is dict
        and bool(document)
        and not document.keys() & _KEYS.keys()
        and all(type(value) is str for value in document.values())
    )


def expand_raw_map(
    raw: Mapping[str, str],
    *,
    block_size: int = 32,
    scale_encoding: str = "e8m0",
    scale_base: float | str | None = None,
    where: str = "raw map",
) -> dict[str, Any]:
    """Expand a raw map to a manifest document: `[i]` becomes `(\\d+)`, all else is literal.

    A raw map does not say how FP4 and UE8 belong together; the defaults are those of gpt-oss's files. Anything but a
    map of names to tags is refused, with `where` in the message.
    """
    if not is_raw_map(raw):
        raise ManifestError(f"{where}: expected a raw map of tensor names to formats; a manifest needs no expanding")
    regexes = {name: "^" + r"(\d+)".join(map(re.escape, _INDEX.split(name))) + "$" for name in raw}
    rules = [{"regex": regexes[name], "format": tag} for name, tag in raw.items()]
    bits = {"BF16": 16, "FP16": 16, "F16": 16, "FP32": 32, "F32": 32, "FP4": 4, "UE8": 8}
    formats = {tag: {"bits": bits[tag]} for tag in dict.fromkeys(raw.values()) if tag in bits}
    document: dict[str, Any] = {"version": VERSION, "formats": formats, "patterns": rules}
    if _SPLIT_TAGS.keys() & formats.keys():
        document |= {"block_size": block_size, "scale_encoding": scale_encoding}
        document |= {"scale_base": scale_base} if scale_base is not None else {}
    return document


# ---- reading a document ----------------------------------------------------------------------------------------------


def _read(reader: Reader, document: Any) -> Manifest:
    if document in ({}, [], None, ""):
        reader.stop("the manifest is empty; it must be an object with version, formats and patterns")
    reader.version(document, VERSION)
    values = reader.keys("", document, _KEYS, ("version", "patterns"))
    if values.get("scale_encoding") in BASED_ENCODINGS and "scale_base" not in values:
        reader.stop(
            f"scale_encoding {values['scale_encoding']!r} has no meaning without scale_base (a scale is base * code); "
            f"add scale_base: {_BASE.text}"
        )
    tags = {name: _read_tag(reader, name, item, values) for name, item in values.get("formats", {}).items()}
    if "scale_base" in values and not any(tag.part and needs_base(tag.format) for tag in tags.values()):
        reader.stop(
            "scale_base has no effect: it is the base of codes and scales that a file keeps apart, and no tag "
            "of `formats` is a part of such a format (nvfp4, fp4_u8_g128); leave it out, each tensor gets its own base"
        )
    rules = tuple(reader.record(Rule, f"patterns[{index}]", item) for index, item in enumerate(values["patterns"]))
    options: dict[str, Any] = {key: values[key] for key in _OPTIONS if key in values}
    aliases = _read_aliases(reader, values.get("aliases", {}))
    return Manifest(rules, tags, reader.where, aliases=aliases, **options)


def _read_tag(reader: Reader, name: str, value: Any, document: Mapping[str, Any]) -> Tag:
    path = f"formats[{name[:80]!r}]"
    item = reader.keys(path, value, _TAG_KEYS, ())
    roles = item.get("role", [])
    roles = (roles,) if type(roles) is str else tuple(roles)
    part = cast("Part | None", item.get("part"))
    if "format" in item:
        fmt = _known_format(reader, f"{path}: format", item["format"])
    elif name in _SPLIT_TAGS:
        part = part or _SPLIT_TAGS[name]
        fmt = get_format(_split_format(reader, path, document))
    else:
        fmt = _known_format(reader, path, _CASTS.get(name, name))
    if part is not None and part not in fmt.part_layouts((2, 2)):
        reader.stop(f"{path}: {fmt.name} has no part {part!r}")
    if part and document.get("block_size", fmt.block.cols) != fmt.block.cols:
        reader.fail(f"{path}: block_size", f"{fmt.block.cols}, which is that of {fmt.name}", document["block_size"])
    bits = _bits(fmt, part)
    if item.get("bits", bits) != bits:
        of_what = f"the {part} of {fmt.name}" if part else fmt.name
        reader.fail(f"{path}: bits", f"{bits}, as {of_what} has", item["bits"])
    return Tag(fmt.name, part, roles)


def _known_format(reader: Reader, label: str, name: str) -> Format:
    try:
        return get_format(name)
    except FormatError:
        choices = [*_CASTS, *_SPLIT_TAGS, *(fmt.name for fmt in list_formats())]
        reader.stop(f"{label}: {name[:80]!r} is not a format of bitplan's{did_you_mean(name[:80], choices)}")


def _split_format(reader: Reader, path: str, document: Mapping[str, Any]) -> str:
    for key in ("block_size", "scale_encoding"):
        if key not in document:
            reader.stop(f"{path}: needs {key}, which is missing; gpt-oss has block_size 32, scale_encoding 'e8m0'")
    pair = document["scale_encoding"], document["block_size"]
    if pair not in _SPLIT_FORMATS:
        pairs = ", ".join(f"{encoding} per {block} ({name})" for (encoding, block), name in _SPLIT_FORMATS.items())
        reader.stop(f"{path}: no format has {pair[0]} scales per {pair[1]} numbers; there are {pairs}")
    return _SPLIT_FORMATS[pair]


def needs_base(name: str) -> bool:
    """Whether the scales of a format are multiples of a base."""
    scales = get_format(name).scales
    return scales is not None and scales.needs_base


def _bits(fmt: Format, part: Part | None) -> int:
    if part == "scales":
        return 8 * ITEM_BYTES[part_dtype(fmt, part)]
    return 8 * ITEM_BYTES[fmt.storage_name] if fmt.element is None else fmt.element.bits


def _read_aliases(reader: Reader, value: Mapping[str, Any]) -> Aliases:
    templates = {}
    for ours, others in value.items():
        names = [others] if type(others) is str else others
        if type(names) is not list or not all(map(NAME.holds, names)):
            reader.fail(f"aliases[{ours[:120]!r}]", "a name or a list of names", others)
        templates[ours] = tuple(names)
    try:
        return Aliases(templates)
    except AliasError as error:
        reader.stop(f"aliases: {error}")


SHIPPED = ("bert", "gemma", "gpt-oss", "llama", "mistral", "mixtral", "phi3", "qwen", "qwen3-moe")


def shipped_manifest(name: str) -> Manifest:
    """Read a manifest that comes with bitplan, by its name."""
    return Manifest.from_document(parse_json(shipped_text(name), where=name), where=name)


def shipped_text(name: str) -> bytes:
    """The bytes of the file of a manifest that comes with bitplan."""
    if name not in SHIPPED:
        raise ManifestError(f"no manifest {name!r}; there are {', '.join(SHIPPED)}{did_you_mean(name, SHIPPED)}")
    return _resource(name)


@cache
def _aliases_of_gguf() -> tuple[Aliases, ...]:
    return tuple(shipped_manifest(family).aliases for family in GGUF_MANIFESTS)


def name_in_model(name: str, parameter_names: Container[str]) -> str | None:
    """The model's name of a tensor, which may have a GGUF file's; None for one that the model lacks."""
    if name in parameter_names:
        return name
    translated = (aliases.to_ours(name) for aliases in _aliases_of_gguf())
    return next((ours for ours in translated if ours in parameter_names), None)


def open_manifest(name_or_path: str | Path) -> Manifest:
    """Open a manifest file, or a shipped manifest by its name; an existing file takes precedence."""
    path = Path(name_or_path)
    if path.exists() and not path.is_dir():
        return Manifest.load(path)
    if path.suffix or len(path.parts) > 1:
        raise ManifestError(f"{path}: no such file; manifests that come with bitplan: {', '.join(SHIPPED)}")
    return shipped_manifest(str(name_or_path))


def manifest_schema() -> dict[str, Any]:
    """The JSON Schema of the document, a new dict each time: written by hand, and held to the reader by a test."""
    schema: dict[str, Any] = parse_json(_resource("schema"), where="schema")
    return schema


def _resource(name: str) -> bytes:
    return (resources.files("bitplan.plan") / "manifests" / f"{name}.json").read_bytes()
