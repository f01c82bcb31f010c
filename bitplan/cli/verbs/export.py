"""The verb that writes a model for another engine."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli.options import (
    DaskAddress,
    Evidence,
    Force,
    Json,
    Keep,
    ManifestName,
    Only,
    PlanFile,
    ScaleRule,
    format_names,
)
from bitplan.cli.show import human_bytes, progress, say, show_json, table

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def export(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A model's folder (Hugging Face's), or a .gguf file.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="What to write: a .gguf file, or a folder.")],
    to: Annotated[
        str | None,
        typer.Option(
            help="For which engine: gguf (llama.cpp; what OUT.gguf says), compressed-tensors (vLLM), mlx, torchao, hf."
        ),
    ] = None,
    fmt: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help="For every weight: a name from `bitplan inspect`; none keeps what is packed.",
            autocompletion=format_names,
        ),
    ] = None,
    manifest: ManifestName = None,
    plan: PlanFile = None,
    keep: Keep = None,
    only: Only = None,
    scale_rule: ScaleRule = None,
    evidence: Evidence = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Refuse formats that it has no kernel for: vllm-cpu, vllm-cuda or transformers."),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="Packed layers round inputs, too (compressed-tensors): int8_row or fp8, as the weights are."),
    ] = None,
    pretokenizer: Annotated[
        str | None, typer.Option(help="llama.cpp's name of how the tokenizer splits text, where it is not known.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="SIZE", help="In parts of at most this size, such as 4GB.")
    ] = None,
    dask: DaskAddress = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a model so that another engine runs it, tensor by tensor, in bounded memory.

    Example: bitplan export llama llama.gguf --to gguf --format q4_k_gguf
    """
    from bitplan.files.certificate import evidence_of_search, proven_otherwise
    from bitplan.files.engines.targets import TARGETS, ExportRequest, prepare_export
    from bitplan.plan import Plan
    from bitplan.plan.format_choices import Wanted
    from bitplan.plan.manifest import open_manifest

    if sum(value is not None for value in (fmt, manifest, plan)) > 1:
        raise typer.BadParameter("give one of --format, --manifest and --plan, or none: tensors stay as they are")
    if evidence is not None and scale_rule is not None:
        raise typer.BadParameter("give one of --evidence and --scale-rule: each chooses the scales")
    if to is None and engine is not None:
        to = "compressed-tensors"
    if to is None and output.suffix != ".gguf":
        raise typer.BadParameter(f"give --to, for which engine {output} is: {', '.join(TARGETS)}")
    formats: Wanted = fmt or {}
    proven = None
    if plan is not None and evidence is None:
        evidence = evidence_of_search(plan) if scale_rule is None else None
        proven = proven_otherwise(plan) if evidence is None else None
    if plan is not None:
        formats = Plan.load(plan)
    elif manifest is not None:
        formats = open_manifest(manifest)
    prepared = prepare_export(
        ExportRequest(
            source,
            output,
            formats,
            keep or (),
            only or (),
            scale_rule,
            evidence=evidence,
            pretokenizer=pretokenizer,
            part_bytes=None if split is None else _bytes(split),
            engine=engine,
            inputs=inputs,
            force=force,
            dask=dask,
        ),
        to or "gguf",
    )
    report = prepared.report
    report.notes += [] if proven is None else [proven]
    try:
        if not dry_run:
            with progress("exporting", report.nbytes, amount=human_bytes) as advance:
                prepared.write(lambda count, name: advance(count, name))
    finally:
        prepared.close()
    if as_json:
        show_json(report.to_dict())
        return
    kinds = Counter((row.format, row.reason) for row in report.rows)
    sizes: Counter[tuple[str, str]] = Counter()
    for row in report.rows:
        sizes[row.format, row.reason] += row.nbytes
    if dry_run:
        rows = [
            {"tensor": row.name, "from": row.source, "as": row.format, "bytes": row.nbytes, "why": row.reason}
            for row in report.rows
        ]
        table(f"{source} -> {output} (nothing is written)", rows)
    else:
        grouped = [
            {"tensors": count, "as": kind, "bytes": human_bytes(sizes[kind, why]), "why": why}
            for (kind, why), count in kinds.most_common()
        ]
        table(f"{source} -> {', '.join(report.files)}", grouped)
    for name, why in report.left_out.items():
        say(f"left out: {name}: {why}")
    for note in report.notes:
        say(note)
    say(f"{len(report.rows)} tensors, {human_bytes(report.nbytes)}")
    if report.rounded:
        rounded = {row.name: row for row in report.rows if row.name in report.rounded}
        kinds_of = ", ".join(sorted({row.format for row in rounded.values()}))
        numbers = sum(math.prod(row.shape) for row in rounded.values())
        say(
            f"rounded to {kinds_of}: {sum(report.rounded.values())} of {numbers} numbers in {len(rounded)} tensors; "
            "--format float32 keeps every one as it is"
        )


def _bytes(size: str) -> int:
    parts = _SIZE.fullmatch(size.strip())
    if not parts:
        raise typer.BadParameter(f"a size is a number with K, M or G, such as 4GB; got {size!r}")
    return int(float(parts[1]) * _UNITS[parts[2].upper()])
