"""What better rounding does to a real language model at the same bytes: KL and perplexity, for docs/rounding.md.

python benchmarks/rounding.py --model lm26m --text lm26m_valid.txt

Rows: round to nearest, scales by weighted search, error-compensated rounding. Statistics come from the first part of
the text, figures from the rest. Layers are rounded one after another: each meets the inputs that the layers before it,
already rounded, give. Finished rows are kept in the result file: after a crash the same command goes on where it
stopped. `--rows` measures some rows only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.kernels import decode
from bitplan.store import round_weight

FORMATS = ("q4_0_gguf", "int4_g32", "mxfp4", "nvfp4")
METHODS = ("nearest", "weighted", "compensated")
PARTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
CALIBRATION_SHARE = 0.6
CONTEXT = 512


class _Stop(Exception):
    """The inputs wanted are there: the rest of the pass is not needed."""


@dataclass
class Statistics:
    """X^T X of a layer's inputs, and their products with what an unrounded model gives there."""

    hessian: Tensor | None = None
    cross: Tensor | None = None
    count: int = 0

    def add(self, inputs: Tensor, exact: Tensor | None = None) -> None:
        rows = inputs.reshape(-1, inputs.shape[-1])
        product = rows.T @ rows
        self.hessian = product if self.hessian is None else self.hessian + product
        if exact is not None:
            crossed = exact.reshape(rows.shape).T @ rows
            self.cross = crossed if self.cross is None else self.cross + crossed
        self.count += len(rows)


@dataclass
class Settings:
    """How one row is rounded."""

    fmt: str
    method: str
    damping: float = 0.01
    options: dict[str, Any] = field(default_factory=dict)
    sequential: bool = True
    exact_targets: bool = False

    def encode(self, weight: Tensor, statistics: Statistics) -> Tensor:
        if self.method == "nearest":
            from bitplan.kernels import encode

            return decode(encode(weight, self.fmt))
        hessian = statistics.hessian
        assert hessian is not None
        if self.method == "weighted":
            return decode(round_weight(weight, self.fmt, moments=hessian.diagonal()))
        if statistics.cross is not None:
            weight = towards_exact(weight, statistics, self.damping)
        return decode(round_weight(weight, self.fmt, hessian=hessian, damping=self.damping, **self.options))


def towards_exact(weight: Tensor, statistics: Statistics, damping: float) -> Tensor:
    """The weight that makes of rounded inputs what the weight makes of exact ones, by damped least squares."""
    assert statistics.hessian is not None
    assert statistics.cross is not None
    hessian = statistics.hessian.double()
    ridge = damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    change = torch.linalg.solve(hessian + ridge, (statistics.cross.double() - hessian).T, left=True)
    return (weight.double() + weight.double() @ change.T).float()


def round_model(model: nn.Module, batches: list[Tensor], settings: Settings) -> nn.Module:
    """A copy with every linear and the embedding rounded, layer by layer."""
    rounded = copy.deepcopy(model)
    inner, exact = rounded.model, model.model
    head = Statistics()
    if settings.method != "nearest":
        for ids in batches:
            head.add(exact(input_ids=ids, use_cache=False).last_hidden_state)
    inner.embed_tokens.weight.data = settings.encode(inner.embed_tokens.weight.data, head)
    if settings.method == "nearest":
        for name, module in inner.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.data = settings.encode(module.weight.data, head)
        return rounded
    states, kwargs = _first_states(inner, batches)
    exact_states, _ = _first_states(exact, batches)
    for layer, exact_layer in zip(inner.layers, exact.layers, strict=True):
        for names in PARTS:
            modules = {name.rpartition(".")[2]: module for name, module in layer.named_modules()}
            others = {name.rpartition(".")[2]: module for name, module in exact_layer.named_modules()}
            statistics = Statistics()
            for state, exact_state, arguments in zip(states, exact_states, kwargs, strict=True):
                inputs = _inputs_of(layer, modules[names[0]], state, arguments)
                wanted = (
                    _inputs_of(exact_layer, others[names[0]], exact_state, arguments)
                    if settings.exact_targets
                    else None
                )
                statistics.add(inputs, wanted)
            for name in names:
                modules[name].weight.data = settings.encode(modules[name].weight.data, statistics)
        states = [_output(layer, state, arguments) for state, arguments in zip(states, kwargs, strict=True)]
        if settings.exact_targets:
            exact_states = [
                _output(exact_layer, s, arguments) for s, arguments in zip(exact_states, kwargs, strict=True)
            ]
    return rounded


def _first_states(inner: nn.Module, batches: list[Tensor]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """What the first layer is called with."""
    states: list[Tensor] = []
    kwargs: list[dict[str, Any]] = []

    def catch(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        states.append(args[0] if args else keywords["hidden_states"])
        kwargs.append({key: value for key, value in keywords.items() if key != "hidden_states"})
        raise _Stop

    with _hook(inner.layers[0], catch):
        for ids in batches:
            try:
                inner(input_ids=ids, use_cache=False)
            except _Stop:
                continue
    return states, kwargs


def _inputs_of(layer: nn.Module, module: nn.Module, state: Tensor, kwargs: dict[str, Any]) -> Tensor:
    caught: list[Tensor] = []

    def catch(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        caught.append(args[0])
        raise _Stop

    with _hook(module, catch):
        try:
            layer(state, **kwargs)
        except _Stop:
            pass
    return caught[0]


def _output(layer: nn.Module, state: Tensor, kwargs: dict[str, Any]) -> Tensor:
    out = layer(state, **kwargs)
    return out if isinstance(out, Tensor) else out[0]


class _hook:
    def __init__(self, module: nn.Module, catch: Callable[..., None]) -> None:
        self.handle = module.register_forward_pre_hook(catch, with_kwargs=True)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.handle.remove()
