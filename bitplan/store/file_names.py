"""What a file says of its tensors, for deciding about them: read from headers, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bitplan.errors import FormatError, StoreError
from bitplan.formats import get_format
from bitplan.plan.choose import Stored, name_matches

if TYPE_CHECKING:
    from bitplan.plan import Plan
    from bitplan.store.tensor_files import TensorFile, TensorSpec


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


def check_rows(file: TensorFile, plan: Plan, *, how_to_fill: str) -> None:
    """Rows that are not whole blocks of their format are refused, where the plan does not fill them.

    how_to_fill   what to do so that they are filled, for the message
    """
    if plan.pad is not None:
        return
    faults = []
    for name, entry in plan.entries.items():
        spec, fmt = file.spec(name), get_format(entry.choice.format)
        if entry.stored is not None or entry.part is not None or (spec.encoded and spec.format == fmt.name):
            continue
        cols = fmt.matrix_shape(spec.shape)[1]
        if fmt.padded_cols(cols) != cols:
            faults.append((name, fmt, cols, spec.shape))
    if faults:
        name, fmt, cols, shape = faults[0]
        more = f" (and {len(faults) - 1} more tensors like it)" if len(faults) > 1 else ""
        raise FormatError(
            f"{file.path}: {name}: {fmt.name} has blocks of {fmt.block.cols}, and {cols} of shape {shape} is not a "
            f"multiple{more}; {how_to_fill} fills the last block, --keep {name!r} leaves the tensor as it is"
        )
