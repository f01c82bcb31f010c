"""FP8 casts and linear layers on a GPU, against a device copy and against compiled BF16, in the same run.

    python benchmarks/fp8_linear.py [--parts casts,products,linears,norms,peers] [--tune] [--quick] [--output FILE]
    python benchmarks/fp8_linear.py --parts products,linears --cases fc1=16384x4096,fc2=4096x16384 --tokens 15872

casts     the Triton casts on activations, gradients and weights, in CUDA graphs: time, bytes moved, share of a device
          copy; and what one costs the host. "guessed" is tensorwise by a scale that is right, in one read
products  the three products alone, by recipe and implementation, against BF16: the ceiling of what follows
linears   one linear layer forward and backward, casts included, each recipe, the best choice per product, and what
          weight casts made before ("held") or shared by two micro-batches ("x2") give; in CUDA graphs and eager
norms     RMSNorm and linear layer in one module, likewise
peers     torchao's float8 linear, compiled, both recipes, where it is installed

Variants are timed in turns, gradients are random, times are medians with their spread. A weight counts as changed in
every step, so its cast is in the time, unless a variant says "held". Bytes of a cast are those that its algorithm
moves: a tensorwise or rowwise cast reads twice, once for the maximum. `--tune` tries other tiles and warps first and
prints which won. `--quick` repeats less. Every part stops taking up new cases when its time is over, and says so.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor, nn

from bitplan.fp8.kernels.cast import cast_layouts
from bitplan.fp8.kernels.guessed_cast import new_state
from bitplan.fp8.kernels.product import scaled_product
from bitplan.fp8.kernels.triton_cast import CastLaunch
from bitplan.fp8.kernels.triton_product import block_scaled_product
from bitplan.fp8.layer_settings import Fp8Recipe, GemmChoice
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear, hold_weight_casts
from bitplan.fp8.layers.weight_casts import drop_weight_casts

RECIPES = ("tensorwise", "rowwise", "blockwise")
LAYERS = {"fc1": (28672, 4096), "qkv": (6144, 4096)}
CASES = (("fc1", 16384), ("fc1", 4096), ("fc1", 1024), ("qkv", 16384), ("qkv", 4096), ("qkv", 1024))
NORM_CASES = (("fc1", 16384), ("fc1", 1024))
TARGETS = {("fc1", 16384): 1.60, ("fc1", 4096): 1.50, ("fc1", 1024): 1.25, ("qkv", 16384): 1.45}
CASTS = {"x 16384x4096": (16384, 4096), "dy 16384x28672": (16384, 28672), "w 28672x4096": (28672, 4096)}
CAST_TARGET = 0.85
TUNED = [
    CastLaunch(rows, cols, warps, pieces)
    for rows, cols, warps in ((128, 64, 4), (64, 128, 4), (64, 64, 4), (128, 32, 4), (128, 128, 8))
    for pieces in (512, 1024)
]
BLOCK_TUNED = [CastLaunch(warps=warps) for warps in (4, 8)]
REPEATS, QUICK_REPEATS = 15, 5
PAUSE_CYCLES = 60_000_000  # about 30 ms
LONGEST_S = {"products": 12.0, "linears": 30.0, "norms": 12.0, "peers": 20.0}
Step = Callable[[], object]
Row = dict[str, Any]


def repeat_less() -> None:
    global REPEATS
    REPEATS = QUICK_REPEATS


def timed(variants: dict[str, Step], repeats: int = 0) -> dict[str, dict[str, float]]:
    for run in variants.values():  # compile and warm up
        run()
    torch.cuda.synchronize()
    result = harness.time_in_turns(variants, repeats or REPEATS, cuda=True)
    return {name: harness.summary(samples) for name, samples in result.items()}


def each_case(part: str, cases: Iterable[tuple[str, int]], run: Callable[[str, int], list[Row]]) -> list[Row]:
    """The rows of all cases for which there is time."""
    rows: list[Row] = []
    began = time.perf_counter()
    for layer, tokens in cases:
        if time.perf_counter() - began > LONGEST_S[part]:
            rows.append({"layer": layer, "tokens": tokens, "skipped": f"{part} took its {LONGEST_S[part]:.0f} s"})
            continue
        rows += run(layer, tokens)
        drop_weight_casts()
        torch.cuda.empty_cache()
    return rows


def host_us(step: Step, count: int = 50) -> float:
    """Microseconds of the host for a step whose kernels wait behind a pause, so that it never waits for them."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE_CYCLES)
    began = time.perf_counter()
    for _ in range(count):
        step()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return taken / count * 1e6


def graphed(step: Step) -> Step:
    """The step as a CUDA graph: what it costs without the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_keeps = step()
    return _Replay(graph, graph_keeps)


class _Replay:
    def __init__(self, graph: torch.cuda.CUDAGraph, keeps: object) -> None:
        self.graph, self.keeps = graph, keeps

    def __call__(self) -> object:
        self.graph.replay()
        return None


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy kernel."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    result = timed({"copy": lambda: torch.mul(source, 1.0, out=target)}, 25)["copy"]
    return 2 * source.nbytes / (result["median_ms"] * 1e-3)


# ---- casts -----------------------------------------------------------------------------------------------------------


def casts(bandwidth: float, launches: dict[str, CastLaunch]) -> list[Row]:
    rows = []
    for name, shape in CASTS.items():
        x = randn(*shape)
        variants: dict[str, Step] = {}
        for recipe, layouts in itertools.product(RECIPES, ("rows", "both")):
            variants[f"{recipe} {layouts}"] = partial(
                cast_layouts,
                x,
                recipe,
                is_weight=name.startswith("w"),
                cols=layouts == "both",
                launch=launches.get(recipe),
            )
        for layouts in ("rows", "both"):
            state = new_state(x.device)
            variants[f"guessed {layouts}"] = partial(
                cast_layouts, x, "tensorwise", is_weight=True, cols=layouts == "both", guess=state
            )
        for variant, value in timed({variant: graphed(step) for variant, step in variants.items()}).items():
            recipe, layouts = variant.split()
            moved = x.numel() * ((2 if recipe in ("blockwise", "guessed") else 4) + (2 if layouts == "both" else 1))
            share = moved / (value["median_ms"] * 1e-3) / bandwidth
            host = host_us(variants[variant])
            row = {"tensor": name, "recipe": recipe, "layouts": layouts, "bytes": moved, **value, "share": share}
            rows.append(row | {"host_us": host})
            print(cast_line(rows[-1]), flush=True)
    return rows


def cast_line(row: Row) -> str:
    return (
        f"cast {row['tensor']:15} {row['recipe']:10} {row['layouts']:4} {row['median_ms'] * 1e3:7.1f} us  "
        f"{row['bytes'] / row['median_ms'] * 1e-9:5.2f} TB/s  {row['share']:.0%} of copy  host {row['host_us']:.0f} us"
    )


def tune_casts() -> dict[str, CastLaunch]:
    best = {}
    for recipe in RECIPES:
        totals: dict[CastLaunch, float] = {}
        launches = TUNED if recipe != "blockwise" else BLOCK_TUNED
        for name, shape in (*CASTS.items(), ("x 1024x4096", (1024, 4096))):
            x = randn(*shape)
            steps: dict[str, Step] = {
                str(place): graphed(partial(cast_layouts, x, recipe, is_weight=name.startswith("w"), launch=launch))
                for place, launch in enumerate(launches)
            }
            for place, value in timed(steps, 7).items():
                launch = launches[int(place)]
                # Relative to the bytes, so that small tensors count as much as large ones.
                totals[launch] = totals.get(launch, 0.0) + value["median_ms"] / x.numel()
                print(f"tune {recipe:10} {name:15} {value['median_ms'] * 1e3:8.1f} us {launch}", flush=True)
        best[recipe] = min(totals, key=lambda launch: totals[launch])
        print(f"tune {recipe}: best {best[recipe]}", flush=True)
    return best


# ---- products --------------------------------------------------------------------------------------------------------


def products(layer: str, tokens: int) -> list[Row]:
    rows = []
    n, k = LAYERS[layer]
    sizes = {"fprop": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}
    for product, (m, cols, width) in sizes.items():
        a, b = randn(m, width), randn(cols, width)
        variants: dict[str, Step] = {"bf16": partial(torch.nn.functional.linear, a, b)}
        for recipe in RECIPES:
            a8 = cast_layouts(a, recipe, cols=False).rows
            b8 = cast_layouts(b, recipe, is_weight=product != "wgrad", cols=False).rows
            assert a8 is not None
            assert b8 is not None
            variants[recipe] = partial(scaled_product, a8, b8, torch.bfloat16)
            if recipe != "blockwise":
                variants[f"{recipe} slow_accum"] = partial(scaled_product, a8, b8, torch.bfloat16, fast_accum=False)
            else:
                variants["blockwise triton"] = partial(block_scaled_product, a8, b8, torch.bfloat16)
        rows += product_rows(layer, tokens, product, variants, 2.0 * m * cols * width)
    return rows


def product_rows(layer: str, tokens: int, product: str, variants: dict[str, Step], operations: float) -> list[Row]:
    """A variant that does not run here is a row with its error."""
    rows: list[Row] = []
    for name in list(variants):
        try:
            variants[name]()
            torch.cuda.synchronize()
        except RuntimeError as error:
            rows.append(
                {"layer": layer, "tokens": tokens, "product": product, "variant": name, "error": str(error)[:200]}
            )
            del variants[name]
    result = timed(variants, min(9, REPEATS))
    for name, each in result.items():
        speed = operations / each["median_ms"] * 1e-9
        rows.append({"layer": layer, "tokens": tokens, "product": product, "variant": name, **each, "tflops": speed})
        print(f"product {layer} {tokens:6} {product} {name:22} {each['median_ms'] * 1e3:8.1f} us {speed:6.0f} TFLOP/s")
    return rows


# ---- linears ---------------------------------------------------------------------------------------------------------


def step_of(
    layer: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor, g: Tensor, *, changed: bool = True
) -> Step:
    """Forward and backward, of weights that count as changed since the last time."""

    def step() -> object:
        if changed:
            torch.autograd.graph.increment_version(parameters)
        return torch.autograd.grad(layer(x), [x, *parameters], g)

    return step


def fp8_variants(linear: nn.Linear) -> dict[str, Fp8Linear]:
    made = {name: Fp8Linear.from_linear(linear, recipe=Fp8Recipe(name)) for name in RECIPES}
    fast = Fp8Recipe("tensorwise", fast_accum=("fprop", "dgrad", "wgrad"))
    made["tensorwise fast grads"] = Fp8Linear.from_linear(linear, recipe=fast)
    made["tensorwise hybrid"] = Fp8Linear.from_linear(linear, recipe=Fp8Recipe("tensorwise", "hybrid"))
    return made


def two_of(first: Step, second: Step) -> Step:
    def step() -> object:
        return first(), second()

    return step


def linears(name: str, tokens: int) -> list[Row]:
    n, k = LAYERS[name]
    linear = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    x, g = randn(tokens, k).requires_grad_(), randn(tokens, n)
    weight: list[Tensor] = [linear.weight]
    torch._dynamo.reset()
    steps: dict[str, Step] = {"bf16": step_of(torch.compile(linear), weight, x, g)}
    layers = fp8_variants(linear)
    steps |= {variant: step_of(layer, weight, x, g) for variant, layer in layers.items()}
    choice, tried = best_choice(linear, x, g)
    layers["best per product"] = Fp8Linear.from_linear(linear, recipe=Fp8Recipe("tensorwise"), gemms=choice)
    steps["best per product"] = step_of(layers["best per product"], weight, x, g)
    errors = relative_errors(steps, linear, x, g) if tokens <= 1024 else {}
    for variant in ("bf16", *RECIPES):  # the second micro-batch finds the weight as the first did
        again = step_of(layers[variant], weight, x, g, changed=False) if variant in layers else steps[variant]
        steps[f"{variant} x2"] = two_of(steps[variant], again)
    eager = timed(steps)
    graphs = {variant: graphed(step) for variant, step in steps.items() if not variant.endswith("x2")}
    for variant in (*RECIPES, "best per product"):
        hold_weight_casts(layers[variant])
        graphs[f"{variant} held"] = graphed(step_of(layers[variant], weight, x, g, changed=False))
    graphs["bf16 x2"] = two_of(graphs["bf16"], graphs["bf16"])
    graphs |= {f"{recipe} x2": two_of(graphs[recipe], graphs[f"{recipe} held"]) for recipe in RECIPES}
    graph = timed(graphs)
    row: Row = {"layer": name, "tokens": tokens, "best": vars(choice), "estimated_ms": tried, "errors": errors}
    row["eager"], row["graph"] = with_speedup(eager), with_speedup(graph)
    for how in ("eager", "graph"):
        for variant, value in row[how].items():
            print(f"linear {name} {tokens:6} {how:5} {variant:24} {value['median_ms']:8.3f} ms {value['speedup']:.2f}x")
    return [row]


def with_speedup(result: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Against BF16, of two micro-batches where the variant is of two."""
    base = {twice: result["bf16 x2" if twice else "bf16"]["median_ms"] for twice in (False, "bf16 x2" in result)}
    return {name: {**each, "speedup": base[name.endswith("x2")] / each["median_ms"]} for name, each in result.items()}


def relative_errors(steps: dict[str, Step], linear: nn.Linear, x: Tensor, g: Tensor) -> dict[str, list[float]]:
    """Of the gradients [dx, dW], against float32 products."""
    exact = (g.float() @ linear.weight.detach().float(), g.float().t() @ x.detach().float())
    result = {}
    for name, step in steps.items():
        made: Any = step()
        result[name] = [float((a.float() - b).norm() / b.norm()) for a, b in zip(made, exact, strict=True)]
    return result


def best_choice(linear: nn.Linear, x: Tensor, g: Tensor) -> tuple[GemmChoice, dict[str, float]]:
    """The choice with the smallest sum of casts and products, each timed alone; ties go to fewer recipes."""
    cost = piece_costs(linear, x, g)
    totals = {}
    for names in itertools.product(("bf16", *RECIPES), repeat=3):
        fprop, dgrad, wgrad = names
        total = sum(cost[product, name] for product, name in zip(("fprop", "dgrad", "wgrad"), names, strict=True))
        for tensor, rows_by, cols_by in (("x", fprop, wgrad), ("g", dgrad, wgrad), ("w", fprop, dgrad)):
            if rows_by == cols_by:
                total += cost.get((tensor, rows_by, "both"), 0.0)
            else:
                total += cost.get((tensor, rows_by, "rows"), 0.0) + cost.get((tensor, cols_by, "cols"), 0.0)
        totals[names] = total
    best = sorted(totals, key=lambda names: (totals[names], len(set(names))))[:4]
    return GemmChoice(*best[0]), {"/".join(names): totals[names] for names in best}


def piece_costs(linear: nn.Linear, x: Tensor, g: Tensor) -> dict[tuple[str, ...], float]:
    tensors = {"x": x.detach(), "g": g, "w": linear.weight.detach()}
    pieces: dict[tuple[str, ...], Step] = {
        ("fprop", "bf16"): lambda: torch.nn.functional.linear(tensors["x"], tensors["w"]),
        ("dgrad", "bf16"): lambda: g @ tensors["w"],
        ("wgrad", "bf16"): lambda: g.t() @ tensors["x"],
    }
    for recipe in RECIPES:
        made: dict[str, Any] = {}
        for name, tensor in tensors.items():
            cast = partial(cast_layouts, tensor, recipe, is_weight=name == "w")
            made[name] = cast()
            pieces[name, recipe, "both"] = cast
            pieces[name, recipe, "rows"] = partial(cast, cols=False)
            pieces[name, recipe, "cols"] = partial(cast, rows=False)
        for product, a, b in (
            ("fprop", made["x"].rows, made["w"].rows),
            ("dgrad", made["g"].rows, made["w"].cols),
            ("wgrad", made["g"].cols, made["x"].cols),
        ):
            pieces[product, recipe] = partial(scaled_product, a, b, torch.bfloat16, fast_accum=product == "fprop")
    result = timed({"|".join(piece): graphed(step) for piece, step in pieces.items()}, 7)
    return {piece: result["|".join(piece)]["median_ms"] for piece in pieces}


# ---- norm and linear -------------------------------------------------------------------------------------------------


def norms(name: str, tokens: int) -> list[Row]:
    n, k = LAYERS[name]
    norm = nn.RMSNorm(k, eps=1e-5, device="cuda", dtype=torch.bfloat16)
    linear = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    x, g = randn(tokens, k).requires_grad_(), randn(tokens, n)
    parameters: list[Tensor] = [norm.weight, linear.weight]
    torch._dynamo.reset()
    steps: dict[str, Step] = {"bf16": step_of(torch.compile(nn.Sequential(norm, linear)), parameters, x, g)}
    apart = nn.Sequential(norm, Fp8Linear.from_linear(linear, recipe=Fp8Recipe("tensorwise")))
    steps["tensorwise apart"] = step_of(torch.compile(apart), parameters, x, g)
    for recipe in RECIPES:
        fused = Fp8NormLinear.from_modules(norm, linear, recipe=Fp8Recipe(recipe))
        steps[f"{recipe} fused"] = step_of(fused, parameters, x, g)
    row: Row = {"layer": name, "tokens": tokens, "eager": with_speedup(timed(steps))}
    row["graph"] = with_speedup(timed({variant: graphed(step) for variant, step in steps.items()}))
    for how in ("eager", "graph"):
        for variant, each in row[how].items():
            print(f"norm {name} {tokens:6} {how:5} {variant:18} {each['median_ms']:8.3f} ms {each['speedup']:.2f}x")
    return [row]


# ---- peers -----------------------------------------------------------------------------------------------------------


def peers(name: str, tokens: int) -> list[Row]:
    """torchao's float8 training linear; what does not run here is recorded with its error."""
    row: Row = {"peer": "torchao", "layer": name, "tokens": tokens}
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except Exception as error:  # a peer may fail in its own ways; the table says so
        return [row | {"error": f"{type(error).__name__}: {str(error)[:200]}"}]
    n, k = LAYERS[name]
    x, g = randn(tokens, k).requires_grad_(), randn(tokens, n)
    linear = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    steps: dict[str, Step] = {}
    torch._dynamo.reset()
    for recipe in (None, "tensorwise", "rowwise"):
        try:
            model = nn.Sequential(nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16))
            if recipe is not None:
                config = float8.Float8LinearConfig.from_recipe_name(recipe)
                float8.convert_to_float8_training(model, config=config)
            parameters: list[Tensor] = list(model.parameters())
            step = step_of(torch.compile(model), parameters, x, g)
            step()
            steps[recipe or "bf16"] = step
        except Exception as error:  # as above
            row[f"{recipe} error"] = f"{type(error).__name__}: {str(error)[:200]}"
    if "bf16" not in steps:
        return [row]
    ours = Fp8Linear.from_linear(linear, recipe=Fp8Recipe("tensorwise"))
    steps["ours tensorwise"] = step_of(ours, [linear.weight], x, g)
    row["eager"] = with_speedup(timed(steps))
    row["graph"] = with_speedup(timed({variant: graphed(step) for variant, step in steps.items()}))
    for how in ("eager", "graph"):
        for variant, each in row[how].items():
            print(f"peer {name} {tokens:6} {how:5} {variant:16} {each['median_ms']:8.3f} ms {each['speedup']:.2f}x")
    return [row]


# ---- the table -------------------------------------------------------------------------------------------------------


def print_table(document: Row) -> None:
    print()
    for row in document.get("casts", []):
        if row["layouts"] == "both":
            mark = "" if row["share"] >= CAST_TARGET else f"  (below {CAST_TARGET:.0%})"
            print(cast_line(row) + mark)
    for row in document.get("linears", []):
        if "graph" not in row:
            continue
        target = TARGETS.get((row["layer"], row["tokens"]))
        parts = [f"{variant} {result['speedup']:.2f}x" for variant, result in row["graph"].items() if variant != "bf16"]
        # Held and shared casts are another question than the target's.
        best = max(
            result["speedup"] for variant, result in row["graph"].items() if not variant.endswith(("held", "x2"))
        )
        aim = f"  target {target:.2f}x {'met' if best >= target else 'MISSED'}" if target else ""
        print(f"{row['layer']} {row['tokens']:6} graph: {', '.join(parts)}{aim}")
        parts = [f"{variant} {result['speedup']:.2f}x" for variant, result in row["eager"].items() if variant != "bf16"]
        print(
            f"{row['layer']} {row['tokens']:6} eager: {', '.join(parts)}; best choice {'/'.join(row['best'].values())}"
        )
        if row["errors"]:
            result = ", ".join(f"{name} {dx:.4f} {dw:.4f}" for name, (dx, dw) in row["errors"].items())
            print(f"{row['layer']} {row['tokens']:6} errors of dx, dW: {result}")
    whole = [row["graph"] for row in document.get("linears", []) if "graph" in row]
    if len(whole) > 1 and len({row["tokens"] for row in document["linears"]}) == 1:  # the products of one layer
        shared = [name for name in whole[0] if all(name in graph for graph in whole) and not name.endswith("x2")]
        total = {name: sum(graph[name]["median_ms"] for graph in whole) for name in shared}
        parts = [f"{name} {total['bf16'] / ms:.2f}x" for name, ms in total.items() if name != "bf16"]
        print(f"all {len(whole)} together, graph: BF16 {total['bf16']:.3f} ms, {', '.join(parts)}")
    for row in (*document.get("norms", []), *document.get("peers", [])):
        failed = [f"{key}: {value}" for key, value in row.items() if key.endswith(("error", "skipped"))]
        for how in ("graph", "eager"):
            parts = [f"{variant} {result['speedup']:.2f}x" for variant, result in row.get(how, {}).items()]
            name = f"{row.get('peer', 'norm')} {row['layer']} {row['tokens']:6} {how}"
            print(f"{name}: {', '.join(parts + failed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="casts,products,linears,norms,peers")
    parser.add_argument("--tune", action="store_true", help="try other launches, and print the best")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPEATS} repeats in place of {REPEATS}")
    parser.add_argument("--cases", default="", help="other layers than the usual, as NAME=OUTxIN,...; with --tokens")
    parser.add_argument("--tokens", type=int, default=16384, help="of --cases")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.quick:
        repeat_less()
    cases: Iterable[tuple[str, int]] = CASES
    if options.cases:
        given = dict(case.split("=") for case in options.cases.split(","))
        LAYERS.update({name: tuple(map(int, shape.split("x"))) for name, shape in given.items()})
        cases = [(name, options.tokens) for name in given]
        LONGEST_S.update(dict.fromkeys(LONGEST_S, 60.0))
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    launches = tune_casts() if options.tune else {}
    document: Row = {
        "benchmark": "fp8_linear",
        "machine": harness.machine("cuda"),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "copy_bytes_per_s": bandwidth,
        "repeats": REPEATS,
        "tuned": {recipe: vars(launch) for recipe, launch in launches.items()},
    }
    steps: dict[str, Callable[[], Any]] = {
        "casts": lambda: casts(bandwidth, launches),
        "products": lambda: each_case("products", cases, products),
        "linears": lambda: each_case("linears", cases, linears),
        "norms": lambda: each_case("norms", cases if options.cases else NORM_CASES, norms),
        "peers": lambda: each_case("peers", cases if options.cases else TARGETS, peers),
    }
    for part in options.parts.split(","):
        began = time.perf_counter()
        document[part] = steps[part]()
        print(f"{part} took {time.perf_counter() - began:.0f} s", flush=True)
        harness.save("fp8_linear_nvidia_h200", document, options.output)  # what is done stays done
        torch.cuda.empty_cache()
    print_table(document)


if __name__ == "__main__":
    main()
