"""How much a format changed a tensor: figures that show quantization loss."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats.codec import decode, readable
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import from_blocks, tile_of_grid, tiles

PIECE = 2**22
RUN = 64  # numbers; always whole bytes, however many codes a byte holds


@dataclass(frozen=True)
class ErrorReport:
    """Original against decoded. `saturated` numbers lay outside the range of codes; `underflowed` became zero.

    If a plain cast kept a NaN or made an infinity, the figures that depend on it are not finite.
    """

    fmt: str
    count: int
    cosine: float
    sqnr_db: float
    relative_error: float
    max_error: float
    saturated: int
    underflowed: int
    bytes_per_weight: float

    def to_dict(self) -> dict[str, str | int | float | None]:
        """The report for JSON, which has neither infinity nor NaN: an exact tensor's SQNR is null."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


def error_report(x: Tensor, encoded: Encoded) -> ErrorReport:
    """Compare a tensor with what its encoding stands for."""
    if tuple(x.shape) != encoded.shape:
        raise FormatError(f"error_report: the tensor is {tuple(x.shape)}, its encoding {encoded.shape}")
    x = readable(x, "error_report")
    flat = x.reshape(-1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    decoded = decode(encoded, wide).reshape(-1)
    similar = similarity(flat, decoded)
    underflowed = sum(
        int(((one != 0) & (two == 0)).sum()) for one, two in zip(flat.split(PIECE), decoded.split(PIECE), strict=True)
    )
    return ErrorReport(
        fmt=encoded.fmt.name,
        count=x.numel(),
        cosine=similar.cosine,
        sqnr_db=similar.sqnr_db,
        relative_error=similar.relative_error,
        max_error=similar.max_error,
        saturated=_saturated(x, encoded),
        underflowed=underflowed,
        bytes_per_weight=encoded.nbytes / x.numel() if x.numel() else 0.0,
    )


def sample(x: Tensor, encoded: Encoded, most: int) -> tuple[Tensor, Encoded]:
    """About `most` numbers of a tensor, spread evenly, and their part of its encoding.

    It takes every n-th block, with odd n, so that the sample of a matrix whose sides are powers of two covers all its
    columns. If rows share a scale, or are not whole blocks, it takes whole rows, at least one band of them.
    """
    fmt = encoded.fmt
    (rows, cols), (_, scales_each) = fmt.matrix_shape(encoded.shape), fmt.grid(encoded.shape)
    height, width = fmt.block.rows or 1, cols  # size of the pieces that are taken
    if fmt.block.cols and height == 1 and cols % fmt.block.cols == 0:
        width, scales_each = fmt.block.cols, 1
    elif fmt.block.cols is None and rows == 1:
        width = RUN if fmt.packing else 1
    count = rows * cols // (height * width) if x.numel() > most else 0
    if not count:
        return x, encoded
    step = -(-count * height * width // most) | 1

    def pick(part: Tensor, size: int) -> Tensor:
        return part.reshape(-1)[: count * size].reshape(count, size)[::step]

    some = pick(x, height * width).reshape(-1, width)
    parts = fmt.part_shapes(tuple(some.shape))
    data = pick(encoded.data, height * fmt.data_cols(width)).reshape(parts["data"][1])
    scales = encoded.scales
    if scales is not None:
        scales = pick(scales, scales_each) if scales.numel() > 1 else scales.expand(parts["scales"][1])
        scales = scales.reshape(parts["scales"][1])
    return some, Encoded(fmt, tuple(some.shape), data, scales, encoded.base, encoded.zero_point)


@dataclass(frozen=True)
class Similarity:
    """Sums from which cosine and signal-to-noise follow; adds up over the tensors of a model."""

    dot: float = 0.0
    square_a: float = 0.0
    square_b: float = 0.0
    square_difference: float = 0.0
    max_error: float = 0.0

    def __add__(self, other: Similarity) -> Similarity:
        return Similarity(
            self.dot + other.dot,
            self.square_a + other.square_a,
            self.square_b + other.square_b,
            self.square_difference + other.square_difference,
            math.nan if math.isnan(other.max_error) else max(self.max_error, other.max_error),
        )

    @property
    def cosine(self) -> float:
        if self.square_difference == 0.0:
            return 1.0
        norm = math.sqrt(self.square_a) * math.sqrt(self.square_b)
        return min(self.dot / norm, 1.0) if norm else 0.0  # in this order NaN stays NaN

    @property
    def relative_error(self) -> float:
        if self.square_difference == 0.0:
            return 0.0
        return math.sqrt(self.square_difference / self.square_a) if self.square_a else math.inf

    @property
    def sqnr_db(self) -> float:
        """Signal over quantization noise; infinite when nothing changed."""
        if self.square_difference == 0.0:
            return math.inf
        ratio = self.square_a / self.square_difference
        return 10 * math.log10(ratio) if ratio != 0.0 else -math.inf


def similarity(a: Tensor, b: Tensor) -> Similarity:
    """Sums over two tensors of one shape, in float64, piece by piece."""
    total = Similarity()
    for one, two in zip(a.detach().reshape(-1).split(PIECE), b.detach().reshape(-1).split(PIECE), strict=True):
        first, second = one.double(), two.double()
        difference = first - second
        total += Similarity(
            float(first @ second),
            float(first @ first),
            float(second @ second),
            float(difference @ difference),
            float(difference.abs().amax()) if difference.numel() else 0.0,
        )
    return total


def _saturated(x: Tensor, encoded: Encoded) -> int:
    """How many numbers rounding alone would have put outside the codes."""
    fmt = encoded.fmt
    if fmt.element is None:
        return int((x.isfinite() & ~encoded.data.to(torch.float64).isfinite()).sum())
    if fmt.is_opaque:  # a search chose the scales: numbers at the ends of the codes were clipped on purpose
        return 0
    assert encoded.scales is not None
    assert fmt.scales is not None
    matrix = x.reshape(fmt.matrix_shape(encoded.shape))
    scales = fmt.scales.load(encoded.scales, encoded.base).reshape(fmt.grid(encoded.shape))
    zero = fmt.element.value(encoded.zero_point, fmt.work) if encoded.zero_point is not None else 0.0
    total = 0
    for tile in tiles(fmt, *matrix.shape):
        piece = matrix[tile].to(fmt.work)
        width = fmt.block.cols or piece.shape[1]
        per_block = tile_of_grid(fmt, scales, tile).reshape(-1, 1).expand(-1, (fmt.block.rows or 1) * width)
        scale = from_blocks(fmt, per_block, *piece.shape)
        scaled = torch.where(scale == 0, 0.0, piece / scale) + zero
        total += int(((scaled < fmt.element.clip_low) | (scaled > fmt.element.clip_high)).sum())
    return total
