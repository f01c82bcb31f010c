"""A table that lies in many files and is never in memory as a whole: Parquet or npy, read piece by piece.

A fit reads it twice: once for the sample that gives the bins (and for targets, weights and categories), once to bin it.
From then on a value is two bytes: its bin, once for histograms and once for partitions. The trees are those of a fit to
all rows in one array, to the bit: the sample is drawn by the numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitplan.base.optional import require
from bitplan.trees.distributed.shards import Array, TreesError

ROWS_AT_ONCE = 2**17  # of an npy file; of a Parquet file, a row group


@dataclass(frozen=True)
class PieceOfTable:
    """Some rows of a file; `read` gives the columns of these names, or all: (rows, columns), floats."""

    where: str
    rows: int
    read: Callable[[Sequence[str] | None], Array]


class TablePieces:
    """What `open_pieces` gives: X for `fit` and predictions, with `y` and `weights` where files have them."""

    ndim = 2

    def __init__(
        self, pieces: Sequence[PieceOfTable], features: Sequence[str] | int, dtype: Any, chosen: Array | None = None
    ) -> None:
        self._pieces, self._features, self.dtype, self._chosen = tuple(pieces), features, np.dtype(dtype), chosen
        rows = sum(piece.rows for piece in pieces) if chosen is None else len(chosen)
        self.shape = rows, features if isinstance(features, int) else len(features)
        self.y: Array | None = None
        self.weights: Array | None = None

    @property
    def columns(self) -> list[str] | None:
        """The names of the features; None for npy files, which have none."""
        return None if isinstance(self._features, int) else list(self._features)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Array) -> TablePieces:
        """Some rows, by a mask or by numbers in rising order; nothing is read."""
        numbers = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        chosen = numbers if self._chosen is None else self._chosen[numbers]
        return TablePieces(self._pieces, self._features, self.dtype, chosen)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        out = np.empty(self.shape, dtype or self.dtype)
        for first, block in self.blocks():
            out[first : first + len(block)] = block
        return out

    def astype(self, dtype: Any, copy: bool = True) -> TablePieces:
        """These rows, read as another type."""
        return TablePieces(self._pieces, self._features, dtype, self._chosen)

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """The number of a block's first row, and its rows: all of the table, in order."""
        first = passed = 0
        for piece in self._pieces:
            inside = None
            if self._chosen is not None:
                low, high = np.searchsorted(self._chosen, [passed, passed + piece.rows])
                inside = self._chosen[low:high] - passed
            passed += piece.rows
            if inside is not None and not len(inside):
                continue
            block = piece.read(self.columns)
            if inside is not None:
                block = block[inside]
            self._refuse_infinity(block, piece)
            yield first, block.astype(self.dtype, copy=False)
            first += len(block)

    def _refuse_infinity(self, block: Array, piece: PieceOfTable) -> None:
        is_bad = np.isinf(block)
        if is_bad.any():
            row, column = np.argwhere(is_bad)[0]
            name = column if self.columns is None else repr(self.columns[column])
            raise TreesError(
                f"X: {piece.where}: column {name} has infinity (row {row} of those read), expected numbers or NaN; "
                "clip it, or make it missing"
            )


def open_pieces(
    files: str | Path | Sequence[str | Path], *, target: str | None = None, weight: str | None = None, dtype: Any = None
) -> TablePieces:
    """Files of one table, in the order of its rows: Parquet, or npy arrays (rows, features); nothing is read yet.

    target, weight  columns of Parquet files that are no features; they are read whole, into `y` and `weights`
    dtype           float32 or float64; None: float32 if every feature is, else float64, as numpy would join them
    """
    paths = [Path(file) for file in ([files] if isinstance(files, (str, Path)) else files)]
    if not paths:
        raise TreesError("files: expected at least one Parquet or npy file, got none")
    kinds = {path.suffix for path in paths}
    if kinds == {".npy"}:
        if target is not None or weight is not None:
            raise TreesError("target, weight: npy files have no names of columns; give y and sample_weight to fit")
        return _open_npy(paths, dtype)
    if kinds != {".parquet"}:
        raise TreesError(f"files: expected names that end in .parquet, or all in .npy, got {sorted(kinds)}")
    return _open_parquet(paths, target, weight, dtype)


def _open_npy(paths: list[Path], dtype: Any) -> TablePieces:
    pieces: list[PieceOfTable] = []
    kinds, features = [], None
    for path in paths:
        table = _mapped(path)
        if table.ndim != 2 or table.dtype.kind not in "biuf" or table.shape[1] != (features or table.shape[1]):
            raise TreesError(
                f"{path}: expected a table of numbers (rows, {features or 'features'}), got {table.dtype} of shape "
                f"{table.shape}"
            )
        features = table.shape[1]
        kinds.append(table.dtype)
        for start in range(0, len(table), ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, len(table))
            pieces.append(PieceOfTable(str(path), stop - start, _npy_reader(path, start, stop)))
    return TablePieces(pieces, features or 0, dtype or _joined_type(kinds))


def _mapped(path: Path) -> Array:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, EOFError) as error:
        raise TreesError(f"{path}: expected an npy file of numbers: {str(error).splitlines()[0]:.200}") from None


def _npy_reader(path: Path, start: int, stop: int) -> Callable[[Sequence[str] | None], Array]:
    # Mapped anew for each block, so that what was read before is given back.
    return lambda _: np.array(_mapped(path)[start:stop])


def _open_parquet(paths: list[Path], target: str | None, weight: str | None, dtype: Any) -> TablePieces:
    parquet = require("pyarrow.parquet", purpose="reading Parquet files")
    apart = [name for name in (target, weight) if name is not None]
    pieces: list[PieceOfTable] = []
    kinds: list[Any] = []
    names: list[str] | None = None
    for path in paths:
        file = _parquet_file(parquet, path)
        schema = file.schema_arrow
        columns = [name for name in schema.names if name not in apart]
        missing = [name for name in [*apart, *(names or [])] if name not in schema.names]
        if missing or len(columns) != len(names or columns):
            more = sorted(set(columns) - set(names or columns))
            raise TreesError(f"{path}: columns {missing} are missing, {more} are new; expected those of {paths[0]}")
        names = names or columns
        kinds += [_number_type(path, schema.field(name)) for name in names]
        pieces += [
            PieceOfTable(
                f"{path}, row group {group}", file.metadata.row_group(group).num_rows, _group_reader(path, group)
            )
            for group in range(file.num_row_groups)
        ]
    table = TablePieces(pieces, names or [], dtype or _joined_type(kinds))
    for name, attribute in ((target, "y"), (weight, "weights")):
        if name is not None:
            setattr(table, attribute, np.concatenate([_column(parquet, path, name) for path in paths]))
    return table


def _parquet_file(parquet: Any, path: Path) -> Any:
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are both
        raise TreesError(f"{path}: expected a Parquet file: {str(error).splitlines()[0]:.200}") from None


def _column(parquet: Any, path: Path, name: str) -> Array:
    values: Array = _parquet_file(parquet, path).read(columns=[name]).column(name).to_numpy()
    return values


def _group_reader(path: Path, group: int) -> Callable[[Sequence[str] | None], Array]:
    def read(names: Sequence[str] | None) -> Array:
        parquet = require("pyarrow.parquet", purpose="reading Parquet files")
        table = _parquet_file(parquet, path).read_row_group(group, columns=list(names or []))
        columns = [table.column(name).to_numpy() for name in names or []]
        out = np.empty((len(columns), table.num_rows), _joined_type([column.dtype for column in columns]))
        for index, column in enumerate(columns):
            out[index] = column
        return out.T

    return read


def _number_type(path: Path, field: Any) -> Any:
    """The numpy type of a column; text, dates and lists are refused by name."""
    try:
        kind = np.dtype(field.type.to_pandas_dtype())
    except (NotImplementedError, TypeError):
        kind = np.dtype(object)
    if kind.kind not in "biuf":
        raise TreesError(
            f"{path}: column {field.name!r} has {field.type}, expected numbers; give each text a whole number from 0 "
            "to 255 and name the column in categorical_features, or leave the column out"
        )
    return kind


def _joined_type(kinds: Sequence[Any]) -> Any:
    is_single = all(np.dtype(kind) == np.float32 for kind in kinds) and len(kinds) > 0
    return np.dtype(np.float32 if is_single else np.float64)
