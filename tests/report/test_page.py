"""The page as text: deterministic, self-contained, escaped, with a section for what is there and no other."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from bitplan.report import TrainingLog, write_report
from bitplan.report.markup import VOID, escape, nbytes, tag
from bitplan.report.page import build_sections
from bitplan.report.read_records import ReportError, read_records

from . import samples

EVIL = "</script><img src=x onerror=alert(1)>\"'&\u202e\x00"


class Elements(HTMLParser):
    """Every element with its attributes, and that all are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    return samples.write_samples(folder)


def page(records, tmp_path, name="report.html"):
    write_report(records, tmp_path / name)
    return (tmp_path / name).read_text(encoding="utf-8")


def test_same_records_same_bytes(everything, tmp_path):
    first = page(everything, tmp_path)
    assert first == page(everything, tmp_path, "again.html")
    assert str(tmp_path) not in first
    assert len(first) < 2_000_000


def test_well_formed_and_asks_for_nothing(everything, tmp_path):
    elements = Elements(page(everything, tmp_path)).elements
    assert {"html", "svg", "table", "h1"} <= {name for name, _ in elements}
    for name, attributes in elements:
        assert name not in ("img", "iframe", "object", "embed", "link", "video", "audio", "base", "form")
        assert not {"src", "srcset", "style", "xlink:href"} & set(attributes)
        assert not any(key.startswith("on") for key in attributes)
        assert attributes.get("href", "#").startswith("#")
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    policy = next(a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_sections_only_for_what_is_there_each_with_its_file(everything, tmp_path):
    anchors = re.findall(r'<section id="([a-z]+)">', page(everything, tmp_path))
    assert anchors == [
        *(
            "run",
            "search",
            "decisions",
            "findings",
            "quality",
            "training",
            "precision",
            "streaming",
            "speed",
            "errors",
            "benchmarks",
        ),
        "machine",
    ]
    text = page(samples.write_plan(tmp_path), tmp_path)
    assert re.findall(r'<section id="([a-z]+)">', text) == ["decisions", "machine"]
    assert "From <code>plan.json</code> (plan)" in text


def test_a_page_begins_with_one_sentence_and_a_plan_has_one_size_and_one_perplexity(tmp_path):
    quality = {
        "reference_row": {"format": "float32", "bits_per_weight": 32.0, "perplexity": 11.0, "tokens": 100},
        "rows": [{"format": "plan plan.json", "bits_per_weight": 5.0, "perplexity": 11.6164}],
    }
    (tmp_path / "quality.json").write_text(json.dumps(quality))
    records = [*samples.write_search(tmp_path), *samples.write_plan(tmp_path), tmp_path / "quality.json"]
    text = page(records, tmp_path)
    summary = re.search(r'<section id="summary".*?</section>', text, re.DOTALL)[0]
    leads = re.findall(r'<p class="lead">(.*?)</p>', summary)
    assert len(leads) == 1
    assert re.match(r"For .* the plan mixes \d+ formats: .* times smaller than the model, at .* nats a token", leads[0])
    assert "11.616" not in summary  # of other windows: the proof's is the plan's
    assert "bfloat16" not in summary
    assert "11.616" in page([tmp_path / "quality.json"], tmp_path)


def test_figures_stand_under_their_part_and_beside_the_noise_floor(everything, tmp_path):
    text = page(everything, tmp_path)
    parts = re.findall(r'<div class="part n(\d)"><p><a href="#([\w-]+)">.*?</a></p>(<ul class="facts">.*?</ul>)', text)
    assert [name for _, name, _ in parts] == ["search", "findings", "precision", "streaming", "speed"]
    assert all(f'<section id="{name}">' in text and tiles.count("<b>") == int(n) for n, name, tiles in parts)
    assert "210\N{MULTIPLICATION SIGN} the noise floor, 0.00010" in parts[0][2]
    assert ">KL / floor<" in text


def test_long_tables_are_folded_and_two_points_are_no_picture(tmp_path):
    text = page(samples.write_plan(tmp_path), tmp_path)
    assert re.search(r"<details><summary>The [\d,]+ tensors of the plan</summary>", text)
    for steps, drawn in ((2, False), (3, True)):
        text = page(samples.write_stream(tmp_path, steps=steps), tmp_path)
        assert ("<h4>Time of a step</h4>" in text) is drawn
    front = samples.write_search(tmp_path)[0]
    document = json.loads(front.read_text())
    assert "Predicted against measured" in page([front], tmp_path)
    front.write_text(json.dumps(document | {"measured": document["measured"][:2]}))
    assert "Predicted against measured" not in page([front], tmp_path)


def test_text_of_records_cannot_act(tmp_path):
    records = []

    def add(name, document, *, lines=False):
        path = tmp_path / name
        path.write_text("".join(json.dumps(each) + "\n" for each in (document if lines else [document])))
        records.append(path)

    tensor = {"format": EVIL, "reason": EVIL, "role": EVIL, "evidence": {EVIL: EVIL}, "shape": [2], "bytes": 4}
    add("p.json", {"document": "bitplan-plan", "version": 1, "tensors": {EVIL: tensor}})
    add("f.json", [{"code": EVIL, "where": EVIL, "message": EVIL}])
    drift = {"step": 0, "name": EVIL, "format": EVIL, "relative_error": 0.1}
    add("d.jsonl", [drift, drift | {"step": 1, "relative_error": 0.2}], lines=True)
    detail = {"precision": "int8", "sensitivity": 0.4, "reason": EVIL}
    update = {"step_id": 0, "precision_changes": 0, "block_details": {EVIL: detail | {"precision": "bf16"}}}
    add("s.jsonl", [update, update | {"step_id": 1, "block_details": {EVIL: detail}}], lines=True)
    head = {"document": "bitplan-training-log", "version": 1, "run": EVIL, "machine": {"cpu": EVIL}}
    add("t.jsonl", [head, {"step": 0, "loss": 1.0, EVIL: 2.0}], lines=True)
    machine = {"machine": {EVIL: EVIL}, "versions": {}, "benchmark": EVIL, "rows": [{EVIL: EVIL}]}
    add("b.json", machine)
    copies = {"copies": [{"name": EVIL, "start_ms": 0, "end_ms": 1}]}
    stream = {"step": 0, "step_ms": 1, "copy_ms": 1, "stall_ms": 0, "compute_ms": 1, "timeline": copies}
    add("st.jsonl", [stream | {"bytes_h2d_by_format": {EVIL: 5}}], lines=True)
    calibration = {"layers": {"0": {EVIL: {EVIL: 0.1}}}, "blocks": {EVIL: {"0": {EVIL: 0.2}}}}
    add("c.json", {"document": "bitplan-calibration", "version": 1} | calibration)
    write_report(records, tmp_path / "r.html", title=EVIL + "\ud800")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    elements = Elements(text).elements
    assert "img" not in {name for name, _ in elements}
    assert [name for name, _ in elements].count("script") == 1
    assert text.count(str(escape(EVIL))) > 25
    assert not re.search("[\u202e\x00\ud800]", text)
    assert "\\u202e\\u0000\\ud800" in text


def test_markup():
    assert escape("<b>") == "&lt;b&gt;"
    assert tag("p", "<", tag("b", "x"), class_="a", data_x='"', hidden=True, title=None) == (
        '<p class="a" data-x="&quot;" hidden>&lt;<b>x</b></p>'
    )


def test_a_killed_report_leaves_the_old_one(tmp_path):
    page(samples.write_plan(tmp_path), tmp_path)
    before = (tmp_path / "report.html").read_bytes()
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="bad"):
        write_report([tmp_path / "bad.json"], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == before


# ---- what the sections say -------------------------------------------------------------------------------------------


def test_plan_says_bytes_and_ratio(tmp_path):
    tensors = {
        "a": {"format": "mxfp4", "reason": "small error", "shape": [64, 64], "bytes": 2176},
        "b": {"format": "bfloat16", "reason": "a norm", "shape": [64], "bytes": 128},
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"document": "bitplan-plan", "version": 1, "tensors": tensors}))
    text = page([path], tmp_path)
    assert (
        '<p class="lead">The plan puts 2 tensors in 2 formats: 2.30\xa0kB, 3.61 times smaller than in bfloat16.</p>'
        in text
    )
    assert "small error" in text
    packed = {"w_blocks": {"format": "mxfp4", "reason": "r", "part": "data", "shape": [4, 16], "bytes": 64}}
    path.write_text(json.dumps({"document": "bitplan-plan", "version": 1, "tensors": packed}))
    text = page([path], tmp_path)
    assert "mxfp4.data" in text
    assert "times smaller" not in text  # the shape of packed codes says nothing of the weights


def test_policy_says_the_crossover(tmp_path):
    point = {"tokens": 512, "answer": "lose", "speedup": 0.8, "low": 0.78, "high": 0.82, "samples": 20}
    win = {"tokens": 4096, "answer": "win", "speedup": 1.2, "low": 1.1, "high": 1.3, "samples": 20}
    rule = {
        "part": "llm",
        "kind": "row",
        "name": "fc2",
        "shape": [4, 8],
        "tp": 1,
        "recipe": "blockwise",
        "gemm": "module",
    }
    head = {"document": "bitplan-fp8-policy", "version": 2, "speedup_threshold": 1.0, "confidence": 0.95}

    def section_text(points, bands):
        path = tmp_path / "policy.json"
        path.write_text(json.dumps(head | {"rules": [rule | {"points": points, "bands": bands}]}))
        return page([path], tmp_path)

    text = section_text([point, win], [[4096, 4096]])
    assert "Crossover between 512 and 4,096 tokens at 95\xa0% confidence." in text
    assert "1.20\N{MULTIPLICATION SIGN} as fast, between 1.10 and 1.30" in text
    assert "FP8 is used from 4,096 to 4,096 tokens" in text
    assert "No measured win up to 512 tokens: BF16 stays." in section_text([point], [])
    assert "Wins from 4,096 tokens, the fewest measured." in section_text([win], [[4096, 4096]])
    unmeasured = {"tokens": 9000, "answer": "unmeasured", "note": "out of memory"}
    assert "9,000 tokens: unmeasured; out of memory" in section_text([point, unmeasured], [])


def test_crossovers_and_reports_say_where_the_order_changes(tmp_path):
    text = page([*samples.write_crossover(tmp_path), *samples.write_fp8(tmp_path)], tmp_path)
    assert re.search(r"fused is fastest up to 256 input rows, expanded from 512", text)
    assert re.search(r"bf16 is fastest up to 512 tokens, fp8 from 1,024", text)


def test_an_fp8_report_in_either_form_and_unfinished(tmp_path):
    _, log = samples.write_fp8(tmp_path)
    lines = log.read_text().splitlines()
    head, *rows = [json.loads(line) for line in lines[:-1]]
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(head | {"rows": rows}))
    message = "The layer benchmark timed 4 layer products in 64 rows."
    assert message in page([whole], tmp_path)
    text = page([log], tmp_path)
    assert message in text
    assert "Unfinished" not in text
    log.write_text("\n".join(lines[:9]) + "\n")
    text = page([log], tmp_path)
    assert "timed 1 layer product in 8 rows" in text
    assert "Unfinished: the benchmark has not written its last line." in text


def heat_of(text):
    return json.loads(
        next(attributes["data-heat"] for _, attributes in Elements(text).elements if "data-heat" in attributes)
    )


def test_a_long_run_is_thinned_and_no_change_is_lost(tmp_path):
    paths = samples.write_precision(tmp_path, updates=700)
    lines = [json.loads(line) for line in paths[0].read_text().splitlines()]
    text = page(paths, tmp_path)
    assert len(heat_of(text)["steps"]) == 234
    assert "Every 3th column is drawn" not in text
    assert "One column in 3 is drawn; every change is marked." in text
    assert text.count('class="mark change"') == sum(line["precision_changes"] for line in lines[1:])


def test_heat_map_marks_every_change(tmp_path):
    paths = samples.write_precision(tmp_path)
    lines = [json.loads(line) for line in paths[0].read_text().splitlines()]
    changes = sum(line["precision_changes"] for line in lines[1:])
    text = page(paths, tmp_path)
    assert changes > 5
    assert text.count('class="mark change"') == changes
    heat = heat_of(text)
    assert heat["steps"] == [line["step_id"] for line in lines]
    assert heat["rows"][0][0] == [round(lines[0]["block_details"]["block.0"]["sensitivity"], 3), "bf16"]


def test_streaming_draws_a_timeline_or_says_that_there_is_none(tmp_path):
    text = page(samples.write_stream(tmp_path), tmp_path)
    assert "Timeline of step 39" in text
    assert re.search(r"block\.11: 3\.\d+\xa0ms, from", text)
    text = page(samples.write_stream(tmp_path, timeline=False), tmp_path)
    assert "Step 39 in total" in text
    assert "when each copy ran was not recorded" in text


def test_a_step_that_ends_before_it_begins_has_a_timeline_of_nothing(tmp_path):
    path = samples.write_stream(tmp_path)[0]
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    before = {"step_ms": -1.0, "timeline": {"copies": [{"name": "block.0", "start_ms": -3.0, "end_ms": -2.0}]}}
    path.write_text("".join(json.dumps(step | before) + "\n" for step in steps))
    assert "Timeline of step 39" in page([path], tmp_path)


def test_a_name_in_an_error_stays_on_its_line(tmp_path):
    path = samples.write_crossover(tmp_path)[0]
    document = json.loads(path.read_text())
    document["weights"][0]["format"] = "mx\nfp4"
    document["weights"][0]["timings"][0]["samples_ms"]["fused"] = [0.0]
    path.write_text(json.dumps(document))
    with pytest.raises(ReportError, match=r"mx\\nfp4, .*: samples_ms must be a list of numbers above 0"):
        page([path], tmp_path)
    document["weights"][0]["format"] = "x" * 100_000
    path.write_text(json.dumps(document))
    with pytest.raises(ReportError) as refused:
        page([path], tmp_path)
    assert len(str(refused.value)) < 500


def test_errors_that_are_not_finite_are_the_worst(tmp_path):
    rows = [{"step": 0, "name": name, "format": "mxfp4", "relative_error": e} for name, e in (("a", 0.1), ("b", None))]
    path = tmp_path / "drift.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page([path], tmp_path)
    assert "the largest relative error is not finite, <code>b</code>" in text
    assert "1 is not finite and not drawn." in text


def test_perplexity_as_the_verb_prints_it(tmp_path):
    row = {"bits_per_weight": 16.0, "tokens": 1000, "windows": 4, "perplexity": 20.0, "perplexity_interval": None}
    kl = {"kl": {"mean": 0.01, "standard_error": None}, "top1_agreement": {"mean": 0.97, "standard_error": 0.01}}
    document = {
        "model": "/somewhere/secret/model.gguf",
        "text": "wiki.txt",
        "context": 512,
        "reference_row": {"format": "reference", **row},
        "noise_floor": {"format": "noise floor (bfloat16 activations)", **row, **kl},
        "rows": [{"format": "mxfp4", **row, **kl, "bits_per_weight": 4.25, "perplexity": 21.5}],
    }
    path = tmp_path / "q.json"
    path.write_text(json.dumps(document))
    text = page([path], tmp_path)
    assert (
        "Perplexity on 1,000 tokens: 20.000 for reference, 21.500 for the smallest, mxfp4, at 4.25 bits a weight"
        in text
    )
    assert "<b>21.500</b><span>perplexity of mxfp4</span><small>20.000 for reference</small>" in text
    assert "model model.gguf, text wiki.txt" in text
    assert "secret" not in text


def test_the_card_of_perplexity_is_about_the_plan(tmp_path):
    rows = [
        {"format": name, "bits_per_weight": 8.0, "perplexity": 30.0 + len(name)} for name in ("int4", "plan p.json")
    ]
    document = {"reference_row": {"format": "float32", "bits_per_weight": 32.0, "perplexity": 27.35}, "rows": rows}
    path = tmp_path / "q.json"
    path.write_text(json.dumps(document))
    text = page([path], tmp_path)
    assert "<b>41.000</b><span>perplexity of plan p.json</span><small>27.350 for float32</small>" in text
    assert "27.350 for float32, 41.000 for plan p.json, 34.000 for the smallest, int4" in text
    path.write_text(json.dumps(document | {"rows": [rows[0], rows[0]]}))
    assert "<span>perplexity of" not in page([path], tmp_path)  # neither of two formats is the page's own


def test_calibration_shows_means_over_batches(tmp_path):
    document = {
        "document": "bitplan-calibration",
        "version": 1,
        "fingerprint": {"weights": {"b": "x"}, "versions": {"torch": "9.9"}},
        "layers": {"0": {"up": {"mxfp4": 0.1, "int8_row": None}}, "1": {"up": {"mxfp4": 0.3, "int8_row": 0.01}}},
        "blocks": {"mxfp4": {"0": {"b": 0.5}, "1": {"b": None}}},
    }
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document))
    text = page([path], tmp_path)
    cells = [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", text)]
    assert cells[:9] == ["block b", "mxfp4", "0.500", "layer up", "mxfp4", "0.200", "layer up", "int8_row", "0.0100"]
    assert "9.9" in text
    path.write_text(json.dumps(document | {"layers": {}, "blocks": {}}))
    with pytest.raises(ValueError, match="nothing has been calibrated yet"):
        write_report([path], tmp_path / "r.html")


def test_machines_that_differ_are_told(tmp_path):
    text = page([samples.RESULTS / "formats_neoverse_n1.json", samples.RESULTS / "formats_nvidia_h200.json"], tmp_path)
    assert "The records come from different machines: NVIDIA H200, Neoverse-N1." in text
    text = page([samples.RESULTS / "formats_neoverse_n1.json"], tmp_path)
    assert "Measured on Neoverse-N1." in text


# ---- the training log ------------------------------------------------------------------------------------------------


def test_training_log_is_continued_and_a_torn_line_cut(tmp_path):
    path = tmp_path / "t.jsonl"
    with TrainingLog(path, run="a run") as log:
        log.write(0, 4.0, tokens=128)
        log.write(1, float("nan"))
    path.write_bytes(path.read_bytes() + b'{"step": 2, "lo')
    with TrainingLog(path) as log:
        log.write(2, 3.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"document": "bitplan-training-log", "version": 1, "run": "a run"},
        {"step": 0, "loss": 4.0, "tokens": 128},
        {"step": 1, "loss": None},
        {"step": 2, "loss": 3.0},
    ]
    text = page([path], tmp_path)
    assert "a run ran 3 steps: loss 4.00 to 3.00. In 1 step the loss was not a number." in text


def test_training_log_refuses(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("my notes")
    with pytest.raises(ValueError, match="exists and is not a training log"):
        TrainingLog(other)
    assert other.read_text() == "my notes"
    with pytest.raises(ValueError, match="cannot be written"):
        TrainingLog(tmp_path / "no" / "t.jsonl")
    log = TrainingLog(tmp_path / "t.jsonl")
    log.close()
    with pytest.raises(ValueError, match="is closed"):
        log.write(0, 1.0)
    with pytest.raises(ValueError, match="no line has a loss"):
        write_report([tmp_path / "t.jsonl"], tmp_path / "r.html")


def test_a_search_in_progress_without_a_goal_is_refused_by_name(tmp_path):
    path = tmp_path / "progress.jsonl"
    path.write_text('{"document": "bitplan-search-progress", "version": 1, "model": "a", "goal": null}\n')
    with pytest.raises(ReportError, match=r"progress.jsonl: line 1: goal"):
        write_report([path], tmp_path / "page.html")


def fit_document() -> dict[str, object]:
    """What a fit writes: points that are predicted around its goal, plans that were measured, and an earlier goal."""
    goal = {"memory": 1000, "context": 1024, "batch": 1, "device": "cpu", "target": "llama.cpp"}
    plan = {"label": "joint plan", "weights_bytes": 600, "kv_bytes": 200, "predicted": 0.02, "kl": 0.021}
    plan |= {"kinds": {"code.txt": 0.03, "wiki.txt": 0.012}, "choice": {}}
    rival = {"label": "K and V in 8 bits", "weights_bytes": 500, "kv_bytes": 300, "predicted": 0.05, "kl": 0.06}
    one = {"document": "bitplan-fit", "version": 1, "model": "model", "probe": {"nbytes": 150}, "tokens": 512}
    one |= {"goal": goal, "needed_bytes": 950, "plan": plan, "measured": [plan, rival], "noise_floor": 0.001}
    one |= {"missing": ["K and V as they are: no room"], "unproven": "llama.cpp itself was not run"}
    points = [
        {"memory": memory, "context": context, "predicted": 20 * context / memory**2}
        for memory in (800, 1000, 1200, 1500)
        for context in (512, 1024, 2048)
    ]
    earlier = one | {"goal": goal | {"memory": 1200}, "plan": plan | {"kl": 0.011}}
    return one | {"landscape": points, "earlier": [earlier]}


def test_a_fit_shows_kl_against_memory_and_context_with_the_goal_and_what_was_measured_apart(tmp_path):
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(fit_document()))
    (section, _) = build_sections(read_records([path]))
    assert section.title == "Fit"
    by_memory, by_context = (
        section.body.split(f"<h4>KL against {what}</h4>")[1].split("</figure>")[0] for what in ("memory", "context")
    )
    for picture, rings, diamonds in ((by_memory, 12, 2), (by_context, 9, 1)):
        assert picture.count("<circle") == rings
        assert picture.count('class="mark k3"') == diamonds
        assert picture.count('class="mark k1"') == 1
        assert ">goal<" in picture
        assert f"predicted 0.0205 nats with {nbytes(1000)} and 1k of context" in picture
    assert f"joint plan, measured: 0.0110 nats with {nbytes(1200)} and 1k of context" in by_memory
    assert f"For {nbytes(1000)} and 1k tokens of context in llama.cpp the plan takes {nbytes(950)}" in section.lead
    assert "llama.cpp itself was not run" in section.body
    assert "KL, code.txt" in section.body
    other = fit_document() | {"plan": fit_document()["plan"] | {"kl": None}, "measured": [], "landscape": []}
    path.write_text(json.dumps(other))
    (section, _) = build_sections(read_records([path]))
    assert "KL 0.0200, predicted nats" in section.lead
    assert "KL against memory" not in section.body
