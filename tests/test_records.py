"""Documents: atomic writes that leave the old file on any failure, and strict JSON."""

from __future__ import annotations

import json
import time

import pytest

from bitplan.errors import FileFormatError, StoreError
from bitplan.records import atomic_file, atomic_folder, parse_json, read_json, write_json


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
        (b"[" * 100_000, "nested too deeply|recursion"),
        (b"", "Expecting value"),
        (b"\xff\xfe{}", "can't decode"),
        ('{"a": 1}'.encode("utf-16"), "can't decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
    ],
)
def test_what_is_not_strict_json_is_named(text, fault):
    with pytest.raises(FileFormatError, match=f"^here: not valid JSON: .*({fault})"):
        parse_json(text, where="here")


def test_many_keys_with_a_late_duplicate_are_refused_in_no_time():
    text = json.dumps({str(n): n for n in range(50_000)})[:-1] + ', "49999": 0}'
    started = time.perf_counter()
    with pytest.raises(FileFormatError, match="'49999' appears twice"):
        parse_json(text.encode(), where="here")
    assert time.perf_counter() - started < 5


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
        "no/where": "there is no folder",
    }.items():
        with pytest.raises(StoreError, match=message), atomic_folder(tmp_path / name):
            pass


def test_a_link_into_a_folder_that_is_not_there_names_that_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "file")
    with pytest.raises(FileNotFoundError) as caught, atomic_file(tmp_path / "link"):
        pass
    assert caught.value.filename == str((tmp_path / "gone").resolve())
