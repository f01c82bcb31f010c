"""To a folder for MLX, as mlx_lm reads it: weights in uint32 words, scales and biases beside them.

| format | in MLX |
|---|---|
| int4_g32, int4_g64, int4_g128 | affine, 4 bits: codes as they are, biases = -8 scales, bfloat16 |
| int8_g64, int8_g128 | affine, 8 bits: codes plus 128, biases = -128 scales, in the scales' own type |
| q4_1_gguf | affine, 4 bits, groups of 32: scales and minima as they are, float16 |
| q4_0_gguf, q8_0_gguf | affine, 4 or 8 bits, groups of 32, float16 |
| mxfp4, mxfp8_e4m3 | mxfp4, mxfp8: codes and E8M0 scales as they are |

MLX computes code x scale + bias. A power of two times a scale is exact, so these are our numbers; MLX rounds them to
the type of the scales when it computes. Every affine group costs a scale and a bias, so a format with its own minimum
(q4_1_gguf) holds more in the same bytes than int4_g32 does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.base.errors import StoreError
from bitplan.base.records import on_failure
from bitplan.files.engines.folder import FolderExport, FolderSource, open_folder
from bitplan.files.engines.targets import ExportRequest, OutputTensor, experts_in_order
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats import Encoded
from bitplan.formats.format import Format
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.plan.format_choices import Substitutes
from bitplan.plan.structure.families import FAMILIES, split_expert

TARGET = "mlx"


@dataclass(frozen=True)
class MlxQuantization:
    """How MLX describes one of our formats in config.json, and the type in which it stores scales."""

    bits: int
    group_size: int
    mode: str
    scales: torch.dtype

    @property
    def entry(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


QUANTIZATIONS = {
    **{f"int4_g{size}": MlxQuantization(4, size, "affine", torch.bfloat16) for size in (32, 64, 128)},
    "int8_g64": MlxQuantization(8, 64, "affine", torch.bfloat16),
    "int8_g128": MlxQuantization(8, 128, "affine", torch.float32),
    "q4_1_gguf": MlxQuantization(4, 32, "affine", torch.float16),
    "q4_0_gguf": MlxQuantization(4, 32, "affine", torch.float16),
    "q8_0_gguf": MlxQuantization(8, 32, "affine", torch.float16),
    "mxfp4": MlxQuantization(4, 32, "mxfp4", torch.uint8),
    "mxfp8_e4m3": MlxQuantization(8, 32, "mxfp8", torch.uint8),
}
SUBSTITUTES = Substitutes(
    "int8_g64",
    {"int4_g128": ("int4_g64", "int4_g32"), "int4_g64": ("int4_g32",), "int8_g128": ("int8_g64", "q8_0_gguf")}
    | {"int8_g64": ("q8_0_gguf",)},
)
_FLOAT16_SUBSTITUTES = Substitutes("q8_0_gguf", {})
# Formats that people ask for and MLX does not hold, with the nearest it does.
_NEAREST = {
    "nvfp4": ("MLX's layers have no scale for the whole tensor", "mxfp4 or int4_g32"),
    "int8_row": ("MLX has a scale per group, not per row", "int8_g64"),
    "fp8_e4m3_row": ("MLX has a scale per group, not per row", "mxfp8_e4m3"),
}
STAYS = "MLX packs linear layers and embeddings alone"
# What mlx_lm calls the experts of a layer, which it holds as one tensor.
_EXPERTS = {
    getattr(family.experts, role): f"{role}_proj"
    for family in FAMILIES.values()
    if family.experts is not None
    for role in ("gate", "up", "down")
}


def prepare(request: ExportRequest) -> FolderExport:
    """Plan every tensor for MLX; all that can be refused is, before a weight is read."""
    substitutes = _FLOAT16_SUBSTITUTES if str(request.formats).endswith("_gguf") else SUBSTITUTES
    source = open_folder(request, TARGET, substitutes)
    with on_failure(source.file.close):
        if source.config.get("model_type") == "gpt_oss":
            raise StoreError(
                f"{request.source}: mlx_lm reads gpt-oss in Hugging Face's layout with MXFP4 experts as it is; "
                "`bitplan gpt-oss convert FOLDER OUT` writes that layout"
            )
        layers = [_layer(source, new, names) for new, names in _outputs(source).items()]
        if not any(layer.is_packed for layer in layers):
            raise StoreError(f"{request.source}: no layer would be packed; {STAYS}")
    config = {**older_keys(source.config), **source.config, "quantization": quantization(layers)}
    return FolderExport(request, TARGET, source, layers, config, _pack)


def _outputs(source: FolderSource) -> dict[str, list[str]]:
    """The output's names, each with the tensors of the source that it is made of."""
    outputs: dict[str, list[str]] = {}
    for name in source.file.specs:
        new = name
        if expert := split_expert(name):
            holder, _, part = expert
            layer, _, kind = part.rpartition(".")
            if layer not in _EXPERTS:
                raise StoreError(f"{source.file.path}: mlx_lm has no place for {name!r} among a layer's experts")
            new = f"{holder.removesuffix('.experts')}.switch_mlp.{_EXPERTS[layer]}.{kind}"
        outputs.setdefault(new, []).append(name)
    return outputs


def _layer(source: FolderSource, new: str, names: Sequence[str]) -> OutputTensor:
    file, first = source.file, names[0]
    is_stacked = split_expert(first) is not None
    sources = experts_in_order(file, new, names) if is_stacked else tuple(names)
    fmt, reason = source.format_of(first)
    if others := {source.format_of(name)[0] for name in sources} - {fmt}:
        raise StoreError(
            f"{file.path}: the {len(sources)} experts of {new!r} are one tensor in MLX and need one format, the plan "
            f"has {fmt.name if fmt else 'none'} and {', '.join(other.name if other else 'none' for other in others)}"
        )
    shape = file.spec(first).shape_in_model
    count = (len(sources),) if is_stacked else ()
    if fmt is None or fmt.is_cast or not source.is_linear(first, or_embedding=True):
        plain = source.unpacked(first, fmt, reason if fmt is None or fmt.is_cast else STAYS)
        promise = plain.records[0]
        return OutputTensor(
            sources, plain.fmt, plain.reason, (TensorSpec.of(new, (*count, *shape), None, promise.dtype),)
        )
    if fmt.name not in QUANTIZATIONS:
        why, instead = _NEAREST.get(fmt.name, ("no mode of MLX has these numbers", ", ".join(QUANTIZATIONS)))
        raise StoreError(f"{file.path}: MLX has no {fmt.name} ({first!r}): {why}; take {instead}")
    return OutputTensor(sources, fmt, reason, promises(new, (*count, *shape), fmt))


def promises(name: str, shape: tuple[int, ...], fmt: Format) -> tuple[TensorSpec, ...]:
    layout = QUANTIZATIONS[fmt.name]
    stem, lead, columns = name.removesuffix(".weight"), shape[:-1], shape[-1]
    words = TensorSpec.of(name, (*lead, columns * layout.bits // 32), None, torch.uint32)
    scales = TensorSpec.of(f"{stem}.scales", (*lead, columns // layout.group_size), None, layout.scales)
    if layout.mode != "affine":
        return words, scales
    return words, scales, TensorSpec.of(f"{stem}.biases", scales.shape, None, layout.scales)


def _pack(encoded: Encoded, _layer: OutputTensor, where: str) -> list[Tensor]:
    layout = QUANTIZATIONS[encoded.fmt.name]
    if isinstance(encoded.fmt, GgufBlocks):
        blocks = encoded.fmt.layout.unpack(encoded.data.reshape(-1, encoded.fmt.layout.block_bytes))
        assert blocks.dmin is not None
        pairs = blocks.codes[:, 0::2] | blocks.codes[:, 1::2] << 4
        shape = encoded.shape[:-1]
        return [_words(pairs.reshape(*shape, -1)), blocks.d.reshape(*shape, -1), blocks.dmin.reshape(*shape, -1)]
    assert encoded.scales is not None
    if layout.mode != "affine":
        return [_words(encoded.data.view(torch.uint8)), encoded.scales.view(torch.uint8)]
    if layout.bits == 8:
        codes, zero = encoded.data.view(torch.uint8) ^ 128, 128
    elif encoded.fmt.name == "q4_0_gguf":  # a byte holds numbers j and j + 16 of its block; here j and j + 1
        halves = encoded.data.reshape(*encoded.shape[:-1], -1, 16)
        numbers = torch.cat([halves & 15, halves >> 4], dim=-1)
        codes, zero = (numbers[..., 0::2] | numbers[..., 1::2] << 4).flatten(-2), 8
    else:
        codes, zero = encoded.data, 8
    biases = encoded.scales * -zero
    if not bool(biases.isfinite().all()):
        raise StoreError(
            f"{where}: scales times {zero} lie beyond {biases.dtype}, so MLX cannot hold its biases; "
            "choose another format"
        )
    return [_words(codes), encoded.scales, biases]


def _words(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint32)


def quantization(layers: Sequence[OutputTensor]) -> dict[str, Any]:
    """What config.json says: the most frequent format for all, and an entry for each layer that has another."""
    packed = {
        layer.records[0].name.removesuffix(".weight"): QUANTIZATIONS[layer.fmt.name].entry
        for layer in layers
        if layer.fmt is not None and layer.is_packed
    }
    common = dict(Counter(tuple(entry.items()) for entry in packed.values()).most_common(1)[0][0])
    return {**common, **{path: entry for path, entry in packed.items() if entry != common}}


def older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers 5 says under new names, under those that mlx_lm reads; without them it takes its defaults."""
    keys: dict[str, Any] = {}
    rotations = config.get("rope_parameters") or {}
    if "full_attention" in rotations:  # a table for each kind of layer
        keys["rope_local_base_freq"] = rotations.get("sliding_attention", {}).get("rope_theta")
        rotations = rotations["full_attention"]
    keys["rope_theta"] = rotations.get("rope_theta")
    if rotations.get("rope_type", "default") != "default":
        keys["rope_scaling"] = {key: value for key, value in rotations.items() if key != "rope_theta"}
    keys["num_experts"] = config.get("num_local_experts")
    kinds = config.get("layer_types") or []
    if config.get("model_type") == "gemma3_text" and "full_attention" in kinds:
        keys["sliding_window_pattern"] = kinds.index("full_attention") + 1
    return {key: value for key, value in keys.items() if value is not None}
