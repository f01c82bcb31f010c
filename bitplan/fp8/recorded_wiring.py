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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from bitplan.base.errors import PlanError
from bitplan.fp8.kernels.cast import ACTIVATIONS, GATED
from bitplan.plan.structure.describe import arguments_of, describe
from bitplan.plan.structure.joined_calls import plain_use, readers_of_one_tensor
from bitplan.plan.structure.model_view import TRACED, GatedMlpUse, LinearUse, ModelView, ModuleUse, NormUse, PlainMlpUse
from bitplan.plan.structure.untouched import Inputs, examples_for, has_foreign_forward

_KINDS = {"rms_norm": "rms", "layer_norm": "layer"}
# Functions that an activation may be written with, and that cut one projection's output in two.
_BETWEEN = {"silu", "gelu", "relu", "sigmoid", "tanh", "erf", "mul", "add", "div", "pow", "square", "identity"}
_BETWEEN |= {"chunk", "split", "getitem", "unbind", "view", "reshape", "contiguous", "size"}
_MEASURED_TOGETHER = (["key", "query", "value"], ["key", "value"], ["gate", "up"])  # as policies know them
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
    """An MLP: paths of its projections (gate, then up, where there are two), and `why` its activation stays apart.

    Where it need not, `path` is the module that computes it and nothing else but its `tail`.
    """

    first: tuple[str, ...]
    down: str
    why: str | None = None
    path: str = ""
    function: str = ""
    tail: tuple[str, ...] = ()

    def within(self, block: str) -> MlpWiring:
        """A copy with paths relative to a block."""
        cut = len(block) + 1 if block else 0
        path, down, *first = (path[cut:] for path in (self.path, self.down, *self.first))
        return replace(self, path=path, first=tuple(first), down=down)


@dataclass(frozen=True)
class RecordedRun:
    """A view of a model, and what was run for it.

    root    the model itself, or what calls the parts of one that has no forward
    inputs  what it was called with
    parts   paths of what was seen: "" for the model, or those of its parts
    faults  why it, or a part, was not seen
    """

    view: ModelView
    root: nn.Module
    inputs: Inputs = ((), {})
    parts: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class _PartsInTurn(nn.Module):
    """Calls the parts of a model that has no forward of its own (a ModuleList), each with inputs of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._modules = model._modules

    def forward(self, inputs_of: Mapping[str, Inputs]) -> None:
        for path, (args, kwargs) in inputs_of.items():
            self.get_submodule(path)(*args, **kwargs)


def run_without_numbers(model: nn.Module, example: Any = None) -> RecordedRun:
    """See what a model computes in training; one without a forward is seen by its parts."""
    inputs_of: dict[str, Inputs] = {}
    faults = []
    with _training(model):
        for path, part in _with_forwards(model, ""):
            recorded = _see(part, example)
            if isinstance(recorded, str):
                faults.append(recorded)
            elif not path:
                return RecordedRun(recorded[0], model, recorded[1], ("",))
            else:
                inputs_of[path] = recorded[1]
        root, inputs = _PartsInTurn(model), {"inputs_of": inputs_of}
        view = describe(root, inputs) if inputs_of else ModelView(TRACED, ())
    return RecordedRun(view, root, ((), inputs), tuple(inputs_of), tuple(faults))


def _with_forwards(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """A model, or the modules inside that whoever has the model calls."""
    if type(model).forward is not nn.Module.forward:
        yield path, model
        return
    for name, child in model.named_children():
        yield from _with_forwards(child, f"{path}.{name}".lstrip("."))


def _see(model: nn.Module, example: Any) -> tuple[ModelView, Inputs] | str:
    """What a module computes, and on what it was run; or why it cannot be seen."""
    fault = ""
    for args, kwargs in [arguments_of(example)] if example is not None else examples_for(model):
        try:
            return describe(model, kwargs or args), (args, kwargs)
        except PlanError as error:
            fault = fault or str(error)
    return fault or f"{type(model).__name__}: no input was found that its forward takes"


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """A context in which every module is in training mode, where dropout shows; modes come back after it."""
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
        uses: list[GatedMlpUse | PlainMlpUse] = [*view.gated, *view.plain]
        mlps = [self._mlp(use) for use in uses if not use.up.experts and not use.down.experts]
        self.mlps, self.mlps_apart = (
            tuple(mlp for mlp in mlps if (mlp.why is None) == can_join) for can_join in (True, False)
        )

    def role(self, path: str) -> str:
        """What a linear is for: "query", "gate", "head", ...; empty where it was not seen, or its uses differ."""
        roles = {use.role for use in self.view.parts.get(path, ()) if isinstance(use, LinearUse)}
        return roles.pop() if len(roles) == 1 else ""

    @cached_property
    def plain_uses(self) -> dict[str, LinearUse]:
        """Linears that are called once, by their own module, with the whole weight, by path."""
        return {path: use for path in self.modules if (use := plain_use(self.view, path)) is not None}

    def joined(self) -> list[tuple[str, ...]]:
        """Paths of linears that can be one product: they read one tensor and belong together, in the order of calls.

        Gate comes before up in MLPs that can be joined, whichever is called first.
        """
        belongs = {weight: number for number, weights in enumerate(self.view.joined) for weight in weights}
        in_mlps = {frozenset(mlp.first): mlp.first for mlp in self.mlps}
        groups = []
        for readers in readers_of_one_tensor(self.view):
            together: dict[int, dict[str, str]] = {}
            for use in readers:
                if use.weight in belongs:
                    together.setdefault(belongs[use.weight], {})[use.path] = use.role
            for roles in together.values():
                if sorted(roles.values()) in _MEASURED_TOGETHER:
                    groups.append(in_mlps.get(frozenset(roles), tuple(roles)))
        return groups

    def norm_before(self, paths: Sequence[str]) -> NormBefore | None:
        """The norm that feeds these linears and nothing else; None where there is none."""
        uses = [use for path in paths if (use := self.plain_uses.get(path)) is not None]
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

    def _mlp(self, use: GatedMlpUse | PlainMlpUse) -> MlpWiring:
        """An MLP, with the module that computes it and nothing else; or why there is none."""
        is_gated = isinstance(use, GatedMlpUse)
        projections = (use.gate, use.up) if isinstance(use, GatedMlpUse) and not use.is_fused else (use.up,)
        paths = tuple(linear.path for linear in projections)
        mlp = MlpWiring(tuple(dict.fromkeys(paths)), use.down.path)
        path = holder_of((*paths, use.down.path))
        call = self.view.calls.get(path)
        alone = call is not None and path and call.inputs in ((projections[0].input,), (projections[0].source,))
        more = f"no module computes it alone: {path or 'the model'} computes more"
        in_order = not isinstance(use, GatedMlpUse) or not (
            use.is_interleaved or (use.is_fused and (use.gate_part, use.up_part) != (0, 1))
        )
        for is_wrong, why in (
            (use.activation not in ACTIVATIONS, "no cast computes its activation"),
            (not use.only_down, "something else reads what lies between its projections"),
            (use.has_casts, "numbers change their type between its projections"),
            (not in_order, "gate does not come before up in its one projection"),
            (
                any(linear.path not in self.plain_uses for linear in (*projections, use.down)),
                "a projection is not a module of its own, called once",
            ),
            (not alone, more),
            (len({linear.input for linear in projections}) != 1, "its projections read different tensors"),
            (self._is_changed(path), f"{path} has hooks, or a forward of somebody else's, or was not seen to its end"),
        ):
            if is_wrong:
                return replace(mlp, why=why)
        assert call is not None
        tail = self._tail(path, call, {linear.step for linear in (*projections, use.down)}, use.down)
        if tail is None:
            return replace(mlp, why=more)
        return replace(mlp, path=path, function=use.activation + (GATED if is_gated else ""), tail=tail)

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
            if module == down.path and name in ("view", "reshape"):  # which gives the product its shape
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


def holder_of(paths: Sequence[str]) -> str:
    """The path of the innermost module that holds all of these."""
    shared = []
    for words in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)


def _above(path: str, block: str) -> Iterator[str]:
    """Yield a path, then those of the modules that hold it, up to its block's."""
    while path:
        yield path
        if path == block:
            return
        path = path.rpartition(".")[0]


def random_like(example: Any, generator: torch.Generator) -> Any:
    """Example inputs with random numbers in the place of zeros; token ids, positions and masks stay."""
    if isinstance(example, torch.Tensor):
        if not example.is_floating_point():
            return example
        return torch.randn(example.shape, generator=generator).to(example.dtype)
    if isinstance(example, Mapping):
        return {key: random_like(value, generator) for key, value in example.items()}
    if isinstance(example, tuple | list):
        return type(example)(random_like(value, generator) for value in example)
    return example
