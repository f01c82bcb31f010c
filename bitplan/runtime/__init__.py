"""Models that run on packed weights: linears, experts, loading, and rewriting a model to a plan."""

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.runtime.apply import apply_plan
    from bitplan.runtime.devices import CudaDevice, SimulatedDevice, StreamDevice
    from bitplan.runtime.fp8_apply import apply_fp8, apply_fp8_config
    from bitplan.runtime.host_training import AdamWSettings
    from bitplan.runtime.load import load_packed
    from bitplan.runtime.packed_files import read_packed
    from bitplan.runtime.precision_telemetry import PrecisionTelemetry
    from bitplan.runtime.quant_experts import QuantExperts
    from bitplan.runtime.quant_linear import QuantLinear
    from bitplan.runtime.selective_precision import SelectivePrecisionPolicy
    from bitplan.runtime.tile_cache import TileCache
    from bitplan.runtime.trainer_callbacks import TensorBoardScalars, lightning_callback, trainer_callback

__all__ = [
    "AdamWSettings",
    "CudaDevice",
    "PrecisionTelemetry",
    "QuantExperts",
    "QuantLinear",
    "SelectivePrecisionPolicy",
    "SimulatedDevice",
    "StreamDevice",
    "TensorBoardScalars",
    "TileCache",
    "apply_fp8",
    "apply_fp8_config",
    "apply_plan",
    "lightning_callback",
    "load_packed",
    "read_packed",
    "trainer_callback",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "apply": ("apply_plan",),
        "devices": ("CudaDevice", "SimulatedDevice", "StreamDevice"),
        "fp8_apply": ("apply_fp8", "apply_fp8_config"),
        "host_training": ("AdamWSettings",),
        "load": ("load_packed",),
        "packed_files": ("read_packed",),
        "precision_telemetry": ("PrecisionTelemetry",),
        "quant_experts": ("QuantExperts",),
        "quant_linear": ("QuantLinear",),
        "selective_precision": ("SelectivePrecisionPolicy",),
        "tile_cache": ("TileCache",),
        "trainer_callbacks": ("TensorBoardScalars", "lightning_callback", "trainer_callback"),
    },
)
