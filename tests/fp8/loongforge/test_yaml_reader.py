"""load_yaml: what YAML means here, and that no text makes it slow, large, or raise anything but its own error."""

from __future__ import annotations

import itertools
import random

import pytest

from bitplan.fp8.loongforge import MAX_DEPTH, MAX_NODES, MAX_YAML_CHARACTERS, load_yaml
from bitplan.fp8.policy.vocabulary import ModelConfigError
from tests.limits import assert_quick

LETTERS = "abcdefghijklmnopqrst"
ALIAS_BOMB = "a: &a [1]\n" + "".join(
    f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n" for x, y in itertools.pairwise(LETTERS)
)
MERGE_BOMB = "a: &a {k: 1}\n" + "".join(
    f"{y}: &{y} {{<<: [{', '.join([f'*{x}'] * 50)}], k{y}: 1}}\n" for x, y in itertools.pairwise(LETTERS)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-3", -3), ("1_000", 1000), ("0x1F", 31), ("0o17", 15), ("1.5", 1.5), ("1e-5", 1e-5), (".5", 0.5),
        ("true", True), ("no", False), ("~", None), ("", None), ("'1'", "1"), ('"true"', "true"), ("1:30", "1:30"),
        ("190:20:30", "190:20:30"), ("2020-01-01", "2020-01-01"), ("1.2.3", "1.2.3"), ("-", [None]), ("=", "="),
        ("!!str 12", "12"), ("!!float 1", 1.0), ("!!int 7", 7), ("!!null ~", None), ("! 12", "12"),
        ("&x [1, 2]", [1, 2]), ("{b: &x {c: 1}, d: *x}", {"b": {"c": 1}, "d": {"c": 1}}),
        ("{b: &x {c: 1, e: 2}, d: {<<: *x, c: 3}}", {"b": {"c": 1, "e": 2}, "d": {"e": 2, "c": 3}}),
    ],
)  # fmt: skip
def test_values(text, value):
    indented = f"\n  {text}" if text.startswith("- ") or text == "-" else text
    assert load_yaml(f"a: {indented}\n", where="m.yaml") == {"a": value}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!int ''", "line 1: !!int must be followed by a value of that kind"),
        ("a: !!int 1:30", "!!int must be"),
        ("a: !!int .inf", "!!int must be"),
        ("a: !!float ''", "!!float must be"),
        ("a: !!bool 2", "!!bool must be"),
        ("a: !!null x", "!!null must be"),
        ("a: !!timestamp x", "the tag !!timestamp is not allowed"),
        ("a: !!binary '='", "the tag !!binary is not allowed"),
        ("a: !!set {x}", "the tag !!set is not allowed"),
        ("a: !!omap [x]", "the tag !!omap is not allowed"),
        ("a: !!map x", "the tag !!map is not allowed"),
        ("a: !!python/name:os.system x", "the tag !!python/name:os.system is not allowed"),
        ("a: !custom x", "the tag !custom is not allowed"),
        ("a: 010", "begins with 0"),
        ("a: " + "9" * 5000, "a number of 5000 letters"),
        ("a: 1\nb: {c: 1,\n c: 2}", "line 3: key 'c' appears twice"),
        ("a: &x {b: 1}\nc: {<<: *x, <<: *x}", "key '<<' appears twice"),
        ("a: {<<: 3}", "<< takes a mapping"),
        ("? [a]\n: 1", "a key must be text"),
        ("a: *b", "found undefined alias"),
        ("a: &x [*x]", "within its own"),
        ("a: &x 1\nb: &x 2", "found duplicate anchor"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ('a: "\\UFFFFFFFF"', "not valid YAML"),
        ('a: "\\uD800"', "surrogate"),
        ("%YAML " + "9" * 5000 + ".1\n---\na: 1", "not valid YAML"),
        ("a: " + "[" * 1000, "nested more than 32 deep"),
        ("a: [" + "1, " * 12000 + "1]", "more than 10000 values"),
        ("x" * (MAX_YAML_CHARACTERS + 1), "characters are too many"),
        (ALIAS_BOMB, "written out"),
        (MERGE_BOMB, "written out"),
    ],
)
def test_refused_at_once(text, message):
    def refuse():
        with pytest.raises(ModelConfigError, match=message) as caught:
            load_yaml(text, where="m.yaml")
        assert str(caught.value).startswith("m.yaml: ")
        assert "\n" not in str(caught.value)

    assert_quick(refuse, seconds=2)


PIECES = (
    "a",
    "b: ",
    ": ",
    "- ",
    "\n",
    "\n  ",
    "\n- ",
    "? ",
    "[",
    "]",
    "{",
    "}",
    ", ",
    "&x ",
    "*x",
    "*y",
    "<<: ",
    "!!int ",
    "!!float ",
    "!!bool ",
    "!!null ",
    "!!str ",
    "!!set ",
    "!!omap ",
    "!!pairs ",
    "!!binary ",
    "!!timestamp ",
    "!!python/object:x ",
    "!x ",
    "! ",
    "!<",
    "!<tag:yaml.org,2002:int> ",
    "'",
    '"',
    "\\",
    "\\x",
    "\\U00110000",
    "|",
    ">",
    "|-9",
    "#",
    "---\n",
    "...\n",
    "%YAML 1.1\n",
    "%TAG ! x\n",
    "0",
    "1:30",
    "0x",
    "0b",
    "1_",
    "._",
    "1e",
    ".inf",
    "-.nan",
    "2020-01-01",
    "~",
    "true",
    "defaults",
    "\t",
    "\x85",
    "\u2028",
    "\ufeff",
    "\x00",
    "\ud800",
    "%",
    "@",
    "`",
    "\xe9",
)


def structured(rng):
    """Text of YAML's own pieces: far nearer to its rules than random letters."""
    return "".join(rng.choices(PIECES, k=rng.randint(1, 14)))


def test_any_text_is_read_or_refused():
    rng = random.Random(0)
    for _ in range(400):
        text = structured(rng)
        message = ""
        try:
            load_yaml(text, where="m.yaml")
        except ModelConfigError as error:
            message = str(error)
        assert "\n" not in message, text


def test_the_limits_themselves_are_allowed():
    """A document of exactly so many values, or so many levels, is read; one more is refused."""
    fits = f"a: [{', '.join(['1'] * (MAX_NODES - 3))}]"  # the mapping, its key and the list are values, too
    assert len(load_yaml(fits, where="m.yaml")["a"]) == MAX_NODES - 3
    with pytest.raises(ModelConfigError, match="more than 10000 values"):
        load_yaml(fits.replace("]", ", 1]"), where="m.yaml")
    assert load_yaml("a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH, where="m.yaml")
    with pytest.raises(ModelConfigError, match=f"nested more than {MAX_DEPTH} deep"):
        load_yaml("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), where="m.yaml")
