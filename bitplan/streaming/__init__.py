"""Models whose blocks wait on the host and cross to the device when they are needed.

block_stream       `stream_blocks` changes a model so that its blocks are streamed; `options` checks what was asked for
find_blocks        what a block is: its parameters, and their bytes in their formats
weight_loader      loads the block that is asked for, and prefetches what comes next; `saved_tensors` for backward
reencode_blocks    the encoded bytes on the host, made again before a step where formats or weights changed
telemetry          what a step moved and waited for
transfer, training, selective    copies and slots; weights trained on the host; which block gets which precision
"""

from typing import TYPE_CHECKING

from bitplan.base.names import lazy_names

if TYPE_CHECKING:
    from bitplan.base.errors import StreamError as StreamError
    from bitplan.streaming.block_stream import stream_blocks as stream_blocks
    from bitplan.streaming.options import StreamOptions as StreamOptions
    from bitplan.streaming.selective.trainer_callbacks import (
        TensorBoardScalars as TensorBoardScalars,
        lightning_callback as lightning_callback,
        trainer_callback as trainer_callback,
    )
    from bitplan.streaming.training.adamw import AdamWSettings as AdamWSettings
    from bitplan.streaming.training.optimizers import HostOptimizer as HostOptimizer
    from bitplan.streaming.training.packed_mismatch import PackedMismatch as PackedMismatch
    from bitplan.streaming.transfer.devices import SimulatedDevice as SimulatedDevice
    from bitplan.streaming.transfer.transfer_limits import RuntimeLimitHints as RuntimeLimitHints
    from bitplan.streaming.selective.config import SelectivePrecisionConfig as SelectivePrecisionConfig
    from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy as SelectivePrecisionPolicy
    from bitplan.streaming.selective.calibration import run_calibration as run_calibration

__getattr__, __dir__, __all__ = lazy_names(__name__)
