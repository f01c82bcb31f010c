"""GPTQ folders, as AutoGPTQ and GPTQModel write them.

| part of MODULE | type | shape |
|---|---|---|
| qweight | int32 | [columns * bits / 32, rows]: a stream of codes down each output |
| qzeros | int32 | [groups, rows * bits / 32]: the same across outputs; in format "gptq" less one, not in "gptq_v2" |
| scales | float16 (or bfloat16, float32) | [groups, rows] |
| g_idx | int32 | [columns]: the group of each column; with desc_act in any order |
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bitplan.files.schemes.integers import (
    IntegerGroups,
    decode_integers,
    integer_weight,
    keep_packed,
    unpack_words,
)
from bitplan.files.schemes.tensors import FLOATS, QuantizedFolder, SchemeWeight

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded
    from bitplan.formats.format import Format

SUFFIX = ".qweight"


def list_weights(folder: QuantizedFolder) -> Iterator[SchemeWeight]:
    kind = folder.settings.get("checkpoint_format", folder.settings.get("format", "gptq"))
    if kind not in ("gptq", "gptq_v2"):
        folder.refuse(f"GPTQ in format {str(kind)[:40]!r}")
    folder.setting("pack_dtype", "int32", "int32")
    bits = folder.setting("bits", 4, 2, 3, 4, 8)
    ordered = not folder.setting("desc_act", False, True, False)
    symmetric = folder.setting("sym", True, True, False)
    may_vary = bool(folder.settings.get("dynamic"))
    for name in folder.checkpoint.tensors:
        if name.endswith(SUFFIX):
            owner = name.removesuffix(SUFFIX)
            layout = _layout(folder, owner, bits, ordered, symmetric, may_vary)
            parts = [f"{owner}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")]
            read = functools.partial(_read, folder, owner, 1 if kind == "gptq" else 0)
            yield integer_weight(folder, f"{owner}.weight", layout, parts, read)


def _layout(
    folder: QuantizedFolder, owner: str, bits: int, ordered: bool, symmetric: bool, may_vary: bool
) -> IntegerGroups:
    words = folder.part(f"{owner}.qweight", ("int32",), (None, None), of=owner)
    scales = folder.part(f"{owner}.scales", FLOATS, (None, words.shape[1]), of=owner)
    index = folder.checkpoint.tensors.get(f"{owner}.g_idx")
    cols = words.shape[0] * 32 // bits
    if index is not None:
        folder.part(index.name, ("int32",), (None,), of=owner)
        if may_vary and index.shape[0] and words.shape[0] * 32 % index.shape[0] == 0:
            bits = words.shape[0] * 32 // index.shape[0]
        cols = index.shape[0]
    groups, rows = scales.shape
    if bits not in (2, 3, 4, 8) or -(-cols * bits // 32) != words.shape[0] or not groups or not cols or not rows:
        folder.stop(
            owner,
            f"{list(words.shape)} int32 do not hold {cols} columns of {bits} bits, {list(scales.shape)} scales",
        )
    group = -(-cols // groups)
    stated = folder.settings.get("group_size", -1)
    if groups > 1 and type(stated) is int and stated > 0 and not may_vary:
        group = stated
    if -(-cols // group) != groups:
        folder.stop(owner, f"{groups} groups of {group} are not {cols} columns")
    folder.part(f"{owner}.qzeros", ("int32",), (groups, -(-rows * bits // 32)), of=owner)
    return IntegerGroups(rows, cols, bits, group, scales.dtype, symmetric, ordered or groups == 1)


def _read(
    folder: QuantizedFolder, owner: str, less: int, layout: IntegerGroups, fmt: Format | None
) -> Tensor | Encoded:
    scales = folder.read(f"{owner}.scales").T
    zeros = unpack_words(folder.read(f"{owner}.qzeros"), layout.bits, layout.rows).T
    zeros = (zeros + less) & (2**layout.bits - 1)  # the largest code plus one wraps to zero, as in their kernels
    groups = _groups(folder, owner, layout)
    codes = unpack_words(folder.read(f"{owner}.qweight").T, layout.bits, layout.cols)
    if fmt is None:
        return decode_integers(layout, codes, scales, zeros, groups)
    if bool((zeros != 2 ** (layout.bits - 1)).any()):
        folder.stop(owner, "config.json says sym, but zero points differ from the middle; set sym to false there")
    if groups is not None:
        folder.stop(owner, "config.json says no desc_act, but g_idx is not in order; set desc_act to true there")
    return keep_packed(layout, fmt, codes, scales)


def _groups(folder: QuantizedFolder, owner: str, layout: IntegerGroups) -> Tensor | None:
    """GPTQ's group index of each column (`g_idx`); None if groups of columns lie in order."""
    import torch

    if f"{owner}.g_idx" not in folder.checkpoint.tensors:
        return None
    groups = folder.read(f"{owner}.g_idx").long()
    if bool(((groups < 0) | (groups >= layout.groups)).any()):
        folder.stop(
            owner,
            f"g_idx must be groups from 0 to {layout.groups - 1}, got {int(groups.min())} and {int(groups.max())}",
        )
    return None if bool((groups == torch.arange(layout.cols) // layout.group).all()) else groups
