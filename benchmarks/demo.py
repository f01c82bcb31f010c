"""The README's demo table: `make demo`, recorded with the machine it ran on and the processor time it took.

python benchmarks/demo.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import harness

sys.path.insert(0, str(harness.ROOT))
from examples.demo.run import run_demo

RESULT = ("seed", "weights", "steps", "train_seconds", "formats", "trees")


def main() -> None:
    started, used = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        figures = run_demo(Path(folder))
    head = {
        "benchmark": "demo",
        "machine": harness.machine("cpu"),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "demo_s": round(time.perf_counter() - started, 1),
        "demo_cpu_s": round(time.process_time() - used, 1),
    }
    moves = [f"{move['layer']} {move['before']} -> {move['after']}" for move in figures["training"]["moves"]]
    result = {key: figures[key] for key in RESULT} | {"moves": moves}
    print(f"written: {harness.save('demo', head | result, None).name}")


if __name__ == "__main__":
    main()
