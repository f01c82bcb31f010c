"""Reads a file's tensors as the model's numbers under one naming, so that files of any layout can be compared.

| file | comes as |
|---|---|
| gpt-oss in OpenAI's, Hugging Face's or GGUF's layout | Hugging Face's names for experts in floats, MXFP4 decoded |
| GGUF of a family that is exported, beside another container | Hugging Face's names, rows of q and k in its order |
| the file beside it | experts of a layer as one tensor, norms of Gemma plus one, as GGUF has them |
| a packed folder of gpt-oss | experts transposed, as the model has them |
| any other | its own names: packed by bitplan or another library, or not packed |

Experts come one at a time, all else tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bitplan.base.errors import StoreError
from bitplan.files.engines.gguf_metadata import ROTATIONS
from bitplan.files.engines.gguf_source import gguf_name, is_plus_one, name_table
from bitplan.files.gguf_tensors import GGUFTensors
from bitplan.files.gpt_oss.config import ARCHITECTURE
from bitplan.files.gpt_oss.layouts import LayoutTensor, list_slots
from bitplan.files.gpt_oss.source import DOWN, GATE_UP, GptOssFile, plain_rows
from bitplan.files.open_files import open_tensors
from bitplan.files.safetensors_tensors import NativeTensors
from bitplan.files.tensor_file import ReadableTensor, TensorFile
from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode
from bitplan.formats.elements import dtype_name
from bitplan.plan.names import natural_order
from bitplan.plan.structure.families import GGUF_FAMILIES, split_expert

_GPT_OSS_CODES = (".mlp.mlp1_weight.blocks", ".mlp.experts.gate_up_proj_blocks")
_FAMILIES = {family.architecture: family for family in GGUF_FAMILIES.values()}
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class ModelValues:
    """The tensors of one file; `note` says why its names may differ from those of another layout."""

    path: Path
    values: Mapping[str, ReadableTensor]
    note: str | None = None


def open_values(first: str | Path, second: str | Path, opened: ExitStack) -> tuple[ModelValues, ModelValues]:
    """Open two files for comparison; they stay open as long as `opened`."""
    files = [opened.enter_context(open_tensors(path)) for path in (first, second)]
    shared = files[0].specs.keys() & files[1].specs.keys()  # names in common: a GGUF file and a file quantized from it
    mixed = not shared and len({isinstance(file, GGUFTensors) for file in files}) > 1
    needs_layouts = mixed or any(_has_codes(file) for file in files)
    one, two = (_values(file, opened, layouts=needs_layouts) for file in files)
    if not mixed or (needs_layouts and any(_is_gpt_oss(file) for file in files)):
        return one, two
    if isinstance(files[0], GGUFTensors):
        return _side_by_side(files[0], one, two)
    assert isinstance(files[1], GGUFTensors)
    two, one = _side_by_side(files[1], two, one)
    return one, two


def _values(file: TensorFile, opened: ExitStack, *, layouts: bool) -> ModelValues:
    if layouts and _is_gpt_oss(file):
        opened_file = opened.enter_context(GptOssFile(file))
        slots = list_slots("hf", opened_file.shape, packed=False)
        return ModelValues(file.path, {slot.name: _of_slot(opened_file, slot) for slot in slots})
    return ModelValues(file.path, {name: _plain(file, name) for name in file.specs})


def _is_gpt_oss(file: TensorFile) -> bool:
    return _has_codes(file) or _architecture(file) == ARCHITECTURE


# ---- GGUF's names beside Hugging Face's ------------------------------------------------------------------------------


def _side_by_side(file: GGUFTensors, ours: ModelValues, theirs: ModelValues) -> tuple[ModelValues, ModelValues]:
    """Tensors of a GGUF file and of a Hugging Face file, each pair with the same name and the same order of rows."""
    kind = _architecture(file)
    if kind not in _FAMILIES:
        note = f"{file.path}: the names of GGUF architecture {kind!r} are not translated; compare it with a GGUF file"
        return ModelValues(file.path, ours.values, note), theirs
    family = _FAMILIES[kind]
    layers = 1 + max((int(block[1]) for name in ours.values if (block := _BLOCK.match(name))), default=0)
    table = name_table(family.architecture, layers)
    left, right = {name: values for name, values in ours.values.items() if name != ROTATIONS}, dict(theirs.values)
    grouped: dict[str, list[str]] = {}
    for name in theirs.values:
        if (theirs_name := gguf_name(table, name)) in left and theirs_name is not None:
            grouped.setdefault(theirs_name, []).append(name)
    for theirs_name, names in grouped.items():
        values, name = left.pop(theirs_name), names[0]
        if expert := split_expert(name):
            name = f"{expert[0]}.*.{expert[2]}"
            right[name] = _stacked([right.pop(expert_name) for expert_name in natural_order(names)])
        if family.permutes and (heads := _head_count(file, kind, theirs_name)) != 0:
            values = _in_order(values, heads, f"{file.path}: {theirs_name}")
        if is_plus_one(family, theirs_name):
            right[name] = _plus_one(right[name])
        left[name] = values
    return ModelValues(file.path, left), ModelValues(theirs.path, right)


def _head_count(file: GGUFTensors, kind: str, name: str) -> object:
    """How many heads the rows of q or k are of, as the metadata says; 0 for other tensors."""
    for part, keys in ((".attn_q.", ("head_count",)), (".attn_k.", ("head_count_kv", "head_count"))):
        if part in name:
            counts = [file.file.metadata.get(f"{kind}.attention.{key}") for key in keys]
            return next((value.value for value in counts if value is not None), None)
    return 0


def _stacked(experts: list[ReadableTensor]) -> ReadableTensor:
    first = experts[0]
    shape = (len(experts), *first.shape) if len({expert.shape for expert in experts}) == 1 else ()
    return replace(first, shape=shape, pieces=lambda: (piece for expert in experts for piece in expert.pieces()))


def _plus_one(values: ReadableTensor) -> ReadableTensor:
    return replace(values, pieces=lambda: (piece.float() + 1 for piece in values.pieces()))


def _has_codes(file: TensorFile) -> bool:
    """Whether a file holds gpt-oss's experts as codes and scales under two names."""
    return isinstance(file, NativeTensors) and any(name.endswith(_GPT_OSS_CODES) for name in file.specs)


def _architecture(file: TensorFile) -> str | None:
    if not isinstance(file, GGUFTensors):
        return None
    field = file.file.metadata.get("general.architecture")
    return None if field is None else str(field.value)


def _plain(file: TensorFile, name: str) -> ReadableTensor:
    """A tensor as the model has it."""
    spec = file.specs[name]

    def pieces() -> Iterator[Tensor]:
        numbers = file.read_float(name)
        yield torch.view_as_real(numbers) if numbers.is_complex() else numbers

    return ReadableTensor(name, spec.shape_in_model, spec.dtype, format=spec.format, pieces=pieces)


def _in_order(values: ReadableTensor, heads: object, where: str) -> ReadableTensor:
    """Rows in Hugging Face's order: llama.cpp interleaves the two halves of each head's rotation."""
    rows = values.shape[0]
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        raise StoreError(f"{where}: {rows} rows do not divide into {str(heads)[:40]} heads of the file's metadata")

    def pieces() -> Iterator[Tensor]:
        for piece in values.pieces():
            yield piece.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)

    return replace(values, pieces=pieces)


# ---- gpt-oss ---------------------------------------------------------------------------------------------------------


def _of_slot(file: GptOssFile, slot: LayoutTensor) -> ReadableTensor:
    dtype = file.experts if slot.is_expert else file.dtype(slot.parts[0], slot.layer)
    fmt = "mxfp4" if dtype is None else dtype_name(dtype)

    def pieces() -> Iterator[Tensor]:
        return _experts(file, slot) if slot.is_expert else iter((torch.cat(list(plain_rows(file, slot))),))

    return ReadableTensor(slot.name, slot.shape, "float32", format=fmt, pieces=pieces)


def _experts(file: GptOssFile, slot: LayoutTensor) -> Iterator[Tensor]:
    assert slot.layer is not None
    for index in range(file.shape.experts):
        matrix = file.expert(slot.layer, DOWN if slot.parts == DOWN else GATE_UP, index)
        yield (decode(matrix) if isinstance(matrix, Encoded) else matrix).T
