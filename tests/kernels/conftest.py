"""Without a GPU, Triton kernels run under Triton's interpreter; it must be switched on before Triton is imported."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """Where the kernel under test runs; references run on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
