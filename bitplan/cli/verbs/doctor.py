"""`bitplan doctor`: what this machine offers, what is missing, and the next command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bitplan.cli.show import say, show_json, table

_ACTIVE = {True: "yes", False: "no", None: "not tried"}


def doctor(
    deep: Annotated[
        bool | None,
        typer.Option(
            "--deep/--quick",
            help="Import every library and try the fast paths, or read versions only; "
            "by default --deep where there is a GPU driver.",
        ),
    ] = None,
    measure: Annotated[bool, typer.Option(help="Time copies to and on the GPU, where there is one.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what this machine offers: CPU, GPU, FP8, fast paths, bandwidth, libraries and what is missing.

    Exit 1 when something that bitplan needs is missing, too old, or (with --deep) cannot be imported.

    Example: bitplan doctor
    """
    from bitplan.packed.machine import examine_machine, has_gpu_driver

    examined = examine_machine(measure=measure, deep=has_gpu_driver() if deep is None else deep)
    if as_json:
        show_json(examined)
    else:
        _show(examined)
    raise typer.Exit(1 if examined["problems"] else 0)


def _show(examined: dict[str, Any]) -> None:
    machine = examined["machine"] | {
        "python": examined["versions"]["python"],
        "bitplan": examined["versions"]["bitplan"],
    }
    bandwidth = examined["bandwidth"] or {}
    machine |= {
        label: f"{bandwidth[key]:,.1f} GB/s"
        for key, label in (("h2d_gb_per_s", "host to device"), ("device_gb_per_s", "device memory"))
        if key in bandwidth
    }
    table("machine", [{"what": key.replace("_", " "), "value": str(value)} for key, value in machine.items()])
    table(
        "fast paths",
        [
            {"path": path["name"], "active": _ACTIVE[path["active"]], "detail": path["detail"]}
            for path in examined["paths"]
        ],
    )
    table("libraries", [_library(library) for library in examined["libraries"]])
    for cache in examined["caches"]:
        say(f"{cache['name']}: {cache['path']} ({cache['detail']})")
    for lack in examined["lacks"]:
        step = f" ({lack['next']})" if lack["next"] else ""
        say(f"lacks {lack['what']}: {lack['costs']}{step}")
    for problem in examined["problems"]:
        say(f"broken: {problem}")
    for step in examined["next"]:
        say(f"next: {step}")


def _library(library: dict[str, Any]) -> dict[str, str]:
    return {
        "library": f"{library['name']}{library['wanted']}",
        "installed": library["installed"] or "missing",
        "for": ", ".join(f"bitplan[{extra}]" for extra in library["extras"]) or "bitplan itself",
    }
