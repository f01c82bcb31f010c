"""Times whole blocks in BF16, as planned and all in FP8, in turns, before a model is changed: is the plan faster?

Layers were measured one by one; in a block they share caches, launches and the compiler's attention. So the first block
of each make is copied, the copy gets the plan, and both are run forward and backward on the inputs that the model
itself gives that block: the model is run once on an example, up to that block. Without an example the model's own
sizes tell them, where they can be told. If the interval of the speedup ends
below the threshold or contains it, all blocks of that make stay in BF16: the plan was not shown to be faster.

A layer that loses alone, waiting for the host, may gain inside a block that keeps the GPU busy. So where a plan leaves
layers in BF16 that could be FP8, a copy with all of them in FP8 takes turns too. It is taken where it is shown to be
faster than BF16 and than the plan.

A small model from a config.json, to confirm a policy before there is a training script: as few blocks of the real
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

import inspect
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.base.documents import load_document, short
from bitplan.base.optional import require
from bitplan.base.paired_timing import (
    OK,
    OOM,
    Call,
    Stopwatch,
    Timed,
    is_out_of_memory,
    release_workspaces,
    stopwatch_of,
    time_in_turns,
)
from bitplan.fp8.find_linears import find_sites
from bitplan.fp8.layers.grouped_linear import cast_dropper
from bitplan.fp8.policy.layers import Attention, ModelPart, Parallel, local_layers
from bitplan.fp8.policy.model_parts import ConfigObject, model_parts
from bitplan.fp8.policy.token_ranges import speedup_interval
from bitplan.fp8.policy.vocabulary import LOSE, UNDECIDED, UNMEASURED, WIN, Fp8Error, ModelConfigError
from bitplan.fp8.summary import Confirmed

TURNS, WARMUP = 20, 3
EXAMPLE_LENGTH = 4096
Example = Tensor | Mapping[str, Any] | tuple[Any, ...]


class _SeenError(Exception):
    """Raised to stop a model once the block's inputs were recorded."""


def seen_inputs(model: nn.Module, path: str, example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of the block at `path` when the model is run on the example."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def see(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _SeenError

    handle = model.get_submodule(path).register_forward_pre_hook(see, with_kwargs=True)
    try:
        with torch.no_grad():
            _call(model, example)
    except _SeenError:
        return calls[0]
    finally:
        handle.remove()
    raise Fp8Error(f"the model never ran {path} on the example; give an example that reaches it")


def inputs_without_example(
    model: nn.Module, path: str, width: int, tokens: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of the block at `path` for so many tokens, as far as the model tells them by itself.

    A language model is run on random tokens: it says its vocab_size, or has embeddings and takes one argument. A block
    that takes one argument gets random numbers [sequences, length, width].
    """
    example = _random_tokens(model, tokens)
    if example is not None:
        return seen_inputs(model, path, example)
    block = model.get_submodule(path)
    if len(_required_arguments(block)) != 1:
        raise Fp8Error(
            f"confirm cannot tell the inputs of {path or 'the model'}: the model does not say its vocab_size, and the "
            f"block takes {', '.join(_required_arguments(block)) or 'no argument'}; give example=: a tensor, a tuple "
            "of arguments or a dict of keyword arguments of the model"
        )
    weight = next(block.parameters())
    x = torch.randn(*example_shape(tokens, EXAMPLE_LENGTH), width, device=weight.device, dtype=weight.dtype)
    try:
        with torch.no_grad():
            block(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        reason = short(" ".join(str(error).split()), 200)
        raise Fp8Error(
            f"confirm cannot tell the inputs of {path or 'the model'}: it fails on numbers of shape {tuple(x.shape)}: "
            f"{reason}; give example=, an input of the model"
        ) from error
    return (x,), {}


def _random_tokens(model: nn.Module, tokens: int) -> Example | None:
    """Random tokens for a language model; None for a model that does not show that it is one."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    vocabulary, longest = (getattr(config, key, None) for key in ("vocab_size", "max_position_embeddings"))
    device = next(model.parameters()).device
    if type(vocabulary) is int:
        shape = example_shape(tokens, longest if type(longest) is int else EXAMPLE_LENGTH)
        return {"input_ids": torch.randint(0, vocabulary, shape, device=device), "use_cache": False}
    sizes = sorted(each.num_embeddings for each in model.modules() if type(each) is nn.Embedding)
    if not sizes or len(_required_arguments(model)) != 1:
        return None
    # The smaller of two embeddings may be of positions: no number is too large for either, no sequence too long.
    shape = example_shape(tokens, sizes[0] if len(sizes) > 1 else EXAMPLE_LENGTH)
    return torch.randint(0, sizes[0], shape, device=device)


def _required_arguments(module: nn.Module) -> list[str]:
    """The arguments that a module cannot be called without."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return [each.name for each in parameters if each.default is inspect.Parameter.empty and each.kind in positional]


def example_shape(tokens: int, longest: int) -> tuple[int, int]:
    """Number and length of sequences for a token count: no longer than the model's positions, or EXAMPLE_LENGTH.

    A count that does not divide evenly is rounded up, by less than one token per sequence.
    """
    sequences = math.ceil(tokens / min(longest, EXAMPLE_LENGTH))
    return sequences, math.ceil(tokens / sequences)


def confirm_block(
    path: str,
    plain: nn.Module,
    planned: nn.Module | None,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    everything: nn.Module | None = None,
    threshold: float = 1.0,
    compiled: bool | str = False,
    graph: bool = False,
    stopwatch: Stopwatch | None = None,
    turns: int = TURNS,
) -> Confirmed:
    """Time the block forward and backward in turns: in BF16, and as planned and all in FP8 if these are not None.

    Kernels are launched one by one, or as a CUDA graph. `compiled` may be a mode of torch.compile.
    """
    device = next(plain.parameters()).device
    blocks = {"bf16": plain, "plan": planned, "all": everything}
    arms = {name: partial(_step, block, inputs, compiled) for name, block in blocks.items() if block is not None}
    try:
        with _compiling_all() if compiled else nullcontext():
            timed = time_in_turns(arms, stopwatch or stopwatch_of(device), turns=turns, warmup=WARMUP, graph=graph)
    finally:
        if device.type == "cuda":
            release_workspaces()
    return judge_all(path, timed, threshold)


def _compiling_all() -> AbstractContextManager[None]:
    """All blocks share the code of one forward, and by default dynamo would silently not compile the ninth."""
    dynamo: Any = torch._dynamo.config  # imported here: it takes seconds, and eager blocks do not need it
    patched: AbstractContextManager[None] = dynamo.patch(recompile_limit=256, fail_on_recompile_limit_hit=True)
    return patched


def judge_all(path: str, timed: Mapping[str, Timed], threshold: float) -> Confirmed:
    """All FP8 where it is shown to be faster than BF16 and than the plan; else the plan, or BF16."""
    plan = judge(path, timed["bf16"], timed["plan"], threshold) if "plan" in timed else None
    if "all" not in timed:
        assert plan is not None
        return plan
    whole = judge(path, timed["bf16"], timed["all"], threshold, "all")
    if plan is None:
        return whole
    if whole.answer == WIN and plan.answer == WIN:
        over = speedup_interval(timed["plan"].samples_ms, timed["all"].samples_ms, in_turns=True)
        if over is None or over.low <= 1.0:
            return plan
        return replace(whole, reason=f"all FP8 is {whole.reason}, and {over.speedup:.3f}x the plan")
    return whole if whole.answer == WIN else plan


def judge(path: str, bf16: Timed, fp8: Timed, threshold: float, which: str = "plan") -> Confirmed:
    """A win only if the whole interval reaches the threshold; FP8 that alone ran out of memory is a loss."""
    name = {"plan": "the plan", "all": "all FP8"}[which]
    if fp8.status != OK or bf16.status != OK:
        failed, what = (fp8, name) if fp8.status != OK else (bf16, "BF16")
        answer = LOSE if fp8.status == OOM and bf16.status == OK else UNMEASURED
        reason = f"{what} could not be run ({failed.status}): {failed.message}; BF16 is kept"
        return Confirmed(path, answer, reason, "bf16")
    interval = speedup_interval(bf16.samples_ms, fp8.samples_ms, in_turns=bf16.in_turns and fp8.in_turns)
    if interval is None:
        return Confirmed(path, UNDECIDED, f"{len(fp8.samples_ms)} samples are too few; BF16 is kept", "bf16")
    answer = interval.answer(threshold)
    reason = f"{interval.speedup:.3f}x BF16, between {interval.low:.3f}x and {interval.high:.3f}x"
    consequence = "" if answer == WIN else f"; {name} is turned down and BF16 is kept"
    taken = which if answer == WIN else "bf16"
    return Confirmed(path, answer, reason + consequence, taken, interval.speedup, interval.low, interval.high)


def _step(block: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], compiled: bool | str) -> Call:
    """One forward and backward of a block, random gradients, weights cast anew as after an optimizer's step."""
    args, kwargs, leaves = _as_leaves(inputs)
    mode = compiled if isinstance(compiled, str) else None
    # As block.compile() does: a model that compiles its layers then reuses what was compiled here.
    run: Callable[..., Any] = torch.compile(block._call_impl, mode=mode) if compiled else block
    parameters = [each for each in block.parameters() if each.requires_grad]
    with torch.no_grad():  # eager: compiling a pass without gradients would serve this line only
        shape = _first_tensor(block(*args, **kwargs))
    gradient = torch.randn_like(shape)
    drop_casts = cast_dropper(block)

    def step() -> None:
        drop_casts()
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        output = _first_tensor(run(*args, **kwargs))
        torch.autograd.grad(output, [*leaves, *parameters], gradient, allow_unused=True)

    return step


def _as_leaves(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[list[Any], dict[str, Any], list[Tensor]]:
    """The inputs, detached from the model; the hidden states (the first floating tensor) require a gradient."""
    leaves: list[Tensor] = []

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach()
            if value.is_floating_point() and not leaves:
                leaves.append(value.requires_grad_())
        return value

    args, kwargs = inputs
    hidden = {key: kwargs[key] for key in ("hidden_states",) if key in kwargs}
    cut_first = {key: cut(value) for key, value in hidden.items()}
    return [cut(value) for value in args], {key: cut(value) for key, value in kwargs.items()} | cut_first, leaves


def _first_tensor(output: Any) -> Tensor:
    while isinstance(output, tuple | list):
        output = output[0]
    if not isinstance(output, Tensor):
        raise Fp8Error(f"a block that is confirmed must give a tensor, or a tuple with one first, got {type(output)}")
    return output


def _call(model: nn.Module, example: Example) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


# ---- confirm model ---------------------------------------------------------------------------------------------------


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
