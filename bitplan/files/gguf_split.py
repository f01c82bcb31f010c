"""Writes a GGUF model, in one file or in parts, as llama.cpp's gguf-split names and marks them.

Parts get their names in reverse order, so that the first part, which engines open, appears when all others exist: its
certificate has their hashes. Each says in `split.run` what was written into all of them, so that parts of two runs are
not read as one model.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf.constants import GGMLQuantizationType, GGUFValueType

from bitplan.base.errors import StoreError
from bitplan.base.records import check_output
from bitplan.files.certificate import part_seals, sha256_of
from bitplan.files.gguf import GGUFValue, write_gguf
from bitplan.files.gguf_tensors import GGUF, GGUFTensorWriter, gguf_type
from bitplan.files.tensor_bytes import PayloadWriter
from bitplan.plan.structure.model_view import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded

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
    output: Path,
    tensors: Sequence[TensorSpec],
    metadata: Mapping[str, GGUFValue],
    part_bytes: int | None,
    certificate: Mapping[str, Any] | None = None,
) -> Iterator[PartWriter]:
    """One file, or parts of at most `part_bytes` bytes of tensors; the first part has metadata and certificate."""
    groups = _grouped(tensors, part_bytes)
    paths = _paths(output, len(groups), part_bytes)
    seals = {} if certificate is None else dict(zip(paths[1:], part_seals(len(paths)), strict=True))
    if certificate is not None:
        others = {"files": {path.name: seal for path, seal in seals.items()}} if seals else {}
        text = json.dumps({**certificate, **others}, separators=(",", ":"))
        metadata = {**metadata, **GGUF().certificate_entry(text)}
    writers: dict[str, GGUFTensorWriter] = {}
    files: list[PayloadWriter] = []
    run = f"{RUN}{secrets.token_hex(16)}"  # until the numbers are known
    with ExitStack() as opened:
        for number, (path, group) in enumerate(zip(paths, groups, strict=True)):
            part_metadata = dict(metadata) if number == 0 else {}
            if part_bytes is not None:
                part_metadata |= {
                    "split.no": GGUFValue(GGUFValueType.UINT16, number),
                    "split.count": GGUFValue(GGUFValueType.UINT16, len(groups)),
                    "split.tensors.count": GGUFValue(GGUFValueType.INT32, len(tensors)),
                    "split.run": GGUFValue(GGUFValueType.STRING, run),
                }
            entries = [(item.name, GGMLQuantizationType[gguf_type(item, path)], item.shape) for item in group]
            payloads = opened.enter_context(write_gguf(path, entries, part_metadata, checksums=True))
            if number == 0:
                opened.push(lambda kind, *_: kind is None and _fill_hashes(files[0], seals))
            files.append(payloads)
            writers |= {item.name: GGUFTensorWriter(payloads) for item in group}
        yield PartWriter(paths, writers)
        if part_bytes is not None:
            checksums = [list((file.checksums or {}).items()) for file in files]
            contents = hashlib.sha256(repr((sorted(metadata.items()), checksums)).encode()).hexdigest()
            for file in files:
                file.fill(run.encode(), f"{RUN}{contents[:32]}".encode())


def _fill_hashes(first: PayloadWriter, seals: Mapping[Path, str]) -> bool:
    """Put the hashes of the other parts, which have their names by now, into the first part's certificate."""
    for path, seal in seals.items():
        first.fill(seal.encode(), sha256_of(path).encode())
    return False
