"""fit against fixed formats of keys and values at equal bytes, and its predicted memory against a running process.

    python benchmarks/fit.py MODEL --text FILE [--context 1024] [--batch 2] [--room 26 45] [--output FILE]

For each `room`, megabytes for weights and cache, `bitplan fit` finds a plan for the memory that this is with workspace
and overhead; the joint plan, weights beside keys and values as they are, and beside 8 bits are measured on held-out
text. For each plan the model is then packed, loaded in a process of its own as `bitplan generate` does, and reads
`batch` prompts of the whole context, and makes four tokens: its highest resident memory is held against the prediction.
Timings are not taken.

    python benchmarks/fit.py lm26m gemma2 qwen3 mixtral --peaks --tokenizer lm26m [--context 1024] [--batch 2]

Predicted and measured memory alone, of folders and of models that are drawn here (`gemma2` with windows, `qwen3`
with norms of queries and keys, `mixtral` with experts), each within four limits, from little more than its smallest
plan takes to its largest. No text is needed: what a format harms is its bits times a sensitivity that is drawn for each
tensor.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import commit, machine, save, versions

import bitplan
from bitplan.formats import get_format
from bitplan.plan.kv_formats import part_name
from bitplan.searching.evidence import FormatCost, SearchEvidence, StayingTensor, TensorGroup
from bitplan.searching.fit import FIT, FitGoal, FitResult, joint_evidence
from bitplan.searching.goal import Goal
from bitplan.searching.memory_probe import Reserve, config_of
from bitplan.searching.run import SearchOptions
from bitplan.searching.solver import solve

FORMATS = ("q3_k_gguf", "q4_k_gguf", "q5_k_gguf", "q6_k_gguf", "q8_0_gguf", "bfloat16")
TOKENS = 4
WARM_CONTEXT = 64
PEAK_FORMATS, KV = ("mxfp4", "int4_g32", "int8_row"), "int8_row"
SHARES = (0.05, 0.35, 0.7, 1.0)  # of what lies between the smallest plan and the largest
SIZES = {"vocab_size": 16384, "num_key_value_heads": 2, "max_position_embeddings": 4096, "dtype": "bfloat16"}
DRAWN: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
        | {"head_dim": 64, "sliding_window": 256},
    ),
    "qwen3": (
        "Qwen3",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "head_dim": 64,
        },
    ),
    "mixtral": (
        "Mixtral",
        {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}
RUN = """
import sys, torch, bitplan.cli.app
from bitplan.packed.language.generation import AUTO, load_for_running
from bitplan.packed.language.token_steps import Decoding
lm = load_for_running(sys.argv[1], inputs=AUTO)
batch, context, tokens = map(int, sys.argv[2:])
ids = torch.arange(batch * (context - tokens)).remainder(lm.vocabulary).reshape(batch, context - tokens)
decoding = Decoding(lm.model)
with torch.inference_mode():
    for _ in range(tokens):
        ids = decoding(ids).argmax(-1, keepdim=True)
lines = open("/proc/self/status").read().splitlines()
print(1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")))
"""


def peak_of(folder: Path, batch: int, context: int) -> int:
    words = [sys.executable, "-c", RUN, str(folder), str(batch), str(context), str(TOKENS)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])


def plans_of(result: FitResult) -> dict[str, float | None]:
    """KL of every plan; one that is the joint plan itself has its."""
    same = [said.partition(":")[0] for said in result.missing if said.endswith("joint plan")]
    known = {one.label: one.kl for one in result.rows}
    return known | dict.fromkeys(same, known["joint plan"])


def drawn_model(name: str, like: Path, folder: Path) -> Path:
    """A folder with a model of random numbers, and the tokenizer of another."""
    import transformers

    family, sizes = DRAWN[name]
    config = getattr(transformers, f"{family}Config")(**SIZES, **sizes)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
    for file in like.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def drawn_evidence(folder: Path, packed: Path) -> tuple[SearchEvidence, SearchEvidence]:
    """Of every tensor that a packed folder has in a format, a layer's experts as one; and of keys and values."""
    from transformers.cache_utils import DynamicCache

    config = config_of(folder)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, layers = config.num_key_value_heads, DynamicCache(config=config).layers
    draw, groups, stays = random.Random(0), dict[str, TensorGroup](), dict[str, StayingTensor]()
    rows = bitplan.quantize_file(folder, packed, KV).rows
    for row in rows:
        name, shape = row["name"], tuple(row["shape"])
        if row["to"] != KV:
            stays[name] = StayingTensor("bfloat16", shape, "kept", "bfloat16", row["bytes_after"], "not packed")
            continue
        role = "embed" if "embed" in name or "head" in name else "mlp_weight"
        group = groups.setdefault(re.sub(r"\.experts\..*", ".experts", name), TensorGroup({}))
        group.tensors[name] = shape, role
    for group in groups.values():
        sensitivity = draw.lognormvariate(0, 1) * group.numbers
        for fmt in PEAK_FORMATS:
            nbytes = sum(get_format(fmt).nbytes(shape) for shape, _ in group.tensors.values())
            group.formats[fmt] = FormatCost(nbytes, sensitivity * 4.0 ** (-8 * nbytes / group.numbers))
    windows = {str(at): layer.sliding_window for at, layer in enumerate(layers) if hasattr(layer, "sliding_window")}
    in_kv = {
        name: TensorGroup({name: ((heads, width), "kv")}, {KV: FormatCost(heads * (width + 4), 0.0)})
        for name in (part_name(at, part) for at in range(config.num_hidden_layers) for part in ("keys", "values"))
    }
    numbers = sum(group.numbers for group in groups.values())
    weights = SearchEvidence("drawn", numbers, {}, {}, stays, groups, 2 * numbers)
    return weights, SearchEvidence("drawn", numbers, {}, {"windows": windows}, {}, in_kv, 2 * numbers)


def peaks(given: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> None:
    for model in given.model:
        with tempfile.TemporaryDirectory() as scratch:
            is_drawn = str(model) in DRAWN
            folder = drawn_model(str(model), given.tokenizer, Path(scratch, "model")) if is_drawn else model
            goal = FitGoal(1, given.context, given.batch)
            probe = Reserve(folder, goal).at(given.context)
            joint = joint_evidence(*drawn_evidence(folder, Path(scratch, "packed")), goal, probe.nbytes, probe)
            least, most = (
                joint.nbytes({name: list(group.formats)[at] for name, group in joint.groups.items()}) for at in (0, -1)
            )
            for share in SHARES:
                limit = least + int(share * (most - least))
                solution = solve(joint, Goal(nbytes=limit))
                wanted = {
                    tensor: fmt
                    for name, fmt in solution.choice.items()
                    for tensor, (_, role) in joint.groups[name].tensors.items()
                    if role != "kv"
                }
                packed = Path(scratch, f"packed-{share:g}")
                bitplan.quantize_file(folder, packed, wanted, options={"kv": "int8"})
                if share == SHARES[0]:
                    peak_of(packed, given.batch, WARM_CONTEXT)  # compiles what does not come compiled
                measured = [peak_of(packed, given.batch, given.context) for _ in range(given.repeats)]
                shutil.rmtree(packed)
                row = {"model": Path(model).name, "context": given.context, "batch": given.batch, "limit_bytes": limit}
                row |= {"predicted_bytes": solution.nbytes, "beside_bytes": probe.nbytes, "measured_bytes": measured}
                note(row | {"off": solution.nbytes / statistics.median(measured) - 1})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="+")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--peaks", action="store_true")
    parser.add_argument("--tokenizer", type=Path, help="a folder that has one, for models that are drawn")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--room", type=float, nargs="+", default=[26.0, 45.0], help="megabytes for weights and cache")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="where the evidence stays, or is from before")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.peaks:
        noted: list[dict[str, Any]] = []

        def note(row: dict[str, Any]) -> None:
            noted.append(row)
            print(json.dumps(row), flush=True)
            about = {"benchmark": "fit_peaks", "commit": commit(), "machine": machine("cpu"), "versions": versions()}
            save("fit_peaks", about | {"rows": noted}, given.output)

        peaks(given, note)
        return
    (given.model,) = given.model
    reserve = Reserve(given.model, FitGoal(1, given.context, given.batch), given.folder, writes=True)
    reserved = reserve.at(given.context).nbytes
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch, "fit")
        for room in given.room:
            result = bitplan.fit(
                given.model,
                goal=FitGoal(reserved + int(room * 1e6), given.context, given.batch),
                text=given.text.read_text(),
                formats=FORMATS,
                out=folder,
                options=SearchOptions(windows=given.windows),
            )
            packed = Path(scratch, f"packed-{room:g}")
            bitplan.quantize_file(given.model, packed, result.plan)
            peak = peak_of(packed, given.batch, given.context)
            row = {
                "room_mb": room,
                "kv": str(result.kv),
                "plans": plans_of(result),
                "missing": result.missing,
                "weights_bytes": result.row.weights,
                "kv_bytes": result.row.kv,
                "reserved_bytes": result.probe.nbytes,
                "predicted_bytes": result.needed,
                "measured_bytes": peak,
                "gap": result.solution.gap,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
        found = (folder / FIT).read_text().replace(str(given.model), given.model.name)
    document = {
        "benchmark": "fit",
        "commit": commit(),
        "machine": machine("cpu"),
        "versions": versions(),
        "model": given.model.name,
        "context": given.context,
        "batch": given.batch,
    }
    name, page = f"fit_{given.model.stem.lower()}", {"fit": json.loads(found)}
    print(save(name, document | {"rows": rows}, given.output))
    print(save(f"{name}_page", document | page, given.output and given.output.with_stem(f"{given.output.stem}_page")))


if __name__ == "__main__":
    main()
