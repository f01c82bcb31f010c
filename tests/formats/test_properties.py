"""Laws that hold for any numbers, searched by hypothesis; each example is given to every format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitplan.formats import get_format
from bitplan.formats.codec import decode, encode

from .samples import WITH_CODES, bits

# Absmax puts the largest magnitude back on the code it came from, so encoding again changes no number. Not so for
# scales times a base and ranges around a zero point (rounded again), nor for ternary_absmean (the mean moves).
IDEMPOTENT = [
    fmt.name for fmt in WITH_CODES if not fmt.zero_point and fmt.name not in ("nvfp4", "fp4_u8_g128", "ternary_absmean")
]
INTEGERS = [
    "int64",
    "int32",
    "int16",
    "int8",
    "int4",
    "int2",
    "ternary",
    "int8_row",
    "int8_g128",
    "int4_g32",
    "q4_0_poly",
]
SIGNED_OR_WITH_ZERO_POINT = [fmt.name for fmt in WITH_CODES if fmt.name != "binary"]

# Finite, and away from where a float16 scale becomes zero or infinite.
ordinary = st.one_of(st.just(0.0), st.just(-0.0), st.floats(2.0**-6, 2.0**12, width=32)).flatmap(
    lambda magnitude: st.sampled_from([magnitude, -magnitude])
)
vectors = st.lists(ordinary, min_size=1, max_size=40).map(torch.tensor)
any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)
any_vectors = st.lists(any_float32, min_size=1, max_size=40).map(torch.tensor)
some = settings(max_examples=10, deadline=None)


def round_trip(x: Tensor, name: str) -> Tensor:
    return decode(encode(x, name, pad="zero"), torch.float64)


@some
@given(x=vectors)
def test_encoding_again_changes_no_number(x):
    for name in IDEMPOTENT:
        once = round_trip(x, name)
        assert torch.equal(round_trip(once, name), once), name


@some
@given(x=any_vectors)
def test_integers_are_within_half_a_step(x):
    for name in INTEGERS:
        assert_within_half_a_step(name, x)


def assert_within_half_a_step(name: str, x: Tensor) -> None:
    fmt = get_format(name)
    encoded = encode(x, name, pad="zero")
    scale = fmt.scales.load(encoded.scales, None).double().reshape(-1)
    blocks = -(-len(x) // len(scale)) if fmt.block.cols is None else fmt.block.cols
    step = scale.repeat_interleave(blocks)[: len(x)]
    # A block that is zero lost less than one smallest step; products round in the working precision.
    slack = (
        torch.where(step == 0, 2.0**-126 * fmt.element.limit, 0.0) + x.double().abs() * 4 * torch.finfo(fmt.work).eps
    )
    slack = slack + x.double().abs() * (2.0**-8 if name == "int4_g32" else 0.0)  # its scale is a bfloat16
    assert bool(((decode(encoded, torch.float64) - x).abs() <= step / 2 + slack).all()), name


@some
@given(x=vectors)
def test_no_number_changes_sign(x):
    for name in SIGNED_OR_WITH_ZERO_POINT:
        assert bool((round_trip(x, name) * x.double() >= 0).all()), name


@some
@given(x=vectors)
def test_order_is_kept_inside_a_block(x):
    for fmt in WITH_CODES:
        block = x[: (fmt.block.rows or 1) * fmt.block.cols] if fmt.block.cols else x
        decoded = round_trip(block.sort().values, fmt.name)
        assert bool((decoded[1:] >= decoded[:-1]).all()), fmt.name


@some
@given(x=vectors)
def test_a_power_of_two_passes_through(x):
    """Scaling by 4 moves only the scale, whatever it is stored as."""
    for fmt in WITH_CODES:
        if fmt.element is not None and not fmt.zero_point:
            assert torch.equal(round_trip(x * 4, fmt.name), round_trip(x, fmt.name) * 4), fmt.name


@some
@given(x=vectors)
def test_symmetric_formats_mirror(x):
    for name in ("fp8_e4m3", "fp8_e5m2", "fp4", "fp8_e4m3_row", "ternary", "mxfp4", "mxfp8_e4m3", "int8"):
        assert torch.equal(round_trip(-x, name), -round_trip(x, name)), name


@some
@given(x=any_vectors)
def test_any_finite_numbers_decode_to_finite_numbers(x):
    for name in (fmt.name for fmt in WITH_CODES if fmt.rules):
        held = x.clamp(-1e5, 1e5) if name in ("q4_0_gguf", "q8_0_gguf") else x
        assert bool(decode(encode(held, name, pad="zero"), torch.float64).isfinite().all()), name


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_g32", "q4_0_gguf"])
@some
@given(x=vectors, rows=st.integers(1, 4))
def test_rows_do_not_see_each_other(name, x, rows):
    """But for a base that the whole tensor shares."""
    base = {"base": 1.0} if get_format(name).scales.needs_base else {}
    stacked = torch.stack([x * 2**row for row in range(rows)])
    whole = decode(encode(stacked, name, pad="zero", **base))
    alone = torch.stack([decode(encode(row, name, pad="zero", **base)) for row in stacked])
    assert torch.equal(bits(whole), bits(alone))
