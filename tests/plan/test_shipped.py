"""The manifests that come with bitplan: every tensor of their models, under every naming they promise."""

from __future__ import annotations

import json

import pytest

from bitplan.plan import SHIPPED, ManifestError, check_headers, manifest_schema, open_manifest, shipped_manifest
from bitplan.plan.shipped import shipped_text

from .samples import gpt_oss_hugging_face, gpt_oss_openai, llama, mixtral, shapes


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
    assert manifest.resolve(gguf)["blk.1.ffn_down.weight"].format == "mxfp4"
    assert manifest.resolve(gguf)["blk.1.attn_q.weight"].format == "bfloat16"


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
    with pytest.raises(ManifestError, match=r"no manifest 'lama'; there are gpt-oss.*did you mean 'llama'"):
        open_manifest("lama")
    with pytest.raises(ManifestError, match=r"x\.json: no such file"):
        open_manifest(tmp_path / "x.json")
