"""How the operators of compiled FP8 layers are bound, by their names: (what a call depends on, how it is bound)."""

from __future__ import annotations

from collections.abc import Callable

from bitplan.fp8.layers import bound_mlp, bound_operators
from bitplan.fp8.layers.bound_operators import Bound, Key

BINDERS: dict[str, tuple[Callable[..., Key], Callable[..., Bound | None]]] = {
    "fp8_linear_forward": (bound_operators.linear_key, bound_operators.bind_linear),
    "fp8_linear_backward": (bound_operators.linear_backward_key, bound_operators.bind_linear_backward),
    "fp8_norm_linear_forward": (bound_operators.norm_linear_key, bound_operators.bind_norm_linear),
    "fp8_norm_linear_backward": (bound_operators.norm_linear_backward_key, bound_operators.bind_norm_linear_backward),
    "fp8_mlp_forward": (bound_mlp.mlp_key, bound_mlp.bind_mlp),
    "fp8_mlp_backward": (bound_mlp.mlp_backward_key, bound_mlp.bind_mlp_backward),
}
