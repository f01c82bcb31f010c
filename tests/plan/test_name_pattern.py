"""NamePattern: the verdicts of re.fullmatch, without its backtracking."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.plan.manifest import MAX_PATTERN_LETTERS, NamePatterns, PatternError
from tests.limits import assert_quick


def matches(regex, name):
    return NamePatterns([regex]).matching(name) == (0,)


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
    assert matches(regex, name) is expected
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


@settings(max_examples=120, deadline=None)
@given(PATTERNS, st.text("ab1", max_size=6))
def test_agrees_with_re(regex, name):
    assert matches(regex, name) == bool(re.fullmatch(regex, name))


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
    def answer():
        assert matches(regex, name) is expected

    assert_quick(answer, seconds=2)


def test_patterns_that_meet_new_states_for_ever_are_refused():
    def refuse():
        names = ("".join(random.Random(seed).choices("ab", k=300)) for seed in range(1000))
        patterns = NamePatterns([f"(a|b)*a[ab]{{{count}}}" for count in range(20, 60)])
        with pytest.raises(PatternError, match="need more than 200000 steps for these names"):
            [patterns.matching(name) for name in names]

    assert_quick(refuse, seconds=2)


def test_many_patterns_in_one_pass():
    patterns = NamePatterns([rf"block\.(\d+)\.w{number}" for number in range(200)] + [".*", "x"])
    assert patterns.matching("block.12.w7") == (7, 200)
    assert patterns.matching("") == (200,)


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
        ("*.weight", r"not a valid regular expression: .*; the shell pattern would be '\.\*\\\\.weight' here"),
        ("[[a]", "not a valid regular expression"),
        ("(" * 51 + ")" * 51, "more than 50 groups"),
        ("a" * (MAX_PATTERN_LETTERS + 1), "too long"),
    ],
)
def test_refused(regex, message):
    with pytest.raises(PatternError, match=message) as caught:
        NamePatterns([regex])
    assert "\n" not in str(caught.value)
