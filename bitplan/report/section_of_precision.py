"""Sections of selective precision: what its telemetry saw of blocks over steps, and how a run's plan changed.

Sensitivity is a heat map: a column is an update, a row a block. Cells of one colour are one path, and tooltips come
from one list of figures, so a map of ten thousand cells stays small. The plan of a run shows which parts were low at
which step, every change with its reason, and what was timed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bitplan.base.errors import PlanFileError
from bitplan.plan.from_records import RunLog, run_log_of
from bitplan.report.chart import WIDE, Point, at, bars, box, card, colour, legend, marker, picture, step_chart, text
from bitplan.report.markup import TO, Markup, count, join, milliseconds, nbytes, percent, plural, significant, tag
from bitplan.report.read_records import Record, ReportError, is_number
from bitplan.report.section import Column, Fact, Section, cards, column_table, figure, fold, one_by_one, source, told

LEVELS = 10
MAX_COLUMNS = 240
HIGH = "bf16"
STRIPS = {"int8": "k1", "fp8": "k2", "int4": "k3"}  # the colour of a low precision; bf16 has none
LEFT, TOP, BOTTOM = 118, 8, 40


class Seen(NamedTuple):
    """Precision, sensitivity and reason of one block at one update."""

    precision: str
    sensitivity: float | None
    reason: str


@dataclass(frozen=True)
class Update:
    step: int
    blocks: dict[str, Seen]
    bytes_sent: int | None
    bytes_not_sent: int | None
    counts: dict[str, int]


class PrecisionChange(NamedTuple):
    step: int
    column: int
    block: str
    before: str
    after: str
    reason: str


def precision_section(records: Sequence[Record]) -> Section:
    def draw(record: Record) -> tuple[Markup, object, Sequence[Fact]]:
        updates = _read(record)
        changes = _changes(updates)
        drawn = [chart for chart in (_counts_chart(updates), _bytes_chart(updates)) if chart]
        body = join([source(record), _heat_card(updates, changes), cards(drawn), _changes_table(changes)])
        return body, _summary(record, updates, changes), _facts(updates, changes)

    return one_by_one("precision", "Precision over steps", records, draw)


def _read(record: Record) -> list[Update]:
    updates = []
    for fields in record.lines():
        blocks = {
            name: Seen(details.text("precision"), details.number("sensitivity", None), details.text("reason", ""))
            for name, details in fields.items("block_details")
        }
        counts = {name: fields.whole(f"blocks_{name}", 0) for name in (HIGH, *STRIPS)}
        sent, not_sent = fields.whole("bytes_sent", None), fields.whole("bytes_not_sent", None)
        updates.append(Update(fields.whole("step_id"), blocks, sent, not_sent, counts))
    return updates


def _changes(updates: Sequence[Update]) -> list[PrecisionChange]:
    """List where a block's precision differs from that of the update before."""
    changes, current = [], dict[str, str]()
    for column, update in enumerate(updates):
        for name, block in update.blocks.items():
            before = current.get(name)
            if before is not None and before != block.precision:
                changes.append(PrecisionChange(update.step, column, name, before, block.precision, block.reason))
            current[name] = block.precision
    return changes


# ---- the map ---------------------------------------------------------------------------------------------------------


def _heat_card(updates: Sequence[Update], changes: Sequence[PrecisionChange]) -> Markup:
    blocks = list(dict.fromkeys(name for update in updates for name in update.blocks))
    every = max(1, math.ceil(len(updates) / MAX_COLUMNS))
    shown = list(updates[::every])
    scores = [
        block.sensitivity for update in shown for block in update.blocks.values() if block.sensitivity is not None
    ]
    high = max(1.0, max(scores, default=1.0))
    names = [(f"heat h{level}", _level(level, high)) for level in (0, 3, 6, LEVELS - 1)]
    low = sorted({block.precision for update in shown for block in update.blocks.values()} - {HIGH})
    names += [(f"strip {STRIPS.get(name, 'k3')}", f"underlined: {name}") for name in low]
    names += [("sign up", "to higher precision"), ("sign down", "to lower precision")] if changes else []
    note = f"A row is a layer, a column an update of the hints; {count(len(updates))} updates."
    note += f" One column in {every} is drawn; every change is marked." if every > 1 else ""
    return card(
        "Sensitivity of layers over steps",
        _heat_map(blocks, shown, changes, every, high),
        legend=legend(names),
        note=f"{note} Point at a cell for its score, at a mark for the reason.",
        wide=True,
    )


def _level(level: int, high: float) -> str:
    return f"{significant(level / LEVELS * high, 2)} {TO} {significant((level + 1) / LEVELS * high, 2)}"


def _heat_map(
    blocks: Sequence[str], shown: Sequence[Update], changes: Sequence[PrecisionChange], every: int, high: float
) -> Markup:
    pitch = 16 if len(blocks) <= 40 else 10 if len(blocks) <= 120 else 6
    step = (WIDE - LEFT - 10) / max(len(shown), 1)
    gap = 1 if step > 5 else 0
    height = TOP + pitch * len(blocks) + BOTTOM
    parts = _cells(blocks, shown, step, pitch, gap, high) + _strips(blocks, shown, step, pitch)
    rows = {name: index for index, name in enumerate(blocks)}
    for change in changes:
        x, y = LEFT + step * (change.column / every), TOP + pitch * (rows[change.block] + 0.5)
        lower = change.after != HIGH
        tip = f"step {count(change.step)}, {change.block}: {change.before} to {change.after}; {change.reason}"
        parts.append(marker((x + step / 2, y - 1), "change", tip, "down" if lower else "up"))
    skip = max(1, math.ceil(13 / pitch))
    parts += [
        text((LEFT - 8, TOP + pitch * (index + 0.5) + 4), name if len(name) <= 16 else f"…{name[-15:]}", "end")
        for index, name in enumerate(blocks)
        if index % skip == 0
    ]
    parts += _step_labels(shown, step, TOP + pitch * len(blocks))
    parts.append(text(((LEFT + WIDE) / 2, height - 6), "step", "middle", "name"))
    figures = {
        "left": LEFT,
        "top": TOP,
        "width": step,
        "pitch": pitch,
        "blocks": blocks,
        "steps": [update.step for update in shown],
        "rows": [[_figures(update.blocks.get(name)) for update in shown] for name in blocks],
    }
    drawn = picture(parts, WIDE, height, "Heat map: sensitivity of each layer at each update, from low to high")
    return tag("div", drawn, class_="heatmap", data_heat=json.dumps(figures, separators=(",", ":")))


def _figures(block: Seen | None) -> list[object]:
    if block is None:
        return []
    return [None if block.sensitivity is None else round(block.sensitivity, 3), block.precision]


def _cells(
    blocks: Sequence[str], shown: Sequence[Update], step: float, pitch: int, gap: int, high: float
) -> list[Markup]:
    """Draw the cells: a path for each level of colour, and one for cells without a score."""
    paths: dict[str, list[str]] = {}
    for column, update in enumerate(shown):
        for row, name in enumerate(blocks):
            block = update.blocks.get(name)
            if block is None:
                continue
            score = block.sensitivity
            level = "none" if score is None else f"h{min(LEVELS - 1, max(0, int(score / high * LEVELS)))}"
            x, width, tall = LEFT + step * column, at(step - gap), pitch - 1
            paths.setdefault(level, []).append(f"M{at(x)} {at(TOP + pitch * row)}h{width}v{tall}h-{width}z")
    return [tag("path", d="".join(d), class_=f"heat {level}") for level, d in sorted(paths.items())]


def _strips(blocks: Sequence[str], shown: Sequence[Update], step: float, pitch: int) -> list[Markup]:
    """A line under the cells of each run of updates in a low precision."""
    strips, thick = [], max(2, pitch // 5)
    for row, name in enumerate(blocks):
        start = 0
        kinds = [block.precision if (block := update.blocks.get(name)) else HIGH for update in shown]
        for column in range(1, len(kinds) + 1):
            if column < len(kinds) and kinds[column] == kinds[start]:
                continue
            if kinds[start] != HIGH:
                x, y = LEFT + step * start, TOP + pitch * (row + 1) - 1 - thick
                strips.append(box(x, y, step * (column - start), thick, f"bar {STRIPS.get(kinds[start], 'k3')}"))
            start = column
    return strips


def _step_labels(shown: Sequence[Update], step: float, base: float) -> list[Markup]:
    every = max(1, math.ceil(64 / step))
    return [
        text((LEFT + step * (column + 0.5), base + 16), count(update.step), "middle")
        for column, update in enumerate(shown)
        if column % every == 0
    ]


# ---- beside the map --------------------------------------------------------------------------------------------------


def _counts_chart(updates: Sequence[Update]) -> Markup | None:
    names = [name for name in (HIGH, *STRIPS) if any(update.counts[name] for update in updates)]
    curves = [
        (name, STRIPS.get(name, colour(7)), [(float(one.step), float(one.counts[name])) for one in updates])
        for name in names
    ]
    return step_chart("Layers in each precision", curves, "layers", zero=True, whole=True)


def _bytes_chart(updates: Sequence[Update]) -> Markup | None:
    steps = [
        (float(update.step), update.bytes_sent, update.bytes_not_sent)
        for update in updates
        if update.bytes_sent is not None
    ]
    sent = [(step, float(value or 0)) for step, value, _ in steps]
    in_bf16 = [(step, float((value or 0) + rest)) for step, value, rest in steps if rest is not None]
    curves = [("sent", colour(0), sent), ("all in bfloat16", "plain dashed", in_bf16)]
    return step_chart("Bytes sent to the device", curves, "bytes a pass", formatter=nbytes, zero=True)


def _changes_table(changes: Sequence[PrecisionChange]) -> Markup:
    if not changes:
        return tag("p", "No layer changed its precision.", class_="note")
    title = f"{plural(len(changes), 'change')} of precision"
    drawn = column_table(
        title,
        (Column("Step", numeric=True), [figure(float(change.step), count) for change in changes]),
        (Column("Layer", mono=True), [change.block for change in changes]),
        (Column("From"), [change.before for change in changes]),
        (Column("To", choose=True), [change.after for change in changes]),
        (Column("Why", wide=True), [change.reason for change in changes]),
        folds=False,
    )
    return fold(title, drawn)


def _summary(record: Record, updates: Sequence[Update], changes: Sequence[PrecisionChange]) -> Markup:
    last = updates[-1]
    low = sum(number for name, number in last.counts.items() if name != HIGH)
    text = (
        f"Selective precision ended with {low} of {plural(sum(last.counts.values()), 'layer')} in low precision "
        f"after {plural(len(changes), 'change')}"
    )
    return told(record, f"{text}{_saved(last)}.")


def _saved(update: Update) -> str:
    sent, not_sent = update.bytes_sent, update.bytes_not_sent
    if sent is None or not_sent is None or not sent + not_sent:
        return ""
    share = percent(not_sent / (sent + not_sent))
    return f"; at step {count(update.step)}, {share} of the bytes of an all-BF16 step were not sent"


def _facts(updates: Sequence[Update], changes: Sequence[PrecisionChange]) -> list[Fact]:
    last = updates[-1]
    low = sum(number for name, number in last.counts.items() if name != HIGH)
    total = sum(last.counts.values())
    return [Fact(f"{low} / {total}", "layers in low precision", plural(len(changes), "change"))]


# ---- the plan of a run -----------------------------------------------------------------------------------------------


def run_plan_section(records: Sequence[Record]) -> Section:
    def draw(record: Record) -> tuple[Markup, object, Sequence[Fact]]:
        try:
            log = run_log_of(record.content, record.name)
        except PlanFileError as fault:
            raise ReportError(str(fault)) from None
        drawn = [chart for chart in (_low_chart(log), _times_card(log)) if chart]
        body = join([source(record), cards(drawn), _run_changes_table(log)])
        return body, told(record, _run_sentence(log)), [Fact(count(len(log.changes)), "changes of the plan")]

    return one_by_one("run-plan", "The plan over the run", records, draw)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _low_chart(log: RunLog) -> Markup | None:
    """Draw of each part the share of blocks in which it is in low precision."""
    blocks = Counter(map(_last_part, log.rows))
    low, curves = Counter[str](), dict[str, list[Point]]()
    first = {name: row["format"] for name, row in log.rows.items()}
    for part in dict.fromkeys(_last_part(one.name) for one in log.changes):
        curves[part] = [(0.0, 0.0)]
    for one in log.changes:
        part, curve = _last_part(one.name), curves[_last_part(one.name)]
        if curve[-1][0] < one.step:
            curve += [(float(one.step), curve[-1][1])]
        low[part] += (one.to != first[one.name]) - (one.before != first[one.name])
        curve.append((float(one.step), low[part] / blocks[part]))
    total = log.settings.get("total_steps")
    end = float(total) if isinstance(total, int | float) and is_number(total) else 0.0
    for curve in curves.values():
        curve.append((max(end, curve[-1][0]), curve[-1][1]))
    drawn = [(part, colour(index), points) for index, (part, points) in enumerate(curves.items())]
    return step_chart("Blocks in low precision", drawn, "share of blocks", zero=True)


def _times_card(log: RunLog) -> Markup | None:
    timed = [one.evidence["ms"] for one in log.changes if isinstance(one.evidence.get("ms"), dict)]
    if not timed or not timed[-1]:
        return None
    rows = [
        (
            name.replace("high", "all high") if name.startswith("high") else f"low: {name}",
            float(ms),
            milliseconds(float(ms)),
            colour(index),
        )
        for index, (name, ms) in enumerate(timed[-1].items())
        if is_number(ms)
    ]
    return card("Time of a step, by what is low", bars(rows, "Milliseconds a step"))


def _run_changes_table(log: RunLog) -> Markup:
    title = plural(len(log.changes), "change")
    shown = [{key: value for key, value in one.evidence.items() if is_number(value)} for one in log.changes]
    figures = [", ".join(f"{key} {significant(float(value))}" for key, value in changes.items()) for changes in shown]
    drawn = column_table(
        title,
        (Column("Step", numeric=True), [figure(float(one.step), count) for one in log.changes]),
        (Column("Block and part", mono=True), [one.name for one in log.changes]),
        (Column("From"), [one.before for one in log.changes]),
        (Column("To", choose=True), [one.to for one in log.changes]),
        (Column("Why", wide=True), [one.reason for one in log.changes]),
        (Column("Evidence", wide=True), figures),
        folds=False,
    )
    return fold(title, drawn)


def _run_sentence(log: RunLog) -> str:
    formats = {name: row["format"] for name, row in log.rows.items()}
    low = {one.name for one in log.changes if one.to != formats[one.name]}
    raised = sum("noise" in change.evidence for change in log.changes)  # the schedule's end: by impact, above the noise
    fed = sum("loss_high" in change.evidence for change in log.changes)  # a probe lost more than with all high
    return (
        f"The run's plan had {plural(len(low), 'row')} of {count(len(formats))} low at some step; loss feedback raised "
        f"{count(fed)}, the final part of the schedule {count(raised)}."
    )
