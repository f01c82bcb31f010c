"""To a torchao folder: tensors as torchao's own classes flatten them to safetensors, and an FqnToConfig by layer.

| format | torchao's class | config |
|---|---|---|
| int8_row | Int8Tensor | Int8WeightOnlyConfig |
| int4_g32, int4_g64, int4_g128 | IntxUnpackedToInt8Tensor: a byte for each code | IntxWeightOnlyConfig, int4 |
| int8_g64, int8_g128 | IntxUnpackedToInt8Tensor | IntxWeightOnlyConfig, int8 |
| fp8_e4m3_row | Float8Tensor | Float8WeightOnlyConfig |
| nvfp4 | NVFP4Tensor | NVFP4WeightOnlyConfig |

Codes and scales are ours. The metadata of every file says which class each tensor is of, so that torchao itself and
transformers build them again; torchao is not needed to write them. Layouts are those of torchao 0.18.

Tensors of all formats but int8_row keep the type that they were made for, whatever type the model is loaded in: in
another one the first product fails. The folder's config and the report say so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitplan.base.errors import StoreError
from bitplan.base.records import on_failure
from bitplan.files.engines.folder import FolderExport, FolderSource, open_folder
from bitplan.files.engines.targets import ExportRequest, OutputTensor
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats import Encoded
from bitplan.formats.format import Format
from bitplan.plan.format_choices import Substitutes
from bitplan.plan.structure.families import split_expert

TARGET = "torchao"
_GROUPS = {f"int4_g{size}": ("int4", size) for size in (32, 64, 128)} | {"int8_g64": ("int8", 64)}
_GROUPS |= {"int8_g128": ("int8", 128)}
FORMATS = ("int8_row", *_GROUPS, "fp8_e4m3_row", "nvfp4")
_FOUR_BITS = ("int4_g64", "int4_g32", "nvfp4", "int8_row")
SUBSTITUTES = Substitutes(
    "int8_row",
    {"int4_g128": _FOUR_BITS, "int4_g64": _FOUR_BITS[1:], "int4_g32": _FOUR_BITS[2:], "*": ("int8_row",)},
)
_REFUSED = dict.fromkeys(("mxfp4", "mxfp8_e4m3"), "its configs for MX formats quantize activations, too")
_REFUSED["fp8_e4m3_b128"] = "its config for FP8 weights alone has a scale per row or tensor"
STAYS = "torchao packs linear layers"
EXPERTS = "transformers joins the experts of a layer, and reads no tensors of torchao there"


def prepare(request: ExportRequest) -> FolderExport:
    """Plan every tensor for torchao; all that can be refused is, before a weight is read."""
    source = open_folder(request, TARGET, SUBSTITUTES)
    with on_failure(source.file.close):
        layers = [_layer(source, name) for name in source.file.specs]
        if not any(layer.is_packed for layer in layers):
            raise StoreError(f"{request.source}: no layer would be packed; {STAYS}")
    quantization = {
        "quant_method": TARGET,
        "quant_type": {"default": fqn_to_config(layers)},
        "modules_to_not_convert": None,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
    notes = _notes(source, layers)
    quantization |= {"load_with": notes[0]} if notes else {}
    export = FolderExport(
        request,
        TARGET,
        source,
        layers,
        {**source.config, "quantization_config": quantization},
        _pack,
        metadata=_metadata(source, layers),
    )
    export.report.notes += notes
    return export


def _notes(source: FolderSource, layers: Sequence[OutputTensor]) -> list[str]:
    types = {
        _computes(source, layer.sources[0])
        for layer in layers
        if layer.fmt is not None and layer.is_packed and layer.fmt.name != "int8_row"
    }
    if not types:
        return []
    return [
        f'load it with dtype="auto" ({", ".join(sorted(types))}): torchao multiplies by these tensors in no other '
        "type, and stops at the first product"
    ]


def _layer(source: FolderSource, name: str) -> OutputTensor:
    spec = source.file.spec(name)
    fmt, reason = source.format_of(name)
    is_expert = split_expert(name) is not None
    if fmt is None or fmt.is_cast or is_expert or not source.is_linear(name):
        packs = fmt is not None and not fmt.is_cast
        stays = EXPERTS if is_expert else STAYS
        return source.unpacked(name, None if packs else fmt, stays if packs else reason)
    if fmt.name not in FORMATS:
        why = _REFUSED.get(fmt.name, "no tensor class of it has these numbers")
        raise StoreError(
            f"{source.file.path}: torchao has no {fmt.name} ({name!r}): {why}; take one of {', '.join(FORMATS)}"
        )
    return OutputTensor((name,), fmt, reason, _promises(name, spec.shape, fmt))


def _promises(name: str, shape: tuple[int, ...], fmt: Format) -> tuple[TensorSpec, ...]:
    module, _, weight = name.rpartition(".")
    parts = fmt.part_shapes(shape)
    codes = (shape, torch.int8) if fmt.name in _GROUPS else (parts["data"][1], parts["data"][0])
    scale_dtype, scale_shape = parts["scales"]
    tensors = {"qdata": codes, "scale": (scale_shape, scale_dtype)}
    if fmt.name in _GROUPS:
        tensors["zero_point"] = (scale_shape, torch.int8)
    if fmt.name == "nvfp4":
        tensors["per_tensor_scale"] = ((), torch.float32)
    return tuple(
        TensorSpec.of(f"{module}._{weight}_{part}", size, None, kind) for part, (size, kind) in tensors.items()
    )


def _pack(encoded: Encoded, _layer: OutputTensor, _where: str) -> list[Tensor]:
    assert encoded.scales is not None
    if encoded.fmt.name in _GROUPS:
        codes = encoded.codes().reshape(encoded.shape).to(torch.int8)
        return [codes, encoded.scales, torch.zeros(encoded.scales.shape, dtype=torch.int8)]
    if encoded.base is not None:
        return [encoded.data, encoded.scales, encoded.base]
    return [encoded.data, encoded.scales]


# ---- what torchao reads beside the numbers -------------------------------------------------------------------------


def _object(kind: str, data: Any, version: int | None = None) -> dict[str, Any]:
    return {"_type": kind, **({} if version is None else {"_version": version}), "_data": data}


def _dtype(name: str) -> dict[str, Any]:
    return _object("torch.dtype", name)


_PER_ROW = _object("PerRow", {"dim": -1}, 1)


def layer_config(fmt: str) -> dict[str, Any]:
    """The config by which torchao itself would quantize a layer to this format, as its `config_to_dict` writes it."""
    if fmt == "int8_row":
        return _object(
            "Int8WeightOnlyConfig", {"group_size": None, "granularity": _PER_ROW, "set_inductor_config": True}, 2
        )
    if fmt == "fp8_e4m3_row":
        options = {"weight_dtype": _dtype("float8_e4m3fn"), "set_inductor_config": True, "granularity": _PER_ROW}
        return _object("Float8WeightOnlyConfig", options, 2)
    if fmt == "nvfp4":
        return _object("NVFP4WeightOnlyConfig", {"use_dynamic_per_tensor_scale": True}, 1)
    kind, size = _GROUPS[fmt]
    return _object(
        "IntxWeightOnlyConfig",
        {
            "weight_dtype": _dtype(kind),
            "granularity": _object("PerGroup", {"group_size": size}, 1),
            "mapping_type": _object("MappingType", "SYMMETRIC"),
            "scale_dtype": None,
            "intx_packing_format": _object("IntxPackingFormat", "UNPACKED_TO_INT8"),
            "intx_choose_qparams_algorithm": _object("IntxChooseQParamsAlgorithm", "AFFINE"),
        },
        2,
    )


def fqn_to_config(layers: Sequence[OutputTensor]) -> dict[str, Any]:
    """torchao's FqnToConfig as its `config_to_dict` writes it: a config for every layer that is packed."""
    configs = {
        layer.sources[0].removesuffix(".weight"): layer_config(layer.fmt.name)
        for layer in layers
        if layer.fmt is not None and layer.is_packed
    }
    return _object("FqnToConfig", {"fqn_to_config": configs, "module_fqn_to_config": configs}, 1)


def _metadata(source: FolderSource, layers: Sequence[OutputTensor]) -> dict[str, str]:
    """The safetensors metadata of every file: for each tensor, as JSON, its torchao class and the class's arguments."""
    metadata: dict[str, str] = {"tensor_names": json.dumps([layer.sources[0] for layer in layers])}
    for layer in layers:
        spec = source.file.spec(layer.sources[0])
        is_plain = layer.fmt is None or not layer.is_packed
        computes = _computes(source, layer.sources[0])
        described = {"_type": "Tensor"} if is_plain else _class(layer, computes, spec.shape)
        metadata[layer.sources[0]] = json.dumps(described)
    return metadata


def _computes(source: FolderSource, name: str) -> str:
    """The type in which torchao multiplies by a packed weight: config.json's if the source is packed, else its own."""
    spec = source.file.spec(name)
    dtype = str(source.config.get("dtype") or source.config.get("torch_dtype") or "")
    return dtype if dtype and spec.encoded else spec.dtype


def _class(layer: OutputTensor, computes: str, shape: tuple[int, ...]) -> Mapping[str, Any]:
    assert layer.fmt is not None
    name = layer.fmt.name
    parts = [promise.name.rpartition("._weight_")[2] for promise in layer.records]
    data: dict[str, Any] = {"block_size": [1, shape[-1]], "act_quant_kwargs": None, "dtype": _dtype(computes)}
    if name == "int8_row":
        kind, data = "Int8Tensor", {**data, "reduce_range": False}
    elif name == "fp8_e4m3_row":
        kind, data = (
            "Float8Tensor",
            {**data, "mm_config": None, "kernel_preference": _object("KernelPreference", "AUTO")},
        )
    elif name == "nvfp4":
        flags = {"is_swizzled_scales": False, "use_triton_kernel": False, "act_quant_kwargs": None}
        kind, data = "NVFP4Tensor", {**flags, "block_size": 16, "orig_dtype": _dtype(computes)}
    else:
        width, size = _GROUPS[name]
        kind = "IntxUnpackedToInt8Tensor"
        data = {"target_dtype": _dtype(width), "block_size": [1, size], "dtype": _dtype(computes)}
        data["activation_quantization"] = None
    return {"_type": kind, "_data": data, "_tensor_data_names": parts}
