"""Parts of one product: given once, for the very tensor, in the same state; which layers can be one product."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from bitplan.plan.structure.describe import describe
from bitplan.plan.structure.joined_calls import SharedProduct, readers_of_one_tensor


def test_parts_wait_for_their_layers_and_are_given_once() -> None:
    shared, x, product = SharedProduct([2, 3, 1]), torch.ones(1), torch.arange(12.0).reshape(2, 6)
    assert shared.part(1, x, 0) is None
    second = shared.hand_out(1, product, x, 0, is_traced=False)
    assert torch.equal(second, product[:, 2:5])
    second.zero_()  # to autograd and to the others it is a tensor of its own
    assert shared.part(1, x, 0) is None
    assert torch.equal(shared.part(0, x, 0), torch.tensor([[0.0, 1], [6, 7]]))
    assert shared.is_waiting
    assert torch.equal(shared.part(2, x, 0), torch.tensor([[5.0], [11]]))
    assert not shared.is_waiting


def test_no_part_for_another_tensor_another_state_or_a_copy() -> None:
    shared, x = SharedProduct([1, 1]), torch.ones(1)
    shared.hand_out(0, torch.ones(1, 2), x, ("version", 0), is_traced=True)
    assert shared.part(1, torch.ones(1), ("version", 0)) is None
    assert shared.part(1, x, ("version", 1)) is None
    assert not copy.deepcopy(shared).is_waiting
    assert shared.part(1, x, ("version", 0)) is not None


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        heads = (part.view(1, -1, 2, 4).transpose(1, 2) for part in (self.q(x), self.k(encoded), self.v(encoded)))
        return self.o(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(1, -1, 8)) + x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CrossAttention(), CrossAttention()])

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, encoded)
        return x


def test_layers_that_read_one_encoder_are_joined_attention_by_attention() -> None:
    view = describe(Decoder(), (torch.zeros(1, 3, 8), torch.zeros(1, 5, 8)))
    assert view.joined == tuple((f"layers.{layer}.k.weight", f"layers.{layer}.v.weight") for layer in (0, 1))
    (readers,) = readers_of_one_tensor(view)  # all of them read the very same tensor
    assert [use.path for use in readers] == ["layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"]


def test_a_layer_that_is_called_twice_or_reads_a_view_is_no_reader() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.twice, self.of_view = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.twice(self.twice(x)) + self.first(x) + self.second(x) + self.of_view(x.view(2, 4))

    (readers,) = readers_of_one_tensor(describe(Model(), torch.zeros(2, 4)))
    assert [use.path for use in readers] == ["first", "second"]
