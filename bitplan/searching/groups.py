"""Which tensors must have one format: those that runtimes fuse, the experts of a layer, and tied weights.

Tied weights are one tensor under two names, so they are together already. Names are Hugging Face's, GGUF's or torch's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bitplan.plan.names import natural_order, split_layer, without_expert

# The last part of a module's name -> the part that runtimes fuse it with.
_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "attn_q": "qkv",
    "attn_k": "qkv",
    "attn_v": "qkv",
    "query": "qkv",
    "key": "qkv",
    "value": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "ffn_gate": "gate_up",
    "ffn_up": "gate_up",
    "ffn_gate_exps": "gate_up_exps",
    "ffn_up_exps": "gate_up_exps",
    "w1": "gate_up",
    "w3": "gate_up",
}
_ITEM = re.compile(r"\[[0-9]+\]$")  # of a tensor that has all experts


def group_name(tensor: str, *, fused: bool = True) -> str:
    """The group of a tensor; `fused` False where the runtime takes q, k, v, gate and up one by one."""
    module = without_expert(_ITEM.sub("", tensor).removesuffix(".weight"))
    parent, _, last = module.rpartition(".")
    last = _FUSED.get(last, last) if fused else last
    return f"{parent}.{last}" if parent else last


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
