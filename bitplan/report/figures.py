"""Numbers for people: with a unit, three or four significant digits, and separators in long ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

NONE = TO = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
_GAP = "\N{NO-BREAK SPACE}"  # between a number and its unit
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def count(value: float) -> str:
    return f"{value:,.0f}"


def significant(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits; powers of ten only for very small and very large numbers."""
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))  # of the rounded number: 0.9996 is 1.00
    if size < -4 or size >= 9:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


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
