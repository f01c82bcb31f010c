"""Integers with a scale for each group of columns: what GPTQ, AWQ, compressed-tensors and torchao have in common.

w = (code - zero) * scale. If every zero point is the middle of the codes and bitplan has a format of as many bits that
holds the scales exactly, the codes stay packed; if its blocks are smaller than the groups, a scale is written several
times. Else numbers are decoded as in these libraries: exact product, rounded once to the type of the scales.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitplan.files.schemes.tensors import QuantizedFolder, SchemeWeight
from bitplan.formats.elements import IntegerElement
from bitplan.formats.format import Format
from bitplan.formats.registry import list_formats
from bitplan.formats.scale_rules import ScaleStorage

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded

PIECE_NUMBERS = 2**22


@dataclass(frozen=True)
class IntegerGroups:
    """A matrix [rows, cols] of unsigned codes of `bits` bits, a scale for every `group` of columns.

    It is no record of a tensor, but how codes lie in a folder: what a `Format` is where bitplan has one for them.
    """

    rows: int
    cols: int
    bits: int
    group: int
    scale_type: str
    symmetric: bool
    in_order: bool = True  # column c belongs to group c // group

    @property
    def label(self) -> str:
        groups = "row" if self.group == self.cols else f"g{self.group}"
        return f"{'' if self.symmetric else 'u'}int{self.bits}_{groups}{'' if self.in_order else '_reordered'}"

    @property
    def groups(self) -> int:
        return -(-self.cols // self.group)

    def format(self) -> tuple[Format | None, str]:
        """The format that holds codes and scales unchanged, or None; and the reason."""
        if not self.in_order:
            return None, "columns of a group lie apart (desc_act, g_idx)"
        if not self.symmetric:
            return None, "zero points of groups, which no format of bitplan has"
        fitting = [fmt for fmt in list_formats() if self._holds(fmt)]
        if not fitting:
            return (
                None,
                f"no format of bitplan has {self.bits} bits, groups of {self.group} and {self.scale_type} scales",
            )
        fmt = max(fitting, key=lambda fmt: (self._block(fmt), fmt.scales.dtype_name == self.scale_type))  # type: ignore[union-attr]
        times = self.group // self._block(fmt)
        return fmt, "the same codes and scales" + (f", each scale {times} times" if times > 1 else "")

    def _block(self, fmt: Format) -> int:
        return fmt.block.cols or self.cols

    def _holds(self, fmt: Format) -> bool:
        element, half = fmt.element, 2 ** (self.bits - 1)
        if not isinstance(element, IntegerElement) or (element.low, element.high) != (-half, half - 1):
            return False
        if fmt.block.rows != 1 or type(fmt.scales) is not ScaleStorage:
            return False
        exact = fmt.scales.dtype_name in (self.scale_type, "float32")
        return exact and self.cols % self.group == 0 and self.group % self._block(fmt) == 0


def integer_weight(
    folder: QuantizedFolder,
    name: str,
    layout: IntegerGroups,
    parts: Iterable[str],
    read: Callable[[IntegerGroups, Format | None], Tensor | Encoded],
) -> SchemeWeight:
    """A weight that lies in `layout`; `read` gives it packed in a format of ours, or with None decoded."""
    fmt, reason = layout.format()
    stored = tuple(part for part in parts if part in folder.checkpoint.tensors)
    fmt_name, shape = fmt.name if fmt else None, (layout.rows, layout.cols)
    reads = functools.partial(read, layout, fmt)
    return SchemeWeight(
        name, shape, layout.scale_type, format=fmt_name, parts=stored, label=layout.label, reason=reason, read=reads
    )


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """[rows, n] int32 that hold a stream of `bits`-bit codes, lowest bits first -> [rows, count] uint8."""
    import torch

    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw[:, :count]
    out = torch.empty(raw.shape[0], count, dtype=torch.uint8)
    first = torch.arange(count) * bits
    byte, shift = first >> 3, (first & 7).to(torch.int32)
    mask = 2**bits - 1
    for rows in pieces(raw.shape[0], count):
        if bits == 4:
            nibbles = torch.stack((raw[rows] & 15, raw[rows] >> 4), dim=-1)
            out[rows] = nibbles.flatten(-2)[:, :count]
            continue
        wide = torch.nn.functional.pad(raw[rows], (0, 1)).to(torch.int32)
        out[rows] = ((wide[:, byte] | wide[:, byte + 1] << 8) >> shift & mask).to(torch.uint8)
    return out


def pieces(rows: int, cols: int) -> Iterator[slice]:
    """Slices of rows, so that temporaries stay small."""
    step = max(1, PIECE_NUMBERS // max(cols, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def keep_packed(layout: IntegerGroups, fmt: Format, codes: Tensor, scales: Tensor) -> Encoded:
    """Unsigned codes [rows, cols] and scales [rows, groups] as an Encoded of `fmt`."""
    import torch

    from bitplan.formats import Encoded

    shape = (layout.rows, layout.cols)
    assert fmt.scales is not None
    parts = fmt.part_shapes(shape)
    data = torch.empty(parts["data"][1], dtype=parts["data"][0])
    block = fmt.block.cols or layout.cols
    for rows in pieces(*shape):
        signed = (codes[rows].to(torch.int16) - 2 ** (layout.bits - 1)).to(torch.int8)
        if fmt.packing is not None:
            signed = fmt.packing.pack(signed.reshape(-1, block)).reshape(signed.shape[0], -1)
        data[rows] = signed.view(data.dtype)
    wide = scales.to(fmt.scales.dtype).repeat_interleave(layout.group // block, dim=1)
    return Encoded(fmt, shape, data, wide.reshape(parts["scales"][1]).contiguous())


def decode_integers(
    layout: IntegerGroups, codes: Tensor, scales: Tensor, zeros: Tensor | int, groups: Tensor | None = None
) -> Tensor:
    """Numbers [rows, cols] in the type of the scales; `groups` names the group of each column."""
    import torch

    of = torch.arange(layout.cols) // layout.group if groups is None else groups
    out = torch.empty(layout.rows, layout.cols, dtype=scales.dtype)
    for rows in pieces(layout.rows, layout.cols):
        zero = zeros if isinstance(zeros, int) else zeros[rows].to(torch.float32)[:, of]
        out[rows] = ((codes[rows].to(torch.float32) - zero) * scales[rows].to(torch.float32)[:, of]).to(out.dtype)
    return out
