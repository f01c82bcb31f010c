"""Training streamed weights: FP32 masters on the host, gradients that come back, AdamW beside the next transfers.

    backward, device   gradient of a weight is ready -> gradient thread: copy it out, add it to the master's (float32)
    end_step           optimizer thread, block after block in forward order: AdamW on the masters, encode, mark fresh
    next step          the transfer thread waits for a block to be fresh, and no one else waits for anything

So the update of block 5 runs while block 0 crosses the bus. A step counts whole or not at all: a gradient that did not
arrive, or is not finite, in any block, leaves every master as it was, and the next begin_step says so. That is why no
update overlaps with the backward of its own step, and why clipping by the norm of all gradients (`clip_grad_norm`)
takes no overlap away: it costs the optimizer thread a pass over all gradients before the first update, and another one,
to scale them, in steps that are clipped. The first block of the next step comes later by that.

The master is a bitplan WeightStore's: the version that is sent is derived from it, never the other way round.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bitplan.formats import Encoded, Format
from bitplan.runtime.devices import Mark, StreamDevice
from bitplan.runtime.host_blocks import exact_buffer
from bitplan.runtime.stream_errors import BlockNonFiniteError, StreamError, TransferError
from bitplan.runtime.stream_telemetry import StepRecorder
from bitplan.runtime.streamed_blocks import StreamedBlock
from bitplan.runtime.transfers import WAIT_TIMEOUT_S, Worker, wait_for
from bitplan.store.weights import WeightStore

GRADIENTS_WAITING = 12  # on the device, before backward is held back: a llama block has nine


@dataclass(frozen=True)
class AdamWSettings:
    """What torch.optim.AdamW is given for the streamed weights."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


class Trained(NamedTuple):
    """One parameter's training: its master, AdamW's two moments (None before the first step), and how many steps."""

    master: Tensor
    moments: tuple[Tensor, Tensor] | None
    steps: int


class HostTraining:
    """Masters, gradients and optimizer of the streamed weights that require gradients."""

    def __init__(
        self,
        blocks: Sequence[StreamedBlock],
        settings: AdamWSettings,
        device: StreamDevice,
        timeout_s: float = WAIT_TIMEOUT_S,
        max_norm: float | None = None,
    ) -> None:
        self._device, self._timeout_s = device, timeout_s
        self.settings, self.max_norm = settings, max_norm
        self.lr = settings.lr  # of all blocks, from the next update on; for a schedule
        self.gradient_norm: float | None = None  # before clipping, in the last step that was clipped or measured
        self.stores: dict[str, dict[str, WeightStore]] = {}
        self._masters: dict[str, dict[str, Tensor]] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        largest = 0
        for block in blocks:
            masters = {
                name: one.parameter.detach().float()
                for name, one in block.parameters.items()
                if one.parameter.requires_grad
            }
            if not masters:
                continue
            self._masters[block.name] = masters
            self.stores[block.name] = {
                name: WeightStore(master, name=f"{block.name}.{name}") for name, master in masters.items()
            }
            # One optimizer a block, so that each can be stepped, and its block sent, before the others.
            self._optimizers[block.name] = torch.optim.AdamW(
                list(masters.values()),
                lr=settings.lr,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=settings.weight_decay,
                fused=True,
            )
            largest = max(largest, *(block.parameters[name].parameter.nbytes for name in masters))
        self._staging = exact_buffer(largest)
        device.pin(self._staging)
        self._fresh: dict[str, threading.Event] = {}
        self.failure: Exception | None = None
        self._gradient_failure: Exception | None = None  # of the step under way
        self._gradients = Worker("gradient", GRADIENTS_WAITING)
        self._updates = Worker("optimizer")

    def trains(self, block: str, name: str) -> bool:
        return name in self._masters.get(block, {})

    def encoded(self, block: str, name: str, fmt: Format) -> Encoded:
        """The master's version in a format, made for sending: it is not kept, for the host holds the bytes."""
        store = self.stores[block][name]
        version = store.morph(fmt)
        store.drop(fmt)
        return version

    def limit_gradients(self, in_flight: int | None) -> None:
        """How many gradients may be on their way to the host before backward waits for them; None: the usual."""
        self._gradients.max_unfinished = min(in_flight or GRADIENTS_WAITING, GRADIENTS_WAITING)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def receive(self, block: str, name: str, gradient: Tensor, step: int, recorder: StepRecorder) -> None:
        """Take a gradient from the device; called in backward, comes back at once unless too many are waiting."""
        gradient = gradient.contiguous()
        recorder.expected_out += 1
        after, what = self._device.mark(), f"{block}.{name}, step {step}: gradient"
        self._gradients.submit(
            lambda: self._add(block, name, gradient, after, what, recorder), what, timeout_s=self._timeout_s
        )

    def _add(self, block: str, name: str, gradient: Tensor, after: Mark, what: str, recorder: StepRecorder) -> None:
        try:
            raw = self._staging[: gradient.nbytes]
            copied = self._device.copy_out(raw, gradient.reshape(-1).view(torch.uint8), after)
            self._device.finish(copied.end)
            recorder.copied_out(str(gradient.dtype).removeprefix("torch."), gradient.nbytes, copied)
            arrived = raw.view(gradient.dtype).view(gradient.shape).float()
            if not bool(torch.isfinite(arrived.sum())):
                raise BlockNonFiniteError(f"{what} holds NaN or infinity; the masters are as they were before the step")
            master = self._masters[block][name]
            with torch.no_grad():
                if master.grad is None:
                    master.grad = arrived.clone()
                else:
                    master.grad.add_(arrived)
        except Exception as error:
            self._gradient_failure = self._gradient_failure or _named(error, what)
        except BaseException as error:
            self._gradient_failure = TransferError(f"{what}: the thread was stopped ({error!r})")
            raise

    def clip(self, max_norm: float, also: Sequence[Tensor], step: int) -> float:
        """Wait for the gradients of the step, and scale them, with those of `also`, to a common norm of `max_norm`."""
        if not self._gradients.drain(self._timeout_s) and self._gradient_failure is None:
            raise TransferError(f"step {step}: the gradient thread has died, or took too long; begin_step goes on")
        if self._gradient_failure is not None:
            raise self._gradient_failure
        return self._scale(max_norm, also, step)

    def _scale(self, max_norm: float, also: Sequence[Tensor], step: int) -> float:
        masters = [master for masters in self._masters.values() for master in masters.values()]
        trained = [one for one in [*masters, *also] if one.grad is not None]
        total = get_total_norm([one.grad for one in trained if one.grad is not None])
        norm = float(total)
        if not math.isfinite(norm):
            raise BlockNonFiniteError(f"step {step}: the norm of all gradients is {norm}; the masters are as before it")
        if norm > max_norm:
            clip_grads_with_norm_(trained, max_norm, total)
        self.gradient_norm = norm
        return norm

    def abandon(self) -> None:
        """Forget a step that will not be ended; the update before it still counts, and so does its failure."""
        self.finish()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        if not self._gradients.drain(self._timeout_s):
            self._gradients = Worker("gradient", GRADIENTS_WAITING)
        self._gradient_failure = None
        for masters in self._masters.values():
            for master in masters.values():
                master.grad = None

    # ---- updates -----------------------------------------------------------------------------------------------------

    def update(self, encode_block: Callable[[str], None], check_step: Callable[[], None], step: int) -> None:
        """Queue the optimizer for every block. `check_step` raises if the step must not count."""
        fresh = {name: threading.Event() for name in self._masters}
        self._fresh = fresh
        lr = self.lr  # as it is now: the next step's may be set before the optimizer thread comes to this one

        def gather() -> None:
            for optimizer in self._optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] = lr
            arrived = self._gradients.drain(self._timeout_s)
            found, self._gradient_failure = self._gradient_failure, None
            try:
                check_step()  # first: what is wrong in forward is wrong in every gradient after it
                if found is None and not arrived:
                    found = TransferError(f"step {step}: the gradient thread has died; no master was changed")
                if found is None and self.max_norm is not None:
                    self._scale(self.max_norm, (), step)
            except Exception as error:
                found = _named(error, f"step {step}")
            self.failure = self.failure or found

        self._updates.submit(gather, f"step {step}: update")
        for name in self._masters:
            job = self._update_job(name, fresh[name], encode_block, step)
            self._updates.submit(job, f"{name}, step {step}: update")

    def _update_job(
        self, block: str, fresh: threading.Event, encode_block: Callable[[str], None], step: int
    ) -> Callable[[], None]:
        def job() -> None:
            try:
                if self.failure is None:
                    self._optimizers[block].step()
                    encode_block(block)
            except Exception as error:
                self.failure = self.failure or _named(error, f"{block}, step {step}: update")
            finally:
                for master in self._masters[block].values():
                    master.grad = None
                fresh.set()

        return job

    def wait_fresh(self, block: str) -> None:
        """Wait, on the transfer thread, until a block's bytes are those of its masters."""
        fresh = self._fresh.get(block)
        if fresh is not None:
            wait_for(fresh, self._updates, self._timeout_s, f"{block}: its update")

    def finish(self) -> None:
        """Wait for all gradients and updates."""
        self._gradients.drain(self._timeout_s)
        if not self._updates.drain(self._timeout_s) and self.failure is None:
            self.failure = TransferError("the optimizer thread has died, or took too long")

    def recover(self) -> None:
        """Go on after a failure: whole threads, no gradients, every block fresh."""
        self.finish()
        self.failure = None
        if not self._gradients.is_alive:
            self._gradients = Worker("gradient", GRADIENTS_WAITING)
        if not self._updates.is_alive:
            self._updates = Worker("optimizer")
        self._drop_gradients()
        self._fresh = {}

    def write_back(self, blocks: Mapping[str, StreamedBlock]) -> None:
        """Make the model's own Parameters what the masters are."""
        with torch.no_grad():
            for block, masters in self._masters.items():
                for name, master in masters.items():
                    parameter = blocks[block].parameters[name].parameter
                    if parameter.data_ptr() != master.data_ptr():
                        parameter.data.copy_(master)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def trained(self) -> dict[str, Trained]:
        """Every trained parameter by full name, as it is now; call `finish` first, for updates write these tensors."""
        return {
            f"{block}.{name}": self._trained(self._optimizers[block], master)
            for block, masters in self._masters.items()
            for name, master in masters.items()
        }

    def _trained(self, optimizer: torch.optim.AdamW, master: Tensor) -> Trained:
        state = optimizer.state.get(master)
        if not state:
            return Trained(master.detach(), None, 0)
        return Trained(master.detach(), (state["exp_avg"], state["exp_avg_sq"]), int(state["step"]))

    def restore(self, trained: Mapping[str, Trained], lr: float, *, copies: bool) -> None:
        """Be what was saved; nothing may be under way. copies: False where nobody else holds the moments."""
        self._drop_gradients()
        self._fresh = {}
        self.lr, self.gradient_norm = lr, None
        for block, masters in self._masters.items():
            state = self._optimizers[block].state
            for name, master in masters.items():
                saved = trained[f"{block}.{name}"]
                self.stores[block][name].update(saved.master)
                state.pop(master, None)
                if saved.moments is not None:
                    first, second = (_laid_out_as(master, moment, copies) for moment in saved.moments)
                    steps = torch.tensor(float(saved.steps), dtype=torch.float32)  # as the fused AdamW counts
                    state[master] = {"step": steps, "exp_avg": first, "exp_avg_sq": second}

    def close(self) -> None:
        for worker in (self._gradients, self._updates):
            worker.stop(self._timeout_s)
        if self._staging.nbytes:
            self._device.unpin(self._staging)
            self._staging = exact_buffer(0)


def _laid_out_as(master: Tensor, moment: Tensor, copies: bool) -> Tensor:
    """The moment itself where it lies as its master does, which the fused AdamW needs; else a copy that does."""
    if not copies and moment.device == master.device and moment.stride() == master.stride():
        return moment.detach()
    return torch.empty_like(master).copy_(moment.detach())


def _named(error: Exception, what: str) -> Exception:
    """The error itself where it says what it is about, else one that does."""
    if isinstance(error, StreamError) and what.split(":")[0] in str(error):
        return error
    named = TransferError(f"{what}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
