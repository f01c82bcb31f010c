"""Section of a search: what was decided, why, what it cost and what it gained; then charts of the evidence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from bitplan.report.chart import (
    FEWEST_POINTS,
    Frame,
    box,
    card,
    format_colours,
    legend,
    line,
    linear_axis,
    log_axis,
    marker,
    picture,
    segment,
    text,
    whisker,
)
from bitplan.report.markup import (
    TIMES,
    Markup,
    beside_floor,
    count,
    join,
    nbytes,
    percent,
    plural,
    significant,
    tag,
    two_digits,
)
from bitplan.report.read_records import Record, RecordFields
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
    one_by_one,
    source,
    told,
)

LEVELS = 10  # shades of the heat map
MOST_PARTS = 12  # columns of the heat map
ROW, SIDE, TOP = 22, 74, 26


def search_section(records: Sequence[Record]) -> Section:
    def draw(record: Record) -> tuple[Markup, object, Sequence[Fact]]:
        result = record.fields()
        body = join([source(record), _answers(result), cards(_charts(result)), _tables(result)])
        return body, told(record, _sentence(result)) if len(records) > 1 else "", _facts(result)

    return one_by_one("search", "Search", records, draw, _sentence(records[0].fields()))


def progress_section(records: Sequence[Record]) -> Section:
    """The phases of a search that goes on; of one that was stopped and begun again, those since then."""

    def draw(record: Record) -> tuple[Markup, object, Sequence[Fact]]:
        start, steps = _last_run(record)
        phases = column_table(
            "phases of the search",
            (Column("Phase"), [item.text("phase") for item in steps]),
            (Column("Done", numeric=True), [Cell(percent(_share(item)), _share(item)) for item in steps]),
            (Column("Seconds from the start", numeric=True), [figure(item.number("seconds"), count) for item in steps]),
            (Column("Last step", wide=True), [item.text("at") for item in steps]),
        )
        return join([source(record), phases]), told(record, _now(start, steps)) if len(records) > 1 else "", ()

    return one_by_one("searching", "Search in progress", records, draw, _now(*_last_run(records[0])))


def _last_run(record: Record) -> tuple[RecordFields, list[RecordFields]]:
    """The first line of the last run in a log, and the last line of each of its phases."""
    lines = record.lines()
    begin = max((number for number, item in enumerate(lines) if "goal" in item), default=0)
    return lines[begin], list({item.text("phase"): item for item in lines[begin + 1 :]}.values())


def _share(step: RecordFields) -> float:
    return min(1.0, float(step.number("done")) / max(1.0, float(step.number("of"))))


def _now(start: RecordFields, steps: Sequence[RecordFields]) -> str:
    sentence = f"{start.text('model')} is searched for {start.text('goal')}"
    if not steps:
        return f"{sentence}; no step is done yet."
    latest = max(steps, key=lambda step: step.number("seconds"))
    in_all = latest.number("expected_seconds", None)
    expected = "" if in_all is None else f" of about {count(in_all)}"
    return (
        f"{sentence}: {latest.text('phase')}, {percent(_share(latest))}, after {count(latest.number('seconds'))}"
        f"{expected} seconds."
    )


def _charts(result: RecordFields) -> list[Markup]:
    """Predicted against measured only of three plans and more: of two, the table says it."""
    drawn = [_heat_card(result), _front_card(result)]
    return drawn + ([_agreement_card(result)] if len(list(result.each("measured"))) >= FEWEST_POINTS else [])


# ---- the four answers ------------------------------------------------------------------------------------------------


def _goal(result: RecordFields) -> str:
    goal = result.fields("goal")
    words = []
    if "bits" in goal:
        words.append(f"{significant(goal.number('bits'))} bits a weight")
    if "bytes" in goal:
        words.append(nbytes(goal.number("bytes")))
    if "max_kl" in goal:
        words.append(f"KL of at most {significant(goal.number('max_kl'))}")
    if "faster" in goal:
        words.append(f"{significant(goal.number('faster'))}{TIMES} BF16's speed")
    return ", ".join(words) or "no goal"


def _sentence(result: RecordFields) -> str:
    """Say what was decided, how much smaller the model becomes, and what it costs in damage."""
    plan, reference, floor = result.fields("plan"), result.fields("reference"), result.fields("noise_floor")
    formats = {cell.text("format") for cell in result.each("heat")}
    smaller = reference.number("bytes") / max(plan.number("bytes"), 1)
    perplexity = plan.number("perplexity", None)
    kl, noise = plan.number("kl"), floor.number("kl")
    cost = f"{significant(kl)} nats a token from the model ({beside_floor(kl, noise)})"
    if perplexity is not None:
        cost += f", perplexity {significant(perplexity, 4)} for {significant(reference.number('perplexity'), 4)}"
    return (
        f"For {_goal(result)} the plan mixes {plural(len(formats), 'format')}: {nbytes(plan.number('bytes'))}, "
        f"{significant(smaller)} times smaller than the model, at {cost}.{_missed(result)}"
    )


def _missed(result: RecordFields) -> str:
    """A sentence where the plan is farther from the model than was asked for."""
    missed = result.text("missed_goal", "")
    return f" The goal is missed: {missed}." if missed else ""


def _unseen(result: RecordFields) -> str:
    """A sentence where no token of the text was sent to some experts."""
    unseen = result.text("unseen_experts", "")
    return f" {unseen[:1].upper()}{unseen[1:]}." if unseen else ""


def _facts(result: RecordFields) -> list[Fact]:
    plan, reference, floor = result.fields("plan"), result.fields("reference"), result.fields("noise_floor")
    smaller = reference.number("bytes") / max(plan.number("bytes"), 1)
    facts = [
        Fact(
            nbytes(plan.number("bytes")), f"{significant(plan.number('bits'))} bits a weight", f"goal: {_goal(result)}"
        ),
        Fact(f"{significant(smaller)}{TIMES}", "smaller than the model", f"from {nbytes(reference.number('bytes'))}"),
        Fact(
            significant(plan.number("kl")),
            "nats a token from the model",
            _missed(result).strip() or beside_floor(plan.number("kl"), floor.number("kl")),
        ),
    ]
    perplexity = plan.number("perplexity", None)
    if perplexity is not None:
        before = f"{significant(reference.number('perplexity'), 4)} of the model"
        facts.append(Fact(significant(perplexity, 4), "perplexity", before))
    return facts


def _answers(result: RecordFields) -> Markup:
    plan, reference, floor = result.fields("plan"), result.fields("reference"), result.fields("noise_floor")
    cells = list(result.each("heat"))
    formats = Counter(cell.text("format") for cell in cells)
    mix = ", ".join(f"{name} for {plural(number, 'group')}" for name, number in formats.most_common())
    costly = sorted(cells, key=lambda cell: -cell.number("nats_in_smallest") / max(cell.number("bytes"), 1))[:2]
    why = " and ".join(cell.text("group") for cell in costly)
    interval = _interval(plan)
    between = f" (95 % {significant(interval[0])} to {significant(interval[1])})" if interval else ""
    smaller = reference.number("bytes") / max(plan.number("bytes"), 1)
    rows = [
        ("What was decided", f"{mix}. {_solved(result)}"),
        (
            "Why",
            f"The least damage within {_goal(result)}, by damage predicted from the really rounded weights and checked "
            f"by measurement. A byte matters most in {why}.{_unseen(result)}",
        ),
        (
            "What it cost",
            f"KL {significant(plan.number('kl'))} nats a token{between}; running the model in bfloat16 costs "
            f"{significant(floor.number('kl'), 2)}. Perplexity {significant(plan.number('perplexity', None), 4)}, "
            f"of the model {significant(reference.number('perplexity'), 4)}.{_missed(result)}",
        ),
        (
            "What it gained",
            f"{nbytes(plan.number('bytes'))} in place of {nbytes(reference.number('bytes'))}: "
            f"{significant(smaller)}{TIMES} smaller. {_rival(result)}",
        ),
    ]
    return tag("dl", *(join([tag("dt", title), tag("dd", words)]) for title, words in rows), class_="answers")


def _solved(result: RecordFields) -> str:
    """How good the plan is among all choices: by the solver's proof, and by measurements that corrected predictions."""
    solution, tried = result.fields("solution"), 1 + int(result.number("corrections", 0))
    gap, promised = solution.number("gap", 0.0), solution.number("promised", 0.0)
    if gap >= 1e-5:
        return f"The solver stopped within {percent(gap)} of the best possible."
    by = f"the best of {tried} solved plans by measurement" if tried > 1 else "solved exactly"
    if promised >= 1e-3:
        return f"It is {by}; corrected by that, predictions promise {percent(promised)} less for a plan not measured."
    return "No choice of these formats is predicted to cost less." if tried == 1 else f"It is {by}."


def _rival(result: RecordFields) -> str:
    """How the plan compares with the smallest plan that needs no search."""
    if result.flag("lost", False):
        why = result.text("why_lost", f"{result.fields('plan').text('label')} was better, and is the plan")
        return f"The search lost: {why}."
    others = [row for row in result.each("measured") if row.text("kind") != "plan"]
    if not others:
        return ""
    close = min(others, key=lambda row: row.number("bytes"))
    ours, theirs = result.fields("plan").number("kl"), close.number("kl")
    if ours <= 0 or theirs <= 0:
        return ""
    goal, more = result.fields("goal"), ", more than the goal allows,"
    is_larger = any(key in goal and close.number(key) > goal.number(key) for key in ("bits", "bytes"))
    is_farther = "max_kl" in goal and theirs > goal.number("max_kl")
    compared = f"{significant(theirs / ours)}{TIMES} as much"
    if theirs < ours:
        compared = f"{significant(ours / theirs)}{TIMES} less"
    return (
        f"Without a search, {close.text('label')} takes {nbytes(close.number('bytes'))}{more if is_larger else ''} and "
        f"is {significant(theirs)} nats off{more if is_farther else ','} {compared}."
    )


# ---- heat map: layer by projection -----------------------------------------------------------------------------------


def _heat_card(result: RecordFields) -> Markup:
    cells = list(result.each("heat"))
    parts = list(dict.fromkeys(cell.text("part") for cell in cells if cell.text("layer")))[:MOST_PARTS]
    layers = list(dict.fromkeys(cell.text("layer") for cell in cells if cell.text("layer")))
    outside = [cell for cell in cells if not cell.text("layer")]
    values = [_density(cell) for cell in cells if _density(cell) > 0]
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    short = _short_names(cell.text("format") for cell in cells)
    width = 460.0
    pitch = (width - SIDE) / max(len(parts), 1)
    drawn = [text((SIDE + (at + 0.5) * pitch, TOP - 8), _cut(part, pitch), "middle") for at, part in enumerate(parts)]
    cell_at = {(cell.text("layer"), cell.text("part")): cell for cell in cells}
    for row, layer in enumerate(layers):
        top = TOP + row * ROW
        drawn.append(text((SIDE - 8, top + 15), f"layer {layer}", "end"))
        for at, part in enumerate(parts):
            if (layer, part) in cell_at:
                drawn += _cell(cell_at[layer, part], SIDE + at * pitch, top, pitch, low, high, short)
    for row, cell in enumerate(outside, len(layers)):
        top = TOP + row * ROW + 6
        drawn.append(text((SIDE - 8, top + 15), "outside", "end"))
        drawn += _cell(cell, SIDE, top, width - SIDE, low, high, short, named=True)
    height = TOP + (len(layers) + len(outside)) * ROW + 10
    names = legend([(f"heat h{level}", _level(level, low, high)) for level in (0, 3, 6, LEVELS - 1)])
    note = "Shade: nats a million weights that the smallest format would cost there; the letters: what the plan gives."
    return card(
        "Where precision matters",
        picture(drawn, width, height, "Sensitivity by layer and projection"),
        legend=names,
        note=note,
    )


def _density(cell: RecordFields) -> float:
    numbers = 8 * cell.number("bytes") / max(cell.number("bits"), 1e-9)
    return float(cell.number("nats_in_smallest") / max(numbers, 1.0) * 1e6)


def _cell(
    cell: RecordFields,
    left: float,
    top: float,
    width: float,
    low: float,
    high: float,
    short: dict[str, str],
    *,
    named: bool = False,
) -> list[Markup]:
    shade = _shade(_density(cell), low, high)
    fmt = cell.text("format")
    tip = (
        f"{cell.text('group')}: {fmt}, {significant(cell.number('bits'))} bits, "
        f"{significant(cell.number('nats'))} nats; in {cell.text('smallest')} "
        f"{significant(cell.number('nats_in_smallest'))} nats"
    )
    shown = f"{cell.text('part')}: {fmt}" if named else short[fmt]
    return [
        box(left + 1, top + 1, width - 2, ROW - 2, f"heat h{shade}", tip),
        text((left + width / 2, top + 15), shown, "middle", "on-dark" if shade > 5 else "on-light"),
    ]


def _shade(value: float, low: float, high: float) -> int:
    if value <= 0 or high <= low:
        return 0
    share = math.log(max(value, low) / low) / math.log(high / low)
    return min(LEVELS - 1, int(share * LEVELS))


def _level(level: int, low: float, high: float) -> str:
    return significant(low * (high / low) ** (level / (LEVELS - 1)), 2)


def _short_names(formats: object) -> dict[str, str]:
    """Names of formats without the part that their family has in common, to fit a cell."""
    return {name: str(name).removesuffix("_gguf").replace("bfloat16", "bf16") for name in formats}  # type: ignore[attr-defined]


def _cut(name: str, width: float) -> str:
    most = max(4, int(width / 7))
    name = name.removesuffix("_proj")
    return name if len(name) <= most else f"{name[: most - 1]}…"


# ---- the front, and predicted against measured -----------------------------------------------------------------------


def _front_card(result: RecordFields) -> Markup:
    points = [
        (point.number("bits"), point.number("nats")) for point in result.each("front") if point.number("nats") > 0
    ]
    uniform = [row for row in result.each("uniform") if row.number("nats") > 0]
    measured = [row for row in result.each("measured") if row.number("kl") > 0]
    bits = [x for x, _ in points] + [row.number("bits") for row in (*uniform, *measured)]
    nats = [y for _, y in points] + [row.number("nats") for row in uniform] + [row.number("kl") for row in measured]
    near = [value for value, x in zip(nats, bits, strict=True) if x <= 10] or nats
    frame = Frame(
        linear_axis([x for x in bits if x <= 10] or bits, "bits a weight"),
        log_axis(near, "KL, nats a token"),
        "Damage against size: the front, the plan and uniform plans",
    )
    inside = [(x, y) for x, y in points if x <= frame.x.high and y >= frame.y.low]
    if len(inside) > 1:
        frame.add(line(frame, _steps(inside), "k0"))
    for row in uniform:
        x, y = row.number("bits"), row.number("nats")
        if x <= frame.x.high and y >= frame.y.low:
            tip = f"all in {row.text('label')}: predicted {significant(y)} nats at {significant(x)} bits"
            frame.add(marker((frame.px(x), frame.py(y)), "k7", tip, "ring"))
    for row in measured:
        x, y, is_plan = row.number("bits"), row.number("kl"), row.text("kind") == "plan"
        if x > frame.x.high:
            continue
        interval = _interval(row)
        if interval and interval[0] > 0:
            frame.add(whisker(frame, x, interval[0], interval[1], "plain thin"))
        tip = f"{row.text('label')}: measured {significant(y)} nats at {significant(x)} bits"
        frame.add(
            marker((frame.px(x), frame.py(y)), "k3" if is_plan else "k1", tip, "diamond" if is_plan else "square")
        )
    drawn = [(frame.px(row.number("bits")), frame.py(row.number("kl")), row) for row in measured]
    frame.add(*_labels(drawn, frame.px(frame.x.high), plan_below=True))
    names = legend(
        [
            ("k0", "best of some sizes, predicted"),
            ("k3", "the plan, measured"),
            ("k1", "others, measured"),
            ("k7", "one format, predicted"),
        ]
    )
    return card(
        "Damage against size",
        frame.svg(),
        legend=names,
        note=f"{_numbered(measured)} Steps: a plan of a size in between may lie below. Bars: 95 % interval on other "
        "text of this kind.",
    )


def _labels(
    points: Sequence[tuple[float, float, RecordFields]], right: float, *, plan_below: bool = False
) -> list[Markup]:
    """A word or a number beside each point, moved down where the one above would cover it.

    plan_below   the plan's word goes below it and to the left: a front runs through what is to its right
    """
    drawn: list[Markup] = []
    labels: list[tuple[float, float, float]] = []
    for number, (x, y, point) in enumerate(points):
        if plan_below and point.text("kind") == "plan":
            drawn += [text((x - 8, y + 15), "plan", "end")] if x <= right else []
            continue
        words = "plan" if point.text("kind") == "plan" else str(number)
        width = 7.0 * len(words) + 2
        while any(x < left + wide and left < x + width and abs(y - top) < 11 for left, top, wide in labels):
            y += 11
        labels.append((x, y, width))
        if x <= right:
            drawn.append(text((x + 8, y + 4), words))
    return drawn


def _numbered(measured: Sequence[RecordFields]) -> str:
    """The legend of a picture that numbers its points: "number: label" for each measured rival; empty without any."""
    words = [f"{number}: {row.text('label')}" for number, row in enumerate(measured) if row.text("kind") != "plan"]
    return f"{'; '.join(words)}." if words else ""


def _steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A staircase: between two sizes, the smaller one's plan is the best that is known."""
    corners = [(size, damage) for (_, damage), (size, _) in pairwise(points)]
    return [points[0], *(point for pair in zip(corners, points[1:], strict=True) for point in pair)]


def _agreement_card(result: RecordFields) -> Markup:
    pairs = [(row.number("predicted"), row.number("kl"), row) for row in result.each("measured")]
    pairs = [(x, y, row) for x, y, row in pairs if x > 0 and y > 0]
    values = [value for x, y, _ in pairs for value in (x, y)] or [1.0]
    frame = Frame(
        log_axis(values, "predicted KL"), log_axis(values, "measured KL"), "Predicted against measured damage"
    )
    ends = max(frame.x.low, frame.y.low), min(frame.x.high, frame.y.high)
    frame.add(segment((frame.px(ends[0]), frame.py(ends[0])), (frame.px(ends[1]), frame.py(ends[1])), "rule"))
    for x, y, pair in pairs:
        is_plan = pair.text("kind") == "plan"
        tip = f"{pair.text('label')}: predicted {significant(x)}, measured {significant(y)} nats"
        frame.add(
            marker((frame.px(x), frame.py(y)), "k3" if is_plan else "k1", tip, "diamond" if is_plan else "square")
        )
    frame.add(*_labels([(frame.px(x), frame.py(y), row) for x, y, row in pairs], frame.px(frame.x.high)))
    names = legend([("k3", "the plan"), ("k1", "others, numbered as in the picture before")])
    return card(
        "Predicted against measured",
        frame.svg(),
        legend=names,
        note="Dashed: the two agree. On text that was not used to predict.",
    )


def _interval(row: RecordFields) -> list[float] | None:
    interval = row.numbers("kl_interval", None)
    if interval is not None and len(interval) != 2:
        row.fail("kl_interval", "two numbers", interval)
    return interval


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(result: RecordFields) -> Markup:
    rows = list(result.each("measured"))
    intervals, floor = [_interval(row) for row in rows], result.fields("noise_floor").number("kl")
    measured = column_table(
        f"what was measured on {count(result.fields('reference').whole('tokens'))} tokens",
        (Column("Plan", mono=True), [row.text("label") for row in rows]),
        (Column("KL", numeric=True), [figure(row.number("kl"), significant) for row in rows]),
        (
            Column("KL / floor", numeric=True),
            [figure(row.number("kl") / floor if floor else None, two_digits) for row in rows],
        ),
        (Column("Bytes", numeric=True), [figure(row.number("bytes"), nbytes) for row in rows]),
        (Column("Bits", numeric=True), [figure(row.number("bits"), _four_digits) for row in rows]),
        (
            Column("KL, 95 %", numeric=True),
            [f"{significant(interval[0])} to {significant(interval[1])}" if interval else "" for interval in intervals],
        ),
        (Column("Perplexity", numeric=True), [figure(row.number("perplexity", None), _four_digits) for row in rows]),
    )
    return join(
        [
            heading("Measured on text that was held out"),
            measured,
            _unmeasured(result),
            fold("Every group, by layer", _groups(result)),
        ]
    )


def _unmeasured(result: RecordFields) -> Markup:
    """Plans without a search that were left to the prediction, by name."""
    losing = [
        f"{row.text('label')} ({significant(row.number('nats'))} nats, {nbytes(row.number('bytes'))})"
        for row in (result.each("unmeasured") if "unmeasured" in result else ())
    ]
    return tag("p", f"Not measured, for they are predicted to lose: {'; '.join(losing)}.") if losing else join([])


def _groups(result: RecordFields) -> Markup:
    cells = list(result.each("heat"))
    classes = format_colours(dict.fromkeys(cell.text("format") for cell in cells))
    formats = [cell.text("format") for cell in cells]
    chips = [Cell(tag("span", name, class_=f"chip {classes[name]}"), word=name) for name in formats]
    return column_table(
        f"the {count(len(cells))} groups of the plan",
        (Column("Group", mono=True), [cell.text("group") for cell in cells]),
        (Column("Format", choose=True), chips),
        (Column("Bits", numeric=True), [figure(cell.number("bits"), significant) for cell in cells]),
        (Column("Nats", numeric=True), [figure(cell.number("nats"), significant) for cell in cells]),
        (Column("Bytes", numeric=True), [figure(cell.number("bytes"), nbytes) for cell in cells]),
        folds=False,
    )


def _four_digits(value: float) -> str:
    return significant(value, 4)
