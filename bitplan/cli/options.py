"""Options that several verbs have: each is declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bitplan.cli.quick_help import manifest_names
from bitplan.fp8.recipes import RECIPES

Rule = Literal["absmax", "absmean", "percentile", "mse"]

Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Recipe = Annotated[str | None, typer.Option("--recipe", help=" or ".join(", ".join(RECIPES).rsplit(", ", 1)) + ".")]
KeysValues = Annotated[
    str | None,
    typer.Option(
        "--kv", metavar="K[:V]", help="Formats of the cache's keys and values: int8, fp8, int4, int8:int4; or keep."
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
Emulated = Annotated[
    Literal["cuda", "cpu"], typer.Option("--device", help="cpu emulates FP8: to try the command, not to decide.")
]
ManifestName = Annotated[
    str | None,
    typer.Option(
        help="By rules on names instead: a file, or the name of a shipped manifest.", autocompletion=manifest_names
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Config and tokenizer for weights alone: a folder, or a GGUF file."),
]
PlanFile = Annotated[Path | None, typer.Option(help="By a plan, or the folder of a `search`, with its evidence.")]
Keep = Annotated[list[str] | None, typer.Option(help=r"Leave tensors of this name or shell pattern (* ? \[ab]).")]
Only = Annotated[list[str] | None, typer.Option(help="Quantize these and nothing else.")]
ScaleRule = Annotated[Rule | None, typer.Option(help="How scales are chosen.")]
Pad = Annotated[Literal["zero"] | None, typer.Option(help="Fill a last block that is not whole.")]
Evidence = Annotated[
    Path | None,
    typer.Option(help="Better numbers in the same bytes, from statistics: evidence.safetensors, imatrix.gguf."),
]
DaskAddress = Annotated[
    str | None, typer.Option("--dask", metavar="ADDRESS", help="Have the workers of this Dask scheduler do the work.")
]
Bits = Annotated[float | None, typer.Option("--bits", help="At most this many bits a weight, scales included.")]
Bytes = Annotated[str | None, typer.Option("--bytes", metavar="SIZE", help="At most this size: 6GB, 900MB.")]
MaxKl = Annotated[
    float | None,
    typer.Option("--max-kl", help="At most this far from the model, in nats a token; alone: fewest bytes."),
]
Faster = Annotated[
    float | None, typer.Option("--faster", help="At least this many times BF16's speed, by measured times.")
]
KindsOfText = Annotated[
    str,
    typer.Option(
        "--goal", metavar="KINDS", help="Of several --text what counts: mean, worst, or shares in their order: 0.7:0.3."
    ),
]
Rows = Annotated[int, typer.Option("--rows", help="With --faster: at how many rows (tokens at once).")]
