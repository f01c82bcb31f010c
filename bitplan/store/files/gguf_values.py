"""Values of GGUF's metadata. A long array stays as bytes of the file; its items are made when needed.

A tokenizer has hundreds of thousands of strings and numbers; as Python objects they take ten times their bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGUFValueType

STRUCT_CODES = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


class GGUFArray(Sequence[Any]):
    """An array of numbers or strings as bytes of the file, already checked; equal to a sequence of the same items."""

    def __init__(self, item_type: GGUFValueType, count: int, raw: bytes) -> None:
        self.item_type, self.raw, self._count = item_type, raw, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        if self.item_type != GGUFValueType.STRING:
            return (item for (item,) in struct.iter_unpack(f"<{STRUCT_CODES[self.item_type]}", self.raw))
        return self._strings()

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GGUFArray) and other.item_type == self.item_type:
            return self.raw == other.raw
        if not isinstance(other, Sequence) or isinstance(other, str) or len(other) != len(self):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._count} items of {self.item_type.name}>"

    def _strings(self) -> Iterator[str]:
        at = 0
        for _ in range(self._count):
            length = int.from_bytes(self.raw[at : at + 8], "little")
            yield self.raw[at + 8 : at + 8 + length].decode()
            at += 8 + length


@dataclass(frozen=True)
class GGUFValue:
    """One metadata value with its type in the file.

    An array has a sequence as value and names the type of its items; the items of an array of arrays
    are `GGUFValue` themselves.
    """

    type: GGUFValueType
    value: Any
    item_type: GGUFValueType | None = None
