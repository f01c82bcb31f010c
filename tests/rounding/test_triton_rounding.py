"""The loops of compensated rounding for GPUs give what the definition gives."""

from __future__ import annotations

import pytest
import torch

from bitplan.formats import get_format
from bitplan.formats.dispatch import decode
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.formats.gguf.layouts import LAYOUTS
from bitplan.formats.gguf.search import SearchBySums, TorchSums, search_blocks
from bitplan.rounding import error_compensation, round_columns, weights
from bitplan.rounding.layout import grid_of, layout_of
from bitplan.rounding.weights import grid_of_groups, round_with_report

triton_rounding = pytest.importorskip("bitplan.rounding.triton_rounding", exc_type=ImportError)
triton_group_search = pytest.importorskip("bitplan.formats.gguf.triton_group_search", exc_type=ImportError)


@pytest.mark.parametrize("fmt", ["int4_g32", pytest.param("mxfp4", marks=pytest.mark.long), "iq4_nl_gguf"])
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


BATCHED = ["nvfp4", "q5_0_gguf"]
SLOW = [
    "mxfp4",
    "int4_g32",
    "q4_0_gguf",
    "q8_0_gguf",
    "fp4_u8_g128",
    "iq4_nl_gguf",
    "q2_k_gguf",
    "q3_k_gguf",
    "q4_k_gguf",
]


@pytest.mark.parametrize("fmt", [*BATCHED, *(pytest.param(name, marks=pytest.mark.long) for name in SLOW)])
def test_batches_of_columns_equal_one_column_at_a_time(
    fmt: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, found = torch.Generator().manual_seed(2), get_format(fmt)
    cols = (found.layout.numbers if isinstance(found, GgufBlocks) else layout_of(found, (2, 256)).width) * 2
    inputs = torch.randn(4 * cols, cols, generator=generator)
    weight, hessian = torch.randn(2, cols, generator=generator), inputs.T @ inputs
    expected, report = round_with_report(weight, fmt, hessian=hessian, sweeps=1)
    for module in (round_columns, error_compensation, weights):
        monkeypatch.setattr(module, "in_batches", lambda _: True)
    ours, batched = round_with_report(weight.to(device), fmt, hessian=hessian.to(device), sweeps=1)
    assert batched.after == pytest.approx(report.after, rel=0.02)  # one code that falls elsewhere moves others
    assert (decode(ours).cpu() == decode(expected)).float().mean() > 0.9


@pytest.mark.parametrize(
    "fmt", ["q5_1_gguf", *(pytest.param(f"q{n}_k_gguf", marks=pytest.mark.long) for n in (2, 4, 6))]
)
def test_blocks_of_groups_have_the_bytes_of_the_definition(fmt: str, device: torch.device) -> None:
    layout = LAYOUTS[fmt]
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(2, layout.numbers, generator=generator)
    numbers[0, :40] = 0
    importance = torch.rand(layout.numbers, generator=generator)
    expected = search_blocks(numbers, importance, layout, SearchBySums(TorchSums()))
    ours = search_blocks(numbers.to(device), importance.to(device), layout, triton_group_search.TritonSearch())
    assert torch.equal(layout.pack(ours).cpu(), layout.pack(expected))
