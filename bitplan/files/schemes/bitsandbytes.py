"""bitsandbytes folders: NF4 and FP4 in blocks of the flattened weight, and LLM.int8.

| part of NAME.weight | what |
|---|---|
| NAME.weight | codes of 4 bits, first one high, in any type of as many bytes |
| NAME.weight.quant_state.bitsandbytes__nf4 | JSON as bytes: shape, dtype, blocksize, and of nested scales theirs |
| NAME.weight.quant_map | the 16 numbers |
| NAME.weight.absmax | a float32 for each block; or nested: nested_quant_map[byte] * nested_absmax + offset |
| NAME.SCB | LLM.int8: the largest number of each row, the weight being int8 * SCB / 127 |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bitplan.base.documents import NAME, NUMBER, SHAPE, SIZE, Reader, one_of
from bitplan.base.errors import FileFormatError
from bitplan.base.records import parse_json
from bitplan.files.schemes.integers import PIECE_NUMBERS
from bitplan.files.schemes.tensors import FLOATS, QuantizedFolder, SchemeWeight
from bitplan.formats import get_format

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded

STATE = ".quant_state.bitsandbytes__"
MOST_STATE_BYTES = 2**16
_KEYS = {
    "quant_type": one_of("nf4", "fp4"),
    "blocksize": SIZE,
    "dtype": one_of(*FLOATS),
    "shape": SHAPE,
    "nested_blocksize": SIZE,
    "nested_dtype": NAME,
    "nested_offset": NUMBER,
}


def list_weights(folder: QuantizedFolder) -> Iterator[SchemeWeight]:
    for name in folder.checkpoint.tensors:
        owner, is_state, kind = name.partition(STATE)
        if is_state:
            yield _four_bits(folder, owner, name, kind)
        elif name.endswith(".SCB"):
            yield _int8(folder, name.removesuffix(".SCB"))


def _four_bits(folder: QuantizedFolder, name: str, state_name: str, kind: str) -> SchemeWeight:
    state = _read_state(folder, name, state_name)
    shape, size, nested = tuple(state["shape"]), state["blocksize"], state.get("nested_blocksize")
    count, codes = math.prod(shape), folder.checkpoint.tensors.get(name)
    if codes is None or codes.nbytes != -(-count // 2) or not count:
        stored = "none" if codes is None else codes.nbytes
        folder.stop(name, f"{list(shape)} numbers of 4 bits take {-(-count // 2)} bytes, the file has {stored}")
    parts, blocks = [name, state_name, f"{name}.quant_map", f"{name}.absmax"], -(-count // size)
    folder.part(f"{name}.quant_map", ("float32",), (16,), of=name)
    folder.part(f"{name}.absmax", ("float32" if nested is None else "uint8",), (blocks,), of=name)
    if nested is not None:
        folder.part(f"{name}.nested_quant_map", ("float32",), (256,), of=name)
        folder.part(f"{name}.nested_absmax", ("float32",), (-(-blocks // nested),), of=name)
        parts += [f"{name}.nested_quant_map", f"{name}.nested_absmax"]
    reason = f"no format of bitplan has blocks of {size} {kind.upper()} codes over the flattened weight"
    read = functools.partial(_decode, folder, name, state)
    label = f"{kind}_b{size}{'' if nested is None else '_nested'}"
    return SchemeWeight(name, shape, state["dtype"], parts=tuple(parts), label=label, reason=reason, read=read)


def _read_state(folder: QuantizedFolder, name: str, state_name: str) -> dict[str, Any]:
    """The quantization state of a weight, as `_KEYS` has it; without `nested_blocksize` its scales are plain."""
    entry = folder.part(state_name, ("uint8",), (None,), of=name)
    if entry.nbytes > MOST_STATE_BYTES:
        folder.stop(name, f"its quant_state takes {entry.nbytes} bytes, of which {MOST_STATE_BYTES} are the most")
    where = f"{folder.path}: {state_name!r}"
    document: Any = parse_json(folder.checkpoint.read_bytes(state_name), where=where)
    required = ["quant_type", "blocksize", "dtype", "shape"]
    nested = isinstance(document, dict) and "nested_blocksize" in document
    state: dict[str, Any] = Reader(where, FileFormatError, strict=False).keys(
        "", document, _KEYS, [*required, "nested_offset"] if nested else required
    )
    if not state["blocksize"] or (nested and not state["nested_blocksize"]):
        folder.stop(name, "its quant_state has blocks of nothing")
    return state


def _decode(folder: QuantizedFolder, name: str, state: Mapping[str, Any]) -> Tensor:
    """Products in float32, rounded once to the weight's type, as bitsandbytes' own."""
    import torch

    from bitplan.formats.elements import torch_dtype

    absmax = folder.read(f"{name}.absmax")
    if "nested_blocksize" in state:
        levels = folder.read(f"{name}.nested_quant_map")[absmax.long()]
        of_block = torch.arange(len(absmax)) // state["nested_blocksize"]
        absmax = levels * folder.read(f"{name}.nested_absmax")[of_block] + float(state["nested_offset"])
    table, count = folder.read(f"{name}.quant_map"), math.prod(state["shape"])
    raw = folder.read(name).reshape(-1).view(torch.uint8)
    out = torch.empty(count, dtype=torch_dtype(state["dtype"]))
    for start in range(0, count, PIECE_NUMBERS):
        stop = min(start + PIECE_NUMBERS, count)
        some = raw[start // 2 : -(-stop // 2)]
        codes = torch.stack((some >> 4, some & 15), dim=-1).flatten()[: stop - start]
        scales = absmax[torch.arange(start, stop) // state["blocksize"]]
        out[start:stop] = (table[codes.long()] * scales).to(out.dtype)
    return out.reshape(state["shape"])


def _int8(folder: QuantizedFolder, owner: str) -> SchemeWeight:
    name = f"{owner}.weight"
    codes = folder.part(name, ("int8",), (None, None), of=name)
    rows, cols = codes.shape
    folder.part(f"{owner}.SCB", ("float32",), (rows,), of=name)
    parts = [name, f"{owner}.SCB", f"{owner}.weight_format"]
    stored = tuple(part for part in parts if part in folder.checkpoint.tensors)
    layout = folder.checkpoint.tensors.get(f"{owner}.weight_format")
    if layout is not None and any(folder.checkpoint.read_bytes(layout.name)):
        folder.stop(name, "its weight_format is not rows in order, which bitplan does not read")
    reason = "the same codes; scales are SCB / 127, rounded to float32"
    read = functools.partial(_keep_int8, folder, owner)
    kind = "int8_row"
    return SchemeWeight(
        name, (rows, cols), folder.dtype_name, format=kind, parts=stored, label=kind, reason=reason, read=read
    )


def _keep_int8(folder: QuantizedFolder, owner: str) -> Encoded:
    from bitplan.formats import Encoded
    from bitplan.formats.scale_rules import divided

    codes = folder.read(f"{owner}.weight")
    scales = divided(folder.read(f"{owner}.SCB"), 127.0).reshape(-1, 1)
    return Encoded(get_format("int8_row"), (codes.shape[0], codes.shape[1]), codes, scales)
