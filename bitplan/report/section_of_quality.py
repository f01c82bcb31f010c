"""What formats do to a model: its perplexity, and how far it moved from the reference, with intervals.

Errors of packed weights and of layers' outputs: a histogram by format, their course over steps, and the worst.

Drift logs and files have the relative error of each packed weight; a calibration has that of each block's and layer's
output, for each candidate format and batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from bitplan.report.chart import (
    FEWEST_POINTS,
    Axis,
    Frame,
    at,
    box,
    card,
    colour,
    format_colours,
    legend,
    linear_axis,
    log_axis,
    marker,
    segment,
    step_chart,
    text,
    whisker,
)
from bitplan.report.markup import NONE, TO, Markup, count, join, nbytes, percent, plural, significant, tag, two_digits
from bitplan.report.read_records import Record, RecordFields, ReportError
from bitplan.report.section import Cell, Column, Fact, Section, cards, column_table, figure, one_by_one, source, told

# ---- section of errors -----------------------------------------------------------------------------------------------


BINS_A_DECADE = 4
WORST_LINES = 6


class ErrorRow(NamedTuple):
    """One relative error; None where it is not finite, which is worse than any number."""

    step: int
    name: str
    format: str
    relative: float | None
    fields: RecordFields | None = None

    @property
    def badness(self) -> float:
        return math.inf if self.relative is None else self.relative


def errors_section(records: Sequence[Record]) -> Section:
    def draw(record: Record) -> tuple[Markup, object, Sequence[Fact]]:
        is_calibration = record.kind == "calibration"
        errors = _calibration(record) if is_calibration else _drift(record)
        last = _last_step(errors)
        drawn = [chart for chart in (_histogram(last, record.kind), _over_steps(errors), _by_format(last)) if chart]
        shown = _calibration_table(last) if is_calibration else _drift_table(last)
        return join([source(record), _findings(record), cards(drawn), shown]), _worst(record, last), _worst_fact(last)

    return one_by_one("errors", "Errors", records, draw)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _drift(record: Record) -> list[ErrorRow]:
    rows = list(record.fields().each("layers")) if isinstance(record.content, dict) else record.lines()
    return [
        ErrorRow(row.whole("step"), row.text("name"), row.text("format"), row.number("relative_error", None), row)
        for row in rows
    ]


def _findings(record: Record) -> Markup:
    findings = record.content.get("findings", []) if isinstance(record.content, dict) else []
    if not isinstance(findings, list):
        raise ReportError(f"{record.name}: findings must be a list")
    return tag("ul", *(tag("li", str(finding)) for finding in findings), class_="findings") if findings else Markup("")


def _calibration(record: Record) -> list[ErrorRow]:
    """Average each block's and layer's error in each format over batches, as the calibration itself does."""
    document = record.fields()
    samples: dict[tuple[str, str], list[float | None]] = {}
    for _, layers in document.items("layers", {}):
        for name in layers.value:
            _gather(samples, f"layer {name}", layers.fields(name))
    for fmt, batches in document.items("blocks", {}):
        for batch in batches.value:
            blocks = batches.fields(batch)
            for name in blocks.value:
                samples.setdefault((f"block {name}", fmt), []).append(blocks.number(name, None))
    if not samples:
        raise ReportError(f"{record.name}: nothing has been calibrated yet; let the calibration finish a pass")
    return [ErrorRow(0, name, fmt, _mean(errors)) for (name, fmt), errors in samples.items()]


def _gather(samples: dict[tuple[str, str], list[float | None]], name: str, errors: RecordFields) -> None:
    for fmt in errors.value:
        samples.setdefault((name, fmt), []).append(errors.number(fmt, None))


def _mean(errors: Sequence[float | None]) -> float | None:
    known_errors = [error for error in errors if error is not None]
    return math.fsum(known_errors) / len(known_errors) if known_errors else None


def _last_step(errors: Sequence[ErrorRow]) -> list[ErrorRow]:
    """Of each tensor and format the error at its latest step, the worst first."""
    latest: dict[tuple[str, str], ErrorRow] = {}
    for error in errors:
        key = (error.name, error.format)
        if key not in latest or latest[key].step <= error.step:
            latest[key] = error
    return sorted(latest.values(), key=lambda error: (-error.badness, error.name, error.format))


# ---- charts ----------------------------------------------------------------------------------------------------------


def _classes(errors: Sequence[ErrorRow]) -> dict[str, str]:
    return format_colours(sorted({error.format for error in errors}))


def _histogram(errors: Sequence[ErrorRow], kind: str) -> Markup | None:
    """A histogram of the tensors' errors, a quarter of a decade per bar, formats stacked."""
    sizes = [error for error in errors if error.relative and error.relative > 0]
    if not sizes:
        return None
    classes = _classes(errors)
    counts: dict[int, dict[str, int]] = {}
    for error in sizes:
        index = math.floor(math.log10(error.relative or 1.0) * BINS_A_DECADE)
        bin_ = counts.setdefault(index, {})
        bin_[error.format] = bin_.get(error.format, 0) + 1
    tall = max(sum(bin_.values()) for bin_ in counts.values())
    low, high = math.floor(min(counts) / BINS_A_DECADE), math.ceil((max(counts) + 1) / BINS_A_DECADE)
    x = log_axis([10.0**low, 10.0**high], "relative error", formatter=_power)
    unit = "outputs" if kind == "calibration" else "tensors"
    frame = Frame(x, linear_axis([0, tall], unit, zero=True, whole=True), "Histogram of relative errors by format")
    for index, bin_ in sorted(counts.items()):
        left, right = (frame.px(10 ** ((index + more) / BINS_A_DECADE)) for more in (0, 1))
        done = 0
        for name in sorted(bin_):
            top, base = frame.py(done + bin_[name]), frame.py(done)
            between = f"{_power(10 ** (index / BINS_A_DECADE))} to {_power(10 ** ((index + 1) / BINS_A_DECADE))}"
            tip = f"{name}: {plural(bin_[name], unit[:-1])} between {between}"
            frame.add(box(left + 0.5, top, right - left - 1, base - top, f"bar {classes[name]}", tip))
            done += bin_[name]
    zero = sum(error.relative == 0 for error in errors)
    bad = sum(error.relative is None for error in errors)
    note = "Relative error: root of squared error over squared numbers."
    note += f" {plural(zero, 'is', 'are')} exact and not drawn." if zero else ""
    note += f" {plural(bad, 'is', 'are')} not finite and not drawn." if bad else ""
    return card(
        "Histogram of errors", frame.svg(), legend=legend([(k, name) for name, k in classes.items()]), note=note
    )


def _power(value: float) -> str:
    return significant(value, 2) if value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def _over_steps(errors: Sequence[ErrorRow]) -> Markup | None:
    """A chart of the errors of the worst tensors over steps; None where there are too few points."""
    worst = list(dict.fromkeys(error.name for error in _last_step(errors)))[:WORST_LINES]
    curves = [
        (name, colour(at), [(float(e.step), e.relative) for e in errors if e.name == name and e.relative is not None])
        for at, name in enumerate(worst)
    ]
    return step_chart(f"The {len(curves)} worst over steps", curves, "relative error")


def _by_format(errors: Sequence[ErrorRow]) -> Markup | None:
    """Every error as a tick, a row for each format: spread and outliers at a glance."""
    classes = _classes(errors)
    positive = [error.relative for error in errors if error.relative and error.relative > 0]
    if len(classes) < 2 or not positive:
        return None
    x = log_axis(positive, "relative error", formatter=_power)
    pitch = 26
    frame = Frame(x, Axis("", 0, 1, ()), "Relative errors of each format", height=pitch * len(classes) + 54, left=118)
    for row, (name, kind) in enumerate(classes.items()):
        y = 10 + pitch * row
        values = sorted({error.relative for error in errors if error.format == name and error.relative})
        frame.add(tag("text", name[:17], x=frame.left - 8, y=y + 14, text_anchor="end"))
        path = "".join(f"M{at(frame.px(value))} {y}v18" for value in values)
        frame.add(tag("path", d=path, class_=f"stroke {kind}"))
    return card("Errors of each format", frame.svg(), note="A tick is one of them.")


# ---- tables ----------------------------------------------------------------------------------------------------------


def _drift_table(errors: Sequence[ErrorRow]) -> Markup:
    rows = [error.fields for error in errors if error.fields is not None]
    bad = ("nan_scales", "clipped_scales", "underflowed_scales")
    return column_table(
        "packed tensors, worst first",
        (Column("Tensor", mono=True), [error.name for error in errors]),
        (Column("Format", choose=True), [error.format for error in errors]),
        (Column("Step", numeric=True), [figure(float(error.step), count) for error in errors]),
        (Column("Relative error", numeric=True), [_error_cell(error.relative) for error in errors]),
        (Column("Largest error", numeric=True), [_error_cell(row.number("max_abs_error", None)) for row in rows]),
        (
            Column("Bad scales", numeric=True),
            [figure(float(sum(row.whole(key, 0) for key in bad)), count) for row in rows],
        ),
        (Column("End codes", numeric=True), [_share_cell(row, "saturated_codes") for row in rows]),
        (Column("Zeros", numeric=True), [_share_cell(row, "flushed_codes") for row in rows]),
        (
            Column("Bytes", numeric=True),
            [Cell(nbytes(row.whole("bytes", None)), float(row.whole("bytes", 0))) for row in rows],
        ),
    )


def _share_cell(row: RecordFields, key: str) -> Cell:
    return figure(row.whole(key, 0) / max(row.whole("count", 0), 1), percent)


def _calibration_table(errors: Sequence[ErrorRow]) -> Markup:
    return column_table(
        "output errors, worst first",
        (Column("Part", mono=True), [error.name for error in errors]),
        (Column("Format", choose=True), [error.format for error in errors]),
        (Column("Relative error", numeric=True), [_error_cell(error.relative) for error in errors]),
    )


def _error_cell(value: float | None) -> Cell:
    return Cell("not finite" if value is None else significant(value), 1e300 if value is None else value)


def _worst(record: Record, errors: Sequence[ErrorRow]) -> Markup:
    if not errors:
        return told(record, "No error was recorded.")
    noun = "output" if record.kind == "calibration" else "packed tensor"
    size = "not finite" if errors[0].relative is None else significant(errors[0].relative)
    text = f"Of {plural(len(errors), noun)} the largest relative error is {size}, "
    return told(record, join([text, tag("code", errors[0].name), f" in {errors[0].format}."]))


def _worst_fact(errors: Sequence[ErrorRow]) -> list[Fact]:
    worst = errors[0].relative if errors else None
    shown = NONE if worst is None else significant(worst)
    return [Fact(shown, "largest relative error", errors[0].format)] if errors else []


# ---- section of quality ----------------------------------------------------------------------------------------------


FLOOR = "noise floor"
SPAN = 1e6  # the chart of KL: values below the largest / SPAN are drawn at the left edge


def quality_section(records: Sequence[Record]) -> Section:
    def draw(record: Record) -> tuple[Markup, object, Sequence[Fact]]:
        document = record.fields()
        rows = _rows(document)
        drawn = [chart for chart in (_perplexity_chart(rows), _kl_chart(rows)) if chart]
        body = join([source(record, _settings(document)), cards(drawn), _table(record, rows)])
        return body, _summary(record, rows), _facts(rows)

    return one_by_one("quality", "Quality", records, draw)


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
    settings_ = document.value.get("settings")
    settings = RecordFields(settings_ if isinstance(settings_, dict) else document.value, document.where)
    names = {key: settings.value[key] for key in ("model", "text", "context", "tokens") if key in settings}
    return ", ".join(f"{key} {str(value).rpartition('/')[2]}" for key, value in names.items()) + "."


def _interval(row: RecordFields) -> list[float] | None:
    interval = row.numbers("perplexity_interval", None)
    return interval if interval and len(interval) == 2 else None


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
    """A chart of perplexity against bits per weight; None where there are too few points."""
    if len(rows) < FEWEST_POINTS:
        return None
    values = [row.number("perplexity") for row in rows]
    intervals = [_interval(row) for row in rows]
    heights = values + [edge for ends in intervals if ends for edge in ends]
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
    if len(measured) < FEWEST_POINTS:
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
    floor = next((kl[0] for row, kl in zip(rows, distances, strict=True) if kl and _name(row).startswith(FLOOR)), None)
    over = [kl[0] / floor if kl and floor else None for kl in distances]
    between = [
        f"{significant(interval[0], 4)} {TO} {significant(interval[1], 4)}" if interval else NONE
        for interval in intervals
    ]
    return column_table(
        f"perplexity by format, {record.name}",
        (Column("Format"), [_name(row) for row in rows]),
        (Column("Bits a weight", numeric=True), [figure(row.number("bits_per_weight"), significant) for row in rows]),
        (Column("Perplexity", numeric=True), [Cell(_perplexity(row), row.number("perplexity")) for row in rows]),
        (
            Column("95 % interval", numeric=True),
            [Cell(text, ends[0] if ends else None) for text, ends in zip(between, intervals, strict=True)],
        ),
        (
            Column("KL, nats a token", numeric=True),
            [Cell(f"{significant(kl[0])} ± {significant(kl[1], 2)}", kl[0]) if kl else NONE for kl in distances],
        ),
        (Column("KL / floor", numeric=True), [figure(ratio, two_digits) for ratio in over]),
        (Column("Same top token", numeric=True), [figure(share, percent) for share in same]),
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
    return told(record, f"{text}.")


def _plans(rows: Sequence[RecordFields]) -> list[RecordFields]:
    """Rows of plans, as `make demo` and `bitplan judge --plan` name them."""
    return [row for row in rows if _name(row).split(" ")[0] == "plan"]


def _facts(rows: Sequence[RecordFields]) -> list[Fact]:
    """The plan's perplexity, or that of the only format; with several formats there is no headline figure."""
    others = [row for row in rows[1:] if not _name(row).startswith(FLOOR)]
    plans = _plans(others) or others
    if len(plans) != 1:
        return []
    perplexities = [_perplexity(row) for row in (plans[0], rows[0])]
    return [Fact(perplexities[0], f"perplexity of {_name(plans[0])}", f"{perplexities[1]} for {_name(rows[0])}")]
