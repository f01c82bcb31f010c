"""The command line: the verbs, grouped by purpose, in the order of the work.

Measure, plan, apply, run; and look at any time. The verbs themselves are in `cli.verbs`: each does its work through one
library function and shows the result as a table, or as JSON.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from bitplan.base import __version__
from bitplan.cli.options import QuickCommand, QuickGroup
from bitplan.cli.verbs import doctor, export, files, fit, fp8, gpt_oss, plan, quality, report, run_model, search

app = typer.Typer(
    cls=QuickGroup,
    help="The right number format for every part of a model, measured on the machine it runs on.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VERBS: dict[str, tuple[Callable[..., Any] | typer.Typer, ...]] = {
    "Measure": (quality.judge, files.compare, run_model.bench, fp8.fp8_app),
    "Plan": (search.search, fit.fit, plan.plan, plan.explain, plan.diff, plan.verify, plan.manifest_app),
    "Apply": (files.quantize, export.export, gpt_oss.gpt_oss_app),
    "Run": (run_model.generate,),
    "Look": (doctor.doctor, files.inspect, report.report),
}
# Verbs of the version before: they work for one release, and say what to type from now on.
OLD_VERBS: dict[str, tuple[str, Callable[..., Any]]] = {
    "bench-layers": ("fp8 bench", fp8.bench),
    "merge-policy": ("fp8 merge", fp8.merge),
    "confirm-policy": ("fp8 confirm", fp8.confirm),
    "convert": ("gpt-oss convert", gpt_oss.convert),
    "make-checkpoint": ("gpt-oss make", gpt_oss.make),
    "drift": ("compare --scales", files.drift),
    "formats": ("inspect", files.formats),
    "perplexity": ("judge", quality.judge),
    "check": ("verify", plan.check),
}


def _version(shown: bool) -> None:
    if shown:
        print(f"bitplan {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None: ...


def _with_warning(old: str, new: str, verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def run(*values: Any, **options: Any) -> Any:
        print(f"bitplan: warning: `{old}` is `bitplan {new}` now; the next version has no `{old}`", file=sys.stderr)
        return verb(*values, **options)

    return run


for purpose, verbs in VERBS.items():
    for verb in verbs:
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, rich_help_panel=purpose)
        else:
            app.command(cls=QuickCommand, rich_help_panel=purpose)(verb)
for old, (new, verb) in OLD_VERBS.items():
    app.command(old, cls=QuickCommand, hidden=True)(_with_warning(old, new, verb))
