"""Logits that are made a few tokens at a time: the same as all at once, whatever a model does behind its head."""

from __future__ import annotations

import pytest
import torch

from bitplan.packed.checkpoints.causal_lm import LateLogits, late_logits_of, logits_of, windows_of
from bitplan.packed.language import perplexity
from bitplan.packed.language.perplexity import CachedLogits, measure_perplexity

transformers = pytest.importorskip("transformers")
VOCABULARY, CONTEXT, AT_ONCE = 50, 12, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.5,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "a cap on logits": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, final_logit_softcapping=2.0)
    ),
    "logits divided": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=3.0)),
    "a body of another name": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2)
    ),
    "a part of the body called alone": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_that_are_made_late_are_those_of_the_model(name, monkeypatch):
    monkeypatch.setattr(perplexity, "MADE_AT_ONCE", AT_ONCE * VOCABULARY)
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    windows = windows_of(torch.randint(VOCABULARY, (40,)), CONTEXT)
    expected = measure_perplexity(lambda ids: logits_of(model, ids), windows)
    late = late_logits_of(model)
    heads = []
    model.get_output_embeddings().register_forward_hook(lambda _module, _args, output: heads.append(output.shape[1]))
    reference = CachedLogits(late, budget_bytes=10**6)
    alone = measure_perplexity(reference, windows, batch=2)
    assert alone.nll.mean == pytest.approx(expected.nll.mean, rel=1e-6)
    paired = measure_perplexity(late, windows, reference=reference, batch=3)
    assert paired.against.kl.mean == pytest.approx(0.0, abs=1e-12)
    with torch.no_grad():
        is_late = isinstance(late(windows[0][None]), LateLogits)
    assert is_late == (name != "a part of the body called alone")
    assert max(heads) == (AT_ONCE if is_late else CONTEXT)
    assert "forward" not in vars(model.base_model)
