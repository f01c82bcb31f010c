"""Speed against tokens: where FP8 wins and with what confidence, and which way of a packed product is fastest.

A policy holds speedups with intervals and the bands that follow; they are drawn as they are. Benchmarks and crossover
files hold raw times: every sample is drawn, the line goes through the medians, and nothing is decided here.

Results of benchmarks are tables of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bitplan.base.errors import visible
from bitplan.report.chart import (
    Frame,
    Point,
    box,
    card,
    colour,
    legend,
    line,
    linear_axis,
    log_axis,
    marker,
    segment,
    whisker,
)
from bitplan.report.markup import (
    NONE,
    TIMES,
    TO,
    Markup,
    count,
    join,
    milliseconds,
    percent,
    plural,
    shape,
    significant,
    tag,
)
from bitplan.report.read_records import Record, RecordFields, ReportError, is_number
from bitplan.report.section import (
    Cell,
    Column,
    Fact,
    Section,
    cards,
    column_table,
    figure,
    fold,
    heading,
    source,
    table,
    told,
)

# ---- section of benchmarks -------------------------------------------------------------------------------------------


MAX_COLUMNS = 14


def benchmark_section(records: Sequence[Record]) -> Section:
    bodies, names = [], []
    for record in records:
        document = record.fields()
        name, commit = document.text("benchmark", record.kind), document.text("commit", "")
        title, origin = heading(f"{name}: {record.name}"), source(record, f"Commit {commit}." if commit else "")
        bodies.append(join([title, origin, _rows(document)]))
        names.append(name)
    return Section("benchmarks", "Benchmarks", join(bodies), (f"Results of benchmarks: {', '.join(names)}.",))


def _rows(document: RecordFields) -> Markup:
    """Tables of all lists of objects in a document."""
    lists = {
        key: value
        for key, value in document.value.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    }
    return join(fold(f"All figures: {key}", _list_table(key, rows)) for key, rows in lists.items())


def _list_table(title: str, rows: Sequence[dict[str, Any]]) -> Markup:
    flat = [_flatten(row) for row in rows]
    keys = list(dict.fromkeys(key for row in flat for key in row))[:MAX_COLUMNS]
    columns = [Column(key.replace("_", " "), numeric=all(is_number(row.get(key, 0)) for row in flat)) for key in keys]
    return table(title, columns, [[_cell(row.get(key)) for key in keys] for row in flat], folds=False)


def _flatten(row: dict[str, Any], before: str = "", depth: int = 0) -> dict[str, Any]:
    """Figures of nested objects, by their path; samples and other long lists are not shown."""
    result: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict) and depth < 3:
            result |= _flatten(value, f"{before}{key} ", depth + 1)
        elif isinstance(value, list):
            if len(value) <= 4 and not any(isinstance(item, dict | list) for item in value):
                result[before + key] = shape(value)
        else:
            result[before + key] = value
    return result


def _cell(value: Any) -> Cell:
    if isinstance(value, bool) or not is_number(value):
        return Cell("" if value is None else str(value))
    return Cell(count(value) if isinstance(value, int) else significant(value, 4), float(value))


# ---- section of speed ------------------------------------------------------------------------------------------------


MAX_CHARTS = 48
SHAPES = {
    "win": ("circle", "k2"),
    "lose": ("cross", "k3"),
    "undecided": ("ring", "k7"),
    "unmeasured": ("diamond", "k7"),
}
WAYS = {"fused": "k0", "decode": "k1", "expanded": "k2", "bf16": "k7", "fp8": "k0"}
Series = dict[str, list[tuple[float, list[float]]]]  # a way's samples by tokens


def speed_section(records: Sequence[Record]) -> Section:
    draw = {"fp8_policy": _policy, "fp8_report": _benchmark, "crossover": _crossovers}
    parts = [draw[record.kind](record) for record in records]
    body = join(
        join([heading(f"{record.label[0].upper()}{record.label[1:]}: {record.name}"), part[0]])
        for record, part in zip(records, parts, strict=True)
    )
    facts = tuple(fact for part in parts for fact in part[2])
    return Section("speed", "Speed", body, tuple(part[1] for part in parts), facts)


# ---- the policy ------------------------------------------------------------------------------------------------------


def _policy(record: Record) -> tuple[Markup, Markup, list[Fact]]:
    document = record.fields()
    threshold, confidence = document.number("speedup_threshold"), document.number("confidence")
    rules = list(document.each("rules"))
    drawn = [_rule_card(rule, threshold, confidence) for rule in rules[:MAX_CHARTS]]
    used = [rule for rule in rules if _bands(rule)]
    names = legend(
        [("k2 sign circle", "win"), ("k3 sign cross", "lose"), ("k7 sign ring", "undecided"), ("band", "FP8 is used")]
    )
    note = f"Whiskers: {percent(confidence)} interval of the speedup. FP8 is used only between measured wins."
    more = f" The first {MAX_CHARTS} of {len(rules)} rules are drawn." if len(rules) > MAX_CHARTS else ""
    body = join([source(record, note + more), names, cards(drawn), _points_table(rules)])
    text = f"FP8 pays for {len(used)} of {plural(len(rules), 'layer product')} at {percent(confidence)} confidence"
    return (
        body,
        told(record, f"{text}."),
        [Fact(f"{len(used)} / {len(rules)}", "layer products faster in FP8", "in their bands of tokens")],
    )


def _rule_name(rule: RecordFields) -> str:
    sizes = rule.numbers("shape")
    if len(sizes) != 2:
        rule.fail("shape", "two whole numbers", sizes)
    size = (
        f"tp {rule.whole('tp')}" if "tp" in rule else f"etp {rule.whole('etp', 1)}, {rule.whole('num_gemms', 1)} gemms"
    )
    named = f"{rule.text('kind')} {rule.text('name', '')}".strip()
    return f"{rule.text('part')} {named} {int(sizes[0])}{TIMES}{int(sizes[1])}, {size}, {rule.text('gemm')}"


def _bands(rule: RecordFields) -> list[tuple[float, float]]:
    bands = rule.value.get("bands")
    if not isinstance(bands, list) or not all(
        (isinstance(band, list) and len(band) == 2 and all(map(is_number, band))) for band in bands
    ):
        rule.fail("bands", "a list of pairs of token counts", bands)
    return [(float(low), float(high)) for low, high in bands]


def _rule_card(rule: RecordFields, threshold: float, confidence: float) -> Markup:
    points = list(rule.each("points"))
    if not points:
        raise ReportError(f"{rule.where}: points must have at least one point")
    tokens = [float(point.whole("tokens")) for point in points]
    heights = [threshold] + [
        point.number(key) for point in points for key in ("low", "speedup", "high") if key in point
    ]
    y = linear_axis(heights, "times as fast as BF16")
    frame = Frame(
        log_axis(tokens, "tokens", formatter=count, base=2), y, f"Speedup of FP8 against tokens: {_rule_name(rule)}"
    )
    for low, high in _bands(rule):
        left, right = frame.px(low), max(frame.px(high), frame.px(low) + 3)
        tall = frame.height - frame.bottom - frame.top
        tip = f"FP8 is used from {count(low)} to {count(high)} tokens"
        frame.add(box(left, frame.top, right - left, tall, "band", tip))
    level = frame.py(threshold)
    frame.add(segment((frame.left, level), (frame.width - frame.right, level), "rule"))
    for point in points:
        frame.add(*_point(frame, point))
    return card(_rule_name(rule), frame.svg(), note=_crossing(points, confidence))


def _point(frame: Frame, point: RecordFields) -> list[Markup]:
    tokens, answer, speedup = float(point.whole("tokens")), point.text("answer"), point.number("speedup", None)
    shape, kind = SHAPES.get(answer, SHAPES["unmeasured"])
    if speedup is None:
        tip = f"{count(tokens)} tokens: {answer}; {point.text('note', 'no reason given')}"
        return [marker((frame.px(tokens), frame.height - frame.bottom), kind, tip, "diamond")]
    low, high = point.number("low", None), point.number("high", None)
    between = f", between {significant(low)} and {significant(high)}" if low is not None and high is not None else ""
    tip = f"{count(tokens)} tokens: {answer}, {significant(speedup)}{TIMES} as fast{between}"
    drawn = [whisker(frame, tokens, low, high, kind)] if low is not None and high is not None else []
    return [marker((frame.px(tokens), frame.py(speedup)), kind, tip, shape, radius=3.5), *drawn]


def _crossing(points: Sequence[RecordFields], confidence: float) -> str:
    """The two measured token counts between which FP8 begins to win, as text."""
    answers = [(point.whole("tokens"), point.text("answer")) for point in points]
    if all(answer == "win" for _, answer in answers):
        return f"Wins from {count(answers[0][0])} tokens, the fewest measured."
    for (before, _), (tokens, answer) in pairwise(answers):
        if answer == "win":
            return f"Crossover between {count(before)} and {count(tokens)} tokens at {percent(confidence)} confidence."
    if answers[0][1] == "win":
        return f"Wins at {count(answers[0][0])} tokens only."
    return f"No measured win up to {count(answers[-1][0])} tokens: BF16 stays."


def _points_table(rules: Sequence[RecordFields]) -> Markup:
    rows = [(rule, point) for rule in rules for point in rule.each("points")]
    points = [point for _, point in rows]
    drawn = column_table(
        "measured points",
        (Column("Layer product", wide=True), [_rule_name(rule) for rule, _ in rows]),
        (Column("Tokens", numeric=True), [figure(float(point.whole("tokens")), count) for point in points]),
        (Column("Answer", choose=True), [point.text("answer") for point in points]),
        (Column("Speedup", numeric=True), [figure(point.number("speedup", None), significant) for point in points]),
        (Column("Interval", numeric=True), [_interval_cell(point) for point in points]),
        (
            Column("Samples", numeric=True),
            [Cell(str(point.whole("samples", NONE)), float(point.whole("samples", 0))) for point in points],
        ),
        (Column("Note", wide=True), [point.text("note", "") for point in points]),
        folds=False,
    )
    return fold(f"All {plural(len(rows), 'measured point')}", drawn)


def _interval_cell(point: RecordFields) -> Cell:
    low, high = point.number("low", None), point.number("high", None)
    return Cell(NONE if low is None else f"{significant(low)} {TO} {significant(high)}", low)


# ---- raw times -------------------------------------------------------------------------------------------------------


def _benchmark(record: Record) -> tuple[Markup, Markup, list[Fact]]:
    layers: dict[str, Series] = {}
    failed = []
    rows = list(_benchmark_rows(record))
    for row in rows:
        if row.text("status") != "ok":
            failed.append(row)
            continue
        series = layers.setdefault(f"{_rule_name(row)}, {row.text('timing')}", {})
        samples = row.numbers("samples_ms")
        series.setdefault(row.text("precision"), []).append((float(row.whole("tokens")), samples))
    drawn = [_times_card(record, name, series, "tokens") for name, series in list(layers.items())[:MAX_CHARTS]]
    note = "Every sample is a dash; the line goes through the middle one."
    note += (
        ""
        if (isinstance(record.content, dict) or (isinstance(record.content[-1], dict) and "end" in record.content[-1]))
        else " Unfinished: the benchmark has not written its last line."
    )
    body = join([source(record, note), cards(drawn), _failures(failed)])
    text = f"The layer benchmark timed {plural(len(layers), 'layer product')} in {plural(len(rows), 'row')}"
    text += f", of which {len(failed)} failed" if failed else ""
    return body, told(record, f"{text}."), []


def _benchmark_rows(record: Record) -> list[RecordFields]:
    if isinstance(record.content, dict):
        return list(record.fields().each("rows"))
    lines = record.lines()
    return [row for row in lines[1:] if "end" not in row]


def _failures(rows: Sequence[RecordFields]) -> Markup:
    if not rows:
        return Markup("")
    drawn = column_table(
        "rows that failed",
        (Column("Layer product", wide=True), [_rule_name(row) for row in rows]),
        (Column("Tokens", numeric=True), [figure(float(row.whole("tokens")), count) for row in rows]),
        (Column("Status"), [row.text("status") for row in rows]),
        (Column("Message", wide=True), [row.text("message", "") for row in rows]),
        folds=False,
    )
    return fold(f"{plural(len(rows), 'row')} that failed", drawn)


def _crossovers(record: Record) -> tuple[Markup, Markup, list[Fact]]:
    weights = list(record.fields().each("weights"))
    drawn = []
    for weight in weights[:MAX_CHARTS]:
        series: Series = {}
        for timing in weight.each("timings"):
            ways = timing.fields("samples_ms")
            for way in ways.value:
                series.setdefault(way, []).append((float(timing.whole("rows")), ways.numbers(way)))
        refused = weight.text("refused", "")
        name = f"{weight.text('format')}, {weight.whole('out_features')}{TIMES}{weight.whole('in_features')}"
        drawn.append(
            _times_card(record, name, series, "input rows", f"Fused is not used: {refused}. " if refused else "")
        )
    note = "Every sample is a dash; the line goes through the middle one. Expanded: a copy of the weight in bfloat16."
    body = join([source(record, note), cards(drawn)])
    text = f"Ways to multiply were timed for {plural(len(weights), 'packed weight')}"
    return body, told(record, f"{text}."), []


def _times_card(record: Record, name: str, series: Series, across: str, note: str = "") -> Markup:
    tokens = [at for points in series.values() for at, _ in points]
    lists = [times for points in series.values() for _, times in points]
    samples = [sample for times in lists for sample in times]
    if not samples or not all(lists) or min(samples) <= 0:
        raise ReportError(f"{record.name}: {visible(name):.200}: samples_ms must be a list of numbers above 0")
    y = log_axis(samples, "time", formatter=milliseconds)
    frame = Frame(log_axis(tokens, across, formatter=count, base=2), y, f"Times against {across}: {name}")
    middles: dict[str, list[Point]] = {}
    kinds = {way: WAYS.get(way, colour(index + 3)) for index, way in enumerate(series)}
    for way, points in series.items():
        middles[way] = [(at, sorted(times)[len(times) // 2]) for at, times in sorted(points)]
        frame.add(line(frame, middles[way], kinds[way]))
        for at, times in sorted(points):
            frame.add(_dots(frame, at, times, kinds[way]))
        frame.add(
            *(
                marker(
                    (frame.px(at), frame.py(ms)),
                    kinds[way],
                    f"{way}, {count(at)} {across}: {milliseconds(ms)}",
                    radius=3,
                )
                for at, ms in middles[way]
            )
        )
    caption = f"{note}{_fastest(middles, across)}"
    return card(name, frame.svg(), legend=legend([(kind, way) for way, kind in kinds.items()]), note=caption)


def _dots(frame: Frame, at: float, samples: Sequence[float], kind: str) -> Markup:
    """All samples of a token count as one path of short dashes: their spread."""
    x = frame.px(at)
    return tag(
        "path",
        d="".join(f"M{x - 3:.1f} {frame.py(ms):.1f}h6" for ms in sorted(set(samples))),
        class_=f"stroke dots {kind}",
    )


def _fastest(middles: dict[str, list[Point]], across: str) -> str:
    """Say where the order of the medians changes."""
    times: dict[float, dict[str, float]] = {}
    for way, points in middles.items():
        for at, ms in points:
            times.setdefault(at, {})[way] = ms
    best = [(at, min(by_way, key=lambda way: by_way[way])) for at, by_way in sorted(times.items()) if len(by_way) > 1]
    turns = [(before, last, now, at) for (last, before), (at, now) in pairwise(best) if now != before]
    if not best:
        return ""
    if not turns:
        return f"{best[0][1]} is fastest throughout, by the middle samples."
    parts = [f"{turns[0][0]} is fastest up to {count(turns[0][1])} {across}"]
    parts += [f"{now} from {count(at)}" for _, _, now, at in turns]
    return f"{', '.join(parts)}, by the middle samples."
