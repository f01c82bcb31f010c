"""Reads any tensor of any file some rows at a time, for passes over a whole checkpoint in bounded memory.

A plain tensor comes in pieces along its first axis. A packed tensor comes as `Encoded` matrices of some rows, wherever
its parts lie: beside each other (bitplan's safetensors), under two names (gpt-oss's blocks and scales, in both namings)
or interleaved (GGUF). Scales can be read without the codes, which take sixteen times as many bytes, if they are stored
apart. A format with one scale for the whole tensor, or with tiles of several rows, comes whole.

Shapes are compared before any data is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bitplan.base.errors import FileFormatError, FormatError
from bitplan.files.gguf_tensors import GGUFTensors
from bitplan.files.safetensors_tensors import NativeTensors, part_name
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.formats import Encoded, get_format
from bitplan.formats.format import Format
from bitplan.plan.check_manifest import base_names

PIECE_BYTES = 16 * 2**20


class StoredScales(NamedTuple):
    """Scales as stored, and their base if the format has one."""

    scales: Tensor
    base: Tensor | None


@dataclass(frozen=True)
class PackedTensor(TensorSpec):
    """A packed tensor that is read in `steps` along its first axis: steps start to stop, as [rows, cols].

    With one step it is read whole, in its own shape. `grid` is the shape of its scales, by which blocks are counted.
    """

    _: KW_ONLY
    grid: tuple[int, ...]
    steps: int
    read: Callable[[int, int], Encoded]
    read_scales: Callable[[int, int], StoredScales] | None = None

    def spans(self) -> Iterator[tuple[int, int]]:
        return spans(self.steps, self.nbytes)


def spans(steps: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Start and stop of pieces of at most PIECE_BYTES, or of a single step if that is larger."""
    width = max(1, PIECE_BYTES * steps // max(nbytes, 1))
    for start in range(0, steps, width):
        yield start, min(start + width, steps)


def packed_tensor(file: TensorFile, name: str) -> PackedTensor:
    """A tensor in a format of bitplan's, by the file's metadata; a plain cast has no blocks, and is read whole."""
    spec = file.spec(name)
    fmt, shape = get_format(spec.format), spec.shape
    by_rows = fmt.block.rows == 1 and len(shape) > 1
    if by_rows and fmt.is_opaque and isinstance(file, GGUFTensors | NativeTensors):
        return _opaque(file, name, fmt, shape)
    if by_rows and isinstance(file, GGUFTensors):
        return _interleaved(file, name, fmt, shape)
    parts = fmt.part_shapes(shape)
    grid = parts["scales"][1] if "scales" in parts else ()
    if by_rows and isinstance(file, NativeTensors):
        base = part_name(name, "base") if "base" in parts else None
        names = part_name(name, "data"), part_name(name, "scales")
        return _two_tensors(file, names, fmt, shape, grid, _read_base(file, base))
    read = functools.partial(_read_whole, file, name)
    return PackedTensor.of(name, shape, fmt, nbytes=spec.nbytes, grid=grid, steps=1, read=read)


def scales_name(data: str) -> str:
    """The name of the scales of these codes: gpt-oss's `scales` for `blocks`, else bitplan's NAME.scales for NAME."""
    return data.removesuffix("blocks") + "scales" if data.endswith("blocks") else f"{data}.scales"


def base_name(file: TensorFile, data: str) -> str | None:
    """The tensor of the file that holds the base of these codes' scales, if there is one."""
    return next((name for name in base_names(data) if name in file.specs), None)


def packed_pair(file: TensorFile, data: str, scales: str, fmt: Format, base: float | str | None = None) -> PackedTensor:
    """Codes [..., blocks, n] or [..., blocks x n] and scales [..., blocks] that a file keeps as two plain tensors.

    `base` is a number, or the name of the tensor that holds it.
    """
    if not isinstance(file, NativeTensors) or fmt.block.rows != 1 or fmt.block.cols is None or fmt.scales is None:
        raise FormatError(
            f"{file.path}: {data!r}: a pair of codes and scales is read from safetensors, in block formats"
        )
    codes, scale_spec = file.spec(data), file.spec(scales)
    for spec, dtype in ((codes, fmt.storage), (scale_spec, fmt.scales.dtype)):
        if spec.torch_dtype.itemsize != dtype.itemsize or spec.encoded:
            raise FileFormatError(f"{file.path}: {spec.name!r} must be {dtype} in {fmt.name}, got {spec.format}")
    grid, width = scale_spec.shape, fmt.data_cols(fmt.block.cols)
    if not grid or codes.shape not in ((*grid, width), (*grid[:-1], grid[-1] * width)):
        raise FileFormatError(
            f"{file.path}: {data!r} is {codes.shape}, its scales {scales!r} are {grid}; "
            f"codes of {fmt.name} must be {(*grid, width)}, {width} for each scale"
        )
    if fmt.scales.needs_base and base is None:
        raise FormatError(f"{file.path}: {data!r}: scales of {fmt.name} are multiples of a base, and there is none")
    if isinstance(base, str) and (fault := base_fault(file, base)):
        raise FileFormatError(f"{file.path}: {data!r}: {fault}")
    shape = (*grid[:-1], grid[-1] * fmt.block.cols)
    factor = torch.tensor(base) if isinstance(base, float) else _read_base(file, base)
    return _two_tensors(file, (data, scales), fmt, shape, grid, factor)


def base_fault(file: TensorFile, name: str) -> str | None:
    """Why a tensor cannot be the base of scales; None where it is one float."""
    spec = file.spec(name)
    if math.prod(spec.shape) == 1 and spec.torch_dtype.is_floating_point and not spec.encoded:
        return None
    return f"the base of scales must be one float, and {name!r} is {spec.format} of shape {spec.shape}"


def _read_base(file: NativeTensors, name: str | None) -> Tensor | None:
    return None if name is None else file.checkpoint.read(name).float().reshape(())


def _two_tensors(
    file: NativeTensors,
    names: tuple[str, str],
    fmt: Format,
    shape: tuple[int, ...],
    grid: tuple[int, ...],
    base: Tensor | None,
) -> PackedTensor:
    """Blocks lie along rows, so that some rows are a slice of the first axis of both tensors."""
    assert fmt.scales is not None
    checkpoint, scale_dtype, one_row = file.checkpoint, fmt.scales.dtype, len(grid) == 1
    steps, across = 1 if one_row else grid[0], grid[-1]
    rows = math.prod(grid[:-1])
    cols = math.prod(shape) // rows if rows else 0
    nbytes = sum(checkpoint.tensors[name].nbytes for name in names) + (0 if base is None else base.nbytes)

    def rows_of(name: str, start: int, stop: int, dtype: torch.dtype, width: int) -> Tensor:
        rows_read = checkpoint.read(name) if one_row else checkpoint.read_rows(name, start, stop)
        return rows_read.view(dtype).reshape(rows // steps * (stop - start), width)

    def read_scales(start: int, stop: int) -> StoredScales:
        return StoredScales(rows_of(names[1], start, stop, scale_dtype, across), base)

    def read(start: int, stop: int) -> Encoded:
        data = rows_of(names[0], start, stop, fmt.storage, fmt.data_cols(cols))
        return Encoded(fmt, (data.shape[0], cols), data, read_scales(start, stop).scales, base)

    count = steps if math.prod(shape) else 0
    spec = PackedTensor.of(names[0], shape, fmt, nbytes=nbytes, grid=grid, steps=count, read=read)
    return replace(spec, read_scales=read_scales)


def _interleaved(file: GGUFTensors, name: str, fmt: Format, shape: tuple[int, ...]) -> PackedTensor:
    assert fmt.scales is not None
    scale_dtype, entry = fmt.scales.dtype, file.file.tensors[name]
    cols, across = shape[-1], fmt.grid((1, shape[-1]))[1]

    def read_scales(start: int, stop: int) -> StoredScales:
        blocks = file.file.read_raw_rows(name, start, stop).reshape((stop - start) * across, -1)
        scales = blocks[:, : scale_dtype.itemsize].contiguous().view(scale_dtype)
        return StoredScales(scales.reshape(stop - start, across), None)

    def read(start: int, stop: int) -> Encoded:
        raw = file.file.read_raw_rows(name, start, stop)
        return Encoded.from_bytes(fmt, (stop - start, cols), raw.numpy().data.cast("B"))

    rows, grid = math.prod(shape[:-1]), (*shape[:-1], across)
    spec = PackedTensor.of(name, shape, fmt, nbytes=entry.nbytes, grid=grid, steps=rows, read=read)
    return replace(spec, read_scales=read_scales)


def _opaque(file: GGUFTensors | NativeTensors, name: str, fmt: Format, shape: tuple[int, ...]) -> PackedTensor:
    """Read bytes of some rows whose blocks hold their own scales, in either container."""
    cols = fmt.matrix_shape(shape)[1]

    def read(start: int, stop: int) -> Encoded:
        if isinstance(file, GGUFTensors):
            raw = file.file.read_raw_rows(name, start, stop)
        else:
            raw = file.checkpoint.read_rows(part_name(name, "data"), start, stop)
        data = raw.reshape(-1, fmt.data_cols(cols))
        return Encoded(fmt, (data.shape[0], cols), data)

    steps = math.prod(shape[:-1]) if isinstance(file, GGUFTensors) else shape[0]
    grid = (*fmt.part_shapes(shape)["data"][1][:-1], fmt.grid(shape)[1])
    return PackedTensor.of(name, shape, fmt, grid=grid, steps=steps if math.prod(shape) else 0, read=read)


def _read_whole(file: TensorFile, name: str, start: int, stop: int) -> Encoded:
    assert (start, stop) == (0, 1)
    tensor = file.read(name)
    assert isinstance(tensor, Encoded)
    return tensor


def plain_pieces(file: TensorFile, name: str) -> Iterator[tuple[int, Tensor]]:
    """Pieces of a tensor of numbers, each with its offset in the flattened tensor; a plain cast is one too."""
    spec = file.spec(name)
    if spec.shape and not spec.encoded and isinstance(file, NativeTensors):
        row_numbers = torch.Size(spec.shape[1:]).numel()
        for start, stop in spans(spec.shape[0], spec.nbytes):
            yield start * row_numbers, file.checkpoint.read_rows(spec.name, start, stop)
    elif spec.shape and isinstance(file, GGUFTensors) and not spec.format.startswith("gguf:"):
        dtype = get_format(spec.format).storage if spec.encoded else spec.torch_dtype
        for start, stop in spans(math.prod(spec.shape[:-1]), spec.nbytes):
            yield start * spec.shape[-1], file.file.read_raw_rows(name, start, stop).view(dtype)
    else:
        tensor = file.read(name)
        yield 0, tensor.data if isinstance(tensor, Encoded) else tensor
