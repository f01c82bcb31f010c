"""One view of every file that holds weights: names, formats, shapes, and one tensor at a time.

| kind | what | a tensor comes as |
|---|---|---|
| safetensors | one file, an index of shards, or their folder | Encoded where bitplan packed it, else a plain tensor |
| gguf | llama.cpp's container | Encoded in formats of ours (most types); plain for F32 and integers; else decoded |
| the scheme's | a folder that GPTQ, AWQ, ... quantized | Encoded where bitplan has the format, else decoded |
| poly json | poly's network file | Encoded, or float32 from files of the original |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bitplan.base.errors import FileFormatError, StoreError
from bitplan.files.gguf_tensors import GGUF
from bitplan.files.poly_container import PolyJson
from bitplan.files.safetensors_tensors import NativeTensors, Safetensors
from bitplan.files.schemes.tensors import SchemeTensors, scheme_of
from bitplan.files.tensor_file import Container, Promise, TensorFile, Writer

HEAD_BYTES = 16
# The last container that recognises a file opens it; safetensors takes files that no other recognises.
CONTAINERS: list[Container] = [Safetensors(), GGUF(), PolyJson()]


def register_container(container: Container) -> None:
    """From now on open files of this kind, and write them to paths with its suffix."""
    if not isinstance(container, Container):
        raise StoreError(f"register_container takes a Container, got a {type(container).__name__}")
    if not container.suffix.startswith(".") or container_for(Path(f"x{container.suffix}")):
        raise StoreError(f"a container's suffix begins with a dot and is its own, got {container.suffix!r}")
    CONTAINERS.append(container)


def container_for(path: str | Path) -> Container | None:
    """The container that a path's suffix names; None if no container has this suffix."""
    return next((container for container in CONTAINERS if Path(path).suffix == container.suffix), None)


def require_container(path: str | Path) -> Container:
    """The same, or an error that lists the known suffixes."""
    container = container_for(path)
    if container is None:
        suffixes = ", ".join(each.suffix for each in CONTAINERS)
        raise StoreError(
            f"{path}: the suffix says what to write, {suffixes} (a folder takes a sharded source); "
            f"got {Path(path).suffix!r}"
        )
    return container


def open_tensors(path: str | Path) -> TensorFile:
    """Open any file of weights; its first bytes decide what it is, not its name."""
    source, head = Path(path), b""
    if source.is_file():
        with source.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if not head:
            raise FileFormatError(f"{source}: the file is empty")
    found = next(each for each in reversed(CONTAINERS) if each.recognises(source, head)).file_type
    return SchemeTensors(source) if found is NativeTensors and scheme_of(source) is not None else found(source)


def write_tensors(
    path: str | Path,
    promises: Sequence[Promise],
    *,
    metadata: Mapping[str, Any] | None = None,
    tied: Mapping[str, str] | None = None,
) -> AbstractContextManager[Writer]:
    """The writer for the file's suffix; every writer is atomic."""
    return require_container(path).write(Path(path), promises, metadata or {}, tied or {})
