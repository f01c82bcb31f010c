"""QuantEmbedding: a table of packed rows; only the rows that are looked up are decoded.

A language model's head may share the table: a QuantLinear over the same PackedWeight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitplan.formats import Encoded, get_format
from bitplan.formats.dispatch import decode, parts_of
from bitplan.formats.elements import dtype_name
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.product_strategy import LayerError, check_packed, check_tensor
from bitplan.packed.products.decode_row_slices import why_no_rows


@torch.library.custom_op("bitplan::embedding_rows", mutates_args=())
def embedding_rows(
    ids: Tensor, data: Tensor, scales: Tensor | None, base: Tensor | None, fmt: str, cols: int, dtype: torch.dtype
) -> Tensor:
    """The rows of a packed matrix [rows, cols] that `ids` [...] name, as numbers [..., cols]."""
    flat, count = ids.reshape(-1), data.shape[0]
    # index_select refuses negative ids, as nn.Embedding does; data[flat] would count them from the end.
    data, scales = data.index_select(0, flat), None if scales is None else scales.index_select(0, flat)
    rows = Encoded(get_format(fmt), (flat.numel(), cols), data, scales, base)
    with parts_of(count * cols):  # one row, too, is decoded by a compiled loop
        return decode(rows, dtype).reshape(*ids.shape, cols)


@embedding_rows.register_fake
def _(
    ids: Tensor, data: Tensor, _scales: Tensor | None, _base: Tensor | None, _fmt: str, cols: int, dtype: torch.dtype
) -> Tensor:
    return data.new_empty((*ids.shape, cols), dtype=dtype)


class QuantEmbedding(nn.Module):
    """An nn.Embedding over a packed table [rows, features], without gradients for it.

    dtype         type of the output; `model.to(dtype)` changes it, as in other layers
    padding_idx   only stored, for code that reads it: the row is looked up like any other
    scale         rows are multiplied by it, and rounded to their type
    """

    _like: Tensor
    scale: Tensor | None

    def __init__(
        self,
        weight: Encoded | PackedWeight,
        *,
        dtype: torch.dtype = torch.float32,
        padding_idx: int | None = None,
        scale: float | None = None,
        name: str = "QuantEmbedding",
    ) -> None:
        super().__init__()
        check_packed(weight, name)
        reason = why_no_rows(weight.fmt)
        if reason is not None or len(weight.shape) != 2:
            raise LayerError(f"{name}: {reason or f'a table has two axes, got {weight.shape}'}; use int8_row or mxfp4")
        self.weight = weight if isinstance(weight, PackedWeight) else PackedWeight(weight)
        self.num_embeddings, self.embedding_dim = self.weight.shape
        self.padding_idx, self.name = padding_idx, name
        # An empty tensor moves and casts with the model, and so holds the type that the output must have.
        device = self.weight.device
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        factor = None if scale is None else torch.tensor(scale, dtype=torch.float32, device=device)
        self.register_buffer("scale", factor, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    def stand_in(self, _ids: Tensor) -> nn.Embedding:
        """A plain embedding without numbers, which `bitplan.describe` runs in place of this layer."""
        return nn.Embedding(self.num_embeddings, self.embedding_dim, device="meta", dtype=self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.weight.fmt.name}"

    def forward(self, ids: Tensor) -> Tensor:
        check_tensor(ids, self.name, "ids")
        if ids.dtype not in (torch.int32, torch.int64):
            raise LayerError(f"{self.name}: ids must be int32 or int64, got {dtype_name(ids.dtype)}")
        weight = self.weight
        buffers = weight._buffers
        rows: Tensor = embedding_rows(
            ids,
            weight.data,
            weight.scales if "scales" in buffers else None,
            weight.base if "base" in buffers else None,
            weight.fmt.name,
            self.embedding_dim,
            self._like.dtype,
        )
        return rows if self.scale is None else rows * self.scale.to(rows.dtype)
