"""A library that is not there: one line with the pip command, for Python and for the shell, before any work is done."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from bitplan.base.errors import BitplanError, MissingLibraryError
from bitplan.base.optional import require
from bitplan.fp8.bench.confirm_policy import plan_small_model
from bitplan.packed.checkpoints.causal_lm import load_causal_lm
from bitplan.packed.checkpoints.load import load_packed
from bitplan.streaming.selective import trainer_callbacks
from tests.processes import Program

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LLAMA |= {"num_hidden_layers": 2, "vocab_size": 100}


@pytest.mark.parametrize(
    ("hidden", "use", "library", "extra"),
    [
        ("transformers", lambda: load_causal_lm("model"), "transformers", "models"),
        ("transformers", lambda: load_causal_lm("model.gguf"), "transformers", "models"),
        ("transformers", lambda: load_packed("model"), "transformers", "models"),
        ("transformers", lambda: plan_small_model("config.json"), "transformers", "models"),
        ("transformers", lambda: trainer_callbacks.trainer_callback(Mock()), "transformers", "train"),
        ("lightning", lambda: trainer_callbacks.lightning_callback(Mock()), "lightning", "train"),
        ("peft", lambda: importlib.reload(importlib.import_module("bitplan.peft")), "peft", "train"),
        ("tensorboard", lambda: trainer_callbacks.TensorBoardScalars("runs"), "tensorboard", "train"),
    ],
)
def test_a_hidden_library_is_one_line_with_the_command(hidden, use, library, extra, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "model" / "tokenizer.json").touch()
    (tmp_path / "model.gguf").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == hidden]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, hidden, None)
    message = rf"^[^\n]*needs {library}, which is not installed: pip install 'bitplan\[{extra}\]'$"
    with pytest.raises(MissingLibraryError, match=message):
        use()


def test_trees_name_the_extra_before_they_begin(tmp_path) -> None:
    done = without(("sklearn",), "import bitplan.trees.load", tmp_path)
    message = "bitplan.trees needs scikit-learn, which is not installed: pip install 'bitplan[trees]'"
    assert done.errors.splitlines()[-1] == f"bitplan.base.errors.MissingLibraryError: {message}"


def test_what_needs_none_of_them_runs_without_them(tmp_path) -> None:
    """The core: formats, files, packed models, plans and the shell need what the package asks for, and no more."""
    hidden = ("sklearn", "transformers", "accelerate", "lightning", "tensorboard", "lightgbm", "pandas", "safetensors")
    use = (
        "import torch, bitplan; from bitplan.cli import run; from bitplan.files.models.save_load import write_model;"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64));"
        "write_model(model, 'a.safetensors');"
        "assert run(['quantize', 'a.safetensors', 'b.safetensors', '--format', 'int4_g32']) == 0;"
        "assert run(['compare', 'a.safetensors', 'b.safetensors', '--json']) == 0;"
        "bitplan.decode(bitplan.encode(torch.zeros(512, 512), 'mxfp4'))"
    )
    done = without((*hidden, "triton"), use, tmp_path)
    assert done.wait() == 0, done.errors


def test_it_is_an_import_error_and_one_of_ours() -> None:
    with pytest.raises(ImportError, match=r"^the moon needs no_such_thing, .*: pip install no_such_thing$") as caught:
        require("no_such_thing.part", purpose="the moon")
    assert isinstance(caught.value, BitplanError)
    assert caught.value.name == "no_such_thing"


def test_a_library_that_is_broken_or_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_one.py").write_text("import no_such_thing\n")
    (tmp_path / "old_one.py").write_text("__version__ = '4.57.1'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingLibraryError, match="broken_one, which is installed and cannot be imported: No module"):
        require("broken_one", purpose="this", extra="trees")
    with pytest.raises(MissingLibraryError, match=r"this needs old_one 5, 4\.57\.1 is installed: pip install 'bitplan"):
        require("old_one", purpose="this", extra="models", least=5)
    assert require("old_one", purpose="this", least=4).__name__ == "old_one"


def without(hidden: tuple[str, ...], use: str, folder: Path) -> Program:
    """A process that has none of these libraries, nor anything of bitplan yet; it has ended."""
    code = (
        f"import sys; hidden = {hidden!r}\n"
        "gone = (*hidden, 'bitplan', 'transformers')  # bitplan imports more beside the last\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] in gone]:\n"
        "    del sys.modules[name]\n"
        f"sys.modules |= dict.fromkeys(hidden)\n{use}"
    )
    program = Program(code, folder=folder)
    program.wait()
    return program
