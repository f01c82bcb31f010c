"""Groups of a search, as the model's view has them or by names; its text, of files and of the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitplan import describe
from bitplan.files.input_statistics import EvidenceFile
from bitplan.packed.checkpoints.causal_lm import load_causal_lm
from bitplan.packed.language.own_text import write_own_text
from bitplan.searching import searched_model
from bitplan.searching.collect import gather_evidence
from bitplan.searching.goal import Advance, SearchError
from bitplan.searching.searched_model import group_tensors, groups_seen, prepare
from tests.files.engines.tiny_models import LETTERS, save_tiny
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


LETTERS_OF_TEXT = torch.randint(26, (800,), generator=torch.Generator().manual_seed(0)).tolist()
TEXT = "".join(LETTERS[number] for number in LETTERS_OF_TEXT)


def test_text_that_the_model_writes_stands_beside_the_given_in_the_statistics_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", "llama")
    settings = {"context": 16, "windows": 6}
    _, given = prepare(tmp_path / "llama", None, TEXT, None, **settings)
    _, both = prepare(tmp_path / "llama", None, {"text.txt": TEXT, "self": None}, None, **settings)
    own = write_own_text(load_causal_lm(tmp_path / "llama"), len(given.statistics), 16)
    assert all(torch.equal(*pair) for pair in zip(both.statistics[::2], given.statistics, strict=True))
    assert all(torch.equal(*pair) for pair in zip(both.statistics[1::2], own, strict=True))
    for part in ("checks", "proof"):
        assert all(torch.equal(*pair) for pair in zip(getattr(both, part), getattr(given, part), strict=True))
    assert both.kinds == ()


def test_a_model_alone_writes_text_for_statistics_checks_and_proof(tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", "llama")
    steps: list[int] = []

    @contextmanager
    def stage(what: str, total: int) -> Iterator[Advance]:
        steps.append(-total)
        assert what == "writing text"
        yield lambda count, _label: steps.append(count)

    _, cut = prepare(tmp_path / "llama", None, {"self": None}, None, context=16, windows=5, stage=stage)
    assert (len(cut.statistics), len(cut.checks), len(cut.proof)) == (5, 2, 3)
    windows = [*cut.statistics, *cut.checks, *cut.proof]
    assert len({tuple(window.tolist()) for window in windows}) == len(windows)
    assert -steps[0] == 16 * 12
    assert sum(steps[1:]) == 15 * 12
    (tmp_path / "in").mkdir()
    evidence = gather_evidence(tmp_path / "llama", {"self": None}, tmp_path / "in", windows=4, context=16)
    with EvidenceFile(evidence) as file:
        assert file.metadata["windows"] == "4"


def test_a_model_that_is_too_large_to_write_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "llama", "llama")
    monkeypatch.setattr(searched_model, "free_memory", lambda: 10**5)
    with pytest.raises(SearchError, match=r"0.0 GB are free; give text of a file alone"):
        prepare(tmp_path / "llama", None, {"self": None}, None)
