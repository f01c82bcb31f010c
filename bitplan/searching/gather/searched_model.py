"""The model that is searched: its weights by the file's names, its logits with any of them replaced."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from bitplan.base.errors import PlanError
from bitplan.base.fingerprints import hash_tensors
from bitplan.files.input_statistics import weight_digest
from bitplan.files.models.morph import places_of
from bitplan.files.open_files import open_tensors
from bitplan.packed.checkpoints.load import device_of
from bitplan.plan import shipped_manifest
from bitplan.plan.format_choices import Stored, choose_formats
from bitplan.plan.plan import Plan, Planned
from bitplan.plan.structure.describe import describe
from bitplan.plan.structure.families import GGUF_MANIFESTS
from bitplan.searching.evidence import StayingTensor
from bitplan.searching.gather.blocks import BlockRunner, Replaced
from bitplan.searching.gather.expert_products import ExpertSlice, items_of_gguf, items_of_stacks
from bitplan.searching.goal import SearchError
from bitplan.searching.groups import group_tensors, groups_seen
from bitplan.searching.runtime_formats import TARGETS, Target

ANY_ROWS = "int8_row"  # a format that holds rows of every length: for asking which tensors are weights at all
UNKNOWN_LAYER = "not the weight of a linear layer or an embedding: nothing is known of its damage, so it stays"


@dataclass(frozen=True)
class WeightSite:
    """A weight, and the layers that use it: several where it is tied."""

    name: str
    shape: tuple[int, ...]
    linears: tuple[nn.Module, ...]
    embeddings: tuple[nn.Module, ...]
    role: str
    slice: ExpertSlice | None = None  # of an expert that the model keeps in a stack
    tensor: str = ""  # the tensor of the file that it is an item of, where it is one


@dataclass(frozen=True)
class SearchedTensor:
    """A tensor that gets a format, and its weights: itself, or the experts of a layer, [experts, outputs, inputs]."""

    shape: tuple[int, ...]
    role: str
    weights: tuple[str, ...]


@dataclass
class SearchSubject:
    """A model in eval mode, run block by block; `names` maps the names of the file to those of its parameters."""

    runner: BlockRunner
    where: str
    sites: dict[str, WeightSite]
    stays: dict[str, StayingTensor]
    names: Mapping[str, str]
    stored: Plan  # every tensor as it is
    path: Path | None = None  # the file or folder that the model came from
    target: Target = TARGETS["bitplan"]
    streamed_numbers: int | None = None  # weights in blocks, where only they count
    experts: Mapping[str, str] = field(default_factory=dict)  # the file's tensors of experts -> the model's layer
    _stack: tuple[str, Tensor] | None = None  # the last that was read: its experts come one after the other

    @property
    def tensors(self) -> dict[str, SearchedTensor]:
        """What gets a format, by the file's names."""
        weights: dict[str, list[WeightSite]] = {}
        for site in self.sites.values():
            weights.setdefault(site.tensor or site.name, []).append(site)
        return {
            name: SearchedTensor(
                (len(own), *own[0].shape) if own[0].tensor else own[0].shape,
                own[0].role,
                tuple(site.name for site in own),
            )
            for name, own in weights.items()
        }

    @property
    def model(self) -> nn.Module:
        return self.runner.model

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def numbers(self) -> int:
        if self.streamed_numbers is not None:
            return self.streamed_numbers
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def fused(self) -> bool:
        return self.target.fused

    @cached_property
    def seen_groups(self) -> dict[str, str]:
        """The groups of projections as the model's view has them; empty where its forward takes no example of ours."""
        try:
            return groups_seen(describe(self.model), self.names)
        except PlanError as error:
            warnings.warn(f"{self.where}: what must have one format is taken from names: {error}", stacklevel=2)
            return {}

    def groups(self, tensors: Iterable[str]) -> dict[str, list[str]]:
        """Tensors that must have one format."""
        return group_tensors(tensors, fused=self.fused, seen=self.seen_groups if self.fused else None)

    def aim_at(self, target: Target) -> None:
        """Leave to a runtime what it packs: no embeddings, or nothing but blocks."""
        self.target = target
        if target.packs_layers:
            self._keep_whole_layers()
        else:
            for name in [name for name, site in self.sites.items() if site.slice is not None and site.slice.transposed]:
                site = self.sites.pop(name)
                reason = f"experts [experts, inputs, outputs]: {target.name} takes those of gpt-oss as they are"
                self.stays[site.tensor] = _staying(self.stored, site.tensor, site.role, reason)
        if target.streamed:
            self._keep_blocks()
        elif not target.embeddings:
            for name in [name for name, site in self.sites.items() if site.embeddings]:
                site = self.sites.pop(name)
                reason = f"an embedding: {target.name} packs linear layers alone"
                self.stays[name] = _staying(self.stored, name, site.role, reason)
        if target.export == "gguf":  # where norms and biases are float32
            self.stays = {
                name: replace(each, nbytes=4 * math.prod(each.shape)) if len(each.shape) < 2 else each
                for name, each in self.stays.items()
            }
        if not self.sites:
            raise SearchError(
                f"{self.where}: no tensor is left that {target.name} packs", settings={"keep": None, "only": None}
            )

    def _keep_whole_layers(self) -> None:
        """Where a tensor of experts stays, so do the others of its layer, or `load_packed` would refuse the folder."""
        kept: dict[str, str] = {}
        for name in self.stays:
            if name in self.experts:
                kept.setdefault(self.experts[name], name)
        for name, site in list(self.sites.items()):
            tensor = site.tensor or name
            first = kept.get(self.experts.get(tensor, ""))
            if first is not None:
                del self.sites[name]
                reason = f"kept with {first}: a packed layer has all its experts packed or none"
                self.stays[tensor] = _staying(self.stored, tensor, site.role, reason)

    def _keep_blocks(self) -> None:
        """What is streamed: the rest never crosses to the device."""
        if not self.runner.blocks:
            raise SearchError(
                f"{self.where}: no list of blocks was found to stream; search for another target",
                settings={"target": None},
            )
        names = {name for name in self.stored.entries if self.runner.is_in_block(self.names.get(name, ""))}
        self.sites = {name: site for name, site in self.sites.items() if (site.tensor or name) in names}
        self.stays = {name: each for name, each in self.stays.items() if name in names}
        self.stored = Plan({name: entry for name, entry in self.stored.entries.items() if name in names})
        self.streamed_numbers = sum(math.prod(entry.shape or ()) for entry in self.stored.entries.values())

    def weight(self, name: str) -> Tensor:
        """A weight by the file's name, in float32 on the device."""
        site = self.sites[name]
        if site.slice is None:
            return self.runner.read(self.names[name]).detach().to(self.device).float()
        if self._stack is None or self._stack[0] != site.slice.stack:
            self._stack = site.slice.stack, self.runner.read(site.slice.stack).detach()
        return site.slice.read(self._stack[1]).to(self.device).float().contiguous()

    def not_finite(self) -> list[str]:
        """Parameters that hold NaN or infinity, by the model's names; of experts that are searched, which ones."""
        broken: list[str] = []
        for name, _ in self.model.named_parameters():
            if not bool(self.runner.read(name).isfinite().all()):
                own = [each.name for each in self.sites.values() if each.slice is not None and each.slice.stack == name]
                broken += [each for each in own if not bool(self.weight(each).isfinite().all())] or [name]
        return broken

    def numbers_with(self, name: str) -> int:
        """How many numbers a weight has; an expert's, those of all experts in its stack."""
        site = self.sites[name]
        if site.slice is None:
            return math.prod(site.shape)
        return self.model.get_parameter(site.slice.stack).numel()

    def replaced_by(self, weights: Callable[[str], Tensor | None]) -> Replaced:
        """What the runner takes, of numbers by the file's names."""
        ours = {self.names[name]: name for name, site in self.sites.items() if site.slice is None}
        stacks: dict[str, list[ExpertSlice]] = {}
        for site in self.sites.values():
            if site.slice is not None:
                stacks.setdefault(site.slice.stack, []).append(site.slice)

        def stacked(name: str) -> Tensor | None:
            found = [(each, weights(each.name)) for each in stacks[name]]
            if all(numbers is None for _, numbers in found):
                return None
            stack = self.runner.read(name).detach().to(self.device).float().clone()
            for each, numbers in found:
                if numbers is not None:
                    each.write(stack, numbers)
            return stack

        return lambda name: weights(ours[name]) if name in ours else stacked(name) if name in stacks else None

    def logits(self, ids: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Logits [windows, length, vocabulary], with some weights replaced."""
        replaced = None if not weights else self.replaced_by(weights.get)
        (states,) = self.runner.through_blocks([ids], replaced)
        with torch.no_grad(), self.runner.outside(replaced):
            return self.runner.leave(states)

    def fingerprint(self) -> str:
        """A hash of all weights, several of them at once: of a large model this takes a while."""

        def digest(name: str) -> str:
            return hash_tensors([self.runner.read(name).detach()])

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            found = list(pool.map(digest, sorted(name for name, _ in self.model.named_parameters())))
        return hashlib.blake2b("".join(found).encode(), digest_size=16).hexdigest()

    def digests(self) -> dict[str, str]:
        """A digest of each weight that may be quantized, of its file if there is one: loading may move rows."""
        found: dict[str, str] = {}
        with ExitStack() as opened:
            file = None if self.path is None else opened.enter_context(open_tensors(self.path))
            for tensor, each in self.tensors.items():
                numbers = self.runner.read(self.names[tensor]) if file is None else file.read_float(tensor)
                is_packed = file is not None and file.spec(tensor).encoded  # and so has outputs as rows
                for name in each.weights:
                    part = self.sites[name].slice if self.sites[name].tensor else None
                    own = numbers if part is None else numbers[part.expert] if is_packed else part.item(numbers)
                    found[name] = weight_digest(own)
        return found


def subject_of(
    model: nn.Module,
    *,
    path: str | Path | None = None,
    read: Callable[[str], Tensor] | None = None,
    slices: Mapping[str, ExpertSlice] | None = None,
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> SearchSubject:
    """The weights of a model that may get another format, and those that stay, with the reasons.

    path     the file or folder that the model came from; names and stored types are then the file's
    read     gives the numbers of a parameter by its name; without it they are the model's own
    slices   tensors of the file that are single experts in a stack of the model
    device   where to compute; without it, where the model is
    """
    model.eval()
    place = device_of(device) if device is not None else _device_of(model)
    runner = BlockRunner(model, model.get_parameter if read is None else read, place)
    runner.check_order(torch.zeros(1, 4, dtype=torch.int64))
    if path is None:
        tensors = {name: _of_parameter(parameter) for name, parameter in model.named_parameters()}
        names, where = {name: name for name in tensors}, type(model).__name__
    else:
        tensors, names = _of_file(model, Path(path))
        names |= {name: each.stack for name, each in (slices or {}).items()}
        where = str(path)
    plan = choose_formats(tensors, ANY_ROWS, keep=keep, only=only, pad=True, where=where)
    stored = choose_formats(tensors, {"*": None}, where=where)
    stacks = dict(slices or {})
    inside = {name: ours for name, ours in names.items() if runner.is_in_block(ours)}
    tensor_of = items_of_stacks(model, inside, stacks)
    if path is not None and not Path(path).is_dir():
        tensor_of |= items_of_gguf(model, runner.is_in_block, Path(path), stacks)
    for name, tensor in tensor_of.items():
        names[name] = names[tensor] = stacks[name].stack
    sites, stays = _split(model, plan, names, stored, stacks, tensor_of)
    if not sites:
        raise SearchError(
            f"{where}: no linear layer or embedding is left to search", settings={"keep": None, "only": None}
        )
    experts = {tensor_of.get(name, name): each.stack.rpartition(".")[0] for name, each in stacks.items()}
    source = None if path is None else Path(path)
    return SearchSubject(runner, where, sites, stays, names, stored, source, experts=experts)


def _device_of(model: nn.Module) -> torch.device:
    """Where the model is; what lies on disk is computed on the CPU."""
    place = next(model.parameters()).device
    return torch.device("cpu") if place.type == "meta" else place


def _of_parameter(parameter: nn.Parameter) -> Stored:
    return Stored(tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))


def _of_file(model: nn.Module, path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """What the file holds, and under which name of the model each tensor lies."""
    known = {place.name for place in places_of(model)}
    families = [shipped_manifest(family).aliases for family in GGUF_MANIFESTS]
    tensors, names = {}, {}
    with open_tensors(path) as file:
        for name, spec in file.specs.items():
            tensors[name] = Stored(spec.shape, spec.held, spec.encoded)
            ours = [name, *(aliases.to_ours(name) for aliases in families)]
            found = next((each for each in ours if each in known), None)
            if found is not None:
                names[name] = found
    return tensors, names


def _split(
    model: nn.Module,
    plan: Plan,
    names: Mapping[str, str],
    stored: Plan,
    slices: Mapping[str, ExpertSlice],
    tensor_of: Mapping[str, str],
) -> tuple[dict[str, WeightSite], dict[str, StayingTensor]]:
    places = places_of(model)
    by_name = {place.name: place.parameter for place in places}
    users: dict[int, list[nn.Module]] = {}
    for place in places:
        users.setdefault(id(place.parameter), []).append(place.module)
    sites: dict[str, WeightSite] = {}
    stays: dict[str, StayingTensor] = {}
    seen: dict[int, str] = {}
    items: dict[str, list[str]] = {}
    for item, tensor in tensor_of.items():
        items.setdefault(tensor, []).append(item)
    for name, entry in plan.entries.items():
        parameter = by_name.get(names.get(name, ""))
        modules = [] if parameter is None else users[id(parameter)]
        linears = tuple(module for module in modules if isinstance(module, nn.Linear))
        embeddings = tuple(module for module in modules if isinstance(module, nn.Embedding))
        reason, free = entry.choice.reason, _may_change(entry)
        if free and name in slices:
            sites[name] = WeightSite(name, entry.shape or (), (), (), entry.role, slices[name])
            continue
        if free and name in items:
            assert parameter is not None  # the stack that they are in
            for item in items[name]:
                shape = tuple(slices[item].read(parameter).shape)
                sites[item] = WeightSite(item, shape, (), (), entry.role, slices[item], name)
            continue
        if free and parameter is not None and (linears or embeddings):
            if id(parameter) not in seen:
                seen[id(parameter)] = name
                sites[name] = WeightSite(name, tuple(parameter.shape), linears, embeddings, entry.role)
                continue
            reason = f"tied to {seen[id(parameter)]}"
        elif free:
            reason = UNKNOWN_LAYER
        stays[name] = _staying(stored, name, entry.role, reason)
    return sites, stays


def _may_change(entry: Planned) -> bool:
    """Whether a tensor is a weight that nobody wants to stay; one that is packed already stays in its own format."""
    return entry.stored is None and entry.choice.format == ANY_ROWS and entry.choice.cause != "kept"


def _staying(stored: Plan, name: str, role: str, reason: str) -> StayingTensor:
    here = stored.entries[name]
    return StayingTensor(here.choice.format, here.shape or (), role, here.stored, here.nbytes, reason)
