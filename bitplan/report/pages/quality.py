"""What formats do to a model: its perplexity, and how far it moved from the reference, with intervals."""

from __future__ import annotations

from collections.abc import Sequence

from bitplan.report.chart import (
    Axis,
    Frame,
    card,
    colour,
    legend,
    linear_axis,
    log_axis,
    marker,
    segment,
    text,
    whisker,
)
from bitplan.report.figures import NONE, TO, count, percent, significant
from bitplan.report.markup import Markup, join, tag
from bitplan.report.read_records import Record, RecordFields, ReportError
from bitplan.report.section import Cell, Column, Fact, Section, cards, column_table, figure, heading, source

FLOOR = "noise floor"
SPAN = 1e6  # the chart of KL: values below the largest / SPAN are drawn at the left edge


def quality_section(records: Sequence[Record]) -> Section:
    bodies, summary, facts = [], [], []
    for record in records:
        document = record.fields()
        rows = _rows(document)
        head = [heading(record.name)] if len(records) > 1 else []
        drawn = [_perplexity_chart(rows), _kl_chart(rows)]
        bodies.append(join([*head, source(record, _settings(document)), cards([each for each in drawn if each])]))
        bodies.append(_table(record, rows))
        summary.append(_summary(record, rows))
        facts += _facts(rows) if len(records) == 1 else []
    return Section("quality", "Quality", join(bodies), tuple(summary), tuple(facts))


def _rows(document: RecordFields) -> list[RecordFields]:
    first = [document.fields("reference_row")] if "reference_row" in document else []
    floor = [document.fields("noise_floor")] if "noise_floor" in document else []
    rows = [*first, *floor, *document.each("rows")]
    if not rows:
        raise ReportError(f"{document.where}: rows is empty; measure at least one format")
    for row in rows:
        row.number("perplexity")
        row.number("bits_per_weight")
        row.text("format")
    return rows


def _settings(document: RecordFields) -> str:
    given = document.value.get("settings")
    found = RecordFields(given if isinstance(given, dict) else document.value, document.where)
    names = {key: found.value[key] for key in ("model", "text", "context", "tokens") if key in found}
    return ", ".join(f"{key} {str(value).rpartition('/')[2]}" for key, value in names.items()) + "."


def _interval(row: RecordFields) -> list[float] | None:
    found = row.numbers("perplexity_interval", None)
    return found if found and len(found) == 2 else None


def _kl(row: RecordFields) -> tuple[float, float] | None:
    if "kl" not in row:
        return None
    kl = row.fields("kl")
    return kl.number("mean"), kl.number("standard_error", 0.0)


def _perplexity(row: RecordFields) -> str:
    """Five digits everywhere: formats differ in the fourth and fifth."""
    return significant(row.number("perplexity"), 5)


def _name(row: RecordFields) -> str:
    return row.text("format")


def _perplexity_chart(rows: Sequence[RecordFields]) -> Markup | None:
    """Perplexity against bits per weight: the trade-off."""
    values = [row.number("perplexity") for row in rows]
    intervals = [_interval(row) for row in rows]
    heights = values + [edge for each in intervals if each for edge in each]
    steep = max(heights) > 20 * min(heights) > 0
    y = log_axis(heights, "perplexity") if steep else linear_axis(heights, "perplexity")
    x = log_axis([row.number("bits_per_weight") for row in rows], "bits a weight, scales included", base=2)
    frame = Frame(x, y, "Perplexity of each format against its bits a weight")
    frame.add(segment((frame.left, frame.py(values[0])), (frame.width - frame.right, frame.py(values[0])), "rule"))
    for row, interval in zip(rows, intervals, strict=True):
        bits, value = row.number("bits_per_weight"), row.number("perplexity")
        if interval:
            frame.add(whisker(frame, bits, interval[0], interval[1], "plain thin"))
        tip = f"{_name(row)}: perplexity {_perplexity(row)}, {significant(bits)} bits a weight"
        frame.add(marker((frame.px(bits), frame.py(value)), "k0", tip))
    note = f"Bars: 95 % interval on other text of this kind. Dashed: {_name(rows[0])}."
    return card("Perplexity against size", frame.svg(), note=note)


def _kl_chart(rows: Sequence[RecordFields]) -> Markup | None:
    """How far each format moved the model: the distance has little noise, perplexity has much."""
    measured = [(row, mean_and_error) for row in rows if (mean_and_error := _kl(row)) and mean_and_error[0] > 0]
    if len(measured) < 2:
        return None
    ordered = sorted(measured, key=lambda pair: pair[1][0])
    lowest = ordered[-1][1][0] / SPAN
    floor = next((kl[0] for row, kl in ordered if _name(row).startswith(FLOOR)), None)
    x = log_axis([max(kl[0], lowest) for _, kl in ordered], "KL from the reference, nats a token")
    pitch, top = 19, 8
    height = top + pitch * len(ordered) + 46
    frame = Frame(x, Axis("", 0, 1, ()), "KL divergence of each format", height=height, left=190)
    if floor is not None:
        frame.add(segment((frame.px(floor), top), (frame.px(floor), frame.height - frame.bottom), "rule"))
    for index, (row, (mean, error)) in enumerate(ordered):
        y = top + pitch * index + 10
        name = _name(row)
        frame.add(text((frame.left - 8, y + 4), name if len(name) <= 23 else f"{name[:22]}…", "end"))
        frame.add(segment((frame.left, y), (frame.px(mean), y), "grid"))
        tip = f"{name}: KL {significant(mean)} ± {significant(error)} nats a token"
        is_floor = name.startswith(FLOOR)
        frame.add(marker((frame.px(mean), y), "k7" if is_floor else "k0", tip, "diamond" if is_floor else "circle"))
    note = "Dashed: the noise floor, the reference against itself with bfloat16 activations." if floor else ""
    note += " At the left edge: still less." if ordered[0][1][0] < lowest else ""
    names = legend([(colour(0), "format"), (colour(7), "noise floor")] if floor else [])
    return card("Distance from the reference", frame.svg(), legend=names, note=note)


def _table(record: Record, rows: Sequence[RecordFields]) -> Markup:
    intervals, distances = [_interval(row) for row in rows], [_kl(row) for row in rows]
    same = [row.fields("top1_agreement").number("mean") if "top1_agreement" in row else None for row in rows]
    between = [f"{significant(each[0], 4)} {TO} {significant(each[1], 4)}" if each else NONE for each in intervals]
    return column_table(
        f"perplexity by format, {record.name}",
        (Column("Format"), [_name(row) for row in rows]),
        (Column("Bits a weight", numeric=True), [figure(row.number("bits_per_weight"), significant) for row in rows]),
        (Column("Perplexity", numeric=True), [Cell(_perplexity(row), row.number("perplexity")) for row in rows]),
        (
            Column("95 % interval", numeric=True),
            [Cell(text, each[0] if each else None) for text, each in zip(between, intervals, strict=True)],
        ),
        (
            Column("KL, nats a token", numeric=True),
            [Cell(f"{significant(kl[0])} ± {significant(kl[1], 2)}", kl[0]) if kl else NONE for kl in distances],
        ),
        (Column("Same top token", numeric=True), [figure(each, percent) for each in same]),
    )


def _summary(record: Record, rows: Sequence[RecordFields]) -> Markup:
    tokens = rows[0].whole("tokens", None)
    on = f" on {count(tokens)} tokens" if tokens else ""
    reference = _perplexity(rows[0])
    others = [row for row in rows[1:] if not _name(row).startswith(FLOOR)]
    text = f"Perplexity{on}: {reference} for {_name(rows[0])}"
    text += "".join(f", {_perplexity(row)} for {_name(row)}" for row in _plans(others))
    if others:
        small = min(others, key=lambda row: (row.number("bits_per_weight"), row.number("perplexity")))
        bits, value = significant(small.number("bits_per_weight")), _perplexity(small)
        text += f", {value} for the smallest, {_name(small)}, at {bits} bits a weight"
    return join([f"{text}. (", tag("code", record.name), ")"])


def _plans(rows: Sequence[RecordFields]) -> list[RecordFields]:
    """Rows of plans, as `bitplan demo` and `bitplan perplexity --plan` name them."""
    return [row for row in rows if _name(row).split(" ")[0] == "plan"]


def _facts(rows: Sequence[RecordFields]) -> list[Fact]:
    """The plan's perplexity, or that of the only format; with several formats there is no headline figure."""
    others = [row for row in rows[1:] if not _name(row).startswith(FLOOR)]
    plans = _plans(others) or others
    if len(plans) != 1:
        return []
    perplexities = [_perplexity(row) for row in (plans[0], rows[0])]
    return [Fact(perplexities[0], f"perplexity of {_name(plans[0])}", f"{perplexities[1]} for {_name(rows[0])}")]
