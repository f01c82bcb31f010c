"""The one function of autograd that all FP8 linear layers run through, and its operators for compiled graphs.

Layers differ in where the weight comes from (a `WeightSource`), where its gradient goes (to the weight, or to a master
beside it), and whether x is normalised first.

Under torch.compile the two halves are single operators (`bitplan::fp8_norm_linear_forward`, `..._backward`), so a model
compiles without a graph break, and kept casts of weights stay outside the graph, whose memory planning would otherwise
reuse their memory. Eager mode calls the two halves directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitplan.base.compiled_code import define_operator
from bitplan.fp8.casts import FP8_DTYPES, empty_scale, padded_tokens, scaling_of
from bitplan.fp8.layer_settings import Fp8LayerError
from bitplan.fp8.layers.products import Fp8Settings, run_backward, run_forward
from bitplan.fp8.layers.weight_source import CASTS, WeightSource
from bitplan.fp8.recipes import BF16

INPUT_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def run_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    text: str,
    source: WeightSource,
    master: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> Tensor:
    """Compute x [..., K], normalised if there is a norm, times weight [N, K] plus bias; autograd knows its gradient."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if torch.compiler.is_compiling() and type(source) is not WeightSource:
        raise Fp8LayerError(f"{type(source).__name__} has no operator in compiled graphs; call it outside of them")
    shape = x.shape
    if shape[-1] != weight.shape[1] or x.dtype not in INPUT_TYPES:
        raise Fp8LayerError(
            f"a layer of {weight.shape[1]} inputs takes bfloat16, float16 or float32 numbers [..., {weight.shape[1]}], "
            f"got {x.dtype} of shape {tuple(shape)}"
        )
    x_MK = x if len(shape) == 2 else x.reshape(-1, shape[-1])
    keep = torch.is_grad_enabled()  # inside the function gradients are always off
    y: Tensor = _Fp8Product.apply(x_MK, weight, master, bias, norm_weight, norm_bias, text, source, keep)  # type: ignore[no-untyped-call]
    return y if len(shape) == 2 else y.view(*shape[:-1], weight.shape[0])


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        weight: Tensor,
        master: Tensor | None,  # noqa: ARG004  it takes the gradient
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        text: str,
        source: WeightSource,
        keep: bool,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        need_x, need_w = keep and (needs[0] or needs[4] or needs[5]), keep and (needs[1] or needs[2])
        in_graph = torch.compiler.is_compiling()
        run: Any = forward_op if in_graph else run_forward
        reads = source.reuse if in_graph else source
        results = run(x_MK, norm_weight, norm_bias, weight, bias, text, need_x, need_w, reads)
        y, kept, kept_scale, *stats = results
        if norm_weight is not None:
            ctx.save_for_backward(kept, kept_scale, weight, x_MK, norm_weight, norm_bias, *stats)
        else:
            if need_w and text.split("/")[5] == BF16:  # wgrad's recipe; Dynamo would warn of from_text's cache
                kept = x_MK
            ctx.save_for_backward(kept, kept_scale, weight)
        ctx.settings = (text, source)
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        kept, kept_scale, weight, *normed = ctx.saved_tensors  # torch raises if the weight has changed since
        text, source = ctx.settings
        needs = ctx.needs_input_grad
        need_x, need_w = needs[0] or needs[4] or needs[5], needs[1] or needs[2]
        dx = dw = d_norm_weight = d_norm_bias = None
        if need_x or need_w:
            in_graph = torch.compiler.is_compiling()
            run: Any = backward_op if in_graph else run_backward
            of_norm = normed or (None,) * 5
            reads = source.reuse if in_graph else source
            results = run(dy_MN, kept, kept_scale, weight, *of_norm, text, need_x, need_w, reads)
            dx, d_norm_weight, d_norm_bias, dw = results
        db = dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs[3] else None
        return (
            dx if needs[0] else None,
            dw if needs[1] else None,
            dw if needs[2] else None,
            db,
            d_norm_weight if needs[4] else None,
            d_norm_bias if needs[5] else None,
            None,
            None,
            None,
        )


# ---- operators for compiled graphs ----------------------------------------------------------------------------------

_MOST_BOUND = 4096


def define_layer_operator(
    signature: str, run: Callable[..., tuple[Tensor | None, ...]], fake: Callable[..., Any]
) -> Any:
    """An operator of FP8 layers, whose last argument says whether weight casts are reused."""

    def in_graph(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """Run the operator, with empty tensors in place of None: operators return tensors only."""
        results = run(x, *rest[:-1], CASTS[rest[-1]])
        return tuple(x.new_empty(0) if part is None else part for part in results)

    return define_operator(signature, with_bound_calls(signature.split("(")[0], in_graph), fake)


def with_bound_calls(name: str, operator: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that gives the results of `operator`, and on a GPU repeats prepared launches.

    For CUDA inputs `BINDERS[name]` makes a key of shapes, types and settings, and a launch with these arguments
    checked; calls with the same key run that launch. CPU inputs, and calls that cannot be prepared, run `operator`
    itself.
    """
    bound: dict[tuple[Any, ...], Any] = {}
    key_of: Any = None
    bind: Any = None

    def run(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        nonlocal key_of, bind
        if not x.is_cuda:
            return operator(x, *rest)
        if bind is None:
            from bitplan.fp8.layers.bound_operators import BINDERS  # it needs Triton

            key_of, bind = BINDERS[name]
        key = key_of(x, *rest)
        call = bound.get(key)
        results: tuple[Tensor, ...] | None = call(x, *rest) if call is not None else None
        if results is not None:
            return results
        results = operator(x, *rest)
        if call is None and (new := bind(x, *rest)) is not None:
            if len(bound) >= _MOST_BOUND:
                bound.clear()
            bound[key] = new
        return results

    return run


def forward_shapes(x_MK, norm_weight, norm_bias, weight, bias, text, need_x, need_w, reuse):  # type: ignore[no-untyped-def]  # noqa: ARG001
    settings = Fp8Settings.from_text(text)
    wgrad = settings.gemms.wgrad
    y, kept, scale, rstd, mean = (x_MK.new_empty(size) for size in ((x_MK.shape[0], weight.shape[0]), 0, 0, 0, 0))
    if need_w and wgrad != BF16:
        shape = (x_MK.shape[1], padded_tokens(wgrad, x_MK.shape[0]))
        kept = x_MK.new_empty(shape, dtype=FP8_DTYPES["e4m3"])
        scale = empty_scale(shape, scaling_of(wgrad), x_MK.device)
    if norm_weight is not None:
        if need_w and wgrad == BF16:
            kept = x_MK.new_empty(x_MK.shape)
        rstd = x_MK.new_empty(x_MK.shape[0], dtype=torch.float32)
        if settings.norm is not None and settings.norm[0] == "layer":
            mean = x_MK.new_empty(x_MK.shape[0], dtype=torch.float32)
    return y, kept, scale, rstd, mean


def backward_shapes(dy_MN, kept, kept_scale, weight, x_MK, norm_weight, norm_bias, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    need_x, need_w = rest[-3:-1]
    dx, d_weight, d_bias = (dy_MN.new_empty(0) for _ in range(3))
    dw = weight.new_empty(weight.shape) if need_w else dy_MN.new_empty(0)
    if need_x:
        dx = (dy_MN if x_MK is None else x_MK).new_empty((dy_MN.shape[0], weight.shape[1]))
    if need_x and norm_weight is not None:
        d_weight = norm_weight.new_empty(norm_weight.shape)
        d_bias = dy_MN.new_empty(0) if norm_bias is None else norm_weight.new_empty(norm_weight.shape)
    return dx, d_weight, d_bias, dw


forward_op = define_layer_operator(
    "fp8_norm_linear_forward(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor weight, Tensor? bias, str text, "
    "bool need_x, bool need_w, bool reuse) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    run_forward,
    forward_shapes,
)
backward_op = define_layer_operator(
    "fp8_norm_linear_backward(Tensor dy, Tensor kept, Tensor kept_scale, Tensor weight, Tensor? x, "
    "Tensor? norm_weight, Tensor? norm_bias, Tensor? rstd, Tensor? mean, str text, bool need_x, bool need_w, "
    "bool reuse) -> (Tensor, Tensor, Tensor, Tensor)",
    run_backward,
    backward_shapes,
)
