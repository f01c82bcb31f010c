"""A plan as a mermaid flow chart: embedding, layers, final norm, unembedding.

Layers that agree are drawn once, as one box with their numbers; where the plan changes from layer to layer, each
run of equal layers has its own. The boxes within follow the flow of a decoder block, as names show it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby

from bitplan.plan.names import number_ranges, split_layer
from bitplan.text import visible

Boxes = dict[str, dict[str, list[str]]]  # box -> format -> parts

# The order of boxes in a decoder block; names that match none come last, in their own order.
_FLOW = tuple(
    re.compile(pattern)
    for pattern in (
        r"(attn\.norm|input_layernorm|attn_norm)",
        r"(qkv|[qkv]_proj|attn_[qkv]\b)",
        r"sinks",
        r"(attn\.out|o_proj|attn_output)",
        r"(mlp\.norm|post_attention_layernorm|ffn_norm)",
        r"(router|mlp\.gate$|moe\.gate$|block_sparse_moe\.gate$)",
        r"(mlp1|gate_up|gate_proj|up_proj|w1|w3|ffn_gate|ffn_up)",
        r"(mlp2|down_proj|w2|ffn_down)",
    )
)
_NORM = re.compile(r"norm")
_LAST = re.compile(r"(unembed|lm_head|^output$)")
_SUFFIX = re.compile(r"[._](weight|bias|blocks|scales|scale)$")


def draw(tensors: Mapping[str, tuple[str, str]]) -> str:
    """The chart's text, from (format, part of it or "") by tensor."""
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


class _Chart:
    """The lines so far, and the boxes that the next boxes follow."""

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
    """Consecutive layers with the same boxes, as one."""
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
    rank = next((rank for rank, pattern in enumerate(_FLOW) if pattern.search(box)), len(_FLOW))
    return rank, box if rank == len(_FLOW) else ""


def _quote(text: str) -> str:
    """A mermaid string: characters that could end it or be read as markup are written as entity codes."""
    return '"' + re.sub(r'["<>#`\\]', lambda match: f"#{ord(match[0])};", visible(text)) + '"'
