"""`bitplan report`: a page from the records of other verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitplan.base.errors import FileFormatError, counted
from bitplan.cli.options import Force
from bitplan.cli.show import human_bytes, say, show_json


def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORDS", help="JSON and JSONL files, folders of records, of `search` and of `quantize`."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page: one HTML file.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The heading of the page.")] = "bitplan report",
    live: Annotated[bool, typer.Option("--live", help="Serve the page of a running job on this machine.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of --live; 0 takes a free one.")] = 0,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Make one self-contained HTML page from records: plans, findings, logs, benchmarks, policies.

    A record is recognised by what it holds. Nothing is measured again, and the page needs no network. With --live the
    page is served at an address of this machine alone, and follows the records while a run writes them.

    Example: bitplan report plan.json drift.jsonl -o report.html
    """
    from bitplan.base.records import check_output
    from bitplan.report import write_report

    if live:
        serve(records, title=title, port=port)
        return
    records, left_out = records_among(records)
    check_output(output, inputs=records, force=force)
    sections = write_report(records, output, title=title)
    size = output.stat().st_size
    titles = [section.title for section in sections]
    if as_json:
        show_json({"report": str(output), "bytes": size, "records": len(records), "sections": titles})
        return
    say(f"{output}: {human_bytes(size)}, {counted(len(records), 'record')}: {', '.join(titles)}")
    for reason in left_out:
        say(f"left out: {reason}")


def serve(paths: list[Path], *, title: str, port: int) -> None:
    """Serve the page until Ctrl-C."""
    from bitplan.report.live import LiveReport

    for path in paths:
        if not path.exists() and not path.parent.is_dir():
            raise FileFormatError(f"{path}: neither it nor its folder exists; give the folder that the run writes to")
    server = LiveReport(lambda: records_among(paths)[0], title=title, port=port)
    say(f"{server.address} shows {', '.join(map(str, paths))} as it grows; Ctrl-C ends it")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("")
    finally:
        server.server_close()


def records_among(paths: list[Path]) -> tuple[list[Path], list[str]]:
    """Files as they are, and what is in folders; and what is left out of those, with the reason."""
    records: list[Path] = []
    left_out: list[str] = []
    for path in paths:
        own_records, others = records_of_folder(path) if path.is_dir() else ([path], [])
        records, left_out = records + own_records, left_out + others
    return records, left_out


def records_of_folder(folder: Path) -> tuple[list[Path], list[str]]:
    """Find the records in a folder, a search's first, and say what is left out: other documents, and broken records."""
    from bitplan.report.read_records import ReportError, UnknownRecordError, read_records

    first = records_of_search(folder)
    records, left_out, others = list(first), [], []
    for path in sorted({*folder.glob("*.json"), *folder.glob("*.jsonl")} - {*first}):
        try:
            read_records([path])
            records.append(path)
        except UnknownRecordError:
            others.append(path.name)
        except ReportError as reason:
            left_out.append(str(reason))
    if not records:
        raise FileFormatError(f"{folder}: holds no record that a page shows; give the files themselves")
    return records, [*left_out, *([f"{', '.join(others)}: no records of results"] if others else [])]


def records_of_search(folder: Path) -> list[Path]:
    """What a page shows of a folder that `search` or `fit` wrote; nothing for other folders."""
    candidates = ([folder / first, folder / "plan.json"] for first in ("fit.json", "front.json"))
    return next((records for records in candidates if all(record.is_file() for record in records)), [])
