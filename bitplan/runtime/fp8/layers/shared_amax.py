"""A tensorwise FP8 linear whose processes share the scale of an operand that is divided among them.

With tensor parallelism an Fp8Linear would scale each share of a divided operand by the share's own maximum, and results
would depend on the number of shares. Here that maximum is replaced by the group's before anything is cast. Maxima are
compared as integers on the device, which have the order of the magnitudes (NaN above infinity). Nothing waits for the
host on a GPU.

Only products by the recipe tensorwise agree; others in the same layer are what `Fp8Linear` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.formats.fp8 import CastPair, ScaledFp8
from bitplan.formats.fp8_recipes import RECIPES
from bitplan.runtime.fp8.layers.linear import Fp8Linear
from bitplan.runtime.fp8.layers.linear_function import run_linear
from bitplan.runtime.fp8.layers.scale_guesses import WEIGHT
from bitplan.runtime.fp8.layers.shared_amax_cast import Largest, shared_amax_cast
from bitplan.runtime.fp8.layers.weight_casts import derived_layouts
from bitplan.runtime.fp8.layers.weight_source import WeightSource


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the operators of graphs cast by a maximum of their own
def shared_amax_linear(x: Tensor, layer: Fp8Linear, *, divided: tuple[str, ...], largest: Largest) -> Tensor:
    """The layer's forward; operands in `divided` ("input", "weight", "grad") are scaled by the group's maximum."""
    source = SharedAmax(layer.reuse_weight_cast, divided, largest)
    return run_linear(x, layer.weight, layer.bias, layer._text, source)


class SharedAmax(WeightSource):
    """Casts the operands in `divided` by the group's maximum, for recipes with one scale per tensor."""

    def __init__(self, reuse: bool, divided: tuple[str, ...], largest: Largest) -> None:
        super().__init__(reuse)
        self.divided, self.largest = divided, largest

    def cast(
        self, x: Tensor, recipe: str, fp8: str, eps: float, weight: Tensor, role: str, *, rows: bool, cols: bool
    ) -> CastPair:
        if not self._shares(recipe, role):
            return super().cast(x, recipe, fp8, eps, weight, role, rows=rows, cols=cols)
        return shared_amax_cast(x, fp8, eps, self.largest, recipe=recipe, rows=rows, cols=cols)

    def rows(self, weight: Tensor, recipe: str, eps: float, *, with_cols: bool) -> ScaledFp8:
        if not self._shares(recipe, WEIGHT):
            return super().rows(weight, recipe, eps, with_cols=with_cols)
        return self._weight(weight, recipe, eps, rows=True, cols=with_cols and self.reuse)[0]

    def cols(self, weight: Tensor, recipe: str, eps: float) -> ScaledFp8:
        if not self._shares(recipe, WEIGHT):
            return super().cols(weight, recipe, eps)
        return self._weight(weight, recipe, eps, rows=False, cols=True)[1]

    def _shares(self, recipe: str, role: str) -> bool:
        return role in self.divided and RECIPES[recipe].has_one_scale

    def _weight(
        self, weight: Tensor, recipe: str, eps: float, *, rows: bool, cols: bool
    ) -> tuple[ScaledFp8, ScaledFp8]:
        """The layouts asked for, kept while the weight does not change: all processes change it in the same step."""

        def make(rows: bool, cols: bool) -> CastPair:
            return shared_amax_cast(weight, "e4m3", eps, self.largest, is_weight=True, rows=rows, cols=cols)

        how = ("shared amax " + recipe, eps)
        return derived_layouts(weight, how, make, rows=rows, cols=cols, reuse=self.reuse)
