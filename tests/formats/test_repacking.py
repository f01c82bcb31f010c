"""repack: the same codes in a twin's bytes, exactly, or a refusal that says why not."""

from __future__ import annotations

import pytest
import torch

from bitplan.base.errors import FormatError
from bitplan.formats import Encoded
from bitplan.formats.codec import decode, encode
from bitplan.formats.reencode import repack

from .samples import gaussian, heavy_tailed, same


@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 3, 96), (0, 32), (5, 0), (3, 33), ()], ids=str)
@pytest.mark.parametrize(
    ("source", "target"), [("q4_0_gguf", "q4_0_poly"), ("mxfp4", "mxfp4_gguf"), ("mxfp4_gguf", "mxfp4")]
)
def test_there_and_back_is_exact(source, target, shape):
    encoded = encode(gaussian(*shape), source, pad="zero")
    twin = repack(encoded, target)
    assert twin.fmt.name == target
    assert torch.equal(decode(twin), decode(encoded))
    assert torch.equal(twin.codes(), encoded.codes())
    assert repack(twin, source).to_bytes() == encoded.to_bytes()


def test_every_nibble_and_many_float16_scales_import_exactly():
    raw = torch.arange(256, dtype=torch.uint8).repeat(64).reshape(-1, 16)
    scales = torch.arange(len(raw), dtype=torch.int32).mul(61).to(torch.int16).view(torch.float16)
    scales = torch.where(scales.isfinite(), scales, torch.ones_like(scales))
    packed = torch.cat([scales[:, None].view(torch.uint8), raw], dim=1)
    gguf = Encoded.from_bytes("q4_0_gguf", (len(raw), 32), packed.numpy().tobytes())
    poly = repack(gguf, "q4_0_poly")
    assert torch.equal(decode(poly), decode(gguf))
    assert repack(poly, "q4_0_gguf").to_bytes() == gguf.to_bytes()


def test_every_nibble_and_scale_byte_of_mxfp4_moves_exactly():
    raw = torch.arange(256, dtype=torch.uint8).reshape(16, 16).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(16)
    mxfp4 = Encoded.from_bytes("mxfp4", (len(raw), 32), raw.numpy().tobytes() + scales.numpy().tobytes())
    ggml = repack(mxfp4, "mxfp4_gguf")
    assert torch.equal(decode(ggml), decode(mxfp4))
    assert repack(ggml, "mxfp4").to_bytes() == mxfp4.to_bytes()


def test_a_poly_block_by_hand():
    """Nibbles 2j and 2j + 1 of a byte become nibbles j and j + 16; two's complement becomes code + 8."""
    x = (torch.arange(32) % 15 - 7).float()
    gguf = repack(encode(x, "q4_0_poly"), "q4_0_gguf")
    assert gguf.to_bytes()[:2] == bytes.fromhex("003c")
    low, high = x[:16].int() + 8, x[16:].int() + 8
    assert list(gguf.to_bytes()[2:]) == (low | high << 4).tolist()


def test_scales_that_float16_rounds_are_refused_until_accepted():
    encoded = encode(gaussian(4, 64), "q4_0_poly")
    with pytest.raises(
        FormatError, match=r"8 of 8 scales of q4_0_poly do not fit torch\.float16 exactly; pass round_sc"
    ):
        repack(encoded, "q4_0_gguf")
    rounded = repack(encoded, "q4_0_gguf", round_scales=True)
    assert torch.equal(rounded.codes(), encoded.codes())
    assert same(rounded.scales, encoded.scales.half())
    before, after = decode(encoded), decode(rounded)
    assert bool(((after - before).abs() <= before.abs() * 2.0**-11).all())


def test_small_scales_round_to_float16_subnormals():
    encoded = encode(heavy_tailed(4, 64) * 1e-5, "q4_0_poly")
    after = decode(repack(encoded, "q4_0_gguf", round_scales=True))
    assert float((after - decode(encoded)).abs().max()) <= 2.0**-22


def test_a_scale_beyond_float16_is_refused_even_then():
    encoded = encode(torch.full((32,), 1e6), "q4_0_poly")
    with pytest.raises(FormatError, match="1 of 1 scales"):
        repack(encoded, "q4_0_gguf", round_scales=True)


@pytest.mark.parametrize(("source", "target"), [("mxfp4", "mxfp4_gguf"), ("mxfp4_gguf", "mxfp4")])
def test_a_scale_byte_that_the_twins_read_differently_is_refused(source, target):
    encoded = encode(torch.ones(32), source)
    encoded.scales.fill_(255)
    with pytest.raises(FormatError, match="a scale byte 255 of mxfp4"):
        repack(encoded, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [("int8", "int4"), ("q4_0_poly", "mxfp4"), ("q4_0_gguf", "q8_0_gguf"), ("int4_g32", "q4_0_poly")],
)
def test_formats_that_are_no_twins_are_refused(source, target):
    with pytest.raises(
        FormatError, match=f"{source} does not repack to {target} .*mxfp4 <-> mxfp4_gguf.*decode and enc"
    ):
        repack(encode(torch.ones(32), source), target)
