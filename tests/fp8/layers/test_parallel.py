"""Divided layers against whole ones, in two real processes over gloo; processes that disagree, and one that dies."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from bitplan.fp8.layer_settings import Fp8LayerError, Fp8Recipe, GemmChoice
from bitplan.fp8.layers.grouped_linear import GroupedLinear
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear
from bitplan.fp8.layers.parallel import (
    ColumnParallel,
    ExpertParallel,
    ParallelError,
    RowParallel,
)

PROCESSES = 2
INPUTS, OUTPUTS, TOKENS = 256, 512, 24


def in_processes(work: Callable[[int], None], folder: Path) -> None:
    """Run `work(rank)` in two processes; an error in one is an error here."""
    arguments = (work, str(folder / "store"))
    multiprocessing.start_processes(_one_process, arguments, nprocs=PROCESSES, start_method="forkserver")


def _one_process(rank: int, work: Callable[[int], None], store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=60)
    )
    work(rank)
    dist.barrier()
    dist.destroy_process_group()


def close(result: Tensor | None, expected: Tensor | None, limit: float) -> None:
    assert result is not None
    assert expected is not None
    assert result.shape == expected.shape
    error, size = (result - expected).double().norm(), expected.double().norm()
    assert error <= limit * size, f"{error / size}"


def whole(recipe: str, kind: type = Fp8Linear) -> nn.Module:
    """The same layer in every process, whose shares differ in magnitude, so that shares have maxima of their own."""
    torch.manual_seed(3)
    if recipe == "bf16":
        layer: nn.Module = nn.Linear(INPUTS, OUTPUTS, bias=False)
    else:
        layer = kind(INPUTS, OUTPUTS, bias=False, recipe=Fp8Recipe(recipe))
    with torch.no_grad():
        layer.weight[OUTPUTS // 2 :] *= 3
        layer.weight[:, INPUTS // 2 :] *= 5
    return layer


def share(layer: nn.Module, rank: int, axis: int, kind: type = Fp8Linear) -> nn.Module:
    weight = layer.weight.detach().chunk(PROCESSES, axis)[rank].clone()
    if isinstance(layer, Fp8Linear):
        made: nn.Module = kind(weight.shape[1], weight.shape[0], bias=False, recipe=layer.recipe)
    else:
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight)
    return made


def numbers() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, dy = torch.randn(TOKENS, INPUTS, generator=generator), torch.randn(TOKENS, OUTPUTS, generator=generator)
    x[:, : INPUTS // 2] *= 7
    dy[:, : OUTPUTS // 2] *= 11
    return x, dy


def ran(layer: nn.Module, x: Tensor, dy: Tensor, *more: Tensor) -> tuple[Tensor, Tensor | None]:
    x = x.clone().requires_grad_()
    y = layer(x, *more)
    y.backward(dy)
    return y.detach(), x.grad


# ---- scenarios, each run in both processes ---------------------------------------------------------------------------


def divide_by_columns(rank: int) -> None:
    x, dy = numbers()
    for recipe, limit in (("bf16", 1e-6), ("tensorwise", 1e-6), ("blockwise", 1e-6), ("rowwise", 0.06)):
        layer = whole(recipe)
        local = ColumnParallel(share(layer, rank, 0))
        (y, dx), dy_own = ran(layer, x, dy), dy.chunk(PROCESSES, 1)[rank]
        y_own, dx_own = ran(local, x, dy_own)
        close(y_own, y.chunk(PROCESSES, 1)[rank], limit)
        close(dx_own, dx, limit)
        close(local.local.weight.grad, layer.weight.grad.chunk(PROCESSES, 0)[rank], limit)
        if recipe == "tensorwise":  # agreeing is what makes them equal
            # Scales are powers of two, so shares that differ little in size round alike either way: here they do not.
            layer.weight.grad = None
            uneven = torch.cat([dy.chunk(PROCESSES, 1)[0], dy.chunk(PROCESSES, 1)[1] * 2.0**-13], 1)
            ran(layer, x, uneven)
            expected = layer.weight.grad.chunk(PROCESSES, 0)[rank]
            for agree in (True, False):
                local = ColumnParallel(share(layer, rank, 0), agree=agree)
                ran(local, x, uneven.chunk(PROCESSES, 1)[rank])
                error = (local.local.weight.grad - expected).norm() / expected.norm()
                assert error > 1e-3 if rank == 1 and not agree else error < 1e-6


def divide_by_rows(rank: int) -> None:
    x, dy = numbers()
    for recipe, limit in (("bf16", 1e-6), ("tensorwise", 1e-6), ("blockwise", 1e-6), ("rowwise", 0.06)):
        layer = whole(recipe)
        bias = nn.Parameter(torch.arange(OUTPUTS) / OUTPUTS)
        local = RowParallel(share(layer, rank, 1), bias=bias)
        y, dx = ran(layer, x, dy)
        y_own, dx_own = ran(local, x.chunk(PROCESSES, 1)[rank], dy)
        close(y_own, y + bias.detach(), limit)
        close(dx_own, dx.chunk(PROCESSES, 1)[rank], limit)
        close(local.local.weight.grad, layer.weight.grad.chunk(PROCESSES, 1)[rank], limit)
        close(bias.grad, dy.sum(0), 1e-6)


def divide_a_norm(rank: int) -> None:
    x, dy = numbers()
    layer = whole("blockwise", Fp8NormLinear)
    local = ColumnParallel(share(layer, rank, 0, Fp8NormLinear))
    (y, dx), (y_own, dx_own) = ran(layer, x, dy), ran(local, x, dy.chunk(PROCESSES, 1)[rank])
    close(y_own, y.chunk(PROCESSES, 1)[rank], 1e-6)
    close(dx_own, dx, 1e-5)
    close(local.local.norm.weight.grad, layer.norm.weight.grad, 1e-5)
    apart = nn.Sequential(nn.RMSNorm(INPUTS), whole("bf16"))
    local = ColumnParallel(nn.Sequential(nn.RMSNorm(INPUTS), share(whole("bf16"), rank, 0)))
    (_, dx), (_, dx_own) = ran(apart, x, dy), ran(local, x, dy.chunk(PROCESSES, 1)[rank])
    close(dx_own, dx, 1e-5)
    close(local.local[0].weight.grad, apart[0].weight.grad, 1e-5)


class Mlp(nn.Module):
    def __init__(self, experts: int, ffn: int = 128) -> None:
        super().__init__()
        torch.manual_seed(5)
        recipe = Fp8Recipe("tensorwise")
        self.fc1 = GroupedLinear(experts, 128, ffn, recipe=recipe)
        self.fc2 = GroupedLinear(experts, ffn, 128, recipe=recipe)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x, counts)), counts)


def spread_experts(rank: int) -> None:
    """Four experts, two in each process; the tokens of both meet at an expert, so its scale is that of all of them."""
    routings = [[[3, 0, 9, 1], [0, 0, 5, 0]], [[0, 0, 0, 0], [0, 20, 0, 0]]]
    for counts in routings:
        generator = torch.Generator().manual_seed(6)
        xs = [torch.randn(sum(own), 128, generator=generator) * (1 + 9 * at) for at, own in enumerate(counts)]
        dys = [torch.randn(sum(own), 128, generator=generator) for own in counts]
        layer, local = Mlp(4), Mlp(2)
        for fc in ("fc1", "fc2"):
            own = getattr(layer, fc).weight.detach()[2 * rank : 2 * rank + 2].clone()
            getattr(local, fc).weight = nn.Parameter(own)
        ids = torch.cat([torch.arange(4).repeat_interleave(torch.tensor(own)) for own in counts])
        order = ids.argsort(stable=True)
        y, dx = ran(layer, torch.cat(xs)[order], torch.cat(dys)[order], torch.tensor(counts).sum(0))
        place = order.argsort()
        sizes = [len(x) for x in xs]
        y_own, dx_own = ran(ExpertParallel(local), xs[rank], dys[rank], torch.tensor(counts[rank]))
        close(y_own, y[place].split(sizes)[rank], 1e-6)
        close(dx_own, dx[place].split(sizes)[rank], 1e-6)
        for fc in ("fc1", "fc2"):
            expected = getattr(layer, fc).weight.grad[2 * rank : 2 * rank + 2]
            close(getattr(local, fc).weight.grad, expected, 1e-6)
    with pytest.raises(Fp8LayerError, match="must have all 4 experts of 2 processes"):
        ExpertParallel(local)(xs[rank], torch.tensor([1, 2]))


def divide_the_experts_themselves(rank: int) -> None:
    """Expert-tensor parallel: fc1 by columns, fc2 by rows, blockwise, whose scales do not depend on it."""
    torch.manual_seed(7)
    recipe = Fp8Recipe("blockwise")
    fc1, fc2 = (GroupedLinear(3, *sizes, recipe=recipe) for sizes in ((128, 256), (256, 128)))
    half1, half2 = (GroupedLinear(3, *sizes, recipe=recipe) for sizes in ((128, 128), (128, 128)))
    half1.weight = nn.Parameter(fc1.weight.detach().chunk(2, 1)[rank].clone())
    half2.weight = nn.Parameter(fc2.weight.detach().chunk(2, 2)[rank].clone())
    counts, x = torch.tensor([5, 0, 30]), torch.randn(35, 128)
    dy = torch.randn(35, 128)
    column, row = ColumnParallel(half1), RowParallel(half2)

    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return row(torch.relu(column(x, counts)), counts)

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fc2(torch.relu(fc1(x, counts)), counts)

    for one, other in zip(ran(Both(), x, dy), ran(Whole(), x, dy), strict=True):
        close(one, other, 1e-5)
    close(half1.weight.grad, fc1.weight.grad.chunk(2, 1)[rank], 1e-5)


def everything(rank: int) -> None:
    divide_by_columns(rank)
    divide_by_rows(rank)
    divide_a_norm(rank)
    spread_experts(rank)
    divide_the_experts_themselves(rank)


def call_often(layer: nn.Module) -> None:
    for _ in range(100):  # the first may still find what the other process left in the pipe
        layer(torch.ones(4, 16))


def disagree_and_die(rank: int) -> None:
    recipe = Fp8Recipe()
    with pytest.raises(ParallelError, match=r"out_features differs, got \[16, 32\] by rank"):
        ColumnParallel(Fp8Linear(16, 16 * (1 + rank), recipe=recipe))
    with pytest.raises(ParallelError, match=r"recipe or type differs, processes \[1\] differ from process 0"):
        RowParallel(Fp8Linear(16, 16, False, recipe=recipe, gemms=GemmChoice.all(("rowwise", "bf16")[rank])))
    with pytest.raises(ParallelError, match=r"num_experts differs, got \[1, 2\]"):
        ExpertParallel(GroupedLinear(1 + rank, 16, 16, recipe=recipe))
    with pytest.raises(Fp8LayerError, match="would add the bias"):
        RowParallel(Fp8Linear(16, 16, recipe=recipe))
    layer = RowParallel(Fp8Linear(16, 16, False, recipe=recipe))
    layer(torch.ones(4, 16))
    if rank == 1:
        os._exit(0)  # as a process that is killed: nothing is closed in good order
    with pytest.raises(ParallelError, match=r"process 0 of 2 failed at .*another process of the group has ended"):
        call_often(layer)
    os._exit(0)


def everything_and_then_die(rank: int) -> None:
    """In the same processes: to start one takes as long as all that it does."""
    everything(rank)
    disagree_and_die(rank)


def test_in_two_processes(tmp_path: Path) -> None:
    in_processes(everything_and_then_die, tmp_path)
