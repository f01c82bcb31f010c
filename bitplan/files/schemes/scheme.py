"""What a scheme is: how another library keeps quantized weights in the safetensors of a Hugging Face folder.

A scheme is a module with `list_weights(folder) -> Iterator[SchemeWeight]`: from names, shapes and config alone it says
which tensors of the files are parts of which weight, and how that weight is read. Tensors that no weight claims are
plain. Everything is checked against the headers before a byte of a payload is read, and memory is bounded by the
largest weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bitplan.base.documents import show
from bitplan.base.errors import FileFormatError
from bitplan.files.safetensors import Checkpoint
from bitplan.plan.structure.model_view import TensorRecord, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded

FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class SchemeWeight(TensorRecord):
    """A weight that lies in the files as `parts`.

    format   a format of bitplan's, if `read` gives an Encoded; None if `read` gives numbers of type `dtype`
    label    what the scheme holds, such as int4_g128
    reason   why it is kept as it is, or decoded
    """

    _: KW_ONLY
    parts: tuple[str, ...]
    label: str
    reason: str
    read: Callable[[], Tensor | Encoded]


@dataclass(frozen=True)
class QuantizedFolder:
    """An open folder for its scheme: the quantization in its config, and the type of the model."""

    path: Path
    said: Mapping[str, Any]
    checkpoint: Checkpoint
    dtype_name: str

    def part(
        self, name: str, dtypes: Sequence[str], shape: Sequence[int | None] | None = None, *, of: str
    ) -> TensorSpec:
        """A tensor of the files, which must have one of these types and this shape (None: any size)."""
        entry = self.checkpoint.tensors.get(name)
        if entry is None:
            self.stop(of, f"its part {name!r} is missing; download the folder again, or open the whole folder")
        fits = shape is None or (
            len(shape) == len(entry.shape)
            and all(want in (None, got) for want, got in zip(shape, entry.shape, strict=True))
        )
        if entry.dtype not in dtypes or not fits:
            sizes = "" if shape is None else f" {['any' if size is None else size for size in shape]}"
            self.stop(of, f"{name!r} must be {' or '.join(dtypes)}{sizes}, got {entry.dtype} {list(entry.shape)}")
        return entry

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(name)

    def read_sizes(self, name: str, count: int, *, of: str) -> tuple[int, ...]:
        """A tensor of a few integers that are sizes."""
        entry = self.part(name, ("int64", "int32"), (count,), of=of)
        raw, width = self.checkpoint.read_bytes(name), entry.nbytes // count
        sizes = tuple(
            int.from_bytes(raw[start : start + width], "little", signed=True) for start in range(0, len(raw), width)
        )
        if any(size < 1 for size in sizes):
            self.stop(of, f"{name!r} must be sizes from 1, got {list(sizes)}")
        return sizes

    def stop(self, weight: str, fault: str) -> NoReturn:
        raise FileFormatError(f"{self.path}: {weight!r}: {fault}")

    def refuse(self, fault: str) -> NoReturn:
        """Refuse a variant of the scheme that bitplan does not read."""
        raise FileFormatError(
            f"{self.path}: {fault}, which bitplan does not read; give the folder of the model in bfloat16 or float32"
        )

    def setting(self, key: str, default: Any, *allowed: Any) -> Any:
        """A key of the config that must have one of these values."""
        value = self.said.get(key, default)
        if not any(type(value) is type(each) and value == each for each in allowed):
            self.refuse(f"config.json: quantization_config: {key} is {show(value)}, not {allowed}")
        return value


def is_tile(value: object) -> bool:
    """Whether a config's value is the two sizes of a tile."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(type(size) is int and 0 < size < 2**31 for size in value)
