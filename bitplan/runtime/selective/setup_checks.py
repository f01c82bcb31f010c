"""Checks a policy before training, and warns of missing calls without which nothing would be decided."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from bitplan.measure.calibration import CalibrationResult
from bitplan.plan.selective.config import PRECISIONS, SelectiveError, SelectivePrecisionConfig
from bitplan.plan.selective.state import PolicyState
from bitplan.runtime.selective.precision_units import PrecisionUnits
from bitplan.runtime.streaming.stream_blocks import BlockStream

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


def check_byte_share(unit_bytes: Mapping[str, Mapping[str, int]], config: SelectivePrecisionConfig) -> None:
    """Refuse a byte budget that no choice can meet."""
    if not (config.has_byte_budget and config.enabled and config.mode == "dynamic"):
        return
    least = 0
    for name, sizes in unit_bytes.items():
        forced = config.forced(name)
        least += sizes[forced[0]] if forced else min(sizes[low] for low in ("bf16", *config.low_precisions))
    share = least / sum(sizes["bf16"] for sizes in unit_bytes.values())
    if share > config.byte_share:
        raise SelectiveError(
            f"byte_share is {config.byte_share:g}, and with all units as low as they may be {share:.4g} of bf16's "
            "bytes are sent; raise it, or allow a smaller format (low_precisions, int4_format)"
        )


def decides_on(config: SelectivePrecisionConfig, unit: str) -> bool:
    """Whether the policy decides on a unit; in mode "off" only on forced ones: others keep the stream's formats."""
    return config.enabled and (config.mode != "off" or config.forced(unit) is not None)


def errors_of(units: PrecisionUnits, calibration: CalibrationResult | None) -> dict[str, dict[str, float]]:
    """Unit -> precision -> error, for the formats of this config."""
    errors: dict[str, dict[str, float]] = {}
    if calibration is None:
        return errors
    for name in units.names:
        row = {low: calibration.of(name, units.config.format_of(low)) for low in PRECISIONS[1:]}
        errors[name] = {low: error for low, error in row.items() if error is not None}
    wanted = units.config.low_precisions
    lacking = [name for name in units.names if not set(wanted) <= set(errors[name])]
    if lacking:
        needed = ", ".join(units.config.format_of(low) for low in wanted)
        raise SelectiveError(
            f"the calibration has no error of {lacking[0]!r} ({len(lacking)} units) in {needed}; calibrate this model "
            "with these formats, or leave calibration out"
        )
    return errors


def device_has_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


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
        """compute_hints was called at a multiple of the interval."""
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
