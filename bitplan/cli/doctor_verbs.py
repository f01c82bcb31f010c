"""`bitplan doctor`: what this machine offers, what is missing, and the next command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bitplan.cli.show import say, show_json, table


def doctor(
    measure: Annotated[bool, typer.Option(help="Time copies to and on the GPU, where there is one.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what this machine offers: CPU, GPU, FP8, fast paths, bandwidth, libraries and what is missing.

    Exit 1 when something that bitplan needs is broken.

    Example: bitplan doctor
    """
    from bitplan.measure.machine import examine_machine

    found = examine_machine(measure=measure)
    if as_json:
        show_json(found)
    else:
        _show(found)
    raise typer.Exit(1 if found["problems"] else 0)


def _show(found: dict[str, Any]) -> None:
    machine = found["machine"] | {"python": found["versions"]["python"], "bitplan": found["versions"]["bitplan"]}
    bandwidth = found["bandwidth"] or {}
    machine |= {
        label: f"{bandwidth[key]:,.1f} GB/s"
        for key, label in (("h2d_gb_per_s", "host to device"), ("device_gb_per_s", "device memory"))
        if key in bandwidth
    }
    table("machine", [{"what": key.replace("_", " "), "value": str(value)} for key, value in machine.items()])
    table(
        "fast paths",
        [
            {"path": each["name"], "active": "yes" if each["active"] else "no", "detail": each["detail"]}
            for each in found["paths"]
        ],
    )
    table("libraries", [_library(each) for each in found["libraries"]])
    for cache in found["caches"]:
        say(f"{cache['name']}: {cache['path']} ({cache['detail']})")
    for problem in found["problems"]:
        say(f"broken: {problem}")
    for step in found["next"]:
        say(f"next: {step}")


def _library(library: dict[str, Any]) -> dict[str, str]:
    return {
        "library": f"{library['name']}{library['wanted']}",
        "installed": library["installed"] or "missing",
        "for": ", ".join(f"bitplan[{extra}]" for extra in library["extras"]) or "bitplan itself",
    }
