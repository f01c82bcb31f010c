"""A GGUF model in one file, or split over several, `NAME-00001-of-00003.gguf`: naming any part opens all.

llama.cpp's gguf-split writes into each part its number (`split.no`, from 0), the number of parts (`split.count`), and
the number of tensors in all parts (`split.tensors.count`); the first part has the model's metadata. All of this is
checked against the file names and the tensors, so that no incomplete model is read.

Parts that are written here get their names in reverse order, so that the first part, which engines open, appears when
all others exist. Each says in `split.run` what was written into all of them, so that parts of two runs are not read as
one model.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf.constants import GGMLQuantizationType, GGUFValueType

from bitplan.base.errors import FileFormatError, StoreError
from bitplan.base.records import check_output
from bitplan.files.gguf import GGUFFile, GGUFValue, write_gguf
from bitplan.files.gguf_tensors import GGUFTensorWriter, gguf_type
from bitplan.files.tensor_bytes import MOST_OPEN, PayloadWriter
from bitplan.plan.structure.model_view import TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bitplan.formats import Encoded

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT = "split."
MAX_PARTS = 99_999  # five digits


class SplitGGUF(GGUFFile):
    """All parts as one file; `path` and `metadata` are those of the first part, without the keys of the split."""

    def __init__(self, parts: list[GGUFFile]) -> None:
        first = parts[0]
        self.path, self.version, self.alignment = first.path, first.version, first.alignment
        self.metadata = {key: value for key, value in first.metadata.items() if not key.startswith(_SPLIT)}
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
        self.checksums = {name: known for part in parts for name, known in part.checksums.items()}

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


# ---- writing ---------------------------------------------------------------------------------------------------------


RUN = "bitplan-"


class PartWriter:
    """Takes every tensor, in any order, and puts it into its part."""

    def __init__(self, paths: list[Path], writers: Mapping[str, GGUFTensorWriter]) -> None:
        self.paths, self._writers = paths, writers

    def write(self, name: str, item: Tensor | Encoded) -> None:
        self._writers[name].write(name, item)


def check_gguf_output(
    output: Path, part_bytes: int | None, *, inputs: Iterable[Path], force: bool, tensors: Sequence[TensorSpec] = ()
) -> None:
    """Refuse an output that is not .gguf, is one of the inputs, or exists without `force`, and parts below 1 MiB."""
    if output.is_dir():
        raise StoreError(f"{output}: is a folder, and GGUF is a file; give a name such as {output / 'model.gguf'}")
    if output.suffix != ".gguf":
        raise StoreError(f"{output}: GGUF files end in .gguf, got {output.suffix!r}")
    if part_bytes is not None and part_bytes < 2**20:
        raise StoreError(f"{output}: parts of {part_bytes} bytes; at least {2**20} (1 MiB) make sense")
    inputs = list(inputs)
    for path in _paths(output, len(_grouped(tensors, part_bytes)), part_bytes):
        check_output(path, inputs=inputs, force=force)


def _paths(output: Path, count: int, part_bytes: int | None) -> list[Path]:
    if part_bytes is None:
        return [output]
    return [output.with_name(f"{output.stem}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]


def _grouped(tensors: Sequence[TensorSpec], part_bytes: int | None) -> list[list[TensorSpec]]:
    """Consecutive tensors, at most `part_bytes` in a part; a larger tensor has a part of its own."""
    if part_bytes is None:
        return [list(tensors)]
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in tensors:
        if groups[-1] and size + spec.nbytes > part_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    return groups


@contextmanager
def write_parts(
    output: Path, tensors: Sequence[TensorSpec], metadata: Mapping[str, GGUFValue], part_bytes: int | None
) -> Iterator[PartWriter]:
    """One file, or parts of at most `part_bytes` bytes of tensors; the first part has the metadata."""
    groups = _grouped(tensors, part_bytes)
    paths = _paths(output, len(groups), part_bytes)
    writers: dict[str, GGUFTensorWriter] = {}
    files: list[PayloadWriter] = []
    run = f"{RUN}{secrets.token_hex(16)}"  # until the numbers are known
    with ExitStack() as opened:
        for number, (path, group) in enumerate(zip(paths, groups, strict=True)):
            own = dict(metadata) if number == 0 else {}
            if part_bytes is not None:
                own |= {
                    "split.no": GGUFValue(GGUFValueType.UINT16, number),
                    "split.count": GGUFValue(GGUFValueType.UINT16, len(groups)),
                    "split.tensors.count": GGUFValue(GGUFValueType.INT32, len(tensors)),
                    "split.run": GGUFValue(GGUFValueType.STRING, run),
                }
            entries = [(item.name, GGMLQuantizationType[gguf_type(item, path)], item.shape) for item in group]
            payloads = opened.enter_context(write_gguf(path, entries, own, checksums=True))
            files.append(payloads)
            writers |= {item.name: GGUFTensorWriter(payloads) for item in group}
        yield PartWriter(paths, writers)
        if part_bytes is not None:
            checksums = [list((file.checksums or {}).items()) for file in files]
            contents = hashlib.sha256(repr((sorted(metadata.items()), checksums)).encode()).hexdigest()
            for file in files:
                file.fill(run.encode(), f"{RUN}{contents[:32]}".encode())
