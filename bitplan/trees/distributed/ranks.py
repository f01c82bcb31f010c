"""The processes of torch.distributed as `Shards`: sums, maxima, arrays of all of them, and what happens if one stops.

Every fit makes a gloo group of its own (histograms lie in main memory, whatever the default backend is) with its own
time limit. A process that stops early, by an error, by Ctrl-C or because it was killed, closes its connections; that
ends the step the others wait in, and they close theirs. Then all who are left ask the store of the default group who
ended (`base.process_status`). So the error of every process names it and the step, at once if a process died, after the
time limit if it hangs.

Before a step all say how much they bring (for sums once a tree), so that sizes which differ are an error in each of
them. Arrays are all that is sent; what is not one goes as JSON (`shards.gather_json`), never as a pickle.
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bitplan.base.process_status import ProcessStatus
from bitplan.trees.distributed.agreement import SAME_VERSION
from bitplan.trees.distributed.shards import Array, ProcessLostError
from bitplan.trees.gradients import TreesError

MAX_PART_BYTES = 2**36  # of one process in one step: more is a lie, and would be allocated


@dataclass(frozen=True)
class Meeting:
    """Where processes without a default group meet: a store that all reach, the address of this one, all names."""

    store: Any
    rank: int
    names: tuple[str, ...]
    host: str


class Ranks:
    """All processes of the default group or a meeting, for one fit; close it, or tell the others why not (`fail`)."""

    def __init__(self, timeout_s: float, meeting: Meeting | None = None) -> None:
        self._meeting = meeting
        if meeting is not None:
            self.rank, self.count, self._store = meeting.rank, len(meeting.names), meeting.store
            names = [f"rank {rank} (worker {name})" for rank, name in enumerate(meeting.names)]
        else:
            self.rank, self.count, self._store = _default_group()
            names = [f"rank {rank}" for rank in range(self.count)]
        self.bytes_sent: dict[str, list[int]] = {}
        self.steps = 0
        self._bytes_since = 0
        self._compared: set[str] = set()  # steps whose sizes were compared since the last `sent_for`
        fits = self._store.add(f"bitplan.trees/fits of {self.rank}", 1)  # as many in every process
        self._prefix = f"bitplan.trees/{fits}"
        self._status = ProcessStatus(self._store, self._prefix, self.rank, names)
        self._group: dist.ProcessGroup | None = None
        limit = timedelta(seconds=timeout_s)
        self._meet("meeting of all processes", lambda: self._join(limit), 0)

    def add(self, integers: Array, label: str) -> Array:
        """The sums of all processes, element by element."""
        return self._all_reduce(integers, dist.ReduceOp.SUM, label)

    def top(self, numbers: Array, label: str) -> Array:
        """The maxima of all processes, element by element."""
        return self._all_reduce(numbers, dist.ReduceOp.MAX, label)

    def gather(self, part: Array, label: str) -> list[Array]:
        """The flat arrays of all processes, of any lengths, in their order."""
        lengths = [size // part.itemsize for size in self._announce(part.nbytes, label)]
        padded = np.zeros(max(lengths), part.dtype)
        padded[: len(part)] = part
        parts = [torch.empty(len(padded), dtype=torch.from_numpy(padded).dtype) for _ in lengths]
        self._meet(label, lambda: dist.all_gather(parts, torch.from_numpy(padded), group=self._group), padded.nbytes)
        return [one.numpy()[:length] for one, length in zip(parts, lengths, strict=True)]

    def sent_for(self, label: str) -> None:
        """Book the bytes that this process sent since the last call under the step `label`."""
        self.bytes_sent.setdefault(label, []).append(self._bytes_since)
        self._bytes_since = 0
        self._compared.clear()

    def fail(self, error: BaseException) -> None:
        """Leave a message for the others, and end the step they wait in."""
        if not isinstance(error, ProcessLostError):
            self._status.leave(error)
        self.close()

    def close(self) -> None:
        """Close the connections of this fit."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._meeting is None:
            dist.destroy_process_group(group)
        else:
            group.abort()  # torch does not know it: nobody else can end the step that others wait in

    def _join(self, limit: timedelta) -> None:
        if self._meeting is None:
            self._group = dist.new_group(backend="gloo", timeout=limit)
            return
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._meeting.host)]
        store = dist.PrefixStore(self._prefix, self._store)  # type: ignore[attr-defined]
        self._group = dist.ProcessGroupGloo(store, self.rank, self.count, options)  # type: ignore[assignment]

    def _all_reduce(self, numbers: Array, how: Any, label: str) -> Array:
        out = np.array(numbers)  # a copy: torch sums in place
        if label not in self._compared:  # once a tree: sizes follow from settings and from sums, which all have
            self._check_same_size(self._announce(out.nbytes, label), label)
            self._compared.add(label)
        self._meet(label, lambda: dist.all_reduce(torch.from_numpy(out), how, group=self._group), out.nbytes)
        return out

    def _announce(self, size: int, label: str) -> list[int]:
        """How many bytes each process brings to a step: gloo ends a process that gets more than it has room for."""
        ours = torch.tensor([zlib.crc32(label.encode()), size])
        announced = [torch.empty_like(ours) for _ in range(self.count)]
        self._meet(label, lambda: dist.all_gather(announced, ours, group=self._group), 16)
        sizes = [int(size) for _, size in announced]
        for rank, (step, came) in enumerate(announced):
            if step != ours[0] or not 0 <= came <= MAX_PART_BYTES:
                raise TreesError(  # `fail` passes it on to the others
                    f"distributed fit, in step {label!r}: expected from rank {rank} the size of an array for this "
                    f"step, got {int(came)} bytes for {'this' if step == ours[0] else 'another'} one; {SAME_VERSION}"
                )
        return sizes

    def _check_same_size(self, sizes: list[int], label: str) -> None:
        for rank, size in enumerate(sizes):
            if size != sizes[0]:
                raise TreesError(
                    f"distributed fit, in step {label!r}: expected {sizes[0]} bytes from rank {rank}, as rank 0 has, "
                    f"got {size}; {SAME_VERSION}, with the same columns"
                )

    def _meet(self, label: str, step: Callable[[], Any], payload_bytes: int) -> None:
        self.steps += 1
        self._bytes_since += payload_bytes
        try:
            step()
        except RuntimeError as error:  # what gloo and the store raise when a connection ends or time is up
            traceback.clear_frames(error.__traceback__)  # they hold the group, and what is held stays connected
            self.close()
            explained = self._status.explain(error)
            where = f"distributed fit, rank {self.rank} of {self.count}, in step {label!r}"
            raise ProcessLostError(f"{where}: {explained}") from error


def _default_group() -> tuple[int, int, Any]:
    """Rank, processes and store of torch.distributed's own group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise TreesError(
            "fit_distributed: torch.distributed has no process group; start the script with torchrun and call "
            "torch.distributed.init_process_group('gloo') before, or use the estimator's own fit for one process"
        )
    from torch.distributed.distributed_c10d import _get_default_store  # not there where torch was built without

    return dist.get_rank(), dist.get_world_size(), _get_default_store()
