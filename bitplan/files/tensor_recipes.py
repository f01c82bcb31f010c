"""Which tensors of a file make each tensor of a model, decided on names and shapes before a number is read.

transformers renames tensors when it loads, and merges some: the experts of Mixtral and Qwen lie in their files one by
one and in the model as one stack. Its own tables say how. Packed rows can be put side by side without touching a
number, so merged tensors stay packed where every step stacks or concatenates rows; anything else is refused, never
expanded. Names of other models are taken as they are.

All that does not fit is one error: tensors that are missing, unknown, or of another shape.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from bitplan.base.errors import FileFormatError, MissingLibraryError
from bitplan.files.describe_files import empty_model
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.formats import get_format
from bitplan.plan.names import natural_order
from bitplan.plan.structure.describe import multiplies_transposed
from bitplan.plan.structure.model_view import transposed_shape
from bitplan.plan.structure.packable import weights_read_outside, why_not_packed_in

MOST_SHOWN = 8


@dataclass(frozen=True)
class FilePiece:
    """A tensor of the file, and where its rows lie in the model's tensor: in which item of a stack, from which row.

    It is a place and no record: `save_packed` needs it when the file, and with it the record, is gone.
    """

    name: str
    shape: tuple[int, ...]
    item: int | None = None
    start: int = 0

    @property
    def place(self) -> tuple[int | slice, ...]:
        rows = slice(self.start, self.start + self.shape[0]) if self.shape else slice(None)
        return (rows,) if self.item is None else (self.item, rows)


@dataclass(frozen=True)
class TensorRecipe:
    """How tensors of the model are made: from `pieces` put side by side, or by transformers' own `converter`."""

    targets: tuple[str, ...]
    pieces: tuple[FilePiece, ...]
    patterns: tuple[str, ...] = ()
    converter: Any = None

    @property
    def is_one(self) -> bool:
        return len(self.pieces) == 1 and self.converter is None

    def format_in(self, file: TensorFile) -> str | None:
        """The packed format of its pieces; None where they are plain tensors."""
        spec = file.spec(self.pieces[0].name)
        return spec.format if spec.encoded and not get_format(spec.format).is_cast else None


@dataclass(frozen=True)
class Assignment:
    """Every tensor of a model: made by a recipe, tied to another (`ties`), or computed by the model (`unread`)."""

    recipes: tuple[TensorRecipe, ...]
    ties: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def assign(model: nn.Module, file: TensorFile, where: str) -> Assignment:
    """A recipe for every tensor of a model, from a file's headers; one error lists all that does not fit."""
    assignment, faults = fit_to_model(model, file)
    if any(faults.values()):
        is_larger = faults["unknown"] and not faults["missing"]
        hint = "; a model that has them all can be given as model=" if is_larger else ""
        raise FileFormatError(f"{where}: does not fit this {type(model).__name__}: {listed_faults(faults)}{hint}")
    return assignment


def fit_to_model(model: nn.Module, file: TensorFile) -> tuple[Assignment, dict[str, list[str]]]:
    """A recipe for every tensor of a model that the file has, and what does not fit, by kind."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    targets, converters = _targets(model, shapes, [*file.specs, *file.tied])
    grouped: dict[str, dict[str, list[str]]] = {}
    for name in targets:
        target, pattern = targets[name]
        if target in shapes and name in file.specs:
            grouped.setdefault(target, {}).setdefault(pattern or name, []).append(name)
    unknown = [name for name, (target, _) in targets.items() if target not in shapes]
    recipes = []
    for target, sources in grouped.items():
        converter = converters.get(next(iter(sources)))
        if converter is None:
            unknown += sorted(sources)[1:]  # two names of the file for one tensor
        recipes.append(_recipe(target, sources, converter, file))
    filled = {target for recipe in recipes for target in recipe.targets}
    pairs = _ties_of(model) | {targets[alias][0]: targets[name][0] for alias, name in file.tied.items()}
    half_made = [pair for pair in pairs.items() if len(filled.intersection(pair)) == 1]
    ties = dict((one, other) if other in filled else (other, one) for one, other in half_made)
    unread = [name for name in unknown if _is_computed(model, name)]
    known = {*filled, *ties, *computed_parameters(model)}
    faults = {
        "missing": [name for name in shapes if name not in known],
        "unknown": [name for name in unknown if name not in unread],
        "shape": [text for recipe in recipes if (text := _shape_fault(model, recipe, shapes, file))],
        "packing": [text for recipe in recipes if (text := _packing_fault(model, recipe, file))],
    }
    return Assignment(tuple(recipes), ties, tuple(unread)), faults


_KINDS = {
    "missing": "missing",
    "unknown": "unknown to the model",
    "shape": "of another shape",
    "packing": "not loadable",
}


def listed_faults(faults: Mapping[str, Sequence[str]]) -> str:
    """Faults by kind as one text: '3 missing: a, b, c; 1 unknown to the model: d'."""
    listed = ((_KINDS[kind], natural_order(names)) for kind, names in faults.items() if names)
    return "; ".join(f"{len(names)} {kind}: {shortened(names)}" for kind, names in listed)


@dataclass(frozen=True)
class FolderModel:
    """The model of a folder's config, on meta, and how a file fits to it; without one a note says why."""

    file: TensorFile
    model: nn.Module | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: TensorFile, folder: Path) -> Self:
        if any(name.endswith("_blocks") for name in file.specs):
            return cls(file, None)  # gpt-oss in its own layout, of which `bitplan.files.gpt_oss` knows more
        try:
            return cls(file, empty_model(folder, ties=False))
        except (FileFormatError, MissingLibraryError) as error:
            return cls(file, None, (f"whether all tensors of its model are there was not checked: {error}",))

    @cached_property
    def _fit(self) -> tuple[Assignment, dict[str, list[str]]]:
        assert self.model is not None
        return fit_to_model(self.model, self.file)

    def transposed(self) -> list[str] | None:
        """Matrices of the file that the model multiplies by as [inputs, outputs]; None where that is not known."""
        if self.model is None:
            return None
        return [
            recipe.pieces[0].name
            for recipe in self._fit[0].recipes
            if recipe.is_one and len(recipe.pieces[0].shape) == 2 and _lies_transposed(self.model, recipe.targets[0])
        ]

    def unpackable(self, names: Collection[str]) -> dict[str, str]:
        """Which of these tensors of the file no packed layer of the model can hold, and why; where that is known."""
        if self.model is None or not names:
            return {}
        assignment, readers = self._fit[0], weights_read_outside(self.model)
        pieces = {target: recipe.pieces for recipe in assignment.recipes for target in recipe.targets}
        pieces |= {target: pieces[source] for target, source in assignment.ties.items() if source in pieces}
        reasons: dict[str, str] = {}
        for target, of_target in pieces.items():
            wanted = [piece.name for piece in of_target if piece.name in names]
            if wanted and (reason := why_not_packed_in(self.model, target) or readers.get(target)):
                reasons |= dict.fromkeys(wanted, reason)
        return reasons

    def require_whole(self, otherwise: str = "") -> None:
        """Refuse a file that lacks tensors of the model, where that is known.

        Tensors that the model does not have are no fault: others may read them.
        """
        if self.model is None:
            return
        faults = self._fit[1]
        if lacking := {kind: names for kind in ("missing", "shape") if (names := faults[kind])}:
            raise FileFormatError(
                f"{self.file.path}: is not the whole {type(self.model).__name__} of its config.json: "
                f"{listed_faults(lacking)}; get the rest of the checkpoint{otherwise}"
            )


def shortened(faults: Sequence[str]) -> str:
    """The first faults, and how many more there are."""
    more = f" and {len(faults) - MOST_SHOWN} more" if len(faults) > MOST_SHOWN else ""
    return ", ".join(faults[:MOST_SHOWN]) + more


# ---- names -----------------------------------------------------------------------------------------------------------


def _targets(
    model: nn.Module, own_shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]
) -> tuple[dict[str, tuple[str, str | None]], dict[str, Any]]:
    """Map each name of the file to the model's and the pattern of its converter; and list the converters by pattern."""
    if not hasattr(model, "base_model_prefix"):
        return {name: (name, None) for name in names}, {}
    from transformers import core_model_loading as theirs
    from transformers.conversion_mapping import get_model_conversion_mapping

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, theirs.WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, theirs.WeightConverter)]
    prefix: Any = model.base_model_prefix
    targets: dict[str, tuple[str, str | None]] = {}
    for name in sorted(names, key=theirs.dot_natural_key):
        renamed = theirs.rename_source_key(name, renamings, converters, prefix, own_shapes)
        targets[name] = (name, None) if renamed[0] not in own_shapes and name in own_shapes else renamed
    return targets, {pattern: entry for entry in converters for pattern in entry.source_patterns}


def _recipe(target: str, sources: Mapping[str, list[str]], converter: Any, file: TensorFile) -> TensorRecipe:
    shapes = {name: file.spec(name).shape for names in sources.values() for name in names}
    if converter is None:
        name = next(iter(shapes))
        return TensorRecipe((target,), (FilePiece(name, shapes[name]),))
    ordered = {pattern: sources[pattern] for pattern in converter.source_patterns if pattern in sources}
    pieces = _side_by_side(converter.operations, ordered, shapes)
    if pieces is not None:
        return TensorRecipe((target,), pieces)
    targets = tuple(target.replace(converter.target_patterns[0], pattern) for pattern in converter.target_patterns)
    flat = [(pattern, name) for pattern, names in ordered.items() for name in names]
    return TensorRecipe(
        targets,
        tuple(FilePiece(name, shapes[name]) for _, name in flat),
        tuple(pattern for pattern, _ in flat),
        converter,
    )


def _side_by_side(
    operations: Sequence[Any], sources: Mapping[str, list[str]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[FilePiece, ...] | None:
    """Say where each source's rows lie in the result; None where a step does more than put rows side by side."""
    from transformers import core_model_loading as theirs

    stacks = bool(operations) and type(operations[0]) is theirs.MergeModulelist and operations[0].dim == 0
    rest = operations[1:] if stacks else operations
    axis = 1 if stacks else 0
    if [type(step) for step in rest] not in ([], [theirs.Concatenate]) or not operations:
        return None
    if rest and rest[-1].dim != axis:
        return None
    if any(len(shape) < 2 for shape in shapes.values()) or (not rest and len(sources) > 1):
        return None
    pieces, start = [], 0
    for names in sources.values():
        for index, name in enumerate(names):
            pieces.append(FilePiece(name, shapes[name], index if stacks else None, start))
            start += 0 if stacks else shapes[name][0]
        start += shapes[names[0]][0] if stacks else 0
    return tuple(pieces)


def _ties_of(model: nn.Module) -> dict[str, str]:
    """Names of a model that stand for one tensor: transformers' own table, and parameters that are the same object."""
    table: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter) and first.setdefault(id(tensor), name) != name:
            table.setdefault(name, first[id(tensor)])
    return table


def computed_parameters(model: nn.Module) -> list[str]:
    """Names of parameters that transformers writes to no file, for the model computes them, as Marian its positions."""
    names: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return sorted({name for name, _ in model.named_parameters()}.intersection(names))


def _is_computed(model: nn.Module, name: str) -> bool:
    """Whether a file's tensor is one that the model computes itself, or that transformers says may be left over."""
    if name in dict(model.named_buffers(remove_duplicate=False)):
        return True
    patterns: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return name.endswith("rotary_emb.inv_freq") or any(re.search(pattern, name) for pattern in patterns)


# ---- shapes and formats ----------------------------------------------------------------------------------------------


def _lies_transposed(model: nn.Module, name: str) -> bool:
    """Whether a parameter is [.., inputs, outputs], so that it is packed as its transpose."""
    owner, _, local = name.rpartition(".")
    return multiplies_transposed(model.get_submodule(owner), local)


def _shape_fault(
    model: nn.Module, recipe: TensorRecipe, own_shapes: Mapping[str, tuple[int, ...]], file: TensorFile
) -> str | None:
    """What is wrong with how a tensor lies in the file: packed ones have outputs as rows, whatever the model has."""
    if recipe.converter is not None:
        return None  # transformers' own steps decide; their result is compared with the model later
    target, came = recipe.targets[0], shape_of(recipe.pieces)
    expected = own_shapes[target]
    if recipe.format_in(file) is not None and _lies_transposed(model, target):
        expected = transposed_shape(expected)
    return None if came == expected else f"{target} (the file has {came}, the model {expected})"


def shape_of(pieces: Sequence[FilePiece]) -> tuple[int, ...] | None:
    """The shape of pieces side by side; None where they leave holes or differ in width."""
    first = pieces[0]
    if len(pieces) == 1 and first.item is None:
        return first.shape
    rows = max(piece.start + piece.shape[0] for piece in pieces)
    items = {piece.item for piece in pieces}
    complete = sum(piece.shape[0] for piece in pieces) == rows * len(items)
    if not complete or any(piece.shape[1:] != first.shape[1:] for piece in pieces):
        return None
    return (rows, *first.shape[1:]) if first.item is None else (len(items), rows, *first.shape[1:])


def _packing_fault(model: nn.Module, recipe: TensorRecipe, file: TensorFile) -> str | None:
    specs: list[TensorSpec] = [file.spec(piece.name) for piece in recipe.pieces]
    formats = {spec.format if spec.encoded else str(spec.torch_dtype) for spec in specs}
    packed = [spec for spec in specs if spec.encoded and not get_format(spec.format).is_cast]
    target = recipe.targets[0]
    if packed and recipe.converter is None and packed[0].transposed != (is_columns := _lies_transposed(model, target)):
        way = "along its outputs" if is_columns else "as its transpose"
        return f"{target} (packed {way}; quantize the folder of the model again)"
    if not packed or recipe.is_one:
        return None
    fmt = get_format(packed[0].format)
    if recipe.converter is not None:
        steps = ", ".join(type(op).__name__ for op in recipe.converter.operations)
        return f"{target} ({packed[0].name} is packed, and transformers changes it by {steps}; leave it unpacked)"
    if len(formats) > 1:
        return f"{target} (made of {len(specs)} tensors in {' and '.join(sorted(formats))}: give them one format)"
    if fmt.block.rows != 1 or fmt.zero_point or (fmt.scales is not None and fmt.scales.needs_base):
        return (
            f"{target} (made of {len(specs)} tensors in {fmt.name}, which has a factor for each: use mxfp4 or int8_row)"
        )
    return None


def convert_plain(recipe: TensorRecipe, tensors: Sequence[torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Compute a model's tensors from a file's plain ones by transformers' own converter."""
    converter = deepcopy(recipe.converter)
    for piece, pattern, tensor in zip(recipe.pieces, recipe.patterns, tensors, strict=True):
        converter.add_tensor(recipe.targets[0], piece.name, pattern, tensor)
    converted = converter.convert(recipe.targets[0], model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
