"""To a compressed-tensors folder, which vLLM and transformers load: linear layers packed, everything else as it was.

| format | in compressed-tensors |
|---|---|
| int4_g32 | pack-quantized: eight codes to an int32, a scale per 32 |
| int8_row, fp8_e4m3_row | int-quantized, float-quantized: codes as they are, a scale per row |
| fp8_e4m3_b128 | float-quantized, a scale per 128 x 128 tile |

Codes and scales are ours, byte for byte; the library multiplies them to the same numbers, in the scales' own type.
Layers that engines join into one (q, k and v; gate and up) must have one format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.errors import StoreError
from bitplan.formats import Encoded, Format, get_format
from bitplan.formats.codec import finite, readable
from bitplan.kernels import encode
from bitplan.plan import Plan
from bitplan.plan.roles import guess_role
from bitplan.store.export.targets import ExportReport, ExportRequest, ExportRow, OnBytes
from bitplan.store.files.headers import plan_for_file
from bitplan.store.files.open_files import open_tensors
from bitplan.store.files.tensor_file import Promise, TensorFile, Writer
from bitplan.store.packed_folder import (
    FolderContents,
    check_packed_output,
    cut_shards,
    read_config,
    side_files,
    write_packed_folder,
)


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors names a format of ours."""

    container: str
    weights: dict[str, Any]


def _scheme(container: str, bits: int, kind: str, strategy: str, **more: Any) -> Scheme:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    return Scheme(container, weights)


SCHEMES = {
    "int4_g32": _scheme("pack-quantized", 4, "int", "group", group_size=32),
    "int8_row": _scheme("int-quantized", 8, "int", "channel"),
    "fp8_e4m3_row": _scheme("float-quantized", 8, "float", "channel"),
    "fp8_e4m3_b128": _scheme("float-quantized", 8, "float", "block", block_structure=[128, 128]),
}
# Layers that engines compute as one.
_JOINED = (re.compile(r"(?P<block>.*)\.[qkv]_proj$"), re.compile(r"(?P<block>.*)\.(gate|up)_proj$"))
STAYS = "only linear layers are packed in compressed-tensors"


@dataclass(frozen=True)
class PackedLayer:
    """One weight of the source, and what it becomes; `fmt` None stays as it is."""

    source: str
    fmt: Format | None
    reason: str
    promises: tuple[Promise, ...]


def prepare(request: ExportRequest) -> CompressedTensorsExport:
    """Everything that can be refused is, before a weight is read."""
    if not request.source.is_dir():
        raise StoreError(f"{request.source}: a compressed-tensors folder is made of a model's folder, with its config")
    if request.importance is not None or request.part_bytes is not None or request.pretokenizer is not None:
        raise StoreError(f"{request.output}: --importance, --split and --pretokenizer are for GGUF")
    config = read_config(request.source)
    if "quantization_config" in config:
        raise StoreError(f"{request.source}: is quantized already; export the model that it was made from")
    file = open_tensors(request.source)
    try:
        check_packed_output(request.output, inputs=file.files, force=request.force)
        plan = plan_for_file(file, request.formats, keep=request.keep, only=request.only)
        layers = [_layer(file, plan, name) for name in file.specs]
        _check_joined(file, layers)
    except BaseException:
        file.close()
        raise
    return CompressedTensorsExport(request, file, config, layers)


def _layer(file: TensorFile, plan: Plan, name: str) -> PackedLayer:
    spec, entry = file.spec(name), plan.entries[name]
    fmt = None if entry.stored is not None else get_format(entry.choice.format)
    is_linear = name.endswith(".weight") and len(spec.shape) == 2 and guess_role(name) not in ("embed", "router")
    if fmt is None or fmt.is_cast or not is_linear:
        reason = entry.choice.reason if fmt is None or is_linear else STAYS
        if fmt is not None and fmt.is_cast:
            return PackedLayer(name, fmt, reason, (Promise(name, spec.shape, None, fmt.storage),))
        return PackedLayer(name, None, reason, (Promise(name, spec.shape, None, spec.dtype),))
    if fmt.name not in SCHEMES:
        raise StoreError(
            f"{file.path}: compressed-tensors has no {fmt.name} ({name!r}) that would hold these bytes; "
            f"take one of {', '.join(SCHEMES)}"
        )
    return PackedLayer(name, fmt, entry.choice.reason, tuple(_parts(name, spec.shape, fmt)))


def _parts(name: str, shape: tuple[int, ...], fmt: Format) -> list[Promise]:
    (data_dtype, data_shape), (scale_dtype, scale_shape) = (fmt.part_shapes(shape)[part] for part in ("data", "scales"))
    scales = Promise(f"{name}_scale", scale_shape, None, scale_dtype)
    if SCHEMES[fmt.name].container != "pack-quantized":
        return [Promise(name, data_shape, None, data_dtype), scales]
    packed = Promise(f"{name}_packed", (*data_shape[:-1], data_shape[-1] // 4), None, torch.int32)
    return [packed, scales, Promise(f"{name}_shape", (2,), None, torch.int64)]


def _check_joined(file: TensorFile, layers: Sequence[PackedLayer]) -> None:
    found: dict[tuple[int, str], tuple[str, str | None]] = {}
    for layer in layers:
        module = layer.source.removesuffix(".weight")
        own = None if layer.fmt is None or layer.fmt.is_cast else layer.fmt.name
        for number, pattern in enumerate(_JOINED):
            if (match := pattern.fullmatch(module)) and layer.source.endswith(".weight"):
                first, other = found.setdefault((number, match["block"]), (layer.source, own))
                if other != own:
                    raise StoreError(
                        f"{file.path}: {first!r} is {other or 'not packed'}, {layer.source!r} {own or 'not packed'}; "
                        "engines compute them as one layer, so give them one format"
                    )


def quantization_config(layers: Sequence[PackedLayer]) -> dict[str, Any]:
    """What config.json says: a group for each format, by the names of its layers; others are ignored by name."""
    modules: dict[str, list[str]] = {}
    ignored = []
    for layer in layers:
        if layer.fmt is not None and layer.fmt.name in SCHEMES:
            modules.setdefault(layer.fmt.name, []).append(layer.source.removesuffix(".weight"))
        elif layer.source.endswith(".weight") and len(layer.promises[0].shape) == 2:
            ignored.append(layer.source.removesuffix(".weight"))
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
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": next(iter(containers)) if len(containers) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": sorted({*ignored, "lm_head"}),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


class CompressedTensorsExport:
    """A prepared export; see `bitplan.store.export.targets`."""

    def __init__(
        self, request: ExportRequest, file: TensorFile, config: dict[str, Any], layers: list[PackedLayer]
    ) -> None:
        self._request, self._file, self._config = request, file, config
        self._layers = {promise.name: layer for layer in layers for promise in layer.promises}
        self._made: dict[str, Tensor] = {}
        rows = []
        for layer in layers:
            spec = file.spec(layer.source)
            name = layer.fmt.name if layer.fmt is not None else spec.format
            size = sum(promise.nbytes for promise in layer.promises)
            rows.append(
                ExportRow(layer.promises[0].name, layer.source, spec.shape, spec.format, name, layer.reason, size)
            )
        left_out = {alias: f"is {name!r}" for alias, name in file.tied.items()}
        self.report = ExportReport(str(request.source), str(request.output), "compressed-tensors", rows, left_out)
        if not any(layer.fmt is not None and layer.fmt.name in SCHEMES for layer in layers):
            file.close()
            raise StoreError(f"{request.source}: no layer would be packed; {STAYS}")

    def write(self, on_bytes: OnBytes | None = None) -> None:
        promises = [promise for layer in dict.fromkeys(self._layers.values()) for promise in layer.promises]
        config = {
            **self._config,
            "quantization_config": quantization_config(list(dict.fromkeys(self._layers.values()))),
        }
        contents = FolderContents(cut_shards(promises, {}), config, None, side_files(self._request.source))

        def write_shard(writer: Writer, own: Sequence[Promise]) -> None:
            for promise in own:
                writer.write(promise.name, self._part(promise.name))
                if on_bytes:
                    on_bytes(promise.nbytes, promise.name)

        write_packed_folder(self._request.output, contents, write_shard, force=self._request.force)
        self.report.files = sorted(str(path) for path in Path(self._request.output).iterdir())

    def close(self) -> None:
        self._file.close()

    def _part(self, name: str) -> Tensor:
        """The parts of a layer come one after the other: they are made together, and each is taken once."""
        if name not in self._made:
            layer = self._layers[name]
            self._made |= dict(zip((promise.name for promise in layer.promises), self._tensors(layer), strict=True))
        return self._made.pop(name)

    def _tensors(self, layer: PackedLayer) -> list[Tensor]:
        where = f"{self._file.path}: {layer.source}"
        if layer.fmt is None or layer.fmt.is_cast:
            item = self._file.read(layer.source)
            numbers = item.data if isinstance(item, Encoded) and item.fmt.is_cast else item
            assert isinstance(numbers, Tensor)
            return [numbers.to(layer.promises[0].dtype)]
        numbers = finite(readable(self._file.read_float(layer.source), where), self._request.nonfinite, where)
        encoded = encode(numbers, layer.fmt, scale_rule=self._request.scale_rule, name=where)
        assert encoded.scales is not None
        if SCHEMES[layer.fmt.name].container == "pack-quantized":
            return [encoded.data.view(torch.int32), encoded.scales, torch.tensor(encoded.shape)]
        return [encoded.data, encoded.scales]
