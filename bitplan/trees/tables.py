"""The columns of what users have tables in: frames of pandas and polars, tables of Arrow, arrays, lists of rows.

polars and pyarrow are never imported: a frame of theirs is there only where they are.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
from scipy.sparse import issparse  # type: ignore[import-untyped]

from bitplan.base.optional import require
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.pieces import TablePieces

DATES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64)  # pandas' are among them
HOST_DEVICES = (1, 3, 11, 13)  # of DLPack: memory that the CPU reads


def on_device(values: Any) -> Any:
    """A tensor of torch for what lies on a GPU (torch, CuPy, JAX: `__dlpack__`); None for anything else."""
    device = None if isinstance(values, np.ndarray) else getattr(values, "__dlpack_device__", None)
    if device is None or isinstance(values, type) or device()[0] in HOST_DEVICES:
        return None
    torch: Any = require("torch", purpose="arrays on a GPU")
    return values.detach() if isinstance(values, torch.Tensor) else torch.from_dlpack(values)


def on_host(values: Any) -> Any:
    """What lies on a GPU, copied to the host; anything else as it is."""
    on_gpu = on_device(values)
    return values if on_gpu is None else on_gpu.cpu().numpy()


def dense(x: Any) -> Any:
    """Numbers of a sparse matrix, frame or GPU array as a dense array; what a mask hides is missing."""
    if isinstance(x, (str, PathLike)):
        raise TreesError(
            f"X: expected a table, got the path {str(x)!r:.80}; read it first (pandas.read_csv), or give "
            "bitplan.trees.open_pieces([...]) of Parquet or npy files"
        )
    x = on_host(x)
    if issparse(x):
        return x.toarray()
    if isinstance(x, np.ma.MaskedArray):
        return x.astype(np.result_type(x.dtype, np.float32)).filled(np.nan) if x.dtype.kind in "biuf" else x
    if hasattr(x, "iloc") and hasattr(x, "columns") and any(_is_sparse(dtype) for dtype in x.dtypes):
        return x.apply(lambda column: column.sparse.to_dense() if _is_sparse(column.dtype) else column)
    polars, pyarrow = sys.modules.get("polars"), sys.modules.get("pyarrow")
    if pyarrow is not None and isinstance(x, pyarrow.RecordBatch):  # scikit-learn sees no names in it
        return pyarrow.Table.from_batches([x])
    if polars is not None and isinstance(x, polars.LazyFrame):
        raise TreesError("X: a LazyFrame has no rows until it is collected; give X.collect()")
    return x


def _is_sparse(dtype: Any) -> bool:
    return hasattr(dtype, "fill_value")


class Table:
    """The columns of an array or a frame; `names` are those of a frame, empty for an array.

    kind  of a column, as NumPy has it: "M" dates and times, "O" what may be text, others are numbers
    """

    def __init__(self, x: Any) -> None:
        self.x = x
        self.names: list[Any] = self._names()
        self.count = len(self.names) or int(x.shape[1])

    def _names(self) -> list[Any]:
        return []

    def column(self, index: int) -> Any:
        return self.x[:, index]

    def shown(self, index: int) -> str:
        return f"column {self.names[index]!r:.80}" if self.names else f"column {index}"

    def dtype(self, index: int) -> Any:
        return self.column(index).dtype

    def kind(self, index: int) -> str:
        kind = getattr(self.dtype(index), "kind", "O")
        return "M" if kind == "m" else "O" if kind in "SUT" else str(kind)

    def categories(self, index: int) -> list[Any] | None:
        """What the column's own type says its categories are; None if it is no type of categories."""
        return None

    def category_numbers(self, index: int, number_of: dict[Any, float]) -> Array:
        """The number that `number_of` gives each cell of a column; NaN where it has none."""
        return np.array([number_of.get(value, np.nan) for value in self.cells(index)])

    def cells(self, index: int) -> list[Any]:
        return list(np.asarray(self.column(index), dtype=object).tolist())

    def part(self, indices: Sequence[int]) -> Any:
        """Some columns of the table, by their indices, in a form that scikit-learn takes."""
        return self.x[:, indices]

    def at(self, rows: Array) -> Any:
        """Some rows, by their numbers."""
        return self.x[rows]

    def with_numbers(self, numbers: Array) -> Any:
        """A table with these numbers under the same column names."""
        return numbers


class _Pandas(Table):
    def _names(self) -> list[Any]:
        return list(self.x.columns)

    def column(self, index: int) -> Any:
        return self.x.iloc[:, index]

    def categories(self, index: int) -> list[Any] | None:
        dtype = self.dtype(index)
        if str(dtype).startswith("dictionary<"):  # Arrow's, which has no accessor
            return list(self.column(index).dropna().unique())
        return list(self.column(index).cat.categories) if str(dtype) == "category" else None

    def category_numbers(self, index: int, number_of: dict[Any, float]) -> Array:
        categories = self.categories(index)
        if categories is None or str(self.dtype(index)) != "category":
            return super().category_numbers(index, number_of)
        by_code: list[float] = [number_of.get(plain(value), np.nan) for value in categories]
        numbers: Array = np.array([*by_code, np.nan])[np.asarray(self.column(index).cat.codes)]  # -1 is missing
        return numbers

    def part(self, indices: Sequence[int]) -> Any:
        return self.x.iloc[:, indices]

    def at(self, rows: Array) -> Any:
        return self.x.iloc[rows]

    def with_numbers(self, numbers: Array) -> Any:
        return type(self.x)(numbers, columns=self.x.columns, index=self.x.index)


class _Polars(Table):
    def _names(self) -> list[Any]:
        return list(self.x.columns)

    def column(self, index: int) -> Any:
        return self.x.to_series(index)

    def kind(self, index: int) -> str:
        dtype = self.dtype(index)
        is_number = dtype.is_numeric() or dtype == sys.modules["polars"].Boolean
        return "M" if dtype.is_temporal() else "f" if is_number else "O"

    def categories(self, index: int) -> list[Any] | None:
        types = sys.modules["polars"].Categorical, sys.modules["polars"].Enum
        return self.column(index).drop_nulls().unique().to_list() if isinstance(self.dtype(index), types) else None

    def cells(self, index: int) -> list[Any]:
        return list(self.column(index).to_list())

    def part(self, indices: Sequence[int]) -> Any:
        return self.x[:, list(indices)]

    def with_numbers(self, numbers: Array) -> Any:
        return sys.modules["polars"].from_numpy(numbers, schema=self.names)


class _Arrow(Table):
    def _names(self) -> list[Any]:
        return list(self.x.schema.names)

    def column(self, index: int) -> Any:
        return self.x.column(index)

    def dtype(self, index: int) -> Any:
        return self.x.schema.types[index]

    def kind(self, index: int) -> str:
        dtype, types = self.dtype(index), sys.modules["pyarrow"].types
        is_number = types.is_integer(dtype) or types.is_floating(dtype) or types.is_boolean(dtype)
        return "M" if types.is_temporal(dtype) else "f" if is_number or types.is_decimal(dtype) else "O"

    def categories(self, index: int) -> list[Any] | None:
        if not sys.modules["pyarrow"].types.is_dictionary(self.dtype(index)):
            return None
        return [value for value in self.column(index).unique().to_pylist() if value is not None]

    def cells(self, index: int) -> list[Any]:
        return list(self.column(index).to_pylist())

    def part(self, indices: Sequence[int]) -> Any:
        return self.x.select(list(indices))

    def at(self, rows: Array) -> Any:
        return self.x.take(rows)

    def with_numbers(self, numbers: Array) -> Any:
        return sys.modules["pyarrow"].table(list(numbers.T), names=self.names)


def table_of(x: Any) -> Table | None:
    """The table's columns; None where there are no columns to look at, which scikit-learn refuses."""
    if hasattr(x, "iloc") and hasattr(x, "columns"):
        return _Pandas(x)
    polars, pyarrow = sys.modules.get("polars"), sys.modules.get("pyarrow")
    if polars is not None and isinstance(x, polars.DataFrame):
        return _Polars(x)
    if pyarrow is not None and isinstance(x, pyarrow.Table):
        return _Arrow(x)
    if not isinstance(x, (np.ndarray, list, tuple)):
        return None
    try:
        array = np.asarray(x)
    except ValueError:  # rows of different lengths
        return None
    if array.dtype.kind in "SU" and not isinstance(x, np.ndarray):
        array = np.array(x, dtype=object)  # numbers beside text stay numbers
    return Table(array) if array.ndim == 2 else None


def names_of(x: Any) -> list[Any] | None:
    """The names of a frame's columns, or of a table's in files; None where there are none."""
    if isinstance(x, TablePieces):
        return None if x.columns is None else list(x.columns)
    is_array = isinstance(x, (np.ndarray, list, tuple))
    table = None if is_array else table_of(x)
    return None if table is None else table.names


def rows_of(x: Any, rows: Array) -> Any:
    """Some rows of an array or a frame, by their numbers."""
    table = table_of(x)
    assert table is not None
    return table.at(rows)


def plain(value: Any) -> Any:
    """A value as Python's own, where it is a number of NumPy's."""
    return value.item() if isinstance(value, np.generic) else value


def _is_no_number(value: Any) -> bool:
    """Whether a value cannot be a number: a list, a period, an interval; not text or missing, checked elsewhere."""
    has_number = hasattr(value, "__float__") and not isinstance(value, np.ndarray)
    return not (has_number or isinstance(value, (str, bytes)) or is_missing(value))


def is_missing(value: Any) -> bool:
    """Whether a label is None, NaN, or pandas' NA or NaT, which exist only where pandas has been imported."""
    if (pandas := sys.modules.get("pandas")) is not None and pandas.api.types.is_scalar(value):
        return bool(pandas.isna(value))
    return value is None or bool(np.isscalar(value) and value != value)  # NaN


def refuse_text(x: Any) -> None:
    """Raise for columns of text, dates or categories that had numbers at `fit`; the error names the column."""
    if isinstance(x, np.ndarray) and x.dtype.kind not in "OSUTmM":
        return
    table = table_of(x)
    for index in range(table.count if table is not None else 0):
        assert table is not None
        if table.categories(index) is not None:
            raise TreesError(
                f"X: {table.shown(index)} has the type {table.dtype(index)!s:.40}, and had numbers at fit; give the "
                "same columns"
            )
        kind = table.kind(index)
        values = table.cells(index) if kind == "O" else ()
        date = next((value for value in values if isinstance(value, DATES)), None)
        if kind == "M" or date is not None:
            raise TreesError(
                f"X: {table.shown(index)} has dates or times "
                f"({table.dtype(index) if date is None else type(date).__name__}), expected numbers; give what "
                "matters of them: days since a date, the month, the hour"
            )
        other = next((row for row, value in enumerate(values) if _is_no_number(value)), None)
        if table.names and other is not None:
            raise TreesError(
                f"X: {table.shown(index)} has {values[other]!r:.60} in row {other}, expected numbers; give a column "
                "for each part of it that is a number"
            )
        row = next((row for row, value in enumerate(values) if isinstance(value, (str, bytes))), None)
        if row is not None:
            raise TreesError(
                f"X: {table.shown(index)} has text, {values[row]!r:.60} in row {row}, expected numbers; name the "
                "column in categorical_features, and each text is a category"
            )
        pandas = sys.modules.get("pandas")
        row = next((row for row, value in enumerate(values) if pandas is not None and value is pandas.NA), None)
        if row is not None:
            raise TreesError(
                f"X: {table.shown(index)} has pandas.NA in row {row} of a column of objects, which is no number; "
                "X.convert_dtypes() gives the column a type of numbers"
            )
