"""Confirm a policy on a small model, one token count after the other: what `bitplan fp8 confirm` does.

For each count the policy is applied to a fresh model without a trial, which gives the plan, and to another model with
`confirm`, which times whole blocks. A plan is turned down where it has FP8 in a block and the block stays BF16; a plan
of BF16 cannot be turned down. If memory runs out outside the trial, that count ends and the others go on.

The small model is made from a config.json, so that there need be no training script yet: as few blocks of the real
model as contain every make of block, with random weights.

    small = plan_small_model("config.json", tp=2)     # read and checked; no memory is taken yet
    model = small.build(torch.device("cuda"))         # each call makes a fresh one, always with the same weights

transformers builds it, from the keys of the file alone: no weights are read, nothing is downloaded, no code of a model
is run. The time of a block does not depend on the values of its weights, with one exception: random routers send about
as many tokens to every expert; a trained model may not.

    blocks      up to the first block of the last make: 1 where all are alike, 4 where three dense blocks come first
    vocabulary  cut down: embeddings and the output layer are in no block, and no layer of a policy
    tp          the heads and the MLP of one GPU, as `fp8 bench` times them in one process; no communication. Models
                with experts are refused then: a config.json cannot describe a share of them
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitplan.base.documents import load_document, short
from bitplan.base.optional import require
from bitplan.base.paired_timing import is_out_of_memory
from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.bench.confirm import EXAMPLE_LENGTH, Example, example_shape
from bitplan.fp8.decide import AppliedFp8, Confirmed, Fp8Options, LayerRow
from bitplan.fp8.find_linears import block_of, find_sites
from bitplan.fp8.layer_settings import usable_device
from bitplan.fp8.policy.layers import Attention, ConfigObject, ModelPart, Parallel, local_layers, model_parts
from bitplan.fp8.policy.report import fingerprint_of
from bitplan.fp8.policy.rules import Policy
from bitplan.fp8.policy.vocabulary import UNMEASURED, Fp8Error, ModelConfigError, is_count

MOST_TOKENS = 2**24  # in one step of one GPU; a larger number is a typing error


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
        """Random token ids for so many tokens; equal counts give equal ids."""
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(0, self.config["vocab_size"], self.example_shape(tokens), generator=generator)
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
    # Every size must be in the file: transformers would fill in its own default for a missing one.
    (part,) = model_parts(document, where=where, advice=IN_PYTHON)
    require("transformers", purpose=f"{where}: building it", extra="models", least=5)
    config = {key: value for key, value in _shard(document, part, tp).items() if key not in _DROPPED}
    sizes = ConfigObject(document, "", where)  # a file may lack these two: no layer's shape needs them
    config |= _NO_TOKENS | {
        "vocab_size": min(sizes.size("vocab_size", SMALL_VOCABULARY), SMALL_VOCABULARY),
        "max_position_embeddings": sizes.size("max_position_embeddings", EXAMPLE_LENGTH),
    }
    model = _build(where, config, torch.device("meta"), torch.bfloat16)
    blocks, reason = count_blocks(model, where)
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


def _shard(document: Mapping[str, Any], part: ModelPart, tp: int) -> dict[str, Any]:
    """The config of the part of the model that one of `tp` GPUs holds."""
    if tp == 1:
        return dict(document)
    attention = part.attention
    if part.experts is not None or not isinstance(attention, Attention):
        raise ModelConfigError(
            f"{part.where}: tp {tp} takes dense models with q, k and v; the share of one GPU in experts or latent "
            f"attention cannot be said in a config.json; {IN_PYTHON}; confirm with a policy of tp 1",
            settings={"tp": 1},
        )
    local_layers([part], Parallel(tp=tp))  # raises, naming a key that cannot be divided
    return dict(document) | {
        "num_attention_heads": attention.heads // tp,
        "num_key_value_heads": attention.kv_heads // tp,
        "head_dim": attention.head_dim,
        "intermediate_size": part.ffn // tp,
    }


def _cut(config: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """Keep only the first blocks, and cut lists with an entry for each block (layer_types, mlp_layer_types)."""
    lists = {key: value[:blocks] for key, value in config.items() if key.endswith("layer_types") and value}
    return dict(config) | lists | {"num_hidden_layers": blocks}


def _build(where: str, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build transformers' model; any error of its checks becomes one line that names the file."""
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


# ---- confirming -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlockResult(Confirmed):
    """One kind of block at one count: of its `layers`, the plan put `planned` in FP8, and `fp8_layers` stay so."""

    planned: int
    fp8_layers: int
    layers: int

    @property
    def turned_down(self) -> bool:
        return self.planned > 0 and self.taken == "bf16"


@dataclass(frozen=True)
class CountResult:
    """One token count, run as `sequences` of `length`. `failure` where memory ran out and nothing was confirmed."""

    tokens: int
    sequences: int
    length: int
    blocks: tuple[BlockResult, ...] = ()
    planned: AppliedFp8 | None = None
    applied: AppliedFp8 | None = None
    failure: str | None = None

    @property
    def turned_down(self) -> bool:
        return self.failure is not None or any(block.turned_down for block in self.blocks)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Why the policy knows no layer at this count; empty if it knows at least one."""
        rows = self.planned.rows if self.planned else ()
        if any(row.precision != "bf16" or row.answer != UNMEASURED for row in rows):
            return ()
        return tuple(dict.fromkeys(row.reason for row in rows))

    def to_dict(self) -> dict[str, Any]:
        """Make the JSON document: `planned` has each layer with the policy's reason, `layers` the outcome."""
        rows = {
            "planned": [asdict(row) for row in self.planned.rows] if self.planned else [],
            "layers": [asdict(row) for row in self.applied.rows] if self.applied else [],
            "notes": list(self.applied.notes) if self.applied else [],
        }
        run_as = {"tokens": self.tokens, "sequences": self.sequences, "length": self.length}
        outcome = {"turned_down": self.turned_down, "unknown": list(self.unknown), "failure": self.failure}
        return run_as | outcome | {"blocks": [asdict(block) for block in self.blocks]} | rows


def require_device(name: str, policy: Policy, recipe: str | None = None) -> torch.device:
    """The device to confirm on, before anything is built: one with FP8, and the GPU that the policy is of."""
    index = torch.cuda.current_device() if name == "cuda" and torch.cuda.is_available() else 0
    device = usable_device(name, "confirm", () if recipe is None else (recipe,), index)
    if device.type == "cuda":
        policy.require_same_gpu(fingerprint_of(device))
    return device


def confirm_policy(
    policy: Policy,
    model: SmallModel,
    counts: Sequence[int],
    device: torch.device,
    options: Fp8Options | None = None,
    *,
    recipe: str | None = None,
    on_count: Callable[[int], None] = lambda _: None,
) -> list[CountResult]:
    """Confirm a policy at every token count, and return a result for each."""
    wrong = [count for count in counts if not is_count(count) or count > MOST_TOKENS]
    if wrong or not counts:
        got = repr(wrong[0]) if wrong else "none"
        raise Fp8Error(
            f"token counts must be integers from 1 to {MOST_TOKENS} (sequence length x micro batch size), got {got}"
        )
    results = []
    for count in counts:
        results.append(_confirm_count(policy, model, count, device, options or Fp8Options(), recipe))
        on_count(count)
    return results


def _confirm_count(
    policy: Policy,
    model: SmallModel,
    tokens: int,
    device: torch.device,
    options: Fp8Options,
    recipe: str | None,
) -> CountResult:
    run_as = model.example_shape(tokens)
    asked: dict[str, Any] = {"tokens": tokens, "recipe": recipe, "emulate": device.type == "cpu", "options": options}
    try:
        planned = apply_fp8(model.build(device), policy, **asked)
        if options.confirm_compiled:
            torch.compiler.reset()  # after graphs of other counts torch would make shapes dynamic, or stop compiling
        applied = apply_fp8(model.build(device), policy, **asked, confirm=True, example=model.example(tokens, device))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failure = f"{model.blocks} blocks did not fit into memory: {short(' '.join(str(error).split()), 200)}"
        return CountResult(tokens, *run_as, failure=failure)
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return CountResult(tokens, *run_as, _block_results(planned, applied), planned, applied)


def _block_results(planned: AppliedFp8, applied: AppliedFp8) -> tuple[BlockResult, ...]:
    """A result for each kind of block, also for blocks in which nothing could be timed."""
    before, after = _by_block(planned.rows), _by_block(applied.rows)
    confirmed = {verdict.block: verdict for verdict in applied.confirmed}
    first: dict[tuple[object, ...], str] = {}
    for block, rows in before.items():
        first.setdefault(tuple((row.path[len(block) :], row.shape, row.precision) for row in rows), block)
    return tuple(_block_result(block, before[block], after[block], confirmed.get(block)) for block in first.values())


def _block_result(
    block: str, before: list[LayerRow], after: list[LayerRow], confirmed: Confirmed | None
) -> BlockResult:
    if confirmed is None:
        reasons = "; ".join(dict.fromkeys(row.reason for row in after))
        confirmed = Confirmed(block, UNMEASURED, f"not timed, no layer can be FP8: {reasons}", "bf16")
    planned, fp8_layers = (sum(row.precision != "bf16" for row in rows) for rows in (before, after))
    return BlockResult(**asdict(confirmed), planned=planned, fp8_layers=fp8_layers, layers=len(after))


def _by_block(rows: Sequence[LayerRow]) -> dict[str, list[LayerRow]]:
    """Group rows of layers by the block that they lie in."""
    blocks: dict[str, list[LayerRow]] = {}
    for row in rows:
        blocks.setdefault(block_of(row.path) or "the model", []).append(row)
    return blocks
