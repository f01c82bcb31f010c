"""The command line: the verbs, grouped by purpose, in the order of the work.

Measure, plan, apply, run; and look at any time. The verbs themselves are in `cli.verbs`: each does its work through one
library function and shows the result as a table, or as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from bitplan.base.version import __version__
from bitplan.cli.quick_help import QuickCommand, QuickGroup
from bitplan.cli.verbs import doctor as doctor_verbs
from bitplan.cli.verbs import export as convert_verbs
from bitplan.cli.verbs import export as export_verbs
from bitplan.cli.verbs import files as file_verbs
from bitplan.cli.verbs import fp8 as bench_verbs
from bitplan.cli.verbs import fp8 as fp8_verbs
from bitplan.cli.verbs import plan as plan_verbs
from bitplan.cli.verbs import quality as quality_verbs
from bitplan.cli.verbs import report as report_verbs
from bitplan.cli.verbs import run_model as run_verbs
from bitplan.cli.verbs import search as search_verbs

app = typer.Typer(
    cls=QuickGroup,
    help="The right number format for every part of a model, measured on the machine it runs on.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VERBS: dict[str, tuple[Callable[..., Any] | typer.Typer, ...]] = {
    "Measure": (bench_verbs.bench_layers, quality_verbs.perplexity, file_verbs.drift, file_verbs.compare),
    "Plan": (
        search_verbs.search,
        plan_verbs.check,
        plan_verbs.plan,
        search_verbs.diff,
        plan_verbs.manifest_app,
        fp8_verbs.merge_policy,
        fp8_verbs.explain,
        fp8_verbs.confirm_policy,
    ),
    "Apply": (file_verbs.quantize, export_verbs.export, convert_verbs.convert, convert_verbs.make_checkpoint),
    "Run": (run_verbs.generate, run_verbs.bench, report_verbs.demo),
    "Look": (doctor_verbs.doctor, file_verbs.formats, file_verbs.inspect, report_verbs.report),
}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bitplan {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None: ...


for purpose, verbs in VERBS.items():
    for verb in verbs:
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, rich_help_panel=purpose)
        else:
            app.command(cls=QuickCommand, rich_help_panel=purpose)(verb)
