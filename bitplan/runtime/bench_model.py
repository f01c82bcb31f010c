"""How fast a language model reads a prompt and makes tokens, at some batch sizes, alone or in turns with another.

When models take turns, other load on the machine slows both alike. For the prompt the shortest of several repeats
counts, for tokens the median step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bitplan.errors import MeasureError
from bitplan.runtime.causal_lm import CausalLM
from bitplan.runtime.generation import require_finite, weight_bytes


@dataclass(frozen=True)
class BenchRow:
    """One model at one batch size. Rates are of all sequences of the batch together."""

    model: str
    batch: int
    prompt_tokens: int
    tokens: int
    prefill_s: float
    prefill_tokens_per_second: float
    decode_ms: float
    decode_tokens_per_second: float
    weight_bytes: int
    speedup: float | None = None  # of decoding, over the last model

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_models(
    models: Sequence[CausalLM],
    *,
    batches: Sequence[int] = (1, 4, 16),
    prompt_tokens: int = 128,
    tokens: int = 32,
    repeats: int = 3,
    on_turn: Callable[[str], None] = lambda _name: None,
) -> list[BenchRow]:
    """A row for every model and batch; speedups are over the last model."""
    if min((*batches, prompt_tokens, repeats)) < 1 or tokens < 2 or not batches:
        raise MeasureError("batches, prompt tokens and repeats must be 1 or more, and tokens 2 or more")
    for lm in models:
        lm.check_context(prompt_tokens + tokens)
    rows, sizes = [], [weight_bytes(lm.model) for lm in models]
    for batch in batches:
        prefills: list[list[float]] = [[] for _ in models]
        steps: list[list[float]] = [[] for _ in models]
        for turn in range(repeats + 1):  # the first turn warms up, and is not counted
            for lm, prefill, step in zip(models, prefills, steps, strict=True):
                taken = _run(lm, batch, prompt_tokens, tokens)
                if turn:
                    prefill.append(taken[0])
                    step += taken[1:]
                on_turn(f"batch {batch}, {lm.where}")
        reference = statistics.median(steps[-1])
        for index, lm in enumerate(models):
            each, prefill_s = statistics.median(steps[index]), min(prefills[index])
            rows.append(
                BenchRow(
                    model=lm.where,
                    batch=batch,
                    prompt_tokens=prompt_tokens,
                    tokens=tokens,
                    prefill_s=prefill_s,
                    prefill_tokens_per_second=batch * prompt_tokens / prefill_s,
                    decode_ms=1000 * each,
                    decode_tokens_per_second=batch / each,
                    weight_bytes=sizes[index],
                    speedup=reference / each if index + 1 < len(models) else None,
                )
            )
    return rows


def _run(lm: CausalLM, batch: int, prompt_tokens: int, tokens: int) -> list[float]:
    """Seconds of the prompt, then of each token after the first."""
    device = lm.device
    ids = torch.arange(batch * prompt_tokens, device=device).remainder(lm.vocabulary).reshape(batch, prompt_tokens)
    times, cache = [], None
    with torch.inference_mode():
        for made in range(tokens):
            _wait(device)
            started = time.perf_counter()
            out: Any = lm.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            _wait(device)
            times.append(time.perf_counter() - started)
            require_finite(out.logits[:, -1], lm, prompt_tokens + made)  # not timed
            cache = out.past_key_values
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
