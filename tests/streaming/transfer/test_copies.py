"""NaN and infinity are found in many gradients at once."""

from __future__ import annotations

import math

import pytest
import torch

from bitplan.streaming.transfer.copies import FiniteCheck, norms_of, sums_of
from bitplan.streaming.transfer.devices import SimulatedDevice


@pytest.mark.parametrize("figures_of", [norms_of, sums_of])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_figures_are_finite_where_all_numbers_are(figures_of, dtype, bad):
    tensors = [torch.randn(count).to(dtype) for count in (1, 7, 64, 1000)]
    tensors.append(torch.full((100,), 6e4).to(dtype))  # beyond FP16's largest number, added up
    assert all(figure.isfinite() for figure in figures_of(tensors))
    for tensor in tensors:
        tensor[len(tensor) // 2] = bad
        assert [bool(one.isfinite()) for one in figures_of(tensors)] == [bool(one.isfinite().all()) for one in tensors]


def test_a_gradient_that_was_not_finite_stays_so_whatever_comes_next():
    check = FiniteCheck(SimulatedDevice(), ["a", "b", "c"])
    check.look_at_gradients([0, 2], [torch.ones(3), torch.tensor([1.0, -math.inf])])
    check.look_at_gradients([2, 1], [torch.ones(2), torch.full((3,), 1e38)])
    assert check.not_finite(check.send(0)) == ["c"]
    check.start()
    assert check.not_finite(check.send(1)) == []
