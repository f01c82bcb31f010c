"""A solution as a plan: every choice with its reason in nats, bytes and microseconds, and what its neighbours cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitplan.plan.plan import Choice, Plan, Planned
from bitplan.searching.evidence import SearchEvidence, TensorGroup


def explain_plan(evidence: SearchEvidence, choice: Mapping[str, str], *, rows: int | None = None) -> Plan:
    """The plan of a choice for every group; with `rows`, with times at that many rows."""
    entries = {
        name: Planned(Choice(tensor.format, tensor.reason), tensor.shape, tensor.role, stored=tensor.stored)
        for name, tensor in evidence.stays.items()
    }
    for group_name, fmt in choice.items():
        group = evidence.groups[group_name]
        decided = Choice(fmt, _reason(evidence, group_name, fmt, rows), _figures(evidence, group_name, fmt, rows))
        for name, (shape, role) in group.tensors.items():
            entries[name] = Planned(decided, shape, role)
    return Plan(entries)


def neighbours(group: TensorGroup, fmt: str) -> tuple[str | None, str | None]:
    """The next better format (less damage, the fewest bytes more) and the next cheaper one (the least damage more)."""
    nats, nbytes = group.nats(fmt), group.formats[fmt].nbytes
    better = [each for each in group.formats if group.nats(each) < nats]
    cheaper = [each for each in group.formats if group.formats[each].nbytes < nbytes]
    return (
        min(better, key=lambda each: (group.formats[each].nbytes, group.nats(each)), default=None),
        min(cheaper, key=lambda each: (group.nats(each), group.formats[each].nbytes), default=None),
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
        words.append(f"{better} would take {_signed_bytes(more)} for {_signed_nats(gain)}")
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
    }
    if rows is not None and rows in cost.us:
        figures["microseconds"] = cost.us[rows]
    for what, other in zip(("next better", "next cheaper"), neighbours(group, fmt), strict=True):
        if other is not None:
            figures[what] = {
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


def _signed_bytes(count: float) -> str:
    return f"{'+' if count >= 0 else '-'}{bytes_text(abs(count))}"
