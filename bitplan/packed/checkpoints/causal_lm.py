"""A causal language model with its tokenizer, from disk: a Hugging Face folder, a GGUF file, or packed weights.

transformers builds the model, as an optional dependency: nothing here imports it until a model is asked for. Nothing is
downloaded, no code that comes with a model is run unless the user's environment allows it
(BITPLAN_TRUST_REMOTE_CODE), and pickles are not opened. Weights are always loaded as float32
(packed tensors are decoded): a CPU without bfloat16 hardware computes nothing else in reasonable time, and formats are
then applied to the very same numbers.

| MODEL | weights are read by | config and tokenizer |
|---|---|---|
| a Hugging Face folder | transformers | in the folder |
| a folder that GPTQ, AWQ, ... quantized | bitplan, by its config | in the folder |
| what bitplan packed: a file, an index, a folder | bitplan, by the metadata | beside it, or in `config` |
| a GGUF file | bitplan, of other families transformers | in the file, or in `config` |

`config` is a folder, or a GGUF file of the same model: weights that were quantized from one may have its names.

transformers fills tensors that are missing with random numbers; here such a model is refused, with the names.

`one_gguf_reader` lets transformers read a GGUF file once, which opens it for the config, the tokenizer and the weights.
gguf's reader takes a slice of a memory map for every token of the vocabulary, and each runs Python code of NumPy's;
of a plain array over the same bytes it does not. Opening SmolLM2-135M took 35 s of CPU time, and takes 24.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.base.errors import MeasureError
from bitplan.base.optional import WEIGHTS_FILE, remote_code_allowed, require
from bitplan.files.engines.gguf_source import GGUFModel, is_folder_like, read_gguf_tokenizer
from bitplan.files.headers import check_model_source, is_gguf
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import folder_inputs, folder_kv, is_model_folder, read_config
from bitplan.files.safetensors_tensors import NativeTensors
from bitplan.files.schemes.tensors import SchemeTensors
from bitplan.files.tensor_file import TensorFile
from bitplan.files.transformers_names import (
    REPORTED,
    foreign_faults,
    model_from_tensors,
    require_complete,
    silence_transformers,
)
from bitplan.formats import get_format
from bitplan.packed.rounded_inputs import round_linear_inputs
from bitplan.packed.rounded_kv import round_kv

# ---- gguf reader -----------------------------------------------------------------------------------------------------


_replacing = threading.RLock()


@contextmanager
def one_gguf_reader() -> Iterator[None]:
    """Within the block, readers of one file that gguf makes are one. Threads come into it one after the other."""
    import gguf
    from gguf.gguf_reader import GGUFReader  # not the name that is replaced

    class PlainReader(GGUFReader):  # type: ignore[misc]
        data: Any

        def _get(self, *args: Any, **options: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            return super()._get(*args, **options)

    readers: dict[Path, Any] = {}

    def reader(path: Any, *args: Any, **options: Any) -> Any:
        if args or options:
            return PlainReader(path, *args, **options)
        resolved = Path(path).resolve()
        if resolved not in readers:
            readers[resolved] = PlainReader(path)
        return readers[resolved]

    with _replacing:
        before = gguf.GGUFReader
        try:
            gguf.GGUFReader = reader  # transformers imports it by name when it reads a file
            yield
        finally:
            gguf.GGUFReader = before


# ---- causal lm -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LateLogits:
    """Logits that are made when they are asked for, a few tokens at a time: all of a window take 0.5 GB for 512 tokens
    and a vocabulary of 262,144.

    states  what the model's head gets, [windows, length, width]
    head    states and token ids, of one window and some of its tokens -> logits [1, tokens, vocabulary]
    """

    states: Tensor
    ids: Tensor
    vocabulary: int
    head: Callable[[Tensor, Tensor], Tensor]

    def of_window(self, window: int, tokens: slice) -> Tensor:
        row = slice(window, window + 1)
        return self.head(self.states[row, tokens], self.ids[row, tokens])[0]


def windows_of(ids: Tensor, context: int, prefix: Tensor | None = None) -> list[Tensor]:
    """Token ids cut into windows of `context` tokens with `prefix` before each; the last may be shorter.

    Each token is in one window. A last window with nothing to predict is left out.
    """
    before = torch.empty(0, dtype=torch.int64) if prefix is None else prefix
    body = context - len(before)
    if body < 1 or context < 2:
        raise MeasureError(
            f"context must be {max(2, len(before) + 1)} tokens or more, one to see and one to predict, got {context}"
        )
    if ids.dim() != 1 or ids.is_floating_point():
        raise MeasureError(f"token ids must be one row of integers, got {ids.dtype} of shape {tuple(ids.shape)}")
    if len(ids) < body:
        raise MeasureError(
            f"the text has {len(ids)} tokens, and one window of context needs {body}; "
            f"take a longer text or a shorter context",
            settings={"context": None},
        )
    windows = [torch.cat((before.to(ids.dtype), piece)) for piece in ids.split(body)]
    return [window for window in windows if len(window) > 1]


@dataclass
class CausalLM:
    """A model that maps token ids to logits, in eval mode, and the tokenizer that it was trained with.

    `stored` has the bytes of each tensor on disk, under the file's names, `formats` the formats of packed ones.
    """

    model: nn.Module
    tokenizer: Any
    where: str
    stored: Mapping[str, int] | None = None
    formats: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, ids: Tensor) -> Tensor:
        return logits_of(self.model, ids)

    def to(self, device: torch.device, dtype: torch.dtype) -> CausalLM:
        """Move the model to a device and type; returns it with the same tokenizer."""
        return replace(self, model=self.model.to(device, dtype))

    @property
    def head(self) -> nn.Module:
        """The layer that gives the logits."""
        module: nn.Module = self.model.get_output_embeddings()  # type: ignore[operator]
        return module

    @property
    def device(self) -> torch.device:
        """The device that token ids must be on."""
        device: torch.device = self.model.get_input_embeddings().weight.device  # type: ignore[operator]
        return device

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows: rows of the embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the file's tensors over the number of parameters, tied ones counted once."""
        if self.stored is None:
            return None
        return 8 * sum(self.stored.values()) / sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def positions(self) -> int | None:
        """The longest text, in tokens, that the model was made for; None where its config does not say."""
        count: int | None = getattr(self.model.config, "max_position_embeddings", None)
        return count

    def check_context(self, context: int) -> None:
        """Refuse a context beyond the model's positions: perplexity there says nothing about its weights."""
        if self.positions is not None and context > self.positions:
            raise MeasureError(
                f"{self.where}: context must be {self.positions} or less, as the model has, got {context}; "
                "ask for fewer tokens"
            )

    def encode(self, text: str) -> Tensor:
        """The text's own token ids, without the special tokens that the tokenizer adds before or after."""
        if not text.strip():
            raise MeasureError("the text is empty; give a file of plain text to measure on")
        ids = torch.tensor(self._tokens(text, special=False), dtype=torch.int64)
        self.check_tokens(ids)
        return ids

    def check_tokens(self, ids: Tensor) -> None:
        """Refuse tokens that the model does not have."""
        rows = self.vocabulary
        if ids.numel() and int(ids.max()) >= rows:
            raise MeasureError(
                f"{self.where}: the tokenizer gives token {int(ids.max())}, the model's vocabulary has {rows}; "
                "the tokenizer is another model's"
            )

    @functools.cached_property
    def prefix(self) -> Tensor:
        """The tokens that the tokenizer puts before every text, such as a beginning-of-sequence token."""
        sample = "a b a"
        plain, full = self._tokens(sample, special=False), self._tokens(sample, special=True)
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return torch.tensor(full[:start], dtype=torch.int64)
        raise MeasureError(f"{self.where}: the tokenizer gives other tokens with its special tokens than without")

    def windows(self, text: str, context: int) -> list[Tensor]:
        """The text in windows of `context` tokens, each beginning as the tokenizer begins a text."""
        return windows_of(self.encode(text), context, prefix=self.prefix)

    def plain(self, text: str | Mapping[str, str]) -> str:
        """Plain text; of contents by the names of their files, those that end in .jsonl hold conversations or texts."""
        contents = {"": text} if isinstance(text, str) else text
        return "\n".join(_plain_text(self, name, content) for name, content in contents.items())

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, verbose=False, add_special_tokens=special)["input_ids"]
        return ids


def _plain_text(lm: CausalLM, name: str, content: str) -> str:
    """A file's text: of JSONL, conversations by the tokenizer's chat template ("messages"), or plain ("text")."""
    if not name.endswith(".jsonl"):
        return content
    pieces = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError:
            item = None
        messages = item.get("messages") if isinstance(item, dict) else None
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            pieces.append(_chat_text(lm, messages))
        elif isinstance(item, dict) and isinstance(item.get("text"), str):
            pieces.append(item["text"])
        else:
            raise MeasureError(
                f'{name}: line {number}: expected {{"messages": [{{"role": ..., "content": ...}}]}} or '
                f'{{"text": ...}}, got {line[:60]!r}'
            )
    return "\n".join(pieces)


def _chat_text(lm: CausalLM, messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation as text by the tokenizer's chat template, as the model was trained to see it."""
    if not getattr(lm.tokenizer, "chat_template", None):
        raise MeasureError(f"{lm.where}: the tokenizer has no chat template for conversations; give plain text")
    where = f"{lm.where}: its chat template refuses a conversation"  # it is a program, and raises what it likes
    with foreign_faults(MeasureError, where):
        return str(lm.tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False))


def require_finite(logits: Tensor, lm: CausalLM, tokens: int) -> None:
    """Refuse logits whose largest is NaN or infinite: its index is no token. Some may be -inf: they are ruled out."""
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise MeasureError(
            f"{lm.where}: logits that are not finite after {tokens} tokens; look for NaN or overflow in the weights"
        )


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits of one forward pass, without a cache of keys and values."""
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def late_logits_of(model: nn.Module) -> Callable[[Tensor], Tensor | LateLogits]:
    """A model's logits, made a few tokens at a time where its head can be run apart from its body; else all at once.

    Whatever a model does to its head's output, a cap or a scale, is its own: the whole model is called for a few
    tokens, with a body that gives what it gave before.
    """
    body = model._modules.get(str(getattr(model, "base_model_prefix", "")))
    all_at_once = functools.partial(logits_of, model)
    if body is None:
        return all_at_once

    def late(ids: Tensor) -> Tensor | LateLogits:
        outputs: list[Any] = []
        compute = body.forward

        def last_token(*args: Any, **options: Any) -> Any:
            outputs.append(compute(*args, **options))
            return _with_states(outputs[0], outputs[0][0][:, -1:])

        with _body_gives(body, last_token):
            last = logits_of(model, ids)
        if len(outputs) != 1 or last.shape[1] != 1:
            return all_at_once(ids)
        template = _with_states(outputs[0], outputs[0][0][:, :0])

        def head(states: Tensor, some_ids: Tensor) -> Tensor:
            with _body_gives(body, lambda *_args, **_options: _with_states(template, states)):
                return logits_of(model, some_ids)

        return LateLogits(outputs[0][0], ids, last.shape[-1], head)

    ids = torch.arange(1, 9, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        pieces, expected = late(ids), all_at_once(ids)[0]
        if not isinstance(pieces, LateLogits):
            return all_at_once
        joined = torch.cat([pieces.of_window(0, slice(0, 3)), pieces.of_window(0, slice(3, 8))])
    is_same = joined.shape == expected.shape and torch.allclose(joined, expected, rtol=1e-4, atol=1e-4)
    return late if is_same else all_at_once


def _with_states(output: Any, states: Tensor) -> Any:
    """A copy of the output of a model's body, with other last hidden states."""
    return (states, *output[1:]) if isinstance(output, tuple) else replace(output, last_hidden_state=states)


@contextmanager
def _body_gives(body: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the block, a call of the body is a call of `forward`."""
    before = vars(body).get("forward")
    body.forward = forward
    try:
        yield
    finally:
        if before is None:
            del body.forward
        else:
            body.forward = before


def load_causal_lm(path: str | Path, *, config: str | Path | None = None) -> CausalLM:
    """Read a model; `config` is a folder or a GGUF file with config and tokenizer, for a file of weights alone."""
    source, config_path = Path(path), None if config is None else Path(config)
    folder = check_model_source(source, config_path)
    require("transformers", purpose=f"reading {source.name}", extra="models")
    with open_named(source, config_path) as file, silence_transformers():
        stored = {name: spec.nbytes for name, spec in file.specs.items()}
        formats = {name: spec.format for name, spec in file.specs.items() if spec.format != spec.dtype}
        if isinstance(file, GGUFModel):
            tokenizer, model = file.tokenizer, _model_of(file, file.folder, str(source))
        elif is_gguf(source) and config is None:
            require("accelerate", purpose=f"reading {source.name}", extra="models")
            tokenizer, model = _read_gguf(source, file)
        else:
            tokenizer = read_tokenizer(folder, source)
            # A file that carries its own names is read by them; one of transformers may need its own decoding.
            ours = config_path is not None or source.is_file() or _is_packed(file)
            model = _model_of(file, folder, str(source)) if ours else read_model(source, _location(folder))
    lm = CausalLM(model.eval(), tokenizer, str(path), stored, formats)
    require_causal(lm, lm)
    return lm


def open_named(source: Path, config: Path | None = None) -> TensorFile:
    """A model's weights, under its own names where a GGUF file of a known family says them."""
    if config is not None and is_gguf(config):
        return GGUFModel(config, source)
    if config is None and is_gguf(source) and is_folder_like(source):
        return GGUFModel(source)
    return open_tensors(source)


def read_tokenizer(folder: Path, source: Path | None = None) -> Any:
    """The tokenizer of a folder; errors name `source`, the model that was asked for."""
    require("transformers", purpose=f"reading {folder.name}", extra="models")
    return _read("AutoTokenizer", source or folder, "the tokenizer", _location(folder))


def _location(folder: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(folder)}


def _is_packed(file: TensorFile) -> bool:
    return isinstance(file, SchemeTensors) or bool(isinstance(file, NativeTensors) and (file.packed or file.tied))


def _model_of(file: TensorFile, folder: Path, where: str) -> Any:
    """The model of the config with the file's numbers, each under its own name."""
    from transformers import AutoModelForCausalLM

    config = _read("AutoConfig", folder, "config.json", _location(folder))
    mapped = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if mapped is None:
        raise MeasureError(
            f"{folder}: transformers has no causal language model of type {config.model_type!r:.80}; give one that "
            "predicts the next token"
        )
    classes = mapped if isinstance(mapped, tuple | list) else (mapped,)
    named = [one for one in classes if one.__name__ in (config.architectures or ())]
    if getattr(config, "quantization_config", None) is not None and not _is_packed(file):
        raise MeasureError(
            f"{where}: its config has a quantization_config, which transformers decodes; give the folder"
        )
    numbers = {name: file.read_float(name) for name in file.specs}
    numbers |= {alias: numbers[name] for alias, name in file.tied.items()}
    for key in ("quantization_config", WEIGHTS_FILE):  # the tensors were decoded
        if getattr(config, key, None) is not None:
            delattr(config, key)
    model = model_from_tensors((named or classes)[0], config, numbers, where, dtype=torch.float32)
    config_of_folder = read_config(file.folder) if is_model_folder(file.folder) else None
    kv = folder_kv(config_of_folder, where)
    inputs = None if config_of_folder is None else folder_inputs(config_of_folder, file.folder)
    if inputs is not None:  # as its packed layers do
        round_linear_inputs(model, inputs, keep={name for name in numbers if not _is_rounded(file, name)})
    if kv is not None:
        round_kv(model, kv)
    return model


def _is_rounded(file: TensorFile, name: str) -> bool:
    spec = file.spec(file.tied.get(name, name))
    return spec.encoded and not get_format(spec.format).is_cast


def _read_gguf(source: Path, file: TensorFile) -> tuple[Any, Any]:
    if len(file.file.parts) > 1:  # type: ignore[attr-defined]
        raise MeasureError(
            f"{source}: is split, and transformers reads GGUF from one file; merge it with llama-gguf-split"
        )
    location = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    with one_gguf_reader():
        return read_gguf_tokenizer(source, file.metadata), read_model(source, location)


def read_model(source: Path, location: dict[str, Any] | None = None, dtype: torch.dtype | str = torch.float32) -> Any:
    """The model of a folder, or of the `location` that transformers finds it at; "auto": in the type of its file."""
    options = {"dtype": dtype, "use_safetensors": True}
    model, info = _read(
        "AutoModelForCausalLM", source, "the model", (location or _location(source)) | options | REPORTED
    )
    if info.get("missing_keys"):
        _refuse_without_head(model, str(source))
    require_complete(info, str(source))
    return model


def _refuse_without_head(model: Any, where: str) -> None:
    """Refuse an encoder or a body alone, by the class that its config says it was saved from: it lacks a head."""
    from transformers import AutoModelForCausalLM

    mapped = AutoModelForCausalLM._model_mapping.get(type(model.config), ())
    classes = mapped if isinstance(mapped, tuple | list) else (mapped,)
    saved_from = getattr(model.config, "architectures", None) or ()
    if saved_from and not any(one.__name__ in saved_from for one in classes):
        raise MeasureError(no_causal_model(where, str(saved_from[0])))


def no_causal_model(where: str, kind: str) -> str:
    """A sentence on a model that predicts no next token, and what can be done with it."""
    return (
        f"{where}: {kind} is no causal language model but an encoder, or a body without a head: it continues no text, "
        "so it has no perplexity and nothing to search; `bitplan quantize` packs it and `bitplan compare` measures it"
    )


def _read(reader: str, source: Path, noun: str, options: dict[str, Any]) -> Any:
    """Read with transformers; any error of its many readers becomes one line."""
    import transformers

    # bitplan's own GGUF files have no tokenizer; transformers' error about that speaks of arrays.
    is_gguf = "gguf_file" in options
    hint = "; if the file holds no tokenizer, give the Hugging Face folder" if is_gguf else ""
    allowed = {"local_files_only": True, "trust_remote_code": remote_code_allowed()}
    where, settings = f"{source}: transformers cannot read {noun}", {"config": None} if is_gguf else None
    with foreign_faults(MeasureError, where, hint, settings):
        return getattr(transformers, reader).from_pretrained(**allowed, **options)


def require_causal(lm: CausalLM, logits: Callable[[Tensor], Tensor]) -> None:
    """Refuse a model whose logits change with a later token: it sees what it should predict."""
    rows = lm.vocabulary
    ids = torch.arange(1, 9).remainder(rows)[None].repeat(2, 1)
    ids[1, -1] = (ids[0, -1] + 1) % rows
    with torch.no_grad():
        predicted = logits(ids)
    one, two = predicted[:, :-1].double()
    allowed = 1e-4 if predicted.dtype == torch.float32 else 0.1  # float32 is off by less, and a few steps of bfloat16
    if float((one - two).abs().max()) > allowed * float(one.abs().max()):
        kind = getattr(lm.model.config, "model_type", type(lm.model).__name__)
        raise MeasureError(
            f"{lm.where}: not a causal language model: what {kind} says of a token depends on later ones, "
            "as in an encoder: it continues no text, and perplexity is not defined for it"
        )
