"""check, plan and manifest from the shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from bitplan.cli import run
from bitplan.plan import Plan
from bitplan.plan.manifest import manifest_schema


@pytest.fixture
def llama(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shapes = {"model.embed_tokens.weight": (8, 64), "model.norm.weight": (64,), "lm_head.weight": (8, 64)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.self_attn.{part}_proj.weight": (64, 64) for part in "qkvo"}
        shapes |= {f"model.layers.{layer}.mlp.{part}_proj.weight": (64, 64) for part in ("gate", "up", "down")}
        shapes |= {f"model.layers.{layer}.{part}_layernorm.weight": (64,) for part in ("input", "post_attention")}
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, "llama.safetensors")
    return "llama.safetensors"


def test_check_says_clean(llama, capsys):
    assert run(["check", "llama", llama]) == 0
    assert "21 tensors, no findings under llama" in capsys.readouterr().out


def test_a_cast_that_quantize_makes_is_no_finding(llama, capsys):
    tensors = safetensors.torch.load_file(llama)
    safetensors.torch.save_file({name: tensor.float() for name, tensor in tensors.items()}, "wide.safetensors")
    assert run(["check", "llama", "wide.safetensors"]) == 0
    message = capsys.readouterr().out
    assert "21 tensors, no findings under llama" in message
    assert "5 tensors in float32: their rules ask for another float type, to which `bitplan quantize` casts" in message
    assert run(["check", "llama", "wide.safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_check_exits_1_with_findings(llama, capsys):
    assert run(["check", "gpt-oss", llama, "--json"]) == 1
    codes = {finding["code"] for finding in json.loads(capsys.readouterr().out)}
    assert {"unmatched", "unused-rule"} <= codes
    assert run(["check", "gpt-oss", llama]) == 1
    assert "model.layers.0.mlp.down_proj.weight" in capsys.readouterr().out


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    from bitplan.files.gpt_oss import make_checkpoint

    folder = tmp_path_factory.mktemp("gpt-oss")
    make_checkpoint(folder / "hf", naming="hf")
    make_checkpoint(folder / "model.gguf", naming="gguf")
    return folder


def _without_sinks(tensors, _config):
    del tensors["model.layers.0.self_attn.sinks"]


def _third_layer(tensors, _config):
    tensors |= {
        n.replace(".1.", ".2."): t.clone() for n, t in tensors.items() if ".layers.1." in n and "sinks" not in n
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_sinks, "missing: 'model.layers.0.self_attn.sinks'"),
        (_third_layer, "with 3 layers has 60 tensors, missing: 'model.layers.2.self_attn.sinks'"),
        (lambda _, config: config.update(num_hidden_layers=3), "num_hidden_layers is 3, and the tensors give 2"),
        (lambda _, config: config.update(num_experts_per_tok=5), "num_experts_per_tok is 5"),
        (lambda _, config: config.update(layer_types=["full_attention"]), "layer_types must name 2 layers"),
        (lambda _, config: config.update(rope_scaling={"rope_type": "yarn"}), "factor is missing"),
    ],
)
def test_check_finds_what_load_packed_refuses(gpt_oss, tmp_path, capsys, change, message):
    from bitplan import load_packed
    from bitplan.base.errors import BitplanError

    tensors = safetensors.torch.load_file(gpt_oss / "hf" / "model.safetensors")
    config = json.loads((gpt_oss / "hf" / "config.json").read_text())
    change(tensors, config)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["check", "gpt-oss", str(tmp_path), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["code"] == "gpt-oss"
    assert message in finding["message"]
    with pytest.raises(BitplanError, match=message):
        load_packed(tmp_path)


def test_gpt_oss_in_gguf_is_checked_by_the_same_manifest(gpt_oss, capsys):
    for name in ("hf", "model.gguf"):
        assert run(["check", "gpt-oss", str(gpt_oss / name), "--deep"]) == 0
        assert "41 tensors, 166.82 kB of data checked, no findings under gpt-oss" in capsys.readouterr().out


def test_check_of_a_file_alone_names_a_command_that_works(llama, capsys):
    assert run(["check", llama]) == 2
    assert f"(`bitplan manifest show` lists them), as in `bitplan verify llama {llama}`" in capsys.readouterr().err
    assert run(["check", "llama", llama]) == run(["manifest", "show"]) == 0
    assert capsys.readouterr().out.splitlines()[-9:-5] == ["bert", "gemma", "gpt-oss", "llama"]
    assert run(["manifest", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == "bert"
    assert run(["check", "none.safetensors"]) == 2
    assert "none.safetensors: no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(("suffix", "fmt"), [("safetensors", "int8_row"), ("gguf", "q8_0_gguf"), ("json", None)])
def test_a_changed_byte_of_a_file_alone_is_found_by_its_checksum(tmp_path, capsys, suffix, fmt):
    import bitplan

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    if fmt is not None:
        bitplan.apply_plan(model, fmt)
    path = tmp_path / f"packed.{suffix}"
    bitplan.save_packed(model, path)
    assert run(["check", str(path), "--deep"]) == 0
    assert capsys.readouterr().out.endswith("checked, no findings\n")
    content = bytearray(path.read_bytes())
    at = content.index(b'"weights": "') + 40 if suffix == "json" else len(content) - 1500
    content[at] = ord("A" if content[at] != ord("A") else "B")
    path.write_bytes(content)
    assert run(["check", str(path), "--deep", "--json"]) == 1
    assert "checksum" in [finding["code"] for finding in json.loads(capsys.readouterr().out)]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no device that is read without end")
@pytest.mark.parametrize(
    "line",
    [
        ["check", "/dev/zero", "LLAMA"],
        ["plan", "--from", "/dev/zero", "--bits", "4"],
        ["diff", "/dev/zero", "/dev/zero"],
        ["quantize", "LLAMA", "out.safetensors", "--plan", "/dev/zero"],
        ["quantize", "LLAMA", "out.safetensors", "--manifest", "/dev/zero"],
        ["quantize", "LLAMA", "out.safetensors", "--format", "int8_row", "--text", "/dev/zero"],
        ["judge", ".", "--text", "/dev/zero"],
        ["search", ".", "--text", "/dev/zero", "--bits", "4"],
        ["fp8", "explain", "/dev/zero", "--kind", "column", "--tokens", "5"],
        ["fp8", "merge", "--reports", "/dev/zero", "-o", "policy.json"],
        ["report", "/dev/zero", "-o", "page.html"],
        ["manifest", "expand", "/dev/zero"],
    ],
)
def test_a_device_is_no_document(llama, capsys, line):
    assert run([llama if word == "LLAMA" else word for word in line]) == 2
    assert "/dev/zero: is a device, and a" in capsys.readouterr().err


def test_plan_is_shown_and_saved(llama, capsys):
    assert run(["plan", "llama", llama, "-o", "plan.json"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.[0..1].mlp.up_proj.weight" in out
    assert "1.88" in out  # 64 numbers and a float32 scale to a row
    saved = Plan.load("plan.json")
    assert saved["model.layers.1.mlp.up_proj.weight"].format == "int8_row"
    assert run(["plan", "llama", llama, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(saved.to_json())
    assert run(["plan", "llama", llama, "--mermaid"]) == 0
    assert capsys.readouterr().out.startswith("graph TD")


def test_a_plan_without_a_manifest_is_what_quantize_does(llama, capsys):
    assert run(["plan", llama, "--format", "mxfp4", "--keep", "*.q_proj.*", "-o", "plan.json"]) == 0
    assert "weight of two axes" in capsys.readouterr().out
    saved = Plan.load("plan.json")
    formats = {name.removeprefix("model.layers.0."): choice.format for name, choice in saved.items()}
    assert formats["mlp.up_proj.weight"] == "mxfp4"
    assert formats["self_attn.q_proj.weight"] == formats["lm_head.weight"] == "bfloat16"  # a head of 512 numbers
    assert run(["quantize", llama, "a.safetensors", "--plan", "plan.json", "--json"]) == 0
    by_plan = json.loads(capsys.readouterr().out)
    assert by_plan["bytes_after"] == saved.nbytes
    assert run(["quantize", llama, "b.safetensors", "--format", "mxfp4", "--keep", "*.q_proj.*", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == by_plan["tensors"]
    for wrong in (["plan", llama], ["plan", "llama", llama, "-f", "mxfp4"]):
        assert run(wrong) == 2
        assert "give MODEL with --format F" in capsys.readouterr().err
    assert run(["plan", llama, "-f", "mxfp4", "--keep", "typo"]) == 2
    assert "the pattern 'typo' matches no tensor" in capsys.readouterr().err


def test_a_plan_for_another_model_is_one_line(llama, capsys):
    assert run(["plan", "gpt-oss", llama]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "no rule matches 6 of 21 tensors" in captured.err


def test_a_shipped_manifest_is_one_to_edit(llama, tmp_path, capsys):
    assert run(["manifest", "show", "llama"]) == 0
    (tmp_path / "mine.json").write_text(capsys.readouterr().out)
    assert run(["check", "mine.json", llama]) == 0


def test_schema_and_expand(tmp_path, capsys):
    assert run(["manifest", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == manifest_schema()
    raw = {"block.[i].attn.qkv.weight": "BF16", "block.[i].mlp.mlp1_weight.blocks": "FP4"}
    raw["block.[i].mlp.mlp1_weight.scales"] = "UE8"
    (tmp_path / "raw.json").write_text(json.dumps(raw))
    assert run(["manifest", "expand", str(tmp_path / "raw.json")]) == 0
    expanded = json.loads(capsys.readouterr().out)
    assert r"^block\.(\d+)\.attn\.qkv\.weight$" in [rule["regex"] for rule in expanded["patterns"]]
    (tmp_path / "manifest.json").write_text(json.dumps(expanded))
    assert run(["manifest", "expand", str(tmp_path / "manifest.json")]) == 2
    assert "needs no expanding" in capsys.readouterr().err
    (tmp_path / "raw.json").write_text(json.dumps({"block.[i].mlp.weight": "FP9"}))
    assert run(["manifest", "expand", str(tmp_path / "raw.json")]) == 2
    message = capsys.readouterr()
    assert "format 'FP9' is neither in `formats` nor one of bitplan's" in message.err
    assert message.out == ""


def test_plan_refuses_what_quantize_refuses_and_counts_the_bytes_it_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tensors = {"a": torch.ones(4, 33), "b": torch.ones(4, 65), "steps": torch.ones(3, dtype=torch.int64)}
    safetensors.torch.save_file(tensors, "odd.safetensors")
    rules = {"version": 1, "patterns": [{"regex": ".*", "format": "mxfp4"}]}
    Path("rules.json").write_text(json.dumps(rules))
    message = []
    for verb in (
        ["plan", "rules.json", "odd.safetensors", "-o", "plan.json"],
        ["quantize", "odd.safetensors", "small.safetensors"],
    ):
        manifest = ["--manifest", "rules.json"] if verb[0] == "quantize" else []
        assert run([*verb, *manifest]) == 2
        message.append(capsys.readouterr().err.split(";")[0])
    assert message[0] == message[1]
    assert (
        "odd.safetensors: a: mxfp4 has blocks of 32, and 33 of shape (4, 33) is not a multiple (nor 1 other tensor)"
        in message[0]
    )
    assert not Path("plan.json").exists()
    Path("rules.json").write_text(json.dumps({**rules, "padding": "zero"}))
    assert run(["plan", "rules.json", "odd.safetensors", "-o", "plan.json"]) == 0
    assert run(["quantize", "odd.safetensors", "small.safetensors", "--plan", "plan.json", "--json"]) == 0
    written = json.loads(capsys.readouterr().out.partition("plan: plan.json\n")[2])
    planned = json.loads(Path("plan.json").read_text())["tensors"]
    assert {row["name"]: row["bytes_after"] for row in written["tensors"]} == {
        name: entry["bytes"] for name, entry in planned.items()
    }


def test_plan_counts_experts_as_a_packed_folder_has_them(tmp_path):
    name, model = "model.layers.0.mlp.experts.down_proj", tmp_path / "model"
    model.mkdir()
    safetensors.torch.save_file({name: torch.randn(2, 48, 64)}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "architectures": ["APart"]}))
    assert run(["plan", str(model), "--format", "int8_row", "-o", str(tmp_path / "plan.json")]) == 0
    assert Plan.load(tmp_path / "plan.json").entries[name].shape == (2, 64, 48)
    assert run(["quantize", str(model), str(tmp_path / "packed"), "--plan", str(tmp_path / "plan.json")]) == 0
