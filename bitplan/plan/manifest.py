"""Manifest: rules in a file that say which tensor gets which format.

The document is the gpt-oss manifest, JSON version 1, plus keys that decoding needs: `scale_base`, `axis`,
`nibble_order`, `padding`, `aliases`; docs/manifest.md describes all of it. A rule's regex must match the whole name,
the first rule that matches wins, and a tensor without a rule is an error. Patterns cannot run for ever: see
name_patterns.py.

A tag of the manifest (`BF16`, `FP4`, ...) stands for a format of bitplan's, or for a part of one: gpt-oss keeps the
codes of an mxfp4 weight under one name (`FP4`) and its scales under another (`UE8`). `block_size` and `scale_encoding`
decide which format `FP4` and `UE8` are together; a tag may also name it (`format`, `part`).

The manifests that come with bitplan (`SHIPPED`) are files in `manifests/`, to copy and change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

from bitplan.documents import FLAG, NAME, OBJECT, TEXT, Kind, Reader, is_number, is_text, load_document, one_of, short
from bitplan.errors import FormatError, ManifestError, did_you_mean
from bitplan.formats import Format, get_format, list_formats
from bitplan.formats.dtypes import ITEM_BYTES
from bitplan.plan.aliases import AliasError, Aliases
from bitplan.plan.name_patterns import NamePatterns, PatternError
from bitplan.plan.plan import PADDINGS, PARTS, Choice, Part, Plan, Planned, part_dtype
from bitplan.plan.structure.families import guess_role
from bitplan.records import parse_json

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
_RULE_KEYS = {"regex": NAME, "format": NAME, "role": NAME, "optional": FLAG}


@dataclass(frozen=True)
class Rule:
    """Tensors whose whole name matches `pattern` get the format of this tag.

    `optional` rules may match nothing: a bias that some models of a family lack.
    """

    pattern: str
    format: str
    role: str = ""
    optional: bool = False


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
                    known = [*self.tags, *_CASTS, *(fmt.name for fmt in list_formats())]
                    raise ManifestError(
                        f"{where}: format {rule.format[:80]!r} is neither in `formats` nor one of bitplan's"
                        f"{did_you_mean(rule.format[:80], known)}"
                    ) from None
            self._check_nibbles(where, get_format(self.tag(rule.format).format))
        _ = self.patterns

    def _check_nibbles(self, where: str, fmt: Format) -> None:
        if self.nibble_order and fmt.packing and fmt.packing.order != self.nibble_order:
            raise ManifestError(
                f"{where}: nibble_order must be {fmt.packing.order!r}, which is how {fmt.name} packs, "
                f"got {self.nibble_order!r}"
            )

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """Read a manifest, or a raw map of names with `[i]`."""
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
        """The first rule for a name, in our naming or its alias."""
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
        return Planned(Choice(tag.format, reason), shape, role, tag.part)


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
    rules = [{"regex": _template_regex(name), "format": tag} for name, tag in raw.items()]
    bits = {"BF16": 16, "FP16": 16, "F16": 16, "FP32": 32, "F32": 32, "FP4": 4, "UE8": 8}
    formats = {tag: {"bits": bits[tag]} for tag in dict.fromkeys(raw.values()) if tag in bits}
    document: dict[str, Any] = {"version": VERSION, "formats": formats, "patterns": rules}
    if _SPLIT_TAGS.keys() & formats.keys():
        document |= {"block_size": block_size, "scale_encoding": scale_encoding}
        document |= {"scale_base": scale_base} if scale_base is not None else {}
    return document


def _template_regex(name: str) -> str:
    return "^" + r"(\d+)".join(map(re.escape, _INDEX.split(name))) + "$"


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
    rules = tuple(_read_rule(reader, index, item) for index, item in enumerate(values["patterns"]))
    options: dict[str, Any] = {key: values[key] for key in _OPTIONS if key in values}
    aliases = _read_aliases(reader, values.get("aliases", {}))
    return Manifest(rules, tags, reader.where, aliases=aliases, **options)


def _read_rule(reader: Reader, index: int, value: Any) -> Rule:
    item = reader.keys(f"patterns[{index}]", value, _RULE_KEYS, ("regex", "format"))
    return Rule(item["regex"], item["format"], item.get("role", ""), item.get("optional", False))


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


def _known_format(reader: Reader, what: str, name: str) -> Format:
    try:
        return get_format(name)
    except FormatError:
        known = [*_CASTS, *_SPLIT_TAGS, *(fmt.name for fmt in list_formats())]
        reader.stop(f"{what}: {name[:80]!r} is not a format of bitplan's{did_you_mean(name[:80], known)}")


def _split_format(reader: Reader, path: str, document: Mapping[str, Any]) -> str:
    for key in ("block_size", "scale_encoding"):
        if key not in document:
            reader.stop(f"{path}: needs {key}, which is missing; gpt-oss has block_size 32, scale_encoding 'e8m0'")
    pair = document["scale_encoding"], document["block_size"]
    if pair not in _SPLIT_FORMATS:
        known = ", ".join(f"{encoding} per {block} ({name})" for (encoding, block), name in _SPLIT_FORMATS.items())
        reader.stop(f"{path}: no format has {pair[0]} scales per {pair[1]} numbers; there are {known}")
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


__all__ = ["Manifest", "ManifestError", "Match", "Rule", "Tag", "expand_raw_map", "is_raw_map"]


SHIPPED = ("bert", "gemma", "gpt-oss", "llama", "mistral", "mixtral", "phi3", "qwen", "qwen3-moe")


def shipped_manifest(name: str) -> Manifest:
    """A manifest that comes with bitplan."""
    return Manifest.from_document(parse_json(shipped_text(name), where=name), where=name)


def shipped_text(name: str) -> bytes:
    """The document itself."""
    if name not in SHIPPED:
        raise ManifestError(f"no manifest {name!r}; there are {', '.join(SHIPPED)}{did_you_mean(name, SHIPPED)}")
    return (resources.files("bitplan.plan") / "manifests" / f"{name}.json").read_bytes()


def open_manifest(name_or_path: str | Path) -> Manifest:
    """Open a manifest file, or a shipped manifest by its name; an existing file takes precedence."""
    path = Path(name_or_path)
    if path.exists() and not path.is_dir():
        return Manifest.load(path)
    if path.suffix or len(path.parts) > 1:
        raise ManifestError(f"{path}: no such file; manifests that come with bitplan: {', '.join(SHIPPED)}")
    return shipped_manifest(str(name_or_path))
