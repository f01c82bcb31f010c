"""Has torch's compiler (Inductor) call the functions of FP8 layers' operators past torch's dispatcher.

Importing it registers the lowerings of all operators that are defined; loading Inductor takes seconds, so the fakes of
the operators import it, when Inductor is loaded. Generated code stays in torch's cache on disk: the name `FUNCTIONS`,
the operators' names and their arguments may only be added to.
"""

from __future__ import annotations

import importlib

import torch

from bitplan.base.inductor_calls import call_operator
from bitplan.fp8.layers.linear_function import FUNCTIONS

_IMPORT = "from bitplan.fp8.layers.linear_function import FUNCTIONS as fp8_functions"

importlib.import_module("bitplan.fp8.layers.joined_mlp")  # which defines operators, too
for _name in FUNCTIONS:
    call_operator(getattr(torch.ops.bitplan, _name).default, _IMPORT, f"fp8_functions[{_name!r}]")
