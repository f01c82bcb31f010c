"""Repacking: the same codes in another byte layout, without rounding a value."""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format
from bitplan.formats.registry import get_format
from bitplan.formats.scale_rules import E8M0_NAN

# Pairs of formats that hold the same numbers in different bytes.
_TWINS = ({"q4_0_poly", "q4_0_gguf"}, {"mxfp4", "mxfp4_gguf"})


def repack(encoded: Encoded, fmt: Format | str, *, round_scales: bool = False) -> Encoded:
    """Move codes and scales to a twin layout: q4_0_poly <-> q4_0_gguf, mxfp4 <-> mxfp4_gguf.

    The codes never change. GGUF's scales are float16: a float32 scale that does not fit is an error,
    unless `round_scales` accepts the nearest one.
    """
    target = get_format(fmt)
    if {encoded.fmt.name, target.name} not in _TWINS:
        pairs = ", ".join(" <-> ".join(sorted(pair)) for pair in _TWINS)
        raise FormatError(
            f"{encoded.fmt.name} does not repack to {target.name} without rounding (only {pairs}); "
            "decode and encode instead"
        )
    assert encoded.scales is not None
    assert target.scales is not None
    assert target.packing is not None
    scales = encoded.scales.to(target.scales.dtype)
    if scales.dtype.is_floating_point:
        _check_rounding(encoded, scales, round_scales)
    elif bool((scales == E8M0_NAN).any()):
        raise FormatError(f"a scale byte 255 of {encoded.fmt.name} is NaN to mxfp4 and 2^128 to mxfp4_gguf")
    data = target.packing.pack(encoded.codes())
    return Encoded(target, encoded.shape, data.reshape(target.part_shapes(encoded.shape)["data"][1]), scales)


def _check_rounding(encoded: Encoded, scales: Tensor, round_scales: bool) -> None:
    assert encoded.scales is not None
    changed = int((scales.to(encoded.scales.dtype) != encoded.scales).sum())
    if changed and not (round_scales and bool(torch.isfinite(scales).all())):
        raise FormatError(
            f"{changed} of {scales.numel()} scales of {encoded.fmt.name} do not fit {scales.dtype} exactly; "
            "pass round_scales=True to round those in range (each value then moves by at most 2^-11 of itself, "
            "or 2^-22 where the scale is below 2^-14)"
        )
