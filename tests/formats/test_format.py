"""Format's arithmetic of shapes and sizes, and Encoded: its parts, its bytes, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from bitplan.base.errors import FormatError
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode, encode
from tests.crosses import few

from .samples import ALL_FORMATS, SHAPE_PARAMS, gaussian, same


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("float32", 67_108_864),
        ("int4", 8_388_608 + 4),
        ("q4_0_poly", 10_485_760),  # 10.49 MB
        ("q4_0_gguf", 9_437_184),  # 9.44 MB
        ("q8_0_gguf", 17_825_792),
        ("mxfp4", 8_912_896),
        ("mxfp4_gguf", 8_912_896),
        ("mxfp8_e4m3", 17_301_504),
        ("nvfp4", 9_437_184 + 4),
        ("fp4_u8_g128", 8_519_680 + 4),
        ("int8_row", 16_777_216 + 4 * 4096),
        ("int8_g128", 17_301_504),
        ("int4_g32", 9_437_184),
        ("fp8_e4m3_b128", 16_777_216 + 4 * 1024),
        ("ternary", 4_194_304 + 4),
        ("binary", 2_097_152 + 4),
        ("uint8", 16_777_216 + 4 + 1),
        ("uint64", 134_217_728 + 8 + 8),
    ],
)
def test_bytes_of_a_4096_by_4096_matrix(name, nbytes):
    fmt = get_format(name)
    assert fmt.nbytes((4096, 4096)) == nbytes
    assert fmt.bits_per_weight((4096, 4096)) == pytest.approx(8 * nbytes / 4096**2)


@pytest.mark.parametrize(
    ("name", "shape", "matrix", "parts"),
    [
        ("int8", (3, 5), (1, 15), {"data": (3, 5), "scales": ()}),
        ("int4", (3, 5), (1, 15), {"data": (8,), "scales": ()}),
        ("uint2", (), (1, 1), {"data": (1,), "scales": (), "zero_point": ()}),
        ("int8_row", (4, 5, 64), (20, 64), {"data": (4, 5, 64), "scales": (4, 5, 1)}),
        ("int8_row", (7,), (1, 7), {"data": (7,), "scales": (1,)}),
        ("mxfp4", (3, 64), (3, 64), {"data": (3, 32), "scales": (3, 2)}),
        ("mxfp4", (3, 33), (3, 33), {"data": (3, 32), "scales": (3, 2)}),
        ("q8_0_gguf", (3, 33), (3, 33), {"data": (3, 64), "scales": (3, 2)}),
        ("nvfp4", (2, 3, 3, 3), (2, 27), {"data": (2, 16), "scales": (2, 2), "base": ()}),
        ("mxfp4", (2, 3, 32), (6, 32), {"data": (2, 3, 16), "scales": (2, 3, 1)}),
        ("mxfp4", (2, 3, 31), (2, 93), {"data": (2, 48), "scales": (2, 3)}),
        ("mxfp4", (), (1, 1), {"data": (16,), "scales": (1,)}),
        ("fp8_e4m3_b128", (130, 200), (130, 200), {"data": (130, 200), "scales": (2, 2)}),
        ("fp8_e4m3_b128", (3, 100, 64), (300, 64), {"data": (3, 100, 64), "scales": (3, 1)}),
        ("bfloat16", (3, 5), (1, 15), {"data": (3, 5)}),
    ],
)
def test_how_a_shape_is_laid_out(name, shape, matrix, parts):
    fmt = get_format(name)
    assert fmt.matrix_shape(shape) == matrix
    assert {part: size for part, (_, size) in fmt.part_shapes(shape).items()} == parts


@pytest.mark.cross("shape", SHAPE_PARAMS)
@pytest.mark.cross("fmt", few(ALL_FORMATS, 19))
def test_bytes_come_back_for_every_format_and_shape(fmt, shape):
    encoded = encode(gaussian(*shape), fmt, pad="zero")
    raw = encoded.to_bytes()
    assert len(raw) == encoded.nbytes == fmt.nbytes(shape) == sum(part.nbytes for part in encoded.parts.values())
    back = Encoded.from_bytes(fmt.name, shape, raw)
    assert back.parts.keys() == encoded.parts.keys()
    assert all(same(back.parts[name], part) for name, part in encoded.parts.items())
    assert same(decode(back), decode(encoded))
    assert Encoded.from_bytes(fmt, list(shape), bytearray(raw)).to_bytes() == raw


@pytest.mark.parametrize("fmt", few(ALL_FORMATS, 12))
def test_a_buffer_of_another_length_is_refused(fmt):
    size = fmt.nbytes((2, 128))
    for wrong in (size - 1, size + 1, 0):
        with pytest.raises(FormatError, match=rf"{fmt.name} of shape \(2, 128\) takes {size} bytes, got {wrong}"):
            Encoded.from_bytes(fmt, (2, 128), bytes(wrong))


def test_interleaved_bytes_start_each_block_with_its_scale():
    x = torch.cat([torch.full((32,), 7.0), torch.full((32,), -14.0)])
    raw = encode(x, "q4_0_poly").to_bytes()
    assert raw == bytes.fromhex("0000803f" + "77" * 16 + "00000040" + "99" * 16)


def test_parts_follow_one_another_otherwise():
    x = torch.cat([torch.full((32,), 6.0), torch.full((32,), -12.0)])
    assert encode(x, "mxfp4").to_bytes() == bytes.fromhex("77" * 16 + "ff" * 16 + "7f80")


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (
            {"data": torch.zeros(3, 31, dtype=torch.uint8)},
            "part 'data' must be torch.uint8 (3, 32), got torch.uint8 (3, 31)",
        ),
        ({"data": torch.zeros(3, 32, dtype=torch.int8)}, "part 'data' must be torch.uint8 (3, 32), got torch.int8"),
        ({"scales": torch.zeros(3, 2)}, "part 'scales' must be torch.uint8 (3, 2), got torch.float32 (3, 2)"),
        ({"scales": torch.zeros(6, dtype=torch.uint8)}, "got torch.uint8 (6,)"),
        ({"scales": None}, "has the parts ['data', 'scales'], got ['data']"),
        ({"base": torch.ones(())}, "has the parts ['data', 'scales'], got ['data', 'scales', 'base']"),
        ({"zero_point": torch.zeros((), dtype=torch.uint8)}, "got ['data', 'scales', 'zero_point']"),
        ({"shape": (3, 65)}, "mxfp4 of shape (3, 65): part 'data' must be torch.uint8 (3, 48)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changed, complaint):
    parts = {"data": torch.zeros(3, 32, dtype=torch.uint8), "scales": torch.zeros(3, 2, dtype=torch.uint8)}
    options = {"shape": (3, 64), **parts, **changed}
    with pytest.raises(FormatError) as refusal:
        Encoded(get_format("mxfp4"), **options)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize("fmt", few(ALL_FORMATS, 19))
def test_codes_packed_again_are_the_data(fmt):
    encoded = encode(gaussian(3, 100), fmt, pad="zero")
    codes = encoded.codes()
    if fmt.packing is None:
        assert same(codes, encoded.data)
        return
    assert codes.numel() >= 300
    assert same(fmt.packing.pack(codes).reshape(encoded.data.shape), encoded.data)


def test_codes_of_blocks_stand_in_order():
    x = torch.arange(64).reshape(2, 32) % 16 - 8
    for name in ("int4_g32", "q4_0_gguf", "q4_0_poly"):
        assert torch.equal(encode(x.float(), name, scale=1.0).codes(), x.to(torch.int8))


def test_an_encoded_moves_and_shows_itself():
    encoded = encode(gaussian(2, 32), "mxfp4")
    moved = encoded.to("cpu")
    assert moved.to_bytes() == encoded.to_bytes()
    assert moved.device == torch.device("cpu")
    assert repr(encoded) == "Encoded(mxfp4, shape=(2, 32), nbytes=34, device=cpu)"
    assert encoded != moved  # identity; the bytes say whether two hold the same


def test_an_empty_tensor_has_no_bits_per_weight():
    assert get_format("int8").bits_per_weight((0, 4)) == 0.0


@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_bits_per_weight_of_a_large_matrix_is_near_the_element(fmt):
    bits = fmt.bits_per_weight((4096, 4096))
    code_bits = fmt.storage.itemsize * 8 if fmt.packing is None else fmt.packing.bits
    assert code_bits <= bits <= code_bits + 1
    assert math.isclose(bits * 4096**2, 8 * fmt.nbytes((4096, 4096)))
