"""Header checks: a clean model has no finding, and each fault has its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bitplan.base.errors import Finding, ManifestError
from bitplan.formats.registry import list_formats
from bitplan.plan import Manifest, check_headers
from bitplan.plan.check_manifest import require_clean
from bitplan.plan.manifest import Rule, Tag, shipped_manifest
from tests.crosses import few
from tests.limits import assert_quick

from .samples import gpt_oss_hugging_face, gpt_oss_openai, header, llama, mixtral

BLOCKS, SCALES = "block.0.mlp.mlp1_weight.blocks", "block.0.mlp.mlp1_weight.scales"


def manifest(*rules, **change):
    return Manifest(tuple(rule if isinstance(rule, Rule) else Rule(*rule) for rule in rules), where="m.json", **change)


def small(**change):
    """A gpt-oss checkpoint of one layer with some headers replaced, or removed where None."""
    result = {**gpt_oss_openai(1, 2, 64, 32), **change}
    return {name: item for name, item in result.items() if item is not None}


def check(headers):
    return check_headers(shipped_manifest("gpt-oss"), headers)


def codes(findings):
    return [(finding.code, finding.where) for finding in findings]


def test_459_tensors_take_well_under_a_second():
    manifest, headers = shipped_manifest("gpt-oss"), gpt_oss_hugging_face()

    def passes() -> None:
        assert check_headers(manifest, headers) == []

    assert_quick(passes, 1)


def test_a_finding_for_each_unmatched_tensor():
    assert check(small(**{"extra.w": header((3, 4))})) == [
        Finding("unmatched", "extra.w", "no rule matches (shape (3, 4)); add a rule, or a final '.*' rule")
    ]


def test_a_manifest_for_another_model_is_one_finding():
    (finding,) = check(llama_like := {f"h.{i}.w": header((2, 2)) for i in range(50)})
    assert finding.code == "other-model"
    assert f"none of {len(llama_like)} tensors" in finding.message
    assert "'h.0.w', 'h.1.w', 'h.2.w' and 47 more" in finding.message
    assert check({})[0].code == "unused-rule"


def test_rules_unused_shadowed_and_optional():
    rules = manifest((".*", "bfloat16"), ("a", "bfloat16"), ("b", "bfloat16"), Rule("c", "bfloat16", optional=True))
    assert codes(check_headers(rules, {"a": header((2,))})) == [
        ("shadowed-rule", "patterns[1] a"),
        ("unused-rule", "patterns[2] b"),
    ]


def test_rules_that_overlap_and_disagree():
    rules = manifest(("a.*", "int8"), ("ab", "int8"), (".b|c", "int4"), (".*", "bfloat16"))
    result = check_headers(rules, {"ab": header((2, 2)), "aa": header((2, 2)), "c": header((2, 2)), "d": header((2,))})
    assert codes(result) == [
        ("shadowed-rule", "patterns[1] ab"),
        ("overlap", "patterns[2] .b|c"),
    ]
    assert "gives int4 to 'ab', but patterns[0] a.* comes first with int8" in result[1].message


@pytest.mark.parametrize("pattern", [".*", "^.*$", ".+"])
def test_a_last_rule_for_everything_is_a_default_and_no_fault(pattern):
    """As the pages advise, and as the finding for an unmatched tensor does."""
    assert check_headers(manifest(("a.*", "int8_row"), (pattern, "bfloat16")), {"ab": header((2, 2))}) == []
    both = {"ab": header((2, 2)), "c": header((2,))}
    assert check_headers(manifest(("a.*", "int8_row"), (pattern, "bfloat16")), both) == []
    result = check_headers(manifest((pattern, "bfloat16"), ("a.*", "int8_row")), both)
    assert [item.code for item in result] == ["shadowed-rule", "overlap"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"norm.scale": header((64,), "float32")}, ("cast", "norm.scale", "must be bfloat16, the file has float32")),
        (
            {BLOCKS: ("bfloat16", (2, 64, 2, 16), 8192)},
            ("dtype", BLOCKS, "the data of mxfp4 must be uint8, the file has bfloat16"),
        ),
        (
            {"norm.scale": ("bfloat16", (64,), 127)},
            ("size", "norm.scale", "bfloat16 of shape (64,) takes 128 bytes, the file has 127"),
        ),
        ({SCALES: None}, ("missing-scales", BLOCKS, f"its scales ({SCALES}) are not in the checkpoint")),
        ({BLOCKS: None}, ("missing-data", SCALES, f"its data ({BLOCKS}) are not in the checkpoint")),
        (
            {BLOCKS: header((2, 64, 2), "uint8"), SCALES: header((2, 64, 2, 16), "uint8")},
            ("swapped", BLOCKS, "more scales than data"),
        ),
        (
            {BLOCKS: header((2, 64, 2, 64), "uint8")},
            ("block-size", BLOCKS, "the shapes give blocks of 128, the manifest declares 32 (mxfp4)"),
        ),
        (
            {BLOCKS: header((2, 64, 2, 8), "uint8")},
            ("block-size", BLOCKS, "the shapes give blocks of 16, the manifest declares 32 (mxfp4)"),
        ),
        (
            {BLOCKS: header((2, 64, 3, 16), "uint8")},
            ("block-count", BLOCKS, "256 scales x block 32 is 8192 numbers, the data holds 12288"),
        ),
        ({BLOCKS: header((2, 32, 4, 16), "uint8")}, ("block-count", BLOCKS, "256 scales x block 32 is 8192 numbers")),
        (
            {BLOCKS: header((2, 3), "uint8"), SCALES: header((2, 2), "uint8")},
            ("nibble-parity", BLOCKS, "3 numbers to a scale is half a byte"),
        ),
        ({BLOCKS: header((), "uint8"), SCALES: header((), "uint8")}, ("block-count", BLOCKS, "the data holds 2")),
        ({SCALES: header((2, 64, 0), "uint8")}, ("block-count", BLOCKS, "0 scales x block 32 is 0 numbers")),
    ],
)
def test_faults_of_a_packed_checkpoint(change, expected):
    (finding,) = [item for item in check(small(**change)) if item.code != "unused-rule"]
    assert finding[:2] == expected[:2]
    assert expected[2] in finding.message
    assert "\n" not in finding.message


def test_scales_without_data_are_not_their_own_data():
    tags = {"FP4": {"bits": 4}, "UE8": {"bits": 8}}
    document = {"version": 1, "formats": tags, "block_size": 32, "scale_encoding": "e8m0"}
    rules = [{"regex": "w_blocks", "format": "FP4", "optional": True}, {"regex": "w_scales", "format": "UE8"}]
    manifest = Manifest.from_document(document | {"patterns": rules})
    (finding,) = check_headers(manifest, {"w_scales": header((64, 2), "uint8")})
    assert finding[:2] == ("missing-data", "w_scales")
    assert finding.message == "its data (w_blocks) are not in the checkpoint"


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ((("blocks", "FP4"), ("scales", "UE8")), []),
        (
            (("blocks", "FP4"), ("scales", "other scales")),
            [("missing-scales", "w.blocks"), ("missing-data", "w.scales")],
        ),
        ((("blocks", "FP4"), ("scales", "FP4")), [("missing-scales", "w.blocks"), ("missing-scales", "w.scales")]),
        (
            (("blocks", "FP4"), ("scales", "UE8"), ("scales|x", "FP4", "", True)),
            [("overlap", "patterns[2] w.(scales|x)")],
        ),
    ],
)
def test_two_halves_of_one_format(rules, expected):
    tags = {"FP4": Tag("mxfp4", "data"), "UE8": Tag("mxfp4", "scales"), "other scales": Tag("nvfp4", "scales")}
    rules = manifest(*((f"w.({regex})" if "|" in regex else f"w.{regex}", *rest) for regex, *rest in rules), tags=tags)
    headers = {"w.blocks": header((4, 2, 16), "uint8"), "w.scales": header((4, 2), "uint8")}
    result = [item for item in check_headers(rules, headers) if item.code not in ("dtype", "shadowed-rule")]
    assert codes(result) == expected


@pytest.mark.parametrize(
    "change",
    [
        {},
        {SCALES: ("float8_e8m0fnu", (2, 64, 2), 256)},
        {BLOCKS: header((2, 64, 32), "uint8")},  # rows of bytes, as bitplan's own files have them
    ],
)
def test_layouts_that_are_right(change):
    assert check(small(**change)) == []


@pytest.mark.parametrize(
    ("cols", "name", "padding", "expected"),
    [
        (2880, "mxfp4", "none", []),
        (2880, "fp4_u8_g128", "none", ["padding"]),  # 128 does not divide gpt-oss's 2880
        (2880, "fp4_u8_g128", "zero", []),
        (33, "mxfp4", "none", ["nibble-parity"]),
        (34, "mxfp4", "none", ["padding"]),
        (33, "mxfp4", "zero", []),
        (33, "int8_row", "none", []),
        (130, "int8_g128", "none", ["padding"]),
    ],
)
def test_rows_still_to_be_encoded(cols, name, padding, expected):
    result = check_headers(manifest(("w", name), padding=padding), {"w": header((64, cols))})
    assert [finding.code for finding in result] == expected


@pytest.mark.parametrize(
    ("dtype", "nbytes", "expected"),
    [
        ("mxfp4", 64 * 16 + 64, []),
        ("mxfp4", 64 * 16, ["size"]),
        ("bfloat16", 64 * 64, []),
        ("uint8", 64 * 32, ["dtype"]),
        ("int4_g32", 64 * 18, ["dtype"]),
    ],
)
def test_a_format_of_bitplans_in_the_header(dtype, nbytes, expected):
    result = check_headers(manifest(("w", "mxfp4")), {"w": (dtype, (64, 32), nbytes)})
    assert [finding.code for finding in result] == expected


@pytest.mark.parametrize(
    ("headers", "odd", "where", "kind"),
    [
        (
            llama(),
            r"model\.layers\.1\.self_attn\.k_proj\.weight",
            "model.layers.1.self_attn.[qkv].weight",
            "qkv",
        ),
        (llama(), r"model\.layers\.0\.mlp\.up_proj\.weight", "model.layers.0.mlp.[gate_up].weight", "gate_up"),
        (
            mixtral(),
            r"model\.layers\.0\.block_sparse_moe\.experts\.5\.w2\.weight",
            "model.layers.0.block_sparse_moe.experts.[*].w2.weight",
            "experts",
        ),
    ],
)
def test_fused_groups_with_different_formats(headers, odd, where, kind):
    result = check_headers(manifest((odd, "int8_row"), (".*", "bfloat16", "", True)), headers)
    (finding,) = [item for item in result if item.code == "fused-group"]
    assert finding.where == where
    assert finding.message.startswith(f"{kind} would get different formats")
    assert "int8_row" in finding.message


@pytest.mark.parametrize(
    ("names", "grouped"),
    [
        (("blk.0.attn_q.weight", "blk.0.attn_v.weight"), True),
        (("blk.0.attn_q.weight", "blk.0.attn_output.weight"), False),
        (("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"), True),
        (("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"), True),
        (("blk.0.ffn_gate.weight", "blk.0.ffn_down.weight"), False),
        (("blk.0.ffn_gate.weight", "blk.1.ffn_up.weight"), False),
        (("l.0.w1.weight", "l.0.w3.weight"), True),
        (("l.0.w1.weight", "l.0.w2.weight"), False),
        (("l.0.q_proj.weight", "l.0.k_proj.bias"), False),
    ],
)
def test_what_runtimes_fuse(names, grouped):
    rules = manifest((names[0].replace(".", r"\."), "int8_row"), (names[1].replace(".", r"\."), "float32"))
    result = check_headers(rules, dict.fromkeys(names, header((2, 2), "float32")))
    assert [finding.code for finding in result] == ["fused-group"] * grouped


def test_one_layer_in_another_format_is_no_fused_group():
    result = check_headers(manifest((r"model\.layers\.0\..*proj\.weight", "int8_row"), (".*", "bfloat16")), llama())
    assert result == []


def test_findings_do_not_depend_on_the_order_of_the_header():
    headers = small(**{SCALES: None, "extra.1": header((1,)), "extra.10": header((1,)), "extra.2": header((1,))})
    assert check(headers) == check(dict(reversed(headers.items())))
    assert [item.where for item in check(headers)][:3] == ["extra.1", "extra.2", "extra.10"]


def test_a_loader_gets_one_line_with_file_rule_and_tensor():
    require_clean(shipped_manifest("gpt-oss"), small(), checkpoint="c")
    with pytest.raises(ManifestError) as caught:
        require_clean(shipped_manifest("gpt-oss"), small(**{SCALES: None, "x": header((1,))}), checkpoint="dir/c")
    assert str(caught.value) == (
        "gpt-oss does not fit dir/c: unmatched: x: no rule matches (shape (1,)); add a rule, or a final '.*' rule; "
        "2 more findings, all in `bitplan verify`"
    )
    change = {BLOCKS: header((2, 64, 2, 64), "uint8")}
    with pytest.raises(ManifestError, match=r"not fit c: block-size: block\.0\..*\(patterns\[10\] \^block"):
        require_clean(shipped_manifest("gpt-oss"), small(**change), checkpoint="c")


@pytest.mark.cross("shape", [(), (0,), (3, 0), (1, 1, 1), (5,)])
@pytest.mark.cross("fmt", few(list_formats(), 16), ids=lambda fmt: fmt.name)
def test_no_shape_breaks_a_check(fmt, shape):
    rules = manifest(("w", fmt.name))
    assert {finding.code for finding in check_headers(rules, {"w": header(shape)})} <= {
        "cast",
        "dtype",
        "nibble-parity",
        "padding",
    }
    assert rules.resolve({"w": shape}).nbytes == fmt.nbytes(shape)


def test_the_docs_list_every_finding():
    page = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text()
    rows = re.findall(r"^\| ([a-z, -]+) \| (?!what)", sys.modules[check_headers.__module__].__doc__, re.MULTILINE)
    codes = {code for row in rows for code in row.split(", ")}
    assert len(codes) == 18
    assert sorted(codes) == sorted(set(re.findall(r"`([a-z-]+)`", page)) & codes)


@pytest.mark.parametrize(
    ("base", "name", "codes"),
    [("tensor", None, ["scale-base"]), ("tensor", "w.base", []), ("tensor", "w.blocks.base", []), (0.5, None, [])],
)
def test_a_base_that_is_nowhere(base, name, codes):
    document = {
        "version": 1,
        "formats": {"FP4": {}, "UE8": {}},
        "patterns": [
            {"regex": ".*blocks", "format": "FP4"},
            {"regex": ".*scales", "format": "UE8"},
            {"regex": r".*\.base", "format": "F32", "optional": True},
        ],
        "block_size": 128,
        "scale_encoding": "linear_uint8",
        "scale_base": base,
    }
    headers = {"w.blocks": header((4, 2, 64), "uint8"), "w.scales": header((4, 2), "uint8")}
    headers |= {name: header((), "float32")} if name else {}
    result = check_headers(Manifest.from_document(document), headers)
    assert [finding.code for finding in result] == codes
