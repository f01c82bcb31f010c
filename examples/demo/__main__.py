"""Train, calibrate, plan, pack and boost in two minutes on a CPU, and write one page that shows all of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bitplan import BitplanError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("demo-out"), help="folder for the files")
    parser.add_argument("--fast", action="store_true", help="a little of everything, to see that it works")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same figures")
    parser.add_argument("--force", action="store_true", help="replace files that no demo wrote")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON and nothing else")
    given = parser.parse_args(arguments)
    try:
        import bitplan.trees  # noqa: F401 (first: it says in one line which library is missing)
        from examples.demo.run import run_demo

        result = run_demo(given.output, fast=given.fast, quiet=given.json, seed=given.seed, force=given.force)
    except BitplanError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo: interrupted; files that were written are whole", file=sys.stderr)
        return 130
    if given.json:
        print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
