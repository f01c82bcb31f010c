"""Names for activations, found by what they compute: a chain of steps is run on a few numbers and compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import Tensor

KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "exp": torch.exp,
}
# What joins gate and up beside act(gate) * up.
GATINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gpt_oss": lambda gate, up: (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)),
}
OTHER = "other"


def name_of(inputs: Tensor, outputs: Tensor) -> str:
    """The activation that makes these outputs of these inputs; "other" where none that is known does."""
    for name, function in KNOWN.items():
        if is_close(function(inputs), outputs):
            return name
    return OTHER


def is_close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding; constants are often written with seven digits, and gelu differs from its tanh by 1e-3."""
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-6, atol=1e-6))
