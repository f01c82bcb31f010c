"""round_weight: the same bytes as `encode`, better numbers.

With a Hessian of its inputs, columns of a weight make up for each other's errors (`error_compensation`). In GGUF's
blocks of groups (the K-quants) a block's scales and minima are found by the format's own weighted search, just before
its columns are rounded, from the weights as they are then; codes then take part in compensation, and both in sweeps.

With second moments of the outputs' gradients, rows make up for each other too. The error that counts is then
tr(G E H E^T), with E = weight - value, H = X^T X of the inputs, and G = the second moments of the loss's gradients by
the outputs: to second order the change of the loss, where inputs and gradients are taken as independent. Rows are
rounded some at a time, those with the largest gradients first, and the errors of each batch go to the rows not yet
rounded, in the proportions that the Cholesky factor of G's inverse gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats import Encoded, get_format
from bitplan.formats.dispatch import decode, encode
from bitplan.formats.format import Format
from bitplan.formats.gguf.blocks import GgufBlocks, GgufVectors
from bitplan.formats.gguf.layouts import Layout
from bitplan.formats.gguf.search import SearchBySums, TorchSums, search_blocks
from bitplan.formats.scale_rules import reciprocal
from bitplan.rounding.error_compensation import (
    MUST_BE,
    InputHessian,
    Order,
    OrderedFactor,
    check_statistics,
    compensate,
    factor_of,
    sweep,
)
from bitplan.rounding.layout import (
    Grid,
    ScaledBlocks,
    assemble,
    grid_of,
    join_rows,
    layout_of,
    rows_of,
    scales_of,
    unordered,
    with_rows_of,
)
from bitplan.rounding.round_columns import in_batches, is_compiled, loops_for, rounding_rows_of
from bitplan.rounding.round_vectors import round_vectors
from bitplan.rounding.scale_search import GroupScales, ScaleLadder, search_scales

# ---- GGUF's blocks of groups -----------------------------------------------------------------------------------------


def grid_of_groups(fmt: GgufBlocks) -> Grid:
    table = fmt.layout.table
    if table is not None:
        return Grid(float(table[0]), float(table[-1]), table=tuple(map(float, table)))
    return Grid(float(fmt.layout.low), float(fmt.layout.high))


def stored_codes(numbers: Tensor, fmt: GgufBlocks) -> Tensor:
    """Return the uint8 codes that are stored for these numbers."""
    if fmt.layout.table is None:
        return (numbers - fmt.layout.low).to(torch.uint8)
    return torch.searchsorted(numbers.new_tensor(fmt.layout.table), numbers.contiguous()).to(torch.uint8)


def round_groups(matrix: Tensor, by: OrderedFactor, fmt: GgufBlocks, sweeps: int) -> Tensor:
    """Round numbers [R, filled] to a GGUF format of groups; returns the stored bytes [R, bytes per row]."""
    scales = GroupScales.empty(matrix, fmt.layout)
    codes = _compensate(matrix, by, fmt, scales)
    _sweep(matrix, by.damped, codes, scales, fmt, sweeps)
    packed = fmt.layout.pack(scales.parts(stored_codes(codes, fmt)))
    return packed.reshape(len(matrix), -1)


# Searches what is stored for a block, and rounds it: numbers [R, n] and factor [n, n] in the order of `columns`, the
# block, `columns` -> codes and errors [R, n].
RoundBlock = Callable[[Tensor, Tensor, int, slice], tuple[Tensor, Tensor]]


def _compensate(matrix: Tensor, by: OrderedFactor, fmt: GgufBlocks, scales: GroupScales) -> Tensor:
    """Round block after block to codes [R, filled]; columns after a block make up for the block's error."""
    width, on_gpu, at = fmt.layout.numbers, in_batches(matrix), by.columns
    make = _on_gpu if on_gpu else _compiled if is_compiled(matrix) else _by_torch
    factor = by.factor.contiguous() if on_gpu else by.factor
    round_block = make(factor, fmt.layout, grid_of_groups(fmt), at, scales)
    left, codes = matrix[:, at].contiguous(), torch.empty_like(matrix)
    for at_block, block in enumerate(by.blocks):
        columns = slice(at_block * width, (at_block + 1) * width)
        codes[:, columns], errors = round_block(left[:, columns], factor[columns, columns], block, columns)
        rest = left[:, columns.stop :]
        if on_gpu:  # one launch; its sums have another order
            rest.addmm_(errors, factor[columns, columns.stop :], alpha=-1)
        elif rest.shape[1]:
            rest -= errors @ factor[columns, columns.stop :]
    return unordered(codes, at)


def _by_torch(_factor: Tensor, layout: Layout, grid: Grid, at: Tensor, scales: GroupScales) -> RoundBlock:
    search = SearchBySums(TorchSums())

    def round_block(piece: Tensor, factor_of_block: Tensor, block: int, columns: slice) -> tuple[Tensor, Tensor]:
        inside = at[columns] - block * layout.numbers
        numbers, weights = torch.empty_like(piece), torch.empty_like(piece[0])
        numbers[:, inside] = piece
        weights[inside] = factor_of_block.diagonal().square().reciprocal()
        scales.put(block, search_blocks(numbers, weights, layout, search))
        steps, offsets, groups = scales.steps(block), scales.offsets(block), inside // layout.group
        codes, errors = loops_for(piece).round_piece(piece, factor_of_block, steps, offsets, groups, grid)
        return codes, errors

    return round_block


def _compiled(factor: Tensor, layout: Layout, grid: Grid, at: Tensor, scales: GroupScales) -> RoundBlock:
    """A function that rounds one block by compiled loops: for small matrices torch's calls take longer."""
    from bitplan.rounding.round_columns_cpu import BlockRounder

    return BlockRounder(layout, grid, _block_weights(factor, at, layout), at % layout.numbers, scales).round


def _on_gpu(factor: Tensor, layout: Layout, grid: Grid, at: Tensor, scales: GroupScales) -> RoundBlock:
    """A function that rounds one block by two kernel launches, without waiting for the GPU."""
    from bitplan.formats.gguf.triton_group_search import search_into
    from bitplan.rounding.triton_rounding import round_piece

    width = layout.numbers
    parts = (at % width // layout.group).int()
    in_order = (torch.arange(len(at), device=at.device) % width).int()[None]
    positions = unordered(in_order, at)[0]  # of a block's columns, from left to right
    weights = _block_weights(factor, at, layout)
    unused = torch.empty((len(scales.d), width), dtype=torch.uint8, device=at.device)

    def round_block(piece: Tensor, factor_of_block: Tensor, block: int, columns: slice) -> tuple[Tensor, Tensor]:
        inside, groups = _columns(block, width), scales.groups(block)
        d, dmin = scales.d[:, block : block + 1], scales.dmin[:, block : block + 1]
        stored = d, dmin, scales.scales[:, groups], scales.mins[:, groups]
        search_into(piece, weights[inside], layout, positions[inside], *stored, unused)
        if layout.has_groups:  # taken away where it has integers, added where it has none
            dmin.neg_()
        return round_piece(piece, factor_of_block, scales.steps(block), scales.offsets(block), parts[columns], grid)

    return round_block


def _sweep(matrix: Tensor, hessian: Tensor, codes: Tensor, scales: GroupScales, fmt: GgufBlocks, sweeps: int) -> None:
    """Improve scales and codes in place, each to its best value while all others stay fixed, `sweeps` times."""
    layout, loops, grid = fmt.layout, loops_for(matrix), grid_of_groups(fmt)
    width = layout.numbers
    blocks = range(matrix.shape[1] // width)
    gradient = (matrix - scales.values(codes)) @ hessian
    if is_compiled(matrix):
        from bitplan.rounding.round_columns_cpu import sweep_groups

        sweep_groups(gradient, codes, hessian, scales, grid, sweeps)
        return
    parts = torch.arange(width) // layout.group
    for done in range(sweeps):
        if in_batches(matrix):
            _sweep_batches(gradient, hessian, codes, scales, grid, is_last=done + 1 == sweeps)
            continue
        for block in blocks:
            cols = _columns(block, width)
            own_hessian, slope_before = hessian[cols, cols], gradient[:, cols]
            moved, slope = scales.improve(block, codes[:, cols], slope_before, own_hessian)
            codes[:, cols], changes = loops.sweep_piece(
                slope, codes[:, cols], own_hessian, scales.steps(block), parts, grid
            )
            gradient -= (moved + changes) @ hessian[cols]


def _sweep_batches(
    gradient: Tensor, hessian: Tensor, codes: Tensor, scales: GroupScales, grid: Grid, *, is_last: bool
) -> None:
    """Run one sweep on a GPU: improve codes and scales in place, and the gradient with them."""
    from bitplan.rounding.triton_rounding import BlockScales, sweep_batches, sweep_groups

    layout, cols = scales.layout, gradient.shape[1]
    if not layout.has_groups and not layout.has_min:  # a float16 number for each block: many blocks in one launch
        scaled = BlockScales("f16", layout.numbers, grid, is_signed=True)
        sweep_batches(gradient, codes, scales.d, hessian, scaled, is_last=is_last)
        return
    changes = gradient.new_empty(len(gradient), layout.numbers)
    for first in range(0, cols, layout.numbers):
        stop = first + layout.numbers
        sweep_groups(
            gradient, codes, hessian, first, layout, grid, scales.d, scales.dmin, scales.scales, scales.mins, changes
        )
        others = slice(stop if is_last else 0, cols)
        gradient[:, others].addmm_(changes, hessian[first:stop, others], alpha=-1)


def _block_weights(factor: Tensor, at: Tensor, layout: Layout) -> Tensor:
    """Weights of columns as the search of each block takes them: with a mean near 1, none too small."""
    raw = unordered(factor.diagonal().square().reciprocal()[None], at)[0].double().reshape(-1, layout.numbers)
    return (raw / raw.mean(1, keepdim=True).clamp(min=1e-300)).clamp(1e-6, 1e6).float().reshape(-1)


def _columns(block: int, width: int) -> slice:
    return slice(block * width, (block + 1) * width)


# ---- rows that make up for each other --------------------------------------------------------------------------------


# Rounds a matrix [rows, filled], given its rows as `encode` has them.
RoundRows = Callable[[Tensor, Encoded, ScaledBlocks], Encoded]
DAMPING = 0.05
BATCHES, BATCHES_UNCOMPILED = 24, 8  # without compiled loops every batch takes as long as the whole weight
FEWEST_ROWS = 16


def check_outputs(outputs: Tensor, layout: ScaledBlocks, name: str) -> None:
    """Refuse what cannot be second moments; all zeros are moments of outputs that no loss minds."""
    check_statistics(outputs, (layout.rows, layout.rows), "outputs", name)
    below = int((outputs.diagonal() < 0).sum())
    if below:
        raise FormatError(
            f"{name}: `outputs` is not positive definite: {below} numbers of its diagonal are below zero; it must be "
            f"{MUST_BE['outputs']}"
        )


def takes_feedback(outputs: Tensor | None, layout: ScaledBlocks) -> bool:
    """Whether rows can also make up for each other's errors: rows share no scale, and `outputs` is not all zeros."""
    return outputs is not None and layout.height == 1 and layout.rows > 1 and float(outputs.diagonal().sum()) > 0


def round_with_feedback(
    matrix: Tensor, outputs: Tensor, plain: Encoded, layout: ScaledBlocks, round_rows: RoundRows, name: str
) -> Encoded:
    """Round a matrix so that rows make up for each other's errors too; `outputs` [R, R] is G, in any unit."""
    order = outputs.diagonal().argsort(descending=True, stable=True).to(matrix.device)
    factor = factor_of(outputs.to(matrix.device), DAMPING, order, name, "outputs")[1]
    left, rounded = matrix[order], []
    step = max(FEWEST_ROWS, -(-layout.rows // (BATCHES if is_compiled(matrix) else BATCHES_UNCOMPILED)))
    for first in range(0, layout.rows, step):
        last = min(first + step, layout.rows)
        piece = left[first:last].contiguous()
        own_rows, part = rows_of(plain, layout, order[first:last]), replace(layout, rows=last - first)
        with rounding_rows_of(matrix):
            rounded.append(round_rows(piece, own_rows, part))
        values = decode(rounded[-1], torch.float32).reshape(last - first, -1)
        errors = piece - torch.nn.functional.pad(values, (0, layout.filled - values.shape[1]))
        own_factor = factor[first:last, first:last].T
        left[last:] -= factor[first:last, last:].T @ torch.linalg.solve_triangular(own_factor, errors, upper=False)
    return join_rows(rounded, plain, order)


# ---- a weight as a whole ---------------------------------------------------------------------------------------------


Measure = Literal["squared error", "moments", "hessian", "hessian and outputs"]
SWEEPS = 4
AT_ONCE = 2**27  # numbers of a matrix that are rounded at once
# Columns whose input was never seen count a little, so that their scales are not arbitrary.
UNSEEN = 1e-6


@dataclass(frozen=True)
class Rounding:
    """The result of rounding a weight: the error that was minimised, before and after.

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
    """Round a weight as `round_with_report` does, without its report."""
    return _round(weight, fmt, has_report=False, **options)[0]


def round_with_report(
    weight: Tensor, fmt: Format | str, **options: Unpack[RoundingOptions]
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
    """Do what `round_with_report` does; without a report its errors are in the Hessian's own unit, which saves a large
    product.
    """
    fmt = get_format(fmt)
    if device is not None:
        weight = weight.to(device)
    if outputs is not None and hessian is None:
        raise FormatError(f"{name}: `outputs` is used together with `hessian`, X^T X of the inputs, which is not given")
    plain = encode(weight, fmt, pad=pad, base=base, name=name)
    measure: Measure = "hessian" if hessian is not None else "moments" if moments is not None else "squared error"
    if (
        not (isinstance(fmt, GgufBlocks) or (grid_of(fmt.element) is not None and not fmt.zero_point))
        or not weight.numel()
    ):
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
        if takes_feedback(outputs, layout):

            def round_rows(piece: Tensor, plain_rows: Encoded, part: ScaledBlocks) -> Encoded:
                return _by_hessian(piece, ordered, plain_rows, part, sweeps)

            assert outputs is not None
            measure, rounded = (
                "hessian and outputs",
                round_with_feedback(matrix, outputs, plain, layout, round_rows, name),
            )
        else:
            rounded = _by_hessian(matrix, ordered, plain, layout, sweeps)

    def errors_of(encoded: Encoded | None) -> Tensor:
        """Return the error of each strip, or of all where rows make up for each other; None: of the weights alone."""
        values = None if encoded is None else _filled(decode(encoded).reshape(layout.rows, layout.cols), layout)
        if measure == "hessian and outputs" and outputs is not None:
            error = matrix if values is None else matrix - values
            return (outputs.to(error.device).float() * (error @ cost @ error.T)).double().sum().reshape(1)
        return layout.sum_of_strips(_errors(matrix, values, cost))

    before, after = errors_of(plain), errors_of(rounded)
    worse = (~(after <= before)).expand(layout.strips)
    unit = (float(errors_of(None).sum()) or 1.0) if has_report else 1.0
    report = Rounding(
        measure,
        float(before.sum()) / unit,
        float(torch.minimum(after.nan_to_num(torch.inf), before).sum()) / unit,
        layout.strips,
        int(worse.sum()),
        used,
    )
    return with_rows_of(rounded, plain, layout, worse), report


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
    if isinstance(fmt, GgufVectors):
        parts = [round_vectors(matrix[rows], by, fmt, sweeps) for rows, _ in _strips_at_once(layout)]
        return Encoded(fmt, shape, torch.cat(parts).reshape(plain.data.shape))
    if isinstance(fmt, GgufBlocks):
        parts = [round_groups(matrix[rows], by, fmt, sweeps) for rows, _ in _strips_at_once(layout)]
        return Encoded(fmt, shape, torch.cat(parts).reshape(plain.data.shape))
    ladder, scales = _ladder(plain), scales_of(plain, layout)
    codes, found_scales = [], []
    for rows, strips in _strips_at_once(layout):
        some = replace(layout, rows=rows.stop - rows.start)
        rounded = compensate(matrix[rows], by, scales[strips], some, ladder)
        rounded = sweep(matrix[rows], by.damped, rounded, some, ladder, sweeps)
        codes.append(rounded.codes)
        found_scales.append(rounded.scales)
    return assemble(fmt, shape, torch.cat(codes), ladder.store(torch.cat(found_scales)), plain.base)


def _strips_at_once(layout: ScaledBlocks) -> list[tuple[slice, slice]]:
    """Slices (rows, strips) that divide a matrix into pieces small enough to be rounded at once."""
    strips_at_once = max(1, AT_ONCE // max(1, layout.filled * layout.height))
    return [
        (
            slice(first * layout.height, min((first + strips_at_once) * layout.height, layout.rows)),
            slice(first, first + strips_at_once),
        )
        for first in range(0, layout.strips, strips_at_once)
    ]


def _ladder(plain: Encoded) -> ScaleLadder:
    grid = grid_of(plain.fmt.element)
    assert grid is not None
    return ScaleLadder(plain.fmt, grid, plain.base)


def _errors(matrix: Tensor, values: Tensor | None, cost: Tensor) -> Tensor:
    """Return the squared error of each row, [R] float64, weighted by [K] columns or [K, K] Hessian; None are zeros."""
    rows_at_once, errors = max(1, AT_ONCE // max(1, matrix.shape[1])), []
    for first in range(0, len(matrix), rows_at_once):
        error = matrix[first : first + rows_at_once]
        error = error if values is None else error - values[first : first + rows_at_once]
        weighted = error * cost if cost.dim() == 1 else error @ cost
        errors.append((error.double() * weighted.double()).sum(1))
    return torch.cat(errors)


def _filled(matrix: Tensor, layout: ScaledBlocks) -> Tensor:
    """The matrix with columns of zeros added up to whole blocks."""
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
