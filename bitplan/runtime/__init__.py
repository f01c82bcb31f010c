"""Models that run: on packed weights, in FP8, streamed over the bus, or in precisions chosen while they train."""

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.runtime.fp8.apply import apply_fp8, apply_fp8_config
    from bitplan.runtime.fp8.layer_settings import Fp8LayerError, Fp8UnavailableError
    from bitplan.runtime.fp8.layers.linear import gather_weights_in_fp8
    from bitplan.runtime.packed.apply import ApplyError, apply_plan
    from bitplan.runtime.packed.checkpoints.load import load_packed
    from bitplan.runtime.packed.checkpoints.save import save_packed
    from bitplan.runtime.packed.fused_projections import fuse_projections
    from bitplan.runtime.packed.product_strategy import LayerError
    from bitplan.runtime.packed.quant_embedding import QuantEmbedding
    from bitplan.runtime.packed.quant_experts import QuantExperts
    from bitplan.runtime.packed.quant_linear import QuantLinear
    from bitplan.runtime.packed.read_packed import read_packed
    from bitplan.runtime.packed.tile_cache import TileCache
    from bitplan.runtime.packed.warm_up import warm_up
    from bitplan.runtime.selective.telemetry import PrecisionTelemetry, TelemetryError
    from bitplan.runtime.selective.trainer_callbacks import TensorBoardScalars, lightning_callback, trainer_callback
    from bitplan.runtime.selective.training_policy import SelectivePrecisionPolicy
    from bitplan.runtime.streaming.errors import BlockNonFiniteError, StreamError, StreamStateError, TransferError
    from bitplan.runtime.streaming.training.host_training import AdamWSettings
    from bitplan.runtime.streaming.transfer.devices import CudaDevice, SimulatedDevice, StreamDevice

__all__ = [
    "AdamWSettings",
    "ApplyError",
    "BlockNonFiniteError",
    "CudaDevice",
    "Fp8LayerError",
    "Fp8UnavailableError",
    "LayerError",
    "PrecisionTelemetry",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "SelectivePrecisionPolicy",
    "SimulatedDevice",
    "StreamDevice",
    "StreamError",
    "StreamStateError",
    "TelemetryError",
    "TensorBoardScalars",
    "TileCache",
    "TransferError",
    "apply_fp8",
    "apply_fp8_config",
    "apply_plan",
    "fuse_projections",
    "gather_weights_in_fp8",
    "lightning_callback",
    "load_packed",
    "read_packed",
    "save_packed",
    "trainer_callback",
    "warm_up",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "streaming.errors": ("BlockNonFiniteError", "StreamError", "StreamStateError", "TransferError"),
        "fp8.layer_settings": ("Fp8LayerError", "Fp8UnavailableError"),
        "packed.product_strategy": ("LayerError",),
        "packed.apply": ("ApplyError", "apply_plan"),
        "streaming.transfer.devices": ("CudaDevice", "SimulatedDevice", "StreamDevice"),
        "fp8.apply": ("apply_fp8", "apply_fp8_config"),
        "fp8.layers.linear": ("gather_weights_in_fp8",),
        "streaming.training.host_training": ("AdamWSettings",),
        "packed.checkpoints.load": ("load_packed",),
        "packed.checkpoints.save": ("save_packed",),
        "packed.read_packed": ("read_packed",),
        "selective.telemetry": ("PrecisionTelemetry", "TelemetryError"),
        "packed.fused_projections": ("fuse_projections",),
        "packed.quant_embedding": ("QuantEmbedding",),
        "packed.quant_experts": ("QuantExperts",),
        "packed.quant_linear": ("QuantLinear",),
        "selective.training_policy": ("SelectivePrecisionPolicy",),
        "packed.tile_cache": ("TileCache",),
        "packed.warm_up": ("warm_up",),
        "selective.trainer_callbacks": ("TensorBoardScalars", "lightning_callback", "trainer_callback"),
    },
)
