"""Tells a torch GradScaler about gradients on the host, and asks it about those on the device.

A scaler notes, for each optimizer, whether its gradients overflowed: `step(optimizer)` then does nothing, and `update`
lowers the scale. Streamed weights and the optimizer's are one model, so they are stepped together or not at all. There
is no public way to give a scaler another's overflow; these notes have had their form since torch 1.6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

NOTES = "found_inf_per_device"


def share_overflow(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None, host: object, *, is_finite: bool
) -> bool:
    """Note whether gradients of `host` are finite, for it and the optimizer; whether any of the two overflowed."""
    here = torch.tensor(0.0 if is_finite else 1.0)
    states: Any = scaler._per_optimizer_states
    states[id(host)][NOTES] = {here.device: here}
    if optimizer is None:
        return not is_finite
    if states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    notes = states[id(optimizer)][NOTES]
    overflowed = not is_finite or any(bool(note.item()) for note in notes.values())
    if overflowed or not notes:  # a scaler refuses to step an optimizer of which it has no note
        notes[here.device] = torch.tensor(float(overflowed))
    return overflowed
