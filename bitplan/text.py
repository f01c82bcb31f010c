"""Makes text from files safe to show: a tensor's name must not move a cursor, reverse text or end a line."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """1 finding, 2 findings."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def visible(text: str) -> str:
    """Text with control characters, line ends, bidi overrides and other invisible characters written as escapes."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
