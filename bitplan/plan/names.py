"""Names of tensors: matched by shell patterns, ordered, cut at the layer's number, listed.

Users name tensors in the same way everywhere (`keep`, `only`, a mapping of names to formats): by name, by the name of a
module (for all tensors in it), or by a shell pattern (`*`, `?`, `[ab]`) of either. Manifests have regular expressions
instead, for whole names (name_patterns.py).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from bitplan.base.errors import BitplanError, PlanError, did_you_mean

MOST_UNMATCHED_SHOWN = 6


class ShellPatterns:
    """Ordered patterns; each is translated once, however many names are matched."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._order = {pattern: index for index, pattern in enumerate(dict.fromkeys(patterns))}
        self._wild = [
            (pattern, re.compile(fnmatch.translate(pattern)).match)
            for pattern in self._order
            if any(letter in pattern for letter in "*?[")
        ]

    def matching(self, name: str) -> list[str]:
        """The patterns that match a tensor or a module that holds it, in order; a name may itself hold brackets."""
        prefixes = _prefixes(name)
        patterns = {prefix for prefix in prefixes if prefix in self._order}
        patterns |= {pattern for pattern, match in self._wild if any(map(match, prefixes))}
        return sorted(patterns, key=self._order.__getitem__)

    def check(
        self, names: Iterable[str], where: str = "", thing: str = "tensor", error: type[BitplanError] = PlanError
    ) -> None:
        """Refuse a pattern that matches no name of a `thing`, as a spelling mistake; `*` is allowed."""
        names = list(names)
        matched = {pattern for name in names for pattern in self.matching(name)}
        idle = [pattern for pattern in self._order if pattern not in matched and pattern != "*"]
        if idle:
            prefixes = list(dict.fromkeys(prefix for name in names for prefix in _prefixes(name)))
            lists = "; `bitplan inspect` lists those of a file, `bitplan plan` those of a plan"
            faults = [
                f"the pattern {pattern!r} matches no {thing}"
                f"{_as_shell_pattern(pattern, names) or did_you_mean(pattern, prefixes) or lists}"
                for pattern in idle[:MOST_UNMATCHED_SHOWN]
            ]
            more = f"; nor do {len(idle) - len(faults)} more" if len(idle) > len(faults) else ""
            raise error(f"{where}{': ' if where else ''}{'; '.join(faults)}{more}")


def _prefixes(name: str) -> list[str]:
    """The names of the modules that hold a tensor, outermost first, and the tensor's own name."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _as_shell_pattern(pattern: str, names: Iterable[str]) -> str:
    """A hint how to write a pattern that looks like a regular expression; '' for others, and if no name would match."""
    if pattern[:1] in ("*", "?") or not re.search(r"[\\^$()|+{}]|\.\*", pattern):
        return ""  # no regular expression begins so
    text = re.sub(r"\(?(\\d|\[0-9\])[+*]?\)?|\.[*+]", "*", pattern.removeprefix("^").removesuffix("$")).replace(
        "\\.", "."
    )
    if pattern[0] != "." and text == pattern.replace(".*", "*") and not fnmatch.filter(names, text):
        return ""  # a `.*` alone may well be meant as it is
    how = "give one for each, or a manifest" if re.search(r"[\\^$()|+{}]", text) else f"write {text!r}"
    return f"; it is read as a shell pattern (* ? [ab]), not as a regular expression: {how}"


def natural_order(names: Iterable[str]) -> list[str]:
    """Sort names so that numbers in them count as numbers: layer 2 comes before layer 10."""
    return sorted(names, key=lambda name: (_natural_key(name), name))


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    pieces = re.split(r"([0-9]+)", name)
    # Numbers are ordered by length, then by digits: converting a very long number could fail.
    return [
        (1, len(piece.lstrip("0")), piece.lstrip("0")) if index % 2 else (0, 0, piece)
        for index, piece in enumerate(pieces)
    ]


def listed(names: Iterable[str], limit: int = 10) -> str:
    """Names for a message: all of them, or the first few and how many more."""
    names = list(names)
    shown = ", ".join(repr(name[:120]) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def split_layer(name: str) -> tuple[str, str, str]:
    """The name before the layer's number, the number, and the name after it; without a number: the name, '', ''."""
    match = re.fullmatch(r"((?:[^.]*\.)*?)([0-9]{1,9})(\..*)", name)
    return (match[1], match[2], match[3]) if match else (name, "", "")


def number_ranges(numbers: Iterable[str]) -> str:
    """Sorted numbers as text, with runs as `first..last`."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}..{high}" for low, high in runs)
