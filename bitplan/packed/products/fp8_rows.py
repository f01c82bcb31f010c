"""Products on a GPU's FP8 units: inputs in E4M3 with a scale for each token, weights in E4M3 with a scale for each row.

    y = (codes_x * scale_x) @ (codes_w * scale_w).T + bias          torch._scaled_mm, in bfloat16

It is `round_input(x, "fp8_e4m3_row") @ decode(weight).T`, the definition, where the weight's numbers are E4M3 times a
scale for each row without another rounding:

| weights | their codes and scales |
|---|---|
| fp8_e4m3_row | as they are stored |
| mxfp4 | made in each call: one byte a number; a row's scale is 2^-6 of its largest block's |

Blocks of mxfp4 whose scale is up to 2^14 below their row's largest are exact; a weight that has others is refused.

Formats whose scales are not powers of two (int4_g32, nvfp4, q4_0) would be rounded a second time, and are refused.

The FP8 units add the products of 32 numbers with 14 bits, so a result lies within K / 32 * 2^-13 sum_k |x_k w_nk| of
the definition, and is rounded to bfloat16, twice where there is a bias.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from bitplan.base.compiled_code import define_operator
from bitplan.formats import Encoded, get_format
from bitplan.formats.elements import E2M1
from bitplan.formats.input_formats import token_codes

FP8_INPUT = "fp8_e4m3_row"
FORMATS = ("fp8_e4m3_row", "mxfp4")
CAPABILITY = (9, 0)
WIDEST_SPAN = 14  # powers of two between the scales of a row's blocks
SHIFT = 6  # 6 * 2^6, the largest number of a row's largest block, is a number of E4M3
_MULTIPLE = 16  # of rows and of numbers in a row


def why_not_fp8(weight: Encoded, dtype: torch.dtype, input: str | None) -> str | None:
    """Why this product cannot be one of FP8 numbers, as far as types and shapes say; None if it can."""
    if input != FP8_INPUT:
        return f"its inputs are {'not rounded' if input is None else f'in {input}'}, and must be in {FP8_INPUT}"
    if weight.fmt.name not in FORMATS:
        return f"{weight.fmt.name} is not E4M3 times a scale for each row; {' and '.join(FORMATS)} are"
    if dtype != torch.bfloat16:
        return f"FP8 products give bfloat16, the input is {dtype}"
    is_whole = weight.fmt.padded_cols(weight.shape[1]) == weight.shape[1]
    if not is_whole or any(not size or size % _MULTIPLE for size in weight.shape):
        return f"FP8 products need rows of whole blocks, and multiples of {_MULTIPLE}, got shape {weight.shape}"
    return _why_not_here(weight.device)


@functools.cache
def _why_not_here(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return f"FP8 products run on NVIDIA's GPUs, the weight lies on {device}"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"FP8 products need compute capability {'.'.join(map(str, CAPABILITY))}"
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


def why_inexact(weight: Encoded) -> str | None:
    """Why the weight's numbers are not all E4M3 times a scale for each row; None if they are. It waits for the GPU."""
    if weight.fmt.name == "fp8_e4m3_row":
        return None
    assert weight.scales is not None
    power = weight.scales.int()
    below = (_row_power(power) + SHIFT - power) * (weight.data.reshape(*power.shape, -1) & 0x77).any(-1)
    if int(power.max()) == 255:
        return "a scale is not a number"
    widest = int(below.max())
    return None if widest <= WIDEST_SPAN else f"a row's scales span 2^{widest}, more than E4M3's 2^{WIDEST_SPAN}"


def _row_power(power: Tensor) -> Tensor:
    """The exponent byte of each row's scale; a float32's smallest normal number has byte 1."""
    return (power.amax(1, keepdim=True) - SHIFT).clamp(min=1)


def weight_rows(weight: Encoded) -> tuple[Tensor, Tensor]:
    """The weight's numbers as E4M3 codes [outputs, inputs], and the scales of its rows [outputs, 1]."""
    assert weight.scales is not None
    if weight.fmt.name == "fp8_e4m3_row":
        return weight.data, weight.scales
    if weight.device.type == "cuda":
        from bitplan.packed.products.triton_fp8_rows import rows_of_mxfp4

        return rows_of_mxfp4(weight.data, weight.scales, SHIFT)
    power = weight.scales.int()
    row = _row_power(power)
    values = E2M1.value(weight.codes()).reshape(*power.shape, -1)
    codes = torch.ldexp(values, (power - row).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes.reshape(weight.shape), (row << 23).view(torch.float32)


def _e4m3_rows(data: Tensor, scales: Tensor, name: str, inputs: int) -> tuple[Tensor, Tensor]:
    return weight_rows(Encoded(get_format(name), (data.shape[0], inputs), data, scales))


def _shapes_of_rows(data: Tensor, scales: Tensor, _name: str, inputs: int) -> tuple[Tensor, Tensor]:
    codes = data.new_empty((data.shape[0], inputs), dtype=torch.float8_e4m3fn)
    return codes, scales.new_empty((data.shape[0], 1), dtype=torch.float32)


define_operator(
    "e4m3_rows(Tensor data, Tensor scales, str format, int inputs) -> (Tensor, Tensor)", _e4m3_rows, _shapes_of_rows
)


def fp8_linear(x: Tensor, weight: Encoded, bias: Tensor | None) -> Tensor:
    """Compute x [..., inputs] @ W.T + bias on FP8 units, in bfloat16."""
    x_MK = x.reshape(-1, weight.shape[1])
    if x.is_cuda:
        from bitplan.formats.triton_encode import encode_rows

        rows = encode_rows(x_MK.contiguous(), get_format(FP8_INPUT))
    else:
        rows = token_codes(x_MK, FP8_INPUT)
    return product_of_rows(*rows, *weight_rows(weight), bias).reshape(*x.shape[:-1], weight.shape[0])


def product_of_rows(x_MK: Tensor, x_scale: Tensor, w_NK: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    """The product of E4M3 codes and their scales, [rows, 1] each."""
    y = torch._scaled_mm(x_MK, w_NK.t(), x_scale, w_scale.reshape(1, -1), None, None, torch.bfloat16, True)
    return y if bias is None else (y + bias).to(torch.bfloat16)
