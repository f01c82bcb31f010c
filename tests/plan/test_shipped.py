"""The manifests that come with bitplan: every tensor of their models, under every naming they promise."""

from __future__ import annotations

import json

import pytest

from bitplan.base.errors import ManifestError
from bitplan.plan import check_headers
from bitplan.plan.manifest import SHIPPED, manifest_schema, open_manifest, shipped_manifest, shipped_text

from .samples import gpt_oss_hugging_face, gpt_oss_openai, header, llama, mixtral, shapes


def test_gpt_oss_has_363_tensors_or_459():
    assert len(gpt_oss_openai()) == 363
    assert len(gpt_oss_hugging_face()) == 459


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("gpt-oss", gpt_oss_openai()),
        ("gpt-oss", gpt_oss_hugging_face()),
        ("gpt-oss", gpt_oss_openai(36, 128)),
        ("llama", llama()),
        ("mixtral", mixtral()),
    ],
    ids=["openai-20b", "hugging-face-20b", "openai-120b", "llama", "mixtral"],
)
def test_all_tensors_are_covered_without_a_finding(name, headers):
    assert len(shipped_manifest(name).resolve(shapes(headers))) == len(headers)
    assert check_headers(shipped_manifest(name), headers) == []


@pytest.mark.parametrize("headers", [gpt_oss_openai(), gpt_oss_hugging_face()], ids=["openai", "hugging face"])
def test_gpt_oss_20b_sizes(headers):
    plan = shipped_manifest("gpt-oss").resolve(shapes(headers))
    rows = {(row.role, row.format): row for row in plan.bytes_by_role_and_format()}
    assert round(rows["all", "mxfp4"].nbytes / 2**30, 2) == 9.46
    assert round(rows["all", "mxfp4"].ratio, 2) == 3.76
    assert plan.nbytes == sum(header.nbytes for header in headers.values())
    assert {row.role for row in plan.table()} == {"embed", "norm", "attn", "bias", "router", "mlp_weight", "mlp_scale"}


def test_the_two_namings_of_gpt_oss_are_one_map_both_ways():
    aliases, ours, others = shipped_manifest("gpt-oss").aliases, gpt_oss_openai(), gpt_oss_hugging_face()
    translated = [other for name in ours for other in aliases.to_others(name)]
    assert sorted(translated) == sorted(others)
    assert {aliases.to_ours(name) for name in others} == set(ours)
    for name in ours:
        assert {aliases.to_ours(other) for other in aliases.to_others(name)} == {name}


def test_a_name_gets_the_same_format_under_either_naming():
    manifest, ours, others = shipped_manifest("gpt-oss"), gpt_oss_openai(2), gpt_oss_hugging_face(2)
    plan, other_plan = manifest.resolve(shapes(ours)), manifest.resolve(shapes(others))
    for name, entry in other_plan.entries.items():
        mine = plan.entries[manifest.aliases.to_ours(name)]
        assert (entry.choice.format, entry.role, entry.part) == (mine.choice.format, mine.role, mine.part)


def test_llama_under_ggufs_names():
    manifest, names = shipped_manifest("llama"), shapes(llama())
    gguf = {manifest.aliases.to_others(name)[0]: shape for name, shape in names.items()}
    assert "blk.1.ffn_down.weight" in gguf
    assert not set(gguf) & set(names)
    assert manifest.resolve(gguf)["blk.1.ffn_down.weight"].format == "int8_row"
    assert manifest.resolve(gguf)["blk.1.attn_norm.weight"].format == "bfloat16"


# ---- against transformers' own names ---------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = SIZES | HEADS
ENCODER = SIZES | {"num_attention_heads": 4}
# Manifest -> the models it is for: class, configuration, and what is not as usual.
FAMILIES = {
    "llama": [
        ("LlamaForCausalLM", "LlamaConfig", SMALL),
        ("LlamaForCausalLM", "LlamaConfig", SMALL | {"attention_bias": True, "mlp_bias": True}),
    ],
    "mistral": [("MistralForCausalLM", "MistralConfig", SMALL)],
    "qwen": [("Qwen2ForCausalLM", "Qwen2Config", SMALL), ("Qwen3ForCausalLM", "Qwen3Config", SMALL | {"head_dim": 16})],
    "gemma": [
        ("Gemma2ForCausalLM", "Gemma2Config", SMALL | {"head_dim": 16}),
        ("Gemma3ForCausalLM", "Gemma3TextConfig", SMALL | {"head_dim": 16}),
    ],
    "phi3": [("Phi3ForCausalLM", "Phi3Config", SMALL)],
    "bert": [
        ("BertModel", "BertConfig", ENCODER), ("BertForMaskedLM", "BertConfig", ENCODER),
        ("BertForSequenceClassification", "BertConfig", ENCODER),
    ],
    "mixtral": [("MixtralForCausalLM", "MixtralConfig", SMALL | {"num_local_experts": 2})],
    "qwen3-moe": [
        ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", SMALL | {"head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1,
         "moe_intermediate_size": 32, "mlp_only_layers": [1], "attention_bias": True}),
    ],
}  # fmt: skip
# Files of mixtures keep each expert by itself, where transformers 5 has one stack in memory.
IN_FILES = {
    "mixtral": ("block_sparse_moe", ("w1", "w2", "w3")),
    "qwen3-moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
FORMAT_OF_ROLE = {
    "norm": ("bfloat16", "float32"),
    "bias": ("bfloat16", "float32"),
    "router": ("bfloat16",),
    "position": ("float32",),
}


def tiny(family):
    """Names and shapes of every model of a family, built without memory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for model, config, options in FAMILIES[family]:
        with torch.device("meta"):
            made = getattr(transformers, model)(getattr(transformers, config)(**options))
        result = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
        yield result
        if family in IN_FILES:
            block, parts = IN_FILES[family]
            stacked = {
                name: name.replace(".mlp.gate.", f".{block}.gate.") for name in result if ".experts." not in name
            }
            yield {other: result[name] for name, other in stacked.items()} | {
                f"model.layers.0.{block}.experts.{expert}.{part}.weight": (64, 64)
                for expert in range(2)
                for part in parts
            }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_under_transformers_own_names(family):
    """Every tensor has the intended rule, and every rule has a tensor in some model of the family."""
    manifest, used = shipped_manifest(family), set()
    for tensors in tiny(family):
        plan = manifest.resolve(tensors)
        for name, entry in plan.entries.items():
            used.add(manifest.match(name).index)
            expected = FORMAT_OF_ROLE.get(entry.role, ("int8_row",))
            if len(tensors[name]) > 1 and ".experts." in name:
                expected = ("mxfp4",)
            if entry.role == "head" and name.startswith("classifier"):
                expected = ("float32",)
            assert entry.choice.format in expected, (name, entry)
            if len(entry.shape) == 1 and entry.role != "head":
                assert entry.role in ("norm", "bias"), (name, entry)
        kind = "float32" if family == "bert" else "bfloat16"
        codes = {finding.code for finding in check_headers(manifest, {n: header(s, kind) for n, s in tensors.items()})}
        assert codes == set()
    unused = {rule.pattern for index, rule in enumerate(manifest.rules) if index not in used}
    assert {pattern for pattern in unused if "rotary_emb" not in pattern} == set()


@pytest.mark.parametrize(
    ("family", "arch"),
    [("llama", "LLAMA"), ("mistral", "LLAMA"), ("phi3", "PHI3"), ("gemma", "GEMMA3"), ("qwen", "QWEN3")],
)
def test_aliases_are_ggufs_own_names(family, arch):
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], 2)
    aliases = shipped_manifest(family).aliases
    for tensors in tiny(family):
        for name in tensors:
            expected = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if expected is not None:
                assert aliases.to_others(name) == (expected,)


@pytest.mark.parametrize("name", SHIPPED)
def test_they_follow_the_schema(name):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(shipped_text(name)), manifest_schema())


def test_a_folder_does_not_hide_a_manifest_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    assert open_manifest("llama") == shipped_manifest("llama")


def test_open_by_name_or_by_path(tmp_path):
    assert open_manifest("llama") == shipped_manifest("llama")
    (tmp_path / "m.json").write_bytes(shipped_text("llama"))
    assert open_manifest(tmp_path / "m.json").rules == shipped_manifest("llama").rules
    with pytest.raises(ManifestError, match=r"no manifest 'lama'; there are bert.*did you mean 'llama'"):
        open_manifest("lama")
    with pytest.raises(ManifestError, match=r"x\.json: no such file"):
        open_manifest(tmp_path / "x.json")
