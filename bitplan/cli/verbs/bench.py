"""The verb `bench-layers`: time every linear layer of a model in BF16 and FP8 on this GPU, into a report."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bitplan.cli.options import Emulated, Force, Json, Recipe
from bitplan.cli.show import progress, say, show_json, table


def bench_layers(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="A config.json, a folder with one, or a model's YAML.")
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option("--shapes", metavar="OUTxIN[:norm],...", help="In place of MODEL: layers by shape."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", "-o", help="Write the report here; started again, it goes on.")
    ] = None,
    policy: Annotated[Path | None, typer.Option("--policy", help="Write the policy of this report here too.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor parallel size.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, help="Expert parallel size.")] = None,
    etp: Annotated[int | None, typer.Option("--etp", min=1, help="Expert-tensor parallel size.")] = None,
    precisions: Annotated[str | None, typer.Option("--precisions", help="bf16,fp8 or one of the two.")] = None,
    recipe: Recipe = None,
    fp8: Annotated[Literal["e4m3", "hybrid"], typer.Option("--fp8", help="hybrid: gradients in E5M2.")] = "e4m3",
    warmup: Annotated[int | None, typer.Option("--warmup", min=0, help="Calls before the first sample.")] = None,
    iters: Annotated[int | None, typer.Option("--iters", min=1, max=1000, help="Samples of each arm.")] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", metavar="LENGTHxBATCH,...", help="Such as 1024x1,4096x2.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option("--speedup-threshold", help="With --policy: the least speedup that counts.")
    ] = None,
    timing: Annotated[
        Literal["both", "graph", "eager"], typer.Option("--timing", help="CUDA graphs, eager calls, or both.")
    ] = "both",
    routing: Annotated[
        Literal["both", "uniform", "zipf"], typer.Option("--routing", help="How experts get their tokens.")
    ] = "both",
    products: Annotated[
        bool, typer.Option("--products/--no-products", help="Time fprop, dgrad and wgrad apart as well.")
    ] = True,
    part: Annotated[Literal["llm", "vit"] | None, typer.Option("--part", help="Of a VLM only this part.")] = None,
    device: Emulated = "cuda",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be timed, and how long it may take.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Time every linear layer of a model in BF16 and FP8, in turns. Exit 1 when rows failed; the report is kept.

    Options win over the TE_LAYER_PERF_* variables. Under torchrun the ranks share the layers as tp, ep and etp say; in
    one process the shard of one GPU is timed alone.

    Example: bitplan bench-layers config.json --recipe tensorwise --sweep 1024x1,4096x1 --dry-run
    """
    options = _options(
        {
            "omni_config_path": ("MODEL", model),
            "tp_size": ("--tp", tp),
            "ep_size": ("--ep", ep),
            "etp_size": ("--etp", etp),
            "precisions": ("--precisions", precisions),
            "fp8_recipe": ("--recipe", recipe),
            "warmup": ("--warmup", warmup),
            "iters": ("--iters", iters),
            "report_path": ("--report", report),
            "fp8_policy_path": ("--policy", policy),
            "speedup_threshold": ("--speedup-threshold", threshold),
            "shape_sweep": ("--sweep", sweep),
        }
    )
    from bitplan.runtime.fp8.bench.session import Request, plan_session

    timings = ("eager", "graph") if timing == "both" else (timing,)
    routings = ("uniform", "zipf") if routing == "both" else (routing,)
    session = plan_session(Request(options, fp8, timings, routings, products, part, device, shapes))
    if dry_run:
        _show_plan(session, as_json)
        return
    _prepare_outputs(session, force)
    raise typer.Exit(_measure(session, as_json))


def _options(given: dict[str, tuple[str, Any]]) -> Any:
    """Options, which win over the variables; an error in an option names the option."""
    from bitplan.plan.fp8.bench_options import PREFIX, BenchOptions, BenchOptionsError

    options = BenchOptions.from_environment(os.environ)
    for key, (flag, value) in given.items():
        if value is None:
            continue
        name = PREFIX + key.upper()
        try:
            chosen = BenchOptions.from_environment({name: str(value)})
        except BenchOptionsError as fault:
            raise BenchOptionsError(str(fault).replace(name, flag)) from None
        options = replace(options, **{key: getattr(chosen, key)})
    return options


def _prepare_outputs(session: Any, force: bool) -> None:
    """Make the folders of report and policy, and check that the policy can be written, before the work; the report is
    a log and is continued.
    """
    from bitplan.plan.fp8.bench_options import BenchOptionsError
    from bitplan.records import check_output

    options = session.request.options
    for path in (session.report_path(), options.fp8_policy_path):
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as fault:
                reason = fault.strerror or fault
                raise BenchOptionsError(f"{path}: its folder cannot be made: {reason}; give another path") from None
    if options.fp8_policy_path is None:
        return
    target = check_output(options.fp8_policy_path, inputs=[options.omni_config_path], force=force)
    if target == Path(os.path.realpath(session.report_path())):
        raise BenchOptionsError(f"{target}: is the report and the policy; give --policy another name")


def _show_plan(session: Any, as_json: bool) -> None:
    """Show what would be timed."""
    plan = session.plan
    minutes = plan.estimated_minutes()
    cases = [_shown_case(case) for case in plan.cases]
    if as_json:
        settings = session.settings()
        show_json({"model": session.model, "settings": settings, "cases": cases, "estimated_minutes": minutes})
        return
    layers: dict[tuple[Any, ...], dict[str, Any]] = {}
    for case in cases:
        key = tuple(case[key] for key in ("part", "kind", "name", "shape", "size"))
        row = layers.setdefault(key, case | {"tokens": []})
        row["tokens"].append(str(case["tokens"]))
    table(
        f"{session.model}: layers of one GPU", [row | {"tokens": ", ".join(row["tokens"])} for row in layers.values()]
    )
    say(
        f"{len(plan.ways())} measurements of {len(plan.choices())} arms, {plan.turns} samples each: "
        f"very roughly {minutes:.1f} minutes on a GPU of the H100's class"
    )
    if session.ranks == 1 and max(session.parallel.tp, session.parallel.ep, session.parallel.etp) > 1:
        say("one process: the shard of one GPU alone, without communication; use torchrun for both")


def _shown_case(case: Any) -> dict[str, Any]:
    layer = case.layer
    grouped = layer.num_gemms is not None
    size = f"etp {layer.parallel.etp}, {layer.num_gemms} gemms" if grouped else f"tp {layer.parallel.tp}"
    return {
        "part": layer.part,
        "kind": layer.kind,
        "name": layer.name,
        "shape": f"{layer.shape[0]}x{layer.shape[1]}",
        "size": size,
        "blocks": layer.blocks,
        "tokens": case.tokens,
        "obstacle": case.obstacle or "",
    }


def _measure(session: Any, as_json: bool) -> int:
    """Run the benchmark and show its result; returns 1 if rows failed for another reason than memory."""
    from bitplan.plan.fp8.merge import summary
    from bitplan.runtime.fp8.bench.session import run_session

    path = session.report_path()
    with progress("measuring", len(session.plan.ways())) as advance:
        result = run_session(session, on_way=lambda way: advance(1, way.label))
    if result is None:  # another rank shows it
        return 0
    written = session.request.options.fp8_policy_path
    merged = result.merged
    if as_json:
        show_json(
            {
                "report": str(path),
                "policy": written,
                "rows": len(result.report.rows),
                "timed_now": result.timed,
                "failures": dict(result.failures),
                "findings": list(merged.findings) if merged else [],
                "summary": summary(merged.policy) if merged else [],
            }
        )
    else:
        if merged is not None:
            table(f"{session.model} on {result.report.fingerprint.gpu}", summary(merged.policy))
            for finding in merged.findings:
                say(finding)
        failed = "".join(f", {count} {status}" for status, count in result.failures.items())
        say(f"{len(result.report.rows)} rows{failed}; {result.timed} measurements in this run")
        say(f"report: {path}")
        if written:
            say(f"policy: {written}")
    return 1 if "error" in result.failures or (merged is not None and merged.findings) else 0
