"""What layers would cost on a made-up GPU: multiplications, bytes, kernels and launches; and reports of it with noise.

Times are in microseconds. A product takes its multiplications at the rate of its precision, rounded up in part to whole
waves of tiles, or its bytes, whichever is longer. FP8 casts what its products read, once for both of its layouts. Every
kernel has a ramp, and without CUDA graphs a layer takes at least as long as its launches take the host.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bitplan.fp8.policy.merge import merge_reports
from bitplan.fp8.policy.report import Row
from bitplan.fp8.policy.vocabulary import PRODUCTS
from tests.fp8.policy.fp8_samples import report

Shape = tuple[int, int]
READ_BY = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}


@dataclass(frozen=True)
class Gpu:
    """Rates a microsecond. As it stands it is within some percent of an H200's measured layers."""

    bf16_flops: float = 780e6
    fp8_flops: float = 1350e6
    bytes: float = 4.23e6
    ramp_us: float = 4.0
    bf16_launch_us: float = 12.0
    fp8_launch_us: float = 20.0
    waves: float = 0.25  # how much of a last wave that is not full is lost
    processors: int = 132

    def product_us(self, rows: int, columns: int, depth: int, *, fp8: bool) -> float:
        tiles = -(-rows // 128) * -(-columns // 256)
        lost = min(-(-tiles // self.processors) * self.processors / tiles, 1.6) ** self.waves
        computing = 2 * rows * columns * depth * lost / (self.fp8_flops if fp8 else self.bf16_flops)
        moved = (rows + columns) * depth * (1 if fp8 else 2) + 2 * rows * columns
        return max(computing, moved / self.bytes) + self.ramp_us

    def layer_us(self, kind: str, shape: Shape, tokens: int, products: tuple[str, ...], timing: str) -> float:
        """Forward and backward of a layer with some of its products in FP8."""
        rows, columns = shape
        sizes = {"fprop": (tokens, rows, columns), "dgrad": (tokens, columns, rows), "wgrad": (rows, columns, tokens)}
        time = sum(self.product_us(*size, fp8=gemm in products) for gemm, size in sizes.items())
        launches = 3
        for numbers, read_by in ((tokens * columns, "x"), (rows * columns, "w"), (tokens * rows, "dy")):
            layouts = sum(gemm in products for gemm in READ_BY[read_by])
            if layouts:  # one read for the maximum, one for the cast
                time += numbers * (4 + layouts) / (0.87 * self.bytes) + 2 * self.ramp_us
                launches += 2
        if kind == "layernorm_column":
            time += tokens * columns * (10 if products else 14) / self.bytes + 2 * self.ramp_us
            launches += 3
        floor = launches * (self.fp8_launch_us if products else self.bf16_launch_us)
        return max(time, floor) if timing == "eager" else time


GPUS = {
    "as an H200": Gpu(),
    "even": Gpu(waves=0.0),
    "slow host": Gpu(bf16_launch_us=25.0, fp8_launch_us=30.0),
    "fast host": Gpu(bf16_launch_us=6.0, fp8_launch_us=8.0),
    "slow memory": Gpu(bytes=3e6, bf16_flops=600e6, fp8_flops=1150e6),
    "slow host and little gain": Gpu(fp8_flops=1000e6, bf16_launch_us=40.0, fp8_launch_us=50.0),
}


@dataclass(frozen=True)
class Llama:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head: int = 128

    @property
    def layers(self) -> tuple[tuple[str, str, Shape], ...]:
        """Kind, name and shape of the four linear layers of a block."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head
        return (
            ("layernorm_column", "qkv", (qkv, self.hidden)),
            ("row", "proj", (self.hidden, self.heads * self.head)),
            ("layernorm_column", "fc1", (2 * self.ffn, self.hidden)),
            ("row", "fc2", (self.hidden, self.ffn)),
        )


MEASURED = (Llama(4096, 14336, 32, 8), Llama(2048, 8192, 16, 4))
OTHERS = (
    Llama(1024, 4096, 16, 8, 64),
    Llama(1536, 8960, 12, 2),
    Llama(2560, 9728, 32, 8),
    Llama(3072, 8192, 24, 8),
    Llama(3584, 18944, 28, 4),
    Llama(5120, 13824, 40, 8),
    Llama(6144, 16384, 48, 8),
    Llama(8192, 28672, 64, 8),
)


def measure(gpu, models, tokens, *, timings=("graph", "eager"), noise=0.01, turns=12, seed=0, products=False):
    """A policy of a GPU: all layers of the models at all counts, each time with noise that only adds."""
    draw = random.Random(seed)
    rows = []
    for kind, name, shape in dict.fromkeys(layer for model in models for layer in model.layers):
        layer = {"part": "llm", "kind": kind, "name": name, "shape": shape, "tp": 1}
        arms = {"module": PRODUCTS} | ({gemm: (gemm,) for gemm in PRODUCTS} if products else {})
        for timing in timings:
            for count in tokens:
                for gemm, chosen in arms.items():
                    how = {"gemm": gemm, "timing": timing, "tokens": count, "status": "ok", "in_turns": True}
                    for precision, of in (("bf16", ()), ("fp8", chosen)):
                        ms = gpu.layer_us(kind, shape, count, of, timing) / 1e3
                        samples = tuple(ms * (1 + abs(draw.gauss(0, noise))) for _ in range(turns))
                        rows.append(Row(precision=precision, samples_ms=samples, **layer, **how))
    return merge_reports([report(rows, recipe="tensorwise")]).policy
