"""Memory of a search: however many blocks a model has, one of them with its statistics is there at a time."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bitplan
from bitplan.formats.dispatch import encode
from bitplan.searching import SearchOptions, damage
from bitplan.searching.blocks import BlockRunner
from bitplan.searching.statistics import ScratchWriter
from tests.processes import Program

WIDTH, VOCABULARY = 96, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.down_proj(self.up_proj(hidden_states).tanh())


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make while it is on, until they go."""

    def __init__(self, known: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {parameter.untyped_storage()._cdata for parameter in known.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if nbytes and key not in self._seen:
            self._seen.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


@pytest.fixture(autouse=True)
def plain_rounding(monkeypatch):
    monkeypatch.setattr(damage, "round_weight", lambda weight, fmt, **_options: encode(weight, fmt))


def _search(model: nn.Module) -> None:
    ids = torch.randint(VOCABULARY, (16, 12), generator=torch.Generator().manual_seed(1))
    bitplan.search(model, [ids], goal={"bits": 7.0}, formats=["mxfp4", "int8_row"])


@pytest.mark.long
def test_memory_does_not_grow_with_the_blocks():
    peaks = {}
    for blocks in (2, 6):
        model = Model(blocks).bfloat16().requires_grad_(False)
        with LiveBytes(model) as counted:
            _search(model)
        peaks[blocks] = counted.peak
    assert peaks[6] < peaks[2] + 4 * WIDTH * WIDTH, peaks


def test_memory_is_given_back_when_a_search_ends():
    model = Model(1).bfloat16().requires_grad_(False)
    _search(model)  # what torch loads when a model is first traced holds on to the frames that it is loaded in
    gc.collect()
    before = _runners()
    gc.disable()  # what a search holds must go with it, not with a collection some time later
    try:
        _search(model)
        assert _runners() == before
    finally:
        gc.enable()


def _runners() -> int:
    """What holds a model's weights on the device."""
    return sum(type(each) is BlockRunner for each in gc.get_objects())


def test_scratch_tensors_are_read_as_they_were_written(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "none": torch.empty(0, 4), "codes": torch.arange(5).byte()}
    stored = ScratchWriter().write(tmp_path / "x", tensors)
    for key, each in tensors.items():
        assert stored[key].shape == tuple(each.shape)
        assert torch.equal(stored[key].read(), each)
    (tmp_path / "x").write_bytes(b"short")
    with pytest.raises(bitplan.BitplanError, match=r"ends after 5 of 24 bytes"):
        stored["a"].read()


@pytest.mark.long
def test_a_search_stays_under_its_limit_of_memory_or_is_refused():
    """Two limits, in programs of their own: the peak is what the whole process had at most."""
    peaks = {}
    for limit in (1_600_000_000, 1_200_000_000):
        code = "import sys; from tests.searching.peak_of_search import main; main(int(sys.argv[1]))"
        program = Program(code, str(limit), folder=Path(__file__).parents[2])
        assert program.wait() == 0, program.output + program.errors
        peaks[limit] = int(program.output.split()[-1])
        assert peaks[limit] < limit, program.output
    assert min(peaks.values()) < max(peaks.values())
    with pytest.raises(bitplan.BitplanError, match=r"a search takes about [\d.]+ GB of memory, and 0\.1 GB were given"):
        bitplan.search(
            Model(1), [torch.zeros(8, 12, dtype=torch.int64)], goal={"bits": 7.0}, options=SearchOptions(memory=10**8)
        )
