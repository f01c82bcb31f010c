"""Models that run: on packed weights, in FP8, streamed over the bus, or in precisions chosen while they train."""

from typing import TYPE_CHECKING

from bitplan.lazy_names import lazy_names

if TYPE_CHECKING:
    from bitplan.runtime.fp8.apply import apply_fp8 as apply_fp8, apply_fp8_config as apply_fp8_config
    from bitplan.runtime.fp8.layer_settings import (
        Fp8LayerError as Fp8LayerError,
        Fp8UnavailableError as Fp8UnavailableError,
    )
    from bitplan.runtime.fp8.layers.linear import gather_weights_in_fp8 as gather_weights_in_fp8
    from bitplan.runtime.packed.apply_plan import ApplyError as ApplyError, apply_plan as apply_plan
    from bitplan.runtime.packed.checkpoints.load import load_packed as load_packed
    from bitplan.runtime.packed.checkpoints.save import save_packed as save_packed
    from bitplan.runtime.packed.fused_projections import fuse_projections as fuse_projections
    from bitplan.runtime.packed.product_strategy import LayerError as LayerError
    from bitplan.runtime.packed.quant_embedding import QuantEmbedding as QuantEmbedding
    from bitplan.runtime.packed.quant_experts import QuantExperts as QuantExperts
    from bitplan.runtime.packed.quant_linear import QuantLinear as QuantLinear
    from bitplan.runtime.packed.read_packed import read_packed as read_packed
    from bitplan.runtime.packed.tile_cache import TileCache as TileCache
    from bitplan.runtime.packed.warm_up import warm_up as warm_up
    from bitplan.runtime.selective.telemetry import (
        PrecisionTelemetry as PrecisionTelemetry,
        TelemetryError as TelemetryError,
    )
    from bitplan.runtime.selective.trainer_callbacks import (
        TensorBoardScalars as TensorBoardScalars,
        lightning_callback as lightning_callback,
        trainer_callback as trainer_callback,
    )
    from bitplan.runtime.selective.training_policy import SelectivePrecisionPolicy as SelectivePrecisionPolicy
    from bitplan.runtime.streaming.errors import (
        BlockNonFiniteError as BlockNonFiniteError,
        StreamError as StreamError,
        StreamStateError as StreamStateError,
        TransferError as TransferError,
    )
    from bitplan.runtime.streaming.training.adamw_settings import AdamWSettings as AdamWSettings
    from bitplan.runtime.streaming.transfer.devices import (
        CudaDevice as CudaDevice,
        SimulatedDevice as SimulatedDevice,
        StreamDevice as StreamDevice,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__)
