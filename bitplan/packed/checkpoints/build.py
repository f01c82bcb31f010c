"""Builds transformers' model of a config: everything is ready except the parameters, which have no memory yet.

Buffers that a model computes and does not save (rotary frequencies, position ids) are computed while all parameters are
still on the meta device: transformers' initialisation then finds no real memory to fill with random numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitplan.base.errors import FileFormatError
from bitplan.base.optional import remote_code_allowed
from bitplan.files.describe_files import model_class
from bitplan.files.models.transformers_names import foreign_faults, read_generation_config, silence_transformers
from bitplan.files.packed_folder import CONFIG
from bitplan.formats.dtypes import torch_dtype


def empty_model(folder: Path, config: Mapping[str, Any], dtype: torch.dtype | None, device: torch.device) -> nn.Module:
    """The model of a folder's config; its parameters lie on meta, its computed buffers on the device."""
    import transformers
    from transformers import initialization

    with silence_transformers():
        with foreign_faults(FileFormatError, f"{folder / CONFIG}: no model can be made of it"):
            allowed = {"local_files_only": True, "trust_remote_code": remote_code_allowed()}
            loaded = transformers.AutoConfig.from_pretrained(str(folder), **allowed)
            if hasattr(loaded, "quantization_config"):
                del loaded.quantization_config  # bitplan loads the weights, not a quantizer of transformers
            kind = model_class(folder, loaded)
            wanted = dtype or _stored_type(config)
            with torch.device("meta"), initialization.no_tie_weights():
                model: nn.Module = kind._from_config(loaded, dtype=wanted)
            _compute_buffers(model, device)
        if model.can_generate():  # type: ignore[operator]
            read_generation_config(model, folder)
    return model.eval()


def _stored_type(config: Mapping[str, Any]) -> torch.dtype:
    """The type in which the model was saved, by its config; float32 where the config names none."""
    said = config.get("dtype") or config.get("torch_dtype") or "float32"
    return torch_dtype(str(said).removeprefix("torch."))


def _compute_buffers(model: Any, device: torch.device) -> None:
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, local = name.rpartition(".")
        model.get_submodule(owner)._buffers[local] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, local = name.rpartition(".")
        model.get_submodule(owner)._buffers[local] = buffer.to(device)


def plain_types(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The type of each tensor where it is not packed: `dtype`, or its own; float32 where transformers insists."""
    own = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    wide: Mapping[str, torch.dtype] = {}
    if hasattr(model, "_get_dtype_plan"):
        wide = model._get_dtype_plan(dtype or model.dtype)  # type: ignore[operator]
    for name, kind in own.items():
        if kind.is_floating_point:
            own[name] = next((type_ for pattern, type_ in wide.items() if re.search(pattern, name)), dtype or kind)
    return own
