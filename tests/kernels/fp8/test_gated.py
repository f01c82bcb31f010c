"""silu(gate) * up and its gradient in the cast, against the matrices in float32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bitplan.formats.fp8 import cast_reference, decode_scaled
from bitplan.kernels.fp8.gated import gate, gate_gradient
from bitplan.kernels.fp8.guessed_cast import counts_of, new_state
from bitplan.kernels.fp8.triton_cast import CastLaunch
from bitplan.kernels.fp8.triton_gated import cast_by_guess, fits_gated

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
SMALL = CastLaunch(rows=32, cols=64, warps=4)
FEATURES = 128


def sample(rows: int, cols: int, seed: int, device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator).mul(3).bfloat16().to(device)


@pytest.mark.parametrize("gradient", [False, True])
def test_codes_are_those_of_the_gated_matrix_and_of_its_gradient(gradient, device) -> None:
    y, dh = sample(21, 2 * FEATURES, 0, device), sample(21, FEATURES, 1, device) if gradient else None
    assert fits_gated(y, dh)
    assert not fits_gated(y[:, 1:].contiguous())
    whole = (gate(y) if dh is None else gate_gradient(y, dh)).cpu()
    expected, state = cast_reference(whole, "tensor"), new_state(device)
    for step in range(2):
        made = cast_by_guess(y, dh, "e4m3", 0.0, state, rows=True, cols=True, launch=SMALL)
        assert counts_of(state)[:2] == (step + 1, 1)  # the first guess is wrong, and cast again
        for each in (made.rows, made.cols):
            assert torch.equal(each.scale.cpu(), expected.scale)
        rows = decode_scaled(made.rows).cpu()
        assert torch.equal(rows, decode_scaled(made.cols).cpu().t())
        assert not rows[21:].any()
        # exp is not the same everywhere: a number may round to the next bfloat16, and so to another code
        assert (rows[:21] != decode_scaled(expected)).float().mean() < 0.01
        assert torch.allclose(rows[:21], whole.float(), rtol=2**-3.5, atol=2 * float(expected.scale) * 2**-9)


def test_the_reference_gradient_is_autograds() -> None:
    y = torch.randn(5, 32, dtype=torch.float64).float().requires_grad_()
    dh = torch.randn(5, 16)
    (wanted,) = torch.autograd.grad(gate(y), y, dh)
    assert torch.allclose(gate_gradient(y.detach(), dh), wanted, rtol=1e-5, atol=1e-6)
