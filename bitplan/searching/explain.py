"""A solution as a plan: every choice with its reason in nats, bytes and microseconds, and what its neighbours cost.

What two plans do differently, and what that costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitplan.plan.names import natural_order
from bitplan.plan.plan import Choice, Plan, Planned
from bitplan.searching.evidence import SearchEvidence, TensorGroup, candidate_name, input_of, weight_format
from bitplan.searching.goal import SearchError

# ---- compare plans ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanComparison:
    """A row for each tensor whose format differs: from, to, bytes, and nats where a plan or the evidence has them.

    nats_of   of how many of these tensors the nats are known, at their own row or at that of their group
    """

    rows: list[dict[str, Any]]
    nats_of: int

    def to_dict(self) -> dict[str, Any]:
        nats = [row["nats"] for row in self.rows if row["nats"] is not None]
        return {
            "rows": self.rows,
            "bytes": sum(row["bytes"] for row in self.rows),
            "nats": sum(nats) if nats else None,
            "nats_of": self.nats_of,
        }


def compare_plans(first: Plan, second: Plan, evidence: SearchEvidence | None = None) -> PlanComparison:
    """What the second changes. Tensors of one group are counted once: its nats stand at its first tensor.

    A tensor that only one of them has is a row, too; plans that know other shapes of a tensor are refused.
    """
    rows: list[dict[str, Any]] = []
    counted_groups: set[str] = set()
    nats_of = 0
    for name in natural_order({*first, *second}):
        old, new = first.entries.get(name), second.entries.get(name)
        if old and new:
            _require_one_shape(name, old, new)
        before, after = old and (old.stored or old.choice.shown), new and (new.stored or new.choice.shown)
        nbytes = (new.nbytes if new else 0) - (old.nbytes if old else 0)
        if before == after and not nbytes:
            continue
        group_nats = _nats(first, second, name, evidence)
        nats = None
        if group_nats is not None:
            group, cost = group_nats
            nats = None if group in counted_groups else cost
            counted_groups.add(group)
            nats_of += 1
        rows.append({"name": name, "from": before, "to": after, "bytes": nbytes, "nats": nats})
    return PlanComparison(rows, nats_of)


def _require_one_shape(name: str, old: Planned, new: Planned) -> None:
    """Raise where plans have a tensor in two shapes; parts of packed ones may differ by format."""
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
        group = next((key for key, tensor_group in evidence.groups.items() if name in tensor_group.tensors), None)
        formats = [candidate_name(plan[name].format, plan[name].input) for plan in (first, second)]
        if group is None or not all(fmt in evidence.groups[group].formats for fmt in formats):
            return None
        return group, evidence.nats(group, formats[1]) - evidence.nats(group, formats[0])
    old, new = first[name].evidence or {}, second[name].evidence or {}
    if "nats" not in old or "nats" not in new or old.get("group") != new.get("group"):
        return None
    return old["group"], float(new["nats"]) - float(old["nats"])


# ---- explain ---------------------------------------------------------------------------------------------------------


def explain_plan(evidence: SearchEvidence, choice: Mapping[str, str], *, rows: int | None = None) -> Plan:
    """The plan of a choice for every group; with `rows`, with times at that many rows."""
    entries = {
        name: Planned(
            Choice(tensor.format, tensor.reason, cause="held"), tensor.shape, tensor.role, stored=tensor.stored
        )
        for name, tensor in evidence.stays.items()
    }
    for group_name, fmt in choice.items():
        group = evidence.groups[group_name]
        reason, figures = _reason(evidence, group_name, fmt, rows), _figures(evidence, group_name, fmt, rows)
        decided = Choice(weight_format(fmt), reason, figures, "solver", input_of(fmt))
        for name, (shape, role) in group.tensors.items():
            entries[name] = Planned(decided, shape, role)
    return Plan(entries)


def neighbours(group: TensorGroup, fmt: str) -> tuple[str | None, str | None]:
    """The next better format (less damage, the fewest bytes more) and the next cheaper one (the least damage more)."""
    nats, nbytes = group.nats(fmt), group.formats[fmt].nbytes
    better = [name for name in group.formats if group.nats(name) < nats]
    cheaper = [name for name in group.formats if group.formats[name].nbytes < nbytes]
    return (
        min(better, key=lambda name: (group.formats[name].nbytes, group.nats(name)), default=None),
        min(cheaper, key=lambda name: (group.nats(name), group.formats[name].nbytes), default=None),
    )


def _reason(evidence: SearchEvidence, name: str, fmt: str, rows: int | None) -> str:
    group = evidence.groups[name]
    cost = group.formats[fmt]
    words = [f"{nats_text(evidence.nats(name, fmt))} in {bytes_text(cost.nbytes)}"]
    if rows is not None and rows in cost.us:
        words[0] += f" and {cost.us[rows]:.1f} us at {rows} rows"
    better, cheaper = neighbours(group, fmt)
    if better is not None:
        gain = evidence.nats(name, better) - evidence.nats(name, fmt)
        more = group.formats[better].nbytes - cost.nbytes
        words.append(f"{better} would take {'+' if more >= 0 else '-'}{bytes_text(abs(more))} for {_signed_nats(gain)}")
    if cheaper is not None:
        loss = evidence.nats(name, cheaper) - evidence.nats(name, fmt)
        less = group.formats[cheaper].nbytes - cost.nbytes
        words.append(f"{cheaper} would save {bytes_text(-less)} for {_signed_nats(loss)}")
    together = f" (with {len(group.tensors) - 1} more of {name})" if len(group.tensors) > 1 else ""
    return "; ".join(words) + together


def _figures(evidence: SearchEvidence, name: str, fmt: str, rows: int | None) -> dict[str, Any]:
    group = evidence.groups[name]
    cost = group.formats[fmt]
    figures: dict[str, Any] = {
        "group": name,
        "nats": evidence.nats(name, fmt),
        "bytes": cost.nbytes,
        **({"nats of inputs": cost.inputs * evidence.together} if cost.inputs else {}),
    }
    if rows is not None and rows in cost.us:
        figures["microseconds"] = cost.us[rows]
    for label, other in zip(("next better", "next cheaper"), neighbours(group, fmt), strict=True):
        if other is not None:
            figures[label] = {
                "format": other,
                "nats": evidence.nats(name, other) - evidence.nats(name, fmt),
                "bytes": group.formats[other].nbytes - cost.nbytes,
            }
    return figures


def nats_text(nats: float) -> str:
    return f"{nats:.2g} nats"


def _signed_nats(nats: float) -> str:
    return f"{nats:+.2g} nats"


def bytes_text(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
