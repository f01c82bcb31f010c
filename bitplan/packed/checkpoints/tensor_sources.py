"""What a loaded model remembers of its checkpoint (names, files and types), so that it is saved as the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from bitplan.files.safetensors_tensors import NativeTensors
from bitplan.files.tensor_file import TensorFile
from bitplan.files.tensor_recipes import TensorRecipe
from bitplan.packed.checkpoints.gpt_oss_tensors import GptOssTensors
from bitplan.plan.plan import Plan

_ATTRIBUTE = "_bitplan_checkpoint"


@dataclass(frozen=True)
class LoadedFrom:
    """Names, files and types of a checkpoint; `config` is its document, `config_then` the model's as it was loaded.

    `is_gpt_oss`: it is saved in Hugging Face's layout of gpt-oss, whichever it was loaded from.
    """

    folder: Path | None
    config: Mapping[str, Any] | None
    config_then: Mapping[str, Any] | None
    plan: Plan | None
    recipes: tuple[TensorRecipe, ...]
    dtypes: Mapping[str, torch.dtype]  # of the plain tensors in the file
    shards: Mapping[str, tuple[str, ...]]  # file -> its tensors
    metadata: Mapping[str, Mapping[str, str]]  # file -> its metadata
    tied: Mapping[str, str]
    is_gpt_oss: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied model shares this object, which never changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model loses this object; save_packed then uses the model's own names."""
        return _nothing, ()


def _nothing() -> None:
    return None


def forget(model: nn.Module) -> None:
    """Undo what makes a model packed for transformers: methods that were replaced, and where it was loaded from."""
    methods = ("save_pretrained", "resize_token_embeddings", "get_expanded_tied_weights_keys")
    for name in (_ATTRIBUTE, *methods, "hf_quantizer"):
        model.__dict__.pop(name, None)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def remembered(model: nn.Module) -> LoadedFrom | None:
    source: LoadedFrom | None = getattr(model, _ATTRIBUTE, None)
    return source


def remember(
    model: nn.Module,
    file: TensorFile,
    recipes: tuple[TensorRecipe, ...],
    *,
    folder: Path | None,
    config: Mapping[str, Any] | None,
    plan: Plan | None,
) -> None:
    """Note in a model what it must know of this open file."""
    shards: dict[str, tuple[str, ...]] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    stored = file.stored if isinstance(file, GptOssTensors) else file
    if isinstance(stored, NativeTensors):
        for shard in stored.shards:
            shard_name = stored.shard_name(shard).as_posix()
            shards[shard_name] = tuple(name for name in stored.specs if stored.shard_of(name) == shard)
            metadata[shard_name] = stored.metadata_of(shard)
    dtypes = {name: spec.torch_dtype for name, spec in file.specs.items() if not spec.encoded}
    if isinstance(file, GptOssTensors) and file.kind != "hf":
        dtypes = dict.fromkeys(dtypes, torch.bfloat16)  # the layout's own type
    source = LoadedFrom(
        folder=folder,
        config=config,
        config_then=config_of(model),
        plan=plan,
        recipes=recipes,
        dtypes=dtypes,
        shards=shards,
        metadata=metadata,
        tied=dict(file.tied),
        is_gpt_oss=isinstance(file, GptOssTensors),
    )
    setattr(model, _ATTRIBUTE, source)


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """A model's config as a document; None where it has none."""
    config: Any = getattr(model, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else None
