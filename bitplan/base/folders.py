"""Folders that are written whole or not at all, scratch folders that go with their process, and the folder of caches.

`atomic_folder` writes a new folder beside the old one and exchanges the two in one step, so that a kill at any moment
leaves the old folder or the new one. Of an old folder only what the new one replaces goes: every other file is the
user's, and is in the new folder as a hard link (a copy where a file system has none) before the exchange.

The exchange is Linux's renameat2. Elsewhere, and on file systems that lack it, the old folder is renamed to
`.NAME.*.replaced` and the new one takes its name; a kill between the two leaves no folder of that name, and the next
write to it puts the old one back first.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bitplan.base.errors import StoreError
from bitplan.base.records import (
    KINDS,
    is_at,
    is_locked_by_another,
    lock,
    named_after,
    partial_name,
    status_of,
    sweep,
    sync_folder,
)

# The old folder and the new one -> names in the old one that go, beside those that the new one has itself.
Replaces = Callable[[Path, Path], Collection[str]]
UNFINISHED = ".unfinished"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def atomic_folder(path: str | Path, *, replaces: Replaces | None = None) -> Iterator[Path]:
    """Yield a folder that becomes `path` when the block ends without an error; an empty folder may exist already.

    replaces   a folder that is not empty is allowed too: what goes of it; its other files and its permissions stay
    """
    target = check_output_folder(path, replace=replaces is not None)
    with _locked_folder(lambda: partial_name(target), target) as partial:
        before = status_of(target)
        if before is not None:  # what may not be seen there may not be seen here
            partial.chmod(stat.S_IMODE(before.st_mode) | stat.S_IRWXU)
        try:
            yield partial
        except OSError as error:  # by the name that the file was to have
            if not isinstance(error.filename, str) or not Path(error.filename).is_relative_to(partial):
                raise
            named = Path(path) / Path(error.filename).relative_to(partial)
            raise type(error)(error.errno, error.strerror, str(named)) from None
        sync_folder(partial)
        replace_folder(partial, path, replaces)


def replace_folder(new: Path, path: str | Path, replaces: Replaces | None) -> None:
    """Put a complete folder, which lies beside `path`, there in one step; see `atomic_folder`."""
    target = Path(os.path.realpath(path))
    if replaces is not None and target.exists() and any(target.iterdir()):
        _exchange_for(new, target, replaces)
    else:
        _take_permissions(new, target)
        _move(new, target, path)
    sync_folder(target.parent)


def check_output_folder(path: str | Path, *, inputs: Iterable[Path] = (), replace: bool = False) -> Path:
    """The folder that `atomic_folder` will make, links followed; an error if it cannot be made, or holds an input."""
    target = Path(os.path.realpath(path))
    _sweep(target)
    status = status_of(path)
    for source in inputs:
        if status is not None and _contains(status, source):
            raise StoreError(f"{path}: holds the input {source} itself; write to another folder")
    if status is None:
        if not target.parent.is_dir():
            how = (
                "is a file, no folder; choose another place"
                if target.parent.exists()
                else "is no folder; make it first"
            )
            raise StoreError(f"{path}: {target.parent} {how}")
    elif not stat.S_ISDIR(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "a file")
        raise StoreError(f"{path}: is {kind}, and a folder was to be written; remove it or choose another name")
    elif any(target.iterdir()):
        if not replace:
            raise StoreError(f"{path}: is not empty; a folder is never overwritten: remove it or choose another name")
        if _contains(status, Path(".")) or os.path.ismount(target):
            raise StoreError(
                f"{path}: is the folder that this process runs in, or a file system of its own, so another cannot take "
                "its name; run in another folder, or give a new folder's name"
            )
    return target


def _contains(folder: os.stat_result, path: Path) -> bool:
    """Whether a path is that folder or lies below it, by its own name or by that of what its links lead to."""
    try:
        below = {Path(os.path.abspath(path)), Path(os.path.realpath(path))}
    except FileNotFoundError:  # this process runs in a folder that is gone
        return False
    folders = {ancestor for name in below for ancestor in (name, *name.parents)}
    return any(status is not None and os.path.samestat(folder, status) for status in map(status_of, folders))


def unfinished(path: Path) -> Path:
    """The path, beside a folder, of work that will replace the folder and that an interrupt must not lose."""
    return path.with_name(f"{path.name}{UNFINISHED}")


def finish_folder(path: Path, goes: Collection[str]) -> None:
    """Put files of `unfinished(path)`, which is complete, in place of those of their names and those in `goes`."""
    target = Path(os.path.realpath(path))
    done, old = unfinished(target), partial_name(target)
    replace_folder(done, target, lambda *_: goes)
    os.rename(done, old)  # a name that the next write sweeps
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a folder `.NAME-*`, removed when the block ends; those that killed processes left go at once."""
    sweep(parent, rf"\.{re.escape(name)}-\w+")
    with _locked_folder(lambda: parent / f".{name}-{secrets.token_hex(6)}", parent) as scratch:
        yield scratch


@contextmanager
def working_folder(folder: Path, noun: str) -> Iterator[None]:
    """A context in which this process alone works in a folder; while another does, by its `noun`, that is an error.

    The folder and its parents are made; those that a failure left empty go again.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = None if sys.platform == "win32" else os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if descriptor is not None and is_locked_by_another(descriptor):
            raise StoreError(
                f"{folder}: another {noun} works there now, and the two would read each other's files: wait until it "
                "has ended, or give another folder",
                settings={"out": f"{folder}-2"},
            )
        try:
            yield
        except BaseException:
            for parent in missing:
                if any(parent.iterdir()):
                    break
                parent.rmdir()
            raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


# ---- one folder for another ------------------------------------------------------------------------------------------


def _move(new: Path, target: Path, path: str | Path) -> None:
    try:
        os.replace(new, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise StoreError(
            f"{path}: something else was written there meanwhile; it was left as it is, and nothing of this run "
            "was written: choose another name"
        ) from None


def _exchange_for(new: Path, target: Path, replaces: Replaces) -> None:
    """Take the user's files over, and exchange: the old folder is then at `new`.

    The user's files are in both folders at that moment, so that whichever is at `new` can go.
    """
    lock = _FolderLock(target)  # no other writer exchanges or sweeps it meanwhile
    try:
        goes = set(replaces(target, new))
        _carry_over(target, new, goes)
        sync_folder(new)
        _take_permissions(new, target)
        if not _exchanged(new, target):
            _rename_both(new, target)
        _move_late(new, target, goes)
    finally:
        lock.close()


def _exchanged(first: Path, second: Path) -> bool:
    """Whether the two names now mean each other's folder, in one step; False where the system has none for it."""
    if sys.platform != "linux":
        return False
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    fault = ctypes.get_errno()
    if fault in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(fault, os.strerror(fault), str(second))


def _rename_both(new: Path, target: Path) -> None:
    """Exchange in two steps: the old folder makes room first, for none can be renamed onto one that is not empty."""
    aside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.replaced")
    try:
        os.rename(target, aside)
        os.rename(new, target)
        os.rename(aside, new)
    except BaseException:
        if aside.exists():
            os.rename(aside, new if target.exists() else target)
        raise


def _carry_over(old: Path, new: Path, goes: Collection[str]) -> None:
    """Link what the old folder alone has into the new one, but for names in `goes`; folders in both are joined."""
    for entry in list(os.scandir(old)):
        copy, is_folder = new / entry.name, entry.is_dir(follow_symlinks=False)
        if entry.name in goes and not os.path.lexists(copy):
            continue
        if is_folder and (copy.is_dir() or not os.path.lexists(copy)):
            copy.mkdir(exist_ok=True)
            _carry_over(Path(entry), copy, ())
            shutil.copystat(entry, copy)
        elif os.path.lexists(copy):
            if entry.is_file(follow_symlinks=False) and copy.is_file():
                copy.chmod(stat.S_IMODE(entry.stat().st_mode) & 0o777)
        else:
            _link(Path(entry), copy)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):  # no links on this file system, or not to this user's files
        shutil.copy2(source, target, follow_symlinks=False)


def _move_late(old: Path, new: Path, goes: Collection[str]) -> None:
    """Move what a user put into the old folder after its files were taken over."""
    for entry in list(os.scandir(old)):
        if not os.path.lexists(new / entry.name) and entry.name not in goes:
            os.rename(entry, new / entry.name)


def _take_permissions(new: Path, target: Path) -> None:
    before = status_of(target)
    if before is None:
        return
    with suppress(OSError, AttributeError):  # a group that this user is not in; a system without groups
        os.chown(new, -1, before.st_gid)
    new.chmod(stat.S_IMODE(before.st_mode))


# ---- temporary names, locked by a living process ---------------------------------------------------------------------


@contextmanager
def _locked_folder(name: Callable[[], Path], target: Path) -> Iterator[Path]:
    """Yield a new, locked folder of a free name; it is removed with all in it when the block ends."""
    folder, lock = name(), None
    try:
        while lock is None:
            with named_after(target):
                folder.mkdir()
            try:
                lock = _FolderLock(folder, wait=False)
            except FileNotFoundError:  # another process swept it before it was locked
                folder = name()
        yield folder
    finally:
        with suppress(OSError):
            folder.chmod(stat.S_IRWXU)
        shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed here the next write sweeps
        if lock is not None:
            lock.close()


class _FolderLock:
    """The folder of a name, locked by this process until this is closed, or forgotten because of an interrupt."""

    _descriptor: int | None = None

    def __init__(self, folder: Path, *, wait: bool = True) -> None:
        """Lock the folder of this name; where another process holds it and `wait` is false, that is an error."""
        while sys.platform != "win32":
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            if lock(self._descriptor) and is_at(self._descriptor, folder):
                return
            self.close()
            if not wait:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = close


def _sweep(target: Path) -> None:
    """Remove what killed processes left of this target; an old folder whose name is free gets it back."""

    def put_back_or_remove(aside: Path) -> None:
        if target.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, target)

    name = re.escape(target.name)
    sweep(target.parent, rf"\.{name}\.[0-9a-f]{{12}}\.replaced", put_back_or_remove)
    sweep(target.parent, rf"\.{name}\.[0-9a-f]{{12}}\.partial")


def cache_dir() -> Path:
    """The folder of this machine's measurements: $BITPLAN_CACHE_DIR, $XDG_CACHE_HOME/bitplan or ~/.cache/bitplan."""
    if named := os.environ.get("BITPLAN_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bitplan"
