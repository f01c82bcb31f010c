"""Processes: several processes train the streamed weights of one model, each with batches of its own, as under DDP.

Gradients stay on their process until the step's last backward (with `update_in_backward` until those of their block
have come). Then, on the optimizer's thread, in every process:

    agree      each says which step it is in, what failed, and which weights have gradients; if any failed, all drop the
               step, with an error that names the process
    average    gradients are cut into as many slices as there are processes. Each process gets its slice of all others,
               adds them in float32 in the order of ranks, divides by the number of processes, and gives the result, in
               the type of the gradient, to all

So all processes have the same bits, whatever sends them (gloo on the host; NCCL through the GPU where the default group
has it), and these are the bits of one process that accumulates the same batches in float32, where the number of
processes is a power of two. A weight without a gradient in one process counts as 0 there, as under DDP.

With `shard_optimizer` each process keeps the master and the states of its slice of every weight alone, steps these, and
gives the new numbers, in the type of the weight, to all. Weights that an optimizer needs whole (Muon, Adafactor) are
dealt out: each has one owner.

A process that ends closes its connections, which ends what the others wait in; they look into the store of the default
group for its last words, and name it.
"""

from __future__ import annotations

import json
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from bitplan.base.errors import BlockNonFiniteError, StreamError, TransferError
from bitplan.base.process_status import ProcessStatus

Key = TypeVar("Key")
SLICE_ALIGNMENT = 256  # numbers: AdamW's vectors and blocks of small moments are whole in every slice
BUNDLE_BYTES = 2**26  # of gradients that are sent together
SUBGROUP_WAIT_S = 10.0  # how long others have to open a stream where a smaller group suggests that they will not
DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"  # of a module: names that DistributedDataParallel leaves alone


def several_processes() -> bool:
    """Whether a default process group of more than one process is up."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def refuse_subgroups() -> None:
    """Say that this process opens a stream, and refuse it where it and others have a group without the rest.

    The rest has some seconds to open theirs: a group alone (of one machine's processes, of a mesh) is no error.
    """
    from torch.distributed.distributed_c10d import _get_default_store, _world

    store, rank, count = _get_default_store(), distributed.get_rank(), distributed.get_world_size()
    number = store.add(f"bitplan.streaming/opened by {rank}", 1)
    groups = [distributed.get_process_group_ranks(one) for one in _world.pg_map]
    smaller = [ranks for ranks in groups if len(ranks) < count and rank in ranks]
    absent, until = set(range(count)) - {rank} if smaller else set(), time.monotonic() + SUBGROUP_WAIT_S
    while absent:
        absent = {one for one in absent if store.add(f"bitplan.streaming/opened by {one}", 0) < number}
        if absent and time.monotonic() > until:
            store.add(f"bitplan.streaming/opened by {rank}", -1)
            raise StreamError(
                f"train='weights' trains with all {count} processes of the default group, and rank {rank}, which is in "
                f"a smaller group ({listed_ranks(smaller[0])}), waits for {listed_ranks(sorted(absent))}: there are no "
                "streams of subgroups. Start the processes that train as a job of their own, with init_process_group "
                "for these alone; or if the others are only late, call torch.distributed.barrier() before "
                "stream_blocks in all"
            )
        time.sleep(0.02 if absent else 0)


def listed_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def hide_from_ddp(model: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Make DistributedDataParallel leave these parameters alone, if it wraps the model later; returns the undoing."""
    before = getattr(model, DDP_IGNORES, None)
    setattr(model, DDP_IGNORES, [*(before or ()), *names])

    def undo() -> None:
        if before is None:
            model.__dict__.pop(DDP_IGNORES, None)
        else:
            setattr(model, DDP_IGNORES, before)

    return undo


class PeerLostError(TransferError):
    """Another process of the training has ended, or does not answer."""


class Processes:
    """The processes of the default group; every one of them makes this object, and the same calls in the same order."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()
        store = _get_default_store()
        prefix = f"bitplan.streaming/{store.add(f'bitplan.streaming/streams of {self.rank}', 1)}"
        self._status = ProcessStatus(store, prefix, self.rank, [f"rank {rank}" for rank in range(self.count)])
        uses_gpu = device.type == "cuda" and "nccl" in distributed.get_backend_config()
        self._device = device if uses_gpu else torch.device("cpu")  # that gradients pass through
        self._words: distributed.ProcessGroup | None = None
        self._numbers: distributed.ProcessGroup | None = None
        self._where = "opening a stream"
        self._meet(lambda: self._join(timedelta(seconds=timeout_s)))

    def _join(self, limit: timedelta) -> None:
        self._words = distributed.new_group(backend="gloo", timeout=limit)
        self._numbers = self._words
        if self._device.type == "cuda":
            self._numbers = distributed.new_group(backend="nccl", timeout=limit)

    # ---- agreement ---------------------------------------------------------------------------------------------------

    def agree(self, call: str, step: int, failure: Exception | None, notes: Sequence[int]) -> list[list[int]]:
        """Exchange notes with all processes, by rank; raises in each if one failed or is in another step."""
        if isinstance(failure, PeerLostError):
            raise failure
        if failure is not None:
            self._status.leave(failure, f"failed in {call} {step}")
        line = torch.tensor([zlib.crc32(call.encode()), step, _kind(failure), *notes])
        lines = [torch.empty_like(line) for _ in range(self.count)]
        self._where = what = f"step {step}: {call}"
        self._meet(lambda: distributed.all_gather(lines, line, group=self._words))
        rows = [row.tolist() for row in lines]
        for rank, row in enumerate(rows):
            if row[:2] != rows[self.rank][:2]:
                elsewhere = f"step {row[1]}" if row[0] == rows[self.rank][0] else "another call"
                raise StreamError(
                    f"{what}: rank {rank} is in {elsewhere}: "
                    "all processes begin, clip and end the same steps; end them all, and start again from a checkpoint"
                )
        failed = [rank for rank, row in enumerate(rows) if row[2]]
        if failure is not None:
            raise failure
        if failed:
            words = self._status.message(failed[0], f"failed in {call} {step}")
            kind = BlockNonFiniteError if rows[failed[0]][2] == _NOT_FINITE else TransferError
            raise kind(f"{what}: rank {failed[0]} failed, and no process goes on with the step: {words}")
        return [row[3:] for row in rows]

    def require_same(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse weights that differ between processes; compares sums of their bits."""
        sums = torch.tensor([sum_of_bits(tensor) for tensor in tensors.values()])
        gathered = [torch.empty_like(sums) for _ in range(self.count)]
        self._where = "comparing weights"
        self._meet(lambda: distributed.all_gather(gathered, sums, group=self._words))
        for rank, other in enumerate(gathered):
            for name, mine, theirs in zip(tensors, gathered[0].tolist(), other.tolist(), strict=True):
                if mine != theirs:
                    raise StreamError(
                        f"{name} is another tensor in rank {rank} than in rank 0: all processes train one model; load "
                        "the same checkpoint in each, or call torch.manual_seed with one seed before you make the model"
                    )

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor (contiguous, alike in all processes) the mean over processes, in place."""
        for bundle in _bundles(tensors):
            self._share_out(bundle, self._mean_of_slices(bundle))

    def _mean_of_slices(self, tensors: Sequence[Tensor]) -> Tensor:
        """This process's slice of each tensor, averaged over all processes."""
        sent = self._rows(tensors)
        received = torch.empty_like(sent)
        exchange = partial(distributed.all_to_all_single, _bytes(received), _bytes(sent), group=self._numbers)
        self._meet(exchange)
        total = received[0].float()
        for row in received[1:]:
            total += row
        return total.div_(self.count).to(sent.dtype)

    def gather(self, tensors: Sequence[Tensor]) -> None:
        """Fill each tensor (contiguous), of which every process has made its own slice, from all processes."""
        for bundle in _bundles(tensors):
            self._share_out(bundle, self._rows(bundle)[self.rank].clone())

    def give(self, tensor: Tensor, owner: int) -> None:
        """Fill a tensor (contiguous) from the one process that has made it."""
        sent = tensor.to(self._device)
        self._meet(lambda: distributed.broadcast(_bytes(sent), owner, group=self._numbers))
        if sent is not tensor:
            tensor.copy_(sent)

    def give_all(self, tensors: Mapping[str, Tensor], owner: int) -> dict[str, Tensor]:
        """Send the tensors of the process `owner` to all, in float32; others pass an empty mapping."""
        is_mine = self.rank == owner
        text = json.dumps({name: list(one.shape) for name, one in tensors.items()}).encode() if is_mine else b""
        self.give(size := torch.tensor([len(text)]), owner)
        self.give(letters := torch.tensor(list(text.ljust(int(size)))), owner)
        shapes: dict[str, list[int]] = json.loads(bytes(letters.tolist()))
        whole = {
            name: tensors[name].float().contiguous() if is_mine else torch.empty(shape)
            for name, shape in shapes.items()
        }
        for tensor in whole.values():
            self.give(tensor, owner)
        return whole

    def owners(self, numbers: Mapping[Key, int]) -> dict[Key, int]:
        """Which process gets each tensor, of so many numbers: the largest first, to the one that has least."""
        has = [0] * self.count
        owners: dict[Key, int] = {}
        for key in sorted(numbers, key=lambda one: -numbers[one]):
            owners[key] = has.index(min(has))
            has[owners[key]] += numbers[key]
        return owners

    def own_slice(self, tensor: Tensor, owner: int | None = None) -> Tensor:
        """The numbers of a contiguous tensor that this process steps, as a flat view; with an owner all, or none."""
        if owner is not None:
            return tensor.view(-1)[: tensor.numel() if owner == self.rank else 0]
        size = self._slice_size(tensor)
        return tensor.view(-1)[self.rank * size : (self.rank + 1) * size]

    def slice_start(self, tensor: Tensor) -> int:
        """Index in the flat tensor at which this process's slice begins."""
        return min(self.rank * self._slice_size(tensor), tensor.numel())

    def _slice_size(self, tensor: Tensor) -> int:
        return -(-tensor.numel() // (self.count * SLICE_ALIGNMENT)) * SLICE_ALIGNMENT

    def _rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """One row a process, with its slices of all tensors; the last slices of a tensor may be filled up with 0."""
        width = sum(map(self._slice_size, tensors))
        rows = torch.zeros(self.count, width, dtype=tensors[0].dtype, device=self._device)
        for part, slice_in_row in self._slices(tensors, rows):
            slice_in_row.copy_(part)
        return rows

    def _share_out(self, tensors: Sequence[Tensor], row: Tensor) -> None:
        rows = torch.empty(self.count, len(row), dtype=row.dtype, device=self._device)
        into = list(rows.view(torch.uint8).unbind())
        self._meet(lambda: distributed.all_gather(into, _bytes(row), group=self._numbers))
        for part, slice_in_row in self._slices(tensors, rows):
            part.copy_(slice_in_row)

    def _slices(self, tensors: Sequence[Tensor], rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for tensor in tensors:
            size, flat = self._slice_size(tensor), tensor.view(-1)
            for rank in range(self.count):
                part = flat[rank * size : (rank + 1) * size]
                yield part, rows[rank, start : start + len(part)]
            start += size

    # ---- processes that end ------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Close the connections; an error is left for the others to read."""
        groups, self._words, self._numbers = {self._words, self._numbers}, None, None
        if error is not None and not isinstance(error, PeerLostError):
            self._status.leave(error)
        if distributed.is_initialized():
            for group in groups - {None}:
                distributed.destroy_process_group(group)

    def _meet(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:  # what gloo and the store raise when a connection ends or time is up
            traceback.clear_frames(error.__traceback__)  # they hold the group, and what is held stays connected
            explained = self._status.explain(error)
            raise PeerLostError(f"{self._where}: rank {self.rank} of {self.count}: {explained}") from None


_FAILED, _NOT_FINITE = 1, 2


def _kind(failure: Exception | None) -> int:
    if failure is None:
        return 0
    return _NOT_FINITE if isinstance(failure, BlockNonFiniteError) else _FAILED


def _bundles(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of tensors to send together: of one type, and of at most BUNDLE_BYTES unless one tensor is larger."""
    for dtype in dict.fromkeys(one.dtype for one in tensors):
        bundle: list[Tensor] = []
        for tensor in (one for one in tensors if one.dtype == dtype):
            if bundle and sum(one.nbytes for one in bundle) + tensor.nbytes > BUNDLE_BYTES:
                yield bundle
                bundle = []
            bundle.append(tensor)
        yield bundle


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def sum_of_bits(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat  # int64 begins at a multiple of its size
    end = len(flat) // 8 * 8
    return int(flat[:end].view(torch.int64).sum() + flat[end:].sum(dtype=torch.int64))
