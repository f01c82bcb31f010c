"""Models for the streaming tests: small, with every kind of parameter, and their resident twins."""

from __future__ import annotations

import copy
import gc
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitplan import decode, encode
from bitplan.streaming.block_stream import BlockStream, stream_blocks
from bitplan.streaming.options import StreamOptions
from bitplan.streaming.transfer.devices import Copied, Mark, SimulatedDevice

WIDTH, COUNT = 128, 6
TIMEOUT_S = 240.0  # a machine may be busy: what is late is not lost
OPTIONS = StreamOptions(timeout_s=TIMEOUT_S)
CHECKPOINTING = ["none", "non-reentrant", "reentrant", "pairs"]


class ClockedDevice(SimulatedDevice):
    """A device with a clock of its own, which no machine's speed moves.

    A copy is made at once and ends, by that clock, after as long as its bytes take, behind the copies of its queue;
    computing takes no time unless `compute` is called.
    """

    copies_in_background = True

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s=bytes_per_s)
        self.now_s = 0.0
        self._free_s: dict[tuple[str, str], float] = {}

    def compute(self, seconds: float) -> None:
        """The computation goes on for as long."""
        self.now_s += seconds

    def mark(self) -> Mark:
        return Mark(time_s=self.now_s)

    def has_passed(self, mark: Mark) -> bool:
        return mark.time_s <= self.now_s

    def wait(self, copied: Copied) -> None:
        self.finish(copied.end)

    def finish(self, mark: Mark) -> None:
        self.now_s = max(self.now_s, mark.time_s)

    def _copy(self, direction: Any, queue: Any, target: Tensor, source: Tensor, after: tuple[Mark, ...]) -> Copied:
        assert self.bytes_per_s is not None
        start = max(self.now_s, self._free_s.get((direction, queue), 0.0), *(mark.time_s for mark in after))
        end = self._free_s[direction, queue] = start + target.nbytes / self.bytes_per_s
        target.copy_(source)
        return Copied(Mark(time_s=start), Mark(time_s=end))


class LowRank(nn.Module):
    """A frozen linear with a trained low-rank path beside it, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Block(nn.Module):
    """Norm, two linears, a residual: matrices, a bias, vectors."""

    def __init__(self, *, adapters: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("gain", torch.tensor(0.5))
        if adapters:
            self.requires_grad_(False)
            self.up = LowRank(self.up)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an input and a head that are trained on the device."""

    def __init__(self, *, adapters: bool, count: int = COUNT) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList([Block(adapters=adapters) for _ in range(count)])
        self.head = nn.Linear(WIDTH, 4)
        self.checkpointing = "none"

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.checkpointing == "pairs":  # regions of two blocks: the hard case for whoever keeps one block only
            for one, two in zip(self.layers[::2], self.layers[1::2], strict=True):
                hidden = checkpoint(lambda h, one=one, two=two: two(one(h)), hidden, use_reentrant=False)
        else:
            for layer in self.layers:
                if self.checkpointing == "none":
                    hidden = layer(hidden)
                else:
                    hidden = checkpoint(layer, hidden, use_reentrant=self.checkpointing == "reentrant")
        out: Tensor = self.head(hidden)
        return out


def make_stack(*, adapters: bool, dtype: torch.dtype = torch.float32, seed: int = 0, count: int = COUNT) -> Stack:
    torch.manual_seed(seed)
    return Stack(adapters=adapters, count=count).to(dtype)


def batch(seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def decoded_twin(model: nn.Module, formats: dict[str, str]) -> nn.Module:
    """A resident model whose parameters are what the streamed ones decode to."""
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    with torch.no_grad():
        for name, fmt in formats.items():
            parameters[name].copy_(decode(encode(parameters[name], fmt), parameters[name].dtype))
    return twin


@contextmanager
def streaming(model: nn.Module, device: Any = None, **options: Any) -> Iterator[BlockStream]:
    options = {"blocks": "layers.*", "slots": 3, "timeout_s": TIMEOUT_S} | options
    with stream_blocks(model, device=device or SimulatedDevice(), **arguments_of(options)) as stream:
        yield stream


def arguments_of(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of stream_blocks: fields of StreamOptions are gathered in `options`."""
    few = {one.name: options.pop(one.name) for one in fields(StreamOptions) if one.name in options}
    return {**options, "options": StreamOptions(**few)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_equal(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(result[name].cpu(), tensor.cpu()), name


def train_steps(
    model: nn.Module,
    steps: int,
    *,
    stream: BlockStream | None = None,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    before: Callable[[int], None] | None = None,
) -> list[dict[str, Tensor]]:
    """Plain SGD on whatever has gradients on the device; the gradients of every step."""
    seen = []
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(steps):
        if before is not None:
            before(step)
        if stream is not None:
            stream.begin_step(step)
        for micro in range(micro_batches):
            model(batch(100 * step + micro, dtype, device)).square().mean().backward()
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        if stream is not None:
            stream.end_step()
    return seen


def bytes_of(*roots: Any) -> int:
    """The bytes of all tensors that can be reached from these objects, but not through modules of Python."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | types.FunctionType | types.FrameType):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        waiting += gc.get_referents(one)
        waiting += list(vars(one).values()) if hasattr(one, "__dict__") else []
    return sum(storages.values())
