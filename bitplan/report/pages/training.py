"""Loss curves of training runs, from their logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitplan.report.chart import Frame, Point, card, colour, legend, line, linear_axis, marker
from bitplan.report.figures import count, plural, significant
from bitplan.report.markup import Markup, join, tag
from bitplan.report.read_records import Record, ReportError
from bitplan.report.section import Fact, Section, cards, source

LOSSES = ("loss", "validation_loss")


@dataclass(frozen=True)
class Run:
    """One log: the curves of its figures, by name."""

    record: Record
    name: str
    steps: int
    curves: dict[str, list[Point]]
    not_finite: int


def training_section(records: Sequence[Record]) -> Section:
    runs = [_read(record) for record in records]
    figures = dict.fromkeys(name for run in runs for name in run.curves)
    drawn = [_chart(runs, name) for name in ("loss", *(name for name in figures if name not in LOSSES))]
    body = join([*(source(run.record) for run in runs), cards(drawn)])
    last = runs[0].curves["loss"][-1][1]
    facts = (Fact(significant(last, 4), "final loss", runs[0].name),) if len(runs) == 1 else ()
    return Section("training", "Training", body, tuple(_summary(run) for run in runs), facts)


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


def _chart(runs: Sequence[Run], name: str) -> Markup:
    shown = [(run, run.curves[name]) for run in runs if name in run.curves]
    also = [(run, run.curves["validation_loss"]) for run in runs if name == "loss" and "validation_loss" in run.curves]
    points = [point for _, curve in (*shown, *also) for point in curve]
    title = name.replace("_", " ")
    x, y = linear_axis([x for x, _ in points], "step", whole=True), linear_axis([y for _, y in points], title)
    frame = Frame(x, y, f"{title} over steps")
    names = []
    for run, curve in shown:
        index = runs.index(run)
        frame.add(line(frame, curve, colour(index)))
        frame.add(_end(frame, curve, colour(index), f"{run.name}: {title} {significant(curve[-1][1], 4)}"))
        names.append((colour(index), run.name))
    for run, curve in also:
        kind = f"{colour(runs.index(run))} dashed"
        frame.add(line(frame, curve, kind))
        frame.add(_end(frame, curve, kind, f"{run.name}: validation loss {significant(curve[-1][1], 4)}"))
        names.append((kind, f"{run.name}, validation"))
    return card(title.capitalize(), frame.svg(), legend=legend(names))


def _end(frame: Frame, curve: Sequence[Point], kind: str, tip: str) -> Markup:
    step, value = curve[-1]
    return marker((frame.px(step), frame.py(value)), kind, f"{tip} at step {count(step)}")


def _summary(run: Run) -> Markup:
    curve = run.curves["loss"]
    bad = f" In {plural(run.not_finite, 'step')} the loss was not a number." if run.not_finite else ""
    text = f"{run.name} ran {plural(run.steps, 'step')}: loss {significant(curve[0][1])} to {significant(curve[-1][1])}"
    return join([f"{text}.{bad} (", tag("code", run.record.name), ")"])
