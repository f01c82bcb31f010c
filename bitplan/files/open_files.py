"""One view of every file that holds weights: names, formats, shapes, and one tensor at a time.

| kind | what | a tensor comes as |
|---|---|---|
| safetensors | one file, an index of shards, or their folder | Encoded where bitplan packed it, else a plain tensor |
| gguf | llama.cpp's container | Encoded in formats of ours (most types); plain for F32 and integers; else decoded |
| the scheme's | a folder that GPTQ, AWQ, ... quantized | Encoded where bitplan has the format, else decoded |
| poly json | poly's network file | Encoded, or float32 from files of the original |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base.documents import OBJECT, Reader, or_null
from bitplan.base.errors import FileFormatError, StoreError
from bitplan.base.records import on_failure, read_json
from bitplan.files.gguf_tensors import GGUF
from bitplan.files.safetensors import INDEX_SUFFIX
from bitplan.files.safetensors_tensors import NativeTensors, Safetensors
from bitplan.files.schemes.tensors import CONFIG, SCHEMES, SchemeTensors
from bitplan.files.tensor_bytes import CERTIFICATE
from bitplan.files.tensor_file import Container, TensorFile, TensorSpec, Writer, spec_of
from bitplan.plan.structure.families import is_packed_transposed

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded


class PolyTensors(TensorFile):
    """The tensors of a network JSON file of poly, which was read whole."""

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
        """Do nothing: the document was read whole and no file is open."""


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


HEAD_BYTES = 16
# The last container that recognises a file opens it; safetensors takes files that no other recognises.
CONTAINERS: list[Container] = [Safetensors(), GGUF(), PolyJson()]
# Files beside the config in which older versions keep the settings, and their schemes.
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def register_container(container: Container) -> None:
    """Open files of this kind from now on, and write them to paths with its suffix."""
    if not isinstance(container, Container):
        raise StoreError(f"register_container takes a Container, got a {type(container).__name__}")
    if not container.suffix.startswith(".") or container_for(Path(f"x{container.suffix}")):
        raise StoreError(f"a container's suffix begins with a dot and is its own, got {container.suffix!r}")
    CONTAINERS.append(container)


def container_for(path: str | Path) -> Container | None:
    """The container that a path's suffix names; None if no container has this suffix."""
    return next((container for container in CONTAINERS if Path(path).suffix == container.suffix), None)


def require_container(path: str | Path) -> Container:
    """Give the container that a path's suffix names; if there is none, the error lists the known suffixes."""
    container = container_for(path)
    if container is None:
        suffixes = ", ".join(container.suffix for container in CONTAINERS)
        raise StoreError(
            f"{path}: the suffix says what to write, {suffixes} (a folder takes a sharded source); "
            f"got {Path(path).suffix!r}"
        )
    return container


def open_tensors(path: str | Path) -> TensorFile:
    """Open any file of weights; its first bytes decide what it is, not its name."""
    source, head = Path(path), b""
    if source.is_file():
        with source.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        if not head:
            raise FileFormatError(f"{source}: the file is empty")
    kind = next(container for container in reversed(CONTAINERS) if container.recognises(source, head)).file_type
    settings = scheme_of(source) if kind is NativeTensors else None
    file = kind(source) if settings is None else SchemeTensors(source, settings)
    if kind is NativeTensors:
        with on_failure(file.close):
            _refuse_untold_experts(file)
    return file


def model_types(config: Mapping[str, Any]) -> set[str]:
    """The types of a model and of those that it consists of."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return {kind for part in parts if isinstance(kind := part.get("model_type"), str)}


def _refuse_untold_experts(file: TensorFile) -> None:
    """Refuse a packed folder from before files said which experts are transposed: square ones would be read wrongly."""
    config = file.folder / CONFIG
    stacks = [
        spec.name for spec in file.specs.values() if spec.encoded and len(spec.shape) == 3 and not spec.transposed
    ]
    if not stacks or not config.is_file():
        return
    method = (_quantization(config) or {}).get("quant_method")
    kinds = model_types(read_json(config))
    untold = [name for name in stacks if is_packed_transposed(name, kinds)]
    if untold and isinstance(method, str) and method.startswith("bitplan"):
        raise FileFormatError(
            f"{file.path}: {untold[0]!r}: the file does not say that these experts are packed as their transpose; "
            "it is of an earlier bitplan: quantize the folder of the model again"
        )


def scheme_of(path: Path) -> dict[str, Any] | None:
    """The quantization settings of a folder, or of an index's folder, if bitplan reads their scheme; else None."""
    if not path.is_dir() and not path.name.endswith(INDEX_SUFFIX):
        return None
    folder = path if path.is_dir() else path.parent
    config = folder / CONFIG
    if not config.is_file():
        return None
    settings = _quantization(config)
    if settings is None:
        old = next((name for name in _OLD_FILES if (folder / name).is_file()), None)
        if old is not None:
            reader = Reader(str(folder / old), FileFormatError, strict=False)
            document = reader.keys("", read_json(folder / old), {}, ())
            settings = {"quant_method": _OLD_FILES[old], **document}
    method = None if settings is None else settings.get("quant_method")
    return settings if isinstance(method, str) and method in SCHEMES else None


def _quantization(config: Path) -> dict[str, Any] | None:
    keys = {"quantization_config": or_null(OBJECT), "compression_config": or_null(OBJECT)}
    document = Reader(str(config), FileFormatError, strict=False).keys("", read_json(config), keys, ())
    mlx = document.get("quantization")
    if isinstance(mlx, dict) and "bits" in mlx and "group_size" in mlx:
        return {**mlx, "quant_method": "mlx"}  # mlx_lm names no method, and repeats it as quantization_config
    settings: dict[str, Any] | None = document.get("quantization_config") or document.get("compression_config")
    return settings


def write_tensors(
    path: str | Path,
    tensors: Sequence[TensorSpec],
    *,
    metadata: Mapping[str, Any] | None = None,
    tied: Mapping[str, str] | None = None,
) -> AbstractContextManager[Writer]:
    """Open the writer for the path's suffix, as a context; the file gets its name when all is written."""
    return require_container(path).write(Path(path), tensors, metadata or {}, tied or {})
