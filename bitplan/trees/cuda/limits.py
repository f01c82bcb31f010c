"""What `device="cuda"` needs: a card, memory on it, and settings that its kernels know."""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.base.loops.launch import INTERPRETED
from bitplan.trees.cuda.kernels import BINS, MOST_ROWS
from bitplan.trees.gradients import GradientPrecision, TreesError


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


def refuse_unsupported(precision: GradientPrecision, processes: int) -> None:
    """Refuse, in one line, what the GPU's kernels do not do."""
    if precision is GradientPrecision.F32:
        wrong = "gradient_precision='f32'", "set gradient_precision='i16' or 'i8'"
    elif processes > 1:
        wrong = f"rows in several processes (here {processes})", "use device='cpu'"
    else:
        return
    raise TreesError(f"device='cuda': {wrong[0]} are not supported there; {wrong[1]}")


def table_bytes(rows: int, features: int, slots: int, ordered: int) -> int:
    """Bytes beside the bins: two sides of entries, histograms, and those of categories in order."""
    return rows * 2 * 8 + slots * features * BINS * 16 + ordered * BINS * 18


def check_memory(device: torch.device, rows: int, features: int, needed: int) -> None:
    """Refuse a table that the card has no room for, before it is copied there."""
    if rows > MOST_ROWS:
        raise TreesError(f"device='cuda': a table has at most {MOST_ROWS} rows there, got {rows}; use device='cpu'")
    free = free_bytes(device)
    if needed > free:
        raise TreesError(
            f"device='cuda': {rows} rows x {features} features need {needed} bytes of GPU memory, and {free} are free; "
            "free some, use fewer rows, or device='cpu'"
        )


def free_bytes(device: torch.device) -> int:
    """What torch could allocate; under the interpreter there is always enough."""
    if device.type != "cuda":
        return 2**63
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused)


class Sent:
    """Words on the host, and their copy on the card, `there`, for which the host does not wait.

    They are written once a wave, or once a tree: the end of a wave, for which the host waits, says that the last copy
    was made.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self.host: Tensor = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.there = torch.zeros_like(self.host, device=device)

    def send(self) -> None:
        self.there.copy_(self.host, non_blocking=True)
