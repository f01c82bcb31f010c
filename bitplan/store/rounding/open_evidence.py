"""Opens any file of statistics."""

from __future__ import annotations

from pathlib import Path

from bitplan.store.rounding.evidence import EvidenceFile


def open_evidence(path: str | Path) -> EvidenceFile:
    """Open evidence.safetensors, or llama.cpp's imatrix.gguf; the first bytes say which it is."""
    source, head = Path(path), b""
    if source.is_file():
        with source.open("rb") as file:
            head = file.read(4)
    if head == b"GGUF":
        from bitplan.store.rounding.imatrix import ImatrixFile

        return ImatrixFile(source)
    return EvidenceFile(source)
