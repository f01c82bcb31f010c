"""Measures plans end to end: KL and NLL against the model itself, paired window by window.

Rounding the inputs of products is measured, too, and makes candidates of evidence whose inputs are rounded. For y = W x
it changes outputs by W dx. As for weights (statistics.py), 1/2 sum_r gradient_r times the mean of (W dx)_r^2 is the
second-order KL, but for correlations between outputs and between positions; one pass over the windows for checks gives
it for all layers. What it leaves out differs between projections: so each is measured, with the inputs of all its
layers rounded at once and the weights as they are, and its layers share that by predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from bitplan.formats.input_formats import round_input
from bitplan.packed.checkpoints.causal_lm import LateLogits
from bitplan.packed.language.perplexity import (
    Estimate,
    LogitsOf,
    Quality,
    clustered_mean,
    measure_perplexity,
    round_activations,
)
from bitplan.packed.rounded_inputs import hook_rounding
from bitplan.searching.blocks import BATCH, BlockRunner, Replaced, TokenStates, equal_lengths
from bitplan.searching.damage import RoundedWeights
from bitplan.searching.evidence import SearchEvidence, by_part, candidate_name, input_of, weight_format
from bitplan.searching.goal import COUNTED, Goal, SearchError, Stage
from bitplan.searching.runtime_formats import Target
from bitplan.searching.solver import Kind, RivalPlan
from bitplan.searching.statistics import GRADIENT

if TYPE_CHECKING:
    from bitplan.searching.searched_model import SearchSubject

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
    counted: float  # what the goal is about: the KL, or that on the worst of its aims

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
        self,
        rounded: RoundedWeights,
        windows: Sequence[Tensor],
        *,
        unscored: int = 1,
        kept_bytes: int = 0,
        kinds: Sequence[str] = (),
    ) -> None:
        self.rounded, self.windows, self._kept_bytes, self.kinds = rounded, windows, kept_bytes, kinds
        self._unscored = max(1, unscored)
        self._runner = rounded.subject.runner

    def reference(self, on_windows: OnWindows | None = None) -> Quality:
        """Measure the unquantized model itself; its logits are kept for comparisons."""
        return measure_perplexity(
            self._itself,
            self.windows,
            batch=1,
            unscored=self._unscored,
            name=self.rounded.subject.where,
            on_windows=on_windows,
        )

    def noise_floor(self, on_windows: OnWindows | None = None) -> Quality:
        """The model against itself with its activations rounded to bfloat16."""
        model = self._runner.model
        heads = [model.get_output_embeddings()] if hasattr(model, "get_output_embeddings") else []  # type: ignore[operator]
        head = [head for head in heads if head is not None]
        return self.watch(lambda: round_activations(model, torch.bfloat16, keep=head), "noise floor", None, on_windows)

    def prepare(self, evidence: SearchEvidence, choices: Sequence[Mapping[str, str]], stage: Stage) -> None:
        """Round what these choices need and is not rounded yet, weight by weight; the files go with `rounded`."""
        pairs = [pair for choice in choices for pair in self._formats(evidence, choice).items()]
        missing, sites = self.rounded.missing(pairs), self.rounded.subject.sites
        sizes = {name: max(1, math.prod(sites[name].shape) // COUNTED) for name, _ in missing}
        if missing:
            with stage("rounding plans", sum(sizes[name] for name, _ in missing)) as advance:
                self.rounded.round_all(missing, lambda name, fmt: advance(sizes[name], f"{name} in {fmt}"))

    def measure(
        self,
        evidence: SearchEvidence,
        choice: Mapping[str, str],
        label: str,
        on_windows: OnWindows | None = None,
        *,
        nearest: bool = False,
        inputs: Mapping[str, str] | None = None,
    ) -> Quality:
        """The model with groups in formats; groups that `choice` does not name stay as they are.

        nearest   weights are rounded without statistics
        inputs    formats of inputs by weights; those that the choice's candidates have unless given
        """
        formats, numbers = self._formats(evidence, choice), self.rounded.nearest if nearest else self.rounded.decoded

        def weight(name: str) -> Tensor | None:
            return numbers(name, formats[name]) if name in formats else None

        replaced, sites = self.rounded.subject.replaced_by(weight), self.rounded.subject.sites
        rounding = self._inputs(evidence, choice) if inputs is None else inputs
        layers = {layer: fmt for name, fmt in rounding.items() for layer in sites[name].linears}
        return self.watch(lambda: hook_rounding(layers), label, replaced, on_windows, self._around(choice))

    def watch(
        self,
        hooks: Callable[[], list[RemovableHandle]],
        label: str,
        replaced: Replaced | None = None,
        on_windows: OnWindows | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Quality:
        """Measure the model with hooks on some layers, which see or change what goes through, and with new weights.

        around   what else is changed while it runs
        """
        _ = self._itself  # before the model is changed

        @contextmanager
        def hooked() -> Iterator[None]:  # and the reference in between, as it is
            with _hooked(hooks), around():
                yield

        with hooked():
            logits = self._logits_of(replaced, hooked)
        with self._runner.outside(replaced):
            return self._compare(label, logits, on_windows)

    def _around(self, _choice: Mapping[str, str]) -> Callable[[], AbstractContextManager[None]]:
        """A function that makes the context in which the model runs under a choice: for keys and values' formats."""
        return nullcontext

    def _formats(self, evidence: SearchEvidence, choice: Mapping[str, str]) -> dict[str, str]:
        """The format of every weight of a choice."""
        return {name: weight_format(candidate) for name, candidate in self._by_weight(evidence, choice)}

    def _inputs(self, evidence: SearchEvidence, choice: Mapping[str, str]) -> dict[str, str]:
        """The format of inputs of every weight of a choice whose products round theirs."""
        return {name: fmt for name, candidate in self._by_weight(evidence, choice) if (fmt := input_of(candidate))}

    def _by_weight(self, evidence: SearchEvidence, choice: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        tensors = self.rounded.subject.tensors
        for group, candidate in choice.items():
            for tensor in evidence.groups[group].tensors:
                weights = tensors[tensor].weights if tensor in tensors else ()  # keys and values are no weights
                yield from ((name, candidate) for name in weights)

    def kl(
        self, evidence: SearchEvidence, choice: Mapping[str, str], label: str, inputs: Mapping[str, str] | None = None
    ) -> float:
        quality = self.measure(evidence, choice, label, inputs=inputs)
        assert quality.against is not None
        return max(0.0, quality.against.kl.mean)

    def counted(self, evidence: SearchEvidence, quality: Quality) -> float:
        """Take from a measurement what the goal is about: the KL, or the largest of its aims."""
        assert quality.against is not None
        kl_of_kinds = kl_by_kind(quality, self.kinds)
        aims = [sum(share * kl_of_kinds[kind] for kind, share in aim.items()) for aim in evidence.aims]
        return max(aims, default=quality.against.kl.mean)

    def measured(self, evidence: SearchEvidence, rival: RivalPlan, on_windows: OnWindows | None = None) -> MeasuredPlan:
        quality = self.measure(evidence, rival.choice, rival.label, on_windows)
        return MeasuredPlan(
            rival.label,
            rival.kind,
            rival.choice,
            evidence.nbytes(rival.choice),
            evidence.predict(rival.choice),
            quality,
            self.counted(evidence, quality),
        )

    def _compare(self, label: str, logits: LogitsOf, on_windows: OnWindows | None) -> Quality:
        return measure_perplexity(
            logits,
            self.windows,
            reference=self._itself,
            batch=1,
            unscored=self._unscored,
            name=label,
            on_windows=on_windows,
        )

    def _logits_of(
        self,
        replaced: Replaced | None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        room: int = 0,
    ) -> WindowLogits:
        """Run the blocks on all windows now; the result makes logits when a window is asked for."""
        last = self._runner.through_blocks(equal_lengths(self.windows, max(1, BATCH // len(self.windows[0]))), replaced)
        return WindowLogits(self._runner, last, around, room)

    @cached_property
    def _itself(self) -> WindowLogits:
        """The logits of the unquantized model."""
        return self._logits_of(None, self._runner.outside, self._kept_bytes)


class WindowLogits:
    """Logits of windows that are after the last block, made a few tokens at a time when they are asked for.

    around   a context in which they are made: the weights that are in place, what changes activations
    room     bytes of them that are kept: a reference is asked for again with every plan
    """

    def __init__(
        self,
        runner: BlockRunner,
        last: Sequence[TokenStates],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        room: int = 0,
    ) -> None:
        self._runner, self._around, self._room = runner, around, room
        self._states = {
            _key(ids): TokenStates(ids[None], None if batch.hidden is None else batch.hidden[row : row + 1])
            for batch in last
            for row, ids in enumerate(batch.ids)
        }
        self._kept: dict[tuple[bytes, int], Tensor] = {}

    def __call__(self, ids: Tensor) -> Tensor | LateLogits:
        """Give the logits of one window, [1, length]; of all at once where the model runs as a whole."""
        key = _key(ids[0])
        states = self._states[key]
        if states.hidden is None:
            return self.kept((key, 0), lambda: self._leave(states))
        return _PiecesOfLogits(states.hidden, ids, self._runner.vocabulary, self._head, key, self)

    def _head(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self._leave(TokenStates(ids.to(hidden.device), hidden))

    def _leave(self, states: TokenStates) -> Tensor:
        with self._around():
            return self._runner.leave(states)

    def kept(self, key: tuple[bytes, int], make: Callable[[], Tensor]) -> Tensor:
        """Logits cached under `key`; otherwise those that `make` computes, which are cached while there is room."""
        logits = self._kept.get(key)
        if logits is None:
            logits = make()
            if logits.nbytes <= self._room:
                self._room -= logits.nbytes
                self._kept[key] = logits
        return logits


@dataclass(frozen=True)
class _PiecesOfLogits(LateLogits):
    """A window's logits; its pieces are those that are kept, where they are."""

    window: bytes
    windows: WindowLogits

    def of_window(self, window: int, tokens: slice) -> Tensor:
        make = partial(super().of_window, window, tokens)
        return self.windows.kept((self.window, tokens.start), make)


@contextmanager
def _hooked(hooks: Callable[[], list[RemovableHandle]]) -> Iterator[None]:
    handles = hooks()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _key(window: Tensor) -> bytes:
    return window.numpy(force=True).tobytes()


def paired_difference(first: MeasuredPlan, second: MeasuredPlan) -> Estimate:
    """KL of the first minus that of the second on the same windows: what the text itself adds drops out."""
    counts = [int(count) for count in first.quality.samples["tokens"]]
    pairs = zip(first.quality.samples["kl"], second.quality.samples["kl"], strict=True)
    return clustered_mean([one - two for one, two in pairs], counts)


FAR_MORE = 2.0  # times the distance on another kind of text


def kl_by_kind(quality: Quality, kinds: Sequence[str]) -> dict[str, float]:
    """The distance on each kind of text, of windows whose kinds these are; empty where there is one kind alone."""
    pairs = list(zip(kinds, quality.samples["kl"], quality.samples["tokens"], strict=True)) if kinds else []
    return {
        kind: sum(kl for name, kl, _ in pairs if name == kind) / sum(count for name, _, count in pairs if name == kind)
        for kind in dict.fromkeys(kinds)
    }


def ratios_of_kinds(quality: Quality, kinds: Sequence[str]) -> dict[str, float]:
    """The distance on each kind of text over that on all; nothing where there is one kind, or no distance."""
    assert quality.against is not None
    mean = quality.against.kl.mean
    return {kind: max(0.0, kl) / mean for kind, kl in kl_by_kind(quality, kinds).items()} if mean > 0 else {}


def hurt_kind(distances: Mapping[str, float]) -> str | None:
    """What to say where one kind of text is hurt far more than another; None where none is."""
    if not distances:
        return None
    worst, least = max(distances, key=lambda kind: distances[kind]), min(distances, key=lambda kind: distances[kind])
    if distances[worst] < FAR_MORE * distances[least] or distances[least] <= 0:
        return None
    more, less = distances[worst], distances[least]
    return (
        f"{worst} is hurt {more / less:.1f} times as much as {least} (KL {more:.4g} and {less:.4g}): give more bits or "
        "more text of its kind"
    )


# ---- rounded inputs --------------------------------------------------------------------------------------------------


InputMode = Literal["keep", "8", "auto"]
INPUT_MODES: tuple[InputMode, ...] = ("keep", "8", "auto")
SHARE = 0.05  # of a plan's predicted damage: so much rounded inputs may add where no speed is asked for


def check_mode(inputs: str, target: Target, formats: Sequence[str]) -> None:
    """Refuse an unknown word, and a target none of whose products round their inputs."""
    if inputs not in INPUT_MODES:
        raise SearchError(f"must be one of {', '.join(INPUT_MODES)}, got {inputs!r}", settings={"inputs": None})
    if inputs != "keep" and all(target.input_for(fmt) is None for fmt in formats):
        raise SearchError(
            f"{target.name} rounds no inputs of products with weights in {', '.join(formats)}; leave them as they are",
            settings={"inputs": "keep"},
        )


def candidates_of(subject: SearchSubject, group: Sequence[str], formats: Sequence[str], mode: InputMode) -> list[str]:
    """The candidates of a group of tensors: formats, with inputs rounded or not, as is asked for.

    Embeddings multiply nothing, and experts and plain floats have no product that rounds: there inputs stay.
    """
    tensors = subject.tensors
    sites = [subject.sites[weight] for tensor in group for weight in tensors[tensor].weights]
    if mode == "keep" or not all(site.linears and site.slice is None for site in sites):
        return list(formats)
    rounded = {fmt: candidate_name(fmt, subject.target.input_for(fmt)) for fmt in formats}
    both = mode == "auto"
    return [name for fmt in formats for name in dict.fromkeys((rounded[fmt], *([fmt] if both else [])))]


def add_rounded_inputs(
    evidence: SearchEvidence, meter: PlanMeter, formats_of: Mapping[str, Sequence[str]], stage: Stage
) -> None:
    """Add to the evidence candidates whose products round inputs, beside those of the same formats that do not."""
    missing: dict[str, list[tuple[str, str]]] = {}  # a format of inputs -> groups and candidates
    for name, candidates in formats_of.items():
        for candidate in candidates:
            rounded = input_of(candidate)
            if rounded is not None and candidate not in evidence.groups[name].formats:
                missing.setdefault(rounded, []).append((name, candidate))
    parts = {rounded: by_part(dict(pairs)) for rounded, pairs in missing.items()}
    with stage("inputs", sum(1 + len(plans) for plans in parts.values())) as advance:
        for rounded, pairs in missing.items():
            weights = {name: _weights(evidence, meter.rounded.subject, name) for name, _ in pairs}
            nats = _predicted(meter, weights, rounded)
            advance(1, f"inputs in {rounded}")
            for part, names in parts[rounded].items():
                inputs = {weight: rounded for name in names for weight in weights[name]}
                measured = meter.kl(evidence, {}, f"inputs of {part} in {rounded}", inputs)
                predicted = sum(nats[name] for name in names)
                for name in names:
                    nats[name] = measured * nats[name] / predicted if predicted > 0 else measured / len(names)
                advance(1, f"{part} in {rounded}")
            for name, candidate in pairs:
                group = evidence.groups[name]
                group.formats[candidate] = replace(group.formats[weight_format(candidate)], inputs=nats[name], us={})


def _weights(evidence: SearchEvidence, subject: SearchSubject, group: str) -> list[str]:
    tensors = subject.tensors
    return [weight for tensor in evidence.groups[group].tensors for weight in tensors[tensor].weights]


def _predicted(meter: PlanMeter, weights: Mapping[str, Sequence[str]], rounded: str) -> dict[str, float]:
    """Predict the nats of rounding one group's inputs, for each group, from the change of its layers' outputs."""
    sites = meter.rounded.subject.sites
    sums: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(layer: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().float()
            weight: Any = layer.weight
            change = linear(round_input(x, rounded) - x, sites[name].turned(weight).float()).flatten(0, -2)
            sums[name] = sums.get(name, torch.zeros((), device=x.device)) + change.square().sum(0).double()
            tokens[name] = tokens.get(name, 0) + len(change)

        return see

    names = [name for group in weights.values() for name in group]
    watched = [(layer, hook(name)) for name in names for layer in sites[name].linears]
    meter.watch(lambda: [layer.register_forward_pre_hook(see) for layer, see in watched], f"inputs in {rounded}")

    def nats(name: str) -> float:
        gradient = meter.rounded.statistics.mean(name, GRADIENT)
        squares = sums[name] / tokens[name]
        minded = torch.ones_like(squares) if gradient is None else gradient.to(squares)
        return float((minded * squares).sum()) / 2

    return {group: sum(nats(name) for name in group_weights) for group, group_weights in weights.items()}


def round_cheap_inputs(evidence: SearchEvidence, choice: Mapping[str, str], goal: Goal) -> dict[str, str]:
    """The choice with inputs rounded wherever that is nearly free: the least damage first, SHARE of the plan's in all.

    A limit of KL is kept. Where speed is asked for, the solver has chosen already.
    """
    rounded = dict(choice)
    if goal.faster is not None:
        return rounded
    predicted = evidence.predict(choice)
    room = SHARE * predicted if goal.max_kl is None else min(SHARE * predicted, goal.max_kl - predicted)
    costs = sorted(
        (cost.inputs * evidence.together, name, candidate)
        for name, fmt in choice.items()
        for candidate, cost in evidence.groups[name].formats.items()
        if input_of(candidate) is not None and weight_format(candidate) == fmt
    )
    for nats, name, candidate in costs:
        if nats > room:
            break
        rounded[name], room = candidate, room - nats
    return rounded
