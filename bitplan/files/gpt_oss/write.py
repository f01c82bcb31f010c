"""Writes a gpt-oss checkpoint in any layout from any source, and reports what was done to each tensor.

| action | what happened to the numbers | what happened to the bytes |
|---|---|---|
| copied | nothing | the same bytes, whole tensors or runs of rows |
| rearranged | nothing | gate and up parted or joined, nibbles in another order, floats transposed |
| widened, narrowed | nothing | bfloat16 as float32, and float32 that holds bfloat16 as such |
| encoded | floats became MXFP4 | |
| expanded | MXFP4 became bfloat16, exactly | |
| rounded | wider floats became bfloat16 | |
| drawn | made on the spot, there was no file | |
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.base.records import require_unchanged, stamps_of
from bitplan.files.gguf import GGUFValue, write_gguf
from bitplan.files.gpt_oss.experts import MXFP4, Matrix, group_experts, split_expert
from bitplan.files.gpt_oss.layouts import GGUF_WIDE, Layout, LayoutTensor, list_slots
from bitplan.files.gpt_oss.source import GptOssSource, plain_rows
from bitplan.files.safetensors import write_safetensors
from bitplan.files.tensor_bytes import PayloadWriter
from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode, encode
from bitplan.formats.scale_rules import ScaleRule

Action = Literal["copied", "rearranged", "widened", "narrowed", "encoded", "expanded", "rounded", "drawn"]
OnBytes = Callable[[int, str], None]
_GGML_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
    None: GGMLQuantizationType.MXFP4,
}


@dataclass(frozen=True)
class Written:
    """One tensor of the new file: `format` is a torch dtype's name or mxfp4."""

    name: str
    action: Action
    format: str
    shape: tuple[int, ...]
    nbytes: int


def write_gpt_oss(
    source: GptOssSource,
    path: str | Path,
    layout: Layout,
    *,
    experts: torch.dtype | None = None,
    scale_rule: ScaleRule | None = None,
    metadata: Mapping[str, GGUFValue] | None = None,
    on_bytes: OnBytes = lambda _count, _name: None,
) -> list[Written]:
    """Write one file, atomically; `experts` None is MXFP4, else their float type. `metadata` is GGUF's."""
    slots = list_slots(layout, source.shape, packed=experts is None)
    dtypes = {slot.name: _dtype(source, slot, layout, experts) for slot in slots}
    actions: dict[str, Action] = {}
    stamps = stamps_of(source.files)
    sizes: Counter[str] = Counter()

    def put(name: str, piece: Tensor | bytes) -> None:
        writer.write_chunk(name, piece)
        count = piece.nbytes if isinstance(piece, Tensor) else len(piece)
        sizes[name] += count
        on_bytes(count, name)

    with _open_writer(path, layout, slots, dtypes, metadata) as writer:
        for slot in slots:
            if not slot.is_expert:
                actions[slot.name] = _plain_action(source, slot, dtypes[slot.name])
                for rows in plain_rows(source, slot):
                    put(slot.name, _exactly(rows, dtypes[slot.name]))
        for (layer, parts), group in group_experts(slots).items():
            action = _expert_action(source, group, experts)
            actions |= dict.fromkeys([slot.name for slot in group], action)
            if action == "copied":
                _copy(source, group, put)
                continue
            for index in range(source.shape.experts):
                name = f"{source.where}: {source.expert_name(layer, parts)}, expert {index}"
                with _naming(name):
                    expert = source.expert(layer, parts, index)
                matrix = _converted(expert, experts, scale_rule, name)
                with _naming(name):
                    for target, piece in split_expert(group, matrix):
                        put(target, piece)
        require_unchanged(stamps)
    return [
        Written(slot.name, actions[slot.name], _format(slot, dtypes[slot.name]), slot.shape, sizes[slot.name])
        for slot in slots
    ]


# ---- types and entries -----------------------------------------------------------------------------------------------


def _dtype(source: GptOssSource, slot: LayoutTensor, layout: Layout, experts: torch.dtype | None) -> torch.dtype | None:
    """The type of a tensor in the new file; None is GGUF's MXFP4."""
    if slot.kind in ("blocks", "scales"):
        return torch.uint8
    if slot.is_expert:
        return experts
    dtype = functools.reduce(torch.promote_types, [source.dtype(part, slot.layer) for part in slot.parts])
    is_wide = set(slot.parts) <= GGUF_WIDE
    if layout == "gguf":
        return torch.float32 if is_wide else dtype
    if source.is_widened and is_wide and dtype == torch.float32:
        held = (_holds_bfloat16(rows) for part in slot.parts for rows in source.rows(part, slot.layer))
        return torch.bfloat16 if all(held) else dtype
    return dtype


def _format(slot: LayoutTensor, dtype: torch.dtype | None) -> str:
    return "mxfp4" if dtype is None or slot.kind in ("blocks", "scales") else str(dtype).removeprefix("torch.")


@contextmanager
def _open_writer(
    path: str | Path,
    layout: Layout,
    slots: Sequence[LayoutTensor],
    dtypes: Mapping[str, torch.dtype | None],
    metadata: Mapping[str, GGUFValue] | None,
) -> Iterator[PayloadWriter]:
    if layout == "gguf":
        types = [(slot.name, _GGML_TYPES[dtypes[slot.name]], slot.shape) for slot in slots]
        with write_gguf(path, types, metadata or {}, checksums=True) as writer:
            yield writer
        return
    entries = [(slot.name, dtypes[slot.name] or torch.uint8, slot.shape) for slot in slots]
    with write_safetensors(path, entries, {"format": "pt"}) as writer:  # transformers 4 wants the key
        yield writer


# ---- all but the experts ---------------------------------------------------------------------------------------------


def _plain_action(source: GptOssSource, slot: LayoutTensor, dtype: torch.dtype | None) -> Action:
    dtypes = {source.dtype(part, slot.layer) for part in slot.parts}
    if source.twin(slot) is None and set(slot.parts) <= {"gate_bias", "up_bias"}:
        return "rearranged"
    if dtypes == {dtype}:
        return "copied"
    return "narrowed" if dtype == torch.bfloat16 else "widened"


def _exactly(rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The same numbers in another type; a narrower type takes the upper bits, so that a NaN keeps its payload."""
    if rows.dtype == torch.float32 and dtype == torch.bfloat16:
        return (rows.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return rows.to(dtype)


def _holds_bfloat16(rows: Tensor) -> bool:
    return not bool((rows.contiguous().view(torch.int32) & 0xFFFF).any())


# ---- the experts -----------------------------------------------------------------------------------------------------


def _expert_action(source: GptOssSource, group: Sequence[LayoutTensor], experts: torch.dtype | None) -> Action:
    if source.experts == experts:
        return "copied" if all(source.twin(slot) for slot in group) else "rearranged"
    if experts is None:
        return "encoded"
    return "expanded" if source.experts is None else "rounded"


def _copy(source: GptOssSource, group: Sequence[LayoutTensor], put: Callable[[str, Tensor], None]) -> None:
    for slot in group:
        twin = source.twin(slot)
        assert twin is not None
        for rows in source.raw(twin):
            put(slot.name, rows)


def _converted(matrix: Matrix, experts: torch.dtype | None, rule: ScaleRule | None, name: str) -> Matrix:
    if isinstance(matrix, Encoded):
        with _naming(name):
            numbers = matrix if experts is None else decode(matrix, experts)
        return numbers if isinstance(numbers, Encoded) else _finite(numbers, name)
    if experts is not None:
        return matrix if matrix.dtype == experts else _finite(matrix.to(experts), name)
    return encode(_finite(matrix, name), MXFP4, scale_rule=rule, name=name)


def _finite(numbers: Tensor, name: str) -> Tensor:
    low, high = torch.aminmax(numbers)
    if not bool(torch.isfinite(low)) or not bool(torch.isfinite(high)):
        count = numbers.numel() - int(numbers.isfinite().sum())
        raise FormatError(f"{name}: {count} of {numbers.numel()} numbers are NaN or infinite; mend the weights")
    return numbers


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the tensor's name to errors of the formats, which do not know it."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
