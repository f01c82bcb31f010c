"""To a compressed-tensors folder, which vLLM and transformers load: linear layers packed, everything else as it was.

| format | in compressed-tensors |
|---|---|
| int4_g32, int4_g64, int4_g128 | pack-quantized: eight codes to an int32, a scale per group |
| int8_row, int8_g64, int8_g128 | pack-quantized: four codes to an int32, a scale per row or group |
| fp8_e4m3_row, fp8_e4m3_b128 | float-quantized: codes as they are, a scale per row or per 128 x 128 tile |
| mxfp8_e4m3 | mxfp8-quantized: codes and E8M0 scales as they are |
| mxfp4 | mxfp4-pack-quantized: codes and E8M0 scales as they are |
| nvfp4 | nvfp4-pack-quantized: codes and E4M3 scales as they are, the base as its reciprocal |

Codes and scales are ours, bit for bit. 8-bit integers are pack-quantized because vLLM has no kernel for int-quantized
weights without quantized activations. Layers that engines join into one (q, k and v; gate and up) must have one format,
and in nvfp4 they share one base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.base.errors import StoreError
from bitplan.base.records import on_failure
from bitplan.files.engines.folder import FolderExport, FolderSource, OutputLayer, open_folder
from bitplan.files.engines.targets import ExportRequest
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats import Encoded, Format
from bitplan.plan.format_choices import Substitutes

TARGET = "compressed-tensors"


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors names a format of ours."""

    container: str
    weights: dict[str, Any]


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


def prepare(request: ExportRequest) -> FolderExport:
    """Everything that can be refused is, before a weight is read."""
    source = open_folder(request, TARGET, SUBSTITUTES)
    with on_failure(source.file.close):
        layers = [_layer(source, name) for name in source.file.specs]
        joined = _joined_groups(source, layers)
        if not any(layer.is_packed for layer in layers):
            raise StoreError(f"{request.source}: no layer would be packed; {STAYS}")
    config = {**source.config, "quantization_config": quantization_config(layers)}
    return FolderExport(request, TARGET, source, layers, config, _pack, joined)


def _layer(source: FolderSource, name: str) -> OutputLayer:
    spec = source.file.spec(name)
    fmt, reason = source.format_of(name)
    if fmt is None or fmt.is_cast or not source.is_linear(name):
        return source.unpacked(name, fmt, reason if fmt is None or fmt.is_cast else STAYS)
    if fmt.name not in SCHEMES:
        raise StoreError(
            f"{source.file.path}: compressed-tensors has no {fmt.name} ({name!r}); take one of {', '.join(SCHEMES)}"
        )
    return OutputLayer((name,), fmt, reason, tuple(promises(name, spec.shape, fmt)))


def promises(name: str, shape: tuple[int, ...], fmt: Format) -> list[TensorSpec]:
    parts = fmt.part_shapes(shape)
    (data_dtype, data_shape), (scale_dtype, scale_shape) = parts["data"], parts["scales"]
    scales = TensorSpec.of(f"{name}_scale", scale_shape, None, scale_dtype)
    container = SCHEMES[fmt.name].container
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


def _pack(encoded: Encoded, where: str) -> list[Tensor]:
    assert encoded.scales is not None
    container, data = SCHEMES[encoded.fmt.name].container, encoded.data
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


def _joined_groups(source: FolderSource, layers: Sequence[OutputLayer]) -> list[list[str]]:
    """The layers that engines compute as one, as the model's view has them; those must have one format."""
    by_name = {layer.sources[0]: layer for layer in layers}
    groups = [[by_name[name] for name in names] for names in source.view.joined]
    for group in groups:
        names = [layer.fmt.name if layer.fmt is not None and layer.is_packed else "not packed" for layer in group]
        for layer, own in zip(group, names, strict=True):
            if own != names[0]:
                raise StoreError(
                    f"{source.file.path}: {group[0].sources[0]!r} is {names[0]}, {layer.sources[0]!r} {own}; "
                    "engines compute them as one layer, so give them one format"
                )
    return [[layer.sources[0] for layer in group] for group in groups]


def quantization_config(layers: Sequence[OutputLayer]) -> dict[str, Any]:
    """What config.json says: a group for each format, by the names of its layers; others are ignored by name."""
    modules: dict[str, list[str]] = {}
    ignored = []
    for layer in layers:
        module = layer.sources[0].removesuffix(".weight")
        if layer.fmt is not None and layer.is_packed:
            modules.setdefault(layer.fmt.name, []).append(module)
        elif layer.sources[0].endswith(".weight") and len(layer.promises[0].shape) == 2:
            ignored.append(module)
    groups = {
        f"group_{number}": {
            "targets": names,
            "weights": SCHEMES[fmt].weights,
            "input_activations": None,
            "output_activations": None,
            "format": SCHEMES[fmt].container,
        }
        for number, (fmt, names) in enumerate(modules.items())
    }
    containers = {SCHEMES[fmt].container for fmt in modules}
    return {
        "quant_method": TARGET,
        "quantization_status": "compressed",
        "format": next(iter(containers)) if len(containers) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": sorted({*ignored, "lm_head"}),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
