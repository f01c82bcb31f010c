"""Computes the rounding error of a weight in a format, W - W_hat, on its device and without waiting for it.

`encode` checks that every number is finite, which waits for a GPU; in a training step nothing may wait. So the Triton
kernels are called here without that check: a weight that is not finite gives a difference that is not finite, and the
reader of the resulting figure excludes it. Formats without a kernel, and other devices, use `encode` and `decode`.

W_hat is decoded to the type of W, in which the streaming runtime computes: this is the error of a real run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.formats import Encoded, Format, get_format
from bitplan.kernels import decode, encode
from bitplan.kernels.codec.dispatch import explain_encode


@torch.no_grad()
def rounding_error(weight: Tensor, fmt: Format | str) -> Tensor:
    """W - W_hat in the weight's own type."""
    fmt = get_format(fmt)
    return weight.detach() - decode(_encode(weight.detach(), fmt), weight.dtype).to(weight.device)


@torch.no_grad()
def relative_output_error(inputs: Tensor, difference: Tensor, outputs: Tensor) -> Tensor:
    """||(W - W_hat) x|| / ||y|| of a linear layer, a tensor of one number; NaN where the output is zero."""
    moved = linear_in_fast_type(inputs.reshape(-1, inputs.shape[-1]), difference)
    error: Tensor = torch.linalg.vector_norm(moved.float()) / torch.linalg.vector_norm(outputs.float())
    return error


def linear_in_fast_type(inputs: Tensor, weight: Tensor) -> Tensor:
    """x W^T in the type of x on a GPU; on a CPU, which may have no hardware for small floats, in float32."""
    dtype = inputs.dtype if inputs.is_cuda else torch.float32
    return torch.nn.functional.linear(inputs.to(dtype), weight.to(dtype))


def _encode(weight: Tensor, fmt: Format) -> Encoded:
    if not (weight.is_cuda and explain_encode(weight, fmt).implementation == "triton"):
        return encode(weight, fmt)
    from bitplan.kernels.codec.triton_codec import ENCODERS  # loads Triton

    shape = tuple(weight.shape)
    data, scales = ENCODERS[fmt.name](weight.reshape(fmt.matrix_shape(shape)).contiguous(), fmt)
    parts = fmt.part_shapes(shape)
    return Encoded(fmt, shape, data.reshape(parts["data"][1]), scales.reshape(parts["scales"][1]))
