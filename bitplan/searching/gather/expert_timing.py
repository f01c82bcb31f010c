"""Products with the experts of a layer, to be timed: as the packed runtime runs them, and in BF16.

Tokens are sent to experts at random, each to as many as the model sends it to: a product has rows x experts per token
rows, and reads the matrices of those experts alone that got one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitplan.formats import get_format
from bitplan.kernels import encode
from bitplan.measure.speed.paired_timing import Arm
from bitplan.runtime.packed.expert_products import ExpertMatrices, Routes, fused_product, looped_product, looped_rows
from bitplan.runtime.packed.product_strategy import FUSED_ROWS_UNMEASURED, compute_dtype
from bitplan.runtime.packed_weight import PackedWeight
from bitplan.searching.errors import SearchError
from bitplan.searching.gather.searched_model import SearchSubject

_PER_TOKEN = ("num_experts_per_tok", "moe_topk")


def experts_of_stacks(
    subject: SearchSubject, weights: Sequence[str]
) -> list[tuple[tuple[int, ...], Callable[[], Tensor]]]:
    """The stacks that some weights are of: the shape [experts, outputs, inputs] of each, and what gives its numbers.

    Gate and up are one product, however the file has them.
    """
    stacks: dict[str, list[str]] = {}
    for name in weights:
        site = subject.sites[name]
        if site.slice is not None:
            stacks.setdefault(site.slice.stack, []).append(name)
    found = []
    for names in stacks.values():
        rows: dict[int, list[str]] = {}
        for name in names:
            part = subject.sites[name].slice
            assert part is not None
            rows.setdefault(part.expert, []).append(name)
        outputs, inputs = (
            sum(subject.sites[name].shape[0] for name in next(iter(rows.values()))),
            subject.sites[names[0]].shape[1],
        )
        found.append(((len(rows), outputs, inputs), partial(_numbers, subject, list(rows.values()))))
    return found


def _numbers(subject: SearchSubject, experts: Sequence[Sequence[str]]) -> Tensor:
    return torch.stack([torch.cat([subject.weight(name) for name in names]) for names in experts])


def experts_per_token(subject: SearchSubject) -> int:
    """How many experts a token is sent to, by the model's config."""
    config: Any = getattr(subject.model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in _PER_TOKEN:
        count = getattr(config, name, None)
        if isinstance(count, int) and count > 0:
            return count
    raise SearchError(
        f"{subject.where}: --faster: its experts cannot be timed, for its config does not say how many a token is sent "
        f"to ({', '.join(_PER_TOKEN)}); leave them as they are (--keep '*experts*'), or give another goal"
    )


class ExpertArms:
    """One layer's experts [experts, outputs, inputs] and tokens for them."""

    def __init__(self, subject: SearchSubject, weights: Tensor, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        count, top_k = len(weights), min(len(weights), experts_per_token(subject))
        ids = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(rows)])
        self._weights, self._device = weights, weights.device
        self._routes = Routes(ids.to(self._device), count, "experts")
        x = torch.randn(rows, weights.shape[2], generator=generator).to(self._device, torch.bfloat16)
        self._x, self._sorted = x, x[self._routes.groups.order // top_k].contiguous()

    def plain(self) -> Callable[[], object]:
        half = self._weights.to(torch.bfloat16)

        def numbers(expert: int, _dtype: torch.dtype) -> Tensor:
            return half[expert]

        return lambda: looped_rows(self._sorted, None, self._routes, numbers, half.shape[1])

    def packed(self, fmt: str) -> Arm:
        """As QuantExperts would run it."""
        if get_format(fmt).is_cast:
            return self.plain

        def build() -> Callable[[], object]:
            matrices = ExpertMatrices(PackedWeight(encode(self._weights, fmt, name=fmt)))
            few = self._routes.pairs <= FUSED_ROWS_UNMEASURED * self._routes.experts
            if self._device.type == "cuda" and few and _can_fuse(matrices):
                return lambda: fused_product(self._x, None, self._routes, matrices, per_pair=False)
            rows = self._sorted.to(compute_dtype(self._device, torch.bfloat16))
            return lambda: looped_product(rows, None, self._routes, matrices, matrices.decoded)

        return build


def _can_fuse(matrices: ExpertMatrices) -> bool:
    from bitplan.kernels.matmul.fused_few_rows import why_not_fused

    return why_not_fused(matrices.encoded, torch.bfloat16) is None
