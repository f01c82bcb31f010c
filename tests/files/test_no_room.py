"""Every writer where a file does not fit: the error names it and its bytes, and what was there before stays whole."""

from __future__ import annotations

import json
import resource
import sys
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch

from bitplan.files.engines.targets import export_model
from bitplan.files.gpt_oss import convert_gpt_oss, make_checkpoint
from bitplan.files.models.save_load import write_model
from bitplan.files.quantize_files import quantize_file
from tests.files.engines.tiny_models import save_tiny

LIMIT = 20_000


@contextmanager
def files_of_at_most(nbytes):
    """Python 3.11 keeps a compiled module that did not fit, cut off, so none is written meanwhile."""
    before, writes_bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_bytecode


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    save_tiny(folder / "llama", "llama3")
    make_checkpoint(folder / "gpt-oss", naming="openai")
    safetensors.torch.save_file({"a.weight": torch.ones(300, 300)}, folder / "plain.safetensors")
    return folder


WRITERS = {
    "out.safetensors": lambda source, out: quantize_file(source / "plain.safetensors", out, "int8_row"),
    "out.json": lambda source, out: quantize_file(source / "plain.safetensors", out, "int8"),
    "packed": lambda source, out: quantize_file(source / "llama", out, "int8_row", force=True),
    "plain": lambda source, out: export_model(source / "llama", out, "hf", "float32", force=True),
    "model.gguf": lambda source, out: export_model(source / "llama", out, "gguf", "q8_0_gguf", force=True),
    "oss.gguf": lambda source, out: convert_gpt_oss(source / "gpt-oss", out, to="gguf", force=True),
    "oss.safetensors": lambda source, out: convert_gpt_oss(source / "gpt-oss", out, to="hf", force=True),
    "model.safetensors": lambda _, out: write_model(torch.nn.Linear(100, 100), out),
}


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_does_not_fit_is_named_and_the_old_output_stays(sources, tmp_path, name):
    out = tmp_path / name
    if out.suffix:
        out.write_bytes(b"old")
    else:
        out.mkdir()
        (out / "config.json").write_text(json.dumps({"old": 1}))
        (out / "notes.md").write_text("notes")
    before = contents(tmp_path)
    with files_of_at_most(LIMIT), pytest.raises(OSError, match=r"File too large after [\d,]+ .*bytes are free") as full:
        WRITERS[name](sources, out)
    assert full.value.filename == str(out if out.suffix else out / "model.safetensors")
    assert contents(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
