"""What a search hands over, and its document front.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitplan.base.records import write_json
from bitplan.packed.language.perplexity import Quality
from bitplan.plan.plan import Plan
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.gather.plan_meter import MeasuredPlan, paired_difference, summary_of
from bitplan.searching.gather.timing import BlockTimes
from bitplan.searching.goal import Goal
from bitplan.searching.groups import place_of
from bitplan.searching.rivals import RivalPlan, uniform_plans
from bitplan.searching.solver import Solution

PLAN, FRONT = "plan.json", "front.json"
DOCUMENT = "bitplan-front"
VERSION = 1


@dataclass
class SearchResult:
    """The plan that is handed over, and everything that it rests on."""

    plan: Plan
    evidence: SearchEvidence
    goal: Goal
    solution: Solution
    front: list[Solution]
    winner: MeasuredPlan
    rivals: list[MeasuredPlan]
    reference: Quality
    noise_floor: Quality
    corrections: int
    unmeasured: list[RivalPlan] = field(default_factory=list)  # rivals that are predicted to lose
    times: BlockTimes | None = None  # with a speed goal: a whole block by the plan
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # of each phase: wall, cpu

    @property
    def lost(self) -> bool:
        """Whether a plan that needs no search was better, and is handed over instead."""
        return self.winner.kind != "plan"

    @property
    def why_lost(self) -> str | None:
        """Why a plan that needs no search is handed over; None where the searched one is."""
        if not self.lost:
            return None
        label, kl, most = self.winner.label, self.winner.kl.mean, self.goal.max_kl
        searched = next((each.kl.mean for each in self.rivals if each.kind == "plan"), None)
        if most is not None and searched is not None and searched > most:
            return (
                f"the searched plan has KL {searched:.4g} on text that was held out, above the goal of {most:g}; "
                f"{label}, which needs no search, has {kl:.4g}, and is the plan"
            )
        return f"{label}, which needs no search, is better and within the goal, and is the plan"

    @property
    def missed_goal(self) -> str | None:
        """What to say where the plan is farther from the model than was asked for, on text that was held out."""
        kl, most = self.winner.kl.mean, self.goal.max_kl
        if most is None or kl <= most:
            return None
        return f"KL {kl:.6g}, above the goal of {most:g}: give more bits or a higher limit"

    @property
    def best_rival(self) -> MeasuredPlan | None:
        """The best of the plans that need no search."""
        return min((each for each in self.rivals if each.kind != "plan"), key=lambda each: each.kl.mean, default=None)

    @property
    def better_beyond_goal(self) -> str | None:
        """What to say where a larger plan that needs no search is nearer to the model, which predictions denied."""
        best = self.best_rival
        if best is None or best.nbytes <= self.winner.nbytes or best.predicted <= self.winner.predicted:
            return None
        interval = paired_difference(self.winner, best).interval
        if interval is None or interval[0] <= 0:
            return None
        bits = self.evidence.bits(best.nbytes)
        more = 100 * (best.nbytes / self.winner.nbytes - 1)
        return (
            f"{best.label}, which needs no search, has KL {best.kl.mean:.4g} where the plan has "
            f"{self.winner.kl.mean:.4g}, with {more:.2g}% more bytes: predictions are wrong for this model; "
            f"a goal of {bits + 5e-4:.3f} bits would take it"
        )

    @property
    def unseen_experts(self) -> str | None:
        """What to say where no token of the text was sent to some experts."""
        count, whole = (self.evidence.text.get(key, 0) for key in ("unseen_experts", "experts"))
        if not count:
            return None
        return (
            f"no token of the text was sent to {count} of {whole} experts: they are rounded by what all experts of "
            "their layer got; give more text, or more windows of it"
        )

    def to_document(self) -> dict[str, Any]:
        """front.json."""
        evidence = self.evidence
        best = self.best_rival
        return {
            "document": DOCUMENT,
            "version": VERSION,
            "model": evidence.model,
            "goal": self.goal.to_dict(),
            "reference": {
                "bytes": evidence.reference_bytes,
                "bits": evidence.bits(evidence.reference_bytes),
                "perplexity": self.reference.perplexity,
                "tokens": self.reference.tokens,
                "windows": self.reference.windows,
            },
            "noise_floor": summary_of(self.noise_floor),
            "solution": self.solution.to_dict(evidence),
            "corrections": self.corrections,
            **({} if self.times is None else {"block_times": self.times.to_dict()}),
            "plan": self.winner.to_dict(evidence),
            "lost": self.lost,
            "why_lost": self.why_lost,
            "missed_goal": self.missed_goal,
            "better_beyond_goal": self.better_beyond_goal,
            "unseen_experts": self.unseen_experts,
            "against_best_rival": None if best is None else _against(self.winner, best),
            "measured": [each.to_dict(evidence) for each in self.rivals],
            "unmeasured": [_predicted(evidence, each) for each in self.unmeasured],
            "front": [{k: v for k, v in each.to_dict(evidence).items() if k != "choice"} for each in self.front],
            "uniform": [_predicted(evidence, each) for each in uniform_plans(evidence)],
            "heat": _heat(evidence, self.winner.choice),
            "seconds": self.seconds,
        }

    def save(self, folder: Path) -> None:
        """plan.json and front.json; the evidence is there already."""
        self.plan.save(folder / PLAN)
        write_json(folder / FRONT, self.to_document())


def _predicted(evidence: SearchEvidence, rival: RivalPlan) -> dict[str, Any]:
    nbytes = evidence.nbytes(rival.choice)
    return {
        "label": rival.label,
        "bytes": nbytes,
        "bits": evidence.bits(nbytes),
        "nats": evidence.predict(rival.choice),
    }


def _against(winner: MeasuredPlan, rival: MeasuredPlan) -> dict[str, Any]:
    difference = paired_difference(winner, rival)
    return {
        "label": rival.label,
        "kl_difference": difference.mean,
        "interval": difference.interval and list(difference.interval),
    }


def _heat(evidence: SearchEvidence, choice: Mapping[str, str]) -> list[dict[str, Any]]:
    """A cell for every group: where it lies, what it got, what that costs, and what the smallest format would cost."""
    cells = []
    for name, fmt in choice.items():
        layer, part = place_of(name)
        group = evidence.groups[name]
        smallest = min(group.formats, key=lambda each: group.formats[each].nbytes)
        cells.append(
            {
                "group": name,
                "layer": layer,
                "part": part,
                "format": fmt,
                "nats": evidence.nats(name, fmt),
                "bytes": group.formats[fmt].nbytes,
                "bits": 8 * group.formats[fmt].nbytes / group.numbers,
                "nats_in_smallest": evidence.nats(name, smallest),
                "smallest": smallest,
            }
        )
    return cells
