"""A model card for a folder that bitplan wrote: README.md with the fields that Hugging Face reads, and a picture.

Both are made from the folder's certificate and plan (`files.certificate`). A card that somebody else wrote stays.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bitplan.base.errors import BitplanError
from bitplan.base.records import read_bytes
from bitplan.plan.names import natural_order, split_layer
from bitplan.plan.plan import Plan

CARD, PICTURE = "README.md", "bitplan_plan.svg"
_BY_US = "<!-- written by bitplan: quantizing into this folder again replaces this page -->"
# Fields of a model's own card that hold for the quantized model as well.
_CARD_FIELDS = ("license", "license_name", "license_link", "language", "pipeline_tag")
# For each target of `files.engines`, and for packed folders: library_name, a tag, and how to load the folder.
_TRANSFORMERS = "from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained(FOLDER"
_LIBRARIES = {
    "bitplan": ("transformers", "bitplan", f"import bitplan.transformers\n{_TRANSFORMERS})"),
    "compressed-tensors": ("transformers", "compressed-tensors", f"{_TRANSFORMERS})"),
    "torchao": ("transformers", "torchao", f'{_TRANSFORMERS}, dtype="auto")'),
    "mlx": ("mlx", "mlx", "from mlx_lm import load\n\nmodel, tokenizer = load(FOLDER)"),
    "hf": ("transformers", "safetensors", f"{_TRANSFORMERS})"),
}


def is_card_of_ours(path: Path) -> bool:
    """Whether a README.md may be replaced: there is none, or bitplan wrote it."""
    try:
        return not path.exists() or _BY_US in read_bytes(path, what="model card").decode(errors="replace")
    except BitplanError:
        return False


def write_card(folder: Path, plan: Plan, certificate: Mapping[str, Any], source: Path | None, target: str) -> None:
    """Write README.md and its picture; `source` has the model's own card, `target` is for whom the folder is."""
    card = model_card(plan, certificate, None if source is None else source / CARD, target)
    (folder / CARD).write_text(card, encoding="utf-8")
    (folder / PICTURE).write_text(draw_plan(plan, certificate["search"]), encoding="utf-8")


def base_model(source: Path, config: Mapping[str, Any]) -> str:
    """A model's repository where its config or its place in Hugging Face's cache names one, else its folder's name."""
    name = config.get("_name_or_path")
    if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    path = source.resolve()
    cached = next((part for part in reversed(path.parts) if part.startswith("models--")), None)
    return path.name if cached is None else "/".join(cached.split("--")[1:])


def model_card(plan: Plan, certificate: Mapping[str, Any], theirs: Path | None, target: str = "bitplan") -> str:
    """Hugging Face's fields, sizes by format, the picture, and what was measured."""
    library, tag, code = _LIBRARIES[target]
    source = certificate["source"]
    fields = [f"base_model: {json.dumps(source.get('base_model', source['name']))}"]
    fields += ["base_model_relation: quantized", f"library_name: {library}"]
    fields += ["tags:", *(f"- {name}" for name in dict.fromkeys(("bitplan", "quantized", tag)))]
    fields += [] if theirs is None else _fields_of(theirs)
    counts, sizes = Counter[str](), Counter[str]()
    for entry in plan.entries.values():
        fmt = entry.stored or entry.choice.format
        counts[fmt], sizes[fmt] = counts[fmt] + 1, sizes[fmt] + entry.nbytes
    total = max(1, sizes.total())
    rows = [
        f"| {fmt} | {counts[fmt]} | {nbytes / 1e6:,.2f} | {nbytes / total:.1%} |" for fmt, nbytes in sizes.most_common()
    ]
    check = (
        "`bitplan verify FOLDER` holds it against `bitplan_evidence.json`: what it was made of, with what, and where."
    )
    lines = [
        *("---", *fields, "---", "", _BY_US, "", f"# {source['name']}, quantized by bitplan", ""),
        *(f"{sizes.total() / 1e6:,.2f} MB of weights:", ""),
        *("| format | tensors | MB | share |", "|---|---|---|---|", *rows, ""),
        *(f"![Bytes of every layer by format]({PICTURE})", "", *_measured(certificate["search"]), ""),
        *("```python", code, "```", "", check, ""),
    ]
    return "\n".join(lines)


def _measured(search: Mapping[str, Any] | None) -> list[str]:
    if search is None:
        return ["Its distance from the model was not measured: `bitplan judge MODEL FOLDER --text FILE` does."]
    facts, interval = search["measured"], search["measured"].get("kl_interval")
    between = "" if not interval else f" ({interval[0]:.4g} to {interval[1]:.4g})"
    return [
        f"On {facts['tokens']} tokens that were held out: KL from the model {facts['kl']:.4g}{between} nats a token, "
        f"perplexity {facts['perplexity']:.4g}, same top token {facts['top1_agreement']:.2%}."
    ]


def _fields_of(card: Path) -> list[str]:
    """The lines of a model's own card that hold for what was made of it, as they are there."""
    if not card.is_file():
        return []
    lines = read_bytes(card, what="model card").decode(errors="replace").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return []
    kept, is_wanted = [], False
    for line in lines[1 : lines.index("---", 1)]:
        if line[:1] not in (" ", "-", "#", ""):
            is_wanted = line.partition(":")[0] in _CARD_FIELDS
        if is_wanted and line.strip():
            kept.append(line)
    return kept


# ---- the picture -----------------------------------------------------------------------------------------------------

_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#6b7280")
_WIDTH, _HEIGHT, _LEFT, _TOP = 760, 150, 70, 34  # of a panel, in units of the picture
_REST = "other"


def draw_plan(plan: Plan, search: Mapping[str, Any] | None) -> str:
    """An SVG picture: megabytes of every layer by format, and where a search gives it, the damage of every layer."""
    layers: dict[str, Counter[str]] = {}
    for name, entry in plan.entries.items():
        layers.setdefault(_layer_of(name), Counter())[entry.stored or entry.choice.format] += entry.nbytes
    order = [*natural_order([layer for layer in layers if layer != _REST]), *([_REST] if _REST in layers else [])]
    totals = sum(layers.values(), Counter[str]())
    colours = {fmt: _COLOURS[at % len(_COLOURS)] for at, (fmt, _) in enumerate(totals.most_common())}
    bytes_of = [[(colours[fmt], layers[layer][fmt] / 1e6) for fmt in totals if layers[layer][fmt]] for layer in order]
    marks = _panel("MB by layer and format", order, bytes_of, _TOP)
    nats = None if search is None else search.get("nats_by_layer")
    bottom = _TOP + _HEIGHT + 30
    if nats:
        damage = [[(_COLOURS[-1], max(0.0, nats.get(layer, 0.0)))] for layer in order]
        marks += _panel("predicted KL by layer, nats", order, damage, bottom + 24)
        bottom += _HEIGHT + 54
    left = _LEFT
    for fmt, colour in colours.items():
        label = f"{fmt} ({totals[fmt] / max(1, totals.total()):.0%})"
        if left + 7 * len(label) > _WIDTH - 20 and left > _LEFT:
            left, bottom = _LEFT, bottom + 20
        marks.append(f'<rect x="{left}" y="{bottom}" width="11" height="11" fill="{colour}"/>')
        marks.append(f'<text x="{left + 16}" y="{bottom + 10}">{escape(label)}</text>')
        left += 30 + 7 * len(label)
    height = bottom + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12" fill="#1f2937"'
    background = f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join(
        [f'{head} role="img" {style}>', "<title>Formats of every layer</title>", background, *marks, "</svg>\n"]
    )


def _layer_of(name: str) -> str:
    return split_layer(name)[1] or _REST


def _panel(title: str, names: Sequence[str], stacks: Sequence[Sequence[tuple[str, float]]], top: int) -> list[str]:
    """Stacked bars, one of each name, with a scale of three lines."""
    highest = max((sum(size for _, size in stack) for stack in stacks), default=0.0) or 1.0
    step = (_WIDTH - _LEFT - 20) / max(1, len(names))
    every = max(1, round(28 / step))  # names that fit side by side
    marks = [f'<text x="{_LEFT}" y="{top - 12}" font-weight="bold">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = top + _HEIGHT * (1 - share)
        marks.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d1d5db"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{highest * share:.3g}</text>')
    for at, (name, stack) in enumerate(zip(names, stacks, strict=True)):
        x, y = _LEFT + step * (at + 0.1), float(top + _HEIGHT)
        for colour, size in stack:
            high = _HEIGHT * size / highest
            y -= high
            marks.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.8 * step:.1f}" height="{high:.1f}" fill="{colour}"/>'
            )
        if name == _REST or (at % every == 0 and (names[-1] != _REST or len(names) - at > every)):
            marks.append(
                f'<text x="{x + 0.4 * step:.1f}" y="{top + _HEIGHT + 16}" text-anchor="middle">{escape(name)}</text>'
            )
    return marks
