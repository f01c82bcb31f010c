"""Section of streaming: times of steps, bytes, memory, and the copies and waits within one step.

A line of the telemetry may have a `timeline`, in milliseconds from the start of its step:

    "timeline": {"copies": [{"name": "block.3", "start_ms": 0.1, "end_ms": 1.4, "bytes": 524288}, ...],
                 "waits": [{"start_ms": 1.2, "end_ms": 1.4}, ...],
                 "copies_out": [{"name": "block.3", "start_ms": 3.1, "end_ms": 3.9, "bytes": 262144}, ...]}

The last step that has one is drawn as it ran. Without one, the totals of the last step are drawn, and the page says
that the order within the step was not recorded.

Loss curves of training runs, from their logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bitplan.report.chart import (
    WIDE,
    Point,
    bars,
    box,
    card,
    colour,
    legend,
    linear_axis,
    picture,
    segment,
    step_chart,
    text,
)
from bitplan.report.markup import Markup, count, join, milliseconds, nbytes, percent, plural, significant
from bitplan.report.read_records import Record, RecordFields, ReportError
from bitplan.report.section import Fact, Section, cards, one_by_one, source, told

# ---- section of training ---------------------------------------------------------------------------------------------


LOSSES = ("loss", "validation_loss")


@dataclass(frozen=True)
class Run:
    """One training log, as curves of its figures by name."""

    record: Record
    name: str
    steps: int
    curves: dict[str, list[Point]]
    not_finite: int


def training_section(records: Sequence[Record]) -> Section:
    runs = [_read(record) for record in records]
    figures = dict.fromkeys(name for run in runs for name in run.curves)
    drawn = [_chart(runs, name) for name in ("loss", *(name for name in figures if name not in LOSSES))]
    body = join([*(source(run.record) for run in runs), cards([chart for chart in drawn if chart])])
    last = runs[0].curves["loss"][-1][1]
    facts = (Fact(significant(last, 4), "final loss", runs[0].name),) if len(runs) == 1 else ()
    return Section("training", "Training", body, tuple(_sentence(run) for run in runs), facts)


def _read(record: Record) -> Run:
    head, *lines = record.lines()
    curves: dict[str, list[Point]] = {}
    not_finite = 0
    for item in lines:
        step = item.number("step")
        not_finite += "loss" not in item
        for name in item.value:
            if name != "step" and name in item:
                curves.setdefault(name, []).append((step, item.number(name)))
    if "loss" not in curves:
        raise ReportError(f'{record.name}: no line has a loss; a step is {{"step": 0, "loss": 4.2}}')
    return Run(record, head.text("run"), len(lines), curves, not_finite)


def _chart(runs: Sequence[Run], name: str) -> Markup | None:
    """A figure of all runs, with the validation loss beside the loss."""
    curves = [(run.name, colour(index), run.curves.get(name, [])) for index, run in enumerate(runs)]
    if name == "loss":
        curves += [
            (f"{run.name}, validation", f"{colour(index)} dashed", run.curves.get("validation_loss", []))
            for index, run in enumerate(runs)
        ]
    title = name.replace("_", " ")

    def end(curve: str, point: Point) -> str:
        return f"{curve}: {title} {significant(point[1], 4)} at step {count(point[0])}"

    return step_chart(title.capitalize(), curves, title, ends=end)


def _sentence(run: Run) -> Markup:
    curve = run.curves["loss"]
    bad = f" In {plural(run.not_finite, 'step')} the loss was not a number." if run.not_finite else ""
    text = f"{run.name} ran {plural(run.steps, 'step')}: loss {significant(curve[0][1])} to {significant(curve[-1][1])}"
    return told(run.record, f"{text}.{bad}")


# ---- section of streaming --------------------------------------------------------------------------------------------


TIMES = (
    ("step_ms", "step", "k0"),
    ("compute_ms", "compute", "k2"),
    ("copy_ms", "copies", "k1"),
    ("stall_ms", "stall", "k3"),
)
LANE_LEFT, LANE_PITCH = 92, 34
LANE_LEAST = 1.5  # a very short copy is still visible


class LanePiece(NamedTuple):
    """A stretch of time drawn in a lane of the timeline: a copy, a wait, or computing."""

    name: str
    start_ms: float
    end_ms: float
    kind: str
    nbytes: int | None = None

    @property
    def tip(self) -> str:
        moved = f", {nbytes(self.nbytes)}" if self.nbytes is not None else ""
        took = milliseconds(self.end_ms - self.start_ms)
        return f"{self.name}: {took}, from {milliseconds(self.start_ms)} to {milliseconds(self.end_ms)}{moved}"


def stream_section(records: Sequence[Record]) -> Section:
    def draw(record: Record) -> tuple[Markup, object, Sequence[Fact]]:
        steps = record.lines()
        drawn = [chart for chart in (_times_chart(steps), _bytes_chart(steps[-1]), _memory_chart(steps)) if chart]
        return join([source(record), _timeline_card(steps), cards(drawn)]), _summary(record, steps), _facts(steps)

    return one_by_one("streaming", "Streaming", records, draw)


# ---- the lanes of a step ---------------------------------------------------------------------------------------------


def _timeline_card(steps: Sequence[RecordFields]) -> Markup:
    timed = [step for step in steps if "timeline" in step]
    if not timed:
        step = steps[-1]
        title = f"Step {count(step.number('step'))} in total"
        note = "Sums over the step, to scale; when each copy ran was not recorded."
        return card(title, _lanes(_totals(step), step.number("step_ms")), legend=_names(), note=note, wide=True)
    step = timed[-1]
    title = f"Timeline of step {count(step.number('step'))}"
    note = "Copies and computation side by side: a copy above computation is hidden, a wait is not."
    return card(title, _lanes(_pieces(step), step.number("step_ms")), legend=_names(), note=note, wide=True)


def _names() -> Markup:
    return legend([("k1", "copy to the device"), ("k2", "compute"), ("k3", "stall"), ("k4", "copy back")])


def _totals(step: RecordFields) -> dict[str, list[LanePiece]]:
    compute, stall, copied = step.number("compute_ms"), step.number("stall_ms"), step.number("copy_ms")
    return {
        "copies": [LanePiece("all copies", 0, copied, "k1", step.whole("bytes_h2d", None))],
        "compute": [LanePiece("compute", 0, compute, "k2"), LanePiece("stall", compute, compute + stall, "k3")],
    }


def _pieces(step: RecordFields) -> dict[str, list[LanePiece]]:
    timeline = step.fields("timeline")
    lanes = {"copies": [_piece(item, "k1") for item in timeline.each("copies", [])]}
    waits = [_piece(item, "k3", "stall") for item in timeline.each("waits", [])]
    waits.sort(key=lambda piece: piece.start_ms)
    lanes["compute"] = _between(waits, step.number("step_ms")) + waits
    out = [_piece(item, "k4") for item in timeline.each("copies_out", [])]
    return lanes | ({"copies back": out} if out else {})


def _piece(item: RecordFields, kind: str, name: str = "") -> LanePiece:
    start, end = item.number("start_ms"), item.number("end_ms")
    if end < start:
        raise ReportError(f"{item.where}: end_ms {end} is before start_ms {start}")
    return LanePiece(name or item.text("name"), start, end, kind, item.whole("bytes", None))


def _between(waits: Sequence[LanePiece], end_ms: float) -> list[LanePiece]:
    """The stretches of computing: all time between the waits, up to `end_ms`."""
    pieces, at_ms = [], 0.0
    for wait in waits:
        if wait.start_ms > at_ms:
            pieces.append(LanePiece("compute", at_ms, wait.start_ms, "k2"))
        at_ms = max(at_ms, wait.end_ms)
    return [*pieces, LanePiece("compute", at_ms, end_ms, "k2")] if end_ms > at_ms else pieces


def _lanes(lanes: dict[str, list[LanePiece]], step_ms: float) -> Markup:
    ends = [max(piece.end_ms, 0.0) for pieces in lanes.values() for piece in pieces]
    x = linear_axis([0.0, max(step_ms, 0.0), *ends], "ms", zero=True, goal=8)
    base = 8 + LANE_PITCH * len(lanes)
    scale = (WIDE - LANE_LEFT - 16) / x.high
    parts = []
    for value, label in x.ticks:
        at_x = LANE_LEFT + value * scale
        parts += [segment((at_x, 4), (at_x, base), "grid"), text((at_x, base + 16), label, "middle")]
    for row, (name, pieces) in enumerate(lanes.items()):
        top = 8 + LANE_PITCH * row
        parts.append(text((LANE_LEFT - 8, top + 17), name, "end"))
        for piece in pieces:
            start, end = max(piece.start_ms, 0.0), max(piece.end_ms, 0.0)  # a copy may have begun in the step before
            left, width = LANE_LEFT + start * scale, max((end - start) * scale, LANE_LEAST)
            parts.append(box(left, top, width, 24, f"lane {piece.kind}", piece.tip))
    parts.append(text(((LANE_LEFT + WIDE) / 2, base + 33), "milliseconds from the start of the step", "middle", "name"))
    return picture(parts, WIDE, base + 40, "Lanes of copies and computation over the time of one step")


# ---- over steps ------------------------------------------------------------------------------------------------------


def _over_steps(
    steps: Sequence[RecordFields], keys: Sequence[tuple[str, str, str]]
) -> list[tuple[str, str, list[Point]]]:
    """Curves of these figures over steps: (key, name, classes, points) of each."""
    return [
        (name, kind, [(float(step.number("step")), float(step.number(key, 0))) for step in steps])
        for key, name, kind in keys
    ]


def _times_chart(steps: Sequence[RecordFields]) -> Markup | None:
    return step_chart("Time of a step", _over_steps(steps, TIMES), "milliseconds", zero=True)


def _bytes_chart(step: RecordFields) -> Markup | None:
    rows = []
    for key, way, kind in (("bytes_h2d_by_format", "to the device", "k1"), ("bytes_d2h_by_format", "back", "k4")):
        moved = step.fields(key, {})
        rows += [
            (f"{way}: {name}", float(moved.number(name)), nbytes(moved.number(name)), kind) for name in moved.value
        ]
    if not rows:
        return None
    return card(f"Bytes moved in step {count(step.number('step'))}", bars(rows, "Bytes moved, by format"))


def _memory_chart(steps: Sequence[RecordFields]) -> Markup | None:
    if not all("vram_peak_bytes" in step for step in steps):
        return None
    keys = (("vram_peak_bytes", "device", "k0"), ("pinned_peak_bytes", "pinned on the host", "k1"))
    return step_chart("Peak memory", _over_steps(steps, keys), "peak memory", formatter=nbytes, zero=True)


def _summary(record: Record, steps: Sequence[RecordFields]) -> Markup:
    last = steps[-1]
    overlap = last.number("overlap", None)
    hidden = f", of which {percent(overlap)} was hidden behind computation" if overlap is not None else ""
    rate = last.number("h2d_gb_per_s", None)
    speed = f" at {significant(rate)} GB/s" if rate else ""
    copied = nbytes(last.whole("bytes_h2d", None))
    took = milliseconds(last.number("step_ms"))
    text = f"{plural(len(steps), 'step')} streamed; the last took {took} and copied {copied}"
    return told(record, f"{text}{speed}{hidden}.")


def _facts(steps: Sequence[RecordFields]) -> list[Fact]:
    last = steps[-1]
    overlap = last.number("overlap", None)
    if overlap is None:
        return []
    return [Fact(percent(overlap), "of copying hidden", f"stall {milliseconds(last.number('stall_ms'))} a step")]
