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

Gathered a few windows at a time. Forward, each block's inputs are summed up and go to a file; for the first windows
what every block got goes to another, and on the way back each block runs again, alone, with gradients: of the whole
model no graph is ever in memory. How much the loss minds outputs is taken from fewer tokens than how inputs vary
together: a pass back costs twice a pass forward. Files of a running search are raw bytes in a scratch folder: they
are as large as the model, so they are written and read at the speed of memory, without a header, without waiting for
the disk, and where a GPU computes through page-locked memory, while the GPU goes on.

An expert of a stack is a linear layer for the tokens that are sent to it, watched at the product with its slice:

    inputs      sum of x x^T over the tokens that it got
    gradient    mean of g^2 over these tokens, times all tokens: the damage of an expert counts by how many it gets

An expert that few tokens were sent to is given some of what all experts of its layer got. Those that got none have
that alone: one matrix for all of them, under `unseen_name` of their stack. Rounded by it, an expert has a quarter of
the error that rounding to nearest has, or as much at worst (docs/log.md).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bitplan.base.errors import FileFormatError
from bitplan.files.input_statistics import (
    HESSIAN,
    MOMENTS,
    OUTPUTS,
    SHARED,
    TOKENS_PER_OUTPUT,
    WEIGHTS,
    EvidenceFile,
    weight_digest,
    write_evidence,
)
from bitplan.files.open_files import open_tensors, write_tensors
from bitplan.files.safetensors import SafetensorsFile
from bitplan.files.tensor_file import TensorSpec
from bitplan.plan.names import listed
from bitplan.searching.blocks import BACK, BATCH, LOGITS_AT_ONCE, TokenStates, equal_lengths
from bitplan.searching.goal import EvidenceFileError, SearchError

if TYPE_CHECKING:
    from bitplan.searching.searched_model import ExpertSlice, SearchSubject

FEWEST_TOKENS = 256  # an expert that got fewer is taken to have got so many, the rest of them like those of all


_UNSEEN = "[unseen]"
_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


def unseen_name(stack: str) -> str:
    """The name under which statistics are kept that experts of a stack share if no token was sent to them."""
    return stack + _UNSEEN


def is_unseen(owner: str) -> bool:
    """Whether statistics of this name are those of experts to which no token was sent."""
    return owner.endswith(_UNSEEN)


# Called with a stack's name, the expert's number, the inputs [tokens, K] and the outputs [tokens, N] of a product.
OnProduct = Callable[[str, int, Tensor, Tensor], None]


class WatchedProducts(TorchFunctionMode):
    """A context that calls `on_product` for every product with an expert of one of the stacks."""

    def __init__(self, stacks: Mapping[str, Tensor], on_product: OnProduct) -> None:
        super().__init__()
        self._stacks = {stack.untyped_storage().data_ptr(): (name, stack) for name, stack in stacks.items()}
        self._on_product = on_product

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        product = func(*args, **(kwargs or {}))
        if (func is nn.functional.linear or func in _MATMULS) and len(args) > 1:
            weight = args[1]
            name, stack = self._stacks.get(weight.untyped_storage().data_ptr(), ("", weight))
            if name and weight.shape == stack.shape[1:]:
                self._on_product(name, weight.storage_offset() // stack[0].numel(), args[0], product)
        return product


@contextmanager
def one_by_one(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which transformers' modules of experts multiply with one expert after the other."""
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    before = [(config, getattr(config, "_experts_implementation", None)) for config in configs.values()]
    try:
        for config, _ in before:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, chosen in before:
            config._experts_implementation = chosen


class RoutedTokens:
    """How many tokens each expert of the stacks of a block got."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}

    def add(self, stack: str, expert: int, tokens: int) -> None:
        self._counts[stack, expert] = self._counts.get((stack, expert), 0) + tokens

    def complete_inputs(self, slices: Sequence[ExpertSlice], sums: dict[str, Tensor], key: str) -> None:
        """Give experts that got few tokens some of what all got together; `sums` has NAME.key of those that got any.

        Those that got none share one sum.
        """
        for stack, owners in _stacks_of(slices).items():
            with_sums = [expert for expert in owners if f"{expert.name}.{key}" in sums]
            if not with_sums or all(self._of(expert) >= FEWEST_TOKENS for expert in owners):
                continue
            pooled, got = _added_up(sums[f"{expert.name}.{key}"] for expert in with_sums), sum(map(self._of, with_sums))
            for expert in with_sums:
                missing = FEWEST_TOKENS - self._of(expert)
                if missing > 0:
                    sums[f"{expert.name}.{key}"] += pooled * (missing / got)
            if len(with_sums) < len(owners):
                sums[f"{unseen_name(stack)}.{key}"] = pooled * (FEWEST_TOKENS / got)

    def complete_gradients(self, slices: Sequence[ExpertSlice], sums: dict[str, Tensor], key: str, tokens: int) -> None:
        """Scale each expert's sums to all tokens; an expert without any gets the mean over all experts."""
        for owners in _stacks_of(slices).values():
            for part in {expert.rows.start for expert in owners}:
                same_rows = [expert for expert in owners if expert.rows.start == part]
                with_sums = [expert for expert in same_rows if f"{expert.name}.{key}" in sums]
                if not with_sums:
                    continue
                mean = _added_up(sums[f"{expert.name}.{key}"] for expert in with_sums) / sum(map(self._of, with_sums))
                for expert in same_rows:
                    name = f"{expert.name}.{key}"
                    sums[name] = (sums[name] / self._of(expert) if name in sums else mean) * tokens

    def clear(self) -> None:
        self._counts.clear()

    def _of(self, expert: ExpertSlice) -> int:
        return self._counts.get((expert.stack, expert.expert), 0)


def _added_up(parts: Iterable[Tensor]) -> Tensor:
    """Add tensors up one after the other: together they may be as large as a block."""
    first, *others = parts
    total = first.clone()
    for part in others:
        total += part
    return total


def _stacks_of(slices: Sequence[ExpertSlice]) -> dict[str, list[ExpertSlice]]:
    slices_of_stack: dict[str, list[ExpertSlice]] = {}
    for expert in slices:
        slices_of_stack.setdefault(expert.stack, []).append(expert)
    return slices_of_stack


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file; `written` is the work that puts it there, if it may not be done yet."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    written: Future[None] | None = field(default=None, repr=False, compare=False)

    def read(self) -> Tensor:
        """A fresh tensor in memory; page-locked where this process uses a GPU."""
        self.wait()
        nbytes, done = math.prod(self.shape) * self.dtype.itemsize, 0
        buffer = torch.empty(
            nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available() and torch.cuda.is_initialized()
        )
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
        """Wait until it is written; a full disk raises its error here."""
        if self.written is not None:
            self.written.result()


class ScratchWriter:
    """Writes files of tensors, those of a GPU in the background: one file at a time, so that little waits in memory."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
        """Write tensors, at once or on a thread, and say where each will lie."""
        if self._last is not None:
            self._last.result()
        on_host = {key: _on_host(tensor.detach()) for key, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="bitplan-search-writes")
            self._last = self._pool.submit(_write, path, list(on_host.values()))
        else:
            _write(path, list(on_host.values()))
        stored_tensors, start = {}, 0
        for key, tensor in on_host.items():
            stored_tensors[key] = StoredTensor(path, start, tuple(tensor.shape), tensor.dtype, self._last)
            start += tensor.nbytes
        return stored_tensors

    def close(self) -> None:
        """Wait until everything is written."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _write(path: Path, tensors: list[Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            view, done = tensor.reshape(-1).view(torch.uint8).numpy().data, 0
            while done < len(view):
                done += file.write(view[done:])


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.cpu().contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


EVIDENCE, STATISTICS = "evidence.safetensors", "statistics.safetensors"
INPUTS, GRADIENT, WEIGHED, COUNTS, LOOKUP = "inputs", "gradient", "weighed_squares", "counts", "lookup_gradient"
TINY = 1e-30  # of a column that no token used
MOST_RATIO = 1e3
BETWEEN = OUTPUTS.removeprefix(".")


class LastMatrix(threading.local):
    """A thread's cache of one matrix: formats of one weight follow each other and ask for the same again."""

    key: object = None
    matrix: Tensor | None = None

    def remember(self, key: object, matrix: Tensor) -> Tensor:
        self.key, self.matrix = key, matrix
        return matrix


@dataclass
class SumFiles:
    """Sums by name, some in memory; of others parts lie in files and are added up when they are asked for."""

    small: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, list[StoredTensor]] = field(default_factory=dict)
    scratch: set[Path] = field(default_factory=set)  # files of parts that nobody else reads
    _last: LastMatrix = field(default_factory=LastMatrix, repr=False)

    def get(self, key: str) -> Tensor | None:
        if key not in self.parts:
            return self.small.get(key)
        remembered = self._last.matrix if self._last.key == key else None
        return self._last.remember(key, self._read(key)) if remembered is None else remembered

    def _read(self, key: str) -> Tensor:
        total: Tensor | None = None
        for stored in self.parts[key]:
            part = stored.read()
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def release(self, key: str) -> None:
        """Forget a sum that was saved elsewhere, and delete files of parts that no other sum needs."""
        stored_parts = self.parts.pop(key, [])
        paths_in_use = {stored.path for parts in self.parts.values() for stored in parts}
        for path in {stored.path for stored in stored_parts}:
            if path in self.scratch and path not in paths_in_use:
                path.unlink()

    def __contains__(self, key: str) -> bool:
        return key in self.small or key in self.parts

    def names(self) -> list[str]:
        return sorted({*self.small, *self.parts})

    def add(self, small: Mapping[str, Tensor], files: Mapping[str, StoredTensor]) -> None:
        """Add the sums of more windows: `small` in memory, those of `files` as further parts."""
        for key, part in small.items():
            self.small[key] = self.small[key] + part.cpu() if key in self.small else part.cpu()
        self._last = LastMatrix()
        self.scratch |= {stored.path for stored in files.values()}
        for key, stored in files.items():
            self.parts.setdefault(key, []).append(stored)


class ShareSums(NamedTuple):
    """The sums that one share of the text windows adds to the statistics; its matrices are passed separately."""

    small: Mapping[str, Tensor]
    shared: Mapping[str, str]
    experts: Sequence[tuple[str, Sequence[str]]]  # a stack, and the weights of an expert that read one input
    of: WindowShare


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

    def mean(self, name: str, quantity: str, device: torch.device | None = None) -> Tensor | None:
        """The mean over tokens, None where the weight has no such part; the last matrix is remembered."""
        owner = self.shared.get(name, name) if quantity == INPUTS else name
        tokens = self.gradient_tokens if quantity in (GRADIENT, LOOKUP) else self.tokens
        key = f"{owner}.{quantity}", tokens, device
        if self._mean.matrix is not None and self._mean.key == key:
            return self._mean.matrix
        total = self.sums.get(key[0])
        if total is None or not tokens:
            return None
        mean = (total if device is None else total.to(device)) / tokens
        return self._mean.remember(key, mean) if quantity == INPUTS else mean

    def column_steps(self, name: str, inputs: Tensor) -> Tensor | None:
        """Return what columns of `inputs`, A, are multiplied by on both sides, [K], so that its diagonal is `weighed`.

        Inputs that are large for a token that the loss does not mind would otherwise count as much as others. None
        where the weight has no such part: an expert's.
        """
        squares, gradient = self.sums.get(f"{name}.{WEIGHED}"), self.sums.get(f"{name}.{GRADIENT}")
        if squares is None or gradient is None or not float(gradient.sum()) > 0:
            return None
        ratio = squares.to(inputs.device) / float(gradient.sum()) / inputs.diagonal().clamp_min(TINY)
        return ratio.clamp(0, MOST_RATIO).sqrt()

    def add(self, share_sums: ShareSums, files: Mapping[str, StoredTensor]) -> None:
        """Add what the next windows gave; its matrices lie in `files`."""
        self.sums.add(share_sums.small, files)
        owners = dict(share_sums.shared)
        for stack, (first, *others) in share_sums.experts:
            is_seen = f"{first}.{INPUTS}" in self.sums
            owner = first if is_seen else unseen_name(stack)
            owners |= dict.fromkeys(others if is_seen else [first, *others], owner)
        self.share(owners)
        self.tokens += share_sums.of.tokens
        self.gradient_tokens += share_sums.of.gradient_tokens
        self.windows += len(share_sums.of.windows) if INPUTS in share_sums.of.takes else 0

    def share(self, owners: Mapping[str, str]) -> None:
        """Note which weights have another's inputs; one that has got inputs of its own keeps these."""
        weights_with_sums = {name for name in self.shared if f"{name}.{INPUTS}" in self.sums}
        self.shared = {name: owner for name, owner in self.shared.items() if name not in weights_with_sums}
        self.shared |= owners

    @property
    def unseen(self) -> list[str]:
        """Experts' weights to which no token of the text was sent."""
        return [name for name, owner in self.shared.items() if is_unseen(owner)]

    def owner(self, name: str) -> str:
        """The name of the weight whose matrix of inputs this weight shares; its own if it has one."""
        return name if f"{name}.{LOOKUP}" in self.sums else self.shared.get(name, name)

    def hessian(self, name: str) -> Tensor | None:
        """What rounding minimises, [K, K] in any unit, for all uses of a weight together; None if no layer uses it."""
        owner = self.shared.get(name, name)
        inputs, gradient = self.sums.get(f"{owner}.{INPUTS}"), self.sums.get(f"{name}.{GRADIENT}")
        lookup, counts = self.sums.get(f"{name}.{LOOKUP}"), self.sums.get(f"{name}.{COUNTS}")
        if inputs is None or gradient is None or lookup is None or counts is None:
            return inputs
        # Tied: a row counts by the gradient of its logit, and by how often it is looked up; of both, the mean row.
        return inputs * float(gradient.mean()) + torch.diag(lookup) * (self.tokens / len(counts))

    def outputs(self, name: str) -> Tensor | None:
        """How much the loss minds changes of outputs together, [N, N] in any unit; None where that is not known."""
        squares = self.sums.get(f"{name}.{BETWEEN}")
        return squares if squares is not None and self.gradient_tokens >= TOKENS_PER_OUTPUT * len(squares) else None

    def moments(self, name: str) -> Tensor | None:
        """How much each column of an embedding counts, [K] in any unit; None for weights of layers."""
        is_input = f"{self.shared.get(name, name)}.{INPUTS}" in self.sums
        return None if is_input else self.sums.get(f"{name}.{LOOKUP}")

    def save(self, folder: Path, fingerprint: Mapping[str, str], digests: Mapping[str, str]) -> None:
        """Write evidence.safetensors, with which quantizing rounds, and all other sums as statistics.safetensors.

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
                name, _, quantity = key.rpartition(".")
                part = self._part(name, f".{quantity}")
                assert part is not None
                evidence.write(key, part.float().cpu())
                written = f"{name}.{BETWEEN if f'.{quantity}' == OUTPUTS else INPUTS}"
                if self._is_in_evidence(written):
                    self.sums.release(written)
        tensors = {key: self.sums.get(key) for key in rest if key in self.sums.small}
        shapes: dict[str, tuple[int, ...]] = {key: (columns_of[key],) * 2 for key in rest if key not in tensors}
        shapes |= {key: tuple(part.shape) for key, part in tensors.items() if part is not None}
        promises = [TensorSpec.of(key, shapes[key], None, torch.float32) for key in rest]
        with write_tensors(folder / STATISTICS, promises, metadata=facts) as writer:
            for key in rest:
                part = self.sums.get(key)
                assert part is not None
                writer.write(key, part.float().cpu())

    def _part(self, name: str, quantity: str) -> Tensor | None:
        if quantity == OUTPUTS:  # all of it, however few tokens it is of yet
            return self.sums.get(f"{name}.{BETWEEN}")
        return self.hessian(name) if quantity == HESSIAN else self.moments(name)

    def columns(self, name: str) -> int:
        """The columns of a weight, from the sums of its inputs or of what it looks up."""
        lookup = self.sums.small.get(f"{name}.{LOOKUP}")
        if lookup is not None:
            return len(lookup)
        return self.sums.parts[f"{name}.{INPUTS}"][0].shape[-1]

    def _is_in_evidence(self, key: str) -> bool:
        """Whether a sum is in evidence.safetensors as it is: outputs, and inputs of what is not looked up too."""
        name, _, quantity = key.rpartition(".")
        return quantity == BETWEEN or (quantity == INPUTS and f"{name}.{COUNTS}" not in self.sums)

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
            sums, stored_in = SumFiles(), {name: _places_in(folder / name) for name in (EVIDENCE, STATISTICS)}
            for key, spec in rest.specs.items():
                if len(spec.shape) == 2:
                    sums.parts[key] = [stored_in[STATISTICS][key]]
                else:
                    sums.small[key] = rest.read_float(key)
            shared = {
                key.removeprefix(SHARED): owner for key, owner in evidence.metadata.items() if key.startswith(SHARED)
            }
            for name in evidence.names - shared.keys():
                if f"{name}.{COUNTS}" not in sums:
                    sums.parts[f"{name}.{INPUTS}"] = [stored_in[EVIDENCE][f"{name}{HESSIAN}"]]
            for name in evidence.names:
                if evidence.has_outputs(name):
                    sums.parts[f"{name}.{BETWEEN}"] = [stored_in[EVIDENCE][f"{name}{OUTPUTS}"]]
        return cls(sums, shared, int(facts["tokens"]), int(facts["gradient_tokens"]), int(facts["windows"]))


def how_to_begin_again(folder: Path) -> str:
    """The sentence for error messages that tells a user how to restart a search in `folder`."""
    return f"remove {folder} to begin again"


def _places_in(path: Path) -> dict[str, StoredTensor]:
    with closing(SafetensorsFile(path)) as file:
        return {
            name: StoredTensor(path, entry.start, tuple(entry.shape), entry.torch_dtype)
            for name, entry in file.tensors.items()
        }


# ---- passes ----------------------------------------------------------------------------------------------------------

AT_ONCE = 16384  # tokens between two saves: statistics are as large as the model, and a save writes them all
GRADIENT_TOKENS = 16384  # gradients are of the first so many
MOST_OUTPUTS = GRADIENT_TOKENS // TOKENS_PER_OUTPUT  # of a layer whose outputs' gradients are taken together
SEED = 0
MOST_STRIPS, FEWEST_COLUMNS = 6, 192  # of a symmetric product, which strip by strip is little more than half the work
RUN = 256  # tokens of the vocabulary whose probabilities are added up first, to draw one
_MATRICES = (f".{INPUTS}", f".{BETWEEN}")


def add_windows(
    subject: SearchSubject,
    windows: Sequence[Tensor],
    into: InputStatistics,
    scratch: Path,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Add the next few windows that `into` has not seen; files of their sums go to `scratch`.

    `into` changes when all is done: an interrupted call leaves no trace.
    """
    share = shares_of(windows, into.windows)[0]
    into.add(*sums_of_share(subject, share, scratch, on_step or (lambda _count: None)))


@dataclass(frozen=True)
class WindowShare:
    """Neighbouring windows whose sums are taken together: shares are added up one after the other.

    first   which window of the text is the first of them
    takes   inputs, gradients or both
    """

    windows: Sequence[Tensor]
    first: int
    takes: tuple[str, ...] = (INPUTS, GRADIENT)

    @property
    def watched(self) -> int:
        """How many windows of the share are run backward, so that their gradients count."""
        return _count(self.windows, GRADIENT_TOKENS) if self.first == 0 else 0

    def divided(self) -> list[WindowShare]:
        """Inputs and gradients apart: the same sums, and each token goes forward once more for its gradients."""
        takes = (GRADIENT, INPUTS) if self.watched else (INPUTS,)  # what takes longer first
        return [replace(self, takes=(quantity,)) for quantity in takes]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows)) if INPUTS in self.takes else 0

    @property
    def gradient_tokens(self) -> int:
        return sum(map(len, self.windows[: self.watched])) if GRADIENT in self.takes else 0


def shares_of(windows: Sequence[Tensor], done: int) -> list[WindowShare]:
    """Divide the windows after the first `done` into shares of a few each."""
    shares = []
    while done < len(windows):
        count = _count(windows[done:], AT_ONCE)
        shares.append(WindowShare(windows[done : done + count], done))
        done += count
    return shares


def sums_of_share(
    subject: SearchSubject, share: WindowShare, scratch: Path, on_step: Callable[[int], None] = lambda _count: None
) -> tuple[ShareSums, Mapping[str, StoredTensor]]:
    """Compute the sums over one share of the text windows; the caller adds those of all shares.

    Returned are the small sums, and by name the matrices, which lie in files in the folder `scratch`.
    """
    passes = _Passes(subject, share, scratch, on_step)
    return passes.run(), passes.files


def steps_of(subject: SearchSubject, windows: Sequence[Tensor], done: int) -> int:
    """How many steps `on_step` will count for the windows after the first `done`."""
    return sum(steps_of_share(subject, share) for share in shares_of(windows, done))


def steps_of_share(subject: SearchSubject, share: WindowShare) -> int:
    """Count what `on_step` is called with for one share of the windows."""
    steps_a_module = (INPUTS in share.takes) + BACK * (GRADIENT in share.takes and share.first == 0)
    return (len(subject.runner.blocks) + 1) * steps_a_module


def _count(windows: Sequence[Tensor], most: int) -> int:
    """How many of the windows have up to so many tokens; one at least."""
    total = list(accumulate(map(len, windows)))
    return max(1, sum(tokens <= most for tokens in total))


class _Passes:
    def __init__(
        self,
        subject: SearchSubject,
        share: WindowShare,
        scratch: Path,
        on_step: Callable[[int], None],
    ) -> None:
        self._subject, self._runner, self._share = subject, subject.runner, share
        self._windows, self._first, self._scratch, self._on_step = share.windows, share.first, scratch, on_step
        self._watched, self._takes_inputs = share.watched, INPUTS in share.takes
        self._goes_back = self._watched > 0 and GRADIENT in share.takes
        self._row_ordered = _in_the_order_of_the_file(subject) if self._goes_back else set()
        self._sums: dict[str, Tensor] = {}
        self.files: dict[str, StoredTensor] = {}
        self._states: dict[int, list[StoredTensor]] = {}
        self._writer = ScratchWriter()
        self._shared: dict[str, str] = {}
        self._experts_read: list[tuple[str, list[str]]] = []
        self._routed = RoutedTokens()
        self._experts_of = _experts_by_block(subject)
        self._last: tuple[Tensor, str] | None = None

    def run(self) -> ShareSums:
        size = max(1, BATCH // len(self._windows[0]))
        with_gradients = equal_lengths(self._windows[: self._watched], size)
        others = equal_lengths(self._windows[self._watched :], size) if self._takes_inputs else []
        batches = with_gradients + others
        runner = self._runner
        with _frozen(runner.model), closing(self._writer), runner.fewer_threads():
            with torch.no_grad(), runner.outside(), self._hooks(None, counts=self._takes_inputs):
                states = [runner.enter(ids) for ids in batches]
            for index in range(len(runner.blocks)):
                if self._goes_back:
                    self._write_states(index, states[: len(with_gradients)])
                with torch.no_grad(), runner.block_weights(index), self._hooks(index, inputs=self._takes_inputs):
                    states = [runner.run_block(index, state) for state in states]
                if self._takes_inputs:
                    self._complete_experts(self._slices(index))
                self._routed.clear()
                self._flush()
                self._on_step(int(self._takes_inputs))
            gradients = self._leave(states)
            self._flush()
            self._on_step(int(self._takes_inputs))
            if self._goes_back:
                self._back(with_gradients, states, gradients)
        small = {key: total.cpu() for key, total in self._sums.items()}
        return ShareSums(small, self._shared, self._experts_read, self._share)

    def _leave(self, states: Sequence[TokenStates]) -> list[Tensor]:
        """Run norm and head; returns the gradients of the loss by the last block's states."""
        gradients_of_states, at = [], self._first
        blockless = not self._runner.blocks
        for state in states:
            gradients = []
            for row in range(len(state.ids)):  # a window or less at a time: logits of a large vocabulary are large
                hidden, watched = None, at - self._first < self._watched
                if state.hidden is not None:
                    hidden = state.hidden[row : row + 1].detach().requires_grad_(watched)
                window = TokenStates(state.ids[row : row + 1], hidden)
                inputs = self._takes_inputs
                hooks = {"inputs": inputs, "gradients": watched, "counts": blockless and inputs}
                hooks["lookups"] = blockless and watched
                draws = torch.Generator(self._runner.device).manual_seed(SEED + at)
                with self._runner.outside(), torch.set_grad_enabled(watched), self._hooks(None, **hooks):
                    for piece in window.pieces(max(1, LOGITS_AT_ONCE // self._runner.vocabulary)):
                        logits = self._runner.leave(piece)
                        self._require_finite(logits, at)
                        if watched and self._goes_back:
                            torch.autograd.backward(logits, self._gradient(logits, draws))
                at += 1
                if hidden is not None and hidden.grad is not None:
                    gradients.append(hidden.grad)
            if gradients:
                gradients_of_states.append(torch.cat(gradients))
        return gradients_of_states

    def _back(self, batches: Sequence[Tensor], states: Sequence[TokenStates], gradients: list[Tensor]) -> None:
        """Run each block once more, from the last to the first, with the gradient of what it gave."""
        runner = self._runner
        for index in reversed(range(len(runner.blocks))):
            with torch.enable_grad(), runner.block_weights(index), self._hooks(index, gradients=True):
                for at, hidden in enumerate(self._read_states(index)):
                    hidden.requires_grad_()
                    output = runner.run_block(index, replace(states[at], hidden=hidden)).hidden
                    assert output is not None
                    torch.autograd.backward(output, gradients[at])
                    assert hidden.grad is not None
                    gradients[at] = hidden.grad
            tokens = sum(map(len, self._windows[: self._watched]))
            self._routed.complete_gradients(self._slices(index), self._sums, GRADIENT, tokens)
            self._routed.clear()
            self._flush()
            self._on_step(BACK)
        if runner.blocks:
            with torch.enable_grad(), runner.outside(), self._hooks(None, lookups=True):
                for at, ids in enumerate(batches):
                    entered = runner.enter(ids).hidden
                    if entered is not None and entered.requires_grad:
                        torch.autograd.backward(entered, gradients[at])
        self._on_step(BACK)

    def _write_states(self, block: int, states: Sequence[TokenStates]) -> None:
        """Write a block's inputs to a file: those of all blocks together are too large for memory."""
        if states:
            hidden = {str(at): _hidden(state) for at, state in enumerate(states)}
            self._states[block] = list(self._writer.write(self._scratch / f"states-{block}", hidden).values())

    def _read_states(self, block: int) -> Iterator[Tensor]:
        stored = self._states.pop(block)
        for stored_state in stored:
            yield stored_state.read().to(self._runner.device)
        stored[0].path.unlink()

    def _gradient(self, logits: Tensor, draws: torch.Generator) -> Tensor:
        """The gradient of the loss for tokens drawn from the model itself, by the logits: probabilities, less one."""
        gradient = torch.softmax(logits.detach()[0].float(), -1)
        drawn = draw_tokens(gradient, draws)
        gradient.scatter_add_(-1, drawn, torch.full_like(drawn, -1, dtype=gradient.dtype))
        return gradient[None].to(logits.dtype)

    def _require_finite(self, logits: Tensor, window: int) -> None:
        if not bool(torch.stack(torch.aminmax(logits)).isfinite().all()):  # of NaN it gives NaN
            broken = self._subject.not_finite()
            cause = (
                f"its weights have some in {listed(broken, 4)}" if broken else "its weights are finite, it overflows"
            )
            raise SearchError(
                f"{self._subject.where}: the model gives NaN or infinity in window {window} of the text: {cause}; "
                "give a model that gives finite numbers"
            )

    # ---- hooks and sums ----------------------------------------------------------------------------------------------

    @contextmanager
    def _hooks(
        self,
        block: int | None,
        *,
        inputs: bool = False,
        gradients: bool = False,
        counts: bool = False,
        lookups: bool = False,
    ) -> Iterator[None]:
        """A context in which the layers of one block are watched; with None those outside of blocks."""
        inside = {id(module): at for at, block in enumerate(self._runner.blocks) for module in block.modules()}
        handles = []
        try:
            if lookups:
                for module in self._runner.model.modules():
                    if isinstance(module, nn.Embedding):  # where the graph of activations begins
                        handles.append(module.register_forward_hook(_require_gradient))
            for site in self._subject.sites.values():
                for linear in site.linears:
                    if inside.get(id(linear)) == block and (inputs or gradients):
                        handles.append(linear.register_forward_hook(self._linear(site.name, inputs, gradients)))
                for embedding in site.embeddings:
                    if inside.get(id(embedding)) == block and (counts or lookups):
                        handles.append(embedding.register_forward_hook(self._embedding(site.name, counts, lookups)))
            with self._experts(block, inputs, gradients):
                yield
        finally:
            self._last = None
            for handle in handles:
                handle.remove()

    def _slices(self, block: int | None) -> list[ExpertSlice]:
        """Experts of a block whose layer keeps them as one tensor."""
        return [] if block is None else self._experts_of.get(block, [])

    @contextmanager
    def _experts(self, block: int | None, inputs: bool, gradients: bool) -> Iterator[None]:
        slices = self._slices(block) if inputs or gradients else []
        if not slices:
            yield
            return
        model = self._runner.model
        modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in {expert.stack for expert in slices}}
        stacks = {name: module.get_parameter(name.rpartition(".")[2]) for name, module in modules.items()}

        by_expert = _by_expert(slices)

        def on_product(stack: str, expert: int, x: Tensor, output: Tensor) -> None:
            expert_slices = by_expert.get((stack, expert), [])
            self._routed.add(stack, expert, len(x))
            if inputs and expert_slices:
                self._add_squares(f"{expert_slices[0].name}.{INPUTS}", x)
            if gradients and output.requires_grad:
                output.register_hook(lambda gradient: self._add_gradients(expert_slices, gradient))

        with one_by_one(list(modules.values())), WatchedProducts(stacks, on_product):
            yield

    def _complete_experts(self, slices: Sequence[ExpertSlice]) -> None:
        """Complete the inputs of experts that got few tokens, and note which weights share inputs."""
        experts = _by_expert(slices).values()
        owners = [expert_slices[0] for expert_slices in experts]
        self._require_products(owners)
        self._routed.complete_inputs(owners, self._sums, INPUTS)
        self._experts_read += [(weights[0].stack, [expert.name for expert in weights]) for weights in experts]

    def _require_products(self, owners: Sequence[ExpertSlice]) -> None:
        """Raise where a stack's experts were multiplied unseen: they would be taken to do no damage."""
        stacks_with_sums = {owner.stack for owner in owners if f"{owner.name}.{INPUTS}" in self._sums}
        unseen = [owner for owner in owners if owner.stack not in stacks_with_sums]
        if unseen:
            raise SearchError(
                f"{self._subject.where}: {unseen[0].stack}: no product with an expert of it was seen, so nothing is "
                "known of its inputs; leave it as it is",
                settings={"keep": unseen[0].stack},
            )

    def _add_gradients(self, slices: Sequence[ExpertSlice], gradient: Tensor) -> None:
        squares = gradient.detach().float().square().sum(0)
        for expert in slices:
            self._add(f"{expert.name}.{GRADIENT}", squares[expert.rows].clone())

    def _linear(self, name: str, inputs: bool, gradients: bool) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_module: nn.Module, args: Any, output: Tensor) -> None:
            if inputs and self._last is not None and self._last[0] is args[0]:
                self._shared[name] = self._last[1]
            elif inputs:
                self._last = (args[0], name)
                self._add_squares(f"{name}.{INPUTS}", args[0])
            if gradients:
                self._watch(output, f"{name}.{GRADIENT}", args[0])
                if name in self._row_ordered and output.shape[-1] <= MOST_OUTPUTS:
                    self._watch(output, f"{name}.{BETWEEN}")

        return hook

    def _embedding(self, name: str, counts: bool, lookups: bool) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            if counts:
                token_counts = torch.bincount(args[0].reshape(-1), minlength=module.num_embeddings)
                self._add(f"{name}.{COUNTS}", token_counts.float())
            if lookups:
                self._watch(output, f"{name}.{LOOKUP}")

        return hook

    def _watch(self, output: Tensor, key: str, inputs: Tensor | None = None) -> None:
        """Add up, in backward, squares of an output's gradients, and of `inputs` weighted by their token's."""

        def hook(gradient: Tensor) -> None:
            if key.endswith(f".{BETWEEN}"):
                self._add_squares(key, gradient)
                return
            squares = gradient.detach().reshape(-1, gradient.shape[-1]).float().square()
            self._add(key, squares.sum(0))
            if inputs is not None:
                input_rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
                self._add(f"{key.rpartition('.')[0]}.{WEIGHED}", squares.sum(1) @ input_rows.square())

        if output.requires_grad:
            output.register_hook(hook)

    def _add(self, key: str, part: Tensor) -> None:
        self._sums[key] = self._sums[key].add_(part) if key in self._sums else part

    def _add_squares(self, key: str, vectors: Tensor) -> None:
        """Add products of all pairs of columns to a sum, in place: it may be the largest thing in memory."""
        rows = vectors.detach().reshape(-1, vectors.shape[-1]).float()
        if key not in self._sums:
            self._sums[key] = rows.new_zeros(rows.shape[1], rows.shape[1])
        add_upper_products(self._sums[key], rows)

    def _flush(self) -> None:
        """Write the matrices among the sums to a file: together they are as large as the model. Vectors stay."""
        large = {key: mirror(self._sums.pop(key)) for key in list(self._sums) if key.endswith(_MATRICES)}
        if not large:
            return
        path = self._scratch / f"sums-{self._first}-{len(self.files)}"
        self.files |= self._writer.write(path, large)


def draw_tokens(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token for each row of [T, V], [T, 1]: first a run of the vocabulary, then a token of it.

    torch's `multinomial` draws a random number for each probability, a tenth of the time of all statistics.
    """
    count = probabilities.shape[-1]
    runs = torch.nn.functional.pad(probabilities, (0, -count % RUN)).reshape(len(probabilities), -1, RUN)
    sums = runs.sum(-1).double().cumsum(-1)
    drawn = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device, generator=generator) * sums[:, -1:]
    run = torch.searchsorted(sums, drawn, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, run)
    inside = runs.gather(1, run.unsqueeze(-1).expand(-1, -1, RUN)).squeeze(1).double().cumsum(-1)
    position_in_run = torch.searchsorted(inside, drawn - before, right=True).clamp(max=RUN - 1)
    return (run * RUN + position_in_run).clamp(max=count - 1)


def add_upper_products(into: Tensor, rows: Tensor) -> None:
    """Add rows^T rows strip by strip, each from the diagonal to the right: the rest is the same again."""
    for strip in _strips(into):
        into[strip, strip.start :].addmm_(rows[:, strip].T, rows[:, strip.start :])


def mirror(upper: Tensor) -> Tensor:
    """Copy what is above the diagonal strips of a symmetric matrix below them, in place."""
    for strip in _strips(upper):
        upper[strip.stop :, strip] = upper[strip, strip.stop :].T
    return upper


def _strips(square: Tensor) -> list[slice]:
    count = max(1, min(MOST_STRIPS, len(square) // FEWEST_COLUMNS))
    step = -(-len(square) // count)
    return [slice(first, min(first + step, len(square))) for first in range(0, len(square), step)]


def _experts_by_block(subject: SearchSubject) -> dict[int, list[ExpertSlice]]:
    slices = [site.slice for site in subject.sites.values() if site.slice is not None]
    block = {stack: subject.runner.first_block([stack]) for stack in {expert.stack for expert in slices}}
    slices_of_block: dict[int, list[ExpertSlice]] = {}
    for expert in slices:
        slices_of_block.setdefault(block[expert.stack], []).append(expert)
    return slices_of_block


def _by_expert(slices: Sequence[ExpertSlice]) -> dict[tuple[str, int], list[ExpertSlice]]:
    """Group slices by (name of the stacked tensor, expert's number): weights of a group read the same input."""
    slices_of_expert: dict[tuple[str, int], list[ExpertSlice]] = {}
    for expert in slices:
        slices_of_expert.setdefault((expert.stack, expert.expert), []).append(expert)
    return slices_of_expert


def _hidden(states: TokenStates) -> Tensor:
    assert states.hidden is not None
    return states.hidden.detach()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """A context in which no gradients by weights are computed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _require_gradient(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_() if not output.requires_grad else output


def _in_the_order_of_the_file(subject: SearchSubject) -> set[str]:
    """Names of weights that only linear layers use and whose rows lie in memory in the order of the file.

    Loading a GGUF permutes the rows of some weights; these are found by their digests and left out.
    """
    layers = {name for name, site in subject.sites.items() if site.linears and not site.embeddings}
    if subject.path is None or subject.path.is_dir():
        return layers
    digests = subject.digests()
    return {name for name in layers if weight_digest(subject.weight(name)) == digests[name]}
