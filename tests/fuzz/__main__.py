"""python -m tests.fuzz: damaged files for every reader. `make fuzz` runs it.

Input NUMBER of a reader depends on the seed, the reader's name and that number alone. An input that fails is saved, and
`python -m tests.fuzz --again READER FILE` reads it once more.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.readers import READERS
from tests.fuzz.run import fuzz, read_again


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="damaged files in all")
    parser.add_argument("--seed", default="", help="any text; by default the time")
    parser.add_argument("--only", default="", help="readers whose name has this in it")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for inputs that fail")
    parser.add_argument("--again", nargs=2, metavar=("READER", "FILE"), help="read one saved input")
    given = parser.parse_args()
    if given.again:
        return read_again(given.again[0], Path(given.again[1]))
    chosen = [reader for reader in READERS if given.only in reader.name]
    seed = given.seed or str(int(time.time()))
    print(f"seed {seed}", flush=True)
    return fuzz(chosen, given.inputs, seed, given.failures)


if __name__ == "__main__":
    sys.exit(main())
