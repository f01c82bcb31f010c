"""What `apply_fp8` decided: one row a layer, with the reason, and a table in which equal blocks share a line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bitplan.fp8.find_linears import Site
from bitplan.fp8.policy.choice import Fp8Choice

_SHOWN_REASON = 100


@dataclass(frozen=True)
class LayerRow:
    """One layer and what became of it. `tokens` counts rows of its product: for experts after topk."""

    path: str
    part: str
    kind: str
    name: str | None
    shape: tuple[int, int]
    precision: str
    recipe: str | None
    answer: str
    tokens: int | None
    speedup: float | None
    reason: str

    @classmethod
    def of(cls, site: Site, choice: Fp8Choice) -> LayerRow:
        apart = f"; its norm stays apart: {site.apart}" if choice and site.apart is not None else ""
        layer = (site.path, site.part, site.kind, site.name, site.shape)
        outcome = (choice.precision, choice.recipe if choice else None, choice.answer, choice.tokens, choice.speedup)
        return cls(*layer, *outcome, choice.reason + apart)


@dataclass(frozen=True)
class Confirmed:
    """A whole block, timed in turns with BF16: the speedup of what was taken, and its interval.

    `taken`: "plan", "all" (every layer of the block in FP8, where that was faster still) or "bf16".
    """

    block: str
    answer: str
    reason: str
    taken: str
    speedup: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Compared:
    """A block in FP8 beside its BF16 self, on random inputs: how far apart what they add to their input is, by norms.

    `kept`: "all" of FP8, "apart" (norms and activations stay the model's own code) or "bf16", beyond the bound.
    """

    block: str
    difference: float | None
    bound: float
    kept: str
    reason: str


@dataclass(frozen=True)
class AppliedFp8:
    """Every layer that was decided on, the blocks that were compared and confirmed, and notes."""

    rows: tuple[LayerRow, ...]
    left: tuple[str, ...] = ()
    confirmed: tuple[Confirmed, ...] = ()
    notes: tuple[str, ...] = ()
    compared: tuple[Compared, ...] = ()

    @property
    def fp8_layers(self) -> int:
        return sum(row.precision != "bf16" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """The table, with confirmations and notes below it."""
        lines = [f"{self.fp8_layers} of {len(self.rows)} layers in FP8", *_table(_grouped(self.rows))]
        if self.left:
            lines.append(f"left as they are: {_listed(self.left)}")
        lines += [f"compared {result.block}: {result.reason}" for result in self.compared]
        lines += [f"confirmed {result.block}: {result.answer}: {result.reason}" for result in self.confirmed]
        return "\n".join([*lines, *self.notes])


def _grouped(rows: Sequence[LayerRow]) -> list[dict[str, str]]:
    """Rows that differ only in the number of their block share a line."""
    groups: dict[tuple[Any, ...], tuple[LayerRow, int]] = {}
    for row in rows:
        key = (unnumbered(row.path), row.shape, row.precision, row.recipe, row.reason)
        first, count = groups.get(key, (row, 0))
        groups[key] = (first, count + 1)
    return [
        {
            "layer": unnumbered(row.path) if count > 1 else row.path,
            "count": str(count),
            "kind": row.kind,
            "shape": f"{row.shape[0]}x{row.shape[1]}",
            "tokens": str(row.tokens or "?"),
            "precision": row.precision,
            "recipe": row.recipe or "",
            "speedup": "" if row.speedup is None else f"{row.speedup:.2f}x",
            "why": row.reason if len(row.reason) <= _SHOWN_REASON else row.reason[: _SHOWN_REASON - 3] + "...",
        }
        for row, count in groups.values()
    ]


def unnumbered(text: str) -> str:
    """Paths with a star in the place of the numbers of blocks."""
    return re.sub(r"(^|\.)[0-9]+(?=[. ]|$)", r"\1*", text)


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    if not rows:
        return []
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    lines = [{key: key for key in rows[0]}, *rows]
    return ["  ".join(line[key].ljust(widths[key]) for key in line).rstrip() for line in lines]


def _listed(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(unnumbered(name) for name in names))
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
