"""Holds what was quantized against its certificate: bytes, plan, the model it was made of, what was measured."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bitplan.base.errors import BitplanError, Finding
from bitplan.base.records import read_json
from bitplan.files.certificate import (
    EVIDENCE_FILE,
    byte_findings,
    has_formats_of,
    is_sealed,
    read_certificate,
    search_folder,
    source_findings,
)
from bitplan.files.headers import is_gguf
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import PLAN, plan_digest
from bitplan.files.quantize_files import quantize_file
from bitplan.plan.plan import PLAN_NAME, Plan
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.explain import explain_plan
from bitplan.searching.goal import Goal, SearchError
from bitplan.searching.solver import plan_for, within


@dataclass
class Verification:
    """What does not hold, and what was looked at; `measured` has the KL of today beside the one that was certified.

    has_weights   a search's folder has a plan for the weights of others
    has_all_bytes a certificate is of every byte
    """

    findings: list[Finding] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    measured: dict[str, Any] | None = None
    has_weights: bool = True
    has_all_bytes: bool = False


def verify_model(
    path: str | Path,
    *,
    source: str | Path | None = None,
    text: str | Mapping[str, str] | None = None,
    context: int | None = None,
    device: str = "cpu",
    on_windows: Callable[[int], Callable[[int, str], None]] | None = None,
) -> Verification:
    """Hold a folder or file that bitplan quantized against its certificate.

    source   the model that it was made of: its weights are hashed
    text     with a source: KL is measured again on this text, and must be within what was certified
    """
    target, parts = Path(path), [Path(path)]
    if not target.exists():
        raise SearchError(f"{path}: no such file or folder")
    if target.is_file() and (target.parent / EVIDENCE_FILE).is_file():  # a file of a folder that has one for all
        target = target.parent
    if text is not None and source is None:
        raise SearchError(f"{path}: KL is measured against the model it was made of", settings={"source": None})
    try:
        with ExitStack() as opened:
            text_inside = None
            if not target.is_dir():
                file = opened.enter_context(open_tensors(target))
                text_inside, parts = file.certificate, file.files
        certificate = read_certificate(target, text_inside)
    except (BitplanError, UnicodeError) as error:
        return Verification([Finding("bytes", target.name, f"cannot be read: {error}")])
    if certificate is None:
        if source is None:
            doubts = ["it has no certificate: `save_packed` and other programs write none, or it was removed"]
            return Verification(held=doubts, has_weights=not target.is_dir() or search_folder(target) is None)
        raise SearchError(f"{path}: has no certificate to hold against {source}; `bitplan quantize` writes one")
    holder = target / EVIDENCE_FILE if target.is_dir() else parts[0]
    if not is_sealed(holder, certificate):
        return Verification([Finding("bytes", holder.name, "other bytes than were written; copy or write it again")])
    result = Verification(byte_findings(target, certificate, parts), has_all_bytes=True)
    result.has_weights = not target.is_dir() or search_folder(target) is None
    result.held.append("every byte is as it was written" if not result.findings else "")
    if result.has_weights or not result.findings:
        _verify_plan(result, target, certificate)
    if source is not None and not certificate["source"]["files"]:
        result.held.append(f"it was saved from memory: that its weights were those of {source} is not certified")
    elif source is not None:
        with open_tensors(source) as file:
            problems = source_findings(certificate, Path(source), file.files)
        result.findings += problems
        result.held.append("" if problems else f"{source} has the weights that were quantized")
    if text is not None and source is not None:
        _measure_again(result, target, Path(source), text, certificate, context, device, on_windows)
    result.held = [line for line in result.held if line]
    return result


def _verify_plan(result: Verification, target: Path, certificate: Mapping[str, Any]) -> None:
    """Check that a plan is the certified one and, where a search found it, what its evidence gives."""
    beside = PLAN if result.has_weights else PLAN_NAME
    where = beside if target.is_dir() and "plan" not in certificate else target.name
    try:
        if "plan" in certificate:
            plan = Plan.from_document(certificate["plan"], where=str(target))
            digest = plan_digest(plan)
        else:
            plan = Plan.load(target / beside)
            digest = hashlib.sha256((target / beside).read_bytes()).hexdigest()
    except (BitplanError, OSError) as error:
        result.findings.append(Finding("plan", where, f"cannot be read: {error}"))
        return
    if digest != certificate["plan_sha256"]:
        result.findings.append(Finding("plan", where, "is not the plan that was certified; write the model again"))
        return
    search = certificate["search"]
    document = None if search is None else search["evidence"]
    if not result.has_weights:
        document = read_json(target / "evidence.json")
    if search is None or document is None:
        result.held.append("the plan is the one that was certified; no search proved it")
        return
    evidence = SearchEvidence.from_document(document, where=f"{target}: evidence of its certificate")
    settings = dict(search["goal"])
    goal = Goal(nbytes=settings.pop("bytes", None), **settings)
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
    text: str | Mapping[str, str],
    certificate: Mapping[str, Any],
    context: int | None,
    device: str,
    on_windows: Callable[[int], Callable[[int, str], None]] | None,
) -> None:
    from bitplan.packed.language.compare_on_text import TextSettings, compare_on_text

    settings = TextSettings(context=context, device=device)
    with ExitStack() as opened:
        candidate = target
        if not result.has_weights:  # a search's folder: its plan is applied, with its statistics
            scratch = Path(opened.enter_context(TemporaryDirectory(prefix="bitplan-")))
            candidate = scratch / f"{source.stem}{'.gguf' if is_gguf(source) else '.safetensors'}"
            evidence = target / "evidence.safetensors"
            quantize_file(source, candidate, Plan.load(target), evidence=evidence if evidence.is_file() else None)
        config = source if candidate.is_file() and not is_gguf(candidate) else None
        compared = compare_on_text(source, candidate, text, config=config, settings=settings, on_windows=on_windows)
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
