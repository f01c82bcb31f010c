"""Section of a run's plan: which parts were low at which step, every change with its reason, and what was timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitplan.base.errors import PlanFileError
from bitplan.plan.from_records import RunLog, run_log_of
from bitplan.report.chart import Point, bars, card, colour, step_chart
from bitplan.report.markup import Markup, count, join, milliseconds, plural, significant
from bitplan.report.read_records import Record, ReportError, is_number
from bitplan.report.section import Column, Fact, Section, cards, column_table, figure, fold, one_by_one, source, told


def run_plan_section(records: Sequence[Record]) -> Section:
    def draw(record: Record) -> tuple[Markup, object, Sequence[Fact]]:
        try:
            log = run_log_of(record.content, record.name)
        except PlanFileError as fault:
            raise ReportError(str(fault)) from None
        drawn = [card for card in (_low_chart(log), _times_card(log)) if card]
        body = join([source(record), cards(drawn), _changes_table(log)])
        return body, told(record, _sentence(log)), [Fact(count(len(log.changes)), "changes of the plan")]

    return one_by_one("run-plan", "The plan over the run", records, draw)


def _part(name: str) -> str:
    return name.rpartition(".")[2]


def _low_chart(log: RunLog) -> Markup | None:
    """Of each part, the share of blocks in which it is low."""
    blocks = Counter(map(_part, log.rows))
    low, curves = Counter[str](), dict[str, list[Point]]()
    first = {name: row["format"] for name, row in log.rows.items()}
    for part in dict.fromkeys(_part(one.name) for one in log.changes):
        curves[part] = [(0.0, 0.0)]
    for one in log.changes:
        part, curve = _part(one.name), curves[_part(one.name)]
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


def _changes_table(log: RunLog) -> Markup:
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


def _sentence(log: RunLog) -> str:
    formats = {name: row["format"] for name, row in log.rows.items()}
    low = {one.name for one in log.changes if one.to != formats[one.name]}
    raised = sum("noise" in change.evidence for change in log.changes)  # the schedule's end: by impact, above the noise
    fed = sum("loss_high" in change.evidence for change in log.changes)  # a probe lost more than with all high
    return (
        f"The run's plan had {plural(len(low), 'row')} of {count(len(formats))} low at some step; loss feedback raised "
        f"{count(fed)}, the final part of the schedule {count(raised)}."
    )
