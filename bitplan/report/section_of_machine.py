"""Section of machines: where the figures come from, versions, and the files themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitplan.report.markup import Markup, join, nbytes, tag
from bitplan.report.read_records import Record
from bitplan.report.section import Cell, Column, Section, heading, table

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
    body = join([_fingerprints(stated), heading("Records"), _files(records)])
    return Section("machine", "Machine and records", body, summary)


def _fingerprints(stated: dict[str, dict[str, str]]) -> Markup:
    """One column for all records with the same fingerprint, so that differences stand out."""
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


def _files(records: Sequence[Record]) -> Markup:
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
