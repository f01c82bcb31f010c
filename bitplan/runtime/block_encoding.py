"""From a block's parameters to the bytes that wait on the host.

The parameters are the truth (with train="weights" their FP32 masters): whatever format a block had before, the next one
is made from them. Where a parameter is sent in its own type, the host's bytes are the parameter: it becomes a view of
them, and RAM holds it once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.kernels import encode
from bitplan.runtime.block_layout import BlockLayout
from bitplan.runtime.host_blocks import HostBlocks
from bitplan.runtime.host_training import HostTraining
from bitplan.runtime.streamed_blocks import StreamedBlock


def put_block(host: HostBlocks, block: StreamedBlock, layout: BlockLayout, training: HostTraining | None) -> None:
    """Encode a block into the host's buffer."""
    with torch.no_grad():
        buffer = host.put(block.name, layout, lambda buffer: _fill(block, layout, training, buffer))
    if buffer is None:
        return
    for name, piece in layout.pieces.items():
        parameter = block.parameters[name].parameter
        is_master = training is not None and training.trains(block.name, name) and parameter.dtype == torch.float32
        if piece.decoded is None and not is_master:
            view = piece.parts["data"].view(buffer)
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view


def _fill(block: StreamedBlock, layout: BlockLayout, training: HostTraining | None, buffer: Tensor) -> None:
    for name, piece in layout.pieces.items():
        parameter = block.parameters[name].parameter
        if training is not None and training.trains(block.name, name):
            piece.write(buffer, training.encoded(block.name, name, piece.fmt))
        elif piece.decoded is None:
            piece.parts["data"].view(buffer).copy_(parameter.detach())
        else:
            piece.write(buffer, encode(parameter.detach(), piece.fmt, name=f"{block.name}.{name}"))
