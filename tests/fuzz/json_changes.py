"""Changes of JSON that know its structure: any value, member or key of a text replaced by what a reader may trip over.

The text is changed in place of one value, so a change may spell what no writer would: a key twice, NaN, 1e999.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from random import Random

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+)')

NUMBERS = [0, 1, 2, 3, 4, 7, 8, 12, 31, 32, 64, 255, 256, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53 + 1]
NUMBERS += [2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1]
VALUES = [
    *map(str, NUMBERS), "-1", "-2147483649", str(-(2**63)), str(2**64), str(10**30), str(10**400), "9" * 5000,
    "0.5", "-0.0", "1.0", "1.5", "1e308", "-1e308", "5e-324", "1e999", "-1e999", "1e-999", "NaN", "-Infinity", "true",
    "false", "null", '""', '"a"', '"F32"', '"U8"', '"mxfp4"', '"int8"', '"AAAA"', '"NaN"', '"\\ud800"', '"\\udfff<b>"',
    '"\\u0000"', '"\\n\\u001b[31m"', '"層"', '"../../etc/passwd"', '"(a+)+$"', '"[[.*"', '"' + "x" * 100_000 + '"',
    "[]", "{}", "[[]]", "[{}]", "[null]", '{"a": {}}', '{"a": 1, "a": 2}', "[" + "0," * 20_000 + "0]", "[1e999]",
    '["x"]', "[0.5, 0.5]", "[0, 4611686018427387904]", "[65536, 65536, 65536, 65536]", "[" * 40 + "]" * 40,
    "[" * 976 + "]" * 976, '{"a":' * 190 + "1" + "}" * 190, "[" * 20_000,
    '{"dtype": "U8", "shape": [], "data_offsets": [0, 1]}',
]  # fmt: skip
KEYS = ['""', '"extra"', '"0"', '"__metadata__"', '"\\ud800"', '"\\u0000"', '"a\\nb"', '"' + "k" * 10_000 + '"', '"層"']


@dataclass(frozen=True)
class Span:
    """Where a value lies in a text; `member` is where its key begins (itself, in a list), `depth` counts containers."""

    start: int
    end: int
    depth: int
    member: int
    key: tuple[int, int] | None


def spans(text: str, offset: int = 0) -> list[Span]:
    """Every value of a sound JSON text, the whole of it last."""
    result: list[Span] = []
    _scan(text, offset, 0, None, result)
    return result


def _scan(text: str, at: int, depth: int, key: tuple[int, int] | None, result: list[Span]) -> int:
    token = _TOKEN.match(text, at)
    assert token, text[at : at + 40]
    start, end = token.span(1)
    if token[1] in "[{":
        closing = "]" if token[1] == "[" else "}"
        while (following := _TOKEN.match(text, end)) and following[1] != closing:
            if following[1] == ",":
                end = following.end()
            elif closing == "}":
                colon = _TOKEN.match(text, following.end())
                assert colon
                end = _scan(text, colon.end(), depth + 1, following.span(1), result)
            else:
                end = _scan(text, end, depth + 1, None, result)
        assert following, "not closed"
        end = following.end()
    result.append(Span(start, end, depth, start if key is None else key[0], key))
    return end


def change_json(text: str, places: list[Span], rng: Random) -> str:
    """One to three changes, of values that do not lie within each other."""
    chosen: list[Span] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        # A depth is drawn first: else nearly every change would hit the numbers of a long list.
        depth = rng.choice(sorted({place.depth for place in places}))
        place = rng.choice([place for place in places if place.depth == depth])
        if all(place.end <= other.member or other.end <= place.member for other in chosen):
            chosen.append(place)
    for place in sorted(chosen, key=lambda place: -place.start):
        text = _change(text, place, places, rng)
    return text


def _change(text: str, place: Span, places: list[Span], rng: Random) -> str:
    start, end = place.start, place.end
    value, how = text[start:end], rng.randrange(12)
    if how == 0:  # removed, with its key and one comma
        comma = _TOKEN.match(text, end)
        if comma and comma[1] == ",":
            return text[: place.member] + text[comma.end() :]
        return text[: place.member].rstrip().removesuffix(",") + text[end:]
    if how == 1:  # there twice
        return f"{text[:end]}, {text[place.member :]}"
    if how == 2:
        other = rng.choice(places)
        return text[:start] + text[other.start : other.end] + text[end:] if other.end <= start else text
    if how == 3 and place.key:
        names = [text[slice(*other.key)] for other in places if other.key]
        return text[: place.key[0]] + rng.choice([*KEYS, rng.choice(names)]) + text[place.key[1] :]
    if how == 4 and value[:1] in "[{":
        extra = rng.choice(VALUES) if value[0] == "[" else f"{rng.choice(KEYS)}: {rng.choice(VALUES)}"
        return f"{text[: start + 1]}{extra}{', ' if len(value) > 2 else ''}{text[start + 1 :]}"
    if how == 5:
        depth = rng.choice((1, 3, 40))
        return text[:start] + "[" * depth + value + "]" * depth + text[end:]
    if how == 6:
        return text[:start] + json.dumps(value) + text[end:]
    if how in (7, 8) and value[0] in "-0123456789":
        return (
            text[:start] + rng.choice((f"-{value}".removeprefix("--"), _nudged(value, rng), f"{value}e3")) + text[end:]
        )
    if how in (7, 8) and value[0] == '"':
        return text[:start] + _changed_string(value, rng) + text[end:]
    return text[:start] + rng.choice(VALUES) + text[end:]


def _nudged(value: str, rng: Random) -> str:
    number = json.loads(value)
    return str(number + rng.choice((-4, -1, 1, 4, 0.5, number, 2**40)))


def _changed_string(value: str, rng: Random) -> str:
    """A letter less, more or another; a string that holds JSON itself is changed as JSON."""
    inner = json.loads(value)
    if inner[:1] == "{" and rng.random() < 0.9:
        return json.dumps(change_json(inner, spans(inner), rng))
    at = rng.randrange(len(inner) + 1)
    letters = rng.choice(("", "A", "=", "/", ".", "\0", "\n", "\ud800", "AAAA", "層"))
    return json.dumps(inner[:at] + letters + inner[at + rng.choice((0, 1)) :])
