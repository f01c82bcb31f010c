"""Folders that are replaced: the old one or the new one, whole, with every file of the user's."""

from __future__ import annotations

import itertools
import os
import stat
import sys

import pytest

from bitplan.base import folders
from bitplan.base.errors import StoreError
from bitplan.base.folders import atomic_folder, check_output_folder, scratch_folder, working_folder


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    def fail_halfway():
        with atomic_folder(tmp_path / "a") as folder:
            (folder / "file").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()  # an empty one may be there
    with atomic_folder(tmp_path / "a") as folder:
        (folder / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "file"]


def test_folders_that_cannot_be_made_are_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "file").touch()
    for name, message in {
        "full": "is not empty; a folder is never overwritten",
        "file": "is a file, and a folder was to be written",
        "no/where": "no is no folder; make it first",
        "file/where": "file is a file, no folder; choose another place",
    }.items():
        with pytest.raises(StoreError, match=message), atomic_folder(tmp_path / name):
            pass


def test_a_lost_race_for_a_folder_is_one_error(tmp_path):
    def lose(make):
        with atomic_folder(tmp_path / "out") as folder:
            (folder / "mine").touch()
            make()

    def other():
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()

    with pytest.raises(StoreError, match="out: something else was written there meanwhile; it was left as it is"):
        lose(other)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


# ---- replacing a folder ----------------------------------------------------------------------------------------------

MODEL_FILES = {"config.json", "weights"}


def make_old(folder):
    folder.mkdir(mode=0o700)
    for name in (*MODEL_FILES, "stale"):
        (folder / name).write_text("old")
    (folder / "config.json").chmod(0o600)
    (folder / "checkpoint-500").mkdir()
    for name in ("notes.md", "checkpoint-500/state"):
        (folder / name).write_text("the user's")
    (folder / "link").symlink_to("notes.md")
    return folder


def replace(folder):
    with atomic_folder(folder, replaces=lambda *_: {"stale"}) as new:
        for name in MODEL_FILES:
            (new / name).write_text("new")


def version_of(folder):
    """Which version is there; fails where it is not whole, or lacks a file of the user's."""
    assert (folder / "notes.md").read_text() == (folder / "checkpoint-500" / "state").read_text() == "the user's"
    assert (folder / "link").readlink().name == "notes.md"
    (version,) = {(folder / name).read_text() for name in MODEL_FILES}
    assert (folder / "stale").exists() == (version == "old")
    return version


def test_files_of_the_user_and_permissions_stay(tmp_path):
    old = make_old(tmp_path / "out")
    inode = (old / "notes.md").stat().st_ino
    replace(old)
    assert version_of(old) == "new"
    assert (old / "notes.md").stat().st_ino == inode  # a process that has it open goes on writing to it
    assert stat.S_IMODE(old.stat().st_mode) == 0o700
    assert stat.S_IMODE((old / "config.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_comes_while_the_folder_is_exchanged_stays(tmp_path, monkeypatch):
    old = make_old(tmp_path / "out")
    exchanged = folders._exchanged

    def late(new, target):
        (target / "late").write_text("the user's")
        return exchanged(new, target)

    monkeypatch.setattr(folders, "_exchanged", late)
    replace(old)
    assert (old / "late").read_text() == "the user's"


# What runs before the exchange, and a finalizer, in which Python reports what is raised and goes on.
NOT_STOPPED = ("check_output_folder", "_contains", "_sweep", "put_back_or_remove", "close")


class Stop:
    """Calls `stop` before one line of the exchange in `bitplan.base.folders`: the one of this number."""

    def __init__(self, line, stop):
        self.line, self.stop, self.seen = line, stop, set()

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != folders.__file__ or frame.f_code.co_name in NOT_STOPPED:
            return None
        if event == "line" and frame.f_lineno not in self.seen:
            self.seen.add(frame.f_lineno)
            if len(self.seen) == self.line:
                self.stop()
        return self


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("exchange", ["one step", "two steps"])
@pytest.mark.parametrize("stop", ["interrupt", pytest.param("kill", marks=pytest.mark.long)])
def test_a_stop_at_any_line_leaves_the_old_folder_or_the_new_one(tmp_path, monkeypatch, exchange, stop):
    if exchange == "two steps":
        monkeypatch.setattr(folders, "_exchanged", lambda *_: False)
    versions = set()
    for line in itertools.count(1):
        parent = tmp_path / str(line)
        parent.mkdir()
        old = make_old(parent / "out")
        is_over = (stop_by_interrupt if stop == "interrupt" else stop_by_kill)(old, line)
        if stop == "kill" and exchange == "two steps" and not old.exists():
            with pytest.raises(StoreError, match="is not empty"):  # what looks next puts the old one back
                check_output_folder(old)
        versions.add(version_of(old))
        replace(old)
        assert version_of(old) == "new"
        assert [path.name for path in parent.iterdir()] == ["out"]
        if is_over:
            break
    assert versions == {"old", "new"}


def stop_by_interrupt(folder, line):
    """Whether all of it ran."""
    trace = sys.gettrace()
    sys.settrace(Stop(line, interrupt))
    try:
        replace(folder)
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(trace)
    return True


def stop_by_kill(folder, line):
    child = os.fork()
    if child == 0:
        sys.settrace(Stop(line, lambda: os._exit(9)))
        replace(folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_output_that_is_or_contains_an_input_is_refused(tmp_path, monkeypatch):
    source = tmp_path / "models" / "llama"
    source.mkdir(parents=True)
    (source / "model.safetensors").touch()
    (tmp_path / "link").symlink_to("models")
    for output in (tmp_path, tmp_path / "models", source, tmp_path / "link"):
        with pytest.raises(StoreError, match=r"holds the input .*model.safetensors itself; write to another folder"):
            check_output_folder(output, inputs=[source / "model.safetensors"], replace=True)
    check_output_folder(source / "packed", inputs=[source / "model.safetensors"], replace=True)
    monkeypatch.chdir(source)
    with pytest.raises(StoreError, match="is the folder that this process runs in"):
        check_output_folder(tmp_path / "models", replace=True)


def test_scratch_folders_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path):
    (tmp_path / ".sums-0123456789ab").mkdir()
    with scratch_folder(tmp_path, "sums") as held:
        (held / "file").touch()
        with scratch_folder(tmp_path, "sums") as other:
            assert {path.name for path in tmp_path.iterdir()} == {held.name, other.name}
        assert (held / "file").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no locks of folders")
def test_one_alone_works_in_a_folder(tmp_path):
    shared = tmp_path / "a" / "shared"
    with working_folder(shared, "search"):
        refused = pytest.raises(StoreError, match=r"shared: another search works there now.*\(out='.*shared-2'\)")
        with refused, working_folder(shared, "search"):
            pytest.fail("two at once")
        assert shared.is_dir()  # empty, and another's
    with working_folder(shared, "search"):  # free again
        pass


def test_a_failure_leaves_no_empty_folder_of_its_own(tmp_path):
    (tmp_path / "before").mkdir()
    for name, left in {"before": True, "new/inner": False}.items():
        with pytest.raises(RuntimeError), working_folder(tmp_path / name, "search"):
            raise RuntimeError
        assert (tmp_path / name).exists() == left
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
