"""Which parameters a packed layer can hold: those of layers that do nothing else with them, and that alone read them.

Other subclasses of Linear and Embedding, attention's out_proj, TransformerEncoderLayer, experts of other gating, and
layers whose weight other code reads (the queries of DETR) keep their weights as they are.
"""

from __future__ import annotations

from torch import nn

from bitplan.base.errors import PlanError
from bitplan.plan.structure.describe import experts_of, is_product_alone, run_once, scale_of_rows
from bitplan.plan.structure.model_view import ExpertsUse
from bitplan.plan.structure.recognise import describe_step
from bitplan.plan.structure.untouched import examples_for

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def packed_kind(module: nn.Module, local: str) -> str | None:
    """The packed layer that holds this parameter of this layer; None where there is none."""
    if isinstance(module, nn.Embedding):
        return "QuantEmbedding" if local == "weight" and _is_table(module) else None
    if local == "weight" and is_product_alone(module):
        return "QuantLinear"
    experts = experts_of(module)
    is_known = experts is not None and local in experts.weights and _why_not_experts(experts) is None
    return "StackedExperts" if is_known else None


def _is_table(module: nn.Embedding) -> bool:
    """Whether an embedding looks rows up, and at most multiplies them by one factor."""
    if module.max_norm is not None:
        return False
    return type(module) is nn.Embedding or scale_of_rows(module) is not None


def why_not_packed(module: nn.Module, local: str, parent: nn.Module | None) -> str | None:
    """Why a parameter is not the weight of a layer that can be replaced."""
    if packed_kind(module, local) is None:
        parameter = f"the {local} of {article(type(module).__name__)}"
        could_be = isinstance(module, nn.Linear | nn.Embedding) and local == "weight"
        experts = experts_of(module)
        if experts is not None and module.get_parameter(local).ndim == 3:
            return f"{parameter}: {_why_not_experts(experts)}"
        base = "Linear" if isinstance(module, nn.Linear) else "Embedding"
        return f"{parameter}, whose forward is not {base}'s own" if could_be else parameter
    if parent is None:
        return "the model itself, which has no parent to replace it in (wrap it in nn.Sequential)"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "read by a TransformerEncoderLayer directly"
    if "forward" in module.__dict__ or any(getattr(module, hooks, None) for hooks in _HOOKS):
        name = type(module).__name__
        return f"the {local} of {article(name)} with hooks, which would be lost (remove them first)"
    return None


def why_not_packed_in(model: nn.Module, name: str) -> str | None:
    """Why a parameter of a model, by its name, is not the weight of a layer that can be replaced."""
    owner, _, local = name.rpartition(".")
    parent = model.get_submodule(owner.rpartition(".")[0]) if owner else None
    return why_not_packed(model.get_submodule(owner), local, parent)


def _why_not_experts(experts: ExpertsUse) -> str | None:
    """Why experts are not what QuantExperts computes: gpt-oss's gating, or silu(gate) * up with gate's rows first."""
    if experts.fault:
        return experts.fault
    if experts.activation == "gpt_oss" and experts.is_columns and experts.is_interleaved:
        return None
    if experts.is_columns and experts.is_interleaved:
        return "its gating is not gpt-oss's own, with alpha 1.702 and limit 7"
    if experts.is_columns or experts.is_interleaved:
        return "it keeps its experts transposed or interleaved: rows are not outputs"
    if experts.gate_up_bias is not None or experts.down_bias is not None:
        return "its experts have biases"
    return None if experts.activation == "silu" else f"it joins gate and up by {experts.activation}, not by silu"


def weights_read_outside(model: nn.Module) -> dict[str, str]:
    """Say of weights that code outside of their layers reads where it does, as a run shows; none where none goes."""
    for args, kwargs in examples_for(model):
        try:
            recording = run_once(model, args, kwargs)
        except PlanError:
            continue
        readers: dict[str, str] = {}
        for step in recording.steps:
            for value in (recording.values[index] for index in step.inputs):
                if value.is_parameter and step.module not in {name.rpartition(".")[0] for name in value.names}:
                    reader = f"read by the model's own code ({describe_step(step)}), not through its layer"
                    readers |= dict.fromkeys(value.names, reader)
        return readers
    return {}


def article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
