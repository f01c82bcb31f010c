"""The shell: `bitplan VERB`. An error is one line on standard error; exit 0 fine, 1 findings, 2 usage or bad input."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bitplan.base.errors import BitplanError
from bitplan.base.errors import visible

INTERRUPTED = 130
# Parameters of the library that are called otherwise here; all others are `--` and their name.
_OPTIONS = {
    "fmt": "--format",
    "nbytes": "--bytes",
    "kinds": "--goal",
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
    words = None if arguments is None else list(arguments)
    try:
        code = int(command.main(args=words, prog_name="bitplan", standalone_mode=False) or 0)
        return _interrupted() if code == INTERRUPTED else code  # newer typers turn Ctrl-C into a code
    except StoppedVerbError as stopped:
        return _fail(f"interrupted; {stopped}", code=INTERRUPTED)
    except (BitplanError, OSError, MemoryError) as error:
        return _fail(_one_line(error, sys.argv[1:] if words is None else words))
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Exception as error:
        # Since 0.20 typer contains its own copy of click; its usage errors are recognised by their method.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        message = format_message()
        if message.startswith("No such command") and "Did you mean" not in message:
            message = message.removesuffix(".") + _verbs_there(sys.argv[1:] if words is None else words)
        if type(error).__name__ == "NoArgsIsHelpError":  # print the help; some versions have done so already
            print(message, end="\n" if message else "")
            return 2
        return _fail(" ".join(message.split()))


def _verbs_there(words: Sequence[str]) -> str:
    """The end of the error message for an unknown verb that resembles no other: the verbs that exist."""
    group: Any = _command()
    for word in words:
        if word not in getattr(group, "commands", {}):
            break
        group = group.commands[word]
    if "watch" in words:
        return "; `bitplan report RUN --live` shows a running job"
    return f"; there are {', '.join(name for name, command in group.commands.items() if not command.hidden)}"


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


def _one_line(error: BaseException, arguments: Sequence[str]) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is None:  # of os.getcwd
        return "the current folder is no longer there; go to one that is, and give the command again"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, BitplanError):
        text = error.with_settings(functools.partial(options_of, arguments=arguments))
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


def options_of(settings: Mapping[str, object], arguments: Sequence[str]) -> str:
    """Settings of the library's as options of the verb in `arguments`; those that it lacks, of a verb that has them."""
    typed = {_flag(name, value): option_of(name, value) for name, value in settings.items()}
    verb = _command()
    for word in arguments:
        if word not in getattr(verb, "commands", {}):
            break
        verb = verb.commands[word]
    lacking = typed.keys() - _flags(verb)
    shown = [option for flag, option in typed.items() if flag not in lacking]
    other = next((path for path, command in _verbs(_command(), "bitplan") if lacking <= _flags(command)), None)
    if lacking and other is not None:
        shown.append(" ".join([other, *(option for flag, option in typed.items() if flag in lacking)]))
    return ", ".join(shown)


def _flags(verb: Any) -> set[str]:
    return {flag for parameter in verb.params for flag in parameter.opts}


def _verbs(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every verb as one types it, those of groups and none of the version before."""
    for name, command in group.commands.items():
        if not command.hidden:
            yield f"{path} {name}", command
            yield from _verbs(command, f"{path} {name}") if hasattr(command, "commands") else ()


def _flag(name: str, value: object) -> str:
    return _SWITCHED_OFF[name] if value is False else _OPTIONS.get(name, f"--{name.replace('_', '-')}")


def option_of(name: str, value: object) -> str:
    """A setting of the library's as one types it: `keep='w'` is `--keep w`."""
    flag = _flag(name, value)
    return flag if value is None or isinstance(value, bool) else f"{flag} {shlex.quote(str(value))}"
