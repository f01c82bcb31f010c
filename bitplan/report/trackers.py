"""The figures of records for trackers of experiments: Weights & Biases, MLflow, TensorBoard and their like.

    log_records(["train.jsonl", "precision.jsonl", "found/front.json"], wandb.init())

A tracker is known by what it can do, so none of these libraries is imported here:

    add_scalar(name, number, step)     TensorBoard's SummaryWriter
    log_metrics(numbers, step=step)    the module mlflow, and Lightning's loggers
    log(numbers, step=step)            a run of Weights & Biases, which takes steps in rising order alone

So the lines of all logs are sent step by step, each step once; what has no step (a search, perplexity) comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bitplan.report.read_records import ReportError, is_number, read_records

Send = Callable[[dict[str, float], int | None], None]
STEPS = {"training": "step", "precision": "step_id", "stream": "step"}  # logs of steps, and the key of the step
NO_FIGURES = {"version", "timestamp"}


def log_records(records: Iterable[str | Path], tracker: Any) -> int:
    """Send the figures of training logs, telemetry, searches and perplexities to a tracker; return how many.

    records    files that the other parts wrote, as a report takes them
    tracker    a run of Weights & Biases, the module mlflow, a SummaryWriter, or what has one of their methods

    A figure is called by its record's kind and its own name, such as `training/loss` and `search/plan/kl`.
    """
    send = _sender(tracker)
    by_step: dict[int, dict[str, float]] = {}
    without_step: dict[str, float] = {}
    for record in read_records(records):
        if record.kind in STEPS:
            key = STEPS[record.kind]
            for line in record.content:
                if key in line:
                    by_step.setdefault(line[key], {}).update(_figures(f"{record.kind}/", line, leave=key))
        elif record.kind == "search":
            for part in ("reference", "noise_floor", "plan"):
                without_step |= _figures(f"search/{part}/", record.content[part])
        elif record.kind == "quality":
            for row in record.content["rows"]:
                without_step |= _figures(f"quality/{row.get('format', row.get('label'))}/", row)
        else:
            kinds = "training logs, telemetry of streams and of selective precision, searches and perplexities"
            raise ReportError(f"{record.name}: a {record.label} has no figures for a tracker; {kinds} have")
    for step in sorted(by_step):
        send(by_step[step], step)
    if without_step:
        send(without_step, None)
    return sum(map(len, by_step.values())) + len(without_step)


def _figures(prefix: str, values: dict[str, Any], leave: str = "") -> dict[str, float]:
    """Collect the numbers of an object and of the objects in it, under their names; lists are left out."""
    figures: dict[str, float] = {}
    for name, value in values.items():
        if is_number(value) and name != leave and name not in NO_FIGURES:
            figures[prefix + name] = value
        elif isinstance(value, dict) and name != "block_details":
            figures |= _figures(f"{prefix}{name}/", value)
    return figures


def _sender(tracker: Any) -> Send:
    if callable(getattr(tracker, "add_scalar", None)):

        def add_scalars(figures: dict[str, float], step: int | None) -> None:
            for name, value in figures.items():
                tracker.add_scalar(name, value, step)

        return add_scalars
    for method in ("log_metrics", "log"):
        if callable(getattr(tracker, method, None)):
            log = getattr(tracker, method)
            return lambda figures, step: log(figures) if step is None else log(figures, step=step)
    kind = type(tracker).__name__
    raise TypeError(
        f"a tracker has add_scalar, log_metrics or log; got {kind}: give wandb.init(), mlflow or a SummaryWriter"
    )
