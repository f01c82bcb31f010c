"""Reads a file's tensors as the model's numbers under one naming, so that files of any layout can be compared.

| file | comes as |
|---|---|
| gpt-oss in OpenAI's, Hugging Face's or GGUF's layout | Hugging Face's names for experts in floats, MXFP4 decoded |
| GGUF of a llama or its kin, beside a file that is not GGUF | Hugging Face's names, rows of q and k in its order |
| any other | its own names |

Experts come one at a time, all else tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bitplan.errors import StoreError
from bitplan.formats import Encoded
from bitplan.formats.dtypes import dtype_name
from bitplan.kernels import decode
from bitplan.plan import shipped_manifest
from bitplan.store.files.gguf_tensors import GGUFTensors
from bitplan.store.files.open_files import open_tensors
from bitplan.store.files.safetensors_tensors import NativeTensors
from bitplan.store.files.tensor_file import TensorFile
from bitplan.store.gpt_oss.config import ARCHITECTURE
from bitplan.store.gpt_oss.experts import DOWN, GATE_UP
from bitplan.store.gpt_oss.layouts import LayoutTensor, list_slots
from bitplan.store.gpt_oss.source import GptOssFile

_GPT_OSS_CODES = (".mlp.mlp1_weight.blocks", ".mlp.experts.gate_up_proj_blocks")
# GGUF's architectures with the names of the llama manifest, and whether llama.cpp reorders rows of q and k in them.
_LLAMA_KIN = {"llama": True, "qwen2": False, "qwen3": False}


@dataclass(frozen=True)
class Values:
    """One tensor of a model; its numbers are read in pieces, in order. `is_integer`: a buffer, not weights."""

    shape: tuple[int, ...]
    format: str
    is_integer: bool
    pieces: Callable[[], Iterator[Tensor]]


@dataclass(frozen=True)
class ModelValues:
    """The tensors of one file; `note` says why its names may differ from those of another layout."""

    path: Path
    values: Mapping[str, Values]
    note: str | None = None


def open_values(first: str | Path, second: str | Path, opened: ExitStack) -> tuple[ModelValues, ModelValues]:
    """Open two files for comparison; they stay open as long as `opened`."""
    files = [opened.enter_context(open_tensors(path)) for path in (first, second)]
    shared = files[0].specs.keys() & files[1].specs.keys()  # names in common: a GGUF file and a file quantized from it
    mixed = not shared and len({isinstance(file, GGUFTensors) for file in files}) > 1
    needs_layouts = mixed or any(_has_codes(file) for file in files)
    one, two = (_values(file, opened, layouts=needs_layouts, translate=mixed) for file in files)
    return one, two


def _values(file: TensorFile, opened: ExitStack, *, layouts: bool, translate: bool) -> ModelValues:
    if layouts and (_has_codes(file) or _architecture(file) == ARCHITECTURE):
        return ModelValues(file.path, _gpt_oss(opened.enter_context(GptOssFile(file.path))))
    own = {name: _plain(file, name) for name in file.specs}
    kind = _architecture(file)
    if not translate or kind is None:
        return ModelValues(file.path, own)
    if kind not in _LLAMA_KIN:
        note = f"{file.path}: the names of GGUF architecture {kind!r} are not translated; compare it with a GGUF file"
        return ModelValues(file.path, own, note)
    assert isinstance(file, GGUFTensors)
    aliases = shipped_manifest("llama").aliases
    tensors = {aliases.to_ours(name): item for name, item in own.items()}
    if _LLAMA_KIN[kind]:
        for part, key in (("q_proj", "head_count"), ("k_proj", "head_count_kv")):
            heads = file.file.metadata.get(f"{kind}.attention.{key}")
            for name in [name for name in tensors if f".self_attn.{part}." in name]:
                tensors[name] = _in_order(tensors[name], None if heads is None else heads.value, f"{file.path}: {name}")
    return ModelValues(file.path, tensors)


def _has_codes(file: TensorFile) -> bool:
    """Whether a file holds gpt-oss's experts as codes and scales under two names."""
    return isinstance(file, NativeTensors) and any(name.endswith(_GPT_OSS_CODES) for name in file.specs)


def _architecture(file: TensorFile) -> str | None:
    if not isinstance(file, GGUFTensors):
        return None
    field = file.file.metadata.get("general.architecture")
    return None if field is None else str(field.value)


def _plain(file: TensorFile, name: str) -> Values:
    spec = file.specs[name]
    is_integer = not spec.encoded and not spec.dtype.is_floating_point and not spec.dtype.is_complex

    def pieces() -> Iterator[Tensor]:
        numbers = file.read_float(name)
        yield torch.view_as_real(numbers) if numbers.is_complex() else numbers

    return Values(spec.shape, spec.format, is_integer, pieces)


def _in_order(values: Values, heads: object, where: str) -> Values:
    """Rows in Hugging Face's order: llama.cpp interleaves the two halves of each head's rotation."""
    rows = values.shape[0]
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        raise StoreError(f"{where}: {rows} rows do not divide into {str(heads)[:40]} heads of the file's metadata")

    def pieces() -> Iterator[Tensor]:
        for piece in values.pieces():
            yield piece.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)

    return Values(values.shape, values.format, values.is_integer, pieces)


# ---- gpt-oss ---------------------------------------------------------------------------------------------------------


def _gpt_oss(file: GptOssFile) -> dict[str, Values]:
    return {slot.name: _of_slot(file, slot) for slot in list_slots("hf", file.shape, packed=False)}


def _of_slot(file: GptOssFile, slot: LayoutTensor) -> Values:
    if slot.is_expert:
        fmt = "mxfp4" if file.experts is None else dtype_name(file.experts)
        return Values(slot.shape, fmt, False, lambda: _experts(file, slot))
    fmt = dtype_name(file.dtype(slot.parts[0], slot.layer))
    return Values(slot.shape, fmt, False, lambda: iter((_rows(file, slot),)))


def _experts(file: GptOssFile, slot: LayoutTensor) -> Iterator[Tensor]:
    assert slot.layer is not None
    for index in range(file.shape.experts):
        matrix = file.expert(slot.layer, DOWN if slot.parts == DOWN else GATE_UP, index)
        yield (decode(matrix) if isinstance(matrix, Encoded) else matrix).T


def _rows(file: GptOssFile, slot: LayoutTensor) -> Tensor:
    parts = [torch.cat(list(file.rows(part, slot.layer))) for part in slot.parts]
    return torch.stack(parts, dim=-1).flatten(-2) if slot.kind == "woven" else torch.cat(parts)
