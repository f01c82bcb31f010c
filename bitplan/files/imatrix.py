"""llama.cpp's imatrix.gguf: second moments of inputs, as llama-imatrix gathers and llama-quantize reads them.

For each weight NAME, NAME.in_sum2 [experts, K] has sums of squares of its inputs, NAME.counts [experts, 1] how many
inputs were added up. The names are those of the model's GGUF file; `gguf_names` gives them for Hugging Face's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFValueType, get_tensor_name_map

from bitplan.base.documents import show
from bitplan.base.errors import FileFormatError, StoreError
from bitplan.files.gguf import GGUFFile, GGUFValue, write_gguf
from bitplan.files.input_statistics import EvidenceFile

if TYPE_CHECKING:
    from torch import Tensor

SUMS, COUNTS = ".in_sum2", ".counts"
TYPE_KEY, TYPE = "general.type", "imatrix"
DATASETS, CHUNKS, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"


class ImatrixFile(EvidenceFile):
    """An imatrix.gguf open for reading; of several experts the inputs of all count together."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._gguf = GGUFFile(self.path)
        try:
            self.metadata = {key: str(value.value) for key, value in self._gguf.metadata.items()}
            self._check()
        except BaseException:
            self._gguf.close()
            raise

    @property
    def names(self) -> set[str]:
        return {key.removesuffix(SUMS) for key in self._gguf.tensors if key.endswith(SUMS)}

    def moments(self, name: str, expert: int | None = None) -> Tensor | None:
        """Read mean squares of one expert's inputs; of all experts' where none is named, or it had no inputs."""
        if name not in self.names:
            return None
        sums, counts = (self._numbers(name + part) for part in (SUMS, COUNTS))
        if expert is not None and expert < len(counts) and bool(counts[expert] > 0):
            sums, counts = sums[expert : expert + 1], counts[expert : expert + 1]
        total = counts.sum()
        if not bool(total > 0):
            return None
        return (sums.double().sum(0) / total).float()

    @property
    def gguf_keys(self) -> dict[str, GGUFValue]:
        """What a file that was quantized with it says of it, as llama-quantize writes it."""
        keys = {
            "quantize.imatrix.file": GGUFValue(GGUFValueType.STRING, self.path.name),
            "quantize.imatrix.entries_count": GGUFValue(GGUFValueType.UINT32, len(self.names)),
        }
        datasets, chunks = self._gguf.metadata.get(DATASETS), self._gguf.metadata.get(CHUNKS)
        if datasets is not None and datasets.value:
            keys["quantize.imatrix.dataset"] = GGUFValue(GGUFValueType.STRING, str(datasets.value[0]))
        if chunks is not None and type(chunks.value) is int:
            keys["quantize.imatrix.chunks_count"] = GGUFValue(GGUFValueType.UINT32, chunks.value)
        return keys

    def hessian(self, name: str) -> Tensor | None:
        return None

    def outputs(self, name: str) -> Tensor | None:
        return None

    def columns(self, name: str) -> int:
        return self._gguf.tensors[name + SUMS].shape[-1]

    def close(self) -> None:
        self._gguf.close()

    def _numbers(self, key: str) -> Tensor:
        import torch

        entry = self._gguf.tensors[key]
        return self._gguf.read_raw(key).reshape(-1).view(torch.float32).reshape(-1, entry.shape[-1])

    def _check(self) -> None:
        kind = self._gguf.metadata.get(TYPE_KEY)
        if kind is None or kind.value != TYPE:
            got = "nothing" if kind is None else repr(kind.value)[:80]
            raise FileFormatError(
                f"{self.path}: expected an importance matrix, a GGUF file with {TYPE_KEY} {TYPE!r}, got {got}; "
                "llama-imatrix writes one"
            )
        for key, entry in self._gguf.tensors.items():
            is_sums = key.endswith(SUMS)
            other = key.removesuffix(SUMS) + COUNTS if is_sums else key.removesuffix(COUNTS) + SUMS
            if not key.endswith((SUMS, COUNTS)) or entry.type != GGMLQuantizationType.F32 or not entry.shape:
                raise FileFormatError(
                    f"{self.path}: {show(key)}: expected NAME{SUMS} or NAME{COUNTS} in F32 with at least one axis, got "
                    f"{entry.type.name} {list(entry.shape)}"
                )
            if other not in self._gguf.tensors:
                raise FileFormatError(f"{self.path}: {show(key)} is there, {show(other)} is missing")
            if not is_sums and entry.shape != (*self._gguf.tensors[other].shape[:-1], 1):
                raise FileFormatError(
                    f"{self.path}: {show(key)}: expected one count for each expert of {show(other)} "
                    f"{list(self._gguf.tensors[other].shape)}, got {list(entry.shape)}"
                )


def write_imatrix(
    path: str | Path, moments: Mapping[str, Tensor], *, tokens: int, context: int = 512, datasets: Sequence[str] = ()
) -> None:
    """Write mean squares [K] of inputs as llama.cpp's imatrix; `tokens` inputs were seen, `context` at a time."""
    import torch

    if tokens < 1 or context < 1:
        raise StoreError(f"{path}: an imatrix counts inputs: tokens and context must be 1 or more")
    f32, text, number = GGMLQuantizationType.F32, GGUFValueType.STRING, GGUFValueType.UINT32
    metadata = {
        TYPE_KEY: GGUFValue(text, TYPE),
        DATASETS: GGUFValue(GGUFValueType.ARRAY, tuple(datasets), text),
        CHUNKS: GGUFValue(number, -(-tokens // context)),
        CHUNK_SIZE: GGUFValue(number, context),
    }
    entries = []
    for name, squares in moments.items():
        if squares.dim() != 1 or not bool((squares.isfinite() & (squares >= 0)).all()):
            raise StoreError(f"{path}: {name!r}: moments are one mean square for each column, finite and not below 0")
        entries += [(name + SUMS, f32, (1, len(squares))), (name + COUNTS, f32, (1, 1))]
    with write_gguf(path, entries, metadata) as writer:
        for name, squares in moments.items():
            writer.write(name + SUMS, (squares.double() * tokens).float().reshape(1, -1))
            writer.write(name + COUNTS, torch.full((1, 1), float(tokens)))


def gguf_names(names: Iterable[str]) -> dict[str, str]:
    """Names of a llama-like Hugging Face model -> those in GGUF; what gguf-py does not know is left out."""
    listed = list(names)
    layers = 1 + max((int(number[1]) for name in listed if (number := re.search(r"\.(\d+)\.", name))), default=0)
    table = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    return {name: new for name in listed if (new := table.get_name(name, try_suffixes=(".weight",))) is not None}
