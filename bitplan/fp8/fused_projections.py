"""Fuses projections that read one input into one layer, in a model that still calls them one by one.

A llama block calls q_proj, k_proj and v_proj on the same tensor. One product of the fused weights casts that tensor
once, and was measured so; the three therefore become one layer, inside the first. The model's code stays as it is:

    q_proj     FusedProjections: holds the layer of all, runs it and gives its own part
    k_proj     FusedPart: gives its part
    norm       NormTakenOver: hands its input on; the layer behind it does the norm, in the cast where it can

Whoever is called first runs the layer; the others get their parts as `plan.structure.joined_calls` says: once, for the
very tensor, if neither it nor the weight has changed since. Biases are joined where all projections have one; where
only some do (Whisper's keys have none), each stays with its projection and is added to its part.

Checkpoints keep their names: `state_dict` splits fused tensors and `load_state_dict` joins them (`keep_names`), so a
model with fused layers reads and writes the same files as before. Parameters themselves are fused: make the optimizer
after that, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from bitplan.base.weight_changes import writes_of
from bitplan.fp8.layer_settings import Fp8LayerError
from bitplan.plan.structure.joined_calls import SharedProduct


class _Projection(nn.Module):
    """One of several joined projections; `has_bias`: it keeps a bias of its own, since the others have none."""

    has_bias = False  # whether it has a bias of its own, since the others have none

    def _keep_bias(self, bias: nn.Parameter | None) -> None:
        if bias is not None:
            self.bias, self.has_bias = bias, True

    def _with_bias(self, part: Tensor) -> Tensor:
        return part + self.bias.to(part.dtype) if self.has_bias else part

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        raise Fp8LayerError(
            "apply_fp8 has joined these projections (q, k, v; gate, up) into one parameter, which is trained or frozen "
            "as a whole: freeze before apply_fp8 (projections that differ stay in BF16), or freeze the module around "
            "them"
        )


class FusedProjections(_Projection):
    """The first of several projections, with the layer of all of them inside."""

    def __init__(self, fused: nn.Module, sizes: Sequence[int], bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.fused = fused
        self.shared = SharedProduct(sizes)
        self._keep_bias(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._with_bias(self.part(0, x))

    def part(self, index: int, x: Tensor) -> Tensor:
        """The part of a projection, without a bias that this projection keeps to itself."""
        is_traced = torch.compiler.is_compiling()
        # In a compiled graph nothing changes between two of its calls.
        state = None if is_traced else (writes_of(x), writes_of(self.fused.weight), torch.is_grad_enabled())  # type: ignore[arg-type]
        part = self.shared.part(index, x, state)
        return self.shared.hand_out(index, self._product(x), x, state, is_traced=is_traced) if part is None else part

    def _product(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            attributes = self.fused.__dict__
            if "_hf_hook" in attributes:
                _refuse_offloading(attributes["_hf_hook"])
            if "base_layer" in attributes["_modules"]:
                raise Fp8LayerError(
                    "an adapter was put on projections that apply_fp8 has joined (q, k, v; gate, up), whose "
                    "norm it would not see; make adapters first (get_peft_model), then apply_fp8"
                )
        together: Tensor = self.fused(x)
        return together

    def rows(self, index: int) -> Tensor:
        """The rows of the fused weight that belong to a projection."""
        start = sum(self.shared.sizes[:index])
        weight: Tensor = self.fused.get_parameter("weight")
        return weight[start : start + self.shared.sizes[index]]

    @property
    def weight(self) -> Tensor:
        """Its own weight, for code that looks at a projection's device or type."""
        return self.rows(0)

    def extra_repr(self) -> str:
        return f"sizes={self.shared.sizes}"


def _refuse_offloading(hook: Any) -> None:
    """Raise for models that accelerate offloads: it finds weights by names that joined layers do not have."""
    if any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,))):
        raise Fp8LayerError(
            "accelerate offloads this model, and does not find weights that apply_fp8 has joined (q, k, v; gate, up); "
            "leave the model on the GPU, or offload it without apply_fp8"
        )


class FusedPart(_Projection):
    """Stands for a joined projection other than the first; its forward takes its part of the first one's product."""

    def __init__(self, head: FusedProjections, index: int, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple: the head is a child of the first projection, not of this one
        self.index = index
        self._keep_bias(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._with_bias(self._head[0].part(self.index, x))

    @property
    def weight(self) -> Tensor:
        return self._head[0].rows(self.index)

    def _replicate_for_data_parallel(self) -> Any:
        raise Fp8LayerError(
            "nn.DataParallel cannot copy projections that apply_fp8 has joined; train with DistributedDataParallel "
            "(torchrun --nproc_per_node ...), or show one GPU alone (CUDA_VISIBLE_DEVICES=0)"
        )

    def extra_repr(self) -> str:
        return f"part {self.index} of {len(self._head[0].shared.sizes)}"


class NormTakenOver(nn.Module):
    """Stands in the place of a norm that the layer behind it now computes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self._norm = (norm,)  # in a tuple: it is a child of the layer, not of this one

    @property
    def weight(self) -> Any:
        """The weight, for code that looks it up by the names of state dicts."""
        return self._norm[0].weight

    @property
    def bias(self) -> Any:
        return self._norm[0].bias

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self._norm[0].requires_grad_(requires_grad)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Renamed:
    """A tensor named `old` in checkpoints, which the model holds in rows start..stop of `new` (all rows if None)."""

    old: str
    new: str
    rows: tuple[int, int] | None = None


def renamed_in(module: nn.Module) -> dict[str, list[Renamed]]:
    """The names in checkpoints of what is joined inside a module, by the name that the module itself has for it.

    They follow from where the modules are now: peft moves them when it puts an adapter on or takes it away.
    """
    heads: dict[int, tuple[str, FusedProjections]] = {}
    parts: dict[int, dict[int, str]] = {}
    norms: dict[int, str] = {}
    renamed: list[Renamed] = []
    for path, inner in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(inner, FusedProjections):
            heads[id(inner)] = (prefix, inner)
            parts.setdefault(id(inner), {})[0] = prefix
        elif isinstance(inner, FusedPart):
            parts.setdefault(id(inner._head[0]), {})[inner.index] = prefix
        elif isinstance(inner, NormTakenOver):
            norms[id(inner._norm[0])] = prefix
        for name in getattr(inner, "checkpoint_names", ()):
            renamed.append(Renamed(prefix + name.old, prefix + name.new, name.rows))
    for key, (prefix, head) in heads.items():
        if len(parts[key]) < len(head.shared.sizes):
            continue  # a module further out has them all
        start = 0
        for index, size in enumerate(head.shared.sizes):
            rows = (start, start + size)
            for tensor in ("weight",) if head.fused.bias is None else ("weight", "bias"):
                renamed.append(Renamed(parts[key][index] + tensor, f"{prefix}fused.{tensor}", rows))
            start = rows[1]
    for path, inner in module.named_modules() if norms else ():
        if id(inner) in norms:
            renamed += [Renamed(norms[id(inner)] + tensor, f"{path}.{tensor}") for tensor in ("weight", "bias")]
    by_new: dict[str, list[Renamed]] = {}
    for name in renamed:
        by_new.setdefault(name.new, []).append(name)
    return by_new


class _Split:
    """Writes a module's state under the old names. A class, so that a model that has it can be pickled."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for new, parts in renamed_in(module).items():
            if prefix + new not in state:
                continue
            joined = state.pop(prefix + new)
            for part in parts:
                state[prefix + part.old] = joined if part.rows is None else _with_own_storage(joined, part.rows)


def _with_own_storage(joined: Tensor, rows: tuple[int, int]) -> Tensor:
    """Rows of a tensor: the same memory and the same count of writes, but a storage that has these rows alone.

    accelerate and safetensors take tensors of one storage for names of one tensor, and save only one of them.
    """
    part = joined[rows[0] : rows[1]]
    if type(joined) is Tensor and joined.device.type in ("cpu", "cuda") and joined.is_contiguous() and part.numel():
        part.data = from_dlpack(joined[rows[0] : rows[1]])
    return part


class _Join:
    """A hook that lets a module load a state dict with the names of before its layers were joined."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
        errors: list[str] = more[-1]
        for new, parts in renamed_in(module).items():
            if all(prefix + part.old in state for part in parts):
                tensors = [state.pop(prefix + part.old) for part in parts]
                if parts[0].rows is None:
                    state[prefix + new] = tensors[0]
                    continue
                # One by one: rows that are too many in one part and too few in another would fit as a whole.
                wrong = [
                    f"size mismatch for {prefix}{part.old}: it has {part.rows[1] - part.rows[0]} rows here, and shape "
                    f"{tuple(tensor.shape)} in the checkpoint."
                    for part, tensor in zip(parts, tensors, strict=True)
                    if part.rows is not None and tensor.shape[:1] != (part.rows[1] - part.rows[0],)
                ]
                if wrong:
                    errors.extend(wrong)
                else:
                    state[prefix + new] = torch.cat(tensors)


def keep_names(module: nn.Module) -> tuple[Any, Any]:
    """Let a module's state dicts have the names of before layers were joined; returns handles that end this."""
    return module.register_state_dict_post_hook(_Split()), module.register_load_state_dict_pre_hook(_Join())
