"""StreamOptions: what `stream_blocks` was asked for, checked as a whole before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from bitplan.runtime.streaming.blocks.find import Train
from bitplan.runtime.streaming.blocks.formats import Formats
from bitplan.runtime.streaming.errors import StreamError
from bitplan.runtime.streaming.training.adamw_settings import AdamWSettings
from bitplan.runtime.streaming.transfer.host_memory import HostKind
from bitplan.runtime.streaming.transfer.schedule import Slots, check_slots


@dataclass(frozen=True)
class StreamOptions:
    """The options of `stream_blocks`, by the same names."""

    formats: Formats
    slots: Slots
    host: HostKind
    train: Train
    optimizer: AdamWSettings | None
    clip_grad_norm: float | None
    slot_bytes: int | None
    vram_bytes: int | None
    host_folder: str | Path | None
    telemetry: str | Path | None
    check_finite: bool
    offload_activations: bool
    compile: bool | Mapping[str, Any]
    timeout_s: float

    def compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward, compiled if that was asked for."""
        if self.compile is False:
            return forward
        compiled: Callable[..., Any] = torch.compile(forward, **({} if self.compile is True else self.compile))
        return compiled

    def check(self) -> None:
        """Refuse options that contradict each other."""
        train = self.train
        for name in ("check_finite", "offload_activations"):
            if not isinstance(value := getattr(self, name), bool):
                raise StreamError(f"{name}={value!r}: expected True or False")
        check_slots(self.slots, self.vram_bytes)
        if not isinstance(self.slot_bytes, int | None) or (self.slot_bytes is not None and self.slot_bytes < 1):
            raise StreamError(f"slot_bytes={self.slot_bytes!r}: expected a whole number of bytes, as int(4e8)")
        if not isinstance(self.timeout_s, Real) or not self.timeout_s > 0:
            raise StreamError(f"timeout_s={self.timeout_s!r}: expected seconds above 0")
        if not isinstance(self.compile, bool | Mapping):
            raise StreamError(
                f"compile={self.compile!r}: expected True, False or a mapping of torch.compile's arguments"
            )
        if not isinstance(self.optimizer, AdamWSettings | None):
            raise StreamError(f"optimizer: expected AdamWSettings, got {type(self.optimizer).__name__}")
        if self.clip_grad_norm is not None:
            if train != "weights":
                raise StreamError(
                    f"clip_grad_norm= clips gradients of streamed weights, but train={train!r}; those of adapters are "
                    "on the device: torch.nn.utils.clip_grad_norm_ clips them"
                )
            check_norm("clip_grad_norm", self.clip_grad_norm)
        if self.offload_activations and train == "nothing":
            raise StreamError("offload_activations=True keeps inputs for a backward, and train='nothing' has none")
        if self.optimizer is not None and train != "weights":
            raise StreamError(f"optimizer= trains streamed weights, but train={train!r}; pass train='weights'")
        if train == "weights" and self.host == "file":
            raise StreamError(
                "train='weights' keeps FP32 masters in RAM, so host='file' would save nothing; use 'pinned'"
            )
        self.refuse_several_processes()

    def refuse_several_processes(self) -> None:
        """Refuse to train weights where several processes train together: each would step by its own gradients."""
        if self.train != "weights" or not (distributed.is_available() and distributed.is_initialized()):
            return
        if (processes := distributed.get_world_size()) > 1:
            raise StreamError(
                f"train='weights' in a process group of {processes}: gradients of streamed weights are not reduced "
                "over processes, so that each would train a model of its own; train adapters (train='adapters'), or "
                "run one process (python instead of torchrun)"
            )


def check_norm(what: str, max_norm: float) -> None:
    if not (isinstance(max_norm, Real) and math.isfinite(max_norm) and max_norm > 0):
        raise StreamError(f"{what}: expected a norm above 0, got {max_norm!r}")
