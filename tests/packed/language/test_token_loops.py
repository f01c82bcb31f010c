"""Norms and attention of one token by compiled loops: what operators of torch give."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("numba")
from bitplan.packed.language import token_loops
from bitplan.packed.language.token_loops import LANES, StepLoops, fits


@pytest.mark.parametrize("hidden", [LANES, 576])
def test_a_norm_adds_in_place_and_agrees_with_torch(hidden: int) -> None:
    torch.manual_seed(0)
    x, added, weight = torch.randn(1, hidden), torch.randn(1, hidden), torch.randn(hidden)
    loops, plain = StepLoops(hidden, 1, 1, 2 * LANES), x + added
    expected = functional.rms_norm(plain.double(), (hidden,), weight.double(), 1e-5)
    made = loops.norm(x, added, weight, 1e-5)
    assert torch.equal(x, plain)
    torch.testing.assert_close(made.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(loops.norm(x, None, weight, 1e-5), made)
    assert torch.equal(x, plain)


@pytest.mark.parametrize(("queries", "heads", "at"), [(1, 1, 0), (9, 3, 70), (4, 4, 255), (8, 2, 2100)])
def test_attention_turns_enters_and_mixes_as_torch_does(queries: int, heads: int, at: int) -> None:
    torch.manual_seed(at)
    width, room = 2 * LANES if at == 70 else 64, at + 5
    held, made = torch.randn(2, heads, room, width), torch.randn(1, (queries + 2 * heads) * width)
    angles = torch.rand(width // 2) * 6
    cos, sin = angles.cos().repeat(2), torch.cat([-angles.sin(), angles.sin()])
    numbers, before = made.double().view(-1, width), held.clone()
    halves = numbers[: queries + heads].view(-1, 2, width // 2)
    turned = (halves * cos.view(2, -1) + halves.flip(1) * sin.view(2, -1)).view(-1, width)
    mixed = StepLoops(LANES, queries, heads, width).attention(made, held, at, cos, sin)
    torch.testing.assert_close(held[0, :, at].double(), turned[queries:], rtol=1e-6, atol=1e-6)
    assert torch.equal(held[1, :, at].double(), numbers[queries + heads :])
    before[:, :, at] = held[:, :, at]
    assert torch.equal(held, before)  # nothing else was written
    keys, values = held[:, :, : at + 1].double().repeat_interleave(queries // heads, dim=1)
    shares = (torch.einsum("hw,htw->ht", turned[:queries], keys) * width**-0.5).softmax(-1)
    expected = torch.einsum("ht,htw->hw", shares, values)
    torch.testing.assert_close(mixed.double().view(queries, width), expected, rtol=1e-5, atol=1e-5)


def test_a_long_text_is_mixed_by_several_threads_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made, held, cos, sin = torch.randn(1, 10 * 64), torch.randn(2, 2, 300, 64), torch.ones(64), torch.zeros(64)
    one = StepLoops(LANES, 6, 2, 64).attention(made.clone(), held.clone(), 290, cos, sin)
    started: list[int] = []
    run = token_loops.run
    monkeypatch.setattr(token_loops, "LEAST_FOR_THREADS", 0)
    monkeypatch.setattr(token_loops, "thread_count", lambda: 8)
    monkeypatch.setattr(token_loops, "run", lambda *words: (started.append(words[2]), run(*words)))
    assert torch.equal(StepLoops(LANES, 6, 2, 64).attention(made, held, 290, cos, sin), one)
    assert started == [2]  # no more than there are heads


def test_sizes_that_are_no_whole_vectors_are_left_to_torch() -> None:
    assert fits(576, 64)
    assert fits(LANES, 2 * LANES)
    assert not fits(LANES + 1, 64)
    assert not fits(576, LANES)
