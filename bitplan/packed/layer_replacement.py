"""The packed layer that takes a layer's place; `plan.structure.packable` says which layers can be packed.

| layer | becomes |
|---|---|
| nn.Linear, and layers whose own run was seen to be W x + bias alone (Falcon's) | QuantLinear |
| those seen to be x W + bias, with W [inputs, outputs] (GPT-2's Conv1D): packed as [outputs, inputs] | QuantLinear |
| nn.Embedding, and transformers' that multiplies its rows | QuantEmbedding |
| experts [experts, outputs, inputs] of one module that was seen to be a sum of down(silu(gate) * up) | StackedExperts |
| those of gpt-oss's gating, [experts, inputs, outputs]: packed as [experts, outputs, inputs] | StackedExperts |

Blocks of a packed weight lie along the inputs of its product, so a weight that lies transposed is turned when it is
packed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.products.decode_row_slices import why_no_rows
from bitplan.packed.quant_embedding import QuantEmbedding
from bitplan.packed.quant_experts import QuantExperts
from bitplan.packed.quant_linear import QuantLinear
from bitplan.packed.tile_cache import TileCache
from bitplan.plan.structure.describe import experts_of, multiplies_transposed, scale_of_rows
from bitplan.plan.structure.model_view import transposed_shape
from bitplan.plan.structure.packable import packed_kind
from bitplan.plan.structure.parameters import NamedParameter


class StackedExperts(QuantExperts):
    """QuantExperts with the names that weights and biases have in the module whose place it takes."""

    def __init__(self, gate_up: PackedWeight, down: PackedWeight, names: Mapping[str, str], **options: Any) -> None:
        super().__init__(gate_up, down, **options)
        self._their_names = dict(names)
        for ours, theirs in names.items():
            for members in (self._modules, self._parameters):
                if ours in members:
                    members[theirs] = members.pop(ours)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        members = self.__dict__
        theirs = members.get("_their_names", {}).get(name, name)
        is_renamed = theirs in members.get("_modules", ()) or theirs in members.get("_parameters", ())
        return super().__getattr__(theirs if is_renamed else name)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights)


def are_columns(module: nn.Module, local: str) -> bool:
    """Whether a parameter is a matrix [inputs, outputs], or experts of such, which is packed as its transpose."""
    return multiplies_transposed(module, local) and packed_kind(module, local) is not None


def stack_of(module: nn.Module, part: Literal["gate_up", "down"]) -> str:
    """The name of one of the two stacks of experts that a module holds; empty where it holds none."""
    experts = experts_of(module)
    return "" if experts is None else experts.gate_up if part == "gate_up" else experts.down


def packed_shape(module: nn.Module, local: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under which a parameter is packed, with outputs as rows."""
    return transposed_shape(shape) if are_columns(module, local) else shape


def with_output_rows(named: NamedParameter) -> Tensor:
    """A parameter's numbers with outputs as rows, as they are packed."""
    numbers: Tensor = named.parameter
    return numbers.detach().mT.contiguous() if are_columns(named.module, named.local) else numbers


def lacking(module: nn.Module, packed: set[str]) -> list[str]:
    """Parameters of a layer that must be packed together with these, and are not."""
    experts = experts_of(module)
    stacks = () if experts is None else experts.weights
    return [name for name in stacks if name not in packed] if packed & set(stacks) else []


def format_fault(weight_format: Any) -> str | None:
    """Why a packed layer cannot hold a format."""
    no_rows = why_no_rows(weight_format)
    return None if no_rows is None else f"{no_rows}; a packed layer needs another format, such as mxfp4 or int8_row"


def packed_layer(
    module: nn.Module,
    weights: Mapping[str, PackedWeight],
    *,
    plain: Mapping[str, nn.Parameter | None],
    dtype: torch.dtype,
    name: str,
    strategy: str,
    cache: TileCache | None,
) -> nn.Module:
    """The packed layer in the place of this one, over these weights.

    plain   the layer's own parameters, of which biases stay as they are
    dtype   type of an embedding's output
    """
    layer: nn.Module
    for local, weight in weights.items():
        weight.name = weight.name or f"{name}.{local}"
    if isinstance(module, nn.Embedding):
        scale = None if type(module) is nn.Embedding else scale_of_rows(module)
        layer = QuantEmbedding(weights["weight"], dtype=dtype, padding_idx=module.padding_idx, scale=scale, name=name)
    elif (experts := experts_of(module)) is None:
        layer = QuantLinear(weights["weight"], plain.get("bias"), strategy=strategy, cache=cache, name=name)
    else:
        names = {
            "gate_up": experts.gate_up,
            "down": experts.down,
            "gate_up_bias": experts.gate_up_bias,
            "down_bias": experts.down_bias,
        }
        layer = StackedExperts(
            weights[experts.gate_up],
            weights[experts.down],
            {ours: theirs for ours, theirs in names.items() if theirs is not None},
            gate_up_bias=plain.get(experts.gate_up_bias or ""),
            down_bias=plain.get(experts.down_bias or ""),
            activation="gpt_oss" if experts.activation == "gpt_oss" else "swiglu",
            strategy=strategy,
            cache=cache,
            name=name,
        )
    layer.__dict__["replaced"] = _without_numbers(module)  # no child: it is neither saved nor moved
    return layer.train(module.training)


def _without_numbers(module: nn.Module) -> nn.Module:
    """A copy of a layer whose parameters lie on meta."""
    twin = copy.copy(module)
    twin._parameters = {
        name: None if one is None else nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
        for name, one in module._parameters.items()
    }
    return twin


def replaced_layer(layer: nn.Module) -> nn.Module | None:
    """A copy, without numbers, of the layer whose place a packed one took; None where it was packed by itself."""
    replaced = layer.__dict__.get("replaced")
    return None if replaced is None else _without_numbers(replaced)
