"""Requantizing against kept scales: who keeps, who is rebased, exactly where, and how large an error can get."""

from __future__ import annotations

import pytest
import torch

from bitplan.base.errors import FormatError, NonFiniteError
from bitplan.formats import get_format
from bitplan.formats.codec import decode, encode
from bitplan.formats.reencode import DriftCounts, requantize
from tests.crosses import few
from tests.formats.samples import (
    ALL_FORMATS,
    FORMATS_AND_RULES,
    SCALED_FORMATS,
    SHAPE_PARAMS,
    bits,
    gaussian,
    heavy_tailed,
    per_block,
)

BASED = ("nvfp4", "fp4_u8_g128")
BLOCK_FORMATS = [
    pytest.param(get_format(name), id=name)
    for name in ("q4_0_poly", "q4_0_gguf", "q8_0_gguf", "mxfp4", "mxfp4_gguf", "mxfp8_e4m3", "int8_g128", "int4_g32")
]
# Half the widest gap between codes, in scales; where OCP's floor rule lets numbers clip, or ggml's, by that much.
HALF_GAP = {"e2m1": 1.0, "e4m3": 16.0, "e5m2": 4096.0, "binary": 1.0}
CLIPS = {"mxfp4": 2.0, "mxfp4_gguf": 2.0, "mxfp8_e4m3": 64.0, "q4_0_gguf": 1.5}


def error_bound(fmt, scale):
    steps = CLIPS.get(fmt.name, HALF_GAP.get(fmt.element.name, 0.5))
    if fmt.scales.dtype == torch.float16:  # ggml rounds the scale after the codes
        steps += fmt.element.limit * 2.0**-11
    return scale * steps * (2 if fmt.zero_point else 1)  # a zero point is rounded too


def loaded(encoded):
    return encoded.fmt.scales.load(encoded.scales, encoded.base).double().abs().reshape(-1)


def absmax(fmt, x):
    return per_block(fmt, x.double()).abs().amax(dim=-1)


@pytest.mark.parametrize(("fmt", "rule"), few(FORMATS_AND_RULES, 12))
def test_numbers_that_did_not_change_keep_every_byte(fmt, rule):
    x = heavy_tailed(128, 256)
    encoded = encode(x, fmt, scale_rule=rule)
    again, counts = requantize(encoded, x, scale_rule=rule)
    assert again.to_bytes() == encoded.to_bytes()
    assert (counts.rebased, counts.base_rebased) == (0, False)
    assert counts.tiles == (0 if fmt.is_cast else encoded.scales.numel())


@pytest.mark.cross("fmt", ALL_FORMATS)
@pytest.mark.cross("shape", SHAPE_PARAMS)
def test_every_shape(fmt, shape):
    x = gaussian(*shape)
    encoded = encode(x, fmt, pad="zero")
    again, counts = requantize(encoded, x)
    assert again.to_bytes() == encoded.to_bytes()
    assert counts.rebased == 0


@pytest.mark.cross("fmt", few(SCALED_FORMATS, 14))
@pytest.mark.cross("factor", [2.0**12, 2.0**-24], ids=["grown", "shrunk"])
def test_rebasing_every_tile_is_a_fresh_encode_bit_for_bit(fmt, factor):
    x = gaussian(128, 256)
    encoded, moved = encode(x, fmt), x * factor
    if fmt.scales.dtype == torch.float16:
        encoded, moved = (encode(x, fmt), x * 100) if factor > 1 else (encode(x * 1000, fmt), x)
    again, counts = requantize(encoded, moved)
    assert again.to_bytes() == encode(moved, fmt).to_bytes()
    misfits = counts.saturated if factor > 1 else counts.underflowed
    assert counts == DriftCounts(
        counts.tiles,
        saturated=misfits if factor > 1 else 0,
        underflowed=0 if factor > 1 else misfits,
        rebased=encoded.scales.numel(),
        base_rebased=fmt.name in BASED,
    )
    assert misfits == counts.tiles == encoded.scales.numel()


@pytest.mark.parametrize("fmt", few(BLOCK_FORMATS, 4))
@pytest.mark.parametrize(("factor", "kind"), [(16.0, "saturated"), (1 / 16, "underflowed")])
def test_only_the_tile_that_moved_is_rebased(fmt, factor, kind):
    x = gaussian(4, 256)
    encoded, moved = encode(x, fmt), x.clone()
    width = fmt.block.cols
    moved[1, width : 2 * width] *= factor
    again, counts = requantize(encoded, moved)
    assert counts == DriftCounts(encoded.scales.numel(), **{kind: 1}, rebased=1)
    fresh = encode(moved, fmt)
    changed = bits(again.scales).reshape(encoded.scales.numel(), -1) != bits(encoded.scales).reshape(
        encoded.scales.numel(), -1
    )
    assert changed.any(dim=-1).nonzero().flatten().tolist() == [256 // width + 1]
    assert again.to_bytes() == fresh.to_bytes()  # the others are as they were, and a fresh encode gives the same


@pytest.mark.parametrize("fmt", few(BLOCK_FORMATS, 4))
@pytest.mark.parametrize(
    ("of_limit", "fits"), [("high", True), ("above", False), ("half", True), ("below", False), ("zero", True)]
)
def test_where_a_scale_stops_fitting(fmt, of_limit, fits):
    """Scale 1: numbers up to the end of what rounding keeps within the codes, down to half of the largest code."""
    limit, high = fmt.element.limit, max(fmt.element.clip_high, -fmt.element.clip_low if fmt.name == "q4_0_gguf" else 0)
    half = limit / 2
    if fmt.power_of_two_scales:  # OCP: absmax in [4, 8) or [256, 512) has scale 1
        power = 2.0 ** torch.frexp(torch.tensor(limit)).exponent.item()
        limit, high, half = power / 2, power * (1 - 2.0**-20), power / 4
    if fmt.name == "q8_0_gguf":
        high = 127.5
    edges = {"high": high, "above": high * (1 + 1e-6), "half": half, "below": half * (1 - 1e-6), "zero": 0.0}
    x = torch.zeros(1, fmt.block.cols)
    x[0, 3] = limit
    encoded = encode(x, fmt)
    assert loaded(encoded).tolist() == [1.0]
    moved = torch.zeros_like(x)
    moved[0, 3] = edges[of_limit]
    again, counts = requantize(encoded, moved)
    assert counts.rebased == (not fits)
    assert (counts.saturated, counts.underflowed) == (of_limit == "above", of_limit == "below")
    if fits:
        assert torch.equal(bits(again.scales), bits(encoded.scales))


@pytest.mark.parametrize(("extreme", "rebased"), [(7.5, 0), (7.6, 1)])
def test_q4_0_has_less_room_on_the_side_of_code_7(extreme, rebased):
    """The scale's sign puts the extreme on -8; one of the other sign meets the end of the codes at 7.5."""
    x = torch.zeros(1, 32)
    x[0, 0] = 8.0
    encoded = encode(x, "q4_0_gguf")
    assert requantize(encoded, -x * extreme / 8)[1].rebased == rebased


@pytest.mark.cross("fmt", few(SCALED_FORMATS, 16))
@pytest.mark.cross(("least", "most"), [(0.2, 2.8), (0.05, 1.0)])
def test_errors_stay_within_the_bound(fmt, least, most):
    """Kept or rebased: half a gap of the stored scale, which is at most twice a fresh one."""
    x = gaussian(256, 256)
    width = fmt.block.cols or 256
    drift = torch.rand(256, 256 // width, generator=torch.Generator().manual_seed(1)) * (most - least) + least
    moved = x * drift.repeat_interleave(width, dim=1)
    again, counts = requantize(encode(x, fmt), moved)
    error, stored, fresh = absmax(fmt, moved - decode(again, torch.float64)), loaded(again), loaded(encode(moved, fmt))
    rounding = 4 * torch.finfo(fmt.work).eps * absmax(fmt, moved)  # of the arithmetic itself, seen from 16 bits on
    bound = error_bound(fmt, stored)
    if fmt.name == "ternary_absmean" or fmt.name in BASED:  # clips on purpose; a stored step is off by half of itself
        bound = torch.maximum(bound, absmax(fmt, moved) - fmt.element.limit * stored)
    else:
        assert bool((error <= 2 * error_bound(fmt, fresh) * (1 + 1e-3) + rounding).all())
    assert bool((error <= bound + rounding).all())
    if fmt.name not in BASED:
        assert bool((stored <= 2 * fresh * (1 + 1e-3)).all())
    if fmt.block.rows == 1 and fmt.block.cols and not counts.base_rebased:
        assert 0 < counts.rebased < counts.tiles
    if fmt.name in BASED:
        assert counts.base_rebased is (most > 1)


@pytest.mark.parametrize("fmt", few([p for p in SCALED_FORMATS if p.values[0].name not in BASED], 12))
def test_a_rebased_tile_is_that_of_a_fresh_encode_and_a_kept_one_has_its_old_scale(fmt):
    x = gaussian(256, 256)
    moved = x * torch.linspace(0.1, 4, 256).unsqueeze(1)
    encoded = encode(x, fmt)
    again, counts = requantize(encoded, moved)
    old, new, fresh = (loaded(one) for one in (encoded, again, encode(moved, fmt)))
    stored = new == old
    assert bool((stored | (new == fresh)).all())
    assert int((~stored).sum()) == counts.rebased


@pytest.mark.parametrize("fmt", few(SCALED_FORMATS, 12))
def test_zeros_fit_any_scale_but_binary(fmt):
    encoded = encode(gaussian(128, 128), fmt)
    again, counts = requantize(encoded, torch.zeros(128, 128))
    assert torch.equal(decode(again), torch.zeros(128, 128))
    assert counts.rebased == (fmt.name == "binary")


@pytest.mark.parametrize("fmt", few(SCALED_FORMATS, 12))
def test_a_zero_tensor_gets_scales_when_it_grows(fmt):
    x = gaussian(128, 128)
    again, counts = requantize(encode(torch.zeros(128, 128), fmt), x)
    assert again.to_bytes() == encode(x, fmt).to_bytes()
    assert counts.saturated == counts.rebased == counts.tiles


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int8_row", "q8_0_gguf"])
def test_damaged_scales_are_mended(name):
    x = gaussian(4, 128)
    encoded = encode(x, name)
    raw = encoded.scales.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[encoded.scales.itemsize])
    raw[1] = {1: 0x7F if name == "nvfp4" else 0xFF, 2: 0x7E00, 4: 0x7FC00000}[encoded.scales.itemsize]
    again, counts = requantize(encoded, x)
    assert counts.rebased == counts.saturated == encoded.scales[1].numel()
    assert again.to_bytes() == encode(x, name).to_bytes()


# ---- bases -----------------------------------------------------------------------------------------------------------


def uint8_tile(*limits):
    """A row of fp4_u8_g128 blocks with these fresh scales: block i has the largest magnitude 6 x limits[i]."""
    x = torch.zeros(1, 128 * len(limits))
    for block, limit in enumerate(limits):
        x[0, 128 * block] = 6 * limit
    return x


@pytest.mark.parametrize(
    ("limits", "moves"),
    [
        ((255.0, 1.0), False),
        ((297.5, 1.0), False),  # 255 x 7/6: the largest number still rounds to a code
        ((297.6, 1.0), True),
        ((127.0, 0.5), False),  # half a step is stored as one, twice what was wanted
        ((127.0, 0.49), True),
        ((127.5, 0.49), True),  # the base has a factor of two to give
        ((127.6, 0.49), False),
        ((10.0, 1.0), False),  # smaller all over, and every scale is still a whole step
    ],
)
def test_where_the_base_moves_uint8(limits, moves):
    encoded = encode(uint8_tile(255.0, 255.0), "fp4_u8_g128", base=1.0)
    again, counts = requantize(encoded, uint8_tile(*limits))
    assert counts.base_rebased is moves
    assert counts.rebased == (2 if moves else int((again.scales != encoded.scales).sum()))
    if moves:
        assert again.to_bytes() == encode(uint8_tile(*limits), "fp4_u8_g128").to_bytes()
    else:
        assert float(again.base) == 1.0


@pytest.mark.parametrize(
    ("limits", "moves"),
    [
        ((448.0, 1.0), False),
        ((522.66, 1.0), False),
        ((522.7, 1.0), True),
        ((224.0, 2.0**-10 * 1.001), False),
        ((224.0, 2.0**-10), True),  # rounds to zero: the block would vanish
        ((225.0, 2.0**-10), False),  # it does, but the base has nothing to give
    ],
)
def test_where_the_base_moves_e4m3(limits, moves):
    def row(*sizes):
        x = torch.zeros(1, 32)
        x[0, 0], x[0, 16] = 6 * sizes[0], 6 * sizes[1]
        return x

    encoded = encode(row(448.0, 448.0), "nvfp4", base=1.0)
    again, counts = requantize(encoded, row(*limits))
    assert counts.base_rebased is moves
    if moves:
        assert again.to_bytes() == encode(row(*limits), "nvfp4").to_bytes()


# ---- unsigned formats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [
        (-100.0, 155.0, None),
        (-100.0, 155.5, None),
        (-100.0, 156.5, "saturated"),
        (-101.0, 155.0, "saturated"),
        (-50.0, 77.5, None),  # exactly half of the range
        (-50.0, 77.4, "underflowed"),
    ],
)
def test_uint8_keeps_scale_and_zero_point_while_the_range_fits(low, high, kind):
    encoded = encode(torch.tensor([-100.0, 155.0, 3.0]), "uint8")
    assert (float(encoded.scales), int(encoded.zero_point)) == (1.0, 100)
    moved = torch.tensor([low, high, 3.0])
    again, counts = requantize(encoded, moved)
    expected = {} if kind is None else {kind: 1}
    assert counts == DriftCounts(1, **expected, rebased=len(expected))
    if kind is None:
        assert (float(again.scales), int(again.zero_point)) == (1.0, 100)
        assert float((decode(again) - moved).abs().max()) <= 0.5
    else:
        assert again.to_bytes() == encode(moved, "uint8").to_bytes()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_refusals():
    encoded, spoiled = encode(gaussian(4, 64), "mxfp4"), gaussian(4, 64)
    spoiled[2, 5] = torch.nan
    with pytest.raises(
        FormatError, match=r"up.weight: the encoding is \(4, 64\) on cpu, the new numbers are \(4, 32\)"
    ):
        requantize(encoded, torch.zeros(4, 32), name="up.weight")
    with pytest.raises(NonFiniteError, match="1 NaN and 0 infinite of 256"):
        requantize(encoded, spoiled)
    with pytest.raises(FormatError, match="has no scale rule 'best'"):
        requantize(encoded, torch.zeros(4, 64), scale_rule="best")
    with pytest.raises(FormatError, match="expected a float tensor"):
        requantize(encoded, torch.zeros(4, 64, dtype=torch.int32))


def test_a_scale_that_fits_no_float16_is_refused_as_in_encode():
    encoded = encode(gaussian(1, 32), "q8_0_gguf")
    with pytest.raises(FormatError, match="1 of 1 scales of q8_0_gguf overflow"):
        requantize(encoded, torch.full((1, 32), 1e8))


def test_the_encoding_itself_is_left_alone():
    encoded = encode(gaussian(4, 64), "nvfp4")
    before = encoded.to_bytes()
    requantize(encoded, gaussian(4, 64, seed=9) * 100)
    assert encoded.to_bytes() == before


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_the_gpu_requantizes_to_the_same_bytes(fmt):
    x = gaussian(256, 256)
    moved = x * torch.linspace(0.1, 4, 256).unsqueeze(1)
    encoded = encode(x, fmt)
    here, there = requantize(encoded, moved), requantize(encoded.to("cuda"), moved.cuda())
    assert here[0].to_bytes() == there[0].to_bytes()
    assert here[1] == there[1]
