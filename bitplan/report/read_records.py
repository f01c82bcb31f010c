"""Records from files: recognised by their content, never by their names, and read within limits.

A JSON document has one value; a JSONL log has an object per line. A log's first line is looked at before the rest is
read, so a file of garbage costs no more than its first line. The end of a log may be torn (its writer was killed, or is
writing now): that piece is left out and counted. Any other line that is not JSON is an error, except in the telemetry
of selective precision, whose writer once closed a torn line and went on.

Logs of steps may be very long: then every n-th step is read, with the first and the last, and the record says so. A
sample has whole steps, and also the steps at which a precision changed, as far as there is room.

The record of a training run: one line of JSON per step. The report draws loss curves from it.

    {"document": "bitplan-training-log", "version": 1, "run": "int8 blocks", "machine": {...}, "versions": {...}}
    {"step": 0, "loss": 4.21}
    {"step": 1, "loss": 4.02, "validation_loss": 4.1, "learning_rate": 0.0003, "tokens": 8192, "time_s": 1.5}

`run` names the curve; `machine` and `versions` are optional. A step has `step` and `loss`, and any other figure under a
name of its own; null stands for a number that is not finite. No other part writes losses, so the writer is here.

The head is written when the log is opened, so a path that cannot be written is an error before the first step.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bitplan.base.documents import Fields, Kind, reading_error, show
from bitplan.base.errors import FileFormatError
from bitplan.base.logs import JsonLog
from bitplan.base.records import check_input, parse_json

LARGEST = 1e30


class ReportError(FileFormatError):
    """A record that cannot be shown: not one of ours, or broken."""


class UnknownRecordError(ReportError):
    """A document that is none of the kinds that a report shows."""


def is_number(value: Any) -> bool:
    """A number that can be drawn: finite, and far below the largest float, so that sums and ranges are finite too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


class RecordFields(Fields):
    """One JSON object of a record, read key by key.

    The report reads the files of other parts and imports none of them, so it checks only what it shows, and accepts
    unknown keys: a newer writer may have more of them.
    """

    error = ReportError
    number_kind = Kind("a number", is_number)


MAX_RECORD_BYTES = 64 * 2**20
MAX_LINE_BYTES = 8 * 2**20
MAX_LINES = 500_000
WHOLE_LINES = 50_000  # a log of more steps than this is sampled
SAMPLED_LINES = 10_000  # a chart has fewer places than this
_STEP = re.compile(rb'"step(?:_id)?": ?(\d+)')


@dataclass(frozen=True)
class RecordKind:
    """A kind of record, and how it is recognised: by its document or by its first line."""

    name: str
    label: str
    matches: Callable[[dict[str, Any]], bool]
    lines: bool = False
    torn_lines: bool = False  # whether a line in the middle may be torn
    steps: bool = False  # a log of steps, which is sampled where it is long
    unchanged: bytes = b""  # a sampled log keeps all lines without this text
    document: str | None = None
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """One file: `content` is a document's value, or the list of a log's lines; `torn` lines were left out."""

    kind: str
    name: str
    label: str
    nbytes: int
    sha256: str
    content: Any
    torn: int = 0
    sampled: str = ""  # how many lines of a long log were read

    def fields(self) -> RecordFields:
        """A document's content, to be read key by key."""
        return RecordFields(self.content, self.name)

    def lines(self) -> list[RecordFields]:
        """The lines of a log."""
        return [RecordFields(item, f"{self.name}: line {number}") for number, item in enumerate(self.content, 1)]


def _has(*keys: str) -> Callable[[dict[str, Any]], bool]:
    return lambda document: all(key in document for key in keys)


KINDS = (
    RecordKind("plan", "plan", _has("tensors"), document="bitplan-plan", versions=(1,)),
    RecordKind("search", "search", _has("front", "plan", "measured"), document="bitplan-front", versions=(1,)),
    RecordKind("fit", "fit", _has("goal", "plan", "measured"), document="bitplan-fit", versions=(1,)),
    RecordKind(
        "searching",
        "search in progress",
        _has("goal"),
        lines=True,
        document="bitplan-search-progress",
        versions=(1,),
    ),
    RecordKind("fp8_policy", "FP8 policy", _has("rules"), document="bitplan-fp8-policy", versions=(2,)),
    RecordKind("fp8_report", "FP8 layer benchmark", _has("rows"), document="bitplan-fp8-report", versions=(1,)),
    RecordKind(
        "fp8_report",
        "FP8 layer benchmark",
        lambda document: "rows" not in document,
        lines=True,
        document="bitplan-fp8-report",
        versions=(1,),
    ),
    RecordKind(
        "selective", "state of selective precision", _has("state"), document="bitplan-selective-state", versions=(1,)
    ),
    RecordKind("trees_model", "model of trees", lambda document: document.get("format") == "bitplan.trees"),
    RecordKind("crossover", "measured crossovers", _has("weights"), document="bitplan-crossover", versions=(1,)),
    RecordKind("calibration", "calibration", _has("layers", "blocks"), document="bitplan-calibration", versions=(1,)),
    RecordKind("machine", "machine", _has("machine", "versions"), document="bitplan-machine", versions=(1,)),
    RecordKind(
        "training", "training log", _has("run"), lines=True, steps=True, document="bitplan-training-log", versions=(1,)
    ),
    RecordKind(
        "precision",
        "selective precision telemetry",
        _has("step_id", "block_details", "precision_changes"),
        lines=True,
        torn_lines=True,
        steps=True,
        unchanged=b'"precision_changes": 0,',
    ),
    RecordKind("run_plan", "log of a run's plan", _has("rows"), lines=True, document="bitplan-run-log", versions=(1,)),
    RecordKind("stream", "streaming telemetry", _has("step", "step_ms", "copy_ms", "stall_ms"), lines=True, steps=True),
    RecordKind("drift", "drift log", _has("step", "name", "relative_error"), lines=True, steps=True),
    RecordKind("drift", "drift of a checkpoint", _has("layers", "findings")),
    RecordKind("quality", "perplexity", _has("reference_row", "rows")),
    RecordKind(
        "quality", "perplexity benchmark", lambda record: record.get("benchmark") == "quality" and "rows" in record
    ),
    RecordKind("demo", "demo figures", _has("train_seconds", "formats")),
    RecordKind("benchmark", "benchmark", _has("benchmark", "machine", "versions")),
)
FINDINGS = RecordKind("findings", "findings of a check", _has("code", "where", "message"))


def read_records(paths: Iterable[str | Path]) -> list[Record]:
    """Read every file, in the order given; a file that is no record of ours is an error that names it."""
    listed = [Path(path) for path in paths]
    if not listed:
        raise ReportError("no records given; name the JSON and JSONL files that plan, check, drift and others wrote")
    return [_read(path, name) for path, name in zip(listed, short_names(listed), strict=True)]


def short_names(paths: list[Path]) -> list[str]:
    """File names, with as many folders as needed to tell equal names apart: a report must not show a home folder."""
    resolved = [path.resolve() for path in paths]
    names = []
    for path in resolved:
        depth, others = 1, {other for other in resolved if other != path}
        while depth < len(path.parts) and any(other.parts[-depth:] == path.parts[-depth:] for other in others):
            depth += 1
        names.append("/".join(path.parts[-depth:]))
    return names


def _read(path: Path, name: str) -> Record:
    try:
        check_input(path)
        with path.open("rb") as file:
            size = path.stat().st_size
            kind, content, torn, sampled = _recognise(file, path, size)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, FileFormatError) as fault:
        raise reading_error(fault, path, ReportError) from None
    return Record(kind.name, name, kind.label, size, digest, content, torn, sampled)


def _recognise(file: BinaryIO, path: Path, size: int) -> tuple[RecordKind, Any, int, str]:
    first = b"\n"
    while first and not first.strip():  # skip blank lines at the beginning
        first = file.readline(MAX_LINE_BYTES + 1)
    if not first:
        raise ReportError(f"{path}: empty; {_expected()}")
    start = _json_or_none(first)
    if isinstance(start, dict):
        kind = _kind_of(start, path, lines=True, quiet=True)
        if kind is not None and kind.steps and (sample := _sample(file, kind, path, size)):
            lines, torn = _read_lines(sample, kind, path)
            read = f"a sample: {len(lines):,} of {sample.total:,} lines read, whole steps spread evenly"
            return kind, lines, torn, read
        if kind is not None:
            _check_size(path, size)
            file.seek(0)
            return (
                kind,
                *_read_lines(enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1), kind, path),
                "",
            )
    _check_size(path, size)
    if first.lstrip()[:1] not in (b"{", b"["):
        raise ReportError(f"{path}: neither JSON nor JSONL: it begins with {show(first[:40].decode('latin-1'))}")
    document = parse_json(first + file.read(), where=str(path))
    if isinstance(document, list) and all(isinstance(item, dict) and FINDINGS.matches(item) for item in document):
        return FINDINGS, document, 0, ""
    if not isinstance(document, dict):
        raise ReportError(f"{path}: a list, and not one of findings (code, where, message); {_expected()}")
    kind = _kind_of(document, path, lines=False, quiet=False)
    assert kind is not None
    return kind, document, 0, ""


def _kind_of(document: dict[str, Any], path: Path, *, lines: bool, quiet: bool) -> RecordKind | None:
    named = document.get("document")
    candidates = [kind for kind in KINDS if kind.lines == lines and (kind.document is None or kind.document == named)]
    for kind in candidates:
        # A document names its kind; one without a name is recognised by its keys.
        if (kind.document == named) and kind.matches(document):
            if kind.document is not None and document.get("version") not in kind.versions:
                versions = " or ".join(map(str, kind.versions))
                raise ReportError(
                    f"{path}: version must be {versions} for {kind.document}, got {show(document.get('version'))}; "
                    "write the record again with this version of bitplan"
                )
            return kind
    if quiet:
        return None
    if named is not None:
        raise UnknownRecordError(f"{path}: the document {show(named)} is none that a report shows; {_expected()}")
    keys = ", ".join(show(key) for key in list(document)[:6]) or "none"
    raise UnknownRecordError(f"{path}: not recognised by its keys ({keys}); {_expected()}")


def _expected() -> str:
    labels = dict.fromkeys((*(kind.label for kind in KINDS), FINDINGS.label))
    return f"expected a record of one of these kinds: {', '.join(labels)}"


def _check_size(path: Path, size: int) -> None:
    if size > MAX_RECORD_BYTES:
        raise ReportError(f"{path}: {size} bytes is too large for a record (limit {MAX_RECORD_BYTES})")


@dataclass(frozen=True)
class _Sample:
    """Lines that were picked from a log, each with its line number."""

    total: int
    lines: list[tuple[int, bytes]]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return iter(self.lines)


def _sample(file: BinaryIO, kind: RecordKind, path: Path, size: int) -> _Sample | None:
    """Every n-th step of a log, with the first and the last; None if the log is short enough to be read whole."""
    file.seek(0)
    total = sum(piece.count(b"\n") for piece in iter(lambda: file.read(2**20), b""))
    nth = max(-(-total // SAMPLED_LINES), -(-size // MAX_RECORD_BYTES))
    if nth <= 1 or (total <= WHOLE_LINES and size <= MAX_RECORD_BYTES):
        return None
    file.seek(0)
    sampled: list[tuple[int, bytes]] = []
    skipped: list[tuple[int, bytes]] = []  # lines of the present step, which may be the last
    steps, step, changes, change_bytes, room = -1, None, 0, 0, 2 * MAX_RECORD_BYTES
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        match = _STEP.search(line)
        if match is None or match[1] != step:
            step, steps = match and match[1], steps + 1
            skipped.clear()
        if steps % nth == 0:
            sampled.append((number, line))
            room -= len(line)
            if len(sampled) > MAX_LINES or room < 0:
                raise ReportError(
                    f"{path}: line {number}: every {nth}th step is still more than {MAX_LINES} lines or "
                    f"{2 * MAX_RECORD_BYTES} bytes; give a part of the log"
                )
        elif kind.unchanged and kind.unchanged not in line and changes < SAMPLED_LINES and change_bytes < 2**24:
            sampled.append((number, line))
            changes, change_bytes = changes + 1, change_bytes + len(line)
        elif len(skipped) < SAMPLED_LINES:
            skipped.append((number, line))
    return _Sample(total, sampled + skipped)


def _read_lines(numbered: Iterable[tuple[int, bytes]], kind: RecordKind, path: Path) -> tuple[list[Any], int]:
    lines, torn, index, ahead = [], 0, 0, iter(numbered)
    at = next(ahead, None)
    while at is not None:
        (number, line), at, index = at, next(ahead, None), index + 1
        if len(line) > MAX_LINE_BYTES or index > MAX_LINES:
            raise ReportError(f"{path}: line {number}: a log has at most {MAX_LINES} lines of {MAX_LINE_BYTES} bytes")
        if line.strip():
            try:
                lines.append(parse_json(line, where=f"{path}: line {number}"))
            except FileFormatError:
                if not kind.torn_lines and (at is not None or line.endswith(b"\n")):
                    raise
                torn += 1
    return lines, torn


def _json_or_none(line: bytes) -> Any:
    """The value of a first line that is JSON by itself; None for a piece of a document, and for garbage."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        return parse_json(line, where="first line")
    except FileFormatError:
        return None


# ---- training log ----------------------------------------------------------------------------------------------------


DOCUMENT = "bitplan-training-log"
VERSION = 1
_FIRST_BYTES = b'{"document": "bitplan-training-log"'


class TrainingLog(JsonLog):
    """Appends steps to a file; a context manager, or `close()` it. An existing log of ours is continued."""

    def __init__(
        self,
        path: str | Path,
        *,
        run: str = "",
        machine: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        head: dict[str, Any] = {"document": DOCUMENT, "version": VERSION, "run": run or Path(path).stem}
        head |= {key: dict(value) for key, value in (("machine", machine), ("versions", versions)) if value}
        super().__init__(path, _FIRST_BYTES, noun="training log", head=head, error=ReportError)

    def write(self, step: int, loss: float, **figures: float) -> None:
        """Append one step; the line is in the file when this returns."""
        numbers = {"step": int(step), "loss": float(loss), **figures}
        self.write_lines({key: value if math.isfinite(value) else None for key, value in numbers.items()})
