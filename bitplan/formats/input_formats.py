"""What it means that an operator's input has a format: its numbers are rounded to the format, row by row, at each call.

    y = decode(weight) @ round_input(x, "q8_0_gguf").T

An input's format is one of the registry's whose blocks lie within a row, with its usual scales, taken from the numbers
themselves (dynamic):

| format | scale | rounding | also known as |
|---|---|---|---|
| q8_0_gguf | float16, max |x| / 127 of 32 numbers | ties away from zero | `int8`; llama.cpp's Q8_0 blocks |
| int8_row | float32, max |x| / 127 of a token | ties to even | int8 per token |
| fp8_e4m3_row | float32, max |x| / 448 of a token | ties to even | fp8 per token |

This is llama.cpp's `quantize_row_q8_0_ref`. Its code for AVX and Neon multiplies by 127 / max instead of the reciprocal
of max / 127, and rounds ties to even, so one code in some thousands differs by one step. With weights that have minima
(Q4_1) llama.cpp keeps a sum beside the same codes (Q8_1); with K-quants it takes blocks of 256 with a float32 scale
(Q8_K), of which there is no format here.

Rows are filled with zeros to whole blocks. A block that holds NaN or an infinity, or is too large for its scale, is not
finite afterwards: nothing is refused in the middle of a model. For gradients rounding counts as no change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitplan.base.errors import FormatError, did_you_mean
from bitplan.formats.format import Format
from bitplan.formats.registry import get_format

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEEP = "keep"
INPUT_FORMATS = ("q8_0_gguf", "int8_row", "fp8_e4m3_row")
_SHORT = {"int8": "q8_0_gguf", "fp8": "fp8_e4m3_row"}


def input_format(name: str | None, where: str = "inputs") -> str | None:
    """The format's name, for a name that a user gave; None for "keep": inputs stay as they are."""
    if name is None or name == KEEP:
        return None
    known = _SHORT.get(name, name) if isinstance(name, str) else name
    if known not in INPUT_FORMATS:
        names = (KEEP, *_SHORT, *INPUT_FORMATS)
        hint = did_you_mean(str(name), names)
        raise FormatError(f"{where}: no format of inputs {name!r:.60}; there are {', '.join(names)}{hint}")
    return known


def round_input(x: Tensor, fmt: Format | str, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers that x stands for after it is rounded, in `dtype`, or in its own type; the definition."""
    from torch.nn import functional

    fmt = get_format(fmt)
    assert fmt.scales is not None
    width, size = x.shape[-1], fmt.block.cols or x.shape[-1]
    filled = functional.pad(x.detach().float(), (0, fmt.padded_cols(width) - width))
    blocks = filled.reshape(-1, size)
    codes, stored = fmt.quantize(blocks, fmt.scale_for(fmt.limits(blocks, "absmax", 100.0)), None, None)
    numbers = fmt.dequantize(codes, fmt.scales.load(stored, None), None).reshape(filled.shape)
    return numbers[..., :width].to(dtype or x.dtype)
