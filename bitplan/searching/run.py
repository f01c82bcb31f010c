"""search: evidence, the best plan for a goal, and the proof that it is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bitplan.measure.quality.perplexity import Quality, spread_windows
from bitplan.plan.plan import Plan
from bitplan.records import write_json
from bitplan.searching.decide.explain import explain_plan
from bitplan.searching.decide.rivals import RivalPlan, rivals_of, uniform_plans
from bitplan.searching.decide.solve import Solution, front, size_out_of_reach, solve
from bitplan.searching.errors import GoalError, SearchError
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.gather.collect import EVIDENCE, Stage, check_group, collect_evidence, no_stage, smallest_bytes
from bitplan.searching.gather.plan_meter import MeasuredPlan, PlanMeter, paired_difference, summary_of
from bitplan.searching.gather.subject import SearchSubject, subject_of
from bitplan.searching.goal import Goal
from bitplan.searching.targets import candidates, target_of

PLAN, FRONT = "plan.json", "front.json"
FRONT_DOCUMENT, FRONT_VERSION = "bitplan-front", 1
MOST_CORRECTIONS = 3
AGREES = 0.1  # predicted and measured within a tenth: nothing to correct
MOST_CHECKED = 6  # groups measured alone in a correction
WINDOWS, CHECKS, HELD_OUT = 24, 4, 12
LEAST_WINDOWS = 4


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

    @property
    def lost(self) -> bool:
        """Whether a plan that needs no search was better, and is handed over instead."""
        return self.winner.kind != "plan"

    @property
    def best_rival(self) -> MeasuredPlan | None:
        """The best of the plans that need no search."""
        return min((each for each in self.rivals if each.kind != "plan"), key=lambda each: each.kl.mean, default=None)

    def to_document(self) -> dict[str, Any]:
        """front.json."""
        evidence = self.evidence
        best = self.best_rival
        return {
            "document": FRONT_DOCUMENT,
            "version": FRONT_VERSION,
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
            "plan": self.winner.to_dict(evidence),
            "lost": self.lost,
            "against_best_rival": None if best is None else _against(self.winner, best),
            "measured": [each.to_dict(evidence) for each in self.rivals],
            "front": [{k: v for k, v in each.to_dict(evidence).items() if k != "choice"} for each in self.front],
            "uniform": [
                {
                    "label": each.label,
                    "bytes": evidence.nbytes(each.choice),
                    "bits": evidence.bits(evidence.nbytes(each.choice)),
                    "nats": evidence.predict(each.choice),
                }
                for each in uniform_plans(evidence)
            ],
            "heat": _heat(evidence, self.winner.choice),
        }

    def save(self, folder: Path) -> None:
        """plan.json and front.json; the evidence is there already."""
        self.plan.save(folder / PLAN)
        write_json(folder / FRONT, self.to_document())


def _against(winner: MeasuredPlan, rival: MeasuredPlan) -> dict[str, Any]:
    difference = paired_difference(winner, rival)
    return {
        "label": rival.label,
        "kl_difference": difference.mean,
        "interval": difference.interval and list(difference.interval),
    }


def _heat(evidence: SearchEvidence, choice: Mapping[str, str]) -> list[dict[str, Any]]:
    """A cell for every group: where it lies, what it got, what that costs, and what the smallest format would cost."""
    from bitplan.searching.groups import place_of

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


def search(
    model: Any,
    batches: Sequence[Tensor] | None = None,
    *,
    goal: Goal | Mapping[str, Any],
    text: str | None = None,
    held_out: Sequence[Tensor] | str | None = None,
    formats: Sequence[str] | None = None,
    target: str = "bitplan",
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
    device: str | None = None,
    context: int | None = None,
    windows: int = WINDOWS,
    out: str | Path | None = None,
    stage: Stage = no_stage,
) -> SearchResult:
    """Find the best plan for a model within a goal, and prove it on text that was not used to find it.

    model      an nn.Module that maps token ids [windows, length] to logits, or a path: a Hugging Face folder or GGUF
    batches    token ids, [length] or [windows, length]; or `text`, plain, where the model is a path
    goal       Goal(bits=4.5), or a mapping of its fields; several limits hold together
    held_out   other text, for the proof; without it the last quarter of the text is kept for that
    formats    candidates; all that `target` loads unless given
    out        a folder for evidence.json, plan.json and front.json; a stopped search goes on there
    """
    wanted = goal if isinstance(goal, Goal) else Goal(**goal)
    runtime = target_of(target)
    names = candidates(runtime, formats)
    subject, unscored, calibration, proof = _prepare(model, batches, text, held_out, keep, only, context)
    subject.fused = runtime.fused
    if device is not None:
        subject.model.to(device)
    _require_size(subject, wanted, names)
    statistics, checks, proof = _split_windows(calibration, proof, windows)
    folder = None if out is None else Path(out)
    evidence, meter = collect_evidence(
        subject,
        statistics,
        checks,
        names,
        folder=folder,
        unscored=unscored,
        near_bits=_near_bits(wanted, subject.numbers),
        rows=wanted.rows if wanted.faster is not None else None,
        stage=stage,
    )
    solution, corrections = solve_and_correct(evidence, wanted, meter, stage)
    if folder is not None:
        _save_corrected(evidence, folder)
    result = prove(evidence, wanted, solution, corrections, meter, proof, unscored, stage)
    if folder is not None:
        result.save(folder)
    return result


def _require_size(subject: SearchSubject, goal: Goal, formats: Sequence[str]) -> None:
    """A size that no plan has is refused before minutes are spent."""
    most, least = goal.most_bytes(subject.numbers), smallest_bytes(subject, formats)
    if most is not None and least > most:
        raise GoalError(size_out_of_reach(most, least, subject.numbers))


def solve_and_correct(
    evidence: SearchEvidence, goal: Goal, meter: PlanMeter, stage: Stage = no_stage
) -> tuple[Solution, int]:
    """Solve; where the plan's measured KL is not what was predicted, measure more groups alone and solve again.

    The text for this is that of the checks. Of all plans solved the one with the least measured KL is given.
    """
    tried: list[tuple[float, Solution]] = []
    with stage("correcting", MOST_CORRECTIONS + 1) as advance:
        for done in range(MOST_CORRECTIONS + 1):
            solution = solve(evidence, goal)
            if any(solution.choice == other.choice for _, other in tried):
                break
            measured = meter.kl(evidence, solution.choice, "the plan")
            tried.append((measured, solution))
            advance(1, "the plan")
            apart = sum(evidence.groups[name].nats(fmt) for name, fmt in solution.choice.items())
            agrees = apart > 0 and abs(measured / (apart * evidence.together) - 1) <= AGREES
            if done == MOST_CORRECTIONS or agrees:
                break
            _check_largest(evidence, solution, meter)
            apart = sum(evidence.groups[name].nats(fmt) for name, fmt in solution.choice.items())
            evidence.together = measured / apart if apart > 0 and measured > 0 else 1.0
    best = min(tried, key=lambda pair: pair[0])[1]
    nats, bound = evidence.predict(best.choice), solve(evidence, goal).bound  # by the evidence as it is now
    if goal.max_kl is not None and goal.most_bytes(evidence.numbers) is None and goal.faster is None:
        return replace(best, nats=nats), len(tried) - 1  # what was minimised is bytes
    return replace(best, nats=nats, bound=bound, gap=max(0.0, 1 - bound / nats) if nats > 0 else 0.0), len(tried) - 1


def _check_largest(evidence: SearchEvidence, solution: Solution, meter: PlanMeter) -> None:
    """Measure alone those groups of the plan whose damage is large and only predicted."""
    guessed = [name for name, fmt in solution.choice.items() if evidence.groups[name].formats[fmt].measured is None]
    guessed.sort(key=lambda name: -evidence.nats(name, solution.choice[name]))
    for name in guessed[:MOST_CHECKED]:
        check_group(evidence, name, meter, solution.choice[name])


def prove(
    evidence: SearchEvidence,
    goal: Goal,
    solution: Solution,
    corrections: int,
    meter: PlanMeter,
    windows: Sequence[Tensor],
    unscored: int,
    stage: Stage = no_stage,
) -> SearchResult:
    """Measure the plan and its rivals on held-out text; hand over the best that is within the goal."""
    judge = PlanMeter(meter.rounded, windows, unscored=unscored)
    rivals = rivals_of(evidence, solution.nbytes)
    with stage("proving", len(windows) * (3 + len(rivals))) as advance:

        def measured(rival: RivalPlan) -> MeasuredPlan:
            return judge.measured(evidence, rival, lambda count: advance(count, rival.label))

        reference = judge.reference(lambda count: advance(count, "the model itself"))
        floor = judge.noise_floor(lambda count: advance(count, "noise floor"))
        plan = measured(RivalPlan("searched plan", "plan", solution.choice))
        others = [measured(rival) for rival in rivals]
    limit = goal.most_bytes(evidence.numbers)
    allowed = [other for other in others if limit is None or other.nbytes <= limit] if goal.max_kl is None else []
    winner = min([plan, *allowed], key=lambda each: each.kl.mean)
    return SearchResult(
        explain_plan(evidence, winner.choice, rows=goal.rows if goal.faster is not None else None),
        evidence,
        goal,
        solution,
        front(evidence),
        winner,
        [plan, *others],
        reference,
        floor,
        corrections,
    )


def _prepare(
    model: Any,
    batches: Sequence[Tensor] | None,
    text: str | None,
    held_out: Sequence[Tensor] | str | None,
    keep: Sequence[str],
    only: Sequence[str],
    context: int | None,
) -> tuple[SearchSubject, int, list[Tensor], list[Tensor] | None]:
    if isinstance(model, nn.Module):
        if batches is None:
            raise SearchError("a model in memory is searched on batches of token ids; give them")
        if isinstance(held_out, str):
            raise SearchError("a model in memory has no tokenizer: held_out must be batches of token ids, got text")
        proof = None if held_out is None else _windows_of_batches(held_out)
        return subject_of(model, keep=keep, only=only), 1, _windows_of_batches(batches), proof
    from bitplan.runtime.causal_lm import load_causal_lm

    lm = load_causal_lm(model)
    subject = subject_of(lm, path=model, keep=keep, only=only)
    length = min(512, lm.positions or 512) if context is None else context
    lm.check_context(length)
    if batches is not None:
        calibration = _windows_of_batches(batches)
    elif text is not None:
        calibration = _whole(lm.windows(text, length))
    else:
        raise SearchError("a search needs text: --text FILE, or batches of token ids")
    proof = _whole(lm.windows(held_out, length)) if isinstance(held_out, str) else None
    proof = _windows_of_batches(held_out) if held_out is not None and proof is None else proof  # type: ignore[arg-type]
    return subject, len(lm.prefix), calibration, proof


def _whole(windows: Sequence[Tensor]) -> list[Tensor]:
    return [window for window in windows if len(window) == len(windows[0])]


def _windows_of_batches(batches: Sequence[Tensor]) -> list[Tensor]:
    return [row for batch in batches for row in (batch if batch.dim() == 2 else batch[None])]


def _split_windows(
    calibration: Sequence[Tensor], proof: Sequence[Tensor] | None, windows: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Windows for statistics, for checks, and for the proof: no window serves twice."""
    if len(calibration) < LEAST_WINDOWS:
        raise SearchError(
            f"the text has {len(calibration)} windows, and a search needs {LEAST_WINDOWS} or more, of which some are "
            "kept for the proof; give a longer text, or a shorter --context"
        )
    if proof is None:
        cut = max(LEAST_WINDOWS - 1, len(calibration) * 3 // 4)
        calibration, proof = calibration[:cut], calibration[cut:]
    checks = max(1, min(CHECKS, len(calibration) // 4))
    chosen = _spread(calibration, windows + checks)
    every = max(1, len(chosen) // checks)
    check_at = {index * every for index in range(checks)}
    statistics = [window for index, window in enumerate(chosen) if index not in check_at]
    return statistics, [chosen[index] for index in sorted(check_at)], _spread(proof, HELD_OUT)


def _spread(windows: Sequence[Tensor], count: int) -> list[Tensor]:
    return list(windows) if len(windows) <= count else spread_windows(windows, count * len(windows[0]))


def _near_bits(goal: Goal, numbers: int) -> float | None:
    most = goal.most_bytes(numbers)
    return None if most is None else 8 * most / numbers


def _save_corrected(evidence: SearchEvidence, folder: Path) -> None:
    """Corrections into the file, which may know formats that this search did not ask for."""
    known = SearchEvidence.load(folder / EVIDENCE)
    for name, group in evidence.groups.items():
        before = known.groups[name]
        known.groups[name] = replace(group, formats={**before.formats, **group.formats})
    known.together = evidence.together
    known.save(folder / EVIDENCE)
