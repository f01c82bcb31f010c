"""Prints the demo's results: a short table for each part, and one line of explanation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitplan.cli.demo.plan import EIGHT_BITS, FOUR_BITS, worst_and_best
from bitplan.cli.demo.quality import BASELINE, PLAN
from bitplan.cli.show import human_bytes, say, table
from bitplan.searching.result import SearchResult

MOVES_SHOWN = 8
LAYERS_SHOWN = 3


def begin(line: str) -> None:
    """The first line of a part, after an empty one."""
    print()
    say(line)


def say_start(figures: Mapping[str, Any], output: Path) -> None:
    say(f"bitplan demo: {figures['weights']:,} weights, seed {figures['seed']}; files go to {output}/")


def show_training(figures: Mapping[str, Any]) -> None:
    moves = figures["moves"]
    first_step = moves[0]["step"] if moves else None
    first = [move for move in moves if move["step"] == first_step]
    later = [move for move in moves if move["step"] != first_step]
    rule = figures["thresholds"]
    where = "a simulated device" if figures["device"] == "cpu" else figures["device"]
    begin(
        f"1. Trained {figures['steps']} steps in {figures['seconds']} s, loss {figures['first_loss']:.2f} to "
        f"{figures['last_loss']:.2f}; {figures['blocks']} blocks streamed through "
        f"{figures['ring_slots']} slots of {where}"
    )
    if first:
        summary = f"of {figures['layers']} layers {len(first)} went to INT8 at the first decision, step {first_step}"
        say(summary if later else f"{summary}; none changed after that")
    if later:
        table(f"{len(later)} changes after that{_more(later)}", [_move(move) for move in later[:MOVES_SHOWN]])
    say(
        f"why: every {rule['update_interval_steps']} steps each layer is scored by its gradient, relative to the other "
        f"layers', and by INT8's error; first score < {rule['first_int8_below']}: INT8; later BF16 -> INT8 "
        f"below {rule['later_int8_below']}, INT8 -> BF16 from {rule['bf16_from']} on (the policy's defaults)"
    )
    whole = figures["bytes_sent"] + figures["bytes_not_sent"]
    counts = ", ".join(f"{count} {name.upper()}" for name, count in sorted(figures["layers_by_precision"].items()))
    say(f"end: {counts}; {figures['bytes_not_sent'] / whole:.0%} of the bytes of an all-BF16 run were not sent")


def _more(rows: Sequence[Any]) -> str:
    return f", the first {MOVES_SHOWN} of them" if len(rows) > MOVES_SHOWN else ""


def _move(move: Mapping[str, Any]) -> dict[str, Any]:
    change = f"{move['before'].upper()} -> {move['after'].upper()}"
    return {"step": move["step"], "layer": move["layer"], "change": change, "why": move["reason"]}


def show_calibration(errors: Mapping[str, Mapping[str, float]]) -> None:
    fmt = FOUR_BITS[0]
    shown = worst_and_best(errors, fmt, LAYERS_SHOWN)
    rows = [
        {
            "layer": name,
            "best 8 bits": _best(errors[name], EIGHT_BITS),
            "best 4 bits": _best(errors[name], FOUR_BITS),
            "worst 4 bits": _best(errors[name], FOUR_BITS, max),
        }
        for name, _ in shown
    ]
    begin("2. Calibrated: relative error of each layer's output, on real activations")
    table(f"the {LAYERS_SHOWN} worst layers in {fmt}, then the {LAYERS_SHOWN} best, of {len(errors)}", rows)


def _best(row: Mapping[str, float], formats: Sequence[str], choose: Callable[..., str] = min) -> str:
    name = choose(formats, key=lambda fmt: row[fmt])
    return f"{row[name]:.4f}  {name}"


def show_plan(found: SearchResult) -> None:
    plan, evidence = found.plan, found.evidence
    total = plan.bytes_by_role_and_format()[-1]
    begin(f"3. Searched: {found.goal}; measured on {found.reference.tokens:,} characters that were held out")
    rows = [
        {
            "plan": f"* {each.label}" if each is found.winner else each.label,
            "bits/weight": f"{evidence.bits(each.nbytes):.2f}",
            "predicted KL": f"{each.predicted:.5f}",
            "KL, nats": f"{each.kl.mean:.5f}",
            "perplexity": f"{each.quality.perplexity:.3f}",
        }
        for each in found.rivals
    ]
    table(f"{len(plan)} tensors, {human_bytes(total.nbytes)}: {total.ratio or 0:.2f} times smaller than bfloat16", rows)
    if found.lost:
        say(f"the search lost: {found.winner.label} is better and within the goal, so plan.json is that")
    costs = {name: choice.evidence["nats"] for name, choice in plan.items() if choice.evidence}
    name = max(costs, key=lambda each: costs[each])
    say(f"such as {name}, {plan[name].format}: {plan[name].reason}")


def show_formats(rows: Sequence[Mapping[str, Any]], tokens: int) -> None:
    bf16 = next(row for row in rows if row["format"] == BASELINE)
    shown = [
        {
            "format": f"* {row['format']}" if row["format"] == PLAN else row["format"],
            "file": human_bytes(row["bytes"]),
            "of bf16": f"{row['bytes'] / bf16['bytes']:.2f}",
            "cosine": f"{row['cosine']:.6f}",
            "SQNR dB": "exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}",
            "perplexity": f"{row['perplexity']:.3f}",
            "to bf16": f"{row['perplexity'] / bf16['perplexity'] - 1:+.2%}",
        }
        for row in rows
    ]
    begin("4. Packed, saved, loaded again and measured")
    table(f"perplexity per character, {tokens:,} held-out characters predicted; * is the plan above", shown)


def show_trees(runs: Sequence[Mapping[str, Any]]) -> None:
    shown = [
        {
            "gradients": run["contender"].removeprefix("bitplan_").upper(),
            "bytes a row": f"{run['gradient_bytes_a_row']:.0f}",
            "training": f"{run['train_s']:.2f} s",
            "AUC": f"{run['auc']:.4f}",
            "compiling, apart": f"{run['compile_s']:.1f} s",
        }
        for run in runs
    ]
    first = runs[0]
    begin(f"5. Boosted {first['trees']} trees on a made table")
    table(f"{first['rows']:,} rows of {first['features']} features; median of {len(first['train_s_samples'])}", shown)


def show_gpu(gpu: str, fp8: Sequence[Mapping[str, Any]], fused: Sequence[Mapping[str, Any]]) -> None:
    begin(f"6. Measured on {gpu}")
    table("a block's linear layers, FP8 against BF16", list(fp8))
    rows = [
        {key: "" if value is None else f"{value:.4f}" if key.endswith("_ms") else value for key, value in row.items()}
        for row in fused
    ]
    table("products with packed weights, milliseconds by rows of input", rows)


def say_end(output: Path) -> None:
    begin(f"files:  {output}/ (manifest.json, plan.json, model.plan.safetensors, demo.json and the records)")
    say(f"next:   bitplan inspect {output}/model.plan.safetensors")
    say(f"        bitplan check {output}/manifest.json {output}/model.plan.safetensors")
    say(f"        bitplan formats --on {output}/model.float32.safetensors:blocks.0.up.weight")
    say(f"report: {output}/report.html")
