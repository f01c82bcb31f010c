"""HostTraining: FP32 masters of streamed weights on the host, gradients copied back, AdamW during the next transfers.

    backward, device   gradient of a weight is ready -> gradient thread: copy it out to the host (`GradientMemory`),
                       small ones of a block together (`GradientBundle`)
    end_step           optimizer thread, block after block in forward order: AdamW on the masters, encode, mark fresh
    next step          the transfer thread waits for a block to be fresh, and no one else waits for anything

So the update of block 5 runs while block 0 crosses the bus. A step is applied as a whole or not at all: if any gradient
of any block did not arrive or is not finite, every master stays as it was, and the next begin_step, which waits until
that is known (`wait_checked`), raises; so the step after it is never computed for nothing. That is why no update
overlaps with its own backward, and why clipping takes no overlap away: it delays the first block by passes over all.

One call puts the whole update into the optimizer's queue: before that call the step does not count, after it the step
does, wherever Ctrl-C comes. Gradients belong to their step, so a dropped step leaves none behind. If the optimizer
itself fails between two blocks, the masters belong to two different steps, and every call raises until a state is
loaded. What is sent is derived from the master, never the other way round.

With `update_in_backward` the promise of a whole step is given up for time: a weight is stepped when its gradient has
arrived (`EarlyBlock`), of several blocks' the first in forward order, small ones with the block's last, and a block is
encoded behind its last weight;
what waits when the step ends is stepped as above, beside the next forward. So at the end of the backward the weights
that it came to last are to step, and not a block. Each block may compute once a step, so that all its gradients come in
one backward, and no block is loaded again once a weight of it may have been stepped: autograd has used a weight for the
last time when its gradient is whole, and the block's other weights are on the device.

Several processes first agree which blocks compute once in each of them. These are then averaged, stepped and encoded
one by one, the last one first, each when its gradients have come in all processes; the end of the step does so with
what is left. So all processes talk in one order, whatever comes first in each.

Memory that is new to the process is expensive: the kernel clears each page at its first use, which takes longer than
the bus. So a gradient is copied straight to its own place, the same in every step, and stays in its type until AdamW
reads it, which multiplies by the factor of clipping. A second gradient of a weight in a step (accumulation) is added in
float32, in memory that is made when it is first needed. A place is free again when its next gradient comes: the
weight's forward of that step has waited for the update that read it.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bitplan.base.errors import BlockNonFiniteError, StreamError, TransferError, did_you_mean
from bitplan.base.process_status import ANSWER_WAIT_S
from bitplan.streaming.find_blocks import ParameterSpec, Part, StreamedBlock, StreamedParameter, aligned
from bitplan.streaming.options import STATE_FORMATS, StreamRequest, check_norm, plan_states
from bitplan.streaming.saved_tensors import refuse_second_derivatives
from bitplan.streaming.telemetry import StepRecorder
from bitplan.streaming.training.adamw import AdamWSettings, pieces, setting
from bitplan.streaming.training.optimizers import HostOptimizer, Settings
from bitplan.streaming.training.processes import Processes, listed_ranks, several_processes, sum_of_bits
from bitplan.streaming.training.trained_weight import MASTER, DueStep, TrainedWeight, prepare_adamw, step_weights
from bitplan.streaming.transfer.copies import FiniteCheck, Latch, SentFlags, Worker, wait_for
from bitplan.streaming.transfer.devices import Mark, StreamDevice
from bitplan.streaming.transfer.host_memory import exact_buffer

NOTES = "found_inf_per_device"


def share_overflow(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None, host: object, *, is_finite: bool
) -> bool:
    """Note whether gradients of `host` are finite, for it and the optimizer; whether any of the two overflowed."""
    mine = torch.tensor(0.0 if is_finite else 1.0)
    states: Any = scaler._per_optimizer_states
    states[id(host)][NOTES] = {mine.device: mine}
    if optimizer is None:
        return not is_finite
    if states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    notes = states[id(optimizer)][NOTES]
    overflowed = not is_finite or any(bool(note.item()) for note in notes.values())
    if overflowed or not notes:  # a scaler refuses to step an optimizer of which it has no note
        notes[mine.device] = torch.tensor(float(overflowed))
    return overflowed


NUMBERS_AT_A_TIME = 2**24  # for torch's AdamW: with smaller pieces every call waits for all its threads
NUMBERS_ADDED_AT_A_TIME = 2**22
Key = tuple[str, str]  # block and parameter


class GradientMemory:
    """Host memory for the gradients of one stream."""

    def __init__(self, device: StreamDevice, specs: Mapping[str, Mapping[str, ParameterSpec]], *, pinned: bool) -> None:
        """Allocate; `pinned`: the device writes into gradients, else into one pinned buffer."""
        self.device, self.specs, self.pinned = device, specs, pinned
        self._tensors: dict[Key, Tensor] = {}
        self._wide: dict[Key, Tensor] = {}
        self._measured: Tensor | None = None  # one gradient in float32
        self._buffers = [self._block(block, parameters) for block, parameters in specs.items()]
        largest = max((spec.nbytes for parameters in specs.values() for spec in parameters.values()), default=0)
        self.staging = exact_buffer(largest)
        for buffer in [self.staging, *(self._buffers if pinned else ())]:
            device.pin(buffer)

    def _block(self, block: str, parameters: Mapping[str, ParameterSpec]) -> Tensor:
        parts, end = {}, 0
        for name, spec in parameters.items():
            parts[name] = Part(end, spec.dtype, spec.shape)
            end = aligned(end + spec.nbytes)
        buffer = exact_buffer(end)
        self._tensors |= {(block, name): part.view(buffer) for name, part in parts.items()}
        return buffer

    def place(self, key: Key, dtype: torch.dtype) -> Tensor | None:
        """The memory of a weight's gradient, if the device may copy the first one of a step straight to it."""
        gradient = self._tensors[key]
        return gradient if self.pinned and gradient.dtype == dtype else None

    def staged(self, gradient: Tensor) -> Tensor:
        """The memory that the device copies any other gradient to."""
        return self.staging[: gradient.nbytes].view(gradient.dtype).view(gradient.shape)

    def added(self, key: Key, arrived: Tensor, before: Tensor | None) -> Tensor:
        """The sum of a weight's gradients, after one that was `staged`."""
        if before is None:
            return self._tensors[key].copy_(arrived)
        wide = self.wide(key, before)
        for into, part in pieces((wide, arrived), NUMBERS_ADDED_AT_A_TIME):
            into.add_(part)  # another type is widened in memory of this size, which the process has already
        return wide

    def zeros(self, key: Key) -> Tensor:
        """A gradient of a weight that has none in this process and has one in another."""
        return self._tensors[key].zero_()

    def wide(self, key: Key, gradient: Tensor) -> Tensor:
        """A gradient in float32: itself if it has this type, else a copy in memory of its own."""
        if gradient.dtype == torch.float32:
            return gradient
        if key not in self._wide:
            self._wide[key] = torch.empty(gradient.shape)
        return self._wide[key].copy_(gradient)

    def norm(self, gradient: Tensor) -> Tensor:
        """The norm of a gradient, computed in float32."""
        if gradient.dtype != torch.float32:
            if self._measured is None:
                sizes = [math.prod(spec.shape) for parameters in self.specs.values() for spec in parameters.values()]
                self._measured = torch.empty(max(sizes))
            gradient = self._measured[: gradient.numel()].view(gradient.shape).copy_(gradient)
        norm: Tensor = torch.linalg.vector_norm(gradient)
        return norm

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients, and of their sums in float32; not the buffers of one gradient."""
        return sum(one.nbytes for one in (*self._buffers, *self._wide.values()))

    def close(self) -> None:
        for buffer in [self.staging, *self._buffers]:
            self.device.unpin(buffer)
        self._tensors.clear()
        self._wide.clear()
        self._measured = None
        self._buffers, self.staging = [], exact_buffer(0)


@dataclass(eq=False)
class EarlyBlock:
    """A block whose weights are stepped within the backward.

    Weights are handed to the optimizer's thread as their gradients come, small ones with the block's last.
    """

    unstepped: int  # weights; counted by the optimizer's thread
    missing: int  # gradients that are still to come
    seen: set[str] = field(default_factory=set)  # weights whose gradients have come
    waiting: list[str] = field(default_factory=list)  # small ones of them, which are not handed over
    is_changing: bool = False  # some were, so the bytes on the host may change at any time


@dataclass(eq=False)
class GradientBundle:
    """Gradients of one block on the device, which go to the gradient thread together."""

    block: str
    recorder: StepRecorder
    gradients: dict[str, Tensor] = field(default_factory=dict)  # by parameter
    nbytes: int = 0
    due: list[str] = field(default_factory=list)  # with update_in_backward: weights that may be stepped behind them


@dataclass(eq=False)
class StepGradients:
    """The gradients of one step as they arrive, by block and parameter; dropped when the step is over."""

    step: int
    memory: GradientMemory
    sums: dict[Key, Tensor] = field(default_factory=dict)
    factor: float = 1.0  # that AdamW multiplies all of them with, in float32
    expected: int = 0
    arrived: int = 0
    failure: Exception | None = None
    unfinished: set[int] = field(default_factory=set)  # backwards that have begun and not ended
    overflowed: bool | None = None  # None until `unscale_gradients` has looked
    is_averaged: bool = False  # over all processes
    calls: Counter[str] = field(default_factory=Counter)  # of blocks, in forwards
    early: dict[str, EarlyBlock] = field(default_factory=dict)  # with update_in_backward
    update: _Update | None = None  # with update_in_backward, from the first gradient on
    bundle: GradientBundle | None = None  # that is not handed over
    at_end_of_backward: Callable[[], None] = lambda: None

    def note_backward(self) -> None:
        """Note that a backward has begun. Autograd calls back at its end, unless something in it failed."""
        task = torch._C._current_graph_task_id()
        if task not in self.unfinished:
            self.unfinished.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))

    def _end_backward(self, task: int) -> None:
        self.at_end_of_backward()
        self.unfinished.discard(task)

    def require_backward_ended(self) -> None:
        if self.unfinished:
            raise StreamError(
                f"step {self.step}: a backward failed, so that only some weights have their gradients, and the step "
                "cannot be applied; begin_step drops it"
            )

    def kind(self, key: Key) -> int:
        """Return 0 where a weight has no gradient yet, 1 where it has one in its own type, 2 where it is in float32."""
        block, name = key
        gradient = self.sums.get(key)
        return 0 if gradient is None else 1 if gradient.dtype == self.memory.specs[block][name].dtype else 2

    def make_alike(self, kinds: Mapping[Key, int]) -> None:
        """Give weights the kinds of gradients that they have in other processes; those without one get zeros."""
        for key, kind in kinds.items():
            if kind > 0:
                gradient = self.sums[key] if key in self.sums else self.memory.zeros(key)
                self.sums[key] = gradient if kind == 1 else self.memory.wide(key, gradient)

    def apply_factor(self) -> None:
        """Multiply the gradients themselves, for clipping that was done before."""
        if self.factor != 1.0:
            for key, gradient in self.sums.items():
                self.sums[key] = self.memory.wide(key, gradient).mul_(self.factor)
            self.factor = 1.0


@dataclass
class _Graded:
    """An object with the one field of a parameter that torch's clipping reads."""

    grad: Tensor


def clip_step(gradients: StepGradients, keys: Sequence[Key], max_norm: float, also: Sequence[Tensor] = ()) -> float:
    """Scale all gradients, those of `also` (parameters) in place, to a norm of at most `max_norm`; the norm before."""
    gradients.apply_factor()
    norms = [gradients.memory.norm(gradients.sums[key]) for key in keys if key in gradients.sums]
    others = [one.grad for one in also if one.grad is not None]
    total = get_total_norm([*(norm.view(1) for norm in norms), *others]) if others else _norm_of(norms)
    norm = float(total)
    if not math.isfinite(norm):
        raise BlockNonFiniteError(
            f"step {gradients.step}: the norm of all gradients is {norm}; the masters are as before it"
        )
    factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))  # below 1 for norms just under max_norm, too
    if factor < 1.0:
        gradients.factor = factor
        clip_grads_with_norm_(cast(list[Tensor], [_Graded(one) for one in others]), max_norm, total)
    return norm


def _norm_of(norms: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.tensor(0.0)


Result = TypeVar("Result")
FROZEN = -1  # in the place of a gradient's kind: the weight does not require one in this process
STEPPED_ALONE = 2**16  # numbers of a weight: handing it over takes the host as long as AdamW takes for so many
BUNDLE_BYTES = 2**22  # gradients of a block go to their thread when they are so many: a tenth of a ms on the bus
GRADIENTS_WAITING = 12  # large gradients, or bundles, on the device before backward has to wait


@dataclass(eq=False)
class _Update:
    """The progress of one step's update: which weights and blocks were stepped, and which bytes are up to date."""

    gradients: StepGradients
    flags: SentFlags | None  # None until the step ends
    settings: Mapping[Key, Settings]
    fresh: Mapping[str, Latch]
    checked: Latch = field(default_factory=Latch)  # it is known whether the step counts
    begun: set[str] = field(default_factory=set)  # blocks; `stepped` and `encoded` are, too
    stepped: list[str] = field(default_factory=list)
    encoded: list[str] = field(default_factory=list)
    weights: set[Key] = field(default_factory=set)  # that were stepped
    sent: set[Key] = field(default_factory=set)  # and put where they are sent from
    ready: dict[str, list[tuple[list[str], SentFlags]]] = field(default_factory=dict)  # to step before the step ends
    order: list[str] | None = None  # blocks that several processes are to step together; None until they agreed
    is_ending: bool = False

    @functools.cached_property
    def described(self) -> str:
        """The settings, as processes compare them."""
        return str(list(dict.fromkeys(map(str, {id(one): one for one in self.settings.values()}.values()))))

    def wake_waiters(self) -> None:
        """Wake all threads that wait for gradients, because no more will come."""
        for latch in (self.checked, *self.fresh.values()):
            latch.set()


class HostTraining:
    """Masters, gradients and optimizer of the streamed weights that require gradients."""

    def __init__(self, blocks: Sequence[StreamedBlock], device: StreamDevice, options: StreamRequest) -> None:
        self._device, self._timeout_s, self._shards = device, options.timeout_s, options.shard_optimizer
        self._blocks = {block.name: block for block in blocks}
        self.processes: Processes | None = None
        self._edits = self._loaded = 0  # by other code, of weights and states: sums to compare with other processes'
        self.settings: Settings = options.optimizer or AdamWSettings()
        self.updates_early = options.update_in_backward
        self.max_norm = options.clip_grad_norm
        self.encode_early: Callable[[str], None] = lambda _block: None
        self.wait_for_readers: Callable[[str, Callable[[], bool]], None] = lambda _block, _is_over: None
        self.lr = self.settings.lr
        self._own_settings: Mapping[Key, Settings] = {}
        self.gradient_norm: float | None = None  # before clipping, in the last step that was clipped or measured
        trained = {
            block.name: {name: one for name, one in block.parameters.items() if one.parameter.requires_grad}
            for block in blocks
        }
        trained = {block: parameters for block, parameters in trained.items() if parameters}
        specs = {block: {name: one.spec for name, one in parameters.items()} for block, parameters in trained.items()}
        by_name = {f"{block}.{name}": spec for block, parameters in specs.items() for name, spec in parameters.items()}
        self.plan = plan_states(options.moments, by_name)
        self._weights: dict[str, dict[str, TrainedWeight]] = {}
        for block, parameters in trained.items():
            small = {name: self.plan[f"{block}.{name}.moments"].format == STATE_FORMATS["int8"] for name in parameters}
            self._weights[block] = {
                name: TrainedWeight(f"{block}.{name}", one, "int8" if small[name] else "float32")
                for name, one in parameters.items()
            }
        self._shapes = {(block, name): one.shape for block, of in self._weights.items() for name, one in of.items()}
        self._keys = list(self._shapes)
        for key, settings in self.settings_now().items():
            self.weight(*key).require_steppable(settings, is_divided=False)
        if isinstance(self.settings, AdamWSettings):
            prepare_adamw(math.prod(spec.shape) for spec in by_name.values())
        self._gradient_memory = GradientMemory(device, specs, pinned=options.host == "pinned")
        self._scratch = torch.empty(max(1, min(NUMBERS_AT_A_TIME, self._gradient_memory.staging.nbytes)))
        names = [f"{block}.{name}" for block, name in self._keys]
        self._flag_of = {key: number for number, key in enumerate(self._keys)}
        self._finite = FiniteCheck(device, names)
        self.failure: Exception | None = None
        self.torn: str | None = None  # why the masters belong to two different steps
        self.is_settled = True  # whether all updates were waited for, and the model's Parameters made current
        self.buffers_to_send: Callable[[str], Mapping[str, Tensor]] = lambda _block: {}  # of masters, in a plain type
        self.sent: Collection[str] = ()  # the masters of a block that its last step has put there
        self.unencoded: set[str] = set()  # blocks whose bytes are older than their masters, after a failure
        self._open: StepGradients | None = None
        self._update: _Update | None = None  # the last update
        self._gradients = Worker("gradient", GRADIENTS_WAITING)
        self._updates = Worker("optimizer")
        self._bundle_bytes = BUNDLE_BYTES
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and "_is_made" in self.__dict__ and not hasattr(self, name):
            hint = did_you_mean(name, ("lr", "max_norm", "own_settings"))
            raise AttributeError(
                f"stream.training has no {name!r}{hint}; lr and max_norm may be set while it trains, others are "
                "given before: StreamOptions(optimizer=AdamWSettings(betas=(0.9, 0.95)))"
            )
        super().__setattr__(name, value)

    @property
    def lr(self) -> float:
        """The learning rate of all blocks from the next update on; a schedule may set it."""
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._lr = setting("lr", lr)

    @property
    def max_norm(self) -> float | None:
        """The largest norm of all streamed gradients, from the next update on; None does not clip."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, norm: float | None) -> None:
        if norm is not None:
            check_norm("max_norm", norm)
            self._refuse_early("clipping needs all of them first")
        self._max_norm = norm

    @property
    def own_settings(self) -> Mapping[Key, Settings]:
        """Settings of weights that have others than `settings` and `lr`, by block and parameter."""
        return self._own_settings

    @own_settings.setter
    def own_settings(self, settings: Mapping[Key, Settings]) -> None:
        for key, of_weight in settings.items():
            self.weight(*key).require_steppable(of_weight, is_divided=self.is_sharded)
        self._own_settings = settings

    def join(self, processes: Processes, frozen: Mapping[str, Tensor]) -> None:
        """Train with other processes, which have the same weights, from now on; nothing may be under way."""
        masters = {name: part for one in self.trained().values() for name, part in one.parts().items()}
        processes.require_same({**masters, **frozen})
        if self._shards:
            needed = self.settings_now()
            whole = [key for key, one in needed.items() if isinstance(one, HostOptimizer) and not one.steps_parts]
            owners = processes.owners({key: math.prod(self.weight(*key).shape) for key in whole})
            for key, settings in needed.items():
                self.weight(*key).divide(processes, settings, owners.get(key))
        self.processes = processes

    def read_parameter(self, block: str, name: str, parameter: Tensor) -> None:
        """Take a weight over that other code has changed, and note that for a look at other processes' weights."""
        weight = self.weight(block, name)
        weight.read_parameter()
        if several_processes():
            self._edits = zlib.crc32(f"{weight.name} {sum_of_bits(parameter)}".encode(), self._edits)

    @property
    def _update_s(self) -> float:
        """Seconds until an update counts as stuck.

        With several processes it is more than twice the timeout of one, so that the error of the collective, which
        names the late process, comes first.
        """
        return self._timeout_s if self.processes is None else 2 * self._timeout_s + 2 * ANSWER_WAIT_S

    @property
    def is_sharded(self) -> bool:
        return self._shards and self.processes is not None

    def settings_now(self) -> dict[Key, Settings]:
        """The settings of every weight from the next update on, by block and parameter."""
        common, single = self.settings.with_lr(self.lr), self._own_settings
        return {key: single.get(key) or common.of(shape) for key, shape in self._shapes.items()}

    def trains(self, block: str, name: str) -> bool:
        return name in self._weights.get(block, {})

    def trained_in(self, block: str) -> Collection[str]:
        """The names of a block's trained parameters."""
        return self._weights.get(block, {}).keys()

    def parameters(self) -> dict[str, StreamedParameter]:
        """The model's Parameters of weights that are trained now, by full name."""
        trained = {f"{block}.{name}": self._blocks[block].parameters[name] for block, name in self._keys}
        return {name: one for name, one in trained.items() if one.parameter.requires_grad}

    def weight(self, block: str, name: str) -> TrainedWeight:
        return self._weights[block][name]

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes on the host now: masters beside the Parameters, optimizer states, gradients."""
        of_weights = [one.host_bytes for one in self.trained().values()]
        return {
            "masters": sum(one["masters"] for one in of_weights),
            "states": sum(one["states"] for one in of_weights),
            "gradients": self._gradient_memory.nbytes,
        }

    def limit_gradients(self, in_flight: int | None) -> None:
        """Set how many gradients may be on their way to the host before backward waits; None: the default."""
        self._gradients.max_unfinished = min(in_flight or GRADIENTS_WAITING, GRADIENTS_WAITING)
        self._bundle_bytes = BUNDLE_BYTES if in_flight is None else 0

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Open a step, whose gradients are collected from now on."""
        if not self._gradients.is_alive:
            self._replace_gradient_thread()
        self._finite.start()
        gradients = self._open = StepGradients(step, self._gradient_memory)
        gradients.at_end_of_backward = lambda: self._hand_over(gradients)

    @property
    def gradients(self) -> StepGradients:
        """The gradients of the open step."""
        assert self._open is not None
        return self._open

    def receive(self, block: str, name: str, gradients: StepGradients, recorder: StepRecorder, leaf: Tensor) -> None:
        """Take the gradient of a leaf from the device; called in backward, and returns at once unless too many wait.

        A call of the gradient thread takes the host as long as some megabytes take on the bus, so small gradients of a
        block go together.
        """
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise StreamError(
                f"{block}.{name}, step {gradients.step}: its gradient is sparse, and gradients go to the host whole; "
                "make the layer without sparse=True, or keep this block out of the stream"
            )
        if torch.is_grad_enabled():
            refuse_second_derivatives(f"{block}, step {gradients.step}")
        gradients.note_backward()
        early = gradients.early.get(block)
        if early is not None and name in early.seen:
            raise StreamError(
                f"{block}.{name}, step {gradients.step}: update_in_backward=True takes one backward a step, and this "
                "is another; train without that option"
            )
        gradient = gradient.contiguous()
        recorder.expected_out += 1
        gradients.expected += 1
        bundle = gradients.bundle
        if bundle is not None and (bundle.block != block or name in bundle.gradients):
            self._hand_over(gradients)
            bundle = None
        if bundle is None:
            bundle = gradients.bundle = GradientBundle(block, recorder)
        bundle.gradients[name] = gradient
        bundle.nbytes += gradient.nbytes
        is_last = self.updates_early and self._count(bundle, name, gradients)
        if is_last or bundle.nbytes >= self._bundle_bytes:
            self._hand_over(gradients)

    def _hand_over(self, gradients: StepGradients) -> None:
        """Give the gradients that wait to their thread."""
        bundle, gradients.bundle = gradients.bundle, None
        if bundle is None:
            return
        block, update = bundle.block, gradients.update
        filled = {name: one for name, one in bundle.gradients.items() if one.numel()}
        self._finite.look_at_gradients([self._flag_of[block, name] for name in filled], list(filled.values()))
        after = self._device.mark()
        what = f"{block}.{next(reversed(bundle.gradients))}, step {gradients.step}: gradient"
        flags = self._finite.send(gradients.step) if bundle.due else None

        def take() -> None:
            self._add(bundle, gradients, after, what)
            if update is not None and flags is not None:
                update.ready.setdefault(block, []).append((bundle.due, flags))
                self._updates.submit(lambda: self._step_ready(update), what)

        self._gradients.submit(take, what, timeout_s=self._timeout_s)

    # ---- updates within the backward ---------------------------------------------------------------------------------

    def note_call(self, block: str) -> None:
        """Note that a block computes, and not for a backward."""
        gradients = self._open
        if not self.updates_early or gradients is None:
            return
        if gradients.update is not None:
            raise StreamError(
                f"{block}, step {gradients.step}: a forward after the step's backward, which with "
                "update_in_backward=True has changed weights; end_step first, or accumulate without that option"
            )
        gradients.calls[block] += 1

    def is_changing(self, block: str) -> bool:
        """Whether the bytes of a block may change before the step's end."""
        early = None if self._open is None else self._open.early.get(block)
        return early is not None and early.is_changing

    def _count(self, bundle: GradientBundle, name: str, gradients: StepGradients) -> bool:
        """In backward: count a gradient, and note which weights it lets step; whether it is the block's last."""
        block = bundle.block
        if gradients.update is None:
            gradients.update = self._new_update(gradients)
            self.is_settled = False
        if gradients.calls[block] != 1:  # it computed more than once: more gradients may come
            return False
        if block not in gradients.early:
            count = sum(not self._is_frozen((block, one)) for one in self._weights[block])
            gradients.early[block] = EarlyBlock(count, count)
        early = gradients.early[block]
        early.missing -= 1
        early.seen.add(name)
        if self.processes is not None or math.prod(self.weight(block, name).shape) < STEPPED_ALONE:
            early.waiting.append(name)  # processes average a block at once
        else:
            bundle.due.append(name)
        if not early.missing:
            bundle.due += early.waiting
        early.is_changing |= bool(bundle.due)
        return not early.missing

    def _step_ready(self, update: _Update) -> None:
        """Step, on the optimizer's thread, weights whose gradients have come."""
        gradients = update.gradients
        if update.is_ending or self.failure is not None or gradients.failure is not None:
            return
        try:
            if self.processes is None:
                self._step_first_ready(update)
            else:
                self._step_ready_together(update)
        except Exception as error:
            gradients.failure = gradients.failure or _named(error, f"step {gradients.step}: update")
        except BaseException as error:
            gradients.failure = TransferError(f"step {gradients.step}: update: the thread was stopped ({error!r})")
            self._note_torn(update, gradients.failure)
            raise

    def _step_first_ready(self, update: _Update) -> None:
        """Step weights of the first block in forward order that has some with gradients."""
        gradients = update.gradients
        block = next(name for name in self._weights if update.ready.get(name))
        names, flags = update.ready[block].pop(0)
        if error := self._error_of_not_finite(self._not_finite(block, names, flags), gradients):
            raise error
        self._prepare_early(update, block)
        self._step_weights(update, block, names)
        gradients.early[block].unstepped -= len(names)
        if not gradients.early[block].unstepped:
            update.stepped.append(block)
            self._encode(update, block, self.encode_early)

    def _not_finite(self, block: str, names: Iterable[str], flags: SentFlags) -> list[str]:
        full_names = {f"{block}.{name}" for name in names}
        return [name for name in self._finite.not_finite(flags) if name in full_names]

    def _prepare_early(self, update: _Update, block: str) -> None:
        """Make the host ready for the first step of a block's weights, before the step ends."""
        if block not in update.begun:
            self.wait_for_readers(block, lambda: update.is_ending)
        if not update.begun:
            self._make_states(update.settings, self._keys)

    def _step_ready_together(self, update: _Update) -> None:
        """Step those blocks whose gradients have come here, when their turn has come, with all other processes."""
        gradients = update.gradients
        if update.order is None:
            self._agree_on_order(update, None)
        while update.order and update.ready.get(update.order[0]):
            ((names, flags),) = update.ready.pop(block := update.order[0])
            bad = self._not_finite(block, names, flags)
            self._step_together(update, self._error_of_not_finite(bad, gradients))

    def _agree_on_order(self, update: _Update, failure: Exception | None) -> None:
        """Find the blocks that compute once in every process; these are stepped in this order, the last one first."""
        gradients, update.order = update.gradients, []
        calls = [FROZEN if self._is_frozen(key) else gradients.calls[key[0]] for key in self._keys]
        rows = self._agree(gradients, "backward", failure, calls, update.described)
        self._refuse_partly_frozen(rows, gradients.step)
        of_block = {
            block: {row[self._flag_of[block, name]] for name in names for row in rows}
            for block, names in self._weights.items()
        }
        update.order = [block for block in reversed(self._weights) if of_block[block] - {FROZEN} == {1}]

    def _step_together(self, update: _Update, failure: Exception | None) -> None:
        """Average, step and encode the next block in all processes, unless one of them has failed."""
        assert update.order
        gradients, (block, *later) = update.gradients, update.order
        update.order = []  # of a failure here all processes know, and they meet at the end of the step
        kinds = [gradients.kind(key) for key in self._keys]
        rows = self._agree(gradients, f"gradients of {block}", failure, kinds, update.described)
        update.order = later
        self._average(gradients, rows, [(block, name) for name in self._weights[block]])
        self._prepare_early(update, block)
        self._step_block(update, block)
        self._encode(update, block, self.encode_early)

    def _refuse_early(self, reason: str) -> None:
        if self.updates_early:
            raise StreamError(
                f"update_in_backward=True steps weights as their gradients arrive, but {reason}; stream without it"
            )

    def _note_torn(self, update: _Update, failure: Exception | None) -> None:
        """Note, after a step that broke off, whether the masters are of two steps."""
        self.unencoded.update(update.begun - set(update.encoded))
        if update.begun and len(update.stepped) < len(self._weights):
            self.torn = (
                f"step {update.gradients.step}: update broke off after {len(update.stepped)} of {len(self._weights)} "
                f"blocks ({failure}): the weights are of two steps; load a state (stream.load or load_state_dict)"
            )

    def _add(self, bundle: GradientBundle, gradients: StepGradients, after: Mark, what: str) -> None:
        """Copy gradients to the host, on their thread, and add them up; first ones in one turn of the bus."""
        try:
            if gradients.overflowed is not None:
                raise StreamError(f"{what}: it came after unscale_gradients; call that after the step's last backward")
            if gradients.is_averaged:
                raise StreamError(
                    f"{what}: it came after clip_gradients, which has averaged the gradients of all processes; call "
                    "that after the step's last backward"
                )
            gradients.apply_factor()  # of clipping before this backward
            memory, sums = gradients.memory, gradients.sums
            direct, staged = dict[Key, Tensor](), dict[Key, Tensor]()
            pairs = []
            for name, gradient in bundle.gradients.items():
                key = bundle.block, name
                target = None if key in sums else memory.place(key, gradient.dtype)
                if target is None:
                    staged[key] = gradient
                else:
                    direct[key] = target
                    pairs.append((target, gradient))
            if pairs:
                self._copy_out(pairs, after)
                sums.update(direct)
            for key, gradient in staged.items():
                target = memory.staged(gradient)
                self._copy_out([(target, gradient)], after)
                sums[key] = memory.added(key, target, sums.get(key))
            gradients.arrived += len(bundle.gradients)
            bundle.recorder.copied_out(bundle.gradients.values())
        except Exception as error:
            gradients.failure = gradients.failure or _named(error, what)
        except BaseException as error:
            gradients.failure = TransferError(f"{what}: the thread was stopped ({error!r})")
            raise

    def _copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark) -> None:
        """Copy gradients from the device to targets on the host, and wait until they are there."""
        self._device.finish(self._device.copy_all_out(pairs, after).end)

    def arrived(self) -> list[Tensor]:
        """The gradients of the open step, in the order of the weights, when all of them are on the host."""
        gradients = self.gradients
        self._await_arrival(gradients)
        return [gradients.sums[key] for key in self._keys if key in gradients.sums]

    def clip(self, max_norm: float, also: Sequence[Tensor]) -> float:
        """Wait for the gradients of the step, and scale them, with those of `also`, to a common norm of `max_norm`."""
        self._refuse_early("clipping needs all of them first")
        if self.gradients.overflowed:
            return math.inf  # the step is skipped
        gradients, flags = self.gradients, self._finite.send(self.gradients.step)
        self._in_turn(
            lambda: self._settle_gradients(
                gradients, "clip_gradients", lambda: self._await_gradients(gradients, flags), max_norm
            )
        )
        return self._scale(gradients, max_norm, also)

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None) -> bool:
        """Wait for the gradients of the step, and divide them by the scaler's scale; whether any overflowed."""
        self._refuse_early("a GradScaler looks at all of them first")
        gradients = self.gradients
        if gradients.overflowed is not None:
            raise StreamError(f"unscale_gradients: step {gradients.step} has been unscaled; once a step is right")
        if not scaler.is_enabled():
            return False
        flags = self._finite.send(gradients.step)
        is_finite = self._in_turn(
            lambda: self._settle_gradients(
                gradients, "unscale_gradients", lambda: self._look_at_scaled(gradients, flags)
            )
        )
        gradients.overflowed = share_overflow(scaler, optimizer, self, is_finite=is_finite)
        gradients.apply_factor()
        gradients.factor = 1.0 / scaler.get_scale()
        return gradients.overflowed

    def _look_at_scaled(self, gradients: StepGradients, flags: SentFlags) -> bool:
        """Wait until the gradients of a scaled loss are on the host, and return whether all of them are finite."""
        self._await_arrival(gradients)
        return not self._finite.not_finite(flags)

    def _settle_gradients(
        self,
        gradients: StepGradients,
        call: str,
        check: Callable[[], bool],
        settings: object = None,
        stepped: Collection[Key] = (),
    ) -> bool:
        """Make the gradients the mean over all processes, once `check` has passed in each; False where one says so.

        settings: of this call, the same in all processes. stepped: weights that were stepped before, by their mean.
        """
        if self.processes is None:
            return check()
        failure, is_finite = None, False
        try:
            is_finite = check()
        except Exception as error:
            failure = error
        kinds = [gradients.kind(key) or FROZEN * self._is_frozen(key) for key in self._keys]
        rows = self._agree(gradients, call, failure, kinds, settings, is_finite=is_finite)
        if not rows:
            return False
        if not gradients.is_averaged:
            gradients.apply_factor()
            self._refuse_partly_frozen(rows, gradients.step)
            self._average(gradients, rows, [key for key in self._keys if key not in stepped])
            gradients.is_averaged = True
        return True

    def _agree(
        self,
        gradients: StepGradients,
        call: str,
        failure: Exception | None,
        notes: Sequence[int],
        settings: object,
        *,
        is_finite: bool = True,
    ) -> list[list[int]]:
        """Exchange a note on every weight with all processes, by rank; none where gradients of one are not finite.

        All raise where one has failed, or where they would train unlike weights.
        """
        assert self.processes is not None
        common = [self._edits, self._loaded, zlib.crc32(repr(settings).encode()), int(is_finite)]
        rows = self.processes.agree(call, gradients.step, failure, [*common, *notes])
        self._refuse_unlike(rows, f"step {gradients.step}: {call}", settings)
        return [row[len(common) :] for row in rows] if all(row[len(common) - 1] for row in rows) else []

    def _average(self, gradients: StepGradients, rows: Sequence[Sequence[int]], keys: Sequence[Key]) -> None:
        """Make gradients of these weights the mean over all processes; rows: the kinds of all weights, by rank."""
        assert self.processes is not None
        most = {key: max(row[self._flag_of[key]] for row in rows) for key in keys}
        gradients.make_alike(most)
        self.processes.average([gradients.sums[key] for key, kind in most.items() if kind > 0])

    def _is_frozen(self, key: Key) -> bool:
        block, name = key
        return not self._blocks[block].parameters[name].parameter.requires_grad

    def _refuse_unlike(self, rows: Sequence[Sequence[int]], what: str, settings: object) -> None:
        """Refuse processes whose weights would part: changed or loaded in some alone, or trained by other settings."""
        edits, loaded, chosen = ([rank for rank, row in enumerate(rows) if row[at] != rows[0][at]] for at in range(3))
        if edits and not self.is_sharded and self.processes is not None:  # they may be the same again
            self.processes.require_same(
                {name: part for one in self.trained().values() for name, part in one.parts().items()}
            )
            self._edits, edits = 0, []
        for ranks, reason in (
            (
                edits,
                "weights were changed in some processes alone: change them alike in each, and load one state in all",
            ),
            (loaded, "a state was loaded in some processes alone: load one state in all"),
            (chosen, f"learning rate, optimizer or clipping differ: set them alike in each; here {settings}"),
        ):
            if ranks:
                raise StreamError(f"{what}: {listed_ranks(ranks)} would train other weights than rank 0: {reason}")

    def _refuse_partly_frozen(self, kinds: Sequence[Sequence[int]], step: int) -> None:
        """Refuse a weight that is frozen in some processes: the others would train it by their gradients alone."""
        for key, of_ranks in zip(self._keys, zip(*kinds, strict=True), strict=True):
            frozen = [rank for rank, kind in enumerate(of_ranks) if kind == FROZEN]
            if 0 < len(frozen) < len(of_ranks):
                raise StreamError(
                    f"{'.'.join(key)}, step {step}: frozen (requires_grad=False) in {listed_ranks(frozen)} and trained "
                    "in the others: all processes train the same weights; call requires_grad_ on it alike in each"
                )

    def _in_turn(self, call: Callable[[], Result]) -> Result:
        """Run a call that talks to other processes: on the optimizer's thread, so that all have it in one order."""
        if self.processes is None:
            return call()
        results: list[Result] = []
        errors: list[Exception] = []
        done = Latch()

        def run() -> None:
            try:
                results.append(call())
            except Exception as error:
                errors.append(error)
            finally:
                done.set()

        self._updates.submit(run, "talking to other processes")
        wait_for(done, self._updates, self._update_s, "talking to other processes")
        if errors:
            raise errors[0]
        return results[0]

    def _await_gradients(self, gradients: StepGradients, flags: SentFlags) -> bool:
        self._await_arrival(gradients)
        if error := self._error_of_not_finite(self._finite.not_finite(flags), gradients):
            raise error
        return True

    def _error_of_not_finite(self, bad: Sequence[str], gradients: StepGradients) -> BlockNonFiniteError | None:
        if not bad:
            return None
        is_changed = gradients.update is not None and gradients.update.begun
        masters = "some masters have been stepped" if is_changed else "the masters are as they were before the step"
        return BlockNonFiniteError(f"{bad[0]}, step {gradients.step}: gradient holds NaN or infinity; {masters}")

    def _await_arrival(self, gradients: StepGradients) -> None:
        gradients.require_backward_ended()
        self._gradients.drain(self._timeout_s)
        if gradients.failure is not None:
            raise gradients.failure
        if gradients.arrived < gradients.expected:
            raise TransferError(
                f"step {gradients.step}: {gradients.arrived} of {gradients.expected} gradients arrived: the gradient "
                "thread has died, or took too long; no master was changed"
            )

    def _scale(self, gradients: StepGradients, max_norm: float, also: Sequence[Tensor] = ()) -> float:
        self.gradient_norm = clip_step(gradients, self._keys, max_norm, also)
        return self.gradient_norm

    def abandon(self) -> None:
        """Forget a step that will not be ended; the update before it, and its failure, still count."""
        gradients, self._open = self._open, None
        update = None if gradients is None else gradients.update
        if update is not None:
            update.is_ending = True
        self.finish()
        if update is not None and update.begun and self.torn is None:
            update.stepped = update.stepped[: len(self._weights) - 1]
            self._note_torn(update, update.gradients.failure or StreamError("end_step was not called"))

    # ---- updates -----------------------------------------------------------------------------------------------------

    def update(self, encode_block: Callable[[str], None], check_step: Callable[[], None]) -> None:
        """Queue the optimizer for every block. `check_step` raises if the step must not count."""
        # The settings of now: the user may set the next step's before the optimizer thread runs this update.
        update, new = self.gradients.update, self._new_update(self.gradients)
        if update is None:
            update = new
        elif update.settings != new.settings:
            raise StreamError(
                f"step {self.gradients.step}: the learning rate or another setting was changed after the backward, "
                "which with update_in_backward=True has stepped weights by the old one; change it before the backward"
            )
        update.flags, update.is_ending = self._finite.send(self.gradients.step), True
        self.is_settled = False
        self._updates.submit(lambda: self._apply(update, encode_block, check_step), f"step {update.gradients.step}")
        self._update, self._open = update, None

    def _new_update(self, gradients: StepGradients) -> _Update:
        return _Update(gradients, None, self.settings_now(), {name: Latch() for name in self._weights})

    def _apply(self, update: _Update, encode_block: Callable[[str], None], check_step: Callable[[], None]) -> None:
        gradients = update.gradients
        what, earlier = f"step {gradients.step}: update", self.failure
        try:
            if not gradients.overflowed:
                self._require_whole(update, check_step)
            elif earlier is not None:
                raise earlier
            if not gradients.overflowed:
                self._make_states(update.settings, gradients.sums)
                update.checked.set()
                for block in self._weights:
                    if block not in update.stepped:
                        self._step_block(update, block)
                        self._encode(update, block, encode_block)
        except Exception as error:
            lost = None if earlier is None else _also_lost(earlier, gradients.step)
            self.failure = lost or self.failure or _named(error, f"step {gradients.step}")
        except BaseException as error:
            self.failure = self.failure or TransferError(f"{what}: the thread was stopped ({error!r})")
            raise
        finally:
            self._note_torn(update, self.failure)
            gradients.sums.clear()
            update.wake_waiters()

    def _require_whole(self, update: _Update, check_step: Callable[[], None]) -> None:
        def check() -> bool:
            if self.failure is not None:  # of an earlier step
                raise self.failure
            self._gradients.drain(self._timeout_s)
            check_step()  # first: a fault in forward spoils every later gradient
            assert update.flags is not None
            return self._await_gradients(update.gradients, update.flags)

        if self.processes is not None and self.updates_early:
            self._step_rest_together(update, check)
        settings = update.described, self.max_norm
        self._settle_gradients(update.gradients, "end_step", check, settings, update.weights)
        if self.max_norm is not None:
            self._scale(update.gradients, self.max_norm)

    def _step_rest_together(self, update: _Update, check: Callable[[], bool]) -> None:
        """Step what is left of the order, at the end of the step; a failure of this process is told to the others."""
        gradients, failure = update.gradients, None
        try:
            check()
        except Exception as error:
            failure = error
        try:
            if update.order is None:
                self._agree_on_order(update, failure)
            while update.order:
                self._step_together(update, failure)
        except Exception as error:  # `check` raises it, where all processes meet for the last time in this step
            gradients.failure = gradients.failure or _named(error, f"step {gradients.step}: update")

    def _make_states(self, settings: Mapping[Key, Settings], keys: Iterable[Key]) -> None:
        """Make the optimizer's states before any block is stepped: running out of memory does no harm here."""
        for key in keys:
            if isinstance(settings[key], AdamWSettings) and not self._is_frozen(key):
                self.weight(*key).make_states()

    def _step_block(self, update: _Update, block: str) -> None:
        self._step_weights(update, block, self._weights[block])
        update.stepped.append(block)

    def _step_weights(self, update: _Update, block: str, names: Iterable[str]) -> None:
        """Step those of these weights that have gradients and were not stepped."""
        sums, sent = update.gradients.sums, {} if self.is_sharded else self.buffers_to_send(block)
        keys = [key for key in ((block, name) for name in names) if key in sums and key not in update.weights]
        update.begun.add(block)
        due = [DueStep(self.weight(*key), sums[key], update.settings[key], sent.get(key[1])) for key in keys]
        step_weights(due, self._scratch, update.gradients.factor)
        update.weights.update(keys)
        update.sent.update(key for key in keys if key[1] in sent)
        if self.processes is not None and self._shards:
            weights = [self.weight(*key) for key in keys]
            self.processes.gather([one.shared for one in weights if one.owner is None])
            for weight in weights:
                if weight.owner is not None:
                    self.processes.give(weight.shared, weight.owner)

    def _encode(self, update: _Update, block: str, encode_block: Callable[[str], None]) -> None:
        """Encode a stepped block. A failure does not undo its step: the bytes are then made at the next boundary."""
        self.sent = {name for of_block, name in update.sent if of_block == block}
        try:
            encode_block(block)
        except Exception as error:
            self.failure = self.failure or _named(error, f"{block}, step {update.gradients.step}: encoding")
        update.encoded.append(block)
        update.fresh[block].set()

    def wait_checked(self) -> None:
        """Wait until it is known whether the last step counts, not for its AdamW."""
        if self._update is not None:
            what = f"step {self._update.gradients.step}: its gradients"
            with suppress(TransferError):  # the thread has died, which find_failure reports
                wait_for(self._update.checked, self._updates, self._update_s, what)

    def fresh(self, block: str) -> Callable[[], None]:
        """Return what waits, on the transfer thread, until a block's bytes are made from the masters of now.

        A copy of this step does not wait for this step's update, which waits for it.
        """
        fresh = None if self._update is None else self._update.fresh.get(block)

        def wait() -> None:
            if fresh is not None:
                wait_for(fresh, self._updates, self._update_s, f"{block}: its update")

        return wait

    def finish(self) -> None:
        """Wait for all gradients and updates."""
        if not self._gradients.drain(self._timeout_s):
            self._replace_gradient_thread()
        if not self._updates.drain(self._update_s):
            self.failure = self.failure or TransferError("the optimizer thread has died, or took too long")
            if not self._updates.is_alive:
                self._updates = Worker("optimizer")  # so that its death is reported once
                if self._update is not None:
                    self._update.wake_waiters()  # it died before the update began

    def _replace_gradient_thread(self) -> None:
        """Start a new thread with new memory: the old thread is dead, or hangs in a copy to the old memory."""
        if self._gradients.is_alive:
            self._gradient_memory = GradientMemory(
                self._device, self._gradient_memory.specs, pinned=self._gradient_memory.pinned
            )
        self._gradients = Worker("gradient", GRADIENTS_WAITING)

    def find_failure(self) -> Exception | None:
        """The error of an update so far, or None; does not wait for updates under way."""
        if not self._updates.is_alive:
            self.finish()
        return self.failure

    def settle(self) -> None:
        """Wait for all updates, and copy the masters into the model's own Parameters."""
        self.finish()
        if not self.is_settled:
            for weight in self.trained().values():
                weight.write_back()
            self.is_settled = True

    def recover(self) -> Exception | None:
        """Go on after a failure, which is returned: it names every step that was lost."""
        self.finish()
        failure, self.failure, self._update = self.failure, None, None
        return failure

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def trained(self) -> dict[str, TrainedWeight]:
        """Every trained weight by full name, as it is now; call `finish` first, for updates write their tensors."""
        return {one.name: one for weights in self._weights.values() for one in weights.values()}

    def read_tensors(self, weight: TrainedWeight) -> dict[str, Tensor]:
        """The master and the states of a weight, whole; where they are divided all processes must call it."""
        tensors = {MASTER: weight.master, **weight.read_states()}
        if not self.is_sharded:
            return tensors
        processes, owner = self.processes, weight.owner
        if processes is not None and owner is not None:
            return self._in_turn(lambda: processes.give_all(tensors, owner))
        return self._in_turn(lambda: {key: self._gathered(weight, part) for key, part in tensors.items()})

    def give_parts(self) -> None:
        """Take part in `read_shapes` and `read_tensors` of every weight, for processes that write them; keep none."""
        if self.is_sharded:
            self.read_shapes()
            for weight in self.trained().values():
                self.read_tensors(weight)

    def read_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of what `read_tensors` returns, by weight; where weights are divided all processes must call it."""
        return {name: self._shapes_of(weight) for name, weight in self.trained().items()}

    def _shapes_of(self, weight: TrainedWeight) -> dict[str, tuple[int, ...]]:
        if not self.is_sharded or weight.owner is not None:
            return {key: tuple(one.shape) for key, one in self.read_tensors(weight).items()}
        states = weight.read_states().items()  # of a slice, or counts
        return {MASTER: weight.shape, **{key: weight.shape if one.dim() else () for key, one in states}}

    def _gathered(self, weight: TrainedWeight, part: Tensor) -> Tensor:
        if part.dim() == 0:  # a count
            return part
        assert self.processes is not None
        gathered = torch.empty(weight.shape)
        self.processes.own_slice(gathered).copy_(part)
        self.processes.gather([gathered])
        return gathered

    def restore(
        self, tensors: Mapping[str, Mapping[str, Tensor]], steps: Mapping[str, int], lr: float, *, copies: bool
    ) -> None:
        """Restore a saved state; nothing may be under way. copies: False if only this call holds the tensors."""
        self._open = self._update = self.failure = None
        self._edits = self._loaded = 0
        for name, states in tensors.items() if several_processes() else ():
            self._loaded = zlib.crc32(f"{name} {[*map(sum_of_bits, states.values())]}".encode(), self._loaded)
        self.torn = "loading a state broke off: some weights are of it and some are not; load it again"
        self.lr, self.gradient_norm, self.is_settled = lr, None, False
        for key, settings in self.settings_now().items():
            weight = self.weight(*key)
            states = dict(tensors[weight.name])
            weight.restore(states.pop(MASTER), states, steps[weight.name], settings, copies=copies)
        self.torn = None

    def close(self, error: BaseException | None = None) -> None:
        """Give memory back and end the threads; other processes are told of an error that ends this one's training."""
        if self.processes is not None:
            self.processes.leave(error)
        for worker in (self._gradients, self._updates):
            worker.stop(self._timeout_s)
        for weight in self.trained().values():
            weight.forget_prepared()
        self._gradient_memory.close()


def _also_lost(failure: Exception, step: int) -> Exception:
    """An error that names both an earlier step that failed and this one, which is lost with it."""
    kind = type(failure) if isinstance(failure, StreamError) else TransferError
    both = kind(f"{failure}; step {step} was computed meanwhile and is not applied either")
    both.__cause__ = failure.__cause__
    return both


def _named(error: Exception, what: str) -> Exception:
    """The error itself if it is of streaming, which names block and step; else an error that does."""
    if isinstance(error, StreamError):
        return error
    named = TransferError(f"{what}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
