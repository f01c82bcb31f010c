"""Error-compensated rounding: codes chosen so that what one column loses the others make up for.

The error that counts is that of the layer's outputs, sum over rows of e H e^T with e = weight - value and H = X^T X of
its inputs. Columns are rounded one after another, and the error of each is spread over the columns not yet rounded, in
the proportions that the Cholesky factor of H's inverse gives (GPTQ's method). A block's scale is chosen just before its
columns are rounded, from the weights as they are then, by rounding the block with each candidate. Afterwards sweeps go
over all columns again: each code and each scale moves to its best place while all others stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.rounding.layout import ScaledBlocks, unordered
from bitplan.rounding.round_columns import in_batches, is_compiled, loops_for
from bitplan.rounding.scale_search import (
    ScaleLadder,
    block_slices,
    candidates_of,
    least_of,
    move_if_better,
    search_scales,
)

Order = Literal["activation", "given"]
# Columns whose errors go to the rest at once. A scale of more columns is searched once, before the first is rounded.
BATCH = 128
MOST_DAMPING = 1.0
GREATER_DAMPING = 10.0


@dataclass(frozen=True)
class Codes:
    """A rounded matrix: codes [R, filled] as the numbers they stand for, unscaled, and scales [strips, across]."""

    codes: Tensor
    scales: Tensor

    def values(self, layout: ScaledBlocks) -> Tensor:
        steps = layout.to_rows(self.scales).repeat_interleave(layout.width, 1)[:, : layout.filled]
        return self.codes * steps


def inverse_factor(hessian: Tensor, columns: Tensor) -> Tensor | None:
    """The upper triangular U with U^T U = H^-1, H's columns in this order, by one factorisation from the last to the
    first; None where H is not positive definite. Of a large H few copies fit on a GPU: each goes when it is used up.
    """
    backwards = columns.flip(0)
    lower, fault = torch.linalg.cholesky_ex(hessian[backwards][:, backwards])
    if int(fault):
        return None
    lower = lower.flip((0, 1))
    eye = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    upper: Tensor = torch.linalg.solve_triangular(lower, eye, upper=True)
    return upper


MUST_BE = {
    "hessian": "X^T X of the layer's inputs",
    "outputs": "the second moments of the loss's gradients by the layer's outputs",
}


def factor_of(
    hessian: Tensor, damping: float, columns: Tensor, name: str, what: Literal["hessian", "outputs"] = "hessian"
) -> tuple[Tensor, Tensor, float]:
    """Return H over the mean of its diagonal, damped; the factor of its inverse in the order of `columns`; the damping.

    Computed in float64.
    """
    wide = hessian.double()
    heavy = wide / wide.diagonal().mean()
    diagonal = heavy.diagonal().clone()
    while True:
        heavy.diagonal().copy_(diagonal + damping)
        factor = inverse_factor(heavy, columns)
        if factor is not None:
            factor = factor.float()
            return heavy.float(), factor.contiguous() if factor.is_cuda else factor, damping
        if damping >= MOST_DAMPING:
            raise FormatError(
                f"{name}: `{what}` is not positive definite, even with damping {damping}; it must be {MUST_BE[what]}"
            )
        damping = max(damping, 1e-4) * GREATER_DAMPING


def columns_in_order(hessian: Tensor, layout: ScaledBlocks, order: Order) -> tuple[list[int], Tensor]:
    """Blocks in the order they are rounded, and their columns [filled] likewise: those that matter most come first.

    A column never leaves its block, so the bytes need no permutation.
    """
    firsts = torch.arange(0, layout.filled, layout.width, device=hessian.device)
    if order == "given":
        return list(range(len(firsts))), torch.arange(layout.filled, device=hessian.device)
    weight, missing = hessian.diagonal().double(), -layout.filled % layout.width  # of the last block, where it is cut
    sums = torch.nn.functional.pad(weight, (0, missing)).reshape(-1, layout.width).sum(1)
    blocks = (sums / (layout.filled - firsts).clamp(max=layout.width)).argsort(descending=True, stable=True)
    last = torch.nn.functional.pad(weight, (0, missing), value=-torch.inf).reshape(-1, layout.width)
    units = last.reshape(len(last), -1, layout.together).sum(2).argsort(dim=1, descending=True, stable=True)
    inside = (units.unsqueeze(2) * layout.together + torch.arange(layout.together, device=units.device)).flatten(1)
    inside += firsts.unsqueeze(1)
    columns = inside[blocks].reshape(-1)
    return blocks.tolist(), columns[columns < layout.filled] if missing else columns


@dataclass(frozen=True)
class OrderedFactor:
    """Blocks and columns in the order they are rounded, the damped Hessian, and its inverse's factor in that order."""

    blocks: list[int]
    columns: Tensor
    damped: Tensor
    factor: Tensor
    damping: float


class InputHessian:
    """The Hessian [K, K] of a layer's inputs, in any unit. The last factor is remembered: give weights of one input,
    and formats of one width, in turn.

    A factor takes as long as rounding some hundred rows.
    """

    def __init__(self, hessian: Tensor) -> None:
        self.hessian = hessian
        self._last: tuple[tuple[object, ...], OrderedFactor] | None = None

    def factor(
        self, layout: ScaledBlocks, order: Order, damping: float, device: torch.device, name: str
    ) -> OrderedFactor:
        key = (layout.cols, layout.filled, layout.width, layout.together, order, damping, device)
        if self._last is None or self._last[0] != key:
            hessian = self._checked(layout, device, name)
            blocks, columns = columns_in_order(hessian, layout, order)
            self._last = (key, OrderedFactor(blocks, columns, *factor_of(hessian, damping, columns, name)))
        return self._last[1]

    def _checked(self, layout: ScaledBlocks, device: torch.device, name: str) -> Tensor:
        check_statistics(self.hessian, (layout.cols, layout.cols), "hessian", name)
        if not float(self.hessian.diagonal().sum()) > 0:
            raise FormatError(f"{name}: the diagonal of `hessian` adds up to zero: no input was seen; leave it out")
        empty = layout.filled - layout.cols
        # Moved first: a copy from memory to a GPU changes the type on the CPU.
        return torch.nn.functional.pad(self.hessian.to(device).double(), (0, empty, 0, empty))


def check_statistics(statistics: Tensor, shape: tuple[int, ...], what: str, name: str) -> None:
    if tuple(statistics.shape) != shape:
        raise FormatError(f"{name}: `{what}` must have shape {shape}, got {tuple(statistics.shape)}")
    if not bool(statistics.isfinite().all()):
        raise FormatError(f"{name}: `{what}` holds NaN or infinity; collect it again from inputs that are finite")


def compensate(matrix: Tensor, by: OrderedFactor, plain: Tensor, layout: ScaledBlocks, ladder: ScaleLadder) -> Codes:
    """Round [R, filled] in the order of `by`; later columns make up for errors. `plain`: first scales."""
    if _takes_batches(matrix, layout, ladder):
        return _compensate_batches(matrix, by, plain, layout, ladder)
    factor, blocks, at = by.factor, by.blocks, by.columns
    compiled = _compiled_blocks(matrix, layout, ladder)
    left, loops = matrix[:, at].contiguous(), loops_for(matrix)
    codes, scales = torch.empty_like(left), plain.clone()
    tries = layout.width <= BATCH
    if not tries:
        weights = torch.empty_like(matrix[0])
        weights[at] = factor.diagonal().square().reciprocal()
        scales = search_scales(matrix, weights, plain, layout, ladder)
    width = layout.width if tries else BATCH
    none = torch.zeros(layout.rows, 1, device=matrix.device)
    for start, stop, pieces in _batches(layout.filled, width):
        errors = torch.empty_like(left[:, start:stop])
        for number, (first, last) in pieces:
            block = blocks[number] if tries else 0
            piece, own_factor = left[:, first:last], factor[first:last, first:last]
            if compiled is not None:
                rounded = compiled.round(piece, own_factor, plain[:, block], ladder.multiples)
                codes[:, first:last], own_errors, scales[:, block] = rounded
            else:
                if tries:
                    tried = candidates_of(piece, plain[:, block], layout, ladder)
                    cost = layout.sum_of_strips(
                        loops.cost_of_scales(piece, own_factor, layout.to_rows(tried), ladder.grid)
                    )
                    scales[:, block] = tried.gather(1, least_of(cost)[1]).squeeze(1)
                steps = layout.to_rows(scales[:, block]).unsqueeze(-1)
                parts = torch.zeros(last - first, dtype=torch.int64, device=matrix.device)
                codes[:, first:last], own_errors = loops.round_piece(piece, own_factor, steps, none, parts, ladder.grid)
            errors[:, first - start : last - start] = own_errors
            if last < stop:
                left[:, last:stop] -= own_errors @ factor[first:last, last:stop]
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    return Codes(unordered(codes, at), scales)


def _compiled_blocks(matrix: Tensor, layout: ScaledBlocks, ladder: ScaleLadder) -> Any:
    """Loops for a whole block of each row, where it has a scale of its own; None where they do not know the format."""
    if not is_compiled(matrix) or layout.height > 1 or layout.width > BATCH or layout.filled % layout.width:
        return None
    from bitplan.rounding.round_columns_cpu import scaled_rounder_of

    return scaled_rounder_of(layout.width, ladder)


def _batches(cols: int, width: int) -> list[tuple[int, int, list[tuple[int, tuple[int, int]]]]]:
    """Yield every batch of columns: its start, its stop, and its pieces, each a number and columns."""
    ends = [(number, (first, min(first + width, cols))) for number, first in enumerate(range(0, cols, width))]
    pieces_at_once = max(1, BATCH // width)
    groups = [ends[at : at + pieces_at_once] for at in range(0, len(ends), pieces_at_once)]
    return [(group[0][1][0], group[-1][1][1], group) for group in groups]


def sweep(
    matrix: Tensor, hessian: Tensor, before: Codes, layout: ScaledBlocks, ladder: ScaleLadder, sweeps: int
) -> Codes:
    """Improve codes and scales in turns, each to its best value while all others stay fixed; the error never grows."""
    codes, scales, loops = before.codes.clone(), before.scales.clone(), loops_for(matrix)
    narrow = layout.width <= BATCH
    gradient = (matrix - before.values(layout)) @ hessian
    if _takes_batches(matrix, layout, ladder):
        from bitplan.rounding.triton_rounding import sweep_batches

        for done in range(sweeps):
            sweep_batches(gradient, codes, scales, hessian, _block_scales(layout, ladder), is_last=done + 1 == sweeps)
        return Codes(codes, scales)
    compiled = _compiled_blocks(matrix, layout, ladder)
    if compiled is not None:
        compiled.sweep(gradient, codes, scales, hessian, sweeps)
        return Codes(codes, scales)
    for _ in range(sweeps):
        if not narrow:
            for block, at in enumerate(block_slices(layout)):
                move = _better_scales(codes[:, at], gradient[:, at], hessian[at, at], scales[:, block], layout, ladder)
                scales[:, block] += move
                gradient -= (layout.to_rows(move).unsqueeze(-1) * codes[:, at]) @ hessian[at]
        for start, stop, pieces in _batches(layout.filled, layout.width if narrow else BATCH):
            near, changes = gradient[:, start:stop].clone(), torch.zeros_like(codes[:, start:stop])
            for _, (first, last) in pieces:
                block, own_hessian, in_batch = (
                    first // layout.width,
                    hessian[first:last, first:last],
                    slice(first - start, last - start),
                )
                if narrow:
                    move = _better_scales(
                        codes[:, first:last], near[:, in_batch], own_hessian, scales[:, block], layout, ladder
                    )
                    scales[:, block] += move
                    changes[:, in_batch] = layout.to_rows(move).unsqueeze(-1) * codes[:, first:last]
                    near[:, in_batch] -= changes[:, in_batch] @ own_hessian
                steps = layout.to_rows(scales[:, block]).unsqueeze(-1)
                parts = torch.zeros(last - first, dtype=torch.int64, device=matrix.device)
                better, changed = loops.sweep_piece(
                    near[:, in_batch], codes[:, first:last], own_hessian, steps, parts, ladder.grid
                )
                codes[:, first:last] = better
                changes[:, in_batch] += changed
                near[:, in_batch.stop :] -= changes[:, in_batch] @ hessian[first:last, last:stop]
            gradient -= changes @ hessian[start:stop]
    return Codes(codes, scales)


def _better_scales(
    codes: Tensor, gradient: Tensor, hessian: Tensor, scales: Tensor, layout: ScaledBlocks, ladder: ScaleLadder
) -> Tensor:
    """Say how far the scales of one block should move, [strips], by least squares with the codes as they are."""
    slope = layout.sum_of_strips((codes * gradient).sum(1))
    curve = layout.sum_of_strips((codes * (codes @ hessian)).sum(1))
    moved = ladder.as_stored(scales + torch.where(curve > 0, slope / curve, 0.0))
    usable = moved.isfinite() if ladder.is_signed else moved.isfinite() & (moved >= 0)
    move = torch.where(usable, moved - scales, 0.0)
    return move_if_better(move, slope, curve)


# ---- on GPUs: a batch of columns in one launch, and its errors to all others in one product; nothing waits -----------


def _takes_batches(matrix: Tensor, layout: ScaledBlocks, ladder: ScaleLadder) -> bool:
    """Whether the kernels know the format: a scale for a few columns of one row."""
    if not in_batches(matrix) or layout.height > 1 or ladder.grid.table is not None:
        return False
    from bitplan.rounding.triton_rounding import is_width_known, storage_of

    return is_width_known(layout.width) and storage_of(ladder.fmt) is not None


def _block_scales(layout: ScaledBlocks, ladder: ScaleLadder) -> Any:
    from bitplan.rounding.triton_rounding import BlockScales, storage_of

    storage = storage_of(ladder.fmt)
    assert storage is not None
    return BlockScales(storage, layout.width, ladder.grid, ladder.multiples, ladder.is_signed, ladder.base)


def _compensate_batches(
    matrix: Tensor, by: OrderedFactor, plain: Tensor, layout: ScaledBlocks, ladder: ScaleLadder
) -> Codes:
    from bitplan.rounding.triton_rounding import round_batch

    scaled, factor, at = _block_scales(layout, ladder), by.factor.contiguous(), by.columns
    left, order = matrix[:, at].contiguous(), torch.tensor(by.blocks, dtype=torch.int32, device=matrix.device)
    codes, scales, plain = torch.empty_like(left), plain.clone(), plain.contiguous()
    errors = matrix.new_empty(len(matrix), scaled.span)
    for start in range(0, layout.filled, scaled.span):
        stop = min(start + scaled.span, layout.filled)
        round_batch(left, factor, plain, order, start, scaled, codes, scales, errors)
        left[:, stop:].addmm_(errors[:, : stop - start], factor[start:stop, stop:], alpha=-1)
    return Codes(unordered(codes, at), scales)
