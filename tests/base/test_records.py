"""Documents: atomic writes that leave the old file on any failure, and strict JSON."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from bitplan.base.errors import FileFormatError, StoreError
from bitplan.base.logs import JsonLog
from bitplan.base.records import (
    atomic_file,
    check_output,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    write_json,
)
from tests.limits import assert_quick
from tests.processes import Program


def test_a_document_comes_back(tmp_path):
    document = {"b": [1, 2.5, None], "a": "ü"}
    write_json(tmp_path / "d.json", document)
    assert read_json(tmp_path / "d.json") == document
    assert (tmp_path / "d.json").read_text().endswith("}\n")


def test_a_failure_leaves_the_old_file_and_no_trace(tmp_path):
    path = tmp_path / "d.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(bytes(1 // 0))
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["d.json"]


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "d.json", {"x": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    write_json(tmp_path / "link.json", {"new": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert read_json(tmp_path / "real.json") == {"new": 1}


def test_a_new_file_has_the_users_permissions(tmp_path):
    (tmp_path / "plain").touch()
    write_json(tmp_path / "d.json", {})
    assert (tmp_path / "d.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b"1e999", "larger than any float64"),
        (b'{"a": -1e999}', "larger than any float64"),
        (b"[" + b"9" * 309 + b".5]", "larger than any float64"),
        (b'["\\ud83d"]', "half of a surrogate pair"),
        (b'{"\\uDE00\\ud83d": 1}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested too deeply|recursion"),
        (b"[" * 201 + b"]" * 201, "more than 200 lists and objects"),
        (b"", "Expecting value, and it is empty"),
        (b" hello, this is no JSON", "Expecting value, and it begins with 'hello, this is no JS'"),
        (b"\xff\xfe{}", "can't decode"),
        ('{"a": 1}'.encode("utf-16"), "can't decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
    ],
)
def test_what_is_not_strict_json_is_named(text, fault):
    with pytest.raises(FileFormatError, match=f"^here: not valid JSON: .*({fault})"):
        parse_json(text, where="here")


def test_large_numbers_and_whole_surrogate_pairs_are_read():
    text = b'[1e308, 1e-999, 0.00e999, 123456789012345678901234567890, "\\ud83d\\ude00", "\\\\ud800"]'
    deepest = parse_json(b"[" * 200 + b"]" * 200, where="here")
    assert json.dumps(deepest) == "[" * 200 + "]" * 200
    assert parse_json(text, where="here") == [1e308, 0.0, 0.0, 123456789012345678901234567890, "😀", "\\ud800"]


def test_many_keys_with_a_late_duplicate_are_refused_in_no_time():
    text = json.dumps({str(n): n for n in range(50_000)})[:-1] + ', "49999": 0}'

    def refused() -> None:
        with pytest.raises(FileFormatError, match="'49999' appears twice"):
            parse_json(text.encode(), where="here")

    assert_quick(refused, 2)


@pytest.mark.parametrize(
    "text", [b"[" + b"[]," * 10**6 + b"[]]", b"[" + b"1," * 3 * 10**6 + b"1]"], ids=["lists", "numbers"]
)
def test_short_text_that_takes_much_memory_is_refused(text):
    with pytest.raises(FileFormatError, match=r"here: .* values in .* bytes of JSON may take 1.. MiB of memory"):
        parse_json(text, where="here")


def test_a_file_too_large_to_be_a_document_is_refused(tmp_path):
    (tmp_path / "d.json").write_text("[1, 2, 3]")
    with pytest.raises(FileFormatError, match="9 bytes is too large"):
        read_json(tmp_path / "d.json", max_bytes=8)


DEVICE = Path("/dev/zero")


@pytest.mark.skipif(not DEVICE.exists(), reason="no device that is read without end")
@pytest.mark.parametrize("read", [read_json, read_text, read_bytes])
def test_a_device_is_refused_before_it_is_read(read):
    with pytest.raises(FileFormatError, match=r"/dev/zero: is a device, and a .* from a regular file or a pipe"):
        read(DEVICE)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_read_to_its_end_or_its_limit(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    def written(data):
        writer = threading.Thread(target=lambda: suppressed_write(tmp_path / "pipe", data))
        writer.start()
        return writer

    writer = written(b" " * 2**20 + b"[1]")
    assert read_json(tmp_path / "pipe") == [1]
    writer.join()
    writer = written(b"[1]" * 2**22)
    with pytest.raises(FileFormatError, match="more than 100 bytes are too large for a JSON document"):
        read_json(tmp_path / "pipe", max_bytes=100)
    writer.join()


def suppressed_write(path, data):
    with contextlib.suppress(BrokenPipeError):
        path.write_bytes(data)


def test_a_folder_is_no_document(tmp_path):
    with pytest.raises(FileFormatError, match="is a folder, and a text is read from a regular file or a pipe"):
        read_text(tmp_path)


def test_a_link_into_a_folder_that_is_not_there_names_that_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "file")
    with pytest.raises(FileNotFoundError) as caught, atomic_file(tmp_path / "link"):
        pass
    assert caught.value.filename == str((tmp_path / "gone").resolve())


# ---- what is never written to ----------------------------------------------------------------------------------------


def test_only_a_regular_file_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "full").symlink_to("/dev/full")
    listening = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    listening.bind("socket")
    before = {path.name: os.lstat(path).st_mode for path in tmp_path.iterdir()}
    for name, kind in {"folder": "a folder", "pipe": "a named pipe", "socket": "a socket", "full": "a device"}.items():
        for write in (write_json, lambda path, _: JsonLog(path, b"{", noun="log")):
            with pytest.raises(StoreError, match=f"{name}: is {kind}, and only a regular file can be written"):
                write(tmp_path / name, {})
    with pytest.raises(OSError, match="symbolic links"):
        write_json(tmp_path / "loop", {})
    listening.close()
    assert {path.name: os.lstat(path).st_mode for path in tmp_path.iterdir()} == before


def test_an_input_is_refused_under_every_name(tmp_path):
    source = tmp_path / "in"
    source.write_text("kept")
    os.link(source, tmp_path / "hard")
    (tmp_path / "soft").symlink_to("in")
    for name in ("in", "hard", "soft", "../" + tmp_path.name + "/in"):
        with pytest.raises(StoreError, match=r"is the input .*in itself; write to another file"):
            check_output(tmp_path / name, inputs=[tmp_path / "missing", source])
    assert check_output(tmp_path / "out", inputs=[source]) == Path(os.path.realpath(tmp_path / "out"))


def test_a_file_that_exists_is_replaced_with_force_only(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(StoreError, match=r"a: exists already; .*replace it \(force=True\)"):
        check_output(tmp_path / "a", force=False)
    check_output(tmp_path / "a", force=True)
    check_output(tmp_path / "b", force=False)


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    for mode in (0o600, 0o664):
        (tmp_path / "d.json").touch()
        (tmp_path / "d.json").chmod(mode)
        write_json(tmp_path / "d.json", {})
        assert stat.S_IMODE((tmp_path / "d.json").stat().st_mode) == mode


# ---- what killed processes leave -------------------------------------------------------------------------------------


def test_leftovers_of_the_same_name_are_swept_and_those_of_the_living_stay(tmp_path):
    (tmp_path / ".a.0123456789ab.partial").touch()
    (tmp_path / ".a.ba9876543210.partial").mkdir()
    (tmp_path / ".a.ba9876543210.partial" / "file").touch()
    (tmp_path / ".b.0123456789ab.partial").touch()
    with atomic_file(tmp_path / "a") as held:
        held.write(b"first")
        write_json(tmp_path / "a", {})
    assert (tmp_path / "a").read_bytes() == b"first"
    assert {path.name for path in tmp_path.iterdir()} == {"a", ".b.0123456789ab.partial"}


def test_thirty_kills_leave_the_old_file_or_the_new_one(tmp_path):
    code = "from pathlib import Path; from tests.fuzz.kills import kill_writers; kill_writers(30, '1', Path())"
    program = Program(code, folder=tmp_path)
    assert program.wait() == 0, program.errors
    assert program.output.startswith("30 kills: every file whole")
