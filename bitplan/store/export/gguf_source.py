"""A GGUF file read as the Hugging Face folder it was made from: its names, its order of rows, its config and tokenizer.

The way back from `bitplan.store.export.gguf`, by the same table of names: rows of q and k get transformers' order
again, experts are taken apart, Gemma's norms are one less. Packed tensors stay packed where only rows move. The
tokenizer is made from the file's metadata.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.errors import StoreError
from bitplan.formats import Encoded
from bitplan.optional import require
from bitplan.plan.structure.families import BLOCK_ATTENTION, BLOCK_FEED, BLOCK_NORMS, OUTSIDE_BLOCKS
from bitplan.records import on_failure, write_json
from bitplan.store.export.gguf import GGUFNames, heads_of, is_plus_one, row_order
from bitplan.store.export.gguf_config import config_of
from bitplan.store.export.gguf_metadata import ModelConfig
from bitplan.store.export.tokenizer_of_gguf import tokenizer_of_gguf
from bitplan.store.files.open_files import open_tensors
from bitplan.store.files.tensor_file import TensorFile, TensorSpec

_ROTATIONS = "rope_freqs.weight"


@dataclass(frozen=True)
class Origin:
    """Where a tensor lies in the GGUF file, and what is undone: rows in order again, an expert taken out, one less."""

    name: str
    heads: int | None = None
    expert: int | None = None
    minus_one: bool = False


class GGUFModel(TensorFile):
    """The file under Hugging Face's names; `folder` holds config and tokenizer until it is closed."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept = tempfile.TemporaryDirectory()
        self.folder = Path(self._kept.name)
        with on_failure(self._kept.cleanup):
            self._file = open_tensors(path)
        with on_failure(self.close):
            if _ROTATIONS in self._file.specs:
                raise StoreError(
                    f"{path}: holds llama 3's rotations as numbers ({_ROTATIONS}), from which no config.json can be "
                    "made; export from the model's folder"
                )
            write_json(self.folder / "config.json", config_of(path, self._file))
            _check_tokenizer(self._file)
            read_gguf_tokenizer(path, self._file).save_pretrained(self.folder)
            self._origins = dict(_origins(self._file, ModelConfig(self.folder)))
        self.specs = {name: self._spec(name) for name in self._origins}

    def _spec(self, name: str) -> TensorSpec:
        origin = self._origins[name]
        spec = self._file.spec(origin.name)
        if origin.expert is None:
            return replace(spec, name=name)
        return replace(spec, name=name, shape=spec.shape[1:], nbytes=spec.nbytes // spec.shape[0])

    @property
    def files(self) -> list[Path]:
        return self._file.files

    def close(self) -> None:
        self._file.close()
        self._kept.cleanup()

    def read(self, name: str) -> Tensor | Encoded:
        origin = self._origins[name]
        item = self._file.read(origin.name)
        if origin.expert is not None:
            item = _rows(item, origin.expert)
        if origin.heads is not None:
            count = item.shape[0]
            item = _rows(item, torch.argsort(row_order(count, origin.heads)))
        if origin.minus_one:
            assert isinstance(item, Tensor)
            item = item - 1
        return item


def _rows(item: Tensor | Encoded, rows: int | Tensor) -> Tensor | Encoded:
    """One matrix, or rows in another order: no number changes, for blocks lie along rows."""
    if not isinstance(item, Encoded):
        return item[rows].contiguous()
    parts = {name: part[rows].contiguous() if part.dim() else part for name, part in item.parts.items()}
    return Encoded(item.fmt, item.shape[1:] if isinstance(rows, int) else item.shape, **parts)


def _check_tokenizer(file: TensorFile) -> None:
    """transformers takes every Gemma's tokenizer for SentencePiece, and would read another one wrong."""
    kind = getattr(file.metadata.get("tokenizer.ggml.model"), "value", None)
    if kind is None:
        raise StoreError(f"{file.path}: holds no tokenizer; export from the model's folder, which has one")
    if getattr(file.metadata.get("general.architecture"), "value", "") == "gemma3" and kind != "llama":
        raise StoreError(f"{file.path}: a {kind} tokenizer, which transformers does not read from a Gemma's GGUF")


def read_gguf_tokenizer(path: Path, file: TensorFile) -> Any:
    """The tokenizer of an open file; what is not made here is read by transformers."""
    if (made := tokenizer_of_gguf(file.metadata, path)) is not None:
        return made
    transformers = require("transformers", purpose=f"reading the tokenizer of {path.name}", extra="models")
    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    try:
        return transformers.AutoTokenizer.from_pretrained(**place)
    except MemoryError:
        raise
    except Exception as error:  # its many readers raise whatever they raise
        reason = " ".join(str(error).split())[:200]
        raise StoreError(
            f"{path}: transformers makes no tokenizer of it: {reason}; export from the model's folder"
        ) from error


def _origins(file: TensorFile, config: ModelConfig) -> Iterator[tuple[str, Origin]]:
    """Hugging Face's names, each with its place in the file; what has no name there is refused."""
    names, used = GGUFNames(config, str(file.path)), set()
    for name, expert in _candidates(config):
        own = names.find(name)
        if own is None or own not in file.specs:
            continue
        used.add(own)
        yield (
            name,
            Origin(own, heads_of(config.family, config, own), expert, is_plus_one(config.family, own)),
        )
    if unknown := sorted(set(file.specs) - used):
        raise StoreError(f"{file.path}: {unknown[0]!r} has no place in a {config.model_type} of transformers")


def _candidates(config: ModelConfig) -> Iterator[tuple[str, int | None]]:
    yield from ((f"{name}.weight", None) for name in OUTSIDE_BLOCKS)
    experts = config.family.experts
    for layer in range(config.layers):
        block = f"model.layers.{layer}"
        yield from ((f"{block}.{name}.{kind}", None) for name in BLOCK_ATTENTION for kind in ("weight", "bias"))
        yield from ((f"{block}.{name}.weight", None) for name in BLOCK_NORMS)
        if experts is None:
            yield from ((f"{block}.{name}.weight", None) for name in BLOCK_FEED)
            continue
        yield f"{block}.{experts.router}.weight", None
        parts = (experts.gate, experts.up, experts.down)
        for expert, part in itertools.product(range(config.number("num_local_experts", "num_experts")), parts):
            yield f"{block}.{experts.experts}.{expert}.{part}.weight", expert
