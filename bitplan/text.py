"""Text from files as people may see it: a tensor's name must not move a cursor, turn text around or end a line."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """1 finding, 2 findings."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def visible(text: str) -> str:
    """Control characters, line ends, bidi overrides and all else that is not shown as itself, written as escapes."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
