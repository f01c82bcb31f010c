"""Boosted trees from rows that lie in several processes, on one machine or many.

    torchrun --nproc-per-node 2 examples/trees_distributed.py
    torchrun --nproc-per-node 2 examples/trees_distributed.py --check     compares with a fit in one process

On several machines, on each of them: torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint
first-machine:29400 examples/trees_distributed.py. Here every process makes its part of the table; in earnest it would
read its own files.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch.distributed as dist

from bitplan.trees import BoostedTreesClassifier, fit_distributed


def make_rows(first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows `first` to `stop` of an endless table: the same numbers, whoever makes them."""
    numbers = np.random.Philox(7)
    numbers.advance(first * 8 // 4)  # a row is 8 draws, Philox counts in fours
    x = np.random.Generator(numbers).random((stop - first, 8))
    return x, (x[:, 0] + x[:, 1] * x[:, 2] + 0.2 * x[:, 3] > 0.85).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--trees", type=int, default=20)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    first, stop = arguments.rows * rank // count, arguments.rows * (rank + 1) // count
    x, y = make_rows(first, stop)

    model = BoostedTreesClassifier(n_estimators=arguments.trees, gradient_precision="i16")
    started = time.perf_counter()
    done = fit_distributed(model, x, y)
    print(f"{done}, {time.perf_counter() - started:.2f} s", flush=True)

    if rank == 0 and arguments.check:
        alone = BoostedTreesClassifier(**model.get_params()).fit(*make_rows(0, arguments.rows))
        same = alone.to_lightgbm() == model.to_lightgbm()
        print(f"the same as one process: {'yes' if same else 'no'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
