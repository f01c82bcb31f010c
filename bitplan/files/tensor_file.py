"""What a container of tensors is: how its files are recognised, opened and written.

A `TensorFile` is one file open for reading: names, formats, shapes, and one tensor at a time. A `Container` is a kind
of file. A writer is first told which tensors will come, which fixes the header; then tensors are written one at a time,
so that none is kept in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bitplan.base.errors import StoreError, did_you_mean
from bitplan.base.folders import check_output_folder
from bitplan.base.records import Closing, check_output
from bitplan.plan.structure.model_view import TensorRecord
from bitplan.plan.structure.model_view import TensorSpec as TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded

# Floats with which torch cannot compute; most are numbers, E8M0 are powers of two.
NARROW_FLOATS = (
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)


class TensorFile(Closing, ABC):
    """A file of weights open for reading."""

    kind: str
    path: Path
    specs: Mapping[str, TensorSpec]
    # alias -> name of the tensor that it shares.
    tied: Mapping[str, str] = {}
    # Other metadata of the file, as its container's `write` takes them.
    metadata: Mapping[str, Any] = {}

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Open it; the header is checked."""

    @abstractmethod
    def read(self, name: str) -> Tensor | Encoded:
        """Read one tensor, in its own memory."""

    def read_float(self, name: str) -> Tensor:
        """Read one tensor as numbers, as the model has it: an Encoded or 8-bit floats become float32."""
        from bitplan.formats import Encoded
        from bitplan.formats.dispatch import decode

        spec = self.spec(name)
        self.require_numbers(spec)
        tensor = self.read(name)
        if isinstance(tensor, Encoded):
            return decode(tensor).mT.contiguous() if spec.transposed else decode(tensor)
        return tensor.float() if spec.dtype in NARROW_FLOATS else tensor

    def require_numbers(self, spec: TensorSpec) -> None:
        """Refuse 4- and 8-bit floats that are codes, whose scales lie beside them under another name."""
        if spec.encoded or spec.dtype not in NARROW_FLOATS:
            return
        if spec.dtype == "float4_e2m1fn_x2":
            fault = "two to a byte, and safetensors does not say which comes first"
        elif scales := next((name for name in _scale_names(spec.name) if name in self.specs), None):
            fault = f"codes with scales beside them ({scales!r})"
        else:
            return
        raise StoreError(
            f"{self.path}: {spec.name!r} is {spec.format}: {fault}; give the folder whose config.json says how it was "
            "quantized, or write the checkpoint in bfloat16 with the program that made it"
        )

    @property
    def has_checksums(self) -> bool:
        """Whether the file says of every tensor what its bytes must be, as those do that bitplan writes."""
        return False

    @property
    def certificate(self) -> str | None:
        """What a single file says of how it was made, as bitplan writes it: `files.certificate`."""
        return None

    def damaged_parts(self, name: str) -> list[str]:
        """Parts of a tensor whose bytes are not those that were written; none where the file has no checksums."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release the file; reading after this is an error."""

    @property
    def files(self) -> list[Path]:
        """Every file that is read; none of them may be written to meanwhile."""
        return [self.path]

    @property
    def folder(self) -> Path:
        """The folder where config.json and tokenizer of the model lie, if there are any."""
        return self.path

    def spec(self, name: str) -> TensorSpec:
        """The header entry of a tensor; a tied name gives that of the tensor it shares."""
        stored = self.tied.get(name, name)
        if stored not in self.specs:
            raise StoreError(f"{self.path}: no tensor {name!r}{did_you_mean(name, self.specs)}")
        return self.specs[stored]


def _scale_names(name: str) -> Iterator[str]:
    """Names of a weight's scales in FP8 checkpoints: NAME_scale_inv, NAME_scale, NAME.scale, also without .weight."""
    for stem in (name, name.removesuffix(".weight")):
        yield from (f"{stem}{mark}{suffix}" for mark in "_." for suffix in ("scale_inv", "scale", "scales"))


def spec_of(name: str, item: Tensor | Encoded) -> TensorSpec:
    """The record of a tensor that is in memory, as a file holds it."""
    from bitplan.formats import Encoded

    if isinstance(item, Encoded):
        return TensorSpec.of(name, item.shape, item.fmt)
    return TensorSpec.of(name, tuple(item.shape), dtype=item.dtype)


@dataclass(frozen=True)
class ReadableTensor(TensorRecord):
    """A tensor of a model or of a file whose numbers are read in pieces, in order."""

    _: KW_ONLY
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def is_integer(self) -> bool:
        """Whether the tensor's type is neither floating-point nor complex, so that it is a buffer and not a weight."""
        return "float" not in self.dtype and "complex" not in self.dtype


class Writer(Protocol):
    def write(self, name: str, item: Tensor | Encoded) -> None: ...


class Container(ABC):
    """A kind of file that holds tensors.

    suffix            of the written file, with its dot
    file_type         the TensorFile class that reads it
    is_folder         it is a folder, not a file
    holds_ties        it can say that two names are one tensor; else the tensor is written under both names
    holds_transposed  it can say that a tensor lies as the transpose of the model's
    has_gguf_formats  it holds only GGUF's block formats, so that these are chosen
    """

    suffix: str
    file_type: type[TensorFile]
    is_folder = False
    holds_ties = False
    holds_transposed = False
    has_gguf_formats = False

    @abstractmethod
    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether a file with these first bytes (at most 16), or a folder (no bytes), is one of these."""

    @abstractmethod
    def write(
        self, path: Path, tensors: Sequence[TensorSpec], metadata: Mapping[str, Any], tied: Mapping[str, str]
    ) -> AbstractContextManager[Writer]:
        """A writer that takes each of these tensors, in any order; the file gets its name when all are written.

        metadata   metadata of a file of this kind, or empty
        tied       with `holds_ties`: alias -> name
        """

    def certificate_entry(self, text: str) -> dict[str, Any]:
        """The metadata of a file of this kind that hold a certificate; none where it cannot."""
        return {}

    def check_output(self, path: str | Path, *, inputs: Iterable[Path], force: bool = True) -> None:
        """Refuse a path that cannot be written, is an input, or exists without `force`; a folder is never replaced."""
        if self.is_folder:
            check_output_folder(path, inputs=inputs)
        else:
            check_output(path, inputs=inputs, force=force)

    def check_source(  # noqa: B027 (most take any source)
        self, source: TensorFile, output: Path
    ) -> None:
        """Refuse a source from which a useless file would be written."""
