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

Tokens of one window of text share its subject, so their losses move together: a standard error that treats each token
as an independent sample is too small. Here a window is one sample, whatever its length (the ratio estimator of survey
sampling). Neighbouring windows share it too, if less: 95% intervals are by blocks of windows, with Student's
distribution, not the normal one.

`round_activations` serves to measure the reference's own noise: how far its results are apart when it is computed in
two equally valid ways. A difference from the reference means little if the reference itself varies as much. The second
way is how such models are commonly run: the same weights, activations in bfloat16. It is simulated by rounding the
output of every part of the model, the residual stream included, to bfloat16; sums stay in float32, as matrix units
accumulate, and so do the logits, which makes the floor low rather than high. (The idea of a self-noise floor in a
quality report is exllamav3's.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bitplan.base.errors import MeasureError
from bitplan.packed.checkpoints.causal_lm import LateLogits

# ---- noise floor -----------------------------------------------------------------------------------------------------


def shared_twin(model: nn.Module) -> nn.Module:
    """A second model over the same Parameters and buffers; hooks on it and changed modules do not affect the first."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def round_activations(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, keep: Collection[nn.Module] = ()
) -> list[RemovableHandle]:
    """Let every module inside the model, except those in `keep`, round its outputs until its handle is removed."""

    def rounded(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _rounded(output, dtype)

    return [
        module.register_forward_hook(rounded)
        for module in model.modules()
        if module is not model and not any(module is exempt for exempt in keep)
    ]


def _rounded(output: Any, dtype: torch.dtype) -> Any:
    if isinstance(output, Tensor):
        return output.to(dtype).to(output.dtype) if output.is_floating_point() else output
    if type(output) in (tuple, list):
        return type(output)(_rounded(item, dtype) for item in output)
    return output  # an output class of a model: its tensors were rounded where they were made


# ---- estimates -------------------------------------------------------------------------------------------------------


# Windows of a text are no independent samples: a page has a subject. Neighbours of 128 tokens correlate by 0.5, of 512
# by 0.1. So windows make up blocks of this many tokens, and intervals are wider by what neighbouring blocks share:
# then they hold what a fresh text of the same kind gives in 93% of cases or more (benchmarks/intervals.py).
BLOCK_TOKENS, WIDENED = 512, 1.5
_NEARLY = 0.95  # a window of 512 tokens scores 511: its first is context
FEWEST_BLOCKS = 8  # of fewer the spread is a guess, and two give intervals 13 standard errors wide
_Z = 1.959963984540054  # 97.5% of the normal distribution
_T_975 = (12.706204736432095, 4.302652729696142)  # one and two degrees of freedom, where the series below is poor


@dataclass(frozen=True)
class Estimate:
    """A mean over all samples; `standard_error` is None for a single cluster, which does not show it.

    half_width   half of the 95% interval, by blocks of clusters; None where they are too few to say one
    """

    mean: float
    standard_error: float | None
    clusters: int
    half_width: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% confidence interval."""
        return None if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)

    def to_dict(self) -> dict[str, Any]:
        interval = self.interval
        return {"mean": self.mean, "standard_error": self.standard_error, "interval": interval and list(interval)}


def clustered_mean(sums: Sequence[float], counts: Sequence[int]) -> Estimate:
    """The mean of samples, from the sum and the number of samples of each cluster, in the order of the text."""
    mean = math.fsum(sums) / sum(counts)
    blocks = _blocks_of(sums, counts)
    error = _error_of_mean(blocks)
    is_known = error is not None and len(blocks) >= FEWEST_BLOCKS
    half = WIDENED * student_t_975(len(blocks) - 1) * error if is_known and error is not None else None
    return Estimate(mean, _error_of_mean(list(zip(sums, counts, strict=True))), len(sums), half)


def _blocks_of(sums: Sequence[float], counts: Sequence[int]) -> list[tuple[float, int]]:
    """Neighbouring clusters together, until a block has enough samples; what is left at the end joins the last."""
    blocks: list[tuple[float, int]] = []
    total, samples = 0.0, 0
    for part, count in zip(sums, counts, strict=True):
        total, samples = total + part, samples + count
        if samples >= BLOCK_TOKENS * _NEARLY:
            blocks.append((total, samples))
            total, samples = 0.0, 0
    if samples and blocks:
        last, count = blocks.pop()
        total, samples = total + last, samples + count
    return [*blocks, (total, samples)] if samples else blocks


def _error_of_mean(clusters: Sequence[tuple[float, int]]) -> float | None:
    if len(clusters) < 2:
        return None
    total = sum(count for _, count in clusters)
    mean = math.fsum(part for part, _ in clusters) / total
    squares = math.fsum((part - count * mean) ** 2 for part, count in clusters)
    return math.sqrt(squares * len(clusters) / (len(clusters) - 1)) / total


def student_t_975(freedom: int) -> float:
    """How many standard errors a 95% interval reaches to each side, by the Cornish-Fisher series (within 0.2%)."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z, n = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


# ---- perplexity ------------------------------------------------------------------------------------------------------


MOST_NATS = 709.0  # exp of a larger number exceeds float64
# Float64 logits that are worked on at once: on CPUs few enough for the cache of a core, elsewhere 32 MB.
AT_ONCE, AT_ONCE_ON_CPU = 2**22, 2**18
MADE_AT_ONCE = 2**24  # logits that a head gives at once, where it is asked piece by piece

# Token ids [windows, length] -> logits [windows, length, vocabulary], an object that has them as `.logits`, or
# LateLogits.
LogitsOf = Callable[[Tensor], Any]


# ---- windows ---------------------------------------------------------------------------------------------------------


def spread_windows(windows: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """As many whole windows as `tokens` allows, evenly spread: the head of a text may be a single article."""
    context = len(windows[0])
    count = tokens // context
    if count < 1:
        raise MeasureError(
            f"a limit of {tokens} tokens is less than one window of context, {context}; raise the limit",
            settings={"tokens": context},
        )
    full = [window for window in windows if len(window) == context]
    if count >= len(full):
        return list(windows)
    return [full[index * len(full) // count] for index in range(count)]


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Divergence:
    """How far a model's predictions are from its reference's on the same tokens: KL, and equal top tokens."""

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
    """The exponential, infinite beyond float64: a broken model can be thousands of nats off."""
    return math.exp(nll) if nll < MOST_NATS else math.inf


def _finite(value: float) -> float | None:
    """The number for JSON, which has no infinity."""
    return value if math.isfinite(value) else None


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class CachedLogits:
    """A reference's logits for several comparisons: kept as memory allows, the others computed again."""

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
        joined = items[0][None] if len(items) == 1 else torch.stack(items)  # of a large vocabulary a copy takes long
        return joined if self._late is None else replace(self._late, states=joined, ids=ids)

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
                    "models are compared token by token: give two of one tokenizer"
                )
            for row, window in enumerate(ids):
                sums = _score_window(window, row, unscored, ours, theirs)
                for key, value in sums.items():
                    samples.setdefault(key, []).append(value)
                if on_windows:
                    on_windows(1)
    return _summary(samples)


def _batches(windows: Sequence[Tensor], batch: int) -> Iterator[tuple[int, Tensor]]:
    """Pairs (number of the first window, windows [up to batch, length]); a shorter window goes alone."""
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
        states = logits if isinstance(logits, Tensor) else logits.states
        if states.shape[:-1] != ids.shape:
            raise MeasureError(
                f"{name}: expected logits of shape {(*ids.shape, 'vocabulary')}, got {tuple(states.shape)}"
            )
        self.vocabulary = states.shape[-1] if isinstance(logits, Tensor) else logits.vocabulary

    def of_window(self, row: int, tokens: slice) -> Tensor:
        """The logits [tokens, vocabulary] of one window; raises where one is not finite."""
        source = self._logits
        logits = source[row, tokens] if isinstance(source, Tensor) else source.of_window(row, tokens)
        # Of NaN both are NaN. Together, as `aminmax` gives them, they take six times as long on a CPU.
        bad = ~(logits.amin(-1).isfinite() & logits.amax(-1).isfinite())
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
        top, _, _, our_total = _exponentials(ours)
        sums["nll"] += float((our_total - ours.gather(-1, chosen)).sum())
        if against is not None:
            theirs = against[rows].double()
            their_top, weights, whole, their_total = _exponentials(theirs)
            sums["reference_nll"] += float((their_total - theirs.gather(-1, chosen)).sum())
            sums["agreed"] += float((top == their_top).sum())
            apart = torch.linalg.vecdot(weights, theirs.sub_(ours)).unsqueeze(-1)
            sums["kl"] += float((apart / whole + our_total - their_total).sum())


def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each row's likeliest token, exponentials [R, V] over that of its logit, their sum, and the logits' log of it."""
    largest, top = logits.max(-1, keepdim=True)
    exponentials = (logits - largest).exp_()
    whole = exponentials.sum(-1, keepdim=True)
    return top, exponentials, whole, whole.log() + largest


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
