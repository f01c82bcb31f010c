"""Watches products with single experts of a stack: which inputs each met, and how much the loss minds its outputs.

transformers keeps the experts of a layer as one tensor, [experts, outputs, inputs] or, gpt-oss's, [experts, inputs,
outputs], and multiplies with one after the other; files have them so, too, or one by one, or (GGUF) gate and up apart.
What is watched is the product with a slice of such a tensor. An expert is a linear layer for the tokens that are sent
to it:

    inputs      sum of x x^T over the tokens that it got
    gradient    mean of g^2 over these tokens, times all tokens: the damage of an expert counts by how many it gets

An expert that few tokens were sent to is given some of what all experts of its layer got. Those that got none have
that alone: one matrix for all of them, under `unseen_name` of their stack. Rounded by it, an expert has a quarter of
the error that rounding to nearest has, or as much at worst (docs/log.md).

Experts that a file has as one tensor of a layer: which parameter of the model they are in, and where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bitplan.files.input_statistics import expert_name
from bitplan.files.models.morph import places_of
from bitplan.files.open_files import open_tensors
from bitplan.packed.layer_replacement import are_columns, packed_kind, stack_of
from bitplan.plan.names import split_layer

FEWEST_TOKENS = 256  # an expert that got fewer is taken to have got so many, the rest of them like those of all


_UNSEEN = "[unseen]"
_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@dataclass(frozen=True)
class ExpertSlice:
    """Rows of one expert in a stack: a tensor of the file, or an item of one that has them all."""

    name: str  # the file's, or `expert_name` of it
    stack: str  # the model's parameter
    expert: int
    rows: slice
    transposed: bool = False  # the stack is [experts, inputs, outputs]

    def item(self, stack: Tensor) -> Tensor:
        """All outputs of this expert, [outputs, inputs]."""
        return stack[self.expert].T if self.transposed else stack[self.expert]

    def read(self, stack: Tensor) -> Tensor:
        """This weight of the numbers of its stack."""
        return self.item(stack)[self.rows]

    def write(self, stack: Tensor, numbers: Tensor) -> None:
        """The numbers of this weight into a stack."""
        self.read(stack).copy_(numbers)  # a view, however the stack lies


def unseen_name(stack: str) -> str:
    """Whose the statistics are that experts of a stack have to which no token was sent."""
    return stack + _UNSEEN


def is_unseen(owner: str) -> bool:
    """Whether statistics of this name are those of experts to which no token was sent."""
    return owner.endswith(_UNSEEN)


# Called with a stack's name, the expert's number, the inputs [tokens, K] and the outputs [tokens, N] of a product.
OnProduct = Callable[[str, int, Tensor, Tensor], None]


class WatchedProducts(TorchFunctionMode):
    """Calls back for every product with a slice of one of the stacks."""

    def __init__(self, stacks: Mapping[str, Tensor], on_product: OnProduct) -> None:
        super().__init__()
        self._stacks = {stack.untyped_storage().data_ptr(): (name, stack) for name, stack in stacks.items()}
        self._on_product = on_product

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if (func is nn.functional.linear or func in _MATMULS) and len(args) > 1:
            weight = args[1]
            name, stack = self._stacks.get(weight.untyped_storage().data_ptr(), ("", weight))
            if name and weight.shape == stack.shape[1:]:
                self._on_product(name, weight.storage_offset() // stack[0].numel(), args[0], made)
        return made


@contextmanager
def one_by_one(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let transformers' modules of experts multiply with one expert after the other."""
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    before = [(config, getattr(config, "_experts_implementation", None)) for config in configs.values()]
    try:
        for config, _ in before:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, chosen in before:
            config._experts_implementation = chosen


class RoutedTokens:
    """How many tokens each expert of the stacks of a block got."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}

    def add(self, stack: str, expert: int, tokens: int) -> None:
        self._counts[stack, expert] = self._counts.get((stack, expert), 0) + tokens

    def complete_inputs(self, slices: Sequence[ExpertSlice], sums: dict[str, Tensor], key: str) -> None:
        """Give experts that got few tokens some of what all got together; `sums` has NAME.key of those that got any.

        Those that got none share one sum.
        """
        for stack, owners in _stacks_of(slices).items():
            known = [each for each in owners if f"{each.name}.{key}" in sums]
            if not known or all(self._of(each) >= FEWEST_TOKENS for each in owners):
                continue
            pooled, got = _added_up(sums[f"{each.name}.{key}"] for each in known), sum(map(self._of, known))
            for each in known:
                missing = FEWEST_TOKENS - self._of(each)
                if missing > 0:
                    sums[f"{each.name}.{key}"] += pooled * (missing / got)
            if len(known) < len(owners):
                sums[f"{unseen_name(stack)}.{key}"] = pooled * (FEWEST_TOKENS / got)

    def complete_gradients(self, slices: Sequence[ExpertSlice], sums: dict[str, Tensor], key: str, tokens: int) -> None:
        """Means over the tokens of each expert, times all tokens; of an expert without any, the mean over all."""
        for owners in _stacks_of(slices).values():
            for part in {each.rows.start for each in owners}:
                own = [each for each in owners if each.rows.start == part]
                known = [each for each in own if f"{each.name}.{key}" in sums]
                if not known:
                    continue
                mean = _added_up(sums[f"{each.name}.{key}"] for each in known) / sum(map(self._of, known))
                for each in own:
                    name = f"{each.name}.{key}"
                    sums[name] = (sums[name] / self._of(each) if name in sums else mean) * tokens

    def clear(self) -> None:
        self._counts.clear()

    def _of(self, each: ExpertSlice) -> int:
        return self._counts.get((each.stack, each.expert), 0)


def _added_up(parts: Iterable[Tensor]) -> Tensor:
    """Their sum, one after the other: together they may be as large as a block."""
    first, *others = parts
    total = first.clone()
    for each in others:
        total += each
    return total


def _stacks_of(slices: Sequence[ExpertSlice]) -> dict[str, list[ExpertSlice]]:
    found: dict[str, list[ExpertSlice]] = {}
    for each in slices:
        found.setdefault(each.stack, []).append(each)
    return found


# ---- expert items ----------------------------------------------------------------------------------------------------


_GGUF = re.compile(r"blk\.([0-9]+)\.ffn_(gate|up|down)_exps\.weight")


def items_of_stacks(model: nn.Module, names: Mapping[str, str], slices: dict[str, ExpertSlice]) -> dict[str, str]:
    """Add the experts of tensors that have all of a layer, where a packed layer runs them; and whose items they are."""
    places = {place.name: place for place in places_of(model)}
    found: dict[str, str] = {}
    for tensor, ours in names.items():
        place = places[ours]
        if tensor in slices or packed_kind(place.module, place.local) != "StackedExperts":
            continue
        transposed = are_columns(place.module, place.local)
        for index in range(len(place.parameter)):
            name = expert_name(tensor, index)
            found[name] = tensor
            slices[name] = ExpertSlice(name, ours, index, slice(None), transposed)
    return found


def items_of_gguf(
    model: nn.Module, is_in_block: Callable[[str], bool], path: Path, slices: dict[str, ExpertSlice]
) -> dict[str, str]:
    """The same of a GGUF file, which has gate and up apart; numbers say whether they lie where they are expected."""
    stacks = {
        (split_layer(place.name)[1], place.local == stack_of(place.module, "down")): place
        for place in places_of(model)
        if is_in_block(place.name)
        and packed_kind(place.module, place.local) == "StackedExperts"
        and not are_columns(place.module, place.local)
    }
    found: dict[str, str] = {}
    with open_tensors(path) as file:
        for tensor, spec in file.specs.items():
            named = _GGUF.fullmatch(tensor)
            place = None if named is None else stacks.get((named[1], named[2] == "down"))
            if named is None or place is None:
                continue
            outputs = spec.shape[1]
            rows = slice(outputs, 2 * outputs) if named[2] == "up" else slice(0, outputs)
            items = [ExpertSlice(expert_name(tensor, index), place.name, index, rows) for index in range(spec.shape[0])]
            stack, numbers = place.parameter.detach(), file.read_float(tensor)
            if len(stack) == len(items) and torch.equal(items[-1].read(stack).float().cpu(), numbers[-1].float()):
                slices.update({item.name: item for item in items})
                found |= {item.name: tensor for item in items}
    return found
