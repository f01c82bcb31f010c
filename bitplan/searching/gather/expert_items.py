"""Experts that a file has as one tensor of a layer: which parameter of the model they are in, and where."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from bitplan.plan.names import split_layer
from bitplan.runtime.packed.layer_replacement import are_columns, packed_kind, stack_of
from bitplan.searching.gather.expert_products import ExpertSlice
from bitplan.store.files.open_files import open_tensors
from bitplan.store.models.morph import places_of
from bitplan.store.rounding.input_statistics import expert_name

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
