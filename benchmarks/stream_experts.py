"""Experts of mixtures that cross the bus by use, against all of them and against a model that lies on the GPU.

    python benchmarks/stream_experts.py [--tiny --device cpu] [--layers 8] [--rounds 2] [--seconds 100]

Model: layers of Qwen3-30B-A3B's shape (hidden 2048, 128 experts of 768, eight a token), fewer than its 48 (`layers`
says how many), random, frozen, LoRA of rank 16 on attention, checkpointing, AdamW, 4,096 tokens a step. Texts are
vectors: one subject and noise beside it, so that the router chooses few, half, most or all experts of a layer; every
step has other noise. `chosen_share` is what was chosen.

    resident    everything on the GPU
    all         experts cross with their blocks, through three slots
    by use      experts="by use"
    cached      the same with expert_cache_bytes
    auto        experts="auto" with that cache

Arms run in turns, some steps each after others that fill caches. `equal` says how far the first loss and the gradients
of the adapters are from the resident model's, for the resident model itself too: with torch's deterministic algorithms
and without; `same_bits` says which parts of a layer repeat their bits, and whether a compact stack of the chosen
experts alone would.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums of the same order every time

import harness
import torch
from torch import Tensor, nn

from bitplan.streaming.block_stream import BlockStream, stream_blocks
from bitplan.streaming.options import StreamOptions
from bitplan.streaming.transfer.devices import CudaDevice, SimulatedDevice, StreamDevice

STARTED = time.perf_counter()
NOISE = {"one subject": 0.15, "half": 0.45, "most": 0.7, "all experts": 3.0}  # beside a subject of size 1
MANY_ROUNDS = ("one subject", "all experts")
WARM_UP, TIMED = 3, 4
BLOCKS = "base_model.model.layers.*"
RANK = 16
ARMS = ("resident", "all", "by use", "cached", "auto")


def make_model(layers: int, device: torch.device, *, tiny: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel, Qwen3MoeConfig

    sizes = (64, 32, 16, 2, 32) if tiny else (2048, 768, 128, 4, 128)
    hidden, width, experts, kv_heads, head = sizes
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2 if tiny else 32,
        num_key_value_heads=kv_heads,
        head_dim=head,
        num_experts=experts,
        num_experts_per_tok=2 if tiny else 8,
        norm_topk_prob=True,
    )
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModel.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():  # whatever the release initializes, or leaves empty
            for name, one in model.named_parameters():
                one.fill_(1.0) if name.endswith("norm.weight") else one.normal_(std=0.02)
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
        with torch.no_grad():
            for name, one in model.named_parameters():
                if "lora_B" in name:
                    one.normal_(std=0.02)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    trained: nn.Module = model.train()
    return trained


def texts(name: str, hidden: int, tokens: int, device: torch.device) -> Iterator[Tensor]:
    """A batch a step, in sequences of 1,024 tokens."""
    generator = torch.Generator(device).manual_seed(1)
    subject = torch.randn(hidden, generator=generator, device=device)
    shape = max(1, tokens // 1024), min(tokens, 1024), hidden
    while True:
        noise = torch.randn(shape, generator=generator, device=device)
        yield (subject + NOISE[name] * noise).bfloat16().requires_grad_()


class Arm:
    """One way to run the model, with a training step."""

    def __init__(self, name: str, model: nn.Module, stream: BlockStream | None, ready: Callable[[], None]) -> None:
        self.name, self.model, self.stream, self.ready, self.step = name, model, stream, ready, 0
        self.adapters = [one for one in model.parameters() if one.requires_grad]

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(inputs_embeds=x, use_cache=False).last_hidden_state.float().square().mean()
        return loss

    def run(self, x: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        if self.stream is not None:
            self.stream.begin_step(self.step)
        loss = self.loss(x)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if self.stream is not None:
            self.stream.end_step()
        self.step += 1
        return loss.detach()


def time_arm(arm: Arm, text: Iterator[Tensor], device: StreamDevice) -> dict[str, Any]:
    is_cuda = device.torch_device.type == "cuda"
    optimizer = torch.optim.AdamW(arm.adapters, lr=1e-6, fused=is_cuda)
    arm.ready()
    for _ in range(WARM_UP):
        arm.run(next(text), optimizer)
    batches = [next(text) for _ in range(TIMED)]
    standing = 0
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        standing = torch.cuda.memory_allocated()
    samples = []
    started = time.perf_counter()
    for x in batches:
        arm.run(x, optimizer)
        if not is_cuda:
            samples.append((time.perf_counter() - started) * 1e3)
            started = time.perf_counter()
    if is_cuda:  # the steps follow each other without a wait, as in training
        torch.cuda.synchronize()
        samples = [(time.perf_counter() - started) * 1e3 / TIMED]
    row: dict[str, Any] = {"samples_ms": samples}
    if is_cuda:
        row["step_bytes"] = torch.cuda.max_memory_allocated() - standing
    if arm.stream is None:
        return row | {"weight_bytes": sum(one.nbytes for one in arm.model.parameters())}
    arm.stream.synchronize()
    stats = arm.stream.stats
    last, experts = stats.last, stats.experts or {}
    assert last is not None
    return row | {
        "weight_bytes": int(stats.vram_bytes + experts.get("vram_bytes", 0)),
        "bytes_h2d": last.bytes_h2d,
        "copy_ms": last.copy_ms,
        "stall_ms": last.stall_ms,
        **{key: experts[key] for key in ("chosen_share", "cached", "sent_whole") if key in experts},
    }


def gradients_of(arm: Arm, x: Tensor) -> tuple[float, list[Tensor]]:
    arm.ready()
    loss = arm.run(x)
    result = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in arm.adapters]
    for one in arm.adapters:
        one.grad = None
    return loss.item(), result


def compare(arms: list[Arm], x: Tensor, *, deterministic: bool) -> list[dict[str, Any]]:
    """Each arm's loss and gradients beside those of the resident model, which is run twice."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        loss, wanted = gradients_of(arms[0], x)
        rows = []
        for arm in arms:
            other, got = gradients_of(arm, x)
            largest = max(one.abs().max().item() for one in wanted)
            apart = max((one - two).abs().max().item() for one, two in zip(got, wanted, strict=True))
            same = sum(torch.equal(one, two) for one, two in zip(got, wanted, strict=True))
            rows.append(
                {
                    "arm": arm.name,
                    "deterministic": deterministic,
                    "loss_equal": other == loss,
                    "loss_apart": abs(other - loss),
                    "gradients_equal": same == len(wanted),
                    "gradients_apart_of_largest": apart / largest,
                }
            )
            say(f"equal, deterministic={deterministic}: {rows[-1]}")
        return rows
    finally:
        torch.use_deterministic_algorithms(False)


def repeats_bits(run: Callable[[], Tensor], other: Callable[[], Tensor] | None = None) -> bool:
    return torch.equal(run(), (other or run)())


def causes(device: torch.device, *, tiny: bool) -> dict[str, bool]:
    """Which parts of a layer give the same bits: products of all experts' stack and of a compact one, and attention."""
    experts, hidden, width, rows = (16, 64, 32, 8) if tiny else (128, 2048, 1536, 160)
    generator = torch.Generator(device).manual_seed(2)
    weight = torch.randn(experts, width, hidden, generator=generator, device=device).bfloat16()
    chosen = torch.arange(1, experts, 5, device=device)
    x = torch.randn(len(chosen) * rows, hidden, generator=generator, device=device).bfloat16()
    sizes = torch.zeros(experts, dtype=torch.int32, device=device)
    sizes[chosen] = rows
    compact, few = weight[chosen], sizes[chosen]

    def product(stack: Tensor, counts: Tensor) -> Tensor:
        return nn.functional.grouped_mm(x, stack.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))

    def product_backward(stack: Tensor, counts: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        offsets = counts.cumsum(0, dtype=torch.int32)
        nn.functional.grouped_mm(leaf, stack.transpose(-2, -1), offs=offsets).float().square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    heads = torch.randn(3, 1, 4, 1024, 128, generator=generator, device=device).bfloat16()

    def attention_backward() -> Tensor:
        leaf = heads.clone().requires_grad_()
        query, key, value = leaf.unbind()
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out.float().square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    return {
        "grouped product repeats": repeats_bits(lambda: product(weight, sizes)),
        "grouped product, compact as whole": repeats_bits(
            lambda: product(weight, sizes), lambda: product(compact, few)
        ),
        "its backward repeats": repeats_bits(lambda: product_backward(weight, sizes)),
        "its backward, compact as whole": repeats_bits(
            lambda: product_backward(weight, sizes), lambda: product_backward(compact, few)
        ),
        "attention's backward repeats": all(repeats_bits(attention_backward) for _ in range(3)),
    }


def open_arms(model: nn.Module, device: StreamDevice, cache_bytes: int, stack: ExitStack) -> list[Arm]:
    """The resident model, and streams of two copies of it: with all experts, and by use in three ways."""
    whole = copy.deepcopy(model).cpu()
    say("the copy for all experts is made")
    every = stack.enter_context(stream_blocks(whole, BLOCKS, device=device, slots=3))
    say("all experts are streamed")
    routed = copy.deepcopy(model).cpu()
    options = StreamOptions(experts="by use")
    by_use = stack.enter_context(stream_blocks(routed, BLOCKS, device=device, slots=3, options=options))
    say("experts are streamed by use")
    assert by_use.experts is not None
    ways = by_use.experts
    return [
        Arm("resident", model, None, lambda: None),
        Arm("all", whole, every, lambda: None),
        Arm("by use", routed, by_use, lambda: ways.set("by use", 0)),
        Arm("cached", routed, by_use, lambda: ways.set("by use", cache_bytes)),
        Arm("auto", routed, by_use, lambda: ways.set("auto", cache_bytes)),
    ]


def measure(arguments: argparse.Namespace, device: StreamDevice, document: dict[str, Any]) -> None:
    """Fill in the document part by part, so that what breaks off later loses nothing."""
    model = make_model(arguments.layers, device.torch_device, tiny=arguments.tiny)
    hidden: int = cast(Any, model).config.hidden_size
    parameters = sum(one.numel() for one in model.parameters())
    document["model"] |= {"parameters": parameters}
    try:
        document["same_bits"] = causes(device.torch_device, tiny=arguments.tiny)
    except Exception as error:  # the other parts are worth more
        document["same_bits"] = {"failed": f"{type(error).__name__}: {error}"}
    say(f"same bits: {document['same_bits']}")
    say(f"the model is made, {parameters / 1e9:.2f} billion weights")
    cache_bytes = 20_000 if arguments.tiny else int(arguments.cache_gb * 1e9)
    with ExitStack() as stack:
        arms = open_arms(model, device, cache_bytes, stack)
        for name in ("one subject", "all experts"):
            x = next(texts(name, hidden, arguments.tokens, device.torch_device))
            for deterministic in (False, True):
                rows = compare(arms, x, deterministic=deterministic)
                document["equal"] += [{"text": name, **row} for row in rows]
        for turn in range(arguments.rounds):
            for name in NOISE if turn == 0 else MANY_ROUNDS:
                text = texts(name, hidden, arguments.tokens, device.torch_device)
                for arm in arms:
                    if time.perf_counter() - STARTED > arguments.seconds:
                        document["broke_off"] = f"round {turn}, {name}: {arguments.seconds:g} seconds were over"
                        return
                    row = time_arm(arm, text, device)
                    note(document["rows"], {"text": name, "arm": arm.name}, row)


def note(rows: list[dict[str, Any]], key: dict[str, Any], new: dict[str, Any]) -> None:
    """Join the samples of one arm and text; other figures are of the last round."""
    row = next((one for one in rows if all(one[name] == value for name, value in key.items())), None)
    if row is None:
        rows.append(row := {**key, "samples_ms": []})
    samples = row["samples_ms"] + new["samples_ms"]
    row |= new | {"samples_ms": samples} | harness.summary(samples)
    say(f"{key['text']}, {key['arm']}: {statistics.median(samples):.1f} ms  {new}")


def say(text: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


def table_of(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'text':<12} {'arm':<9} {'ms':>8} {'chosen':>7} {'GB sent':>8} {'GB of weights':>14}"]
    for row in rows:
        share = f"{row['chosen_share']:.0%}" if "chosen_share" in row else ""
        sent = f"{row['bytes_h2d'] / 1e9:.2f}" if "bytes_h2d" in row else ""
        figures = f"{row['median_ms']:8.1f} {share:>7} {sent:>8} {row['weight_bytes'] / 1e9:14.2f}"
        lines.append(f"{row['text']:<12} {row['arm']:<9} {figures}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of toy size, to see that everything runs")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache-gb", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=600.0, help="no arm begins later than this")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu goes with --tiny: the simulated device measures nothing")
    device: StreamDevice = CudaDevice("cuda") if arguments.device == "cuda" else SimulatedDevice()
    document: dict[str, Any] = {
        "benchmark": "streaming, experts by use",
        "machine": harness.machine(arguments.device),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "model": {
            "shape": "toy" if arguments.tiny else "Qwen3-30B-A3B's layers",
            "layers": arguments.layers,
            "layers_of_the_whole_model": 48,
            "rank": RANK,
            "tokens": arguments.tokens,
            "dtype": "bfloat16",
        },
        "cache_gb": arguments.cache_gb,
        "simulated": arguments.device == "cpu",
        "equal": [],
        "rows": [],
    }
    try:
        measure(arguments, device, document)
    finally:
        gpu = document["machine"].get("gpu", "cpu").lower().replace(" ", "_")
        path = harness.save(f"stream_experts_{gpu}", document, arguments.output)
        print(table_of(document["rows"]))
        print(path.name)


if __name__ == "__main__":
    main()
