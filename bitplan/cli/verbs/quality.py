"""`bitplan perplexity`: what formats do to a real model, on real text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bitplan.cli.options import Config, Json, Pad, Rule, Threads
from bitplan.cli.quick_help import format_names, manifest_names
from bitplan.cli.show import progress, say, show_json, table

if TYPE_CHECKING:
    from bitplan.cli.measure_formats import QualityRow
    from bitplan.packed.language.perplexity import Estimate


def perplexity(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a GGUF file, or packed weights.")
    ],
    text: Annotated[Path, typer.Option(metavar="FILE", help="Plain text to measure on.")],
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
    against: Annotated[
        Path | None, typer.Option(metavar="REF", help="The reference; MODEL itself, unquantized, if not given.")
    ] = None,
    config: Config = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="With --format: leave parameters or modules of this name or pattern.")
    ] = None,
    scale_rule: Annotated[Rule | None, typer.Option(help="With --format: how scales are chosen.")] = None,
    pad: Pad = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="Linear layers round their inputs, too: int8 (as llama.cpp does), int8_row or fp8."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens in a window; 512 unless given, or what the model has.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Take about this many tokens, in windows spread over the text; all if not given.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Windows in a batch.")] = 4,
    floor: Annotated[bool, typer.Option(help="Measure the reference's own noise floor.")] = True,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a model on a text, and how far formats move it from its reference.

    Example: bitplan perplexity llama --text text.txt --context 64 --format mxfp4 --format int8_row
    """
    from bitplan.base.errors import MeasureError
    from bitplan.base.records import read_text
    from bitplan.files.headers import check_model_source
    from bitplan.files.open_files import open_tensors
    from bitplan.formats import get_format
    from bitplan.formats.input_formats import input_format
    from bitplan.plan import Manifest, Plan, open_manifest

    # Refuse all that can be refused before torch is imported and minutes are spent.
    formats = [get_format(name) for name in fmt or ()]
    rounded = input_format(inputs, "--inputs")
    if (keep or scale_rule) and not formats:
        raise MeasureError("--keep and --scale-rule go with --format; a manifest or plan says itself what gets what")
    manifests = [(f"manifest {name}", open_manifest(name)) for name in manifest or ()]
    plans = [(f"plan {path}", Plan.load(path)) for path in plan or ()]
    content = read_text(text)
    for each, its_config in ((model, config), *([] if against is None else [(against, None)])):
        check_model_source(each, its_config)
        open_tensors(each).close()

    import torch

    from bitplan.cli.measure_formats import (
        QualityRun,
        morphed_twin,
        plan_for_model,
        require_same_tokens,
    )
    from bitplan.packed.language.causal_lm import load_causal_lm
    from bitplan.packed.language.perplexity import spread_windows

    if threads is not None:
        torch.set_num_threads(threads)
    with progress("reading", 1):
        candidate = load_causal_lm(model, config=config)
        reference = candidate if against is None else load_causal_lm(against)
    context = min(512, candidate.positions or 512) if context is None else context
    candidate.check_context(context)
    windows = candidate.windows(content, context)
    windows = windows if tokens is None else spread_windows(windows, tokens)
    if against is not None:
        reference.check_context(context)
        require_same_tokens(candidate, reference, content)
    jobs: list[tuple[str, Any, Rule | None, Literal["zero"] | None]]
    jobs = [] if against is None and rounded is None else [(model.name, None, None, None)]
    for wanted in formats:
        choice = plan_for_model(wanted, candidate.model, keep or (), pad=pad is not None, where=str(model))
        jobs.append((wanted.name, choice, None if wanted.is_cast else scale_rule, pad))
    by_rules: list[tuple[str, Manifest | Plan]] = [*manifests, *plans]
    for label, given in by_rules:
        choice = plan_for_model(given, candidate.model, where=label)
        jobs.append((label, choice, None, pad or choice.pad))
    for _, choice, rule, filled in jobs:
        morphed_twin(candidate, choice, scale_rule=rule, pad=filled)
    run = QualityRun(reference, windows, batch)
    with progress("measuring", len(windows) * (1 + floor + len(jobs))) as advance:

        def counted(label: str) -> Callable[[int], None]:
            return lambda count: advance(count, label)

        first = run.measure_reference(f"reference: {Path(reference.where).name}", counted("reference"))
        noise = run.measure_floor(counted("noise floor")) if floor else None
        rows = [
            run.measure(
                label, candidate, choice, scale_rule=rule, pad=filled, inputs=rounded, on_windows=counted(label)
            )
            for label, choice, rule, filled in jobs
        ]
    if as_json:
        show_json(
            {
                "model": str(model),
                "reference": reference.where,
                "text": str(text),
                "context": context,
                "batch": batch,
                "inputs": rounded,
                "reference_row": first.to_dict(),
                "noise_floor": noise and noise.to_dict(),
                "rows": [row.to_dict() for row in rows],
            }
        )
        return
    _show(model, text, context, first, noise, rows)


def _show(
    model: Path, text: Path, context: int, first: QualityRow, noise: QualityRow | None, rows: list[QualityRow]
) -> None:
    quality = first.quality
    title = f"{model.name} on {text.name}: {quality.tokens} tokens scored, {quality.windows} windows of {context}"
    table(title, [_cells(row, noise) for row in (first, *([noise] if noise else []), *rows)])
    say(
        "NLL difference and KL: nats a token, against the reference on the same tokens; +- is one standard error, by "
        "window. 95%: the perplexity on other text of this kind."
    )
    if noise:
        say(
            "Noise floor: the reference against itself with bfloat16 activations; a KL below it (< 1x) is less than "
            "running the reference in bfloat16 costs."
        )


def _cells(row: QualityRow, noise: QualityRow | None) -> dict[str, str]:
    quality, distance = row.quality, row.quality.against
    floor = noise.quality.against if noise else None
    low, high = quality.interval or (None, None)
    cells = {
        "format": row.label,
        "bits/weight": f"{row.bits_per_weight:.2f}",
        "perplexity": f"{quality.perplexity:.3f}",
        "95%": "one window" if low is None else f"{low:.2f}..{high:.2f}",
        "NLL difference": _figure(distance.nll_difference, "+.5f") if distance else "",
        "KL": _figure(distance.kl, ".2e") if distance else "",
        "same top token": f"{distance.top1_agreement.mean:.2%}" if distance else "",
    }
    if floor:
        cells["KL / floor"] = f"{distance.kl.mean / floor.kl.mean:.3g}x" if distance and floor.kl.mean else ""
    return cells


def _figure(estimate: Estimate, style: str) -> str:
    error = "" if estimate.standard_error is None else f" +- {estimate.standard_error:{style.lstrip('+')}}"
    return f"{estimate.mean:{style}}{error}"
