"""Square tiles of float32 in registers, transposed: as many vectors as each has lanes."""

from __future__ import annotations

from typing import Any

from numba.core import cgutils

from bitplan.kernels.base.vectors import VectorWriter, define


def _transpose(writer: VectorWriter, tile: Any) -> Any:
    """Lanes and vectors whose numbers differ in one bit change places, bit after bit."""
    lanes = writer.kinds[0].count
    vectors = [writer.builder.extract_value(tile, place) for place in range(lanes)]
    bit = 1
    while bit < lanes:
        low = [lane if not lane & bit else lanes + (lane ^ bit) for lane in range(lanes)]
        high = [lane | bit if not lane & bit else lanes + lane for lane in range(lanes)]
        for place in range(lanes):
            if not place & bit:
                a, b = vectors[place], vectors[place | bit]
                vectors[place], vectors[place | bit] = writer.shuffle(a, b, low), writer.shuffle(a, b, high)
        bit *= 2
    return cgutils.pack_array(writer.builder, vectors)


def _times_plus(writer: VectorWriter, tile: Any, factor: Any, addend: Any) -> Any:
    builder, count = writer.builder, writer.kinds[0].count
    vectors = [builder.extract_value(tile, place) for place in range(count)]
    return cgutils.pack_array(builder, [builder.fadd(builder.fmul(each, factor), addend) for each in vectors])


# Tuples of float32 vectors: lane i of vector j is lane j of vector i before; each vector times one plus another.
transpose_tile = define(1, lambda tile: tile, _transpose)
times_plus = define(3, lambda tile, _factor, _addend: tile, _times_plus)
