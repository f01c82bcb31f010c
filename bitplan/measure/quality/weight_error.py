"""Computes the rounding error of a weight in a format, W - W_hat, on its device and without waiting for it.

`encode` checks that every number is finite, which waits for a GPU; in a training step nothing may wait. So weights are
encoded here without that check: a weight that is not finite gives a difference that is not finite, and the reader of
the resulting figure excludes it.

W_hat is decoded to the type of W, in which the streaming runtime computes: this is the error of a real run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.formats import Format
from bitplan.kernels import decode
from bitplan.kernels.codec.dispatch import encode_unchecked


@torch.no_grad()
def rounding_error(weight: Tensor, fmt: Format | str) -> Tensor:
    """W - W_hat in the weight's own type."""
    return weight.detach() - decode(encode_unchecked(weight.detach(), fmt), weight.dtype)


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
