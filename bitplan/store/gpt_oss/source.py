"""A gpt-oss checkpoint open for reading, in any layout, one chunk of rows or one expert at a time.

Nothing larger than that is ever in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bitplan.records import Closing, on_failure
from bitplan.store.files.gguf import GGUFFile
from bitplan.store.files.gguf_split_read import open_gguf
from bitplan.store.files.gguf_values import GGUFValue
from bitplan.store.files.safetensors import Checkpoint, open_checkpoint
from bitplan.store.gpt_oss.check import check_gpt_oss, read_headers
from bitplan.store.gpt_oss.config import CONFIG, Settings, read_config, read_metadata
from bitplan.store.gpt_oss.experts import Matrix, group_experts, join_expert
from bitplan.store.gpt_oss.layouts import GptOssShape, Layout, LayoutTensor

CHUNK_BYTES = 2**26


class GptOssSource(Protocol):
    """A source from which a checkpoint can be written: a file, or random numbers.

    `where` begins the errors; `experts` is the float type of the experts, None where they are MXFP4; `is_widened`
    says that float32 may stand for bfloat16, as it does in GGUF.
    """

    where: str
    shape: GptOssShape
    settings: Settings
    experts: torch.dtype | None
    is_widened: bool

    @property
    def layout(self) -> Layout | None:
        """The layout of the file; None where there is none."""

    @property
    def files(self) -> list[Path]:
        """Every file that is read; random numbers have none."""

    def dtype(self, part: str, layer: int | None) -> torch.dtype:
        """The type of a part that is not an expert's matrix."""

    def rows(self, part: str, layer: int | None) -> Iterator[Tensor]:
        """The rows of a part that is not an expert's matrix, some at a time."""

    def expert(self, layer: int, parts: tuple[str, ...], index: int) -> Matrix:
        """One expert's matrix [outputs, inputs]: ("gate", "up") alternating by rows, or ("down",)."""

    def expert_name(self, layer: int, parts: tuple[str, ...]) -> str:
        """The name, for errors, of the tensor that holds these matrices."""

    def twin(self, slot: LayoutTensor) -> LayoutTensor | None:
        """The source's tensor with the same parts in the same arrangement as a tensor of another layout."""

    def raw(self, slot: LayoutTensor) -> Iterator[Tensor]:
        """The bytes of one of the source's own tensors, some rows at a time."""


def plain_rows(source: GptOssSource, slot: LayoutTensor) -> Iterator[Tensor]:
    """The rows of a tensor of any layout that is not an expert's matrix, some at a time, in the source's types."""
    if (twin := source.twin(slot)) is not None:
        yield from source.raw(twin)
    elif slot.kind == "woven":  # biases: small enough to be held whole
        parts = [torch.cat(list(source.rows(part, slot.layer))) for part in slot.parts]
        yield torch.stack(parts, dim=-1).flatten(-2)
    else:
        for part in slot.parts:
            yield from source.rows(part, slot.layer)


class GptOssFile(Closing):
    """A checkpoint in OpenAI's, Hugging Face's or GGUF's layout, completely checked; see `GptOssSource`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.where = str(path)
        self._file = _open(self.path)
        with on_failure(self.close):
            self.tensors = read_headers(self._file)
            checked = check_gpt_oss(self.where, self._file, self.tensors)
            self.layout, self.shape, self.slots = checked.layout, checked.shape, checked.slots
            self.experts = checked.experts
            self.is_widened = self.layout == "gguf"
            self.config: dict[str, Any] | None = None  # in Hugging Face's spelling
            self.settings = self._read_settings()
        self._places = {(part, slot.layer): slot for slot in self.slots for part in slot.parts if not slot.is_expert}
        self._twins = {(slot.kind, slot.parts, slot.layer): slot for slot in self.slots}
        self._groups = group_experts(self.slots)

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def files(self) -> list[Path]:
        return self._file.parts if isinstance(self._file, GGUFFile) else self._file.sources

    @property
    def metadata(self) -> dict[str, GGUFValue]:
        """GGUF's metadata; empty for other layouts."""
        return self._file.metadata if isinstance(self._file, GGUFFile) else {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def dtype(self, part: str, layer: int | None) -> torch.dtype:
        dtype = self.tensors[self._places[part, layer].name].dtype
        assert dtype is not None
        return dtype

    def rows(self, part: str, layer: int | None) -> Iterator[Tensor]:
        slot = self._places[part, layer]
        if slot.kind == "woven":
            yield self._read(slot, 0, slot.shape[0])[:, slot.parts.index(part) :: 2]
            return
        first, count = _span(slot, part, self.shape)
        yield from self._chunks(slot, first, first + count)

    def expert(self, layer: int, parts: tuple[str, ...], index: int, device: torch.device | str = "cpu") -> Matrix:
        def read(slot: LayoutTensor) -> Tensor:
            return self._read(slot, index, index + 1)[0].to(device)

        return join_expert(self._groups[layer, parts], read, index)

    def expert_name(self, layer: int, parts: tuple[str, ...]) -> str:
        return self._groups[layer, parts][0].name

    def twin(self, slot: LayoutTensor) -> LayoutTensor | None:
        return self._twins.get((slot.kind, slot.parts, slot.layer))

    def raw(self, slot: LayoutTensor) -> Iterator[Tensor]:
        return self._chunks(slot, 0, slot.shape[0])

    def close(self) -> None:
        self._file.close()

    def _chunks(self, slot: LayoutTensor, start: int, stop: int) -> Iterator[Tensor]:
        step = max(1, CHUNK_BYTES * slot.shape[0] // max(1, self.tensors[slot.name].nbytes))
        for first in range(start, stop, step):
            yield self._read(slot, first, min(stop, first + step))

    def _read(self, slot: LayoutTensor, start: int, stop: int) -> Tensor:
        """Items start..stop along the first axis; GGUF's MXFP4 comes as bytes."""
        if not isinstance(self._file, GGUFFile):
            return self._file.read_rows(slot.name, start, stop)
        dtype = self.tensors[slot.name].dtype or torch.uint8
        if len(slot.shape) == 1:
            return self._file.read_raw(slot.name).view(dtype)[start:stop]
        rows = math.prod(slot.shape[1:-1])
        raw = self._file.read_raw_rows(slot.name, start * rows, stop * rows)
        return raw.view(dtype).reshape(stop - start, *slot.shape[1:-1], -1)

    def _read_settings(self) -> Settings:
        if isinstance(self._file, GGUFFile):
            return read_metadata(self._file.path, self._file.metadata, self.shape)
        path = self.folder / CONFIG
        if not path.is_file():
            return Settings(experts_per_token=min(Settings.experts_per_token, self.shape.experts))
        settings, self.config = read_config(path, self.shape)
        return settings


def _open(path: Path) -> Checkpoint | GGUFFile:
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return open_gguf(path)
    return open_checkpoint(path)


def _span(slot: LayoutTensor, part: str, shape: GptOssShape) -> tuple[int, int]:
    """The rows of a part in a tensor; only OpenAI's qkv has several parts by rows."""
    if len(slot.parts) == 1:
        return 0, slot.shape[0]
    counts = [shape.q_rows, shape.kv_rows, shape.kv_rows]
    at = slot.parts.index(part)
    return sum(counts[:at]), counts[at]
