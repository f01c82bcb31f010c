"""The verb that shows everything once, on a model it trains itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli.show import Force, Json, show_json


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")] = Path("demo-out"),
    fast: Annotated[bool, typer.Option("--fast", help="A little of everything, to see that it works.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same figures.")] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train, calibrate, plan, pack and boost in two minutes on a CPU, and write one page that shows all of it.

    The files of an earlier demo in the folder are replaced; --force replaces others of the same names too.

    Example: bitplan demo --fast
    """
    import bitplan.trees  # noqa: F401 (first: it says in one line which library is missing)
    from bitplan.cli.demo.run import run_demo

    result = run_demo(output, fast=fast, quiet=as_json, seed=seed, force=force)
    if as_json:
        show_json(result)
