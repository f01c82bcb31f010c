"""round_weight: the same bytes as `encode`, better numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from bitplan.errors import FormatError
from bitplan.formats import Encoded, Format, get_format
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.formats.scales.rules import reciprocal
from bitplan.kernels import decode, encode
from bitplan.store.rounding.code_grids import grid_of
from bitplan.store.rounding.error_compensation import (
    InputHessian,
    Order,
    OrderedFactor,
    check_statistics,
    compensate,
    sweep,
)
from bitplan.store.rounding.group_blocks import round_groups
from bitplan.store.rounding.layout import ScaledBlocks, assemble, layout_of, scales_of, with_rows_of
from bitplan.store.rounding.output_feedback import (
    check_outputs,
    error_between_outputs,
    round_with_feedback,
    takes_feedback,
)
from bitplan.store.rounding.scale_search import ScaleLadder, search_scales

Measure = Literal["squared error", "moments", "hessian", "hessian and outputs"]
SWEEPS = 4
AT_ONCE = 2**27  # numbers of a matrix that are rounded at once
# Columns whose input was never seen count a little, so that their scales are not arbitrary.
UNSEEN = 1e-6


@dataclass(frozen=True)
class Rounding:
    """What was gained.

    measure    what was minimised: the squared error of the weights, weighted by second moments of the inputs, or the
               squared error of the outputs, alone or weighted by the gradients of the loss by them
    before     that error with plain `encode`, over the same of the weights themselves
    after      the same now
    strips     groups of rows that share no scale with others, and how many of them `encode` rounds better: `plain`
    damping    what was really added to the Hessian's diagonal, in units of its mean
    """

    measure: Measure
    before: float
    after: float
    strips: int
    plain: int
    damping: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RoundingOptions(TypedDict, total=False):
    """The options of `round_with_report`, which explains them."""

    moments: Tensor | None
    hessian: Tensor | InputHessian | None
    outputs: Tensor | None
    damping: float
    order: Order
    sweeps: int
    pad: Literal["zero"] | None
    base: float | None
    device: torch.device | str | None
    name: str


def round_weight(weight: Tensor, fmt: Format | str, **options: Unpack[RoundingOptions]) -> Encoded:
    """`round_with_report` without its report."""
    return _round(weight, fmt, has_report=False, **options)[0]


def round_with_report(
    weight: Tensor,
    fmt: Format | str,
    *,
    moments: Tensor | None = None,
    hessian: Tensor | InputHessian | None = None,
    outputs: Tensor | None = None,
    damping: float = 0.01,
    order: Order = "activation",
    sweeps: int = SWEEPS,
    pad: Literal["zero"] | None = None,
    base: float | None = None,
    device: torch.device | str | None = None,
    name: str = "tensor",
) -> tuple[Encoded, Rounding]:
    """Hold a weight [N, K] in a format, as `encode` does, with numbers chosen for the inputs it meets.

    moments   [K] mean squares of the inputs: scales by weighted search, codes to nearest
    hessian   [K, K] X^T X of the inputs, in any unit: error-compensated rounding; an InputHessian to use it again
    outputs   with a Hessian, [N, N] second moments of the loss's gradients by the outputs: rows, too, make up for each
              other's errors, where they share no scale
    damping   added to the Hessian's diagonal, in units of its mean: more trusts the inputs seen less
    order     "activation" rounds blocks, and columns in them, by the size of their inputs; "given" from left to right
    sweeps    how often codes and scales are gone over again after compensated rounding
    base      for formats whose scales share a base factor: this one, as layers that are computed as one need
    device    where to compute; the result lies there

    Without statistics, scales are searched by plain squared error. Where `encode` is better by the measure, rows are as
    `encode` has them. Formats with nothing to choose (casts, 16 bits and more, zero points, signs) are plain `encode`.
    """
    options: RoundingOptions = {"moments": moments, "hessian": hessian, "outputs": outputs, "damping": damping}
    options |= {"order": order, "sweeps": sweeps, "pad": pad, "base": base, "device": device, "name": name}
    return _round(weight, fmt, has_report=True, **options)


def _round(
    weight: Tensor,
    fmt: Format | str,
    *,
    has_report: bool,
    moments: Tensor | None = None,
    hessian: Tensor | InputHessian | None = None,
    outputs: Tensor | None = None,
    damping: float = 0.01,
    order: Order = "activation",
    sweeps: int = SWEEPS,
    pad: Literal["zero"] | None = None,
    base: float | None = None,
    device: torch.device | str | None = None,
    name: str = "tensor",
) -> tuple[Encoded, Rounding]:
    """`round_with_report`; without a report its errors are in the Hessian's own unit, which saves a large product."""
    fmt = get_format(fmt)
    if device is not None:
        weight = weight.to(device)
    if outputs is not None and hessian is None:
        raise FormatError(f"{name}: `outputs` is used together with `hessian`, X^T X of the inputs, which is not given")
    plain = encode(weight, fmt, pad=pad, base=base, name=name)
    measure: Measure = "hessian" if hessian is not None else "moments" if moments is not None else "squared error"
    if not _can_round(fmt) or not weight.numel():
        return plain, Rounding(measure, 0.0, 0.0, 0, 0)
    if weight.dim() < 2:
        raise FormatError(f"{name}: expected a matrix, [outputs, inputs], got shape {tuple(weight.shape)}")
    layout, used = layout_of(fmt, tuple(weight.shape)), None
    matrix = _filled(weight.detach().float().reshape(layout.rows, layout.cols), layout)
    if hessian is None:
        cost = _column_weights(moments, layout, matrix.device, name)
        rounded = _by_columns(matrix, cost, plain, layout)
    else:
        inputs = hessian if isinstance(hessian, InputHessian) else InputHessian(hessian)
        ordered = inputs.factor(layout, order, damping, matrix.device, name)
        cost, used = ordered.damped, ordered.damping
        if outputs is not None:
            check_outputs(outputs, layout, name)
        if outputs is not None and takes_feedback(outputs, layout):

            def round_rows(piece: Tensor, own: Encoded, part: ScaledBlocks) -> Encoded:
                return _by_hessian(piece, ordered, own, part, sweeps)

            rounded = round_with_feedback(matrix, outputs, plain, layout, round_rows, name)
            return _better_of_whole(matrix, plain, rounded, layout, cost, outputs, used, has_report)
        rounded = _by_hessian(matrix, ordered, plain, layout, sweeps)
    before, after = (_errors(matrix, _filled_values(each, layout), cost) for each in (plain, rounded))
    before, after = layout.sum_of_strips(before), layout.sum_of_strips(after)
    worse = ~(after <= before)
    whole = (float(_errors(matrix, None, cost).sum()) or 1.0) if has_report else 1.0
    report = Rounding(
        measure,
        float(before.sum()) / whole,
        float(torch.minimum(after.nan_to_num(torch.inf), before).sum()) / whole,
        layout.strips,
        int(worse.sum()),
        used,
    )
    return with_rows_of(rounded, plain, layout, worse), report


def _better_of_whole(
    matrix: Tensor,
    plain: Encoded,
    rounded: Encoded,
    layout: ScaledBlocks,
    hessian: Tensor,
    outputs: Tensor,
    damping: float | None,
    has_report: bool,
) -> tuple[Encoded, Rounding]:
    """Rows that make up for each other are taken all or none."""
    before, after = (
        error_between_outputs(matrix, _filled_values(each, layout), hessian, outputs) for each in (plain, rounded)
    )
    zeros = torch.zeros_like(matrix)
    whole = (error_between_outputs(matrix, zeros, hessian, outputs) or 1.0) if has_report else 1.0
    is_better = after <= before
    report = Rounding(
        "hessian and outputs",
        before / whole,
        (after if is_better else before) / whole,
        layout.strips,
        0 if is_better else layout.strips,
        damping,
    )
    return rounded if is_better else plain, report


def _can_round(fmt: Format) -> bool:
    return isinstance(fmt, GgufBlocks) or (grid_of(fmt.element) is not None and not fmt.zero_point)


def _by_columns(matrix: Tensor, weights: Tensor, plain: Encoded, layout: ScaledBlocks) -> Encoded:
    """Scales by search, each column with its weight; codes to nearest."""
    fmt, shape = plain.fmt, plain.shape
    if isinstance(fmt, GgufBlocks):
        filled = encode(matrix, fmt, importance=weights.clamp(min=UNSEEN))
        return Encoded(fmt, shape, filled.data.reshape(plain.data.shape))
    ladder = _ladder(plain)
    scales = search_scales(matrix, weights, scales_of(plain, layout), layout, ladder)
    steps = layout.to_rows(scales).repeat_interleave(layout.width, 1)[:, : layout.filled]
    codes = ladder.grid.nearest(matrix * reciprocal(steps))
    return assemble(fmt, shape, codes, ladder.store(scales), plain.base)


def _by_hessian(matrix: Tensor, by: OrderedFactor, plain: Encoded, layout: ScaledBlocks, sweeps: int) -> Encoded:
    """Codes that make up for each other's errors; some rows of a large matrix at a time, for each takes much memory."""
    fmt, shape = plain.fmt, plain.shape
    if isinstance(fmt, GgufBlocks):
        parts = [
            round_groups(matrix[rows], by.damped, by.factor, fmt, by.blocks, by.columns, sweeps)
            for rows, _ in _strips_at_once(layout)
        ]
        return Encoded(fmt, shape, torch.cat(parts).reshape(plain.data.shape))
    ladder, scales = _ladder(plain), scales_of(plain, layout)
    codes, found_scales = [], []
    for rows, strips in _strips_at_once(layout):
        some = replace(layout, rows=rows.stop - rows.start)
        found = compensate(matrix[rows], by.factor, scales[strips], some, ladder, by.blocks, by.columns)
        found = sweep(matrix[rows], by.damped, found, some, ladder, sweeps)
        codes.append(found.codes)
        found_scales.append(found.scales)
    return assemble(fmt, shape, torch.cat(codes), ladder.store(torch.cat(found_scales)), plain.base)


def _strips_at_once(layout: ScaledBlocks) -> list[tuple[slice, slice]]:
    """Rows and strips of them: what is computed at once."""
    each = max(1, AT_ONCE // max(1, layout.filled * layout.height))
    return [
        (slice(first * layout.height, min((first + each) * layout.height, layout.rows)), slice(first, first + each))
        for first in range(0, layout.strips, each)
    ]


def _ladder(plain: Encoded) -> ScaleLadder:
    grid = grid_of(plain.fmt.element)
    assert grid is not None
    return ScaleLadder(plain.fmt, grid, plain.base)


def _errors(matrix: Tensor, values: Tensor | None, cost: Tensor) -> Tensor:
    """[R] float64: the squared error of each row, weighted by columns [K] or by the Hessian [K, K]; None are zeros."""
    each, found = max(1, AT_ONCE // max(1, matrix.shape[1])), []
    for first in range(0, len(matrix), each):
        error = matrix[first : first + each]
        error = error if values is None else error - values[first : first + each]
        weighted = error * cost if cost.dim() == 1 else error @ cost
        found.append((error.double() * weighted.double()).sum(1))
    return torch.cat(found)


def _filled_values(encoded: Encoded, layout: ScaledBlocks) -> Tensor:
    return _filled(decode(encoded).reshape(layout.rows, layout.cols), layout)


def _filled(matrix: Tensor, layout: ScaledBlocks) -> Tensor:
    """Columns of zeros up to whole blocks."""
    return torch.nn.functional.pad(matrix, (0, layout.filled - layout.cols)).contiguous()


def _column_weights(moments: Tensor | None, layout: ScaledBlocks, device: torch.device, name: str) -> Tensor:
    if moments is None:
        weights = torch.ones(layout.cols, device=device)
    else:
        check_statistics(moments, (layout.cols,), "moments", name)
        if bool((moments < 0).any()):
            raise FormatError(f"{name}: `moments` are mean squares, and {int((moments < 0).sum())} are below zero")
        weights = moments.to(device, torch.float64)
        weights = (weights / weights.mean()).nan_to_num(1.0).float() + UNSEEN
    return torch.nn.functional.pad(weights, (0, layout.filled - layout.cols))
