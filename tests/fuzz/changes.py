"""Damaged copies of a file, by what the file is: JSON, lines of JSON, safetensors, GGUF or YAML."""

from __future__ import annotations

import functools
import re
from random import Random

from tests.fuzz.json_changes import NUMBERS, Span, change_json, spans

YAML_VALUES = [
    "", "~", "-1", "0", "1e999", ".inf", ".nan", "0x7fffffffffffffffff", "1" * 400, "true", "[]", "{}", "[[[[]]]]",
    "[" * 200, "&a [*a]", "*a", "&a", "!!python/object/apply:os.system [ls]", "!!binary AAAA", "2020-99-99",
    "12:30:45", "!!timestamp 2020-01-01", "'", '"\\ud800"', '"\\x00"', "|", ">\n  text", "<<: *a", "? a", "- - - a",
    "${a}", "%TAG ! a", "---", "...", "x" * 100_000, "{a: 1, a: 2}",
]  # fmt: skip


def change(data: bytes, suffix: str, rng: Random) -> bytes:
    """One damaged copy; the same for the same generator."""
    if rng.random() < 0.15:
        return _change_bytes(data, suffix, rng)
    if suffix == ".json":
        text = data.decode()
        return change_json(text, _spans(text), rng).encode("utf-8", "surrogatepass")
    if suffix == ".jsonl":
        return _change_lines(data, rng)
    if suffix == ".safetensors":
        return _change_safetensors(data, rng)
    if suffix == ".txt":
        return _change_fields(data.decode(), rng).encode("utf-8", "surrogatepass")
    if suffix == ".yaml":
        return _change_yaml(data.decode(), rng).encode("utf-8", "surrogatepass")
    return _change_bytes(data, suffix, rng)


@functools.lru_cache(maxsize=256)
def _spans(text: str) -> list[Span]:
    return spans(text)


def _change_lines(data: bytes, rng: Random) -> bytes:
    lines = data.decode().splitlines(keepends=True)
    at = rng.randrange(len(lines))
    how = rng.randrange(8)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(rng.randrange(len(lines) + 1), lines[at])
    elif how == 2:
        lines.insert(
            at, rng.choice(("\n", "{}\n", "null\n", "[]\n", "\x1e", lines[at][: rng.randrange(len(lines[at]))]))
        )
    else:
        lines[at] = change_json(lines[at], _spans(lines[at]), rng)
    return "".join(lines).encode("utf-8", "surrogatepass")


def _change_yaml(text: str, rng: Random) -> str:
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    line, how = lines[at], rng.randrange(8)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(rng.randrange(len(lines) + 1), line)
    elif how == 2:
        lines[at] = rng.choice(("  ", "\t", "- ", "? ", "#", "a: &a ")) + line
    elif how == 3:
        lines[at] = line.lstrip()
    elif how == 4 and ":" in line:
        lines[at] = rng.choice(YAML_VALUES) + line[line.index(":") :]
    else:
        lines[at] = re.sub(r"(:|-) .*", lambda match: f"{match[1]} {rng.choice(YAML_VALUES)}", line, count=1)
    return "".join(lines)


FIELD_VALUES = [
    "", " ", "-1", "0", "1", "nan", "inf", "-inf", "1e999", "1e-999", "0x10", "1_000", "²", "١٢", "9" * 5000, "5",
    "[" * 50_000, '{"a":' * 400, "[[1e999]]", "[[NaN]]", "null", '[["a", "a"]]', "[[1, \"a\"]]", "[{}]", "true",
    str(2**31), str(2**63), "-2147483649", "0.5", "x" * 100_000, "\0", "層", "=", ":", "1 " * 20_000, '"\\ud800"',
]  # fmt: skip


def _change_fields(text: str, rng: Random) -> str:
    """Lines of name=value or name:value: a line, a value, or one of a value's words."""
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    line, how = lines[at], rng.randrange(8)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(rng.randrange(len(lines) + 1), line)
    elif how == 2:
        lines[at] = lines[rng.randrange(len(lines))]
    elif how == 3:
        lines[at] = line.rstrip("\n") + rng.choice((" ", "=", "\r", " 0")) + "\n"
    else:
        name, sign, value = next((part for sign in "=:" if (part := line.partition(sign))[1]), (line, "", ""))
        words = value.split(" ")
        if how < 6 and len(words) > 1:
            words[rng.randrange(len(words))] = rng.choice(FIELD_VALUES)
            lines[at] = f"{name}{sign}{' '.join(words)}"
        else:
            lines[at] = f"{name}{sign}{rng.choice(FIELD_VALUES)}\n"
    return "".join(lines)


def _change_safetensors(data: bytes, rng: Random) -> bytes:
    """The header as JSON, with its true length or another; the rest as it is, shorter or longer."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length].decode(), data[8 + length :]
    if rng.random() < 0.85:
        header = change_json(header, _spans(header), rng)
    else:
        rest = rng.choice((rest[: rng.randrange(len(rest) + 1)], rest + rng.randbytes(rng.choice((1, 8, 1000)))))
    raw = header.encode("utf-8", "surrogatepass")
    message = len(raw) if rng.random() < 0.9 else len(raw) + rng.choice((-9, -1, 1, 8, rng.choice(NUMBERS)))
    return (message % 2**64).to_bytes(8, "little") + raw + rest


# ---- bytes, whatever they mean ---------------------------------------------------------------------------------------


def _change_bytes(data: bytes, suffix: str, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not changed:
            break
        at, size, how = rng.randrange(len(changed)), rng.choice((1, 2, 8, 50)), rng.randrange(9)
        if how == 0:
            for _ in range(rng.choice((1, 1, 2, 8))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        elif how == 1:
            del changed[at:]
        elif how == 2:
            changed += rng.randbytes(rng.choice((1, 8, 31, 32, 1000)))
        elif how == 3:
            del changed[at : at + size]
        elif how == 4:
            changed[at:at] = changed[at : at + size] * rng.choice((1, 2, 50))
        elif how == 5:  # a section moved elsewhere
            section = changed[at : at + size]
            del changed[at : at + size]
            to = rng.randrange(len(changed) + 1)
            changed[to:to] = section
        elif how == 6:
            changed[at] = (changed[at] + rng.choice((-32, -1, 1, 32))) % 256
        elif suffix in (".gguf", ".safetensors"):
            _change_number(changed, data, rng)
        else:
            changed[at : at + 1] = rng.choice(
                (b'"', b"{", b"[", b",", b"\\", b"\0", b"\xff", b"\xed\xa0\x80", b"9", b"-")
            )
    return bytes(changed)


def _change_number(changed: bytearray, data: bytes, rng: Random) -> None:
    """A length, count or offset that lies: a little, or enormously."""
    places = _number_places(data)
    at = rng.choice(places) if places and rng.random() < 0.8 else rng.randrange(len(changed))
    width = rng.choice((1, 2, 4, 8))
    number = int.from_bytes(changed[at : at + width], "little") + rng.choice((-32, -8, -1, 1, 8, 32))
    number = rng.choice((number, rng.choice(NUMBERS)))
    changed[at : at + width] = (number % 256**width).to_bytes(width, "little")


@functools.lru_cache(maxsize=64)
def _number_places(data: bytes) -> list[int]:
    """Where a 64-bit number below 2^16 may lie: a length, a count or an offset of a small file."""
    return [at for at in range(len(data) - 8) if data[at] and data[at + 2 : at + 8] == bytes(6)]
