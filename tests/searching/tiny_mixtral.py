"""What tests of searches share: a tiny Mixtral as a folder, and rounding that takes no time."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bitplan.formats.dispatch import encode
from bitplan.searching import damage
from tests.files.engines.tiny_models import save_tokenizer

HIDDEN, INNER = 64, 32


@contextmanager
def rounding_to_nearest() -> Iterator[pytest.MonkeyPatch]:
    """Rounding that compensates errors has tests of its own, and takes most of a search's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(damage, "round_weight", lambda weight, fmt, **_options: encode(weight, fmt))
        yield patch


def save_mixtral(folder: Path, experts: int, router: Sequence[float] = ()) -> Any:
    """One layer, two experts a token. `router`: rows of its weight are these multiples of the first row."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.15,
    )
    model = transformers.MixtralForCausalLM(config).eval()
    if router:
        with torch.no_grad():
            weight = model.model.layers[0].mlp.gate.weight
            weight.copy_(torch.tensor(router)[:, None] * weight[0])
    with redirect_stderr(io.StringIO()):  # its progress bar
        model.save_pretrained(folder)
    save_tokenizer(folder)
    return model
