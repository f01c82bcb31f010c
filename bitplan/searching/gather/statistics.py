"""What every weight meets on a text: second moments of its inputs, and how much the loss minds a change of its outputs.

For a linear layer y = W x, over the tokens of the text:

    inputs      A = mean of x x^T, [K, K]
    gradient    mean of g^2, [N], where g is the gradient of -log p(token) by y, for tokens drawn from the model itself
    weighed     mean of |g|^2 x^2 over mean of |g|^2, [K]: the squares of inputs by how much the loss minds the token
    outputs     G = mean of g g^T, [N, N], where N is not too large: what rounding weighs rows with

Drawn tokens, not the text's, make this the Fisher information: with it 1/2 sum_r gradient_r dW_r A dW_r^T is the
second-order KL between the model and the one with W + dW, but for correlations between outputs and between positions.
An embedding has counts of its tokens in place of A. Gradients by weights are never computed: one pass forward and one
back through activations is all it takes. Statistics are sums until `mean` is asked, so that a run can stop and go on.
They lie in files, and are read one at a time: together they are as large as the model.

Tensors that a search writes for itself and reads again: raw bytes in files of a scratch folder.

Statistics are as large as the model, so they are written and read at the speed of memory: without a header, without
waiting for the disk, and where a GPU computes, through page-locked memory, while the GPU goes on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from bitplan.base.errors import FileFormatError
from bitplan.files.input_statistics import (
    HESSIAN,
    MOMENTS,
    OUTPUTS,
    SHARED,
    TOKENS_PER_OUTPUT,
    WEIGHTS,
    EvidenceFile,
    write_evidence,
)
from bitplan.files.open_files import open_tensors, write_tensors
from bitplan.files.safetensors import SafetensorsFile
from bitplan.files.tensor_file import Promise
from bitplan.searching.gather.expert_products import is_unseen
from bitplan.searching.goal import EvidenceFileError

# ---- scratch tensors -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file; `written` is the work that puts it there, if it may not be done yet."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    written: Future[None] | None = field(default=None, repr=False, compare=False)

    def read(self) -> Tensor:
        """A fresh tensor in memory; page-locked where this process uses a GPU."""
        self.wait()
        nbytes, done = math.prod(self.shape) * self.dtype.itemsize, 0
        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=_uses_gpu())
        view = buffer.numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            while done < nbytes:
                got = file.readinto(view[done:])
                if not got:
                    raise FileFormatError(
                        f"{self.path}: the file of a running search ends after {done} of {nbytes} bytes"
                    )
                done += got
        return buffer.view(self.dtype).reshape(self.shape)

    def wait(self) -> None:
        """Until it is written; a disk that is full is said here."""
        if self.written is not None:
            self.written.result()


class ScratchWriter:
    """Writes files of tensors, those of a GPU in the background: one file at a time, so that little waits in memory."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
        """Where each tensor will lie."""
        if self._last is not None:
            self._last.result()
        own = {key: _on_host(each.detach()) for key, each in tensors.items()}
        if any(each.is_cuda for each in tensors.values()):
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="bitplan-search-writes")
            self._last = self._pool.submit(_write, path, list(own.values()))
        else:
            _write(path, list(own.values()))
        places, start = {}, 0
        for key, each in own.items():
            places[key] = StoredTensor(path, start, tuple(each.shape), each.dtype, self._last)
            start += each.nbytes
        return places

    def close(self) -> None:
        """Until everything is written."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _write(path: Path, tensors: list[Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for each in tensors:
            view, done = each.reshape(-1).view(torch.uint8).numpy().data, 0
            while done < len(view):
                done += file.write(view[done:])


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.cpu().contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


# ---- statistics ------------------------------------------------------------------------------------------------------


EVIDENCE, STATISTICS = "evidence.safetensors", "statistics.safetensors"
INPUTS, GRADIENT, WEIGHED, COUNTS, LOOKUP = "inputs", "gradient", "weighed_squares", "counts", "lookup_gradient"
TINY = 1e-30  # of a column that no token used
MOST_RATIO = 1e3
BETWEEN = OUTPUTS.removeprefix(".")


class LastMatrix(threading.local):
    """The matrix that a thread asked for last: formats come one after the other, and ask for the same again."""

    key: object = None
    matrix: Tensor | None = None

    def remember(self, key: object, matrix: Tensor) -> Tensor:
        self.key, self.matrix = key, matrix
        return matrix


@dataclass
class SumFiles:
    """Sums by name: some in memory, others in files, where each is added up of parts when it is asked for."""

    small: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, list[StoredTensor]] = field(default_factory=dict)
    scratch: set[Path] = field(default_factory=set)  # files of parts that nobody else reads
    _last: LastMatrix = field(default_factory=LastMatrix, repr=False)

    def get(self, key: str) -> Tensor | None:
        if key not in self.parts:
            return self.small.get(key)
        known = self._last.matrix if self._last.key == key else None
        return self._last.remember(key, self._read(key)) if known is None else known

    def _read(self, key: str) -> Tensor:
        total: Tensor | None = None
        for stored in self.parts[key]:
            part = stored.read()
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def release(self, key: str) -> None:
        """A sum that was written elsewhere: files of parts go when nothing in them is wanted any more."""
        own = self.parts.pop(key, [])
        wanted = {stored.path for parts in self.parts.values() for stored in parts}
        for path in {stored.path for stored in own}:
            if path in self.scratch and path not in wanted:
                path.unlink()

    def __contains__(self, key: str) -> bool:
        return key in self.small or key in self.parts

    def names(self) -> list[str]:
        return sorted({*self.small, *self.parts})

    def add(self, small: Mapping[str, Tensor], files: Mapping[str, StoredTensor]) -> None:
        """Parts of more windows, in memory and in files of their own."""
        for key, part in small.items():
            self.small[key] = self.small[key] + part.cpu() if key in self.small else part.cpu()
        self._last = LastMatrix()
        self.scratch |= {stored.path for stored in files.values()}
        for key, stored in files.items():
            self.parts.setdefault(key, []).append(stored)


@dataclass
class InputStatistics:
    """Sums over `tokens` tokens in `windows` windows, under NAME.inputs, NAME.gradient and so on.

    Gradients are of the first `gradient_tokens` of them. Layers that read the same input share one matrix: `shared`
    maps a name to the one that holds it.
    """

    sums: SumFiles = field(default_factory=SumFiles)
    shared: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    gradient_tokens: int = 0
    windows: int = 0
    _mean: LastMatrix = field(default_factory=LastMatrix, repr=False)

    def mean(self, name: str, what: str, device: torch.device | None = None) -> Tensor | None:
        """The mean over tokens, None where the weight has no such part; the last matrix is remembered."""
        owner = self.shared.get(name, name) if what == INPUTS else name
        tokens = self.gradient_tokens if what in (GRADIENT, LOOKUP) else self.tokens
        key = f"{owner}.{what}", tokens, device
        if self._mean.matrix is not None and self._mean.key == key:
            return self._mean.matrix
        total = self.sums.get(key[0])
        if total is None or not tokens:
            return None
        found = (total if device is None else total.to(device)) / tokens
        return self._mean.remember(key, found) if what == INPUTS else found

    def column_steps(self, name: str, inputs: Tensor) -> Tensor | None:
        """[K]: what columns of `inputs`, A, are multiplied by on both sides, so that its diagonal is `weighed`.

        Inputs that are large for a token that the loss does not mind would otherwise count as much as others. None
        where the weight has no such part: an expert's.
        """
        squares, gradient = self.sums.get(f"{name}.{WEIGHED}"), self.sums.get(f"{name}.{GRADIENT}")
        if squares is None or gradient is None or not float(gradient.sum()) > 0:
            return None
        ratio = squares.to(inputs.device) / float(gradient.sum()) / inputs.diagonal().clamp_min(TINY)
        return ratio.clamp(0, MOST_RATIO).sqrt()

    def share(self, owners: Mapping[str, str]) -> None:
        """Weights that have another's inputs; one that has got inputs of its own since has those."""
        own = {name for name in self.shared if f"{name}.{INPUTS}" in self.sums}
        self.shared = {name: owner for name, owner in self.shared.items() if name not in own} | dict(owners)

    @property
    def unseen(self) -> list[str]:
        """Experts' weights to which no token of the text was sent."""
        return [name for name, owner in self.shared.items() if is_unseen(owner)]

    def owner(self, name: str) -> str:
        """The weight whose `hessian` is this one's, too."""
        return name if f"{name}.{LOOKUP}" in self.sums else self.shared.get(name, name)

    def hessian(self, name: str) -> Tensor | None:
        """[K, K], in any unit: what rounding minimises, for all uses of a weight together; None if no layer uses it."""
        owner = self.shared.get(name, name)
        inputs, gradient = self.sums.get(f"{owner}.{INPUTS}"), self.sums.get(f"{name}.{GRADIENT}")
        lookup, counts = self.sums.get(f"{name}.{LOOKUP}"), self.sums.get(f"{name}.{COUNTS}")
        if inputs is None or gradient is None or lookup is None or counts is None:
            return inputs
        # Tied: a row counts by the gradient of its logit, and by how often it is looked up; of both, the mean row.
        return inputs * float(gradient.mean()) + torch.diag(lookup) * (self.tokens / len(counts))

    def outputs(self, name: str) -> Tensor | None:
        """[N, N], in any unit: how much the loss minds changes of outputs together; None where that is not known."""
        found = self.sums.get(f"{name}.{BETWEEN}")
        return found if found is not None and self.gradient_tokens >= TOKENS_PER_OUTPUT * len(found) else None

    def moments(self, name: str) -> Tensor | None:
        """[K], in any unit: how much each column of what is looked up counts; None for weights of layers."""
        is_input = f"{self.shared.get(name, name)}.{INPUTS}" in self.sums
        return None if is_input else self.sums.get(f"{name}.{LOOKUP}")

    def save(self, folder: Path, fingerprint: Mapping[str, str], digests: Mapping[str, str]) -> None:
        """evidence.safetensors, with which `quantize --evidence` rounds; and statistics.safetensors, the rest.

        Parts are gone afterwards, file by file: disks need not hold them twice. Load what was saved to go on.

        digests   of each weight, by which `quantize` knows its model
        """
        facts = {name: str(getattr(self, name)) for name in ("tokens", "gradient_tokens", "windows")}
        facts |= {f"fingerprint.{name}": value for name, value in sorted(fingerprint.items())}
        keys = self.sums.names()
        names = sorted({key.rpartition(".")[0] for key in keys})
        parts: dict[str, tuple[int, ...]] = {}
        for name in (name for name in names if name not in self.shared):
            columns = self.columns(name)
            if f"{name}.{INPUTS}" in self.sums:
                parts[f"{name}{HESSIAN}"] = (columns, columns)
            elif f"{name}.{LOOKUP}" in self.sums:
                parts[f"{name}{MOMENTS}"] = (columns,)
        for name in (name for name in names if f"{name}.{BETWEEN}" in self.sums):
            parts[f"{name}{OUTPUTS}"] = (len(self.sums.small[f"{name}.{GRADIENT}"]),) * 2
        shared = {f"{SHARED}{name}": owner for name, owner in sorted(self.shared.items())}
        weights = {f"{WEIGHTS}{name}": digests[name] for name in names if not is_unseen(name)}
        rest = [key for key in keys if not self._is_in_evidence(key)]
        columns_of = {key: self.columns(key.rpartition(".")[0]) for key in rest if key not in self.sums.small}
        with write_evidence(folder / EVIDENCE, parts, facts | shared | weights) as evidence:
            for key in parts:
                name, _, what = key.rpartition(".")
                part = self._part(name, f".{what}")
                assert part is not None
                evidence.write(key, part.float().cpu())
                written = f"{name}.{BETWEEN if f'.{what}' == OUTPUTS else INPUTS}"
                if self._is_in_evidence(written):
                    self.sums.release(written)
        tensors = {key: self.sums.get(key) for key in rest if key in self.sums.small}
        shapes: dict[str, tuple[int, ...]] = {key: (columns_of[key],) * 2 for key in rest if key not in tensors}
        shapes |= {key: tuple(part.shape) for key, part in tensors.items() if part is not None}
        promises = [Promise(key, shapes[key], None, torch.float32) for key in rest]
        with write_tensors(folder / STATISTICS, promises, metadata=facts) as writer:
            for key in rest:
                part = self.sums.get(key)
                assert part is not None
                writer.write(key, part.float().cpu())

    def _part(self, name: str, what: str) -> Tensor | None:
        if what == OUTPUTS:  # all of it, however few tokens it is of yet
            return self.sums.get(f"{name}.{BETWEEN}")
        return self.hessian(name) if what == HESSIAN else self.moments(name)

    def columns(self, name: str) -> int:
        """The columns of a weight, from the sums of its inputs or of what it looks up."""
        lookup = self.sums.small.get(f"{name}.{LOOKUP}")
        if lookup is not None:
            return len(lookup)
        return self.sums.parts[f"{name}.{INPUTS}"][0].shape[-1]

    def _is_in_evidence(self, key: str) -> bool:
        """Whether a sum is in evidence.safetensors as it is: outputs, and inputs of what is not looked up too."""
        name, _, what = key.rpartition(".")
        return what == BETWEEN or (what == INPUTS and f"{name}.{COUNTS}" not in self.sums)

    @classmethod
    def load(cls, folder: Path, fingerprint: Mapping[str, str]) -> InputStatistics:
        """Read statistics; those of another model, text or version are refused by what differs."""
        with EvidenceFile(folder / EVIDENCE) as evidence, open_tensors(folder / STATISTICS) as rest:
            facts: Mapping[str, str] = rest.metadata
            for part, value in fingerprint.items():
                if facts.get(f"fingerprint.{part}") != value:
                    raise EvidenceFileError(
                        f"{folder}: its statistics are of another model or run: {part} differs; give another folder, "
                        f"or {how_to_begin_again(folder)}"
                    )
            if any(evidence.metadata.get(key) != value for key, value in facts.items()):
                raise EvidenceFileError(
                    f"{folder}: {EVIDENCE} and {STATISTICS} are of two runs; {how_to_begin_again(folder)}"
                )
            sums, places = SumFiles(), {name: _places_in(folder / name) for name in (EVIDENCE, STATISTICS)}
            for key, spec in rest.specs.items():
                if len(spec.shape) == 2:
                    sums.parts[key] = [places[STATISTICS][key]]
                else:
                    sums.small[key] = rest.read_float(key)
            shared = {
                key.removeprefix(SHARED): owner for key, owner in evidence.metadata.items() if key.startswith(SHARED)
            }
            for name in evidence.names - shared.keys():
                if f"{name}.{COUNTS}" not in sums:
                    sums.parts[f"{name}.{INPUTS}"] = [places[EVIDENCE][f"{name}{HESSIAN}"]]
            for name in evidence.names:
                if evidence.has_outputs(name):
                    sums.parts[f"{name}.{BETWEEN}"] = [places[EVIDENCE][f"{name}{OUTPUTS}"]]
        return cls(sums, shared, int(facts["tokens"]), int(facts["gradient_tokens"]), int(facts["windows"]))


def how_to_begin_again(folder: Path) -> str:
    """What lets a search begin again in a folder."""
    return f"remove {folder} to begin again"


def _places_in(path: Path) -> dict[str, StoredTensor]:
    with closing(SafetensorsFile(path)) as file:
        return {
            name: StoredTensor(path, entry.start, tuple(entry.shape), entry.torch_dtype)
            for name, entry in file.tensors.items()
        }
