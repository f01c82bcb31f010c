"""Reports: both forms, byte-stable, and every way in which a file can be cut off or wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bitplan.fp8.policy.report import Report, Row, parse_report
from bitplan.fp8.policy.vocabulary import BenchReportError
from tests.fp8.policy.fp8_samples import H200, experts, pair, report, series

ROWS = [
    *series({512: 0.8, 4096: 1.2}),
    *pair(424, 1.02, padded_tokens=1024, **experts("column_grouped")),
    Row("llm", "row", (4096, 14336), 65536, "module", "graph", "fp8", "oom", name="fc2", tp=1, message="140 GiB"),
    Row("vit", "row", (1152, 4304), 256, "module", "eager", "fp8", "error", name="fc2", tp=1, message="4304 % 128"),
]
DENSE = ROWS[0].to_document()
GROUPED = ROWS[4].to_document()


def lines(rows=ROWS):
    return report(rows).to_lines().encode()


def test_both_forms_hold_the_same(tmp_path):
    path = tmp_path / "report.json"
    report(ROWS).save(path)
    one = Report.load(path)
    path.write_bytes(lines())
    many = Report.load(path)
    assert one == many
    assert one.rows == tuple(ROWS)
    assert one.where == str(path)
    assert one.to_lines().encode() == many.to_lines().encode() == lines()


def test_a_row_says_no_more_than_it_knows():
    assert list(DENSE) == [
        "part", "kind", "name", "shape", "tp", "tokens", "gemm", "timing", "precision", "status", "samples_ms",
        "in_turns",
    ]  # fmt: skip
    assert "tp" not in GROUPED
    assert ROWS[-1].to_document() == {
        "part": "vit", "kind": "row", "name": "fc2", "shape": [1152, 4304], "tp": 1, "tokens": 256, "gemm": "module",
        "timing": "eager", "precision": "fp8", "status": "error", "message": "4304 % 128",
    }  # fmt: skip


def test_zero_peak_bytes_stay():
    row = replace(ROWS[0], peak_bytes=0)
    assert parse_report(report([row]).to_lines().encode(), where="r").rows == (row,)


def test_padding_is_noted_and_is_no_key():
    bf16, fp8 = ROWS[4], replace(ROWS[4], padded_tokens=8192)
    assert bf16.key == fp8.key


@pytest.mark.parametrize("cut", range(1, len(lines()) - 1, 97))
def test_a_report_cut_off_anywhere_says_so(cut):
    """Issue 6, point 6: a report cut off in mid-write."""
    with pytest.raises(BenchReportError, match=r"^r: .*goes on from the last whole line$"):
        parse_report(lines()[:cut], where="r")


def test_a_document_cut_off_says_so(tmp_path):
    path = tmp_path / "r.json"
    report(ROWS).save(path)
    whole = path.read_bytes()
    for cut in range(1, len(whole) - 3, 211):
        with pytest.raises(BenchReportError, match=r"not valid JSON.*cut off in mid-write"):
            parse_report(whole[:cut], where="r")


def test_whole_lines_without_an_end_are_unfinished():
    text = b"".join(line + b"\n" for line in lines().splitlines()[:-1])
    with pytest.raises(BenchReportError, match="unfinished: 8 rows and no end line; run the benchmark again"):
        parse_report(text, where="r")


@pytest.mark.parametrize("text", [b"", b"\n", b"  \n"])
def test_empty(text):
    with pytest.raises(BenchReportError, match="r: empty"):
        parse_report(text, where="r")


def head(**change):
    return report([]).head() | {"rows": []} | change


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the document must be an object"),
        (head(version=2), "version must be 1, which is what this bitplan reads, got 2"),
        (head(document="bitplan-plan"), "document must be one of 'bitplan-fp8-report'"),
        (head(recipe="blokwise"), "recipe must be one of 'tensorwise'"),
        (head(fingerprint={}), "fingerprint: gpu is missing"),
        (head(fingerprint=head()["fingerprint"] | {"gpu": ""}), "fingerprint: gpu must be a string that is not empty"),
        (head(fingerprint=head()["fingerprint"] | {"host": "a"}), "fingerprint: unknown key 'host'"),
        (head(extra=1), "unknown key 'extra'"),
        (head(rows={}), "rows must be a list"),
        (head(rows=[1]), r"rows\[0\] must be an object"),
        (head(rows=[DENSE | {"kind": "rows"}]), r"rows\[0\]: kind must be one of 'layernorm_column'"),
        (head(rows=[DENSE | {"tokens": 1.5}]), r"rows\[0\]: tokens must be an integer from 1, got 1.5"),
        (head(rows=[DENSE | {"tokens": True}]), r"rows\[0\]: tokens must be an integer from 1, got true"),
        (head(rows=[DENSE | {"shape": [4096]}]), r"shape must be two sizes from 1"),
        (head(rows=[DENSE | {"samples_ms": [0.0]}]), "samples_ms must be a list of at most 1000 times"),
        (head(rows=[DENSE | {"samples_ms": [1.0] * 1001}]), "samples_ms must be a list of at most 1000 times"),
        (head(rows=[DENSE | {"samples_ms": [1e-300]}]), "from 1e-6 to 1e9 milliseconds"),
        (head(rows=[DENSE | {"samples_ms": []}]), "at least one, where the status is ok"),
        (head(rows=[DENSE | {"status": "oom"}]), "status oom has a message and no samples_ms"),
        (head(rows=[DENSE | {"etp": 1}]), "etp does not belong to row"),
        (head(rows=[GROUPED | {"tp": 1}]), "tp does not belong to column_grouped"),
        (head(rows=[{key: value for key, value in DENSE.items() if key != "tp"}]), "tp is missing; row is looked up"),
        (head(rows=[GROUPED | {"padded_tokens": 8}]), "padded_tokens 8 is less than tokens 424"),
        (head(rows=[DENSE, DENSE]), "fc2 4096x14336 .tp 1. at 512 tokens .module, graph, bf16. is there twice"),
    ],
)  # fmt: skip
def test_wrong_documents(document, message):
    with pytest.raises(BenchReportError, match=message):
        parse_report(json.dumps(document).encode(), where="r")


def test_duplicate_keys_and_a_lying_end():
    with pytest.raises(BenchReportError, match="key 'version' appears twice"):
        parse_report(b'{"version": 1, "version": 1, "rows": []}', where="r")
    with pytest.raises(BenchReportError, match="its end line says 9 rows, 8 are there"):
        parse_report(lines().replace(b'{"end": 8}', b'{"end": 9}'), where="r")


def test_a_file_that_is_not_there():
    with pytest.raises(BenchReportError, match=r"none.json: cannot be read: No such file"):
        Report.load("none.json")


def test_differences_name_both():
    assert H200.differences(replace(H200, torch="2.10")) == {"torch": ("2.11.0", "2.10")}
    assert H200.differences(H200) == {}


def test_a_row_of_the_most_samples():
    document = head(rows=[DENSE | {"samples_ms": [1.0] * 1000}])
    (row,) = parse_report(json.dumps(document).encode(), where="r").rows
    assert len(row.samples_ms) == 1000
