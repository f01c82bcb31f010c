"""Experts in FP8 against BF16 in the same run: a grouped linear forward and backward, casts included.

    python benchmarks/fp8_grouped.py [--parts dsv3,qwen3,products,casts,launches] [--output FILE]

dsv3      DeepSeek-V3 experts: 32768 tokens, 8 experts; fc1 gated 4096x7168, fc2 7168x2048, and plain 2048x7168
qwen3     Qwen3-30B-A3B experts: 32768 tokens, 128 experts; fc1 gated 1536x2048, fc2 2048x768
products  each product alone, at DeepSeek-V3's plain shape: torch's grouped product, ours in Gluon, ours in Triton by
          every candidate launch; the first two also with sums in float32, which gradients of a layer have
casts     casts of tokens and of matrices alone: bytes a second, and the share of a device copy; tensorwise ones also by
          guessed scales, all of them right or all of them wrong
launches  tensorwise casts by guessed scales, cut up in other ways, at the shapes of both fc1

A step casts the weights once, as the first micro-batch of a step does; the arms named "reused" have them cast already,
and "two micro-batches" cast them once for two steps, of which the time of one is given.
BF16 is `torch._grouped_mm` behind the same layer. Routing is uniform and Zipf. Arms take turns; the median counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from bitplan.fp8.bench.session import route_tokens
from bitplan.fp8.kernels import experts_products as kernels
from bitplan.fp8.kernels.experts_layout import TILE_ROWS, GroupLayout, scale_kind
from bitplan.fp8.layer_settings import Fp8Recipe, GemmChoice
from bitplan.fp8.layers.grouped_linear import GroupedLinear, plain_rows, plain_sums
from bitplan.fp8.layers.weight_casts import drop_casts
from bitplan.fp8.recipes import expert_recipes

SHAPES = {  # out_features, in_features
    "dsv3": {"fc1": (4096, 7168), "fc2": (7168, 2048), "plain": (2048, 7168)},
    "qwen3": {"fc1": (1536, 2048), "fc2": (2048, 768)},
}
EXPERTS = {"dsv3": 8, "qwen3": 128}
TARGETS = {"dsv3": 1.20, "qwen3": 1.00}
TOKENS = 32768
ROUTINGS = ("uniform", "zipf")
PRODUCTS = ("fprop", "dgrad", "wgrad")
REPEATS = 15
# Rows, columns and warps of a tile, words that neighbour in a thread; tokens come in tiles of 128 rows.
CAST_LAUNCHES = (
    (256, 64, 8, 4),
    (256, 64, 4, 4),
    (256, 64, 8, 8),
    (128, 64, 4, 4),
    (128, 64, 8, 4),
    (128, 64, 4, 8),
    (128, 128, 8, 4),
    (128, 128, 8, 8),
    (128, 128, 4, 8),
)
Call = Callable[[], object]


def arms() -> Iterator[tuple[str, GemmChoice, str, int]]:
    """(name, recipe of each product, implementation, steps that share a cast of the weights; 0: all)."""
    yield "bf16", GemmChoice.all("bf16"), "auto", 1
    for recipe, impl in (
        ("tensorwise", "gluon"),
        ("tensorwise", "torch"),
        ("tensorwise", "triton"),
        ("rowwise", "gluon"),
        ("rowwise", "torch"),
        ("rowwise", "triton"),
        ("blockwise", "triton"),
    ):
        yield f"{recipe} {impl}", GemmChoice.all(recipe), impl, 1
    yield "tensorwise torch, bf16 wgrad", GemmChoice("tensorwise", "tensorwise", "bf16"), "torch", 1
    yield "tensorwise gluon, two micro-batches", GemmChoice.all("tensorwise"), "gluon", 2
    yield "tensorwise gluon, reused", GemmChoice.all("tensorwise"), "gluon", 0
    yield "tensorwise torch, reused", GemmChoice.all("tensorwise"), "torch", 0


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def counts_of(experts: int, routing: str) -> Tensor:
    return torch.tensor(route_tokens(TOKENS, experts, routing), device="cuda")


def step_of(layer: GroupedLinear, x: Tensor, counts: Tensor, dy: Tensor, share: int) -> Call:
    def step() -> None:
        if share:
            drop_casts([layer.weight])
        for _ in range(max(share, 1)):
            torch.autograd.grad(layer(x, counts), (x, layer.weight), dy)

    return step


def experts(part: str, asked: list[str]) -> list[dict[str, Any]]:
    result = []
    count = EXPERTS[part]
    for name, (outputs, inputs) in SHAPES[part].items():
        weight = torch.nn.Parameter(random(count, outputs, inputs) / inputs**0.5)
        x, dy = random(TOKENS, inputs).requires_grad_(), random(TOKENS, outputs)
        for routing in ROUTINGS:
            counts = counts_of(count, routing)
            steps, errors, exact = {}, {}, None
            shares = {}
            for arm, gemms, impl, share in arms():
                if asked and arm not in asked:
                    continue
                layer = GroupedLinear(
                    count, inputs, outputs, recipe=Fp8Recipe(), gemms=gemms, impl=impl, device="meta", dtype=x.dtype
                )
                layer.weight = weight
                with torch.no_grad():
                    y = layer(x, counts).float()
                layer.check_routing()
                exact = y if exact is None else exact
                errors[arm] = float((y - exact).norm() / exact.norm())
                if not errors[arm] < 0.06:
                    raise SystemExit(f"{part} {name} {routing} {arm}: relative error {errors[arm]:.3f} against BF16")
                steps[arm], shares[arm] = step_of(layer, x, counts, dy, share), max(share, 1)
            del exact, y
            timed = harness.time_in_turns(steps, REPEATS, cuda=True)
            samples = {arm: [each / shares[arm] for each in times] for arm, times in timed.items()}
            plain = statistics.median(samples["bf16"])
            result += [
                {
                    "part": part,
                    "layer": name,
                    "shape": [outputs, inputs],
                    "experts": count,
                    "tokens": TOKENS,
                    "routing": routing,
                    "arm": arm,
                    **harness.summary(times),
                    "samples_ms": times,
                    "times_bf16": plain / statistics.median(times),
                    "tflops": 6 * TOKENS * outputs * inputs / statistics.median(times) / 1e9,
                    "relative_error": errors[arm],
                }
                for arm, times in samples.items()
            ]
    return result


def products() -> list[dict[str, Any]]:
    """Each product alone, by every implementation and launch."""
    count, (outputs, inputs) = EXPERTS["dsv3"], SHAPES["dsv3"]["plain"]
    x, dy, weight = random(TOKENS, inputs), random(TOKENS, outputs), random(count, outputs, inputs)
    result = []
    for routing in ROUTINGS:
        counts = counts_of(count, routing)
        layout = kernels.lay_out(counts, TOKENS, 128)
        calls: dict[tuple[str, str], Call] = {
            ("bf16", "fprop"): partial(plain_rows, x, weight, layout, None),
            ("bf16", "dgrad"): partial(plain_rows, dy, weight.transpose(1, 2), layout, None),
            ("bf16", "wgrad"): partial(plain_sums, dy, x, layout),
        }
        for recipe in expert_recipes():
            calls |= product_calls(recipe, x, dy, weight, layout, routing == "uniform")
        refused = compile_together(calls)
        for (arm, gemm), why in refused.items():
            print(f"products {gemm} {routing} {arm}: not timed, {why}", flush=True)
        calls = {key: call for key, call in calls.items() if key not in refused}
        samples = harness.time_in_turns({f"{arm}|{gemm}": call for (arm, gemm), call in calls.items()}, 7, cuda=True)
        for key, times in samples.items():
            arm, gemm = key.split("|")
            median = statistics.median(times)
            row = {"part": "products", "layer": gemm, "routing": routing, "arm": arm, **harness.summary(times)}
            plain = statistics.median(samples[f"bf16|{gemm}"])
            tflops = 2 * TOKENS * outputs * inputs / median / 1e9
            result.append(row | {"samples_ms": times, "times_bf16": plain / median, "tflops": tflops})
    return result


def candidate_launches(scales: str) -> list[Any]:
    """Launches of Triton's product worth measuring, the default first."""
    from bitplan.fp8.kernels.triton_product import DEFAULT_LAUNCHES, GroupedLaunch

    cuts = [(128, 256, 8, 3), (128, 256, 8, 4), (128, 128, 8, 4), (128, 128, 4, 3), (64, 256, 4, 4), (64, 128, 4, 5)]
    first = DEFAULT_LAUNCHES[scales]
    launches = [GroupedLaunch(*cut, tma=tma) for tma in (True, False) for cut in cuts]
    return [first, *(launch for launch in launches if launch != first)]


def product_calls(
    recipe: str, x: Tensor, dy: Tensor, weight: Tensor, layout: GroupLayout, every_launch: bool
) -> dict[tuple[str, str], Call]:
    x_rows, x_cols = kernels.cast_tokens(x, recipe, layout)
    dy_rows, dy_cols = kernels.cast_tokens(dy, recipe, layout)
    w_rows, w_cols = kernels.cast_experts(weight, recipe)
    operands: Any = ((x_rows, w_rows), (dy_rows, w_cols), (dy_cols, x_cols))
    ways: dict[str, dict[str, Any]] = {}
    kind = scale_kind(recipe)
    # What torch and Triton have for rowwise is what they have for tensorwise.
    for impl in {"tensorwise": ("gluon",), "rowwise": ("gluon", "torch"), "blockwise": ()}[recipe]:
        ways[impl] = {"impl": impl}
        ways[f"{impl}, float32 sums"] = {"impl": impl, "fast_accum": False}
    launches = candidate_launches(kind) if recipe != "tensorwise" else []
    for launch in launches[: None if every_launch else 1]:
        name = f"triton {launch.rows}x{launch.cols} {launch.warps}w {launch.stages}s {'tma' if launch.tma else 'ptr'}"
        ways[name] = {"impl": "triton", "launch": launch}
    calls: dict[tuple[str, str], Call] = {}
    for name, how in ways.items():
        for gemm, (a, b) in zip(PRODUCTS, operands, strict=True):
            run: Any = kernels.grouped_sums if gemm == "wgrad" else kernels.grouped_rows
            calls[f"{recipe} {name}", gemm] = partial(run, a, b, layout, torch.bfloat16, **how)
    return calls


def compile_together(calls: dict[tuple[str, str], Call]) -> dict[tuple[str, str], str]:
    """Run every call once, many at a time: Triton compiles each, and compilers wait for nobody.

    Returns why for those launches that do not fit this GPU: more shared memory than it has.
    """
    from triton.runtime.errors import OutOfResources

    def attempt(call: Call) -> str | None:
        try:
            call()
        except OutOfResources as error:
            return str(error).splitlines()[0]
        return None

    with ThreadPoolExecutor(12) as pool:
        result = dict(zip(calls, pool.map(attempt, calls.values()), strict=True))
    torch.cuda.synchronize()
    return {key: why for key, why in result.items() if why is not None}


def casts() -> list[dict[str, Any]]:
    count, (outputs, inputs) = EXPERTS["dsv3"], SHAPES["dsv3"]["plain"]
    x, weight = random(TOKENS, inputs), random(count, outputs, inputs)
    copied = copy_rate(x)
    result = []
    for routing in ROUTINGS:
        counts = counts_of(count, routing)
        layout = kernels.lay_out(counts, TOKENS, 128)
        calls: dict[str, Call] = {"layout": lambda counts=counts: kernels.lay_out(counts, TOKENS, 128)}  # type: ignore[misc]
        for recipe in expert_recipes():
            calls[f"tokens {recipe}"] = partial(kernels.cast_tokens, x, recipe, layout)
            calls[f"matrices {recipe}"] = partial(kernels.cast_experts, weight, recipe)
        calls |= {f"{name} guessed": call for name, call in guessed_casts(x, weight, layout).items()}
        calls |= {f"{name} misguessed": call for name, call in guessed_casts(x, weight, layout, wrong=True).items()}
        for name, times in harness.time_in_turns(calls, 15, cuda=True).items():
            read = {"tokens": x.nbytes, "matrices": weight.nbytes}.get(name.split()[0], 0)
            by_name = {"blockwise": 2, "guessed": 2, "misguessed": 4}
            moved = read * by_name.get(name.split()[-1], 3)  # the others read twice
            rate = moved / statistics.median(times)
            row = {"part": "casts", "layer": name, "routing": routing, "arm": "cast", **harness.summary(times)}
            result.append(row | {"samples_ms": times, "bytes_moved": moved, "share_of_copy": rate / copied})
    return result


def guessed_casts(
    x: Tensor, weight: Tensor, layout: GroupLayout, *, wrong: bool = False
) -> dict[str, Callable[[], object]]:
    """Casts of the same numbers again and again, so that all guesses but the first are right; or all are `wrong`."""
    from bitplan.fp8.kernels.guessed_cast import new_state

    def cast(what: Callable[..., object], state: Tensor, *given: Any) -> None:
        if wrong:
            state[:1].view(torch.float32).fill_(1.5)
        what(*given, guess=state)

    of_x, of_weight = (new_state(x.device, layout.experts) for _ in range(2))
    return {
        "tokens tensorwise": partial(cast, kernels.cast_tokens, of_x, x, "tensorwise", layout),
        "matrices tensorwise": partial(cast, kernels.cast_experts, of_weight, weight, "tensorwise"),
    }


def launches() -> list[dict[str, Any]]:
    from bitplan.fp8.kernels import experts_general_cast as pairs
    from bitplan.fp8.kernels.triton_cast import CastLaunch

    def run(kind: str, launch: CastLaunch, call: Call) -> None:
        ours[kind]["tensor"] = launch
        call()

    result = []
    ours = {"tokens": pairs.TOKENS_LAUNCHES, "matrices": pairs.MATRICES_LAUNCHES}
    shipped = {kind: launches["tensor"] for kind, launches in ours.items()}
    for model, count in EXPERTS.items():
        outputs, inputs = SHAPES[model]["fc1"]
        x, weight = random(TOKENS, inputs), random(count, outputs, inputs)
        layout = kernels.lay_out(counts_of(count, "uniform"), TOKENS, 128)
        copied = copy_rate(x)
        calls: dict[str, Call] = {}
        for name, call in guessed_casts(x, weight, layout).items():
            kind = name.split()[0]
            for rows, cols, warps, vector in CAST_LAUNCHES:
                if rows == TILE_ROWS or kind == "matrices":
                    launch = CastLaunch(rows, cols, warps, vector=vector)
                    calls[f"{kind} {rows}x{cols} {warps}w {vector}v"] = partial(run, kind, launch, call)
        for name, times in harness.time_in_turns(calls, 15, cuda=True).items():
            moved = 2 * (x if name.startswith("tokens") else weight).nbytes
            row: dict[str, Any] = {"part": "launches", "layer": f"{model} {name}", "routing": "uniform", "arm": "cast"}
            row |= {**harness.summary(times), "samples_ms": times, "bytes_moved": moved}
            result.append(row | {"share_of_copy": moved / statistics.median(times) / copied})
    for kind, launch in shipped.items():
        ours[kind]["tensor"] = launch
    return result


def copy_rate(x: Tensor) -> float:
    """Bytes read and written in a millisecond by a copy."""
    target = torch.empty_like(x)
    times = harness.time_in_turns({"copy": lambda: torch.mul(x, 1.0, out=target)}, 15, cuda=True)["copy"]
    return 2 * x.nbytes / statistics.median(times)


def line(row: dict[str, Any]) -> str:
    head = f"{row['part']:<9}{row['layer']:<34}{row['routing']:<9}{row['arm']:<38}{row['median_ms']:>9.3f} ms"
    if "times_bf16" in row:
        return f"{head}{row['times_bf16']:>7.2f}x{row['tflops']:>8.0f} TFLOP/s"
    return f"{head}{row['share_of_copy']:>7.0%} of a copy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="dsv3,qwen3,products,casts")
    parser.add_argument(
        "--arms", action="append", default=[], help="an arm of the experts; bf16 is one; again for more"
    )
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    cast_anew = {name: share == 1 for name, *_, share in arms()}
    if unknown := set(given.arms) - set(cast_anew):
        raise SystemExit(f"--arms are {'; '.join(cast_anew)}; got {'; '.join(sorted(unknown))}")
    chosen = ["bf16", *given.arms] if given.arms else []
    ways: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "dsv3": partial(experts, "dsv3", chosen),
        "qwen3": partial(experts, "qwen3", chosen),
        "products": products,
        "casts": casts,
        "launches": launches,
    }
    asked = given.parts.split(",")
    if unknown := set(asked) - set(ways):
        raise SystemExit(f"--parts are {', '.join(ways)}, got {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for part in asked:
        rows += ways[part]()
        torch.cuda.empty_cache()
    document = {
        "benchmark": "fp8_grouped",
        "machine": harness.machine("cuda"),
        "versions": harness.versions(),
        "commit": harness.commit(),
    }
    path = harness.save("fp8_grouped", document | {"rows": rows}, given.output)
    print("\n".join(map(line, rows)))
    for part, target in TARGETS.items():
        best: dict[tuple[str, str], float] = {}
        for row in rows:
            if row["part"] == part and cast_anew[row["arm"]]:
                key = (row["layer"], row["routing"])
                best[key] = max(best.get(key, 0.0), row["times_bf16"] if row["arm"] != "bf16" else 0.0)
        for (layer, routing), times in best.items():
            print(f"{part} {layer} {routing}: best FP8 {times:.2f}x of BF16, target {target:.2f}x")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
