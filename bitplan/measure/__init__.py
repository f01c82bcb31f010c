"""Numbers for the plan: what a format costs a model, with the error of each figure."""

from typing import TYPE_CHECKING

from bitplan.errors import MeasureError
from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.measure.calibration import CalibrationError
    from bitplan.measure.gradients.statistics import GradStatsCollector, GradStatsError, collect_grad_stats
    from bitplan.measure.machine import examine_machine

__all__ = [
    "CalibrationError",
    "GradStatsCollector",
    "GradStatsError",
    "MeasureError",
    "collect_grad_stats",
    "examine_machine",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "calibration": ("CalibrationError",),
        "gradients.statistics": ("GradStatsCollector", "GradStatsError", "collect_grad_stats"),
        "machine": ("examine_machine",),
    },
)
