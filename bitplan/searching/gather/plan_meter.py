"""Measures plans end to end: KL and NLL against the model itself, paired window by window."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bitplan.measure.quality.estimates import Estimate, clustered_mean
from bitplan.measure.quality.noise_floor import round_activations
from bitplan.measure.quality.perplexity import CachedLogits, Quality, measure_perplexity
from bitplan.searching.decide.rivals import Kind, RivalPlan
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.gather.blocks import Replaced, TokenStates, equal_lengths
from bitplan.searching.gather.damage import RoundedWeights
from bitplan.searching.phases import Stage

CACHED_LOGITS_BYTES = 4 * 2**30
BATCH = 2048  # tokens in one call of a block
COUNTED = 1000  # weights in one step of progress
OnWindows = Callable[[int], None]


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan and what was measured of it on held-out text."""

    label: str
    kind: Kind
    choice: Mapping[str, str]
    nbytes: int
    predicted: float
    quality: Quality

    @property
    def kl(self) -> Estimate:
        assert self.quality.against is not None
        return self.quality.against.kl

    def to_dict(self, evidence: SearchEvidence) -> dict[str, Any]:
        return {
            "label": self.label,
            "kind": self.kind,
            "bytes": self.nbytes,
            "bits": evidence.bits(self.nbytes),
            "predicted": self.predicted,
            **summary_of(self.quality),
            "choice": dict(self.choice),
        }


def summary_of(quality: Quality) -> dict[str, Any]:
    """The figures of a measurement that a page shows, with their 95% intervals."""
    assert quality.against is not None
    kl, difference = quality.against.kl, quality.against.nll_difference
    return {
        "kl": kl.mean,
        "kl_interval": kl.interval and list(kl.interval),
        "nll_difference": difference.mean,
        "nll_difference_interval": difference.interval and list(difference.interval),
        "perplexity": quality.perplexity if math.isfinite(quality.perplexity) else None,
        "top1_agreement": quality.against.top1_agreement.mean,
        "tokens": quality.tokens,
        "windows": quality.windows,
    }


class PlanMeter:
    """A reference, windows of text, and weights in formats: the distance of any plan."""

    def __init__(
        self, rounded: RoundedWeights, windows: Sequence[Tensor], *, unscored: int = 1, remembers: bool = False
    ) -> None:
        """`remembers`: what each block of the model itself gets; plans then run from their first changed block."""
        self.rounded, self.windows = rounded, windows
        self._unscored = max(1, unscored)
        self._before: list[list[TokenStates]] | None = [] if remembers else None
        self._cached = CachedLogits(self._model_itself, CACHED_LOGITS_BYTES)
        self._runner = rounded.subject.runner

    def reference(self, on_windows: OnWindows | None = None) -> Quality:
        """The model itself; its logits are remembered."""
        return measure_perplexity(
            self._cached,
            self.windows,
            batch=1,
            unscored=self._unscored,
            name=self.rounded.subject.where,
            on_windows=on_windows,
        )

    def noise_floor(self, on_windows: OnWindows | None = None) -> Quality:
        """The model against itself with its activations rounded to bfloat16."""
        self.reference()  # is remembered before the model is changed
        model = self._runner.model
        heads = [model.get_output_embeddings()] if hasattr(model, "get_output_embeddings") else []  # type: ignore[operator]
        handles = round_activations(model, torch.bfloat16, keep=[head for head in heads if head is not None])
        try:
            return self._measure("noise floor", None, on_windows)
        finally:
            for handle in handles:
                handle.remove()

    def prepare(self, evidence: SearchEvidence, choices: Sequence[Mapping[str, str]], stage: Stage) -> None:
        """Round what these choices need and is not rounded yet, weight by weight; the files go with `rounded`."""
        pairs = [
            (name, fmt)
            for choice in choices
            for group, fmt in choice.items()
            for name in evidence.groups[group].tensors
        ]
        missing, sites = self.rounded.missing(pairs), self.rounded.subject.sites
        sizes = {name: max(1, math.prod(sites[name].shape) // COUNTED) for name, _ in missing}
        if missing:
            with stage("rounding plans", sum(sizes[name] for name, _ in missing)) as advance:
                self.rounded.round_all(missing, lambda name, fmt: advance(sizes[name], f"{name} in {fmt}"))

    def measure(
        self, evidence: SearchEvidence, choice: Mapping[str, str], label: str, on_windows: OnWindows | None = None
    ) -> Quality:
        """The model with groups in formats; groups that `choice` does not name stay as they are."""
        formats = {name: fmt for group, fmt in choice.items() for name in evidence.groups[group].tensors}

        def weight(name: str) -> Tensor | None:
            return self.rounded.decoded(name, formats[name]) if name in formats else None

        first = self._runner.first_block(self.rounded.subject.names[name] for name in formats)
        return self._measure(label, self.rounded.subject.replaced_by(weight), on_windows, first)

    def kl(self, evidence: SearchEvidence, choice: Mapping[str, str], label: str) -> float:
        quality = self.measure(evidence, choice, label)
        assert quality.against is not None
        return max(0.0, quality.against.kl.mean)

    def measured(self, evidence: SearchEvidence, rival: RivalPlan, on_windows: OnWindows | None = None) -> MeasuredPlan:
        quality = self.measure(evidence, rival.choice, rival.label, on_windows)
        return MeasuredPlan(
            rival.label,
            rival.kind,
            rival.choice,
            evidence.nbytes(rival.choice),
            evidence.predict(rival.choice),
            quality,
        )

    def _measure(
        self, label: str, replaced: Replaced | None, on_windows: OnWindows | None = None, first: int = 0
    ) -> Quality:
        """`first` is the first block that is not as in the model itself."""
        logits = self._logits_of(replaced, first)
        with self._runner.outside(replaced):
            return measure_perplexity(
                logits,
                self.windows,
                reference=self._cached,
                batch=1,
                unscored=self._unscored,
                name=label,
                on_windows=on_windows,
            )

    def _logits_of(
        self, replaced: Replaced | None, first: int = 0, before: list[list[TokenStates]] | None = None
    ) -> Callable[[Tensor], Tensor]:
        """The blocks are run now, for all windows; norm and head when a window is asked for."""
        states: dict[bytes, TokenStates] = {}
        if first and self._before:
            last = self._runner.from_block(first, self._before[first], replaced)
        else:
            batches = equal_lengths(self.windows, max(1, BATCH // len(self.windows[0])))
            last = self._runner.through_blocks(batches, replaced, before=before)
        for each in last:
            for row, ids in enumerate(each.ids):
                hidden = None if each.hidden is None else each.hidden[row : row + 1]
                states[_key(ids)] = TokenStates(ids[None], hidden)
        return lambda ids: self._runner.leave(states[_key(ids[0])])

    @cached_property
    def _reference_logits(self) -> Callable[[Tensor], Tensor]:
        return self._logits_of(None, before=self._before)

    def _model_itself(self, ids: Tensor) -> Tensor:
        logits = self._reference_logits
        with self._runner.outside():
            return torch.cat([logits(window[None]) for window in ids])


def _key(window: Tensor) -> bytes:
    return window.numpy(force=True).tobytes()


def paired_difference(first: MeasuredPlan, second: MeasuredPlan) -> Estimate:
    """KL of the first minus that of the second on the same windows: what the text itself adds drops out."""
    counts = [int(count) for count in first.quality.samples["tokens"]]
    pairs = zip(first.quality.samples["kl"], second.quality.samples["kl"], strict=True)
    return clustered_mean([one - two for one, two in pairs], counts)
