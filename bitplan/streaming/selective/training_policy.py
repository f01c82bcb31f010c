"""SelectivePrecisionPolicy: decides in training, on a stream, which block crosses as BF16 and which as INT8.

    stream = stream_blocks(model, "model.layers.*", device="cuda")
    policy = SelectivePrecisionPolicy(stream, SelectivePrecisionConfig.load("config.json"))
    for step, batch in enumerate(batches):
        policy.begin_step(step)              # precisions that were decided take effect, and hold until end_step
        model(**batch).loss.backward()
        policy.collect_block_grad_stats()    # enqueued, not read
        policy.compute_hints(step)           # every update_interval_steps: decide, from the steps before this one
        optimizer.step(); optimizer.zero_grad()
        policy.end_step()

Decisions are pure functions (`decide`); the policy applies them to the stream. Statistics are read one step late: at
step s the decision sees the steps before s, whose numbers have reached the host while the device works on s, so its
queue never runs dry, and a decision depends on what was measured, never on how fast it arrived. The one exception is
`bandwidth_aware`, which is about speed: its measurements of the first steps are saved in the state.

ConductorLink passes transfer limits (`transfer.transfer_limits`) to the stream by the phase of a step. All slots of a
busy ring are taken, so the rule about full copy slots applies only with a bridge of your own.

PrecisionTelemetry writes a line of JSON per update. The fields from `step_id` to `block_details` are Stagehand's, whose
tools read these files; its `estimated_bandwidth_saving_pct` counts a low block as half a bf16 block, so the exact bytes
stand beside it. Sensitivities and bytes are null where they are not known. The file is opened when training starts: a
path that cannot be written is an error then, and not after an hour.

Loss feedback tries a switch: the loss of a probe batch is taken before and after it.

    begin_trial      the units that go low together are on trial
    advance_trial    within the tolerance        -> accepted
                     above it, several suspects  -> halve them and probe again: log2(n) probes find one
                     one suspect left            -> it goes back to bf16 and backs off; the others are probed again

until a probe is accepted or no unit is left. A back-off doubles with every rollback of the same unit. A loss that is
not finite counts as above any tolerance. Trials are state that can be saved between any two probes.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from bitplan.base.documents import OBJECT, SIZE, Kind, Reader, is_number, load_document, one_of
from bitplan.base.errors import BitplanError
from bitplan.base.logs import JsonLog
from bitplan.base.records import Closing, write_json
from bitplan.streaming.block_stream import BlockStream
from bitplan.streaming.selective.calibration import (
    CalibrationResult,
    Forward,
    OnProgress,
    OnStale,
    evaluating,
    run_calibration,
)
from bitplan.streaming.selective.config import (
    PRECISIONS,
    SelectiveError,
    SelectiveFileError,
    SelectivePrecisionConfig,
)
from bitplan.streaming.selective.decide import (
    BlockPrecisionHint,
    Evidence,
    Hints,
    TransferFacts,
    assign_forced,
    compute_hints,
    current_hints,
    describe_changes,
    is_update_due,
)
from bitplan.streaming.selective.gradient_statistics import GradStatsCollector
from bitplan.streaming.selective.layer_probes import LayerProbes
from bitplan.streaming.selective.precision_units import PrecisionUnits
from bitplan.streaming.selective.score import mean_of
from bitplan.streaming.selective.state import (
    PolicyState,
    Trial,
    observe,
    state_from_document,
    state_to_document,
)
from bitplan.streaming.telemetry import StreamStepStats
from bitplan.streaming.training.host_training import GRADIENTS_WAITING
from bitplan.streaming.transfer.transfer_limits import ConductorState, HeuristicPolicyBridge, Phase, RuntimeLimitHints

if TYPE_CHECKING:
    from bitplan.streaming.selective.run_controller import RunController


class ConductorLink:
    """One conductor over one stream; without a `bridge` limits start from the stream's own size."""

    def __init__(self, stream: BlockStream, bridge: HeuristicPolicyBridge | None = None) -> None:
        self.stream = stream
        self._given = bridge
        self._bridge = bridge or HeuristicPolicyBridge(self._size())
        self.state: ConductorState = self._bridge.start()

    @property
    def hints(self) -> RuntimeLimitHints:
        return self.state.hints

    def begin_step(self, step: int, hints: Mapping[str, BlockPrecisionHint]) -> None:
        """Begin a step and its forward pass, after a step that ended or was interrupted."""
        self._bridge = self._given or HeuristicPolicyBridge(self._size())
        if self.state.phase is not Phase.STEP_END:
            self.state = self._bridge.start()
        self.state = self._bridge.begin_step(self.state, step, hints)
        self.enter(Phase.FORWARD)

    def restart(self) -> None:
        """Forget the step, as after a saved state is loaded."""
        self.state = self._bridge.start()

    def enter(self, phase: Phase) -> None:
        """Enter a phase, and set its limits for the present pressure."""
        if phase is Phase.OPTIMIZER and self.state.phase is Phase.FORWARD:
            self.enter(Phase.BACKWARD)  # no hook saw it: no gradient passed the last block
        pressure = self.stream.pressure()
        if self._given is None:
            pressure = replace(pressure, slots_full=False)
        self.state = self._bridge.enter(self.state, phase, pressure)
        self.stream.set_limits(self.state.hints)

    def _size(self) -> RuntimeLimitHints:
        slots = max(1, self.stream.stats.ring_slots)
        return RuntimeLimitHints(slots, GRADIENTS_WAITING, slots)


KEYS = ("compute_ms", "bytes_per_ms", "crossings")


class TransferMeter:
    """How fast the bus is and how long computing takes, from the clocks of the stream's first steps.

    `note` every step, `settle` when a decision (`bandwidth_aware`) needs the facts. Times differ from run to run, so
    both are fixed once, as the median of the steps until then, and saved with the policy's state: a resumed run uses
    the same facts.
    """

    def __init__(self) -> None:
        self.facts: TransferFacts | None = None
        self._seen: dict[int, TransferFacts] = {}

    def note(self, last: StreamStepStats | None, one_crossing_bytes: int) -> None:
        """Add a step whose clocks have been read; moving all blocks once takes `one_crossing_bytes`."""
        if self.facts is not None or last is None or last.step in self._seen:
            return
        if last.bytes_h2d and last.h2d_gb_per_s:
            crossings = last.bytes_h2d / one_crossing_bytes
            self._seen[last.step] = TransferFacts(last.compute_ms, last.h2d_gb_per_s * 1e6, crossings)
        else:  # every block is resident: nothing is transferred
            self._seen[last.step] = TransferFacts(last.compute_ms, float(one_crossing_bytes), 1e-9)

    def settle(self) -> TransferFacts | None:
        """The facts, fixed from now on; None where no clock has been read yet."""
        if self.facts is None and self._seen:
            measured = list(self._seen.values())
            self.facts = TransferFacts(*(statistics.median(getattr(one, key) for one in measured) for key in KEYS))
        return self.facts

    def to_document(self) -> dict[str, float] | None:
        return None if self.facts is None else {key: getattr(self.facts, key) for key in KEYS}


_BEGINS = b'{"step_id": 0, "timestamp": '


class TelemetryError(BitplanError, OSError):
    """A telemetry file that cannot be written."""


@dataclass(frozen=True)
class PrecisionStepMetrics:
    """One line of telemetry: Stagehand's fields in their order, then those that only bitplan has."""

    step_id: int
    timestamp: float
    blocks_bf16: int
    blocks_int8: int
    mean_sensitivity: float | None
    max_sensitivity: float | None
    min_sensitivity: float | None
    precision_changes: int
    estimated_bandwidth_saving_pct: float
    block_details: Mapping[str, Any] = field(default_factory=dict)
    bytes_sent: int | None = None
    bytes_not_sent: int | None = None


def step_metrics(
    step_id: int,
    hints: Mapping[str, BlockPrecisionHint],
    timestamp: float,
    *,
    unit_bytes: Mapping[str, Mapping[str, int]] | None = None,
    excluded: Mapping[str, Mapping[str, int]] | None = None,
) -> PrecisionStepMetrics:
    """The line for these hints. `unit_bytes`: block -> precision -> bytes sent; `excluded`: the counts so far."""
    counts = Counter(hint.precision for hint in hints.values())
    scores = [hint.sensitivity for hint in hints.values() if hint.sensitivity is not None]
    sent = in_bf16 = None
    if unit_bytes is not None:
        sent = sum(unit_bytes[name][hint.precision] for name, hint in hints.items())
        in_bf16 = sum(unit_bytes[name]["bf16"] for name in hints)
    return PrecisionStepMetrics(
        step_id=step_id,
        timestamp=timestamp,
        blocks_bf16=counts["bf16"],
        blocks_int8=counts["int8"],
        mean_sensitivity=mean_of(scores) if scores else None,
        max_sensitivity=max(scores, default=None),
        min_sensitivity=min(scores, default=None),
        precision_changes=sum(hint.changed for hint in hints.values()),
        estimated_bandwidth_saving_pct=estimate_saving_pct(len(hints) - counts["bf16"], len(hints)),
        block_details={
            name: {
                "precision": hint.precision,
                "sensitivity": hint.sensitivity,
                "reason": hint.reason,
                "excluded": dict((excluded or {}).get(name, {})),
            }
            for name, hint in hints.items()
        },
        bytes_sent=sent,
        bytes_not_sent=None if sent is None or in_bf16 is None else in_bf16 - sent,
    )


def estimate_saving_pct(low_blocks: int, blocks: int) -> float:
    """A rough estimate: a low block is half the bytes of a bf16 one, so 60% of the blocks save 30%."""
    return round(50.0 * low_blocks / blocks, 1) if blocks else 0.0


class PrecisionTelemetry(JsonLog):
    """Appends lines to a file. `clock` gives the timestamps: seconds since 1970 unless another one is given."""

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        try:
            what = "selective precision telemetry file"
            super().__init__(path, _BEGINS, noun=what, error=TelemetryError, may_lose_lines=True)
        except TelemetryError as refused:
            raise TelemetryError(f"{refused}; set telemetry_file to it, or telemetry_enabled to false") from None

    @classmethod
    def from_config(cls, config: SelectivePrecisionConfig, folder: str | Path = ".") -> PrecisionTelemetry | None:
        """The file that the config names, within `folder` unless the path is absolute; None where it is turned off."""
        if not (config.enabled and config.telemetry_enabled):
            return None
        return cls(Path(folder) / config.telemetry_file)

    def record(self, step_id: int, hints: Mapping[str, BlockPrecisionHint], **figures: Any) -> PrecisionStepMetrics:
        """Write the line of these hints, and return it; `figures` are those that `step_metrics` takes."""
        metrics = step_metrics(step_id, hints, self.clock(), **figures)
        self.write_lines(asdict(metrics))
        return metrics


MAX_DOUBLINGS = 16


@dataclass(frozen=True)
class Verdict:
    """What follows from a trial's loss: the switch is accepted or undone, or another probe loss is needed."""

    action: Literal["accepted", "probe", "rolled_back"]
    reason: str
    culprit: str | None = None


def begin_trial(
    state: PolicyState, hints: Mapping[str, BlockPrecisionHint], loss_before: float, step: int
) -> PolicyState:
    """Open a trial of the units that these hints send low, except forced ones. Without such units there is no trial."""
    if state.trial is not None:
        raise SelectiveError(f"a trial of step {state.trial.step} is still open; judge it before another begins")
    switched = {
        name: hint.precision
        for name, hint in hints.items()
        if hint.changed and hint.precision != "bf16" and not hint.forced
    }
    if not switched:
        return state
    if not math.isfinite(loss_before):
        raise SelectiveError(
            f"step {step}: the probe loss before a switch must be finite, got {loss_before!r}: nothing could be "
            "attributed to the switch; look at the training itself"
        )
    return replace(state, trial=Trial(step, loss_before, switched, (), tuple(switched)))


def advance_trial(
    state: PolicyState, loss_after: float, config: SelectivePrecisionConfig
) -> tuple[PolicyState, Verdict]:
    """The state and the next move, given the probe loss with `trial.probing` low."""
    trial = state.trial
    if trial is None:
        raise SelectiveError("no trial is open; begin_trial opens one when a hint sends a unit low")
    rise = loss_after - trial.loss_before
    is_worse = not rise <= config.loss_tolerance  # written so that NaN counts as worse
    low = trial.probing[0] if len(trial.probing) == 1 else f"{len(trial.probing)} units"
    reason = (
        f"probe loss {trial.loss_before:.6g} -> {loss_after:.6g} with {low} low, tolerance {config.loss_tolerance:g}"
    )
    if is_worse:
        trial = replace(trial, raised=reason)
    if not trial.suspects:
        if not is_worse:
            return replace(state, trial=None), Verdict("accepted", reason)
        suspects = tuple(trial.switched)
    else:
        cleared = set(trial.suspects) - set(trial.probing) if is_worse else set(trial.probing)
        suspects = tuple(name for name in trial.suspects if name not in cleared)
    if len(suspects) > 1:
        probing = suspects[: (len(suspects) + 1) // 2]
        return _probe(state, replace(trial, suspects=suspects, probing=probing), f"{reason}: which of {len(suspects)}")
    return _roll_back(state, trial, suspects[0], config)


def _roll_back(
    state: PolicyState, trial: Trial, culprit: str, config: SelectivePrecisionConfig
) -> tuple[PolicyState, Verdict]:
    unit = state.units[culprit]
    rollbacks = unit.rollbacks + 1
    until = trial.step + config.backoff_steps * 2 ** min(rollbacks - 1, MAX_DOUBLINGS)
    # `raised`, not the last probe: if the other suspects were cleared, the last probe was without the culprit.
    reason = f"rolled back: {trial.switched[culprit]} raised the loss ({trial.raised}); bf16 until step {until}"
    changed = replace(
        unit,
        precision="bf16",
        reason=reason,
        last_switch_step=trial.step,
        rollbacks=rollbacks,
        backoff_until=until,
    )
    state = state.with_units({culprit: changed})
    rest = {name: precision for name, precision in trial.switched.items() if name != culprit}
    if not rest:
        return replace(state, trial=None), Verdict("rolled_back", reason, culprit)
    next_trial = replace(trial, switched=rest, suspects=(), probing=tuple(rest), raised="")
    return _probe(state, next_trial, reason, culprit)


def _probe(state: PolicyState, trial: Trial, reason: str, culprit: str | None = None) -> tuple[PolicyState, Verdict]:
    """Ask for another probe loss, with only the units in `trial.probing` in their new precision."""
    units = {
        name: replace(state.units[name], precision=precision if name in trial.probing else "bf16")
        for name, precision in trial.switched.items()
    }
    return replace(state.with_units(units), trial=trial), Verdict("probe", reason, culprit)


log = logging.getLogger("bitplan")


def check_setup(stream: BlockStream, config: SelectivePrecisionConfig, probe: Callable[..., object] | None) -> None:
    """Refuse settings that contradict each other."""
    if config.enabled and config.mode == "dynamic" and stream.train == "nothing":
        raise SelectiveError(
            "mode 'dynamic' decides from gradients, and this stream trains nothing; stream with train='adapters' or "
            "'weights', or use mode 'static'"
        )
    if config.loss_feedback and probe is None:
        raise SelectiveError("loss_feedback needs a probe: a function that gives the loss of a fixed batch (probe=)")


def decides_on(config: SelectivePrecisionConfig, unit: str) -> bool:
    """Whether the policy decides on a unit; in mode "off" only on forced ones: others keep the stream's formats."""
    return config.enabled and (config.mode != "off" or config.forced(unit) is not None)


def errors_of(units: PrecisionUnits, calibration: CalibrationResult | None) -> dict[str, dict[str, float]]:
    """Calibration errors by unit and precision, for the formats that the config gives precisions."""
    errors: dict[str, dict[str, float]] = {}
    if calibration is None:
        return errors
    fmt = units.config.int8_format
    for name in units.names:
        error = calibration.of(name, fmt)
        errors[name] = {} if error is None else {"int8": error}
    lacking = [name for name in units.names if not errors[name]]
    if lacking:
        raise SelectiveError(
            f"the calibration has no error of {lacking[0]!r} ({len(lacking)} units) in {fmt}; calibrate this model "
            "with this format, or leave calibration out"
        )
    return errors


class Reminders:
    """Warns once of each forgotten call: training would go on, and nothing would be decided."""

    def __init__(self, config: SelectivePrecisionConfig) -> None:
        self._config = config
        self._is_dynamic = config.enabled and config.mode == "dynamic"
        self._said: set[str] = set()
        self._steps_undecided = 0  # steps in a row without compute_hints at a multiple of the interval

    def lacks_calibration(self, quant_errors: Mapping[str, object]) -> bool:
        """Whether scores would use calibration errors, by the config, and there are none."""
        config = self._config
        by_errors = config.scoring == "gradient" and config.error_weight > 0
        return self._is_dynamic and config.run_calibration and by_errors and not quant_errors

    def step_begins(self, quant_errors: Mapping[str, object]) -> None:
        if self.lacks_calibration(quant_errors):
            self.say_once(
                "run_calibration",
                "run_calibration is true, but nothing was calibrated, so scores go by gradients alone; call "
                "policy.calibrate(batches) before the first step, or set run_calibration to false",
            )

    def decided(self) -> None:
        """Note that compute_hints was called at a multiple of the interval."""
        self._steps_undecided = 0

    def step_ends(self, step: int, *, has_collected: bool) -> None:
        if not self._is_dynamic:
            return
        if not has_collected:
            self.say_once(
                "collect_block_grad_stats",
                f"step {step}: collect_block_grad_stats() was not called between backward and end_step, so nothing is "
                "known of its gradients; call it in every step",
            )
        self._steps_undecided += 1
        interval = self._config.update_interval_steps
        if self._steps_undecided > interval:
            self.say_once(
                "compute_hints",
                f"step {step}: {self._steps_undecided} steps without an update: compute_hints(step) decides in steps "
                f"whose number is a multiple of update_interval_steps ({interval}), and was not called in any",
            )

    def closes(self, state: PolicyState, *, has_run: bool) -> None:
        if self._is_dynamic and has_run and state.last_update_step is None:
            self.say_once(
                "closed",
                f"closed before the first update, nothing was decided: warmup_steps is {self._config.warmup_steps} and "
                f"update_interval_steps {self._config.update_interval_steps}",
            )

    def left_out(self, state: PolicyState, step: int) -> None:
        """Warn of units whose gradients could not be used."""
        for name, unit in state.units.items():
            # Impacts need no gradient of the unit's own parameters: a unit without adapters lacks nothing.
            excluded = {
                why: n for why, n in unit.excluded.items() if why != "missing" or self._config.scoring == "gradient"
            }
            if excluded:
                counts = ", ".join(f"{count} {why}" for why, count in excluded.items())
                self.say_once(name, f"step {step}: gradients of {name} are left out, not taken for zero: {counts}")

    def say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("bitplan: %s", text)


Probe = Callable[[], Tensor | float]
DOCUMENT, VERSION = "bitplan-selective-policy", 1


class SelectivePrecisionPolicy(Closing):
    """Decides the precision of one stream's blocks until `close`; the module's docstring has the lifecycle.

    telemetry    where lines are written; None: the file that the config names, in `folder`
    calibration  errors from `run_calibration`
    probe        a function that gives the loss of a fixed batch; needed for loss_feedback
    bridge       other conductor rules
    """

    def __init__(
        self,
        stream: BlockStream,
        config: SelectivePrecisionConfig | None = None,
        *,
        telemetry: PrecisionTelemetry | None = None,
        calibration: CalibrationResult | None = None,
        probe: Probe | None = None,
        bridge: HeuristicPolicyBridge | None = None,
        folder: str | Path = ".",
    ) -> None:
        self.stream, self.config, self.probe = stream, config or SelectivePrecisionConfig(), probe
        check_setup(stream, self.config, probe)
        self.units = PrecisionUnits(stream, self.config)
        self.state = PolicyState.start(self.units.names)
        self.unit_bytes = self.units.unit_bytes()
        self.quant_errors = errors_of(self.units, calibration)
        self.meter = TransferMeter()
        self.applied: dict[str, str] | None = None  # the precisions that the stream runs with
        self.metrics: PrecisionStepMetrics | None = None  # of the last update
        self.reminders = Reminders(self.config)
        self._has_collected = False  # in the open step
        self._step: int | None = None
        self._is_dynamic = self.config.enabled and self.config.mode == "dynamic"
        self._decided = [name for name in self.units.names if decides_on(self.config, name)]
        self._adapters = self.units.adapters() if stream.train == "adapters" else {}
        self.collector = GradStatsCollector(self.units.names)
        self.conductor = ConductorLink(stream, bridge)
        self.probes = LayerProbes(self.units, self.collector, lambda: self.conductor.enter(Phase.BACKWARD))
        self.telemetry = telemetry or PrecisionTelemetry.from_config(self.config, folder)
        self._hook()

    @staticmethod
    def over_run(
        stream: BlockStream,
        *,
        total_steps: int,
        probe: Callable[[int], Tensor],
        log: str | Path | None = None,
        times: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> RunController:
        """A controller of compute and wire together over a schedule of `total_steps`; `RunSettings` has the rest.

        probe   gives the loss of a fixed batch, number 0 or 1, with its graph
        log     gets a line for each change, for reports, `read_plan` and `replay_run`
        times   those of an earlier run of this model on this machine: nothing is timed again
        """
        from bitplan.streaming.selective.run_controller import RunController, RunSettings

        return RunController(
            stream, RunSettings(total_steps=total_steps, **settings), probe=probe, log=log, times=times
        )

    @staticmethod
    def replay_run(stream: BlockStream, log: str | Path) -> RunController:
        """A controller that makes the changes of a run's log at their steps, and measures nothing."""
        from bitplan.streaming.selective.run_controller import RunController

        return RunController.replay(stream, log)

    def _hook(self) -> None:
        self.probes.hook_backward()
        if not self._is_dynamic:
            return
        if self.stream.train == "weights":
            self.probes.hook_gradients()
        if self.config.scoring == "impact":
            self.probes.hook_impacts()
            for name, why in self.probes.unseen.items():
                log.warning("bitplan: the impact of %s cannot be measured, its unit stays bf16: %s", name, why)

    def close(self) -> None:
        """Remove the hooks and end the telemetry; the stream keeps its formats."""
        self.reminders.closes(self.state, has_run=self.applied is not None)
        self.probes.close()
        if self.telemetry is not None:
            self.telemetry.close()

    @property
    def precisions(self) -> dict[str, str]:
        """Every unit's precision from the next begin_step on."""
        return {name: unit.running for name, unit in self.state.units.items()}

    def calibrate(
        self,
        batches: Iterable[Any],
        *,
        cache: str | Path | None = None,
        on_stale: OnStale = "refuse",
        forward: Forward | None = None,
        progress: bool | OnProgress = True,
    ) -> CalibrationResult | None:
        """Measure, before the first step, the error of the config's formats on each unit; None where that is off."""
        if not self.config.run_calibration:
            return None
        if self.applied is not None or self._step is not None:
            raise SelectiveError("calibrate: training has begun; calibrate before the first begin_step")
        result = run_calibration(
            self.stream,
            batches,
            formats=[self.config.int8_format],
            samples=self.config.calibration_samples,
            cache=cache,
            on_stale=on_stale,
            forward=forward,
            progress=progress,
        )
        self.quant_errors = errors_of(self.units, result)
        return result

    @property
    def lacks_calibration(self) -> bool:
        """Whether decisions would use calibration errors, by the config, and there are none."""
        return self.reminders.lacks_calibration(self.quant_errors)

    # ---- the lifecycle -----------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Open a step of the stream with the precisions that were decided. A step that was not ended is abandoned."""
        self.probes.sleep()
        self.collector.drop_step()
        self._step, self._has_collected = None, False
        self.reminders.step_begins(self.quant_errors)
        if self.applied is None:  # the first step, or after a state that was saved before the first step
            self.state, _ = assign_forced(self.state, step, self.config)
        self._apply(step)
        self._step = step
        self.conductor.begin_step(step, current_hints(self.state, step, self.config))
        is_first = self.state.last_update_step is None
        self.probes.watch(self.precisions, step, impacts=self._measures_impacts(step), all_high=is_first)

    def collect_block_grad_stats(self) -> None:
        """Enqueue the statistics of this step's gradients; call it after backward, before the optimizer."""
        step = self._require_step("collect_block_grad_stats")
        self.probes.sleep()
        self._has_collected = True
        if not self._is_dynamic:
            return
        for unit, weight in self.probes.finish_step().items():
            self.reminders.say_once(
                f"impact of {unit}",
                f"step {step}: no impact of {unit}: no gradient reached {weight}; while that is so, it does not change",
            )
        if self._adapters:
            self.collector.add({name: [one.grad for one in adapters] for name, adapters in self._adapters.items()})
        self.collector.end_step(step)

    def compute_hints(self, step: int) -> Hints:
        """The precision of every unit from the next step on, each with its reason. Begins the optimizer's phase."""
        if step != self._require_step("compute_hints"):
            raise SelectiveError(f"compute_hints: step {self._step} is open, got step {step}")
        if self._is_dynamic and step % self.config.update_interval_steps == 0:
            self.reminders.decided()
            self._observe(before=step)
        due = is_update_due(self.state, step, self.config)
        evidence = self._evidence(due=due)
        if due and not self._lacks_transfer(evidence):
            self.state, hints = compute_hints(self.state, step, self.config, evidence)
            self._tell(step, hints)
        else:
            self.state, hints = assign_forced(self.state, step, self.config)
        self.conductor.enter(Phase.OPTIMIZER)
        return hints

    def end_step(self) -> None:
        """Close the step of the stream."""
        step = self._require_step("end_step")
        self.probes.sleep()
        self.reminders.step_ends(step, has_collected=self._has_collected)
        self.conductor.enter(Phase.STEP_END)
        self._step = None
        self.stream.end_step()
        if self.config.bandwidth_aware:
            sent = sum(sizes[(self.applied or {})[name]] for name, sizes in self.unit_bytes.items())
            self.meter.note(self.stream.stats.last, sent)

    # ---- step boundaries ---------------------------------------------------------------------------------------------

    def _apply(self, step: int) -> None:
        """Begin the stream's step with the decided precisions; as a trial if loss_feedback is on."""
        lowered = {
            name
            for name, unit in self.state.units.items()
            if unit.running != "bf16" and (self.applied or {}).get(name, "bf16") == "bf16"
            if self.config.forced(name) is None
        }
        if self.state.trial is not None or (self.config.loss_feedback and lowered):
            self._try(step, lowered)
        else:
            self._run_with(self.precisions, step)

    def _try(self, step: int, lowered: set[str]) -> None:
        """Probe the loss before and after a switch, and again until no low unit raises it."""
        before = dict(self.applied or dict.fromkeys(self.precisions, "bf16"))
        if self.state.trial is None:
            self._run_with(before, step)
            loss_before = self._probe_loss()
            if not math.isfinite(loss_before):
                self._call_off(before, lowered, loss_before)
                return
            hints = current_hints(self.state, step, self.config, before)
            self.state = begin_trial(self.state, hints, loss_before, step)
        self._run_with(self.precisions, step)
        rolled_back = False
        while self.state.trial is not None:
            self.state, verdict = advance_trial(self.state, self._probe_loss(), self.config)
            rolled_back |= verdict.culprit is not None
            if self.config.log_decisions:
                log.info("bitplan: step %d: trial %s: %s", step, verdict.action, verdict.reason)
            self._run_with(self.precisions, step)
        if rolled_back:
            self._record(step, current_hints(self.state, step, self.config, before))

    def _call_off(self, before: Mapping[str, str], lowered: set[str], loss: float) -> None:
        reason = f"not switched: the probe loss is {loss}, so nothing could be attributed to a switch"
        log.warning("bitplan: %s; look at the training itself", reason)
        changed = {
            name: replace(unit, precision=before[name], reason=reason)  # type: ignore[arg-type]
            for name, unit in self.state.units.items()
            if name in lowered
        }
        self.state = self.state.with_units(changed)

    def _run_with(self, precisions: Mapping[str, str], step: int) -> None:
        """Begin the step in these precisions, or begin it anew if it was begun in others."""
        formats, running = self.units.formats({name: precisions[name] for name in self._decided}), self.stream.formats
        if dict(precisions) != self.applied or any(running[name] != fmt for name, fmt in formats.items()):
            self.stream.set_formats(formats)
        self.stream.begin_step(step)
        self.applied = dict(precisions)

    def _probe_loss(self) -> float:
        assert self.probe is not None
        with evaluating(self.stream.model):
            return float(self.probe())

    # ---- evidence ----------------------------------------------------------------------------------------------------

    def _observe(self, *, before: int | None = None) -> None:
        for stats in self.collector.drain(before=before):
            self.state = observe(self.state, stats, self.config)

    def _evidence(self, *, due: bool) -> Evidence:
        transfer = self.meter.settle() if due else self.meter.facts
        return Evidence(self.quant_errors, self.unit_bytes, transfer)

    def _lacks_transfer(self, evidence: Evidence) -> bool:
        """Whether bandwidth is unknown: the first update came before the clocks of the first step could be read."""
        lacking = self.config.bandwidth_aware and evidence.transfer is None
        if lacking:
            log.info("bitplan: bandwidth_aware: no step's clocks have been read yet; the next update decides")
        return lacking

    def _measures_impacts(self, step: int) -> bool:
        """Whether this step measures impacts: an update follows within `impact_steps`."""
        config = self.config
        left = config.update_interval_steps - step % config.update_interval_steps
        return self._is_dynamic and config.scoring == "impact" and left <= config.impact_steps

    # ---- reports -----------------------------------------------------------------------------------------------------

    def _tell(self, step: int, hints: Hints) -> None:
        if self.config.log_decisions:
            for line in describe_changes(hints):
                log.info("bitplan: %s", line)
        self.reminders.left_out(self.state, step)
        self._record(step, hints)

    def _record(self, step: int, hints: Hints) -> None:
        excluded = {name: unit.excluded for name, unit in self.state.units.items()}
        measured = partial(step_metrics, timestamp=0.0) if self.telemetry is None else self.telemetry.record
        self.metrics = measured(step, hints, unit_bytes=self.unit_bytes, excluded=excluded)

    def scalars(self) -> dict[str, float]:
        """For charts: the share of units in each precision, bytes per crossing sent and not sent, sensitivity.

        Empty where selective precision does not decide on every unit.
        """
        if len(self._decided) < len(self.units.names):
            return {}
        hints = current_hints(self.state, 0, self.config)
        metrics = step_metrics(0, hints, 0.0, unit_bytes=self.unit_bytes)
        counts = {name: getattr(metrics, f"blocks_{name}") for name in PRECISIONS}
        shares = {f"share_{name}": count / len(hints) for name, count in counts.items()}
        shares |= {"bytes_sent": float(metrics.bytes_sent or 0), "bytes_saved": float(metrics.bytes_not_sent or 0)}
        if metrics.max_sensitivity is not None:
            shares["max_sensitivity"] = metrics.max_sensitivity
        return {f"selective_precision/{name}": value for name, value in shares.items()}

    def _require_step(self, call: str) -> int:
        if self._step is None:
            raise SelectiveError(f"{call}: no step is open; call begin_step(step) first")
        return self._step

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as values that JSON holds exactly; between steps only."""
        if self._step is not None:
            raise SelectiveError(f"state_dict: step {self._step} is open; save between end_step and begin_step")
        self._observe()
        return {
            "document": DOCUMENT,
            "version": VERSION,
            "policy": state_to_document(self.state, self.units.layout(), self.config),
            "applied": None if self.applied is None else dict(self.applied),
            "quant_errors": {name: dict(row) for name, row in self.quant_errors.items()},
            "transfer": self.meter.to_document(),
        }

    def load_state_dict(
        self,
        document: Mapping[str, Any],
        *,
        accept_config_change: bool = False,
        where: str = "the selective precision state",
    ) -> None:
        """Continue as the saved policy would have; a state of another model or config is refused before any change."""
        reader = Reader(where, SelectiveFileError)
        reader.version(document, VERSION)
        item = reader.keys("", document, _KEYS, tuple(_KEYS))
        layout = self.units.layout()
        state = state_from_document(
            item["policy"], layout, self.config, where=where, accept_config_change=accept_config_change
        )
        applied = item["applied"]
        if applied is not None:
            kinds = dict.fromkeys(self.units.names, one_of(*PRECISIONS))
            reader.keys("applied", applied, kinds, tuple(kinds))
        for name, row in reader.keys("quant_errors", item["quant_errors"], dict.fromkeys(layout, OBJECT), ()).items():
            reader.keys(f"quant_errors.{name}", row, dict.fromkeys(PRECISIONS, NUMBER), ())
        transfer = item["transfer"]
        if transfer is not None:
            kinds = dict.fromkeys(KEYS, NUMBER)
            transfer = TransferFacts(**reader.keys("transfer", transfer, kinds, tuple(kinds)))
        self.state, self.applied, self._step = state, applied, None
        self.quant_errors = item["quant_errors"]
        self.meter = TransferMeter()
        self.meter.facts = transfer
        self.collector = self.probes.collector = GradStatsCollector(self.units.names)
        self.probes.sleep()
        self.conductor.restart()

    def save(self, path: str | Path) -> None:
        """Write the state into a file, whole or not at all."""
        write_json(path, self.state_dict())

    def load(self, path: str | Path, *, accept_config_change: bool = False) -> None:
        document = load_document(path, SelectiveFileError)
        self.load_state_dict(document, accept_config_change=accept_config_change, where=str(path))


NUMBER = Kind("a number", is_number)
_OBJECT_OR_NULL = Kind("an object, or null", lambda value: value is None or type(value) is dict)
_KEYS = {
    "document": one_of(DOCUMENT),
    "version": SIZE,
    "policy": OBJECT,
    "applied": _OBJECT_OR_NULL,
    "quant_errors": OBJECT,
    "transfer": _OBJECT_OR_NULL,
}
