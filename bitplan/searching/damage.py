"""What a format takes from a model, in nats, predicted from the really quantized weight.

Predicted damage of all experts of a projection together: hundreds of small weights, for every format.

Each expert has its own inputs and gradients, and what a format does to one it does to all alike. So every expert is
rounded once, to a format that takes no time, with its inputs taken as independent of each other; a few that the damage
is largest of say, by some of their rows and their whole inputs, how many times that each format costs.

Weights rounded in processes of one thread each: a matrix of some hundred rows keeps one core busy, and no GPU.

A process gets weights that read one input with their statistics, and writes what it rounds into a scratch folder.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import stat
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from bitplan.base.folders import scratch_folder
from bitplan.files.cluster import Cluster
from bitplan.formats import Encoded, get_format
from bitplan.formats.dispatch import decode, encode, parts_of
from bitplan.plan.names import natural_order
from bitplan.plan.structure.families import joined_name
from bitplan.rounding.error_compensation import InputHessian
from bitplan.rounding.layout import layout_of
from bitplan.rounding.round_columns import SMALLEST_FOR_CPU, compiled_on_threads
from bitplan.rounding.weights import RoundingOptions, round_weight
from bitplan.searching.blocks import torch_threads
from bitplan.searching.evidence import place_of
from bitplan.searching.goal import SearchError
from bitplan.searching.statistics import COUNTS, GRADIENT, INPUTS, LOOKUP, InputStatistics, ScratchWriter, StoredTensor

if TYPE_CHECKING:
    from bitplan.searching.searched_model import SearchSubject, WeightSite

# ---- rounding processes ----------------------------------------------------------------------------------------------


Array = np.ndarray[Any, np.dtype[np.float32]]
ROUNDED_AT_ONCE = 2**25  # numbers of a weight: some twelve copies of them are in memory
AHEAD = 2  # jobs that wait for a process: their arrays are in memory


@dataclass(frozen=True)
class RoundingJob:
    """A job for a process: weights with one input, statistics, and (weight, format, file to write) of each result."""

    weights: Mapping[str, Array]
    together: Mapping[str, int]  # numbers of a weight and of those that are rounded as it is: experts of a layer
    wanted: Sequence[tuple[str, str, Path]]
    hessian: Array | None
    moments: Mapping[str, Array]  # of those that have some
    outputs: Mapping[str, Array]
    at_once: int = ROUNDED_AT_ONCE  # numbers of a weight

    def run(self) -> list[tuple[str, str, dict[str, StoredTensor]]]:
        """Round and write everything; returns (weight, format, where the encoded parts lie) for each result."""
        writer = ScratchWriter()
        return [
            (name, fmt, writer.write(path, encoded.parts))
            for (name, fmt, path), encoded in zip(self.wanted, self.rounded(), strict=True)
        ]

    def rounded(self) -> Iterator[Encoded]:
        """Round the job's weights and yield the result for each entry of `wanted`, in order."""
        hessian = _tensor(self.hessian)
        inputs = None if hessian is None else InputHessian(hessian)
        for name, fmt, _ in self.wanted:
            with parts_of(self.together[name]):
                yield round_by_rows(
                    _as_tensor(self.weights[name]),
                    fmt,
                    self.at_once,
                    moments=_tensor(self.moments.get(name)),
                    hessian=inputs,
                    outputs=_tensor(self.outputs.get(name)),
                    name=name,
                )


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
        """Run jobs in worker processes and yield (weight, format, rounded parts) as they finish.

        Only a few jobs are taken from `jobs` ahead of those that run.
        """
        waiting: set[Future[list[tuple[str, str, dict[str, StoredTensor]]]]] = set()
        try:
            with self._ends_are_named():
                for job in jobs:
                    waiting.add(self._pool.submit(job.run))
                    while len(waiting) >= self.count + AHEAD:
                        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                        for future in done:
                            yield from future.result()
                while waiting:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield from future.result()
        finally:
            for future in waiting:
                future.cancel()

    @contextmanager
    def _ends_are_named(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool as error:
            raise SearchError(
                f"a process that rounds weights, one of {self.count}, ended without an answer: it was killed, as for "
                "memory, or could not start; in Python begin the script under "
                '`if __name__ == "__main__":`, and ask for fewer, or none',
                settings={"workers": 0},
            ) from error


class JobRounder:
    """Rounds on a worker of a Dask cluster: a job brings weights and statistics, and results are sent back."""

    files: Sequence[Path] = ()

    def make(self, job: RoundingJob) -> list[Encoded]:
        with torch_threads(1), compiled_on_threads(1):
            return list(job.rounded())

    def close(self) -> None:
        """Do nothing: no file is open."""


@dataclass
class ClusterRounding:
    """Weights rounded by the workers of a Dask cluster, as `RoundingProcesses` does it on this machine."""

    address: str

    def start(self, formats: Sequence[str]) -> None:
        """Do nothing: each worker compiles the loops of a format when it first rounds to it."""

    def round(self, jobs: Iterable[RoundingJob]) -> Iterator[tuple[str, str, dict[str, StoredTensor]]]:
        """Run jobs on a Dask cluster and yield (weight, format, rounded parts) in the order of the jobs."""
        sent, writer = deque[RoundingJob](), ScratchWriter()

        def sending() -> Iterator[RoundingJob]:
            for job in jobs:
                sent.append(replace(job, weights={}, hessian=None, moments={}, outputs={}))
                yield job

        with Cluster(self.address) as cluster:
            for rounded in cluster.map(JobRounder, sending()):
                for (name, fmt, path), encoded in zip(sent.popleft().wanted, rounded, strict=True):
                    yield name, fmt, writer.write(path, encoded.parts)


def _compile(formats: Sequence[str]) -> None:
    weight = torch.randn(SMALLEST_FOR_CPU // 512, 512)
    for fmt in formats:
        round_weight(weight, fmt, hessian=torch.eye(512), outputs=torch.eye(len(weight)))


def as_array(tensor: torch.Tensor) -> Array:
    """Numbers to send; torch itself would send a handle of shared memory, of which hosts may have little."""
    array: Array = tensor.detach().float().cpu().contiguous().numpy()
    return array


def _tensor(array: Array | None) -> torch.Tensor | None:
    return None if array is None else _as_tensor(array)


def _as_tensor(array: Array) -> torch.Tensor:
    """A tensor over the array's memory, or over a copy of what arrived in memory that may not be written to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


# ---- damage ----------------------------------------------------------------------------------------------------------


SCRATCH = "bitplan-search"  # folders .bitplan-search-* among the system's temporary ones
MOST_WEIGHTS, MOST_NUMBERS = 3, 2**28  # q, k and v; and how many numbers they may have together
SAMPLED_ROWS, SAMPLED_SHARE = 128, 32  # at least so many rows of a weight are rounded to predict, or one in so many
QUICK_FORMATS = ("q4_0_gguf", "nvfp4", "int8_row")  # the last holds rows of any length
AT_ONCE = 2**26  # numbers of a weight whose damage is computed at once
INPUTS_AT_ONCE = 2**25  # numbers of Hessians that several threads may work on
UNSEEN = 0.5  # how often a token that the text did not have counts as seen


class _Recent(threading.local):
    """The weights and the Hessian that a thread read last: it needs them again for the other formats of a group."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.hessian: tuple[str, InputHessian] | None = None


def pieces_of(weight: Tensor, at_once: int, height: int = 1) -> list[Tensor]:
    """Rows of a weight with about `at_once` numbers each, a multiple of `height`."""
    rows = max(1, at_once // max(1, weight.shape[1] * height)) * height
    return list(weight.split(rows))


def round_by_rows(
    weight: Tensor, fmt: str, at_once: int = ROUNDED_AT_ONCE, **options: Unpack[RoundingOptions]
) -> Encoded:
    """Round a weight some rows at a time if no `outputs` join them, to the same bits; a shared base is the whole's."""
    format_ = get_format(fmt)
    pieces = [weight] if options.get("outputs") is not None else pieces_of(weight, at_once, _height(weight.shape, fmt))
    if len(pieces) < 2:
        return round_weight(weight, fmt, **options)
    if format_.scales is not None and format_.scales.needs_base:
        bases = [encode(piece, fmt).base for piece in pieces]
        options["base"] = max(float(base) for base in bases if base is not None)
    encoded = [round_weight(piece, fmt, **options).parts for piece in pieces]
    shapes = format_.part_shapes(tuple(weight.shape))
    parts = {
        name: encoded[0][name] if name == "base" else torch.cat([part[name] for part in encoded]).reshape(shape)
        for name, (_, shape) in shapes.items()
    }
    return Encoded(format_, tuple(weight.shape), **parts)


@dataclass
class RoundedWeights:
    """Weights in formats, each rounded once; they lie in files of a scratch folder, which goes with this object.

    workers   processes for `round_all`, or the address of a Dask scheduler that has some; without them it rounds where
              the model is, on a CPU on several threads
    threads   as many as that at most, each with up to `at_once` numbers of a weight at a time
    """

    subject: SearchSubject
    statistics: InputStatistics
    workers: int | str = 0
    threads: int = sys.maxsize
    at_once: int = ROUNDED_AT_ONCE
    scratch: Path = field(init=False)
    _files: dict[tuple[str, str], dict[str, StoredTensor]] = field(default_factory=dict, repr=False)
    _recent: _Recent = field(default_factory=_Recent, repr=False)
    _quick: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _gains: dict[tuple[str, str], float] = field(default_factory=dict, repr=False)
    _writer: ScratchWriter = field(default_factory=ScratchWriter, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)  # what is read and remembered
    _processes: RoundingProcesses | ClusterRounding | None = field(default=None, repr=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)  # of files that processes write

    def __post_init__(self) -> None:
        opened = ExitStack()  # a killed search leaves its folder, and the next one removes it
        self.scratch = opened.enter_context(scratch_folder(Path(tempfile.gettempdir()), SCRATCH))
        self.scratch.chmod(stat.S_IRWXU)
        weakref.finalize(self, opened.close)
        if self.workers and not self.subject.target.streamed:
            workers = self.workers
            self._processes = ClusterRounding(workers) if isinstance(workers, str) else RoundingProcesses(workers)

    def encoded(self, name: str, fmt: str) -> Encoded:
        site = self.subject.sites[name]
        stored = self._files.get((name, fmt))
        if stored is not None:
            parts = {part: stored_part.read().to(self.subject.device) for part, stored_part in stored.items()}
            return Encoded(get_format(fmt), site.shape, **parts)
        encoded = self._round(site, fmt)
        self._write(site, fmt, encoded)
        return encoded

    def _write(self, site: WeightSite, fmt: str, encoded: Encoded) -> None:
        with self._lock:
            path = self.scratch / f"weight-{len(self._files)}"
            self._files[site.name, fmt] = self._writer.write(path, encoded.parts)

    def round_all(self, pairs: Iterable[tuple[str, str]], on_done: Callable[[str, str], None]) -> None:
        """Round weights to formats that are not rounded yet, those of different inputs on several threads or processes.

        Matrices of some hundred rows and columns keep one thread busy, and no more.
        """
        jobs: dict[str, list[tuple[str, str]]] = {}
        for name, fmt in self.missing(pairs):
            jobs.setdefault(self.statistics.owner(name), []).append((name, fmt))
        if self._processes is not None:
            longest_first = sorted(jobs.values(), key=self._work, reverse=True)
            for name, fmt, stored_parts in self._processes.round(map(self._job_for_process, longest_first)):
                self._files[name, fmt] = stored_parts
                on_done(name, fmt)
            return
        workers = min(len(jobs), self._workers(name for job in jobs.values() for name, _ in job))
        if workers < 2:
            for name, fmt in (pair for job in jobs.values() for pair in job):
                self.encoded(name, fmt)
                on_done(name, fmt)
            return
        with _pool_of(workers) as pool:
            longest_first = sorted(jobs.values(), key=self._work, reverse=True)  # no thread waits long at the end
            for done in as_completed([pool.submit(self._round_job, job) for job in longest_first]):
                for name, fmt in done.result():
                    on_done(name, fmt)

    def _workers(self, names: Iterable[str]) -> int:
        """How many threads should round different weights at the same time."""
        widest = max((self.subject.sites[name].shape[-1] for name in names), default=1)
        return (
            1
            if self.subject.device.type != "cpu"
            else max(1, min(torch.get_num_threads(), self.threads, INPUTS_AT_ONCE // widest**2))
        )

    @contextmanager
    def predicting(self) -> Iterator[Callable[..., Iterator[Any]]]:
        """Yield `map`, on several threads where matrices are small; results come in the order of the jobs."""
        has_experts = any(site.slice is not None for site in self.subject.sites.values())
        workers = 1 if has_experts else self._workers(self.subject.sites)  # formats of experts share what is computed
        if workers < 2:
            with self._one_torch_thread():
                yield map
            return
        with _pool_of(workers) as pool:
            yield pool.map

    @contextmanager
    def compiling(self, formats: Sequence[str]) -> Iterator[None]:
        """A context that compiles, beside it, what rounds to these formats: once some seconds of a core."""
        largest = max(map(self.subject.numbers_with, self.subject.sites))
        is_compiled = largest >= SMALLEST_FOR_CPU and not self.subject.target.streamed
        if is_compiled and self._processes is not None:
            self._processes.start(formats)
        if self.subject.device.type != "cpu" or not is_compiled:
            yield
            return
        stopped, weight = threading.Event(), torch.randn(SMALLEST_FOR_CPU // 512, 512)

        def compile_loops() -> None:
            for fmt in formats:
                if not stopped.is_set():
                    round_weight(weight, fmt, hessian=torch.eye(512))

        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(compile_loops)
            try:
                yield
            except BaseException:
                stopped.set()
                raise
            compiled.result()

    @contextmanager
    def _one_torch_thread(self) -> Iterator[None]:
        """A context with one torch thread for small matrices, where several wait longer than they work."""
        widest, threads = max(site.shape[-1] for site in self.subject.sites.values()), torch.get_num_threads()
        if self.subject.device.type != "cpu" or 2 * widest**2 > INPUTS_AT_ONCE:
            yield
            return
        with torch_threads(1), compiled_on_threads(threads):
            yield

    def _work(self, pairs: list[tuple[str, str]]) -> int:
        """An estimate of the time to round these (weight, format) pairs, in an arbitrary unit."""
        shapes = [self.subject.sites[name].shape for name, _ in pairs]
        return sum(math.prod(shape) * shape[-1] for shape in shapes)

    def _job_for_process(self, pairs: list[tuple[str, str]]) -> RoundingJob:
        """A job for another process: round these (weight, format) pairs, which share one input."""
        names = list(dict.fromkeys(name for name, _ in pairs))
        hessian, statistics = self.statistics.hessian(names[0]), self.statistics
        return RoundingJob(
            {name: as_array(self.subject.weight(name)) for name in names},
            {name: self.subject.numbers_with(name) for name in names},
            [(name, fmt, self.scratch / f"rounded-{next(self._numbers)}") for name, fmt in pairs],
            None if hessian is None else as_array(hessian),
            {name: as_array(sums) for name in names if (sums := statistics.moments(name)) is not None},
            {name: as_array(sums) for name in names if (sums := statistics.outputs(name)) is not None},
            self.at_once,
        )

    def _round_job(self, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Round these (weight, format) pairs, which share one input's Hessian, in this process."""
        with self._lock:
            hessian = self.statistics.hessian(pairs[0][0])
        inputs = None if hessian is None else InputHessian(hessian)
        for name, fmt in pairs:
            site = self.subject.sites[name]
            self._write(site, fmt, self._round(site, fmt, inputs=inputs))
        return pairs

    def missing(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Weights and formats that are not rounded yet, in the order in which least is computed twice."""
        absent = [pair for pair in dict.fromkeys(pairs) if pair not in self._files]
        positions = {name: at for at, name in enumerate(self.subject.sites)}
        first: dict[str, int] = {}  # of each stack, which is read as a whole, and of each input
        for name, site in self.subject.sites.items():
            first.setdefault(self.statistics.owner(name), positions[name])
            if site.slice is not None:
                first.setdefault(site.slice.stack, positions[name])

        def order(pair: tuple[str, str]) -> tuple[int, int, int, int]:
            name, fmt = pair
            site, inputs = self.subject.sites[name], first[self.statistics.owner(name)]
            total_order = inputs if site.slice is None else first[site.slice.stack]
            return total_order, inputs, _width(site.shape, fmt), positions[name]

        return sorted(absent, key=order)

    def _weight(self, name: str) -> Tensor:
        """Read a weight by name; the last few that were read are kept."""
        weights = self._recent.weights
        if name not in weights:
            numbers = math.prod(self.subject.sites[name].shape)
            while weights and not self._has_room(numbers):
                del weights[next(iter(weights))]
            with self._lock:
                weights[name] = self.subject.weight(name)
        return weights[name]

    def _has_room(self, numbers: int) -> bool:
        """Whether one more weight of `numbers` elements may be kept; a head's can be larger than a block."""
        weights = self._recent.weights
        return len(weights) < MOST_WEIGHTS and numbers + sum(map(Tensor.numel, weights.values())) <= MOST_NUMBERS

    def decoded(self, name: str, fmt: str) -> Tensor:
        return decode(self.encoded(name, fmt), torch.float32)

    def nearest(self, name: str, fmt: str) -> Tensor:
        """A weight rounded without statistics, as `quantize` rounds it where it is given none."""
        return decode(encode(self.subject.weight(name), fmt, name=name), torch.float32)

    def predicted(self, name: str, fmt: str) -> float:
        """Nats a token that the format costs this weight alone.

        Rows are rounded independently, so some rows say how many times worse the format is than a quick one that all
        rows were rounded to. What compensated rounding gains over that is taken from one layer of each projection.
        """
        site = self.subject.sites[name]
        weight = self._weight(site.name)
        if get_format(fmt).is_cast:
            return float(self._damage_in(site, weight, fmt).sum())
        quick, rows = self._quick_damage(site, weight), _sampled_rows(weight)
        sampled, before = self._plain_damage(site, fmt), float(quick[rows].sum())
        total = float(quick.sum()) * sampled / before if before > 0 else sampled * len(weight) / len(rows)
        return total * self.gain(projection_of(name), fmt)

    def gain(self, projection: str, fmt: str) -> float:
        """The damage after compensated rounding over that of plain rounding, on some rows of a middle layer; kept."""
        key = projection, fmt
        if key not in self._gains:
            names = natural_order(name for name in self.subject.sites if projection_of(name) == projection)
            site = self.subject.sites[names[len(names) // 2]]
            weight = self._weight(site.name)
            rows = _sampled_rows(weight)
            change = weight[rows] - decode(self._round(site, fmt, rows), torch.float32)
            after = float(damage_of_rows(site, change, self.statistics, rows).sum())
            plain = self._plain_damage(site, fmt)
            self._gains[key] = after / plain if plain > 0 else 1.0
        return self._gains[key]

    def _plain_damage(self, site: WeightSite, fmt: str) -> float:
        """The damage, in nats a token, of rounding some rows of a weight to nearest."""
        weight = self._weight(site.name)
        rows = _sampled_rows(weight)
        change = _change(weight[rows], fmt, site.name)
        return float(damage_of_rows(site, change, self.statistics, rows).sum())

    def _quick_damage(self, site: WeightSite, weight: Tensor) -> Tensor:
        """The damage of each row in a format that is encoded fast: a base to which others are compared."""
        if site.name not in self._quick:
            fmt = formats_that_hold(site.shape, QUICK_FORMATS)[0]
            self._quick[site.name] = self._damage_in(site, weight, fmt)
        return self._quick[site.name]

    def _damage_in(self, site: WeightSite, weight: Tensor, fmt: str) -> Tensor:
        """The damage, in nats a token, of each row if the weight is rounded to nearest in a format."""
        damages, first = [], 0
        for piece in pieces_of(weight, self.at_once):
            rows = torch.arange(first, first + len(piece), device=weight.device)
            damages.append(damage_of_rows(site, _change(piece, fmt, site.name), self.statistics, rows))
            first += len(piece)
        return torch.cat(damages)

    def _round(
        self, site: WeightSite, fmt: str, rows: Tensor | None = None, inputs: InputHessian | None = None
    ) -> Encoded:
        with self._lock:
            weight = self._weight(site.name)
            if self.subject.target.streamed:  # as a stream encodes weights that change in every step
                return encode(weight if rows is None else weight[rows], fmt, name=site.name)
            moments, hessian = self.statistics.moments(site.name), inputs or self._input_hessian(site.name)
            outputs = self.statistics.outputs(site.name) if rows is None else None
        with parts_of(self.subject.numbers_with(site.name)):
            return round_by_rows(
                weight if rows is None else weight[rows],
                fmt,
                self.at_once,
                moments=moments,
                hessian=hessian,
                outputs=outputs,
                name=site.name,
            )

    def _input_hessian(self, name: str) -> InputHessian | None:
        """The Hessian of a weight's inputs; the last is kept, since formats of one weight follow each other."""
        owner = self.statistics.owner(name)
        if self._recent.hessian is None or self._recent.hessian[0] != owner:
            hessian = self.statistics.hessian(name)
            if hessian is None:
                return None
            self._recent.hessian = owner, InputHessian(hessian.to(self.subject.device))
        return self._recent.hessian[1]


@contextmanager
def _pool_of(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads that share torch's; if one fails, work that has not begun is left out."""
    threads = max(1, torch.get_num_threads() // workers)  # its share for each
    with torch_threads(threads):
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads,))
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def by_width(shape: tuple[int, ...], formats: Iterable[str]) -> list[str]:
    """Sort formats so that those with equally wide blocks are together: they share a factor of the inputs."""
    return sorted(formats, key=lambda fmt: _width(shape, fmt))


def _height(shape: Sequence[int], fmt: str) -> int:
    """How many neighbouring rows share a scale in a format."""
    return 1 if get_format(fmt).is_cast else layout_of(get_format(fmt), tuple(shape)).height


def _width(shape: tuple[int, ...], fmt: str) -> int:
    return 0 if get_format(fmt).is_cast else layout_of(get_format(fmt), shape).width


def projection_of(name: str) -> str:
    """The projection that a weight is of, whatever its layer and expert."""
    return place_of(joined_name(name, joined=False))[1]


def _sampled_rows(weight: Tensor) -> Tensor:
    count = max(SAMPLED_ROWS, len(weight) // SAMPLED_SHARE)
    return torch.arange(0, len(weight), max(1, len(weight) // count), device=weight.device)


def _change(weight: Tensor, fmt: str, name: str) -> Tensor:
    """The error of rounding to nearest: the weight minus its numbers in a format."""
    return decode(encode(weight, fmt, name=name), torch.float32).neg_().add_(weight)


def damage_of_rows(site: WeightSite, change: Tensor, statistics: InputStatistics, rows: Tensor | None = None) -> Tensor:
    """Nats a token for each row of a change dW, or of some rows of one: their sum is the damage.

    1/2 gradient_r dW_r A dW_r^T, with A's columns by how much the loss minds the tokens that use them; and for an
    embedding the same of what it looks up.
    """

    def chosen(part: Tensor) -> Tensor:
        part = part.to(change.device)
        return part if rows is None else part[rows]

    nats = torch.zeros(len(change), dtype=torch.float64, device=change.device)
    inputs, gradient = statistics.mean(site.name, INPUTS, change.device), statistics.mean(site.name, GRADIENT)
    if inputs is not None and gradient is not None:
        steps = statistics.column_steps(site.name, inputs)
        weighed = change if steps is None else change * steps
        pieces = weighed.split(max(1, AT_ONCE // change.shape[1]))
        moved = torch.cat([((piece @ inputs) * piece).sum(1).clamp_min(0) for piece in pieces])
        nats += chosen(gradient).double() * moved.double() / 2
    counts, lookup = statistics.sums.get(f"{site.name}.{COUNTS}"), statistics.mean(site.name, LOOKUP)
    if counts is not None and lookup is not None:
        share = (counts + UNSEEN) / (statistics.tokens + UNSEEN * len(counts))
        nats += chosen(share).double() * (change.square() @ lookup.to(change.device)).double() / 2
    return nats


def formats_that_hold(shape: Sequence[int], formats: Sequence[str]) -> list[str]:
    """The formats whose blocks divide the rows of a tensor."""
    holding = []
    for name in formats:
        fmt = get_format(name)
        cols = fmt.matrix_shape(tuple(shape))[1]
        if fmt.padded_cols(cols) == cols:
            holding.append(name)
    return holding


# ---- expert damage ---------------------------------------------------------------------------------------------------


MOST_SAMPLED = 8  # experts whose rows are rounded to every format
SAMPLED_INPUTS = 2**28  # numbers of their second moments that are in memory


def experts_together(subject: SearchSubject, weights: Iterable[str]) -> list[tuple[str, ...]]:
    """Weights that are predicted together: the experts of one projection of a layer; every other weight alone."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        key = name if subject.sites[name].slice is None else joined_name(name, joined=False)
        groups.setdefault(key, []).append(name)
    return [tuple(names) for names in groups.values()]


class ExpertDamage:
    """Predicts the damage, in nats a token, of one format for all experts of a projection."""

    def __init__(self, rounded: RoundedWeights) -> None:
        self._rounded = rounded
        self._known: dict[tuple[str, ...], _Sample] = {}

    def predicted(self, names: tuple[str, ...], fmt: str) -> float:
        """What the format costs these experts, with the rounding that `quantize --evidence` applies."""
        if names not in self._known:
            latest = list(self._known.items())[-1:]  # gate and up of a group come in turns
            self._known = dict([*latest, (names, self._sample(names))])
        sample = self._known[names]
        nats = sample.damage(fmt)
        total = sample.all_quick * nats / sample.quick if sample.quick > 0 else nats
        return total if get_format(fmt).is_cast else total * self._rounded.gain(projection_of(names[0]), fmt)

    def _sample(self, names: Sequence[str]) -> _Sample:
        subject, statistics = self._rounded.subject, self._rounded.statistics
        outputs, columns = subject.sites[names[0]].shape
        quick = formats_that_hold((outputs, columns), QUICK_FORMATS)[0]
        all_quick = torch.cat([self._quick(some, quick) for some in _chunks(names, outputs * columns)])
        count = max(1, min(len(names), MOST_SAMPLED, SAMPLED_INPUTS // columns**2))
        chosen = [names[index] for index in all_quick.argsort(descending=True, stable=True)[:count].tolist()]
        row_count = max(SAMPLED_ROWS // count, outputs // SAMPLED_SHARE)
        rows = torch.arange(0, outputs, max(1, outputs // row_count), device=subject.device)
        weights = torch.stack([subject.weight(name)[rows] for name in chosen])
        inputs, gradients = [], []
        for name in chosen:
            hessian, gradient = statistics.mean(name, INPUTS, subject.device), statistics.mean(name, GRADIENT)
            assert hessian is not None  # every expert has some: see RoutedTokens
            assert gradient is not None
            inputs.append(hessian)
            gradients.append(gradient.to(subject.device)[rows])
        minded, diagonal = torch.stack(gradients), torch.stack([hessian.diagonal() for hessian in inputs])
        part = float(_independent(_change_of_expert_damage(weights, quick), diagonal, minded).sum())
        return _Sample(weights, torch.stack(inputs), minded, float(all_quick.sum()), part)

    def _quick(self, names: Sequence[str], fmt: str) -> Tensor:
        """Each expert's damage if its inputs were independent: from the diagonal of their second moments."""
        subject, statistics = self._rounded.subject, self._rounded.statistics
        weights = torch.stack([subject.weight(name) for name in names])
        diagonals, gradients = [], []
        for name in names:
            inputs, gradient = statistics.mean(name, INPUTS), statistics.mean(name, GRADIENT)
            assert inputs is not None
            assert gradient is not None
            diagonals.append(inputs.diagonal().clone())
            gradients.append(gradient)
        stacked = (torch.stack(rows).to(subject.device) for rows in (diagonals, gradients))
        return _independent(_change_of_expert_damage(weights, fmt), *stacked).sum(1).cpu()


@dataclass(frozen=True)
class _Sample:
    """Some rows [experts, rows, K] of some experts with their inputs [experts, K, K], and their share of the damage."""

    weights: Tensor
    inputs: Tensor
    gradients: Tensor
    all_quick: float
    quick: float

    def damage(self, fmt: str) -> float:
        change = _change_of_expert_damage(self.weights, fmt)
        moved = (torch.bmm(change, self.inputs) * change).sum(-1).clamp_min(0)
        return float((self.gradients.double() * moved.double()).sum()) / 2


def _change_of_expert_damage(weights: Tensor, fmt: str) -> Tensor:
    """Weights [experts, rows, K] minus their numbers in a format, to nearest."""
    flat = weights.flatten(0, 1)
    return decode(encode(flat, fmt), torch.float32).neg_().add_(flat).view_as(weights)


def _independent(change: Tensor, diagonal: Tensor, gradients: Tensor) -> Tensor:
    """The damage, in nats a token, of each row of experts, as if inputs were independent of each other."""
    moved = torch.bmm(change.square(), diagonal.float()[:, :, None])[:, :, 0]
    return gradients.double() * moved.double() / 2


def _chunks(names: Sequence[str], numbers: int) -> Iterator[Sequence[str]]:
    step = max(1, AT_ONCE // numbers)
    for start in range(0, len(names), step):
        yield names[start : start + step]
