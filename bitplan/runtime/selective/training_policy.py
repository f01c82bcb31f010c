"""SelectivePrecisionPolicy: decides in training, on a stream, which block crosses as BF16, INT8, FP8 or in 4 bits.

    stream = stream_blocks(model, "model.layers.*", device="cuda")
    policy = SelectivePrecisionPolicy(stream, SelectivePrecisionConfig.load("config.json"))
    for step, batch in enumerate(batches):
        policy.begin_step(step)              # precisions that were decided take effect, and hold until end_step
        model(**batch).loss.backward()
        policy.collect_block_grad_stats()    # enqueued, not read
        policy.compute_hints(step)           # every update_interval_steps: decide, from the steps before this one
        optimizer.step(); optimizer.zero_grad()
        policy.end_step()

All decisions are pure functions in `bitplan.plan`; this module applies them to the stream.

Statistics are read one step late: at step s the decision sees the steps before s, whose numbers have reached the host
while the device works on s, so its queue never runs dry. The delay is the same on every machine: a decision depends on
what was measured, never on how fast it arrived. The one exception is `bandwidth_aware`, which is about speed: its
measurements of the first steps are saved in the state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bitplan.documents import OBJECT, SIZE, Kind, Reader, is_number, load_document, one_of
from bitplan.measure.calibration import CalibrationResult
from bitplan.measure.gradients.statistics import GradStatsCollector
from bitplan.plan.selective.choose_low_units import TransferFacts
from bitplan.plan.selective.config import PRECISIONS, SelectiveError, SelectiveFileError, SelectivePrecisionConfig
from bitplan.plan.selective.decide import (
    Hints,
    assign_first,
    assign_forced,
    compute_hints,
    current_hints,
    describe_changes,
    is_update_due,
)
from bitplan.plan.selective.evidence import Evidence
from bitplan.plan.selective.loss_trials import begin_trial, judge_trial
from bitplan.plan.selective.state import PolicyState, observe, state_from_document, state_to_document
from bitplan.plan.selective.transfer_limits import HeuristicPolicyBridge, Phase
from bitplan.records import Closing, write_json
from bitplan.runtime.selective.layer_probes import LayerProbes
from bitplan.runtime.selective.precision_units import PrecisionUnits
from bitplan.runtime.selective.run_calibration import Forward, OnProgress, OnStale, evaluating, run_calibration
from bitplan.runtime.selective.setup_checks import (
    Reminders,
    check_byte_share,
    check_setup,
    decides_on,
    device_has_fp8,
    errors_of,
)
from bitplan.runtime.selective.telemetry import PrecisionStepMetrics, PrecisionTelemetry, step_metrics
from bitplan.runtime.streaming.policy_link import KEYS, ConductorLink, TransferMeter
from bitplan.runtime.streaming.stream_blocks import BlockStream

log = logging.getLogger("bitplan")
Probe = Callable[[], Tensor | float]
DOCUMENT, VERSION = "bitplan-selective-policy", 1


class SelectivePrecisionPolicy(Closing):
    """Decides the precision of one stream's blocks until `close`; the module's docstring has the lifecycle.

    telemetry    where lines are written; None: the file that the config names, in `folder`
    calibration  errors from `run_calibration`
    probe        a function that gives the loss of a fixed batch; needed for loss_feedback
    bridge       other conductor rules
    has_fp8      whether FP8 may be chosen; None: on GPUs from compute capability 8.9, and on the simulated device
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
        has_fp8: bool | None = None,
        folder: str | Path = ".",
    ) -> None:
        self.stream, self.config, self.probe = stream, config or SelectivePrecisionConfig(), probe
        check_setup(stream, self.config, probe)
        self.units = PrecisionUnits(stream, self.config)
        self.state = PolicyState.start(self.units.names)
        self.unit_bytes = self.units.unit_bytes()
        check_byte_share(self.unit_bytes, self.config)
        self.quant_errors = errors_of(self.units, calibration)
        self.meter = TransferMeter()
        self.has_fp8 = device_has_fp8(stream.device.torch_device) if has_fp8 is None else has_fp8
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
        """Before the first step, measure the error of the config's formats on each unit; None if calibration is off."""
        if not self.config.run_calibration:
            return None
        if self.applied is not None or self._step is not None:
            raise SelectiveError("calibrate: training has begun; calibrate before the first begin_step")
        result = run_calibration(
            self.stream,
            batches,
            formats=[self.config.format_of(low) for low in self.config.low_precisions],
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
            self.state, _ = assign_first(self.state, step, self.config, self._evidence(due=False))
        self._apply(step)
        self._step = step
        self.conductor.begin_step(step, current_hints(self.state, step, self.config))
        self.probes.watch(
            self.precisions, self._lows_to_measure(step), step, all_high=self.state.last_update_step is None
        )

    def collect_block_grad_stats(self) -> None:
        """After backward, before the optimizer: enqueue the statistics of this step's gradients."""
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
        """Probe the loss before and after the switch, and again until no low unit raises it.

        A trial that an error interrupted continues: the weights have not changed since.
        """
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
            self.state, verdict = judge_trial(self.state, self._probe_loss(), self.config)
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
        return Evidence(self.quant_errors, self.unit_bytes, transfer, self.has_fp8)

    def _lacks_transfer(self, evidence: Evidence) -> bool:
        """Whether bandwidth is unknown: the first update came before the clocks of the first step could be read."""
        lacking = self.config.bandwidth_aware and evidence.transfer is None
        if lacking:
            log.info("bitplan: bandwidth_aware: no step's clocks have been read yet; the next update decides")
        return lacking

    def _lows_to_measure(self, step: int) -> tuple[str, ...]:
        """The precisions whose impact this step measures; none unless an update follows within `impact_steps`."""
        config = self.config
        left = config.update_interval_steps - step % config.update_interval_steps
        if not self._is_dynamic or config.scoring != "impact" or left > config.impact_steps:
            return ()
        return tuple(name for name in config.low_precisions if name != "fp8" or self.has_fp8)

    # ---- reports -----------------------------------------------------------------------------------------------------

    def _tell(self, step: int, hints: Hints) -> None:
        if self.config.log_decisions:
            for line in describe_changes(hints):
                log.info("bitplan: %s", line)
        self.reminders.left_out(self.state, step)
        self._record(step, hints)

    def _record(self, step: int, hints: Hints) -> None:
        excluded = {name: unit.excluded for name, unit in self.state.units.items()}
        figures = {"unit_bytes": self.unit_bytes, "excluded": excluded}
        if self.telemetry is not None:
            self.metrics = self.telemetry.record(step, hints, **figures)  # type: ignore[arg-type]
        else:
            self.metrics = step_metrics(step, hints, 0.0, **figures)  # type: ignore[arg-type]

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
        """The state in a file, whole or not at all."""
        write_json(path, self.state_dict())

    def load(self, path: str | Path, *, accept_config_change: bool = False) -> None:
        document = load_document(path, SelectiveFileError)
        self.load_state_dict(document, accept_config_change=accept_config_change, where=str(path))


# ---- before training -------------------------------------------------------------------------------------------------

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
