"""Plan: which part gets which format, and why. The value that every pass hands to the next.

A plan maps names to `Choice`s, with what is known of each tensor. It is kept in natural order of names (`block.2`
before `block.10`), so the order in which evidence arrives cannot change its bytes.

A tensor of a packed checkpoint may be a part of a format, as gpt-oss keeps them: the codes of a weight under one
name (`part` "data") and its scales under another (`part` "scales"). Such an entry's shape is that of the part.

For a tensor that stays as it is, `stored` is its torch dtype in the file. Its format is the one of the same name, or if
there is none (bool) the one whose codes have this type; the tensor is copied, not encoded.

A weight's choice may have an `input`: the format that inputs of products with it are rounded to
(`bitplan.formats.input_formats`); without it they stay as they are.

A plan's `padding` is "zero" where rows that are not whole blocks of their format are filled with zeros, else "none".

The document, version 1 (`padding` only where it is "zero"; `cause` unless it is "given", `kind` unless it is "weight";
`input`, `place` ("host": of a GPU's two memories), `evidence`, `shape`, `role`, `part`, `stored` only where known;
`bytes` goes with `shape`):

    {"document": "bitplan-plan", "version": 1, "padding": "zero",
     "tensors": {NAME: {"format": F, "input": I, "place": P, "cause": C, "reason": R, "evidence": {...}, "kind": K,
                        "shape": [...], "role": R, "part": P, "stored": DTYPE, "bytes": N}}}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from bitplan.base.documents import EVIDENCE, NAME, OBJECT, SHAPE, SIZE, TEXT, Reader, load_document, one_of, show
from bitplan.base.errors import BitplanError, FormatError, PlanError, PlanFileError, did_you_mean
from bitplan.base.records import write_json
from bitplan.formats import get_format
from bitplan.formats.elements import ITEM_BYTES
from bitplan.formats.format import Format
from bitplan.formats.input_formats import input_format
from bitplan.plan.names import listed, natural_order, number_ranges, split_layer

PLAN_NAME, PACKED_PLAN = "plan.json", "bitplan_plan.json"  # in the folder of a search, and in a packed one
DOCUMENT = "bitplan-plan"
VERSION = 1
BF16_BYTES = 2
PARTS = ("data", "scales")
PADDINGS = ("none", "zero")
Part = Literal["data", "scales"]
# What has a format: weights at rest (and with them inputs of their products), K and V, products of layers, what
# crosses the bus, states of optimizers, gradients. Some have formats that no tensor is stored in: FP8's recipes, codes
# of gradients, small states.
PartKind = Literal["weight", "kv", "product", "wire", "state", "gradient"]
PART_KINDS: tuple[PartKind, ...] = get_args(PartKind)
_OWN_FORMATS = {
    "product": re.compile(r"fp8:[a-z][a-z0-9_]{0,39}"),
    "gradient": re.compile(r"i8|i16"),
    "state": re.compile(r"int8_roots_b64|int16_remainder"),  # bitplan/streaming/training/adamw.py
}
# What decided, for code to read; people read the reason:
#   forced   a force list                      default  what bitplan does with a tensor of this role and shape
#   rule     a manifest, a mapping, a pattern  kept     somebody asked that it stay as it is
#   solver   a search                          held     it is so already, and nothing else was asked for
#   policy   measured speed, gradients         given    nothing is said, as in plans of earlier versions
Place = Literal["host"]
Cause = Literal["forced", "rule", "solver", "policy", "default", "kept", "held", "given"]
CAUSES: tuple[Cause, ...] = get_args(Cause)

_TENSOR_KEYS = {
    "format": NAME,
    "input": NAME,
    "place": one_of("host"),
    "cause": one_of(*CAUSES),
    "reason": NAME,
    "evidence": EVIDENCE,
    "shape": SHAPE,
    "kind": one_of(*PART_KINDS),
    "role": TEXT,
    "part": one_of(*PARTS),
    "stored": one_of(*ITEM_BYTES),
    "bytes": SIZE,
}


@dataclass(frozen=True)
class Choice:
    """A format, what decided it (`cause`, which code reads), the reason in words, and the figures behind the reason.

    `input` is the format that inputs of products with this weight are rounded to; None: they stay as they are.
    `place` is "host" where the weight lies in the host's memory while a GPU computes; None: on the device.
    """

    format: str
    reason: str
    evidence: Mapping[str, Any] | None = None
    cause: Cause = "given"
    input: str | None = None
    place: Place | None = None

    def __post_init__(self) -> None:
        if self.place is not None and (self.place != "host" or get_format(self.format).is_cast):
            raise PlanError(
                f"place {show(self.place)} beside {self.format}: a packed weight may lie on the host, others "
                "nowhere else than on the device"
            )
        if not self._is_of_another_kind:
            get_format(self.format)
        if self.cause not in CAUSES:
            raise PlanError(f"the cause of {self.format!r} must be one of {', '.join(CAUSES)}, got {show(self.cause)}")
        if not NAME.holds(self.reason):
            raise PlanError(f"the reason for {self.format!r} must be {NAME.text}, got {self.reason!r}")
        if self.evidence is not None:
            if not EVIDENCE.holds(self.evidence):
                raise PlanError(f"the evidence for {self.format!r} must be {EVIDENCE.text}, got {self.evidence!r}")
            object.__setattr__(self, "evidence", MappingProxyType(_plain(self.evidence)))
        if self.input is not None:
            object.__setattr__(self, "input", input_format(self.input, "input"))
            if self.input is not None and (self._is_of_another_kind or get_format(self.format).is_cast):
                raise PlanError(
                    f"input {self.input!r} beside {self.format}: only packed weights round the inputs of their "
                    "products; give the weight a packed format, such as int8_row, or leave out its input"
                )

    @property
    def _is_of_another_kind(self) -> bool:
        return any(pattern.fullmatch(self.format) for pattern in _OWN_FORMATS.values())

    @property
    def shown(self) -> str:
        """The format, and that of inputs where they are rounded."""
        return self.format if self.input is None else f"{self.format}, inputs {self.input}"


@dataclass(frozen=True)
class Planned:
    """One entry: the choice, and what is known of the part; shape is None if the name is not that of a tensor."""

    choice: Choice
    shape: tuple[int, ...] | None = None
    role: str = ""
    part: Part | None = None
    stored: str | None = None
    kind: PartKind = "weight"

    def __post_init__(self) -> None:
        if self.kind not in PART_KINDS:
            raise PlanError(f"the kind of a part must be one of {', '.join(PART_KINDS)}, got {show(self.kind)}")
        kind_of_format = next((kind for kind, name in _OWN_FORMATS.items() if name.fullmatch(self.choice.format)), None)
        if kind_of_format is not None and (self.kind != kind_of_format or self.shape is not None):
            raise PlanError(
                f"{self.choice.format} is a format of a {kind_of_format} and of no stored tensor, got a {self.kind}"
            )
        if self.shape is not None and not SHAPE.holds(self.shape):
            raise PlanError(f"a shape must be {SHAPE.text}, got {self.shape!r}")
        if self.part is not None and self.part not in get_format(self.choice.format).part_layouts((2, 2)):
            raise FormatError(f"{self.choice.format} has no part {self.part!r}")
        if self.stored is not None and self.stored not in ITEM_BYTES:
            raise PlanError(f"stored must be one of {', '.join(ITEM_BYTES)}, got {show(self.stored)}")
        if self.stored is not None and self.part is not None:
            raise PlanError("a tensor is either stored as it is or a part of a packed one, got both")

    @cached_property
    def numbers(self) -> int:
        """The number of weights in the tensor; 0 for scales."""
        if self.shape is None or self.part == "scales":
            return 0
        packing = get_format(self.choice.format).packing if self.part == "data" else None
        return math.prod(self.shape) * (packing.per_byte if packing else 1)

    @cached_property
    def nbytes(self) -> int:
        """Bytes in the chosen format, scales included unless they are an entry of their own."""
        if self.shape is None:
            return 0
        if self.stored is not None:
            return math.prod(self.shape) * ITEM_BYTES[self.stored]
        fmt = get_format(self.choice.format)
        if self.part is None:
            return fmt.nbytes(self.shape)
        return math.prod(self.shape) * ITEM_BYTES[part_dtype(fmt, self.part)]


class SizeRow(NamedTuple):
    """Bytes of the tensors of one role and format; `ratio` is how many times smaller than bf16 they are."""

    role: str
    format: str
    tensors: int
    numbers: int
    nbytes: int
    ratio: float | None


class TableRow(NamedTuple):
    """A line of the plan: a name, or a run of layers that agree, such as `block.[0..23].attn.qkv.weight`."""

    name: str
    tensors: int
    role: str
    format: str
    shape: tuple[int, ...] | None
    nbytes: int
    reason: str
    kind: PartKind
    input: str | None = None


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans; `changed` and `restated` hold the choices before and after."""

    added: Mapping[str, Choice]
    removed: Mapping[str, Choice]
    changed: Mapping[str, tuple[Choice, Choice]]
    restated: Mapping[str, tuple[Choice, Choice]]  # the same format for another reason or on other evidence

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.restated)

    def lines(self) -> list[str]:
        """Write one line per difference."""
        lines = [f"+ {name}: {choice.shown} ({choice.reason})" for name, choice in self.added.items()]
        lines += [f"- {name}: {choice.shown} ({choice.reason})" for name, choice in self.removed.items()]
        for mark, pairs in (("~", self.changed), ("=", self.restated)):
            lines += [
                f"{mark} {name}: {old.shown} ({old.reason}) -> {new.shown} ({new.reason})"
                for name, (old, new) in pairs.items()
            ]
        return lines


def plan_file(path: str | Path) -> Path:
    """Find a plan's file: the path itself, or in a folder that a search wrote, or in a packed folder."""
    path = Path(path)
    if not path.is_dir():
        return path
    for name in (PLAN_NAME, PACKED_PLAN):
        if (path / name).is_file():
            return path / name
    raise PlanFileError(
        f"{path}: a folder without {PLAN_NAME} or {PACKED_PLAN}; give a plan's file, or what `bitplan search` or "
        "`bitplan quantize` wrote"
    )


class Plan(Mapping[str, Choice]):
    """An immutable mapping from name to Choice, in natural order of names; `entries` holds what else is known."""

    def __init__(self, entries: Mapping[str, Planned], *, padding: str = "none") -> None:
        if padding not in PADDINGS:
            raise PlanError(f"padding must be one of {', '.join(PADDINGS)}, got {padding!r}")
        self.padding = padding
        for name in entries:
            if not NAME.holds(name):
                raise PlanError(f"a name in a plan must be {NAME.text}, got {name!r}")
        self.entries: Mapping[str, Planned] = MappingProxyType({name: entries[name] for name in natural_order(entries)})

    def __getitem__(self, name: str) -> Choice:
        return self.entries[name].choice

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return False
        return (dict(self.entries), self.padding) == (dict(other.entries), other.padding)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Plan({len(self)} tensors, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def numbers(self) -> int:
        return sum(entry.numbers for entry in self.entries.values())

    # ---- documents ------------------------------------------------------------------------------------------------

    def to_document(self) -> dict[str, Any]:
        tensors = {name: _to_document(entry) for name, entry in self.entries.items()}
        padding = {"padding": self.padding} if self.padding != "none" else {}
        return {"document": DOCUMENT, "version": VERSION, **padding, "tensors": tensors}

    def to_json(self) -> str:
        """The plan as JSON text; equal plans give equal text."""
        return json.dumps(self.to_document(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the document, whole or not at all."""
        write_json(path, self.to_document())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a file, or in a folder that a search wrote."""
        path = plan_file(path)
        return cls.from_document(load_document(path, PlanFileError), where=str(path))

    @classmethod
    def from_document(cls, document: Any, *, where: str = "plan") -> Plan:
        reader = Reader(where, PlanFileError)
        reader.require_document(document, DOCUMENT, "plan")
        reader.version(document, VERSION)
        required = {"document": one_of(DOCUMENT), "version": SIZE, "tensors": OBJECT}
        values = reader.keys("", document, required | {"padding": one_of(*PADDINGS)}, tuple(required))
        entries = {name: _from_document(reader, name, item) for name, item in values["tensors"].items()}
        return cls(entries, padding=values.get("padding", "none"))

    @property
    def pad(self) -> Literal["zero"] | None:
        """The padding as `bitplan.encode` takes it."""
        return "zero" if self.padding == "zero" else None

    def require_whole(self, where: str, *, rounds_inputs: bool = False) -> None:
        """Refuse a plan that has parts of packed tensors, where whole tensors are to be encoded.

        rounds_inputs   what is made by the plan rounds inputs; else a plan with formats of inputs is refused, too
        """
        for name, entry in self.entries.items():
            if entry.choice.input is not None and not rounds_inputs:
                raise PlanError(
                    f"{where}: {name}: the plan rounds inputs to {entry.choice.input}, which only packed models and "
                    "their folders do (apply_plan, quantize to a folder); here take "
                    "plan.with_inputs(dict.fromkeys(plan.inputs)), which keeps them",
                )
            if entry.part is not None:
                raise PlanError(
                    f"{where}: {name}: the plan has it as the {entry.part} of a packed tensor; what is packed "
                    "already is brought into another layout by `bitplan gpt-oss convert`"
                )

    @property
    def inputs(self) -> dict[str, str]:
        """The formats of inputs, by the weights whose products round them."""
        return {name: choice.input for name, choice in self.items() if choice.input is not None}

    def with_inputs(self, inputs: Mapping[str, str | None]) -> Plan:
        """Copy the plan with products of these weights that round their inputs to these formats (None: to none)."""
        entries = {
            name: replace(entry, choice=replace(entry.choice, input=inputs[name])) if name in inputs else entry
            for name, entry in self.entries.items()
        }
        return Plan(entries, padding=self.padding)

    def of_kind(self, kind: PartKind) -> Plan:
        """A plan of the entries of one kind of part alone ("weight", "product", "kv", ...)."""
        return Plan({name: entry for name, entry in self.entries.items() if entry.kind == kind}, padding=self.padding)

    # ---- views ----------------------------------------------------------------------------------------------------

    def diff(self, other: Plan) -> PlanDiff:
        """What `other` changes: added names are only in `other`, removed names only in this plan."""
        both = [name for name in self if name in other]
        changed = [name for name in both if _layout(self.entries[name]) != _layout(other.entries[name])]
        restated = [name for name in both if name not in set(changed) and self[name] != other[name]]
        return PlanDiff(
            {name: other[name] for name in other if name not in self},
            {name: self[name] for name in self if name not in other},
            {name: (self[name], other[name]) for name in changed},
            {name: (self[name], other[name]) for name in restated},
        )

    def table(self, *, collapse: bool = False) -> list[TableRow]:
        """A row per tensor; with `collapse`, one row for all layers that differ only in their number."""
        groups: dict[Any, list[str]] = {}
        for name, entry in self.entries.items():
            key = split_layer(name)[0::2] if collapse else name
            same = (key, entry.choice.reason, *_layout(entry))
            groups.setdefault(same, []).append(name)
        return [self._row(names) for names in groups.values()]

    def _row(self, names: list[str]) -> TableRow:
        entry = self.entries[names[0]]
        shown = f"{entry.choice.format}.{entry.part}" if entry.part else entry.stored or entry.choice.format
        nbytes = sum(self.entries[name].nbytes for name in names)
        reason, rounded = entry.choice.reason, entry.choice.input
        return TableRow(_run(names), len(names), entry.role, shown, entry.shape, nbytes, reason, entry.kind, rounded)

    def bytes_by_role_and_format(self) -> list[SizeRow]:
        """A row per role and format, then one per format (role `all`), then the total.

        The ratio is against two bytes a weight. A format's row counts its scales, so mxfp4 has 3.76, and a 4-bit format
        with a scale byte for 128 numbers 3.94; a row of scales alone has no ratio.
        """
        entries = list(self.entries.values())
        pairs = sorted({(entry.role, entry.choice.format) for entry in entries})
        rows = [
            _size(role, name, [e for e in entries if (e.role, e.choice.format) == (role, name)]) for role, name in pairs
        ]
        formats = sorted({name for _, name in pairs})
        rows += [_size("all", name, [e for e in entries if e.choice.format == name]) for name in formats]
        return [*rows, _size("all", "all", entries)]

    def to_mermaid(self) -> str:
        """The plan as a mermaid flow chart: tensors before the layers, the layers, tensors after them."""
        from bitplan.plan.mermaid import draw  # a chart needs the roles of tensors, and a plan does not

        return draw({name: (entry.choice.format, entry.part or "") for name, entry in self.entries.items()})


def combine(
    tensors: Mapping[str, tuple[int, ...] | None],
    *,
    force: Mapping[str, str] | None = None,
    rules: Mapping[str, Choice] | None = None,
    policy: Mapping[str, Choice] | None = None,
    default: Choice | None = None,
) -> Plan:
    """Make one plan from several sources. Precedence, highest first: force list, manifest rules, policy, default.

    `force` maps names to formats; a forced name's reason says what it overrides. `rules` may be a Plan, whose roles and
    parts are kept. A forced name that is not in `tensors` is an error, because it is a spelling mistake; the other
    sources may name tensors that are not there.
    """
    force, rules, policy = force or {}, rules or {}, policy or {}
    for name in force:
        if name not in tensors:
            raise PlanError(f"the force list names {name!r}, which is not a tensor{did_you_mean(name, tensors)}")
    ruled = rules.entries if isinstance(rules, Plan) else {}
    planned, missing = {}, []
    for name, shape in tensors.items():
        choice = rules.get(name) or policy.get(name) or default
        if name in force:
            over = f", over {choice.shown} ({choice.reason})" if choice else ""
            choice = Choice(force[name], f"forced{over}", cause="forced")
        if choice is None:
            missing.append(name)
            continue
        entry = ruled.get(name, Planned(choice))
        same = choice.format == entry.choice.format
        part, stored = (entry.part, entry.stored) if same else (None, None)
        planned[name] = Planned(choice, shape if shape is None else tuple(shape), entry.role, part, stored)
    if missing:
        raise PlanError(f"nothing decides {listed(missing)}; add a rule, or give a default")
    return Plan(planned, padding=rules.padding if isinstance(rules, Plan) else "none")


def _run(names: list[str]) -> str:
    before, _, after = split_layer(names[0])
    return names[0] if len(names) == 1 else f"{before}[{number_ranges(split_layer(name)[1] for name in names)}]{after}"


# ---- parts of a format -----------------------------------------------------------------------------------------------


def part_dtype(fmt: Format, part: str) -> str:
    """The dtype in which a format keeps one of its parts."""
    return fmt.part_layouts((2, 2))[part][0]


def _size(role: str, name: str, entries: list[Planned]) -> SizeRow:
    numbers, nbytes = sum(entry.numbers for entry in entries), sum(entry.nbytes for entry in entries)
    return SizeRow(role, name, len(entries), numbers, nbytes, BF16_BYTES * numbers / nbytes if numbers else None)


def _layout(entry: Planned) -> tuple[Any, ...]:
    choice = entry.choice
    return choice.format, choice.input, choice.place, entry.shape, entry.role, entry.part, entry.stored, entry.kind


def _plain(value: Any) -> Any:
    """Evidence as JSON values, with sorted keys: equal evidence gives equal bytes."""
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in sorted(value)}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _to_document(entry: Planned) -> dict[str, Any]:
    cause = {"cause": entry.choice.cause} if entry.choice.cause != "given" else {}
    beside = {key: value for key in ("input", "place") if (value := getattr(entry.choice, key)) is not None}
    item: dict[str, Any] = {"format": entry.choice.format, **beside, **cause, "reason": entry.choice.reason}
    if entry.choice.evidence is not None:
        item["evidence"] = dict(entry.choice.evidence)
    if entry.kind != "weight":
        item["kind"] = entry.kind
    item |= {key: value for key in ("role", "part", "stored") if (value := getattr(entry, key))}
    if entry.shape is not None:
        item |= {"shape": list(entry.shape), "bytes": entry.nbytes}
    return item


def _from_document(reader: Reader, name: str, value: Any) -> Planned:
    path = f"tensors[{name[:120]!r}]"
    item = reader.keys(path, value, _TENSOR_KEYS, ("format", "reason"))
    if ("shape" in item) != ("bytes" in item):
        reader.stop(f"{path}: shape and bytes go together, got only {'shape' if 'shape' in item else 'bytes'}")
    try:
        extra = {key: item[key] for key in ("evidence", "cause", "input", "place") if key in item}
        choice = Choice(item["format"], item["reason"], **extra)
        shape = tuple(item["shape"]) if "shape" in item else None
        kind = item.get("kind", "weight")
        entry = Planned(choice, shape, item.get("role", ""), item.get("part"), item.get("stored"), kind)
    except BitplanError as error:
        reader.stop(f"{path}: {error}")
    if "bytes" in item and item["bytes"] != entry.nbytes:
        reader.fail(f"{path}: bytes", f"{entry.nbytes} for {choice.format} of shape {item['shape']}", item["bytes"])
    return entry
