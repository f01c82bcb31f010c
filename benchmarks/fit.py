"""fit against fixed formats of keys and values at equal bytes, and its predicted memory against a running process.

    python benchmarks/fit.py MODEL --text FILE [--context 1024] [--batch 2] [--room 26 45] [--output FILE]

For each `room`, megabytes for weights and cache, `bitplan fit` finds a plan for the memory that this is with workspace
and overhead; the joint plan, weights beside keys and values as they are, and beside 8 bits are measured on held-out
text. For each plan the model is then packed, loaded in a process of its own as `bitplan generate` does, and reads
`batch` prompts of the whole context, and makes four tokens: its highest resident memory is held against the prediction.
Timings are not taken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import commit, machine, save, versions

import bitplan
from bitplan.searching.fit import FIT, FitGoal, FitResult
from bitplan.searching.memory_probe import Reserve
from bitplan.searching.run import SearchOptions

FORMATS = ("q3_k_gguf", "q4_k_gguf", "q5_k_gguf", "q6_k_gguf", "q8_0_gguf", "bfloat16")
TOKENS = 4
RUN = """
import sys, torch, bitplan.cli.app
from bitplan.packed.language.generation import AUTO, load_for_running
from bitplan.packed.language.token_steps import Decoding
lm = load_for_running(sys.argv[1], inputs=AUTO)
batch, context, tokens = map(int, sys.argv[2:])
ids = torch.arange(batch * (context - tokens)).remainder(lm.vocabulary).reshape(batch, context - tokens)
decoding = Decoding(lm.model)
with torch.inference_mode():
    for _ in range(tokens):
        ids = decoding(ids).argmax(-1, keepdim=True)
lines = open("/proc/self/status").read().splitlines()
print(1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")))
"""


def peak_of(folder: Path, batch: int, context: int) -> int:
    words = [sys.executable, "-c", RUN, str(folder), str(batch), str(context), str(TOKENS)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])


def plans_of(result: FitResult) -> dict[str, float | None]:
    """KL of every plan; one that is the joint plan itself has its."""
    same = [said.partition(":")[0] for said in result.missing if said.endswith("joint plan")]
    known = {one.label: one.kl for one in result.rows}
    return known | dict.fromkeys(same, known["joint plan"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--room", type=float, nargs="+", default=[26.0, 45.0], help="megabytes for weights and cache")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="where the evidence stays, or is from before")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    reserve = Reserve(given.model, FitGoal(1, given.context, given.batch), given.folder, writes=True)
    reserved = reserve.at(given.context).nbytes
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch, "fit")
        for room in given.room:
            result = bitplan.fit(
                given.model,
                goal=FitGoal(reserved + int(room * 1e6), given.context, given.batch),
                text=given.text.read_text(),
                formats=FORMATS,
                out=folder,
                options=SearchOptions(windows=given.windows),
            )
            packed = Path(scratch, f"packed-{room:g}")
            bitplan.quantize_file(given.model, packed, result.plan)
            peak = peak_of(packed, given.batch, given.context)
            row = {
                "room_mb": room,
                "kv": str(result.kv),
                "plans": plans_of(result),
                "missing": result.missing,
                "weights_bytes": result.row.weights,
                "kv_bytes": result.row.kv,
                "reserved_bytes": result.probe.nbytes,
                "predicted_bytes": result.needed,
                "measured_bytes": peak,
                "gap": result.solution.gap,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
        found = (folder / FIT).read_text().replace(str(given.model), given.model.name)
    document = {
        "benchmark": "fit",
        "commit": commit(),
        "machine": machine("cpu"),
        "versions": versions(),
        "model": given.model.name,
        "context": given.context,
        "batch": given.batch,
    }
    name, page = f"fit_{given.model.stem.lower()}", {"fit": json.loads(found)}
    print(save(name, document | {"rows": rows}, given.output))
    print(save(f"{name}_page", document | page, given.output and given.output.with_stem(f"{given.output.stem}_page")))


if __name__ == "__main__":
    main()
