"""NamePattern: does a regular expression match a whole name, in time proportional to the name?

Patterns come from files that others wrote, and Python's `re` backtracks: `(a+)+$` takes for ever on 40 letters.
A timer cannot stop `re` inside its own process, and a helper process would make a pure function start one. So the
pattern is parsed by `re`'s own parser and run as a finite automaton, every alternative at once, with the states it
has met kept in a table: no pattern can take long, and the slow ones simply match. What has no automaton (back
references, look-around, word boundaries, atomic and possessive parts, flags) is refused by name, and so is a
pattern that counts too far, such as `a{100000}`.

The match agrees with `re.fullmatch`, except that `$` means the end only, not also before a last newline.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

MAX_PATTERN_LETTERS = 500
MAX_GROUPS = 50
MAX_STATES = 1000
MAX_STEPS_KEPT = 4096

_parser: Any = importlib.import_module("re._parser")  # no stubs for it
_REFUSED = {
    "ASSERT": "look-ahead and look-behind are",
    "ASSERT_NOT": "look-ahead and look-behind are",
    "GROUPREF": "a back reference is",
    "GROUPREF_EXISTS": "a conditional group is",
    "ATOMIC_GROUP": "an atomic group is",
    "POSSESSIVE_REPEAT": "a possessive repeat is",
}
_CATEGORIES = {
    f"CATEGORY_{prefix}{name}": re.compile(f"\\{letter.upper() if prefix else letter}")
    for name, letter in (("DIGIT", "d"), ("SPACE", "s"), ("WORD", "w"))
    for prefix in ("", "NOT_")
}

Test = Callable[[str], bool]
States = frozenset[int]


class PatternError(ValueError):
    """Why a pattern cannot be used, as the end of a sentence that begins with the pattern."""


class NamePattern:
    """A compiled pattern; `matches(name)` is `re.fullmatch` without backtracking."""

    def __init__(self, regex: str) -> None:
        self.regex = regex
        self._free: list[list[int]] = []  # state -> states reached without a letter
        self._letters: list[tuple[Test, int] | None] = []  # state -> (which letters, state after)
        self._starts: set[int] = set()  # states passed only at the start of a name
        self._ends: set[int] = set()  # and only at its end
        first = self._state()
        self._accept = self._build(_parse(regex), first)
        self._first = self._closure({first}, at_start=True)
        self._steps: dict[tuple[States, str], States] = {}
        self._accepts: dict[States, bool] = {}

    def __repr__(self) -> str:
        return f"NamePattern({self.regex!r})"

    def matches(self, name: str) -> bool:
        states = self._first
        for letter in name:
            key = (states, letter)
            after = self._steps.get(key)
            if after is None:
                if len(self._steps) >= MAX_STEPS_KEPT:  # a pattern made to meet new states at every letter
                    self._steps.clear()
                    self._accepts.clear()
                after = self._steps[key] = self._step(states, letter)
            if not after:
                return False
            states = after
        # The start of an empty name is also its end.
        return self._accepted(states, empty=not name)

    # ---- running --------------------------------------------------------------------------------------------------

    def _step(self, states: States, letter: str) -> States:
        found = set()
        for state in states:
            way = self._letters[state]
            if way is not None and way[0](letter):
                found.add(way[1])
        return self._closure(found)

    def _closure(self, states: set[int], *, at_start: bool = False, at_end: bool = False) -> States:
        """All states reached without a letter."""
        reached, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            if (state in self._starts and not at_start) or (state in self._ends and not at_end):
                continue
            for after in self._free[state]:
                if after not in reached:
                    reached.add(after)
                    waiting.append(after)
        return frozenset(reached)

    def _accepted(self, states: States, *, empty: bool) -> bool:
        if empty:
            return self._accept in self._closure(set(states), at_start=True, at_end=True)
        if states not in self._accepts:
            self._accepts[states] = self._accept in self._closure(set(states), at_end=True)
        return self._accepts[states]

    # ---- building: each part goes from a state to a new one ---------------------------------------------------------

    def _state(self) -> int:
        if len(self._free) >= MAX_STATES:
            raise PatternError(
                f"is too large: it counts beyond {MAX_STATES} states; use '+' or '*' in place of a high count"
            )
        self._free.append([])
        self._letters.append(None)
        return len(self._free) - 1

    def _build(self, parts: Any, state: int) -> int:
        for op, argument in parts:
            state = self._part(str(op), argument, state)
        return state

    def _part(self, op: str, argument: Any, state: int) -> int:
        if op in ("MAX_REPEAT", "MIN_REPEAT"):  # greedy or not decides which match, never whether
            least, most, body = argument
            return self._repeat(least, most, body, state)
        if op == "SUBPATTERN":
            if argument[1] or argument[2]:
                _refuse("a flag is")
            return self._build(argument[3], state)
        if op == "BRANCH":
            return self._branch(argument[1], state)
        if op == "AT":
            return self._anchor(str(argument), state)
        if op in _REFUSED:
            _refuse(_REFUSED[op])
        before = state if self._letters[state] is None else self._next(state)
        after = self._state()
        self._letters[before] = (_letter_test(op, argument), after)
        return after

    def _branch(self, branches: Any, state: int) -> int:
        after = self._state()
        for branch in branches:
            inner = self._state()
            self._free[state].append(inner)
            self._free[self._build(branch, inner)].append(after)
        return after

    def _repeat(self, least: int, most: Any, body: Any, state: int) -> int:
        for _ in range(least):
            state = self._next(self._build(body, state))
        after = self._state()
        if most is _parser.MAXREPEAT or int(most) >= _parser.MAXREPEAT:
            loop = self._next(state)
            self._free[self._build(body, loop)].append(loop)
            self._free[loop].append(after)
            return after
        for _ in range(int(most) - least):
            self._free[state].append(after)
            state = self._next(self._build(body, state))
        self._free[state].append(after)
        return after

    def _next(self, state: int) -> int:
        """A new state behind this one, so that even an empty body counts towards the limit."""
        after = self._state()
        self._free[state].append(after)
        return after

    def _anchor(self, kind: str, state: int) -> int:
        if kind not in ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING"):
            _refuse("a word boundary is")
        anchor = self._next(state)
        (self._starts if "BEGINNING" in kind else self._ends).add(anchor)
        return self._next(anchor)


def _parse(regex: str) -> Any:
    if len(regex) > MAX_PATTERN_LETTERS:
        raise PatternError(f"is too long: {len(regex)} letters, at most {MAX_PATTERN_LETTERS}; split it into two rules")
    if regex.count("(") > MAX_GROUPS:  # counted here, so that no nesting meets the interpreter's own limit
        raise PatternError(f"has more than {MAX_GROUPS} groups; split it into several rules")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a set that a later Python will read in another way
            parsed = _parser.parse(regex)
    except (re.error, OverflowError, Warning) as error:
        raise PatternError(f"is not a valid regular expression: {error}") from None
    if parsed.state.flags & ~re.UNICODE:
        _refuse("a flag is")
    return parsed


def _refuse(what: str) -> NoReturn:
    raise PatternError(f"cannot be matched in bounded time: {what} not allowed; use several simpler rules in its place")


def _letter_test(op: str, argument: Any) -> Test:
    """Which letters a part that takes exactly one will take."""
    if op == "LITERAL":
        return chr(argument).__eq__
    if op == "NOT_LITERAL":
        return chr(argument).__ne__
    if op == "ANY":
        return "\n".__ne__
    if op == "IN":
        negated = bool(argument) and str(argument[0][0]) == "NEGATE"
        tests = [_set_test(str(kind), value) for kind, value in argument[negated:]]
        return lambda letter: any(test(letter) for test in tests) != negated
    return _refuse(f"{op.lower()} is")


def _set_test(kind: str, value: Any) -> Test:
    if kind == "RANGE":
        low, high = value
        return lambda letter: low <= ord(letter) <= high
    if kind == "CATEGORY":
        category = _CATEGORIES[str(value)]
        return lambda letter: category.match(letter) is not None
    return _letter_test(kind, value)
