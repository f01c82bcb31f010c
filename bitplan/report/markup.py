"""HTML that no shown text can break: text is escaped unless it is already `Markup`.

Names of tensors, reasons and messages come from files that anyone may have written. `tag` is the only way in which this
package makes an element, and it escapes every child and every attribute that is not `Markup`, so a tensor called
`</script><img onerror=...>` is shown as a strange name, and does nothing.

Numbers for people: with a unit, three or four significant digits, and separators in long ones.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence

# ---- figures ---------------------------------------------------------------------------------------------------------


NONE = TO = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
_GAP = "\N{NO-BREAK SPACE}"  # between a number and its unit
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def count(value: float) -> str:
    return f"{value:,.0f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Write a number with `digits` significant digits, as a power of ten only if it is very small or very large."""
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))  # of the rounded number: 0.9996 is 1.00
    if size < -4 or size >= 9:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


def two_digits(value: float) -> str:
    return significant(value, 2)


def beside_floor(kl: float, floor: float) -> str:
    """How many times the noise floor a KL is, which says whether it is good: 1 is what running in bfloat16 costs."""
    return f"{two_digits(kl / floor)}{TIMES} the noise floor, {two_digits(floor)}" if floor > 0 else "no noise"


def nbytes(value: float | None) -> str:
    """Bytes in decimal units, as disks count."""
    if value is None:
        return NONE
    amount, unit = float(value), _BYTES[0]
    for unit in _BYTES:
        if abs(amount) < 999.5 or unit == _BYTES[-1]:
            break
        amount /= 1000
    return f"{amount:.0f}{_GAP}B" if unit == "B" else f"{significant(amount)}{_GAP}{unit}"


def milliseconds(value: float | None) -> str:
    """A time given in milliseconds, in the unit that suits it."""
    if value is None:
        return NONE
    if abs(value) >= 1000:
        return f"{significant(value / 1000)}{_GAP}s"
    if abs(value) >= 1 or value == 0:
        return f"{significant(value)}{_GAP}ms"
    return f"{significant(value * 1000)}{_GAP}µs"


def percent(share: float | None) -> str:
    if share is None:
        return NONE
    return f"{100 * share:.0f}{_GAP}%" if abs(share) >= 0.995 or share == 0 else f"{significant(100 * share, 2)}{_GAP}%"


def plural(number: int, one: str, many: str = "") -> str:
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def shape(sizes: Sequence[float | str]) -> str:
    return f" {TIMES} ".join(f"{size:.0f}" if isinstance(size, float) else str(size) for size in sizes) or "scalar"


# ---- markup ----------------------------------------------------------------------------------------------------------


VOID = frozenset({"meta", "input", "br", "link", "col", "wbr"})
# Controls, halves of surrogate pairs (which UTF-8 cannot hold), and marks that reverse the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already; made by `tag`, `escape` and `join` only."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Escape text for HTML, with invisible characters written as codes."""
    if isinstance(value, Markup):
        return value
    escaped = _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", str(value))
    return Markup(html.escape(escaped, quote=True))


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
