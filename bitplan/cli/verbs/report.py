"""`bitplan report`: one page to look at, from the records that the other verbs wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli.show import Force, human_bytes, say, show_json


def report(
    records: Annotated[
        list[Path],
        typer.Argument(metavar="RECORDS...", help="JSON and JSONL files, and folders that `quantize` wrote."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page: one HTML file.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The heading of the page.")] = "bitplan report",
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Make one self-contained HTML page from records: plans, findings, logs, benchmarks, policies.

    A record is recognised by what it holds. Nothing is measured again, and the page needs no network.

    Example: bitplan report plan.json drift.jsonl -o report.html
    """
    from bitplan.records import check_output
    from bitplan.report import write_report
    from bitplan.store.packed_folder import plan_path

    records = [plan_path(each) if each.is_dir() else each for each in records]
    check_output(output, inputs=records, force=force)
    sections = write_report(records, output, title=title)
    size = output.stat().st_size
    titles = [section.title for section in sections]
    if as_json:
        show_json({"report": str(output), "bytes": size, "records": len(records), "sections": titles})
        return
    say(f"{output}: {human_bytes(size)}, {len(records)} records: {', '.join(titles)}")
