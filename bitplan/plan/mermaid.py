"""Mermaid flow charts: of a plan (embedding, layers, final norm, unembedding), and of what a model computes.

Layers that agree are drawn once, as one box with their numbers; where the plan changes from layer to layer, each
run of equal layers has its own. The boxes within follow the flow of a decoder block, as names show it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby

from bitplan.base.errors import visible
from bitplan.plan.names import number_ranges, split_layer
from bitplan.plan.structure.families import row_of
from bitplan.plan.structure.model_view import ModelView

Boxes = dict[str, dict[str, list[str]]]  # box -> format -> parts

# The order of boxes in a decoder block, by role; others come last, in their own order.
_FLOW = {
    role: rank
    for rank, roles in enumerate(
        (
            ("attention_norm",),
            ("query", "key", "value", "qkv"),
            ("sinks",),
            ("attention_output",),
            ("mlp_norm",),
            ("router",),
            ("gate", "up", "gate_up"),
            ("down",),
        )
    )
    for role in roles
}
_NORM = re.compile(r"norm")
_LAST = re.compile(r"(unembed|lm_head|^output$)")
_SUFFIX = re.compile(r"[._](weight|bias|blocks|scales|scale)$")


def draw(tensors: Mapping[str, tuple[str, str]]) -> str:
    """Draw a mermaid chart of a plan; `tensors` maps names to (format, the part of it that they hold or "")."""
    outer: Boxes = {}
    layers: dict[tuple[str, str], Boxes] = {}
    for name, (fmt, part) in tensors.items():
        before, number, after = split_layer(name)
        boxes = layers.setdefault((before, number), {}) if number else outer
        parts = boxes.setdefault(_box(after[1:] if number else name), {}).setdefault(fmt, [])
        if part and part not in parts:
            parts.append(part)
    chart = _Chart()
    for box in sorted(outer, key=_outer_rank):
        if _outer_rank(box) == 0:
            chart.add([box], outer)
    for index, (title, boxes) in enumerate(_runs(layers)):
        chart.lines.append(f"  subgraph L{index}[{_quote(title)}]")
        for _, group in groupby(sorted(boxes, key=_flow_rank), key=_flow_rank):
            chart.add(list(group), boxes, indent="    ")
        chart.lines.append("  end")
    for box in sorted(outer, key=_outer_rank):
        if _outer_rank(box) > 0:
            chart.add([box], outer)
    return "\n".join(["graph TD", *chart.lines, *chart.arrows]) + "\n"


def draw_view(view: ModelView) -> str:
    """The parts of a view with arrows from those that feed them; blocks that compute the same are drawn once."""
    rows = view.shown_parts()
    number_of = {part.step: number for number, (_, part) in enumerate(rows)}
    lines = [f"  N{number}[{_quote(f'{name}: {part.what}')}]" for number, (name, part) in enumerate(rows)]
    arrows = [
        f"  N{number_of[before]} --> N{number_of[part.step]}"
        for _, part in rows
        for before in view.fed_by.get(part.step, ())
        if before in number_of
    ]
    return "\n".join(["graph TD", *lines, *arrows]) + "\n"


class _Chart:
    """A mermaid chart while it is drawn: its lines, and the boxes to which the next are connected."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.arrows: list[str] = []
        self.last: list[str] = []
        self.count = 0

    def add(self, names: list[str], boxes: Boxes, indent: str = "  ") -> None:
        """Add boxes side by side, each with an arrow from all boxes before."""
        added = []
        for name in names:
            added.append(f"N{self.count}")
            self.count += 1
            self.lines.append(f"{indent}{added[-1]}[{_quote(_text(name, boxes[name]))}]")
        self.arrows += [f"  {before} --> {after}" for before in self.last for after in added]
        self.last = added


def _runs(layers: dict[tuple[str, str], Boxes]) -> list[tuple[str, Boxes]]:
    """Join consecutive layers that have the same boxes."""
    runs: list[tuple[str, list[str], Boxes]] = []
    for (before, number), boxes in layers.items():
        if runs and runs[-1][0] == before and runs[-1][2] == boxes:
            runs[-1][1].append(number)
        else:
            runs.append((before, [number], boxes))
    return [(f"{before.rstrip('.')} {number_ranges(numbers)}", boxes) for before, numbers, boxes in runs]


def _box(name: str) -> str:
    """Weight, bias, blocks and scales of one module share a box, and so do the experts of a layer."""
    name = re.sub(r"\.[0-9]+(?=\.)", ".[*]", name)
    shorter = _SUFFIX.sub("", name)
    return _SUFFIX.sub("", shorter) if shorter != name else name


def _text(box: str, formats: dict[str, list[str]]) -> str:
    return f"{box}: {', '.join(' '.join([name, '+'.join(parts)]).rstrip() for name, parts in formats.items())}"


def _outer_rank(box: str) -> int:
    """0 before the layers, then the final norm, then the unembedding."""
    return 2 if _LAST.search(box) else 1 if _NORM.search(box) else 0


def _flow_rank(box: str) -> tuple[int, str]:
    """Boxes of equal rank stand side by side; unknown boxes follow one another."""
    row = row_of(box)
    rank = _FLOW.get(row.role if row is not None else "", len(_FLOW))
    return rank, box if rank == len(_FLOW) else ""


def _quote(text: str) -> str:
    """A mermaid string: characters that could end it or be read as markup are written as entity codes."""
    return '"' + re.sub(r'["<>#`\\]', lambda match: f"#{ord(match[0])};", visible(text)) + '"'
