"""The README's demo table: `bitplan demo`, recorded with the machine it ran on.

python benchmarks/demo.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import harness

from bitplan.cli.demo import run_demo


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = run_demo(Path(folder))
    head = {
        "benchmark": "demo",
        "machine": harness.machine("cpu"),
        "versions": harness.versions(),
        "commit": harness.commit(),
    }
    print(f"written: {harness.save('demo', head | result, None).name}")


if __name__ == "__main__":
    main()
