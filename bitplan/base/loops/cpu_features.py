"""What the CPU can do, as numba compiles for it: kernels choose their instructions and vector lengths by this.

numba says it, not the machine, because NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may name a smaller CPU; compiled code is
cached under the same description, so code for one CPU never runs on another.
"""

from __future__ import annotations

import functools

from numba.core.registry import cpu_target


@functools.cache
def features() -> frozenset[str]:
    """LLVM's names of the CPU's features, such as avx2, avx512f, f16c, neon, dotprod."""
    listed = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(each[1:] for each in listed.split(",") if each.startswith("+"))


def float_lanes() -> int:
    """How many float32 a register holds."""
    return 16 if "avx512f" in features() else 8 if "avx2" in features() else 4
