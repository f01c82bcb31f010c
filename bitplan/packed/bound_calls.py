"""Calls of a packed layer in which everything but the input is fixed, and what must not have changed since.

| call | for inputs | looks at |
|---|---|---|
| bound | of one shape and type | all that a product depends on, one after the other |
| quick | like the last but for its numbers, float32 on a CPU | what torch compares for graphs; the weight |

The CPU's products read a weight's bytes at the addresses to which they were bound, and keep nothing made of them. So a
weight that was written is read as it is now, and a quick call asks only whether it still lies there: not how often it
was written. Weights whose base is in a product's constants (nvfp4), or with parts that are not contiguous, have no
quick call there. On a GPU it asks whether the weight's parts are the same tensors, and, where a product reads what was
made of them, how often they were written. Where a weight is decoded, inputs may differ in rows as far as one pick goes.

Either gives None where something has changed: the call then takes another path, and is bound anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._C._dynamo import guards
from torch.autograd import forward_ad

from bitplan.packed.crossover import Pick
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.products.fused import Bound

Layer = Any  # a QuantLinear, which imports this module
QuickCall = Callable[[Tensor], Tensor | None]
Addresses = tuple[tuple[str, int], ...]  # of a weight's parts
QUICK = None  # the key of a layer's quick call among its bound ones
PLAIN = (Tensor, nn.Parameter)
modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
# Memory on a CPU, as generated code allocates it: torch.empty takes three times as long.
_empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = guards._empty_strided_cpu  # type: ignore[attr-defined]
_TensorGuards: Any = guards.TensorGuards
_AS_IT_IS: Any = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}


@dataclass(slots=True)
class BoundCall:
    """Prepared calls of one layer's product, for inputs of one shape.

    run      the product, as long as the layer does not change
    product  the same without a look at anything, on a CPU of a contiguous float32 input; None where there is none
    looks    by what a quick call knows the weight: "addresses", "tensors", or those and their "writes"
    sizes    inputs have more numbers than the first, and at most the second; None: the shape is fixed
    quick    the quick call that was made last
    """

    run: Callable[[Tensor, Layer], Tensor | None]
    product: QuickCall | None
    looks: str
    sizes: tuple[int, int] | None = None
    quick: QuickCall | None = None

    def quick_for(self, layer: Layer, x: Tensor) -> QuickCall | None:
        """The quick call of inputs like x, which has just run; None where there is none."""
        if self.product is None or not self.takes(x):
            return None
        if self.quick is None or layer._bound.get(QUICK) is self.quick:  # which refused this input
            self.quick = self.quick_call(layer, x, self.product)
        return self.quick

    def takes(self, x: Tensor) -> bool:
        """Whether quick calls are made for inputs like x."""
        if x.requires_grad:
            return False
        return self.looks != "addresses" or (x.dtype is torch.float32 and x.is_contiguous())

    def quick_call(self, layer: Layer, x: Tensor, product: QuickCall) -> QuickCall:
        """The product of inputs like x, as long as the layer's weight and bias are these, and lie where they do now."""
        modules, parameters, weight, bias = layer._modules, layer._parameters, layer.weight, layer.bias
        address, buffers, changes = 0 if bias is None else bias.data_ptr(), weight._buffers, weight._changes
        addresses = addresses_of(weight) if self.looks == "addresses" else ()
        parts = () if addresses else tuple((name, part) for name, part in buffers.items() if part is not None)
        counted = tuple(
            (part, part._version) for _, part in parts if self.looks == "writes" and not part.is_inference()
        )
        fits, sizes = like(x, any_rows=self.sizes is not None), self.sizes
        least, most = sizes or (0, 0)

        def run(x: Tensor) -> Tensor | None:
            if not fits(x) or forward_ad._current_level >= 0 or modules["weight"] is not weight:
                return None
            if sizes is not None and not least < x.numel() <= most:
                return None
            for name, at in addresses:
                if buffers[name].data_ptr() != at:
                    return None
            if parts:
                for name, part in parts:
                    if buffers[name] is not part:
                        return None
                for part, version in counted:
                    if part._version != version:
                        return None
                if weight._changes != changes:
                    return None
            if parameters["bias"] is not bias:
                return None
            if bias is not None and (bias.data_ptr() != address or (bias.requires_grad and is_grad_enabled())):
                return None
            return product(x)

        return run


def bound_call(
    call: Bound, shape: tuple[int, ...], layer: Layer, picked: Pick, sizes: tuple[int, int] | None = None
) -> BoundCall:
    """Prepare a call with everything but the input fixed; it returns None once the layer's weight has changed."""
    weight, bias = layer.weight, layer.bias
    changes, buffers, address = weight._changes, weight._buffers, 0 if bias is None else bias.data_ptr()
    present = tuple((name, part) for name, part in buffers.items() if part is not None)
    index, on_cpu = weight.encoded.data.get_device(), weight.device.type == "cpu"
    # A decoder reads the bytes as they are now; what a fused kernel reads beside them was made of earlier ones.
    # Whether numbers fit FP8 was seen in earlier ones.
    is_of_earlier = picked.strategy in ("fused", "fp8")
    addresses = addresses_of(weight) if on_cpu and picked.strategy == "fused" else ()
    counted = tuple((part, part._version) for _, part in present if is_of_earlier and not part.is_inference())

    def run(x: Tensor, layer: Layer) -> Tensor | None:
        if layer._modules["weight"] is not weight or weight._changes != changes:
            return None
        for name, part in present:
            if buffers[name] is not part:
                return None
        for part, version in counted:
            if part._version != version:
                return None
        for name, at in addresses:
            if buffers[name].data_ptr() != at:
                return None
        if layer._parameters["bias"] is not bias or (bias is not None and bias.data_ptr() != address):
            return None
        # Comparing devices is slow, and so is asking for one device's autocast.
        is_elsewhere = not x.is_cpu if on_cpu else x.get_device() != index or not x.is_cuda
        if is_elsewhere or type(x) not in PLAIN or modes() or _is_any_autocast():
            return None
        if forward_ad._current_level >= 0 or _transform() is not None:  # as `is_transformed`
            return None
        if is_grad_enabled() and (x.requires_grad or learns(bias)):
            return None
        y = call(x, shape)
        if layer.last_pick is not picked:  # a module's attributes are slow to write
            layer.last_pick = picked
            layer._bound.pop(QUICK, None)  # a quick call does not say how it ran
        return y

    if on_cpu and picked.strategy == "fused":
        return BoundCall(run, quick_product(call, shape) if reads_bytes_alone(weight) else None, "addresses")
    product: Any = call if sizes is not None else lambda x: call(x, shape)  # where rows may differ, no shape is read
    return BoundCall(run, product, "writes" if is_of_earlier else "tensors", sizes)


def learns(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


# ---- quick calls -----------------------------------------------------------------------------------------------------


def quick_product(call: Bound, shape: tuple[int, ...]) -> QuickCall | None:
    """A bound product of contiguous float32 inputs, with nothing in between; None where it has no such form."""
    into: Callable[[int, int], None] | None = getattr(call, "into", None)
    if into is None:
        return None
    strides, float32 = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))), torch.float32

    def product(x: Tensor) -> Tensor:
        y = _empty(shape, strides, float32)
        into(x.data_ptr(), y.data_ptr())
        return y

    return product


def like(x: Tensor, *, any_rows: bool) -> Callable[[Tensor], bool]:
    """Whether an input is like this one: by type, shape, strides, device and whether it learns; and by the modes,
    autocast and transforms that torch's dispatcher sees. That is one call, not twice as long as asking for one of them.

    any_rows   of the shape only the number of axes and the last one are looked at
    """
    shape, strides = [*[None] * (x.dim() - 1), *x.shape[-1:]], [None] * x.dim()
    options = {"dynamic_dims_sizes": [shape], "dynamic_dims_strides": [strides]} if any_rows else _AS_IT_IS
    check: Callable[[Tensor], bool] = _TensorGuards(x, **options).check
    return check


def alike(*tensors: Tensor) -> Callable[..., bool]:
    """The same for several tensors at once, in all but their numbers."""
    check: Callable[..., bool] = _TensorGuards(*tensors, **_AS_IT_IS).check
    return check


def addresses_of(weight: PackedWeight) -> Addresses:
    return tuple((name, part.data_ptr()) for name, part in weight._buffers.items() if part is not None)


def reads_bytes_alone(weight: PackedWeight) -> bool:
    """Whether a CPU product reads only the weight's bytes in place: it has no base, which would be a constant."""
    return all(name != "base" and part.is_contiguous() for name, part in weight._buffers.items() if part is not None)
