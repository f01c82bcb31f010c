"""Experts' casts of bfloat16 as words of two numbers, with and without guessed scales, against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bitplan.base.errors import FormatError
from bitplan.fp8.casts import round_to_fp8
from bitplan.fp8.kernels.experts_general_cast import MATRICES_LAUNCHES, plan_pairs
from bitplan.fp8.kernels.experts_layout import GroupedFp8, GroupLayout, GroupSizes
from bitplan.fp8.kernels.experts_products import cast_experts, cast_tokens, lay_out
from bitplan.fp8.kernels.guessed_cast import counts_of, new_state
from tests.crosses import few

# A guess for small numbers overflows on large ones, before it is found wrong; the interpreter's numpy would warn of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
ROUTINGS = {
    "skewed": [0, 1, 130, 0, 37],
    "one takes all": [0, 0, 150],
    "whole tiles": [128, 0, 128],
}


def routed(counts: list[int], pad: int, device: torch.device) -> tuple[GroupLayout, GroupLayout]:
    given = torch.tensor(counts)
    made = lay_out(given.to(device), sum(counts), pad, impl="triton")
    return made, lay_out(given, sum(counts), pad, impl="reference")


def sample(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()


def same(result: Tensor, expected: Tensor) -> None:
    if expected.dtype != torch.float32:
        result, expected = result.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(result.cpu().nan_to_num(-1), expected.nan_to_num(-1))


def check_tokens(
    x: Tensor,
    counts: list[int],
    state: Tensor | None,
    device: torch.device,
    *,
    recipe="tensorwise",
    pad=16,
    fp8="e4m3",
    eps=0.0,
    offset=0,
    **asked,
) -> None:
    layout, reference = routed(counts, pad, device)
    there = torch.empty(offset + x.numel(), dtype=x.dtype, device=device)[offset:].view(x.shape).copy_(x)
    result = cast_tokens(there, recipe, layout, fp8, eps, impl="triton", guess=state, **asked)
    expected = cast_tokens(x, recipe, reference, fp8, eps, impl="reference", **asked)
    assert [each is None for each in result] == [each is None for each in expected]
    if result[0] is not None and expected[0] is not None:
        same(result[0].codes, expected[0].codes)
        same(result[0].scale, expected[0].scale)
    if result[1] is not None and expected[1] is not None:
        used = int(reference.padded_ends[-1])  # behind it is memory that nothing reads
        same(result[1].codes[:, :used].contiguous(), expected[1].codes[:, :used].contiguous())
        by = used // 128 if recipe == "blockwise" else None
        same(result[1].scale[:by], expected[1].scale[:by])


def check_matrices(w: Tensor, state: Tensor | None, device: torch.device, eps: float = 0.0, **asked) -> None:
    result = cast_experts(w.to(device), "tensorwise", eps, impl="triton", guess=state, **asked)
    for one, other in zip(result, cast_experts(w, "tensorwise", eps, impl="reference", **asked), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            same(one.codes, other.codes)
            same(one.scale, other.scale)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.cross("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.cross("pad", [16, 128])
def test_every_routing_without_guesses_by_wrong_and_by_right_ones(counts, pad, device) -> None:
    x, state = sample(sum(counts), 80 if pad == 16 else 48), new_state(device, len(counts))
    check_tokens(x, counts, None, device, pad=pad)
    present = sum(count > 0 for count in counts)
    check_tokens(x, counts, state, device, pad=pad)
    assert counts_of(state)[:2] == (present, present)
    check_tokens(x, counts, state, device, pad=pad)
    assert counts_of(state)[:2] == (2 * present, present)


@pytest.mark.parametrize(
    ("fp8", "steps"),
    [("e4m3", 4), *(pytest.param(fp8, 7, marks=pytest.mark.long) for fp8 in ("e4m3", "e5m2"))],
)
def test_a_series_of_routings_and_sizes_equals_the_definition(fp8, steps, device) -> None:
    state, casts, wrong = new_state(device, 3), 0, 0
    last: dict[int, float] = {}
    routings = ([5, 0, 40], [0, 20, 3], [0, 7, 0], [1, 20, 0], [0, 0, 0], [130, 1, 1], [9, 9, 9])
    for step, counts in enumerate(routings[:steps]):
        sizes = torch.tensor([1.0, [8.0, 3e38, 2e-41, 1e-3, 1.0, 0.0, 1.0][step], 1.1])
        x = sample(sum(counts), 48, step).float() * sizes.repeat_interleave(torch.tensor(counts))[:, None]
        x = x.clamp(-3e38, 3e38).bfloat16()
        check_tokens(x, counts, state, device, fp8=fp8)
        _, reference = routed(counts, 16, device)
        scales = cast_tokens(x, "tensorwise", reference, fp8, impl="reference")[1]
        assert scales is not None
        for expert, count in enumerate(counts):
            if count:
                scale = float(scales.scale[expert, 0])
                casts, wrong = casts + 1, wrong + (last.get(expert) != scale)
                last[expert] = scale
        assert counts_of(state)[:2] == (casts, wrong)
    assert 0 < wrong <= casts
    assert wrong < casts or steps < 5


@pytest.mark.parametrize("bad", [pytest.param(-torch.inf, marks=pytest.mark.long), torch.nan])
def test_what_is_not_finite_stays_with_its_expert_and_goes_at_once(bad, device) -> None:
    counts, state = [10, 20, 0], new_state(device, 3)
    x = sample(30, 48)
    broken = x.clone()
    broken[12, 5] = bad
    check_tokens(broken, counts, None, device)
    for each in (x, broken, broken, x):
        check_tokens(each, counts, state, device)
    assert state[-2:].cpu().tolist() == [[4, 4, 0], [1, 3, 0]]  # the first, into NaN, and out of it


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_what_is_not_finite_in_rows_and_blocks(recipe, device) -> None:
    x = sample(30, 128)
    x[3, 5], x[12, 7], x[29, 127] = torch.nan, torch.inf, -torch.inf
    check_tokens(x, [10, 0, 19, 1], None, device, recipe=recipe, pad=128, eps=1e-3)


@pytest.mark.parametrize("asked", few([{"rows": False}, {"cols": False}, {"rows": False, "cols": False}], 2))
def test_only_the_layouts_that_are_asked_for(asked, device) -> None:
    state = new_state(device, 3)
    for guess in (None, state, state):
        check_tokens(sample(30, 48), [12, 0, 18], guess, device, **asked)


def test_epsilon_is_the_least_largest_number_but_of_an_expert_without_tokens(device) -> None:
    state = new_state(device, 3)
    for guess in (None, state, state):
        check_tokens(torch.zeros(16, 48, dtype=torch.bfloat16), [9, 0, 7], guess, device, eps=1e-3)
    assert counts_of(state)[:2] == (4, 2)


@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 0), (torch.float16, 0), (torch.bfloat16, 1)])
def test_other_types_and_places_leave_the_guesses_alone(dtype, offset, device) -> None:
    state = new_state(device, 2)
    check_tokens(sample(30, 48).to(dtype), [12, 18], state, device, offset=offset)
    assert torch.equal(state, new_state(device, 2))


def test_no_tokens_at_all(device) -> None:
    state = new_state(device, 3)
    check_tokens(sample(0, 48), [0, 0, 0], state, device)
    assert counts_of(state)[:2] == (0, 0)


def test_guesses_of_other_experts_are_refused(device) -> None:
    with pytest.raises(FormatError, match=r"guesses of 2 experts have shape \(9, 2\), got \(9, 3\)"):
        check_tokens(sample(3, 48), [1, 2], new_state(device, 3), device)


# ---- matrices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(2, 272, 48), (1, 16, 16), pytest.param((3, 48, 80), marks=pytest.mark.long)], ids=str
)
def test_matrices_without_guesses_by_wrong_and_by_right_ones(shape, device) -> None:
    w, state = sample(shape[0] * shape[1], shape[2]).view(shape), new_state(device, shape[0])
    w[0] = 0
    for guess in (None, state, state):
        check_matrices(w, guess, device, 1e-6)
    assert counts_of(state)[:2] == (2 * shape[0], shape[0])
    w[-1] *= 4
    check_matrices(w, state, device, 1e-6)
    assert counts_of(state)[:2] == (3 * shape[0], shape[0] + 1 - (shape[0] == 1))  # the only one is zeros


@pytest.mark.parametrize("asked", [{"rows": False}, {"cols": False}])
def test_only_the_layout_of_matrices_that_is_asked_for(asked, device) -> None:
    state = new_state(device, 2)
    for guess in (None, state, state):
        check_matrices(sample(64, 48).view(2, 32, 48), guess, device, **asked)


def test_matrices_that_lie_otherwise_are_copied(device) -> None:
    check_matrices(sample(96, 32).view(2, 48, 32).transpose(1, 2), new_state(device, 2), device)


def test_the_check_casts_only_experts_again_whose_guess_was_wrong(device) -> None:
    w, state = sample(3 * 48, 80).view(3, 48, 80), new_state(device, 3)
    check_matrices(w, state, device)
    w[1] *= 64
    expected = cast_experts(w, "tensorwise", impl="reference")[0]
    flat = w.view(-1, 80).to(device)
    codes = torch.empty((3, 48, 80), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((3, 48), device=device)
    sizes = GroupSizes(3, 80, 48, matrix_rows=48)
    cast, check = plan_pairs(sizes, "tensor", "e4m3", 0.0, (True, False), True, MATRICES_LAUNCHES["tensor"])
    pointers = (flat, state, codes, scale, *(None,) * 7)
    cast(*pointers)
    codes.view(torch.uint8).fill_(0x55)
    check(*pointers)
    assert isinstance(expected, GroupedFp8)
    result = codes.view(torch.uint8).cpu()
    assert (result[[0, 2]] == 0x55).all()
    assert torch.equal(result[1], expected.codes.view(torch.uint8)[1])
    same(scale, expected.scale)


def test_with_room_an_experts_scale_is_kept_while_it_is_not_much_too_large(device) -> None:
    w, state = sample(3 * 32, 48).view(3, 32, 48), new_state(device, 3, room=5)
    first = cast_experts(w.to(device), "tensorwise", impl="triton", guess=state, cols=False)[0]
    w *= torch.tensor([0.25, 2**-6, 8.0]).view(3, 1, 1)  # within the room, below it, above
    again = cast_experts(w.to(device), "tensorwise", impl="triton", guess=state, cols=False)[0]
    assert isinstance(first, GroupedFp8)
    assert isinstance(again, GroupedFp8)
    scale = first.scale.cpu() * torch.tensor([1.0, 2**-6, 8.0]).view(3, 1)
    same(again.scale, scale)
    same(again.codes, round_to_fp8(w.float() * (1.0 / scale[:, :, None]), "e4m3"))
    assert state[-1].tolist() == [1, 2, 2]


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("bad", [1.0, torch.nan])
def test_many_tokens_by_rows_and_blocks_on_a_gpu(recipe, bad, device) -> None:
    counts = [0, 3000, 1, 517, 0, 77]
    x = sample(sum(counts), 2048)
    x[3100, 7] = bad
    for fp8 in ("e4m3", "e5m2"):
        check_tokens(x, counts, None, device, recipe=recipe, pad=128, fp8=fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[0, 3000, 1, 517, 0, 77], [129] * 40], ids=["skewed", "many"])
def test_many_tokens_on_a_gpu(counts, device) -> None:
    x, state = sample(sum(counts), 2064), new_state(device, len(counts))
    for guess in (None, state, state):
        check_tokens(x, counts, guess, device, pad=128)
    x[0] *= 100
    check_tokens(x, counts, state, device, pad=128)


@pytest.mark.gpu
def test_more_numbers_than_32_bits_count(device) -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    w = torch.randn(5, 20480, 21504, device=device, dtype=torch.bfloat16)
    w[4] *= 8
    state = new_state(device, 5)
    expected = cast_experts(w[4:], "tensorwise", impl="reference")
    for guess in (None, state, state):
        for one, other in zip(cast_experts(w, "tensorwise", guess=guess), expected, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one.codes[4].view(torch.uint8), other.codes[0].view(torch.uint8))
            assert torch.equal(one.scale[4], other.scale[0])
