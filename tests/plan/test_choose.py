"""choose_formats: one row of the table of rules after another, for names of many architectures."""

from __future__ import annotations

import pytest

from bitplan.base.errors import ArgumentError, PlanError
from bitplan.files.tensor_file import TensorSpec
from bitplan.plan import Choice, Manifest, Plan, Planned, choose_formats

ROWS = [
    # name, shape, what --format mxfp4 gives it, a word of the reason
    ("model.layers.0.self_attn.q_proj.weight", (64, 64), "mxfp4", "weight of two axes"),
    ("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 128), "mxfp4", "weight of two axes"),
    ("transformer.h.0.attn.c_attn.weight", (64, 192), "mxfp4", "weight of two axes"),
    ("norm1.linear.weight", (64, 64), "mxfp4", "weight of two axes"),  # a linear layer inside a norm
    ("model.embed_tokens.weight", (100, 64), "int8_row", "8 bits, for in 4"),
    ("token_embd.weight", (100, 64), "int8_row", "8 bits"),
    ("lm_head.weight", (100, 64), "int8_row", "8 bits"),
    ("cls.predictions.decoder.weight", (100, 64), "int8_row", "8 bits"),
    ("model.layers.0.input_layernorm.weight", (64,), "bfloat16", "one axis"),
    ("model.layers.0.self_attn.sinks", (64,), "bfloat16", "one axis"),
    ("bert.embeddings.LayerNorm.weight", (2, 1024), "bfloat16", "a norm"),
    ("model.layers.0.mlp.experts.down_proj_bias", (32, 64), "bfloat16", "a bias"),
    ("model.layers.0.mlp.gate.weight", (32, 64), "bfloat16", "a router"),
    ("model.layers.0.mlp.router.weight", (32, 64), "bfloat16", "a router"),
    ("model.layers.0.mlp.shared_expert_gate.weight", (16, 64), "bfloat16", "a router"),
    ("blk.0.ffn_gate_inp.weight", (32, 64), "bfloat16", "a router"),
    ("blk.0.ffn_gate.weight", (64, 64), "mxfp4", "weight of two axes"),
    ("model.layers.0.mlp.gate_proj.weight", (64, 64), "mxfp4", "weight of two axes"),
    ("bert.embeddings.position_embeddings.weight", (512, 64), "bfloat16", "a position table"),
    ("transformer.wpe.weight", (512, 64), "bfloat16", "a position table"),
    ("vit.pos_embed", (1, 197, 64), "bfloat16", "a position table"),
    ("model.rotary_emb.cos_cached", (512, 64), "bfloat16", "a rotary table"),
    ("backbone.layers.0.mixer.A_log", (128, 16), "bfloat16", "a state matrix"),
    ("qformer.query_tokens", (1, 32, 64), "bfloat16", "single learned table"),
    ("vit.patch_embed.proj.weight", (64, 3, 16, 16), "bfloat16", "a convolution kernel"),
    ("backbone.layers.0.mixer.conv1d.weight", (128, 1, 4), "bfloat16", "a convolution kernel"),
    ("adapter.weight", (4, 64), "bfloat16", "under 1024 numbers"),
    ("w.weight", (64, 48), "nvfp4", "rows of 48 are not whole blocks of 32 (mxfp4), nvfp4 holds them"),
    ("w.weight", (64, 33), "int8_row", "int8_row holds them"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "expected", "why"), ROWS)
def test_one_tensor(name, shape, expected, why):
    choice = choose_formats({name: TensorSpec.of(name, shape, dtype="bfloat16")}, "mxfp4")[name]
    assert (choice.format, why in choice.reason) == (expected, True), choice


@pytest.mark.parametrize(
    ("wanted", "name", "shape", "expected"),
    [
        ("int8_row", "lm_head.weight", (100, 64), "int8_row"),  # 8 bits are 8 bits
        ("fp8_e4m3_row", "lm_head.weight", (100, 64), "fp8_e4m3_row"),
        ("q4_0_gguf", "lm_head.weight", (100, 64), "q8_0_gguf"),  # what a GGUF file can hold
        ("q4_0_gguf", "w.weight", (64, 40), "bfloat16"),
        ("int8_g128", "w.weight", (64, 64), "int8_row"),
        ("float32", "model.layers.0.mlp.gate.weight", (32, 64), "float32"),  # a plain type
        ("float32", "norm.weight", (64,), "bfloat16"),
    ],
)  # fmt: skip
def test_other_formats(wanted, name, shape, expected):
    assert choose_formats({name: TensorSpec.of(name, shape, dtype="bfloat16")}, wanted)[name].format == expected


def test_a_kernel_of_one_dimension_is_no_matrix():
    assert choose_formats({"conv.weight": (64, 64, 3)}, "int8_row")["conv.weight"].format == "float32"
    assert choose_formats({"experts.weight": (8, 16, 64)}, "int8_row")["experts.weight"].format == "int8_row"


def test_tensors_that_are_no_floats_stay_and_keep_their_bytes(tmp_path):
    tensors = {
        "position_ids": TensorSpec.of("position_ids", (1, 512), dtype="int64"),
        "mask": TensorSpec.of("mask", (8, 8), dtype="bool"),
        "w.blocks": TensorSpec.of("w.blocks", (64, 32), dtype="uint8"),
        "w.scales": TensorSpec.of("w.scales", (64, 64), dtype="float8_e8m0fnu"),
    }
    plan = choose_formats(tensors, "mxfp4")
    assert {entry.choice.reason for entry in plan.entries.values()} == {"not floats"}
    assert {name: entry.nbytes for name, entry in plan.entries.items()} == {
        "position_ids": 4096, "mask": 64, "w.blocks": 2048, "w.scales": 4096,
    }  # fmt: skip
    assert {row.name: row.format for row in plan.table()}["mask"] == "bool"
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_keep_and_only_take_names_patterns_and_modules():
    tensors = {f"a.{part}.weight": (64, 64) for part in ("x", "y", "norm")} | {"lm_head.weight": (64, 64)}
    stored = choose_formats(tensors, "mxfp4", keep=["a.x", "lm_*"])
    assert {name: choice.format for name, choice in stored.items()} == {
        "a.x.weight": "float32", "a.y.weight": "mxfp4", "a.norm.weight": "float32", "lm_head.weight": "float32",
    }  # fmt: skip
    assert stored["a.x.weight"].reason == "kept by 'a.x'"
    asked = choose_formats(tensors, "mxfp4", only=["a.norm.weight", "lm_head"])
    assert [name for name, choice in asked.items() if choice.format == "mxfp4"] == ["a.norm.weight", "lm_head.weight"]
    whole = choose_formats(tensors, "mxfp4")
    assert choose_formats(tensors, whole, keep=["a.x", "lm_*"])["lm_head.weight"] == stored["lm_head.weight"]


def test_packed_tensors_are_copied_or_encoded_again():
    tensors = {
        "w.weight": TensorSpec.of("w.weight", (64, 33), "mxfp4"),
        "norm.weight": TensorSpec.of("norm.weight", (64,), "int8"),
    }
    plan = choose_formats(tensors, "mxfp4")
    assert (plan["w.weight"].format, plan["norm.weight"].format) == ("mxfp4", "int8")
    assert choose_formats(tensors, "int8_row")["w.weight"].format == "int8_row"


def test_tensors_in_place_of_shapes_are_refused():
    with pytest.raises(
        ArgumentError, match="must map names to shapes or TensorSpecs, got a float; of a state_dict it is"
    ):
        choose_formats({"w": 1.5}, "int8_row")
    with pytest.raises(TypeError, match="must map names to shapes, got a list"):
        choose_formats(["w"], "int8_row")
    with pytest.raises(ArgumentError, match="model: 'w' maps to a dict, and a mapping's values are formats or None"):
        choose_formats({"w": (4, 32)}, {"w": {"format": "int8_row"}}, where="model")


# ---- a mapping, a manifest, a plan -----------------------------------------------------------------------------------

MODEL = {
    "layers.0.up.weight": (64, 64),
    "layers.0.norm.weight": (64,),
    "layers.1.up.weight": (64, 64),
    "layers.1.up.bias": TensorSpec.of("layers.1.up.bias", (64,), dtype="bfloat16"),
    "steps": TensorSpec.of("steps", (), dtype="int64"),
}


def chosen(formats, **options):
    return {name: choice.format for name, choice in choose_formats(MODEL, formats, **options).items()}


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"layers.0": "mxfp4"}, {"layers.0.up.weight": "mxfp4"}),  # a module: its matrices
        ({"layers.*.up": "mxfp4"}, {"layers.0.up.weight": "mxfp4", "layers.1.up.weight": "mxfp4"}),
        ({"layers.0": "int8", "*": "mxfp4"}, {"layers.0.up.weight": "int8", "layers.1.up.weight": "mxfp4"}),
        ({"layers.0": None, "*": "mxfp4"}, {"layers.1.up.weight": "mxfp4"}),
        ({"layers.0.norm.weight": "bfloat16"}, {"layers.0.norm.weight": "bfloat16"}),  # one axis: by its own name
        ({"*.weight": "mxfp4", "steps": "int8"}, {"layers.0.up.weight": "mxfp4", "layers.1.up.weight": "mxfp4"}),
    ],
)
def test_a_mapping(mapping, expected):
    stays = {"layers.1.up.bias": "bfloat16", "steps": "int64"}
    assert chosen(mapping) == dict.fromkeys(MODEL, "float32") | stays | expected


def test_the_same_plan_by_a_mapping_a_manifest_or_a_plan():
    rules = [{"regex": r"layers\.\d+\.up\.weight", "format": "mxfp4"}, {"regex": ".*", "format": "F32"}]
    manifest = Manifest.from_document({"version": 1, "patterns": rules})
    by_mapping = chosen({"layers.[01].up.weight": "mxfp4", "layers.1.up.bias": "float32"})
    assert chosen(manifest) == by_mapping
    assert chosen(choose_formats(MODEL, manifest)) == by_mapping
    assert chosen(manifest, keep=["layers.0"]) == by_mapping | {"layers.0.up.weight": "float32"}
    assert choose_formats(MODEL, manifest)["steps"].reason == "not floats"


def test_what_no_pattern_names_is_as_the_base_has_it():
    base = Plan({"layers.0.up.weight": Planned(Choice("int8", "before")), "steps": Planned(Choice("int8", "before"))})
    plan = choose_formats(MODEL, {"layers.1": "mxfp4", "steps": None}, base=base)
    assert (plan["layers.0.up.weight"].reason, plan["steps"].reason) == ("before", "'steps': None in the mapping")


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layers.0.upp", "; did you mean 'layers.0.up'"),
        (r"^layers\.\d+\.up\.weight$", r"; it is read as a shell pattern .*: write 'layers.\*.up.weight'"),
        (r"layers\.(0|1)\.up", "not as a regular expression: give one for each, or a manifest"),
        (".*down.*", r"write '\*down\*'"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(pattern, hint):
    for formats, keep in (({pattern: "mxfp4"}, ()), ("mxfp4", [pattern])):
        with pytest.raises(PlanError, match=rf"^file: the pattern .* matches no tensor.*{hint}"):
            choose_formats(MODEL, formats, keep=keep, where="file")


def test_a_plan_for_other_tensors_is_refused():
    plan = choose_formats(MODEL, "mxfp4")
    fewer = Plan({name: entry for name, entry in plan.entries.items() if name != "steps"})
    with pytest.raises(PlanError, match="for other tensors: it lacks 1: 'steps'; `bitplan plan` makes one"):
        choose_formats(MODEL, fewer)
    with pytest.raises(PlanError, match="for other tensors: it has beyond them 1: 'steps'"):
        choose_formats({name: MODEL[name] for name in fewer}, plan)
    with pytest.raises(PlanError, match=r"layers.0.up.weight: the plan is for shape \(64, 64\), here it is \(64, 32\)"):
        choose_formats(MODEL | {"layers.0.up.weight": (64, 32)}, plan)


def test_types_that_are_no_formats_stay():
    for dtype in ("complex64", "complex128", "float8_e4m3fnuz", "float4_e2m1fn_x2"):
        assert choose_formats({"w": TensorSpec.of("w", (64,), dtype=dtype)}, "mxfp4").entries["w"].stored == dtype


def test_a_matrix_of_few_columns_is_no_convolution():
    name = "w.weight"
    choice = choose_formats({name: TensorSpec.of(name, (1024, 8), dtype="bfloat16")}, "int8_row")[name]
    assert (choice.format, "weight of two axes" in choice.reason) == ("int8_row", True), choice


def test_causes_say_who_decided():
    shapes = {
        "a.weight": (64, 64),
        "b.weight": (64, 64),
        "norm.weight": (64,),
        "count": TensorSpec.of("count", (), dtype="int64"),
    }
    by_keep = choose_formats(shapes, "mxfp4", keep=["b.*"])
    assert [by_keep[name].cause for name in shapes] == ["default", "kept", "default", "held"]
    by_only = choose_formats(shapes, "mxfp4", only=["a.*"])
    assert [by_only[name].cause for name in ("a.weight", "b.weight")] == ["rule", "kept"]
    mapped = choose_formats(shapes, {"a.*": "mxfp4", "b.*": None})
    assert [mapped[name].cause for name in shapes] == ["rule", "kept", "held", "held"]
