"""Finds the blocks of a model, says which of their parameters are streamed and how these lie in memory, and names what
cannot work.

A block's parameters are streamed or resident. Streamed ones live on the host and pass through slots: the frozen base,
or with train="weights" all of them. Trained adapters are resident, as is everything outside of blocks.

A `BlockLayout` says where each parameter of a block lies, in its format, in one flat byte buffer. A block crosses the
bus in one copy, so all its tensors lie in one buffer, the same on the host and in a slot of the device. A layout is a
pure function of shapes, types and formats:

    | q.weight data | q.weight scales | k.weight data | ... | norm.weight data |      every offset a multiple of 256

On the device a parameter is read in its own type. Where the format is that type, the parameter is a view of the slot
and nothing is computed; else it is decoded into a scratch buffer, which has a layout of its own (only the decoded
parameters). If nearly all of a block is decoded, the rest (norms, biases) is copied into the scratch as well, and the
slot is free for another block while this one computes. Both layouts are fixed between step boundaries: a byte offset
names a number wherever the block lies.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from bitplan.base.errors import StreamError, did_you_mean
from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode, explain_decode
from bitplan.formats.format import Format
from bitplan.packed.packed_weight import PackedWeight
from bitplan.plan.names import listed

Train = Literal["nothing", "adapters", "weights"]
STREAMED = "_bitplan_streamed"


@dataclass(eq=False)
class StreamedParameter:
    """A parameter (the new one, if the user replaces it), and each module of its block that has it, by which name."""

    name: str
    parameter: nn.Parameter
    uses: tuple[tuple[nn.Module, str], ...]

    @property
    def spec(self) -> ParameterSpec:
        return ParameterSpec(tuple(self.parameter.shape), self.parameter.dtype)

    def put_back(self) -> None:
        """Put the Parameter back into its modules, where Ctrl-C left the streamed tensor in its place."""
        for module, local in self.uses:
            current = module._parameters.get(local)
            if isinstance(current, Tensor) and not isinstance(current, nn.Parameter):
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
        """Every streamed parameter, those that a router chooses included."""
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
                f"{name} holds a recurrent layer, which keeps a list of its weights beside its parameters; "
                "stream other blocks"
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
    uses_by_id: dict[int, list[tuple[str, nn.Module, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for path, module in block.named_modules():
        for local, parameter in module._parameters.items():
            if parameter is not None and not (train == "adapters" and parameter.requires_grad):
                uses_by_id.setdefault(id(parameter), []).append((f"{path}.{local}".lstrip("."), module, local))
                parameters[id(parameter)] = parameter
    return {
        uses[0][0]: StreamedParameter(uses[0][0], parameters[key], tuple(use[1:] for use in uses))
        for key, uses in uses_by_id.items()
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
    owners: dict[int, StreamedBlock] = {}
    for block in blocks:
        for module in block.module.modules():
            other = owners.setdefault(id(module), block)
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
        raise StreamError("train='weights', but no block's parameter is trained; call requires_grad_()")


# ---- a block's bytes -------------------------------------------------------------------------------------------------


ALIGNMENT = 256  # of every part, as in CUDA's allocator; vector loads need it
PADDING = "padding"
COPIED_SHARE = 1 / 16  # of a block's bytes, at most, are copied into the scratch in their own type


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter's shape and type in the model."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """One part of an Encoded (codes, scales, ...) in the buffer."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Piece:
    """Where a parameter lies in a block's bytes, in which format, and where its decoded numbers go (None: in place)."""

    name: str
    spec: ParameterSpec
    fmt: Format
    parts: Mapping[str, Part]
    decoded: Part | None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def is_own_type(self) -> bool:
        """Whether the bytes that are sent are the parameter's own."""
        return _is_own_type(self.fmt, self.spec)

    def encoded(self, buffer: Tensor) -> Encoded:
        """The parameter's encoding, as views of the buffer that holds its block."""
        return Encoded(self.fmt, self.spec.shape, **{name: part.view(buffer) for name, part in self.parts.items()})

    def write(self, buffer: Tensor, encoded: Encoded) -> None:
        """Put an encoded parameter where it belongs."""
        for name, tensor in encoded.parts.items():
            self.parts[name].view(buffer).copy_(tensor)

    def weight(self, slot: Tensor, scratch: Tensor) -> Tensor:
        """The parameter in its own type: in the slot, or in the scratch, where `decode_into` has put it."""
        return self.parts["data"].view(slot) if self.decoded is None else self.decoded.view(scratch)

    def has_kernel(self, slot: Tensor) -> bool:
        """Whether one Triton kernel decodes the parameter."""
        return slot.is_cuda and explain_decode(self.encoded(slot), self.spec.dtype).implementation == "triton"

    def decode_into(self, slot: Tensor, scratch: Tensor) -> None:
        """Expand the parameter into the scratch; on CUDA by Triton, on the current stream, without waiting."""
        if self.decoded is None:
            return
        target = self.decoded.view(scratch)
        if self.fmt.is_cast:
            target.copy_(self.parts["data"].view(slot))
            return
        encoded = self.encoded(slot)
        if self.has_kernel(slot):
            from bitplan.formats.triton_codec import DECODERS  # loads Triton

            DECODERS[self.fmt.name](encoded, self.spec.dtype, out=target)
        else:
            target.copy_(decode(encoded, self.spec.dtype))


@dataclass(frozen=True)
class BlockLayout:
    """Where each parameter of one block lies; a transfer of the block copies `nbytes`."""

    pieces: Mapping[str, Piece]
    nbytes: int
    scratch_nbytes: int

    @cached_property
    def bytes_by_format(self) -> dict[str, int]:
        """Bytes by format; gaps between parts count as padding, so that the sum is `nbytes`."""
        sizes: Counter[str] = Counter()
        for piece in self.pieces.values():
            sizes[piece.fmt.name] += piece.nbytes
        sizes[PADDING] = self.nbytes - sizes.total()
        return {name: nbytes for name, nbytes in sizes.items() if nbytes}

    @cached_property
    def leaves_slot(self) -> bool:
        """Whether the slot is no longer read once the block is decoded."""
        return all(piece.decoded is not None for piece in self.pieces.values())

    @property
    def formats(self) -> dict[str, str]:
        return {name: piece.fmt.name for name, piece in self.pieces.items()}

    def has_kernels(self, slot: Tensor) -> bool:
        """Whether decoding is copies and Triton kernels alone."""
        packed = [one for one in self.pieces.values() if one.decoded is not None and not one.fmt.is_cast]
        return all(one.has_kernel(slot) for one in packed)

    def decode_into(self, slot: Tensor, scratch: Tensor) -> None:
        for piece in self.pieces.values():
            piece.decode_into(slot, scratch)


def lay_out(specs: Mapping[str, ParameterSpec], formats: Mapping[str, Format]) -> BlockLayout:
    """The layout of parameters in these formats, in the order of `specs`."""
    in_own_type = {name for name, spec in specs.items() if _is_own_type(formats[name], spec)}
    nbytes = sum(formats[name].nbytes(spec.shape) for name, spec in specs.items())
    if sum(specs[name].nbytes for name in in_own_type) <= COPIED_SHARE * nbytes:
        in_own_type = set()
    pieces, end, scratch_end = {}, 0, 0
    for name, spec in specs.items():
        fmt, parts = formats[name], {}
        for part_name, (dtype, shape) in fmt.part_shapes(spec.shape).items():
            parts[part_name] = Part(aligned(end), dtype, shape)
            end = parts[part_name].offset + parts[part_name].nbytes
        decoded = None
        if name not in in_own_type:
            decoded = Part(aligned(scratch_end), spec.dtype, spec.shape)
            scratch_end = decoded.offset + decoded.nbytes
        pieces[name] = Piece(name, spec, fmt, parts, decoded)
    return BlockLayout(pieces, aligned(end), aligned(scratch_end))


def _is_own_type(fmt: Format, spec: ParameterSpec) -> bool:
    return fmt.is_cast and fmt.storage == spec.dtype


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
