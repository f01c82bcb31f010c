"""The pictures of the docs that are drawn from results, as `tables.py` writes tables: SVG in the style of a report.

python benchmarks/pictures.py --write    draw each in its place
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bitplan.report.chart import WIDE, Frame, colour, line, linear_axis, log_axis, marker, segment, text
from bitplan.report.markup import Markup, join, tag
from bitplan.report.read_records import RecordFields
from bitplan.report.section_of_fit import kl_frame

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ARMS = {"bf16": "BF16", "adaptive": "adaptive FP8", "full": "all FP8"}
LIGHT = {"card": "#ffffff", "soft": "#566270", "grid": "#e7ebef"}
LIGHT |= {"k0": "#0072b2", "k1": "#d98c00", "k2": "#009e73", "k3": "#c8500a", "k4": "#b5628f", "k5": "#4aa6dc"}
LIGHT |= {"k6": "#a89c10", "k7": "#6b7682"}
DARK = {"card": "#171d24", "soft": "#9aa5b1", "grid": "#26303a"}
DARK |= {"k0": "#4ea3e8", "k1": "#f0a830", "k2": "#2fc09a", "k3": "#f07f4a", "k4": "#dc93bd", "k5": "#8fcdf2"}
DARK |= {"k6": "#d9cf4a", "k7": "#9aa5b1"}
WIDTH, HEIGHT, ENTRY = 640, 360, 17  # a line of the legend


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
    frame = Frame(x, y, "Training loss over steps, a line for each seed", width=WIDE, height=HEIGHT)
    kinds = {arm: colour(index) for index, arm in enumerate(dict.fromkeys(arm for arm, _ in curves))}
    for arm, curve in reversed(curves):  # BF16 on top
        frame.add(line(frame, curve, kinds[arm]))
    for index, (arm, kind) in enumerate(kinds.items()):
        right, height = frame.width - 190.0, frame.top + 16.0 + 18 * index
        frame.add(segment((right, height - 4), (right + 22, height - 4), f"key {kind}"))
        seeds = sum(each == arm for each, _ in curves)
        frame.add(text((right + 30, height), ARMS.get(arm, arm) + (f" ({seeds} seeds)" if seeds > 1 else "")))
    return _standalone(frame.svg())


def search_picture() -> str:
    """KL against size: searched plans, llama.cpp's types, and uniform plans of ours, as points."""
    rows = json.loads((RESULTS / "search_gguf_lm26m.json").read_text())["rows"].values()
    kinds = {
        "searched": ("searched", "k3", "diamond"),
        "llama.cpp": ("llama.cpp, imatrix", "k1", "square"),
        "nearest": ("ours, to nearest", "k7", "ring"),
        "uniform": ("ours, compensated", "k0", "circle"),
    }
    shown = [(row["by"], row["tensor_bytes"] / 1e6, row["kl"]) for row in rows if row["by"] in kinds]
    across = linear_axis([size for _, size, _ in shown], "MB of tensors")
    up = log_axis([kl for _, _, kl in shown], "KL, nats a token")
    frame = Frame(across, up, "KL of files in llama.cpp against their size", width=WIDTH, height=HEIGHT, right=170)
    searched = sorted((size, kl) for by, size, kl in shown if by == "searched")
    frame.add(line(frame, searched, kinds["searched"][1]))
    for place, (by, (name, kind, shape)) in enumerate(kinds.items()):
        points = [(size, kl) for each, size, kl in shown if each == by]
        frame.add(*(marker((frame.px(x), frame.py(y)), kind, f"{name}: {y:.4f}", shape) for x, y in points))
        left, top = WIDTH - frame.right + 20, frame.top + 12 + ENTRY * place
        frame.add(marker((left, top - 4), kind, name, shape), text((left + 12, top), name))
    return _standalone(frame.svg())


def fit_picture() -> str:
    """KL against memory, of the last fit of the benchmark."""
    found = RecordFields(json.loads((RESULTS / "fit_lm26m_page.json").read_text())["fit"], "fit_lm26m_page.json")
    return _standalone(kl_frame(found, list(found.each("landscape")), "memory", "context").svg())


def _standalone(drawn: Markup) -> str:
    """A file of its own: a picture in a page of its own has no style sheet but this."""
    opening = '<svg xmlns="http://www.w3.org/2000/svg"'
    assert drawn.startswith("<svg ")
    return f"{opening}{drawn[4 : drawn.index('>') + 1]}{_style()}{drawn[drawn.index('>') + 1 :]}\n"


def _style() -> Markup:
    names = [name for name in LIGHT if name.startswith("k")]
    rules = [
        "text { font: 12px system-ui, sans-serif; fill: var(--soft); }",
        ".grid { stroke: var(--grid); } .axis { stroke: var(--soft); }",
        ".line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }",
        ".rule { stroke: var(--soft); stroke-dasharray: 4 4; } .thin { stroke-width: 1; opacity: .7; }",
        ".key { stroke: currentColor; stroke-width: 3; }",
        ".mark { fill: currentColor; stroke: var(--card); stroke-width: 1.2; }",
        ".mark.hollow { fill: var(--card); stroke: currentColor; stroke-width: 2; }",
        *(f".{name} {{ color: var(--{name}); }}" for name in names),
        f"svg {{ {_variables(LIGHT)} background: var(--card); }}",
        f"@media (prefers-color-scheme: dark) {{ svg {{ {_variables(DARK)} }} }}",
    ]
    return tag("style", join(map(Markup, rules), "\n"))


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


PICTURES = {
    "docs/search-kl.svg": search_picture,
    "docs/fit.svg": fit_picture,
    "docs/fp8-training.svg": fp8_training_picture,
}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    for place, draw in PICTURES.items():
        (ROOT / place).write_text(draw())
