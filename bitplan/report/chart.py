"""Charts as inline SVG: axes, lines, whiskers, bars. Colours are CSS classes, so a chart follows light and dark.

Not by matplotlib, whose SVG has fixed colours, letters as outlines, twenty times the bytes, and random names of parts
unless it is given a salt. Here text stays text, the same record gives the same bytes, and a report needs no further
package.

A chart is 460 units wide and is shown at 340 to 560 pixels, so letters of 12 units stay readable on a phone; a wide one
(920) scrolls within its card. Classes `k0` to `k7` are the categories' colours (`currentColor`), which colour-blind
people can tell apart; each also has a second sign (shape of marker, dash, label).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bitplan.report.markup import Markup, join, tag

WIDTH, HEIGHT, WIDE = 460, 270, 920
CATEGORIES = 8
FEWEST_POINTS = 3  # of a picture
MAX_POINTS = 1200  # of a line: more than the columns of a screen
_FAMILIES = (  # of formats
    (7, ("float32", "float16", "bfloat16", "bf16", "f32", "f16")),
    (1, ("int8", "q8", "i16", "i8")),
    (2, ("fp8", "mxfp8", "float8")),
    (0, ("mxfp4", "nvfp4", "fp4")),
    (4, ("int4", "q4")),
    (3, ("ternary", "q1", "int2")),
)
Format = Callable[[float], str]
Point = tuple[float, float]


def colour(index: int) -> str:
    return f"k{index % CATEGORIES}"


def format_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each format, the same in every chart: that of its family, or the next free one if it is taken."""
    colours: dict[str, str] = {}
    for name in names:
        family = next((index for index, starts in _FAMILIES if name.startswith(starts)), 5)
        free = [index for index in (family, *range(CATEGORIES)) if colour(index) not in colours.values()]
        colours[name] = colour(free[0] if free else family)
    return colours


def at(value: float) -> str:
    """A coordinate as SVG text, rounded to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class Axis:
    """A range, linear or logarithmic, with the places that get a label."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Say where a value lies, from 0 to 1; values outside the range are at its ends."""
        low, high, value = (math.log(max(edge, 1e-300)) if self.log else edge for edge in (self.low, self.high, value))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear_axis(
    values: Sequence[float],
    label: str,
    *,
    formatter: Format | None = None,
    zero: bool = False,
    goal: int = 5,
    whole: bool = False,
) -> Axis:
    """An axis with round ticks around the values; with `zero` from 0, with `whole` at whole numbers."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = min(0.0, low) if zero else low
    if low == high:
        room = abs(low) * 0.1 or 1.0
        low, high = (low - (0 if zero and low == 0 else room)), high + room
    raw = max((high - low) / goal, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    round_steps = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(round_step * power for round_step in round_steps if round_step * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [index * step for index in range(first, last + 1)]
    ticks = tuple(
        (value, _trim(formatter(value)) if formatter else f"{value:,.{_decimals(step)}f}") for value in values
    )
    return Axis(label, first * step, max(last, first + 1) * step, ticks)


def _trim(text: str) -> str:
    """A round number without the zeros after its point: `8.00 GB` is `8 GB`."""
    return re.sub(r"\.0+(?!\d)|(\.\d*?[1-9])0+(?!\d)", r"\1", text)


def _decimals(step: float) -> int:
    """How many decimals are needed to tell ticks apart."""
    return next((digits for digits in range(9) if abs(round(step, digits) - step) < step * 1e-6), 9)


def log_axis(values: Sequence[float], label: str, *, formatter: Format | None = None, base: int = 10) -> Axis:
    """An axis with powers of the base around the values; between powers of ten also 2 and 5, if the range is short."""
    positive = [max(value, 1e-290) for value in values if value > 0] or [1.0]  # `share` counts smaller values as 0
    written = formatter or (lambda value: f"{value:g}" if 1e-4 <= value < 1e6 else f"{value:.0e}".replace("e-0", "e-"))
    low = min(positive)
    high = max(positive)
    # Round values from the last below `low` to the first above `high`, and which of them are powers.
    steps = (1, 2, 5) if base == 10 else (1,)
    first, last = math.floor(math.log(low, base)) - 1, math.ceil(math.log(high, base)) + 2
    steps_up = [(step * float(base) ** power, step == 1) for power in range(first, last) for step in steps]
    start = max(index for index, (value, _) in enumerate(steps_up) if value <= low * (1 + 1e-9))
    end = min(index for index, (value, _) in enumerate(steps_up) if value >= high * (1 - 1e-9))
    shown = steps_up[start : max(end, start + 1) + 1]
    powers = [value for value, is_power in shown if is_power]
    every = max(1, math.ceil(len(powers) / 8))
    labelled = [value for value, _ in shown] if len(shown) <= 9 and base == 10 else powers[::every]
    ticks = tuple((value, _trim(written(value))) for value in labelled)
    return Axis(label, shown[0][0], shown[-1][0], ticks, log=True)


@dataclass
class Frame:
    """Two axes and the area between them."""

    x: Axis
    y: Axis
    label: str  # a description of the chart, for screen readers
    width: int = WIDTH
    height: int = HEIGHT
    left: int = 0  # 0: as much as the labels need
    marks: list[Markup] = field(default_factory=list)
    top: int = 12
    right: int = 16
    bottom: int = 44

    def __post_init__(self) -> None:
        longest = max((len(label) for _, label in self.y.ticks), default=0)
        self.left = self.left or round(34 + 7.6 * longest)

    def px(self, value: float) -> float:
        room = 9 if self.x.log else 0  # keeps points at both ends off the edge
        return self.left + room + self.x.share(value) * (self.width - self.left - self.right - 2 * room)

    def py(self, value: float) -> float:
        return self.height - self.bottom - self.y.share(value) * (self.height - self.top - self.bottom)

    def add(self, *marks: Markup) -> None:
        self.marks.extend(marks)

    def svg(self) -> Markup:
        base, end = self.height - self.bottom, self.width - self.right
        parts = [segment((self.left, self.py(value)), (end, self.py(value)), "grid") for value, _ in self.y.ticks] + [
            text((self.left - 7, self.py(value) + 4), label, "end") for value, label in self.y.ticks
        ]
        parts += [segment((self.px(value), base), (self.px(value), base + 4), "axis") for value, _ in self.x.ticks]
        for value, label in _roomy(self.x.ticks, self.px):
            within = min(self.px(value), self.width - 4.2 * len(label))  # the last label stays within the picture
            parts.append(text((within, base + 17), label, "middle"))
        parts += [segment((self.left, base), (end, base), "axis"), *self.marks]
        parts += [text(((self.left + end) / 2, self.height - 7), self.x.label, "middle", "name")]
        middle = (self.top + base) / 2
        turned = f"rotate(-90 13 {at(middle)})"
        parts += [tag("text", self.y.label, x=13, y=at(middle), text_anchor="middle", class_="name", transform=turned)]
        return picture(parts, self.width, self.height, self.label)


def picture(parts: Sequence[Markup], width: float, height: float, label: str) -> Markup:
    """The SVG element around these drawn parts."""
    size = {"viewBox": f"0 0 {at(width)} {at(height)}", "width": at(width), "height": at(height)}
    return tag("svg", join(parts), role="img", aria_label=label, class_="wide" if width > WIDTH else None, **size)


def _roomy(ticks: Sequence[tuple[float, str]], px: Callable[[float], float]) -> Sequence[tuple[float, str]]:
    """Every tick, or every second or third, so that labels do not run into each other on a phone."""
    for every in range(1, len(ticks) + 1):
        shown = ticks[::every]
        if all(px(b[0]) - px(a[0]) > 4.1 * (len(a[1]) + len(b[1])) + 7 for a, b in pairwise(shown)):
            return shown
    return ticks[:1]


def text(point: Point, text: str, anchor: str = "start", kind: str | None = None) -> Markup:
    return tag("text", text, x=at(point[0]), y=at(point[1]), text_anchor=anchor, class_=kind)


def segment(start: Point, end: Point, kind: str) -> Markup:
    return tag("line", x1=at(start[0]), y1=at(start[1]), x2=at(end[0]), y2=at(end[1]), class_=kind)


def step_chart(
    title: str,
    curves: Sequence[tuple[str, str, Sequence[Point]]],
    label: str,
    *,
    formatter: Format | None = None,
    zero: bool = False,
    whole: bool = False,
    ends: Callable[[str, Point], str] | None = None,
) -> Markup | None:
    """Curves over steps, (name, classes, points); None where none has three points: two are told in words.

    ends   what a marker at the end of a curve says
    """
    curves = [curve for curve in curves if curve[2]]
    if max((len(points) for _, _, points in curves), default=0) < FEWEST_POINTS:
        return None
    heights = [y for _, _, points in curves for _, y in points]
    x = linear_axis([x for _, _, points in curves for x, _ in points], "step", whole=True)
    frame = Frame(x, linear_axis(heights, label, formatter=formatter, zero=zero, whole=whole), f"{title} over steps")
    for name, kind, points in curves:
        frame.add(line(frame, points, kind))
        if ends is not None:
            last = points[-1]
            frame.add(marker((frame.px(last[0]), frame.py(last[1])), kind, ends(name, last)))
    return card(title, frame.svg(), legend=legend([(kind, name) for name, kind, _ in curves]))


# ---- marks -----------------------------------------------------------------------------------------------------------


def line(frame: Frame, points: Sequence[Point], kind: str) -> Markup:
    """An SVG line through the points, in their order."""
    points_px = thin([(frame.px(x), frame.py(y)) for x, y in points])
    return tag("polyline", points=" ".join(f"{at(x)},{at(y)}" for x, y in points_px), class_=f"line {kind}")


def thin(path: list[Point]) -> list[Point]:
    """Fewer points with the same look: of each run of neighbours the first, the last, the lowest and the highest."""
    if len(path) <= MAX_POINTS:
        return path
    run = math.ceil(4 * len(path) / MAX_POINTS)
    points: list[Point] = []
    for start in range(0, len(path), run):
        part = range(start, min(start + run, len(path)))
        extremes = {part[0], part[-1], min(part, key=lambda i: path[i][1]), max(part, key=lambda i: path[i][1])}
        points += [path[index] for index in sorted(extremes)]
    return points


def marker(point: Point, kind: str, tip: str, shape: str = "circle", radius: float = 4) -> Markup:
    """A point with a tooltip; `shape` tells kinds apart without colour."""
    x, y = point
    common = {"class_": f"mark {kind}", "data_tip": tip}
    if shape == "circle":
        return tag("circle", cx=at(x), cy=at(y), r=radius, **common)
    if shape == "ring":
        return tag("circle", cx=at(x), cy=at(y), r=3.6, class_=f"mark hollow {kind}", data_tip=tip)
    paths = {
        "diamond": f"M{at(x)} {at(y - 5)}l5 5l-5 5l-5 -5z",
        "square": f"M{at(x - 4)} {at(y - 4)}h8v8h-8z",
        "up": f"M{at(x)} {at(y - 4.5)}l4.5 8h-9z",
        "down": f"M{at(x)} {at(y + 4.5)}l4.5 -8h-9z",
    }
    if shape == "cross":
        return tag("path", d=f"M{at(x - 4)} {at(y - 4)}l8 8m0 -8l-8 8", class_=f"stroke {kind}", data_tip=tip)
    return tag("path", d=paths[shape], **common)


def whisker(frame: Frame, x: float, low: float, high: float, kind: str) -> Markup:
    """An SVG mark of an interval: a vertical line from `low` to `high` at x."""
    middle, top, base = frame.px(x), frame.py(high), frame.py(low)
    return tag(
        "path",
        d=f"M{at(middle - 4)} {at(top)}h8m-4 0V{at(base)}m-4 0h8",
        class_=f"stroke {kind}",
    )


def box(left: float, top: float, width: float, height: float, kind: str, tip: str | None = None) -> Markup:
    size = {"width": at(max(width, 0.6)), "height": at(max(height, 0.6))}
    return tag("rect", x=at(left), y=at(top), **size, class_=kind, data_tip=tip)


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Names beside their colours, in HTML so that they wrap; entries are (classes, name)."""
    items = [tag("li", tag("i", class_=f"swatch {kind}", aria_hidden="true"), name) for kind, name in entries]
    return tag("ul", *items, class_="legend") if items else Markup("")


def card(title: str, svg: Markup, *, legend: object = "", note: object = "", wide: bool = False) -> Markup:
    """A chart with its title above and a note for its reader below; a wide chart scrolls within its card."""
    drawn = scroller(svg, title) if wide else svg
    below = tag("figcaption", note, class_="note") if note else Markup("")
    kind = "card wide" if wide else "card"
    return tag("figure", tag("h4", title), legend, drawn, below, class_=kind)


def scroller(content: Markup, label: str) -> Markup:
    return tag("div", content, class_="scroll", role="region", tabindex="0", aria_label=label)


def bars(
    rows: Sequence[tuple[str, float, str, str]], label: str, *, width: int = WIDTH, whole: float | None = None
) -> Markup:
    """Horizontal bars: (name, value, value in words, classes). The name stands above its bar, so it may be long.

    Values that are parts of a `whole` are drawn as their shares of it; others against the largest.
    """
    high = whole or max((value for _, value, _, _ in rows), default=0.0) or 1.0
    pitch, parts = 36, []
    for index, (name, value, shown, kind) in enumerate(rows):
        top = index * pitch
        parts += [
            text((0, top + 14), _cut(name, 34)),
            text((width, top + 14), shown, "end", "value"),
            box(0, top + 19, width, 9, "track"),
            box(0, top + 19, value / high * width, 9, f"bar {kind}", f"{name}: {shown}"),
        ]
    return picture(parts, width, max(len(rows), 1) * pitch, label)


def _cut(name: str, letters: int) -> str:
    return name if len(name) <= letters else f"{name[: letters // 2]}…{name[-letters // 2 + 1 :]}"
