"""What FP8's policy, selective precision and trees decide is a plan, and the verbs read all of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bitplan.base.errors import PlanError, PlanFileError
from bitplan.cli import run
from bitplan.fp8.policy.merge import merge_reports
from bitplan.plan import Choice, Plan, Planned, read_plan
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.decide import BlockPrecisionHint
from bitplan.streaming.selective.state import PolicyState, UnitState, save_state
from bitplan.streaming.selective.training_policy import PrecisionTelemetry
from bitplan.trees import BoostedTreesRegressor
from bitplan.trees.gradients import GradientPrecision
from bitplan.trees.recommend import PrecisionSeen, TableSeen, advise
from tests.fp8.policy.fp8_samples import report, series


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One run: a plan of weights, a policy, a state and a log of selective precision, and a model of trees."""
    folder = tmp_path_factory.mktemp("run")
    weights = {"blocks.0.up.weight": Planned(Choice("mxfp4", "a search", {"nats": 0.1}, "solver"), (64, 64), "up")}
    Plan(weights).save(folder / "plan.json")
    for name, speeds in (("policy", {1024: 0.8, 4096: 1.4}), ("other", {1024: 1.3, 4096: 1.4})):
        merge_reports([report(series(speeds))]).policy.save(folder / f"{name}.json")
    units = {"blocks.0": UnitState("int8", "score 0.02 < 0.1", 0.02), "blocks.1": UnitState()}
    save_state(
        folder / "state.json", PolicyState(units, last_step=40), dict.fromkeys(units, "x"), SelectivePrecisionConfig()
    )
    with PrecisionTelemetry(folder / "precision.jsonl", clock=lambda: 1.0) as log:
        for step, precision in ((10, "bf16"), (20, "int8")):
            hint = BlockPrecisionHint("blocks.0", precision, f"score at {step}", step, 0.2, step == 20, False)
            log.record(step, {"blocks.0": hint})
    x = np.random.default_rng(0).normal(size=(200, 3))
    BoostedTreesRegressor(n_estimators=2, gradient_precision="i16").fit(x, x[:, 0]).save(folder / "trees.json")
    return folder


def test_a_policy_is_a_plan_of_products(folder):
    plan = read_plan(folder / "policy.json")
    assert {entry.kind for entry in plan.entries.values()} == {"product"}
    name = next(name for name in plan if name.endswith(".module@4096"))
    choice = plan[name]
    assert choice.format.startswith("fp8:")
    assert choice.cause == "policy"
    assert choice.evidence["tokens"] == 4096
    slow = plan[name.replace("@4096", "@1024")]
    assert (slow.format, slow.evidence["answer"]) == ("bfloat16", "lose")
    at_4096, at_1024 = (read_plan(f"{folder}/policy.json@{tokens}") for tokens in (4096, 1024))
    assert set(at_4096) == {part.removesuffix("@4096") for part in plan if part.endswith("@4096")}
    assert name.removesuffix("@4096") in at_1024.diff(at_4096).changed  # two counts have the same parts
    with pytest.raises(PlanFileError, match="nothing was measured at 77 tokens"):
        read_plan(f"{folder}/policy.json@77")


def test_a_policy_of_version_1_has_a_point_for_each_rule(tmp_path):
    rules = {"row": {"fc2": [{"tp": 1, "min_tokens": 2048, "measured_speedup": 1.2}]}}
    document = {"version": 1, "speedup_threshold": 1.0, "rules": rules}
    (tmp_path / "v1.json").write_text(json.dumps(document))
    plan = read_plan(tmp_path / "v1.json")
    assert list(plan) == ["llm.row.fc2.tp1.module@2048"]
    assert plan["llm.row.fc2.tp1.module@2048"].format == "fp8:blockwise"


def test_selective_precision_is_a_plan_of_what_is_sent(folder):
    plan = read_plan(folder / "state.json")
    assert {name: choice.format for name, choice in plan.items()} == {"blocks.0": "int8_row", "blocks.1": "bfloat16"}
    assert plan["blocks.0"].evidence == {"score": 0.02, "step": 40}
    assert {entry.kind for entry in plan.entries.values()} == {"wire"}
    log = folder / "precision.jsonl"
    assert read_plan(log)["blocks.0"].format == "int8_row"
    assert read_plan(f"{log}@15")["blocks.0"].evidence["step"] == 10
    with pytest.raises(PlanFileError, match="no line is of step 5 or before"):
        read_plan(f"{log}@5")


def test_a_model_of_trees_is_a_plan_of_gradients(folder):
    plan = read_plan(folder / "trees.json")
    assert plan["gradients"].format == "i16"
    assert plan.entries["gradients"].kind == "gradient"
    with pytest.raises(PlanFileError, match="only a policy has token counts"):
        read_plan(f"{folder}/trees.json@3")


def test_an_advice_for_trees_is_a_plan_with_its_figures(folder, tmp_path, capsys):
    seen = [
        PrecisionSeen(precision, (seconds,) * 3, 0.5, 0.1)
        for precision, seconds in zip(GradientPrecision, (3.0, 2.0, 1.0), strict=True)
    ]
    for rows, some in ((1000, seen), (10, [*seen[:2], PrecisionSeen(GradientPrecision.I8, (4.0,) * 3, 0.5)])):
        advise(some, TableSeen(rows, 5, 2, 100)).save(tmp_path / f"{rows}.json")
    plan = read_plan(tmp_path / "1000.json")
    assert (plan["gradients"].format, plan.entries["gradients"].kind) == ("i8", "gradient")
    assert plan["gradients"].evidence["f32_seconds"] == [3.0, 3.0, 3.0]
    assert Plan.load(tmp_path / "1000.json") == plan
    assert run(["diff", str(tmp_path / "10.json"), str(tmp_path / "1000.json"), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (row["name"], row["from"], row["to"]) == ("gradients", "i16", "i8")
    assert run(["explain", str(tmp_path / "1000.json"), "gradients"]) == 0
    assert "f32_seconds: [3.0, 3.0, 3.0]" in capsys.readouterr().out
    assert run(["diff", f"{folder}/trees.json", str(tmp_path / "1000.json")]) == 0
    assert "i8" in capsys.readouterr().out
    assert run(["report", str(folder), str(tmp_path / "1000.json"), "-o", str(tmp_path / "page.html")]) == 0
    assert "gradients" in (tmp_path / "page.html").read_text()


def test_every_kind_comes_back_from_a_plan_document(folder, tmp_path):
    parts = {}
    for name in ("plan.json", "policy.json", "state.json", "trees.json"):
        parts |= read_plan(folder / name).entries
    whole = Plan(parts)
    whole.save(tmp_path / "all.json")
    assert Plan.load(tmp_path / "all.json") == whole
    assert {entry.kind for entry in whole.entries.values()} == {"weight", "product", "wire", "gradient"}
    assert list(whole.of_kind("weight")) == ["blocks.0.up.weight"]
    assert whole.nbytes == read_plan(folder / "plan.json").nbytes


def test_a_format_of_one_kind_is_refused_for_another():
    with pytest.raises(PlanError, match="fp8:tensorwise is a format of a product"):
        Planned(Choice("fp8:tensorwise", "why"))
    with pytest.raises(PlanError, match="i16 is a format of a gradient"):
        Planned(Choice("i16", "why"), kind="wire")
    with pytest.raises(PlanError, match=r"the kind of a part must be one of weight, .*got"):
        Planned(Choice("mxfp4", "why"), kind="luck")


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(PlanFileError, match=r"x.json: expected a plan, an FP8 policy, .*got"):
        read_plan(tmp_path / "x.json")
    with pytest.raises(PlanFileError, match="no such file"):
        read_plan(tmp_path / "none.json")


def test_the_verbs_read_them_all(folder, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert run(["report", str(folder), "-o", str(page)]) == 0
    text = page.read_text()
    for words in ("All parts", "what crosses the bus", "products", "gradients", "fp8:", "int8_row", "i16", "mxfp4"):
        assert words in text
    assert "All parts" in capsys.readouterr().out
    assert run(["diff", f"{folder}/policy.json", f"{folder}/other.json", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows
    assert all(row["name"].endswith("@1024") and row["from"] == "bfloat16" for row in rows)
    assert run(["diff", f"{folder}/precision.jsonl@10", f"{folder}/precision.jsonl@20"]) == 0
    assert "bfloat16" in capsys.readouterr().out
    assert run(["explain", f"{folder}/policy.json@4096", "*.module"]) == 0
    assert "tokens: 4096" in capsys.readouterr().out
    assert run(["explain", f"{folder}/trees.json", "gradients", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gradients"]["kind"] == "gradient"
    for name in ("policy.json", "state.json", "trees.json", "precision.jsonl", "plan.json"):
        assert run(["plan", f"{folder}/{name}"]) == 0
    capsys.readouterr()
    assert run(["explain", f"{folder}/plan.json", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err


def test_a_folder_of_a_search_is_its_plan(tmp_path):
    Plan({"w": Planned(Choice("int8_row", "given"))}).save(tmp_path / "plan.json")
    assert read_plan(tmp_path)["w"].format == Plan.load(tmp_path)["w"].format == "int8_row"
    (tmp_path / "plan.json").rename(tmp_path / "bitplan_plan.json")
    assert read_plan(tmp_path)["w"].format == "int8_row"  # as in a packed folder
    (tmp_path / "bitplan_plan.json").unlink()
    with pytest.raises(PlanFileError, match="a folder without plan\\.json or bitplan_plan\\.json"):
        read_plan(tmp_path)
