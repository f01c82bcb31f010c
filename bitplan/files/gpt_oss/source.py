"""A gpt-oss checkpoint open for reading, in any layout, one chunk of rows or one expert at a time.

Nothing larger than that is ever in memory. Its headers are checked first, each fault an error of one line that names
file and tensor: layout and layers, names, halves of packed weights (by the shipped manifest), gate and up alternating,
sizes, shapes, dtypes.

Between layouts an expert's matrix is either an `Encoded` in mxfp4 or a float tensor, always [outputs, inputs], with
gate in the even rows and up in the odd ones. Packed bytes are moved, never decoded: a change of layout picks rows and
reorders nibbles.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.base.errors import FileFormatError, FormatError, StoreError, did_you_mean
from bitplan.base.records import Closing, on_failure
from bitplan.files.gguf import GGUFFile, GGUFValue
from bitplan.files.gguf_tensors import GGUFTensors
from bitplan.files.gpt_oss.config import ARCHITECTURE, CONFIG, Settings, read_config, read_metadata
from bitplan.files.gpt_oss.layouts import (
    LAYER_PREFIX,
    LAYOUT_TITLES,
    GptOssShape,
    Layout,
    LayoutTensor,
    list_slots,
    slot_name,
)
from bitplan.files.open_files import open_tensors
from bitplan.files.safetensors import Checkpoint
from bitplan.files.safetensors_tensors import NativeTensors
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.formats import Encoded, get_format
from bitplan.formats.elements import torch_dtype
from bitplan.formats.reencode import repack
from bitplan.plan.check_manifest import require_clean
from bitplan.plan.manifest import shipped_manifest
from bitplan.plan.names import listed, natural_order

# ---- the checks of headers -------------------------------------------------------------------------------------------


FLOATS = ("bfloat16", "float16", "float32")
_MOST_LAYERS = 10_000


def check_gpt_oss(
    where: str, file: Checkpoint | GGUFFile
) -> tuple[Layout, GptOssShape, list[LayoutTensor], torch.dtype | None]:
    """Layout, sizes, tensors, and the experts' float type, None if they are MXFP4; the first fault raises."""
    tensors = file.tensors
    layout = _layout(where, file, tensors)
    layers = _count_layers(where, layout, tensors)
    packed = _is_packed(layout, tensors)
    expected = list_slots(layout, GptOssShape(layers=layers), packed=packed)
    if not any(slot.name in tensors for slot in expected if slot.is_expert or slot.parts == ("sinks",)):
        mark = next(slot.name for slot in expected if slot.parts == ("sinks",))
        raise FileFormatError(
            f"{where}: is no gpt-oss: it has neither its experts nor its sinks ({mark!r}), and begins with "
            f"{listed(natural_order(tensors), 2)}; `bitplan inspect` shows what it is"
        )
    _check_names(where, layout, layers, [slot.name for slot in expected], tensors)
    if packed and layout != "gguf":
        require_clean(shipped_manifest("gpt-oss"), _as_published(tensors), checkpoint=where)
    for slot in expected:
        _check_alternating(slot, file)
    shape = _derive_shape(where, layout, layers, file)
    slots = list_slots(layout, shape, packed=packed)
    for slot in slots:
        if tensors[slot.name].shape != slot.shape:
            raise _fault(file, slot.name, f"expected shape {slot.shape} in a model of {_sizes(shape)}")
    return layout, shape, slots, _check_dtypes(layout, slots, file)


def _fault(file: Checkpoint | GGUFFile, name: str, text: str) -> FileFormatError:
    holder = file.path if isinstance(file, GGUFFile) else file.weight_map[name]
    tensor = file.tensors[name]
    return FileFormatError(f"{holder}: tensor {name[:80]!r} is {tensor.format} {tensor.shape}: {text}")


def _layout(where: str, file: Checkpoint | GGUFFile, names: Mapping[str, object]) -> Layout:
    if isinstance(file, GGUFFile):
        kind = file.metadata.get("general.architecture")
        if kind is None or kind.value != ARCHITECTURE:
            came = "none" if kind is None else repr(str(kind.value)[:40])
            raise FileFormatError(f"{where}: expected a GGUF file of architecture {ARCHITECTURE!r}, got {came}")
        return "gguf"
    if any(name.startswith(LAYER_PREFIX["openai"]) for name in names):
        return "openai"
    if any(name.startswith(LAYER_PREFIX["hf"]) for name in names):
        return "hf"
    raise FileFormatError(
        f"{where}: expected gpt-oss's tensors under OpenAI's names (block.0. ...) or Hugging Face's "
        f"(model.layers.0. ...), got {listed(natural_order(names), 3) or 'no tensors'}"
    )


def _count_layers(where: str, layout: Layout, names: Mapping[str, object]) -> int:
    pattern = re.compile(re.escape(LAYER_PREFIX[layout]) + r"([0-9]+)\.")
    numbers = {int(match[1][:9]) for name in names if (match := pattern.match(name))}
    count = max(numbers, default=0) + 1
    absent = [number for number in range(min(count, _MOST_LAYERS)) if number not in numbers]
    if absent or count > _MOST_LAYERS:
        shown = f"{', '.join(map(str, absent[:5]))}{', ...' if len(absent) > 5 else ''}"
        raise FileFormatError(
            f"{where}: has a layer {count - 1}, so layers 0 to {count - 1} must be there; missing: {shown}; "
            "a shard may be absent"
        )
    return count


def _is_packed(layout: Layout, names: Mapping[str, object]) -> bool:
    """Whether names are those of packed experts: always in OpenAI's layout; in GGUF both kinds have the same names."""
    if layout != "hf":
        return True
    floats = any(name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for name in names)
    return not floats or any(name.endswith(("_proj_blocks", "_proj_scales")) for name in names)


def _check_names(where: str, layout: Layout, layers: int, expected: list[str], tensors: Mapping[str, object]) -> None:
    expected_names = set(expected)
    missing = [name for name in expected if name not in tensors]
    extra = natural_order(set(tensors) - expected_names)
    title = f"{LAYOUT_TITLES[layout]} layout of gpt-oss with {layers} layer{'s' if layers > 1 else ''}"
    if missing:
        also = f"; unknown to it: {listed(extra, 3)}" if extra else ""
        raise FileFormatError(
            f"{where}: {title} has {len(expected)} tensors, missing: {listed(missing, 3)}{also}; "
            "complete the checkpoint, or download it again"
        )
    if extra:
        raise FileFormatError(
            f"{where}: {title} has {len(expected)} tensors, unknown to it: {listed(extra, 3)}"
            f"{did_you_mean(extra[0], expected_names)}; write the checkpoint without"
        )


def _as_published(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Tensors for the manifest of the published gpt-oss: other float types of a fine-tuned model pass as bfloat16."""
    return {
        name: TensorSpec.of(name, tensor.shape, dtype="bfloat16") if tensor.format in FLOATS else tensor
        for name, tensor in tensors.items()
    }


def _check_alternating(slot: LayoutTensor, file: Checkpoint | GGUFFile) -> None:
    came = file.tensors[slot.name].shape
    if not slot.weaves or len(came) != len(slot.shape):
        return
    count = came[-1] if slot.kind in ("woven", "transposed") else came[1]
    if count % 2:
        raise _fault(file, slot.name, f"gate and up alternate in it, so they are an even number, got {count}")


def _derive_shape(where: str, layout: Layout, layers: int, file: Checkpoint | GGUFFile) -> GptOssShape:
    """The model's sizes, each from one tensor of layer 0; the others must agree."""

    def sizes_of(part: str, rank: int) -> tuple[int, ...]:
        name = slot_name(layout, part)
        if len(file.tensors[name].shape) != rank:
            raise _fault(file, name, f"expected {rank} axes")
        return file.tensors[name].shape

    vocab, hidden = sizes_of("embed", 2)
    (heads,) = sizes_of("sinks", 1)
    q_rows = sizes_of("out", 2)[1]
    kv_rows = sizes_of("k", 2)[0]
    experts, intermediate = sizes_of("gate_bias", 2)
    if layout == "openai":
        kv_rows = (kv_rows - q_rows) // 2
    if layout != "gguf":
        intermediate //= 2
    head_dim = q_rows // heads if heads else 0
    kv_heads = kv_rows // head_dim if head_dim else 0
    try:
        return GptOssShape(layers, experts, hidden, intermediate, heads, kv_heads, head_dim, vocab)
    except StoreError as error:
        sources = [slot_name(layout, part) for part in ("embed", "sinks", "out", "k", "gate_bias")]
        raise FileFormatError(f"{where}: the shapes of {listed(sources)} make no model: {error}") from None


def _check_dtypes(layout: Layout, slots: list[LayoutTensor], file: Checkpoint | GGUFFile) -> torch.dtype | None:
    experts: dict[str, LayoutTensor] = {}
    for slot in slots:
        kind = file.tensors[slot.name].format
        if slot.kind in ("blocks", "scales"):
            allowed = ["uint8"]
        else:
            allowed = [*FLOATS, *(["MXFP4"] if slot.kind == "matrix" else [])]
        if kind not in allowed:
            fault = _fault(file, slot.name, f"expected {' or '.join(allowed)}")
            if layout == "gguf":
                hint = f"{fault}; decode it first: `bitplan quantize IN OUT.gguf`"
                fault = type(fault)(hint, settings={"fmt": "bfloat16", "only": slot.name})
            raise fault
        if slot.is_expert:
            experts.setdefault(kind, slot)
    (fmt, first), *others = experts.items()
    if others:
        raise _fault(file, others[0][1].name, f"all experts must have one format, and {first.name!r} is {fmt}")
    return torch_dtype(fmt) if fmt in FLOATS else None


def _sizes(shape: GptOssShape) -> str:
    return (
        f"{shape.experts} experts, hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.heads} heads, "
        f"{shape.kv_heads} for keys, of {shape.head_dim}, vocabulary {shape.vocab}"
    )


# ---- experts ---------------------------------------------------------------------------------------------------------


MXFP4, MXFP4_GGUF = get_format("mxfp4"), get_format("mxfp4_gguf")
GATE_UP, DOWN = ("gate", "up"), ("down",)
GGUF_BLOCK_BYTES = 17  # the scale, then 32 nibbles
Matrix = Encoded | Tensor


def group_experts(slots: Sequence[LayoutTensor]) -> dict[tuple[int, tuple[str, ...]], list[LayoutTensor]]:
    """The tensors that hold the experts, by layer and matrix: (0, ("gate", "up")) -> those with gate and up."""
    groups: dict[tuple[int, tuple[str, ...]], list[LayoutTensor]] = {}
    for slot in slots:
        if slot.is_expert and slot.layer is not None:
            groups.setdefault((slot.layer, DOWN if slot.parts == DOWN else GATE_UP), []).append(slot)
    return groups


def join_expert(slots: Sequence[LayoutTensor], read: Callable[[LayoutTensor], Tensor], index: int) -> Matrix:
    """The matrix of expert `index`; `read` gives this expert's part of each tensor (uint8 if it is packed)."""
    kinds = {slot.kind: slot for slot in slots}
    if "blocks" in kinds:
        blocks, scales = read(kinds["blocks"]), read(kinds["scales"])
        rows, across = scales.shape
        return Encoded(MXFP4, (rows, across * 32), blocks.reshape(rows, across * 16), scales)
    if "transposed" in kinds:
        return read(kinds["transposed"]).T.contiguous()
    parts = {slot.parts[0]: _from_gguf(slot, read(slot), index) for slot in slots}
    return parts["down"] if "down" in parts else _weave(parts["gate"], parts["up"])


def split_expert(slots: Sequence[LayoutTensor], matrix: Matrix) -> Iterator[tuple[str, Tensor | bytes]]:
    """Divide one expert's matrix into the rows that each tensor of the new layout holds; yields name and rows."""
    for slot in slots:
        if slot.kind == "matrix":
            rows = matrix if slot.parts == DOWN else _every_second(matrix, GATE_UP.index(slot.parts[0]))
            yield slot.name, repack(rows, MXFP4_GGUF).to_bytes() if isinstance(rows, Encoded) else rows
        elif slot.kind == "transposed":
            assert isinstance(matrix, Tensor)
            yield slot.name, matrix.T
        else:
            assert isinstance(matrix, Encoded)
            part = matrix.data if slot.kind == "blocks" else matrix.scales
            assert part is not None
            yield slot.name, part


def _from_gguf(slot: LayoutTensor, raw: Tensor, index: int) -> Matrix:
    """Rows of GGUF blocks, each a scale and 16 bytes, with the nibbles as gpt-oss has them; floats as they are."""
    if raw.dtype != torch.uint8:
        return raw
    blocks = raw.unflatten(-1, (-1, GGUF_BLOCK_BYTES))
    packed = Encoded(MXFP4_GGUF, slot.shape[1:], blocks[..., 1:].flatten(-2), blocks[..., 0])
    try:
        return repack(packed, MXFP4)
    except FormatError as error:
        raise FormatError(f"{slot.name!r}, expert {index}: {error}") from None


def _weave(even: Matrix, odd: Matrix) -> Matrix:
    if isinstance(even, Encoded) and isinstance(odd, Encoded):
        parts = {name: weave_rows(part, odd.parts[name]) for name, part in even.parts.items()}
        return Encoded(MXFP4, (2 * even.shape[0], even.shape[1]), **parts)
    assert isinstance(even, Tensor)
    assert isinstance(odd, Tensor)
    return weave_rows(even, odd)


def _every_second(matrix: Matrix, first: int) -> Matrix:
    if isinstance(matrix, Encoded):
        parts = {name: part[first::2].contiguous() for name, part in matrix.parts.items()}
        return Encoded(MXFP4, (matrix.shape[0] // 2, matrix.shape[1]), **parts)
    return matrix[first::2]


def weave_rows(even: Tensor, odd: Tensor) -> Tensor:
    """The rows of two tensors, alternating."""
    return torch.stack((even, odd), dim=1).flatten(0, 1)


# ---- reading ---------------------------------------------------------------------------------------------------------


CHUNK_BYTES = 2**26


class GptOssSource(ABC):
    """A source from which a checkpoint can be written: a file, or random numbers, which lie in no file.

    `where` begins the errors; `experts` is the float type of the experts, None where they are MXFP4; `is_widened`
    says that float32 may stand for bfloat16, as it does in GGUF.
    """

    where: str
    shape: GptOssShape
    settings: Settings
    experts: torch.dtype | None
    layout: Layout | None = None  # of the file
    is_widened = False

    @property
    def files(self) -> list[Path]:
        """Every file that is read."""
        return []

    @abstractmethod
    def dtype(self, part: str, layer: int | None) -> torch.dtype:
        """The type of a part that is not an expert's matrix."""

    @abstractmethod
    def rows(self, part: str, layer: int | None) -> Iterator[Tensor]:
        """The rows of a part that is not an expert's matrix, some at a time."""

    @abstractmethod
    def expert(self, layer: int, parts: tuple[str, ...], index: int) -> Matrix:
        """Read one expert's matrix [outputs, inputs]: ("gate", "up") alternating by rows, or ("down",)."""

    def expert_name(self, layer: int, parts: tuple[str, ...]) -> str:
        """The name, for errors, of the tensor that holds these matrices."""
        return f"{' and '.join(parts)} of layer {layer}"

    def twin(self, slot: LayoutTensor) -> LayoutTensor | None:
        """The source's tensor with the same parts in the same order as one of another layout, if any."""
        return None

    def raw(self, slot: LayoutTensor) -> Iterator[Tensor]:
        """The bytes of one of the source's own tensors, some rows at a time."""
        raise NotImplementedError("drawn numbers lie in no file")


def plain_rows(source: GptOssSource, slot: LayoutTensor) -> Iterator[Tensor]:
    """The rows of a tensor of any layout that is not an expert's matrix, some at a time, in the source's types."""
    if (twin := source.twin(slot)) is not None:
        yield from source.raw(twin)
    elif slot.kind == "woven":  # biases: small enough to be held whole
        parts = [torch.cat(list(source.rows(part, slot.layer))) for part in slot.parts]
        yield torch.stack(parts, dim=-1).flatten(-2)
    else:
        for part in slot.parts:
            yield from source.rows(part, slot.layer)


class GptOssFile(GptOssSource, Closing):
    """A checkpoint in OpenAI's, Hugging Face's or GGUF's layout, completely checked."""

    layout: Layout

    def __init__(self, source: str | Path | TensorFile) -> None:
        """Open a checkpoint and check it; a file that the caller opened is not closed with this object."""
        self.path = source.path if isinstance(source, TensorFile) else Path(source)
        self.where = str(self.path)
        file = source if isinstance(source, TensorFile) else open_tensors(source)
        self._opened = None if file is source else file
        with on_failure(self.close):
            self._file = _container(file)
            self.tensors: Mapping[str, TensorSpec] = self._file.tensors
            self.layout, self.shape, self.slots, self.experts = check_gpt_oss(self.where, self._file)
            self.is_widened = self.layout == "gguf"
            self.config: dict[str, Any] | None = None  # in Hugging Face's spelling
            self.settings = self._read_settings()
        self._places = {(part, slot.layer): slot for slot in self.slots for part in slot.parts if not slot.is_expert}
        self._twins = {(slot.kind, slot.parts, slot.layer): slot for slot in self.slots}
        self._groups = group_experts(self.slots)

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def files(self) -> list[Path]:
        return self._file.parts if isinstance(self._file, GGUFFile) else self._file.sources

    @property
    def metadata(self) -> dict[str, GGUFValue]:
        """GGUF's metadata; empty for other layouts."""
        return self._file.metadata if isinstance(self._file, GGUFFile) else {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def dtype(self, part: str, layer: int | None) -> torch.dtype:
        return self.tensors[self._places[part, layer].name].torch_dtype

    def rows(self, part: str, layer: int | None) -> Iterator[Tensor]:
        slot = self._places[part, layer]
        if slot.kind == "woven":
            yield self._read(slot, 0, slot.shape[0])[:, slot.parts.index(part) :: 2]
            return
        first, count = _span(slot, part, self.shape)
        yield from self._chunks(slot, first, first + count)

    def expert(self, layer: int, parts: tuple[str, ...], index: int, device: torch.device | str = "cpu") -> Matrix:
        def read(slot: LayoutTensor) -> Tensor:
            return self._read(slot, index, index + 1)[0].to(device)

        return join_expert(self._groups[layer, parts], read, index)

    def expert_name(self, layer: int, parts: tuple[str, ...]) -> str:
        return self._groups[layer, parts][0].name

    def twin(self, slot: LayoutTensor) -> LayoutTensor | None:
        return self._twins.get((slot.kind, slot.parts, slot.layer))

    def raw(self, slot: LayoutTensor) -> Iterator[Tensor]:
        return self._chunks(slot, 0, slot.shape[0])

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _chunks(self, slot: LayoutTensor, start: int, stop: int) -> Iterator[Tensor]:
        step = max(1, CHUNK_BYTES * slot.shape[0] // max(1, self.tensors[slot.name].nbytes))
        for first in range(start, stop, step):
            yield self._read(slot, first, min(stop, first + step))

    def _read(self, slot: LayoutTensor, start: int, stop: int) -> Tensor:
        """Items start..stop along the first axis; GGUF's MXFP4 comes as bytes."""
        if not isinstance(self._file, GGUFFile):
            return self._file.read_rows(slot.name, start, stop)
        tensor = self.tensors[slot.name]
        dtype = tensor.torch_dtype if tensor.format == tensor.dtype else torch.uint8
        if len(slot.shape) == 1:
            return self._file.read_raw(slot.name).view(dtype)[start:stop]
        rows = math.prod(slot.shape[1:-1])
        raw = self._file.read_raw_rows(slot.name, start * rows, stop * rows)
        return raw.view(dtype).reshape(stop - start, *slot.shape[1:-1], -1)

    def _read_settings(self) -> Settings:
        if isinstance(self._file, GGUFFile):
            return read_metadata(self._file.path, self._file.metadata, self.shape)
        path = self.folder / CONFIG
        if not path.is_file():
            return Settings(experts_per_token=min(Settings.experts_per_token, self.shape.experts))
        settings, self.config = read_config(path, self.shape)
        return settings


def _container(file: TensorFile) -> Checkpoint | GGUFFile:
    if isinstance(file, GGUFTensors):
        return file.file
    if isinstance(file, NativeTensors):
        return file.checkpoint
    raise FileFormatError(f"{file.path}: is {file.kind}, and gpt-oss's layouts are of safetensors and GGUF")


def _span(slot: LayoutTensor, part: str, shape: GptOssShape) -> tuple[int, int]:
    """The rows of a part in a tensor; only OpenAI's qkv has several parts by rows."""
    if len(slot.parts) == 1:
        return 0, slot.shape[0]
    counts = [shape.q_rows, shape.kv_rows, shape.kv_rows]
    at = slot.parts.index(part)
    return sum(counts[:at]), counts[at]
