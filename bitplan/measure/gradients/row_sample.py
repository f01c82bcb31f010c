"""Samples rows that stand for all rows: unbiased, and the same on every machine and after a restart.

A sum over T rows (tokens), c_1 + ... + c_T, is estimated from n of them by T/n times their sum. The rows are cut into n
stretches of the same length, T/n, and one row of each is drawn with equal chances: so each row is drawn n/T times on
average, for any T and n, and the mean of the estimate is the sum. Its variance, where n divides T, is

    (T/n)^2 * (var_1 + ... + var_n)      var_h: the variance of the T/n numbers of stretch h

Where the numbers have random signs and nothing in common, that is T/n - 1 times the mean square of the sum itself.
Taking every fourth row instead would be wrong: it takes the same positions of every sequence, among them the first,
which is unlike all others.

The draw depends on the key and the sizes only; Python's generator is the same everywhere.
"""

from __future__ import annotations

import random


def sample_rows(count: int, most: int, key: str) -> list[int] | None:
    """`most` rows of `count`, in order, each with weight count / most; None: all rows (most 0, or not fewer)."""
    if not most or most >= count:
        return None
    draw = random.Random(f"{key} {count} {most}").random
    return [min(count - 1, int((at + draw()) * count / most)) for at in range(most)]
