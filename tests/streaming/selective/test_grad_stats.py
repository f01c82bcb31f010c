"""Gradient statistics against plain torch; nothing is read in a step, and nothing missing is a zero."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bitplan.formats.dispatch import Picked
from bitplan.streaming.selective.gradient_statistics import (
    GradStatsCollector,
    GradStatsError,
    collect_grad_stats,
    explain_reduce,
    impact_of,
    join,
    torch_parts,
    triton_parts,
)


def grads_of(seed, *shapes, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale + 0.1).to(dtype) for shape in shapes]


def collected(*steps, blocks=None):
    collector = GradStatsCollector(blocks or steps[0])
    for number, grads in enumerate(steps):
        collect_grad_stats(collector, grads, number)
    return collector.drain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_four_figures(dtype):
    blocks = {
        "a": grads_of(0, (33, 7), (5,), dtype=dtype),
        "b": grads_of(1, (4, 4), dtype=dtype, scale=3.0),
        "c": grads_of(2, (1,), (2, 3, 4), (8, 8), dtype=dtype, scale=1e-3),
    }
    (step,) = collected(blocks)
    every = {name: torch.cat([grad.double().reshape(-1) for grad in grads]) for name, grads in blocks.items()}
    mean = sum(flat.norm() for flat in every.values()) / 3
    for name, flat in every.items():
        row = step.stats[name]
        assert row.l2_norm == pytest.approx(float(flat.norm()), rel=1e-6)
        assert row.max_abs == float(flat.abs().max())
        assert row.variance == pytest.approx(float(flat.var(correction=0)), rel=1e-5)
        assert row.relative_magnitude == pytest.approx(float(flat.norm() / mean), rel=1e-6)


def test_mixed_types_in_one_block():
    grads = [*grads_of(0, (9,), dtype=torch.bfloat16), *grads_of(1, (5,), dtype=torch.float64), *grads_of(2, (7,))]
    flat = torch.cat([grad.double() for grad in grads])
    (step,) = collected({"a": grads})
    assert step.stats["a"].l2_norm == pytest.approx(float(flat.norm()), rel=1e-6)
    assert step.stats["a"].max_abs == float(flat.abs().max())


def test_small_exact_figures():
    (step,) = collected(
        {"a": [torch.tensor([3.0, -4.0])], "b": [torch.tensor([1.0]), torch.tensor([[-1.0, 1.0, 1.0]])]}
    )
    a, b = step.stats["a"], step.stats["b"]
    assert (a.l2_norm, a.max_abs, a.variance) == (5.0, 4.0, 12.25)
    assert (b.l2_norm, b.max_abs, b.variance) == (pytest.approx(2.0), 1.0, pytest.approx(0.75))
    assert (a.relative_magnitude, b.relative_magnitude) == pytest.approx((5 / 3.5, 2 / 3.5))


def test_a_module_counts_what_is_trained():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    module(torch.randn(5, 3)).square().sum().backward()
    collector = GradStatsCollector(["m"])
    collect_grad_stats(collector, {"m": module}, 0)
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in module[1].parameters()))
    assert collector.drain()[0].stats["m"].l2_norm == pytest.approx(expected, rel=1e-6)
    assert not collector.missing_tensors


def test_missing_and_broken_gradients_are_excluded_counted_and_said():
    good = [torch.tensor([2.0])]
    blocks = {
        "good": good,
        "none": [None, None],
        "some": [None, torch.tensor([2.0])],
        "nan": [torch.tensor([1.0, math.nan])],
        "inf": [torch.tensor([1.0]), torch.tensor([-math.inf])],
        "empty": [torch.empty(0)],
    }
    collector = GradStatsCollector([*blocks, "never"])
    collect_grad_stats(collector, blocks, 3)
    (step,) = collector.drain()
    assert dict(step.excluded) == {
        "none": "missing",
        "nan": "non_finite",
        "inf": "non_finite",
        "empty": "missing",
        "never": "missing",
    }
    assert {name: row.relative_magnitude for name, row in step.stats.items()} == {"good": 1.0, "some": 1.0}
    assert collector.missing_tensors == {"none": 2, "some": 1}


class Forbid(TorchDispatchMode):
    """Fails where a number is read by the host, or copied to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(part in name for part in ("_local_scalar_dense", "is_nonzero", "nonzero", "_to_cpu")), name
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing(monkeypatch):
    blocks = {"a": grads_of(0, (8, 8), (3,)), "b": [*grads_of(1, (5,)), None]}
    collector = GradStatsCollector(blocks)
    with Forbid(), monkeypatch.context() as patched:
        for reading in ("cpu", "tolist", "item", "numpy", "__float__", "__bool__"):
            patched.setattr(torch.Tensor, reading, None)
        for number in range(3):
            collector.add_impact("a", "int8", torch.ones(()))
            collect_grad_stats(collector, blocks, number)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Forbid():
        torch.ones(()).item()
    assert [step.step_id for step in collector.drain()] == [0, 1, 2]


def test_when_it_is_drained_does_not_matter():
    steps = [{"a": grads_of(seed, (6,)), "b": grads_of(seed + 50, (4, 3))} for seed in range(7)]
    at_once = collected(*steps)
    one_by_one, late = GradStatsCollector(["a", "b"]), GradStatsCollector(["a", "b"])
    result, found_late = [], []
    for number, blocks in enumerate(steps):
        collect_grad_stats(one_by_one, blocks, number)
        result += one_by_one.drain()
        collect_grad_stats(late, blocks, number)
        found_late += late.drain(before=number)
    assert result == at_once
    assert found_late == at_once[:-1]
    assert late.drain() == at_once[-1:]
    assert late.drain() == []


def test_one_by_one_is_the_same_as_all_at_once():
    """Gradients of streamed weights leave the device one by one, in whatever order backward gives them."""
    blocks = {"a": grads_of(0, (8, 8), (3,)), "b": grads_of(1, (5,)), "c": grads_of(2, (4,))}
    collector = GradStatsCollector([*blocks, "d"])
    for name, at in (("b", 0), ("a", 0), ("c", 0), ("a", 1)):
        collector.add_gradient(name, blocks[name][at])
    collector.end_step(0)
    (result,) = collector.drain()
    assert result.stats == collected(blocks)[0].stats
    assert result.excluded == {"d": "missing"}
    collector.add({"a": blocks["a"]})
    with pytest.raises(GradStatsError, match=r"'a' came at once and one by one"):
        collector.add_gradient("a", blocks["a"][0])


def test_block_by_block_is_the_same_as_all_at_once():
    """A streamed block's gradients leave the device before the next block's come."""
    blocks = {"a": grads_of(0, (8, 8), (3,)), "b": grads_of(1, (5,)), "c": [None]}
    collector = GradStatsCollector(blocks)
    for name in ("c", "b", "a"):
        collector.add({name: blocks[name]})
    collector.end_step(0)
    assert collector.drain() == collected(blocks)


def test_gradients_may_be_freed_or_overwritten_after_add():
    grad = torch.tensor([3.0, 4.0])
    collector = GradStatsCollector(["a"])
    collector.add({"a": [grad]})
    grad.zero_()
    collector.end_step(0)
    assert collector.drain()[0].stats["a"].l2_norm == 5.0


def test_a_dropped_step_leaves_nothing():
    collector = GradStatsCollector(["a"])
    collector.add({"a": [torch.tensor([math.nan])]})
    collector.drop_step()
    collect_grad_stats(collector, {"a": [torch.tensor([1.0])]}, 0)
    (step,) = collector.drain()
    assert not step.excluded


def test_impacts_add_up_within_a_step():
    collector = GradStatsCollector(["a", "b"])
    for value in (0.25, -1.0):
        collector.add_impact("a", "int8", torch.tensor(value))
    collector.add_impact("a", "fp8", torch.tensor(0.5), 4.0)
    collector.add_impact("a", "fp8", torch.tensor(1.0, dtype=torch.float64))
    collector.add_impact("b", "fp8", torch.tensor([math.nan]))
    collect_grad_stats(collector, {"a": [torch.ones(1)], "b": [torch.ones(1)]}, 0)
    collect_grad_stats(collector, {"a": [torch.ones(1)], "b": [torch.ones(1)]}, 1)
    first, second = collector.drain()
    assert first.impacts == {"a": {"int8": -0.75, "fp8": 3.0}, "b": {}}
    assert first.excluded == {"b": "non_finite"}
    assert second.impacts == {}


def test_impact_predicts_the_loss():
    """Against the loss itself, and against <dL/dW, W - W_hat>, on a weight that is frozen in the first place."""
    torch.manual_seed(0)
    x, target, weight = torch.randn(2, 8, 6), torch.randn(2, 8, 5), torch.randn(5, 6)
    weight_hat = weight + 1e-4 * torch.randn(5, 6)

    def loss_of(w):
        return (nn.functional.linear(x, w) - target).square().mean()

    y = nn.functional.linear(x, weight).requires_grad_()
    (y - target).square().mean().backward()
    impact = float(impact_of(y.grad, x, weight - weight_hat))
    assert float(loss_of(weight_hat) - loss_of(weight)) == pytest.approx(-impact, rel=2e-2)
    trained = weight.clone().requires_grad_()
    loss_of(trained).backward()
    assert impact == pytest.approx(float((trained.grad * (weight - weight_hat)).sum()), rel=1e-3)


def test_refusals():
    collector = GradStatsCollector(["block.0", "block.1"])
    with pytest.raises(GradStatsError, match=r"'blok\.0' is not a registered block; did you mean 'block\.0'"):
        collector.add({"blok.0": []})
    with pytest.raises(GradStatsError, match="expected dense floating-point numbers, got int64, strided"):
        collector.add({"block.0": [torch.ones(2, dtype=torch.int64)]})
    with pytest.raises(GradStatsError, match="sparse_coo"):
        collector.add({"block.0": [torch.ones(2, 2).to_sparse()]})
    collector.add({"block.0": [torch.ones(1)]})
    with pytest.raises(GradStatsError, match=r"gradients of 'block\.0' came twice in one step"):
        collector.add({"block.0": [torch.ones(1)]})
    with pytest.raises(GradStatsError, match="different names"):
        GradStatsCollector(["a", "a"])


# ---- the kernel ------------------------------------------------------------------------------------------------------


def kernel_rows(blocks):
    triton = pytest.importorskip("triton")
    if not (triton.knobs.runtime.interpret or torch.cuda.is_available()):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return join(triton_parts([[grad.to(device) for grad in grads] for grads in blocks])).cpu()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_the_definition(dtype):
    """Sizes around a round of 8192 and a part of 65536; a mean far above the spread; transposed and strided tensors."""
    blocks = [
        grads_of(0, (8191,), (8192,), (8193,), dtype=dtype),
        [grad + 30 for grad in grads_of(1, (65536,), (257, 256), (1,), dtype=dtype)],
        [grads_of(2, (70, 30), dtype=dtype)[0].t(), grads_of(3, (40, 6), dtype=dtype)[0][:, ::2]],
        [torch.zeros(5, dtype=dtype)],
    ]
    expected = join(torch_parts(blocks))
    result = kernel_rows(blocks)
    assert torch.allclose(result, expected, rtol=2e-6, atol=0)
    assert torch.equal(result[:, 1], expected[:, 1])  # the largest number is exact
    exact = torch.cat([grad.double().reshape(-1) for grad in blocks[1]])
    assert float(expected[1, 2]) == pytest.approx(float(exact.var(correction=0)), rel=1e-5)


def test_the_kernel_takes_several_types_in_one_block():
    blocks = [[*grads_of(0, (9,), dtype=torch.bfloat16), *grads_of(1, (5,)), *grads_of(2, (7,), dtype=torch.bfloat16)]]
    assert torch.allclose(kernel_rows(blocks), join(torch_parts(blocks)), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_kernel_lets_no_broken_number_through(bad):
    grads = torch.ones(9000)
    grads[8500] = bad
    assert not bool(kernel_rows([[grads]]).isfinite().all())


def test_the_choice_says_why():
    assert explain_reduce([[torch.ones(1)]]) == Picked("torch", "the kernel is for CUDA, these are on cpu")


@pytest.mark.gpu
def test_on_the_gpu_nothing_waits():
    blocks = {name: [grad.cuda() for grad in grads_of(seed, (64, 64), (7,))] for seed, name in enumerate("abc")}
    expected = collected({name: [grad.cpu() for grad in grads] for name, grads in blocks.items()})[0]
    assert explain_reduce(list(blocks.values())).implementation == "triton"
    collector = GradStatsCollector(blocks)
    collect_grad_stats(collector, blocks, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        collect_grad_stats(collector, blocks, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first, second = collector.drain()
    assert first.stats == second.stats
    for name, row in expected.stats.items():
        assert first.stats[name].l2_norm == pytest.approx(row.l2_norm, rel=1e-6)
        assert first.stats[name].variance == pytest.approx(row.variance, rel=1e-4)
