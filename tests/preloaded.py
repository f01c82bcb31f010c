"""What the server of tests/processes.py imports once, so that no program or worker forked from it does."""

from __future__ import annotations

import atexit
import gc
import importlib
import os

import numba
import torch

gc.disable()  # imports leave little behind that a collection would find

import bitplan  # noqa: E402
import bitplan.cli.app  # noqa: E402
import bitplan.trees.distributed.fit  # noqa: E402
from bitplan.packed.machine import has_gpu_driver  # noqa: E402

for name in bitplan.__all__:
    getattr(bitplan, name)
transformers = importlib.import_module("transformers")  # after bitplan, which else registers its quantizer there
for name in ("LlamaForCausalLM", "GptOssForCausalLM", "Trainer"):
    getattr(transformers, name)

numba.njit(lambda number: number + 1)(1)  # its tables of types and functions are made with the first compiled function
if not has_gpu_driver():  # torch's compiler asks for the state of a GPU, which does not survive a fork
    torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1)).sum().backward()
    torch._dynamo.reset()

gc.freeze()  # what is in memory by now is shared, unless a collector of a forked process writes to it
gc.enable()
atexit.register(os._exit, 0)  # no tidying up, at which libraries complain of what is frozen
