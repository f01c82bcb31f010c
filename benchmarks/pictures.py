"""The pictures of the docs that are drawn from results, as `tables.py` writes tables: SVG in the style of a report.

python benchmarks/pictures.py --write    draw each in its place
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitplan.report.chart import WIDE, Axis, Frame, colour, line, linear_axis, log_axis, marker, segment, text
from bitplan.report.markup import Markup, join, tag

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ARMS = {"bf16": "BF16", "adaptive": "adaptive FP8", "full": "all FP8"}
# Contenders whose fastest counts, and how they are drawn: name, colour, shape of marker.
TRAINERS = {
    ("bitplan_i16",): ("bitplan i16", "k0", "circle"),
    ("bitplan_f32",): ("bitplan f32", "k5", "ring"),
    ("lightgbm_quantized_rows", "lightgbm_quantized_columns"): ("LightGBM, quantized", "k1", "square"),
    ("lightgbm_f32_rows",): ("LightGBM, F32", "k3", "up"),
    ("sklearn",): ("scikit-learn", "k2", "diamond"),
    ("xgboost",): ("XGBoost", "k4", "down"),
}
LIGHT = {"card": "#ffffff", "soft": "#566270", "grid": "#e7ebef"}
LIGHT |= {"k0": "#0072b2", "k1": "#d98c00", "k2": "#009e73", "k3": "#c8500a", "k4": "#b5628f", "k5": "#4aa6dc"}
DARK = {"card": "#171d24", "soft": "#9aa5b1", "grid": "#26303a"}
DARK |= {"k0": "#4ea3e8", "k1": "#f0a830", "k2": "#2fc09a", "k3": "#f07f4a", "k4": "#dc93bd", "k5": "#8fcdf2"}
WIDTH, HEIGHT, ENTRY = 640, 360, 17  # a line of the legend


def threads_picture() -> str:
    """Training time over threads: 1M x 28, 20 trees of 255 leaves."""
    runs = [run for run in _runs() if (run["rows"], run["features"]) == (10**6, 28)]
    named = _series(runs, lambda run: run["threads"], lambda run: run["train_s"])
    counts = sorted({run["threads"] for run in runs})
    across = Axis("threads", counts[0], counts[-1], tuple((float(count), str(count)) for count in counts), log=True)
    seconds = linear_axis([y for points in named.values() for _, y in points], "seconds", zero=True)
    return _draw(across, seconds, named, "Training time over threads, 1M rows of 28 features, 20 trees of 255 leaves")


def rows_picture() -> str:
    """Training time over rows: 28 features, 255 leaves, 16 threads, for each tree."""
    runs = [run for run in _runs() if (run["features"], run["leaves"], run["threads"]) == (28, 255, 16)]
    named = _series(runs, lambda run: run["rows"], lambda run: run["train_s"] / run["trees"] * 1e3)
    named = {name: points for name, points in named.items() if len(points) > 1}
    ticks = tuple((float(rows), f"{rows:,}") for rows in sorted({run["rows"] for run in runs}))
    across = Axis("rows", ticks[0][0], ticks[-1][0], ticks, log=True)
    times = log_axis([y for points in named.values() for _, y in points], "ms for each tree")
    return _draw(across, times, named, "Training time over rows, for each tree of 255 leaves, 28 features, 16 threads")


def _runs() -> list[dict[str, Any]]:
    path = RESULTS / "trees_threads_xeon_h200_host.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    return [run for run in runs if run.get("task", "binary") == "binary" and not run.get("seed")]


def _series(
    runs: list[dict[str, Any]], place: Callable[[dict[str, Any]], float], time: Callable[[dict[str, Any]], float]
) -> dict[str, list[tuple[float, float]]]:
    """By trainer, the time of its fastest variant at each place."""
    result: dict[str, list[tuple[float, float]]] = {}
    for contenders, (name, _, _) in TRAINERS.items():
        mine = [run for run in runs if run["contender"] in contenders]
        places = sorted({place(run) for run in mine})
        if places:
            result[name] = [(x, min(time(run) for run in mine if place(run) == x)) for x in places]
    return result


def _draw(across: Axis, up: Axis, named: dict[str, list[tuple[float, float]]], label: str) -> str:
    frame = Frame(across, up, label, width=WIDTH, height=HEIGHT, right=170)
    styles = {name: (kind, shape) for name, kind, shape in TRAINERS.values()}
    for place, (name, points) in enumerate(named.items()):
        kind, shape = styles[name]
        frame.add(line(frame, points, kind))
        frame.add(*(marker((frame.px(x), frame.py(y)), kind, f"{y:.3g}", shape) for x, y in points))
        left, top = WIDTH - frame.right + 20, frame.top + 12 + ENTRY * place
        frame.add(marker((left, top - 4), kind, name, shape), text((left + 12, top), name))
    return _standalone(frame.svg())


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
    "docs/fp8-training.svg": fp8_training_picture,
    "docs/trees-threads.svg": threads_picture,
    "docs/trees-rows.svg": rows_picture,
}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    for place, draw in PICTURES.items():
        (ROOT / place).write_text(draw())
