"""The compiled loops give what the definition gives, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bitplan.base.loops.jit import thread_count
from bitplan.formats import get_format
from bitplan.formats.dispatch import encode
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.rounding import round_columns, weights
from bitplan.rounding.error_compensation import InputHessian, compensate
from bitplan.rounding.layout import grid_of, layout_of, scales_of
from bitplan.rounding.round_columns import (
    SMALLEST_FOR_CPU,
    compiled_on_threads,
    is_compiled,
    loops_for,
    rounding_rows_of,
)
from bitplan.rounding.scale_search import GroupScales, ScaleLadder, candidates_of
from bitplan.rounding.weights import grid_of_groups

cpu_pieces = pytest.importorskip("bitplan.rounding.round_columns_cpu", exc_type=ImportError)


@pytest.mark.parametrize("fmt", ["int4_g32", "fp8_e4m3_row", "mxfp4", "iq4_nl_gguf"])
def test_the_compiled_loops_equal_the_definition(fmt: str) -> None:
    generator = torch.Generator().manual_seed(1)
    found, rows, width = get_format(fmt), 37, 16
    grid = grid_of_groups(found) if isinstance(found, GgufBlocks) else grid_of(found.element)
    assert grid is not None
    piece = torch.randn(rows, width, generator=generator)
    inputs = torch.randn(40, width, generator=generator)
    hessian = inputs.T @ inputs / 40
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    scales = torch.rand(rows, 5, generator=generator) / grid.high * 4
    scales[3] = 0
    steps, offsets, parts = scales[:, :2], torch.rand(rows, 2, generator=generator), torch.arange(width) // 8
    codes, errors = round_columns.round_piece(piece, factor, steps, offsets, parts, grid)
    again = cpu_pieces.round_piece(piece, factor, steps, offsets, parts, grid)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], errors)
    gradient = (piece - codes) @ hessian
    better = cpu_pieces.sweep_piece(gradient, codes, hessian, steps, parts, grid)
    plain = round_columns.sweep_piece(gradient, codes, hessian, steps, parts, grid)
    for ours, theirs in zip(better, plain, strict=True):
        assert torch.equal(ours, theirs)
    weights = torch.rand(width, generator=generator)
    for name, given in (("cost_of_scales", factor), ("weighted_cost", weights)):
        ours, theirs = (getattr(module, name)(piece, given, scales, grid) for module in (cpu_pieces, round_columns))
        assert torch.equal(ours, theirs), name


SCALED = ["mxfp4", "nvfp4", "int4_g32", "q4_0_gguf", "int8_g64", "int8_g128"]


@pytest.mark.parametrize("fmt", SCALED)
def test_candidates_of_a_scale_are_those_of_the_definition(fmt: str) -> None:
    """With zeros, and numbers whose scales are at either end of what is stored."""
    generator, found = torch.Generator().manual_seed(3), get_format(fmt)
    sizes = torch.logspace(-36 if found.power_of_two_scales else -44, 38, 400).unsqueeze(-1)  # exp2(-126) is not exact
    piece = torch.cat([torch.zeros(1, 16), torch.rand(400, 16, generator=generator) * sizes])
    grid, base = grid_of(found.element), torch.tensor(0.0123) if fmt == "nvfp4" else None
    assert grid is not None
    ladder = ScaleLadder(found, grid, base)
    plain, layout = torch.rand(len(piece), generator=generator), layout_of(found, (len(piece), 128))
    tried = torch.empty(len(piece), 1 + len(ladder.multiples))
    blocks = cpu_pieces
    multiples, is_power = np.array(ladder.multiples, np.float32), found.power_of_two_scales
    numbers = piece.numpy(), plain.numpy(), multiples, np.float32(grid.high), blocks.storage_of(found, base)
    blocks.candidates(*numbers, is_power, tried.numpy())
    assert torch.equal(tried, candidates_of(piece, plain, layout, ladder))


@pytest.mark.parametrize("fmt", SCALED)
def test_scaled_blocks_are_compensated_as_the_definition_does_it(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, found, rows, columns = torch.Generator().manual_seed(4), get_format(fmt), 19, 384
    matrix = torch.randn(rows, columns, generator=generator)
    matrix[4] = 0
    inputs = torch.randn(800, columns, generator=generator) * torch.rand(columns, generator=generator)
    plain, layout = encode(matrix, found), layout_of(found, (rows, columns))
    by = InputHessian(inputs.T @ inputs).factor(layout, "activation", 0.01, matrix.device, fmt)
    grid = grid_of(found.element)
    assert grid is not None
    given = by, scales_of(plain, layout), layout, ScaleLadder(found, grid, plain.base)
    with rounding_rows_of(torch.empty(SMALLEST_FOR_CPU)), compiled_on_threads(2):
        compiled = compensate(matrix, *given)
    monkeypatch.setattr(round_columns, "SMALLEST_FOR_CPU", 2**40)
    definition = compensate(matrix, *given)
    assert torch.equal(compiled.codes, definition.codes)
    assert torch.equal(compiled.scales, definition.scales)


def test_large_matrices_are_rounded_by_the_compiled_loops() -> None:
    side = math.isqrt(SMALLEST_FOR_CPU - 1) + 1
    assert loops_for(torch.empty(side, side)) is cpu_pieces
    assert loops_for(torch.empty(1, SMALLEST_FOR_CPU - 1)) is round_columns
    before = thread_count()
    with compiled_on_threads(before + 1):
        assert thread_count() == before + 1
    assert thread_count() == before


@pytest.mark.parametrize(
    ("fmt", "rows"), [("iq4_nl_gguf", 19), ("q4_1_gguf", 19), ("q2_k_gguf", 19), ("q4_k_gguf", 70)]
)
def test_blocks_of_groups_are_compensated_as_the_definition_does_it(fmt: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    found, columns = get_format(fmt), 512
    assert isinstance(found, GgufBlocks)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix[4] = 0
    inputs = torch.randn(800, columns, generator=generator) * torch.rand(columns, generator=generator)
    layout = layout_of(found, (rows, columns))
    by = InputHessian(inputs.T @ inputs).factor(layout, "activation", 0.01, matrix.device, fmt)
    given = matrix, by, found
    plain, compiled = (GroupScales.empty(matrix, found.layout) for _ in range(2))
    with rounding_rows_of(torch.empty(SMALLEST_FOR_CPU)), compiled_on_threads(2):
        assert is_compiled(matrix)
        codes = weights._compensate(*given, compiled)
    assert not is_compiled(matrix)
    assert torch.equal(codes, weights._compensate(*given, plain))
    for part in ("d", "dmin", "scales", "mins"):
        assert torch.equal(getattr(compiled, part), getattr(plain, part)), part
