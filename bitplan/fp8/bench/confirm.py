"""Times whole blocks in BF16, as planned and all in FP8, in turns, before a model is changed: is the plan faster?

Layers were measured one by one; in a block they share caches, launches and the compiler's attention. So the first block
of each make is copied, the copy gets the plan, and both are run forward and backward on the inputs that the model
itself gives that block: the model is run once on an example, up to that block. Without an example the model's own
sizes tell them, where they can be told. If the interval of the speedup ends
below the threshold or contains it, all blocks of that make stay in BF16: the plan was not shown to be faster.

A layer that loses alone, waiting for the host, may gain inside a block that keeps the GPU busy. So where a plan leaves
layers in BF16 that could be FP8, a copy with all of them in FP8 takes turns too. It is taken where it is shown to be
faster than BF16 and than the plan.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.base.documents import short
from bitplan.base.paired_timing import (
    OK,
    OOM,
    Call,
    Timed,
    is_out_of_memory,
    release_workspaces,
    stopwatch_of,
    time_in_turns,
)
from bitplan.fp8.decide import Confirmed, LayerDecision, PartPlan, all_in_fp8
from bitplan.fp8.find_linears import Sites
from bitplan.fp8.layers.grouped_linear import cast_dropper
from bitplan.fp8.policy.report import speedup_interval
from bitplan.fp8.policy.vocabulary import LOSE, UNDECIDED, UNMEASURED, WIN, Fp8Error
from bitplan.fp8.self_check import built_block, make_of
from bitplan.plan.structure.describe import arguments_of
from bitplan.plan.structure.untouched import Inputs, record_inputs

TURNS, WARMUP = 20, 3
EXAMPLE_LENGTH = 4096
Example = Tensor | Mapping[str, Any] | tuple[Any, ...]


def confirm_blocks(
    model: nn.Module,
    sites: Sites,
    layers: Sequence[LayerDecision],
    plans: Mapping[str, PartPlan],
    example: Example | None,
) -> tuple[tuple[LayerDecision, ...], tuple[Confirmed, ...]]:
    """Time the first block of each kind; all blocks of that kind get what is shown to be fastest, or stay BF16."""
    blocks: dict[str, list[tuple[LayerDecision, LayerDecision]]] = {}
    for layer in layers:
        everything = all_in_fp8(layer, layer.site.part in plans)
        blocks.setdefault(sites.block_of(layer.site.path), []).append((layer, everything))
    results: dict[tuple[object, ...], Confirmed] = {}
    by_site = {layer.site: layer for layer in layers}
    for path, members in blocks.items():
        if not any(everything.choice for _, everything in members):
            continue
        make = make_of(path, [layer for layer, _ in members])
        if make not in results:
            results[make] = _confirm_make(model, sites, path, members, plans, example)
        by_site |= {layer.site: _after(layer, everything, results[make]) for layer, everything in members}
    return tuple(by_site[layer.site] for layer in layers), tuple(results.values())


def _confirm_make(
    model: nn.Module,
    sites: Sites,
    path: str,
    members: Sequence[tuple[LayerDecision, LayerDecision]],
    plans: Mapping[str, PartPlan],
    example: Example | None,
) -> Confirmed:
    """Time one block forward and backward in three variants, in turns: BF16, FP8 as planned, and FP8 in every layer."""
    plan = next(plans[layer.site.part] for layer, everything in members if everything.choice)
    if example is not None:
        inputs = recorded_inputs(model, path, example)
    else:
        inputs = inputs_without_example(model, path, members[0][0].site.shape[1], plan.tokens or 1)
    plain, compiled = model.get_submodule(path), plan.options.confirm_compiled
    device = next(plain.parameters()).device
    planned, everything = ([pair[index] for pair in members] for index in (0, 1))
    arms = {"bf16": partial(_step, plain, inputs, compiled)}
    for name, chosen in (("plan", planned), ("all", everything if everything != planned else [])):
        if any(layer.choice for layer in chosen):
            arms[name] = partial(_step, built_block(plain, path, chosen, sites.mlps), inputs, compiled)
    stopwatch, graph = plan.options.stopwatch or stopwatch_of(device), plan.options.confirm_timing == "graph"
    try:
        with _compiling_all() if compiled else nullcontext():
            timed = time_in_turns(arms, stopwatch, turns=TURNS, warmup=WARMUP, graph=graph)
    finally:
        if device.type == "cuda":
            release_workspaces()
    threshold = 1.0 if plan.policy is None else plan.policy.speedup_threshold
    return fastest_of(path or "the model", timed, threshold)


def _after(decided: LayerDecision, everything: LayerDecision, verdict: Confirmed) -> LayerDecision:
    if verdict.taken == "plan" or (verdict.taken == "bf16" and not decided.choice):
        return decided
    if verdict.taken == "all":
        reason = f"all FP8, by confirming {verdict.block}: {verdict.reason}"
        choice = replace(everything.choice, answer=verdict.answer, reason=reason)
        return decided if everything == decided else replace(everything, choice=choice)
    return decided.in_bf16(f"turned down by confirming {verdict.block}: {verdict.reason}", verdict.answer)


def recorded_inputs(model: nn.Module, path: str, example: Example) -> Inputs:
    """The inputs of the block at `path` when the model is run on the example."""
    inputs: dict[str, Inputs] = {}
    with torch.no_grad():
        record_inputs(model, model, {path}, arguments_of(example), inputs)
    if path not in inputs:
        raise Fp8Error(f"the model never ran {path} on the example; give an example that reaches it")
    return inputs[path]


def inputs_without_example(model: nn.Module, path: str, width: int, tokens: int) -> Inputs:
    """The inputs of the block at `path` for so many tokens, as far as the model tells them by itself.

    A language model is run on random tokens: it says its vocab_size, or has embeddings and takes one argument. A block
    that takes one argument gets random numbers [sequences, length, width].
    """
    example = _random_tokens(model, tokens)
    if example is not None:
        return recorded_inputs(model, path, example)
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
    sizes = sorted(module.num_embeddings for module in model.modules() if type(module) is nn.Embedding)
    if not sizes or len(_required_arguments(model)) != 1:
        return None
    # The smaller of two embeddings may be of positions: no number is too large for either, no sequence too long.
    shape = example_shape(tokens, sizes[0] if len(sizes) > 1 else EXAMPLE_LENGTH)
    return torch.randint(0, sizes[0], shape, device=device)


def _required_arguments(module: nn.Module) -> list[str]:
    """The arguments that a module cannot be called without."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty and parameter.kind in positional
    ]


def example_shape(tokens: int, longest: int) -> tuple[int, int]:
    """Number and length of sequences for a token count: no longer than the model's positions, or EXAMPLE_LENGTH.

    A count that does not divide evenly is rounded up, by less than one token per sequence.
    """
    sequences = math.ceil(tokens / min(longest, EXAMPLE_LENGTH))
    return sequences, math.ceil(tokens / sequences)


def _compiling_all() -> AbstractContextManager[None]:
    """Have dynamo compile every block: they share one forward, and by default the ninth would not be compiled."""
    dynamo: Any = torch._dynamo.config  # imported here: it takes seconds, and eager blocks do not need it
    patched: AbstractContextManager[None] = dynamo.patch(recompile_limit=256, fail_on_recompile_limit_hit=True)
    return patched


def fastest_of(path: str, timed: Mapping[str, Timed], threshold: float) -> Confirmed:
    """Choose all FP8 where it is shown to be faster than BF16 and than the plan; else the plan, or BF16."""
    plan = verdict_of(path, timed["bf16"], timed["plan"], threshold) if "plan" in timed else None
    if "all" not in timed:
        assert plan is not None
        return plan
    all_in_fp8 = verdict_of(path, timed["bf16"], timed["all"], threshold, "all")
    if plan is None:
        return all_in_fp8
    if all_in_fp8.answer == WIN and plan.answer == WIN:
        over = speedup_interval(timed["plan"].samples_ms, timed["all"].samples_ms, in_turns=True)
        if over is None or over.low <= 1.0:
            return plan
        return replace(all_in_fp8, reason=f"all FP8 is {all_in_fp8.reason}, and {over.speedup:.3f}x the plan")
    return all_in_fp8 if all_in_fp8.answer == WIN else plan


def verdict_of(path: str, bf16: Timed, fp8: Timed, threshold: float, which: str = "plan") -> Confirmed:
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


def _step(block: nn.Module, inputs: Inputs, compiled: bool | str) -> Call:
    """One forward and backward of a block, random gradients, weights cast anew as after an optimizer's step."""
    args, kwargs, leaves = _as_leaves(inputs)
    mode = compiled if isinstance(compiled, str) else None
    # As block.compile() does: a model that compiles its layers then reuses what was compiled here.
    run: Callable[..., Any] = torch.compile(block._call_impl, mode=mode) if compiled else block
    parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
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


def _as_leaves(inputs: Inputs) -> tuple[list[Any], dict[str, Any], list[Tensor]]:
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
