"""NamePatterns: matches many regular expressions against a whole name, in bounded time.

Patterns come from files that others wrote, and Python's `re` backtracks: `(a+)+$` takes for ever on 40 letters. A timer
cannot stop `re` inside its own process, and a helper process would make a pure function start one. So patterns are
parsed by `re`'s own parser and run as one finite automaton, every alternative of every pattern at once, and a table
keeps the sets of states it has met: a name is read once, however many patterns there are. Constructs without an
automaton (back references, look-around, word boundaries, atomic and possessive parts, flags) are refused by name, and
so is a pattern that counts too far, such as `a{100000}`.

New sets of states cost time and memory. Patterns for the names of a model meet few; patterns that are made to meet new
sets at every letter exceed `MAX_WORK` and are refused.

A match agrees with `re.fullmatch`, except that `$` means the end only, not also before a last newline.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from bitplan.errors import BitplanError

MAX_PATTERN_LETTERS = 500
MAX_GROUPS = 50
MAX_STATES = 1000  # of one pattern
MAX_STATES_IN_ALL = 30_000
MAX_WORK = 200_000  # states visited to find new sets: gpt-oss takes 3,000, a rule for each tensor 50,000

_parser: Any = importlib.import_module("re._parser")  # it has no type stubs
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


class PatternError(BitplanError, ValueError):
    """Why pattern number `index` cannot be used, as the end of a sentence that begins with the pattern."""

    index: int | None = None


class NamePatterns:
    """Compiled patterns; `matching(name)` has the indices of those for which `re.fullmatch` would succeed."""

    def __init__(self, regexes: Sequence[str]) -> None:
        self._free: list[list[int]] = []  # state -> states reached without a letter
        self._letters: list[tuple[Test, int] | None] = []  # state -> (which letters, state after)
        self._starts: set[int] = set()  # states passed only at the start of a name
        self._ends: set[int] = set()  # states passed only at the end of a name
        self._accepts: dict[int, int] = {}  # last state of a pattern -> its index
        self._sets: dict[States, States] = {}
        self._work = 0
        firsts = set()
        for index, regex in enumerate(regexes):
            self._limit = min(len(self._free) + MAX_STATES, MAX_STATES_IN_ALL)
            try:
                first = self._state()
                self._accepts[self._build(_parse(regex), first)] = index
            except PatternError as error:
                error.index = index
                raise
            firsts.add(first)
        self._first = self._closure(firsts, at_start=True)
        self._steps: dict[tuple[States, str], States] = {}
        self._matches: dict[States, tuple[int, ...]] = {}

    def matching(self, name: str) -> tuple[int, ...]:
        """The indices of the patterns that match a name, in order."""
        states = self._first
        for letter in name:
            key = (states, letter)
            after = self._steps.get(key)
            if after is None:
                after = self._steps[key] = self._step(states, letter)
            if not after:
                return ()
            states = after
        if not name:  # the start of an empty name is also its end
            return self._accepted(self._closure(set(states), at_start=True, at_end=True))
        if states not in self._matches:
            self._matches[states] = self._accepted(self._closure(set(states), at_end=True))
        return self._matches[states]

    # ---- running --------------------------------------------------------------------------------------------------

    def _step(self, states: States, letter: str) -> States:
        reached = set()
        for state in states:
            way = self._letters[state]
            if way is not None and way[0](letter):
                reached.add(way[1])
        self._count(len(states))
        return self._closure(reached)

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
        self._count(len(reached))
        closed = frozenset(reached)
        return self._sets.setdefault(closed, closed)  # one object for equal sets, compared by identity

    def _count(self, states: int) -> None:
        self._work += states
        if self._work > MAX_WORK:
            raise PatternError(
                f"need more than {MAX_WORK} steps for these names; use fewer rules, or simpler ones (no nested '*' or "
                "counts)"
            )

    def _accepted(self, states: States) -> tuple[int, ...]:
        return tuple(sorted(self._accepts[state] for state in states if state in self._accepts))

    # ---- building: each part goes from a state to a new one ---------------------------------------------------------

    def _state(self) -> int:
        if len(self._free) >= self._limit:
            if self._limit == MAX_STATES_IN_ALL:
                raise PatternError(f"is too much: the rules together have more than {MAX_STATES_IN_ALL} states")
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
        if op in ("MAX_REPEAT", "MIN_REPEAT"):  # greedy or lazy changes which match is found, not whether there is one
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
        """A new state after this one, so that even an empty body counts towards the limit."""
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
    if regex.count("(") > MAX_GROUPS:  # so that no nesting reaches the interpreter's own limit
        raise PatternError(f"has more than {MAX_GROUPS} groups; split it into several rules")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of sets that a later Python will read differently
            parsed = _parser.parse(regex)
    except (re.error, OverflowError, Warning) as error:
        shell = ".*".join(map(re.escape, regex.split("*"))) if regex[:1] == "*" else ""
        hint = f"; the shell pattern would be {shell!r} here" if shell else ""
        raise PatternError(f"is not a valid regular expression: {error}{hint}") from None
    if parsed.state.flags & ~re.UNICODE:
        _refuse("a flag is")
    return parsed


def _refuse(what: str) -> NoReturn:
    raise PatternError(f"cannot be matched in bounded time: {what} not allowed; use several simpler rules in its place")


def _letter_test(op: str, argument: Any) -> Test:
    """A test for the letters that a part of exactly one letter matches."""
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
