"""What two plans do differently, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bitplan.plan.names import natural_order
from bitplan.plan.plan import Plan, Planned
from bitplan.searching.errors import SearchError
from bitplan.searching.evidence import SearchEvidence


@dataclass(frozen=True)
class PlanComparison:
    """A row for each tensor whose format differs: from, to, bytes, and nats where a plan or the evidence has them.

    nats_of   of how many of these tensors the nats are known, at their own row or at that of their group
    """

    rows: list[dict[str, Any]]
    nats_of: int

    def to_dict(self) -> dict[str, Any]:
        known = [row["nats"] for row in self.rows if row["nats"] is not None]
        return {
            "rows": self.rows,
            "bytes": sum(row["bytes"] for row in self.rows),
            "nats": sum(known) if known else None,
            "nats_of": self.nats_of,
        }


def compare_plans(first: Plan, second: Plan, evidence: SearchEvidence | None = None) -> PlanComparison:
    """What the second changes. Tensors of one group are counted once: its nats stand at its first tensor.

    A tensor that only one of them has is a row, too; plans that know other shapes of a tensor are refused.
    """
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    nats_of = 0
    for name in natural_order({*first, *second}):
        old, new = first.entries.get(name), second.entries.get(name)
        if old and new:
            _require_one_shape(name, old, new)
        before, after = old and (old.stored or old.choice.format), new and (new.stored or new.choice.format)
        nbytes = (new.nbytes if new else 0) - (old.nbytes if old else 0)
        if before == after and not nbytes:
            continue
        known = _nats(first, second, name, evidence)
        nats = None
        if known is not None:
            group, cost = known
            nats = None if group in seen else cost
            seen.add(group)
            nats_of += 1
        rows.append({"name": name, "from": before, "to": after, "bytes": nbytes, "nats": nats})
    return PlanComparison(rows, nats_of)


def _require_one_shape(name: str, old: Planned, new: Planned) -> None:
    """Parts of packed tensors are shaped by their format: theirs may differ."""
    if old.part or new.part or old.shape is None or new.shape is None or old.shape == new.shape:
        return
    raise SearchError(
        f"plans of different models: {name} is {list(old.shape)} in the first and {list(new.shape)} in the second; "
        "give two plans for one model"
    )


def _nats(first: Plan, second: Plan, name: str, evidence: SearchEvidence | None) -> tuple[str, float] | None:
    """The tensor's group and what its change costs: by the evidence, or by the figures that both plans carry."""
    if name not in first or name not in second:
        return None
    if evidence is not None:
        group = next((key for key, each in evidence.groups.items() if name in each.tensors), None)
        formats = first[name].format, second[name].format
        if group is None or not all(fmt in evidence.groups[group].formats for fmt in formats):
            return None
        return group, evidence.nats(group, formats[1]) - evidence.nats(group, formats[0])
    old, new = first[name].evidence or {}, second[name].evidence or {}
    if "nats" not in old or "nats" not in new or old.get("group") != new.get("group"):
        return None
    return old["group"], float(new["nats"]) - float(old["nats"])
