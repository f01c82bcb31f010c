"""Counts at the edges of formats: against a naive count over decoded numbers, and byte by byte where a flag begins."""

from __future__ import annotations

import pytest
import torch

from bitplan.base.errors import FormatError
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode, encode
from bitplan.formats.scale_checks import (
    ScaleHealth,
    all_scales_inside,
    any_undefined_code,
    block_flags,
    every_code_is_defined,
    scale_flags,
    scale_health,
    scales_at_an_end,
)
from tests.crosses import few
from tests.formats.samples import ALL_FORMATS, SCALED_FORMATS, gaussian, heavy_tailed, per_block

# The codes that count as an end of the range, as numbers: (lowest, highest).
ENDS = {"e2m1": (-6, 6), "e4m3": (-448, 448), "e5m2": (-57344, 57344), "ternary": (-1, 1), "binary": (-1, 1)}


def ends_of(fmt):
    if fmt.name == "q4_0_gguf":
        return -8, 7
    if fmt.element.name in ENDS:
        return ENDS[fmt.element.name]
    high = 2 ** (fmt.element.bits - (not fmt.zero_point)) - 1
    return (0, high) if fmt.zero_point else (-high, high)


def codes_as_numbers(encoded):
    """[blocks, numbers] of code values, by decoding with every scale 1 and base 1."""
    one = torch.ones_like
    scales = torch.full_like(encoded.scales, 127) if encoded.fmt.power_of_two_scales else one(encoded.scales.float())
    parts = {**encoded.parts, "scales": scales.to(encoded.scales.dtype)}
    if encoded.base is not None:
        parts["base"] = torch.ones(())
    if encoded.zero_point is not None:
        parts["zero_point"] = torch.zeros_like(encoded.zero_point)
    values = decode(Encoded(encoded.fmt, encoded.shape, **parts), torch.float64)
    return per_block(encoded.fmt, values)


@pytest.mark.cross("fmt", few(SCALED_FORMATS, 14))
@pytest.mark.cross("numbers", [gaussian, heavy_tailed])
def test_codes_are_counted_as_a_naive_count_has_them(fmt, numbers):
    x = numbers(256, 256)
    x[0, :128] = 0.0
    encoded = encode(x, fmt)
    values, (low, high) = codes_as_numbers(encoded), ends_of(fmt)
    zero = 0.0 if encoded.zero_point is None else float(fmt.element.value(encoded.zero_point, torch.float64))
    if fmt.name == "binary":
        is_zero = values == -1  # which in a zero block stands for nothing
        at_end = torch.ones_like(is_zero)
    else:
        is_zero = values == zero
        at_end = ((values <= low) | (values >= high)) & ~is_zero
    some = ~is_zero.all(dim=-1, keepdim=True)
    health = scale_health(encoded)
    assert health.codes == x.numel()
    assert health.blocks == encoded.scales.numel()
    assert health.saturated_codes == int(at_end.sum())
    assert health.flushed_codes == int((is_zero & some).sum())
    assert (health.nan_scales, health.underflowed_scales, health.undefined_codes) == (0, 0, 0)
    assert not bool(any_undefined_code(encoded))


@pytest.mark.cross("fmt", ALL_FORMATS)
@pytest.mark.cross("shape", [(), (0,), (7,), (5, 0), (3, 33), (2, 3, 3, 3), (131, 130)], ids=str)
def test_filling_is_not_counted(fmt, shape):
    health = scale_health(encode(torch.ones(shape), fmt, pad="zero"))
    assert health.codes == torch.Size(shape).numel()
    assert health.flushed_codes == 0
    assert health.saturated_codes in (0, health.codes)  # ones are all the largest, or none is (casts, OCP's floor)


@pytest.mark.parametrize("fmt", [p for p in ALL_FORMATS if p.values[0].is_cast or p.values[0].block.rows == 1])
def test_pieces_add_up(fmt):
    whole = encode(heavy_tailed(8, 256), fmt)
    pieces = [Encoded(fmt, (4, 256), **_rows(whole, slice(at, at + 4))) for at in (0, 4)]
    assert scale_health(pieces[0]) + scale_health(pieces[1]) == scale_health(whole)


def _rows(encoded, rows):
    return {name: part if part.dim() == 0 else part[rows] for name, part in encoded.parts.items()}


def test_counts_of_two_formats_do_not_add_up():
    with pytest.raises(FormatError, match="mxfp4 and nvfp4"):
        ScaleHealth("mxfp4", 1, 32) + ScaleHealth("nvfp4", 1, 16)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_gguf", "mxfp8_e4m3"])
@pytest.mark.parametrize(
    ("byte", "code", "expected"),
    [
        (0, 0, ()),
        (0, 1, ("underflowed",)),
        (1, 1, ()),
        (253, 1, ()),
        (254, 1, ("saturated", "clipped")),
        (254, 0, ("saturated", "clipped")),
        (255, 0, ("nan",)),
        (255, 1, ("nan",)),
    ],
)
def test_e8m0_bytes(name, byte, code, expected):
    fmt = get_format(name)
    parts = fmt.part_shapes((2, 32))
    data = torch.zeros(parts["data"][1], dtype=torch.uint8)
    data[1, 0] = code
    scales = torch.tensor([[127], [byte]], dtype=torch.uint8)
    flags = block_flags(Encoded(fmt, (2, 32), data.view(parts["data"][0]), scales))
    for kind in ("nan", "saturated", "clipped", "underflowed"):
        assert getattr(flags, kind).flatten().tolist() == [False, kind in expected], kind


@pytest.mark.parametrize(("name", "top", "below"), [("nvfp4", 0x7E, 0x7D), ("fp4_u8_g128", 255, 254)])
@pytest.mark.parametrize("crowd", [0, 1])
def test_scales_with_a_base_are_clipped_from_half_of_the_codes_on(name, top, below, crowd):
    fmt = get_format(name)
    width = fmt.block.cols
    data = torch.zeros((3, width), dtype=torch.uint8)
    data[:, : width // 2 - 1 + crowd] = 7  # one short of half, and half
    data[0, :] = 7
    scales = torch.tensor([[below], [top], [top]], dtype=torch.uint8).view(fmt.scales.dtype)
    flags = block_flags(Encoded(fmt, (3, width), fmt.packing.pack(data), scales, torch.tensor(0.5)))
    assert flags.saturated.flatten().tolist() == [False, True, True]
    assert flags.clipped.flatten().tolist() == [False, bool(crowd), bool(crowd)]


def test_e4m3_scales_may_be_nan_and_bases_not_finite():
    fmt = get_format("nvfp4")
    data = torch.full((1, 8), 0x11, dtype=torch.uint8)
    nan = torch.tensor([[0x7F]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    assert scale_health(Encoded(fmt, (1, 16), data, nan, torch.tensor(1.0))).nan_scales == 1
    assert scale_health(Encoded(fmt, (1, 16), data, one, torch.tensor(torch.nan))).nan_scales == 1
    assert scale_health(Encoded(fmt, (1, 16), data, one, torch.tensor(torch.inf))).saturated_scales == 1
    assert scale_health(Encoded(fmt, (1, 16), data, one, torch.tensor(0.0))).underflowed_scales == 1
    assert scale_health(Encoded(fmt, (1, 16), data, one, torch.tensor(1.0))).underflowed_scales == 0


@pytest.mark.parametrize(("name", "limit"), [("q8_0_gguf", 127), ("q4_0_gguf", 8)])
def test_float16_scales_underflow_where_they_are_off_by_half_a_step(name, limit):
    """A subnormal float16 is its pattern times 2^-24: from the pattern `limit` down it is too coarse for the codes."""
    fmt = get_format(name)
    patterns = torch.tensor([0, 1, limit, limit + 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7E00], dtype=torch.int16)
    scales = patterns.view(torch.float16).reshape(-1, 1)
    for sign in (1, -1):
        data = encode(torch.ones(len(patterns), 32), fmt).data
        health = block_flags(Encoded(fmt, (len(patterns), 32), data, scales * sign))
        assert health.underflowed.flatten().tolist() == [True, True, True, *[False] * 6]
        assert health.saturated.flatten().tolist() == [*[False] * 7, True, False]
        assert health.nan.flatten().tolist() == [*[False] * 8, True]


@pytest.mark.parametrize("fmt", few([p for p in SCALED_FORMATS if not p.values[0].power_of_two_scales], 12))
def test_a_zero_scale_underflows_only_over_codes_that_are_not_zero(fmt):
    zero, ones = encode(torch.zeros(128, 128), fmt), encode(gaussian(128, 128), fmt)
    assert scale_health(zero).underflowed_scales == 0
    parts = {**ones.parts, "scales": torch.zeros_like(ones.scales.float()).to(ones.scales.dtype)}
    assert scale_health(Encoded(fmt, ones.shape, **parts)).underflowed_scales == ones.scales.numel()


@pytest.mark.parametrize("fmt", few([p for p in SCALED_FORMATS if p.values[0].storage.itemsize == 1], 12))
def test_undefined_codes_over_every_byte(fmt):
    """Of the 256 bytes, those that hold a NaN, an infinity, or ternary's fourth pattern."""
    shape = (128, 128)
    encoded = encode(torch.ones(shape), fmt)
    count = encoded.data.numel()
    data = torch.arange(count, dtype=torch.int64).remainder(256).to(torch.uint8)
    encoded = Encoded(fmt, shape, **{**encoded.parts, "data": data.view(fmt.storage).reshape(encoded.data.shape)})
    per_256 = {"e4m3": 2, "e5m2": 8, "ternary": 256}.get(fmt.element.name, 0)
    assert scale_health(encoded).undefined_codes == per_256 * count // 256
    assert bool(any_undefined_code(encoded)) == bool(per_256)
    assert every_code_is_defined(fmt) == (not per_256)


@pytest.mark.cross("fmt", few(SCALED_FORMATS, 14))
@pytest.mark.cross("base", [1.0, 0.0, torch.nan, torch.inf])
def test_bit_patterns_tell_what_the_flags_tell(fmt, base):
    """Over every pattern of 8 and 16 bits, and the edges of wider ones."""
    dtype = fmt.scales.dtype
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    if dtype.itemsize <= 2:
        patterns = torch.arange(256**dtype.itemsize).to(torch.int32).to(whole)
    else:
        special = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max], dtype=dtype)
        patterns = torch.cat([special.view(whole), torch.tensor([1, 2**22, 2**23], dtype=whole)])
    scales, factor = patterns.view(dtype), torch.tensor(base) if fmt.scales.needs_base else None
    flags = scale_flags(fmt, scales, factor)
    expected = flags.nan | flags.top | flags.bottom
    assert torch.equal(scales_at_an_end(fmt, scales, factor), expected)
    for scale, bad in zip(scales[:512].split(1), expected[:512].tolist(), strict=False):
        assert bool(all_scales_inside(fmt, scale, factor)) is not bad


def test_one_bad_ternary_field_is_seen():
    fmt = get_format("ternary")
    for byte in range(256):
        encoded = Encoded(fmt, (4,), torch.tensor([byte], dtype=torch.uint8), torch.ones(()))
        expected = sum((byte >> shift) & 3 == 2 for shift in (0, 2, 4, 6))
        assert scale_health(encoded).undefined_codes == expected, byte
        assert bool(any_undefined_code(encoded)) == bool(expected), byte


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_casts_have_codes_and_no_blocks(name):
    x = torch.tensor([1.0, 0.0, torch.inf, -torch.inf, torch.nan])
    assert scale_health(encode(x, name)) == ScaleHealth(name, 0, 5, saturated_codes=2, undefined_codes=1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_the_gpu_counts_the_same_and_waits_once(fmt):
    encoded = encode(heavy_tailed(256, 256), fmt)
    there = encoded.to("cuda")
    assert scale_health(there) == scale_health(encoded)
    if not fmt.is_cast:
        try:
            torch.cuda.set_sync_debug_mode("error")
            block_flags(there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
