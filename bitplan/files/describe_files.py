"""`bitplan.describe`: what a model computes, from a module, a folder or a file.

    a module             its forward is run without numbers (`plan.structure`)
    a Hugging Face folder  the model of its config.json is built without memory, by transformers' own classes (code that
                         comes with a model is not run), and run likewise
    a file alone         safetensors, GGUF, or a folder whose config makes no model: the table of families names the
                         roles, and the view says so (`source` is "table")

The tensors of a path are those of the file, with its formats: what the model's own names do not cover has the role that
the table has for its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base.errors import FileFormatError, MissingLibraryError, PlanError
from bitplan.base.optional import require
from bitplan.base.records import read_json
from bitplan.plan.structure.describe import describe as describe_module
from bitplan.plan.structure.families import view_by_names
from bitplan.plan.structure.model_view import ModelView, TensorRecord

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bitplan.files.tensor_file import TensorSpec

CONFIG = "config.json"


def describe(model: nn.Module | str | Path, example: Any = None) -> ModelView:
    """One view of a model: its tensors and roles, who reads the same input, norms, MLPs, blocks, hooks and patches.

    model     a module, which is not altered; or a path: a Hugging Face folder, a .safetensors or a .gguf file
    example   what the forward is called with (a tensor, a tuple of arguments, a dict of keywords); else one is made

    Raises `PlanError` for a module whose forward takes no example that can be made here. For a path whose model cannot
    be run, the view has the source "table", and `notes` says why.
    """
    if not isinstance(model, str | Path):
        return describe_module(model, example)
    from bitplan.files.open_files import open_tensors

    path = Path(model)
    with open_tensors(path) as file:
        specs = list(file.specs.values())
    return describe_tensors(specs, path, example)


def describe_tensors(specs: Sequence[TensorSpec], folder: Path, example: Any = None) -> ModelView:
    """Describe the tensors of a file whose model is in a folder's config; `joined` has names of the file alone."""
    named = view_by_names((spec.name, tuple(spec.shape), spec.format) for spec in specs)
    try:
        view = describe_module(empty_model(folder), example)
    except (PlanError, FileFormatError, MissingLibraryError) as error:
        return replace(named, notes=(*named.notes, str(error)))
    joined = [group for group in view.joined if all(name in named.by_name for name in group)]
    joined += [group for group in named.joined if not any(name in view.by_name for name in group)]
    return replace(view, tensors=tuple(_with_files(view, named, specs)), joined=tuple(joined))


def _with_files(view: ModelView, named: ModelView, specs: Iterable[TensorSpec]) -> Iterable[TensorRecord]:
    """A record for every tensor of the file: as the run showed it under that name, else as `named` guesses it."""
    for spec in specs:
        record = view.by_name.get(spec.name)
        if record is None:
            yield named.by_name[spec.name]
        else:
            yield replace(record, format=spec.format, shape=tuple(spec.shape))


def empty_model(
    folder: Path, dtype: torch.dtype | None = None, *, ties: bool = True, remote_code: bool = False
) -> nn.Module:
    """The model of a folder's config.json, on the meta device.

    dtype         of its parameters; None: what the config says
    ties          parameters that it ties are one object
    remote_code   code that comes with the model may run
    """
    if not (folder / CONFIG).is_file():
        raise FileFormatError(f"{folder}: no {CONFIG} says which model it is")
    _refuse_endless(read_json(folder / CONFIG), f"{folder / CONFIG}")
    import torch

    transformers = require("transformers", purpose=f"{folder}: what its model computes", extra="models")
    from transformers import initialization

    from bitplan.files.transformers_names import foreign_faults, forget_weights_file, silence_transformers

    with silence_transformers(), foreign_faults(FileFormatError, f"{folder / CONFIG}: no model can be made of it"):
        allowed = {"local_files_only": True, "trust_remote_code": remote_code}
        config = transformers.AutoConfig.from_pretrained(str(folder), **allowed)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the plain model has the same parts
        forget_weights_file(config)
        apart = nullcontext() if ties else initialization.no_tie_weights()
        with torch.device("meta"), apart:
            kind = {} if dtype is None else {"dtype": dtype}
            model: nn.Module = model_class(folder, config)._from_config(config, **kind)
    return model.eval()


MOST_LAYERS = 10_000


def _refuse_endless(document: Any, where: str) -> None:
    """Refuse a number of layers that no model has: making that many modules would not end."""
    for key, value in document.items() if isinstance(document, dict) else ():
        if type(value) is int and "layers" in key and value > MOST_LAYERS:
            raise FileFormatError(f"{where}: {key}: expected at most {MOST_LAYERS} layers, got {value}")
        _refuse_endless(value, where)


def model_class(folder: Path, config: Any) -> Any:
    """The class that the config names; else the one that transformers has for its type."""
    import transformers

    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if named is not None and isinstance(named, type):
            return named
    if config.architectures:
        raise FileFormatError(
            f"{folder / CONFIG}: the architecture {config.architectures[0]!r:.80} is not one of transformers "
            f"{transformers.__version__}; code that comes with a model is not run"
        )
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        classes = auto._model_mapping.get(type(config), None)
        if classes is not None:
            return classes[0] if isinstance(classes, tuple | list) else classes
    raise FileFormatError(
        f"{folder / CONFIG}: transformers {transformers.__version__} has no model of type {config.model_type!r:.80}; "
        "pip install --upgrade transformers, which may know it"
    )
