"""`bitplan search` finds a plan and proves it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bitplan.cli.options import Bits, Bytes, DaskAddress, Faster, Force, Json, Keep, KindsOfText, MaxKl, Rows
from bitplan.cli.show import StoppedVerbError, duration, human_bytes, progress, say, show_json, table
from bitplan.cli.verbs.report import records_of_search
from bitplan.searching.goal import WINDOWS, Moment

if TYPE_CHECKING:
    from bitplan.searching.run import SearchResult
    from bitplan.searching.runtime_formats import Target

OWN_TEXT = "self"  # in the place of a file of text
EVIDENCE_FILES = ("evidence.json", "evidence.safetensors", "statistics.safetensors")


def search(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a GGUF file.")],
    text: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Text the model is for, .jsonl of chats, or self: its own; one for each kind.",
        ),
    ],
    bits: Bits = None,
    size: Bytes = None,
    max_kl: MaxKl = None,
    faster: Faster = None,
    rows: Rows = 1,
    kinds: KindsOfText = "mean",
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text for the proof; else the last quarter of --text.")
    ] = None,
    formats: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Candidates; all that the target loads unless given.")
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="RUNTIME",
            help="Where the plan shall run: bitplan (default), llama.cpp, vllm, mlx; training: streamed blocks.",
        ),
    ] = None,
    inputs: Annotated[
        Literal["keep", "8", "auto"],
        typer.Option(
            help="Products round their inputs to eight bits: none, all, or where it pays or costs nearly nothing."
        ),
    ] = "keep",
    keep: Keep = None,
    only: Annotated[list[str] | None, typer.Option(help="Search these and leave all others.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute, such as cuda.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a window; 512, or what the model has.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text for the statistics.")] = WINDOWS,
    gradients: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --for training: a state file whose gradients weigh the tensors."),
    ] = None,
    fp8_policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --faster: times of FP8 layers, by a policy.")
    ] = None,
    all_rivals: Annotated[
        bool, typer.Option("--all-rivals", help="Measure plans without a search that are predicted to lose, too.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=0, metavar="N", help="Processes that round weights, one core each; 0: threads.")
    ] = 0,
    dask: DaskAddress = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that it may take, such as 8GB; else what is free.")
    ] = None,
    out: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go.")] = Path("search"),
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Find the best format for every tensor within a goal, and prove the plan on text that was not used to find it.

    Writes evidence.json, plan.json, front.json and report.html into the folder; a search that was stopped goes on.

    Example: bitplan search llama --text text.txt --context 16 --bits 7 --formats mxfp4,int8_row --output found
    """
    from bitplan.base.folders import check_output_folder, finish_folder, unfinished
    from bitplan.base.records import read_texts
    from bitplan.files.headers import check_model_source
    from bitplan.files.open_files import open_tensors
    from bitplan.searching.goal import Goal, parse_bytes, parse_kinds
    from bitplan.searching.runtime_formats import TARGETS, candidates, target_of

    began = Moment.now()
    # Refuse all that can be refused before torch is imported and minutes are spent.
    goal = Goal(bits, None if size is None else parse_bytes(size), max_kl, faster, rows, parse_kinds(kinds))
    target = target_of(runtime or "bitplan")
    names = None if formats is None else [name.strip() for name in formats.split(",")]
    candidates(target, names)
    content = read_kinds(text)
    proof = None if held_out is None else read_texts(held_out)
    check_model_source(model, None)
    open_tensors(model).close()
    # With --force the evidence of an earlier search stays until the new one is whole.
    begins_again = force and any((out / name).exists() for name in EVIDENCE_FILES)
    folder = unfinished(check_output_folder(out, replace=True)) if begins_again else out

    def note(line: str) -> None:
        if as_json:
            return
        if runtime is None:
            say(
                f"the plan is for {target.name}: `quantize` writes a folder that `generate` and `load_packed` run "
                f"(--for {', '.join(list(TARGETS)[1:])}: plans for these)"
            )
        say(line)

    from bitplan.files.certificate import certify_again
    from bitplan.report.page import write_report
    from bitplan.searching.run import SearchOptions
    from bitplan.searching.run import search as run_search

    try:
        result = run_search(
            model,
            goal=goal,
            text=content,
            held_out=proof,
            formats=names,
            target=target.name,
            keep=keep or (),
            only=only or (),
            out=folder,
            options=SearchOptions(
                device,
                context,
                windows,
                gradients,
                fp8_policy,
                all_rivals,
                dask or workers,
                None if memory is None else parse_bytes(memory, "memory"),
                partial(progress, estimates=False),
                note,
                inputs,
                began,
            ),
        )
        write_report(records_of_search(folder), folder / "report.html", title=f"{model.name}: {goal}")
        certify_again(folder)
    except KeyboardInterrupt:
        raise StoppedVerbError(what_is_left(folder, out, force=force)) from None
    if begins_again:
        finish_folder(out, EVIDENCE_FILES)
    if as_json:
        show_json(result.to_document())
        return
    show_result(result)
    say(f"this took {duration(Moment.now().wall - began.wall)}")
    say(next_step(target, result.evidence.model, out), divided=False)


def read_kinds(files: Sequence[Path]) -> str | dict[str, str | None]:
    """Read one plain text as it is; several, or conversations, by their files; `self` stands for the model's own."""
    from bitplan.base.records import read_text
    from bitplan.searching.goal import GoalError

    if Path(OWN_TEXT) in files and Path(OWN_TEXT).exists():
        raise GoalError(
            f"--text {OWN_TEXT} is text that the model writes, and there is a file of this name; "
            f"give the file as {Path(OWN_TEXT).absolute()}"
        )
    contents = {str(file): None if str(file) == OWN_TEXT else read_text(file) for file in files}
    first = contents[str(files[0])]
    return contents if first is None or len(files) > 1 or files[0].suffix == ".jsonl" else first


def kinds_columns(by_kind: Mapping[str, float]) -> dict[str, str]:
    """Columns of a table: the distance on every kind of text."""
    return {f"KL, {Path(kind).name}": f"{kl:.5f}" for kind, kl in by_kind.items()}


def what_is_left(folder: Path, out: Path, *, force: bool = False) -> str:
    """A sentence on what an interrupted search or fit left, and how to go on."""
    from bitplan.searching.collect import EvidenceFolder

    contents, earlier = EvidenceFolder(folder).contents(), "" if folder == out else f"; {out} is as it was"
    if not contents:
        return f"nothing was measured yet: start the same command again{earlier}"
    how = " without --force" if force and folder == out else ""
    return f"{folder} has {contents}: the same command{how} goes on from there{earlier}"


def next_step(target: Target, model: str, out: Path, *more: str, plan: Path | None = None) -> str:
    """A sentence with the command that applies the plan, as it can be pasted; `more` are its further words."""
    from bitplan.files.certificate import evidence_of_search

    path = plan or out / "plan.json"
    if target.streamed:
        loaded = f"bitplan.plan.Plan.load({str(path)!r})"
        return f'train with it: bitplan.stream_blocks(model, formats={loaded}, train="weights")'
    output = output_name(target, model)
    verb, to = ("quantize", []) if target.export is None else ("export", ["--to", target.export])
    whole = plan is None and evidence_of_search(out) is not None
    plan_words = [str(out)] if whole else [str(path), "--evidence", str(out / "evidence.safetensors")]
    words = ["bitplan", verb, model, output, *to, "--plan", *plan_words, *more]
    return f"apply it: {shlex.join(words)}"


def output_name(target: Target, model: str) -> str:
    """A file or folder here that does not exist yet, for the model as the target reads it."""
    source = Path(model)
    stem, suffix = source.name if source.is_dir() else source.stem, ".gguf" if target.export == "gguf" else ""
    names = (
        f"{stem}-{target.export or 'packed'}{number}{suffix}" for number in chain([""], map("-{}".format, count(2)))
    )
    return next(name for name in names if not Path(name).exists())


def show_result(result: SearchResult) -> None:
    from bitplan.searching.plan_meter import kl_by_kind

    evidence = result.evidence
    floor = result.noise_floor.against
    rows = [
        {
            "plan": rival.label,
            "size": human_bytes(rival.nbytes),
            "bits a weight": f"{evidence.bits(rival.nbytes):.3f}",
            "predicted KL": f"{rival.predicted:.5f}",
            "KL": f"{rival.kl.mean:.5f}" + (f"±{rival.kl.standard_error:.5f}" if rival.kl.standard_error else ""),
            **kinds_columns(kl_by_kind(rival.quality, result.kinds)),
            "perplexity": f"{rival.quality.perplexity:.3f}",
        }
        for rival in result.rivals
    ]
    title = f"{evidence.model}: {result.goal}; measured on {result.reference.tokens} tokens that were held out"
    table(title, rows, extra=("predicted KL",))
    if result.unmeasured:
        more = "; ".join(f"{plan.label}: {evidence.predict(plan.choice):.5f}" for plan in result.unmeasured)
        say(f"not measured, for they are predicted to lose ({more}); --all-rivals measures them")
    if floor is not None:
        say(f"perplexity of the model: {result.reference.perplexity:.3f}; noise floor of KL: {floor.kl.mean:.2g}")
    solution = result.solution
    if solution.gap or solution.promised:
        more = f"; one that was not measured promises {solution.promised:.1%} less damage" if solution.promised else ""
        say(f"the plan is within {solution.gap:.2g} of the best possible{more}")
    if result.inputs_kept is not None:
        rounded = result.to_document()["inputs"]
        say(
            f"{rounded['groups']} of {rounded['of']} groups round their inputs: {rounded['share']:.1%} of the KL, "
            f"which is {rounded['kl_kept']:.5f} with all inputs as they are"
        )
    times = result.times
    if times is not None and result.goal.faster is not None:
        verdict = "" if times.faster >= result.goal.faster else f", below the goal of {result.goal.faster:g}"
        faster = f"{times.faster:.2f} times BF16's speed{verdict}"
        say(f"a whole block at {times.rows} rows: {times.plan_us:.0f} us, {faster}")
    if result.missed_goal is not None:
        say(f"the goal is missed on text that was held out: {result.missed_goal}")
    if result.why_lost is not None:
        say(f"the search lost: {result.why_lost}")
    if result.better_beyond_goal is not None:
        say(f"a larger plan is better: {result.better_beyond_goal}")
    if result.hurt_kind is not None:
        say(f"a kind of text is hurt far more: {result.hurt_kind}")
    if result.unseen_experts is not None:
        say(result.unseen_experts)
