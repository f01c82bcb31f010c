"""AWQ folders in AutoAWQ's "gemm" layout: codes and zero points of eight outputs to an int32, in AWQ's own order.

| part of MODULE | type | shape |
|---|---|---|
| qweight | int32 | [columns, rows / 8] |
| qzeros | int32 | [groups, rows / 8] |
| scales | float16 (or bfloat16, float32) | [groups, rows] |

Nibble n of a word, counted from the lowest, belongs to output 8 * word + ORDER[n].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bitplan.files.schemes.integers import IntegerGroups, decode_integers, integer_weight, unpack_words
from bitplan.files.schemes.tensors import FLOATS, QuantizedFolder, SchemeWeight

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats.format import Format

SUFFIX = ".qweight"
BITS, PER_WORD = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def list_weights(folder: QuantizedFolder) -> Iterator[SchemeWeight]:
    version = str(folder.settings.get("version", folder.settings.get("format", "gemm"))).lower()
    if version != "gemm":
        folder.refuse(f"AWQ in layout {version[:40]!r}")
    folder.setting("bits" if "bits" in folder.settings else "w_bit", BITS, BITS)
    for name in folder.checkpoint.tensors:
        if name.endswith(SUFFIX):
            owner = name.removesuffix(SUFFIX)
            layout = _layout(folder, owner)
            parts = [f"{owner}.{part}" for part in ("qweight", "qzeros", "scales")]
            yield integer_weight(folder, f"{owner}.weight", layout, parts, functools.partial(_read, folder, owner))


def _layout(folder: QuantizedFolder, owner: str) -> IntegerGroups:
    words = folder.part(f"{owner}.qweight", ("int32",), (None, None), of=owner)
    cols, rows = words.shape[0], words.shape[1] * PER_WORD
    scales = folder.part(f"{owner}.scales", FLOATS, (None, rows), of=owner)
    groups = scales.shape[0]
    if not groups or not rows or not cols or cols % groups:
        folder.stop(owner, f"{cols} columns do not divide into the {groups} groups of {list(scales.shape)} scales")
    folder.part(f"{owner}.qzeros", ("int32",), (groups, words.shape[1]), of=owner)
    return IntegerGroups(rows, cols, BITS, cols // groups, scales.dtype, symmetric=False)


def _read(folder: QuantizedFolder, owner: str, layout: IntegerGroups, _format: Format | None) -> Tensor:
    codes = _in_order(folder.read(f"{owner}.qweight"), layout.rows)
    zeros = _in_order(folder.read(f"{owner}.qzeros"), layout.rows)
    return decode_integers(layout, codes.T, folder.read(f"{owner}.scales").T, zeros.T)


def _in_order(words: Tensor, rows: int) -> Tensor:
    """Unpack AWQ's words [n, rows / 8] to codes [n, rows], whose order within a word AWQ interleaves."""
    positions = sorted(range(PER_WORD), key=ORDER.__getitem__)
    return unpack_words(words, BITS, rows).reshape(len(words), -1, PER_WORD)[..., positions].reshape(len(words), rows)
