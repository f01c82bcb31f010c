"""Which tensors must have one format: those that runtimes fuse, the experts of a layer, and tied weights.

Tied weights are one tensor under two names, so they are together already. What a runtime fuses is what reads one input,
as the model's view has it (`bitplan.describe`); names decide alone where there is no view, by the table of families.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bitplan.plan.names import natural_order, split_layer
from bitplan.plan.structure.families import joined_name
from bitplan.plan.structure.model_view import ModelView


def group_name(tensor: str, *, fused: bool = True) -> str:
    """The group of a tensor; `fused` False where the runtime takes q, k, v, gate and up one by one."""
    return joined_name(tensor, joined=fused)


def group_tensors(
    tensors: Iterable[str], *, fused: bool = True, seen: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Groups in natural order of their names; `seen` has those of tensors that a view knows (`groups_seen`)."""
    groups: dict[str, list[str]] = {}
    for tensor in natural_order(tensors):
        known = seen.get(tensor) if seen is not None and fused else None
        groups.setdefault(known or group_name(tensor, fused=fused), []).append(tensor)
    return {name: groups[name] for name in natural_order(groups)}


def groups_seen(view: ModelView, names: Mapping[str, str]) -> dict[str, str]:
    """The group of every projection that a view saw, by the file's names; `names` maps those to parameters.

    Projections of one input that runtimes fuse share a group, whatever they are called; others are alone.
    """
    file_name = {parameter: name for name, parameter in names.items()}
    groups = {}
    for linear in view.linears:
        name = file_name.get(linear.weight)
        if name is not None and not linear.experts:
            groups[name] = name.removesuffix(".weight")
    for weights in view.joined:
        members = [file_name[weight] for weight in weights if weight in file_name]
        if len(members) > 1:
            word = "gate_up" if view.role(weights[0]) in ("gate", "up") else "qkv"
            together = ".".join([*_shared_parts(members), word])
            groups |= dict.fromkeys(members, together)
    return groups


def _shared_parts(names: Sequence[str]) -> list[str]:
    """The leading parts that dotted names have in common."""
    shared = []
    for parts in zip(*(name.removesuffix(".weight").split(".") for name in names), strict=False):
        if len({*parts}) > 1:
            break
        shared.append(parts[0])
    return shared


def place_of(group: str) -> tuple[str, str]:
    """The layer's number and the projection, for a table of layer by projection; no number: '' and the name."""
    _, layer, after = split_layer(f"{group}.")
    if not layer:
        return "", group.rpartition(".")[2]
    return layer, after.strip(".").rpartition(".")[2]
