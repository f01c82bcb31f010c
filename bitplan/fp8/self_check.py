"""Compares a block in FP8 with its BF16 self before a model is changed: is the wiring what it was taken for?

One block of each make is copied, the copy becomes FP8, and both are run once on the same inputs: those that the model
gives the block on token ids or random numbers, without hooks, as in evaluation. What a block adds to its input must be
the same but for the rounding of FP8: products of E4M3 are wrong by 4%, a block by 5 to 10%, one whose norm is computed
elsewhere by 50% and more. Beyond `BOUND` the block is tried with its norms and activations as the model's own code has
them, and stays BF16 if that differs too.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bitplan.base.documents import short
from bitplan.fp8.build import put_decided
from bitplan.fp8.decide import Compared, LayerDecision
from bitplan.fp8.find_linears import Sites
from bitplan.fp8.policy.vocabulary import UNMEASURED, Fp8Error
from bitplan.fp8.recorded_wiring import MlpWiring, random_like
from bitplan.plan.structure.untouched import (
    Inputs,
    as_written,
    copied_inputs,
    record_inputs,
    restored,
    same_random_numbers,
    without_hooks,
)

BOUND = 0.2
_SEED = 0


class _NotComparedError(Fp8Error):
    """A block of which there can be no second one, or that was not reached."""


def make_of(block: str, members: Sequence[LayerDecision]) -> tuple[object, ...]:
    """A key for a kind of block: its layers and what becomes of them. Of blocks with equal keys one stands for all."""
    inner = [member.within(block) for member in members]
    return tuple((one.site.path, one.site.shape, one.site.norm, one.choice.products, one.joins) for one in inner)


def built_block(plain: nn.Module, path: str, members: Sequence[LayerDecision], mlps: Sequence[MlpWiring]) -> nn.Module:
    """A copy of a block with its layers in FP8."""
    try:
        block = copy.deepcopy(plain)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _NotComparedError(f"{_shown(path)} cannot be copied: {short(str(error), 200)}") from error
    inside = [wiring.within(path) for wiring in mlps if not path or wiring.path.startswith(f"{path}.")]
    put_decided(block, [member.within(path) for member in members], inside, watch=False)
    return block


def compare_blocks(
    model: nn.Module, sites: Sites, decided: Sequence[LayerDecision]
) -> tuple[tuple[LayerDecision, ...], tuple[Compared, ...]]:
    """Run one block of each kind in FP8 and in BF16, and take back decisions where the results differ too much.

    Returned are the decisions, in the order of `decided`, and one comparison for each make of block.
    """
    blocks: dict[str, list[LayerDecision]] = {}
    for layer in decided:
        blocks.setdefault(sites.block_of(layer.site.path), []).append(layer)
    makes: dict[tuple[object, ...], list[str]] = {}
    for path, members in blocks.items():
        if any(member.choice for member in members):
            makes.setdefault(make_of(path, members), []).append(path)
    first = {paths[0] for paths in makes.values()}
    inputs, fault = _inputs_of(model, sites, first)
    results: list[Compared] = []
    for paths in makes.values():
        block = paths[0]
        try:
            if block not in inputs:
                raise _NotComparedError(fault)
            result = _compare(model, block, blocks[block], sites.mlps, inputs[block])
        except _NotComparedError as error:
            result = Compared(_shown(block), None, BOUND, "all", f"not compared: {error}")
        results.append(result)
        for path in paths:
            blocks[path] = [_after(member, result) for member in blocks[path]]
    by_path = {member.site.path: member for members in blocks.values() for member in members}
    return tuple(by_path[layer.site.path] for layer in decided), tuple(results)


def _after(decided: LayerDecision, result: Compared) -> LayerDecision:
    if result.kept == "all" or not decided.choice:
        return decided
    why = f"{result.block}: {result.reason}"
    return decided.apart(why) if result.kept == "apart" else decided.in_bf16(why, UNMEASURED)


def _compare(
    model: nn.Module, path: str, members: Sequence[LayerDecision], mlps: Sequence[MlpWiring], inputs: Inputs
) -> Compared:
    plain = model.get_submodule(path)
    with _quiet(plain):
        expected = _call(plain, inputs)

    def difference(chosen: Sequence[LayerDecision]) -> float:
        block = built_block(plain, path, chosen, mlps)
        try:
            with _quiet(block):
                return _difference(expected, _call(block, inputs), inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a forward raises when its layers are others
            faults.append(f"{type(error).__name__}: {short(' '.join(str(error).split()), 200)}")
            return math.inf

    faults: list[str] = []
    joined = difference(members)
    if joined <= BOUND:
        return Compared(
            _shown(path), joined, BOUND, "all", f"differs by {joined:.3f} from its BF16 self (bound {BOUND})"
        )
    wrong = f"raised {faults[0]}" if faults else f"differed by {joined:.3f} from its BF16 self (bound {BOUND})"
    apart = [member.apart(wrong) for member in members]
    again = difference(apart) if any(member.site.norm for member in members) or mlps else math.inf
    if again <= BOUND:
        reason = f"{wrong} with norms and activations joined; they stay apart, which differs by {again:.3f}"
        return Compared(_shown(path), again, BOUND, "apart", reason)
    return Compared(_shown(path), None if faults else joined, BOUND, "bf16", f"{wrong}, and stays BF16")


def _shown(path: str) -> str:
    return path or "the model"


# ---- running ---------------------------------------------------------------------------------------------------------


def _inputs_of(model: nn.Module, sites: Sites, wanted: set[str]) -> tuple[dict[str, Inputs], str]:
    """The inputs of blocks, as the model gives them on random numbers; and why some are missing."""
    inputs: dict[str, Inputs] = {}
    if any(parameter.is_meta for parameter in model.parameters()):
        return inputs, "the model has no numbers, being on the meta device"
    faults, root = list(sites.run.faults), sites.run.root
    try:
        with _quiet(root):
            record_inputs(model, root, wanted, _example(model, *sites.run.inputs), inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a forward raises
        faults.append(f"its forward raised {type(error).__name__}: {short(' '.join(str(error).split()), 200)}")
    return inputs, "; ".join(faults) or "the run did not reach it"


def _example(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    numbers = random_like((args, kwargs), torch.Generator().manual_seed(_SEED))
    example: Inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), numbers)
    return example


def _call(block: nn.Module, inputs: Inputs) -> list[Tensor]:
    args, kwargs = copied_inputs(inputs)
    with without_hooks():
        output = block(*args, **kwargs)
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _difference(expected: Sequence[Tensor], computed: Sequence[Tensor], inputs: Inputs) -> float:
    """The norm of the difference over the norm of what the block adds to its input."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    apart = total = added = 0.0
    if [one.shape for one in expected] != [one.shape for one in computed]:
        return math.inf
    for one, other in zip(expected, computed, strict=True):
        residual = next((x for x in tensors if x.shape == one.shape), None)
        apart += float((other.float() - one.float()).square().sum())
        total += float(one.float().square().sum())
        added += float((one if residual is None else one.float() - residual.float()).float().square().sum())
    base = added if added > 1e-6 * total else total  # a block that adds nothing yet is compared as a whole
    if not math.isfinite(apart) or not math.isfinite(base):
        return 0.0 if not math.isfinite(total) else math.inf  # nothing can be said of numbers that are not finite
    return math.sqrt(apart / base) if base else 0.0


@contextlib.contextmanager
def _quiet(module: nn.Module) -> Iterator[None]:
    """A context for a run that leaves no trace: eval mode, no gradients, hooks, random numbers or attributes."""
    training = {one: one.training for one in module.modules()}
    buffers = [(one, one._version, one.clone()) for one in module.buffers() if not one.is_meta]
    with torch.no_grad(), restored(module), same_random_numbers(), as_written():
        for one in training:
            one.training = False
        try:
            yield
        finally:
            for one, was in training.items():
                one.training = was
            for buffer, version, numbers in buffers:
                if buffer._version != version:
                    buffer.copy_(numbers)
