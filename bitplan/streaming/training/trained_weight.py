"""TrainedWeight: one weight that is trained on the host, where its FP32 master lies, and the states of its optimizer.

    the Parameter     its master                                       bytes a weight beside the Parameter's own
    float32           the Parameter                                    0
    BF16, FP16        float32 numbers                                  4
    BF16, 8 bits      the Parameter and a remainder of 16 bits         2

"8 bits": its moments are kept so (see `adamw`). Where several processes divide the optimizer, each keeps masters,
remainders and states of its slice of the weight, and steps that; the Parameter, which is sent, is whole in each. Of
weights that an optimizer needs whole (Muon, Adafactor) each process keeps some, and nothing of the others.

AdamW is torch's fused one by definition (`adamw`), which makes 46 bytes a number cross the host's memory where
gradient and sent weights are BF16; `adamw_loop` takes one pass, with 28. Whether it has torch's bits on this machine is
looked at before its first use. Other optimizers are torch's own (`optimizers`).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bitplan.base.errors import StreamError
from bitplan.formats.dispatch import SMALLEST_FOR_CPU, Picked
from bitplan.streaming.find_blocks import StreamedParameter
from bitplan.streaming.training.adamw import (
    AdamWRates,
    AdamWSettings,
    AdamWTensors,
    SmallMoments,
    SmallTensors,
    join_master,
    split_master,
    step_by_torch,
    step_small_by_torch,
    step_together,
)
from bitplan.streaming.training.optimizers import HostOptimizer, Settings, step_alone
from bitplan.streaming.training.processes import Processes

LOOP_TYPES = (torch.float32, torch.bfloat16)  # of gradients, and of what is sent
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
MomentFormat = Literal["float32", "int8"]
_log = logging.getLogger("bitplan")


def step_adamw(tensors: AdamWTensors, rates: AdamWRates, scratch: Tensor) -> None:
    """Step the master and its moments in place; `scratch` is float32, of any size, and so torch's pieces are."""
    adamw_of(tensors)(rates, scratch)


def adamw_of(tensors: AdamWTensors) -> Callable[[AdamWRates, Tensor], None]:
    """Return `step_adamw` of these tensors, for any number of steps: what it asks of them is asked once."""
    if explain_adamw(tensors).implementation == "torch":
        return functools.partial(step_by_torch, tensors)
    from bitplan.streaming.training.adamw_loop import loop_of

    return loop_of(tensors)


def step_small(tensors: SmallTensors, rates: AdamWRates, key: str, start: int) -> None:
    """Do one step of AdamW with small states; `key`, `start`: as for `SmallMoments.write`."""
    if explain_adamw(tensors).implementation == "torch":
        step_small_by_torch(tensors, rates, key, start)
        return
    from bitplan.streaming.training.adamw_loop import step_small_by_loop

    step_small_by_loop(tensors, rates, key, start)


def explain_adamw(tensors: AdamWTensors | SmallTensors) -> Picked:
    """What `step_adamw` or `step_small` runs for these tensors."""
    sent = tensors.sent if isinstance(tensors, AdamWTensors) else None
    types = {"a gradient": tensors.gradient.dtype, "sent weights": torch.float32 if sent is None else sent.dtype}
    for what, dtype in types.items():
        if dtype not in LOOP_TYPES:
            return Picked("torch", f"{what} of {str(dtype).removeprefix('torch.')}")
    if tensors.gradient.numel() < SMALLEST_FOR_CPU:
        return Picked("torch", f"small: {tensors.gradient.numel()} numbers")
    return loop_choice()


def prepare_adamw(numbers: Iterable[int]) -> None:
    """Compile, before the first step of weights with so many numbers, what it would compile."""
    if any(count >= SMALLEST_FOR_CPU for count in numbers):
        loop_choice()


@functools.cache
def loop_choice() -> Picked:
    """Whether AdamW runs in numba's loop or in torch, and why; tries the loop once, which takes seconds."""
    if importlib.util.find_spec("numba") is None:
        return Picked("torch", "numba is not installed")
    from bitplan.streaming.training.adamw_loop import differs_from_torch

    if differs := differs_from_torch():
        _log.warning("AdamW on the host: %s; torch's own is used, which takes about twice the time", differs)
        return Picked("torch", differs)
    return Picked("numba", "one pass of the host's memory, with torch's bits")


class DueStep(NamedTuple):
    """A weight that is to be stepped, and the memory that gets its new numbers."""

    weight: TrainedWeight
    gradient: Tensor
    settings: Settings
    sent: Tensor | None


def step_weights(due: Iterable[DueStep], scratch: Tensor, factor: float) -> None:
    """Step weights by their gradients, times `factor`; small ones of the same settings in one call, to the same bits.

    scratch  float32, of any size; as many numbers are stepped in one call
    """
    together: dict[Settings, list[tuple[TrainedWeight, AdamWTensors, AdamWRates]]] = {}
    room = scratch.numel()
    for weight, gradient, settings, sent in due:
        count, tensors = gradient.numel(), weight.small_tensors(gradient, settings, sent)
        if tensors is None or not isinstance(settings, AdamWSettings) or count > scratch.numel():
            weight.step(gradient, settings, scratch, sent, factor)
            continue
        small = together.setdefault(settings, [])
        if count > room:
            for others in together.values():
                _step_small_weights(others, scratch)
            room = scratch.numel()
        room -= count
        small.append((weight, tensors, weight.rates(settings, factor)))
    for small in together.values():
        _step_small_weights(small, scratch)


def _step_small_weights(small: list[tuple[TrainedWeight, AdamWTensors, AdamWRates]], scratch: Tensor) -> None:
    if not small:
        return
    weights, tensors, rates = zip(*small, strict=True)
    step_together(tensors, rates, scratch)
    for weight in weights:
        weight.note_step()
    small.clear()


@dataclass(eq=False)
class _Prepared:
    """AdamW of one weight: master, states, gradient and what is sent, and what a step makes of these."""

    wholes: tuple[Tensor | None, ...]
    tensors: AdamWTensors

    @functools.cached_property
    def step(self) -> Callable[[AdamWRates, Tensor], None]:
        return adamw_of(self.tensors)


class TrainedWeight:
    """One weight: its master, the states of its optimizer, and how often it was stepped."""

    def __init__(self, name: str, streamed: StreamedParameter, moments: MomentFormat = "float32") -> None:
        parameter = streamed.parameter
        if parameter.dtype == torch.float64:
            raise StreamError(
                f"{name} is float64, and train='weights' learns in float32 masters; call model.float() first, or "
                "requires_grad_(False) on it"
            )
        self.name, self.shape, self.moments, self.steps = name, tuple(parameter.shape), moments, 0
        self._streamed = streamed
        self._processes: Processes | None = None
        self.owner: int | None = None  # the process that steps all of the weight, where the optimizer needs it whole
        self._states: tuple[Tensor, Tensor] | SmallMoments | None = None
        self._prepared: _Prepared | None = None  # the last step
        self._optimizer: torch.optim.Optimizer | None = None
        self._remainder: Tensor | None = None
        self._master: Tensor | None = None
        # `.data`: writes to the master must not count as writes to the model's Parameter, which are watched.
        if parameter.dtype == torch.float32:
            self._master = parameter.data.contiguous()
            return
        parameter.data = parameter.data.contiguous()
        if moments == "int8" and parameter.dtype == torch.bfloat16:
            self._remainder = torch.zeros(parameter.numel(), dtype=torch.int16)
        else:
            self._master = parameter.data.float()

    # ---- where numbers lie -------------------------------------------------------------------------------------------

    @property
    def _parameter(self) -> Tensor:
        return self._streamed.parameter.data

    @property
    def _is_parameter(self) -> bool:
        """Whether the master is the Parameter's numbers, in its memory unless other code has replaced that."""
        return self._streamed.parameter.dtype == torch.float32

    def _slice(self, tensor: Tensor) -> Tensor:
        """The part of a whole tensor that this process updates, as a flat view."""
        return tensor.view(-1) if self._processes is None else self._processes.own_slice(tensor, self.owner)

    @property
    def _numbers(self) -> Tensor:
        """The float32 numbers that this process steps, flat: views, or joined."""
        if self._remainder is not None:
            return join_master(self._slice(self._parameter), self._remainder)
        assert self._master is not None
        return self._slice(self._master) if self._is_parameter else self._master.view(-1)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether another process steps all of the weight."""
        return self._processes is not None and self.owner not in (None, self._processes.rank)

    @property
    def master(self) -> Tensor:
        """The float32 master; of this process's slice alone, flat, where the optimizer is divided."""
        is_part = self._processes is not None and self.owner != self._processes.rank
        return self._numbers if is_part else self._numbers.view(self.shape)

    def source(self, *, is_own_type: bool) -> Tensor:
        """What bytes are made from: the master, or the Parameter where that alone is whole or is what is sent."""
        is_part = self._remainder is not None and is_own_type
        return self._parameter if is_part or self._processes is not None else self.master

    def parts(self) -> dict[str, Tensor]:
        """The tensors that are the master, for a look at their bits; before it is divided."""
        if self._remainder is None:
            return {self.name: self.master}
        return {self.name: self._parameter, f"{self.name} (remainder)": self._remainder}

    @property
    def host_bytes(self) -> dict[str, int]:
        """What the master takes beside the Parameter, and what states take, on this host."""
        master = (
            0 if self._is_parameter else sum(one.nbytes for one in (self._master, self._remainder) if one is not None)
        )
        states: Iterable[Tensor] = self._states or ()
        if self._optimizer is not None:
            states = tuple(one for one in self._optimizer_states().values() if isinstance(one, Tensor))
        return {"masters": master, "states": sum(one.nbytes for one in states)}

    def require_steppable(self, settings: Settings, *, is_divided: bool) -> None:
        """Refuse an optimizer that cannot step the weight as it is kept here."""
        if not isinstance(settings, HostOptimizer):
            return
        if not settings.keeps_floats:
            raise StreamError(
                f"{self.name}: {settings.name} keeps its states as bytes of its own, which no checkpoint here holds; "
                "use AdamW with StreamOptions(moments='int8')"
            )
        if is_divided and self.owner is None and not settings.steps_parts:
            raise StreamError(
                f"{self.name}: shard_optimizer=True has divided the weight for an optimizer that steps parts, and "
                f"{settings.name} needs it whole; choose it before the first step, or use shard_optimizer=False"
            )
        if self.moments == "int8":
            raise StreamError(
                f"{self.name}: moments='int8' are AdamW's, and the optimizer is {settings.name}; leave `moments` out, "
                "or train with AdamW"
            )

    def divide(self, processes: Processes, settings: Settings, owner: int | None) -> None:
        """Step only this process's slice from now on, or in its owner all of the weight; keep no other numbers."""
        states = self.read_states()
        self._processes, self.owner = processes, owner
        if self._remainder is not None:
            self._remainder = self._slice(self._remainder).clone()
        elif not self._is_parameter:
            assert self._master is not None
            self._master = self._slice(self._master).clone()
        self.write_states({key: self._part_of(one).clone() for key, one in states.items()}, settings)

    @property
    def shared(self) -> Tensor:
        """The whole weight, equal in every process, of which each updates a slice: the master or the Parameter."""
        return self._master if self._is_parameter and self._master is not None else self._parameter

    # ---- steps -------------------------------------------------------------------------------------------------------

    def make_states(self) -> None:
        """Make the optimizer's states, as AdamW does in its first step; here running out of memory does no harm."""
        if self._states is None and self._optimizer is None:
            count = self._slice(self.shared).numel()
            small = SmallMoments.zeros(count) if self.moments == "int8" else None
            self._states = small or (torch.zeros(count), torch.zeros(count))

    def step(
        self,
        gradient: Tensor,
        settings: Settings,
        scratch: Tensor,
        sent: Tensor | None = None,
        factor: float = 1.0,
    ) -> None:
        """Step the master by its gradient, times `factor`, and copy it to `sent`; `scratch` is float32, of any size."""
        if isinstance(settings, HostOptimizer):
            if not self._is_elsewhere:
                self._step_by(settings, self._slice(gradient), factor)
            if sent is not None:
                sent.view(-1).copy_(self._numbers)
        elif self._slice(gradient).numel():
            self._step_by_adamw(gradient, self.rates(settings, factor), scratch, sent)
        self.note_step()

    def rates(self, settings: AdamWSettings, factor: float) -> AdamWRates:
        """AdamW's settings for the next step of this weight, with the step's number."""
        return AdamWRates(settings.lr, settings.betas, settings.eps, settings.weight_decay, self.steps + 1, factor)

    def small_tensors(self, gradient: Tensor, settings: Settings, sent: Tensor | None) -> AdamWTensors | None:
        """What AdamW steps, flat, if that is so little that a call of torch takes longer than its work; else None."""
        is_small = isinstance(settings, AdamWSettings) and 0 < gradient.numel() < SMALLEST_FOR_CPU
        if not is_small or self._processes is not None:
            return None
        self.make_states()
        assert self._states is not None
        return None if isinstance(self._states, SmallMoments) else self._prepare(gradient, sent, self._states).tensors

    def _prepare(self, gradient: Tensor, sent: Tensor | None, states: tuple[Tensor, Tensor]) -> _Prepared:
        """AdamW's step with these tensors, which most steps share with the step before."""
        wholes = self._master, *states, gradient, sent
        before = self._prepared
        if before is None or any(one is not other for one, other in zip(wholes, before.wholes, strict=True)):
            flat = None if sent is None else sent.view(-1)
            tensors = AdamWTensors(self._numbers, self._slice(gradient), *states, flat)
            before = self._prepared = _Prepared(wholes, tensors)
        return before

    def forget_prepared(self) -> None:
        """Let go of the memory of gradients and of what is sent."""
        self._prepared = None

    def note_step(self) -> None:
        """Count a step that was done; what is sent from the Parameter gets it."""
        if self._processes is not None and self._master is not None and not self._is_parameter:
            self._slice(self._parameter).copy_(self._master)
        self.steps += 1

    def _step_by_adamw(self, gradient: Tensor, rates: AdamWRates, scratch: Tensor, sent: Tensor | None) -> None:
        self.make_states()
        assert self._states is not None
        if not isinstance(self._states, SmallMoments):
            self._prepare(gradient, sent, self._states).step(rates, scratch)
            return
        numbers = self._numbers if self._remainder is None else self._slice(self._parameter)
        is_whole = self._processes is None or self.owner is not None
        start = 0 if is_whole or self._processes is None else self._processes.slice_start(self.shared)
        tensors = SmallTensors(numbers, self._remainder, self._slice(gradient), self._states)
        step_small(tensors, rates, f"{self.name} {rates.step}", start)
        if sent is not None and sent.data_ptr() != numbers.data_ptr():
            sent.view(-1).copy_(self._numbers)

    def _step_by(self, settings: HostOptimizer, gradient: Tensor, factor: float) -> None:
        optimizer = self._optimizer_of(settings)
        optimizer.param_groups[0].update({**settings.settings, "lr": settings.lr})
        (parameter,) = optimizer.param_groups[0]["params"]
        wide = gradient.float() if factor == 1.0 else gradient.float() * factor
        step_alone(optimizer, wide.view(parameter.shape))

    def _optimizer_of(self, settings: HostOptimizer) -> torch.optim.Optimizer:
        if self._optimizer is None:
            self._optimizer = settings.open(self.master)
        (parameter,) = self._optimizer.param_groups[0]["params"]
        if parameter.data_ptr() != self.master.data_ptr():
            parameter.data = self.master
        return self._optimizer

    def _optimizer_states(self) -> Mapping[str, Any]:
        assert self._optimizer is not None
        (parameter,) = self._optimizer.param_groups[0]["params"]
        states: Mapping[str, Any] = self._optimizer.state[parameter]
        return states

    # ---- the model's Parameter ---------------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Copy the master into the model's Parameter, where steps do not."""
        is_divided = self._processes is not None and not self._is_parameter
        if self._master is not None and not is_divided and self._parameter.data_ptr() != self._master.data_ptr():
            self._parameter.copy_(self._master)

    def read_parameter(self) -> None:
        """Take the model's Parameter, which other code has changed, for the master; the states stay.

        They are compared in the Parameter's type: an unchanged BF16 Parameter must not round its master. Where the
        Parameter is a part of the master there is nothing to compare with, and the remainder becomes 0.
        """
        parameter = self._streamed.parameter
        if self._is_parameter:
            assert self._master is not None
            if parameter.data_ptr() != self._master.data_ptr():
                self._master.copy_(parameter.detach())
                parameter.data = self._master.data
            return
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        if self._remainder is not None:
            self._remainder.zero_()
        elif not torch.equal(part := self._slice(parameter.data), self._numbers.to(parameter.dtype)):
            self._numbers.copy_(part)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def read_states(self) -> dict[str, Tensor]:
        """The states in float32, of this process's slice: the ones in use, or decoded; none before the first step."""
        if self._optimizer is not None:
            return {
                key: one if isinstance(one, Tensor) else torch.tensor(float(one))
                for key, one in self._optimizer_states().items()
                if one is not None
            }
        if self._states is None:
            return {}
        moments = self._states.read() if isinstance(self._states, SmallMoments) else self._states
        shape = self.shape if self._processes is None else (-1,)
        return {key: one.view(shape) for key, one in zip(MOMENTS, moments, strict=True)}

    def write_states(self, states: Mapping[str, Tensor], settings: Settings) -> None:
        """Take these for the states of this process's slice, which they are of."""
        self._states = self._optimizer = None
        if not states or self._is_elsewhere:
            return
        if isinstance(settings, HostOptimizer):
            (parameter,) = self._optimizer_of(settings).param_groups[0]["params"]
            assert self._optimizer is not None
            self._optimizer.state[parameter] = dict(states)
            return
        first, second = (states[key].detach().reshape(-1) for key in MOMENTS)
        if self.moments == "int8":
            self._states = SmallMoments.zeros(len(first))
            self._states.write(first.clone(), second.clone())  # it overwrites what it is given
        else:
            self._states = first, second

    def restore(
        self, master: Tensor, states: Mapping[str, Tensor], steps: int, settings: Settings, *, copies: bool
    ) -> None:
        """Restore what any number of processes have saved, whole. copies: False if only the caller has the states."""
        master = master.detach().contiguous()
        if self._remainder is not None:
            remainder = torch.empty(master.numel(), dtype=torch.int16)
            split_master(master.view(-1), self._parameter.view(-1), remainder)
            self._remainder.copy_(self._slice(remainder))
        else:
            self._numbers.copy_(self._slice(master))
            if self._processes is not None:
                self.shared.copy_(master)
        self.steps = steps
        parts = {key: self._part_of(one) for key, one in states.items()}
        self.write_states({key: one.clone() for key, one in parts.items()} if copies else parts, settings)

    def _part_of(self, state: Tensor) -> Tensor:
        """A whole state as this process keeps it: its slice, where it has a number for each of the weight."""
        laid_out, is_divided = state.detach().contiguous(), self._processes is not None and self.owner is None
        return self._slice(laid_out) if is_divided and laid_out.shape == self.shape else laid_out
