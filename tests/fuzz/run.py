"""Gives damaged files to readers, in one process for each group of them, and says what went wrong.

A reader returns, or raises a BitplanError of one line; nothing else. It takes at most SECONDS of the processor and
MEMORY_BYTES more than the process had. What ends the process itself is a failure too, of the input it was reading.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from random import Random

from bitplan.base.errors import BitplanError
from tests.fuzz.changes import change
from tests.fuzz.readers import READERS, Reader

SECONDS = 5.0
MEMORY_BYTES = 2**28
LONGEST_MESSAGE = 1500
MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk takes longer than most readers
SHOWN = 10  # failures of one reader, each at another place


def fuzz(readers: list[Reader], inputs: int, seed: str, failures: Path) -> int:
    """Prints a line for each reader; the exit status is 1 where anything failed."""
    failed, left_out = 0, 0
    for group in dict.fromkeys(reader.group for reader in readers):
        members = [reader for reader in readers if reader.group == group]
        whole = sum(reader.share for reader in readers)
        shares = [round(inputs * reader.share / whole) for reader in members]
        with tempfile.TemporaryDirectory(prefix="fuzz-", dir=MEMORY_FOLDER) as folder:
            of_group, of_missing = _run_group(members, shares, seed, Path(folder), failures)
            failed, left_out = failed + of_group, left_out + of_missing
    more = f", {left_out} of readers whose libraries are missing" if left_out else ""
    print(f"{inputs - left_out} inputs, {failed} failures{more}" + (f"; see {failures}" if failed else ""))
    return int(failed > 0)


def _run_group(readers: list[Reader], shares: list[int], seed: str, folder: Path, failures: Path) -> tuple[int, int]:
    """How many inputs failed, and how many were left out; after one that ends the process another goes on."""
    failed, begin = 0, (0, 0)
    while True:
        sys.stdout.flush()
        place = Path(tempfile.mkdtemp(dir=folder))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                counts = _read_all(readers, shares, begin, seed, place, failures)
                (place / "counts").write_text(json.dumps(counts))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            more, left_out = json.loads((place / "counts").read_text())
            return failed + more, left_out
        if not (place / "current").exists():
            raise RuntimeError(f"no sound file could be made or read for {readers[0].group}")
        current = json.loads((place / "current").read_text().split("\n")[0])
        source = Path(current["path"])
        saved = _save(failures, current["reader"], seed, current["number"], source.read_bytes(), source.suffix)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        print(f"{current['reader']}: input {current['number']} ends the process by {how}; saved: {saved}")
        at = [reader.name for reader in readers].index(current["reader"])
        failed, begin = failed + 1 + current["failed"], (at, current["number"] + 1)


def _read_all(
    readers: list[Reader], shares: list[int], begin: tuple[int, int], seed: str, folder: Path, failures: Path
) -> tuple[int, int]:
    """Reads from an input of a reader on: (failures, inputs of readers whose libraries are not installed)."""
    warnings.simplefilter("error")
    prepared: list[dict[Path, bytes]] = []
    for number, reader in enumerate(readers):  # what is loaded late is loaded before memory is limited
        place = folder / str(number)
        place.mkdir()
        try:
            files = {path: path.read_bytes() for path in reader.make(place)}
            for path in files:
                reader.read(path)
                path.write_bytes(files[path])
        except ImportError as error:  # of bitplan's own, too, which say what to install
            print(f"{reader.name}: left out: {error}", flush=True)
            files = {}
        prepared.append(files)
    _limit_memory()
    failed = left_out = 0
    for at in range(begin[0], len(readers)):
        if not prepared[at]:
            left_out += shares[at]
            continue
        numbers = range(begin[1] if at == begin[0] else 0, shares[at])
        failed += _read_inputs(readers[at], prepared[at], numbers, seed, folder / "current", failures, failed)
    return failed, left_out


def _limit_memory() -> None:
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _read_inputs(
    reader: Reader, files: dict[Path, bytes], numbers: range, seed: str, current: Path, failures: Path, before: int
) -> int:
    outcomes: Counter[str] = Counter()
    places: set[str] = set()
    begin = time.process_time()
    note = os.open(current, os.O_RDWR | os.O_CREAT)
    for number in numbers:
        path, data = damaged(reader, files, seed, number)
        now = {"reader": reader.name, "number": number, "path": str(path), "failed": before + outcomes["failed"]}
        os.pwrite(note, json.dumps(now).encode() + b"\n", 0)
        path.write_bytes(data)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose signal ends the process
        outcome, place, message = _outcome(reader, path)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(files) > 1:
            path.write_bytes(files[path])
        outcomes[outcome] += 1
        if outcome == "failed" and place not in places and len(places) < SHOWN:
            places.add(place)
            saved = _save(failures, reader.name, seed, number, data, path.suffix)
            print(f"{reader.name}: input {number}: {place}: {message}; saved: {saved}", flush=True)
    os.close(note)
    took = time.process_time() - begin
    counted = ", ".join(f"{outcomes[name]} {name}" for name in ("read", "refused", "failed"))
    print(
        f"{reader.name}: {len(numbers)} inputs: {counted}; {1000 * took / max(len(numbers), 1):.1f} ms each", flush=True
    )
    return outcomes["failed"]


def damaged(reader: Reader, files: dict[Path, bytes], seed: str, number: int) -> tuple[Path, bytes]:
    rng = Random(f"{seed}/{reader.name}/{number}")
    path = rng.choice(list(files))
    return path, change(files[path], path.suffix, rng)


def _outcome(reader: Reader, path: Path) -> tuple[str, str, str]:
    """What came of one input: read, refused or failed; of a failure where it was, and its message."""
    try:
        reader.read(path)
    except BitplanError as error:
        message = str(error)
        try:
            length = len(message.encode())
        except UnicodeEncodeError:
            return "failed", f"a message that is not Unicode ({_where(error)})", repr(message[:200])
        if not message or any(letter in message for letter in "\n\r\0\x1b") or length > LONGEST_MESSAGE:
            return "failed", f"a message of {length} bytes, or with odd letters ({_where(error)})", repr(message[:200])
        return "refused", "", ""
    except Exception as error:
        return "failed", f"{type(error).__name__} ({_where(error)})", repr(str(error)[:200])
    return "read", "", ""


def _where(error: BaseException) -> str:
    """The innermost lines of bitplan and of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/bitplan/" in frame.filename][-1:] or frames[-1:]
    return ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours)


def _save(failures: Path, reader: str, seed: str, number: int, data: bytes, suffix: str = "") -> Path:
    failures.mkdir(parents=True, exist_ok=True)
    path = failures / f"{reader.replace(' ', '-').replace(':', '')}-{seed}-{number}{suffix}"
    path.write_bytes(data)
    return path


def read_again(name: str, source: Path) -> int:
    """One saved input, with the whole traceback."""
    reader = next(reader for reader in READERS if reader.name == name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        files = reader.make(Path(folder))
        path = next((path for path in files if path.suffix == source.suffix), files[0])
        shutil.copyfile(source, path)
        try:
            reader.read(path)
            print("read")
        except BitplanError as error:
            print(f"refused: {error}")
        except Exception:
            traceback.print_exc()
            return 1
    return 0
