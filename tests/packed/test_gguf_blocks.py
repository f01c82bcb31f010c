"""Layers on GGUF's blocks, whose scales lie among the codes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan import apply_plan
from bitplan.formats.codec import decode, encode


@pytest.mark.parametrize("name", ["q4_k_gguf", "q5_1_gguf"])
def test_a_packed_layer_gives_the_product_of_its_decoded_weight(name):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(256, 96))
    packed = encode(layer[0].weight.detach(), name)
    bias = layer[0].bias.detach().clone()
    apply_plan(layer, name)
    x = torch.randn(5, 256, requires_grad=True)
    wanted = x.detach() @ decode(packed).T + bias
    y = layer(x)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    assert layer[0].last_pick.strategy == "fused"
    y.sum().backward()
    torch.testing.assert_close(x.grad[0], decode(packed).sum(dim=0), rtol=1e-5, atol=1e-5)
