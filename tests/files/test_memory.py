"""Memory of reading and writing: one tensor at a time, whatever the file holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from bitplan.files.gguf import GGUFFile, write_gguf
from bitplan.files.safetensors import SafetensorsFile, write_safetensors


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to ask for its peak memory")
def test_memory_is_bounded_by_one_tensor(tmp_path):
    """Neither a second copy of a tensor nor a map of the file would fit."""
    size, names = 64 * 2**20, ["a", "b"]
    tensor = torch.ones(size, dtype=torch.uint8)

    def write_both() -> None:
        with write_safetensors(tmp_path / "st", [(name, torch.uint8, (size,)) for name in names]) as writer:
            for name in names:
                writer.write(name, tensor)
        with write_gguf(tmp_path / "gguf", [(name, Type.I8, (size,)) for name in names], {}) as gguf_writer:
            for name in names:
                gguf_writer.write(name, tensor)

    def read_both() -> None:
        with SafetensorsFile(tmp_path / "st") as st, GGUFFile(tmp_path / "gguf") as gg:
            for name in names:
                assert st.read(name)[-1] == 1
                assert gg.read_raw(name)[-1] == 1

    assert peak_resident_bytes(write_both) < size // 2
    assert peak_resident_bytes(read_both) < size + size // 2
    for path in tmp_path.iterdir():
        path.unlink()


def peak_resident_bytes(action: Callable[[], None]) -> int:
    """How far the resident memory of this process rises above what it was."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    action()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
