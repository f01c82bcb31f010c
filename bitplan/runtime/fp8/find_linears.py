"""Finds where FP8 may go in a model: its linear layers, by the kinds and names of policies.

Layers are recognised by module names, as in Hugging Face's llama, mistral, qwen, mixtral and deepseek classes and often
in Megatron and plain PyTorch code. Nothing is guessed: a linear whose name is in no table is left as it is, and listed.

    qkv      q_proj, k_proj, v_proj together (or qkv_proj, ...)      layernorm_column, column where the norm stays apart
    proj     o_proj, ...                                             row
    fc1      gate_proj and up_proj together (or fc1, ...)            layernorm_column; column in a shared expert
    fc2      down_proj, ...                                          row
    MLA      q_a_proj, kv_a_proj_with_mqa                            duplicated q_down_proj, kv_down_proj
             q_b_proj, kv_b_proj                                     layernorm_column q_up_proj, kv_up_proj
             q_proj beside kv_a_proj_with_mqa                        column q_proj
    experts  a module with gate_up_proj and down_proj of rank 3      column_grouped fc1 and row_grouped fc2

A linear that peft has wrapped (its `base_layer`) is found under its own name: the base becomes FP8, the adapter stays.

Projections that read the same input are ONE site, since one product of the fused weights was measured. A norm belongs
to a site if nothing else reads its output, which is known only for the block classes listed here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.plan.fp8.policy import Question

_FUSED = {
    ("q_proj", "k_proj", "v_proj"): "qkv",
    ("wq", "wk", "wv"): "qkv",
    ("gate_proj", "up_proj"): "fc1",
    ("w1", "w3"): "fc1",
}
_SINGLE = {
    "qkv": ("qkv_proj", "qkv", "wqkv", "Wqkv", "query_key_value", "linear_qkv"),
    "proj": ("o_proj", "out_proj", "wo", "proj", "linear_proj"),
    "fc1": ("gate_up_proj", "fc1", "linear_fc1", "dense_h_to_4h", "up_proj", "w1"),
    "fc2": ("down_proj", "fc2", "linear_fc2", "dense_4h_to_h", "w2"),
}
_LATENT = {
    "q_a_proj": "q_down_proj",
    "kv_a_proj_with_mqa": "kv_down_proj",
    "q_b_proj": "q_up_proj",
    "kv_b_proj": "kv_up_proj",
    "q_proj": "q_proj",
}
_NAME_OF = {word: name for name, words in _SINGLE.items() for word in words}
_KIND_OF = {
    "qkv": "layernorm_column",
    "proj": "row",
    "fc1": "layernorm_column",
    "fc2": "row",
    "q_down_proj": "duplicated",
    "kv_down_proj": "duplicated",
    "q_up_proj": "layernorm_column",
    "kv_up_proj": "layernorm_column",
    "q_proj": "column",
}
# Blocks in which only q, k and v read input_layernorm's output, and only the MLP's gate and up, if there is a dense
# MLP, read post_attention_layernorm's.
_BLOCKS = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe", "DeepseekV2", "DeepseekV3")
_BLOCK_NORMS = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
_LATENT_NORMS = {"q_up_proj": "q_a_layernorm", "kv_up_proj": "kv_a_layernorm"}
_VISION = ("visual", "vision_tower", "vision_model", "image_encoder", "vit")
_SHARED = ("shared_expert", "shared_experts")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BASE = "base_layer"
_GATING = "_default_apply_gate"  # transformers' own
_EXPERT_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_NEVER = ("lm_head", "router", "merger", "projector", "multi_modal_projector", "embed_tokens", "shared_expert_gate")


@dataclass(frozen=True)
class Site:
    """One layer as a policy knows it, and the modules that make it up. `obstacle` says why it cannot be replaced."""

    path: str
    part: str
    kind: str
    name: str
    shape: tuple[int, int]
    modules: tuple[str, ...]
    norm: str | None = None
    num_gemms: int | None = None
    moe_router_topk: int | None = None
    obstacle: str | None = None

    @property
    def is_grouped(self) -> bool:
        return self.num_gemms is not None

    def question(self, tokens: int | None, **more: Any) -> Question:
        """The question to a policy about this layer."""
        own: dict[str, Any] = {"name": self.name, "num_gemms": self.num_gemms, "moe_router_topk": self.moe_router_topk}
        return Question(self.kind, tokens, shape=self.shape, part=self.part, **own, **more)


@dataclass(frozen=True)
class Sites:
    """The sites of a model in its own order, and the linears that belong to no site."""

    sites: tuple[Site, ...]
    left: tuple[str, ...]


def find_sites(model: nn.Module) -> Sites:
    """Every layer that a policy can be asked about."""
    seen = _Seen(model)
    sites: list[Site] = []
    for path, module in model.named_modules():
        sites += seen.sites_under(path, module)
    taken = {path for site in sites for path in site.modules}
    left = [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and path not in taken]
    return Sites(tuple(sites), tuple(left))


class _Seen:
    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.uses: dict[int, int] = {}
        for module in self.modules.values():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.uses[id(parameter)] = self.uses.get(id(parameter), 0) + 1
        self.topk = _topk(model)

    def sites_under(self, path: str, module: nn.Module) -> Iterator[Site]:
        """The sites whose linears are children of one module, or the two products of its experts."""
        parts = path.split(".")
        if any(part in _NEVER for part in parts):
            return
        if is_experts(module):
            yield from self._experts(path, module)
            return
        linears = {name: at for name, child in module.named_children() if (at := _linear_at(name, child))}
        latent = "kv_a_proj_with_mqa" in linears
        done: set[str] = set()
        for names, site in () if latent else _FUSED.items():
            if all(name in linears for name in names):
                yield self._dense(path, site, tuple(linears[name] for name in names))
                done.update(names)
        for name, child in linears.items():
            kind = _LATENT.get(name) if latent else None
            kind = kind or _NAME_OF.get(name)
            if name not in done and kind is not None and name not in _NEVER:
                yield self._dense(path, kind, (child,))

    def _dense(self, path: str, name: str, children: tuple[str, ...]) -> Site:
        paths = tuple(f"{path}.{child}".lstrip(".") for child in children)
        linears = [self.modules[each] for each in paths]
        shape = (sum(_features(each)[0] for each in linears), _features(linears[0])[1])
        parts = path.split(".")
        kind = _KIND_OF[name]
        if any(part in _SHARED for part in parts) and kind == "layernorm_column":
            kind = "column"  # the router reads the norm's output too
        obstacle = self._obstacle(paths)
        if re.search(r"(^|\.)experts\.[0-9]+(\.|$)", path):
            obstacle = "an expert of its own: experts were measured as one grouped product"
        is_wrapped = any("." in child for child in children)  # its adapter reads the norm's output too
        norm = self._norm(path, name) if kind == "layernorm_column" and not is_wrapped else None
        label = paths[0] if len(paths) == 1 else f"{path}.{name}".lstrip(".")
        return Site(label, _part(parts), kind, name, shape, paths, norm, obstacle=obstacle)

    def _experts(self, path: str, module: nn.Module) -> Iterator[Site]:
        for child, kind, name in (("gate_up_proj", "column_grouped", "fc1"), ("down_proj", "row_grouped", "fc2")):
            weight: Tensor = getattr(module, child)
            topk = self.topk or getattr(self.modules.get(path.rpartition(".")[0]), "top_k", None)
            obstacle = experts_obstacle(module)
            if self.uses[id(weight)] > 1:
                obstacle = f"{path}.{child} is shared with another module"
            if weight.is_cuda and weight.dtype != torch.bfloat16:
                obstacle = f"grouped products on a GPU take bfloat16, its weights are {weight.dtype}"
            shape = (weight.shape[1], weight.shape[2])
            label, part = f"{path}.{child}".lstrip("."), _part(path.split("."))
            yield Site(label, part, kind, name, shape, (path,), None, weight.shape[0], topk, obstacle)

    def _obstacle(self, paths: tuple[str, ...]) -> str | None:
        """Why linears cannot be replaced by one layer."""
        linears = [self.modules[path] for path in paths]
        for path, linear in zip(paths, linears, strict=True):
            if type(linear) is not nn.Linear:
                return f"{path} is a {type(linear).__name__}, whose forward is not Linear's own"
            if _has_hooks(linear):
                return f"{path} has hooks, which would be lost"
            if self.uses[id(linear.weight)] > 1:
                return f"the weight of {path} is shared with another module"
        biases = {linear.bias is not None for linear in linears}
        inputs = {_features(linear)[1] for linear in linears}
        kinds = {(linear.weight.dtype, linear.weight.device, linear.weight.requires_grad) for linear in linears}
        if len(biases) > 1 or len(inputs) > 1 or len(kinds) > 1:
            return f"{', '.join(paths)} differ in bias, input, dtype, device or whether they are trained"
        return None

    def _norm(self, path: str, name: str) -> str | None:
        """The norm in front of a site, if nothing else reads its output."""
        module = self.modules[path]
        if name in _LATENT_NORMS:
            norm = f"{path}.{_LATENT_NORMS[name]}"
            known = type(module).__name__.removesuffix("Attention") in _BLOCKS
            return norm if known and self._is_own(norm) else None
        block_path, _, own = path.rpartition(".")
        block = self.modules.get(block_path)
        family = type(block).__name__.removesuffix("DecoderLayer")
        if family not in _BLOCKS or own not in _BLOCK_NORMS:
            return None
        norm = f"{block_path}.{_BLOCK_NORMS[own]}".lstrip(".")
        return norm if self._is_own(norm) else None

    def _is_own(self, norm: str) -> bool:
        """Whether a norm is there, has no hooks, which would be lost, and no weight that another module has too."""
        module = self.modules.get(norm)
        if module is None or _has_hooks(module):
            return False
        return all(self.uses[id(each)] == 1 for each in module._parameters.values() if each is not None)


def is_experts(module: nn.Module) -> bool:
    """A module that holds the weights of many experts, as transformers does."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in weights)


def experts_obstacle(module: nn.Module) -> str | None:
    """Why the experts of a module are not known to be down(act(gate(x)) * up(x)), called as transformers does."""
    if getattr(module, "is_transposed", False) is not False:
        return "its weights are transposed"
    if any(getattr(module, f"{each}_bias", None) is not None for each in ("gate_up_proj", "down_proj")):
        return "its experts have biases"
    if (
        getattr(module, "is_concatenated", True) is not True
        or getattr(module, "has_post_expert_norm", False) is not False
    ):
        return "its gate and up are interleaved, or its experts have a norm of their own"
    gating = getattr(type(module), "_apply_gate", None)
    if not callable(getattr(module, "act_fn", None)) or getattr(gating, "__name__", _GATING) != _GATING:
        return f"{type(module).__name__} gates its experts in its own way, not by act(gate) * up"
    if set(module._parameters) != {"gate_up_proj", "down_proj"} or list(_arguments(module)) != _EXPERT_ARGUMENTS:
        return f"{type(module).__name__} has other tensors or arguments than {', '.join(_EXPERT_ARGUMENTS)}"
    return "it has hooks, which would be lost" if _has_hooks(module) else None


def _arguments(module: nn.Module) -> list[str]:
    return [name for name in inspect.signature(type(module).forward).parameters if name != "self"]


def _has_hooks(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or any(getattr(module, hooks, None) for hooks in _HOOKS)


def _linear_at(name: str, child: nn.Module) -> str | None:
    """Where the linear of a child is: itself, or the base that an adapter of peft has wrapped."""
    if isinstance(child, nn.Linear):
        return name
    return f"{name}.{_BASE}" if isinstance(getattr(child, _BASE, None), nn.Linear) else None


def _features(linear: nn.Module) -> tuple[int, int]:
    assert isinstance(linear, nn.Linear)
    return linear.out_features, linear.in_features


def _part(parts: list[str]) -> str:
    return "vit" if any(part in _VISION for part in parts) else "llm"


def _topk(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        topk = getattr(each, "num_experts_per_tok", None)
        if type(topk) is int and topk >= 1:
            return topk
    return None


def block_of(path: str) -> str:
    """The block that a layer is in: up to the last number in its path; empty where there is none."""
    match = re.match(r"(?:.*\.)?[0-9]+(?=\.)", path)
    return match[0] if match else ""
