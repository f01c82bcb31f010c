"""NamePattern: the verdicts of re.fullmatch, without its backtracking."""

from __future__ import annotations

import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.plan.name_pattern import MAX_PATTERN_LETTERS, MAX_STEPS_KEPT, NamePattern, PatternError


@pytest.mark.parametrize(
    ("regex", "name", "expected"),
    [
        (r"^block\.(\d+)\.attn\.qkv\.(weight|bias)$", "block.12.attn.qkv.bias", True),
        (r"^block\.(\d+)\.attn\.qkv\.(weight|bias)$", "block.12.attn.qkv.biased", False),
        (r"block\.(\d+)", "my.block.1", False),
        (r"weight", "weight.scales", False),
        (r".*", "", True),
        (r"^$", "", True),
        (r"a^b", "ab", False),
        (r"(^a|b)*$", "abb", True),
        (r"[^.]+\.w", "x.y.w", False),
        (r"x{2,3}", "xxxx", False),
        (r"x{2,3}?", "xxx", True),
        (r"(?:ab|a)(?:bc|c)", "abc", True),
        (r"(?P<i>[0-9]{1,2})\Z", "07", True),
        (r"\w\W\s\S", "a- b", True),
        (r"[a-c]{2}", "ac", True),  # both ends of a range are in it
        (r"[b-c]", "a", False),
        (r"[^a-c]", "b", False),
        (r"[^a-c]", "d", True),
        (r"[^\d_.]+", "a1", False),
        (r"[\D]", "x", True),
    ],
)
def test_verdicts(regex, name, expected):
    assert NamePattern(regex).matches(name) is expected
    assert bool(re.fullmatch(regex, name)) is expected


ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "[^b1]", r"\d", "1", "^", "$"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(PATTERNS, st.text("ab1", max_size=6))
def test_agrees_with_re(regex, name):
    assert NamePattern(regex).matches(name) == bool(re.fullmatch(regex, name))


@pytest.mark.parametrize(
    ("regex", "name", "expected"),
    [
        ("(a+)+$", "a" * 20_000 + "!", False),
        ("(a+)+$", "a" * 20_000, True),
        ("(a|a)*b", "a" * 20_000, False),
        ("(a|a)*b", "a" * 20_000 + "b", True),
        ("(.*)*x", "y" * 20_000, False),
        (".*.*.*.*.*.*x", "y" * 20_000, False),
        (r"(\w+\.?)+!", "block." * 4_000, False),
    ],
)
def test_patterns_that_backtrack_for_ever_are_answered_at_once(regex, name, expected):
    started = time.perf_counter()
    assert NamePattern(regex).matches(name) is expected
    assert time.perf_counter() - started < 2


def test_a_pattern_that_meets_new_states_for_ever_keeps_few_of_them():
    letters = random.Random(0).choices("ab", k=3 * MAX_STEPS_KEPT)
    pattern, name = NamePattern("(a|b)*a[ab]{20}"), "".join(letters)
    assert pattern.matches(name) is (name[-21] == "a")
    assert len(pattern._steps) <= MAX_STEPS_KEPT
    assert pattern.matches(name[:-1]) is (name[-22] == "a")


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        (r"(?=a)b", "look-ahead"),
        (r"(?<!a)b", "look-behind"),
        (r"(a)\1", "back reference"),
        (r"(a)?(?(1)b|c)", "conditional group"),
        (r"\bfoo", "word boundary"),
        (r"(?>a)", "atomic group"),
        (r"a++", "possessive"),
        (r"(?i)a", "flag"),
        (r"(?i:a)", "flag"),
        (r"a{100000}", "too large"),
        (r"((a{99}){99}){99}", "too large"),
        (r"(?:){4000000000}", "too large"),
        ("(", "not a valid regular expression"),
        ("[[a]", "not a valid regular expression"),
        ("(" * 51 + ")" * 51, "more than 50 groups"),
        ("a" * (MAX_PATTERN_LETTERS + 1), "too long"),
    ],
)
def test_refused(regex, message):
    with pytest.raises(PatternError, match=message) as caught:
        NamePattern(regex)
    assert "\n" not in str(caught.value)
