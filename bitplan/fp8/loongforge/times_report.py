"""Reports of LoongForge's own layer benchmark: a JSON list of results, one median time each.

    [{"case_name": "...", "model_name": "...", "module_kind": "row", "ub_name": "fc2", "precision": "fp8",
      "num_tokens": 4096, "total_ms": 1.9, "tp_size": 1, "etp_size": 1, "num_gemms": null, ...}, ...]

They hold no samples, no recipe and no name of a GPU, so no interval can be computed and only a policy of version 1 can
be made from them. BF16 and FP8 are paired by case and model, with BF16's token count: FP8's count is padded, and
pairing by counts would lose every expert. A rule begins where an unbroken run of wins up to the largest count begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitplan.base.documents import NAME, Kind, Reader, one_of
from bitplan.base.records import read_json
from bitplan.fp8.policy.merge import Merged
from bitplan.fp8.policy.rules import LayerRule, Policy
from bitplan.fp8.policy.vocabulary import COUNT, GROUPED_KINDS, KIND, PRECISIONS, TIME_MS, BenchReportError, MergeError

_KEYS: dict[str, Kind] = {
    "case_name": NAME,
    "model_name": NAME,
    "module_kind": KIND,
    "precision": one_of(*PRECISIONS),
    "num_tokens": COUNT,
    "total_ms": TIME_MS,
}
_DENSE: dict[str, Kind] = {"ub_name": NAME, "tp_size": COUNT}
_GROUPED: dict[str, Kind] = {"etp_size": COUNT, "num_gemms": COUNT}


@dataclass(frozen=True)
class ListRow:
    """One result: the layer, the run and the time."""

    rule: tuple[Any, ...]  # kind, name, tp, etp, num_gemms
    run: tuple[str, str]  # model and case
    precision: str
    tokens: int
    time_ms: float


def load_list_report(path: str | Path) -> list[ListRow] | None:
    """The rows of a list report; None for any other file, which another reader may take."""
    try:
        document = read_json(path)
    except (ValueError, OSError):
        return None  # JSON lines, or no JSON: the reader of our own reports will say what is wrong
    if not isinstance(document, list):
        return None
    reader = Reader(str(path), BenchReportError)
    return [_row(reader, f"[{index}]", item) for index, item in enumerate(document)]


def thresholds_of(rows: Sequence[ListRow], speedup_threshold: float) -> Merged:
    """A version 1 policy, and a sentence for everything that could not be used."""
    runs: dict[tuple[Any, ...], dict[str, ListRow]] = {}
    findings: set[str] = set()
    for row in rows:
        pair = runs.setdefault((row.rule, row.run), {})
        slower = row.precision in pair and pair[row.precision].time_ms >= row.time_ms
        if row.precision not in pair or slower == (row.precision == "bf16"):  # FP8's longest time, BF16's shortest
            pair[row.precision] = row
    speedups: dict[tuple[Any, ...], dict[int, float]] = {}
    for (rule, run), pair in runs.items():
        if len(pair) < len(PRECISIONS):
            findings.add(f"{run[1]} of {run[0]} was measured in {next(iter(pair))} only")
            continue
        counts = speedups.setdefault(rule, {})
        speedup = pair["bf16"].time_ms / pair["fp8"].time_ms
        counts[pair["bf16"].tokens] = min(speedup, counts.get(pair["bf16"].tokens, speedup))
    thresholds = (_threshold(rule, counts, speedup_threshold) for rule, counts in speedups.items())
    policy = Policy([rule for rule in thresholds if rule is not None], None, speedup_threshold)
    return Merged(policy, tuple(sorted(findings)))


def merge_lists(paths: Sequence[Path], speedup_threshold: float) -> Merged | None:
    """The policy of list reports; None where all reports are our own. A mixture is refused."""
    loaded = {path: load_list_report(path) for path in paths}
    lists = [path for path, rows in loaded.items() if rows is not None]
    if not lists:
        return None
    for path, rows in loaded.items():
        if rows is None:
            raise MergeError(f"{lists[0]} is a list report without samples, {path} is none; merge them apart")
    return thresholds_of([row for rows in loaded.values() for row in rows or ()], speedup_threshold)


def _threshold(rule: tuple[Any, ...], counts: Mapping[int, float], least: float) -> LayerRule | None:
    first = None
    for tokens in sorted(counts, reverse=True):
        if counts[tokens] <= least:
            break
        first = tokens
    if first is None:
        return None
    kind, name, tp, etp, num_gemms = rule
    return LayerRule.from_tokens(kind, first, round(counts[first], 4), name=name, tp=tp, etp=etp, num_gemms=num_gemms)


def _row(reader: Reader, path: str, item: Any) -> ListRow:
    grouped = isinstance(item, dict) and item.get("module_kind") in GROUPED_KINDS
    known = _KEYS | (_GROUPED if grouped else _DENSE)
    ours = {key: value for key, value in item.items() if key in known} if isinstance(item, dict) else item
    values = reader.keys(path, ours, known, tuple(known))
    sizes = (None, None, values["etp_size"], values["num_gemms"]) if grouped else (values["ub_name"], values["tp_size"])
    rule = (values["module_kind"], *sizes, *(() if grouped else (None, None)))
    return ListRow(
        rule, (values["model_name"], values["case_name"]), values["precision"], values["num_tokens"], values["total_ms"]
    )
