"""From a block's parameters to the bytes that wait on the host.

The parameters are the truth (with train="weights" their FP32 masters): whatever format a block had before, the next one
is made from them. Where a parameter is sent in its own type, the host's bytes are the parameter: it becomes a view of
them, and RAM holds it once.

With a GPU the encoding is done there, some rows at a time: the codes are the same to the bit, and it takes seconds, not
the minutes of a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.kernels import encode
from bitplan.runtime.streaming.blocks.find import StreamedBlock
from bitplan.runtime.streaming.blocks.layout import BlockLayout, Piece
from bitplan.runtime.streaming.training.host_training import HostTraining
from bitplan.runtime.streaming.transfer.host_memory import HostBlocks

ROWS_AT_A_TIME_BYTES = 2**25


def put_block(
    host: HostBlocks, block: StreamedBlock, layout: BlockLayout, training: HostTraining | None, device: torch.device
) -> None:
    """Encode a block into the host's buffer.

    Without torch.no_grad(), which Ctrl-C could leave switched on for the rest of the run: all that is read is detached.
    """
    buffer = host.put(block.name, layout, lambda buffer: _fill(block, layout, training, device, buffer))
    if buffer is None:
        return
    for name, piece in layout.pieces.items():
        parameter = block.parameters[name].parameter
        is_master = training is not None and training.trains(block.name, name) and parameter.dtype == torch.float32
        if piece.decoded is None and not is_master:
            view = piece.parts["data"].view(buffer)
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view


def _fill(
    block: StreamedBlock, layout: BlockLayout, training: HostTraining | None, device: torch.device, buffer: Tensor
) -> None:
    for name, piece in layout.pieces.items():
        parameter = block.parameters[name].parameter
        if training is not None and training.trains(block.name, name):
            piece.write(buffer, training.encoded(block.name, name, piece.fmt))
        elif piece.decoded is None:
            piece.parts["data"].view(buffer).copy_(parameter.detach())
        else:
            _encode_into(piece, buffer, parameter.detach(), device, f"{block.name}.{name}")


def _encode_into(piece: Piece, buffer: Tensor, numbers: Tensor, device: torch.device, name: str) -> None:
    rows = numbers.shape[0] if numbers.dim() == 2 else 0
    by_rows = rows and all(part.shape[:1] == (rows,) for part in piece.parts.values())
    if device.type != "cuda" or not by_rows or piece.fmt.block.rows != 1:
        piece.write(buffer, encode(numbers, piece.fmt, name=name))
        return
    views = {part_name: part.view(buffer) for part_name, part in piece.parts.items()}
    step = max(1, ROWS_AT_A_TIME_BYTES // (numbers.shape[1] * numbers.itemsize))
    for first in range(0, rows, step):
        encoded = encode(numbers[first : first + step].to(device), piece.fmt, name=name)
        for part_name, part in encoded.parts.items():
            views[part_name][first : first + step].copy_(part)
