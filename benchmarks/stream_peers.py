"""Streaming beside DeepSpeed, FSDP2, RamTorch and accelerate: one step of the same blocks on one GPU.

    PYTHONPATH=peers-folder python benchmarks/stream_peers.py --limit 240 --output stream_peers.json
    python benchmarks/stream_peers.py --tiny --device cpu     on the simulated device; figures mean nothing

Model: llama blocks of 8B's shape (h4096, ffn14336, 8 heads of keys and values; four for full fine-tuning, 16 for
adapters of rank 16) or of 70B's (h8192, ffn28672; two), no embedding and no head, sequences of 1024, checkpointing,
BF16 products, AdamW on FP32 masters. A step ends when the GPU is done; what is left of its update is part of the next
step, as in training. Each arm is a process of its own with a limit of its own, and a failure is a row with its error.

    bounds             what each part takes alone: forward and backward with everything on the GPU, copies of what must
                       cross each way with three slots, at the bandwidth of pinned copies, AdamW on the host
    bitplan            three slots; adapters also with slots="auto"
    bitplan_early      full fine-tuning with StreamOptions(update_in_backward=True)
    deepspeed          ZeRO-3, parameters and optimizer offloaded to pinned memory, its CPU Adam where it loads
    deepspeed_super    the same with super_offload, whose CPU Adam runs beside the backward
    fsdp2              fully_shard with CPUOffloadPolicy(pin_memory=True), fused AdamW on the host
    ramtorch           OffloadModel, three chunks on the GPU, FP32 masters and autocast, fused AdamW on the host
    ramtorch_bf16      the same with weights and states in BF16: half the bytes, and less exact than the others
    accelerate         cpu_offload of the frozen weights (adapters alone: full training with accelerate is FSDP2 or
                       DeepSpeed)
    paired             adapters: the model on the GPU and slots="auto" by turns, so that a slow moment hits both
    resident           everything on the GPU: what "bounds" times, and for adapters the process of "bitplan", too

TFLOP/s are 6 x weights x tokens by the step's time, whatever is computed again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import harness
import torch
from llama_stack import Attention, Size, rotary
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BF16 = torch.bfloat16
SIZES = {
    "8b": Size(4, 4096, 14336, 32, 16, 1024, (), BF16, kv_heads=8),
    "70b": Size(2, 8192, 28672, 64, 16, 1024, (), BF16, kv_heads=8),
    "tiny": Size(5, 128, 256, 4, 4, 8, (), BF16, kv_heads=2),
}
ADAPTED_BLOCKS = 16
SLOTS = 3
WARM_UP, REPEATS = 2, 4
BANDWIDTH_BYTES, ADAMW_NUMBERS = 2**29, 2**27
ARM_LIMIT_S = 60.0
Row = dict[str, Any]
Step = Callable[[], None]
# mode:arm:shape:tokens, the most important first.
JOBS = (
    "full:bounds:8b:16384,4096,32768",
    "full:bitplan:8b:16384,4096,32768",
    "full:deepspeed:8b:16384,4096,32768",
    "full:bitplan_early:8b:16384,4096,32768",
    "full:fsdp2:8b:16384,4096",
    "full:ramtorch:8b:16384,4096",
    "lora:bitplan:8b:1024,4096,16384",
    "lora:paired:8b:1024,4096",
    "lora:deepspeed:8b:4096,16384",
    "full:deepspeed_super:8b:16384,4096",
    "full:ramtorch_bf16:8b:16384",
    "lora:fsdp2:8b:4096",
    "lora:ramtorch:8b:4096",
    "lora:accelerate:8b:4096",
    "full:bounds:70b:4096",
    "full:bitplan:70b:4096",
    "full:deepspeed:70b:4096",
)


class Adapted(nn.Module):
    """A frozen linear and a trained path of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, outputs, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Block(Attention):
    def __init__(self, size: Size, dtype: torch.dtype, *, adapted: bool) -> None:
        super().__init__()
        self.width = size.hidden // size.heads
        keys = self.width * (size.kv_heads or size.heads)

        def linear(inputs: int, outputs: int) -> nn.Module:
            if adapted:
                return Adapted(inputs, outputs, size.rank, dtype)
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        self.q, self.o = linear(size.hidden, size.hidden), linear(size.hidden, size.hidden)
        self.k, self.v = linear(size.hidden, keys), linear(size.hidden, keys)
        self.gate, self.up = linear(size.hidden, size.ffn), linear(size.hidden, size.ffn)
        self.down = linear(size.ffn, size.hidden)
        self.first, self.second = (nn.RMSNorm(size.hidden, dtype=dtype) for _ in range(2))
        if adapted:
            self.first.requires_grad_(False)
            self.second.requires_grad_(False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(size.sequence, self.width, dtype=BF16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.first(x))
        hidden = self.second(x)
        out: Tensor = x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return out


class Stack(nn.Module):
    """Blocks under checkpointing; the reentrant kind costs the host least, and FSDP2 takes the other."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.reentrant = layers, True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@dataclass(frozen=True)
class Job:
    """One process: an arm, a kind of training, a shape, and the tokens of its steps."""

    mode: str
    arm: str
    shape: str
    tokens: tuple[int, ...]
    device: str

    @property
    def size(self) -> Size:
        size = SIZES[self.shape]
        is_long = self.mode == "lora" and self.shape == "8b"
        return replace(size, blocks=ADAPTED_BLOCKS) if is_long else size

    def model(self, dtype: torch.dtype = BF16) -> Stack:
        """The blocks on the host, with numbers that repeat: what they are costs no time and changes none."""
        size = self.size
        with torch.device("meta"):
            layers = nn.ModuleList(Block(size, dtype, adapted=self.mode == "lora") for _ in range(size.blocks))
        layers.to_empty(device="cpu")
        some = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).to(dtype)
        for name, one in layers.named_parameters():
            scale = 0.0 if name.endswith("up.up.weight") else 0.5 / math.sqrt(one.shape[-1])
            flat = one.data.view(-1)
            for part in flat.split(len(some)):
                torch.mul(some[: len(part)], scale, out=part)
            if one.dim() == 1:
                one.data.fill_(1.0)
        cos, sin = rotary(replace(size, dtype=BF16))
        for layer in layers:
            layer.cos, layer.sin = cos, sin
        return Stack(layers)

    def batches(self) -> Iterator[tuple[int, Tensor]]:
        for tokens in self.tokens:
            generator = torch.Generator().manual_seed(tokens)
            rows = max(1, tokens // self.size.sequence)
            x = torch.randn(rows, self.size.sequence, self.size.hidden, generator=generator)
            yield rows * self.size.sequence, x.to(BF16).to(self.device).requires_grad_()


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def weights_of(model: nn.Module) -> int:
    """The weights of matrices and norms; adapters are not counted."""
    low_rank = sum(
        one.down.weight.numel() + one.up.weight.numel() for one in model.modules() if isinstance(one, Adapted)
    )
    return sum(one.numel() for one in model.parameters()) - low_rank


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


# ---- arms: each yields what to run, a name, and figures that are known afterwards ------------------------------------


@dataclass
class Arm:
    """Makes a step for an input; `note` says afterwards what is particular."""

    step_of: Callable[[Tensor], Step]
    weights: int
    variant: str
    note: Callable[[], Row] = dict
    close: Callable[[], None] = lambda: None


def resident(job: Job) -> Iterator[Arm]:
    model = job.model().to(job.device)
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-5, fused=True) if job.mode == "lora" else None

    def step_of(x: Tensor) -> Step:
        def step() -> None:
            loss_of(model(x)).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad(set_to_none=True)

        return step

    yield Arm(step_of, weights_of(model), "resident")


def bitplan(job: Job, *, early: bool = False) -> Iterator[Arm]:
    from bitplan import stream_blocks
    from bitplan.streaming import AdamWSettings, StreamOptions

    if job.mode == "lora":
        yield from resident(job)
    model, numbers = job.model(), itertools.count()
    for slots in (SLOTS,) if job.mode == "full" else ("auto", SLOTS):
        options: dict[str, Any] = {"update_in_backward": True} if early else {}
        given: dict[str, Any] = {"slots": slots, "device": job.device, "options": StreamOptions(**options)}
        if job.mode == "full":
            given |= {"train": "weights", "optimizer": AdamWSettings(lr=1e-5)}
        stream = stream_blocks(model, "layers.*", **given)
        trained = [one for one in trained_of(model) if one.device.type == job.device and job.mode == "lora"]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True) if trained else None

        def step_of(x: Tensor, stream: Any = stream, optimizer: Any = optimizer) -> Step:
            def step() -> None:
                stream.begin_step(next(numbers))
                loss_of(model(x)).backward()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                stream.end_step()

            return step

        def note(stream: Any = stream, slots: Any = slots) -> Row:
            stream.synchronize()
            last = stream.stats.last
            row = {"slots": slots, "pinned_bytes": stream.stats.pinned_bytes, "bytes_h2d": last.bytes_h2d}
            return row | {"bytes_d2h": last.bytes_d2h, "stall_ms": last.stall_ms, "h2d_gb_per_s": last.h2d_gb_per_s}

        name = "bitplan_early" if early else "bitplan" if job.mode == "full" else f"bitplan, slots={slots}"
        yield Arm(step_of, weights_of(model), name, note, stream.close)


def deepspeed(job: Job, *, overlapped: bool = False) -> Iterator[Arm]:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(29500 + os.getpid() % 500), "DS_IGNORE_CUDA_DETECTION": "1"}
    import deepspeed as library

    size, model = job.size, job.model()
    for layer in model.layers:
        layer.cos, layer.sin = layer.cos.to(job.device), layer.sin.to(job.device)
    count, adam = weights_of(model), "DeepSpeed's CPU Adam"
    block = count // size.blocks
    if overlapped:  # its worker has 80% of the cores: no more threads than those, or they wait for each other
        cores = len(os.sched_getaffinity(0))
        os.environ["OMP_NUM_THREADS"] = str(cores - int(0.2 * cores))
    offload = {"device": "cpu", "pin_memory": job.device == "cuda"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_param": offload,
            "offload_optimizer": offload | ({"super_offload": True} if overlapped else {}),
            "stage3_prefetch_bucket_size": block,
            "reduce_bucket_size": block,
            "sub_group_size": block if overlapped else int(1e9),  # super_offload steps a group as soon as it is whole
        },
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam(trained_of(model), lr=1e-5, weight_decay=0.01, adamw_mode=True)
    except Exception as error:
        adam = f"torch's fused AdamW: DeepSpeed's did not load ({str(error.__cause__ or error)[:200]})"
        optimizer = torch.optim.AdamW(trained_of(model), lr=1e-5, fused=True)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)

    def step_of(x: Tensor) -> Step:
        def step() -> None:
            engine.backward(loss_of(engine(x)))
            engine.step()

        return step

    name = "deepspeed_super" if overlapped else "deepspeed"
    yield Arm(step_of, count, name, lambda: {"library": f"deepspeed {library.__version__}", "adam": adam})


def fsdp2(job: Job) -> Iterator[Arm]:
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    is_cuda, distributed = job.device == "cuda", cast(Any, torch.distributed)
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    model = job.model(torch.float32 if job.mode == "full" else BF16)
    count, model.reentrant = weights_of(model), False
    for layer in model.layers:  # tables of rotations are no parameters
        layer.cos, layer.sin = layer.cos.to(job.device), layer.sin.to(job.device)
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(job.device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
        "offload_policy": CPUOffloadPolicy(pin_memory=is_cuda),
    }
    for layer in model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-5, fused=True)

    def step_of(x: Tensor) -> Step:
        def step() -> None:
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    yield Arm(step_of, count, "fsdp2", lambda: {"adam": "torch's fused AdamW"})


def ramtorch(job: Job, *, narrow: bool = False) -> Iterator[Arm]:
    from importlib import metadata

    from ramtorch import OffloadModel

    wide = job.mode == "full" and not narrow
    model = job.model(torch.float32 if wide else BF16)
    count = weights_of(model)
    streamed = OffloadModel(list(model.layers), device=job.device, window=SLOTS, keep_activations="checkpoint")
    parameters = [one for one in streamed.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def step_of(x: Tensor) -> Step:
        given = x.detach()

        def step() -> None:
            with torch.autocast(job.device, dtype=BF16, enabled=wide):
                streamed.step(given, loss_fn=lambda out, _: loss_of(out))
            streamed.flush_grads()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    states = "FP32 masters and states" if wide else "weights and states in BF16"
    note = {"library": f"ramtorch {metadata.version('ramtorch')}", "adam": f"torch's fused AdamW, {states}"}
    yield Arm(step_of, count, "ramtorch_bf16" if narrow else "ramtorch", lambda: note, streamed.close)


def accelerate(job: Job) -> Iterator[Arm]:
    if job.mode == "full":
        raise ValueError("accelerate trains offloaded weights through FSDP2 or DeepSpeed, which have rows of their own")
    import accelerate as library

    model = job.model()
    count, bases = weights_of(model), [one.base for one in model.modules() if isinstance(one, Adapted)]
    for module in model.modules():
        if not any(module is base for base in bases):
            for held in (module._parameters, module._buffers):
                for name, one in held.items():
                    if one is not None:
                        moved = one.data.to(job.device)
                        into: Any = held
                        into[name] = nn.Parameter(moved, one.requires_grad) if held is module._parameters else moved
    for base in bases:
        library.cpu_offload(base, execution_device=torch.device(job.device))
    trained = [one for module in model.modules() if isinstance(module, Adapted)
               for one in (module.down.weight, module.up.weight)]  # fmt: skip
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step_of(x: Tensor) -> Step:
        def step() -> None:
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    yield Arm(step_of, count, "accelerate", lambda: {"library": f"accelerate {library.__version__}"})


ARMS: dict[str, Callable[[Job], Iterator[Arm]]] = {
    "resident": resident,
    "bitplan": bitplan,
    "bitplan_early": lambda job: bitplan(job, early=True),
    "deepspeed": deepspeed,
    "deepspeed_super": lambda job: deepspeed(job, overlapped=True),
    "fsdp2": fsdp2,
    "ramtorch": ramtorch,
    "ramtorch_bf16": lambda job: ramtorch(job, narrow=True),
    "accelerate": accelerate,
}


# ---- a job, in its own process ---------------------------------------------------------------------------------------


def timed(step: Step, device: str, repeats: int, warm_up: int = WARM_UP) -> list[float]:
    times = []
    for _ in range(warm_up + repeats):
        started = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def measure_paired(job: Job, repeats: int) -> Iterator[Row]:
    """Steps of the model on the GPU and of `slots="auto"` by turns: rows of both, and their ratio turn by turn."""
    arms = bitplan(job)
    pair = [next(arms), next(arms)]
    for tokens, x in job.batches():
        steps = [arm.step_of(x) for arm in pair]
        for step in steps:
            timed(step, job.device, 1)
        times = [[timed(step, job.device, 1, warm_up=0)[0] for step in steps] for _ in range(5 * repeats)]
        row: Row = {"mode": job.mode, "shape": job.shape, "blocks": job.size.blocks, "tokens": tokens, "arm": "paired"}
        row |= {"median_ms": statistics.median(auto for _, auto in times), "weights": pair[0].weights}
        row |= {"resident_ms": statistics.median(resident for resident, _ in times), "step_ms": times}
        row |= {"times_resident": statistics.median(auto / resident for resident, auto in times)}
        row |= {"tflops_6nt": 6 * pair[0].weights * tokens / row["median_ms"] / 1e9}
        yield row | {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024} | pair[1].note()


def measure(job: Job, repeats: int) -> Iterator[Row]:
    if job.arm == "paired":
        yield from measure_paired(job, repeats)
        return
    for arm in ARMS["resident" if job.arm == "bounds" else job.arm](job):
        for tokens, x in job.batches():
            if job.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times = timed(arm.step_of(x), job.device, repeats)
            median = statistics.median(times[WARM_UP:])
            row: Row = {"mode": job.mode, "shape": job.shape, "blocks": job.size.blocks, "tokens": tokens}
            row |= {"arm": arm.variant, "median_ms": median, "step_ms": times, "weights": arm.weights}
            row |= {"tflops_6nt": 6 * arm.weights * tokens / median / 1e9}
            if job.device == "cuda":
                row["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
            row["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if arm.variant == "resident":
                row = bounds_of(job, row)
            yield row | arm.note()
        arm.close()
        del arm
        gc.collect()


def bounds_of(job: Job, row: Row) -> Row:
    """What each part of a step takes alone, from the same process; every block is sent forward and backward."""
    sent = 2 * row["weights"]  # in BF16; gradients come back once
    parts = {"gpu": row["median_ms"], "bus in": 2 * sent / _rate("in", job.device) / 1e6}
    if job.mode == "full":
        parts |= {"bus out": sent / _rate("out", job.device) / 1e6, "host adamw": row["weights"] * adamw_ns() / 1e6}
    return row | {"parts_ms": parts}


_measured: dict[str, float] = {}


def _rate(way: str, device: str) -> float:
    """GB/s of a pinned copy."""
    if way not in _measured:
        nbytes = BANDWIDTH_BYTES if device == "cuda" else 2**20
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
        there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        source, target = (host, there) if way == "in" else (there, host)
        best = min(timed(lambda: target.copy_(source, non_blocking=True), device, 3))  # type: ignore[arg-type]
        _measured[way] = nbytes / best / 1e6
    return _measured[way]


def adamw_ns() -> float:
    """Nanoseconds a weight of the host's AdamW: BF16 gradient, FP32 master and moments, BF16 copy to send."""
    if "adamw" not in _measured:
        from bitplan.streaming.training.adamw import AdamWRates, AdamWTensors
        from bitplan.streaming.training.adamw_loop import step_by_loop

        numbers = ADAMW_NUMBERS if torch.cuda.is_available() else 2**16
        master, first, second = (torch.zeros(numbers) for _ in range(3))
        gradient, sent = torch.ones(numbers, dtype=BF16), torch.empty(numbers, dtype=BF16)
        tensors = AdamWTensors(master, gradient, first, second, sent)
        step = timed(lambda: step_by_loop(tensors, AdamWRates(1e-5, (0.9, 0.999), 1e-8, 0.01, 3)), "cpu", 3)
        _measured["adamw"] = min(step) * 1e6 / numbers
    return _measured["adamw"]


def run_job(job: Job, repeats: int) -> None:
    """Print a row a line, as soon as it is known."""
    try:
        for row in measure(job, repeats):
            print("ROW " + json.dumps(row), flush=True)
    except BaseException as error:
        traceback.print_exc()
        row = {"mode": job.mode, "shape": job.shape, "arm": job.arm, "error": f"{type(error).__name__}: {error}"[:600]}
        print("ROW " + json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a library's threads or processes must not keep this one


# ---- all of them -----------------------------------------------------------------------------------------------------


def sent_share(mode: str, blocks: int) -> float:
    """The share that slots must send of every block twice.

    The backward begins with the blocks that the forward left in the slots; frozen ones that the backward leaves serve
    the next forward, too.
    """
    kept = min(SLOTS, blocks) * (2 if mode == "lora" else 1)
    return 1 - kept / (2 * blocks)


def with_bounds(rows: list[Row]) -> list[Row]:
    """Beside each row its parts alone, with the same model and tokens, the largest, and the step's time over that.

    Rows that have theirs stay as they are: every part comes from the model on the GPU, which keeps what was measured.
    """
    measured = {
        (one["mode"], one["shape"], one["tokens"]): one["parts_ms"]
        for one in rows
        if one["arm"] == "resident" and "parts_ms" in one
    }
    result = []
    for row in rows:
        parts = measured.get((row["mode"], row["shape"], row.get("tokens", 0)))
        if parts is None or "median_ms" not in row:
            result.append(row)
            continue
        counted = {"gpu": parts["gpu"]}
        if row["arm"] != "resident" and row.get("slots") != "auto":
            counted = parts | {"bus in": parts["bus in"] * sent_share(row["mode"], row["blocks"])}
        by = max(counted, key=lambda part: counted[part])
        bound = {"bound_ms": counted[by], "bound_by": by, "times_bound": row["median_ms"] / counted[by]}
        result.append(row | {"parts_ms": parts if row["arm"] == "resident" else counted} | bound)
    return result


def line_of(row: Row) -> str:
    head = f"{row['mode']:<5} {row['shape']:<4} {row.get('tokens', ''):>6}  {row['arm']:<22}"
    if "median_ms" not in row:
        return f"{head} {row['error'][:160]}"
    text = f"{head} {row['median_ms']:9.1f} ms {row['tflops_6nt']:7.1f} TFLOP/s by 6NT"
    text += f"  GPU {row.get('gpu_peak_bytes', 0) / 1e9:5.1f} GB  host {row['host_peak_bytes'] / 1e9:5.1f} GB"
    if "times_resident" in row:
        text += f"  {row['times_resident']:.3f} x the model on the GPU by turns ({row['resident_ms']:.1f} ms)"
    if "bound_ms" in row:
        text += f"  {row['times_bound']:.2f} x bound ({row['bound_by']} {row['bound_ms']:.1f})"
    return text


def run_in_process(job: str, options: argparse.Namespace, limit_s: float, keep: Callable[[Row], None]) -> None:
    """A job in a group of processes that ends with it: a worker that a library leaves behind would keep the pipes."""
    command = [sys.executable, __file__, "--job", job, "--device", options.device, "--repeats", str(options.repeats)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    errors: list[str] = []

    def read_rows() -> None:
        for line in process.stdout or ():
            if line.startswith("ROW "):
                row = json.loads(line[4:])
                if "error" in row:
                    print("".join(errors)[-3000:], file=sys.stderr, flush=True)
                keep(row)

    readers = [threading.Thread(target=read_rows), threading.Thread(target=lambda: errors.extend(process.stderr or ()))]
    for reader in readers:
        reader.start()
    try:
        code = process.wait(limit_s)
        why = f"exit {code}"
    except subprocess.TimeoutExpired:
        code, why = -9, f"over its limit of {limit_s:.0f} s"
    with contextlib.suppress(ProcessLookupError):  # it left nobody behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for reader in readers:
        reader.join()
    if code != 0:
        mode, arm, shape, _ = job.split(":")
        keep({"mode": mode, "shape": shape, "arm": arm, "error": f"{why}: {''.join(errors)[-400:]}"})


def is_job(text: str) -> bool:
    arms = "|".join([*ARMS, "bounds", "paired"])
    return re.fullmatch(rf"(full|lora):({arms}):({'|'.join(SIZES)}):\d+(,\d+)*", text) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", help="mode:arm:shape:tokens,... with semicolons or blanks between; default: all")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for everything")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.job:
        mode, arm, shape, tokens = options.job.split(":")
        run_job(Job(mode, arm, shape, tuple(map(int, tokens.split(","))), options.device), options.repeats)
    jobs = list(JOBS) if options.jobs is None else options.jobs.replace(";", " ").split()
    if options.tiny:
        jobs = [":".join([*job.split(":")[:2], "tiny", "16,8"]) for job in jobs]
    for job in jobs:
        if not is_job(job):
            parser.error(f"--jobs: {job!r} is not mode:arm:shape:tokens,... such as {JOBS[0]!r}")
    started, rows, machine = time.perf_counter(), [], harness.machine(options.device)

    def keep(row: Row) -> None:
        row["at_s"] = round(time.perf_counter() - started, 1)
        rows.append(row)
        print(line_of(with_bounds(rows)[-1]), flush=True)
        document: Row = {"benchmark": "stream_peers", "machine": machine}
        document |= {"versions": harness.versions(), "commit": harness.commit(), "rows": with_bounds(rows)}
        harness.save(f"stream_peers_{options.device}", document, options.output)

    for job in jobs:
        left = options.limit - (time.perf_counter() - started)
        if left < 12:
            print(f"no time for {job}", flush=True)
            continue
        run_in_process(job, options, min(ARM_LIMIT_S, left - 2), keep)


if __name__ == "__main__":
    main()
