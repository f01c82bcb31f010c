"""Verbs that run a language model: `generate` a text, `bench` its speed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bitplan.base.errors import visible
from bitplan.cli.options import Config, Json, KeysValues, Threads
from bitplan.cli.show import human_bytes, progress, say, show_json, table

if TYPE_CHECKING:
    from bitplan.packed.language.generation import Generated, Message

LONGEST_PROMPT = 2**24
MODEL = "What `quantize` wrote, a Hugging Face folder, or a GGUF file."
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one.")]
Type = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="Of weights that are not packed: float32 on a CPU, else as stored."),
]

Inputs = Annotated[
    str | None,
    typer.Option(
        help="Round inputs of packed layers: int8, int8_row, fp8, or keep; unless given, int8 on a CPU that can."
    ),
]


def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help=MODEL)],
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="A question or text; - reads it from standard input; none: a conversation."
        ),
    ] = None,
    most_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Stop after so many tokens.")] = 128,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Refuse a model without a chat template.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token; above, tokens are drawn.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="With --temperature: draw among the K likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="With --temperature: draw among the likeliest of this share.")
    ] = None,
    seed: Annotated[int, typer.Option(help="With --temperature: the same seed, the same text.")] = 0,
    config: Config = None,
    device: Device = None,
    dtype: Type = None,
    inputs: Inputs = None,
    kv: KeysValues = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Answer a question, or continue a text, word by word, and say how fast it was and what memory it took.

    Example: bitplan generate packed "Once upon a time" --max-tokens 16
    """
    from bitplan.base.errors import MeasureError

    if prompt is None and (as_json or raw):
        raise MeasureError(
            "a conversation has no --json and no --raw: give a PROMPT, or - to read it from standard input"
        )
    if chat and raw:
        raise MeasureError("--chat puts the prompt into the chat template, and --raw does not: give one of them")
    question = _standard_input() if prompt == "-" else prompt
    _check_model(model, config, kv)
    import torch

    from bitplan.packed.language.generation import AUTO, Sampling, as_prompt, generate_text, load_for_running

    sampling = Sampling(temperature, top_k, top_p, seed)
    if threads is not None:
        torch.set_num_threads(threads)
    with progress("loading", 1):
        kind = getattr(torch, dtype) if dtype else None
        target = device or _device()
        lm = load_for_running(model, config=config, device=target, dtype=kind, inputs=inputs or AUTO, kv=kv)

    def answer(prompt: str | list[Message]) -> Generated:
        shown = (lambda _text: None) if as_json else _show_text
        return generate_text(lm, prompt, most_tokens=most_tokens, sampling=sampling, on_text=shown)

    if question is None:
        beginning = as_prompt(lm, "the first question", chat=True, system=system)
        _converse([message for message in beginning[:-1] if not isinstance(message, str)], answer)
        return
    asked = as_prompt(lm, question, chat=chat or (False if raw else None), system=system)
    result = answer(asked)
    if as_json:
        show_json({"model": str(model), "prompt": question, "chat": asked != question, **result.to_dict()})
        return
    print()
    _show_end(result, asked=asked != question)


def _standard_input() -> str:
    from bitplan.base.errors import MeasureError

    text = sys.stdin.read(LONGEST_PROMPT + 1)
    if len(text) > LONGEST_PROMPT:
        raise MeasureError(f"standard input: a prompt is at most {LONGEST_PROMPT} letters")
    return text.removesuffix("\n")


def _converse(messages: list[Message], answer: Callable[[list[Message]], Generated]) -> None:
    """Turns of a question, a line of standard input, and an answer, which sees all before it; an empty line ends."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        say("A line is a question; an empty one ends.")
    while True:
        try:
            line = input("> " if is_typed else "").strip()
        except EOFError:
            return
        if not line:
            return
        messages.append({"role": "user", "content": line})
        result = answer(messages)
        messages.append({"role": "assistant", "content": result.text})
        print(flush=True)
        if result.ended != "end" or not result.tokens:
            _show_end(result, asked=True)


def _show_end(result: Generated, *, asked: bool) -> None:
    rate = "" if result.tokens_per_second is None else f", then {result.tokens_per_second:.1f} tokens a second"
    memory = "" if result.peak_bytes is None else f", peak {human_bytes(result.peak_bytes)}"
    say(
        f"{result.prompt_tokens} tokens read in {result.prefill_s:.2f} s{rate}; {result.tokens} tokens; "
        f"weights {human_bytes(result.weight_bytes)}{memory} on {result.device}"
    )
    if result.inputs is not None:
        as_theirs = ", as llama.cpp does" if result.inputs == "q8_0_gguf" else ""
        say(f"Inputs of packed layers were rounded to {result.inputs}{as_theirs}; --inputs keep leaves them.")
    if result.kv is not None:
        say(f"Keys and values were kept in {result.kv}: {human_bytes(result.kv_bytes)}; --kv keep leaves them.")
    if result.ended == "context":
        say("The model's context is full.")
    if not result.tokens:
        say(
            "The model ended at once."
            + ("" if asked else " A model that answers questions needs its chat template: leave --raw out.")
        )


def _show_text(text: str) -> None:
    """Print a model's text, with control characters made visible; line ends stay."""
    print("\n".join(map(visible, text.split("\n"))), end="", flush=True)


def bench(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help=MODEL)],
    against: Annotated[Path | None, typer.Option(metavar="MODEL", help="Measure this model too, in turns.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; give several.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens made in each turn.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Turns that count.")] = 3,
    config: Config = None,
    device: Device = None,
    dtype: Type = None,
    inputs: Inputs = None,
    kv: KeysValues = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time a model's prompts and tokens at a few batch sizes, alone or against the unpacked model.

    Example: bitplan bench packed --against llama --batch 1 --prompt-tokens 16 --tokens 4 --repeats 1
    """
    _check_model(model, config, kv)
    if against is not None:
        _check_model(against, None)
    import torch

    from bitplan.packed.language.generation import AUTO, bench_models, load_for_running

    if threads is not None:
        torch.set_num_threads(threads)
    target, kind = device or _device(), getattr(torch, dtype) if dtype else None
    with progress("loading", 1):
        rounded = inputs or AUTO
        models = [load_for_running(model, config=config, device=target, dtype=kind, inputs=rounded, kv=kv)]
        models += [] if against is None else [load_for_running(against, device=target, dtype=kind, inputs=AUTO)]
    batches = batch or [1, 4, 16]
    with progress("timing", len(models) * len(batches) * (repeats + 1)) as advance:
        rows = bench_models(
            models,
            batches=batches,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            repeats=repeats,
            on_turn=lambda label: advance(1, label),
        )
    if as_json:
        show_json({"device": target, "threads": torch.get_num_threads(), "rows": [row.to_dict() for row in rows]})
        return
    shown = [
        {
            "model": Path(row.model).name,
            **({"inputs": row.inputs or "as they are"} if any(one.inputs for one in rows) else {}),
            **({"K and V": row.kv or "as they are"} if any(one.kv for one in rows) else {}),
            "batch": row.batch,
            "prompt, tokens/s": f"{row.prefill_tokens_per_second:.1f}",
            "step, ms": f"{row.decode_ms:.2f}",
            "tokens/s": f"{row.decode_tokens_per_second:.1f}",
            "weights": human_bytes(row.weight_bytes),
            "times as fast": "" if row.speedup is None else f"{row.speedup:.2f}",
        }
        for row in rows
    ]
    table(f"{model.name}: prompts of {prompt_tokens} tokens, then {tokens} tokens, on {target}", shown)


def _check_model(model: Path, config: Path | None, kv: str | None = None) -> None:
    """Refuse what can be refused without torch, whose import takes seconds."""
    from bitplan.files.headers import check_model_source
    from bitplan.files.open_files import open_tensors
    from bitplan.files.packed_folder import is_packed_config, read_config, read_packed_plan
    from bitplan.plan.kv_formats import KVFormats

    if kv is not None:
        KVFormats.parse(kv, "--kv")
    check_model_source(model, config)
    if model.is_file():
        open_tensors(model).close()
    elif is_packed_config(document := read_config(model)):
        read_packed_plan(model, document)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
