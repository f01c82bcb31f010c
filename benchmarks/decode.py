"""Whole models on packed weights, the way people run them, against BF16 in the same run.

    python benchmarks/decode.py [--models "8b:bfloat16:1,4 8b:mxfp4:1,4 eager compiled generate peers"] [--output FILE]

A llama of 1B's or 8B's shape with 16 layers and random weights; all linear layers and the output are packed, q/k/v and
gate/up joined. Milliseconds for one token of each sequence, 512 tokens in a static cache, in these modes:

    eager       as a user writes it, one launch after another; all formats in turns, for the host is the limit
    compiled    torch.compile of the layers, fullgraph; in turns as well
    graph       compiled, and the whole step captured in a CUDA graph
    overlapped  the same, where the compiler's own kernels begin before the kernel before them has ended, as packed
                products always do (`torch._inductor.config.triton.enable_pdl`)

and of a prefill of 2048 tokens, compiled. The floor of a row is what must be read (weights and cache) over the
bandwidth of a device copy, and the kernels of a step times what a kernel costs in a graph that does nothing. "+cache"
has a TileCache for the whole model, which `auto` uses where it is faster; its bytes are in `memory_gib`. `off` is how
far the logits of a mode lie from those of eager, relative to their norm.

generate   transformers' own `generate` after a prompt of 512 tokens, eager, all formats in turns: to the first token,
           and for each token after it; and the loop of `bitplan generate`, which records a CUDA graph in its first
           tokens, for each of 128
prompts    prompts of 128 to 8192 tokens through transformers' own llama, eager, all formats in turns
peers      torchao's weight-only int4 and int8 in the same model, and gemlite's mxfp4, int4 and int8, where installed
host       microseconds of the host for a call of a layer at 1 and 512 rows
inputs     inputs in 8 bits (mxfp4@fp8: mxfp4 with inputs in fp8_e4m3_row) beside the same weights with inputs as they
           are, BF16 and torchao's dynamic float8: prompts of 512, 2048 and 8192 tokens, and 1 and 64 sequences,
           compiled, in CUDA graphs. Each way is a process; they compile side by side, and are timed in turn

`generate@3b` and `prompts@3b` take the 3B's shape, of which no record is shipped and on which nothing was tuned.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch._inductor.config as inductor
from llama_decode import SHAPES, VOCABULARY, DecodingLlama
from torch import Tensor, nn

from bitplan.packed.fused_projections import fuse_projections
from bitplan.packed.language.token_steps import Decoding
from bitplan.packed.quant_linear import QuantLinear, warm_up
from bitplan.packed.tile_cache import TileCache

MODELS = (
    "8b:bfloat16:1,4,16,64 8b:mxfp4:1,4,16,64 8b:int8_g128:1,4,16,64 8b:mxfp4+cache:64 8b:int4_g32:1,64 8b:nvfp4:1,64 "
    "8b:fp8_e4m3_row:1,64 eager compiled generate@3b generate prompts prompts@3b peers "
    "1b:bfloat16:1,64 1b:mxfp4:1,64 1b:int8_g128:1,64 1b:int4_g32:1 "
    "1b:nvfp4:1 1b:fp8_e4m3_row:1 8b:int8_g128+cache:64"
)
OWN_TOKENS = 128  # of `bitplan generate`
PROMPTS = (128, 512, 1024, 2048, 8192)
PROMPT = 512
PREFILLS = (512, 2048, 8192)
INPUTS = ("bfloat16", "fp8_e4m3_row", "fp8_e4m3_row@fp8", "mxfp4", "mxfp4@fp8", "torchao float8")
EAGER = ("bfloat16", "mxfp4", "int8_g128", "int4_g32", "nvfp4", "fp8_e4m3_row", "int8_row")
PEER_SECONDS = 60  # of looking for its launches, after which a peer is given up
CONTEXT, PREFILL, STEPS = 512, 2048, 8
REPEATS = 7
Row = dict[str, Any]
Step = Callable[[], Any]


def build(size: str, fmt: str, device: str, cache: TileCache | None = None) -> DecodingLlama:
    """The model in a format; its projections joined."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = DecodingLlama(SHAPES[size], CONTEXT).eval()
    torch.set_default_dtype(default)
    if fmt != "bfloat16":
        pack(model, fmt, cache)
        fuse_projections(model, (torch.zeros((1, 4), dtype=torch.long, device=device),))
    return model


def pack(model: nn.Module, fmt: str, cache: TileCache | None) -> None:
    weights, _, inputs = fmt.partition("@")
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                options: Any = {"cache": cache, "inputs": inputs or None, "name": f"{path}.{name}".lstrip(".")}
                made = QuantLinear.from_linear(child, weights, **options)
                setattr(module, name, made)


def compile_layers(model: DecodingLlama) -> None:
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False)


def model_bytes(model: DecodingLlama) -> int:
    """What a step reads of the weights: all but the embedding."""
    skipped = {id(parameter) for parameter in model.embed_tokens.parameters()}
    held = [
        *model.parameters(),
        *(part for module in model.modules() if isinstance(module, QuantLinear) for part in module.weight.buffers()),
    ]
    return sum(part.nbytes for part in held if id(part) not in skipped)


# ---- timing ----------------------------------------------------------------------------------------------------------


def step_of(model: DecodingLlama, batch: int, device: str) -> Step:
    torch.manual_seed(batch)  # the same cache and tokens each time
    model.prepare(batch)
    ids = torch.randint(0, VOCABULARY, (batch, 1), device=device)
    position = torch.tensor([CONTEXT - 1], device=device)
    return lambda: model.step(ids, position)


def wall_ms(run: Step, repeats: int = REPEATS) -> list[float]:
    """Milliseconds a step, the host's time included, by batches of steps that nobody waits for in between."""
    samples = []
    for _ in range(repeats):
        _synchronize()
        started = time.perf_counter()
        for _ in range(STEPS):
            run()
        _synchronize()
        samples.append((time.perf_counter() - started) * 1e3 / STEPS)
    return samples


def captured(run: Step) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernels_of(graph: Any) -> tuple[int, list[list[Any]]]:
    """How many kernels a replay runs, and the names that take most of it with count and microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in profiled.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    top = [[event.key[:60], event.count, round(event.self_device_time_total, 1)] for event in events[:14]]
    return sum(event.count for event in events), top


def empty_kernel_us() -> float:
    """What a kernel costs in a graph of many that do next to nothing."""
    x = torch.zeros(32, device="cuda")
    graph = captured(lambda: [x.add_(1) for _ in range(200)])
    return statistics.median(wall_ms(graph.replay)) * 1e3 / 200


# ---- parts -----------------------------------------------------------------------------------------------------------


def measure(
    size: str, fmt: str, batches: tuple[int, ...], device: str, floor: Row, *, cached: bool, prefill: bool
) -> Iterator[Row]:
    shape = SHAPES[size]
    weights = (
        2
        * shape.layers
        * (shape.hidden * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + 3 * shape.hidden * shape.ffn)
        + 2 * VOCABULARY * shape.hidden
    )
    cache = TileCache(weights + 2**30) if cached else None
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    model = build(size, fmt, device, cache)
    name = fmt + ("+cache" if cached else "")
    started = time.perf_counter()
    with torch.no_grad():
        warm_up(model, batches)
        _synchronize()
        first_use = time.perf_counter() - started
        expected = {}
        for batch in batches:
            run = step_of(model, batch, device)
            expected[batch] = run()
        torch._dynamo.reset()
        compile_layers(model)
        for batch in batches:
            with guarded(f"{size} {name} {batch}"):
                started = time.perf_counter()
                run = step_of(model, batch, device)
                off = _off(run(), expected.pop(batch))
                row = {
                    "size": size,
                    "format": name,
                    "batch": batch,
                    "first_use_s": round(first_use, 2),
                    "compile_s": round(time.perf_counter() - started, 1),
                    "off": off,
                    "picks": picks(model),
                }
                gc.collect()
                gc.freeze()  # what compilers left behind would be looked through again and again
                if device != "cuda":
                    continue
                graph = captured(run)
                samples = wall_ms(graph.replay)
                count, top = kernels_of(graph)
                nbytes = model_bytes(model) + kv_bytes(size, batch)
                least = nbytes / floor["copy_bytes_per_s"] * 1e3 + count * floor["kernel_us"] / 1e3
                memory = (torch.cuda.memory_allocated() - before) / 2**30
                yield row | {
                    "mode": "graph",
                    "floor_ms": round(least, 3),
                    "read_gib": round(nbytes / 2**30, 3),
                    "kernels": count,
                    "memory_gib": round(memory, 2),
                    **_times(samples),
                    **({"top": top} if batch == 1 else {}),
                }
                del graph
                if batch == 1 and hasattr(inductor.triton, "enable_pdl"):
                    yield row | {"mode": "overlapped"} | overlapped(model, run)
        if device == "cuda" and prefill and size == "8b":
            with guarded(f"{size} {name} prefill"):
                ids = torch.randint(0, VOCABULARY, (1, PREFILL), device=device)
                warm_up(model, (PREFILL,))
                model.prefill(ids)
                samples = wall_ms(lambda: model.prefill(ids))
                yield {
                    "size": size,
                    "format": name,
                    "batch": 1,
                    "mode": "prefill",
                    "memory_gib": round((torch.cuda.memory_allocated() - before) / 2**30, 2),
                    "picks": picks(model),
                    **_times(samples),
                }


def overlapped(model: DecodingLlama, run: Step) -> Row:
    """A step in a graph whose kernels all begin early; compiled anew for it."""
    expected = run()
    with inductor.patch({"triton.enable_pdl": True}):
        torch._dynamo.reset()
        compile_layers(model)
        off = _off(run(), expected)
        times = _times(wall_ms(captured(run).replay))
    torch._dynamo.reset()
    compile_layers(model)
    return {"off_graph": off, **times}


def _off(logits: Tensor, expected: Tensor) -> float:
    return round(float((logits.float() - expected.float()).norm() / expected.float().norm()), 4)


def kv_bytes(size: str, batch: int) -> int:
    shape = SHAPES[size]
    return 2 * 2 * shape.layers * batch * CONTEXT * shape.kv_heads * shape.head_dim


def picks(model: DecodingLlama) -> dict[str, str]:
    """How the layers ran last, of the first layer and the output."""
    found = {}
    for _, module in (*model.layers[0].named_modules(), ("lm_head", model.lm_head)):
        if isinstance(module, QuantLinear):
            joint = module.joint.layer if module.joint is not None else None
            pick = (joint or module).last_pick
            found[(joint or module).name.split(".")[-1]] = pick.strategy if pick else "-"
    return found


def _times(samples: list[float]) -> Row:
    return {"ms": statistics.median(samples), "samples_ms": [round(each, 4) for each in samples]}


def host_us(device: str) -> Row:
    """Host microseconds of a call, with nothing to wait for, by rows and format."""
    linear = nn.Linear(4096, 4096, bias=False, device=device, dtype=torch.bfloat16)
    formats = [fmt for fmt in EAGER if fmt != "bfloat16"]
    layers = {"F.linear": linear, **{fmt: QuantLinear.from_linear(linear, fmt) for fmt in formats}}
    samples: dict[str, list[float]] = {}
    with torch.no_grad():
        for rows in (1, 512):
            x = torch.randn(1, rows, 4096, device=device, dtype=torch.bfloat16)
            for turn in range(21):
                for name, layer in layers.items():
                    _synchronize()
                    started = time.perf_counter()
                    for _ in range(20):  # few enough that the GPU's queue has room
                        layer(x)
                    if turn:
                        samples.setdefault(f"{name}, {rows} rows", []).append((time.perf_counter() - started) * 5e4)
    return {name: round(statistics.median(each), 2) for name, each in samples.items()}


def eager(device: str, size: str = "8b") -> list[Row]:
    """One token, launch by launch, all formats in turns."""
    with torch.no_grad():
        models = {fmt: build(size, fmt, device) for fmt in EAGER}
        steps = {}
        for fmt, model in models.items():
            warm_up(model, (1,))
            steps[fmt] = step_of(model, 1, device)
        samples = in_turns(steps)
    return [{"size": size, "format": fmt, "batch": 1, "mode": "eager", **_times(each)} for fmt, each in samples.items()]


def compiled(device: str, size: str = "8b") -> list[Row]:
    """One token, compiled layers without a graph, all formats in turns."""
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=4 * len(EAGER)):
        steps = {}
        for fmt in EAGER:
            model = build(size, fmt, device)
            warm_up(model, (1,))
            compile_layers(model)
            steps[fmt] = step_of(model, 1, device)
            steps[fmt]()
        samples = in_turns(steps)
    return [
        {"size": size, "format": fmt, "batch": 1, "mode": "compiled in turns", **_times(each)}
        for fmt, each in samples.items()
    ]


def in_turns(steps: dict[str, Step], repeats: int = 2 * REPEATS) -> dict[str, list[float]]:
    gc.collect()
    gc.freeze()
    for run in steps.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, run in steps.items():
            samples[name] += wall_ms(run, 1)
    return samples


def transformers_model(size: str, fmt: str, device: str) -> Any:
    """transformers' own llama of a shape, in a format, its projections joined as `from_pretrained` joins them."""
    transformers = importlib.import_module("transformers")
    shape = SHAPES[size]
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=VOCABULARY,
        max_position_embeddings=16384,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    if fmt != "bfloat16":
        pack(model, fmt, None)
        fuse_projections(model)
    return model


def generate(device: str, size: str = "8b", prompt: int = PROMPT, tokens: int = 32) -> list[Row]:
    """transformers' generate, eager, all formats in turns: milliseconds to the first token, and for each one after it.

    The row of the first format of a shape without a record also says how long the very first answer took.
    """
    ids = torch.randint(0, VOCABULARY, (1, prompt), device=device)
    models = {fmt: transformers_model(size, fmt, device) for fmt in EAGER}
    parts = ("first", "after", "first, bitplan's loop", "after, bitplan's loop")
    samples: dict[tuple[str, str], list[float]] = {(fmt, part): [] for fmt in models for part in parts}
    answer: dict[str, float] = {}
    for turn in range(6):
        for fmt, model in models.items():
            times = {count: _generate_ms(model, ids, count) for count in (1, 1 + tokens)}
            if not turn:  # the first one compiles
                answer[fmt] = round(times[1] / 1e3, 2)
                gc.collect()
                gc.freeze()
                continue
            samples[fmt, "first"].append(times[1])
            samples[fmt, "after"].append((times[1 + tokens] - times[1]) / tokens)
            own_first, own_after = _own_generate_ms(model, ids, OWN_TOKENS)
            samples[fmt, "first, bitplan's loop"].append(own_first)
            samples[fmt, "after, bitplan's loop"].append(own_after / OWN_TOKENS)
    return [
        {
            "size": size,
            "format": fmt,
            "batch": 1,
            "mode": f"generate {part}",
            "prompt": prompt,
            "first_answer_s": answer[fmt],
            **_times(each),
        }
        for (fmt, part), each in samples.items()
    ]


def _generate_ms(model: Any, ids: Tensor, tokens: int) -> float:
    _synchronize()
    started = time.perf_counter()
    model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    _synchronize()
    return (time.perf_counter() - started) * 1e3


def _own_generate_ms(model: Any, ids: Tensor, tokens: int) -> tuple[float, float]:
    """Milliseconds to the first token, and of all after it, as `bitplan generate` makes them: a graph is recorded."""
    decoding = Decoding(model)
    with torch.inference_mode():
        _synchronize()
        started = time.perf_counter()
        token = int(decoding(ids)[0].argmax())
        first = time.perf_counter()
        for _ in range(tokens):
            token = int(decoding(torch.tensor([[token]], device=ids.device))[0].argmax())
        ended = time.perf_counter()
    if decoding.why_not is not None:
        print("not recorded:", decoding.why_not, flush=True)
    return (first - started) * 1e3, (ended - first) * 1e3


def prompts(device: str, size: str = "8b") -> Iterator[Row]:
    """A prompt through transformers' own llama, eager, all formats in turns; nothing was warmed up but by a call."""
    with torch.no_grad():
        models = {fmt: transformers_model(size, fmt, device) for fmt in EAGER}
        for length in PROMPTS:
            ids = torch.randint(0, VOCABULARY, (1, length), device=device)
            others = torch.randint(
                0, VOCABULARY, (1, length - 3), device=device
            )  # users' prompts have no round lengths
            samples: dict[str, list[float]] = {fmt: [] for fmt in models}
            for turn in range(12):
                for fmt, model in models.items():
                    _synchronize()
                    started = time.perf_counter()
                    for tokens in (ids, others):
                        model(tokens, use_cache=True, logits_to_keep=1)
                    _synchronize()
                    if turn > 1:
                        samples[fmt].append((time.perf_counter() - started) * 1e3 / 2)
                if not turn:
                    gc.collect()
                    gc.freeze()
            for fmt, each in samples.items():
                times = _times(each)
                ratio = round(statistics.median(samples["bfloat16"]) / times["ms"], 3)
                yield {
                    "size": size,
                    "format": fmt,
                    "batch": 1,
                    "mode": "prompt",
                    "prompt": length,
                    "times_bfloat16": ratio,
                    **times,
                }


def peers(device: str, size: str = "8b", batches: tuple[int, ...] = (1,)) -> Iterator[Row]:
    weight_only = (way for way in torchao_ways() if way[0] not in INPUTS)
    for name, change in (*weight_only, *gemlite_ways(device)):
        with guarded(name), torch.no_grad(), time_limit(PEER_SECONDS):
            model = build(size, "bfloat16", device)
            change(model)
            for batch in batches:  # launches are sought here
                step_of(model, batch, device)()
            torch._dynamo.reset()
            compile_layers(model)
            for batch in batches:
                run = step_of(model, batch, device)
                run()
                graph = captured(run)
                yield {"size": size, "format": name, "batch": batch, "mode": "graph", **_times(wall_ms(graph.replay))}
        gc.collect()
        torch.cuda.empty_cache()


def inputs(device: str, size: str = "8b", limit_s: float = 140.0) -> list[Row]:
    """A process for each way of INPUTS; their rows, with the speed as a multiple of BF16's."""
    began, rows = time.perf_counter(), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for way in INPUTS:
            output = Path(folder, f"{way.replace(' ', '_')}.json")
            options = ["--way", way, "--size", size, "--turns", folder, "--device", device, "--output", str(output)]
            runs[way] = subprocess.Popen([sys.executable, __file__, *options]), output
        for way, (run, output) in runs.items():
            try:
                run.wait(max(1.0, limit_s - (time.perf_counter() - began)))
            except subprocess.TimeoutExpired:
                run.kill()
                faults.append(f"{way}: not ready after {limit_s} s")
            if output.exists():
                document = json.loads(output.read_text())
                rows += document["rows"]
                faults.extend(document["faults"])
    plain = {(row["mode"], row["batch"], row.get("prompt")): row["ms"] for row in rows if row["format"] == "bfloat16"}
    for row in rows:
        least = plain.get((row["mode"], row["batch"], row.get("prompt")))
        row["times_bfloat16"] = None if least is None else round(least / row["ms"], 3)
    return rows


def way_of_inputs(device: str, size: str, way: str, turns: Path) -> Iterator[Row]:
    """One way of INPUTS: compiled while others are, then timed while they wait."""
    with torch.no_grad():
        if way.startswith("torchao"):
            model = build(size, "bfloat16", device)
            dict(torchao_ways())[way](model)
        else:
            model = build(size, way, device)
            with in_turn(turns):
                warm_up(model, (1, 64))
                warm_up(model.layers, PREFILLS)  # the output sees a prompt's last token alone
            if device == "cuda":
                torch.cuda.empty_cache()  # other processes need it
        torch._dynamo.reset()
        compile_layers(model)
        steps = [(1, length, torch.randint(0, VOCABULARY, (1, length), device=device)) for length in PREFILLS]
        replays: list[tuple[Row, Step, Any]] = []  # a row, its replay, and what the graph reads
        for batch, length, ids in (*steps, (1, None, None), (64, None, None)):
            with guarded(f"{way}, {length or batch} tokens"):
                run = step_of(model, batch, device) if ids is None else partial(model.prefill, ids)
                replay = prepared_graph(run, device)
                row = {"size": size, "layers": SHAPES[size].layers, "format": way, "batch": batch}
                row |= {"mode": "prompt graph" if length else "graph", "prompt": length, "picks": picks(model)}
                replays.append((row, replay, (run, [*model.buffers()])))
        ready = turns / f"{way.replace(' ', '_')}.ready"
        ready.touch()
        while len(list(turns.glob("*.ready"))) < len(INPUTS) and time.time() - ready.stat().st_mtime < 30:
            time.sleep(0.1)
        with in_turn(turns):
            for row, replay, _ in replays:
                replay()
                yield row | _times(wall_ms(replay, 3 if row["prompt"] == max(PREFILLS) else REPEATS))


def prepared_graph(run: Step, device: str) -> Step:
    run()
    if device != "cuda":
        return run
    graph = captured(run)
    step: Step = graph.replay
    return step


@contextlib.contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """No other process of this folder is here meanwhile."""
    with open(folder / "turn", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        _synchronize()


def torchao_ways() -> Iterator[tuple[str, Callable[[nn.Module], Any]]]:
    with guarded("torchao"):
        api: Any = importlib.import_module("torchao.quantization")
        int4 = {"group_size": 32, "int4_packing_format": "tile_packed_to_4d"}
        yield "torchao int4", lambda model: api.quantize_(model, api.Int4WeightOnlyConfig(**int4))
        yield "torchao int8", lambda model: api.quantize_(model, api.Int8WeightOnlyConfig())
        dynamic = {"granularity": api.PerRow(), "set_inductor_config": False}  # the compiler as for all others
        of_inputs = api.Float8DynamicActivationFloat8WeightConfig
        yield "torchao float8", lambda model: api.quantize_(model, of_inputs(**dynamic))


def gemlite_ways(device: str) -> Iterator[tuple[str, Callable[[nn.Module], Any]]]:
    with guarded("gemlite"):
        helper: Any = importlib.import_module("gemlite.helper")

        def int4(linear: nn.Linear) -> Any:
            groups = linear.weight.data.float().reshape(-1, 32)
            low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
            scales = (high - low) / 15
            zeros = (-low / scales).round()
            codes = (groups / scales + zeros).round().clamp(0, 15).to(torch.uint8).view_as(linear.weight)
            return helper.A16W4_HQQ_INT(device=device, dtype=torch.bfloat16).from_weights(codes, scales, zeros)

        ways = {
            "mxfp4": lambda linear: helper.A16W4_MXFP(device=device, dtype=torch.bfloat16).from_linear(linear, False),
            "int4": int4,
            "int8": lambda linear: helper.A16W8_INT8(device=device, dtype=torch.bfloat16).from_linear(linear, False),
        }
        for name, way in ways.items():
            yield f"gemlite {name}", partial(replace_linears, way=way)


def replace_linears(model: nn.Module, way: Callable[[nn.Linear], Any]) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, way(child))


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def give_up(*_: Any) -> None:
        raise TimeoutError(f"not ready after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


faults: list[str] = []


@contextlib.contextmanager
def guarded(what: str) -> Iterator[None]:
    """A part that fails is written down, and the others run."""
    try:
        yield
    except Exception as error:
        faults.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
        print(f"FAILED {faults[-1]}\n{traceback.format_exc()[-1500:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--models", default=MODELS, help="SIZE:FORMAT[+cache]:BATCH,... eager compiled generate prompts peers"
    )
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no new model after so many")
    parser.add_argument("--output", type=Path)
    for_inputs = parser.add_argument_group("a process of `inputs`")
    for_inputs.add_argument("--way", choices=INPUTS)
    for_inputs.add_argument("--size", default="8b")
    for_inputs.add_argument("--turns", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    on_gpu = args.device == "cuda"
    floor: Row = {"copy_bytes_per_s": 1e11, "kernel_us": 0.0}
    needs_floor = ":" in args.models and args.way is None
    if on_gpu and needs_floor:
        from fused_matmul import copy_bandwidth

        floor = {"copy_bytes_per_s": copy_bandwidth(), "kernel_us": empty_kernel_us()}
    document: Row = {
        "benchmark": "decode",
        "machine": harness.machine(args.device),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "context": CONTEXT,
        "prefill": PREFILL,
        **(floor if needs_floor else {}),
        "rows": [],
    }

    def save() -> None:
        document["faults"] = faults
        harness.save("decode", document, args.output)

    def add(rows: Iterator[Row] | list[Row]) -> None:
        for row in rows:
            document["rows"].append(row)
            print(f"{time.perf_counter() - began:6.1f}s {line_of(row)}", flush=True)
            save()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()

    if args.way is not None:
        with guarded(args.way):
            add(way_of_inputs(args.device, args.size, args.way, args.turns))
        save()
        return
    if args.models != "inputs":
        with guarded("host"):
            document["host_us"] = host_us(args.device)
            print("host us", document["host_us"], flush=True)
    parts: dict[str, Callable[..., Iterator[Row] | list[Row]]] = {
        "eager": eager,
        "compiled": compiled,
        "generate": generate,
        "generate@3b": partial(generate, size="3b"),
        "prompts": prompts,
        "prompts@3b": partial(prompts, size="3b"),
        "peers": peers,
        "inputs": partial(inputs, size=args.size),
    }
    jobs: list[tuple[str, Callable[[], Iterator[Row] | list[Row]]]] = []
    for each in args.models.split():
        if each in parts:
            jobs.append((each, partial(parts[each], args.device)))
            continue
        size, name, batches = each.split(":")
        counts, fmt = tuple(map(int, batches.split(","))), name.removesuffix("+cache")
        how = {"cached": name != fmt, "prefill": not args.no_prefill}
        jobs.append((each, partial(measure, size, fmt, counts, args.device, floor, **how)))
    for what, job in jobs:
        if time.perf_counter() - began > args.seconds:
            faults.append(f"{what}: no time was left")
            continue
        with guarded(what):
            add(job())
    save()


def line_of(row: Row) -> str:
    text = (
        f"{row.get('size', ''):4} {row['format']:18} batch {row.get('batch', 1):3} {row['mode']:15} "
        f"{row.get('prompt') or '':>5} {row['ms']:8.3f} ms"
    )
    extra = [
        f"{key} {row[key]}"
        for key in (
            "times_bfloat16",
            "first_answer_s",
            "floor_ms",
            "kernels",
            "memory_gib",
            "first_use_s",
            "compile_s",
            "picks",
        )
        if key in row
    ]
    return f"{text}  {'  '.join(extra)}"


if __name__ == "__main__":
    main()
