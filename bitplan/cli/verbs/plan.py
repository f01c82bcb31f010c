"""The verbs about plans: `verify` and `plan` a manifest against a checkpoint, and `manifest` to look at or make one."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from bitplan.base.errors import counted
from bitplan.cli.options import (
    Bits,
    Bytes,
    Faster,
    Force,
    Json,
    Keep,
    KindsOfText,
    MaxKl,
    QuickCommand,
    QuickGroup,
    Rows,
    manifest_names,
    shipped_names,
)
from bitplan.cli.show import human_bytes, progress, say, show_json, table

if TYPE_CHECKING:
    from bitplan.base.errors import Finding
    from bitplan.plan import Plan
    from bitplan.searching.goal import Goal

manifest_app = typer.Typer(
    name="manifest", cls=QuickGroup, help="Show, expand or describe manifests.", no_args_is_help=True
)
AlwaysJson = Annotated[bool, typer.Option("--json", help="Changes nothing: what is printed is JSON already.")]


Checked = Annotated[
    list[str],
    typer.Argument(
        metavar="[MANIFEST] CHECKPOINT",
        help="Rules (a folder that `quantize` wrote has its own plan), and a file of weights or a folder.",
        autocompletion=manifest_names,
    ),
]


def check(arguments: Checked, deep: Annotated[bool, typer.Option("--deep")] = False, as_json: Json = False) -> NoReturn:
    """Check a checkpoint's headers against a manifest, and with --deep its numbers."""
    _show_checked(_checked(arguments, deep), as_json)


def verify(
    arguments: Checked,
    source: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="The model that it was made of: is it the same, bit for bit?")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --source: measure KL again, on this text.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="With --text: tokens in a window.")] = None,
    device: Annotated[str, typer.Option(help="With --text: where to compute.")] = "cpu",
    headers: Annotated[
        bool, typer.Option("--headers", help="Names, shapes and formats alone: nothing is read.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that a model is what was written, planned and measured. Exit 1 when there are findings.

    What bitplan quantized is held against its certificate: every byte, the plan, which is derived again from the
    evidence of its search, the weights that it was made of, and KL on a text. Any other file is checked for NaN,
    infinity and scales at the end of their range, and against the rules of a manifest; a float tensor of another dtype
    than its rule's is no finding: `bitplan quantize` casts it.

    Example: bitplan verify packed --source llama --text text.txt --context 16
    """
    from bitplan.base.errors import BitplanError
    from bitplan.base.records import read_texts
    from bitplan.searching.verify import Verification, verify_model

    if headers and (source is not None or text is not None):
        raise typer.BadParameter("--headers reads no data, and --source and --text do: leave it out")
    outcome, content = Verification(), None if text is None else read_texts(text)
    if len(arguments) == 1 and Path(arguments[0]).exists() and not headers:
        with ExitStack() as shown:
            outcome = verify_model(
                arguments[0],
                source=source,
                text=content,
                context=context,
                device=device,
                on_windows=lambda count: shown.enter_context(progress("measuring", count)),
            )
    checked = CheckedTensors(arguments[-1], [], "the folder of a search")
    try:
        if outcome.has_weights:
            checked = _checked(arguments, deep=not headers, has_all_bytes=outcome.has_all_bytes)
    except BitplanError as error:
        if not outcome.findings:  # else what cannot be read is known to be damaged
            raise
        checked = CheckedTensors(arguments[-1], [], str(error))
    checked.findings[:0] = outcome.findings
    checked.notes += outcome.held
    _show_checked(checked, as_json)


@dataclass
class CheckedTensors:
    """The result of a check: the findings about a checkpoint, a text that says what was looked at, and notes."""

    checkpoint: str
    findings: list[Finding]
    looked_at: str
    under: str = ""
    notes: list[str] = field(default_factory=list)


def _show_checked(checked: CheckedTensors, as_json: bool) -> NoReturn:
    findings = checked.findings
    if as_json:
        show_json([finding._asdict() for finding in findings])
    elif findings:
        title = f"{counted(len(findings), 'finding')} in {checked.checkpoint}{checked.under}"
        table(title, [finding._asdict() for finding in findings])
    else:
        say(f"{checked.checkpoint}: {checked.looked_at}, no findings{checked.under}")
    for note in () if as_json else checked.notes:
        say(note)
    raise typer.Exit(1 if findings else 0)


def _checked(arguments: list[str], deep: bool, has_all_bytes: bool = False) -> CheckedTensors:
    """What is wrong with the tensors of a checkpoint, by its headers, or with `deep` by its numbers as well.

    has_all_bytes   every byte was held against a certificate
    """
    from bitplan.files.open_files import open_tensors
    from bitplan.files.packed_folder import (
        is_model_folder,
        is_packed_config,
        plan_findings,
        read_config,
        read_packed_plan,
    )
    from bitplan.plan import check_headers
    from bitplan.plan.check_manifest import CAST
    from bitplan.plan.manifest import open_manifest

    if len(arguments) > 2:
        raise typer.BadParameter("give MANIFEST and CHECKPOINT, or a folder that `bitplan quantize` wrote")
    *manifests, checkpoint = arguments
    under = f" under {manifests[0] if manifests else 'its own plan'}"
    rules = open_manifest(manifests[0]) if manifests else None
    packed = None
    if rules is None:
        if not Path(checkpoint).exists():
            raise typer.BadParameter(f"{checkpoint}: no such file or folder")
        config = read_config(Path(checkpoint)) if is_model_folder(Path(checkpoint)) else {}
        if is_packed_config(config):
            packed = read_packed_plan(Path(checkpoint), config)
        elif not deep:
            raise typer.BadParameter(
                f"{checkpoint} alone has numbers and checksums to check (`bitplan verify {checkpoint}`); its "
                f"formats are held against a manifest (`bitplan manifest show` lists them), as in `bitplan verify "
                f"llama {checkpoint}`"
            )
        else:
            under = ""
    with open_tensors(checkpoint) as file:
        headers = file.specs
        problems: list[Finding] = []
        if rules is not None:
            problems = check_headers(rules, headers)
            if any(part in name for name in headers for part in ("mlp1_weight", ".experts.", "_exps.")):
                from bitplan.packed.checkpoints.gpt_oss_tensors import gpt_oss_findings, is_gpt_oss  # loads torch

                if is_gpt_oss(Path(checkpoint)):
                    headers, problems = gpt_oss_findings(Path(checkpoint), rules, headers)
        problems += [] if packed is None else plan_findings(packed, file)
        findings = [finding for finding in problems if finding.code != CAST]
        casts = Counter(headers[finding.where].dtype for finding in problems if finding.code == CAST)
        total = sum(header.nbytes for header in headers.values())
        if deep:
            from bitplan.files.deep_check import deep_check

            with progress("checking", total, amount=human_bytes) as advance:
                findings += deep_check(rules, file, on_bytes=advance)
        unsummed = deep and not file.has_checksums and not has_all_bytes
    notes = []
    if unsummed:
        notes.append(f"{checkpoint}: has no checksums, so a changed byte that makes a sound number is not seen")
    if casts:
        which = ", ".join(f"{counted(count, 'tensor')} in {dtype}" for dtype, count in casts.items())
        notes.append(f"{which}: their rules ask for another float type, to which `bitplan quantize` casts")
    looked_at = counted(len(headers), "tensor") + (f", {human_bytes(total)} of data checked" if deep else "")
    return CheckedTensors(checkpoint, findings, looked_at, under, notes)


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MANIFEST] MODEL", help="Rules (not with --format), and weights or a folder; or RECORD alone."
        ),
    ] = None,
    fmt: Annotated[
        str | None,
        typer.Option("--format", "-f", help="Without a manifest: weights in this format, by built-in rules."),
    ] = None,
    keep: Keep = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="EVIDENCE", help="Solve again from evidence.json of `bitplan search`: no model."
        ),
    ] = None,
    bits: Bits = None,
    size: Bytes = None,
    max_kl: MaxKl = None,
    faster: Faster = None,
    rows: Rows = 1,
    kinds: KindsOfText = "mean",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan as JSON here.")] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a mermaid diagram instead of a table.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """The format of every tensor of a checkpoint, why, and the bytes: by a manifest, by --format, or --from evidence.

    A record alone is shown: a plan, an FP8 policy, a state or log of selective precision, a model of trees; POLICY@8192
    is it at so many tokens, LOG@40 at a step.

    Example: bitplan plan model.safetensors --format int8_row -o plan.json
    """
    from bitplan.base.records import check_output
    from bitplan.files.headers import plan_for_file
    from bitplan.files.open_files import open_tensors
    from bitplan.files.packed_folder import packed_shapes, transposed_by_names
    from bitplan.plan import read_plan
    from bitplan.plan.manifest import open_manifest

    if source is not None:
        if arguments or fmt or keep:
            raise typer.BadParameter("--from has the model's tensors: give a goal (--bits 4) and no MODEL or --format")
        resolved, distance = _solved(source, _goal(bits, size, max_kl, faster, rows, kinds), output, force)
        _show_plan(resolved, f"{source}", output, mermaid=mermaid, as_json=as_json, compared=distance)
        return
    if any(value is not None for value in (bits, size, max_kl, faster)):
        raise typer.BadParameter("a goal (--bits, --bytes, --max-kl, --faster) goes with --from EVIDENCE")
    if fmt is None and arguments is not None and len(arguments) == 1 and _is_record(Path(arguments[0])):
        if output is not None:
            check_output(output, inputs=arguments, force=force)
        _show_plan(read_plan(arguments[0]), arguments[0], output, mermaid=mermaid, as_json=as_json)
        return
    expected = 2 if fmt is None else 1
    if arguments is None or len(arguments) != expected:
        raise typer.BadParameter(
            "give MODEL with --format F (such as int8_row), or MANIFEST and MODEL "
            "(`bitplan manifest show` lists them), or --from EVIDENCE with a goal"
        )
    *manifest, checkpoint = arguments
    rules = open_manifest(manifest[0]) if manifest else None
    with open_tensors(checkpoint) as file:
        if output is not None:
            check_output(output, inputs=[*manifest, *file.files], force=force)
        how_to_fill = '"padding": "zero" in the manifest'
        shapes = packed_shapes(file, transposed_by_names(file))
        wanted = rules or fmt or ""
        resolved = plan_for_file(file, wanted, keep=keep or (), how_to_fill=how_to_fill, packed_shapes=shapes)
        stored = sum(spec.nbytes for spec in file.specs.values())
        planned = sum(resolved.entries[name].nbytes for name in file.specs)
    title = f"{checkpoint} under {manifest[0] if manifest else fmt}"
    times = max(stored, planned) / max(1, min(stored, planned))
    change = f"{times:.2f} times {'smaller' if planned <= stored else 'larger'}"
    compared = f"{human_bytes(planned)}, {change} than {checkpoint} as it is: {human_bytes(stored)}"
    _show_plan(resolved, title, output, mermaid=mermaid, as_json=as_json, compared=compared)


def _is_record(path: Path) -> bool:
    return ".json" in path.suffix or (path / "plan.json").is_file()


def _goal(
    bits: float | None, size: str | None, max_kl: float | None, faster: float | None, rows: int, kinds: str
) -> Goal:
    from bitplan.searching.goal import Goal, parse_bytes, parse_kinds

    return Goal(bits, None if size is None else parse_bytes(size), max_kl, faster, rows, parse_kinds(kinds))


def _solved(source: Path, goal: Goal, output: Path | None, force: bool) -> tuple[Plan, str]:
    """The best plan for a goal, from evidence alone, and how far it is from the model."""
    from bitplan.base.records import check_output
    from bitplan.searching.evidence import SearchEvidence
    from bitplan.searching.explain import explain_plan
    from bitplan.searching.solver import plan_for

    if output is not None:
        check_output(output, inputs=[source], force=force)
    evidence = SearchEvidence.load(source)
    choice, proven = plan_for(evidence, goal), evidence.proven_for(goal.to_dict())
    distance = f"KL {evidence.predict(choice):.5f}, predicted: this goal was not searched for"
    if proven is not None:
        distance = f"KL {proven.kl:.5f}, measured on held-out text: the plan that was searched for this goal"
    return explain_plan(evidence, choice, rows=goal.rows if goal.faster is not None else None), distance


def explain(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan, a folder of `search`, or what `bitplan plan RECORD` shows.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="A part, or a shell pattern of several.")],
    as_json: Json = False,
) -> None:
    """Say which format a part has and why: a weight, a product, what crosses the bus, gradients.

    Example: bitplan explain plan.json '*mlp.up_proj.weight'
    """
    from bitplan.plan import read_plan
    from bitplan.plan.names import ShellPatterns

    decided = read_plan(plan)
    pattern = ShellPatterns([name])
    pattern.check(decided, plan)
    documents = {part: item for part, item in decided.to_document()["tensors"].items() if pattern.matching(part)}
    if as_json:
        show_json(documents)
        return
    for part, item in documents.items():
        entry = decided.entries[part]
        say(f"{part}: {entry.stored or entry.choice.shown} ({entry.kind}, {entry.choice.cause}): {entry.choice.reason}")
        if entry.shape is not None:
            say(f"  {'x'.join(map(str, entry.shape)) or 'scalar'}, {human_bytes(entry.nbytes)}")
        for key, value in item.get("evidence", {}).items():
            if not isinstance(value, dict):  # the reason has nested ones
                say(f"  {key}: {value:.6g}" if isinstance(value, float) else f"  {key}: {value}")


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A plan, or what `bitplan plan RECORD` shows.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one of the same parts.")],
    evidence: Annotated[
        Path | None, typer.Option(metavar="FILE", help="evidence.json: what each difference costs in nats.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What two plans do differently, and what that costs in bytes and, where it is known, in nats.

    Example: bitplan diff plan.json other.json
    """
    from bitplan.plan import read_plan
    from bitplan.searching.evidence import SearchEvidence
    from bitplan.searching.explain import compare_plans

    old, new = read_plan(first), read_plan(second)
    compared = compare_plans(old, new, None if evidence is None else SearchEvidence.load(evidence)).to_dict()
    if as_json:
        show_json(compared)
        return
    if not compared["rows"]:
        say(f"{first} and {second}: the same format for each of {len(old)} parts")
        return
    has_nats, has_bytes = compared["nats"] is not None, bool(old.nbytes or new.nbytes)
    rows = [
        {
            "part": row["name"],
            "from": row["from"] or "(absent)",
            "to": row["to"] or "(absent)",
            **({"bytes": f"{row['bytes']:+,}"} if has_bytes else {"why": new[row["name"]].reason if row["to"] else ""}),
            **({"nats": "" if row["nats"] is None else f"{row['nats']:+.2g}"} if has_nats else {}),
        }
        for row in compared["rows"]
    ]
    table(f"{first} -> {second}: {len(rows)} of {len(old.keys() | new.keys())} parts differ", rows)
    some = "" if compared["nats_of"] == len(rows) else f" of {compared['nats_of']} of {len(rows)} parts"
    nats = "" if compared["nats"] is None else f", predicted KL{some} {compared['nats']:+.3g} nats"
    if has_bytes:
        say(f"together: {human_bytes(old.nbytes)} -> {human_bytes(new.nbytes)} ({compared['bytes']:+,} bytes){nats}")


def _show_plan(
    resolved: Plan, title: str, output: Path | None, *, mermaid: bool, as_json: bool, compared: str = ""
) -> None:
    if output is not None:
        resolved.save(output)
    if as_json:
        show_json(resolved.to_document())
        return
    if mermaid:
        sys.stdout.write(resolved.to_mermaid())
        return
    rows: list[dict[str, Any]] = [row._asdict() for row in resolved.table(collapse=True)]
    for row in rows:
        row["nbytes"] = human_bytes(row["nbytes"])
        row["shape"] = "x".join(map(str, row["shape"] or ()))
        rounded = row.pop("input")
        row |= {"inputs": rounded or ""} if resolved.inputs else {}
    if all(entry.kind == "weight" for entry in resolved.entries.values()):
        rows = [{key: value for key, value in row.items() if key != "kind"} for row in rows]
    elif not resolved.nbytes:
        rows = [{key: row[key] for key in ("kind", "name", "tensors", "format", "reason")} for row in rows]
        table(title, rows)
        return
    table(title, rows, extra=("role", "tensors", "shape"))
    sizes = [
        {
            **row._asdict(),
            "nbytes": human_bytes(row.nbytes),
            "ratio": "" if row.ratio is None else f"{row.ratio:.2f}",
        }
        for row in resolved.bytes_by_role_and_format()
    ]
    table("bytes by role and format; ratio: times smaller than bfloat16", sizes)
    if compared:
        say(compared)
    if output is not None:
        say(f"plan: {output}")


@manifest_app.command(cls=QuickCommand)
def show(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="bert, gemma, gpt-oss, llama, mistral, mixtral, phi3, qwen, qwen3-moe.",
            autocompletion=shipped_names,
        ),
    ] = None,
    as_json: AlwaysJson = False,
) -> None:
    """Print a shipped manifest, to save and edit; without a name, the names.

    Example: bitplan manifest show llama
    """
    from bitplan.plan.manifest import SHIPPED, shipped_text

    if name is None:
        if as_json:
            show_json(list(SHIPPED))
        else:
            print("\n".join(SHIPPED))
        return
    sys.stdout.write(shipped_text(name).decode())


@manifest_app.command(cls=QuickCommand)
def expand(
    raw: Annotated[Path, typer.Argument(metavar="RAW", help=r"A raw map of names with \[i] to formats, as JSON.")],
    _as_json: AlwaysJson = False,
) -> None:
    r"""Turn a raw map (`block.\[i].mlp.weight` to a format) into a manifest of rules.

    Example: bitplan manifest expand raw.json
    """
    from bitplan.base.records import read_json
    from bitplan.plan import Manifest
    from bitplan.plan.manifest import expand_raw_map

    expanded = expand_raw_map(read_json(raw), where=str(raw))
    Manifest.from_document(expanded, where=str(raw))  # refuse unknown formats now, not at the first use
    show_json(expanded)


@manifest_app.command(cls=QuickCommand)
def schema(_as_json: AlwaysJson = False) -> None:
    """Print the JSON Schema of manifests, for editors.

    Example: bitplan manifest schema
    """
    from bitplan.plan.manifest import manifest_schema

    show_json(manifest_schema())
