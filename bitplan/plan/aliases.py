"""Aliases: one map between two namings of the same tensors, read both ways.

A name with its layer number left open is a template: `block.[i].attn.norm.scale`. A tensor of one naming may be
several of the other (gpt-oss's `qkv` is Hugging Face's q, k and v), so a template maps to a list. Only parts of a
name between dots are numbers; each placeholder of one side is used on the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bitplan.errors import BitplanError

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
