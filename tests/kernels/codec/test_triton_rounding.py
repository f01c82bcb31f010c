"""The loops of compensated rounding for GPUs give what the definition gives."""

from __future__ import annotations

import pytest
import torch

from bitplan.formats import get_format
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.store.rounding import round_columns
from bitplan.store.rounding.code_grids import grid_of
from bitplan.store.rounding.group_blocks import grid_of_groups

triton_rounding = pytest.importorskip("bitplan.kernels.codec.triton_rounding", exc_type=ImportError)


@pytest.mark.parametrize("fmt", ["int4_g32", "mxfp4", "iq4_nl_gguf"])
def test_the_loops_equal_the_definition(fmt: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    found, rows, width = get_format(fmt), 4, 12
    grid = grid_of_groups(found) if isinstance(found, GgufBlocks) else grid_of(found.element)
    assert grid is not None
    piece = torch.randn(rows, width, generator=generator)
    inputs = torch.randn(40, width, generator=generator)
    hessian = inputs.T @ inputs / 40
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    scales = torch.rand(rows, 5, generator=generator) / grid.high * 4
    scales[3] = 0
    steps, offsets, parts = scales[:, :2], torch.rand(rows, 2, generator=generator), torch.arange(width) // 6
    weights = torch.rand(width, generator=generator)
    rounded = round_columns.round_piece(piece, factor, steps, offsets, parts, grid)
    gradient = (piece - rounded[0]) @ hessian
    calls = {
        "round_piece": (piece, factor, steps, offsets, parts, grid),
        "sweep_piece": (gradient, rounded[0], hessian, steps, parts, grid),
        "cost_of_scales": (piece, factor, scales, grid),
        "weighted_cost": (piece, weights, scales, grid),
    }
    for name, given in calls.items():
        moved = [each.to(device) if isinstance(each, torch.Tensor) else each for each in given]
        ours, theirs = getattr(triton_rounding, name)(*moved), getattr(round_columns, name)(*given)
        ours, theirs = ((each,) if isinstance(each, torch.Tensor) else each for each in (ours, theirs))
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.cpu(), two, msg=lambda text, name=name: f"{name}: {text}")
