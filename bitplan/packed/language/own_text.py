"""Text that a model writes itself: tokens drawn by its own odds, so that every kind of text that it knows is in it.

Many texts are written side by side, a token of each in a step, from the token that begins a text. A text that has ended
goes on with the next one, as training data does. The same model, seed and number of threads give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitplan.packed.checkpoints.causal_lm import CausalLM, require_finite
from bitplan.packed.language.token_graph import read_on

AT_ONCE = 64  # texts side by side: of 32, reading the weights takes more than half of the time


def write_own_text(
    lm: CausalLM, count: int, length: int, *, seed: int = 0, on_tokens: Callable[[int], None] = lambda _count: None
) -> list[Tensor]:
    """Give `count` windows of `length` token ids, on the CPU; `on_tokens` is called with how many more are written."""
    lm.check_context(length)
    draw, model = torch.Generator().manual_seed(seed), lm.model
    windows: list[Tensor] = []
    with torch.no_grad():
        while len(windows) < count:
            step, cache = _beginning(lm, min(AT_ONCE, count - len(windows)), draw), None
            written = [step]
            for at in range(step.shape[1], length):
                logits, cache = read_on(model, cache, input_ids=step.to(lm.device))
                require_finite(logits, lm, at)
                step = _drawn(logits.float(), draw)
                written.append(step)
                on_tokens(len(step))
            windows += torch.cat(written, 1)[:, :length].unbind()
    return windows


def _beginning(lm: CausalLM, count: int, draw: torch.Generator) -> Tensor:
    """Give the tokens that begin each text; where the model has none for that, a random one."""
    if len(lm.prefix):
        return lm.prefix.expand(count, -1)
    marks = (getattr(lm.model.config, name, None) for name in ("bos_token_id", "eos_token_id"))
    token = next((mark for mark in marks if isinstance(mark, int)), None)
    if token is None:
        return torch.randint(lm.vocabulary, (count, 1), generator=draw)
    return torch.full((count, 1), token)


def _drawn(logits: Tensor, draw: torch.Generator) -> Tensor:
    """Draw a token for each row of logits, [texts, 1] on the CPU: where a random share of the odds' sum is reached."""
    sums = torch.softmax(logits, -1).cumsum(-1)
    shares = torch.rand(len(sums), 1, generator=draw).to(sums) * sums[:, -1:]
    return torch.searchsorted(sums, shares, right=True).clamp_max(sums.shape[-1] - 1).cpu()
