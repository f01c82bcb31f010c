"""Chooses scales: applies a rule to every block of a matrix, tile by tile.

The results are exact scales, one per block of the grid; `Format.quantize` rounds them to the stored type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats.format import Format
from bitplan.formats.scale_rules import BasedScales, ScaleRule, flush_small, scale_of_limit
from bitplan.formats.tiles import tile_of_grid, tiles, to_blocks


def choose_scales(
    fmt: Format,
    matrix: Tensor,
    rule: ScaleRule,
    percentile: float,
    importance: Tensor | None,
    scale: float | Tensor | None,
    base: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Exact scales [down, across], not yet rounded to how they are stored, and the base factor if there is one."""
    if scale is not None:
        exact_scales = _explicit(fmt, matrix, scale)
    else:
        exact_scales = fmt.scale_for(_limits(fmt, matrix, "absmax" if rule == "mse" else rule, percentile))
    base_part = None
    if isinstance(fmt.scales, BasedScales):
        largest = exact_scales.amax() if exact_scales.numel() else exact_scales.new_zeros(())
        base_part = fmt.scales.base_for(largest) if base is None else exact_scales.new_tensor(base)
    if rule == "mse" and scale is None:
        exact_scales = _search(fmt, matrix, exact_scales, base_part, importance)
    return exact_scales, base_part


def choose_affine(
    fmt: Format,
    matrix: Tensor,
    rule: ScaleRule,
    percentile: float,
    importance: Tensor | None,
    scale: float | Tensor | None,
    zero_point: int | None,
) -> tuple[Tensor, Tensor]:
    """Scale [1, 1] and zero point () of an unsigned format: the range of x, widened to hold zero."""
    low, high = _range(fmt, matrix)
    if scale is not None:
        step = _explicit(fmt, matrix, scale)
        return step, _zero_code(fmt, low, step, zero_point)
    if rule == "mse":
        return _search_range(fmt, matrix, low, high, importance, zero_point)
    if rule != "absmax":
        limit = _limits(fmt, matrix, rule, percentile).reshape(())
        low, high = torch.maximum(low, -limit), torch.minimum(high, limit)
    return _affine_of_range(fmt, low, high, zero_point)


def _range(fmt: Format, matrix: Tensor) -> tuple[Tensor, Tensor]:
    if not matrix.numel():
        zero = torch.zeros((), dtype=fmt.work, device=matrix.device)
        return zero, zero
    low, high = (bound.to(fmt.work) for bound in torch.aminmax(matrix))
    return low.clamp(max=0.0), high.clamp(min=0.0)


def _affine_of_range(fmt: Format, low: Tensor, high: Tensor, zero_point: int | None) -> tuple[Tensor, Tensor]:
    """The smallest step with which the codes span the range, and the zero point, which may be given."""
    assert fmt.element is not None
    top = fmt.element.limit
    if zero_point is None:
        step = scale_of_limit(high - low, top)
    else:  # numbers on a side without codes become zero with any step
        above = scale_of_limit(high, top - zero_point) if zero_point < top else high * 0
        below = scale_of_limit(-low, zero_point) if zero_point > 0 else low * 0
        step = torch.maximum(above, below)
    step = flush_small(step).reshape(1, 1)
    return step, _zero_code(fmt, low, step, zero_point)


def _zero_code(fmt: Format, low: Tensor, step: Tensor, zero_point: int | None) -> Tensor:
    assert fmt.element is not None
    if zero_point is None:
        return fmt.element.round(torch.where(step > 0, -low / step, 0.0).reshape(()))
    return fmt.element.round(torch.tensor(float(zero_point), dtype=fmt.work, device=low.device))


def _limits(fmt: Format, matrix: Tensor, rule: ScaleRule, percentile: float) -> Tensor:
    if fmt.block.is_tensor:  # one block, longer than a tile: reduce it in one call
        return fmt.limits(matrix, rule, percentile).to(fmt.work).reshape(1, 1)
    limits = torch.zeros(fmt.grid(tuple(matrix.shape)), dtype=fmt.work, device=matrix.device)
    for tile in tiles(fmt, *matrix.shape):
        part = fmt.limits(to_blocks(fmt, matrix[tile].to(fmt.work)), rule, percentile)
        tile_of_grid(fmt, limits, tile).view(-1).copy_(part)
    width = fmt.block.cols or matrix.shape[1]
    if rule == "absmean" and (real := matrix.shape[1] % max(width, 1)):  # the filling of a last block does not count
        limits[:, -1] *= width / real
    return limits


def _search(
    fmt: Format, matrix: Tensor, exact_scales: Tensor, base: Tensor | None, importance: Tensor | None
) -> Tensor:
    """For each block, the multiple of its absmax scale with the least (weighted) squared error."""
    best_error = torch.full(exact_scales.shape, torch.inf, dtype=torch.float64, device=exact_scales.device)
    best = exact_scales.clone()
    for multiple in fmt.mse_multiples:
        candidate = exact_scales * multiple
        error = _squared_error(fmt, matrix, candidate, base, None, importance)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, candidate, best)
    return best


def _search_range(
    fmt: Format, matrix: Tensor, low: Tensor, high: Tensor, importance: Tensor | None, zero_point: int | None
) -> tuple[Tensor, Tensor]:
    """The multiple of the whole range with the least (weighted) squared error: its scale and zero point."""
    best_error, best = torch.inf, _affine_of_range(fmt, low, high, zero_point)
    for multiple in fmt.mse_multiples:
        step, zero = _affine_of_range(fmt, low * multiple, high * multiple, zero_point)
        error = float(_squared_error(fmt, matrix, step, None, zero, importance))
        if error < best_error:
            best_error, best = error, (step, zero)
    return best


def _squared_error(
    fmt: Format,
    matrix: Tensor,
    exact_scales: Tensor,
    base: Tensor | None,
    zero_point: Tensor | None,
    importance: Tensor | None,
) -> Tensor:
    """Per block [down, across]: the squared error if these scales were used."""
    assert fmt.scales is not None
    errors = torch.zeros(exact_scales.shape, dtype=torch.float64, device=exact_scales.device)
    for tile in tiles(fmt, *matrix.shape):
        blocks = to_blocks(fmt, matrix[tile].to(fmt.work))
        codes, stored = fmt.quantize(blocks, tile_of_grid(fmt, exact_scales, tile).reshape(-1), base, zero_point)
        values = fmt.dequantize(codes, fmt.scales.load(stored, base), zero_point)
        squared = (values - blocks).double().square()
        if importance is not None:
            squared *= to_blocks(fmt, _columns(importance, tile[1], matrix[tile]))
        tile_of_grid(fmt, errors, tile).view(-1).add_(squared.sum(dim=-1))
    return errors


def _columns(importance: Tensor, cols_at: slice, piece: Tensor) -> Tensor:
    """The weight of every number of a tile; where rows are flattened, columns repeat."""
    columns = torch.arange(cols_at.start, cols_at.stop, device=piece.device) % importance.numel()
    return importance.to(piece.device).double()[columns].expand(piece.shape)


def _explicit(fmt: Format, matrix: Tensor, scale: float | Tensor) -> Tensor:
    down, across = fmt.grid(tuple(matrix.shape))
    scales = torch.as_tensor(scale, dtype=fmt.work, device=matrix.device).detach()
    if scales.numel() not in (1, down * across):
        raise FormatError(
            f"{fmt.name}: `scale` must be one number or one per block ({down * across}), got {scales.numel()}"
        )
    if not bool(torch.isfinite(scales).all()) or bool((scales <= 0).any()):
        raise FormatError(f"{fmt.name}: `scale` must be finite and above zero")
    if fmt.power_of_two_scales and bool((torch.frexp(scales).mantissa != 0.5).any()):
        raise FormatError(f"{fmt.name}: `scale` must be a power of two, which is all its scales can be")
    return scales.reshape(1, 1).expand(down, across) if scales.numel() == 1 else scales.reshape(down, across)
