"""`bitplan fit` finds formats of weights, keys and values for a memory and a context, and proves them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitplan.cli.options import DaskAddress, Json, Keep, KindsOfText
from bitplan.cli.show import StoppedVerbError, human_bytes, progress, say, show_json, table
from bitplan.searching.goal import WINDOWS, Moment

if TYPE_CHECKING:
    from bitplan.searching.fit import FitResult


def fit(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a GGUF file.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="What the running model may take: 24GB, 900MB.")],
    context: Annotated[str, typer.Option(metavar="TOKENS", help="Prompt and answer together: 8192, 32k.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text the model is for, .jsonl of chats, or self: its own; one for each kind.",
        ),
    ] = None,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory for weights that --memory, the GPU's, cannot hold.")
    ] = None,
    ms: Annotated[float | None, typer.Option(help="With --ram: milliseconds that a token may take.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts at once, each of this context.")] = 1,
    runtime: Annotated[
        str, typer.Option("--for", metavar="RUNTIME", help="Where the model shall run: bitplan, llama.cpp or vllm.")
    ] = "bitplan",
    device: Annotated[str, typer.Option(help="Where to compute, and to run in bitplan: cpu, cuda or cuda:N.")] = "cpu",
    kinds: KindsOfText = "mean",
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text for the proof; else the last quarter of --text.")
    ] = None,
    formats: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Candidates for weights; all unless given.")
    ] = None,
    keep: Keep = None,
    window: Annotated[int | None, typer.Option(help="Tokens in a window of text; 512, or what the model has.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text for the statistics.")] = WINDOWS,
    dask: DaskAddress = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Answer from the evidence that is in the folder; nothing is measured.")
    ] = False,
    out: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go.")] = Path("fit"),
    as_json: Json = False,
) -> None:
    """Find the best formats of weights, keys and values with which a model and its context fit into a memory.

    Writes evidence.json, kv_evidence.json, plan.json, fit.json and report.html, a page with a picture of KL against
    memory and context, into the folder; a run that was stopped goes on.

    Example: bitplan fit llama --memory 24GB --context 32k --text text.txt --window 16 --formats mxfp4,int8_row
    """
    from bitplan.base.records import read_texts
    from bitplan.cli.verbs.search import read_kinds, what_is_left
    from bitplan.files.headers import check_model_source
    from bitplan.searching.engine_memory import engine_of
    from bitplan.searching.goal import GoalError, parse_bytes, parse_kinds, parse_tokens

    began = Moment.now()
    limit, tokens, counted = parse_bytes(memory, "memory"), parse_tokens(context), parse_kinds(kinds)
    host = None if ram is None else parse_bytes(ram, "ram")
    engine_of(runtime)
    names = None if formats is None else [name.strip() for name in formats.split(",")]
    if not text and not plan_only:
        raise GoalError("a fit needs text, or the evidence of an earlier one", settings={"text": "FILE"})
    content = read_kinds(text) if text else None
    proof = None if held_out is None else read_texts(held_out)
    check_model_source(model, None)

    from bitplan.report.page import write_report
    from bitplan.searching.fit import FitGoal
    from bitplan.searching.fit import fit as run_fit
    from bitplan.searching.run import SearchOptions

    note = (lambda _line: None) if as_json else say
    try:
        result = run_fit(
            model,
            goal=FitGoal(limit, tokens, batch, device, runtime, counted, host, ms),
            text=content,
            held_out=proof,
            formats=names,
            keep=keep or (),
            out=out,
            plan_only=plan_only,
            options=SearchOptions(
                device,
                window,
                windows,
                workers=dask or 0,
                stage=partial(progress, estimates=False),
                note=note,
                began=began,
            ),
        )
    except KeyboardInterrupt:
        raise StoppedVerbError(what_is_left(out, out)) from None
    path = out / ("plan-only.json" if plan_only else "plan.json")
    if plan_only:  # plan.json is the one that was measured, for its own goal
        result.plan.save(path)
    else:
        write_report([out / "fit.json", path], out / "report.html", title=f"{model.name}: {result.goal}")
    if as_json:
        show_json(result.to_document())
        return
    show_fit(result, out, path)


def show_fit(result: FitResult, out: Path, plan: Path) -> None:
    """Print a table of the plans, how the memory is used, warnings, and the commands to run next."""
    from bitplan.cli.verbs.search import kinds_columns, next_step, output_name
    from bitplan.searching.runtime_formats import target_of

    rows = [
        {
            "plan": row.label,
            "weights": human_bytes(row.weights),
            **({} if row.ms is None else {"on the host": human_bytes(row.host), "ms a token": f"{row.ms:.2f}"}),
            "K and V": human_bytes(row.kv),
            "predicted KL": f"{row.predicted:.5f}",
            "KL": "not measured" if row.kl is None else f"{row.kl:.5f}",
            **kinds_columns(row.kinds),
        }
        for row in result.rows
    ]
    measured = f"; measured on {result.tokens} tokens that were held out" if result.tokens else ""
    table(f"{result.model}: {result.goal}{measured}", rows)
    for line in result.missing:
        say(line)
    say(
        f"memory: {human_bytes(result.needed)} of {human_bytes(result.goal.memory)}: weights "
        f"{human_bytes(result.row.weights)} ({8 * (result.row.weights + result.row.host) / result.numbers:.2f} bits a "
        f"weight{'' if result.row.ms is None else ' in both memories'}), K and V "
        f"{human_bytes(result.row.kv)} ({result.kv}), workspace and overhead {human_bytes(result.probe.nbytes)}"
    )
    if result.noise_floor is not None:
        say(f"noise floor of KL: {result.noise_floor:.2g}")
    if result.hurt_kind is not None:
        say(f"a kind of text is hurt far more: {result.hurt_kind}")
    goal, target = result.goal, target_of(result.goal.target)
    engine, output = goal.engine, output_name(target, result.model)
    kernels = () if engine.kernels is None else ("--engine", engine.kernels)
    say(next_step(target, result.model, out, *kernels, plan=plan), divided=False)
    command = engine.command(result.kv, goal, result.row.kv, output)
    if command is not None:
        say(f"run it: {command}", divided=False)
        say(engine.unproven)
