"""Text from a causal language model, token by token, with time and memory: packed or not, on any device.

The loop is our own, so that words can be shown as they come and each step can be timed; transformers' `generate` gives
the same tokens (greedy; with rounded inputs, but where two are about as likely). On a CPU the tokens of packed models
of a known structure go past the model's own modules (`token_steps`).

`bench_models` times how fast a model reads a prompt and makes tokens, at some batch sizes, alone or in turns with
another: when models take turns, other load on the machine slows both alike. For the prompt the shortest of several
repeats counts, for tokens the median step.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitplan.base.documents import show
from bitplan.base.errors import MeasureError
from bitplan.base.hardware import give_back_memory
from bitplan.files.engines.gguf_source import is_folder_like, read_gguf_tokenizer
from bitplan.files.headers import is_gguf
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import is_packed_config, read_config
from bitplan.files.transformers_names import foreign_faults, silence_transformers
from bitplan.formats.input_formats import KEEP, input_format
from bitplan.packed.checkpoints.causal_lm import (
    CausalLM,
    load_causal_lm,
    no_causal_model,
    read_model,
    read_tokenizer,
    require_causal,
    require_finite,
)
from bitplan.packed.checkpoints.gpt_oss_tensors import is_gpt_oss
from bitplan.packed.checkpoints.load import device_of, load_packed, require_transformers
from bitplan.packed.language.token_steps import Decoding
from bitplan.packed.rounded_inputs import round_inputs, runs_on_integers, shown_inputs
from bitplan.packed.rounded_kv import round_kv, shown_kv
from bitplan.plan.kv_formats import KVFormats

AUTO = "auto"


def load_for_running(
    path: str | Path,
    *,
    config: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    inputs: str | None = None,
    kv: str | None = None,
) -> CausalLM:
    """A model and its tokenizer: a packed folder and a GGUF file run packed, others as transformers loads them.

    config  a folder or a GGUF file with config and tokenizer, for a file of weights alone, which is decoded
    dtype   type of weights that are not packed; None: float32 on a CPU, else as in the folder
    inputs  the format that packed layers round their inputs to, or "keep"; None: what a packed folder says; "auto":
            this, and where nothing is said int8 on a CPU, if all products are then such of whole numbers
    kv      formats of keys and values, such as "int8:int4", or "keep"; None: what a packed folder says
    """
    target, source = device_of(device), Path(path)
    kept_in = None if kv is None or kv == KEEP else KVFormats.parse(kv, str(path))
    asked = None if inputs == AUTO else input_format(inputs, str(path))
    require_transformers(str(path))
    float_type = dtype or (torch.float32 if target.type == "cpu" else None)
    if source.is_dir():
        model, tokenizer = _of_folder(source, target, float_type), None
    elif config is None and is_gguf(source) and is_folder_like(source):
        tokenizer = tokenizer_of(source)
        model = load_packed(source, device=target, dtype=float_type).model
    else:
        lm = load_causal_lm(source, config=config)
        model, tokenizer = lm.model.to(target, float_type), lm.tokenizer
    is_pair = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if is_pair or not model.can_generate():  # type: ignore[operator]
        raise MeasureError(no_causal_model(str(path), type(model).__name__))
    if asked is not None or inputs == KEEP:
        round_inputs(model, asked)
    elif inputs == AUTO and shown_inputs(model) is None and runs_on_integers(model):
        round_inputs(model, "int8")
    if kv is not None:
        round_kv(model, kept_in)
    with silence_transformers():
        lm = CausalLM(model.eval(), tokenizer or tokenizer_of(source), str(path))
        require_causal(lm, lambda ids: lm(ids.to(lm.device)))
    if target.type == "cpu":
        give_back_memory()  # else the process's peak would depend on what loading has left
    return lm


def tokenizer_of(source: Path) -> Any:
    """The tokenizer of a folder or a GGUF file."""
    if not is_gguf(source):
        return read_tokenizer(source)
    with open_tensors(source) as file:
        return read_gguf_tokenizer(source, file.metadata)


def _of_folder(source: Path, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    if is_packed_config(read_config(source)) or is_gpt_oss(source):
        return load_packed(source, device=device, dtype=dtype).model
    with silence_transformers():
        model: nn.Module = read_model(source, dtype=dtype or "auto").to(device)
    return model


Message = Mapping[str, str]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: at temperature 0 the likeliest, above it one is drawn, from random `seed`.

    top_k   draw among so many of the likeliest
    top_p   draw among the likeliest whose odds together reach this share
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise MeasureError(f"the temperature must be 0 or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise MeasureError(f"top-k must be 1 token or more, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise MeasureError(f"top-p must be above 0 and at most 1, got {self.top_p}")
        if not self.temperature and (self.top_k or self.top_p):
            raise MeasureError("top-k and top-p choose among tokens that are drawn: give a temperature above 0, too")

    def next_token(self, logits: Tensor, draw: torch.Generator) -> int:
        """Choose the next token from logits [vocabulary], with the random numbers of `draw`."""
        if not self.temperature:
            return int(logits.argmax())
        odds = torch.softmax(logits.float() / self.temperature, dim=-1)
        if self.top_k is not None and self.top_k < len(odds):
            odds = odds.where(odds >= odds.topk(self.top_k).values[-1], 0.0)
        if self.top_p is not None:
            likeliest, order = odds.sort(descending=True)
            before = likeliest.cumsum(-1) - likeliest
            odds[order[before >= self.top_p * likeliest.sum()]] = 0.0
        return int(torch.multinomial(odds, 1, generator=draw))


@dataclass(frozen=True)
class Generated:
    """A text, its time and memory. `prefill_s` is the time to the first token; the rate is of the tokens after it.

    ended   why it is over: the model's "end", "max tokens", or its "context" is full
    inputs  the format that packed layers round their inputs to, if they do
    kv      the formats in which keys and values were kept, if in any, and `kv_bytes` what they took at the end
    """

    text: str
    prompt_tokens: int
    tokens: int
    ended: Literal["end", "max tokens", "context"]
    prefill_s: float
    tokens_per_second: float | None
    weight_bytes: int
    peak_bytes: int | None
    device: str
    inputs: str | None = None
    kv: str | None = None
    kv_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def as_prompt(lm: CausalLM, text: str, *, chat: bool | None = None, system: str | None = None) -> str | list[Message]:
    """What to give `generate_text`: a conversation where the model has a template for one, else the text itself.

    chat     True: a conversation, or an error where there is no template; False: the text as it is
    system   what the model is told before the conversation
    """
    has_template = bool(getattr(lm.tokenizer, "chat_template", None))
    if chat and not has_template:
        raise MeasureError(
            f"{lm.where}: the tokenizer has no chat template; send the text as it is", settings={"chat": False}
        )
    if not (has_template if chat is None else chat):
        if system is not None:
            reason = "the text goes to the model as it is" if has_template else "the tokenizer has no chat template"
            raise MeasureError(f"{lm.where}: a system prompt is a part of a conversation, and {reason}; leave it out")
        return text
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def generate_text(
    lm: CausalLM,
    prompt: str | Sequence[Message],
    *,
    most_tokens: int = 128,
    sampling: Sampling | None = None,
    on_text: Callable[[str], None] = lambda _text: None,
) -> Generated:
    """Continue a text, or answer a conversation by the tokenizer's chat template; `on_text` gets text as it comes."""
    if not prompt or most_tokens < 1:
        raise MeasureError("a prompt of at least one letter and 1 token or more are needed")
    device, sampling = lm.device, sampling or Sampling()
    with foreign_faults(MeasureError, f"{lm.where}: the tokenizer fails"):
        ids = _prompt_ids(lm, prompt).to(device)
    ends, size = _end_tokens(lm, is_chat=not isinstance(prompt, str)), weight_bytes(lm.model)
    draw = torch.Generator(device=device).manual_seed(sampling.seed)
    room = most_tokens if lm.positions is None else min(most_tokens, lm.positions - ids.shape[1])
    ended: Literal["end", "max tokens", "context"] = "max tokens" if room == most_tokens else "context"
    decoding = Decoding(lm.model)
    tokens: list[int] = []
    shown, started, first = "", time.perf_counter(), 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        step = ids
        while len(tokens) < room:
            logits = decoding(step)
            require_finite(logits, lm, ids.shape[1] + len(tokens))
            token = sampling.next_token(logits[0], draw)
            first = first or time.perf_counter()
            if token in ends:
                ended = "end"
                break
            tokens.append(token)
            step = torch.tensor([[token]], device=device)
            text = lm.tokenizer.decode(tokens)
            if not text.endswith("\ufffd") or len(tokens) == room:  # wait for the rest of a letter
                on_text(text[len(shown) :])
                shown = text
    seconds = time.perf_counter() - first
    return Generated(
        text=lm.tokenizer.decode(tokens),
        prompt_tokens=ids.shape[1],
        tokens=len(tokens),
        ended=ended,
        prefill_s=first - started,
        tokens_per_second=(len(tokens) - 1) / seconds if len(tokens) > 1 else None,
        weight_bytes=size,
        peak_bytes=peak_bytes(device),
        device=str(device),
        inputs=shown_inputs(lm.model),
        kv=shown_kv(lm.model),
        kv_bytes=decoding.kv_bytes,
    )


def _prompt_ids(lm: CausalLM, prompt: str | Sequence[Message]) -> Tensor:
    """Token ids [1, length], refused where the model has no place for them and for one token more."""
    if isinstance(prompt, str):
        numbers = lm.tokenizer(prompt, verbose=False)["input_ids"]
    else:
        numbers = _render(lm, prompt, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    ids = torch.tensor([numbers], dtype=torch.int64)
    if not ids.numel():
        raise MeasureError(f"{lm.where}: the tokenizer makes no token of the prompt; give another")
    if lm.positions is not None and ids.shape[1] >= lm.positions:
        raise MeasureError(
            f"{lm.where}: the prompt has {ids.shape[1]} tokens, and the model's context of {lm.positions} must hold it "
            "and the answer; shorten it"
        )
    lm.check_tokens(ids)
    return ids


def _render(lm: CausalLM, messages: Sequence[Message], **options: Any) -> Any:
    where = f"{lm.where}: its chat template refuses this conversation"  # it is a program, and raises what it likes
    with foreign_faults(MeasureError, where, "; the text can be sent as it is", {"chat": False}):
        return lm.tokenizer.apply_chat_template([dict(message) for message in messages], **options)


def _end_tokens(lm: CausalLM, *, is_chat: bool) -> set[int]:
    """Tokens after which nothing comes: those of the generation config, the tokenizer's, and of a turn's end."""
    end_ids: Any = getattr(getattr(lm.model, "generation_config", None), "eos_token_id", None)
    ends = list(end_ids) if isinstance(end_ids, list | tuple) else [end_ids, lm.tokenizer.eos_token_id]
    if not all(token is None or type(token) is int for token in ends):
        raise MeasureError(
            f"{lm.where}: generation_config.json: eos_token_id must be whole numbers, got {show(end_ids)}"
        )
    return {token for token in ends if token is not None} | (_end_of_turn(lm) if is_chat else set())


def _end_of_turn(lm: CausalLM) -> set[int]:
    """The special token that the chat template puts right after an answer; a GGUF file often names no other end."""
    mark = "the answer"
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": mark}]
    try:
        after = str(_render(lm, turns, tokenize=False)).rpartition(mark)[2]
    except MeasureError:  # a template that takes other conversations only
        return set()
    for token in lm.tokenizer(after, add_special_tokens=False)["input_ids"]:
        added = lm.tokenizer.added_tokens_decoder.get(token)
        if added is not None and added.special:
            return {token}
        if lm.tokenizer.decode([token]).strip():
            break
    return set()


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


# ---- bench model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchRow:
    """One model at one batch size. Rates are of all sequences of the batch together."""

    model: str
    batch: int
    prompt_tokens: int
    tokens: int
    prefill_s: float
    prefill_tokens_per_second: float
    decode_ms: float
    decode_tokens_per_second: float
    weight_bytes: int
    speedup: float | None = None  # of decoding, over the last model
    inputs: str | None = None  # the format that packed layers round their inputs to
    kv: str | None = None  # the formats in which keys and values are kept

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_models(
    models: Sequence[CausalLM],
    *,
    batches: Sequence[int] = (1, 4, 16),
    prompt_tokens: int = 128,
    tokens: int = 32,
    repeats: int = 3,
    on_turn: Callable[[str], None] = lambda _name: None,
) -> list[BenchRow]:
    """A row for every model and batch; speedups are over the last model."""
    if min((*batches, prompt_tokens, repeats)) < 1 or tokens < 2 or not batches:
        raise MeasureError("batches, prompt tokens and repeats must be 1 or more, and tokens 2 or more")
    for lm in models:
        lm.check_context(prompt_tokens + tokens)
    rows, sizes = [], [weight_bytes(lm.model) for lm in models]
    for batch in batches:
        prefills: list[list[float]] = [[] for _ in models]
        steps: list[list[float]] = [[] for _ in models]
        for turn in range(repeats + 1):  # the first turn warms up, and is not counted
            for lm, prefill, step in zip(models, prefills, steps, strict=True):
                taken = _run(lm, batch, prompt_tokens, tokens)
                if turn:
                    prefill.append(taken[0])
                    step += taken[1:]
                on_turn(f"batch {batch}, {lm.where}")
        reference = statistics.median(steps[-1])
        for index, lm in enumerate(models):
            step_s, prefill_s = statistics.median(steps[index]), min(prefills[index])
            rows.append(
                BenchRow(
                    model=lm.where,
                    batch=batch,
                    prompt_tokens=prompt_tokens,
                    tokens=tokens,
                    prefill_s=prefill_s,
                    prefill_tokens_per_second=batch * prompt_tokens / prefill_s,
                    decode_ms=1000 * step_s,
                    decode_tokens_per_second=batch / step_s,
                    weight_bytes=sizes[index],
                    speedup=reference / step_s if index + 1 < len(models) else None,
                    inputs=shown_inputs(lm.model),
                    kv=shown_kv(lm.model),
                )
            )
    return rows


def _run(lm: CausalLM, batch: int, prompt_tokens: int, tokens: int) -> list[float]:
    """Time one generation: seconds of the prompt, then of each token after the first."""
    device = lm.device
    ids = torch.arange(batch * prompt_tokens, device=device).remainder(lm.vocabulary).reshape(batch, prompt_tokens)
    times, decoding = [], Decoding(lm.model)
    with torch.inference_mode():
        for index in range(tokens):
            _wait(device)
            started = time.perf_counter()
            logits = decoding(ids)
            ids = logits.argmax(dim=-1, keepdim=True)
            _wait(device)
            times.append(time.perf_counter() - started)
            require_finite(logits, lm, prompt_tokens + index)  # not timed
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
