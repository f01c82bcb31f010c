"""The state of weights that are trained on the host: all that a run needs to go on as if it had never stopped.

    {"document": "bitplan-streamed-training", "version": 1,
     "optimizer": {"lr": L, "betas": [B, B], "eps": E, "weight_decay": D, "clip_grad_norm": N or null},   as given;
                                            for another one than AdamW its "kind", its settings and the norm
     "lr": L,                               the rate of now, which a schedule may have moved
     "formats": {PARAMETER: FORMAT},        every streamed parameter
     "steps": {PARAMETER: COUNT},           every trained one: how often it was stepped
     "tensors": {"PARAMETER.master": M, "PARAMETER.exp_avg": A, "PARAMETER.exp_avg_sq": S}}     or other states

Float32 tensors, plain numbers and texts: torch.load(weights_only=True) takes it, safetensors takes the tensors and
JSON the rest, and we never pickle. A parameter that was never stepped has no states, as in torch. Tensors are whole and
in float32 however a run keeps them, so a state goes on in any number of processes, with moments in any format.

A document is read in full, and refused where it is of another model or optimizer, before anything is changed.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.base.documents import NAME, OBJECT, SIZE, Fields, Kind, Reader, is_number, one_of, show
from bitplan.base.errors import FileFormatError, StreamStateError
from bitplan.base.records import parse_json
from bitplan.files.safetensors import SafetensorsFile, write_safetensors
from bitplan.plan.names import listed
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.training.host_training import HostTraining
from bitplan.streaming.training.processes import PeerLostError
from bitplan.streaming.training.trained_weight import MASTER, MOMENTS, TrainedWeight

DOCUMENT, VERSION = "bitplan-streamed-training", 1
METADATA = "bitplan_streamed_training"  # key of a file's metadata for everything that is not a tensor

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
    """A document that fits: tensors and steps of each trained parameter, the format of each streamed one, by name."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    steps: Mapping[str, int]
    formats: Mapping[str, str]
    lr: float


def training_document(training: HostTraining, formats: Mapping[str, str]) -> dict[str, Any]:
    """The document; its tensors are the ones in use where these are float32 and whole."""
    tensors = {
        f"{name}.{key}": tensor
        for name, weight in training.trained().items()
        for key, tensor in training.read_tensors(weight).items()
    }
    return {**_without_tensors(training, formats), "tensors": tensors}


def _without_tensors(training: HostTraining, formats: Mapping[str, str]) -> dict[str, Any]:
    return {
        "document": DOCUMENT,
        "version": VERSION,
        "optimizer": _settings(training),
        "lr": float(training.lr),
        "formats": dict(formats),
        "steps": {name: weight.steps for name, weight in training.trained().items()},
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
    by_adamw = {".".join(key) for key, one in training.settings_now().items() if isinstance(one, AdamWSettings)}
    tensors = _read_tensors(reader, item["tensors"], item["steps"], now, by_adamw)
    lr = float(item["lr"])
    if accept_optimizer_change:
        lr = training.lr
    else:
        if lr < 0:
            raise StreamStateError(f"{where}: lr: expected a number of at least 0, got {lr!r}")
        _require_same_optimizer(reader, item["optimizer"], _settings(training))
    return TrainingState(tensors, item["steps"], item["formats"], lr)


def write_training(path: str | Path, training: HostTraining, formats: Mapping[str, str]) -> None:
    """Write the document as a safetensors file, whole or not at all.

    Tensors are read weight by weight, for in float32 all may be larger than the states. Where they are divided and
    writing fails, those to come are read all the same: other processes wait for it.
    """
    shapes, metadata = training.read_shapes(), json.dumps(_without_tensors(training, formats), allow_nan=False)
    entries = [(f"{name}.{key}", torch.float32, shape) for name, keys in shapes.items() for key, shape in keys.items()]
    to_come = iter(training.trained().items())
    try:
        with write_safetensors(path, entries, {METADATA: metadata}) as writer:
            for name, weight in to_come:
                for key, tensor in training.read_tensors(weight).items():
                    writer.write(f"{name}.{key}", tensor.float().contiguous())
    except Exception as error:
        if training.is_sharded and not isinstance(error, PeerLostError):
            for _name, weight in to_come:
                training.read_tensors(weight)
        raise


def load_training(path: str | Path) -> dict[str, Any]:
    """Read a saved training state: its settings and steps as a dict, and under "tensors" the tensors by name."""
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
    norm = None if training.max_norm is None else float(training.max_norm)
    return {**training.settings.document(), "clip_grad_norm": norm}


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
    reader: Reader,
    tensors: Mapping[str, Any],
    steps: Mapping[str, int],
    now: Mapping[str, TrainedWeight],
    by_adamw: Container[str],
) -> dict[str, dict[str, Tensor]]:
    keys = {name: [MASTER] for name in now}
    for name in now:
        if name in by_adamw:
            keys[name] += MOMENTS if steps[name] else ()
        elif steps[name]:  # an optimizer's states have its own names and shapes
            states = [full.removeprefix(f"{name}.") for full in tensors if full.startswith(f"{name}.")]
            keys[name] += [key for key in states if key != MASTER and "." not in key]
    wanted = {f"{name}.{key}": (name, key) for name, parts in keys.items() for key in parts}
    reader.keys("tensors", tensors, dict.fromkeys(wanted, _TENSOR), tuple(wanted))
    for full, (name, key) in wanted.items():
        is_like_weight = name in by_adamw or key == MASTER
        _require_fitting(reader, full, tensors[full], now[name].shape if is_like_weight else None)
    return {name: {key: tensors[f"{name}.{key}"] for key in parts} for name, parts in keys.items()}


def _require_fitting(reader: Reader, key: str, tensor: Tensor, shape: tuple[int, ...] | None) -> None:
    if shape is not None and tuple(tensor.shape) != shape:
        reader.stop(f"tensors: {key} has shape {tuple(tensor.shape)}, and in this model it has {shape}: another model")
    if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
        kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
        reader.stop(f"tensors: {key} must be dense float32 numbers, got {kind}")
    if tensor.is_meta or not bool(tensor.isfinite().all()):
        reader.stop(f"tensors: {key} holds {'no numbers' if tensor.is_meta else 'NaN or infinity'}; take another state")
