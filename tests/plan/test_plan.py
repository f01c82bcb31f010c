"""Plan: documents, differences, sizes, precedence."""

from __future__ import annotations

import json
import math
import random

import pytest

from bitplan.base.errors import FormatError
from bitplan.plan import Choice, Plan, PlanError, Planned, combine
from bitplan.plan.names import natural_order, number_ranges, split_layer


def plan() -> Plan:
    return Plan(
        {
            "block.10.w": Planned(
                Choice("int8_row", "score 0.20 < 0.3", {"score": 0.2, "by": "policy"}), (4, 8), "mlp"
            ),
            "block.2.w": Planned(Choice("bfloat16", "score 0.70 >= 0.7"), (4, 8), "mlp"),
            "experts.blocks": Planned(Choice("mxfp4", "rule"), (3, 2, 16), "mlp_weight", "data"),
            "experts.scales": Planned(Choice("mxfp4", "rule"), (3, 2), "mlp_scale", "scales"),
            "block 7 as a whole": Planned(Choice("fp8_e4m3_row", "measured faster")),
        }
    )


def test_a_plan_comes_back_with_the_same_bytes(tmp_path):
    plan().save(tmp_path / "a.json")
    loaded = Plan.load(tmp_path / "a.json")
    loaded.save(tmp_path / "b.json")
    assert loaded == plan()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes() == plan().to_json().encode()


def test_the_order_of_evidence_does_not_change_the_bytes():
    items = list(plan().entries.items())
    for seed in range(5):
        random.Random(seed).shuffle(items)
        assert Plan(dict(items)).to_json() == plan().to_json()
    one, two = (
        Choice("int8", "r", {"a": 1, "b": [{"x": 1, "y": 2}]}),
        Choice("int8", "r", {"b": [{"y": 2, "x": 1}], "a": 1}),
    )
    assert Plan({"w": Planned(one)}).to_json() == Plan({"w": Planned(two)}).to_json()


def test_it_is_a_mapping_to_choices_in_natural_order():
    assert list(plan())[:3] == ["block 7 as a whole", "block.2.w", "block.10.w"]
    assert plan()["block.2.w"].format == "bfloat16"
    assert natural_order(["a10", "a9", "a", "a" + "9" * 5000, "a09"]) == ["a", "a09", "a9", "a10", "a" + "9" * 5000]


def test_evidence_cannot_be_changed_behind_the_plan():
    evidence = {"score": 1}
    choice = Choice("int8", "r", evidence)
    evidence["score"] = 2
    assert dict(choice.evidence) == {"score": 1}
    with pytest.raises(TypeError):
        choice.evidence["score"] = 3


@pytest.mark.parametrize("value", [math.nan, math.inf, {1: 2}, object(), "\ud800"])
def test_evidence_that_json_cannot_keep_is_refused(value):
    with pytest.raises(PlanError, match="evidence"):
        Choice("int8", "r", {"value": value})


def test_unknown_format_and_empty_reason_are_refused():
    with pytest.raises(FormatError, match="did you mean 'mxfp4'"):
        Choice("mxfp", "r")
    with pytest.raises(PlanError, match="reason"):
        Choice("int8", "")
    with pytest.raises(FormatError, match="no part"):
        Planned(Choice("bfloat16", "r"), (2, 2), part="scales")


def entry(**change):
    return {"format": "int8_row", "reason": "r", "shape": [4, 8], "bytes": 48, **change}


def document(**change):
    return {"document": "bitplan-plan", "version": 1, "tensors": {"w": entry()}, **change}


def test_the_literal_document_is_read():
    assert Plan.from_document(document()).nbytes == 4 * 8 + 4 * 4


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (document(version=2), "version must be 1, .* got 2"),
        (document(version=True), "version must be 1, .* got true"),
        (document(document="other"), 'document must be .*, got "other"'),
        (document(tensor={}), "unknown key 'tensor'; did you mean 'tensors'"),
        ({"document": "bitplan-plan", "version": 1}, "tensors is missing"),
        ([], "the document must be an object, got \\[\\]"),
        (document(tensors=[]), "tensors must be an object"),
        (document(tensors={"w": 3}), "tensors\\['w'\\] must be an object, got 3"),
        (document(tensors={"w": entry(fmt="x")}), "unknown key 'fmt'"),
        (document(tensors={"w": entry(format="int8_rows")}), "did you mean 'int8_row'"),
        (document(tensors={"w": entry(reason=3)}), "reason must be .*, got 3"),
        (document(tensors={"w": entry(shape=[4, -8])}), "shape must be .*, got \\[4, -8\\]"),
        (document(tensors={"w": entry(shape=[4, 8.0])}), "shape must be"),
        (document(tensors={"w": entry(shape=[2**40, 2**40])}), "shape must be"),
        (document(tensors={"w": entry(bytes=47)}), "bytes must be 48 for int8_row of shape \\[4, 8\\], got 47"),
        (document(tensors={"w": {"format": "int8", "reason": "r", "bytes": 3}}), "go together, got only bytes"),
        (document(tensors={"w": entry(part="middle")}), "part must be one of 'data', 'scales'"),
        (document(tensors={"w": entry(evidence=[1])}), "evidence must be"),
        (document(tensors={"": entry()}), "a name in a plan must be"),
    ],
)
def test_a_bad_document_is_one_line_with_file_and_key(bad, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(bad))
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)
    if "a name in a plan" not in message:
        assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("text", ["", "{", '{"version": NaN}', '{"a": 1, "a": 2}'])
def test_text_that_is_not_json(text, tmp_path):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(PlanError, match=r"p\.json: not valid JSON"):
        Plan.load(tmp_path / "p.json")
    with pytest.raises(PlanError, match=r"none\.json: cannot be read"):
        Plan.load(tmp_path / "none.json")


def test_diff_names_both_reasons():
    old = Plan(
        {"a": Planned(Choice("int8", "r1")), "b": Planned(Choice("int8", "r1")), "c": Planned(Choice("int8", "r1"))}
    )
    new = Plan(
        {"b": Planned(Choice("bfloat16", "r2")), "c": Planned(Choice("int8", "r3")), "d": Planned(Choice("int4", "r4"))}
    )
    result = old.diff(new)
    assert result.lines() == [
        "+ d: int4 (r4)",
        "- a: int8 (r1)",
        "~ b: int8 (r1) -> bfloat16 (r2)",
        "= c: int8 (r1) -> int8 (r3)",
    ]
    assert result
    assert not old.diff(old)
    moved = Plan({**old.entries, "a": Planned(Choice("int8", "r1"), (2,))})
    assert list(old.diff(moved).changed) == ["a"]


@pytest.mark.parametrize(
    ("name", "ratio"), [("mxfp4", 3.7647), ("fp4_u8_g128", 3.9385), ("bfloat16", 1.0), ("float32", 0.5)]
)
def test_ratio_against_bf16(name, ratio):
    # 2 / (0.5 + 1/32) = 3.76 and 2 / (0.5 + 1/128) = 3.94.
    rows = Plan({"w": Planned(Choice(name, "r"), (4096, 4096), "mlp")}).bytes_by_role_and_format()
    assert [row[:2] for row in rows] == [("mlp", name), ("all", name), ("all", "all")]
    assert rows[-1].ratio == pytest.approx(ratio, abs=5e-5)


def test_data_and_scales_of_one_weight_count_once():
    rows = {(row.role, row.format): row for row in plan().bytes_by_role_and_format()}
    assert rows["mlp_weight", "mxfp4"][2:] == (1, 192, 96, 4.0)
    assert rows["mlp_scale", "mxfp4"][2:] == (1, 0, 6, None)
    assert rows["all", "mxfp4"][2:] == (2, 192, 102, 2 * 192 / 102)
    assert rows["all", "all"].nbytes == plan().nbytes == 48 + 64 + 102


def test_an_empty_plan_has_a_total():
    assert Plan({}).bytes_by_role_and_format() == [("all", "all", 0, 0, 0, None)]


def test_table_rows_and_collapsed_layers():
    rule = Choice("int8", "r")
    layers = Plan({f"block.{i}.w": Planned(rule if i != 3 else Choice("int4", "r"), (2, 2), "mlp") for i in range(6)})
    assert len(layers.table()) == 6
    rows = layers.table(collapse=True)
    assert [(row.name, row.tensors, row.format) for row in rows] == [
        ("block.[0..2,4..5].w", 5, "int8"),
        ("block.3.w", 1, "int4"),
    ]
    assert rows[0].nbytes == 5 * (4 + 4)
    assert plan().table()[-1][:4] == ("experts.scales", 1, "mlp_scale", "mxfp4.scales")


def test_layer_numbers():
    assert split_layer("model.layers.3.experts.7.w") == ("model.layers.", "3", ".experts.7.w")
    assert split_layer("mlp1.weight") == ("mlp1.weight", "", "")
    assert number_ranges(["0", "1", "3", "7", "8"]) == "0..1,3,7..8"


SAYS = {
    "force": {"w": "int4"},
    "rules": {"w": Choice("mxfp4", "patterns[0]")},
    "policy": {"w": Choice("int8", "score 0.1")},
    "default": Choice("bfloat16", "default"),
}


@pytest.mark.parametrize(
    ("who", "expected"),
    [
        (("force", "rules", "policy", "default"), ("int4", "forced, over mxfp4 (patterns[0])")),
        (("force",), ("int4", "forced")),
        (("rules", "policy", "default"), ("mxfp4", "patterns[0]")),
        (("policy", "default"), ("int8", "score 0.1")),
        (("default",), ("bfloat16", "default")),
    ],
)
def test_precedence(who, expected):
    choice = combine({"w": (2, 32)}, **{key: SAYS[key] for key in who})["w"]
    assert (choice.format, choice.reason) == expected


def test_combine_keeps_roles_and_names_what_is_missing():
    combined = combine({"experts.blocks": (3, 2, 16), "block.2.w": (4, 8)}, rules=plan(), force={"block.2.w": "int8"})
    assert combined.entries["experts.blocks"] == plan().entries["experts.blocks"]
    assert combined.entries["block.2.w"].role == "mlp"
    forced = combine({"experts.blocks": (3, 2, 16)}, rules=plan(), force={"experts.blocks": "bfloat16"})
    assert forced.entries["experts.blocks"].part is None
    with pytest.raises(PlanError, match="nothing decides 'v'; add a rule"):
        combine({"w": None, "v": None}, rules={"w": Choice("int8", "r")})
    with pytest.raises(PlanError, match=r"force list names 'ww'.*did you mean 'w"):
        combine({"w1": None}, force={"ww": "int8"}, default=Choice("int8", "r"))


def test_a_choice_has_a_cause_that_a_document_keeps(tmp_path):
    plan = combine(
        {"a": (4, 32), "b": None}, force={"a": "mxfp4"}, default=Choice("bfloat16", "no rule", cause="default")
    )
    assert {name: choice.cause for name, choice in plan.items()} == {"a": "forced", "b": "default"}
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    document = plan.to_document()
    for item in document["tensors"].values():
        del item["cause"]  # as earlier versions wrote it
    old = Plan.from_document(document)
    assert {choice.cause for choice in old.values()} == {"given"}
    assert old.to_document() == document
    with pytest.raises(PlanError, match=r"the cause of 'mxfp4' must be one of forced, .*luck"):
        Choice("mxfp4", "why", cause="luck")
