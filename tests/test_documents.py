"""The pages of docs/documents: every example goes through the real reader, and no field or document is left out."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import bitplan
from bitplan.base.documents import keys_of
from bitplan.base.records import read_json
from bitplan.files.certificate import read_certificate
from bitplan.files.drift import DriftLog
from bitplan.fp8.policy import report as fp8_report
from bitplan.fp8.policy import rules as fp8_rules
from bitplan.fp8.policy.report import Report
from bitplan.fp8.policy.rules import load_policy
from bitplan.packed import crossover
from bitplan.packed.machine import examine_machine
from bitplan.plan import Manifest, Plan, plan
from bitplan.plan.from_records import read_run_log
from bitplan.plan.manifest import expand_raw_map, manifest_schema
from bitplan.report.page import build_sections
from bitplan.report.read_records import read_records
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.fit import read_fit
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.selective.calibration import load_calibration
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.state import PolicyState, load_state
from bitplan.streaming.selective.training_policy import PrecisionStepMetrics, SelectivePrecisionPolicy
from bitplan.streaming.telemetry import StreamStepStats
from bitplan.streaming.training import training_state
from bitplan.streaming.training.adamw import AdamWSettings

FOLDER = Path(__file__).parent.parent / "docs" / "documents"
PAGES = {page.stem: page.read_text() for page in sorted(FOLDER.glob("*.md"))}
# What a report shows, and as which kind of record.
RECORDS = {
    "plan": "plan",
    "front": "search",
    "search-progress": "searching",
    "findings": "findings",
    "calibration": "calibration",
    "selective-telemetry": "precision",
    "run-log": "run_plan",
    "stream-telemetry": "stream",
    "drift": "drift",
    "quality": "quality",
    "fp8-report": "fp8_report",
    "fp8-policy": "fp8_policy",
    "crossover": "crossover",
    "training-log": "training",
    "machine": "machine",
    "benchmark-results": "benchmark",
}


def examples(name):
    return re.findall(r"^```(jsonl?)\n(.*?)^```$", PAGES[name], re.DOTALL | re.MULTILINE)


@pytest.fixture
def example(tmp_path):
    """Writes the n-th example of a page to a file."""

    def write(name, number=0):
        kind, text = examples(name)[number]
        path = tmp_path / f"{name}.{kind}"
        path.write_text(text)
        return path

    return write


def test_every_page_has_an_example_and_is_in_the_index():
    index = (FOLDER.parent / "documents.md").read_text()
    for name in PAGES:
        assert examples(name), name
        assert f"(documents/{name}.md)" in index


def test_every_document_of_the_package_has_a_page():
    sources = [path.read_text() for path in Path(bitplan.__file__).parent.rglob("*.py")]
    named = {
        result for source in sources for result in re.findall(r'^DOCUMENT(?:, VERSION)? = "([\w-]+)"', source, re.M)
    }
    assert len(named) > 8
    assert {name for name in named if not any(f"`{name}`" in page for page in PAGES.values())} == set()


@pytest.mark.parametrize(("name", "kind"), RECORDS.items())
def test_a_report_shows_the_example(name, kind, example):
    (record,) = read_records([example(name)])
    assert record.kind == kind
    assert len(build_sections([record])) == 1 + (kind != "machine")


# ---- the readers -----------------------------------------------------------------------------------------------------


def test_manifest(example):
    assert len(Manifest.load(example("manifest")).rules) == 4
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(read_json(example("manifest")), manifest_schema())
    assert len(Manifest.from_document(expand_raw_map(read_json(example("manifest", 1)))).rules) == 3


def test_plan(example):
    assert Plan.load(example("plan")).to_json() == json.dumps(read_json(example("plan")), indent=2) + "\n"


def test_evidence(example):
    assert SearchEvidence.load(example("evidence")).to_document() == read_json(example("evidence"))


def test_fit(example):
    assert read_fit(example("fit")) == read_json(example("fit"))


def test_certificate(example):
    text = example("certificate").read_text()
    assert read_certificate(example("certificate"), text) == json.loads(text)


def test_calibration(example):
    result = load_calibration(example("calibration"), read_json(example("calibration"))["fingerprint"])
    assert result.result().of("0", "int8_row") == pytest.approx(0.0046, rel=0.1)


def test_selective_config(example):
    assert SelectivePrecisionConfig.load(example("selective-config")).warmup_steps == 20


def test_selective_state(example, tmp_path):
    document = read_json(example("selective-state"))
    inner = document["policy"]
    path = tmp_path / "state.json"
    path.write_text(json.dumps(inner))
    config = SelectivePrecisionConfig.from_document(inner["config"])
    assert isinstance(load_state(path, inner["layout"], config), PolicyState)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32)) for _ in range(2)]
    )
    config = SelectivePrecisionConfig.from_document(inner["config"] | {"telemetry_enabled": False})
    with stream_blocks(model, "*", device="cpu", slots=2) as stream, SelectivePrecisionPolicy(stream, config) as policy:
        policy.load(example("selective-state"))
        assert policy.state_dict() == document | {"policy": inner | {"config": config.to_document()}}


def test_run_log(example):
    log = read_run_log(example("run-log"))
    assert [one.to for one in log.changes] == ["fp8:tensorwise", "bfloat16"]
    assert log.plan(9)["0.fprop"].evidence["impact"] == 0.0004


def test_stream_state(example):
    document = read_json(example("stream-state"))
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    master, first, second = (torch.full((4, 4), value) for value in (0.5, 0.25, 0.125))
    tensors = {"0.weight.master": master, "0.weight.exp_avg": first, "0.weight.exp_avg_sq": second}
    optimizer = AdamWSettings(lr=0.01)
    with stream_blocks(
        nn.Sequential(layer), "*", device="cpu", train="weights", optimizer=optimizer, slots=2
    ) as stream:
        stream.load_state_dict({**document, "tensors": tensors})
        result = stream.state_dict()
    assert {key: torch.equal(one, tensors[key]) for key, one in result.pop("tensors").items()} == dict.fromkeys(
        tensors, True
    )
    assert result == document


def test_drift(example):
    assert [line["name"] for line in DriftLog.read(example("drift"))] == ["up.weight"]


def test_fp8_report(example):
    assert len(Report.load(example("fp8-report")).rows) == 2


def test_fp8_policy(example):
    assert [load_policy(example("fp8-policy", *version)).version for version in ((), (1,))] == [2, 1]


def test_crossover(example):
    document = read_json(example("crossover"))
    assert crossover.from_document(document, document["fingerprint"], where="page")


def test_trees_model(example):
    pytest.importorskip("sklearn")
    from bitplan.trees import BoostedTreesRegressor, load_trees

    assert isinstance(load_trees(example("trees-model")), BoostedTreesRegressor)


# ---- no field left out -----------------------------------------------------------------------------------------------


def keys_written(name, tmp_path):
    """The keys that a writer or a reader knows, by page."""
    if name == "drift":
        weight = nn.Linear(32, 32).weight.detach()
        with DriftLog(tmp_path / "drift.jsonl") as log:
            return log.add(0, [("w", weight, bitplan.encode(weight, "mxfp4"))])[0].to_dict()
    if name == "trees-model":
        file = pytest.importorskip("bitplan.trees.load", exc_type=ImportError)
        return [*file.HEAD, *file.NODE_FIELDS, *file.LEAF_FIELDS]
    known = {
        "manifest": manifest_schema()["properties"],
        "plan": plan._TENSOR_KEYS,
        "selective-config": [field.name for field in fields(SelectivePrecisionConfig)],
        "selective-telemetry": [field.name for field in fields(PrecisionStepMetrics)],
        "stream-state": [*training_state._KEYS, training_state.METADATA],
        "stream-telemetry": [field.name for field in fields(StreamStepStats)],
        "fp8-report": [*fp8_report._HEAD_KEYS, *keys_of(fp8_report.Row), *keys_of(fp8_report.Fingerprint)],
        "fp8-policy": [*keys_of(fp8_rules.LayerRule), "bands", *keys_of(fp8_rules.Point)],
        "crossover": [*crossover._WEIGHT_KEYS, *crossover._TIMING_KEYS, *crossover._WAYS],
        "machine": examine_machine(measure=False),
    }
    return known[name]


@pytest.mark.parametrize(
    "name",
    [
        "manifest",
        "plan",
        "selective-config",
        "selective-telemetry",
        "stream-state",
        "stream-telemetry",
        "drift",
        "fp8-report",
        "fp8-policy",
        "crossover",
        "trees-model",
        "machine",
    ],
)
def test_every_field_is_on_its_page(name, tmp_path):
    prose = re.sub(r"^```.*?^```$", "", PAGES[name], flags=re.DOTALL | re.MULTILINE)
    assert [key for key in keys_written(name, tmp_path) if f"`{key}`" not in prose] == []
