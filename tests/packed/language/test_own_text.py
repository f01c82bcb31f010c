"""Text that a model writes itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bitplan.base.errors import MeasureError
from bitplan.packed.checkpoints.causal_lm import CausalLM, load_causal_lm
from bitplan.packed.language import own_text
from bitplan.packed.language.own_text import write_own_text
from tests.files.engines.tiny_models import save_tiny


@pytest.fixture
def lm(tmp_path: Path) -> CausalLM:
    save_tiny(tmp_path / "llama", "llama")
    return load_causal_lm(tmp_path / "llama")


def test_tokens_are_drawn_by_the_models_own_odds(lm: CausalLM) -> None:
    windows = torch.stack(write_own_text(lm, 600, 3))
    first = windows[0, :1]
    assert bool((windows[:, 0] == first).all())
    with torch.no_grad():
        odds = lm.model(input_ids=first[None]).logits[0, -1].softmax(-1)
        second = lm.model(input_ids=windows[:1, :2]).logits[0, -1].softmax(-1)
    share = torch.bincount(windows[:, 1], minlength=len(odds)) / len(windows)
    assert float((share - odds).abs().max()) < 5 * float((odds * (1 - odds) / len(windows)).sqrt().max())
    assert float(second[windows[0, 2]]) > 0


def test_the_same_seed_writes_the_same_and_another_does_not(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "AT_ONCE", 2)
    counts: list[int] = []
    windows = write_own_text(lm, 3, 20, on_tokens=counts.append)
    assert [tuple(window.shape) for window in windows] == [(20,)] * 3
    assert sum(counts) == 3 * 19
    assert all(torch.equal(a, b) for a, b in zip(windows, write_own_text(lm, 3, 20), strict=True))
    assert not torch.equal(windows[0], write_own_text(lm, 1, 20, seed=1)[0])
    assert not torch.equal(windows[0], windows[1])
    assert not torch.equal(windows[0], windows[2])


def test_each_token_follows_from_all_before_it(lm: CausalLM) -> None:
    """A cache that forgot would draw others: the second half is drawn again from whole windows."""
    draw = torch.Generator().manual_seed(0)
    windows = torch.stack(write_own_text(lm, 4, 24))
    for at in range(1, 24):
        with torch.no_grad():
            logits = lm.model(input_ids=windows[:, :at], use_cache=False).logits[:, -1]
        assert torch.equal(own_text._drawn(logits, draw)[:, 0], windows[:, at])


def test_a_model_without_a_first_token_begins_at_random(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bos_token_id", "eos_token_id"):
        monkeypatch.setattr(lm.model.config, name, None)
    lm.__dict__["prefix"] = torch.empty(0, dtype=torch.int64)
    firsts = {int(window[0]) for window in write_own_text(lm, 16, 2)}
    assert len(firsts) > 4
    lm.__dict__["prefix"] = torch.tensor([3, 5])
    assert all(window[:2].tolist() == [3, 5] for window in write_own_text(lm, 2, 4))


def test_what_cannot_be_written_is_refused(lm: CausalLM) -> None:
    assert lm.positions is not None
    with pytest.raises(MeasureError, match="context must be"):
        write_own_text(lm, 1, lm.positions + 1)
    lm.head.weight.data[0] = float("nan")
    with pytest.raises(MeasureError, match="logits that are not finite after 1 tokens"):
        write_own_text(lm, 1, 8)
