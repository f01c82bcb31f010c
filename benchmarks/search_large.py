"""How long a search of a llama of 8B's shape takes on a GPU, and how much of its memory: random weights.

python benchmarks/search_large.py --layers 32 --result FILE

Weights lie in the host's memory, as those of a file do; the search reads them block by block. Stages are written to the
result as they end, so that a run that is cut says how far it came. `--out FOLDER` keeps the evidence there, and a
second run goes on.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import torch
from llama_layers import LlamaDecoderLayer, Size, angles
from torch import Tensor, nn

from bitplan.searching import Goal, SearchOptions, search

SIZES = {
    "8b": (Size(4096, 14336, 32, 8), 128256),
    "tiny": (Size(256, 512, 4, 2, 64), 512),
}
SHOWN = 5.0  # seconds between two lines of progress


class Body(nn.Module):
    def __init__(self, size: Size, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, size.hidden)
        self.layers = nn.ModuleList(LlamaDecoderLayer(size) for _ in range(layers))
        self.norm = nn.RMSNorm(size.hidden)


class Llama(nn.Module):
    """Token ids [windows, length] -> logits."""

    def __init__(self, size: Size, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.size = size
        self.model = Body(size, layers, vocabulary)
        self.lm_head = nn.Linear(size.hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        cos, sin = angles(ids.shape[1], self.size.head_dim, x.device, x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.model.norm(x))
        return logits


def random_llama(size: Size, layers: int, vocabulary: int, device: torch.device) -> Llama:
    """BF16 weights in the host's memory; some columns are larger than others, as in models that were trained."""
    with torch.device("meta"):
        model = Llama(size, layers, vocabulary).to(torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            columns = torch.randn(
                parameter.shape[1], generator=torch.Generator(device).manual_seed(1), device=device
            ).exp()
            for rows in parameter.split(2**25 // parameter.shape[1] + 1):
                noise = torch.randn(rows.shape, generator=generator, device=device)
                rows.copy_((0.02 * noise * columns).to(torch.bfloat16))
    return model.requires_grad_(False)


class Stages:
    """Seconds and the GPU's peak of each stage, and a line of progress now and then."""

    def __init__(self, device: torch.device, on_end: Callable[[], None], *, profile: bool = False) -> None:
        self._device, self._on_end, self._profile = device, on_end, profile
        self.rows: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, what: str, total: int) -> Iterator[Callable[[int, str], None]]:
        started = shown = time.perf_counter()
        self._reset()
        print(f"{what}: {total} steps", flush=True)

        def advance(_count: int, label: str) -> None:
            nonlocal shown
            if time.perf_counter() - shown > SHOWN:
                shown = time.perf_counter()
                print(f"  {shown - started:6.1f} s  {label}", flush=True)

        profiler = cProfile.Profile() if self._profile else None
        try:
            if profiler is not None:
                profiler.enable()
            yield advance
        finally:
            if profiler is not None:
                profiler.disable()
                _show(profiler)
            row = self.rows.setdefault(what, {"seconds": 0.0, "peak_gib": 0.0})
            row["peak_gib"] = round(max(row["peak_gib"], self._peak()), 2)
            row["seconds"] = round(row["seconds"] + time.perf_counter() - started, 2)
            print(f"{what}: {time.perf_counter() - started:.1f} s, peak {row['peak_gib']:.2f} GiB", flush=True)
            self._on_end()

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> float:
        if self._device.type != "cuda":
            return 0.0
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**30


def _show(profiler: cProfile.Profile) -> None:
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(14)
    print("\n".join(line for line in text.getvalue().split("\n")[6:] if line.strip()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SIZES), default="8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bits", type=float, default=4.5)
    parser.add_argument("--formats", default=None)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--out", type=Path, default=None, help="keep the evidence in this folder")
    parser.add_argument("--profile", action="store_true", help="print what takes the host's time, stage by stage")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    size, vocabulary = SIZES[options.shape]
    started = time.perf_counter()
    model = random_llama(size, options.layers, vocabulary, device)
    print(f"{options.layers} layers of random weights: {time.perf_counter() - started:.1f} s", flush=True)
    windows = -(-(options.windows + 4) * 4 // 3) + 24  # with those for checks; a quarter is kept for the proof
    ids = torch.randint(vocabulary, (windows, options.context), generator=torch.Generator().manual_seed(2))
    row: dict[str, Any] = {"layers": options.layers, "windows": options.windows, "context": options.context}
    found = {
        "benchmark": "search_large",
        "commit": harness.commit(),
        "machine": harness.machine(device.type),
        "versions": harness.versions(),
        "shape": {"hidden": size.hidden, "ffn": size.ffn, "vocabulary": vocabulary, "weights": "random, BF16"},
        "goal": {"bits": options.bits},
        "searches": [row],
    }

    def save() -> None:
        row["stages"] = stages.rows
        row["seconds"] = round(time.perf_counter() - begun, 1)
        row["gpu_peak_gib"] = max((each["peak_gib"] for each in stages.rows.values()), default=0.0)
        row["host_peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)
        harness.save("search_large", found, options.result)

    begun = time.perf_counter()
    stages = Stages(device, save, profile=options.profile)
    result = search(
        model,
        [ids],
        goal=Goal(bits=options.bits),
        formats=options.formats.split(",") if options.formats else None,
        out=options.out,
        options=SearchOptions(device=str(device), windows=options.windows, stage=stages),
    )
    row["complete"] = True
    row["corrections"] = result.corrections
    row["plan"] = {"kl": result.winner.kl.mean, "bytes": result.winner.nbytes, "label": result.winner.label}
    row["measured"] = {each.label: each.kl.mean for each in result.rivals}
    row["phases"] = result.seconds
    save()
    print(f"{'stage':24}{'seconds':>10}{'peak GiB':>10}")
    for what, each in stages.rows.items():
        print(f"{what:24}{each['seconds']:10.1f}{each['peak_gib']:10.2f}")
    print(f"{'in all':24}{row['seconds']:10.1f}{row['gpu_peak_gib']:10.2f}   host {row['host_peak_gib']} GiB")


if __name__ == "__main__":
    main()
