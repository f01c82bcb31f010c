"""Finds the blocks of a model, decides which of their parameters are streamed, and names what cannot work.

A block's parameters are streamed or resident. Streamed ones live on the host and pass through slots: the frozen base,
or with train="weights" all of them. Trained adapters are resident, as is everything outside of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from bitplan.base.errors import did_you_mean
from bitplan.packed.packed_weight import PackedWeight
from bitplan.plan.names import listed
from bitplan.streaming.block_layout import ParameterSpec
from bitplan.streaming.errors import StreamError

Train = Literal["nothing", "adapters", "weights"]
STREAMED = "_bitplan_streamed"


@dataclass(eq=False)
class StreamedParameter:
    """A parameter (the new one, if the user replaces it) and every place in its block that holds it."""

    name: str
    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def spec(self) -> ParameterSpec:
        return ParameterSpec(tuple(self.parameter.shape), self.parameter.dtype)

    def put_back(self) -> None:
        """Give its modules the Parameter again where a call, broken off by Ctrl-C, left the streamed tensor."""
        for module, local in self.places:
            held = module._parameters.get(local)
            if isinstance(held, Tensor) and not isinstance(held, nn.Parameter):
                module._parameters[local] = self.parameter


@dataclass(frozen=True, eq=False)
class StreamedBlock:
    """One block: its name in the model, its module, and its streamed parameters by name within it.

    routed: those that cross apart from the others, when a router chose them (`routed_experts`).
    """

    name: str
    module: nn.Module
    parameters: dict[str, StreamedParameter]
    routed: dict[str, StreamedParameter] = field(default_factory=dict)

    @property
    def streamed(self) -> list[StreamedParameter]:
        """All of them."""
        return [*self.parameters.values(), *self.routed.values()]

    @property
    def specs(self) -> dict[str, ParameterSpec]:
        return {name: parameter.spec for name, parameter in self.parameters.items()}

    def put_back(self) -> None:
        for one in self.streamed:
            one.put_back()


def find_blocks(model: nn.Module, pattern: str, train: Train) -> list[StreamedBlock]:
    """The blocks a pattern names, in the model's order; `*` stands for one part of a name."""
    if not isinstance(model, nn.Module):
        raise StreamError(f"stream_blocks: expected a model (torch.nn.Module), got {type(model).__name__}")
    if not isinstance(pattern, str):
        raise StreamError(
            f"blocks={pattern!r}: expected one text, in which `*` stands for one part of a name: 'model.layers.*'"
        )
    if train not in get_args(Train):
        raise StreamError(f"train={train!r}: there are {', '.join(map(repr, get_args(Train)))}")
    modules = dict(model.named_modules())
    matches = [name for name in modules if name and _matches(pattern, name)]
    if not matches:
        raise StreamError(f"blocks={pattern!r} names no module of this model{_suggestion(pattern, modules)}")
    refuse_divided(model, matches)
    for name in matches:
        if getattr(modules[name], STREAMED, False):
            raise StreamError(f"{name} is streamed already; close() the other handle first")
        if any(isinstance(module, PackedWeight) for module in modules[name].modules()):
            raise StreamError(f"{name} holds packed weights; stream the float model and give its plan as `formats`")
        if any(isinstance(module, nn.RNNBase) for module in modules[name].modules()):
            raise StreamError(
                f"{name} holds a recurrent layer, which keeps a list of its weights beside its parameters"
            )
    blocks = [StreamedBlock(name, modules[name], _streamed(modules[name], train)) for name in matches]
    _refuse_shared(model, blocks)
    _refuse_moved(blocks)
    _refuse_nothing(blocks, train)
    if train == "weights":
        _refuse_overlapping(blocks)
    return blocks


def refuse_divided(model: nn.Module, blocks: Iterable[str]) -> None:
    """Refuse models that other code has wrapped or divided among processes: who holds a weight would not be certain."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    for path, module in model.named_modules():
        within = any(f"{path}.".startswith(f"{block}.") or f"{block}.".startswith(f"{path}.") for block in blocks)
        if isinstance(module, DistributedDataParallel):
            raise StreamError(
                "the model is wrapped in DistributedDataParallel already, which waits for gradients of all weights; "
                "stream the model itself (its .module), then wrap it"
            )
        if (not path or within) and isinstance(module, FSDPModule | FullyShardedDataParallel):
            raise StreamError(
                f"{path or 'the model'} is sharded by FSDP, and streamed blocks lie whole on the host of every "
                "process; stream the model without FSDP: data-parallel processes work, and shard_optimizer=True "
                "divides the optimizer among them"
            )
        for name, parameter in module._parameters.items() if within else ():
            if isinstance(parameter, DTensor):
                raise StreamError(
                    f"{path}.{name} is divided over {parameter.device_mesh} (DTensor, tensor parallel): streamed "
                    "weights are whole in every process; stream the model without that"
                )


def resident_tensors(model: nn.Module, blocks: Sequence[StreamedBlock]) -> list[nn.Parameter]:
    """Every parameter that is not streamed."""
    streamed = {id(one.parameter) for block in blocks for one in block.streamed}
    return [parameter for parameter in model.parameters() if id(parameter) not in streamed]


def move_resident(model: nn.Module, blocks: Sequence[StreamedBlock], device: torch.device) -> None:
    """Put everything that is not streamed on the device; Parameters stay the same objects, so optimizers keep them."""
    for parameter in resident_tensors(model, blocks):
        parameter.data = parameter.data.to(device)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(device)
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def _matches(pattern: str, name: str) -> bool:
    parts = (re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("."))
    return re.fullmatch(r"\.".join(parts), name) is not None


def _suggestion(pattern: str, modules: Iterable[str]) -> str:
    """A hint for a pattern that matches nothing: the model's lists of modules."""
    lists = sorted({re.sub(r"\.\d+$", ".*", name) for name in modules if re.search(r"(^|\.)\d+$", name)})
    lists = ["*" if name.isdigit() else name for name in lists]
    close = did_you_mean(pattern, lists)
    return close or (f"; it has {listed(dict.fromkeys(lists))}" if lists else "; it has no list of blocks")


def _streamed(block: nn.Module, train: Train) -> dict[str, StreamedParameter]:
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for path, module in block.named_modules():
        for local, parameter in module._parameters.items():
            if parameter is not None and not (train == "adapters" and parameter.requires_grad):
                places.setdefault(id(parameter), []).append((f"{path}.{local}".lstrip("."), module, local))
                parameters[id(parameter)] = parameter
    return {
        uses[0][0]: StreamedParameter(uses[0][0], parameters[key], tuple(place[1:] for place in uses))
        for key, uses in places.items()
    }


def _refuse_shared(model: nn.Module, blocks: Sequence[StreamedBlock]) -> None:
    owner = {id(one.parameter): block for block in blocks for one in block.parameters.values()}
    modules_of = {id(module): block for block in blocks for module in block.module.modules()}
    for path, module in model.named_modules(remove_duplicate=False):
        for local, parameter in module._parameters.items():
            block = owner.get(id(parameter)) if parameter is not None else None
            if block is not None and modules_of.get(id(module)) is not block:
                name = f"{path}.{local}".lstrip(".")
                raise StreamError(
                    f"{name} is shared with {block.name}: a streamed parameter belongs to one block alone; untie it"
                )
    seen: dict[int, StreamedBlock] = {}
    for block in blocks:
        for module in block.module.modules():
            other = seen.setdefault(id(module), block)
            if other is not block and next(module.parameters(), None) is not None:
                raise StreamError(f"{block.name} shares parameters with {other.name}: copy them, or stream neither")


def _refuse_moved(blocks: Sequence[StreamedBlock]) -> None:
    for block in blocks:
        for name, one in block.parameters.items():
            device = one.parameter.device
            if device.type != "cpu":
                next_step = "load it with real weights" if device.type == "meta" else "call model.cpu() first"
                raise StreamError(
                    f"{block.name}.{name} is on {device}: blocks are streamed from the host, and this model was "
                    f"moved already; {next_step}"
                )


def _refuse_overlapping(blocks: Sequence[StreamedBlock]) -> None:
    for block in blocks:
        for name, one in block.parameters.items():
            weight = one.parameter
            reach = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True)) + 1
            if weight.requires_grad and reach < weight.numel():
                raise StreamError(
                    f"{block.name}.{name}: its {weight.numel()} numbers share memory (expand()?), so they cannot be "
                    "trained each; make it contiguous, or freeze it"
                )


def _refuse_nothing(blocks: Sequence[StreamedBlock], train: Train) -> None:
    for block in blocks:
        if not block.parameters:
            if next(block.module.parameters(), None) is None:
                raise StreamError(f"{block.name} has no parameters; choose `blocks` that have")
            raise StreamError(
                f"{block.name} has nothing to stream: all its parameters require gradients. For adapters freeze the "
                "base (requires_grad_(False)); to train the weights themselves pass train='weights'; to only run "
                "the model pass train='nothing'"
            )
    trained = any(one.parameter.requires_grad for block in blocks for one in block.parameters.values())
    if train == "weights" and not trained:
        raise StreamError("train='weights', but no parameter of any block requires gradients")
