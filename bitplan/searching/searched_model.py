"""The model that is searched: its weights by the file's names, its logits with any of them replaced; and its text.

Tensors that must have one format are a group: those that runtimes fuse, the experts of a layer, and tied weights. Tied
weights are one tensor under two names, so they are together already. What a runtime fuses is what reads one input, as
the model's view has it (`bitplan.describe`); names decide alone where there is no view, by the table of families.

transformers keeps the experts of a layer as one tensor, [experts, outputs, inputs] or, gpt-oss's, [experts, inputs,
outputs]; files have them so, too, or one by one, or (GGUF) gate and up apart. An `ExpertSlice` says where one lies.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from bitplan.base.errors import FileFormatError, MeasureError, PlanError
from bitplan.base.hardware import free_memory, hash_tensors
from bitplan.files.headers import check_model_source
from bitplan.files.input_statistics import expert_name, weight_digest
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import CONFIG, QUANTIZATION_KEYS, read_config
from bitplan.files.tensor_file import TensorSpec, spec_of
from bitplan.files.tensor_recipes import FilePiece, assign
from bitplan.packed.checkpoints.causal_lm import (
    CausalLM,
    load_causal_lm,
    no_causal_model,
    read_tokenizer,
    require_causal,
)
from bitplan.packed.checkpoints.load import device_of, empty_model, read_plain
from bitplan.packed.language.own_text import write_own_text
from bitplan.packed.language.perplexity import spread_windows
from bitplan.packed.layer_replacement import are_columns, stack_of
from bitplan.plan.format_choices import choose_formats
from bitplan.plan.manifest import name_in_model
from bitplan.plan.names import natural_order, split_layer
from bitplan.plan.plan import Plan, Planned
from bitplan.plan.structure.describe import describe, is_product
from bitplan.plan.structure.families import joined_name
from bitplan.plan.structure.model_view import ModelView
from bitplan.plan.structure.packable import packed_kind
from bitplan.plan.structure.parameters import named_parameters_of
from bitplan.searching.blocks import BlockRunner, Replaced
from bitplan.searching.evidence import StayingTensor
from bitplan.searching.goal import WINDOWS, SearchError, Stage, no_stage
from bitplan.searching.runtime_formats import TARGETS, Target


def group_tensors(
    tensors: Iterable[str], *, fused: bool = True, joined_names: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Groups in natural order of their names.

    fused          False where the runtime takes q, k, v, gate and up one by one
    joined_names   the groups of tensors that a view knows (`groups_seen`)
    """
    groups: dict[str, list[str]] = {}
    for tensor in natural_order(tensors):
        joined = joined_names.get(tensor) if joined_names is not None and fused else None
        groups.setdefault(joined or joined_name(tensor, joined=fused), []).append(tensor)
    return {name: groups[name] for name in natural_order(groups)}


def groups_seen(view: ModelView, names: Mapping[str, str]) -> dict[str, str]:
    """The group of every projection that a view saw, by the file's names; `names` maps those to parameters.

    Projections of one input that runtimes fuse share a group, whatever they are called; others are alone.
    """
    file_name = {parameter: name for name, parameter in names.items()}
    groups = {}
    for linear in view.linears:
        name = file_name.get(linear.weight)
        if name is not None and not linear.experts:
            groups[name] = name.removesuffix(".weight")
    for weights in view.joined:
        members = [file_name[weight] for weight in weights if weight in file_name]
        if len(members) > 1:
            word = "gate_up" if view.role(weights[0]) in ("gate", "up") else "qkv"
            together = ".".join([*_shared_parts(members), word])
            groups |= dict.fromkeys(members, together)
    return groups


def _shared_parts(names: Sequence[str]) -> list[str]:
    """The leading parts that dotted names have in common."""
    shared = []
    for parts in zip(*(name.removesuffix(".weight").split(".") for name in names), strict=False):
        if len({*parts}) > 1:
            break
        shared.append(parts[0])
    return shared


@dataclass(frozen=True)
class ExpertSlice:
    """Where one expert's weight lies: rows of an item of a stack that the model keeps as one parameter."""

    name: str  # the file's, or `expert_name` of it
    stack: str  # the model's parameter
    expert: int
    rows: slice
    transposed: bool = False  # the stack is [experts, inputs, outputs]

    def item(self, stack: Tensor) -> Tensor:
        """All outputs of this expert, [outputs, inputs]."""
        return stack[self.expert].T if self.transposed else stack[self.expert]

    def read(self, stack: Tensor) -> Tensor:
        """Cut this expert's weight out of the numbers of its stack."""
        return self.item(stack)[self.rows]

    def write(self, stack: Tensor, numbers: Tensor) -> None:
        """Write new numbers of this weight into its stack."""
        self.read(stack).copy_(numbers)  # a view, however the stack lies


_GGUF = re.compile(r"blk\.([0-9]+)\.ffn_(gate|up|down)_exps\.weight")


def items_of_stacks(model: nn.Module, names: Mapping[str, str], slices: dict[str, ExpertSlice]) -> dict[str, str]:
    """Add to `slices` each expert of tensors that stack all experts of a layer, if a packed layer can run them.

    `names` are the model's names of parameters by the file's names. Returned is the tensor's name by the expert's name.
    """
    parameters = {named.name: named for named in named_parameters_of(model)}
    tensor_names: dict[str, str] = {}
    for tensor, ours in names.items():
        named = parameters[ours]
        is_stack = named.parameter.ndim == 3 and packed_kind(named.module, named.local) == "StackedExperts"
        if tensor in slices or not is_stack:
            continue
        transposed = are_columns(named.module, named.local)
        for index in range(len(named.parameter)):
            name = expert_name(tensor, index)
            tensor_names[name] = tensor
            slices[name] = ExpertSlice(name, ours, index, slice(None), transposed)
    return tensor_names


def items_of_gguf(
    model: nn.Module, is_in_block: Callable[[str], bool], path: Path, slices: dict[str, ExpertSlice]
) -> dict[str, str]:
    """Map experts' weights to a GGUF file's tensors, with gate and up apart; numbers say whether rows lie right."""
    stacks = {
        (split_layer(named.name)[1], named.local == stack_of(named.module, "down")): named
        for named in named_parameters_of(model)
        if is_in_block(named.name)
        and packed_kind(named.module, named.local) == "StackedExperts"
        and not are_columns(named.module, named.local)
    }
    tensor_of_item: dict[str, str] = {}
    with open_tensors(path) as file:
        for tensor, spec in file.specs.items():
            named = _GGUF.fullmatch(tensor)
            source = None if named is None else stacks.get((named[1], named[2] == "down"))
            if named is None or source is None:
                continue
            outputs = spec.shape[1]
            rows = slice(outputs, 2 * outputs) if named[2] == "up" else slice(0, outputs)
            items = [
                ExpertSlice(expert_name(tensor, index), source.name, index, rows) for index in range(spec.shape[0])
            ]
            stack, numbers = source.parameter.detach(), file.read_float(tensor)
            if len(stack) == len(items) and torch.equal(items[-1].read(stack).float().cpu(), numbers[-1].float()):
                slices.update({item.name: item for item in items})
                tensor_of_item |= {item.name: tensor for item in items}
    return tensor_of_item


ANY_ROWS = "int8_row"  # a format that holds rows of every length: for asking which tensors are weights at all
UNKNOWN_LAYER = "not the weight of a linear layer or an embedding: nothing is known of its damage, so it stays"


@dataclass(frozen=True)
class WeightSite:
    """A weight to find a format for, and the layers that multiply by it or look its rows up (several if tied)."""

    name: str
    shape: tuple[int, ...]
    linears: tuple[nn.Module, ...]
    embeddings: tuple[nn.Module, ...]
    role: str
    slice: ExpertSlice | None = None  # of an expert that the model keeps in a stack
    tensor: str = ""  # the tensor of the file that it is an item of, where it is one
    transposed: bool = False  # the model has [inputs, outputs]

    def turned(self, numbers: Tensor) -> Tensor:
        """The model's numbers of the weight as [outputs, inputs], or the reverse."""
        return numbers.T if self.transposed else numbers


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
        """The tensors that the search chooses formats for, by the file's names; experts of one stack are one tensor."""
        weights: dict[str, list[WeightSite]] = {}
        for site in self.sites.values():
            weights.setdefault(site.tensor or site.name, []).append(site)
        return {
            name: SearchedTensor(
                (len(sites), *sites[0].shape) if sites[0].tensor else sites[0].shape,
                sites[0].role,
                tuple(site.name for site in sites),
            )
            for name, sites in weights.items()
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
        """Groups of tensors that must have one format, by the group's name."""
        return group_tensors(tensors, fused=self.fused, joined_names=self.seen_groups if self.fused else None)

    def aim_at(self, target: Target) -> None:
        """Take out of the search what a runtime does not pack, such as embeddings, or all but blocks."""
        self.target = target
        if target.packs_layers:
            self._keep_whole_layers()
        else:
            for name in [name for name, site in self.sites.items() if site.slice is not None and site.slice.transposed]:
                site = self.sites.pop(name)
                reason = f"experts [experts, inputs, outputs]: {target.name} takes those of gpt-oss as they are"
                self.stays[site.tensor] = _staying(self.stored, site.tensor, site.role, reason)
            for name in [name for name, site in self.sites.items() if site.transposed]:
                reason = f"a matrix [inputs, outputs], which {target.name} does not pack"
                self.stays[name] = _staying(self.stored, name, self.sites.pop(name).role, reason)
        if target.streamed:
            self._keep_blocks()
        elif not target.embeddings:
            for name in [name for name, site in self.sites.items() if site.embeddings]:
                site = self.sites.pop(name)
                reason = f"an embedding: {target.name} packs linear layers alone"
                self.stays[name] = _staying(self.stored, name, site.role, reason)
        if target.export == "gguf":  # where norms and biases are float32
            self.stays = {
                name: replace(tensor, nbytes=4 * math.prod(tensor.shape)) if len(tensor.shape) < 2 else tensor
                for name, tensor in self.stays.items()
            }
        if not self.sites:
            raise SearchError(
                f"{self.where}: no tensor is left that {target.name} packs", settings={"keep": None, "only": None}
            )

    def _keep_whole_layers(self) -> None:
        """Keep all experts of a layer where a tensor of them stays, or `load_packed` would refuse the folder."""
        first_kept: dict[str, str] = {}
        for name in self.stays:
            if name in self.experts:
                first_kept.setdefault(self.experts[name], name)
        for name, site in list(self.sites.items()):
            tensor = site.tensor or name
            first = first_kept.get(self.experts.get(tensor, ""))
            if first is not None:
                del self.sites[name]
                reason = f"kept with {first}: a packed layer has all its experts packed or none"
                self.stays[tensor] = _staying(self.stored, tensor, site.role, reason)

    def _keep_blocks(self) -> None:
        """Narrow the search to weights in blocks, the only ones that are streamed; an error if there are none."""
        if not self.runner.blocks:
            raise SearchError(
                f"{self.where}: no list of blocks was found to stream; search for another target",
                settings={"target": None},
            )
        names = {name for name in self.stored.entries if self.runner.is_in_block(self.names.get(name, ""))}
        self.sites = {name: site for name, site in self.sites.items() if (site.tensor or name) in names}
        self.stays = {name: tensor for name, tensor in self.stays.items() if name in names}
        self.stored = Plan({name: entry for name, entry in self.stored.entries.items() if name in names})
        self.streamed_numbers = sum(math.prod(entry.shape or ()) for entry in self.stored.entries.values())

    def weight(self, name: str) -> Tensor:
        """A weight by the file's name, in float32 on the device."""
        site = self.sites[name]
        if site.slice is None:
            numbers = self.runner.read(self.names[name]).detach().to(self.device).float()
            return site.turned(numbers).contiguous()
        if self._stack is None or self._stack[0] != site.slice.stack:
            self._stack = site.slice.stack, self.runner.read(site.slice.stack).detach()
        return site.slice.read(self._stack[1]).to(self.device).float().contiguous()

    def not_finite(self) -> list[str]:
        """Parameters that hold NaN or infinity, by the model's names; of experts that are searched, which ones."""
        broken: list[str] = []
        for name, _ in self.model.named_parameters():
            if not bool(self.runner.read(name).isfinite().all()):
                expert_names = [
                    site.name for site in self.sites.values() if site.slice is not None and site.slice.stack == name
                ]
                broken += [name for name in expert_names if not bool(self.weight(name).isfinite().all())] or [name]
        return broken

    def numbers_with(self, name: str) -> int:
        """The number of elements of a weight; for an expert's, that of the tensor that stacks all experts."""
        site = self.sites[name]
        if site.slice is None:
            return math.prod(site.shape)
        return self.model.get_parameter(site.slice.stack).numel()

    def replaced_by(self, weights: Callable[[str], Tensor | None]) -> Replaced:
        """Turn `weights`, a function of the file's names, into one of the model's names, as the runner takes it.

        Either returns the new numbers of a weight, or None to keep it; experts are written into a copy of their stack.
        """
        ours = {self.names[name]: site for name, site in self.sites.items() if site.slice is None}
        stacks: dict[str, list[ExpertSlice]] = {}
        for site in self.sites.values():
            if site.slice is not None:
                stacks.setdefault(site.slice.stack, []).append(site.slice)

        def stacked(name: str) -> Tensor | None:
            slices_and_numbers = [(expert, weights(expert.name)) for expert in stacks[name]]
            if all(numbers is None for _, numbers in slices_and_numbers):
                return None
            stack = self.runner.read(name).detach().to(self.device).float().clone()
            for expert, numbers in slices_and_numbers:
                if numbers is not None:
                    expert.write(stack, numbers)
            return stack

        def replaced(name: str) -> Tensor | None:
            if name not in ours:
                return stacked(name) if name in stacks else None
            numbers = weights(ours[name].name)
            return None if numbers is None else ours[name].turned(numbers)

        return replaced

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
            digests = list(pool.map(digest, sorted(name for name, _ in self.model.named_parameters())))
        return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()

    def digests(self) -> dict[str, str]:
        """A digest of each weight that may be quantized, of its file if there is one: loading may move rows."""
        digests: dict[str, str] = {}
        with ExitStack() as opened:
            file = None if self.path is None else opened.enter_context(open_tensors(self.path))
            for tensor, searched in self.tensors.items():
                numbers = self.runner.read(self.names[tensor]) if file is None else file.read_float(tensor)
                for name in searched.weights:
                    site = self.sites[name]
                    part = site.slice if site.tensor else None
                    weight = site.turned(numbers) if part is None else part.item(numbers)
                    digests[name] = weight_digest(weight)
        return digests


def subject_of(
    model: nn.Module,
    *,
    path: str | Path | None = None,
    read: Callable[[str], Tensor] | None = None,
    slices: Mapping[str, ExpertSlice] | None = None,
    renamed: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> SearchSubject:
    """The weights of a model that may get another format, and those that stay, with the reasons.

    path     the file or folder that the model came from; names and stored types are then the file's
    read     gives the numbers of a parameter by its name; without it they are the model's own
    slices   tensors of the file that are single experts in a stack of the model
    renamed  the model's names of parameters that have others in the file
    device   where to compute; without it, where the model is
    """
    model.eval()
    torch_device = device_of(device) if device is not None else _device_of(model)
    runner = BlockRunner(model, model.get_parameter if read is None else read, torch_device)
    runner.check_order(torch.zeros(1, 4, dtype=torch.int64))
    if path is None:
        tensors = {name: spec_of(name, parameter) for name, parameter in model.named_parameters()}
        names, where = {name: name for name in tensors}, type(model).__name__
    else:
        tensors, names = _of_file(model, Path(path))
        names |= {**(renamed or {})} | {name: expert.stack for name, expert in (slices or {}).items()}
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
    experts = {tensor_of.get(name, name): expert.stack.rpartition(".")[0] for name, expert in stacks.items()}
    source = None if path is None else Path(path)
    return SearchSubject(runner, where, sites, stays, names, stored, source, experts=experts)


def _device_of(model: nn.Module) -> torch.device:
    """Give the device of the model; what lies on disk is computed on the CPU."""
    first_device = next(model.parameters()).device
    return torch.device("cpu") if first_device.type == "meta" else first_device


def _of_file(model: nn.Module, path: Path) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Read a file's headers: the spec of each tensor, and the model's name of those that are parameters of `model`."""
    parameter_names = {named.name for named in named_parameters_of(model)}
    with open_tensors(path) as file:
        tensors = dict(file.specs)
    return tensors, {name: ours for name in tensors if (ours := name_in_model(name, parameter_names)) is not None}


def _split(
    model: nn.Module,
    plan: Plan,
    names: Mapping[str, str],
    stored: Plan,
    slices: Mapping[str, ExpertSlice],
    tensor_of: Mapping[str, str],
) -> tuple[dict[str, WeightSite], dict[str, StayingTensor]]:
    parameters = named_parameters_of(model)
    by_name = {named.name: named.parameter for named in parameters}
    users: dict[int, list[nn.Module]] = {}
    for named in parameters:
        users.setdefault(id(named.parameter), []).append(named.module)
    sites: dict[str, WeightSite] = {}
    stays: dict[str, StayingTensor] = {}
    first_names: dict[int, str] = {}
    items: dict[str, list[str]] = {}
    for item, tensor in tensor_of.items():
        items.setdefault(tensor, []).append(item)
    for name, entry in plan.entries.items():
        parameter = by_name.get(names.get(name, ""))
        modules = [] if parameter is None else users[id(parameter)]
        linears = tuple(module for module in modules if is_product(module))
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
            if id(parameter) not in first_names:
                first_names[id(parameter)] = name
                transposed = any(are_columns(module, "weight") for module in linears)
                shape = tuple(parameter.shape)[:: -1 if transposed else 1]
                sites[name] = WeightSite(name, shape, linears, embeddings, entry.role, transposed=transposed)
                continue
            reason = f"tied to {first_names[id(parameter)]}"
        elif free:
            reason = UNKNOWN_LAYER
        stays[name] = _staying(stored, name, entry.role, reason)
    return sites, stays


def _may_change(entry: Planned) -> bool:
    """Whether a tensor is a weight that nobody wants to stay; one that is packed already stays in its own format."""
    return entry.stored is None and entry.choice.format == ANY_ROWS and entry.choice.cause != "kept"


def _staying(stored: Plan, name: str, role: str, reason: str) -> StayingTensor:
    entry = stored.entries[name]
    return StayingTensor(entry.choice.format, entry.shape or (), role, entry.stored, entry.nbytes, reason)


# ---- model and text of a search --------------------------------------------------------------------------------------

CHECKS, HELD_OUT = 4, 12
LEAST_WINDOWS = 4


@dataclass(frozen=True)
class SearchText:
    """Windows of token ids: no window serves twice. `unscored` tokens at the head of each are context only.

    kinds   where the text is of several kinds: the kind of each window of the proof; check_kinds, of the checks
    """

    statistics: list[Tensor]
    checks: list[Tensor]
    proof: list[Tensor]
    unscored: int
    kinds: tuple[str, ...] = ()
    check_kinds: tuple[str, ...] = ()


# Plain, or contents by the names of their files, of which each is a kind of text; None is text that the model writes.
Text = str | Mapping[str, str | None]


def prepare(
    model: nn.Module | str | Path,
    batches: Sequence[Tensor] | None,
    text: Text | None,
    held_out: Sequence[Tensor] | str | Mapping[str, str] | None,
    *,
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
    context: int | None = None,
    windows: int = WINDOWS,
    device: str | None = None,
    stage: Stage = no_stage,
) -> tuple[SearchSubject, SearchText]:
    """Open the model where it is a path, cut the text, and keep some of it for the proof.

    Of several kinds of text each gives as many windows, for statistics, checks and proof. Text that the model writes
    beside others is for the statistics alone, in as many windows as all others have; without others it is for all.
    """
    if isinstance(model, nn.Module):
        if batches is None or isinstance(held_out, str | Mapping):
            raise SearchError("a model in memory has no tokenizer: batches and held_out must be token ids")
        proof = None if held_out is None else _windows_of_batches(held_out)
        subject = subject_of(model, keep=keep, only=only, device=device)
        return subject, _split_text(_windows_of_batches(batches), proof, windows, 1)
    if batches is None and text is None:
        raise SearchError("a search needs text, or batches of token ids", settings={"text": "FILE"})
    lm, subject = _read_model(Path(model), keep, only, device)
    length = min(512, lm.positions or 512) if context is None else context
    lm.check_context(length)
    if isinstance(held_out, str | Mapping):
        proof = _whole(lm.windows(lm.plain(held_out), length))
    else:
        proof = None if held_out is None else _windows_of_batches(held_out)
    if not isinstance(text, Mapping):
        calibration = _whole(lm.windows(text, length)) if text is not None else _windows_of_batches(batches or ())
        return subject, _split_text(calibration, proof, windows, len(lm.prefix))
    given = {name: content for name, content in text.items() if content is not None}
    if not given:
        wanted = windows + CHECKS
        calibration = _own_text(lm, subject, wanted if proof is not None else math.ceil(wanted * 4 / 3), length, stage)
        return subject, _split_text(calibration, proof, windows, len(lm.prefix))
    if proof and len(given) > 1:
        raise SearchError("text of several kinds keeps the last quarter of each for the proof; give no other for it")
    cuts = {
        name: _split_text(
            _whole(lm.windows(lm.plain({name: content}), length)),
            proof,
            math.ceil(windows / len(given)),
            len(lm.prefix),
            f"{name}: the text",
        )
        for name, content in given.items()
    }
    cut = _joined_cuts(cuts)
    if len(given) < len(text):
        written = _own_text(lm, subject, len(cut.statistics), length, stage)
        # In turns, for gradients are of the first windows.
        cut = replace(cut, statistics=[window for pair in zip(cut.statistics, written, strict=True) for window in pair])
    return subject, cut


def _own_text(lm: CausalLM, subject: SearchSubject, count: int, length: int, stage: Stage) -> list[Tensor]:
    """Let the model write windows of text; one that lies on disk is read as a whole for that."""
    if lm.device.type == "meta":
        needed, free = 4 * subject.numbers, free_memory()
        if subject.device.type == "cpu" and needed > free:
            raise SearchError(
                f"{lm.where}: to write text itself, the model is in memory as a whole, in float32: "
                f"{needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; give text of a file alone",
                settings={"text": "FILE"},
            )
        lm = load_causal_lm(lm.where)
    with stage("writing text", count * length) as advance:
        writer = lm.to(subject.device, torch.float32)
        return write_own_text(writer, count, length, on_tokens=lambda tokens: advance(tokens, "tokens"))


def _joined_cuts(cuts: Mapping[str, SearchText]) -> SearchText:
    """The windows of all kinds, one kind after the other."""

    def windows(part: str) -> list[Tensor]:
        return [window for cut in cuts.values() for window in getattr(cut, part)]

    def kinds(part: str) -> tuple[str, ...]:
        return tuple(name for name, cut in cuts.items() for _ in getattr(cut, part)) if len(cuts) > 1 else ()

    unscored = next(iter(cuts.values())).unscored
    parts = (windows("statistics"), windows("checks"), windows("proof"))
    return SearchText(*parts, unscored, kinds("proof"), kinds("checks"))


def open_subject(path: Path, device: str | None) -> SearchSubject:
    """Open a model from a path with all weights that may get a format as the subject of a search."""
    return _read_model(path, (), (), device)[1]


def _read_model(
    path: Path, keep: Sequence[str], only: Sequence[str], device: str | None
) -> tuple[CausalLM, SearchSubject]:
    """Plain weights of a folder stay on disk; GGUF files and packed models are decoded as a whole."""
    check_model_source(path, None)
    _refuse_packed_gpt_oss(path)
    if not is_plain_folder(path):
        lm = load_causal_lm(path)
        return lm, subject_of(lm.model, path=path, keep=keep, only=only, device=device)
    on_disk = ModelOnDisk(path)
    slices = {
        name: ExpertSlice(name, stack, piece.item, slice(piece.start, piece.start + piece.shape[0]))
        for name, (stack, piece) in on_disk.stacked.items()
        if piece.item is not None
    }
    subject = subject_of(
        on_disk.lm.model,
        path=path,
        read=on_disk.read,
        slices=slices,
        renamed=on_disk.renamed,
        keep=keep,
        only=only,
        device=device,
    )
    require_causal(on_disk.lm, subject.logits)
    return on_disk.lm, subject


class ModelOnDisk:
    """A model with its parameters on the meta device; `read` gives the numbers of one of them.

    A search goes through a model block by block: memory holds the tensors in use alone. The file stays open as long as
    this object lives.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = empty_model(folder, read_config(folder), torch.float32, torch.device("cpu"))
        if getattr(model, "get_output_embeddings", lambda: None)() is None:
            raise MeasureError(no_causal_model(str(folder), type(model).__name__))
        self._file = open_tensors(folder)  # its header alone takes longer to read than most tensors
        weakref.finalize(self, self._file.close)
        assignment = assign(model, self._file, str(folder))
        stored = {name: spec.nbytes for name, spec in self._file.specs.items()}
        self._recipes = {target: recipe for recipe in assignment.recipes for target in recipe.targets}
        for alias, name in assignment.ties.items():
            _share(model, alias, name)
        self.lm = CausalLM(model.eval(), read_tokenizer(folder), str(folder), stored)

    @property
    def stacked(self) -> dict[str, tuple[str, FilePiece]]:
        """Tensors of the file that the model keeps as items of a stack: the stack, and where they lie in it."""
        return {
            piece.name: (target, piece)
            for target, recipe in self._recipes.items()
            if recipe.converter is None
            for piece in recipe.pieces
            if piece.item is not None
        }

    @property
    def renamed(self) -> dict[str, str]:
        """The model's names of tensors that have others in the file, such as those of a model without its head."""
        whole = {recipe.pieces[0]: target for target, recipe in self._recipes.items() if recipe.is_one}
        return {piece.name: target for piece, target in whole.items() if piece.item is None and piece.name != target}

    def read(self, name: str) -> Tensor:
        """A parameter by its name in the model, in the type of the file."""
        return read_plain(self._recipes[name], self._file, self.lm.model)[name]


def is_plain_folder(path: Path) -> bool:
    """Whether a model is a folder of plain weights: packed ones and GGUF files are decoded as a whole."""
    if not path.is_dir() or not (path / CONFIG).is_file() or QUANTIZATION_KEYS & read_config(path).keys():
        return False
    try:
        with open_tensors(path) as file:
            return not any(spec.encoded for spec in file.specs.values())
    except FileFormatError:
        return False  # the reader of the model will say what is wrong


def _share(model: nn.Module, alias: str, name: str) -> None:
    owner, _, local = alias.rpartition(".")
    model.get_submodule(owner)._parameters[local] = model.get_parameter(name)


def _refuse_packed_gpt_oss(path: Path) -> None:
    """Raise for gpt-oss as published, in MXFP4: nothing could be packed beside its experts."""
    quantization = read_config(path).get("quantization_config") if path.is_dir() and (path / CONFIG).is_file() else None
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        raise SearchError(
            f"{path}: its experts are in MXFP4, and a search begins with floats: search WIDE, into which `bitplan "
            f"gpt-oss convert {path} WIDE` decodes them without a change of a number",
            settings={"to": "hf", "experts": "bfloat16"},
        )


def _whole(windows: Sequence[Tensor]) -> list[Tensor]:
    return [window for window in windows if len(window) == len(windows[0])]


def _windows_of_batches(batches: Sequence[Tensor]) -> list[Tensor]:
    for batch in batches:
        if not isinstance(batch, Tensor) or batch.is_floating_point() or batch.dim() not in (1, 2):
            came = f"{batch.dtype} {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise SearchError(f"batches must be token ids, whole numbers [length] or [windows, length], got {came}")
    return [row for batch in batches for row in (batch if batch.dim() == 2 else batch[None])]


def _split_text(
    calibration: Sequence[Tensor],
    proof: Sequence[Tensor] | None,
    windows: int,
    unscored: int,
    label: str = "the text",
) -> SearchText:
    if len(calibration) < LEAST_WINDOWS:
        raise SearchError(
            f"{label} has {len(calibration)} windows, and a search needs {LEAST_WINDOWS} or more, of which some are "
            "kept for the proof; give a longer text, or shorter windows",
            settings={"context": None},
        )
    if proof is None:
        cut = max(LEAST_WINDOWS - 1, len(calibration) * 3 // 4)
        calibration, proof = calibration[:cut], calibration[cut:]
    checks = max(1, min(CHECKS, len(calibration) // 4))
    chosen = _spread(calibration, windows + checks)
    every = max(1, len(chosen) // checks)
    check_at = {index * every for index in range(checks)}
    statistics = [window for index, window in enumerate(chosen) if index not in check_at]
    return SearchText(statistics, [chosen[index] for index in sorted(check_at)], _spread(proof, HELD_OUT), unscored)


def _spread(windows: Sequence[Tensor], count: int) -> list[Tensor]:
    return list(windows) if len(windows) <= count else spread_windows(windows, count * len(windows[0]))
