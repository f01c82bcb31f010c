"""Section of a fit: what the memory is for, the plans that were measured, and KL against memory and against context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from bitplan.base.documents import LIST
from bitplan.report.chart import (
    Axis,
    Frame,
    bars,
    card,
    colour,
    legend,
    line,
    log_axis,
    marker,
    segment,
    text,
)
from bitplan.report.markup import Markup, beside_floor, count, join, nbytes, percent, significant, tag
from bitplan.report.read_records import Record, RecordFields
from bitplan.report.section import (
    Column,
    Fact,
    Section,
    cards,
    column_table,
    figure,
    heading,
    one_by_one,
    source,
    told,
)

PREDICTED, PLAN, RIVAL = "k0", "k3", "k1"
LINES = ("k2", "k4", PREDICTED, "k5", "k6")  # the goal's is in the middle
NEAREST = 3  # memories of the second picture


def fit_section(records: Sequence[Record]) -> Section:
    def draw(record: Record) -> tuple[Markup, object, Sequence[Fact]]:
        result = record.fields()
        body = join([source(record), _answers(result), cards(_charts(result)), _table(result)])
        return body, told(record, _sentence(result)) if len(records) > 1 else "", _facts(result)

    return one_by_one("fit", "Fit", records, draw, _sentence(records[0].fields()))


def tokens(number: float) -> str:
    """A number of tokens as text, 32k for 32768."""
    return f"{number / 1024:g}k" if number >= 1024 and number % 256 == 0 else count(number)


def _goal(result: RecordFields) -> str:
    goal = result.fields("goal")
    batch = goal.whole("batch")
    more = f" of each of {batch} texts" if batch > 1 else ""
    return f"{nbytes(goal.number('memory'))} and {tokens(goal.number('context'))} tokens of context{more}"


def _distance(row: RecordFields) -> str:
    kl = row.number("kl", None)
    return f"KL {significant(row.number('predicted'))}, predicted" if kl is None else f"KL {significant(kl)}"


def _sentence(result: RecordFields) -> str:
    plan, probe = result.fields("plan"), result.fields("probe")
    return (
        f"For {_goal(result)} in {result.fields('goal').text('target')} the plan takes "
        f"{nbytes(result.number('needed_bytes'))}: weights {nbytes(plan.number('weights_bytes'))}, keys and values "
        f"{nbytes(plan.number('kv_bytes'))}, workspace and overhead {nbytes(probe.number('nbytes'))}; "
        f"{_distance(plan)} nats a token from the model."
    )


def _facts(result: RecordFields) -> list[Fact]:
    plan, floor = result.fields("plan"), result.number("noise_floor", None)
    share = result.number("needed_bytes") / max(1, result.fields("goal").number("memory"))
    measured = plan.number("kl", None)
    noise = "" if floor is None else beside_floor(plan.number("predicted") if measured is None else measured, floor)
    label = "nats a token from the model" + ("" if measured is not None else ", predicted")
    return [
        Fact(nbytes(result.number("needed_bytes")), f"of memory, {percent(share)} of the goal", _goal(result)),
        Fact(significant(plan.number("predicted") if measured is None else measured), label, noise),
    ]


def _answers(result: RecordFields) -> Markup:
    unproven = result.text("unproven", "")
    hurt = result.text("hurt_kind", "")
    rows = [
        ("What was measured", f"KL, on {count(result.number('tokens'))} tokens that were held out. {unproven}"),
        ("What was not", "; ".join(map(str, result.get("missing", LIST, [])))),
        ("Kinds of text", f"One is hurt far more: {hurt}" if hurt else ""),
    ]
    return tag("dl", *(join([tag("dt", title), tag("dd", words)]) for title, words in rows if words), class_="answers")


# ---- pictures --------------------------------------------------------------------------------------------------------


def _charts(result: RecordFields) -> list[Markup]:
    points = list(result.each("landscape", []))
    drawn = [_card(result, points, "memory", "context"), _card(result, points, "context", "memory")] if points else []
    return [*drawn, _memory_card(result)]


def _memory_card(result: RecordFields) -> Markup:
    plan, memory = result.fields("plan"), result.fields("goal").number("memory")
    parts = [
        ("weights", plan.number("weights_bytes"), "k0"),
        ("keys and values", plan.number("kv_bytes"), "k1"),
        ("workspace and overhead", result.fields("probe").number("nbytes"), "k7"),
    ]
    unused = max(0, memory - sum(size for _, size, _ in parts))
    rows = [(name, size, nbytes(size), kind) for name, size, kind in (*parts, ("left", unused, "k2"))]
    return card(f"What {nbytes(memory)} are for", bars(rows, "Parts of the memory", whole=memory))


def _card(result: RecordFields, points: Sequence[RecordFields], along: str, by: str) -> Markup:
    names = [(PREDICTED, "best plans, predicted, the goal's line"), (PLAN, "the plan, measured")]
    names += [(RIVAL, "other plans, measured")]
    return card(
        f"KL against {along}",
        kl_frame(result, points, along, by).svg(),
        legend=legend(names),
        note=f"Each line is for one {by}, which stands at its end; no point where nothing fits. At the bottom: the "
        "noise floor or below.",
    )


def kl_frame(result: RecordFields, points: Sequence[RecordFields], along: str, by: str) -> Frame:
    """KL against memory, a line for each context, or against context, a line for each of a few memories."""
    goal = result.fields("goal")
    floor = result.number("noise_floor", None) or min((p.number("predicted") for p in points), default=0) or 1e-6
    written: dict[str, Callable[[float], str]] = {"memory": nbytes, "context": tokens}

    def height(nats: float) -> float:
        return max(float(nats), floor)

    lines = _lines(points, by, goal.number(by))
    shown = [point for _, one in lines for point in one]
    measured = [pair for pair in _measured(result) if pair[0].number(by) == goal.number(by)]
    values = [point.number(along) for point in shown] + [where.number(along) for where, _ in measured]
    heights = [height(point.number("predicted")) for point in shown]
    heights += [height(row.number("kl")) for _, row in measured]
    axis = (
        _memory_axis(values) if along == "memory" else log_axis(values, "tokens of context", formatter=tokens, base=2)
    )
    frame = Frame(axis, log_axis(heights, "KL, nats a token"), f"KL against {along}, by {by}", right=62)
    ends: list[tuple[float, float]] = []
    for (value, one), kind in zip(lines, _colours(lines, goal.number(by)), strict=True):
        at_points = [(point.number(along), height(point.number("predicted"))) for point in one]
        is_goal = value == goal.number(by)
        frame.add(line(frame, at_points, kind if is_goal else f"{kind} thin"))
        for at_point, point in zip(at_points, one, strict=True):
            tip = f"predicted {significant(point.number('predicted'))} nats with {nbytes(point.number('memory'))} and "
            tip += f"{tokens(point.number('context'))} of context"
            frame.add(marker((frame.px(at_point[0]), frame.py(at_point[1])), kind, tip, "ring"))
        x, y = frame.px(max(at_points)[0]) + 8, frame.py(max(at_points)[1]) + 4
        while any(abs(x - left) < 40 and abs(y - top) < 11 for left, top in ends):
            y -= 11
        ends.append((x, y))
        frame.add(text((x, y), written[by](value)))
    at = frame.px(goal.number(along))
    frame.add(
        segment((at, frame.top), (at, frame.height - frame.bottom), "rule"), text((at + 4, frame.top + 9), "goal")
    )
    for where, row in reversed(measured):  # the plan is on top
        is_plan = row.text("label") == result.fields("plan").text("label") or where.number(along) != goal.number(along)
        tip = f"{row.text('label')}, measured: {significant(row.number('kl'))} nats with "
        tip += f"{nbytes(where.number('memory'))} and {tokens(where.number('context'))} of context"
        at_point = frame.px(where.number(along)), frame.py(height(row.number("kl")))
        frame.add(marker(at_point, PLAN if is_plan else RIVAL, tip, "diamond" if is_plan else "square"))
    return frame


def _memory_axis(values: Sequence[float]) -> Axis:
    """A chart's axis over these bytes, with about six round ticks."""
    low, high = min(values), max(values)
    raw = max((high - low) / 6, 1.0)
    power = 10.0 ** (len(str(int(raw))) - 1)
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = int(low // step) + 1
    ticks = tuple((index * step, nbytes(index * step)) for index in range(first, int(high // step) + 1))
    return Axis("memory", low, max(high, low + 1), ticks or ((low, nbytes(low)),))


def _lines(points: Sequence[RecordFields], by: str, goal: float) -> list[tuple[float, list[RecordFields]]]:
    """Points of a chart grouped by `by`, "memory" or "context"; of many memories three around the goal's."""
    groups: dict[float, list[RecordFields]] = {}
    for point in points:
        groups.setdefault(point.number(by), []).append(point)
    values = sorted(groups)
    if by == "memory" and len(values) > NEAREST:
        at = min(range(len(values)), key=lambda index: abs(values[index] - goal))
        values = [values[index] for index in sorted({max(0, at - 2), at, min(len(values) - 1, at + 2)})]
    return [(value, sorted(groups[value], key=_place)) for value in values]


def _place(point: RecordFields) -> tuple[float, float]:
    return point.number("memory"), point.number("context")


def _colours(lines: Sequence[tuple[float, object]], goal: float) -> list[str]:
    others = (kind for kind in LINES if kind != PREDICTED)
    return [PREDICTED if value == goal else next(others, colour(7)) for value, _ in lines]


def _measured(result: RecordFields) -> list[tuple[RecordFields, RecordFields]]:
    """Pairs (goal, plan) of measured plans: of this fit, and of earlier ones for its batch, device and target."""
    own_rows = [(result.fields("goal"), row) for row in result.each("measured")]
    earlier = chain.from_iterable([(one.fields("goal"), one.fields("plan"))] for one in _earlier(result))
    same = ("batch", "device", "target")
    goal = result.fields("goal").value
    others = [(where, row) for where, row in earlier if all(where.value.get(key) == goal[key] for key in same)]
    return [(where, row) for where, row in (*own_rows, *others) if row.number("kl", None) is not None]


def _earlier(result: RecordFields) -> list[RecordFields]:
    return list(result.each("earlier", []))


# ---- table -----------------------------------------------------------------------------------------------------------


def _table(result: RecordFields) -> Markup:
    pairs = [(result.fields("goal"), row) for row in result.each("measured")]
    pairs += [(one.fields("goal"), row) for one in _earlier(result) for row in one.each("measured")]
    goals, rows = [goal for goal, _ in pairs], [row for _, row in pairs]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.fields("kinds", {}).value))
    by_kind = [
        (
            Column(f"KL, {kind.rpartition('/')[2]}", numeric=True),
            [figure(row.fields("kinds", {}).number(kind, None), significant) for row in rows],
        )
        for kind in kinds
    ]
    return join(
        [
            heading("Measured on text that was held out"),
            column_table(
                "plans that were measured, of this goal and of earlier ones",
                (Column("Plan"), [row.text("label") for row in rows]),
                (Column("Memory", numeric=True), [figure(goal.number("memory"), nbytes) for goal in goals]),
                (Column("Context", numeric=True), [figure(goal.number("context"), tokens) for goal in goals]),
                (Column("Weights", numeric=True), [figure(row.number("weights_bytes"), nbytes) for row in rows]),
                (Column("K and V", numeric=True), [figure(row.number("kv_bytes"), nbytes) for row in rows]),
                (Column("Predicted KL", numeric=True), [figure(row.number("predicted"), significant) for row in rows]),
                (Column("KL", numeric=True), [figure(row.number("kl", None), significant) for row in rows]),
                *by_kind,
            ),
        ]
    )
