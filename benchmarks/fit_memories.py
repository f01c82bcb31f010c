"""Plans for two memories against one format for all with its best split; and predicted peaks of a GPU's memory.

    python benchmarks/fit_memories.py [--device cuda] [--shape 8b] [--memory 4 8] [--context 4096] [--output FILE]

Weights are drawn on the device, so no search is needed: what a format costs a tensor is its measured squared error
times a sensitivity that is drawn for it. Times and memory beside weights are measured as `bitplan fit` does, in a
process of its own. Then for each memory, in GB, and a uniform format beside it:

    split    the format for all weights, with the fastest choice of places
    joint    the fastest plan that is predicted no more harmful than that

Each is built in its formats and places, its cache is filled to the context, and a prompt's last piece and tokens are
read as `generate` does: milliseconds a token and the peak of torch's allocator are held against the predictions. How
products of one row were run, and where the host's time of a token went, are in each row: a prediction that is off is
explained by the same run.

`peaks` are of models that lie on the GPU as a whole, in one format each.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from harness import commit, machine, save, versions
from torch import nn

from bitplan.formats import decode, encode, get_format
from bitplan.packed.fused_projections import fuse_what_is_seen
from bitplan.packed.language.token_steps import PIECE_TOKENS
from bitplan.packed.packed_weight import PackedWeight, wait_in_host
from bitplan.packed.quant_embedding import QuantEmbedding
from bitplan.packed.quant_linear import QuantLinear
from bitplan.plan.kv_formats import part_name
from bitplan.searching.evidence import (
    FormatCost,
    SearchEvidence,
    StayingTensor,
    TensorGroup,
    is_in_host,
    place_of,
    weight_format,
)
from bitplan.searching.fit import RESERVED, FitGoal, joint_evidence
from bitplan.searching.goal import Goal
from bitplan.searching.memory_probe import MemoryProbe, _filled, _timed_token, probe_memory
from bitplan.searching.solver import solve
from bitplan.searching.two_memories import SPLIT_GAP, best_split, crossing_first

# width, MLP, heads, heads of keys, layers, vocabulary, and whether the head is the embedding
SHAPES = {
    "tiny": (256, 512, 4, 2, 4, 1024, False),
    "lm26m": (384, 1024, 6, 2, 8, 16384, True),
    "smollm2": (576, 1536, 9, 3, 30, 49152, True),
    "1b": (2048, 8192, 32, 8, 16, 128256, True),
    "8b": (4096, 14336, 32, 8, 32, 128256, False),
}
FORMATS = ("fp4_u8_g128", "mxfp4", "int4_g32", "int8_row", "bfloat16")
PAIRS = ((4.0, "int4_g32"), (4.0, "int8_row"), (8.0, "int8_row"))
PEAKS = (("smollm2", 4, 4096), ("1b", 1, 8192))
PEAK_FORMATS = ("mxfp4", "int8_row", "q8_0_gguf", "bfloat16")
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
KV = "int8_row"
PROFILED = 16
Row = dict[str, Any]


def config_of(name: str) -> Any:
    import transformers

    width, mlp, heads, kv_heads, layers, vocabulary, tied = SHAPES[name]
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
        dtype="bfloat16",
    )


def on_meta(config: Any) -> Any:
    import transformers

    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def squared_error(fmt: str, device: torch.device) -> float:
    numbers = torch.randn(512, 4096, generator=torch.Generator(device).manual_seed(0), device=device)
    if get_format(fmt).is_cast:
        return float((numbers - numbers.to(get_format(fmt).storage).float()).square().mean())
    return float((numbers - decode(encode(numbers, fmt)).float()).square().mean())


def evidence_of(config: Any, formats: tuple[str, ...], device: torch.device) -> tuple[SearchEvidence, SearchEvidence]:
    """Of weights, by drawn sensitivities, and of keys and values, which are in 8 bits."""
    draw, groups, stays = torch.Generator().manual_seed(0), {}, {}
    errors = {fmt: squared_error(fmt, device) for fmt in formats}
    members: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
    for name, parameter in on_meta(config).named_parameters():
        shape, (path, layer) = tuple(parameter.shape), (name.removesuffix(".weight"), name.split(".")[-2])
        if len(shape) < 2:
            stays[name] = StayingTensor("bfloat16", shape, "norm", "bfloat16", 2 * shape[0], "one axis")
            continue
        joined = "qkv" if layer in QKV else "gate_up" if layer in GATE_UP else layer
        role = "embed" if "embed" in name or "head" in name else "attn" if "attn" in name else "mlp_weight"
        members.setdefault(f"{path.rpartition('.')[0]}.{joined}", {})[name] = (shape, role)
    for name, tensors in members.items():
        group = TensorGroup(tensors)
        weight = float(torch.randn((), generator=draw).exp()) * group.numbers * 1e-9
        for fmt in formats:
            nbytes = sum(get_format(fmt).nbytes(shape) for shape, _ in tensors.values())
            group.formats[fmt] = FormatCost(nbytes, weight * errors[fmt])
        groups[name] = group
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    in_kv = {
        part_name(layer, part): TensorGroup(
            {part_name(layer, part): ((heads, width), "kv")}, {KV: FormatCost(heads * (width + 4), 0.0)}
        )
        for layer in range(config.num_hidden_layers)
        for part in ("keys", "values")
    }
    numbers = sum(group.numbers for group in groups.values())
    weights = SearchEvidence("drawn", numbers, {}, {}, stays, groups, 2 * numbers)
    return weights, SearchEvidence("drawn", numbers, {}, {"windows": {}}, {}, in_kv, 2 * numbers)


def build(config: Any, choice: Mapping[str, str], weights: SearchEvidence, device: torch.device) -> Any:
    """The model in formats and places; layers of one shape and format have the same numbers, each its own memory."""
    model = on_meta(config)
    drawn: dict[Any, Any] = {}
    formats = {name: choice[group] for group in weights.groups for name in weights.groups[group].tensors}
    tied: dict[str, Any] = {}
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        name = f"{path}.weight"
        is_head = name not in formats  # tied to the embedding
        source = "model.embed_tokens.weight" if is_head else name
        fmt, shape = formats[source], tuple(module.weight.shape)
        key = (weight_format(fmt), shape)
        if key not in drawn:
            numbers = 0.02 * torch.randn(shape, device=device)
            is_cast = get_format(key[0]).is_cast
            drawn[key] = numbers.to(torch.bfloat16) if is_cast else encode(numbers, key[0]).to(torch.device("cpu"))
            del numbers
        weight = tied.get(source)
        if isinstance(drawn[key], torch.Tensor):
            if weight is None:
                weight = nn.Parameter(drawn[key].clone(), requires_grad=False)
            module.weight = weight
        else:
            if weight is None:
                weight = PackedWeight(drawn[key].to(torch.device("cpu")))
                weight = wait_in_host(weight, device) if is_in_host(fmt) else PackedWeight(drawn[key].to(device))
            is_table = isinstance(module, nn.Embedding)
            made = QuantEmbedding(weight, dtype=torch.bfloat16) if is_table else QuantLinear(weight, name=path)
            model.set_submodule(path, made)
        tied[source] = weight
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.ones_like(parameter, device=device), requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    drawn.clear()
    fuse_what_is_seen(model)
    return model


def measure(config: Any, choice: Mapping[str, str], weights: SearchEvidence, given: Any) -> Row:
    """Milliseconds a token, and the peak from the last piece of a prompt on."""
    device = torch.device(given.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        model = build(config, choice, weights, device)
        piece = min(PIECE_TOKENS, given.context // 2)
        cache = _filled(model, given.batch, given.context - piece - 40, device)
        if device.type == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        for length in (piece, 1):
            ids = torch.zeros(given.batch, length, dtype=torch.int64, device=device)
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        token = _timed_token(model, cache, given.batch, device)
        more = {"products": ways_of_products(model), "profile": profile_of_token(model, cache, given, device)}
        del model, cache
    times = {"ms": token.whole / 1e3, "busy_ms": token.busy / 1e3, "launch_ms": token.launch / 1e3}
    return {**times, "peak_bytes": peak, **more}


def ways_of_products(model: Any) -> dict[str, int]:
    """How layers run a product of one row, by format and place: the strategy, and whether its call is prepared."""
    counts: dict[str, int] = {}
    for layer in (module for module in model.modules() if isinstance(module, QuantLinear)):
        runs = layer if layer.joint is None or layer.joint.layer is None else layer.joint.layer
        place, bound = "@host" if layer.weight.waiting else "", "prepared" if runs._bound else "not prepared"
        key = f"{layer.weight.fmt.name}{place}: {runs.explain(1).strategy}, {bound}"
        counts[key] = counts.get(key, 0) + 1
    return counts


def profile_of_token(model: Any, cache: Any, given: Any, device: torch.device) -> list[list[Any]]:
    """The operations and kernels that took most of a token: name, how often, microseconds of the host and the GPU."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    ids = torch.zeros(given.batch, 1, dtype=torch.int64, device=device)
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiled:
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
    found = [
        [one.key, one.count, round(one.self_cpu_time_total), round(one.self_device_time_total)]
        for one in profiled.key_averages()
    ]
    return sorted(found, key=lambda one: max(one[2:]), reverse=True)[:PROFILED]


def two_memories(config: Any, probe: MemoryProbe, given: Any, note: Callable[[str, Row], None]) -> None:
    device = torch.device(given.device)
    weights, kv = evidence_of(config, given.formats, device)
    times = probe.times
    assert times is not None
    for memory, fmt in given.pairs:
        goal = FitGoal(int(memory * 1e9), given.context, given.batch, given.device, ram=int(given.ram * 1e9))
        joint = joint_evidence(weights, kv, goal, probe.nbytes, probe)
        within = Goal(nbytes=goal.memory, host=goal.ram, rows=goal.batch)
        split = best_split(joint, fmt, within)
        limit = Goal(nbytes=goal.memory, host=goal.ram, rows=goal.batch, max_kl=split.nats)
        fastest = solve(joint, limit, gap=SPLIT_GAP)
        for label, found in (("split", split), ("joint", fastest)):
            choice = crossing_first(joint, found.choice)
            counts: dict[str, int] = {}
            for one in choice.values():
                counts[one] = counts.get(one, 0) + 1
            row = {
                "memory_gb": memory,
                "uniform": fmt,
                "plan": label,
                "nats": found.nats,
                "gpu_bytes": joint.nbytes(choice),
                "host_bytes": joint.host_bytes(choice),
                "predicted_ms": times.token_us(found.us or 0.0) / 1e3,
                "groups": counts,
                "gap": found.gap,
                "formats": {place_of(name)[1] + "." + place_of(name)[0]: one for name, one in choice.items()},
            }
            try:
                row["measured"] = measure(config, choice, weights, given)
                row["ms_off"] = row["predicted_ms"] / row["measured"]["ms"] - 1
                if row["measured"]["peak_bytes"]:
                    row["peak_off"] = row["gpu_bytes"] / row["measured"]["peak_bytes"] - 1
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:500]
                traceback.print_exc()
            note("two_memories", row)


def peaks(given: Any, note: Callable[[str, Row], None]) -> None:
    """Predicted and measured peaks of whole models in one format."""
    configs = [config_of(shape) for shape, _, _ in given.peaks]
    with ThreadPoolExecutor(max_workers=len(configs) or 1) as pool:  # memory of processes does not add up
        probes = list(
            pool.map(
                lambda known: probed(known[0], known[1][2], known[1][1], given.device, timed=False),
                zip(configs, given.peaks, strict=True),
            )
        )
    for (shape, batch, context), config, probe in zip(given.peaks, configs, probes, strict=True):
        for fmt in PEAK_FORMATS:
            try:
                weights, kv = evidence_of(config, (fmt,), torch.device(given.device))
                joint = joint_evidence(weights, kv, FitGoal(10**12, context, batch, given.device), probe.nbytes, probe)
                choice = {name: next(iter(group.formats)) for name, group in joint.groups.items()}
                now = argparse.Namespace(**{**vars(given), "batch": batch, "context": context})
                found = measure(config, choice, weights, now)["peak_bytes"]
                predicted = joint.nbytes(choice)
                beside = predicted - joint.stays[RESERVED].nbytes
                row = {"shape": shape, "batch": batch, "context": context, "format": fmt, "predicted_bytes": predicted}
                row |= {"measured_bytes": found, "beside_predicted": probe.nbytes}
                row |= {"workspace_predicted": joint.workspace(choice)}
                row |= {
                    "beside_measured": found and found - beside + joint.workspace(choice),
                    "off": found and predicted / found - 1,
                }
            except Exception as error:
                row = {"shape": shape, "format": fmt, "failed": f"{type(error).__name__}: {error}"[:500]}
                traceback.print_exc()
            note("peaks", row)


def probed(config: Any, context: int, batch: int, device: str, *, timed: bool) -> MemoryProbe:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return probe_memory(folder, context, batch, device, timed=timed)


def copied_gb_per_s(device: torch.device) -> float:
    """What the copy engine makes of pinned memory."""
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device, pin_memory=False)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    there.copy_(host, non_blocking=True)
    begin.record()
    for _ in range(4):
        there.copy_(host, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return 4 * host.nbytes / float(begin.elapsed_time(end)) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--pairs", type=lambda text: (float(text.split(":")[0]), text.split(":")[1]), nargs="*")
    parser.add_argument("--peaks", type=lambda text: tuple(text.split(":")), nargs="*", help="shape:batch:context")
    parser.add_argument("--formats", type=lambda text: tuple(text.split(",")), default=FORMATS)
    parser.add_argument("--ram", type=float, default=64.0)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    given.pairs = PAIRS if given.pairs is None else given.pairs
    given.peaks = PEAKS if given.peaks is None else [(name, int(a), int(b)) for name, a, b in given.peaks]
    kind = torch.device(given.device).type
    document: Row = {
        "benchmark": "fit_memories",
        "commit": commit(),
        "machine": machine(kind),
        "versions": versions(),
        "shape": given.shape,
        "context": given.context,
        "batch": given.batch,
        "two_memories": [],
        "peaks": [],
    }

    def note(part: str, row: Row) -> None:
        document[part].append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "formats"}), flush=True)
        save(f"fit_memories_{given.shape}", document, given.output)

    if kind == "cuda":
        document["copied_gb_per_s"] = copied_gb_per_s(torch.device(given.device))
        print("copied GB/s", document["copied_gb_per_s"], flush=True)
    if given.pairs:
        try:
            config = config_of(given.shape)
            probe = probed(config, given.context, given.batch, given.device, timed=True)
            document["probe"] = probe.to_dict()
            print(json.dumps(document["probe"]), flush=True)
            two_memories(config, probe, given, note)
        except Exception as error:
            note("two_memories", {"failed": f"{type(error).__name__}: {error}"[:800]})
            traceback.print_exc()
    peaks(given, note)


if __name__ == "__main__":
    main()
