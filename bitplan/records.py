"""Files that are written whole or not at all, and JSON that is read with limits.

`atomic_file` is the only way bitplan writes a file: the bytes go to a temporary file in the
same folder, are flushed to disk, and take the final name in one step. A full disk or a killed
process leaves the old file as it was. `atomic_folder` does the same for a folder of files.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bitplan.errors import FileFormatError, StoreError

MAX_JSON_BYTES = 256 * 2**20
# What a document may take in memory: an empty list is two bytes of text and a hundred as an object.
MAX_JSON_MEMORY = 128 * 2**20


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends without an error.

    A symbolic link is followed, so that the link stays and its target is replaced.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        missing = (
            target if os.path.islink(path) else Path(path)
        )  # of a link it is the target's folder that is not there
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(missing.parent))
    partial = target.with_name(f".{target.name}.{secrets.token_hex(6)}.partial")
    try:
        with partial.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a folder that becomes `path` when the block ends without an error; an empty one may be there already."""
    target = Path(path)
    if target.is_dir() and any(target.iterdir()):
        raise StoreError(f"{target}: is not empty; a folder is never overwritten: remove it or choose another name")
    if target.exists() and not target.is_dir():
        raise StoreError(f"{target}: is a file, and a folder was to be written; remove it or choose another name")
    if not target.parent.is_dir():
        raise StoreError(f"{target}: there is no folder {target.parent}; make it first")
    partial = target.with_name(f".{target.name}.{secrets.token_hex(6)}.partial")
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_json(path: str | Path, document: Any) -> None:
    """Write a document atomically, indented, keys in the order given, with a final newline."""
    with atomic_file(path) as file:
        file.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def read_json(path: str | Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file, refusing one too large to be a document, with duplicate keys, or not JSON."""
    source = Path(path)
    size = source.stat().st_size
    if size > max_bytes:
        raise FileFormatError(f"{source}: {size} bytes is too large for a JSON document (limit {max_bytes})")
    return parse_json(source.read_bytes(), where=str(source))


def parse_json(text: bytes, *, where: str) -> Any:
    """Parse strict JSON: UTF-8, no NaN or Infinity, no duplicate keys, no absurd nesting, no tricks with memory."""
    marks = text.count(b"[") + text.count(b"{"), text.count(b",") + text.count(b":")
    memory = 100 * marks[0] + 50 * marks[1]  # a list or object, and a value with its place in one
    if memory > MAX_JSON_MEMORY:
        raise FileFormatError(
            f"{where}: {sum(marks)} values in {len(text)} bytes of JSON may take {memory // 2**20} MiB of memory, "
            f"and a document may take {MAX_JSON_MEMORY // 2**20}"
        )
    try:
        # Decoded here: json.loads would also take UTF-16, a byte order mark, and half surrogate pairs.
        return json.loads(text.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{where}: not valid JSON: {error or 'nested too deeply'}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {repeated[:80]!r} appears twice in one object")
    return found


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; a platform without folder descriptors goes without."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
