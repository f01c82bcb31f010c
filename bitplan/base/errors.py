"""Defines every error bitplan raises on purpose, so that callers can catch one base class, and makes text safe to show.

A message is one line that says what was expected, what was found, where, and the next step. What a caller may set to
take that step is in `settings`, by the parameters' names: as text it is `keep='w'`, and the command line, which exits
with 2, writes its own option.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class BitplanError(Exception):
    """Base of all errors that bitplan raises on purpose.

    settings   parameters that the message's next step is about, with a value to give, or None to name them alone
    """

    def __init__(self, *args: Any, settings: Mapping[str, object] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.settings = dict(settings or {})

    def __str__(self) -> str:
        return self.with_settings(_as_parameters)

    def with_settings(self, spelled: Callable[[Mapping[str, object]], str]) -> str:
        """The message, and behind it the settings as `spelled` writes them, if it writes any."""
        settings = spelled(self.settings)
        return f"{super().__str__()} ({settings})" if settings else super().__str__()


def _as_parameters(settings: Mapping[str, object]) -> str:
    return ", ".join(name if value is None else f"{name}={value!r}" for name, value in settings.items())


class FormatError(BitplanError, ValueError):
    """A number format that does not exist, or cannot hold the tensor it was given."""


class NonFiniteError(FormatError):
    """NaN or infinity where a number was needed."""


class FileFormatError(BitplanError, ValueError):
    """A file that is truncated, contradicts itself, or is not what its name says."""


class PlanError(BitplanError, ValueError):
    """A plan that contradicts itself, or does not fit the tensors it is for."""


class PlanFileError(PlanError, FileFormatError):
    """A plan document that cannot be read."""


class ManifestError(PlanFileError):
    """A manifest that cannot be read, or does not fit the tensors it is for."""


class MissingLibraryError(BitplanError, ImportError):
    """An optional library that is not installed, too old, or cannot be imported."""


class StoreError(BitplanError, RuntimeError):
    """A WeightStore or model asked for something its state does not allow."""


class MissingFolderError(BitplanError, FileNotFoundError):
    """A file was to be written into a folder that does not exist."""


class MeasureError(BitplanError, ValueError):
    """Something that cannot be measured: no text, no tokenizer, logits that are not numbers."""


class ArgumentError(BitplanError, TypeError):
    """An argument of a wrong type, for example because two arguments were swapped."""


class StreamError(BitplanError, RuntimeError):
    """Streaming was asked for something that it cannot do.

    Its messages name the block and, inside a step, the step: among forty equal blocks there is no other clue. An error
    of a block's own forward keeps its type (callers catch torch.OutOfMemoryError) and gets block and step as a note.
    """


class TransferError(StreamError):
    """A block did not reach the device, or its gradients did not come back; begin_step starts afresh."""


class BlockNonFiniteError(StreamError, NonFiniteError):
    """A block computed NaN or infinity."""


class StreamStateError(StreamError, FileFormatError):
    """A state of streamed weights that cannot be read, or is of another model or optimizer; nothing was changed."""


class Finding(NamedTuple):
    """What a check reports without stopping: a code from its table, the tensor or rule it is about, a line of text."""

    code: str
    where: str
    message: str


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known ones, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


# ---- text that is shown ----------------------------------------------------------------------------------------------
# Text from files and other processes must not move a cursor, reverse text, end a line or fill the screen.


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 finding, 2 findings."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def visible(text: str, most: int | None = None) -> str:
    """Text with control characters, line ends, bidi overrides and other invisible characters written as escapes.

    most: characters of the text that are shown; where there are more, their number is.
    """
    if most is not None and len(text) > most:
        return f"{visible(text[:most])}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
