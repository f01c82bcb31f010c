"""The shell: `bitplan VERB`. An error is one line on standard error; exit 0 fine, 1 findings, 2 usage or bad input."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from bitplan.base.errors import BitplanError
from bitplan.base.text import visible

INTERRUPTED = 130
# Parameters of the library that are called otherwise here; all others are `--` and their name.
_OPTIONS = {
    "fmt": "--format",
    "nbytes": "--bytes",
    "out": "--output",
    "part_bytes": "--split",
    "report_path": "--report",
    "target": "--for",
    "timings": "--timing",
}
_SWITCHED_OFF = {"chat": "--raw"}
# How often threads of torch's OpenMP look for work before they sleep: 0.5 ms. By itself it is over 10 ms after every
# loop, which beside other work is most of the time: 52 s of CPU for 5 s of quantizing.
SPINS = "10000"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:  # read once, when torch is imported
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; prints errors, returns the exit code."""
    import typer

    from bitplan.cli.show import StoppedVerbError

    command = _command()
    given = None if arguments is None else list(arguments)
    try:
        code = int(command.main(args=given, prog_name="bitplan", standalone_mode=False) or 0)
        return _interrupted() if code == INTERRUPTED else code  # newer typers turn Ctrl-C into a code
    except StoppedVerbError as stopped:
        return _fail(f"interrupted; {stopped}", code=INTERRUPTED)
    except (BitplanError, OSError, MemoryError) as error:
        return _fail(_one_line(error))
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Exception as error:
        # Since 0.20 typer contains its own copy of click; its usage errors are recognised by their method.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        message = format_message()
        if type(error).__name__ == "NoArgsIsHelpError":  # print the help; some versions have done so already
            print(message, end="\n" if message else "")
            return 2
        return _fail(" ".join(message.split()))


@functools.cache
def _command() -> Any:
    import typer

    from bitplan.cli.app import app

    return typer.main.get_command(app)


def _interrupted() -> int:
    return _fail(
        "interrupted; what was being written is as it was before, or new where it was complete", code=INTERRUPTED
    )


def _fail(message: str, code: int = 2) -> int:
    print(f"bitplan: {visible(message)}", file=sys.stderr)
    return code


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = error.with_settings(option_of) if isinstance(error, BitplanError) else str(error)
    return " ".join(text.split()) or type(error).__name__


def option_of(name: str, value: object) -> str:
    """A setting of the library's as one types it: `keep='w'` is `--keep w`."""
    if value is False:
        return _SWITCHED_OFF[name]
    flag = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
    return flag if value is None or value is True else f"{flag} {shlex.quote(str(value))}"
