"""GroupedLinear: the same linear layer of every expert of an MoE, for tokens sorted by expert, in FP8 or in BF16.

    layer = GroupedLinear(8, 7168, 2048, recipe=Fp8Recipe("rowwise"), device="cuda", dtype=torch.bfloat16)
    y = layer(x_sorted, tokens_per_expert)      # x [T, K]; int tensor [E] on x's device: its first rows are expert 0's

Policies call them column_grouped (fc1 of the experts) and row_grouped (fc2): `parallel` divides them over processes.
Any routing works: experts without tokens (their weight gradient is zero), one expert with all of them, counts that are
no multiple of anything. How many tokens an expert has stays on the device: grids and buffers have the size that the
worst routing needs, and nothing waits for the host. So a GPU layer cannot at once refuse counts that do not add up to
the rows: they are cut to the rows, so that kernels stay inside their tensors; the outputs of rows without an expert are
undefined, and `check_routing` raises later.

Products as in `linear`: each by its own recipe, or in BF16 through `torch._grouped_mm`, with the same interface, so
that the two can be timed against each other. A scale belongs to one expert, and so does the guess that a tensorwise one
starts from (`scale_guesses`); mxfp8 has no grouped product here. A CPU computes in float32 of the decoded values.
torch.compile runs the layer eagerly, between graphs: it could not trace prepared launches.

`Fp8Experts` computes the experts of a block as two such layers. A module that holds them (`experts_of`: gate and up
[E, 2 F, H], down [E, H, F]) is called with hidden states [T, H] and, for each token, its experts and their weights
[T, k]: tokens are sorted by expert once, both products use that order, and the results are weighted and added to the
tokens that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bitplan.fp8.fused_projections import Renamed
from bitplan.fp8.kernels import experts_products as kernels
from bitplan.fp8.kernels.experts_layout import GroupedFp8, GroupLayout
from bitplan.fp8.kernels.experts_products import lay_out, pick_impl, token_pad
from bitplan.fp8.layer_settings import Fp8LayerError, Fp8Recipe, GemmChoice, check_shape, require_fp8
from bitplan.fp8.layers.linear_function import INPUT_TYPES
from bitplan.fp8.layers.scale_guesses import GRAD, INPUT, WEIGHT, guess_for
from bitplan.fp8.layers.weight_casts import count_backward, derived_layouts, expire_casts, free_with
from bitplan.fp8.layers.weight_source import CastsWeight
from bitplan.fp8.recipes import BF16, RECIPES, expert_recipes
from bitplan.plan.structure.describe import experts_of
from bitplan.plan.structure.recognise import ACTIVATIONS


class GroupedLinear(CastsWeight):
    """Linear layers of all experts, weight [experts, out_features, in_features], in one product each way. `gemms` of
    None: all three products by the recipe's own name.

    `impl` chooses the FP8 products: "auto", "gluon", "torch", "triton" or "reference". On a GPU "auto" decides by shape
    and recipe (see `fp8.kernels.experts_products`; its `gluon_obstacle` says why the fastest cannot run).
    """

    misrouted: Tensor

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        recipe: Fp8Recipe,
        gemms: GemmChoice | None = None,
        bias: bool = False,
        reuse_weight_cast: bool = True,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.recipe, self.gemms = recipe, gemms or GemmChoice.all(recipe.name)
        self.impl = impl
        self._check(num_experts)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, **where))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features, **where)) if bias else None
        self.register_buffer("misrouted", torch.zeros(1, dtype=torch.int32, device=device), persistent=False)
        self.reuse_weight_cast = reuse_weight_cast
        if self.weight.device.type != "meta":
            require_fp8(self.weight.device, self.gemms.recipes)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw numbers as nn.Linear does: uniform within 1 / sqrt(in_features)."""
        limit = self.in_features**-0.5
        nn.init.uniform_(self.weight, -limit, limit)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -limit, limit)

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Multiply x [T, in_features], whose rows are sorted by expert, to [T, out_features]."""
        if torch.compiler.is_compiling():
            run: Callable[..., Tensor] = torch.compiler.disable(self._forward)
            return run(x, tokens_per_expert)
        return self._forward(x, tokens_per_expert)

    def _forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype not in INPUT_TYPES:
            raise Fp8LayerError(
                f"GroupedLinear takes bfloat16, float16 or float32 rows [tokens, {self.in_features}] sorted by expert, "
                f"got {x.dtype} of shape {tuple(x.shape)}"
            )
        if tuple(tokens_per_expert.shape) != (self.num_experts,) or tokens_per_expert.device != x.device:
            raise Fp8LayerError(
                f"tokens_per_expert must have the {self.num_experts} experts, on {x.device}, "
                f"got shape {tuple(tokens_per_expert.shape)} on {tokens_per_expert.device}"
            )
        if self.misrouted.device != x.device:  # the layer was made on "meta", over an existing weight
            self.misrouted = torch.zeros(1, dtype=torch.int32, device=x.device)
        layout = lay_out(tokens_per_expert, x.shape[0], self._pad(x.device), misrouted=self.misrouted)
        call = _Call(self.recipe, self.gemms, self.impl, layout, self.reuse_weight_cast)
        apply: Callable[..., Tensor] = _Grouped.apply
        return apply(x, self.weight, self.bias, call)

    def check_routing(self) -> None:
        """Raise if counts of any forward so far did not add up; waits for the GPU, so call it once a step at most."""
        wrong = int(self.misrouted)
        if wrong:
            self.misrouted.zero_()
            raise Fp8LayerError(
                f"tokens_per_expert did not add up to the rows of x in some forward: {wrong} rows too many, missing or "
                "negative; results since the last check are wrong"
            )

    def extra_repr(self) -> str:
        products = f"fprop={self.gemms.fprop}, dgrad={self.gemms.dgrad}, wgrad={self.gemms.wgrad}"
        sizes = f"{self.num_experts} experts, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {products}, fp8={self.recipe.fp8}"

    def _check(self, num_experts: int) -> None:
        if num_experts < 1:
            raise Fp8LayerError(f"a GroupedLinear has at least one expert, got {num_experts}")
        for recipe in self.gemms.recipes:
            if RECIPES[recipe].experts is None:
                raise Fp8LayerError(f"experts have {', '.join(expert_recipes())} and bf16, got {recipe!r}")
        check_shape(self.gemms, (self.out_features, self.in_features), type(self).__name__)

    def _pad(self, device: torch.device) -> int:
        wgrad = self.gemms.wgrad
        if wgrad == BF16:
            return 16
        picked = pick_impl(wgrad, device, self.recipe.grad_fp8, self.impl, width=self.in_features)
        return token_pad(wgrad, picked)


@dataclass(frozen=True)
class _Call:
    """What a forward and its backward share, apart from tensors."""

    recipe: Fp8Recipe
    gemms: GemmChoice
    impl: str
    layout: GroupLayout
    reuse: bool

    def weight_casts(self, weight: Tensor, recipe: str, *, rows: bool, cols: bool) -> tuple[GroupedFp8, GroupedFp8]:
        """The casts of the weight that are asked for, plain and transposed; kept with the casts of other weights."""
        eps = self.recipe.eps.weight

        def make(rows: bool, cols: bool) -> tuple[GroupedFp8 | None, GroupedFp8 | None]:
            guess = guess_for(recipe, weight, WEIGHT, experts=weight.shape[0])
            return kernels.cast_experts(weight.detach(), recipe, eps, rows=rows, cols=cols, guess=guess)

        return derived_layouts(weight, ("grouped " + recipe, eps), make, rows=rows, cols=cols, reuse=self.reuse)

    def tokens(
        self, x: Tensor, rows_by: str, cols_by: str, fp8: str, eps: float, weight: Tensor, role: str
    ) -> list[GroupedFp8 | None]:
        """Cast x for two products, along its width and along tokens; `weight`, `role`: whose scale guesses to use."""
        layouts: list[GroupedFp8 | None] = [None, None]
        for recipe in {rows_by, cols_by} - {BF16}:
            guess = guess_for(recipe, weight, role, fp8, self.layout.experts)
            casts = kernels.cast_tokens(
                x, recipe, self.layout, fp8, eps, rows=rows_by == recipe, cols=cols_by == recipe, guess=guess
            )
            layouts = [new if new is not None else old for new, old in zip(casts, layouts, strict=True)]
        return layouts

    def options(self, product: str) -> dict[str, Any]:
        return {"fast_accum": product in self.recipe.fast_accum, "impl": self.impl}


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        gemms, eps = call.gemms, call.recipe.eps
        need_x, need_w = ctx.needs_input_grad[:2]
        cols_by = gemms.wgrad if need_w else BF16
        x_rows, x_cols = call.tokens(x, gemms.fprop, cols_by, "e4m3", eps.input, weight, INPUT)
        if x_rows is None:
            y = plain_rows(x, weight, call.layout, bias)
        else:
            with_cols = call.reuse and need_x and gemms.dgrad == gemms.fprop
            cast, _ = call.weight_casts(weight, gemms.fprop, rows=True, cols=with_cols)
            y = kernels.grouped_rows(x_rows, cast, call.layout, x.dtype, bias=bias, **call.options("fprop"))
        keep_x = need_w and gemms.wgrad == BF16
        kept = (x, x) if keep_x else (x_cols.codes, x_cols.scale) if x_cols is not None else (None, None)
        ctx.save_for_backward(weight, *kept)
        ctx.call, ctx.bias_dtype = call, bias.dtype if bias is not None else None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight, kept, kept_scale = ctx.saved_tensors
        call: _Call = ctx.call
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        dgrad, wgrad = call.gemms.dgrad if need_x else BF16, call.gemms.wgrad if need_w else BF16
        dy = dy.contiguous()
        dy_rows, dy_cols = call.tokens(dy, dgrad, wgrad, call.recipe.grad_fp8, call.recipe.eps.grad, weight, GRAD)
        dx = dw = db = None
        if need_x and dy_rows is not None:
            _, cast = call.weight_casts(weight, dgrad, rows=False, cols=True)
            dx = kernels.grouped_rows(dy_rows, cast, call.layout, dy.dtype, **call.options("dgrad"))
        elif need_x:
            dx = plain_rows(dy, weight.transpose(1, 2), call.layout, None)
        if need_w and dy_cols is not None:
            x_cols = GroupedFp8(kept, kept_scale, dy_cols.kind, dy_cols.uniform)
            dw = kernels.grouped_sums(dy_cols, x_cols, call.layout, weight.dtype, **call.options("wgrad"))
        elif need_w:
            dw = plain_sums(dy, kept, call.layout).to(weight.dtype)
        if dw is not None and call.reuse:
            count_backward(weight, dw)
        if need_b:
            ones = dy.new_ones((dy.shape[0], 16))  # the narrowest matrix that the grouped product takes
            db = plain_sums(dy, ones, call.layout)[:, :, 0].to(ctx.bias_dtype)
        return dx, dw, db, None


# ---- BF16 ------------------------------------------------------------------------------------------------------------


def plain_rows(x_TK: Tensor, w_ENK: Tensor, layout: GroupLayout, bias: Tensor | None) -> Tensor:
    """Each row times its expert's matrix, transposed, plus its bias, without FP8."""
    if not x_TK.shape[0]:
        return x_TK.new_zeros((0, w_ENK.shape[1]))
    if x_TK.is_cuda:
        out = torch._grouped_mm(_bfloat16(x_TK), w_ENK.to(torch.bfloat16).transpose(1, 2), offs=layout.ends)
        return kernels.add_expert_bias(out, bias, layout)
    products = [
        x_TK[start:end].float() @ w_NK.float().t() for (start, end), w_NK in zip(layout.spans(), w_ENK, strict=True)
    ]
    if bias is not None:
        products = [product + b_N.float() for product, b_N in zip(products, bias, strict=True)]
    return torch.cat(products).to(x_TK.dtype)


def plain_sums(a_TN: Tensor, b_TK: Tensor, layout: GroupLayout) -> Tensor:
    """Multiply, without FP8, a transposed by b over each expert's own rows: [E, N, K]."""
    if not a_TN.shape[0]:
        return a_TN.new_zeros((layout.experts, a_TN.shape[1], b_TK.shape[1]))
    if a_TN.is_cuda:
        return torch._grouped_mm(_bfloat16(a_TN).t(), _bfloat16(b_TK), offs=layout.ends)
    sums = [a_TN[start:end].float().t() @ b_TK[start:end].float() for start, end in layout.spans()]
    return torch.stack(sums)


def _bfloat16(x: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16:
        raise Fp8LayerError(f"torch's grouped product on a GPU takes bfloat16, got {x.dtype}; cast x before the layer")
    return x


# ---- experts ---------------------------------------------------------------------------------------------------------


class Fp8Experts(nn.Module):
    """Takes the place of a module that holds experts, over the same parameters."""

    def __init__(self, experts: nn.Module, recipe: Fp8Recipe, fc1: GemmChoice, fc2: GemmChoice) -> None:
        super().__init__()
        expert_use = experts_of(experts)
        assert expert_use is not None
        gate_up, down = experts.get_parameter(expert_use.gate_up), experts.get_parameter(expert_use.down)
        self.checkpoint_names = (Renamed(expert_use.gate_up, "fc1.weight"), Renamed(expert_use.down, "fc2.weight"))
        self.num_experts: int = gate_up.shape[0]
        self.act_fn = ACTIVATIONS[expert_use.activation]
        self.fc1, self.fc2 = grouped_of(gate_up, recipe, fc1), grouped_of(down, recipe, fc2)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
        counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))  # bincount would wait for the GPU
        token = order // top_k_index.shape[-1]
        gate, up = self.fc1(hidden_states[token], counts).chunk(2, dim=-1)
        output = self.fc2(self.act_fn(gate) * up, counts)
        weighed = output * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(hidden_states).index_add(0, token, weighed.to(hidden_states.dtype))


def grouped_of(weight: nn.Parameter, recipe: Fp8Recipe, gemms: GemmChoice) -> GroupedLinear:
    """A grouped linear over an existing Parameter [E, N, K]."""
    experts, outputs, inputs = weight.shape
    layer = GroupedLinear(experts, inputs, outputs, recipe=recipe, gemms=gemms, device="meta", dtype=weight.dtype)
    layer.weight = weight
    free_with(weight)
    layer.misrouted = torch.zeros(1, dtype=torch.int32, device=weight.device)
    return layer


def cast_dropper(module: nn.Module) -> Callable[[], None]:
    """A function that makes all FP8 layers of a module cast their weights anew, as after an optimizer's step."""
    weights = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    return lambda: expire_casts(weights)
