"""What a file says of its tensors, for deciding about them: read from headers, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bitplan.errors import StoreError
from bitplan.plan.choose import Stored, name_matches

if TYPE_CHECKING:
    from bitplan.store.files.open_files import TensorFile, TensorSpec


def stored_tensors(file: TensorFile) -> dict[str, Stored]:
    """What `choose_formats` takes, for every tensor of a file under every name it has."""
    return {name: _stored(file.spec(name)) for name in (*file.specs, *file.tied)}


def _stored(spec: TensorSpec) -> Stored:
    return Stored(spec.shape, spec.format if spec.encoded else spec.dtype_name, spec.encoded)


def check_patterns(file: TensorFile, patterns: Sequence[str]) -> None:
    """A pattern that matches nothing is a spelling mistake."""
    for pattern in patterns:
        if not any(name_matches(name, pattern) for name in file.specs):
            raise StoreError(
                f"{file.path}: the pattern {pattern!r} matches no tensor; `bitplan inspect` lists the names"
            )
