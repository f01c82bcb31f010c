"""What a search gains on a real language model: KL of searched plans beside uniform ones and heuristics, on one text.

python benchmarks/search.py --model FOLDER --text FILE --out FOLDER

Evidence is gathered once, into --out, where a stopped run goes on; each size is then solved and proven. `--plans 30`
also measures so many random plans: how well are they predicted? With `--inputs auto` these round inputs of some layers.
Rows are kept in the result file; the same command goes on.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import torch

from bitplan.base.records import read_json, read_text
from bitplan.formats.dispatch import decode, encode
from bitplan.packed.language.perplexity import measure_perplexity
from bitplan.searching import Goal, SearchOptions
from bitplan.searching.evidence import SearchEvidence, weight_format
from bitplan.searching.plan_meter import INPUT_MODES, PlanMeter, summary_of
from bitplan.searching.run import Searcher
from bitplan.searching.runtime_formats import candidates, target_of
from bitplan.searching.searched_model import prepare
from bitplan.searching.solver import uniform_plans

BITS = (3.5, 4.0, 4.5, 5.0, 6.0)


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation of pairs that are not tied: see `rank_of_plans`."""

    def ranks(values: list[float]) -> torch.Tensor:
        order = sorted(range(len(values)), key=values.__getitem__)
        found = torch.empty(len(values), dtype=torch.float64)
        found[torch.tensor(order)] = torch.arange(len(values), dtype=torch.float64)
        return found

    return float(torch.corrcoef(torch.stack((ranks(first), ranks(second))))[0, 1])


def rank_of_plans(pairs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Predicted and measured KL of plans, and their rank correlation; a plan that was drawn twice counts once."""
    distinct = sorted({(float(predicted), float(measured)) for predicted, measured in pairs})
    found: dict[str, Any] = {"pairs": [list(pair) for pair in pairs], "distinct": len(distinct)}
    if len(distinct) > 2:
        found["spearman"] = spearman([pair[0] for pair in distinct], [pair[1] for pair in distinct])
    return found


def random_plan(evidence: SearchEvidence, generator: random.Random) -> dict[str, str]:
    """Formats drawn for every group, from a random part of the list, so that plans differ in size as well.

    Where candidates round inputs, a random share of the groups does.
    """
    formats = list(dict.fromkeys(weight_format(name) for name in evidence.formats if name != "bfloat16"))
    low = generator.randrange(len(formats))
    high = generator.randrange(low, len(formats)) + 1
    share = generator.random()
    choice = {}
    for name, group in evidence.groups.items():
        fmt = generator.choice([fmt for fmt in formats[low:high] if fmt in group.formats] or list(group.formats))
        rounded = [other for other in group.formats if other != fmt and weight_format(other) == fmt]
        choice[name] = rounded[0] if rounded and generator.random() < share else fmt
    return choice


def nearest_rounding(meter: PlanMeter, evidence: SearchEvidence, choice: Mapping[str, str]) -> dict[str, Any]:
    """A plan with every weight rounded to nearest, as `encode` does."""
    subject = meter.rounded.subject
    weights = {
        name: decode(encode(subject.weight(name), weight_format(fmt)), torch.float32)
        for group, fmt in choice.items()
        for name in evidence.groups[group].tensors
    }
    return summary_of(
        measure_perplexity(lambda ids: subject.logits(ids, weights), meter.windows, reference=subject.logits)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="bitplan")
    parser.add_argument("--formats", default=None)
    parser.add_argument("--bits", type=float, nargs="*", default=BITS)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--context", type=int, default=None)
    parser.add_argument("--inputs", choices=INPUT_MODES, default="keep")
    parser.add_argument("--plans", type=int, default=0)
    parser.add_argument("--plans-to-nearest", action="store_true", help="random plans without statistics: seconds each")
    parser.add_argument("--all-rivals", action="store_true", help="also heuristics that are predicted to lose")
    parser.add_argument("--nearest", action="store_true", help="also uniform plans rounded to nearest")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = read_json(options.result) if options.result.exists() else {}
    found |= {"benchmark": "search", "model": options.model.name, "text": options.text.name}
    found |= {"machine": harness.machine("cpu"), "versions": harness.versions()}
    text = read_text(options.text)
    runtime = target_of(options.target)
    subject, cut = prepare(options.model, None, text, None, windows=options.windows, context=options.context)
    subject.aim_at(runtime)
    names = candidates(runtime, options.formats.split(",") if options.formats else None)
    how = SearchOptions(all_rivals=options.all_rivals, inputs=options.inputs)
    searcher = Searcher(subject, cut, names, options.out, how)
    for bits in options.bits:
        if str(bits) in found.get("searches", {}):
            continue
        document = searcher.find(Goal(bits=bits)).to_document()
        row = {
            key: document[key]
            for key in (
                "reference",
                "noise_floor",
                "solution",
                "corrections",
                "lost",
                "measured",
                "unmeasured",
                "seconds",
            )
        }
        row |= {"inputs": document["inputs"]} if "inputs" in document else {}
        found.setdefault("searches", {})[str(bits)] = row
        harness.save("search", found, options.result)
        print(f"{bits}: KL {document['plan']['kl']:.5f} at {document['plan']['bits']:.3f} bits", flush=True)
    evidence, _ = searcher.collect(Goal(bits=options.bits[0]))
    if options.nearest:
        rows = found.setdefault("nearest", {})
        for rival in uniform_plans(evidence):
            if rival.label not in rows and rival.label != "bfloat16":
                nbytes = evidence.nbytes(rival.choice)
                rows[rival.label] = {"bytes": nbytes, "bits": evidence.bits(nbytes)}
                rows[rival.label] |= nearest_rounding(searcher.judge, evidence, rival.choice)
                harness.save("search", found, options.result)
    generator = random.Random(0)
    pairs: list[list[float]] = []
    for index in range(options.plans):
        choice = random_plan(evidence, generator)
        measured = searcher.judge.measure(evidence, choice, f"random plan {index}", nearest=options.plans_to_nearest)
        assert measured.against is not None
        pairs.append([evidence.predict(choice), measured.against.kl.mean])
        found["random_plans"] = rank_of_plans(pairs)
        print(index, *pairs[-1], flush=True)
        harness.save("search", found, options.result)


if __name__ == "__main__":
    main()
