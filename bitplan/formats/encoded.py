"""Encoded: a tensor held in a format, together with its own scales; and a module that holds one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitplan.base.errors import FormatError
from bitplan.formats.format import Format, PartShapes
from bitplan.formats.registry import get_format


@dataclass(frozen=True, eq=False)  # comparing tensors gives no single bool; compare to_bytes()
class Encoded:
    """A tensor in a format: its codes, and the scales that belong to exactly these codes."""

    fmt: Format
    shape: tuple[int, ...]
    data: Tensor
    scales: Tensor | None = None
    base: Tensor | None = None
    zero_point: Tensor | None = None

    def __post_init__(self) -> None:
        expected = self.fmt.part_shapes(self.shape)
        present = self.parts
        if expected.keys() != present.keys():
            raise FormatError(
                f"{self.fmt.name} of shape {self.shape} has the parts {list(expected)}, got {list(present)}"
            )
        for part, (dtype, shape) in expected.items():
            tensor = present[part]
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise FormatError(
                    f"{self.fmt.name} of shape {self.shape}: part {part!r} must be {dtype} {shape}, "
                    f"got {tensor.dtype} {tuple(tensor.shape)}"
                )

    def __repr__(self) -> str:
        return f"Encoded({self.fmt.name}, shape={self.shape}, nbytes={self.nbytes}, device={self.data.device})"

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that it consists of (data, scales, ...), by name, in storage order."""
        named = {"data": self.data, "scales": self.scales, "base": self.base, "zero_point": self.zero_point}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return sum(tensor.nbytes for tensor in self.parts.values())

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Encoded:
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.parts.items()}
        return Encoded(self.fmt, self.shape, **moved)

    def codes(self) -> Tensor:
        """The unpacked working form: one code per number (int8, uint8 or the storage type), padding included.

        [blocks, numbers per block] where codes are packed; else `data` as it is.
        """
        if self.fmt.is_opaque:
            raise FormatError(f"{self.fmt.name}: codes and scales share its blocks; decode() has the numbers")
        if self.fmt.packing is None:
            return self.data
        cols = self.fmt.padded_cols(self.fmt.matrix_shape(self.shape)[1])
        per_block = cols if self.fmt.block.cols is None else self.fmt.block.cols
        width = self.fmt.packing.packed_length(per_block)
        packed = self.data.reshape(-1, width) if width else self.data.reshape(self.fmt.matrix_shape(self.shape)[0], 0)
        return self.fmt.packing.unpack(packed, per_block)

    def to_bytes(self) -> bytes:
        """The packed storage form: the parts one after another, or block by block for interleaved formats."""
        if self.fmt.interleaved:
            assert self.scales is not None
            count = self.scales.numel()
            parts = [_as_bytes(part).reshape(count, part.nbytes // max(count, 1)) for part in (self.scales, self.data)]
            return torch.cat(parts, dim=1).numpy().tobytes()
        return b"".join(_as_bytes(tensor).numpy().tobytes() for tensor in self.parts.values())

    @classmethod
    def from_bytes(cls, fmt: Format | str, shape: tuple[int, ...], buffer: bytes | bytearray | memoryview) -> Encoded:
        """The inverse of `to_bytes`: shape and format say how long the buffer must be."""
        fmt, shape = get_format(fmt), tuple(shape)
        if len(buffer) != fmt.nbytes(shape):
            raise FormatError(
                f"{fmt.name} of shape {shape} takes {fmt.nbytes(shape)} bytes, got {len(buffer)}; "
                "give all that `to_bytes` wrote"
            )
        raw = (
            torch.frombuffer(bytearray(buffer), dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
        )
        layout = fmt.part_shapes(shape)
        return cls(fmt, shape, **(_split_interleaved(raw, layout) if fmt.interleaved else _split_parts(raw, layout)))


class EncodedModule(nn.Module, ABC):
    """A module in the place of a Parameter, which it holds encoded, or its transpose; its name is the Parameter's."""

    shape: tuple[int, ...]
    transposed: bool = False

    @property
    @abstractmethod
    def encoded(self) -> Encoded: ...

    @abstractmethod
    def replace(self, encoded: Encoded) -> None:
        """Replace the bytes by others of the same format and shape."""


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _split_parts(raw: Tensor, layout: PartShapes) -> dict[str, Tensor]:
    parts, start = {}, 0
    for name, (dtype, shape) in layout.items():
        stop = start + math.prod(shape) * dtype.itemsize
        parts[name] = raw[start:stop].clone().view(dtype).reshape(shape)
        start = stop
    return parts


def _split_interleaved(raw: Tensor, layout: PartShapes) -> dict[str, Tensor]:
    (data_dtype, data_shape), (scale_dtype, scale_shape) = layout["data"], layout["scales"]
    count = math.prod(scale_shape)
    blocks = raw.reshape(count, -1) if count else raw.reshape(0, scale_dtype.itemsize)
    scales = blocks[:, : scale_dtype.itemsize].contiguous().view(scale_dtype).reshape(scale_shape)
    data = blocks[:, scale_dtype.itemsize :].contiguous().view(data_dtype).reshape(data_shape)
    return {"data": data, "scales": scales}
