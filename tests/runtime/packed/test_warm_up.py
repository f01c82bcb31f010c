"""warm_up: layers are settled, alone or together, before their first call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.runtime.packed.fused_projections import fuse_projections
from bitplan.runtime.packed.quant_linear import QuantLinear
from bitplan.runtime.packed.warm_up import warm_up
from tests.runtime.packed.linear_samples import packed


def test_layers_are_settled_before_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict(
        {
            "gate_proj": QuantLinear(packed("mxfp4"), strategy="decode"),
            "up_proj": QuantLinear(packed("mxfp4"), strategy="decode"),
            "down_proj": QuantLinear(packed("nvfp4"), strategy="eager"),
        }
    )
    assert fuse_projections(model) == ["gate_proj+up_proj"]
    settled: list[tuple[str, int]] = []
    right = QuantLinear.settle

    def watched(self: QuantLinear, rows: int, dtype: torch.dtype) -> str:
        settled.append((self.weight.fmt.name, rows))
        return right(self, rows, dtype)

    monkeypatch.setattr(QuantLinear, "settle", watched)
    assert warm_up(model, (1, 4), torch.float32) > 0
    assert sorted(settled) == sorted([("mxfp4", 1), ("mxfp4", 4)] * 2 + [("nvfp4", 1), ("nvfp4", 4)])
    assert model["down_proj"].graph.expanded is not None
