"""Do 95% intervals of KL hold what a fresh text gives? For docs/quality.md and the certificates of `bitplan quantize`.

python benchmarks/intervals.py --model FOLDER --text valid.txt --text wikitext2_valid.txt

A model in a format is measured against itself on the first windows of each text. Then, 100 times for each length, a
run of neighbouring windows stands for the text that a certificate is of, and another, which shares none with it, for
the text of whoever verifies it: is the second's KL within the first's interval, widened for the second's own error?
Sums of windows that were measured before, in the result file, are not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
from pathlib import Path
from typing import Any

import harness
import torch

from bitplan.base.records import read_json, read_text
from bitplan.packed.checkpoints.causal_lm import late_logits_of, load_causal_lm
from bitplan.packed.language.compare_on_text import morphed_twin, plan_for_model
from bitplan.packed.language.perplexity import clustered_mean, measure_perplexity

CONTEXT, FORMAT = 128, "mxfp4"
DRAWS, LENGTHS = 100, (32, 48, 64, 96)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--windows", type=int, default=700, help="of a text, at most")
    arguments = parser.parse_args()
    path = harness.RESULTS / f"intervals_{arguments.model.name}.json"
    known = {row["text_sha256"]: row for row in read_json(path)["rows"]} if path.exists() else {}
    rows = []
    for text in arguments.text:
        digest = hashlib.sha256(text.read_bytes()).hexdigest()
        sums = known[digest]["samples"] if digest in known else measured(arguments.model, text, arguments.windows)
        rows.append({"text": text.name, "text_sha256": digest, "coverage": coverage(sums), "samples": sums})
        print(text.name, *rows[-1]["coverage"], sep="\n")
    document = {
        "benchmark": "intervals",
        "machine": harness.machine("cpu"),
        "versions": harness.versions(),
        "settings": {"model": arguments.model.name, "format": FORMAT, "context": CONTEXT, "draws": DRAWS},
        "rows": rows,
    }
    harness.save(path.stem, document, None)


def measured(model: Path, text: Path, most: int) -> dict[str, list[float]]:
    """KL of each window, and its tokens."""
    lm = load_causal_lm(model)
    windows = lm.windows(read_text(text), CONTEXT)[:most]
    twin = morphed_twin(lm, plan_for_model(FORMAT, lm.model), scale_rule=None, pad=None)
    quality = measure_perplexity(late_logits_of(twin), windows, reference=late_logits_of(lm.model))
    return {key: quality.samples[key] for key in ("tokens", "kl")}


def coverage(sums: dict[str, list[float]]) -> list[dict[str, Any]]:
    """For each length of text: in how many of the draws the interval held what the other text gave."""
    draw = random.Random(0)
    kl, tokens = sums["kl"], [int(count) for count in sums["tokens"]]
    rows = []
    for length in LENGTHS:
        if 3 * length > len(kl):
            continue
        held, widths = 0, []
        for _ in range(DRAWS):
            first, second = draw.randrange(len(kl) - length + 1), draw.randrange(len(kl) - length + 1)
            while abs(first - second) < length:
                second = draw.randrange(len(kl) - length + 1)
            certified, fresh = (
                clustered_mean(kl[at : at + length], tokens[at : at + length]) for at in (first, second)
            )
            assert certified.half_width is not None
            held += abs(fresh.mean - certified.mean) <= math.sqrt(2) * certified.half_width
            widths.append(certified.half_width / certified.mean)
        rows.append({"windows": length, "held": held, "half_width_share": round(sum(widths) / len(widths), 4)})
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
