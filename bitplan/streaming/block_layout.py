"""BlockLayout: one block's parameters, each in its format, in one flat byte buffer.

A block crosses the bus in one copy, so all its tensors lie in one buffer, the same on the host and in a slot of the
device. A layout is a pure function of shapes, types and formats:

    | q.weight data | q.weight scales | k.weight data | ... | norm.weight data |      every offset a multiple of 256

On the device a parameter is read in its own type. Where the format is that type, the parameter is a view of the slot
and nothing is computed; else it is decoded into a scratch buffer, which has a layout of its own (only the decoded
parameters). If nearly all of a block is decoded, the rest (norms, biases) is copied into the scratch as well, and the
slot is free for another block while this one computes. Both layouts are fixed between step boundaries: a byte offset
names a number wherever the block lies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode, explain_decode
from bitplan.formats.format import Format

ALIGNMENT = 256  # of every part, as in CUDA's allocator; vector loads need it
PADDING = "padding"
COPIED_SHARE = 1 / 16  # of a block's bytes, at most, are copied into the scratch in their own type


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter's shape and type in the model."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """One part of an Encoded (codes, scales, ...) in the buffer."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Piece:
    """One parameter: its format in transfer, its parts, and its place in the scratch (None: used in the slot)."""

    name: str
    spec: ParameterSpec
    fmt: Format
    parts: Mapping[str, Part]
    decoded: Part | None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def is_own_type(self) -> bool:
        """Whether the bytes that are sent are the parameter's own."""
        return _is_own_type(self.fmt, self.spec)

    def encoded(self, buffer: Tensor) -> Encoded:
        """The parameter as the buffer holds it; views."""
        return Encoded(self.fmt, self.spec.shape, **{name: part.view(buffer) for name, part in self.parts.items()})

    def write(self, buffer: Tensor, encoded: Encoded) -> None:
        """Put an encoded parameter where it belongs."""
        for name, tensor in encoded.parts.items():
            self.parts[name].view(buffer).copy_(tensor)

    def weight(self, slot: Tensor, scratch: Tensor) -> Tensor:
        """The parameter in its own type: in the slot, or in the scratch, where `decode_into` has put it."""
        return self.parts["data"].view(slot) if self.decoded is None else self.decoded.view(scratch)

    def has_kernel(self, slot: Tensor) -> bool:
        """Whether one Triton kernel decodes the parameter."""
        return slot.is_cuda and explain_decode(self.encoded(slot), self.spec.dtype).implementation == "triton"

    def decode_into(self, slot: Tensor, scratch: Tensor) -> None:
        """Expand the parameter into the scratch; on CUDA by Triton, on the current stream, without waiting."""
        if self.decoded is None:
            return
        target = self.decoded.view(scratch)
        if self.fmt.is_cast:
            target.copy_(self.parts["data"].view(slot))
            return
        encoded = self.encoded(slot)
        if self.has_kernel(slot):
            from bitplan.formats.triton_codec import DECODERS  # loads Triton

            DECODERS[self.fmt.name](encoded, self.spec.dtype, out=target)
        else:
            target.copy_(decode(encoded, self.spec.dtype))


@dataclass(frozen=True)
class BlockLayout:
    """Where each parameter of one block lies; a transfer of the block copies `nbytes`."""

    pieces: Mapping[str, Piece]
    nbytes: int
    scratch_nbytes: int

    @cached_property
    def bytes_by_format(self) -> dict[str, int]:
        """Bytes by format; gaps between parts count as padding, so that the sum is `nbytes`."""
        sizes: Counter[str] = Counter()
        for piece in self.pieces.values():
            sizes[piece.fmt.name] += piece.nbytes
        sizes[PADDING] = self.nbytes - sizes.total()
        return {name: nbytes for name, nbytes in sizes.items() if nbytes}

    @cached_property
    def leaves_slot(self) -> bool:
        """Whether the slot is no longer read once the block is decoded."""
        return all(piece.decoded is not None for piece in self.pieces.values())

    @property
    def formats(self) -> dict[str, str]:
        return {name: piece.fmt.name for name, piece in self.pieces.items()}

    def has_kernels(self, slot: Tensor) -> bool:
        """Whether decoding is copies and Triton kernels alone."""
        packed = [one for one in self.pieces.values() if one.decoded is not None and not one.fmt.is_cast]
        return all(one.has_kernel(slot) for one in packed)

    def decode_into(self, slot: Tensor, scratch: Tensor) -> None:
        for piece in self.pieces.values():
            piece.decode_into(slot, scratch)


def lay_out(specs: Mapping[str, ParameterSpec], formats: Mapping[str, Format]) -> BlockLayout:
    """The layout of parameters in these formats, in the order of `specs`."""
    own = {name for name, spec in specs.items() if _is_own_type(formats[name], spec)}
    whole = sum(formats[name].nbytes(spec.shape) for name, spec in specs.items())
    if sum(specs[name].nbytes for name in own) <= COPIED_SHARE * whole:
        own = set()
    pieces, end, scratch_end = {}, 0, 0
    for name, spec in specs.items():
        fmt, parts = formats[name], {}
        for part_name, (dtype, shape) in fmt.part_shapes(spec.shape).items():
            parts[part_name] = Part(aligned(end), dtype, shape)
            end = parts[part_name].offset + parts[part_name].nbytes
        decoded = None
        if name not in own:
            decoded = Part(aligned(scratch_end), spec.dtype, spec.shape)
            scratch_end = decoded.offset + decoded.nbytes
        pieces[name] = Piece(name, spec, fmt, parts, decoded)
    return BlockLayout(pieces, aligned(end), aligned(scratch_end))


def _is_own_type(fmt: Format, spec: ParameterSpec) -> bool:
    return fmt.is_cast and fmt.storage == spec.dtype


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
