"""Results of benchmarks: known ones as charts, others as tables of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitplan.report.chart import bars, card, colour, legend
from bitplan.report.figures import TIMES, count, nbytes, percent, shape, significant
from bitplan.report.markup import Markup, join
from bitplan.report.read_records import Record, RecordFields, is_number
from bitplan.report.section import Cell, Column, Section, cards, fold, heading, source, table

MAX_COLUMNS = 14


def benchmark_section(records: Sequence[Record]) -> Section:
    draw = {"trees": _trees, "demo": _demo, "benchmark": _benchmark}
    bodies, names = [], []
    for record in records:
        document = record.fields()
        name = document.text("benchmark", record.kind)
        bodies.append(
            join([heading(f"{name}: {record.name}"), source(record, _commit(document)), draw[record.kind](document)])
        )
        names.append(name)
    return Section("benchmarks", "Benchmarks", join(bodies), (f"Results of benchmarks: {', '.join(names)}.",))


def _commit(document: RecordFields) -> str:
    found = document.text("commit", "")
    return f"Commit {found}." if found else ""


def _benchmark(document: RecordFields) -> Markup:
    known = {"formats": _formats, "fused_matmul": _fused, "demo": _demo}
    return known.get(document.text("benchmark"), _rows)(document)


# ---- trees -----------------------------------------------------------------------------------------------------------


def _trees(document: RecordFields) -> Markup:
    runs = sorted(document.each("runs"), key=lambda run: (run.whole("rows"), run.number("train_s")))
    drawn = []
    for rows in dict.fromkeys(run.whole("rows") for run in runs):
        same = [run for run in runs if run.whole("rows") == rows]
        shown = [(run.text("contender"), run.number("train_s"), _trees_text(run), _contender(run)) for run in same]
        title = f"Training time, {count(rows)} rows"
        alone = all(_contender(run) == "k0" for run in same)
        names = legend([] if alone else [("k0", "bitplan"), ("plain", "others")])
        drawn.append(card(title, bars(shown, title), legend=names, note="Shorter is faster; AUC on rows held out."))
    return join([cards(drawn), fold("All runs", _list_table("runs", [run.value for run in runs]))])


def _trees_text(run: RecordFields) -> str:
    auc = f"  ·  AUC {run.number('auc'):.4f}" if "auc" in run else ""
    return f"{significant(run.number('train_s'))} s{auc}"


def _contender(run: RecordFields) -> str:
    return "k0" if run.text("contender").startswith("bitplan") else "plain"


# ---- formats, fused products, demo -----------------------------------------------------------------------------------


def _formats(document: RecordFields) -> Markup:
    rows = list(document.each("rows"))
    top = document.number("copy_gb_per_s", None)
    drawn = []
    for way in dict.fromkeys(row.text("way") for row in rows):
        sorted_rows = sorted((row for row in rows if row.text("way") == way), key=lambda row: -row.number("gb_per_s"))
        shown = [
            (
                f"{row.text('format')}, {row.text('dtype', '')}",
                row.number("gb_per_s"),
                _rate_text(row),
                "k0" if way == "encode" else "k2",
            )
            for row in sorted_rows
        ]
        note = f"The same memory copied: {significant(top)} GB/s." if top else ""
        drawn.append(card(f"{way.capitalize()}, GB/s", bars(shown, f"{way} speed of each format"), note=note))
    return join([cards(drawn), fold("All figures", _list_table("formats", [row.value for row in rows]))])


def _rate_text(row: RecordFields) -> str:
    share = row.number("share_of_copy", None)
    return f"{significant(row.number('gb_per_s'))} GB/s" + (f"  ·  {percent(share)} of a copy" if share else "")


def _fused(document: RecordFields) -> Markup:
    drawn = []
    for row in document.each("batch1", []):
        row.number("times_bf16")
    rows = list(document.each("batch1", []))
    for sizes in dict.fromkeys(tuple(row.numbers("shape")) for row in rows):
        same = [row for row in rows if tuple(row.numbers("shape")) == sizes]
        shown = [
            (
                row.text("format"),
                row.number("times_bf16"),
                f"{significant(row.number('times_bf16'))}{TIMES} bfloat16",
                colour(0),
            )
            for row in sorted(same, key=lambda row: -row.number("times_bf16"))
        ]
        title = f"One row of input, {shape(sizes)}"
        drawn.append(card(title, bars(shown, title), note="Times as fast as the product in bfloat16."))
    return join([cards(drawn), _rows(document)])


def _demo(document: RecordFields) -> Markup:
    rows = list(document.each("formats"))
    sizes = [(row.text("format"), float(row.whole("bytes")), nbytes(row.whole("bytes")), "k0") for row in rows]
    hard = [
        (row.text("format"), row.number("perplexity"), significant(row.number("perplexity"), 4), "k1") for row in rows
    ]
    drawn = [
        card("Bytes of the file", bars(sizes, "Bytes of each format")),
        card("Perplexity on held-out text", bars(hard, "Perplexity of each format"), note="Lower is better."),
    ]
    return join([cards(drawn), fold("All figures", _list_table("formats", [row.value for row in rows]))])


# ---- anything else ---------------------------------------------------------------------------------------------------


def _rows(document: RecordFields) -> Markup:
    """Every list of objects in the document as a table."""
    lists = {
        key: value
        for key, value in document.value.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    }
    return join(fold(f"All figures: {key}", _list_table(key, rows)) for key, rows in lists.items())


def _list_table(title: str, rows: Sequence[dict[str, Any]]) -> Markup:
    flat = [_flatten(row) for row in rows]
    keys = list(dict.fromkeys(key for row in flat for key in row))[:MAX_COLUMNS]
    columns = [Column(key.replace("_", " "), numeric=all(is_number(row.get(key, 0)) for row in flat)) for key in keys]
    return table(title, columns, [[_cell(row.get(key)) for key in keys] for row in flat])


def _flatten(row: dict[str, Any], before: str = "", depth: int = 0) -> dict[str, Any]:
    """Figures of nested objects, by their path; samples and other long lists are not shown."""
    result: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict) and depth < 3:
            result |= _flatten(value, f"{before}{key} ", depth + 1)
        elif isinstance(value, list):
            if len(value) <= 4 and not any(isinstance(item, dict | list) for item in value):
                result[before + key] = shape(value)
        else:
            result[before + key] = value
    return result


def _cell(value: Any) -> Cell:
    if isinstance(value, bool) or not is_number(value):
        return Cell("" if value is None else str(value))
    return Cell(count(value) if isinstance(value, int) else significant(value, 4), float(value))
