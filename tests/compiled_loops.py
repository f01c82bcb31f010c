"""Weights as small as those of tests go through the loops of larger ones, in a tenth of plain torch's time.

Encoding gives the same bits, rounding numbers as good (tests/formats/gguf/test_cpu_search.py, tests/rounding). Tests of
the loops in torch set `SMALLEST_FOR_CPU` themselves. A module, or a folder's conftest.py, imports `compiled_loops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bitplan.formats import dispatch
from bitplan.rounding import round_columns


@pytest.fixture(scope="module", autouse=True)
def compiled_loops() -> Iterator[pytest.MonkeyPatch]:
    """A test of what small weights take by themselves undoes it, for the rest of its module."""
    real = dispatch._explain

    def explain(table: str, *given: Any) -> dispatch.Picked:
        with dispatch.parts_of(dispatch.SMALLEST_FOR_CPU if table == "ENCODERS" else 0):
            return real(table, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_explain", explain)
        patch.setattr(round_columns, "SMALLEST_FOR_CPU", 1)
        yield patch
