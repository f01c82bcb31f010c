"""Expands a packed matrix a piece of rows at a time, for products that need not have all of it at once.

y = x @ W.T has one column of y per row of W, so a piece of rows gives its columns of y and is then dropped. The
gradient x.grad = y.grad @ W is a sum over pieces. Every format whose blocks lie within a row can be cut anywhere.

Pieces compute what the whole matrix would, up to the order of additions: with u the compute type's unit roundoff both
lie within K u sum_k |x_k w_nk| of the exact product (the gradient: N u sum_n |g_n w_nk|), so within twice that of
each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from bitplan.base.errors import FormatError
from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode
from bitplan.formats.format import Format

Piece = tuple[slice, Tensor]


def why_no_rows(fmt: Format) -> str | None:
    """Why a matrix of this format cannot be cut between rows; None where it can."""
    if fmt.is_cast:
        return f"{fmt.name} is a plain cast, not a packed format"
    if fmt.block.rows != 1 or fmt.zero_point:
        return f"the blocks of {fmt.name} do not lie within a row"
    return None


def rows_of(encoded: Encoded, rows: slice) -> Encoded:
    """An encoding of some rows of an encoded matrix, as views."""
    reason = why_no_rows(encoded.fmt)
    if reason is not None or len(encoded.shape) != 2:
        raise FormatError(f"rows of {encoded.fmt.name} of shape {encoded.shape}: {reason or 'not a matrix'}")
    shape = (len(range(*rows.indices(encoded.shape[0]))), encoded.shape[1])
    scales = None if encoded.scales is None else encoded.scales[rows]
    return Encoded(encoded.fmt, shape, encoded.data[rows], scales, encoded.base)


def cut(rows: int, step: int) -> list[slice]:
    """Pieces of at most `step` rows, of nearly equal size, so that none is tiny."""
    count = -(-rows // max(1, step))
    edges = [rows * index // count for index in range(count + 1)] if count else []
    return [slice(low, high) for low, high in itertools.pairwise(edges)]


def decoded_pieces(encoded: Encoded, dtype: torch.dtype, step: int) -> Iterator[Piece]:
    """The pieces, each expanded when it is asked for and not kept here."""
    for rows in cut(encoded.shape[0], step):
        is_whole = rows == slice(0, encoded.shape[0])
        yield rows, decode(encoded if is_whole else rows_of(encoded, rows), dtype)


def linear_over_pieces(x_MK: Tensor, pieces: Iterator[Piece], out_features: int, bias: Tensor | None = None) -> Tensor:
    """Compute x @ W.T + bias piece by piece, in the type of x, which is that of the pieces."""
    y_MN: Tensor | None = None
    for rows, w_RK in pieces:
        part_MR = functional.linear(x_MK, w_RK, None if bias is None else bias[rows])
        if part_MR.shape[1] == out_features:
            return part_MR
        if y_MN is None:
            y_MN = x_MK.new_empty((x_MK.shape[0], out_features))
        y_MN[:, rows] = part_MR
    return x_MK.new_empty((x_MK.shape[0], out_features)) if y_MN is None else y_MN


def gradient_over_pieces(g_MN: Tensor, pieces: Iterator[Piece], in_features: int) -> Tensor:
    """Compute g @ W, summed over the pieces; 16-bit types are summed in float32, as one product would."""
    total_MK: Tensor | None = None
    wide = torch.promote_types(g_MN.dtype, torch.float32)
    for rows, w_RK in pieces:
        part_MK = g_MN[:, rows] @ w_RK
        if w_RK.shape[0] == g_MN.shape[1]:
            return part_MK
        total_MK = part_MK.to(wide) if total_MK is None else total_MK.add_(part_MK)
    return g_MN.new_zeros((g_MN.shape[0], in_features)) if total_MK is None else total_MK.to(g_MN.dtype)
