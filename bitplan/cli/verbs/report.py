"""The verbs that write a page: `report` from the records of other verbs, `demo` from a model that it trains itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitplan.base.errors import FileFormatError
from bitplan.base.text import counted
from bitplan.cli.options import Force, Json
from bitplan.cli.show import human_bytes, say, show_json


def report(
    records: Annotated[
        list[Path],
        typer.Argument(metavar="RECORDS...", help="JSON and JSONL files, and folders of `search` and `quantize`."),
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
    from bitplan.base.records import check_output
    from bitplan.report import write_report

    records = [
        record
        for path in records
        for record in (records_of_search(path) or _plan_of_packed(path) if path.is_dir() else [path])
    ]
    check_output(output, inputs=records, force=force)
    sections = write_report(records, output, title=title)
    size = output.stat().st_size
    titles = [section.title for section in sections]
    if as_json:
        show_json({"report": str(output), "bytes": size, "records": len(records), "sections": titles})
        return
    say(f"{output}: {human_bytes(size)}, {counted(len(records), 'record')}: {', '.join(titles)}")


def _plan_of_packed(folder: Path) -> list[Path]:
    from bitplan.files.packed_folder import is_model_folder, plan_path

    if not is_model_folder(folder):
        raise FileFormatError(
            f"{folder}: holds no records that are known by their names: neither a search's nor a packed model's; "
            "give the files themselves"
        )
    return [plan_path(folder)]


def records_of_search(folder: Path) -> list[Path]:
    """What a page shows of a folder that `search` wrote; nothing for other folders."""
    records = [folder / "front.json", folder / "plan.json"]
    return records if all(record.is_file() for record in records) else []


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")] = Path("demo-out"),
    fast: Annotated[bool, typer.Option("--fast", help="A little of everything, to see that it works.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same figures.")] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train, calibrate, plan, pack and boost in two minutes on a CPU, and write one page that shows all of it.

    The files of an earlier demo in the folder are replaced; --force replaces others of the same names too.

    Example: bitplan demo --fast
    """
    import bitplan.trees  # noqa: F401 (first: it says in one line which library is missing)
    from bitplan.cli.demo.run import run_demo

    result = run_demo(output, fast=fast, quiet=as_json, seed=seed, force=force)
    if as_json:
        show_json(result)
