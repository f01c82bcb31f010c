"""The demo's model learns, and its perplexity is what it says."""

from __future__ import annotations

import math

import pytest
import torch

from bitplan.cli.tiny_model import CONTEXT, Corpus, TinyTransformer, perplexity, shipped_text, train


def test_the_shipped_text_is_text_enough():
    corpus = Corpus(shipped_text())
    assert corpus.vocabulary < 100
    assert len(corpus.train) + len(corpus.held_out) > 300_000


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    corpus = Corpus(shipped_text())
    model = TinyTransformer(corpus.vocabulary)
    losses = []
    train(model, corpus, 12, lambda _, loss: losses.append(loss))
    assert losses[-1] < losses[0] - 0.5
    assert not model.training


def test_a_model_that_knows_nothing_has_the_perplexity_of_a_fair_die():
    class Uniform(torch.nn.Module):
        def forward(self, ids):
            return torch.zeros(*ids.shape, 7)

    windows = torch.randint(0, 7, (3, CONTEXT + 1))
    assert perplexity(Uniform(), windows) == pytest.approx(7.0)


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
