"""Measures the reference's own noise: how far its results are apart when it is computed in two equally valid ways.

A difference from the reference means little if the reference itself varies as much. The second way is how such models
are commonly run: the same weights, activations in bfloat16. It is simulated by rounding the output of every part of the
model, the residual stream included, to bfloat16; sums stay in float32, as matrix units accumulate, and so do the
logits, which makes the floor low rather than high. (The idea of a self-noise floor in a quality report is exllamav3's.)
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def shared_twin(model: nn.Module) -> nn.Module:
    """A second model over the same Parameters and buffers; hooks on it and changed modules do not affect the first."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def round_activations(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, keep: Collection[nn.Module] = ()
) -> list[RemovableHandle]:
    """Let every module inside the model, except those in `keep`, round its outputs until its handle is removed."""

    def rounded(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _rounded(output, dtype)

    return [
        module.register_forward_hook(rounded)
        for module in model.modules()
        if module is not model and not any(module is exempt for exempt in keep)
    ]


def _rounded(output: Any, dtype: torch.dtype) -> Any:
    if isinstance(output, Tensor):
        return output.to(dtype).to(output.dtype) if output.is_floating_point() else output
    if type(output) in (tuple, list):
        return type(output)(_rounded(item, dtype) for item in output)
    return output  # an output class of a model: its tensors were rounded where they were made
