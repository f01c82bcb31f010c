"""Text from a causal language model, token by token, with time and memory: packed or not, on any device.

The loop is our own, so that words can be shown as they come and each step can be timed; transformers' `generate` gives
the same tokens (greedy).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.documents import show
from bitplan.errors import MeasureError
from bitplan.runtime.causal_lm import CausalLM, load_causal_lm, open_named, read_model, read_tokenizer
from bitplan.runtime.packed.checkpoints.load import load_packed
from bitplan.runtime.packed.gpt_oss.load import is_gpt_oss
from bitplan.runtime.packed.read_packed import device_of, require_transformers
from bitplan.store.export.gguf_source import is_folder_like
from bitplan.store.files.headers import is_gguf
from bitplan.store.models.transformers_names import foreign_faults, silence_transformers
from bitplan.store.packed_folder import is_packed_config, read_config


def load_for_running(
    path: str | Path,
    *,
    config: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> CausalLM:
    """A model and its tokenizer: a packed folder and a GGUF file run packed, others as transformers loads them.

    config  a folder or a GGUF file with config and tokenizer, for a file of weights alone, which is decoded
    dtype   type of weights that are not packed; None: float32 on a CPU, else as in the folder
    """
    place, source = device_of(device), Path(path)
    require_transformers(str(path))
    wanted = dtype or (torch.float32 if place.type == "cpu" else None)
    if source.is_dir():
        model, tokenizer = _of_folder(source, place, wanted), None
    elif config is None and is_gguf(source) and is_folder_like(source):
        model = load_packed(source, device=place, dtype=wanted).model
        with open_named(source) as file:
            tokenizer = file.tokenizer  # type: ignore[attr-defined]
    else:
        lm = load_causal_lm(source, config=config)
        model, tokenizer = lm.model.to(place, wanted), lm.tokenizer
    is_pair = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if is_pair or not model.can_generate():  # type: ignore[operator]
        raise MeasureError(f"{path}: {type(model).__name__} is no causal language model, and continues no text")
    with silence_transformers():
        return CausalLM(model.eval(), tokenizer or read_tokenizer(source), str(path))


def _of_folder(source: Path, place: torch.device, dtype: torch.dtype | None) -> nn.Module:
    if is_packed_config(read_config(source)) or is_gpt_oss(source):
        return load_packed(source, device=place, dtype=dtype).model
    with silence_transformers():
        model: nn.Module = read_model(source, dtype=dtype or "auto").to(place)
    return model


@dataclass(frozen=True)
class Generated:
    """A text, its time and memory. `prefill_s` is the time to the first token; the rate is of the tokens after it."""

    text: str
    prompt_tokens: int
    tokens: int
    prefill_s: float
    tokens_per_second: float | None
    weight_bytes: int
    peak_bytes: int | None
    device: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def generate_text(
    lm: CausalLM,
    prompt: str,
    *,
    most_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
    on_text: Callable[[str], None] = lambda _text: None,
) -> Generated:
    """Continue a prompt; `on_text` gets each piece of text as it comes.

    temperature   0 takes the likeliest token; above 0 tokens are drawn, the same for the same `seed` on one machine
    chat          put the prompt into the tokenizer's chat template
    """
    if not prompt or most_tokens < 1 or temperature < 0:
        raise MeasureError("a prompt of at least one letter, 1 token or more and a temperature from 0 are needed")
    device = lm.device
    with foreign_faults(MeasureError, f"{lm.where}: the tokenizer fails"):
        ids = _prompt_ids(lm, prompt, chat).to(device)
    ends, size = _end_tokens(lm), weight_bytes(lm.model)
    draw = torch.Generator(device=device).manual_seed(seed)
    cache: Any = None
    made: list[int] = []
    shown, started, first = "", time.perf_counter(), 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        step = ids
        while len(made) < most_tokens:
            out: Any = lm.model(input_ids=step, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            require_finite(out.logits[:, -1], lm, ids.shape[1] + len(made))
            token = _next_token(out.logits[0, -1], temperature, draw)
            first = first or time.perf_counter()
            if token in ends:
                break
            made.append(token)
            step = torch.tensor([[token]], device=device)
            text = lm.tokenizer.decode(made)
            if not text.endswith("\ufffd") or len(made) == most_tokens:  # wait for the rest of a letter
                on_text(text[len(shown) :])
                shown = text
    seconds = time.perf_counter() - first
    return Generated(
        text=lm.tokenizer.decode(made),
        prompt_tokens=ids.shape[1],
        tokens=len(made),
        prefill_s=first - started,
        tokens_per_second=(len(made) - 1) / seconds if len(made) > 1 else None,
        weight_bytes=size,
        peak_bytes=peak_bytes(device),
        device=str(device),
    )


def _prompt_ids(lm: CausalLM, prompt: str, chat: bool) -> Tensor:
    if not chat:
        return torch.tensor([lm.tokenizer(prompt)["input_ids"]], dtype=torch.int64)
    if not getattr(lm.tokenizer, "chat_template", None):
        raise MeasureError(f"{lm.where}: the tokenizer has no chat template; leave --chat out")
    messages = [{"role": "user", "content": prompt}]
    ids: Any = lm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return torch.tensor([ids["input_ids"]], dtype=torch.int64)


def _end_tokens(lm: CausalLM) -> set[int]:
    said: Any = getattr(getattr(lm.model, "generation_config", None), "eos_token_id", None)
    if said is None:
        said = lm.tokenizer.eos_token_id
    ends = [] if said is None else list(said) if isinstance(said, list | tuple) else [said]
    if not all(type(token) is int for token in ends):
        raise MeasureError(f"{lm.where}: generation_config.json: eos_token_id must be whole numbers, got {show(said)}")
    return set(ends)


def _next_token(logits: Tensor, temperature: float, draw: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    odds = torch.softmax(logits.float() / temperature, dim=-1)
    return int(torch.multinomial(odds, 1, generator=draw))


def require_finite(logits: Tensor, lm: CausalLM, tokens: int) -> None:
    """Refuse logits whose largest is NaN or infinite: its index is no token. Some may be -inf: they are ruled out."""
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise MeasureError(
            f"{lm.where}: logits that are not finite after {tokens} tokens; look for NaN or overflow in the weights"
        )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, packed or not; tied ones count once."""
    distinct = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in distinct.values())


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory: on a GPU as torch allocated, on a CPU of the whole process; None if the system does not count it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
