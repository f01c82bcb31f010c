"""python -m tests.fuzz.kills COUNT SEED: writing processes killed at any moment, by SIGKILL.

After each kill the file is the old one or the new one, whole, and a log has all lines it had. What the killed left
behind goes with the next write.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from gguf import GGMLQuantizationType

from bitplan.base.folders import atomic_folder
from bitplan.base.records import atomic_file, read_json, write_json
from bitplan.files.gguf import GGUFFile, write_gguf
from bitplan.files.safetensors import SafetensorsFile, write_safetensors
from bitplan.report import TrainingLog

SIZES = (1_000, 300_000)  # bytes of a tensor: an even version is small, an odd one large


class Writer(NamedTuple):
    """`write` makes a version of the file; `read` gives the version that is there, and fails where it is not whole."""

    name: str
    write: Callable[[Path, int], None]
    read: Callable[[Path], int]


def numbers(version: int) -> torch.Tensor:
    return torch.full((SIZES[version % 2],), version % 100, dtype=torch.int8)


def write_bytes(path: Path, version: int) -> None:
    with atomic_file(path) as file:
        for _ in range(10):
            file.write(bytes([version % 100]) * SIZES[version % 2])


def read_bytes(path: Path) -> int:
    data = path.read_bytes()
    assert data == bytes([data[0]]) * (10 * SIZES[data[0] % 2]), "mixed"
    return data[0]


def write_document(path: Path, version: int) -> None:
    write_json(path, {"version": version, "numbers": [version] * (SIZES[version % 2] // 10)})


def read_document(path: Path) -> int:
    document = read_json(path)
    assert set(document["numbers"]) == {document["version"]}, "mixed"
    return int(document["version"])


def write_both(path: Path, version: int) -> None:
    with write_safetensors(path, [(name, torch.int8, (SIZES[version % 2],)) for name in "ab"]) as writer:
        for name in writer.order:
            writer.write(name, numbers(version))


def read_both(path: Path) -> int:
    with SafetensorsFile(path) as file:
        return _same([file.read(name) for name in "ab"])


def write_both_gguf(path: Path, version: int) -> None:
    with write_gguf(path, [(name, GGMLQuantizationType.I8, (SIZES[version % 2],)) for name in "ab"], {}) as writer:
        for name in "ab":
            writer.write(name, numbers(version))


def read_both_gguf(path: Path) -> int:
    with GGUFFile(path) as file:
        return _same([file.read_raw(name) for name in "ab"])


def _same(tensors: list[torch.Tensor]) -> int:
    versions = {int(value) for tensor in tensors for value in tensor.unique()}
    assert len(versions) == 1, f"mixed: {versions}"
    return versions.pop()


def write_folder(path: Path, version: int) -> None:
    """A model of two files, in a folder where the user keeps notes."""
    with atomic_folder(path, replaces=lambda *_: ()) as folder:
        for name in "ab":
            write_document(folder / name, version)
    (path / "notes").touch()


def read_folder(path: Path) -> int:
    first, second = (read_document(path / name) for name in "ab")
    assert first == second, f"mixed: {first} and {second}"
    assert first < 2 or (path / "notes").exists(), "the user's notes are gone"
    return first


def append_line(path: Path, version: int) -> None:
    with TrainingLog(path, run="kills") as log:
        log.write(version, 0.5, text_length=float(version))


def count_lines(path: Path) -> int:
    """A torn last line does not count."""
    return path.read_bytes().count(b"\n")


WRITERS = [
    Writer("bytes", write_bytes, read_bytes),
    Writer("json", write_document, read_document),
    Writer("safetensors", write_both, read_both),
    Writer("gguf", write_both_gguf, read_both_gguf),
    Writer("folder", write_folder, read_folder),
    Writer("jsonl", append_line, count_lines),
]


def kill_writers(count: int, seed: str, folder: Path) -> None:
    rng = Random(seed)
    places = {writer: folder / writer.name for writer in WRITERS}
    for writer, path in places.items():
        writer.write(path, 0)
    leftovers = 0
    for number in range(count):
        writer = WRITERS[number % len(WRITERS)]
        path = places[writer]
        before = writer.read(path)
        child = os.fork()
        if child == 0:
            for version in itertools.count(before + 1):
                writer.write(path, version)
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        after = writer.read(path)
        assert writer.name != "jsonl" or after >= before, f"kill {number}: lines were lost: {before}, now {after}"
        leftovers += any(folder.glob(f".{writer.name}.*.partial"))
    for writer, path in places.items():
        writer.write(path, 1)
    assert sorted(path.name for path in folder.iterdir()) == sorted(writer.name for writer in WRITERS)
    print(f"{count} kills: every file whole; {leftovers} left something behind, which the next write swept")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        kill_writers(int(sys.argv[1]), sys.argv[2], Path(place))
