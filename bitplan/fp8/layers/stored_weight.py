"""`fp8_param=True`: a layer whose weight is stored in FP8, and how any optimizer trains it.

    layer.weight         Parameter [N, K] of float8_e4m3fn, without a gradient: an optimizer cannot add to FP8
    layer.weight_scale   buffer: one number (tensorwise), or one for each 128x128 square (blockwise)
    layer.weight_master  float32 Parameter [N, K]: the numbers that are trained; None where the weight was frozen

The products read the FP8 weight; the gradient goes to the master, in float32. So an optimizer, gradient clipping and a
trainer that take `model.parameters()` work as with any layer. A forward that finds the master changed casts it into
`weight`, in place. A frozen weight (adapters, inference) has no master and takes one byte; dgrad's transpose takes one
more while it is kept.

A state_dict has the names and numbers of nn.Linear: `weight` is the master in float32, or the decoded weight in the
type that it had; what loads is cast. So any program reads it, and training goes on from it exactly. A state_dict with
FP8 codes and `weight_scale` loads too; a master that it lacks starts from the codes. For tensorwise and blockwise the
transposed codes are the cast of the transpose; rowwise and mxfp8 scale the two layouts differently and are refused.
Under torch.compile the layer runs between graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitplan.base.weight_changes import UNCOUNTED, GradientWatch, count_optimizer_steps, state_of
from bitplan.fp8.casts import ScaledFp8, decode_scaled, empty_scale, scaling_of
from bitplan.fp8.kernels.cast import cast_layouts
from bitplan.fp8.layer_settings import Fp8LayerError
from bitplan.fp8.layers.linear_function import INPUT_TYPES, run_linear
from bitplan.fp8.layers.weight_casts import derived_layouts
from bitplan.fp8.layers.weight_source import WeightSource
from bitplan.fp8.recipes import BF16, RECIPES


def store_in_fp8(layer: Any) -> None:
    """Replace the layer's weight by its FP8 cast."""
    recipe = storage_recipe(layer)
    layer._plain_type = layer.weight.dtype
    if layer.weight.device.type == "meta":
        codes = layer.weight.new_empty(layer.weight.shape, dtype=torch.float8_e4m3fn)
        scale = empty_scale(layer.weight.shape, scaling_of(recipe, is_weight=True), layer.weight.device)
    else:
        cast = cast_layouts(layer.weight.detach(), recipe, eps=layer.recipe.eps.weight, is_weight=True, cols=False).rows
        assert cast is not None
        codes, scale = cast.codes, cast.scale
    master = nn.Parameter(layer.weight.detach().float()) if layer.weight.requires_grad else None
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.register_buffer("weight_scale", scale)
    layer.register_parameter("weight_master", master)
    layer._stored_state = None if master is None else state_of(master)
    layer._stored_step = None if master is None else GradientWatch(master)
    count_optimizer_steps()
    layer.register_load_state_dict_pre_hook(_store_plain_weight)
    layer.register_load_state_dict_pre_hook(_start_master_from_weight)


def _store_plain_weight(layer: Any, state: dict[str, Any], prefix: str, *_more: Any) -> None:
    """Let a weight that is not FP8 load, from a checkpoint of nn.Linear: its numbers are cast, and are the master."""
    plain = state.get(prefix + "weight")
    if plain is None or prefix + "weight_scale" in state or layer.weight.is_meta or plain.is_meta:
        return
    if plain.dtype not in INPUT_TYPES or plain.shape != layer.weight.shape:
        return
    plain = plain.detach().to(layer.weight.device)
    cast = cast_layouts(plain, storage_recipe(layer), eps=layer.recipe.eps.weight, is_weight=True, cols=False).rows
    assert cast is not None
    state[prefix + "weight"], state[prefix + "weight_scale"] = cast.codes, cast.scale
    if layer.weight_master is not None:
        state[prefix + "weight_master"] = plain.float()


def _start_master_from_weight(layer: Any, state: dict[str, Any], prefix: str, *_more: Any) -> None:
    """Let a state dict that was saved without masters load: they start from the weight."""
    codes, scale = state.get(prefix + "weight"), state.get(prefix + "weight_scale")
    if layer.weight_master is None or prefix + "weight_master" in state or codes is None or scale is None:
        return
    if (
        codes.dtype == layer.weight.dtype
        and codes.shape == layer.weight.shape
        and scale.shape == layer.weight_scale.shape
    ):
        stored = ScaledFp8(codes, scale, scaling_of(storage_recipe(layer), is_weight=True))
        state[prefix + "weight_master"] = decode_scaled(stored)


@torch.no_grad()
def _follow_master(layer: Any) -> None:
    """Cast a changed master into the weight; while a CUDA graph is captured always, since replays cannot check."""
    master = layer.weight_master
    if master is None:
        return
    capturing = master.is_cuda and torch.cuda.is_current_stream_capturing()
    state = state_of(master)
    is_same = state == layer._stored_state and state[0] != UNCOUNTED and not layer._stored_step.is_step_over(master)
    if is_same and not capturing:
        return
    recipe, eps = storage_recipe(layer), layer.recipe.eps.weight
    cast = cast_layouts(master.detach(), recipe, eps=eps, is_weight=True, cols=False).rows
    assert cast is not None
    layer.weight.copy_(cast.codes)
    layer.weight_scale.copy_(cast.scale)
    layer._stored_state, layer._stored_step = state, GradientWatch(master)


def storage_recipe(layer: Any) -> str:
    """The recipe of the stored weight: the one of the products that read it."""
    used: set[str] = {name for name in (layer.gemms.fprop, layer.gemms.dgrad) if name != BF16} or {layer.recipe.name}
    if len(used) > 1 or not all(RECIPES[name].is_storable for name in used):
        storable = (name for name, recipe in RECIPES.items() if recipe.is_storable)
        raise Fp8LayerError(
            f"fp8_param stores one weight for fprop and dgrad, by {' or '.join(storable)}, "
            f"got {', '.join(sorted(used))}; use fp8_param=False"
        )
    return used.pop()


def stored_weight(layer: Any) -> ScaledFp8:
    return ScaledFp8(layer.weight, layer.weight_scale, scaling_of(storage_recipe(layer), is_weight=True))


def save_plain_weight(layer: Any, destination: Any, prefix: str) -> None:
    """Replace the three tensors of a state dict by the weight's numbers, as nn.Linear has them."""
    for name in ("weight_scale", "weight_master"):
        destination.pop(prefix + name, None)
    numbers = stored_numbers(layer).detach()
    destination[prefix + "weight"] = numbers if layer.weight_master is not None else numbers.to(layer._plain_type)


def stored_numbers(layer: Any) -> Tensor:
    """The weight's numbers: the master's if there is one, else the decoded ones."""
    master: Tensor | None = layer.weight_master
    return decode_scaled(stored_weight(layer)) if master is None else master


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_of_fp8_param(layer: Any, x: Tensor) -> Tensor:
    if layer.weight.dtype != torch.float8_e4m3fn:
        raise Fp8LayerError(
            f"a layer with fp8_param has a weight of {torch.float8_e4m3fn}, got {layer.weight.dtype}: .to(dtype) casts "
            "it as any other; move such a layer with .to(device), and build it again"
        )
    _follow_master(layer)
    source = StoredWeight(stored_weight(layer), layer._stored_step)
    return run_linear(x, layer.weight, layer.bias, layer._text, source, layer.weight_master)


class StoredWeight(WeightSource):
    """The weight as it is stored; gradients are for its master, in float32."""

    grad_type = torch.float32

    def __init__(self, stored: ScaledFp8, step: GradientWatch | None) -> None:
        super().__init__(reuse=True)
        self.stored, self.step = stored, step

    def count_backward(self, weight: Tensor, gradient: Tensor) -> None:
        if self.step is not None:
            self.step.count_backward(gradient)

    def rows(self, weight: Tensor, recipe: str, eps: float, *, with_cols: bool) -> ScaledFp8:
        return self.stored

    def cols(self, weight: Tensor, recipe: str, eps: float) -> ScaledFp8:
        """The weight's transpose, made once for each state of the weight."""
        how, make = ("stored " + recipe, eps), lambda *_: (None, transposed(self.stored))
        cols: ScaledFp8 = derived_layouts(weight, how, make, rows=False, cols=True, reuse=True)[1]
        return cols

    def plain(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return decode_scaled(self.stored, dtype)


def transposed(weight: ScaledFp8) -> ScaledFp8:
    """The transpose of a weight with one scale, or one scale per square: exactly the same numbers."""
    codes = weight.codes.view(torch.uint8).t().contiguous().view(weight.codes.dtype)
    if weight.scaling == "tensor":
        return ScaledFp8(codes, weight.scale, weight.scaling)
    scale = empty_scale((codes.shape[0], codes.shape[1]), weight.scaling, codes.device)
    return ScaledFp8(codes, scale.copy_(weight.scale.t()), weight.scaling)
