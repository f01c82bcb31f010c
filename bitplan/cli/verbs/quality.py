"""`bitplan judge`: how far a model is from another, or formats move it, on real text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bitplan.cli.options import Config, Force, Json, KeysValues, Pad, Rule, Threads, format_names, manifest_names
from bitplan.cli.show import progress, say, show_json, table

if TYPE_CHECKING:
    from bitplan.packed.language.compare_on_text import QualityRow, TextComparison
    from bitplan.packed.language.perplexity import Estimate


def judge(
    first: Annotated[
        Path,
        typer.Argument(metavar="A", help="The reference: a Hugging Face folder, a GGUF file, or packed weights."),
    ],
    second: Annotated[
        Path | None,
        typer.Argument(metavar="B", help="What is measured against it; none: A itself, in the formats that are given."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to measure on: plain, or .jsonl of chats.")
    ] = None,
    fmt: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            "-f",
            help="Weights in this format, as `quantize` does; give several for a table.",
            autocompletion=format_names,
        ),
    ] = None,
    manifest: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME_OR_FILE", help="Formats by a manifest's rules.", autocompletion=manifest_names),
    ] = None,
    plan: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Formats by a plan.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="REF", hidden=True)] = None,
    config: Config = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="With --format: leave parameters or modules of this name or pattern.")
    ] = None,
    scale_rule: Annotated[Rule | None, typer.Option(help="With --format: how scales are chosen.")] = None,
    pad: Pad = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="Linear layers round their inputs, too: int8 (blocks of 32), int8_row, fp8; llama.cpp: as it does for "
            "each weight's format. Unless given as a plan or a packed folder says."
        ),
    ] = None,
    kv: KeysValues = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens in a window; 512 unless given, or what the models have.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Take about this many tokens, in windows spread over the text; all if not given.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Windows in a batch.")] = 4,
    floor: Annotated[bool, typer.Option(help="Measure the reference's own noise floor.")] = True,
    device: Annotated[str, typer.Option(help="Where both models compute: cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="What both models compute in.")
    ] = "float32",
    threads: Threads = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PAGE", help="Write an HTML page of it, too.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """How far one model is from another on a text: KL, perplexities, same top tokens; or what formats do to one.

    Any two of: Hugging Face folders, packed folders, GGUF files, compressed-tensors, GPTQ, AWQ, MLX. KL is of A from B,
    in nats a token; intervals are by window, paired.

    Example: bitplan judge llama packed --text text.txt --context 16
    """
    from bitplan.base.errors import MeasureError
    from bitplan.base.records import check_output, read_texts
    from bitplan.files.headers import check_model_source, is_gguf
    from bitplan.files.open_files import open_tensors
    from bitplan.formats import get_format
    from bitplan.formats.input_formats import AS_LLAMA_CPP, input_format
    from bitplan.plan import Manifest, Plan
    from bitplan.plan.kv_formats import KVFormats
    from bitplan.plan.manifest import open_manifest

    # Refuse all that can be refused before torch is imported and minutes are spent.
    if text is None:
        raise typer.BadParameter("give --text, a file of plain text to measure on")
    if against is not None and second is not None:
        raise typer.BadParameter("--against is the reference, and so is A: give one")
    reference, candidate = (first, second) if against is None else (against, first)
    formats = [get_format(name) for name in fmt or ()]
    if inputs != AS_LLAMA_CPP:
        input_format(inputs, "--inputs")
    if kv is not None:
        KVFormats.parse(kv, "--kv")
    if (keep or scale_rule) and not formats:
        raise MeasureError("--keep and --scale-rule go with --format; a manifest or plan says itself what gets what")
    manifests = [(f"manifest {name}", open_manifest(name)) for name in manifest or ()]
    plans = [(f"plan {path}", Plan.load(path)) for path in plan or ()]
    content = read_texts(text)
    for model in (candidate, reference):
        if model is not None:
            has_own = model is reference and candidate is not None and (model.is_dir() or is_gguf(model))
            check_model_source(model, None if has_own else config)
            open_tensors(model).close()
    if output is not None:
        check_output(output, inputs=[text, *(plan or ())], force=force)

    import torch

    from bitplan.packed.language.compare_on_text import TextSettings, Variant, compare_on_text

    if threads is not None:
        torch.set_num_threads(threads)
    patterns = tuple(keep or ())
    rules: list[tuple[str, Manifest | Plan]] = [*manifests, *plans]
    with ExitStack() as shown:
        reading = shown.enter_context(ExitStack())
        reading.enter_context(progress("reading", 1))

        def measuring(windows: int) -> Callable[[int, str], None]:
            reading.close()
            return shown.enter_context(progress("measuring", windows))

        result = compare_on_text(
            reference,
            candidate,
            content,
            variants=[
                *(Variant(one.name, one, patterns, scale_rule, pad) for one in formats),
                *(Variant(label, rule, pad=pad) for label, rule in rules),
            ],
            config=config,
            settings=TextSettings(context, tokens, batch, floor, inputs, device, getattr(torch, dtype), kv),
            on_windows=measuring,
        )
    document = {**result.to_dict(), "text": str(text)}
    if output is not None:
        _write_page(document, output, f"{Path(result.candidate).name} against {Path(result.reference).name}")
    if as_json:
        show_json(document)
        return
    _show(Path(result.candidate), text, result)
    if output is not None:
        say(f"page: {output}")


def _write_page(document: dict[str, Any], output: Path, title: str) -> None:
    from bitplan.base.folders import scratch_folder
    from bitplan.base.records import write_json
    from bitplan.report.page import write_report

    with scratch_folder(output.parent, "bitplan") as folder:
        record = folder / "judge.json"
        write_json(record, document)
        write_report([record], output, title=title)


def _show(model: Path, text: Path, result: TextComparison) -> None:
    first, noise = result.reference_row, result.noise_floor
    quality = first.quality
    title = (
        f"{model.name} on {text.name}: {quality.tokens} tokens scored, {quality.windows} windows of {result.context}"
    )
    rows = [_cells(row, noise) for row in (first, *([noise] if noise else []), *result.rows)]
    table(title, rows, extra=("NLL difference", "perplexity 95%"))
    say(
        "KL and NLL difference: nats a token, from the reference on the same tokens, with 95% intervals by windows of "
        "text. An interval of perplexity is for other text of this kind."
    )
    if noise:
        say("Noise floor: what running the reference in bfloat16 costs; KL / floor says how many times that a row has.")


def _cells(row: QualityRow, noise: QualityRow | None) -> dict[str, str]:
    quality, distance = row.quality, row.quality.against
    floor = noise.quality.against if noise else None
    cells = {
        "format": row.label,
        "bits a weight": f"{row.bits_per_weight:.2f}",
        "perplexity": f"{quality.perplexity:.3f}",
        "KL": _figure(distance.kl, ".2e") if distance else "",
    }
    if floor:
        cells["KL / floor"] = f"{distance.kl.mean / floor.kl.mean:.3g}x" if distance and floor.kl.mean else ""
    return cells | {
        "same top token": f"{distance.top1_agreement.mean:.2%}" if distance else "",
        "NLL difference": _figure(distance.nll_difference, "+.5f") if distance else "",
        "perplexity 95%": _interval(quality.interval, ".2f"),
    }


def _figure(estimate: Estimate, style: str) -> str:
    return f"{estimate.mean:{style}} ({_interval(estimate.interval, style)})"


def _interval(interval: tuple[float, float] | None, style: str) -> str:
    return "too little text" if interval is None else f"{interval[0]:{style}}..{interval[1]:{style}}"
