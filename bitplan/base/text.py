"""Makes text from files and other processes safe to show: it must not move a cursor, reverse text, end a line or fill
the screen.
"""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """1 finding, 2 findings."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def visible(text: str, most: int | None = None) -> str:
    """Text with control characters, line ends, bidi overrides and other invisible characters written as escapes.

    most: characters of the text that are shown; where there are more, their number is.
    """
    if most is not None and len(text) > most:
        return f"{visible(text[:most])}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
