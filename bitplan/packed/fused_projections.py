"""Packed layers that read one input as one product: q, k and v of an attention, gate and up of an MLP.

    fuse_projections(model)         # after the model is on its device; returns the joined names

Which layers read the same input is seen in what the model computes (`bitplan.describe`), not in their names.

The layers stay where they are, under their names: their packed bytes become views of one matrix, so that a state_dict
holds the same tensors as before, in the same memory. The first of them to be called with an input runs the product of
all, and the others get their part of it when they are called with the same tensor (`plan.structure.joined_calls`). That
is one launch instead of three, and a matrix that fills the GPU; on a CPU it is one call, and one start of all threads,
instead of three.

It is for inference: for the fused kernel and, on a GPU and outside of graphs, for weights that are decoded in each call
and have no factor of their own (nvfp4 has). With a tile cache and where a gradient is needed each layer runs by itself.
So do layers that get different inputs, as in cross-attention, after a few calls, and on a CPU tensors with factors of
their own. Layers with a bias stay alone. An input that is
written in place between the calls is not seen in compiled graphs and in inference mode.
"""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling

from bitplan.base.errors import PlanError
from bitplan.formats import Encoded
from bitplan.formats.dispatch import has_decoder
from bitplan.packed.bound_calls import QUICK, BoundCall, QuickCall
from bitplan.packed.packed_weight import PackedWeight, join_waiting
from bitplan.packed.product_strategy import INPUTS, input_type
from bitplan.packed.products.fused import FusedMatmul, Prepared, fused_for
from bitplan.packed.quant_linear import QuantLinear
from bitplan.plan.structure.describe import describe
from bitplan.plan.structure.joined_calls import SharedProduct, readers_of_one_tensor
from bitplan.plan.structure.model_view import ModelView

_views: WeakKeyDictionary[nn.Module, ModelView] = WeakKeyDictionary()
MOST_UNCLAIMED = 4  # products of which not all layers fetched their part, before each layer runs by itself


def fuse_projections(model: nn.Module, example: Any = None) -> list[str]:
    """Join the packed layers that read the same input; returns their names, joined by +.

    example   what the model's forward is called with, for `bitplan.describe`, where none can be made from its config
    """
    joined = []
    view = _views[model] = describe(model, example)
    for readers in readers_of_one_tensor(view):
        alike: dict[Any, list[tuple[str, QuantLinear]]] = {}
        for linear in readers:
            layer = model.get_submodule(linear.path)
            if isinstance(layer, QuantLinear):
                key = (layer.weight.fmt.name, layer.strategy, id(layer.cache), layer.inputs, layer.bias is None)
                alike.setdefault(key, []).append((linear.path, layer))
        for members in alike.values():
            layers = [layer for _, layer in members]
            if len(layers) > 1 and why_not_joined(layers) is None:
                joined.append(JointProjection(layers, _joint_name([path for path, _ in members])).name)
    return joined


def view_of(model: nn.Module, *, anew: bool = False) -> ModelView:
    """What the model computes: as it was seen when its layers were joined, or seen now."""
    if anew or model not in _views:
        _views[model] = describe(model)
    return _views[model]


def fuse_what_is_seen(model: nn.Module) -> list[str]:
    """Run `fuse_projections` on a loaded model; where no example fits its forward, it runs layer by layer."""
    if type(model).forward is nn.Module.forward:  # a container, whose layers the user calls
        return []
    try:
        return fuse_projections(model)
    except PlanError as error:
        warnings.warn(f"packed layers stay apart, one product each: {error}", stacklevel=3)
        return []


def _joint_name(paths: Sequence[str]) -> str:
    """The name of joined layers: model.layers.0.self_attn.q_proj+k_proj+v_proj."""
    parts = [path.split(".") for path in paths]
    shared = 0
    while all(len(part) > shared + 1 and part[: shared + 1] == parts[0][: shared + 1] for part in parts):
        shared += 1
    return ".".join([*parts[0][:shared], "+".join(".".join(part[shared:]) for part in parts)])


def why_not_joined(layers: Sequence[QuantLinear]) -> str | None:
    """Why these layers cannot be one product; None if they can."""
    first = layers[0]
    if any(layer.bias is not None for layer in layers):
        return "a layer has a bias"
    if any(
        layer.in_features != first.in_features or layer.weight.fmt.name != first.weight.fmt.name for layer in layers
    ):
        return "they differ in inputs or format"
    if not _is_set_alike(layers):
        return "they differ in strategy, cache or the format of inputs"
    if len({id(layer.weight) for layer in layers}) < len(layers) or any(layer.joint is not None for layer in layers):
        return "they share a weight, or are joined already"
    return None


def _is_set_alike(layers: Sequence[QuantLinear]) -> bool:
    first = layers[0]
    return all(
        layer.strategy == first.strategy and layer.cache is first.cache and layer.inputs == first.inputs
        for layer in layers
    )


class JointProjection:
    """Layers multiplied as one product: each has this object as `joint`. A change of weights makes it anew."""

    def __init__(self, layers: Sequence[QuantLinear], name: str) -> None:
        self.layers, self.name = list(layers), name
        for index, layer in enumerate(layers):
            layer.joint, layer.joint_at = self, index
            layer._bound.pop(QUICK, None)
        self._shared = SharedProduct([layer.out_features for layer in layers])
        self._joining = threading.Lock()
        self._has_quick = False
        self._begin()

    def _begin(self) -> None:
        self._forget_quick()
        self.layer: JointLinear | None = None
        self._was_refused = False
        self._runs: dict[Any, bool] = {}
        # What each layer had when they were joined.
        self._joined_parts: list[tuple[PackedWeight, Tensor | None, Tensor | None, Tensor | None]] = []
        self._shared.clear()
        self._unclaimed = 0

    def drop(self, token: int) -> None:
        """Forget the joined weight: a weight or a layer's settings (token 0) changed. The next call joins again.

        Weights that were replaced say so when they are freed, which may be much later, while a graph of the new ones
        is compiled: that changes nothing here.
        """
        if not token or any(weight.token == token for weight, *_ in self._joined_parts):
            self._begin()

    def part(self, layer: QuantLinear, x: Tensor) -> Tensor | None:
        """The product of one of the joined layers with x; None where it has to run by itself."""
        if is_grad_enabled() and x.requires_grad:
            return None
        compiling = is_dynamo_compiling() or torch.compiler._is_compiling_flag  # as in QuantLinear.forward
        index, shared = layer.joint_at, self._shared
        if not compiling and self._joined_parts and not self._is_as_joined(layer):
            self._begin()
        version = 0 if compiling or x.is_inference() else x._version
        state = version, input_type(x)  # autocast may be switched between two layers
        part = shared.part(index, x, state)
        if part is None:
            y = self._product(layer, x, compiling)
            if y is None:
                return None
            part = shared.hand_out(index, y, x, state, is_traced=compiling)
        return part

    def whole(self, x: Tensor) -> Tensor | None:
        """The product of all layers with x, one part after the other; None where they run apart."""
        if self._joined_parts and not all(self._is_as_joined(layer) for layer in self.layers):
            self._begin()
        return self._run_joined(x) if self._runs_for(x) else None

    def _is_as_joined(self, layer: QuantLinear) -> bool:
        """Whether the layer has the weight and parts with which it was joined, and no bias; bytes are checked later."""
        weight, data, scales, base = self._joined_parts[layer.joint_at]
        if layer._modules["weight"] is not weight or layer._parameters["bias"] is not None:
            return False
        parts = weight._buffers
        return parts["data"] is data and parts.get("scales") is scales and parts.get("base") is base

    def _product(self, layer: QuantLinear, x: Tensor, compiling: bool) -> Tensor | None:
        if compiling:
            return self._run_joined(x) if self._settle_for(x) else None
        if self._unclaimed >= MOST_UNCLAIMED:
            self._shared.clear()
            self._forget_quick()
            return None
        joined = self.layer
        bound = None if joined is None else joined.bound_for(x)
        y = None if joined is None or bound is None else bound.run(x, joined)
        if y is None and not self._runs_for(x):  # so many rows run apart: nothing is left unclaimed
            return None
        if self._shared.is_waiting or layer.joint_at:  # others did not fetch their parts, or came before
            self._unclaimed += 1
        if bound is None or y is None:
            return self._run_joined(x)
        self._forget_quick()
        if bound.product is not None and bound.takes(x):
            self._keep_quick(bound, bound.product, x)
        return y

    def _keep_quick(self, bound: BoundCall, whole: QuickCall, x: Tensor) -> None:
        """Let all layers give their parts of the whole product by quick calls, for inputs like this one."""
        self._has_quick = True
        for index, layer in enumerate(self.layers):
            layer._bound[QUICK] = bound.quick_call(layer, x, self._quick_part(index, whole, x))

    def _quick_part(self, index: int, whole: QuickCall, like_x: Tensor) -> QuickCall:
        """The part of one layer of inputs like this one: the first layer computes all, the others take theirs."""
        shared, counts, dtype = self._shared, not like_x.is_inference(), like_x.dtype

        def part(x: Tensor) -> Tensor | None:
            state = x._version if counts else 0, dtype
            if shared.is_waiting:
                return shared.part(index, x, state)
            y = whole(x) if index == 0 else None
            return None if y is None else shared.hand_out(0, y, x, state, is_traced=False)

        return part

    def _forget_quick(self) -> None:
        if self._has_quick:
            self._has_quick = False
            for layer in self.layers:
                layer._bound.pop(QUICK, None)

    def _run_joined(self, x: Tensor) -> Tensor | None:
        layer = self.layer
        return None if layer is None else layer.forward(x)  # None: another thread has changed a weight

    def _runs_for(self, x: Tensor) -> bool:
        rows = math.prod(x.shape[:-1])
        key = ((rows - 1).bit_length(), x.dtype)  # as picks are made
        runs = self._runs.get(key)
        if runs is None:
            layer = self.joined_layer()
            runs = self._runs[key] = layer is not None and layer.runs_joined(rows, x.dtype)
        return runs

    def _settle_for(self, x: Tensor) -> bool:
        from torch.fx.experimental.symbolic_shapes import has_static_value

        rows = math.prod(x.shape[:-1])
        return self.decide(rows, x.dtype) if has_static_value(rows) else False

    def decide(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether a graph runs an input of `rows` rows as one product; a traced graph calls this once."""
        layer = self.joined_layer()
        self._runs.clear()
        return layer is not None and layer.picks_one_kernel(rows, dtype, measure=True)

    decide._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see QuantLinear.settle

    def joined_layer(self) -> JointLinear | None:
        """The layer of all projections together; None where there is no fused kernel that can join them."""
        with self._joining:
            if self._joined_parts and not all(self._is_as_joined(layer) for layer in self.layers):
                self._begin()
            return self.layer if self.layer is not None or self._was_refused else self._join()

    def _join(self) -> JointLinear | None:
        first = self.layers[0]
        fused = fused_for(first.weight.device.type, first.inputs)
        if fused is None or type(first.weight.data) is not Tensor or first.strategy not in ("auto", "fused", "fp8"):
            return None
        if not _is_set_alike(self.layers) or len({bool(layer.weight.waiting) for layer in self.layers}) > 1:
            return None
        if any(layer.bias is not None for layer in self.layers):  # it was set after they were joined
            return None
        if fused.why_not(first.weight.encoded, torch.bfloat16) is not None:
            return None
        weights = [layer.weight for layer in self.layers]
        alone = [fused.prepare(weight.encoded) for weight in weights]
        prepared = fused.join(alone)
        if prepared is None:
            self._was_refused = True
            return None
        with torch.inference_mode(False):  # else load_state_dict could not write them outside of inference mode
            joined = JointLinear(_joined(weights), prepared, first, self.name)
        if first.weight.device.type == "cpu":  # a few numbers, for exported graphs of any number of rows
            for layer, scales in zip(self.layers, alone, strict=True):
                layer.graph.hold_prepared(layer.weight, scales)
        for weight in weights:
            weight.add_listener(self)
        parts = [weight._buffers.get for weight in weights]
        self._joined_parts = [
            (weight, part("data"), part("scales"), part("base")) for weight, part in zip(weights, parts, strict=True)
        ]
        self.layer = joined
        return joined

    def __deepcopy__(self, memo: dict[int, Any]) -> JointProjection:
        memo[id(self)] = twin = JointProjection.__new__(JointProjection)
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "name": self.name, "_shared": self._shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._joining = threading.Lock()
        self._has_quick = False
        self._begin()


def _joined(weights: Sequence[PackedWeight]) -> Encoded:
    """One matrix of all rows; the weights become views of it. Its base is the first weight's; kernels get all bases."""
    first = weights[0]
    names = [name for name in ("data", "scales") if name in first._buffers]
    shape = (sum(weight.shape[0] for weight in weights), first.shape[1])
    if first.waiting:
        return Encoded(first.fmt, shape, **join_waiting(weights), base=first.encoded.base)
    parts = {name: torch.cat([weight.get_buffer(name) for weight in weights]) for name in names}
    start = 0
    for weight in weights:
        for name, part in parts.items():
            weight._buffers[name] = part[start : start + weight.shape[0]]
        weight.forget()  # drops what was made for this layer alone
        start += weight.shape[0]
    return Encoded(first.fmt, shape, **parts, base=first.encoded.base)


class JointLinear(QuantLinear):
    """A packed linear layer over the rows of several layers' weights."""

    def __init__(self, weight: Encoded, prepared: Prepared, like: QuantLinear, name: str) -> None:
        super().__init__(weight, strategy=like.strategy, cache=like.cache, inputs=like.inputs, name=name)
        self._prepared = prepared

    def picks_one_kernel(self, rows: int, dtype: torch.dtype, *, measure: bool = False) -> bool:
        """Whether the product is fused or in FP8: one kernel for the rows of all layers."""
        is_taken = dtype == torch.bfloat16 or (self.weight.device.type == "cpu" and dtype in INPUTS)
        return is_taken and self._pick(rows, dtype, measure=measure).strategy in ("fused", "fp8")

    def runs_joined(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether one product is better than several: fused ones, and decoded ones on a GPU, which the host delays."""
        if self.picks_one_kernel(rows, dtype):
            return True
        is_decoded = self.weight.encoded.base is None and has_decoder(
            self.weight.fmt, self.weight.device, self.weight.shape, dtype
        )
        return self.weight.device.type == "cuda" and is_decoded and self._pick(rows, dtype).strategy == "decode"

    def _prepare(self, fused: FusedMatmul) -> Prepared:
        prepared = fused.join([self._prepared])  # each stream has counters of its own
        assert prepared is not None
        return prepared
