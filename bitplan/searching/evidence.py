"""SearchEvidence: what each format costs each group of tensors, in nats, bytes and microseconds; and its file.

Damage is predicted from the really quantized weight (damage.py). In one format, `checked`, the distance was also
measured, with the same projection of all layers quantized; the ratio is the group's `factor`, by which its predictions
are multiplied. A candidate may also round the inputs of its products: its name is FORMAT+INPUT, and `inputs` the nats
of that (plan_meter.py). Whole plans that were measured correct this: by the `factor` of a format, and by `together`,
what many changes do together over the sum of what each does alone (`Corrections` of solver.py). `weight` is how much a
group's nats count when formats are chosen, by the gradients of a training run.

The document, version 1. It needs no torch and no model to solve again for another goal:

    {"document": "bitplan-evidence", "version": 1,
     "model": NAME, "numbers": N, "fingerprint": {"weights": HASH, "text": HASH, "settings": TEXT, "versions": {...}},
     "text": {"windows": N, "context": N, "checks": N, "experts": N, "unseen_experts": N},
     "together": RATIO, "reference_bytes": N,
     "complete": true or false, where the search was stopped,
     "proven": [{"goal": {"bits": B, ...}, "kl": NATS, "choice": {GROUP: F}}], the plan that was handed over for a goal,
     "stays": {NAME: {"format": F, "shape": [...], "role": R, "stored": DTYPE, "bytes": N, "reason": R}},
     "groups": {GROUP: {"tensors": {NAME: {"shape": [...], "role": R}}, "factor": RATIO, "checked": F,
                        "reference_us": {ROWS: T}, "weight": W, "kinds": {KIND: RATIO},
                        "formats": {F: {"bytes": N, "predicted": NATS, "factor": RATIO, "inputs": NATS,
                                        "us": {ROWS: T}}}}}}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitplan.base.documents import (
    FLAG,
    NAME,
    OBJECT,
    SHAPE,
    SIZE,
    TEXT,
    Kind,
    Reader,
    document_key,
    document_of,
    is_number,
    is_size,
    is_text,
    load_document,
    one_of,
    records,
    records_by_name,
)
from bitplan.base.errors import FormatError
from bitplan.base.records import write_json
from bitplan.formats import get_format
from bitplan.formats.elements import ITEM_BYTES
from bitplan.formats.input_formats import input_format
from bitplan.plan.names import natural_order, split_layer
from bitplan.plan.structure.families import row_of
from bitplan.searching.goal import EvidenceFileError

DOCUMENT = "bitplan-evidence"
VERSION = 1
BF16 = "bfloat16"
_MOST = 1e12  # nats, microseconds and ratios beyond it are no measurement, and no solver takes them
_NATS = Kind(f"a number from 0 to {_MOST:g}", lambda value: is_number(value) and 0 <= value <= _MOST)
_ROWS = re.compile("[1-9][0-9]{0,8}")
_TIMES = Kind(
    "an object of row counts to microseconds",
    lambda value: type(value) is dict and all(_ROWS.fullmatch(key) and _NATS.holds(us) for key, us in value.items()),
    lambda _reader, _path, value: {int(rows): us for rows, us in value.items()},
    lambda times: {str(rows): times[rows] for rows in sorted(times)},
)
_RATIOS = Kind(
    f"an object of kinds of text to numbers from 0 to {_MOST:g}",
    lambda value: type(value) is dict and all(_NATS.holds(ratio) for ratio in value.values()),
    write=dict,
)
_DTYPE = one_of(*ITEM_BYTES)
_COUNT = Kind("an integer from 1 to 2^63 - 1", lambda value: is_size(value) and value > 0)
_CHOICE = Kind(
    "an object of groups to formats", lambda value: type(value) is dict and all(map(is_text, value.values()))
)
_SIZES = Kind(SHAPE.text, SHAPE.holds, lambda _reader, _path, value: tuple(value), list)
_TENSOR = {"shape": SHAPE, "role": TEXT}


def _read_tensors(reader: Reader, path: str, value: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    rows = {name: reader.keys(f"{path}[{name[:80]!r}]", row, _TENSOR, tuple(_TENSOR)) for name, row in value.items()}
    return {name: (tuple(row["shape"]), row["role"]) for name, row in rows.items()}


def _write_tensors(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Any]:
    return {name: {"shape": list(shape), "role": role} for name, (shape, role) in tensors.items()}


_TENSORS = Kind(OBJECT.text, OBJECT.holds, _read_tensors, _write_tensors)
_WITH_INPUT, _IN_HOST = "+", "@host"


def candidate_name(fmt: str, rounded: str | None) -> str:
    """The name of a candidate: a format of weights, with the format to which products round inputs, if any."""
    return fmt if rounded is None else f"{fmt}{_WITH_INPUT}{rounded}"


def in_host(candidate: str) -> str:
    """The name of a candidate whose weights lie in the host's memory, in plans for two memories (`two_memories`)."""
    return candidate + _IN_HOST


def is_in_host(candidate: str) -> bool:
    return candidate.endswith(_IN_HOST)


def weight_format(candidate: str) -> str:
    return candidate.removesuffix(_IN_HOST).partition(_WITH_INPUT)[0]


def bits_of(candidate: str) -> float:
    """Bits a weight, scales included, of a candidate's format in a large matrix."""
    return get_format(weight_format(candidate)).bits_per_weight((4096, 4096))


def input_of(candidate: str) -> str | None:
    return candidate.removesuffix(_IN_HOST).partition(_WITH_INPUT)[2] or None


@dataclass(frozen=True)
class StayingTensor:
    """A tensor that stays as it is in every plan: its bytes, type and the reason."""

    format: str = document_key(NAME)
    shape: tuple[int, ...] = document_key(_SIZES)
    role: str = document_key(TEXT)
    stored: str | None = document_key(_DTYPE, unwritten=None)  # its type in the file; None where it is packed already
    nbytes: int = document_key(SIZE, key="bytes")
    reason: str = document_key(NAME)


@dataclass(frozen=True)
class FormatCost:
    """What a candidate costs a group: bytes, nats a token, and where it was timed microseconds by rows.

    Between two memories `nbytes` are those on the GPU, and `host` those in the host's memory. `workspace` are bytes
    that a product takes while it runs, beyond what all take: one runs at a time, so the largest of a choice counts.
    """

    nbytes: int = document_key(SIZE, key="bytes")
    predicted: float = document_key(_NATS)
    factor: float = document_key(_NATS, 1.0, unwritten=1.0)  # by which measured plans correct the prediction
    inputs: float = document_key(_NATS, 0.0, unwritten=0.0)  # nats of rounded inputs, beside those of the weights
    us: Mapping[int, float] = document_key(_TIMES, factory=dict, unwritten={})
    host: int = 0
    workspace: int = 0


@dataclass
class TensorGroup:
    """Tensors that get one format, and what each candidate costs them."""

    tensors: dict[str, tuple[tuple[int, ...], str]] = document_key(_TENSORS)  # shape, role
    formats: dict[str, FormatCost] = document_key(records_by_name(FormatCost), factory=dict)
    factor: float = document_key(_NATS, 1.0)
    checked: str = document_key(TEXT, "")
    reference_us: Mapping[int, float] = document_key(_TIMES, factory=dict, unwritten={})  # unquantized, in BF16
    weight: float = document_key(_NATS, 1.0, unwritten=1.0)  # how much its nats count when formats are chosen
    # Its nats on each kind of text over those on all.
    kinds: Mapping[str, float] = document_key(_RATIOS, factory=dict, unwritten={})

    def nats(self, fmt: str) -> float:
        """The damage of a format in this group alone, in nats a token, with all corrections so far."""
        cost = self.formats[fmt]
        return cost.predicted * self.factor * cost.factor + cost.inputs

    @property
    def numbers(self) -> int:
        total = 0
        for shape, _ in self.tensors.values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total


@dataclass(frozen=True)
class ProvenPlan:
    """The plan that a search handed over for a goal, `Goal.to_dict`, and what was measured of it on held-out text."""

    goal: Mapping[str, Any] = document_key(OBJECT)
    kl: float = document_key(_NATS)
    choice: Mapping[str, str] = document_key(_CHOICE)


_GROUPS = records_by_name(
    TensorGroup, "tensors", "factor", "checked", "reference_us", "weight", "kinds", sort=natural_order
)


@dataclass
class SearchEvidence:
    """All groups of a model, what stays, and what it was measured on."""

    model: str = document_key(TEXT)
    numbers: int = document_key(_COUNT)
    fingerprint: dict[str, Any] = document_key(OBJECT)
    text: dict[str, Any] = document_key(OBJECT)
    stays: dict[str, StayingTensor] = document_key(records_by_name(StayingTensor, sort=natural_order))
    groups: dict[str, TensorGroup] = document_key(_GROUPS)
    reference_bytes: int = document_key(SIZE)
    together: float = document_key(_NATS, 1.0)
    complete: bool = document_key(FLAG, True)
    proven: list[ProvenPlan] = document_key(records(ProvenPlan), factory=list, unwritten=[])
    aims: list[dict[str, float]] = field(default_factory=list)  # of a goal, `aims_of`; not in the file

    @property
    def kinds(self) -> list[str]:
        """The kinds of text that damage was measured on; none where it was one text."""
        return list(dict.fromkeys(kind for group in self.groups.values() for kind in group.kinds))

    def proven_for(self, goal: Mapping[str, Any]) -> ProvenPlan | None:
        """The plan that an earlier search proved for exactly this goal; None if none did."""
        return next((plan for plan in self.proven if plan.goal == goal), None)

    def add_proven(self, plan: ProvenPlan) -> None:
        """Remember a plan, in place of an earlier one for its goal."""
        self.proven = [*(proven for proven in self.proven if proven.goal != plan.goal), plan]

    def nats(self, group: str, fmt: str) -> float:
        """The predicted damage of a format in one group when all groups are quantized, in nats a token."""
        return self.groups[group].nats(fmt) * self.together

    def predict(self, choice: Mapping[str, str]) -> float:
        """The KL expected of a choice for every group."""
        return sum(self.nats(group, fmt) for group, fmt in choice.items())

    def harm(self, choice: Mapping[str, str]) -> float:
        """What the solver minimises: nats of all groups, weighted, for the kinds of text where it is largest."""
        harms = [self.harms(group, fmt) for group, fmt in choice.items()]
        return max(map(sum, zip(*harms, strict=True)), default=0.0)

    def harms(self, group: str, fmt: str) -> list[float]:
        """A format's weighted nats in one group, for each aim (a mixture of kinds of text) of the goal."""
        tensor_group = self.groups[group]
        nats = self.nats(group, fmt) * tensor_group.weight
        shares = [sum(share * tensor_group.kinds.get(kind, 1.0) for kind, share in aim.items()) for aim in self.aims]
        return [nats * share for share in shares or [1.0]]

    def nbytes(self, choice: Mapping[str, str]) -> int:
        """Bytes of the whole model under a choice, what stays included."""
        group_bytes = sum(self.groups[group].formats[fmt].nbytes for group, fmt in choice.items())
        return self.staying_bytes + group_bytes + self.workspace(choice)

    def workspace(self, choice: Mapping[str, str]) -> int:
        """Bytes that the largest product of a choice needs while it runs."""
        return max((self.groups[group].formats[fmt].workspace for group, fmt in choice.items()), default=0)

    def host_bytes(self, choice: Mapping[str, str]) -> int:
        """Bytes of a choice that lie in the host's memory."""
        return sum(self.groups[group].formats[fmt].host for group, fmt in choice.items())

    def microseconds(self, choice: Mapping[str, str], rows: int) -> float | None:
        """Time of all groups at `rows` rows; None where a format was not timed there."""
        times = [self.groups[group].formats[fmt].us.get(rows) for group, fmt in choice.items()]
        return None if None in times else sum(time for time in times if time is not None)

    @property
    def staying_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stays.values())

    @property
    def formats(self) -> list[str]:
        """Every candidate of some group, the smallest first; of one format rounded inputs before others.

        Places are no formats: what lies in the host's memory is not listed again.
        """
        names = {name for group in self.groups.values() for name in group.formats if not is_in_host(name)}
        return sorted(names, key=lambda name: (bits_of(name), input_of(name) is None, name))

    def input_nats(self, choice: Mapping[str, str]) -> float:
        """How much of a choice's predicted KL comes from rounded inputs."""
        return self.together * sum(self.groups[group].formats[name].inputs for group, name in choice.items())

    def bits(self, nbytes: int) -> float:
        return 8 * nbytes / self.numbers

    # ---- the document ------------------------------------------------------------------------------------------------

    def to_document(self) -> dict[str, Any]:
        first = ("model", "numbers", "fingerprint", "text", "together", "reference_bytes", "complete", "proven")
        return {"document": DOCUMENT, "version": VERSION, **document_of(self, *first)}

    def save(self, path: str | Path) -> None:
        write_json(path, self.to_document())

    @classmethod
    def load(cls, path: str | Path, *, partly: bool = False) -> SearchEvidence:
        """Read evidence; that of a search that was stopped only where it is to go on."""
        evidence = cls.from_document(load_document(path, EvidenceFileError), where=str(path))
        if not evidence.complete and not partly:
            raise EvidenceFileError(f"{path}: the search that wrote it was stopped; start `bitplan search` again")
        return evidence

    @classmethod
    def from_document(cls, document: Any, *, where: str = "evidence") -> SearchEvidence:
        reader = Reader(where, EvidenceFileError)
        reader.require_document(document, DOCUMENT, "evidence.json of a search")
        reader.version(document, VERSION)
        evidence = reader.record(cls, "", document, {"document": one_of(DOCUMENT), "version": SIZE})
        groups = evidence.groups
        if not groups and evidence.complete:
            reader.stop("it has no group of tensors; search the model again")
        for name, tensor in evidence.stays.items():
            _check_format(reader, f"stays[{name[:80]!r}]", tensor.format)
        for name, group in groups.items():
            at = f"groups[{name[:80]!r}]"
            for fmt in group.formats:
                _check_format(reader, at, fmt)
            if not group.tensors or not group.formats:
                reader.stop(
                    f"{at}: a group has tensors and formats; the search that wrote it did not finish: start it again"
                )
        for number, plan in enumerate(evidence.proven):
            choice = plan.choice
            if choice.keys() != groups.keys() or any(choice[name] not in groups[name].formats for name in groups):
                reader.stop(
                    f"proven[{number}]: a choice has one of its formats for every group; search the model again"
                )
        return evidence


def _check_format(reader: Reader, where: str, name: str) -> None:
    try:
        get_format(weight_format(name))
        input_format(input_of(name))
    except FormatError as error:
        reader.stop(f"{where}: {error}")


def by_part(groups: Iterable[str]) -> dict[str, list[str]]:
    """Names of groups by projection ("q_proj", ...), those of all layers together."""
    parts: dict[str, list[str]] = {}
    for name in groups:
        parts.setdefault(place_of(name)[1], []).append(name)
    return parts


def place_of(group: str) -> tuple[str, str]:
    """The layer's number and the projection, for a table of layer by projection; no number: '' and the name.

    A projection has two words where one does not tell it from another: GPT-2's attn.c_proj and mlp.c_proj.
    """
    layer, row, two = split_layer(f"{group}.")[1], row_of(group), ".".join(group.split(".")[-2:])
    return layer, two if row is not None and two in row.names else group.rpartition(".")[2]
