"""The verb that shows everything once, on a model it trains itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli.show import Json


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")] = Path("demo-out"),
    fast: Annotated[bool, typer.Option("--fast", help="A few steps only, to see that everything works.")] = False,
    as_json: Json = False,
) -> None:
    """Train a small transformer for a few seconds, quantize it, and show what each format costs.

    Example: bitplan demo --fast
    """
    from bitplan.cli.demo import run_demo

    result = run_demo(output, fast=fast, quiet=as_json)
    if as_json:
        print(json.dumps(result, indent=2))
