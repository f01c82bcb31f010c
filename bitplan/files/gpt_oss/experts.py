"""Moves one expert's matrix from the tensors of one layout to those of another.

Between layouts a matrix is either an `Encoded` in mxfp4 or a float tensor, always [outputs, inputs], with gate in the
even rows and up in the odd ones. Packed bytes are moved, never decoded: a change of layout picks rows and reorders
nibbles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.files.gpt_oss.layouts import LayoutTensor
from bitplan.formats import Encoded, get_format, repack

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
    """The part of each tensor for one expert."""
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
        shape = (2 * even.shape[0], even.shape[1])
        return Encoded(MXFP4, shape, **_each_part(even, lambda part, own: weave_rows(own, odd.parts[part])))
    assert isinstance(even, Tensor)
    assert isinstance(odd, Tensor)
    return weave_rows(even, odd)


def _every_second(matrix: Matrix, first: int) -> Matrix:
    if isinstance(matrix, Encoded):
        shape = (matrix.shape[0] // 2, matrix.shape[1])
        return Encoded(MXFP4, shape, **_each_part(matrix, lambda _, own: own[first::2].contiguous()))
    return matrix[first::2]


def _each_part(encoded: Encoded, change: Callable[[str, Tensor], Tensor]) -> Mapping[str, Tensor]:
    return {name: change(name, part) for name, part in encoded.parts.items()}


def weave_rows(even: Tensor, odd: Tensor) -> Tensor:
    """The rows of two tensors, alternating."""
    return torch.stack((even, odd), dim=1).flatten(0, 1)
