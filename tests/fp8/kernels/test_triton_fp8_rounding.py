"""What scales and codes are made of, each by itself: all magnitudes of bfloat16, and the ways around a division."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from bitplan.fp8.casts import round_to_fp8, scale_of_amax
from bitplan.fp8.kernels.triton_fp8_rounding import (
    four_codes,
    largest_bits,
    pair_max,
    pair_of_floats,
    pair_of_rows,
    pair_times_power,
    power_of_two_of_bits,
    quick_inverse,
    quick_scale,
    reduce_pairs,
    two_codes,
)

EVERY = torch.arange(0x8000, dtype=torch.int32) << 16  # bits of float32 of each magnitude of bfloat16
# A number that is not finite makes inf - inf; the interpreter's numpy would warn of it.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow encountered")


@triton.jit
def _scales(bits_ptr, scale_ptr, inverse_ptr, power_ptr, eps, least, FP8: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    bits = tl.load(bits_ptr + at)
    scale = quick_scale(bits.to(tl.float32, bitcast=True), least, FP8)
    tl.store(scale_ptr + at, scale)
    tl.store(inverse_ptr + at, quick_inverse(scale))
    tl.store(power_ptr + at, power_of_two_of_bits(bits, eps, FP8))


def scales(bits: torch.Tensor, fp8: str, eps: float, device: torch.device) -> list[torch.Tensor]:
    """[scale, its inverse, the power of two]."""
    made = [torch.empty(bits.shape, dtype=torch.float32, device=device) for _ in range(3)]
    least = float(scale_of_amax(torch.tensor(eps), fp8))
    grid = (bits.numel() // 1024,)
    _scales[grid](bits.to(device), *made, eps, least, FP8=fp8, N=1024, num_warps=4, enable_fp_fusion=False)
    return [each.cpu() for each in made]


def assert_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(0), expected.nan_to_num(0))


def check_every_magnitude(fp8: str, eps: float, device: torch.device) -> None:
    scale, inverse, power = scales(EVERY, fp8, eps, device)
    amax = EVERY.view(torch.float32).clamp(min=eps)
    assert_equal(scale, scale_of_amax(amax, fp8))
    assert_equal(inverse, 1.0 / scale_of_amax(amax, fp8))
    assert_equal(power, scale_of_amax(amax, fp8, power_of_two=True))


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("eps", [pytest.param(0.0, marks=pytest.mark.long), 3e-3])
def test_scales_of_every_magnitude(fp8, eps, device) -> None:
    check_every_magnitude(fp8, eps, device)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_the_gpus_own_instructions_give_every_scale_and_inverse(fp8, device) -> None:
    check_every_magnitude(fp8, 0.0, device)


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_powers_of_two_of_any_float32(fp8, device) -> None:
    """Also at the mantissa where the limit's is, and one to either side, for each exponent."""
    edges = (torch.arange(255, dtype=torch.int32)[:, None] << 23) + torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001])
    others = torch.randint(0, 0x7F800000, (4096 - edges.numel(),), generator=torch.Generator().manual_seed(1))
    bits = torch.cat([edges.flatten(), others]).to(torch.int32)
    amax = bits.view(torch.float32)
    assert_equal(scales(bits, fp8, 0.0, device)[2], scale_of_amax(amax, fp8, power_of_two=True))


@triton.jit
def _pairs(a_ptr, b_ptr, max_ptr, rows_ptr, all_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(max_ptr + at, pair_max(a, b) & 0x7FFF7FFF)
    tl.store(rows_ptr + at, pair_of_rows(a, b) & 0x7FFF7FFF)
    tl.store(all_ptr, largest_bits(reduce_pairs(pair_max(a, b), 0)))


@pytest.mark.parametrize("special", [None, torch.inf, torch.nan])
def test_maxima_of_pairs(special, device) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(1024, 2, generator=generator).bfloat16() for _ in range(2))
    a[0], b[0] = torch.tensor([0.0, -1e-40]), torch.tensor([-0.0, 2e-40])
    if special is not None:
        a[7, 1] = special
    made = [torch.empty(1024, dtype=torch.int32, device=device) for _ in range(2)]
    all_of_them = torch.empty(1, dtype=torch.int32, device=device)
    words = [each.view(torch.int32).flatten().to(device) for each in (a, b)]
    _pairs[(1,)](*words, *made, all_of_them, N=1024)
    larger, of_rows = (each.cpu().view(torch.bfloat16).view(1024, 2).float() for each in made)
    assert_equal(larger, torch.maximum(a.abs(), b.abs()).float())
    assert_equal(of_rows, torch.stack([a.abs().amax(1), b.abs().amax(1)], 1).float())
    assert_equal(all_of_them.cpu().view(torch.float32)[0], torch.maximum(a.abs().max(), b.abs().max()).float())


@triton.jit
def _codes(x_ptr, inverse_ptr, two_ptr, low_ptr, high_ptr, FP8: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    inverse = tl.load(inverse_ptr + at)
    a, b = tl.load(x_ptr + at), tl.load(x_ptr + N + at)
    c, d = tl.load(x_ptr + 2 * N + at), tl.load(x_ptr + 3 * N + at)
    tl.store(two_ptr + at, two_codes(a, inverse, FP8))
    tl.store(low_ptr + at, four_codes(a, b, c, d, inverse, False, FP8))
    tl.store(high_ptr + at, four_codes(a, b, c, d, inverse, True, FP8))


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_codes_of_pairs_lie_as_they_should(fp8, device) -> None:
    generator = torch.Generator().manual_seed(3)
    x_4N2 = (torch.randn(4, 512, 2, generator=generator) * 300).bfloat16()
    x_4N2[:, :4, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40])
    inverse_N = torch.exp(torch.randn(512, generator=generator))
    two = torch.empty(512, dtype=torch.int16, device=device)
    low, high = (torch.empty(512, dtype=torch.int32, device=device) for _ in range(2))
    words = x_4N2.view(torch.int32).flatten().to(device)
    _codes[(1,)](words, inverse_N.to(device), two, low, high, FP8=fp8, N=512, enable_fp_fusion=False)
    expected = round_to_fp8(x_4N2.float() * inverse_N[:, None], fp8).view(torch.uint8)
    assert torch.equal(two.cpu().view(torch.uint8).view(512, 2), expected[0])
    assert torch.equal(low.cpu().view(torch.uint8).view(512, 4), expected[:, :, 0].t())
    assert torch.equal(high.cpu().view(torch.uint8).view(512, 4), expected[:, :, 1].t())


@triton.jit
def _scaled_codes(x_ptr, inverse_ptr, two_ptr, low_ptr, high_ptr, FP8: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    inverse = tl.load(inverse_ptr)
    pair = pair_of_floats(inverse, inverse)
    x_ptr += at * 4
    a, b = pair_times_power(tl.load(x_ptr), pair), pair_times_power(tl.load(x_ptr + 1), pair)
    c, d = pair_times_power(tl.load(x_ptr + 2), pair), pair_times_power(tl.load(x_ptr + 3), pair)
    tl.store(two_ptr + at, two_codes(a, inverse, FP8, True))
    tl.store(low_ptr + at, four_codes(a, b, c, d, inverse, False, FP8, True))
    tl.store(high_ptr + at, four_codes(a, b, c, d, inverse, True, FP8, True))


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.cross("power", [-125, -9, 0, 126])
def test_every_number_times_a_power_of_two_has_the_code_of_the_product(fp8, power, device) -> None:
    x_N42 = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 4, 2)
    words, inverse, count = x_N42.view(torch.int32).flatten(), torch.tensor([2.0**power]), x_N42.shape[0]
    two = torch.empty(count, dtype=torch.int16, device=device)
    low, high = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    given = (words.to(device), inverse.to(device), two, low, high)
    _scaled_codes[(count // 1024,)](*given, FP8=fp8, N=1024, enable_fp_fusion=False)
    expected = round_to_fp8(x_N42.float() * inverse, fp8).view(torch.uint8)
    assert torch.equal(two.cpu().view(torch.uint8).view(-1, 2), expected[:, 0])
    assert torch.equal(low.cpu().view(torch.uint8).view(-1, 4), expected[:, :, 0])
    assert torch.equal(high.cpu().view(torch.uint8).view(-1, 4), expected[:, :, 1])
