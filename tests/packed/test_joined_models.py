"""Models as people write them, packed and joined by what they compute: the numbers of separate packed layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

from bitplan import apply_plan, describe
from bitplan.packed import QuantExperts, fuse_projections
from tests.fp8.test_find_linears import PlainExperts
from tests.plan.structure import handwritten_models as models

TOKENS = torch.arange(8)[None] % models.VOCABULARY


@pytest.mark.parametrize(
    ("model", "example", "joined"),
    [
        (models.NanoGPT, (TOKENS,), []),  # its projections have biases, and q, k, v are one
        (models.Titan, (TOKENS,), ["attention.wq+wk+wv", "feed_forward.w1+w3"]),
        (lambda: models.Titan(models.FusedBlock), (TOKENS,), []),
        (
            lambda: models.Titan(models.ParallelBlock),
            (TOKENS,),
            ["attention.wq+attention.wk+attention.wv+mlp.w1+mlp.w3"],
        ),
        (lambda: models.Titan(models.LlamaDecoderLayer), (TOKENS,), ["self_attn.wq+wk+wv", "mlp.w1+w3"]),
        (lambda: models.Titan(models.LeakyBlock), (TOKENS,), ["gate_proj+up_proj"]),
        (models.DiT, (torch.zeros(1, 4, 16, 16), torch.zeros(1)), []),
    ],
    ids=["nanogpt", "torchtitan", "fused", "parallel", "sandwich", "leaky", "dit"],
)
def test_joined_layers_give_the_numbers_of_separate_ones(model, example, joined) -> None:
    torch.manual_seed(0)
    plain: nn.Module = model().eval()
    packed = copy.deepcopy(plain)
    weights = {use.weight for use in describe(plain).linears if use.role != "head"}
    apply_plan(packed, dict.fromkeys(sorted(weights), "int8_row") | {"*": "float32"})
    with torch.no_grad():
        expected, alone = plain(*example), packed(*example)
        layers = [f"layers.{index}.{names}" for index in (0, 1) for names in joined]
        assert fuse_projections(packed) == layers
        # Products are the same to the bit; a mean over a part, which lies in rows of all, may add in another order.
        torch.testing.assert_close(packed(*example), alone, rtol=1e-6, atol=1e-6)
    assert float((alone - expected).norm() / expected.norm()) < 0.03


class Routed(nn.Module):
    """Experts of somebody's own class, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 2), PlainExperts(width=64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(1)
        return self.experts(x, chosen, weights)


def test_experts_of_any_class_are_packed_by_what_they_compute() -> None:
    torch.manual_seed(0)
    plain = Routed().eval()
    packed = copy.deepcopy(plain)
    apply_plan(packed, {"experts.*": "int8_row", "*": "float32"})
    assert isinstance(packed.experts, QuantExperts)
    assert {name for name, _ in packed.experts.named_children()} >= {"into", "back"}
    x = torch.randn(5, 64)
    with torch.no_grad():
        expected = plain(x)
        assert float((packed(x) - expected).norm() / expected.norm()) < 0.03
