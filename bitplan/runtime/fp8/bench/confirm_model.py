"""A small model from a config.json, to confirm a policy before there is a training script: as few blocks of the real
model as contain every make of block, with random weights.

    small = plan_small_model("config.json", tp=2)     # read and checked; no memory is taken yet
    model = small.build(torch.device("cuda"))         # each call makes a fresh one, always with the same weights

transformers builds it, from the keys of the file alone: no weights are read, nothing is downloaded, no code of a model
is run. The time of a block does not depend on the values of its weights, with one exception: random routers send about
as many tokens to every expert; a trained model may not.

    blocks      up to the first block of the last make: 1 where all are alike, 4 where three dense blocks come first
    vocabulary  cut down: embeddings and the output layer are in no block, and no layer of a policy
    tp          the heads and the MLP of one GPU, as `bench-layers` times them in one process; no communication. Models
                with experts are refused then: a config.json cannot describe a share of them
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitplan.documents import load_document, short
from bitplan.measure.speed.paired_timing import is_out_of_memory
from bitplan.optional import require
from bitplan.plan.fp8.layers import Attention, ModelPart, Parallel, local_layers
from bitplan.plan.fp8.model_parts import ConfigObject, model_parts
from bitplan.plan.fp8.vocabulary import ModelConfigError
from bitplan.runtime.fp8.bench.confirm import EXAMPLE_LENGTH, Example, example_shape
from bitplan.runtime.fp8.find_linears import find_sites

IN_PYTHON = "in Python, apply_fp8(model, policy, tokens=..., confirm=True, example=...) confirms any model"
SMALL_VOCABULARY = 1024
_SEED = 0
# These keys describe files, not blocks: how weights are stored, what code reads them. transformers chooses attention.
_DROPPED = {"quantization_config", "auto_map", "architectures", "dtype", "torch_dtype", "transformers_version"} | {
    "attn_implementation",
    "_attn_implementation",
    "_name_or_path",
}
_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True)
class SmallModel:
    """How to build a small model: the configuration for transformers, with `blocks` of `of_blocks` blocks, and why."""

    where: str
    config: Mapping[str, Any]
    blocks: int
    of_blocks: int
    reason: str

    def build(self, device: torch.device) -> nn.Module:
        """A fresh model in training mode: bfloat16 on a GPU, float32 on a CPU, where FP8 is emulated."""
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_SEED)
            return _build(self.where, self.config, device, dtype).train()

    def example_shape(self, tokens: int) -> tuple[int, int]:
        """Number and length of sequences for a token count."""
        return example_shape(tokens, self.config["max_position_embeddings"])

    def example(self, tokens: int, device: torch.device) -> Example:
        """Random tokens, the same for the same count."""
        made = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(0, self.config["vocab_size"], self.example_shape(tokens), generator=made)
        return {"input_ids": ids.to(device), "use_cache": False}


def plan_small_model(path: str | Path, *, tp: int = 1) -> SmallModel:
    """Read and check a config.json or a folder with one; a model without memory shows how many blocks to build."""
    source = Path(path)
    if source.suffix in (".yaml", ".yml"):
        raise ModelConfigError(f"{source}: a YAML cannot be built by transformers; give a config.json; {IN_PYTHON}")
    source = source if source.suffix == ".json" else source / "config.json"
    where = str(source)
    document = load_document(source, ModelConfigError)
    if isinstance(document, Mapping) and "vision_config" in document:
        raise ModelConfigError(
            f"{where}: a vision-language model, whose blocks need images to run on; a text model's config.json was "
            f"expected; {IN_PYTHON}"
        )
    part = _read_part(document, where)
    require("transformers", purpose=f"{where}: building it", extra="models", least=5)
    config = {key: value for key, value in _shard(document, part, tp).items() if key not in _DROPPED}
    sizes = ConfigObject(document, "", where)  # a file may lack these two: no layer's shape needs them
    config |= _NO_TOKENS | {
        "vocab_size": min(sizes.size("vocab_size", SMALL_VOCABULARY), SMALL_VOCABULARY),
        "max_position_embeddings": sizes.size("max_position_embeddings", EXAMPLE_LENGTH),
    }
    whole = _build(where, config, torch.device("meta"), torch.bfloat16)
    blocks, reason = count_blocks(whole, where)
    of_blocks = part.dense_blocks + part.moe_blocks
    return SmallModel(where, _cut(config, blocks), blocks, of_blocks, reason)


def count_blocks(model: nn.Module, where: str = "the model") -> tuple[int, str]:
    """How many first blocks contain every kind of block, and why; a kind is a set of layers and their shapes."""
    kinds: dict[int, list[tuple[object, ...]]] = {}
    for site in find_sites(model).sites:
        match = re.search(r"(?:^|\.)([0-9]+)\.(.*)", site.path)
        if match is not None:
            kinds.setdefault(int(match[1]), []).append((match[2], site.kind, site.shape))
    if not kinds:
        raise ModelConfigError(f"{where}: transformers' {type(model).__name__} has no layers that a policy knows")
    first: dict[tuple[tuple[object, ...], ...], int] = {}
    for block in sorted(kinds):
        first.setdefault(tuple(kinds[block]), block)
    if len(first) == 1:
        return 1, "all blocks are alike"
    last = max(first.values())
    return last + 1, f"{len(first)} kinds of block, the last of them first in block {last}"


def _read_part(document: Any, where: str) -> ModelPart:
    """Every size must be in the file: transformers would fill in its own default for a missing one."""
    try:
        (part,) = model_parts(document, where=where)
    except ModelConfigError as fault:
        # Other commands accept a YAML; this model has to be built, which needs a config.json.
        message = str(fault).replace("another architecture can be described by its YAML keys", IN_PYTHON)
        raise ModelConfigError(message) from None
    return part


def _shard(document: Mapping[str, Any], part: ModelPart, tp: int) -> dict[str, Any]:
    """The configuration of what one GPU of `tp` holds."""
    if tp == 1:
        return dict(document)
    attention = part.attention
    if part.experts is not None or not isinstance(attention, Attention):
        raise ModelConfigError(
            f"{part.where}: --tp {tp} takes dense models with q, k and v; the share of one GPU in experts or latent "
            f"attention cannot be said in a config.json; confirm with --tp 1 and a policy of tp 1; {IN_PYTHON}"
        )
    local_layers([part], Parallel(tp=tp))  # raises, naming a key that cannot be divided
    return dict(document) | {
        "num_attention_heads": attention.heads // tp,
        "num_key_value_heads": attention.kv_heads // tp,
        "head_dim": attention.head_dim,
        "intermediate_size": part.ffn // tp,
    }


def _cut(config: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """Only the first blocks; lists with an entry for each block (layer_types, mlp_layer_types) are cut with them."""
    lists = {key: value[:blocks] for key, value in config.items() if key.endswith("layer_types") and value}
    return dict(config) | lists | {"num_hidden_layers": blocks}


def _build(where: str, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """transformers' model; any error of its checks becomes one line that names the file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device(device):
            built: nn.Module = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), dtype=dtype, trust_remote_code=False
            )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = short(": ".join([type(error).__name__, *lines[:2]]), 200)
        raise ModelConfigError(
            f"{where}: transformers cannot build a causal language model of it: {message}; "
            "compare the file with the config.json that the model came with"
        ) from error
    return built
