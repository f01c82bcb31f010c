"""RoutedExperts: experts of mixtures that cross the bus when their router chose them.

A block's experts are most of its bytes, and a token uses few of them. With `StreamOptions(experts="by use")` the other
parameters of a block cross as ever, and its experts wait until the block's router has run: its choice is read on the
host, which takes one wait of some 50 us a layer, and exactly the chosen experts are copied (`ExpertMemory`). Backward
uses the experts of its forward: they are still there, or are copied again.

What was chosen last is likely to be chosen again, so while one mixture computes, the experts that the next one used
last are copied ahead; in a backward these are those of its forward. Experts that nobody chose since then never cross.

"auto" sends all experts of a mixture, without reading the choice first, where more than `ALL_ABOVE` of them were
chosen lately; the choice is then read a step later, to know when to return.

Which modules are experts is seen by running them without numbers (`experts_of`), not by their names.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.base.errors import StreamError
from bitplan.plan.structure.describe import experts_of
from bitplan.streaming.find_blocks import BlockLayout, StreamedBlock, StreamedParameter, Train, lay_out
from bitplan.streaming.options import Experts, StreamRequest, own_format
from bitplan.streaming.reencode_blocks import current_parameter, look_at
from bitplan.streaming.saved_tensors import (
    Spans,
    ViewLayout,
    in_backward,
    refuse_second_derivatives,
    save_where_weights_lie,
)
from bitplan.streaming.transfer.copies import Transfer
from bitplan.streaming.transfer.devices import Mark
from bitplan.streaming.transfer.expert_memory import ExpertMemory, ExpertStack
from bitplan.streaming.transfer.schedule import RING_SLOTS
from bitplan.streaming.weight_loader import WeightLoader

ALL_ABOVE = 0.75  # of a mixture's experts: "auto" sends all where more were chosen
RECENT = 4  # forwards by which "auto" decides


@dataclass(eq=False)
class Mixture:
    """A module of experts in a block, and what was chosen of it lately."""

    name: str
    block: StreamedBlock
    module: nn.Module
    parameters: dict[str, StreamedParameter]  # by their names in the module
    count: int
    expected: Sequence[int] | None = None  # what was chosen last
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    is_whole: bool = False  # all experts are sent, and nobody waits for the choice

    def chose(self, experts: Sequence[int]) -> None:
        self.expected = experts
        self.shares.append(len(experts) / self.count)


def take_out_experts(blocks: Sequence[StreamedBlock], train: Train) -> list[Mixture]:
    """Take the mixtures' experts out of the blocks' own parameters; refuses, before that, what cannot cross by use."""
    mixtures = [mixture for block in blocks for mixture in _mixtures_of(block, train)]
    if not mixtures:
        raise StreamError(
            "experts='by use': no block holds experts in tensors [experts, outputs, inputs], as transformers fuses "
            "them; stream with experts='all'"
        )
    for block in blocks:
        routed = {id(one) for mixture in mixtures if mixture.block is block for one in mixture.parameters.values()}
        if all(id(one) in routed for one in block.parameters.values()):
            raise StreamError(
                f"{block.name} holds experts alone; with experts='by use' name the blocks around them, or stream with "
                "experts='all'"
            )
    for mixture in mixtures:
        for one in mixture.parameters.values():
            mixture.block.routed[one.name] = mixture.block.parameters.pop(one.name)
    return mixtures


def _mixtures_of(block: StreamedBlock, train: Train) -> Iterator[Mixture]:
    by_use = {(id(module), local): one for one in block.parameters.values() for module, local in one.uses}
    for path, module in block.module.named_modules():
        use = experts_of(module)
        if use is None:
            continue
        name = ".".join(part for part in (block.name, path) if part)
        if use.fault:
            raise StreamError(
                f"{name}: its experts are not of a kind that can cross by use: {use.fault}; stream with experts='all'"
            )
        for holder in block.module.modules():
            if holder.__dict__.get("_modules", {}).get("base_layer") is module:
                raise StreamError(
                    f"{name} has adapters on its experts' own weights ({type(holder).__name__}), which read all of "
                    "them; stream with experts='all', or adapt other layers"
                )
        parameters = {}
        for local in use.weights:
            one = by_use.get((id(module), local))
            if one is None or (one.parameter.requires_grad and train != "nothing"):
                raise StreamError(
                    f"{name}.{local} requires gradients, and experts that cross by use are frozen; call "
                    "requires_grad_(False) on it, or stream with experts='all'"
                )
            if len(one.uses) > 1:
                raise StreamError(f"{name}.{local} has {len(one.uses)} places in its block; copy it, or stream all")
            parameters[local] = one
        yield Mixture(name, block, module, parameters, len(module.get_parameter(use.gate_up)))


class RoutedExperts:
    """The modules of experts in one stream, of which only the chosen experts cross to the device."""

    def __init__(self, mixtures: list[Mixture], loader: WeightLoader, options: StreamRequest) -> None:
        self.mixtures, self._loader, self._train = mixtures, loader, options.train
        self._device, self._host = loader.device, loader.host
        self._how: Experts = options.experts
        self._layouts = [_layout_of(mixture) for mixture in mixtures]
        self._seen: list[dict[str, tuple[Any, ...]]] = [{} for _ in mixtures]
        self._unread: deque[tuple[int, Tensor, Mark]] = deque()  # choices on their way to the host
        self._wrapped: list[tuple[Mixture, Callable[..., Any] | None]] = []
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._is_broken = False
        self._position, self._direction = 0, 1
        self._last_taken: int | None = None  # a mixture after which nothing was sent ahead yet
        for at in range(len(mixtures)):
            self._write(at)
        stacks = [
            ExpertStack(mixture.name, mixture.count, layout, self._host.source(mixture.name, None))
            for mixture, layout in zip(mixtures, self._layouts, strict=True)
        ]
        slots = RING_SLOTS if options.slots == "auto" else int(options.slots)
        self.memory = ExpertMemory(self._device, stacks, slots, options.expert_cache_bytes)

    def set(self, how: Experts, cache_bytes: int) -> None:
        """Send experts "by use", or as "auto" decides, from now on, with a cache of this size."""
        self._how = how
        self.memory.finish_copies()
        self.memory.forget()
        self.memory.resize_cache(cache_bytes)
        for mixture in self.mixtures:
            mixture.is_whole = False

    @property
    def figures(self) -> dict[str, float]:
        """Return the figures that `StreamStats.experts` shows."""
        shares = [mixture.shares[-1] for mixture in self.mixtures if mixture.shares]
        return {
            "vram_bytes": self.memory.nbytes,
            "cached": len(self.memory.cached),
            "copied": self.memory.copied_experts,
            "from_cache": self.memory.cached_experts,
            "chosen_share": sum(shares) / len(shares) if shares else 0.0,
            "mixtures": len(self.mixtures),
            "sent_whole": sum(mixture.is_whole for mixture in self.mixtures),
        }

    # ---- steps -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: read what was chosen, and decide what is sent as a whole."""
        self.memory.fade()
        while self._unread and self._device.has_passed(self._unread[0][2]):
            at, flags, _ = self._unread.popleft()
            chosen = _numbers(flags, self.mixtures[at].count)
            self.memory.count(at, chosen)
            self.mixtures[at].chose(chosen)
        if self._how == "auto":
            for mixture in self.mixtures:
                share = sum(mixture.shares) / max(1, len(mixture.shares))
                mixture.is_whole = share > ALL_ABOVE

    def bring_up_to_date(self, block: StreamedBlock | None = None) -> None:
        """Take over, before a step or a forward of one block outside it, weights that other code changed."""
        if self._is_broken:
            self.memory.finish_copies()
            self.memory.forget()
            self._is_broken = False
        for at, mixture in enumerate(self.mixtures):
            if block is None or mixture.block is block:
                if self._look(mixture) != self._seen[at]:
                    self.memory.finish_copies()
                    self.memory.forget(at)
                    self._write(at)
                self._refuse_thawed(mixture)

    def unread(self) -> None:
        """Treat the weights of all experts as changed, so that they are read again."""
        self._seen = [{} for _ in self.mixtures]

    def end(self) -> None:
        self.memory.leave()

    def close(self) -> None:
        self.memory.close()

    def _look(self, mixture: Mixture) -> dict[str, tuple[Any, ...]]:
        return {name: look_at(one) for name, one in mixture.parameters.items()}

    def _write(self, at: int) -> None:
        """Put a mixture's experts into the host's memory, of which its Parameters become views."""
        mixture, layout = self.mixtures[at], self._layouts[at]
        for local, one in mixture.parameters.items():
            current, was = current_parameter(f"{mixture.name}.{local}", one), layout.pieces[local].spec
            if current.device.type != "cpu" or (tuple(current.shape), current.dtype) != (was.shape, was.dtype):
                raise StreamError(
                    f"{mixture.name}.{local} is {tuple(current.shape)} {current.dtype} on {current.device} now, and "
                    f"was streamed as {was.shape} {was.dtype} from the host; close the stream and stream again"
                )
            one.parameter = current

        def fill(buffer: Tensor) -> None:
            for local, piece in layout.pieces.items():
                target, source = piece.parts["data"].view(buffer), mixture.parameters[local].parameter.detach()
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)

        buffer = self._host.put(mixture.name, layout, fill)
        assert buffer is not None  # the host is pinned memory
        for local, piece in layout.pieces.items():
            parameter, view = mixture.parameters[local].parameter, piece.parts["data"].view(buffer)
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view
        self._seen[at] = self._look(mixture)

    def _refuse_thawed(self, mixture: Mixture) -> None:
        for local, one in mixture.parameters.items():
            if one.parameter.requires_grad and self._train != "nothing":
                raise StreamError(
                    f"{mixture.name}.{local} requires gradients now, and experts that cross by use are frozen; call "
                    "requires_grad_(False) on it, or close the stream and stream with experts='all'"
                )

    # ---- calls -------------------------------------------------------------------------------------------------------

    def wrap(self) -> None:
        """Put our forward in the place of every mixture's own."""
        for at, mixture in enumerate(self.mixtures):
            forward, taken = mixture.module.forward, inspect.signature(mixture.module.forward)
            routes = list(taken.parameters)[1]
            self._wrapped.append((mixture, mixture.module.__dict__.get("forward")))
            mixture.module.forward = self._routed(at, forward, taken, routes)

    def unwrap(self) -> None:
        for mixture, own_forward in self._wrapped:
            mixture.module.__dict__.pop("forward", None)
            if own_forward is not None:
                mixture.module.forward = own_forward
        self._wrapped = []

    def _routed(
        self, at: int, forward: Callable[..., Any], taken: inspect.Signature, routes: str
    ) -> Callable[..., Any]:
        mixture = self.mixtures[at]

        @functools.wraps(forward)
        def routed(*args: Any, **kwargs: Any) -> Any:
            chosen = self._chosen(at, taken.bind(*args, **kwargs).arguments[routes])
            saved = SavedExperts(self, at, chosen)
            with (
                self._in_place(mixture, self._weights(at, self.load(at, chosen))),
                save_where_weights_lie(saved) if torch.is_grad_enabled() else nullcontext(),
            ):
                output = forward(*args, **kwargs)
            with self._noted(at):  # the device has work now, while the host prepares what follows
                if not in_backward():
                    self.memory.keep(at, chosen)
                self.send_ahead(at)
            return output

        return routed

    @contextmanager
    def _in_place(self, mixture: Mixture, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the modules use these tensors, and after which their own Parameters again."""
        in_module: dict[str, Any] = mixture.module._parameters
        try:
            in_module.update(weights)
            yield
        finally:
            for local, one in mixture.parameters.items():
                in_module[local] = one.parameter

    def _weights(self, at: int, buffer: Tensor) -> dict[str, Tensor]:
        key = buffer.data_ptr(), at
        if key not in self._views:
            with torch.inference_mode(False):  # they are kept, and must work with gradients too
                pieces = self._layouts[at].pieces.items()
                self._views[key] = {local: piece.parts["data"].view(buffer) for local, piece in pieces}
        return self._views[key]

    def _chosen(self, at: int, routes: Tensor) -> Sequence[int]:
        """The experts that a call needs: those that the router chose (waits for the GPU), or all of them."""
        mixture = self.mixtures[at]
        if mixture.is_whole and in_backward():
            return range(mixture.count)
        flags = torch.zeros(mixture.count + 1, dtype=torch.bool, device=routes.device)
        # What lies behind the last expert stands for none: tokens of experts on other devices.
        flags.index_fill_(0, routes.reshape(-1).long().clamp(max=mixture.count), value=True)
        host = torch.empty(mixture.count + 1, dtype=torch.bool, pin_memory=flags.is_cuda)
        host.copy_(flags, non_blocking=True)
        mark = self._device.mark()
        if mixture.is_whole:
            self._unread.append((at, host, mark))
            return range(mixture.count)
        self._device.finish(mark)
        chosen = _numbers(host, mixture.count)
        if not in_backward():
            self.memory.count(at, chosen)
            mixture.chose(chosen)
        return chosen

    def load(self, at: int, chosen: Sequence[int]) -> Tensor:
        """Bring chosen experts of mixture `at` to the device; the buffer is valid until the next `load`."""
        buffer = self.memory.has(at, chosen)
        if buffer is None:
            with self._noted(at):
                buffer = self._load(at, chosen)
            self._direction = 1 if at == 0 or at > self._position else -1
            self._position = self._last_taken = at
        return buffer

    @contextmanager
    def _noted(self, at: int) -> Iterator[None]:
        """A context that remembers an error within: slots are then left with unknown contents."""
        try:
            yield
        except BaseException as error:
            self._is_broken = True
            if not isinstance(error, StreamError):
                error.add_note(f"bitplan: while waiting for experts of {self.mixtures[at].name}")
            raise

    def _load(self, at: int, chosen: Sequence[int]) -> Tensor:
        before, copied = self._device.mark(), self.memory.copied_experts
        buffer, transfer, waited = self.memory.load(at, chosen, self._where(at))
        self._record(at, transfer, copied)
        recorder = self._loader.recorder
        if recorder is not None and any(one is transfer or not one.is_done(self._device) for one in waited):
            recorder.waits.append((before, self._device.mark()))
        return buffer

    def send_ahead(self, at: int) -> None:
        """Copy what the next mixture is likely to need, once the work of this one is queued."""
        if self._last_taken != at:
            return
        self._last_taken = None
        following = at + self._direction
        if following == len(self.mixtures) and not torch.is_grad_enabled():
            following = 0  # a forward alone starts over
        if not (0 <= following < len(self.mixtures) and self._loader.may_send_ahead()):
            return
        mixture = self.mixtures[following]
        expected = range(mixture.count) if mixture.is_whole else mixture.expected
        if expected is not None:
            copied = self.memory.copied_experts
            self._record(following, self.memory.send_ahead(following, expected, self._where(following)), copied)

    def _record(self, at: int, transfer: Transfer | None, copied_before: int) -> None:
        recorder = self._loader.recorder
        if transfer is None or recorder is None:
            return
        sent = self.memory.copied_experts - copied_before
        sizes: dict[str, int] = {}
        for piece in self._layouts[at].pieces.values():
            sizes[piece.fmt.name] = sizes.get(piece.fmt.name, 0) + piece.nbytes // self.mixtures[at].count * sent
        recorder.loads.append((transfer, sizes))

    def _where(self, at: int) -> str:
        step = self._loader.step
        return f"{self.mixtures[at].name}, {'outside a step' if step is None else f'step {step}'}"


class SavedExperts:
    """Where the weights of one call lie, for `save_where_weights_lie`: backward takes the same experts again."""

    def __init__(self, experts: RoutedExperts, at: int, chosen: Sequence[int]) -> None:
        self._experts, self._at, self._chosen = experts, at, chosen

    @property
    def serial(self) -> int:
        return self._experts._loader.serial

    @property
    def spans(self) -> Spans:
        return self._experts.memory.spans

    def owner_of(self, storage: int) -> tuple[int, bool] | None:
        return (self._at, False) if self._experts.memory.is_owner(storage) else None

    def view(self, block: int, layout: ViewLayout, *, in_scratch: bool, serial: int) -> Tensor:
        name = self._experts.mixtures[block].name
        self._experts._loader.refuse_stale(name, serial)
        refuse_second_derivatives(name)
        buffer = self._experts.load(self._at, self._chosen)
        self._experts.send_ahead(self._at)  # a recomputed forward may have been stopped before it did
        return buffer.view(layout.dtype).as_strided(layout.size, layout.stride, layout.offset)


def _layout_of(mixture: Mixture) -> BlockLayout:
    specs = {local: one.spec for local, one in mixture.parameters.items()}
    return lay_out(specs, {local: own_format(spec, f"{mixture.name}.{local}") for local, spec in specs.items()})


def _numbers(flags: Tensor, count: int) -> list[int]:
    """The numbers of the experts whose flags are set."""
    numbers: list[int] = flags[:count].nonzero().flatten().tolist()
    return numbers
