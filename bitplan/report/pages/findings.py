"""Section of findings: what checks reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitplan.report.figures import plural
from bitplan.report.markup import Markup, join, tag
from bitplan.report.read_records import Record, RecordFields
from bitplan.report.section import Cell, Column, Fact, Section, source, table

COLUMNS = (Column("Code", choose=True), Column("Where", mono=True), Column("Finding", wide=True))


def findings_section(records: Sequence[Record]) -> Section:
    bodies, summary, total = [], [], 0
    for record in records:
        items = [RecordFields(item, f"{record.name}: [{index}]") for index, item in enumerate(record.content)]
        rows = [[Cell(item.text("code")), Cell(item.text("where")), Cell(item.text("message"))] for item in items]
        total += len(rows)
        clean = tag("p", tag("b", "No findings."), " The manifest and the checkpoint agree.")
        shown: Markup = table(f"findings of {record.name}", COLUMNS, rows) if rows else clean
        bodies.append(join([source(record), shown]))
        summary.append(_summary(record, Counter(item.text("code") for item in items)))
    return Section("findings", "Findings", join(bodies), tuple(summary), (Fact(str(total), "findings of checks"),))


def _summary(record: Record, codes: Counter[str]) -> Markup:
    if not codes:
        return join(["The check found nothing. (", tag("code", record.name), ")"])
    kinds = ", ".join(f"{number} {code}" for code, number in sorted(codes.items()))
    count = plural(codes.total(), "finding")
    return join([f"The check has {count}: {kinds}. (", tag("code", record.name), ")"])
