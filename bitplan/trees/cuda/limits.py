"""What `device="cuda"` needs: a card, memory on it, and settings that its kernels know."""

from __future__ import annotations

import numpy as np
import torch

from bitplan.kernels.base.numbers import INTERPRETED
from bitplan.trees.cuda.kernels import BINS, GROUP_BYTES, MOST_ROWS
from bitplan.trees.gradients import Array, GradientPrecision, TreesError
from bitplan.trees.grow import GrowthRules


def find_device() -> torch.device:
    """The current CUDA device; under Triton's interpreter the CPU stands in for it."""
    if INTERPRETED.value:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TreesError(
            f"device='cuda': torch {torch.__version__} finds no CUDA GPU; use device='cpu', or a torch built for CUDA "
            "on a machine with a GPU"
        )
    return torch.device("cuda", torch.cuda.current_device())


def refuse_unsupported(precision: GradientPrecision, rules: GrowthRules, categorical: Array, processes: int) -> None:
    """One line for what the GPU's kernels do not do."""
    if precision is GradientPrecision.F32:
        wrong = "gradient_precision='f32'", "set gradient_precision='i16' or 'i8'"
    elif np.any(categorical):
        wrong = f"categorical features (feature {int(np.argmax(categorical))} is one)", "use device='cpu'"
    elif np.any(rules.monotone):
        wrong = "monotone_constraints", "use device='cpu'"
    elif processes > 1:
        wrong = f"rows in several processes (here {processes})", "use device='cpu'"
    else:
        return
    raise TreesError(f"device='cuda': {wrong[0]} are not supported there; {wrong[1]}")


def bytes_needed(rows: int, groups: int, features: int, slots: int) -> int:
    """Bins, two sides of entries, codes of gradients, histograms; while bins are laid out one group more."""
    return rows * (groups * GROUP_BYTES + 2 * 8 + max(GROUP_BYTES, 2)) + slots * features * BINS * 16


def check_memory(device: torch.device, rows: int, groups: int, features: int, slots: int) -> None:
    """Refuse a table that the card has no room for, before anything is copied to it."""
    if rows > MOST_ROWS:
        raise TreesError(f"device='cuda': a table has at most {MOST_ROWS} rows there, got {rows}; use device='cpu'")
    if device.type != "cuda":
        return
    needed = bytes_needed(rows, groups, features, slots)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > free:
        raise TreesError(
            f"device='cuda': {rows} rows x {features} features need {needed} bytes of GPU memory, and {free} are free; "
            "free some, use fewer rows, or device='cpu'"
        )
