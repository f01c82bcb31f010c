"""An activation between two products and an FP8 cast, and its gradient so too: the reference and the dispatcher.

    cast_activated(y, None, "gelu", ...)          h = gelu(y) [R, F]
    cast_activated(y, None, "silu_gated", ...)    h = silu(gate) * up [R, F], of gate and up side by side in y [R, 2 F]
    cast_activated(y, dh_RF, ...)                 the gradient of y, and with `sums` its sum over the rows (a bias's)

Computed in float32 and rounded once to the type of y; that matrix is then cast tensorwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from bitplan.fp8.casts import CastPair
from bitplan.fp8.kernels.cast import cast_layouts

RECIPE = "tensorwise"  # only one scale for all numbers is guessed, and a guess is what a cast in one read needs
GATED = "_gated"
# "gelu" is torch's own, by the error function; "gelu_tanh" the approximation by tanh.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
FUNCTIONS = (*ACTIVATIONS, *(name + GATED for name in ACTIVATIONS))


def split_function(function: str) -> tuple[str, bool]:
    """(the activation, whether it is gated)."""
    return function.removesuffix(GATED), function.endswith(GATED)


def width_of(function: str, features: int) -> int:
    """The columns of y for so many features of h."""
    return 2 * features if function.endswith(GATED) else features


def cast_activated(
    y: Tensor,
    dh_RF: Tensor | None,
    function: str,
    fp8: str = "e4m3",
    eps: float = 0.0,
    *,
    rows: bool = True,
    cols: bool = True,
    sums: torch.dtype | None = None,
    guess: Tensor | None = None,
) -> tuple[CastPair, Tensor | None]:
    """The activated numbers, or with `dh_RF` the gradient of y, cast; and the gradient's sum over rows as this type.

    `guess`: a state of `guessed_cast`.
    """
    if guess is not None:
        from bitplan.fp8.kernels.triton_activation import cast_by_guess, fits_activated

        act, gated = split_function(function)
        if fits_activated(y, dh_RF, gated):
            return cast_by_guess(y, dh_RF, act, gated, fp8, eps, guess, rows=rows, cols=cols, sums=sums)
    numbers = activate(y, function) if dh_RF is None else activation_gradient(y, dh_RF, function)
    total = None if sums is None else numbers.sum(0, dtype=torch.float32).to(sums)
    return cast_layouts(numbers, RECIPE, fp8, eps, rows=rows, cols=cols, guess=guess), total


def activate(y: Tensor, function: str) -> Tensor:
    act, gated = split_function(function)
    if not gated:
        return _of(act, y.float()).to(y.dtype)
    first, up = y.float().chunk(2, dim=-1)
    return (_of(act, first) * up).to(y.dtype)


def activation_gradient(y: Tensor, dh_RF: Tensor, function: str) -> Tensor:
    """The gradient of y; of gate and up, side by side, where it is gated."""
    dh, (act, gated) = dh_RF.float(), split_function(function)
    if not gated:
        return (dh * _slope(act, y.float())).to(y.dtype)
    first, up = y.float().chunk(2, dim=-1)
    return torch.cat((dh * up * _slope(act, first), dh * _of(act, first)), dim=-1).to(y.dtype)


def _of(name: str, x: Tensor) -> Tensor:
    if name == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    functions: dict[str, Callable[[Tensor], Tensor]]
    functions = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu}
    return functions[name](x)


def _slope(name: str, x: Tensor) -> Tensor:
    """The derivative at x."""
    if name == "relu":
        return (x > 0).to(x.dtype)
    if name == "silu":
        part = torch.sigmoid(x)
        return part * (1.0 + x * (1.0 - part))
    if name == "gelu":
        return 0.5 * (1.0 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * 0.3989422804014327
    part = torch.sigmoid(x * (1.5957691216057308 + 0.07135481282553198 * x * x))
    return part + x * part * (1.0 - part) * (1.5957691216057308 + 3 * 0.07135481282553198 * x * x)
