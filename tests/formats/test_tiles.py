"""Tiles: where a large tensor is cut must not show in any bit."""

from __future__ import annotations

import pytest
import torch

from bitplan.formats import error_report, get_format
from bitplan.formats import format as tiling
from bitplan.formats.codec import decode, encode
from tests.crosses import few

from .samples import ALL_FORMATS, FORMATS_AND_RULES, gaussian, same

# Shapes with ragged edges, and a size of tile that cuts them in many pieces.
RAGGED = [((3, 40), 8), ((1000,), 64), ((5, 129), 264), ((257, 32), 512), ((2, 7, 5, 5), 64), ((131, 130), 4096)]


@pytest.mark.cross(("shape", "tile_numbers"), RAGGED, ids=str)
@pytest.mark.cross("fmt", few(ALL_FORMATS, 16))
def test_tile_boundaries_do_not_matter(fmt, shape, tile_numbers, monkeypatch):
    x = gaussian(*shape)
    encoded = encode(x, fmt, pad="zero")
    decoded, report = decode(encoded), error_report(x, encoded)
    monkeypatch.setattr(tiling, "TILE_NUMBERS", tile_numbers)
    assert encode(x, fmt, pad="zero").to_bytes() == encoded.to_bytes()
    assert same(decode(encoded), decoded)
    assert error_report(x, encoded) == report


@pytest.mark.parametrize(("fmt", "rule"), few(FORMATS_AND_RULES, 12))
def test_tile_boundaries_do_not_matter_to_any_rule(fmt, rule, monkeypatch):
    x = gaussian(130, 20)
    whole = encode(x, fmt, scale_rule=rule, pad="zero").to_bytes()
    monkeypatch.setattr(tiling, "TILE_NUMBERS", 512)
    assert encode(x, fmt, scale_rule=rule, pad="zero").to_bytes() == whole


@pytest.mark.parametrize(
    "name", few(["int8", "int4", "binary", "uint2", "q4_0_gguf", "mxfp4", "int8_row", "fp8_e4m3_b128"], 4)
)
def test_a_tensor_larger_than_a_tile(name):
    """Against the same numbers in two halves that are each smaller than a tile."""
    fmt = get_format(name)
    x = gaussian(1100, 1024)
    assert x.numel() > tiling.TILE_NUMBERS
    zero = {"zero_point": 1} if fmt.zero_point else {}
    options = {"scale": 0.25, **zero} if fmt.block.is_tensor else {}
    whole = decode(encode(x, fmt, **options))
    halves = [decode(encode(part, fmt, **options)) for part in (x[:512], x[512:])]
    assert same(whole, torch.cat(halves))


def test_tiles_cover_each_number_once_and_hold_whole_blocks():
    for name, rows, cols in [("fp8_e4m3_b128", 700, 3000), ("mxfp4", 5000, 2880), ("int8", 1, 3 * 2**20 + 5)]:
        seen = torch.zeros(rows, cols, dtype=torch.int8)
        for tile in tiling.tiles(get_format(name), rows, cols):
            seen[tile] += 1
            assert tile[0].start % (get_format(name).block.rows or 1) == 0
            assert seen[tile].numel() <= tiling.TILE_NUMBERS
        assert bool((seen == 1).all())
    assert len(list(tiling.tiles(get_format("int8_row"), 3, tiling.TILE_NUMBERS))) == 3


def test_an_empty_matrix_has_no_tiles():
    assert list(tiling.tiles(get_format("mxfp4"), 0, 64)) == list(tiling.tiles(get_format("int8"), 1, 0)) == []


@pytest.mark.parametrize(("name", "shape"), [("mxfp4", (3, 64)), ("fp8_e4m3_b128", (130, 260)), ("nvfp4", (2, 40))])
def test_blocks_and_back(name, shape):
    fmt = get_format(name)
    x = gaussian(*shape)
    blocks = tiling.to_blocks(fmt, x)
    assert blocks.shape[1] == fmt.block.rows * fmt.block.cols
    assert same(tiling.from_blocks(fmt, blocks, *shape), x)
    assert float(blocks.double().sum()) == pytest.approx(float(x.double().sum()))  # the filling is zero
