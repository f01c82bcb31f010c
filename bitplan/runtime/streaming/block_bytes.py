"""BlockBytes: the encoded bytes on the host, and whether they still agree with the model's parameters.

A block is encoded again when its formats or its parameters have changed. At every boundary each parameter is checked,
in a few microseconds and without reading its numbers:

    which Parameter its module holds    module.weight = nn.Parameter(...), load_state_dict(assign=True)
    torch's count of its writes         load_state_dict, and copy_, add_, ... under torch.no_grad()
    where its numbers lie               parameter.data = other
    adapters merged into the block      peft's merge_adapter, unmerge_adapter, merge_and_unload (`blocks.tree`)

Torch counts no writes through `.data` (`parameter.data.mul_(2)`) or through NumPy: `BlockStream.refresh` is for those.

A block leaves the list of written blocks before its bytes are written, and enters it when they are complete: an
interrupted write is done again.

The parameters are the truth (with train="weights" their FP32 masters): every new format of a block is made from them,
never from another format. Where a parameter is sent in its own type, the host's bytes are the parameter: it becomes a
view of them, and RAM holds it once. With a GPU the encoding is done there, some rows at a time: the codes are the same
to the bit, and it takes seconds, not the minutes of a CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.formats import Format
from bitplan.kernels import encode
from bitplan.runtime.streaming.blocks.find import StreamedBlock, StreamedParameter, Train
from bitplan.runtime.streaming.blocks.layout import BlockLayout, Piece
from bitplan.runtime.streaming.errors import StreamError
from bitplan.runtime.streaming.training.host_training import HostTraining
from bitplan.runtime.streaming.transfer.host_memory import HostBlocks
from bitplan.store.models.weight_changes import count_optimizer_steps, state_of

REPLACED: tuple[Any, ...] = ()
ROWS_AT_A_TIME_BYTES = 2**25


class BlockBytes:
    """Encodes blocks into the host's buffers, and knows which ones have to be encoded again."""

    def __init__(
        self,
        host: HostBlocks,
        blocks: Sequence[StreamedBlock],
        training: HostTraining | None,
        train: Train,
        device: torch.device,
    ) -> None:
        self._host, self._training, self._train, self._device = host, training, train, device
        self._specs = {block.name: block.specs for block in blocks}
        self._seen = {block.name: _look(block) for block in blocks}
        self._written: dict[str, Mapping[str, Format]] = {}  # blocks whose bytes are complete, and their formats
        self._unread: set[str] = set()  # blocks whose parameters always count as changed

    def is_stale(self, block: StreamedBlock, formats: Mapping[str, Format]) -> bool:
        """Whether a block must be `put` before it is sent in these formats."""
        return self._written.get(block.name) != formats or bool(self.changed(block))

    def changed(self, block: StreamedBlock) -> list[str]:
        """The parameters that have changed since they were last read."""
        if block.name in self._unread:
            return list(block.parameters)
        now, seen = _look(block), self._seen[block.name]
        return [] if now == seen else [name for name, one in now.items() if one != seen[name]]

    def unread(self, blocks: Iterable[str] | None = None) -> None:
        """Count every parameter of these blocks (None: of all) as changed."""
        self._unread.update(self._seen if blocks is None else blocks)

    def strike_off(self, block: str) -> None:
        """The block's bytes are not complete."""
        self._written.pop(block, None)

    def read(self, block: StreamedBlock, *, into_masters: bool = True) -> None:
        """Read the parameters as the model has them now; names and refuses one that can no longer be streamed.

        into_masters: with train="weights", changed parameters are copied into their masters.
        """
        changed = self.changed(block)
        self.strike_off(block.name)
        for name in changed:
            one = block.parameters[name]
            self._check(f"{block.name}.{name}", block, one, held := _held(f"{block.name}.{name}", one))
            one.parameter = held
            if into_masters and self._training is not None and self._training.trains(block.name, name):
                self._training.take(block.name, name, held)
        self.note(block)

    def note(self, block: StreamedBlock) -> None:
        """Remember the parameters as they are now, without reading them."""
        self._seen[block.name] = _look(block)
        self._unread.discard(block.name)

    def put(self, block: StreamedBlock, layout: BlockLayout, formats: Mapping[str, Format]) -> None:
        """Encode a block whose parameters were read."""
        self.strike_off(block.name)
        put_block(self._host, block, layout, self._training, self._device)
        self.note(block)  # a parameter that is sent in its own type has become a view of the buffer
        self._written[block.name] = dict(formats)

    def put_updated(self, block: StreamedBlock, layout: BlockLayout, sent: Collection[str]) -> None:
        """Encode a block on the optimizer's thread, where only masters have changed; those of `sent` are written."""
        try:
            put_block(self._host, block, layout, self._training, self._device, sent)
        except BaseException:
            self.strike_off(block.name)
            raise

    def _check(self, full_name: str, block: StreamedBlock, one: StreamedParameter, held: nn.Parameter) -> None:
        spec = self._specs[block.name][one.name]
        if held.device.type != "cpu":
            raise StreamError(
                f"{full_name} is on {held.device} now: streamed parameters live on the host; put it on the CPU, or "
                "close the stream first"
            )
        if (tuple(held.shape), held.dtype) != (spec.shape, spec.dtype):
            now, was = (f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in (held, spec))
            raise StreamError(f"{full_name} is {now} now and was streamed as {was}; close the stream and stream again")
        self._refuse_thawed(full_name, block, one, held)

    def refuse_thawed(self, block: StreamedBlock) -> None:
        """Refuse a weight that requires gradients now and did not when the stream was opened."""
        for name, one in block.parameters.items():
            module, local = one.places[0]
            if module._parameters.get(local) is one.parameter:  # else `read` refuses
                self._refuse_thawed(f"{block.name}.{name}", block, one, one.parameter)

    def _refuse_thawed(self, full_name: str, block: StreamedBlock, one: StreamedParameter, held: nn.Parameter) -> None:
        if not held.requires_grad or self._train == "nothing":
            return
        if self._training is None or not self._training.trains(block.name, one.name):
            raise StreamError(
                f"{full_name} requires gradients now and is streamed as frozen, so it would never get one; call "
                "requires_grad_(False) on it, or close the stream and stream again"
            )


def _held(full_name: str, one: StreamedParameter) -> nn.Parameter:
    """The Parameter that all places of `one` hold."""
    parameters: dict[int, nn.Parameter] = {}
    one.put_back()
    for module, local in one.places:
        held = module._parameters.get(local)
        if held is None:
            raise StreamError(f"{full_name} is gone from its module; close the stream and stream again")
        parameters[id(held)] = held
    if len(parameters) > 1:
        raise StreamError(
            f"{full_name} has {len(one.places)} places in its block, and only some hold the new Parameter; replace it "
            "in all of them"
        )
    return next(iter(parameters.values()))


def _look(block: StreamedBlock) -> dict[str, tuple[Any, ...]]:
    count_optimizer_steps()  # torch does not count the writes of a fused optimizer
    return {name: _look_at(one) for name, one in block.parameters.items()}


def _look_at(one: StreamedParameter) -> tuple[Any, ...]:
    parameter = one.parameter
    for module, local in one.places:
        if module._parameters.get(local) is not parameter:
            one.put_back()
            if module._parameters.get(local) is not parameter:
                return REPLACED
    return id(parameter), *state_of(parameter)


# ---- encoding --------------------------------------------------------------------------------------------------------


def put_block(
    host: HostBlocks,
    block: StreamedBlock,
    layout: BlockLayout,
    training: HostTraining | None,
    device: torch.device,
    written: Collection[str] = (),
) -> None:
    """Encode a block into the host's buffer, but for parameters that are `written` there.

    It detaches what it reads instead of using torch.no_grad(), which Ctrl-C could leave on for the rest of the run.
    """
    buffer = host.put(block.name, layout, lambda buffer: _fill(block, layout, training, device, buffer, written))
    if buffer is None:
        return
    for name, piece in layout.pieces.items():
        parameter = block.parameters[name].parameter
        is_master = training is not None and training.trains(block.name, name) and parameter.dtype == torch.float32
        if piece.is_own_type and not is_master:
            view = piece.parts["data"].view(buffer)
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view


def _fill(
    block: StreamedBlock,
    layout: BlockLayout,
    training: HostTraining | None,
    device: torch.device,
    buffer: Tensor,
    written: Collection[str],
) -> None:
    for name, piece in layout.pieces.items():
        if name in written:
            continue
        parameter = block.parameters[name].parameter
        if training is not None and training.trains(block.name, name):
            if piece.fmt.is_cast:
                piece.parts["data"].view(buffer).copy_(training.master(block.name, name))
                continue
            piece.write(buffer, training.encoded(block.name, name, piece.fmt))
        elif piece.is_own_type:
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
