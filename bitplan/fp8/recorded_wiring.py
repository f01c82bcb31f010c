"""What may be joined in a model, by what its forward was seen to compute (`bitplan.describe`); names decide nothing.

    projections   that read one tensor: queries, keys and values of one attention, gate and up of one MLP
    norms         of which one joined projection is the only reader, and whose output no hook sees
    MLPs          whose module computes down(act(up(x))) or down(act(gate(x)) * up(x)), and nothing else but a dropout
                  behind it

Where anything else was seen, or nothing (a model that cannot be run without numbers), modules keep their own code, and
`why` says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bitplan.base.errors import PlanError
from bitplan.fp8.kernels.activation import ACTIVATIONS, GATED
from bitplan.plan.structure.describe import describe
from bitplan.plan.structure.example_inputs import examples_for
from bitplan.plan.structure.model_view import GatedMlpUse, LinearUse, ModelView, ModuleUse, NormUse, PlainMlpUse
from bitplan.plan.structure.untouched import has_foreign_forward

_KINDS = {"rms_norm": "rms", "layer_norm": "layer"}
# Functions that an activation may be written with, and that cut one projection's output in two.
_BETWEEN = {"silu", "gelu", "relu", "sigmoid", "tanh", "erf", "mul", "add", "div", "pow", "square", "identity"}
_BETWEEN |= {"chunk", "split", "getitem", "unbind", "view", "reshape", "contiguous", "size"}
_BEHIND = {"dropout", "identity"}


@dataclass(frozen=True)
class NormBefore:
    """A norm in front of projections; `why` says why it stays apart, None where they may take it over."""

    path: str
    kind: str
    eps: float | None
    why: str | None = None


@dataclass(frozen=True)
class MlpWiring:
    """A module that computes an MLP: paths of its projections (gate, then up, where there are two), and its tail."""

    path: str
    first: tuple[str, ...]
    down: str
    function: str
    tail: tuple[str, ...] = ()

    def under(self, prefix: str, cut: int = 0) -> MlpWiring:
        """The same by paths that begin with a prefix, in the place of so many letters."""
        path, down, *first = (prefix + path[cut:] for path in (self.path, self.down, *self.first))
        return MlpWiring(path, tuple(first), down, self.function, self.tail)


@dataclass(frozen=True)
class RecordedRun:
    """A view of a model, or of each part of a model that has no forward, and what it was called with; or why not."""

    views: Mapping[str, tuple[ModelView, tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def run_without_numbers(model: nn.Module, example: Any = None) -> RecordedRun:
    """See what a model computes in training; a container without a forward is seen by its children."""
    with _training(model):
        return _run(model, example, "")


def _run(model: nn.Module, example: Any, path: str) -> RecordedRun:
    if type(model).forward is nn.Module.forward:  # a ModuleList: whoever calls its children calls their forwards
        runs = [_run(child, example, f"{path}.{name}".lstrip(".")) for name, child in model.named_children()]
        views = {at: found for run in runs for at, found in run.views.items()}
        return RecordedRun(views, tuple(fault for run in runs for fault in run.faults))
    given = [_arguments(example)] if example is not None else examples_for(model)
    fault = ""
    for args, kwargs in given:
        try:
            return RecordedRun({path: (describe(model, kwargs or args), args, kwargs)})
        except PlanError as error:
            fault = fault or str(error)
    return RecordedRun(faults=(fault or f"{type(model).__name__}: no input was found that its forward takes",))


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Every module as in training, where dropout shows; and as it was afterwards."""
    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        module.training = True
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


class Wiring:
    """Questions about one view; paths are those of the model that was seen."""

    def __init__(self, model: nn.Module, view: ModelView) -> None:
        self.model, self.view = model, view
        self.modules = dict(model.named_modules(remove_duplicate=False))
        uses: list[GatedMlpUse | PlainMlpUse] = [*view.gated_mlps(), *view.plain_mlps()]
        self.mlps = [wiring for use in uses if (wiring := self._mlp(use)) is not None]

    def role(self, path: str) -> str:
        """What a linear is for: "query", "gate", "head", ...; empty where it was not seen, or its uses differ."""
        roles = {use.role for use in self.view.parts.get(path, ()) if isinstance(use, LinearUse)}
        return roles.pop() if len(roles) == 1 else ""

    def use(self, path: str) -> LinearUse | None:
        """The one use of a linear by its own module, of the whole weight."""
        use = self.view.linear(path)
        if use is None or use.module != path or not use.is_whole or use.experts or use.computed:
            return None
        return use

    def joined(self) -> list[tuple[str, ...]]:
        """Paths of linears that can be one product: they read one tensor and belong together."""
        groups: list[tuple[str, ...]] = []
        for attention in self.view.attentions:
            roles = {"query": attention.queries, "key": attention.keys, "value": attention.values}
            by_input: dict[int, dict[str, str]] = {}
            for role, weights in roles.items():
                for weight in weights:
                    use = self.use(weight.rpartition(".")[0])
                    if use is not None and use.weight == weight:
                        by_input.setdefault(use.input, {})[use.path] = role
            for members in by_input.values():
                if sorted(members.values()) in (["key", "query", "value"], ["key", "value"]):
                    groups.append(self._in_order(members))
        in_mlps = {wiring.first for wiring in self.mlps}
        for mlp in self.view.gated_mlps():
            uses = [self.use(each.path) for each in (mlp.gate, mlp.up)]
            if mlp.is_fused or None in uses or mlp.gate.input != mlp.up.input:
                continue
            paths = (mlp.gate.path, mlp.up.path)
            groups.append(paths if paths in in_mlps else self._in_order(paths))
        seen: set[str] = set()
        apart = []
        for group in groups:  # a linear of two groups is joined with the first
            if not seen & set(group):
                apart.append(group)
                seen |= set(group)
        return apart

    def _in_order(self, paths: Sequence[str] | Mapping[str, str]) -> tuple[str, ...]:
        steps = {path: use.step for path in paths if (use := self.use(path)) is not None}
        return tuple(sorted(steps, key=steps.__getitem__))

    def norm_before(self, paths: Sequence[str]) -> NormBefore | None:
        """The norm that feeds these linears and nothing else; None where there is none."""
        uses = [use for path in paths if (use := self.use(path)) is not None]
        if len(uses) != len(paths) or len({use.source for use in uses}) != 1:
            return None
        norm = self.view.norm_before(paths[0])
        if norm is None or set(norm.readers) != {use.weight for use in uses} or norm.output != uses[0].source:
            return None
        return NormBefore(norm.path, _KINDS.get(norm.kind, norm.kind), norm.eps, self._why_apart(norm, uses))

    def _why_apart(self, norm: NormUse, uses: Sequence[LinearUse]) -> str | None:
        """Why a norm in front of projections cannot be taken over."""
        if norm.others:
            return f"{norm.others[0]} reads the output of {norm.path} too"
        if norm.kind not in _KINDS or norm.plus_one or norm.weight is None or norm.size != (uses[0].shape[1],):
            return f"{norm.path} is another norm than RMS and layer norm with a weight"
        if norm.eps is None and (norm.is_spelled or norm.kind != "rms_norm"):
            return f"the epsilon of {norm.path} was not seen"
        call = self.view.calls.get(norm.path)
        if call is None or norm.module != norm.path or call.outputs != (norm.output,) or norm.input not in call.inputs:
            return f"{norm.path} is not a module of its own, called once"
        if any(step != norm.step and not norm.is_spelled for step, _, _ in call.functions):
            return f"{norm.path} computes more than a norm"
        module = self.modules[norm.path]
        if {name for name, _ in module.named_parameters()} - {"weight", "bias"} or len(call.inputs) != 1:
            return f"{norm.path} computes more than a norm"
        weights = [self.modules[use.path].weight for use in uses]
        if any(weight.dtype != module.weight.dtype for weight in weights):
            return f"{norm.path} has another type than the projections behind it"
        return self._why_changed(norm.path, uses, norm.output)

    def _why_changed(self, norm: str, uses: Sequence[LinearUse], output: int) -> str | None:
        watchers = self.view.watchers(output, *(use.input for use in uses))
        if watchers:
            words = " and ".join(self.view.changed[watchers[0]])
            return f"{watchers[0]} has a {words}, which would see numbers without {norm}"
        block = self.view.block_of(norm)
        for path in dict.fromkeys(above for use in (norm, *(use.path for use in uses)) for above in _above(use, block)):
            if has_foreign_forward(self.modules[path]):
                return f"{path} has a forward of somebody else's"
            if (reason := self.view.unknown.get(path)) is not None:
                return f"{path} was not seen to its end: {reason}"
        return None

    # ---- MLPs -------------------------------------------------------------------------------------------------------

    def _mlp(self, use: GatedMlpUse | PlainMlpUse) -> MlpWiring | None:
        """The module that computes an MLP and nothing else."""
        is_gated = isinstance(use, GatedMlpUse)
        projections = (use.gate, use.up) if isinstance(use, GatedMlpUse) and not use.is_fused else (use.up,)
        if use.activation not in ACTIVATIONS or not use.only_down or use.has_casts:
            return None
        if isinstance(use, GatedMlpUse) and (
            use.is_interleaved or (use.is_fused and (use.gate_part, use.up_part) != (0, 1))
        ):
            return None
        if any(self.use(each.path) is None for each in (*projections, use.down)):
            return None
        paths = tuple(each.path for each in projections)
        path = _common((*paths, use.down.path))
        call = self.view.calls.get(path)
        if call is None or not path or call.inputs not in ((projections[0].input,), (projections[0].source,)):
            return None
        if len({each.input for each in projections}) != 1 or self._is_changed(path):
            return None
        tail = self._tail(path, call, {each.step for each in (*projections, use.down)}, use.down)
        if tail is None:
            return None
        return MlpWiring(path, paths, use.down.path, use.activation + (GATED if is_gated else ""), tail)

    def _is_changed(self, path: str) -> bool:
        inside = [at for at in self.modules if at == path or at.startswith(f"{path}.")]
        return any(at in self.view.changed or at in self.view.unknown for at in inside)

    def _tail(self, path: str, call: ModuleUse, products: set[int], down: LinearUse) -> tuple[str, ...] | None:
        """Names of the dropouts behind the last product; None where the module computes anything else."""
        behind: list[str] = []
        for step, name, module in call.functions:
            if step in products or (step < down.step and name in _BETWEEN):
                continue
            within = module.removeprefix(f"{path}.")
            is_child = module.startswith(f"{path}.") and "." not in within
            if step < down.step:
                return None
            if self._shapes_product(name, module, down):
                continue
            if name not in _BEHIND or not is_child:
                return None
            behind.append(within)
        at_end = self.view.calls.get(f"{path}.{behind[-1]}") if behind else None
        outputs = (down.output,) if at_end is None else at_end.outputs
        if call.outputs == outputs:
            return tuple(behind)
        last = self.view.calls.get(down.path)  # where a product gives its result another shape
        return () if not behind and last is not None and call.outputs == last.outputs else None

    def _shapes_product(self, name: str, module: str, down: LinearUse) -> bool:
        return module == down.path and name in ("view", "reshape")


def _common(paths: Sequence[str]) -> str:
    """The path of the innermost module that holds all of these."""
    shared = []
    for words in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)


def _above(path: str, block: str) -> Iterator[str]:
    """A path and the modules that hold it, up to its block."""
    while path:
        yield path
        if path == block:
            return
        path = path.rpartition(".")[0]


def random_like(given: Any, generator: torch.Generator) -> Any:
    """Example inputs with random numbers in the place of zeros; token ids, positions and masks stay."""
    if isinstance(given, torch.Tensor):
        if not given.is_floating_point():
            return given
        return torch.randn(given.shape, generator=generator).to(given.dtype)
    if isinstance(given, Mapping):
        return {key: random_like(value, generator) for key, value in given.items()}
    return type(given)(random_like(value, generator) for value in given) if isinstance(given, tuple | list) else given
