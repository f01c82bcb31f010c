"""To a compressed-tensors folder, which vLLM and transformers load: linear layers packed, everything else as it was.

| format | in compressed-tensors |
|---|---|
| int4_g32, int4_g64, int4_g128 | pack-quantized: eight codes to an int32, a scale per group |
| int8_row, int8_g64, int8_g128 | pack-quantized: four codes to an int32, a scale per row or group |
| fp8_e4m3_row, fp8_e4m3_b128 | float-quantized: codes as they are, a scale per row or per 128 x 128 tile |
| mxfp8_e4m3 | mxfp8-quantized: codes and E8M0 scales as they are |
| mxfp4 | mxfp4-pack-quantized: codes and E8M0 scales as they are |
| nvfp4 | nvfp4-pack-quantized: codes and E4M3 scales as they are, the base as its reciprocal |
| int8_row with inputs in int8_row | int-quantized: codes as they are, inputs rounded token by token |
| fp8_e4m3_row with inputs in fp8_e4m3_row | float-quantized, inputs rounded token by token |
| int4_g128 with inputs in fp8_e4m3_row | pack-quantized, inputs rounded token by token |

Codes and scales are ours, bit for bit. 8-bit integers are pack-quantized because vLLM has no kernel for int-quantized
weights without quantized activations. Layers that engines join into one (q, k and v; gate and up; all experts of a
layer) must have one format, and in nvfp4 those that read one input share one base. An output head stays unless a plan
names it. `kernels` says which engine has a kernel for what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.base.errors import StoreError
from bitplan.base.records import on_failure
from bitplan.files.engines.folder import FolderExport, FolderSource, open_folder
from bitplan.files.engines.targets import Engine, ExportRequest, OutputTensor, get_engine, kv_of_request
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats import Encoded
from bitplan.formats.format import Format
from bitplan.plan.format_choices import Substitutes
from bitplan.plan.kv_formats import KVFormats
from bitplan.plan.structure.families import split_expert

TARGET = "compressed-tensors"


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors names a format of ours; `inputs` where layers round them at each call."""

    container: str
    weights: dict[str, Any]
    inputs: dict[str, Any] | None = None


def _scheme(container: str, bits: int, kind: str, strategy: str, **more: Any) -> Scheme:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    return Scheme(container, weights)


_PACKED, _FLOAT, _MXFP4, _NVFP4 = (
    "pack-quantized",
    "float-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)
_E8M0 = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
SCHEMES = {
    **{f"int4_g{size}": _scheme(_PACKED, 4, "int", "group", group_size=size) for size in (32, 64, 128)},
    "int8_row": _scheme(_PACKED, 8, "int", "channel"),
    **{f"int8_g{size}": _scheme(_PACKED, 8, "int", "group", group_size=size) for size in (64, 128)},
    "fp8_e4m3_row": _scheme(_FLOAT, 8, "float", "channel"),
    "fp8_e4m3_b128": _scheme(_FLOAT, 8, "float", "block", block_structure=[128, 128]),
    "mxfp8_e4m3": _scheme("mxfp8-quantized", 8, "float", "group", **_E8M0),
    "mxfp4": _scheme(_MXFP4, 4, "float", "group", **_E8M0),
    "nvfp4": _scheme(_NVFP4, 4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
}
_INT8, _FP8 = SCHEMES["int8_row"].weights, SCHEMES["fp8_e4m3_row"].weights
_TOKEN = {"strategy": "token", "dynamic": True}
# The format of a layer's inputs -> those that its weights can have then.
WITH_INPUTS: dict[str | None, dict[str, Scheme]] = {
    None: SCHEMES,
    "int8_row": {"int8_row": Scheme("int-quantized", _INT8, {**_INT8, **_TOKEN})},
    "fp8_e4m3_row": {
        "fp8_e4m3_row": Scheme(_FLOAT, _FP8, {**_FP8, **_TOKEN}),
        "int4_g128": Scheme(_PACKED, SCHEMES["int4_g128"].weights, {**_FP8, **_TOKEN}),
    },
}
_FOUR_BITS = ("int4_g64", "int4_g32", "nvfp4", "int8_row")
SUBSTITUTES = Substitutes(
    "int8_row",
    {
        "int4_g128": _FOUR_BITS,
        "int4_g64": _FOUR_BITS[1:],
        "int4_g32": _FOUR_BITS[2:],
        "mxfp4": _FOUR_BITS[2:],
        "*": ("int8_row",),
    },
)
STAYS = "only linear layers are packed in compressed-tensors"
HEAD = "an output head: it stays, unless a plan names it"


def prepare(request: ExportRequest) -> FolderExport:
    """Plan every tensor for compressed-tensors; all that can be refused is, before a weight is read."""
    engine = get_engine(request.engine)
    source = open_folder(request, TARGET, SUBSTITUTES)
    with on_failure(source.file.close):
        layers = [_layer(source, name) for name in source.file.specs]
        joined = _joined_groups(source, layers)
        if not any(layer.is_packed for layer in layers):
            raise StoreError(f"{request.source}: no layer would be packed; {STAYS}")
        if engine is not None:
            _check_kernels(source, layers, joined, engine)
    config = {**source.config, "quantization_config": quantization_config(layers, kv_of_request(request))}
    export = FolderExport(request, TARGET, source, layers, config, _pack, joined)
    export.report.notes += [engine.note] if engine is not None and engine.note else []
    return export


def _layer(source: FolderSource, name: str) -> OutputTensor:
    spec = source.file.spec(name)
    (fmt, reason), rounded = source.format_of(name), source.plan[name].input
    if fmt is None or fmt.is_cast or not source.is_linear(name):
        return source.unpacked(name, fmt, reason if fmt is None or fmt.is_cast else STAYS)
    if source.plan.entries[name].choice.cause == "default" and source.view.role(name) == "head":
        return source.unpacked(name, fmt, HEAD)
    if rounded not in WITH_INPUTS:
        raise StoreError(
            f"{source.file.path}: compressed-tensors has no inputs in {rounded} ({name!r}); take one of "
            f"{', '.join(filter(None, WITH_INPUTS))}, or leave inputs as they are (keep)",
            settings={"inputs": None},
        )
    schemes = WITH_INPUTS[rounded]
    if fmt.name not in schemes:
        raise StoreError(
            f"{source.file.path}: compressed-tensors has no {fmt.name}{_beside(rounded)} ({name!r}); "
            f"take one of {', '.join(schemes)}"
        )
    return OutputTensor((name,), fmt, reason, tuple(promises(name, spec.shape, fmt, rounded)), rounded)


def _beside(rounded: str | None) -> str:
    return "" if rounded is None else f" with inputs in {rounded}"


def _scheme_of(fmt: Format, rounded: str | None) -> Scheme:
    return WITH_INPUTS[rounded][fmt.name]


def _check_kernels(
    source: FolderSource, layers: Sequence[OutputTensor], joined: Sequence[Sequence[str]], engine: Engine
) -> None:
    """Refuse a packed layer that the engine could load and not multiply by."""
    rows_of = {name: sum(source.file.spec(name).shape[0] for name in group) for group in joined for name in group}
    for layer in layers:
        if layer.fmt is None or not layer.is_packed:
            continue
        (name,), fmt = layer.sources, layer.fmt.name
        rows, cols = source.file.spec(name).shape
        if not engine.has_kernel(fmt, layer.input, of_expert=split_expert(name) is not None):
            raise StoreError(
                f"{source.file.path}: {engine.version} has no kernel for {fmt}{_beside(layer.input)} ({name!r}); "
                f"the nearest that it has is {engine.instead(fmt, layer.input)}, or keep the layer",
                settings={"keep": name},
            )
        multiple = engine.multiple_of(fmt, layer.input)
        if rows_of.get(name, rows) % multiple or cols % multiple:
            raise StoreError(
                f"{source.file.path}: {engine.version} has kernels for sizes that are multiples of {multiple}, "
                f"and {name!r} is {rows_of.get(name, rows)} x {cols}; keep the layer",
                settings={"keep": name},
            )


def promises(name: str, shape: tuple[int, ...], fmt: Format, rounded: str | None = None) -> list[TensorSpec]:
    parts = fmt.part_shapes(shape)
    (data_dtype, data_shape), (scale_dtype, scale_shape) = parts["data"], parts["scales"]
    scales = TensorSpec.of(f"{name}_scale", scale_shape, None, scale_dtype)
    container = _scheme_of(fmt, rounded).container
    if container == _PACKED:
        width = data_shape[-1] * data_dtype.itemsize // 4
        packed = TensorSpec.of(f"{name}_packed", (*data_shape[:-1], width), None, torch.int32)
        return [packed, scales, TensorSpec.of(f"{name}_shape", (2,), None, torch.int64)]
    if container == _MXFP4:
        return [TensorSpec.of(f"{name}_packed", data_shape, None, data_dtype), scales]
    if container == _NVFP4:
        base = TensorSpec.of(f"{name}_global_scale", (1,), None, torch.float32)
        return [base, TensorSpec.of(f"{name}_packed", data_shape, None, data_dtype), scales]
    return [TensorSpec.of(name, data_shape, None, data_dtype), scales]


def _pack(encoded: Encoded, layer: OutputTensor, where: str) -> list[Tensor]:
    assert encoded.scales is not None
    container, data = _scheme_of(encoded.fmt, layer.input).container, encoded.data
    if container == _PACKED:
        if data.shape[-1] * data.dtype.itemsize % 4:
            raise StoreError(f"{where}: rows of {encoded.shape[-1]} do not fill whole int32 words; keep the layer")
        if data.dtype == torch.int8:  # stored as q + 128, as int4 is as q + 8
            data = data.view(torch.uint8) ^ 128
        return [data.view(torch.int32), encoded.scales, torch.tensor(encoded.shape)]
    if container == _NVFP4:
        assert encoded.base is not None
        return [encoded.base.reciprocal().reshape(1), data, encoded.scales]
    return [data, encoded.scales]


def _joined_groups(source: FolderSource, layers: Sequence[OutputTensor]) -> list[list[str]]:
    """The layers that engines compute as one, as the model's view has them.

    Those must have one format, and inputs in one; so must all experts of a layer, each of which reads its own inputs.
    """
    by_name = {layer.sources[0]: layer for layer in layers}
    experts: dict[str, list[str]] = {}
    for name in by_name:
        if expert := split_expert(name):
            experts.setdefault(expert[0], []).append(name)
    for group in (*source.view.joined, *experts.values()):
        named = {
            name: f"{layer.fmt.name}{_beside(layer.input)}"
            if layer.fmt is not None and layer.is_packed
            else "not packed"
            for name in group
            if (layer := by_name[name])
        }
        other = next((name for name in group if named[name] != named[group[0]]), None)
        if other is not None:
            raise StoreError(
                f"{source.file.path}: {group[0]!r} is {named[group[0]]}, {other!r} {named[other]}; "
                "engines compute them as one layer, so give them one format"
            )
    return [list(group) for group in source.view.joined]


# Keys and values in FP8, one scale for a tensor: vLLM takes 1 where the file has none.
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def quantization_config(layers: Sequence[OutputTensor], kv: KVFormats | None = None) -> dict[str, Any]:
    """What config.json says: a group for each pair of formats, by the names of its layers; others are ignored."""
    modules: dict[tuple[Format, str | None], list[str]] = {}
    ignored = []
    for layer in layers:
        module = layer.sources[0].removesuffix(".weight")
        if layer.fmt is not None and layer.is_packed:
            modules.setdefault((layer.fmt, layer.input), []).append(module)
        elif layer.sources[0].endswith(".weight") and len(layer.records[0].shape) == 2:
            ignored.append(module)
    groups = {
        f"group_{number}": {
            "targets": names,
            "weights": _scheme_of(*pair).weights,
            "input_activations": _scheme_of(*pair).inputs,
            "output_activations": None,
            "format": _scheme_of(*pair).container,
        }
        for number, (pair, names) in enumerate(modules.items())
    }
    containers = {_scheme_of(*pair).container for pair in modules}
    return {
        "quant_method": TARGET,
        "quantization_status": "compressed",
        "format": next(iter(containers)) if len(containers) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": sorted({*ignored, "lm_head"} - {name for names in modules.values() for name in names}),
        "kv_cache_scheme": KV_SCHEME if kv is not None and kv.is_all("fp8_e4m3_row") else None,
        "global_compression_ratio": None,
    }
