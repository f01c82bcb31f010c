"""A GGUF file read as the Hugging Face folder it was made from: its names, its order of rows, its config and tokenizer.

The way back from `bitplan.files.engines.gguf`, by the same table of names: rows of q and k get transformers' order
again, experts are taken apart, Gemma's norms are one less. Packed tensors stay packed where only rows move. The
tokenizer is made from the file's metadata.

Its names stand beside Hugging Face's in both directions (`gguf_origins`).

gguf-py's table has the names. With a name goes what else differs: the order of rows of q and k, experts of a layer in
one tensor, Gemma's norms. A plan or statistics under one naming fit a file under the other.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from torch import Tensor

from bitplan.base.errors import PlanError, StoreError
from bitplan.base.optional import remote_code_allowed, require
from bitplan.base.records import on_failure, write_json
from bitplan.files.engines.gguf_metadata import ROTATIONS, ModelConfig, config_of, is_known
from bitplan.files.engines.tokenizer_of_gguf import tokenizer_of_gguf
from bitplan.files.gguf_tensors import GGUFTensors
from bitplan.files.headers import is_gguf, plan_of_stored
from bitplan.files.input_statistics import EvidenceFile
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import is_model_folder
from bitplan.files.round_with_evidence import OtherName, WeightEvidence, evidence_for
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.formats import Encoded
from bitplan.plan import Plan
from bitplan.plan.format_choices import Wanted
from bitplan.plan.plan import Planned
from bitplan.plan.structure.families import (
    BLOCK_ATTENTION,
    BLOCK_FEED,
    BLOCK_NORMS,
    GGUF_FAMILIES,
    OUTSIDE_BLOCKS,
    Family,
    split_expert,
    without_expert,
)


def name_table(architecture: str, layers: int) -> TensorNameMap:
    """gguf-py's table of names for an architecture of llama.cpp's."""
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(MODEL_ARCH(kind), layers)


def gguf_name(table: TensorNameMap, name: str) -> str | None:
    """GGUF's name of a Hugging Face tensor, one for all experts of a layer; None where the table has none."""
    text_name = name.replace("language_model.model.", "model.").replace("model.language_model.", "model.")
    text_name = text_name.replace("language_model.lm_head.", "lm_head.")
    new: str | None = table.get_name(without_expert(text_name), try_suffixes=(".weight", ".bias"))
    return new


class GGUFNames:
    """Maps Hugging Face's tensor names to GGUF's: gguf-py's table for an architecture, and names that it lacks."""

    def __init__(self, config: ModelConfig, where: str) -> None:
        self._table = name_table(config.family.architecture, config.layers)
        self._config, self._where = config, where

    def find(self, name: str) -> str | None:
        """GGUF's name of a tensor, None where the architecture has none."""
        return gguf_name(self._table, name)

    def of(self, name: str) -> str:
        new = self.find(name)
        if new is None:
            raise StoreError(
                f"{self._where}: llama.cpp's {self._config.family.architecture} has no tensor for {name!r}; "
                "the checkpoint holds more than the model that config.json names"
            )
        return new

    def check_whole(self, names: set[str]) -> None:
        """Raise where the model lacks tensors that llama.cpp needs: a part of a model loads in no engine."""
        expected = {"token_embd.weight", "output_norm.weight"}
        if self._config.get("tie_word_embeddings") is False:
            expected.add("output.weight")  # llama.cpp takes the embedding in its place
        layer_names = {name.split(".", 2)[2] for name in names if name.startswith("blk.")} | {"attn_norm.weight"}
        expected |= {f"blk.{layer}.{name}" for layer in range(self._config.layers) for name in layer_names}
        if missing := sorted(expected - names):
            raise StoreError(
                f"{self._where}: no tensor becomes {missing[0]!r}; the checkpoint lacks a part of the model"
            )


def heads_of(family: Family, config: ModelConfig, new: str) -> int | None:
    if not family.permutes:
        return None
    if ".attn_q." in new:
        return config.heads
    return config.kv_heads if ".attn_k." in new else None


def is_plus_one(family: Family, new: str) -> bool:
    return family.norms_plus_one and new.endswith("norm.weight")


def row_order(rows: int, heads: int) -> Tensor:
    """Give the row of transformers' q or k for each row of llama.cpp's: halves of a head, dealt out in turns."""
    return torch.arange(rows).reshape(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class Origin:
    """The tensor `name` of a GGUF file from which a folder's tensor is read, and the changes to undo.

    Rows of `heads` heads are put back in order, `expert` is taken out of the stack, `minus_one` subtracts one.
    """

    name: str
    heads: int | None = None
    expert: int | None = None
    minus_one: bool = False


def origins_in(file: TensorFile, config: ModelConfig) -> Iterator[tuple[str, Origin]]:
    """Hugging Face's names of a GGUF file's tensors, each with its place there; what has no name is refused."""
    used = {ROTATIONS}  # which the config says
    for name, origin in _places(_candidates(config), config, str(file.path)):
        if origin.name in file.specs:
            used.add(origin.name)
            yield name, origin
    if unknown := sorted(set(file.specs) - used):
        raise StoreError(f"{file.path}: {unknown[0]!r} has no place in a {config.model_type} of transformers")


def _places(names: Iterable[tuple[str, int | None]], config: ModelConfig, where: str) -> Iterator[tuple[str, Origin]]:
    table, family = GGUFNames(config, where), config.family
    for name, expert in names:
        if (new := table.find(name)) is not None:
            yield name, Origin(new, heads_of(family, config, new), expert, is_plus_one(family, new))


def _candidates(config: ModelConfig) -> Iterator[tuple[str, int | None]]:
    yield from ((f"{name}.weight", None) for name in OUTSIDE_BLOCKS)
    experts = config.family.experts
    for layer in range(config.layers):
        block = f"model.layers.{layer}"
        yield from ((f"{block}.{name}.{kind}", None) for name in BLOCK_ATTENTION for kind in ("weight", "bias"))
        yield from ((f"{block}.{name}.weight", None) for name in BLOCK_NORMS)
        if experts is None:
            yield from ((f"{block}.{name}.{kind}", None) for name in BLOCK_FEED for kind in ("weight", "bias"))
            continue
        yield f"{block}.{experts.router}.weight", None
        parts = (experts.gate, experts.up, experts.down)
        for expert, part in itertools.product(range(config.number("num_local_experts", "num_experts")), parts):
            yield f"{block}.{experts.experts}.{expert}.{part}.weight", expert


# ---- one model under two namings -------------------------------------------------------------------------------------


def gguf_origins(file: TensorFile) -> dict[str, Origin]:
    """Hugging Face's names of a model's tensors, each with its place in GGUF; none for a family that is not known."""
    if isinstance(file, GGUFTensors):
        return dict(origins_in(file, ModelConfig(file.path, config_of(file.path, file)))) if is_known(file) else {}
    if not is_model_folder(file.folder):
        return {}
    config = ModelConfig(file.folder)
    if config.model_type not in GGUF_FAMILIES:
        return {}
    names = ((name, expert[1] if (expert := split_expert(name)) else None) for name in file.specs)
    return dict(_places(names, config, str(file.path)))


def fit_names(formats: Wanted, file: TensorFile) -> Wanted:
    """Rename a plan to a file's names, GGUF's to Hugging Face's or the reverse; anything else is returned.

    A tensor that stays has the file's own type. What has no other name keeps its own, and is refused as any other plan.
    """
    names = {*file.specs, *file.tied}
    if not isinstance(formats, Plan) or formats.keys() == names or not (origins := gguf_origins(file)):
        return formats
    if isinstance(file, GGUFTensors):
        entries, used = _under_gguf_names(formats, origins, str(file.path))
    else:
        entries, used = _under_own_names(formats, origins, file)
    if not used:
        return formats
    stored = plan_of_stored(file)
    entries |= {name: entry for name, entry in formats.entries.items() if name not in used and name != ROTATIONS}
    if ROTATIONS in names:
        entries.setdefault(ROTATIONS, stored.entries[ROTATIONS])
    fitted = {
        name: replace(
            stored.entries[name], choice=replace(stored[name], reason=entry.choice.reason, cause=entry.choice.cause)
        )
        if entry.stored is not None and name in stored
        else entry
        for name, entry in entries.items()
    }
    return Plan(fitted, padding=formats.padding)


def _under_own_names(
    plan: Plan, origins: Mapping[str, Origin], file: TensorFile
) -> tuple[dict[str, Planned], set[str]]:
    """The plan's entries under the file's Hugging Face names, and which of the plan's GGUF names these were."""
    entries, used = {}, set()
    for name in (*file.specs, *file.tied):
        origin = origins.get(file.tied.get(name, name))
        if name in plan or origin is None or origin.name not in plan:
            continue
        entry = plan.entries[origin.name]
        shape = entry.shape[1:] if entry.shape is not None and origin.expert is not None else entry.shape
        entries[name] = replace(entry, shape=shape)
        used.add(origin.name)
    return entries, used


def _under_gguf_names(plan: Plan, origins: Mapping[str, Origin], where: str) -> tuple[dict[str, Planned], set[str]]:
    """A plan's entries under GGUF's names, experts of a layer joined, and the plan's names that these were."""
    entries: dict[str, Planned] = {}
    used: set[str] = set()
    for new in dict.fromkeys(origin.name for origin in origins.values()):
        experts = [name for name, origin in origins.items() if origin.name == new]
        if new in plan or any(name not in plan for name in experts):
            continue
        formats = {plan[name].format for name in experts}
        if len(formats) > 1:
            raise PlanError(
                f"{where}: the {len(experts)} experts of {new!r} are one tensor in GGUF and need one format, "
                f"the plan gives {', '.join(sorted(formats))}"
            )
        entry = plan.entries[experts[0]]
        is_stack = entry.shape is not None and origins[experts[0]].expert is not None
        entries[new] = replace(entry, shape=(len(experts), *entry.shape)) if is_stack and entry.shape else entry
        used |= {*experts}
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if used and head in plan and head not in origins and table in plan and plan[head].format == plan[table].format:
        used.add(head)  # tied: GGUF has it once
    return entries, used


def evidence_of(statistics: EvidenceFile, file: TensorFile) -> WeightEvidence:
    """Statistics for a file's tensors, named as in the file or, of GGUF and Hugging Face, as in the other one."""
    others = {name: OtherName(origin.name, origin.expert, origin.heads) for name, origin in gguf_origins(file).items()}
    return evidence_for(statistics, file, {} if isinstance(file, GGUFTensors) else others)


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
            stored = self._file = open_tensors(path)
        with on_failure(self.close):
            if not isinstance(stored, GGUFTensors):
                raise StoreError(f"{path}: config and tokenizer are made of GGUF files; give one")
            config, self._metadata = config_of(path, stored), stored.metadata
            write_json(self.folder / "config.json", config)
            if with_tokenizer:
                self.tokenizer.save_pretrained(self.folder)
            if weights is not None:
                self._file = open_tensors(weights)
                stored.close()
            if self._file.specs.keys() <= stored.specs.keys():  # GGUF's names
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
    """Take one matrix of a stack (an index), or put rows in another order (a tensor), without changing a number."""
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
