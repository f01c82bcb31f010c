"""How fast do the workers of a Dask cluster quantize, and are their bytes those of work alone? For docs/store.md.

    python benchmarks/cluster.py [--processes 1,2] [--numbers 33554432] [--output FILE]

A file of random weights is quantized alone and by local workers of one thread each. `rate` is numbers for a second of a
worker's processor time, `hours_671b` what 671 billion weights take on 64 such threads; the disk is not in it.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
from distributed import Client, LocalCluster

from bitplan.files.open_files import open_tensors, write_tensors
from bitplan.files.quantize_files import QuantizeOptions, quantize_file
from bitplan.files.tensor_file import TensorSpec

SHAPE, MIXTURE, THREADS = (2048, 4096), 671e9, 64
FORMATS = ("mxfp4", "int8_row", "q4_0_gguf", "q4_k_gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--numbers", type=int, default=2**25)
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "cluster.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, rows = Path(folder, "model.safetensors"), []
        count = max(1, arguments.numbers // (SHAPE[0] * SHAPE[1]))
        write_source(source, count)
        alone = {fmt: quantized(source, fmt, None) for fmt in FORMATS}
        for processes in map(int, arguments.processes.split(",")):
            with LocalCluster(n_workers=processes, threads_per_worker=1, dashboard_address=":0") as cluster:
                for fmt in FORMATS:
                    quantized(source, fmt, cluster.scheduler_address)  # its loops are compiled then
                    rows.append(measured(source, fmt, cluster, alone[fmt], processes, count * SHAPE[0] * SHAPE[1]))
                    print(rows[-1], flush=True)
    document = {
        "benchmark": "cluster",
        "machine": harness.machine("cpu"),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "settings": {"shape": SHAPE, "tensors": count, "threads": THREADS},
        "rows": rows,
    }
    harness.save("cluster", document, arguments.output)


def write_source(path: Path, count: int) -> None:
    specs = [TensorSpec.of(f"layers.{index}.weight", SHAPE, None, torch.bfloat16) for index in range(count)]
    with write_tensors(path, specs) as writer:
        for index, spec in enumerate(specs):
            writer.write(spec.name, torch.randn(SHAPE, generator=torch.Generator().manual_seed(index)).bfloat16())


def quantized(source: Path, fmt: str, address: str | None) -> bytes:
    output = source.with_name("out.safetensors")
    quantize_file(source, output, fmt, options=QuantizeOptions(dask=address))
    with open_tensors(output) as file:
        return b"".join(file.read(name).to_bytes() for name in file.specs)  # type: ignore[union-attr]


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(
    source: Path, fmt: str, cluster: LocalCluster, alone: bytes, processes: int, numbers: int
) -> dict[str, Any]:
    with Client(cluster) as client:
        before, began = sum(client.run(processor_seconds).values()), time.perf_counter()
        same = quantized(source, fmt, cluster.scheduler_address) == alone
        seconds, used = time.perf_counter() - began, sum(client.run(processor_seconds).values()) - before
    rate = numbers / used
    return {
        "format": fmt,
        "processes": processes,
        "same_bytes": same,
        "seconds": seconds,
        "worker_cpu_seconds": used,
        "rate": rate,
        "hours_671b": MIXTURE / rate / THREADS / 3600,
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
