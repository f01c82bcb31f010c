"""Which tensors must have one format: those that runtimes fuse, the experts of a layer, and tied weights.

Tied weights are one tensor under two names, so they are together already. What a runtime fuses is what reads one input,
as the model's view has it (`bitplan.describe`); names decide alone where there is no view, by the table of families.
"""

from __future__ import annotations

from collections.abc import Iterable

from bitplan.plan.names import natural_order, split_layer
from bitplan.plan.structure.families import joined_name


def group_name(tensor: str, *, fused: bool = True) -> str:
    """The group of a tensor; `fused` False where the runtime takes q, k, v, gate and up one by one."""
    return joined_name(tensor, joined=fused)


def group_tensors(tensors: Iterable[str], *, fused: bool = True) -> dict[str, list[str]]:
    """Groups in natural order of their names."""
    groups: dict[str, list[str]] = {}
    for tensor in natural_order(tensors):
        groups.setdefault(group_name(tensor, fused=fused), []).append(tensor)
    return {name: groups[name] for name in natural_order(groups)}


def place_of(group: str) -> tuple[str, str]:
    """The layer's number and the projection, for a table of layer by projection; no number: '' and the name."""
    _, layer, after = split_layer(f"{group}.")
    if not layer:
        return "", group.rpartition(".")[2]
    return layer, after.strip(".").rpartition(".")[2]
