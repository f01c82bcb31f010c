"""The processes of a benchmark under torchrun: their groups, and what they must agree on.

Ranks are numbered as in Megatron: neighbours share a tensor-parallel group. For experts, neighbours share an
expert-tensor-parallel group, and the experts are spread over these groups. With more ranks than a group needs there are
several groups, all busy with the same case, as in training. Agreement goes over gloo on the CPU, so that it is not in
the GPU's queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bitplan.measure.speed.paired_timing import ERROR, OK, OOM, Peers
from bitplan.plan.fp8.layers import Parallel

_SEVERITY = (OK, OOM, ERROR)


@dataclass(frozen=True)
class ParallelGroups:
    """The groups of this rank; None for a group of one."""

    tp: Any = None
    ep: Any = None
    etp: Any = None


@dataclass(frozen=True)
class BenchRanks:
    """This process among the others: its rank and its groups."""

    first: bool
    groups: ParallelGroups
    peers: Peers
    count: int = 1

    def share(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.count == 1:
            return value
        shared = [value if self.first else None]
        dist.broadcast_object_list(shared, src=0, group=self.peers.group)  # type: ignore[attr-defined]
        return shared[0]


class RankPeers(Peers):
    """Agreement of all ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def worst(self, status: str) -> str:
        severity = torch.tensor([_SEVERITY.index(status)])
        dist.all_reduce(severity, op=dist.ReduceOp.MAX, group=self.group)
        return _SEVERITY[int(severity)]

    def slowest(self, samples_ms: Sequence[float]) -> list[float]:
        times_ms = torch.tensor(list(samples_ms), dtype=torch.float64)
        dist.all_reduce(times_ms, op=dist.ReduceOp.MAX, group=self.group)
        return [float(each) for each in times_ms]


@contextmanager
def join_ranks(count: int, parallel: Parallel, device: torch.device) -> Iterator[BenchRanks]:
    """The groups of this process, inside a `with` block; a single process joins nothing."""
    if count == 1:
        yield BenchRanks(True, ParallelGroups(), Peers())
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        peers = RankPeers(dist.new_group(backend="gloo"))
        expert = parallel.ep * parallel.etp
        tp = _own_group(count, [range(start, start + parallel.tp) for start in range(0, count, parallel.tp)])
        etp = _own_group(count, [range(start, start + parallel.etp) for start in range(0, count, parallel.etp)])
        across = [
            range(start + lane, start + expert, parallel.etp)
            for start in range(0, count, expert)
            for lane in range(parallel.etp)
        ]
        ep = _own_group(count, across)
        yield BenchRanks(dist.get_rank() == 0, ParallelGroups(tp, ep, etp), peers, count)
        dist.barrier(group=peers.group)
    finally:
        if own:
            dist.destroy_process_group()


def _own_group(count: int, groups: Sequence[range]) -> Any:
    """This rank's group among these; every rank creates all groups, in the same order. None for a group of one."""
    mine = None
    for ranks in groups:
        if len(ranks) == 1:
            continue
        made = dist.new_group(list(ranks)) if len(ranks) < count else dist.group.WORLD
        if dist.get_rank() in ranks:
            mine = made
    return mine
