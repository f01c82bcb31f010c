"""The verb about drift: a packed checkpoint against the master it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bitplan.cli.show import Json, human_bytes, progress, say, show_json, table
from bitplan.text import counted


def drift(
    master: Annotated[Path, typer.Argument(metavar="MASTER", help="The checkpoint in BF16 or F32.")],
    packed: Annotated[Path, typer.Argument(metavar="PACKED", help="Its packed version.")],
    jsonl: Annotated[Path | None, typer.Option("--jsonl", help="Append a line per tensor to this log.")] = None,
    step: Annotated[int, typer.Option("--step", help="The step that the lines bear.")] = 0,
    as_json: Json = False,
) -> None:
    """Show how far each packed tensor is from its master and what its scales and codes do, worst first.

    `compare` takes any two files; this takes one and its packed version. Exit 1 where a tensor cannot be compared.

    Example: bitplan drift model.safetensors model.mxfp4.safetensors --jsonl drift.jsonl
    """
    from bitplan.store.files.open_files import open_tensors

    for each in (master, packed):
        open_tensors(each).close()  # refuses a file that cannot be read before torch is imported

    from bitplan.store.checks.drift_files import drift_files
    from bitplan.store.checks.drift_log import DriftLog

    log = None if jsonl is None else DriftLog(jsonl)  # a path that cannot be written is an error before the work
    with open_tensors(packed) as file:
        total = sum(spec.nbytes for spec in file.specs.values())
    with progress("comparing", total, amount=human_bytes) as advance:
        report = drift_files(master, packed, step=step, on_bytes=advance)
    if log is not None:
        with log:
            log.write(*report.rows)
    if as_json:
        show_json(report.to_dict())
    else:
        if report.rows:
            rows = [_shown(row) for row in report.rows]
            table(f"{packed} against {master}, largest relative error first", rows)
        for finding in report.findings:
            say(finding)
        if jsonl is not None:
            say(f"{counted(len(report.rows), 'line')} appended to {jsonl}")
    raise typer.Exit(1 if report.findings else 0)


def _shown(row: Any) -> dict[str, Any]:
    """Where scales share a base, one always has the top code: only clipped ones count as bad. Codes are percentages."""
    health = row.health
    bad = {"NaN": health.nan_scales, "saturated": health.clipped_scales, "underflowed": health.underflowed_scales}
    return {
        "tensor": row.name,
        "format": row.format,
        "max error": f"{row.max_abs_error:.2e}",
        "relative": f"{row.relative_error:.2e}",
        "bad scales": ", ".join(f"{count} {kind}" for kind, count in bad.items() if count) or "none",
        "end codes": f"{health.saturated_codes / max(health.codes, 1):.1%}",
        "zeros": f"{health.flushed_codes / max(health.codes, 1):.1%}",
    }
