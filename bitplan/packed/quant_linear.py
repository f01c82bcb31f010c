"""QuantLinear: a linear layer over a packed weight, and its gradients. `apply_plan` makes them.

    y = x @ decode(weight).T + bias

in the way that `strategy` names. The packed weight has no gradient: adapters and biases are trained beside it, and
gradients pass through it to earlier layers (`operators.linear`).

eager, decode and tile_cache give F.linear on decoded weights, computed in float32 on a CPU and rounded once to the
input's type; for fused, `packed.products` states the error bound. Autocast casts the input as it does for F.linear.

A call takes one of four paths, which give the same numbers:

| path | when | what it costs the host |
|---|---|---|
| quick | no gradient, on a CPU, an input like the last in all but its numbers | two comparisons (`bound_calls`) |
| bound | no gradient, the same shape as a call before; decoded on a GPU about as many rows | launches, comparisons |
| direct | no gradient | choosing, once for every power of two of rows |
| operator | gradients, autocast, torch.compile, torch.export, other kinds of tensors | torch's dispatch as well |

Calls measure nothing: what has no record goes by a rule, until `warm_up` measures it. A graph holds the operator. How
it runs is chosen when the graph is traced, and is a constant of the graph: by the number of rows if that is fixed
(measured then), else by a table of row counts.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from bitplan.formats import Encoded
from bitplan.formats.dispatch import bind_with_numbers, decode, encode, rounded
from bitplan.formats.format import Format
from bitplan.formats.input_formats import input_format
from bitplan.packed.bound_calls import PLAIN, QUICK, BoundCall, bound_call, learns, modes
from bitplan.packed.crossover import MOST_FUSED_ROWS, ROW_COUNTS, Pick, bucket_of, compile_together, crossovers_of
from bitplan.packed.linear_operator import GraphWeight, Matrix, multiply, remember
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.product_strategy import (
    INPUTS,
    LayerError,
    ProductWay,
    check_packed,
    check_strategy,
    check_tensor,
    choose,
    compute_dtype,
    input_type,
    is_capturing,
    is_transformed,
    refuse_transforms,
    text_of,
)
from bitplan.packed.products.decode_row_slices import why_no_rows
from bitplan.packed.products.fp8_rows import fp8_linear
from bitplan.packed.products.fused import Bound, FusedMatmul, Launch, Prepared, fused_for
from bitplan.packed.tile_cache import TileCache

_PICKS_KEPT = 64
_STRIDED = torch.strided
_packed_linear: Callable[..., Tensor] = torch.ops.bitplan.packed_linear


# ---- the layer -------------------------------------------------------------------------------------------------------


class QuantLinear(nn.Module):
    """A linear layer whose weight [out_features, in_features] stays packed.

    weight     an Encoded matrix of a format whose blocks lie within a row, or a PackedWeight that layers share
    bias       kept unchanged, as a Parameter
    strategy   "auto", "eager", "fused", "tile_cache", "decode" or "fp8"; may be set later
    cache      the TileCache of the model, for "tile_cache" and "auto"
    inputs     a format that inputs are rounded to (`bitplan.formats.input_formats`), or "keep"; may be set later
    name       what messages call the layer

    `last_pick` says how the last forward ran and why; `explain(rows)` says how a forward of `rows` rows would run.
    """

    bias: Tensor | None

    def __init__(
        self,
        weight: Encoded | PackedWeight,
        bias: Tensor | None = None,
        *,
        strategy: str = "auto",
        cache: TileCache | None = None,
        inputs: str | None = None,
        name: str = "QuantLinear",
    ) -> None:
        super().__init__()
        check_packed(weight, name)
        reason = why_no_rows(weight.fmt)
        if len(weight.shape) != 2 or reason is not None:
            raise LayerError(
                f"{name}: a packed linear needs a matrix in a format whose blocks lie within a row, such as mxfp4 or "
                f"int8_row, got {weight.fmt.name} of shape {weight.shape}{f': {reason}' if reason else ''}"
            )
        self.out_features, self.in_features = weight.shape
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise LayerError(f"{name}: the bias must have shape ({self.out_features},), got {tuple(bias.shape)}")
        self.name = name
        self.weight = weight if isinstance(weight, PackedWeight) else PackedWeight(weight)
        self.register_parameter("bias", bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias))
        self.graph = GraphWeight()
        self.joint: Any = None  # a JointProjection, where the layer runs together with others
        self.joint_at = 0
        self._picks: dict[Any, Pick] = {}
        # By shape and type; decoded products by bits of the row count and type. And under QUICK the one for the last.
        self._bound: dict[Any, Any] = {}
        self._strategy, self._cache, self._inputs = check_strategy(strategy, name), cache, input_format(inputs, name)
        self.last_pick: Pick | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        fmt: Format | str,
        *,
        strategy: str = "auto",
        cache: TileCache | None = None,
        inputs: str | None = None,
        name: str = "QuantLinear",
        **encode_options: Any,
    ) -> Self:
        """Pack a linear layer's weight; the bias is shared with it. Options are those of `bitplan.encode`."""
        encoded = encode(linear.weight, fmt, name=f"{name}.weight", **encode_options)
        layer = cls(encoded, linear.bias, strategy=strategy, cache=cache, inputs=inputs, name=name)
        return layer.train(linear.training)

    def stand_in(self, x: Tensor) -> nn.Linear:
        """A plain layer without numbers that computes the same, for `bitplan.describe`."""
        bias = self.bias is not None
        return nn.Linear(self.in_features, self.out_features, bias=bias, device="meta", dtype=x.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("weight", "bias") and self.__dict__.get("joint") is not None:
            self.joint.drop(0)  # compiled graphs of joined layers see this alone

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_picks": {}, "_bound": {}}  # bound calls hold addresses of this layer's bytes

    @property
    def strategy(self) -> str:
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: str) -> None:
        self._strategy = check_strategy(strategy, self.name)
        self._forget_picks()

    @property
    def cache(self) -> TileCache | None:
        return self._cache

    @cache.setter
    def cache(self, cache: TileCache | None) -> None:
        self._cache = cache
        self._forget_picks()

    @property
    def inputs(self) -> str | None:
        """The format that inputs are rounded to; None: they stay as they are."""
        return self._inputs

    @inputs.setter
    def inputs(self, inputs: str | None) -> None:
        self._inputs = input_format(inputs, self.name)
        self.graph.drop(0)
        self._forget_picks()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.weight.fmt.name}, {f'inputs={self.inputs}, ' if self.inputs else ''}"
            f"strategy={self.strategy}, adapters=bitplan.peft.get_peft_model"
        )

    def explain(self, rows: int, dtype: torch.dtype | None = None) -> Pick:
        """How a forward of `rows` rows (all leading axes together) would run, and why. Nothing is measured for it.

        dtype   of the input; bfloat16 on CUDA and float32 elsewhere if it is not given
        """
        usual = torch.bfloat16 if self.weight.device.type == "cuda" else torch.float32
        return self._choose(rows, dtype or usual, measure=False)

    def _choose(self, rows: int, dtype: torch.dtype, *, measure: bool) -> Pick:
        return choose(
            self.weight,
            rows,
            dtype,
            self.strategy,
            self.cache,
            where=self.name,
            measure=measure,
            input=self._inputs,
        )

    def forward(self, x: Tensor) -> Tensor:
        if not is_dynamo_compiling():
            quick = self._bound.get(QUICK)
            y: Tensor | None = None if quick is None else quick(x)
            if y is not None:
                return y
        if type(x) is not Tensor or x.layout is not _STRIDED:
            check_tensor(x, self.name)
        if self.joint is not None:
            y = self.joint.part(self, x)
            if y is not None:
                return y
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:  # is_compiling() is two Python calls
            return self._in_graph(x)
        bound = self._bound.get((x.shape, x.dtype)) or self.bound_for(x)
        y = None if bound is None else bound.run(x, self)
        if bound is None or y is None:
            return self._forward(x)
        if bound.product is not None and self.joint is None:
            self._bound[QUICK] = bound.quick_for(self, x)
        return y

    def bound_for(self, x: Tensor) -> BoundCall | None:
        """The prepared call for inputs like x; None where none is prepared yet."""
        calls, key = self._bound, (x.shape, x.dtype)
        bound = calls.get(key)
        if bound is None and calls and x.shape[-1:] == (self.in_features,):
            bound = calls.get(((x.numel() // self.in_features - 1).bit_length(), x.dtype))
            if bound is not None and len(calls) < _PICKS_KEPT:
                calls[key] = bound  # the next input of this shape is found at once
        return bound

    def _forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        refuse_transforms(self.name)
        self._bound.pop(QUICK, None)  # a quick call does not say how it ran
        dtype = input_type(x)
        flat = _flat(x.to(dtype))
        self.last_pick = picked = self._pick(flat.shape[0], dtype)
        matrix = self._matrix(picked, dtype)
        if _is_plain(x) and not (is_grad_enabled() and (x.requires_grad or learns(self.bias))):
            y = multiply(flat, self.bias, matrix, ProductWay(picked.strategy, picked.launch, self._inputs))
            if dtype == x.dtype:
                self._bind(x, matrix.prepared, picked)
        else:
            y = self._operator(flat, matrix, text_of([(None, picked)], self._inputs))
        return y.reshape(*x.shape[:-1], self.out_features)

    def _in_graph(self, x: Tensor) -> Tensor:
        from torch.fx.experimental.symbolic_shapes import has_static_value

        self._check_input(x)
        dtype = input_type(x)
        flat = _flat(x.to(dtype))
        rows = flat.shape[0]
        if self._inputs is not None:
            _teach_compiler()
        ways = self.settle(rows if has_static_value(rows) else None, dtype)
        # A graph compares all that is read here, in every call: attributes of modules are several comparisons each.
        weight: Any = self._modules["weight"]
        graph: Any = self._modules["graph"]
        parts, graph_parts = weight._buffers, graph._buffers
        out: Tensor = _packed_linear(
            flat,
            self._parameters["bias"],
            parts["data"],
            parts.get("scales"),
            parts.get("base"),
            graph_parts["arranged"],
            graph_parts["factor"],
            graph_parts["counters"],
            graph_parts["expanded"],
            weight.format_name,
            self.out_features,
            ways,
            0,
            0,
        )
        return out.reshape(*x.shape[:-1], self.out_features)

    def settle(self, rows: int | None, dtype: torch.dtype) -> str:
        """Choose, while a graph is traced, how its product of `rows` rows runs (None: any); fills `self.graph`."""
        is_real = type(self.weight.data) is Tensor
        if rows is not None:
            picks: list[tuple[int | None, Pick]] = [(None, self._pick(rows, dtype, measure=is_real))]
        else:
            picks = [(count, self._pick(count, dtype, measure=False)) for count in ROW_COUNTS]
            picks.append((None, picks[-1][1]))
        self.last_pick = picks[-1][1]
        strategies = {pick.strategy for _, pick in picks}
        if is_real:
            self._fill_graph(strategies, dtype)
        elif ("fused" in strategies and not self.graph.is_prepared) or (
            strategies & {"eager", "tile_cache"} and self.graph.expanded is None
        ):
            raise LayerError(
                f"{self.name}: torch.export sees no numbers, and {' and '.join(sorted(strategies))} needs what is made "
                "from them; run the model once with such an input, then export it"
            )
        return text_of(picks, self._inputs)

    # As torch.compiler.assume_constant_result does, without the seconds that importing the compiler takes.
    settle._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _fill_graph(self, strategies: set[str], dtype: torch.dtype) -> None:
        weight, wide = self.weight, compute_dtype(self.weight.device, dtype)
        if "fused" in strategies:
            fused = fused_for(weight.device.type, self._inputs)
            assert fused is not None
            self.graph.hold_prepared(weight, self.prepared(fused))
        if "eager" in strategies:
            self.graph.hold_expanded(weight, self._expanded(wide))
        elif "tile_cache" in strategies:
            assert self.cache is not None
            pinned = self.cache.pin(weight, wide)
            if pinned is None:
                raise LayerError(
                    f"{self.name}: strategy 'tile_cache' in a graph keeps the whole weight, and {self.cache!r} has no "
                    "room for it; give the cache a larger budget, or set strategy='auto'"
                )
            self.graph.hold_expanded(weight, pinned)

    def _operator(self, flat: Tensor, matrix: Matrix, ways: str) -> Tensor:
        prepared = (*matrix.prepared, None, None, None)[:3]
        y: Tensor = _packed_linear(
            flat,
            self.bias,
            *matrix[:3],
            *prepared,
            matrix.expanded,
            matrix.format,
            self.out_features,
            ways,
            matrix.weight,
            matrix.cache,
        )
        return y

    def _matrix(self, picked: Pick, dtype: torch.dtype) -> Matrix:
        """The arguments for the operator: the weight, and what the picked kernel reads beside it."""
        weight, expanded, tokens = self.weight, None, (0, 0)
        prepared: Prepared = ()
        if picked.strategy == "fused":
            fused = fused_for(weight.device.type, self._inputs)
            assert fused is not None
            prepared = self.prepared(fused)
            self.graph.hold_prepared(weight, prepared)
        elif picked.strategy == "eager":
            expanded = self._expanded(compute_dtype(weight.device, dtype))
            self.graph.hold_expanded(weight, expanded)
        elif picked.strategy == "tile_cache":
            assert self.cache is not None
            remember(weight, self.cache)
            tokens = (weight.token, self.cache.token)
        encoded = weight.encoded
        shape = (self.out_features, self.in_features)
        return Matrix(encoded.data, encoded.scales, encoded.base, prepared, expanded, encoded.fmt.name, shape, *tokens)

    def _expanded(self, dtype: torch.dtype) -> Tensor:
        encoded, keep = self.weight.encoded, not is_capturing(self.weight.device)
        return self.weight.derived(("expanded", dtype), lambda: decode(encoded, dtype), keep=keep)

    def prepared(self, fused: FusedMatmul) -> Prepared:
        """What the kernel reads beside the weight, one for each stream: a kernel may keep counters in it.

        While a CUDA graph is captured, the first stream's is used, if there is one: a new one would live in the graph's
        own memory, and be made again with every replay.
        """
        device = self.weight.device
        keep = not is_capturing(device)
        stream_key: Hashable = ("fused", self._inputs)
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
            first = self.weight.derived("first stream", lambda: stream, keep=keep)
            stream_key = stream_key if stream == first or not keep else ("fused", self._inputs, stream)
        return self.weight.derived(stream_key, lambda: self._prepare(fused), keep=keep)

    def _prepare(self, fused: FusedMatmul) -> Prepared:
        """Prepare the weight for a fused product; a joined layer joins what its parts have prepared."""
        return fused.prepare(self.weight.encoded)

    def _bind(self, x: Tensor, prepared: Prepared, picked: Pick) -> None:
        """Keep the bound call for later inputs of this shape, or of about as many rows."""
        if is_capturing(x.device) or not x.numel():
            return
        bound: Bound | None = None
        key: Hashable = (x.shape, x.dtype)
        sizes: tuple[int, int] | None = None
        if picked.strategy == "fused":
            fused = fused_for(x.device.type, self._inputs)
            assert fused is not None
            bound = fused.bind(_flat(x), self.weight.encoded, prepared, self.bias, picked.launch)
        elif picked.strategy in ("decode", "fp8") and (self.cache is None or self.strategy == picked.strategy):
            bind = _bound_fp8 if picked.strategy == "fp8" else _bound_decode
            bound = bind(self.weight.encoded, x.dtype, self.bias, self._inputs)
            bits = (x.numel() // self.in_features - 1).bit_length()
            key, sizes = (bits, x.dtype), (self.in_features << bits >> 1 if bits else 0, self.in_features << bits)
        if bound is not None:
            if len(self._bound) >= _PICKS_KEPT:
                self._bound.clear()
            shape = (*x.shape[:-1], self.out_features)
            self._bound[key] = bound_call(bound, shape, self, picked, sizes)

    def bind_product(self, x: Tensor) -> Bound:
        """The product for inputs of this shape [rows, inputs]: nothing is checked, so the layer must stay as it is."""
        fused = fused_for(x.device.type, self._inputs)
        bound = None
        if fused is not None and self._pick(x.shape[0], x.dtype).strategy == "fused":
            bias = None if self.bias is None else self.bias.detach()
            bound = fused.bind(x, self.weight.encoded, self.prepared(fused), bias, None)
        return bound or (lambda inputs, shape: self(inputs).reshape(shape))

    def _forget_picks(self) -> None:
        self._picks.clear()
        self._bound.clear()
        if self.joint is not None:
            self.joint.drop(0)

    def _check_input(self, x: Tensor) -> None:
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise LayerError(
                f"{self.name}: the last axis of the input must have {self.in_features} features, got {tuple(x.shape)}"
            )
        if x.dtype not in INPUTS:
            kinds = f"{self.name}: inputs are bfloat16, float16, float32 or float64, got {x.dtype}"
            if x.dtype == PackedWeight.dtype and self.weight.name:  # as code gets that casts to its weight's type
                text = f"{kinds}, the type of a packed weight's bytes: quantize the model again and leave it as it is"
                raise LayerError(text, settings={"keep": self.weight.name})
            raise LayerError(f"{kinds}; cast first")
        weight: Any = self._modules["weight"]
        device = weight._buffers["data"].device
        if x.device != device:
            raise LayerError(f"{self.name}: the input lies on {x.device}, the weight on {device}; move one")

    def _pick(self, rows: int, dtype: torch.dtype, *, measure: bool = False) -> Pick:
        """What `choose` picks for so many rows; decided once for each power of two, as times are measured."""
        weight, cache, strategy = self.weight, self.cache, self.strategy
        bucket = 1 << max(0, rows - 1).bit_length()
        is_kept = strategy in ("auto", "fused") and type(weight.data) is Tensor and not is_capturing(weight.device)
        if not is_kept:
            return self._choose(bucket, dtype, measure=measure)
        room = cache is not None and cache.has_room(weight, compute_dtype(weight.device, dtype))
        key = (bucket, dtype, room, weight.token, weight.state)
        if measure or key not in self._picks:
            if len(self._picks) >= _PICKS_KEPT:
                self._picks.clear()
            picked = self._choose(bucket, dtype, measure=measure)
            if self._picks.get(key, picked) != picked:
                self._bound.clear()  # calls that were bound before it was measured
            self._picks[key] = picked
        return self._picks[key]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if isinstance(state_dict.get(prefix + "weight"), Tensor):
            error_msgs: list[str] = args[-1]
            error_msgs.append(
                f"{prefix}weight: the state holds a float weight and this layer a packed {self.weight.fmt.name} one; "
                "load the state before the plan is applied, or a state that was saved after it"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _bound_decode(weight: Encoded, dtype: torch.dtype, bias: Tensor | None, inputs: str | None) -> Bound | None:
    """A call that decodes the weight and multiplies; None where no kernel decodes it, or the bias has another type."""
    if bias is not None and bias.dtype != dtype:
        return None

    def rounded_first(x: Tensor, numbers: Tensor, bias: Tensor | None) -> Tensor:
        # Of an input with gaps torch would round the product before it adds the bias.
        contiguous = x if x.is_contiguous() else x.contiguous()
        return linear(contiguous if inputs is None else rounded(contiguous, inputs, dtype), numbers, bias)

    return bind_with_numbers(weight, dtype, linear if inputs is None and bias is None else rounded_first, bias)


def _bound_fp8(weight: Encoded, _dtype: torch.dtype, bias: Tensor | None, _inputs: str | None) -> Bound:
    def product(x: Tensor, _shape: Any = None) -> Tensor:
        return fp8_linear(x, weight, bias)

    return product


def _teach_compiler() -> bool:
    """Load what generated code does for rounded inputs: the compiler must know it before it begins."""
    importlib.import_module("bitplan.packed.inductor_lowering")
    return True


_teach_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as QuantLinear.settle


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _is_plain(x: Tensor) -> bool:
    """Whether no tensor subclass, dispatch mode or transform of torch.func must see the call."""
    return type(x) in PLAIN and not modes() and not is_transformed()


# ---- first calls, made at once ---------------------------------------------------------------------------------------


def warm_up(model: nn.Module, rows: Sequence[int] = (1,), dtype: torch.dtype = torch.bfloat16) -> float:
    """Make a model's packed linear layers ready for inputs of these numbers of rows (all leading axes together).

    Kernels are compiled in parallel and launches measured, which the layers would do one after the other, each when it
    is first called with a number of rows. It also makes the tensors that graphs read, so that torch.compile of a single
    block fits all blocks that are alike. Returns seconds; it does nothing where calls were made before.
    """
    started = time.perf_counter()
    alone, joint = [], {}
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            if layer.joint is not None and layer.joint.joined_layer() is not None:
                joint[id(layer.joint)] = layer.joint
            else:
                alone.append(layer)
    layers = [*alone, *(projection.joined_layer() for projection in joint.values())]
    with torch.no_grad():
        unlike = {(layer.weight.fmt.name, *layer.weight.shape, layer.weight.device): layer for layer in layers}
        calls = [call for layer in unlike.values() for count in rows for call in _products(layer, count, dtype)]
        if calls:
            compile_together(layers[0].weight.device, calls)
        for count in rows:
            for projection in joint.values():
                for layer in [projection.joined_layer()] if projection.decide(count, dtype) else projection.layers:
                    layer.settle(count, dtype)
            for layer in alone:
                layer.settle(count, dtype)
    return time.perf_counter() - started


def _products(layer: QuantLinear, rows: int, dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    """Calls of every launch that may be chosen, or of the launch that a record names."""
    weight, fused = layer.weight, fused_for(layer.weight.device.type)
    if fused is None or weight.device.type != "cuda" or rows > MOST_FUSED_ROWS:
        return []
    if layer.strategy not in ("auto", "fused") or fused.why_not(weight.encoded, dtype) is not None:
        return []
    bucket = bucket_of(rows)
    record = crossovers_of(weight.device).find(weight.fmt.name, *weight.shape)
    launches: Sequence[Launch | None] = fused.launches(weight.encoded, bucket)
    if record is not None and (record.refused or record.has(bucket)):
        launches = [] if record.refused else [record.at(bucket).launch]
    x = torch.zeros((bucket, weight.shape[1]), dtype=dtype, device=weight.device)
    prepared = layer.prepared(fused)

    def product(launch: Launch | None) -> Callable[[], Tensor]:
        return lambda: fused.run(x, weight.encoded, prepared, None, launch)

    return [product(launch) for launch in launches]
