"""Where kernels are tested: on a GPU if there is one, else under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the kernel under test runs; references run on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
