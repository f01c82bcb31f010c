"""What it means that an operator's input has a format: its numbers are rounded to the format at each call.

    y = decode(weight) @ round_input(x, "q8_0_gguf").T

| name | scale | rounding | also known as |
|---|---|---|---|
| q8_0_gguf | float16, max |x| / 127 of 32 numbers | ties away from zero | `int8`, `8`; llama.cpp's Q8_0 blocks |
| q8_k | float32, -127 / x of the 256 numbers' largest | ties to even | llama.cpp's Q8_K blocks, for K-quants and IQ |
| int8_row | float32, max |x| / 127 of a token | ties to even | int8 per token |
| fp8_e4m3_row | float32, max |x| / 448 of a token | ties to even | `fp8`; fp8 per token |
| int8_static@SCALE | this one, for all tokens, measured before | ties to even; larger numbers become 127 | |

Scales are taken from the numbers themselves (dynamic), but the last one's, which calibration measured (static):
`int8_static` without a scale rounds nothing: `with_scale` adds the scale that calibration measured.

q8_0_gguf is llama.cpp's `quantize_row_q8_0_ref`. Its code for AVX and Neon multiplies by 127 / max instead of the
reciprocal of max / 127, and rounds ties to even, so one code in some thousands differs by one step. With weights that
have minima (Q4_1) llama.cpp keeps a sum beside the same codes (Q8_1). `llama_cpp_input` says which weights get which.

Rows are filled with zeros to whole blocks. What is NaN or infinite, or too large for its scale, is not finite
afterwards: nothing is refused in the middle of a model. For gradients rounding counts as no change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bitplan.base.errors import FormatError, did_you_mean
from bitplan.formats.format import Format
from bitplan.formats.registry import get_format

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEEP = "keep"
STATIC, Q8_K = "int8_static", "q8_k"
AS_LLAMA_CPP = "llama.cpp"
INPUT_FORMATS = ("q8_0_gguf", Q8_K, "int8_row", "fp8_e4m3_row", STATIC)
_SHORT = {"int8": "q8_0_gguf", "8": "q8_0_gguf", "fp8": "fp8_e4m3_row"}
_Q8_K_BLOCK, _LARGEST_CODE = 256, 127
# One format for all layers, or one for each weight by its name; None: inputs stay as they are.
Inputs = str | Mapping[str, str | None] | None


def input_format(name: str | None, where: str = "inputs") -> str | None:
    """The format's name, for a name that a user gave; None for "keep": inputs stay as they are."""
    if name is None or name == KEEP:
        return None
    full_name = _SHORT.get(name, name) if isinstance(name, str) else name
    if full_name in INPUT_FORMATS:
        return full_name
    if isinstance(full_name, str) and full_name.startswith(f"{STATIC}@"):
        return with_scale(_scale_in(full_name, where))
    names = (KEEP, *_SHORT, *INPUT_FORMATS)
    hint = did_you_mean(str(name), names)
    raise FormatError(f"{where}: no format of inputs {name!r:.60}; there are {', '.join(names)}{hint}")


def with_scale(scale: float) -> str:
    """The static format of this scale; its name holds the float32 exactly."""
    return f"{STATIC}@{scale:.9g}"


def require_scale(name: str | None, where: str) -> None:
    """Refuse a static format that nobody has measured a scale for."""
    if name == STATIC:
        raise FormatError(
            f"{where}: {STATIC} has no scale yet; a text gives one (to `bitplan quantize`, or to "
            f"bitplan.packed.rounded_inputs.calibrate_inputs), or write it: {with_scale(0.05)}"
        )


def llama_cpp_input(weight_format: str) -> str | None:
    """What llama.cpp's CPU code rounds the input of a product with this weight to; None for plain floats."""
    is_foreign = ":" in weight_format  # a type of GGUF that comes decoded: those of blocks of 256
    if not is_foreign and get_format(weight_format).is_cast:
        return None
    return Q8_K if is_foreign or get_format(weight_format).block.cols == _Q8_K_BLOCK else "q8_0_gguf"


def round_input(x: Tensor, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers that x stands for after it is rounded, in `dtype`, or in its own type; the definition."""
    numbers = x.detach().float()
    if name.startswith(STATIC):
        rounded = _static(numbers, _scale_in(name, "round_input"))
    elif name == Q8_K:
        rounded = _blocks_of_k(numbers)
    else:
        rounded = _by_format(numbers, get_format(name))
    return rounded.to(dtype or x.dtype)


def token_codes(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The codes of x [tokens, numbers] in a format of one scale a token, and the scales [tokens, 1]."""
    fmt, numbers = get_format(name), x.detach().float()
    codes, stored = fmt.quantize(numbers, fmt.scale_for(fmt.limits(numbers, "absmax", 100.0)), None, None)
    return codes, stored.reshape(-1, 1)


def _by_format(numbers: Tensor, fmt: Format) -> Tensor:
    assert fmt.scales is not None
    filled = _filled(numbers, fmt.padded_cols(numbers.shape[-1]))
    codes, stored = token_codes(filled.reshape(-1, fmt.block.cols or numbers.shape[-1]), fmt.name)
    decoded = fmt.dequantize(codes, fmt.scales.load(stored.flatten(), None), None).reshape(filled.shape)
    return decoded[..., : numbers.shape[-1]]


def _blocks_of_k(numbers: Tensor) -> Tensor:
    """Round as llama.cpp's `quantize_row_q8_K_ref`: the number of the largest magnitude becomes -127."""
    import torch

    width = numbers.shape[-1]
    filled = _filled(numbers, -(-width // _Q8_K_BLOCK) * _Q8_K_BLOCK)
    blocks = filled.reshape(-1, _Q8_K_BLOCK)
    top = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    # Written as a quotient of tensors: of a number and a tensor torch takes the reciprocal first.
    factor = torch.where(top == 0, torch.zeros_like(top), torch.full_like(top, -_LARGEST_CODE) / top)
    codes = (factor * blocks).round().clamp(max=_LARGEST_CODE)
    decoded = torch.where(factor == 0, torch.zeros_like(blocks), codes * factor.reciprocal())
    return torch.where(top.isfinite(), decoded, top).reshape(filled.shape)[..., :width]


def _static(numbers: Tensor, scale: float) -> Tensor:
    import torch

    step = torch.tensor(scale, dtype=torch.float32, device=numbers.device)
    rounded = (numbers / step).round().clamp(-_LARGEST_CODE, _LARGEST_CODE) * step
    return torch.where(numbers.isfinite(), rounded, numbers)


def _filled(numbers: Tensor, width: int) -> Tensor:
    from torch.nn import functional

    return functional.pad(numbers, (0, width - numbers.shape[-1]))


@functools.lru_cache(4096)
def _scale_in(name: str, where: str) -> float:
    require_scale(name, where)
    try:
        scale = float(name.partition("@")[2])
    except ValueError:
        scale = math.nan
    if not 2.0**-126 <= scale <= 2.0**100:
        raise FormatError(f"{where}: the scale of {name[:60]!r} must be a positive number, such as {with_scale(0.05)}")
    return scale
