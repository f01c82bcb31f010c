"""Which parameters packed layers can hold, by what runs of modules and models show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bitplan.plan.structure.packable import packed_kind, weights_read_outside, why_not_packed_in


class WithQueries(nn.Module):
    """It looks tokens up, and adds all rows of another table as they are, as DETR does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.queries = nn.Embedding(8, 16), nn.Embedding(4, 16)
        self.mixed, self.head = nn.Conv1d(4, 4, 1), nn.Linear(16, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        rows: Tensor = self.head(self.mixed(self.tokens(input_ids)[:, :4] + self.queries.weight))
        return rows


def test_a_weight_that_other_code_than_its_layer_reads_is_named_with_its_reader() -> None:
    model = WithQueries()
    assert weights_read_outside(model) == {
        "queries.weight": "read by the model's own code (add in the model), not through its layer"
    }
    assert weights_read_outside(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == {}


def test_a_layer_whose_forward_is_called_by_name_reads_its_weight_itself() -> None:
    class ByName(WithQueries):
        def forward(self, input_ids: Tensor) -> Tensor:
            hidden: Tensor = self.head.forward(self.tokens.forward(input_ids))
            return torch.nn.functional.linear(hidden, self.head.weight.t())

    model = ByName()
    assert list(weights_read_outside(model)) == ["head.weight"]
    model.head = nn.Linear(16, 16)
    model.forward = lambda input_ids: model.head.forward(model.tokens.forward(input_ids))  # type: ignore[method-assign]
    assert weights_read_outside(model) == {}


def test_a_model_that_no_example_fits_shows_nothing() -> None:
    class Picky(WithQueries):
        def forward(self, input_ids: Tensor) -> Tensor:
            raise TypeError("no input at all")

    assert weights_read_outside(Picky()) == {}


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("head.weight", "QuantLinear", None),
        ("tokens.weight", "QuantEmbedding", None),
        ("head.bias", None, "the bias of a Linear"),
        ("mixed.weight", None, "the weight of a Conv1d"),
    ],
)
def test_the_layer_that_holds_a_parameter_or_why_none_does(name: str, kind: str | None, reason: str | None) -> None:
    model = WithQueries()
    owner, _, local = name.rpartition(".")
    with torch.no_grad():
        assert packed_kind(model.get_submodule(owner), local) == kind
    assert why_not_packed_in(model, name) == reason
