"""A GGUF file read as the Hugging Face folder it was made from: its names, its order of rows, its config and tokenizer.

The way back from `bitplan.files.engines.gguf`, by the same table of names: rows of q and k get transformers' order
again, experts are taken apart, Gemma's norms are one less. Packed tensors stay packed where only rows move. The
tokenizer is made from the file's metadata.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.base.errors import StoreError
from bitplan.base.optional import remote_code_allowed, require
from bitplan.base.records import on_failure, write_json
from bitplan.files.engines.gguf_config import config_of, is_known
from bitplan.files.engines.gguf_metadata import ModelConfig
from bitplan.files.engines.gguf_names import Origin, origins_in, row_order
from bitplan.files.engines.tokenizer_of_gguf import tokenizer_of_gguf
from bitplan.files.gguf_tensors import GGUFTensors
from bitplan.files.headers import is_gguf
from bitplan.files.open_files import open_tensors
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.formats import Encoded


class GGUFModel(TensorFile):
    """The file under Hugging Face's names; `folder` holds config.json until it is closed.

    weights         a file that has the tensors in place of the GGUF file itself, under GGUF's names or Hugging Face's
    with_tokenizer  the folder holds the tokenizer's files, too
    """

    kind = "gguf"

    def __init__(self, path: Path, weights: Path | None = None, *, with_tokenizer: bool = False) -> None:
        self.path, self._described = weights or path, path
        self._kept = tempfile.TemporaryDirectory()
        with on_failure(self._kept.cleanup):
            said = self._file = open_tensors(path)
        with on_failure(self.close):
            if not isinstance(said, GGUFTensors):
                raise StoreError(f"{path}: is no GGUF file, and config and tokenizer are to be made of one")
            config, self._metadata = config_of(path, said), said.metadata
            write_json(self.folder / "config.json", config)
            if with_tokenizer:
                self.tokenizer.save_pretrained(self.folder)
            if weights is not None:
                self._file = open_tensors(weights)
                said.close()
            if self._file.specs.keys() <= said.specs.keys():  # GGUF's names
                self.origins = dict(origins_in(self._file, ModelConfig(path, config)))
            else:
                self.origins = {name: Origin(name) for name in self._file.specs}
        self.specs = {name: self._spec(name) for name in self.origins}

    @property
    def folder(self) -> Path:
        return Path(self._kept.name)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that the GGUF file describes; of a large vocabulary it takes seconds to make."""
        return read_gguf_tokenizer(self._described, self._metadata)

    def _spec(self, name: str) -> TensorSpec:
        origin = self.origins[name]
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
        origin = self.origins[name]
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


def read_gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any:
    """The tokenizer that a file's metadata describe; what is not made here is read by transformers."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind.value in ("none", "no_vocab"):  # llama.cpp's words for a file without one
        raise StoreError(
            f"{path}: holds no tokenizer; give the Hugging Face folder of the model, or for perplexity that beside it",
            settings={"config": None},
        )
    if (tokenizer := tokenizer_of_gguf(metadata, path)) is not None:
        return tokenizer
    options = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": remote_code_allowed()}
    transformers = require("transformers", purpose=f"reading the tokenizer of {path.name}", extra="models")
    try:
        return transformers.AutoTokenizer.from_pretrained(str(path.parent), **options)
    except MemoryError:
        raise
    except Exception as error:  # its many readers raise whatever they raise
        reason = " ".join(str(error).split())[:200]
        raise StoreError(f"{path}: transformers makes no tokenizer of it: {reason}; give the model's folder") from error


def open_model(path: str | Path, *, with_tokenizer: bool = False) -> TensorFile:
    """A model's weights under its own names: a GGUF file as the folder that it was made from, others as they are."""
    return GGUFModel(Path(path), with_tokenizer=with_tokenizer) if is_gguf(path) else open_tensors(path)


def is_folder_like(path: Path) -> bool:
    """Whether a GGUF file is of an architecture of which a folder is made."""
    with open_tensors(path) as file:
        return isinstance(file, GGUFTensors) and is_known(file)
