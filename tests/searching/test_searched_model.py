"""Groups of a search: what reads one input, as the model's view has it; by names where there is no view."""

from __future__ import annotations

from torch import Tensor, nn

from bitplan import describe
from bitplan.searching.searched_model import group_tensors, groups_seen
from tests.plan.structure import handwritten_models as models


def grouped(model: nn.Module) -> list[list[str]]:
    names = {name: name for name, _ in model.named_parameters() if name.endswith(".weight")}
    view = describe(model)
    projections = [name for name in names if view.uses(name)]
    return [
        group for group in group_tensors(projections, joined_names=groups_seen(view, names)).values() if len(group) > 1
    ]


def test_projections_of_one_input_are_a_group_whatever_they_are_called() -> None:
    assert grouped(models.Titan(layers=1)) == [
        [f"layers.0.attention.w{letter}.weight" for letter in "kqv"],
        [f"layers.0.feed_forward.w{number}.weight" for number in (1, 3)],
    ]


class Misnamed(nn.Module):
    """Names of a llama's MLP, in which gate and up read different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(self.gate_proj(x).tanh()))


def test_names_do_not_make_a_group_where_the_inputs_differ() -> None:
    assert grouped(nn.Sequential(Misnamed())) == []


def test_without_a_view_the_table_of_names_decides() -> None:
    tensors = ["blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight"]
    assert group_tensors(tensors) == {
        "blk.0.ffn_down": tensors[3:],
        "blk.0.qkv": [*tensors[1:2], tensors[0], tensors[2]],
    }
    assert len(group_tensors(tensors, fused=False)) == 4
