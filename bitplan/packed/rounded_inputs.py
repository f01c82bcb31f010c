"""Formats of the inputs of a whole model's packed layers: set, read, and refused by name where a layer has none.

round_inputs(model, "int8")     # all products with packed weights round their inputs; "keep" ends it
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bitplan.base.errors import StoreError
from bitplan.formats.input_formats import KEEP, input_format
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.products.cpu_fused import INTEGER_INPUTS, IntegersOnCpu
from bitplan.packed.products.fused import fused_for
from bitplan.packed.quant_experts import QuantExperts
from bitplan.packed.quant_linear import QuantLinear


def round_inputs(model: nn.Module, inputs: str | None) -> list[str]:
    """Give all packed linear layers of a model this format of inputs; returns their names.

    inputs   a format of `bitplan.formats.input_formats`, or "keep"
    """
    fmt = input_format(inputs, "round_inputs")
    layers = dict(model.named_modules())
    check_inputs(layers.items(), fmt)
    linears = {path: layer for path, layer in layers.items() if isinstance(layer, QuantLinear)}
    if fmt is not None and not linears:
        raise LayerError(
            f"round_inputs: nothing in this {type(model).__name__} is packed, so nothing rounds its inputs to {fmt}; "
            "apply_plan packs it"
        )
    for layer in linears.values():
        if layer.inputs != fmt:
            layer.inputs = fmt
    return list(linears)


def runs_on_integers(model: nn.Module) -> bool:
    """Whether all products with packed weights would be products of whole numbers, with inputs in int8."""
    kernel = fused_for("cpu", INTEGER_INPUTS[0])
    layers = [layer for layer in model.modules() if isinstance(layer, QuantLinear | QuantExperts)]
    return (
        bool(layers)
        and isinstance(kernel, IntegersOnCpu)
        and all(
            isinstance(layer, QuantLinear)
            and layer.weight.device.type == "cpu"
            and kernel.why_no_integers(layer.weight.encoded) is None
            for layer in layers
        )
    )


def check_inputs(layers: Iterable[tuple[str, nn.Module]], fmt: str | None) -> None:
    """Refuse layers that cannot round their inputs."""
    experts = next((path for path, layer in layers if isinstance(layer, QuantExperts)), None)
    if fmt is not None and experts is not None:
        raise LayerError(
            f"{experts}: packed experts have no products of inputs in {fmt}; leave inputs as they are (keep)"
        )


def shown_inputs(model: nn.Module) -> str | None:
    """The formats that packed layers round their inputs to, in words; None where none does."""
    names = sorted(fmt or KEEP for fmt in _first_of(model))
    return None if names in ([], [KEEP]) else " and ".join(names)


def _first_of(model: nn.Module) -> dict[str | None, str]:
    """Formats of inputs, each with a layer that has it."""
    return {layer.inputs: path for path, layer in model.named_modules() if isinstance(layer, QuantLinear)}


def inputs_of(model: nn.Module) -> str | None:
    """The format of inputs that all packed linear layers have; an error where they differ, for a folder holds one."""
    formats = _first_of(model)
    if len(formats) > 1:
        (one, first), (other, second) = list(formats.items())[:2]
        raise StoreError(
            f"{first} rounds its inputs to {one or 'nothing'} and {second} to {other or 'nothing'}, and a folder holds "
            "one format of inputs for all layers; call bitplan.round_inputs(model, format) first"
        )
    return next(iter(formats), None)
