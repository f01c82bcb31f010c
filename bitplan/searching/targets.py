"""Which formats a runtime loads, and whether it takes the parts of a fused projection one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitplan.errors import did_you_mean
from bitplan.formats import get_format, list_formats
from bitplan.searching.errors import SearchError


@dataclass(frozen=True)
class Target:
    """Candidates where none are asked for; `fused` where q/k/v and gate/up must agree."""

    name: str
    formats: tuple[str, ...]
    fused: bool
    loads_others: bool = False  # whether formats beyond the usual candidates may be asked for


_GGUF = ("q2_k_gguf", "q3_k_gguf", "iq4_nl_gguf", "q4_k_gguf", "q5_k_gguf", "q6_k_gguf", "q8_0_gguf")
TARGETS = {
    target.name: target
    for target in (
        Target("bitplan", (*_GGUF, "mxfp4", "nvfp4", "int4_g32", "int8_row", "bfloat16"), True, True),
        Target("llama.cpp", (*_GGUF, "q4_0_gguf", "q4_1_gguf", "q5_0_gguf", "q5_1_gguf", "bfloat16"), fused=False),
        Target("vllm", ("mxfp4", "nvfp4", "int4_g32", "int8_row", "fp8_e4m3_row", "bfloat16"), fused=True),
        Target("mlx", ("mxfp4", "nvfp4", "mxfp8_e4m3", "bfloat16"), fused=False),
    )
}


def target_of(name: str) -> Target:
    """The runtime of this name, with those of its formats that this bitplan has."""
    if name not in TARGETS:
        raise SearchError(f"--for must be one of {', '.join(TARGETS)}, got {name!r}{did_you_mean(name, TARGETS)}")
    known = {fmt.name for fmt in list_formats()}
    target = TARGETS[name]
    return Target(name, tuple(each for each in target.formats if each in known), target.fused, target.loads_others)


def candidates(target: Target, formats: Sequence[str] | None) -> tuple[str, ...]:
    """The formats to search among: those asked for, which the target must be able to load, or all of its own."""
    if not formats:
        return target.formats
    for name in formats:
        get_format(name)
        if name not in target.formats and not target.loads_others:
            raise SearchError(f"{target.name} does not load {name}; it loads {', '.join(target.formats)}")
    return tuple(dict.fromkeys(formats))
