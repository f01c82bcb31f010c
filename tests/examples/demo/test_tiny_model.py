"""The demo's model and text: enough of both, and nothing looks ahead."""

from __future__ import annotations

import math

import torch

from examples.demo.tiny_model import CONTEXT, Corpus, TinyTransformer, shipped_text


def test_the_shipped_text_is_text_enough():
    corpus = Corpus(shipped_text())
    assert corpus.vocabulary < 100
    assert len(corpus.train) + len(corpus.held_out) > 300_000


def test_a_batch_is_windows_and_what_follows_them():
    corpus = Corpus(shipped_text())
    ids, targets = next(corpus.batches(1, 5, torch.Generator().manual_seed(0)))
    assert ids.shape == targets.shape == (5, CONTEXT)
    assert torch.equal(ids[:, 1:], targets[:, :-1])


def test_held_out_windows_are_spread_over_text_that_is_not_trained_on():
    corpus = Corpus(shipped_text())
    windows = corpus.held_out_windows(7)
    assert windows.shape == (7, CONTEXT)
    assert torch.equal(windows[0], corpus.held_out[:CONTEXT])
    assert torch.equal(windows[-1], corpus.held_out[-CONTEXT - 1 : -1])


def test_the_model_is_causal():
    model = TinyTransformer(11).eval()
    ids = torch.randint(0, 11, (1, 20))
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 11
    with torch.no_grad():
        difference = (model(ids) - model(changed)).abs().amax(dim=-1)[0]
    assert float(difference[:10].max()) < 1e-5
    assert float(difference[10:].min()) > 0
    assert math.isfinite(float(difference.sum()))
