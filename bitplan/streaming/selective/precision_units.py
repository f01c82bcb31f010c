"""PrecisionUnits: the units that selective precision decides on, with their weights, bytes and gradients in a stream.

A unit is a block, or with granularity "layer" one matrix of a block (`block.layer`, without a final `.weight`). Vectors
(norms, biases) belong to no unit and keep their own type. A unit's gradients are those of its trained parameters: the
streamed weights themselves, or the adapters. An adapter belongs to the layer whose name has the longest beginning in
common with its own: `q_proj.lora_A.default.weight` to `q_proj.base_layer`.

"bf16" is bfloat16, except for float16 weights, which are sent as they are: as many bytes, and nothing is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from bitplan.base.errors import FormatError
from bitplan.formats import get_format
from bitplan.formats.codec import check_whole_blocks
from bitplan.formats.format import Format
from bitplan.plan.structure.describe import product_of
from bitplan.streaming.find_blocks import StreamedBlock, StreamedParameter, lay_out
from bitplan.streaming.selective.config import PRECISIONS, SelectiveError, SelectivePrecisionConfig
from bitplan.streaming.selective.state import layout_of

if TYPE_CHECKING:
    from bitplan.streaming.block_stream import BlockStream


class Weight(NamedTuple):
    """A streamed matrix, its unit, and its layer's name."""

    unit: str
    layer: str
    block: StreamedBlock
    one: StreamedParameter

    @property
    def full_name(self) -> str:
        return f"{self.block.name}.{self.one.name}"

    @property
    def dtype(self) -> torch.dtype:
        return self.one.parameter.dtype


@dataclass(frozen=True)
class MatrixUse:
    """A module that computes y = W x + something, where W is a streamed matrix."""

    weight: Weight
    module: nn.Module
    local: str


class PrecisionUnits:
    """The units (blocks or layers) of a stream whose precision is decided, by one config."""

    def __init__(self, stream: BlockStream, config: SelectivePrecisionConfig) -> None:
        self.stream, self.config = stream, config
        self.weights = list(_weights(stream, config.granularity))
        if not self.weights:
            raise SelectiveError("the streamed blocks hold no matrix: there is no precision to decide on")
        self.names = list(dict.fromkeys(weight.unit for weight in self.weights))
        _check_whole(self.weights, config)
        layers = [f"{weight.block.name}.{weight.layer}" for weight in self.weights]
        config.require_blocks([*self.names, *layers] if config.granularity == "layer" else self.names)

    # ---- formats and bytes -------------------------------------------------------------------------------------------

    def formats(self, precisions: Mapping[str, str]) -> dict[str, str]:
        """The format of every matrix of these units, by full name, as `set_formats` takes them."""
        return {
            one.full_name: high_or_low(self.config, precisions[one.unit], one.dtype)
            for one in self.weights
            if one.unit in precisions
        }

    def unit_bytes(self) -> dict[str, dict[str, int]]:
        """Unit -> precision -> bytes sent: for a block all its bytes, with padding; for a layer its own parts."""
        sizes: dict[str, dict[str, int]] = {name: {} for name in self.names}
        for precision in PRECISIONS:
            for block in self.stream.blocks:
                layout = lay_out(block.specs, self._block_formats(block, precision))
                for weight in self.weights:
                    if weight.block is block:
                        by_block = self.config.granularity == "block"
                        nbytes = layout.nbytes if by_block else layout.pieces[weight.one.name].nbytes
                        sizes[weight.unit][precision] = nbytes
        return sizes

    def layout(self) -> dict[str, str]:
        """A fingerprint of every unit, for its state file."""
        rows: dict[str, list[tuple[str, tuple[int, ...], str]]] = {name: [] for name in self.names}
        for weight in self.weights:
            kind = str(weight.dtype).removeprefix("torch.")
            rows[weight.unit].append((weight.one.name, tuple(weight.one.parameter.shape), kind))
        return layout_of(rows)

    def _block_formats(self, block: StreamedBlock, precision: str) -> dict[str, Format]:
        formats = {}
        for name, one in block.parameters.items():
            own_type = str(one.parameter.dtype).removeprefix("torch.")
            is_matrix = one.parameter.ndim >= 2
            formats[name] = get_format(
                high_or_low(self.config, precision, one.parameter.dtype) if is_matrix else own_type
            )
        return formats

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def adapters(self) -> dict[str, list[nn.Parameter]]:
        """Unit -> its trained parameters on the device."""
        adapters: dict[str, list[nn.Parameter]] = {name: [] for name in self.names}
        for block in self.stream.blocks:
            streamed = {id(one.parameter) for one in block.parameters.values()}
            for path, parameter in block.module.named_parameters():
                if parameter.requires_grad and id(parameter) not in streamed:
                    for unit in self._units_near(block, path):
                        adapters[unit].append(parameter)
        return adapters

    def _units_near(self, block: StreamedBlock, path: str) -> list[str]:
        mine = [weight for weight in self.weights if weight.block is block]
        if self.config.granularity == "block":
            return [block.name] if mine else []
        shared = {weight.unit: _shared_parts(weight.one.name, path) for weight in mine}
        longest = max(shared.values(), default=0)
        return [unit for unit, length in shared.items() if length == longest and longest]

    def trained_uses(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield unit, module and local name of every use of a streamed parameter that is trained on the host."""
        for block in self.stream.blocks:
            for name, one in block.parameters.items():
                unit = next((weight.unit for weight in self.weights if weight.block is block and weight.one is one), "")
                if not unit and self.config.granularity == "block":  # a vector of the block
                    unit = block.name if block.name in self.names else ""
                if unit and self.stream.training is not None and self.stream.training.trains(block.name, name):
                    for module, local in one.uses:
                        yield unit, module, local

    def linear_uses(self) -> tuple[list[MatrixUse], dict[str, str]]:
        """The modules that multiply a weight with an input; and weight -> reason where this cannot be observed."""
        uses, unseen = [], {}
        holders = Counter(id(module) for weight in self.weights for module, _ in weight.one.uses)
        for weight in self.weights:
            why = _why_not_linear(weight, holders)
            if why:
                unseen[weight.full_name] = why
            else:
                uses += [MatrixUse(weight, module, local) for module, local in weight.one.uses]
        return uses, unseen

    def truth(self, weight: Weight) -> Tensor:
        """The weight on the host as a high-precision block would send it, whatever its present format."""
        source = self.stream.truth_of(weight.block.name, weight.one.name)
        high = get_format(high_or_low(self.config, "bf16", weight.dtype)).storage
        return source.to(high).to(weight.dtype)


def high_or_low(config: SelectivePrecisionConfig, precision: str, dtype: torch.dtype) -> str:
    """The format that a precision of the config means for a weight of this type."""
    return "float16" if precision == "bf16" and dtype == torch.float16 else config.format_of(precision)


def _weights(stream: BlockStream, granularity: str) -> Iterator[Weight]:
    for block in stream.blocks:
        for name, one in block.parameters.items():
            if one.parameter.ndim >= 2:
                layer = name.removesuffix(".weight")
                yield Weight(block.name if granularity == "block" else f"{block.name}.{layer}", layer, block, one)


def _check_whole(weights: list[Weight], config: SelectivePrecisionConfig) -> None:
    """Refuse a format that cannot hold a matrix before training, not at the first switch."""
    fmt = get_format(config.int8_format)
    for weight in weights:
        try:
            check_whole_blocks(fmt, tuple(weight.one.parameter.shape), None, weight.full_name)
        except FormatError as error:
            raise SelectiveError(f"int8_format {fmt.name} does not fit this model: {error}") from None


def _why_not_linear(weight: Weight, holders: Mapping[int, int]) -> str:
    parameter = weight.one.parameter
    if parameter.ndim != 2:
        return f"it has {parameter.ndim} axes"
    for module, _ in weight.one.uses:
        if module is weight.block.module:
            return "the block itself holds it; put the layer into a module of its own"
        product = product_of(module)
        is_turned = product is not None and product.is_columns  # y = x W: if square, its shape is a linear layer's
        if is_turned or isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return f"a {type(module).__name__} does not compute W x"
        if holders[id(module)] > 1:
            return f"its module, a {type(module).__name__}, holds {holders[id(module)]} streamed matrices"
    return ""


def _shared_parts(one: str, two: str) -> int:
    """How many leading parts of two dotted names are the same, without the last, which names the parameter."""
    count = 0
    for mine, theirs in zip(one.split(".")[:-1], two.split(".")[:-1], strict=False):
        if mine != theirs:
            break
        count += 1
    return count
