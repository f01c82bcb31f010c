"""HTML that no shown text can break: text is escaped unless it is already `Markup`.

Names of tensors, reasons and messages come from files that anyone may have written. `tag` is the only way in which this
package makes an element, and it escapes every child and every attribute that is not `Markup`, so a tensor called
`</script><img onerror=...>` is shown as a strange name, and does nothing.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = frozenset({"meta", "input", "br", "link", "col", "wbr"})
# Controls, halves of surrogate pairs (which UTF-8 cannot hold), and marks that reverse the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already; made by `tag`, `escape` and `join` only."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Text escaped for HTML; invisible characters are written as codes."""
    if isinstance(value, Markup):
        return value
    seen = _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", str(value))
    return Markup(html.escape(seen, quote=True))


def join(parts: Iterable[object], between: str = "") -> Markup:
    return Markup(between.join(escape(part) for part in parts))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. An attribute's `_` is `-` (`class_`: class); None or False leaves it out, True gives it no value."""
    written = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        written.append(attribute if value is True else f'{attribute}="{escape(value)}"')
    opening = f"<{' '.join(written)}>"
    return Markup(opening if name in VOID else f"{opening}{join(children)}</{name}>")
