"""Tensors made on a Dask cluster: each worker opens the same files under the same paths, and makes some of the tensors.

A tensor is one task; what comes back is in the order of the jobs, and a few of them are under way at a time, so that
the client's memory stays bounded. A task whose worker ends is run again by another one, to the same bytes. Workers must
run the client's version of bitplan. A worker is a process with one thread or more: `dask worker ADDRESS --nworkers 8`.
"""

from __future__ import annotations

import platform
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from bitplan.base import __version__
from bitplan.base.errors import StoreError
from bitplan.base.optional import require
from bitplan.base.records import Closing
from bitplan.formats.registry import get_format

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

CONNECT_S = 30.0
LOOK_S = 2.0  # how often the client looks whether there are workers
MOST_FETCHES = 10  # of a file, until it is said that it cannot be had
LOST_S = 60.0  # a cluster without workers for so long is lost: a nanny starts a new one in less
AHEAD = 2  # tasks that wait for each thread: their answers lie in workers


class Maker(Protocol):
    """What each thread of a worker makes once: it has `files` open, and `make` turns a job into its result."""

    @property
    def files(self) -> Sequence[Path]: ...

    def make(self, job: Any) -> Any: ...

    def close(self) -> None: ...


class Stored(Protocol):
    """A tensor that lies in a file of the worker that computed it; `read` gives its numbers."""

    def read(self) -> Tensor: ...


class InFiles(NamedTuple):
    """An answer that is too large for a message: `facts` are sent, the tensors wait in the worker's files."""

    facts: Any
    files: Mapping[str, Stored]


Job = TypeVar("Job")
Opened = TypeVar("Opened", bound=Maker)


class Cluster(Closing):
    """A connection to a Dask scheduler."""

    def __init__(self, address: str) -> None:
        distributed = require("distributed", purpose="work on a Dask cluster", extra="dask")
        self._address, self._lost = address, distributed.scheduler.KilledWorker
        try:
            self._client = distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise StoreError(
                f"{address}: no Dask scheduler answers there: {reason}; start one with `dask scheduler`, and workers "
                "with `dask worker ADDRESS`, then give its address, tcp://HOST:8786"
            ) from error
        try:
            self._check_workers()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._client.close()

    @property
    def threads(self) -> int:
        """How many tasks run at once."""
        return sum(self._client.nthreads().values())

    def map(self, prepare: Callable[[], Maker], jobs: Iterable[Job]) -> Iterator[Any]:
        """Run jobs on the workers and yield results in order; each thread of a worker calls `prepare` once.

        `prepare` and the jobs are sent as they are pickled; tensors come back in any type of torch's.
        """
        with closing(self._tasks(prepare, jobs)) as tasks:
            for task in tasks:
                yield self._answer(task)

    def map_in_files(
        self, prepare: Callable[[], Maker], jobs: Iterable[Job]
    ) -> Iterator[tuple[Any, Iterator[tuple[str, Tensor]]]]:
        """Map to answers `InFiles`: yield their facts, and tensors by name, each fetched when it is asked for.

        They are asked for before the next answer is. Where a worker ended that had some, its job is done again.
        """
        with closing(self._tasks(prepare, jobs)) as tasks:
            for task in tasks:
                facts, files = self._answer(task)
                yield facts, ((name, self._fetched(task, name)) for name in files)

    def _tasks(self, prepare: Callable[[], Maker], jobs: Iterable[Job]) -> Generator[Any, None, None]:
        run, waiting = uuid.uuid4().hex, deque[Any]()
        try:
            for job in jobs:
                waiting.append(self._client.submit(_make, run, prepare, job, pure=False))
                while len(waiting) >= self.threads * (1 + AHEAD):
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            self._client.cancel(list(waiting))
            self._client.run(_forget, run, on_error="ignore")

    def _fetched(self, task: Any, name: str) -> Any:
        """A tensor from a file of the worker that made it, or of the one that made it again."""
        failures = 0
        while True:
            _, files = self._answer(task)
            worker = next(iter(self._client.who_has([task])[task.key]), None)
            try:
                if worker is not None:
                    return received(self._client.run(_read, files[name], workers=[worker])[worker])
            except (OSError, KeyError, ValueError) as error:
                failures += 1
                if failures == MOST_FETCHES:
                    reason = " ".join(str(error).split())
                    raise StoreError(
                        f"{self._address}: worker {worker} does not give the {name} that it made: {reason}; look at "
                        "its log and its disk, then start the same command again"
                    ) from error
            time.sleep(LOOK_S / MOST_FETCHES)

    def _answer(self, task: Any) -> Any:
        """What a task returns; waits while a worker that ended is replaced, but not for a cluster without any."""
        without_s = 0.0
        while True:
            try:
                return received(task.result(timeout=LOOK_S))
            except TimeoutError:
                without_s = 0.0 if self._client.nthreads() else without_s + LOOK_S
                if without_s >= LOST_S:
                    raise self._no_workers() from None
            except self._lost as error:
                raise StoreError(
                    f"{self._address}: a tensor ended worker after worker, as for want of memory; its last was "
                    f"{error.last_worker.address}: look at its log, and give workers more memory or fewer threads"
                ) from error

    def _check_workers(self) -> None:
        if not self._client.nthreads():
            raise self._no_workers()
        for worker, version in self._client.run(_version).items():
            if version != __version__:
                raise StoreError(
                    f"{self._address}: worker {worker} has bitplan {version}, and this is {__version__}: the bytes may "
                    f"differ; install {__version__} there and start it again"
                )

    def _no_workers(self) -> StoreError:
        return StoreError(
            f"{self._address}: the Dask scheduler has no workers; start some: dask worker {self._address} --nworkers 2"
        )


def file_sizes(files: Iterable[Path]) -> dict[str, int]:
    """Bytes of files, by name: what a worker has under the same paths must have as many."""
    return {path.name: path.stat().st_size for path in files}


def opened_as_here(source: Path, sizes: Mapping[str, int], opening: Callable[[], Opened]) -> Opened:
    """Open on a worker what the client has open; another file under the same path is refused."""
    where = f"on the worker at {platform.node()}"
    if not source.exists():
        raise StoreError(f"{source}: is not there {where}; give a path in a folder that all machines share")
    opened = opening()
    if (nbytes := file_sizes(opened.files)) != sizes:
        opened.close()
        raise StoreError(
            f"{source}: is another model {where}: its files have {nbytes} bytes, expected {dict(sizes)}; give a path "
            "in a folder that all machines share"
        )
    return opened


# ---- in a worker -----------------------------------------------------------------------------------------------------


# Of a run and a thread, for a file that is open has one reader at a time.
_makers: dict[tuple[str, int], Maker] = {}
_working: set[tuple[str, int]] = set()
_ended: set[str] = set()
_changing = threading.Lock()


def _make(run: str, prepare: Callable[[], Maker], job: Any) -> Any:
    mine = run, threading.get_ident()
    with _changing:
        _working.add(mine)
        maker = _makers.get(mine)
    try:
        if maker is None:
            maker = prepare()
            with _changing:
                _makers[mine] = maker
        return sent(maker.make(job))
    finally:
        with _changing:
            _working.remove(mine)
        if run in _ended:
            _close_idle(run)


def _forget(run: str) -> None:
    """Close a run's makers; one that still works is closed by its own thread."""
    _ended.add(run)
    _close_idle(run)


def _close_idle(run: str) -> None:
    with _changing:
        idle = [_makers.pop(key) for key in list(_makers) if key[0] == run and key not in _working]
    for maker in idle:
        maker.close()


def _read(stored: Stored) -> Any:
    return sent(stored.read())


def _version() -> str:
    return __version__


# ---- on the wire -----------------------------------------------------------------------------------------------------


class SentTensor(NamedTuple):
    """A tensor's bytes: pickles of torch's own know neither all of its types nor other machines."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


class SentEncoded(NamedTuple):
    """An encoded tensor as it is sent: the format's name, the shape, and the parts' bytes."""

    format: str
    shape: tuple[int, ...]
    parts: dict[str, Any]


def sent(result: Any) -> Any:
    """A worker's answer in a form to be sent: tensors become arrays of bytes; `received` is the inverse."""
    import torch

    from bitplan.formats.encoded import Encoded

    if isinstance(result, torch.Tensor):
        flat = result.detach().cpu().contiguous()
        data = flat.reshape(-1).view(torch.uint8).numpy()
        return SentTensor(str(result.dtype).removeprefix("torch."), tuple(result.shape), data)
    if isinstance(result, Encoded):
        return SentEncoded(result.fmt.name, result.shape, {name: sent(part) for name, part in result.parts.items()})
    if isinstance(result, (tuple, list)):
        return [sent(item) for item in result]
    if isinstance(result, dict):
        return {key: sent(item) for key, item in result.items()}
    return result


def received(answer: Any) -> Any:
    """The inverse of `sent`: an answer with tensors again in place of arrays of bytes; tuples come back as lists."""
    import torch

    from bitplan.formats.encoded import Encoded

    if isinstance(answer, SentTensor):
        # A copy: what arrives may lie in memory that may not be written to.
        flat = torch.frombuffer(bytearray(answer.data), dtype=torch.uint8) if answer.data.size else torch.empty(0)
        dtype = getattr(torch, answer.dtype)
        return flat.view(dtype).reshape(answer.shape) if answer.data.size else torch.empty(answer.shape, dtype=dtype)
    if isinstance(answer, SentEncoded):
        parts = {name: received(part) for name, part in answer.parts.items()}
        return Encoded(get_format(answer.format), answer.shape, **parts)
    if isinstance(answer, list):
        return [received(item) for item in answer]
    if isinstance(answer, dict):
        return {key: received(item) for key, item in answer.items()}
    return answer
