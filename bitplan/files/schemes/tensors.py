"""A folder that another library quantized, as a file of weights: each weight under its own name, not by its parts.

A scheme is how a library keeps quantized weights in the safetensors of a Hugging Face folder: a module with
`list_weights(folder) -> Iterator[SchemeWeight]`. From names, shapes and config alone it says which tensors of the files
are parts of which weight, and how that weight is read. Tensors that no weight claims are plain. Everything is checked
against the headers before a byte of a payload is read, and memory is bounded by the largest weight.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bitplan.base.documents import show
from bitplan.base.errors import FileFormatError, counted, visible
from bitplan.base.records import on_failure, read_json
from bitplan.files.safetensors import Checkpoint, open_checkpoint
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.formats import get_format
from bitplan.plan.structure.model_view import TensorRecord

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded
    from bitplan.formats.format import Format

log = logging.getLogger("bitplan")
CONFIG = "config.json"
# The config's name of a scheme -> the module that reads it.
SCHEMES = {
    "gptq": "gptq",
    "awq": "awq",
    "compressed-tensors": "compressed_tensors",
    "fp8": "floats",
    "fbgemm_fp8": "floats",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "mlx": "mlx",
}


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
    settings: Mapping[str, Any]
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
        """Read a small tensor of `count` integers that are sizes."""
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
        """The value of a key of the quantization config; raises where it is none of the values read here."""
        value = self.settings.get(key, default)
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            self.refuse(f"config.json: quantization_config: {key} is {show(value)}, not {allowed}")
        return value


def is_tile(value: object) -> bool:
    """Whether a config's value is the two sizes of a tile."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(type(size) is int and 0 < size < 2**31 for size in value)


class SchemeTensors(TensorFile):
    """Weights kept packed where bitplan has the format bit for bit, else decoded; the log says which, and why."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Open a folder; `settings` is its config's `quantization_config`."""
        self.path, self.kind = path, settings["quant_method"]
        self._checkpoint: Checkpoint = open_checkpoint(path)
        with on_failure(self.close):
            folder = QuantizedFolder(path, settings, self._checkpoint, _model_type(path))
            reader = importlib.import_module(f"{__package__}.{SCHEMES[self.kind]}")
            self._weights: dict[str, SchemeWeight] = {}
            for weight in reader.list_weights(folder):
                if weight.name in self._weights or (
                    weight.name in self._checkpoint.tensors and weight.name not in weight.parts
                ):
                    raise FileFormatError(f"{path}: {weight.name[:80]!r} lies there twice, packed and as it is")
                self._weights[weight.name] = weight
            self._list()
            self.metadata = {"format": "pt"}
            self._say()

    @property
    def files(self) -> list[Path]:
        return [*self._checkpoint.sources, (self.path if self.path.is_dir() else self.path.parent) / CONFIG]

    @property
    def notes(self) -> list[str]:
        """A line for each way in which weights are read: packed or decoded, and why."""
        ways: Counter[tuple[str, str]] = Counter()
        for weight in self._weights.values():
            came = f"kept packed as {weight.format}" if weight.format else f"decoded to {weight.dtype}"
            ways[f"{weight.label}, {came}", weight.reason] += 1
        return [
            f"{self.path}: {self.kind}: {counted(count, 'weight')} in {way}: {why}"
            for (way, why), count in sorted(ways.items())
        ]

    def read(self, name: str) -> Tensor | Encoded:
        stored_name = self.spec(name).name
        return self._weights[stored_name].read() if stored_name in self._weights else self._checkpoint.read(stored_name)

    def decode_where(self, fault: Callable[[Format], str | None]) -> None:
        """Decode weights from now on whose format has a fault, to the type of the model."""
        for name, weight in self._weights.items():
            if weight.format is not None and (reason := fault(get_format(weight.format))):
                self._weights[name] = replace(
                    weight, format=None, reason=reason, read=functools.partial(_decoded, weight)
                )
        self._list()
        self._say()

    def close(self) -> None:
        self._checkpoint.close()

    def _list(self) -> None:
        parts = Counter(part for weight in self._weights.values() for part in weight.parts)
        tensors = self._checkpoint.tensors
        specs = {name: entry for name, entry in tensors.items() if name not in parts}
        for name, weight in self._weights.items():
            nbytes = sum(tensors[part].nbytes // parts[part] for part in weight.parts)  # experts share theirs
            label = weight.label if weight.label == weight.dtype else f"{self.kind}:{weight.label}"
            encoded = weight.format is not None
            dtype = "float32" if encoded else weight.dtype
            fmt = weight.format or label
            specs[name] = TensorSpec(name, weight.shape, dtype, format=fmt, nbytes=nbytes, encoded=encoded)
        self.specs = dict(sorted(specs.items()))

    def _say(self) -> None:
        for note in self.notes:
            _say_once(note)


@functools.cache
def _say_once(note: str) -> None:
    """Log a note once, however often a command opens the folder."""
    log.warning("%s", visible(note))


def _decoded(weight: SchemeWeight) -> Tensor:
    from bitplan.formats import Encoded
    from bitplan.formats.dispatch import decode
    from bitplan.formats.elements import torch_dtype

    packed = weight.read()
    assert isinstance(packed, Encoded)
    return decode(packed).to(torch_dtype(weight.dtype))


def _model_type(path: Path) -> str:
    """The type in which the model computes, by its config."""
    config = read_json((path if path.is_dir() else path.parent) / CONFIG)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return dtype if dtype in FLOATS else "bfloat16"
