"""The manifests that come with bitplan, by name; each is a file in `manifests/` to copy and change."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from bitplan.errors import ManifestError, did_you_mean
from bitplan.plan.manifest import Manifest
from bitplan.records import parse_json

SHIPPED = ("bert", "gemma", "gpt-oss", "llama", "mistral", "mixtral", "phi3", "qwen", "qwen3-moe")


def shipped_manifest(name: str) -> Manifest:
    """A manifest that comes with bitplan."""
    return Manifest.from_document(parse_json(shipped_text(name), where=name), where=name)


def shipped_text(name: str) -> bytes:
    """The document itself."""
    if name not in SHIPPED:
        raise ManifestError(f"no manifest {name!r}; there are {', '.join(SHIPPED)}{did_you_mean(name, SHIPPED)}")
    return (resources.files("bitplan.plan") / "manifests" / f"{name}.json").read_bytes()


def open_manifest(name_or_path: str | Path) -> Manifest:
    """Open a manifest file, or a shipped manifest by its name; an existing file takes precedence."""
    path = Path(name_or_path)
    if path.is_file():
        return Manifest.load(path)
    if path.suffix or len(path.parts) > 1:
        raise ManifestError(f"{path}: no such file; manifests that come with bitplan: {', '.join(SHIPPED)}")
    return shipped_manifest(str(name_or_path))
