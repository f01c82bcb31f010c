"""Activations and their gradients in the cast, against the matrices in float32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bitplan.fp8.casts import cast_reference, decode_scaled
from bitplan.fp8.kernels.cast import FUNCTIONS, activate, activation_gradient, split_function, width_of
from bitplan.fp8.kernels.guessed_cast import counts_of, new_state
from bitplan.fp8.kernels.triton_activation import cast_by_guess, fits_activated
from bitplan.fp8.kernels.triton_cast import CastLaunch

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
SMALL = CastLaunch(rows=32, cols=64, warps=4)
FEATURES = 128


def sample(rows: int, cols: int, seed: int, device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator).mul(3).bfloat16().to(device)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("gradient", [False, True])
def test_codes_are_those_of_the_activated_matrix_and_of_its_gradient(gradient, function, device) -> None:
    y = sample(21, width_of(function, FEATURES), 0, device)
    dh = sample(21, FEATURES, 1, device) if gradient else None
    act, gated = split_function(function)
    assert fits_activated(y, dh, gated)
    assert not fits_activated(y[:, 1:].contiguous(), None, gated)
    whole = (activate(y, function) if dh is None else activation_gradient(y, dh, function)).cpu()
    expected, state = cast_reference(whole, "tensor"), new_state(device)
    how = {"rows": True, "cols": True, "sums": torch.float32 if gradient else None, "launch": SMALL}
    for step in range(2):
        made, sums = cast_by_guess(y, dh, act, gated, "e4m3", 0.0, state, **how)
        assert counts_of(state)[:2] == (step + 1, 1)  # the first guess is wrong, and cast again
        for each in (made.rows, made.cols):
            assert torch.equal(each.scale.cpu(), expected.scale)
        rows = decode_scaled(made.rows).cpu()
        assert torch.equal(rows, decode_scaled(made.cols).cpu().t())
        assert not rows[21:].any()
        # exp is not the same everywhere: a number may round to the next bfloat16, and so to another code
        assert (rows[:21] != decode_scaled(expected)).float().mean() < 0.01
        assert torch.allclose(rows[:21], whole.float(), rtol=2**-3.5, atol=2 * float(expected.scale) * 2**-9)
        if gradient:
            assert torch.allclose(sums.cpu(), whole.float().sum(0), rtol=2e-2, atol=0.05)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_reference_gradient_is_autograds(function) -> None:
    y = torch.randn(5, width_of(function, 16)).requires_grad_()
    dh = torch.randn(5, 16)
    (wanted,) = torch.autograd.grad(activate(y, function), y, dh)
    assert torch.allclose(activation_gradient(y.detach(), dh, function), wanted, rtol=1e-4, atol=1e-5)
