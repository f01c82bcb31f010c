"""Perplexity of a causal language model, and its distance from a reference, token by token.

The text is cut into windows that do not overlap. Each begins with the tokens that the model's tokenizer puts before a
text (a beginning-of-sequence token), or if there are none, with a token that is context only; each other token is
predicted from the tokens before it in the window. Figures, all in nats and all computed in float64 from the model's
logits:

    NLL               mean of -log p(token); perplexity is exp(NLL)
    NLL difference    model minus reference on the same tokens: the text's own variance drops out, which makes it far
                      tighter than the difference of two perplexities
    KL                mean over positions of sum p_ref log(p_ref / p_model): shows changes for all tokens
    top-1 agreement   how often both would say the same token

Standard errors are by window: see estimates.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bitplan.errors import MeasureError
from bitplan.measure.quality.estimates import Estimate, clustered_mean

MOST_NATS = 709.0  # exp of a larger number exceeds float64
# Float64 logits that are worked on at once: on CPUs few enough for the cache of a core, elsewhere 32 MB.
AT_ONCE, AT_ONCE_ON_CPU = 2**22, 2**18
MADE_AT_ONCE = 2**24  # logits that a head gives at once, where it is asked piece by piece

# Token ids [windows, length] -> logits [windows, length, vocabulary], an object that has them as `.logits`, or
# LateLogits.
LogitsOf = Callable[[Tensor], Any]


# ---- windows ---------------------------------------------------------------------------------------------------------


def windows_of(ids: Tensor, context: int, prefix: Tensor | None = None) -> list[Tensor]:
    """Token ids cut into windows of `context` tokens with `prefix` before each; the last may be shorter.

    Each token is in one window. A last window with nothing to predict is left out.
    """
    before = torch.empty(0, dtype=torch.int64) if prefix is None else prefix
    body = context - len(before)
    if body < 1 or context < 2:
        raise MeasureError(
            f"context must be {max(2, len(before) + 1)} tokens or more, one to see and one to predict, got {context}"
        )
    if ids.dim() != 1 or ids.is_floating_point():
        raise MeasureError(f"token ids must be one row of integers, got {ids.dtype} of shape {tuple(ids.shape)}")
    if len(ids) < body:
        raise MeasureError(
            f"the text has {len(ids)} tokens, and one window of context needs {body}; "
            f"take a longer text or a shorter context"
        )
    windows = [torch.cat((before.to(ids.dtype), piece)) for piece in ids.split(body)]
    return [window for window in windows if len(window) > 1]


def spread_windows(windows: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """As many whole windows as `tokens` allows, evenly spread: the head of a text may be a single article."""
    context = len(windows[0])
    wanted = tokens // context
    if wanted < 1:
        raise MeasureError(f"a limit of {tokens} tokens is less than one window of context, {context}; raise the limit")
    whole = [window for window in windows if len(window) == context]
    if wanted >= len(whole):
        return list(windows)
    return [whole[index * len(whole) // wanted] for index in range(wanted)]


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Divergence:
    """How far a model is from its reference on the same tokens."""

    kl: Estimate
    nll_difference: Estimate
    top1_agreement: Estimate

    def to_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key).to_dict() for key in ("kl", "nll_difference", "top1_agreement")}


@dataclass(frozen=True)
class Quality:
    """The measurements of one model; `samples` keeps each window's sums, for other statistics."""

    tokens: int
    windows: int
    nll: Estimate
    against: Divergence | None
    samples: dict[str, list[float]]

    @property
    def perplexity(self) -> float:
        return _exp(self.nll.mean)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the perplexity: the range that other texts of the same kind may give."""
        interval = self.nll.interval
        return interval and (_exp(interval[0]), _exp(interval[1]))

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "windows": self.windows,
            "perplexity": _finite(self.perplexity),
            "perplexity_interval": self.interval and tuple(map(_finite, self.interval)),
            "nll": self.nll.to_dict(),
            **(self.against.to_dict() if self.against else {}),
            "samples": self.samples,
        }


def _exp(nll: float) -> float:
    """exp, infinite beyond float64: a broken model can be thousands of nats off."""
    return math.exp(nll) if nll < MOST_NATS else math.inf


def _finite(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return value if math.isfinite(value) else None


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LateLogits:
    """Logits that are made when they are asked for, a few tokens at a time: all of a window take 0.5 GB for 512 tokens
    and a vocabulary of 262,144.

    states  what the model's head gets, [windows, length, width]
    head    states and token ids, of one window and some of its tokens -> logits [1, tokens, vocabulary]
    """

    states: Tensor
    ids: Tensor
    vocabulary: int
    head: Callable[[Tensor, Tensor], Tensor]

    def of_window(self, window: int, tokens: slice) -> Tensor:
        row = slice(window, window + 1)
        return self.head(self.states[row, tokens], self.ids[row, tokens])[0]


@dataclass
class CachedLogits:
    """A reference for several models: keeps the logits of as many windows as fit, and computes the others again.

    Of logits that are made late, what they are made of is kept.
    """

    model: LogitsOf
    budget_bytes: int
    _cached: dict[bytes, Tensor] = field(default_factory=dict, repr=False)

    _late: LateLogits | None = field(default=None, repr=False)

    def __call__(self, ids: Tensor) -> Tensor | LateLogits:
        keys = [window.numpy(force=True).tobytes() for window in ids]
        missing = [row for row, key in enumerate(keys) if key not in self._cached]
        computed = dict(zip(missing, self._compute(ids[missing]), strict=True)) if missing else {}
        for row, item in computed.items():
            if item.nbytes <= self.budget_bytes:
                self.budget_bytes -= item.nbytes
                self._cached[keys[row]] = item.clone()  # a view would hold the whole batch
        items = [computed[row] if row in computed else self._cached[key] for row, key in enumerate(keys)]
        whole = items[0][None] if len(items) == 1 else torch.stack(items)  # of a large vocabulary a copy takes long
        return whole if self._late is None else replace(self._late, states=whole, ids=ids)

    def _compute(self, ids: Tensor) -> Tensor:
        logits = _logits(self.model, ids)
        if isinstance(logits, Tensor):
            return logits
        self._late = replace(logits, states=logits.states[:0], ids=logits.ids[:0])
        return logits.states


def measure_perplexity(
    model: LogitsOf,
    windows: Sequence[Tensor],
    *,
    reference: LogitsOf | None = None,
    batch: int = 4,
    unscored: int = 1,
    name: str = "the model",
    on_windows: Callable[[int], None] | None = None,
) -> Quality:
    """Score every window; with a reference, also the distance from it.

    The first `unscored` tokens of each window are context only: one, or those that the tokenizer puts before a text.
    `on_windows` is called with the number of windows just done. Models are called as they are: put them in eval mode.
    """
    if not windows:
        raise MeasureError("there is no window of text to score; cut the token ids with windows_of")
    if batch < 1:
        raise MeasureError(f"a batch is 1 window or more, got {batch}")
    if not 1 <= unscored < min(map(len, windows)):
        raise MeasureError(f"every window must have a token to score after {unscored} of context")
    samples: dict[str, list[float]] = {"tokens": [], "nll": []}
    with torch.no_grad():
        for first, ids in _batches(windows, batch):
            ours = _WindowLogits(_logits(model, ids), ids, first, name)
            theirs = None if reference is None else _WindowLogits(_logits(reference, ids), ids, first, "the reference")
            if theirs is not None and theirs.vocabulary != ours.vocabulary:
                raise MeasureError(
                    f"{name} has a vocabulary of {ours.vocabulary}, the reference one of {theirs.vocabulary}; "
                    "they must be the same to compare token by token"
                )
            for row, window in enumerate(ids):
                sums = _score_window(window, row, unscored, ours, theirs)
                for key, value in sums.items():
                    samples.setdefault(key, []).append(value)
                if on_windows:
                    on_windows(1)
    return _summary(samples)


def _batches(windows: Sequence[Tensor], batch: int) -> Iterator[tuple[int, Tensor]]:
    """(number of the first window, windows [up to batch, length]); a shorter window goes alone."""
    first = 0
    while first < len(windows):
        last = first + 1
        while last < min(len(windows), first + batch) and len(windows[last]) == len(windows[first]):
            last += 1
        yield first, torch.stack(list(windows[first:last]))
        first = last


def _logits(model: LogitsOf, ids: Tensor) -> Tensor | LateLogits:
    output = model(ids)
    logits: Tensor | LateLogits = output if isinstance(output, Tensor | LateLogits) else output.logits
    return logits


class _WindowLogits:
    """The logits of a few windows, checked as they are read; `first` is the number of the first window."""

    def __init__(self, logits: Tensor | LateLogits, ids: Tensor, first: int, name: str) -> None:
        self._logits, self._first, self._name = logits, first, name
        given = logits if isinstance(logits, Tensor) else logits.states
        if given.shape[:-1] != ids.shape:
            raise MeasureError(
                f"{name}: expected logits of shape {(*ids.shape, 'vocabulary')}, got {tuple(given.shape)}"
            )
        self.vocabulary = given.shape[-1] if isinstance(logits, Tensor) else logits.vocabulary

    def of_window(self, row: int, tokens: slice) -> Tensor:
        """Logits [tokens, vocabulary], all of them finite."""
        whole = self._logits
        logits = whole[row, tokens] if isinstance(whole, Tensor) else whole.of_window(row, tokens)
        bad = ~torch.stack(torch.aminmax(logits, dim=-1)).isfinite().all(dim=0)  # of NaN it gives NaN
        if bad.any():
            raise MeasureError(
                f"{self._name}: logits that are not finite in window {self._first + row}, from its token "
                f"{tokens.start + int(bad.nonzero()[0])} on; look for NaN or overflow in the weights"
            )
        return logits


def _score_window(
    window: Tensor, row: int, unscored: int, ours: _WindowLogits, theirs: _WindowLogits | None
) -> dict[str, float]:
    """Sums over the predicted tokens of one window: those after `unscored`, each by the logits of the one before."""
    sums = {"tokens": float(len(window) - unscored), "nll": 0.0}
    if theirs is not None:
        sums |= {"reference_nll": 0.0, "kl": 0.0, "agreed": 0.0}
    step = max(1, MADE_AT_ONCE // ours.vocabulary)
    for start in range(unscored - 1, len(window) - 1, step):
        tokens = slice(start, min(start + step, len(window) - 1))
        logits = ours.of_window(row, tokens)
        against = None if theirs is None else theirs.of_window(row, tokens).to(logits.device)
        _score_tokens(window[start + 1 : tokens.stop + 1].to(logits.device), logits, against, sums)
    return sums


def _score_tokens(targets: Tensor, logits: Tensor, against: Tensor | None, sums: dict[str, float]) -> None:
    """Add what each token's logits say of it."""
    step = max(1, (AT_ONCE_ON_CPU if logits.device.type == "cpu" else AT_ONCE) // logits.shape[-1])
    for start in range(0, len(targets), step):
        rows = slice(start, start + step)
        chosen, ours = targets[rows].unsqueeze(-1), logits[rows].double()
        _, our_total = _softmax(ours)
        sums["nll"] += float((our_total - ours.gather(-1, chosen)).sum())
        if against is not None:
            theirs = against[rows].double()
            weights, their_total = _softmax(theirs)
            sums["reference_nll"] += float((their_total - theirs.gather(-1, chosen)).sum())
            sums["agreed"] += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
            sums["kl"] += float(weights.mul_(theirs.sub_(ours)).sum() + (our_total - their_total).sum())


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [R, V], and the logarithm of each row's sum of exponentials [R, 1]."""
    largest = logits.amax(-1, keepdim=True)
    exponentials = (logits - largest).exp_()
    total = exponentials.sum(-1, keepdim=True)
    return exponentials.div_(total), total.log() + largest


def _summary(samples: dict[str, list[float]]) -> Quality:
    counts = [int(count) for count in samples["tokens"]]
    divergence = None
    if "kl" in samples:
        pairs = zip(samples["nll"], samples["reference_nll"], strict=True)
        divergence = Divergence(
            clustered_mean(samples["kl"], counts),
            clustered_mean([ours - theirs for ours, theirs in pairs], counts),
            clustered_mean(samples["agreed"], counts),
        )
    return Quality(sum(counts), len(counts), clustered_mean(samples["nll"], counts), divergence, samples)
