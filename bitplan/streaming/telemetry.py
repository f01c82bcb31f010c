"""Telemetry of a stream: what a step moved and waited for, by the device's clock; one JSON line a step.

bytes      bytes copied, by format; gradients by their type; gaps between parts are `padding`;
           block inputs that were offloaded and brought back are `activations`
copy_ms    the sum of all copies to the device
stall_ms   how long the computation stood still for a block
compute_ms the rest of the step
overlap    the share of the copying that hid behind computation: 1 - stall / copy
limits     the strictest limits of `set_limits` in the step, with reasons; None: it was not called

CUDA events are read after they have passed, never waited for: a step's line may appear a step later.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.base.logs import JsonLog
from bitplan.streaming.transfer.copies import Transfer
from bitplan.streaming.transfer.devices import Mark, StreamDevice
from bitplan.streaming.transfer.transfer_limits import RuntimeLimitHints

ACTIVATIONS = "activations"
_BEGINS = b'{"step": 0, "step_ms": 0'


@dataclass(frozen=True)
class StreamStepStats:
    """One step. prefetch_hits: blocks that were on the device, or on their way, when they were needed."""

    step: int
    step_ms: float
    compute_ms: float
    stall_ms: float
    copy_ms: float
    overlap: float | None
    bytes_h2d: int
    bytes_h2d_by_format: Mapping[str, int]
    bytes_d2h: int
    bytes_d2h_by_format: Mapping[str, int]
    h2d_gb_per_s: float | None
    loads: int
    prefetch_hits: int
    prefetch_misses: int
    prefetches_held_back: int  # how often a limit kept a block from being loaded ahead
    limits: Mapping[str, Any] | None
    vram_peak_bytes: int
    pinned_peak_bytes: int
    timeline: Mapping[str, Any]


@dataclass(frozen=True)
class StreamStats:
    """What a handle has done so far; `last` is the last step whose clocks have been read.

    decoded_blocks: of the resident ones, those that stay decoded, too.
    experts: of mixtures that cross by use (`routed_experts`): memory on the device, experts in the cache, copied, and
             taken from the cache so far, the share that was chosen last, and how many mixtures are sent whole.
    """

    steps: int
    bytes_h2d: int
    bytes_d2h: int
    pinned_bytes: int
    last: StreamStepStats | None
    vram_bytes: int = 0
    ring_slots: int = 0
    slot_bytes: int = 0
    resident_blocks: int = 0
    decoded_blocks: int = 0
    experts: Mapping[str, float] | None = None


@dataclass(eq=False)
class StepRecorder:
    """Collects one step; gradients are expected by the computation and added by their own thread."""

    device: StreamDevice
    step: int
    start: Mark
    end: Mark | None = None
    hits: int = 0
    misses: int = 0
    held_back: int = 0
    limits: RuntimeLimitHints | None = None
    loads: list[tuple[Transfer, Mapping[str, int]]] = field(default_factory=list)
    sent: list[tuple[Transfer, int]] = field(default_factory=list)  # activations: transfer and bytes
    returned: list[tuple[Transfer, int]] = field(default_factory=list)
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    vram_peak_bytes: int = 0
    pinned_peak_bytes: int = 0
    expected_out: int = 0
    _arrived_out: int = 0
    _out: Counter[torch.dtype] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def copied_out(self, gradients: Collection[Tensor]) -> None:
        with self._lock:
            for gradient in gradients:
                self._out[gradient.dtype] += gradient.nbytes
            self._arrived_out += len(gradients)

    def close(self) -> None:
        """End the step; the device may not have reached its marks yet."""
        self.end = self.device.mark()
        self.vram_peak_bytes = self.device.peak_bytes()
        self.pinned_peak_bytes = self.device.peak_pinned_bytes

    def has_passed(self) -> bool:
        """Whether every clock of the step can be read without waiting."""
        if self.end is None or self._arrived_out < self.expected_out or not self.device.has_passed(self.end):
            return False
        return all(transfer.is_done(self.device) for transfer, _ in [*self.loads, *self.sent, *self.returned])

    def stats(self) -> StreamStepStats:
        """Return the step's figures, read from its clocks; `has_passed` must hold."""
        assert self.end is not None
        copies = [(transfer.copied, sizes) for transfer, sizes in self.loads if transfer.copied is not None]
        back = [(transfer.copied, nbytes) for transfer, nbytes in self.returned if transfer.copied is not None]
        moved: Counter[str] = Counter({ACTIVATIONS: sum(nbytes for _, nbytes in back)} if back else {})
        for _, sizes in copies:
            moved.update(sizes)
        copy_ms = sum(self.device.elapsed_ms(*copied) for copied, _ in [*copies, *back])
        stall_ms = sum(self.device.elapsed_ms(*wait) for wait in self.waits)
        step_ms = self.device.elapsed_ms(self.start, self.end)
        with self._lock:
            out = {str(dtype).removeprefix("torch."): nbytes for dtype, nbytes in self._out.items()}
        if self.sent:
            out[ACTIVATIONS] = sum(nbytes for transfer, nbytes in self.sent if transfer.copied is not None)
        return StreamStepStats(
            step=self.step,
            step_ms=step_ms,
            compute_ms=step_ms - stall_ms,
            stall_ms=stall_ms,
            copy_ms=copy_ms,
            overlap=max(0.0, 1 - stall_ms / copy_ms) if copy_ms else None,
            bytes_h2d=moved.total(),
            bytes_h2d_by_format=dict(moved),
            bytes_d2h=sum(out.values()),
            bytes_d2h_by_format=out,
            h2d_gb_per_s=moved.total() / copy_ms / 1e6 if copy_ms else None,
            loads=len(copies),
            prefetch_hits=self.hits,
            prefetch_misses=self.misses,
            prefetches_held_back=self.held_back,
            limits=None if self.limits is None else _limits_line(self.limits),
            vram_peak_bytes=self.vram_peak_bytes,
            pinned_peak_bytes=self.pinned_peak_bytes,
            timeline=self._timeline(),
        )

    def _timeline(self) -> dict[str, Any]:
        """When copies ran and the computation waited, in milliseconds from the start of the step."""
        copies = [*((transfer, sum(sizes.values())) for transfer, sizes in self.loads), *self.returned]
        return {
            "copies": [self._copy(transfer, nbytes) for transfer, nbytes in copies if transfer.copied is not None],
            "waits": [self._span(*wait) for wait in self.waits],
            "copies_out": [self._copy(sent, nbytes) for sent, nbytes in self.sent if sent.copied is not None],
        }

    def _copy(self, transfer: Transfer, nbytes: int) -> dict[str, Any]:
        assert transfer.copied is not None
        return {"name": transfer.what, **self._span(*transfer.copied), "bytes": nbytes}

    def _span(self, start: Mark, end: Mark) -> dict[str, float]:
        return {
            "start_ms": round(self.device.elapsed_ms(self.start, start), 4),
            "end_ms": round(self.device.elapsed_ms(self.start, end), 4),
        }


def _limits_line(limits: RuntimeLimitHints) -> dict[str, Any]:
    return {
        "max_inflight_h2d": limits.max_inflight_h2d,
        "max_inflight_d2h": limits.max_inflight_d2h,
        "prefetch_window_cap": limits.prefetch_window_cap,
        "suppress_speculative": limits.suppress_speculative,
        "reasons": list(limits.reasons),
    }


class Telemetry:
    """Turns recorders into lines, in order, as soon as their clocks can be read."""

    def __init__(self, path: str | Path | None) -> None:
        self._log = None
        if path is not None:
            self._log = JsonLog(path, _BEGINS, noun="streaming telemetry file", may_lose_lines=True)
        self._pending: list[StepRecorder] = []
        self._last: StreamStepStats | StepRecorder | None = None
        self.steps = 0

    @property
    def last(self) -> StreamStepStats | None:
        """The last step whose clocks can be read; they are read when this is asked for, or a file wants them."""
        if isinstance(self._last, StepRecorder):
            self._last = self._last.stats()
        return self._last

    def add(self, recorder: StepRecorder) -> None:
        self._pending.append(recorder)
        self.flush()

    def flush(self) -> None:
        """Write finished steps. An interrupted step never finishes: it is dropped when a later step is written."""
        passed = [at for at, recorder in enumerate(self._pending) if recorder.has_passed()]
        done = [self._pending[at] for at in passed]
        self._pending = self._pending[passed[-1] + 1 if passed else 0 :]
        for recorder in done:
            self._last = recorder
            self.steps += 1
            if self._log is not None and self.last is not None:
                self._log.write_lines(asdict(self.last))

    def close(self) -> None:
        self.flush()
        if self._log is not None:
            self._log.close()
