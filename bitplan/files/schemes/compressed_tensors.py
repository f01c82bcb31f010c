"""compressed-tensors folders, as llm-compressor writes them and vLLM reads them.

| format | parts of MODULE |
|---|---|
| pack-quantized | weight_packed (int32: codes plus half, lowest bits first), weight_scale, weight_shape |
| ... | and weight_zero_point (packed down the rows), weight_g_idx (the group of each column) |
| int-, float-, naive-quantized | weight (int8, FP8), weight_scale of tensor, rows, groups or tiles, weight_zero_point |
| nvfp4-, mxfp4-pack-quantized | weight_packed (uint8), weight_scale, weight_global_scale |

The groups of the config are not used: shapes and types of a module's parts show what they hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bitplan.files.schemes.floats import FP8, TILE, fp4_weight, fp8_weight
from bitplan.files.schemes.integers import (
    IntegerGroups,
    decode_integers,
    integer_weight,
    keep_packed,
    unpack_words,
)
from bitplan.files.schemes.tensors import FLOATS, QuantizedFolder, SchemeWeight, is_tile

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded
    from bitplan.formats.format import Format

FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense"),
)
# Scales of activations and of the cache of keys and values, which are not quantized here.
_LEFT_OUT = tuple(f"input_{part}" for part in ("scale", "zero_point", "global_scale", "g_idx"))
_LEFT_OUT += ("output_scale", "output_zero_point")


def list_weights(folder: QuantizedFolder) -> Iterator[SchemeWeight]:
    groups = _check_config(folder)
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]
    integers = [weight.get("num_bits") for weight in weights if weight.get("type", "int") == "int"]
    bits = {count for count in integers if type(count) is int}
    tile = next((weight["block_structure"] for weight in weights if is_tile(weight.get("block_structure"))), TILE)
    tensors = folder.checkpoint.tensors
    for name in tensors:
        owner, _, part = name.rpartition(".")
        beside = tuple(name_beside for suffix in _LEFT_OUT if (name_beside := f"{owner}.{suffix}") in tensors)
        if part == "weight_packed" and tensors[name].dtype == "uint8":
            base = f"{owner}.weight_global_scale"
            factor = base if base in tensors else None
            yield fp4_weight(folder, f"{owner}.weight", name, f"{owner}.weight_scale", factor, beside)
        elif part == "weight_packed":
            layout = _packed_layout(folder, owner, bits)
            yield _integers(folder, owner, name, layout, beside)
        elif part == "weight" and f"{owner}.weight_scale" in tensors and tensors[name].dtype in FP8:
            yield fp8_weight(folder, name, name, f"{owner}.weight_scale", (tile[0], tile[1]), beside)
        elif part == "weight" and f"{owner}.weight_scale" in tensors and tensors[name].dtype == "int8":
            yield _integers(folder, owner, name, _plain_layout(folder, owner), beside)


def _check_config(folder: QuantizedFolder) -> list[dict[str, Any]]:
    groups = folder.settings.get("config_groups")
    if not isinstance(groups, dict):
        folder.refuse("config.json: quantization_config has no config_groups")
    described = [group for group in groups.values() if isinstance(group, dict)]
    for settings in (folder.settings, *described):
        if settings.get("format") not in (None, *FORMATS):
            folder.refuse(f"compressed-tensors in format {str(settings['format'])[:40]!r}")
    for key in ("sparsity_config", "transform_config"):
        part = folder.settings.get(key)
        if isinstance(part, dict) and part and part.get("format", "") != "dense" and part.get("config_groups", True):
            folder.refuse(f"compressed-tensors with a {key}")
    return described


def _packed_layout(folder: QuantizedFolder, owner: str, known_bits: set[int]) -> IntegerGroups:
    words = folder.part(f"{owner}.weight_packed", ("int32",), (None, None), of=owner)
    rows, cols = folder.read_sizes(f"{owner}.weight_shape", 2, of=owner)
    fitting = [bits for bits in range(1, 9) if bits in known_bits and words.shape == (rows, -(-cols * bits // 32))]
    if len(fitting) != 1:
        folder.stop(
            owner,
            f"{list(words.shape)} int32 do not hold {rows} x {cols} codes of {sorted(known_bits)} bits",
        )
    scales = folder.part(f"{owner}.weight_scale", FLOATS, of=owner)
    group = _group(folder, owner, (rows, cols), scales.shape)
    groups = cols // group
    has_zero = f"{owner}.weight_zero_point" in folder.checkpoint.tensors
    if has_zero:
        packed = -(-rows * fitting[0] // 32)
        folder.part(f"{owner}.weight_zero_point", ("int32",), (packed, groups), of=owner)
    return IntegerGroups(rows, cols, fitting[0], group, scales.dtype, not has_zero, _in_order(folder, owner, cols))


def _plain_layout(folder: QuantizedFolder, owner: str) -> IntegerGroups:
    codes = folder.part(f"{owner}.weight", ("int8",), (None, None), of=owner)
    scales = folder.part(f"{owner}.weight_scale", FLOATS, of=owner)
    rows, cols = codes.shape
    group = _group(folder, owner, (rows, cols), scales.shape)
    has_zero = f"{owner}.weight_zero_point" in folder.checkpoint.tensors
    if has_zero:
        folder.part(f"{owner}.weight_zero_point", ("int8",), scales.shape, of=owner)
    return IntegerGroups(rows, cols, 8, group, scales.dtype, not has_zero, _in_order(folder, owner, cols))


def _group(folder: QuantizedFolder, owner: str, shape: tuple[int, int], scales: tuple[int, ...]) -> int:
    """Columns that share a scale: all, for scales of the tensor or of rows, or those of a group."""
    rows, cols = shape
    count = 1 if math.prod(scales) == 1 else scales[1] if len(scales) == 2 and scales[0] == rows else 0
    count = 1 if scales == (rows,) else count
    if not rows or not cols or not count or cols % count:
        folder.stop(owner, f"{list(scales)} scales fit neither rows nor groups of {list(shape)} codes")
    return cols // count


def _in_order(folder: QuantizedFolder, owner: str, cols: int) -> bool:
    if f"{owner}.weight_g_idx" not in folder.checkpoint.tensors:
        return True
    folder.part(f"{owner}.weight_g_idx", ("int32", "int64"), (cols,), of=owner)
    return False


def _integers(
    folder: QuantizedFolder, owner: str, codes: str, layout: IntegerGroups, beside: tuple[str, ...]
) -> SchemeWeight:
    parts = [codes, *(f"{owner}.weight_{part}" for part in ("scale", "shape", "zero_point", "g_idx")), *beside]
    read = functools.partial(_read, folder, owner, codes)
    return integer_weight(folder, f"{owner}.weight", layout, parts, read)


def _read(
    folder: QuantizedFolder, owner: str, name: str, layout: IntegerGroups, fmt: Format | None
) -> Tensor | Encoded:
    """Read the codes as unsigned integers, as they lie in packed words; int8 codes are shifted by half of the range."""
    import torch

    words, is_packed = folder.read(name), name.endswith("_packed")
    codes = unpack_words(words, layout.bits, layout.cols) if is_packed else words.view(torch.uint8) ^ 128
    scales = folder.read(f"{owner}.weight_scale").reshape(-1, layout.groups)
    scales = scales.expand(layout.rows, layout.groups)
    if fmt is not None:
        return keep_packed(layout, fmt, codes, scales)
    zeros: Tensor | int = 2 ** (layout.bits - 1)
    if not layout.symmetric:
        stored = folder.read(f"{owner}.weight_zero_point")
        zeros = unpack_words(stored.T, layout.bits, layout.rows).T if is_packed else stored.view(torch.uint8) ^ 128
        zeros = zeros.reshape(-1, layout.groups).expand(layout.rows, layout.groups)
    groups = None
    if not layout.in_order:
        groups = folder.read(f"{owner}.weight_g_idx").long()
        if bool((groups == -1).all()):  # it was never set: columns are in order
            groups = None
        elif bool(((groups < 0) | (groups >= layout.groups)).any()):
            folder.stop(owner, f"weight_g_idx must be groups from 0 to {layout.groups - 1}")
    return decode_integers(layout, codes, scales, zeros, groups)
