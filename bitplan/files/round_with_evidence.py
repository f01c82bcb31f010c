"""Weights of a file rounded by a file of statistics: which statistics are whose, and that they are of these weights.

evidence.safetensors has the names of the model it was measured on; llama.cpp's imatrix.gguf has GGUF's, and a row for
each expert of a layer. Whoever writes a file under other names asks under both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from bitplan.base.errors import StoreError
from bitplan.files.input_statistics import EvidenceFile, expert_name, weight_digest
from bitplan.plan.structure.families import without_expert

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.files.tensor_file import TensorFile
    from bitplan.formats import Encoded
    from bitplan.formats.format import Format
    from bitplan.rounding.weights import Rounding


def evidence_file(path: str | Path) -> Path:
    """The file of evidence: itself, or evidence.safetensors in a folder that a search wrote."""
    return Path(path, "evidence.safetensors") if Path(path).is_dir() else Path(path)


def open_evidence(path: str | Path) -> EvidenceFile:
    """Open evidence.safetensors, or llama.cpp's imatrix.gguf; the first bytes say which it is."""
    source, head = evidence_file(path), b""
    if source.is_file():
        with source.open("rb") as file:
            head = file.read(8)
    if head[:4] == b"GGUF":
        from bitplan.files.imatrix import ImatrixFile

        return ImatrixFile(source)
    if head[:1] == b"{" and 0 not in head:  # the length of a safetensors header has zeros
        beside = source.with_suffix(".safetensors")
        raise StoreError(
            f"{source}: is JSON, and statistics are expected in safetensors or GGUF: a search writes them beside its "
            f"evidence.json; give {beside if beside.is_file() else 'its evidence.safetensors'}"
        )
    return EvidenceFile(source)


class OtherName(NamedTuple):
    """Where statistics have a tensor: its name, which expert, and by how many heads GGUF reorders its rows."""

    name: str
    expert: int | None = None
    heads: int | None = None


@dataclass(frozen=True)
class WeightEvidence:
    """Statistics for the tensors of a file: `names` has, for each that has some, where they are found. Tensors in
    `stacks` have all experts of a layer, and statistics of each. `together` has how many numbers all experts of a
    projection have, by `without_expert` of their names.
    """

    file: EvidenceFile
    names: Mapping[str, OtherName]
    stacks: frozenset[str] = frozenset()
    together: Mapping[str, int] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self.names

    def require_use(self, packed: Iterable[str]) -> None:
        """Refuse statistics of weights none of which is packed: they would change nothing."""
        if not any(self.has(name) for name in packed):
            raise StoreError(
                f"{self.file.path}: no weight that it has statistics of is packed here, so it would change nothing; "
                "leave the evidence out, or choose a packed format"
            )

    def round(
        self,
        name: str,
        numbers: Tensor,
        fmt: Format,
        *,
        pad: Literal["zero"] | None = None,
        base: float | None = None,
        where: str,
    ) -> tuple[Encoded, Rounding]:
        """A weight in a format, its numbers chosen for the inputs that it met."""
        from bitplan.formats.dispatch import parts_of

        measured = self.names[name]
        if name not in self.stacks:
            with parts_of(self.together.get(without_expert(name), 0)):
                return self._round(measured, numbers, fmt, pad, base, where)
        base = _base_of_all(numbers, fmt, pad, where) if base is None else base
        with parts_of(numbers.numel()):
            rounded = [
                self._round(
                    OtherName(expert_name(measured.name, index)), item, fmt, pad, base, f"{where}, expert {index}"
                )
                for index, item in enumerate(numbers)
            ]
        return _stacked([encoded for encoded, _ in rounded]), _together([rounding for _, rounding in rounded])

    def _round(
        self,
        measured: OtherName,
        numbers: Tensor,
        fmt: Format,
        pad: Literal["zero"] | None,
        base: float | None,
        where: str,
    ) -> tuple[Encoded, Rounding]:
        from bitplan.rounding.weights import round_with_report

        named, expert, heads = measured
        if self.file.digest(named) not in (None, weight_digest(_in_heads(numbers, heads))):
            # Another model may have the same names and shapes: its statistics would make the numbers worse silently.
            raise StoreError(
                f"{self.file.path}: evidence of another model: {where} has other numbers than the weight that was "
                "measured; search this model, or give the one that was searched"
            )
        moments, hessian = self.file.moments(named, expert), self.file.hessian(named)
        outputs = self.file.outputs(named)
        return round_with_report(
            numbers, fmt, moments=moments, hessian=hessian, outputs=outputs, pad=pad, base=base, name=where
        )

    @property
    def notes(self) -> list[str]:
        """A note for the report if the statistics do not say which weights they were measured on."""
        owners = [expert_name(new.name, 0) if name in self.stacks else new.name for name, new in self.names.items()]
        if all(self.file.digest(owner) is not None for owner in owners):
            return []
        return [
            f"{self.file.path} does not say of which weights it is: that it is evidence of this model cannot be "
            "checked; `bitplan search` writes evidence that can"
        ]


def evidence_for(
    statistics: EvidenceFile,
    file: TensorFile,
    other_names: Mapping[str, OtherName] | None = None,
    *,
    transposed: Collection[str] = (),
) -> WeightEvidence:
    """Statistics for a file's tensors, also under `other_names`; refuses those of other names or columns.

    transposed   tensors that are rounded as the transpose of the model's
    """
    with_statistics = statistics.names
    names: dict[str, OtherName] = {}
    stacks: set[str] = set()
    for name in file.specs:
        if expert_name(name, 0) in with_statistics:
            names[name] = OtherName(name)
            stacks.add(name)
            continue
        called = [
            OtherName(alias) for alias in [name, *(alias for alias, target in file.tied.items() if target == name)]
        ]
        if other := (other_names or {}).get(name):
            item = [] if other.expert is None else [OtherName(expert_name(other.name, other.expert))]
            called += [*item, other]
        measured = next((other for other in called if other.name in with_statistics), None)
        if measured is not None:
            names[name] = measured
    if not names:
        theirs = min(with_statistics, default="nothing")
        ours = min((name for name in file.specs if name.endswith("weight")), default="")
        raise StoreError(
            f"{statistics.path}: statistics of other tensors than {file.path} has: {theirs!r} there, {ours!r} "
            "here; statistics of GGUF's names are for GGUF files"
        )
    for name, (named, _, _) in names.items():
        shape, columns = (
            file.specs[name].shape_in_model,
            statistics.columns(expert_name(named, 0) if name in stacks else named),
        )
        if name in stacks and expert_name(named, shape[0] - 1) not in with_statistics:
            raise StoreError(
                f"{statistics.path}: evidence of another model: it has statistics of fewer experts of {named!r} than "
                f"the {shape[0]} that {file.path} has; give the evidence of this model"
            )
        of_matrix = shape[:1] if name in transposed else (math.prod(shape[-1:]), math.prod(shape[1:]))
        wide = shape[1:] if name in stacks else of_matrix
        if columns not in wide:  # of a matrix, or a convolution seen as one; of experts, which may lie transposed
            raise StoreError(
                f"{statistics.path}: evidence of another model: {named!r} has statistics of {columns} columns, "
                f"and is {list(shape)} in {file.path}; give the evidence of this model"
            )
    together = Counter[str]()
    for name in names:
        together[without_expert(name)] += math.prod(file.specs[name].shape)
    return WeightEvidence(statistics, names, frozenset(stacks), together)


def _base_of_all(numbers: Tensor, fmt: Format, pad: Literal["zero"] | None, where: str) -> float | None:
    """The factor that all experts of a layer share, in a format that has one for the whole tensor."""
    from bitplan.formats.dispatch import encode

    if fmt.block.rows != 1 or fmt.zero_point:
        raise StoreError(
            f"{where}: {fmt.name} has scales over several rows, and evidence has statistics of each expert; "
            "choose a format whose blocks lie within a row, such as mxfp4 or int8_row"
        )
    if fmt.scales is None or not fmt.scales.needs_base:
        return None
    base = encode(numbers, fmt, pad=pad, name=where).base
    assert base is not None
    return float(base)


def _stacked(items: Sequence[Encoded]) -> Encoded:
    """Join the encodings of a layer's experts into that of one tensor [experts, ...]."""
    import torch

    from bitplan.formats import Encoded

    first = items[0]
    parts = {
        part: torch.stack([item.parts[part] for item in items]) if tensor.dim() else tensor
        for part, tensor in first.parts.items()
    }
    return Encoded(first.fmt, (len(items), *first.shape), **parts)


def _together(roundings: Sequence[Rounding]) -> Rounding:
    """Combine the roundings of all experts of a tensor into one: errors are averaged, strips are added up."""
    count = len(roundings)
    return replace(
        roundings[0],
        before=sum(rounding.before for rounding in roundings) / count,
        after=sum(rounding.after for rounding in roundings) / count,
        strips=sum(rounding.strips for rounding in roundings),
        plain=sum(rounding.plain for rounding in roundings),
    )


def _in_heads(numbers: Tensor, heads: int | None) -> Tensor:
    """Rows of q or k as GGUF has them: of each head the two halves in turns; None leaves them."""
    if heads is None:
        return numbers
    rows = len(numbers)
    return numbers.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(numbers.shape)
