"""The verb `confirm-policy`: is a policy's plan faster in whole blocks, on this GPU, before there is training code?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bitplan.cli.show import Json, Recipe, progress, say, show_json, table

EMULATED = "FP8 is emulated on the CPU: this shows that the command runs; no speed is shown by it"


def confirm_policy(
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
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option("--device", help="cpu emulates FP8: to try the command, not to decide.")
    ] = "cuda",
    as_json: Json = False,
) -> None:
    """Time whole blocks in BF16, as a policy plans and all FP8, in turns. Exit 1 when FP8 of a plan is turned down.

    Exit 1 too when the policy knows none of the layers.

    The blocks are built by transformers from the config.json, with random weights; nothing is downloaded. What is shown
    to be fastest is taken, for each token count by itself; BF16 where nothing is.

    Example: bitplan confirm-policy policy.json config.json --tokens 64,128 --device cpu
    """
    counts = _counts(tokens)
    from bitplan.plan.fp8.policy import load_policy
    from bitplan.runtime.fp8.bench import confirm_policy as fp8_confirm_policy
    from bitplan.runtime.fp8.bench.confirm_model import plan_small_model

    rules = load_policy(policy)
    trial = fp8_confirm_policy.BlockTiming(timing, compiled, recipe, tp)
    place = fp8_confirm_policy.require_device(device, rules, recipe)
    small = plan_small_model(model, tp=tp)
    with progress("confirming", len(counts)) as advance:
        results = fp8_confirm_policy.confirm_policy(
            rules, small, counts, place, trial, on_count=lambda count: advance(1, f"{count} tokens")
        )
    how = {"policy": str(policy), "model": small.where, "device": _name(place), "emulated": place.type == "cpu"}
    how |= {"timing": timing, "compiled": compiled, "recipe": recipe, "tp": tp}
    how |= {"blocks_built": small.blocks, "of_blocks": small.of_blocks, "why": small.reason}
    if as_json:
        show_json(how | {"counts": [result.to_dict() for result in results]})
    else:
        _show(how, results)
    raise typer.Exit(1 if any(result.turned_down or result.unknown for result in results) else 0)


def _counts(text: str) -> list[int]:
    from bitplan.plan.fp8.vocabulary import Fp8Error, is_count

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
