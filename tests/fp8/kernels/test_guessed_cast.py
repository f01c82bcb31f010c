"""Casts by a guessed scale against the definition: the guess may cost time, never a bit.

Rows of 48 numbers are read as words of two, rows of 40 one number at a time.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bitplan.fp8.casts import cast_reference, pad_rows, round_to_fp8
from bitplan.fp8.kernels.fast_tile import is_aligned
from bitplan.fp8.kernels.guessed_cast import GuessPlan, counts_of, new_state
from bitplan.fp8.kernels.triton_cast import CastLaunch

# A guess for small numbers overflows on large ones, before it is found wrong; the interpreter's numpy would warn of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
SMALL = CastLaunch(rows=32, cols=32, warps=1)


def cast_by_guess(x, state, fp8, eps, padded, *, rows, cols, launch=None):
    return GuessPlan(x.shape, x.dtype, is_aligned(x), fp8, eps, padded, rows, cols, launch).run(x, state)


def check(x: torch.Tensor, state: torch.Tensor, padded: int, *, fp8="e4m3", eps=0.0, offset=0, **asked) -> None:
    asked = {"rows": True, "cols": True} | asked
    there = torch.empty(offset + x.numel(), dtype=x.dtype, device=state.device)[offset:].view(x.shape).copy_(x)
    result = cast_by_guess(there, state, fp8, eps, padded, launch=SMALL, **asked)
    whole = pad_rows(x, padded)
    for made, want, source in zip(result, (asked["rows"], asked["cols"]), (whole, whole.t()), strict=True):
        if not want:
            assert made is None
            continue
        expected = cast_reference(source, "tensor", fp8, eps)
        assert torch.equal(made.codes.view(torch.uint8).cpu(), expected.codes.view(torch.uint8))
        assert torch.equal(made.scale.cpu().nan_to_num(-1), expected.scale.nan_to_num(-1))


@pytest.fixture(params=[48, 40])
def cols(request) -> int:
    return request.param


def sample(seed: int, cols: int, rows: int = 21, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(rows, cols, generator=generator)).bfloat16()


def test_the_first_guess_is_wrong_and_the_next_right(cols, device) -> None:
    state = new_state(device)
    check(sample(0, cols), state, 32)
    assert counts_of(state)[:2] == (1, 1)
    check(sample(0, cols), state, 32)
    assert counts_of(state)[:2] == (2, 1)


@pytest.mark.parametrize(
    ("fp8", "steps"),
    [("e4m3", 4), *(pytest.param(fp8, 9, marks=pytest.mark.long) for fp8 in ("e4m3", "e5m2"))],
)
def test_a_series_of_sizes_equals_the_definition(fp8, steps, cols, device) -> None:
    state, wrong = new_state(device), 0
    last = None
    for step, size in enumerate((1.0, 3e38, 2e-41, 1e-3, 1e-3, 0.0, 1.1, 8.0, 1.0)[:steps]):
        x = sample(step, cols, size=size).clamp(-3e38, 3e38)
        check(x, state, 32, fp8=fp8)
        scale = cast_reference(x, "tensor", fp8).scale
        wrong += last is None or not torch.equal(scale, last)
        last = scale
        assert counts_of(state)[:2] == (step + 1, wrong)
    assert 0 < wrong <= steps
    assert wrong < steps or steps < 9


@pytest.mark.parametrize(
    "bad", [torch.inf, *(pytest.param(bad, marks=pytest.mark.long) for bad in (-torch.inf, torch.nan))]
)
def test_what_is_not_finite_is_seen_at_once_and_gone_at_once(bad, cols, device) -> None:
    state, x = new_state(device), sample(1, cols)
    check(x, state, 32)
    broken = x.clone()
    broken[3, 5] = bad
    for each in (broken, broken, x, x):
        check(each, state, 32)
    assert counts_of(state)[:2] == (5, 3)  # the first, into NaN, and out of it


def cast_with_room(x, state, device) -> torch.Tensor:
    """The scale by which x was cast, on the CPU; its codes are those of that scale."""
    made = cast_by_guess(x.to(device), state, "e4m3", 0.0, 16, rows=True, cols=False, launch=SMALL).rows
    scale = made.scale.cpu()
    codes = round_to_fp8(x.float() * (1.0 / scale), "e4m3")
    assert torch.equal(made.codes.view(torch.uint8).cpu(), codes.view(torch.uint8))
    return scale


def test_with_room_a_scale_is_kept_while_it_is_not_much_too_large_and_else_put_in_the_middle(device) -> None:
    state, start = new_state(device, room=5), cast_reference(sample(0, 48, 16), "tensor").scale
    #                        size, scale of the definition's for size 1, wrong guesses, of these too small
    for size, scale, *counts in (
        (1.0, 4.0, 1, 1),  # the first
        (4.0, 4.0, 1, 1),
        (8.0, 32.0, 2, 2),  # too small
        (1.0, 32.0, 2, 2),
        (0.5, 2.0, 3, 2),  # too large
        (torch.nan, torch.nan, 4, 3),
        (1.0, 4.0, 5, 3),
    ):
        made = cast_with_room(sample(0, 48, 16, size=size), state, device)
        assert torch.equal(made.nan_to_num(-1), (scale * start).nan_to_num(-1)), size
        assert counts_of(state)[1:] == tuple(counts), size


def test_a_guess_moves_as_the_layer_above_moved_in_the_same_backward(device) -> None:
    above, below = new_state(device, room=5), new_state(device, room=5)
    start = cast_reference(sample(0, 48, 16), "tensor").scale
    #                      sizes above and below; scales; wrong guesses of both
    for sizes, scales, wrong in (
        ((1.0, 1.0), (4.0, 4.0), (1, 1)),
        ((2**-8, 2**-8), (2**-6, 2**-6), (2, 1)),  # below, the guess was moved by 2^-8
        ((2**-8, 1.0), (2**-6, 4.0), (2, 2)),  # the one above has not moved
        ((2**-9, 1.0), (2**-6, 2.0), (2, 2)),  # nor does it take the last backward's
    ):
        for state, size, scale in zip((above, below), sizes, scales, strict=True):
            assert torch.equal(cast_with_room(sample(0, 48, 16, size=size), state, device), scale * start)
        assert (counts_of(above).wrong, counts_of(below).wrong) == wrong


@pytest.mark.parametrize("asked", [{"rows": False}, {"cols": False}])
def test_only_the_layout_that_is_asked_for(asked, cols, device) -> None:
    check(sample(2, cols), new_state(device), 32, **asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(dtype, device) -> None:
    state = new_state(device)
    for _ in range(2):
        check(sample(3, 40).to(dtype), state, 21)
    assert counts_of(state)[:2] == (2, 1)


def test_epsilon_is_the_least_largest_number(device) -> None:
    state = new_state(device)
    for _ in range(2):
        check(torch.zeros(16, 16, dtype=torch.bfloat16), state, 16, eps=1e-3)
    assert counts_of(state)[:2] == (2, 1)


def test_matrices_of_other_shapes_may_share_a_state(device) -> None:
    state = new_state(device)
    for rows, cols in ((16, 16), (34, 33), (1, 48), (32, 48)):
        check(sample(4, cols, rows), state, rows)
    assert counts_of(state)[0] == 4


def test_memory_that_begins_anywhere(device) -> None:
    """The words of two numbers begin at multiples of 16 bytes; a view need not."""
    check(sample(5, 48), new_state(device), 32, offset=1)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(1030, 4112), (4096, 4096)])
def test_large_matrices_by_the_launch_of_their_own_on_the_gpu(rows, cols, device) -> None:
    state, padded = new_state(device), -(-rows // 16) * 16
    x = sample(6, cols, rows)
    expected = [cast_reference(each, "tensor") for each in (pad_rows(x, padded), pad_rows(x, padded).t())]
    for _ in range(2):
        for made, want in zip(
            cast_by_guess(x.to(device), state, "e4m3", 0.0, padded, rows=True, cols=True), expected, strict=True
        ):
            assert torch.equal(made.codes.view(torch.uint8).cpu(), want.codes.view(torch.uint8))
            assert torch.equal(made.scale.cpu(), want.scale)
    assert counts_of(state)[:2] == (2, 1)
