"""Holds what was quantized against its certificate: bytes, plan, the model it was made of, what was measured."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitplan.base.errors import BitplanError
from bitplan.files.certificate import byte_findings, has_formats_of, read_certificate, source_findings
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import PLAN, plan_digest
from bitplan.plan.check_manifest import Finding
from bitplan.plan.plan import Plan
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.explain import explain_plan
from bitplan.searching.goal import Goal, SearchError
from bitplan.searching.solver import plan_for, within


@dataclass
class Verification:
    """What does not hold, and what was looked at; `measured` has the KL of today beside the one that was certified."""

    findings: list[Finding] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    measured: dict[str, Any] | None = None


def verify_model(
    path: str | Path,
    *,
    source: str | Path | None = None,
    text: str | None = None,
    context: int | None = None,
    device: str = "cpu",
    on_windows: Callable[[int], Callable[[int, str], None]] | None = None,
) -> Verification:
    """Hold a folder or file that bitplan quantized against its certificate.

    source   the model that it was made of: its weights are hashed
    text     with a source: KL is measured again on this text, and must be within what was certified
    """
    target = Path(path)
    if text is not None and source is None:
        raise SearchError(f"{path}: KL is measured against the model it was made of", settings={"source": None})
    try:
        with ExitStack() as opened:
            text_inside = None if target.is_dir() else opened.enter_context(open_tensors(target)).certificate
        certificate = read_certificate(target, text_inside)
    except (BitplanError, UnicodeError) as error:
        return Verification([Finding("bytes", target.name, f"cannot be read: {error}")])
    if certificate is None:
        if source is None:
            return Verification(held=["it has no certificate: another program wrote it, or an earlier bitplan"])
        raise SearchError(f"{path}: has no certificate to hold against {source}; `bitplan quantize` writes one")
    result = Verification(byte_findings(target, certificate))
    result.held.append("every byte is as it was written" if not result.findings else "")
    _verify_plan(result, target, certificate)
    if source is not None:
        with open_tensors(source) as file:
            problems = source_findings(certificate, Path(source), file.files)
        result.findings += problems
        result.held.append("" if problems else f"{source} has the weights that were quantized")
    if text is not None and source is not None:
        _measure_again(result, target, Path(source), text, certificate, context, device, on_windows)
    result.held = [line for line in result.held if line]
    return result


def _verify_plan(result: Verification, target: Path, certificate: Mapping[str, Any]) -> None:
    """The plan is the one that was certified, and where a search found it, the one that its evidence gives."""
    where = PLAN if target.is_dir() and "plan" not in certificate else target.name
    try:
        if "plan" in certificate:
            plan = Plan.from_document(certificate["plan"], where=str(target))
            digest = plan_digest(plan)
        else:
            plan = Plan.load(target / PLAN)
            digest = hashlib.sha256((target / PLAN).read_bytes()).hexdigest()
    except (BitplanError, OSError) as error:
        result.findings.append(Finding("plan", where, f"cannot be read: {error}"))
        return
    if digest != certificate["plan_sha256"]:
        result.findings.append(Finding("plan", where, "is not the plan that was certified; write the model again"))
        return
    search = certificate["search"]
    if search is None or search.get("evidence") is None:
        result.held.append("the plan is the one that was certified; no search proved it")
        return
    evidence = SearchEvidence.from_document(search["evidence"], where=f"{target}: evidence in its certificate")
    given = dict(search["goal"])
    goal = Goal(nbytes=given.pop("bytes", None), **given)
    choice = plan_for(evidence, goal)
    if not has_formats_of(plan, explain_plan(evidence, choice)):
        result.findings.append(Finding("plan", where, f"its evidence gives another plan for {goal}; search again"))
    elif not within(evidence, goal, choice, search["measured"]["kl"]):
        result.findings.append(Finding("goal", where, f"the plan is not within its goal, {goal}"))
    else:
        result.held.append(f"the plan follows from its evidence, for {goal}")


def _measure_again(
    result: Verification,
    target: Path,
    source: Path,
    text: str,
    certificate: Mapping[str, Any],
    context: int | None,
    device: str,
    on_windows: Callable[[int], Callable[[int, str], None]] | None,
) -> None:
    from bitplan.packed.language.compare_on_text import TextSettings, compare_on_text

    settings = TextSettings(context=context, device=device)
    config = source if target.is_file() else None
    compared = compare_on_text(source, target, text, config=config, settings=settings, on_windows=on_windows)
    quality = compared.rows[0].quality
    assert quality.against is not None
    kl = quality.against.kl
    result.measured = {"kl": kl.to_dict(), "perplexity": quality.perplexity, "tokens": quality.tokens}
    certified = None if certificate["search"] is None else certificate["search"]["measured"]
    interval = None if certified is None else certified.get("kl_interval")
    if certified is None or interval is None:
        result.held.append(f"KL is {kl.mean:.4g} here; none was certified" + (" with an interval" if certified else ""))
        return
    # What two texts of the same kind may differ by: both have an error, each by its length.
    half = (interval[1] - interval[0]) / 2 * math.sqrt(1 + certified["tokens"] / quality.tokens)
    expected = f"{certified['kl']:.4g} +- {half:.2g} was to be expected of {quality.tokens} tokens"
    if kl.mean > certified["kl"] + half:
        result.findings.append(Finding("kl", target.name, f"KL is {kl.mean:.4g} on this text, and {expected}"))
    else:
        result.held.append(f"KL is {kl.mean:.4g} on this text; {expected}")
    result.measured["expected"] = [certified["kl"] - half, certified["kl"] + half]
