"""A training step of llama layers under FSDP2, in BF16 and in FP8, on one GPU.

    python benchmarks/fp8_fsdp.py [--tokens 4096,16384] [--layers 4]

One process is its own group, so nothing crosses a wire: what is timed is FSDP2's work around a step (gathering copies
every weight, gradients are scattered), the casts, the products and the optimizer, a fused AdamW. Arms, in turns:

    bf16          the layers as they are
    fp8           apply_fp8, weights gathered in BF16 and cast in each forward and backward
    fp8 gathered  apply_fp8, then `gather_weights_in_fp8`: shards are cast once a step and cross in one byte a number

Layers are called eagerly: FSDP2's hooks break compiled graphs.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from fp8_layers import LONGEST, SIZES, _counts
from llama_layers import LlamaLayers
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bitplan.fp8 import gather_weights_in_fp8
from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.layers.linear import Fp8Linear

ARMS = ("bf16", "fp8", "fp8 gathered")


def sharded(plain: LlamaLayers, arm: str, tokens: int, mesh: Any) -> nn.Module:
    model = copy.deepcopy(plain)
    if arm != "bf16":
        apply_fp8(model, None, tokens=tokens, recipe="tensorwise", emulate=mesh.device_type == "cpu")
    if arm == "fp8 gathered":
        assert not gather_weights_in_fp8(model)
    for layer in model.modules():
        if isinstance(layer, Fp8Linear):
            layer.reuse_weight_cast = False  # FSDP2 fills a weight's memory anew without saying so
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    gradient = torch.randn_like(x)

    def step() -> None:
        model(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="h4096", choices=SIZES)
    parser.add_argument("--tokens", type=_counts, default=(4096, 16384))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    dist.init_process_group("nccl" if is_gpu else "gloo", store=HashStore(), rank=0, world_size=1)
    mesh, size = init_device_mesh(options.device, (1,)), SIZES[options.size]
    document: dict[str, Any] = {
        "benchmark": "fp8_fsdp",
        "commit": harness.commit(),
        "machine": harness.machine(options.device),
        "versions": harness.versions(),
        "processes": 1,
        "layers": options.layers,
    }
    rows: list[dict[str, Any]] = []
    dtype = torch.bfloat16 if is_gpu else torch.float32
    name = document["machine"].get("gpu", "cpu").lower().replace(" ", "_")
    for tokens in options.tokens:
        torch.manual_seed(0)
        with torch.device(options.device):
            plain = LlamaLayers(size, options.layers).to(dtype)
            batch = -(-tokens // LONGEST)
            x = torch.randn(batch, tokens // batch, size.hidden, dtype=dtype)
        steps = {arm: step_of(sharded(plain, arm, tokens, mesh), x) for arm in ARMS}
        for step in steps.values():
            step()
        samples = harness.time_in_turns(steps, options.turns, cuda=is_gpu)
        row: dict[str, Any] = {"size": size.label, "tokens": tokens}
        row["arms"] = {arm: harness.summary(each) | {"samples_ms": each} for arm, each in samples.items()}
        rows.append(row)
        medians = {arm: each["median_ms"] for arm, each in row["arms"].items()}
        ratios = {arm: medians["bf16"] / median for arm, median in medians.items()}
        print(tokens, *(f"{arm} {medians[arm]:.2f} ms {ratios[arm]:.3f}x" for arm in ARMS), flush=True)
        harness.save(f"fp8_fsdp_{name}", document | {"rows": rows}, options.output)
        del steps
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
