"""Saving and loading models: the packed bytes a model runs on are the bytes in the file.

A parameter that was morphed is written as its active version; everything else as it is. Loading
puts the version back untouched and restores the FP32 master from it, so that a loaded model can
run, be saved again byte for byte, or train on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from bitplan.errors import FileFormatError
from bitplan.formats import Encoded
from bitplan.store.models import attach_encoded, formats_of, stores_of
from bitplan.store.tensor_files import open_tensors
from bitplan.store.tensor_writers import Promise, write_tensors

MOST_NAMES_SHOWN = 8


def save_model(model: nn.Module, path: str | Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a model's parameters and persistent buffers; the suffix chooses .safetensors, .gguf or .json."""
    items, tied = _model_items(model)
    if Path(path).suffix != ".safetensors":  # the other containers cannot say that two names are one tensor
        items |= {alias: items[name] for alias, name in tied.items()}
        tied = {}
    promises = [
        Promise(name, item.shape, item.fmt)
        if isinstance(item, Encoded)
        else Promise(name, tuple(item.shape), dtype=item.dtype)
        for name, item in items.items()
    ]
    with write_tensors(path, promises, metadata=metadata, tied=tied) as writer:
        for name, item in items.items():
            writer.write(name, item)


def load_model(path: str | Path, model: nn.Module) -> nn.Module:
    """Fill a model of the same architecture from a file and return it.

    Every name and shape is checked before the first value is changed. A packed tensor fits a parameter of any float
    type: the version is what the file holds, and the parameter what it stands for, rounded to its type.
    """
    own = model.state_dict(keep_vars=True)
    with open_tensors(path) as file:
        names = [*file.specs, *file.tied]
        missing, unknown = sorted(set(own) - set(names)), sorted(set(names) - set(own))
        if missing or unknown:
            raise FileFormatError(
                f"{path}: does not fit this model: {_listed('missing in the file', missing)}"
                f"{_listed('unknown to the model', unknown)}"
            )
        for name in names:
            spec = file.specs[file.tied.get(name, name)]
            if spec.shape != tuple(own[name].shape):
                raise FileFormatError(f"{path}: {name!r} is {spec.shape}, the model's is {tuple(own[name].shape)}")
            holds = torch.promote_types(spec.dtype, own[name].dtype) == own[name].dtype
            if not (holds or (spec.encoded and own[name].is_floating_point())):
                raise FileFormatError(
                    f"{path}: {name!r} is {spec.dtype}, which the model's {own[name].dtype} cannot hold exactly"
                )
        items = {name: file.read(name) for name in file.specs}
    with torch.no_grad():
        for name, item in items.items():
            if not isinstance(item, Encoded):
                own[name].copy_(item)
    attach_encoded(model, {name: item for name, item in items.items() if isinstance(item, Encoded)})
    return model


def _model_items(model: nn.Module) -> tuple[dict[str, Tensor | Encoded], dict[str, str]]:
    """Everything a model saves, each tensor once, and the names that share one."""
    stores, formats = stores_of(model), formats_of(model)
    items: dict[str, Tensor | Encoded] = {}
    tied: dict[str, str] = {}
    first_name: dict[tuple[int, str | None], str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter):  # tied only where the format is the same too
            same = (id(tensor), formats[name].name if name in formats else None)
            if same in first_name:
                tied[name] = first_name[same]
                continue
            first_name[same] = name
        items[name] = stores[name].morph(formats[name]) if name in stores else tensor.detach()
    return items, tied


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMES_SHOWN} more" if len(names) > MOST_NAMES_SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:MOST_NAMES_SHOWN])}{more}; "
