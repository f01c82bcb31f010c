"""How engines keep keys and values, and what they take beside weights: what `fit` must know of the one it is for.

bitplan's own workspace is measured (memory_probe.py). That of llama.cpp and vLLM is estimated, from the sizes of a
model's config, and not measured here:

    llama.cpp   4 bytes x 512 tokens of a piece x (the larger of the vocabulary and 3 x the MLP's width, 2 x the
                model's width, 1.5 x the context for masks), and 300 MB for the process and the GPU's libraries
    vLLM        2 bytes x 2048 tokens of a piece x (3 x the MLP's width, 6 x the model's width), 12 bytes x texts x
                vocabulary to choose tokens, and 1.5 GB for the GPU's libraries, kernels and graphs

Both keep attention itself in no more than that: llama.cpp with `-fa on` alone, which the commands below ask for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from bitplan.formats import get_format
from bitplan.formats.elements import ITEM_BYTES
from bitplan.plan.kv_formats import KEYS, VALUES, KVFormats, kv_nbytes, layers_in, part_name
from bitplan.searching.goal import SearchError


class Held(Protocol):
    """The texts that an engine holds at once: `batch` of `context` tokens each, in a GPU's memory or not."""

    @property
    def context(self) -> int: ...

    @property
    def batch(self) -> int: ...

    @property
    def on_gpu(self) -> bool: ...


@dataclass(frozen=True)
class EngineMemory:
    """How an engine stores keys and values, and what memory it needs besides.

    formats   that it keeps them in, and what its command line calls them
    shared    parts that have one format together: of every layer its own ("none"), keys of all layers and values of all
              ("keys and values"), both ("all")
    kept      the type of keys and values that are left as they are; "" is the model's
    scaled    whether rows in a format have scales beside them, as ours have
    step      tokens are kept in whole steps
    more      tokens that a layer of a sliding window keeps beyond it
    overhead  bytes beside weights, keys and values, by the config's sizes; None: measured
    kernels   the engine of `export --engine` whose kernels it has
    unproven  what of its numbers was not measured, in words
    """

    name: str
    formats: Mapping[str, str]
    shared: str = "none"
    kept: str = ""
    scaled: bool = True
    step: int = 1
    more: int = 0
    overhead: Callable[[Any, Held], int] | None = field(default=None, compare=False)
    kernels: str | None = None
    unproven: str = ""

    def group_of(self, layer: int, part: str) -> str:
        """The name of the group of keys or values that a part belongs to; a group has one format."""
        named = {"keys and values": f"layers.*.{part}", "all": f"layers.*.{BOTH}"}
        return named.get(self.shared, part_name(layer, part))

    def tokens(self, window: int | None, request: Held) -> int:
        """How many tokens of keys or values a layer keeps for all texts; `window`: of a sliding window."""
        most = request.context if window is None else min(request.context, window + self.more)
        return -(-most // self.step) * self.step * request.batch

    def row_bytes(self, fmt: str, heads: int, width: int, item_bytes: int = 0) -> int:
        """Bytes of one token in a layer's keys or values; `item_bytes` for a number as it is."""
        if get_format(fmt).is_cast:
            return heads * width * (item_bytes or ITEM_BYTES[fmt])
        return kv_nbytes(fmt, heads, width, 0) if self.scaled else heads * width

    def command(self, kv: KVFormats, request: Held, kv_bytes: int, output: str) -> str | None:
        """The engine's command line for what `export` wrote; None for bitplan, whose folders say all."""
        keys, values = (self._flag(part) for part in (kv.keys, kv.values))
        if self.name == "llama.cpp":
            words = ["llama-server", "-m", output, "-c", request.context * request.batch, "-np", request.batch]
            words += ["-ctk", keys, "-ctv", values, "-fa", "on"]
        elif self.name == "vllm":
            words = ["vllm", "serve", output, "--max-model-len", request.context, "--max-num-seqs", request.batch]
            words += ["--max-num-batched-tokens", VLLM_PIECE, "--kv-cache-dtype", keys]
            words += ["--kv-cache-memory-bytes", kv_bytes]
        else:
            return None
        return shlex.join(map(str, words))

    def _flag(self, fmt: Any) -> str:
        return self.formats.get(fmt, "f16" if self.kept else "auto")


BOTH = "keys and values"
_GROUP = re.compile(rf"layers\.([0-9]+|\*)\.({KEYS}|{VALUES}|{BOTH})")
LLAMA_PIECE, VLLM_PIECE = 512, 2048  # tokens of a prompt that are read at once


def _sizes(config: Any) -> tuple[int, int, int]:
    """Vocabulary, the model's width and that of its MLP; of experts those that one token goes through."""
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    chosen = getattr(inner, "num_experts_per_tok", None) or 1
    experts = chosen * (getattr(inner, "moe_intermediate_size", None) or 0)
    width = int(inner.hidden_size)
    return int(inner.vocab_size), width, max(int(getattr(inner, "intermediate_size", None) or 4 * width), experts)


def _of_llama_cpp(config: Any, request: Held) -> int:
    vocabulary, width, mlp = _sizes(config)
    return int(4 * LLAMA_PIECE * (max(vocabulary, 3 * mlp) + 2 * width + 1.5 * request.context)) + 300_000_000


def _of_vllm(config: Any, request: Held) -> int:
    vocabulary, width, mlp = _sizes(config)
    return 2 * VLLM_PIECE * (3 * mlp + 6 * width) + 12 * request.batch * vocabulary + 1_500_000_000


ENGINES = {
    engine.name: engine
    for engine in (
        EngineMemory("bitplan", {"int4_g32": "int4", "fp8_e4m3_row": "fp8", "int8_row": "int8"}),
        EngineMemory(
            "llama.cpp",
            {"q4_0_gguf": "q4_0", "q8_0_gguf": "q8_0"},
            shared="keys and values",
            kept="float16",
            step=256,
            more=LLAMA_PIECE,
            overhead=_of_llama_cpp,
            unproven="llama.cpp itself was not run: KL is of its formats in our own products, workspace by a formula",
        ),
        EngineMemory(
            "vllm",
            {"fp8_e4m3_row": "fp8"},
            shared="all",
            scaled=False,
            step=16,
            more=VLLM_PIECE,
            overhead=_of_vllm,
            kernels="vllm-cuda",
            unproven="vLLM itself was not run: KL is of its formats in our own products, fp8 with a scale for each row "
            "where vLLM has one for a layer, its workspace by a formula",
        ),
    )
}


def engine_of(name: str) -> EngineMemory:
    if name not in ENGINES:
        raise SearchError(
            f"a fit is for one of {', '.join(ENGINES)}, got {name!r:.40}: how others keep keys and values is not known",
            settings={"target": "llama.cpp"},
        )
    return ENGINES[name]


def kv_of_choice(choice: Mapping[str, str]) -> KVFormats:
    """The formats of keys and values that a choice has; groups of weights are not looked at."""
    parts: dict[str, dict[int, str]] = {KEYS: {}, VALUES: {}}
    uniform_parts: dict[str, str] = {}
    for name, fmt in choice.items():
        match = _GROUP.fullmatch(name)
        if match is None or get_format(fmt).is_cast:
            continue
        for part in (KEYS, VALUES) if match[2] == BOTH else (match[2],):
            if match[1] == "*":
                uniform_parts[part] = fmt
            else:
                parts[part][int(match[1])] = fmt
    layers = 1 + max((layer for one in parts.values() for layer in one), default=-1)
    keys, values = (
        uniform_parts.get(part, layers_in([one.get(layer) for layer in range(layers)]) if layers else None)
        for part, one in parts.items()
    )
    return KVFormats(keys, values)
