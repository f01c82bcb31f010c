"""LayerProbes: what the policy sees of a streamed model, by ordinary module hooks.

    impact    on the steps before an update: <dL/dy, (W - W_hat) x> of every layer, on frozen weights too
    gradient  of streamed weights that are trained: they leave the device during backward, so they are measured there
    backward  the first gradient that reaches the last block: the conductor's phase begins

For an impact, x and W are needed when dL/dy arrives, and a streamed W is gone by then. So an identity stands behind the
layer's output and saves both for backward: a saved streamed weight is a place, which the stream brings back with its
block (`saved_weights`), and under checkpointing everything is recomputed as ever. Nothing is held that autograd
would not hold, nothing waits for the device, and the numbers of the step are the same with and without.

A unit that is low on this step has W_hat on the device and W on the host only. W is then sent along, and because that
costs a copy, one low unit in eight is measured at a time; for the others the last figure stands. A unit with a weight
whose product cannot be seen has no impact at all: a part of its damage would pass for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bitplan.kernels.host_copy import to_device
from bitplan.measure.grad_stats import GradStatsCollector, impact_of
from bitplan.measure.weight_error import rounding_error
from bitplan.runtime.precision_units import LinearPlace, PrecisionUnits, Weight, high_or_low

LOW_UNITS_IN_TURN = 8


class LayerProbes:
    """Hooks on the layers of a stream; they sleep until a step is `watch`ed."""

    def __init__(self, units: PrecisionUnits, collector: GradStatsCollector, on_backward: Callable[[], None]) -> None:
        self.units, self.collector, self.on_backward = units, collector, on_backward
        self.unseen: dict[str, str] = {}  # weights whose impact cannot be measured, and why
        self._blind: set[str] = set()  # their units
        self._precisions: Mapping[str, str] | None = None  # of a watched step
        self._lows: tuple[str, ...] = ()
        self._turn = 0
        self._handles: list[RemovableHandle] = []

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def hook_backward(self) -> None:
        """Tell when backward has reached the last block."""
        last = self.units.stream.blocks[-1].module
        self._handles.append(last.register_forward_hook(self._after_last_block))

    def hook_gradients(self) -> None:
        """Measure the gradients of streamed weights that are trained."""
        for unit, module, local in self.units.trained_places():
            self._handles.append(module.register_forward_pre_hook(self._gradient_hook(unit, local)))

    def hook_impacts(self) -> None:
        """Measure impacts on watched steps."""
        places, self.unseen = self.units.linear_places()
        self._blind = {weight.unit for weight in self.units.weights if weight.full_name in self.unseen}
        turns = {unit: index % LOW_UNITS_IN_TURN for index, unit in enumerate(self.units.names)}
        for place in places:
            hook = self._impact_hook(turns[place.weight.unit], place)
            self._handles.append(place.module.register_forward_hook(hook, with_kwargs=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- steps -------------------------------------------------------------------------------------------------------

    def watch(self, precisions: Mapping[str, str], lows: tuple[str, ...], turn: int) -> None:
        """Measure this step's gradients, and impacts of `lows`, the precisions a unit might get (none: not now)."""
        self._precisions, self._lows, self._turn = precisions, lows, turn

    def sleep(self) -> None:
        """Nothing is measured until the next `watch`: between steps, and while a probe batch runs."""
        self._precisions = None

    # ---- what happens in a layer -------------------------------------------------------------------------------------

    def _after_last_block(self, module: nn.Module, args: Any, output: Any) -> None:
        first = first_tensor(output)
        if self._precisions is not None and first is not None and first.requires_grad:
            first.register_hook(lambda _: self.on_backward())

    def _gradient_hook(self, unit: str, local: str) -> Callable[..., None]:
        def before(module: nn.Module, _args: Any) -> None:
            leaf = module._parameters[local]
            if self._precisions is None or leaf is None or not leaf.requires_grad or not torch.is_grad_enabled():
                return
            if not leaf.is_leaf or hasattr(leaf, "_bitplan_measured"):  # a weight that two modules share comes twice
                return
            leaf._bitplan_measured = True  # type: ignore[attr-defined]
            leaf.register_hook(lambda gradient: self.collector.add_gradient(unit, gradient))

        return before

    def _impact_hook(self, turn: int, place: LinearPlace) -> Callable[..., Tensor | None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
            if self._precisions is None or not self._lows or not torch.is_grad_enabled():
                return None
            unit = place.weight.unit
            is_low = self._precisions[unit] != "bf16"
            if unit in self._blind or (is_low and turn != self._turn % LOW_UNITS_IN_TURN):
                return None
            inputs, weight = first_tensor([*args, *kwargs.values()]), module._parameters[place.local]
            if not (isinstance(output, Tensor) and output.requires_grad and inputs is not None and weight is not None):
                return None
            if tuple(weight.shape) != (output.shape[-1], inputs.shape[-1]):
                shapes = (
                    f"{tuple(weight.shape)} with an input of {inputs.shape[-1]} and an output of {output.shape[-1]}"
                )
                self.unseen[place.weight.full_name] = f"it does not compute W x: {shapes}"
                self._blind.add(unit)
                return None
            measure = self._measure(place.weight, is_low)
            probed: Tensor = _Probe.apply(output, inputs, weight.detach(), measure)  # type: ignore[no-untyped-call]
            return probed

        return after

    def _measure(self, weight: Weight, is_low: bool) -> Callable[[Tensor, Tensor, Tensor], None]:
        config, lows = self.units.config, self._lows

        def measure(grad_output: Tensor, inputs: Tensor, on_device: Tensor) -> None:
            if weight.unit in self._blind:  # known only now, from another of its layers
                return
            true = to_device(self.units.truth(weight), on_device.device) if is_low else on_device
            for precision in lows:
                difference = rounding_error(true, high_or_low(config, precision, weight.dtype))
                impact = impact_of(grad_output, inputs, difference, config.impact_tokens)
                self.collector.add_impact(weight.unit, precision, impact)

        return measure


class _Probe(torch.autograd.Function):
    """The identity; when the gradient comes by, it is measured against the input and the weight."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, weight: Tensor, measure: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.measure = measure
        return output.clone()  # a view could not be changed in place by whoever comes next

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        inputs, weight = ctx.saved_tensors
        ctx.measure(gradients[0], inputs, weight)
        return gradients[0], None, None, None


def first_tensor(found: Any) -> Tensor | None:
    """The first tensor of what a module takes or gives."""
    if isinstance(found, Tensor):
        return found
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, list | tuple):
        return next((one for one in map(first_tensor, found) if one is not None), None)
    return None
