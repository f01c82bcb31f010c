"""warm_up: layers are settled, alone or together, before their first call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bitplan.packed.fused_projections import fuse_projections
from bitplan.packed.quant_linear import QuantLinear, warm_up
from tests.packed.linear_samples import packed


class Projections(nn.Module):
    """Two that read one input and can be joined, and one of another format."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (QuantLinear(packed("mxfp4"), strategy="decode") for _ in range(2))
        self.other = QuantLinear(packed("nvfp4"), strategy="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x) + self.other(x)


def test_layers_are_settled_before_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Projections()
    assert fuse_projections(model) == ["one+two"]
    settled: list[tuple[str, int]] = []
    right = QuantLinear.settle

    def watched(self: QuantLinear, rows: int, dtype: torch.dtype) -> str:
        settled.append((self.weight.fmt.name, rows))
        return right(self, rows, dtype)

    monkeypatch.setattr(QuantLinear, "settle", watched)
    assert warm_up(model, (1, 4), torch.float32) > 0
    assert sorted(settled) == sorted([("mxfp4", 1), ("mxfp4", 4)] * 2 + [("nvfp4", 1), ("nvfp4", 4)])
    assert model.other.graph.expanded is not None
