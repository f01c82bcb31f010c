"""The state of weights that are trained on the host: all that a run needs to go on as if it had never stopped.

    {"document": "bitplan-streamed-training", "version": 1,
     "optimizer": {"lr": L, "betas": [B, B], "eps": E, "weight_decay": D, "clip_grad_norm": N or null},   as given
     "lr": L,                               the rate of now, which a schedule may have moved
     "formats": {PARAMETER: FORMAT},        every streamed parameter
     "steps": {PARAMETER: COUNT},           every trained one: how often AdamW has stepped it
     "tensors": {"PARAMETER.master": M, "PARAMETER.exp_avg": A, "PARAMETER.exp_avg_sq": S}}

Float32 tensors, plain numbers and texts: torch.load(weights_only=True) takes it, safetensors takes the tensors and
JSON the rest, and we never pickle. A parameter that was never stepped has no moments, as in torch.

A document is read in full, and refused where it is of another model or optimizer, before anything is changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.base.documents import NAME, OBJECT, SIZE, Fields, Kind, Reader, is_number, one_of, show
from bitplan.base.errors import FileFormatError
from bitplan.base.records import parse_json
from bitplan.files.safetensors import SafetensorsFile, write_safetensors
from bitplan.plan.names import listed
from bitplan.streaming.errors import StreamStateError
from bitplan.streaming.training.host_training import HostTraining, Trained

DOCUMENT, VERSION = "bitplan-streamed-training", 1
METADATA = "bitplan_streamed_training"  # key of a file's metadata for everything that is not a tensor
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")

_NUMBER = Kind("a number", is_number)
_TENSOR = Kind("a tensor", lambda value: isinstance(value, Tensor))
_KEYS = {
    "document": one_of(DOCUMENT),
    "version": SIZE,
    "optimizer": OBJECT,
    "lr": _NUMBER,
    "formats": OBJECT,
    "steps": OBJECT,
    "tensors": OBJECT,
}


@dataclass(frozen=True)
class TrainingState:
    """A document that fits: the state of each trained parameter and the format of each streamed one, by full name."""

    trained: Mapping[str, Trained]
    formats: Mapping[str, str]
    lr: float


def training_document(training: HostTraining, formats: Mapping[str, str]) -> dict[str, Any]:
    """The document; its tensors are the ones in use, not copies."""
    steps, tensors = {}, {}
    for name, one in training.whole().items():
        steps[name] = one.steps
        tensors[f"{name}.{MASTER}"] = one.master
        if one.moments is not None:
            tensors |= {f"{name}.{key}": moment for key, moment in zip(MOMENTS, one.moments, strict=True)}
    return {
        "document": DOCUMENT,
        "version": VERSION,
        "optimizer": _settings(training),
        "lr": float(training.lr),
        "formats": dict(formats),
        "steps": steps,
        "tensors": tensors,
    }


def read_training(
    document: Any, training: HostTraining, parameters: Iterable[str], *, where: str, accept_optimizer_change: bool
) -> TrainingState:
    """The state, if it is of these parameters (all streamed ones, by full name) and of this optimizer."""
    reader = Reader(where, StreamStateError)
    reader.version(document, VERSION)
    item = reader.keys("", document, _KEYS, tuple(_KEYS))
    now = training.trained()
    _require_same_names(reader, "trained", item["steps"], now)
    _require_same_names(reader, "streamed", item["formats"], list(parameters))
    reader.keys("steps", item["steps"], dict.fromkeys(now, SIZE), tuple(now))
    reader.keys("formats", item["formats"], dict.fromkeys(item["formats"], NAME), ())
    trained = _read_tensors(reader, item["tensors"], item["steps"], now)
    lr = float(item["lr"])
    if accept_optimizer_change:
        lr = training.lr
    else:
        if lr < 0:
            raise StreamStateError(f"{where}: lr: expected a number of at least 0, got {lr!r}")
        _require_same_optimizer(reader, item["optimizer"], _settings(training))
    return TrainingState(trained, item["formats"], lr)


def write_training(path: str | Path, document: Mapping[str, Any]) -> None:
    """A safetensors file, whole or not at all; tensors are written one by one."""
    tensors = document["tensors"]
    rest = {key: value for key, value in document.items() if key != "tensors"}
    entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with write_safetensors(path, entries, {METADATA: json.dumps(rest, allow_nan=False)}) as writer:
        for name in writer.order:
            writer.write(name, tensors[name].contiguous())


def load_training(path: str | Path) -> dict[str, Any]:
    """The document of a file; its tensors own their memory."""
    try:
        with SafetensorsFile(path) as file:
            if METADATA not in file.metadata:
                raise StreamStateError(f"{path}: no state of streamed weights: its metadata has no {METADATA}")
            where = f"{path}: {METADATA}"
            rest = Fields(parse_json(file.metadata[METADATA].encode(), where=where), where).value
            return rest | {"tensors": {name: file.read(name) for name in file.tensors}}
    except StreamStateError:
        raise
    except FileFormatError as error:
        raise StreamStateError(str(error)) from None
    except OSError as error:
        raise StreamStateError(f"{path}: cannot be read: {error.strerror or error}") from None


# ---- parts of the document -------------------------------------------------------------------------------------------


def _settings(training: HostTraining) -> dict[str, Any]:
    given = training.settings
    return {
        "lr": float(given.lr),
        "betas": [float(beta) for beta in given.betas],
        "eps": float(given.eps),
        "weight_decay": float(given.weight_decay),
        "clip_grad_norm": None if training.max_norm is None else float(training.max_norm),
    }


def _require_same_names(reader: Reader, what: str, saved: Iterable[str], now: Iterable[str]) -> None:
    saved, now = list(saved), list(now)
    gone = [name for name in saved if name not in now]
    new = [name for name in now if name not in saved]
    differences = [f"{verb} {listed(names, 5)}" for verb, names in (("no longer has", gone), ("now has", new)) if names]
    if differences:
        reader.stop(
            f"this state is of another model: among its {what} parameters the model "
            f"{', and '.join(differences)}; resume with the model it was saved for, streamed and trained alike"
        )


def _require_same_optimizer(reader: Reader, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    differences = [
        f"{key} was {show(saved.get(key))}, is {show(now.get(key))}"
        for key in dict.fromkeys((*now, *saved))
        if saved.get(key) != now.get(key)
    ]
    if differences:
        reader.stop(
            f"this state was saved under another optimizer: {'; '.join(differences)}; resume with the old "
            "values, or accept the change (accept_optimizer_change=True)"
        )


def _read_tensors(
    reader: Reader, tensors: Mapping[str, Any], steps: Mapping[str, int], now: Mapping[str, Trained]
) -> dict[str, Trained]:
    parts = {name: (MASTER, *MOMENTS) if steps[name] else (MASTER,) for name in now}
    wanted = {f"{name}.{part}": now[name].master for name, saved in parts.items() for part in saved}
    reader.keys("tensors", tensors, dict.fromkeys(wanted, _TENSOR), tuple(wanted))
    for key, master in wanted.items():
        _require_fitting(reader, key, tensors[key], tuple(master.shape))
    return {
        name: Trained(
            tensors[f"{name}.{MASTER}"],
            (tensors[f"{name}.{MOMENTS[0]}"], tensors[f"{name}.{MOMENTS[1]}"]) if steps[name] else None,
            steps[name],
        )
        for name in now
    }


def _require_fitting(reader: Reader, key: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        reader.stop(f"tensors: {key} has shape {tuple(tensor.shape)}, and in this model it has {shape}: another model")
    if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
        kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
        reader.stop(f"tensors: {key} must be dense float32 numbers, got {kind}")
    if tensor.is_meta or not bool(tensor.isfinite().all()):
        reader.stop(f"tensors: {key} holds {'no numbers' if tensor.is_meta else 'NaN or infinity'}; take another state")
