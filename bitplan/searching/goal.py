"""What a plan is to reach: a size, a distance from the model, a speed, or several of them at once.

What a search refuses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from bitplan.base.errors import BitplanError, FileFormatError
from bitplan.base.hardware import read_size

# ---- errors ----------------------------------------------------------------------------------------------------------


class SearchError(BitplanError, ValueError):
    """A model, text or set of formats that cannot be searched."""


class GoalError(SearchError):
    """A goal that no plan reaches; the message has the nearest one that some plan does."""


class EvidenceFileError(SearchError, FileFormatError):
    """An evidence file that cannot be read, or is of another model, text, formats or version."""


# ---- goal ------------------------------------------------------------------------------------------------------------

MEAN, WORST = "mean", "worst"
Kinds = str | Sequence[float]


def check_kinds(kinds: Kinds) -> None:
    """Raise where `kinds` is neither "mean", "worst" nor shares of the kinds of text."""
    shares = () if isinstance(kinds, str) else kinds
    if isinstance(kinds, str) and kinds not in (MEAN, WORST):
        raise GoalError(f"of several kinds of text mean, worst or shares as 0.7:0.3 count, got {kinds!r:.60}")
    if any(not 0 <= share < _FAR_TOO_LARGE for share in shares) or (shares and not sum(shares)):
        raise GoalError(f"shares of kinds of text are numbers from 0 and not all 0, got {list(shares)}")


def parse_kinds(text: str) -> Kinds:
    """Read how kinds of text count: "mean", "worst", or shares in the order of the texts, "0.7:0.3"."""
    if re.fullmatch(r"[0-9.]+(:[0-9.]+)+", text) is None:
        check_kinds(text)
        return text
    try:
        return tuple(float(share) for share in text.split(":"))
    except ValueError:
        raise GoalError(f"expected shares of kinds of text such as 0.7:0.3, got {text[:60]!r}") from None


def kinds_document(kinds: Kinds) -> dict[str, Any]:
    """The entry "kinds" of a goal's document; empty for the default, the mean of all kinds."""
    return {} if kinds == MEAN else {"kinds": kinds if isinstance(kinds, str) else list(kinds)}


def kinds_text(kinds: Kinds) -> str:
    if isinstance(kinds, str):
        return "the worst kind of text counts" if kinds == WORST else ""
    return f"kinds of text count {':'.join(map('{:g}'.format, kinds))}"


def aims_of(kinds: Kinds, names: Iterable[str]) -> list[dict[str, float]]:
    """The weighted sums of losses to minimise: each maps kinds of text to shares, and the largest of the sums counts.

    An empty list for the default, the mean of all kinds; an error if `kinds` does not fit the text's `names` of kinds.
    """
    names_of_kinds = list(dict.fromkeys(names))
    if kinds == MEAN:
        return []
    count = 2 if isinstance(kinds, str) else len(kinds)
    if len(names_of_kinds) < 2 or (not isinstance(kinds, str) and len(names_of_kinds) != count):
        raise GoalError(
            f"{kinds_text(kinds)}, and the text has {len(names_of_kinds) or 1} of them: give as many texts",
            settings={"kinds": MEAN},
        )
    if isinstance(kinds, str):
        return [{name: 1.0} for name in names_of_kinds]
    return [{name: share / sum(kinds) for name, share in zip(names_of_kinds, kinds, strict=True)}]


WINDOWS = 32  # of text for a search's statistics, where nobody says how many
COUNTED = 1000  # weights in one step of progress
Advance = Callable[[int, str], None]
# What shows progress: called with what is done and how many steps it has, gives what to call for each.
Stage = Callable[[str, int], AbstractContextManager[Advance]]


class Moment(NamedTuple):
    """Seconds on the clock of the machine, and seconds that this process has computed."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())


_FAR_TOO_LARGE = 1e100  # and infinity: times the weights of a model this would be no whole number


@contextmanager
def no_stage(_what: str, _total: int) -> Iterator[Advance]:
    yield lambda _count, _label: None


@dataclass(frozen=True)
class Goal:
    """Every limit that is given holds; the plan is the least harmful of those within them.

    bits      bits a weight, over all tensors of the model, scales included
    nbytes    bytes of all tensors
    max_kl    nats a token from the model; alone it asks for the fewest bytes
    faster    times BF16's speed, by times measured at `rows` rows
    kinds     of text of several kinds what counts: "mean", "worst", or how much each does, in their order
    host      bytes in the host's memory, where a plan is for two; then `nbytes` are those on the GPU
    us        microseconds of all groups at `rows` rows; with `max_kl` instead, the plan is the fastest within it
    """

    bits: float | None = None
    nbytes: int | None = None
    max_kl: float | None = None
    faster: float | None = None
    rows: int = 1
    kinds: Kinds = MEAN
    host: int | None = None
    us: float | None = None

    def __post_init__(self) -> None:
        check_kinds(self.kinds)
        limits = {"bits": self.bits, "nbytes": self.nbytes, "max_kl": self.max_kl, "faster": self.faster}
        if all(value is None for value in limits.values()):
            some = {"bits": 4.5, "nbytes": 6_000_000_000, "max_kl": 0.01, "faster": 1.5}
            raise GoalError("a search needs a goal, one of these or several", settings=some)
        for name, value in limits.items():
            if value is not None and not 0 < value < _FAR_TOO_LARGE:
                text = f"the goal must be above 0 and below {_FAR_TOO_LARGE:g}, got {value}"
                raise GoalError(text, settings={name: None})
        if self.rows < 1:
            raise GoalError(f"the goal needs 1 row or more, got {self.rows}", settings={"rows": None})
        if self.kinds != MEAN and self.max_kl is not None:
            text = "a limit of KL holds for all text together; of single kinds a size or speed is the goal"
            raise GoalError(text, settings={"max_kl": None, "kinds": None})

    def most_bytes(self, numbers: int) -> int | None:
        """The tighter of the two limits of size; `numbers` are the weights of the model."""
        limits = [int(self.bits * numbers / 8)] if self.bits is not None else []
        limits += [self.nbytes] if self.nbytes is not None else []
        return min(limits) if limits else None

    @property
    def asks_for_fewest_bytes(self) -> bool:
        """Whether the goal limits only the KL, so that the plan of the fewest bytes within it is sought."""
        return self.bits is None and self.nbytes is None and self.faster is None

    @property
    def asks_for_least_time(self) -> bool:
        """Whether the fastest plan is sought whose KL is within `max_kl`, over two memories."""
        return self.host is not None and self.us is None and self.max_kl is not None

    @property
    def is_timed(self) -> bool:
        """Whether the times of formats count."""
        return self.faster is not None or self.host is not None

    def to_dict(self) -> dict[str, Any]:
        limits = {"bits": self.bits, "bytes": self.nbytes, "max_kl": self.max_kl, "faster": self.faster}
        document: dict[str, Any] = {key: value for key, value in limits.items() if value is not None}
        document |= {"rows": self.rows} if self.faster is not None else {}
        return document | kinds_document(self.kinds)

    def __str__(self) -> str:
        words = [
            f"{self.bits:g} bits a weight" if self.bits is not None else "",
            f"{self.nbytes:,} bytes" if self.nbytes is not None else "",
            f"KL of at most {self.max_kl:g} nats" if self.max_kl is not None else "",
            f"{self.faster:g} times BF16's speed at {self.rows} rows" if self.faster is not None else "",
            kinds_text(self.kinds),
        ]
        return ", ".join(filter(None, words))


def parse_bytes(text: str, setting: str = "nbytes") -> int:
    """6GB, 900 MB, 1.5GiB or a plain number of bytes; errors say what it is of."""
    size = read_size(text)
    if size is None:
        text = text[:40]
        raise GoalError(f"expected a size such as 6GB, 900MB or 1.5GiB, got {text!r}", settings={setting: None})
    return size


def parse_tokens(text: str) -> int:
    """Read a number of tokens: "32k" is 32768; "1m", or a plain number."""
    match = re.fullmatch(r"([0-9]{1,12})\s*([kKmM]?)", text.strip())
    count = 0 if match is None else int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]
    if count < 2:
        raise GoalError(
            f"expected a number of tokens, 2 or more, such as 8192 or 32k, got {text[:40]!r}",
            settings={"context": None},
        )
    return count
