"""Weights that are FP8 themselves: stored so, with `fp8_param=True`, or gathered so from other processes by FSDP2.

A layer with `fp8_param=True` stores its weight in FP8, and any optimizer trains it:

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

FSDP2 gathers the weights of FP8 layers in FP8, half the bytes of BF16, and no cast follows:

    apply_fp8(model, policy, tokens=8192)
    gather_weights_in_fp8(model)              # before fully_shard
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)

The shards stay what they were, BF16 or float32: optimizers, gradients, clipping and checkpoints see plain numbers.
When FSDP2 asks a shard for what it sends (`fsdp_pre_all_gather`), the shard is cast, by the largest number of all
shards, so the codes are those of the whole weight cast in one process. One all-reduce a step finds the largest numbers
of all weights; every write to a shard is counted, so nobody needs to say that a step is over.

Only layers whose fprop and dgrad are tensorwise have one scale for both layouts; the weights of other FP8 layers are
gathered as they are, and cast in each forward: FSDP2 fills their memory anew without saying so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bitplan.base.weight_changes import UNCOUNTED, GradientWatch, count_optimizer_steps, state_of
from bitplan.fp8.casts import CastPair, ScaledFp8, decode_scaled, empty_scale, scaling_of
from bitplan.fp8.kernels.cast import cast_layouts
from bitplan.fp8.layer_settings import Fp8LayerError
from bitplan.fp8.layers.linear_function import INPUT_TYPES, run_linear
from bitplan.fp8.layers.scale_guesses import GRAD, ROOM
from bitplan.fp8.layers.weight_casts import derived_layouts
from bitplan.fp8.layers.weight_source import WeightSource, amax_bits, shared_amax_cast
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


# ---- weights that FSDP2 gathers in FP8 -------------------------------------------------------------------------------


TENSORWISE = "tensorwise"
_aten = torch.ops.aten
# Ops after which a shard is still a shard: those that FSDP2, DTensor and nn.Parameter apply to make one of a weight.
_KEEP = {
    _aten.detach.default, _aten.view.default, _aten.split.Tensor, _aten.slice.Tensor, _aten.as_strided.default,
    _aten.new_zeros.default, _aten.empty_like.default, _aten.clone.default, _aten._to_copy.default,
    _aten.narrow.default, _aten.alias.default, _aten._pin_memory.default,
}  # fmt: skip


@dataclass
class ShardGroup:
    """The weights of one model: their largest numbers are found together."""

    members: list[ReferenceType[ShardedWeight]] = field(default_factory=list)

    def largest_of(self, weight: ShardedWeight, mesh: Any) -> Tensor:
        """Find the largest magnitude of all shards of a weight, int32 [1]. Every process asks in the same order."""
        if all(member() is not weight for member in self.members):
            self.members.append(ref(weight))
        state = weight.state
        if state.largest is None or state.known_at != state.writes:
            present = [one for member in self.members if (one := member()) is not None]
            bits = torch.cat([amax_bits(one.numbers) for one in present])
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=mesh.get_group())
            for index, one in enumerate(present):
                one.state.largest, one.state.known_at = bits[index : index + 1], one.state.writes
        assert state.largest is not None
        return state.largest


@dataclass
class _State:
    """What all views of one weight share: `writes` counts changes, the others hold for one count of them."""

    eps: float
    group: ShardGroup
    writes: int = 0
    known_at: int = -1
    largest: Tensor | None = None
    cast_at: int = -1
    cast: ScaledFp8 | None = None
    guesses: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # by role and FP8 type


class ShardedWeight(Tensor):
    """A weight, or a shard of it, that crosses to other processes in FP8; in all else the numbers that it holds."""

    numbers: Tensor
    state: _State

    @staticmethod
    def __new__(cls, numbers: Tensor, state: _State) -> ShardedWeight:
        wrapper: ShardedWeight = Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            layout=numbers.layout,
            device=numbers.device,
            requires_grad=numbers.requires_grad,
        )
        wrapper.numbers, wrapper.state = numbers, state
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        shards: list[ShardedWeight] = []

        def plain(value: Any) -> Any:
            if isinstance(value, ShardedWeight):
                shards.append(value)
                return value.numbers
            return value

        numbers = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        if func._schema.is_mutable:
            for shard in {id(shard.state): shard for shard in shards}.values():
                shard.state.writes += 1
            return args[0] if args and isinstance(args[0], ShardedWeight) else numbers
        if func not in _KEEP:
            return numbers
        state = shards[0].state
        return tree_map(lambda one: ShardedWeight(one, state) if isinstance(one, Tensor) else one, numbers)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.numbers!r})"

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The shard's codes, to be gathered, and the scale, which every process has."""
        if outer_size[0] % mesh.size() or tuple(self.shape) != (outer_size[0] // mesh.size(), *outer_size[1:]):
            raise Fp8LayerError(
                f"a weight of {tuple(outer_size)} is gathered in FP8 from equal shards of rows, and {mesh.size()} "
                f"processes do not divide it so (this one has {tuple(self.shape)}); shard its rows, over a divisor of "
                f"{outer_size[0]} processes, or leave it out of gather_weights_in_fp8"
            )
        state = self.state
        if state.cast is None or state.cast_at != state.writes:  # micro-batches share a cast
            largest = state.group.largest_of(self, mesh)
            pair = shared_amax_cast(self.numbers, "e4m3", state.eps, lambda _: largest, is_weight=True, cols=False)
            state.cast, state.cast_at = pair.rows, state.writes
        assert state.cast is not None
        return (state.cast.codes.view(torch.uint8),), (state.cast.scale,)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight as codes; `out` is the one of an earlier gathering, whose codes are in place already."""
        (codes,), (scale,) = gathered, metadata
        if out is not None:
            assert isinstance(out, GatheredWeight)
            out.scale = scale
            return None
        gathered_weight = GatheredWeight(codes, scale, param_dtype)
        gathered_weight.guesses = self.state.guesses
        return gathered_weight, (codes,)


class GatheredWeight(Tensor):
    """A whole weight as FP8 codes with one scale. Anything but an FP8 layer that reads it gets decoded numbers."""

    codes: Tensor
    scale: Tensor
    guesses: dict[tuple[str, str], Tensor]  # of the scales of its layer's inputs and gradients

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> GatheredWeight:
        wrapper: GatheredWeight = Tensor._make_wrapper_subclass(
            cls, codes.size(), strides=codes.stride(), dtype=dtype, device=codes.device
        )
        wrapper.codes, wrapper.scale, wrapper.guesses = codes, scale, {}
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        is_same = isinstance(first, GatheredWeight) and (len(args) == 1 or list(args[1]) == list(first.shape))
        if is_same and func in (_aten.detach.default, _aten.alias.default, _aten.as_strided.default):
            same = GatheredWeight(first.codes, first.scale, first.dtype)
            same.guesses = first.guesses
            return same
        if func._schema.is_mutable:
            raise Fp8LayerError(f"{func}: a weight gathered in FP8 is read-only; change its shards")
        decoded = lambda one: decode_scaled(one.stored, one.dtype) if isinstance(one, GatheredWeight) else one
        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs or {}))

    @property
    def stored(self) -> ScaledFp8:
        return ScaledFp8(self.codes.view(torch.float8_e4m3fn), self.scale, "tensor")


class Gathered(WeightSource):
    """The gathered codes, as they are. Nothing is kept: the memory is filled anew for every forward and backward."""

    def __init__(self, weight: GatheredWeight) -> None:
        super().__init__(reuse=False)
        self.weight = weight

    def rows(self, weight: Tensor, recipe: str, eps: float, *, with_cols: bool) -> ScaledFp8:
        return self.weight.stored

    def cols(self, weight: Tensor, recipe: str, eps: float) -> ScaledFp8:
        return transposed(self.weight.stored)

    def cast(
        self, x: Tensor, recipe: str, fp8: str, eps: float, weight: Tensor, role: str, *, rows: bool, cols: bool
    ) -> CastPair:
        return cast_layouts(x, recipe, fp8, eps, rows=rows, cols=cols, guess=self._guess(x, recipe, fp8, role))

    def _guess(self, x: Tensor, recipe: str, fp8: str, role: str) -> Tensor | None:
        """The guess of the last step; it stays with the shard, as the gathered memory is not the same in each step."""
        if not x.is_cuda or not RECIPES[recipe].has_one_scale:
            return None
        guesses = self.weight.guesses
        if (role, fp8) not in guesses:
            from bitplan.fp8.kernels.guessed_cast import new_state

            guesses[role, fp8] = new_state(x.device, room=ROOM[role], follows=role == GRAD)
        return guesses[role, fp8]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_of_gathered(x: Tensor, weight: Tensor, bias: Tensor | None, text: str, norm: Sequence[Any] = ()) -> Tensor:
    """The layer's forward on a gathered weight; `norm`: the weight and bias of the norm in front."""
    assert isinstance(weight, GatheredWeight)
    return run_linear(x, weight, bias, text, Gathered(weight), None, *norm)


def shard_in_fp8(layer: Any, group: ShardGroup) -> str | None:
    """Make an FP8 layer's weight one that FSDP2 gathers in FP8; or why it cannot be."""
    used = {layer.gemms.fprop, layer.gemms.dgrad}
    if layer.fp8_param:
        return "fp8_param stores its weight in FP8 already, which FSDP2 cannot shard beside its master"
    if used != {TENSORWISE}:
        return f"its products read the weight by {', '.join(sorted(used))}, and only tensorwise has one scale for all"
    weight = layer.weight
    state = _State(layer.recipe.eps.weight, group)
    layer.weight = nn.Parameter(ShardedWeight(weight.detach(), state), requires_grad=weight.requires_grad)
    return None


def plain_numbers(weight: Tensor) -> Tensor:
    """A weight as a state dict holds it: the numbers themselves, whole or as FSDP2's shard of them."""
    if isinstance(weight, ShardedWeight):
        return weight.numbers
    local = getattr(weight, "_local_tensor", None)
    if not isinstance(local, ShardedWeight):
        return weight
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    shape, stride = weight.size(), weight.stride()
    sharded: Tensor = DTensor.from_local(
        local.numbers, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )
    return sharded
