"""Shell completion: names of formats and of manifests, without importing torch."""

from __future__ import annotations

import glob
import os


def format_names(incomplete: str) -> list[str]:
    """The formats whose names begin with `incomplete`."""
    from bitplan.formats import list_formats

    return [fmt.name for fmt in list_formats() if fmt.name.startswith(incomplete)]


def manifest_names(incomplete: str) -> list[str]:
    """The shipped manifests whose names begin with `incomplete`, then folders and JSON files."""
    return shipped_names(incomplete) + [
        os.path.join(path, "") if os.path.isdir(path) else path
        for path in sorted(glob.glob(f"{glob.escape(incomplete)}*"))
        if os.path.isdir(path) or path.endswith(".json")
    ]


def shipped_names(incomplete: str) -> list[str]:
    """The shipped manifests whose names begin with `incomplete`."""
    from bitplan.plan import SHIPPED

    return [name for name in SHIPPED if name.startswith(incomplete)]
