"""Linear layers divided over processes: tensor parallel by columns or rows, and experts spread out.

    ColumnParallel(local, group)    local has a share of the outputs; x whole; its gradient summed over the group
    RowParallel(local, group)       local has a share of the inputs; x divided; outputs summed over the group, then bias
    ExpertParallel(experts, group)  each process has a share of the experts; tokens go to them and come back

`local` is an Fp8Linear, Fp8NormLinear, nn.Linear or, with tokens_per_expert as a second argument, a GroupedLinear
(expert-tensor parallel); `experts` is a GroupedLinear or a module of several that is called the same way. `group` of
None is the default group; every process of it must make the same layers and call them in the same order.

These do not depend on how a layer is divided:

    blockwise     codes and scales: a block never crosses processes (shares are multiples of 128)
    tensorwise    codes and scales of an Fp8Linear: maxima of operands that are divided are agreed on over the group
                  (`agree=True`), at one number sent for each cast; not of an Fp8NormLinear, whose cast is in its norm
    rowwise       codes and scales, unless a row is divided: each process then scales its own part of the row
    experts       everything: a scale belongs to one expert, whose tokens all meet in one process

Sums over the group are rounded to the type of x before they are added, in every precision.

Layers compare sizes and recipes when they are made, and name the processes that differ. A process that dies closes its
connections: the others get a `ParallelError` that names the step. With NCCL, and for a process that hangs, that takes
as long as the timeout given to `init_process_group`.

An Fp8Linear by itself would scale each share of a divided operand by the share's own maximum. `SharedAmax` takes the
group's instead, before anything is cast, for tensorwise products alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitplan.fp8.casts import CastPair, ScaledFp8
from bitplan.fp8.layer_settings import Fp8LayerError
from bitplan.fp8.layers.grouped_linear import GroupedLinear
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear
from bitplan.fp8.layers.linear_function import run_linear
from bitplan.fp8.layers.scale_guesses import WEIGHT
from bitplan.fp8.layers.weight_casts import derived_layouts
from bitplan.fp8.layers.weight_source import Largest, WeightSource, shared_amax_cast
from bitplan.fp8.policy.vocabulary import Fp8Error
from bitplan.fp8.recipes import RECIPES

# ---- scales by the maximum of a group --------------------------------------------------------------------------------


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


# ---- layers ----------------------------------------------------------------------------------------------------------


class ParallelError(Fp8Error):
    """Processes disagree about a layer, or a process is gone."""


class _Parallel(nn.Module):
    divided: tuple[str, ...] = ()  # operands of the local product of which each process has a share

    def __init__(self, local: nn.Module, group: Any = None, *, agree: bool = True) -> None:
        super().__init__()
        self.local: Any = local
        self.group = group
        self.agree = agree and _can_agree(local)
        sizes = {name: int(getattr(local, name, 0)) for name in ("in_features", "out_features", "num_experts")}
        words = f"{type(self).__name__} {local} {next(local.parameters()).dtype}"
        check_alike(sizes | {"kind, recipe or type": zlib.crc32(words.encode())}, _device(local), group)

    def _product(self, x: Tensor, *more: Tensor) -> Tensor:
        """The local product; scales of divided operands are agreed on over the group, where they can be."""
        y: Tensor
        if self.agree:
            y = shared_amax_linear(x, self.local, divided=self.divided, largest=partial(_largest, group=self.group))
        else:
            y = self.local(x, *more)
        return y


class ColumnParallel(_Parallel):
    """Computes y of this process's outputs [..., N / processes]; the gradient of x is that of the whole layer."""

    divided = ("weight", "grad")

    def __init__(self, local: nn.Module, group: Any = None, *, agree: bool = True) -> None:
        super().__init__(local, group, agree=agree)
        for norm in _norm_parameters(local):  # their gradients pass through the divided product, as x's does
            norm.register_hook(lambda gradient: _sum(gradient, group, "gradients of a norm"))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self._product(sum_backward(x, self.group), *more)


class RowParallel(_Parallel):
    """Computes y of the whole layer from this process's inputs [..., K / processes]; `bias` [N] is added once."""

    divided = ("input", "weight")

    def __init__(
        self, local: nn.Module, group: Any = None, *, bias: nn.Parameter | None = None, agree: bool = True
    ) -> None:
        if getattr(local, "bias", None) is not None:
            raise Fp8LayerError("RowParallel: every process would add the bias of its local layer; give it as `bias`")
        super().__init__(local, group, agree=agree)
        self.bias = bias

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        y = sum_forward(self._product(x, *more), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ExpertParallel(nn.Module):
    """Experts over processes: process r of n holds experts r E / n to (r + 1) E / n - 1 of E.

    Called like the experts themselves, with counts of all E experts; returns rows in the order they came. The counts
    are copied to the host once in a forward: each process must tell the others how many rows it sends them.
    """

    def __init__(self, experts: nn.Module, group: Any = None) -> None:
        super().__init__()
        layers = [layer for layer in experts.modules() if isinstance(layer, GroupedLinear)]
        if not layers:
            raise Fp8LayerError(f"ExpertParallel takes GroupedLinear layers, got {type(experts).__name__} without any")
        self.experts, self.group = experts, group
        self.local_experts = layers[0].num_experts
        words = f"{experts} {layers[0].weight.dtype}"
        description = {"num_experts": self.local_experts, "sizes, recipe or type": zlib.crc32(words.encode())}
        check_alike(description, _device(experts), group)

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        processes = dist.get_world_size(self.group)
        if tuple(tokens_per_expert.shape) != (processes * self.local_experts,):
            raise Fp8LayerError(
                f"tokens_per_expert must have all {processes * self.local_experts} experts of {processes} processes, "
                f"got shape {tuple(tokens_per_expert.shape)}"
            )
        sent = tokens_per_expert.long().view(processes, self.local_experts)
        received = torch.empty_like(sent)
        with _named("exchanging counts of tokens", self.group):
            dist.all_to_all_single(received, sent, group=self.group)
        to, of = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        if sum(to) != x.shape[0]:
            raise Fp8LayerError(f"tokens_per_expert must add up to the {x.shape[0]} rows of x, got {sum(to)}")
        order = _order_by_expert(received, sum(of))
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        rows = exchange(x, to, of, self.group)[order]
        outputs = self.experts(rows, received.sum(0))
        return exchange(outputs[back], of, to, self.group)


def _order_by_expert(received: Tensor, rows: int) -> Tensor:
    """Indices that sort received rows, which lie by process and expert, by expert."""
    processes, experts = received.shape
    ids = torch.arange(experts, device=received.device).repeat(processes)
    return torch.repeat_interleave(ids, received.flatten(), output_size=rows).argsort(stable=True)


# ---- communication ---------------------------------------------------------------------------------------------------


def check_alike(description: dict[str, int], device: torch.device, group: Any = None) -> None:
    """Raise in every process if the processes do not describe the same layer."""
    mine = torch.tensor(list(description.values()), device=device)
    descriptions = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with _named("comparing layers", group):
        dist.all_gather(descriptions, mine, group=group)
    for name, values in zip(description, torch.stack(descriptions).t().tolist(), strict=True):
        if len(set(values)) > 1:
            others = [rank for rank, value in enumerate(values) if value != values[0]]
            values_text = f"got {values}" if "," not in name else f"processes {others} differ from process 0"
            raise ParallelError(
                f"the processes of a group must make the same layer: {name} differs, {values_text} by rank"
            )


@contextmanager
def _named(step: str, group: Any) -> Iterator[None]:
    """A context that turns an error of the transport into one that names the step and explains it."""
    try:
        yield
    except RuntimeError as error:
        where = f"process {dist.get_rank(group)} of {dist.get_world_size(group)}"
        raise ParallelError(
            f"{where} failed at {step}: another process of the group has ended or did not answer in time; look at the "
            f"first error of the others, and start all again ({str(error).splitlines()[0]})"
        ) from error


def _sum(x: Tensor, group: Any, what: str) -> Tensor:
    x = x.contiguous().clone()
    with _named(f"the sum of {what}", group):
        dist.all_reduce(x, group=group)
    return x


def _largest(bits: Tensor, group: Any) -> Tensor:
    with _named("agreeing on the largest number", group):
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return bits


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group, "input gradients"), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, y: Tensor, group: Any) -> Tensor:
        return _sum(y, group, "outputs")

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Exchange(torch.autograd.Function):
    """Sends `to[r]` rows to each process r, and receives `of[r]` rows from it. Gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: list[int], of: list[int], group: Any) -> Tensor:
        ctx.splits, ctx.group = (to, of), group
        return _exchanged(x, to, of, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        to, of = ctx.splits
        return _exchanged(gradient, of, to, ctx.group), None, None, None


def _exchanged(x: Tensor, to: list[int], of: list[int], group: Any) -> Tensor:
    out = x.new_empty((sum(of), x.shape[1]))
    with _named("exchanging tokens", group):
        dist.all_to_all_single(out, x.contiguous(), of, to, group=group)
    return out


sum_backward: Callable[..., Tensor] = _SumBackward.apply
sum_forward: Callable[..., Tensor] = _SumForward.apply
exchange: Callable[..., Tensor] = _Exchange.apply


def _can_agree(local: nn.Module) -> bool:
    if not isinstance(local, Fp8Linear) or isinstance(local, Fp8NormLinear) or local.fp8_param:
        return False
    return any(RECIPES[name].has_one_scale for name in local.gemms.recipes)


def _norm_parameters(local: nn.Module) -> list[Tensor]:
    """Parameters of norms in front of the product, fused with it or not: whole on every process."""
    parameters: list[Any] = []
    for module in local.modules():
        if isinstance(module, Fp8NormLinear):
            parameters += [module.norm.weight, module.norm.bias]
        elif isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            parameters += module.parameters(recurse=False)
    return [norm for norm in parameters if norm is not None and norm.requires_grad]


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
