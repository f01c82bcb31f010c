"""Sections of decisions (each tensor's format and reason, and the bytes), of findings (what checks reported), and of a
whole run: which part has which format, for weights, products, what crosses the bus and gradients alike.

The section of a run is drawn where the records decide more than one kind of part. Weights are listed under decisions,
and only counted there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bitplan.plan.from_records import plan_of_document, plan_of_log
from bitplan.plan.plan import Plan
from bitplan.report.chart import bars, card, format_colours
from bitplan.report.markup import TIMES, Markup, count, escape, join, nbytes, percent, plural, shape, significant, tag
from bitplan.report.read_records import Record, RecordFields
from bitplan.report.section import Cell, Column, Fact, Section, cards, column_table, one_by_one, source, table, told

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
        summary.append(_found(record, Counter(item.text("code") for item in items)))
    return Section("findings", "Findings", join(bodies), tuple(summary), (Fact(str(total), "findings of checks"),))


def _found(record: Record, codes: Counter[str]) -> Markup:
    if not codes:
        return told(record, "The check found nothing.")
    kinds = ", ".join(f"{number} {code}" for code, number in sorted(codes.items()))
    return told(record, f"The check has {plural(codes.total(), 'finding')}: {kinds}.")


BF16_BYTES = 2
MAX_EVIDENCE = 160


@dataclass(frozen=True)
class Decided:
    """One tensor of a plan, as its document has it."""

    name: str
    format: str
    reason: str
    role: str
    part: str
    shape: list[int] | None
    nbytes: int
    evidence: str
    input: str

    @property
    def shown_format(self) -> str:
        return f"{self.format}.{self.part}" if self.part else self.format


def plan_section(records: Sequence[Record]) -> Section:
    def draw(record: Record) -> tuple[Markup, object, Sequence[Fact]]:
        decided = read_plan(record)
        summary = told(record, _sentence(decided)) if len(records) > 1 else ""
        return _body(record, decided), summary, _facts(decided)

    return one_by_one("decisions", "Decisions", records, draw, _sentence(read_plan(records[0])))


def read_plan(record: Record) -> list[Decided]:
    entries = []
    for name, item in record.fields().items("tensors"):
        sizes = item.numbers("shape", None)
        entries.append(
            Decided(
                name,
                item.text("format"),
                item.text("reason"),
                item.text("role", ""),
                item.text("part", ""),
                None if sizes is None else [int(size) for size in sizes],
                item.whole("bytes", 0),
                _evidence(item),
                item.text("input", ""),
            )
        )
    return entries


def _evidence(item: RecordFields) -> str:
    """The figures behind a choice's reason, as one line of text."""
    if "evidence" not in item:
        return ""
    figures = item.fields("evidence").value.items()
    parts = [
        f"{key} {_figure(value)}" for key, value in figures if not isinstance(value, dict)
    ]  # the reason has nested ones
    text = ", ".join(parts)
    return text if len(text) <= MAX_EVIDENCE else f"{text[:MAX_EVIDENCE]}…"


def _figure(value: object) -> str:
    return significant(value) if isinstance(value, float) else str(value)


def formats_by_bytes(decided: Sequence[Decided]) -> dict[str, int]:
    """Count each format's bytes, the largest first."""
    sizes: Counter[str] = Counter()
    for item in decided:
        sizes[item.format] += item.nbytes
    return dict(sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])))


def _bf16_bytes(decided: Sequence[Decided]) -> int | None:
    """The bytes of the same numbers in bfloat16; None if a shape is missing, or is that of packed codes."""
    if not decided or any(item.shape is None or item.part for item in decided):
        return None
    return sum(BF16_BYTES * math.prod(item.shape or []) for item in decided)


def _sentence(decided: Sequence[Decided]) -> str:
    sizes, in_bf16 = formats_by_bytes(decided), _bf16_bytes(decided)
    total = sum(sizes.values())
    smaller = f", {significant(in_bf16 / total)} times smaller than in bfloat16" if in_bf16 and total else ""
    return (
        f"The plan puts {plural(len(decided), 'tensor')} in {plural(len(sizes), 'format')}: {nbytes(total)}{smaller}."
    )


def _facts(decided: Sequence[Decided]) -> list[Fact]:
    sizes, in_bf16 = formats_by_bytes(decided), _bf16_bytes(decided)
    total = sum(sizes.values())
    facts = [Fact(nbytes(total), "of weights", f"{plural(len(decided), 'tensor')}, {plural(len(sizes), 'format')}")]
    if in_bf16 and total:
        facts.append(Fact(f"{significant(in_bf16 / total)}{TIMES}", "smaller than bfloat16", f"from {nbytes(in_bf16)}"))
    return facts


def _body(record: Record, decided: Sequence[Decided]) -> Markup:
    sizes = formats_by_bytes(decided)
    classes = format_colours(sizes)
    total = sum(sizes.values())
    by_format = [
        (name, float(size), f"{nbytes(size)}  ·  {percent(size / total if total else 0)}", classes[name])
        for name, size in sizes.items()
    ]
    drawn = [
        card("Bytes by format", bars(by_format, "Bytes of each format", whole=total), note=_smaller(decided, total))
    ]
    roles = _by_role(decided)
    if len(roles) > 1:
        drawn.append(card("Bytes by role", bars(roles, "Bytes of each role", whole=total)))
    more = "Click a heading to sort; the search looks in all columns."
    return join([source(record, more), cards(drawn), _table(decided, classes)])


def _smaller(decided: Sequence[Decided], total: int) -> str:
    in_bf16 = _bf16_bytes(decided)
    if not in_bf16 or not total:
        return ""
    return f"{nbytes(total)} in all; the same numbers in bfloat16 take {nbytes(in_bf16)}."


def _by_role(decided: Sequence[Decided]) -> list[tuple[str, float, str, str]]:
    sizes: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    for item in decided:
        sizes[item.role or "no role"] += item.nbytes
        tensors[item.role or "no role"] += 1
    ordered = sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0]))
    return [
        (role, float(size), f"{plural(tensors[role], 'tensor')}  ·  {nbytes(size)}", "plain") for role, size in ordered
    ]


def _table(decided: Sequence[Decided], classes: dict[str, str]) -> Markup:
    with_role, with_input = any(item.role for item in decided), any(item.input for item in decided)
    columns = [Column("Tensor", mono=True), Column("Format", choose=True)]
    columns += [Column("Inputs", choose=True)] if with_input else []
    columns += [Column("Role", choose=True)] if with_role else []
    columns += [Column("Shape", numeric=True), Column("Bytes", numeric=True), Column("Why", wide=True)]
    rows = []
    for item in decided:
        chip = tag("span", item.shown_format, class_=f"chip {classes[item.format]}")
        sizes = item.shape
        row = [Cell(item.name), Cell(chip, word=item.shown_format)]
        row += [Cell(item.input or "as they are")] if with_input else []
        row += [Cell(item.role)] if with_role else []
        row += [
            Cell("" if sizes is None else shape(sizes), float(math.prod(sizes or [0]))),
            Cell(nbytes(item.nbytes) if sizes is not None else "", float(item.nbytes)),
            Cell(join([item.reason, tag("small", item.evidence)]) if item.evidence else escape(item.reason)),
        ]
        rows.append(row)
    return table(f"the {count(len(decided))} tensors of the plan", columns, rows)


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
    """A section on all parts of a run (weights, products, transfers); None where records are of one kind of part."""
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
