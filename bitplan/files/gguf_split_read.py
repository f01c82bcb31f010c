"""A GGUF model split over several files, `NAME-00001-of-00003.gguf`, as one file: naming any part opens all.

llama.cpp's gguf-split writes into each part its number (`split.no`, from 0), the number of parts (`split.count`), and
the number of tensors in all parts (`split.tensors.count`); the first part has the model's metadata. All of this is
checked against the file names and the tensors, so that no incomplete model is read. Parts that bitplan wrote say in
`split.run` what was written into all of them.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base.errors import FileFormatError
from bitplan.files.gguf import GGUFFile
from bitplan.files.tensor_bytes import MOST_OPEN

if TYPE_CHECKING:
    import torch

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT = "split."
MAX_PARTS = 99_999  # five digits


class SplitGGUF(GGUFFile):
    """All parts as one file; `path` and `metadata` are those of the first part, without the keys of the split."""

    def __init__(self, parts: list[GGUFFile]) -> None:
        first = parts[0]
        self.path, self.version, self.alignment = first.path, first.version, first.alignment
        self.metadata = {key: value for key, value in first.metadata.items() if not key.startswith(_SPLIT)}
        self.certificate = None  # parts are written without
        self._opened = parts
        self._part_of: dict[str, GGUFFile] = {}
        for part in parts:
            for name in part.tensors:
                if name in self._part_of:
                    raise FileFormatError(
                        f"{part.path}: tensor {name[:80]!r} is also in {self._part_of[name].path.name}; "
                        "one of the two parts is stale: download the model again"
                    )
                self._part_of[name] = part
        self.tensors = {name: part.tensors[name] for name, part in self._part_of.items()}
        self.checksums = {name: sum_ for part in parts for name, sum_ in part.checksums.items()}

    @property
    def parts(self) -> list[Path]:
        return [part.path for part in self._opened]

    def read_raw(self, name: str) -> torch.Tensor:
        self._entry(name)
        return self._part_of[name].read_raw(name)

    def read_raw_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        self._entry(name)
        return self._part_of[name].read_raw_rows(name, start, stop)

    def is_damaged(self, name: str) -> bool:
        self._entry(name)
        return self._part_of[name].is_damaged(name)

    def close(self) -> None:
        for part in self._opened:
            part.close()


def open_gguf(path: str | Path) -> GGUFFile:
    """A GGUF file, or all parts of the split model that it belongs to."""
    with ExitStack() as opened:
        given = opened.enter_context(GGUFFile(path))
        named = PART_NAME.fullmatch(given.path.name)
        count = _number(given, "count", default=1)
        if count == 1 and (named is None or int(named["count"]) == 1):
            opened.pop_all()
            return given
        if named is None or (int(named["number"]), int(named["count"])) != (_number(given, "no") + 1, count):
            says = f"part {_number(given, 'no') + 1} of {count}" if count > 1 else "nothing of parts"
            raise FileFormatError(
                f"{given.path}: its metadata says {says}, which its name must say too, "
                f"as NAME-00001-of-{count:05d}.gguf; name the file as it was published"
            )
        stem, own = named["stem"], int(named["number"])
        files = [
            given if number == own else opened.enter_context(_open_part(given, stem, number, count))
            for number in range(1, count + 1)
        ]
        _require_one_run(files)
        split = SplitGGUF(files)
        expected = _number(files[0], "tensors.count", default=len(split.tensors))
        if len(split.tensors) != expected:
            raise FileFormatError(
                f"{split.path}: split.tensors.count is {expected}, and the {count} parts hold {len(split.tensors)} "
                "tensors; download the parts again"
            )
        opened.pop_all()
        return split


def _open_part(given: GGUFFile, stem: str, number: int, count: int) -> GGUFFile:
    path = given.path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf")
    if not path.is_file():
        raise FileFormatError(
            f"{given.path}: the model is split into {count} parts, and {path.name!r} is missing; "
            "put all parts into one folder"
        )
    part = GGUFFile(path, stays_open=count <= MOST_OPEN)
    if (_number(part, "no"), _number(part, "count")) != (number - 1, count):
        part.close()
        raise FileFormatError(
            f"{path}: its metadata does not say that it is part {number} of {count}; it is another model's"
        )
    return part


def _require_one_run(files: list[GGUFFile]) -> None:
    """Refuse parts that were written by two runs, such as one that was killed while it replaced the other's."""
    runs: dict[str, GGUFFile] = {}
    for file in files:
        entry = file.metadata.get(_SPLIT + "run")
        if entry is not None:
            runs.setdefault(str(entry.value), file)
    if len(runs) > 1:
        first, second = list(runs.values())[:2]
        raise FileFormatError(
            f"{second.path}: is of another run than {first.path.name!r}: some parts were replaced and others not; "
            "write or download all parts again"
        )


def _number(file: GGUFFile, key: str, default: int | None = None) -> int:
    entry = file.metadata.get(_SPLIT + key)
    value: Any = default if entry is None else entry.value
    least = 1 if key == "count" else 0
    if type(value) is not int or not least <= value <= (MAX_PARTS if key != "tensors.count" else 2**31):
        raise FileFormatError(f"{file.path}: {_SPLIT}{key} must be a number from {least}, got {str(value)[:40]!r}")
    return value
