"""Records are recognised by what they hold; what is not one, or broken, is an error that says what was expected."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from bitplan.base.errors import BitplanError
from bitplan.report import read_records as reading
from bitplan.report import write_report
from bitplan.report.read_records import ReportError, read_records, short_names

from . import samples

PLAN = {"document": "bitplan-plan", "version": 1, "tensors": {"w": {"format": "mxfp4", "reason": "because"}}}
DRIFT = {"step": 0, "name": "w", "format": "mxfp4", "relative_error": 0.1}


@pytest.fixture
def save(tmp_path):
    def write(text, name="record.json"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("write", "kinds"),
    [
        (samples.write_plan, ["plan"]),
        (samples.write_findings, ["findings"]),
        (samples.write_training, ["training", "training"]),
        (samples.write_precision, ["precision"]),
        (samples.write_stream, ["stream"]),
        (samples.write_fp8, ["fp8_policy", "fp8_report"]),
        (samples.write_crossover, ["crossover"]),
        (samples.write_drift, ["drift"]),
        (samples.write_calibration, ["calibration"]),
    ],
)
def test_what_the_writers_write_is_recognised(tmp_path, write, kinds):
    assert [record.kind for record in read_records(write(tmp_path))] == kinds


def test_names_of_files_do_not_matter(save):
    assert read_records([save(json.dumps(PLAN), "anything.txt")])[0].kind == "plan"
    assert read_records([save(json.dumps(PLAN, indent=2), "other.log")])[0].kind == "plan"
    assert read_records([save("\n \n" + json.dumps(PLAN, indent=2), "blank.json")])[0].kind == "plan"


@pytest.mark.parametrize("name", sorted(path.name for path in samples.RESULTS.glob("*.json")))
def test_committed_results_are_records(name, tmp_path):
    sections = write_report([samples.RESULTS / name], tmp_path / "r.html")
    assert {"quality", "benchmarks"} & {section.anchor for section in sections}


def test_empty_findings_are_findings(save):
    assert read_records([save("[]\n")])[0].kind == "findings"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; expected a record of one of these kinds: "),
        ("\n\n", "empty"),
        ("hello", 'neither JSON nor JSONL: it begins with "hello"'),
        ("\x00\x01", "neither JSON nor JSONL"),
        ("{", "not valid JSON"),
        ("[1, 2]", "a list, and not one of findings"),
        ("{}", "not recognised by its keys (none); expected"),
        ('{"speed": 1}', 'not recognised by its keys ("speed"); expected'),
        ('{"document": "bitplan-trees", "version": 1}', 'the document "bitplan-trees" is none that a report shows'),
        ('{"document": "bitplan-plan", "version": 9, "tensors": {}}', "version must be 1 for bitplan-plan, got 9"),
        ('{"document": "bitplan-fp8-policy", "version": 1, "rules": {}}', "version must be 2"),
        ("[" * 100_000, "recursion depth"),
        ('{"a": 1, "a": 2}', "appears twice"),
    ],
)
def test_what_is_not_a_record(save, text, message):
    path = save(text)
    with pytest.raises(ValueError, match=r"record\.json") as error:
        read_records([path])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (PLAN | {"tensors": {"w": 3}}, "tensors['w'] must be an object, got 3"),
        (PLAN | {"tensors": {"w": {"format": "mxfp4"}}}, "tensors['w']: reason is missing; it must be a string"),
        (PLAN | {"tensors": {"w": {"format": 4, "reason": "r"}}}, "format must be a string, got 4"),
        (PLAN | {"tensors": {"w": PLAN["tensors"]["w"] | {"bytes": 10**400}}}, "bytes must be a whole number"),
        (DRIFT | {"relative_error": "x"}, 'relative_error must be a number, got "x"'),
        ({"reference_row": {"perplexity": 1.0}, "rows": []}, "bits_per_weight is missing"),
    ],
)
def test_a_broken_record_names_file_place_and_key(save, tmp_path, document, message):
    with pytest.raises(ReportError, match=r"record\.json") as error:
        write_report([save(json.dumps(document))], tmp_path / "r.html")
    assert message in str(error.value)
    assert not (tmp_path / "r.html").exists()


def test_a_line_that_is_not_json_is_named_unless_it_is_the_torn_last(save):
    whole, torn = json.dumps(DRIFT) + "\n", '{"step": 1, "na'
    assert read_records([save(whole + torn)])[0].torn == 1
    with pytest.raises(ValueError, match="line 2"):
        read_records([save(whole + torn + "\n" + whole)])


def test_telemetry_may_have_torn_lines_within(save):
    line = json.dumps({"step_id": 1, "block_details": {}, "precision_changes": 0}) + "\n"
    record = read_records([save(line + line[:20] + "\n" + line)])[0]
    assert (len(record.content), record.torn) == (2, 1)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ReportError, match=r"none\.json: no such file"):
        read_records([tmp_path / "none.json"])
    with pytest.raises(ReportError, match="is a folder, and a regular file is expected"):
        read_records([tmp_path])
    with pytest.raises(ReportError, match="no records given"):
        read_records([])


def test_garbage_is_refused_in_bounded_memory(tmp_path, monkeypatch):
    path = tmp_path / "garbage.bin"
    # Nothing in it counts as a value of JSON.
    noise = bytes(byte if byte not in b"\n{[,:" else 120 for byte in os.urandom(2**10))
    path.write_bytes(noise * 20_000)
    tracemalloc.start()
    with pytest.raises(ReportError, match="neither JSON nor JSONL"):
        read_records([path])
    assert tracemalloc.get_traced_memory()[1] < 2 * reading.MAX_LINE_BYTES + 2**20
    tracemalloc.stop()
    with path.open("ab") as file:
        file.truncate(reading.MAX_RECORD_BYTES + 1)  # a hole: takes no room
    with pytest.raises(ReportError, match="too large for a record"):
        read_records([path])
    monkeypatch.setattr(reading, "MAX_LINES", 3)
    path.write_text((json.dumps(DRIFT) + "\n") * 4)
    with pytest.raises(ReportError, match="line 4: a log has at most 3 lines"):
        read_records([path])


def test_short_names_tell_files_apart_and_no_more():
    paths = [Path("runs/a/plan.json"), Path("runs/b/plan.json"), Path("runs/drift.jsonl")]
    assert short_names(paths) == ["a/plan.json", "b/plan.json", "drift.jsonl"]
    assert short_names([paths[0], paths[0]]) == ["plan.json", "plan.json"]


def test_a_long_log_is_sampled_by_whole_steps_and_says_so(tmp_path, monkeypatch):
    """Three tensors a step: a sample that took every n-th line would lose one of them."""
    monkeypatch.setattr(reading, "WHOLE_LINES", 50)
    monkeypatch.setattr(reading, "SAMPLED_LINES", 30)
    lines = [{**DRIFT, "step": step, "name": name} for step in range(100) for name in "abc"]
    path = tmp_path / "drift.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (record,) = read_records([path])
    assert [line["step"] for line in record.content] == [s for s in (*range(0, 100, 10), 99) for _ in "abc"]
    assert record.sampled == "a sample: 33 of 300 lines read, whole steps spread evenly"
    monkeypatch.setattr(reading, "MAX_LINES", 20)
    with pytest.raises(ReportError, match="every 10th step is still more than 20 lines"):
        read_records([path])


def test_a_sample_keeps_the_steps_where_a_precision_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "WHOLE_LINES", 50)
    monkeypatch.setattr(reading, "SAMPLED_LINES", 10)
    path = tmp_path / "precision.jsonl"
    steps = [{"step_id": n, "block_details": [], "precision_changes": int(n == 37), "more": 0} for n in range(100)]
    path.write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    (record,) = read_records([path])
    assert {line["step_id"] for line in record.content} == {*range(0, 100, 10), 37, 99}


def test_a_value_that_is_nested_almost_too_deeply_is_one_line(tmp_path):
    """There is a depth that the parser bears, and the writer of the message does not."""
    path = tmp_path / "plan.json"
    for depth in range(960, 1000, 2):
        path.write_text('{"document": "bitplan-plan", "version": 1, "tensors": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(BitplanError) as caught:
            write_report([path], tmp_path / "report.html")
        assert "\n" not in str(caught.value)


def test_a_crossover_without_samples_is_one_line(tmp_path):
    path = tmp_path / "crossover.json"
    for timed in ({}, {"fused": []}, {"fused": [], "expanded": [1.0]}):
        timings = [{"rows": 1, "samples_ms": timed}]
        weight = {"format": "mxfp4", "out_features": 8, "in_features": 32, "timings": timings}
        path.write_text(json.dumps({"document": "bitplan-crossover", "version": 1, "weights": [weight]}))
        with pytest.raises(ReportError, match="samples_ms must be a list of numbers above 0"):
            write_report([path], tmp_path / "report.html")
