"""Compiled CUDA graphs are seen, and what must outlive them is allocated by another thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from bitplan.fp8.layers.scale_guesses import allocate_outside, in_compiled_graphs


@pytest.mark.parametrize(("stream", "is_theirs"), [("theirs", True), ("another", False), (None, False)])
def test_they_are_known_by_their_stream(stream, is_theirs, monkeypatch) -> None:
    from torch._inductor import cudagraph_trees

    weight = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), get_device=lambda: 0)
    manager = None if stream is None else SimpleNamespace(stream="theirs")
    containers = {0: SimpleNamespace(tree_manager=manager)}
    monkeypatch.setattr(cudagraph_trees, "get_obj", lambda _local, _name: containers)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    assert in_compiled_graphs(weight) == is_theirs  # type: ignore[arg-type]


def test_a_cpu_has_none() -> None:
    assert not in_compiled_graphs(torch.zeros(2))


def test_another_thread_allocates() -> None:
    assert allocate_outside(threading.get_ident) != threading.get_ident()
    with pytest.raises(MemoryError, match="none left"):
        allocate_outside(lambda: (_ for _ in ()).throw(MemoryError("none left")))
