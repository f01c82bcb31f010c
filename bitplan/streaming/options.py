"""StreamRequest: what `stream_blocks` was asked for, checked as a whole before anything is allocated; StreamOptions
are the parts of it that few need.

`formats`, which each parameter of each block crosses the bus in, may be
    None            every parameter in its own type: nothing is lost
    a name          that format for every weight of two or more axes; vectors (norms, biases) keep their own type
    a mapping       keys, first match wins: a parameter's full name, a block's or module's name (its matrices, as
                    above), or a shell pattern of either; parameters without a key, or with None, keep their type
    a manifest      its rules
    a Plan          by parameter name, exactly; a parameter of a block that the plan lacks is refused
Decisions only, by `choose_formats`: no tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from bitplan.base.errors import StreamError
from bitplan.base.hardware import free_memory
from bitplan.formats import get_format
from bitplan.formats.format import Format
from bitplan.plan.format_choices import Wanted, choose_formats
from bitplan.plan.names import ShellPatterns
from bitplan.plan.plan import Cause, Choice, Plan, Planned
from bitplan.plan.structure.model_view import TensorSpec
from bitplan.streaming.find_blocks import ParameterSpec, Train
from bitplan.streaming.training.optimizers import Settings
from bitplan.streaming.training.processes import several_processes
from bitplan.streaming.training.trained_weight import MomentFormat
from bitplan.streaming.transfer.copies import WAIT_TIMEOUT_S
from bitplan.streaming.transfer.host_memory import HostKind
from bitplan.streaming.transfer.schedule import Slots, check_slots

Formats = Wanted | None
Experts = Literal["all", "by use", "auto"]
Moments = MomentFormat | Literal["auto"] | Mapping[str, MomentFormat]
# Names in a plan of what is no format of stored tensors; `training.adamw` defines both.
STATE_FORMATS = {"float32": "float32", "int8": "int8_roots_b64"}
SPLIT_MASTER = "int16_remainder"
HOST_BYTES, FREE_SHARE = 16, 0.8  # a BF16 weight that is trained with moments in float32; of the memory that is free
SMALLEST_IN_8_BITS = 4096  # numbers: smaller weights save nothing, and norms and biases mix kinds of numbers in a block
# Block name -> (parameter's name within the block -> its shape and type).
BlockSpecs = Mapping[str, Mapping[str, ParameterSpec]]
BlockFormats = dict[str, dict[str, Format]]


def resolve_formats(formats: Formats, blocks: BlockSpecs, current: BlockFormats | None = None) -> BlockFormats:
    """Block -> parameter -> format. Parameters that a mapping does not name have those of `current`, if given."""
    specs = {f"{block}.{name}": spec for block, names in blocks.items() for name, spec in names.items()}
    own_formats = {name: own_format(spec, name) for name, spec in specs.items()}
    now = {f"{block}.{name}": fmt for block, names in (current or {}).items() for name, fmt in names.items()}
    base = Plan({name: Planned(Choice((own_formats | now)[name].name, "as it is", cause="held")) for name in specs})
    if isinstance(formats, Plan):  # a plan may be for the whole model
        formats = Plan({name: entry for name, entry in formats.entries.items() if name in specs})
    elif formats is None:
        formats = base
    elif isinstance(formats, Format | str):
        formats = {"*": formats}
    tensors = {name: TensorSpec.of(name, spec.shape, dtype=own_formats[name].name) for name, spec in specs.items()}
    plan = choose_formats(tensors, formats, base=base, where="stream_blocks")
    plan.require_whole("stream_blocks")
    return {
        block: {name: get_format(plan[f"{block}.{name}"].format) for name in names} for block, names in blocks.items()
    }


def own_format(spec: ParameterSpec, name: str) -> Format:
    """The plain cast to a parameter's own type."""
    text = str(spec.dtype).removeprefix("torch.")
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise StreamError(
            f"{name}: {text} cannot be streamed; float32, bfloat16, float16 and float64 parameters can: "
            "stream the model before it is packed, and give the packed formats as `formats`"
        )
    return get_format(text)


def plan_states(moments: Moments, weights: Mapping[str, ParameterSpec]) -> Plan:
    """How the moments and the master of every trained weight are kept, as `WEIGHT.moments` and `WEIGHT.master`."""
    reason_for_all = f"{moments} for all weights"
    if moments == "auto":
        needed, free = HOST_BYTES * sum(math.prod(spec.shape) for spec in weights.values()), free_memory()
        fits = needed <= FREE_SHARE * free
        moments = "float32" if fits else "int8"
        reason_for_all = (
            f"auto: {needed / 1e9:.1f} GB with moments in float32, {free / 1e9:.1f} GB of the host are free"
        )
    by_name = moments if isinstance(moments, Mapping) else {}
    patterns = ShellPatterns(by_name)
    patterns.check(weights, "moments", "trained weight", StreamError)
    entries: dict[str, Planned] = {}
    for name, spec in weights.items():
        pattern = next(iter(patterns.matching(name)), None)
        cause: Cause
        if isinstance(moments, str):
            chosen, reason, cause = moments, reason_for_all, "rule" if moments == "int8" else "default"
            if moments == "int8" and math.prod(spec.shape) < SMALLEST_IN_8_BITS:
                chosen, reason, cause = "float32", f"fewer than {SMALLEST_IN_8_BITS} numbers", "default"
        elif pattern is not None:
            chosen, reason, cause = by_name[pattern], f"{pattern!r} in the mapping", "rule"
        else:
            chosen, reason, cause = "float32", "not in the mapping", "default"
        is_split = chosen == "int8" and spec.dtype == torch.bfloat16
        of_master = "with the BF16 weight it is the FP32 master" if is_split else "as AdamW steps it"
        choices = {
            "moments": Choice(STATE_FORMATS[chosen], reason, cause=cause),
            "master": Choice(SPLIT_MASTER if is_split else "float32", of_master, cause="default"),
        }
        entries |= {f"{name}.{part}": Planned(choice, kind="state") for part, choice in choices.items()}
    return Plan(entries)


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What few streams need to say, for `stream_blocks(options=)`.

    slot_bytes    size of a slot; by default that of the largest block
    vram_bytes    memory that slots="auto" may take, instead of all spare memory
    host_folder   where host="file" has its files, instead of a temporary folder
    check_finite  look for NaN and infinity in the outputs of blocks, without waiting for the device
    compile       run blocks through torch.compile, once for all blocks of one kind; a mapping has its arguments
    timeout_s     how long any wait, for a transfer or for another process, may take before it is an error
    shard_optimizer   with train="weights" in several processes (torchrun): each keeps the master and the states of its
                  part of every weight, and steps that part; see `training.processes`
    update_in_backward    with train="weights": step each weight as soon as its gradient is on the host, beside the
                  rest of the backward, instead of after the step's last gradient. One backward a step, in one
                  process, without clipping or a GradScaler; a step that breaks off in its backward, or is not ended,
                  leaves weights of two steps, and a state must be loaded
    moments       with train="weights": AdamW's moments in "float32", or in "int8", in 2.13 bytes a weight instead of 8,
                  with the FP32 master of a BF16 weight in 2 bytes beside it instead of 4 (see `training.adamw`);
                  weights of fewer than 4,096 numbers keep float32. Or a mapping from patterns of names, first match
                  wins: {"*.mlp.*": "int8"}; what it does not name keeps float32. "auto": float32 where 16 bytes a
                  weight take at most 80% of the host's free memory, else int8; for one process
    experts       of mixtures, frozen: "all" cross with their block; "by use": those that the router chose, after it
                  chose them; "auto": by use where few are chosen, else all (`routed_experts`)
    expert_cache_bytes   device memory in which the experts that are used most stay, of all mixtures
    """

    slot_bytes: int | None = None
    vram_bytes: int | None = None
    host_folder: str | Path | None = None
    check_finite: bool = True
    compile: bool | Mapping[str, Any] = False
    timeout_s: float = WAIT_TIMEOUT_S
    shard_optimizer: bool = False
    update_in_backward: bool = False
    moments: Moments = "float32"
    experts: Experts = "all"
    expert_cache_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StreamRequest(StreamOptions):
    """All that one call of `stream_blocks` asks for, by the same names."""

    formats: Formats
    slots: Slots
    host: HostKind
    train: Train
    optimizer: Settings | None
    clip_grad_norm: float | None
    telemetry: str | Path | None
    offload_activations: bool

    def compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward, compiled if that was asked for."""
        if self.compile is False:
            return forward
        compiled: Callable[..., Any] = torch.compile(forward, **({} if self.compile is True else self.compile))
        return compiled

    def check(self) -> None:
        """Refuse options that contradict each other."""
        train = self.train
        for name in ("check_finite", "offload_activations", "shard_optimizer", "update_in_backward"):
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
        if not isinstance(self.optimizer, Settings | None):
            given: Any = self.optimizer
            shown = repr(given) if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
            raise StreamError(
                f"optimizer: expected AdamWSettings or HostOptimizer of bitplan.streaming, got {shown}; "
                "for another optimizer of torch give HostOptimizer(torch.optim.SGD, 0.1, {'momentum': 0.9})"
            )
        if self.clip_grad_norm is not None:
            if train != "weights":
                raise StreamError(
                    f"clip_grad_norm= clips gradients of streamed weights, but train={train!r}; those of adapters are "
                    "on the device: torch.nn.utils.clip_grad_norm_ clips them"
                )
            check_norm("clip_grad_norm", self.clip_grad_norm)
        if self.offload_activations and train == "nothing":
            raise StreamError("offload_activations=True is for a backward, train='nothing' has none; leave one")
        if self.optimizer is not None and train != "weights":
            raise StreamError(f"optimizer= trains streamed weights, but train={train!r}; pass train='weights'")
        if train == "weights" and self.host == "file":
            raise StreamError(
                "train='weights' keeps FP32 masters in RAM, so host='file' would save nothing; use 'pinned'"
            )
        self._check_moments()
        if self.update_in_backward and (train != "weights" or self.clip_grad_norm is not None):
            reason = "clip_grad_norm= needs all gradients first" if train == "weights" else f"train={train!r} has none"
            raise StreamError(f"update_in_backward=True steps weights as their gradients arrive, and {reason}")
        self._check_experts()
        if self.shard_optimizer and train != "weights":
            raise StreamError(f"shard_optimizer=True divides AdamW of streamed weights, but train={train!r}")

    def _check_experts(self) -> None:
        if self.experts not in get_args(Experts):
            raise StreamError(f"experts={self.experts!r}: there are {', '.join(map(repr, get_args(Experts)))}")
        cache = self.expert_cache_bytes
        if not isinstance(cache, int) or cache < 0:
            raise StreamError(f"expert_cache_bytes={cache!r}: expected a whole number of bytes, as int(4e9)")
        if self.experts == "all":
            if cache:
                raise StreamError("expert_cache_bytes= goes with experts='by use' or 'auto', got experts='all'")
            return
        for is_fine, what in (
            (self.train != "weights", "train='weights', which changes experts every step; use train='adapters'"),
            (self.host == "pinned", f"host={self.host!r}, whose bytes cross by way of staging; use host='pinned'"),
            (self.compile is False, "compile=, whose code cannot wait for the router; leave it out"),
        ):
            if not is_fine:
                raise StreamError(f"experts={self.experts!r} does not go with {what}; give experts='all'")

    def _check_moments(self) -> None:
        if self.moments == "auto":
            if several_processes():
                raise StreamError("moments='auto' looks at the memory of one process; say 'float32' or 'int8'")
            return
        chosen = self.moments.values() if isinstance(self.moments, Mapping) else (self.moments,)
        for one in chosen:
            if one not in get_args(MomentFormat):
                choices = ", ".join(map(repr, (*get_args(MomentFormat), "auto")))
                raise StreamError(f"moments={one!r}: there are {choices}")


def check_norm(what: str, max_norm: float) -> None:
    if not (isinstance(max_norm, Real) and math.isfinite(max_norm) and max_norm > 0):
        raise StreamError(f"{what}: expected a norm above 0, got {max_norm!r}")
