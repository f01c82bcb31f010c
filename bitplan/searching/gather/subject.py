"""The model that is searched: its weights by the file's names, its logits with any of them replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.measure.calibration import hash_tensors
from bitplan.plan import shipped_manifest
from bitplan.plan.choose import Stored, choose_formats
from bitplan.plan.plan import Plan
from bitplan.runtime.causal_lm import CausalLM, logits_of
from bitplan.searching.errors import SearchError
from bitplan.searching.evidence import StayingTensor
from bitplan.store.files.open_files import open_tensors
from bitplan.store.models.morph import places_of
from bitplan.store.rounding.evidence import weight_digest

GGUF_FAMILIES = ("llama", "qwen", "gemma", "phi3")
ANY_ROWS = "int8_row"  # a format that holds rows of every length: for asking which tensors are weights at all
UNKNOWN_LAYER = "not the weight of a linear layer or an embedding: nothing is known of its damage, so it stays"


@dataclass(frozen=True)
class WeightSite:
    """A weight, and the layers that use it: several where it is tied."""

    name: str
    parameter: nn.Parameter
    linears: tuple[nn.Module, ...]
    embeddings: tuple[nn.Module, ...]
    role: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)


@dataclass
class SearchSubject:
    """A model in eval mode; `names` maps the names of the file to those of its parameters."""

    model: nn.Module
    where: str
    sites: dict[str, WeightSite]
    stays: dict[str, StayingTensor]
    names: Mapping[str, str]
    stored_bytes: int
    path: Path | None = None  # the file or folder that the model came from
    fused: bool = True

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def logits(self, ids: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Logits [windows, length, vocabulary], with some weights replaced."""
        ids = ids.to(self.device)
        if not weights:
            return self.logits_of(self.model, ids)
        replaced = {self.names[name]: tensor.to(self.device) for name, tensor in weights.items()}
        caller = _Caller(self.model, self.logits_of)
        named = {f"model.{name}": each for name, each in replaced.items()}
        logits: Tensor = torch.func.functional_call(caller, named, (ids,))
        return logits

    def logits_of(self, model: nn.Module, ids: Tensor) -> Tensor:
        """The logits of this model or of a twin of it."""
        ids = ids.to(self.device)
        if hasattr(model, "config") and hasattr(model, "get_output_embeddings"):
            return logits_of(model, ids)
        output: Any = model(ids)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits

    def fingerprint(self) -> str:
        """A hash of all weights."""
        return hash_tensors(parameter for _, parameter in sorted(self.model.named_parameters()))

    def digests(self) -> dict[str, str]:
        """A digest of each weight that may be quantized, of its file if there is one: loading may move rows."""
        if self.path is None:
            return {name: weight_digest(site.parameter) for name, site in self.sites.items()}
        with open_tensors(self.path) as file:
            return {name: weight_digest(file.read_float(name)) for name in self.sites}


class _Caller(nn.Module):
    """functional_call calls a module: this one calls the model as the subject does."""

    def __init__(self, model: nn.Module, call: Any) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._call(self.model, ids)
        return logits


def subject_of(
    source: CausalLM | nn.Module,
    *,
    path: str | Path | None = None,
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
) -> SearchSubject:
    """The weights of a model that may get another format, and those that stay, with the reasons.

    path   the file or folder that the model came from; names and stored types are then the file's
    """
    model = source.model if isinstance(source, CausalLM) else source
    model.eval()
    if path is None:
        tensors = {name: _of_parameter(parameter) for name, parameter in model.named_parameters()}
        names, where = {name: name for name in tensors}, type(model).__name__
    else:
        tensors, names = _of_file(model, Path(path))
        where = str(path)
    plan = choose_formats(tensors, ANY_ROWS, keep=keep, only=only, pad=True, where=where)
    stored = choose_formats(tensors, {"*": None}, where=where)
    sites, stays = _split(model, plan, names, stored)
    if not sites:
        raise SearchError(f"{where}: no linear layer or embedding is left to search; check --keep and --only")
    return SearchSubject(model, where, sites, stays, names, stored.nbytes, None if path is None else Path(path))


def _of_parameter(parameter: nn.Parameter) -> Stored:
    return Stored(tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))


def _of_file(model: nn.Module, path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """What the file holds, and under which name of the model each tensor lies."""
    known = {place.name for place in places_of(model)}
    families = [shipped_manifest(family).aliases for family in GGUF_FAMILIES]
    tensors, names = {}, {}
    with open_tensors(path) as file:
        for name, spec in file.specs.items():
            tensors[name] = Stored(spec.shape, spec.format if spec.encoded else spec.dtype_name, spec.encoded)
            ours = [name, *(aliases.to_ours(name) for aliases in families)]
            found = next((each for each in ours if each in known), None)
            if found is not None:
                names[name] = found
    return tensors, names


def _split(
    model: nn.Module, plan: Plan, names: Mapping[str, str], stored: Plan
) -> tuple[dict[str, WeightSite], dict[str, StayingTensor]]:
    places = places_of(model)
    by_name = {place.name: place.parameter for place in places}
    users: dict[int, list[nn.Module]] = {}
    for place in places:
        users.setdefault(id(place.parameter), []).append(place.module)
    sites: dict[str, WeightSite] = {}
    stays: dict[str, StayingTensor] = {}
    seen: dict[int, str] = {}
    for name, entry in plan.entries.items():
        parameter = by_name.get(names.get(name, ""))
        modules = [] if parameter is None else users[id(parameter)]
        linears = tuple(module for module in modules if isinstance(module, nn.Linear))
        embeddings = tuple(module for module in modules if isinstance(module, nn.Embedding))
        reason = entry.choice.reason
        if entry.stored is None and parameter is not None and (linears or embeddings):
            if id(parameter) not in seen:
                seen[id(parameter)] = name
                sites[name] = WeightSite(name, parameter, linears, embeddings, entry.role)
                continue
            reason = f"tied to {seen[id(parameter)]}"
        elif entry.stored is None:
            reason = UNKNOWN_LAYER
        here = stored.entries[name]
        stays[name] = StayingTensor(here.choice.format, here.shape or (), entry.role, here.stored, here.nbytes, reason)
    return sites, stays
