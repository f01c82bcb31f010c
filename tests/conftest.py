"""Settings for every test."""

from __future__ import annotations

import os

import pytest
import torch
from crosses import pytest_generate_tests  # noqa: F401  # tests/ is where pytest begins

torch.set_num_threads(1)  # the suite itself runs in several workers
if not torch.cuda.is_available():  # Triton reads this when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
