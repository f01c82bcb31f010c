"""Which formats a runtime loads, and what else it asks of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bitplan.base.errors import did_you_mean
from bitplan.files.engines.targets import FORMATS, packed_bytes
from bitplan.formats import get_format
from bitplan.formats.input_formats import input_format, llama_cpp_input
from bitplan.searching.goal import SearchError


@dataclass(frozen=True)
class Target:
    """Candidates where none are asked for, and what the runtime takes.

    few_bits    candidates beside them, each where a weight may have fewer bits than this
    export      the files it reads (`bitplan export --to`), which say what it loads; None where it loads every format
    fused       whether q, k and v, and gate and up, must agree
    embeddings  whether embeddings may be packed
    streamed    weights cross to the device, block by block, rounded to nearest as they change: nothing else counts
    """

    name: str
    formats: tuple[str, ...]
    fused: bool
    export: str | None = None
    embeddings: bool = True
    streamed: bool = False
    few_bits: Mapping[str, float] = field(default_factory=dict)

    @property
    def packs_layers(self) -> bool:
        """Whether plans are run by bitplan's packed layers (`load_packed`): neither exported nor streamed."""
        return self.export is None and not self.streamed

    def loads(self, fmt: str) -> bool:
        return self.export is None or get_format(fmt).is_cast or fmt in FORMATS[self.export]

    def input_for(self, fmt: str) -> str | None:
        """What products with weights in a format round their inputs to in eight bits; None where they round none."""
        if get_format(fmt).is_cast or self.streamed:
            return None
        if self.export == "gguf":
            return llama_cpp_input(fmt)
        if self.export == "compressed-tensors":
            return fmt if fmt in ("int8_row", "fp8_e4m3_row") else None
        return input_format("int8") if self.export is None else None

    def nbytes(self, fmt: str, shape: tuple[int, ...]) -> int:
        """Bytes of a weight in the files that the runtime reads."""
        return packed_bytes(self.export, fmt, shape)


_K_QUANTS = ("q2_k_gguf", "q3_k_gguf", "q4_k_gguf", "q5_k_gguf", "q6_k_gguf")
_GGUF = (*_K_QUANTS, "iq4_xs_gguf", "iq4_nl_gguf", "q8_0_gguf")
# Vectors take long to encode: above these bits plans of a 26M llama lost less than 0.5% without them.
_VECTORS = {"iq2_xxs_gguf": 3.0, "iq2_s_gguf": 4.0, "iq3_xxs_gguf": 4.0, "iq3_s_gguf": 4.5}
_LEGACY = ("q4_0_gguf", "q4_1_gguf", "q5_0_gguf", "q5_1_gguf")
_STREAMED = ("mxfp4", "nvfp4", "int4_g32", "int8_row", "fp8_e4m3_row", "bfloat16")
TARGETS = {
    target.name: target
    for target in (
        Target(
            "bitplan", (*_GGUF, "mxfp4", "nvfp4", "int4_g32", "int8_row", "bfloat16"), fused=True, few_bits=_VECTORS
        ),
        Target("llama.cpp", (*_GGUF, *_LEGACY, "bfloat16"), fused=False, export="gguf", few_bits=_VECTORS),
        Target("vllm", _STREAMED, fused=True, export="compressed-tensors", embeddings=False),
        Target("mlx", ("mxfp4", "int4_g32", "int8_g64", "mxfp8_e4m3", "bfloat16"), fused=False, export="mlx"),
        Target("training", _STREAMED, fused=False, streamed=True),
    )
}


def target_of(name: str) -> Target:
    if name not in TARGETS:
        expected = f"one of {', '.join(TARGETS)}"
        raise SearchError(
            f"the target must be {expected}, got {name!r}{did_you_mean(name, TARGETS)}", settings={"target": None}
        )
    return TARGETS[name]


def candidates(target: Target, formats: Sequence[str] | None, bits: float | None = None) -> tuple[str, ...]:
    """The formats to search: those asked for, or all of the target's; `bits`: how many a weight may have."""
    if not formats:
        return (*(() if bits is None else few_bits(target, bits)), *target.formats)
    for name in formats:
        get_format(name)
        if not target.loads(name):
            loaded = FORMATS[target.export or ""]
            raise SearchError(f"{target.name} does not load {name}; it loads {', '.join(loaded)} and plain types")
    return tuple(dict.fromkeys(formats))


def few_bits(target: Target, bits: float) -> tuple[str, ...]:
    """The formats that a target's plans try only where a weight may have so few bits."""
    return tuple(fmt for fmt, most in target.few_bits.items() if bits < most)
