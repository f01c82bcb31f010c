"""The folder for bitplan's measurements of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$BITPLAN_CACHE_DIR, else $XDG_CACHE_HOME/bitplan, else ~/.cache/bitplan."""
    if named := os.environ.get("BITPLAN_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bitplan"
