"""Tokens a second over a long context in plain transformers, eager: keys and values as they are, and in formats.

    python benchmarks/kv_cache.py [--cases 32768x1,131072x1,32768x16,131072x16] [--formats int8,fp8,int4,int8:int4]

A llama of the 8B's shape with fewer layers (the row says how many) and random BF16 weights. The cache is filled with
random keys and values of the context, then tokens are made one by one, in turns: transformers' dynamic cache (BF16),
and bitplan's in each format, attended to as codes (`round_kv`), or decoded layer by layer ("decoded", int8 alone).
Times are the host's clock around four tokens, to the end of the GPU's work; ratios are BF16's time over an arm's,
medians of turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import harness
import torch
import transformers
from transformers.cache_utils import DynamicCache

from bitplan.packed.kv_cache import KVCache, kv_bytes
from bitplan.packed.rounded_kv import round_kv

TOKENS = 4
PIECE = 8192
LONGEST_DECODED = 2**15  # tokens of all sequences: beyond them a decoded cache takes seconds


def build(layers: int, device: str, shape: dict[str, int]) -> Any:
    config = transformers.LlamaConfig(
        **shape, num_hidden_layers=layers, vocab_size=32000, max_position_embeddings=2**18, rope_theta=500000.0
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def fill(cache: Any, model: Any, context: int, batch: int) -> Any:
    config = model.config
    generator = torch.Generator(model.device).manual_seed(0)
    for layer in range(config.num_hidden_layers):
        for first in range(0, context, PIECE):
            shape = (batch, config.num_key_value_heads, min(PIECE, context - first), config.head_dim)
            keys, values = (
                torch.randn(shape, generator=generator, device=model.device, dtype=torch.bfloat16) for _ in "kv"
            )
            cache.update(keys, values, layer)
    return cache


@torch.inference_mode()
def time_case(context: int, batch: int, layers: int, options: argparse.Namespace) -> dict[str, Any]:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if options.device == "cpu":
        shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = build(layers, options.device, shape)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
    caches: dict[str, Any] = {"bf16": fill(DynamicCache(config=model.config), model, context, batch)}
    if context * batch <= LONGEST_DECODED:
        caches["int8 decoded"] = fill(KVCache(model.config, "int8"), model, context, batch)
    for name in options.formats.split(","):
        caches[name] = fill(KVCache(model.config, name, joined=True), model, context, batch)
    times: dict[str, list[float]] = {name: [] for name in caches}
    logits = {}
    for turn in range(-2, options.turns):
        for name, cache in caches.items() if turn % 2 else [*caches.items()][::-1]:
            round_kv(model, None if name in ("bf16", "int8 decoded") else name)
            synchronize(options.device)
            began = time.perf_counter()
            for _ in range(TOKENS):
                last = model(ids, past_key_values=cache, use_cache=True).logits
            synchronize(options.device)
            if turn >= 0:
                times[name].append((time.perf_counter() - began) / TOKENS)
            elif turn == -2:
                logits[name] = last.float()
        round_kv(model, None)
    row: dict[str, Any] = {"context": context, "batch": batch, "layers": layers, "arms": {}}
    if "int8 decoded" in logits:
        apart = (logits["int8"] - logits["int8 decoded"]).norm() / logits["int8 decoded"].norm()
        row["int8_against_decoded"] = round(float(apart), 5)
    for name, cache in caches.items():
        ratios = sorted(plain / own for plain, own in zip(times["bf16"], times[name], strict=True))
        row["arms"][name] = {
            "ms_a_token": round(1000 * statistics.median(times[name]), 3),
            "speed_over_bf16": round(statistics.median(ratios), 3),
            "lowest": round(ratios[0], 3),
            "highest": round(ratios[-1], 3),
            "bytes_over_bf16": round(kv_bytes(cache) / kv_bytes(caches["bf16"]), 4),
        }
    return row


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="32768x1,131072x1,32768x16,131072x16", help="CONTEXTxBATCH,...")
    parser.add_argument("--formats", default="int8,fp8,int4,int8:int4")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    machine = harness.machine(options.device)
    rows = []
    for case in options.cases.split(","):
        context, batch = (int(number) for number in case.split("x"))
        rows.append(time_case(context, batch, 4 if context * batch > 2**20 else 8, options))
        row = rows[-1]
        print(f"{context} x {batch}, {row['layers']} layers, {row.get('int8_against_decoded')} from decoded")
        for name, arm in row["arms"].items():
            print(f"  {name:12} {arm}", flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    document = {"benchmark": "kv_cache", "commit": harness.commit(), "machine": machine, "versions": harness.versions()}
    print(
        harness.save(
            "kv_cache_" + machine.get("gpu", "cpu").lower().replace(" ", "_"), document | {"rows": rows}, options.output
        )
    )


if __name__ == "__main__":
    main()
