"""The page: one HTML file that contains its style and its script and loads nothing else.

The same records in the same order give the same bytes: no clock, no random name, no path of this machine. The content
security policy lets only this style and this script run, by their hashes: markup that slipped through could not act.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from bitplan.base import __version__
from bitplan.base.records import atomic_file, check_output
from bitplan.report.markup import Markup, join, nbytes, tag
from bitplan.report.read_records import Record, read_records
from bitplan.report.section import Cell, Column, Section, heading, table
from bitplan.report.section_of_fit import fit_section
from bitplan.report.section_of_plan import RECORDS, findings_section, plan_section, run_section
from bitplan.report.section_of_precision import precision_section, run_plan_section
from bitplan.report.section_of_quality import errors_section, quality_section
from bitplan.report.section_of_search import progress_section, search_section
from bitplan.report.section_of_speed import benchmark_section, speed_section
from bitplan.report.section_of_streaming import stream_section, training_section

# The sections in the order of the page, and the kinds of record that each one shows.
SECTIONS: tuple[tuple[tuple[str, ...], Callable[[Sequence[Record]], Section | None]], ...] = (
    (tuple(RECORDS), run_section),
    (("searching",), progress_section),
    (("search",), search_section),
    (("fit",), fit_section),
    (("plan",), plan_section),
    (("findings",), findings_section),
    (("quality",), quality_section),
    (("training",), training_section),
    (("run_plan",), run_plan_section),
    (("precision",), precision_section),
    (("stream",), stream_section),
    (("fp8_policy", "fp8_report", "crossover"), speed_section),
    (("drift", "calibration"), errors_section),
    (("demo", "benchmark"), benchmark_section),
)


def write_report(records: Iterable[str | Path], output: str | Path, *, title: str = "bitplan report") -> list[Section]:
    """Read records, write one HTML file, whole or not at all, and return its sections."""
    paths = list(records)
    check_output(output, inputs=paths)
    result = read_records(paths)
    sections = build_sections(result)
    with atomic_file(output) as file:
        file.write(build_page(sections, title=title).encode())
    return sections


def build_sections(records: Sequence[Record]) -> list[Section]:
    """A section for each kind of record that is present, and one for the machines and files that they come from."""
    sections = []
    for kinds, draw in SECTIONS:
        chosen = [record for record in records if record.kind in kinds]
        if chosen and (section := draw(chosen)) is not None:
            sections.append(section)
    if any(section.anchor in ("search", "fit") for section in sections):  # which has the plan's size, KL and perplexity
        same_plan = ("decisions", "quality")
        sections = [replace(one, facts=(), summary=()) if one.anchor in same_plan else one for one in sections]
    return [*sections, machine_section(records)]


def build_page(sections: Sequence[Section], *, title: str, stamp: str = "") -> str:
    """The document's text. With a stamp of its records it asks its server for theirs, and loads again for another."""
    style = _resource("page.css").replace("$DARK", _resource("dark.css"))
    scripts = [_resource("page.js"), *([_resource("live.js")] if stamp else [])]
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}; "
        "base-uri 'none'; form-action 'none'"
    )
    if stamp:
        policy += "; connect-src 'self'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"bitplan {__version__}"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the report", href="#top", class_="skip"),
        _bar(sections, title),
        tag("main", _summary(sections, title), *(_part(section) for section in sections), id="top"),
        tag("footer", f"Made by bitplan {__version__} from the records named above; nothing was measured again."),
        tag("div", id="tip", role="tooltip", hidden=True),
        *(tag("script", Markup(script)) for script in scripts),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en', data_stamp=stamp or None)}\n"


def _bar(sections: Sequence[Section], title: str) -> Markup:
    links = [tag("a", section.title, href=f"#{section.anchor}") for section in sections]
    button = tag("button", "Theme: auto", type="button", id="theme", hidden=True)
    return tag(
        "header", tag("a", title, href="#top", class_="brand"), tag("nav", *links, aria_label="Sections"), button
    )


def _summary(sections: Sequence[Section], title: str) -> Markup:
    parts = [_facts(section) for section in sections if section.facts]
    lines = [tag("li", line) for section in sections for line in section.summary]
    lead = next((section.lead for section in sections if section.lead), "")
    return tag(
        "section",
        tag("h1", title),
        tag("p", lead, class_="lead") if lead else "",
        tag("div", *parts, class_="parts") if parts else "",
        tag("ul", *lines, class_="summary-lines"),
        id="summary",
        aria_label="Summary",
    )


def _facts(section: Section) -> Markup:
    """The HTML of a section's key figures, under the section's name."""
    tiles = [
        tag("li", tag("b", fact.value), tag("span", fact.label), tag("small", fact.note) if fact.note else "")
        for fact in section.facts
    ]
    name = tag("a", section.title, href=f"#{section.anchor}")
    return tag("div", tag("p", name), tag("ul", *tiles, class_="facts"), class_=f"part n{min(len(tiles), 4)}")


def _part(section: Section) -> Markup:
    return tag("section", tag("h2", section.title), section.body, id=section.anchor)


@functools.cache
def _resource(name: str) -> str:
    return resources.files("bitplan.report").joinpath(name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ---- machines and records, which end every page ----------------------------------------------------------------------

_SOURCES = ("machine", "versions", "fingerprint")
_ORDER = (
    "gpu",
    "cpu",
    "cores",
    "system",
    "gpu_memory_gib",
    "driver",
    "cuda",
    "bitplan",
    "commit",
    "python",
    "torch",
    "triton",
)


def fingerprint_of(record: Record) -> dict[str, str]:
    """Machine and versions that a record states, the commit included; nothing is guessed."""
    content = record.content[0] if isinstance(record.content, list) and record.content else record.content
    if not isinstance(content, dict):
        return {}
    fingerprint: dict[str, Any] = {}
    for source in _SOURCES:
        if isinstance(content.get(source), dict):
            fingerprint |= content[source]
    if isinstance(fingerprint.get("versions"), dict):  # a calibration's fingerprint contains the versions
        fingerprint |= fingerprint.pop("versions")
    if fingerprint and isinstance(content.get("commit"), str):
        fingerprint["commit"] = content["commit"]
    return {str(key): str(value) for key, value in fingerprint.items() if isinstance(value, str | int | float)}


def machine_section(records: Sequence[Record]) -> Section:
    stated = {record.name: fingerprint for record in records if (fingerprint := fingerprint_of(record))}
    machines = sorted(
        {(fingerprint.get("gpu") or fingerprint.get("cpu") or "") for fingerprint in stated.values()} - {""}
    )
    summary: tuple[object, ...] = ()
    if len(machines) > 1:
        names = ", ".join(machines)
        summary = (f"The records come from different machines: {names}. Do not compare times across them.",)
    elif machines:
        summary = (f"Measured on {machines[0]}.",)
    body = join([_fingerprints(stated), heading("Records"), _record_files(records)])
    return Section("machine", "Machine and records", body, summary)


def _fingerprints(stated: dict[str, dict[str, str]]) -> Markup:
    """Draw one column for all records with the same fingerprint, so that differences stand out."""
    if not stated:
        return tag("p", "No record states the machine it comes from.", class_="note")
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, fingerprint in stated.items():
        groups.setdefault(tuple(sorted(fingerprint.items())), []).append(name)
    keys = {key for group in groups for key, _ in group}
    ordered = [key for key in _ORDER if key in keys] + sorted(keys - set(_ORDER))
    columns = [Column("What"), *(Column(", ".join(names)) for names in groups.values())]
    rows = []
    for key in ordered:
        values = [dict(group).get(key, "") for group in groups]
        differs = len({value for value in values if value}) > 1
        cells = [Cell(tag("b", value) if differs and value else value) for value in values]
        rows.append([Cell(key.replace("_", " ")), *cells])
    note = tag("p", "Bold: the records differ.", class_="note") if len(groups) > 1 else Markup("")
    return join([table("machine and versions", columns, rows), note])


def _record_files(records: Sequence[Record]) -> Markup:
    columns = (Column("File", mono=True), Column("Kind"), Column("Bytes", numeric=True), Column("SHA-256", mono=True))
    rows = [
        [
            Cell(record.name),
            Cell(record.label),
            Cell(nbytes(record.nbytes), float(record.nbytes)),
            Cell(tag("span", record.sha256[:16], title=record.sha256)),
        ]
        for record in records
    ]
    return table("records of this report", columns, rows)
