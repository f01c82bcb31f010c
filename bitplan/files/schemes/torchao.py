"""torchao folders in torchao's safetensors layout: parts of MODULE.weight lie under MODULE._weight_PART.

The metadata of each file has `tensor_names`, a JSON list, and for every name JSON with `_type`, the class of the
tensor, `_data`, its attributes, and `_tensor_data_names`, its parts.

| class | parts | comes as |
|---|---|---|
| Float8Tensor | qdata, scale | FP8 by tensor, row or tile |
| Int8Tensor, IntxUnpackedToInt8Tensor | qdata (int8: a byte for each code), scale, zero_point | integers in groups |
| MXTensor | qdata, scale, not swizzled | mxfp8_e4m3, mxfp4 |
| NVFP4Tensor | qdata, scale, not swizzled, per_tensor_scale | nvfp4 |
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bitplan.base.documents import show
from bitplan.base.errors import FileFormatError
from bitplan.base.records import parse_json
from bitplan.files.schemes.floats import TILE, fp4_weight, fp8_weight
from bitplan.files.schemes.integers import IntegerGroups, decode_integers, integer_weight, keep_packed
from bitplan.files.schemes.tensors import FLOATS, QuantizedFolder, SchemeWeight, is_tile

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded
    from bitplan.formats.format import Format

NAMES = "tensor_names"
_ACTIVATIONS = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")


def list_weights(folder: QuantizedFolder) -> Iterator[SchemeWeight]:
    for file in folder.checkpoint.files:
        where = f"{file.path}: metadata"
        for name in _names(file.metadata.get(NAMES), where):
            facts = parse_json(file.metadata.get(name, "null").encode(), where=f"{where} {name[:80]!r}")
            if not isinstance(facts, dict) or not isinstance(facts.get("_type"), str):
                raise FileFormatError(f"{where}: {name[:80]!r} must be an object with _type, got {show(facts)}")
            if facts["_type"] != "Tensor":
                yield _weight(folder, name, facts)


def _names(text: str | None, where: str) -> list[str]:
    if text is None:
        return []
    names = parse_json(text.encode(), where=f"{where} {NAMES!r}")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FileFormatError(f"{where}: {NAMES} must be a list of names, got {show(names)}")
    return names


def _weight(folder: QuantizedFolder, name: str, facts: Mapping[str, Any]) -> SchemeWeight:
    module, _, local = name.rpartition(".")
    prefix = f"{module}._{local}_"
    kind, data = facts["_type"], facts.get("_data")
    if not isinstance(data, dict):
        folder.stop(name, f"{kind} has no _data")
    if f"{prefix}act_pre_scale" in folder.checkpoint.tensors:
        folder.refuse(f"{name!r} multiplies its inputs first (act_pre_scale)")
    beside = tuple(name_beside for part in _ACTIVATIONS if (name_beside := prefix + part) in folder.checkpoint.tensors)
    block = data.get("block_size")
    if kind == "Float8Tensor":
        tile = (block[0], block[1]) if isinstance(block, list) and is_tile(block) else TILE
        return fp8_weight(folder, name, f"{prefix}qdata", f"{prefix}scale", tile, beside)
    if kind in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):
        bits = 8 if kind == "Int8Tensor" else _bits(data.get("target_dtype"))
        return _integers(folder, name, prefix, block, bits, beside)
    if data.get("is_swizzled_scales") is not False or (kind, block) not in (("MXTensor", 32), ("NVFP4Tensor", 16)):
        folder.refuse(f"{name!r} is a {kind[:60]} of torchao")
    if kind == "NVFP4Tensor":
        base = f"{prefix}per_tensor_scale"
        factor = base if base in folder.checkpoint.tensors else None
        parts = f"{prefix}qdata", f"{prefix}scale", factor, beside
        return fp4_weight(folder, name, *parts, fmt="nvfp4", base_divides=False)
    codes = folder.checkpoint.tensors.get(f"{prefix}qdata")
    if codes is not None and codes.dtype == "uint8":
        return fp4_weight(folder, name, codes.name, f"{prefix}scale", None, beside)
    return fp8_weight(folder, name, f"{prefix}qdata", f"{prefix}scale", (1, 32), beside)


def _bits(dtype: object) -> int:
    """Bits of the codes by {"_type": "torch.dtype", "_data": "int4"}; a byte holds any of them."""
    name = dtype.get("_data") if isinstance(dtype, dict) else None
    return int(name[3]) if isinstance(name, str) and re.fullmatch("int[1-8]", name) else 8


def _integers(
    folder: QuantizedFolder, name: str, prefix: str, block: object, bits: int, beside: tuple[str, ...]
) -> SchemeWeight:
    codes = folder.part(f"{prefix}qdata", ("int8",), (None, None), of=name)
    rows, cols = codes.shape
    scales = folder.part(f"{prefix}scale", FLOATS, of=name)
    if not isinstance(block, list) or len(block) != 2 or block[0] != 1 or type(block[1]) is not int or block[1] < 1:
        folder.stop(name, f"groups of columns in a row are read, its block_size is {show(block)}")
    group = min(block[1], cols)
    if not rows or not cols or cols % group or scales.nbytes // _width(scales.dtype) != rows * (cols // group):
        folder.stop(name, f"{list(scales.shape)} scales do not fit groups of {group} in {[rows, cols]} codes")
    zero = folder.checkpoint.tensors.get(f"{prefix}zero_point")
    if zero is not None:
        folder.part(zero.name, (*FLOATS, "int8", "int32", "int64"), scales.shape, of=name)
    # Zero points of symmetric weights are stored too; whether all are zero is checked when they are read.
    has_zero = zero is not None and any(folder.checkpoint.read_bytes(zero.name))
    layout = IntegerGroups(rows, cols, bits, group, scales.dtype, not has_zero)
    parts = [f"{prefix}qdata", scales.name, *([] if zero is None else [zero.name]), *beside]
    return integer_weight(folder, name, layout, parts, functools.partial(_read, folder, name, prefix))


def _width(dtype_name: str) -> int:
    return 4 if dtype_name == "float32" else 2


def _read(
    folder: QuantizedFolder, name: str, prefix: str, layout: IntegerGroups, fmt: Format | None
) -> Tensor | Encoded:
    import torch

    signed, half = folder.read(f"{prefix}qdata"), 2 ** (layout.bits - 1)
    if bool(((signed < -half) | (signed > half - 1)).any()):
        folder.stop(name, f"its codes must be from {-half} to {half - 1}")
    codes = (signed.view(torch.uint8) + half) & 255
    scales = folder.read(f"{prefix}scale").reshape(layout.rows, layout.groups)
    if fmt is not None:
        return keep_packed(layout, fmt, codes, scales)
    zeros: Tensor | int = half
    if not layout.symmetric:
        zeros = folder.read(f"{prefix}zero_point").to(torch.float32).reshape(layout.rows, layout.groups) + half
    return decode_integers(layout, codes, scales, zeros)
