"""QuantExperts: the experts of a mixture-of-experts layer, run on their packed weights.

    y[t] = sum over slots s of weight[t, s] * down[e](gate(gate_up[e](x[t])))    with e = id[t, s]

| strategy | what runs | memory beside the packed bytes |
|---|---|---|
| fused | two grouped launches that read packed bytes (CUDA, bfloat16) | the scales once more |
| decode | one expert at a time, of those that have rows, expanded, used and forgotten | one matrix |
| tile_cache | the same through a TileCache, which keeps what was used last; a tile is an expert | the cache's budget |
| eager | all experts expanded at the first call, and kept | all numbers |
| auto | fused where it can run and an expert has few rows, else decode; never the others | as these |

A strategy asked for by name runs or raises. A CPU computes in float32 for any input (float64 for float64): without
bfloat16 hardware a product in bfloat16 takes a hundred times as long. How rows are grouped, and when the host waits for
the GPU, is in expert_products.py.

bitplan::packed_experts and its gradient: rows times the packed matrices of their experts, as graphs see them.

    pairs = torch.ops.bitplan.packed_experts(x, bias, expert_ids, data, scales, base, arranged, factor, counters, ...)

x [tokens, inputs], or [pairs, inputs] with `per_pair`; the result [pairs, outputs] is in the order of pairs, token by
token. `linear` describes the weight's tensors and `ways`; the counts in `ways` are pairs here. The gradient is with
respect to x and bias; there is no second derivative, and asking for one is an error.

All ways but the fused one read the ids on the host: on a GPU they wait, and cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from bitplan.base.errors import did_you_mean
from bitplan.formats import Encoded, get_format
from bitplan.packed.crossover import Pick
from bitplan.packed.expert_products import (
    ExpertMatrices,
    Numbers,
    Routes,
    fused_product,
    gradient_of_rows,
    looped_product,
    looped_rows,
)
from bitplan.packed.linear_operator import CHANGED, GraphWeight, find_cache, find_weight, remember, versions_of
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.product_strategy import (
    FUSED_ROWS_UNMEASURED,
    INPUTS,
    LayerError,
    ProductWay,
    check_cache,
    check_packed,
    check_strategy,
    check_tensor,
    compute_dtype,
    input_type,
    text_of,
    way_at,
)
from bitplan.packed.products.decode_row_slices import why_no_rows
from bitplan.packed.tile_cache import TileCache

# ---- expert operator -------------------------------------------------------------------------------------------------


_WEIGHT = (
    "Tensor data, Tensor scales, Tensor? base, Tensor? arranged, Tensor? factor, Tensor? counters, Tensor? expanded, "
    "str format, int {width}, bool per_pair, str ways, int weight, int cache"
)


def _numbers(arguments: tuple[Any, ...], shape: tuple[int, ...], way: ProductWay) -> tuple[Encoded, Any]:
    """The packed stack as an Encoded, and a function (index, dtype) that gives one expert's numbers."""
    data, scales, base, _, _, _, expanded, name, _, _, _, weight, cache = arguments
    encoded = Encoded(get_format(name), shape, data, scales, base)
    if way.strategy == "eager" and expanded is not None:
        return encoded, lambda index, _dtype: expanded[index]
    if way.strategy == "tile_cache":
        matrices, tiles = ExpertMatrices(find_weight(weight)), find_cache(cache)
        return encoded, lambda index, dtype: matrices.cached(tiles, index, dtype)
    return encoded, lambda index, dtype: ExpertMatrices.decoded_of(encoded, index, dtype)


def _packed_experts(x: Tensor, bias: Tensor | None, expert_ids: Tensor, *weight: Any) -> Tensor:
    outputs, per_pair, ways = weight[8:11]
    way = way_at(ways, expert_ids.numel())
    shape = (weight[0].shape[0], outputs, x.shape[1])
    routes = Routes(expert_ids, shape[0], "packed_experts")
    if way.strategy == "fused":
        from bitplan.packed.products.fused_few_rows import ArrangedScales, fused_experts

        if bias is not None and bias.dtype != torch.float32:
            bias = bias.to(x.dtype)
        encoded = Encoded(get_format(weight[7]), shape, *weight[:3])
        arranged = ArrangedScales(*weight[3:6])
        return fused_experts(x.contiguous(), encoded, arranged, routes.fused, bias, per_pair=per_pair)
    _, numbers = _numbers(weight, shape, way)
    groups = routes.groups
    rows = x[groups.order if per_pair else groups.order // routes.top_k]
    bias = None if bias is None else bias.to(x.dtype)
    return looped_rows(rows, bias, routes, numbers, outputs)[groups.inverse]


def _packed_experts_gradient(grad: Tensor, expert_ids: Tensor, *weight: Any) -> Tensor:
    """The gradient of each pair's row, [pairs, inputs]."""
    inputs, _, ways = weight[8:11]
    way = way_at(ways, expert_ids.numel())
    shape = (weight[0].shape[0], grad.shape[1], inputs)
    routes = Routes(expert_ids, shape[0], "packed_experts")
    _, numbers = _numbers(weight, shape, way)
    return gradient_of_rows(grad[routes.groups.order], routes, numbers, inputs)[routes.groups.inverse]


def _fake_experts(x: Tensor, _bias: Tensor | None, expert_ids: Tensor, *weight: Any) -> Tensor:
    return x.new_empty((expert_ids.numel(), weight[8]))


def _fake_gradient(grad: Tensor, _expert_ids: Tensor, *weight: Any) -> Tensor:
    return grad.new_empty((grad.shape[0], weight[8]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, bias, expert_ids, *weight = inputs
    ctx.save_for_backward(expert_ids)
    ctx.weight, ctx.inputs = tuple(weight), x.shape[1]
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.versions = versions_of(ctx.weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (expert_ids,) = ctx.saved_tensors
    if versions_of(ctx.weight) != ctx.versions:
        raise LayerError(CHANGED)
    for_x = for_bias = None
    if ctx.needs_input_grad[0]:
        weight = (*ctx.weight[:8], ctx.inputs, *ctx.weight[9:])
        for_x = torch.ops.bitplan.packed_experts_gradient(grad, expert_ids, *weight)
        if not ctx.weight[9]:
            for_x = for_x.unflatten(0, (-1, expert_ids.shape[1])).sum(1)
    if ctx.needs_input_grad[1]:
        shape, dtype = ctx.bias
        wide = torch.promote_types(grad.dtype, torch.float32)
        for_bias = grad.new_zeros(shape, dtype=wide).index_add(0, expert_ids.reshape(-1), grad.to(wide)).to(dtype)
    return for_x, for_bias, *(None,) * 14


def _refuse(*_: Any) -> Any:
    raise LayerError("packed experts have no second derivative; take gradients of a gradient through other layers only")


_library = torch.library.Library("bitplan", "FRAGMENT")
_OUTPUTS, _INPUTS = (_WEIGHT.format(width=width) for width in ("outputs", "inputs"))
_library.define(f"packed_experts(Tensor x, Tensor? bias, Tensor expert_ids, {_OUTPUTS}) -> Tensor")
_library.define(f"packed_experts_gradient(Tensor grad, Tensor expert_ids, {_INPUTS}) -> Tensor")
_library.impl("packed_experts", _packed_experts, "CompositeExplicitAutograd")
_library.impl("packed_experts_gradient", _packed_experts_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("bitplan::packed_experts", _fake_experts, lib=_library)
torch.library.register_fake("bitplan::packed_experts_gradient", _fake_gradient, lib=_library)
torch.library.register_autograd("bitplan::packed_experts", _backward, setup_context=_save, lib=_library)
torch.library.register_autograd("bitplan::packed_experts_gradient", _refuse, lib=_library)


# ---- quant experts ---------------------------------------------------------------------------------------------------


Activation = Literal["gpt_oss", "swiglu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
ID_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LEAST_INPUTS = 32  # formats treat narrower stacks of matrices as convolution kernels


class QuantExperts(nn.Module):
    """All experts of a layer in packed form; `forward` takes tokens and the experts each is sent to.

    gate_up           [experts, 2 x intermediate, hidden] in a format whose blocks lie within a row, such as mxfp4
    down              [experts, hidden, intermediate]
    *_bias            [experts, outputs], kept as Parameters; or None
    activation        gpt_oss: gate in the even rows and up in the odd ones, both clamped at `limit`,
                      gate * sigmoid(alpha * gate) * (up + 1); swiglu: all rows of gate before those of up,
                      silu(gate) * up (Mixtral, Qwen)
    strategy          see the table above; may be set later
    cache             for strategy "tile_cache": a TileCache, the same one for all layers
    most_fused_rows   for "auto": rows per expert up to which the fused kernel is taken
    name              what messages call the layer

    Gradients reach the tokens, the experts' weights in the sum, and the biases; packed weights are constants.
    `last_pick` says how the last forward ran and why; `explain(rows)` says how a forward of `rows` rows would run.
    """

    def __init__(
        self,
        gate_up: Encoded | PackedWeight,
        down: Encoded | PackedWeight,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: Activation = "gpt_oss",
        alpha: float = 1.702,
        limit: float = 7.0,
        strategy: str = "auto",
        cache: TileCache | None = None,
        most_fused_rows: int = FUSED_ROWS_UNMEASURED,
        name: str = "QuantExperts",
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            hint = did_you_mean(str(activation), ACTIVATIONS)
            raise LayerError(f"{name}: no activation {activation!r}; there are {', '.join(ACTIVATIONS)}{hint}")
        _check_shapes(name, gate_up, down, gate_up_bias, down_bias)
        self.name, self._strategy = name, check_strategy(strategy, name)
        self.experts, self.hidden, self.intermediate = down.shape
        self.activation, self.alpha, self.limit = activation, alpha, limit
        self.cache, self.most_fused_rows = cache, most_fused_rows
        self.gate_up = gate_up if isinstance(gate_up, PackedWeight) else PackedWeight(gate_up)
        self.down = down if isinstance(down, PackedWeight) else PackedWeight(down)
        self.gate_up_bias = None if gate_up_bias is None else nn.Parameter(gate_up_bias)
        self.down_bias = None if down_bias is None else nn.Parameter(down_bias)
        self.graphs = nn.ModuleList([GraphWeight(), GraphWeight()])
        self._seen_as_experts: dict[str, ExpertMatrices] = {}
        self.last_pick: Pick | None = None

    @property
    def strategy(self) -> str:
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: str) -> None:
        self._strategy = check_strategy(strategy, self.name)

    @property
    def _matrices(self) -> dict[str, ExpertMatrices]:
        """Both weights as their experts, made anew when a weight was replaced by another PackedWeight."""
        for name, weight in (("gate_up", self.gate_up), ("down", self.down)):
            matrices = self._seen_as_experts.get(name)
            if matrices is None or matrices.packed is not weight:
                self._seen_as_experts[name] = ExpertMatrices(weight)
        return self._seen_as_experts

    @property
    def packed_bytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def derived_bytes(self) -> int:
        """Bytes held beside the packed ones: scales arranged for the kernel, or expanded numbers (eager)."""
        return self.gate_up.derived_nbytes + self.down.derived_nbytes

    def stand_in(self, *_inputs: Tensor) -> None:
        """Give None: no plain layer routes as this one does, so `bitplan.describe` calls it unknown."""

    def extra_repr(self) -> str:
        return f"experts={self.experts}, {self.activation}, strategy={self.strategy}"

    def forward(self, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Tokens [tokens, hidden], and for each its experts and their weights [tokens, top_k]: [tokens, hidden].

        Ids outside the range of experts are an error in all strategies but "fused", which never waits for the GPU and
        so does not check ids.
        """
        self._check_inputs(hidden, expert_ids, expert_weights)
        device, dtype = hidden.device, input_type(hidden)
        in_graph = torch.compiler.is_compiling()
        if in_graph:  # made of operators; how they run is chosen when the graph is traced
            ways = self.settle(dtype)
            is_fused = self.graphs[0].arranged is not None
        else:
            self.last_pick = picked = self.explain(expert_ids.numel(), dtype)
            is_fused = picked.strategy == "fused"
        wide = dtype if is_fused else compute_dtype(device, dtype)
        with torch.autocast(device.type, enabled=False):  # it would cast the products' outputs
            x = hidden.to(wide)
            if in_graph:
                ids = expert_ids.long()
                up = self._operator(0, x, self.gate_up_bias, ids, ways)
                pairs = self._operator(1, self._activate(up), self.down_bias, ids, ways)
            else:
                routes = Routes(expert_ids, self.experts, self.name)
                pairs = self._run_fused(x, routes) if is_fused else self._run_loop(x, routes, picked.strategy)
            pairs = pairs.unflatten(0, expert_ids.shape) * expert_weights.to(wide).unsqueeze(-1)
            out: Tensor = pairs.sum(1).to(dtype)
        return out

    def explain(self, rows: int, dtype: torch.dtype | None = None) -> Pick:
        """How a forward of `rows` rows (tokens x experts per token) would run, and why.

        dtype   of the tokens; bfloat16 on CUDA and float32 elsewhere if it is not given
        """
        device = self.down.device
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        if self.strategy == "fused":
            why_not = self._why_not_fused(dtype)
            if why_not is not None:
                raise LayerError(
                    f"{self.name}: strategy 'fused' cannot run: {why_not}; set strategy='auto', which picks another "
                    "way where this one cannot run, or 'decode'"
                )
        if self.strategy == "tile_cache":
            check_cache(device, self.cache, self.name)
        if self.strategy != "auto":
            return Pick(self.strategy, "asked for")
        why_not = self._why_not_fused(dtype) if device.type == "cuda" else f"no grouped kernel for {device.type}"
        if why_not is not None:
            return Pick("decode", f"not fused: {why_not}")
        per_expert, most = rows / self.experts, self.most_fused_rows
        load = f"{rows} rows over {self.experts} experts are {per_expert:.1f} for each"
        return (
            Pick("fused", f"{load}, at most {most}") if per_expert <= most else Pick("decode", f"{load}, above {most}")
        )

    # ---- the two ways ------------------------------------------------------------------------------------------------

    def _operator(self, which: int, x: Tensor, bias: Tensor | None, ids: Tensor, ways: str) -> Tensor:
        weight, graph, tokens = (self.gate_up, self.down)[which], self.graphs[which], (0, 0)
        if "tile_cache" in ways and self.cache is not None:
            tokens = weight.token, self.cache.token
        pairs: Tensor = torch.ops.bitplan.packed_experts(
            x,
            bias,
            ids,
            weight.data,
            weight.scales,
            weight.base if "base" in weight._buffers else None,
            graph.arranged,
            graph.factor,
            graph.counters,
            graph.expanded,
            weight.fmt.name,
            weight.shape[1],
            bool(which),
            ways,
            *tokens,
        )
        return pairs

    def settle(self, dtype: torch.dtype) -> str:
        """Choose how a graph's products run, for any number of rows, and prepare what they read; as text."""
        most = self.most_fused_rows * self.experts
        counts = (most, None) if self.strategy == "auto" else (None,)
        picks = [(count, self.explain(most + 1 if count is None else count, dtype)) for count in counts]
        strategies = {pick.strategy for _, pick in picks}
        # Numbers of another type than the fused kernel's would need another graph.
        if len(strategies) > 1 and compute_dtype(self.down.device, dtype) != dtype:
            raise LayerError(f"{self.name}: {dtype} on {self.down.device} has no one type for all ways; set a strategy")
        self.last_pick = picks[0][1]
        if type(self.down.data) is Tensor:
            for graph, matrices in zip(self.graphs, self._matrices.values(), strict=True):
                assert isinstance(graph, GraphWeight)
                graph.drop(0)
                if "fused" in strategies:
                    graph.hold_prepared(matrices.packed, matrices.arranged)
                if "eager" in strategies:
                    wide = compute_dtype(self.down.device, dtype)
                    graph.hold_expanded(matrices.packed, matrices.all_expanded(wide))
                if "tile_cache" in strategies and self.cache is not None:
                    remember(matrices.packed, self.cache)
        return text_of(picks)

    settle._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see QuantLinear.settle

    def _run_fused(self, x: Tensor, routes: Routes) -> Tensor:
        up = fused_product(x, self.gate_up_bias, routes, self._matrices["gate_up"], per_pair=False)
        return fused_product(self._activate(up), self.down_bias, routes, self._matrices["down"], per_pair=True)

    def _run_loop(self, x: Tensor, routes: Routes, strategy: str) -> Tensor:
        """Rows stay sorted by expert from the first gathering to the last, so that an expert's rows are a slice."""
        bias_1, bias_2 = (None if bias is None else bias.to(x.dtype) for bias in (self.gate_up_bias, self.down_bias))
        first, second = (self._numbers(self._matrices[which], strategy) for which in ("gate_up", "down"))
        rows = x[routes.groups.order // routes.top_k]
        up = looped_product(rows, bias_1, routes, self._matrices["gate_up"], first)
        down = looped_product(self._activate(up), bias_2, routes, self._matrices["down"], second)
        return down[routes.groups.inverse]

    def _numbers(self, matrices: ExpertMatrices, strategy: str) -> Numbers:
        if strategy == "eager":
            return matrices.expanded
        if strategy == "tile_cache":
            assert self.cache is not None
            return functools.partial(matrices.cached, self.cache)
        return matrices.decoded

    def _activate(self, gate_up: Tensor) -> Tensor:
        if self.activation == "swiglu":
            gate, up = gate_up.chunk(2, dim=-1)
            return nn.functional.silu(gate) * up
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _why_not_fused(self, dtype: torch.dtype) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        from bitplan.packed.products.fused_few_rows import why_not_fused

        reasons = (why_not_fused(matrices.encoded, dtype) for matrices in self._matrices.values())
        return next((reason for reason in reasons if reason is not None), None)

    def _check_inputs(self, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> None:
        for name, tensor in (("tokens", hidden), ("expert_ids", expert_ids), ("expert_weights", expert_weights)):
            check_tensor(tensor, self.name, name)
        if hidden.dim() != 2 or hidden.shape[1] != self.hidden or hidden.dtype not in INPUTS:
            raise LayerError(
                f"{self.name}: tokens must be floats [tokens, {self.hidden}], got {hidden.dtype} {tuple(hidden.shape)}"
            )
        fits = expert_ids.dim() == 2 and expert_ids.shape[0] == hidden.shape[0] and expert_ids.shape[1] > 0
        if not fits or expert_ids.shape != expert_weights.shape:
            raise LayerError(
                f"{self.name}: expert_ids and expert_weights must both be [{hidden.shape[0]}, top_k], "
                f"got {tuple(expert_ids.shape)} and {tuple(expert_weights.shape)}"
            )
        if expert_ids.dtype not in ID_TYPES:  # floats would be cut to integers silently
            raise LayerError(f"{self.name}: expert_ids must be integers, got {expert_ids.dtype}")
        if hidden.device != self.down.device:
            raise LayerError(f"{self.name}: tokens lie on {hidden.device}, the weights on {self.down.device}; move one")
        for name, tensor in (("expert_ids", expert_ids), ("expert_weights", expert_weights)):
            if tensor.device != hidden.device:
                raise LayerError(f"{self.name}: {name} lie on {tensor.device}, tokens on {hidden.device}; move one")


def _check_shapes(
    where: str,
    gate_up: Encoded | PackedWeight,
    down: Encoded | PackedWeight,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    for name, weight in (("gate_up", gate_up), ("down", down)):
        check_packed(weight, f"{where}: {name}")
        reason = why_no_rows(weight.fmt)
        if reason is not None:
            raise LayerError(f"{where}: {name}: {reason}; use a format such as mxfp4 or int8_row")
        if len(weight.shape) != 3 or weight.shape[-1] < LEAST_INPUTS:
            raise LayerError(
                f"{where}: {name} must be [experts, outputs, inputs] with {LEAST_INPUTS} inputs or more, "
                f"got {weight.shape}"
            )
    experts, hidden, intermediate = down.shape
    if gate_up.shape != (experts, 2 * intermediate, hidden):
        raise LayerError(
            f"{where}: down is {down.shape}, so gate_up must be {(experts, 2 * intermediate, hidden)}, "
            f"got {gate_up.shape}"
        )
    for name, bias, weight in (("gate_up_bias", gate_up_bias, gate_up), ("down_bias", down_bias, down)):
        if bias is not None and tuple(bias.shape) != weight.shape[:2]:
            raise LayerError(f"{where}: {name} must be {weight.shape[:2]}, got {tuple(bias.shape)}")
