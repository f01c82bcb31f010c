"""`--kv` from end to end: a folder that says how keys and values are kept, and every verb that runs or hands it on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import bitplan
import bitplan.transformers
from bitplan.cli import run
from bitplan.packed.rounded_kv import kv_of
from bitplan.plan.kv_formats import KVFormats
from tests.cli.verbs.test_perplexity_verb import LETTERS, save_llama

BOTH = "int8_row:int4_g32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv")
    save_llama(folder / "llama", blocks=2)
    (folder / "text.txt").write_text(" ".join(LETTERS[at % 23 : at % 23 + 4] for at in range(0, 600, 7)))
    command = ["quantize", folder / "llama", folder / "packed", "--format", "int8_row", "--kv", "int8:int4"]
    assert run([*map(str, command)]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("bitplan.cli.show.LINE_EVERY_S", 1e6)
    capsys.readouterr()


def printed(*command: str, capsys) -> dict:
    assert run([*command, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_folder_says_how_keys_and_values_are_kept_to_all_that_load_it(tmp_path) -> None:
    config = json.loads(Path("packed/config.json").read_text())
    assert config["quantization_config"]["kv_cache"] == {"keys": "int8_row", "values": "int4_g32"}
    loaded = bitplan.load_packed("packed").model
    theirs = transformers.AutoModelForCausalLM.from_pretrained("packed")
    assert str(kv_of(loaded)) == str(kv_of(theirs)) == BOTH
    ids = torch.arange(3, 19)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, theirs(ids).logits)
    bitplan.save_packed(loaded, tmp_path / "again")
    assert str(kv_of(bitplan.load_packed(tmp_path / "again").model)) == BOTH


def test_generate_and_bench_keep_them_so_and_say_it(capsys) -> None:
    made = printed("generate", "packed", "once upon", "--max-tokens", "4", capsys=capsys)
    assert made["kv"] == BOTH
    tokens = made["prompt_tokens"] + made["tokens"] - 1  # the last one made was not read
    assert made["kv_bytes"] == 2 * tokens * (36 + 18)
    plain = printed("generate", "packed", "once upon", "--max-tokens", "4", "--kv", "keep", capsys=capsys)
    assert plain["kv"] is None
    assert run(["generate", "llama", "once upon", "--max-tokens", "3", "--kv", "fp8"]) == 0
    assert "Keys and values were kept in fp8_e4m3_row" in capsys.readouterr().out
    rows = printed(
        *("bench", "llama", "--kv", "int8", "--batch", "1", "--prompt-tokens", "4", "--tokens", "2", "--repeats", "1"),
        capsys=capsys,
    )["rows"]
    assert [row["kv"] for row in rows] == ["int8_row"]


def test_judge_measures_what_formats_of_keys_and_values_do(capsys) -> None:
    text = ("--text", "text.txt", "--context", "32", "--no-floor")
    kl = {
        kv: printed("judge", "llama", "--kv", kv, *text, capsys=capsys)["rows"][0]["kl"]["mean"]
        for kv in ("keep", "int8", "int4")
    }
    assert kl["keep"] == 0.0
    assert 0 < kl["int8"] < kl["int4"]
    packed = printed("judge", "llama", "packed", *text, capsys=capsys)["rows"][0]["kl"]["mean"]
    without = printed("judge", "llama", "packed", "--kv", "keep", *text, capsys=capsys)["rows"][0]["kl"]["mean"]
    assert packed != without  # the folder says that they are in formats


def test_exports_say_how_an_engine_is_told(capsys) -> None:
    notes = printed("export", "packed", "out.gguf", "--dry-run", "--format", "q8_0_gguf", capsys=capsys)["notes"]
    assert f"keys and values in {BOTH}: start llama.cpp with -ctk q8_0 -ctv q4_0 -fa on" in notes
    reasons = {f"layers.{layer}.{part}": "test" for layer in range(2) for part in ("keys", "values")}
    with bitplan.open_tensors("llama") as file:
        plan = bitplan.choose_formats(file.specs, "int8_row")
    bitplan.Plan({**plan.entries, **KVFormats("fp8", "fp8").entries(reasons)}).save("plan.json")
    assert run(["export", "llama", "ct", "--to", "compressed-tensors", "--plan", "plan.json"]) == 0
    scheme = json.loads(Path("ct/config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert scheme == {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    assert run(["quantize", "llama", "by-plan", "--plan", "plan.json"]) == 0
    assert str(kv_of(bitplan.load_packed("by-plan").model)) == "fp8_e4m3_row"


def test_a_config_with_an_unknown_format_is_refused_by_name(tmp_path, capsys) -> None:
    bitplan.save_packed(bitplan.load_packed("packed").model, tmp_path / "bad")
    path = tmp_path / "bad" / "config.json"
    path.write_text(path.read_text().replace('"int4_g32"', '"int3"'))
    assert run(["generate", str(tmp_path / "bad"), "once"]) == 2
    assert "no format of keys and values 'int3'" in capsys.readouterr().err
    assert run(["generate", "llama", "once", "--kv", "int5"]) == 2
    assert "--kv: no format of keys and values 'int5'" in capsys.readouterr().err
