"""Blocks of a loaded model run one token in a few calls, whoever calls them: `generate` of transformers, too.

A token of a small model spends more time in the modules of a block than in its packed products: norms, rotations and an
attention of many small operators, and a call of every module. Where `bitplan.describe` saw RMS norm, attention with
rotary positions, RMS norm and gated MLP, each added to what goes past, a block runs four products and three compiled
loops (`language.token_loops`) instead.

That is for one token of one sequence in float32 on a CPU, without gradients and behind others in a cache that grows.
Everything else runs the block's own forward: prompts, batches, masks, other caches, compiled and exported graphs, and
blocks in which a module was replaced, has hooks, or has other numbers than it had (`_facts`).

Before its first token a block is tried: its own forward and the steps here get the same token, keys and values, all
drawn, and have to come to the same inputs of every product and the same result within TOLERANCE of the largest number.
A block that computes anything else keeps its forward; `why_own_forward` says the reason. Products are the same in both,
so that only sums are added in another order.

A block keeps its parameters, its name and its place. Its class becomes a subclass of its own (`_quick_class`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as torch_modules

from bitplan.base.loops.jit import thread_count
from bitplan.base.loops.openmp_threads import run
from bitplan.packed.bound_calls import alike, modes
from bitplan.packed.language.token_loops import (
    AT,
    COS,
    HEADS,
    KEYS,
    LEAST_FOR_THREADS,
    NEXT,
    ROOM,
    SCORES,
    SIN,
    VALUES,
    WIDTH,
    StepLoops,
    X,
    fits,
    functions,
)
from bitplan.packed.language.token_steps import ACTIVATIONS, TOLERANCE, TokenBlock, structure_of
from bitplan.packed.quant_linear import QuantLinear

if TYPE_CHECKING:
    from bitplan.packed.fused_projections import JointProjection

# What a block of transformers is called with, beside the token.
ARGUMENTS = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings"})
PAST = 5  # drawn keys and values of a trial
FAR = 1_000_003  # the position of its token: what is scaled by positions is seen there
Update = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # a token's keys and values -> those of all tokens
Multiply = Callable[[Tensor, int], Tensor]  # an input, the number of a product -> its result
_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_scratch = threading.local()  # loops write into memory of their own


@dataclass(frozen=True)
class _Names:
    """The parts of a block by their names in it."""

    norms: tuple[tuple[str, float, bool], ...]  # parameter, eps, whether 1 is added
    products: tuple[tuple[str, ...], ...]  # paths of layers: queries, keys and values; output; gate and up; down
    act: str


class QuickBlock(nn.Module):
    """Mixed into a block's class: one token takes the quick way where there is one."""

    _names: _Names
    _steps: BlockSteps | str | None  # str: why there are none

    def forward(self, hidden_states: Any, *args: Any, **options: Any) -> Any:
        if not (args or is_dynamo_compiling() or is_grad_enabled()) and type(hidden_states) is Tensor:
            steps = self.__dict__["_steps"]
            if steps is None:
                steps = self._try(hidden_states, options)
            y = None if type(steps) is not BlockSteps else steps(hidden_states, options)
            if y is not None:
                return y
        return super().forward(hidden_states, *args, **options)

    def _try(self, x: Tensor, options: Mapping[str, Any]) -> BlockSteps | str | None:
        """Steps that were compared with the block's own forward, or why there are none; None before its first token."""
        if not _is_quick(x, options):
            return None
        steps = BlockSteps(self, self._names)
        if not steps.is_as_seen():
            return None
        reason = steps.why_not(super().forward, x, options["position_embeddings"])
        self.__dict__["_steps"] = reason or steps
        return reason or steps

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (type(self).__bases__[1],), self.__dict__ | {"_steps": None}


@functools.cache
def _quick_class(base: Hashable) -> Any:
    """A block's class with the quick way in front, under the same name, by which other libraries know it."""
    assert isinstance(base, type)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (QuickBlock, base), names)


def _empty(base: Hashable) -> Any:
    quick = _quick_class(base)
    return quick.__new__(quick)


def quicken_blocks(model: nn.Module) -> list[str]:
    """Let blocks whose structure is known run one token in a few calls; returns their paths."""
    structure = structure_of(model)
    if isinstance(structure, str):
        return []
    paths = []
    for block in structure.blocks:
        names = (block.before.name, block.between.name, *block.queries, *block.output, *block.gate_up, *block.down)
        path = _owner_of(names)
        module = model.get_submodule(path)
        if path and not isinstance(module, QuickBlock) and type(module).forward is not nn.Module.forward:
            base: Any = type(module)
            module.__class__ = _quick_class(base)
            module.__dict__ |= {"_names": _names_in(path, block), "_steps": None}
            paths.append(path)
    return paths


def why_own_forward(model: nn.Module) -> dict[str, str]:
    """Blocks that were tried and keep their own forward, with the reason."""
    blocks = ((path, vars(block).get("_steps")) for path, block in model.named_modules())
    return {path: steps for path, steps in blocks if isinstance(steps, str)}


def _owner_of(names: Sequence[str]) -> str:
    parts = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(part) > shared and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return ".".join(parts[0][:shared])


def _names_in(path: str, block: TokenBlock) -> _Names:
    start = len(path) + 1
    norms = tuple((norm.name[start:], norm.eps, norm.plus_one) for norm in (block.before, block.between))
    groups = block.queries, block.output, block.gate_up, block.down
    return _Names(norms, tuple(tuple(layer[start:] for layer in group) for group in groups), block.act)


def _is_quick(x: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether a call is one token's behind others, and nothing of torch watches or changes what it does."""
    if not (options.keys() <= ARGUMENTS and options.get("attention_mask") is None and options.get("use_cache") is True):
        return False
    if options.get("past_key_values") is None or not _positions(options):
        return False
    if x.shape[:-1] != (1, 1) or x.dtype is not torch.float32 or not x.is_cpu or not x.is_contiguous():
        return False
    if modes() or _is_elsewhere() or torch._C._get_tracing_state() is not None:
        return False
    is_transformed = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    return not is_transformed and not torch._C._is_any_autocast_enabled()


def _is_elsewhere() -> bool:
    """Whether memory that is asked for without a type and a device is not float32 on a CPU."""
    return torch._C._len_torch_function_stack() > 0 or torch.get_default_dtype() is not torch.float32


def _positions(options: Mapping[str, Any]) -> bool:
    pair = options.get("position_embeddings")
    return type(pair) is tuple and len(pair) == 2 and all(type(one) is Tensor for one in pair)


class BlockLoops(StepLoops):
    """Norms and attention, where keys and values lie in a cache of transformers."""

    def attend(self, projected: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention of a token, which is the last of `keys` and `values`: both are entered there, keys turned."""
        job, room = self._job, keys.shape[2]
        if self._scores.shape[-1] != room:
            self._scores = torch.empty(self._queries, room)
        job[X], job[KEYS], job[VALUES], job[AT] = projected.data_ptr(), keys.data_ptr(), values.data_ptr(), room - 1
        job[COS], job[SIN], job[SCORES], job[NEXT] = cos.data_ptr(), sin.data_ptr(), self._scores.data_ptr(), 0
        job[ROOM] = room
        work = self._queries * job[WIDTH] * room * 2
        run(functions()[1], job.buffer_info()[0], 1 if work < LEAST_FOR_THREADS else min(thread_count(), job[HEADS]))
        return self._mixed


def _loops_for(sizes: tuple[int, int, int, int]) -> BlockLoops:
    """Loops of this thread for these sizes: a token, heads of queries, heads of keys, numbers of a head."""
    kept: dict[tuple[int, int, int, int], BlockLoops] = _scratch.__dict__.setdefault("loops", {})
    loops = kept.get(sizes)
    if loops is None:
        loops = kept[sizes] = BlockLoops(*sizes)
    return loops


def _turning(sin: Tensor) -> Tensor:
    """Sines with the signs with which halves of a head are turned against each other; made once for all blocks."""
    of, version, signed = _scratch.__dict__.get("sines", (None, 0, None))
    now = 0 if sin.is_inference() else sin._version
    if of is not sin or version != now or sin.is_inference():
        signed = sin.flatten().clone()
        signed[: len(signed) // 2].neg_()
        _scratch.sines = sin, now, signed
    return signed  # type: ignore[no-any-return]


class BlockSteps:
    """One token through a block, as long as its modules are what they were."""

    def __init__(self, block: nn.Module, names: _Names) -> None:
        self._act = ACTIVATIONS[names.act]
        layers: Any = [[block.get_submodule(path) for path in paths] for paths in names.products]
        self._products: list[list[QuantLinear]] = layers
        self._norms: list[tuple[dict[str, Any], str, float, bool]] = []
        for name, eps, plus_one in names.norms:
            owner, _, local = name.rpartition(".")
            self._norms.append((block.get_submodule(owner)._parameters, local, eps, plus_one))
        self._facts = _facts(block, {id(layer) for group in layers for layer in group})
        self._fits: Callable[..., bool] | None = None
        self._sizes = (0, 0, 0, 0)
        self._at = -1  # the block's number in caches

    def __call__(self, x: Tensor, options: Mapping[str, Any]) -> Tensor | None:
        """The block's result for one token; None where its own forward has to make it."""
        if not (options.keys() <= ARGUMENTS and options.get("attention_mask") is None and options.get("use_cache")):
            return None
        norms = [parameters[name] for parameters, name, *_ in self._norms]
        if self._fits is None or not self._fits(x, *norms):
            if not _is_quick(x, options) or not self._knows(norms):
                return None
            self._fits = alike(x, *norms)
        if forward_ad._current_level >= 0 or torch_modules._global_forward_hooks or _is_elsewhere():
            return None
        if torch_modules._global_forward_pre_hooks or not _positions(options):
            return None
        if not self.is_as_seen():
            return None
        cache, (cos, sin) = options["past_key_values"], options["position_embeddings"]
        layer = _growing_layer(cache, self._at, self._sizes)
        if layer is None or cos.shape != (1, 1, self._sizes[3]) or cos.dtype is not torch.float32:
            return None

        def update(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            cache.update(keys, values, self._at)
            if not (layer.keys.is_contiguous() and layer.values.is_contiguous()):
                layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()
            return layer.keys, layer.values

        return self._run(x, cos.contiguous(), _turning(sin), update, self._product)

    def is_as_seen(self) -> bool:
        return all(attributes.get(name) == expected for attributes, name, expected in self._facts)

    def _knows(self, norms: Sequence[Tensor]) -> bool:
        return all(one.dtype is torch.float32 and one.is_cpu and one.is_contiguous() for one in norms)

    def _run(self, x: Tensor, cos: Tensor, sin: Tensor, update: Update, multiply: Multiply) -> Tensor:
        sizes = self._sizes
        loops, (_, queries, heads, width) = _loops_for(sizes), sizes
        projected = multiply(self._norm(loops, x, None, 0), 0)
        # Entered as they are, so that the cache grows; the loop then writes them once more, and the keys turned.
        rows = projected.view(1, -1, 1, width)
        keys, values = update(rows[:, queries : queries + heads], rows[:, queries + heads :])
        sums = multiply(loops.attend(projected, keys, values, cos, sin), 1)
        gate, up = multiply(self._norm(loops, sums, x, 1), 2).chunk(2, dim=-1)
        return multiply(self._act(gate) * up, 3).add_(sums).view(x.shape)

    def _norm(self, loops: BlockLoops, x: Tensor, added: Tensor | None, number: int) -> Tensor:
        parameters, name, eps, plus_one = self._norms[number]
        weight = parameters[name]
        return loops.norm(x, added, weight + 1 if plus_one else weight, eps)

    def _product(self, x: Tensor, number: int) -> Tensor:
        layers = self._products[number]
        joint: JointProjection | None = layers[0].joint
        y = joint.whole(x) if joint is not None and joint.layers == layers else None
        if y is not None:
            return y
        parts = [layer.forward(x) for layer in layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def why_not(self, forward: Callable[..., Any], like_x: Tensor, positions: tuple[Tensor, Tensor]) -> str | None:
        """Why these steps are not the block's own forward; None if they are. Nothing of the caller's is read."""
        for number, (parameters, name, *_) in enumerate(self._norms):
            if parameters.get(name) is None or not self._knows([parameters[name]]):
                return f"norm {number} is not in float32 on a CPU"
        drawn = torch.Generator().manual_seed(0)
        x = torch.randn(like_x.shape, generator=drawn)
        angles = torch.rand(1, 1, positions[0].shape[-1] // 2, generator=drawn).mul_(6.0).repeat(1, 1, 2)
        cos, sin = angles.cos(), angles.sin()
        trial = _Trial(drawn, self._products)
        try:
            with trial:
                result = forward(
                    x.clone(),
                    attention_mask=None,
                    position_ids=torch.tensor([[FAR]]),
                    past_key_values=trial,
                    use_cache=True,
                    position_embeddings=(cos, sin),
                )
            if type(result) is not Tensor or result.shape != x.shape or trial.at is None:
                return "its forward gives back something else, or enters nothing into a cache"
            heads, width = trial.keys.shape[1], trial.keys.shape[3]
            queries = self._products[1][0].in_features // width
            self._at, self._sizes = trial.at, (x.shape[-1], queries, heads, width)
            if cos.shape[-1] != width or not fits(x.shape[-1], width):
                return "only a part of each head is turned, or sizes are not whole vectors"
            repeated = self._run(x, cos, _turning(sin), trial.again, trial.multiply)
            _require_close(repeated, result, "its result")
        except _ERRORS as error:
            return str(error)
        return None


class _Trial:
    """A cache of a few drawn keys and values, which the block's own forward is called with, and what passed there."""

    def __init__(self, drawn: torch.Generator, products: Sequence[Sequence[QuantLinear]]) -> None:
        self.at: int | None = None
        self.keys = self.values = torch.empty(0)
        self._drawn, self._products, self._thread = drawn, products, threading.get_ident()
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for layer in (layer for group in self._products for layer in group):
            self._hooks.append(layer.register_forward_hook(self._keep))

    def __exit__(self, *_raised: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        if threading.get_ident() == self._thread:
            self._seen[id(layer)] = args[0].clone(), output.clone()

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """What an attention calls: its token is the last of those that it gets back."""
        if self.at is not None:
            raise ValueError("keys and values are entered twice")
        before = 2 * torch.randn(2, *keys.shape[:2], PAST, keys.shape[3], generator=self._drawn)
        self.at = layer
        self.keys, self.values = (torch.cat(pair, dim=2) for pair in zip(before, (keys, values), strict=True))
        return self.keys.clone(), self.values.clone()

    def again(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        _require_close(values, self.values[:, :, -1:], "its values")
        mine = self.keys.clone(), self.values.clone()
        mine[0][:, :, -1:] = keys
        return mine

    def multiply(self, x: Tensor, number: int) -> Tensor:
        """The product that the block's own forward got, if it was given the same input."""
        results = []
        for layer in self._products[number]:
            given, result = self._seen[id(layer)]
            _require_close(x, given.reshape(x.shape), f"the input of {layer.name}")
            results.append(result.reshape(1, -1))
        return torch.cat(results, dim=-1)


def _require_close(x: Tensor, expected: Tensor, what: str) -> None:
    if x.shape != expected.shape or not bool((x - expected).abs().amax() <= TOLERANCE * expected.abs().amax()):
        raise ValueError(f"{what} would be other numbers than in its own forward")


def _growing_layer(cache: Any, at: int, sizes: tuple[int, int, int, int]) -> Any:
    """A block's layer of a cache to which tokens are appended, one sequence with tokens in it; None for all others."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if type(cache) is not DynamicCache or getattr(cache, "offloading", False) or at >= len(cache.layers):
        return None
    layer = cache.layers[at]
    if type(layer) is not DynamicLayer or not layer.is_initialized:
        return None
    keys, values = layer.keys, layer.values
    shape = (1, sizes[2], keys.shape[-2], sizes[3])
    is_plain = keys.shape == shape == values.shape and keys.dtype is torch.float32 and keys.is_cpu
    return layer if is_plain and shape[2] and values.dtype is torch.float32 else None


def _facts(block: nn.Module, packed: set[int]) -> list[tuple[Mapping[str, Any], str, Any]]:
    """What must still be so of a block's modules: each is there, without hooks, with the numbers that it had."""
    facts: list[tuple[Mapping[str, Any], str, Any]] = []
    within = {id(part) for one in block.modules() if id(one) in packed for part in one.modules()} - packed
    for module in block.modules():
        if id(module) in within:
            continue
        attributes = vars(module)
        facts += [(module._modules, name, child) for name, child in module._modules.items() if id(child) not in within]
        if module is block:
            facts += [(attributes, "training", False)]
            continue
        facts += [
            (attributes, "forward", None),
            (attributes, "_forward_hooks", {}),
            (attributes, "_forward_pre_hooks", {}),
        ]
        if id(module) not in packed:
            facts += [(attributes, name, value) for name, value in attributes.items() if isinstance(value, int | float)]
    return facts
