"""How a fused product may be cut up: launches worth measuring, and one that is never far off."""

from __future__ import annotations

import triton

from bitplan.formats.encoded import Encoded
from bitplan.kernels.matmul.expert_routing import WIDEST_TILE, tile_rows
from bitplan.kernels.matmul.fused_many_rows import wide_candidates
from bitplan.kernels.matmul.fused_weights import MatmulLaunch

STEP = 128


def candidate_launches(weight: Encoded, rows: int) -> list[MatmulLaunch]:
    """Launches worth measuring for this many rows of x: those that came first somewhere on an H200."""
    if rows > WIDEST_TILE:
        return wide_candidates(weight, rows)
    tile = tile_rows(rows)
    if rows > 8:  # outputs, slices, split
        cuts = [(64, 4, 1), (32, 4, 1), (32, 2, 2)] if rows <= 16 else [(32, 4, 1), (32, 2, 2)]
    elif weight.fmt.packing is None:
        cuts = [(16, 4, 1), (32, 4, 1), (32, 2, 2), (64, 2, 1)]
    elif weight.fmt.packing.order == "low_first":
        cuts = [(32, 2, 4), (32, 2, 2), (64, 2, 1), (64, 2, 4)]
    else:
        cuts = [(64, 1, 8), (64, 2, 1), (32, 2, 2), (64, 2, 4)]
    return [
        MatmulLaunch(outputs, tile, STEP, slices, split, slices, 3, overlap=1)
        for outputs, slices, split in cuts
        if split == 1 or weight.shape[-1] >= 2 * split * slices * STEP
    ]


def default_launch(weight: Encoded, rows: int) -> MatmulLaunch:
    """A launch that is never far off: enough programs to fill the GPU, found on an H200."""
    if rows > WIDEST_TILE:
        return wide_candidates(weight, rows)[0]
    outputs, slices = (32, 4) if rows <= 16 else (32, 2)
    programs = triton.cdiv(weight.shape[-2], outputs) * triton.cdiv(rows, tile_rows(rows))
    split = 1
    while programs * split < 256 and split < 4 and weight.shape[-1] >= 4 * split * slices * STEP:
        split *= 2
    return MatmulLaunch(outputs, tile_rows(rows), STEP, slices, split, slices, 3, overlap=1)
