"""Weights rounded in processes of one thread each: a matrix of some hundred rows keeps one core busy, and no GPU.

A process gets weights that read one input with their statistics, and writes what it rounds into a scratch folder.
"""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitplan.kernels.codec.dispatch import parts_of
from bitplan.searching.errors import SearchError
from bitplan.searching.gather.scratch_tensors import ScratchWriter, StoredTensor
from bitplan.store.rounding.error_compensation import InputHessian
from bitplan.store.rounding.pick_loops import SMALLEST_FOR_CPU
from bitplan.store.rounding.round_weight import round_weight

Array = np.ndarray[Any, np.dtype[np.float32]]
AHEAD = 2  # jobs that wait for a process: their arrays are in memory


@dataclass(frozen=True)
class RoundingJob:
    """Weights of one input and the formats they are wanted in, each with the file for it; float32 arrays."""

    weights: Mapping[str, Array]
    together: Mapping[str, int]  # numbers of a weight and of those that are rounded as it is: experts of a layer
    wanted: Sequence[tuple[str, str, Path]]
    hessian: Array | None
    moments: Mapping[str, Array]  # of those that have some
    outputs: Mapping[str, Array]

    def run(self) -> list[tuple[str, str, dict[str, StoredTensor]]]:
        """Names, formats, and where the encoded parts lie."""
        hessian = _tensor(self.hessian)
        inputs = None if hessian is None else InputHessian(hessian)
        writer, done = ScratchWriter(), []
        for name, fmt, path in self.wanted:
            with parts_of(self.together[name]):
                made = round_weight(
                    torch.from_numpy(self.weights[name]),
                    fmt,
                    moments=_tensor(self.moments.get(name)),
                    hessian=inputs,
                    outputs=_tensor(self.outputs.get(name)),
                    name=name,
                )
            done.append((name, fmt, writer.write(path, made.parts)))
        return done


@dataclass
class RoundingProcesses:
    """`count` processes, started when they are first needed; they end with this object."""

    count: int
    _pool: ProcessPoolExecutor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # threads of torch and a GPU do not survive a fork
        self._pool = ProcessPoolExecutor(
            self.count, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
        )
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def start(self, formats: Sequence[str]) -> None:
        """Start all of them, and have them compile what rounds to these formats; this does not wait for them."""
        with self._ends_are_named():
            for _ in range(self.count):
                self._pool.submit(_compile, tuple(formats))

    def round(self, jobs: Iterable[RoundingJob]) -> Iterator[tuple[str, str, dict[str, StoredTensor]]]:
        """What is rounded, as it comes; jobs are asked for a few at a time."""
        waiting: set[Future[list[tuple[str, str, dict[str, StoredTensor]]]]] = set()
        try:
            with self._ends_are_named():
                for job in jobs:
                    waiting.add(self._pool.submit(job.run))
                    while len(waiting) >= self.count + AHEAD:
                        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                        for each in done:
                            yield from each.result()
                while waiting:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for each in done:
                        yield from each.result()
        finally:
            for each in waiting:
                each.cancel()

    @contextmanager
    def _ends_are_named(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool as error:
            raise SearchError(
                f"a process that rounds weights, one of {self.count}, ended without an answer: it was killed, as for "
                "memory, or could not start; ask for fewer --workers (0: none), and in Python begin the script under "
                '`if __name__ == "__main__":`'
            ) from error


def _compile(formats: Sequence[str]) -> None:
    weight = torch.randn(SMALLEST_FOR_CPU // 512, 512)
    for fmt in formats:
        round_weight(weight, fmt, hessian=torch.eye(512), outputs=torch.eye(len(weight)))


def as_array(tensor: torch.Tensor) -> Array:
    """Numbers to send; torch itself would send a handle of shared memory, of which hosts may have little."""
    array: Array = tensor.detach().float().cpu().contiguous().numpy()
    return array


def _tensor(array: Array | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)
