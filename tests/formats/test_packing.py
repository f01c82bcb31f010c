"""Packing: literal bytes for each order, every byte both ways, every length, and a naive loop to agree with."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from bitplan.formats.elements import Packing

from .samples import every_byte

PACKINGS = [
    pytest.param(
        Packing(width, order, signed, offset), id=f"{width}-{order}-{'signed' if signed else 'plain'}-{offset}"
    )
    for width in (1, 2, 4)
    for order in ("low_first", "high_first", "halves")
    for signed, offset in ((False, 0), (True, 0), (True, 2 ** (width - 1)))
]


def codes_of(packing: Packing, count: int) -> list[int]:
    """Every code in turn, `count` of them."""
    lowest = -(2 ** (packing.bits - 1)) if packing.signed else 0
    return [lowest + (7 * place + place // 5) % 2**packing.bits for place in range(count)]


def packed_naively(packing: Packing, codes: list[int]) -> list[int]:
    per_byte = 8 // packing.bits
    length = -(-len(codes) // per_byte)
    packed = [0] * length
    for place, code in enumerate(codes):
        field = code + packing.offset & 2**packing.bits - 1
        byte, lane = (place % length, place // length) if packing.order == "halves" else divmod(place, per_byte)
        packed[byte] |= field << packing.bits * (per_byte - 1 - lane if packing.order == "high_first" else lane)
    return packed


@pytest.mark.parametrize(
    ("packing", "codes", "packed"),
    [
        (Packing(4, "low_first"), [1, 2, 3, 4], [0x21, 0x43]),
        (Packing(4, "high_first"), [1, 2, 3, 4], [0x12, 0x34]),
        (Packing(4, "halves"), [1, 2, 3, 4], [0x31, 0x42]),
        (Packing(4, "low_first", signed=True), [-1, 7, -8, 0], [0x7F, 0x08]),
        (Packing(4, "halves", signed=True, offset=8), [-8, 0, 7, 0], [0xF0, 0x88]),
        (Packing(4, "high_first", signed=True), [-3, 5, -8], [0xD5, 0x80]),
        (Packing(2, "high_first", signed=True), [1, 0, -1, -2, 1], [0b01_00_11_10, 0b01_00_00_00]),
        (Packing(2, "low_first"), [1, 0, 3, 2, 1], [0b10_11_00_01, 0b00_00_00_01]),
        (Packing(1, "high_first"), [1, 0, 0, 0, 0, 0, 1, 1, 1], [0b1000_0011, 0b1000_0000]),
    ],
)
def test_literal_bytes(packing, codes, packed):
    dtype = torch.int8 if packing.signed else torch.uint8
    held = packing.pack(torch.tensor(codes, dtype=dtype))
    assert held.tolist() == packed
    assert packing.unpack(held, len(codes)).tolist() == codes


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_byte_survives_unpack_and_pack(packing):
    packed = every_byte().reshape(16, 16)
    codes = packing.unpack(packed, 16 * packing.per_byte)
    assert codes.dtype == (torch.int8 if packing.signed else torch.uint8)
    assert torch.equal(packing.pack(codes), packed)


@pytest.mark.cross("packing", PACKINGS)
@pytest.mark.cross("count", [0, 1, 2, 3, 7, 8, 9, 31, 32, 33])
def test_every_length_packs_as_the_naive_loop_does(packing, count):
    codes = codes_of(packing, count)
    held = packing.pack(torch.tensor(codes, dtype=torch.int8 if packing.signed else torch.uint8))
    assert held.dtype == torch.uint8
    assert held.tolist() == packed_naively(packing, codes)
    assert packing.packed_length(count) == len(held)
    assert packing.unpack(held, count).tolist() == codes


@pytest.mark.parametrize("order", ["low_first", "high_first", "halves"])
def test_rows_are_packed_apart(order):
    packing = Packing(4, order)
    rows = torch.arange(15, dtype=torch.uint8).reshape(3, 5)
    held = packing.pack(rows)
    assert held.shape == (3, 3)
    for row in range(3):
        assert torch.equal(held[row], packing.pack(rows[row]))
    assert torch.equal(packing.unpack(held, 5), rows)


@pytest.mark.parametrize(("bits", "numpy_type"), [(4, ml_dtypes.int4), (2, ml_dtypes.int2)])
def test_signed_fields_are_twos_complement_as_in_ml_dtypes(bits, numpy_type):
    packing = Packing(bits, "low_first", signed=True)
    fields = np.arange(2**bits, dtype=np.uint8)
    held = torch.from_numpy(fields)[:, None]  # one field in the low bits of each byte
    assert packing.unpack(held, 1)[:, 0].tolist() == fields.view(numpy_type).astype(np.int8).tolist()


def test_a_strided_view_packs_as_its_copy():
    packing = Packing(4, "low_first", signed=True)
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(4).reshape(8, 8).T[::2]
    assert torch.equal(packing.pack(codes), packing.pack(codes.contiguous()))
