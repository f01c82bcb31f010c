"""One token after another through a packed model on a CPU, without the calls of its modules.

A small model's token is a few milliseconds of products, and as long again in the modules of transformers between them.
Models whose structure is known do without: blocks of RMS norm, attention with rotary positions, RMS norm and gated MLP,
each added to what goes past. That is seen in a run without numbers (`bitplan.describe`), not in names.

Before it is used, it is compared: the model itself makes a token, and inputs and outputs of every product are kept; the
steps here, given the same outputs, must come to the same inputs, and to its logits. A model that computes anything else
(another scale of scores, biases of positions, capped logits) differs there, and keeps its own forward. `why_not` says
the reason.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from bitplan.base.errors import PlanError
from bitplan.packed.fused_projections import JointProjection, view_of
from bitplan.packed.language.token_graph import TokenGraph, read_on
from bitplan.packed.quant_linear import QuantLinear
from bitplan.packed.rounded_kv import kv_of
from bitplan.plan.structure.model_view import LinearUse, ModelView, NormUse

if TYPE_CHECKING:
    from bitplan.packed.language.token_loops import StepLoops

TOLERANCE = 1e-4  # of the largest input of a product
ROOM = 256  # tokens by which memory for keys and values grows
PIECE_TOKENS = 512  # of a prompt, read at once: what passes between layers and the mask of a whole one may be large
LEAST_PIECE = 64  # tokens of each text: a layer's keys and values are decoded anew for each piece
# Kinds of rotary positions whose angles do not depend on the length of the text.
FIXED_ANGLES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
Bound = Callable[[Tensor, tuple[int, ...]], Tensor | None]  # an input, the result's shape -> the result
Multiply = Callable[[Tensor, tuple[str, ...]], Tensor]  # an input, and the layers that read it -> their outputs


@dataclass(frozen=True)
class TokenNorm:
    """An RMS norm; `name` is that of its parameter, to which 1 is added in `weight` where `plus_one` says so."""

    weight: Tensor
    eps: float
    name: str
    plus_one: bool

    def __call__(self, x: Tensor, added: Tensor | None) -> Tensor:
        """Add `added` to x in place; gives the norm of x."""
        if added is not None:
            x += added
        row = x.view(-1)  # a third of the time of torch.rms_norm, which is a chain of operators on a CPU
        return (x * self.weight).mul_((torch.dot(row, row).item() / len(row) + self.eps) ** -0.5)


@dataclass(frozen=True)
class TokenBlock:
    before: TokenNorm
    queries: tuple[str, ...]  # paths of the layers of queries, keys and values
    output: tuple[str, ...]
    between: TokenNorm
    gate_up: tuple[str, ...]
    down: tuple[str, ...]
    act: str  # one of ACTIVATIONS


@dataclass(frozen=True)
class TokenStructure:
    blocks: tuple[TokenBlock, ...]
    last: TokenNorm
    head: tuple[str, ...]
    rotary: nn.Module
    layers: dict[str, QuantLinear]


class _UnknownError(Exception):
    """Raised where the model's computation cannot be recognised, so that the fast token step must not replace it."""


# What a model was seen to be, and the modules and parameters that it had then.
_structures: WeakKeyDictionary[nn.Module, tuple[list[ref[Any]], TokenStructure | str]] = WeakKeyDictionary()


def structure_of(model: nn.Module) -> TokenStructure | str:
    """The parts of a model in the order of its run, or why its steps are not known; seen anew where one changed."""
    parts = [*model.modules(), *model.parameters()]
    references, structure = _structures.get(model, ([], ""))
    if len(references) == len(parts) and all(one() is part for one, part in zip(references, parts, strict=True)):
        return structure
    try:
        structure = _see(model, view_of(model, anew=bool(references)))
    except (PlanError, _UnknownError) as error:
        structure = str(error)
    _structures[model] = [ref(part) for part in parts], structure
    return structure


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise _UnknownError(reason)


def _see(model: nn.Module, view: ModelView) -> TokenStructure:
    _require(not view.unknown and not view.changed, "a part of the model could not be followed")
    config = getattr(model, "config", None)
    _require(getattr(config, "sliding_window", None) is None, "attention goes through a window")
    rotary = [module for module in model.modules() if "inv_freq" in module._buffers]
    _require(len(rotary) == 1, "there is not one module of rotary positions")
    _require(getattr(rotary[0], "rope_type", "default") in FIXED_ANGLES, "angles of positions depend on the length")
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    linears = {linear.weight: linear for linear in view.linears}
    _require(len(linears) == len(view.linears), "a weight is read more than once")
    _require(all(linear.path in layers for linear in view.linears), "not all of its products are packed")
    norms = {norm.input: norm for norm in view.norms}
    residuals = {residual.kept: residual for residual in view.residuals}
    blocks, value = [], view.norms[0].input if view.norms else -1
    for attention, mlp in zip(view.attentions, view.gated, strict=len(view.attentions) == len(view.gated)):
        first = residuals.get(value)
        second = None if first is None else residuals.get(first.output)
        _require(first is not None and second is not None, "blocks are not a sum of attention and MLP")
        assert first is not None
        assert second is not None
        before, between = norms.get(value), norms.get(first.output)
        names = (*attention.queries, *attention.keys, *attention.values)
        reading = tuple(linears[name] for name in names)
        is_plain = len(names) == 3 and len(attention.outputs) == 1
        _require(is_plain and not mlp.is_fused and mlp.activation in ACTIVATIONS, "projections are joined, or others")
        _require(not mlp.has_casts and mlp.only_down, "numbers of the MLP are read by others")
        output = linears[attention.outputs[0]]
        outputs = (output.output, mlp.down.output)
        _require(outputs == (first.added, second.added), "something lies between a product and its sum")
        blocks.append(
            TokenBlock(
                _norm(model, before, reading),
                tuple(linear.path for linear in reading),
                (output.path,),
                _norm(model, between, (mlp.gate, mlp.up)),
                (mlp.gate.path, mlp.up.path),
                (mlp.down.path,),
                mlp.activation,
            )
        )
        value = second.output
    last = norms.get(value)
    _require(bool(blocks) and len(view.norms) == 2 * len(blocks) + 1, "norms are not two a block and one at the end")
    head = next((linear for linear in view.linears if last is not None and linear.source == last.output), None)
    _require(head is not None and len(view.linears) == 7 * len(blocks) + 1, "products are not seven a block and a head")
    assert head is not None
    return TokenStructure(tuple(blocks), _norm(model, last, (head,)), (head.path,), rotary[0], layers)


def _norm(model: nn.Module, norm: NormUse | None, readers: Sequence[LinearUse]) -> TokenNorm:
    if norm is None or norm.kind != "rms_norm" or norm.weight is None or norm.bias is not None or norm.eps is None:
        raise _UnknownError("a norm is missing, or is no RMS norm")
    _require(all(linear.source == norm.output for linear in readers), "a product reads something else than its norm")
    weight = model.get_parameter(norm.weight).detach()
    _require(weight.dtype == torch.float32 and weight.device.type == "cpu", "norms are not in float32 on a CPU")
    return TokenNorm(weight + 1 if norm.plus_one else weight, norm.eps, norm.weight, norm.plus_one)


def _loops_for(hidden: int, queries: int, heads: int, width: int) -> StepLoops | None:
    """Compiled loops for these sizes, where numba is here; else operators of torch do the same."""
    if importlib.util.find_spec("numba") is None:
        return None
    from bitplan.packed.language import token_loops

    return token_loops.StepLoops(hidden, queries, heads, width) if token_loops.fits(hidden, width) else None


class TokenSteps:
    """Computes logits a token at a time without the model's forward; holds keys and values of all before."""

    def __init__(self, model: Any, structure: TokenStructure, cache: Any) -> None:
        self._structure, self._embedding = structure, model.get_input_embeddings()
        keys: list[Tensor] = [layer.keys for layer in cache.layers]
        self.length = keys[0].shape[2]
        self._heads, self._width = keys[0].shape[1], keys[0].shape[3]
        self._cache_rows = torch.empty(0)
        queries = structure.layers[structure.blocks[0].output[0]].in_features
        self._loops = _loops_for(len(structure.last.weight), queries // self._width, self._heads, self._width)
        self._grow([(layer.keys, layer.values) for layer in cache.layers])
        self._calls: dict[tuple[str, ...], tuple[Bound, int]] = {}

    def _grow(self, filled: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Allocate more tokens' keys, values [layers, 2, heads, tokens, width] and angles, with what is there."""
        room = self.length + ROOM
        cache = torch.empty(len(filled), 2, self._heads, room, self._width)
        for layer, pair in enumerate(filled):
            for which, numbers in enumerate(pair):
                cache[layer, which, :, : self.length] = numbers.reshape(self._heads, self.length, self._width)
        self._cache_rows = cache
        rotary: Any = self._structure.rotary
        cos, sin = rotary(cache, torch.arange(room).unsqueeze(0))
        # Halves of a head are turned against each other: x cos + (-second, first) sin.
        self._cos = cos[0].reshape(room, 1, 2, -1)
        self._sin = sin[0].reshape(room, 1, 2, -1) * torch.tensor([[-1.0], [1.0]])

    @property
    def kv_bytes(self) -> int:
        return self._cache_rows.nbytes

    def __call__(self, token: int) -> Tensor:
        """Run the model on one more token; returns the logits [1, vocabulary] of the next."""
        if self.length == self._cache_rows.shape[3]:
            self._grow([(layer[0, :, : self.length], layer[1, :, : self.length]) for layer in self._cache_rows])
        logits = self._run(self._embedding(torch.tensor([token])), self.length, self._product)
        self.length += 1
        return logits

    def _run(self, x: Tensor, at: int, multiply: Multiply) -> Tensor:
        x, added = x.contiguous(), None
        for block, cache in zip(self._structure.blocks, self._cache_rows, strict=True):
            projected = multiply(self._normed(x, added, block.before), block.queries)
            added = multiply(self._attended(projected, cache, at), block.output)
            gate, up = multiply(self._normed(x, added, block.between), block.gate_up).chunk(2, dim=-1)
            added = multiply(ACTIVATIONS[block.act](gate) * up, block.down)
        return multiply(self._normed(x, added, self._structure.last), self._structure.head)

    def _normed(self, x: Tensor, added: Tensor | None, norm: TokenNorm) -> Tensor:
        return norm(x, added) if self._loops is None else self._loops.norm(x, added, norm.weight, norm.eps)

    def _attended(self, projected: Tensor, cache: Tensor, at: int) -> Tensor:
        """Attention of one token, whose keys and values are entered; `projected` are its queries, keys and values."""
        heads, width, cos, sin = self._heads, self._width, self._cos[at], self._sin[at]
        if self._loops is not None:
            return self._loops.attention(projected, cache, at, cos, sin)
        parts = projected.view(1, -1, width)
        count = parts.shape[1] - heads
        turned = parts[:, :count].reshape(count, 2, -1)
        turned = torch.addcmul(turned * cos, turned.flip(1), sin).reshape(1, count, width)
        cache[0, :, at] = turned[0, count - heads :]
        cache[1, :, at] = parts[0, count:]
        keys, values = cache[0, :, : at + 1], cache[1, :, : at + 1]
        # Queries that share keys are rows of one product; torch's attention would repeat keys and values for them.
        scores = torch.bmm(turned[0, : count - heads].view(heads, -1, width), keys.mT)
        return torch.bmm(scores.mul_(width**-0.5).softmax(-1), values).reshape(1, -1)

    def _product(self, x: Tensor, paths: tuple[str, ...]) -> Tensor:
        call = self._calls.get(paths)
        if call is None:
            call = self._calls[paths] = self._bound(x, paths)
        y = call[0](x, (1, call[1]))
        assert y is not None
        return y

    def _bound(self, x: Tensor, paths: tuple[str, ...]) -> tuple[Bound, int]:
        """Prepare one call for several layers of one input, joined if they can be; with the number of outputs."""
        layers = [self._structure.layers[path] for path in paths]
        joint: JointProjection | None = layers[0].joint
        joined = None if joint is None or joint.layers != layers else joint.joined_layer()
        if joined is not None:
            layers = [joined]
        calls = [layer.bind_product(x) for layer in layers]
        outputs = sum(layer.out_features for layer in layers)
        if len(calls) == 1:
            return calls[0], outputs
        sizes = [(1, layer.out_features) for layer in layers]

        def run(x: Tensor, _shape: tuple[int, ...]) -> Tensor:
            parts = [call(x, size) for call, size in zip(calls, sizes, strict=True)]
            return torch.cat([part for part in parts if part is not None], dim=-1)

        return run, outputs

    def why_not(self, token: int, calls: dict[str, tuple[Tensor, Tensor]], logits: Tensor) -> str | None:
        """Why these steps are not those of the model, which has just made the last token; None if they are.

        calls  inputs and outputs of the model's products, by path; `logits` is what it gave
        """

        def require_close(x: Tensor, expected: Tensor, difference: str) -> None:
            if not bool((x - expected).abs().amax() <= TOLERANCE * expected.abs().amax()):
                raise _UnknownError(f"{difference} than in the model's forward")

        def multiply(x: Tensor, paths: tuple[str, ...]) -> Tensor:
            for path in paths:
                require_close(x, calls[path][0].reshape(x.shape), f"{path} would get another input")
            return torch.cat([calls[path][1].reshape(1, -1) for path in paths], dim=-1)

        try:
            repeated = self._run(self._embedding(torch.tensor([token])), self.length - 1, multiply)
            require_close(repeated, logits, "there would be other logits")
        except (_UnknownError, RuntimeError, KeyError) as error:
            return str(error)
        return None


def piece_tokens(texts: int, on_cpu: bool) -> int:
    """How many tokens of each text are read at once; on a CPU, where more rows are no quicker, so many of all texts."""
    return max(LEAST_PIECE, PIECE_TOKENS // texts) if on_cpu else PIECE_TOKENS


class Decoding:
    """A text in the making: gives the logits after each token, by the model, and soon by quicker steps where it can.

    These are `TokenSteps` on a CPU, `TokenGraph` on a GPU.

    `why_not` says why a model keeps its own forward, once two single tokens were given; None before, and where it does
    not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._cache, self._steps = model, None, None
        self.why_not: str | None = None
        takes = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}  # not those of the whole prompt
        on_cpu = all(part.device.type == "cpu" for part in (*model.parameters(), *model.buffers()))
        self._structure = structure_of(model) if on_cpu else "the model lies on another device"
        if on_cpu and kv_of(model) is not None:
            self._structure = "keys and values are kept in formats"
        if isinstance(self._structure, str):
            self.why_not = self._structure
        if not on_cpu:
            self._use_graph()

    _cache: Any
    _steps: TokenSteps | None
    _graph: TokenGraph | None = None

    def _use_graph(self) -> None:
        """Let tokens of a model on a GPU be recorded, where they can be."""
        if importlib.util.find_spec("triton") is None:
            self.why_not = "Triton is not installed, whose kernels attend to a growing cache"
            return
        graph = TokenGraph(self._model, self._options)
        self.why_not = graph.why_not
        self._graph = graph if graph.why_not is None else None

    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after these tokens [batch, length]; many are read a piece at a time."""
        piece = piece_tokens(len(ids), on_cpu=ids.device.type == "cpu")
        pieces = ids.split(piece, dim=1) if ids.shape[1] > piece and self._reads_pieces() else (ids,)
        return [self._read(piece) for piece in pieces][-1]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that are held now."""
        from bitplan.packed.kv_cache import kv_bytes  # which needs transformers

        if self._steps is not None:
            return self._steps.kv_bytes
        return 0 if self._cache is None else kv_bytes(self._cache)

    def _reads_pieces(self) -> bool:
        """Whether tokens can come in pieces: some layers without keys and values take a text whole or by one token."""
        from transformers import DynamicCache

        config = getattr(self._model, "config", None)
        cache = None if config is None else DynamicCache(config=config.get_text_config(decoder=True))
        return cache is not None and len(cache.layers) > 0 and not any(cache.is_linear)

    def _read(self, ids: Tensor) -> Tensor:
        if self._steps is not None:  # the model's cache has no more tokens since then
            return [self._steps(token) for (token,) in ids.mT.tolist()][-1]
        if self._graph is not None:
            recorded = self._graph(ids)
            self._cache, self.why_not = self._graph.cache, self._graph.why_not
            return recorded
        is_step = ids.shape == (1, 1) and self._cache is not None and self.why_not is None
        calls: dict[str, tuple[Tensor, Tensor]] = {}
        hooks = []
        if is_step and isinstance(self._structure, TokenStructure):
            for path, layer in self._structure.layers.items():
                keep = lambda _layer, args, output, path=path: calls.__setitem__(path, (args[0], output))
                hooks.append(layer.register_forward_hook(keep))
        try:
            logits, self._cache = read_on(self._model, self._cache, input_ids=ids, **self._options)
        finally:
            for hook in hooks:
                hook.remove()
        if is_step and isinstance(self._structure, TokenStructure):
            self._switch(int(ids), calls, logits)
        return logits

    def _switch(self, token: int, calls: dict[str, tuple[Tensor, Tensor]], logits: Tensor) -> None:
        assert isinstance(self._structure, TokenStructure)
        layers = getattr(self._cache, "layers", None)
        if not layers or len(layers) != len(self._structure.blocks):
            self.why_not = "the model's cache is of another kind"
            return
        if any(getattr(layer, "is_sliding", False) for layer in layers):
            self.why_not = "attention goes through a window"
            return
        steps = TokenSteps(self._model, self._structure, self._cache)
        self.why_not = steps.why_not(token, calls, logits)
        self._steps = None if self.why_not else steps
