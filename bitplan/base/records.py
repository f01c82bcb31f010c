"""Files that are written whole or not at all, and JSON that is read with limits.

`atomic_file` is the only way bitplan writes a file: the bytes go to a temporary file in the same folder, are flushed to
disk, and take the final name in one step. A full disk or a killed process leaves the old file as it was, and the next
write to the same name removes what a killed process left. Anything that is not a regular file is refused. `folders`
does the same for a folder of files; files that grow line by line are in `logs`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from bitplan.base.errors import FileFormatError, MissingFolderError, StoreError

if sys.platform != "win32":
    import fcntl

MAX_JSON_BYTES = 256 * 2**20
MAX_TEXT_BYTES = 256 * 2**20
# The memory that a document may take beyond twice its bytes: an empty list is two bytes of text, but a hundred in
# memory.
MAX_JSON_MEMORY = 128 * 2**20
MAX_JSON_DEPTH = 200  # nested lists and objects; Python's own limit differs between versions
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_WIDE, _WIDER = re.compile(rb"[\xc4-\xff]"), re.compile(rb"[\xf0-\xff]")  # letters of 2 and of 4 bytes in a str
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Closing:
    """A base for what has a `close()`: the end of a `with` block calls it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """A context that calls `undo` if the block fails in any way, to close what it opened."""
    try:
        yield
    except BaseException:
        undo()
        raise


# ---- checks of paths -------------------------------------------------------------------------------------------------


def check_output(path: str | Path, *, inputs: Iterable[str | Path] = (), force: bool = True) -> Path:
    """The file that writing to `path` makes or replaces: a link is followed, so that it stays and its target is new.

    Refuses, by name, anything but a regular file, an input under any name, a file that standard output or error goes to
    and, without `force`, any file that exists.
    """
    target = Path(os.path.realpath(path))
    status = status_of(path)
    if status is None:
        if not target.parent.is_dir():
            missing = target if os.path.islink(path) else Path(path)  # for a link, the target's folder counts
            raise MissingFolderError(errno.ENOENT, "no such folder", str(missing.parent))
        return target
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise StoreError(f"{path}: is {kind}, and only a regular file can be written; give the name of a file")
    for source in inputs:
        other = status_of(source)
        if other is not None and os.path.samestat(status, other):
            raise StoreError(f"{path}: is the input {source} itself; write to another file")
    if any(os.path.samestat(status, stream) for stream in _standard_streams()):
        raise StoreError(f"{path}: is where this command's own output goes; give the name of another file")
    if not force:
        raise StoreError(f"{path}: exists already; choose another name, or replace it", settings={"force": True})
    return target


def check_input(path: str | Path) -> None:
    """Refuse, by name, a path that does not exist or is no regular file."""
    status = status_of(path)
    if status is None:
        raise FileFormatError(f"{path}: no such file")
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise FileFormatError(f"{path}: is {kind}, and a regular file is expected")


Stamps = Mapping[Path, tuple[int, int, int] | None]


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """What tells whether a file was written to: its size, time of change and inode; None where there is none."""
    stamps = {path: status_of(path) for path in paths}
    return {path: got and (got.st_size, got.st_mtime_ns, got.st_ino) for path, got in stamps.items()}


def require_unchanged(stamps: Stamps) -> None:
    """Refuse inputs that were written to since their stamps were taken: half of what was read may be new."""
    if changed := [path for path, stamp in stamps_of(stamps).items() if stamp != stamps[path]]:
        raise StoreError(
            f"{changed[0]}: was changed while it was read, and the output would be half old, half new: nothing was "
            "written; run again when the file is complete"
        )


def status_of(path: str | Path) -> os.stat_result | None:
    """The status of a path, links followed; None if nothing is there."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _standard_streams() -> Iterator[os.stat_result]:
    for descriptor in (1, 2):
        try:
            yield os.fstat(descriptor)
        except OSError:  # a process may run without standard streams
            continue


# ---- files and folders -----------------------------------------------------------------------------------------------


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends without an error.

    A symbolic link is followed, so that the link stays and its target is replaced. The new file gets the permissions of
    the file it replaces, else the user's default.
    """
    target = check_output(path)
    before = status_of(target)
    sweep(target.parent, rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}\.partial")
    with named_after(target):
        partial, file = _open_partial(target)
    try:
        with file:
            if before is not None and sys.platform != "win32":
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode) & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if sys.platform == "win32":
                file.close()  # Windows cannot rename an open file
            with named_after(target):
                os.replace(partial, target)  # before closing releases its lock, or another process would sweep it
    except OSError as error:
        written = status_of(partial)
        partial.unlink(missing_ok=True)
        raise _named_if_full(error, target, written) from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


# ---- temporary names, locked by a living process ---------------------------------------------------------------------


@contextmanager
def named_after(target: Path) -> Iterator[None]:
    """A context in which an error of the system names the target file, not the temporary one beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None


def _named_if_full(error: OSError, target: Path, partial: os.stat_result | None) -> OSError:
    """A full disk, or a file beyond the user's limit, by the file that did not fit, and how much of it did.

    An error that names a file already, such as one of a file written within, is as it is.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or error.filename is not None:
        return error
    size = 0 if partial is None else partial.st_size
    written = size if partial is None else min(size, getattr(partial, "st_blocks", size) * 512)
    progress = f"{written:,} of {size:,} bytes" if written < size else f"{written:,} bytes of it"
    free = shutil.disk_usage(target.parent).free
    reason = f"{error.strerror} after {progress}; {free:,} bytes are free there: make room or write elsewhere"
    return OSError(error.errno, reason, str(target))


def partial_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.partial")


def _open_partial(target: Path) -> tuple[Path, BinaryIO]:
    while True:
        partial = partial_name(target)
        file = partial.open("x+b")
        if lock(file.fileno()) and is_at(file.fileno(), partial):
            return partial, file
        file.close()  # another process swept it before it was locked


def sweep(folder: Path, pattern: str, remove: Callable[[Path], object] | None = None) -> None:
    """Remove what killed processes left in a folder: names of a pattern that no process has locked."""
    if sys.platform == "win32":
        return
    left_behind = re.compile(pattern)
    # A file that cannot be opened or removed was finished meanwhile, or is another user's, whose next write removes it.
    with suppress(OSError):
        for name in filter(left_behind.fullmatch, os.listdir(folder)):
            with suppress(OSError):
                _remove_unlocked(folder / name, remove or _remove)


def _remove_unlocked(path: Path, remove: Callable[[Path], object]) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if lock(descriptor, wait=False) and is_at(descriptor, path):
            remove(path)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def lock(descriptor: int, *, wait: bool = True) -> bool:
    """Lock a file; whether this process holds it now. The lock is released when the process ends, however it ends."""
    held = _flock(descriptor, wait=wait)
    return wait if held is None else held  # on a file system without locks nothing is swept


def is_locked_by_another(descriptor: int) -> bool:
    """Whether another process holds the lock of a file; where none does, this one holds it now, if the system can."""
    return _flock(descriptor, wait=False) is False


def _flock(descriptor: int, *, wait: bool) -> bool | None:
    """Whether this process holds the lock; None on a file system without locks, or without those of folders (NFS)."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EBADF):
            raise
        return None
    return True


def is_at(descriptor: int, path: Path) -> bool:
    status = status_of(path)
    return status is not None and os.path.samestat(os.fstat(descriptor), status)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def write_json(path: str | Path, document: Any) -> None:
    """Write a document atomically, indented, keys in the order given, with a final newline."""
    with atomic_file(path) as file:
        file.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def read_bytes(path: str | Path, *, max_bytes: int = MAX_JSON_BYTES, noun: str = "JSON document") -> bytes:
    """The bytes of a regular file, or of a pipe until its end; anything else is refused, and so is what is too long.

    A device has no end: /dev/zero would be read until the memory is full.
    """
    status = os.stat(path)
    if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFIFO):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise FileFormatError(f"{path}: is {kind}, and a {noun} is read from a regular file or a pipe")
    size = status.st_size
    if size <= max_bytes:
        with open(path, "rb") as file:
            pieces = [file.read(size + 1)]
            size = len(pieces[0])
            while pieces[-1] and size <= max_bytes:  # a pipe, or a file that grows
                pieces.append(file.read(2**20))
                size += len(pieces[-1])
    if size > max_bytes:
        count = f"{size} bytes is" if status.st_size > max_bytes else f"more than {max_bytes} bytes are"
        raise FileFormatError(f"{path}: {count} too large for a {noun} (limit {max_bytes})")
    return b"".join(pieces[:-1])


def read_json(path: str | Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file, refusing one too large to be a document, with duplicate keys, or not JSON."""
    return parse_json(read_bytes(path, max_bytes=max_bytes), where=str(path))


def read_text(path: str | Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a file; a file that is not text is refused by name."""
    try:
        text = read_bytes(path, max_bytes=max_bytes, noun="text").decode("utf-8-sig")  # without a mark of its encoding
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: not UTF-8 text (byte {error.start}); give a plain text file") from None
    if not text.strip():
        raise FileFormatError(f"{path}: the text is empty; give a file of plain text")
    return text


def read_texts(path: str | Path) -> str | dict[str, str]:
    """The text of a file; of .jsonl by its name, for whether lines are conversations goes by that."""
    text = read_text(path)
    return {str(path): text} if Path(path).suffix == ".jsonl" else text


def parse_json(text: bytes, *, where: str) -> Any:
    """Parse strict JSON.

    UTF-8, finite numbers, no half of a surrogate pair, no duplicate keys, no very deep nesting, and no document that
    takes far more memory than its bytes.
    """
    marks = {mark: text.count(mark) for mark in (b"[", b"{", b",", b":")}
    # Bytes of a list or object; of a value and its place; of a key with its pair. One wide letter makes a whole str
    # wide.
    memory = 100 * (marks[b"["] + marks[b"{"]) + 60 * marks[b","] + 110 * marks[b":"]
    memory += len(text) * (6 if _WIDER.search(text) else 2 if _WIDE.search(text) else 0)
    if memory > MAX_JSON_MEMORY:
        raise FileFormatError(
            f"{where}: {sum(marks.values())} values in {len(text)} bytes of JSON may take {memory // 2**20} MiB of "
            f"memory beside its text, and a document may take {MAX_JSON_MEMORY // 2**20}"
        )
    try:
        # Decoded here, because json.loads would accept UTF-16, a byte order mark, and half surrogate pairs.
        letters = text.decode()
        del text  # if the caller keeps no reference, the text is in memory only once
        document = json.loads(letters, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        _check_values(document)
        if _SURROGATE.search(letters):  # an escape can spell half of a pair, which no file and no message can hold
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except UnicodeEncodeError:
        raise FileFormatError(f"{where}: not valid JSON: a string with half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        fault = str(error) or "nested too deeply"
        if isinstance(error, json.JSONDecodeError) and not letters[: error.pos].strip():
            start = letters.lstrip()[:20]
            fault = f"{error.msg}, and it begins with {start!r}" if start else f"{error.msg}, and it is empty"
        raise FileFormatError(f"{where}: not valid JSON: {fault}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {repeated[:80]!r} appears twice in one object")
    return document


def _check_values(document: Any) -> None:
    """Refuse infinity (which 1e999 spells), and more levels than a recursive function can handle."""
    level: list[Any] = [[document]]
    for _ in range(MAX_JSON_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            items = value if type(value) is list else value.values()
            kinds = set(map(type, items))
            if float in kinds and (math.inf in items or -math.inf in items):
                raise ValueError("a number is larger than any float64")
            if not kinds.isdisjoint((list, dict)):
                inner += [item for item in items if type(item) in (list, dict)]
        if not inner:
            return
        level = inner
    raise ValueError(f"nested too deeply: more than {MAX_JSON_DEPTH} lists and objects within each other")


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def sync_folder(folder: Path) -> None:
    """Make the rename itself durable, on platforms with folder descriptors."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
