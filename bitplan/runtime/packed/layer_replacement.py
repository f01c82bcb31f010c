"""Which layers can hold packed weights, and the packed layer that takes a layer's place.

| layer | becomes |
|---|---|
| nn.Linear, and subclasses whose own forward computes the same (Falcon's) | QuantLinear |
| nn.Embedding, and transformers' that multiplies its rows | QuantEmbedding |
| experts of transformers, stacked as `gate_up_proj` and `down_proj` [experts, outputs, inputs] | StackedExperts |
| those of gpt-oss, [experts, inputs, outputs] with biases: packed as [experts, outputs, inputs] | StackedExperts |

Layers whose weight other code reads cannot be packed: other subclasses of Linear and Embedding, attention's out_proj,
TransformerEncoderLayer. Nor can transformers' Conv1D: its matrix is transposed, so that blocks along its last axis
would mix outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.kernels.matmul.decode_row_slices import why_no_rows
from bitplan.plan.structure.describe import product_of
from bitplan.runtime.packed.quant_embedding import QuantEmbedding
from bitplan.runtime.packed.quant_experts import QuantExperts
from bitplan.runtime.packed.quant_linear import QuantLinear
from bitplan.runtime.packed.tile_cache import TileCache
from bitplan.runtime.packed_weight import PackedWeight
from bitplan.store.models.morph import ParameterPlace

EXPERTS = ("gate_up_proj", "down_proj")
BIASES = tuple(f"{name}_bias" for name in EXPERTS)
_THEIR_NAMES = dict(zip(("gate_up", "down", "gate_up_bias", "down_bias"), (*EXPERTS, *BIASES), strict=True))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class StackedExperts(QuantExperts):
    """QuantExperts with the names and the signature of transformers' stacked experts (Mixtral, Qwen, gpt-oss, ...)."""

    def __init__(self, gate_up: PackedWeight, down: PackedWeight, **options: Any) -> None:
        super().__init__(gate_up, down, **options)
        for own, theirs in _THEIR_NAMES.items():
            for held in (self._modules, self._parameters):
                if own in held:
                    held[theirs] = held.pop(own)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        theirs, held = _THEIR_NAMES.get(name, name), self.__dict__
        is_renamed = theirs in held.get("_modules", ()) or theirs in held.get("_parameters", ())
        return super().__getattr__(theirs if is_renamed else name)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights)


def packed_kind(module: nn.Module, local: str) -> str | None:
    """The packed layer that holds this parameter of this layer; None where there is none."""
    if local == "weight" and _is_linear(module):
        return "QuantLinear"
    if local == "weight" and _is_table(module):
        return "QuantEmbedding"
    return "StackedExperts" if local in EXPERTS and _why_not_experts(module) is None else None


def _is_linear(module: nn.Module) -> bool:
    """A layer whose forward is W x + bias and nothing else; a subclass must say so itself, for other code reads the
    weight of those that only have another name (attention's out_proj).
    """
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    if type(module).forward is nn.Linear.forward:
        return False
    product = product_of(module)
    return product is not None and not product.is_columns


def _is_table(module: nn.Module) -> bool:
    """An embedding that looks rows up, and at most multiplies them by one factor."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    return type(module) is nn.Embedding or type(module).__name__.endswith("ScaledWordEmbedding")


def _embedding_scale(module: Any) -> float | None:
    """The factor of transformers' scaled embeddings, from the float, since the buffer may lie on meta."""
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    return None if scale is None else float(scale)


def why_not_packed(module: nn.Module, local: str, parent: nn.Module | None) -> str | None:
    """Why a parameter is not the weight of a layer that can be replaced."""
    if packed_kind(module, local) is None:
        what = f"the {local} of {article(type(module).__name__)}"
        known = isinstance(module, nn.Linear | nn.Embedding) and local == "weight"
        if local in EXPERTS and hasattr(module, EXPERTS[0]):
            return f"{what}, {_why_not_experts(module)}"
        return f"{what}, whose forward is not {_base_name(module)}'s own" if known else what
    if parent is None:
        return "the model itself, which has no parent to replace it in (wrap it in nn.Sequential)"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "read by a TransformerEncoderLayer directly"
    if "forward" in module.__dict__ or any(getattr(module, hooks, None) for hooks in _HOOKS):
        name = type(module).__name__
        return f"the {local} of {article(name)} with hooks, which would be lost (remove them first)"
    return None


def _base_name(module: nn.Module) -> str:
    return "Linear" if isinstance(module, nn.Linear) else "Embedding"


def _why_not_experts(module: nn.Module) -> str | None:
    """Why a module is not stacked experts that QuantExperts computes: those of gpt-oss, or two matrices each, joined by
    silu(gate) * up.
    """
    said: Any = module
    if is_transposed(module) and set(module._parameters) == {*EXPERTS, *BIASES}:
        return None
    if set(module._parameters) != set(EXPERTS) or not hasattr(module, "is_transposed"):
        return "which holds other weights than the gate_up_proj and down_proj of experts"
    if said.is_transposed or not said.is_concatenated:
        return "which keeps its experts transposed or interleaved: rows are not outputs"
    if said.has_bias or not said.has_gate or getattr(module, "has_post_expert_norm", False):
        return "whose experts have biases, norms, or no gate"
    activation = type(getattr(module, "act_fn", None)).__name__
    if activation not in ("SiLU", "SiLUActivation") or _gate_of(module) != "_default_apply_gate":
        return f"whose experts are joined by something else than silu(gate) * up ({activation})"
    return None


def _gate_of(module: nn.Module) -> str:
    return getattr(getattr(type(module), "_apply_gate", None), "__name__", "")


def is_transposed(module: nn.Module) -> bool:
    """Whether experts lie as [experts, inputs, outputs] in a module; packed they are [experts, outputs, inputs]."""
    return type(module).__name__ == "GptOssExperts" and bool(getattr(module, "is_transposed", False))


def packed_shape(module: nn.Module, local: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a parameter is packed: rows are outputs."""
    return (shape[0], shape[2], shape[1]) if local in EXPERTS and is_transposed(module) else shape


def with_output_rows(place: ParameterPlace) -> Tensor:
    """The numbers of a parameter as they are packed."""
    numbers: Tensor = place.parameter
    is_turned = place.local in EXPERTS and is_transposed(place.module)
    return numbers.detach().transpose(1, 2).contiguous() if is_turned else numbers


def lacking(packed: set[str]) -> list[str]:
    """Parameters of a layer that must be packed together with these, and are not."""
    return [name for name in EXPERTS if name not in packed] if packed & set(EXPERTS) else []


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
    made: nn.Module
    if isinstance(module, nn.Embedding):
        scale = _embedding_scale(module)
        made = QuantEmbedding(weights["weight"], dtype=dtype, padding_idx=module.padding_idx, scale=scale, name=name)
    elif isinstance(module, nn.Linear):
        made = QuantLinear(weights["weight"], plain.get("bias"), strategy=strategy, cache=cache, name=name)
    else:
        made = StackedExperts(
            *(weights[local] for local in EXPERTS),
            **_joined_by(module, plain),
            strategy=strategy,
            cache=cache,
            name=name,
        )
    return made.train(module.training)


def _joined_by(module: Any, plain: Mapping[str, nn.Parameter | None]) -> dict[str, Any]:
    """How gate and up of experts become one."""
    if not is_transposed(module):
        return {"activation": "swiglu"}
    gate_up_bias, down_bias = (plain.get(name) for name in BIASES)
    return {
        "activation": "gpt_oss",
        "alpha": float(module.alpha),
        "limit": float(module.limit),
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }


def article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
