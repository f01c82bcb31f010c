"""Which rows belong to which expert, and codes with their scales: the data that casts and products of experts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.fp8.recipes import RECIPES, expert_recipes

TILE_ROWS = 128  # rows of a cast's tile; products take whole tiles or halves
GLUON_COLS = 256  # the columns of a tile of the gluon products


@dataclass(frozen=True)
class GroupLayout:
    """Which rows belong to which expert, as tables on the device; the sizes are known to the host.

    `ends` and `padded_ends` [E] are where each expert's rows end, `by_size` [E] the experts from the most rows to the
    fewest; `tile_expert`, `tile_row` and `tile_end` (of the expert) cut the rows into tiles that do not cross experts,
    -1 for unused tiles; `tiles_used` [1] is their number.
    """

    ends: Tensor
    padded_ends: Tensor
    by_size: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    tile_end: Tensor
    tiles_used: Tensor
    rows: int
    padded_rows: int
    pad: int

    @property
    def tiles(self) -> int:
        return self.tile_expert.shape[0]

    @property
    def experts(self) -> int:
        return self.ends.shape[0]

    def spans(self) -> list[tuple[int, int]]:
        """First and end row of each expert, on the host: waits for a GPU."""
        ends = self.ends.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


class GroupSizes(NamedTuple):
    """Sizes of a cast: of tokens, in the tiles of their layout's tables, or of all experts' matrices, stacked.

    stride        codes from one column to the next in the transposed layout
    tokens        for block scales, which lie that far apart, else 0: one plan then serves any number of tokens
    tiles         tiles of tokens, as in the tables
    matrix_rows   rows of each matrix; 0: these are tokens
    """

    experts: int
    cols: int
    stride: int
    tokens: int = 0
    tiles: int = 0
    matrix_rows: int = 0

    def tiles_down(self, rows: int) -> int:
        """The number of tiles of `rows` rows, from top to bottom."""
        return self.experts * -(-self.matrix_rows // rows) if self.matrix_rows else self.tiles


@dataclass(frozen=True)
class GroupedFp8:
    """Codes of tokens or matrices in one layout, with scales of one kind; see the module.

    `uniform` promises that all scales of an expert are equal: products may then read one for all.
    """

    codes: Tensor
    scale: Tensor
    kind: str
    uniform: bool = False


def scale_kind(recipe: str) -> str:
    """The kind of a recipe's scales: "vector", of rows and columns, or "block"."""
    kind = RECIPES[recipe].experts if recipe in RECIPES else None
    if kind is None:
        raise FormatError(f"experts are cast by {', '.join(expert_recipes())}, got {recipe!r}")
    return kind
