"""load_yaml: reads a YAML mapping from an untrusted file, within limits and without surprises.

PyYAML only splits the text into events here. Their meaning is decided below, because PyYAML's own is that of YAML 1.1:
`1:30` is 90, `010` is 8, `!!int ''` is an IndexError, and ten lines of aliases or merge keys make a billion nodes.
Every fault of the text is one ModelConfigError with file and line.

Scalars are null, booleans, integers, floats and strings; dates and base-60 numbers are strings, as in YAML 1.2. Keys
are text. An alias counts as many nodes as it stands for, and so does a merge key (`<<`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

from bitplan.documents import is_text, short, show
from bitplan.plan.fp8.vocabulary import ModelConfigError

MAX_YAML_CHARACTERS = 2**17
MAX_NODES = 10_000
MAX_ALIASES = 100
MAX_DEPTH = 32
MAX_DIGITS = 40
MERGE = "<<"

_NULL = ("", "~", "null", "Null", "NULL")
_TRUE = ("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON")
_FALSE = ("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0b[01]+|0o[0-7]+)")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NO_NUMBER = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = ("str", "int", "float", "bool", "null")


def load_yaml(text: str, *, where: str) -> dict[str, Any]:
    """A YAML mapping with text as keys; one document, only plain tags, no duplicate keys."""
    import yaml  # type: ignore[import-untyped]  # when it is asked for; it comes with gguf

    if len(text) > MAX_YAML_CHARACTERS:
        raise ModelConfigError(
            f"{where}: {len(text)} characters are too many for a model's YAML, at most {MAX_YAML_CHARACTERS}"
        )
    try:
        document = _Reading(where, yaml.parse(text, Loader=yaml.SafeLoader)).document()
    # PyYAML's own errors, and Python's that its scanner lets through: "\UFFFFFFFF", %YAML with a number too long to
    # convert.
    except (yaml.YAMLError, ArithmeticError, ValueError) as fault:
        if isinstance(fault, ModelConfigError):
            raise
        raise ModelConfigError(f"{where}: not valid YAML: {' '.join(str(fault).split())[:300]}") from None
    if document is None:
        raise ModelConfigError(f"{where}: empty; a model's YAML is a mapping of keys")
    if not isinstance(document, dict):
        raise ModelConfigError(f"{where}: a model's YAML must be a mapping of keys, got {show(document)}")
    return document


class _Reading:
    """One pass over the events of one text."""

    def __init__(self, where: str, events: Iterator[Any]) -> None:
        self.where = where
        self.events = events
        self.nodes = 0
        self.aliases = 0
        self.anchors: dict[str, tuple[Any, int]] = {}  # name -> its value and number of nodes
        self.line = 0

    def document(self) -> Any:
        self.next("StreamStartEvent")
        start = self.next()
        if type(start).__name__ == "StreamEndEvent":
            return None
        value = self.node(self.next(), 0)
        self.next("DocumentEndEvent")
        if type(self.next()).__name__ != "StreamEndEvent":
            self.stop("a second document begins; a model's YAML is one")
        return value

    def next(self, expected: str = "") -> Any:
        event = next(self.events)
        assert not expected or type(event).__name__ == expected
        self.line = event.start_mark.line + 1
        return event

    def stop(self, message: str) -> NoReturn:
        raise ModelConfigError(f"{self.where}: line {self.line}: {message}")

    def count(self, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            self.stop(f"more than {MAX_NODES} values, aliases and merge keys written out; a model's YAML is smaller")

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def node(self, event: Any, depth: int) -> Any:
        kind = type(event).__name__
        if kind == "AliasEvent":
            return self.alias(event.anchor)
        if depth > MAX_DEPTH:
            self.stop(f"nested more than {MAX_DEPTH} deep")
        before = self.nodes
        self.count(1)
        if event.anchor in self.anchors:
            self.stop(f"the anchor &{short(event.anchor, 40)} is set twice")
        if kind == "ScalarEvent":
            value = self.scalar(event)
        elif kind == "SequenceStartEvent":
            self.check_tag(event.tag, "seq")
            value = self.sequence(depth)
        else:
            self.check_tag(event.tag, "map")
            value = self.mapping(depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = value, self.nodes - before
        return value

    def alias(self, name: str) -> Any:
        self.aliases += 1
        if self.aliases > MAX_ALIASES:
            self.stop(f"more than {MAX_ALIASES} aliases")
        if name not in self.anchors:
            self.stop(f"the alias *{short(name, 40)} has no anchor before it, or stands within its own")
        value, nodes = self.anchors[name]
        self.count(nodes)
        return value

    def sequence(self, depth: int) -> list[Any]:
        items = []
        while type(event := self.next()).__name__ != "SequenceEndEvent":
            items.append(self.node(event, depth + 1))
        return items

    def mapping(self, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        while type(event := self.next()).__name__ != "MappingEndEvent":
            key = self.key(event)
            if key in own or (key == MERGE and merged):
                self.stop(f"key {short(key, 80)!r} appears twice")
            value = self.node(self.next(), depth + 1)
            if key == MERGE:
                merged = self.merged(value)
            else:
                own[key] = value
        return {**merged, **own}

    def key(self, event: Any) -> str:
        if type(event).__name__ != "ScalarEvent":
            self.stop("a key must be text, not a list, a mapping or an alias")
        self.count(1)
        if event.anchor is not None:
            self.stop("a key has an anchor; only values may")
        if event.tag not in (None, "!", f"{_TAG}str"):
            self.check_tag(event.tag, "str")
        return self.text(event.value)

    def merged(self, value: Any) -> dict[str, Any]:
        """The keys that `<<` merges; of several mappings the first that has a key gives its value."""
        merged: dict[str, Any] = {}
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                self.stop(f"<< takes a mapping or a list of mappings, got {show(item)}")
            self.count(len(item))
            merged = {**item, **merged}
        return merged

    # ---- scalars --------------------------------------------------------------------------------------------------

    def scalar(self, event: Any) -> Any:
        text = self.text(event.value)
        if event.tag in (None, "!"):
            # implicit[0]: the scalar is plain, so that its text decides its kind; else it was quoted, or tagged "!"
            return self.plain(text) if event.implicit[0] and event.tag is None else text
        kind = self.check_tag(event.tag, *_SCALAR_TAGS)
        if kind == "str":
            return text
        value = self.plain(text)
        if kind == "float" and type(value) is int:
            value = float(value)
        if {"int": int, "float": float, "bool": bool, "null": type(None)}[kind] is not type(value):
            self.stop(f"!!{kind} must be followed by a value of that kind, got {show(text)}")
        return value

    def plain(self, text: str) -> Any:
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if text[0] not in "+-.0123456789":
            return text
        if text.lower() in _NO_NUMBER:
            return float(_NO_NUMBER[text.lower()])
        if _OCTAL.fullmatch(text):
            self.stop(f"{show(text)} begins with 0, which is octal to some readers; write it without, or in quotes")
        integer = _INTEGER.fullmatch(text)
        if not integer and not _FLOAT.fullmatch(text):
            return text
        if len(text) > MAX_DIGITS:
            self.stop(f"a number of {len(text)} letters, at most {MAX_DIGITS}; put text in quotes")
        return int(text.replace("_", ""), 0) if integer else float(text)

    def text(self, text: str) -> str:
        if not is_text(text):
            self.stop("half of a surrogate pair is no text")
        return text

    def check_tag(self, tag: str | None, *allowed: str) -> str:
        """The plain kind that an explicit tag names; other tags are refused, and no tag runs code."""
        if tag in (None, "!"):
            return allowed[0]
        kind = str(tag).removeprefix(_TAG)
        if kind not in allowed or kind == tag:
            shown = f"!!{kind}" if kind != tag else str(tag)
            self.stop(f"the tag {short(shown, 80)} is not allowed here; only {', '.join(f'!!{k}' for k in allowed)}")
        return kind
