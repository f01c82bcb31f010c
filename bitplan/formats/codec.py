"""Defines `encode` and `decode` of every format, in plain torch.

This code is slow and clear; tests compare the fast kernels in `bitplan.formats.dispatch` with it bit for bit. Work goes
tile by tile, so that a large tensor costs its own output and a few megabytes more.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from bitplan.base.errors import FormatError, NonFiniteError
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format, from_blocks, tile_of_grid, tiles, to_blocks
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.formats.gguf.layouts import SMALLER_BLOCKS
from bitplan.formats.registry import get_format
from bitplan.formats.scale_rules import SCALE_RULES, BasedScales, ScaleRule, flush_small, scale_of_limit

NonFinite = Literal["error", "replace"]


def encode(
    x: Tensor,
    fmt: Format | str,
    *,
    scale_rule: ScaleRule | None = None,
    percentile: float = 99.9,
    importance: Tensor | None = None,
    scale: float | Tensor | None = None,
    zero_point: int | None = None,
    base: float | None = None,
    pad: Literal["zero"] | None = None,
    nonfinite: NonFinite = "error",
    name: str = "tensor",
) -> Encoded:
    """Hold a float tensor in a format.

    A plain cast (float64, float32, float16, bfloat16) has no scale to choose, and keeps NaN and infinities.

    scale_rule  how each block's scale is chosen: absmax, absmean, percentile or mse; see `scales`
    percentile  the quantile of |x| that `percentile` clips at
    importance  for `mse`: a weight per column (mean squared activation, say)
    scale       use this scale and no rule; a number, or a tensor with one scale per block
    zero_point  for unsigned formats: the code that stands for 0.0; by default it follows from the range
    base        for formats whose scales share a base factor: this factor
    pad         "zero" fills the last block of a row that is not whole; decode drops the filling
    nonfinite   "error", or "replace": NaN by 0, infinities by the largest finite magnitude
    name        what errors call the tensor
    """
    fmt = get_format(fmt)
    x, shape = readable(x, name), tuple(x.shape)
    if not 0 < percentile <= 100:
        raise FormatError(f"{name}: `percentile` lies above 0 and up to 100, got {percentile}")
    if fmt.is_cast:
        check_cast_options(fmt, scale_rule, scale, zero_point, base, name)
        numbers = x if nonfinite == "error" else finite(x, nonfinite, name)
        return Encoded(fmt, shape, torch.empty(shape, dtype=fmt.storage, device=x.device).copy_(numbers))
    rule = check_options(fmt, scale_rule, importance, zero_point, base, shape, name)
    check_whole_blocks(fmt, shape, pad, name)
    matrix = finite(x, nonfinite, name).reshape(fmt.matrix_shape(shape))
    check_magnitude(fmt, matrix, name)
    if isinstance(fmt, GgufBlocks):
        if scale is not None:
            raise FormatError(f"{name}: {fmt.name} searches its scales, and takes no `scale`; leave it out")
        fmt.check_range(matrix, name)
        return encode_opaque(fmt, shape, matrix, importance)
    zero = base_part = None
    if fmt.zero_point:
        exact_scales, zero = choose_affine(fmt, matrix, rule, percentile, importance, scale, zero_point)
    else:
        exact_scales, base_part = choose_scales(fmt, matrix, rule, percentile, importance, scale, base)
    encoded = encode_with_scales(fmt, shape, matrix, exact_scales, base_part, zero)
    check_scales(encoded, name)
    return encoded


def readable(x: Tensor, name: str) -> Tensor:
    """The tensor without its graph, 8-bit floats as float32 (exact; torch has no arithmetic for them)."""
    if not isinstance(x, Tensor) or x.is_meta or x.layout != torch.strided:
        kind = f"{x.layout} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise FormatError(f"{name}: expected a dense torch tensor with numbers in it, got {kind}")
    if not x.is_floating_point() or x.dtype == torch.float4_e2m1fn_x2:
        raise FormatError(f"{name}: expected a float tensor, got {x.dtype}; cast it first if these are weights")
    x = x.detach()
    return x.float() if x.dtype.itemsize == 1 else x


def encode_with_scales(
    fmt: Format, shape: tuple[int, ...], matrix: Tensor, exact_scales: Tensor, base: Tensor | None, zero: Tensor | None
) -> Encoded:
    """Quantize a matrix against scales already chosen, one per block of the grid."""
    assert fmt.scales is not None
    parts = fmt.part_shapes(shape)
    rows, cols = matrix.shape
    data = torch.empty((rows, fmt.data_cols(cols)), dtype=fmt.storage, device=matrix.device)
    stored = torch.empty(exact_scales.shape, dtype=fmt.scales.dtype, device=matrix.device)
    if not matrix.numel():  # there is no tile, but an empty tensor still has its scale
        stored.copy_(fmt.scales.store(exact_scales, base))
    for tile in tiles(fmt, rows, cols, matrix.device):
        blocks = to_blocks(fmt, matrix[tile].to(fmt.work))
        codes, block_scales = fmt.quantize(blocks, tile_of_grid(fmt, exact_scales, tile).reshape(-1), base, zero)
        tile_of_grid(fmt, stored, tile).view(-1).copy_(block_scales)
        height = matrix[tile].shape[0]
        if fmt.packing is None:
            done = from_blocks(fmt, codes, height, fmt.padded_cols(matrix[tile].shape[1]))
            first = tile[1].start
        else:
            done = fmt.packing.pack(codes).reshape(height, -1)
            first = tile[1].start // fmt.packing.per_byte
        data[tile[0], first : first + done.shape[1]] = done
    return Encoded(fmt, shape, data.reshape(parts["data"][1]), stored.reshape(parts["scales"][1]), base, zero)


def encode_opaque(
    fmt: GgufBlocks,
    shape: tuple[int, ...],
    matrix: Tensor,
    importance: Tensor | None,
    search: Any = None,
) -> Encoded:
    """Encode to GGUF's blocks, tile by tile, unchecked; `search` may be a compiled version."""
    rows, cols = matrix.shape
    data = torch.empty((rows, fmt.data_cols(cols)), dtype=fmt.storage, device=matrix.device)
    if importance is not None:
        importance = functional.pad(importance.detach().reshape(-1), (0, fmt.padded_cols(cols) - cols))
    for rows_at, _ in tiles(fmt, rows, cols, matrix.device):
        piece = functional.pad(matrix[rows_at].to(fmt.work), (0, fmt.padded_cols(cols) - cols))
        data[rows_at] = fmt.encode_rows(piece, importance, search)
    return Encoded(fmt, shape, data.reshape(fmt.part_shapes(shape)["data"][1]))


def decode(encoded: Encoded, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers an Encoded stands for, as a float `dtype`, on the device where it lies."""
    check_decodable(encoded, dtype)
    fmt = encoded.fmt
    if fmt.is_cast:
        return encoded.data.to(dtype, copy=True)
    rows, cols = fmt.matrix_shape(encoded.shape)
    out = torch.empty((rows, cols), dtype=dtype, device=encoded.device)
    if isinstance(fmt, GgufBlocks):
        raw = encoded.data.reshape(rows, fmt.data_cols(cols))
        for rows_at, _ in tiles(fmt, rows, cols, encoded.device):
            out[rows_at] = fmt.decode_rows(raw[rows_at])[:, :cols].to(dtype)
        return out.reshape(encoded.shape)
    assert encoded.scales is not None
    assert fmt.scales is not None
    scales = fmt.scales.load(encoded.scales, encoded.base).reshape(fmt.grid(encoded.shape))
    data = encoded.data.reshape(rows, fmt.data_cols(cols))
    for tile in tiles(fmt, rows, cols, encoded.device):
        height, width = out[tile].shape
        blocks = _codes_of_tile(fmt, data, tile, width)
        values = fmt.dequantize(blocks, tile_of_grid(fmt, scales, tile).reshape(-1), encoded.zero_point)
        out[tile] = from_blocks(fmt, values, height, width).to(dtype)
    return out.reshape(encoded.shape)


def check_decodable(encoded: Encoded, dtype: torch.dtype) -> None:
    """Refuse a tensor that is not encoded, and an integer type, which would silently truncate the numbers."""
    if not isinstance(encoded, Encoded):
        raise FormatError(f"decode takes an Encoded, got {type(encoded).__name__}")
    if not dtype.is_floating_point:
        raise FormatError(f"decode gives floats, got dtype={dtype}; Encoded.codes() has the codes")


def _codes_of_tile(fmt: Format, data: Tensor, tile: tuple[slice, slice], width: int) -> Tensor:
    rows_at, cols_at = tile
    if fmt.packing is None:
        padded = fmt.padded_cols(width)
        return to_blocks(fmt, data[rows_at, cols_at.start : cols_at.start + padded])
    first = cols_at.start // fmt.packing.per_byte
    packed = data[rows_at, first : first + fmt.data_cols(width)]
    per_block = fmt.block.cols or width
    return fmt.packing.unpack(packed.reshape(-1, fmt.packing.packed_length(per_block)), per_block)


def check_options(
    fmt: Format,
    rule: str | None,
    importance: Tensor | None,
    zero_point: int | None,
    base: float | None,
    shape: tuple[int, ...],
    name: str,
) -> ScaleRule:
    """The scale rule to use; refuses options that the format would ignore."""
    chosen = next((r for r in fmt.rules if r == (rule or fmt.default_rule)), None)
    if chosen is None:
        why = "it has no best multiple of mean |x|; " if rule in SCALE_RULES else ""
        raise FormatError(f"{name}: {fmt.name} has no scale rule {rule!r}; {why}use one of {', '.join(fmt.rules)}")
    if importance is not None:
        check_importance(fmt, importance, chosen, shape, name)
    if zero_point is not None and not fmt.zero_point:
        raise FormatError(f"{name}: {fmt.name} is signed and has no zero point; leave it out")
    if zero_point is not None and fmt.element is not None and not 0 <= zero_point <= fmt.element.limit:
        raise FormatError(f"{name}: a zero point of {fmt.name} lies in 0..{fmt.element.limit:.0f}, got {zero_point}")
    if base is not None and not (fmt.scales and fmt.scales.needs_base):
        raise FormatError(f"{name}: the scales of {fmt.name} have no base factor; leave `base` out")
    if base is not None and not 0 < base < float("inf"):
        raise FormatError(f"{name}: `base` must be finite and above zero, got {base}")
    return chosen


def check_cast_options(
    fmt: Format,
    rule: str | None,
    scale: float | Tensor | None,
    zero_point: int | None,
    base: float | None,
    name: str,
) -> None:
    """Let a plain cast accept a scale rule, since a model's tensors are encoded with one rule, but no scales."""
    if rule is not None and rule not in SCALE_RULES:
        raise FormatError(f"{name}: no scale rule {rule!r}; use one of {', '.join(SCALE_RULES)}")
    options = {"scale": scale, "zero_point": zero_point, "base": base}
    unused = [f"`{option}`" for option, value in options.items() if value is not None]
    if unused:
        raise FormatError(f"{name}: {fmt.name} is a plain cast and takes no {' and '.join(unused)}; leave it out")


def check_importance(fmt: Format, importance: Tensor, rule: ScaleRule, shape: tuple[int, ...], name: str) -> None:
    if rule != "mse":
        raise FormatError(f"{name}: `importance` weighs the search of scale_rule='mse', got {rule!r}; leave one out")
    cols = fmt.matrix_shape(shape)[1]
    columns = {math.prod(shape[-1:]), math.prod(shape[1:])}  # of the matrix, or of a convolution kernel as a matrix
    fitting = sorted(count for count in columns if count == cols or (count and cols % count == 0))
    if importance.numel() not in fitting:
        counts = " or ".join(map(str, fitting))
        raise FormatError(f"{name}: `importance` needs one weight per column ({counts}), got {importance.numel()}")
    wrong = importance[~((importance >= 0) & importance.isfinite())]
    if len(wrong):
        raise FormatError(f"{name}: `importance` must be finite and not below zero, got {wrong[0]:g}")


def check_magnitude(fmt: Format, matrix: Tensor, name: str) -> None:
    """Refuse doubles that the working precision turns into infinities."""
    largest = torch.finfo(fmt.work).max
    if matrix.dtype == torch.float64 and fmt.work != torch.float64 and matrix.numel():
        beyond = int((matrix.abs() > largest).sum())
        if beyond:
            raise FormatError(
                f"{name}: {beyond} of {matrix.numel()} numbers lie beyond {largest:.3g}, float32's range; "
                "scale them down"
            )


def check_scales(encoded: Encoded, name: str) -> None:
    """Refuse results that would decode to infinity or NaN: scales, or codes times scales, that overflow their type."""
    fmt = encoded.fmt
    assert encoded.scales is not None
    assert fmt.scales is not None
    assert fmt.element is not None
    scales = fmt.scales.load(encoded.scales, encoded.base)
    beyond = scales.numel() - int(scales.isfinite().sum())
    if beyond:
        raise FormatError(
            f"{name}: {beyond} of {scales.numel()} scales of {fmt.name} overflow {encoded.scales.dtype}: "
            "the numbers are too large for the format; scale them down, or choose a format with wider scales"
        )
    if not scales.numel() or float(scales.abs().amax()) * (fmt.element.limit + 1) <= torch.finfo(fmt.work).max:
        return
    decoded = decode(encoded, fmt.work)
    if beyond := decoded.numel() - int(decoded.isfinite().sum()):
        raise FormatError(
            f"{name}: {beyond} of {decoded.numel()} numbers of {fmt.name} overflow {fmt.work} when they are decoded; "
            "scale them down, or choose another format or a smaller scale"
        )


def check_whole_blocks(fmt: Format, shape: tuple[int, ...], pad: str | None, name: str) -> None:
    cols = fmt.matrix_shape(shape)[1]
    if pad not in (None, "zero"):
        raise FormatError(f"{name}: the only padding is pad='zero', got {pad!r}")
    if pad is None and fmt.padded_cols(cols) != cols:
        raise FormatError(
            f"{name}: {fmt.name} has blocks of {fmt.block.cols} along the last axis, and {cols} of shape {shape} is "
            f"not a multiple; {_instead(fmt, cols)}; encode, apply_plan, morph_model and quantize_file can fill it to "
            f"{fmt.padded_cols(cols)}",
            settings={"pad": "zero"},
        )


def _instead(fmt: Format, cols: int) -> str:
    """The nearest format that holds rows of this length, as a hint."""
    smaller = SMALLER_BLOCKS.get(fmt.name)
    if smaller is not None and cols % 32 == 0:
        return f"choose {smaller}, which holds rows of {cols}"
    return "choose a row format such as int8_row"


def finite(x: Tensor, nonfinite: NonFinite, name: str) -> Tensor:
    """The tensor itself if every number is finite; else an error with the count, or x with replacements."""
    if nonfinite not in ("error", "replace"):
        raise FormatError(f"{name}: `nonfinite` is 'error' or 'replace', got {nonfinite!r}")
    if not x.numel():
        return x
    low, high = torch.aminmax(x)
    if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
        return x
    if nonfinite == "replace":
        clean = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        largest = float(clean.abs().amax())
        return x.nan_to_num(nan=0.0, posinf=largest, neginf=-largest)
    bad_nan, bad_inf = int(x.isnan().sum()), int(x.isinf().sum())
    raise NonFiniteError(
        f"{name}: {bad_nan} NaN and {bad_inf} infinite of {x.numel()} numbers; mend the weights (torch.nan_to_num); "
        "encode and quantize_file can replace them: NaN -> 0, inf -> the largest finite magnitude",
        settings={"nonfinite": "replace"},
    )


# ---- the choice of scales --------------------------------------------------------------------------------------------


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
    """Each block's multiple of its absmax scale with the least (weighted) squared error."""
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
