"""A causal language model with its tokenizer, from a folder or a GGUF file on disk.

transformers does the reading, as an optional dependency: nothing here imports it until a model is asked for. Nothing
is downloaded, no code that comes with a model is run, and pickles are not opened. Weights come as float32 whatever the
file holds (GGUF blocks are dequantized): a CPU without bfloat16 hardware computes nothing else in reasonable time,
and formats are then applied to the very same numbers.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.measure.perplexity import MeasureError
from bitplan.optional import require

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass
class CausalLM:
    """A model that maps token ids to logits, in eval mode, and the tokenizer that made it ids in training."""

    model: nn.Module
    tokenizer: Any
    where: str

    def __call__(self, ids: Tensor) -> Tensor:
        return logits_of(self.model, ids)

    @property
    def head(self) -> nn.Module:
        """The layer that gives the logits."""
        found: nn.Module = self.model.get_output_embeddings()  # type: ignore[operator]
        return found

    def check_context(self, context: int) -> None:
        """Beyond the positions it was trained on a model's perplexity says nothing of its weights."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is not None and context > positions:
            raise MeasureError(f"{self.where}: context must be {positions} or less, as the model has, got {context}")

    def encode(self, text: str) -> Tensor:
        """The text's token ids, with what the tokenizer itself puts before a text."""
        if not text.strip():
            raise MeasureError("the text is empty; give a file of plain text to measure on")
        ids = torch.tensor(self.tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
        rows = self.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        if len(ids) and int(ids.max()) >= rows:
            raise MeasureError(
                f"{self.where}: the tokenizer gives token {int(ids.max())}, the model's vocabulary has {rows}; "
                "the tokenizer is another model's"
            )
        return ids


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """One pass without a cache of keys and values, which nobody reads here."""
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def load_causal_lm(path: str | Path) -> CausalLM:
    """Read a Hugging Face folder, or a GGUF file of an architecture that transformers knows."""
    source = Path(path)
    needed = ("accelerate", "transformers") if source.suffix == ".gguf" else ("transformers",)
    for library in needed:
        require(library, purpose=f"reading {source.name}", extra="models")
    place = _gguf(source) if source.is_file() else _folder(source)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        tokenizer = _read(AutoTokenizer, source, "the tokenizer", place)
        model = _read(
            AutoModelForCausalLM, source, "the model", place | {"dtype": torch.float32, "use_safetensors": True}
        )
    return CausalLM(model.eval(), tokenizer, str(path))


def _gguf(source: Path) -> dict[str, Any]:
    if source.suffix != ".gguf":
        raise MeasureError(
            f"{source}: expected a folder with config.json, or a .gguf file, got a {source.suffix or 'nameless'} file"
        )
    return {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}


def _folder(source: Path) -> dict[str, Any]:
    if not source.is_dir():
        raise MeasureError(f"{source}: no such file or folder; nothing is downloaded, so give a path on this machine")
    if not (source / "config.json").is_file():
        raise MeasureError(
            f"{source}: no config.json, so not a Hugging Face model; a GGUF file is given by its own path"
        )
    if not any(source.glob("*.safetensors")):
        raise MeasureError(f"{source}: no .safetensors file; other weight files (pickles) are not opened")
    if not any((source / name).is_file() for name in _TOKENIZERS):
        raise MeasureError(
            f"{source}: the model has no tokenizer ({', '.join(_TOKENIZERS)}); "
            "copy that of the model it was made from into the folder"
        )
    return {"pretrained_model_name_or_path": str(source)}


def _read(reader: Any, source: Path, what: str, options: dict[str, Any]) -> Any:
    """transformers raises what its many readers raise; one line of it says enough."""
    try:
        return reader.from_pretrained(local_files_only=True, **options)
    except MemoryError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = lines[0][:300] if lines else type(error).__name__
        # bitplan's own GGUF files have none, and what transformers says of that is about arrays.
        hint = "; if the file holds no tokenizer, give the Hugging Face folder" if "gguf_file" in options else ""
        raise MeasureError(f"{source}: transformers cannot read {what}: {told}{hint}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Our callers show their own progress; the bar of GGUF's dequantization has no switch of its own."""
    from transformers.utils import logging as theirs

    had_bar, level = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    theirs.disable_progress_bar()
    theirs.set_verbosity(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        theirs.set_verbosity(level)
        if had_bar:
            theirs.enable_progress_bar()
