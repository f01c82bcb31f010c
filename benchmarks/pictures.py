"""The pictures of the docs that are drawn from results, as the tables are written from them (`tables.py`).

python benchmarks/pictures.py --write    draw each in its place
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from bitplan.report.chart import WIDE, Frame, colour, line, linear_axis, segment, text
from bitplan.report.markup import Markup, tag

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ARMS = {"bf16": "BF16", "adaptive": "adaptive FP8", "full": "all FP8"}
STYLE = """text { font: 12px sans-serif; fill: #333; } .name { font-weight: 600; }
.grid { stroke: #ddd; } .axis { stroke: #777; } .paper { fill: #fff; }
.line { fill: none; stroke: currentColor; stroke-width: 1.6; } .key { stroke: currentColor; stroke-width: 3; }
"""


def fp8_training_picture() -> str:
    """The training loss of every run, a colour for each arm."""
    path = RESULTS / "fp8_training_1b_nvidia_h200.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    curves = [
        (run["arm"], [(1 + run["every"] * at, loss) for at, loss in enumerate(run["losses"])]) for run in runs
    ] or [("not measured yet", [(0.0, 0.0)])]
    points = [point for _, curve in curves for point in curve]
    x = linear_axis([step for step, _ in points], "step", whole=True)
    y = linear_axis([loss for _, loss in points], "training loss")
    frame = Frame(x, y, "Training loss over steps, a line for each seed", width=WIDE, height=360)
    kinds = {arm: colour(index) for index, arm in enumerate(dict.fromkeys(arm for arm, _ in curves))}
    for arm, curve in reversed(curves):  # BF16 on top
        frame.add(line(frame, curve, kinds[arm]))
    for index, (arm, kind) in enumerate(kinds.items()):
        right, height = frame.width - 190.0, frame.top + 16.0 + 18 * index
        frame.add(segment((right, height - 4), (right + 22, height - 4), f"key {kind}"))
        seeds = sum(each == arm for each, _ in curves)
        frame.add(text((right + 30, height), ARMS.get(arm, arm) + (f" ({seeds} seeds)" if seeds > 1 else "")))
    return standalone(frame.svg())


def standalone(svg: Markup) -> str:
    """A file of its own: with the report's colours, on white."""
    page = (ROOT / "bitplan" / "report" / "page.css").read_text()
    colours = "".join(f".{name} {{ color: {value}; }}\n" for name, value in re.findall(r"--(k\d): (#\w+)", page))
    opening, rest = svg.split(">", 1)
    paper = tag("rect", width="100%", height="100%", class_="paper")
    return f'{opening} xmlns="http://www.w3.org/2000/svg">\n<style>{STYLE}{colours}</style>\n{paper}{rest}\n'


PICTURES = {"docs/fp8-training.svg": fp8_training_picture}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    for place, draw in PICTURES.items():
        (ROOT / place).write_text(draw())
