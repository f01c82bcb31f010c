"""Verbs that run a language model: `generate` a text, `bench` its speed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bitplan.cli.options import Config, Json, Threads
from bitplan.cli.show import human_bytes, progress, say, show_json, table
from bitplan.text import visible

MODEL = "What `quantize` wrote, a Hugging Face folder, or a GGUF file."
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one.")]
Type = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="Of weights that are not packed: float32 on a CPU, else as stored."),
]


def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help=MODEL)],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    most_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Stop after so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token; above, tokens are drawn.")] = 0.0,
    seed: Annotated[int, typer.Option(help="With --temperature: the same seed, the same text.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    config: Config = None,
    device: Device = None,
    dtype: Type = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Continue a text with a packed model, word by word, and say how fast it was and what memory it took.

    Example: bitplan generate packed "Once upon a time" --max-tokens 16
    """
    _check_model(model, config)
    import torch

    from bitplan.runtime.generation import generate_text, load_for_running

    if threads is not None:
        torch.set_num_threads(threads)
    with progress("loading", 1):
        kind = getattr(torch, dtype) if dtype else None
        lm = load_for_running(model, config=config, device=device or _device(), dtype=kind)
    shown = (lambda _text: None) if as_json else _show_text
    result = generate_text(
        lm, prompt, most_tokens=most_tokens, temperature=temperature, seed=seed, chat=chat, on_text=shown
    )
    if as_json:
        show_json({"model": str(model), "prompt": prompt, **result.to_dict()})
        return
    print()
    rate = "" if result.tokens_per_second is None else f", then {result.tokens_per_second:.1f} tokens a second"
    memory = "" if result.peak_bytes is None else f", peak {human_bytes(result.peak_bytes)}"
    say(
        f"{result.prompt_tokens} tokens read in {result.prefill_s:.2f} s{rate}; {result.tokens} tokens; "
        f"weights {human_bytes(result.weight_bytes)}{memory} on {result.device}"
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
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time a model's prompts and tokens at a few batch sizes, alone or against the unpacked model.

    Example: bitplan bench packed --against llama --batch 1 --prompt-tokens 16 --tokens 4 --repeats 1
    """
    _check_model(model, config)
    if against is not None:
        _check_model(against, None)
    import torch

    from bitplan.runtime.bench_model import bench_models
    from bitplan.runtime.generation import load_for_running

    if threads is not None:
        torch.set_num_threads(threads)
    place, kind = device or _device(), getattr(torch, dtype) if dtype else None
    with progress("loading", 1):
        models = [load_for_running(model, config=config, device=place, dtype=kind)]
        models += [] if against is None else [load_for_running(against, device=place, dtype=kind)]
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
        show_json({"device": place, "threads": torch.get_num_threads(), "rows": [row.to_dict() for row in rows]})
        return
    shown = [
        {
            "model": Path(row.model).name,
            "batch": row.batch,
            "prompt, tokens/s": f"{row.prefill_tokens_per_second:.1f}",
            "step, ms": f"{row.decode_ms:.2f}",
            "tokens/s": f"{row.decode_tokens_per_second:.1f}",
            "weights": human_bytes(row.weight_bytes),
            "times as fast": "" if row.speedup is None else f"{row.speedup:.2f}",
        }
        for row in rows
    ]
    table(f"{model.name}: prompts of {prompt_tokens} tokens, then {tokens} tokens, on {place}", shown)


def _check_model(model: Path, config: Path | None) -> None:
    """Refuse what can be refused without torch, whose import takes seconds."""
    from bitplan.store.files.headers import check_model_source
    from bitplan.store.files.open_files import open_tensors
    from bitplan.store.packed_folder import is_packed_config, read_config, read_packed_plan

    check_model_source(model, config)
    if model.is_file():
        open_tensors(model).close()
    elif is_packed_config(said := read_config(model)):
        read_packed_plan(model, said)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
