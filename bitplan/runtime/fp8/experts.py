"""The experts of an MoE block as two grouped products, FP8 or BF16 by choice.

A module that holds the experts of a block (`experts_of`: gate and up [E, 2 F, H], down [E, H, F]) is called with hidden
states [T, H] and, for each token, its experts and their weights [T, k]. Here tokens are sorted by expert once, both
products use that order, and the results are weighted and added to the tokens that they belong to. How many tokens each
expert has stays on the GPU: nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bitplan.plan.structure import activations
from bitplan.plan.structure.describe import experts_of
from bitplan.runtime.fp8.fused_projections import Renamed
from bitplan.runtime.fp8.layer_settings import Fp8Recipe, GemmChoice
from bitplan.runtime.fp8.layers.grouped_linear import GroupedLinear
from bitplan.runtime.fp8.layers.weight_casts import expire_casts, free_with


class Fp8Experts(nn.Module):
    """Takes the place of a module that holds experts, over the same parameters."""

    def __init__(self, experts: nn.Module, recipe: Fp8Recipe, fc1: GemmChoice, fc2: GemmChoice) -> None:
        super().__init__()
        seen = experts_of(experts)
        assert seen is not None
        gate_up, down = experts.get_parameter(seen.gate_up), experts.get_parameter(seen.down)
        self.checkpoint_names = (Renamed(seen.gate_up, "fc1.weight"), Renamed(seen.down, "fc2.weight"))
        self.num_experts: int = gate_up.shape[0]
        self.act_fn = activations.KNOWN[seen.activation]
        self.fc1, self.fc2 = grouped_of(gate_up, recipe, fc1), grouped_of(down, recipe, fc2)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
        counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))  # bincount would wait for the GPU
        token = order // top_k_index.shape[-1]
        gate, up = self.fc1(hidden_states[token], counts).chunk(2, dim=-1)
        output = self.fc2(self.act_fn(gate) * up, counts)
        weighed = output * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(hidden_states).index_add(0, token, weighed.to(hidden_states.dtype))


def grouped_of(weight: nn.Parameter, recipe: Fp8Recipe, gemms: GemmChoice) -> GroupedLinear:
    """A grouped linear over an existing Parameter [E, N, K]."""
    experts, outputs, inputs = weight.shape
    layer = GroupedLinear(experts, inputs, outputs, recipe=recipe, gemms=gemms, device="meta", dtype=weight.dtype)
    layer.weight = weight
    free_with(weight)
    layer.misrouted = torch.zeros(1, dtype=torch.int32, device=weight.device)
    return layer


def cast_dropper(module: nn.Module) -> Callable[[], None]:
    """A function that makes all FP8 layers of a module cast their weights anew, as after an optimizer's step."""
    weights = [each for each in module.parameters() if each.ndim >= 2]
    return lambda: expire_casts(weights)
