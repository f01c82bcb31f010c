"""Verbs on files of weights: what formats there are, what a file holds, quantize it, compare two, see one drift."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from bitplan.base.errors import counted, visible
from bitplan.cli.options import (
    DaskAddress,
    Evidence,
    Force,
    Json,
    Keep,
    KeysValues,
    ManifestName,
    Only,
    Pad,
    PlanFile,
    Rule,
    ScaleRule,
    format_names,
)
from bitplan.cli.show import human_bytes, progress, say, show_json, table

if TYPE_CHECKING:
    from bitplan.plan import Plan
    from bitplan.searching.searched_model import Text

MOST_ROWS = 8  # of a summary by reasons: a search gives nearly every tensor one of its own


def formats(
    on: Annotated[str | None, typer.Option(metavar="FILE:TENSOR")] = None,
    scale_rule: Annotated[Rule | None, typer.Option()] = None,
    as_json: Json = False,
) -> None:
    """List the number formats, or try each of them on a tensor."""
    if on is not None:
        path, separator, name = on.rpartition(":")
        if not separator:
            raise typer.BadParameter(f"--on takes FILE:TENSOR, got {on!r}; `bitplan inspect {on}` lists the tensors")
        _formats_on(path, name, scale_rule, as_json)
        return
    from bitplan.formats.registry import list_formats

    shape = (4096, 4096)
    rows = [
        {"format": fmt.name, "bits_per_weight": round(fmt.bits_per_weight(shape), 3), "description": fmt.description}
        for fmt in list_formats()
    ]
    if as_json:
        show_json(rows)
    else:
        table("formats; bits per weight, scales included, for a 4096 x 4096 matrix", rows)


def _formats_on(path: str | Path, name: str, scale_rule: Rule | None, as_json: bool) -> None:
    from bitplan.base.errors import FormatError
    from bitplan.files.open_files import open_tensors

    on = f"{path}:{name}"
    with open_tensors(path) as file:
        file.spec(name)  # raises before torch is imported

        from bitplan.formats import error_report
        from bitplan.formats.codec import finite, readable
        from bitplan.formats.dispatch import encode
        from bitplan.formats.registry import list_formats

        numbers = finite(readable(file.read_float(name), on), "error", on)
    formats = list_formats()
    rows: list[dict[str, Any]] = []
    with progress("trying", len(formats)) as advance:
        for fmt in formats:
            advance(0, fmt.name)
            try:
                rule = None if fmt.is_cast else scale_rule
                report = error_report(numbers, encode(numbers, fmt, scale_rule=rule, name=name))
                figures = report.to_dict()
                rows.append({"format": figures.pop("fmt"), **figures, "note": ""})
            except FormatError as error:
                rows.append({"format": fmt.name, "note": str(error).split(";")[0]})
            advance(1, fmt.name)
    if as_json:
        show_json(rows)
        return
    shown = [
        {
            "format": row["format"],
            "bytes per weight": f"{row['bytes_per_weight']:.3f}",
            "cosine": f"{row['cosine']:.6f}",
            "SQNR dB": "exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.2f}",
            "max error": f"{row['max_error']:.2e}",
            "saturated": row["saturated"],
            "to zero": row["underflowed"],
        }
        for row in rows
        if "cosine" in row
    ]
    table(f"{name} {tuple(numbers.shape)} in every format", shown)
    for row in rows:
        if row["note"]:
            say(f"{row['format']}: {row['note']}")


def inspect(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="A .safetensors, .gguf or .json file, an index, or a folder; none: the number formats."
        ),
    ] = None,
    tensor: Annotated[str | None, typer.Option(metavar="NAME", help="Try every format on this tensor.")] = None,
    scale_rule: Annotated[Rule | None, typer.Option(help="With --tensor: how scales are chosen.")] = None,
    structure: Annotated[
        bool, typer.Option("--structure", help="What the model computes: roles, who reads one input, norms, blocks.")
    ] = False,
    chart: Annotated[bool, typer.Option("--chart", help="With --structure: a mermaid flow chart.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a file of weights holds: tensors, formats, shapes, bytes; or what its model computes.

    Without a file it lists the number formats; --tensor tries each of them on a tensor.

    Example: bitplan inspect model.safetensors --tensor model.layers.0.mlp.up_proj.weight
    """
    from bitplan.files.open_files import open_tensors
    from bitplan.files.packed_folder import BY_LAYER, folder_kv, is_model_folder, read_config, read_packed_plan

    if file is None:
        if tensor is not None or structure:
            raise typer.BadParameter("--tensor and --structure are of a file: give FILE")
        formats(None, None, as_json)
        return
    if tensor is not None:
        _formats_on(file, tensor, scale_rule, as_json)
        return
    if chart and not structure:
        raise typer.BadParameter("--chart draws what a model computes: add --structure")
    if structure:
        _show_structure(file, as_json=as_json, chart=chart)
        return

    with open_tensors(file) as opened:
        specs, kind, tied = list(opened.specs.values()), opened.kind, dict(opened.tied)
    by_format: Counter[str] = Counter()
    for spec in specs:
        by_format[spec.format] += spec.nbytes
    rows: list[dict[str, Any]] = [
        {"name": spec.name, "format": spec.format, "shape": list(spec.shape), "bytes": spec.nbytes} for spec in specs
    ]
    total = sum(by_format.values())
    rounded = _inputs_of(file)
    if BY_LAYER in rounded.values():
        inputs = read_packed_plan(file, read_config(file)).inputs
        rows = [{**row, "inputs": inputs.get(row["name"], "")} for row in rows]
    kv = folder_kv(read_config(file), str(file)) if is_model_folder(file) else None
    if as_json:
        beside = rounded | ({} if kv is None else {"kv_cache": str(kv)})
        show_json({"file": str(file), "kind": kind, "bytes": total, "tensors": rows, "tied": tied, **beside})
        return
    shown = [{**row, "shape": "x".join(map(str, row["shape"])) or "scalar"} for row in rows]
    table(f"{file}: {kind}, {counted(len(rows), 'tensor')}", shown)
    for name, size in by_format.most_common():
        say(f"{name:>16}  {human_bytes(size):>10}  {size / max(total, 1):6.1%}")
    say(f"{'all':>16}  {human_bytes(total):>10}")
    _say_inputs(file)
    if kv is not None:
        say(f"keys and values are kept in {kv}")


def _show_structure(file: Path, *, as_json: bool, chart: bool) -> None:
    from bitplan.base.errors import PlanError
    from bitplan.files.describe_files import describe
    from bitplan.plan.mermaid import draw_view

    view = describe(file)
    if chart and view.source == "table":
        raise PlanError(f"{file}: no chart, since nothing was run: {view.notes[-1]}; leave out --chart for the table")
    if as_json:
        show_json({"file": str(file), **view.to_dict()})
    elif chart:
        print(draw_view(view), end="")
    elif view.source == "table":
        rows = [
            {"name": tensor.name, "role": tensor.role, "shape": "x".join(map(str, tensor.shape))}
            for tensor in view.tensors
        ]
        table(f"{file}: by its names alone, {counted(len(rows), 'tensor')}", rows)
    else:
        table(f"{file}: seen in a run without numbers", view.table_rows())
    if not (as_json or chart):
        for note in (*view.notes, *(f"{path}: unknown: {reason}" for path, reason in view.unknown.items())):
            say(note)


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file of weights, an index, or a folder.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help=".safetensors, .gguf, .json, or a folder.")],
    fmt: Annotated[
        str | None,
        typer.Option(
            "--format", "-f", help="For every weight: a name from `bitplan inspect`.", autocompletion=format_names
        ),
    ] = None,
    manifest: ManifestName = None,
    plan: PlanFile = None,
    keep: Keep = None,
    only: Only = None,
    scale_rule: ScaleRule = None,
    evidence: Evidence = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="The same from texts that the model runs on, a Hugging Face folder block by block; self: its own.",
        ),
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help="With --text: windows of at most 512 tokens, 96 unless said.")
    ] = None,
    pad: Pad = None,
    nonfinite: Annotated[
        Literal["error", "replace"], typer.Option(help="NaN and infinity: stop, or replace by 0 and the largest.")
    ] = "error",
    inputs: Annotated[
        str | None,
        typer.Option(
            help="To a folder: packed layers round inputs: int8, int8_row, fp8, keep; int8_static with --text."
        ),
    ] = None,
    kv: KeysValues = None,
    dask: DaskAddress = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Quantize a checkpoint, tensor by tensor, in bounded memory; a Hugging Face folder or GGUF to a folder that runs.

    Example: bitplan quantize model.safetensors model.mxfp4.safetensors --format mxfp4 --keep '*embed*'
    """
    from bitplan.cli.verbs.search import read_kinds
    from bitplan.files.certificate import evidence_of_search, proven_otherwise
    from bitplan.files.quantize_files import Quantization
    from bitplan.formats.input_formats import STATIC
    from bitplan.plan import Plan
    from bitplan.plan.manifest import open_manifest
    from bitplan.plan.plan import plan_file

    if sum(value is not None for value in (fmt, manifest, plan)) != 1:
        raise typer.BadParameter("give one of --format, --manifest and --plan")
    if windows is not None and not text:
        raise typer.BadParameter("--windows are those of --text; give a text")
    if evidence is not None and scale_rule is not None:
        raise typer.BadParameter("give one of --evidence and --scale-rule: each chooses the scales")
    if text and (evidence is not None or scale_rule is not None):
        raise typer.BadParameter("give one of --text, --evidence and --scale-rule: each chooses the scales")
    content = read_kinds(text) if text else None
    proven = None
    if plan is not None and evidence is None and not text:
        evidence = evidence_of_search(plan) if scale_rule is None else None
        proven = proven_otherwise(plan) if evidence is None else None
    plan = None if plan is None else plan_file(plan)
    reads = [Path(path) for path in (manifest, plan, evidence, *(text or ())) if path is not None]
    formats = Plan.load(plan) if plan is not None else open_manifest(manifest) if manifest is not None else fmt or ""
    with ExitStack() as opened:
        prepared = opened.enter_context(
            Quantization(
                source,
                output,
                formats,
                keep=keep or (),
                only=only or (),
                pad=pad,
                inputs=inputs,
                kv=kv,
                reads=reads,
                force=force,
            )
        )
        prepared.report.notes += [] if proven is None else [proven]
        if STATIC in prepared.plan.inputs.values() and content is not None:
            if not isinstance(content, str):
                raise typer.BadParameter("int8_static takes its scales from one --text, a file of plain text")
            prepared.give_scales(_static_scales(source, content, prepared.plan, windows or 96))
        if content is not None:
            evidence = opened.enter_context(_gathered(source, output, content, windows or 96))
        advance = opened.enter_context(progress("quantizing", prepared.nbytes, amount=human_bytes))
        report = prepared.write(
            evidence,
            scale_rule=scale_rule,
            nonfinite=nonfinite,
            on_tensor=lambda spec: advance(spec.nbytes, spec.name),
            dask=dask,
        )
    for warning in report.warnings:
        print(visible(f"bitplan: warning: {warning}"), file=sys.stderr)
    if as_json:
        show_json(report.to_dict())
        return
    table(f"{source} -> {output}", _summary(report.rows))
    before, after = report.bytes_before, report.bytes_after
    change = f"{before / max(after, 1):.2f}x smaller" if after <= before else f"{after / max(before, 1):.2f}x larger"
    say(f"{human_bytes(before)} -> {human_bytes(after)} ({change})")


def _static_scales(source: Path, text: str, plan: Plan, windows: int) -> dict[str, str]:
    """Formats of inputs by names of weights, static ones with the scales that the model's inputs have on a text."""
    from bitplan.packed.checkpoints.causal_lm import load_causal_lm
    from bitplan.packed.rounded_inputs import calibrate_inputs

    lm = load_causal_lm(source)
    batches = [window[None] for window in lm.windows(text, min(512, lm.positions or 512))[:windows]]
    return calibrate_inputs(lm.model, plan, batches).inputs


@contextmanager
def _gathered(source: Path, output: Path, text: Text, windows: int) -> Iterator[Path]:
    """Gather statistics of a text; yields their file, which lies beside the output until the block ends."""
    from bitplan.base.folders import scratch_folder
    from bitplan.searching.collect import gather_evidence

    with scratch_folder(output.parent, "bitplan") as folder:
        with progress("statistics", 1000) as advance:
            shown = 0

            def step(done: int, steps: int) -> None:
                nonlocal shown
                advance(1000 * done // steps - shown, f"step {done} of {steps}")
                shown = 1000 * done // steps

            path = gather_evidence(source, text, folder, windows=windows, on_step=step)
        yield path


def _summary(written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for all tensors of one format and reason; where those are too many for a screen, one for each format."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in written:
        groups.setdefault((row["to"], row["reason"]), []).append(row)
    if len(groups) > MOST_ROWS:
        formats = Counter(to for to, _ in groups)
        several = {to: f"{count} reasons: see the plan" for to, count in formats.items() if count > 1}
        whys, groups = groups, {}
        for (to, why), rows in whys.items():
            groups.setdefault((to, several.get(to, why)), []).extend(rows)
    largest_first = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [
        {"tensors": len(rows), "written as": to, **_worst_of(rows), "why": why} for (to, why), rows in largest_first
    ]


def _worst_of(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The worst figures of some tensors; empty where none was encoded."""
    counted = [row for row in rows if row["counted"]]
    noise = [row["sqnr_db"] for row in counted if row["sqnr_db"] is not None]
    return {
        "least SQNR, dB": f"{min(noise):.1f}" if noise else "exact" if counted else "",
        "most saturated": f"{100 * max(row['saturated_share'] for row in counted):.1f}%" if counted else "",
        "most to zero": f"{100 * max(row['underflowed_share'] for row in counted):.1f}%" if counted else "",
    }


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The reference.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="What is compared with it.")],
    scales: Annotated[
        bool, typer.Option("--scales", help="B is A packed: also what its scales and codes do, worst first.")
    ] = False,
    jsonl: Annotated[Path | None, typer.Option("--jsonl", help="With --scales: append lines to this log.")] = None,
    step: Annotated[int, typer.Option("--step", help="With --jsonl: the step to write in the lines.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare the numbers of two files, tensor by tensor; exit 1 when their tensors differ in name or shape.

    Example: bitplan compare model.safetensors model.mxfp4.safetensors
    """
    from bitplan.files.open_files import open_tensors

    if scales or jsonl is not None:
        drift(first, second, jsonl, step, as_json)
    with open_tensors(first) as file:
        total = sum(math.prod(spec.shape) for spec in file.specs.values())
    open_tensors(second).close()  # refuses a file that cannot be read before torch is imported

    from bitplan.files.compare import compare_files

    with progress("comparing", total, amount="{:,} numbers".format) as advance:
        result = compare_files(first, second, on_numbers=advance)
    if as_json:
        show_json({**result.to_dict(), **_inputs_of(second)})
    else:
        differing = len(result.differing_names)
        sums = [(f"overall: the {differing} that differ", result.differing)] if differing else []
        equal = len(result.layers) - differing
        rows = [
            {
                "tensor": name,
                "format": layer.format_b or "",
                "cosine": f"{layer.cosine:.6f}",
                "SQNR dB": "exact" if layer.sqnr_db == float("inf") else f"{layer.sqnr_db:.2f}",
                "relative error": f"{layer.relative_error:.2e}",
                "max error": f"{layer.max_error:.2e}",
            }
            for name, layer in (*result.layers.items(), *sums)
        ]
        table(f"{first} against {second}, worst first", rows, extra=("max error", "cosine"))
        if result.worst is not None:
            worst = result.layers[result.worst].sqnr_db
            say(
                f"overall, {differing} that differ: SQNR {result.differing.sqnr_db:.2f} dB; worst: {result.worst}, "
                f"{worst:.2f} dB" + (f"; {counted(equal, 'tensor')} equal" if equal else "")
            )
        for finding in result.findings:
            say(finding)
        if result.worst is None and result.layers:
            shared = "" if not result.findings else " that both have"
            say(f"values identical: all {counted(len(result.layers), 'tensor')}{shared}")
        _say_inputs(second, "; weights alone are compared")
    raise typer.Exit(1 if result.findings else 0)


def drift(
    master: Annotated[Path, typer.Argument(metavar="MASTER", help="The checkpoint in BF16 or F32.")],
    packed: Annotated[Path, typer.Argument(metavar="PACKED", help="Its packed version.")],
    jsonl: Annotated[Path | None, typer.Option("--jsonl", help="Append a line per tensor to this log.")] = None,
    step: Annotated[int, typer.Option("--step", help="The step to write in the lines.")] = 0,
    as_json: Json = False,
) -> NoReturn:
    """Show how far each packed tensor is from its master and what its scales and codes do, worst first."""
    from bitplan.files.open_files import open_tensors

    for path in (master, packed):
        open_tensors(path).close()  # refuses a file that cannot be read before torch is imported

    from bitplan.files.drift import DriftLog, drift_files

    log = None if jsonl is None else DriftLog(jsonl)  # a path that cannot be written is an error before the work
    with open_tensors(packed) as file:
        total = sum(spec.nbytes for spec in file.specs.values())
    with progress("comparing", total, amount=human_bytes) as advance:
        report = drift_files(master, packed, step=step, on_bytes=advance)
    if log is not None:
        with log:
            log.write(*report.rows)
    if as_json:
        show_json({**report.to_dict(), **_inputs_of(packed)})
    else:
        if report.rows:
            rows = [_shown(row) for row in report.rows]
            table(f"{packed} against {master}, largest relative error first", rows)
        for finding in report.findings:
            say(finding)
        if jsonl is not None:
            say(f"{counted(len(report.rows), 'line')} appended to {jsonl}")
        _say_inputs(packed, "; weights alone are compared")
    raise typer.Exit(1 if report.findings else 0)


def _inputs_of(path: Path) -> dict[str, str]:
    """A column with the format to which a packed folder's products round their inputs; empty where they round none."""
    from bitplan.files.packed_folder import is_model_folder, read_config, shown_inputs

    rounded = shown_inputs(read_config(path)) if is_model_folder(path) else None
    return {} if rounded is None else {"inputs": rounded}


def _say_inputs(path: Path, more: str = "") -> None:
    for rounded in _inputs_of(path).values():
        say(f"{path}: inputs of packed layers are rounded {'' if rounded == 'by layer' else 'to '}{rounded}{more}")


def _shown(row: Any) -> dict[str, Any]:
    """A tensor's row of the printed drift table; shared scales count as saturated only where they clip."""
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
