"""Callbacks: functions of the user's, called after each round, which may end the fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitplan.trees.gradients import TreesError


@dataclass(frozen=True)
class RoundState:
    """What a callback sees: the model so far, which predicts; its rounds; the metrics of every round of this fit."""

    model: Any
    round: int  # rounds that the model has
    last_round: int  # rounds it will have
    evals_result: Mapping[str, Mapping[str, Sequence[float]]]


Callback = Callable[[RoundState], Any]


def callbacks_of(given: Any) -> tuple[Callback, ...]:
    given = () if given is None else (given,) if callable(given) else given
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(callable(each) for each in given):
        raise TreesError(f"callbacks: expected a list of functions of a RoundState, got {given!r:.60}")
    return tuple(given)


def wants_to_stop(callbacks: Sequence[Callback], state: RoundState) -> bool:
    """Every callback is called; True from any of them ends the fit after this round."""
    answers = [(each, each(state)) for each in callbacks]
    for each, answer in answers:
        if answer is not None and not isinstance(answer, bool):
            name = getattr(each, "__name__", type(each).__name__)
            raise TreesError(f"callbacks: {name} returned {answer!r:.40}, expected True to stop, else False or None")
    return any(answer is True for _, answer in answers)
