"""Files of statistics of the inputs that weights meet: what `quantize --evidence` and a search round with.

evidence.safetensors has, in float32, for a weight NAME of K columns

    NAME.moments    [K]     mean squares of its inputs
    NAME.hessian    [K, K]  X^T X of its inputs, in any unit
    NAME.outputs    [N, N]  second moments of the loss's gradients by its N outputs, in any unit; where they were taken

and the metadata {"bitplan": "evidence", "version": "1"}, further keys as the writer likes: a fingerprint of what was
measured. `shared.NAME` names the weight whose statistics NAME has: layers that read one input. `weights.NAME` is the
digest of the weight that was measured, by which another model's evidence is refused. Of a tensor that has all experts
of a layer, [experts, outputs, inputs], each is a weight: NAME[0], NAME[1], ... llama.cpp's imatrix.gguf is read as
well: it has moments alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bitplan.base.documents import show
from bitplan.base.errors import FileFormatError
from bitplan.files.safetensors import SafetensorsFile, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.files.tensor_bytes import PayloadWriter

KIND, VERSION = "evidence", "1"
MOMENTS, HESSIAN, OUTPUTS = ".moments", ".hessian", ".outputs"
SHARED, WEIGHTS = "shared.", "weights."
GRADIENT_TOKENS = "gradient_tokens"  # metadata: how many tokens the outputs' gradients are of
TOKENS_PER_OUTPUT = 24  # of fewer, gradients between outputs are more noise than knowledge (docs/log.md)
MOST_DIGESTED = 4096  # numbers of a weight that its digest is of


def expert_name(tensor: str, index: int) -> str:
    """The name of one expert's weight in a tensor that has those of all."""
    return f"{tensor}[{index}]"


def weight_digest(weight: Tensor) -> str:
    """A digest of numbers spread over a weight, seen in bfloat16: a copy in another type of float has the same."""
    import torch

    flat = weight.detach().reshape(-1)
    some = flat[:: flat.numel() // MOST_DIGESTED | 1].to("cpu", torch.bfloat16)  # an odd step keeps to no column
    digest = hashlib.blake2b(f"{tuple(weight.shape)}".encode(), digest_size=8)
    digest.update(some.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class EvidenceFile:
    """A file of statistics of weights' inputs (evidence.safetensors), read one weight at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = SafetensorsFile(self.path)
        try:
            self.metadata = self._file.metadata
            self._check()
        except BaseException:
            self._file.close()
            raise

    @property
    def names(self) -> set[str]:
        """Names of the weights that the file has statistics of."""
        return _owners(self._file.tensors) | self._shared.keys()

    def moments(self, name: str, expert: int | None = None) -> Tensor | None:
        """The mean squares [K] of a weight's inputs; `expert` picks one of several that share a name."""
        return self._read(name, MOMENTS)

    def hessian(self, name: str) -> Tensor | None:
        return self._read(name, HESSIAN)

    def outputs(self, name: str) -> Tensor | None:
        """Second moments [N, N] of the loss's gradients by a weight's outputs; None where tokens are too few."""
        if not self.has_outputs(name):
            return None
        tokens, count = self.metadata.get(GRADIENT_TOKENS, ""), self._file.tensors[name + OUTPUTS].shape[0]
        if tokens.isdecimal() and int(tokens) < TOKENS_PER_OUTPUT * count:
            return None
        return self._file.read(name + OUTPUTS)

    def has_outputs(self, name: str) -> bool:
        return name + OUTPUTS in self._file.tensors

    def digest(self, name: str) -> str | None:
        """The digest of the weight that was measured; None where the file does not say."""
        return self.metadata.get(WEIGHTS + name)

    def columns(self, name: str) -> int:
        """How many columns (inputs) the weight `name` had when its statistics were gathered."""
        owner = self._shared.get(name, name)
        key = owner + (HESSIAN if owner + HESSIAN in self._file.tensors else MOMENTS)
        return self._file.tensors[key].shape[-1]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, name: str, suffix: str) -> Tensor | None:
        key = self._shared.get(name, name) + suffix
        return self._file.read(key) if key in self._file.tensors else None

    def _check(self) -> None:
        kind, version = self.metadata.get("bitplan"), self.metadata.get("version")
        if (kind, version) != (KIND, VERSION):
            raise FileFormatError(
                f"{self.path}: expected statistics, a file with the metadata bitplan={KIND!r} and version={VERSION!r}, "
                f"got {kind!r:.80} and {version!r:.80}; `bitplan search` writes one"
            )
        for key, entry in self._file.tensors.items():
            square = key.endswith((HESSIAN, OUTPUTS)) and len(entry.shape) == 2 and entry.shape[0] == entry.shape[1]
            if not (square or (key.endswith(MOMENTS) and len(entry.shape) == 1)) or entry.dtype != "float32":
                raise FileFormatError(
                    f"{self.path}: {show(key)}: expected NAME{MOMENTS} of shape [K], NAME{HESSIAN} of shape [K, K] or "
                    f"NAME{OUTPUTS} of shape [N, N] in float32, got {entry.dtype} {entry.shape}"
                )
        self._shared = {
            key.removeprefix(SHARED): owner for key, owner in self.metadata.items() if key.startswith(SHARED)
        }
        owners = _owners(self._file.tensors)
        if lost := sorted(set(self._shared.values()) - owners):
            raise FileFormatError(f"{self.path}: {SHARED}NAME refers to {show(lost[0])}, which has no statistics there")


def _owners(keys: Iterable[str]) -> set[str]:
    """Names of the weights under which the file has statistics of inputs, from its tensors' names."""
    return {key.removesuffix(MOMENTS).removesuffix(HESSIAN) for key in keys if not key.endswith(OUTPUTS)}


def write_evidence(
    path: str | Path, shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str] | None = None
) -> AbstractContextManager[PayloadWriter]:
    """Write statistics, one tensor at a time: `shapes` has every NAME.moments and NAME.hessian that will come."""
    import torch

    entries = [(key, torch.float32, shape) for key, shape in shapes.items()]
    return write_safetensors(path, entries, {**(metadata or {}), "bitplan": KIND, "version": VERSION})
