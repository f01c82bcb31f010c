"""CPU twins of `bitplan.formats`' encoders and decoders: which formats have one, and how tensors reach the loops.

A tensor is cut into pieces of whole blocks, several for each thread. The loops work on float32 only: other types are
cast in a buffer that stays in the cache, a run of blocks at a time. Importing this module imports numba.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.errors import FormatError, NonFiniteError
from bitplan.formats import codec as definition
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format
from bitplan.formats.gguf.ggml_encoders import GgufMxfp4
from bitplan.formats.registry import get_format
from bitplan.formats.scales.rules import reciprocal
from bitplan.kernels.base.jit import on_threads
from bitplan.kernels.codec import cpu_decode, cpu_encode
from bitplan.kernels.codec.gguf_block_search import CompiledSearch

BLOCK_SEARCH = CompiledSearch()  # for GGUF's blocks, whose scales are searched
Array = np.ndarray[Any, Any]
Encoder = Callable[[Tensor, Format], tuple[Tensor, Tensor | None]]
Decoder = Callable[[Encoded, torch.dtype], Tensor]
# Kernels take flat arrays.
EncodeKernel = Callable[[Array, Array, Array], int]  # words, codes, scales -> the largest magnitude
DecodeKernel = Callable[[Array, Array, Array], None]  # codes, float32 scales, float32 numbers
RoundKernel = Callable[[Array, Any, Array], None]  # words, 1 / scale, codes

PIECES_PER_THREAD = 4  # a thread that falls behind leaves pieces to the others
SMALLEST_PIECE = 2**17
RUN = 2**15  # numbers: 128 KiB of float32, which torch casts on the calling thread
LONG_ROW = 2**20  # threads share a row of this length
NEAR_THE_END = 64  # words before the end of a binade, where ggml's logarithm may round up

# The types as which kernels read numbers that numpy has no type for.
_WORDS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


# ---- encoding ------------------------------------------------------------------------------------------------------


def _block_encoder(kernel: EncodeKernel) -> Encoder:
    def encode(matrix: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
        data, scales = _empty_parts(matrix, fmt)
        if not matrix.numel():
            return data, scales.zero_()
        numbers, codes, scale_array = matrix.reshape(-1), _array(data), _array(scales)
        size, width = numbers.numel() // scale_array.size, codes.size // scale_array.size
        read = _reader(numbers, size)

        def work(piece: slice) -> int:
            return max(
                kernel(words, codes[run.start * width : run.stop * width], scale_array[run])
                for run, words in read(piece)
            )

        _check_finite(on_threads(work, _pieces(scale_array.size, size)), fmt)
        return data, scales

    return encode


def _row_encoder(kernel: EncodeKernel, round_to_codes: RoundKernel) -> Encoder:
    """An encoder for blocks of any length; `round_to_codes` is the second half of `kernel`."""

    def in_matrices(words: Array, codes: Array, scales: Array) -> int:
        return kernel(words.reshape(scales.size, -1), codes.reshape(scales.size, -1), scales)

    encode_whole_rows = _block_encoder(in_matrices)

    def encode(matrix: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
        if fmt.block.cols is not None or matrix.shape[1] < LONG_ROW:
            return encode_whole_rows(matrix, fmt)
        data, scales = _empty_parts(matrix, fmt)
        for row, codes, scale in zip(matrix, data, scales, strict=True):
            scale.copy_(_scale_of_long_row(row, fmt))
            _round_long_row(row, reciprocal(scale).numpy()[0], _array(codes), round_to_codes)
        return data, scales

    return encode


def _scale_of_long_row(row: Tensor, fmt: Format) -> Tensor:
    read = _reader(row, 1)

    def work(piece: slice) -> int:
        return max(int(cpu_encode.largest_magnitude(words)) for _, words in read(piece))

    tops = on_threads(work, _pieces(row.numel(), 1))
    _check_finite(tops, fmt)
    assert fmt.scales is not None
    limit = torch.tensor([max(tops)], dtype=torch.int32).view(torch.float32)
    return fmt.scales.store(fmt.scale_for(limit), None)


def _round_long_row(row: Tensor, inverse: Any, codes: Array, round_to_codes: RoundKernel) -> None:
    read = _reader(row, 1)

    def work(piece: slice) -> None:
        for run, words in read(piece):
            round_to_codes(words, inverse, codes[run])

    on_threads(work, _pieces(row.numel(), 1))


def _encode_bfloat16(matrix: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    if matrix.dtype != torch.float32:
        return matrix.to(fmt.storage), None
    data = torch.empty(matrix.shape, dtype=fmt.storage)
    words, codes = _array(matrix).view(np.uint32), _array(data)
    tops = on_threads(lambda piece: cpu_encode.encode_bfloat16(words[piece], codes[piece]), _pieces(words.size, 1))
    if max(tops, default=0) > cpu_encode.NOT_FINITE:  # torch decides which NaN a NaN becomes
        data.copy_(matrix)
    return data, None


def _encode_mxfp4_gguf(words: Array, codes: Array, scales: Array) -> int:
    worst: int = cpu_encode.encode_mxfp4_gguf(words, codes, scales, _rounds_up())
    return worst


@functools.cache
def _rounds_up() -> Array:
    """For each float32 exponent, the first word that ggml's rounded logarithm lifts to the next binade."""
    fmt = get_format("mxfp4_gguf")
    ends = torch.arange(1, 256, dtype=torch.int32) << 23
    near = (ends.unsqueeze(1) - torch.arange(NEAR_THE_END, 0, -1, dtype=torch.int32)).view(torch.float32)
    lifted = fmt.scale_for(near) > fmt.scale_for(near[:, :1])
    first = ends - lifted.sum(dim=1, dtype=torch.int32)
    return np.append(first.numpy().view(np.uint32), np.uint32(0xFFFFFFFF))


def _empty_parts(matrix: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    assert fmt.scales is not None
    rows, cols = matrix.shape
    across = 1 if fmt.block.cols is None else cols // fmt.block.cols
    data = torch.empty((rows, fmt.data_cols(cols)), dtype=fmt.storage)
    return data, torch.empty((rows, across), dtype=fmt.scales.dtype)


def _check_finite(tops: list[int], fmt: Format) -> None:
    if max(tops) >= _first_refused(fmt):
        raise NonFiniteError(f"{fmt.name}: a number to encode, or its scale, is not finite")


@functools.cache
def _first_refused(fmt: Format) -> int:
    """The first float32 word that the definition refuses: not finite, or too large for the format."""
    block = torch.zeros(1, fmt.block.cols or 1)

    def is_refused(word: int) -> bool:
        block[0, 0] = torch.tensor(word, dtype=torch.int32).view(torch.float32)
        try:
            definition.encode(block, fmt)
        except FormatError:
            return True
        return False

    return bisect.bisect_left(range(cpu_encode.NOT_FINITE), True, key=is_refused)


# ---- decoding ------------------------------------------------------------------------------------------------------


def _decoder(kernel: DecodeKernel) -> Decoder:
    def decode(encoded: Encoded, dtype: torch.dtype) -> Tensor:
        out = torch.empty(encoded.shape, dtype=dtype)
        if not out.numel():
            return out
        assert encoded.scales is not None
        numbers, codes, table = out.view(-1), _array(encoded.data), _scale_table(encoded.fmt, encoded.base)
        scale_array = _array(encoded.scales)
        size, width = numbers.numel() // scale_array.size, codes.size // scale_array.size
        if size >= LONG_ROW:
            for row in range(scale_array.size):
                at = slice(row * size, (row + 1) * size)
                _decode_long_row(kernel, codes[at], _load_scales(scale_array[row : row + 1], table), numbers[at])
            return out
        write = _writer(numbers, size)

        def work(piece: slice) -> None:
            for run, run_out in write(piece):
                kernel(codes[run.start * width : run.stop * width], _load_scales(scale_array[run], table), run_out)

        on_threads(work, _pieces(scale_array.size, size))
        return out

    return decode


def _decode_long_row(kernel: DecodeKernel, codes: Array, scale: Array, numbers: Tensor) -> None:
    write = _writer(numbers, 1)

    def work(piece: slice) -> None:
        for run, run_out in write(piece):
            kernel(codes[run], scale, run_out)

    on_threads(work, _pieces(codes.size, 1))


def _decode_e4m3(codes: Array, scales: Array, numbers: Array) -> None:
    cpu_decode.decode_by_table(codes, scales, numbers, _E4M3_NUMBERS)


def _scale_table(fmt: Format, base: Tensor | None) -> Array | None:
    """The number of each word of a narrow scale; None for float32 scales."""
    assert fmt.scales is not None
    if fmt.scales.dtype == torch.float32:
        return None
    return _fixed_scale_table(fmt) if base is None else _loaded_words(fmt, base)


@functools.cache
def _fixed_scale_table(fmt: Format) -> Array:
    return _loaded_words(fmt, None)


def _loaded_words(fmt: Format, base: Tensor | None) -> Array:
    assert fmt.scales is not None
    words = torch.arange(2 ** (8 * fmt.scales.dtype.itemsize), dtype=torch.int32)
    narrow = words.to(torch.uint8) if fmt.scales.dtype.itemsize == 1 else words.to(torch.int16)
    loaded = fmt.scales.load(narrow.view(fmt.scales.dtype), base)
    return (loaded / 2 if isinstance(fmt, GgufMxfp4) else loaded).float().numpy()


def _load_scales(words: Array, table: Array | None) -> Array:
    if table is None:
        return words
    scales = np.empty(words.size, np.float32)
    cpu_decode.take(table, words, scales)
    return scales


# ---- pieces --------------------------------------------------------------------------------------------------------


def _pieces(count: int, size: int) -> list[slice]:
    """`count` blocks of `size` numbers, cut for the threads."""
    wanted = min(PIECES_PER_THREAD * torch.get_num_threads(), count * size // SMALLEST_PIECE)
    step = -(-count // max(1, wanted))
    return [slice(start, min(start + step, count)) for start in range(0, count, max(1, step))]


def _runs(piece: slice, size: int) -> Iterator[slice]:
    step = max(1, RUN // size)
    for start in range(piece.start, piece.stop, step):
        yield slice(start, min(start + step, piece.stop))


def _reader(numbers: Tensor, size: int) -> Callable[[slice], Iterator[tuple[slice, Array]]]:
    """Gives the float32 words of a piece: all at once, or run by run where they must be cast."""

    def read_cast(piece: slice) -> Iterator[tuple[slice, Array]]:
        for run in _runs(piece, size):
            yield run, _array(numbers[run.start * size : run.stop * size].float()).view(np.uint32)

    if numbers.dtype != torch.float32:
        return read_cast
    words = _array(numbers).view(np.uint32)  # not in the threads: making a view takes a tenth of a kernel's time
    return lambda piece: iter([(piece, words[piece.start * size : piece.stop * size])])


def _writer(numbers: Tensor, size: int) -> Callable[[slice], Iterator[tuple[slice, Array]]]:
    """Gives float32 memory of a piece to fill: in place, or run by run in a buffer that is cast before the next run."""

    def write_cast(piece: slice) -> Iterator[tuple[slice, Array]]:
        for run in _runs(piece, size):
            buffer = torch.empty((run.stop - run.start) * size)
            yield run, _array(buffer)
            numbers[run.start * size : run.stop * size].copy_(buffer)

    if numbers.dtype != torch.float32:
        return write_cast
    array = _array(numbers)
    return lambda piece: iter([(piece, array[piece.start * size : piece.stop * size])])


def _array(tensor: Tensor) -> Array:
    """A flat view: numbers of 8 bits and float32 as they are, 16-bit floats as words."""
    array: Array = tensor.view(_WORDS.get(tensor.dtype, tensor.dtype)).numpy().reshape(-1)
    return array.view(np.uint16) if array.itemsize == 2 else array


_E4M3_NUMBERS = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()

ENCODERS: dict[str, Encoder] = {
    "bfloat16": _encode_bfloat16,
    "int8_row": _row_encoder(cpu_encode.encode_int8, cpu_encode.round_to_int8),
    "int8_g128": _row_encoder(cpu_encode.encode_int8, cpu_encode.round_to_int8),
    "fp8_e4m3_row": _row_encoder(cpu_encode.encode_e4m3, cpu_encode.round_to_e4m3),
    "q8_0_gguf": _block_encoder(cpu_encode.encode_q8_0_gguf),
    "q4_0_gguf": _block_encoder(cpu_encode.encode_q4_0_gguf),
    "q4_0_poly": _block_encoder(cpu_encode.encode_q4_0_poly),
    "int4_g32": _block_encoder(cpu_encode.encode_int4_g32),
    "mxfp4": _block_encoder(cpu_encode.encode_mxfp4),
    "mxfp4_gguf": _block_encoder(_encode_mxfp4_gguf),
}

DECODERS: dict[str, Decoder] = {
    "int8_row": _decoder(cpu_decode.decode_int8),
    "int8_g128": _decoder(cpu_decode.decode_int8),
    "fp8_e4m3_row": _decoder(_decode_e4m3),
    "mxfp8_e4m3": _decoder(_decode_e4m3),
    "q8_0_gguf": _decoder(cpu_decode.decode_q8_0_gguf),
    "q4_0_gguf": _decoder(cpu_decode.decode_q4_0_gguf),
    "q4_0_poly": _decoder(cpu_decode.decode_q4_0_poly),
    "int4_g32": _decoder(cpu_decode.decode_int4_g32),
    "mxfp4": _decoder(cpu_decode.decode_mxfp4),
    "mxfp4_gguf": _decoder(cpu_decode.decode_mxfp4_gguf),
    "nvfp4": _decoder(cpu_decode.decode_nvfp4),
}
