"""Numbers for the plan: what a format costs a model, with the error of each figure."""

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.errors import MeasureError as MeasureError
    from bitplan.measure.calibration import CalibrationError as CalibrationError
    from bitplan.measure.gradients.statistics import (
        GradStatsCollector as GradStatsCollector,
        GradStatsError as GradStatsError,
        collect_grad_stats as collect_grad_stats,
    )
    from bitplan.measure.machine import examine_machine as examine_machine

__getattr__, __dir__, __all__ = lazy_names(__name__)
