"""What the server of tests/processes.py imports once, so that no program forked from it does: all public names."""

from __future__ import annotations

import numba
import torch._dynamo  # noqa: F401  torch imports it with the first optimizer

import bitplan
import bitplan.cli.app
import bitplan.trees.distributed.fit

for name in bitplan.__all__:
    getattr(bitplan, name)

numba.njit(lambda number: number + 1)(1)  # its tables of types and functions are made with the first compiled function
