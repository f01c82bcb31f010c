"""Section of a whole run: which part has which format, for weights, products, what crosses the bus and gradients alike.

It is drawn where the records decide more than one kind of part. Weights are listed in their own section, and only
counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitplan.plan.from_records import plan_of_document, plan_of_log
from bitplan.plan.plan import Plan
from bitplan.report.markup import count, join, plural, tag
from bitplan.report.read_records import Record
from bitplan.report.section import Cell, Column, Section, column_table
from bitplan.report.section_of_plan import read_plan

WORDS = {"weight": "weights", "wire": "what crosses the bus", "product": "products", "gradient": "gradients"}
# The kinds of record that decide formats, and of which kind of part.
RECORDS = {
    "plan": "weight",
    "fp8_policy": "product",
    "precision": "wire",
    "selective": "wire",
    "trees_model": "gradient",
}


def run_section(records: Sequence[Record]) -> Section | None:
    """None where the records decide one kind of part, or none."""
    if len({RECORDS[record.kind] for record in records}) < 2:
        return None
    weights = [item for record in records if record.kind == "plan" for item in read_plan(record)]
    others = [
        (record, name, entry)
        for record in records
        if record.kind != "plan"
        for name, entry in _plan(record).entries.items()
    ]
    counts = Counter(("weight", item.format) for item in weights)
    counts += Counter((entry.kind, entry.choice.format) for _, _, entry in others)
    kinds = [WORDS[kind] for kind, _ in counts]
    counted = column_table(
        "parts by kind and format",
        (Column("Part", choose=True), kinds),
        (Column("Format", choose=True), [name for _, name in counts]),
        (Column("How many", numeric=True), [Cell(count(number), float(number)) for number in counts.values()]),
    )
    listed = column_table(
        "every part that is no weight",
        (Column("Part", choose=True), [WORDS[entry.kind] for _, _, entry in others]),
        (Column("Name", mono=True), [name for _, name, _ in others]),
        (Column("Format", choose=True), [entry.choice.format for _, _, entry in others]),
        (Column("Why", wide=True), [entry.choice.reason for _, _, entry in others]),
        (Column("Record", choose=True), [record.name for record, _, _ in others]),
    )
    names = list(dict.fromkeys(kinds))
    line = f"One run, {plural(counts.total(), 'part')}: {', '.join(names[:-1])} and {names[-1]} have formats."
    more = tag("p", "Each part's format by its own record; weights are listed under Decisions.", class_="from")
    return Section("run", "All parts", join([more, counted, listed]), (line,))


def _plan(record: Record) -> Plan:
    if record.kind == "precision":
        return plan_of_log(list(enumerate(record.content, 1))[-1:], where=record.name)
    return plan_of_document(record.content, where=record.name)
