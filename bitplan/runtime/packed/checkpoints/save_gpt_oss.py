"""A packed gpt-oss model as a folder in Hugging Face's layout; `bitplan convert` brings it into the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.runtime.packed.checkpoints.source import LoadedFrom, config_of, remembered
from bitplan.runtime.packed.gpt_oss.model import GptOssPackedExperts
from bitplan.store.files.tensor_file import Promise
from bitplan.store.gpt_oss.config import with_quantization
from bitplan.store.packed_folder import (
    CONFIG,
    FolderContents,
    Shard,
    check_packed_output,
    cut_shards,
    side_files,
    write_packed_folder,
)

_BLOCK = 32


def is_packed_gpt_oss(model: nn.Module) -> bool:
    return any(isinstance(module, GptOssPackedExperts) for module in model.modules())


def save_gpt_oss(model: nn.Module, path: str | Path, *, force: bool, shard_bytes: int) -> None:
    """Write the folder; a model that was loaded from a folder in this layout gives the same bytes."""
    source = remembered(model)
    tensors = _tensors(model)
    folder = None if source is None else source.folder
    check_packed_output(path, inputs=[] if folder is None else [folder / CONFIG], force=force)
    promises = {
        name: Promise(name, tuple(tensor.shape), dtype=_type(source, name, tensor)) for name, tensor in tensors.items()
    }
    beside = {} if folder is None else side_files(folder)
    config: Mapping[str, Any] | None = None
    if source is not None and source.config is not None and config_of(model) == source.config_then:
        assert folder is not None
        beside |= {CONFIG: folder / CONFIG}  # as it is, to the byte
    else:
        config = with_quantization(config_of(model) or {}, packed=True)

    def write(writer: Any, wanted: Any) -> None:
        for promise in wanted:
            writer.write(promise.name, tensors[promise.name].to(promise.dtype))

    write_packed_folder(
        path, FolderContents(_shards(promises, source, shard_bytes), config, None, beside), write, force=force
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the layout, by name."""
    found: dict[str, Tensor] = {}
    inside: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, GptOssPackedExperts):
            continue
        inside.append(f"{path}.")
        for stem, packed, bias in (
            ("gate_up_proj", module.gate_up, module.gate_up_bias),
            ("down_proj", module.down, module.down_bias),
        ):
            parts = packed.encoded.parts
            blocks = parts["data"].unflatten(-1, (-1, _BLOCK // 2))
            assert bias is not None
            for name, tensor in (("_blocks", blocks), ("_scales", parts["scales"]), ("_bias", bias.detach())):
                found[f"{path}.{stem}{name}"] = tensor
    for name, tensor in model.state_dict().items():
        if not name.startswith(tuple(inside)):
            found[name] = tensor
    return found


def _type(source: LoadedFrom | None, name: str, tensor: Tensor) -> torch.dtype:
    """The type in the file, else bfloat16 (the layout's type), where it holds the numbers exactly."""
    if not tensor.is_floating_point():
        return tensor.dtype
    stored = (None if source is None else source.dtypes.get(name)) or torch.bfloat16
    return stored if bool((tensor.to(stored).to(tensor.dtype) == tensor).all()) else tensor.dtype


def _shards(promises: Mapping[str, Promise], source: LoadedFrom | None, shard_bytes: int) -> list[Shard]:
    if source is None or {name for names in source.shards.values() for name in names} != set(promises):
        return cut_shards(promises.values(), {}, shard_bytes)
    return [
        Shard(file, tuple(promises[name] for name in names), metadata=source.metadata[file])
        for file, names in source.shards.items()
    ]
