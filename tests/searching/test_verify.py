"""A certificate with every file: what it says, that one changed byte anywhere is found, and what is measured again."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import transformers
from safetensors import safe_open

import bitplan
from bitplan import open_tensors, search
from bitplan.base.errors import BitplanError
from bitplan.cli import run
from bitplan.files.certificate import CARD, EVIDENCE_FILE, read_certificate
from bitplan.files.engines.targets import export_model
from bitplan.files.gpt_oss import convert_gpt_oss, make_checkpoint
from bitplan.files.quantize_files import QuantizeOptions, quantize_file
from bitplan.plan import Plan
from bitplan.searching.goal import SearchError
from bitplan.searching.run import SearchOptions
from bitplan.searching.verify import verify_model
from tests.cli.verbs.test_perplexity_verb import save_llama, write_gguf
from tests.files.engines.tiny_models import save_tiny

TEXT = " ".join(["abandon hope all ye who enter here", "the bee sees a dead tree", "we were here before he came"] * 40)


FOLDERS = ("packed", "shards", "saved", "compressed-tensors", "mlx", "torchao", "hf", "found")
FILES = ("packed.safetensors", "packed.gguf", "exported.gguf", "parts-00001-of-00003.gguf", "saved.safetensors")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """One model as everything that bitplan writes; `found` is the folder of a search."""
    folder = tmp_path_factory.mktemp("written")
    model = folder / "llama"
    save_llama(model, blocks=1)
    (model / CARD).write_text("---\nlicense: apache-2.0\ntags:\n- their\nlanguage:\n- en\n---\n# Theirs\n")
    write_gguf(model, folder / "wide.gguf", blocks=1)
    quantize_file(model, folder / "packed", "int8_row")
    quantize_file(model, folder / "shards", "int8_row", options=QuantizeOptions(shard_bytes=20_000))
    quantize_file(model, folder / "packed.safetensors", "mxfp4")
    quantize_file(folder / "wide.gguf", folder / "packed.gguf", "q8_0_gguf")
    for target in ("compressed-tensors", "mlx", "torchao", "hf"):
        export_model(model, folder / target, target, {"mlx": "mxfp4", "hf": "bfloat16"}.get(target, "int4_g32"))
    export_model(model, folder / "exported.gguf", "gguf", "q8_0_gguf")
    with pytest.MonkeyPatch.context() as patched:  # parts of less than a megabyte
        patched.setattr("bitplan.files.engines.gguf.check_gguf_output", lambda *_, **__: None)
        export_model(model, folder / "parts.gguf", "gguf", "float32", part_bytes=50_000)
    lm = transformers.AutoModelForCausalLM.from_pretrained(model)
    bitplan.apply_plan(lm, {"*_proj*": "int8_row"})
    bitplan.save_packed(lm, folder / "saved")
    bitplan.save_packed(lm, folder / "saved.safetensors")
    search(model, text=TEXT, goal={"bits": 7.0}, formats=FORMATS, out=folder / "found", options=SEARCH)
    return folder


FORMATS = ("mxfp4", "int8_row")
SEARCH = SearchOptions(context=64, windows=4)


def source_of(written: Path, name: str) -> Path:
    return written / ("wide.gguf" if name == "packed.gguf" else "llama")


def certificate_in(path: Path) -> dict:
    text = None
    if path.is_file():
        with open_tensors(path) as file:
            text = file.certificate
    certificate = read_certificate(path, text)
    assert certificate is not None
    return certificate


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_what_was_written_holds(written, name):
    certificate = certificate_in(written / name)
    assert certificate["code"]["versions"]["torch"] == importlib.metadata.version("torch")
    rounding = {"held": True} if "saved" in name else {"scale_rule": None}
    assert "evidence" in certificate["rounding"] if name == "found" else certificate["rounding"] == rounding
    source = source_of(written, name)
    result = verify_model(written / name, source=source)
    assert result.findings == []
    assert result.held[0] == "every byte is as it was written"
    assert result.held[-1] == f"{source} has the weights that were quantized"


def places_in(path: Path, count: int) -> list[tuple[Path, int]]:
    """Bytes all over a file: its first and last, and of metadata the name of the certificate's key."""
    raw, size = path.read_bytes(), path.stat().st_size
    key = raw.find(b"bitplan_evidence")
    return [
        (path, at) for at in sorted({0, 9, *range(40, size, max(1, size // count)), size - 1, max(key, 0)}) if at < size
    ]


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_one_changed_byte_anywhere_is_found(written, name, tmp_path):
    """Bytes of every file of a folder, and of every part: header, certificate, padding, tensors."""
    copy = tmp_path / name
    if (written / name).is_dir():
        shutil.copytree(written / name, copy)
        places = [place for path in copy.iterdir() for place in places_in(path, 4)]
    else:
        stem = name.partition("-0")[0]
        for path in written.glob(f"{stem}-0*" if stem != name else name):
            shutil.copy(path, tmp_path)
        places = [place for path in tmp_path.iterdir() for place in places_in(path, 24)]
    for path, at in places:
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)
        try:
            found = [finding.code for finding in verify_model(copy).findings]
        except BitplanError as error:
            raise AssertionError(f"{path.name}, byte {at}: {error}") from None
        assert "bytes" in found, (path.name, at)
        raw[at] ^= 1
        path.write_bytes(raw)
    assert verify_model(copy).findings == []


def test_files_that_are_missing_or_added_are_found(written, tmp_path, capsys):
    copy = tmp_path / "packed"
    shutil.copytree(written / "packed", copy)
    (copy / "tokenizer_config.json").unlink()
    (copy / "modeling_llama.py").write_text("import os\n")
    (copy / ".gitattributes").write_text("* text\n")
    found = {finding.where: finding.message for finding in verify_model(copy).findings}
    assert found["tokenizer_config.json"].startswith("missing")
    assert found["modeling_llama.py"].startswith("added")
    assert len(found) == 2
    assert run(["verify", str(copy), "--json"]) == 1
    assert {row["where"] for row in json.loads(capsys.readouterr().out)} == {*found}


def test_another_model_is_not_the_source(written, tmp_path):
    save_llama(tmp_path / "other", blocks=1, seed=3)
    (finding,) = verify_model(written / "packed", source=tmp_path / "other").findings
    assert finding.code == "source"
    assert "model.safetensors is missing, or has other bytes" in finding.message


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_a_text_measures_again(written, name):
    result = verify_model(written / name, source=source_of(written, name), text=TEXT[:700], context=64)
    assert result.findings == []
    assert 0 <= result.measured["kl"]["mean"] < 0.2
    assert (result.measured["kl"]["mean"] == 0) == name.startswith("parts")
    assert result.held[-1].endswith("none was certified") == (name != "found")


def test_what_is_asked_of_verify(written, capsys):
    with pytest.raises(SearchError, match=r"KL is measured against the model it was made of \(source\)"):
        verify_model(written / "packed", text=TEXT)
    assert run(["verify", str(written / "packed"), "--source", str(written / "llama")]) == 0
    out = capsys.readouterr().out
    assert "no findings under its own plan" in out
    assert "every byte is as it was written" in out


def test_weights_that_are_saved_as_they_were_loaded_keep_their_certificate(written, tmp_path):
    lm = bitplan.load_packed(written / "packed").model
    bitplan.save_packed(lm, tmp_path / "again")
    assert (tmp_path / "again" / EVIDENCE_FILE).read_bytes() == (written / "packed" / EVIDENCE_FILE).read_bytes()
    lm.model.norm.weight.data += 1
    bitplan.save_packed(lm, tmp_path / "other")
    assert certificate_in(tmp_path / "other")["rounding"] == {"held": True}
    assert verify_model(tmp_path / "other", source=written / "packed").findings == []


@pytest.mark.parametrize("name", ["compressed-tensors", "torchao", "found", "parts-00001-of-00003.gguf"])
def test_the_verb_takes_all_of_them(written, name, capsys):
    assert run(["verify", str(written / name), "--source", str(written / "llama")]) == 0
    out = capsys.readouterr().out
    assert "every byte is as it was written" in out
    assert "no checksums" not in out
    assert ("the plan follows from its evidence" in out) == (name == "found")


def test_without_a_certificate_it_says_so(written, tmp_path, capsys):
    assert run(["verify", str(written / "llama" / "model.safetensors")]) == 0
    assert "it has no certificate" in capsys.readouterr().out
    shutil.copytree(written / "found", tmp_path / "found")
    (tmp_path / "found" / EVIDENCE_FILE).unlink()  # as earlier versions left it
    assert run(["verify", str(tmp_path / "found")]) == 0
    assert "it has no certificate" in capsys.readouterr().out
    with pytest.raises(SearchError, match="has no certificate to hold against"):
        verify_model(written / "llama", source=written / "llama")
    assert run(["verify", "llama", str(written / "llama"), "--headers", "--source", "x"]) == 2
    assert "--headers reads no data" in capsys.readouterr().err


# ---- the model card --------------------------------------------------------------------------------------------------


def test_the_card_has_hugging_faces_fields(written):
    card = (written / "packed" / CARD).read_text()
    head = card.split("---")[1].strip().splitlines()
    assert head[0] == 'base_model: "llama"'
    assert "base_model_relation: quantized" in head
    assert head[-3:] == ["license: apache-2.0", "language:", "- en"]
    assert "- their" not in head
    assert "| int8_row | 8 |" in card
    assert "![Bytes of every layer by format](bitplan_plan.svg)" in card
    texts = {text.text for text in ElementTree.parse(written / "packed" / "bitplan_plan.svg").iter() if text.text}
    assert {"MB by layer and format", "0", "other"} <= texts
    assert any(text.startswith("int8_row (") for text in texts)
    mlx = (written / "mlx" / CARD).read_text()
    assert all(text in mlx for text in ("library_name: mlx", "from mlx_lm import load", "license: apache-2.0"))


def test_a_card_that_somebody_wrote_stays(written, tmp_path):
    out = tmp_path / "out"
    quantize_file(written / "llama", out, "int8_row")
    quantize_file(written / "llama", out, "mxfp4", force=True)
    assert "mxfp4" in (out / CARD).read_text()  # ours is replaced
    (out / CARD).write_text("# Mine\n")
    quantize_file(written / "llama", out, "int8_row", force=True)
    assert (out / CARD).read_text() == "# Mine\n"
    assert CARD not in json.loads((out / EVIDENCE_FILE).read_text())["files"]
    assert verify_model(out).findings == []


def test_a_certificate_is_not_copied_into_another_file(written, tmp_path):
    quantize_file(written / "packed.gguf", tmp_path / "again.gguf", "q4_0_gguf")
    first, second = certificate_in(written / "packed.gguf"), certificate_in(tmp_path / "again.gguf")
    assert second["source"]["files"].keys() == {"packed.gguf"}
    assert first["seal"] != second["seal"]
    with safe_open(written / "packed.safetensors", "pt") as file:
        assert json.loads(file.metadata()["bitplan_evidence"])["document"] == "bitplan-certificate"


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> Path:
    """A tiny gpt-oss as everything that the verbs of its own write, made of `in`."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    save_tiny(folder / "in", "gpt_oss")
    export_model(folder / "in", folder / "exported.gguf", "gguf", "mxfp4")
    for to, name in (("hf", "hf"), ("openai", "openai"), ("gguf", "converted.gguf"), ("openai", "file.safetensors")):
        convert_gpt_oss(folder / "in", folder / name, to=to)
    make_checkpoint(folder / "drawn", naming="hf", layers=1)
    make_checkpoint(folder / "drawn.gguf", naming="gguf", layers=1)
    return folder


@pytest.mark.parametrize(
    "name", ["exported.gguf", "hf", "openai", "converted.gguf", "file.safetensors", "drawn", "drawn.gguf"]
)
def test_what_is_written_of_gpt_oss_has_a_certificate(gpt_oss, name, tmp_path):
    result = verify_model(gpt_oss / name, source=gpt_oss / "in")
    assert result.findings == []
    assert result.held[0] == "every byte is as it was written"
    source = certificate_in(gpt_oss / name)["source"]
    assert source["files"].keys() == (set() if name.startswith("drawn") else {"model.safetensors"})
    copy = tmp_path / name
    if copy.suffix:
        shutil.copy(gpt_oss / name, copy)
        changed = copy
    else:
        shutil.copytree(gpt_oss / name, copy)
        changed = copy / "config.json"
    raw = bytearray(changed.read_bytes())
    raw[-10] ^= 1
    changed.write_bytes(raw)
    assert [finding.code for finding in verify_model(copy).findings] == ["bytes"]


def test_the_plan_of_a_converted_gpt_oss_says_what_was_done(gpt_oss):
    plan = Plan.from_document(certificate_in(gpt_oss / "hf")["plan"], where="hf")
    experts = plan.entries["model.layers.0.mlp.experts.down_proj_blocks"]
    assert (experts.choice.format, experts.choice.reason, experts.part) == ("mxfp4", "encoded", "data")
    assert plan["model.norm.weight"].reason == "copied"
    assert sum(entry.nbytes for entry in plan.entries.values()) == sum(
        spec.nbytes for spec in safetensors_of(gpt_oss / "hf" / "model.safetensors")
    )


def safetensors_of(path: Path) -> list[torch.Tensor]:
    with safe_open(path, "pt") as file:
        return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (no dictionary)
