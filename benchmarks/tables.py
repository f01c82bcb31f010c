"""The tables of the README and docs, made from the results, so that they quote nothing else.

python benchmarks/tables.py            print them
python benchmarks/tables.py --write    put each in the place of the table with the same heading
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CPU_FORMATS = ("int8_row", "q4_0_gguf", "mxfp4", "bfloat16")
STREAMED = {"bf16": "BF16", "int8": "INT8", "mix60": "60% INT8"}
TASKS = {"lora": "adapters", "full": "all weights"}
GPU_FORMATS = ("int8_row", "int8_g128", "fp8_e4m3_row", "mxfp4")


def speed_table() -> str:
    """Share of a plain copy's bandwidth, both ways, on each machine measured."""
    cpu, gpu = (_read(name) for name in ("formats_neoverse_n1", "formats_nvidia_h200"))
    lines = [
        f"| | {cpu['machine']['cpu']}, {cpu['machine']['cores']} cores: encode | decode | against gguf-py "
        f"| {gpu['machine']['gpu']}: encode | decode |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(CPU_FORMATS + GPU_FORMATS):
        on_cpu = [_share(cpu, name, way, "float32") if name in CPU_FORMATS else "" for way in ("encode", "decode")]
        on_gpu = [_share(gpu, name, way, "bfloat16") if name in GPU_FORMATS else "" for way in ("encode", "decode")]
        lines.append("| " + " | ".join([name, *on_cpu, _against_gguf(cpu, name), *on_gpu]) + " |")
    return "\n".join(lines)


def demo_table() -> str:
    """What each format did to the demo's model."""
    lines = ["| format | file | cosine | SQNR, dB | perplexity |", "|---|---|---|---|---|"]
    for row in _read("demo")["formats"]:
        sqnr = "exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}"
        size = f"{row['bytes'] / 1000:.0f} kB"
        lines.append(f"| {row['format']} | {size} | {row['cosine']:.6f} | {sqnr} | {row['perplexity']:.3f} |")
    return "\n".join(lines)


def quality_table() -> str:
    """What each format did to a real language model."""
    return _quality("quality_smollm2_135m", "weights")


def small_quality_table() -> str:
    """The same for a model whose weights were never quantized before, with mixed layouts."""
    return _quality("quality_lm26m", "weights of the 26M llama")


def _quality(name: str, heading: str) -> str:
    lines = [
        f"| {heading} | bits/weight | perplexity | NLL difference | KL | KL / floor | same top token |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = _read(name)["rows"]
    floor = next(row["kl"]["mean"] for row in rows if row["format"].startswith("noise floor"))
    for row in rows:
        cells = [row["format"], f"{row['bits_per_weight']:.2f}", f"{row['perplexity']:.2f}"]
        if "kl" in row:
            cells += [_with_error(row["nll_difference"], "+"), _with_error(row["kl"], "")]
            ratio = row["kl"]["mean"] / floor
            cells += [f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}", f"{row['top1_agreement']['mean']:.1%}"]
        else:
            low, high = row["perplexity_interval"]
            cells[-1] += f" ({low:.1f} to {high:.1f})"
            cells += ["reference", "", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def grid_table() -> str:
    """Does it matter that the reference's weights lie on a 4-bit grid?"""
    lines = ["| format | on Q4_1's grid, dB | smeared, dB |", "|---|---|---|"]
    for name, sqnr in _read("quality_smollm2_135m")["grid"].items():
        lines.append(f"| {name} | {sqnr['on_grid']:.2f} | {sqnr['smeared']:.2f} |")
    return "\n".join(lines)


def fused_table() -> str:
    """One row of inputs over packed weights, against BF16 and against the memory's bandwidth."""
    lines = ["| weight | format | time, µs | share of a copy | times BF16 |", "|---|---|---|---|---|"]
    for row in _read("fused_matmul_nvidia_h200")["batch1"]:
        outputs, inputs = row["shape"]
        cells = [f"{outputs} x {inputs}", row["format"], f"{row['fused_us']['median_us']:.1f}"]
        lines.append("| " + " | ".join([*cells, f"{row['share_of_copy']:.0%}", f"{row['times_bf16']:.2f}"]) + " |")
    return "\n".join(lines)


def decode_table() -> str:
    """Whole llamas of 8B's shape, token by token, compiled and as a CUDA graph."""
    return _decode("decode_8b_nvidia_h200", "8b", "llama, 8B's shape, 16 layers", ("graph", "overlapped", "prefill"))


def decode_small_table() -> str:
    """The same for 1B's shape."""
    return _decode("decode_nvidia_h200", "1b", "llama, 1B's shape, 16 layers", ("graph", "overlapped"))


def _decode(name: str, size: str, heading: str, modes: tuple[str, ...]) -> str:
    rows = [row for row in _read(name)["rows"] if row.get("size") == size and row["mode"] in modes]
    lines = [
        f"| {heading} | tokens at once | BF16, ms | ms | times BF16 | floor, ms | memory, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = {(row["batch"], row["mode"]): row["ms"] for row in rows if row["format"] == "bfloat16"}
    for row in rows:
        if row["format"] == "bfloat16":
            continue
        bf16 = plain[row["batch"], row["mode"]]
        if row["mode"] == "overlapped":
            bf16 = min(bf16, plain[row["batch"], "graph"])
        tokens = {"prefill": "2048 (prefill)", "overlapped": f"{row['batch']} (`enable_pdl`)"}.get(
            row["mode"], row["batch"]
        )
        cells = [row["format"], str(tokens), f"{bf16:.2f}", f"{row['ms']:.2f}", f"{bf16 / row['ms']:.2f}"]
        cells += [f"{row['floor_ms']:.2f}" if "floor_ms" in row else ""]
        cells += [f"{row['memory_gib']:.1f}" if "memory_gib" in row else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def launched_table() -> str:
    """One token launch by launch, compiled, by transformers' generate, and replayed: all formats in turns."""
    labels = {
        "eager": "eager",
        "compiled in turns": "compiled layers, no graph",
        "generate after": "transformers' `generate`",
        "generate after, bitplan's loop": "`bitplan generate`: a graph",
    }
    names = ("decode_8b_nvidia_h200", "decode_generate_nvidia_h200")
    rows = [row for name in names for row in _read(name)["rows"] if row["mode"] in labels]
    times = {(row["mode"], row["format"]): f"{row['ms']:.1f}" for row in rows}
    formats = list(dict.fromkeys(row["format"] for row in rows))
    lines = [f"| ms a token | {' | '.join(formats)} |", "|---" * (len(formats) + 1) + "|"]
    for mode in labels:
        lines.append(f"| {labels[mode]} | " + " | ".join(times.get((mode, fmt), "") for fmt in formats) + " |")
    return "\n".join(lines)


def auto_table() -> str:
    """What `auto` picks by the number of rows: when nothing may be kept expanded, and with a tile cache."""
    rows = _read("fused_matmul_nvidia_h200")["auto"]
    names = list(dict.fromkeys(row["format"] for row in rows))
    head = " | ".join(f"{name}, packed | times BF16 | with a cache | times BF16" for name in names)
    lines = [f"| rows | BF16, µs | {head} |", "|---|---|" + "---|---|---|---|" * len(names)]
    for count in dict.fromkeys(row["rows"] for row in rows):
        result = {row["format"]: row for row in rows if row["rows"] == count}
        cells = [str(count), f"{result[names[0]]['bf16_us']['median_us']:.1f}"]
        for name in names:
            for kind in ("packed", "cached"):
                picked = result[name][kind]
                cells += [picked["strategy"].replace("_", " "), f"{picked['times_bf16']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def streaming_table() -> str:
    """Steps of a streamed model against the larger of computing and copying, and against other ways to offload."""
    rows = _read("streaming_nvidia_h200")["rows"]
    times = {(row["tokens"], row["variant"]): row["median_ms"] for row in rows}
    lines = [
        "| tokens a step | blocks cross as | step, ms | computing or copying, ms | over it | copying at | stall "
        "| one block ahead | pageable |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "times_bound" not in row:
            continue
        bound = "copying" if row["is_transfer_bound"] else "computing"
        others = [times.get((row["tokens"], name)) for name in ("one-ahead", "pageable")]
        cells = [f"{row['tokens']:,}", STREAMED[row["variant"]], f"{row['median_ms']:.0f}"]
        cells += [f"{bound} {row['bound_ms']:.0f}", f"{row['times_bound'] - 1:+.1%}", f"{row['h2d_gb_per_s']:.1f} GB/s"]
        slower = ["" if other is None else f"{other / row['median_ms']:.2f}x" for other in others]
        lines.append("| " + " | ".join([*cells, f"{row['stall_share']:.0%}", *slower]) + " |")
    return "\n".join(lines)


def selective_table() -> str:
    """Fine-tuning in seven arms: the loss, its distance from BF16 seed by seed, and the bytes that crossed."""
    lines = [
        "| trained | arm | validation loss, mean (lowest to highest seed) | above BF16, same seed | MB sent a step "
        "| of BF16's |",
        "|---|---|---|---|---|---|",
    ]
    rows = _read("selective_precision_nvidia_h200")["arms"]
    whole = {row["task"]: row["bytes_h2d_per_step"] for row in rows if row["arm"] == "bf16"}
    for row in rows:
        loss = f"{row['loss_mean']:.4f} ({row['loss_min']:.4f} to {row['loss_max']:.4f})"
        apart = f"{row['above_bf16_mean']:+.4f} ({row['above_bf16_min']:+.4f} to {row['above_bf16_max']:+.4f})"
        sent = row["bytes_h2d_per_step"]
        cells = [TASKS[row["task"]], row["arm"], loss, "" if row["arm"] == "bf16" else apart, f"{sent / 1e6:.1f}"]
        lines.append("| " + " | ".join([*cells, f"{sent / whole[row['task']]:.0%}"]) + " |")
    return "\n".join(lines)


def fp8_linear_table() -> str:
    """One linear layer forward and backward, casts included, by the tensorwise recipe."""
    lines = [
        "| layer | tokens | BF16, ms | FP8 | weight cast shared by two micro-batches | weight cast not counted "
        "| FP8, with the host |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _read("fp8_linear_nvidia_h200")["linears"]:
        result = row["graph"]
        cells = [row["layer"], f"{row['tokens']:,}", f"{result['bf16']['median_ms']:.2f}"]
        cells += [f"{result[name]['speedup']:.2f}x" for name in ("tensorwise", "tensorwise x2", "tensorwise held")]
        lines.append("| " + " | ".join([*cells, f"{row['eager']['tensorwise']['speedup']:.2f}x"]) + " |")
    return "\n".join(lines)


def fp8_cast_table() -> str:
    """Casts that write both layouts, against a device copy."""
    lines = ["| matrix | recipe | time, µs | share of a copy |", "|---|---|---|---|"]
    for row in _read("fp8_linear_nvidia_h200")["casts"]:
        if row["layouts"] == "both":
            lines.append(f"| {row['tensor']} | {row['recipe']} | {row['median_ms'] * 1e3:.0f} | {row['share']:.0%} |")
    return "\n".join(lines)


def fp8_layers_table() -> str:
    """Two llama layers, compiled, forward and backward, at token counts that the policy was measured at."""
    lines = [
        "| layers | run | tokens | BF16, ms | all FP8 | adaptive | confirmed | torchao tensorwise | torchao rowwise |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in _layer_rows("measured"):
        cells = [*_layer_cells(row), f"{row['arms']['bf16']['median_ms']:.2f}"]
        names = ("full", "adaptive", "confirmed", "torchao tensorwise", "torchao rowwise")
        lines.append("| " + " | ".join([*cells, *(_times(row["arms"].get(name)) for name in names)]) + " |")
    return "\n".join(lines)


def fp8_full_table() -> str:
    """Two llama layers, all FP8, by the kernels as they are now."""
    lines = ["| layers, now | run | tokens | BF16, ms | all FP8 | torchao tensorwise |", "|---|---|---|---|---|---|"]
    rows = [*_read("fp8_full_nvidia_h200")["rows"], *_read("fp8_launched_nvidia_h200")["rows"]]
    for row in sorted(rows, key=lambda row: (row["size"], row["timing"], row["tokens"])):
        cells = [*_layer_cells(row), f"{row['arms']['bf16']['median_ms']:.2f}"]
        cells += [_times(row["arms"].get(name)) for name in ("full", "torchao tensorwise")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fp8_profile_table() -> str:
    """Where the time of two llama layers goes."""
    kinds = ("products", "attention", "casts", "checks", "norms", "others", "gaps")
    lines = ["| us of a step | tokens | all | " + " | ".join(kinds) + " | bound |", "|---" * (len(kinds) + 4) + "|"]
    for row in sorted(_read("fp8_profile_nvidia_h200")["rows"], key=lambda row: (row["tokens"], row["arm"])):
        cells = [{"bf16": "BF16", "full": "all FP8"}[row["arm"]], f"{row['tokens']:,}", f"{row['us']:,.0f}"]
        cells += [f"{row['kinds'].get(kind, 0):,.0f}" for kind in kinds]
        lines.append("| " + " | ".join([*cells, f"{row['bound_us']:,.0f}" if "bound_us" in row else ""]) + " |")
    return "\n".join(lines)


def fp8_fsdp_table() -> str:
    """A training step under FSDP2, one process on one GPU."""
    lines = [
        "| FSDP2, one GPU, tokens a step | BF16, ms | FP8, weights gathered in BF16 | FP8, weights gathered in FP8 |",
        "|---|---|---|---|",
    ]
    for row in _read("fp8_fsdp_nvidia_h200")["rows"]:
        times = {arm: each["median_ms"] for arm, each in row["arms"].items()}
        ratios = [f"{times['bf16'] / times[arm]:.2f}x" for arm in ("fp8", "fp8 gathered")]
        lines.append("| " + " | ".join([f"{row['tokens']:,}", f"{times['bf16']:.1f}", *ratios]) + " |")
    return "\n".join(lines)


def fp8_held_out_table() -> str:
    """The same at counts and for sizes that the policy does not know."""
    lines = [
        "| not known | layers | run | tokens | all FP8 | adaptive | confirmed | adaptive over the better | confirmed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for part, unknown in (("held-out", "count"), ("shapes", "layers")):
        for row in _layer_rows(part):
            cells = [unknown, *_layer_cells(row)]
            cells += [_times(row["arms"].get(name)) for name in ("full", "adaptive", "confirmed")]
            cells += [f"{row[key]['ratio']['speedup']:.3f}" for key in ("best", "confirmed_best")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fp8_training_table() -> str:
    """A language model trained from scratch in each precision."""
    document = _read("fp8_training_nvidia_h200")
    lines = ["| arm | layers in FP8 | held-out loss | each seed | last training loss |", "|---|---|---|---|---|"]
    for arm, spread in document["losses"]["held_out_loss"].items():
        mine = [run for run in document["runs"] if run["arm"] == arm]
        seeds = ", ".join(f"{run['held_out_loss']:.4f}" for run in mine)
        name = {"bf16": "BF16", "full": "all FP8"}.get(arm, arm)
        last = document["losses"]["last_loss"][arm]["mean"]
        count = f"{mine[0]['fp8_layers']} of {4 * document['layers']}"  # qkv, proj, fc1 and fc2 of each block
        lines.append(f"| {name} | {count} | {spread['mean']:.4f} | {seeds} | {last:.4f} |")
    return "\n".join(lines)


def fp8_training_speed_table() -> str:
    """A llama of a billion parameters on real text: speed, loss and memory of every arm."""
    lines = [
        "| 1B llama, 16,384 tokens a step | layers in FP8 | tokens a second | times BF16 "
        "| held-out loss, mean (lowest to highest seed) | seeds | peak memory, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    if not (RESULTS / "fp8_training_1b_nvidia_h200.json").exists():
        return "\n".join([*lines, "| not measured yet | | | | | | |"])
    document = _read("fp8_training_1b_nvidia_h200")
    for arm, spread in document["losses"]["held_out_loss"].items():
        mine = [run for run in document["runs"] if run["arm"] == arm]
        name = {"bf16": "BF16", "full": "all FP8", "adaptive": "adaptive FP8"}.get(arm, arm)
        cells = [name, f"{mine[0]['fp8_layers']} of {4 * document['layers']}"]
        cells += [f"{document['tokens_a_second'][arm]:,.0f}", f"{document['times_bf16'][arm]:.2f}x"]
        cells += [f"{spread['mean']:.4f} ({spread['low']:.4f} to {spread['high']:.4f})", str(len(mine))]
        lines.append("| " + " | ".join([*cells, f"{document['peak_bytes'][arm] / 2**30:.1f}"]) + " |")
    return "\n".join(lines)


def fp8_guesses_table() -> str:
    """Rules that guess a gradient's scale: how often they are wrong, and what their room costs."""
    runs = {"llama_1b": "1B llama, 16,384 tokens", "smooth": "small llama, 512 tokens", "jumps": "the same, with jumps"}
    lines = [
        "| wrong guesses (too small + too large), octaves above the definition | " + " | ".join(runs.values()) + " |",
        "|---" * (len(runs) + 1) + "|",
    ]
    rules: dict[str, dict[str, str]] = {}
    for row in _read("fp8_guesses")["rows"]:
        name = f"room of {row['room']}" if row["room"] else "the last scale"
        name += ", wrong ones to the middle" if row["middle"] else ""
        name += ", follows the layer above" if row["drift"] else ""
        small, large, above = row["too_small"], row["too_large"], row["octaves_above"]
        cells = rules.setdefault(f"**{name}**" if row["room"] == 5 and row["drift"] else name, {})
        cells[row["run"]] = f"{small + large:.1%} ({small:.1%} + {large:.1%}), {above:.1f}"
    return "\n".join(
        lines + [f"| {name} | {' | '.join(cells[run] for run in runs)} |" for name, cells in rules.items()]
    )


def _layer_rows(part: str) -> list[dict[str, Any]]:
    rows = [row for row in _read("fp8_layers_nvidia_h200")["rows"] if row["part"] == part]
    return sorted(rows, key=lambda row: (row["size"], row["timing"], row["tokens"]))


def _layer_cells(row: dict[str, Any]) -> list[str]:
    hidden, _, width = row["size"].removeprefix("h").partition("_ffn")
    run = {"graph": "as a CUDA graph", "eager": "one by one"}.get(row["timing"], row["timing"])
    return [f"{hidden} x {width}", run, f"{row['tokens']:,}"]


def _times(arm: dict[str, Any] | None) -> str:
    if arm is None:
        return ""
    ratio = arm.get("ratio")
    if not ratio:
        return str(arm["status"])
    return f"{ratio['speedup']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def fp8_grouped_table() -> str:
    """Experts, forward and backward: the best FP8 arm of each layer that casts its weights."""
    lines = [
        "| experts | layer | routing | BF16, ms | best FP8 | by "
        "| weight cast shared by two micro-batches | not counted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = _read("fp8_grouped_nvidia_h200")["rows"]
    later = _read("fp8_grouped_micro_batches_nvidia_h200")["rows"]
    shared = {(row["part"], row["layer"], row["routing"], row["arm"]): row for row in [*rows, *later]}
    for key in dict.fromkeys((row["part"], row["layer"], row["routing"]) for row in rows):
        mine = {row["arm"]: row for row in rows if (row["part"], row["layer"], row["routing"]) == key}
        candidates = [
            row for arm, row in mine.items() if arm != "bf16" and not arm.endswith(("reused", "micro-batches"))
        ]
        best = max(candidates, key=lambda row: row["times_bf16"])
        cells = [key[0], f"{key[1]} {best['shape'][0]}x{best['shape'][1]}", key[2], f"{mine['bf16']['median_ms']:.2f}"]
        arms = [shared.get((*key, f"tensorwise gluon, {arm}")) for arm in ("two micro-batches", "reused")]
        cells += [f"{best['times_bf16']:.2f}x", best["arm"]]
        cells += [f"{arm['times_bf16']:.2f}x" if arm else "" for arm in arms]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def trees_table() -> str:
    """Training and prediction of boosted trees, each in a process of its own; means over seeds."""
    document = _read("trees_neoverse_n1")
    lines = [
        "| table | trainer | training, s | AUC | prediction, µs a row | memory of training, MiB "
        "| of the process, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    named = [(f"{run['rows']:,} rows", run) for run in document["runs"]] + [
        ("flights", run) for run in document["real"]
    ]
    for table, contender in dict.fromkeys((table, run["contender"]) for table, run in named):
        mine = [run for name, run in named if (name, run["contender"]) == (table, contender)]
        mean = {key: statistics.fmean(run[key] for run in mine) for key in ("train_s", "auc", "predict_us_per_row")}
        memory = [f"{statistics.fmean(run[key] for run in mine):.0f}" for key in ("training_mib", "peak_mib")]
        cells = [table, contender.replace("_", " "), f"{mean['train_s']:.1f}", f"{mean['auc']:.4f}"]
        lines.append("| " + " | ".join([*cells, f"{mean['predict_us_per_row']:.1f}", *memory]) + " |")
    return "\n".join(lines)


def trees_fits_table() -> str:
    """Whole fits on a host with 16 cores: ours beside the fastest other; * where they take longer than wanted."""
    document = _read("trees_fits_xeon_h200_host")
    times = {
        (run["table"], run["trees"], run["threads"], run["contender"]): run
        for run in document["runs"]
        if "seconds" in run
    }
    lines = [
        "| table, trees | threads | i16, s | f32, s | fastest other, s | | i16, of its time | f32 "
        "| binning of i16, of the other |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kept = ("table", "trees", "threads")
    for ratio in sorted(
        document["ratios"], key=lambda ratio: tuple(ratio[name] for name in ("rows", "features", *kept))
    ):
        cell = ratio["table"], ratio["trees"], ratio["threads"]
        i16, f32, other = (times.get((*cell, name)) for name in ("bitplan_i16", "bitplan_f32", ratio["best_other"]))
        cells = [_trees_table(ratio), str(ratio["threads"])]
        cells += [_seconds_of_fits(run) if run else "" for run in (i16, f32, other)]
        cells += [_trainer(ratio["best_other"])]
        wanted = {"i16": 1.0 if ratio["rows"] < 10**5 else 0.6 if ratio["threads"] <= 8 else 0.7, "f32": 0.9}
        cells += [
            f"{ratio[name]:.2f}{'*' * (ratio[name] > most)}" if name in ratio else "" for name, most in wanted.items()
        ]
        cells += [", ".join(f"{run['binning_share']:.0%}" for run in (i16, other) if run)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _seconds_of_fits(run: dict[str, Any]) -> str:
    """The median, and that it is one fit where it is."""
    return f"{run['seconds']:.2f}{' (one fit)' * (len(run['all_seconds']) == 1)}"


def trees_precision_table() -> str:
    """Held-out losses of quantized gradients beside float32, for targets that are hard to quantize."""
    variants = {
        "f32_other": "f32, 254 bins",
        "i16": "i16",
        "i16_nearest": "i16, to nearest",
        "i8": "i8",
        "i16_not_renewed": "i16, leaves not renewed",
    }
    lines = ["| target | " + " | ".join(variants.values()) + " |", "|---|" + "---|" * len(variants)]
    for row in _read("trees_precision")["targets"]:
        cells = [row["target"], *(f"{row['more_than_f32'][name]:+.1%}" for name in variants)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def trees_gpu_table() -> str:
    """Trees grown on a GPU, beside LightGBM on the cores of its host."""
    lines = [
        "| rows | i16 | i8 | until the first tree | a tree | its kernels | floor | GPU memory "
        "| LightGBM, quantized, 16 threads |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in _read("trees_gpu_nvidia_h200")["rows"]:
        ours, phases = row["i16"], row["phases"]
        cells = [f"{row['rows'] // 10**6}M", f"{ours['fit_s']:.2f} s", f"{row['i8']['fit_s']:.2f} s"]
        cells += [f"{ours['before_first_tree_s']:.2f} s", f"{ours['tree_ms']:.1f} ms"]
        trees_ms = phases["all_kernels_ms"] - phases["kernels"]["bin_numbers"]["ms"]  # binned once, not for each tree
        cells += [f"{trees_ms:.1f} ms", f"{phases['floor_ms']:.2f} ms", f"{ours['peak_gib']:.1f} GiB"]
        other = f"{row['lightgbm_s']:.1f} s ({row['times_as_fast']:.1f} times)" if "lightgbm_s" in row else "not run"
        lines.append("| " + " | ".join([*cells, other]) + " |")
    return "\n".join(lines)


def trees_kinds_table() -> str:
    """A tree on a GPU and on the cores of its host, for what its kernels leave to torch."""
    document = _read("trees_gpu_1m_nvidia_h200")
    row = document["rows"][0]
    times = document["kinds"] | {f"{row['rows'] // 10**6}M rows, plain": row["i16"]}
    lines = ["| trees | H200, ms a tree | 16 cores of its host | the same trees |", "|---" * 4 + "|"]
    for name, each in times.items():
        same = "yes" if each["same_trees_as_cpu"] else "no"
        lines.append(f"| {name} | {each['tree_ms']:.1f} | {each['cpu_tree_ms']:.1f} | {same} |")
    return "\n".join(lines)


def _trees_table(run: dict[str, Any]) -> str:
    rows = f"{run['rows'] // 10**6}M" if run["rows"] >= 10**6 else f"{run['rows'] // 1000}k"
    named = {"regression": ", a number", "classes": ", ten classes", "flights": ", like flights"}
    task = named.get(run.get("task", "binary"), "")
    return f"{rows} x {run['features']}{task}, {run['trees']} of {run['leaves']} leaves"


def _trainer(contender: str) -> str:
    kind, _, variant = contender.partition("_")
    names = {"lightgbm": "LightGBM", "xgboost": "XGBoost", "sklearn": "scikit-learn"}
    return " ".join([names[kind], variant.replace("_", ", by ").replace("f32", "F32")]).strip()


def _with_error(figure: dict[str, float], sign: str) -> str:
    size = abs(figure["mean"])
    style = ".3f" if size >= 0.1 else ".4f" if size >= 0.01 else ".6f" if size >= 1e-5 else ".0e"
    return f"{figure['mean']:{sign}{style}} ± {figure['standard_error']:{style}}"


def fit_table() -> str:
    """Plans of `fit` within a memory, and what the process was predicted and measured to take."""
    result = _read("fit_lm26m")
    lines = [
        "| MB for weights, K and V | KL: joint | K, V in 8 bits | as they are | MB predicted | measured |",
        "|---" * 6 + "|",
    ]
    for row in result["rows"]:
        plans = row["plans"]
        fixed = [plans.get(label) for label in ("K and V in 8 bits", "K and V as they are")]
        shown = " | ".join("no room" if kl is None else f"{kl:.4f}" for kl in fixed)
        sizes = " | ".join(f"{row[key] / 1e6:.0f}" for key in ("predicted_bytes", "measured_bytes"))
        room = (row["weights_bytes"] + row["kv_bytes"]) / 1e6
        lines.append(f"| {room:.1f} | {plans['joint plan']:.4f} | {shown} | {sizes} |")
    return "\n".join(lines)


def prompts_table() -> str:
    """Eager prompts through transformers' own llama: milliseconds of BF16, and each format's speed in times of its."""
    rows = [row for row in _read("decode_prompts_nvidia_h200")["rows"] if row["mode"] == "prompt"]
    formats = [fmt for fmt in dict.fromkeys(row["format"] for row in rows) if fmt != "bfloat16"]
    lines = [f"| shape, tokens of the prompt | BF16, ms | {' | '.join(formats)} |", "|---" * (len(formats) + 2) + "|"]
    for size, tokens in dict.fromkeys((row["size"], row["prompt"]) for row in rows):
        of = {row["format"]: row for row in rows if (row["size"], row["prompt"]) == (size, tokens)}
        ratios = " | ".join(f"{of[fmt]['times_bfloat16']:.2f}" for fmt in formats)
        lines.append(f"| {size.upper()}, {tokens:,} | {of['bfloat16']['ms']:.1f} | {ratios} |")
    return "\n".join(lines)


def fp8_styles_table() -> str:
    """Two layers as four projects write them: times BF16, ours and torchao's."""
    styles = {
        "llama": "transformers' llama",
        "titan": "torchtitan's llama",
        "fused": "one qkv, one gate_up",
        "nanogpt": "nanoGPT (LayerNorm, GELU, biases)",
    }
    rows = _read("fp8_styles_nvidia_h200")["rows"]
    lines = [
        "| two layers | size | tokens | one by one: FP8 | torchao | as a CUDA graph: FP8 | torchao |",
        "|---" * 7 + "|",
    ]
    for style, size, tokens in dict.fromkeys((row["style"], row["size"], row["tokens"]) for row in rows):
        arms = {
            row["timing"]: row["arms"]
            for row in rows
            if (row["style"], row["size"], row["tokens"]) == (style, size, tokens)
        }
        cells = [
            f"{arms[timing][arm]['ratio']['speedup']:.2f}"
            for timing in ("eager", "graph")
            for arm in ("fp8", "torchao tensorwise")
        ]
        lines.append(f"| {styles[style]} | {size.replace('_', ', ')} | {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def _rows(document: dict[str, Any], name: str, way: str) -> dict[str, dict[str, Any]]:
    return {row["dtype"]: row for row in document["rows"] if (row["format"], row["way"]) == (name, way)}


def _share(document: dict[str, Any], name: str, way: str, dtype: str) -> str:
    return f"{_rows(document, name, way)[dtype]['share_of_copy']:.0%}"


def _against_gguf(document: dict[str, Any], name: str) -> str:
    times = [
        _rows(document, name, way).get("float32", {}).get("times_faster_than_gguf") for way in ("encode", "decode")
    ]
    return " / ".join(f"{value:.0f}x" for value in times if value)


def engines_table() -> str:
    """Perplexities of exported files in llama.cpp, and of the same tokens here."""
    lines = [
        "| exported as | file | llama.cpp | bitplan | difference | squared error / llama-quantize's |",
        "|---|---|---|---|---|---|",
    ]
    for model, rows in _read("engines")["models"].items():
        for row in rows:
            error = row.get("squared_error_of_llama_quantize")
            cells = [
                f"{model}: {row['format']}",
                f"{row['bytes'] / 1e6:.1f} MB",
                f"{row['llama_cpp']:.3f}",
                f"{row['bitplan']:.3f}",
                f"{row['difference']:+.2%}",
                "" if error is None else f"{error:.3f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def families_table() -> str:
    """Tiny models of every family in llama.cpp and in transformers."""
    lines = ["| family | llama.cpp | transformers | difference |", "|---|---|---|---|"]
    for row in _read("engines")["families"]:
        lines.append(
            f"| {row['family']} | {row['llama_cpp']:.3f} | {row['transformers']:.3f} | {row['difference']:+.4%} |"
        )
    return "\n".join(lines)


def rounding_gguf_table() -> str:
    """Uniform plans of ours and llama.cpp's own files, all in llama.cpp, by size."""
    lines = ["| the 26M llama in llama.cpp | file, MB | KL | same top token |", "|---|---|---|---|"]
    kinds = ("llama.cpp", "nearest", "uniform")
    rows = {label: row for label, row in _read("search_gguf_lm26m")["rows"].items() if row["by"] in kinds}
    for label, row in sorted(rows.items(), key=lambda pair: (round(pair[1]["file_bytes"], -5), -pair[1]["kl"])):
        name = f"llama.cpp's {label}, with an imatrix" if row["by"] == "llama.cpp" else label
        kl = f"{row['kl']:.4f} ± {row['kl_error']:.4f}"
        lines.append(f"| {name} | {row['file_bytes'] / 1e6:.2f} | {kl} | {row['same_top']:.1%} |")
    return "\n".join(lines)


def searched_table() -> str:
    """Searched plans beside the best of llama.cpp's types, and of our uniform plans, in the same bytes."""
    document = _read("search_gguf_lm26m")
    lines = [
        "| searched plan of the 26M llama, in llama.cpp | MB | KL | llama.cpp's best, with an imatrix | of it "
        "| ours to nearest | of it | compensated, one format | of it | predicted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["comparison"]:
        error = document["rows"][row["plan"]]["kl_error"]
        cells = [row["plan"].removeprefix("searched, "), f"{row['mb']:.2f}", f"{row['kl']:.4f} ± {error:.4f}"]
        for other in ("llama.cpp", "nearest", "compensated"):
            found = row[other] is not None
            cells += [f"{row[other]:.4f}", f"{row[f'of_{other}']:.2f}"] if found else ["", ""]
        lines.append("| " + " | ".join([*cells, f"{row['predicted']:.4f}"]) + " |")
    return "\n".join(lines)


def searched_smollm2_table() -> str:
    """SmolLM2 in the bytes of llama.cpp's types, each beside the best of their files that has no more bytes."""
    rows = _read("search_gguf_smollm2_135m")["rows"]
    theirs = {label: row for label, row in rows.items() if row["by"] == "llama.cpp"}
    lines = [
        "| SmolLM2-135M, in llama.cpp | MB | KL | llama.cpp's best in no more bytes, with an imatrix | of it "
        "| predicted |",
        "|---|---|---|---|---|---|",
    ]
    for label, row in sorted(theirs.items(), key=lambda item: item[1]["tensor_bytes"]):
        kl = f"{row['kl']:.4f} ± {row['kl_error']:.4f}"
        lines.append(f"| llama.cpp's {label} | {row['tensor_bytes'] / 1e6:.2f} | {kl} | | | |")
    for label, row in sorted(rows.items(), key=lambda item: item[1]["tensor_bytes"]):
        if row["by"] == "searched":
            most = theirs[label.removeprefix("searched, ").partition("'")[0]]["tensor_bytes"]
            best = min(each["kl"] for each in theirs.values() if each["tensor_bytes"] <= most)
            cells = [label, f"{row['tensor_bytes'] / 1e6:.2f}", f"{row['kl']:.4f} ± {row['kl_error']:.4f}"]
            cells += [f"{best:.4f}", f"{row['kl'] / best:.2f}", f"{row['predicted']:.4f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def short_searched_table() -> str:
    """The same for the figures: sizes in bits a weight alone."""
    lines = [
        "| the 26M llama, in llama.cpp | MB | KL, searched | llama.cpp's best in these bytes | ours, to nearest |",
        "|---|---|---|---|---|",
    ]
    for row in _read("search_gguf_lm26m")["comparison"]:
        if row["plan"].endswith(" bits"):
            others = ["" if row[other] is None else f"{row[other]:.4f}" for other in ("llama.cpp", "nearest")]
            cells = [f"{row['plan'].removeprefix('searched, ')} a weight", f"{row['mb']:.1f}", f"{row['kl']:.4f}"]
            lines.append("| " + " | ".join([*cells, *others]) + " |")
    return "\n".join(lines)


_FOLDER_TARGETS = {"compressed-tensors": "compressed-tensors", "mlx": "MLX", "torchao": "torchao", "hf": "plain"}


def folders_table() -> str:
    """Perplexities of exported folders in the libraries they are for, and how far they are from ours."""
    models: dict[str, list[dict[str, Any]]] = _read("engine_folders")["models"]
    rows = [{**row, "format": f"{model}: {row['format']}"} for model, own in models.items() for row in own]

    def cell(row: dict[str, Any]) -> str:
        return "refused" if "refused" in row else f"{row['engine']:.3f} ({row['difference']:+.2%})"

    return _by_target("format", rows, cell)


def folder_families_table() -> str:
    """Tiny models of every family: the largest difference of logits, of the largest logit."""
    rows = _read("engine_folders")["families"]

    def cell(row: dict[str, Any]) -> str:
        return "refused" if "refused" in row else f"{row['difference']:.1e}"

    return _by_target("family", rows, cell)


def _by_target(key: str, rows: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    lines = [f"| {key} of the folder | " + " | ".join(_FOLDER_TARGETS.values()) + " |", "|---|" + "---|" * 4]
    for name in dict.fromkeys(row[key] for row in rows):
        found = {row["target"]: cell(row) for row in rows if row[key] == name}
        lines.append(f"| {name} | " + " | ".join(found.get(target, "") for target in _FOLDER_TARGETS) + " |")
    return "\n".join(lines)


def _vllm_rows(result: str = "engine_vllm") -> list[dict[str, Any]]:
    return [row for row in _read(result)["rows"] if row["family"] == "lm26m" and "vllm" in row]


def vllm_table(result: str = "engine_vllm", where: str = "") -> str:
    """Means of log-probabilities in vLLM and here, and how far a single token is off."""
    lines = [f"| lm26m{where} as | vLLM | bitplan | largest difference of a token | bound |", "|---|---|---|---|---|"]
    for row in _vllm_rows(result):
        figures = (row[key] for key in ("vllm", "bitplan", "largest_difference", "bound"))
        lines.append(f"| {row['case']} | " + " | ".join(f"{figure:.4f}" for figure in figures) + " |")
    return "\n".join(lines)


def vllm_cuda_table() -> str:
    return vllm_table("engine_vllm_nvidia_h200", " on an H200")


def vllm_speed_table() -> str:
    """Tokens a second at 1 and 64 sequences in vLLM and here, of one shape after 512 tokens."""
    ours: dict[tuple[str, int], float] = {}
    for row in _read("decode_8b_nvidia_h200")["rows"]:
        if row["mode"] == "graph" and row["size"] == "8b":
            ours[row["format"], row["batch"]] = row["ms"]
    lines = ["| 8B's shape, 16 layers | sequences | vLLM | bitplan |", "|---|---|---|---|"]
    for row in _read("engine_vllm_nvidia_h200")["speed"]:
        for sequences, rate in row.get("tokens_a_second", {}).items():
            here = 1e3 * int(sequences) / ours[row["format"], int(sequences)]
            lines.append(f"| {row['format']} | {sequences} | {rate:,.0f} | {here:,.0f} |")
    return "\n".join(lines)


def experts_table() -> str:
    """Steps of a mixture whose experts cross by use: medians by text and by what crosses."""
    document = _read("stream_experts_nvidia_h200")
    lines = [
        "| text | experts | ms a step | chosen | GB sent | GB of weights on the GPU |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        chosen = f"{row['chosen_share']:.0%}" if "chosen_share" in row else ""
        sent = f"{row['bytes_h2d'] / 1e9:.2f}" if "bytes_h2d" in row else ""
        cells = [row["text"], row["arm"], f"{row['median_ms']:.0f}", chosen, sent, f"{row['weight_bytes'] / 1e9:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


PRODUCTS = ("fprop", "dgrad", "wgrad")
PARTS_OF_STEPS = {"gpu": "computing", "bus in": "copying", "host adamw": "AdamW"}
PEERS = {
    "resident": "all on the GPU",
    "bitplan": "bitplan",
    "bitplan_early": "bitplan, `update_in_backward`",
    "bitplan, slots=auto": 'bitplan, `slots="auto"`',
    "bitplan, slots=3": "bitplan, three slots",
    "paired": 'bitplan, `slots="auto"`, in turns',
    "deepspeed": "DeepSpeed ZeRO-3",
    "fsdp2": "FSDP2",
    "ramtorch": "RamTorch",
    "accelerate": "accelerate",
}


def peers_table() -> str:
    """Steps of streamed training beside other offloads, each against bitplan's of like memory in its own run."""
    lines = [
        "| run, training, tokens | arm | ms | TFLOP/s | times bitplan's | times the bound | GB: GPU, host |",
        "|---" * 7 + "|",
    ]
    names = ("stream_peers_nvidia_h200", "stream_peers_adapters_nvidia_h200")
    for run, rows in enumerate((_read(name)["rows"] for name in names), start=1):
        steps: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
        for row in rows:
            steps.setdefault((row["mode"], row["shape"], row.get("tokens", 0)), {})[row["arm"]] = row
        for (mode, shape, tokens), arms in steps.items():
            training = f"{run}, {'LoRA' if mode == 'lora' else 'full'}, {shape.upper()}'s shape"
            like = next((arms[arm] for arm in ("bitplan_early", "bitplan, slots=3", "bitplan") if arm in arms), None)
            for arm, row in arms.items():
                if like is None:
                    lines.append(f"| {training} | {PEERS[arm]} | not run |  |  |  |  |")
                    continue
                gpu = f"{row['gpu_peak_bytes'] / 1e9:.1f}" if "gpu_peak_bytes" in row else "not taken"
                alone = f", {row['times_resident']:.3f} of all on the GPU" if "times_resident" in row else ""
                times = "" if arm == "resident" else f"{row['median_ms'] / like['median_ms']:.2f}"
                cells = [f"{training}, {tokens:,}", PEERS[arm] + alone, f"{row['median_ms']:.1f}"]
                cells += [
                    f"{row['tflops_6nt']:.0f}",
                    times,
                    f"{row['times_bound']:.2f} ({PARTS_OF_STEPS[row['bound_by']]})",
                ]
                lines.append("| " + " | ".join([*cells, f"{gpu}, {row['host_peak_bytes'] / 1e9:.1f}"]) + " |")
    return "\n".join(lines)


def controller_table() -> str:
    """Trainings that a controller decides beside streamed BF16: loss and time of every seed that has both."""
    lines = [
        "| model | seeds | products low | loss, BF16 | loss, controlled | speed while decided | of the whole run |",
        "|---|---|---|---|---|---|---|",
    ]
    sizes = _read("run_controller_nvidia_h200")["sizes"] | _read("run_controller_lm26m_nvidia_h200")["sizes"]
    for size, run in sizes.items():
        summary, shape = run["summary"], run["shape"]
        ways = [summary[way] for way in ("bf16", "controlled")]
        losses = [
            f"{way['loss_mean']:.4f} ({' to '.join(f'{loss:.3f}' for loss in way['loss_min_max'])})" for way in ways
        ]
        shares = [row["low_share"][part] for row in run["rows"] if "low_share" in row for part in PRODUCTS]
        speeds = [
            f"{speed['mean']:.2f} ({min(speed['by_seed']):.2f} to {max(speed['by_seed']):.2f})"
            for speed in (summary["speed_ms"], summary["speed_whole_ms"])
        ]
        name = f"{size}: hidden {shape['hidden']}, {shape['layers']} layers"
        cells = [name, str(len(summary["seeds"])), f"{sum(shares) / len(shares):.0%}", *losses, *speeds]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def llama_cpu_table() -> str:
    """Tokens and prompts of a CPU beside llama.cpp: milliseconds, and the share of its speed, by threads."""
    lines = [
        "| on a CPU | llama.cpp's file | ms a token: llama.cpp, ours | tokens, of llama.cpp's | prompts "
        "| two threads: ms a token | tokens | prompts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in _read("packed_cpu_xeon_llama_cpp")["llama_cpp_turns"]:
        rows.setdefault(row["format"], []).append(row)
    for name, by_threads in rows.items():
        cells = [name, by_threads[0]["file_format"]]
        for row in sorted(by_threads, key=lambda row: row["threads"]):
            cells.append(", ".join(f"{row[f'{engine}_wall_token_ms']:.1f}" for engine in ("llama_cpp", "bitplan")))
            cells += [f"{row[f'of_llama_cpp_wall_{part}_ms']:.2f}" for part in ("token", "prompt")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


NOT_MEASURED = "not measured"


def choosing_table() -> str:
    """Which format where: near the model, small, and fast, by engine; a cell without a result says so."""
    engine, folders = _read("engines")["models"]["lm26m"], _read("engine_folders")["models"]["lm26m"]
    in_llama = {row["format"]: row["difference"] for row in engine}
    in_folder = {(row["target"], row["format"]): row["difference"] for row in folders}
    in_vllm = {row["case"]: abs(row["vllm"] - row["bitplan"]) for row in _vllm_rows()}
    on_a_gpu = {row["case"]: abs(row["vllm"] - row["bitplan"]) for row in _vllm_rows("engine_vllm_nvidia_h200")}
    rates = [row for row in _read("engine_vllm_nvidia_h200")["speed"] if "tokens_a_second" in row]
    speed = {row["format"]: row["tokens_a_second"]["1"] for row in rates}
    searched = {row["plan"]: row["kl"] for row in _read("search_gguf_lm26m")["comparison"]}
    tokens = {row["format"]: row for row in _read("packed_cpu_xeon_int8_model")["model_rows"]}
    beside = _read("packed_cpu_xeon_llama_cpp")["llama_cpp_turns"]
    two = next(row for row in beside if (row["format"], row["threads"]) == ("q4_0_gguf", 2))
    in_turns = {engine: 1e3 / two[f"{engine}_wall_token_ms"] for engine in ("llama_cpp", "bitplan")}
    graph = [row for row in _read("decode_8b_nvidia_h200")["rows"] if row["mode"] == "graph" and row["batch"] == 1]
    ms = {row["format"]: row["ms"] for row in graph if row.get("size") == "8b"}

    def exported(target: str, name: str) -> str:
        return f"`{name}`: runs, perplexity {in_folder[target, name]:+.2%} of ours"

    rows = [
        (
            "bitplan, GPU (H200)",
            _kl_of("int8_row"),
            _kl_of("nvfp4, embeddings int8_row"),
            f"`mxfp4`: {ms['bfloat16'] / ms['mxfp4']:.2f} times BF16, one sequence, 8B's shape",
        ),
        (
            "bitplan, CPU (Xeon, two threads)",
            _kl_of("int8_row"),
            _kl_of("q4_0_gguf, embeddings q8_0_gguf"),
            f"`q4_0_gguf`, inputs `int8`: {tokens['q4_0_gguf+int8']['speedup']:.2f} times float32 in transformers",
        ),
        (
            "llama.cpp, CPU",
            f"`q8_0_gguf`: runs, perplexity {in_llama['q8_0_gguf']:+.2%} of ours",
            f"searched plan, 4.5 bits: KL {searched['searched, 4.5 bits']:.4f}",
            f"`q4_0_gguf`: {in_turns['llama_cpp']:.0f} a second, SmolLM2-135M; `bitplan generate` "
            f"{in_turns['bitplan']:.0f}",
        ),
        (
            "transformers, by compressed-tensors",
            exported("compressed-tensors", "int8_row"),
            exported("compressed-tensors", "int4_g32"),
            NOT_MEASURED,
        ),
        (
            "vLLM, CPU, by compressed-tensors",
            f"`int8_row`, inputs `int8_row`: runs, mean log-probability {in_vllm['W8A8']:.4f} from ours",
            f"`int4_g32`: runs, {in_vllm['int4_g32']:.4f} from ours",
            NOT_MEASURED,
        ),
        (
            "vLLM, GPU (H200), by compressed-tensors",
            f"`int8_row`: runs, mean log-probability {on_a_gpu['int8_row']:.4f} from ours",
            f"`int4_g32`: runs, {on_a_gpu['int4_g32']:.4f} from ours",
            f"`int4_g32`: {speed['int4_g32'] / speed['bfloat16']:.2f} times vLLM's own BF16, one sequence, 8B's shape",
        ),
        ("torchao", exported("torchao", "int8_row"), exported("torchao", "int4_g32"), NOT_MEASURED),
        ("MLX, on a CPU", exported("mlx", "q8_0_gguf"), exported("mlx", "q4_1_gguf"), NOT_MEASURED),
        ("MLX, llama.cpp on GPUs", *[NOT_MEASURED] * 3),
    ]
    head = ["| runs in | near the model, 8 bits | smaller, 4 to 5 bits | more tokens a second |", "|---|---|---|---|"]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in rows)])


def training_choice_table() -> str:
    """What to train with, by goal, and what it gained."""
    styles = _read("fp8_styles_nvidia_h200")["rows"]
    llama = [row for row in styles if (row["style"], row["size"]) == ("llama", "h4096_ffn14336")]
    speedup = {(row["tokens"], row["timing"]): row["arms"]["fp8"]["ratio"]["speedup"] for row in llama}
    steps = {(row["tokens"], row["variant"]): row["median_ms"] for row in _read("streaming_nvidia_h200")["rows"]}
    fits = _read("trees_fits_xeon_h200_host")["ratios"]
    counts = " and ".join(str(trees) for trees in sorted({row["trees"] for row in fits}))
    worst, best = (end(row["i16"] for row in fits if "i16" in row) for end in (max, min))
    wanting = {"ten classes": all(row["task"] != "classes" for row in fits), "500 trees": "500" not in counts}
    streamed = {tokens: steps[tokens, "bf16"] / steps[tokens, "int8"] for tokens in (1024, 4096, 16384)}
    rows = [
        (
            "train faster",
            "[adaptive FP8](adaptive-fp8.md), tensorwise",
            f"two llama layers, compiled, launched one by one, H200: {speedup[2048, 'eager']:.2f} times BF16 at 2,048 "
            f"tokens, {speedup[16384, 'eager']:.2f} at 16,384",
            "other GPUs; several GPUs",
        ),
        (
            "fine-tune what does not fit",
            "[streaming](streaming.md), blocks in `int8_row`",
            f"H200, three slots, over blocks in BF16: {streamed[1024]:.2f} times at 1,024 tokens a step, "
            f"{streamed[4096]:.2f} at 4,096, {streamed[16384]:.2f} at 16,384",
            "other GPUs and buses",
        ),
        (
            "boost trees",
            '[trees](trees.md), `gradient_precision="i16"`',
            f"1 to 16 threads of a Xeon host, {counts} trees: {best:.2f} to {worst:.2f} of the time of the fastest of "
            "LightGBM's trainings",
            "; ".join(["XGBoost", *(what for what, is_wanting in wanting.items() if is_wanting)]),
        ),
    ]
    head = ["| you want to | take | measured | not measured |", "|---|---|---|---|"]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in rows)])


def kinds_table() -> str:
    """A plan of 4.5 bits rounded by the given text alone, and by the model's own beside it, on two kinds of text."""
    found = _read("kinds_lm26m")
    theirs = {row["plan"]: row for row in found["comparison"]}
    lines = [
        "| 26M llama, statistics of | MB | KL, the given kind | of llama.cpp's | KL, Shakespeare | of llama.cpp's |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        shares = [f"{theirs[name][f'of_{kind}']:.2f}" if name in theirs else "" for kind in ("same", "other")]
        kls = [f"{row['kl'][kind]:.4f}" for kind in ("same", "other")]
        cells = [name, f"{row['tensor_bytes'] / 1e6:.2f}", kls[0], shares[0], kls[1], shares[1]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def few_bits_table() -> str:
    """Searched plans from 2.5 bits a weight on beside the best of rivals in their bytes, on two kinds of text."""
    found = _read("few_bits_lm26m")
    lines = [
        "| searched plan of the 26M llama | MB | KL, the given kind | best rival in these bytes | of it "
        "| KL, Shakespeare | best rival | of it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(found["comparison"], key=lambda row: row["bytes"]):
        cells = [row["plan"].removeprefix("searched, "), f"{row['bytes'] / 1e6:.2f}"]
        for kind in ("same", "other"):
            rivals = {name: kl for name, kl in row[kind]["rivals"].items() if kl is not None}
            best = min(rivals, key=lambda name: rivals[name], default="")
            error = found["rows"][row["plan"]]["kl_error"][kind]
            cells += [f"{row[kind]['kl']:.4f} ± {error:.4f}", f"{best} {rivals[best]:.4f}" if best else ""]
            cells.append(f"{row[kind]['of_best']:.2f}" if best else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rivals_table() -> str:
    """Every rival's rows of few bits a weight, on two kinds of text."""
    found = _read("few_bits_lm26m")
    lines = ["| rival on the 26M llama | bits | KL, the given kind | KL, Shakespeare |", "|---|---|---|---|"]
    rows = [(label, row) for label, row in found["rows"].items() if row["by"] != "searched"]
    for label, row in sorted(rows, key=lambda item: item[1]["tensor_bytes"]):
        kls = [f"{row['kl'][kind]:.4f} ± {row['kl_error'][kind]:.4f}" for kind in ("same", "other")]
        name = label if label.startswith(row["by"]) else f"{row['by']}'s {label}"
        lines.append("| " + " | ".join([name, f"{row['bits']:.3f}", *kls]) + " |")
    return "\n".join(lines)


def _kl_of(name: str) -> str:
    row = next(row for row in _read("quality_lm26m")["rows"] if row["format"] == name)
    formats = name.replace(", embeddings ", "`, embeddings `")
    return f"`{formats}`: {row['bits_per_weight']:.2f} bits, KL {row['kl']['mean']:.4f}"


PLACES = {  # page: its tables
    "docs/choosing.md": (choosing_table, training_choice_table),
    "docs/figures.md": (short_searched_table, demo_table, speed_table),
    "docs/quality.md": (small_quality_table,),
    "docs/packed.md": (decode_table, launched_table, prompts_table, llama_cpu_table),
    "docs/streaming.md": (streaming_table,),
    "docs/adaptive-fp8.md": (
        fp8_styles_table,
        fp8_training_speed_table,
    ),
    "docs/log.md": (
        selective_table,
        fp8_cast_table,
        fp8_layers_table,
        fp8_linear_table,
        fp8_profile_table,
        fp8_held_out_table,
        fp8_guesses_table,
        auto_table,
        grid_table,
        fp8_full_table,
        fp8_grouped_table,
        fp8_fsdp_table,
        fp8_training_table,
        rounding_gguf_table,
        fused_table,
        quality_table,
        decode_small_table,
        families_table,
        folder_families_table,
        trees_table,
        experts_table,
        controller_table,
        peers_table,
        trees_kinds_table,
        trees_precision_table,
        kinds_table,
        few_bits_table,
        rivals_table,
    ),
    "docs/trees.md": (trees_fits_table, trees_gpu_table),
    "docs/engines.md": (engines_table, folders_table, vllm_table, vllm_cuda_table, vllm_speed_table),
    "docs/search.md": (searched_table, searched_smollm2_table),
    "docs/fit.md": (fit_table,),
}


def write() -> None:
    """Put every table in its place: where a table with the same first line stands."""
    for page, tables in PLACES.items():
        path = RESULTS.parent.parent / page
        text = path.read_text()
        for table in tables:
            new = table()
            head = new.splitlines()[0]
            if head not in text:
                raise SystemExit(f"{page}: no table begins with {head!r}; put that line where the table belongs")
            before, after = text.split(head, 1)
            rest = after.splitlines(keepends=True)[1:]
            while rest and rest[0].startswith("|"):
                rest.pop(0)
            text = before + new + "\n" + "".join(rest)
        path.write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print(*(table() for tables in PLACES.values() for table in tables), sep="\n\n")
