"""Plans for two memories against uniform formats with their best split, predicted and measured, in one run.

    python benchmarks/fit_memories.py --output fit_memories.json

That is a model of 8B's shape on a GPU, in at most 150 s of an H200 (`--seconds`: no plan is begun after them less what
one takes); `--device cpu --shape tiny --limits 0.65:int8_row --context 256` tries it out. Weights are drawn on the
device, so no search is needed: what a format costs a tensor is its measured squared error times a sensitivity that is
drawn for it. Times and memory beside weights are measured as `bitplan fit` does, in a process of its own. Then for each
limit, in GB, and the uniform format beside it:

    joint            the fastest plan that is predicted no more harmful than that uniform format with its best split
    int4_g32, ...    each of `--uniform` for all weights, with the fastest choice of places

Each is built in its formats and places, its cache is filled to the context, and a prompt's last piece and tokens are
read as `generate` does: milliseconds a token and the peak of torch's allocator are held against the predictions, in
`table`, which is printed at the end. Each row says where a difference comes from: parts of the peak (weights, scales in
their kernels' order, keys and values, all beside them), how products of one row ran, operations of a token, and
`host_us`, what the host took for a small operation, for hosts are slower at one time than at another:
`ms_at_host_speed` is the prediction with the probe's launches at the speed of then. Tokens are replayed as CUDA graphs,
but where `why_not_recorded` says otherwise; then `busy_ms` waits for the host, too, for more than some 1,000 launches.

`reading` are bytes a second at which each launch of a kernel reads pinned memory. `--peaks` are predicted peaks of
models that lie on the GPU as a whole, in one format each.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from harness import commit, machine, save, versions
from torch import nn

from bitplan.formats import decode, encode, get_format
from bitplan.packed.crossover import compile_together
from bitplan.packed.fused_projections import fuse_what_is_seen
from bitplan.packed.language.token_graph import TokenGraph
from bitplan.packed.language.token_steps import PIECE_TOKENS
from bitplan.packed.linear_operator import GraphWeight
from bitplan.packed.packed_weight import PackedWeight, wait_in_host
from bitplan.packed.products.fused import fused_for
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
from bitplan.searching.memory_probe import MemoryProbe, _filled, _storage_bytes, _timed_token, probe_memory
from bitplan.searching.solver import solve
from bitplan.searching.two_memories import SPLIT_GAP, best_split, crossing_first, is_weight, lookups_of, scale_bytes

# width, MLP, heads, heads of keys, layers, vocabulary, and whether the head is the embedding
SHAPES = {
    "tiny": (256, 512, 4, 2, 4, 1024, False),
    "lm26m": (384, 1024, 6, 2, 8, 16384, True),
    "smollm2": (576, 1536, 9, 3, 30, 49152, True),
    "1b": (2048, 8192, 32, 8, 16, 128256, True),
    "8b": (4096, 14336, 32, 8, 32, 128256, False),
}
FORMATS = ("fp4_u8_g128", "mxfp4", "int4_g32", "int8_row", "bfloat16")
LIMITS = ((4.0, "int4_g32"), (8.0, "int8_row"))
UNIFORM = ("int4_g32", "int8_row")
JOINT = "joint"
PEAK_FORMATS = ("mxfp4", "int8_row", "q8_0_gguf", "bfloat16")
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
KV = "int8_row"
PROFILED, LARGEST = 16, 8  # operations, and kinds of blocks of memory, that a row names
SMALL_OPERATIONS, READ_BYTES, READINGS = 1000, (28672, 4096), 5
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
        return transformers.LlamaForCausalLM(copy.deepcopy(config)).to(torch.bfloat16).eval()


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
    """Milliseconds a token, and the peak from the last piece of a prompt on, with its parts."""
    device = torch.device(given.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    with torch.inference_mode():
        model = build(config, choice, weights, device)
        built = time.perf_counter()
        piece = min(PIECE_TOKENS, given.context // 2)
        cache = _filled(model, given.batch, given.context - piece - 40, device)
        ids = torch.zeros(given.batch, 1, dtype=torch.int64, device=device)
        model(input_ids=ids, past_key_values=cache, use_cache=True)  # makes what tokens read beside weights
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for length in (piece, 1):
            ids = torch.zeros(given.batch, length, dtype=torch.int64, device=device)
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        parts = parts_of_memory(model, cache, peak)
        read = time.perf_counter()
        host = [host_us(device)]
        token = _timed_token(model, cache, given.batch, device)
        host.append(host_us(device))
        more = {
            "why_not_recorded": why_not_recorded(model, cache, given, device),
            "products": ways_of_products(model, given.batch),
            "operations": operations_of_token(model, cache, given, device),
        }
        del model, cache
    times = {"ms": token.whole / 1e3, "busy_ms": token.busy / 1e3, "launch_ms": token.launch / 1e3, "host_us": host}
    seconds = {"build": built - started, "read": read - built, "tokens": time.perf_counter() - read}
    return {**times, "peak_bytes": peak, "parts": parts, "seconds": seconds, **more}


def parts_of_memory(model: Any, cache: Any, peak: int | None) -> Row:
    """Bytes on the device by what they are for; `beside` is the rest of the peak, and `largest` blocks of all that lie.

    weights   parameters and packed parts, without those in the host's memory
    scales    what fused kernels keep in their own order
    kv        keys and values, with the room for more tokens
    """
    held: dict[int, int] = {}  # by address, so that views of one memory count once
    scales: dict[int, int] = {}

    def count(parts: Any, into: dict[int, int]) -> None:
        for part in parts:
            if isinstance(part, torch.Tensor) and not part.is_meta and part.untyped_storage().data_ptr() not in held:
                into[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()

    elsewhere = {id(part) for one in packed_weights(model) if one.waiting for part in one._buffers.values()}
    graphs = (module for module in model.modules() if isinstance(module, GraphWeight))  # which hold scales
    elsewhere |= {id(part) for one in graphs for part in one._buffers.values()}
    count((part for part in (*model.parameters(), *model.buffers()) if id(part) not in elsewhere), held)
    waiting = {part.untyped_storage().data_ptr() for one in packed_weights(model) for part in one.waiting.values()}
    for layer in (module for module in model.modules() if isinstance(module, QuantLinear)):
        joint = None if layer.joint is None else layer.joint.layer
        for runs in (layer, joint):
            if runs is not None:
                count(
                    (part for made in runs.weight._derived.values() if isinstance(made, tuple) for part in made), scales
                )
                count(getattr(runs, "_prepared", ()), scales)
    scales = {address: size for address, size in scales.items() if address not in waiting}
    known = {"weights": sum(held.values()), "scales": sum(scales.values()), "kv": _storage_bytes(cache)}
    if peak is None:
        return known
    blocks: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                blocks[block["size"]] = blocks.get(block["size"], 0) + 1
    largest = sorted(blocks.items(), key=lambda one: one[0] * one[1], reverse=True)[:LARGEST]
    stays = torch.cuda.memory_allocated()
    return known | {"stays": stays, "beside": peak - sum(known.values()), "largest": largest}


def packed_weights(model: Any) -> list[PackedWeight]:
    return [module for module in model.modules() if isinstance(module, PackedWeight)]


def predicted_parts(joint: SearchEvidence, choice: Mapping[str, str], goal: FitGoal) -> dict[str, int]:
    """The same parts, as they are predicted."""
    scales = nbytes = kv = 0
    for name, fmt in choice.items():
        group = joint.groups[name]
        if is_weight(group):
            shapes = [shape for shape, _ in group.tensors.values()]
            scales += scale_bytes(weight_format(fmt), shapes, on_gpu=goal.on_gpu and name not in lookups_of(joint))
            nbytes += group.formats[fmt].nbytes
        else:
            kv += group.formats[fmt].nbytes
    beside = joint.stays[RESERVED].nbytes + joint.workspace(choice)
    staying = joint.staying_bytes - joint.stays[RESERVED].nbytes
    return {"weights": nbytes - scales + staying, "scales": scales, "kv": kv, "beside": beside}


def host_us(device: torch.device) -> float:
    """Microseconds of the host for one small operation, the least of five rounds."""
    numbers, rounds = torch.zeros(16, device=device), []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(SMALL_OPERATIONS // 5):
            numbers.add_(1)
        rounds.append(1e6 * (time.perf_counter() - started) / (SMALL_OPERATIONS // 5))
    return min(rounds)


def why_not_recorded(model: Any, cache: Any, given: Any, device: torch.device) -> str | None:
    """Why tokens are not replayed as a CUDA graph, as `generate` does where it can; None where they are."""
    recorded = TokenGraph(model, {"logits_to_keep": 1}, cache)
    for _ in range(4):
        recorded(torch.zeros(given.batch, 1, dtype=torch.int64, device=device))
    return recorded.why_not


def ways_of_products(model: Any, batch: int) -> dict[str, int]:
    """How layers run a token's products, by format and place: the strategy, whether joined, whether prepared."""

    def is_prepared(layer: Any) -> bool:
        shapes = (key[0] for key in layer._bound if key and isinstance(key[0], torch.Size))
        return any(shape.numel() == batch * layer.in_features for shape in shapes)

    counts: dict[str, int] = {}
    for layer in (module for module in model.modules() if isinstance(module, QuantLinear)):
        joint = None if layer.joint is None else layer.joint.layer
        words = [layer.weight.fmt.name + ("@host" if layer.weight.waiting else ""), layer.explain(batch).strategy]
        words += ["joined"] if joint is not None and is_prepared(joint) else []
        words += ["prepared"] if is_prepared(layer) or "joined" in words else ["not prepared"]
        counts[", ".join(words)] = counts.get(", ".join(words), 0) + 1
    return counts


def operations_of_token(model: Any, cache: Any, given: Any, device: torch.device) -> list[list[Any]]:
    """The operations that a token makes most of, or that take most of the host: name, how often, microseconds.

    The GPU is not watched: once it was, later launches of the process take longer.
    """
    from torch.profiler import ProfilerActivity, profile

    ids = torch.zeros(given.batch, 1, dtype=torch.int64, device=device)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
    found = [[one.key, one.count, round(one.self_cpu_time_total)] for one in profiled.key_averages()]
    return sorted(found, key=lambda one: one[2], reverse=True)[:PROFILED]


def plans_of(joint: SearchEvidence, limit: tuple[float, str], goal: FitGoal, uniform: tuple[str, ...]) -> Row:
    """By label the solution, or why there is none."""
    within = Goal(nbytes=goal.memory, host=goal.ram, rows=goal.batch)
    plans: Row = {}
    try:
        harmless = Goal(**vars(within) | {"max_kl": best_split(joint, limit[1], within).nats})
        plans[JOINT] = solve(joint, harmless, gap=SPLIT_GAP)
    except Exception as error:
        plans[JOINT] = error
    for fmt in uniform:
        try:
            plans[fmt] = best_split(joint, fmt, within)
        except Exception as error:
            plans[fmt] = error
    return plans


def two_memories(config: Any, probe: MemoryProbe, given: Any, note: Callable[[str, Row], None]) -> None:
    device = torch.device(given.device)
    weights, kv = evidence_of(config, given.formats, device)
    plans: list[tuple[Row, Any, dict[str, str], SearchEvidence, FitGoal]] = []
    for limit in given.limits:
        memory = limit[0]
        goal = FitGoal(int(memory * 1e9), given.context, given.batch, given.device, ram=int(given.ram * 1e9))
        joint = joint_evidence(weights, kv, goal, probe.nbytes, probe)
        for label, solution in plans_of(joint, limit, goal, given.uniform).items():
            row = {"memory_gb": memory, "plan": label}
            if isinstance(solution, Exception):
                note("two_memories", row | {"failed": f"{type(solution).__name__}: {solution}"[:500]})
            else:
                plans.append((row, solution, crossing_first(joint, solution.choice), joint, goal))
    print("plans solved", round(given.elapsed()), "s", flush=True)
    compile_kernels([choice for _, _, choice, _, _ in plans], weights, device)
    print("kernels compiled", round(given.elapsed()), "s", flush=True)
    before: dict[frozenset[tuple[str, str]], Row] = {}
    longest = 0.0
    for row, solution, choice, joint, goal in plans:
        row |= predictions(joint, choice, solution, probe, goal)
        same = frozenset(choice.items())
        if same not in before and given.elapsed() + longest > given.seconds:
            note("two_memories", row | {"failed": "not begun: the time was over"})
            continue
        started = given.elapsed()
        try:
            if same not in before:
                before[same] = measure(config, choice, weights, given)
            note("two_memories", row | against(row, before[same], probe, given))
        except Exception as error:
            traceback.print_exc()
            note("two_memories", row | {"failed": f"{type(error).__name__}: {error}"[:500]})
        longest = max(longest, given.elapsed() - started)


def predictions(
    joint: SearchEvidence, choice: Mapping[str, str], solution: Any, probe: MemoryProbe, goal: FitGoal
) -> Row:
    assert probe.times is not None
    counts: dict[str, int] = {}
    for one in choice.values():
        counts[one] = counts.get(one, 0) + 1
    return {
        "nats": solution.nats,
        "gpu_bytes": joint.nbytes(choice),
        "host_bytes": joint.host_bytes(choice),
        "products_ms": (solution.us or 0.0) / 1e3,
        "predicted_ms": probe.times.token_us(solution.us or 0.0) / 1e3,
        "predicted_gpu_ms": (probe.times.rest + (solution.us or 0.0)) / 1e3,
        "predicted_parts": predicted_parts(joint, choice, goal),
        "groups": counts,
        "gap": solution.gap,
        "formats": {place_of(name)[1] + "." + place_of(name)[0]: one for name, one in choice.items()},
    }


def against(row: Row, measured: Row, probe: MemoryProbe, given: Any) -> Row:
    """What was measured, and how far the predictions are off."""
    times = probe.times
    assert times is not None
    launch = times.launch * max(measured["host_us"]) / given.host_us_of_probe
    then = max(launch, times.rest + 1e3 * row["products_ms"]) / 1e3
    more = {"measured": measured, "ms_at_host_speed": then, "ms_off": row["predicted_ms"] / measured["ms"] - 1}
    if measured["peak_bytes"]:
        more["peak_off"] = row["gpu_bytes"] / measured["peak_bytes"] - 1
    return more


def compile_kernels(choices: list[dict[str, str]], weights: SearchEvidence, device: torch.device) -> None:
    """Compile the products of all plans side by side: a model would compile one after the other."""
    fused = fused_for(device.type)
    if device.type != "cuda" or fused is None:
        return
    kinds = {
        (weight_format(fmt), tuple(shape for shape, _ in weights.groups[name].tensors.values()))
        for choice in choices
        for name, fmt in choice.items()
        if name in weights.groups and not get_format(weight_format(fmt)).is_cast
    }

    def product(fmt: str, shapes: tuple[tuple[int, ...], ...]) -> Callable[[], object]:
        parts = [encode(torch.zeros(shape, device=device), fmt) for shape in shapes]
        prepared = [fused.prepare(part) for part in parts]
        whole, scales = parts[0], prepared[0]
        if len(parts) > 1:
            whole = encode(torch.zeros((sum(shape[0] for shape in shapes), shapes[0][1]), device=device), fmt)
            joined = fused.join(prepared)
            assert joined is not None
            scales = joined
        x = torch.zeros(1, shapes[0][1], dtype=torch.bfloat16, device=device)
        return lambda: fused.run(x, whole, scales, None, None)

    compile_together(device, [product(*kind) for kind in sorted(kinds)])


def reading(given: Any, note: Callable[[str, Row], None]) -> None:
    """Bytes a microsecond that each launch of a product of one row reads from pinned memory."""
    device = torch.device(given.device)
    fused = fused_for(device.type)
    if device.type != "cuda" or fused is None:
        return
    x = torch.zeros(1, READ_BYTES[1], dtype=torch.bfloat16, device=device)

    def runner(weight: Any, prepared: Any, how: Any) -> Callable[[], object]:
        return lambda: fused.run(x, weight, prepared, None, how)

    for fmt in given.uniform:
        weight = wait_in_host(PackedWeight(encode(torch.zeros(READ_BYTES, device=device), fmt)), device).encoded
        prepared = fused.prepare(weight)
        launches = list(fused.launches(weight, 1))
        runs = [runner(weight, prepared, how) for how in launches]
        compile_together(device, runs)
        for how, run in zip(launches, runs, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            run()
            begin.record()
            for _ in range(READINGS):
                run()
            end.record()
            torch.cuda.synchronize()
            rate = READINGS * weight.data.nbytes / (1e3 * begin.elapsed_time(end))
            note("reading", {"format": fmt, "launch": dict(how), "bytes_a_us": rate})


def table_of(document: Row) -> list[str]:
    """The rows as lines of text."""
    head = "| GB | plan | ms predicted | at the host's speed of then | measured | launch | busy | host us "
    head += "| of the GPU predicted | "
    head += "peak GB predicted | measured | off | weights | scales | kv | beside |"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in document["two_memories"]:
        if "measured" not in row:
            lines.append(f"| {row.get('memory_gb', '')} | {row.get('plan', '')} | {row.get('failed', '')} |")
            continue
        measured, parts = row["measured"], row["measured"]["parts"]
        times = [
            row["predicted_ms"],
            row["ms_at_host_speed"],
            measured["ms"],
            measured["launch_ms"],
            measured["busy_ms"],
        ]
        cells = [f"{one:.2f}" for one in (*times, max(measured["host_us"]), row["predicted_gpu_ms"])]
        cells.append(f"{row['gpu_bytes'] / 1e9:.3f}")
        cells.append(f"{measured['peak_bytes'] / 1e9:.3f}" if measured["peak_bytes"] else "")
        cells.append(f"{100 * row['peak_off']:+.1f}%" if "peak_off" in row else "")
        for part, predicted in row["predicted_parts"].items():
            cells.append(
                f"{predicted / 1e9:.3f} / {parts[part] / 1e9:.3f}" if part in parts else f"{predicted / 1e9:.3f} /"
            )
        lines.append(f"| {row['memory_gb']:g} | {row['plan']} | " + " | ".join(cells) + " |")
    return lines


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
    parser.add_argument("--limits", type=lambda text: (float(text.split(":")[0]), text.split(":")[1]), nargs="*")
    parser.add_argument("--uniform", type=lambda text: tuple(text.split(",")), default=UNIFORM)
    parser.add_argument("--peaks", type=lambda text: tuple(text.split(":")), nargs="*", help="shape:batch:context")
    parser.add_argument("--formats", type=lambda text: tuple(text.split(",")), default=FORMATS)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--ram", type=float, default=64.0)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    given.limits = LIMITS if given.limits is None else given.limits
    given.peaks = [(name, int(a), int(b)) for name, a, b in given.peaks or ()]
    started = time.perf_counter()
    given.elapsed = lambda: time.perf_counter() - started
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
        "reading": [],
        "peaks": [],
    }

    def note(part: str, row: Row) -> None:
        document[part].append(row)
        print(round(given.elapsed()), "s", json.dumps({key: row[key] for key in row if key != "formats"}), flush=True)
        save(f"fit_memories_{given.shape}", document, given.output)

    if kind == "cuda":
        document["copied_gb_per_s"] = copied_gb_per_s(torch.device(given.device))
        print("copied GB/s", document["copied_gb_per_s"], flush=True)
    if given.limits:
        try:
            config = config_of(given.shape)
            given.host_us_of_probe = host_us(torch.device(given.device))
            probe = probed(config, given.context, given.batch, given.device, timed=True)
            given.host_us_of_probe = max(given.host_us_of_probe, host_us(torch.device(given.device)))
            document |= {"probe": probe.to_dict(), "host_us_of_probe": given.host_us_of_probe}
            print(round(given.elapsed()), "s", json.dumps(document["probe"]), flush=True)
            two_memories(config, probe, given, note)
            reading(given, note)
        except Exception as error:
            note("two_memories", {"failed": f"{type(error).__name__}: {error}"[:800]})
            traceback.print_exc()
    peaks(given, note)
    document["table"], document["seconds"] = table_of(document), given.elapsed()
    save(f"fit_memories_{given.shape}", document, given.output)
    print("\n".join(document["table"]))


if __name__ == "__main__":
    main()
