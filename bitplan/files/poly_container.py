"""Poly's network JSON (poly_network) as a container."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base.errors import StoreError
from bitplan.files.safetensors import INDEX_SUFFIX
from bitplan.files.tensor_bytes import CERTIFICATE
from bitplan.files.tensor_file import Container, TensorFile, TensorSpec, Writer, spec_of

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded


class PolyTensors(TensorFile):
    """Poly's JSON network, which is small enough to be read whole."""

    kind = "poly json"

    def __init__(self, path: Path) -> None:
        from bitplan.files.poly_network import read_poly_json

        self.path = path
        self.network = read_poly_json(path)
        self.specs = {name: spec_of(name, item) for name, item in self.network.tensors.items()}

    def read(self, name: str) -> Tensor | Encoded:
        self.spec(name)
        return self.network.tensors[name]

    @property
    def certificate(self) -> str | None:
        return self.network.document.get(CERTIFICATE)

    @property
    def has_checksums(self) -> bool:
        return self.network.has_checksums

    def damaged_parts(self, name: str) -> list[str]:
        return ["weights"] if name in self.network.damaged else []

    def close(self) -> None:
        """Nothing is held open: the document was read whole."""


class PolyJson(Container):
    """A JSON document is written in one piece, so all tensors are held until the end."""

    suffix = ".json"
    file_type = PolyTensors

    def certificate_entry(self, text: str) -> dict[str, Any]:
        return {CERTIFICATE: text}

    def recognises(self, path: Path, head: bytes) -> bool:
        return head[:1] == b"{" and not path.name.endswith(INDEX_SUFFIX)

    @contextmanager
    def write(
        self, path: Path, tensors: Sequence[TensorSpec], metadata: Mapping[str, Any], tied: Mapping[str, str]
    ) -> Iterator[Writer]:
        from bitplan.files.poly_network import PolyNetwork, write_poly_json

        others = [key for key in metadata if key != CERTIFICATE]
        if others:
            raise StoreError(f"{path}: network JSON holds no metadata, got {others[0]!r}; write .safetensors")
        writer = _PolyWriter()
        yield writer
        missing = [spec.name for spec in tensors if spec.name not in writer.tensors]
        if missing:
            raise StoreError(f"{path}: {len(missing)} tensors were promised and never came, {missing[0]!r} first")
        written = {spec.name: writer.tensors[spec.name] for spec in tensors}
        write_poly_json(path, PolyNetwork.from_tensors(written, metadata.get(CERTIFICATE)))


class _PolyWriter:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor | Encoded] = {}

    def write(self, name: str, item: Tensor | Encoded) -> None:
        self.tensors[name] = item
