"""What rounding the inputs of products takes from a model, in nats; candidates of evidence whose inputs are rounded.

For y = W x the rounding of x changes outputs by W dx. As for weights (statistics.py), 1/2 sum_r gradient_r times the
mean of (W dx)_r^2 is the second-order KL, but for correlations between outputs and between positions; one pass over the
windows for checks gives it for all layers. What it leaves out differs between projections: so each is measured, with
the inputs of all its layers rounded at once and the weights as they are, and its layers share that by predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bitplan.formats.input_formats import round_input
from bitplan.searching.evidence import SearchEvidence, by_part, candidate_name, input_of, weight_format
from bitplan.searching.goal import Goal, SearchError, Stage
from bitplan.searching.runtime_formats import Target
from bitplan.searching.statistics import GRADIENT

if TYPE_CHECKING:
    from bitplan.searching.plan_meter import PlanMeter
    from bitplan.searching.searched_model import SearchSubject

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
    """Put the candidates that round inputs into the evidence, beside those of the same weights with inputs kept."""
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
    """Nats of each group with its inputs rounded, all others as they are, by its outputs' changes."""
    sites = meter.rounded.subject.sites
    sums: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(layer: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().float()
            weight: Any = layer.weight
            change = linear(round_input(x, rounded) - x, weight.float()).flatten(0, -2)
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
