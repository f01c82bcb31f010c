"""What a machine lacks and what that costs, for `bitplan doctor`. Needs no torch: the caller gives the facts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

CPU_TORCH = "install torch's CPU build as pytorch.org's selector shows; bitplan leaves an installed torch alone"
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
_FOR_LIBRARY = {
    "scikit-learn": "no boosted trees and no `bitplan demo`",
    "transformers": "no perplexity of language models, no gpt-oss models, no Trainer callback",
    "accelerate": "language models in GGUF files are not read",
    "lightning": "no Lightning callback",
    "tensorboard": "no TensorBoard scalars",
    "lightgbm": "the benchmarks of trees have nothing to compare with",
}


@dataclass(frozen=True)
class Lack:
    """Something that this machine lacks, what that costs, and what to do, if anything can be done."""

    what: str
    costs: str
    next: str | None = None


def find_lacks(
    *,
    has_gpu: bool,
    has_triton: bool,
    has_cuda_libraries: bool,
    packed_refused: str | None,
    missing: Collection[tuple[str, str]],
    cpu_flags: Collection[str] | None,
) -> list[Lack]:
    """What is missing: hardware first, then libraries.

    has_cuda_libraries  gigabytes that torch's CUDA build brings along
    packed_refused    why the CPU's products with packed weights do not run here
    missing             (library, extra that brings it)
    cpu_flags           None where the machine does not say
    """
    lacks = []
    if not has_gpu:
        costs = "no Triton kernels; FP8 is emulated (the same numbers, no speed); streaming is simulated"
        lacks.append(Lack("a GPU", costs, CPU_TORCH if has_cuda_libraries else None))
    elif not has_triton:
        costs = "packed layers decode whole matrices on the GPU, and FP8 layers are refused"
        lacks.append(Lack("Triton", costs, "pip install triton"))
    if cpu_flags is not None and not _BF16_FLAGS & set(cpu_flags):
        lacks.append(Lack("bfloat16 products in this CPU", "models in bfloat16 run slowly on it; load them as float32"))
    if packed_refused is not None:
        costs = f"packed layers decode their matrices on this CPU ({packed_refused})"
        lacks.append(Lack("products with packed weights on this CPU", costs))
    for library, extra in missing:
        costs = _FOR_LIBRARY.get(library, f"what bitplan[{extra}] is for")
        lacks.append(Lack(library, costs, f"pip install 'bitplan[{extra}]'"))
    return lacks


def cpu_flags() -> set[str] | None:
    """The processor's features, as Linux names them; None on other systems."""
    place = Path("/proc/cpuinfo")
    if not place.is_file():
        return None
    lines = (line.partition(":") for line in place.read_text().splitlines())
    return next((set(words.split()) for key, _, words in lines if key.strip().lower() in ("flags", "features")), None)
