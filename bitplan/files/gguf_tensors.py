"""GGUF, llama.cpp's container: a file, or all parts of a split one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base.errors import StoreError
from bitplan.files.tensor_bytes import CERTIFICATE, PayloadWriter
from bitplan.files.tensor_file import Container, TensorFile, TensorSpec, Writer
from bitplan.formats.gguf.grids import VECTOR_LAYOUTS
from bitplan.formats.gguf.layouts import LAYOUTS

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.files.gguf import GGUFValue
    from bitplan.formats import Encoded

GGUF_FORMATS = {
    "Q4_0": "q4_0_gguf",
    "Q8_0": "q8_0_gguf",
    "MXFP4": "mxfp4_gguf",
    "F16": "float16",
    "BF16": "bfloat16",
} | {layout.ggml_type: name for name, layout in (LAYOUTS | VECTOR_LAYOUTS).items()}
# The formats GGUF can hold; mxfp4 is repacked into GGUF's byte order, value for value.
GGUF_TYPES = {ours: theirs for theirs, ours in GGUF_FORMATS.items()} | {"mxfp4": "MXFP4", "float32": "F32"}
_EIGHT_BITS = ("int8", "int8_row", "int8_g128", "int8_g64", "fp8_e4m3", "fp8_e4m3_row", "fp8_e4m3_b128")
_NEAREST = dict.fromkeys(_EIGHT_BITS, "q8_0_gguf")
_NEAREST |= dict.fromkeys(("int4_g32", "int4_g64", "int4_g128", "q4_0_poly"), "q4_0_gguf")
_NEAREST |= {"nvfp4": "mxfp4_gguf", "fp4_u8_g128": "mxfp4_gguf"}
_PLAIN_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
_PLAIN_TYPES |= {f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)}
DEQUANTIZE_NUMBERS = 2**20


class GGUFTensors(TensorFile):
    """A GGUF file, or all parts of a split one; every type that gguf-py can decode."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        from bitplan.files.gguf import open_gguf

        self.file = open_gguf(path)
        self.path = path
        self.metadata = self.file.metadata
        self.specs = {}
        for name, entry in self.file.tensors.items():
            ours = GGUF_FORMATS.get(entry.type.name)
            decoded = entry.format if entry.format == entry.dtype else f"gguf:{entry.format}"
            self.specs[name] = replace(entry, format=ours or decoded, encoded=ours is not None)

    def read(self, name: str) -> Tensor | Encoded:
        spec, entry = self.spec(name), self.file.tensors[name]
        if spec.encoded:
            from bitplan.formats import Encoded

            return Encoded.from_bytes(spec.format, spec.shape, self.file.read_raw(name).numpy().data.cast("B"))
        if not spec.format.startswith("gguf:"):
            return self.file.read_raw(name).reshape(-1).view(spec.torch_dtype).reshape(spec.shape)
        return self._dequantize(name, entry.raw_shape)

    @property
    def files(self) -> list[Path]:
        return self.file.parts

    @property
    def has_checksums(self) -> bool:
        return self.file.checksums.keys() >= self.specs.keys()

    @property
    def certificate(self) -> str | None:
        return self.file.certificate

    def damaged_parts(self, name: str) -> list[str]:
        return ["data"] if self.file.is_damaged(self.spec(name).name) else []

    def close(self) -> None:
        self.file.close()

    def _dequantize(self, name: str, raw_shape: tuple[int, ...]) -> Tensor:
        """Decode some rows at a time: gguf-py's temporaries are many times the size of the rows."""
        import torch

        from bitplan.files.gguf import dequantize_rows

        shape = self.specs[name].shape
        out = torch.empty(shape).reshape(-1, shape[-1])
        step = max(1, DEQUANTIZE_NUMBERS // max(1, shape[-1]))
        for start in range(0, out.shape[0], step):
            stop = min(start + step, out.shape[0])
            raw = self.file.read_raw_rows(name, start, stop)
            try:
                out[start:stop] = dequantize_rows(raw, self.file.tensors[name].type)
            except StoreError as error:
                raise StoreError(f"{self.path}: {name}: {error}") from None
        return out.reshape(shape)


class GGUF(Container):
    """GGUF as a container; metadata are `GGUFValue`s, copied from one GGUF file to another."""

    suffix = ".gguf"
    file_type = GGUFTensors
    has_gguf_formats = True

    def recognises(self, path: Path, head: bytes) -> bool:
        return head[:4] == b"GGUF" or (path.suffix == ".gguf" and bool(head))

    def certificate_entry(self, text: str) -> dict[str, Any]:
        from gguf import GGUFValueType

        from bitplan.files.gguf import GGUFValue

        return {CERTIFICATE: GGUFValue(GGUFValueType.STRING, text)}

    @contextmanager
    def write(
        self, path: Path, tensors: Sequence[TensorSpec], metadata: Mapping[str, Any], tied: Mapping[str, str]
    ) -> Iterator[Writer]:
        from gguf import GGMLQuantizationType, GGUFValueType

        from bitplan.files.gguf import GGUFValue, write_gguf

        if texts := [key for key, value in metadata.items() if not isinstance(value, GGUFValue)]:
            raise StoreError(f"{path}: GGUF takes metadata of GGUF files alone, got {texts[0]!r}; write .safetensors")
        values = dict(metadata)
        if not values.keys() - {CERTIFICATE}:
            values["general.architecture"] = GGUFValue(GGUFValueType.STRING, "bitplan")
        if "general.file_type" in values:
            values = file_metadata(values, tensors)
        entries = [(item.name, GGMLQuantizationType[gguf_type(item, path)], item.shape) for item in tensors]
        with write_gguf(path, entries, values, checksums=True) as payloads:
            yield GGUFTensorWriter(payloads)

    def check_source(self, source: TensorFile, output: Path) -> None:
        if not isinstance(source, GGUFTensors):
            raise StoreError(
                f"{output}: GGUF is written from GGUF alone: {source.path} has neither llama.cpp's names nor its "
                "metadata; write .safetensors, or give the same words to `bitplan export` (of a gpt-oss to `bitplan "
                "gpt-oss convert`)"
            )


# llama.cpp's number for a file whose weights are mostly of a type, and for one in which some K-quants are larger.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11}
_FILE_TYPES |= {"Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "IQ4_NL": 25, "BF16": 32, "MXFP4": 38}
_FILE_TYPES |= {"IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ3_S": 26, "IQ2_S": 28, "IQ4_XS": 30}
_MIXED_FILE_TYPES = {"Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "IQ3_S": 27, "IQ2_S": 29}
QUANTIZATION_VERSION = 2


def file_metadata(metadata: Mapping[str, GGUFValue], tensors: Sequence[TensorSpec]) -> dict[str, GGUFValue]:
    """The metadata, with the file type that llama.cpp shows and the version of ggml's blocks added."""
    from gguf import GGUFValueType

    from bitplan.files.gguf import GGUFValue

    numbers: dict[str, int] = {}
    for spec in tensors:
        if len(spec.shape) > 1:
            kind = gguf_type(spec, "GGUF")
            numbers[kind] = numbers.get(kind, 0) + math.prod(spec.shape)
    most = max(numbers, key=lambda kind: numbers[kind], default="F32")
    mixed = len(numbers.keys() - {"F32"}) > 1
    number = _MIXED_FILE_TYPES.get(most) if mixed else None
    values = {
        **metadata,
        "general.file_type": GGUFValue(GGUFValueType.UINT32, number or _FILE_TYPES.get(most, 0)),
    }
    if numbers.keys() - {"F32", "F16", "BF16"}:
        values["general.quantization_version"] = GGUFValue(GGUFValueType.UINT32, QUANTIZATION_VERSION)
    return values


class GGUFTensorWriter:
    def __init__(self, payloads: PayloadWriter) -> None:
        self._payloads = payloads

    def write(self, name: str, item: Tensor | Encoded) -> None:
        from bitplan.formats import Encoded
        from bitplan.formats.reencode import repack

        if isinstance(item, Encoded):
            if item.fmt.name == "mxfp4":
                item = repack(item, "mxfp4_gguf")
            self._payloads.write(name, item.data if item.fmt.is_cast else item.to_bytes())
        else:
            self._payloads.write(name, item)


def gguf_type(spec: TensorSpec, path: str | Path) -> str:
    if spec.fmt is None:
        if spec.dtype not in _PLAIN_TYPES:
            raise StoreError(f"{path}: GGUF has no {spec.dtype} ({spec.name!r}); write .safetensors")
        return _PLAIN_TYPES[spec.dtype]
    if spec.format not in GGUF_TYPES:
        nearest = _NEAREST.get(spec.format)
        raise StoreError(
            f"{path}: GGUF cannot hold {spec.format} ({spec.name!r}); "
            f"it holds {', '.join(GGUF_TYPES)}{f', of which {nearest} is the nearest' if nearest else ''}; "
            "write .safetensors for the others"
        )
    row, block = spec.shape[-1] if spec.shape else 1, spec.fmt.block.cols or 1
    if row % block:
        raise StoreError(
            f"{path}: GGUF's blocks of {block} lie along the last axis and are never filled, and {spec.name!r} has "
            f"{row} there; write .safetensors, or leave it as it is",
            settings={"keep": spec.name},
        )
    return GGUF_TYPES[spec.format]
