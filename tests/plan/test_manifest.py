"""Manifest: what is read, what is refused and how, and which rule wins."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from bitplan.base.documents import keys_of
from bitplan.base.errors import ManifestError
from bitplan.plan import Manifest, Plan, check_headers, combine
from bitplan.plan.manifest import _KEYS, _TAG_KEYS, Rule, Tag, expand_raw_map, manifest_schema
from bitplan.plan.structure.families import guess_role
from tests.limits import assert_quick

RAW = {
    "embedding.weight": "BF16",
    "block.[i].attn.norm.scale": "BF16",
    "block.[i].mlp.mlp1_weight.blocks": "FP4",
    "block.[i].mlp.mlp1_weight.scales": "UE8",
}


def gpt_oss_rules(**change):
    """The gpt-oss manifest as published, its escapes corrected."""
    result = {
        "version": 1,
        "formats": {
            "BF16": {"bits": 16, "role": ["norm", "embed", "attn", "bias"]},
            "FP4": {"bits": 4, "role": ["mlp_weight"]},
            "UE8": {"bits": 8, "role": ["mlp_scale"]},
        },
        "patterns": [
            {"regex": r"^embedding\.weight$", "format": "BF16"},
            {"regex": r"^block\.(\d+)\.attn\.qkv\.(weight|bias)$", "format": "BF16"},
            {"regex": r"^block\.(\d+)\.mlp\.mlp1_weight\.blocks$", "format": "FP4"},
            {"regex": r"^block\.(\d+)\.mlp\.mlp1_weight\.scales$", "format": "UE8"},
        ],
        "fused_dequant": True,
        "block_size": 128,
        "scale_encoding": "linear_uint8",
        "scale_base": 0.001,
        **change,
    }
    return {key: value for key, value in result.items() if value is not None}


@functools.cache
def schema_validator():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(manifest_schema())
    return jsonschema.Draft202012Validator(manifest_schema())


def schema_errors(document):
    return [error.message for error in schema_validator().iter_errors(document)]


def rules(*items, **change):
    return {"version": 1, "patterns": [{"regex": regex, "format": name} for regex, name in items], **change}


def test_it_reads_as_fp4_with_linear_scales():
    manifest = Manifest.from_document(gpt_oss_rules())
    assert manifest.tags["FP4"] == Tag("fp4_u8_g128", "data", ("mlp_weight",))
    assert manifest.tags["UE8"] == Tag("fp4_u8_g128", "scales", ("mlp_scale",))
    assert (manifest.block_size, manifest.scale_base) == (128, 0.001)
    plan = manifest.resolve({"embedding.weight": (8, 4), "block.0.mlp.mlp1_weight.blocks": (2, 1, 64)})
    assert plan["block.0.mlp.mlp1_weight.blocks"].format == "fp4_u8_g128"
    assert plan.entries["embedding.weight"].role == "embed"
    assert plan.entries["block.0.mlp.mlp1_weight.blocks"].numbers == 256


@pytest.mark.parametrize(
    ("encoding", "block", "base", "name"),
    [("e8m0", 32, None, "mxfp4"), ("linear_uint8", 128, 2, "fp4_u8_g128"), ("e4m3", 16, "tensor", "nvfp4")],
)
def test_fp4_and_ue8_make_a_format(encoding, block, base, name):
    manifest = Manifest.from_document(gpt_oss_rules(scale_encoding=encoding, block_size=block, scale_base=base))
    assert [manifest.tags[tag].format for tag in ("FP4", "UE8")] == [name, name]


def test_the_manifest_as_published_is_refused_for_its_escapes(tmp_path):
    (tmp_path / "m.json").write_text(r'{"version": 1, "patterns": [{"regex": "^block\\\\.(\\\\d+)\\\.attn$"}]}')
    with pytest.raises(ManifestError, match=r"m\.json: not valid JSON: Invalid \\escape"):
        Manifest.load(tmp_path / "m.json")


BAD = [
    ({}, "the manifest is empty"),
    ([], "the manifest is empty"),
    (None, "the manifest is empty"),
    (3, "the document must be an object, got 3"),
    ({"patterns": []}, "patterns must be a list of 1 to 1000 rules"),
    ({"patterns": [{"regex": "a", "format": "int8"}]}, "version is missing; it must be 1"),
    (gpt_oss_rules(version=2), "version must be 1, .*got 2"),
    (gpt_oss_rules(version="1"), 'version must be 1, .*got "1"'),
    (gpt_oss_rules(version=True), "version must be 1, .*got true"),
    (gpt_oss_rules(patterns=[]), "patterns must be a list of 1 to 1000 rules, got \\[\\]"),
    (gpt_oss_rules(patterns=None), "patterns is missing"),
    (gpt_oss_rules(paterns=[]), "unknown key 'paterns'; did you mean 'patterns'"),
    (gpt_oss_rules(formats={"BF16": {"bit": 16}}), "formats\\['BF16'\\]: unknown key 'bit'; did you mean 'bits'"),
    (gpt_oss_rules(formats={"BF16": {"bits": 8}}), "formats\\['BF16'\\]: bits must be 16, as bfloat16 has, got 8"),
    (
        gpt_oss_rules(formats={"UE8": {"bits": 4}}),
        "formats\\['UE8'\\]: bits must be 8, as the scales of fp4_u8_g128 has",
    ),
    (gpt_oss_rules(formats={"BF16": {"bits": "16"}}), 'bits must be an integer from 1 to 64, got "16"'),
    (gpt_oss_rules(formats={"BF61": {}}), "'BF61' is not a format of bitplan's; did you mean 'BF16'"),
    (gpt_oss_rules(formats={"X": {"format": "mxfp44"}}), "formats\\['X'\\]: format: 'mxfp44' .*did you mean 'mxfp4'"),
    (gpt_oss_rules(formats={"X": {"format": "bfloat16", "part": "scales"}}), "bfloat16 has no part 'scales'"),
    (gpt_oss_rules(formats={"X": {"format": "mxfp4", "part": "data"}}), "block_size must be 32, .*mxfp4, got 128"),
    (gpt_oss_rules(scale_base=None), "'linear_uint8' has no meaning without scale_base"),
    (gpt_oss_rules(scale_base=None, scale_encoding="e4m3", block_size=16), "'e4m3' has no meaning without scale_base"),
    (gpt_oss_rules(scale_base=0), "scale_base must be a number above 0"),
    (gpt_oss_rules(scale_base="x"), "scale_base must be"),
    (gpt_oss_rules(scale_base=True), "scale_base must be"),
    (gpt_oss_rules(block_size=64), "no format has linear_uint8 scales per 64 numbers; there are e8m0 per 32"),
    (gpt_oss_rules(block_size=127), "block_size must be an even integer"),
    (gpt_oss_rules(block_size=None), "formats\\['FP4'\\]: needs block_size"),
    (gpt_oss_rules(scale_encoding="log"), "scale_encoding must be one of"),
    (gpt_oss_rules(axis=0), "axis must be -1, .*got 0"),
    (gpt_oss_rules(nibble_order="high"), "nibble_order must be one of"),
    (gpt_oss_rules(nibble_order="halves"), "patterns\\[2\\] .*: nibble_order must be 'low_first', .*got 'halves'"),
    (gpt_oss_rules(padding="right"), "padding must be one of 'none', 'zero'"),
    (gpt_oss_rules(fused_dequant=1), "fused_dequant must be true, .*got 1"),
    (gpt_oss_rules(fused_dequant=False), "fused_dequant must be true, .*strategy=.*got false"),
    (rules(("w", "fp4_u8_g128"), scale_base=0.5), "scale_base has no effect"),
    (gpt_oss_rules(scale_encoding="e8m0", block_size=32, scale_base=0.5), "scale_base has no effect"),
    (gpt_oss_rules(aliases={"a.[i]": "b"}), "aliases: 'b' must have the placeholders of 'a.\\[i\\]'"),
    (gpt_oss_rules(aliases={"a": 3}), "aliases\\['a'\\] must be a name or a list of names, got 3"),
    (rules(("a", "int9")), "patterns\\[0\\] a: format 'int9' is neither .*did you mean 'int"),
    (rules(("a", "int8"), ("(", "int8")), "patterns\\[1\\] \\( is not a valid regular expression"),
    (rules((r"(a)\1", "int8")), "patterns\\[0\\] .* cannot be matched in bounded time: a back reference"),
    (rules(("a{99999}", "int8")), "patterns\\[0\\] .* is too large"),
    (rules(("", "int8")), "patterns\\[0\\]: regex must be a string that is not empty"),
    (rules((3, "int8")), "patterns\\[0\\]: regex must be .*got 3"),
    ({"version": 1, "patterns": ["a"]}, 'patterns\\[0\\] must be an object, got "a"'),
    ({"version": 1, "patterns": [{"regex": "a"}]}, "patterns\\[0\\]: format is missing"),
    (gpt_oss_rules(aliases={"a.[i]": "b" * 9999}), "aliases: 'bbb"),
    (rules(("a\n(", "int8")), r"patterns\[0\] a\\n\( is not a valid"),
    (rules(("a", "x\n" * 999)), "neither in `formats`"),
    ({"a": "BF17"}, "patterns\\[0\\] \\^a\\$: format 'BF17' .*did you mean"),
]


@pytest.mark.parametrize(("document", "message"), BAD)
def test_a_bad_manifest_is_one_line_with_file_and_rule(document, message, tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=message) as caught:
        Manifest.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_a_file_that_is_missing_or_empty(tmp_path):
    with pytest.raises(ManifestError, match=r"none\.json: cannot be read"):
        Manifest.load(tmp_path / "none.json")
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(ManifestError, match=r"empty\.json: not valid JSON"):
        Manifest.load(tmp_path / "empty.json")


# ---- matching --------------------------------------------------------------------------------------------------------


def test_whole_name_and_first_rule():
    manifest = Manifest.from_document(rules(("a", "int8"), ("a.*", "int4"), (".*", "bfloat16")))
    plan = manifest.resolve({"a": (2,), "ab": (2,), "ba": (2,)})
    assert {name: choice.format for name, choice in plan.items()} == {"a": "int8", "ab": "int4", "ba": "bfloat16"}
    assert plan["ab"].reason == "patterns[1] a.*"
    assert manifest.matches("a") == (0, 1, 2)


def test_all_unmatched_tensors_are_in_one_error():
    manifest = Manifest((Rule("w", "int8"),), where="m.json")
    with pytest.raises(ManifestError) as caught:
        manifest.resolve({"w": (2,), "x": (3, 4), "y": ()})
    assert str(caught.value) == (
        "m.json: no rule matches 2 of 3 tensors: 'x' (shape (3, 4)), 'y' (shape ()); "
        "add a rule, or a final '.*' rule to set a default"
    )
    with pytest.raises(ManifestError, match=r"'x19' .* and 980 more; add a rule") as caught:
        manifest.resolve({f"x{i}": (1,) for i in range(1000)})
    assert len(str(caught.value)) < 1000
    with pytest.raises(ManifestError, match=r"'x19' \(shape \(1,\)\); add a rule"):  # all are shown
        manifest.resolve({f"x{i}": (1,) for i in range(20)})


def test_resolve_does_not_depend_on_the_order_of_tensors():
    manifest = Manifest.from_document(rules((".*", "int8")))
    assert manifest.resolve({"a": (1,), "b": (2,)}).to_json() == manifest.resolve({"b": (2,), "a": (1,)}).to_json()


def test_a_rule_that_would_backtrack_for_ever_is_answered():
    def answer():
        manifest = Manifest.from_document(
            rules(("(a+)+$", "int8"), ("(a|a)*b", "int8"), ("(.*)*x", "int8"), (".*", "int4"))
        )
        assert manifest.resolve({"a" * 5000 + "!": (2,)})["a" * 5000 + "!"].format == "int4"

    assert_quick(answer, seconds=2)


def test_padding_goes_into_the_plan_and_its_document(tmp_path):
    plan = Manifest.from_document(rules((".*", "mxfp4"), padding="zero")).resolve({"w": (4, 33)})
    assert (plan.padding, plan.pad) == ("zero", "zero")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan != Plan(plan.entries)
    assert combine({"w": (4, 33)}, rules=plan).padding == "zero"


HOSTILE = [".*", ".*.*.*.*.*a", "(.*)*x", "(.*)[a-m].{90}", "(a|b|.)*" * 40, "(.?){499}", "[a-z.]*{n}"]


@pytest.mark.parametrize("regex", HOSTILE)
def test_a_hostile_manifest_of_20_kilobytes_is_answered_in_a_second(regex):
    """Rules times names times letters: all rules are run in one pass, and what that takes is bounded."""
    count = min(1000, 20_000 // (len(regex) + 30))
    document = rules(*((regex.replace("{n}", str(n)), ("int8", "int4")[n % 2]) for n in range(count)))
    headers = {f"model.layers.{n}.mlp.down_proj.weight": ("bfloat16", (64, 64), 8192) for n in range(500)}

    def answer():
        try:
            check_headers(Manifest.from_document(document), headers)
        except ManifestError as error:
            message = str(error)
        else:
            message = "answered"
        assert "more than" in message or "too large" in message or message == "answered"

    assert_quick(answer, seconds=1)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("embedding.weight", "embed"),
        ("block.0.attn.qkv.bias", "bias"),
        ("block.0.mlp.norm.scale", "norm"),
        ("block.0.attn.sinks", "attn"),
        ("block.0.mlp.gate.weight", "router"),
        ("block.0.mlp.mlp1_weight.blocks", "mlp_weight"),
        ("block.0.mlp.mlp1_weight.scales", "scale"),
        ("rope.freqs", "rope"),
        ("norm1.linear.weight", "other"),
        ("blk.0.ffn_gate_inp.weight", "router"),
        ("encoder.layer.0.attention.output.LayerNorm.weight", "norm"),
        ("bert.embeddings.position_embeddings.weight", "position"),
    ],
)
def test_roles_told_from_names(name, role):
    assert guess_role(name) == role


# ---- raw maps --------------------------------------------------------------------------------------------------------


def test_a_raw_map_is_expanded():
    document = expand_raw_map(RAW)
    assert [rule["regex"] for rule in document["patterns"]] == [
        r"^embedding\.weight$",
        r"^block\.(\d+)\.attn\.norm\.scale$",
        r"^block\.(\d+)\.mlp\.mlp1_weight\.blocks$",
        r"^block\.(\d+)\.mlp\.mlp1_weight\.scales$",
    ]
    assert schema_errors(document) == []
    plan = Manifest.from_document(RAW).resolve(
        {"block.11.mlp.mlp1_weight.blocks": (2, 1, 16), "embedding.weight": (2,)}
    )
    assert [choice.format for choice in plan.values()] == ["mxfp4", "bfloat16"]
    assert Manifest.from_document(document).match("block.x.attn.norm.scale") is None
    assert expand_raw_map(RAW, block_size=128, scale_encoding="linear_uint8", scale_base=0.5)["scale_base"] == 0.5


# ---- schema ----------------------------------------------------------------------------------------------------------


def test_the_schema_has_the_readers_keys():
    schema = manifest_schema()
    properties = schema["properties"]
    assert properties.keys() == _KEYS.keys()
    assert properties["patterns"]["items"]["properties"].keys() == keys_of(Rule).keys()
    assert properties["formats"]["additionalProperties"]["properties"].keys() == _TAG_KEYS.keys()


@pytest.mark.parametrize(
    "document",
    [gpt_oss_rules(), rules(("a", "int8")), gpt_oss_rules(aliases={"a.[i]": ["b.[i]", "c.[i]"]}, padding="zero")],
)
def test_what_the_reader_takes_the_schema_takes(document):
    Manifest.from_document(document)
    assert schema_errors(document) == []


# Faults that a schema cannot see: they need the table of formats, another key, or the pattern itself.
ONLY_THE_READER = (
    "bits must be 16", "bits must be 8", "not a format", "did you mean 'mxfp4'", "has no part", "block_size must be 32",
    "no format has", "needs block_size", "patterns\\[2\\]", "aliases: ", "neither", "regular expression",
    "bounded time", "too large", "scale_base has no effect", "is not a valid", "\\^a\\$",
)  # fmt: skip


@pytest.mark.parametrize(("document", "message"), BAD)
def test_what_the_schema_refuses(document, message):
    only_the_reader = any(text in message for text in ONLY_THE_READER) and document != {"a": "BF17"}
    assert bool(schema_errors(document)) != only_the_reader


def test_the_examples_in_the_docs_are_read():
    page = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text()
    examples = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    assert len(examples) == 2
    for document in examples:
        assert Manifest.from_document(document).rules
    assert schema_errors(examples[0]) == []
    for key in (*_KEYS, *keys_of(Rule), *_TAG_KEYS):
        assert f"`{key}`" in page, key
