"""Is a block really faster with its plan? BF16 and the plan in turns, on the whole block, before a model is changed.

Layers were measured one by one; in a block they share caches, launches and the compiler's attention. So the first block
of each make is copied, the copy gets the plan, and both are run forward and backward on what the model itself hands
that block: the model is run up to it once, on an example, to see. An interval that ends below the threshold, or holds
it, turns the plan down for all blocks of that make: BF16 is what "not shown to be faster" means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.measure.paired_timing import OK, OOM, Call, Stopwatch, Timed, stopwatch_of, time_in_turns
from bitplan.plan.fp8_interval import speedup_interval
from bitplan.plan.fp8_terms import LOSE, UNDECIDED, UNMEASURED, WIN, Fp8Error
from bitplan.runtime.fp8_experts import cast_dropper
from bitplan.runtime.fp8_summary import Confirmed

TURNS, WARMUP = 20, 3
EXAMPLE_LENGTH = 4096
Example = Tensor | Mapping[str, Any] | tuple[Any, ...]


class _SeenError(Exception):
    """Thrown to stop a model once the block's inputs were seen."""


def seen_inputs(model: nn.Module, path: str, example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model hands the block at `path` when it is given the example."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def see(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        raise _SeenError

    handle = model.get_submodule(path).register_forward_pre_hook(see, with_kwargs=True)
    try:
        with torch.no_grad():
            _call(model, example)
    except _SeenError:
        return found[0]
    finally:
        handle.remove()
    raise Fp8Error(f"the model never ran {path} on the example; give an example that reaches it")


def default_example(model: nn.Module, tokens: int) -> Example:
    """Random tokens for a language model that says how large its vocabulary is."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    vocabulary = getattr(config, "vocab_size", None)
    if type(vocabulary) is not int:
        raise Fp8Error(
            "confirm needs an example to run the model on, and this model does not say its vocab_size; give "
            "example=: a tensor, a tuple of arguments or a dict of keyword arguments"
        )
    longest = getattr(config, "max_position_embeddings", None)
    length = min(tokens, longest if type(longest) is int else EXAMPLE_LENGTH, EXAMPLE_LENGTH)
    device = next(model.parameters()).device
    ids = torch.randint(0, vocabulary, (max(tokens // length, 1), length), device=device)
    return {"input_ids": ids, "use_cache": False}


def confirm_block(
    path: str,
    plain: nn.Module,
    planned: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    threshold: float = 1.0,
    compiled: bool = False,
    stopwatch: Stopwatch | None = None,
    turns: int = TURNS,
) -> Confirmed:
    """Both blocks forward and backward in turns, and what the interval says."""
    device = next(plain.parameters()).device
    timed = time_in_turns(
        {"bf16": lambda: _step(plain, inputs, compiled), "plan": lambda: _step(planned, inputs, compiled)},
        stopwatch or stopwatch_of(device),
        turns=turns,
        warmup=WARMUP,
    )
    return judge(path, timed["bf16"], timed["plan"], threshold)


def judge(path: str, bf16: Timed, plan: Timed, threshold: float) -> Confirmed:
    """A win only where the whole interval is one; memory that ran out for the plan alone is a loss."""
    if plan.status != OK or bf16.status != OK:
        failed, what = (plan, "the plan") if plan.status != OK else (bf16, "BF16")
        answer = LOSE if plan.status == OOM and bf16.status == OK else UNMEASURED
        return Confirmed(path, answer, f"{what} could not be run ({failed.status}): {failed.message}; BF16 is kept")
    interval = speedup_interval(bf16.samples_ms, plan.samples_ms, in_turns=bf16.in_turns and plan.in_turns)
    if interval is None:
        return Confirmed(path, UNDECIDED, f"{len(plan.samples_ms)} samples are too few; BF16 is kept")
    answer = interval.answer(threshold)
    told = f"{interval.speedup:.3f}x BF16, between {interval.low:.3f}x and {interval.high:.3f}x"
    kept = "" if answer == WIN else "; the plan is turned down and BF16 is kept"
    return Confirmed(path, answer, told + kept, interval.speedup, interval.low, interval.high)


def _step(block: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], compiled: bool) -> Call:
    """One forward and backward of a block, random gradients, weights cast anew as after an optimizer's step."""
    args, kwargs, leaves = _as_leaves(inputs)
    run: Callable[..., Any] = torch.compile(block) if compiled else block
    parameters = [each for each in block.parameters() if each.requires_grad]
    with torch.no_grad():
        shape = _first_tensor(run(*args, **kwargs))
    gradient = torch.randn_like(shape)
    drop_casts = cast_dropper(block)

    def step() -> None:
        drop_casts()
        output = _first_tensor(run(*args, **kwargs))
        torch.autograd.grad(output, [*leaves, *parameters], gradient, allow_unused=True)

    return step


def _as_leaves(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[list[Any], dict[str, Any], list[Tensor]]:
    """The inputs cut off from the model, with the hidden states, the first floating tensor, wanting a gradient."""
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
