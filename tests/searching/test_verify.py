"""A certificate with every file: what it says, that one changed byte anywhere is found, and what is measured again."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bitplan import open_tensors
from bitplan.base.errors import BitplanError
from bitplan.cli import run
from bitplan.files.certificate import CARD, EVIDENCE_FILE, read_certificate
from bitplan.files.engines.targets import ExportRequest, export_model, prepare_export
from bitplan.files.quantize_files import quantize_file
from bitplan.searching.goal import SearchError
from bitplan.searching.verify import verify_model
from tests.cli.verbs.test_perplexity_verb import save_llama, write_gguf

TEXT = " ".join(["abandon hope all ye who enter here", "the bee sees a dead tree", "we were here before he came"] * 40)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """One model as a packed folder, a file of safetensors and a GGUF file."""
    folder = tmp_path_factory.mktemp("written")
    save_llama(folder / "llama", blocks=1)
    (folder / "llama" / CARD).write_text("---\nlicense: apache-2.0\ntags:\n- their\nlanguage:\n- en\n---\n# Theirs\n")
    write_gguf(folder / "llama", folder / "wide.gguf", blocks=1)
    quantize_file(folder / "llama", folder / "packed", "int8_row")
    quantize_file(folder / "llama", folder / "packed.safetensors", "mxfp4")
    quantize_file(folder / "wide.gguf", folder / "packed.gguf", "q8_0_gguf")
    return folder


def certificate_in(path: Path) -> dict:
    with open_tensors(path) as file:
        found = read_certificate(path, file.certificate)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["packed", "packed.safetensors", "packed.gguf"])
def test_what_was_written_holds(written, name):
    certificate = certificate_in(written / name)
    assert certificate["code"]["versions"]["torch"] == torch.__version__
    assert certificate["rounding"] == {"scale_rule": None}
    source = written / ("wide.gguf" if name.endswith("gguf") else "llama")
    result = verify_model(written / name, source=source)
    assert result.findings == []
    assert result.held[0] == "every byte is as it was written"
    assert result.held[-1] == f"{source} has the weights that were quantized"


@pytest.mark.parametrize("name", ["packed", "packed.safetensors", "packed.gguf"])
def test_one_changed_byte_anywhere_is_found(written, name, tmp_path):
    """A byte of every file of the folder, and bytes all over a single file: header, certificate, padding, tensors."""
    copy = tmp_path / name
    if (written / name).is_dir():
        shutil.copytree(written / name, copy)
        places = [
            (path, at) for path in copy.iterdir() for at in (0, path.stat().st_size // 2, path.stat().st_size - 1)
        ]
    else:
        shutil.copy(written / name, copy)
        size = copy.stat().st_size
        places = [(copy, at) for at in (0, 9, *range(40, size, size // 24), size - 1)]
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


def test_a_text_measures_again(written, capsys):
    result = verify_model(written / "packed", source=written / "llama", text=TEXT, context=64)
    assert result.findings == []
    assert 0 < result.measured["kl"]["mean"] < 0.01
    assert result.held[-1].endswith("none was certified")
    with pytest.raises(SearchError, match=r"KL is measured against the model it was made of \(source\)"):
        verify_model(written / "packed", text=TEXT)
    assert run(["verify", str(written / "packed"), "--source", str(written / "llama")]) == 0
    out = capsys.readouterr().out
    assert "no findings under its own plan" in out
    assert "every byte is as it was written" in out


def test_without_a_certificate_it_says_so(written, capsys):
    assert run(["verify", str(written / "llama" / "model.safetensors")]) == 0
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


def test_an_exported_gguf_file_has_a_certificate_and_parts_have_none(written, tmp_path):
    export_model(written / "llama", tmp_path / "out.gguf", "gguf", "q8_0_gguf")
    result = verify_model(tmp_path / "out.gguf", source=written / "llama")
    assert result.findings == []
    assert "every byte is as it was written" in result.held
    request = ExportRequest(written / "llama", tmp_path / "part.gguf", "q8_0_gguf", part_bytes=2**20)
    with closing(prepare_export(request, "gguf")) as prepared:
        prepared.write()
    assert verify_model(prepared.report.files[0]).held == [
        "it has no certificate: another program wrote it, or an earlier bitplan"
    ]


def test_a_certificate_is_not_copied_into_another_file(written, tmp_path):
    quantize_file(written / "packed.gguf", tmp_path / "again.gguf", "q4_0_gguf")
    first, second = certificate_in(written / "packed.gguf"), certificate_in(tmp_path / "again.gguf")
    assert second["source"]["files"].keys() == {"packed.gguf"}
    assert first["seal"] != second["seal"]
    with safe_open(written / "packed.safetensors", "pt") as file:
        assert json.loads(file.metadata()["bitplan_evidence"])["document"] == "bitplan-certificate"
