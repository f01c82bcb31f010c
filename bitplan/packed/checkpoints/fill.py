"""Puts a checkpoint into a model: every tensor read once, straight into the memory where it stays.

All tensors are read before the model is touched, so that an error on the way leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bitplan.base.errors import FileFormatError
from bitplan.base.records import on_failure
from bitplan.files.tensor_file import TensorFile
from bitplan.formats import Encoded, get_format
from bitplan.packed.checkpoints.tensor_sources import Assignment, TensorRecipe, convert_plain, shortened
from bitplan.packed.layer_replacement import format_fault, lacking, packed_layer, why_not_packed
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.read_tensors import check_held, check_numbers
from bitplan.packed.tile_cache import TileCache
from bitplan.plan.names import listed

Value = Tensor | PackedWeight
Dtypes = Mapping[str, torch.dtype]  # the type of every tensor of the model that is not packed


def check_layers(model: nn.Module, assignment: Assignment, file: TensorFile, where: str) -> None:
    """Refuse packed tensors whose layer or format has no packed layer; one error lists them all."""
    packed: dict[str, set[str]] = {}
    faults = []
    sources = {recipe.targets[0]: recipe for recipe in assignment.recipes}
    sources |= {target: sources[source] for target, source in assignment.ties.items() if source in sources}
    for target, recipe in sources.items():
        fmt = recipe.format_in(file)
        if fmt is None:
            continue
        owner, _, local = target.rpartition(".")
        module = model.get_submodule(owner)
        parent = model.get_submodule(owner.rpartition(".")[0]) if owner else None
        reason = format_fault(get_format(fmt)) or why_not_packed(module, local, parent)
        if reason is not None:
            faults.append(f"{target} ({fmt}): {reason}")
        packed.setdefault(owner, set()).add(local)
    for owner, locals_ in packed.items():
        if missing := lacking(model.get_submodule(owner), locals_):
            faults.append(f"{owner}: {listed(missing)} is not packed and {listed(sorted(locals_))} is")
    if faults:
        raise FileFormatError(
            f"{where}: {len(faults)} packed tensors have no packed layer: {shortened(faults)}; "
            "quantize the model again and leave them as they are",
            settings={"keep": "NAME"},
        )


def needed_bytes(model: nn.Module, assignment: Assignment, file: TensorFile, dtypes: Dtypes) -> int:
    """The bytes that the model will take: packed tensors in their format, others in their type of `dtypes`."""
    own = model.state_dict()
    total = 0
    for recipe in assignment.recipes:
        fmt = recipe.format_in(file)
        if fmt is not None:
            total += sum(get_format(fmt).nbytes(file.spec(piece.name).shape) for piece in recipe.pieces)
        else:
            total += sum(own[name].numel() * dtypes[name].itemsize for name in recipe.targets)
    return total


def read_values(
    model: nn.Module,
    assignment: Assignment,
    file: TensorFile,
    device: torch.device,
    dtypes: Dtypes,
    *,
    may_round: bool,
) -> dict[str, Value]:
    """Every tensor of the model by name, on the device; tied names give the same object.

    may_round   plain numbers that their type cannot hold are rounded; otherwise they are an error
    """
    values: dict[str, Value] = {}
    own = model.state_dict()
    with on_failure(values.clear):  # the traceback keeps this frame, and would keep the memory
        for recipe in assignment.recipes:
            if recipe.format_in(file) is not None:
                values[recipe.targets[0]] = PackedWeight(_read_packed(recipe, file, device))
                continue
            for name, tensor in read_plain(recipe, file, model).items():
                if name not in own or tuple(tensor.shape) != tuple(own[name].shape):
                    raise FileFormatError(
                        f"{file.path}: {listed([piece.name for piece in recipe.pieces], 3)} give {name!r} of shape "
                        f"{tuple(tensor.shape)}, which is not the model's"
                    )
                _check_held(file, name, tensor, dtypes[name], may_round)
                values[name] = tensor.to(device=device, dtype=dtypes[name])
        return values | {target: values[source] for target, source in assignment.ties.items()}


def _read_packed(recipe: TensorRecipe, file: TensorFile, device: torch.device) -> Encoded:
    """The pieces of a packed tensor, each copied to its rows."""
    if recipe.is_one and recipe.pieces[0].item is None:
        item = file.read(recipe.pieces[0].name)
        assert isinstance(item, Encoded)
        check_numbers(file, recipe.pieces[0].name, item)
        return item.to(device)
    shape = _stacked_shape(recipe)
    fmt = get_format(file.spec(recipe.pieces[0].name).format)
    parts = {
        part: torch.empty(size, dtype=dtype, device=device) for part, (dtype, size) in fmt.part_shapes(shape).items()
    }
    for piece in recipe.pieces:
        item = file.read(piece.name)
        assert isinstance(item, Encoded)
        check_numbers(file, piece.name, item)
        for part, own in item.parts.items():
            parts[part][piece.place].copy_(own)
    return Encoded(fmt, shape, **parts)


def _stacked_shape(recipe: TensorRecipe) -> tuple[int, ...]:
    pieces = recipe.pieces
    rows = max(piece.start + piece.shape[0] for piece in pieces)
    width = pieces[0].shape[1:]
    if pieces[0].item is None:
        return (rows, *width)
    return (len({piece.item for piece in pieces}), rows, *width)


def read_plain(recipe: TensorRecipe, file: TensorFile, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model that a recipe makes, in the types of the file."""
    tensors = []
    for piece in recipe.pieces:
        item = file.read(piece.name)
        tensor = item.data if isinstance(item, Encoded) else item
        check_numbers(file, piece.name, tensor)
        tensors.append(tensor)
    if recipe.converter is not None:
        return convert_plain(recipe, tensors, model)
    if recipe.is_one and recipe.pieces[0].item is None:
        return {recipe.targets[0]: tensors[0]}
    out = tensors[0].new_empty(_stacked_shape(recipe))
    for piece, tensor in zip(recipe.pieces, tensors, strict=True):
        out[piece.place].copy_(tensor)
    return {recipe.targets[0]: out}


def _check_held(file: TensorFile, name: str, tensor: Tensor, dtype: torch.dtype, may_round: bool) -> None:
    if tensor.is_floating_point() != dtype.is_floating_point:
        raise FileFormatError(f"{file.path}: {name!r} is {tensor.dtype}, and the model's is {dtype}")
    if not may_round:
        check_held(str(file.path), name, tensor, dtype, "the model's type")


# ---- into the model --------------------------------------------------------------------------------------------------


def make_layers(
    layer_of: Callable[[str], nn.Module],
    values: Mapping[str, Value],
    parameters: Mapping[str, nn.Parameter],
    *,
    strategy: str,
    cache: TileCache | None,
    dtypes: Dtypes,
) -> dict[str, nn.Module]:
    """The packed layers, each by the name of the layer that it replaces. A strategy that cannot run is an error here.

    layer_of   gives the layer of a name, which is to be replaced
    """
    packed: dict[str, dict[str, PackedWeight]] = {}
    for name, value in values.items():
        if isinstance(value, PackedWeight):
            owner, _, local = name.rpartition(".")
            packed.setdefault(owner, {})[local] = value
    layers: dict[str, nn.Module] = {}
    for owner, weights in packed.items():
        dtype = dtypes[f"{owner}.{next(iter(weights))}"]
        layers[owner] = made = packed_layer(
            layer_of(owner),
            weights,
            plain={
                name.removeprefix(f"{owner}."): one for name, one in parameters.items() if name.startswith(f"{owner}.")
            },
            dtype=dtype,
            name=owner,
            strategy=strategy,
            cache=cache,
        )
        explain = getattr(made, "explain", None)
        if strategy != "auto" and explain is not None:
            explain(1, dtype)
    return layers


def make_parameters(model: nn.Module, values: Mapping[str, Value]) -> dict[str, nn.Parameter]:
    """The plain parameters by name; tied ones are one object."""
    made: dict[int, nn.Parameter] = {}
    parameters: dict[str, nn.Parameter] = {}
    for name, before in model.named_parameters(remove_duplicate=False):
        value = values.get(name)
        if isinstance(value, Tensor):
            grad = before.requires_grad and value.is_floating_point()
            parameters[name] = made.setdefault(id(value), nn.Parameter(value, requires_grad=grad))
    return parameters


def place_all(
    model: nn.Module,
    values: Mapping[str, Value],
    parameters: Mapping[str, nn.Parameter],
    layers: Mapping[str, nn.Module],
) -> None:
    """Put everything in its place. Nothing can fail here."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, value in values.items():
        owner, _, local = name.rpartition(".")
        if name in parameters:
            modules[owner]._parameters[local] = parameters[name]
        elif isinstance(value, Tensor):
            modules[owner]._buffers[local] = value
    same: dict[int, nn.Module] = {}  # a module in two places becomes one layer in both
    for owner, layer in layers.items():
        same.setdefault(id(modules[owner]), layer)
    for owner in layers:
        model.set_submodule(owner, same[id(modules[owner])])
