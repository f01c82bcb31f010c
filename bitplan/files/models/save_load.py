"""Saves and loads models: the packed bytes of a model are the bytes in the file.

A morphed parameter is written as its active version, a parameter that a plan packed as its packed bytes, under the
parameter's own name; everything else is written as it is. Loading restores the version unchanged and the FP32 master
from it, so that a loaded model can run, be saved again byte for byte, or be trained further.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.base.errors import FileFormatError, StoreError
from bitplan.files.certificate import certificate_of
from bitplan.files.models.morph import attach_encoded, encoded_modules_of, formats_of, stores_of
from bitplan.files.open_files import open_tensors, require_container, write_tensors
from bitplan.files.tensor_file import NARROW_FLOATS, TensorFile, TensorSpec, spec_of
from bitplan.files.transformers_names import listed_names, model_from_tensors
from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode
from bitplan.formats.elements import dtype_name
from bitplan.formats.encoded import EncodedModule
from bitplan.plan.format_choices import choose_formats


def write_model(model: nn.Module, path: str | Path, source: Path | None = None, files: Sequence[Path] = ()) -> None:
    """Write a model's parameters and persistent buffers, as `save_packed` does to a .safetensors, .gguf or .json file.

    Parameters that `morph_model` or `apply_plan` packed are written packed, under their own names, as by
    `quantize_file`.

    source, files   the folder that the model was loaded from, and the files of its weights, for the certificate
    """
    items, tied = _model_items(model)
    if not require_container(path).holds_ties:
        items |= {alias: items[name] for alias, name in tied.items()}
        tied = {}
    of_model, holds_transposed = own_tensors(model), require_container(path).holds_transposed
    turned = {name for name, item in of_model.items() if isinstance(item, EncodedModule) and item.transposed}
    if turned and not holds_transposed:
        raise StoreError(
            f"{path}: {listed_names('packed as the transpose of a parameter', sorted(turned))}, which this kind of "
            "file cannot say; write a folder or a .safetensors file"
        )
    specs = {name: replace(spec_of(name, item), transposed=name in turned) for name, item in items.items()}
    plan = choose_formats({name: _as_read(spec) for name, spec in specs.items()}, {}, where=str(path))
    certificate = certificate_of(plan, source or Path(type(model).__name__), files, held=True, holds_plan=True)
    metadata = require_container(path).certificate_entry(json.dumps(certificate, separators=(",", ":")))
    with write_tensors(path, [*specs.values()], metadata=metadata, tied=tied) as writer:
        for name, item in items.items():
            writer.write(name, item)


def _as_read(spec: TensorSpec) -> TensorSpec:
    """The record of a tensor when it is read: one in a plain type is no longer encoded."""
    is_plain = spec.fmt is not None and spec.fmt.is_cast
    return TensorSpec.of(spec.name, spec.shape, dtype=spec.torch_dtype) if is_plain else spec


def load_model(path: str | Path, model: nn.Module) -> nn.Module:
    """`load_packed(path, model=model, masters=True).model`, under its old name."""
    with open_tensors(path) as file:
        return fill_model(file, model)


def fill_model(file: TensorFile, model: nn.Module) -> nn.Module:
    """Fill a model of the same architecture from a file and return it, as `load_packed(masters=True)` does.

    Every name and shape is checked before the first value is changed. A tied parameter may come under any of its names;
    a model of transformers takes files under the names that its save_pretrained writes. A packed tensor fits a
    parameter of any float type: the file's bytes become the version, and the decoded numbers, rounded to the
    parameter's type, the parameter. A parameter that a plan packed takes only its own format.
    """
    path, of_model = file.path, own_tensors(model)
    _check_rows(file, of_model)
    names = [*file.specs, *file.tied]
    unsaved = {name: item for name, item in model.named_buffers(remove_duplicate=False) if name not in of_model}
    in_file = {id(of_model[name]) for name in names if name in of_model}
    missing = sorted(name for name, tensor in of_model.items() if name not in names and id(tensor) not in in_file)
    unknown = sorted(name for name in names if name not in of_model and name not in unsaved)
    if not missing and not unknown:
        _check_buffers(path, file, {name: unsaved[name] for name in names if name in unsaved})
        for name in names:
            if name in of_model:
                _check_shape(path, name, file.spec(name).shape, of_model[name])
        items = {name: file.read(name) for name in file.specs if name in of_model}
    elif _is_of_transformers(model):
        items = _under_the_models_names(path, file, model)
    else:
        raise FileFormatError(
            f"{path}: does not fit this model: {listed_names('missing in the file', missing)}; "
            f"{listed_names('unknown to the model', unknown)}; give a model of the file's own class and sizes"
        )
    for name, item in items.items():
        _check_fits(path, item, name, of_model[name])
    plain = {name: item for name, item in items.items() if not isinstance(item, Encoded)}
    _check_ties(path, plain, of_model)
    with torch.no_grad():
        for name, item in items.items():
            tensor = of_model[name]
            if isinstance(tensor, EncodedModule):
                assert isinstance(item, Encoded)
                tensor.replace(item)
            elif not isinstance(item, Encoded):
                tensor.copy_(item)
    versions = {name: item for name, item in items.items() if isinstance(item, Encoded)}
    attach_encoded(model, {name: item for name, item in versions.items() if isinstance(of_model[name], Tensor)})
    return model


def _check_rows(file: TensorFile, of_model: Mapping[str, Tensor | EncodedModule]) -> None:
    """Refuse tensors that are packed as the transpose of what the model holds: they are no versions of it."""
    turned = {name for name, item in of_model.items() if isinstance(item, EncodedModule) and item.transposed}
    wrong = [name for name, spec in file.specs.items() if spec.encoded and spec.transposed != (name in turned)]
    if wrong:
        raise FileFormatError(
            f"{file.path}: {listed_names('packed as the transpose of what the model holds', wrong)}; "
            "load_packed(path, model=...) without masters packs the model's layers so, and dequantize makes them plain"
        )


def _check_buffers(path: str | Path, file: TensorFile, unsaved: Mapping[str, Tensor]) -> None:
    """Refuse a file whose buffers differ from those that the model computes itself (positions, rotary frequencies)."""
    for name, computed in unsaved.items():
        if not _same_buffer(file.read_float(name), computed):
            raise FileFormatError(
                f"{path}: {name!r} holds other numbers than the model's own buffer, which is computed and not loaded; "
                "the file is of another model or config"
            )


def _same_buffer(came: Tensor, computed: Tensor) -> bool:
    """Whether buffers are equal: integers exactly, floats to 16-bit precision. On meta they count as equal."""
    if came.shape != computed.shape or computed.is_meta:
        return came.shape == computed.shape
    if not computed.is_floating_point():
        return torch.equal(came.to(computed.dtype), computed.cpu())
    return torch.allclose(came.float(), computed.float().cpu(), rtol=1e-2, atol=1e-6)


def _is_of_transformers(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")  # not imported: the model is not of transformers
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _under_the_models_names(path: str | Path, file: TensorFile, model: Any) -> dict[str, Tensor | Encoded]:
    """A file's tensors as transformers renames and merges them; tensors that are only renamed stay packed."""
    for spec in file.specs.values():
        is_plain = spec.torch_dtype.is_floating_point and not spec.encoded
        if is_plain and not _holds(model.dtype, spec.torch_dtype):
            raise FileFormatError(
                f"{path}: {spec.name!r} is {spec.torch_dtype}, which the model's {model.dtype} cannot hold exactly"
            )
    read = {name: file.read(name) for name in file.specs}
    numbers = {name: decode(item) if isinstance(item, Encoded) else item for name, item in read.items()}
    numbers |= {alias: numbers[name] for alias, name in file.tied.items()}
    loaded = model_from_tensors(type(model), model.config, numbers, str(path), dtype=torch.float32)
    packed = {numbers[name].data_ptr(): item for name, item in read.items() if isinstance(item, Encoded)}
    tensors: dict[str, Tensor | Encoded] = {}
    for name, tensor in loaded.state_dict().items():
        item = packed.get(tensor.data_ptr())
        if item is not None and item.shape == tuple(tensor.shape):
            tensors[name] = item
        else:
            tensors[name] = tensor.to(model.dtype) if tensor.is_floating_point() else tensor
    return tensors


def _check_shape(path: str | Path, name: str, shape: tuple[int, ...], of_model: Tensor | EncodedModule) -> None:
    if shape != tuple(of_model.shape):
        raise FileFormatError(f"{path}: {name!r} is {shape}, the model's is {tuple(of_model.shape)}")


def _check_fits(path: str | Path, item: Tensor | Encoded, name: str, of_model: Tensor | EncodedModule) -> None:
    _check_shape(path, name, tuple(item.shape), of_model)
    if isinstance(of_model, EncodedModule):
        came, packed = item.fmt.name if isinstance(item, Encoded) else str(item.dtype), of_model.encoded.fmt.name
        if came != packed:
            raise FileFormatError(
                f"{path}: {name!r} is {came}, the model holds it packed as {packed}; load the file into the model "
                "before the plan is applied"
            )
        return
    if isinstance(item, Encoded):
        holds, kind = of_model.is_floating_point(), item.fmt.name
    else:
        holds, kind = _holds(of_model.dtype, item.dtype), str(item.dtype)
    if not holds:
        raise FileFormatError(f"{path}: {name!r} is {kind}, which the model's {of_model.dtype} cannot hold exactly")


def _holds(of_model: torch.dtype, came: torch.dtype) -> bool:
    """Whether the type `of_model` holds every number of the type `came`."""
    if dtype_name(came) not in NARROW_FLOATS:  # torch does not promote narrow floats
        return torch.promote_types(came, of_model) == of_model
    if came == torch.float8_e8m0fnu:
        return of_model in (torch.bfloat16, torch.float32, torch.float64)
    return came != torch.float4_e2m1fn_x2 and of_model.is_floating_point and of_model.itemsize > 1


def _check_ties(path: str | Path, plain: Mapping[str, Tensor], of_model: Mapping[str, Tensor | EncodedModule]) -> None:
    """Refuse a file with different numbers under names that are one parameter of the model."""
    first: dict[int, str] = {}
    for name, item in plain.items():
        tensor = of_model[name]
        assert isinstance(tensor, Tensor)
        other = first.setdefault(id(tensor), name)
        kind = tensor.dtype
        if other != name and not torch.equal(item.to(kind), plain[other].to(kind)):
            raise FileFormatError(f"{path}: the model ties {name!r} to {other!r}, and the file has different numbers")


def own_tensors(model: nn.Module) -> dict[str, Tensor | EncodedModule]:
    """Everything a model saves, by its own names: a packed parameter is one thing, not its parts."""
    packed = encoded_modules_of(model)
    by_name: dict[str, Tensor | EncodedModule] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = name.rpartition(".")[0]
        by_name[owner if owner in packed else name] = packed.get(owner, tensor)
    return by_name


def _model_items(model: nn.Module) -> tuple[dict[str, Tensor | Encoded], dict[str, str]]:
    """Everything a model saves, each tensor once, and the names that share one."""
    stores, formats = stores_of(model), formats_of(model)
    items: dict[str, Tensor | Encoded] = {}
    tied: dict[str, str] = {}
    first_name: dict[tuple[int, str | None], str] = {}
    for name, tensor in own_tensors(model).items():
        if isinstance(tensor, nn.Parameter | EncodedModule):  # tied only if the format is the same too
            same = (id(tensor), formats[name].name if name in formats else None)
            if same in first_name:
                tied[name] = first_name[same]
                continue
            first_name[same] = name
        if isinstance(tensor, EncodedModule):
            items[name] = tensor.encoded
        else:
            items[name] = stores[name].morph(formats[name]) if name in stores else tensor.detach()
    return items, tied
