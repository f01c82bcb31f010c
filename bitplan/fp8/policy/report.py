"""The report: what a layer benchmark measured, every sample of it, and on what machine.

A report is evidence only: it holds no decision, so that another threshold or confidence needs no GPU. It is one file,
in one of two forms with the same content:

    one document     {"document": "bitplan-fp8-report", "version": 1, "fingerprint": {...}, "recipe": "blockwise",
                      "model": "...", "settings": {...}, "rows": [ROW, ...]}
    lines            the same document without "rows" on the first line, one ROW per line, and {"end": ROWS} last. A
                     running benchmark writes this form (`ReportLog`): if it is killed, the file
                     has whole lines and no end, and is resumed rather than merged

A row is one precision of one layer at one logical token count:

    {"part": "llm", "kind": "row", "name": "fc2", "shape": [4096, 14336], "tp": 1, "tokens": 4096, "gemm": "module",
     "timing": "graph", "precision": "fp8", "status": "ok", "samples_ms": [0.41, ...], "in_turns": true}

An expert's row has "etp", "num_gemms", "ep", "topk" and "routing" instead of "tp", and needs no name. `padded_tokens`
(the count that the kernel padded to) and `peak_bytes` may be noted. A row that ran out of memory has the status "oom",
one that failed "error"; both have a `message` and no samples. `in_turns`: sample i was taken next to sample i of the
other precision.

Whether FP8 is faster, win, lose or undecided, is decided by an interval for the speedup, from raw times.

A time on a GPU is the work plus noise that only ever adds, so means mislead and single samples mislead more. There are
two ways to an interval; neither assumes a distribution of the noise, draws random numbers, or reads a clock:

    pairs      BF16 and FP8 were timed in turns, so that a GPU that gets warmer slows both. Each turn gives one ratio
               BF16 / FP8. Sorted, the true median ratio lies between the k-th from below and the k-th from above unless
               chance put fewer than k ratios on one side of it, and coin flips say how likely that is (the sign test).
    crossed    too few turns for that (five, LoongForge's default), or not taken in turns: every BF16 time is
               divided by every FP8 time, and of the sorted ratios as many are cut off at both ends as a rank test (Mann
               and Whitney's) at the same confidence allows. Drift of the GPU stays in, and widens the interval.

The reported speedup is the median of the same ratios. At 95% "pairs" needs 6 turns, "crossed" 4 times of each.
The whole interval at or above the threshold: win. All of it below: lose. Otherwise: undecided, which means BF16.

`ReportLog` writes the report of a running benchmark line by line, so that a killed benchmark can go on. The file's
fingerprint, recipe, model and settings must be those of this run: rows of two machines never share a file.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base import __version__
from bitplan.base.documents import (
    EVIDENCE,
    FLAG,
    LIST,
    NAME,
    OBJECT,
    SIZE,
    TEXT,
    Kind,
    Reader,
    document_key,
    document_of,
    load_bytes,
    one_of,
    show,
)
from bitplan.base.errors import FileFormatError
from bitplan.base.hardware import describe_gpu, version_of
from bitplan.base.logs import JsonLog, json_line
from bitplan.base.records import MAX_JSON_BYTES, on_failure, parse_json, read_bytes, write_json
from bitplan.fp8.policy.vocabulary import (
    COUNT,
    GEMMS,
    GROUPED_KINDS,
    KIND,
    LOCAL_SHAPE,
    LOSE,
    PARTS,
    PRECISIONS,
    TIME_MS,
    UNDECIDED,
    WIN,
    BenchReportError,
    Fp8Error,
)
from bitplan.fp8.recipes import RECIPES

if TYPE_CHECKING:
    import torch

DOCUMENT = "bitplan-fp8-report"
VERSION = 1
OK, OOM, ERROR = "ok", "oom", "error"
TIMINGS = ("eager", "graph")
ROUTINGS = ("uniform", "zipf")
RESUME = "run the benchmark again on the same path and it goes on from the last whole line"

MAX_SAMPLES = 1000  # of a row: unpaired times are all divided by one another
_SAMPLES = Kind(
    f"a list of at most {MAX_SAMPLES} times from 1e-6 to 1e9 milliseconds",
    lambda value: type(value) in (list, tuple) and len(value) <= MAX_SAMPLES and all(map(TIME_MS.holds, value)),
    write=list,
)
# Keys of a row in the document.
_ROW_ORDER = (
    *("part", "kind", "name", "shape", "tp", "ep", "etp", "num_gemms", "topk", "tokens", "padded_tokens"),
    *("gemm", "routing", "timing", "precision", "status", "samples_ms", "in_turns", "peak_bytes", "message"),
)
_DENSE_ONLY = ("tp",)
_GROUPED_ONLY = ("etp", "num_gemms", "ep", "topk", "routing")
_HEAD_KEYS = {
    "document": one_of(DOCUMENT),
    "version": SIZE,
    "fingerprint": OBJECT,
    "recipe": one_of(*RECIPES),
    "model": TEXT,
    "settings": EVIDENCE,
}


@dataclass(frozen=True)
class Fingerprint:
    """The machine and the software of a measurement; times of two fingerprints are never compared."""

    gpu: str = document_key(NAME)
    driver: str = document_key(TEXT)
    torch: str = document_key(TEXT)
    triton: str = document_key(TEXT)
    bitplan: str = document_key(TEXT)
    commit: str = document_key(TEXT)

    def differences(self, other: Fingerprint) -> dict[str, tuple[str, str]]:
        """The fields that differ: name -> (ours, theirs)."""
        mine, theirs = asdict(self), asdict(other)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


@dataclass(frozen=True)
class Row:
    """One precision of one layer at one logical token count; the module's docstring describes the fields."""

    part: str = document_key(one_of(*PARTS))
    kind: str = document_key(KIND)
    shape: tuple[int, int] = document_key(LOCAL_SHAPE)
    tokens: int = document_key(COUNT)
    gemm: str = document_key(one_of(*GEMMS))
    timing: str = document_key(one_of(*TIMINGS))
    precision: str = document_key(one_of(*PRECISIONS))
    status: str = document_key(one_of(OK, OOM, ERROR))
    name: str | None = document_key(NAME, None, unwritten=None)
    tp: int | None = document_key(COUNT, None, unwritten=None)
    ep: int | None = document_key(COUNT, None, unwritten=None)
    etp: int | None = document_key(COUNT, None, unwritten=None)
    num_gemms: int | None = document_key(COUNT, None, unwritten=None)
    topk: int | None = document_key(COUNT, None, unwritten=None)
    padded_tokens: int | None = document_key(COUNT, None, unwritten=None)
    routing: str | None = document_key(one_of(*ROUTINGS), None, unwritten=None)
    samples_ms: tuple[float, ...] = document_key(_SAMPLES, (), unwritten=())
    in_turns: bool = document_key(FLAG, False)
    peak_bytes: int | None = document_key(SIZE, None, unwritten=None)
    message: str = document_key(TEXT, "", unwritten="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "samples_ms", tuple(self.samples_ms))
        _check_row(Reader("a report row", BenchReportError), "", self.to_document())

    @property
    def layer_key(self) -> tuple[Any, ...]:
        """The layer and product, as rules are looked up: without the name of an expert's layer."""
        if self.kind in GROUPED_KINDS:
            return (self.part, self.kind, None, self.shape, None, self.etp, self.num_gemms, self.gemm)
        return (self.part, self.kind, self.name, self.shape, self.tp, None, None, self.gemm)

    @property
    def key(self) -> tuple[Any, ...]:
        """The unique key of a row: the layer, the logical tokens, how it was run and in which precision."""
        return (*self.layer_key, self.tokens, self.routing, self.timing, self.precision)

    def to_document(self) -> dict[str, Any]:
        document = document_of(self, *_ROW_ORDER)
        if self.status != OK and not self.in_turns:
            del document["in_turns"]
        return document


@dataclass(frozen=True)
class Report:
    """Rows and where they come from; `where` names the file in messages and is not part of the document."""

    fingerprint: Fingerprint
    recipe: str
    rows: tuple[Row, ...]
    model: str = ""
    settings: Mapping[str, Any] | None = None
    where: str = field(default="report", compare=False)

    def __post_init__(self) -> None:
        keys = set()
        for row in self.rows:
            if row.key in keys:
                raise BenchReportError(f"{self.where}: {describe_row(row)} is there twice; keep one of the two rows")
            keys.add(row.key)

    def head(self) -> dict[str, Any]:
        return {
            "document": DOCUMENT,
            "version": VERSION,
            "fingerprint": asdict(self.fingerprint),
            "recipe": self.recipe,
            "model": self.model,
            "settings": dict(self.settings or {}),
        }

    def to_document(self) -> dict[str, Any]:
        return self.head() | {"rows": [row.to_document() for row in self.rows]}

    def to_lines(self) -> str:
        """The report as lines of JSON, as a benchmark writes it: a head, rows, an end."""
        documents = [self.head(), *(row.to_document() for row in self.rows), {"end": len(self.rows)}]
        return "".join(map(json_line, documents))

    def save(self, path: str | Path) -> None:
        """Write the one-document form, whole or not at all."""
        write_json(path, self.to_document())

    @classmethod
    def load(cls, path: str | Path) -> Report:
        data = load_bytes(path, BenchReportError, max_bytes=MAX_JSON_BYTES, noun="report")
        return parse_report(data, where=str(path))


def parse_report(data: bytes, *, where: str) -> Report:
    """A finished report in either form; one that was cut off is an error that says so."""
    head, rows, ended = split_report(data, where=where)
    if not ended:
        raise BenchReportError(f"{where}: unfinished: {len(rows)} rows and no end line; {RESUME}")
    return report_of(head, rows, where=where)


def split_report(data: bytes, *, where: str) -> tuple[dict[str, Any], list[Any], bool]:
    """The head, the raw rows, and whether the report is whole; a torn last line is an error."""
    if not data.strip():
        raise BenchReportError(
            f"{where}: empty; a report begins with its document name, version and fingerprint; {RESUME}"
        )
    first, _, rest = data.partition(b"\n")
    head = _json(first, where=where, quiet=True)
    if not isinstance(head, dict) or "rows" in head or "document" not in head:
        document = _json(data, where=where)
        Reader(where, BenchReportError).version(document, VERSION)
        Reader(where, BenchReportError).keys("", document, _HEAD_KEYS | {"rows": LIST}, ("document", "version", "rows"))
        return {name: value for name, value in document.items() if name != "rows"}, document["rows"], True
    lines = rest.split(b"\n")
    if lines[-1]:
        raise BenchReportError(f"{where}: cut off in line {len(lines) + 1}, which has no end; {RESUME}")
    rows = [_json(line, where=f"{where}: line {number}") for number, line in enumerate(lines[:-1], start=2)]
    ended = bool(rows) and isinstance(rows[-1], dict) and "end" in rows[-1]
    if ended:
        count = rows.pop()["end"]
        if count != len(rows):
            raise BenchReportError(
                f"{where}: its end line says {show(count)} rows, {len(rows)} are there; run it again"
            )
    return head, rows, ended


def report_of(head: Any, rows: list[Any], *, where: str) -> Report:
    reader = Reader(where, BenchReportError)
    reader.version(head, VERSION)
    reader.keys("", head, _HEAD_KEYS, ("document", "version", "fingerprint", "recipe"))
    return Report(
        reader.record(Fingerprint, "fingerprint", head["fingerprint"]),
        head["recipe"],
        tuple(Row(**_check_row(reader, f"rows[{index}]", row)) for index, row in enumerate(rows)),
        head.get("model", ""),
        head.get("settings"),
        where,
    )


def describe_row(row: Row) -> str:
    """A row in words, for messages."""
    size = f"etp {row.etp}, {row.num_gemms} gemms" if row.kind in GROUPED_KINDS else f"tp {row.tp}"
    named = f"{row.kind} {row.name or ''}".strip()
    how = ", ".join(filter(None, (row.gemm, row.routing, row.timing, row.precision)))
    return f"{row.part} {named} {row.shape[0]}x{row.shape[1]} ({size}) at {row.tokens} tokens ({how})"


def _check_row(reader: Reader, path: str, value: Any) -> dict[str, Any]:
    values = reader.fields_of(Row, path, value)
    at = f"{path}: " if path else ""
    grouped = values["kind"] in GROUPED_KINDS
    needed = ("etp", "num_gemms") if grouped else ("tp", "name")
    check_size_keys(reader, at, values, needed, _DENSE_ONLY if grouped else _GROUPED_ONLY)
    if values["status"] == OK and not values.get("samples_ms"):
        reader.stop(f"{at}samples_ms must be {_SAMPLES.text}, at least one, where the status is ok")
    if values["status"] != OK and ("samples_ms" in values or not values.get("message")):
        reader.stop(f"{at}a row with the status {values['status']} has a message and no samples_ms")
    if values.get("padded_tokens", values["tokens"]) < values["tokens"]:
        reader.stop(f"{at}padded_tokens {values['padded_tokens']} is less than tokens {values['tokens']}")
    return values


def check_size_keys(
    reader: Reader, at: str, values: Mapping[str, Any], needed: Iterable[str], others: Iterable[str]
) -> None:
    """Require the keys by which this kind of layer is looked up; refuse those of other kinds."""
    for name in needed:
        if name not in values:
            reader.stop(f"{at}{name} is missing; {values['kind']} is looked up by it")
    for name in others:
        if name in values:
            reader.stop(f"{at}{name} does not belong to {values['kind']}")


def _json(text: bytes, *, where: str, quiet: bool = False) -> Any:
    try:
        return parse_json(text, where=where)
    except FileFormatError as fault:
        if quiet:
            return None
        raise BenchReportError(f"{fault}; a report that was cut off in mid-write reads like this: {RESUME}") from None


# ---- the interval of a speedup ---------------------------------------------------------------------------------------


DEFAULT_CONFIDENCE = 0.95
_EXACT_UP_TO = 40  # samples of both together: above this the normal approximation of the rank test is exact enough


@dataclass(frozen=True)
class Interval:
    """How many times faster FP8 is: the median, and the interval for the given confidence."""

    speedup: float
    low: float
    high: float
    method: str

    def answer(self, threshold: float) -> str:
        return answer_of(self.low, self.high, threshold)


def answer_of(low: float, high: float, threshold: float) -> str:
    """Win, lose or undecided. The threshold is the least speedup that counts, so an interval that begins on it wins."""
    if low >= threshold:
        return WIN
    return LOSE if high < threshold else UNDECIDED


def speedup_interval(
    bf16_ms: Sequence[float], fp8_ms: Sequence[float], *, in_turns: bool, confidence: float = DEFAULT_CONFIDENCE
) -> Interval | None:
    """The interval of BF16 time over FP8 time; None where there are too few samples for this confidence."""
    for times in (bf16_ms, fp8_ms):
        if not times or not all(0 < time < math.inf for time in times):
            raise Fp8Error(f"times must be numbers above 0, got {list(times)[:5]}")
    check_confidence(confidence)
    if in_turns and len(bf16_ms) == len(fp8_ms):
        cut = sign_test_cut(len(bf16_ms), confidence)
        if cut is not None:
            ratios = sorted(slow / fast for slow, fast in zip(bf16_ms, fp8_ms, strict=True))
            return Interval(statistics.median(ratios), ratios[cut], ratios[-1 - cut], "pairs")
    cut = rank_test_cut(len(bf16_ms), len(fp8_ms), confidence)
    if cut is None:
        return None
    ratios = sorted(slow / fast for slow in bf16_ms for fast in fp8_ms)
    return Interval(statistics.median(ratios), ratios[cut], ratios[-1 - cut], "crossed")


def check_confidence(confidence: float) -> None:
    if not 0.5 <= confidence < 1:
        raise Fp8Error(f"the confidence must be from 0.5 up to, and not with, 1, got {confidence!r}")


def sign_test_cut(pairs: int, confidence: float) -> int | None:
    """How many ratios are cut off at each end so that 1 - 2 P(Binomial(pairs, 1/2) <= cut) is still the coverage."""
    below, cut = 0, None
    for index in range(pairs // 2):
        below += math.comb(pairs, index)
        if 2 * below > (1 - confidence) * 2**pairs:
            break
        cut = index
    return cut


def rank_test_cut(first: int, second: int, confidence: float) -> int | None:
    """How many of the first x second ratios are cut off at each end: P(U <= cut) is at most (1 - confidence) / 2."""
    tail = (1 - confidence) / 2
    if first + second > _EXACT_UP_TO:
        spread = math.sqrt(first * second * (first + second + 1) / 12)
        cut = math.floor(first * second / 2 - 0.5 - statistics.NormalDist().inv_cdf(1 - tail) * spread)
        return cut if cut >= 0 else None
    counts = _rank_counts(first, second)
    below, largest = 0, None
    for index in range(first * second // 2):
        below += counts[index]
        if below > tail * math.comb(first + second, first):
            break
        largest = index
    return largest


@lru_cache(maxsize=256)
def _rank_counts(first: int, second: int) -> tuple[int, ...]:
    """How many orders of first + second samples give the rank statistic U = 0, 1, 2, ...: a Gaussian binomial."""
    counts = [1] + [0] * (first * second)
    for size in range(1, first + 1):
        for index in range(first * second, second + size - 1, -1):  # times 1 - q^(second + size)
            counts[index] -= counts[index - second - size]
        for index in range(size, first * second + 1):  # divided by 1 - q^size
            counts[index] += counts[index - size]
    return tuple(counts)


# ---- the report of a running benchmark -------------------------------------------------------------------------------


_FIRST_BYTES = b'{"document": "bitplan-fp8-report"'


class ReportLog(JsonLog):
    """Opens or resumes a report; `done` has the keys of the rows that the file already has."""

    def __init__(
        self,
        path: str | Path,
        fingerprint: Fingerprint,
        recipe: str,
        *,
        model: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        empty = Report(fingerprint, recipe, (), model, settings, str(path))
        head = empty.head()
        report_of(head, [], where=str(path))  # checks that the head can be read back, before the work
        super().__init__(path, _FIRST_BYTES, noun="report of the layer benchmark", head=head, error=BenchReportError)
        with on_failure(self.close):
            self.rows, self.finished = self._resume(head)
        self.done = {row.key for row in self.rows}

    def append(self, row: Row) -> None:
        """Add one row; it is in the file when this returns."""
        if self.finished:
            raise BenchReportError(f"{self.path}: finished; a new measurement needs a new file")
        if row.key in self.done:
            raise BenchReportError(f"{self.path}: {describe_row(row)} is already there; skip what is in `done`")
        self.write_lines(row.to_document())
        self.rows.append(row)
        self.done.add(row.key)

    def finish(self) -> None:
        """Write the end line; without it the report is not merged."""
        if not self.finished:
            self.write_lines({"end": len(self.rows)})
            self.finished = True

    def _resume(self, mine: Mapping[str, Any]) -> tuple[list[Row], bool]:
        """The rows in the file, and whether the report is finished."""
        head, rows, finished = split_report(read_bytes(self.path, noun="report"), where=str(self.path))
        begun = report_of(head, rows, where=str(self.path))
        for key, theirs in begun.head().items():
            if theirs != mine[key]:
                raise BenchReportError(
                    f"{self.path}: begun with {key} {show(theirs)}, this run has {show(mine[key])}; use another path"
                )
        return list(begun.rows), finished


EMULATED = "none: FP8 emulated on the CPU"


def fingerprint_of(device: torch.device) -> Fingerprint:
    """What a time on this device depends on, except the layer.

    On a CPU FP8 is emulated, and the fingerprint says so instead of naming a GPU: such times are never merged with
    those of a GPU, and a policy made from them is refused on every GPU.
    """
    import torch

    if device.type == "cuda":
        stated = describe_gpu(torch.cuda.get_device_name(device))
        gpu, driver, triton = stated["gpu"], stated["driver"], stated["triton"]
    else:
        gpu, driver, triton = EMULATED, "none", version_of("triton") or "none"
    return Fingerprint(gpu, driver, str(torch.__version__), triton, __version__, commit())


@functools.cache
def commit() -> str:
    """The commit of a checkout, with `+changes` if files differ from it; without git, BITPLAN_COMMIT."""
    if stated := os.environ.get("BITPLAN_COMMIT"):
        return stated
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return "none"
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+changes' if changed else ''}" if head else "none"


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
