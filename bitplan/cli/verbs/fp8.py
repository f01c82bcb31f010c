"""The verbs of FP8: times of layers into a report, reports into a policy, and what the policy decides.

`bench` times every linear layer of a model in BF16 and FP8 on this GPU, `merge` makes a policy from reports, `explain`
shows its decisions and why, `confirm` tries them in whole blocks before there is training code.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bitplan.cli.options import Emulated, Force, Json, QuickCommand, QuickGroup, Recipe
from bitplan.cli.show import progress, say, show_json, table

fp8_app = typer.Typer(
    name="fp8", cls=QuickGroup, help="Where FP8 is faster: time layers, merge, explain, confirm.", no_args_is_help=True
)


@fp8_app.command(cls=QuickCommand)
def bench(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="A config.json, a folder with one, or a model's YAML.")
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
    iters: Annotated[int | None, typer.Option("--iters", min=1, max=1000, help="Samples of each variant.")] = None,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", metavar="LENGTHxBATCH,...", help="Such as 1024x1,4096x2: tokens x sequences."),
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

    Example: bitplan fp8 bench config.json --recipe tensorwise --sweep 1024x1,4096x1 --dry-run
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
    from bitplan.fp8.bench.session import plan_session

    more: dict[str, Any] = {"fp8": fp8, "products_apart": products, "part": part, "device": device, "shapes": shapes}
    more |= {} if timing == "both" else {"timings": (timing,)}
    more |= {} if routing == "both" else {"routings": (routing,)}
    plan = plan_session(replace(options, **more))
    if dry_run:
        _show_plan(plan, as_json)
        return
    _prepare_outputs(plan.options, force)
    raise typer.Exit(_measure(plan, as_json))


def _options(values: dict[str, tuple[str, Any]]) -> Any:
    """Options, which win over the variables; an error in an option names the option."""
    from bitplan.fp8.bench.layer_bench import BenchOptions, read_option

    texts = {key: (flag, str(value)) for key, (flag, value) in values.items() if value is not None}
    chosen = {key: read_option(key, text, flag) for key, (flag, text) in texts.items()}
    return replace(BenchOptions.from_environment(os.environ), **chosen)


def _prepare_outputs(options: Any, force: bool) -> None:
    """Make the folders of report and policy, and check that both can be written, before the work begins."""
    from bitplan.base.records import check_output
    from bitplan.fp8.bench.layer_bench import BenchOptionsError

    for path in (options.report_file(), options.fp8_policy_path):
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as fault:
                reason = fault.strerror or fault
                raise BenchOptionsError(f"{path}: its folder cannot be made: {reason}; give another path") from None
    if options.fp8_policy_path is None:
        return
    target = check_output(options.fp8_policy_path, inputs=[options.omni_config_path], force=force)
    if target == Path(os.path.realpath(options.report_file())):
        raise BenchOptionsError(f"{target}: is the report and the policy; give --policy another name")


def _show_plan(plan: Any, as_json: bool) -> None:
    """Show what would be timed."""
    minutes = plan.estimated_minutes()
    cases = [_shown_case(case) for case in plan.cases]
    if as_json:
        settings = plan.settings()
        show_json({"model": plan.model, "settings": settings, "cases": cases, "estimated_minutes": minutes})
        return
    layers: dict[tuple[Any, ...], dict[str, Any]] = {}
    for case in cases:
        key = tuple(case[key] for key in ("part", "kind", "name", "shape", "size"))
        row = layers.setdefault(key, case | {"tokens": []})
        row["tokens"].append(str(case["tokens"]))
    table(f"{plan.model}: layers of one GPU", [row | {"tokens": ", ".join(row["tokens"])} for row in layers.values()])
    say(
        f"{len(plan.ways())} measurements of {len(plan.choices())} arms, {plan.options.iters} samples each: "
        f"very roughly {minutes:.1f} minutes on a GPU of the H100's class"
    )
    if plan.ranks == 1 and max(plan.parallel.tp, plan.parallel.ep, plan.parallel.etp) > 1:
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


def _measure(plan: Any, as_json: bool) -> int:
    """Run the benchmark and show its result; returns 1 if rows failed for another reason than memory."""
    from bitplan.fp8.bench.session import run_session
    from bitplan.fp8.policy.merge import summary

    path = plan.options.report_file()
    with progress("measuring", len(plan.ways())) as advance:
        result = run_session(plan, on_way=lambda way: advance(1, way.label))
    if result is None:  # another rank shows it
        return 0
    written = plan.options.fp8_policy_path
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
            table(f"{plan.model} on {result.report.fingerprint.gpu}", summary(merged.policy))
            for finding in merged.findings:
                say(finding)
        failed = "".join(f", {count} {status}" for status, count in result.failures.items())
        say(f"{len(result.report.rows)} rows{failed}; {result.timed} measurements in this run")
        say(f"report: {path}")
        if written:
            say(f"policy: {written}")
    return 1 if "error" in result.failures or (merged is not None and merged.findings) else 0


Part = Literal["llm", "vit"]


@fp8_app.command(cls=QuickCommand)
def merge(
    more: Annotated[list[Path] | None, typer.Argument(metavar="REPORT", help="More reports.")] = None,
    reports: Annotated[list[Path] | None, typer.Option("--reports", help="Reports of one machine.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the policy here.")] = None,
    speedup_threshold: Annotated[
        float, typer.Option("--speedup-threshold", help="The least speedup for which FP8 is used.")
    ] = 1.0,
    confidence: Annotated[float, typer.Option("--confidence", help="How sure a win or a loss must be.")] = 0.95,
    timing: Annotated[
        Literal["eager", "graph"] | None,
        typer.Option("--timing", help="Only rows timed this way; else FP8 must win both."),
    ] = None,
    across_recipes: Annotated[
        bool, typer.Option("--across-recipes", help="Put recipes side by side; the best is taken where one wins.")
    ] = False,
    policy_version: Annotated[
        Literal["1", "2"],
        typer.Option("--policy-version", help="2 has bands and losses; 1 is one threshold per layer."),
    ] = "2",
    part: Annotated[Part | None, typer.Option("--part", help="With version 1: the part of a VLM to write.")] = None,
    into: Annotated[
        Path | None, typer.Option("--into", help="A version 2 policy that the reports are added to.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Merge benchmark reports into one policy. Exit 1 when rows could not be used; the policy is written all the same.

    What several reports measured is pooled. LoongForge's list reports give a policy of version 1.

    Example: bitplan fp8 merge --reports tp1.json tp2.json --output policy.json --speedup-threshold 1.0
    """
    from bitplan.base.records import check_output
    from bitplan.fp8.loongforge import merge_lists
    from bitplan.fp8.policy.merge import extend_policy, merge_reports, summary
    from bitplan.fp8.policy.report import Report
    from bitplan.fp8.policy.rules import load_policy
    from bitplan.fp8.policy.vocabulary import MergeError

    paths = [*(reports or []), *(more or [])]
    if not paths:
        raise MergeError("--reports needs at least one report")
    if part is not None and policy_version == "2":
        raise MergeError("--part goes with --policy-version 1; version 2 keeps both parts in one file")
    if output is not None:
        check_output(output, inputs=paths, force=force)
    lists = merge_lists(paths, speedup_threshold)
    if lists is not None:
        if policy_version != "1":
            raise MergeError(
                f"{paths[0]}: a list of one time for each layer, without samples or the GPU's name, gives a policy of "
                "version 1 only; add --policy-version 1"
            )
        merged, title = lists, f"{len(paths)} list reports"
        rows = [
            {"layer": rule.where, "fp8 from tokens": rule.min_tokens, "speedup": rule.measured_speedup}
            for rule in lists.policy.rules
        ]
    else:
        merged = merge_reports(
            [Report.load(path) for path in paths],
            speedup_threshold=speedup_threshold,
            confidence=confidence,
            timing=timing,
            across_recipes=across_recipes,
        )
        banded = merged.policy if into is None else extend_policy(load_policy(into), merged.policy)
        title, rows = f"{len(paths)} reports of {banded.gpu}", summary(banded)
        merged = replace(merged, policy=banded if policy_version == "2" else banded.to_thresholds(part=part))
    policy = merged.policy
    if output is not None:
        policy.save(output)
    if as_json:
        show_json({"policy": policy.to_document(), "findings": list(merged.findings)})
    else:
        table(title, rows)
        if policy_version == "1" and lists is None:
            say(f"version 1: {len(policy.rules)} of {len(rows)} rules can be said in it")
        for finding in merged.findings:
            say(finding)
        if output is not None:
            say(f"policy: {output}")
    raise typer.Exit(1 if merged.findings else 0)


@fp8_app.command(cls=QuickCommand)
def explain(
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="A policy of version 1 or 2.")],
    kind: Annotated[str, typer.Option("--kind", help="layernorm_column, column, row, duplicated, ..._grouped.")],
    tokens: Annotated[int, typer.Option("--tokens", help="Sequence length x micro batch size, before topk.")],
    name: Annotated[str | None, typer.Option("--name", help="Of dense kinds: qkv, proj, fc1, fc2, ...")] = None,
    tp: Annotated[int, typer.Option("--tp", help="Tensor parallel size.")] = 1,
    etp: Annotated[int, typer.Option("--etp", help="Experts: expert-tensor parallel size.")] = 1,
    num_gemms: Annotated[int | None, typer.Option("--num-gemms", help="Experts: how many one GPU holds.")] = None,
    topk: Annotated[int | None, typer.Option("--topk", help="Experts: moe_router_topk.")] = None,
    expert: Annotated[bool, typer.Option("--expert", help="A column or row layer that is inside an expert.")] = False,
    shape: Annotated[str | None, typer.Option("--shape", metavar="OUTxIN", help="Local shape of the weight.")] = None,
    recipe: Recipe = None,
    gemm: Annotated[str, typer.Option("--gemm", help="module, or one product: fprop, dgrad or wgrad.")] = "module",
    part: Annotated[Part, typer.Option("--part", help="The part of a VLM.")] = "llm",
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Let a win at the largest measured count speak for larger ones.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Estimate what was not measured, as apply_fp8 does.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Say what `apply_fp8` makes of a layer at a token count, and why. Exit 1 for BF16 because it was never measured.

    Example: bitplan fp8 explain policy.json --kind row --name fc2 --tokens 4096
    """
    from bitplan.fp8.policy.choice import choose_products
    from bitplan.fp8.policy.policy import Question, decide, matching_rules
    from bitplan.fp8.policy.rules import load_policy
    from bitplan.fp8.policy.vocabulary import MODULE, PRODUCTS, UNMEASURED

    rules = load_policy(policy)
    question = Question(
        kind, tokens, name, tp, etp, num_gemms, expert, topk, _shape(shape), recipe, gemm, part, extrapolate, estimate
    )
    choice = choose_products(rules, question)
    alone = {product: decide(rules, replace(question, gemm=product)) for product in PRODUCTS}
    rules_there = matching_rules(rules, question)
    precision = choice.precision if gemm == MODULE else choice.precision_of(gemm)
    if as_json:
        products = {
            product: {"precision": choice.precision_of(product), "alone": decision.to_dict()}
            for product, decision in alone.items()
        }
        layer = {"precision": precision, "kind": question.looked_up_kind, "gemms": products}
        show_json(choice.to_dict() | layer | {"rules": [rule.to_document() for rule in rules_there]})
    else:
        at = " ".join(filter(None, (question.looked_up_kind, name, gemm if gemm != MODULE else None)))
        shown = precision.replace("bf16", "BF16").replace("fp8", "FP8")
        say(f"{at} at {choice.tokens} tokens: {shown} ({choice.answer}): {choice.reason}")
        say("; ".join(f"{product} {choice.precision_of(product).upper()}" for product in PRODUCTS))
        if gemm != MODULE:
            by_itself = alone[gemm]
            say(f"{gemm} by itself: {by_itself.precision.upper()} ({by_itself.answer}): {by_itself.reason}")
        if choice:
            to = "up" if choice.holds_to is None else f"to {choice.holds_to}"
            say(f"the same from {choice.holds_from} tokens {to}")
        for rule in rules_there:
            table(rule.where, [_shown(point) for point in rule.points])
    raise typer.Exit(0 if choice or choice.answer != UNMEASURED else 1)


def _shape(text: str | None) -> tuple[int, int] | None:
    from bitplan.fp8.policy.vocabulary import Fp8Error

    if text is None:
        return None
    sizes = re.fullmatch(r"([0-9]{1,9})[xX,]([0-9]{1,9})", text)
    if sizes is None:
        raise Fp8Error(f"--shape must be OUTxIN such as 4096x14336, got {text!r}")
    return int(sizes[1]), int(sizes[2])


def _shown(point: Any) -> dict[str, Any]:
    figures = {"speedup": point.speedup, "low": point.low, "high": point.high}
    shown = {key: "" if value is None else f"{value:.3f}" for key, value in figures.items()}
    samples = "" if point.samples is None else point.samples
    return {"tokens": point.tokens, "answer": point.answer, **shown, "samples": samples, "note": point.note}


EMULATED = "FP8 is emulated on the CPU: this shows that the command runs; no speed is shown by it"


@fp8_app.command(cls=QuickCommand)
def confirm(
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="A policy of version 1 or 2.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A config.json, or a folder with one.")],
    tokens: Annotated[
        str,
        typer.Option("--tokens", metavar="COUNT,...", help="Sequence length x micro batch size, such as 2048,8192."),
    ],
    timing: Annotated[
        Literal["eager", "graph"], typer.Option("--timing", help="Launched one by one, or as a CUDA graph.")
    ] = "eager",
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the blocks first: confirm as you will run.")
    ] = False,
    recipe: Recipe = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="The share of one GPU of so many, without communication.")] = 1,
    device: Emulated = "cuda",
    as_json: Json = False,
) -> None:
    """Time whole blocks in BF16, as a policy plans and all FP8, in turns. Exit 1 when FP8 of a plan is turned down.

    Exit 1 too when the policy knows none of the layers.

    The blocks are built by transformers from the config.json, with random weights; nothing is downloaded. What is shown
    to be fastest is taken, for each token count by itself; BF16 where nothing is.

    Example: bitplan fp8 confirm policy.json config.json --tokens 64,128 --device cpu
    """
    counts = _counts(tokens)
    from bitplan.fp8.bench.confirm_policy import confirm_policy, plan_small_model, require_device
    from bitplan.fp8.decide import Fp8Options
    from bitplan.fp8.policy.rules import load_policy

    rules = load_policy(policy)
    options = Fp8Options(tp=tp, confirm_timing=timing, confirm_compiled=compiled)
    chosen = require_device(device, rules, recipe)
    small = plan_small_model(model, tp=tp)
    with progress("confirming", len(counts)) as advance:
        results = confirm_policy(
            rules, small, counts, chosen, options, recipe=recipe, on_count=lambda count: advance(1, f"{count} tokens")
        )
    how = {"policy": str(policy), "model": small.where, "device": _name(chosen), "emulated": chosen.type == "cpu"}
    how |= {"timing": timing, "compiled": compiled, "recipe": recipe, "tp": tp}
    how |= {"blocks_built": small.blocks, "of_blocks": small.of_blocks, "why": small.reason}
    if as_json:
        show_json(how | {"counts": [result.to_dict() for result in results]})
    else:
        _show(how, results)
    raise typer.Exit(1 if any(result.turned_down or result.unknown for result in results) else 0)


def _counts(text: str) -> list[int]:
    from bitplan.fp8.policy.vocabulary import Fp8Error, is_count

    words = [word.strip() for word in text.split(",")]
    counts = [int(word) if word.isascii() and word.isdigit() and len(word) < 16 else 0 for word in words]
    if not all(map(is_count, counts)):
        raise Fp8Error(
            "--tokens must be whole numbers from 1 with commas between, sequence length x micro batch size, such as "
            f"2048,8192, got {text[:80]!r}"
        )
    return list(dict.fromkeys(counts))


def _name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _show(how: dict[str, Any], results: list[Any]) -> None:
    if how["emulated"]:
        say(EMULATED)
    run = f"{'compiled, ' if how['compiled'] else ''}{how['timing']}, tp {how['tp']}"
    table(f"{how['policy']} on blocks of {how['model']}: {how['device']}, {run}", _rows(results))
    say(f"built {how['blocks_built']} of {how['of_blocks']} blocks: {how['why']}")
    for result in results:
        for block in result.blocks:
            say(f"{result.tokens} tokens, {block.block}: {block.answer}: {block.reason}")
        if result.failure is not None:
            say(f"{result.tokens} tokens: nothing was confirmed: {result.failure}; try fewer tokens")
    for result in results:
        for reason in result.unknown:
            say(f"{result.tokens} tokens: the policy knows none of these layers: {reason}")
    for note in dict.fromkeys(note for result in results if result.applied for note in result.applied.notes):
        say(note)
    refused = [str(result.tokens) for result in results if result.turned_down]
    if refused and not how["emulated"]:
        say(f"not confirmed at {', '.join(refused)} tokens: keep BF16 there, as apply_fp8(..., confirm=True) does")


def _rows(results: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for result in results:
        run_as = {"tokens": result.tokens, "run_as": f"{result.sequences}x{result.length}"}
        if result.failure is not None:
            empty = {"speedup": "", "between": "", "planned": "", "fp8_layers": ""}
            rows.append(run_as | {"block": "all", "answer": "unmeasured", "taken": "bf16"} | empty)
        for block in result.blocks:
            between = "" if block.low is None else f"{block.low:.3f}x to {block.high:.3f}x"
            figures = {"speedup": "" if block.speedup is None else f"{block.speedup:.3f}x", "between": between}
            layers = {
                "planned": f"{block.planned} of {block.layers}",
                "fp8_layers": f"{block.fp8_layers} of {block.layers}",
            }
            rows.append(
                run_as | {"block": block.block, "answer": block.answer, "taken": block.taken} | figures | layers
            )
    return rows
