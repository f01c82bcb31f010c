"""How a fused product may be cut up: launches worth measuring, and one that is never far off."""

from __future__ import annotations

import triton

from bitplan.formats.encoded import Encoded
from bitplan.kernels.matmul.direct.products import direct_launch, runs_direct
from bitplan.kernels.matmul.expert_routing import WIDEST_TILE, tile_rows
from bitplan.kernels.matmul.fused_many_rows import wide_candidates
from bitplan.kernels.matmul.fused_weights import MatmulLaunch

STEP = 128
FEW_OUTPUTS = 4096  # up to which programs of 16 outputs are better than larger ones


def candidate_launches(weight: Encoded, rows: int) -> list[MatmulLaunch]:
    """Launches worth measuring for this many rows of x: those that came first somewhere on an H200."""
    tile = tile_rows(rows)
    if rows > 2 * WIDEST_TILE:
        return wide_candidates(weight, rows)
    if rows > WIDEST_TILE:  # two tiles, or one that is read from shared memory
        return [*_cut(weight, tile, [(32, 4, 1), (32, 2, 2)]), *wide_candidates(weight, rows)[:2]]
    if rows > 8:  # outputs, slices, split
        cuts = [(64, 4, 1), (32, 4, 1), (32, 2, 2)] if rows <= 16 else [(32, 4, 1), (32, 2, 2)]
        return [*_cut(weight, tile, cuts), *(_direct(weight, tile, [(16, 8, 3)]) if rows <= 16 else [])]
    if not runs_direct(weight.device):
        return _cut(weight, tile, [(32, 2, 4), (32, 2, 2), (64, 2, 1), (32, 4, 1)])
    nibbles = weight.fmt.packing is not None
    if weight.shape[-2] <= FEW_OUTPUTS:
        of_bytes = [] if nibbles else _cut(weight, tile, [(16, 4, 1)])
        return [*_direct(weight, tile, [(16, 16, 5), (16, 8, 5), (16, 4, 5)]), *of_bytes]
    if nibbles:
        cuts = [(32, 8, 3), (16, 8, 5), (16, 4, 5), (16, 4, 3)]
        return [*_direct(weight, tile, cuts), *_cut(weight, tile, [(64, 2, 1)])]
    return [*_direct(weight, tile, [(32, 8, 3), (16, 8, 5)]), *_cut(weight, tile, [(32, 4, 1), (16, 4, 1)])]


def _cut(weight: Encoded, tile: int, cuts: list[tuple[int, int, int]]) -> list[MatmulLaunch]:
    return [
        MatmulLaunch(outputs, tile, STEP, slices, split, slices, 3, overlap=1)
        for outputs, slices, split in cuts
        if split == 1 or weight.shape[-1] >= 2 * split * slices * STEP
    ]


def _direct(weight: Encoded, tile: int, cuts: list[tuple[int, int, int]]) -> list[MatmulLaunch]:
    """Of outputs, warps and stages; with fewer warps where there are not inputs for all; runs of two if there are."""
    if not runs_direct(weight.device):
        return []
    inputs = STEP if weight.fmt.packing is not None else STEP // 2
    most = 1 << max(0, (weight.shape[-1] // inputs).bit_length() - 1)
    launches = [
        direct_launch(outputs, tile, min(warps, most), stages, run=2 if 2 * warps <= most else 1)
        for outputs, warps, stages in cuts
    ]
    return list(dict.fromkeys(launches))


def default_launch(weight: Encoded, rows: int) -> MatmulLaunch:
    """A launch that is never far off: enough programs to fill the GPU, found on an H200."""
    if rows > 2 * WIDEST_TILE:
        return wide_candidates(weight, rows)[0]
    if rows <= 8 and runs_direct(weight.device):
        return candidate_launches(weight, rows)[0]
    outputs, slices = (32, 4) if rows <= 16 else (32, 2)
    programs = triton.cdiv(weight.shape[-2], outputs) * triton.cdiv(rows, tile_rows(rows))
    split = 1
    while programs * split < 256 and split < 4 and weight.shape[-1] >= 4 * split * slices * STEP:
        split *= 2
    return MatmulLaunch(outputs, tile_rows(rows), STEP, slices, split, slices, 3, overlap=1)
