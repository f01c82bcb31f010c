"""FP8 casts of a matrix in the layouts that products need, also behind a norm or an activation: what picks a kernel on
a GPU or the definition on a CPU.

    pair = cast_layouts(x_RC, "blockwise", rows=True, cols=True)
    pair.rows   x as it lies, for products that sum along C
    pair.cols   its transpose, for products that sum along R

Rows are padded with zeros to what the recipe needs (16, 32 or 128), so any count of tokens works; a weight is not
padded and must fit. A GPU gets the Triton kernels, a CPU the reference; "triton" on a CPU runs under Triton's
interpreter, for tests.

`norm_and_cast` normalises first; `norm_gradient` is the norm's gradient:

    normed = norm_and_cast(x_RC, NormWeights("rms", weight, None, 1e-6), "blockwise", rows=True, cols=True)

The norm is that of torch.nn.RMSNorm or LayerNorm: computed in float32, weight and bias included, and rounded once to
the type of x; that matrix is then cast. Mean and deviation are sums, so Triton and torch may differ in their last bit,
and a code where a number sits on a tie.

`cast_activated` casts an activation between two products, or the activation's gradient:

    cast_activated(y, None, "gelu", ...)          h = gelu(y) [R, F]
    cast_activated(y, None, "silu_gated", ...)    h = silu(gate) * up [R, F], of gate and up side by side in y [R, 2 F]
    cast_activated(y, dh_RF, ...)                 the gradient of y, and with `sums` its sum over the rows (a bias's)

It is computed in float32 and rounded once to the type of y; that matrix is then cast tensorwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bitplan.base.errors import FormatError
from bitplan.fp8.casts import (
    CastPair,
    ScaledFp8,
    cast_reference,
    pad_rows,
    padded_tokens,
    scaling_of,
)
from bitplan.fp8.recipes import find_recipe

if TYPE_CHECKING:
    from bitplan.fp8.kernels.triton_cast import CastLaunch

IMPLEMENTATIONS = ("auto", "reference", "triton")


def cast_layouts(
    x_RC: Tensor,
    recipe: str,
    fp8: str = "e4m3",
    eps: float = 0.0,
    *,
    is_weight: bool = False,
    rows: bool = True,
    cols: bool = True,
    impl: str = "auto",
    launch: CastLaunch | None = None,
    guess: Tensor | None = None,
    into: CastPair | None = None,
) -> CastPair:
    """Cast a matrix by a recipe, in the layouts asked for.

    `guess`: a state of `guessed_cast`, which saves a tensorwise cast on the GPU its second read. `into`: memory for
    both layouts, which such a cast writes to instead of its own.
    """
    if impl == "triton" or (impl == "auto" and x_RC.is_cuda):
        x = x_RC if x_RC.is_contiguous() else x_RC.contiguous()
        aligned, guessed = not x.data_ptr() & 15, guess is not None
        cast = _plan(x.shape, x.dtype, aligned, recipe, fp8, eps, is_weight, rows, cols, launch, guessed)
        return cast(x, guess) if into is None else cast(x, guess, into)
    if impl not in IMPLEMENTATIONS:
        raise FormatError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    scaling = scaling_of(recipe, is_weight=is_weight)
    x_RC = pad_rows(x_RC, _rows_of_cast(x_RC.shape[0], recipe, is_weight))
    return CastPair(
        cast_reference(x_RC, scaling, fp8, eps) if rows else None,
        cast_reference(x_RC.t(), scaling, fp8, eps) if cols else None,
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int],
    dtype: torch.dtype,
    aligned: bool,
    recipe: str,
    fp8: str,
    eps: float,
    is_weight: bool,
    rows: bool,
    cols: bool,
    launch: CastLaunch | None,
    guessed: bool,
) -> Callable[..., CastPair]:
    """How the GPU casts matrices like this one, with everything but the tensors fixed: a layer repeats it each step."""
    scaling = scaling_of(recipe, is_weight=is_weight)
    padded = _rows_of_cast(shape[0], recipe, is_weight)
    if guessed and scaling == "tensor" and 0 not in shape and (rows or cols):
        from bitplan.fp8.kernels.guessed_cast import plan_guess

        return plan_guess(shape, dtype, aligned, fp8, eps, padded, rows, cols, launch).run
    from bitplan.fp8.kernels.triton_cast import cast_tiles

    def cast(x: Tensor, _: Tensor | None) -> CastPair:
        return CastPair(*cast_tiles(x, scaling, fp8, eps, padded, rows=rows, cols=cols, launch=launch)[:2])

    return cast


def _rows_of_cast(rows: int, recipe: str, is_weight: bool) -> int:
    return rows if is_weight else padded_tokens(recipe, rows)


# ---- a norm in front of the cast -------------------------------------------------------------------------------------


NORMS = ("rms", "layer")


@dataclass(slots=True, eq=False)
class NormWeights:
    """A norm over the last dimension: its kind ("rms" or "layer"), weight, bias and epsilon."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __post_init__(self) -> None:
        if self.kind not in NORMS:
            raise FormatError(f"a norm is one of {', '.join(NORMS)}, got {self.kind!r}")


class Normed(NamedTuple):
    """The cast layouts asked for, the normalised matrix if asked for, and what the gradient needs of each row."""

    rows: ScaledFp8 | None
    cols: ScaledFp8 | None
    plain: Tensor | None
    rstd: Tensor
    mean: Tensor | None


def norm_and_cast(
    x_RC: Tensor,
    norm: NormWeights,
    rows_by: str | None,
    cols_by: str | None,
    fp8: str = "e4m3",
    eps: float = 0.0,
    *,
    plain: bool = False,
    impl: str = "auto",
) -> Normed:
    """Normalise, and cast by the recipe of each layout; None for a layout that is not wanted."""
    x_RC = x_RC.contiguous()  # and so is the normalised matrix, as operators promise torch's compiler
    if impl == "triton" or (impl == "auto" and x_RC.is_cuda):
        return _by_triton(x_RC, norm, rows_by, cols_by, fp8, eps, plain)
    mean, rstd = reference_stats(x_RC, norm)
    normed = apply_norm(x_RC, norm, mean, rstd)
    rows = cast_layouts(normed, rows_by, fp8, eps, cols=False, impl="reference").rows if rows_by else None
    cols = cast_layouts(normed, cols_by, fp8, eps, rows=False, impl="reference").cols if cols_by else None
    return Normed(rows, cols, normed if plain else None, rstd, mean)


def _by_triton(
    x: Tensor, norm: NormWeights, rows_by: str | None, cols_by: str | None, fp8: str, eps: float, plain: bool
) -> Normed:
    cast, norms = _kernels()
    with_amax = any(name is not None and find_recipe(name).has_one_scale for name in (rows_by, cols_by))
    stats = norms.row_stats(x, norm.kind, norm.weight, norm.bias, norm.eps, with_amax=with_amax)
    rows = cols = normed = None
    for recipe in (rows_by, cols_by) if rows_by != cols_by else (rows_by,):
        if recipe is None:
            continue
        tiles = cast.cast_tiles(
            x,
            scaling_of(recipe),
            fp8,
            eps,
            padded_tokens(recipe, x.shape[0]),
            rows=recipe == rows_by,
            cols=recipe == cols_by,
            norm=stats,
            plain=plain and normed is None,
        )
        rows, cols = tiles[0] or rows, tiles[1] or cols
        normed = tiles[2] if normed is None else normed
    if plain and normed is None:  # no cast layout is wanted
        normed = apply_norm(x, norm, stats.mean, stats.rstd)
    return Normed(rows, cols, normed, stats.rstd, stats.mean)


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """The modules of Triton's casts and norms, kept: an import statement in a function would run at each call."""
    from bitplan.fp8.kernels import triton_cast, triton_norm

    return triton_cast, triton_norm


def reference_stats(x_RC: Tensor, norm: NormWeights) -> tuple[Tensor | None, Tensor]:
    """Return each row's mean (None for RMSNorm) and 1 / its deviation, in float32."""
    x = x_RC.float()
    mean = x.mean(1) if norm.kind == "layer" else None
    if mean is not None:
        x = x - mean[:, None]
    return mean, 1.0 / torch.sqrt(x.square().mean(1) + norm.eps)


def apply_norm(x_RC: Tensor, norm: NormWeights, mean_R: Tensor | None, rstd_R: Tensor) -> Tensor:
    x = x_RC.float() if mean_R is None else x_RC.float() - mean_R[:, None]
    x = x * rstd_R[:, None] * norm.weight.float()
    return (x if norm.bias is None else x + norm.bias.float()).to(x_RC.dtype)


def norm_gradient(
    dy_RC: Tensor, x_RC: Tensor, norm: NormWeights, mean_R: Tensor | None, rstd_R: Tensor, *, impl: str = "auto"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return gradients of input, weight and bias; the last two are sums in float32, rounded to the weight's type."""
    if impl == "triton" or (impl == "auto" and x_RC.is_cuda):
        norms = _kernels()[1]
        row_norm = norms.Norm(norm.kind, mean_R, rstd_R, norm.weight, norm.bias)
        gradients: tuple[Tensor, Tensor, Tensor | None] = norms.norm_gradient(dy_RC, x_RC.contiguous(), row_norm)
        return gradients
    x = x_RC.float() if mean_R is None else x_RC.float() - mean_R[:, None]
    unit, dy = x * rstd_R[:, None], dy_RC.float()
    g = dy * norm.weight.float()
    dx = g - unit * (g * unit).mean(1, keepdim=True)
    if norm.kind == "layer":
        dx = dx - g.mean(1, keepdim=True)
    dx = (dx * rstd_R[:, None]).to(x_RC.dtype)
    weight_dtype = norm.weight.dtype
    return dx, (dy * unit).sum(0).to(weight_dtype), dy.sum(0).to(weight_dtype) if norm.bias is not None else None


# ---- an activation in front of the cast ------------------------------------------------------------------------------


RECIPE = "tensorwise"  # only one scale for all numbers is guessed, and a guess is what a cast in one read needs
GATED = "_gated"
# "gelu" is torch's own, by the error function; "gelu_tanh" the approximation by tanh.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
FUNCTIONS = (*ACTIVATIONS, *(name + GATED for name in ACTIVATIONS))


def split_function(function: str) -> tuple[str, bool]:
    """Return the activation's name, and whether it is gated."""
    return function.removesuffix(GATED), function.endswith(GATED)


def width_of(function: str, features: int) -> int:
    """Return how many columns y has for so many features of h."""
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
    """Cast the activated y, or with `dh_RF` its gradient, and sum that over rows; `guess` as in `cast_layouts`."""
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
