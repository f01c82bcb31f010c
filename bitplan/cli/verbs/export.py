"""The verb that writes a model for another engine.

The verbs about gpt-oss checkpoints: `convert` between layouts, `make-checkpoint` for tests and benchmarks.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import typer

from bitplan.cli.options import Evidence, Force, Json, Keep, ManifestName, Only, PlanFile, ScaleRule
from bitplan.cli.quick_help import format_names
from bitplan.cli.show import human_bytes, progress, say, show_json, table

# ---- convert ---------------------------------------------------------------------------------------------------------


Layout = Literal["openai", "hf", "gguf"]
Experts = Literal["mxfp4", "bfloat16"]
Dest = Annotated[
    Path, typer.Argument(metavar="DEST", help="A .gguf file; or a .safetensors file, or a folder to be made.")
]
_MEANING = {
    "copied": "byte for byte",
    "rearranged": "same values; rows or nibbles in another order",
    "widened": "same values, bfloat16 held in float32",
    "narrowed": "same values, float32 that held bfloat16",
    "encoded": "floats to MXFP4",
    "expanded": "MXFP4 to floats, exactly",
    "rounded": "wider floats rounded to bfloat16",
}


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A gpt-oss checkpoint: file, shard index or folder.")
    ],
    dest: Dest,
    to: Annotated[Layout, typer.Option("--to", help="Whose layout to write.")],
    experts: Annotated[
        Experts, typer.Option(help="mxfp4: packed bytes stay, floats are encoded. bfloat16: packed ones are expanded.")
    ] = "mxfp4",
    scale_rule: Annotated[
        Literal["absmax", "mse", "percentile"] | None,
        typer.Option(help="When experts are encoded: how scales are chosen; absmax is OCP's floor rule."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Convert a gpt-oss checkpoint between OpenAI's, Hugging Face's and GGUF's layouts, value for value.

    A fine-tuned model with bfloat16 experts comes back as MXFP4.

    Example: bitplan convert gpt-oss-20b model.gguf --to gguf
    """
    from bitplan.files.open_files import open_tensors

    open_tensors(source).close()  # refuses a file that cannot be read before torch is imported

    from bitplan.files.gpt_oss import GptOssFile, checkpoint_bytes, convert_gpt_oss

    with GptOssFile(source) as file:
        shape, before = file.shape, file.nbytes
    packed = experts == "mxfp4" or to == "openai"
    started = time.perf_counter()
    with progress("converting", checkpoint_bytes(to, shape, packed=packed), amount=human_bytes) as advance:
        report = convert_gpt_oss(
            source, dest, to=to, experts=experts, scale_rule=scale_rule, force=force, on_bytes=advance
        )
    seconds = time.perf_counter() - started
    if as_json:
        show_json({**report.to_dict(), "seconds": round(seconds, 3)})
        return
    rows = [
        {
            "tensors": row["tensors"],
            "were": row["action"],
            "which means": _MEANING[row["action"]],
            "now": row["format"],
            "size": human_bytes(row["bytes"]),
        }
        for row in report.counts()
    ]
    table(f"{source} ({report.from_layout}) -> {dest} ({to})", rows)
    beside = f", with {', '.join(report.files)}" if report.files else ""
    say(
        f"{len(report.tensors)} tensors, {human_bytes(before)} -> {human_bytes(report.nbytes)}, {seconds:.1f} s{beside}"
    )
    if to == "gguf" and report.from_layout != "gguf":
        say("no tokenizer was written: llama.cpp loads the weights, and needs one added for text")


def make_checkpoint(
    dest: Dest,
    naming: Annotated[Layout, typer.Option("--to", help="Whose layout to write.")] = "openai",
    size: Annotated[str, typer.Option(help="Sizes to begin from: tiny, 20b or 120b.")] = "tiny",
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    expert_count: Annotated[int | None, typer.Option("--expert-count", min=1)] = None,
    hidden: Annotated[int | None, typer.Option(min=1)] = None,
    intermediate: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(min=1)] = None,
    vocab: Annotated[int | None, typer.Option(min=1)] = None,
    experts: Annotated[Experts, typer.Option(help="bfloat16: as a fine-tuned model has them (hf, gguf).")] = "mxfp4",
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers in every layout.")] = 0,
    device: Annotated[str, typer.Option(help="Where numbers are drawn and encoded: cpu or cuda.")] = "cpu",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make a gpt-oss checkpoint of any size from drawn numbers, for tests and benchmarks.

    Example: bitplan make-checkpoint small --to hf --layers 4 --expert-count 8 --hidden 256 --intermediate 256
    """
    from bitplan.files.gpt_oss import checkpoint_bytes, make_shape
    from bitplan.files.gpt_oss import make_checkpoint as make

    sizes = {
        "layers": layers,
        "experts": expert_count,
        "hidden": hidden,
        "intermediate": intermediate,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
    }
    total = checkpoint_bytes(naming, make_shape(size, **sizes), packed=experts == "mxfp4" or naming == "openai")
    started = time.perf_counter()
    with progress("drawing", total, amount=human_bytes) as advance:
        report = make(
            dest,
            naming=naming,
            size=size,
            **sizes,
            expert_format=experts,
            seed=seed,
            device=device,
            force=force,
            on_bytes=advance,
        )
    seconds = time.perf_counter() - started
    if as_json:
        show_json({**report.to_dict(), "seconds": round(seconds, 3)})
        return
    beside = f", with {', '.join(report.files)}" if report.files else ""
    say(f"{dest} ({naming}): {len(report.tensors)} tensors, {human_bytes(report.nbytes)}, {seconds:.1f} s{beside}")


# ---- export ----------------------------------------------------------------------------------------------------------


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
            help="For every weight: a name from `bitplan formats`; none keeps what is packed.",
            autocompletion=format_names,
        ),
    ] = None,
    manifest: ManifestName = None,
    plan: PlanFile = None,
    keep: Keep = None,
    only: Only = None,
    scale_rule: ScaleRule = None,
    evidence: Evidence = None,
    pretokenizer: Annotated[
        str | None, typer.Option(help="llama.cpp's name of how the tokenizer splits text, where it is not known.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="SIZE", help="In parts of at most this size, such as 4GB.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a model so that another engine runs it, tensor by tensor, in bounded memory.

    Example: bitplan export llama llama.gguf --to gguf --format q4_k_gguf
    """
    from bitplan.files.engines.targets import TARGETS, ExportRequest, prepare_export
    from bitplan.plan import Plan, open_manifest
    from bitplan.plan.format_choices import Wanted

    if sum(given is not None for given in (fmt, manifest, plan)) > 1:
        raise typer.BadParameter("give one of --format, --manifest and --plan, or none: tensors stay as they are")
    if evidence is not None and scale_rule is not None:
        raise typer.BadParameter("give one of --evidence and --scale-rule: each chooses the scales")
    if to is None and output.suffix != ".gguf":
        raise typer.BadParameter(f"give --to, for which engine {output} is: {', '.join(TARGETS)}")
    given: Wanted = fmt or {}
    if plan is not None:
        given = Plan.load(plan)
    elif manifest is not None:
        given = open_manifest(manifest)
    prepared = prepare_export(
        ExportRequest(
            source,
            output,
            given,
            keep or (),
            only or (),
            scale_rule,
            evidence=evidence,
            pretokenizer=pretokenizer,
            part_bytes=None if split is None else _bytes(split),
            force=force,
        ),
        to or "gguf",
    )
    report = prepared.report
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
    say(f"{len(report.rows)} tensors, {human_bytes(report.nbytes)}")
    if report.rounded:
        held = {row.name: row for row in report.rows if row.name in report.rounded}
        kinds_of = ", ".join(sorted({row.format for row in held.values()}))
        numbers = sum(math.prod(row.shape) for row in held.values())
        say(
            f"rounded to {kinds_of}: {sum(report.rounded.values())} of {numbers} numbers in {len(held)} tensors; "
            "--format float32 keeps every one as it is"
        )


def _bytes(size: str) -> int:
    found = _SIZE.fullmatch(size.strip())
    if not found:
        raise typer.BadParameter(f"a size is a number with K, M or G, such as 4GB; got {size!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])
