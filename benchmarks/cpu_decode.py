"""Packed weights on a CPU: single products and a whole model, against float32 in the same run.

    python benchmarks/cpu_decode.py [--model MODEL.gguf | --random-model] [--llama-bench PROGRAM --gguf q4_0=FILE ...]

products   QuantLinear under `auto` against F.linear in float32, in turns; the floor is the packed bytes over the speed
           of a copy (which reads and writes: half of what it moves counts). "+int8": inputs are rounded to 8-bit blocks
model      a language model that transformers reads from a GGUF file, or one of SmolLM2's shape with random weights:
           in float32, and packed by `quantize_file` (embedding and head too) and read by `load_packed`. One token at a
           time after a short prompt, in turns. "free" is the same model with linear layers that do nothing: no packed
           layer can make a token faster than that. "steps" are tokens as `bitplan generate` makes them, without the
           model's own modules; "prompt" is one of 128 tokens. Resident memory beyond the libraries is that of a process
           that has one model alone and has made some tokens
llama.cpp  `llama-bench` on files of the same model in its own formats, after the others; or xllamacpp, a build of it
           for Python, from --llama-site, in processes of its own, in turns with ours: seconds of the processor a token,
           so that other work on the machine counts for neither, and seconds that passed; where --llama-site is
           `llama-bench`, built for this processor, seconds that passed alone. --gguf NAME=FILE=OURS runs
           ours from another file or folder
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from torch import nn
from torch.nn import functional

import bitplan
from bitplan.base.hardware import cpu_model
from bitplan.formats.dispatch import encode
from bitplan.packed.language.token_steps import Decoding
from bitplan.packed.products.cpu_fused import OF_INTEGERS
from bitplan.packed.quant_linear import QuantLinear

SHAPES = ((4096, 4096), (11008, 4096))
FORMATS = ("int8_row", "int8_g128", "q8_0_gguf", "fp8_e4m3_row", "q4_0_gguf", "int4_g32", "mxfp4", "nvfp4")
BATCHES = (1, 4, 16, 32, 64, 128)
MODEL_FORMATS = ("int8_row", "q8_0_gguf", "int4_g32", "q4_0_gguf", "mxfp4")
MEMORY_FORMATS = ("float32", "int8_row", "int4_g32")
FREE, INT8 = "free", "+int8"
PROMPT_TOKENS = 128
SITE_TEXT = "The capital of France is Paris. " * 18
PROMPT = (1, 504, 3575, 282, 4649, 314)
TOKENS = 16
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
Row = dict[str, Any]


# ---- products --------------------------------------------------------------------------------------------------------


def copy_gb_per_s(repeats: int) -> float:
    """Bytes read by a copy that no cache holds, a second."""
    source, target = torch.ones(2**28, dtype=torch.uint8), torch.ones(2**28, dtype=torch.uint8)
    times = harness.time_in_turns({"copy": lambda: target.copy_(source)}, repeats)["copy"]
    return source.nbytes / min(times) / 1e6


def product_rows(
    shape: tuple[int, int], batches: list[int], formats: list[str], repeats: int, speed: float
) -> list[Row]:
    weight = torch.randn(*shape) / shape[1] ** 0.5
    encoded = {name: encode(weight, name) for name in formats}
    layers = {name: QuantLinear(numbers) for name, numbers in encoded.items()}
    layers |= {name + INT8: QuantLinear(encoded[name], inputs="int8") for name in formats if name in OF_INTEGERS}
    rows = []
    for batch in batches:
        x = torch.randn(batch, shape[1])
        variants: dict[str, Any] = {"float32": lambda x=x: functional.linear(x, weight)}
        variants |= {name: lambda x=x, layer=layer: layer(x) for name, layer in layers.items()}
        with torch.inference_mode():
            samples = harness.time_in_turns(variants, repeats)
        base = samples.pop("float32")
        for name, times in samples.items():
            row = {"shape": list(shape), "batch": batch, "format": name, **harness.summary(times)}
            row["float32_ms"], row["float32_min_ms"] = statistics.median(base), min(base)
            row["speedup"] = statistics.median(ours / theirs for ours, theirs in zip(base, times, strict=True))
            row["speedup_of_minima"] = min(base) / min(times)
            row["floor_ms"] = layers[name].weight.nbytes / speed / 1e6
            rows.append(row)
            print(
                f"{shape} {batch:4} {name:14} {row['median_ms']:8.2f} ms  float32 {row['float32_ms']:8.2f}  "
                f"x{row['speedup']:.2f} (minima x{row['speedup_of_minima']:.2f})",
                flush=True,
            )
    return rows


# ---- a model ---------------------------------------------------------------------------------------------------------


class FreeLinear(nn.Module):
    """Gives zeros of a linear layer's shape: all of a token's work but its products is left."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs, self.one_row = outputs, torch.zeros(1, 1, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one_row if x.shape[:-1] == (1, 1) else x.new_zeros(*x.shape[:-1], self.outputs)


def save_model(source: Path | None, folder: Path) -> str:
    """Write a float32 model to folder/float32: that of a GGUF file, or one with random weights; returns its name."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if source is None:
        torch.manual_seed(0)
        plain: Any = LlamaForCausalLM(LlamaConfig(**SMOLLM2, dtype=torch.float32))
    else:
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        del model.config.quantization_config  # transformers would not save what came from GGUF
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder / "float32")
    return "SmolLM2-135M's shape, random weights" if source is None else source.name


def load(folder: Path, fmt: str) -> nn.Module:
    """The model in this format, as a user loads it."""
    from transformers import AutoModelForCausalLM

    if fmt in ("float32", FREE):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder / "float32", dtype=torch.float32).eval()
        for path, layer in list(model.named_modules()):
            if fmt == FREE and isinstance(layer, nn.Linear):
                model.set_submodule(path, FreeLinear(layer.out_features))
        return model
    name, rounded, _ = fmt.partition(INT8)
    if not (folder / name).exists():
        bitplan.quantize_file(folder / "float32", folder / name, name, pad="zero")
    return bitplan.load_packed(folder / name, inputs="int8" if rounded else "keep")[0].eval()


@torch.inference_mode()
def token_times(model: Any, count: int) -> list[float]:
    """Milliseconds of each token after the prompt."""
    out = model(torch.tensor([PROMPT]), use_cache=True)
    times = []
    for _ in range(count):
        token = out.logits[:, -1:].argmax(-1)
        started = time.perf_counter()
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        times.append((time.perf_counter() - started) * 1e3)
    return times


@torch.inference_mode()
def step_times(model: Any, count: int, clock: Any = time.perf_counter) -> list[float]:
    """Milliseconds of each token as `bitplan generate` makes them; the first two are the model's own forward."""
    decoding = Decoding(model)
    logits, times = decoding(torch.tensor([PROMPT])), []
    for _ in range(count):
        token, started = logits.argmax(-1, keepdim=True), clock()
        logits = decoding(token)
        times.append((clock() - started) * 1e3)
    return times


@torch.inference_mode()
def prompt_time(model: Any) -> float:
    """Milliseconds of a prompt."""
    ids = torch.arange(PROMPT_TOKENS).unsqueeze(0) + 100
    started = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    return (time.perf_counter() - started) * 1e3


def model_rows(folder: Path, formats: list[str], repeats: int) -> list[Row]:
    wanted = [name + more for name in formats for more in (("", INT8) if name in OF_INTEGERS else ("",))]
    models = {name: load(folder, name) for name in ("float32", FREE, *wanted)}
    first = {}
    for name, model in models.items():
        started = time.perf_counter()
        token_times(model, 1)
        first[name] = time.perf_counter() - started
    samples: dict[str, list[float]] = {name: [] for name in models}
    steps: dict[str, list[float]] = {name: [] for name in models}
    prompts: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(repeats + 1):
        for name, model in models.items():
            prompt = prompt_time(model)
            if turn:
                prompts[name].append(prompt)
                samples[name] += token_times(model, TOKENS)[2:]
                steps[name] += step_times(model, TOKENS)[3:]
    base = harness.summary(samples["float32"])
    rows = []
    for name, times in samples.items():
        row: Row = {"format": name, **harness.summary(times), "first_use_s": first[name]}
        row["tokens_per_s"], row["best_tokens_per_s"] = 1e3 / row["median_ms"], 1e3 / row["min_ms"]
        row["speedup"] = base["median_ms"] / row["median_ms"]
        row["speedup_of_minima"] = base["min_ms"] / row["min_ms"]
        row["steps_tokens_per_s"] = 1e3 / statistics.median(steps[name])
        row["best_steps_tokens_per_s"] = 1e3 / min(steps[name])
        row["prompt_tokens_per_s"] = 1e3 * PROMPT_TOKENS / statistics.median(prompts[name])
        row["prompt_speedup"] = statistics.median(prompts["float32"]) / statistics.median(prompts[name])
        held = {part.data_ptr(): part.nbytes for part in (*models[name].parameters(), *models[name].buffers())}
        row["weights_mb"] = sum(held.values()) / 1e6
        rows.append(row)
        print(
            f"{name:14} {row['tokens_per_s']:6.1f} tokens/s (best {row['best_tokens_per_s']:.1f})  "
            f"x{row['speedup']:.2f} (minima x{row['speedup_of_minima']:.2f})  steps {row['steps_tokens_per_s']:.1f} "
            f"(best {row['best_steps_tokens_per_s']:.1f})  prompt {row['prompt_tokens_per_s']:.0f} tokens/s "
            f"x{row['prompt_speedup']:.2f}  {row['weights_mb']:.0f} MB",
            flush=True,
        )
    return rows


def resident_mb() -> float:
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024 / 1e6


def print_memory(folder: Path, fmt: str) -> None:
    """In a process of its own: what one model adds to the resident memory."""
    from transformers import LlamaForCausalLM  # noqa: F401 (libraries do not count)

    layer = QuantLinear(encode(torch.ones(64, 256), "int8_row" if fmt == "float32" else fmt))
    layer(torch.ones(1, 256))
    before = resident_mb()
    model = load(folder, fmt)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # not the file's pages
    token_times(model, 4)
    print(json.dumps({"format": fmt, "resident_mb": resident_mb() - before}))


def memory_rows(folder: Path, threads: int) -> list[Row]:
    rows = []
    for fmt in MEMORY_FORMATS:
        load(folder, fmt)  # writes its folder
        command = [sys.executable, __file__, "--memory-of", fmt, "--model", str(folder), "--threads", str(threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        rows[-1]["of_float32"] = rows[-1]["resident_mb"] / rows[0]["resident_mb"]
        print(rows[-1], flush=True)
    return rows


def llama_rows(program: str, files: list[str], threads: int) -> list[Row]:
    rows = []
    for each in files:
        name, _, path = each.partition("=")
        command = [program, "-m", path, "-t", str(threads), "-p", "0", "-n", "32", "-r", "5", "-o", "json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        result = json.loads(done.stdout)[0]
        rows.append({"format": name, "tokens_per_s": result["avg_ts"], "best_tokens_per_s": max(result["samples_ts"])})
        print("llama.cpp", rows[-1], flush=True)
    return rows


def site_turns(given: str, threads: int) -> None:
    """In a process of its own, of one engine: medians of a prompt's and a token's times, for each file that is named on
    the standard input.
    """
    engine, site, repeats = given.split(",")
    for path in sys.stdin:
        if engine == "llama.cpp" and Path(site).is_file():
            row = {"engine": engine, "load_average": os.getloadavg()[0]} | program_times(
                site, path.strip(), threads, repeats
            )
            print(json.dumps(row), flush=True)
            continue
        run = llama_run(path.strip(), site, threads) if engine == "llama.cpp" else bitplan_run(path.strip())
        run(4)
        few, many = [[_both_clocks(run, count) for _ in range(int(repeats))] for count in (4, 52)]
        row = {"engine": engine, "load_average": os.getloadavg()[0]}
        for clock, name in enumerate(("", "wall_")):
            short, long = (statistics.median(each[clock] for each in samples) for samples in (few, many))
            token = (long - short) / 48
            row |= {f"{name}token_ms": 1e3 * token, f"{name}prompt_ms": 1e3 * (short - 4 * token)}
        print(json.dumps(row), flush=True)


def program_times(program: str, path: str, threads: int, repeats: str) -> Row:
    """What llama-bench says of SITE_TEXT's number of tokens and of 48 behind them; it samples nothing."""
    row: Row = {}
    for name, tokens, asked in (
        ("prompt", 1, ["-p", "127", "-n", "0"]),
        ("token", 48, ["-p", "0", "-n", "48", "-d", "127"]),
    ):
        command = [program, "-m", path, "-t", str(threads), *asked, "-r", repeats, "-o", "json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row[f"wall_{name}_ms"] = statistics.median(json.loads(done.stdout)[0]["samples_ns"]) / 1e6 / tokens
    return row


def _both_clocks(run: Callable[[int], None], count: int) -> tuple[float, float]:
    started = time.process_time(), time.perf_counter()
    run(count)
    return time.process_time() - started[0], time.perf_counter() - started[1]


def llama_run(path: str, site: str, threads: int) -> Callable[[int], None]:
    if site not in sys.path:
        sys.path.insert(0, site)
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, 512, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(count: int) -> None:
        server.handle_completions(
            {"prompt": SITE_TEXT, "max_tokens": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        )

    return run


def bitplan_run(path: str) -> Callable[[int], None]:
    from bitplan.packed.language.generation import generate_text, load_for_running

    lm = load_for_running(path, inputs="auto")
    model: Any = lm.model
    model.generation_config.eos_token_id = [-1]

    def run(count: int) -> None:
        done = generate_text(lm, SITE_TEXT, most_tokens=count)
        assert done.tokens == count, done

    return run


def _most_common_type(path: str) -> str:
    """The type of most tensors of a GGUF file that have two axes."""
    import gguf

    kinds = [tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1]
    return str(max(sorted(set(kinds)), key=kinds.count))


def site_rows(site: str, files: list[str], threads: int, repeats: int, turns: int) -> list[Row]:
    """A row for each file: engines take turns, and change places from turn to turn."""
    engines = {}
    for engine in ("llama.cpp", "bitplan"):
        command = [sys.executable, __file__, "--site-turns", f"{engine},{site},{repeats}", "--threads", str(threads)]
        engines[engine] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rows = []
    for each in files:
        name, _, paths = each.partition("=")
        theirs, _, ours = paths.partition("=")
        done = []
        for turn in range(turns):
            for engine in list(engines)[:: 1 - 2 * (turn % 2)]:
                to, back = engines[engine].stdin, engines[engine].stdout
                assert to is not None
                assert back is not None
                print(theirs if engine == "llama.cpp" else ours or theirs, file=to, flush=True)
                done.append(json.loads(next(line for line in back if line.startswith('{"engine"'))))
        row: Row = {"format": name, "file_format": _most_common_type(theirs), "threads": threads, "turns": done}
        for key in ("token_ms", "prompt_ms", "wall_token_ms", "wall_prompt_ms"):
            if not all(key in one for one in done):
                continue  # a program of its own says what passed, and nothing of the processor
            llama, our = (statistics.median(one[key] for one in done if one["engine"] == engine) for engine in engines)
            row |= {f"llama_cpp_{key}": llama, f"bitplan_{key}": our, f"of_llama_cpp_{key}": llama / our}
        rows.append(row)
        print("llama.cpp and bitplan", json.dumps(row), flush=True)
    for process in engines.values():
        process.communicate()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file that transformers reads")
    parser.add_argument("--random-model", action="store_true", help="SmolLM2's shape with random weights, and no file")
    parser.add_argument("--llama-bench", help="llama.cpp's program")
    parser.add_argument("--llama-site", help="a folder that holds the package xllamacpp, or llama-bench")
    parser.add_argument("--gguf", nargs="*", default=[], help="NAME=FILE[=OURS] for it")
    parser.add_argument("--site-threads", default="1,2", help="with --llama-site: numbers of threads")
    parser.add_argument("--site-repeats", type=int, default=3, help="with --llama-site: runs in a turn")
    parser.add_argument("--site-turns-each", type=int, default=2, help="with --llama-site: turns of each engine")
    parser.add_argument("--parts", default="products,model,memory", help="what to measure")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--model-formats", default=",".join(MODEL_FORMATS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the program")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--site-turns", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print_memory(options.model, options.memory_of)
        return
    if options.site_turns:
        site_turns(options.site_turns, options.threads)
        return
    parts = options.parts.split(",")
    speed = copy_gb_per_s(3 if options.tiny else 10) if "products" in parts else None
    print(f"copy: {speed} GB/s read", flush=True)
    document: dict[str, Any] = {
        "benchmark": "packed weights on a CPU",
        "machine": harness.machine("cpu"),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "threads": options.threads,
        "repeats": options.repeats,
        "load_average_at_start": os.getloadavg(),
        "copy_gb_per_s": speed,
    }
    batches, formats = [int(each) for each in options.batches.split(",")], options.formats.split(",")
    if speed is not None:
        shapes = ((128, 256),) if options.tiny else SHAPES
        found = [product_rows(shape, batches, formats, options.repeats, speed) for shape in shapes]
        document["products"] = [row for rows in found for row in rows]
    if options.model is not None or options.random_model:
        with tempfile.TemporaryDirectory() as kept:
            folder = Path(kept)
            document["model"] = save_model(options.model, folder)
            if "model" in parts:
                chosen = options.model_formats.split(",")
                document["model_rows"] = model_rows(folder, chosen, max(2, options.repeats // 3))
            if "memory" in parts:
                document["memory"] = memory_rows(folder, options.threads)
    if options.llama_bench:
        document["llama_cpp"] = llama_rows(options.llama_bench, options.gguf, options.threads)
    if options.llama_site:
        document["llama_cpp_turns"] = [
            row
            for threads in map(int, options.site_threads.split(","))
            for row in site_rows(
                options.llama_site, options.gguf, threads, options.site_repeats, options.site_turns_each
            )
        ]
    document["load_average_at_end"] = os.getloadavg()
    cpu = cpu_model().lower()
    name = "".join(letter if letter.isalnum() else " " for letter in cpu).replace(" r ", " ").split()
    part = "" if "products" in parts else "_".join(["", *parts])
    print(harness.save(f"packed_cpu_{'_'.join(name)}{part}", document, options.output))


if __name__ == "__main__":
    main()
