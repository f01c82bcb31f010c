"""Folders of models with a damaged file, and the command line on damaged files."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import typer

from bitplan.base.errors import BitplanError
from tests.fuzz.document_files import example, make_fp8_policies, make_fp8_reports
from tests.fuzz.weight_files import make_gguf, make_gpt_oss, make_networks, make_packed, make_safetensors, written

PROMPT = "the he"


def make_packed_folder(*damaged: str) -> Callable[[Path], list[Path]]:
    """A tiny Llama that `quantize` packed, with its tokenizer."""

    def make(folder: Path) -> list[Path]:
        from bitplan import quantize_file
        from tests.files.engines.tiny_models import save_tiny

        save_tiny(folder / "plain", "llama")
        written(folder / "plain" / "generation_config.json", '{"bos_token_id": 1, "eos_token_id": [2], "top_p": 0.9}')
        quantize_file(folder / "plain", folder / "packed", "int8_row")
        return [folder / "packed" / name for name in damaged]

    return make


def load_folder(path: Path) -> None:
    from bitplan import load_packed

    load_packed(path.parent)


def make_adapter(folder: Path) -> list[Path]:
    import peft
    import torch

    config = peft.LoraConfig(r=2, target_modules=["0"])
    peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(32, 32)), config).save_pretrained(folder)
    return [folder / "adapter_config.json", folder / "adapter_model.safetensors"]


def read_adapter(path: Path) -> None:
    import torch

    from bitplan import apply_plan
    from bitplan.peft import load_adapter

    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    apply_plan(model, {"0.weight": "int8_row"})
    load_adapter(model, path.parent)


# ---- the command line ------------------------------------------------------------------------------------------------


def shell(*words: str, output: str = "") -> Callable[[Path], None]:
    """Runs a command on a file: PATH stands for it, FOLDER for where it lies, OUT for what is to be written."""

    def read(path: Path) -> None:
        from bitplan.cli import run

        # Making the verbs takes longer than most of them take for a small file.
        if not hasattr(typer.main.get_command, "cache_info"):
            typer.main.get_command = functools.cache(typer.main.get_command)
        names = {"PATH": str(path), "FOLDER": str(path.parent), "OUT": str(path.parent.parent / f"written{output}")}
        for left in path.parent.parent.glob("written*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = run([names.get(word, word) for word in words])
        # A machine that is busy shows progress, too; no error begins with a count.
        lines = errors.getvalue().splitlines()
        said = [line for line in lines if line.strip() and not re.match(r"[a-z ]+: \d+ of \d+ in ", line)]
        assert code in (0, 1, 2), f"exit code {code}"
        if code == 2:
            assert len(said) == 1, f"not one line: {said[:3]}"
            assert said[0].startswith("bitplan: "), said[0][:200]
            assert len(said[0].encode()) < 1700, f"{len(said[0])} letters: {said[0][:200]}"
            assert "MemoryError" not in said[0], said[0]
            raise BitplanError(said[0])
        out.getvalue().encode()

    return read


def make_text(folder: Path) -> list[Path]:
    from tests.files.engines.tiny_models import save_tiny

    save_tiny(folder / "model", "llama")
    return [written(folder / "text.txt", " ".join(Random(1).choices(("the", "he", "a", "th"), k=300)))]


def make_raw_map(folder: Path) -> list[Path]:
    return example("manifest", 1)(folder)


COMMANDS: dict[str, tuple[Callable[[Path], list[Path]], Callable[[Path], None], float]] = {
    "inspect safetensors": (make_safetensors, shell("inspect", "PATH"), 0.3),
    "inspect gguf": (make_gguf, shell("inspect", "PATH", "--json"), 0.3),
    "inspect network": (make_networks, shell("inspect", "PATH"), 0.1),
    "verify": (make_packed, shell("verify", "llama", "PATH"), 0.2),
    "verify gpt-oss": (make_gpt_oss("hf", "config.json"), shell("verify", "gpt-oss", "FOLDER", "--headers"), 0.2),
    "plan": (make_safetensors, shell("plan", "PATH", "--format", "int8_row"), 0.2),
    "plan --from": (example("evidence"), shell("plan", "--from", "PATH", "--bits", "8"), 0.2),
    "diff": (example("plan"), shell("diff", "PATH", "PATH"), 0.2),
    "quantize": (make_packed, shell("quantize", "PATH", "OUT", "--format", "int8_row", output=".safetensors"), 0.2),
    "quantize gguf": (make_gguf, shell("quantize", "PATH", "OUT", "--format", "q8_0_gguf", output=".gguf"), 0.2),
    "compare": (make_packed, shell("compare", "PATH", "PATH"), 0.2),
    "convert": (
        make_gpt_oss("hf", "config.json"),
        shell("gpt-oss", "convert", "FOLDER", "OUT", "--to", "gguf", output=".gguf"),
        0.1,
    ),
    "report": (example("plan"), shell("report", "PATH", "-o", "OUT", output=".html"), 0.2),
    "merge-policy": (make_fp8_reports, shell("fp8", "merge", "--reports", "PATH", "-o", "OUT", output=".json"), 0.2),
    "explain": (make_fp8_policies, shell("fp8", "explain", "PATH", "--kind", "column", "--tokens", "512"), 0.2),
    "manifest expand": (make_raw_map, shell("manifest", "expand", "PATH"), 0.2),
    "generate": (
        make_packed_folder("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
        shell("generate", "FOLDER", PROMPT, "--max-tokens", "1"),
        0.1,
    ),
    "verify a packed folder": (
        make_packed_folder("config.json", "bitplan_plan.json", "bitplan_evidence.json"),
        shell("verify", "FOLDER"),
        0.3,
    ),
}  # fmt: skip
