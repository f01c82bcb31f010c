"""The verbs about gpt-oss checkpoints: `convert` between layouts, `make` one for tests and benchmarks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from bitplan.cli.options import Force, Json, QuickCommand, QuickGroup
from bitplan.cli.show import human_bytes, progress, say, show_json, table

gpt_oss_app = typer.Typer(
    name="gpt-oss", cls=QuickGroup, help="gpt-oss checkpoints: convert layouts, make small ones.", no_args_is_help=True
)
Layout = Literal["openai", "hf", "gguf"]
Experts = Literal["mxfp4", "bfloat16"]
Dest = Annotated[
    Path, typer.Argument(metavar="DEST", help="A .gguf file; or a .safetensors file, or a folder to be made.")
]
_MEANING = {
    "copied": "byte for byte",
    "rearranged": "same values; rows or nibbles in another order",
    "widened": "same values, bfloat16 held in float32",
    "narrowed": "same values, float32 that held bfloat16",
    "encoded": "floats to MXFP4",
    "expanded": "MXFP4 to floats, exactly",
    "rounded": "wider floats rounded to bfloat16",
}


@gpt_oss_app.command(cls=QuickCommand)
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A gpt-oss checkpoint: file, shard index or folder.")
    ],
    dest: Dest,
    to: Annotated[Layout, typer.Option("--to", help="Whose layout to write.")],
    experts: Annotated[
        Experts, typer.Option(help="mxfp4: packed bytes stay, floats are encoded. bfloat16: packed ones are expanded.")
    ] = "mxfp4",
    scale_rule: Annotated[
        Literal["absmax", "mse", "percentile"] | None,
        typer.Option(help="When experts are encoded: how scales are chosen; absmax is OCP's floor rule."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Convert a gpt-oss checkpoint between OpenAI's, Hugging Face's and GGUF's layouts, value for value.

    A fine-tuned model with bfloat16 experts comes back as MXFP4.

    Example: bitplan gpt-oss convert gpt-oss-20b model.gguf --to gguf
    """
    from bitplan.files.open_files import open_tensors

    open_tensors(source).close()  # refuses a file that cannot be read before torch is imported

    from bitplan.files.gpt_oss import GptOssFile, checkpoint_bytes, convert_gpt_oss

    with GptOssFile(source) as file:
        shape, before = file.shape, file.nbytes
    packed = experts == "mxfp4" or to == "openai"
    started = time.perf_counter()
    with progress("converting", checkpoint_bytes(to, shape, packed=packed), amount=human_bytes) as advance:
        report = convert_gpt_oss(
            source, dest, to=to, experts=experts, scale_rule=scale_rule, force=force, on_bytes=advance
        )
    seconds = time.perf_counter() - started
    if as_json:
        show_json({**report.to_dict(), "seconds": round(seconds, 3)})
        return
    rows = [
        {
            "tensors": row["tensors"],
            "were": row["action"],
            "which means": _MEANING[row["action"]],
            "now": row["format"],
            "size": human_bytes(row["bytes"]),
        }
        for row in report.counts()
    ]
    table(f"{source} ({report.from_layout}) -> {dest} ({to})", rows)
    beside = f", with {', '.join(report.files)}" if report.files else ""
    say(
        f"{len(report.tensors)} tensors, {human_bytes(before)} -> {human_bytes(report.nbytes)}, {seconds:.1f} s{beside}"
    )
    if to == "gguf" and report.from_layout != "gguf":
        say("no tokenizer was written: llama.cpp loads the weights, and needs one added for text")


@gpt_oss_app.command(cls=QuickCommand)
def make(
    dest: Dest,
    naming: Annotated[Layout, typer.Option("--to", help="Whose layout to write.")] = "openai",
    size: Annotated[str, typer.Option(help="Sizes to begin from: tiny, 20b or 120b.")] = "tiny",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers.")] = None,
    expert_count: Annotated[int | None, typer.Option("--expert-count", min=1, help="Experts in a layer.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Width of hidden states.")] = None,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Width of each expert.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of keys and values.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Numbers in a head.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Tokens in the vocabulary.")] = None,
    experts: Annotated[Experts, typer.Option(help="bfloat16: as a fine-tuned model has them (hf, gguf).")] = "mxfp4",
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers in every layout.")] = 0,
    device: Annotated[str, typer.Option(help="Where numbers are drawn and encoded: cpu or cuda.")] = "cpu",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make a gpt-oss checkpoint of any size from drawn numbers, for tests and benchmarks.

    Example: bitplan gpt-oss make small --to hf --layers 4 --expert-count 8 --hidden 256 --intermediate 256
    """
    from bitplan.files.gpt_oss import checkpoint_bytes, make_checkpoint, make_shape

    sizes = {
        "layers": layers,
        "experts": expert_count,
        "hidden": hidden,
        "intermediate": intermediate,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
    }
    total = checkpoint_bytes(naming, make_shape(size, **sizes), packed=experts == "mxfp4" or naming == "openai")
    started = time.perf_counter()
    with progress("drawing", total, amount=human_bytes) as advance:
        report = make_checkpoint(
            dest,
            naming=naming,
            size=size,
            **sizes,
            expert_format=experts,
            seed=seed,
            device=device,
            force=force,
            on_bytes=advance,
        )
    seconds = time.perf_counter() - started
    if as_json:
        show_json({**report.to_dict(), "seconds": round(seconds, 3)})
        return
    beside = f", with {', '.join(report.files)}" if report.files else ""
    say(f"{dest} ({naming}): {len(report.tensors)} tensors, {human_bytes(report.nbytes)}, {seconds:.1f} s{beside}")
