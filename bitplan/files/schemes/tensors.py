"""A folder that another library quantized, as a file of weights: each weight under its own name, not by its parts."""

from __future__ import annotations

import functools
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base.errors import FileFormatError
from bitplan.base.records import on_failure, read_json
from bitplan.base.text import counted, visible
from bitplan.files.safetensors import Checkpoint, open_checkpoint
from bitplan.files.schemes.scheme import FLOATS, QuantizedFolder, SchemeWeight
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.formats import get_format

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded, Format

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


class SchemeTensors(TensorFile):
    """Weights kept packed where bitplan has the format bit for bit, else decoded; the log says which, and why."""

    def __init__(self, path: Path, said: Mapping[str, Any]) -> None:
        """`said` are the quantization settings of the folder's config."""
        self.path, self.kind = path, said["quant_method"]
        self._checkpoint: Checkpoint = open_checkpoint(path)
        with on_failure(self.close):
            folder = QuantizedFolder(path, said, self._checkpoint, _model_type(path))
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
        own = self.spec(name).name
        return self._weights[own].read() if own in self._weights else self._checkpoint.read(own)

    def decode_where(self, fault: Callable[[Format], str | None]) -> None:
        """From now on decode weights whose format has a fault, to the type of the model."""
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
            held = weight.label if weight.label == weight.dtype else f"{self.kind}:{weight.label}"
            encoded = weight.format is not None
            dtype = "float32" if encoded else weight.dtype
            fmt = weight.format or held
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
    from bitplan.formats.dtypes import torch_dtype

    found = weight.read()
    assert isinstance(found, Encoded)
    return decode(found).to(torch_dtype(weight.dtype))


def _model_type(path: Path) -> str:
    """The type in which the model computes, by its config."""
    config = read_json((path if path.is_dir() else path.parent) / CONFIG)
    said = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return said if said in FLOATS else "bfloat16"
